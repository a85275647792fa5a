"""In bf16 numbers are rounded where they are written, once: what leads there from rounded inputs is
computed in fp32.

A function here gets random inputs that are bf16's values, once as bf16 and once as fp32. The second
result is exact, and the first must be as far from it as one rounding takes it. To round anything
else on the way, where it counts a seventh of that, adds a hundredth to the distance. In fp32, where
families are compared with transformers, it would make no difference.
"""

import dataclasses
import functools
import importlib
import pkgutil
import types

import pytest
import torch
import torch.nn.functional as F
from families import MIXTURES, TINY
from test_layer import Pair, adapter_values, make_model, make_plan

import fsdp_qlora
from fsdp_qlora.checks.compare_with_transformers import random_hf_model
from fsdp_qlora.config import Config
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.kernels import activations, attention, dropout, heads, norms, recurrence
from fsdp_qlora.kernels.activations import (
    ClampedGLU, LimitedActivation, ScaledActivation, XIELUActivation)
from fsdp_qlora.kernels.sinks import SinkAttention
from fsdp_qlora.layer import (
    autograd_mixers, grouped_mm, lora_matmul, mla_context, mla_heads, moe, per_layer_gate, router)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.residual import ResidualSum
from fsdp_qlora.model import lm_head
from fsdp_qlora.model.preference_loss import sum_documents
from fsdp_qlora.pretrained.family_specs import GatedDeltaNetSpec, Mamba2Spec
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.shrunk_config import shrunk_config

N, WIDTH, HEADS = 96, 128, 4


def draw(*shape, seed=0):
    """Random values of bf16, another for each shape and seed."""
    generator = torch.Generator().manual_seed(hash((shape, seed)) % 2**32)
    return torch.randn(*shape, generator=generator).bfloat16()


def tensors_of(values):
    """All tensors of numbers in nested tuples and lists."""
    if isinstance(values, (tuple, list)):
        return [tensor for value in values for tensor in tensors_of(value)]
    is_one = isinstance(values, torch.Tensor) and values.is_floating_point()
    return [values] if is_one else []


def in_dtype(value, dtype):
    """A copy of a tensor of bf16, or of xIELU's, in this dtype; all else as it is."""
    if isinstance(value, XIELUActivation):
        return XIELUActivation(in_dtype(value.scalars, dtype))
    is_one = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.to(dtype, copy=True) if is_one else value


def assert_rounded_once(function, *args, **settings):
    """Of all that it returns, and of its arguments, which it may write over."""
    found = []
    for dtype in torch.bfloat16, torch.float32:
        given = [in_dtype(arg, dtype) for arg in args]
        found.append(tensors_of([function(*given, **settings), *given]))
    for i, (got, exact) in enumerate(zip(*found, strict=True)):
        check_rounding(got, exact, i)


def check_rounding(got, exact, what):
    """A result in fp32 may not be rounded at all."""
    once, away = (exact.to(got.dtype) - exact).norm(), (got - exact).norm()
    if once:
        print(f"{what}: {away / exact.norm():.1e} away, {away / once:.3f} of one rounding")
    assert away <= 1.01 * once + 1e-6 * exact.norm(), what


# ------------------------------------------------------------------------------------------------
# Elementwise kernels
# ------------------------------------------------------------------------------------------------

X, GRAD, RESIDUAL = (draw(N, WIDTH, seed=seed) for seed in range(3))
ALIKE = (X.float() + 0.3 * GRAD.float()).bfloat16()  # a gradient of which a norm leaves little
FACTOR = (1 + 0.3 * draw(WIDTH).float()).bfloat16()
GATE_UP = draw(N, 2 * WIDTH)
OF_ROWS = draw(N).abs().float()
KEYS = torch.arange(N) << 20
XIELU = XIELUActivation(torch.tensor([0.8, 0.3, 0.5, -1e-6]).bfloat16())
CLAMPED = ClampedGLU(0.7, 1.702)
POSITIONS = torch.cat([torch.arange(n) for n in (50, 1, 2, 43)])
ANGLES = 6 * torch.rand(N, 8, generator=torch.Generator().manual_seed(0))
COS, SIN = ANGLES.cos(), ANGLES.sin()
# by right angles: they round nothing, so that what is written after a rotation is rounded once
TURNS = [F.one_hot(torch.arange(N * 8).view(N, 8) % 2, 2)[..., i].float() for i in range(2)]
TEMPERATURE = 1 + torch.arange(N) / N
SIGNS = torch.ones_like(X).where(X > 0, -1)  # their norm rounds nothing either, without an eps


def arch_of(name, **fields):
    return dataclasses.replace(make_architecture(TINY[name](320)), norm_eps=0.0, **fields)


def heads_of(arch, of=draw, kv_heads=None):
    """Query, key and value, or their gradients."""
    kv_heads = arch.n_kv_heads if kv_heads is None else kv_heads
    return [of(N, n, arch.head_dim, seed=i) for i, n in enumerate((arch.n_heads, *[kv_heads] * 2))]


def signs(*shape, seed=0):
    return torch.ones(shape).where(draw(*shape, seed=seed) > 0, -1).bfloat16()


def projected_of(arch, of=draw):
    return of(N, sum(x.out_features for x in arch.attention_linears()[0]))


def norm_cases():
    plus_one = FACTOR - 1  # exact
    for kind, weight in (("rms", torch.ones_like(FACTOR)), ("rms_fp32", FACTOR), ("layer", FACTOR),
                         ("rms_plus_one", plus_one), ("layer_plus_one", plus_one)):
        for x in X, X + 3:  # with a mean, too
            yield norms.fused_norm, torch.zeros_like(x), x, weight, None, kind, 1e-3
            yield norms.fused_norm_backward, x, ALIKE, None, weight, kind, 1e-3
            yield norms.fused_norm_backward, x, GRAD, RESIDUAL, weight, kind, 1e-3
    yield norms.fused_norm, torch.zeros_like(X), X + 3, FACTOR, FACTOR, "layer", 1e-3
    yield router.router_norm_backward, ALIKE, X, FACTOR.float(), 1e-3


def gate_cases():
    in_place = "silu", "gelu", "gelu_pytorch_tanh", LimitedActivation("silu", 0.7)
    in_place += ScaledActivation("silu", 0.9, 0.4), XIELU
    out = torch.zeros_like(X)
    for activation in in_place:
        yield activations.glu, out, GATE_UP, activation, True
        yield activations.glu_backward_, GRAD, activation, None, *GATE_UP.chunk(2, 1)
        yield activations.glu_backward_, GRAD, activation, OF_ROWS, *GATE_UP.chunk(2, 1)
        yield activations.glu_weight_gradients, GRAD, GATE_UP, activation, True
    for activation in "relu2", XIELU:
        yield activations.glu, out, X, activation, False
        yield activations.glu_backward_, GRAD, activation, OF_ROWS, X
    yield activations.glu, out, GATE_UP, CLAMPED, True
    yield activations.glu_weight_gradients, GRAD, GATE_UP, CLAMPED, True
    yield activations.clamped_glu_backward_, GRAD, OF_ROWS, GATE_UP, *CLAMPED
    yield per_layer_gate.gate_inputs, out, X, RESIDUAL, "gelu_pytorch_tanh"
    yield per_layer_gate.gate_inputs_backward, GRAD, X, RESIDUAL, "gelu_pytorch_tanh"


def row_cases():
    slots = torch.randperm(N, generator=torch.Generator().manual_seed(0)).view(-1, 3)
    yield lora_matmul.scale_columns, X, FACTOR.float(), None
    yield lora_matmul.scale_columns, X, FACTOR.float() / 3, FACTOR
    yield grouped_mm.add_row_bias, X, draw(8, WIDTH), torch.arange(N) % 8
    yield grouped_mm.add_row_bias, X, draw(8, WIDTH).float() / 3, torch.arange(N) % 8
    yield grouped_mm.add_expert_rows, X, slots, None
    yield grouped_mm.add_expert_rows, X, slots, draw(*slots.shape).float() / 3
    yield dropout.drop, X, KEYS, 1, 0.3


def mixer_cases():
    weight, by_head = draw(WIDTH, 1, 4), (draw(N, HEADS, 32, seed=seed) for seed in range(3))
    (x, z, grad), of_head = by_head, FACTOR[:32]
    for conv, bias in (weight, None), (weight, FACTOR), (weight.float() / 3, FACTOR.float() / 3):
        for silu in False, True:
            yield autograd_mixers.conv_forward, X, conv, bias, POSITIONS, silu
        yield autograd_mixers.conv_silu_backward, GRAD, X, conv, bias, POSITIONS
        yield autograd_mixers.conv_backward, GRAD, conv, POSITIONS
    for norm_weight, gate_first in (None, False), (of_head, True), (of_head.float() / 3, True):
        yield autograd_mixers.gated_norm_forward, x, z, norm_weight, 1e-3, gate_first
        yield autograd_mixers.gated_norm_backward, grad, x, z, norm_weight, 1e-3, gate_first
    # with the norm first its result is rounded, as in transformers
    yield autograd_mixers.gated_norm_forward, signs(*x.shape), z, of_head, 0.0, False
    yield autograd_mixers.gated_norm_backward, grad, signs(*x.shape), z, of_head, 0.0, False
    yield of_x, grad, x, z, of_head, 1e-3, False


def of_x(*args):
    return autograd_mixers.gated_norm_backward(*args)[0]


def attention_cases():
    none, half = (None, None, None), COS.shape[1]
    for name in "llama", "glm4", "phi4_mini":  # halves, pairs, a part of each head
        arch = arch_of(name)
        tables = COS[:, : half], SIN[:, : half], None
        yield heads.qk_norm_rope_forward, projected_of(arch), *tables, None, None, arch
        yield heads.qk_norm_rope_backward, *heads_of(arch), None, None, *tables, None, None, arch
    arch = arch_of("llama")
    yield heads.qk_norm_rope_forward, projected_of(arch), *TURNS, TEMPERATURE, None, None, arch
    yield (heads.qk_norm_rope_backward, *heads_of(arch), None, None, COS, SIN, TEMPERATURE, None,
           None, arch)
    arch = arch_of("qwen3", head_dim=16)  # a norm before rotation
    weights = FACTOR[:16], FACTOR[16:32]
    yield (heads.qk_norm_rope_forward, projected_of(arch, signs), COS, SIN, None, *weights, arch)
    yield (heads.qk_norm_rope_backward, *heads_of(arch), None, projected_of(arch), COS, SIN, None,
           *weights, arch)
    arch = arch_of("hunyuan")  # after it
    ones = torch.ones(16).bfloat16()
    yield heads.qk_norm_rope_forward, projected_of(arch), *TURNS, None, ones, ones, arch
    yield (heads.qk_norm_rope_backward, *heads_of(arch), None, projected_of(arch), *TURNS, None,
           *weights, arch)
    arch = arch_of("gemma4_text", head_dim=16, keys_are_values=True)  # values have one, too
    yield heads.qk_norm_rope_forward, projected_of(arch), *none, ones - 1, ones - 1, arch
    yield (heads.qk_norm_rope_backward, *heads_of(arch), None, projected_of(arch), COS, SIN, None,
           *weights, arch)
    grad, attended = (draw(N, HEADS, 32, seed=seed) for seed in range(2))
    for activation in "sigmoid", "softplus":
        for gates in draw(N, HEADS, 32, seed=2), draw(N, HEADS, 1):
            yield heads.gate_heads, attended, gates, activation
            yield heads.gate_heads_backward, grad, attended, gates, activation


def latent_cases():
    arch = arch_of("deepseek_v3")
    sizes, heads = arch.mla, arch.n_heads
    cos, sin = COS[:, : sizes.rope_dim // 2], SIN[:, : sizes.rope_dim // 2]
    turns = [turn[:, : sizes.rope_dim // 2] for turn in TURNS]
    linears = [draw(N, heads * (sizes.nope_dim + sizes.rope_dim)),
               draw(N, heads * (sizes.nope_dim + sizes.value_dim)), draw(N, sizes.rope_dim)]
    grads = [draw(N, heads, sizes.nope_dim + sizes.rope_dim, seed=seed) for seed in range(3)]
    yield mla_heads.latent_heads, *linears, cos, sin, None, arch, 24
    yield mla_heads.latent_heads, *linears, *turns, TEMPERATURE, arch, 24
    for temperature in None, TEMPERATURE:
        yield mla_heads.latent_heads_backward, *grads, cos, sin, temperature, arch
        yield mla_context.rotated_queries_backward, grads[0], cos, sin, temperature, arch
    yield mla_context.rotated_queries, linears[0], cos, sin, None, arch
    yield mla_context.rotated_queries, linears[0], *turns, TEMPERATURE, arch
    yield mla_context.rotated_key, linears[2], *turns, arch
    yield mla_context.rotated_key_backward, linears[2], cos, sin, arch


def head_cases():
    targets = torch.arange(N) % WIDTH - 1
    logits = 3 * X
    logits[torch.arange(48), targets[:48]] = 14  # of some tokens the model is nearly certain
    for multiplier, cap in (1.0, None), (0.3, 2.0):
        log_sum = lm_head.scaled_logits(logits, multiplier, cap).logsumexp(-1)
        yield lm_head.logits_statistics, logits, targets, multiplier, cap
        yield lm_head.logits_gradient, logits, log_sum, targets, targets < 0, multiplier, cap


CASES = [case for cases in (norm_cases, gate_cases, row_cases, mixer_cases, attention_cases,
                            latent_cases, head_cases) for case in cases()]  # fmt: skip
ELSEWHERE = {  # these round in between as transformers does, with which these tests compare them
    "add_inputs": "test_per_layer.py::test_bf16_inputs_of_layers_round_as_transformers",
    "router_norm": "test_experts.py::test_bf16_routers_round_as_transformers"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_kernel_rounds_once(case):
    assert_rounded_once(*case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0].__name__)
def test_kernel_of_large_values_is_finite(case):
    """Where exp() of them is infinite in fp32."""
    function, *args = case
    given = [in_dtype(arg, torch.float32) if arg is XIELU else
             in_dtype(arg * 1000, torch.float32) if tensors_of(arg) else arg for arg in args]
    if function is lm_head.logits_gradient:
        given[1] = lm_head.scaled_logits(given[0], *given[-2:]).logsumexp(-1)
    for result in tensors_of([function(*given), *given]):
        assert result.isfinite().all()


def test_all_kernels_are_here():
    found = set()
    for module in pkgutil.walk_packages(fsdp_qlora.__path__, "fsdp_qlora."):
        values = vars(importlib.import_module(module.name)).values()
        found |= {f.__name__ for f in values if getattr(f, "__code__", None) == KERNEL}
    here = {case[0].__name__ for case in CASES} - {"of_x"}
    assert found == here | {*ELSEWHERE}


KERNEL = activations.glu.__code__  # of what fused_kernel() returns


# ------------------------------------------------------------------------------------------------
# States of mixers
# ------------------------------------------------------------------------------------------------

LENGTHS = 200, 1, 64, 130  # several chunks, less than one, a whole one


def rule_inputs(scale=1.0):
    """Of a gated delta rule of two key heads and four value heads, whose state decays little."""
    n = sum(LENGTHS)
    g = -scale * 0.02 * draw(n, 4, seed=3).float().abs()
    return (draw(n, 2, 16), draw(n, 2, 16, seed=1), draw(n, 4, 32), g,
            draw(n, 4).sigmoid()), draw(n, 4, 32, seed=1)  # fmt: skip


def scan_inputs():
    n = sum(LENGTHS)
    step = draw(n, 4).float().exp() / 3
    inputs = draw(n, 2, 16), draw(n, 2, 16, seed=1), draw(n, 4, 32), -0.02 * step, step
    return inputs, draw(n, 4, 32, seed=1)


@pytest.mark.parametrize("rule, make", [
    (recurrence.chunked_delta_rule, rule_inputs), (recurrence.chunked_scan, scan_inputs)],
    ids=["delta rule", "scan"])  # fmt: skip
def test_states_are_fp32(rule, make):
    """Chunks and what goes from one to the next; the gradients, too."""
    inputs, grad = make()

    def both(*args):
        *leaves, of_out = args
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = rule(*leaves, LENGTHS, 64)
        return out.detach(), *torch.autograd.grad(out, leaves, of_out)

    assert_rounded_once(both, *inputs, grad)


def as_stored(value, dtype):
    """A small tensor as a file has it; in fp32 with values that bf16 has not."""
    return value if dtype == torch.bfloat16 else value.float() / 3


def work_of(tensors, recurrence=None):
    return types.SimpleNamespace(
        layer=types.SimpleNamespace(small_tensors=tensors),
        batch=types.SimpleNamespace(position_ids=POSITIONS),
        inputs=types.SimpleNamespace(recurrence=recurrence))


def mixer_states(function, mixer, tensors, projected, out):
    """What a mixer gives the kernel of its state, and what it makes of the kernel's `out`."""
    seen = []
    work = work_of(tensors, lambda *args: seen.extend(args[:-1]) or out)
    mixed = function(work, projected, mixer)
    return [*seen, mixed]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("double", [False, True])
def test_decays_of_a_delta_net_are_fp32(double, stored):
    """Whatever dtype the files have them in."""
    mixer = GatedDeltaNetSpec(2, 4, 16, 32, 4, norm_eps=0.0, double_beta=double)
    tensors = {"A_log": draw(4), "dt_bias": draw(4, seed=1), "norm.weight": FACTOR[:32],
               "conv1d.weight": draw(192, 1, 4)}  # fmt: skip
    tensors = {f"linear_attn.{key}": as_stored(value, stored) for key, value in tensors.items()}
    projected = draw(N, sum(mixer.widths.values()))
    states = functools.partial(mixer_states, autograd_mixers.gated_delta_net, mixer, tensors)
    assert_rounded_once(states, projected, signs(N, 4, 32))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_steps_and_decays_of_mamba_are_fp32(stored):
    mixer = Mamba2Spec(4, 32, 2, 16, 4, conv_bias=True, dt_limits=(0.0, torch.inf), has_norm=False)
    tensors = {"A_log": draw(4), "dt_bias": draw(4, seed=1), "D": 0 * draw(4),
               "conv1d.weight": draw(192, 1, 4), "conv1d.bias": draw(192)}  # fmt: skip
    tensors = {f"mamba.{key}": as_stored(value, stored) for key, value in tensors.items()}
    projected, out = draw(N, sum(mixer.widths.values())), draw(N, 4, 32)
    function = functools.partial(mixer_states, autograd_mixers.mamba2, mixer, tensors)
    assert_rounded_once(function, projected, out)
    tensors["mamba.D"] = draw(4, seed=2).to(stored) / 3
    _, _, x, *_, mixed = function(projected, out)
    added = out.float() + tensors["mamba.D"].float()[:, None] * x.float()
    z = projected[:, :128].view(N, 2, -1)
    want = autograd_mixers.gated_norm_forward(added.bfloat16().view(N, 2, -1), z, None, 0.0, False)
    assert torch.equal(mixed, want.flatten(1))


# ------------------------------------------------------------------------------------------------
# Attention, products, router, head
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_softmax_of_plain_attention_is_fp32(name):
    """Capped, or with sinks. Two products round: scores, and what is attended."""
    arch = arch_of(name)
    q, k, v = heads_of(arch)
    q = 3 * q
    sinks = draw(arch.n_heads).float() / 3 if arch.sinks else None
    got = attention.masked_eager_attention(q, k, v, sinks, arch, None, None, 0)
    k, v = (x.float().repeat_interleave(arch.n_heads // arch.n_kv_heads, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k).bfloat16().float()
    scores = scores * arch.attention_scale
    if cap := arch.attention_softcap:
        scores = cap * (scores / cap).tanh()
    total = scores.masked_fill(~torch.ones(N, N, dtype=torch.bool).tril(), -torch.inf).exp()
    weights = total / (total.sum(-1, keepdim=True) + (0 if sinks is None else
                                                      sinks.exp()[:, None, None]))  # fmt: skip
    check_rounding(got, torch.einsum("hqk,khd->qhd", weights.bfloat16().float(), v), name)


def test_sum_with_a_sink_is_fp32():
    """What a kernel's backward gets of it, and what the sink leaves of the kernel's result."""
    seen, lse, sinks = [], draw(HEADS, N).float() / 3, draw(HEADS).float() / 3

    def backward(grad, query, key, value, out, joined):
        seen.extend([out, joined])
        return grad, grad, grad

    def attend(*args):
        leaves = [x.detach().requires_grad_() for x in args]
        out = SinkAttention.apply(*leaves, sinks, lambda q, k, v: (v.clone(), lse, ()), backward)
        out.sum().backward()
        return seen[-2:]

    assert_rounded_once(attend, *(draw(N, HEADS, 16, seed=seed) for seed in range(3)))
    want = (lse.double().exp() + sinks.double().exp()[:, None]).log().float()
    torch.testing.assert_close(seen[-1], want, rtol=1e-6, atol=1e-6)


def test_residual_sum_is_rounded_once():
    """With a multiplier, too; torch rounds that on a CPU, but for such a one."""
    call = types.SimpleNamespace(arch=arch_of("granite", residual_multiplier=7 / 32),
                                 drop=lambda x, *_: x)  # fmt: skip
    residual_sum = ResidualSum(None, 0)
    assert_rounded_once(lambda x, branch: residual_sum.add(call, x, branch, True), X, GRAD)
    assert_rounded_once(lambda grad: residual_sum.backward(call, None, grad), GRAD)


def bf16_call(name, **settings):
    """[(a FusedLinear, a LayerCall in backward)] of a first layer in bf16."""
    pair = Pair(name, **settings)
    model = pair.make(make_plan(pair.arch.n_layers, compute_dtype="bfloat16"))
    adapter_values(model, pair.values)
    layer, micro_batch = model.layers[0], types.SimpleNamespace(dropout_seeds=None)
    inputs = types.SimpleNamespace(batch=micro_batch)
    return [(fused, LayerCall(layer, inputs, is_backward=True))
            for fused in layer.spec.fused_linears]


def test_adapters_gradients_are_summed_in_fp32():
    """Of several parts of a batch."""
    for fused, call in bf16_call("llama"):
        want_a, want_b, scaling = 0, dict.fromkeys(fused.adapted, 0), call.layer_spec.scaling
        for seed in range(3):
            x, grad = draw(N, fused.in_features, seed=seed), draw(N, fused.out_features, seed=seed)
            hidden = draw(N, fused.padded_lora_width, seed=seed)
            _, grad_lora_hidden = lora_matmul.input_gradients(call, fused, hidden, grad, x)
            lora_matmul.add_a_gradient(call, fused, x, grad_lora_hidden)
            of_b = call.weight(fused)[:, fused.in_features :].double()
            check_rounding(grad_lora_hidden, (grad.double() @ of_b)[:, : fused.lora_width], "d")
            want_a = want_a + scaling * grad_lora_hidden.double().t() @ x.double()
            for linear in fused.adapted:
                of_linear = hidden[:, linear.lora_columns].double()
                part = grad[:, linear.outputs].double().t() @ of_linear
                want_b[linear] = want_b[linear] + part
        check_rounding(call.grad_adapter[fused.lora_a], want_a.flatten(), "A")
        for linear, want in want_b.items():
            check_rounding(call.grad_adapter[linear.lora_b], want.flatten(), "B")


def test_doras_norms_and_magnitudes_are_fp32():
    for fused, call in bf16_call("llama", adapter="dora"):
        weight, n_in = call.weight(fused), fused.in_features
        factor, norm = lora_matmul.dora_factors(call, fused, weight)
        x, grad = torch.eye(n_in).bfloat16(), draw(n_in, fused.out_features)  # picks columns of W
        lora_matmul.lora_matmul_backward(
            call, fused, x.new_zeros(n_in, fused.padded_lora_width), grad, x)
        a, weight = call.adapter[fused.lora_a].view(-1, n_in).double(), weight[:, :n_in].double()
        for linear in fused.adapted:
            b, rows = call.adapter[linear.lora_b].view(-1, fused.lora_rank).double(), linear.outputs
            of_rows = weight[rows] + call.layer_spec.scaling * b @ a[linear.lora_columns]
            of_rows = of_rows.norm(dim=1)
            sums = (grad[:, rows].double() * weight[rows].t()).sum(0) / of_rows
            check_rounding(norm[rows], of_rows, "norms")
            check_rounding(factor[rows], call.layer.adapter[linear.magnitude] / of_rows, "factors")
            check_rounding(call.grad_adapter[linear.magnitude], sums, "gradient of magnitudes")


@pytest.mark.parametrize("name", [
    name for name in MIXTURES if not make_architecture(TINY[name](320)).moe.rounded_scores])
def test_gradient_through_a_router_is_rounded_for_its_product(name):
    arch = make_architecture(TINY[name](320))
    moe, kind = arch.moe, arch.layer_kinds[arch.layer_routed.index(True)]
    tensors = {key: draw(*shape) for key, shape in arch.small_tensors(kind).items()}
    call = types.SimpleNamespace(arch=arch, layer=types.SimpleNamespace(small_tensors=tensors))
    x, grad = (0.2 * draw(N, arch.hidden_size)).bfloat16(), draw(N, moe.top_k).float() / 3
    routing = router.route(call, x)
    got = router.route_backward(call, routing, grad, x)
    logits = routing.scores.double()  # such that these are their scores
    logits = (logits.logit() if moe.score_func == "sigmoid" else logits.log()).requires_grad_()
    scores = logits.sigmoid() if moe.score_func == "sigmoid" else logits.softmax(-1)
    weights = router.unscaled_topk_weights(scores, routing.topk_experts, moe, torch.double)[0]
    weights = weights * router.weight_factor(call, routing.topk_experts)
    (exact,) = torch.autograd.grad(weights, logits, grad.double())
    exact = exact if moe.fp32_router else exact.bfloat16().double()
    exact = exact @ tensors[f"{moe.router}.weight"].double()
    if moe.norms:
        scale = tensors[moe.norms.router_scale]
        exact = router.router_norm_backward(exact.bfloat16(), x.float(), scale, arch.norm_eps)
    check_rounding(got, exact, name)


def test_correction_of_scores_is_as_exact_as_in_the_files():
    """Scores are the same for all experts here, and what is added has but one value in bf16."""
    arch = make_architecture(TINY["minimax_m2"](320))
    moe, kind = arch.moe, arch.layer_kinds[0]
    tensors = {key: 0 * draw(*shape) for key, shape in arch.small_tensors(kind).items()}
    tensors[moe.correction_bias] = torch.linspace(1, 1.001, moe.n_experts)
    call = types.SimpleNamespace(arch=arch, layer=types.SimpleNamespace(small_tensors=tensors))
    chosen = router.route(call, draw(N, arch.hidden_size)).topk_experts
    want = torch.arange(moe.n_experts)[-moe.top_k :]
    assert torch.equal(chosen.sort()[0], want.expand(N, -1))


def has_fp32_values(tensor):
    return tensor.dtype == torch.float32 and not torch.equal(tensor, tensor.bfloat16().float())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradients_of_experts_are_fp32(name, monkeypatch):
    """Of the weights of a token's experts, and of the experts' adapters."""
    seen, true = [], router.route_backward
    monkeypatch.setattr(moe, "route_backward", lambda call, routing, grad, x: (
        seen.append(grad) or true(call, routing, grad, x)))
    small = shrunk_config(TINY[name](320))
    arch = make_architecture(small)
    tensors = random_hf_model(small, torch.Generator().manual_seed(0)).state_dict()
    config = Config(model="m", lora_rank=8, target_modules=("experts", "o_proj"))
    plan = make_plan(arch.n_layers, compute_dtype="bfloat16")
    model = make_model(small, arch, tensors, config, plan)
    for i, layer in enumerate(model.layers):
        layer.adapter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(i))
    ids = torch.arange(3, 48)
    micro_batch = make_micro_batch(
        make_rows([(ids, ids)]), [[0]], model.micro_batch_format, torch.tensor(0)
    )
    model(micro_batch).sum().backward()
    assert len(seen) == arch.layer_routed.count(True) and all(map(has_fp32_values, seen))
    for layer in model.layers:
        for (linear, key), (where, _) in layer.spec.adapter_slices().items():
            grad = layer.adapter.grad[where]
            assert has_fp32_values(grad) or not grad.any(), (linear, key)


def test_slope_of_a_shared_experts_gate_is_rounded_once():
    """Where the shared expert itself is 0, and its gate reads one value, it alone is left."""
    small = shrunk_config(TINY["qwen2_moe"](320))
    arch = make_architecture(small)
    tensors = random_hf_model(small, torch.Generator().manual_seed(0)).state_dict()
    for key, tensor in tensors.items():
        if ".shared_expert." in key:
            tensor.zero_()
        elif key.endswith("shared_expert_gate.weight"):
            tensor.copy_(F.one_hot(torch.tensor([0]), tensor.shape[1]))
    plan = make_plan(arch.n_layers, compute_dtype="bfloat16")
    model = make_model(small, arch, tensors, Config(model="m", target_modules=("o_proj",)), plan)
    layer = model.layers[arch.layer_routed.index(True)]
    x, out, grad = (draw(N, arch.hidden_size, seed=seed) for seed in range(3))
    inputs = types.SimpleNamespace(
        batch=types.SimpleNamespace(dropout_seeds=None, n_unpadded=torch.tensor([N])))
    _, kept = layer.spec.mlp_sublayer.forward(LayerCall(layer, inputs), x, x)
    factor, kept.shared.before_gate = kept.shared.factor.double(), out
    call = LayerCall(layer, inputs, is_backward=True)
    got = layer.spec.mlp_sublayer.shared.backward(call, kept, grad)
    sums = (grad.double() * out.double()).sum(-1, keepdim=True)
    check_rounding(got[:, :1], sums * factor * (1 - factor), "slope")
    assert not got[:, 1:].any()


def test_losses_of_documents_are_fp64_and_their_gradient_is_weighed_in_fp32():
    """From the logits on, which a product rounds."""
    arch, weight = make_architecture(TINY["llama"](320)), draw(320, 64)
    x, labels = draw(N, 64), torch.arange(3, 3 + N)
    model = types.SimpleNamespace(
        arch=arch, lm_head=weight, lm_head_bias=None, norm=torch.ones(64).bfloat16(),
        norm_bias=None, shard_group_size=1, shard_rank=0, local_rows=range(320), token_rows=None,
        all_gather=lambda own: own[None])  # fmt: skip
    micro_batch = types.SimpleNamespace(targets=labels, target_positions=torch.arange(N),
                                loss_bounds=torch.tensor([0, 30, N]))  # fmt: skip
    x = x.requires_grad_()
    weights = torch.tensor([1 / 3, 0.7])
    losses = lm_head.LinearCrossEntropy.apply(x, model, micro_batch)
    sums = sum_documents(losses, micro_batch)
    normed = norms.norm_of(x.detach(), model.norm, arch.final_norm_kind, arch.norm_eps)
    each = F.cross_entropy((normed @ weight.t()).double(), labels, reduction="none")
    want = torch.stack([part.sum() for part in each.split([30, N - 30])])
    torch.testing.assert_close(sums.detach(), want, rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(sums, x, weights.double())
    sums = lm_head.LinearCrossEntropy.apply(x, model, micro_batch)
    (of_one,) = torch.autograd.grad(sums.sum(), x)
    of_tokens = weights.repeat_interleave(torch.tensor([30, N - 30]))
    check_rounding(grad, of_one.float() * of_tokens[:, None], "gradient")
