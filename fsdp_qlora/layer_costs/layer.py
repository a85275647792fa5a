"""LayerCosts: what a layer costs, for the planner.

The files of this folder have the names of those of layer/ whose work they count:

    LayerCosts
      MixerSublayerCosts    mixer_sublayer.py
        AttentionCosts      attention_mixer.py
        MLACosts            mla.py
        AutogradCosts       autograd_mixers.py
      DenseMLPCosts         mlp.py, with the gate of per_layer_gate.py
      MoECosts              moe.py, with the shared expert and LatentMoE
    what each matmul needs  lora_matmul.py

Counts are values per token, unless a name says bytes or weights; tests/test_live_memory.py compares
them with the storages that are alive while a real layer runs. MLPSublayerCosts is the interface
of the second sublayer's costs; that of a mixer's is TokenMixerCosts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from fsdp_qlora.layer.identity_sublayers import NoMixerSublayer, NoMLPSublayer
from fsdp_qlora.layer.mixer_sublayer import MixerSublayer
from fsdp_qlora.layer.mlp import DenseMLPSublayer
from fsdp_qlora.layer.moe import MoESublayer
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.layer_costs.mixer_sublayer import MixerSublayerCosts
from fsdp_qlora.layer_costs.mla import MLACosts
from fsdp_qlora.layer_costs.mlp import DenseMLPCosts
from fsdp_qlora.layer_costs.moe import MoECosts
from fsdp_qlora.plan import Plan, SavePolicy
from fsdp_qlora.pretrained.architecture import Architecture


class MLPSublayerCosts(Protocol):
    """Interface of the costs of an MLPSublayer."""

    @property
    def saved_values(self) -> int:
        """Values saved for backward(), if nothing is recomputed; in fp32 they count twice."""

    @property
    def choice_values(self) -> int:
        """Values saved by forward_in_slices(): the chosen experts, int16."""

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        """Peak bytes of backward(), besides what is saved; with `recomputed`, of
        backward_in_slices()."""

    @property
    def active_weights(self) -> float:
        """Weights that one token is multiplied by."""

    @property
    def recomputed_weights(self) -> float:
        """The part of active_weights that backward_in_slices() multiplies again."""

    @property
    def matmul_speed(self) -> float:
        """Speed of its matmuls, relative to large ones."""

    @property
    def elementwise_values(self) -> int:
        """Values that elementwise work reads or writes, in forward and backward."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerCosts:
    """The costs of a layer."""

    spec: LayerSpec

    @property
    def arch(self) -> Architecture:
        return self.spec.arch

    @functools.cached_property
    def mixer_sublayer(self) -> MixerSublayerCosts | NoMixerSublayerCosts:
        mixer = self.spec.mixer_sublayer
        if isinstance(mixer, MixerSublayer):
            return MixerSublayerCosts(mixer)
        return NoMixerSublayerCosts(mixer)

    @functools.cached_property
    def mlp_sublayer(self) -> MLPSublayerCosts:
        return MLP_SUBLAYER_COSTS[type(self.spec.mlp_sublayer)](self.spec.mlp_sublayer)

    @property
    def mla_costs(self) -> MLACosts | None:
        """The costs of the layer's latent attention, None if it has none."""
        sublayer = self.mixer_sublayer
        mixer = sublayer.mixers[0] if isinstance(sublayer, MixerSublayerCosts) else None
        return mixer if isinstance(mixer, MLACosts) else None

    def saved_values(self, policy: SavePolicy) -> int:
        """Values per token that a layer saves for backward."""
        hidden = self.arch.hidden_size  # width of x and of mid_residual
        mixer, mlp = self.mixer_sublayer, self.mlp_sublayer
        if policy.mixer:
            return mixer.saved_values + mlp.saved_values
        values = hidden * (1 + policy.mid_residual) + mixer.attention_values * policy.attention
        return values + (mlp.saved_values if policy.mlp else mlp.choice_values)

    def live_bytes(self, plan: Plan, policy: SavePolicy) -> int:
        """Peak bytes of a layer's backward besides the saved ones: gradients, dequantized weights
        and recomputed values."""
        n = plan.micro_batch_tokens
        itemsize = plan.dtype.itemsize
        mixer = self.mixer_sublayer.live_bytes(plan, recomputed=not policy.mixer)
        mlp = self.mlp_sublayer.live_bytes(plan, recomputed=not policy.mlp)
        if policy.recomputes_mid_residual:
            # mid_residual is recomputed first, and with it what the mixer needs
            mlp += n * self.mixer_sublayer.saved_values * itemsize
        live = max(mixer, mlp)
        if policy.attention:  # its results are among the saved ones, too
            live -= n * self.mixer_sublayer.attention_values * itemsize
        if self.arch.layer_scalar:  # the gradient before it is multiplied by the scalar
            live += n * self.arch.hidden_size * itemsize
        return live

    def active_weights(self, by_time: bool = False) -> float:
        """Weights that one token is multiplied by. With by_time, the weights of slow matmuls count
        more."""
        speed = self.mlp_sublayer.matmul_speed if by_time else 1
        return (sum(fused.n_weights for fused in self.spec.mixer_sublayer.fused_linears)
                + self.mlp_sublayer.active_weights / speed)

    def recomputed_weights(self, policy: SavePolicy) -> float:
        """Weights of the matmuls that a layer's backward computes again."""
        if policy.mixer:
            return 0
        wants_sum = policy.recomputes_mid_residual and not self.arch.parallel_residual
        weights = self.mixer_sublayer.recomputed_weights(wants_sum)
        return weights if policy.mlp else weights + self.mlp_sublayer.recomputed_weights


@dataclasses.dataclass(frozen=True, eq=False)
class _NoCosts:
    """The costs of an identity sublayer: every cost is zero."""

    sublayer: NoMixerSublayer | NoMLPSublayer

    saved_values = elementwise_values = query_width = attention_values = choice_values = 0
    active_weights, matmul_speed = 0, 1

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        return 0


class NoMixerSublayerCosts(_NoCosts):
    """The interface of MixerSublayerCosts."""

    def recomputed_weights(self, wants_sum: bool) -> int:
        return 0


class NoMLPCosts(_NoCosts):
    """An MLPSublayerCosts."""

    recomputed_weights = 0


MLP_SUBLAYER_COSTS: dict[type, Callable[[Any], MLPSublayerCosts]] = {
    DenseMLPSublayer: DenseMLPCosts, MoESublayer: MoECosts, NoMLPSublayer: NoMLPCosts}
