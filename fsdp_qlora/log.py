"""Lines of the log, by rank 0, and the line with which a process ends."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

from fsdp_qlora.exit_codes import EXITS
from fsdp_qlora.ranks import all_gather_objects, is_rank_0


def log(message: str) -> None:
    """Print a message. Rank 0 only; other ranks do nothing."""
    with contextlib.suppress(OSError):  # the terminal may be gone; the run continues
        if is_rank_0():
            tqdm.write(message)
            sys.stdout.flush()


def log_debug(message: str) -> None:
    """Print what is only for a bug report or a benchmark, if FSDP_QLORA_DEBUG=1. Rank 0 only."""
    if os.environ.get("FSDP_QLORA_DEBUG", "0") != "0":
        log(message)


def log_debug_each_rank(what: str, text: str) -> None:
    """Print each rank's text, once if all are the same, with FSDP_QLORA_DEBUG=1. All ranks must
    call this."""
    texts = all_gather_objects(text)
    log_debug(f"{what}, each rank: {texts[0] if len(set(texts)) == 1 else '; '.join(texts)}")


def print_error(message: str) -> None:
    """Print one line to stderr; on a terminal, where there may be a progress bar, on a new line."""
    with contextlib.suppress(OSError):
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}{' '.join(message.split())}", file=sys.stderr, flush=True)


def tell_torchrun(line: str) -> None:
    """Write the line with which this process ends to the file that torchrun reads, so that this
    line is the last in torchrun's report about failed processes."""
    if not (path := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    # if two end in the same second, torchrun picks either; let errors be earlier than stops
    seconds = int(time.time()) - line.startswith("error")
    content = {"message": {"message": line, "extraInfo": {"timestamp": seconds}}}
    with contextlib.suppress(OSError):
        part = Path(f"{path}.part")  # an incomplete file would crash torchrun
        part.write_text(json.dumps(content))
        os.replace(part, path)


def fail_before_init(message: str) -> NoReturn:
    """Print one line and end this process, which has not joined the others."""
    line = f"error: {message}"
    tell_torchrun(line)
    print_error(line)
    sys.exit(EXITS["flags"])
