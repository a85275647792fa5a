"""Compare small layers of the user's model with transformers before every run.

The adapter has random values; weights go through load.py, so that loading is checked as well.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.checks.without_kernels import without_kernels
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.errors import errors_about
from fsdp_qlora.kernels.attention import ATTENTION_TYPES, EAGER_KERNEL, Kernels
from fsdp_qlora.kernels.recurrence import RECURRENCES, recurrent_mixer_spec
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.model.fsdp import set_local
from fsdp_qlora.model.lm_head import eager_losses, logits_of_hidden
from fsdp_qlora.model.load import fill_model
from fsdp_qlora.model.logits import scaled_logits
from fsdp_qlora.model.model import Model, measure_weight_norms
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.reader import rows_in_memory
from fsdp_qlora.pretrained.shrunk_config import shrunk_config
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import TensorNames, tensor_names

# tokens of the two documents in one micro-batch; with longrope one is long and one is short
LENGTHS = 24, 18
CHECK_RANK, CHECK_ALPHA = 4, 8  # LoRA rank and alpha
CHECKED_VARIANTS = ("lora", False), ("dora", True)  # (adapter_type, True if layers are recomputed)
CHECK_LIMIT = 1e-4  # relative difference; another order of fp32 sums causes 1e-6
# relative difference between weights and their NF4; it is 0.1, and 1.4 with wrong weights
NF4_ROUNDING = 0.2


class ShortSlicesPlan(Plan):
    """A Plan with slices so short that the tokens of both documents are two of them."""

    mlp_slice_tokens = expert_slice_tokens = 25


def compare_with_transformers(model_config: PreTrainedConfig, name: str) -> None:
    """Compare weights, logits, loss and the adapter's gradient of a shrunk model, in fp32 on the
    CPU, with transformers'. Raises ValueError if they differ, or if transformers cannot compute the
    model. Rank 0 only."""
    with errors_about(f"--model {name}: the check at start failed"):
        small = shrunk_config(model_config)
        arch = make_architecture(small)
        generator = torch.Generator().manual_seed(0)
        reference = random_hf_model(small, generator)
        ids = torch.randint(3, arch.vocab_size, (sum(LENGTHS),), generator=generator)
        tensors = dict(reference.state_dict())
        names = tensor_names(arch, tensors)
        for adapter_type, recompute in CHECKED_VARIANTS:
            model = cpu_model(small, arch, tensors, max(LENGTHS), adapter_type, recompute)
            weights = dequantized_weights(model, names)
            random_adapter(model, generator)
            ours = results(model, ids)
            theirs = hf_results(reference, model, names, weights, ids)
            differences = {
                what: float(((value - theirs[what]).norm() / theirs[what].norm()).detach())
                for what, value in ours.items()}
            weight_error = max(float((w - reference.get_parameter(n)).norm() / w.norm())
                               for n, w in weights.items())
            # written so that NaN is caught
            wrong = {what: value for what, value in differences.items() if not value < CHECK_LIMIT}
            wrong |= {} if weight_error < NF4_ROUNDING else {"weights as read": weight_error}
            if wrong:
                layer_kinds = ", ".join(map(str, dict.fromkeys(arch.layer_kinds)))
                raise ValueError(
                    f"{arch.family} with {layer_kinds} and {adapter_type} differs from transformers"
                    f" {transformers.__version__}: "
                    + ", ".join(f"{what} by {value:.1e}" for what, value in wrong.items())
                    + ": please report this")


@torch.no_grad()
def random_hf_model(model_config: PreTrainedConfig, generator: torch.Generator) -> nn.Module:
    """Return transformers' model in fp32. Its norms and biases are random, because 1 and 0 would
    hide mistakes."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        settings: dict[str, Any] = dict(dtype=torch.float32, attn_implementation="eager")
        reference = text_model(model_config, **settings).eval()
    # Nemotron's norms multiply by 1 + weight, but transformers initializes weights to 1, not 0.
    # That would make attention so sharp that fp32's rounding shows (3e-5)
    too_large = make_architecture(model_config).norm_kind == "layer_plus_one"
    corrections = {n: p for n, p in reference.state_dict().items()
                   if "correction" in n or n.endswith(("expert_bias", "layer_scalar"))}
    for name, p in {**dict(reference.named_parameters()), **corrections}.items():
        if p.dim() == 1 or p.shape[0] == 1 or name.endswith("bias"):
            p += torch.empty_like(p).normal_(0, 0.2, generator=generator)
            p -= float(too_large and name.endswith("norm.weight"))
        # a state that decays within a token or two would hide mistakes, and transformers' own sums
        # would be 1e-5 off in fp32
        if name.endswith("A_log"):
            p -= 2
    return reference.requires_grad_(False)


def text_model(model_config: PreTrainedConfig, **settings: Any) -> nn.Module:
    """Return transformers' model of a text config, with its lm_head."""
    with without_kernels():
        if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            return AutoModelForCausalLM.from_config(
                model_config, trust_remote_code=False, **settings)
        return TextModel(model_config, **settings)


def text_class(model_config: PreTrainedConfig) -> Any:
    """Return transformers' class of a text model without its lm_head. AutoModel does not know Step
    3.7's."""
    config_type = type(model_config)
    module = importlib.import_module(config_type.__module__.replace("configuration", "modeling"))
    return getattr(module, config_type.__name__.replace("Config", "Model"))


class TextModel(nn.Module):
    """A text model that has an lm_head in transformers only together with a vision tower:
    Qwen3-VL's, Muse Glimmer's."""

    def __init__(self, model_config: PreTrainedConfig, **settings: Any) -> None:
        super().__init__()
        self.model = text_class(model_config)._from_config(model_config, **settings)
        table = self.model.embed_tokens.weight
        self.logits_multiplier = getattr(model_config, "output_multiplier", 1.0)
        self.logits_softcap = getattr(model_config, "final_logit_softcapping", None)
        self.lm_head = nn.Linear(*reversed(table.shape), bias=False, dtype=table.dtype)
        if model_config.tie_word_embeddings:
            self.lm_head.weight = table

    def forward(self, input_ids: torch.Tensor) -> types.SimpleNamespace:
        hidden = self.model(input_ids).last_hidden_state
        logits = scaled_logits(self.lm_head(hidden), self.logits_multiplier, self.logits_softcap)
        return types.SimpleNamespace(logits=logits)


def cpu_model(
    model_config: PreTrainedConfig, arch: Architecture, tensors: Mapping[str, torch.Tensor],
    max_seq_len: int, adapter_type: str | None = None, recompute: bool = False,
) -> Model:
    """Return a Model of this process alone, in fp32 on the CPU, from {name in a checkpoint:
    tensor}.

    `adapter_type`: of the adapters on all linears; None: no adapter. `recompute`: recompute all
    layers, in slices of tokens, as if memory were short.
    """
    settings = AdapterSettings(CHECK_RANK, CHECK_ALPHA, adapter_type or "lora")
    plan = ShortSlicesPlan(
        compute_dtype="float32", n_layers=arch.n_layers, shard_group_size=1,
        reshard_after_forward=True, micro_batch_tokens=64, n_recomputed=arch.n_layers * recompute,
        save_mid_residual=False, reuse_dequantized=recompute, offload_activations=False,
        offload_params=False, n_expert_ranges=3 if recompute else 1)
    adapted = {linear.name for linear in arch.all_linears()}
    if settings.is_dora:
        adapted -= {linear.name for linear in arch.expert_gate_up + arch.expert_down}
    specs = make_layer_specs(arch, adapted if adapter_type else (), settings)
    model = Model(arch, specs, plan, eager_kernels(arch), torch.device("cpu"))
    names = tensor_names(arch, tensors)
    read = functools.partial(rows_in_memory, tensors, names.sources)
    fill_model(model, StoredWeights(read, names, {}, plan.dtype))
    for layer in model.layers:
        set_local(layer, "adapter", torch.zeros(len(layer.adapter)))
    model.set_frequencies(model_config, max_seq_len)
    return model


def eager_kernels(arch: Architecture) -> Kernels:
    """Return attention in plain torch; and for mixers with a state, plain torch with chunks so
    small that each document has several."""
    by_type = dict.fromkeys(ATTENTION_TYPES, EAGER_KERNEL)
    recurrence = None
    if mixer := recurrent_mixer_spec(arch):
        recurrence = functools.partial(RECURRENCES[type(mixer)].eager, chunk=8)
    return Kernels(by_type, by_type, recurrence)


@torch.no_grad()
def dequantized_weights(model: Model, names: TensorNames) -> dict[str, torch.Tensor]:
    """Return {transformers' name: W [out, in]} of each linear, dequantized from the model's NF4;
    experts are one tensor, [experts, out, in]. `names`: the TensorNames of transformers' model."""
    weights = {}
    if record := model.arch.per_layer_inputs:
        weights[names.of_model(record.projection)] = model.per_layer_projection
    for i, layer in enumerate(model.layers):
        for fused in layer.spec.fused_linears:
            weight = dequantize(layer, fused, layer.adapter)[:, : fused.in_features]
            for linear in fused.linears:
                name = names.of_layer(i, f"{linear.name}.weight")
                if source := names.sources.get(name):
                    shape = names.shapes[source.name]
                    whole = weights.setdefault(source.name, torch.empty(shape))
                    source.weight_in(whole).copy_(weight[linear.outputs])
                else:
                    weights[name] = weight[linear.outputs]
    return weights


@torch.no_grad()
def random_adapter(model: Model, generator: torch.Generator) -> None:
    """Set all adapters to random values, and DoRA's magnitudes near the norms of the weights' rows.
    """
    for layer in model.layers:
        layer.adapter.normal_(0, 0.1, generator=generator)
    if model.layers[0].spec.dora:
        measure_weight_norms(model)
        for layer in model.layers:
            for linear in filter(lambda linear: linear.lora_columns, layer.spec.linears):
                layer.adapter[linear.magnitude] += 1
                layer.adapter[linear.magnitude] *= layer.weight_norms[linear.name]


def results(model: Model, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return {name of a compared result: tensor} for the two documents in one micro-batch."""
    rows = make_rows([(x, x) for x in ids.split(LENGTHS)])
    micro_batch = make_micro_batch(rows, [[0, 1]], model.micro_batch_format)
    with torch.no_grad():
        logits = logits_of_hidden(model, model(micro_batch, wants_loss=False))
    loss = model(micro_batch).sum()
    loss.backward()
    gradients = {f"gradient of adapter {i}": layer.adapter.grad
                 for i, layer in enumerate(model.layers)}
    return {"logits": logits, "loss": loss.detach().float(), **gradients}


def hf_results(
    reference: nn.Module, model: Model, names: TensorNames, weights: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return results() computed by transformers, one document at a time, with the adapter added to
    the `weights` of dequantized_weights(). The adapter's gradient is autograd's. `names`: see
    dequantized_weights()."""
    adapters = []
    adapted = {}
    for i, layer in enumerate(model.layers):
        adapters.append(layer.adapter.detach().clone().requires_grad_())
        for linear in layer.spec.linears:
            name = names.of_layer(i, f"{linear.name}.weight")
            weight = rows_in_memory(weights, names.sources, name).view(-1, linear.in_features)
            if linear.lora_columns:
                a = adapters[i][linear.lora_a].view(CHECK_RANK, -1)
                b = adapters[i][linear.lora_b].view(-1, CHECK_RANK)
                weight = weight + CHECK_ALPHA / CHECK_RANK * b @ a
            if linear.magnitude:  # like PEFT, treat DoRA's norm as a constant
                norms = weight.detach().norm(dim=1)
                weight = weight * (adapters[i][linear.magnitude] / norms)[:, None]
            if source := names.sources.get(name):
                whole = adapted.setdefault(source.name, torch.zeros(names.shapes[source.name]))
                source.weight_in(whole).copy_(weight)
            else:
                adapted[name] = weight
    documents = ids.split(LENGTHS)
    logits = [
        torch.func.functional_call(reference, {**weights, **adapted}, x[None]).logits[0].float()
        for x in documents]
    loss: torch.Tensor = sum(
        eager_losses(rows[:-1], x[1:]).sum() for rows, x in zip(logits, documents))
    gradients = torch.autograd.grad(loss, adapters)
    return {"logits": torch.cat(logits).detach(), "loss": loss.detach(),
            **{f"gradient of adapter {i}": grad for i, grad in enumerate(gradients)}}
