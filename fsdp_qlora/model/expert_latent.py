"""The latent space in which the experts of some models work (Nemotron 3 Super and Ultra): the
products that lead there and back, forward and backward, and what they cost.

Router and shared expert read the hidden states themselves.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING

from torch import Tensor

from fsdp_qlora.model.linears import FusedLinear
from fsdp_qlora.model.products import (
    add_a_gradient, fill_columns, product, product_backward, widen)
from fsdp_qlora.model.residual import last_columns

if TYPE_CHECKING:
    from fsdp_qlora.model.layer import LayerWork


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLatent:
    """One layer's two products around its experts, see Mixture.latent_size. The properties are for
    the plan: they count values per token."""

    into: FusedLinear  # of what router and shared expert read
    back: FusedLinear  # of the weighted sum of what the experts give

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.into, self.back

    def enter(self, work: LayerWork, kept: types.SimpleNamespace, x: Tensor) -> Tensor:
        """What the experts read [n, latent], of x [n, hidden]; also in kept.latent."""
        inputs = widen(x, self.into)
        kept.latent = product(work, self.into, inputs)
        kept.latent_columns, kept.latent_sum = last_columns(inputs, self.into), None
        latent: Tensor = kept.latent
        return latent

    def leave(
        self, work: LayerWork, kept: types.SimpleNamespace, given: Tensor, wanted: bool
    ) -> Tensor | None:
        """What the experts give [n, hidden], of their sum [n, latent]; None if not wanted."""
        inputs = widen(given, self.back)
        if self.back.n_columns:
            kept.latent_sum = inputs
        if wanted:
            return product(work, self.back, inputs)
        fill_columns(work, self.back, inputs)  # backward reads them
        return None

    def leave_backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor
    ) -> Tensor:
        """The gradient of leave()'s sum, from that of what the experts give."""
        inputs, kept.latent_sum = kept.latent_sum, None
        if inputs is None:  # without an adapter it is not read
            inputs = grad.new_empty(0, self.back.width)
        given, columns = inputs.tensor_split([self.back.in_features], 1)
        grad, grad_d = product_backward(work, self.back, columns, grad, given)
        add_a_gradient(work, self.back, given, grad_d)
        return grad

    def enter_backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor, x: Tensor
    ) -> Tensor:
        """The gradient of enter()'s x, from that of what the experts read."""
        kept.latent = None
        grad, grad_d = product_backward(work, self.into, kept.latent_columns, grad, x)
        add_a_gradient(work, self.into, x, grad_d)
        return grad

    @property
    def kept_values(self) -> int:
        """Kept from forward to backward, if nothing is recomputed."""
        of_sum = self.back.width if self.back.n_columns else 0
        return self.into.out_features + self.into.padded_columns + of_sum

    @property
    def live_values(self) -> int:
        """Alive in backward besides: both inputs, and gradients of the latent and its sum."""
        return self.into.width + self.back.width + 2 * self.into.out_features
