"""Pack the documents of a step into evenly filled micro-batches.

A micro-batch is what one GPU computes at once. The micro-batches that all ranks compute side by
side are a micro-step. sampling.py chooses the rows of a step, collate.py makes tensors of its
micro-batches.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from fsdp_qlora.data.rows import Rows
from fsdp_qlora.micro_batch.micro_batch import MicroBatchFormat

# What all ranks compute side by side, [micro-batches, documents]: for each rank (with context
# parallelism for each group of ranks) the documents of its micro-batch, which are indices of
# documents in a step's Rows
MicroStep = list[list[int]]


def micro_steps_of(rows: Rows, micro_batch_format: MicroBatchFormat) -> list[MicroStep]:
    """Return pack_rows() of these rows, for micro-batches of this format."""
    group = micro_batch_format.context_group
    return pack_rows(rows.lengths.tolist(), group.n_context_groups,
                     group.size * micro_batch_format.max_tokens, rows.documents_per_row)


def pack_rows(lengths: list[int], n_groups: int, max_tokens: int,
              documents_per_row: int = 1) -> list[MicroStep]:
    """Pack documents of these lengths into micro-steps of a micro-batch for each group of
    processes: one process, or with context parallelism those that share a micro-batch.

    The number of micro-steps is the smallest for which every micro-batch, all filled evenly, stays
    within `max_tokens`. The documents of a row, which are consecutive, are in the same micro-step,
    but may be in micro-batches of several groups. All ranks know all lengths, so all get the
    same result.
    """
    rows = [range(i, i + documents_per_row) for i in range(0, len(lengths), documents_per_row)]
    row_lengths = [sum(lengths[i] for i in row) for row in rows]
    fewest = max(1, math.ceil(sum(lengths) / (n_groups * max_tokens)))
    for n in range(fewest, len(rows) + 1):
        if documents_per_row == 1:
            # sorted by size, so that those of one micro-step are alike: all ranks wait for its
            # fullest
            micro_batches = distribute_evenly(range(len(lengths)), lengths, n * n_groups)
            micro_steps = [micro_batches[i : i + n_groups]
                           for i in range(0, len(micro_batches), n_groups)]
        else:
            shares = distribute_evenly(range(len(rows)), row_lengths, n)
            micro_steps = [
                distribute_evenly([i for row in share for i in rows[row]], lengths, n_groups)
                for share in shares]
        fullest = max(sum(lengths[i] for i in documents)
                      for micro_step in micro_steps for documents in micro_step)
        if fullest <= max_tokens:
            return micro_steps
    raise AssertionError(f"cannot pack {len(rows)} rows, the longest of"
                         f" {max(row_lengths, default=0)} tokens, into micro-batches of"
                         f" {max_tokens} tokens for {n_groups} groups of processes")


def distribute_evenly(items: Iterable[int], sizes: Sequence[int], n: int) -> list[list[int]]:
    """Distribute `items`, indices into `sizes`, over n evenly filled lists, the fullest first."""
    # a heap of (size, number, items): the emptiest list comes first
    lists = [(0, number, []) for number in range(n)]
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
        size, number, chosen = lists[0]
        chosen.append(i)
        heapq.heapreplace(lists, (size + sizes[i], number, chosen))
    lists.sort(key=lambda one: (-one[0], one[1]))
    return [sorted(chosen) for _, _, chosen in lists]
