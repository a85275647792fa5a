"""Context parallelism: the tokens of a micro-batch are divided over the ranks of a group.

Each document is cut into twice as many pieces as the group has ranks; rank r computes piece r and
the piece that is as far from the end. So all ranks have the same number of tokens and, if documents
are much longer than that, the same amount of causal attention. Only attention looks at other
tokens: each rank gets the keys and values that its queries see, or the rows of which a mixer makes
them, from the ranks that computed them, and in backward returns their gradients. To a kernel a
piece is a document with more keys than queries, see Segments.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_qlora.micro_batch.segments import Segments


# a document's pieces are long if each rank gets at least this many of its tokens, see
# has_long_pieces(). Without --context_parallel_size the planner lets ranks share only rows of which
# each gets as many: with fewer, exchanging keys takes longer than --offload_activations
MIN_TOKENS_PER_RANK = 4096
MIN_PIECE_TOKENS = 64  # tokens; cudnn_attention() has not been tried with shorter ones on a GPU


@dataclasses.dataclass(frozen=True)
class ContextGroup:
    """The consecutive ranks that share each micro-batch; without context parallelism one rank."""

    size: int = 1
    rank: int = 0  # this process's rank in its group
    group_index: int = 0  # number of this group
    n_context_groups: int = 1
    process_group: dist.ProcessGroup | None = None  # None: all processes


# group 0 on every rank: each makes the same micro-batch, whole. (Without context parallelism a run
# has make_context_group(1) instead, where each rank makes its own)
ONLY_PROCESS = ContextGroup()


class DocumentPiece(NamedTuple):
    """A part of a document. Tokens are numbered through the whole micro-batch."""

    document_start: int  # first token of the document
    start: int  # first token of the piece
    stop: int


def cut_documents(lengths: Sequence[int], n: int) -> list[list[DocumentPiece]]:
    """Return the pieces of each of n ranks, in order. `lengths`: of documents laid end to end. All
    ranks get the same number of tokens, so the sum of the lengths must be a multiple of n."""
    pieces: list[list[DocumentPiece]] = [[] for _ in range(n)]
    n_extra, start = [0] * n, 0  # n_extra: each rank's tokens beyond the equal sizes
    for length in lengths:
        sizes, spare = [length // (2 * n)] * (2 * n), [2] * n
        # each remaining token goes to the rank with the fewest tokens, at most two to one rank
        for _ in range(length % (2 * n)):
            rank = min((r for r in range(n) if spare[r]), key=lambda r: n_extra[r])
            spare[rank] -= 1
            # its front piece gets the first one, its back piece the second
            sizes[rank if spare[rank] else -1 - rank] += 1
            n_extra[rank] += 1
        document = start
        for i, size in enumerate(sizes):
            own = pieces[min(i, 2 * n - 1 - i)]
            if size and own and own[-1].document_start == document and own[-1].stop == start:
                own[-1] = own[-1]._replace(stop=start + size)  # the two in the middle touch
            elif size:
                own.append(DocumentPiece(document, start, start + size))
            start += size
    assert len(set(n_extra)) == 1, f"unequal shares: {n_extra} tokens beyond equal ones"
    return pieces


@dataclasses.dataclass(eq=False)
class ContextShard:
    """This rank's part of a micro-batch."""

    context_group: ContextGroup
    pieces: list[list[DocumentPiece]]  # of each rank of the group
    tokens: Tensor  # int64 [own tokens], their places in the whole micro-batch, ascending
    dropout_seeds: Tensor | None = None  # int64 [own tokens]
    _exchanges: dict[int | None, KVExchange] = dataclasses.field(default_factory=dict)

    def to(self, device: torch.device, dropout_seeds: Tensor | None) -> ContextShard:
        """Return a copy on `device`, with the dropout seeds of its tokens."""
        return ContextShard(self.context_group, self.pieces, self.tokens.to(device), dropout_seeds)

    def exchange(self, window: int | None = None) -> KVExchange:
        """Return the KVExchange for layers of this window; None: without one."""
        if window not in self._exchanges:
            self._exchanges[window] = KVExchange.make(self, window)
        return self._exchanges[window]

    @functools.cached_property
    def key_dropout_seeds(self) -> Tensor | None:
        """The dropout seeds of the keys of exchange(), int64 [keys]; None: no dropout. All ranks of
        the group must read this."""
        if self.dropout_seeds is None:
            return None
        return self.exchange().gather(self.dropout_seeds[:, None])[:, 0]

    def gather_kv(
        self, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Segments]:
        """Return the keys and the values that this rank's queries see, and the Segments of queries
        and keys. `key` and `value` are this rank's own, [own tokens, heads, head_dim]. All ranks of
        the group must call this, and its backward."""
        exchange = self.exchange(window)
        rows = torch.cat([key.flatten(1), value.flatten(1)], 1)
        rows = GatherKV.apply(rows, exchange)
        parts = rows.split([key[0].numel(), value[0].numel()], 1)
        key, value = (part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (key, value)))
        return key, value, exchange.segments


def make_context_shard(lengths: Sequence[int], context_group: ContextGroup) -> ContextShard:
    """Return this rank's ContextShard of a micro-batch of documents of these lengths, on the CPU.
    """
    pieces = cut_documents(lengths, context_group.size)
    return ContextShard(context_group, pieces, tokens_of(pieces[context_group.rank]))


def has_long_pieces(length: int, n: int) -> bool:
    """Return True if n ranks that share a document of this length can run attention of one piece
    after the other; for short pieces one call for all of them is faster. n may be 1."""
    return n == 1 or length >= n * MIN_TOKENS_PER_RANK


def tokens_of(pieces: Sequence[DocumentPiece]) -> Tensor:
    """Return the tokens of some pieces, int64."""
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in pieces])


@dataclasses.dataclass(eq=False)
class KVExchange:
    """Which keys go from where to where, for layers of one window."""

    context_group: ContextGroup
    sent: list[Tensor]  # int64, for each rank: which of this rank's tokens it gets, ascending
    n_received: list[int]  # from each rank
    key_at: Tensor  # int64 [keys], places of the segments' keys among those received
    segments: Segments

    @classmethod
    def make(cls, shard: ContextShard, window: int | None) -> KVExchange:
        """Return the exchange of a micro-batch. It follows from the documents' lengths alone, so no
        rank has to tell another what it needs."""
        device, rank = shard.tokens.device, shard.context_group.rank
        seen = [[(first_key(piece, window), piece.stop) for piece in pieces]
                for pieces in shard.pieces]
        tokens = [tokens_of(pieces) for pieces in shard.pieces]
        n_tokens = sum(len(own) for own in tokens)
        needed = []  # by each rank: bool [tokens]
        for spans in seen:
            changes = torch.zeros(n_tokens + 1, dtype=torch.int64)
            for start, stop in spans:
                changes[start] += 1
                changes[stop] -= 1
            needed.append(changes.cumsum(0)[:-1] > 0)
        received = [own[needed[rank][own]] for own in tokens]
        place = torch.empty(n_tokens, dtype=torch.int64)
        place[torch.cat(received)] = torch.arange(sum(map(len, received)))
        key_at = torch.cat([place[start:stop] for start, stop in seen[rank]])
        lengths_q = tuple(piece.stop - piece.start for piece in shard.pieces[rank])
        lengths_k = tuple(stop - start for start, stop in seen[rank])
        cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int().to(device)
                      for x in (lengths_q, lengths_k))
        segments = Segments(cu_q, cu_k, lengths_q, lengths_k, max(lengths_q), max(lengths_k),
                            shard.dropout_seeds)
        sent = [is_needed[tokens[rank]].nonzero()[:, 0].to(device) for is_needed in needed]
        return cls(shard.context_group, sent, [len(part) for part in received], key_at.to(device),
                   segments)

    @property
    def _n_sent(self) -> list[int]:
        return [len(tokens) for tokens in self.sent]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of the keys that this rank's queries see, [keys, width], from each rank's
        rows [own tokens, width]. A key that both pieces of a document see is there twice. All ranks
        of the group must call this."""
        sent = torch.cat([rows[tokens] for tokens in self.sent])
        received = rows.new_empty(sum(self.n_received), rows.shape[1])
        dist.all_to_all_single(received, sent, self.n_received, self._n_sent,
                               group=self.context_group.process_group)
        return received[self.key_at]

    def return_gradients(self, grad: Tensor) -> Tensor:
        """Return the gradient of gather()'s `rows`, from that of its result: the sum over all
        ranks, in fp32 and in the ranks' order. All ranks of the group must call this."""
        # a key is in at most two segments, and a sum of two does not depend on their order
        grad_received = grad.new_zeros(sum(self.n_received), grad.shape[1])
        grad_received.index_add_(0, self.key_at, grad)
        grad_sent = grad.new_empty(sum(self._n_sent), grad.shape[1])
        # back to the ranks from which the rows came
        dist.all_to_all_single(grad_sent, grad_received, self._n_sent, self.n_received,
                               group=self.context_group.process_group)
        n_own = sum(self.segments.lengths_q)
        total = grad.new_zeros(n_own, grad.shape[1], dtype=torch.float32)
        for tokens, part in zip(self.sent, grad_sent.split(self._n_sent)):
            total[tokens] += part
        return total.to(grad.dtype)


def first_key(piece: DocumentPiece, window: int | None) -> int:
    """Return the first token whose key a piece's first query sees."""
    return max(piece.document_start, piece.start - window + 1) if window else piece.document_start


class GatherKV(torch.autograd.Function):
    """KVExchange.gather(), for autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: KVExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.gather(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.return_gradients(grad), None
