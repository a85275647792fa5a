"""The structure of the package; and the scripts train, are killed, resume and merge in an empty
directory, by the commands that a user types."""

import ast
import graphlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEVICE, needs_ranks

import merge_adapters

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_fsdp_qlora", "merge_adapters")
UPPER = {*SCRIPTS, "tests", "benchmarks"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "fsdp_qlora").rglob("*.py"))
    if path.name != "__init__.py"
}
SOURCES = {**{name: ROOT / f"{name}.py" for name in SCRIPTS}, **MODULES}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imported(tree):
    """What a file imports, for annotations and inside functions too: {"torch",
    "fsdp_qlora.quant.nf4", ..}."""
    nodes = list(ast.walk(tree))
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    modules = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    deeper = {f"{node.module}.{a.name}" for node in nodes if isinstance(node, ast.ImportFrom)
              for a in node.names}  # from fsdp_qlora.run import checkpoints
    return names | modules | deeper & set(SOURCES)


def test_imports_form_no_cycle():
    graph = {name: sorted(imported(tree) & set(SOURCES)) for name, tree in TREES.items()}
    assert sum(map(len, graph.values())) > len(MODULES)  # else this reads nothing
    try:
        list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as e:
        pytest.fail(" imports ".join(reversed(e.args[1])))


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_imported_is_there(name):
    """For annotations alone, too: to mypy a module that is nowhere is one of any types."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("fsdp_qlora."):
            there = node.module in MODULES or all(
                f"{node.module}.{alias.name}" in MODULES for alias in node.names)
            assert there, f"{name}, line {node.lineno}"


def test_a_folder_imports_only_those_above_it_in_the_list_of_all_files():
    text = (ROOT / "docs" / "internals.md").read_text().partition("## All files")[2]
    named = re.findall(r"^fsdp_qlora/([\w/]+)\.py ", text, re.M)
    assert sorted(named) == sorted(name[11:].replace(".", "/") for name in MODULES)
    folders = list(dict.fromkeys(name.rpartition("/")[0] for name in named))
    for name in MODULES:
        own = name[11:].replace(".", "/").rpartition("/")[0]
        for other in imported(TREES[name]) & set(MODULES):
            folder = other[11:].replace(".", "/").rpartition("/")[0]
            assert folders.index(folder) <= folders.index(own), f"{name} imports {other}"


@pytest.mark.parametrize("name", MODULES)
def test_no_module_imports_what_stands_above_the_package(name):
    above = {m for m in imported(TREES[name]) if m is None or m.split(".")[0] in UPPER}
    assert not above, f"{name} imports {above}; None is a relative import"


def test_merge_imports_nothing_of_training():
    """So that it can be read, and copied, without it."""
    code = "import sys, merge_adapters; print(*sorted(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    names = run.stdout.split()
    assert "fsdp_qlora.pretrained.stored_weights" in names and "fsdp_qlora.run.run" not in names
    of_training = "fsdp_qlora.layer.", "fsdp_qlora.kernels.", "fsdp_qlora.planner."
    assert [name for name in names if name.startswith(of_training)] == []


def test_a_folder_of_modules_holds_no_code_of_its_own():
    """One file leaves __init__.py out."""
    folders = {path.parent for path in MODULES.values()}
    assert len(folders) > 4
    for folder in (ROOT / "fsdp_qlora", *folders):
        body = ast.parse((folder / "__init__.py").read_text()).body
        assert not body or len(body) == 1 and isinstance(body[0], ast.Expr), folder


# Each module in a process of its own that has the libraries already, but nothing of the package.
IMPORT_EACH = """
import importlib, os, sys
import bitsandbytes, peft, torch, transformers
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
            above = {above} & set(sys.modules)
            assert not above, above
        except BaseException as e:
            print(f"{{name}}: {{type(e).__name__}}: {{e}}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.slow
def test_each_module_can_be_imported_alone():
    names = random.sample(list(MODULES), len(MODULES))
    done = subprocess.run([sys.executable, "-c", IMPORT_EACH.format(above=UPPER), *names],
                          cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# The scripts at work, by the commands that a user types.
FLAGS = ["--save_every", "2", "--batch_size", "4", "--max_seq_len", "64",
         "--compute_dtype", "float32", "--lora_dropout", "0.1", "--report_to", "none",
         "--output_dir", "run"]  # fmt: skip
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty directory, the current one."""
    directory = tmp_path / "empty"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def flags_of(nproc):
    """Two processes are killed in between."""
    return [*FLAGS, "--max_steps", "16" if nproc > 1 else "4"]


def command(nproc):
    python = [sys.executable]
    if nproc > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*python, str(ROOT / "train_fsdp_qlora.py"), *flags_of(nproc)]


def kill_after_first_checkpoint(nproc):
    """SIGKILL of a rank, whose launcher then ends the other."""
    with Path("../killed").open("w") as log:
        started = subprocess.Popen(command(nproc), env=ALONE, stdout=log, stderr=log,
                                   stdin=subprocess.DEVNULL)  # fmt: skip
    until = time.monotonic() + 120
    while not list(Path().glob("run/checkpoint-*")):
        assert started.poll() is None and time.monotonic() < until, Path("../killed").read_text()
        time.sleep(0.01)
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    ranks = list(map(int, children.split()))
    assert len(ranks) == nproc
    os.kill(ranks[-1], signal.SIGKILL)
    assert started.wait(60) == 1
    assert not Path("run/adapter_model.safetensors").exists(), "it was complete before the kill"


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.chaos)])
def test_scripts_train_resume_and_merge_by_the_command_line(nproc, empty, run_jobs, tmp_path):
    """On a CPU the adapter, with two ranks that of a resumed run, has the bytes of an undisturbed
    run, and so has what is merged, by the command that the run printed."""
    needs_ranks(nproc)
    if nproc > 1:
        kill_after_first_checkpoint(nproc)
    done = subprocess.run(command(nproc), env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("resumed from run/checkpoint-0000" in done.stdout) == (nproc > 1)
    assert done.stderr.count("loading libraries") == 1  # one rank says so
    merge = done.stdout.splitlines()[-1]
    assert "merge_adapters.py --adapter_dir run " in merge
    names = ["adapter_model.safetensors"]
    if nproc == 1:  # once is enough
        merged = subprocess.run(shlex.split(merge), env=ALONE, capture_output=True, text=True)
        assert merged.returncode == 0, merged.stderr
        assert "%|" not in merged.stderr  # a progress bar, in a pipe
        assert "gemm_4bit" not in merged.stdout + merged.stderr  # bitsandbytes on a CPU
        names.append("merged/model.safetensors")
    assert os.listdir() == ["run"]
    assert all((empty / "run" / name).is_file() for name in names)
    if DEVICE == "cuda":  # where attention's backward adds in any order
        return
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    run_jobs(nproc, [{"argv": flags_of(nproc)}], cwd=checkout)
    if nproc == 1:
        run = str(checkout / "run")
        merge_adapters.main(["--adapter_dir", run, "--output_dir", f"{run}/merged"])
    for name in names:
        assert (empty / "run" / name).read_bytes() == (checkout / "run" / name).read_bytes(), name
