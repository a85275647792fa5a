"""Nothing is lost: a run that is killed, stopped, out of disk or started twice ends as if nothing
had happened, once the same command has been given often enough.

The runs are the script's own, of two processes on a CPU, and start within a moment by the server of
fork_server.py. Ten steps, with dropout, evaluations and a checkpoint at every other step, are
compared with the same command left alone: adapter and last checkpoint byte by byte, metrics.jsonl
in all but its times. A few kills and a sample of the rest are in `make test`; `make chaos` has
hundreds. What one process can show is further below, by main() in this process.
"""

import contextlib
import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from conftest import (
    DEVICE, ROOT, SCRIPT, SERVERS, SEVERAL, one_process, small_disk, write_rows)
from fork_server import Forks
from patching import parse_config
from safetensors.torch import load_file, save_file
from test_preferences import write_preferences

import train_fsdp_qlora
from fsdp_qlora.evaluation import document_losses
from fsdp_qlora.exit_codes import (
    EXIT_DIVERGED, EXIT_OUT_OF_MEMORY, EXIT_RESUMABLE, EXIT_STEP_TIMEOUT)
from fsdp_qlora.files import digest, read_json, sync_file, write_atomic
from fsdp_qlora.merge.new_directory import open_partial
from fsdp_qlora.plan import Plan
from fsdp_qlora.run import checkpoints, status as lifecycle
from fsdp_qlora.run.checkpoints import checkpoint_path, verify_checkpoint
from fsdp_qlora.run.divergence import why_diverged
from fsdp_qlora.run.metrics import MetricsWriter
from fsdp_qlora.run.resume import MUST_MATCH
from fsdp_qlora.run.run import Progress
from fsdp_qlora.run.status import LOST_PROCESS, Status, out_of_memory_text
from fsdp_qlora.run.watch import watch_process

STEPS = 10
TIMES = {"seconds", "eval_seconds", "tokens_per_second_per_gpu", "peak_memory_gib"}
IN_PARTS = {"constants": {"SAVE_SECONDS": 0}}  # of the reference
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
TARGETS = 0, 1, "launcher", "all"
# of a rank that has lost another: where it has not begun or is about to end it hears no signals
ENDS = {0, EXIT_RESUMABLE, -signal.SIGTERM}


@pytest.fixture(scope="module")
def forks():
    server = SERVERS.pop() if SERVERS else Forks()
    yield server
    server.end()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The directory of rows to train and to evaluate on, for each loss."""
    directory = tmp_path_factory.mktemp("rows")
    for name, n in ("rows", 24), ("eval", 6):
        write_rows(directory / f"{name}.jsonl", n)
        write_preferences(directory, f"{name}_pairs", n, seed=n)
    return directory


@pytest.fixture(scope="module")
def flags(tiny_model, data):
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    return ["--model", model, "--dataset", data / "rows.jsonl", "--max_seq_len", 64,
            "--eval_dataset", data / "eval.jsonl", "--max_steps", STEPS, "--batch_size", 4,
            "--save_every", 2, "--eval_every", 3, "--lora_rank", 4, "--lora_dropout", 0.1,
            "--shard_group_size", 2, "--output_dir", "run"]  # fmt: skip


@pytest.fixture(scope="module")
def start(forks, flags):
    """Function (directory, *more flags, **faults of fork_server.py): a Run with its output in
    directory/run."""
    return lambda cwd, *more, **faults: forks.start([*flags, *more], cwd, **faults)


def leave_alone(start, cwd, *more, **faults):
    """The directory `run` of the command left alone, `more` of its flags, how long that takes, and
    rank 0's and rank 1's file operations of all saves."""
    run = start(cwd, *more, fault={"rank": None, "operation": None}, **faults)
    assert run.wait() == [0, 0], run.err
    return types.SimpleNamespace(
        run=cwd / "run", more=more, seconds=time.monotonic() - run.started,
        operations=[run.operations(rank) for rank in (0, 1)])  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    """What a run leaves that nobody disturbs."""
    return leave_alone(start, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def preferred(start, data, tmp_path_factory):
    """Function (loss, plant): the same of a run with a preference loss, in fp32. Each set of rows
    of its reference is written as soon as it is known."""
    done = {}

    def left_alone(loss, plant=None):
        if (loss, plant) not in done:
            rows, evaluated = (data / f"{name}_pairs{'_unpaired' * (loss == 'kto')}.jsonl"
                               for name in ("rows", "eval"))  # fmt: skip
            more = ["--loss", loss, "--dataset", rows, "--eval_dataset", evaluated,
                    "--learning_rate", 1e-3, "--compute_dtype", "float32"]  # fmt: skip
            cwd = tmp_path_factory.mktemp(loss)
            done[loss, plant] = leave_alone(start, cwd, *more, plant=plant, **IN_PARTS)
        return done[loss, plant]

    return left_alone


def read_metrics(directory):
    """Without times."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def read_reference(directory):
    """{name: bytes} of a run with a preference loss, in which NaN equals NaN, else {}."""
    path = directory / "reference.safetensors"
    values = load_file(path) if path.exists() else {}
    return {name: value.numpy().tobytes() for name, value in values.items()}


def differences(cwd, expected, has_last=True, steps=STEPS):
    """What a complete run differs in from the directory of another; has_last: also its checkpoint
    after the last step."""
    found, run, last = [], cwd / "run", f"checkpoint-{steps:06d}"
    names = ["adapter_model.safetensors", "adapter_config.json"]
    if has_last:
        names += [f"{last}/{path.name}" for path in (expected / last).glob("*.safetensors")]
    for name in names:
        if not (run / name).is_file():
            found.append(f"no {name}")
        elif (run / name).read_bytes() != (expected / name).read_bytes():
            found.append(name)
    try:
        if has_last:
            verify_checkpoint(run / last)  # is whole
        if read_metrics(run) != read_metrics(expected):
            found.append(f"metrics.jsonl: steps {[row['step'] for row in read_metrics(run)]}")
        if read_reference(run) != read_reference(expected):
            found.append("reference.safetensors")
    except ValueError as e:
        found.append(str(e))
    status, whole = (read_json(path / "status.json", {}) for path in (run, expected))
    for key in ("state", "code", "message", "step", "max_steps") + ("last_checkpoint",) * has_last:
        if status.get(key) != whole[key]:
            found.append(f"status.json: {key} {status.get(key)}")
    found += [f"left: {path.name}" for path in run.glob(".checkpoint*.part")]
    return found


def has_traceback(err):
    """Of the package's own functions; those of torch or of an exit may have one."""
    return any(f'File "{path}' in err for path in (SCRIPT, ROOT / "fsdp_qlora"))


def last_words(run):
    """The lines that say why a run ended; there is no traceback of the package beside them."""
    assert not has_traceback(run.err), run.err
    return [line for line in run.err.splitlines() if line.startswith(("error: ", "stopped: "))]


def finish(start, cwd, *more, most=3, **faults):
    """Give the same command until the run is complete."""
    for _ in range(most):
        run = start(cwd, *more, **faults)
        if (codes := run.wait()) == [0, 0]:
            return run
        assert set(codes) == {EXIT_RESUMABLE}, (codes, run.err)
    raise AssertionError(f"not complete after {most} starts: {run.err}")


def check_stopped(run, state="stopped", code=75, words=""):
    """One line says why, and status.json tells the same and where the run is."""
    (line,) = last_words(run)
    assert words in line
    status = json.loads((run.log.parent / "run" / "status.json").read_text())
    kept = sorted(path.name for path in (run.log.parent / "run").glob("checkpoint-*"))
    assert (status["state"], status["code"]) == (state, code), status
    assert status["message"] in line
    assert status["last_checkpoint"] == (kept[-1] if kept else None), status
    assert status["max_steps"] == STEPS
    return status


# ------------------------------------------------------------------------------------------------
# Kills
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kills", [
    pytest.param(1, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.chaos)])
def test_killed_at_random_times(kills, start, forks, undisturbed, tmp_path):
    """Of a rank, the launcher or all, at any time of a start; and again until the run is complete,
    then another run, until so many kills are done."""
    draw, done, cwd = random.Random(kills), 0, None
    while done < kills or cwd:
        if cwd is None:
            cwd = tmp_path / str(len(list(tmp_path.iterdir())))
            cwd.mkdir()
        run = start(cwd)
        if done < kills:
            forks.wait_for(run.has_ended, draw.uniform(0, undisturbed.seconds))
            if not run.has_ended():
                run.kill(signal.SIGKILL, draw.choice(TARGETS))
                done += 1
        codes = run.wait(30)
        assert set(codes) <= ENDS | {-signal.SIGKILL}, run.err
        assert len(last_words(run)) <= 1, run.err
        if codes == [0, 0]:
            assert differences(cwd, undisturbed.run) == []
            cwd = None


# {what is called in a start with a preference loss: how often}
CALLS = {"document_losses": 4, "global_loss_inputs": 9, "compute_loss": 12, "optimizer_step": 9}
SAMPLE_OF_KILLS = [  # in its reference, in a step, in a save
    {"slow": [["document_losses", 3, 0.3]]}, {"slow": [["compute_loss", 4, 0.3]]},
    {"fault": {"rank": 0, "operation": ["save_file", "save_checkpoint"], "how": "torn"}}]


def draw_kill(draw, whole):
    """Faults of a start that is killed at a random time, where a function is called, or at a file
    operation or in the midst of it."""
    function = draw.choice([*CALLS])
    return draw.choice([
        {}, {"slow": [[function, draw.randint(1, CALLS[function]), 0.3]]},
        {"fault": {"rank": 0, "operation": draw.randrange(len(whole.operations[0])),
                   "how": draw.choice(["kill", "torn"])}}])  # fmt: skip


def start_and_kill(kill, draw, forks, seconds, start):
    """Give a command that has these faults, and kill a rank, the launcher or all; whether that came
    before its end."""
    run = start(**kill)
    if "slow" in kill:
        forks.wait_for(lambda: run.has_ended() or any(run.log.glob("slow.*")), 60)
    else:
        forks.wait_for(run.has_ended, 60 if kill else draw.uniform(0, seconds))
    if run.has_ended():
        return run, -signal.SIGKILL in run.wait()
    run.kill(signal.SIGKILL, draw.choice([*range(len(run.ranks)), *TARGETS[2:]]))
    return run, True


def gaps(run, expected):
    """How far the losses of a run are from those of another, which has the same steps, and of its
    reference the log-probabilities, relative to theirs."""
    (steps, got), (others, want) = (
        ([row["step"] for row in read_metrics(path)],
         torch.tensor([row.get("loss", row.get("eval_loss")) for row in read_metrics(path)]))
        for path in (run, expected))  # fmt: skip
    assert steps == others
    pairs = [(got, want), *zip(*(load_file(path / "reference.safetensors").values()
                                 for path in (run, expected)))]  # fmt: skip
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in pairs)
    return [float(((a - b) / b).nan_to_num().abs().max()) for a, b in pairs]


@pytest.mark.parametrize("loss, counts, kills", [
    pytest.param("kto", [2], 3, marks=pytest.mark.slow)] + [
    pytest.param(loss, counts, 40, marks=pytest.mark.chaos)
    for loss in ("dpo", "kto") for counts in ([2], [1, 2, 3])])  # fmt: skip
def test_killed_with_preferences(loss, counts, kills, start, forks, preferred, tmp_path):
    """On two processes it ends as if nothing had happened; where each start has another number of
    them, as near to it as sums in another order are."""
    plant = None if counts == [2] else "keep_state_in_fp32"
    draw, whole, cwd, worst, done = random.Random(loss), preferred(loss, plant), None, [0.0], 0
    while done < kills or cwd:
        if cwd is None:
            cwd = tmp_path / str(len(list(tmp_path.iterdir())))
            cwd.mkdir()
        n = draw.choice(counts)
        again = functools.partial(
            start, cwd, *whole.more, "--shard_group_size", n, nproc=n, plant=plant, **IN_PARTS)
        if done < kills:
            kill = SAMPLE_OF_KILLS[done] if kills == 3 else draw_kill(draw, whole)
            run, is_killed = start_and_kill(kill, draw, forks, whole.seconds, again)
            done += is_killed
        else:
            run = again()
        codes = run.wait(30)
        assert set(codes) <= ENDS | {-signal.SIGKILL}, run.err
        assert len(last_words(run)) <= max(1, n - 1), run.err  # each that has lost another says so
        if not any(codes):
            if counts == [2]:
                assert differences(cwd, whole.run) == []
            else:
                worst.append(max(gaps(cwd / "run", whole.run)))
            cwd = None
    print(f"{loss} on {counts}: {done} kills, {len(list(tmp_path.iterdir()))} runs, largest gap"
          f" {max(worst):.1e}")  # fmt: skip
    assert max(worst) <= 1e-5


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["kill", "torn", "ENOSPC", "EIO"])
def test_faults_of_writing_the_reference(how, start, preferred, tmp_path):
    whole = preferred("kto")
    again = lambda *args, **faults: start(*args, *whole.more, **IN_PARTS, **faults)  # noqa: E731
    numbers = [i for i, (*_, function) in enumerate(whole.operations[0])
               if function == "write_ref_logps"]  # fmt: skip
    found = []
    for i in numbers:
        (tmp_path / str(i)).mkdir()
        found += lost_by_fault(again, tmp_path / str(i), 0, i, how, whole.run)
    assert not found, "\n".join(found)


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before_last_save(start, undisturbed, tmp_path_factory):
    """A run that was killed between its last step and the save of it; and of a start that goes on
    with it, all file operations: [(rank, number)]."""
    cwd = tmp_path_factory.mktemp("before-last-save")
    shutil.copytree(undisturbed.run, cwd / "run")
    shutil.rmtree(cwd / "run" / f"checkpoint-{STEPS:06d}")
    (cwd / "run" / "adapter_model.safetensors").unlink()
    fault = {"rank": 0, "operation": ["mkdir", "save_checkpoint"], "how": "kill"}
    run = start(cwd, fault=fault)
    assert run.wait()[0] == -signal.SIGKILL, run.err
    assert not (cwd / "run" / f"checkpoint-{STEPS:06d}").exists()
    dry = shutil.copytree(cwd, tmp_path_factory.mktemp("dry") / "run")
    run = start(dry, fault={"rank": None, "operation": None})
    assert run.wait() == [0, 0], run.err
    return cwd, [(rank, i) for rank in (0, 1) for i in range(len(run.operations(rank)))]


def lost_by_fault(start, copy, rank, operation, how, expected):
    """What a run lost by a fault of one file operation, with the same command afterwards."""
    run = start(copy, fault={"rank": rank, "operation": operation, "how": how})
    codes = run.wait()
    done = run.operations(rank)
    what = f"{how} of {rank}/{operation}, {done[min(operation, len(done) - 1)]}"
    if len(done) <= operation:
        return [f"{what}: not reached"]
    if how in ("kill", "torn"):
        is_right = codes[rank] == -signal.SIGKILL and codes[1 - rank] in ENDS
    elif done[operation][2] in ("save_checkpoint", "write_ref_logps", "Log.write"):
        is_right = codes == [0, 0] and last_words(run) == []  # training goes on
    else:
        is_right = codes[0] == codes[1] and len(last_words(run)) == bool(codes[0])
    found = [] if is_right else [f"codes {codes}: {run.err}"]
    stayed = codes == [0, 0]
    if not stayed:
        again = start(copy)
        if again.wait() != [0, 0]:
            return [f"{what}: a lost run: {again.err}"]
    # a save of the last step that failed is not tried again: the adapter itself comes next
    has_last = not stayed or "could not save checkpoint" not in run.out
    return [f"{what}: {text}" for text in found + differences(copy, expected, has_last)]


@pytest.mark.parametrize("how, sample", [
    pytest.param("kill", 1, marks=pytest.mark.slow), ("ENOSPC", 1)] + [
    pytest.param(how, None, marks=pytest.mark.chaos) for how in ("kill", "torn", "ENOSPC", "EIO")])
def test_faults_of_file_operations(how, sample, start, undisturbed, before_last_save, tmp_path):
    """Each operation of a start that resumes, saves, and writes the adapter."""
    cwd, operations = before_last_save
    found = []
    for rank, i in random.Random(how).sample(operations, sample or len(operations)):
        copy = shutil.copytree(cwd, tmp_path / "copy", ignore=shutil.ignore_patterns("log-*"))
        found += lost_by_fault(start, copy, rank, i, how, undisturbed.run)
        shutil.rmtree(copy)
    assert not found, "\n".join(found)


def test_full_disk_ends_no_training(start, undisturbed, tmp_path):
    """Between two saves nothing is left on it, and later there is room again."""
    with small_disk(tmp_path / "run", "3m"):
        run = start(tmp_path, slow=[["train_step", 5, 0.5], ["train_step", 9, 0.5]])
        run.wait_for_slow("train_step", 5, [0, 1])
        with contextlib.suppress(OSError), (tmp_path / "run" / "filler").open("wb", 0) as filler:
            while True:
                filler.write(bytes(4096))
        run.wait_for_slow("train_step", 9, [0, 1])
        assert {path.name for path in (tmp_path / "run").glob("*checkpoint-*")} == {
            "checkpoint-000003", "checkpoint-000004"}  # fmt: skip
        for step in 6, 8:
            assert f"could not save checkpoint-{step:06d}: " in run.out
        os.unlink(tmp_path / "run" / "filler")
        assert run.wait() == [0, 0], run.err
        assert last_words(run) == []
        assert differences(tmp_path, undisturbed.run) == []


# ------------------------------------------------------------------------------------------------
# Signals
# ------------------------------------------------------------------------------------------------

PHASES = {  # function: which call of it, after which step the run then stops
    "load_model": (1, 0), "train_step": (2, 2), "evaluate": (1, 3), "save_checkpoint": (1, 5),
    "write_final_adapter": (1, None)}  # fmt: skip


def check_signals(start, undisturbed, cwd, chosen):
    """One run that gets a signal in each phase, and goes on by the same command."""
    for (function, (call, step)), (number, target) in zip(PHASES.items(), chosen, strict=True):
        run = start(cwd, slow=[[function, call, 0.5]])
        run.wait_for_slow(function, call, [0] if step is None else [0, 1])
        run.kill(number, target)
        codes = run.wait(10)
        if step is None:  # there is nothing left to stop
            assert (codes, last_words(run)) == ([0, 0], []), run.err
            continue
        assert codes == [EXIT_RESUMABLE] * 2, (function, codes, run.err)
        assert check_stopped(run)["step"] == step, function
        if step and (number, target) not in USR1_ENDS_TORCHRUN:
            assert f"stopped: {number.name}, after step {step}" in run.err
    assert differences(cwd, undisturbed.run) == []


USR1_ENDS_TORCHRUN = (signal.SIGUSR1, "launcher"), (signal.SIGUSR1, "all")
SAMPLE = [(signal.SIGTERM, "launcher"), (signal.SIGINT, 1), (signal.SIGUSR1, 1),
          (signal.SIGUSR1, "launcher"), (signal.SIGTERM, 0)]  # fmt: skip


def test_signals_in_each_phase(start, undisturbed, tmp_path):
    check_signals(start, undisturbed, tmp_path, SAMPLE)


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_stop_before_other_flags_are_accepted_is_told(state, start, undisturbed, tmp_path):
    """A scheduler that looks at status.json would not start it again."""
    path = Path(shutil.copytree(undisturbed.run, tmp_path / "run")) / "status.json"
    path.write_text(path.read_text().replace('"complete"', f'"{state}"'))
    run = start(tmp_path, "--learning_rate", 1e-3, slow=[["prepare_data", 1, 0.5]])
    run.wait_for_slow("prepare_data", 1, [0, 1])
    assert json.loads(path.read_text())["state"] == state
    run.kill(signal.SIGTERM, "launcher")
    assert run.wait(10) == [EXIT_RESUMABLE] * 2
    assert json.loads(path.read_text())["state"] == "stopped"


@pytest.mark.chaos
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("number", SIGNALS)
def test_all_signals_in_each_phase(number, target, start, undisturbed, tmp_path):
    check_signals(start, undisturbed, tmp_path, [(number, target)] * len(PHASES))


@pytest.mark.parametrize("state", ["stopped", "failed", "complete"])
def test_lost_process_does_not_hide_why_a_run_has_ended(state, tmp_path):
    status, path = Status(), tmp_path / "status.json"
    status.directory, status.may_write = tmp_path, True
    status.write("training")
    status.write(state, 0, "the reason")
    status.write("stopped", EXIT_RESUMABLE, f"{LOST_PROCESS}; the same command resumes it")
    assert read_json(path)["message"] == "the reason"
    status.write("training")
    status.write("stopped", EXIT_RESUMABLE, f"{LOST_PROCESS}; the same command resumes it")
    assert read_json(path)["state"] == ("failed" if state == "failed" else "stopped")


@pytest.mark.chaos
@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGKILL])
def test_torchrun_itself(number, flags, tmp_path):
    """Does to its ranks what the launcher of fork_server.py does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [SCRIPT, *flags, "--max_steps", 100_000]
    with (tmp_path / "err").open("w") as err:
        torchrun = subprocess.Popen(list(map(str, command)), cwd=tmp_path, stderr=err)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.is_file() and len(metrics.read_bytes().splitlines()) > 9, 60)
    ranks = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    assert len(ranks) == 2
    torchrun.send_signal(number)
    wait_until(lambda: torchrun.poll() is not None, 10)
    wait_until(lambda: not any(Path("/proc", rank, "cmdline").exists() for rank in ranks), 10)
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["code"]) == ("stopped", EXIT_RESUMABLE)
    verify_checkpoint(tmp_path / "run" / status["last_checkpoint"])
    lines = (tmp_path / "err").read_text().splitlines()
    assert [line for line in lines if line.startswith("stopped: ")] == [
        f"stopped: {status['message']}"]  # fmt: skip


def start_torchrun(flags, cwd):
    """torchrun of the command on two ranks, on the only GPU of a machine on one, by ranks_runner.py
    for torch's deterministic algorithms on GPUs; and the directory of its output."""
    n_ranks = 1 if torch.cuda.device_count() == 1 else 2
    log = cwd / f"log-{len(list(cwd.iterdir()))}"
    log.mkdir()
    argv = [*flags, "--max_steps", 150, "--save_every", 10, "--eval_every", 40,
            "--shard_group_size", n_ranks]  # fmt: skip
    job = {"argv": [str(arg) for arg in argv], "deterministic": True}
    (log / "0.json").write_text(json.dumps([job]))
    command = ["torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}", SEVERAL, log]
    with (log / "err").open("w") as err:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", *map(str, command)], cwd=cwd, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=err)  # fmt: skip
    return torchrun, log


@pytest.fixture(scope="module")
def whole_run(flags, tmp_path_factory):
    """The directory `run` of a torchrun left alone, its seconds until the first step, and after."""
    cwd, begun = tmp_path_factory.mktemp("whole"), time.monotonic()
    torchrun, log = start_torchrun(flags, cwd)
    status = cwd / "run" / "status.json"
    wait_until(lambda: read_json(status, {}).get("state") == "training", 240)
    loading = time.monotonic() - begun
    assert torchrun.wait(300) == 0, (log / "err").read_text()
    return cwd / "run", loading, time.monotonic() - begun - loading


def kill_one(torchrun, draw):
    """torchrun or a rank of it; and wait until all of them have ended."""

    def is_alive(pid):
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text()
    family = [torchrun.pid, *map(int, children.split())]
    os.kill(draw.choice(family), signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, family)), 60)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(10 if DEVICE == "cuda" else 4))
def test_torchrun_killed_at_random_times(seed, flags, whole_run, tmp_path):
    """Of torchrun or a rank, a third of them while it starts: 20 kills on GPUs, 8 on a CPU."""
    whole, loading, training = whole_run
    draw, kills, done, cwd = random.Random(seed), 2, 0, None
    while done < kills or cwd:
        if cwd is None:
            cwd = tmp_path / str(len(list(tmp_path.iterdir())))
            cwd.mkdir()
        torchrun, log = start_torchrun(flags, cwd)
        if done < kills:
            seconds = draw.uniform(0.3, loading)
            if draw.random() > 1 / 3:
                seconds = loading + draw.uniform(0, training)
            with contextlib.suppress(subprocess.TimeoutExpired):
                torchrun.wait(seconds)
            if torchrun.poll() is None:
                kill_one(torchrun, draw)
                done += 1
        if torchrun.wait(300) == 0:
            assert differences(cwd, whole, steps=150) == []
            cwd = None
        else:
            assert not has_traceback((log / "err").read_text())
    print(f"{done} kills, {len(list(tmp_path.glob('*/log-*')))} starts, each {loading:.0f} s until"
          f" the first step, {training:.0f} s of training")  # fmt: skip


def wait_until(what, seconds):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.05)


def kill_rank(start, cwd, step, call, rank):
    """The other says so and in status.json, as nobody else can where it is rank 0."""
    run = start(cwd, slow=[["train_step", call, 0.5]])
    run.wait_for_slow("train_step", call, [0, 1])
    run.kill(signal.SIGKILL, rank)
    assert run.wait(10)[1 - rank] == EXIT_RESUMABLE, run.err
    assert check_stopped(run, words=LOST_PROCESS)["step"] == step


def kill_torchrun(start, cwd, step, call):
    run = start(cwd, slow=[["train_step", call, 0.5]])
    run.wait_for_slow("train_step", call, [0, 1])
    run.kill(signal.SIGKILL, "launcher")
    assert run.wait(10) == [EXIT_RESUMABLE] * 2, run.err
    words = f"torchrun has ended, after step {step}"
    assert check_stopped(run, words=words)["step"] == step


def freeze_rank(start, cwd, function, rank):
    """The other writes down where it waits, and ends; torchrun then ends the frozen one."""
    run = start(cwd, "--step_timeout_minutes", 0.05, slow=[[function, 2, 0.5]], grace=1)
    run.wait_for_slow(function, 2, [0, 1])
    run.kill(signal.SIGSTOP, rank)
    codes = run.wait(30)
    assert codes[1 - rank] == EXIT_STEP_TIMEOUT and codes[rank] == -signal.SIGKILL, run.err
    check_stopped(run, "failed", EXIT_STEP_TIMEOUT, f"rank {1 - rank} on")
    stacks = [path.name for path in (cwd / "run").glob("stacks-*.txt")]
    assert stacks == [f"stacks-{1 - rank}.txt"]
    assert " in train\n" in (cwd / "run" / stacks[0]).read_text()


def run_out_of_memory(start, cwd, step):
    run = start(cwd, out_of_memory=step)
    assert run.wait()[1] == EXIT_OUT_OF_MEMORY, run.err
    (line,) = [line for line in last_words(run) if line.startswith("error: ")]
    for words in ("rank 1 on", f"out of memory at step {step}, in micro-batches of at most", "GiB",
                  "--recompute all, ", "a smaller --micro_batch_tokens, ",
                  "a shorter --max_seq_len"):  # fmt: skip
        assert words in line
    status = read_json(cwd / "run" / "status.json")
    assert (status["state"], status["code"]) == ("failed", EXIT_OUT_OF_MEMORY)


def test_run_that_ends_early_four_times_goes_on(start, undisturbed, tmp_path):
    """Each start goes on with what the one before has saved: after steps 2, 5, 6 and 8."""
    kill_rank(start, tmp_path, step=3, call=3, rank=0)
    kill_torchrun(start, tmp_path, step=5, call=3)
    freeze_rank(start, tmp_path, "train_step", rank=1)
    run_out_of_memory(start, tmp_path, step=9)
    run = finish(start, tmp_path)
    assert "checkpoint-000008 at step 8 of" in run.out
    assert differences(tmp_path, undisturbed.run) == []


@pytest.mark.chaos
def test_rank_1_is_killed(start, undisturbed, tmp_path):
    kill_rank(start, tmp_path, step=5, call=5, rank=1)
    finish(start, tmp_path)
    assert differences(tmp_path, undisturbed.run) == []


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("function", ["train_step", "evaluate", "save_checkpoint"])
def test_rank_is_frozen(function, rank, start, undisturbed, tmp_path):
    freeze_rank(start, tmp_path, function, rank)
    finish(start, tmp_path, "--step_timeout_minutes", 0.05)
    assert differences(tmp_path, undisturbed.run) == []


@pytest.mark.chaos
def test_job_that_was_suspended_goes_on(start, undisturbed, tmp_path):
    """As by Slurm: nobody is frozen, all have slept."""
    run = start(tmp_path, "--step_timeout_minutes", 0.1, slow=[["train_step", 3, 0.5]])
    run.wait_for_slow("train_step", 3, [0, 1])
    run.kill(signal.SIGSTOP, 0, 1)
    time.sleep(10)
    run.kill(signal.SIGCONT, 0, 1)
    assert run.wait() == [0, 0], run.err
    assert differences(tmp_path, undisturbed.run) == []


def test_processes_that_encode_end_with_their_rank(start, tmp_path):
    write_rows(tmp_path / "rows.jsonl", 12_000)  # more than one process takes
    run = start(tmp_path, "--dataset", "rows.jsonl", slow=[["encode_batches", 1, 60]])
    run.wait_for_slow("encode_batches", 1, [0])
    assert run.server.wait_for(lambda: len(run.left()) > 4, 10)
    run.kill(signal.SIGKILL, 0)
    run.wait()  # none of them is left


# ------------------------------------------------------------------------------------------------
# Two starts
# ------------------------------------------------------------------------------------------------


def check_refused(run, other):
    assert run.wait(10) == [2, 2], run.err
    (line,) = last_words(run)
    assert "--output_dir run: in use by" in line
    assert f"process {other.ranks[0]} on " in line or "a run that begins" in line


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.chaos)])
def test_second_start_leaves_a_live_run_alone(times, start, undisturbed, tmp_path):
    for i in range(times):
        cwd = tmp_path / str(i)
        cwd.mkdir()
        run = start(cwd, slow=[["train_step", 5, 0.5]])
        run.wait_for_slow("train_step", 5, [0, 1])
        run.kill(signal.SIGSTOP, 0, 1)
        for more in [], ["--resume", "must"]:
            check_refused(start(cwd, *more), run)
        assert read_json(cwd / "run" / "status.json")["state"] == "training"
        run.kill(signal.SIGCONT, 0, 1)
        assert run.wait() == [0, 0], run.err
        assert differences(cwd, undisturbed.run) == []


@pytest.mark.chaos
def test_one_of_two_starts_at_once_wins(start, undisturbed, tmp_path):
    for i in range(10):
        check_double_start(start, undisturbed, tmp_path / str(i))


def check_double_start(start, undisturbed, cwd):
    cwd.mkdir()
    runs = [start(cwd), start(cwd)]
    won, lost = runs if runs[0].wait() == [0, 0] else runs[::-1]
    assert won.wait() == [0, 0], won.err
    check_refused(lost, won)
    assert differences(cwd, undisturbed.run) == []


# ------------------------------------------------------------------------------------------------
# That these tests find what they look for
# ------------------------------------------------------------------------------------------------


@pytest.mark.chaos
@pytest.mark.parametrize("plant", ["write_in_place", "forget_state", "append_metrics"])
def test_loss_would_be_found(plant, start, undisturbed, tmp_path):
    """By a kill in the save of step 4 of a run that writes or reads in another way."""
    (tmp_path / "dry").mkdir()
    run = start(tmp_path / "dry", plant=plant, fault={"rank": None, "operation": None})
    assert run.wait() == [0, 0], run.err
    assert differences(tmp_path / "dry", undisturbed.run, False) == []  # as nobody killed it
    found = []
    for i, (name, path, _) in enumerate(run.operations(0)):
        if name == "save_file" and "checkpoint-000004" in path:
            cwd = tmp_path / str(i)
            cwd.mkdir()
            run = start(cwd, plant=plant, fault={"rank": 0, "operation": i, "how": "torn"})
            assert run.wait()[0] == -signal.SIGKILL
            run = start(cwd, plant=plant)
            found.append(run.wait() != [0, 0] or differences(cwd, undisturbed.run, False))
    assert any(found)


@pytest.mark.chaos
def test_missing_lock_and_deaf_run_would_be_found(start, undisturbed, tmp_path):
    def planted(plant):
        return lambda *args, **faults: start(*args, plant=plant, **faults)

    # both run, or each finds the other's text in its .lock
    with pytest.raises(AssertionError, match=r"== \[2, 2\]|\[2, 2\] == \[0, 0\]"):
        check_double_start(planted("lock_nothing"), undisturbed, tmp_path / "two")
    with pytest.raises(AssertionError, match=r"\[0, 0\] == \[75\] \* 2|\[0, 0\] == \[75, 75\]"):
        check_signals(planted("hear_nothing"), undisturbed, tmp_path, SAMPLE)


# ------------------------------------------------------------------------------------------------
# One process: what is resumed, and what lies in its way
# ------------------------------------------------------------------------------------------------

FLAGS = ["--model", "model", "--dataset", "rows.jsonl", "--max_seq_len", 64, "--batch_size", 4,
         "--max_steps", 5, "--save_every", 1, "--keep_checkpoints", 9, "--lora_rank", 4,
         "--report_to", "none", "--output_dir", "run"]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def deterministic():
    """On a GPU attention's backward else adds in any order."""
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def complete(tiny_model, tmp_path_factory):
    """The directory of a model, rows, and a run of five steps with a checkpoint at each."""
    directory, before = tmp_path_factory.mktemp("complete"), Path.cwd()
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    shutil.copytree(model, directory / "model")
    write_rows(directory / "rows.jsonl", 24)
    try:
        os.chdir(directory)
        assert train_fsdp_qlora.main([str(flag) for flag in FLAGS]) == 0
    finally:
        os.chdir(before)
    return directory


@pytest.fixture
def cut(complete, tmp_path, monkeypatch):
    """A copy whose run was killed in step 4, and the current directory; the path of its run."""
    run = Path(shutil.copytree(complete, tmp_path / "cut")) / "run"
    for path in run.glob("checkpoint-00000[45]"):
        shutil.rmtree(path)
    for name in "adapter_model.safetensors", "adapter_config.json", "loss.png":
        (run / name).unlink(missing_ok=True)
    (run / "status.json").write_text('{"state": "training"}')
    monkeypatch.chdir(run.parent)
    return run


@pytest.fixture
def again(cut, run_main):
    """Function (*more flags): the same command there."""
    return lambda *more: run_main(*FLAGS, *more)


def refused(result, code, *words):
    """Ended with this exit code and one line of all these words."""
    assert result[0] == code, result
    (line,) = result[2].strip().splitlines()
    assert line.startswith("error: ")
    for word in words:
        assert str(word) in line
    return line


def is_whole(result, run, complete):
    """The run has ended as if nothing had happened."""
    assert result[0] == 0 and result[2] == "", result
    for name in "adapter_model.safetensors", "adapter_config.json":
        assert (run / name).read_bytes() == (complete / "run" / name).read_bytes()
    assert read_metrics(run) == read_metrics(complete / "run")
    assert read_json(run / "status.json")["state"] == "complete"


def test_cut_run_goes_on(again, cut, complete):
    is_whole(again(), cut, complete)


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_tensor(name, change):
    def edit(model):
        tensors = load_file(model / "model.safetensors")
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return edit


def edit_rope(model):
    edit_json(
        model / "config.json", lambda config: config["rope_parameters"].update(rope_theta=5e5)
    )


@pytest.mark.parametrize(
    "change",
    {
        "embedding": edit_tensor("model.embed_tokens.weight", lambda weight: weight * 1.5),
        "norm": edit_tensor("model.layers.1.input_layernorm.weight", lambda weight: weight * 2),
        "linear": edit_tensor("model.layers.0.mlp.up_proj.weight", lambda weight: weight.flip(0)),
        "rotary": edit_rope,
    }.items(),
    ids=lambda change: change[0],
)
def test_changed_base_is_refused(change, again, cut):
    change[1](cut.parent / "model")
    refused(again(), 7, "--output_dir run already contains a run with another base model")
    assert len(list(cut.glob("checkpoint-*"))) == 3 and not list(cut.glob("adapter_*"))


PUT = {
    "fifo": os.mkfifo, "file": Path.touch, "empty directory": Path.mkdir,
    "link": lambda path: path.symlink_to("checkpoint-000001"),
    "link to nowhere": lambda path: path.symlink_to("nowhere"),
    "copy": lambda path: shutil.copytree(path.with_name("checkpoint-000003"), path),
}  # fmt: skip


@pytest.mark.parametrize("what", [
    pytest.param(what, marks=[pytest.mark.slow] * (what not in ("link", "copy"))) for what in PUT])
def test_what_is_no_checkpoint_is_skipped(what, again, cut, complete):
    """Also where the next save belongs, and after all steps."""
    for step in 4, 7:
        PUT[what](checkpoint_path(cut, step))
    others = [cut / "checkpoint-best", cut / "checkpoint-000099.bak"]
    for path in others:
        shutil.copytree(cut / "checkpoint-000001", path)
    result = again()
    assert "resumed from run/checkpoint-000003" in result[1]
    is_whole(result, cut, complete)
    for step in 1, 2, 3, 4, 5:
        verify_checkpoint(checkpoint_path(cut, step))
    assert not checkpoint_path(cut, 4).is_symlink()
    assert all(path.is_dir() for path in others) and not list(cut.glob(".checkpoint*"))


# the others by `make test-slow`
QUICK_DAMAGE = ("cut off", "adapter_model.safetensors"), ("one bit", "optimizer.safetensors")


@pytest.mark.parametrize("how, name", [
    pytest.param(how, name, marks=[pytest.mark.slow] * ((how, name) not in QUICK_DAMAGE))
    for how in ("missing", "cut off", "one bit")
    for name in ("adapter_model.safetensors", "optimizer.safetensors")])
def test_checkpoint_with_a_damaged_file_is_skipped(how, name, again, cut, complete):
    path = cut / "checkpoint-000003" / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.unlink()
    if how != "missing":
        path.write_bytes(content if how == "one bit" else content[:-1])
    result = again()
    assert "skipped a checkpoint: run/checkpoint-000003 is incomplete" in result[1]
    assert "resumed from run/checkpoint-000002" in result[1]
    is_whole(result, cut, complete)


def damage(how, path):
    path.unlink()
    if how == "directory":
        path.mkdir()
    else:
        path.write_text({"nested": "[" * 100_000, "empty": "", "torn": '{"step": 3, "co'}[how])


@pytest.mark.parametrize("how", [
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("nested", "directory")),
    "empty", "torn"])
def test_damaged_json_is_one_line_or_nothing(how, again, cut, complete):
    damage(how, cut / "status.json")
    damage(how, cut / "checkpoint-000003" / "checkpoint.json")
    described = (cut / "train_config.json").read_text()
    damage(how, cut / "train_config.json")
    refused(again(), 2, "run")
    refused(again("--resume", "must"), 2, "run")
    if how == "directory":
        (cut / "train_config.json").rmdir()
    (cut / "train_config.json").write_text(described)
    result = again()
    assert "skipped a checkpoint: run/checkpoint-000003 is incomplete" in result[1]
    assert "resumed from run/checkpoint-000002" in result[1]
    if how == "directory":
        (cut / "status.json").rmdir()
        result = again()
    is_whole(result, cut, complete)


def test_metrics_are_cut_by_step(again, cut, complete):
    lines = (cut / "metrics.jsonl").read_text().splitlines()
    lines = ["[]", lines[0], lines[1][:20], *lines[:4], lines[1], "\0" * 40, "null", "3",
             '{"step": null}', lines[4][:-9]]  # fmt: skip
    (cut / "metrics.jsonl").write_text("\n".join(lines))
    is_whole(again(), cut, complete)


def test_metrics_that_are_lost_begin_again(again, cut, complete):
    (cut / "metrics.jsonl").unlink()
    code, _, err = again()
    assert code == 0 and [row["step"] for row in read_metrics(cut)] == [4, 5], err


def test_flags_that_differ_are_all_named(again, cut):
    """All of MUST_MATCH; the other initial adapter has to be one, and has a test of its own."""
    before = (cut / "train_config.json").read_bytes()
    others = {"lora_rank": 8, "seed": 3, "batch_size": 2, "max_seq_len": 63, "adapter": "rslora",
              "lora_alpha": 5, "lora_dropout": 0.2, "compute_dtype": "float32"}  # fmt: skip
    flags = [x for name, value in others.items() for x in (f"--{name}", value)]
    flags += ["--target_modules", "v_proj", "--trainable_tokens", "<pad>"]
    line = refused(again(*flags), 7, "--seed 0 (now 3)", "now ['v_proj']", "now ['<pad>']",
                   *(f"(now {value})" for value in others.values()))
    named = {word[2:] for word in line.split() if word.startswith("--")}
    of_losses = {"loss", "beta", "label_smoothing", "simpo_gamma", "desirable_weight",
                 "undesirable_weight"}  # see test_preferences  # fmt: skip
    assert named >= {*MUST_MATCH} - {"random_weights", "init_adapter"} - of_losses
    assert before == (cut / "train_config.json").read_bytes()


def test_run_goes_on_with_data_and_model_elsewhere(again, cut, complete):
    """What they are is told by their content; and targets have no order."""
    for name in "rows.jsonl", "model":
        (cut.parent / name).rename(cut.parent / f"moved-{name}")
    code, out, err = again("--model", "moved-model", "--dataset", "moved-rows.jsonl")
    assert code == 0 and "resumed from" in out, err
    assert (cut / "adapter_model.safetensors").read_bytes() == (
        complete / "run" / "adapter_model.safetensors").read_bytes()  # fmt: skip
    targets = "q_proj", "v_proj"
    for steps, names in (1, targets), (2, targets[::-1]):
        code, out, err = again("--model", "moved-model", "--dataset", "moved-rows.jsonl",
                               "--output_dir", "other", "--max_steps", steps,
                               "--target_modules", *names)  # fmt: skip
        assert code == 0, err
    assert "resumed from" in out


def test_adapter_whose_checkpoints_are_gone_is_not_trained_over(again, cut, complete):
    shutil.copy(complete / "run" / "adapter_model.safetensors", cut)
    for path in cut.glob("checkpoint-*"):
        shutil.rmtree(path)
    kept = {path: path.read_bytes() for path in cut.glob("[!.]*.*") if path.name != "status.json"}
    refused(again("--max_steps", 6), 7, "already contains a trained adapter, but no checkpoint")
    assert all(path.read_bytes() == content for path, content in kept.items())


def test_other_initial_adapter_is_refused(again, cut, complete):
    refused(again("--init_adapter", complete / "run"), 7, "--init_adapter None (now ")


def test_changed_evaluation_rows_are_refused(again, cut):
    """Its best loss would be of other rows."""
    shutil.copy("rows.jsonl", "eval.jsonl")
    shutil.rmtree(cut)
    more = "--eval_dataset", "eval.jsonl", "--max_minutes"
    assert again(*more, 0.05)[0] in (0, EXIT_RESUMABLE)
    with open("eval.jsonl", "a") as file:
        file.write('{"text": "one more"}\n')
    refused(again(*more, 1, "--max_steps", 6), 7, "other evaluation rows: --eval_dataset")


@pytest.mark.parametrize("content", ["text", {"tensor": torch.zeros(3)}], ids=["text", "tensors"])
def test_files_are_as_readable_as_umask_says(content, tmp_path):
    umask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", content)
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)


def test_schedule_that_differs_is_said(again):
    others = {"max_steps": (4, 5), "learning_rate": (0.001, 0.0002),
              "lr_schedule": ("linear", "cosine"), "warmup_fraction": (0.5, 0.03),
              "weight_decay": (0.1, 0.0), "max_grad_norm": (0.5, 1.0)}  # fmt: skip
    code, out, err = again(*(x for name, (now, _) in others.items() for x in (f"--{name}", now)))
    assert code == 0, err
    assert [line for line in out.splitlines() if line.startswith("changed on resume: ")] == [
        f"changed on resume: --{name} {before} -> {now} (from step 3)"
        for name, (now, before) in others.items()]  # fmt: skip


# ------------------------------------------------------------------------------------------------
# One process: when is saved, what is kept, how it ends
# ------------------------------------------------------------------------------------------------


def test_broken_checkpoint_is_put_aside(again, cut, complete):
    """It neither counts as one of those that stay nor comes back."""
    shutil.copytree(cut / "checkpoint-000003", cut / "checkpoint-000009")
    result = again("--keep_checkpoints", 2)
    assert "skipped" in result[1]
    is_whole(result, cut, complete)
    names = sorted(path.name.rpartition("-")[0] for path in cut.glob("checkpoint-*"))
    assert names[-1] == "checkpoint-000009.broken"


def test_metrics_that_the_disk_refuses_at_the_end_are_written_again(
    tmp_path, monkeypatch, capsys
):
    """As NFS says only when a file is closed that there was no room."""
    config = types.SimpleNamespace(max_steps=2, report_to="none")
    run = types.SimpleNamespace(
        config=config, status=Status(), directory=tmp_path, progress=Progress(),
        device=torch.device("cpu"))
    log, path, close = MetricsWriter(run, 0), tmp_path / "metrics.jsonl", os.close

    def close_and_fail(file):
        close(file)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_and_fail)
        log.write_record({"step": 1})
    assert "metrics.jsonl (No space left on device). Training continues" in capsys.readouterr().out
    path.write_text("")  # what was written is gone
    log.write_record({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("error", "code"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 8),
    (dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), 8),
    (MemoryError("1.00 GiB of host memory cannot be pinned"), 8),
    (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), 75),
    (RuntimeError("Connection closed by peer [127.0.0.1]:2000"), 75),
    (RuntimeError("Application timeout caused pair closure"), 75),
    (RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"), 70),
    (KeyError("weight"), 70),
], ids=str)  # fmt: skip
def test_error_of_one_rank_has_the_code_of_its_cause(error, code, capsys):
    with one_process():
        assert Status().end_alone(error, torch.device("cpu")) == code
    words = {8: "rank 0 on", 75: "another process of this run has ended", 70: "a bug in this scr"}
    assert words[code] in capsys.readouterr().err


@pytest.mark.parametrize("n_recomputed, offloads, first", [
    (3, False, "--recompute all"), (4, False, "--offload_activations"),
    (4, True, "a smaller --micro_batch_tokens")])  # fmt: skip
def test_advice_names_nothing_that_the_plan_does_already(n_recomputed, offloads, first):
    """By a flag or by itself."""
    plan = Plan(
        compute_dtype="bfloat16", n_layers=4, shard_group_size=1, reshard_after_forward=True,
        micro_batch_tokens=64, n_recomputed=n_recomputed, save_mid_residual=False,
        reuse_dequantized=False, offload_activations=offloads, offload_params=offloads)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with one_process():
        text = out_of_memory_text(error, plan, torch.device("cpu"), "at step 1")
    assert text.partition("in this order: ")[2].startswith(first)


def test_failed_sync_leaves_no_file_open(tmp_path, monkeypatch):
    def fail(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No space"):
        sync_file(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_run_to_go_on_with_is_the_configurations_or_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, (name, rank) in enumerate((("later-by-name", 4), ("b", 8), ("a", 16))):
        path = tmp_path / "runs" / name / "train_config.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"flags": {"lora_rank": rank}}))
        os.utime(path, (i, i))
    (tmp_path / "mine.yaml").write_text("output_dir: runs/b\nseed: 3\n")
    config = parse_config(["--resume"])
    assert (config.output_dir, config.lora_rank) == ("runs/a", 16)
    config = parse_config(["--config", "mine.yaml", "--resume", "must"])
    assert (config.output_dir, config.lora_rank, config.seed) == ("runs/b", 8, 3)


@pytest.fixture
def begin(complete, tmp_path, run_main, monkeypatch):
    """Function (*more flags): a run of its own, on a copy of the model and the rows."""
    shutil.copytree(complete / "model", tmp_path / "model")
    shutil.copy(complete / "rows.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *more, **how: run_main(*FLAGS, *more, **how)


def kept(run):
    return [int(path.name[-6:]) for path in sorted(run.glob("checkpoint-*"))]


@pytest.mark.parametrize(
    ("every", "steps"), [("0", [5]), ("3", [3, 5]), ("1m", [3, 5]),
                         pytest.param("9m", [5], marks=pytest.mark.slow)]
)
def test_checkpoints_come_as_often_as_save_every_says(every, steps, begin, tmp_path, monkeypatch):
    """On a clock on which a step takes 25 seconds."""
    train_step, passed = train_fsdp_qlora.train_step, [0]

    def slow_step(run, step):
        passed[0] += 25
        return train_step(run, step)

    monkeypatch.setattr(train_fsdp_qlora, "clock", lambda: time.monotonic() + passed[0])
    monkeypatch.setattr(train_fsdp_qlora, "train_step", slow_step)
    code, _, err = begin("--save_every", every)
    assert code == 0, err
    assert kept(tmp_path / "run") == steps


def test_newest_checkpoints_and_the_best_are_kept(begin, tmp_path, monkeypatch):
    """Evaluations find these losses, before the first step and after each."""
    losses = iter([9, 6, 5, 3, 4, 6, 7, 5, 4])
    monkeypatch.setattr(train_fsdp_qlora, "evaluate", lambda run: {"eval_loss": next(losses)})
    code, out, err = begin("--eval_dataset", "rows.jsonl", "--eval_every", 1, "--max_steps", 8,
                           "--keep_checkpoints", 3)  # fmt: skip
    assert code == 0 and kept(tmp_path / "run") == [3, 6, 7, 8], err
    assert "best: step 3, eval loss 3.0000, run/checkpoint-000003" in out


def test_time_limit_ends_a_run_that_the_same_command_goes_on_with(begin, tmp_path, complete):
    for step in 1, 2, 3, 4:
        code, _, err = begin("--max_minutes", 0.0001)
        assert code == EXIT_RESUMABLE and err == (
            f"stopped: --max_minutes 0.0001 are over, after step {step};"
            f" checkpoint-{step:06d} is saved; the same command resumes it\n")  # fmt: skip
    code, _, err = begin("--max_minutes", 0.0001)
    if code:  # asked to stop in the last step, before the adapter is written
        code, _, err = begin("--max_minutes", 0.0001)
    is_whole((code, _, err), tmp_path / "run", complete)


def test_evaluation_that_has_ended_is_not_thrown_away(begin, monkeypatch):
    """By a signal that came in its last rows."""
    micro_steps_of, evaluate = document_losses.micro_steps_of, train_fsdp_qlora.evaluate

    def evaluate_signalled(run):
        def signalled(*args):
            run.status.stop_reason = "SIGTERM"
            return micro_steps_of(*args)

        with monkeypatch.context() as patch:
            patch.setattr(document_losses, "micro_steps_of", signalled)
            return evaluate(run)

    monkeypatch.setattr(train_fsdp_qlora, "evaluate", evaluate_signalled)
    code, out, err = begin("--eval_dataset", "rows.jsonl", "--eval_every", 0)
    assert code == EXIT_RESUMABLE and "eval 0/" in out
    assert err.startswith("stopped: SIGTERM, after step 1; checkpoint-000001 is saved")


def test_time_limit_below_one_evaluation_is_not_tried_for_ever(begin, tmp_path):
    flags = "--eval_dataset", "rows.jsonl", "--eval_every", 2, "--max_minutes", 0.0001
    code, _, err = begin(*flags)
    assert code == 2 and err == (
        "error: --max_minutes 0.0001 are over before the evaluation after step 0 was done, and the"
        " next start would end there, too. Use more minutes, or evaluate fewer rows\n")  # fmt: skip


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.post_attention_layernorm.weight",
             "model.layers.1.self_attn.k_proj.weight"])  # fmt: skip
def test_weight_that_is_not_finite_is_named(name, begin, tmp_path):
    def spoil(weight):
        weight.view(-1)[-7] = float("nan")
        return weight

    edit_tensor(name, spoil)(tmp_path / "model")
    refused(begin(), 3, f"the model's {name} has values that are not finite")
    assert not (tmp_path / "run").exists()


def test_gradient_of_zero_ends_the_run(begin, tmp_path):
    code, _, err = begin("--learning_rate", 1e6)
    assert code == EXIT_DIVERGED and err.startswith("error: step 2: "), err
    assert "gradient norm of exactly 0" in err and kept(tmp_path / "run") == [1]


def test_target_modules_are_sorted(complete):
    for path in (complete / "run").rglob("adapter_config.json"):
        names = json.loads(path.read_text())["target_modules"]
        assert names == sorted(names) and len(names) == 7


# ------------------------------------------------------------------------------------------------
# One process: whose directory it is, and what others do to it
# ------------------------------------------------------------------------------------------------


def contents(directory):
    return {path.relative_to(directory): path.is_file() and path.read_bytes()
            for path in directory.rglob("*")}  # fmt: skip


def move(run):
    run.rename(run.with_name("kept"))


def move_and_make(run):
    move(run)
    run.mkdir()
    (run / "notes.txt").write_text("mine")


def take(run):
    (run / ".lock").unlink()
    (run / ".lock").write_text("another process")
    (run / "status.json").write_text('{"state": "training"}')


def at_step(number, monkeypatch, do):
    """Have do(run) done before that step."""
    train_step = train_fsdp_qlora.train_step

    def do_and_step(run, step):
        if step == number:
            do(run)
        return train_step(run, step)

    monkeypatch.setattr(train_fsdp_qlora, "train_step", do_and_step)


@pytest.mark.parametrize("what, signalled", [
    pytest.param(what, signalled, marks=[pytest.mark.slow] * (
        (what, signalled) not in ((move, True), (take, False))))
    for what in (move, move_and_make, take, shutil.rmtree) for signalled in (False, True)])
def test_run_that_has_lost_its_directory_writes_nothing_there(
    what, signalled, begin, tmp_path, monkeypatch
):
    before = []

    def lose(run):
        what(run.directory)
        before.append(contents(run.directory))
        run.status.stop_reason = "SIGTERM" if signalled else None

    at_step(5 if signalled else 3, monkeypatch, lose)
    line = refused(begin("--output_dir", "run"), 5, ".lock is not this run's any more", "it is in ")
    assert before == [contents(tmp_path / "run")]
    saved = load_file(Path(line.rpartition("it is in ")[2]) / "adapter_model.safetensors")
    assert any(value.any() for name, value in saved.items() if "lora_B" in name)


def test_directory_of_a_run_that_has_begun_is_never_removed(begin, tmp_path, monkeypatch):
    def stop(run):
        (run.directory / "train_config.json").unlink()
        run.status.stop_reason = "SIGTERM"

    at_step(2, monkeypatch, stop)
    assert begin()[0] == EXIT_RESUMABLE
    verify_checkpoint(tmp_path / "run" / "checkpoint-000002")


def test_nothing_is_written_through_links(begin, tmp_path):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.write_text("not the run's")
    (tmp_path / "elsewhere").mkdir()
    run.symlink_to("elsewhere")  # the user's own
    names = ("tokenizer.json", "loss.png", "status.json", "metrics.jsonl", "adapter_config.json",
             ".loss.png.part", ".tokenizer.part", ".train_config.json.part", ".metrics.jsonl.part",
             ".adapter_model.safetensors.part", "checkpoint-000002")  # fmt: skip
    for name in names:
        (run / name).symlink_to(outside)
    (run / ".lock").symlink_to(outside)
    refused(begin("--resume", "never"), 2, "--output_dir run", ".lock")
    (run / ".lock").unlink()
    (run / "adapter_config.json").unlink()  # else it holds a run already
    (run / "checkpoint-000002").unlink()
    (run / ".checkpoint-000002.part").symlink_to(tmp_path)
    code, _, err = begin(draws=True)
    assert code == 0, err
    assert outside.read_text() == "not the run's" and run.is_symlink()
    assert not [path for path in run.rglob("*") if path.is_symlink()]
    assert {path.name for path in run.glob(".*")} == {".lock"}


@pytest.mark.parametrize("target", ["home", "nowhere"])
def test_partial_directory_is_never_a_link(target, tmp_path):
    (tmp_path / "home" / "below").mkdir(parents=True)
    (tmp_path / "home" / "file").write_text("mine")
    before, partial = contents(tmp_path / "home"), tmp_path / ".merged.partial"
    partial.symlink_to(target)
    for _ in range(2):  # the second finds one that a dead process has left
        made, lock = open_partial(tmp_path / "merged")
        lock.close()
        assert made == partial and not partial.is_symlink()
        assert [path.name for path in partial.iterdir()] == [".lock"]
        (partial / "link").symlink_to(tmp_path / "home")
        (partial / "directory").mkdir()
    assert contents(tmp_path / "home") == before


def test_end_is_told_by_status_on_a_full_disk(tmp_path):
    with small_disk(tmp_path, "64k"):
        status = Status()
        status.directory, status.may_write = tmp_path, True
        status.write("training")
        with contextlib.suppress(OSError), (tmp_path / "filler").open("wb", 0) as filler:
            while True:
                filler.write(bytes(4096))
        status.write("failed", 5, "the disk is full, " * 9)
        status.write("failed", 5, "full")
        assert read_json(tmp_path / "status.json")["message"] == "full"
        assert {path.name for path in tmp_path.iterdir()} == {"filler", "status.json"}


def test_metrics_that_cannot_be_written_to_the_end_are_told_there(begin, tmp_path, monkeypatch):
    at_step(3, monkeypatch, lambda run: ((run.directory / "metrics.jsonl").unlink(),
                                         (run.directory / "metrics.jsonl").mkdir()))  # fmt: skip
    code, out, err = begin()
    assert code == 0, err
    assert "the last 3 lines of run/metrics.jsonl are lost: Is a directory" in out


@pytest.mark.slow
def test_adapter_is_saved_elsewhere_from_a_directory_of_any_name(begin, tmp_path, monkeypatch):
    name = "n" * 250
    at_step(5, monkeypatch, lambda run: shutil.rmtree(run.directory))
    line = refused(begin("--output_dir", name), 5, "it is in ")
    assert Path(line.rpartition("it is in ")[2], "adapter_config.json").is_file()


def test_adapter_that_no_disk_takes_leaves_nothing_behind(tmp_path, monkeypatch):
    """And one that --output_dir takes needs no temporary directory."""
    (tmp_path / "run").mkdir()
    status = types.SimpleNamespace(check_lock=lambda: None, checkpoint=None)
    lora_config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    job = types.SimpleNamespace(lora_config=lora_config)
    run = types.SimpleNamespace(directory=tmp_path / "run", status=status, job=job)
    weights, limits = {"x": torch.ones(9999)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    for status.checkpoint, end in (None, "it is lost"), ("checkpoint-000002", "latest state"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
        try:
            with pytest.raises(OSError, match=f"File too large.*File too large.*gone.*{end}$"):
                checkpoints.write_final_adapter(run, weights, {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert [*tmp_path.rglob("*")] == [tmp_path / "run"]
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("asked for"))
    checkpoints.write_final_adapter(run, weights, {})
    assert torch.equal(load_file(tmp_path / "run/adapter_model.safetensors")["x"], weights["x"])


def test_other_versions_are_told_and_the_earlier_ones_kept(again, cut, complete, monkeypatch):
    versions = train_fsdp_qlora.VERSIONS
    edit_json(cut / "train_config.json", lambda run: run["versions"].update(torch="1.0"))
    result = again()
    assert f"changed on resume: torch 1.0 -> {versions['torch']} (from step 3)\n" in result[1]
    is_whole(result, cut, complete)
    run = read_json(cut / "train_config.json")
    assert run["versions"] == versions
    assert run["earlier_versions"] == [{"until_step": 3, **versions, "torch": "1.0"}]


def test_damaged_adapter_of_a_complete_run_is_saved_again(
    complete, tmp_path, run_main, monkeypatch
):
    run = Path(shutil.copytree(complete, tmp_path / "copy")) / "run"
    monkeypatch.chdir(run.parent)
    adapter, sha = run / "adapter_model.safetensors", digest(run / "adapter_model.safetensors")
    assert read_json(run / "train_config.json")["adapter_sha256"] == sha
    os.truncate(adapter, adapter.stat().st_size // 2)
    result = run_main(*FLAGS)
    assert "run/adapter_model.safetensors has another SHA-256" in result[1]
    is_whole(result, run, complete)
    (run / "adapter_config.json").unlink()
    is_whole(run_main(*FLAGS), run, complete)
    before = contents(run)  # and other flags do nothing to it
    refused(run_main(*FLAGS, "--learning_rate", 1e-3), 7, "--learning_rate 0.0002 (now 0.001)",
            "complete run of 5 steps")  # fmt: skip
    after = contents(run)
    changed = {str(path) for path in {*before, *after} if before.get(path) != after.get(path)}
    assert changed <= {".lock", "status.json"}


@pytest.mark.parametrize("name", [
    pytest.param("checkpoint.json", marks=pytest.mark.slow), "optimizer.safetensors"])
def test_checkpoint_that_cannot_be_read_now_stays(name, again, cut, complete, monkeypatch):
    """A disk that fails once."""
    read_text = Path.read_text

    def fail(path, *args, **kwargs):
        if path.parent.name == "checkpoint-000003" and path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return read_text(path, *args, **kwargs)

    def fail_digest(path):
        return fail(path) and "" if path.name == name else digest(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", fail)
        patch.setattr(checkpoints, "digest", fail_digest)
        refused(again(), 7, "run/checkpoint-000003 cannot be read now", "Input/output error")
    is_whole(again(), cut, complete)
    assert not list(cut.glob("*.broken*"))


# ------------------------------------------------------------------------------------------------
# One process: signals, deadlines, the time of a step, a run that learns nothing
# ------------------------------------------------------------------------------------------------


def test_second_signal_ends_the_run_at_once(monkeypatch, capsys):
    left, status = [], Status()
    monkeypatch.setattr(status, "exit_now", lambda code, message: left.append((code, message)))
    status.phase = "training"
    status.on_signal("SIGTERM")
    status.on_signal("SIGTERM")  # torchrun's, of the same
    assert left == [] and status.stop_reason == "SIGTERM"
    status.signal_time -= 4
    status.on_signal("SIGINT")
    assert left == [(EXIT_RESUMABLE, "SIGINT again; the same command resumes it")]


def test_hangup_under_nohup_is_not_heard():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with watch_process() as status:
            status.phase = "training"
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGUSR1)  # which is heard
            wait_until(lambda: status.stop_reason, 5)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_are_harmless_until_the_watch_is_closed(monkeypatch):
    """torchrun sends SIGTERM as soon as another rank has stopped."""
    before, seen = signal.getsignal(signal.SIGTERM), []
    with watch_process() as status:
        monkeypatch.setattr(status.lock, "close", lambda: seen.append(
            signal.getsignal(signal.SIGTERM)))
    assert len(seen) == 1 and seen != [before] and signal.getsignal(signal.SIGTERM) == before


def test_older_checkpoints_stay_where_the_newest_is_not_whole(again, cut, monkeypatch):
    write_checkpoint = checkpoints.write_checkpoint

    def write_damaged(run, step, *args):
        write_checkpoint(run, step, *args)
        os.truncate(checkpoint_path(run.directory, step) / "optimizer.safetensors", 9)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_damaged)
    code, out, err = again("--keep_checkpoints", 2)
    words = "older checkpoints were not removed: run/checkpoint-000004 is incomplete"
    assert code == 0 and words in out, err
    assert kept(cut) == [1, 2, 3, 4, 5]


@pytest.fixture
def passed(monkeypatch):
    """[seconds] by which the clocks of the script and of deadlines are fast."""
    passed = [0]
    now = lambda: time.monotonic() + passed[0]  # noqa: E731
    monkeypatch.setattr(train_fsdp_qlora, "clock", now)
    clock = types.SimpleNamespace(**{**vars(time), "monotonic": now})
    monkeypatch.setattr(lifecycle, "time", clock)
    return passed


def test_failed_save_is_tried_again_by_the_clock(begin, tmp_path, monkeypatch, passed):
    write_checkpoint, tried = checkpoints.write_checkpoint, []

    def fail_once(run, step, *args):
        tried.append(step)
        if len(tried) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_checkpoint(run, step, *args)

    monkeypatch.setattr(checkpoints, "write_checkpoint", fail_once)
    monkeypatch.setattr(train_fsdp_qlora, "RETRY_SECONDS", 30)
    train_step = train_fsdp_qlora.train_step

    def slow_step(run, step):
        passed[0] += 20
        return train_step(run, step)

    monkeypatch.setattr(train_fsdp_qlora, "train_step", slow_step)
    code, _, err = begin("--save_every", "1m", "--max_steps", 7)
    assert code == 0, err
    assert tried == [3, 5, 7]  # after 60 seconds, 30 later, and at the end


def fail_to_save(steps, error, monkeypatch):
    """Saves of these steps raise this error."""
    write_checkpoint = checkpoints.write_checkpoint

    def write_or_fail(run, step, *args):
        if step in steps:
            raise error
        write_checkpoint(run, step, *args)

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_or_fail)


@pytest.mark.parametrize("steps, stop_at, ends", [
    ([1, 2], 2, "no checkpoint is saved, and the same command starts again from the beginning"),
    ([2, 3], 3, "its checkpoint could not be saved; the same command resumes it from"
                " checkpoint-000001"),
    ([5], None, "latest checkpoint: checkpoint-000004")])  # fmt: skip
def test_end_without_its_last_checkpoint_says_so(steps, stop_at, ends, begin, monkeypatch):
    fail_to_save(steps, OSError(errno.ENOSPC, "No space left on device"), monkeypatch)
    at_step(stop_at, monkeypatch, lambda run: setattr(run.status, "stop_reason", "SIGTERM"))
    code, out, err = begin()
    if stop_at:
        assert (code, err) == (EXIT_RESUMABLE, f"stopped: SIGTERM, after step {stop_at}; {ends}\n")
    else:
        assert code == 0 and f"but its checkpoint is not; {ends}\n" in out, err


def test_bug_while_saving_is_no_full_disk(begin, monkeypatch):
    fail_to_save([2], KeyError("weight"), monkeypatch)
    code, out, err = begin()
    assert code == 70 and "a bug in this script: KeyError: 'weight'" in err and "Traceback" in err
    assert "could not save" not in out


@pytest.mark.slow
def test_evaluations_and_saves_extend_the_deadline_and_are_no_time_of_a_step(
    begin, tmp_path, monkeypatch, passed
):
    """Each takes 400 seconds, of the 600 that a deadline gives."""
    deadlines, statuses, select = [], [], document_losses.make_micro_batch

    def slow(module, name):
        function = getattr(module, name)

        def work(*args):
            passed[0] += 400
            return function(*args)

        monkeypatch.setattr(module, name, work)

    def watched(rows, micro_step, model, step_seed=None, **options):
        if step_seed is None:  # of an evaluation
            deadlines.append(statuses[0].deadline - lifecycle.time.monotonic())
        return select(rows, micro_step, model, step_seed, **options)

    enter = lifecycle.Status.enter
    monkeypatch.setattr(lifecycle.Status, "enter", lambda status, phase: (
        statuses.append(status), enter(status, phase)))

    slow(train_fsdp_qlora, "evaluate"), slow(checkpoints, "write_checkpoint")
    monkeypatch.setattr(document_losses, "make_micro_batch", watched)
    code, _, err = begin("--eval_dataset", "rows.jsonl", "--eval_every", 2)
    assert code == 0, err
    assert len(deadlines) > 3 and min(deadlines) > 500
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert max(row["seconds"] for row in rows if "loss" in row) < 400


@pytest.mark.parametrize(("losses", "largest", "ends"), [
    ([3, 5, 4], 1e4, True), ([3, 5, 4], 999, False), ([3, 2, 9], 1e4, False)])  # fmt: skip
def test_run_learns_nothing_where_losses_stay_high_and_weights_are_large(losses, largest, ends):
    progress, steps = Progress(), (1, 20, 70)
    why = [why_diverged(step, loss, 1.0, 10, progress, lambda: largest)
           for step, loss in zip(steps, losses)]  # fmt: skip
    assert why[:2] == ["", ""] and bool(why[2]) == ends


@pytest.mark.parametrize("saturates, largest, ends", [
    (False, 0.1, True), (True, 0.1, False), (True, 1e6, True)])  # fmt: skip
def test_gradient_of_zero_is_right_where_a_loss_saturates(saturates, largest, ends):
    progress = Progress()
    why = why_diverged(2, 0.4, 0.0, 1, progress, lambda: largest, saturates)
    assert ("gradient norm of exactly 0" in why) == ends


def test_lowest_loss_may_be_0():
    progress = Progress()
    for step, loss in (1, 3.0), (20, 0.0), (70, 9.0):
        assert not why_diverged(step, loss, 1.0, 10, progress, lambda: 1e4)
    assert progress == Progress(first_loss=3.0, lowest_loss=0.0)
