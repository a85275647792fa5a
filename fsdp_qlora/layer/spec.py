"""LayerSpec: the two sublayers of a layer, and its parameters.

Layers of one model may differ, so each has its LayerSpec; layers of one kind share it. MLPSublayer
is the interface of the second sublayer; that of the first one's mixer is TokenMixer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from torch import Tensor

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.kernels.dropout import MIXER_BRANCH_SITE, MLP_BRANCH_SITE
from fsdp_qlora.layer.attention_mixer import AttentionMixer
from fsdp_qlora.layer.autograd_mixers import AutogradMixer
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.identity_sublayers import NoMixerSublayer, NoMLPSublayer
from fsdp_qlora.layer.latent_moe import ExpertLatent
from fsdp_qlora.layer.linears import Allocator, FusedLinear, fuse_linears
from fsdp_qlora.layer.mixer_sublayer import MixerSublayer, TokenMixer
from fsdp_qlora.layer.mla import MLAMixer
from fsdp_qlora.layer.mlp import DenseMLPSublayer
from fsdp_qlora.layer.moe import MoESublayer
from fsdp_qlora.layer.parameters import ParameterLayout
from fsdp_qlora.layer.per_layer_gate import PerLayerGate
from fsdp_qlora.layer.residual import ResidualSum
from fsdp_qlora.layer.router import RoutingChoice
from fsdp_qlora.layer.shared_expert import SharedExpert
from fsdp_qlora.pretrained.architecture import Architecture, LayerKind


class MLPSublayer(Protocol):
    """Interface of the sublayers after the mixer: DenseMLPSublayer, MoESublayer and NoMLPSublayer.

    Such a sublayer adds MLP(norm(mlp_input)) to `mid_residual`, the sum after the mixer.
    `mlp_input` is `mid_residual` too, except in a parallel layer (Cohere), where it is the layer's
    own x.

    What they cost is in layer_costs/, see MLPSublayerCosts.
    """

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """All its linears."""

    def forward(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, Any]:
        """Return mid_residual + MLP(norm(mlp_input)) [tokens, hidden], and what backward()
        needs."""

    def backward(self, call: LayerCall, saved: Any, grad: Tensor) -> Tensor:
        """Return the gradient of `mid_residual`, including the gradient of `mlp_input` through the
        MLP. `grad` is the gradient of forward()'s sum."""

    def forward_in_slices(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, list[RoutingChoice] | None]:
        """Return forward()'s sum, computed a slice of tokens at a time with nothing saved; and each
        slice's choice of experts, which backward_in_slices() must repeat. None without experts."""

    def backward_in_slices(
        self, call: LayerCall, mlp_input: Tensor, grad: Tensor, routing_choices: Any
    ) -> Tensor:
        """Return backward()'s result, a slice of tokens at a time, after computing forward() of the
        slice again."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LayerSpec(ParameterLayout):
    """The two sublayers of one layer, on top of the layout of its parameters. LayerCosts
    (layer_costs/layer.py) is what such a layer costs."""

    mixer_sublayer: MixerSublayer | NoMixerSublayer
    mlp_sublayer: MLPSublayer

    @property
    def n_weights(self) -> int:
        return sum(fused.n_weights for fused in self.fused_linears)


def make_layer_specs(
    arch: Architecture, adapted: Collection[str], settings: AdapterSettings
) -> tuple[LayerSpec, ...]:
    """Return the LayerSpec of each layer; layers of the same kind share one.

    `adapted`: the names, within a layer, of the linears that get an adapter.
    """
    kinds = arch.layer_kinds
    made = {kind: _make_layer_spec(arch, adapted, settings, kind) for kind in dict.fromkeys(kinds)}
    n = max(spec.n_adapter_values for spec in made.values())  # one length, see Adapter
    made = {kind: dataclasses.replace(spec, n_adapter_values=n) for kind, spec in made.items()}
    return tuple(made[kind] for kind in kinds)


def _make_layer_spec(
    arch: Architecture, adapted: Collection[str], settings: AdapterSettings, kind: LayerKind
) -> LayerSpec:
    allocator = Allocator()
    vectors = {name: (allocator.reserve("vectors", math.prod(shape)), shape)
               for name, shape in arch.vectors(kind).items()}
    groups = arch.fused_groups(kind)
    # a group's number is its dropout site; the others are taken
    assert len(groups) <= MIXER_BRANCH_SITE
    fused = {
        name: fuse_linears(site, linears, adapted, settings, vectors, allocator,
                           arch.moe.n_experts if arch.moe and name.startswith("expert_") else 0)
        for site, (name, linears) in enumerate(groups.items()) if linears}
    small_tensors = arch.small_tensors(kind)
    arch = arch.of_kind(kind)
    counts = allocator.counts
    mixer, mlp = _make_mixer(arch, kind, fused), _make_mlp(arch, kind, fused)
    return LayerSpec(
        arch=arch, mixer_sublayer=mixer, mlp_sublayer=mlp,
        fused_linears=mixer.fused_linears + mlp.fused_linears, vectors=vectors,
        small_tensors=small_tensors,
        # at least one value, because FSDP2 shards it
        n_blocks=counts["blocks"], n_vector_values=counts.get("vectors", 1),
        n_adapter_values=counts["adapter"],
        scaling=settings.scaling, dropout=settings.dropout, dora=settings.is_dora)


def _make_mixer(
    arch: Architecture, kind: LayerKind, fused: Mapping[str, FusedLinear]
) -> MixerSublayer | NoMixerSublayer:
    """`fused`: {name in fused_groups(): its FusedLinear} for the groups that have linears."""
    if kind.sublayers == "mlp":
        return NoMixerSublayer()
    token_mixer: TokenMixer = AttentionMixer(arch, kind.window, kind.rope_index)
    second_path = None
    if arch.mla:
        token_mixer = MLAMixer(arch, kind.rope_index, fused.get("q_b"), fused["kv_b"])
    elif kind.other_mixer and arch.parallel_other_mixers:
        other = AutogradMixer(arch.other_mixers[kind.other_mixer], arch)
        second_path = fused["mixer_out_proj"], other
    elif kind.other_mixer:
        token_mixer = AutogradMixer(arch.other_mixers[kind.other_mixer], arch)
    residual_sum = ResidualSum(arch.attention_post_norm, MIXER_BRANCH_SITE)
    return MixerSublayer(
        arch, fused["in_proj"], fused["out_proj"], token_mixer, residual_sum, second_path)


def _make_mlp(
    arch: Architecture, kind: LayerKind, fused: Mapping[str, FusedLinear]
) -> MLPSublayer:
    """`fused`: see _make_mixer()."""
    residual_sum = ResidualSum(arch.mlp_post_norm, MLP_BRANCH_SITE)
    if kind.routed:
        assert arch.moe, "the layer has experts"
        shared = latent = None
        if arch.shared_gate_up:
            shared = SharedExpert(
                arch, fused["shared_gate_up"], fused["shared_down"], arch.moe.shared_gate,
                arch.moe.norms.after_shared if arch.moe.norms else None, kind.limits.mlp)
        if arch.expert_latent:
            latent = ExpertLatent(fused["latent_in_proj"], fused["latent_out_proj"])
        return MoESublayer(arch, shared, latent, fused["expert_gate_up"], fused["expert_down"],
                           residual_sum, kind.limits.experts)
    if kind.sublayers == "mixer":
        return NoMLPSublayer()
    per_layer_gate = None
    if arch.per_layer_inputs:
        # uses the MLP's dropout site: no family with this gate has dropout of its own
        per_layer_gate = PerLayerGate(arch, fused["per_layer_gate"], fused["per_layer_out"],
                                      ResidualSum(arch.per_layer_inputs.norm, MLP_BRANCH_SITE))
    return DenseMLPSublayer(
        arch, fused["gate_up"], fused["down"], residual_sum, per_layer_gate, kind.limits.mlp)
