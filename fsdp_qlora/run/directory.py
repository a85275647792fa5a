"""The output directory of a run: claiming it, train_config.json and the tokenizer.

Checkpoints in it are in checkpoints.py, metrics in metrics.py; merge/trained_run.py reads it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp_qlora.config import VERSION, Config
from fsdp_qlora.data.tokenizer_files import generation_settings, write_tokenizer
from fsdp_qlora.files import (
    ADAPTER_FILES, ADAPTER_WEIGHTS, as_json, digest, put_in_place, read_json, remove,
    json_digest, write_atomic)
from fsdp_qlora.log import log
from fsdp_qlora.model.load import LoadResult
from fsdp_qlora.ranks import RunEnd, is_rank_0, on_rank_0, raise_on_all_ranks
from fsdp_qlora.run.base_model import BaseModelInfo
from fsdp_qlora.run.run import Run
from fsdp_qlora.run.run_results import DIGESTED_FILES, QUANTIZATION
from fsdp_qlora.run.status import Status


@contextlib.contextmanager
def open_output_dir(
    config: Config, user_config: Config, status: Status
) -> Iterator[tuple[Path, bool]]:
    """Yield the output directory, locked, and whether the run in it is complete; log both.

    If the run ends by a RunEnd before train_config.json is written, everything that this start
    has made is removed again, and nothing else. All ranks must call this and must see the
    directory.
    """
    directory = Path(config.output_dir or "")

    def claim_and_judge() -> tuple[str, list[str], bool, bool]:
        train_config = read_json(directory / "train_config.json", {})
        holder, made = claim_directory(config, directory, train_config, status)
        is_complete, may_write = judge_run(config, user_config, directory, train_config)
        if not is_complete:
            remove_torn_files(directory)
        return holder, made, is_complete, may_write

    holder, made, is_complete, may_write_status = on_rank_0(claim_and_judge)
    status.directory, status.may_write = directory, may_write_status
    if not user_config.output_dir:
        status.how_to_resume = f"the same command with --output_dir {directory} resumes it"
    try:
        with raise_on_all_ranks():
            status.lock.check_visible(directory, holder)
        log(f"output: {directory}" if not is_complete else
            f"{directory} is already complete; nothing to do. To train further: --init_adapter"
            f" {directory} and a new --output_dir")
        yield directory, is_complete
    except RunEnd:
        is_begun = status.phase in ("saving", "training")
        if is_rank_0() and made and not (is_begun or status.lock.is_lost()):
            for name in ("status.json", *["demo"] * (not config.model), ".lock"):
                remove(directory / name)
            with contextlib.suppress(OSError):  # not empty: other files, or another run
                for path in made:
                    os.rmdir(path)
        raise


def claim_directory(config: Config, directory: Path, train_config: dict[str, Any],
                    status: Status) -> tuple[str, list[str]]:
    """Make and lock the directory. `train_config`: its train_config.json, or {}. Returns the lock's
    holder, as in .lock, and the directories that were made. Raises ValueError. Rank 0 only."""
    made = [str(p) for p in (directory, *directory.parents) if not p.exists()]
    if not train_config:
        refuse_inputs(config, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        holder = status.lock.take(directory, directory)
    except OSError as e:
        raise ValueError(f"--output_dir {directory}: cannot be created: {e}. Use another directory")
    return holder, made


def judge_run(config: Config, user_config: Config, directory: Path,
              train_config: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the run that `train_config` describes is this one and complete; and whether
    status.json may be written, because it is not another run's. Raises ValueError if the directory
    cannot be used. Rank 0 only."""
    used = [*directory.glob("adapter_*"), *directory.glob("checkpoint-*")]
    if used and not train_config or train_config and config.resume == "never":
        way_out = ("--resume must to resume it" if train_config else "start from its adapter with"
                   " --init_adapter: its train_config.json is damaged or missing")
        raise ValueError(f"--output_dir {directory} already contains a run. Use another directory,"
                         f" or {way_out}")
    is_own = train_config.get("flags") == as_json(flags_of(user_config))
    state = read_json(directory / "status.json", {}).get("state")
    is_complete = is_own and state == "complete" and has_adapter(directory, train_config)
    return is_complete, not is_complete and (is_own or not train_config)


def remove_torn_files(directory: Path) -> None:
    """Remove what a run has left that ended while it was saving. Rank 0 only."""
    for torn in directory.glob(".checkpoint-*"):
        shutil.rmtree(torn, ignore_errors=True)
    for torn in directory.glob(".status.*"):
        torn.unlink()


def refuse_inputs(config: Config, directory: Path) -> None:
    """Raise ValueError if --output_dir is also an input of the run."""
    for flag in "model", "dataset", "eval_dataset":
        values = getattr(config, flag) or ()
        for value in [values] if isinstance(values, str) else values:
            if Path(value.partition(",")[0]).resolve() == directory.resolve():
                raise ValueError(f"--output_dir {directory} is what --{flag} names, and a run in it"
                                 " would overwrite that. Use another directory")


def has_adapter(directory: Path, train_config: dict[str, Any]) -> bool:
    """Return True if a run's adapter exists and has the SHA-256 that its train_config.json,
    `train_config`, records. Logs a line if it has another one."""
    adapter = directory / ADAPTER_WEIGHTS
    if not all((directory / name).is_file() for name in ADAPTER_FILES):
        return False
    if train_config.get("adapter_sha256") == digest(adapter):
        return True
    log(f"warning: {adapter} has another SHA-256 than when it was written; it is saved again from"
        " the last checkpoint")
    return False


def flags_of(user_config: Config) -> dict[str, Any]:
    """Return the flags that decide what a run does."""
    flags = dataclasses.asdict(user_config)
    return {name: value for name, value in flags.items() if name not in ("resume", "output_dir")}


def write_train_config(run: Run, user_config: Config, loaded: LoadResult,
                       versions: dict[str, str]) -> None:
    """Write train_config.json, which has everything that a merge needs. Rank 0 only.

    A resumed run keeps two things from before: the SHA-256 of an existing adapter, and the library
    versions with which the earlier steps were trained.
    """
    run.status.check_lock()
    job, config, path = run.job, run.config, run.directory / "train_config.json"
    old_train_config = read_json(path, {}) if run.saved_step else {}
    kept = {key: old_train_config[key] for key in ("earlier_versions",) if key in old_train_config}
    if (before := old_train_config.get("versions", versions)) != versions:
        changed = [f"{library} {before.get(library)} -> {version}"
                   for library, version in versions.items() if version != before.get(library)]
        log(f"changed on resume: {', '.join(changed)} (from step {run.saved_step})")
        kept["earlier_versions"] = [*kept.get("earlier_versions", []),
                                    {"until_step": run.saved_step, **before}]
    train_config = {
        "flags": flags_of(user_config),
        "config": dataclasses.asdict(config),
        **job.digests,
        "plan": dataclasses.asdict(run.plan),
        "base_model": (str(job.weights_dir.resolve())
                       if Path(config.model or job.weights_dir).is_dir() else config.model),
        "quantization": {
            **QUANTIZATION,
            "quantized_from_dtype": config.compute_dtype,
            "prequantized": loaded.prequantized,  # the base's own bytes
            "device": run.device.type,
            "tensor_sums": loaded.checksums,  # {tensor: tensor_checksum()}: tell bases apart
        },
        "world_size": dist.get_world_size(),
        "date": job.template_date,
        "trainable_token_ids": [*run.adapter.token_ids],
        # see how_to_prompt()
        "template_kwargs": [{"answers": n, "chat_template_kwargs": json.loads(kwargs)}
                            for kwargs, n in run.rows.template_kwargs.items()],
        "version": VERSION,
        "versions": versions,
        **kept,
        "probe_input_ids": run.merge_check.input_ids}
    train_config["sha256"] = json_digest(train_config)
    train_config |= {
        key: old_train_config[key] for key in DIGESTED_FILES if key in old_train_config}
    write_atomic(path, json.dumps(train_config, indent=2))


def save_tokenizer(directory: Path, weights_dir: Path, base: BaseModelInfo) -> None:
    """Write the tokenizer, if there is one, and generation_config.json, which makes generation stop
    where a turn ended in training. Rank 0 only."""
    if not (tokenizer := base.tokenizer):
        return
    # not directly into the run's directory, where files may be links, see open_no_follow()
    remove(hidden := directory / ".tokenizer.part")
    hidden.mkdir()
    write_tokenizer(hidden, weights_dir, tokenizer, base.has_new_tokens)
    # left by an earlier start; a directory can only replace an empty one
    remove(directory / "additional_chat_templates")
    for name in {"chat_template.jinja", "chat_template.json"} - {*os.listdir(hidden)}:
        remove(directory / name)
    for file in hidden.iterdir():
        put_in_place(file, directory / file.name)
    hidden.rmdir()
    settings, closing = generation_settings(weights_dir, tokenizer)
    own = weights_dir / "generation_config.json"
    text = own.read_text() if own.is_file() and not closing else json.dumps(settings, indent=2)
    if closing:
        log(f"note: generation also stops at {' and '.join(map(repr, closing))}, which ends a turn"
            f" (generation_config.json in {directory})")
    write_atomic(directory / "generation_config.json", text)
