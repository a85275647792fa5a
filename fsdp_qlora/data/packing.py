"""Choose the rows of a step, and pack their documents into evenly filled micro-batches.

A micro-batch is what one GPU computes at once. The micro-batches that all ranks compute side by
side are a micro-step. Rows are in rows.py.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from fsdp_qlora.config import Config
from fsdp_qlora.data.forms import IGNORE
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.recurrence import chunk_table
from fsdp_qlora.micro_batch.context import (
    LEAST_PIECE, NOT_SHARED, ContextGroup, has_long_pieces, make_context_shard)
from fsdp_qlora.micro_batch.micro_batch import Answers, MicroBatch
from fsdp_qlora.micro_batch.offload import DeviceActivations
from fsdp_qlora.model.model import Model


class RowSource(Protocol):
    """Source of the rows of a step, for the training loop, the planner and DPO's reference. To draw
    rows another way, write a class like ShuffledRows, and name it in finetune()."""

    rows: Rows  # all of them

    def indices(self, step: int) -> torch.Tensor:
        """Return the rows of an optimizer step (the first is 1), int64, the same on all ranks."""


@dataclasses.dataclass
class ShuffledRows:
    """--batch_size rows for each step; every epoch is a new shuffle."""

    rows: Rows
    config: Config

    def indices(self, step: int) -> torch.Tensor:
        return step_rows(step, len(self.rows), self.config)


def step_rows(step: int, n_rows: int, config: Config) -> torch.Tensor:
    """Return the indices of the rows of an optimizer step (the first is 1). Every epoch is a new
    shuffle."""
    drawn = range((step - 1) * config.batch_size, step * config.batch_size)
    return torch.stack([epoch_order(i // n_rows, n_rows, config.seed)[i % n_rows] for i in drawn])


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch: int, n_rows: int, seed: int) -> torch.Tensor:
    """Return the shuffled indices of one epoch's rows."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def pack_rows(lengths: list[int], processes: int, max_tokens: int,
              n_answers: int = 1) -> list[list[list[int]]]:
    """Pack documents of these lengths into micro-steps. Returns, for each micro-step, the numbers
    of the documents in each process's micro-batch.

    The number of micro-steps is the smallest for which every micro-batch, all filled evenly, stays
    within `max_tokens`. The `n_answers` documents of a row, which are consecutive, are in the same
    micro-step, but may be in micro-batches of several processes. All ranks know all lengths, so all
    get the same result.
    """
    fewest = max(1, math.ceil(sum(lengths) / (processes * max_tokens)))
    rows = [range(i, i + n_answers) for i in range(0, len(lengths), n_answers)]
    row_lengths = [sum(lengths[i] for i in row) for row in rows]
    for n in range(fewest, len(rows) + 1):
        if n_answers == 1:
            micro_batches = balance(range(len(lengths)), lengths, n * processes)
            micro_steps = [micro_batches[i : i + processes]
                           for i in range(0, len(micro_batches), processes)]
        else:
            micro_steps = [balance([i for row in share for i in rows[row]], lengths, processes)
                           for share in balance(range(len(rows)), row_lengths, n)]
        fullest = max(sum(lengths[i] for i in documents)
                      for micro_step in micro_steps for documents in micro_step)
        if fullest <= max_tokens:
            break
    return micro_steps


def micro_steps_of(rows: Rows, model: Model) -> list[list[list[int]]]:
    """Return pack_rows() of these rows, for the ranks and the plan of this run."""
    context = model.context
    return pack_rows(rows.lengths.tolist(), context.n_groups,
                     context.size * model.plan.micro_batch_tokens, rows.n_answers)


def balance(items: Iterable[int], sizes: Sequence[int], n: int) -> list[list[int]]:
    """Distribute `items`, indices into `sizes`, over n evenly filled lists, the fullest first."""
    # a heap of (size, number, items): the emptiest list comes first
    lists = [(0, number, []) for number in range(n)]
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
        size, number, chosen = lists[0]
        heapq.heapreplace(lists, (size + sizes[i], number, [*chosen, i]))
    lists.sort(key=lambda one: (-one[0], one[1]))
    return [sorted(chosen) for _, _, chosen in lists]


def round_up(n: int, device: torch.device) -> int:
    """Round n up, on a GPU, to one of a few lengths, 16 from one power of 2 to the next: cuBLAS and
    cuDNN choose kernels anew for each new length, and a CUDA graph has one length."""
    if device.type == "cpu":
        return n
    multiple = max(64, 2 ** n.bit_length() // 32)
    return math.ceil(n / multiple) * multiple


def make_micro_batch(rows: Rows, micro_step: list[list[int]], index: int,
                     step_seed: torch.Tensor | None, model: Model,
                     context: ContextGroup = NOT_SHARED) -> MicroBatch:
    """Return this rank's MicroBatch of a micro-step of pack_rows(). `rows`: those of the step.
    `step_seed`: of dropout; None: an evaluation. All ranks pad to one shape, because they compute
    embedding and lm_head together, and every rank waits for the longest one anyway.

    `index`: which micro-batch of the micro-step; with context parallelism the `context` group's
    number, and the MicroBatch is this rank's part of it."""
    n_tokens, n_labels, longest = padded_shape(rows, micro_step, model, context.size)
    documents = micro_step[index]
    n_unpadded = rows.lengths[documents].sum()[None]
    lengths = padded_lengths(rows.lengths[documents].tolist(), n_tokens, longest)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    position_ids = torch.arange(n_tokens) - starts[:-1].repeat_interleave(starts.diff())
    seeds = None
    if step_seed is not None:
        seeds = dropout_seeds(step_seed, documents, lengths, position_ids)
    n_documents = max(map(len, micro_step))
    is_fixed_len = len(set(lengths)) == 1
    if model.plan.graphs:
        n_documents = power_of_2(n_documents)
    # one graph serves micro-batches of other numbers of documents, too
    if of_any_lengths := model.plan.graphs and not is_fixed_len:
        longest = power_of_2(longest)
        n_empty = power_of_2(len(lengths) + 1) - len(lengths)  # at least one, for chunk_table()
        starts = F.pad(starts, (0, n_empty), value=n_tokens)
    chunks = None
    if "recurrence" in model.kernels.varlen:
        chunks = chunk_table(starts, of_any_lengths)
    ids, label_positions, labels, bounds = token_tensors(rows, documents, lengths, n_documents)
    tensors: dict[str, Any] = {
        "input_ids": ids, "n_unpadded": n_unpadded, "position_ids": position_ids,
        "cu_seqlens": starts.int(), "label_positions": label_positions, "labels": labels,
        "loss_bounds": bounds, "dropout_seeds": seeds, "chunks": chunks}
    shard = None
    if context.size > 1:
        shard = make_context_shard(lengths, context)
        tensors |= own_tensors(tensors, shard.tokens)
        # attention of one piece after the other, of any lengths; the padding's may be short
        shortest = min(lengths[: len(documents)], default=0)
        is_fixed_len = (has_long_pieces(shortest, context.size)
                        and min(lengths) >= 2 * context.size * LEAST_PIECE)
    n_own = len(tensors["labels"])
    assert n_labels >= n_own, f"{n_own} labels, and room for {n_labels}"
    padding = (0, n_labels - n_own)
    tensors["label_positions"] = F.pad(tensors["label_positions"], padding)
    tensors["labels"] = F.pad(tensors["labels"], padding, value=IGNORE)
    answers = answer_tensors(rows, micro_step, n_documents, model) if rows.loss != "sft" else []
    answers = [to_device(tensor, model.device) for tensor in answers]
    tensors = {name: to_device(tensor, model.device) for name, tensor in tensors.items()}
    if shard:
        shard = shard.to(model.device, tensors["dropout_seeds"])
    # an evaluation has no backward
    store = DeviceActivations() if step_seed is None else model.store
    return MicroBatch(
        **tensors, answers=Answers(*answers) if answers else None, lengths=tuple(lengths),
        longest=longest, store=store, context_shard=shard,
        kernels=model.kernels.fixed_len if is_fixed_len else model.kernels.varlen)


def padded_lengths(lengths: list[int], n_tokens: int, longest: int) -> list[int]:
    """Return the lengths of the documents, then those of the padding's documents: n_tokens in sum.
    """
    n_full, rest = divmod(n_tokens - sum(lengths), longest)
    return lengths + [longest] * n_full + [rest] * (rest > 0)


def dropout_seeds(step_seed: torch.Tensor, documents: list[int], lengths: list[int],
                  position_ids: torch.Tensor) -> torch.Tensor:
    """Return each token's seed of dropout, from the numbers of the step and of its document, and
    its position. `lengths`: those of the documents, then those of the padding."""
    numbers = torch.tensor(documents + [-1] * (len(lengths) - len(documents)))
    document_seeds = hash_ints(step_seed + numbers).repeat_interleave(torch.tensor(lengths))
    # drop() adds a number for the layer and the site
    return hash_ints(document_seeds + position_ids)


def own_tensors(tensors: dict[str, Any], own_tokens: torch.Tensor) -> dict[str, Any]:
    """Return those of a micro-batch's tensors that are others on a rank which has, of its tokens,
    only `own_tokens`; their values there."""
    own_at = torch.full((len(tensors["input_ids"]),), -1)
    own_at[own_tokens] = torch.arange(len(own_tokens))
    label_positions, seeds = tensors["label_positions"], tensors["dropout_seeds"]
    is_own = own_at[label_positions] >= 0
    return {
        "input_ids": tensors["input_ids"][own_tokens],
        "position_ids": tensors["position_ids"][own_tokens],
        "n_unpadded": (own_tokens < tensors["n_unpadded"]).sum()[None],
        "label_positions": own_at[label_positions[is_own]],
        "labels": tensors["labels"][is_own],
        "loss_bounds": F.pad(is_own.cumsum(0), (1, 0))[tensors["loss_bounds"]],
        "dropout_seeds": None if seeds is None else seeds[own_tokens]}


def to_device(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | Any:
    """Return the tensor on the device; the CPU does not wait until it is copied to a GPU."""
    if tensor is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def token_tensors(
        rows: Rows, documents: list[int], lengths: list[int],
        n_documents: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a MicroBatch's input_ids, its label_positions and labels without padding, and its
    loss_bounds. `lengths`: those of the documents, then those of the padding."""
    n_tokens = sum(lengths)
    # per document: its answer's, then its prompt's
    n_sums = 2 if rows.loss_record.trains_prompt else 1
    ids, labels = torch.zeros(n_tokens, dtype=torch.int64), torch.full((n_tokens,), IGNORE)
    sum_at = torch.zeros(n_tokens, dtype=torch.int64)  # index of the sum that a token belongs to
    start = 0
    for position, i in enumerate(documents):
        row_ids, row_labels = rows.tokens(i)
        whole, trained = (slice(start, start + len(row_ids) - n) for n in (0, 1))
        ids[whole], labels[trained], sum_at[whole] = row_ids, row_labels[1:], n_sums * position
        if rows.loss_record.trains_prompt and rows.desirable[i]:
            is_prompt = labels[trained] == IGNORE
            labels[trained] = row_ids[1:]
            sum_at[trained] += is_prompt
        start = whole.stop
    label_positions = (labels != IGNORE).nonzero().view(-1)
    label_positions = label_positions[sum_at[label_positions].argsort(stable=True)]
    bounds = torch.searchsorted(sum_at[label_positions], torch.arange(n_sums * n_documents + 1))
    return ids, label_positions, labels[label_positions], bounds


def answer_tensors(rows: Rows, micro_step: list[list[int]], n_documents: int,
                   model: Model) -> list[torch.Tensor]:
    """Return the first four tensors of Answers for a micro-step. Each rank's micro-batch has
    `n_documents` documents, padding included."""
    index_of = {document: rank * n_documents + i for rank, documents in enumerate(micro_step)
                for i, document in enumerate(documents)}
    documents = torch.tensor(sorted(index_of)).view(-1, rows.n_answers)
    indices = torch.tensor([index_of[i] for i in documents.flatten().tolist()]).view_as(documents)
    spare = power_of_2(len(documents)) - len(documents) if model.plan.graphs else 0
    n_trainable_tokens = rows.n_trainable_tokens[documents].double()
    reference = torch.zeros_like(n_trainable_tokens)
    if rows.reference is not None:
        reference = rows.reference[documents]
    return [F.pad(tensor, (0, 0, 0, spare))
            for tensor in (indices, n_trainable_tokens, reference, rows.desirable[documents])]


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 2 ** (n - 1).bit_length()


def padded_shape(rows: Rows, micro_step: list[list[int]], model: Model,
                 context_size: int = 1) -> tuple[int, int, int]:
    """Return (tokens, labels, longest document), to which all ranks pad their micro-batch."""
    lengths = [rows.lengths[documents].tolist() for documents in micro_step]
    all_lengths = {length for document_lengths in lengths for length in document_lengths}
    n_tokens = max(map(sum, lengths))
    if len(all_lengths) > 1:
        # but not above the plan's size
        limit = max(n_tokens, model.plan.micro_batch_tokens * context_size)
        n_tokens = min(round_up(n_tokens, model.device), limit)
    n_tokens = math.ceil(n_tokens / context_size) * context_size  # equal shards
    n_labels = max(int(rows.n_labels()[documents].sum()) for documents in micro_step)
    n_labels = min(n_labels, n_tokens // context_size)  # at most all of a shard's
    return n_tokens, round_up(n_labels, model.device), max(all_lengths)
