"""Rows: the tokenized data set, from which training steps draw.

prepare_data.py makes Rows, and defines examples, documents and rows; sampling.py, packing.py and
collate.py make micro-batches of them.
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
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.model.preference_loss import LOSSES, LossSpec


NUMBER_COLUMNS = "prompt_length", "n_loss_tokens", "desirable", "digest"  # in the order of Rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """The encoded data set. A row is one document, or the two of a pair, the better answer's first.
    The tokens lie end to end in a few int32 arrays, views of a memory-mapped file that all ranks of
    a node share.

    `labels` are the tokens in the loss, and IGNORE_INDEX elsewhere. n_loss_tokens counts them, but
    for a document's first token, which nothing predicts. n_targets() counts the tokens whose loss
    is computed: the same ones and, for ORPO, the prompts of good answers."""

    loss: str  # the loss that these rows are for, a key of LOSSES
    input_ids: list[np.ndarray]
    labels: list[np.ndarray]  # same sizes as input_ids
    bounds: list[int]  # position of each array's first token among all tokens
    starts: torch.Tensor  # int64 [documents], position of each first token among all tokens
    lengths: torch.Tensor  # [documents], in tokens
    prompt_lengths: torch.Tensor  # [documents], tokens before the first one in the loss
    n_loss_tokens: torch.Tensor  # [documents], tokens in the loss
    desirable: torch.Tensor  # bool [documents]: a good answer, or the better one of a pair?
    document_hashes: torch.Tensor  # int64 [documents], hash of tokens, labels and `desirable`
    example_ids: torch.Tensor  # int64 [documents], number of the example that each was made from
    # documents of the data set that are a plain-text prompt and completion
    n_plain_completions: int = 0
    # {JSON of chat template variables: number of the data set's answers that are rendered with
    # them}, "{}": no variables. To get such an answer, a prompt must set the same variables.
    template_kwargs: dict[str, int] = dataclasses.field(default_factory=dict)
    # fp64 [documents], the log-probability of each answer before the first step
    ref_logps: torch.Tensor | None = None
    # the same prompts with answers of other rows, for KTO, see mismatch()
    mismatched: Rows | None = None
    # int64 [documents], positions of the answers; only in mismatched Rows
    answer_starts: torch.Tensor | None = None

    @property
    def loss_spec(self) -> LossSpec:
        return LOSSES[self.loss]

    @property
    def documents_per_row(self) -> int:
        """1, or 2 if a row is a pair of answers."""
        return self.loss_spec.documents_per_row

    def __len__(self) -> int:
        return len(self.starts) // self.documents_per_row

    @property
    def loss_divisor(self) -> int:
        """Divisor of the summed loss of these Rows: the number of tokens in the loss, or of rows.
        """
        return int(self.n_loss_tokens.sum()) if self.loss == "sft" else len(self)

    def document(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input_ids, labels) of document i, int64 [tokens]; labels are IGNORE_INDEX outside
        the loss."""
        start, n_tokens = int(self.starts[i]), int(self.lengths[i])
        if self.answer_starts is None:
            return self.read(start, n_tokens)
        n_prompt, answer = int(self.prompt_lengths[i]), int(self.answer_starts[i])
        parts = self.read(start, n_prompt), self.read(answer, n_tokens - n_prompt)
        ids, labels = map(torch.cat, zip(*parts))
        return ids, labels

    def read(self, start: int, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input_ids, labels) of n_tokens of one document from position `start` on, int64.
        """
        array = bisect.bisect_right(self.bounds, start) - 1
        first = start - self.bounds[array]
        part = slice(first, first + n_tokens)
        ids, labels = (torch.from_numpy(arrays[array][part].astype(np.int64))
                       for arrays in (self.input_ids, self.labels))
        return ids, labels

    def documents_of(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the indices of the documents of the rows with these indices."""
        n = self.documents_per_row
        return (indices[:, None] * n + torch.arange(n)).flatten()

    def select(self, indices: torch.Tensor) -> Rows:
        """Return the Rows with these indices; they share the token arrays."""
        documents = self.documents_of(indices)
        columns: dict[str, Any] = {name: column[documents] for name, column in vars(self).items()
                                   if isinstance(column, torch.Tensor)}
        mismatched = self.mismatched and self.mismatched.select(indices)
        return dataclasses.replace(self, **columns, mismatched=mismatched)

    def as_documents(self) -> Rows:
        """Return the documents as --loss sft has them: each is a row of its own."""
        return dataclasses.replace(self, loss="sft")

    def mismatch(self, seed: int, max_tokens: int) -> Rows:
        """Return the prompts of these rows, each with another row's answer: that of the row before
        it in a random order, perhaps truncated already. Such a document is truncated to
        `max_tokens`. `n_loss_tokens` is an upper bound, because documents are truncated here, and
        the first token of an answer without a prompt is in the loss only after another row's
        prompt."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        other = torch.empty_like(order).scatter_(0, order, order.roll(1))
        lengths = self.prompt_lengths + (self.lengths - self.prompt_lengths)[other]
        return dataclasses.replace(
            self.as_documents(), lengths=lengths.clamp(max=max_tokens),
            answer_starts=(self.starts + self.prompt_lengths)[other],
            n_loss_tokens=(self.n_loss_tokens + (self.prompt_lengths == 0))[other])

    def row_lengths(self) -> torch.Tensor:
        """Return [rows], in tokens, with both answers of a pair."""
        return self.lengths.view(-1, self.documents_per_row).sum(1)

    def n_targets(self) -> torch.Tensor:
        """Return [documents], the number of MicroBatch.targets: tokens whose loss is computed."""
        if not self.loss_spec.trains_prompt:
            return self.n_loss_tokens
        return torch.where(self.desirable, self.lengths - 1, self.n_loss_tokens)

    def n_repeated(self) -> int:
        """Return the number of rows that repeat an earlier row, token for token."""
        return len(self) - len(self.document_hashes.view(-1, self.documents_per_row).unique(dim=0))

    def duplicate_groups(self) -> torch.Tensor:
        """Return int64 [documents], with one number for documents that were made from one example
        or that are equal, token for token."""
        _, same = self.document_hashes.unique(return_inverse=True)
        groups = self.example_ids
        before = None
        while before is None or not torch.equal(groups, before):
            before = groups
            # each part gets the lowest number of its documents
            for parts in same, self.example_ids:
                lowest = groups.new_full((int(parts.max()) + 1,), len(groups))
                groups = lowest.scatter_reduce(0, parts, groups, "amin")[parts]
        return groups

    def sha256(self) -> str:
        """Return the hash of all rows in order, by which a resumed run recognizes its data."""
        return hashlib.sha256(self.document_hashes.numpy().tobytes()).hexdigest()


def make_rows(documents: Sequence[tuple[Sequence[int], Sequence[int]]], loss: str = "sft") -> Rows:
    """Return Rows in memory from [(input_ids, labels)]. A row has one or two of these documents.
    The first of two is the better answer. In rows of one all are good answers with --loss sft,
    every other one with an unpaired loss."""
    encoded = [encode_document(ids, labels, len(ids), loss == "sft" or i % 2 == 0)
               for i, (ids, labels) in enumerate(documents)]
    input_ids, labels = (np.concatenate([document[name] for document in encoded])
                         for name in ("input_ids", "labels"))
    lengths, prompt_lengths, n_loss_tokens, desirable, document_hashes = (
        torch.tensor([document[name] for document in encoded])
        for name in ("length", *NUMBER_COLUMNS))
    starts = lengths.cumsum(0) - lengths
    example_ids = torch.arange(len(encoded)) // LOSSES[loss].documents_per_row
    return Rows(
        loss=loss, input_ids=[input_ids], labels=[labels], bounds=[0], starts=starts,
        lengths=lengths, prompt_lengths=prompt_lengths, n_loss_tokens=n_loss_tokens,
        desirable=desirable, document_hashes=document_hashes, example_ids=example_ids)


def random_rows(vocab_size: int, config: Config) -> Rows:
    """Return Rows of random tokens, all of full length, for measuring without a data set."""
    assert config.max_seq_len, "resolve_max_seq_len() fills it in"
    generator = torch.Generator().manual_seed(config.seed)
    n_documents = config.batch_size * LOSSES[config.loss].documents_per_row
    ids = torch.randint(vocab_size, (n_documents, config.max_seq_len), generator=generator,
                        dtype=torch.int32)
    return make_rows([(document, document) for document in ids], config.loss)


def encode_document(ids: Sequence[int], labels: Sequence[int], max_tokens: int,
                    desirable: bool = True) -> dict[str, Any]:
    """Return the values of ENCODED (encode_examples.py) that depend on the tokens of one document,
    truncated to `max_tokens`. `desirable`: is it a good answer?"""
    is_truncated = len(ids) > max_tokens
    ids, labels = (np.asarray(values[:max_tokens], np.int32) for values in (ids, labels))
    content = ids.tobytes() + labels.tobytes() + b"bad" * (not desirable)
    sha = hashlib.blake2b(content, digest_size=8).digest()
    in_loss = labels != IGNORE_INDEX
    return {"input_ids": ids, "labels": labels, "length": len(ids),
            "prompt_length": int(in_loss.argmax()) if len(ids) else 0,
            "n_loss_tokens": int(in_loss[1:].sum()),  # nothing predicts the first token
            "desirable": desirable, "truncated": is_truncated,
            "digest": int.from_bytes(sha, "little", signed=True)}
