"""The rows of all --dataset as tokens and labels, encoded once and mapped from the cache. It stands
on sources.py for rows, forms.py for what they mean, cache.py for keeping them, and leaves to
bins.py which of them a step works on.

A row's way to tokens: encode_pieces() -> try_row() -> parse_row() of forms.py -> parse_chat() of
chat.py, if it is a conversation -> tokenize(). With a --loss of preferences, parse_preference() of
preferences.py comes before parse_row().
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.cache import PARTS, has_table, open_cache, read_table, write_table
from fsdp_qlora.data.chat import parse_chat
from fsdp_qlora.data.forms import IGNORE, Document, Ids, Part, parse_row, printable
from fsdp_qlora.data.preferences import parse_preference
from fsdp_qlora.data.sources import Piece, RefusedRow, find_pieces, read_pieces
from fsdp_qlora.data.template import with_day
from fsdp_qlora.data.tools import openai_calls
from fsdp_qlora.files import digest, text_digest, write_whole
from fsdp_qlora.model.loss import LOSSES, Loss
from fsdp_qlora.ranks import Stop, say, together

if TYPE_CHECKING:
    from train_fsdp_qlora import Config

BATCH = 256  # rows that are parsed at once
# characters that the tokenizer gets at once: what it gives for them takes some 100 MB
BATCH_CHARACTERS = 2**19
ENCODED = {  # what encode_pieces() yields of a document
    "input_ids": "int32s", "labels": "int32s", "length": "int32", "prompt_length": "int32",
    "n_trained": "int32", "desirable": "bool", "digest": "int64",
    "cut": "bool",  # of these eight see columns_of()
    "kept": "bool", "refused": "bool",  # neither: the row is left out
    "is_first": "bool",  # of its row
    "form": "string",  # of its row, with the keys that are ignored
    "plain": "bool",  # whether its row is a prompt and a completion as texts
    "renamed": "string",  # the keys that --columns renames in its row, as JSON
    "left_out": "string", "where": "string"}  # why, and which row; "" if it is kept


COLUMNS = "prompt_length", "n_trained", "desirable", "digest"  # as Rows has them


@dataclasses.dataclass(frozen=True)
class Rows:
    """The encoded data set. A row is one document of parse_row(), of which a conversation may give
    several; or of pairs two, the better answer's and then the other's. The tokens lie end to end in
    a few int32 arrays, views of a memory-mapped file that all ranks of a node share."""

    loss: str  # of LOSSES: what these rows are for
    input_ids: list[np.ndarray]
    labels: list[np.ndarray]  # of the same sizes
    bounds: list[int]  # where among all tokens each array begins
    starts: torch.Tensor  # int64 [documents], where among all tokens each begins
    lengths: torch.Tensor  # [documents], in tokens
    prompt_lengths: torch.Tensor  # [documents], tokens before the first trained one
    n_trained: torch.Tensor  # [documents], trained tokens: those that the loss is the mean of
    desirable: torch.Tensor  # bool [documents]: is it a good answer, of a pair the better one?
    digests: torch.Tensor  # int64 [documents], of tokens, labels and `desirable`
    sources: torch.Tensor  # int64 [documents], the number of the example that each was made of
    n_plain: int = 0  # how many of the data set are a prompt and a completion as plain text
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
        """The same documents, each a row of its own."""
        return dataclasses.replace(self, loss="sft")

    def mismatch(self, seed: int, max_tokens: int) -> Rows:
        """The prompts of these rows, each with the answer (cut or not) of the row before it in a
        random order, cut to `max_tokens`. `n_trained` is an upper bound: some are cut here, and
        the first token of an answer without a prompt is trained only after another prompt."""
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        other = torch.empty_like(order).scatter_(0, order, order.roll(1))
        lengths = self.prompt_lengths + (self.lengths - self.prompt_lengths)[other]
        return dataclasses.replace(
            self.as_documents(), lengths=lengths.clamp(max=max_tokens),
            answer_starts=(self.starts + self.prompt_lengths)[other],
            n_trained=(self.n_trained + (self.prompt_lengths == 0))[other])

    def n_scored(self) -> torch.Tensor:
        """[documents], the tokens whose loss is computed: the trained ones, and of ORPO also the
        prompts of good answers."""
        if not self.kind.trains_prompt:
            return self.n_trained
        return torch.where(self.desirable, self.lengths - 1, self.n_trained)

    def n_repeated(self) -> int:
        """How many rows are an earlier one again, token for token."""
        return len(self) - len(self.digests.view(-1, self.n_answers).unique(dim=0))

    def sha256(self) -> str:
        """Hash of all rows in order, by which a resumed run sees that its data are the same."""
        return hashlib.sha256(self.digests.numpy().tobytes()).hexdigest()


def prepare_data(config: Config, directory: Path, tokenizer: PreTrainedTokenizerFast | None,
                 vocab_size: int, day: str) -> tuple[Rows, Rows | None]:
    """The Rows to train on and those to evaluate on, or None. All ranks must call this."""
    if config.random_weights and not config.dataset:
        say(f"data: {config.batch_size} rows of random tokens")
        return with_mismatched(random_rows(vocab_size, config), config), None
    settings: tuple[Any, ...] = (tokenizer, config.max_seq_len, vocab_size, day,
                                 config.columns or (), config.loss)
    sources = config.dataset or (str(directory / "demo" / "data.jsonl"),)
    rows, line, renamed = prepare_rows(sources, *settings)
    say(f"data: {line}")
    if config.dataset and (n_repeated := rows.n_repeated()):
        say(f"repeated: {n_repeated:,} of these rows are another one again, token for token")
    if config.model and tokenizer and tokenizer.chat_template and rows.n_plain:
        way = "--columns completion=response" if rows.n_answers == 1 else "write them as messages"
        say(f"chat template: not used for {rows.n_plain // rows.n_answers:,} prompts and"
            f" completions, which are plain text; for that {way}")
    eval_rows, fraction = None, None
    if config.eval_dataset:
        try:
            fraction = float(config.eval_dataset[0])
        except ValueError:
            eval_rows, line, also = prepare_rows(
                config.eval_dataset, *settings, flag="--eval_dataset")
            say(f"evaluation: {line}")
            renamed |= also
    for column in config.columns or ():
        if (key := column.split("=")[0]) not in renamed:
            raise Stop(f"--columns {column}: no row has the key {key}")
    if fraction is not None:
        rows, eval_rows = hold_out(rows, fraction, config)
    n_good = int(rows.desirable.sum())
    if rows.kind.is_judged and n_good in (0, len(rows)):
        raise Stop(f"--loss {config.loss} learns from good answers beside bad ones, and of"
                   f" {len(rows):,} rows {n_good:,} have label true: --loss sft trains good answers"
                   " alone")
    return with_mismatched(rows, config), eval_rows and with_mismatched(eval_rows, config)


def with_mismatched(rows: Rows, config: Config) -> Rows:
    """The rows, with `mismatched` where their loss reads it."""
    if not rows.kind.is_judged:
        return rows
    assert config.max_seq_len, "read_model_config() fills it in"
    mismatched = rows.mismatch(config.seed, config.max_seq_len)
    return dataclasses.replace(rows, mismatched=mismatched)


def hold_out(rows: Rows, fraction: float, config: Config) -> tuple[Rows, Rows]:
    """Split the rows into those to train on and a fraction to evaluate on. Rows that were made of
    one example stay together."""
    sources = rows.sources.unique()
    n = round(fraction * len(sources)) if abs(fraction) < 1e9 else fraction
    values = config.eval_dataset or ()
    if not 0 < n < len(sources) or len(values) > 1:
        raise Stop(f"--eval_dataset {' '.join(values)}: is {n} of {len(sources)}"
                   " rows: give one fraction between 0 and 1, or files")
    order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(config.seed))
    held_out = torch.isin(rows.sources[:: rows.n_answers], sources[order[:n]])
    say(f"evaluation: {held_out.sum():,} of these rows, which are not trained on")
    train, evaluation = (rows.select(mask.nonzero().view(-1)) for mask in (~held_out, held_out))
    return train, evaluation


def prepare_rows(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, max_seq_len: int,
                 vocab_size: int, day: str, columns: Sequence[str] = (), loss: str = "sft",
                 flag: str = "--dataset") -> tuple[Rows, str, set[str]]:
    """The Rows of all `sources` for this loss, a line on what became of them, and the set of keys
    that `columns` have renamed. All ranks must call this."""
    name = " ".join(sources)
    with together():
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, and generation would never stop: set"
                             " eos_token in its tokenizer_config.json")
        settings: dict[str, Any] = {
            "tokenizer": with_day(tokenizer, day), "max_seq_len": max_seq_len,
            "vocab_size": vocab_size, "new_names": columns, "loss": loss}
        try:
            pieces, contents = pieces_of_all(sources)
        except ValueError as e:
            raise ValueError(f"{flag} {e}")
        key = cache_key(sources, contents, **settings)
    with together(), open_cache(key) as directory:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not has_table(directory):
            if not pieces:
                raise ValueError(f"{flag} {name}: has no rows")
            parts = write_table(directory, pieces, encode_batches, **settings)
            if contents != pieces_of_all(sources, is_silent=True)[1]:
                raise ValueError(f"{flag} {name}: was rewritten while it was read: start again")
            write_whole(directory / PARTS, json.dumps(parts))
    with together():
        table = read_table(directory)
        if not len(table):
            raise ValueError(f"{flag} {name}: has no rows")
        # not pyarrow's index(): it imports pandas, 0.3 s
        if (refused := table["refused"].to_numpy()).any():
            first = int(refused.argmax())
            raise ValueError(f"{table['where'][first]}: {table['left_out'][first]}")
        rows = rows_of_table(table, loss)
        if not len(rows):
            raise ValueError(f"{name}: none of its {len(table['kept'])} rows can be trained on:"
                             f" {describe_left_out(table)}")
        renamed = {key for keys in counts_of(table["renamed"]) for key in json.loads(keys)}
        return rows, f"{name}: {describe_rows(rows, table, max_seq_len)}", renamed


def pieces_of_all(sources: Sequence[str],
                  is_silent: bool = False) -> tuple[list[Piece], list[list[str]]]:
    """The pieces of all sources end to end, and the digests of each, see find_pieces()."""
    found = [find_pieces(source, is_silent) for source in sources]
    return [piece for pieces, _ in found for piece in pieces], [digests for _, digests in found]


def describe_rows(rows: Rows, table: pyarrow.Table, max_seq_len: int) -> str:
    """What became of the rows of read_table(): the Rows, and what was cut or left out."""
    forms = counts_of(table["form"].filter(table["kept"])).items()
    n_cut = int(table["cut"].filter(table["kept"]).to_numpy().sum())
    parts = [f"{len(rows):,} rows, "
             + ", ".join(f"{n // rows.n_answers:,} {form}" for form, n in forms),
             f"{rows.lengths.sum():,} tokens, {rows.n_trained.sum():,} of them trained"]
    if rows.kind.is_judged:
        good = rows.desirable
        parts.append(f"{good.sum():,} good answers, {(~good).sum():,} bad ones")
    if n_cut:
        parts.append(f"{n_cut:,} cut to {max_seq_len} tokens")
    return "; ".join(filter(None, [*parts, describe_left_out(table)]))


def cache_key(sources: Sequence[str], contents: list[list[str]], tokenizer: PreTrainedTokenizerFast,
              max_seq_len: int, vocab_size: int, new_names: Sequence[str], loss: str) -> str:
    """Digest of all that decides what the rows become, this code and transformers' included."""
    code = {str(inspect.getsourcefile(f)) for f in
            (find_pieces, parse_row, parse_preference, parse_chat, with_day, openai_calls,
             encode_pieces)}
    kind = LOSSES[loss]
    forms = "pairs" if kind.n_answers == 2 else "judged" if kind.is_judged else "text"
    return text_digest([
        sorted(map(digest, code)), transformers.__version__, sources, contents, max_seq_len,
        vocab_size, new_names, forms, str(tokenizer.chat_template or ""),
        tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map])


def encode_batches(pieces: list[Piece], **settings: Any) -> Iterator[pyarrow.RecordBatch]:
    """Yield pyarrow RecordBatches of the columns ENCODED, of BATCH documents each; an empty one
    last, so that there is one at least."""
    documents, is_last = encode_pieces(pieces, **settings), False
    while not is_last:
        batch, columns = list(itertools.islice(documents, BATCH)), {}
        is_last = not batch
        ends = np.cumsum([0, *(document["length"] for document in batch)], dtype=np.int32)
        for name, kind in ENCODED.items():
            values = [document[name] for document in batch]
            if name in ("input_ids", "labels"):
                tokens = np.concatenate([np.empty(0, np.int32), *values])
                columns[name] = pyarrow.ListArray.from_arrays(ends, tokens)
            else:
                columns[name] = pyarrow.array(values, kind)
        yield pyarrow.record_batch(columns)


def encode_pieces(pieces: list[Piece], tokenizer: PreTrainedTokenizerFast, max_seq_len: int,
                  vocab_size: int, new_names: Sequence[str] = (),
                  loss: str = "sft") -> Iterator[dict[str, Any]]:
    """Yield {name: value}, see ENCODED, for each document of each row; one of a row that cannot be
    used, and of a pair that has an answer which cannot."""
    rows, old_names = read_pieces(pieces), {column.split("=")[0] for column in new_names}
    tokenizer = with_whole_offsets(tokenizer)
    while batch := list(itertools.islice(rows, BATCH)):
        parsed = [(where, json.dumps(sorted(old_names & row.keys() if type(row) is dict else ())),
                   *try_row(row, tokenizer, new_names, loss)) for where, row in batch]
        tokens = tokenize([d for *_, documents, _ in parsed for d in documents], tokenizer)
        for where, renamed, row_error, form, documents, desirable in parsed:
            last = documents[0][-1]
            is_plain = "prompt and completion" in form and isinstance(last, Part) and last.must_end
            found = [columns_of(*next(tokens), max_seq_len, good) for good in desirable]
            errors = [row_error or check_tokens(columns, max_seq_len, vocab_size)
                      for columns in found]
            if LOSSES[loss].n_answers == 2:
                if len(found) == 2 and not any(errors) and all(
                        np.array_equal(found[0][key], found[1][key])
                        for key in ("input_ids", "labels")):
                    errors = [ValueError("both answers have the same tokens"
                                         + found[0]["cut"] * f" among the first {max_seq_len}")]
                if any(errors):
                    found, errors = found[:1], [next(filter(None, errors))]
            for i, (columns, error) in enumerate(zip(found, errors)):
                why = (str(error) or type(error).__name__) if error else ""
                form, why = printable(form), printable(why)
                yield {**columns, "kept": not error, "refused": isinstance(error, RefusedRow),
                       "is_first": i == 0, "form": form, "plain": is_plain and not error,
                       "renamed": renamed, "left_out": why,
                       "where": where if error else ""}


def try_row(row: Any, tokenizer: PreTrainedTokenizerFast, new_names: Sequence[str],
            loss: str) -> tuple[Exception | None, str, list[Document], list[bool]]:
    """(error, form, documents, whether each is a good answer) of a row: no error, or one document
    without tokens."""
    try:
        if loss != "sft":
            return None, *parse_preference(row, tokenizer, new_names, loss)
        form, documents = parse_row(row, tokenizer, new_names)
        return None, form, documents, [True] * len(documents)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        if isinstance(e.__context__, (MemoryError, OSError)):  # not the row's fault
            raise e.__context__
        return e, "", [([], [])], [True]


def tokenize(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> Iterator[Ids]:
    """Yield (input_ids, labels), two lists, of each document of parse_row(). The tokenizer must be
    with_whole_offsets()."""
    sizes = (0 if isinstance(document, tuple) else sum(len(part.text) for part in document)
             for document in documents)
    batches = (n // BATCH_CHARACTERS for n in itertools.accumulate(sizes))
    for _, batch in itertools.groupby(zip(batches, documents), key=lambda pair: pair[0]):
        yield from tokenize_batch([document for _, document in batch], tokenizer)


def tokenize_batch(documents: list[Document], tokenizer: PreTrainedTokenizerFast) -> list[Ids]:
    """tokenize() of a few documents at once."""
    parts = [part for document in documents if isinstance(document, list) for part in document]
    encoded = {}  # may_begin: the tokens of all such parts in order
    for may_begin in (True, False):
        texts = [part.text for part in parts if part.may_begin == may_begin]
        if texts:
            batch = tokenizer(texts, verbose=False, add_special_tokens=may_begin,
                              return_offsets_mapping=True, return_attention_mask=False,
                              return_token_type_ids=False)
            encoded[may_begin] = zip(batch["input_ids"], batch["offset_mapping"])
    pairs = []
    for document in documents:
        if not isinstance(document, list):  # it is tokens already
            pairs.append(document)
            continue
        ids, labels = [], []
        for part in document:
            new_ids, new_labels = part_labels(part, *next(encoded[part.may_begin]), tokenizer)
            ids, labels = ids + new_ids, labels + new_labels
        eos = tokenizer.eos_token_id
        if document[-1].must_end and ids[-1:] != [eos]:
            ids, labels = [*ids, eos], [*labels, eos]
        pairs.append((ids, labels))
    return pairs


def with_whole_offsets(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The tokenizer, or a copy of it whose offsets count the spaces that a token has around it.
    Where they are trimmed, as in Llama 3, a token of spaces alone seems to have no text at all."""
    if "trim_offsets=True" not in str(tokenizer.backend_tokenizer.post_processor):
        return tokenizer
    whole, text = copy.copy(tokenizer), tokenizer.backend_tokenizer.to_str()
    whole._tokenizer = Tokenizer.from_str(
        text.replace('"trim_offsets":true', '"trim_offsets":false'))
    return whole


@functools.lru_cache(1)
def n_put_in_front(tokenizer: PreTrainedTokenizerFast) -> int:
    """How many special tokens the tokenizer puts before a text."""
    offsets = tokenizer("a", return_offsets_mapping=True)["offset_mapping"]
    return next((i for i, (_, end) in enumerate(offsets) if end), 0)


def part_labels(part: Part, ids: list[int], offsets: list[tuple[int, int]],
                tokenizer: PreTrainedTokenizerFast) -> Ids:
    """(input_ids, labels) of a Part, from its tokens and where in its text each (begins, ends)."""
    n_front = n_put_in_front(tokenizer) if part.may_begin else 0
    if ids[:2] == 2 * [tokenizer.bos_token_id] and offsets[0] == (0, 0) < offsets[1]:
        ids, offsets, n_front = ids[1:], offsets[1:], n_front - 1  # the text has BOS itself
    while (len(ids) > n_front and ids[-1] == tokenizer.eos_token_id
           and offsets[len(ids) - 1] == (0, 0)):
        ids = ids[:-1]  # it was not in the text: some tokenizers append it to all
    if isinstance(part.trained, bool):
        return ids, ids if part.trained else [IGNORE] * len(ids)
    labels, offsets = [IGNORE] * len(ids), offsets[: len(ids)]
    for start, end in part.trained:  # by overlap: a token may begin with the space before the span
        chosen = slice(bisect.bisect_right(offsets, start, key=lambda token: token[1]),
                       bisect.bisect_left(offsets, end, key=lambda token: token[0]))
        labels[chosen] = ids[chosen]
    return ids, labels


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
            "n_trained": int(is_trained[1:].sum()),  # nothing predicts the first token
            "desirable": desirable, "cut": is_cut,
            "digest": int.from_bytes(sha, "little", signed=True)}


def check_tokens(columns: dict[str, Any], max_seq_len: int, vocab_size: int) -> ValueError | None:
    """An error that says why the tokens of a document cannot be trained on, or None."""
    largest = max(columns[key].max(initial=0) for key in ("input_ids", "labels"))
    if largest >= vocab_size:
        return RefusedRow(f"has token {largest}, but the model's vocabulary ends at"
                          f" {vocab_size - 1}")
    if not columns["n_trained"]:
        which = f"first {max_seq_len} tokens" if columns["cut"] else "tokens"
        return ValueError(f"none of its {which} is trained")
    return None


def describe_left_out(table: pyarrow.Table) -> str:
    """How many rows of read_table() are left out, and why: the five commonest reasons, each with
    the first such row."""
    counts, parts = counts_of(table["left_out"]), []
    counts.pop("", None)
    for reason in sorted(counts, key=lambda reason: counts[reason], reverse=True)[:5]:
        first = table["where"][table["left_out"].index(reason).as_py()]
        parts.append(f"{counts.pop(reason):,} left out: {reason} ({first})")
    if counts:
        parts.append(f"{sum(counts.values()):,} left out for other reasons")
    return "; ".join(parts)


def counts_of(column: pyarrow.ChunkedArray) -> dict[str, int]:
    """{value: how often it occurs}."""
    return {pair["values"]: pair["counts"] for pair in column.value_counts().to_pylist()}


def rows_of_table(table: pyarrow.Table, loss: str) -> Rows:
    """The Rows of what read_table() returns that are kept."""
    kept, is_first, lengths, prompt_lengths, n_trained, desirable, digests = (
        torch.from_numpy(table[name].to_numpy().copy())
        for name in ("kept", "is_first", "length", *COLUMNS))
    input_ids, labels = ([chunk.flatten().to_numpy() for chunk in table[name].chunks]
                         for name in ("input_ids", "labels"))
    bounds = np.cumsum([0, *map(len, input_ids)]).tolist()[:-1]
    starts, sources = lengths.cumsum(0) - lengths, is_first.cumsum(0)
    documents = Rows("sft", input_ids, labels, bounds, starts, lengths, prompt_lengths, n_trained,
                     desirable, digests, sources)
    return dataclasses.replace(documents.select(kept.nonzero().view(-1)), loss=loss,
                               n_plain=int(table["plain"].to_numpy().sum()))


def rows_of(documents: Sequence[tuple[Sequence[int], Sequence[int]]], loss: str = "sft") -> Rows:
    """Rows in memory from [(input_ids, labels)], of which a row has one or two; of two the first is
    the better one, of rows of one every other is good."""
    encoded = [columns_of(ids, labels, len(ids), loss == "sft" or i % 2 == 0)
               for i, (ids, labels) in enumerate(documents)]
    input_ids, labels = (np.concatenate([document[name] for document in encoded])
                         for name in ("input_ids", "labels"))
    lengths, prompt_lengths, n_trained, desirable, digests = (
        torch.tensor([document[name] for document in encoded]) for name in ("length", *COLUMNS))
    starts = lengths.cumsum(0) - lengths
    sources = torch.arange(len(encoded)) // LOSSES[loss].n_answers
    return Rows(loss, [input_ids], [labels], [0], starts, lengths, prompt_lengths, n_trained,
                desirable, digests, sources)


def random_rows(vocab_size: int, config: Config) -> Rows:
    """Rows of random tokens, all of full length, for measuring without a data set."""
    assert config.max_seq_len, "read_model_config() fills it in"
    generator = torch.Generator().manual_seed(config.seed)
    n_documents = config.batch_size * LOSSES[config.loss].n_answers
    ids = torch.randint(vocab_size, (n_documents, config.max_seq_len), generator=generator,
                        dtype=torch.int32)
    return rows_of([(row, row) for row in ids], config.loss)
