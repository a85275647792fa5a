"""Several nodes: replicas agree, and what differs between nodes is named."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import SEVERAL, free_ports, needs_ranks
from safetensors.torch import load_file

import train_fsdp_qlora as script

FLAGS = ["--max_steps", "3", "--save_every", "2", "--batch_size", "8", "--micro_batch_size", "1",
         "--compute_dtype", "float32", "--learning_rate", "1e-3"]  # fmt: skip
DROPOUT = ["--lora_dropout", "0.1", "--shard_group_size", "2"]
BROKEN_OFF = "cp -r {0} {1}; rm -r {1}/checkpoint-000003 {1}/adapter_*"
NODES, NPROC = 2, 2
WRONG = {  # what differs on the second node: the words of the one line that says so
    "flags": ["--lora_rank 8,", "--lora_rank 16:", "the same command"],
    "script": ["another version of train_fsdp_qlora.py", "copy one to all nodes"],
    "versions": ["has peft 0.0,", f" {script.peft.__version__}: install the same"],
    "directory": ["--output_dir unshared: ", "a directory that all nodes share"],
}


def start_node(node, port, directory):
    """torchrun as on a node of its own; on GPUs each node has its own two."""
    command = ["torch.distributed.run", f"--nnodes={NODES}", f"--nproc_per_node={NPROC}",
               "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=test",
               "--local_addr=localhost", str(SEVERAL), str(directory)]  # fmt: skip
    gpus = ",".join(str(node * NPROC + i) for i in range(NPROC))
    with (directory / "stderr").open("w") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=stderr, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
        )  # fmt: skip


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Where two nodes of two processes left their runs, and what they wrote to stderr."""
    needs_ranks(NODES * NPROC)
    base = tmp_path_factory.mktemp("nodes")
    (base / "elsewhere").mkdir()
    copy = base / script.__file__.rpartition("/")[2]
    copy.write_text(Path(script.__file__).read_text() + "# another line\n")

    def run(name, *flags, **other):
        return {"argv": ["--output_dir", name, *FLAGS, *flags], "cwd": str(base), **other}

    good = [
        run("all"),
        run("groups", "--shard_group_size", "2"),
        run("copies", "--shard_group_size", "1"),
        run("dropout", *DROPOUT),
        run("resumed", *DROPOUT, "--resume", before=BROKEN_OFF.format("dropout", "resumed")),
        run("groups-all", "--resume", before=BROKEN_OFF.format("groups", "groups-all")),
        run("all-groups", "--resume", "--shard_group_size", "2",
            before=BROKEN_OFF.format("all", "all-groups")),
    ]  # fmt: skip
    bad = [
        [run("none"), run("none", "--lora_rank", "8")],
        [run("none"), run("none", script=str(copy))],
        [run("none"), run("none", peft="0.0")],
        [run("unshared"), run("unshared", cwd=str(base / "elsewhere"))],
    ]
    ports, agents = free_ports(1 + len(good) + len(bad)), []
    for node in range(NODES):
        mine = good + [pair[node] for pair in bad]
        mine = [{**job, "port": port} for job, port in zip(mine, ports[1:])]
        (base / f"node-{node}").mkdir()
        (base / f"node-{node}" / "0.json").write_text(json.dumps(mine))
        agents.append(start_node(node, ports[0], base / f"node-{node}"))
    try:
        for agent in agents:
            agent.wait(timeout=120)
    finally:
        for agent in agents:
            agent.terminate()  # and its processes with it; nothing where it has ended
    errors = "".join(path.read_text() for path in base.glob("node-*/stderr"))
    for rank in range(NODES * NPROC):
        codes = base / f"node-{rank // NPROC}" / f"0.{rank}"
        assert codes.is_file(), errors
        assert json.loads(codes.read_text()) == [0] * len(good) + [1] * len(bad), errors
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
        assert row["learnt_tokens"] == want_row["learnt_tokens"]
    values = [torch.cat([a[name].flatten() for name in want]) for a in (adapter, want)]
    gap = (values[0] - values[1]).norm() / values[1].norm()
    print(f"adapters differ by {gap:.1e}")
    assert gap <= bar


def test_any_sharding_on_two_nodes_is_the_same_run(nodes, run_main, tmp_path):
    code, _, errors = run_main("--output_dir", tmp_path / "alone", *FLAGS)
    assert code == 0, errors
    alone = read_run(tmp_path / "alone")
    assert alone[0][-1]["loss"] < alone[0][0]["loss"]
    for name in "all", "groups", "copies":
        assert_near(read_run(nodes[0] / name), alone, 1e-4)


def test_replicas_resume_bit_for_bit(nodes):
    (rows, adapter), (want_rows, want) = (read_run(nodes[0] / n) for n in ("resumed", "dropout"))
    assert [(r["loss"], r["grad_norm"]) for r in rows] == [
        (r["loss"], r["grad_norm"]) for r in want_rows
    ]
    assert all(torch.equal(adapter[name], want[name]) for name in want)


@pytest.mark.parametrize("before,after", [("groups", "all"), ("all", "groups")])
def test_resume_in_another_layout(nodes, before, after):
    assert_near(read_run(nodes[0] / f"{before}-{after}"), read_run(nodes[0] / before), 1e-3)


def test_each_replica_has_the_same_optimizer_state(nodes):
    checkpoint = nodes[0] / "groups" / "checkpoint-000003"
    parts = [load_file(checkpoint / script.rank_file(rank, 4)) for rank in range(4)]
    names = [name for name in parts[0] if not name.startswith("rng")]
    assert names
    for first, second in (0, 2), (1, 3):
        assert all(torch.equal(parts[first][name], parts[second][name]) for name in names)
    assert any(not torch.equal(parts[0][name], parts[1][name]) for name in names)


@pytest.mark.parametrize("what", WRONG)
def test_difference_between_nodes_is_named_once(nodes, what):
    lines = [line for line in nodes[1] if line.startswith("error: ") and WRONG[what][0] in line]
    assert len(lines) == 1, nodes[1]
    assert f"rank 2 on {socket.gethostname()}" in lines[0]
    assert all(words in lines[0] for words in WRONG[what])
    assert len([line for line in nodes[1] if line.startswith("error: ")]) == len(WRONG)


def test_rank_that_runs_out_of_memory_says_so(run_training, run_main, tmp_path):
    needs_ranks(2)
    flags = ["--max_steps", "4", "--save_every", "2", "--batch_size", "4", "--output_dir", "run"]
    (tmp_path / "0.json").write_text(json.dumps([{"argv": flags, "out_of_memory": 3}]))
    result = run_training([tmp_path], nproc=2, cwd=tmp_path, timeout=60, script=SEVERAL)
    assert result.returncode != 0
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    for words in ("rank 1 on", "out of memory at step 3", "2 rows x", "GiB",
                  "a smaller --micro_batch_size, ", "a shorter --max_seq_len"):  # fmt: skip
        assert words in line
    assert not any(f"--{flag}" in line for flag in ("recompute", "reshard_after_forward"))
    flags[-1] = tmp_path / "run"
    code, out, errors = run_main(*flags, "--resume")
    assert code == 0 and "checkpoint-000002: 2 of 4 steps" in out, errors
