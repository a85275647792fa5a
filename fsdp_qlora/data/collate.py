"""Collate the documents of a micro-batch: its tensors, padded to the sizes of all ranks.

    make_micro_batch()             the MicroBatch of this rank in a micro-step of packing.py
      padded_sizes()               the sizes that the micro-batches of all ranks have
      pad_documents()              documents end to end, and then those of the padding
      token_tensors()              tokens, positions and targets
      dropout_seeds()              each token's own, whatever micro-batch it is in
      local_tensors()              with context parallelism: this rank's part of them
      make_preference_inputs()     for a preference loss: the rows of all ranks
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.packing import MicroStep
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.recurrence import chunk_table
from fsdp_qlora.micro_batch.context_parallel import (
    MIN_PIECE_TOKENS, ContextGroup, has_long_pieces, make_context_shard)
from fsdp_qlora.micro_batch.micro_batch import MicroBatch, MicroBatchFormat, PreferenceInputs


def make_micro_batch(rows: Rows, micro_step: MicroStep, micro_batch_format: MicroBatchFormat,
                     step_seed: torch.Tensor | None = None) -> MicroBatch:
    """Return this rank's MicroBatch in a micro-step of pack_rows(), or with context parallelism its
    part of the one that its group shares. All ranks pad to one shape, because they compute
    embedding and lm_head together, and every rank waits for the longest one anyway.

    `rows`: those of the step. `step_seed`: of dropout; None: without.
    """
    device, group = micro_batch_format.device, micro_batch_format.context_group
    documents = micro_step[group.group_index]
    sizes = padded_sizes(rows, micro_step, micro_batch_format)
    padded = pad_documents(
        rows.lengths[documents].tolist(), sizes, micro_batch_format.uses_cuda_graphs)
    tensors = token_tensors(rows, documents, padded, sizes)
    if step_seed is not None:
        tensors["dropout_seeds"] = dropout_seeds(
            step_seed, documents, padded.lengths, tensors["position_ids"])
    if micro_batch_format.has_recurrence:
        of_any_lengths = micro_batch_format.uses_cuda_graphs and not padded.is_fixed_len
        tensors["recurrence_chunks"] = chunk_table(padded.starts, of_any_lengths)
    shard = None
    is_varlen = not padded.is_fixed_len
    if group.size > 1:
        shard = make_context_shard(padded.lengths, group)
        tensors |= local_tensors(tensors, shard.tokens)
        # the kernels for one length also run long pieces of any lengths, one after the other
        is_varlen = not has_only_long_pieces(padded.lengths, len(documents), group)
    tensors |= pad_targets(tensors, sizes.n_targets)
    tensors = {name: to_device(tensor, device) for name, tensor in tensors.items()}
    if shard:
        shard = shard.to(device, tensors["dropout_seeds"])
    preference = None
    if rows.loss != "sft":
        preference = make_preference_inputs(rows, micro_step, sizes, micro_batch_format)
    return MicroBatch(
        **tensors, preference=preference, lengths=tuple(padded.lengths),
        max_seqlen=padded.max_seqlen,
        is_varlen=is_varlen, context_shard=shard)


class PaddedSizes(NamedTuple):
    """The sizes to which all ranks pad their micro-batches of a micro-step."""

    n_tokens: int  # of a whole micro-batch, which several ranks may share
    n_targets: int  # of a rank
    n_documents: int  # without those of padding
    longest: int  # tokens of the longest document


def padded_sizes(rows: Rows, micro_step: MicroStep,
                 micro_batch_format: MicroBatchFormat) -> PaddedSizes:
    """Return the PaddedSizes of a micro-step: those of its largest micro-batches, rounded up."""
    device, context_parallel_size = micro_batch_format.device, micro_batch_format.context_group.size
    lengths = [rows.lengths[documents].tolist() for documents in micro_step]
    all_lengths = {length for document_lengths in lengths for length in document_lengths}
    n_tokens = max(map(sum, lengths))
    if len(all_lengths) > 1:
        # but not above the plan's size
        limit = max(n_tokens, micro_batch_format.max_tokens * context_parallel_size)
        n_tokens = min(round_up(n_tokens, device), limit)
    n_tokens = math.ceil(n_tokens / context_parallel_size) * context_parallel_size  # equal shards
    n_targets = max(int(rows.n_targets()[documents].sum()) for documents in micro_step)
    n_targets = min(n_targets, n_tokens // context_parallel_size)  # at most all of a shard's
    n_documents = max(map(len, micro_step))
    if micro_batch_format.uses_cuda_graphs:
        n_documents = power_of_2(n_documents)
    return PaddedSizes(n_tokens, round_up(n_targets, device), n_documents, max(all_lengths))


def round_up(n: int, device: torch.device) -> int:
    """Round n up, on a GPU, to one of a few lengths, 16 from one power of 2 to the next: cuBLAS and
    cuDNN choose kernels anew for each new length, and a CUDA graph has one length."""
    if device.type == "cpu":
        return n
    multiple = max(64, 2 ** n.bit_length() // 32)
    return math.ceil(n / multiple) * multiple


def power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least n."""
    return 2 ** (n - 1).bit_length()


class PaddedDocuments(NamedTuple):
    """The documents of a micro-batch end to end, and after them the documents of its padding."""

    lengths: list[int]  # in tokens
    starts: torch.Tensor  # int64 [documents + 1], see MicroBatch.cu_seqlens
    max_seqlen: int  # upper bound of `lengths`
    is_fixed_len: bool  # True if all have one length


def pad_documents(
    lengths: list[int], sizes: PaddedSizes, uses_cuda_graphs: bool
) -> PaddedDocuments:
    """Return the PaddedDocuments of documents of these lengths. The padding's are not longer than
    the longest, `sizes.longest`."""
    n_full, rest = divmod(sizes.n_tokens - sum(lengths), sizes.longest)
    lengths = lengths + [sizes.longest] * n_full + [rest] * (rest > 0)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    if len(set(lengths)) == 1:
        return PaddedDocuments(lengths, starts, sizes.longest, is_fixed_len=True)
    max_seqlen = sizes.longest
    if uses_cuda_graphs:  # one graph serves micro-batches of other numbers of documents, too
        max_seqlen = power_of_2(max_seqlen)
        n_empty = power_of_2(len(lengths) + 1) - len(lengths)  # at least one, for chunk_table()
        starts = F.pad(starts, (0, n_empty), value=sizes.n_tokens)
    return PaddedDocuments(lengths, starts, max_seqlen, is_fixed_len=False)


def token_tensors(rows: Rows, documents: list[int], padded: PaddedDocuments,
                  sizes: PaddedSizes) -> dict[str, Any]:
    """Return the tensors of a MicroBatch by name: its targets without padding, and no dropout seeds
    and chunks yet."""
    ids = torch.zeros(sizes.n_tokens, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORE_INDEX)  # the token that each position predicts
    # a loss that reads prompts has two sums of token losses for each document, its answer's and its
    # prompt's; any other has one
    n_sums = 2 if rows.loss_spec.trains_prompt else 1
    sum_index = torch.zeros_like(ids)  # the sum that each position belongs to
    for number, i in enumerate(documents):
        token_ids, labels = rows.document(i)
        start = int(padded.starts[number])
        stop = start + len(token_ids)
        before_last = slice(start, stop - 1)  # the last position predicts nothing
        ids[start:stop] = token_ids
        targets[before_last] = labels[1:]
        sum_index[start:stop] = n_sums * number
        if rows.loss_spec.trains_prompt and rows.desirable[i]:
            targets[before_last] = token_ids[1:]
            sum_index[before_last] += labels[1:] == IGNORE_INDEX
    target_positions = (targets != IGNORE_INDEX).nonzero().view(-1)
    target_positions = target_positions[sum_index[target_positions].argsort(stable=True)]
    loss_bounds = torch.searchsorted(
        sum_index[target_positions], torch.arange(n_sums * sizes.n_documents + 1))
    starts = padded.starts
    first_positions = starts[:-1].repeat_interleave(starts.diff())  # of each token's document
    return {"input_ids": ids, "n_unpadded": rows.lengths[documents].sum()[None],
            "position_ids": torch.arange(sizes.n_tokens) - first_positions,
            "cu_seqlens": starts.int(), "target_positions": target_positions,
            "targets": targets[target_positions], "loss_bounds": loss_bounds,
            "dropout_seeds": None, "recurrence_chunks": None}


def dropout_seeds(step_seed: torch.Tensor, documents: list[int], lengths: list[int],
                  position_ids: torch.Tensor) -> torch.Tensor:
    """Return each token's seed of dropout, from the numbers of the step and of its document, and
    its position. `lengths`: those of the documents, then those of the padding."""
    indices = torch.tensor(documents + [-1] * (len(lengths) - len(documents)))
    document_seeds = hash_ints(step_seed + indices).repeat_interleave(torch.tensor(lengths))
    # drop() adds a number for the layer and the site
    return hash_ints(document_seeds + position_ids)


def local_tensors(tensors: dict[str, Any], local_tokens: torch.Tensor) -> dict[str, Any]:
    """Return {name: tensor} of those tensors of a shared micro-batch that differ between its ranks,
    this rank's part of them. `local_tokens`: the tokens that this rank computes."""
    own_at = torch.full((len(tensors["input_ids"]),), -1)
    own_at[local_tokens] = torch.arange(len(local_tokens))
    target_positions, seeds = tensors["target_positions"], tensors["dropout_seeds"]
    is_own = own_at[target_positions] >= 0
    return {
        "input_ids": tensors["input_ids"][local_tokens],
        "position_ids": tensors["position_ids"][local_tokens],
        "n_unpadded": (local_tokens < tensors["n_unpadded"]).sum()[None],
        "target_positions": own_at[target_positions[is_own]],
        "targets": tensors["targets"][is_own],
        "loss_bounds": F.pad(is_own.cumsum(0), (1, 0))[tensors["loss_bounds"]],
        "dropout_seeds": None if seeds is None else seeds[local_tokens]}


def has_only_long_pieces(lengths: list[int], n_documents: int, group: ContextGroup) -> bool:
    """Return True if the pieces of all documents are long enough to run attention one piece after
    the other, see has_long_pieces(). `lengths`: those of the `n_documents` documents, then those of
    the padding, which may be shorter."""
    shortest = min(lengths[:n_documents], default=0)
    return (has_long_pieces(shortest, group.size)
            and min(lengths) >= 2 * group.size * MIN_PIECE_TOKENS)


def pad_targets(tensors: dict[str, Any], n_targets: int) -> dict[str, torch.Tensor]:
    """Return targets and target_positions, padded to n_targets."""
    targets, positions = tensors["targets"], tensors["target_positions"]
    assert n_targets >= len(targets), f"{len(targets)} targets, and room for {n_targets}"
    padding = (0, n_targets - len(targets))
    return {"targets": F.pad(targets, padding, value=IGNORE_INDEX),
            "target_positions": F.pad(positions, padding)}


def make_preference_inputs(rows: Rows, micro_step: MicroStep, sizes: PaddedSizes,
                           micro_batch_format: MicroBatchFormat) -> PreferenceInputs:
    """Return the PreferenceInputs of all ranks in a micro-step."""
    # {document: its index among the documents of all ranks, each of which has n_documents}
    index_of = {document: rank * sizes.n_documents + i
                for rank, documents in enumerate(micro_step)
                for i, document in enumerate(documents)}
    documents = torch.tensor(sorted(index_of)).view(-1, rows.documents_per_row)  # [rows, answers]
    n_loss_tokens = rows.n_loss_tokens[documents].double()
    ref_logps = torch.zeros_like(n_loss_tokens)
    if rows.ref_logps is not None:
        ref_logps = rows.ref_logps[documents]
    tensors = {
        "documents": torch.tensor([[index_of[i] for i in row] for row in documents.tolist()]),
        "n_loss_tokens": n_loss_tokens, "ref_logps": ref_logps,
        "desirable": rows.desirable[documents]}
    n_spare = 0
    if micro_batch_format.uses_cuda_graphs:
        n_spare = power_of_2(len(documents)) - len(documents)
    return PreferenceInputs(**{
        name: to_device(F.pad(tensor, (0, 0, 0, n_spare)), micro_batch_format.device)
        for name, tensor in tensors.items()})


def to_device(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | Any:
    """Return the tensor on the device; the CPU does not wait until it is copied to a GPU."""
    if tensor is None or device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
