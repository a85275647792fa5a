"""Identity sublayers, for layers that have only a mixer or only an MLP (Nemotron-H).

They have the interfaces of MixerSublayer and of MLPSublayer.
"""

from __future__ import annotations

from torch import Tensor

from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.saved import SavedMixerSublayer, SavedMLP


class NoMixerSublayer:
    """An identity with the interface of MixerSublayer."""

    fused_linears = ()

    def forward(
        self, call: LayerCall, x: Tensor, wants_sum: bool = True
    ) -> tuple[Tensor, SavedMixerSublayer]:
        return x, SavedMixerSublayer()

    def backward(
        self, call: LayerCall, saved: SavedMixerSublayer, grad: Tensor, grad_residual: Tensor,
        wants_grad_x: bool
    ) -> Tensor:
        return grad_residual


class NoMLPSublayer:
    """An identity that is an MLPSublayer."""

    fused_linears = ()

    def forward(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, SavedMLP]:
        return mid_residual, SavedMLP()

    def backward(self, call: LayerCall, saved: SavedMLP, grad: Tensor) -> Tensor:
        return grad

    def forward_in_slices(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, None]:
        return mid_residual, None

    def backward_in_slices(
        self, call: LayerCall, mlp_input: Tensor, grad: Tensor, routing_choices: None
    ) -> Tensor:
        return grad
