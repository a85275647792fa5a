"""TokenRows: the rows of the embedding and of the lm_head that --trainable_tokens trains.

lora/initial_token_rows.py has the values with which they begin, data/trainable_tokens.py the
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.layer.lora_matmul import fp32_matmul

TOKENS_AT_ONCE = 2**14  # tokens of a micro-batch whose gradients are summed at once


class TokenRows:
    """`rows` [tables, tokens, hidden], fp32: the trained rows of the embedding and, unless it is
    tied, of the lm_head.

    write() copies them into the tables, rounded to their dtype, and forward, evaluation and
    generation read the tables alone. Backward adds to rows.grad: EmbeddingRows as the embedding,
    LinearCrossEntropy as the lm_head. Each rank has all rows.
    """

    def __init__(self, ids: Sequence[int], local_rows: range, rows: Tensor, grad: Tensor) -> None:
        """`ids`: of the tokens; `local_rows`: the rows of the tables that this rank has; `rows` and
        `grad`: parts of the adapter's weights and of their gradient."""
        self.rows = rows.requires_grad_()
        self.rows.grad = grad
        self.ids = torch.tensor(ids, device=rows.device)
        is_own = (self.ids >= local_rows.start) & (self.ids < local_rows.stop)
        self.own = is_own.nonzero().view(-1)  # the tokens whose rows this rank's tables have
        self.table_rows = self.ids[self.own] - local_rows.start  # these rows

    @torch.no_grad()
    def write(self, embedding: Tensor, lm_head: Tensor) -> None:
        """Copy the rows into this rank's tables, which may be on the host."""
        for table, rows in zip((embedding, lm_head), self.rows):  # a tied lm_head is the embedding
            table[self.table_rows.to(table.device)] = rows[self.own].to(table)


class EmbeddingRows(torch.autograd.Function):
    """Returns embeddings [n, hidden] as they are; their gradients are those of the trained rows
    [tokens, hidden]: each row gets the sum over the places where its token is."""

    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, rows: Tensor, ids: Tensor, row_ids: Tensor) -> Tensor:
        ctx.ids, ctx.row_ids = ids, row_ids
        return embeddings.view_as(embeddings)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        grad_rows = grad.new_zeros(len(ctx.row_ids), grad.shape[1], dtype=torch.float32)
        for ids, part in zip(ctx.ids.split(TOKENS_AT_ONCE), grad.split(TOKENS_AT_ONCE)):
            is_there = (ctx.row_ids[:, None] == ids[None]).to(part.dtype)
            grad_rows += fp32_matmul(is_there, part)
        return None, grad_rows, None, None
