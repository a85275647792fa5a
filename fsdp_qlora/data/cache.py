"""A table that all cores compute once, cached as Arrow files with digests.

Only what was written whole is found again, and its digests are checked before use.
encode_examples.py says what the table has, an entry for each document; prepare_data.py what becomes
of it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import multiprocessing.connection
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow

from fsdp_qlora.data.sources import Fragment
from fsdp_qlora.files import digest, read_json
from fsdp_qlora.log import log
from fsdp_qlora.ranks import n_cores


# errors that a child process passes on to its parent
CHILD_ERRORS = ValueError, OSError, MemoryError
MANIFEST = "parts.json"  # the SHA-256 of each file of a table in order; written last
PROGRESS_SECONDS = 5  # between two log lines about how many documents are encoded
MakeBatches = Callable[..., Iterator[pyarrow.RecordBatch]]  # see write_table()


@contextlib.contextmanager
def open_cache(key: str) -> Iterator[Path]:
    """Yield the directory of this key, locked so that no other process fills it meanwhile. It may
    be read-only."""
    home = Path(huggingface_hub.constants.HF_HOME, "datasets")
    directory = Path(os.environ.get("HF_DATASETS_CACHE", home), "fsdp_qlora", key)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the file system is read-only or has no locks
            directory.parent.mkdir(parents=True, exist_ok=True)
            lock_file = stack.enter_context(directory.with_suffix(".lock").open("w"))
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield directory


def has_table(directory: Path) -> bool:
    """Return True if the directory contains a complete, undamaged table. Logs a line if it contains
    only a part of one."""
    digests = read_json(directory / MANIFEST, {})
    with contextlib.suppress(OSError):
        if digests and all(digest(directory / name) == sha for name, sha in digests.items()):
            return True
    if directory.exists():
        log(f"note: the data cache {directory} is incomplete (interrupted run, or disk error);"
            " tokenizing again")
    return False


def read_table(directory: Path) -> pyarrow.Table:
    """Return the pyarrow Table in a directory, mapped into memory."""
    files = [pyarrow.memory_map(str(directory / name)) for name in read_json(directory / MANIFEST)]
    return pyarrow.concat_tables([pyarrow.ipc.open_file(file).read_all() for file in files])


def write_table(directory: Path, fragments: list[Fragment], make_batches: MakeBatches,
                **settings: Any) -> dict[str, str]:
    """Write the pyarrow RecordBatches of make_batches(fragments, **settings), at least one. The
    fragments are divided among all cores, each of which writes a file. Returns {file: SHA-256}, for
    MANIFEST."""
    shutil.rmtree(directory, ignore_errors=True)  # not overwritten: a run may have mapped it
    try:
        directory.mkdir(parents=True)
        return write_files(directory, fragments, make_batches, settings)
    except OSError as e:
        shutil.rmtree(directory, ignore_errors=True)  # to free the space, which may be missing
        raise OSError(f"{directory}: cannot write the data cache: {e}. Free disk space, or set"
                      " HF_DATASETS_CACHE to another place")


def write_files(directory: Path, fragments: list[Fragment], make_batches: MakeBatches,
                settings: dict[str, Any]) -> dict[str, str]:
    """Write the files of a table. Returns {file: SHA-256}."""
    n = min(n_cores(), len(fragments))
    works = {}
    for i in range(n):
        share = fragments[i * len(fragments) // n : (i + 1) * len(fragments) // n]
        works[directory / f"{i:04}.arrow"] = make_batches, share, settings
    count = log_progress()
    if n == 1:
        return {path.name: write_part(path, *work, count) for path, work in works.items()}
    return write_parts(works, count)


def log_progress() -> Callable[[int], None]:
    """Return a function count(n), to be called after n more documents are encoded; it logs their
    number every few seconds. There is no bar, because tqdm shows none in a log or on a terminal of
    unknown size."""
    n_documents = 0
    started = time.monotonic()
    logged = started

    def count(more: int) -> None:
        nonlocal n_documents, logged
        n_documents += more
        now = time.monotonic()
        if now - logged >= PROGRESS_SECONDS:
            logged = now
            log(f"tokenizing: {n_documents:,} documents, {now - started:.0f} s")

    return count


def write_part(path: Path, make_batches: MakeBatches, fragments: list[Fragment],
               settings: dict[str, Any], count: Callable[[int], object]) -> str:
    """Write one file; calls count(n) after n more documents. Returns its SHA-256."""
    batches = make_batches(fragments, **settings)
    batch = next(batches)
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_file(file, batch.schema) as out:
        while batch is not None:
            out.write_batch(batch)
            count(batch.num_rows)
            batch = next(batches, None)
    return digest(path)


def write_parts(works: dict[Path, tuple], count: Callable[[int], object]) -> dict[str, str]:
    """Write all files, each in a process of its own. Returns {file: SHA-256}. Raises the error of a
    process, or ValueError if a process is killed."""
    context = multiprocessing.get_context("fork")  # children inherit `works`, without pickling
    digests: dict[str, Any] = dict.fromkeys(path.name for path in works)  # in order
    running: dict[Any, tuple[str, multiprocessing.process.BaseProcess]] = {}
    try:
        for path, work in works.items():
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=write_part_in_child, args=(send, path, *work))
            process.start()
            running[receive] = path.name, process
            send.close()  # so that the pipe ends when the process does
        while running:
            for pipe in multiprocessing.connection.wait(running):
                assert isinstance(pipe, multiprocessing.connection.Connection)
                name, process = running[pipe]
                try:
                    kind, value = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    process.join()
                    number = signal.Signals(abs(process.exitcode or 0))
                    raise ValueError("a process that tokenizes examples was killed by"
                                     f" {number.name}: the kernel does that where host memory runs"
                                     " out")
                if kind == "written":
                    count(value)
                elif kind == "done":
                    digests[name] = value
                    running.pop(pipe)
                    process.join()
                else:
                    raise next((k for k in CHILD_ERRORS if k.__name__ == kind), ValueError)(value)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return digests


def write_part_in_child(
    pipe: Connection, path: Path, make_batches: MakeBatches, fragments: list[Fragment],
    settings: dict[str, Any]
) -> None:
    """Run write_part() in a process of its own. Sends its parent ("written", n more documents) and
    at the end ("done", SHA-256), or (kind, text) of an error."""
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1:
        signal.signal(number, signal.SIG_IGN)  # the parent handles a job's signals and ends this

    def tell(*message: Any) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    try:
        sha = write_part(path, make_batches, fragments, settings, lambda n: tell("written", n))
        message = "done", sha
    except Exception as e:
        kind = next((k for k in CHILD_ERRORS if isinstance(e, k)), None)
        message = (kind.__name__, str(e)) if kind else ("", f"{type(e).__name__}: {e}")
    tell(*message)
