"""Exit codes of train_fsdp_qlora.py, and the signals that end a run."""

from __future__ import annotations

import signal

# 75 and 70 are EX_TEMPFAIL and EX_SOFTWARE of sysexits.h
EXIT_RESUMABLE, EXIT_STEP_TIMEOUT, EXIT_BUG = 75, 9, 70
EXIT_DISK, EXIT_DIVERGED, EXIT_OUT_OF_MEMORY = 5, 6, 8
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1  # end a run, see watch.py
EXITS = {"flags": 2, "model": 3, "data": 4, "training": EXIT_DISK,
         "saving": EXIT_DISK, "checkpoint": 7}  # {phase of the run: exit code of an error in it}
