"""The output directory: its lock, train_config.json, and what a merge reads.

Checkpoints in it are in checkpoints.py, metrics in metrics.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import VERSION, Config
from fsdp_qlora.data.tokenizer import generation_settings, write_tokenizer
from fsdp_qlora.files import (
    as_json, digest, put_in_place, read_json, read_records, remove, sync_file, text_digest,
    write_whole)
from fsdp_qlora.lora.peft_files import ADAPTER_FILES
from fsdp_qlora.model.load import Loaded
from fsdp_qlora.quant.blocks import BLOCK, NESTED_BLOCK
from fsdp_qlora.ranks import RunError, is_rank_0, log, on_rank_0, raise_on_all_ranks, this_rank
from fsdp_qlora.run.state import Run
from fsdp_qlora.run.status import Status


MERGE_CHECK_FILE = "probe.safetensors"  # inputs of the lm_head for a few rows, see MergeCheck
# {name of the SHA-256 in train_config.json: a file that a run writes when it ends}
RESULTS = {"adapter_sha256": "adapter_model.safetensors", "probe_sha256": MERGE_CHECK_FILE}
MERGEABLE = {  # keys of train_config.json that a merge needs: a regex that their JSON must match
    "base_model": '".+"', "probe_input_ids": r"\[(\[\d[\d, ]*\](, )?)+\]",
    "config.lora_rank": r"[1-9]\d{0,8}", "config.lora_alpha": r"[1-9]\d{0,8}",
    "config.adapter": '"(lora|rslora|dora)"', "config.random_weights": "false",
    "config.target_modules": r'\["[^"]+"(, "[^"]+")*\]',
    "quantization.quant_type": '"nf4"', "quantization.blocksize": f"{BLOCK}",
    "quantization.double_quant": "true", "quantization.nested_blocksize": f"{NESTED_BLOCK}",
    "quantization.quantized_from_dtype": '"(bfloat16|float16|float32)"',
    "quantization.prequantized": "true|false", "quantization.device": '"(cpu|cuda)"',
    "quantization.tensor_sums": r'\{("[^"]+": "[\da-f]{16}"(, )?)*\}',
    "base_sha256": r'"[\da-f]{64}"'}


@contextlib.contextmanager
def open_output(config: Config, user_config: Config, status: Status) -> Iterator[tuple[Path, bool]]:
    """Yield the output directory, locked, and whether the run in it is complete; log both.

    If the run ends by a RunError before train_config.json is written, everything that this start
    has made is removed again, and nothing else. All ranks must call this and must see the
    directory.
    """
    directory = Path(config.output_dir or "")

    def claim_and_find() -> tuple[str, list[str], bool, bool]:
        saved_config = read_json(directory / "train_config.json", {})
        claimed = claim_directory(config, directory, saved_config, status)
        return *claimed, *find_run(config, user_config, directory, saved_config)

    holder, made, is_complete, may_write_status = on_rank_0(claim_and_find)
    status.directory, status.may_write = directory, may_write_status
    if not user_config.output_dir:
        status.how_to_resume = f"the same command with --output_dir {directory} resumes it"
    try:
        with raise_on_all_ranks():
            if not (path := directory / ".lock").is_file() or path.read_text() != holder:
                raise ValueError(f"--output_dir {directory}: {this_rank()} does not see the {path}"
                                 " that rank 0 wrote. Use a directory that all nodes share")
            status.lock = os.lstat(path)
        log(f"output: {directory}" if not is_complete else
            f"{directory} is already complete; nothing to do. To train further: --init_adapter"
            f" {directory} and a new --output_dir")
        yield directory, is_complete
    except RunError:
        is_begun = status.phase in ("saving", "training")
        if is_rank_0() and made and not (is_begun or status.has_lost_directory()):
            for name in ("status.json", *["demo"] * (not config.model), ".lock"):
                remove(directory / name)
            with contextlib.suppress(OSError):  # not empty: other files, or another run
                for path in made:
                    os.rmdir(path)
        raise


def claim_directory(config: Config, directory: Path, saved_config: dict[str, Any],
                    status: Status) -> tuple[str, list[str]]:
    """Make and lock the directory. `saved_config`: its train_config.json, or {}. Returns the lock's
    holder, as in .lock, and the directories that were made. Raises ValueError. Rank 0 only."""
    made = [str(p) for p in (directory, *directory.parents) if not p.exists()]
    if not saved_config:
        refuse_inputs(config, directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        status.lock_fd, holder = lock(directory / ".lock", directory)
    except OSError as e:
        raise ValueError(f"--output_dir {directory}: cannot be created: {e}. Use another directory")
    return holder, made


def find_run(config: Config, user_config: Config, directory: Path,
             saved_config: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether the run that `saved_config` describes is this one and complete; and whether
    status.json may be written, because it is not another run's. If the run is not complete,
    incomplete files are removed. Raises ValueError if the directory cannot be used. Rank 0 only."""
    used = [*directory.glob("adapter_*"), *directory.glob("checkpoint-*")]
    if used and not saved_config or saved_config and config.resume == "never":
        way_out = ("--resume must to resume it" if saved_config else "start from its adapter with"
                   " --init_adapter: its train_config.json is damaged or missing")
        raise ValueError(f"--output_dir {directory} already contains a run. Use another directory,"
                         f" or {way_out}")
    is_own = saved_config.get("flags") == as_json(flags_of(user_config))
    state = read_json(directory / "status.json", {}).get("state")
    is_complete = is_own and state == "complete" and has_adapter(directory, saved_config)
    if not is_complete:
        for torn in directory.glob(".checkpoint-*"):  # left by a run that ended while saving
            shutil.rmtree(torn, ignore_errors=True)
        for torn in directory.glob(".status.*"):
            torn.unlink()
    return is_complete, not is_complete and (is_own or not saved_config)


def refuse_inputs(config: Config, directory: Path) -> None:
    """Raise ValueError if --output_dir is also an input of the run."""
    for flag in "model", "dataset", "eval_dataset":
        values = getattr(config, flag) or ()
        for value in [values] if isinstance(values, str) else values:
            if Path(value.partition(",")[0]).resolve() == directory.resolve():
                raise ValueError(f"--output_dir {directory} is what --{flag} names, and a run in it"
                                 " would overwrite that. Use another directory")


def has_adapter(directory: Path, saved_config: dict[str, Any]) -> bool:
    """Return True if a run's adapter exists and has the SHA-256 that its train_config.json,
    `saved_config`, records. Logs a line if it has another one."""
    adapter = directory / "adapter_model.safetensors"
    if not all((directory / name).is_file() for name in ADAPTER_FILES):
        return False
    if saved_config.get("adapter_sha256") == digest(adapter):
        return True
    log(f"warning: {adapter} has another SHA-256 than when it was written; it is saved again from"
        " the last checkpoint")
    return False


def lock(path: Path, directory: Path) -> tuple[int, str]:
    """Lock the file `path` until it is closed, and write into it which process has locked it.
    Returns its descriptor and that text. Raises ValueError if another process uses the directory.
    flock works between nodes on NFS 4 and on Lustre with -o flock. Rank 0 only."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)  # the other process may have just begun, and is still writing the text
        holder = os.pread(fd, 200, 0).decode(errors="replace")
        os.close(fd)
        raise ValueError(f"--output_dir {directory}: in use by"
                         f" {holder or 'a process that is starting'}. Wait for it, or use another"
                         " directory")
    except OSError as e:
        log(f"warning: --output_dir {directory}: its file system has no locks ({e.strerror}), so"
            " two runs in it at once will not be noticed")
    holder = (f"process {os.getpid()} on {socket.gethostname()} since"
              f" {time.strftime('%Y-%m-%d %H:%M:%S')}")
    os.ftruncate(fd, 0)
    os.pwrite(fd, holder.encode(), 0)
    os.fsync(fd)  # other nodes read it
    return fd, holder


def open_partial(output: Path) -> tuple[Path, int]:
    """Return an empty hidden directory that becomes `output` once everything is written, and the
    descriptor of its .lock, which this process has locked. Raises ValueError."""
    target = output.resolve()
    if target.is_mount():
        raise ValueError(f"--output_dir {output}: is a mount point. Use a new directory inside it")
    partial, is_locked = target.with_name(f".{target.name}.partial"), False
    while not is_locked:
        if partial.is_symlink():  # would lead to files that no merge has written
            partial.unlink()
        with contextlib.suppress(FileExistsError):
            partial.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            fd, _ = lock(path := partial / ".lock", output)
            is_locked = os.path.samestat(os.stat(path), os.fstat(fd))
    for old in {*partial.iterdir()} - {path}:  # left by a process that died
        remove(old)
    return partial, fd


@dataclasses.dataclass
class NewDirectory:
    """A directory made by new_directory()."""

    path: Path
    is_whole: bool = False  # True: keep it even if a later step fails


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[NewDirectory]:
    """Yield a hidden, locked NewDirectory, which becomes `output` when the `with` body ends. If the
    body raises, it is removed, unless is_whole is set."""
    partial, lock_fd = open_partial(output)
    new = NewDirectory(partial)
    with os.fdopen(lock_fd):
        try:
            if output.exists() and any(output.iterdir()):
                raise ValueError(f"--output_dir {output}: already exists and is not empty. Use a"
                                 " new directory")
            yield new
            new.path = partial.replace(output.resolve())
        except BaseException:
            if not new.is_whole:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        finally:  # not before: another merge would think that this one has died
            (new.path / ".lock").unlink(missing_ok=True)
    sync_file(new.path.parent)


def flags_of(user_config: Config) -> dict[str, Any]:
    """Return the flags that decide what a run does."""
    flags = dataclasses.asdict(user_config)
    return {name: value for name, value in flags.items() if name not in ("resume", "output_dir")}


def describe_run(run: Run, user_config: Config, base: Path, loaded: Loaded,
                 template_date: str, versions: dict[str, str]) -> None:
    """Write train_config.json, which has everything that a merge needs. Rank 0 only.

    A resumed run keeps two things from before: the SHA-256 of an existing adapter, and the library
    versions with which the earlier steps were trained.
    """
    run.status.check_lock()
    config, path = run.config, run.directory / "train_config.json"
    saved_config = read_json(path, {}) if run.saved_step else {}
    kept = {key: saved_config[key] for key in ("earlier_versions",) if key in saved_config}
    if (before := saved_config.get("versions", versions)) != versions:
        changed = [f"{library} {before.get(library)} -> {version}"
                   for library, version in versions.items() if version != before.get(library)]
        log(f"changed on resume: {', '.join(changed)} (from step {run.saved_step})")
        kept["earlier_versions"] = [*kept.get("earlier_versions", []),
                                    {"until_step": run.saved_step, **before}]
    described = {
        "flags": flags_of(user_config),
        "config": dataclasses.asdict(config),
        **run.digests,
        "plan": dataclasses.asdict(run.plan),
        "base_model": str(base.resolve()) if Path(config.model or base).is_dir() else config.model,
        "quantization": {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "double_quant": True,
            "nested_blocksize": NESTED_BLOCK,
            "quantized_from_dtype": config.compute_dtype,
            "prequantized": loaded.prequantized,  # the base's own bytes
            "device": run.device.type,
            "tensor_sums": loaded.sums,  # {tensor: content_sum()}: tell bases apart
        },
        "world_size": dist.get_world_size(),
        "date": template_date,
        "trainable_token_ids": [*run.adapter.token_ids],
        "asked": [{"answers": n, "chat_template_kwargs": json.loads(kwargs)}
                  for kwargs, n in run.rows.template_kwargs.items()],  # see how_to_prompt()
        "version": VERSION,
        "versions": versions,
        **kept,
        "probe_input_ids": run.merge_check.input_ids}
    described["sha256"] = text_digest(described)
    described |= {key: saved_config[key] for key in RESULTS if key in saved_config}
    write_whole(path, json.dumps(described, indent=2))


def save_tokenizer(directory: Path, base: Path, tokenizer: PreTrainedTokenizerFast | None,
                   has_new_tokens: bool) -> None:
    """Write the tokenizer, if there is one, and generation_config.json, which makes generation stop
    where a turn ended in training. Rank 0 only."""
    if not tokenizer:
        return
    # not directly into the run's directory, because writing would follow links
    remove(hidden := directory / ".tokenizer.part")
    hidden.mkdir()
    write_tokenizer(hidden, base, tokenizer, has_new_tokens)
    # left by an earlier start; a directory can only replace an empty one
    remove(directory / "additional_chat_templates")
    for name in {"chat_template.jinja", "chat_template.json"} - {*os.listdir(hidden)}:
        remove(directory / name)
    for file in hidden.iterdir():
        put_in_place(file, directory / file.name)
    hidden.rmdir()
    settings, closing = generation_settings(base, tokenizer)
    own = base / "generation_config.json"
    text = own.read_text() if own.is_file() and not closing else json.dumps(settings, indent=2)
    if closing:
        log(f"note: generation also stops at {' and '.join(map(repr, closing))}, which ends a turn"
            f" (generation_config.json in {directory})")
    write_whole(directory / "generation_config.json", text)


def find_train_config(directory: Path) -> Path:
    """Return the path of the train_config.json of a run, or of the run that contains a checkpoint;
    it may not exist."""
    path = directory / "train_config.json"
    return path if path.is_file() else directory.resolve().parent / path.name


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """The part of a run that a merge needs."""

    config: dict[str, Any]  # from train_config.json, like the next four
    quantization: dict[str, Any]
    base_model: str
    base_sha256: str | None
    template_kwargs: list[dict[str, Any]]  # "asked" of train_config.json, see how_to_prompt()
    merge_check_file: Path | None  # MERGE_CHECK_FILE; None: there is nothing to compare with
    probe_input_ids: list[list[int]]
    tokenizer: list[Path]  # files to use if the base has none
    extras: list[Path]  # files that replace the base's
    template: Path | None  # the chat template of --chat_template
    token_ids: list[int]  # the tokens of --trainable_tokens
    losses: list[float]  # one for each step until the adapter was saved


def read_run(directory: Path) -> TrainedRun:
    """Return the run in a directory, or the run that contains a checkpoint. Raises ValueError if a
    file has changed since it was written, or if a merge does not support the run."""
    path = find_train_config(directory)
    needed = [path, *(directory / name for name in (*ADAPTER_FILES, MERGE_CHECK_FILE))]
    missing = [p.name for p in needed if not p.is_file()]
    if missing:
        newest = max(directory.glob("checkpoint-" + 6 * "[0-9]"), default=None)
        raise ValueError(f"--adapter_dir {directory}: has no {' and no '.join(missing)}. Use "
                         + (f"its latest checkpoint: --adapter_dir {newest}" if newest else
                            "a run directory of train_fsdp_qlora.py or a checkpoint in it; any"
                            " other PEFT adapter is merged, unchecked, with --base_model"))
    run, changed = read_json(path), "has another SHA-256 than when it was written"
    files = {directory / name: run.pop(key, None) for key, name in RESULTS.items()}
    if run.pop("sha256", None) != text_digest(run):
        raise ValueError(f"{path}: {changed}")
    if os.path.lexists(listed := directory / "checkpoint.json"):
        state = read_json(listed)
        written, listed_files = state.pop("sha256", None), state.get("files")
        if text_digest(state) != written or not isinstance(listed_files, dict):
            raise ValueError(f"{listed}: {changed}")
        files = {directory / name: listed_files.get(name)
                 for name in (*ADAPTER_FILES, MERGE_CHECK_FILE)}
    for file, sha in files.items():
        if digest(file) != sha:
            raise ValueError(f"{file}: {changed}")
    for name, pattern in MERGEABLE.items():
        value = run
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if not re.fullmatch(pattern, text := json.dumps(value)):
            raise ValueError(f"{path}: {name} is {text:.80}; a merge needs {pattern}")

    def found(*names: str) -> list[Path]:
        return [file for name in names if (file := path.with_name(name)).is_file()]

    is_given = bool(run["config"].get("chat_template"))
    last_step = state["step"] if os.path.lexists(listed) else math.inf
    token_ids = run.get("trainable_token_ids", [])
    tokenizer = found("tokenizer.json", "tokenizer_config.json")
    return TrainedRun(
        run["config"], run["quantization"], run["base_model"], run.get("base_sha256"),
        run.get("asked", []), directory / MERGE_CHECK_FILE, run["probe_input_ids"],
        tokenizer=tokenizer,  # with --trainable_tokens it may have more tokens than the base's
        extras=[*found("generation_config.json"), *(tokenizer if token_ids else [])],
        template=path.with_name("chat_template.jinja") if is_given else None,
        token_ids=token_ids, losses=losses_of(path.parent, last_step))


def losses_of(directory: Path, last_step: float = math.inf) -> list[float]:
    """Return the losses of the steps until `last_step` from a run's metrics.jsonl; [] if it cannot
    be read."""
    with contextlib.suppress(OSError):
        return [record["loss"] for record in read_records(directory / "metrics.jsonl")
                if isinstance(record.get("loss"), float) and record["step"] <= last_step]
    return []


def merge_command(directory: Path, script: Path) -> str:
    """Return the command that merges the adapter of a run of `script`."""
    merge = script.with_name("merge_adapters.py")
    merge = os.path.relpath(merge) if merge.is_file() else merge.name  # `script` was copied alone
    on_path, python = shutil.which("python"), os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    if on_path and Path(on_path).parent == Path(sys.executable).parent:
        python = "python"
    output = f"{directory}/merged"
    return shlex.join([python, merge, "--adapter_dir", str(directory), "--output_dir", output])
