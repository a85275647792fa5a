"""Embedding of tokens; its table is sharded by rows."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.norms import norm_of
from fsdp_qlora.model.parameters import CHUNK_BYTES, ModelParameters
from fsdp_qlora.model.token_rows import EmbeddingRows
from fsdp_qlora.optional_triton import tl, triton


if triton:

    @triton.jit
    def look_up_kernel(ids, table, out, first, n_rows, width, COLUMNS: tl.constexpr):
        """Rows `ids` - first of `table` [n_rows, width]; 0 for rows that are not in the table."""
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(ids + token) - first
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        in_table = (column < width) & (row >= 0) & (row < n_rows)
        values = tl.load(table + row * width + column, in_table, 0.0)
        tl.store(out + token * width + column, values, column < width)


def look_up(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Return the embeddings [n, hidden] of ids [n] from `table` [rows, hidden], whose first row
    belongs to id `first`; 0 for ids that are not in the table. The GPU reads a table in pinned host
    memory directly."""
    if table.is_cpu and ids.is_cuda:
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=ids.device)
        grid = (len(ids), math.ceil(table.shape[1] / 1024))
        look_up_kernel[grid](ids.contiguous(), table, out, first, len(table), table.shape[1], 1024)
        return out
    local = ids - first
    absent = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill(absent, 0), table).masked_fill_(absent[:, None], 0)


def embed(model: ModelParameters, ids: Tensor) -> Tensor:
    """Return the embeddings [n, hidden] of ids [n]. All ranks of the shard group must call this,
    with the same n."""
    out = look_up_sharded(model, ids, model.embedding)
    if (trained := model.token_rows) and torch.is_grad_enabled():
        out = EmbeddingRows.apply(out, trained.rows[0], ids, trained.ids)
    arch = model.arch
    if arch.embedding_norm:
        return norm_of(out, None, "rms", arch.norm_eps)
    if arch.embedding_multiplier == 1:
        return out
    if arch.rounded_multiplier:
        return out * torch.tensor(arch.embedding_multiplier, dtype=out.dtype)
    return out * arch.embedding_multiplier


def look_up_sharded(model: ModelParameters, ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows [n, width] of ids [n] from a table of which this rank has the rows
    model.local_rows. All ranks of the shard group must call this, with the same n.

    Only ids are gathered. Each rank looks up the tokens of all ranks among its own rows, and gets
    the sum over ranks for its own tokens, in which one term is not zero. For Llama-3-70B that moves
    0.1 GB for 4,096 tokens on 2 GPUs, instead of a weight of 2.1 GB.
    """
    n_shards = model.shard_group_size
    first = model.local_rows.start
    if n_shards == 1:
        return look_up(ids, table, 0)
    ids = model.all_gather(ids)  # [n_shards, n]
    out = torch.empty(ids.shape[1], table.shape[1], dtype=table.dtype, device=ids.device)
    size = max(1, CHUNK_BYTES // (n_shards * table[:1].nbytes))
    for chunk in (slice(i, i + size) for i in range(0, len(out), size)):
        rows = look_up(ids[:, chunk].flatten(), table, first)
        dist.reduce_scatter_tensor(out[chunk], rows, group=model.shard_group)
    return out
