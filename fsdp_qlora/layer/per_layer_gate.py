"""The gate of a layer that has an input of its own (Gemma 4 E2B, E4B), after its MLP."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fsdp_qlora.kernels.activations import activation_and_gradient
from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward, widen
from fsdp_qlora.layer.residual import ResidualSum
from fsdp_qlora.layer.saved import SavedPerLayerGate
from fsdp_qlora.pretrained.architecture import Architecture


@fused_kernel
def gate_inputs(out: Tensor, gates: Tensor, inputs: Tensor, activation: str) -> None:
    """Write activation(gates) * inputs into `out`, all [n, size]."""
    out.copy_(activation_and_gradient(activation)[0](gates.float()) * inputs.float())


@fused_kernel
def gate_inputs_backward(grad: Tensor, gates: Tensor, inputs: Tensor, activation: str) -> Tensor:
    """Return the gradient of gates, from the gradient of gate_inputs()'s result."""
    slope = activation_and_gradient(activation)[1]
    return slope(grad.float() * inputs.float(), gates.float()).to(grad.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class PerLayerGate:
    """The gate after one layer's MLP, x + norm(out_proj(activation(gate(x)) * input))."""

    arch: Architecture
    gate: FusedLinear
    out_proj: FusedLinear
    residual_sum: ResidualSum

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.gate, self.out_proj

    def forward(
        self, call: LayerCall, x: Tensor, saved: SavedPerLayerGate, wants_sum: bool
    ) -> Tensor | None:
        """Return the sum, None without wants_sum. Adds to `saved` what backward() needs."""
        inputs = widen(x, self.gate)
        saved.per_layer_x = x
        saved.per_layer_gates, saved.per_layer_gate_lora_hidden = lora_matmul(
            call, self.gate, inputs)
        activated = x.new_empty(len(x), self.out_proj.input_width)
        self._activate(call, saved, activated[:, : self.out_proj.in_features])
        out, saved.per_layer_branch, saved.per_layer_out_lora_hidden = (
            self.residual_sum.matmul_and_add(call, x, self.out_proj, activated, wants_sum))
        return out

    def backward(self, call: LayerCall, saved: SavedPerLayerGate, grad: Tensor) -> Tensor:
        """Return the gradient of x from the gradient of the sum."""
        upstream = self.residual_sum.backward(call, saved.per_layer_branch, grad)
        saved.per_layer_branch = None
        activated = upstream.new_empty(len(upstream), self.out_proj.in_features)
        self._activate(call, saved, activated)
        grad_activated = lora_matmul_backward(
            call, self.out_proj, saved.per_layer_out_lora_hidden, upstream, activated)
        grad_gates = gate_inputs_backward(
            grad_activated, saved.per_layer_gates, call.per_layer_input, self.arch.activation)
        del grad_activated
        grad_x = lora_matmul_backward(
            call, self.gate, saved.per_layer_gate_lora_hidden, grad_gates, saved.per_layer_x)
        return grad + grad_x

    def _activate(self, call: LayerCall, saved: SavedPerLayerGate, out: Tensor) -> None:
        gate_inputs(out, saved.per_layer_gates, call.per_layer_input, self.arch.activation,
                    is_evaluation=call.is_evaluation)
