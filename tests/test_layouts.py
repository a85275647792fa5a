"""Mixtures by the command line, from each layout of files in which such models are released; and
models without experts whose layers have tensors, or linears, that no others have.

The reference is test_step.py's, transformers' model with bitsandbytes' 4-bit linears in PEFT, and
in place of what that leaves whole: bitsandbytes' NF4 of each expert's matrices. `make test` runs
the commonest layouts, `make test-slow` all; the table for benchmarks/RESULTS.md is what
`.venv/bin/python -m pytest -m '' -s tests/test_layouts.py | grep -o '| .*'` prints.
"""

import math
import zlib

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, read_rows
from families import (
    MIXTURES as IN_FAMILIES,
    OUTER,
    ROUTER_NO_LINEAR_IN_4,
    TINY,
    make_model,
    tiny,
    write_4bit,
    write_fp8,
    write_int4,
    write_mxfp4,
)
from safetensors.torch import load_file, save_file
from test_step import FLAGS, LARGE, load_reference, rows_of_step, write_uneven_rows
from transformers import AutoConfig, PreTrainedTokenizerFast

from fsdp_qlora.lora.targets import adapted_linears
from fsdp_qlora.pretrained.from_config import make_architecture

BAR = 1e-5  # of relative differences of a first step in fp32
FUSED = "fused"  # all experts' in one tensor [experts, out, in], as transformers 5 has in memory
AXK1 = "as released"  # without corrections, and with a norm that the first layer does not read
EXPERTS = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
BITS = {"NF4 of transformers 4": 4, "NF4 of transformers 5": 5}
RELEASED = {  # what transformers saves is as released; of the others an expert's are apart
    "mixtral": "w1, w2, w3", "minimax_m2": "w1, w2, w3", "granitemoe": "input_linear",
    "granite4_h_moe": "input_linear", "granitemoeshared": "input_linear",
    "granitemoe_swa": "gate_up_proj", "granitemoe_swa_routed": "gate_up_proj",
    "gpt_oss": "transposed", "qwen3_vl_moe": "transposed", "gemma4_moe": "gate_up_proj",
    "step3p7": "gate_proj, up_proj"}  # fmt: skip


NEW_IN_5 = (  # not in transformers 4
    "minimax_m2", "qwen3_5", "gemma4", "nemotron_h", "granitemoe_swa", "sarvam_mla", "flint",
    "axk1", "kolibri1", "cohere2_moe")  # fmt: skip
MANY = "160 experts"  # more than a signed byte numbers
MODELS = {**TINY, **OUTER, MANY: tiny("qwen3_moe", moe_intermediate_size=32, num_experts=160,
                                      num_experts_per_tok=8)}  # fmt: skip


def layouts(name):
    """Those of a mixture of families.py. Not all are in transformers 4."""
    if name == MANY:
        return [FUSED]
    found = [RELEASED.get(name, "per expert"), FUSED, *BITS]
    if name.startswith(NEW_IN_5):
        found.remove("NF4 of transformers 4")
    # transformers saves no 4-bit copy of them
    if name.startswith(("mistral4", "kimi_k25", "glm4v_moe", "step3p7", "sarvam_moe")):
        found = found[name == "kimi_k25" : 2]  # and its own files of this one it cannot read
    if name in ("deepseek_v32", "glm_moe_dsa"):  # an indexer in 4 bits is not read
        found = found[:2]
    if name in ("qwen3_vl_moe", "qwen3_5_moe_vl"):  # nor a vision tower that is
        found.remove("NF4 of transformers 5")
    if name.startswith(("gpt_oss", "gemma4_moe", "granitemoe_swa")):  # fused in their files, too
        found.remove(FUSED)
    if name == "gpt_oss":
        found.append("MXFP4")
    found += [AXK1] * (name == "axk1")
    found += ["INT4"] * (name == "deepseek_v3")
    return found + ["FP8"] * (name in ("qwen3_moe", "minimax_m2", "deepseek_v3", "deepseek_v32"))


MIXTURES = [*IN_FAMILIES, MANY]
OWN_TENSORS = (
    "apertus", "gemma4", "gemma4_unified", "gemma4_e", "gemma4_wide", "gemma4_e_vl", "muse_glimmer",
    "lfm2", "lfm3", "granite_swa", "exaone", "olmo", "nanochat", "phi", "qwen3_5", "granite4_h",
    "falcon_h1", "youtu", "minicpm3")  # fmt: skip
DENSE = [(name, how) for name in OWN_TENSORS if name in TINY for how in ("as saved", "DoRA")]
# with a linear outside of the layers; with other names in files
DENSE += [(name, "NF4 of transformers 5") for name in ("gemma4_e", "exaone")]
CASES = DENSE + [(name, layout) for name in MIXTURES for layout in layouts(name)]
QUICK = [
    ("mixtral", "w1, w2, w3"), ("qwen3_moe", FUSED), ("mixtral", "NF4 of transformers 5"),
    ("gpt_oss", "MXFP4"), ("minimax_m2", "FP8"), ("deepseek_v3", "INT4"), ("qwen3_5", "as saved")]
assert set(QUICK) < set(CASES)
QUICK_ON_TWO = QUICK[1:4]  # of layouts that a rank reads its part of otherwise
PARAMETERS, ON_TWO = (
    [case if case in quick else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
    for quick in (QUICK, QUICK_ON_TWO))


def write_layout(directory, name, layout, vocab_size):
    """Write a model; in whole/ in 16 bits, as transformers saves it."""
    config = MODELS[name](vocab_size)
    if layout in BITS:
        write_4bit(directory, config, BITS[layout])
    elif layout == "FP8":
        write_fp8(directory, config)
    elif layout == "INT4":
        write_int4(directory, config)
    elif layout == "MXFP4":
        write_mxfp4(directory, vocab_size)
    else:
        model = make_model(config, dtype=torch.bfloat16)
        model.save_pretrained(directory / "whole")
        model.config.save_pretrained(directory)
        if layout == FUSED:
            tensors = {key: tensor.clone() for key, tensor in model.state_dict().items()}
            save_file(tensors, directory / "model.safetensors")
        elif layout == AXK1:
            tensors = load_file(directory / "whole" / "model.safetensors")
            tensors = {key: tensor for key, tensor in tensors.items() if "correction" not in key}
            tensors["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(config.hidden_size)
            save_file(tensors, directory / "model.safetensors")
        else:
            (directory / "model.safetensors").symlink_to("whole/model.safetensors")


def is_on_two(item):
    return item.originalname == "test_two_processes_give_the_same"


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory, run_jobs, demo_directory):
    """runs(name, layout, processes): the directory of this run; the base model is in model/. All
    runs of the selected tests are made together."""
    directory, done = tmp_path_factory.mktemp("layouts"), set()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    write_uneven_rows(directory / "rows.jsonl")
    items = [item for item in request.session.items if item.path == request.path]

    def run(name, layout, nproc):
        needs_ranks(nproc)
        if nproc not in done:
            done.add(nproc)
            jobs = []
            cases, on_two = (dict.fromkeys(
                (item.callspec.params["name"], item.callspec.params["layout"]) for item in some
            ) for some in (items, filter(is_on_two, items)))
            for case in cases if nproc == 1 else on_two:
                model = directory / ", ".join(case)
                if not model.exists():
                    write_layout(model, *case, len(tokenizer))
                    tokenizer.save_pretrained(model)
                more = ["--recompute", "all"] * (MANY in case)  # by the choice of forward
                more += ["--adapter", "dora"] * ("DoRA" in case)
                more += ["--max_steps", 1] * (case not in on_two)
                argv = ["--model", model.name, *FLAGS, *LARGE, "--shard_group_size", nproc,
                        *more, "--output_dir", f"{model.name} on {nproc}"]  # fmt: skip
                jobs.append({"argv": list(map(str, argv))})
            run_jobs(nproc, jobs, cwd=directory, timeout=600)
        return directory / f"{name}, {layout} on {nproc}"

    return run


def nf4_and_back(weight, device):
    """Quantized on this device: kernels round borders of two codes as they do."""
    codes, state = bnb.functional.quantize_4bit(
        weight.detach().to(device).float().contiguous(), compress_statistics=True,
        quant_type="nf4", blocksize=64)  # fmt: skip
    return bnb.functional.dequantize_4bit(codes, state).to(weight.device)


def experts_in_nf4(name, key, experts, device):
    """transformers' tensor of all experts, each matrix [out, in] of it quantized by itself."""
    if name == "gpt_oss":  # [experts, in, out], gate and up interleaved
        return torch.stack([nf4_and_back(matrix.t(), device).t() for matrix in experts])
    pairs = [matrix.chunk(2) if "gate_up" in key else [matrix] for matrix in experts]
    return torch.stack([torch.cat([nf4_and_back(m, device) for m in pair]) for pair in pairs])


def make_reference(directory, name, layout, **settings):
    """transformers' model in PEFT with the script's adapter at its start. Routers are in NF4 where
    the file has them so: transformers 5 loads them whole, 4 saved them as linears."""
    whole = directory if layout == "NF4 of transformers 5" else directory / "whole"
    skipped = None if layout in BITS else ["lm_head", "shared_expert_gate", "wg", "router.proj"]
    arch = make_architecture(AutoConfig.from_pretrained(whole if whole.exists() else directory))
    linears = adapted_linears(arch, ["all-linear"])
    adapted = sorted({linear.rsplit(".", 1)[-1] for linear in linears})
    model = load_reference(whole, adapted, skipped, layout == "DoRA", **settings)
    device = "cpu" if layout == "NF4 of transformers 4" else DEVICE  # its file was written on a CPU
    before_5 = layout == "NF4 of transformers 4" and name not in ROUTER_NO_LINEAR_IN_4
    for key, p in model.named_parameters():
        if key.endswith(EXPERTS) and layout != "MXFP4":
            p.data = experts_in_nf4(name, key, p, device)
        elif before_5 and key.endswith((
                "mlp.gate.weight", "forward.gate.weight", "router.weight")):  # fmt: skip
            p.data = nf4_and_back(p, device)
        elif "lora_A" in key:
            key = key.replace(".default", "")
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            bound = 1 / math.sqrt(p.shape[1])
            p.data = torch.empty(p.shape).uniform_(-bound, bound, generator=generator).to(DEVICE)
    return model


def first_step(model, rows):
    """(loss, gradient norm) of a step of these rows, one by one."""
    loss, trained = 0.0, sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    for ids, labels in rows:
        logits = model(ids[None].to(DEVICE)).logits[0, :-1].float()
        part = F.cross_entropy(logits, labels[1:].to(DEVICE), reduction="sum") / trained
        part.backward()
        loss += part.item()
    grads = [p.grad for p in model.parameters() if p.grad is not None]  # not of vision towers
    return loss, math.sqrt(sum(grad.norm().item() ** 2 for grad in grads))


@pytest.mark.parametrize("name, layout", PARAMETERS)
def test_first_step_equals_transformers(name, layout, runs, read_metrics):
    first = read_metrics(runs(name, layout, 1))[0]
    directory = runs(name, layout, 1).parent
    model = directory / f"{name}, {layout}"
    rows = read_rows(directory / "rows.jsonl", PreTrainedTokenizerFast.from_pretrained(model))
    loss, norm = first_step(make_reference(model, name, layout), rows_of_step(1, rows))
    off = abs(first["loss"] / loss - 1), abs(first["grad_norm"] / norm - 1)
    print(f"| {name} | {layout} | {off[0]:.1e} | {off[1]:.1e} |")
    assert max(off) <= BAR


@pytest.mark.parametrize("name, layout", ON_TWO)
def test_two_processes_give_the_same(name, layout, runs, read_metrics):
    one, two = (read_metrics(runs(name, layout, nproc)) for nproc in (1, 2))
    # the second step's is after an 8-bit update
    for bar, row, other in zip((BAR, 10 * BAR), one, two, strict=True):
        for key in "loss", "grad_norm":
            assert row[key] > 0 and abs(row[key] - other[key]) <= bar * row[key]
