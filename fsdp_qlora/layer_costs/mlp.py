"""What the MLP sublayer costs, and the gate that may follow it."""

from __future__ import annotations

import dataclasses
import functools

from fsdp_qlora.layer.mlp import DenseMLPSublayer, token_slices
from fsdp_qlora.layer.per_layer_gate import PerLayerGate
from fsdp_qlora.layer_costs.lora_matmul import dora_bytes, weight_bytes
from fsdp_qlora.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class DenseMLPCosts:
    """The costs of a DenseMLPSublayer, an MLPSublayerCosts."""

    sublayer: DenseMLPSublayer

    choice_values = 0
    matmul_speed = 1

    @functools.cached_property
    def per_layer_gate(self) -> PerLayerGateCosts | None:
        gate = self.sublayer.per_layer_gate
        return PerLayerGateCosts(gate) if gate else None

    @property
    def saved_values(self) -> int:
        arch, up, down = self.sublayer.arch, self.sublayer.gate_up, self.sublayer.down
        hidden = arch.hidden_size
        values = up.out_features + up.padded_lora_width + down.padded_lora_width
        # a parallel layer's x is counted with the mixer
        values += hidden * (not arch.parallel_residual)
        values += self.per_layer_gate.saved_values if self.per_layer_gate else 0
        return values + hidden * (arch.mlp_post_norm is not None)

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        hidden, up, down = self.sublayer.arch.hidden_size, self.sublayer.gate_up, self.sublayer.down
        n_tokens = plan.micro_batch_tokens
        itemsize = plan.dtype.itemsize
        reuse_dequantized = plan.reuse_dequantized and recomputed
        n = token_slices(n_tokens, plan.mlp_slice_tokens)[0].stop if recomputed else n_tokens
        up_weights = weight_bytes(up, itemsize, reuse_dequantized)
        down_weights = weight_bytes(down, itemsize, reuse_dequantized)
        # first the gradient of glu()'s result, with down's weight; then the gradient of the inputs,
        # and the inputs made again (a recomputed slice still has them, see below)
        first = n * (down.input_width + hidden) * itemsize + down_weights
        second = n * up.input_width * (2 - recomputed) * itemsize + up_weights
        if reuse_dequantized:
            first, second = first + up_weights, second + down_weights
        third = (self.per_layer_gate.live_bytes(n, itemsize, reuse_dequantized)
                 if self.per_layer_gate else 0)
        total = max(first, second, third)
        total += max(dora_bytes(up, n, itemsize), dora_bytes(down, n, itemsize, down.in_features))
        total += 2 * n_tokens * hidden * itemsize  # gradients: of the sum, and of finished slices
        if recomputed:
            padded_lora_width = up.padded_lora_width + down.padded_lora_width
            total += n * (up.out_features + up.input_width + padded_lora_width) * itemsize
            total += n * self.per_layer_gate.saved_values * itemsize if self.per_layer_gate else 0
        return total

    @property
    def active_weights(self) -> int:
        return sum(fused.n_weights for fused in self.sublayer.fused_linears)

    @property
    def recomputed_weights(self) -> int:
        """Includes down's only with `per_layer_gate`, which reads the sum."""
        return self.active_weights if self.per_layer_gate else self.sublayer.gate_up.n_weights

    @property
    def elementwise_values(self) -> int:
        """Measured."""
        per_layer_values = self.per_layer_gate.elementwise_values if self.per_layer_gate else 0
        return (15 * self.sublayer.arch.hidden_size + 6 * self.sublayer.down.in_features
                + 3 * self.sublayer.gate_up.out_features + per_layer_values)


@dataclasses.dataclass(frozen=True, eq=False)
class PerLayerGateCosts:
    """The costs of a PerLayerGate, in the terms of MLPSublayerCosts."""

    per_layer_gate: PerLayerGate

    @property
    def saved_values(self) -> int:
        gate, out = self.per_layer_gate.fused_linears
        hidden = self.per_layer_gate.arch.hidden_size
        return 2 * hidden + gate.out_features + gate.padded_lora_width + out.padded_lora_width

    def live_bytes(self, n: int, itemsize: int, reuse_dequantized: bool) -> int:
        """Peak bytes of backward() for n tokens, besides what is saved. DoRA's outputs fit into
        what is counted."""
        gate, out = self.per_layer_gate.fused_linears
        values = 2 * self.per_layer_gate.arch.hidden_size + 2 * out.input_width + gate.input_width
        weights = [weight_bytes(fused, itemsize, reuse_dequantized) for fused in (gate, out)]
        return n * values * itemsize + sum(weights)

    @property
    def elementwise_values(self) -> int:
        """Values that elementwise work reads or writes; counted, not measured."""
        return 12 * self.per_layer_gate.arch.hidden_size + 9 * self.per_layer_gate.gate.out_features
