"""Segments: which keys each query of a micro-batch sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor


@dataclasses.dataclass
class Segments:
    """Queries and keys laid end to end in segments, in flash-attn's terms. The last query of a
    segment sees all its keys, the one before it all but the last, and so on. With a window each
    query sees only the last of these keys.

    A segment is a document, which has as many keys as queries. With context parallelism it is a
    piece of a document, with the keys of the document up to the end of the piece.
    """

    cu_seqlens_q: Tensor  # int32 [segments + 1], where the queries of segments begin and end
    cu_seqlens_k: Tensor  # int32 [segments + 1], where their keys begin and end
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    max_seqlen_q: int  # upper bound of lengths_q
    max_seqlen_k: int
    dropout_seeds: Tensor | None = None  # int64 [queries], see drop(); None: no dropout
    # {window, None: without: the mask of flex_document_attention()}
    masks: dict[int | None, tuple[Tensor, ...]] = dataclasses.field(default_factory=dict)

    @property
    def varlen_args(self) -> tuple[Tensor, Tensor, int, int]:
        """The arguments that kernels for variable lengths have in common, in their order."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    def visible_keys(self, queries: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """The first and the last key that each of some queries sees, int64 like `queries`."""
        segment = torch.bucketize(queries, self.cu_seqlens_q[1:], right=True)
        ends_q, ends_k = (bounds[1:][segment].long()
                          for bounds in (self.cu_seqlens_q, self.cu_seqlens_k))
        last = ends_k - ends_q + queries
        first = self.cu_seqlens_k[segment].long()
        return torch.maximum(first, last - window + 1) if window else first, last


def document_segments(cu_seqlens: Tensor, lengths: Sequence[int], max_seqlen: int,
                      dropout_seeds: Tensor | None = None) -> Segments:
    """The Segments of whole documents."""
    lengths = tuple(lengths)
    return Segments(cu_seqlens, cu_seqlens, lengths, lengths, max_seqlen, max_seqlen, dropout_seeds)
