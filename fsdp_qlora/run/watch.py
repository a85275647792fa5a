"""The watching thread: what ends a run from outside, whatever the main thread waits for.

    a signal, or torchrun ends: Status.on_signal()
        before training, or a second one    Status.exit_now(), exit code 75
        the first one in training           Status.stop_reason, a RunEnd after the step
    another process of the run ends         Status.exit_now(), exit code 75
    the deadline of a step is over          Status.exit_on_timeout(), exit code 9

Signal handlers do nothing; the signal's number comes to the thread through a socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from fsdp_qlora.exit_codes import EXIT_RESUMABLE, SIGNALS
from fsdp_qlora.run.status import LOST_PROCESS, Status

LIBC, SET_PDEATHSIG = ctypes.CDLL(None), 1  # for prctl(2)


@contextlib.contextmanager
def watch_process() -> Iterator[Status]:
    """Yield a Status. While the `with` body runs, a thread watches for signals, for the end of
    torchrun and for a step that never ends, whatever the main thread waits for."""
    status = Status()
    receive, send = socket.socketpair()
    send.setblocking(False)
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS
                if not (under_nohup and number == signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: reset_after_fork(status))
    thread = threading.Thread(target=watch, args=(receive, status), daemon=True)
    thread.start()
    try:
        yield status
    finally:
        signal.set_wakeup_fd(wakeup)
        send.close()
        thread.join()
        receive.close()
        status.lock.close()
        # last: torchrun sends SIGTERM to this rank as soon as another has stopped
        for number, handler in handlers.items():
            signal.signal(number, handler)


def watch(receive: socket.socket, status: Status) -> None:
    """Watch this process until `receive` is closed."""
    torchrun = parent = os.getppid()
    n_processes, n_missing, last_look = 0, 0, time.monotonic()
    receive.settimeout(0.2)
    while True:
        reasons = []
        with contextlib.suppress(TimeoutError):
            if not (numbers := receive.recv(64)):
                return
            reasons = [signal.Signals(n).name for n in numbers if n in SIGNALS]
        if (gap := time.monotonic() - last_look) > 5:  # the process (or the whole job) was stopped
            status.deadline += gap
        last_look = time.monotonic()
        if os.getppid() != parent and "RANK" in os.environ:  # plain Python may outlive its shell
            reasons, parent = ["torchrun has ended"], os.getppid()
        if reasons and not status.is_ending:
            status.on_signal(reasons[0])
        if status.phase == "training" and not status.is_ending:
            n_now = count_siblings()
            n_processes = max(n_processes, n_now)
            n_expected = min(n_processes, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
            # a new parent (torchrun has ended) has no siblings to count
            is_lost = n_now < n_expected and os.getppid() == torchrun
            n_missing = n_missing + 1 if is_lost else 0
            if n_missing > 1:  # seen twice, because torchrun may just be ending
                # NCCL would wait for the missing process
                status.exit_now(EXIT_RESUMABLE, f"{LOST_PROCESS}; {status.how_to_resume}")
        if time.monotonic() > status.deadline:
            status.exit_on_timeout()


def count_siblings() -> int:
    """Return the number of processes that torchrun has on this node; 0 if it cannot be read."""
    path = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    with contextlib.suppress(OSError):
        return len(path.read_text().split())
    return 0


def reset_after_fork(status: Status) -> None:
    """Prepare a forked process, which encodes data: end with the parent, close the parent's lock,
    and handle signals by default."""
    with contextlib.suppress(AttributeError, OSError):  # Linux only
        LIBC.prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != status.pid:  # the parent ended before prctl() took effect
        os._exit(1)
    status.pid = os.getpid()
    status.lock.close()
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.SIG_DFL)
