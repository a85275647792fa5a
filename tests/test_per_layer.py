"""Gemma 4 E2B and E4B: layers that read others' keys and values, and inputs of their own.

The whole tiny model, in which two layers read the keys and values of one, by the command line; what
two small layers of each kind compute is in test_layer.py, first steps are in test_layouts.py.
"""

import dataclasses
import functools
import inspect
import itertools
import json
import math
import re
import shutil
import types

import pytest
import torch
from conftest import selected_params, write_rows
from families import TINY, auto_class, make_model, write_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_merge import nf4_and_back
from test_numbers import of_setting, reference
from test_released import CONFIGS
from transformers import AutoConfig, PreTrainedTokenizerFast

import merge_adapters
from fsdp_qlora.config import Config
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.lora.targets import adapted_linears
from fsdp_qlora.model.per_layer_inputs import per_layer_inputs
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.predict_memory import predict_memory
from fsdp_qlora.pretrained.from_config import make_architecture

NAMES = "gemma4_e", "gemma4_wide"
FLAGS = ["--lora_rank", "4", "--batch_size", "16", "--max_seq_len", "64", "--compute_dtype",
         "float32"]  # fmt: skip
SETTINGS = {
    "kept": ["--recompute", "none"],
    "recomputed": ["--recompute", "all"],
    # those that share theirs are computed again, those that read are not
    "some recomputed": ["--recompute", "3"],
    "offloaded": ["--recompute", "5", "--offload_activations", "--offload_params"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, demo_directory):
    """The directory of the models, each with an adapter of random values, and rows.jsonl."""
    directory = tmp_path_factory.mktemp("per_layer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    write_rows(directory / "rows.jsonl", 16)
    for name in NAMES:
        config, generator = TINY[name](len(tokenizer)), torch.Generator().manual_seed(1)
        write_model(directory / name, config)
        tokenizer.save_pretrained(directory / name)
        arch, adapter = make_architecture(config), {}
        for i, kind in enumerate(arch.layer_kinds):
            for linear in arch.linears(kind):
                stem = f"base_model.model.model.layers.{i}.{linear.name}"
                for key, shape in (("lora_A", (4, linear.in_features)),
                                   ("lora_B", (linear.out_features, 4))):  # fmt: skip
                    value = torch.randn(shape, generator=generator) * 0.05
                    adapter[f"{stem}.{key}.weight"] = value
        save_file(adapter, directory / f"{name}.adapter")
    return directory


@pytest.fixture(scope="module")
def worked(base, run_jobs, request):
    """worked(nproc): makes the gradients of the selected tests' models and settings on so many
    processes."""
    done = set()
    selected = [(params.get("name"), params.get("nproc"), params.get("setting"))
                for params in selected_params(request)]

    def call(nproc):
        if nproc not in done:
            done.add(nproc)
            run_jobs(nproc, [
                {"case": "gradients", "model": str(base / name),
                 "settings": {setting: FLAGS + flags for setting, flags in SETTINGS.items()
                              if (name, nproc, setting) in selected},
                 "adapter": str(base / f"{name}.adapter"), "dataset": str(base / "rows.jsonl"),
                 "out": str(base / f"{name} on {nproc}")}
                for name in NAMES if any((name, nproc) == case[:2] for case in selected)], cwd=base)

    return call


@pytest.fixture(scope="module")
def expected(base):
    """Function (name): the loss and all gradients by transformers and PEFT."""

    @functools.cache
    def compute(name):
        adapter = base / f"{name}.adapter"
        targets = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in load_file(adapter)}
        return reference(base / name, adapter, base / "rows.jsonl", torch.float32,
                         target_modules=sorted(targets))  # fmt: skip

    return compute


# the others by `make test-slow`: these two have layers that are computed again, kept and offloaded
SOME = [(NAMES[0], 2, "some recomputed"), (NAMES[0], 2, "offloaded")]


@pytest.mark.parametrize("name, nproc, setting", [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in SOME))
    for case in itertools.product(NAMES, (1, 2), SETTINGS)])
def test_gradients_through_shared_keys_and_values_equal_transformers(
    name, nproc, setting, base, worked, expected
):
    worked(nproc)
    got = of_setting(load_file(base / f"{name} on {nproc}"), setting)
    loss, exact = expected(name)
    assert len(got) == 2 + len(exact) and not any("layers.3.self_attn.k_proj" in n for n in exact)
    assert abs(got["loss"] - loss) <= 1e-5 * loss
    for key, grad in exact.items():
        assert grad.norm() > 0 and (got[key] - grad).norm() <= 1e-5 * grad.norm(), key


LINEAR = r".*(\.(self_attn|mlp)\.\w+_proj|\.per_layer_(input_gate|(model_)?projection))\.weight"
UNREAD = "k_proj", "v_proj", "k_norm"  # released files have them in layers that read others'


def write_as_released(directory, config):
    """Write a model with keys and values in all layers. Returns {name: tensor} of those unread."""
    write_model(directory, config)
    tensors, unread = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if "language_model.layers.1.self_attn" in name]:
        if name.endswith(tuple(f"{part}.weight" for part in UNREAD)):
            for i in 3, 4:  # of the same kind as layer 1
                unread[name.replace("layers.1", f"layers.{i}")] = tensors[name].clone()
    assert len(unread) == 2 * len(UNREAD)
    save_file(tensors | unread, directory / "model.safetensors", {"format": "pt"})
    return unread


def train(run_main, base, directory, rows, *flags):
    code, out, err = run_main(
        "--model", base, "--dataset", rows, "--batch_size", 4, "--lora_rank", 4,
        "--learning_rate", 0.01, "--report_to", "none", "--max_seq_len", 64, "--output_dir",
        directory, *flags)  # fmt: skip
    assert code == 0, err
    return out, load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("adapter", ["lora", pytest.param("dora", marks=pytest.mark.slow)])
def test_run_evaluates_resumes_and_merges_to_what_peft_gives(
    adapter, base, run_main, tmp_path, read_metrics, capsys
):
    """Inside of the multimodal model, from files as released."""
    model, run, rows = tmp_path / "model", tmp_path / "run", base / "rows.jsonl"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / NAMES[0])
    config = TINY["gemma4_e_vl"](len(tokenizer))
    unread = write_as_released(model, config)
    tokenizer.save_pretrained(model)
    flags = ("--adapter", adapter, "--save_every", 1, "--max_steps", 2, "--eval_dataset", 0.2,
             "--eval_every", 1)  # fmt: skip
    _, whole = train(run_main, model, run, rows, *flags)
    assert len(whole) == (3 * 9 + 3 * 7) * (2 + (adapter == "dora"))
    losses = [row.get("eval_loss") for row in read_metrics(run)]
    shutil.rmtree(run / "checkpoint-000002")
    (run / "adapter_model.safetensors").unlink()
    _, again = train(run_main, model, run, rows, *flags)
    _, begun = train(run_main, model, tmp_path / "other", rows, "--init_adapter", run, "--adapter",
                     adapter, "--max_steps", 1, "--learning_rate", 1e-30)  # fmt: skip
    assert all(torch.equal(x, again[key]) and torch.equal(x, begun[key])
               for key, x in whole.items())  # fmt: skip
    assert [row.get("eval_loss") for row in read_metrics(run)] == losses and any(losses)
    capsys.readouterr()
    merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(tmp_path / "out")])
    out = capsys.readouterr().out
    assert "\nwarning: " not in out and "are not used" not in out
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged.pop(name), tensor) for name, tensor in unread.items())
    plain = auto_class(config).from_pretrained(model, dtype=torch.bfloat16)
    for name, weight in plain.named_parameters():
        if re.fullmatch(LINEAR, name) and "vision" not in name:
            weight.data = nf4_and_back(weight.data)
    want = PeftModel.from_pretrained(plain.float(), run).merge_and_unload().state_dict()
    loaded = auto_class(config).from_pretrained(tmp_path / "out").float().state_dict()
    for name, weight in loaded.items():
        assert (weight - want[name]).norm() <= 2**-8 * want[name].norm(), name


# width of the table, of what layers read of others: keys and values of a window and without
@pytest.mark.parametrize("name, width, hidden, kv_to_share", [
    ("Gemma 4 E2B", 35 * 256, 1536, 2 * 256 + 2 * 512),
    ("Gemma 4 E4B", 42 * 256, 2560, 4 * 256 + 4 * 512)])  # fmt: skip
def test_plan_counts_tables_and_shared_keys_and_values(name, width, hidden, kv_to_share, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    arch = make_architecture(AutoConfig.from_pretrained(tmp_path))
    specs = make_layer_specs(
        arch, adapted_linears(arch, ["all-linear"]), Config(model=name).adapter_settings)
    plan = Plan(
        compute_dtype="bfloat16", n_layers=arch.n_layers, shard_group_size=2,
        reshard_after_forward=True, micro_batch_tokens=1024, n_recomputed=0,
        save_mid_residual=False, reuse_dequantized=False, offload_activations=False,
        offload_params=False)  # fmt: skip
    on_gpu, on_host = (
        predict_memory(dataclasses.replace(plan, embedding_on_host=flag), arch, specs)
        for flag in (False, True))
    common = "per-layer inputs, shared keys and values"
    assert on_gpu.memory[common] == (width + 3 * kv_to_share) * 1024 * 2
    kind, table = "embedding, head, norms", 262144 * width * 2 // 2  # bf16, on two processes
    norms = sum(spec.n_vector_values for spec in specs) * 2 // 2
    every_rank = sum(4 * spec.n_nested_values + 2 * sum(map(math.prod, spec.small_tensors.values()))
                     for spec in specs)  # scales of scales, small tensors
    whole = table + 262144 * hidden * 2 // 2 + norms + width * hidden * 2 + every_rank
    assert on_gpu.memory[kind] == whole and on_gpu.host_bytes == 0
    assert on_host.memory[kind] == whole - table and on_host.host_bytes == table  # the head stays


def test_plan_and_random_weights_need_config_json_alone(base, run_main, tmp_path):
    (tmp_path / "config.json").write_text((base / NAMES[1] / "config.json").read_text())
    code, out, err = run_main("--model", tmp_path, "--plan_for", "4090")
    assert code == 0 and "fits: " in out, err
    code, out, err = run_main(
        "--model", tmp_path, "--random_weights", "--max_steps", 1, "--batch_size", 2,
        "--max_seq_len", 32, "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err


def test_bf16_inputs_of_layers_round_as_transformers():
    """In fp32 it makes no difference what is rounded first."""
    config, ids = TINY["gemma4_e"](320), torch.arange(40)
    text = make_model(config, dtype=torch.bfloat16).model
    with torch.no_grad():
        embeddings = text.embed_tokens(ids[None])
        # transformers 5.20 wants embeddings, too, which it reads where there are no ids
        more = [None] * (len(inspect.signature(text.get_per_layer_inputs).parameters) - 1)
        of_table = text.get_per_layer_inputs(ids[None], *more)
        want = text.project_per_layer_inputs(embeddings, of_table)[0]
        model = types.SimpleNamespace(
            shard_group_size=1, arch=make_architecture(config), local_rows=range(320),
            per_layer_table=text.embed_tokens_per_layer.weight,
            per_layer_projection=text.per_layer_model_projection.weight,
            per_layer_norm=text.per_layer_projection_norm.weight)
        assert torch.equal(per_layer_inputs(model, ids, embeddings[0]), want)
