"""DirectoryLock: the .lock of an output directory, so that two processes never write there at once.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path

from fsdp_qlora.files import open_no_follow
from fsdp_qlora.log import log
from fsdp_qlora.ranks import rank_name


class DirectoryLock:
    """A lock that one process takes, of a run its rank 0. The other ranks know the file."""

    def __init__(self) -> None:
        self.fd: int | None = None  # descriptor of .lock; None: this process has not locked it
        self.path = Path(".lock")
        self.stat: os.stat_result | None = None  # of .lock when it was locked; None: not yet

    def take(self, directory: Path, output_dir: Path) -> str:
        """Lock the directory until close(), and write into .lock which process has locked it.
        Returns that text. Raises ValueError if another process uses the directory. `output_dir`:
        what the user calls it. flock works between nodes on NFS 4 and on Lustre with -o flock."""
        path = directory / ".lock"
        fd = open_no_follow(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.1)  # the other process may have just begun, and is still writing the text
            holder = os.pread(fd, 200, 0).decode(errors="replace")
            os.close(fd)
            raise ValueError(f"--output_dir {output_dir}: in use by"
                             f" {holder or 'a process that is starting'}. Wait for it, or use"
                             " another directory")
        except OSError as e:
            log(f"warning: --output_dir {output_dir}: its file system has no locks ({e.strerror}),"
                " so two runs in it at once will not be noticed")
        holder = (f"process {os.getpid()} on {socket.gethostname()} since"
                  f" {time.strftime('%Y-%m-%d %H:%M:%S')}")
        os.ftruncate(fd, 0)
        os.pwrite(fd, holder.encode(), 0)
        os.fsync(fd)  # other nodes read it
        self.fd, self.path, self.stat = fd, path, os.fstat(fd)
        return holder

    def check_visible(self, directory: Path, holder: str) -> None:
        """Raise ValueError unless this rank sees the file in which rank 0's take() wrote `holder`;
        record which file it is."""
        path = directory / ".lock"
        if not path.is_file() or path.read_text() != holder:
            raise ValueError(f"--output_dir {directory}: {rank_name()} does not see the {path} that"
                             " rank 0 wrote. Use a directory that all nodes share")
        self.path, self.stat = path, os.lstat(path)

    def is_lost(self) -> bool:
        """Return True if .lock is no longer the file that was locked: the directory or .lock was
        moved or removed, and another process may be there."""
        try:
            return self.stat is not None and not os.path.samestat(os.lstat(self.path), self.stat)
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the disk does not respond
            return False

    def close(self) -> None:
        """Close this process's descriptor, the last of which unlocks the directory."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
