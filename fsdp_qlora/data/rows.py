"""Rows: the tokenized data set, from which training steps draw.

Here and in all that works on Rows a row is one of the --batch_size rows that a step draws; a row of
a file is an example here. prepare.py makes Rows, packing.py makes micro-batches of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fsdp_qlora.config import Config
from fsdp_qlora.data.forms import IGNORE
from fsdp_qlora.model.loss import LOSSES, Loss


COLUMNS = "prompt_length", "n_trainable_tokens", "desirable", "digest"  # as Rows has them


@dataclasses.dataclass(frozen=True)
class Rows:
    """The encoded data set. A row is one document, of which an example that is a conversation may
    give several; or of pairs two documents, the better answer's and then the other's. The tokens
    lie end to end in a few int32 arrays, views of a memory-mapped file that all ranks of a node
    share."""

    loss: str  # of LOSSES: what these rows are for
    input_ids: list[np.ndarray]
    labels: list[np.ndarray]  # of the same sizes
    bounds: list[int]  # where among all tokens each array begins
    starts: torch.Tensor  # int64 [documents], where among all tokens each begins
    lengths: torch.Tensor  # [documents], in tokens
    prompt_lengths: torch.Tensor  # [documents], tokens before the first trained one
    n_trainable_tokens: torch.Tensor  # [documents], those that the loss is the mean of
    desirable: torch.Tensor  # bool [documents]: is it a good answer, of a pair the better one?
    digests: torch.Tensor  # int64 [documents], of tokens, labels and `desirable`
    sources: torch.Tensor  # int64 [documents], the number of the example that each was made of
    n_plain: int = 0  # documents of the data set that are prompt and completion as plain text
    # {JSON of variables of the chat template: how many answers of the data set are rendered with
    # these}, "{}": with none. Whoever asks for such an answer must set the same.
    asked: dict[str, int] = dataclasses.field(default_factory=dict)
    # fp64 [documents], the log-probability of each answer before the first step
    reference: torch.Tensor | None = None
    # the same prompts with answers of other rows, as KTO wants them, see mismatch()
    mismatched: Rows | None = None
    answer_starts: torch.Tensor | None = None  # int64 [documents], of those, where the answers are

    @property
    def kind(self) -> Loss:
        return LOSSES[self.loss]

    @property
    def n_answers(self) -> int:
        """How many documents a row has."""
        return self.kind.n_answers

    def __len__(self) -> int:
        return len(self.starts) // self.n_answers

    @property
    def num_items_in_batch(self) -> int:
        """How many losses the loss of these Rows is the mean of: trained tokens, or rows."""
        return int(self.n_trainable_tokens.sum()) if self.loss == "sft" else len(self)

    def tokens(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of document i, int64 [tokens]; labels are IGNORE where nothing is
        trained."""
        start, n_tokens = int(self.starts[i]), int(self.lengths[i])
        if self.answer_starts is None:
            return self.read(start, n_tokens)
        n_prompt, answer = int(self.prompt_lengths[i]), int(self.answer_starts[i])
        parts = self.read(start, n_prompt), self.read(answer, n_tokens - n_prompt)
        ids, labels = map(torch.cat, zip(*parts))
        return ids, labels

    def read(self, start: int, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(input_ids, labels) of these tokens of one document, int64."""
        array = bisect.bisect_right(self.bounds, start) - 1
        first = start - self.bounds[array]
        part = slice(first, first + n_tokens)
        ids, labels = (torch.from_numpy(arrays[array][part].astype(np.int64))
                       for arrays in (self.input_ids, self.labels))
        return ids, labels

    def documents_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The numbers of the documents of these rows, a tensor of numbers."""
        return (rows[:, None] * self.n_answers + torch.arange(self.n_answers)).flatten()

    def select(self, rows: torch.Tensor) -> Rows:
        """The Rows of these numbers, a tensor, in the same arrays."""
        documents = self.documents_of(rows)
        columns: dict[str, Any] = {name: column[documents] for name, column in vars(self).items()
                                   if isinstance(column, torch.Tensor)}
        mismatched = self.mismatched and self.mismatched.select(rows)
        return dataclasses.replace(self, **columns, mismatched=mismatched)

    def as_documents(self) -> Rows:
        """The documents as --loss sft has them: each is a row and is compared with nothing."""
        return dataclasses.replace(self, loss="sft")

    def mismatch(self, seed: int, max_tokens: int) -> Rows:
        """The prompts of these rows, each with the answer (cut or not) of the row before it in a
        random order, cut to `max_tokens`. `n_trainable_tokens` is an upper bound: some are cut
        here, and the first token of an answer without a prompt is trained only after another."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        other = torch.empty_like(order).scatter_(0, order, order.roll(1))
        lengths = self.prompt_lengths + (self.lengths - self.prompt_lengths)[other]
        return dataclasses.replace(
            self.as_documents(), lengths=lengths.clamp(max=max_tokens),
            answer_starts=(self.starts + self.prompt_lengths)[other],
            n_trainable_tokens=(self.n_trainable_tokens + (self.prompt_lengths == 0))[other])

    def n_scored(self) -> torch.Tensor:
        """[documents], the tokens whose loss is computed: the trained ones, and of ORPO also the
        prompts of good answers."""
        if not self.kind.trains_prompt:
            return self.n_trainable_tokens
        return torch.where(self.desirable, self.lengths - 1, self.n_trainable_tokens)

    def n_repeated(self) -> int:
        """How many rows are an earlier one again, token for token."""
        return len(self) - len(self.digests.view(-1, self.n_answers).unique(dim=0))

    def groups(self) -> torch.Tensor:
        """int64 [documents], the same number for documents that were made of one example, or that
        are the same, token for token."""
        _, same = self.digests.unique(return_inverse=True)
        groups, before = self.sources, None
        while before is None or not torch.equal(groups, before):
            before = groups
            for parts in same, self.sources:  # each takes the lowest number of its documents
                lowest = groups.new_full((int(parts.max()) + 1,), len(groups))
                groups = lowest.scatter_reduce(0, parts, groups, "amin")[parts]
        return groups

    def sha256(self) -> str:
        """Hash of all rows in order, by which a resumed run sees that its data are the same."""
        return hashlib.sha256(self.digests.numpy().tobytes()).hexdigest()


def rows_of(documents: Sequence[tuple[Sequence[int], Sequence[int]]], loss: str = "sft") -> Rows:
    """Rows in memory from [(input_ids, labels)], of which a row has one or two; of two the first is
    the better one, of rows of one every other is good."""
    encoded = [columns_of(ids, labels, len(ids), loss == "sft" or i % 2 == 0)
               for i, (ids, labels) in enumerate(documents)]
    input_ids, labels = (np.concatenate([document[name] for document in encoded])
                         for name in ("input_ids", "labels"))
    lengths, prompt_lengths, n_trainable_tokens, desirable, digests = (
        torch.tensor([document[name] for document in encoded]) for name in ("length", *COLUMNS))
    starts = lengths.cumsum(0) - lengths
    sources = torch.arange(len(encoded)) // LOSSES[loss].n_answers
    return Rows(loss, [input_ids], [labels], [0], starts, lengths, prompt_lengths,
                n_trainable_tokens, desirable, digests, sources)


def random_rows(vocab_size: int, config: Config) -> Rows:
    """Rows of random tokens, all of full length, for measuring without a data set."""
    assert config.max_seq_len, "read_model_config() fills it in"
    generator = torch.Generator().manual_seed(config.seed)
    n_documents = config.batch_size * LOSSES[config.loss].n_answers
    ids = torch.randint(vocab_size, (n_documents, config.max_seq_len), generator=generator,
                        dtype=torch.int32)
    return rows_of([(row, row) for row in ids], config.loss)


def columns_of(ids: Sequence[int], labels: Sequence[int], max_tokens: int,
               desirable: bool = True) -> dict[str, Any]:
    """What ENCODED has of the tokens of one document, cut to `max_tokens`, a good answer or not."""
    is_cut = len(ids) > max_tokens
    ids, labels = (np.asarray(values[:max_tokens], np.int32) for values in (ids, labels))
    content = ids.tobytes() + labels.tobytes() + b"bad" * (not desirable)
    sha = hashlib.blake2b(content, digest_size=8).digest()
    is_trained = labels != IGNORE
    return {"input_ids": ids, "labels": labels, "length": len(ids),
            "prompt_length": int(is_trained.argmax()) if len(ids) else 0,
            "n_trainable_tokens": int(is_trained[1:].sum()),  # nothing predicts the first token
            "desirable": desirable, "cut": is_cut,
            "digest": int.from_bytes(sha, "little", signed=True)}
