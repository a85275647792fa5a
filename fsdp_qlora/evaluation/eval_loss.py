"""Losses without gradients or dropout, and what the loss of a micro-batch needs to know of all rows
of its step or evaluation: global_loss_values().
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.packing import MicroStep, micro_steps_of
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.preference_loss import gather_documents, sum_documents
from fsdp_qlora.ranks import gather_objects
from fsdp_qlora.run.status import Status


def evaluation_batches(rows: Rows, batch_size: int, status: Status,
                       must_begin: bool = False) -> Iterator[tuple[torch.Tensor, Rows]]:
    """Yield the rows a few at a time, as (indices, their Rows). Ends early if the run was asked to
    stop, but with `must_begin` not before the first few. All ranks must call this, and exhaust it.
    """
    for numbers in torch.arange(len(rows)).split(max(64, batch_size)):
        status.check_time()
        if any(gather_objects(status.stop_reason)) and not must_begin:
            return
        must_begin = False
        status.extend_deadline()
        yield numbers, rows.select(numbers)


def evaluation_micro_batches(
        model: Model, rows: Rows) -> Iterator[tuple[MicroBatch, MicroStep]]:
    """Yield this rank's MicroBatch of each micro-step of a few Rows, and the micro-step. All ranks
    must call this, and exhaust it."""
    for micro_step in micro_steps_of(rows, model):
        yield make_micro_batch(rows, micro_step, model, context=model.context), micro_step


@torch.no_grad()
def document_losses(model: Model, rows: Rows) -> torch.Tensor:
    """Return the sum of the token losses of each document of a few Rows, fp64 [documents], the same
    on all ranks. All ranks must call this."""
    losses = torch.zeros(len(rows.lengths), dtype=torch.float64, device=model.device)
    for micro_batch, micro_step in evaluation_micro_batches(model, rows.as_documents()):
        sums = sum_documents(model(micro_batch), micro_batch)
        group_sums = gather_documents(sums, model.context.size).view(len(micro_step), -1)
        for documents, document_sums in zip(micro_step, group_sums):
            losses[documents] = document_sums[: len(documents)]
    return losses


def global_loss_values(model: Model, rows: Rows, batches: Iterable[Rows]) -> dict[str, Any]:
    """Return the fields of Answers that depend on all of these Rows (a step's or an evaluation's),
    if the loss reads any. `batches` yields the Rows a few at a time. All ranks must call this."""
    if rows.loss_record.is_unpaired:
        return {"kl": estimate_kl(model, batches, len(rows))}
    if rows.loss_record.trains_prompt:
        n_tokens = int(rows.n_labels()[rows.desirable].sum())
        return {"rows_per_token": torch.tensor(
            len(rows) / n_tokens, dtype=torch.float64, device=model.device)}
    return {}


def set_global_values(micro_batch: MicroBatch, values: dict[str, Any]) -> None:
    """Give the answers of a micro-batch, if it has any, the result of global_loss_values()."""
    if micro_batch.answers:
        micro_batch.answers = dataclasses.replace(micro_batch.answers, **values)


def estimate_kl(model: Model, batches: Iterable[Rows], n_rows: int) -> torch.Tensor | None:
    """Return KTO's estimate of the KL divergence from the reference, fp64 []: the mean log-ratio of
    these rows' prompts with answers of other rows, at least 0. None if the run was asked to stop.
    All ranks must call this."""
    ratios = []
    for other in (batch.mismatched for batch in batches):
        if other:
            assert other.ref_logps is not None, "ensure_ref_logps() has set it"
            logps = -document_losses(model, other)
            ratios.append((logps - other.ref_logps.to(model.device)).sum())
    reshard_all(model)
    return (torch.stack(ratios).sum() / n_rows).clamp(min=0) if ratios else None
