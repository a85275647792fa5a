"""Which files a --dataset is read from: every kind gives the same rows, each once and named.

What rows mean is in test_forms.py, that they are found again in test_cache.py.
"""

import csv
import gzip
import json
import re

import datasets
import pytest
from conftest import encode_file, one_process
from rows import (
    AGAIN, ASKED, CHATML, TALK, THIRD, chat_tokenizer, encode_row, prepare, refusal, says, whole,
    write_jsonl)

from fsdp_qlora.config import Config
from fsdp_qlora.data import cache, sources
from fsdp_qlora.data.prepare_data import prepare_data


@pytest.fixture
def tokenizer(demo_directory):
    return chat_tokenizer(demo_directory, CHATML)


FLAT = [
    {"prompt": prompt, "completion": completion}
    for prompt, completion in [
        ("What is 3 plus 4?\n", "The answer is 7."), ("", "NA"), ("null", "1.50"), ("a, b", '"x"'),
        ("ä ✓ 🙂", "two\nlines"), ("007", "None"), ("2020-01-31", "true"), ("nan", "-0"),
    ]
]  # fmt: skip
NESTED = [
    {"messages": TALK},
    {"messages": [ASKED[0], says("assistant", "It is 7.", weight=0), *AGAIN]},
    {"messages": ASKED, "id": 3},
    {"messages": THIRD},
    {"messages": AGAIN},
]


def write_table(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)


def write_csv(path, rows, opened=open, **options):
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)


def write_kind(kind, directory, rows):
    """The sources that are these rows."""
    half, path = len(rows) // 2, directory / "data"
    if kind in ("jsonl", "ndjson", "json of lines"):
        return [write_jsonl(directory / f"data.{kind.split()[0]}", rows)]
    if kind == "json":
        path = directory / "data.json"
        path.write_text(f"\ufeff\n {json.dumps(rows, indent=1)}\n", encoding="utf-8")
    elif kind in ("jsonl.gz", "json.gz"):
        path = directory / f"data.{kind}"
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        text = lines if kind == "jsonl.gz" else json.dumps(rows)
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "parquet":
        path = directory / "data.parquet"
        write_table(path, rows)
    elif kind == "csv":
        path = directory / "data.csv"
        write_csv(path, rows)
    elif kind == "tsv":
        path = directory / "data.tsv"
        write_csv(path, rows, delimiter="\t")
    elif kind == "csv.gz":
        path = directory / "data.csv.gz"
        write_csv(path, rows, gzip.open)
    elif kind == "saved Dataset":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif kind == "saved DatasetDict":
        parts = {"train": [{"text": "another"}], "test_sft": rows}
        datasets.DatasetDict(
            {name: datasets.Dataset.from_list(part) for name, part in parts.items()}
        ).save_to_disk(path)
        return [f"{path},split=test_sft"]
    else:  # several files
        (path / "below").mkdir(parents=True)
        write_jsonl(path / "a.jsonl", rows[:half])
        write_table(path / "below" / "b.parquet", rows[half:])
        (path / "README.md").write_text("no rows")
        if kind == "several":
            return [path / "a.jsonl", path / "below" / "b.parquet"]
        if kind == "pattern":
            return [path / "**" / "[ab].*"]
        assert kind == "directory"
    return [path]


KINDS = ("jsonl", "ndjson", "json of lines", "json", "jsonl.gz", "json.gz", "parquet",
         "saved Dataset", "saved DatasetDict", "directory", "several", "pattern")  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "csv", "csv.gz", "tsv"])
def test_every_kind_of_file_gives_the_same_rows(kind, tokenizer, tmp_path):
    for name, rows in {"flat": FLAT, "nested": NESTED}.items():
        if name == "nested" and kind.startswith(("csv", "tsv")):
            continue
        want = [document for row in rows for document in encode_row(row, tokenizer, tmp_path)]
        (tmp_path / name).mkdir()
        sources = write_kind(kind, tmp_path / name, rows)
        found, line = prepare(sources, tokenizer)
        assert line.startswith(f"{len(want)} row") and "skipped" not in line
        assert len(found) == len(want)
        for i, one in enumerate(want):
            ids, labels = (t.tolist() for t in found.document(i))
            assert ids == one["input_ids"].tolist() and labels == one["labels"].tolist()
        assert found.lengths.tolist() == [one["length"] for one in want]
        assert found.n_loss_tokens.tolist() == [one["n_loss_tokens"] for one in want]
        assert found.document_hashes.tolist() == [one["digest"] for one in want]


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_table_is_read_whole_whatever_its_fragments(rows, monkeypatch, tokenizer, tmp_path):
    monkeypatch.setattr(sources, "FRAGMENT_EXAMPLES", rows)
    (source,) = write_kind("saved Dataset", tmp_path, [*FLAT, {"prompt": "x", "completion": None}])
    fragments, _ = sources.find_fragments(str(source))
    assert len(fragments) == -(-9 // rows)
    read = list(sources.read_fragments(fragments))
    assert [row for _, row in read[:-1]] == FLAT and read[-1][1]["prompt"] == "x"
    named = [where for where, _ in read]
    assert named == [f"{source} example {i}" for i in range(1, 10)]
    _, line = prepare([source], tokenizer)
    assert f"; 1 skipped: null in completion ({source} example 9)" in line


LINES = {
    "unix": b"\n".join,
    "dos": b"\r\n".join,
    "last line ends": lambda lines: b"".join(line + b"\n" for line in lines),
    "blank lines": lambda lines: b"\n\n" + b"\n \t\r\n\n".join(lines) + b"\n\n",
    "byte order mark": lambda lines: b"\xef\xbb\xbf" + b"\n".join(lines),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("size", [1, 2, 7, 40, 100, 2**20])
def test_every_line_is_read_once_whatever_the_fragments(size, name, monkeypatch, tmp_path):
    """Lines of 11 to 130 bytes in fragments that end anywhere in them."""
    texts = [f"row {i} " + "x✓\u2028\x85"[i % 4] * (i * 5 % 40) for i in range(40)]
    lines = [json.dumps({"text": text}, ensure_ascii=i % 8 < 4).encode()
             for i, text in enumerate(texts)]  # fmt: skip
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINES[name](lines))
    monkeypatch.setattr(sources, "FRAGMENT_BYTES", size)
    fragments, _ = sources.find_fragments(str(path))
    assert (len(fragments) > 1) == (path.stat().st_size > size)
    read = list(sources.read_fragments(fragments))
    assert [row for _, row in read] == [{"text": text} for text in texts]
    by_line = path.read_bytes().split(b"\n")
    for where, row in read:
        source, _, number = where.rpartition(" line ")
        line = by_line[int(number) - 1].removeprefix(b"\xef\xbb\xbf")
        assert source == str(path) and json.loads(line) == row


@pytest.mark.parametrize("at", [0, 1, 25, 49])
@pytest.mark.parametrize("size", [60, 333, 2**20])
def test_bad_line_is_named_whatever_the_fragments(at, size, monkeypatch, tokenizer, tmp_path):
    lines = [json.dumps({"text": f"row {i} " + "x" * (i % 50)}) for i in range(50)]
    lines[at] = f'{{"text": "row {at}'
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sources, "FRAGMENT_BYTES", size)
    monkeypatch.setattr(cache, "n_cores", lambda: 1)
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 49 and "1 skipped: is not JSON" in line
    assert f"({path} line {at + 1})" in line


def test_several_processes_encode_a_large_file_in_its_order(tokenizer, tmp_path):
    n, filler = 700, "answer " * 300
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": f"row {i} {filler}"} for i in range(n)))
    with path.open("a") as file:
        file.write('{"text": 5}\n')
    assert path.stat().st_size > sources.FRAGMENT_BYTES
    rows, line = prepare([path], tokenizer, max_seq_len=12)
    assert f"1 skipped: text is int, expected a string ({path} line {n + 1})" in line
    texts = [tokenizer.decode(rows.document(i)[0]) for i in range(len(rows))]
    assert [text.split()[1] for text in texts] == [str(i) for i in range(n)]


@pytest.mark.parametrize(
    "bad, why",
    [(b'{"text": ', "is not JSON: "), (b'{"text"', "is not JSON: Expecting ':' delimiter"),
     (b"nonsense", "is not JSON: "), (b"\0", "is not JSON: "),
     (b'{"text": "\xe4"}', "is not UTF-8 (perhaps cp1252): save the file as"),
     (b"[" * 100_000, "is not JSON: "),
     (b"[1, 2]", "is list, expected an object"), (b'"text"', "is str, expected an object")],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
def test_line_that_is_no_row_is_left_out(bad, why, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}\n' + bad + b'\n{"text": "c"}\n')
    documents = encode_file(path, tokenizer)
    assert whole([one for one in documents if one["kept"]], tokenizer) == [
        "a</s>", "b</s>", "c</s>"]  # fmt: skip
    (left_out,) = (one for one in documents if not one["kept"])
    assert left_out["left_out"].startswith(why) and left_out["where"] == f"{path} line 4"


TEXTS = {  # of two rows, by kind of file
    "jsonl": "".join(f'{{"prompt": "ж {i}", "completion": "ö {i}"}}\n' for i in range(2)),
    "json": json.dumps([{"prompt": "ж", "completion": "ö"}] * 2, ensure_ascii=False),
    "txt": "жаба ö\nещё текст\n",
    "csv": "prompt,completion\nж,ö\nx,y\n",
    "tsv": "prompt\tcompletion\nж\tö\nx\ty\n",
}  # fmt: skip


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", TEXTS)
def test_text_in_another_encoding_ends_the_run(kind, packed, tokenizer, tmp_path):
    """As Windows' > writes it, JSON too, which Python guesses from the bytes of lines that are cut
    at their ends. A byte order mark of UTF-8 does no harm."""
    path = tmp_path / f"data.{kind}{packed}"
    write = gzip.open if packed else open
    encodings = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]
    if kind != "txt":  # where only spaces tell UTF-16 without a mark, and nothing UTF-32
        encodings += ["utf-32-le", "utf-32-be"]
    for encoding in encodings:
        with write(path, "wb") as file:
            file.write(TEXTS[kind].encode(encoding))
        words = f"{path}: is {encoding[:6].upper()}: save it as UTF-8"
        assert refusal([path], tokenizer) == f"--dataset {words}"
    for encoding in "utf-8", "utf-8-sig":
        with write(path, "wb") as file:
            file.write(TEXTS[kind].encode(encoding))
        rows, line = prepare([path], tokenizer)
        assert len(rows) == 2 and "skipped" not in line


@pytest.mark.parametrize("kind", TEXTS)
def test_text_of_windows_is_said_not_to_be_utf_8(kind, tokenizer, tmp_path):
    """Its lines are left out one by one, a table or an array is refused as a whole."""
    path = tmp_path / f"data.{kind}"
    path.write_bytes(TEXTS[kind].replace("ö", "ж").encode("cp1251"))
    assert re.search(r"is not UTF-8 \(perhaps cp1252\): save the file as UTF-8( \(.* line 1\))?$",
                     refusal([path], tokenizer))  # fmt: skip


def test_lines_in_utf_16_behind_others_are_left_out(tokenizer, tmp_path):
    """As >> of Windows appends them: each by itself is JSON to Python."""
    path = tmp_path / "data.jsonl"
    line = '{"text": "ж"}\n'
    path.write_bytes(400 * line.encode() + 2 * line.encode("utf-16-be"))
    rows, said = prepare([path], tokenizer)
    assert len(rows) == 400 and "2 skipped: is not JSON: " in said


def test_null_characters_alone_are_no_sign_of_utf_16(tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    for nulls in b"\0", b"\0 \0", 999 * b"\0", 9999 * b"\0":
        path.write_bytes(nulls + b'\n{"text": "a"}\n{"text": "b"}\n')
        assert len(prepare([path], tokenizer)[0]) == 2


@pytest.mark.parametrize("name, content, words", [
    ("a.jsonl", gzip.compress(b'{"text": "x"}\n', mtime=0), "is gzip: name it a.jsonl.gz"),
    ("a.csv", gzip.compress(b"prompt,completion\n", mtime=0), "is gzip: name it a.csv.gz"),
    ("a.jsonl.gz", b'{"text": "x"}\n', "is not gzip: name it a.jsonl"),
    ("a.csv.gz", b"prompt,completion\n", "is not gzip: name it a.csv"),
    ("a.json", b"PK\3\4\x14\0", "is a zip archive: unpack it"),
    ("a.jsonl", b"(\xb5/\xfd\x04", "is zstd: unpack it"),
    ("a.jsonl", None, "is Parquet: name it .parquet"),
    ("a.csv", b"prompt;completion\na, b;c\n", "separated by semicolons: save it with commas"),
    ("a.tsv", b"prompt;completion\na;c\n", "separated by semicolons: save it with tabs"),
    ("a.csv", b"prompt\tcompletion\na\tc\n", "separated by tabs: name it .tsv"),
    ("a.tsv", b"prompt,completion\na,c\n", "separated by commas: name it .csv"),
    ("a.csv", b"\n\nprompt|completion\na|c\n", "separated by vertical bars: save it with commas"),
    ("a.csv", b"prompt,completion\na,b\na,b,c\n", "saw 3: put quotes around each cell that has"),
    ("a.csv", b"prompt,completion\na,b,c\n", "put quotes around each cell that has commas in it"),
], ids=lambda value: str(value)[:20])  # fmt: skip
def test_file_that_is_not_what_its_name_says_is_refused_in_one_line(
        name, content, words, tokenizer, tmp_path, capfd):  # fmt: skip
    if content is None:
        write_table(tmp_path / name, [{"text": "x"}])
    else:
        (tmp_path / name).write_bytes(content)
    capfd.readouterr()
    said = refusal([tmp_path], tokenizer)
    assert said.startswith(f"--dataset {tmp_path / name}: ") and words in said
    assert capfd.readouterr().err == ""  # of `datasets`, which logs errors and draws bars
    assert not datasets.are_progress_bars_disabled()  # elsewhere


def test_a_semicolon_in_a_cell_separates_none(tokenizer, tmp_path):
    (tmp_path / "a.csv").write_text('prompt,completion,"a;b;c;d"\na; b; c,"d; e",\n')
    (tmp_path / "b.csv").write_text("text\na; b, c\n")
    assert len(prepare([tmp_path / "a.csv"], tokenizer)[0]) == 1
    assert "put quotes" in refusal([tmp_path / "b.csv"], tokenizer)


def test_row_of_an_array_is_named(tokenizer, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": "fine"}, {"text": 5}], indent=1))
    _, line = prepare([path], tokenizer)
    assert f"({path} example 2)" in line


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("none.jsonl", "none.jsonl"),
        ("none/*.jsonl", "no file matches"),
        ("nothing", "no file in it ends in"),
        ("data.jsonl,part=3", "split=, name= or revision="),
        ("data.jsonl,split=test", "options after a comma are for Hub ids"),
        ("nothing,split=test", "no file in it ends in"),
        ("saved,name=large", "options after a comma are for Hub ids"),
        ("saved,split=test", "has no split test, only train. Choose with ,split=NAME"),
        ("empty.jsonl", "has no examples"),
        ("broken.json", "is not JSON"),
        ("broken.parquet", "broken.parquet"),
        ("data.html", "neither a Hub id"),
    ],
)
def test_source_that_has_no_rows_is_refused(source, wanted, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    for name, text in {"empty.jsonl": "", "broken.json": "[1,", "broken.parquet": "PAR1",
                       "data.html": "x", "data.jsonl": "{}"}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    if source.startswith("saved"):
        datasets.DatasetDict({"train": datasets.Dataset.from_list(FLAT)}).save_to_disk("saved")
    assert wanted in refusal([f"./{source}"], tokenizer)


@pytest.mark.parametrize(
    "text, words",
    [("prompt,completion\nWhat is 1+1?,two,\nWhat is 2+2?,four,\n", "Length of header"),
     ("question,answer\nIn Paris, who?,the mayor\nWhat?,four\n", "Length of header"),
     ("question,answer\nWhat?,four\nIn Paris, who?,the mayor\n", "Expected 2 fields in line 3"),
     ("question,answer\n", "no data")],
    ids=["trailing comma", "first row too long", "later row too long", "header only"],
)  # fmt: skip
def test_csv_of_more_cells_than_names_is_refused(text, words, tokenizer, tmp_path):
    """Pandas would take the first column for an index, and shift the others."""
    (tmp_path / "data.csv").write_text(text)
    found = refusal([tmp_path / "data.csv"], tokenizer)
    assert "data.csv" in found and words in found


RAW = [("\"To be", "or"), ("not", "to"), ("\"be\"", "that"), ("is \"the\"", "\"question\" here"),
       ("\"whether", "'tis\""), ("nobler", "in the mind")]  # fmt: skip


@pytest.mark.parametrize("kind, separator", [("tsv", "\t"), ("csv", ","), ("tsv.gz", "\t")])
@pytest.mark.parametrize("rows", [RAW, RAW[:2], RAW[1:2] + RAW[:1]], ids=["all", "first", "last"])
def test_cell_that_begins_with_a_quotation_mark_swallows_no_rows(
        rows, kind, separator, tokenizer, tmp_path):  # fmt: skip
    """A file that knows no quotes has marks as a part of its text."""
    path = tmp_path / f"data.{kind}"
    lines = [separator.join(cells) for cells in [("prompt", "completion"), *rows]]
    (gzip.open if kind.endswith("gz") else open)(path, "wt").write("\n".join(lines) + "\n")
    read = [row for _, row in sources.read_fragments(sources.find_fragments(str(path))[0])]
    assert [(row["prompt"], row["completion"]) for row in read] == rows


@pytest.mark.parametrize("kind, separator", [("tsv", "\t"), ("csv", ",")])
@pytest.mark.parametrize("cells", [
    ("two\nlines", "x"), ('"x"', "y"), ("a, b\nc", "x"), ("tab\there", "x"), ("\n", '"'),
    ('"' + "x" * 200_000, "y")], ids=lambda cells: repr(cells[0])[:9])  # fmt: skip
def test_quotes_around_a_cell_are_no_part_of_it(cells, kind, separator, tmp_path):
    path = tmp_path / f"data.{kind}"
    rows = [{"prompt": "a", "completion": "b"}, dict(zip(("prompt", "completion"), cells))]
    write_csv(path, rows, delimiter=separator, lineterminator="\n")
    read = [row for _, row in sources.read_fragments(sources.find_fragments(str(path))[0])]
    assert read == rows


def test_quotes_of_a_tsv_close_in_their_line(tmp_path):
    """A mark at the end of another row's cell closes none."""
    path = tmp_path / "data.tsv"
    path.write_text('prompt\tcompletion\n"To be\tx\nthat is"\ty\n')
    read = [row for _, row in sources.read_fragments(sources.find_fragments(str(path))[0])]
    assert read == [{"prompt": '"To be', "completion": "x"},
                    {"prompt": 'that is"', "completion": "y"}]  # fmt: skip


@pytest.mark.parametrize("form", ["torch", "numpy", "pandas", "arrow"])
def test_saved_format_changes_no_row(form, tmp_path):
    """with_format() is saved, too; of some columns alone it hides the others."""
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [5], "labels": [5]}]
    table = datasets.Dataset.from_list(rows)
    table.with_format(form).save_to_disk(tmp_path / "whole")
    table.with_format(form, columns=["input_ids"]).save_to_disk(tmp_path / "part")
    datasets.DatasetDict({"train": table.with_format(form)}).save_to_disk(tmp_path / "splits")
    for name in "whole", "part", "splits":
        fragments, _ = sources.find_fragments(str(tmp_path / name))
        assert [row for _, row in sources.read_fragments(fragments)] == rows


def test_what_lies_aside_in_a_directory_is_no_data(tokenizer, tmp_path):
    """Hidden copies, and what runs have written there."""
    path = tmp_path / "data"
    for name in ".ipynb_checkpoints/a.jsonl", "run/metrics.jsonl", "run/demo/data.jsonl", "a.jsonl":
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path / name, [{"text": name}])
    (path / "run" / ".lock").touch()
    assert len(prepare([path], tokenizer)[0]) == 1
    assert "no file in it" in refusal([path / "run"], tokenizer)


# what lies in a directory besides data.jsonl, and what of it is no data
ASIDE = {
    "words": (["LICENSE.txt", "README.txt", "requirements.txt"], 3),
    "words below": (["docs/NOTICE.txt", "docs/notes.txt", "vocab.txt", "merges.txt.gz"], 4),
    "of libraries": (["dataset_infos.json", "dataset_info.json", "tokenizer_config.json",
                      "model.safetensors.index.json"], 4),
    "of tools": (["croissant.json", "schema.json", "stats.json", "trainer_state.json"], 4),
    "about data": (["metadata.jsonl", "metadata.csv", "index.tsv", "croissant.json"], 4),
    "about splits": (["train_metadata.jsonl", "metadata-00000-of-00002.ndjson", "stats_test.json",
                      "meta/episodes.jsonl"], 4),
    "about data, compressed": (["metadata.jsonl.gz", "README.csv", "LICENSE.txt.gz"], 3),
    "data": (["readme.jsonl", "config.jsonl", "states.json"], 0),
    "data about metadata": (["metadata_extraction.jsonl", "meta_math.jsonl", "reindex.jsonl",
                             "user_info.jsonl"], 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ASIDE)
def test_what_describes_data_in_a_directory_is_no_data(name, tokenizer, tmp_path, capsys):
    beside, n_aside = ASIDE[name]
    write_jsonl(tmp_path / "data.jsonl", [{"text": "data"}])
    for file in beside:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        text = json.dumps({"text": file}) if n_aside == 0 else '{"default": {"splits": []}}\n'
        if ".csv" in file or ".tsv" in file:
            text = "text\nnote\n"
        (gzip.open if file.endswith(".gz") else open)(tmp_path / file, "wt").write(text)
    rows, line = prepare([tmp_path], tokenizer)
    assert len(rows) == 1 + len(beside) - n_aside and "skipped" not in line
    said = capsys.readouterr().out
    assert said.count("note: skipped ") == (n_aside > 0)  # once, and all are named
    assert all(file in said for file in beside) == (n_aside > 0)


def test_table_about_data_is_no_data(tokenizer, tmp_path, capsys):
    """As the metadata.parquet of a folder of images; named by itself it is read."""
    write_jsonl(tmp_path / "data.jsonl", [{"text": "data"}])
    write_table(tmp_path / "metadata.parquet", [{"file_name": "a.png", "text": "internal note"}])
    assert len(prepare([tmp_path], tokenizer)[0]) == 1
    assert f"note: skipped metadata.parquet in {tmp_path} (" in capsys.readouterr().out
    assert len(prepare([tmp_path / "metadata.parquet"], tokenizer)[0]) == 1
    (tmp_path / "data.jsonl").unlink()
    assert "except metadata.parquet, which does not look like" in refusal([tmp_path], tokenizer)


def test_directory_of_text_alone_is_data_but_for_its_license(tokenizer, tmp_path, capsys):
    for name in "a.txt", "b.txt", "LICENSE.txt", "readme_en.txt":
        (tmp_path / name).write_text(name)
    assert len(prepare([tmp_path], tokenizer)[0]) == 2
    assert "note: skipped LICENSE.txt, readme_en.txt in " in capsys.readouterr().out
    assert len(prepare([tmp_path / "LICENSE.txt"], tokenizer)[0]) == 1
    for name in "a.txt", "b.txt":
        (tmp_path / name).unlink()
    assert "except LICENSE.txt, readme_en.txt, which does not" in refusal([tmp_path], tokenizer)


def test_rows_that_are_there_twice_are_said(tokenizer, tmp_path, capsys):
    """As in two kinds of files, or in a file that is named twice; of pairs both answers count."""
    directory = tmp_path / "data"
    directory.mkdir()
    write_jsonl(directory / "train.jsonl", FLAT)
    write_table(directory / "train.parquet", FLAT)

    def said(*sources, **flags):
        config = Config(dataset=tuple(map(str, sources)), max_seq_len=64, **flags)
        with one_process():
            rows, _ = prepare_data(config, tmp_path, tokenizer, len(tokenizer), "2020-01-31")
        return len(rows), capsys.readouterr().out

    n, line = said(directory)
    assert n == 16
    assert "\nnote: 8 duplicate rows (identical tokens)\n" in line
    assert "note: 8 duplicate rows" in said(*2 * [directory / "train.jsonl"])[1]
    assert "duplicate" not in said(directory / "train.jsonl")[1]
    pairs = [{"prompt": "x", "chosen": "a", "rejected": other} for other in "bccd"]
    pairs = write_jsonl(tmp_path / "pairs.jsonl", pairs)
    assert "note: 1 duplicate rows" in said(pairs, loss="dpo")[1]


def test_chat_template_that_goes_unused_is_said(tokenizer, tmp_path, capsys):
    """Of a model's own; the demo's rows are meant so."""
    text = {"prompt": "What is 3 plus 4?", "completion": "It is 7."}
    lists = {"prompt": TALK[:2], "completion": TALK[2:]}
    path = tmp_path / "data.jsonl"
    for rows, n, model, template, flags in (
            ([text, lists, {"text": "x"}], 1, "m", CHATML, {}), ([lists], 0, "m", CHATML, {}),
            ([text], 0, None, CHATML, {}), ([text], 0, "m", None, {}),
            ([text], 0, "m", CHATML, {"columns": ("completion=response",)}),
            ([{"prompt": "x", "chosen": "a", "rejected": "b"}], 1, "m", CHATML, {"loss": "dpo"})):
        tokenizer.chat_template = template
        config = Config(model=model, dataset=(str(write_jsonl(path, rows)),), max_seq_len=99,
                        **flags)  # fmt: skip
        with one_process():
            prepare_data(config, tmp_path, tokenizer, len(tokenizer), "2020-01-31")
        said = capsys.readouterr().out
        assert (f"note: {n} prompts and completions are trained as plain text" in said) == (n > 0)
        assert ("--columns completion=response" in said) == (n > 0 and "loss" not in flags)


# what lies in a directory, what is asked for, what is read
SPLITS = {
    "files": (["train.jsonl", "test.jsonl", "validation.jsonl"], "", ["train.jsonl"]),
    "files of a Hub id": (
        ["data/train_sft-00000-of-00002.jsonl", "data/train_sft-00001-of-00002.jsonl",
         "data/test_sft-00000-of-00001.jsonl"], "",
        ["data/train_sft-00000-of-00002.jsonl", "data/train_sft-00001-of-00002.jsonl"]),
    "directories": (["train/a.jsonl", "test/b.jsonl"], "", ["train/a.jsonl"]),
    "no name": (["a.jsonl", "b_eval.jsonl"], "", ["a.jsonl"]),
    "no test": (["contest.jsonl", "train.jsonl"], "", ["contest.jsonl", "train.jsonl"]),
    "test alone": (["test.jsonl"], "", ["test.jsonl"]),
    "file in a directory of another split": (
        ["train/test.jsonl", "test/train.jsonl"], "", ["test/train.jsonl"]),
    "chosen": (["train.jsonl", "dev.jsonl"], ",split=validation", ["dev.jsonl"]),
    "chosen by its own name": (
        ["data/train_sft-0.jsonl", "data/train_gen-0.jsonl"], ",split=train_gen",
        ["data/train_gen-0.jsonl"]),
    "neither": (["test.jsonl", "dev.jsonl"], "", "none of its 2 files is of split train"),
    "none": (["train.jsonl", "dev.jsonl"], ",split=tset", "none of its 2 files is of split tset"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPLITS)
def test_rows_for_tests_in_a_directory_are_not_trained_on(name, tokenizer, tmp_path, capsys):
    found, option, want = SPLITS[name]
    for file in found:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / file, [{"text": file}])
    if isinstance(want, str):
        with pytest.raises(ValueError, match=want):
            sources.find_fragments(f"{tmp_path}{option}")
        return
    rows, _ = prepare([f"{tmp_path}{option}"], tokenizer)
    texts = [tokenizer.decode(rows.document(i)[0]) for i in range(len(rows))]
    assert texts == [f"{text}</s>" for text in want]
    said = f" of {tmp_path}: {len(want)} of {len(found)} files;"
    assert capsys.readouterr().out.count(said) == (len(want) < len(found))  # once


def test_each_line_of_a_text_file_is_a_row(tokenizer, tmp_path):
    (tmp_path / "data.txt").write_bytes(b"[a]\r\n\n  b\n\xff\n{}")
    rows, line = prepare([tmp_path / "data.txt"], tokenizer)
    texts = [tokenizer.decode(rows.document(i)[0]) for i in range(len(rows))]
    assert texts == ["[a]</s>", "  b</s>", "{}</s>"]
    assert "1 skipped: is not JSON" not in line and "data.txt line 4" in line


@pytest.mark.parametrize("name", ["lr=1,bs=4.jsonl", "a[1].jsonl", "what?.jsonl"])
def test_name_of_a_file_is_taken_as_it_is(name, tokenizer, tmp_path):
    write_jsonl(tmp_path / name, [{"text": "x"}])
    assert len(prepare([tmp_path / name], tokenizer)[0]) == 1


@pytest.mark.parametrize(
    "name, content, words",
    [("bad.json", b"[1,", "bad.json example 1: is not JSON"),
     ("bad.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], "bad.jsonl.gz line ")],
    ids=["array", "torn"],
)  # fmt: skip
def test_bad_file_among_others_is_named_in_one_line(name, content, words, tokenizer, tmp_path):
    """They are read by several processes, whose errors come with a traceback."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "x"}])
    (tmp_path / name).write_bytes(content)
    found = refusal([good, tmp_path / name], tokenizer)
    assert words in found and len(found) < 400


@pytest.mark.parametrize("source", ["owner/rows-2.5", "owner/rows,revision=refs/convert/parquet"])
def test_name_like_that_of_a_hub_id_is_asked_for_there(source, tokenizer):
    assert "neither a Hub id" not in refusal([source], tokenizer)


def test_all_rows_that_are_left_out_are_counted(tokenizer, tmp_path):
    """Also those of rare reasons; of lines that are no JSON wherever in them that shows."""
    lines = ['{"text": "fine"}', *('{"text": "' + "x" * n for n in range(1, 5))]
    kinds = 1, 1.5, None, [1], {"a": 1}, True  # six more reasons
    lines += [json.dumps({"text": kind}) for kind in kinds]
    path = tmp_path / "data.jsonl"
    latin = [f'{{"text": "{"x" * n}ä"}}'.encode("latin-1") for n in (1, 3)]
    path.write_bytes(b"\n".join([*map(str.encode, lines), *latin]))
    _, line = prepare([path], tokenizer)
    assert line.startswith("1 row, ") and "(1 text; " in line
    assert f"; 4 skipped: is not JSON: Invalid control character at ({path} line 2)" in line
    latin = "is not UTF-8 (perhaps cp1252): save the file as UTF-8"
    assert f"; 2 skipped: {latin} ({path} line 12)" in line
    assert line.endswith("; 3 skipped for other reasons")


def test_nulls_that_arrow_fills_in_are_taken_out_at_every_level():
    row = {"a": [{"b": None, "c": {"d": None, "e": 0}}], "f": None, "g": [[{"h": None}]]}
    assert sources.without_none(row) == {"a": [{"c": {"e": 0}}], "g": [[{}]]}
