"""Rows are encoded once: the next start with the same files and settings finds them again."""

import copy
from pathlib import Path

import pytest
from rows import CHATML, chat_tokenizer, prepare, write_jsonl
from test_files import NESTED, write_kind

from fsdp_qlora.data import chat, encode, files, forms
from fsdp_qlora.files import digest


@pytest.fixture
def tokenizer(demo_directory):
    return chat_tokenizer(demo_directory, CHATML)


@pytest.fixture
def parsed(monkeypatch):
    """Each row that is parsed, from now on."""
    rows, find_form = [], forms.find_form

    def counted(row):
        rows.append(row)
        return find_form(row)

    monkeypatch.setattr(forms, "find_form", counted)
    monkeypatch.setattr(encode, "n_cores", lambda: 1)  # in this process
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
    "change", ["content", "max_seq_len", "template", "post-processor", "several", "day"]
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
    elif change == "several":
        sources = [path, write_jsonl(tmp_path / "more.jsonl", [{"text": "fine"}])]
    elif change == "day":
        options["day"] = "2021-01-31"
    n, after = n_parsed(parsed, sources, tokenizer, **options)
    assert n >= 6 and after != before


@pytest.mark.parametrize("module", [chat, encode, files, forms], ids=lambda m: m.__name__)
def test_rows_are_encoded_anew_by_other_code(module, parsed, monkeypatch, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "It is 7."}])
    assert n_parsed(parsed, [path], tokenizer)[0] == 1
    monkeypatch.setattr(encode, "digest", lambda file: (
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
        assert tokenizer.decode(rows.tokens(0)[0]) == f"x{answer}</s>"
        shas.append(rows.sha256())
    assert len(set(shas)) == 2


def test_message_names_the_file_that_was_given(tokenizer, tmp_path):
    """Not another of the same content, which was encoded before."""
    for name in "first.jsonl", "second.jsonl":
        path = write_jsonl(tmp_path / name, [{"text": "fine, named"}, {"text": 5}])
        assert f"({path} line 2)" in prepare([path], tokenizer)[1]
