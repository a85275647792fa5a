"""Atomic checkpoints: write, validate, read, find the latest; and save the trained adapter.

The script decides when to save, and gathers what is saved. A run resumes exactly from the adapter,
the optimizer's state and the step number, because rows and dropout are functions of (seed, step).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fsdp_qlora.config import Config
from fsdp_qlora.files import (
    ADAPTER_FILES, ADAPTER_WEIGHTS, digest, read_json, remove, sync_file, json_digest, write_atomic)
from fsdp_qlora.log import log
from fsdp_qlora.lora.adapter import (
    TOKEN_ROWS, Adapter, MakeOptimizer, probe_optimizer, sharded_state)
from fsdp_qlora.lora.peft_files import write_adapter
from fsdp_qlora.lora.peft_names import unstack_experts
from fsdp_qlora.run.run import Progress, Run
from fsdp_qlora.run.run_results import DIGESTED_FILES, MERGE_CHECK_FILE


# errors of a disk that is full, damaged, gone or another run's by now; any other error is a bug
DISK_ERRORS = OSError, SafetensorError


def checkpoint_path(directory: Path, step: int) -> Path:
    return directory / f"checkpoint-{step:06d}"


def write_checkpoint(run: Run, step: int, weights: dict[str, torch.Tensor],
                     optimizer_state: dict[str, torch.Tensor],
                     merge_check: dict[str, torch.Tensor]) -> None:
    """Write checkpoint-<step> completely or not at all, from the gathered {PEFT's name: tensor},
    and the results of Adapter.gather_state() and MergeCheck.tensors(). Raises DISK_ERRORS, also if
    the directory is no longer this run's. Rank 0 only.

    Everything goes into a hidden directory, which is renamed when all files are written, synced and
    listed with their SHA-256. So a directory with the right name is a complete checkpoint.
    """
    run.status.check_lock()
    final = checkpoint_path(run.directory, step)
    hidden = run.directory / f".{final.name}.part"
    move_aside_and_remove(hidden)  # left by a save that failed
    tensors = *weights.values(), *merge_check.values(), *optimizer_state.values()
    needed = 2**20 + sum(tensor.nbytes for tensor in tensors)
    if (free := shutil.disk_usage(run.directory).free) < needed:
        raise OSError(errno.ENOSPC, f"it takes {needed / 2**30:.3f} GiB, and {free / 2**30:.3f}"
                      " are free")
    hidden.mkdir()
    try:
        write_adapter(hidden, weights, run.job.lora_config)
        write_atomic(hidden / "optimizer.safetensors", optimizer_state)
        write_atomic(hidden / MERGE_CHECK_FILE, merge_check)
        names = *ADAPTER_FILES, "optimizer.safetensors", MERGE_CHECK_FILE
        state = {
            "step": step,
            **run.job.digests,
            "progress": dataclasses.asdict(run.progress),
            "config": dataclasses.asdict(run.config),
            "files": {name: digest(hidden / name) for name in names}}
        state["sha256"] = json_digest(state)
        write_atomic(hidden / "checkpoint.json", json.dumps(state, indent=2))
        move_aside_and_remove(final)  # anything else with that name
        os.replace(hidden, final)
        sync_file(run.directory)
    except Exception:
        move_aside_and_remove(hidden)  # to free the space, which may be what is missing
        raise


def check_disk_space(config: Config, directory: Path, n_adapter_weights: int,
                     make_optimizer: MakeOptimizer) -> None:
    """Raise ValueError if the disk has no room for the adapter and one checkpoint, the least that a
    run must write; log a line if it has none for as many as --keep_checkpoints keeps.
    Rank 0 only."""
    state_bytes, _ = probe_optimizer(make_optimizer, config)
    adapter = 4 * n_adapter_weights  # fp32
    checkpoint = (4 + state_bytes) * n_adapter_weights + 2**20
    n_existing = len(list_checkpoints(directory))
    # plus 2: the best checkpoint, and the one that is being written
    wanted = adapter + checkpoint * max(1, config.keep_checkpoints + 2 - n_existing)
    free = shutil.disk_usage(directory).free
    sizes = (f"{wanted / 2**30:.2f} GiB for the adapter and checkpoints, but {free / 2**30:.2f} are"
             " free")
    if free < adapter + checkpoint:
        raise ValueError(f"--output_dir {directory}: needs {sizes}. Free disk space")
    if free < wanted:
        log(f"warning: --output_dir {directory}: needs up to {sizes}; a checkpoint may not be"
            " saved")


def load_checkpoint(path: Path, adapter: Adapter,
                    optimizer: torch.optim.Optimizer) -> Progress:
    """Load the adapter and the optimizer's state from a checkpoint, which may come from any number
    of ranks. Returns the Progress saved in it. Raises ValueError if it was saved by another
    optimizer."""
    saved = json.loads((path / "checkpoint.json").read_text())
    # an optimizer creates its state in its first step. Here that step has gradients of 0, and all
    # that it changes, including the step count, is set below
    optimizer.step()
    stored, own_state = load_file(path / "optimizer.safetensors"), sharded_state(optimizer)
    names = {name.removesuffix(TOKEN_ROWS) for name in stored}
    if names != own_state.keys():
        raise ValueError(f"{path} is of another optimizer: it has {', '.join(sorted(names))}; this"
                         f" one needs {', '.join(sorted(own_state))}")
    adapter.set_state(own_state, stored)
    state = optimizer.state[adapter.weights]
    if "step" in state:  # 1 by now, a number or a tensor: += keeps its type
        state["step"] += saved["step"] - 1
    weights = unstack_experts(load_file(path / ADAPTER_WEIGHTS), adapter.expert_slices)
    for i in range(len(adapter.layers)):
        adapter.set_layer(i, weights)
    adapter.set_token_rows(weights)
    return Progress(**saved["progress"])


def move_aside_and_remove(path: Path) -> None:
    """Delete a file, link or directory. It is renamed first, so that its path is free even if the
    deletion takes long or is interrupted. Rank 0 only."""
    if path.is_symlink() or path.exists():
        aside = path.with_name(f".checkpoint-{time.time_ns()}.old")
        os.replace(path, aside)
        remove(aside)


def list_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return [(step, path)] of everything that is named like a checkpoint, the latest first. Rank 0
    only."""
    steps_and_paths = [(int(match[1]), path) for path in directory.iterdir()
                       if (match := re.fullmatch(r"checkpoint-(\d{6,18})", path.name))]
    return sorted(steps_and_paths, reverse=True)


def drop_checkpoints(run: Run, step: int) -> None:
    """Remove the checkpoints that exceed --keep_checkpoints, if the latest one is complete. The
    best one stays. Rank 0 only."""
    try:
        older = [(s, path) for s, path in list_checkpoints(run.directory) if s < step]
        older = [path for s, path in older[run.config.keep_checkpoints - 1 :]
                 if s != run.progress.best_step]
        if older:
            verify_checkpoint(checkpoint_path(run.directory, step))
        for path in older:
            move_aside_and_remove(path)
    except (OSError, ValueError) as e:
        log(f"warning: older checkpoints were not removed: {e}")


def verify_checkpoint(path: Path) -> dict[str, Any]:
    """Return the contents of checkpoint.json. Raises ValueError unless it and all files that it
    lists still have the SHA-256 with which they were written, or OSError if that cannot be checked
    now."""
    try:
        state = read_json(path / "checkpoint.json")
        if state.pop("sha256") != json_digest(state):
            raise ValueError("checkpoint.json has another SHA-256 than when it was written")
        if checkpoint_path(path.parent, state["step"]) != path:
            raise ValueError(f"it is a copy of that of step {state['step']}")
        for name, sha in state["files"].items():
            if digest(path / name) != sha:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError,
            TypeError, AttributeError) as e:
        raise ValueError(f"{path} is incomplete: {e}")
    except OSError as e:  # the checkpoint may be complete
        raise OSError(f"{path} cannot be read now: {e}; it stays as it is. Try the same command"
                      " again")
    return state


def latest_checkpoint(
        directory: Path, flag: str) -> tuple[Path, dict[str, Any]] | tuple[None, None]:
    """Return the path and the state of a run's latest complete checkpoint, or (None, None). Logs
    the damaged ones that it skips. Raises ValueError, which names `flag`, if all are damaged;
    OSError if one cannot be read. Rank 0 only."""
    broken = []
    for _, path in list_checkpoints(directory):
        try:
            return path, verify_checkpoint(path)
        except ValueError as e:
            broken.append(str(e))
            log(f"warning: skipped a checkpoint: {e}")
    if broken:
        raise ValueError("; ".join([f"{flag} {directory} has no complete checkpoint", *broken]))
    return None, None


def write_final_adapter(run: Run, weights: dict[str, torch.Tensor],
                        merge_check: dict[str, torch.Tensor]) -> None:
    """Write the trained adapter in PEFT's format and the result of MergeCheck.tensors(), and their
    SHA-256 into train_config.json. If --output_dir is lost or cannot be written, write the adapter
    elsewhere, and raise OSError that names the place. Rank 0 only."""
    try:
        write_into_run_directory(run, weights, merge_check)
    except DISK_ERRORS as e:
        errors = [f"{run.directory}: {e}"]
        where = save_elsewhere(run, weights, errors)
        raise OSError(f"the adapter could not be saved in {'; nor in '.join(errors)}; {where}")


def write_into_run_directory(run: Run, weights: dict[str, torch.Tensor],
                             merge_check: dict[str, torch.Tensor]) -> None:
    """Write the adapter and the merge check into the run's directory, and their SHA-256 into its
    train_config.json. Raises DISK_ERRORS, also if the directory is lost. Rank 0 only."""
    run.status.check_lock()
    write_adapter(run.directory, weights, run.job.lora_config)
    write_atomic(run.directory / MERGE_CHECK_FILE, merge_check)
    path = run.directory / "train_config.json"
    if train_config := read_json(path, {}):
        train_config |= {key: digest(run.directory / name) for key, name in DIGESTED_FILES.items()}
        write_atomic(path, json.dumps(train_config, indent=2))


def save_elsewhere(run: Run, weights: dict[str, torch.Tensor], errors: list[str]) -> str:
    """Write the adapter beside the run's directory, which may be lost; if the disk is full, into
    the system's temporary directory, which may be on another one. Returns where it is, in words,
    and adds to `errors` what failed. Rank 0 only."""
    for place in run.directory.resolve().parent, None:  # None: the temporary directory
        new = None
        try:  # the prefix is cut, because a name has at most 255 bytes
            new = Path(tempfile.mkdtemp(prefix=f"{run.directory.name[:50]}-adapter-", dir=place))
            write_adapter(new, weights, run.job.lora_config)
            return f"it is in {new}"
        except DISK_ERRORS as e:
            errors.append(": ".join(str(part) for part in (new or place, e) if part))
            if new:
                with contextlib.suppress(OSError):
                    new.rmdir()  # works only if nothing was written
    latest = run.status.checkpoint
    return f"{latest} has the latest state" if latest else "it is lost"
