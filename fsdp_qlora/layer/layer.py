"""A decoder layer: one autograd function with a hand-written backward.

Start at LayerFunction. Layers of one model may differ: each has a LayerSpec. layer.saves, which the
Plan decides, says what a layer saves for backward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.config import Config
from fsdp_qlora.layer.attention_mixer import AttentionMixer
from fsdp_qlora.layer.autograd_mixers import AutogradMixer
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.experts import MoESublayer
from fsdp_qlora.layer.identity_sublayers import NoMixerSublayer, NoMLPSublayer
from fsdp_qlora.layer.latent_moe import ExpertLatent
from fsdp_qlora.layer.linears import Allocator, FusedLinear, fuse_linears
from fsdp_qlora.layer.lora_matmul import lora_scaling
from fsdp_qlora.layer.mixer_sublayer import MixerSublayer, TokenMixer
from fsdp_qlora.layer.mla import MLAMixer
from fsdp_qlora.layer.mlp import MLPSublayer
from fsdp_qlora.layer.parameters import LayerParameters, ParameterLayout
from fsdp_qlora.layer.per_layer import PerLayerGate
from fsdp_qlora.layer.router import RoutingChoice
from fsdp_qlora.layer.saved import SavedMixer, SavedMLP, SavedMoE
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.micro_batch.offload import put_record
from fsdp_qlora.plan import Plan, Saves
from fsdp_qlora.pretrained.architecture import Architecture, LayerKind


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerSpec(ParameterLayout):
    """The two sublayers of one layer, on top of the layout of its parameters."""

    mixer: MixerSublayer | NoMixerSublayer
    mlp: MLPSublayer | MoESublayer | NoMLPSublayer

    def saved_values(self, saves: Saves) -> int:
        """Values per token that a layer saves for backward, see LayerFunction."""
        hidden = self.mixer.arch.hidden_size  # width of x and of mid_residual
        if saves == "all":
            return self.mixer.saved_values + self.mlp.saved_values
        if saves == "mlp":
            return hidden + self.mlp.saved_values
        more = {"mid_residual": hidden, "attention": self.mixer.attention_values}
        return hidden + more.get(saves, 0) + self.mlp.choice_values

    def live_bytes(self, plan: Plan, saves: Saves) -> int:
        """Peak bytes of a layer's backward besides the saved ones: gradients, dequantized weights
        and recomputed values."""
        n = plan.micro_batch_tokens
        itemsize = plan.dtype.itemsize
        mixer = self.mixer.live_bytes(plan, recomputed=saves != "all")
        mlp = self.mlp.live_bytes(plan, recomputed=saves not in ("all", "mlp"))
        if saves in ("input", "attention"):
            # mid_residual is recomputed first, and with it what the mixer needs
            mlp += n * self.mixer.saved_values * itemsize
        live = max(mixer, mlp)
        if saves == "attention":  # its results are among the saved ones, too
            live -= n * self.mixer.attention_values * itemsize
        if self.mixer.arch.layer_scalar:  # the gradient before it is multiplied by the scalar
            live += n * self.mixer.arch.hidden_size * itemsize
        return live

    @property
    def n_weights(self) -> int:
        return sum(fused.n_weights for fused in self.fused_linears)

    def active_weights(self, by_time: bool = False) -> float:
        """Weights that one token is multiplied by. With by_time, the weights of slow matmuls count
        more."""
        speed = self.mlp.matmul_speed if by_time else 1
        return (sum(fused.n_weights for fused in self.mixer.fused_linears)
                + self.mlp.active_weights / speed)

    def recomputed_weights(self, saves: Saves) -> float:
        """Weights of the matmuls that a layer's backward computes again."""
        if saves == "all":
            return 0
        wants_sum = saves in ("input", "attention") and not self.mixer.arch.parallel
        weights = self.mixer.recomputed_weights(wants_sum)
        return weights if saves == "mlp" else weights + self.mlp.recomputed_weights


def make_layer_specs(
    arch: Architecture, adapted: Collection[str], config: Config
) -> tuple[LayerSpec, ...]:
    """Return the LayerSpec of each layer; layers of the same kind share one.

    `adapted`: the names, within a layer, of the linears that get an adapter.
    """
    kinds = arch.layer_kinds
    made = {kind: _make_layer_spec(arch, adapted, config, kind) for kind in dict.fromkeys(kinds)}
    n_adapter = max(spec.n_adapter for spec in made.values())  # one length, see Adapter
    made = {kind: dataclasses.replace(spec, n_adapter=n_adapter) for kind, spec in made.items()}
    return tuple(made[kind] for kind in kinds)


def _make_layer_spec(
    arch: Architecture, adapted: Collection[str], config: Config, kind: LayerKind
) -> LayerSpec:
    allocator = Allocator()
    vectors = {name: (allocator.reserve("vectors", math.prod(shape)), shape)
               for name, shape in arch.vectors(kind).items()}
    fused = {
        name: fuse_linears(site, linears, adapted, config, vectors, allocator,
                           arch.moe.n_experts if arch.moe and name.startswith("expert_") else 0)
        for site, (name, linears) in enumerate(arch.fused_groups(kind).items()) if linears}
    small_tensors = arch.small_tensors(kind)
    arch = arch.of_kind(kind)
    counts = allocator.counts
    mixer, mlp = _make_sublayers(arch, kind, fused)
    return LayerSpec(
        mixer=mixer, mlp=mlp, fused_linears=mixer.fused_linears + mlp.fused_linears,
        vectors=vectors, small_tensors=small_tensors,
        # at least one value, because FSDP2 shards it
        n_blocks=counts["blocks"], n_vectors=counts.get("vectors", 1), n_adapter=counts["adapter"],
        scaling=lora_scaling(config.lora_alpha, config.lora_rank, config.adapter == "rslora"),
        dropout=config.lora_dropout, dora=config.adapter == "dora")


def _make_sublayers(
    arch: Architecture, kind: LayerKind, fused: Mapping[str, FusedLinear]
) -> tuple[MixerSublayer | NoMixerSublayer, MLPSublayer | MoESublayer | NoMLPSublayer]:
    """Return the two sublayers of a layer. `fused`: {name in fused_groups(): its FusedLinear} for
    the groups that have linears."""
    token_mixer: TokenMixer = AttentionMixer(arch, kind.window, kind.rope)
    second_path = None
    if arch.mla:
        token_mixer = MLAMixer(arch, kind.rope, fused.get("q_b"), fused["kv_b"])
    elif kind.mixer and arch.parallel_mixers:
        second_path = fused["mixer_out"], AutogradMixer(arch.mixers[kind.mixer], arch)
    elif kind.mixer:
        token_mixer = AutogradMixer(arch.mixers[kind.mixer], arch)
    mixer: MixerSublayer | NoMixerSublayer = NoMixerSublayer(arch)
    mlp: MLPSublayer | MoESublayer | NoMLPSublayer = NoMLPSublayer(arch)
    if kind.sublayers != "mlp":
        mixer = MixerSublayer(arch, fused["in_proj"], fused["out"], token_mixer, second_path)
    if kind.routed:
        latent = (ExpertLatent(fused["latent_entry"], fused["latent_exit"])
                  if arch.expert_latent else None)
        mlp = MoESublayer(arch, fused.get("shared_gate_up"), fused.get("shared_down"), latent,
                          fused["expert_gate_up"], fused["expert_down"], kind.limits)
    elif kind.sublayers != "mixer":
        per_layer = (PerLayerGate(arch, fused["per_layer_gate"], fused["per_layer_out"])
                     if arch.per_layer else None)
        mlp = MLPSublayer(arch, fused["gate_up"], fused["down"], per_layer, kind.limits.mlp)
    return mixer, mlp


class DecoderLayer(LayerParameters):
    """The forward of a decoder layer, on the parameters of LayerParameters. It is an FSDP2 unit."""

    spec: LayerSpec

    def forward(self, x: Tensor, batch: MicroBatch, *kv_in: Tensor) -> tuple[Tensor, ...]:
        """Return the layer's output; if the layer shares its keys and values, also these, [tokens,
        heads, head_dim]. `kv_in`: the keys and values of its kv_source."""
        # asked here because inside LayerFunction.forward() it is always False, and needs_input_grad
        # does not tell an evaluation from training
        is_evaluation = not torch.is_grad_enabled()
        # the adapter is an argument so that autograd asks for its gradient
        return LayerFunction.apply(x, self.adapter, self, batch, is_evaluation, *kv_in)


@dataclasses.dataclass
class SavedLayer:
    """What a layer saves for backward, see LayerFunction; the rest is None."""

    x: Any = None  # key of the store, see its put(); "attention": with the results of attention
    mid_residual: Any = None  # key of the store
    mixer: SavedMixer | None = None
    mlp: SavedMLP | SavedMoE | None = None
    offloaded_mlp: Callable[[], SavedMLP] | None = None  # takes the record from the store, once
    routing_choices: list[RoutingChoice] | None = None  # one per slice of tokens


class LayerFunction(torch.autograd.Function):
    """Forward and backward of a decoder layer, from x [tokens, hidden] to the same shape: a token
    mixer, after which the sum is `mid_residual`, then the MLP.

    layer.saves is what is saved for backward: "all"; "mlp": x and what the MLP needs;
    "mid_residual": x and mid_residual; "attention": x and the results of attention, which is then
    resumed; "input": x. The rest is recomputed, except the choice of experts. A parallel layer,
    whose MLP reads x, saves "all" or "input". A layer with experts never saves "mlp". Backward
    reads the parameters from the layer, where FSDP2 has gathered them again by then.

    Keys and values that later layers read are outputs of this function and inputs of theirs, so
    that autograd sums their gradients. They stay on the GPU, and no layer recomputes those of
    another.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, adapter: Tensor, layer: DecoderLayer, batch: MicroBatch,
        is_evaluation: bool, *kv_in: Tensor
    ) -> tuple[Tensor, ...]:
        # ctx.saved, not save_for_backward(): backward must be able to free each tensor as soon as
        # it has used it, and offloaded tensors are keys of the store here
        ctx.layer = layer
        ctx.batch = batch
        x = x.detach()
        ctx.kv_in = tuple(part.detach() for part in kv_in)
        call = LayerCall(layer, batch, ctx.kv_in, is_evaluation=is_evaluation)
        put = batch.store.put
        mixer, mlp = layer.spec.mixer, layer.spec.mlp
        if layer.saves == "all":
            mid_residual, mixer_saved = mixer.forward(call, x)
            mlp_inputs = x if layer.arch.parallel else mid_residual
            out, mlp_saved = mlp.forward(call, mid_residual, mlp_inputs)
            ctx.saved = SavedLayer(mixer=mixer_saved, mlp=mlp_saved)
            return call.scaled(out), *call.kv_out
        # put() returns a key for take(); they move activations to the host and back, if offloaded
        ctx.saved = saved = SavedLayer()
        if layer.saves != "attention":
            saved.x = put(x)  # copied while the mixer runs
        mid_residual = mixer.forward(call, x)[0]
        if layer.saves == "attention":  # in one put(), because backward needs both at once
            saved.x = put(x, *call.attention_results)
            call.attention_results.clear()  # the store frees them
        if layer.saves == "mlp":
            out, mlp_saved = mlp.forward(call, mid_residual, mid_residual)
            saved.offloaded_mlp = put_record(batch.store, mlp_saved)
            return call.scaled(out), *call.kv_out
        if layer.saves == "mid_residual":
            saved.mid_residual = put(mid_residual)
        out, saved.routing_choices = mlp.forward_to_recompute(
            call, mid_residual, x if layer.arch.parallel else mid_residual)
        return call.scaled(out), *call.kv_out

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *grad_kv_out: Tensor) -> tuple[Tensor | None, ...]:
        layer, batch, saved = ctx.layer, ctx.batch, ctx.saved
        call = LayerCall(layer, batch, ctx.kv_in, is_backward=True)
        take = batch.store.take
        ctx.saved = None
        ctx.kv_in = ()
        call.grad_kv_out = grad_kv_out
        mixer, mlp, parallel = layer.spec.mixer, layer.spec.mlp, layer.arch.parallel
        grad = call.scaled(grad)
        if layer.saves == "all":
            mixer_saved = saved.mixer
            grad_mid_residual = mlp.backward(call, saved.mlp, grad)
        elif layer.saves in ("mlp", "mid_residual"):
            if layer.saves == "mlp":
                grad_mid_residual = mlp.backward(call, saved.offloaded_mlp(), grad)
            else:
                (mid_residual,) = take(saved.mid_residual)
                grad_mid_residual = mlp.recomputed_backward(
                    call, mid_residual, grad, saved.routing_choices)
                del mid_residual
            (x,) = take(saved.x)  # copied back while the MLP ran
            mixer_saved = mixer.forward(call, x, wants_sum=False)[1]
        else:
            x, *call.attention_results = take(saved.x)
            saved.x = None  # each group of heads frees its results
            mid_residual, mixer_saved = mixer.forward(call, x, wants_sum=not parallel)
            call.attention_results.clear()
            call.dequantized.clear()  # room for the MLP's weights
            grad_mid_residual = mlp.recomputed_backward(
                call, x if parallel else mid_residual, grad, saved.routing_choices)
            del mid_residual
        # in a parallel layer the mixer gets the gradient of the layer's sum, and grad_mid_residual
        # already includes the gradient of x through the MLP
        upstream = grad if parallel else grad_mid_residual
        wants_grad_x = ctx.needs_input_grad[0]
        grad_x = mixer.backward(call, mixer_saved, upstream, grad_mid_residual, wants_grad_x)
        return grad_x, call.grad_adapter, None, None, None, *call.grad_kv_in
