"""What a layer of one half (Nemotron-H) has in the place of the other: halves that add nothing.

They have the functions and properties of MixerSublayer and MLPSublayer.
"""

from __future__ import annotations

import dataclasses
import types

from torch import Tensor

from fsdp_qlora.layer.call import LayerWork
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.residual import keep
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class _Absent:
    """What both cost."""

    arch: Architecture

    fused_linears: tuple[FusedLinear, ...] = dataclasses.field(default=(), init=False)
    kept_values = recomputed_values = elementwise_values = query_width = choice_values = 0
    token_weights, product_speed = 0, 1

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        return 0


class NoMixerSublayer(_Absent):
    """In the place of a MixerSublayer."""

    def forward(
        self, work: LayerWork, x: Tensor, want_sum: bool = True
    ) -> tuple[Tensor, types.SimpleNamespace]:
        return x, keep()

    def backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor, residual: Tensor,
        needs_x: bool
    ) -> Tensor:
        return residual

    def recomputed_weights(self, want_sum: bool) -> int:
        return 0


class NoMLPSublayer(_Absent):
    """In the place of a MLPSublayer."""

    recomputed_weights = 0

    def forward(
        self, work: LayerWork, mid_residual: Tensor, source: Tensor
    ) -> tuple[Tensor, types.SimpleNamespace]:
        return mid_residual, keep()

    def backward(self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor) -> Tensor:
        return grad

    def forward_to_recompute(
        self, work: LayerWork, mid_residual: Tensor, source: Tensor
    ) -> tuple[Tensor, None]:
        return mid_residual, None

    def recomputed_backward(
        self, work: LayerWork, source: Tensor, grad: Tensor, choice: None
    ) -> Tensor:
        return grad
