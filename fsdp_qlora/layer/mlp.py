"""The MLP sublayer: x + down(act(gate) * up), in some families x + down(act(up)).

A recomputed MLP is computed a slice of tokens at a time, so that its widest tensors are short.
per_layer_gate.py has what may follow the sum.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fsdp_qlora.kernels.activations import (
    ElementwiseActivation, ScaledActivation, XIELUActivation, limited)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.gated_mlp import activate, down_backward
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import MaybeTensor, lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.per_layer_gate import PerLayerGate
from fsdp_qlora.layer.residual import (
    ResidualSum, norm_padded, norm_padded_backward, saved_or_recomputed_inputs)
from fsdp_qlora.layer.saved import SavedMLP
from fsdp_qlora.pretrained.architecture import XIELU, XIELU_SHAPES, Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class DenseMLPSublayer:
    """The MLP of one layer, an MLPSublayer (spec.py)."""

    arch: Architecture
    gate_up: FusedLinear  # up alone in an MLP without a gate
    down: FusedLinear
    residual_sum: ResidualSum
    # after the sum, in layers with an input of their own
    per_layer_gate: PerLayerGate | None = None
    limit: float | None = None  # see LimitedActivation

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        gate_linears = self.per_layer_gate.fused_linears if self.per_layer_gate else ()
        return self.gate_up, self.down, *gate_linears

    def forward(
        self, call: LayerCall, mid_residual: Tensor | None, mlp_input: Tensor,
        wants_sum: bool = True
    ) -> tuple[MaybeTensor, SavedMLP]:
        """For the tokens call.tokens. The sum, which is after `per_layer_gate` if there is one, is
        None without wants_sum."""
        arch = self.arch
        saved = SavedMLP(mlp_input=mlp_input)
        inputs = norm_padded(call, arch.mlp_norm, mlp_input, self.gate_up)
        saved.gate_up, saved.lora_hidden = lora_matmul(call, self.gate_up, inputs)
        saved.normed_inputs = inputs if call.is_backward else None
        del inputs
        activated = activate(call, saved, self.down, self.activation(call))
        out, saved.branch, saved.down_lora_hidden = self.residual_sum.matmul_and_add(
            call, mid_residual, self.down, activated, wants_sum or self.per_layer_gate is not None)
        del activated
        if self.per_layer_gate:
            assert out is not None, "the gate needs the sum"
            out = self.per_layer_gate.forward(call, out, saved, wants_sum)
        return out, saved

    def backward(self, call: LayerCall, saved: SavedMLP, grad: Tensor) -> Tensor:
        arch = self.arch
        if self.per_layer_gate:
            grad = self.per_layer_gate.backward(call, saved, grad)
        upstream = self.residual_sum.backward(call, saved.branch, grad)
        saved.branch = None
        grad_gate_up = down_backward(call, saved, self.down, self.activation(call), upstream)
        del upstream
        inputs = saved_or_recomputed_inputs(call, saved, arch.mlp_norm, self.gate_up)
        grad_inputs = lora_matmul_backward(
            call, self.gate_up, saved.lora_hidden, grad_gate_up, inputs)
        return norm_padded_backward(call, arch.mlp_norm, saved.mlp_input, grad_inputs, grad)

    def forward_in_slices(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, None]:
        sums = []
        for tokens in each_slice(call, len(mid_residual), call.layer.plan.mlp_slice_tokens):
            sums.append(self.forward(call, mid_residual[tokens], mlp_input[tokens])[0])
        return joined(sums), None

    def backward_in_slices(
        self, call: LayerCall, mlp_input: Tensor, grad: Tensor, routing_choices: None
    ) -> Tensor:
        grads = []
        for tokens in each_slice(call, len(mlp_input), call.layer.plan.mlp_slice_tokens):
            # the gate reads the sum: no layer with a gate is parallel, so mlp_input is the sum
            mid_residual = mlp_input[tokens] if self.per_layer_gate else None
            saved = self.forward(call, mid_residual, mlp_input[tokens], wants_sum=False)[1]
            grads.append(self.backward(call, saved, grad[tokens]))
            del saved  # before the next slice allocates its own
        call.dequantized.clear()
        return joined(grads)

    def activation(self, call: LayerCall) -> ElementwiseActivation:
        """Return the activation for activate() and down_backward()."""
        if self.arch.mlp_multipliers != 1.0:
            both = self.arch.mlp_multipliers
            inner, outer = both if isinstance(both, list) else (both, both)
            return ScaledActivation(self.arch.activation, inner, outer)
        if self.arch.activation != "xielu":
            return limited(self.arch.activation, self.limit)
        parts = (call.vector(XIELU, part) for part in XIELU_SHAPES)
        return XIELUActivation(
            torch.stack([part.view(()) for part in parts if part is not None]))


def token_slices(n: int, most: int) -> list[slice]:
    """Cut n tokens into even slices of at most `most` each."""
    size = math.ceil(n / math.ceil(n / most))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def each_slice(call: LayerCall, n: int, most: int) -> Iterator[slice]:
    """Yield token_slices(n, most), each while call.tokens is that slice."""
    for tokens in token_slices(n, most):
        call.tokens = tokens
        yield tokens
    call.tokens = slice(None)


def joined(slices: list[Tensor]) -> Tensor:
    """Return the rows of all slices; of a single slice without a copy."""
    return slices[0] if len(slices) == 1 else torch.cat(slices)
