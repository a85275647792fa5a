"""Rows are encoded once: the next start with the same files and settings finds them again."""

import copy
import errno
import os
import re
import resource
import signal
from pathlib import Path

import datasets
import pytest
from rows import CHATML, chat_tokenizer, prepare, refusal, write_jsonl
from test_files import NESTED, write_kind

from fsdp_qlora.data import (
    cache, chat, encode_examples, example_formats as formats, prepare_data,
    rows as encoded_rows, sources as files)
from fsdp_qlora.files import digest


@pytest.fixture
def tokenizer(demo_directory):
    return chat_tokenizer(demo_directory, CHATML)


@pytest.fixture
def parsed(monkeypatch):
    """Each row that is parsed, from now on."""
    rows, find_format = [], formats.find_format

    def counted(row):
        rows.append(row)
        return find_format(row)

    monkeypatch.setattr(formats, "find_format", counted)
    monkeypatch.setattr(cache, "n_cores", lambda: 1)  # in this process
    return rows


def n_parsed(parsed, *args, **settings):
    parsed.clear()
    rows, _ = prepare(*args, **settings)
    return len(parsed), rows.sha256()


def test_encoded_rows_are_found_again(parsed, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [*NESTED, {"text": "found again"}])
    n, first = n_parsed(parsed, [path], tokenizer)
    assert n == len(NESTED) + 1
    assert n_parsed(parsed, [path], tokenizer) == (0, first)
    assert n_parsed(parsed, [path], copy.deepcopy(tokenizer), day="2021-01-31") == (0, first)


@pytest.mark.parametrize(
    "change", ["content", "max_seq_len", "template", "post-processor", "special", "several", "day"]
)
def test_other_content_or_settings_are_encoded_anew(change, parsed, tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    path = write_jsonl(tmp_path / "data.jsonl", [*NESTED, {"text": "It is 7."}])
    sources, options = [path], {}
    if change == "day":
        tokenizer.chat_template = "{{ strftime_now('%Y') }} " + CHATML
    _, before = n_parsed(parsed, sources, tokenizer)
    if change == "content":
        path.write_text(path.read_text().replace("It is 7.", "It is 8."))
    elif change == "max_seq_len":
        options["max_seq_len"] = 11
    elif change == "template":
        tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|start|>")
    elif change == "post-processor":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    elif change == "special":
        tokenizer.chat_template = "{{ bos_token }}" + CHATML
        n_parsed(parsed, sources, tokenizer)
        tokenizer.bos_token = "<|im_end|>"  # which is no change of tokenizer.json
    elif change == "several":
        sources = [path, write_jsonl(tmp_path / "more.jsonl", [{"text": "fine"}])]
    elif change == "day":
        options["day"] = "2021-01-31"
    n, after = n_parsed(parsed, sources, tokenizer, **options)
    assert n >= 6 and after != before


@pytest.mark.parametrize("module", [cache, chat, encode_examples, files, formats, encoded_rows],
                         ids=lambda m: m.__name__)  # fmt: skip
def test_rows_are_encoded_anew_by_other_code(module, parsed, monkeypatch, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "It is 7."}])
    assert n_parsed(parsed, [path], tokenizer)[0] == 1
    monkeypatch.setattr(prepare_data, "digest", lambda file: (
        digest(file) + "another" * Path(file).samefile(module.__file__)))  # fmt: skip
    assert n_parsed(parsed, [path], tokenizer)[0] == 1
    assert n_parsed(parsed, [path], tokenizer)[0] == 0


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "csv", "saved Dataset"])
def test_file_of_another_content_under_its_name_is_read_anew(kind, tokenizer, tmp_path):
    """Even one of as many bytes, written within the same second."""
    shas = []
    for answer in "It is 7.", "It is 8.":
        (source,) = write_kind(kind, tmp_path, [{"prompt": "x", "completion": answer}])
        rows, _ = prepare([source], tokenizer)
        assert tokenizer.decode(rows.document(0)[0]) == f"x{answer}</s>"
        shas.append(rows.sha256())
    assert len(set(shas)) == 2


def test_message_names_the_file_that_was_given(tokenizer, tmp_path):
    """Not another of the same content, which was encoded before."""
    for name in "first.jsonl", "second.jsonl":
        path = write_jsonl(tmp_path / name, [{"text": "fine, named"}, {"text": 5}])
        assert f"({path} line 2)" in prepare([path], tokenizer)[1]


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz", "saved Dataset"])
def test_table_of_the_same_name_and_time_is_read_anew(kind, tokenizer, tmp_path):
    """As `cp -p` and `rsync -t` leave it."""
    (source,) = write_kind(kind, tmp_path, [{"prompt": "x", "completion": "It is 7."}])
    files_of = [source] if source.is_file() else sorted(source.iterdir())
    times = {file: os.stat(file).st_mtime_ns for file in files_of}
    _, _ = prepare([source], tokenizer)
    write_kind(kind, tmp_path, [{"prompt": "x", "completion": "It is 8."}])
    for file, time in times.items():
        if file.exists():
            os.utime(file, ns=(time, time))
    rows, _ = prepare([source], tokenizer)
    assert tokenizer.decode(rows.document(0)[0]) == "xIt is 8.</s>"


def cached(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return lambda name: next((tmp_path / "cache" / "fsdp_qlora").glob(f"*/{name}"))


@pytest.mark.parametrize("harm", ["flipped", "torn", "empty", "no part", "no index", "torn index"])
def test_damaged_cache_is_encoded_again(harm, parsed, tokenizer, tmp_path, monkeypatch, capsys):
    find = cached(monkeypatch, tmp_path)
    path = write_jsonl(tmp_path / "data.jsonl", NESTED)
    _, first = n_parsed(parsed, [path], tokenizer)
    part, index = find("0000.arrow"), find(cache.MANIFEST)
    content = bytearray(part.read_bytes())
    content[len(content) // 3] ^= 4
    if harm in ("flipped", "torn", "empty"):
        half = part.read_bytes()[: len(content) // 2]
        part.write_bytes({"flipped": content, "torn": half, "empty": b""}[harm])
    elif harm == "torn index":
        index.write_text(index.read_text()[:30])
    else:
        (part if harm == "no part" else index).unlink()
    capsys.readouterr()
    assert n_parsed(parsed, [path], tokenizer) == (len(NESTED), first)
    assert "is incomplete" in capsys.readouterr().out
    assert n_parsed(parsed, [path], tokenizer) == (0, first)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no GiB")])
@pytest.mark.parametrize("name", ["read_fragment", "render_jinja_template"])
def test_passing_fault_ends_one_start_alone(error, name, tokenizer, tmp_path, monkeypatch):
    """Neither the rows are left out by it, nor is it found again."""
    from transformers import tokenization_utils_base

    path = write_jsonl(tmp_path / "data.jsonl", NESTED)

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(files if name == "read_fragment" else tokenization_utils_base, name, fail)
        assert str(error.args[-1]) in refusal([path], tokenizer)
    rows, line = prepare([path], tokenizer)
    assert "skipped" not in line and len(rows) >= len(NESTED)


def test_file_rewritten_while_it_is_encoded_is_not_kept(tokenizer, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "It is 7."}])
    encode_batches = encode_examples.encode_batches

    def rewritten(*args, **settings):
        write_jsonl(path, [{"text": "It is 8."}])
        return encode_batches(*args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "encode_batches", rewritten)
        assert "has changed while it was read" in refusal([path], tokenizer)
    write_jsonl(path, [{"text": "It is 7."}])
    rows, _ = prepare([path], tokenizer)
    assert tokenizer.decode(rows.document(0)[0]) == "It is 7.</s>"


@pytest.mark.parametrize("end", ["SIGKILL", "MemoryError"])
def test_end_of_one_encoding_process_ends_the_start(end, tokenizer, tmp_path, monkeypatch):
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": f"row {i}"}]) for i in range(3)]
    monkeypatch.setattr(cache, "n_cores", lambda: 3)
    encode_batches = encode_examples.encode_batches

    def ended(fragments, **settings):
        if fragments[0].name == str(paths[1]):
            if end == "MemoryError":
                raise MemoryError("no GiB")
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "SIGKILL" and fragments[0].name == str(paths[2]):
            signal.pause()
        return encode_batches(fragments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "encode_batches", ended)
        found = refusal(paths, tokenizer)
        assert {"SIGKILL": "killed by SIGKILL", "MemoryError": "no GiB"}[end] in found
    assert len(prepare(paths, tokenizer)[0]) == 3


@pytest.mark.parametrize("n_cores", [1, 2])
def test_log_says_how_many_rows_are_encoded(n_cores, tokenizer, tmp_path, monkeypatch, capsys):
    """Every few seconds, on a terminal or not; nothing where it takes no time."""
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": f"row {i}"}] * 600) for i in range(2)]
    monkeypatch.setattr(cache, "n_cores", lambda: n_cores)
    monkeypatch.setattr(cache, "PROGRESS_SECONDS", 0)
    prepare(paths, tokenizer)
    found = re.findall(r"^tokenizing: ([\d,]+) documents, \d+ s$", capsys.readouterr().out, re.M)
    counts = [int(n.replace(",", "")) for n in found]
    assert counts == sorted(counts) and counts[0] == 256 and counts[-1] == 1200
    monkeypatch.undo()
    prepare(paths[:1], tokenizer)
    assert "tokenizing" not in capsys.readouterr().out


@pytest.mark.parametrize("n_cores", [1, 3])
def test_cache_that_cannot_be_written_is_named_and_left_empty(n_cores, tokenizer, tmp_path,
                                                              monkeypatch):  # fmt: skip
    paths = [write_jsonl(tmp_path / f"{i}.jsonl", [{"text": f"row {i}"}] * 99) for i in range(3)]
    monkeypatch.setattr(cache, "n_cores", lambda: n_cores)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "0.jsonl" / "cache"))
    assert re.search(r"0\.jsonl/cache/.*: cannot write the data cache: .*HF_DATASETS_CACHE",
                     refusal(paths, tokenizer))  # fmt: skip
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "0.jsonl" / "cache")
    (table,) = write_kind("csv", tmp_path, [{"prompt": "x", "completion": "y"}])
    assert re.search(r"data\.csv: .*copied to HF_DATASETS_CACHE, .*/0\.jsonl/cache$",
                     refusal([table], tokenizer))  # fmt: skip
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as if the disk were full
    try:
        assert "File too large. Free disk space" in refusal(paths, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "cache" / "fsdp_qlora").glob("*/"))


def test_cache_that_can_only_be_read_serves(parsed, tokenizer, tmp_path, monkeypatch):
    find = cached(monkeypatch, tmp_path)
    path = write_jsonl(tmp_path / "data.jsonl", NESTED)
    _, first = n_parsed(parsed, [path], tokenizer)
    lock = find(cache.MANIFEST).parent.with_suffix(".lock")
    lock.unlink()
    lock.mkdir()  # which cannot be opened for writing, by root neither
    assert n_parsed(parsed, [path], tokenizer) == (0, first)
