"""Several nodes: replicas agree, and what differs between nodes is named."""

import dataclasses
import itertools
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from conftest import DEVICE, ROOT, SCRIPT, SEVERAL, needs_ranks, selected_params
from safetensors.torch import load_file

from fsdp_qlora.config import Config
from fsdp_qlora.hashing import as_hex, tensor_checksum

FLAGS = ["--max_steps", "3", "--save_every", "2", "--batch_size", "8", "--micro_batch_tokens", "16",
         "--compute_dtype", "float32", "--learning_rate", "1e-3"]  # fmt: skip
DROPOUT = ["--lora_dropout", "0.1", "--shard_group_size", "2"]
BROKEN_OFF = "cp -r {0} {1}; rm -r {1}/checkpoint-000003 {1}/adapter_*"
NODES, NPROC = 2, 2
WRONG = {  # what differs on the second node: the words of the one line that says so
    "flags": ["--lora_rank 8,", "--lora_rank 16:", "the same command"],
    "script": ["another version of train_fsdp_qlora.py", "copy one to all nodes"],
    "versions": ["has peft 0.0,", f" {peft.__version__}: install the same"],
    "directory": ["--output_dir unshared: ", "a directory that all nodes share"],
}


def start_node(node, port, directory):
    """torchrun as on a node of its own; on GPUs each node has its own two."""
    command = ["torch.distributed.run", f"--nnodes={NODES}", f"--nproc_per_node={NPROC}",
               "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test",
               "--local_addr=localhost", str(SEVERAL), str(directory)]  # fmt: skip
    gpus = ",".join(str(node * NPROC + i) for i in range(NPROC))
    with (directory / f"stderr-{node}").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=stderr, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
        )  # fmt: skip


def run_by_torchrun(jobs, directory):
    """Each rank's exit codes of the jobs, and what was written to stderr: by a torchrun a node."""
    (directory / "0.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    agents = [start_node(node, port, directory) for node in range(NODES)]
    try:
        for agent in agents:
            agent.wait(timeout=120)
    finally:
        for agent in agents:
            agent.terminate()  # and its processes with it; nothing where it has ended
    errors = "".join(path.read_text() for path in directory.glob("stderr-*"))
    found = [directory / f"0.{rank}" for rank in range(NODES * NPROC)]
    return [json.loads(path.read_text()) for path in found if path.is_file()], errors


def two_nodes(*argv, cwd, **other):
    """A job for two nodes' processes."""
    argv = [str(arg) for arg in argv]
    return {"argv": argv, "cwd": str(cwd), "nodes": NODES, "first_other": NPROC, **other}


@pytest.fixture(scope="module")
def flags(tiny_model, demo_directory):
    model = tiny_model("llama", hidden_size=64, intermediate_size=192, num_hidden_layers=2)
    return ["--model", model, "--dataset", demo_directory / "data.jsonl", *FLAGS]


@pytest.fixture(scope="module")
def nodes(launch, flags, tmp_path_factory, request):
    """Where two nodes of two processes left the runs of the selected tests, and what they wrote to
    stderr. On a CPU the processes are one launch's, which take themselves for two nodes'."""
    needs_ranks(NODES * NPROC)
    base = tmp_path_factory.mktemp("nodes")
    (base / "elsewhere").mkdir()
    copy = base / SCRIPT.name
    copy.write_text(SCRIPT.read_text() + "# another line\n")
    tree = base / "tree"  # where only a module differs
    tree.mkdir()
    shutil.copy(SCRIPT, tree)
    shutil.copytree(ROOT / "fsdp_qlora", tree / "fsdp_qlora")
    with (tree / "fsdp_qlora" / "data" / "chat.py").open("a") as file:
        file.write("# another line\n")

    def run(name, *more, **other):
        return two_nodes("--output_dir", name, *flags, *more, cwd=base, **other)

    runs = {
        "all": run("all", "--shard_group_size", "4"),
        "groups": run("groups", "--shard_group_size", "2"),
        "copies": run("copies", "--shard_group_size", "1"),
        "dropout": run("dropout", *DROPOUT),
        "resumed": run("resumed", *DROPOUT, "--resume",
                       before=BROKEN_OFF.format("dropout", "resumed")),
        "groups-all": run("groups-all", "--resume", "--shard_group_size", "4",
                          before=BROKEN_OFF.format("groups", "groups-all")),
        "all-groups": run("all-groups", "--resume", "--shard_group_size", "2",
                          before=BROKEN_OFF.format("all", "all-groups")),
    }  # fmt: skip
    selected = [params.values() for params in selected_params(request)]
    wanted = {"copies", *map(str, itertools.chain(*selected))}
    wanted |= {"-".join(map(str, values)) for values in selected}
    good = [job for name, job in runs.items() if name in wanted]
    bad = [
        run("none", others=run("none", "--lora_rank", "8")),
        run("none", others={"script": str(copy)}),
        run("none", others={"script": str(tree / SCRIPT.name)}),
        run("none", others={"peft": "0.0"}),
        run("unshared", others={"cwd": str(base / "elsewhere")}),
    ]
    if DEVICE == "cuda":
        codes, errors = run_by_torchrun(good + bad, base)
    else:
        codes, _, errors = launch().run(NODES * NPROC, good + bad, 120)
    assert codes == [[0] * len(good) + [2] * len(bad)] * NODES * NPROC, errors
    return base, errors.splitlines()


def read_run(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return rows, load_file(directory / "adapter_model.safetensors")


def assert_near(run, reference, bar):
    """Losses, gradient norms (which tell a sum over some of the ranks) and the adapter."""
    (rows, adapter), (want_rows, want) = run, reference
    assert len(rows) == len(want_rows) == 3
    for row, want_row in zip(rows, want_rows):
        for key in "loss", "grad_norm":
            assert abs(row[key] - want_row[key]) <= bar * want_row[key], (row, want_row)
        assert row["loss_tokens"] == want_row["loss_tokens"]
    values = [torch.cat([a[name].flatten() for name in want]) for a in (adapter, want)]
    gap = (values[0] - values[1]).norm() / values[1].norm()
    print(f"adapters differ by {gap:.1e}")
    assert gap <= bar


# a model's copy on four, two and one of the processes
SHARDINGS = {"all": 4, "groups": 2, "copies": 1}
SOME_SHARDINGS = [pytest.param(run, marks=[pytest.mark.slow] * (run == "all")) for run in SHARDINGS]


@pytest.mark.parametrize("run", SOME_SHARDINGS)
def test_any_sharding_on_two_nodes_is_the_same_run(run, nodes, flags, run_main, tmp_path):
    code, _, errors = run_main("--output_dir", tmp_path / "alone", *flags)
    assert code == 0, errors
    alone = read_run(tmp_path / "alone")
    assert alone[0][-1]["loss"] < alone[0][0]["loss"]
    found = read_run(nodes[0] / run)
    assert_near(found, alone, 1e-4)
    assert found[0][0]["micro_batches"] == 8  # two micro-batches


@pytest.mark.parametrize("run", SOME_SHARDINGS)
def test_each_tensors_sum_is_that_of_the_file(nodes, run):
    """Whoever reads which rows of it: of norms all ranks read all."""
    described = json.loads((nodes[0] / run / "train_config.json").read_text())
    tensors = load_file(Path(described["base_model"]) / "model.safetensors")
    sums = {name: as_hex(tensor_checksum(tensor).item()) for name, tensor in tensors.items()}
    assert described["quantization"]["tensor_sums"] == sums


@pytest.mark.chaos
def test_two_nodes_of_torchrun(flags, run_main, tmp_path):
    needs_ranks(NODES * NPROC)
    job = two_nodes("--output_dir", "groups", *flags, "--shard_group_size", "2", cwd=tmp_path)
    codes, errors = run_by_torchrun([job], tmp_path)
    assert codes == [[0]] * NODES * NPROC, errors
    assert run_main("--output_dir", tmp_path / "alone", *flags)[0] == 0
    assert_near(read_run(tmp_path / "groups"), read_run(tmp_path / "alone"), 1e-4)


@pytest.mark.parametrize("again, whole", [
    pytest.param("resumed", "dropout", marks=pytest.mark.slow)])
def test_replicas_resume_bit_for_bit(nodes, again, whole):
    (rows, adapter), (want_rows, want) = (read_run(nodes[0] / n) for n in (again, whole))
    assert [(r["loss"], r["grad_norm"]) for r in rows] == [
        (r["loss"], r["grad_norm"]) for r in want_rows
    ]
    assert all(torch.equal(adapter[name], want[name]) for name in want)


@pytest.mark.parametrize("before,after", [
    ("groups", "all"), pytest.param("all", "groups", marks=pytest.mark.slow)])
def test_resume_in_another_layout(nodes, before, after):
    assert_near(read_run(nodes[0] / f"{before}-{after}"), read_run(nodes[0] / before), 1e-4)


@pytest.mark.parametrize("run", SOME_SHARDINGS)
def test_checkpoint_has_the_optimizer_state_of_one_copy(nodes, run):
    """Whole; that other copies have the same is what resuming them shows."""
    shards = SHARDINGS[run]
    paths = [nodes[0] / name / "checkpoint-000003" for name in (run, "copies")]
    assert [path.name for path in paths[0].glob("optimizer*")] == ["optimizer.safetensors"]
    states, wanted = (load_file(path / "optimizer.safetensors") for path in paths)
    for name in wanted.keys() - {"absmax1", "absmax2"}:
        whole, want = states[name].float(), wanted[name].float()
        n = want.shape[1]  # others are padded: blocks of 256 are what the shards have whole
        assert whole.shape == (2, math.ceil(n / 256 / shards) * 256 * shards)
        # sums over ranks differ in the last bit, 8-bit codes where that rounds otherwise
        same = torch.isclose(whole[:, :n], want, rtol=1e-3, atol=0).float().mean()
        print(f"{same:.4%} of {name} is that of one copy on all")
        assert same > 0.999


@pytest.mark.parametrize("what", WRONG)
def test_difference_between_nodes_is_named(nodes, what):
    """Once each; a module is part of the script."""
    lines = [line for line in nodes[1] if line.startswith("error: ") and WRONG[what][0] in line]
    assert len(lines) == (2 if what == "script" else 1), nodes[1]
    for line in lines:
        assert f"rank 2 on {socket.gethostname()}" in line
        assert all(words in line for words in WRONG[what])
    assert len([line for line in nodes[1] if line.startswith("error: ")]) == len(WRONG) + 1


def other_value(field):
    """A flag that gives the field another value than its default."""
    if isinstance(field.default, bool):
        return [f"--{'no-' if field.default else ''}{field.name}"]
    if "choices" in field.metadata:
        return [f"--{field.name}", next(c for c in field.metadata["choices"] if c != field.default)]
    return [f"--{field.name}", "dpo" if field.name == "loss" else "7"]


FIELDS = {field.name: other_value(field) for field in dataclasses.fields(Config)
          if field.name != "plan_for"}  # starts no run
# one of each type; the others by `make test-slow`
SOME_FIELDS = {("choices" in field.metadata, type(field.default)): field.name
               for field in dataclasses.fields(Config) if field.name in FIELDS}.values()


@pytest.fixture(scope="module")
def ranks_with_other_flags(launch, tmp_path_factory, request):
    """The selected flags, and exit codes and errors of runs that all end before anything is read,
    as there is no such model; in each the second rank has one more flag."""
    needs_ranks(2)
    base = ["--model", "./none", "--dataset", "none", "--output_dir", "out"]
    cwd = str(tmp_path_factory.mktemp("flags"))
    names = [params["name"] for params in selected_params(request) if "name" in params]
    jobs = [{"argv": base, "cwd": cwd, "others": {"argv": [*base, *FIELDS[name]]}}
            for name in names]  # fmt: skip
    codes, _, errors = launch().run(2, jobs, 120)
    assert codes, errors
    return names, codes, [line for line in errors.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in SOME_FIELDS)) for name in FIELDS])
def test_every_flag_must_be_the_same_on_all_ranks(ranks_with_other_flags, name):
    names, codes, errors = ranks_with_other_flags
    i = names.index(name)
    assert [rank[i] for rank in codes] == [2, 2]
    start = f"error: rank 1 on {socket.gethostname()} runs --{name} "
    assert len(errors) == len(names) and errors[i].startswith(start), errors[i]
    assert errors[i].endswith(": start all nodes with the same command")


@pytest.mark.parametrize("flag", ["dataset", "eval_dataset"])
def test_nodes_with_other_rows_are_refused(flag, run_jobs, demo_directory, tmp_path):
    """The same relative path on both, but not the same file."""
    lines = (demo_directory / "data.jsonl").read_text().splitlines(True)[:32]
    for name, rows in ("a", lines), ("b", [*lines[:-1], lines[0]]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.jsonl").write_text("".join(rows))
    argv = ["--model", str(demo_directory / "model"), "--max_steps", "1",
            "--dataset", str(demo_directory / "data.jsonl"), "--output_dir", str(tmp_path / "run"),
            f"--{flag}", "rows.jsonl"]  # fmt: skip
    job = {"argv": argv, "nodes": 2, "others": {"cwd": str(tmp_path / "b")}}
    _, err = run_jobs(2, [job], cwd=tmp_path / "a", code=4)
    words = f"--{flag} rows.jsonl: not the same on all nodes"
    assert [line for line in err.splitlines() if words in line]
