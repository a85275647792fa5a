"""Before torch is imported: --help, wrong flags, the allocator; and how a process ends."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from typing import NoReturn

from fsdp_qlora.run.flags import parse_flags


def before_imports() -> None:
    """Answer --help, --version and a wrong flag; set what torch reads when it is imported; print
    that libraries are being imported."""
    # tensors of all sizes are allocated and freed; gaps between fixed segments cannot be merged. A
    # user's PYTORCH_CUDA_ALLOC_CONF, the older name, wins
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    gc.disable()  # until main(): collections would take a fifth of the time of all imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until watch_process(): no traceback of an import
    for name in "stdout", "stderr":  # may be closed, or unable to encode the text of a row
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    if "RANK" not in os.environ:  # under torchrun all ranks end together, in main()
        try:
            parse_flags(sys.argv[1:])
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            sys.exit(2)
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # stderr may be closed
            print("loading libraries ...", file=sys.stderr, flush=True)


def end_process(code: int) -> NoReturn:
    """Exit at once, when everything is written. sys.exit() is not used because with torch 2.13 and
    gloo one exit in ten aborts in a C++ thread's destructor ("terminate called without an active
    exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
