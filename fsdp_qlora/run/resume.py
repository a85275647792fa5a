"""Resuming: from which checkpoint, and whether this run may continue the one in --output_dir.

checkpoints.py reads and writes the files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.exit_codes import EXITS
from fsdp_qlora.files import ADAPTER_WEIGHTS, as_json, read_json
from fsdp_qlora.log import log
from fsdp_qlora.ranks import RunEnd, all_gather_objects
from fsdp_qlora.run.checkpoints import latest_checkpoint, list_checkpoints


# flags that a resumed run cannot change, besides rows and base model
MUST_MATCH = [f.name for f in dataclasses.fields(Config) if f.metadata["on_resume"] == "refused"]
# flags that it can change; each change is logged
MAY_CHANGE = [f.name for f in dataclasses.fields(Config) if f.metadata["on_resume"] == "logged"]


def step_to_resume(config: Config, directory: Path, digests: dict[str, str | None]) -> int:
    """Return the step of the latest complete checkpoint in --output_dir, 0 if there is none. Logs
    the flags that have changed. Raises ValueError if the run there has other flags, data or base
    model. Rank 0 only."""
    flag = "--resume must:" if config.resume == "must" else "--output_dir"
    path, state = latest_checkpoint(directory, flag)
    # or a checkpoint's state, which has the keys of train_config.json that are compared
    train_config = state or read_json(directory / "train_config.json", {})
    if config.resume == "must" and not path:
        raise ValueError(f"{flag} {directory} has no complete checkpoint")
    if not path and (directory / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"--output_dir {directory} already contains a trained adapter, but no"
                         " checkpoint to resume from. Use another directory; --init_adapter can"
                         " start from it")
    if train_config:
        refuse_other_run(config, directory, digests, train_config)
    if not path or not state:
        return 0
    before, now = compared_flags(config, state)
    changed = [name for name in MAY_CHANGE if before.get(name) != now[name]]
    if state["step"] == config.max_steps and {*changed} - {"max_steps"}:
        other = "; ".join(f"--{name} {before.get(name)} (now {now[name]})" for name in changed)
        raise ValueError(f"--output_dir {directory} is a complete run of {config.max_steps} steps"
                         f" with {other}. Use another directory")
    if state["step"] > now["max_steps"]:
        raise ValueError(f"--max_steps {config.max_steps}: the run is already at step"
                         f" {state['step']} ({path}). Use at least {state['step']}, or another"
                         " --output_dir")
    for name in changed:
        log(f"changed on resume: --{name} {before.get(name)} -> {now[name]} (from step"
            f" {state['step']})")
    return state["step"]


def compared_flags(
        config: Config, train_config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags of the run that `train_config` describes, and of this run, both as JSON
    values."""
    before, now = train_config.get("config", {}), as_json(dataclasses.asdict(config))
    before, now = ({**flags, "target_modules": sorted(flags.get("target_modules", ()))}
                   for flags in (before, now))
    return before, now


def refuse_other_run(config: Config, directory: Path, digests: dict[str, str | None],
                     train_config: dict[str, Any]) -> None:
    """Raise ValueError if the run that `train_config` describes cannot continue as this one,
    because it has other flags, data or base model."""
    before, now = compared_flags(config, train_config)
    changed = [f"--{name} {before.get(name)} (now {now[name]})" for name in MUST_MATCH
               if before.get(name) != now[name]]
    if changed:
        raise ValueError(f"--output_dir {directory} already contains a run with"
                         f" {'; '.join(changed)}. Use another directory, or resume it with its own"
                         " flags by --resume must")
    for key, what in (("data_sha256", "other rows: the data set, a fraction as --eval_dataset, or"
                                      " the tokenizer has changed"),
                      ("base_sha256", "another base model: its files or config.json have changed"),
                      ("eval_sha256", "other evaluation rows: --eval_dataset has changed")):
        if train_config.get(key) != digests[key]:
            raise ValueError(f"--output_dir {directory} already contains a run with {what}")


def check_resumable(config: Config, directory: Path, digests: dict[str, str | None],
                    train_config: dict[str, Any]) -> None:
    """Raise ValueError if the run in --output_dir, which `train_config` describes, could not
    continue as this one. For a dry run. Rank 0 only."""
    if train_config:
        base = digests["base_sha256"] or train_config.get("base_sha256")
        refuse_other_run(config, directory, {**digests, "base_sha256": base}, train_config)


def set_aside_newer(directory: Path, step: int) -> None:
    """Rename everything that is named like a checkpoint later than `step`, from which the run
    resumes. Otherwise --keep_checkpoints would count it, or a later start would resume from it.
    Rank 0 only."""
    for later, path in list_checkpoints(directory):
        if later > step:
            with contextlib.suppress(OSError):
                os.replace(path, path.with_name(f"{path.name}.broken-{time.time_ns()}"))


def agree_on_digests(config: Config, rows: Rows, eval_rows: Rows | None,
                     base_sha256: str) -> dict[str, str | None]:
    """Return {key in train_config.json: SHA-256} of rows and base model, which must be the same on
    all ranks and when resuming. All ranks must call this."""
    digests = {"data_sha256": rows.sha256(), "base_sha256": base_sha256,
               "eval_sha256": eval_rows.sha256() if eval_rows else None}
    flags = {"data_sha256": "dataset", "base_sha256": "model", "eval_sha256": "eval_dataset"}
    for other in all_gather_objects(digests):
        for key, flag in flags.items():
            if other[key] != digests[key]:
                value = as_json(vars(config)[flag])
                value = " ".join(value) if isinstance(value, list) else value
                raise RunEnd(f"--{flag} {value}: not the same on all nodes", EXITS["data"])
    return digests
