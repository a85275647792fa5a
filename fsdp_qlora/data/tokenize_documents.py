"""Tokenize documents: from TextParts to token ids and labels.

    tokenize()                a bounded number of characters at a time
      split_single_answer()   into a prompt and its answer
      tokenize_texts()        all TextParts at once
      answers_apart()         answers that begin inside a token
      part_labels()           which tokens are in the loss
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.chat import Spans
from fsdp_qlora.data.example_formats import IGNORE_INDEX, Document, Ids, TextPart

# characters that the tokenizer gets at once; its result for them needs about 100 MB
BATCH_CHARACTERS = 2**19
Offsets = list[tuple[int, int]]  # where each token begins and ends in its text, in characters


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
    tokens = iter(tokenize_texts(parts, tokenizers))
    encoded_documents: list[list[Ids]] = []
    eos = tokenizers.with_prefix.eos_token_id
    for document in documents:
        if not isinstance(document, list):  # already tokens
            encoded_documents.append([document])
            continue
        ids, labels, apart = [], [], list[Document]()
        for part in document:
            part_ids, offsets = next(tokens)
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


def tokenize_texts(
    parts: list[TextPart], tokenizers: Tokenizers
) -> list[tuple[list[int], Offsets]]:
    """Return the token ids of each TextPart, and their Offsets."""
    results: list[Any] = [None] * len(parts)
    kinds = [(part.add_bos, part.add_prefix_space) for part in parts]
    for add_bos, add_prefix_space in set(kinds):  # one call for all TextParts of a kind
        chosen = [i for i, kind in enumerate(kinds) if kind == (add_bos, add_prefix_space)]
        tokenizer = tokenizers.with_prefix if add_prefix_space else tokenizers.without_prefix
        batch = tokenizer(
            [parts[i].text for i in chosen], verbose=False, add_special_tokens=add_bos,
            return_offsets_mapping=True, return_attention_mask=False, return_token_type_ids=False)
        for i, ids, offsets in zip(chosen, batch["input_ids"], batch["offset_mapping"]):
            results[i] = ids, offsets
    return results


def split_single_answer(document: Document) -> Document:
    """Split a conversation with one answer into two parts, so that nothing is tokenized twice;
    return any other document unchanged."""
    if isinstance(document, list) and len(document[0].answers) == 1:
        (part,) = document
        return split_at_answer(part, part.answers[0].at, part.spans(), len(part.text))
    return document


def split_at_answer(part: TextPart, start: int, spans: Spans, end: int) -> list[TextPart]:
    """Return a conversation up to the end of one of its answers as two parts: its prompt, and the
    answer, of which these spans are in the loss."""
    return [TextPart(part.text[:start], in_loss=False, add_bos=False),
            TextPart(part.text[start:end], [(a - start, b - start) for a, b in spans],
                     add_bos=False, add_prefix_space=False)]


def answers_apart(part: TextPart, offsets: Offsets) -> tuple[TextPart, list[Document]]:
    """Return a conversation, of which only those answers are in the loss that begin with a token;
    and for each of the others a document, up to its end."""
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


def part_labels(part: TextPart, ids: list[int], offsets: Offsets,
                tokenizer: PreTrainedTokenizerFast) -> Ids:
    """Return (input_ids, labels) of a TextPart from its tokens."""
    n_front = n_put_in_front(tokenizer) if part.add_bos else 0
    if ids[:2] == 2 * [tokenizer.bos_token_id] and offsets[0] == (0, 0) < offsets[1]:
        ids, offsets, n_front = ids[1:], offsets[1:], n_front - 1  # the text itself has BOS
    while (len(ids) > n_front and ids[-1] == tokenizer.eos_token_id
           and offsets[len(ids) - 1] == (0, 0)):
        ids = ids[:-1]  # EOS was not in the text: some tokenizers append it to every text
    if isinstance(part.in_loss, bool):
        return ids, ids if part.in_loss else [IGNORE_INDEX] * len(ids)
    labels, offsets = [IGNORE_INDEX] * len(ids), offsets[: len(ids)]
    for start, end in part.in_loss:  # all tokens that overlap the span
        chosen = slice(bisect.bisect_right(offsets, start, key=lambda token: token[1]),
                       bisect.bisect_left(offsets, end, key=lambda token: token[0]))
        labels[chosen] = ids[chosen]
    return ids, labels
