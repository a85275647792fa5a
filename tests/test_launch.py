"""The last lines of the screen, where a run of two ranks ends before its time: the real make and
the real torchrun, on a copy of the scripts."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, needs_ranks

from fsdp_qlora.exit_codes import EXIT_BUG, EXIT_RESUMABLE

MAKES = re.compile(r"make: \*\*\* \[Makefile:\d+: train\] Error (\d+)")


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what `make train` needs, with this Python in the place of a new .venv."""
    needs_ranks(2)
    directory = tmp_path_factory.mktemp("tree")
    for name in "Makefile", "requirements.txt", "train_fsdp_qlora.py":
        shutil.copy(ROOT / name, directory)
    shutil.copytree(ROOT / "fsdp_qlora", directory / "fsdp_qlora",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    python = directory / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (directory / "venv" / "ready").touch()
    return directory


@pytest.fixture
def start(tree, tmp_path):
    """Function (*flags): `make train` of two ranks with an --output_dir, as by a terminal: a
    process group of its own, stdout and stderr on one screen."""
    started = []

    def start(*flags):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        flags = " ".join(map(str, flags))
        make = ["make", "train", "VENV=venv", "NPROC=2", f"OUT={tmp_path}/run", f"ARGS={flags}"]
        with (tmp_path / "screen").open("w") as screen:
            started.append(subprocess.Popen(make, cwd=tree, env=env, stdin=subprocess.DEVNULL,
                                            stdout=screen, stderr=screen,
                                            start_new_session=True))  # fmt: skip
        return started[-1]

    yield start
    for make in started:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)  # the ranks then end by themselves


def wait_for_steps(directory, n):
    until = time.monotonic() + 60
    path = directory / "run" / "metrics.jsonl"
    while not (path.is_file() and path.read_text().count("\n") >= n):
        assert time.monotonic() < until
        time.sleep(0.1)


def end(make, directory):
    """The screen's lines, without make's, and the exit code that make's shows, which is the last;
    of torchrun there are none."""
    make.wait(180)
    *lines, last = (directory / "screen").read_text().splitlines()
    assert MAKES.fullmatch(last), last
    assert not any("ChildFailedError" in line or "elastic" in line for line in lines)
    return lines, int(MAKES.fullmatch(last)[1])


@pytest.mark.slow
def test_a_wrong_flag_is_the_last_word(start, tmp_path):
    make = start("--learning_rat", 3)
    lines, code = end(make, tmp_path)
    assert (code, make.returncode) == (2, 2)
    assert lines[-1].startswith("error: unrecognized arguments: --learning_rat: did you mean")
    assert "Traceback" not in "".join(lines)


@pytest.mark.slow
def test_ctrl_c_saves_and_how_to_resume_is_the_last_word(start, tmp_path):
    """As of a terminal: make and all that it started get the signal, the ranks by the launcher."""
    make = start("--max_steps", 100_000)
    wait_for_steps(tmp_path, 2)
    os.killpg(make.pid, signal.SIGINT)
    lines, code = end(make, tmp_path)
    assert code == EXIT_RESUMABLE and make.returncode != 0
    assert re.fullmatch(r"stopped: SIGINT, after step \d+; checkpoint-\d+ is saved; the same"
                        " command resumes it", lines[-1])  # fmt: skip
    assert "Traceback" not in "".join(lines)


@contextlib.contextmanager
def edited(script, old, new):
    """The script with `new` in place of `old`, until the `with` body ends."""
    whole = script.read_text()
    assert old in whole
    try:
        script.write_text(whole.replace(old, new))
        yield
    finally:
        script.write_text(whole)


@pytest.mark.slow
def test_bug_of_a_rank_keeps_its_traceback(start, tree, tmp_path):
    line = "    rows, micro_batches = run.prefetched or rows_of_step(run, step)\n"
    fault = '    if dist.get_rank() == 1 and step == 2:\n        raise KeyError("planted")\n'
    with edited(tree / "train_fsdp_qlora.py", line, fault + line):
        make = start("--max_steps", 4)
        lines, code = end(make, tmp_path)
    assert (code, make.returncode) == (EXIT_BUG, 2)
    at = lines.index("KeyError: 'planted'")
    assert any('train_fsdp_qlora.py", line' in line for line in lines[at - 6 : at])
    pattern = r"error: rank 1 on \S+ hit an unexpected error, a bug in this script: KeyError"
    said = [line for line in lines if re.match(pattern, line)]
    # rank 0 may still log the step before, and say that it ends
    after = lines[lines.index(said[0]) + 1 :] if len(said) == 1 else said
    assert [line[:8] for line in after] in ([], ["stopped:"], ["step 1/4", "stopped:"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_rank_is_named(number, start, tmp_path):
    """Which cannot say so itself: by the kernel that is short of memory, or while it starts."""
    make = start("--max_steps", 100_000)
    if number == signal.SIGKILL:
        wait_for_steps(tmp_path, 2)
    until = time.monotonic() + 60
    while not (pid := pid_of_rank_1(tmp_path)):
        assert time.monotonic() < until
    os.kill(pid, number)
    lines, code = end(make, tmp_path)
    if number == signal.SIGTERM:
        assert code == EXIT_RESUMABLE and lines[-1].startswith(
            "stopped: SIGTERM before training began; "
        )
    else:
        assert code == 128 + number
        assert lines[-1].startswith("error: rank 1 was killed by SIGKILL, as by the kernel")


def pid_of_rank_1(directory):
    """Of the run in this directory; None: not started yet."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (str(directory).encode() in (process / "cmdline").read_bytes()
                    and b"RANK=1" in (process / "environ").read_bytes().split(b"\0")):  # fmt: skip
                return int(process.name)


@pytest.mark.slow
def test_a_stop_by_the_clock_is_the_last_word(start, tmp_path):
    make = start("--max_steps", 100_000, "--max_minutes", 0.3)
    lines, code = end(make, tmp_path)
    assert (code, make.returncode) == (EXIT_RESUMABLE, 2)
    assert lines[-1].startswith("stopped: --max_minutes 0.3 are over, after step ")


@pytest.mark.slow
def test_a_rank_that_ends_slowly_does_not_change_the_exit_code(start, tree, tmp_path):
    """torchrun sends it SIGTERM, because the other has stopped, when it no longer hears signals."""
    slow = ('    code = main()\n    if os.environ["RANK"] == "0":\n        time.sleep(3)\n'
            "    end_process(code)\n")  # fmt: skip
    with edited(tree / "train_fsdp_qlora.py", "    end_process(main())\n",
                f"    import os, time\n{slow}"):  # fmt: skip
        lines, code = end(start("--max_steps", 100_000, "--max_minutes", 0.3), tmp_path)
    assert code == EXIT_RESUMABLE
    assert lines[-1].startswith("stopped: --max_minutes 0.3 are over, after step ")


@pytest.mark.slow
def test_report_of_plain_torchrun_ends_with_the_reason(tree):
    """Its thirty lines come, and the line of the rank is the last that has words."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "train_fsdp_qlora.py", "--dataset", "none.jsonl"]  # fmt: skip
    done = subprocess.run(command, cwd=tree, stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=60)  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1 and len(said) == 1 and "--dataset none.jsonl" in said[0]
    *_, last, rule = done.stderr.splitlines()
    assert last.strip() == f"traceback : {said[0]}" and set(rule) == {"="}


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("script", ["train_fsdp_qlora.py", "minimal_fsdp_qlora.py"])
def test_torch_finds_its_allocators_settings_when_it_is_imported(script, name):
    """Later it does not read them again: 3 of 22.5 GiB were then in gaps between tensors. A user's
    own settings stay, under the older name too, which torch reads first."""
    watch = f"""
import os, runpy, sys
class Watch:
    def find_spec(self, name, *_):
        if name == "torch":
            settings = (os.environ.get(f"PYTORCH_{{name}}ALLOC_CONF") for name in ("CUDA_", ""))
            sys.exit("setting: " + next(filter(None, settings), "none"))
sys.meta_path.insert(0, Watch())
sys.argv = [{script!r}, "--model", "m", "--dataset", "d", "--output_dir", "o"]
runpy.run_path({str(ROOT / script)!r}, run_name="__main__")
"""
    env = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    env |= {name: "max_split_size_mb:512"} if name else {}
    run = subprocess.run([sys.executable, "-c", watch], env=env, capture_output=True, text=True)
    want = "max_split_size_mb:512" if name else "expandable_segments:True"
    assert f"setting: {want}" in run.stderr
