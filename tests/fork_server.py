"""Runs of the script that start within a moment: a server that has imported it, and forks.

`python fork_server.py` reads a command a line from standard input, a JSON object, and forks for
each a launcher that stands in for torchrun: it forks the ranks, has their meeting point, passes
signals on, and when a rank fails it ends the others. Each rank calls the script's main() with the
"argv", in "cwd"; both ranks' output goes to the files `out` and `err` of the directory "log". What
is answered, a line each: {"id", "launcher", "ranks"}, their process ids, and of each of these later
{"pid", "code"}. Forks is the test's side of all this, Run one start.

A command may name faults, which end with their process. They are put into every module of the
package that has the name, see patching.py:

    "slow"   [[function, call, seconds], ..]: this function, when it is called for the
             `call`th time, writes the file slow.FUNCTION.CALL.RANK and sleeps before it works
    "fault"  {"rank", "operation", "how"}: the file operation of this number, of those that the rank
             does within the functions SAVES, see OPERATIONS, or the first [name, function] of
             them: "kill" kills the process before it, "torn" after half of it, "ENOSPC" and "EIO"
             are what it fails with. Each operation is listed in operations.RANK, also where
             "operation" is None
    "out_of_memory"  the step at which rank 1 runs out of memory
    "constants"  {name: value}: what a constant of the package is instead
    "plant"  a change of the package, see PLANTS: mostly a mistake that the tests must find
"""

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import gc
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import patching

SCRIPT = Path(__file__).resolve().parent.parent / "train_fsdp_qlora.py"
PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGHUP  # by torchrun; others end it
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)

# ------------------------------------------------------------------------------------------------
# The test's side
# ------------------------------------------------------------------------------------------------


class Forks:
    """The server: a new process, or with `ends`, of others' pipes, one that is forked from this."""

    def __init__(self, ends=None):
        self.runs, self.codes, self.unread = {}, {}, b""
        if ends is not None:
            (stdin, asks), (answers, stdout) = os.pipe(), os.pipe()
            self.pid = fork(be_server, stdin, stdout, [asks, answers, *ends])
            os.close(stdin), os.close(stdout)
            self.stdin, self.stdout = os.fdopen(asks, "wb"), os.fdopen(answers, "rb")
            return
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # a driver does not survive a fork
        )  # fmt: skip
        self.pid, self.stdin, self.stdout = (
            self.process.pid, self.process.stdin, self.process.stdout)

    def start(self, argv, cwd, nproc=2, **faults):
        """A Run, once its processes are there."""
        log = cwd / f"log-{len(self.runs)}"
        log.mkdir()
        run = Run(self, log)
        self.runs[len(self.runs)] = run
        command = {"id": len(self.runs) - 1, "argv": [str(arg) for arg in argv], "cwd": str(cwd),
                   "log": str(log), "nproc": nproc, **faults}  # fmt: skip
        self.stdin.write(json.dumps(command).encode() + b"\n")
        self.stdin.flush()
        assert self.wait_for(lambda: run.ranks, 120), "the server does not answer"
        return run

    def wait_for(self, what, seconds):
        """Until what() is true; whether it has become so in time."""
        until = time.monotonic() + seconds
        while not what():
            if time.monotonic() > until:
                return False
            self.read(0.01)
        return True

    def read(self, seconds):
        """What the server and launchers tell within so many seconds."""
        if not select.select([self.stdout], [], [], seconds)[0]:
            return
        data = os.read(self.stdout.fileno(), 2**16)
        assert data, "the server of runs has ended"
        *lines, self.unread = (self.unread + data).split(b"\n")
        for event in map(json.loads, lines):
            if "ranks" in event:
                run = self.runs[event["id"]]
                run.launcher, run.ranks = event["launcher"], event["ranks"]
                run.started = time.monotonic()
                for pid in (run.launcher, *run.ranks):  # of an earlier process
                    self.codes.pop(pid, None)
            else:
                self.codes[event["pid"]] = event["code"]

    def end(self):
        self.stdin.close()
        os.waitpid(self.pid, 0)


class Run:
    """One start of the script."""

    def __init__(self, server, log):
        self.server, self.log, self.launcher, self.ranks = server, log, None, []
        self.started = None

    def has_ended(self):
        return all(pid in self.server.codes for pid in (self.launcher, *self.ranks))

    def wait(self, seconds=60):
        """The ranks' exit codes; all of the run's processes are gone."""
        assert self.server.wait_for(self.has_ended, seconds), f"not ended: {self.left()} {self.err}"
        assert self.server.wait_for(lambda: not self.left(), 10), f"left: {self.left()}"
        return [self.server.codes[pid] for pid in self.ranks]

    def left(self):
        """What is left of its processes and those that they began: their first lines in /proc."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                text = path.read_text()
                if int(text.rpartition(")")[2].split()[3]) == self.launcher:  # its session
                    found.append(text[:60])
        return found

    def kill(self, number, *targets):
        """Send a signal to ranks by number, to the "launcher", or to "all"."""
        pids = {"launcher": [self.launcher], "all": [*self.ranks, self.launcher],
                **{rank: [pid] for rank, pid in enumerate(self.ranks)}}  # fmt: skip
        for target in targets:
            for pid in pids[target]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def wait_for_slow(self, function, call, ranks, seconds=60):
        marks = [self.log / f"slow.{function}.{call}.{rank}" for rank in ranks]
        done = lambda: all(mark.exists() for mark in marks) or self.has_ended()  # noqa: E731
        assert self.server.wait_for(done, seconds) and not self.has_ended(), self.err

    @property
    def out(self):
        return (self.log / "out").read_text()

    @property
    def err(self):
        return (self.log / "err").read_text()

    def operations(self, rank):
        """[name of the file operation, path, which of SAVES it is part of]."""
        path = self.log / f"operations.{rank}"  # there is none of a rank that writes nothing
        return [json.loads(line) for line in path.open()] if path.exists() else []


# ------------------------------------------------------------------------------------------------
# Server, launcher, ranks
# ------------------------------------------------------------------------------------------------


def prctl(option, value):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def serve():
    """Start what is read until standard input ends, then end what still runs."""
    tell, launchers, unread = os.dup(1), set(), b""
    os.dup2(2, 1)  # nobody else writes there
    prctl(SET_CHILD_SUBREAPER, 1)  # ranks whose launcher is gone become this process's
    while True:
        if select.select([0], [], [], 0.01)[0]:
            if not (data := os.read(0, 2**16)):
                break
            *lines, unread = (unread + data).split(b"\n")
            for line in lines:
                launchers.add(fork(launch, json.loads(line), tell))
        for pid, code in ended_children():
            launchers.discard(pid)
            report(tell, pid=pid, code=code)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, rest = path.parent.name, path.read_text().rpartition(")")[2].split()
            if int(rest[3]) in launchers:
                os.kill(int(pid), signal.SIGKILL)


def be_server(stdin, stdout, ends):
    """In a process that is forked; the others' ends of pipes are closed, which else do not end."""
    for end in ends:
        os.close(end)
    os.dup2(stdin, 0), os.dup2(stdout, 1)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", 1)  # noqa: SIM115
    main()


def fork(function, *args):
    """The id of a process that calls a function and ends with what it returns."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        code = function(*args)
    except SystemExit as e:  # of --help
        code = e.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code or 0)


def report(tell, **event):
    os.write(tell, json.dumps(event).encode() + b"\n")  # whole, as it is shorter than a pipe's page


def ended_children():
    with contextlib.suppress(ChildProcessError):
        while (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            yield pid_and_status[0], os.waitstatus_to_exitcode(pid_and_status[1])


def launch(command, tell):
    """What torchrun does, for one command."""
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    log, asked = Path(command["log"]), []
    for fd, name in (1, "out"), (2, "err"):
        os.dup2(os.open(log / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), fd)
    meeting = socket.create_server(("localhost", 0), backlog=64)
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(meeting.getsockname()[1])}
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until there are ranks to pass it on to
    ranks = [fork(be_rank, command, rank, address, meeting, tell)
             for rank in range(command["nproc"])]  # fmt: skip
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: asked.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    report(tell, id=command["id"], launcher=os.getpid(), ranks=ranks)
    store = dist.TCPStore(  # noqa: F841, the ranks are its clients
        "localhost", 0, is_master=True, wait_for_workers=False, master_listen_fd=meeting.detach()
    )
    worst, kill_at = 0, float("inf")
    while ranks:
        for pid, code in ended_children():
            if pid in ranks:
                ranks.remove(pid)
                report(tell, pid=pid, code=code)
                worst = worst or code
                if code and kill_at == float("inf"):
                    asked.append(signal.SIGTERM)
        while asked:
            number = asked.pop(0)
            kill_at = min(kill_at, time.monotonic() + command.get("grace", 30))
            for pid in ranks:
                os.kill(pid, number)
        if time.monotonic() > kill_at:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return 1 if worst else 0


def be_rank(command, rank, address, meeting, tell):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    os.close(tell)
    meeting.close()
    size = str(command["nproc"])
    os.environ.update(
        address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size,
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    os.chdir(command["cwd"])
    cache = Path("cache").absolute()  # a kill may hit its making
    os.environ["HF_DATASETS_CACHE"] = str(cache)
    datasets.config.HF_DATASETS_CACHE = cache
    log = Path(command["log"])
    if plant := command.get("plant"):
        PLANTS[plant]()
    for name, value in command.get("constants", {}).items():
        patching.replace(name, value)
    if rank == 1 and "out_of_memory" in command:
        run_out_of_memory(command["out_of_memory"])
    for function, call, seconds in command.get("slow", ()):
        slow_down(function, call, seconds, log / f"slow.{function}.{call}.{rank}")
    if fault := command.get("fault"):
        mine = fault["operation"] if fault["rank"] == rank else None
        watch_files(mine, fault.get("how"), log / f"operations.{rank}")
    return train_fsdp_qlora.main(command["argv"])


# ------------------------------------------------------------------------------------------------
# Faults
# ------------------------------------------------------------------------------------------------


def slow_down(name, call, seconds, mark):
    function, calls = patching.get(name), itertools.count(1)

    @functools.wraps(function)
    def slow(*args, **kwargs):
        if next(calls) == call:
            mark.touch()
            time.sleep(seconds)
        return function(*args, **kwargs)

    patching.replace(name, slow)


def run_out_of_memory(at):
    """By torch's own error, in place of what a CPU cannot do."""
    train_step = patching.get("train_step")

    def step_or_fail(run, step):
        if step == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return train_step(run, step)

    patching.replace("train_step", step_or_fail)


SAVES = ["save_checkpoint", "write_final_adapter", "write_train_config", "write_ref_logps",
         ("MetricsWriter", "write"), ("MetricsWriter", "__init__")]  # fmt: skip
# by where they are found, as Path's mkdir, unlink and chmod are os's; what one calls of the others,
# as rmtree does, is part of it
OPERATIONS = {
    "os": "replace fsync mkdir open unlink chmod ftruncate pwrite".split(),
    "shutil": ["rmtree"],
    "Path": ["write_text"],
    "package": ["save_file", "digest"],
}


def watch_files(chosen, how, listed):
    """List the file operations of SAVES, and let the `chosen` one go wrong."""
    within, busy, numbers = [], [], itertools.count()

    def in_save(function):
        @functools.wraps(function)
        def save(*args, **kwargs):
            within.append(function.__qualname__)
            try:
                return function(*args, **kwargs)
            finally:
                within.pop()

        return save

    def watched(operation):
        @functools.wraps(operation)
        def work(*args, **kwargs):
            if busy or not within:
                return operation(*args, **kwargs)
            busy.append(True)
            try:
                number = next(numbers)
                path = next((arg for arg in args if isinstance(arg, (str, Path))), "")
                with listed.open("a") as file:
                    print(json.dumps([operation.__name__, str(path), within[-1]]), file=file)
                if chosen in (number, [operation.__name__, within[-1]]):
                    return go_wrong(how, operation, args, kwargs)
                return operation(*args, **kwargs)
            finally:
                busy.pop()

        return work

    for name in SAVES:
        if isinstance(name, str):
            patching.wrap(name, in_save)
        else:
            holder, method = patching.get(name[0]), name[1]
            setattr(holder, method, in_save(getattr(holder, method)))
    for place, names in OPERATIONS.items():
        for name in names:
            if place == "package":
                patching.wrap(name, watched)
            else:
                holder = {"os": os, "shutil": shutil, "Path": Path}[place]
                setattr(holder, name, watched(getattr(holder, name)))


def go_wrong(how, operation, args, kwargs):
    name = operation.__name__
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    code = getattr(errno, "EIO" if how == "torn" else how)
    if name == "write_text":
        path, text = args[:2]
        with path.open("w") as file:
            file.write(text[: len(text) // 2])
    elif name == "pwrite":
        file, data, at = args
        operation(file, data[: len(data) // 2], at)
    elif name == "save_file":
        operation(*args, **kwargs)
        os.truncate(args[1], os.path.getsize(args[1]) // 2)
    elif how == "torn":  # there is no half
        with contextlib.suppress(OSError):
            operation(*args, **kwargs)
    if how == "torn":
        os.kill(os.getpid(), signal.SIGKILL)
    if kwargs.get("ignore_errors"):
        return
    if name == "save_file":  # of Rust's I/O
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(code)}")
    raise OSError(code, os.strerror(code))


# ------------------------------------------------------------------------------------------------
# Changes of the package, mostly mistakes that the tests must find
# ------------------------------------------------------------------------------------------------


def write_in_place():
    """Checkpoints are written under their own names, are believed without a look, and the one
    before goes first, as if there were room for one only."""

    def write(run, step, weights, optimizer_state, merge_check):
        path = patching.get("checkpoint_path")(run.directory, step)
        for old in run.directory.glob("checkpoint-*"):
            shutil.rmtree(old)
        path.mkdir()
        described = {
            "step": step, "progress": dataclasses.asdict(run.progress),
            "config": dataclasses.asdict(run.config), **run.job.digests}  # fmt: skip
        (path / "checkpoint.json").write_text(json.dumps(described))
        save_file = patching.get("save_file")
        save_file(weights, path / "adapter_model.safetensors")
        save_file(optimizer_state, path / "optimizer.safetensors")

    patching.replace("write_checkpoint", write)
    patching.replace(
        "verify_checkpoint", lambda path: json.loads((path / "checkpoint.json").read_text())
    )


def forget_state():
    """The optimizer of a resumed run begins anew."""
    load_checkpoint = patching.get("load_checkpoint")

    def load_weights(path, adapter, optimizer):
        progress = load_checkpoint(path, adapter, optimizer)
        for value in patching.get("sharded_state")(optimizer).values():
            value.zero_()
        return progress

    patching.replace("load_checkpoint", load_weights)


def append_metrics():
    """metrics.jsonl keeps what a resumed run does again."""
    log_class = patching.get("MetricsWriter")
    begin = log_class.__init__

    def begin_behind(self, run, done):
        path = run.directory / "metrics.jsonl"
        before = path.read_bytes() if path.exists() else b""
        begin(self, run, done)
        path.write_bytes(before)
        self.size = len(before)

    log_class.__init__ = begin_behind


def lock_nothing():
    """Two runs may have the same output directory."""
    fcntl.flock = lambda file, how: None


def hear_nothing():
    """Nobody can ask a run to stop."""
    patching.get("Status").on_signal = lambda self, name: None


def keep_state_in_fp32():
    """No mistake: in 8 bits a gradient that was summed in another order can change a code, and by
    it a weight by more than the sum did."""
    patching.replace("Optimizer", train_fsdp_qlora.bnb.optim.PagedAdamW32bit)


PLANTS = {function.__name__: function for function in (
    write_in_place, forget_state, append_metrics, lock_nothing, hear_nothing,
    keep_state_in_fp32)}  # fmt: skip


def main():
    global SafetensorError, datasets, dist, torch, train_fsdp_qlora
    # what the script imports when it comes to it, each a tenth of a second or more
    import datasets
    import matplotlib.backends.backend_agg  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import torch
    import torch.distributed as dist
    import torch.utils.tensorboard  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401
    from safetensors import SafetensorError

    import train_fsdp_qlora

    patching.replace("draw_losses", lambda directory: None)
    gc.collect()
    gc.freeze()
    serve()


if __name__ == "__main__":
    sys.path.insert(0, str(SCRIPT.parent))
    patching.check_each_model_once()
    main()
