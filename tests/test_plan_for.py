"""--plan_for: what a run would be on other GPUs, from config.json alone."""

import dataclasses
import json
import re
import shutil

import huggingface_hub
import pytest
import torch
from conftest import ROOT, one_process
from test_benchmarks import bench

from fsdp_qlora.config import Config
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.planner.gpu_specs import GPU_SPECS, gpu_machine, parse_gpus
from fsdp_qlora.planner.machine import rounded
from fsdp_qlora.planner.search import choose_plan
from fsdp_qlora.planner.search_inputs import KernelFacts, SearchInputs, Workload
from fsdp_qlora.pretrained.model_directory import read_model_config
from fsdp_qlora.run.plan_for import plan_elsewhere

GIB = 2**30


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Function (shapes, layers): a directory that has their config.json alone."""
    def make(name, layers=None):
        bench.write_config(path := tmp_path_factory.mktemp(name), name, layers)
        return path

    return make


def answer(out):
    """(GiB of each GPU, GiB of its limit, tokens/s) of the last line."""
    line = out.strip().splitlines()[-1]
    gib, limit, speed = re.fullmatch(
        r"fits: ([\d.]+) of ([\d.]+) GiB(?: and [\d.]+ GiB of host memory)? per GPU,"
        r" predicted ([\d,]+) tok/s/GPU", line
    ).groups()  # fmt: skip
    return float(gib), float(limit), int(speed.replace(",", ""))


TWO_CARDS = "--model", "llama-3-70b", "--plan_for", "2x4090"


@pytest.fixture
def refusal(run_main, refusals=[]):  # noqa: B006, it is asked for once
    """What is said to TWO_CARDS."""
    if not refusals:
        code, _, err = run_main(*TWO_CARDS)
        assert code == 8
        refusals.append(err)
    return refusals[0]


def test_answer_names_layout_memory_and_speed(run_main, refusal, tmp_path, monkeypatch):
    """Of a 70B on two cards of 24 GB: refused with the flag that helps, which then fits; and
    nothing is written."""
    monkeypatch.chdir(tmp_path)
    (line,) = refusal.splitlines()
    assert ". Add --offload_activations: " in line
    code, out, err = run_main(*TWO_CARDS, "--offload_activations")
    assert code == 0, err
    gib, limit, speed = answer(out)
    assert 19 < gib < limit == 22.5 and 150 < speed < 400
    assert "plan for 2 x 4090 (from data sheets, not measured): 16 rows of 2,048 tok" in out
    assert "plan: weights sharded over 2 GPUs; micro-batches" in out
    assert f": {gib} GiB per GPU" in line and f"predicted {speed} tok/s/GPU" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_host_memory_of_another_machine(run_main, directory):
    """It bounds what is offloaded; a run finds its own."""
    argv = "--model", directory("llama-3-70b"), "--plan_for", "2x24GB", "--offload_activations"
    ample, scarce = (run_main(*argv, "--host_memory_gib", n)[1] for n in ("60", "12"))
    pinned = [float(re.search(r"and ([\d.]+) GiB of host memory per GPU", x)[1])
              for x in (ample, scarce)]  # fmt: skip
    assert ample != scarce and pinned[0] > 12 and pinned[1] < 12
    code, _, err = run_main("--model", directory("llama-3-70b"), "--host_memory_gib", "60",
                            "--random_weights")  # fmt: skip
    assert code == 2 and "--host_memory_gib is for --plan_for" in err


def test_page_shows_these_answers(run_main, refusal, directory):
    page = " ".join((ROOT / "docs" / "memory.md").read_text().split())
    code, out, _ = run_main("--model", directory("gpt-oss-120b"), "--plan_for", "4x4090")
    assert code == 0 and out.splitlines()[-1] in page
    assert refusal.strip() in page


def test_plan_is_that_of_a_run_there(directory):
    """What choose_plan() finds for a run of full rows on a machine that measures as the card."""
    path = directory("qwen3-30b-a3b", 4)
    config = Config(model=str(path), plan_for="4x4090", batch_size=32, max_seq_len=1024)
    with one_process():
        _, plan, limit = plan_elsewhere(config)
    config = dataclasses.replace(config, random_weights=True)
    _, arch = read_model_config(path, config)
    specs = make_layer_specs(arch, resolve_adapter(arch, config, "")[1], config.adapter_settings)
    workload = Workload(
        max_step_tokens=32 * 1024, max_document_tokens=1024, max_row_tokens=1024,
        mean_document_tokens=1024,
        uneven_lengths=False, world_size=4)  # fmt: skip
    kernels = KernelFacts(why_no_capture=plan.why_no_cuda_graphs)
    machine = gpu_machine(GPU_SPECS["4090"])
    assert limit == int(22.5 * GIB)
    assert plan == choose_plan(SearchInputs(
        config, arch, specs, workload, limit, machine, torch.device("cuda"), kernels))  # fmt: skip
    assert "one by one" in plan.why_no_cuda_graphs


def test_flags_count_as_on_the_machine_itself(run_main, directory):
    argv = "--model", directory("llama-3-8b", 8), "--plan_for", "8xH100", "--max_seq_len", "4096"
    code, out, err = run_main(*argv, "--shard_group_size", "4", "--memory_limit_gib", "10")
    assert code == 0, err
    assert "sharded over 4 GPUs, 2 copies; micro-batches of" in out
    assert answer(out)[1] == 10
    code, _, err = run_main(*argv, "--shard_group_size", "3")
    assert code == 2 and "does not divide 8 processes: use one of 1, 2, 4, 8" in err
    code, _, err = run_main(*argv, "--max_seq_len", "2000000", "--dataset", "rows.jsonl")
    assert code == 3 and "the model supports up to 1048576" in err


def test_of_a_hub_id_config_json_alone_is_fetched(run_main, directory, tmp_path, monkeypatch):
    asked = []

    def fetch(name, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        shutil.copy(directory("llama-3-8b", 2) / "config.json", tmp_path)
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    code, out, err = run_main("--model", "someone/model", "--plan_for", "h100")
    assert code == 0, err
    assert asked == [("someone/model", ["config.json"])]
    assert "plan: weights on one GPU" in out and answer(out)[1] == 77.5


@pytest.mark.parametrize("text, count, name", [
    ("4x4090", 4, "4090"), ("8 x H100", 8, "H100"), ("b200", 1, "B200"), ("2xRTX 5090", 2, "5090"),
    ("24GB", 1, "3090"), ("4x24gb", 4, "3090"), ("2x80GB", 2, "A100"), ("2x48 GB", 2, "A6000"),
])  # fmt: skip
def test_cards_are_known_by_name_or_size(text, count, name):
    assert parse_gpus(text) == (count, name, GPU_SPECS[name])


@pytest.mark.parametrize("text", ["4xT4", "x", "0x4090", "4090x4", "2000xH100", "4x"])
def test_other_cards_are_refused_with_those_that_are_known(text, run_main):
    code, _, err = run_main("--model", "llama-3-8b", "--plan_for", text)
    assert code == 2 and f"--plan_for {text}: " in err and ", ".join(GPU_SPECS) in err


def test_card_measures_as_it_did():
    """What measure_machine() found on H100s and H200s, to which predict_time() was fitted; the link
    on two H200s."""
    for name, bandwidth in ("H100", 3e12), ("H200", 4e12):
        machine = gpu_machine(GPU_SPECS[name])
        found = (machine.flops_per_second, machine.memory_bandwidth, machine.link_bandwidth,
                 machine.host_copy_bandwidth)
        assert found == tuple(map(rounded, (8e14, bandwidth, 2.3e11, 5e10)))
    for figure in (7.4e13, 1e14, 9.6e14, 3.3e9):
        once = rounded(figure)
        assert abs(once / figure - 1) < 0.13 and rounded(once) == once


def test_experts_one_by_one_take_the_host_longer(directory):
    """On cards for which torch has no grouped matmuls; a dense model is as fast as it was."""
    for name, is_slower in ("qwen3-30b-a3b", True), ("llama-3-8b", False):
        speeds = []
        for grouped in (True, False):
            config = Config(model=str(directory(name, 4)), plan_for="H100", max_seq_len=512)
            card = GPU_SPECS["H100"]._replace(has_grouped_mm=grouped)
            with pytest.MonkeyPatch.context() as patch, one_process():
                patch.setitem(GPU_SPECS, "H100", card)
                speeds.append(1 / plan_elsewhere(config)[1].seconds_per_token)
        assert (speeds[1] < 0.8 * speeds[0]) == is_slower, speeds
        assert is_slower or speeds[0] == speeds[1]


def test_adapter_or_gguf_as_a_model_is_told_from_a_model(run_main, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "me/base"}))
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    shutil.copytree(tmp_path / "gguf", tmp_path / "with-config")
    (tmp_path / "with-config" / "config.json").write_text("{}")
    # as a Hub id like owner/name-GGUF is downloaded, with what it has besides
    shutil.copytree(tmp_path / "with-config", tmp_path / "name-GGUF",
                    ignore=shutil.ignore_patterns("*.gguf"))  # fmt: skip
    for name, words in (("adapter", "trained on, me/base;"), ("gguf", "GGUF"),
                        ("gguf/model-Q4_K_M.gguf", "GGUF"), ("with-config", "GGUF"),
                        ("name-GGUF", "GGUF")):  # fmt: skip
        path = tmp_path / name
        code, _, err = run_main("--model", path, "--dataset", "rows.jsonl",
                                "--output_dir", tmp_path / "run")  # fmt: skip
        (line,) = err.splitlines()
        assert code == 3 and line.startswith(f"error: --model {path}: is a") and words in line
