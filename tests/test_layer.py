"""The decoder layer of every family against transformers and PEFT, and the check at start.

A model here is the package's Model, with the linears of two small layers in NF4, and beside it
transformers' own in fp32 with the same weights dequantized, in PEFT. Both get two documents, the
package's model in one micro-batch.
"""

import dataclasses
import functools
import gc
import importlib
import inspect
import itertools
import math
import sys
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
import patching
from families import OUTER, TINY, YARN, longrope, tiny, write_model
from families import make_model as make_whole
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from test_released import CONFIGS
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated)

from conftest import segments_of
from fsdp_qlora.checks import compare_with_transformers as check
from fsdp_qlora.checks.compare_with_transformers import (
    compare_with_transformers, random_hf_model, dequantized_weights, text_model)
from fsdp_qlora.config import Config
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.kernels import recurrence, cudnn_attention
from fsdp_qlora.kernels.attention import (
    SDPA_KERNEL, CUDNN_KERNEL, AttentionKernel, eager_attention)
from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.dropout import MIXER_BRANCH_SITE
from fsdp_qlora.kernels.heads import (
    gate_heads, gate_heads_backward, rope_tables, qk_norm_rope_backward, split_projected)
from fsdp_qlora.kernels.norms import norm_of
from fsdp_qlora.layer import attention_mixer, autograd_mixers, linears, mixer_sublayer, mlp
from fsdp_qlora.layer.attention_mixer import AttentionMixer, attend
from fsdp_qlora.layer.identity_sublayers import NoMixerSublayer, NoMLPSublayer
from fsdp_qlora.layer.mla import MLAMixer
from fsdp_qlora.layer.moe import MoESublayer
from fsdp_qlora.layer.offload import (
    DeviceActivations, OffloadedActivations, make_store, put_saved)
from fsdp_qlora.layer.saved import SavedMLP
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.model.embedding import embed
from fsdp_qlora.model.fsdp import set_local
from fsdp_qlora.model.load import fill_model
from fsdp_qlora.model.model import Model, measure_weight_norms
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.predict_memory import predict_memory
from fsdp_qlora.pretrained import families, from_config
from fsdp_qlora.pretrained.architecture import Heads
from fsdp_qlora.pretrained.family_specs import AttentionGateSpec, GatedDeltaNetSpec, Mamba2Spec
from fsdp_qlora.pretrained.from_config import make_architecture, text_config
from fsdp_qlora.pretrained.reader import rows_in_memory
from fsdp_qlora.pretrained.rope import rope_frequencies
from fsdp_qlora.pretrained.shrunk_config import shrunk_config
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import tensor_names
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run.merge_check import MergeCheck

# Of documents: a multiple of a chunk of states, which longrope takes for a long one; one token; as
# many as a window; fewer than a convolution reads
LENGTHS = (24, 1, 5, 3)
CONFIG = Config(model="test", lora_rank=4, lora_alpha=8)
VOCABULARY = 320
# What a layer keeps from forward to backward, whether its backward holds dequantized weights, and
# how many tokens a slice of the MLP has
SLICED = 7
SAVED = {
    "all": ("all", False, 4096),
    "mlp": ("mlp", True, 4096),
    "mid_residual": ("mid_residual", False, 4096),
    "middle, sliced, held": ("mid_residual", True, SLICED),
    "x, sliced": ("input", False, SLICED),
    "x, held": ("input", True, 4096),
    "attention": ("attention", False, 4096),
    "attention, sliced, held": ("attention", True, SLICED),
}
# In `make test` the first model of each family is in the first of these ways, as is each that has
# frequencies, biases, norms or experts as no other; some are in both, one with each kind of mixer,
# MLP, norms and order of sublayers; and some in all ways.
QUICK = "all", "x, sliced"
FIRST_OF_FAMILY = {text_config(make(VOCABULARY)).model_type: name
                   for name, make in reversed(TINY.items())}.values()  # fmt: skip
UNLIKE_THE_FIRST = """llama_bias llama_linear llama_proportional llama_dynamic llama_yarn
    hyperclovax_no_post_norm qwen3_window phi3_longrope gemma4_wide granite4_nope falcon_h1_no_norm
    cohere_qk_norm olmo_no_clip nanochat_bias lfm2_bias lfm3_plain cohere2_moe_sigmoid
    cohere2_moe_routed sarvam_moe_no_norm granitemoe_swa_routed qwen3_moe_dense""".split()
ONCE = {*FIRST_OF_FAMILY, *UNLIKE_THE_FIRST}
WHOLE = "llama", "gemma3", "qwen3_moe"
BOTH = """starcoder2 phi gemma4_moe gemma4_values gemma4_e granite4_h_moe falcon_h1 cohere2_moe
    olmo2 apertus lfm2 qwen3_5_moe olmo_hybrid kolibri1 nemotron_h_latent youtu deepseek_v3 laguna
    step3p7 cohere gpt_oss""".split()


def make_plan(n_layers, saves="all", reuse_dequantized=False, compute_dtype="float32"):
    """The plan of one process that keeps the same of every layer."""
    return Plan(
        compute_dtype=compute_dtype, n_layers=n_layers, shard_group_size=1,
        reshard_after_forward=True, micro_batch_tokens=sum(LENGTHS),
        n_recomputed=0 if saves == "all" else n_layers, save_mid_residual=saves == "mid_residual",
        n_mlp_saved=n_layers if saves == "mlp" else 0,
        n_attention_saved=n_layers if saves == "attention" else 0,
        reuse_dequantized=reuse_dequantized,
        offload_activations=False, offload_params=False,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty()
    yield
    torch.use_deterministic_algorithms(False)


def make_model(model_config, arch, tensors, config=CONFIG, plan=None):
    """The package's model of this process alone, from transformers' tensors; adapters are zero."""
    plan = plan or make_plan(arch.n_layers)
    _, adapted = resolve_adapter(arch, config, "test")
    kernels = (lse_kernels if plan.n_attention_saved else check.eager_kernels)(arch)
    model = Model(
        arch, make_layer_specs(arch, adapted, config.adapter_settings), plan, kernels,
        torch.device("cpu"))
    names = tensor_names(arch, tensors)  # the only process reads all rows
    read = functools.partial(rows_in_memory, tensors, names.sources)
    fill_model(model, StoredWeights(read, names, {}, plan.dtype))
    model.set_frequencies(model_config, max(LENGTHS))
    for layer in model.layers:
        set_local(layer, "adapter", torch.zeros(len(layer.adapter)))
    return model


def lse_kernels(arch):
    """Kernels whose results layers can save, and plain torch for what these do not compute."""
    plain = check.eager_kernels(arch)
    if arch.attention_softcap or arch.sinks:
        return plain
    fixed_len, varlen = (plain.varlen | dict.fromkeys(("full", "window_unreached"), kernel)
                         for kernel in (SDPA_KERNEL, CUDNN_KERNEL))
    return plain._replace(fixed_len=fixed_len, varlen=varlen)


def adapter_values(model, values):
    """Give a model's layers the adapter {PEFT's name: tensor}."""
    for name, where, _, i in adapter_names(model):
        with torch.no_grad():
            model.layers[i].adapter[where] = values[name].flatten()
    if model.layers[0].spec.dora:
        measure_weight_norms(model)


def adapter_names(model):
    """(PEFT's name, where it is in the layer's adapter, its shape, the layer's number) of all."""
    for i, layer in enumerate(model.layers):
        for (linear, key), (where, shape) in layer.spec.adapter_slices().items():
            yield f"base_model.model.model.layers.{i}.{linear}.{key}", where, shape, i


def micro_batch_of(documents, model):
    """A micro-batch of these documents, all of whose tokens are trained."""
    rows = make_rows([(ids, ids) for ids in documents])
    every = [*range(len(documents))]
    return make_micro_batch(rows, [every], model.micro_batch_format, torch.tensor(0))


class Pair:
    """The package's model and PEFT's of one family, with the same weights and the same adapter."""

    def __init__(self, name, fields=(), **settings):
        """`fields`: pairs of a small config's field and its value."""
        self.config = dataclasses.replace(CONFIG, **settings)
        self.model_config = shrunk_config(TINY[name](VOCABULARY))
        for field, value in (("intermediate_size", 96), *fields):
            setattr(self.model_config, field, value)
        self.arch = dataclasses.replace(
            make_architecture(self.model_config),
            attention_dropout=0.0,
            residual_dropout=0.0,
            embedding_dropout=0.0,
        )
        with torch.no_grad():
            reference = random_hf_model(self.model_config, torch.Generator().manual_seed(0))
            self.tensors = {key: tensor.clone() for key, tensor in reference.state_dict().items()}
            self.unused = model = self.make()
            weights = dequantized_weights(model, tensor_names(self.arch, self.tensors))
            for key, weight in weights.items():
                reference.get_parameter(key).copy_(weight)
        # its own rounded, not another's, which is 1.4 off; bitsandbytes' CPU code is 0.5 off where
        # rows are not whole blocks, see benchmarks/RESULTS.md
        turned = self.arch.moe and self.arch.moe.transposed
        for key, weight in reference.state_dict().items():
            of_experts = ".experts." in key and weight.dim() == 3
            n_in = (weight.shape or (1,))[-2 if turned and of_experts else -1]
            bar = 0.8 if n_in % 64 else 0.15
            assert (weight - self.tensors[key]).norm() <= bar * weight.norm(), key
        generator = torch.Generator().manual_seed(1)
        self.values = {}
        for key, _, shape, _ in adapter_names(model):  # a fresh B of 0 hides half the gradients
            value = torch.randn(shape, generator=generator) * 0.1
            if key.endswith("lora_magnitude_vector"):
                linear = key.removeprefix("base_model.model.").rpartition(".")[0]
                weight = reference.get_submodule(linear).weight.detach()
                value = weight.norm(dim=1) * (1 + value)
            self.values[key] = value
        lora_config, _ = resolve_adapter(self.arch, self.config, "test")
        lora_config.task_type = None  # else PEFT wants a model that generates
        self.peft = get_peft_model(reference, lora_config).eval()
        set_peft_model_state_dict(self.peft, self.values)
        taken = get_peft_model_state_dict(self.peft)
        assert taken.keys() == self.values.keys()
        # of rows that are not longer than the model transformers takes another base than of others
        self.lengths = LENGTHS[:1] if name == "llama_dynamic" else LENGTHS
        n_tokens = sum(self.lengths)
        self.ids = torch.randint(3, self.arch.vocab_size, (n_tokens,), generator=generator)

    def make(self, plan=None):
        return make_model(self.model_config, self.arch, self.tensors, self.config, plan)

    def expected(self):
        """The sum of the token losses and {PEFT's name: gradient}, by transformers and PEFT."""
        loss = 0.0
        for part in self.ids.split(self.lengths):
            logits = self.peft(part[None]).logits[0].float()
            loss += F.cross_entropy(logits[:-1], part[1:], reduction="sum")
        loss.backward()
        grads = {n: p.grad for n, p in self.peft.named_parameters() if p.requires_grad}
        return loss.item(), get_peft_model_state_dict(self.peft, grads)

    def computed(self, saves, reuse_dequantized, compute_dtype="float32"):
        """The same by the package's model."""
        if self.arch.parallel_residual and saves != "all" or self.arch.moe and saves == "mlp":
            saves = "input"  # see LayerFunction
        plan = make_plan(self.arch.n_layers, saves, reuse_dequantized, compute_dtype)
        model = self.unused if self.unused and plan == self.unused.plan else self.make(plan)
        self.unused = None  # to quantize once more takes as long as to compute
        adapter_values(model, self.values)
        loss = model(micro_batch_of(self.ids.split(self.lengths), model)).sum()
        loss.backward()
        names = adapter_names(model)
        return loss.item(), {
            key: model.layers[i].adapter.grad[where].view(shape) for key, where, shape, i in names
        }


@functools.lru_cache(1)  # the cases of one pair follow one another
def pair_and_expected(name, **settings):
    pair = Pair(name, **settings)
    return pair, pair.expected()


def assert_equal(kept, monkeypatch, name, **settings):
    saves, reuse_dequantized, slice_tokens = SAVED[kept]
    pair, (loss, grads) = pair_and_expected(name, **settings)
    monkeypatch.setattr(Plan, "mlp_slice_tokens", slice_tokens)
    if slice_tokens == SLICED:
        monkeypatch.setattr(Plan, "expert_slice_tokens", SLICED)
        monkeypatch.setattr(linears, "LARGE_WEIGHT", 0)  # and each linear's weight by itself
        monkeypatch.setattr(attention_mixer, "GROUP_BYTES", 1)  # and each key head
    got_loss, got = pair.computed(saves, reuse_dequantized)
    assert abs(got_loss - loss) <= 1e-5 * loss
    assert got.keys() == grads.keys()
    for key, grad in grads.items():
        assert grad.norm() > 0, key
        assert (got[key] - grad).norm() <= 1e-5 * grad.norm(), key


@pytest.mark.parametrize("name, kept", [
    pytest.param(name, kept, marks=[pytest.mark.slow] * (
        name not in WHOLE and kept not in QUICK[
            : 2 if name in BOTH else 1 if name in ONCE else 0]))
    for name in TINY for kept in SAVED])  # fmt: skip
def test_every_family_equals_transformers_and_peft(name, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name)


# {shape that no model of families.py has: (model, fields of its small config, adapter's settings)}
OF_VALUES = dict(target_modules=("v_proj", "o_proj"))  # one key has no rival: its query counts not
BUILTIN_CONFIGS = {
    "one head": ("llama", dict(num_attention_heads=1, num_key_value_heads=1), {}),
    "one head of keys beside gates": ("afmoe", dict(num_key_value_heads=1), {}),
    "one head of keys, gates in queries": ("qwen3_5", dict(num_key_value_heads=1), {}),
    "heads of two values": ("qwen3", dict(head_dim=2), {}),
    "heads of 256 values": ("gemma2", dict(head_dim=256), {}),
    "an MLP as wide as the hidden states": ("llama", dict(intermediate_size=64), {}),
    "one layer": ("llama", dict(num_hidden_layers=1), {}),
    "an odd vocabulary": ("qwen2", dict(vocab_size=131), {}),
    "a window of one token": ("mistral", dict(sliding_window=1), OF_VALUES),
    "a window of one token, capped": ("gemma2", dict(sliding_window=1), OF_VALUES),
    "rank 1": ("llama", {}, dict(lora_rank=1)),
    "a rank above some widths": ("llama", {}, dict(lora_rank=64)),
    "a rank above some widths, DoRA": ("qwen2", {}, dict(lora_rank=64, adapter="dora")),
    "more rows than DoRA norms at once": (
        "llama", dict(intermediate_size=2112), dict(adapter="dora", lora_rank=2)),
    "as many heads of keys of the delta rule as of values": (
        "qwen3_next", dict(linear_num_key_heads=4, linear_num_value_heads=4), {}),
    "one head of keys of the delta rule": ("qwen3_5", dict(linear_num_key_heads=1), {}),
    "square heads of the delta rule": ("olmo_hybrid", dict(linear_value_head_dim=16), {}),
    "a group for each head": ("granite4_h", dict(mamba_n_groups=4), {}),
    "a group for each head, beside attention": ("falcon_h1", dict(mamba_n_groups=4), {}),
    "a state as wide as a head": ("falcon_h1", dict(mamba_d_state=32), {}),
    "steps within narrow limits": ("granite4_h", dict(time_step_limit=(0.5, 0.8)), {}),
    "steps of a least size": ("nemotron_h", dict(time_step_min=0.7), {}),
    "a convolution of two tokens": ("lfm2", dict(conv_L_cache=2), {}),
    "values as wide as queries, one head": (
        "youtu", dict(num_attention_heads=1, num_key_value_heads=1, v_head_dim=64), {}),
}


# the other shapes, and the other sliced shapes, by `make test-slow`
QUICK_SHAPES = (
    "one head", "a window of one token", "rank 1", "a rank above some widths, DoRA",
    "one head of keys of the delta rule", "a group for each head",
    "values as wide as queries, one head")  # fmt: skip
SLICED_SHAPES = "one head", "a window of one token", "one head of keys of the delta rule"


@pytest.mark.parametrize("shape, kept", [
    pytest.param(shape, kept, marks=[pytest.mark.slow] * (
        shape not in (QUICK_SHAPES if kept == QUICK[0] else SLICED_SHAPES)))
    for shape in BUILTIN_CONFIGS for kept in QUICK])
def test_shapes_equal_transformers_and_peft(shape, kept, monkeypatch):
    name, fields, settings = BUILTIN_CONFIGS[shape]
    if shape == "a group for each head" and "group_size" not in inspect.signature(
            GraniteMoeHybridRMSNormGated.__init__).parameters:  # transformers 5.20
        pytest.skip("its norm takes no groups, as if there were one")
    assert_equal(kept, monkeypatch, name, fields=tuple(fields.items()), **settings)


@pytest.mark.parametrize("linear", ["self_attn.gate", None])
@pytest.mark.parametrize("per_head, activation", [(True, "sigmoid"), (False, "softplus")])
def test_gate_of_attention_equals_autograd(linear, per_head, activation):
    """Also where each head's gate follows its query, as in Qwen3.5."""
    per_head = per_head and linear is not None
    arch = dataclasses.replace(make_architecture(TINY["qwen3"](VOCABULARY)), qk_norm=None,
                               attention_gate=AttentionGateSpec(linear, per_head, activation))
    generator, (heads, kv_heads, d) = torch.Generator().manual_seed(0), (4, 2, arch.head_dim)
    n_gates = heads if per_head else heads * d
    projected = torch.randn(9, (heads + 2 * kv_heads) * d + n_gates, generator=generator)
    assert projected.shape[1] == sum(x.out_features for x in arch.attention_linears()[0])
    leaf, factor = projected.clone().requires_grad_(), {"sigmoid": torch.sigmoid,
                                                         "softplus": F.softplus}[activation]
    if linear:
        query, key, value, gates = leaf.split([heads * d, kv_heads * d, kv_heads * d, n_gates], 1)
        gates = gates.view(9, heads, -1)
    else:
        query, key, value = leaf.split([2 * heads * d, kv_heads * d, kv_heads * d], 1)
        query, gates = query.view(9, heads, 2 * d).split(d, 2)
    want = query.reshape(9, heads, d) * factor(gates)
    grad = torch.randn(9, heads * d, generator=generator)
    grads_kv = torch.randn(2, 9, kv_heads, d, generator=generator)
    others = torch.stack([x.reshape(9, kv_heads, d) for x in (key, value)])
    torch.autograd.backward([want.flatten(1), others], [grad, grads_kv])
    query, _, _, gates = split_projected(arch, projected)
    got = gate_heads(query, gates, activation)
    torch.testing.assert_close(got, want.detach().flatten(1))
    grad_query, grad_gates = gate_heads_backward(
        grad.view(9, heads, d), query, gates, activation)
    no_rotary = None, None, None, None, None
    got = qk_norm_rope_backward(
        grad_query, *grads_kv, grad_gates, projected, *no_rotary, arch)
    torch.testing.assert_close(got, leaf.grad)


def test_what_is_offloaded_is_not_held():
    """By the dataclass, or by the function that takes it back."""
    store = OffloadedActivations(3, 2, 8, torch.device("cpu"))
    saved = SavedMLP(mlp_input=torch.arange(8.0), gate_up=torch.ones(8, 2))
    want, first = saved.gate_up.clone(), weakref.ref(saved.gate_up)
    take = put_saved(store, saved)
    later = [store.put(torch.ones(8)) for _ in range(2)]  # frees earlier ones
    del saved
    gc.collect()
    assert first() is None
    for take_later in reversed(later):
        take_later()
    back = take()
    assert torch.equal(back.gate_up, want) and back.branch is None


def test_what_is_taken_is_not_held():
    """By the function that takes it, which a layer has until its backward ends."""
    saved = SavedMLP(mlp_input=torch.arange(8.0), gate_up=torch.ones(8, 2))
    first = weakref.ref(saved.gate_up)
    take = put_saved(DeviceActivations(), saved)
    del saved
    back = take()
    assert first() is back.gate_up
    del back
    gc.collect()
    assert first() is None and take


@pytest.mark.parametrize("n_at_once", [1, 2])
def test_so_many_puts_are_copied_at_once(n_at_once):
    """Else the GPU would wait for a copy that nothing is computed beside."""
    store = OffloadedActivations(4, n_at_once, 8, torch.device("cpu"))
    x = torch.ones(8)
    first = weakref.ref(x)
    store.put(x)
    del x
    for n_later in 1, 2:
        store.put(torch.ones(8))
        gc.collect()
        assert (first() is not None) == (n_later < n_at_once)


@pytest.mark.parametrize("name", [
    "llama", "youtu",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma4_e", "gemma3", "glm4"))])
def test_gradients_are_the_same_whatever_is_kept_on_the_host(name):
    """Micro-batches of several lengths; the first layers keep x, or the sum after attention as
    well, the last ones, one, two or all, what their MLP needs."""
    pair = pair_and_expected(name)[0]
    model, n_layers, ids, got = pair.make(), pair.arch.n_layers, pair.ids, {}
    adapter_values(model, pair.values)
    cases = [*itertools.product((False, True), {0, 1, 2, n_layers}, (1,)), (False, 0, 0)]
    for middle, n_mlp, on_host in cases:
        plan = dataclasses.replace(model.plan, n_recomputed=n_layers, n_mlp_saved=n_mlp,
                                   save_mid_residual=middle, offload_activations=bool(on_host))
        for layer in model.layers:
            layer.save_policy, layer.adapter.grad = plan.save_policy(layer.index), None
        model.store = make_store(plan, model.device)
        for n in 9, 5, len(ids), len(ids) - 3:
            rows = make_rows([(ids[:n], ids[:n])])
            micro_batch = make_micro_batch(rows, [[0]], model.micro_batch_format, torch.tensor(0))
            model(micro_batch).sum().backward()
        got[middle, n_mlp, on_host] = torch.cat([layer.adapter.grad for layer in model.layers])
        if on_host:
            specs = tuple(layer.spec for layer in model.layers)
            assert not model.store.on_device and len(model.store.buffers) == model.store.n_puts - 1
            assert (sum(buffer.nbytes for buffer in model.store.buffers.values())
                    == predict_memory(plan, pair.arch, specs).host_bytes > 0)
    first, *others = got.values()
    assert first.norm() > 0 and all(torch.equal(first, other) for other in others)


def test_what_is_offloaded_may_become_more():
    """As where an earlier micro-batch's attention kernel could not reuse its results."""
    store = OffloadedActivations(2, 1, 8, torch.device("cpu"))
    x, more = torch.arange(8.0), torch.ones(8, 2)
    for tensors in ([x], [x, more]):
        first, last = store.put(*tensors), store.put(*tensors)
        taken = [last(), first()]
    assert all(torch.equal(got, more) for _, got in taken)


DOCUMENTS = (9,), (5, 3), (4, 4, 4), LENGTHS  # lengths in micro-batches of two kernels


def with_saved_attention(pair, n_saved, on_host=False):
    """A model all of whose layers are recomputed, so many of them with attention's results."""
    n_layers = pair.arch.n_layers
    plan = dataclasses.replace(make_plan(n_layers, "input"), n_attention_saved=n_saved,
                               offload_activations=on_host)
    model = pair.make(plan)
    adapter_values(model, pair.values)
    model.kernels, model.store = lse_kernels(pair.arch), make_store(plan, model.device)
    return model


@pytest.mark.parametrize("name, group_bytes", [
    pytest.param(name, n, marks=[pytest.mark.slow] * (  # of the others llama has small groups, too
        name in ("gemma3", "glm4", "qwen3_moe", "gemma4_e") or n == 1 and name != "llama"))
    for name in ("llama", "gemma3", "glm4", "youtu", "qwen3_moe", "gemma4_e") for n in (2**27, 1)])
def test_gradients_are_the_same_with_saved_results_of_attention(name, group_bytes, monkeypatch):
    """Of no layers, of the last one, of all; on the host, too, and with one key head at a time."""
    monkeypatch.setattr(attention_mixer, "GROUP_BYTES", group_bytes)
    pair, got = pair_and_expected(name)[0], []
    n_layers, item = pair.arch.n_layers, 4
    for n_saved, on_host in itertools.product((0, 1, n_layers), (False, True)):
        model = with_saved_attention(pair, n_saved, on_host)
        for lengths in DOCUMENTS:
            model(micro_batch_of(pair.ids[: sum(lengths)].split(lengths), model)).sum().backward()
        got.append(torch.cat([layer.adapter.grad for layer in model.layers]))
        if on_host and name in ("llama", "youtu"):  # no window, for which nothing is saved
            assert not model.store.on_device
            pinned = sum(buffer.nbytes for buffer in model.store.buffers.values())
            specs = tuple(layer.spec for layer in model.layers)
            # in bf16, for which the plan counts, a logsumexp is two values; here it is one
            n_logsumexps = max(0, n_saved - 1) * pair.arch.n_heads * sum(LENGTHS)
            want = predict_memory(model.plan, pair.arch, specs).host_bytes
            assert pinned == want - item * n_logsumexps > 0
    first, *others = got
    assert first.norm() > 0 and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("lengths", DOCUMENTS)
@pytest.mark.parametrize("name, group_bytes, n_groups", [
    ("llama", 2**27, 1), ("llama", 1, 2), ("glm4", 1, 2), ("youtu", 2**27, 1)])  # fmt: skip
def test_attention_with_saved_results_does_not_run_again(
    name, group_bytes, n_groups, lengths, monkeypatch
):
    monkeypatch.setattr(attention_mixer, "GROUP_BYTES", group_bytes)
    calls, forward = [], cudnn_attention.attend_forward
    monkeypatch.setattr(
        cudnn_attention, "attend_forward", lambda *args: (calls.append(args), forward(*args))[1])
    pair = pair_and_expected(name)[0]
    n_layers, one_by_one = pair.arch.n_layers, len({*lengths}) > 1
    for n_saved in n_layers, 0:
        model = with_saved_attention(pair, n_saved)
        loss = model(micro_batch_of(pair.ids[: sum(lengths)].split(lengths), model)).sum()
        n_forward = len(calls)
        loss.backward()
        if n_saved:
            assert n_forward == len(calls)
            assert n_forward == n_layers * n_groups * len(lengths)
        elif one_by_one:  # what would run again is seen; SDPA itself is not
            assert len(calls) == 2 * n_forward
        calls.clear()


def test_evaluation_saves_no_results_of_attention(monkeypatch):
    """It runs the kernel that it would run without."""
    pair, seen = pair_and_expected("llama")[0], []
    monkeypatch.setattr(attention_mixer, "attention_with_lse", lambda *args: (
        seen.append(args), cudnn_attention.attention_with_lse(*args))[1])
    model = with_saved_attention(pair, pair.arch.n_layers)
    with torch.no_grad():
        model(micro_batch_of([pair.ids[:9]], model))
    assert not seen
    model(micro_batch_of([pair.ids[:9]], model)).sum().backward()
    assert len(seen) == 2 * pair.arch.n_layers


def test_slices_of_tokens_are_all_of_them():
    """Also where one token is left."""
    for n, most in itertools.product(range(1, 40), range(1, 12)):
        slices = mlp.token_slices(n, most)
        assert [i for part in slices for i in range(n)[part]] == [*range(n)]
        assert max(part.stop - part.start for part in slices) <= most


@pytest.mark.parametrize("saves", ["all", "mid_residual", "input"])
@pytest.mark.parametrize("name", ["llama", "cohere", "glm4"])
def test_what_is_computed_again_is_there_once(name, saves, monkeypatch):
    """One slice of the MLP at a time; weights are held for their second use alone, and the
    attention's not beside the MLP's."""
    forward, slices, at_once = mlp.DenseMLPSublayer.forward, [], []

    def watched(sublayer, call, *args, **settings):
        at_once.append(sum(ref() is not None for ref in slices))
        out = forward(sublayer, call, *args, **settings)
        if saves != "all":
            slices.append(weakref.ref(out[1].gate_up))
        assert {fused.dropout_site for fused in call.dequantized} <= {2, 3}
        assert bool(call.dequantized) == (call.reuses_dequantized and saves != "all")
        return out

    def then(sublayer, call, *args):
        assert {fused.dropout_site for fused in call.dequantized} <= {0, 1}
        return backward(sublayer, call, *args)

    pair, backward = pair_and_expected(name)[0], mixer_sublayer.MixerSublayer.backward
    monkeypatch.setattr(mixer_sublayer.MixerSublayer, "backward", then)
    monkeypatch.setattr(mlp.DenseMLPSublayer, "forward", watched)
    monkeypatch.setattr(Plan, "mlp_slice_tokens", SLICED)
    pair.computed(saves, True)
    assert len(at_once) > 4 * (saves != "all") and set(at_once) == {0}


@pytest.mark.parametrize("adapter, name, kept", [
    pytest.param(adapter, name, kept, marks=[pytest.mark.slow] * (
        adapter == "rslora" and (name != "llama" or kept != QUICK[0])  # which is a factor
        or name != "llama" and (kept not in QUICK or name not in ("glm4", "youtu"))))
    for adapter in ("rslora", "dora")
    for name in "llama qwen2 phi3 cohere glm4 arcee youtu gemma4_wide".split()
    for kept in SAVED])  # fmt: skip
def test_other_adapters_equal_peft(adapter, name, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name, adapter=adapter)


def test_dora_is_refused_where_a_row_of_a_weight_is_0():
    """It would begin with 0 / 0, here and in PEFT."""
    pair = Pair("llama", adapter="dora")
    pair.tensors["model.layers.1.mlp.up_proj.weight"][3] = 0
    with pytest.raises(
        RunEnd, match="row 3 of mlp.up_proj in layer 1 is all 0, .*: use --adapter l"
    ):
        measure_weight_norms(pair.make())


@pytest.mark.parametrize("targets, name, adapter, kept", [
    pytest.param(targets.split(), name, adapter, kept, marks=[pytest.mark.slow] * (
        # DoRA has all ways with one linear of attention, LoRA two with two of attention
        targets != "k_proj" if adapter == "dora" else
        targets != "q_proj v_proj" or kept not in QUICK))
    for targets in ("q_proj v_proj", "k_proj", "o_proj", "down_proj", "gate_proj down_proj")
    for name, adapter in (("qwen2", "lora"), ("llama", "dora")) for kept in SAVED])  # fmt: skip
def test_adapters_of_some_linears_equal_peft(targets, name, adapter, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name, adapter=adapter, target_modules=tuple(targets))


@pytest.mark.parametrize("name, adapter, kept", [
    pytest.param(name, adapter, kept, marks=[pytest.mark.slow] * (
        name in ("qwen3", "minicpm3") or adapter == "lora" and kept not in QUICK))
    for name, adapter in (
        ("qwen3", "lora"), ("glm4", "lora"), ("llama", "dora"), ("minicpm3", "dora"))
    for kept in SAVED])  # fmt: skip
def test_bf16_reads_nothing_that_was_not_written(name, adapter, kept, monkeypatch):
    """Until a tensor is written it is NaN here, and products by 0 are no way to write it. With rows
    of whole cache lines CPUs take another path."""
    saves, reuse_dequantized, slice_tokens = SAVED[kept]
    pair, (loss, grads) = pair_and_expected(
        name, fields=(("intermediate_size", 171),), adapter=adapter)
    monkeypatch.setattr(Plan, "mlp_slice_tokens", slice_tokens)
    if slice_tokens == SLICED:
        monkeypatch.setattr(linears, "LARGE_WEIGHT", 0)  # and each linear's weight by itself
        monkeypatch.setattr(attention_mixer, "GROUP_BYTES", 1)  # and each key head
    got_loss, got = pair.computed(saves, reuse_dequantized, "bfloat16")
    assert abs(got_loss - loss) <= 1e-2 * loss
    for key in grads:
        assert got[key].norm() > 0 and got[key].isfinite().all(), key
        # it is summed in fp32, and what is cast but once may be none of bf16's values
        assert not torch.equal(got[key], got[key].bfloat16().float()), key


@pytest.mark.parametrize("saves", ["all", "input"])
@pytest.mark.parametrize("name, adapter", [
    ("llama", "lora"), ("qwen2", "dora"),
    *(pytest.param(name, "lora", marks=pytest.mark.slow) for name in ("glm4", "youtu"))])
def test_gradient_with_dropout_is_that_of_the_loss(name, adapter, saves):
    """By the loss a little to both sides, for the first layer, which the second one's x leads to.
    With the model's own dropout too, and in glm4 a norm after it, as no released model has both.
    """
    pair = Pair(name, adapter=adapter, lora_dropout=0.5)
    pair.arch = dataclasses.replace(pair.arch, residual_dropout=0.3)
    model = pair.make(make_plan(pair.arch.n_layers, saves))
    adapter_values(model, pair.values)
    micro_batch, weights = (
        micro_batch_of(pair.ids.split(pair.lengths), model),
        model.layers[0].adapter,
    )

    def loss():
        return model(micro_batch).sum()

    loss().backward()
    # DoRA's norm is a constant in backward, but not in the loss: only B has a gradient without it
    direction = torch.zeros_like(weights)
    for (_, key), (where, _) in model.layers[0].spec.adapter_slices().items():
        if adapter == "lora" or key == "lora_magnitude_vector":
            direction[where] = weights.grad[where]
    slope, losses = direction.norm(), []
    with torch.no_grad():
        for step in 1e-3, -2e-3:
            weights += step * direction / slope
            losses.append(loss().item())
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(slope.item(), rel=1e-3)


def test_weights_are_quantized_from_the_compute_dtype():
    """Whatever dtype the files have."""
    pair, packed = Pair("llama"), []
    plan = make_plan(pair.arch.n_layers, compute_dtype="bfloat16")
    for dtype in torch.float32, torch.bfloat16:
        tensors = {key: tensor.to(dtype) for key, tensor in pair.tensors.items()}
        layer = make_model(pair.model_config, pair.arch, tensors, plan=plan).layers[0]
        packed.append((layer.packed_weights.scales, layer.nested.absmax, layer.nested.offsets))
    assert all(map(torch.equal, *packed))


def test_families_here_are_all_families_of_the_table():
    outer = {make(VOCABULARY).model_type for make in (TINY | OUTER).values()}
    inner = {text_config(make(VOCABULARY)).model_type for make in TINY.values()}
    assert inner == families.FAMILIES.keys() & CONFIG_MAPPING.keys()
    assert families.MULTIMODAL.keys() & CONFIG_MAPPING.keys() <= outer


def test_each_layer_has_the_layout_of_its_kind():
    """Its own window, rotary, heads, sublayers and MLP; layers of one kind share a LayerSpec."""
    mixed = set()
    for name, make in TINY.items():
        arch = make_architecture(make(VOCABULARY))
        kinds = [kind[:-1] for kind in arch.layer_kinds]  # without the limits of activations
        specs = make_layer_specs(arch, (), CONFIG.adapter_settings)
        found = []
        for spec in specs:
            # another number for each dropout, or two would drop the same values
            sites = [fused.dropout_site for fused in spec.fused_linears]
            assert len({*sites}) == len(sites) and max(sites) < MIXER_BRANCH_SITE, name
            of, routed = spec.mixer_sublayer, isinstance(spec.mlp_sublayer, MoESublayer)
            sublayers = {NoMixerSublayer: "mlp", NoMLPSublayer: "mixer"}
            sublayers = sublayers.get(type(of)) or sublayers.get(type(spec.mlp_sublayer)) or "both"
            its = spec.arch
            heads = Heads(its.n_heads, its.n_kv_heads, its.head_dim, its.keys_are_values)
            kind = [None, None, None, routed, heads, sublayers]
            for _, one in of.paths if sublayers != "mlp" else ():
                if isinstance(one, AttentionMixer):
                    kind[:2] = one.window, one.rope_index
                elif isinstance(one, MLAMixer):
                    kind[1] = one.rope_index
                else:
                    kind[2:3] = [
                        x for x in arch.other_mixers if arch.other_mixers[x] is one.mixer_spec]
            found.append(tuple(kind))
        assert found == kinds, name
        for (one, kind), (other, its_kind) in itertools.combinations(zip(specs, kinds), 2):
            assert (one is other) == (kind == its_kind), name
        if len(set(kinds)) > 1:
            mixed.add(arch.family)
    supported = """cwm ministral qwen2 qwen3 gemma2 vaultgemma gemma3_text cohere2 olmo3 smollm3
        exaone4 qwen2_moe qwen3_moe glm4_moe dots1 ernie4_5_moe gpt_oss""".split()
    assert mixed >= {family for family in supported if family in CONFIG_MAPPING}


def test_elementwise_work_on_a_cpu_is_not_compiled(monkeypatch):
    def fail(*_):
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", fail)
    seen = []

    @fused_kernel
    def add(x, y, bias):
        seen.append((x, y))
        return x + bias

    x = torch.ones(3, 2)
    for settings in {}, {"is_evaluation": False}, {"is_evaluation": True}:
        assert torch.equal(add(x, None, 2, **settings), x + 2)
    assert len(seen) == 3 and all(one is x and other is None for one, other in seen)


# a window, a cap; Mamba-2; a short convolution; Gated DeltaNet; keys of another layer
@pytest.mark.parametrize("name", [
    "gemma2", "lfm2", "qwen3_5",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite4_h", "gemma4_e"))])
def test_no_document_sees_another(name):
    """A changed document changes its own loss and no other's, to the bit."""
    pair = Pair(name)
    model = pair.make()
    adapter_values(model, pair.values)

    def losses(ids):
        parts = ids.split((9, 14, 4, 6))
        for trained in range(len(parts)):
            rows = [
                (part, part if i == trained else torch.full_like(part, -100))
                for i, part in enumerate(parts)
            ]
            micro_batch = make_micro_batch(
                make_rows(rows), [[2, 0, 3, 1]], model.micro_batch_format, torch.tensor(0))
            yield model(micro_batch).sum().item()

    before, changed = list(losses(pair.ids)), pair.ids.clone()
    changed[23:27] = changed[23:27].flip(0)  # the third
    after = list(losses(changed))
    assert min(before) > 0
    assert [i for i in range(4) if before[i] != after[i]] == [2]


def test_probe_is_in_the_order_of_the_rows():
    """Whatever micro-batches they are dealt into; rows and tokens beyond its first ones do not
    count."""
    pair = pair_and_expected("llama")[0]
    model, generator = pair.make(), torch.Generator().manual_seed(0)
    adapter_values(model, pair.values)
    parts = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (9, 70, 4, 33, 5)]
    found, probe = {}, MergeCheck(make_rows([(part, part) for part in parts]))
    assert probe.input_ids == [part[:64].tolist() for part in parts[:4]]
    for micro_batch_tokens in 64, 110:
        model.plan = dataclasses.replace(model.plan, micro_batch_tokens=micro_batch_tokens)
        found[micro_batch_tokens] = probe.tensors(model)["with_adapter"]
    alone = torch.cat([MergeCheck(make_rows([(part, part)])).tensors(model)["with_adapter"]
                       for part in parts[:4]])  # fmt: skip
    for states in found.values():
        torch.testing.assert_close(states, alone, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------
# The check at start
# ------------------------------------------------------------------------------------------------

IN_RELEASED = {config.get("text_config", config)["model_type"] for config in CONFIGS.values()}
# that a run of test_layouts.py checks
CHECKED_IN_RUNS = "mixtral", "afmoe", "granitemoe", "qwen3_vl_moe", "qwen3_moe", "minimax_m2"
CHECKED_HERE = [
    name for name in FIRST_OF_FAMILY if name not in CHECKED_IN_RUNS
    and text_config(TINY[name](VOCABULARY)).model_type not in IN_RELEASED]
# dense; with windows; a mixture; multimodal
QUICK_CHECKS = "nanochat", "vaultgemma", "ernie4_5_moe", "qwen2_5_vl"
assert set(QUICK_CHECKS) < set(CHECKED_HERE)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_CHECKS)) for name in TINY])
def test_check_at_start_passes(name):
    """As the check makes the text model alone. The first model of each family has its layers
    compared above, too."""
    model_config = TINY[name](VOCABULARY)
    state = torch.random.get_rng_state()
    compare_with_transformers(model_config, name)
    assert torch.equal(torch.random.get_rng_state(), state)


# {what is wrong: (a family, fields of its Family)}
PLANTED = {
    "norm offset": ("gemma", {"norm_kind": "rms"}),
    "halves instead of pairs": ("glm4", {"rotary_interleaved": False}),
    "pairs instead of halves": ("llama", {"rotary_interleaved": True}),
    "multiplier of residuals": ("granite", {"residual_multiplier": 1.0}),
    "multiplier of embeddings": ("gemma", {"sqrt_embedding": False}),
    "multiplier of attention": ("granite", {"attention_scale": None}),
    "multiplier of logits": ("cohere", {"logits_multiplier": 1.0}),
    "query and key norm": ("qwen3", {"qk_norm": None}),
    "norm after rotary": ("hunyuan", {"qk_norm_after_rotary": False}),
    "window": ("mistral", {"windowed_layers": None}),
    "cap on scores": ("gemma2", {"attention_softcap": None}),
    "epsilon, tenfold": ("gemma", {"norm_eps": 0.5}),
    "gate": ("llama", {"gated": False, "mlp_in": ("mlp.up_proj",)}),
    "bias of norms": ("starcoder2", {"norm_bias": False}),
    "bases of rotary by layer": ("granite_swa", {"rope_theta_by_layer": False}),
    "norm without 1": ("nemotron", {"norm_kind": "layer"}),
}


def plant(monkeypatch, model_type, fields):
    """Give a Family in the table wrong fields."""
    wrong = dataclasses.replace(families.FAMILIES[model_type], **fields)
    monkeypatch.setitem(families.FAMILIES, model_type, wrong)


@pytest.mark.parametrize("error", PLANTED)
def test_check_at_start_catches(error, monkeypatch):
    name, fields = PLANTED[error]
    model_config = TINY[name](VOCABULARY)
    family = model_config.model_type
    # fields that no spec names now
    monkeypatch.setattr(from_config, "check_model", lambda config: None)
    plant(monkeypatch, family, fields)
    with pytest.raises(ValueError, match=f"the check at start failed: {family} "):
        compare_with_transformers(model_config, name)


@pytest.mark.parametrize("name", ["granite4_h", "falcon_h1", "lfm2", "qwen3_5"])
def test_check_at_start_catches_documents_end_to_end(name, monkeypatch):
    """Given to the convolution and the scan as if all were one document; attention is as ever."""
    def all_as_one(call, projected, mixer):
        n = len(projected)
        micro_batch = dataclasses.replace(call.batch, position_ids=torch.arange(n), lengths=(n,))
        all_as_one = types.SimpleNamespace(
            layer=call.layer, batch=micro_batch, inputs=call.inputs)
        return function(all_as_one, projected, mixer)

    model_config = TINY[name](VOCABULARY)
    (kind,) = map(type, make_architecture(model_config).other_mixers.values())
    function = autograd_mixers.OTHER_MIXERS[kind]
    monkeypatch.setitem(autograd_mixers.OTHER_MIXERS, kind, all_as_one)
    with pytest.raises(ValueError, match="differs from transformers .*: logits by"):
        compare_with_transformers(model_config, name)


# shorter and longer than a chunk of 64, one or two chunks, one more or less
CHUNKED = (70, 1, 130, 64), (63, 65, 128, 2)
# of the state a token leaves e to the power of minus this, or more. Over a chunk the second one
# comes to 160 and more, of which fp32 has no exp()
DECAYS = {"weak": 0.1, "strong": 5.0}


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("heads", [
    (2, 4), *(pytest.param(heads, marks=pytest.mark.slow) for heads in ((3, 3), (1, 4)))])
@pytest.mark.parametrize("lengths", CHUNKED)
def test_gated_delta_rule_equals_the_recurrence(lengths, heads, decay):
    """In chunks; forward and backward in fp64. Some keys are short, some are 0."""
    n, generator = sum(lengths), torch.Generator().manual_seed(0)
    query, key, value, grad = (torch.randn(n, *shape, generator=generator) for shape in (
        (heads[0], 8), (heads[0], 8), (heads[1], 5), (heads[1], 5)))
    g, beta = (torch.rand(n, heads[1], generator=generator) for _ in range(2))
    key *= torch.tensor([1, 1, 1e-3, 1, 0])[torch.arange(n) % 5, None, None]
    chunks_equal(recurrence.chunked_delta_rule, delta_recurrence,
                 (query, key, value, -DECAYS[decay] * g, 2 * beta), grad, lengths)  # fmt: skip


def chunks_equal(rule, recurrence, inputs, grad, lengths):
    """Results and gradients of a rule by chunks, fp32, are those of one token at a time, fp64."""
    results = []
    chunked = functools.partial(rule, chunk=64)
    for function, kind in (chunked, torch.float32), (recurrence, torch.float64):
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        out = function(*leaves, lengths)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 1e-5 * want.norm()


MIXERS = {  # {function: (mixer, what names of its tensors begin with, which part decays)}
    autograd_mixers.gated_delta_net: (
        GatedDeltaNetSpec(2, 2, 3, 3, 4, norm_eps=1e-6), "linear_attn.", "a"),
    autograd_mixers.mamba2: (
        Mamba2Spec(2, 3, 2, 3, 4, conv_bias=False, dt_limits=(0.0, math.inf), norm_eps=1e-6),
        "mamba.", "dt")}  # fmt: skip


@pytest.mark.parametrize("function", MIXERS, ids=lambda f: f.__name__)
def test_decays_of_large_values_are_finite(function):
    """Where exp() of what decides on a decay is infinite, or 0."""
    mixer, stem, part = MIXERS[function]
    n = 5
    projected, seen = torch.ones(n, sum(mixer.widths.values())), []
    projected[:, -2:] = torch.tensor([-1000.0, -1, 0, 1, 1000])[:, None]
    assert [*mixer.widths][-1] == part  # the last columns
    tensors = {key: torch.ones(shape) for key, shape in mixer.tensors(64).items()}
    inputs = types.SimpleNamespace(
        recurrence=lambda *args: seen.extend(args[:-1]) or torch.ones(n, 2, 3))
    call = types.SimpleNamespace(
        layer=types.SimpleNamespace(small_tensors=tensors), inputs=inputs,
        batch=types.SimpleNamespace(position_ids=torch.arange(n)))
    function(call, projected, mixer)
    steps = torch.tensor([0, 0.6931472, 1.3132617, 2.126928, 1001])  # log(1 + exp(1 + value))
    decay = next(x for x in seen if x.dim() == 2 and x.max() <= 0)
    torch.testing.assert_close(decay, -math.e * steps[:, None].expand(n, 2))


def test_fla_is_used_only_if_it_gives_what_plain_torch_gives(monkeypatch):
    """Stand-ins for its kernels, which need a GPU."""
    mixer, cpu = GatedDeltaNetSpec(2, 4, 16, 32, 4), torch.device("cpu")
    plain = recurrence.eager_delta_rule

    def fails(*_):
        raise RuntimeError("not on this GPU\nfor a long reason")

    def leaks(*args):
        return plain(*args[:-1], types.SimpleNamespace(lengths=(sum(args[-1].lengths),)))

    for rule, why in ((plain, ""), (fails, "RuntimeError: not on this GPU"), (leaks, "% off here"),
                      (lambda q, k, v, *rest: plain(k, q, v, *rest), "% off here")):
        monkeypatch.setitem(recurrence.RECURRENCES, GatedDeltaNetSpec, dataclasses.replace(
            recurrence.RECURRENCES[GatedDeltaNetSpec], fla=rule))
        got = recurrence.why_no_fla(mixer, cpu)
        assert got.endswith(why) and bool(got) == bool(why)


def test_transformers_takes_no_kernels_in_the_check_at_start(monkeypatch):
    """They do not work on a CPU, and it takes what is installed when it is imported."""
    monkeypatch.setitem(sys.modules, "fla", fla := types.ModuleType("fla"))
    with check.without_kernels(), pytest.raises(ImportError):
        importlib.import_module("fla")
    assert sys.modules["fla"] is fla and sys.modules.get("causal_conv1d", 0) is not None


def delta_recurrence(query, key, value, g, beta, lengths):
    repeats = value.shape[1] // key.shape[1]
    query, key = ((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
        repeats, 1) for x in (query, key))
    outs, first = [], 0
    for length in lengths:
        state = 0
        for i in range(first, first + length):
            state = state * g[i, :, None, None].exp()
            read = (state * key[i, :, :, None]).sum(1)
            added = beta[i, :, None] * (value[i] - read)
            state = state + key[i, :, :, None] * added[:, None]
            outs.append((state * query[i, :, :, None]).sum(1) * query.shape[-1] ** -0.5)
        first += length
    return torch.stack(outs)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("groups", [
    2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 1))])
@pytest.mark.parametrize("lengths", CHUNKED)
def test_scan_of_mamba_equals_the_recurrence(lengths, groups, decay):
    """In chunks; forward and backward in fp64."""
    n, n_heads, generator = sum(lengths), 4, torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(n, *shape, generator=generator)

    inputs = [draw(groups, 6), draw(groups, 6), draw(n_heads, 5),
              -DECAYS[decay] * torch.rand(n, n_heads, generator=generator), draw(n_heads).exp()]
    chunks_equal(recurrence.chunked_scan, scan_recurrence, inputs, draw(n_heads, 5), lengths)


def scan_recurrence(b, c, x, decay, step, lengths):
    outs, first, repeats = [], 0, x.shape[1] // b.shape[1]
    for length in lengths:
        state = 0
        for i in range(first, first + length):
            of_b, of_c = (part[i].repeat_interleave(repeats, 0) for part in (b, c))
            state = state * decay[i, :, None, None].exp() + (
                of_b[:, :, None] * (step[i, :, None] * x[i])[:, None])
            outs.append((of_c[:, :, None] * state).sum(1))
        first += length
    return torch.stack(outs)


def swap_gate_and_up(model, files):
    def swapped(name):
        parts = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        return files.read(".".join(parts.get(part, part) for part in name.split(".")))

    fill_model(model, dataclasses.replace(files, read=swapped))


def drop_offsets(model, files):
    fill_model(model, files)
    for layer in model.layers:
        layer.nested.offsets.zero_()


def always_long(frequencies):
    def wrong(*args):
        inverse, factor = frequencies(*args)
        return inverse[[1, 1]], factor

    return wrong


# {what is wrong: (a family, the function, what is put around it)}
def forget_readers(backward):
    """That without the gradients of later layers."""

    def wrong(mixer, call, *args):
        call.grad_kv_out = tuple(map(torch.zeros_like, call.grad_kv_out))
        return backward(mixer, call, *args)

    return wrong


WRONG_CODE = {
    "windows on other layers": (
        "gemma2",
        "layer_windows",
        lambda f: lambda *a: [5] * len(f(*a)),
    ),
    "window of some layers": (
        "gemma2",
        "layer_windows",
        lambda f: lambda *a: [None] * len(f(*a)),
    ),
    "rotary on layers without": (
        "smollm3",
        "layer_ropes",
        lambda f: lambda *a: (f(*a)[0], [0] * a[0].num_hidden_layers),
    ),
    "long factors for short documents": ("phi3_longrope", "rope_frequencies", always_long),
    "backward of a norm": (
        "llama",
        "fused_norm_backward",
        lambda f: lambda *a: f(*a) * 1.01,
    ),
    "scale of LoRA": (
        "llama",
        "_make_layer_spec",
        lambda f: lambda *a: dataclasses.replace(f(*a), scaling=1.0),
    ),
    "norm of DoRA": (
        "llama",
        "dora_factors",
        lambda f: lambda *a: (f(*a)[0] * 1.01, f(*a)[1]),
    ),
    "slices computed again": (
        "llama",
        "DenseMLPSublayer.backward_in_slices",
        lambda f: lambda *a: f(*a).roll(1, 0),
    ),
    "inputs of layers": ("gemma4_e", "add_inputs", lambda f: lambda *a: f(*a).roll(1, 1)),
    "gradient of keys that others read": ("gemma4_e", "AttentionMixer.backward", forget_readers),
    "offset of NF4": ("llama", "fill_model", lambda f: drop_offsets),
    "gate and up while reading": ("llama", "fill_model", lambda f: swap_gate_and_up),
}


@pytest.mark.parametrize("error", WRONG_CODE)
def test_check_at_start_catches_wrong_code(error, monkeypatch):
    name, function, around = WRONG_CODE[error]
    if "." in function:
        owner, _, method = function.partition(".")
        owner = patching.get(owner)
        monkeypatch.setattr(owner, method, around(getattr(owner, method)))
    else:
        wrong = around(patching.get(function))
        for module in patching.owners(function):
            monkeypatch.setattr(module, function, wrong)
    with pytest.raises(ValueError, match="the check at start failed: "):
        compare_with_transformers(TINY[name](VOCABULARY), name)


STRAY = {
    "return_dict": {"return_dict": False},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "sliding_window": {"sliding_window": 0},
    "layer_types": {"layer_types": ["sliding_attention"] * 3},
}


@pytest.mark.parametrize("name", [
    "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granite", "olmo2"))])
@pytest.mark.parametrize("stray", STRAY)
def test_check_at_start_takes_what_changes_no_output(stray, name):
    compare_with_transformers(tiny(name, None, **STRAY[stray])(VOCABULARY), name)


GROUPED = dict(moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=4, head_dim=24)
EXPERTS = dict(moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3)
UNUSUAL = {  # that transformers computes: (a family, settings)
    "many groups of experts": ("glm4_moe", dict(n_group=8, topk_group=4, **GROUPED)),
    "one group for each expert": ("glm4_moe", dict(n_group=16, topk_group=4, **GROUPED)),
    "window beside experts": (
        "qwen3_moe",
        dict(use_sliding_window=True, sliding_window=7, **EXPERTS),
    ),
}
IMPOSSIBLE = {
    "factor that is no number": (
        "llama",
        dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=None)),
    ),
    "too few factors": (
        "llama",
        dict(
            rope_parameters=longrope(5) | dict(original_max_position_embeddings=16, factor=4.0)
        ),
    ),
    "theta that is no number": (
        "llama",
        dict(rope_parameters=dict(rope_type="default", rope_theta=None)),
    ),
    "scale of 0 to a negative power": ("gemma2", dict(query_pre_attn_scalar=0)),
    "experts on every 0th layer": ("qwen3_moe", dict(decoder_sparse_step=0, **EXPERTS)),
    "groups of unequal size": ("glm4_moe", dict(n_group=3, topk_group=2, **GROUPED)),
    "more groups chosen than there are": ("glm4_moe", dict(n_group=2, topk_group=4, **GROUPED)),
}


@pytest.mark.parametrize("what", [
    pytest.param(what, marks=[pytest.mark.slow] * (what == "one group for each expert"))
    for what in UNUSUAL])
def test_check_at_start_takes_what_transformers_computes(what):
    model_type, settings = UNUSUAL[what]
    compare_with_transformers(tiny(model_type, **settings)(VOCABULARY), model_type)


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_check_at_start_names_the_model_whatever_goes_wrong(what):
    model_type, settings = IMPOSSIBLE[what]
    with pytest.raises(ValueError, match="^--model the-name: the check at start failed: "):
        compare_with_transformers(tiny(model_type, **settings)(VOCABULARY), "the-name")


def test_field_that_no_spec_names_is_refused():
    config = tiny("gemma3_text", use_bidirectional_attention=True)(VOCABULARY)
    with pytest.raises(ValueError, match="use_bidirectional_attention"):
        make_architecture(config)


@pytest.mark.parametrize("outer, inner", [*itertools.product((True, False), repeat=2)])
def test_multimodal_model_is_tied_if_both_configs_say_so(outer, inner):
    config = TINY["mistral3"](VOCABULARY)
    config.tie_word_embeddings, config.text_config.tie_word_embeddings = outer, inner
    assert make_architecture(config).tied == (outer and inner)


@pytest.mark.parametrize("tied", [True, False])
def test_text_config_without_that_flag_is_tied_as_the_outer_one_says(tied):
    config = TINY["qwen3_vl"](VOCABULARY)
    del config.text_config.tie_word_embeddings
    config.tie_word_embeddings = tied
    assert make_architecture(config).tied == tied
    assert make_architecture(shrunk_config(config)).tied == tied


WRAPPED = [name for name, make in TINY.items() if make.model_type in families.MULTIMODAL]
# of images, video and audio, windows and mixtures; the others by `make test-slow`
QUICK_WRAPPED = """gemma3 gemma4 gemma4_moe_vl mistral3 qwen2_5_vl qwen3_vl qwen3_5_moe_vl llava
    llava_next_video idefics3 internvl qwen2_audio voxtral""".split()


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK_WRAPPED))
    for name in (*WRAPPED, *OUTER)])
def test_multimodal_model_gives_the_logits_of_its_text_model(name):
    """The check at start builds the text model alone; the outer one must not scale or cap."""
    config = (TINY | OUTER)[name](VOCABULARY)
    outer, prefix = make_whole(config), make_architecture(config).module_prefix
    text = text_model(config.text_config, dtype=torch.float32).eval()
    tensors = {key.replace(prefix, "model.").removeprefix("language_model."): value
               for key, value in outer.state_dict().items()}  # fmt: skip
    text.load_state_dict({key: tensors[key] for key in text.state_dict()})
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(outer(input_ids=ids).logits, text(input_ids=ids).logits)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in ONCE))
    for name in TINY if name not in WRAPPED])
def test_bf16_norms_and_embeddings_round_as_transformers(name):
    """In fp32 it makes no difference what is rounded first."""
    config = shrunk_config(TINY[name](VOCABULARY))
    arch, seen = make_architecture(config), []
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().model
    reference.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    ids, final = torch.arange(8), reference.get_submodule(arch.final_norm)
    with torch.no_grad():
        for p in final.parameters():
            p.add_(torch.randn_like(p) * 0.3)
        reference(ids[None])
        x = torch.randn(64, arch.hidden_size, dtype=torch.bfloat16)
        want = final(x)
    table = reference.get_input_embeddings().weight.detach()
    model = types.SimpleNamespace(shard_group_size=1, arch=arch, embedding=table,
                                  local_rows=range(len(table)), token_rows=None)
    assert torch.equal(embed(model, ids), seen[0][0])
    norm, bias = (getattr(final, part, None) for part in ("weight", "bias"))
    assert (bias is None) == (not arch.norm_bias)
    assert torch.equal(norm_of(x, norm, arch.norm_kind, arch.norm_eps, bias), want)


@pytest.mark.parametrize("name", ["llama", "llama_dynamic"])
def test_angles_of_far_positions_are_exact(name):
    """Dynamic's base is that of the longest row that there may be."""
    config = TINY[name](VOCABULARY)
    arch = make_architecture(config)
    at = torch.tensor([255, 257, 1001, 131071])
    rotary = AutoModelForCausalLM.from_config(config).model.rotary_emb
    want = rotary(torch.zeros(1, dtype=torch.float32), at[None])
    micro_batch = types.SimpleNamespace(position_ids=at)
    got = rope_tables(arch, [rope_frequencies(arch.ropes[0], arch, 131072, config)], micro_batch, 0)
    for ours, theirs in zip(got, want):
        torch.testing.assert_close(ours, theirs[0, :, : ours.shape[1]], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["phi3_longrope", "phi4_mini"])
def test_document_as_long_as_longropes_limit_is_short(name):
    config = TINY[name](VOCABULARY)
    arch, n = make_architecture(config), 16
    assert arch.ropes[0]["original_max_position_embeddings"] == n
    rotary, lengths = AutoModelForCausalLM.from_config(config).model.rotary_emb, (n + 1, n, n - 1)
    positions = [torch.arange(length) for length in lengths]
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    micro_batch = types.SimpleNamespace(
        position_ids=torch.cat(positions), cu_seqlens=bounds, context_shard=None)  # fmt: skip
    got = rope_tables(arch, [rope_frequencies(arch.ropes[0], arch, n + 1, config)], micro_batch, 0)[
        0
    ]
    for ours, at in zip(got.split(lengths), positions):
        want = rotary(torch.zeros(1), at[None])[0][0, :, : ours.shape[1]]
        torch.testing.assert_close(ours, want, rtol=0, atol=1e-6)


def test_truncate_of_yarn_is_obeyed_by_layer_type_too():
    """There transformers ignores it, so that the check at start refuses such a model."""
    yarn = YARN | dict(original_max_position_embeddings=64, beta_fast=8.0, truncate=False)
    compare_with_transformers(tiny("llama", rope_parameters=yarn)(VOCABULARY), "llama")
    ropes = dict.fromkeys(("full_attention", "sliding_attention"), yarn)
    config = tiny("olmo3", None, sliding_window=7, rope_parameters=ropes)(VOCABULARY)
    with pytest.raises(ValueError, match="the check at start failed: olmo3 "):
        compare_with_transformers(config, "olmo3")


@pytest.mark.parametrize("n, windowed", [(7, False), (8, True)])
def test_window_counts_from_the_first_document_that_is_longer(n, windowed):
    arch, kernels = make_architecture(TINY["mistral"](VOCABULARY)), {}
    for attention_type in "window", "window_unreached":
        kernels[attention_type] = AttentionKernel(
            attention_type, lambda *args, attention_type=attention_type: (attention_type, args[6]))
    segments = segments_of((n,))
    micro_batch = types.SimpleNamespace(max_seqlen=n, context_shard=None)
    inputs = types.SimpleNamespace(segments=segments, attention_kernels=kernels)
    mixer = make_layer_specs(arch, (), CONFIG.adapter_settings)[0].mixer_sublayer.token_mixer
    layer = types.SimpleNamespace(index=0, small_tensors={})
    call = types.SimpleNamespace(
        batch=micro_batch, inputs=inputs, layer=layer, saves_attention=False)
    got, _ = attend(call, arch, mixer.window, (None, None, None), (0, 1))
    assert got == (("window", 7) if windowed else ("window_unreached", None))
    q, k, v = (torch.randn(n, heads, arch.head_dim) for heads in (4, 2, 2))
    got, full = (
        eager_attention(q, k, v, None, segments, arch, window, 0) for window in (7, None)
    )
    assert torch.equal(got[:7], full[:7]) or torch.allclose(got[:7], full[:7], atol=1e-5)
    assert torch.allclose(got, full, atol=1e-5) == (not windowed)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_large_logits_do_not_overflow(name):
    """Nor where they are capped, nor in backward."""
    pair = Pair(name)
    model, cap = pair.make(), pair.arch.logits_softcap
    adapter_values(model, pair.values)
    model.lm_head = model.lm_head * 1000
    micro_batch = micro_batch_of([pair.ids], model)
    with torch.no_grad():
        logits = model(micro_batch, wants_loss=False) @ model.lm_head.t()
        assert logits.max() > 100
        logits = cap * torch.tanh(logits / cap) if cap else logits
        want = F.cross_entropy(logits[:-1], pair.ids[1:], reduction="sum")
    loss = model(micro_batch).sum()
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    loss.backward()
    assert all(layer.adapter.grad.isfinite().all() for layer in model.layers)


def test_failed_check_ends_a_run_with_one_line(run_main, monkeypatch, demo_directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    write_model(tmp_path / "model", TINY["qwen3"](len(tokenizer)))
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--dataset", demo_directory / "data.jsonl"]
    flags += ["--max_seq_len", "64", "--max_steps", "1", "--batch_size", "2", "--output_dir"]
    code, _, err = run_main(*flags, tmp_path / "right")
    assert code == 0, err
    plant(monkeypatch, "qwen3", {"qk_norm_after_rotary": True})
    # else it has passed already
    monkeypatch.setattr("train_fsdp_qlora.compare_with_transformers", compare_with_transformers)
    code, _, err = run_main(*flags, tmp_path / "wrong")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 3 and "the check at start failed: qwen3 " in line and "Traceback" not in err
    assert str(tmp_path / "model") in line
    assert not list((tmp_path / "wrong").glob("adapter*"))
