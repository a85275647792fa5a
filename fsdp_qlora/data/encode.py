"""Tokenize examples: text, token ids, labels.

encode_pieces() -> try_example() -> parse_example() of forms.py -> parse_chat() of chat.py, if it is
a conversation -> tokenize(). With a preference --loss, parse_preference() of preferences.py comes
before parse_example().
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.chat import Spans
from fsdp_qlora.data.forms import IGNORE, Document, Ids, Part, parse_example, printable
from fsdp_qlora.data.preferences import parse_preference
from fsdp_qlora.data.rows import columns_of
from fsdp_qlora.data.sources import Piece, RefusedExample, read_pieces
from fsdp_qlora.model.preference_loss import LOSSES

BATCH = 256  # examples that are parsed at once, and documents of one RecordBatch
# characters that the tokenizer gets at once; its result for them needs about 100 MB
BATCH_CHARACTERS = 2**19
ENCODED = {  # {column that encode_pieces() yields for each document: its type}
    "input_ids": "int32s", "labels": "int32s", "length": "int32", "prompt_length": "int32",
    "n_loss_tokens": "int32", "desirable": "bool", "digest": "int64",
    "cut": "bool",  # up to here: see columns_of()
    "kept": "bool", "refused": "bool",  # neither: the example is left out
    "is_first": "bool",  # the first document of its example?
    "form": "string",  # form of its example, with the keys that are ignored
    "plain": "bool",  # True if its example is a prompt and a completion in plain text
    # variables of the chat template for its example's answers, a line each, see
    # Rows.template_kwargs
    "template_kwargs": "string",
    "renamed": "string",  # the keys that --columns renames in its example, as JSON
    "left_out": "string", "where": "string"}  # why, and which example; "" if it is kept


def encode_batches(pieces: list[Piece], **settings: Any) -> Iterator[pyarrow.RecordBatch]:
    """Yield pyarrow RecordBatches of the columns ENCODED, of BATCH documents each. The last one is
    empty, so that there is at least one."""
    documents = encode_pieces(pieces, **settings)
    is_last = False
    while not is_last:
        batch = list(itertools.islice(documents, BATCH))
        columns = {}
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
    """Yield {name: value}, see ENCODED, for each document of each example. An example that cannot
    be used yields one document, and so does a pair with an unusable answer."""
    examples, old_names = read_pieces(pieces), {column.split("=")[0] for column in new_names}
    tokenizers = both_tokenizers(tokenizer)
    while batch := list(itertools.islice(examples, BATCH)):
        parsed_examples = [try_example(example, tokenizer, new_names, loss) for _, example in batch]
        encoded = tokenize([d for parsed in parsed_examples for d in parsed.documents], tokenizers)
        for (where, example), parsed in zip(batch, parsed_examples):
            # next(encoded): a document of parse_example() may become several
            documents = [columns_of(*ids, max_seq_len, is_good)
                         for is_good in parsed.desirable for ids in next(encoded)]
            errors = [parsed.error or check_tokens(document, max_seq_len, vocab_size)
                      for document in documents]
            if LOSSES[loss].documents_per_row == 2:
                error = next(filter(None, errors), None) or check_pair(documents, max_seq_len)
                if error:  # one document stands for the whole pair
                    documents, errors = documents[:1], [error]
            renamed = old_names & example.keys() if type(example) is dict else ()
            for i, (document, error) in enumerate(zip(documents, errors)):
                why = (str(error) or type(error).__name__) if error else ""
                yield {**document, "kept": not error, "refused": isinstance(error, RefusedExample),
                       "is_first": i == 0, "form": printable(parsed.form),
                       "plain": parsed.is_plain and not error,
                       "template_kwargs": parsed.template_kwargs if i == 0 else "",
                       "renamed": json.dumps(sorted(renamed)),
                       "left_out": printable(why), "where": where if error else ""}


def check_pair(answers: list[dict[str, Any]], max_seq_len: int) -> ValueError | None:
    """Return why two answers, results of columns_of(), cannot be compared; None if they can."""
    keys = "input_ids", "labels"
    if len(answers) == 2 and all(np.array_equal(*(answer[key] for answer in answers))
                                 for key in keys):
        return ValueError("both answers have the same tokens"
                          + answers[0]["cut"] * f" within the first {max_seq_len}")
    return None


class ParsedExample(NamedTuple):
    """What an example contains, before it is tokenized. With an error: one document, empty."""

    error: Exception | None
    form: str  # with the keys that are ignored
    documents: list[Document]
    desirable: list[bool]  # is it a good answer? One for each document

    @property
    def parts(self) -> list[Part]:
        """All Parts; none of an example that was tokens already."""
        return [part for document in self.documents for part in document if isinstance(part, Part)]

    @property
    def is_plain(self) -> bool:
        """Is it a prompt and a completion in plain text?"""
        return any(part.is_completion for part in self.parts)

    @property
    def template_kwargs(self) -> str:
        """Variables of the chat template for its answers, a line each, see Rows.template_kwargs."""
        return "\n".join(answer.template_kwargs for part in self.parts for answer in part.answers)


def try_example(example: Any, tokenizer: PreTrainedTokenizerFast, new_names: Sequence[str],
                loss: str) -> ParsedExample:
    """Return the example parsed, or with the error that parsing it raised."""
    try:
        if loss != "sft":
            return ParsedExample(None, *parse_preference(example, tokenizer, new_names, loss))
        form, documents = parse_example(example, tokenizer, new_names)
        return ParsedExample(None, form, documents, [True] * len(documents))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        if isinstance(e.__context__, (MemoryError, OSError)):  # not the example's fault
            raise e.__context__
        return ParsedExample(e, "", [([], [])], [True])


class Tokenizers(NamedTuple):
    """A tokenizer in the forms that tokenize() needs."""

    with_prefix: PreTrainedTokenizerFast  # for the beginning of a text, see with_whole_offsets()
    without_prefix: PreTrainedTokenizerFast  # for the continuation of a text, see drop_prefix()


def both_tokenizers(tokenizer: PreTrainedTokenizerFast) -> Tokenizers:
    tokenizer = with_whole_offsets(tokenizer)
    return Tokenizers(tokenizer, drop_prefix(tokenizer))


def tokenize(documents: list[Document], tokenizers: Tokenizers) -> Iterator[list[Ids]]:
    """Yield the [(input_ids, labels)] of each document of parse_example(), in most cases one.

    An answer that begins inside a token gets a document of its own, in which its prompt and the
    answer are tokenized apart, as they are at inference. So the tokens before each answer are those
    of its prompt: at a token boundary, the tokens before it are those of the text before it.
    """
    sizes = (0 if isinstance(document, tuple) else sum(len(part.text) for part in document)
             for document in documents)
    batches = (n // BATCH_CHARACTERS for n in itertools.accumulate(sizes))
    for _, batch in itertools.groupby(zip(batches, documents), key=lambda pair: pair[0]):
        yield from tokenize_batch([document for _, document in batch], tokenizers)


def tokenize_batch(documents: list[Document], tokenizers: Tokenizers) -> list[list[Ids]]:
    """tokenize() for a few documents at once."""
    documents = [split_single_answer(document) for document in documents]
    parts = [part for document in documents if isinstance(document, list) for part in document]
    tokens = {}  # {(add_bos, add_prefix_space): (ids, offsets) of each such part, in order}
    for kind in {(part.add_bos, part.add_prefix_space) for part in parts}:
        add_bos, add_prefix_space = kind
        texts = [part.text for part in parts if (part.add_bos, part.add_prefix_space) == kind]
        batch = (tokenizers.with_prefix if add_prefix_space else tokenizers.without_prefix)(
            texts, verbose=False, add_special_tokens=add_bos, return_offsets_mapping=True,
            return_attention_mask=False, return_token_type_ids=False)
        tokens[kind] = zip(batch["input_ids"], batch["offset_mapping"])
    encoded_documents: list[list[Ids]] = []
    eos = tokenizers.with_prefix.eos_token_id
    for document in documents:
        if not isinstance(document, list):  # already tokens
            encoded_documents.append([document])
            continue
        ids, labels, apart = [], [], list[Document]()
        for part in document:
            part_ids, offsets = next(tokens[part.add_bos, part.add_prefix_space])
            if part.answers:
                part, apart = answers_apart(part, offsets)
            part_ids, labels_of_part = part_labels(part, part_ids, offsets, tokenizers.with_prefix)
            ids, labels = ids + part_ids, labels + labels_of_part
        if document[-1].add_eos and ids[-1:] != [eos]:
            ids, labels = [*ids, eos], [*labels, eos]
        others = tokenize_batch(apart, tokenizers) if apart else []
        encoded = [pair for pairs in others for pair in pairs]
        if not apart or part.in_loss:  # else no answer is left in it
            encoded.append((ids, labels))
        encoded_documents.append(encoded)
    return encoded_documents


def split_single_answer(document: Document) -> Document:
    """Split a conversation with one answer into two parts, so that nothing is tokenized twice;
    return any other document unchanged."""
    if isinstance(document, list) and len(document[0].answers) == 1:
        (part,) = document
        return split_at_answer(part, part.answers[0].at, part.spans(), len(part.text))
    return document


def split_at_answer(part: Part, start: int, spans: Spans, end: int) -> list[Part]:
    """Return a conversation up to the end of one of its answers as two parts: its prompt, and the
    answer, of which these spans are in the loss."""
    return [Part(part.text[:start], in_loss=False, add_bos=False),
            Part(part.text[start:end], [(a - start, b - start) for a, b in spans], add_bos=False,
                 add_prefix_space=False)]


def answers_apart(part: Part, offsets: list[tuple[int, int]]) -> tuple[Part, list[Document]]:
    """Return a conversation without those of its answers that begin inside a token, and a document
    for each of these answers, up to its end. `offsets`: of its tokens, (begin, end) in its text."""
    starts = sorted(answer.at for answer in part.answers)
    in_loss = part.spans()
    apart: list[Document] = []
    for start, next_start in zip(starts, [*starts[1:], len(part.text)]):
        token = bisect.bisect_right(offsets, start, key=lambda token: token[1])
        if token < len(offsets) and offsets[token][0] < start:
            spans = [span for span in in_loss if start <= span[0] < next_start]
            in_loss = [span for span in in_loss if span not in spans]
            apart.append(split_at_answer(part, start, spans, max(end for _, end in spans)))
    return part._replace(in_loss=in_loss), apart


def with_whole_offsets(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer, or a copy whose offsets include the spaces around a token. Where
    offsets are trimmed, as in Llama 3, a token of spaces alone seems to have no text at all."""
    if "trim_offsets=True" not in str(tokenizer.backend_tokenizer.post_processor):
        return tokenizer
    text = tokenizer.backend_tokenizer.to_str()
    return with_backend(tokenizer, text.replace('"trim_offsets":true', '"trim_offsets":false'))


def drop_prefix(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer that puts nothing before a text that continues another.
    SentencePiece tokenizers such as Llama 2's and Mistral's put a space before every text."""
    settings = json.loads(tokenizer.backend_tokenizer.to_str())  # as in tokenizer.json

    def change(step: Any) -> Any:
        """Return a normalizer or pre-tokenizer that puts nothing before a text; None if it did only
        that."""
        if not isinstance(step, dict) or step["type"] == "Prepend":
            return None
        for key, value in ("prepend_scheme", "never"), ("add_prefix_space", False):
            step |= {key: value} if key in step else {}
        for key in step.keys() & {"normalizers", "pretokenizers"}:  # steps of a Sequence
            step[key] = [other for each in step[key] if (other := change(each))]
        return step

    settings |= {key: change(settings[key]) for key in ("normalizer", "pre_tokenizer")}
    return with_backend(tokenizer, json.dumps(settings))


def with_backend(tokenizer: PreTrainedTokenizerFast, text: str) -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer with another tokenizer.json, as text."""
    changed = copy.copy(tokenizer)
    changed._tokenizer = Tokenizer.from_str(text)
    return changed


@functools.lru_cache(1)
def n_put_in_front(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of special tokens that the tokenizer puts before a text."""
    offsets = tokenizer("a", return_offsets_mapping=True)["offset_mapping"]
    return next((i for i, (_, end) in enumerate(offsets) if end), 0)


def part_labels(part: Part, ids: list[int], offsets: list[tuple[int, int]],
                tokenizer: PreTrainedTokenizerFast) -> Ids:
    """Return (input_ids, labels) of a Part, from its tokens and their offsets (begin, end) in its
    text."""
    n_front = n_put_in_front(tokenizer) if part.add_bos else 0
    if ids[:2] == 2 * [tokenizer.bos_token_id] and offsets[0] == (0, 0) < offsets[1]:
        ids, offsets, n_front = ids[1:], offsets[1:], n_front - 1  # the text itself has BOS
    while (len(ids) > n_front and ids[-1] == tokenizer.eos_token_id
           and offsets[len(ids) - 1] == (0, 0)):
        ids = ids[:-1]  # EOS was not in the text: some tokenizers append it to every text
    if isinstance(part.in_loss, bool):
        return ids, ids if part.in_loss else [IGNORE] * len(ids)
    labels, offsets = [IGNORE] * len(ids), offsets[: len(ids)]
    for start, end in part.in_loss:  # all tokens that overlap the span
        chosen = slice(bisect.bisect_right(offsets, start, key=lambda token: token[1]),
                       bisect.bisect_left(offsets, end, key=lambda token: token[0]))
        labels[chosen] = ids[chosen]
    return ids, labels


def check_tokens(columns: dict[str, Any], max_seq_len: int, vocab_size: int) -> ValueError | None:
    """Return an error that explains why the tokens of a document cannot be trained on, or None."""
    largest = max(columns[key].max(initial=0) for key in ("input_ids", "labels"))
    if largest >= vocab_size:
        return RefusedExample(f"has token {largest}, but the model's vocabulary ends at"
                              f" {vocab_size - 1}")
    if not columns["n_loss_tokens"]:
        within = f" within its first {max_seq_len} tokens" if columns["cut"] else ""
        return ValueError(f"nothing to train on{within}")
    return None
