"""Document-masked attention with flex_attention: soft caps, sinks, windows.

Torch makes one kernel of it; blocks in which no query sees a key are skipped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.kernels.compiled import compiled_copy
from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.architecture import Architecture


BLOCK_TOKENS = 128  # queries, and keys, of a block; torch's kernels divide it further
# the division for heads of more than 256 values, because torch's own does not fit into the shared
# memory of an H100
WIDE_HEADS: Any = {
    "num_stages": 1, "num_warps": 8, "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32, "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32}

# A mask is a tuple, which visible_blocks() makes and flex_function() reads:
#   first and last, int32 [blocks, BLOCK_TOKENS]: the first and the last key that each query sees;
#     it sees all keys in between, and no others;
#   eight tables, in the order of BlockMask's arguments, two from each call of ordered_blocks(): the
#     blocks of keys that each block of queries sees in part, and those that it sees whole; then the
#     blocks of queries that see each block of keys in part, and those that see it whole.
# The kernels read `first` and `last` only for blocks that are seen in part, and skip blocks in no
# table.


def flex_document_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of documents of any lengths by torch's flex_attention, see attention.py."""
    if window not in segments.masks:
        segments.masks[window] = visible_blocks(segments, len(query), len(key), window)
    mask = segments.masks[window]
    chosen = (arch.attention_softcap, arch.attention_scale)
    # on a CPU it is slow and has no backward: for tests only
    shape = query.shape[1], *key.shape[1:]
    attend = compiled_flex(*chosen, shape) if query.is_cuda else flex_function(*chosen)
    blocks = [in_blocks(tensor) for tensor in (query, key, value)]
    if query.is_cuda:
        for tensor in blocks:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return attend(*blocks, sinks, mask)[: len(query)]


def in_blocks(tensor: Tensor) -> Tensor:
    """Reshape [n, ...] to [blocks, BLOCK_TOKENS, ...], with zeros at the end. So one kernel serves
    micro-batches of all lengths (compiling takes 10 s), and still knows that no block is cut, which
    halves its time."""
    if missing := -len(tensor) % BLOCK_TOKENS:
        tensor = torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
    return tensor.unflatten(0, (-1, BLOCK_TOKENS))


def visible_blocks(
    segments: Segments, n_queries: int, n_keys: int, window: int | None
) -> tuple[Tensor, ...]:
    """Return the mask of a micro-batch, see above. The queries that in_blocks() adds at the end see
    what the last query sees, because the softmax of a query without keys would be NaN."""
    device = segments.cu_seqlens_q.device
    queries = torch.arange(math.ceil(n_queries / BLOCK_TOKENS) * BLOCK_TOKENS, device=device)
    first, last = segments.visible_keys(queries.clamp(max=n_queries - 1), window)
    starts = torch.arange(0, n_keys, BLOCK_TOKENS, device=device)  # of blocks of keys
    ends = starts + BLOCK_TOKENS - 1
    # [blocks of queries, of keys]; first and last never fall, so the outermost queries decide
    firsts, lasts = (x.view(-1, BLOCK_TOKENS) for x in (first, last))
    is_seen = (starts <= lasts[:, -1:]) & (ends >= firsts[:, :1])
    is_whole = (ends <= lasts[:, :1]) & (starts >= firsts[:, -1:])
    is_partial = is_seen & ~is_whole
    tables = [ordered_blocks(blocks)
              for blocks in (is_partial, is_whole, is_partial.t(), is_whole.t())]
    mask = (in_blocks(first.int()), in_blocks(last.int()),
            *(table for pair in tables for table in pair))
    if device.type == "cuda":
        for ends_of in mask[:2]:
            torch._dynamo.maybe_mark_dynamic(ends_of, 0)
        for table in mask[2:]:
            for dim in range(2, table.dim()):
                torch._dynamo.maybe_mark_dynamic(table, dim)
    return mask


def ordered_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return flex_attention's tables for bool [rows, columns], int32: the number of True in each
    row [1, 1, rows], and the columns with these first, in order, [1, 1, rows, columns]."""
    blocks = blocks.int().contiguous()
    columns = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


@functools.cache
def flex_function(softcap: float | None, scale: float | None) -> Callable[..., Tensor]:
    """Return the function (query, key, value, sinks, mask) to compile for a model."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def capped(score: Tensor, batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        assert softcap, "else it is not called"
        # softcap * tanh(score / softcap); on a GPU sigmoid is an exponential and a division
        return softcap * (2 * torch.sigmoid(2 / softcap * score) - 1)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, mask: tuple[Any, ...]
    ) -> Tensor:
        query, key, value, first, last = (
            t.flatten(0, 1) for t in (query, key, value, *mask[:2]))

        def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= last[q]) & (k >= first[q])

        blocks = BlockMask((len(query), len(key)), *mask[2:], BLOCK_SIZE=(BLOCK_TOKENS,) * 2,
                           mask_mod=is_visible)
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out, rest = flex_attention(
            q, k, v, capped if softcap else None, blocks, scale, enable_gqa=True,
            kernel_options=WIDE_HEADS if query.shape[-1] > 256 else None,
            return_aux=AuxRequest(lse=sinks is not None))
        out = out[0].transpose(0, 1)
        if sinks is None:
            return out
        # a sink adds exp(sink) to a query's sum, see sinks.py; here autograd differentiates lse
        share = torch.sigmoid(rest.lse[0] - sinks.float()[:, None])
        return (out * share.t()[..., None]).to(query.dtype)

    return attend


@functools.cache
def compiled_flex(
    softcap: float | None, scale: float | None, shape: tuple[int, ...]
) -> Callable[..., Tensor]:
    """Return flex_function(), compiled for the shape (n_heads, n_kv_heads, head_dim)."""
    name = "_".join(map(str, ("flex", softcap, scale, *shape)))
    return compiled_copy(flex_function(softcap, scale), name)
