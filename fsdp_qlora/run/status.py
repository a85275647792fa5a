"""Status: what this process is doing, status.json, and how a run ends: exit code and last line.

    phase: flags -> model -> data -> model -> checkpoint -> model -> (resumed: checkpoint ->)
           saving -> training -> saving -> exit 0

What all ranks know of is a RunEnd, with which main() ends them together. What happens to one rank
alone goes to Status.end_alone(), and torchrun ends the others. The watching thread, see watch.py,
cannot wait for the main thread: it calls Status.exit_now(). Whichever thread takes end_lock first
reports the reason.

    main thread        a RunEnd, on all ranks          end_together()     its code, or the phase's
                       any other error, of this rank   end_alone()        8, 70, or 75: LOST_PROCESS
    watching thread    a signal, another process ends  exit_now()         75
                       the deadline is over            exit_on_timeout()  9
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import socket
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from fsdp_qlora.config import Config
from fsdp_qlora.exit_codes import (
    EXITS, EXIT_BUG, EXIT_OUT_OF_MEMORY, EXIT_RESUMABLE, EXIT_STEP_TIMEOUT)
from fsdp_qlora.files import open_no_follow, read_json
from fsdp_qlora.log import print_error, tell_torchrun
from fsdp_qlora.memory import memory_gib
from fsdp_qlora.plan import Plan
from fsdp_qlora.ranks import RunEnd, is_rank_0, rank_name
from fsdp_qlora.run.lock import DirectoryLock


ACTIONS = (None, "save", "stop")  # that a rank can request of all; the last has precedence
LOST_PROCESS = "another process of this run has ended"
LOST_LOCK = (".lock is not this run's any more: the directory was moved, removed or taken by"
             " another run, and this one writes nothing more there")
FIRST_STEP_SECONDS = 180  # upper bound; the first step also compiles


class Status:
    """The state of this process: what it is doing, for status.json, and what its main thread and
    its watching thread tell each other. watch_process() makes one per call of main()."""

    def __init__(self) -> None:
        self.phase = "flags"  # a key of EXITS
        self.directory: Path | None = None  # the run's directory; None: not known yet
        self.may_write = False  # True: status.json belongs to a run with these flags
        self.lock = DirectoryLock()  # of that directory
        self.step = 0
        self.max_steps: int | None = None
        self.longest_step = 0.0  # seconds, since this start
        self.max_minutes: float | None = None  # --max_minutes and --step_timeout_minutes
        self.step_timeout_minutes: float | None = None
        self.checkpoint: str | None = None  # name of the latest checkpoint
        self.plan: Plan | None = None  # None: not known yet
        self.where = "outside of the steps (loading or saving)"
        self.how_to_resume = "the same command resumes it"
        self.started, self.parent, self.pid = time.monotonic(), os.getppid(), os.getpid()
        self.deadline = math.inf  # time.monotonic() after which the process counts as timed out
        self.stop_reason: str | None = None
        self.signal_time = -math.inf  # time.monotonic() of the last signal
        self.is_ending = False  # True: the watching thread ignores signals and lost processes
        self.end_lock = threading.Lock()
        self.has_logged_end = False  # guarded by end_lock

    def start_writing(self, config: Config, start_step: int) -> None:
        """Let write() write from now on: the run in the directory has these flags. Records where it
        starts."""
        self.may_write, self.max_steps, self.step = True, config.max_steps, start_step
        self.max_minutes, self.step_timeout_minutes = (
            config.max_minutes, config.step_timeout_minutes)

    def enter(self, phase: str) -> None:
        """Begin a phase of the run, which decides the exit code of an error and what a signal does.
        """
        self.phase = phase
        self.write(phase)

    def write(self, state: str, code: int | None = None, message: str = "") -> None:
        """Replace status.json. Only rank 0 does this, or a rank with an exit code.

        `state`: the phase of a run that continues (a key of EXITS), else stopped, failed or
        complete. Until the run in the directory is known to have these flags, only a stop is
        written.
        """
        may_write = self.may_write or code == EXIT_RESUMABLE
        if self.directory is None or not may_write or not (is_rank_0() or code):
            return
        if self.lock.is_lost():
            return
        path = self.directory / "status.json"
        content = {
            "state": state, "code": code, "message": message, "step": self.step,
            "max_steps": self.max_steps, "last_checkpoint": self.checkpoint,
            "process": f"{os.getpid()} on {socket.gethostname()}",
            "time": time.strftime("%Y-%m-%d %H:%M:%S")}
        with contextlib.suppress(OSError, ValueError):
            before = read_json(path, {}).get("state") if self.may_write else None
            if may_replace(before, state, code, message):
                replace_text(path, json.dumps(content, indent=2) + "\n")

    def check_lock(self) -> None:
        """Raise OSError if this run has lost its directory. The run then writes nothing more there
        and ends after this step."""
        if self.lock.is_lost():
            self.stop_reason = LOST_LOCK
            raise OSError(LOST_LOCK)

    def end_together(self, end: RunEnd) -> int:
        """Print and record why all ranks end. Returns the exit code."""
        self.is_ending = True
        code = EXITS[self.phase] if end.code is None else end.code
        if is_rank_0():
            self.log_end(code, str(end))
        else:
            tell_torchrun(end_line(code, str(end)))
        return code

    def end_alone(self, error: Exception, device: torch.device) -> int:
        """Print and record what happened to this rank alone. Returns the exit code."""
        self.is_ending = True
        is_lack = isinstance(error, RuntimeError) and "out of memory" in str(error)  # CUDA, NCCL
        if is_lack or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            code = EXIT_OUT_OF_MEMORY
            text = out_of_memory_text(error, self.plan, device, self.where)
        elif isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and re.search(
            "connection |broken pipe|timed? ?out|unreachable|no route", str(error), re.I  # gloo's
        ):
            code, text = EXIT_RESUMABLE, f"{LOST_PROCESS}; {self.how_to_resume}"
        else:
            traceback.print_exception(error)
            code = EXIT_BUG
            text = (f"hit an unexpected error, a bug in this script: {type(error).__name__}:"
                    f" {error}. Please report it with the traceback above")
        self.log_end(code, text if code == EXIT_RESUMABLE else f"{rank_name()} {text}")
        return code

    def log_end(self, code: int, message: str) -> None:
        """Record and print why the run ends. If all ranks know the reason, only rank 0 does this.
        """
        line = end_line(code, message)
        with self.end_lock:  # both threads may get here at once
            # a rank prints LOST_PROCESS itself, because rank 0 may be the process that is lost; but
            # if torchrun is lost, all ranks know
            is_alone = code != EXIT_RESUMABLE or (
                message.startswith(LOST_PROCESS) and os.getppid() == self.parent)
            if not self.has_logged_end:
                tell_torchrun(line)
            if (is_rank_0() or is_alone) and not self.has_logged_end:
                if code:  # 0: a dry run, which writes nothing
                    self.write("stopped" if code == EXIT_RESUMABLE else "failed", code, message)
                print_error(line)
            self.has_logged_end = True

    def exit_now(self, code: int, message: str) -> NoReturn:
        """End this process now, whatever its main thread is doing."""
        self.is_ending = True
        end_soon(code)
        self.log_end(code, message)
        os._exit(code)

    def exit_on_timeout(self) -> NoReturn:
        """Write the stacks of all threads to a file and end, because some rank has stopped making
        progress."""
        end_soon(EXIT_STEP_TIMEOUT)
        path = self.directory / f"stacks-{os.environ.get('RANK', 0)}.txt"
        with contextlib.suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        time.sleep(2)  # let all ranks write their stacks before torchrun ends them
        self.exit_now(EXIT_STEP_TIMEOUT,
                      f"{rank_name()} has waited too long {self.where}: is another process"
                      f" frozen, or its node? See {self.directory}/stacks-*.txt, and"
                      " --step_timeout_minutes")

    def on_signal(self, name: str) -> None:
        """Let the run save after this step and end. Before training begins, or at a second signal,
        end it at once."""
        if time.monotonic() < self.signal_time + 3:
            return  # the same signal: torchrun passes on what a terminal has sent to all
        if self.signal_time > 0 or self.phase not in ("training", "saving"):
            when = "again" if self.signal_time > 0 else "before training began"
            self.exit_now(EXIT_RESUMABLE, f"{name} {when}; {self.how_to_resume}")
        self.stop_reason, self.signal_time = self.stop_reason or name, time.monotonic()
        if is_rank_0():
            print_error(f"{name}: finishing this step and saving;"
                        f" {'press Ctrl-C' if name == 'SIGINT' else 'send it'} again to exit at"
                        " once")

    def extend_deadline(self) -> None:
        """Set the deadline of the step (or other work) that begins now: --step_timeout_minutes; by
        default an hour until the first step has ended, then 20 times the longest step so far, at
        least 10 minutes."""
        seconds = max(600, 20 * (self.longest_step or FIRST_STEP_SECONDS))
        if self.step_timeout_minutes:
            seconds = 60 * self.step_timeout_minutes
        self.deadline = time.monotonic() + seconds

    def check_time(self) -> None:
        """Request a stop if --max_minutes are over, or would be after another step, or if the
        directory is lost."""
        with contextlib.suppress(OSError):
            self.check_lock()
        minutes = self.max_minutes
        if minutes and time.monotonic() + self.longest_step > self.started + 60 * minutes:
            self.stop_reason = self.stop_reason or f"--max_minutes {minutes:g} are over"


def end_line(code: int, message: str) -> str:
    """Return the last line that a process prints."""
    return f"{ {0: 'done', EXIT_RESUMABLE: 'stopped'}.get(code, 'error')}: {message}"


def may_replace(before: str | None, state: str, code: int | None, message: str) -> bool:
    """Return True if a state may replace the state `before` in status.json, which another rank may
    have written. A failure may be the cause of this rank's stop, so it must stay."""
    if before == "failed":
        return code != EXIT_RESUMABLE and state != "training"
    if before in ("stopped", "complete"):
        return not message.startswith(LOST_PROCESS)
    return True


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text. If the disk is full, overwrite the old file, which has a block
    already."""
    part = path.with_name(f".status.{os.environ.get('RANK', 0)}.{threading.get_ident()}")
    try:
        part.write_text(text)
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        with open(open_no_follow(path, os.O_WRONLY), "w") as file:
            file.write(text)
            file.flush()
            file.truncate()


def end_soon(code: int) -> None:
    """End this process in 15 s at the latest, even if the disk or the terminal hangs."""
    timer = threading.Timer(15, os._exit, [code])
    timer.daemon = True
    timer.start()


def out_of_memory_text(error: Exception, plan: Plan | None, device: torch.device,
                       where: str) -> str:
    """Return what ran out of memory, on the GPU or on the host, and what would help that the plan
    does not do already."""
    if isinstance(error, MemoryError):
        return f"ran out of host memory: {error}; offload less"
    helps = ["a smaller --micro_batch_tokens", "a shorter --max_seq_len"]
    if plan:
        is_done = {
            "--recompute all": plan.n_recomputed == plan.n_layers,
            "--offload_activations": plan.offload_activations,
            "--offload_params": plan.offload_params}
        helps = [*(flag for flag in is_done if not is_done[flag]), *helps]
    text = f"ran out of memory {where}; peak {memory_gib(device)[1]:.2f} GiB allocated"
    if asked := re.search(r"Tried to allocate ([\d.]+ \w+)", str(error)):
        text += f", {asked[1]} more asked for"
    if gaps := re.search(r"([\d.]+ \w+) is reserved by PyTorch but unallocated", str(error)):
        text += f", {gaps[1]} in gaps between tensors"
    return f"{text}. Try, in this order: {', '.join(helps)}"
