"""From --dataset and --eval_dataset to training and evaluation Rows, with the lines of the log that
say what became of them.

    prepare_data()       all Rows, with what the log says of them
      prepare_rows()     the Rows of one flag: finds fragments of files (sources.py), encodes them
                         once (encode_examples.py) into a table (cache.py), makes Rows of it
                         (rows.py)
      hold_out()         a fraction of them for the evaluation

Three words, with one meaning wherever data is meant; elsewhere a row is one of a matrix:

    example     one record of the data set as its file has it: a line or an object of JSON, or a
                line of a table, with named columns
    document    token ids that do not see those of other documents, and their labels. An example
                becomes one; a pair of answers two; a conversation may become several
    row         what --batch_size counts: one document, or the two of a pair. Packing puts the
                documents of several rows end to end into a micro-batch
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
import transformers
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.cache import MANIFEST, has_table, open_cache, read_table, write_table
from fsdp_qlora.data.encode_examples import encode_batches
from fsdp_qlora.data.rows import NUMBER_COLUMNS, Rows, random_rows
from fsdp_qlora.data.sources import Fragment, find_fragments
from fsdp_qlora.data.template import how_to_prompt, with_template_date
from fsdp_qlora.files import digest, json_digest, write_atomic
from fsdp_qlora.log import log
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.ranks import RunEnd, raise_on_all_ranks


def prepare_data(config: Config, directory: Path, tokenizer: PreTrainedTokenizerFast | None,
                 vocab_size: int, template_date: str) -> tuple[Rows, Rows | None]:
    """Return the Rows to train on, and the Rows to evaluate on or None. All ranks must call this.
    """
    if config.random_weights and not config.dataset:
        log(f"data: {config.batch_size} rows of random tokens")
        return with_mismatched(random_rows(vocab_size, config), config), None
    assert tokenizer is not None, "only rows of random tokens need none"
    assert config.max_seq_len, "resolve_max_seq_len() fills it in"
    read = functools.partial(
        prepare_rows, tokenizer=tokenizer, max_seq_len=config.max_seq_len, vocab_size=vocab_size,
        template_date=template_date, renames=config.columns or (), loss=config.loss)
    sources = config.dataset or (str(directory / "demo" / "data.jsonl"),)
    rows, line, renamed = read(sources)
    log_data(rows, line, config, has_template=bool(tokenizer.chat_template))
    eval_rows = None
    fraction = held_out_fraction(config)
    if config.eval_dataset and fraction is None:
        eval_rows, line, renamed_in_eval = read(config.eval_dataset, flag="--eval_dataset")
        log_eval_data(eval_rows, line, rows)
        renamed |= renamed_in_eval
    for rename in config.columns or ():
        if (key := rename.split("=")[0]) not in renamed:
            raise RunEnd(f"--columns {rename}: no example has the key {key}")
    if fraction is not None:
        rows, eval_rows = hold_out(rows, fraction, config)
    n_desirable = int(rows.desirable.sum())
    if rows.loss_spec.is_unpaired and n_desirable in (0, len(rows)):
        raise RunEnd(f"--loss {config.loss} needs good and bad answers, but {n_desirable:,} of"
                     f" {len(rows):,} rows have label true. For good answers alone use --loss"
                     " sft")
    return with_mismatched(rows, config), eval_rows and with_mismatched(eval_rows, config)


def held_out_fraction(config: Config) -> float | None:
    """Return the fraction of the examples that --eval_dataset holds out; None if it names files, or
    was not given."""
    if config.eval_dataset:
        with contextlib.suppress(ValueError):
            return float(config.eval_dataset[0])
    return None


def log_data(rows: Rows, line: str, config: Config, has_template: bool) -> None:
    """Log PreparedRows of --dataset, with what the user may want to change about them.
    `has_template`: the tokenizer has a chat template."""
    log(f"data: {line}")
    if n_answers := sum(rows.template_kwargs.values()):
        how = how_to_prompt(rows.template_kwargs)
        log(f"chat template: each of {n_answers:,} answers is trained after the prompt that the"
            f" template makes; {how or 'serve with this chat template; it needs no variables'}")
    if config.dataset and (n_repeated := rows.n_repeated()):
        log(f"note: {n_repeated:,} duplicate rows (identical tokens)")
    if config.model and has_template and rows.n_plain_completions:
        n = rows.documents_per_row
        way = "--columns completion=response" if n == 1 else "write them as messages"
        log(f"note: {rows.n_plain_completions // n:,} prompts and completions are trained as plain"
            f" text, without the chat template. To use it: {way}")


def log_eval_data(eval_rows: Rows, line: str, rows: Rows) -> None:
    """Log PreparedRows of --eval_dataset, with a warning if they are among the `rows` to train on.
    """
    log(f"eval data: {line}")
    is_trained = torch.isin(eval_rows.document_hashes, rows.document_hashes)
    if n_trained := int(is_trained.view(-1, rows.documents_per_row).any(1).sum()):
        log(f"warning: {n_trained:,} of the {len(eval_rows):,} evaluation rows are also"
            " trained on (identical tokens): their loss says nothing about new rows")


def with_mismatched(rows: Rows, config: Config) -> Rows:
    """Return the rows, with `mismatched` if their loss reads it."""
    if not rows.loss_spec.is_unpaired:
        return rows
    assert config.max_seq_len, "resolve_max_seq_len() fills it in"
    mismatched = rows.mismatch(config.seed, config.max_seq_len)
    return dataclasses.replace(rows, mismatched=mismatched)


def hold_out(rows: Rows, fraction: float, config: Config) -> tuple[Rows, Rows]:
    """Split the rows into those to train on and a fraction to evaluate on. Rows that were made from
    one example, or that are equal token for token, stay together."""
    groups = rows.duplicate_groups()
    ids = groups.unique()
    # other numbers, nan and inf too, are refused below, unrounded
    n = round(fraction * len(ids)) if abs(fraction) < 1e9 else fraction
    values = config.eval_dataset or ()
    if not 0 < n < len(ids) or len(values) > 1:
        raise RunEnd(f"--eval_dataset {' '.join(values)}: is {n} of {len(ids)} examples; must"
                     " be one fraction between 0 and 1, or files")
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(config.seed))
    held_out = torch.isin(groups[:: rows.documents_per_row], ids[order[:n]])
    log(f"eval data: {describe_count(rows, int(held_out.sum()))} held out of the training data")
    train, evaluation = (rows.select(mask.nonzero().view(-1)) for mask in (~held_out, held_out))
    return train, evaluation


class PreparedRows(NamedTuple):
    """What prepare_rows() returns."""

    rows: Rows
    line: str  # for the log: what became of the examples
    renamed: set[str]  # keys of examples that --columns has renamed


def prepare_rows(sources: Sequence[str], tokenizer: PreTrainedTokenizerFast, max_seq_len: int,
                 vocab_size: int, template_date: str, renames: Sequence[str] = (),
                 loss: str = "sft", flag: str = "--dataset") -> PreparedRows:
    """Read all `sources` for this loss; `flag` names them. All ranks must call this."""
    name = " ".join(sources)
    with raise_on_all_ranks():
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token, so generation would never stop. Name"
                             " it as eos_token in tokenizer_config.json beside tokenizer.json"
                             " (create the file if there is none)")
        settings: dict[str, Any] = {
            "tokenizer": with_template_date(tokenizer, template_date), "max_seq_len": max_seq_len,
            "vocab_size": vocab_size, "renames": renames, "loss": loss}
        try:
            fragments, source_digests = fragments_of_all(sources)
        except ValueError as e:
            raise ValueError(f"{flag} {e}")
        key = cache_key(sources, source_digests, **settings)
    # one process of each machine writes the table; the others wait at the end of the block
    with raise_on_all_ranks(), open_cache(key) as directory:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 and not has_table(directory):
            if not fragments:
                raise ValueError(f"{flag} {name}: has no examples")
            parts = write_table(directory, fragments, encode_batches, **settings)
            if source_digests != fragments_of_all(sources, is_silent=True)[1]:
                raise ValueError(f"{flag} {name}: has changed while it was read. Start again")
            write_atomic(directory / MANIFEST, json.dumps(parts))
    with raise_on_all_ranks():
        table = read_table(directory)
        if not len(table):
            raise ValueError(f"{flag} {name}: has no examples")
        # not pyarrow's index(), which imports pandas (0.3 s)
        if (refused := table["refused"].to_numpy()).any():
            first = int(refused.argmax())
            raise ValueError(f"{table['where'][first]}: {table['left_out'][first]}")
        rows = rows_of_table(table, loss)
        if not len(rows):
            raise ValueError(f"{name}: none of its {len(table['kept'])} examples can be trained"
                             f" on: {describe_left_out(table)}")
        renamed = {key for keys in counts_of(table["renamed"]) for key in json.loads(keys)}
        return PreparedRows(rows, describe_rows(rows, table, max_seq_len, name), renamed)


def fragments_of_all(sources: Sequence[str],
                     is_silent: bool = False) -> tuple[list[Fragment], list[list[str]]]:
    """Return the fragments of all sources end to end, and the digests of each source, see
    find_fragments()."""
    results = [find_fragments(source, is_silent) for source in sources]
    return ([fragment for fragments, _ in results for fragment in fragments],
            [digests for _, digests in results])


def describe_rows(rows: Rows, table: pyarrow.Table, max_seq_len: int, name: str) -> str:
    """Return text on the documents of read_table(), from the files `name`: how many rows they are,
    and how many were truncated or skipped."""
    formats = counts_of(table["format"].filter(table["kept"])).items()
    n_truncated = int(table["truncated"].filter(table["kept"]).to_numpy().sum())
    counted = ", ".join(f"{n // rows.documents_per_row:,} {format}" for format, n in formats)
    parts = [f"{describe_count(rows, len(rows))},"
             f" {rows.lengths.sum():,} tokens, {rows.n_loss_tokens.sum():,} of them in the"
             f" loss ({counted}; {name})"]
    if rows.loss_spec.is_unpaired:
        good = rows.desirable
        parts.append(f"{good.sum():,} good answers, {(~good).sum():,} bad ones")
    if n_truncated:
        parts.append(f"{n_truncated:,} truncated to {max_seq_len} tokens")
    return "; ".join(filter(None, [*parts, describe_left_out(table)]))


def describe_count(rows: Rows, n: int) -> str:
    """Return a number of these rows with their noun: 1 row, 2 pairs."""
    return f"{n:,} {'pair' if rows.documents_per_row == 2 else 'row'}{'s' * (n != 1)}"


def describe_left_out(table: pyarrow.Table) -> str:
    """Return text on how many documents of read_table() are left out, and why: the five commonest
    reasons, each with the first such example."""
    counts = counts_of(table["left_out"])
    parts = []
    counts.pop("", None)
    for reason in sorted(counts, key=lambda reason: counts[reason], reverse=True)[:5]:
        first = table["where"][table["left_out"].index(reason).as_py()]
        parts.append(f"{counts.pop(reason):,} skipped: {reason} ({first})")
    if counts:
        parts.append(f"{sum(counts.values()):,} skipped for other reasons")
    return "; ".join(parts)


def counts_of(column: pyarrow.ChunkedArray) -> dict[str, int]:
    """Return {value: number of occurrences}."""
    return {pair["values"]: pair["counts"] for pair in column.value_counts().to_pylist()}


def cache_key(
    sources: Sequence[str], source_digests: list[list[str]], tokenizer: PreTrainedTokenizerFast,
    max_seq_len: int, vocab_size: int, renames: Sequence[str], loss: str
) -> str:
    """Return a digest of everything that determines the encoded data, including this folder's code
    and the version of transformers."""
    # all files, so that none that shapes the data is forgotten; any edit tokenizes again
    code = sorted(map(digest, Path(__file__).parent.glob("*.py")))
    loss_spec = LOSSES[loss]
    formats = ("pairs" if loss_spec.documents_per_row == 2 else
               "unpaired" if loss_spec.is_unpaired else "text")
    return json_digest([
        code, transformers.__version__, sources, source_digests, max_seq_len, vocab_size, renames,
        formats, str(tokenizer.chat_template or ""), tokenizer.backend_tokenizer.to_str(),
        tokenizer.special_tokens_map])


def rows_of_table(table: pyarrow.Table, loss: str) -> Rows:
    """Return the Rows of the documents in read_table()'s result that are kept."""
    kept, is_first, lengths, prompt_lengths, n_loss_tokens, desirable, document_hashes = (
        torch.from_numpy(table[name].to_numpy().copy())
        for name in ("kept", "is_first", "length", *NUMBER_COLUMNS))
    input_ids, labels = ([chunk.flatten().to_numpy() for chunk in table[name].chunks]
                         for name in ("input_ids", "labels"))
    bounds = np.cumsum([0, *map(len, input_ids)]).tolist()[:-1]
    starts, example_ids = lengths.cumsum(0) - lengths, is_first.cumsum(0)
    documents = Rows(
        loss="sft", input_ids=input_ids, labels=labels, bounds=bounds, starts=starts,
        lengths=lengths, prompt_lengths=prompt_lengths, n_loss_tokens=n_loss_tokens,
        desirable=desirable, document_hashes=document_hashes, example_ids=example_ids)
    return dataclasses.replace(documents.select(kept.nonzero().view(-1)), loss=loss,
                               n_plain_completions=int(table["plain"].to_numpy().sum()),
                               template_kwargs=count_template_kwargs(table))


def count_template_kwargs(table: pyarrow.Table) -> dict[str, int]:
    """Return Rows.template_kwargs for read_table()'s result."""
    counts: dict[str, int] = {}
    for of_answers, n_rows in counts_of(table["template_kwargs"].filter(table["kept"])).items():
        for kwargs in of_answers.splitlines():
            counts[kwargs] = counts.get(kwargs, 0) + n_rows
    return counts
