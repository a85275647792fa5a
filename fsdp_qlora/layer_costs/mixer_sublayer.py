"""What the token-mixing sublayer costs: its two matmuls, and what its mixers cost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

from fsdp_qlora.layer.attention_mixer import AttentionMixer
from fsdp_qlora.layer.autograd_mixers import AutogradMixer
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.mixer_sublayer import MixerSublayer
from fsdp_qlora.layer.mla import MLAMixer
from fsdp_qlora.layer_costs.attention_mixer import AttentionCosts
from fsdp_qlora.layer_costs.autograd_mixers import AutogradCosts
from fsdp_qlora.layer_costs.lora_matmul import dora_bytes, weight_bytes
from fsdp_qlora.layer_costs.mla import MLACosts
from fsdp_qlora.plan import Plan


class TokenMixerCosts(Protocol):
    """Interface of the costs of a TokenMixer. The properties count values per token."""

    @property
    def query_width(self) -> int:
        """Width of the queries of softmax attention, whose work grows with the length of documents;
        else 0."""

    @property
    def saved_values(self) -> int:
        """Values saved for backward, if nothing is recomputed."""

    @property
    def saves_projected(self) -> bool:
        """True if saved_values includes saved.projected."""

    @property
    def attention_values(self) -> int:
        """Values of the results of attention, its output and its logsumexps; 0 without attention.
        """

    @property
    def elementwise_values(self) -> int:
        """Values whose reading or writing takes as long as the mixer's elementwise work, forward
        and backward."""

    def live_bytes(self, plan: Plan) -> int:
        """Peak bytes of backward(), besides what is saved, with the gradient of forward()'s
        result."""


TOKEN_MIXER_COSTS: dict[type, Callable[[Any], TokenMixerCosts]] = {
    AttentionMixer: AttentionCosts, MLAMixer: MLACosts, AutogradMixer: AutogradCosts}


@dataclasses.dataclass(frozen=True, eq=False)
class MixerSublayerCosts:
    """The costs of a MixerSublayer. The properties count values per token."""

    sublayer: MixerSublayer

    @functools.cached_property
    def mixers(self) -> list[TokenMixerCosts]:
        """The costs of the mixer of each of MixerSublayer.paths."""
        return [TOKEN_MIXER_COSTS[type(mixer)](mixer) for _, mixer in self.sublayer.paths]

    @property
    def saved_values(self) -> int:
        """Values saved for backward, if nothing is recomputed."""
        sublayer = self.sublayer
        hidden = sublayer.arch.hidden_size
        values = hidden + sublayer.in_proj.padded_lora_width
        values += sum(out_proj.padded_lora_width for out_proj, _ in sublayer.paths)
        values += sum(mixer.saved_values for mixer in self.mixers)
        # all parts of `projected` are views of one tensor, which then stays whole
        if self._saves_projected:
            values += sum(mixer.projected_width for (_, mixer), costs in zip(
                sublayer.paths, self.mixers) if not costs.saves_projected)
        return values + hidden * (sublayer.arch.attention_post_norm is not None)

    @property
    def _saves_projected(self) -> bool:
        return any(mixer.saves_projected for mixer in self.mixers)

    @property
    def query_width(self) -> int:
        """Width of the queries, see TokenMixerCosts."""
        return sum(mixer.query_width for mixer in self.mixers)

    @property
    def attention_values(self) -> int:
        """Values of the results of attention, see TokenMixerCosts."""
        return sum(mixer.attention_values for mixer in self.mixers)

    @property
    def _recomputed_linears(self) -> tuple[FusedLinear, ...]:
        """The FusedLinears that a recomputed forward() always needs: all before the outputs."""
        return self.sublayer.in_proj, *self.sublayer.mixer_linears

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        """Peak bytes of backward(), besides what is saved."""
        in_proj, hidden = self.sublayer.in_proj, self.sublayer.arch.hidden_size
        itemsize = plan.dtype.itemsize
        reuse_dequantized = plan.reuse_dequantized and recomputed
        dequantized_linears = (
            self.sublayer.fused_linears if reuse_dequantized else self._recomputed_linears)
        sizes = [weight_bytes(fused, itemsize, reuse_dequantized) for fused in dequantized_linears]
        dequantized_bytes = sum(sizes) if reuse_dequantized else max(sizes)
        n = plan.micro_batch_tokens
        value_bytes = n * itemsize
        # while out_proj's backward runs: a mixer's result and its gradient
        mixer_bytes = max(2 * out_proj.input_width * value_bytes + dora_bytes(out_proj, n, itemsize)
                          for out_proj, _ in self.sublayer.paths)
        mixer_bytes = max(mixer_bytes, sum(mixer.live_bytes(plan) for mixer in self.mixers))
        mixer_bytes += (self.saved_values - hidden if recomputed else 0) * value_bytes
        # the gradient of in_proj's outputs; its inputs, and their gradient; and its outputs, which
        # a mixer that saves them does not free
        saved_again = in_proj.out_features * (recomputed and self._saves_projected)
        in_proj_bytes = (in_proj.out_features + 2 * in_proj.input_width + saved_again) * value_bytes
        in_proj_bytes += dora_bytes(in_proj, n, itemsize)
        residual_bytes = 2 * hidden * value_bytes  # gradients: of x and of the sum
        return residual_bytes + max(mixer_bytes, in_proj_bytes) + dequantized_bytes

    def recomputed_weights(self, wants_sum: bool) -> int:
        """Weights that are multiplied again when forward() is recomputed."""
        always = sum(fused.n_weights for fused in self._recomputed_linears)
        return always + wants_sum * sum(out_proj.n_weights for out_proj, _ in self.sublayer.paths)

    @property
    def elementwise_values(self) -> int:
        """Values that elementwise work reads or writes, forward and backward; measured."""
        return 15 * self.sublayer.arch.hidden_size + sum(
            mixer.elementwise_values for mixer in self.mixers)
