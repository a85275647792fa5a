"""What the model gives for rows without training on them: micro-batches without dropout, and the
losses of documents.

`run` is the script's Run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_qlora.data.packing import MicroBatch, pack_rows, make_micro_batch
from fsdp_qlora.model.loss import gather_documents
from fsdp_qlora.ranks import gather_objects

if TYPE_CHECKING:
    from fsdp_qlora.data.rows import Rows
    from train_fsdp_qlora import Run


def evaluation_batches(run: Run, rows: Rows,
                       must_begin: bool = False) -> Iterator[tuple[torch.Tensor, Rows]]:
    """Yield the numbers of a few of these rows after the other, and the Rows of them. Ends early if
    the run was asked to stop; `must_begin`: after the first. All ranks must call this, and use all
    of it."""
    for numbers in torch.arange(len(rows)).split(max(64, run.config.batch_size)):
        run.status.check_time(run.config, run.longest_step)
        if any(gather_objects(run.status.stop_reason)) and not must_begin:
            return
        must_begin = False
        run.status.extend_deadline(run.config, run.longest_step)
        yield numbers, rows.select(numbers)


def evaluation_micro_batches(run: Run, batch: Rows) -> Iterator[tuple[MicroBatch, list[list[int]]]]:
    """Yield this rank's MicroBatch of each micro-batch of a few Rows, and the micro-batch. All
    ranks must call this, and use all of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for micro_step in pack_rows(
            batch.lengths.tolist(), world_size, run.plan.micro_batch_tokens, batch.n_answers):
        yield make_micro_batch(batch, micro_step, rank, None, run), micro_step


@torch.no_grad()
def document_losses(run: Run, batch: Rows) -> torch.Tensor:
    """The sum of the token losses of each document of a few Rows, fp64 [documents], the same on all
    ranks. All ranks must call this."""
    losses = torch.zeros(len(batch.lengths), dtype=torch.float64, device=run.device)
    for micro_batch, micro_step in evaluation_micro_batches(run, batch.as_documents()):
        of_ranks = gather_documents(run.model(micro_batch)).view(len(micro_step), -1)
        for documents, found in zip(micro_step, of_ranks):
            losses[documents] = found[: len(documents)]
    return losses
