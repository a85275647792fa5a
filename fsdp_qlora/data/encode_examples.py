"""Encode examples: parse and tokenize each, and say which cannot be used, as rows of a table.

    encode_fragments()     of files, a batch of examples at a time
      try_example()        parse_example() in example_formats.py; with a preference --loss
                           parse_preference() in preferences.py. A conversation goes on to
                           parse_chat() in chat.py
      tokenize()           in tokenize_documents.py
      check_tokens(), check_pair()
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.example_formats import Document, TextPart, parse_example, printable
from fsdp_qlora.data.preferences import parse_preference
from fsdp_qlora.data.rows import encode_document
from fsdp_qlora.data.sources import Fragment, read_fragments
from fsdp_qlora.data.tokenize_documents import both_tokenizers, tokenize
from fsdp_qlora.errors import FatalExample
from fsdp_qlora.model.preference_loss import LOSSES

BATCH_EXAMPLES = 256  # examples that are parsed at once, and documents of one RecordBatch
ENCODED = {  # {column that encode_fragments() yields for each document: its type}
    # of encode_document()
    "input_ids": "int32s", "labels": "int32s", "length": "int32", "prompt_length": "int32",
    "n_loss_tokens": "int32", "desirable": "bool", "digest": "int64", "truncated": "bool",
    # True if it is trained on; True if it ends the run. Neither: it is left out
    "kept": "bool", "refused": "bool",
    "is_first": "bool",  # True of the first document of its example
    "format": "string",  # format of its example, with the keys that are ignored
    "plain": "bool",  # True if its example is a prompt and a completion in plain text
    # variables of the chat template for its example's answers, a line each, see
    # Rows.template_kwargs
    "template_kwargs": "string",
    "renamed": "string",  # the keys that --columns renames in its example, as JSON
    "left_out": "string", "where": "string"}  # why, and which example; "" if it is kept


def encode_batches(fragments: list[Fragment], **settings: Any) -> Iterator[pyarrow.RecordBatch]:
    """Yield pyarrow RecordBatches of the columns ENCODED, of BATCH_EXAMPLES documents each. The
    last one is empty, so that there is at least one."""
    documents = encode_fragments(fragments, **settings)
    is_last = False
    while not is_last:
        batch = list(itertools.islice(documents, BATCH_EXAMPLES))
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


def encode_fragments(fragments: list[Fragment], tokenizer: PreTrainedTokenizerFast,
                     max_seq_len: int, vocab_size: int, renames: Sequence[str] = (),
                     loss: str = "sft") -> Iterator[dict[str, Any]]:
    """Yield {name: value}, see ENCODED, for each document of each example. An example that cannot
    be used yields one document, and so does a pair with an unusable answer."""
    examples, old_names = read_fragments(fragments), {rename.split("=")[0] for rename in renames}
    tokenizers = both_tokenizers(tokenizer)
    while batch := list(itertools.islice(examples, BATCH_EXAMPLES)):
        parsed_examples = [try_example(example, tokenizer, renames, loss) for _, example in batch]
        encoded = tokenize([d for parsed in parsed_examples for d in parsed.documents], tokenizers)
        for (where, example), parsed in zip(batch, parsed_examples):
            # tokenize() may yield several for one of the parsed documents
            documents = [encode_document(*ids, max_seq_len, is_good)
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
                yield {**document, "kept": not error, "refused": isinstance(error, FatalExample),
                       "is_first": i == 0, "format": printable(parsed.format),
                       "plain": parsed.is_plain_completion and not error,
                       "template_kwargs": parsed.template_kwargs if i == 0 else "",
                       "renamed": json.dumps(sorted(renamed)),
                       "left_out": printable(why), "where": where if error else ""}


def check_pair(answers: list[dict[str, Any]], max_seq_len: int) -> ValueError | None:
    """Return why two answers, results of encode_document(), cannot be compared; None if they can.
    """
    keys = "input_ids", "labels"
    if len(answers) == 2 and all(np.array_equal(*(answer[key] for answer in answers))
                                 for key in keys):
        return ValueError("both answers have the same tokens"
                          + answers[0]["truncated"] * f" within the first {max_seq_len}")
    return None


class ParsedExample(NamedTuple):
    """What an example contains, before it is tokenized. With an error: one document, empty."""

    error: Exception | None
    format: str  # with the keys that are ignored
    documents: list[Document]
    desirable: list[bool]  # of each document: is it a good answer?

    @property
    def parts(self) -> list[TextPart]:
        """All TextParts; none of an example that was tokens already."""
        return [part for document in self.documents for part in document
                if isinstance(part, TextPart)]

    @property
    def is_plain_completion(self) -> bool:
        """Is it a prompt and a completion in plain text?"""
        return any(part.is_completion for part in self.parts)

    @property
    def template_kwargs(self) -> str:
        """Variables of the chat template for its answers, a line each, see Rows.template_kwargs."""
        return "\n".join(answer.template_kwargs for part in self.parts for answer in part.answers)


def try_example(example: Any, tokenizer: PreTrainedTokenizerFast, renames: Sequence[str],
                loss: str) -> ParsedExample:
    """Return the example parsed, or with the error that parsing it raised."""
    try:
        if loss != "sft":
            return ParsedExample(None, *parse_preference(example, tokenizer, renames, loss))
        format, documents = parse_example(example, tokenizer, renames)
        return ParsedExample(None, format, documents, [True] * len(documents))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
        if isinstance(e.__context__, (MemoryError, OSError)):  # not the example's fault
            raise e.__context__
        return ParsedExample(e, "", [([], [])], [True])


def check_tokens(document: dict[str, Any], max_seq_len: int, vocab_size: int) -> ValueError | None:
    """Return an error that explains why the tokens of a document cannot be trained on, or None."""
    largest = max(document[key].max(initial=0) for key in ("input_ids", "labels"))
    if largest >= vocab_size:
        return FatalExample(f"has token {largest}, but the model's vocabulary ends at"
                            f" {vocab_size - 1}")
    if not document["n_loss_tokens"]:
        within = f" within its first {max_seq_len} tokens" if document["truncated"] else ""
        return ValueError(f"nothing to train on{within}")
    return None
