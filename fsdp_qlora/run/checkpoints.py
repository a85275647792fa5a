"""Checkpoints: written whole or not at all, read only if they are whole, of this run and no other.

Depends on adapter, files, directory and peft_names. The script decides when to save and gathers
what is saved.
"""

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

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from fsdp_qlora.lora.adapter import write_adapter
from fsdp_qlora.run.files import (
    as_json, digest, read_json, remove, sync_file, text_digest, write_whole)
from fsdp_qlora.run.directory import ADAPTER_FILES, PROBE_FILE, RESULTS
from fsdp_qlora.lora.peft_names import unstack_experts
from fsdp_qlora.run.ranks import Stop, gather_objects, say

MUST_MATCH = (  # flags that a resumed run cannot change, besides rows and base model
    "random_weights", "compute_dtype", "adapter", "lora_rank", "lora_alpha", "lora_dropout",
    "target_modules", "init_adapter", "max_seq_len", "batch_size", "seed", "loss", "beta",
    "label_smoothing", "simpo_gamma", "desirable_weight", "undesirable_weight")
SCHEDULE = ("max_steps", "learning_rate", "lr_schedule", "warmup_fraction", "weight_decay",
            "max_grad_norm")  # flags that it can change, which is said
STATE_KEYS = "state1", "state2", "absmax1", "absmax2"  # of the optimizer's state, one a weight
#                                                        or one a block of weights


def checkpoint_path(directory, step):
    return directory / f"checkpoint-{step:06d}"


def write_checkpoint(run, step, weights, state_by_layer, probe):
    """Write checkpoint-<step>, whole or not at all, from the gathered {PEFT's name: tensor} and
    {one of STATE_KEYS: a tensor for each layer}, and from Probe.states(). Raises OSError, and
    ValueError where the directory is not this run's any more. Rank 0 only.

    Everything goes into a hidden directory, which gets its name when all is written, synced and
    listed with its SHA-256: a directory with the right name is a whole checkpoint.
    """
    run.status.check_lock()
    final = checkpoint_path(run.directory, step)
    hidden = run.directory / f".{final.name}.part"
    remove_at_once(hidden)  # of a save that failed
    needed = 1.02 * 2 * run.adapter.n_trainable + 2**20  # two states of 8 bits
    needed += sum(tensor.nbytes for tensor in (*weights.values(), *probe.values()))
    if (free := shutil.disk_usage(run.directory).free) < needed:
        raise OSError(errno.ENOSPC, f"it takes {needed / 2**30:.3f} GiB, and {free / 2**30:.3f}"
                      " are free")
    hidden.mkdir()
    try:
        write_adapter(hidden, weights, run.lora_config)
        stacked = {key: torch.stack(layers) for key, layers in state_by_layer.items()}
        write_whole(hidden / "optimizer.safetensors", stacked)
        write_whole(hidden / PROBE_FILE, probe)
        names = *ADAPTER_FILES, "optimizer.safetensors", PROBE_FILE
        state = {
            "step": step,
            "optimizer_step": run.optimizer.state[run.adapter.weights]["step"],
            "optimizer_files": ["optimizer.safetensors"],
            **run.content,
            "progress": run.progress,
            "config": dataclasses.asdict(run.config),
            "files": {name: digest(hidden / name) for name in names}}
        state["sha256"] = text_digest(state)
        write_whole(hidden / "checkpoint.json", json.dumps(state, indent=2))
        remove_at_once(final)  # something else of that name
        os.replace(hidden, final)
        sync_file(run.directory)
    except Exception:
        remove_at_once(hidden)  # its room may be what is missing
        raise


def load_checkpoint(path, adapter, optimizer):
    """Set the adapter and the optimizer's state to those of a checkpoint, which any number of ranks
    may have saved. Returns the progress until then."""
    saved = json.loads((path / "checkpoint.json").read_text())
    weights = unstack_experts(load_file(path / "adapter_model.safetensors"), adapter.expert_parts)
    for i in range(len(adapter.layers)):
        adapter.set_layer(i, weights)
    files = [load_file(path / name) for name in saved["optimizer_files"]]  # older runs: one a rank
    state = optimizer.state[adapter.weights]
    zero_code = int(state["qmap1"].abs().argmin())  # padding's momentum is 0, which is not code 0
    for key in STATE_KEYS:
        own = adapter.by_layer(state[key])
        whole = torch.cat([file[key] for file in files], 1)
        missing = own.shape[1] * adapter.shards - whole.shape[1]  # below 0: padding to cut
        whole = F.pad(whole, (0, missing), value=zero_code if key == "state1" else 0)
        own.copy_(whole.unflatten(1, (adapter.shards, -1))[:, adapter.shard])
    state["step"] = saved["optimizer_step"]
    return saved["progress"]


def remove_at_once(path):
    """Delete a file, link or directory. It is renamed first, so that its path is free even if that
    takes long or is interrupted. Rank 0 only."""
    if path.is_symlink() or path.exists():
        aside = path.with_name(f".checkpoint-{time.time_ns()}.old")
        os.replace(path, aside)
        remove(aside)


def checkpoints_of(directory):
    """[(step, path)] of all that is named like a checkpoint, the newest first. Rank 0 only."""
    found = [(int(match[1]), path) for path in directory.iterdir()
             if (match := re.fullmatch(r"checkpoint-(\d{6,18})", path.name))]
    return sorted(found, reverse=True)


def drop_checkpoints(run, step):
    """Remove checkpoints that --keep_checkpoints does not keep, if the newest is whole. Rank 0
    only."""
    try:
        older = [(s, path) for s, path in checkpoints_of(run.directory) if s < step]
        older = [path for s, path in older[run.config.keep_checkpoints - 1 :]
                 if s != run.progress["best_step"]]
        if older:
            read_checkpoint(checkpoint_path(run.directory, step))
        for path in older:
            remove_at_once(path)
    except (OSError, ValueError) as e:
        say(f"older checkpoints stay: {e}")


def read_checkpoint(path):
    """What checkpoint.json holds. Raises ValueError unless it and all files that it lists have the
    SHA-256 with which they were written; OSError where that cannot be told now."""
    try:
        state = read_json(path / "checkpoint.json")
        if state.pop("sha256") != text_digest(state):
            raise ValueError("checkpoint.json has another SHA-256 than when it was written")
        if checkpoint_path(path.parent, state["step"]) != path:
            raise ValueError(f"it is a copy of that of step {state['step']}")
        for name, sha in state["files"].items():
            if digest(path / name) != sha:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, KeyError,
            TypeError, AttributeError) as e:
        raise ValueError(f"{path}, which is not whole: {e}")
    except OSError as e:  # it may be whole
        raise OSError(f"{path} cannot be read now: {e}; it stays as it is: try the same command"
                      " again")
    return state


def newest_checkpoint(directory):
    """The path and the state of a run's newest whole checkpoint, or None, None. Prints which it
    skips; raises ValueError if all are damaged, OSError if one cannot be read. Rank 0 only."""
    broken = []
    for _, path in checkpoints_of(directory):
        try:
            return path, read_checkpoint(path)
        except ValueError as e:
            broken.append(str(e))
            say(f"skipped {e}")
    if broken:
        raise ValueError("; ".join([f"--resume: {directory} has no whole checkpoint", *broken]))
    return None, None


def find_checkpoint(config, directory, content):
    """The step of the newest whole checkpoint in --output_dir, 0 if there is none. Raises
    ValueError if the run there has other flags, data or base model. Rank 0 only."""
    path, state = newest_checkpoint(directory)
    begun = state or read_json(directory / "train_config.json", {})
    if config.resume == "must" and not path:
        raise ValueError(f"--resume must: {directory} has no whole checkpoint")
    if not path and (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"--output_dir {directory} holds a trained adapter, but no checkpoint to"
                         " resume from: name another directory; --init_adapter can begin with it")
    if not begun:
        return 0
    if path and "progress" not in state:
        raise ValueError(f"--resume: {path} was made by an older version of this script: finish the"
                         " run with that version")
    # of a flag that is newer than the run, it had the default
    defaults = {f.name: f.default for f in dataclasses.fields(config)}
    before, same = defaults | begun.get("config", {}), as_json(dataclasses.asdict(config))
    for values in before, same:
        values["target_modules"] = sorted(values.get("target_modules", ()))
    changed = [f"--{name} {before.get(name)}, not {same[name]}" for name in MUST_MATCH
               if before.get(name) != same[name]]
    if changed:
        raise ValueError(f"--output_dir {directory} holds a run with {'; '.join(changed)}: name"
                         " another directory, or resume it with its own flags by --resume must")
    for key, what in (("data_sha256", "other rows: the data set, a fraction as --eval_dataset, or"
                                      " the tokenizer has changed"),
                      ("base_sha256", "another base model: its files or config.json have changed"),
                      ("eval_sha256", "other evaluation rows: --eval_dataset has changed")):
        if begun.get(key, content[key]) != content[key]:  # older runs have no eval_sha256
            raise ValueError(f"--output_dir {directory} holds a run with {what}")
    if not path:
        return 0
    changed = [name for name in SCHEDULE if before.get(name) != same[name]]
    if state["step"] == config.max_steps and {*changed} - {"max_steps"}:
        other = "; ".join(f"--{name} {before.get(name)}, not {same[name]}" for name in changed)
        raise ValueError(f"--output_dir {directory} holds a run with {other}, and all of its"
                         f" {config.max_steps} steps are done: name another directory")
    if state["step"] > config.max_steps:
        raise ValueError(f"--max_steps {config.max_steps}: {path} has more steps")
    for name in changed:
        say(f"changed: --{name} is {same[name]}, and was {before.get(name)} until step"
            f" {state['step']}")
    for step, skipped in checkpoints_of(directory):
        if step > state["step"]:  # else --keep_checkpoints would count it, or it would come back
            with contextlib.suppress(OSError):
                os.replace(skipped, skipped.with_name(f"{skipped.name}.broken-{time.time_ns()}"))
    return state["step"]


def agree_on_content(config, rows, eval_rows, base_sha256):
    """The digests of rows and base model, which must be the same on all ranks and at a resume. All
    ranks must call this."""
    content = {"data_sha256": rows.sha256(), "base_sha256": base_sha256,
               "eval_sha256": eval_rows and eval_rows.sha256()}
    flags = {"data_sha256": "dataset", "base_sha256": "model", "eval_sha256": "eval_dataset"}
    for other in gather_objects(content):
        for key, flag in flags.items():
            if other[key] != content[key]:
                value = as_json(vars(config)[flag])
                value = " ".join(value) if isinstance(value, list) else value
                raise Stop(f"--{flag} {value}: not the same on all nodes")
    return content


def save_adapter(run, weights, probe):
    """Write the trained adapter in PEFT's format and what Probe.states() gives, and their SHA-256
    into train_config.json; if --output_dir cannot be written or is lost, the adapter beside it or
    in the system's temporary directory, and OSError says where. Rank 0 only."""
    directory, errors = run.directory, []
    for place in directory, directory.resolve().parent, None:  # None: the system's, if it has one
        made = None
        try:
            if errors:  # the prefix is short, as a name has at most 255 bytes
                made = tempfile.mkdtemp(prefix=f"{directory.name[:50]}-adapter-", dir=place)
                place = Path(made)
                write_adapter(place, weights, run.lora_config)
            else:
                run.status.check_lock()
                write_adapter(directory, weights, run.lora_config)
                write_whole(directory / PROBE_FILE, probe)
                if described := read_json(directory / "train_config.json", {}):
                    described |= {key: digest(directory / name) for key, name in RESULTS.items()}
                    write_whole(directory / "train_config.json", json.dumps(described, indent=2))
            break
        except (OSError, ValueError, SafetensorError) as e:
            with contextlib.suppress(OSError):
                if made:
                    os.rmdir(made)  # if nothing could be written
            errors.append(f"{place}: {e}" if place else str(e))
    if errors:
        newest = run.status.checkpoint
        lost = f"{newest} has what there is" if newest else "it is lost"
        where = f"it is in {place}" if len(errors) < 3 else lost
        raise OSError(f"the adapter could not be saved in {'; nor in '.join(errors)}; {where}")
