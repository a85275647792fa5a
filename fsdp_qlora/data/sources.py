"""Find the data of --dataset and split it into fragments: files, directories, save_to_disk()
output, data sets of the Hub.

`datasets` reads everything but JSON; example_formats.py knows what an example means.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import gzip
import hashlib
import io
import json
import re
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_qlora.errors import FatalExample
from fsdp_qlora.files import digest, json_digest
from fsdp_qlora.log import log

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt")  # .txt: each line is an example
# {suffix: name in `datasets`}
TABLE_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES)
SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "vertical bars"}  # of cells
MAGIC_BYTES = {  # {first bytes of a file that is not text, whatever its name: what it is}
    b"\x1f\x8b": "gzip: name it {}.gz", b"PK\3\4": "a zip archive: unpack it",
    b"(\xb5/\xfd": "zstd: unpack it", b"\xfd7zXZ\0": "xz: unpack it",
    b"BZh91AY&SY": "bzip2: unpack it", b"PAR1\x15": "Parquet: name it .parquet"}
BYTE_ORDER_MARKS = {  # in this order, because UTF-32's mark begins with UTF-16's
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)}
NOT_UTF_8 = "is not UTF-8 (perhaps cp1252): save the file as UTF-8"
SPLITS = {"train": "train|training", "validation": "validation|valid|val|dev",
          "test": "test|testing|eval|evaluation"}  # {split: its names in files and directories}
SPLIT_WORDS = "|".join(SPLITS.values())
NON_DATA_NAMES = re.compile("|".join((  # names of files in a data directory that are not data
    # texts about the data
    r"(readme|licen[cs]e|copying|notice|authors|contributing|citation|change(s|log)|requirements)"
    r"([^a-z].*)?\.(txt|csv|tsv)(\.gz)?",
    # tables about the data, in a file of any kind or a folder; perhaps for a split, or in parts
    rf"(({SPLIT_WORDS})[-_.])?(meta(data)?|index|info|stats|schema|manifest|checksums|croissant|"
    rf"dataset_infos?)([-_.](\d+|of|{SPLIT_WORDS}))*(\.\w+)?(\.gz)?",
    # files that libraries write
    r"(dataset_dict|(\w+_)?state|(\w+_)?config|package(-lock)?|special_tokens_map|.*\.index)\.json",
)), re.I)
FRAGMENT_BYTES, FRAGMENT_EXAMPLES = 2**20, 5000  # size of a fragment: lines of JSON; of a table
HEAD_BYTES = 4096  # bytes that are read to recognize the encoding of a file


class Fragment(NamedTuple):
    """Examples of a --dataset that one process reads at once."""

    name: str  # name of the file, the directory or the data set on the Hub
    table: Any = None  # a datasets.Dataset, which is imported late; None: a file of lines or JSON
    start: int = 0  # number of an example in the table, or of a byte in the file
    stop: int | None = None  # None: read to the end
    lines_before: int = 0  # lines of the file before this fragment


def find_fragments(source: str, is_silent: bool = False) -> tuple[list[Fragment], list[str]]:
    """Return the fragments of one --dataset, and a list of digests that identifies its content.
    Logs which files are left out, unless it is silent."""
    name, options = split_options(source)
    is_pattern = glob.has_magic(name) and not Path(name).exists()
    paths = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
    if not paths:
        raise ValueError(f"{name}: no file matches")
    fragments, digests = [], []
    for path in map(Path, paths):
        is_whole = not path.is_dir() or saved_kind(path) == "Dataset"
        allowed = set() if is_whole else {"split"}
        if path.exists() and options.keys() - allowed:
            raise ValueError(f"{source}: options after a comma are for Hub ids, and split= for"
                             " directories. Name the files you want")
        for file in find_files(path, options.get("split"), is_silent):
            if file.is_file() and file_suffix(file) in SUFFIXES and file_suffix(file) != ".parquet":
                check_text(file)
            if file.is_file() and file_suffix(file) in JSON_SUFFIXES:
                more, file_digest = json_fragments(file)
            else:
                file_digest = path_digest(file) if file.exists() else None
                table = open_table(source, file, options, file_digest)
                n = len(table)
                more = [Fragment(str(file), table, start, min(start + FRAGMENT_EXAMPLES, n))
                        for start in range(0, len(table), FRAGMENT_EXAMPLES)]
                file_digest = file_digest or table._fingerprint  # identifies the version on the Hub
            fragments += more
            digests.append(file_digest)
    return fragments, digests


def read_fragments(fragments: list[Fragment]) -> Iterator[tuple[str, Any]]:
    """Yield (where, example) for each example: its place in words; and the example, or an exception
    that explains why it cannot be read. Raises ValueError if a file cannot be read any further,
    which another start may be able to do."""
    for fragment in fragments:
        where = fragment.name
        try:
            for where, example in read_fragment(fragment):
                yield where, example
        except (OSError, EOFError, zlib.error) as e:
            raise ValueError(f"{where}: cannot be read any further: {e}")


def read_fragment(fragment: Fragment) -> Iterator[tuple[str, Any]]:
    """Yield the same as read_fragments(), for one fragment."""
    if fragment.table is not None:
        stop = len(fragment.table) if fragment.stop is None else fragment.stop
        examples = fragment.table.select(range(fragment.start, stop))
        for number, example in enumerate(examples, 1 + fragment.start):
            values = {k: without_none(v) for k, v in example.items()}
            yield f"{fragment.name} example {number}", values
    elif fragment.start == 0 and is_array(Path(fragment.name)):
        with open_file(fragment.name) as file:
            try:
                examples = json.loads(file.read().decode("utf-8-sig"))
            except UnicodeDecodeError:
                examples = [FatalExample(NOT_UTF_8)]
            except (ValueError, RecursionError) as e:
                examples = [FatalExample(f"is not JSON: {e}")]
        for number, example in enumerate(examples, 1):
            yield f"{fragment.name} example {number}", example
    else:
        yield from read_lines(fragment)


def read_lines(fragment: Fragment) -> Iterator[tuple[str, Any]]:
    """Yield the same as read_fragments(), for each line that is not blank."""
    is_text = file_suffix(Path(fragment.name)) == ".txt"
    with open_file(fragment.name) as file:
        lines = file
        if fragment.stop is not None:
            file.seek(fragment.start)
            lines = io.BytesIO(file.read(fragment.stop - fragment.start))
        for number, line in enumerate(lines, 1 + fragment.lines_before):
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8-sig")  # json.loads() would guess from bytes
                example = {"text": text.rstrip("\r\n")} if is_text else json.loads(text)
            except UnicodeDecodeError:
                example = ValueError(NOT_UTF_8)
            except (ValueError, RecursionError) as e:
                # without the position, so that equal errors are counted together
                example = ValueError(f"is not JSON: {getattr(e, 'msg', e)}")
            yield f"{fragment.name} line {number}", example


def split_options(source: str) -> tuple[str, dict[str, str]]:
    """Return the name in a --dataset, and the options after its commas. An existing file may have
    commas in its name."""
    if Path(source).exists():
        return source, {}
    name, *options = source.split(",")
    options = dict(option.partition("=")[::2] for option in options)
    if not options.keys() <= {"split", "name", "revision"}:
        raise ValueError(f"{source}: expected split=, name= or revision= after a comma")
    return name, options


def find_files(path: Path, split: str | None, is_silent: bool) -> list[Path]:
    """Return the data files of a split in a directory, sorted, without hidden files and without
    what a run has written there. Any other path is returned itself."""
    if not path.is_dir() or saved_kind(path):
        return [path]
    files, aside = [], []
    for file in sorted(path.rglob("*")):
        if file_suffix(file) in SUFFIXES and file.is_file():
            below = file.relative_to(path)
            is_hidden = any(part.startswith(".") for part in below.parts)
            if not is_hidden and not any((path / p / ".lock").exists() for p in below.parents):
                (aside if any(map(NON_DATA_NAMES.fullmatch, below.parts)) else files).append(file)
    kinds = {file_suffix(file) for file in files}
    if kinds - {".txt"}:  # next to data of another kind, text files describe the data
        aside += [file for file in files if file_suffix(file) == ".txt"]
        files = [file for file in files if file_suffix(file) != ".txt"]
    if not files:
        raise ValueError(f"{path}: no file in it ends in {', '.join(SUFFIXES)}"
                         + f", except {name_some(path, aside)}, which does not look like data"
                         * bool(aside))
    if aside and not is_silent:
        log(f"note: skipped {name_some(path, aside)} in {path} (does not look like data). To use"
            " such a file, name it")
    return choose_split(path, files, split, is_silent)


def name_some(path: Path, files: list[Path]) -> str:
    """Return the names of files relative to `path`, at most five."""
    names = [str(file.relative_to(path)) for file in sorted(files)]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def choose_split(path: Path, files: list[Path], split: str | None, is_silent: bool) -> list[Path]:
    """Return the files in a directory that belong to this split, by its name or by their own; None:
    all but those for validation and tests, if there are others."""
    names = {file: name_of_split(file.relative_to(path)) for file in files}
    if split:
        named = re.compile(rf"(^|/){re.escape(split)}([-./]|$)")
        chosen = [file for file in files
                  if split == names[file] or named.search(file.relative_to(path).as_posix())]
    elif len(set(names.values())) == 1:
        return files
    else:
        chosen = [file for file in files if names[file] in ("train", None)]
    found = ", ".join(sorted({name or "no split" for name in names.values()}))
    if not chosen:
        raise ValueError(f"{path}: none of its {len(files)} files is of split {split or 'train'},"
                         f" only of {found}. Choose with ,split=NAME or name the files")
    if len(chosen) < len(files) and not is_silent:
        log(f"note: using split {split or 'train'} of {path}: {len(chosen)} of {len(files)} files;"
            f" there are {found}. Choose with ,split=NAME")
    return chosen


def name_of_split(path: Path) -> str | None:
    """Return the key of SPLITS that the file's name, or else that of the nearest directory above
    it, refers to; None if there is none."""
    for part in reversed(path.parts):
        for split, words in SPLITS.items():
            if re.search(rf"(^|[^a-z])({words})([^a-z]|$)", part.lower()):
                return split
    return None


def saved_kind(path: Path) -> str | None:
    """Return the name of the `datasets` class whose save_to_disk() wrote this directory, or None.
    """
    files = {"dataset_dict.json": "DatasetDict", "state.json": "Dataset"}
    return next((kind for file, kind in files.items() if (path / file).is_file()), None)


def file_suffix(path: Path) -> str:
    """Return the suffix, without .gz."""
    return Path(path.name.removesuffix(".gz")).suffix


def json_fragments(path: Path) -> tuple[list[Fragment], str]:
    """Return the fragments of a file of lines or JSON, and its SHA-256. Lines are divided into
    fragments; an array or a .gz is one fragment, because it can only be read from its beginning."""
    if path.suffix == ".gz" or is_array(path):
        return [Fragment(str(path))], digest(path)
    fragments, sha, start, lines_before = [], hashlib.sha256(), 0, 0
    with open(path, "rb") as file:
        while lines := file.read(FRAGMENT_BYTES) + file.readline():  # to the end of a line
            stop = start + len(lines)
            fragments.append(Fragment(str(path), None, start, stop, lines_before))
            sha.update(lines)
            start, lines_before = stop, lines_before + lines.count(b"\n")
    return fragments, sha.hexdigest()


def check_text(path: Path) -> None:
    """Raise ValueError for a file that does not begin as text in UTF-8."""
    try:
        with open_file(path) as file:
            head = file.read(HEAD_BYTES)
    except gzip.BadGzipFile:
        raise ValueError(f"{path}: is not gzip: name it {path.name.removesuffix('.gz')}")
    except (EOFError, zlib.error):
        return  # reported when the file is read
    for first_bytes, what in MAGIC_BYTES.items():
        if head.startswith(first_bytes):
            raise ValueError(f"{path}: is {what.format(path.name)}")
    if (encoding := encoding_of(head)) != "UTF-8":
        raise ValueError(f"{path}: is {encoding}: save it as UTF-8")


def encoding_of(head: bytes) -> str:
    """Return the encoding of a text from its first bytes, by its byte order mark or the positions
    of NUL bytes; else UTF-8."""
    for encoding, marks in BYTE_ORDER_MARKS.items():
        if head.startswith(marks):
            return encoding
    nulls = [head[i::4].count(0) for i in range(4)]
    if sum(nulls) > 2 and (nulls[0] + nulls[2] == 0 or nulls[1] + nulls[3] == 0):
        return "UTF-16"
    if min(nulls) == 0 and len(head) // 4 in (nulls[0], nulls[3]) and len(head) > 4:
        return "UTF-32"
    return "UTF-8"


def open_file(path: Path | str) -> io.BufferedReader | gzip.GzipFile:
    return gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb")


def open_text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="")


def is_array(path: Path) -> bool:
    """Return True if a file of JSON is one array: it begins with [ after byte order mark and white
    space."""
    with open_file(path) as file:
        while line := file.readline(2**16):
            if text := line.removeprefix(b"\xef\xbb\xbf").lstrip():
                return text[:1] == b"[" and file_suffix(path) != ".txt"
    return False


def path_digest(path: Path) -> str:
    """Return the SHA-256 of a file's content, or of all files in a directory of save_to_disk()."""
    if path.is_file():
        return digest(path)
    files = (file for file in sorted(path.rglob("*")) if file.is_file())
    return json_digest([[str(file.relative_to(path)), digest(file)] for file in files])


def open_table(source: str, path: Path, options: dict[str, str], file_digest: str | None) -> Any:
    """Return the datasets.Dataset of a Parquet or CSV file, a directory of save_to_disk() or a Hub
    id. `file_digest`: the digest of a file or directory; None for a Hub id."""
    import datasets

    split = options.get("split", "train")
    is_from_hub = False
    try:
        if saved_kind(path):
            # a data set saved with_format("torch") would return tensors
            table = datasets.load_from_disk(str(path)).with_format(None)
            if isinstance(table, datasets.Dataset):
                return table
            if split not in table:
                raise ValueError(f"has no split {split}, only {', '.join(table)}. Choose with"
                                 " ,split=NAME")
            return table[split]
        if file_digest and path.is_file() and file_suffix(path) in TABLE_SUFFIXES:
            return load_table_file(path, file_digest)
        looks_like_file = source[0] in "./~" or file_suffix(path) in SUFFIXES
        if path.exists() or looks_like_file or str(path).count("/") != 1:
            raise ValueError("neither a Hub id (owner/name) nor a file, pattern or directory; files"
                             f" end in {', '.join(SUFFIXES)}, or that and .gz")
        is_from_hub = True
        return datasets.load_dataset(str(path), **{"split": "train", **options})
    except Exception as e:  # the Hub client has a dozen kinds of errors, all of them user errors
        error = e.__cause__ or e
        if isinstance(error, UnicodeDecodeError):
            error = NOT_UTF_8
        what = "no such file here, and the Hub says: " if is_from_hub else ""
        where = (f"; a table is copied to HF_DATASETS_CACHE, {datasets.config.HF_DATASETS_CACHE}"
                 if isinstance(error, OSError) and path.is_file() else "")
        raise ValueError(f"{path if path.is_file() else source}: {what}{error}{where}")


def load_table_file(path: Path, file_digest: str) -> Any:
    """Return the datasets.Dataset of a file whose digest is `file_digest`, under which `datasets`
    caches its copy. By itself it identifies files by name and time, which `cp -p` copies. All cells
    of a CSV are text: "12" and "null" stay unchanged, and the first column is not an index."""
    import datasets
    import pandas

    kind = TABLE_SUFFIXES[file_suffix(path)]
    options = csv_options(path) if kind == "csv" else {}
    cache = Path(datasets.config.HF_DATASETS_CACHE, "fsdp_qlora", file_digest)
    try:
        with warnings.catch_warnings(), only_errors_of_datasets():
            # for a line with more cells than the header has names
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            return datasets.load_dataset(kind, data_files=str(path), split="train", **options,
                                         cache_dir=cache)
    except Exception as e:
        error = e.__cause__ or e
        if isinstance(error, (pandas.errors.ParserError, pandas.errors.ParserWarning)):
            raise ValueError(f"{str(error).strip().rstrip('.')}: put quotes around each cell that"
                             f" has {SEPARATORS[options['sep']]} in it")
        raise


@contextlib.contextmanager
def only_errors_of_datasets() -> Iterator[None]:
    """Let `datasets` raise errors in the `with` body without logging them or drawing a bar before.
    """
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from datasets.utils.logging import CRITICAL, get_verbosity, set_verbosity

    level = get_verbosity()
    had_bars = not are_progress_bars_disabled()
    set_verbosity(CRITICAL)
    disable_progress_bars()
    try:
        yield
    finally:
        set_verbosity(level)
        if had_bars:
            enable_progress_bars()


def csv_options(path: Path) -> dict[str, Any]:
    """Return the options of pandas.read_csv() for a file, all cells of which are text."""
    import datasets
    import pandas

    separator = "\t" if file_suffix(path) == ".tsv" else ","
    with open_text(path) as file:
        header = next((line for line in file if line.strip()), "")
    used = max(SEPARATORS, key=header.count)
    if separator not in header and used in header:
        way_out = {",": "name it .csv", "\t": "name it .tsv"}.get(
            used, f"save it with {SEPARATORS[separator]}")
        raise ValueError(f"its cells are separated by {SEPARATORS[used]}: {way_out}")
    options: dict[str, Any] = {"sep": separator}
    if not uses_quotes(path, separator):
        options["quoting"] = csv.QUOTE_NONE
    names = pandas.read_csv(path, nrows=0, index_col=False, **options).columns
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {**options, "features": features, "keep_default_na": False, "index_col": False}


def uses_quotes(path: Path, separator: str) -> bool:
    """Return True if quotation marks around a cell of a CSV or TSV file are not part of the cell.
    They are part of it if each line has a cell for each column, but lines go wrong with quotes:
    a mark that only begins a cell would swallow everything up to the next mark."""
    limit = csv.field_size_limit(2**31 - 1)
    try:
        with open_text(path) as file:
            counts = [line.count(separator) for line in file if line.strip()]
        if len(set(counts)) > 1:
            return True
        with open_text(path) as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            sizes = [len(cells) - 1 for cells in reader if cells]
    except csv.Error:
        return False
    except (OSError, EOFError, zlib.error):
        return True  # the error is reported when the table is read
    finally:
        csv.field_size_limit(limit)
    # in a CSV, quoted text may span lines that have a comma each
    return set(sizes) == set(counts) and (separator == "," or len(sizes) == len(counts))


def without_none(value: Any) -> Any:
    """Return the value without keys that are null: Arrow adds to each object all keys that any
    object in its column has."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value
