"""The assembled scripts, alone in an empty directory, do what the recipe and its package do: train,
are killed, resume, and merge, by the commands that a user types."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEVICE, needs_ranks

import merge_adapters

FLAGS = ["--max_steps", "16", "--save_every", "2", "--batch_size", "4", "--max_seq_len", "64",
         "--compute_dtype", "float32", "--lora_dropout", "0.1", "--report_to", "none",
         "--output_dir", "run"]  # fmt: skip
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def alone(standalone, tmp_path, monkeypatch):
    """An empty directory, the current one, but for the two files."""
    directory = Path(shutil.copytree(standalone, tmp_path / "alone"))
    monkeypatch.chdir(directory)
    return directory


def command(nproc):
    python = [sys.executable]
    if nproc > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*python, "train_fsdp_qlora.py", *FLAGS]


def kill_after_first_checkpoint(nproc):
    """SIGKILL of the only process, or of a rank, whose launcher then ends the other."""
    with Path("../killed").open("w") as log:
        started = subprocess.Popen(command(nproc), env=ALONE, stdout=log, stderr=log,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
    until = time.monotonic() + 120
    while not list(Path().glob("run/checkpoint-*")):
        assert started.poll() is None and time.monotonic() < until, Path("../killed").read_text()
        time.sleep(0.01)
    ranks = [started.pid]
    if nproc > 1:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
        ranks = list(map(int, children.split()))
        assert len(ranks) == nproc
    os.kill(ranks[-1], signal.SIGKILL)
    assert started.wait(60) == (1 if nproc > 1 else -signal.SIGKILL)
    assert not Path("run/adapter_model.safetensors").exists(), "it was complete before the kill"


@pytest.mark.parametrize("nproc", [1, 2])
def test_assembled_files_train_resume_and_merge_alone(nproc, alone, run_jobs, tmp_path):
    """On a CPU the resumed run's adapter has the bytes of an undisturbed run of the recipe on its
    package, and so has what is merged, by the command that the run has told."""
    needs_ranks(nproc)
    kill_after_first_checkpoint(nproc)
    done = subprocess.run(command(nproc), env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "resumed from run/checkpoint-0000" in done.stdout
    merge = done.stdout.splitlines()[-1]
    assert " merge_adapters.py --adapter_dir run " in merge
    names = ["adapter_model.safetensors"]
    if nproc == 2:  # once is enough
        merged = subprocess.run(shlex.split(merge), env=ALONE, capture_output=True, text=True)
        assert merged.returncode == 0, merged.stderr
        names.append("merged/model.safetensors")
    assert sorted(os.listdir()) == ["merge_adapters.py", "run", "train_fsdp_qlora.py"]
    assert all((alone / "run" / name).is_file() for name in names)
    if DEVICE == "cuda":  # where attention's backward adds in any order
        return
    house = tmp_path / "house"
    house.mkdir()
    run_jobs(nproc, [{"argv": FLAGS}], cwd=house)
    if nproc == 2:
        run = str(house / "run")
        merge_adapters.main(["--adapter_dir", run, "--output_dir", f"{run}/merged"])
    for name in names:
        assert (alone / "run" / name).read_bytes() == (house / "run" / name).read_bytes(), name
