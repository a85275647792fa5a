"""Identity sublayers, for layers that have only a mixer or only an MLP (Nemotron-H).

They have the interfaces of MixerSublayer and of MLPSublayer.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.saved import SavedMixerSublayer, SavedMLP
from fsdp_qlora.pretrained.architecture import Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class _Identity:
    """The fields of both identity sublayers."""

    arch: Architecture

    fused_linears: tuple[FusedLinear, ...] = dataclasses.field(default=(), init=False)


class NoMixerSublayer(_Identity):
    """An identity with the interface of MixerSublayer."""

    def forward(
        self, call: LayerCall, x: Tensor, wants_sum: bool = True
    ) -> tuple[Tensor, SavedMixerSublayer]:
        return x, SavedMixerSublayer()

    def backward(
        self, call: LayerCall, saved: SavedMixerSublayer, grad: Tensor, grad_residual: Tensor,
        wants_grad_x: bool
    ) -> Tensor:
        return grad_residual


class NoMLPSublayer(_Identity):
    """An identity that is an MLPSublayer."""

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
