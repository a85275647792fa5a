"""The structure of the package; `make standalone` makes one file of each script, which trains, is
killed, resumes and merges alone in an empty directory, by the commands that a user types."""

import ast
import graphlib
import os
import random
import re
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
from standalone import for_types

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ("train_fsdp_qlora", "merge_adapters")
THE_JOB = ("train_fsdp_qlora", "finetune")  # may be longer than other functions
UPPER = {*SCRIPTS, "standalone", "tests", "benchmarks"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted((ROOT / "fsdp_qlora").rglob("*.py"))
    if path.name != "__init__.py"
}
SOURCES = {**{name: ROOT / f"{name}.py" for name in SCRIPTS}, **MODULES}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def imported(tree):
    """What a file imports, inside functions too: {"torch", "fsdp_qlora.quant.nf4", ..}; not what
    it imports for annotations alone."""
    nodes, waiting = [], [tree]
    while waiting:
        nodes.append(node := waiting.pop())
        if not for_types(node):
            waiting += ast.iter_child_nodes(node)
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    return names | {node.module for node in nodes if isinstance(node, ast.ImportFrom)}


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
            assert node.module in MODULES, f"{name}, line {node.lineno}"


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


def test_a_folder_of_modules_holds_no_code_of_its_own():
    """One file leaves __init__.py out."""
    folders = {path.parent for path in MODULES.values()}
    assert len(folders) > 4
    for folder in (ROOT / "fsdp_qlora", *folders):
        body = ast.parse((folder / "__init__.py").read_text()).body
        assert not body or len(body) == 1 and isinstance(body[0], ast.Expr), folder


@pytest.mark.parametrize("name", [*SOURCES, "standalone"])
def test_no_function_is_long(name):
    tree = TREES.get(name) or ast.parse((ROOT / f"{name}.py").read_text())
    long = {
        f"{f.name}, line {f.lineno}": n
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
        and (n := f.end_lineno - f.lineno + 1) > (90 if (name, f.name) == THE_JOB else 60)
    }
    assert not long


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


def build(root, out="dist"):
    return subprocess.run([sys.executable, "standalone.py", "--out", out], cwd=root,
                          capture_output=True, text=True)  # fmt: skip


def refusal(root):
    """The one line with which a build fails; nothing may be written then."""
    done = build(root)
    assert done.returncode == 1 and not (root / "dist").exists(), done
    (line,) = done.stderr.splitlines()
    return line


@pytest.fixture
def copied_tree(tmp_path):
    for name in (*(f"{script}.py" for script in SCRIPTS), "standalone.py"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "fsdp_qlora", tmp_path / "fsdp_qlora")
    return tmp_path


def test_built_files_need_no_other(standalone):
    """Whether they start is seen below and by `make standalone`."""
    assert sorted(os.listdir(standalone)) == sorted(f"{script}.py" for script in SCRIPTS)
    for script in SCRIPTS:
        text = (standalone / f"{script}.py").read_text()
        assert "make standalone" in "".join(text.splitlines()[1:3])
        tree = ast.parse(text)
        assert ast.get_docstring(tree) == ast.get_docstring(TREES[script])
        assert not {m for m in imported(tree) if m.split(".")[0] in {"fsdp_qlora", *SCRIPTS}}
        assert ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__':")
        assert text.count("__main__") == SOURCES[script].read_text().count("__main__")
        defined = [node.name for node in tree.body if hasattr(node, "name")]
        of_script = [node.name for node in TREES[script].body if hasattr(node, "name")]
        assert defined[: len(of_script)] == of_script  # the recipe first
        assert script != "train_fsdp_qlora" or len(defined) > len(of_script)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F"]
    found = subprocess.run([*ruff, standalone], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout  # a name that is nowhere defined, among others


def test_a_name_defined_twice_fails_the_build(copied_tree):
    built = {f"fsdp_qlora.{m.replace('/', '.')}" for m in ("quant/nf4", "data/packing")}
    first, second = (copied_tree / SOURCES[name].relative_to(ROOT) for name in sorted(built))
    for path in first, second:
        path.write_text(path.read_text() + "\n\ndef planted():\n    pass\n")
    line = refusal(copied_tree)
    for path in first, second:
        place = f"{path.relative_to(copied_tree)}:{len(path.read_text().splitlines()) - 1}"
        assert place in line and "planted" in line


# A house of two scripts and two modules, to see what the build does without the time of torch.
SMALL = {
    "train_fsdp_qlora.py": '''#!/usr/bin/env python3
"""Small. Prints what it was given."""

import sys

from fsdp_qlora.top import (
    LIMIT,  # the most
    shout,
)


def main():
    print(shout(" ".join(sys.argv)), LIMIT, __doc__)  # said once


if __name__ == "__main__":
    main()
''',
    "merge_adapters.py": '"""Another."""\n\nprint("merged")\n',
    "fsdp_qlora/top.py": '''"""The upper module.

It uses the lower one while it is imported.
"""

import logging

logging.getLogger("json").setLevel(logging.ERROR)

import json

try:
    import no_such_library
except ImportError:  # seldom there
    no_such_library = None

from fsdp_qlora.deep.low import counted

# what a comment says, stays
LIMIT = len(json.dumps([1, 2]))


@counted
def shout(text):
    return text.upper() + "!" if no_such_library is None else text
''',
    "fsdp_qlora/deep/low.py": '''"""The lower module."""

import functools
import json

try:
    import no_such_library
except ImportError:  # seldom there
    no_such_library = None


def counted(function):
    return functools.wraps(function)(lambda *args: json.dumps(function(*args)))
''',
}


@pytest.fixture
def small_tree(tmp_path):
    root = tmp_path / "small"
    for name, text in {**SMALL, "standalone.py": (ROOT / "standalone.py").read_text()}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_how_one_file_is_laid_out(small_tree):
    done = build(small_tree)
    assert done.returncode == 0, done.stderr
    text = (small_tree / "dist" / "train_fsdp_qlora.py").read_text()
    parts = ["of commit unknown", '"""Small. Prints', "import functools", "logging.getLogger(",
             "try:\n    import no_such_library\nexcept ImportError:  # sel",
             "def main():", "# said once", "# fsdp_qlora/deep/low.py\n#\n# The lower module.",
             "def counted", "# fsdp_qlora/top.py\n#\n# The upper module.\n#\n# It uses",
             "# what a comment says, stays\nLIMIT", "@counted", "if __name__"]  # fmt: skip
    assert all(part in text for part in parts)
    for once in "import json", "import no_such_library", "# seldom there", "__main__":
        assert text.count(once) == 1
    assert build(small_tree).returncode == 0  # another order of Python's sets
    assert (small_tree / "dist" / "train_fsdp_qlora.py").read_text() == text
    (small_tree / "alone").mkdir()
    shutil.move(small_tree / "dist" / "train_fsdp_qlora.py", small_tree / "alone" / "t.py")
    run = [sys.executable, "t.py", "as one"]
    out = subprocess.run(run, cwd=small_tree / "alone", capture_output=True, text=True, check=True)
    assert out.stdout == '"T.PY AS ONE!" 6 Small. Prints what it was given.\n'
    assert "counted" not in (small_tree / "dist" / "merge_adapters.py").read_text()


def test_the_commit_is_named(small_tree):
    def git(*words):
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.check_output(["git", *name, *words], cwd=small_tree, text=True)

    git("init"), git("add", "."), git("commit", "-m", "small")
    commit = git("rev-parse", "--short", "HEAD").strip()
    for edit, name in ("README", commit), ("fsdp_qlora/deep/low.py", f"{commit}-dirty"):
        with open(small_tree / edit, "a") as f:
            f.write("# edited\n")
        assert build(small_tree).returncode == 0
        head = (small_tree / "dist" / "train_fsdp_qlora.py").read_text().splitlines()[1]
        assert f" of commit {name}: " in head
    assert commit in (small_tree / "dist" / "merge_adapters.py").read_text()


LOW = "fsdp_qlora/deep/low.py"
TOP = "fsdp_qlora/top.py"


@pytest.mark.parametrize("file,old,new,words", [
    (LOW, "def counted", "LIMIT = 7\n\n\ndef counted", (f"{LOW}:12", "LIMIT", f"{TOP}:20")),
    (LOW, "def counted", "def sys():\n    pass\n\n\ndef counted", (f"{LOW}:12", "sys")),
    (LOW, "import json\n", "import json\n\nfrom fsdp_qlora.top import shout\n",
     (LOW, TOP, "cycle")),
    (LOW, "    return", "    from fsdp_qlora.top import shout\n    return", (LOW, "top")),
    ("train_fsdp_qlora.py", "def main():", "def main(limit=LIMIT):",
     ("train_fsdp_qlora.py", "LIMIT", "inside functions")),
    ("merge_adapters.py", "print(", "print(1 / 0, ", ("merge_adapters.py", "ZeroDivisionError")),
])  # fmt: skip
def test_what_one_file_cannot_hold_fails_the_build(small_tree, file, old, new, words):
    text = SMALL[file]
    assert text.count(old) == 1
    (small_tree / file).write_text(text.replace(old, new))
    line = refusal(small_tree)
    assert all(word in line for word in words), line


# The assembled files at work.
FLAGS = ["--save_every", "2", "--batch_size", "4", "--max_seq_len", "64",
         "--compute_dtype", "float32", "--lora_dropout", "0.1", "--report_to", "none",
         "--output_dir", "run"]  # fmt: skip
ALONE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def alone(standalone, tmp_path, monkeypatch):
    """An empty directory, the current one, but for the two files."""
    directory = Path(shutil.copytree(standalone, tmp_path / "alone"))
    monkeypatch.chdir(directory)
    return directory


def flags_of(nproc):
    """Two processes are killed in between."""
    return [*FLAGS, "--max_steps", "16" if nproc > 1 else "4"]


def command(nproc):
    python = [sys.executable]
    if nproc > 1:
        python += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [*python, "train_fsdp_qlora.py", *flags_of(nproc)]


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
def test_assembled_files_train_resume_and_merge_alone(nproc, alone, run_jobs, tmp_path):
    """On a CPU the adapter, with two ranks that of a resumed run, has the bytes of an undisturbed
    run of the recipe on its package, and so has what is merged, by the command that the run told.
    """
    needs_ranks(nproc)
    if nproc > 1:
        kill_after_first_checkpoint(nproc)
    done = subprocess.run(command(nproc), env=ALONE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert ("resumed from run/checkpoint-0000" in done.stdout) == (nproc > 1)
    assert done.stderr.count("importing torch") == 1  # one rank says so
    merge = done.stdout.splitlines()[-1]
    assert " merge_adapters.py --adapter_dir run " in merge
    names = ["adapter_model.safetensors"]
    if nproc == 1:  # once is enough
        merged = subprocess.run(shlex.split(merge), env=ALONE, capture_output=True, text=True)
        assert merged.returncode == 0, merged.stderr
        names.append("merged/model.safetensors")
    assert sorted(os.listdir()) == ["merge_adapters.py", "run", "train_fsdp_qlora.py"]
    assert all((alone / "run" / name).is_file() for name in names)
    if DEVICE == "cuda":  # where attention's backward adds in any order
        return
    house = tmp_path / "house"
    house.mkdir()
    run_jobs(nproc, [{"argv": flags_of(nproc)}], cwd=house)
    if nproc == 1:
        run = str(house / "run")
        merge_adapters.main(["--adapter_dir", run, "--output_dir", f"{run}/merged"])
    for name in names:
        assert (alone / "run" / name).read_bytes() == (house / "run" / name).read_bytes(), name
