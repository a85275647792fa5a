"""Forwards without gradients or dropout: rows a few at a time, and the losses of whole documents.

train_fsdp_qlora.py evaluates rows a few at a time; the losses of documents are for reference
log-probabilities and for KTO's estimate of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.packing import MicroStep, micro_steps_of
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.preference_loss import all_gather_document_losses, sum_documents
from fsdp_qlora.ranks import all_gather_objects
from fsdp_qlora.run.status import Status


def evaluation_batches(rows: Rows, batch_size: int, status: Status,
                       must_begin: bool = False) -> Iterator[tuple[torch.Tensor, Rows]]:
    """Yield the rows a few at a time, as (indices, their Rows). Ends early if the run was asked to
    stop, but with `must_begin` not before the first few. All ranks must call this, and exhaust it.
    """
    for indices in torch.arange(len(rows)).split(max(64, batch_size)):
        status.check_time()
        if any(all_gather_objects(status.stop_reason)) and not must_begin:
            return
        must_begin = False
        status.extend_deadline()
        yield indices, rows.select(indices)


def evaluation_micro_batches(
        model: Model, rows: Rows) -> Iterator[tuple[MicroBatch, MicroStep]]:
    """Yield this rank's MicroBatch of each micro-step of a few Rows, and the micro-step. All ranks
    must call this, and exhaust it."""
    for micro_step in micro_steps_of(rows, model.micro_batch_format):
        yield make_micro_batch(rows, micro_step, model.micro_batch_format), micro_step


@torch.no_grad()
def document_losses(model: Model, rows: Rows) -> torch.Tensor:
    """Return the sum of the token losses of each document of a few Rows, fp64 [documents], the same
    on all ranks. All ranks must call this."""
    losses = torch.zeros(len(rows.lengths), dtype=torch.float64, device=model.device)
    for micro_batch, micro_step in evaluation_micro_batches(model, rows.as_documents()):
        sums = sum_documents(model(micro_batch), micro_batch)
        group_sums = all_gather_document_losses(sums, model.context_group.size)
        group_sums = group_sums.view(len(micro_step), -1)
        for documents, document_sums in zip(micro_step, group_sums):
            losses[documents] = document_sums[: len(documents)]
    return losses
