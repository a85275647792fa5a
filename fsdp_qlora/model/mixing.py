"""The half of a layer that mixes tokens: x + out(mixing(inputs(norm(x)))), forward and backward,
and what it costs.

The mixings are AttentionMixing of attention and RecordedMixing of mixers.
"""

from __future__ import annotations

import dataclasses
import types
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fsdp_qlora.model.elementwise import ATTENTION_SITE
from fsdp_qlora.model.linears import FusedLinear
from fsdp_qlora.model.products import add_a_gradient, product, product_backward, widen
from fsdp_qlora.model.residual import (
    add_branch, branch_gradient, keep, keep_inputs, kept_inputs, last_columns, norm_gradient,
    norm_inputs, weight_bytes)
from fsdp_qlora.pretrained.architecture import Architecture

if TYPE_CHECKING:
    from fsdp_qlora.model.layer import LayerWork
    from fsdp_qlora.planner.plan import Plan


class Mixing(Protocol):
    """A function of all tokens of a bin, inside each document. The properties are for the plan:
    they count values per token."""

    def forward(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        """What the last product reads [n, out.in_features], of kept.projected [n,
        inputs.out_features], which it may replace in `kept`; that holds what the others need."""

    def mixed(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        """What forward() returned."""

    def backward(self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor) -> Tensor:
        """The gradient of what was projected, from that of what forward() returned. Takes what it
        needs out of `kept`."""

    @property
    def query_width(self) -> int:
        """Of softmax attention, whose work grows with the length of documents; else 0."""

    @property
    def kept_values(self) -> int:
        """Kept from forward to backward, if nothing is recomputed."""

    @property
    def recomputed_values(self) -> int:
        """Alive while forward() is computed again."""

    @property
    def elementwise_values(self) -> int:
        """What reads or writes memory takes as long as so many values, forward and backward."""

    def live_bytes(self, plan: Plan) -> int:
        """The peak bytes of backward(), besides what is kept."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixingHalf:
    """One layer's norm, product, mixing, product and sum. The properties are for the plan: they
    count values per token, unless their names say bytes or weights."""

    arch: Architecture
    inputs: FusedLinear  # of attention: q, k and v
    out: FusedLinear
    mixing: Mixing

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.inputs, self.out

    def forward(
        self, work: LayerWork, x: Tensor, want_sum: bool = True
    ) -> tuple[Tensor | Any, types.SimpleNamespace]:
        """Returns x + mixed(norm(x)) [tokens, hidden], None without want_sum, and what backward()
        needs."""
        arch, kept = self.arch, keep(x=x)
        inputs = norm_inputs(work, arch.attention_norm, x, self.inputs)
        kept.projected = product(work, self.inputs, inputs)
        keep_inputs(work, kept, inputs, self.inputs)
        del inputs
        out_inputs = widen(self.mixing.forward(work, kept), self.out)
        out, kept.branch = add_branch(work, x, self.out, out_inputs, ATTENTION_SITE,
                                      arch.attention_post_norm, want_sum)
        kept.out_columns = last_columns(out_inputs, self.out)
        return out, kept

    def backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor, residual: Tensor,
        needs_x: bool
    ) -> Tensor | None:
        """Returns `residual` + the gradient of x through this half; None without needs_x. `grad` is
        the gradient of forward()'s sum."""
        arch, mixed = self.arch, self.mixing.mixed(work, kept)
        grad = branch_gradient(work, kept.branch, grad, arch.attention_post_norm, ATTENTION_SITE)
        grad, grad_d = product_backward(work, self.out, kept.out_columns, grad, mixed)
        add_a_gradient(work, self.out, mixed, grad_d)
        kept.branch = mixed = None
        grad = self.mixing.backward(work, kept, grad)
        inputs = kept_inputs(work, kept, arch.attention_norm, kept.x, self.inputs)
        grad, grad_d = product_backward(work, self.inputs, kept.columns, grad, inputs, needs_x)
        add_a_gradient(work, self.inputs, inputs, grad_d)
        if not needs_x:
            return None
        return norm_gradient(work, arch.attention_norm, kept.x, grad, residual)

    @property
    def recomputed_values(self) -> int:
        """Values that are alive while forward() is computed again."""
        return self.mixing.recomputed_values + self.inputs.width + self.out.width

    @property
    def kept_values(self) -> int:
        """Values kept from forward to backward, if nothing is recomputed."""
        hidden = self.arch.hidden_size
        values = hidden + self.inputs.padded_columns + self.out.padded_columns
        values += hidden * (self.arch.attention_post_norm is not None)
        return values + self.mixing.kept_values

    @property
    def query_width(self) -> int:
        """See Mixing."""
        return self.mixing.query_width

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        """The peak bytes of backward(), besides what is kept."""
        item = getattr(torch, plan.compute_dtype).itemsize
        hold_weights = plan.hold_weights and recomputed
        values = self.recomputed_values if recomputed else 0
        values += self.inputs.width + 2 * self.arch.hidden_size  # gradients: of x and of the sum
        others = weight_bytes(self.inputs, item, hold_weights)
        if hold_weights:
            others += weight_bytes(self.out, item, hold_weights)
        return values * plan.bin_tokens * item + others + self.mixing.live_bytes(plan)

    def recomputed_weights(self, want_sum: bool) -> int:
        """Weights that are multiplied again when forward() is recomputed."""
        return self.inputs.n_weights + (self.out.n_weights if want_sum else 0)

    @property
    def elementwise_values(self) -> int:
        """Values that elementwise work reads or writes, forward and backward; measured."""
        return 15 * self.arch.hidden_size + self.mixing.elementwise_values
