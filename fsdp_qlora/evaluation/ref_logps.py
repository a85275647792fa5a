"""Reference log-probabilities for DPO, IPO and KTO, computed once before step 1.

With a new adapter, whose B is 0, they are those of the base model, with --init_adapter those of
that adapter. They are kept in the run's directory, so that a resumed run continues with the same
numbers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from fsdp_qlora.data.rows import Rows
from fsdp_qlora.evaluation.document_losses import document_losses, evaluation_batches
from fsdp_qlora.exit_codes import EXITS, EXIT_RESUMABLE
from fsdp_qlora.files import ADAPTER_WEIGHTS, digest, json_digest, write_atomic
from fsdp_qlora.log import log
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.ranks import RunEnd, all_gather_objects, is_rank_0, on_rank_0
from fsdp_qlora.run.run import Run


REF_LOGPS_FILE = "reference.safetensors"
SAVE_SECONDS = 60  # between two saves of an incomplete file


class RefLogpsRows(NamedTuple):
    """The rows whose reference a run reads."""

    rows: Rows
    indices: torch.Tensor  # int64: which of them; the others are in no step


def ensure_ref_logps(run: Run) -> None:
    """Set `ref_logps` of the run's rows: from the file in its directory and, for rows that the file
    lacks, computed by the model with the adapter from before step 1. All ranks must call this."""
    if not run.rows.loss_spec.has_reference:
        return
    steps = range(1, run.config.max_steps + 1)
    drawn = torch.cat([run.sampler.indices(step) for step in steps]).unique()
    needed = {"train": RefLogpsRows(run.rows, drawn)}  # by their name in the file
    if run.eval_rows:
        needed["eval"] = RefLogpsRows(run.eval_rows, torch.arange(len(run.eval_rows)))
    needed |= {f"{name}_mismatched": RefLogpsRows(rows.mismatched, indices)
               for name, (rows, indices) in needed.items() if rows.mismatched}
    ref_logps = {name: torch.full((len(rows.lengths),), math.nan, dtype=torch.float64)
                 for name, (rows, _) in needed.items()}  # NaN: not known yet
    if not run.saved_step:
        run.progress.init_adapter = on_rank_0(reference_digests, run)["init_adapter"]
    on_rank_0(read_ref_logps, run, ref_logps)
    for values in ref_logps.values():
        dist.broadcast(values, 0)
    compute_missing(run, needed, ref_logps)
    known = {name: dataclasses.replace(rows, ref_logps=ref_logps[name])
             for name, (rows, _) in needed.items()}
    run.sampler.rows = dataclasses.replace(
        known["train"], mismatched=known.get("train_mismatched"))
    if run.eval_rows:
        run.eval_rows = dataclasses.replace(
            known["eval"], mismatched=known.get("eval_mismatched"))


def compute_missing(run: Run, needed: dict[str, RefLogpsRows],
                    ref_logps: dict[str, torch.Tensor]) -> None:
    """Compute the values that are needed and still NaN. The file is written once a minute and
    at the end; a run that is stopped meanwhile continues from it. All ranks must call this."""
    missing = {}
    for name, (rows, indices) in needed.items():
        is_missing = ref_logps[name].isnan().view(len(rows), -1).any(1)
        missing[name] = indices[is_missing[indices]]
    if not any(map(len, missing.values())):
        return
    log(f"reference: computing log-probs of {describe_missing(missing, needed)}")
    started = saved = time.monotonic()
    if run.saved_step:  # a resumed run has more rows now, or has lost its file
        if why := on_rank_0(why_no_start, run):
            raise RunEnd(why, EXITS["checkpoint"])
        weights = run.adapter.weights.data.clone()
        run.adapter.initialize(run.config)
    is_first = True  # else a run that is always stopped at once would never make progress
    for name, indices in ((name, indices) for name, indices in missing.items() if len(indices)):
        rows = needed[name].rows
        for part, batch in evaluation_batches(
                rows.select(indices), run.config.batch_size, run.status, must_begin=is_first):
            is_first = False
            documents = rows.documents_of(indices[part])
            ref_logps[name][documents] = -document_losses(run.model, batch).cpu()
            if is_rank_0() and time.monotonic() > saved + SAVE_SECONDS:
                write_ref_logps(run, ref_logps)
                saved = time.monotonic()
    reshard_all(run.model)
    if run.saved_step:
        run.adapter.set_weights(weights)
    if is_rank_0():
        write_ref_logps(run, ref_logps)
    if why := next(filter(None, all_gather_objects(run.status.stop_reason)), None):
        raise RunEnd(f"{why}, before the reference was complete; the part computed so far is in"
                     f" {REF_LOGPS_FILE}; {run.status.how_to_resume}", EXIT_RESUMABLE)
    log(f"reference: done in {time.monotonic() - started:.1f} s")


def describe_missing(missing: dict[str, torch.Tensor], needed: dict[str, RefLogpsRows]) -> str:
    """Return text on what is computed, counted in pairs or, for an unpaired loss, in answers."""
    texts = []
    for name, purpose in (("train", "training"), ("eval", "evaluation")):
        if n := len(missing.get(name, ())):
            rows = needed[name].rows
            others = f" of {len(rows):,} (the others are known, or no step uses them)"
            texts.append(f"{n:,} {purpose} {'pairs' if rows.documents_per_row == 2 else 'answers'}"
                         f"{others if n < len(rows) else ''}")
    if n := sum(len(numbers) for name, numbers in missing.items() if name.endswith("mismatched")):
        texts.append(f"{n:,} answers after other rows' prompts, for the KL divergence")
    return " and ".join(texts)


def why_no_start(run: Run) -> str:
    """Return why the adapter with which a resumed run began cannot be loaded again, or "". Rank 0
    only."""
    if run.progress.init_adapter == reference_digests(run)["init_adapter"]:
        return ""
    return (f"--init_adapter {run.config.init_adapter}: is missing or has changed since this run"
            " began, but the reference of some rows must be computed with it")


def read_ref_logps(run: Run, ref_logps: dict[str, torch.Tensor]) -> None:
    """Fill `ref_logps` from the run's file, if the file is undamaged and belongs to this data and
    model. Rank 0 only."""
    path, settings = run.directory / REF_LOGPS_FILE, reference_digests(run)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            stored = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError):
        return
    adapter, content = (metadata.pop(key, None) for key in ("init_adapter", "content"))
    if content != settings["content"] or metadata != {
            "format": "pt", **{name: tensor_digest(values) for name, values in stored.items()}}:
        log(f"note: {path} does not match this run (damaged, other data or model); recomputing")
        return
    if adapter != settings["init_adapter"] and not run.saved_step:
        return  # the run begins with another adapter now
    for name, values in stored.items():
        if name in ref_logps and len(values) == len(ref_logps[name]):
            ref_logps[name].copy_(values)


def write_ref_logps(run: Run, ref_logps: dict[str, torch.Tensor]) -> None:
    """Write the values known so far, with digests of them and of the data and model that they
    belong to. If that fails, training continues without the file. Rank 0 only."""
    digests = {name: tensor_digest(values) for name, values in ref_logps.items()}
    try:
        run.status.check_lock()
        write_atomic(
            run.directory / REF_LOGPS_FILE, ref_logps, {**reference_digests(run), **digests})
    except (OSError, SafetensorError) as e:
        log(f"warning: cannot write {REF_LOGPS_FILE}: {e}; a resumed run computes it again")


def reference_digests(run: Run) -> dict[str, str]:
    """Return digests of the rows and the base model together, and of the adapter that the run
    begins with."""
    adapter = Path(run.config.init_adapter or "") / ADAPTER_WEIGHTS
    return {"content": json_digest(run.job.digests),
            "init_adapter": digest(adapter) if adapter.is_file() else "none"}


def tensor_digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
