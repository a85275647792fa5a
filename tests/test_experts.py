"""Layers with experts: every way of the router, ranges of experts, layouts of files.

That each family equals transformers is in test_layer.py, on two processes in test_step.py.
"""

import dataclasses
import functools
import json
import math
import re
import shutil
import types

import bitsandbytes as bnb
import merge_adapters
import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE
from families import (
    MIXTURES,
    OUTER,
    TINY,
    from_fp8,
    from_int4,
    make_model,
    tiny,
    to_fp8,
    write_fp8,
    write_int4,
    write_model,
)
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_layer import make_model as make_model_of_layers
from test_layer import make_plan
from test_merge_experts import watch_sums
from transformers import AutoTokenizer

from fsdp_qlora.checks import compare_with_transformers as check
from fsdp_qlora.checks.compare_with_transformers import (
    ShortSlicesPlan, cpu_model, random_adapter, random_hf_model, dequantized_weights)
from fsdp_qlora.config import Config
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.kernels import activations
from fsdp_qlora.kernels.activations import (
    ClampedGLU, LimitedActivation, clamped_glu_backward_, glu, glu_backward_, glu_weight_gradients)
from fsdp_qlora.layer import grouped_mm, moe, router
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.grouped_mm import add_expert_rows
from fsdp_qlora.lora.adapter import Adapter
from fsdp_qlora.lora.init_adapter import read_adapter
from fsdp_qlora.lora.peft_files import write_adapter
from fsdp_qlora.lora.peft_names import expert_slices, peft_name, stack_experts, unstack_experts
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.families import FAMILIES
from fsdp_qlora.pretrained.from_config import make_architecture, text_config
from fsdp_qlora.pretrained.reader import ReadRequest, WeightReader, rows_in_memory, stored_tensors
from fsdp_qlora.pretrained.shrunk_config import shrunk_config
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import TensorNames, tensor_names
from fsdp_qlora.pretrained.weight_formats import scaled_weight

BAR = 1e-5  # of a relative difference in fp32


def seed(n=0):
    return torch.Generator().manual_seed(n)


def worst(name, again, monkeypatch, edit=None, ranges=1, torch_grouped=False, tokens=None):
    """The largest relative difference of logits, loss and gradients to transformers'. `edit`
    changes the reference's tensors before both get them; `tokens`: of the two documents."""
    monkeypatch.setattr(check, "LENGTHS", tokens or check.LENGTHS)
    monkeypatch.setattr(check, "ShortSlicesPlan", functools.partial(changed_plan, ranges))
    if torch_grouped:
        for module in moe, grouped_mm:
            monkeypatch.setattr(module, "why_no_grouped_mm", lambda *_: "")
    small = shrunk_config(TINY[name](320))
    arch, reference = make_architecture(small), random_hf_model(small, seed())
    tensors = reference.state_dict()
    if edit:
        edit(tensors)
    model = cpu_model(small, arch, tensors, 24, "lora", again)
    names = tensor_names(arch, tensors)
    weights = dequantized_weights(model, names)
    random_adapter(model, seed(1))
    ids = torch.randint(3, arch.vocab_size, (sum(check.LENGTHS),), generator=seed(2))
    ours = check.results(model, ids)
    theirs = check.hf_results(reference, model, names, weights, ids)
    return max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in ours)


def make_layers(model_config, arch, tensors, config):
    """The package's model, for micro-batches of the check's two documents."""
    plan = dataclasses.replace(make_plan(arch.n_layers), micro_batch_tokens=sum(check.LENGTHS))
    return make_model_of_layers(model_config, arch, tensors, config, plan)


def changed_plan(ranges, **settings):
    return ShortSlicesPlan(**settings | {"n_expert_ranges": ranges})


@pytest.mark.parametrize("torch_grouped", [False, True])
@pytest.mark.parametrize("ranges", [
    3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 8))])
@pytest.mark.parametrize("again", [False, True])
def test_ranges_of_experts_give_the_same(again, ranges, torch_grouped, monkeypatch):
    """Whether the grouped matmuls loop or are torch's, which on a CPU works, too."""
    difference = worst("glm4_moe", again, monkeypatch, ranges=ranges, torch_grouped=torch_grouped)
    assert difference < BAR


def routers(tensors):
    return [tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")]


def same_scores(tensors):
    """All experts are equally good, for all tokens."""
    for weight in routers(tensors):
        weight.copy_(weight[:1].expand_as(weight))


def one_for_all(tensors):
    """Every token goes to the first top_k experts, the others get none."""
    for weight in routers(tensors):
        weight[3:] = 0
    for name, norm in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            norm.zero_()  # so that logits are 0 but for the bias
            norm[0] = 1
    # logits are then x[0] * weight[:, 0]: of both signs, so the first and the last experts
    for weight in routers(tensors):
        weight[:, 1:] = 0


@pytest.mark.parametrize("name, edit, again", [
    pytest.param(name, edit, again, marks=[pytest.mark.slow] * (
        name != "qwen3_moe" or not again and edit == same_scores))
    for name, edit in (("qwen3_moe", same_scores), ("qwen3_moe", one_for_all),
                       ("mixtral", same_scores), ("qwen2_moe", one_for_all))
    for again in (False, True)])  # fmt: skip
def test_extreme_routers_equal_transformers(name, edit, again, monkeypatch):
    for ranges in 1, 4:
        assert worst(name, again, monkeypatch, edit=edit, ranges=ranges) < BAR


@pytest.mark.parametrize("name", MIXTURES)
def test_bf16_routers_round_as_transformers(name):
    """In fp32 it makes no difference what is rounded."""
    small = shrunk_config(TINY[name](320))
    arch, reference = make_architecture(small), random_hf_model(small, seed()).bfloat16()
    i = arch.layer_routed.index(True)
    layer = reference.model.layers[i]
    x = torch.randn(64, arch.hidden_size, generator=seed(1)).bfloat16()
    routed = layer.get_submodule(
        arch.moe.router.removesuffix(".wg").replace("router.gate", "router"))
    routed = routed.float() if name == "hunyuan_moe" else routed  # as transformers makes it
    mlp = layer.get_submodule(arch.moe.experts_prefix.split(".")[0])
    # Gemma 4's stands beside the experts, and norms x itself
    routed = layer.router if name == "gemma4_moe" else routed
    arguments = {"minimax_m2": ["e_score_correction_bias"], "hy_v3": ["e_score_correction_bias"],
                 "afmoe": ["expert_bias"], "lfm2_moe": ["expert_bias"]}.get(name, [])
    first, weights, last = routed(
        x[None] if name == "afmoe" else x, *(getattr(mlp, key) for key in arguments))
    chosen = first if last.is_floating_point() else last  # Granite's in transformers 5.17
    tensors = {key: layer.state_dict()[key] for key in arch.small_tensors(arch.layer_kinds[i])}
    call = types.SimpleNamespace(arch=arch, layer=types.SimpleNamespace(small_tensors=tensors))
    ours, order, theirs = router.route(call, x), chosen.argsort(), weights.float()
    if name in ("laguna", "step3p7"):  # there the output is scaled
        theirs = theirs * arch.moe.routed_scaling_factor
    assert torch.equal(ours.topk_experts.sort()[0], chosen.gather(1, order))
    got = ours.topk_weights.gather(1, ours.topk_experts.argsort())
    theirs = theirs.gather(1, order)
    if name in ("lfm2_moe", "mistral4"):  # there the sum, the quotient and the product are rounded
        torch.testing.assert_close(got, theirs, rtol=2**-6, atol=0)
    else:
        assert torch.equal(got, theirs)


@pytest.mark.parametrize("name", [
    name for name in MIXTURES if make_architecture(TINY[name](320)).moe.score_func == "softmax"])
def test_softmax_of_large_logits_is_finite(name):
    """Where exp() of them is infinite."""
    arch = make_architecture(TINY[name](320))
    moe, kind = arch.moe, arch.layer_kinds[arch.layer_routed.index(True)]
    tensors = {key: torch.randn(shape, generator=seed())
               for key, shape in arch.small_tensors(kind).items()}  # fmt: skip
    tensors[f"{moe.router}.weight"] *= 1000
    if moe.correction_bias:  # else tokens go to experts of which they want nothing
        tensors[moe.correction_bias].zero_()
    call = types.SimpleNamespace(arch=arch, layer=types.SimpleNamespace(small_tensors=tensors))
    x = torch.randn(64, arch.hidden_size, generator=seed(1))
    routing = router.route(call, x)
    torch.testing.assert_close(routing.scores.sum(-1), torch.ones(64))
    grad = router.route_backward(call, routing, torch.ones_like(routing.topk_weights), x)
    assert routing.topk_weights.isfinite().all() and grad.isfinite().all()


@pytest.mark.slow  # 160 experts are in test_layouts.py
@pytest.mark.parametrize("again", [False, True])
def test_more_experts_than_a_byte_numbers(again, monkeypatch):
    """Of 300, so that two documents' tokens go beyond 128 and 256; a step is in test_layouts.py."""
    small = tiny("qwen3_moe", moe_intermediate_size=64, num_experts=300, num_experts_per_tok=8)
    monkeypatch.setitem(TINY, "many", small)
    monkeypatch.setattr("test_experts.shrunk_config", lambda config: config)
    assert worst("many", again, monkeypatch, ranges=4) < BAR


FEW = {  # {which experts a token has: (family, settings)}
    "the only one": ("qwen3_moe", dict(num_experts=1, num_experts_per_tok=1)),
    "all": ("qwen3_moe", dict(num_experts=3, num_experts_per_tok=3)),
    "all, corrected": ("glm4_moe", dict(
        n_routed_experts=4, num_experts_per_tok=4, n_group=1, topk_group=1,
        first_k_dense_replace=0)),
    "one of its group": ("glm4_moe", dict(
        n_routed_experts=8, num_experts_per_tok=1, n_group=4, topk_group=1,
        first_k_dense_replace=1)),
    "one, with biases": ("gpt_oss", dict(
        num_local_experts=3, num_experts_per_tok=1, intermediate_size=64))}  # fmt: skip


@pytest.mark.parametrize("which, again, ranges", [
    pytest.param(which, again, ranges, marks=[pytest.mark.slow] * (
        again != (ranges > 1) or which not in ("all", "the only one")))
    for which in FEW for again in (False, True) for ranges in (1, 3)])
def test_few_experts_equal_transformers(which, again, ranges, monkeypatch):
    """Also where there are fewer than are dequantized at once."""
    family, settings = FEW[which]
    monkeypatch.setitem(TINY, "few", tiny(family, **{"moe_intermediate_size": 64} | settings))
    monkeypatch.setattr("test_experts.shrunk_config", lambda config: config)
    assert worst("few", again, monkeypatch, ranges=ranges) < BAR


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe", "mixtral", "step3p7", "gemma4_moe"])
def test_square_matrices_of_experts_equal_transformers(name, monkeypatch):
    """No shape tells then whether a tensor of all experts is transposed."""
    shrink = shrunk_config

    def as_square(config):
        small = shrink(config)
        field = FAMILIES[small.model_type].moe.expert_size.removeprefix("config.")
        setattr(small, field, small.hidden_size)
        return small

    monkeypatch.setattr("test_experts.shrunk_config", as_square)
    assert worst(name, False, monkeypatch) < BAR


def test_token_that_no_expert_wants_gets_nothing():
    """Sigmoids of large negative logits are 0, and so is their sum."""
    moe = make_architecture(TINY["glm4_moe"](320)).moe
    scores, chosen = torch.zeros(2, 8), torch.tensor([[0, 1, 2], [5, 6, 7]])
    weights = router.unscaled_topk_weights(scores, chosen, moe, torch.float32)[0]
    assert torch.equal(weights, torch.zeros(2, 3))


def test_corrections_are_in_all_layers_or_in_none():
    """A.X-K1's files have none, which are then 0; a damaged file may lack one."""
    config = TINY["axk1"](320)
    arch, tensors = make_architecture(config), dict(make_model(config).state_dict())
    corrections = [key for key in tensors if "correction" in key]
    assert len(corrections) == 2 and not tensor_names(arch, tensors).zeros
    del tensors[corrections[1]]
    with pytest.raises(ValueError, match=f"lacks {corrections[1]}, .* 2 layers .* 1 have"):
        tensor_names(arch, tensors)
    del tensors[corrections[0]]
    assert tensor_names(arch, tensors).zeros == {*corrections}


def wide(tensors):
    """Many of gpt-oss's gates and ups are beyond its clamp."""
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            tensor *= 4


@pytest.mark.parametrize("ranges", [1, 3])
@pytest.mark.parametrize("again", [False, True])
def test_clamped_gate_and_biases_equal_transformers(again, ranges, monkeypatch):
    assert worst("gpt_oss", again, monkeypatch, edit=wide, ranges=ranges) < BAR


@pytest.mark.parametrize("ranges", [1, 3])
@pytest.mark.parametrize("again", [False, True])
def test_limits_of_layers_equal_transformers(again, ranges, monkeypatch):
    """Of routed experts, of the shared one and of the MLP of another layer, so that much is cut."""
    share, true = [], activations.limited_ups

    def watched(ups, activation):
        out, inside = true(ups, activation)
        share.append(1 - inside.float().mean().item())
        return out, inside

    def widen(tensors):
        for name, tensor in tensors.items():
            if name.endswith(("gate_up_proj", "gate_proj.weight", "up_proj.weight")):
                tensor *= 4

    monkeypatch.setattr(activations, "limited_ups", watched)
    assert worst("step3p7", again, monkeypatch, edit=widen, ranges=ranges, tokens=(9, 5)) < BAR
    assert min(share) > 0.3 and max(share) < 0.7


def test_rows_at_once_are_an_even_share(monkeypatch):
    """However many tokens one expert has: memory is planned for no more."""
    seen = []

    class ExpertChunk(moe.ExpertChunk):
        def __init__(self, of, rows, routing, *weights):
            super().__init__(of, rows, routing, *weights)
            seen.append((rows.stop - rows.start, len(routing.routed_tokens)))

    monkeypatch.setattr(moe, "ExpertChunk", ExpertChunk)
    assert worst("qwen3_moe", True, monkeypatch, edit=one_for_all, ranges=4) < BAR
    assert seen and all(n <= -(-n_rows // 4) for n, n_rows in seen)


def test_expert_rows_are_added_before_they_are_rounded():
    rows, place = torch.tensor([[200.0], [-66.5]]).bfloat16(), torch.tensor([[0, 1]])
    total = add_expert_rows(rows, place, torch.tensor([[1 / 3, 1.0]]))
    assert total.dtype == torch.bfloat16 and total.item() == pytest.approx(1 / 6, rel=0.004)


def test_two_tokens_are_enough(monkeypatch):
    """Most experts have no row; each document has one token to predict."""
    assert worst("qwen3_moe", True, monkeypatch, tokens=(2, 2), ranges=4) < BAR


@pytest.mark.parametrize("ranges", [1, 4])
def test_backward_repeats_forwards_choice(ranges, monkeypatch):
    """A second look at the router would choose other experts here."""
    true, calls = router.select_experts, []

    def fickle(scores, moe):
        calls.append(scores)
        return true(scores if len(calls) <= 8 else -scores, moe)

    monkeypatch.setattr(router, "select_experts", fickle)
    # results() looks twice at each of two layers: for the logits, then for loss and gradient; at
    # two slices of tokens each
    assert worst("mixtral", True, monkeypatch, ranges=ranges) < BAR
    assert len(calls) == 8


def sliced_results(layer, slice_tokens, monkeypatch):
    """{result: tensor} of the recomputed MoE sublayer of a layer for 61 tokens, the last 29 of them
    padding, computed so many tokens at a time."""
    monkeypatch.setattr(ShortSlicesPlan, "expert_slice_tokens", slice_tokens)
    sublayer = layer.spec.mlp_sublayer
    x, mlp_input, grad = (
        torch.randn(61, layer.arch.hidden_size, generator=seed(n)) for n in range(3))
    inputs = types.SimpleNamespace(batch=types.SimpleNamespace(
        n_unpadded=torch.tensor([32]), dropout_seeds=torch.arange(61)))
    backward = LayerCall(layer, inputs, is_backward=True)
    layer.balance = None
    with torch.no_grad():
        evaluated = sublayer.forward_in_slices(
            LayerCall(layer, inputs, is_evaluation=True), x, mlp_input)[0]
        assert layer.balance is None
        out, choices = sublayer.forward_in_slices(LayerCall(layer, inputs), x, mlp_input)
        grad_input = sublayer.backward_in_slices(backward, mlp_input, grad, choices)
    assert len(choices) == math.ceil(61 / slice_tokens) and not backward.dequantized
    return {
        "choice": torch.cat([choice.topk_experts for choice in choices]), "balance": layer.balance,
        "evaluated": evaluated, "out": out, "gradient of the input": grad_input,
        "gradient of the adapter": backward.grad_adapter}


A_LOOP = "a loop"
SLICED = [(name, "lora", A_LOOP) for name in MIXTURES] + [("qwen2_moe", "dora", A_LOOP)]
SLICED += [(name, kind, "torch's, in one range") for name, kind, _ in SLICED]
# a bias and a limit, a shared expert with a gate, DoRA; the others by `make test-slow`
OFTEN_SLICED = ("gpt_oss", "lora"), ("qwen2_moe", "dora")


@pytest.mark.parametrize("name, kind, grouped", [
    pytest.param(name, kind, how, marks=[pytest.mark.slow] * (
        (name, kind) not in OFTEN_SLICED or how != A_LOOP and name != "gpt_oss"))
    for name, kind, how in SLICED])
def test_slices_of_tokens_give_what_all_tokens_give(name, kind, grouped, monkeypatch):
    """With dropout, ranges of experts, and slices that are in part or wholly padding."""
    if grouped != A_LOOP:
        monkeypatch.setattr(check, "ShortSlicesPlan", functools.partial(changed_plan, 1))
        for module in moe, grouped_mm:
            monkeypatch.setattr(module, "why_no_grouped_mm", lambda *_: "")
    small = shrunk_config(TINY[name](320))
    arch, reference = make_architecture(small), random_hf_model(small, seed())
    model = cpu_model(
        small, dataclasses.replace(arch, residual_dropout=0.3), reference.state_dict(), 64, kind,
        recompute=True)
    with torch.no_grad():
        random_adapter(model, seed(1))
    layer = model.layers[arch.layer_routed.index(True)]
    layer.spec = dataclasses.replace(layer.spec, dropout=0.5)
    whole = sliced_results(layer, 61, monkeypatch)
    choice = whole.pop("choice")
    for slice_tokens in 60, 16, 7:
        got = sliced_results(layer, slice_tokens, monkeypatch)
        assert torch.equal(got.pop("choice"), choice)
        assert torch.equal(got["balance"][1:], whole["balance"][1:])  # integers, and their quotient
        for what, values in whole.items():
            difference = (got[what] - values).norm()
            assert difference <= 1e-6 * values.norm() > 0, (what, slice_tokens)


# ---- adapters ----

ADAPTED = {"lora_rank": 8, "lora_alpha": 16, "target_modules": ("q_proj", "o_proj", "experts")}


# whose adapters are tested alone, and together with those of all linears; the others by
# `make test-slow`
ALONE = "mixtral", "gpt_oss"
WITH_ALL_LINEARS = """qwen3_moe gpt_oss deepseek_v3 qwen3_5_moe gemma4_moe granitemoe
    nemotron_h_latent""".split()
# whose experts have the names and layouts of another one's, by `make test-slow`; that routes
# otherwise, which is tested above and in test_layer.py
SAME_NAMES = """qwen3_moe_dense flint minimax_m2 olmoe flex_olmo granitemoe_swa sarvam_moe
    sarvam_moe_no_norm sarvam_mla glm4_moe_lite deepseek_v3_moonlight deepseek_v2 deepseek_v2_lite
    axk1 deepseek_v32 glm_moe_dsa dots1 solar_open mellum laguna laguna_elements afmoe exaone_moe
    cohere2_moe_sigmoid cohere2_moe_routed granitemoe_swa_routed granite4_h_moe nemotron_h kimi_k25
    glm4v_moe qwen3_5_moe_vl""".split()


@torch.no_grad()
@pytest.mark.parametrize("name, targets", [
    pytest.param(name, targets, marks=[pytest.mark.slow] * (
        name not in (ALONE if len(targets) == 1 else WITH_ALL_LINEARS)))
    for targets in (("experts",), ("all-linear", "experts"))
    for name in (*MIXTURES, "gemma4_moe_vl", "nemotron_h_omni")])
def test_adapters_of_experts_are_what_peft_loads(name, targets, tmp_path):
    """Names and values of the file: PEFT's model, with a vision tower if there is one, gives the
    logits, the loss and each part's gradient that ours gives."""
    config = Config(model="m", **ADAPTED | {"target_modules": targets})
    whole = (TINY | OUTER)[name](320)
    arch, reference = make_architecture(whole), make_model(whole).requires_grad_(False)
    tensors = {key: tensor.clone() for key, tensor in reference.state_dict().items()}
    model = make_layers(text_config(whole), arch, tensors, config)
    for key, weight in dequantized_weights(model, tensor_names(arch, tensors)).items():
        reference.get_parameter(key).copy_(weight)
    for i, layer in enumerate(model.layers):
        layer.adapter.normal_(0, 0.1, generator=seed(i))
    values, parts = parts_of_adapter(model, arch, "data"), expert_slices(arch, config.lora_rank)
    write_adapter(
        tmp_path, stack_experts(values, parts), resolve_adapter(arch, config, "m")[0]
    )
    ids = torch.randint(3, arch.vocab_size, (sum(check.LENGTHS),), generator=seed(2))
    with torch.enable_grad():
        ours = check.results(model, ids)
    peft = PeftModel.from_pretrained(reference, tmp_path, is_trainable=True)

    def logits():
        rows = ids.split(check.LENGTHS)
        return torch.cat([peft(input_ids=row[None]).logits[0] for row in rows])

    with torch.enable_grad():
        theirs = logits()
        rows = zip(theirs.split(check.LENGTHS), ids.split(check.LENGTHS))
        loss = sum(F.cross_entropy(row[:-1], x[1:], reduction="sum") for row, x in rows)
        loss.backward()
    assert (ours["logits"] - theirs).norm() < BAR * theirs.norm()
    assert abs(ours["loss"] - loss) < BAR * loss
    # as PEFT has it all experts' adapters are fused, whatever the file has
    moe = dataclasses.replace(arch.moe, adapter_form="stacked", renames=())
    memory = dataclasses.replace(arch, moe=moe)
    their = {name.replace(".default", ""): p.grad for name, p in peft.named_parameters()
             if p.requires_grad}  # fmt: skip
    their = unstack_experts(their, expert_slices(memory, config.lora_rank))
    mine = parts_of_adapter(model, memory, "grad")
    assert mine.keys() == their.keys()
    for key, grad in mine.items():
        bar = check.CHECK_LIMIT * their[key].norm()  # 0 without a token
        assert (grad - their[key]).norm() <= bar, key
    with peft.disable_adapter():
        assert (theirs - logits()).norm() > 0.05 * theirs.norm()


def test_adapter_whose_gate_and_up_are_not_apart_is_no_beginning(tmp_path):
    """PEFT itself trains A of both for each; here each has its own."""
    config = Config(model="m", init_adapter=str(tmp_path), **ADAPTED)
    small = shrunk_config(TINY["granitemoe"](320))
    arch = make_architecture(small)
    model = make_layers(small, arch, random_hf_model(small, seed()).state_dict(), config)
    adapter, lora_config = (
        Adapter(model, torch.device("cpu")),
        resolve_adapter(arch, config, "m")[0],
    )
    values = stack_experts(parts_of_adapter(model, arch, "data"), adapter.expert_slices)
    write_adapter(tmp_path, values, lora_config)
    own = parts_of_adapter(model, arch, "data")
    assert read_adapter(config, arch).keys() == own.keys()
    write_adapter(tmp_path, {key: value + 1 for key, value in values.items()}, lora_config)
    with pytest.raises(ValueError, match="gate and up of an expert are not apart"):
        read_adapter(config, arch)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    del settings["alpha_pattern"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="alpha_pattern is {}, by this run {.*gate_up_proj': 32}"):
        read_adapter(config, arch)


def parts_of_adapter(model, arch, what):
    """{PEFT's name: "data" or "grad"} of a model's adapter."""
    found = {}
    for i, layer in enumerate(model.layers):
        whole = getattr(layer.adapter, what)
        for part, (where, shape) in layer.spec.adapter_slices().items():
            found[peft_name(arch, i, *part)] = whole[where].view(shape).clone()
    return found


@pytest.mark.parametrize("name, change, words", [
    ("qwen3_moe", {"lora_rank": 4}, "multiple of"), ("qwen3_moe", {"adapter": "dora"}, "DoRA"),
    ("qwen3_moe", {"lora_dropout": 0.1}, "dropout"),
    ("granitemoe", {"adapter": "rslora"}, "would count gate and up 1.41 times"),
    ("qwen3_moe", {"target_modules": ("gate_proj",)}, "which --target_modules experts adapts"),
    ("qwen2_moe", {"target_modules": ("shared_expert",)},
     "choose from .*v_proj, .*, mlp.shared_expert.up_proj, .*, experts, all-linear"),
    ("llama", {}, "no such linear")])  # fmt: skip
def test_adapters_that_experts_cannot_have_are_refused(name, change, words):
    config = Config(model="m", **ADAPTED | change)
    with pytest.raises(ValueError, match=words):
        resolve_adapter(make_architecture(TINY[name](320)), config, "m")


def test_adapters_are_on_attention_by_default():
    for name in "qwen3_moe", "glm4_moe", "mixtral":
        lora_config, adapted = resolve_adapter(
            make_architecture(TINY[name](320)), Config(), "m"
        )
        assert lora_config.target_modules == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert sorted(adapted) == [f"self_attn.{x}_proj" for x in "koqv"]


@pytest.mark.parametrize("name, words, same", [
    ("qwen3_moe", ["experts", "all-linear"], ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]),
    ("gpt_oss", ["all-linear", "experts"], ["q_proj", "k_proj", "v_proj", "o_proj", "experts"]),
    ("qwen2_moe", ["all-linear", "shared_expert.up_proj"],
     ["q_proj", "k_proj", "v_proj", "o_proj", "shared_expert.up_proj"]),
    ("llama", ["v_proj", "all-linear"], ["all-linear"])])  # fmt: skip
def test_all_linear_stands_beside_other_words(name, words, same):
    arch, found = make_architecture(TINY[name](320)), []
    for targets in words, same:
        config = Config(lora_rank=8, target_modules=tuple(targets))
        lora_config, adapted = resolve_adapter(arch, config, "m")
        found.append((lora_config.to_dict(), sorted(adapted)))
    assert found[0] == found[1] and found[0][1]


@torch.no_grad()
@pytest.mark.parametrize("name, shared, is_loaded", [
    ("qwen2_moe", "shared_expert.down_proj", True), ("dots1", "shared_experts.down_proj", False),
    ("nemotron_h_latent", "fc1_latent_proj", True), ("nemotron_h", "shared_experts.up_proj", True),
    ("hy_v3", "shared_experts.down_proj", True), ("laguna", "shared_experts.down_proj", True),
    ("afmoe", "shared_experts.down_proj", False), ("kimi_k25", "shared_experts.down_proj", True),
    ("glm4v_moe", "shared_experts.down_proj", False),
    ("step3p7", "shared_experts.down_proj", True)])  # fmt: skip
def test_log_tells_where_peft_does_not_load_a_shared_experts_adapter(
    name, shared, is_loaded, tmp_path, capsys
):
    config, whole = Config(target_modules=("o_proj", shared)), TINY[name](320)
    arch, reference = make_architecture(whole), make_model(whole)
    model = make_layers(text_config(whole), arch, reference.state_dict(), config)
    for layer in model.layers:
        layer.adapter.normal_(generator=seed())
    lora_config, _ = resolve_adapter(arch, config, "m")
    says = f"--target_modules {shared}: PEFT 0.21 cannot load adapters on "
    assert (says in capsys.readouterr().out) == (not is_loaded)
    write_adapter(tmp_path, parts_of_adapter(model, arch, "data"), lora_config)
    peft = PeftModel.from_pretrained(reference, tmp_path)
    found = [key for key, p in peft.named_parameters() if f"{shared}.lora_B" in key and p.any()]
    assert bool(found) == is_loaded


# ---- files ----


def layouts_of_files(name, directory):
    """{layout: directory} of one model: as transformers saves it, which is as it is released, and
    as it is in memory. Returns its text config as well."""
    config = TINY[name](320)
    config.tie_word_embeddings = False
    model = make_model(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "released")
    (directory / "memory").mkdir()
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(tensors, directory / "memory" / "model.safetensors")
    return model.config, {key: directory / key for key in ("released", "memory")}


# transformers' own files of Kimi K2.5 it cannot read
@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name in SAME_NAMES))
    for name in MIXTURES if name != "kimi_k25"])  # fmt: skip
def test_layouts_of_files_give_the_same_values(name, tmp_path):
    """Every tensor that is read has the same rows, whichever layout holds it."""
    config, directories = layouts_of_files(name, tmp_path)
    arch, found = make_architecture(config), {}
    for layout, directory in directories.items():
        files = stored_tensors(directory)
        names = tensor_names(arch, files)
        check_files(files, names, config, "bfloat16")
        requests = [ReadRequest(n, (x.out_features, x.in_features), range(1, x.out_features),
                                names.sources.get(n)) for n, x in names.linears.items()]
        reader = WeightReader(files, requests, torch.device("cpu"))
        found[layout] = {names.linears[r.name].name + str(i): reader.read(r.name)
                         for i, r in enumerate(requests)}  # fmt: skip
        reader.close()
    released, memory = found["released"], found["memory"]
    assert released.keys() == memory.keys()
    assert all(torch.equal(value, memory[key]) for key, value in released.items())
    tensors = load_file(directory / "model.safetensors")
    for i, (name, linear) in enumerate(names.linears.items()):
        whole = rows_in_memory(tensors, names.sources, name)
        assert torch.equal(memory[linear.name + str(i)], whole[linear.in_features :]), name


def test_a_rank_reads_nothing_of_an_expert_that_it_has_no_part_of(tmp_path):
    """And of one whose matrix lies transposed, all, however few its rows."""
    config, directories = layouts_of_files("gpt_oss", tmp_path)
    files = stored_tensors(directories["released"])
    names = tensor_names(make_architecture(config), files)
    name, linear = next(x for x in names.linears.items() if ".experts.1.gate_up" in x[0])
    shape, sizes = (linear.out_features, linear.in_features), []
    for rows in range(5, 5), range(5, 8):
        request = ReadRequest(name, shape, rows, names.sources[name])
        reader = WeightReader(files, [request], torch.device("cpu"))
        sizes.append(reader._extent(request)[2])
        assert reader.read(name).numel() == len(rows) * linear.in_features
        reader.close()
    assert sizes == [0, 2 * math.prod(shape)]


@pytest.mark.parametrize("width", [64, 640])
def test_an_experts_bytes_are_bitsandbytes_own(width):
    """Of its 2-D matrices, though files may have all experts' in one tensor; also of one with
    several scales of the second level."""
    small = shrunk_config(TINY["qwen3_moe"](320))
    small.moe_intermediate_size = width
    arch, reference = make_architecture(small), random_hf_model(small, seed())
    tensors = dict(reference.state_dict())
    model = cpu_model(small, arch, tensors, 24)
    names, layer = tensor_names(arch, tensors), model.layers[0]
    for linear in layer.spec.linears:
        name = names.of_layer(0, f"{linear.name}.weight")
        weight = rows_in_memory(tensors, names.sources, name).view(-1, linear.in_features)
        codes, state = bnb.functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        assert torch.equal(layer.packed_weights.packed[linear.blocks].view(-1, 1), codes), name
        assert torch.equal(layer.packed_weights.scales[linear.blocks, 0], state.absmax), name
        assert torch.equal(layer.nested.offsets[linear.index], state.offset), name
        assert torch.equal(layer.nested.absmax[linear.nested], state.state2.absmax), name


def test_router_is_as_exact_as_in_the_files(monkeypatch):
    """Its correction is fp32 in them: rounded to bf16 it would send tokens elsewhere."""
    monkeypatch.setattr(
        check, "ShortSlicesPlan", lambda **s: ShortSlicesPlan(**s | {"compute_dtype": "bfloat16"}))
    small = shrunk_config(TINY["glm4_moe"](320))
    arch, tensors = make_architecture(small), random_hf_model(small, seed()).state_dict()
    model = cpu_model(small, arch, tensors, 24)
    assert model.layers[1].vectors.dtype == torch.bfloat16
    assert len(model.layers[1].small_tensors) == 2
    for name, tensor in model.layers[1].small_tensors.items():
        stored = tensors[tensor_names(arch, tensors).of_layer(1, name)]
        assert tensor.dtype == stored.dtype and torch.equal(tensor.flatten(), stored.flatten())


@pytest.mark.parametrize("change, words", [
    ({"num_experts": 0}, "0 experts"), ({"num_experts_per_tok": 9}, "9 for a token"),
    ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
    ({"moe_topk": [2, 1, 2]}, r"\[2, 1, 2\] for a token")])  # fmt: skip
def test_mixture_that_cannot_be_computed_is_refused(change, words):
    names = {"router_jitter_noise": "mixtral", "moe_topk": "hunyuan_moe"}
    config = TINY[names.get(*change, "qwen3_moe")](320)
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=words):
        make_architecture(config)


def test_missing_expert_is_named(tmp_path):
    config, directories = layouts_of_files("mixtral", tmp_path)
    files = stored_tensors(directories["released"])
    lost = next(name for name in files if ".experts.2.w3." in name)
    del files[lost]
    with pytest.raises(ValueError, match="lacks 1 of .* tensors.*" + lost.replace(".", r"\.")):
        check_files(files, tensor_names(make_architecture(config), files), config, "bfloat16")


# ---- FP8, further layers ----


@pytest.mark.parametrize("rows", [range(0, 300), range(5, 6), range(127, 129), range(130, 300)])
def test_rows_of_an_fp8_weight_have_their_scales(rows):
    codes, scales = to_fp8(torch.randn(300, 200, generator=seed()))
    names = TensorNames(scaled={"w": "s"}, shapes={"w": codes.shape, "s": scales.shape})
    its_scales = scales[rows.start // 128 : -(-rows.stop // 128)]
    files = {"w": codes[rows.start : rows.stop].flatten(), "s": its_scales.flatten()}
    got = StoredWeights(files.get, names, {}, torch.bfloat16).values("w", rows.start)
    assert torch.equal(got, from_fp8(codes, scales)[rows.start : rows.stop])


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_int4_means_what_compressed_tensors_documents(scales):
    """Eight weights in an int32, the first in its lowest bits, each plus 8; 32 have one scale."""
    first, last = range(8), (15, 8, 0, 7, 9, 1, 14, 3)  # codes of the first word and of the last
    numbers = [sum(code << 4 * i for i, code in enumerate(word)) for word in (first, last)]
    assert [f"{number:08x}" for number in numbers] == ["76543210", "3e19708f"]
    words = torch.full((3, 8), 0x08080808, dtype=torch.int32)
    words[0, 0], words[2, 7] = numbers
    scale = torch.tensor([[0.3, 1.0], [1.0, 1.0], [1.0, 0.0117]]).to(scales)
    got = scaled_weight("w_packed", words[1:], scale[1:])
    assert got.dtype == scales and torch.equal(
        got[1, -8:], torch.tensor([code - 8.0 for code in last]).to(scales) * scale[2, 1])
    got = scaled_weight("w_packed", words, scale)
    assert got.shape == (3, 64) and got[1].tolist() == [0.0, -8.0] * 32
    assert got[0, :9].tolist() == [float(scale[0, 0] * n) for n in range(-8, 0)] + [0.0]
    assert torch.equal(got, from_int4({"_packed": words, "_scale": scale}).to(scales))


@pytest.mark.parametrize("write, name", [
    (write_fp8, "minimax_m2"), pytest.param(write_fp8, "qwen3_moe", marks=pytest.mark.slow),
    (write_int4, "kimi_k25")])
def test_fp8_or_int4_checkpoint_trains_as_the_bf16_one_of_its_values(
    write, name, run_main, demo_directory, read_metrics, tmp_path, monkeypatch
):
    """The values that they and their scales mean, rounded to bf16, are quantized to NF4."""
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    write(tmp_path / "scaled", TINY[name](len(tokenizer)), torch.bfloat16)
    (tmp_path / "scaled" / "whole").rename(tmp_path / "bf16")
    found, counted, watched = {}, set(), watch_sums(monkeypatch)
    for kind in "scaled", "bf16":
        tokenizer.save_pretrained(tmp_path / kind)
        code, out, err = run_main(
            "--model", tmp_path / kind, "--dataset", demo_directory / "data.jsonl",
            "--max_steps", 2, "--batch_size", 4, "--max_seq_len", 64,
            "--output_dir", tmp_path / f"run-{kind}",
            "--target_modules", "o_proj", "experts", "--lora_rank", 8,
        )  # fmt: skip
        assert code == 0, err
        counted |= {line for line in out.splitlines() if line.startswith("parameters: ")}
        rows = read_metrics(tmp_path / f"run-{kind}")
        found[kind] = [(row["loss"], row["grad_norm"]) for row in rows]
        assert all(1 <= row["busiest_expert_load"] <= 8 / 3 for row in rows)
        merge_adapters.main([
            "--adapter_dir", str(tmp_path / f"run-{kind}"),
            "--output_dir", str(tmp_path / f"merged-{kind}"), "--no-check",
        ])  # fmt: skip
    assert all(sums.keys() <= sums.asked for sums in watched)
    assert found["scaled"] == found["bf16"]
    assert len(counted) == 1  # scales are no parameters
    scaled, bf16 = (load_file(tmp_path / f"merged-{kind}" / "model.safetensors") for kind in found)
    assert scaled.keys() == bf16.keys()
    assert all(torch.equal(scaled[key], value) for key, value in bf16.items())
    configs = [(tmp_path / f"merged-{kind}" / "config.json").read_text() for kind in found]
    assert configs[0] == configs[1] and "quantization_config" not in configs[0]


@pytest.mark.parametrize("change, words", [
    ({}, None), ({"{}_scale_inv": None}, "is F8_E4M3, .*, and F8_E4M3 with its {}_scale_inv"),
    ({"lm_head.weight": torch.float8_e4m3fn}, "lm_head.weight is F8_E4M3.*; F32, F16, BF16 are\n"),
    ({"{}": 0x7F}, "the model's {} has values that are not finite"),
    ({"{}": 0xFF}, "the model's {} has values that are not finite")])  # fmt: skip
def test_damaged_fp8_is_named(change, words, run_main, demo_directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    config = TINY["qwen3_moe"](len(tokenizer))
    write_model(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensors[name].float())
    for key, value in change.items():
        if value is None:
            del tensors[key.format(name)]
        elif isinstance(value, torch.dtype):
            tensors[key] = tensors[key].to(value)
        else:
            tensors[key.format(name)].view(torch.uint8)[3, 5] = value
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(tmp_path)
    code, _, err = run_main(
        "--model", tmp_path, "--dataset", demo_directory / "data.jsonl", "--max_steps", 1,
        "--max_seq_len", 64, "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == (3 if words else 0), err
    assert not words or re.search(words.format(re.escape(name)), err), err


@pytest.mark.parametrize("declared", [True, False])
def test_layers_that_predict_further_tokens_are_skipped_by_number(declared, tmp_path, capsys):
    config, directories = layouts_of_files("glm4_moe", tmp_path)
    files = stored_tensors(directories["released"])
    name = "model.layers.3.eh_proj.weight"
    files[name] = files["lm_head.weight"]
    config.num_mtp_layers = config.num_nextn_predict_layers = int(declared)
    names = tensor_names(make_architecture(config), files)
    if declared:
        check_files(files, names, config, "bfloat16")
        assert "skipped 1 multi-token-prediction (MTP) tensors" in capsys.readouterr().out
    else:
        with pytest.raises(ValueError, match="does not describe, the first is " + name):
            check_files(files, names, config, "bfloat16")


def test_balance_of_experts_is_that_of_the_steps_own_tokens(
    run_main, demo_directory, tmp_path, read_metrics
):
    """Not of evaluations, nor of the probe at a start."""
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    write_model(tmp_path / "model", TINY["qwen3_moe"](len(tokenizer)))
    tokenizer.save_pretrained(tmp_path / "model")
    lines = (demo_directory / "data.jsonl").read_text().splitlines(True)
    (tmp_path / "rows.jsonl").write_text("".join(lines[:40]))

    def balance(directory, eval_every):
        code, _, err = run_main(
            "--model", tmp_path / "model", "--dataset", tmp_path / "rows.jsonl",
            "--eval_dataset", 0.1, "--eval_every", eval_every, "--save_every", 1, "--batch_size", 4,
            "--max_steps", 2, "--max_seq_len", 64, "--output_dir", directory)  # fmt: skip
        assert code == 0, err
        rows = [row for row in read_metrics(directory) if "loss" in row]
        return [[row[key] for key in router.BALANCE_METRICS] for row in rows]

    want = balance(tmp_path / "a", 0)
    assert len(want) == 2 and want == balance(tmp_path / "b", 1)
    shutil.rmtree(tmp_path / "a" / "checkpoint-000002")
    (tmp_path / "a" / "adapter_model.safetensors").unlink()
    assert want == balance(tmp_path / "a", 0)


def balance_of(layer, scores, chosen, n_unpadded):
    experts, order = chosen.flatten().sort(stable=True)
    ends = torch.bincount(experts, minlength=8).cumsum(0).int()
    routing = types.SimpleNamespace(scores=scores, ends=ends, routed_tokens=order // 2)
    router.add_balance(layer, [router.count_experts(routing, torch.tensor([n_unpadded]))])


def test_balance_of_experts_is_one_where_all_are_used_alike():
    """And n_experts / top_k where all tokens go to the same ones."""
    layer = types.SimpleNamespace(balance=None)
    alike = torch.full((32, 8), 0.125), torch.arange(64).view(32, 2) % 8
    same = torch.tensor([[0.5, 0.5, *[0] * 6]] * 32), torch.tensor([[0, 1]] * 32)
    balance_of(layer, *alike, 32), balance_of(layer, *same, 32)
    assert layer.balance.tolist() == [1 + 8 / 2] * 2 + [2]
    balance_of(layer, *(torch.cat(pair) for pair in zip(alike, same)), 32)  # the rest is padding
    balance_of(layer, *same, 0)
    assert layer.balance.tolist() == [1 + 8 / 2 + 1] * 2 + [3]
    model = types.SimpleNamespace(layers=[layer, layer], norm=torch.zeros(1))
    assert router.take_balance(model.layers, torch.device("cpu")).tolist() == [12, 12, 6]
    assert layer.balance.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe"])
def test_balance_of_experts_counts_no_padding(name):
    """A row alone in a micro-batch, beside a longer one of another process, and before padding."""
    small = shrunk_config(TINY[name](320))
    arch, reference = make_architecture(small), random_hf_model(small, seed())
    model = cpu_model(small, arch, reference.state_dict(), 64, "lora")
    ids = torch.randint(3, 128, (45,), generator=seed(1))
    rows = make_rows([(x, x) for x in ids.split([9, 36])])
    found = []
    for packed in [[0]], [[0], [1]], [[], [1]]:
        model(make_micro_batch(rows, packed, model.micro_batch_format))
        found.append(router.take_balance(model.layers, torch.device("cpu")))
    alone, padded, padding = found
    assert alone[2] == arch.layer_routed.count(True) and 1 < alone[1] / alone[2] < 8
    torch.testing.assert_close(padded, alone, rtol=1e-6, atol=0)
    assert padding.tolist() == [0, 0, 0]


def autograd_glu(gate_up, activation):
    """What glu() gives, by formulas of its own, in fp64."""
    if activation == "relu2":  # without a gate
        return F.relu(gate_up).square()
    if activation == "silu":
        gates, ups = gate_up.chunk(2, -1)
        return F.silu(gates) * ups
    if isinstance(activation, LimitedActivation):
        gates, ups = gate_up.chunk(2, -1)
        limit = activation.limit
        return F.silu(gates).clamp(max=limit) * ups.clamp(-limit, limit)
    limit, alpha = activation
    gates, ups = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return (ups + 1) * gates * (alpha * gates).sigmoid()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [
    "silu", "relu2", ClampedGLU(0.7, 1.702), LimitedActivation("silu", 0.7),
    LimitedActivation("silu", 0.5)],
    ids=["silu", "relu2", "clamp", "limit", "another limit"])  # fmt: skip
def test_gates_of_experts_equal_autograd(activation, dtype, compiled):
    """Also by torch's compiler, with lengths that change, as those of micro-batches do."""

    def kernel(function):
        return torch.compile(function.__wrapped__) if compiled else function  # on GPUs always

    gated, in_place = activation != "relu2", not isinstance(activation, ClampedGLU)
    backward = kernel(glu_backward_ if in_place else clamped_glu_backward_)
    forward, sums = kernel(glu), kernel(glu_weight_gradients)
    for n in (24, 37, 51):
        grad, gate_up, weights = (
            torch.randn(shape, generator=seed(n)).to(DEVICE) for shape in (
                (n, 32), (n, 32 * (1 + gated)), (n,))
        )
        grad, gate_up = grad.to(dtype), gate_up.to(dtype)
        exact = gate_up.double().requires_grad_(), weights.double().requires_grad_()
        want = autograd_glu(exact[0], activation)
        (want * exact[1][:, None] * grad).sum().backward()
        out = torch.empty_like(grad)
        forward(out, gate_up, activation, gated)
        grad_weights = sums(grad, gate_up, activation, gated)
        if in_place:
            backward(grad, activation, weights, *gate_up.chunk(1 + gated, -1))
        else:
            gate_up = backward(grad, weights, gate_up, *activation)
        torch.testing.assert_close(out, want.to(dtype))
        torch.testing.assert_close(grad, want.to(dtype))
        torch.testing.assert_close(gate_up, exact[0].grad.to(dtype))
        torch.testing.assert_close(grad_weights, exact[1].grad.float(), rtol=1e-5, atol=1e-5)
