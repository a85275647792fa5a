"""torchrun, without its report of thirty lines after a run that has said why it ends.

    python -m fsdp_qlora.run.launch --standalone --nproc_per_node=2 train_fsdp_qlora.py ...

`make train` calls it with torchrun's arguments, of one node. It ends with the ranks' own exit code,
where torchrun answers 1, and prints a line only for a rank that could not: one that was killed, or
whose Python ended. A signal is passed on to the ranks, which finish their step, save and end in
their own time; torchrun would kill them after 30 seconds.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main(): no traceback of an import

import contextlib
import logging
import os
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

from fsdp_qlora.exit_codes import EXIT_RESUMABLE, SIGNALS
from fsdp_qlora.log import print_error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def main() -> int:
    """Run torchrun. Returns the exit code of the rank that ended first for a reason of its own; 0
    if all succeeded."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, forward_signal)
    logging.disable(logging.ERROR)  # hides torchrun's messages about ranks that end
    try:
        run(parse_args(["--signals_to_handle=SIGQUIT", *sys.argv[1:]]))
    except ChildFailedError as e:
        return report_failure(e.failures)
    return 0


def forward_signal(number: int, _: FrameType | None) -> None:
    """Send a signal to all ranks; if there are no ranks, end."""
    me = os.getpid()
    ranks = Path(f"/proc/{me}/task/{me}/children").read_text().split()
    for rank in map(int, ranks):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, number)  # torchrun gives each rank a session of its own
    if not ranks:
        os._exit(128 + number)


def report_failure(failures: dict[int, ProcessFailure]) -> int:
    """Print why a run has ended, if no rank has. `failures`: {rank: how it failed}. Returns the
    exit code."""
    def order(rank: int) -> tuple[bool, int]:
        # failures before ranks that stopped, or that torchrun ended because another rank had
        code = failures[rank].exitcode
        return code == EXIT_RESUMABLE or -code in SIGNALS, failures[rank].timestamp

    rank = min(failures, key=order)
    failure = failures[rank]
    code, name = failure.exitcode, failure.signal_name()
    if os.path.isfile(failure.error_file):  # written by tell_torchrun(): the rank has printed why
        return EXIT_RESUMABLE if -code in SIGNALS else code
    if -code in SIGNALS:
        print_error(f"stopped: {name} before training began; the same command resumes it")
        return EXIT_RESUMABLE
    if code < 0:
        why = ", as by the kernel if host memory runs out (see dmesg)" * (name == "SIGKILL")
        print_error(f"error: rank {rank} was killed by {name}{why}; the same command resumes it")
        return 128 - code
    print_error(f"error: rank {rank} ended with exit code {code}; what it printed is above")
    return code


if __name__ == "__main__":
    sys.exit(main())
