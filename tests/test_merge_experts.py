"""Mixtures of experts from training to the merged model, in every layout of their files."""

import contextlib
import functools
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import test_merge
import torch
from conftest import DEVICE
from families import (
    TINY, auto_class, make_model, write_4bit, write_model, write_mxfp4)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Mxfp4Config

import merge_adapters
from fsdp_qlora.files import digest
from fsdp_qlora.lora.peft_names import expert_slices, unstack_experts
from fsdp_qlora.merge import compare_logits, open_run
from fsdp_qlora.merge.adapter_without_run import linears_in_4bit
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.tensor_names import tensor_names
from fsdp_qlora.pretrained.weight_formats import NF4_STATE

nf4_and_back = functools.partial(test_merge.nf4_and_back, device=DEVICE)  # where merged
CORRECTION = "e_score_correction_bias"
# of layers: attention, MLPs, experts one by one and all in one tensor; in Mixtral's words, in ours
# and in Granite's
LINEAR = (r"(model|backbone)\.layers\.(?!.*indexer).*"  # but for indexers, which stay as they are
          r"(_proj|_proj_with_mqa|in_proj_\w+|\.w[123]|(in|out)put_linear)\.weight")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_directory):
    """Function (name, run_main): the directory of a run on a tiny model of that name, in the layout
    in which such models are released."""
    made = {}

    def train(name, run_main):
        if name in made:
            return made[name]
        directory = tmp_path_factory.mktemp(name)
        base, run = directory / "base", directory / "run"
        write_base(name, base, demo_directory)
        code, _, err = run_main(
            "--model", base, "--dataset", demo_directory / "data.jsonl", "--output_dir", run,
            "--max_steps", 3, "--batch_size", 4, "--learning_rate", 0.01, "--report_to", "none",
            "--eval_every", 0)  # fmt: skip
        assert code == 0, err
        made[name] = run
        return run

    return train


def write_base(name, base, demo_directory):
    """Write a tiny model and its tokenizer, in the layout in which such models are released."""
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    family, _, version = name.partition("-4bit-")
    if name == "mxfp4":
        write_mxfp4(base, len(tokenizer))
    elif version:
        write_4bit(base, TINY[family](len(tokenizer)), int(version), torch.bfloat16)
    else:
        make_model(TINY[name](len(tokenizer)), dtype=torch.bfloat16).save_pretrained(base)
    tokenizer.save_pretrained(base)
    if version:
        return
    tensors = load_file(base / "model.safetensors")
    for key in tensors:
        if CORRECTION in key:  # as released: in fp32, with values that bf16 has not
            tensors[key] = torch.linspace(-0.3, 0.1, len(tensors[key]))
        elif re.fullmatch(LINEAR, key) and "self_attn" not in key:
            tensors[key] *= 2  # else what experts do would not count beside the adapter
        elif key.endswith("router.weight"):
            tensors[key] *= 8  # gpt-oss's, in bf16: else close calls fall another way on a GPU
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def merge(run, out):
    merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(out)])


class Sums(dict):
    """Those of training, and which of them are asked for."""

    def __init__(self, sums):
        super().__init__(sums)
        self.asked = set()

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def watch_sums(monkeypatch):
    """A list that gets the Sums of each merge to come."""
    found, read_base = [], open_run.read_base

    def read(*args):
        base = read_base(*args)
        base.checksums = Sums(base.checksums)
        found.append(base.checksums)
        return base

    monkeypatch.setattr(open_run, "read_base", read)
    return found


def merged_weight(name, weight, adapter, nf4_and_back=nf4_and_back):
    """What a tensor of the base becomes. Each matrix is quantized by itself."""
    if not re.fullmatch(LINEAR, name):
        return weight
    if weight.dim() == 3:  # gate and up of all experts, or down
        matrices = [expert.chunk(1 + ("input" in name)) for expert in weight]
        return torch.stack([torch.cat([*map(nf4_and_back, pair)]) for pair in matrices])
    stem = name.removesuffix("weight").replace("backbone", "model")
    stem, want = f"base_model.model.{stem}lora_", nf4_and_back(weight)
    if f"{stem}A.weight" in adapter:
        a, b = adapter.pop(f"{stem}A.weight"), adapter.pop(f"{stem}B.weight")
        lora_matmul = (b.to(DEVICE) @ a.to(DEVICE)).cpu()
        want = (want.float() + 32 / 16 * lora_matmul).bfloat16()
    return want


def test_turned_experts_become_what_training_had(trained, run_main, tmp_path):
    """gpt-oss's: [experts, in, out] in files, quantized as [out, in]."""
    run, out = trained("gpt_oss", run_main), tmp_path / "out"
    merge(run, out)
    base = load_file(run.parent / "base" / "model.safetensors")
    result, turned = load_file(out / "model.safetensors"), 0
    for key, weight in base.items():
        if weight.dim() == 3:
            want = torch.stack([nf4_and_back(expert.t().contiguous()).t() for expert in weight])
            assert torch.equal(result[key], want), key
            turned += 1
    assert turned == 6


@pytest.mark.parametrize("name", [
    pytest.param("qwen2_moe-4bit-4", marks=pytest.mark.slow), "mixtral-4bit-5"])
def test_mixture_in_4bit_becomes_what_training_had(name, trained, run_main, tmp_path, monkeypatch):
    """Some linears or all are in NF4 in the base's file, of version 4 routers, too."""
    run, out, watched = trained(name, run_main), tmp_path / "out", watch_sums(monkeypatch)
    merge(run, out)
    stored = load_file(run.parent / "base" / "model.safetensors")
    (sums,) = watched
    values = {key for key in stored if not key.endswith((".quant_map", f".{NF4_STATE}"))}
    assert values <= sums.keys() <= sums.asked  # of scales and scales of scales, too
    base = load_file(run.parent / "base" / "whole" / "model.safetensors")
    adapter = load_file(run / "adapter_model.safetensors")
    result = load_file(out / "model.safetensors")
    assert result.keys() == base.keys()
    for key, weight in base.items():
        in_4bit = f"{key}.absmax" in stored
        quantized = test_merge.nf4_and_back if in_4bit else nf4_and_back  # its file's was, on a CPU
        want = merged_weight(key, weight, adapter, quantized)
        if in_4bit and not re.fullmatch(LINEAR, key):
            assert re.search(r"gate\.weight|router", key) and not torch.equal(weight, result[key])
            want = quantized(weight)
        assert result[key].dtype == torch.bfloat16 and torch.equal(result[key], want), key
    assert not adapter


def test_mxfp4_becomes_the_bf16_that_transformers_makes_of_it(
        trained, run_main, tmp_path, monkeypatch, capsys):  # fmt: skip
    run, out, watched = trained("mxfp4", run_main), tmp_path / "out", watch_sums(monkeypatch)
    capsys.readouterr()
    merge(run, out)
    assert watched[0].keys() <= watched[0].asked
    said = capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(
        run.parent / "base", quantization_config=Mxfp4Config(dequantize=True))
    adapter = load_file(run / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    result, n_weights = model.state_dict(), 0
    assert result.keys() == base.state_dict().keys()
    for key, weight in base.state_dict().items():
        is_expert = weight.dim() == 3
        n_weights += is_expert * weight.numel()
        want = weight if is_expert else merged_weight(key, weight, adapter)
        assert torch.equal(result[key], want), key
    assert n_weights and not adapter  # all of it was used
    sizes = n_weights * 17 / 2**35, n_weights / 2**29
    assert "in MXFP4, {:.3g} GiB, are written as bf16, {:.3g} GiB".format(*sizes) in said
    assert float(re.search(r"differ by ([\d.]+) % of", said)[1]) / 100 < 0.1


@pytest.mark.parametrize("name", [
    "granitemoe", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "glm_moe_dsa", "nemotron_h_latent", "qwen3_moe", "mixtral", "glm4_moe", "granite4_h_moe"))])
def test_merged_mixture_is_the_trained_one(
    name, trained, run_main, tmp_path, capsys, monkeypatch
):  # fmt: skip
    run, out = trained(name, run_main), tmp_path / "out"
    capsys.readouterr()
    logits_of, fla = compare_logits.logits_of, []
    monkeypatch.setattr(compare_logits, "logits_of", lambda *args: (
        fla.append(sys.modules.get("fla", "can be imported")), logits_of(*args))[1])  # fmt: skip
    merge(run, out)
    assert fla == [None] or DEVICE != "cpu"  # its kernels do not work there
    reported = float(re.search(r"differ by ([\d.]+) % of", capsys.readouterr().out)[1]) / 100
    base = load_file(run.parent / "base" / "model.safetensors")
    adapter = load_file(run / "adapter_model.safetensors")
    result = load_file(out / "model.safetensors")
    assert result.keys() == base.keys() and (CORRECTION in str([*base])) == name.startswith(
        ("glm", "nemotron"))
    for key, weight in base.items():
        want = merged_weight(key, weight, adapter)
        assert result[key].dtype == want.dtype and torch.equal(result[key], want), key
    assert not adapter  # all of it was used

    # what transformers' head reads in the merged model is what training has noted
    model, states = AutoModelForCausalLM.from_pretrained(out), []
    assert all(p.dtype == torch.float32 for n, p in model.state_dict().items() if CORRECTION in n)
    model.lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0][0]))
    rows = json.loads((run / "train_config.json").read_text())["probe_input_ids"]
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([row])).logits[0].float() for row in rows])
        noted = load_file(run / "probe.safetensors")
        plain, ours = noted["without_adapter"].float(), noted["with_adapter"].float()
        error = float((torch.cat(states).float() - ours).norm() / (ours - plain).norm())
        divisor = getattr(model.config, "logits_scaling", 1)
        plain, ours = (model.lm_head(x.bfloat16()).float() / divisor for x in (plain, ours))
        of_logits = float((logits - ours).norm() / (ours - plain).norm())
    print(f"{name}: states {error:.4f}, logits {of_logits:.4f}, reported {reported:.4f}")
    assert error < 0.1 and reported == pytest.approx(of_logits, rel=0.02)


def swap_experts(tensors):
    """What expert i gives is that of expert 7 - i, in all layers."""
    for key in [key for key in tensors if re.search(r"experts\.[0-3]\.down", key)]:
        other = re.sub(r"experts\.(.)", lambda found: f"experts.{7 - int(found[1])}", key)
        tensors[key], tensors[other] = tensors[other], tensors[key]


@pytest.mark.parametrize("name", [
    "mxfp4",
    *(pytest.param(name, marks=pytest.mark.slow)
      for name in ("qwen2_moe", "nemotron_h_latent", "gemma4_moe", "step3p7", "granitemoe", "hy_v3",
                   "qwen3_5_moe_vl"))])
def test_adapters_of_experts_resume_begin_a_run_and_merge_to_what_peft_gives(
    name, run_main, demo_directory, tmp_path, capsys
):
    """Where PEFT has parameters of all experts, which in a model in MXFP4 are not there."""
    base, run, other = (tmp_path / x for x in ("base", "run", "other"))
    write_base(name, base, demo_directory)

    def train(directory, *flags):
        code, out, err = run_main(
            "--model", base, "--dataset", demo_directory / "data.jsonl", "--batch_size", 4,
            "--report_to", "none", "--target_modules", "q_proj", "experts", "--lora_rank", 8,
            "--eval_every", 0, "--max_seq_len", 64, "--output_dir", directory, *flags)  # fmt: skip
        assert code == 0, err
        assert ("Load it with Mxfp4Config(dequantize=True)" in out) == (name == "mxfp4")
        return load_file(directory / "adapter_model.safetensors")

    flags = "--learning_rate", 0.01, "--save_every", 1, "--max_steps", 2
    adapter = train(run, *flags)
    shutil.rmtree(run / "checkpoint-000002")
    (run / "adapter_model.safetensors").unlink()
    again = train(run, *flags)
    begun = train(other, "--init_adapter", run, "--learning_rate", 1e-30, "--max_steps", 1)
    for key, tensor in adapter.items():
        assert torch.equal(tensor, again[key]) and torch.equal(tensor, begun[key]), key
    capsys.readouterr()
    merge(run, tmp_path / "out")
    assert WARNED not in capsys.readouterr().out

    quantization = {"quantization_config": Mxfp4Config(dequantize=True)} if name == "mxfp4" else {}
    auto = auto_class(AutoConfig.from_pretrained(base))
    model = auto.from_pretrained(base, **quantization).float()
    merged = auto.from_pretrained(tmp_path / "out").float().state_dict()
    plain = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    adapted = PeftModel.from_pretrained(model, run).merge_and_unload().state_dict()
    for key, weight in plain.items():
        # merged: NF4 of the base, or its MXFP4, and what PEFT adds
        if ".experts." in key and weight.dim() == 3:
            if name != "mxfp4":
                halves = 1 + ("gate_up" in key)
                weight = torch.stack([torch.cat([*map(nf4_and_back, x.bfloat16().chunk(halves))])
                                      for x in weight]).float()  # fmt: skip
            want = (weight + adapted[key] - plain[key]).bfloat16().float()
            assert not torch.equal(adapted[key], plain[key])
            assert (merged[key] - want).norm() < 1e-3 * want.norm(), key


@pytest.mark.parametrize("name, form", [
    ("lfm2_moe", "modules"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qwen3_5_moe_vl", "parameters"), ("nemotron_h_latent", "modules")))])
def test_adapters_of_experts_in_the_form_of_earlier_versions_are_read(
    name, form, run_main, demo_directory, tmp_path
):  # fmt: skip
    """By expert, which PEFT does not load of these."""
    base, run, old, other = (tmp_path / x for x in ("base", "run", "old", "other"))
    write_base(name, base, demo_directory)

    def train(directory, *flags):
        code, _, err = run_main(
            "--model", base, "--dataset", demo_directory / "data.jsonl", "--batch_size", 4,
            "--report_to", "none", "--target_modules", "q_proj", "experts", "--lora_rank", 8,
            "--eval_every", 0, "--max_seq_len", 64, "--max_steps", 1, "--output_dir", directory,
            *flags)  # fmt: skip
        assert code == 0, err
        return load_file(directory / "adapter_model.safetensors")

    adapter = train(run, "--learning_rate", 0.01)
    shutil.copytree(run, old)
    parts = expert_slices(make_architecture(AutoConfig.from_pretrained(base)), 8)
    save_file({key: tensor.contiguous() for key, tensor in unstack_experts(adapter, parts).items()},
              old / "adapter_model.safetensors")
    settings = json.loads((run / "adapter_config.json").read_text())
    if form == "modules":
        settings |= dict(target_parameters=None, rank_pattern={}, alpha_pattern={})
    (old / "adapter_config.json").write_text(json.dumps(settings))
    begun = train(other, "--init_adapter", old, "--learning_rate", 1e-30)
    assert begun.keys() == adapter.keys()
    assert all(torch.equal(tensor, begun[key]) for key, tensor in adapter.items())

    described = json.loads((old / "train_config.json").read_text())
    described["adapter_sha256"] = digest(old / "adapter_model.safetensors")
    (old / "train_config.json").write_text(json.dumps(described))
    for directory in run, old:
        merge(directory, directory / "merged")
    want, got = (load_file(x / "merged" / "model.safetensors") for x in (run, old))
    assert want.keys() == got.keys()
    assert all(torch.equal(tensor, got[key]) for key, tensor in want.items())


def negate(pattern):
    return lambda tensors: [tensors[key].neg_() for key in tensors if re.search(pattern, key)]


REFUSED, WARNED = "the merged model does not match", "warning: the merged model differs"
CHANGES = {
    "attention": (negate(r"layers\.1.*v_proj"), REFUSED),
    "head": (negate("lm_head"), REFUSED),
    "norm": (lambda tensors: tensors["model.norm.weight"].mul_(3), REFUSED),
    # these count for less than the adapter
    "router": (negate(r"mlp\.gate\.weight"), WARNED),
    "experts": (swap_experts, WARNED),
}


@pytest.mark.parametrize("what", CHANGES)
def test_merged_model_that_is_another_is_noticed(
    what, trained, run_main, tmp_path, monkeypatch, capsys
):
    run, write_merged = trained("qwen3_moe", run_main), merge_adapters.write_merged
    change, words = CHANGES[what]

    def write_and_change(directory, *args):
        write_merged(directory, *args)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(merge_adapters, "write_merged", write_and_change)
    with pytest.raises(SystemExit) if words == REFUSED else contextlib.nullcontext():
        merge(run, tmp_path / "out")
    said = "".join(capsys.readouterr())
    # unmerged it would be another model: transformers leaves experts in bf16
    assert words in said and "without merging it" not in said
    assert (tmp_path / "out").exists() == (words == WARNED)


@pytest.mark.parametrize("name, stored, row, part", [
    ("granitemoe", "block_sparse_moe.input_linear.weight", 96,
     "block_sparse_moe.experts.3.up_proj.weight"),
    ("mxfp4", "mlp.experts.down_proj_blocks", 9, "mlp.experts.3.down_proj.weight_blocks"),
])  # fmt: skip
def test_change_of_one_experts_slice_is_named(
    name, stored, row, part, trained, run_main, tmp_path, capsys
):
    """tensor_checksum() of each expert's matrix, though the file has all in one tensor."""
    run = trained(name, run_main)
    path = run.parent / "base" / "model.safetensors"
    before, tensors = path.read_bytes(), load_file(path)
    tensors[f"model.layers.2.{stored}"][3, row, 1] += 1  # of expert 3, in Granite's the first of up
    save_file(tensors, path, metadata={"format": "pt"})
    try:
        with pytest.raises(SystemExit, match="1"):
            merge(run, tmp_path / "out")
    finally:
        path.write_bytes(before)
    words = f"{path}: the values of model.layers.2.{part} are not those"
    assert words in capsys.readouterr().err


# one of each kind of names, mixers and MLPs; by `make test-slow` all
IN_4BIT = """llama phi3 gemma2 gemma4_e granite4_h lfm2 qwen3_5 falcon_h1 youtu qwen3_moe gpt_oss
    deepseek_v3""".split()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_4BIT)) for name in TINY])
def test_what_load_in_4bit_quantizes_is_what_training_does(name):
    """Of each family, so that PEFT's adapters are merged by the rule of the run's own; mixtures
    are refused, as the versions of transformers differ in their experts."""
    config = TINY[name](96)
    with torch.device("meta"):
        files = dict(auto_class(config).from_config(config).named_parameters())
    arch = make_architecture(config)
    wanted = tensor_names(arch, files).linears
    if arch.moe:
        with pytest.raises(ValueError, match="has experts: .* depending on the version"):
            linears_in_4bit(Path("base"), config, auto_class(config), files)
        return
    text, _ = linears_in_4bit(Path("base"), config, auto_class(config), files)
    assert {*text.values()} == {*wanted}


def test_adapter_of_the_text_model_needs_no_names_outside_of_it(tmp_path, capsys):
    """Where the files have other names there than transformers, which refuses only an adapter
    outside of the text model."""
    config, path = TINY["gemma3"](96), tmp_path / "base" / "model.safetensors"
    write_model(tmp_path / "base", config)
    tensors = load_file(path)
    name = next(n for n in tensors if n.startswith("vision_tower") and n.endswith("fc2.weight"))
    tensors["vision_tower.other"] = tensors.pop(name)
    save_file(tensors, path, {"format": "pt"})
    for targets, words in (r".*language_model.*q_proj", "note: "), (r".*q_proj", "other names"):
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
        for value in model.to_empty(device="cpu").parameters():
            value.data.fill_(0.1)
        model.save_pretrained(tmp_path / words)
        with contextlib.suppress(SystemExit):
            merge_adapters.main([
                "--adapter_dir", str(tmp_path / words), "--base_model", str(tmp_path / "base"),
                "--output_dir", str(tmp_path / words / "out")])  # fmt: skip
        assert words in "".join(capsys.readouterr())
        assert (tmp_path / words / "out").is_dir() == (words == "note: ")
