"""DoRA and rsLoRA from training to the merged model, against PEFT itself.

What one layer computes is in test_layer.py, one step in test_step.py. All runs here are one launch
of two processes.
"""

import json
import re
import shutil

import pytest
import torch
from conftest import selected_params
from peft import PeftModel
from safetensors.torch import load_file
from test_merge import ROWS, loss_in_peft, nf4_and_back
from transformers import AutoModelForCausalLM

import merge_adapters

STEPS = 4
MAGNITUDE = "lora_magnitude_vector"


@pytest.fixture(scope="module")
def all_runs(tmp_path_factory, run_jobs, tiny_model, request):
    """The directory of the runs below, each of which takes all 16 rows in every step, in fp32 those
    of the selected adapters, and the flags of the one that was resumed."""
    selected = {params.get("adapter") for params in selected_params(request)}
    base = tmp_path_factory.mktemp("dora")
    (base / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (base / "model").symlink_to(tiny_model("llama", num_hidden_layers=2))
    flags = ["--model", "model", "--dataset", "data.jsonl", "--batch_size", "16",
             "--max_steps", str(STEPS), "--learning_rate", "3e-3"]
    flags += ["--save_every", str(STEPS - 1), "--target_modules", "q_proj", "v_proj", "down_proj"]
    cut = ["--adapter", "dora", "--lora_dropout", "0.1", "--max_steps", "4", "--save_every", "2"]
    break_off = "cp -r whole resumed; rm -r resumed/adapter_* resumed/checkpoint-000004"
    jobs = [
        {"argv": [*flags, "--adapter", "dora", "--output_dir", "dora"]},
        {"argv": [*flags, "--adapter", "rslora", "--output_dir", "rslora"]},
        *({"argv": [*flags, "--adapter", adapter, "--output_dir", f"{adapter}-fp32",
                    "--compute_dtype", "float32"]}
          for adapter in ("dora", "rslora") if adapter in selected),
        {"argv": [*flags, "--output_dir", "plain"]},
        {"argv": [*flags, *cut, "--output_dir", "whole"]},
        {"argv": [*flags, *cut, "--output_dir", "resumed", "--resume"], "before": break_off},
    ]
    run_jobs(2, jobs, cwd=base)
    return base, jobs[-1]["argv"]


@pytest.fixture
def runs(all_runs):
    return all_runs[0]


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("adapter", ["dora", pytest.param("rslora", marks=pytest.mark.slow)])
def test_adapter_in_peft_gives_the_loss_of_training(adapter, runs):
    # the adapter of one step less: a step's loss is taken before its update
    run = runs / f"{adapter}-fp32"
    checkpoint = run / f"checkpoint-{STEPS - 1:06d}"
    settings = json.loads((checkpoint / "adapter_config.json").read_text())
    assert settings["use_dora"] == (adapter == "dora")
    assert settings["use_rslora"] == (adapter == "rslora")
    loss = loss_in_peft(runs / "model", checkpoint)
    first, *_, last = losses(run)
    print(f"{adapter}: {first:.5f} to {last:.5f} in training, {loss:.5f} with PEFT")
    assert last < 0.99 * first
    assert loss == pytest.approx(last, rel=1e-5)


def test_every_adapter_begins_as_nothing(runs):
    """Magnitude by norm is exactly 1, and B is 0."""
    dora, plain = losses(runs / "dora"), losses(runs / "plain")
    assert dora[0] == losses(runs / "rslora")[0] == plain[0]
    assert abs(dora[-1] - plain[-1]) > 1e-4 * plain[-1]


@pytest.mark.parametrize("kind", ["dora", "rslora"])
def test_merged_weights_are_what_peft_merges_in_fp32(kind, runs, tmp_path, capsys):
    run, out = runs / kind, tmp_path / "merged"
    merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(out), "--device", "cpu"])
    text = capsys.readouterr().out
    error = float(re.search(r"differ by ([\d.]+) % of", text)[1]) / 100
    print(f"{kind}: {error} of the adapter's effect")
    assert error < 0.1

    model = AutoModelForCausalLM.from_pretrained(runs / "model", dtype=torch.float32)
    for name, p in model.named_parameters():
        if "_proj." in name:
            p.data = nf4_and_back(p.data.bfloat16()).float()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    want = PeftModel.from_pretrained(model, run).merge_and_unload().state_dict()
    got, changed = load_file(out / "model.safetensors"), 0
    for name, weight in got.items():
        # half a step of bf16, and where fp32 ends up on the other side of its middle, no more
        distance = (weight.double() - want[name].double()).abs()
        assert (distance <= 2**-8 * 1.001 * want[name].double().abs()).all(), name
        changed += not torch.equal(before[name], want[name])
    assert changed == 2 * 3


def test_magnitudes_are_trained_and_resumed_bit_for_bit(runs):
    """A rank's part of some magnitudes is no whole block of 8-bit state: 32 of 128 values."""
    got, want = (load_file(runs / n / "adapter_model.safetensors") for n in ("resumed", "whole"))
    assert got.keys() == want.keys() and len(got) == 2 * 3 * 3
    assert all(torch.equal(got[name], want[name]) for name in got)
    assert losses(runs / "resumed") == losses(runs / "whole")
    early = load_file(runs / "whole" / "checkpoint-000002" / "adapter_model.safetensors")
    magnitudes = [name for name in want if name.endswith(f".{MAGNITUDE}")]
    assert len(magnitudes) == 2 * 3
    for name in magnitudes:
        assert want[name].dtype == torch.float32 and want[name].dim() == 1
        assert (want[name] != early[name]).float().mean() > 0.99


def test_a_resumed_run_notes_the_same_for_the_merge(runs):
    """Without the adapter, too, though it begins with one; that is what a new adapter gives."""
    got, want, plain = (load_file(runs / name / "probe.safetensors")
                        for name in ("resumed", "whole", "plain"))
    early = load_file(runs / "whole" / "checkpoint-000002" / "probe.safetensors")
    assert all(torch.equal(got[name], want[name]) for name in got | want)
    assert torch.equal(early["without_adapter"], want["without_adapter"])
    assert torch.equal(plain["without_adapter"], want["without_adapter"])
    assert not torch.equal(early["with_adapter"], want["with_adapter"])


def test_dora_is_resumed_on_another_number_of_processes(all_runs, run_main, monkeypatch):
    runs, flags = all_runs
    shutil.copytree(runs / "resumed", runs / "alone")
    shutil.rmtree(runs / "alone" / "checkpoint-000004")
    (runs / "alone" / "adapter_model.safetensors").unlink()
    monkeypatch.chdir(runs)
    code, out, err = run_main(*flags, "--lora_dropout", "0", "--output_dir", "alone")
    assert code == 7 and "--lora_dropout 0.1 (now 0.0)" in err
    code, out, err = run_main(*flags, "--output_dir", "alone")
    assert code == 0, err
    assert "checkpoint-000002 at step 2 of" in out
    assert losses(runs / "alone")[:2] == losses(runs / "whole")[:2]
    for got, want in zip(losses(runs / "alone"), losses(runs / "whole"), strict=True):
        assert got == pytest.approx(want, rel=5e-3)


def test_run_is_not_resumed_with_another_adapter(all_runs, run_main, monkeypatch):
    runs, flags = all_runs
    monkeypatch.chdir(runs)
    for name, was, kind in ("whole", "dora", "lora"), ("rslora", "rslora", "dora"):
        code, _, err = run_main(*flags, "--adapter", kind, "--output_dir", name)
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert code == 7 and f"--adapter {was} (now {kind})" in line
