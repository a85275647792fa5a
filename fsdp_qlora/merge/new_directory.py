"""A new directory for a merge, atomic: hidden and locked until everything in it is written."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.files import remove, sync_file
from fsdp_qlora.run.lock import DirectoryLock


def open_partial(output: Path) -> tuple[Path, DirectoryLock]:
    """Return an empty hidden directory that becomes `output` once everything is written, and its
    lock, which this process has. Raises ValueError if `output` is a mount point, or if another
    merge is writing there."""
    target = output.resolve()
    if target.is_mount():
        raise ValueError(f"--output_dir {output}: is a mount point. Use a new directory inside it")
    partial, lock = target.with_name(f".{target.name}.partial"), DirectoryLock()
    while lock.fd is None:
        if partial.is_symlink():  # see open_no_follow()
            partial.unlink()
        with contextlib.suppress(FileExistsError):
            partial.mkdir(parents=True)
        with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
            lock.take(partial, output)
        if lock.is_lost():  # renamed just before it was locked
            lock.close()
    for old in {*partial.iterdir()} - {lock.path}:  # of a merge that died, or whose check failed
        remove(old)
    return partial, lock


@dataclasses.dataclass
class NewDirectory:
    """A directory made by new_directory()."""

    path: Path
    is_whole: bool = False  # True: keep it even if a later step fails


@contextlib.contextmanager
def new_directory(output: Path) -> Iterator[NewDirectory]:
    """Yield a hidden, locked NewDirectory, which becomes `output` when the `with` body ends. If the
    body raises, the directory is removed; but if is_whole was set, it is left, and the error names
    it."""
    partial, lock = open_partial(output)
    new = NewDirectory(partial)
    with contextlib.closing(lock):
        try:
            if output.exists() and any(output.iterdir()):
                raise ValueError(f"--output_dir {output}: already exists and is not empty. Use a"
                                 " new directory")
            yield new
            new.path = partial.replace(output.resolve())
        except BaseException as e:
            if not new.is_whole:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            why = "stopped" if isinstance(e, KeyboardInterrupt) else str(e) or type(e).__name__
            is_bug = not isinstance(e, (ValueError, OSError, MemoryError, KeyboardInterrupt))
            kind = RuntimeError if is_bug else ValueError  # a bug ends with a traceback
            raise kind(f"{why}; the merged model is left in {new.path}: rename it before the"
                       " next merge, which would delete it") from e
        finally:  # not before: another merge would think that this one has died
            (new.path / ".lock").unlink(missing_ok=True)
    sync_file(new.path.parent)
