"""Between the two matmuls of a gated MLP: for the MLP of a layer, and for a shared expert."""

from __future__ import annotations

from torch import Tensor

from fsdp_qlora.kernels.activations import ElementwiseActivation, gate_up_gradient_, glu
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import add_a_gradient, input_gradients
from fsdp_qlora.layer.saved import SavedGatedMLP


def activate(
    call: LayerCall, saved: SavedGatedMLP, down: FusedLinear, activation: ElementwiseActivation
) -> Tensor:
    """Return the inputs of down's matmul, [n, down.input_width]: glu() of saved.gate_up, with room
    for LoRA's columns."""
    inputs = saved.gate_up.new_empty(len(saved.gate_up), down.input_width)
    glu(inputs[:, : down.in_features], saved.gate_up, activation, call.arch.gated,
        is_evaluation=call.is_evaluation)
    return inputs


def down_backward(
    call: LayerCall, saved: SavedGatedMLP, down: FusedLinear, activation: ElementwiseActivation,
    grad: Tensor
) -> Tensor:
    """Return the gradient of saved.gate_up, from `grad`, the gradient of down's outputs. Overwrites
    saved.gate_up."""
    gated = call.arch.gated
    activated = None
    if call.layer_spec.dora and down.lora_width:
        activated = grad.new_empty(len(grad), down.in_features)
        glu(activated, saved.gate_up, activation, gated)
    grad_activated, grad_lora_hidden = input_gradients(
        call, down, saved.down_lora_hidden, grad, activated)
    del activated
    grad_gate_up = gate_up_gradient_(grad_activated, saved.gate_up, activation, gated)
    activated = grad_activated  # overwritten by gate_up_gradient_()
    add_a_gradient(call, down, activated, grad_lora_hidden)
    return grad_gate_up
