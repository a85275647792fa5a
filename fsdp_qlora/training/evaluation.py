"""What the model gives for rows without training on them: bins without dropout, and the losses of
documents.

`run` is the script's Run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_qlora.data.bins import Bin, deal_rows, make_bin
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


def evaluation_bins(run: Run, batch: Rows) -> Iterator[tuple[Bin, list[list[int]]]]:
    """Yield this rank's Bin of each micro-batch of a few Rows, and the micro-batch. All ranks must
    call this, and use all of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for micro_batch in deal_rows(
            batch.lengths.tolist(), world_size, run.plan.bin_tokens, batch.n_answers):
        yield make_bin(batch, micro_batch, rank, None, run), micro_batch


@torch.no_grad()
def document_losses(run: Run, batch: Rows) -> torch.Tensor:
    """The sum of the token losses of each document of a few Rows, fp64 [documents], the same on all
    ranks. All ranks must call this."""
    losses = torch.zeros(len(batch.lengths), dtype=torch.float64, device=run.device)
    for bin, micro_batch in evaluation_bins(run, batch.as_documents()):
        of_ranks = gather_documents(run.model(bin)).view(len(micro_batch), -1)
        for documents, found in zip(micro_batch, of_ranks):
            losses[documents] = found[: len(documents)]
    return losses
