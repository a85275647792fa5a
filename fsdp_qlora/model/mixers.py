"""Mixings of tokens other than softmax attention: LFM2's short convolution.

Which layers have one is in families. None sees across the bounds of documents.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.model.elementwise import elementwise
from fsdp_qlora.pretrained.architecture import Architecture, Mixer, ShortConv

if TYPE_CHECKING:
    from fsdp_qlora.model.layer import LayerWork
    from fsdp_qlora.planner.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedMixing:
    """A mixing of MixingHalf that is a function of MIXINGS, whose backward is autograd's."""

    mixer: Mixer
    arch: Architecture

    def forward(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        function = MIXINGS[type(self.mixer)].function
        kept.projected = kept.projected.requires_grad_(work.is_kept)
        with torch.set_grad_enabled(work.is_kept):
            kept.mixed = function(work, kept.projected, self.mixer)
        return self.mixed(work, kept)

    def mixed(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        mixed: Tensor = kept.mixed.detach()
        return mixed

    def backward(self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(kept.mixed, kept.projected, grad)
        kept.mixed = kept.projected = None
        return grad

    query_width = 0

    @property
    def kept_values(self) -> int:
        return MIXINGS[type(self.mixer)].kept_values(self.mixer, self.arch.hidden_size)

    @property
    def recomputed_values(self) -> int:
        return self.kept_values

    def live_bytes(self, plan: Plan) -> int:
        item = getattr(torch, plan.compute_dtype).itemsize
        values = MIXINGS[type(self.mixer)].live_values(self.mixer, self.arch.hidden_size)
        return values * plan.bin_tokens * item


# ---- causal convolution ----


class CausalConv(torch.autograd.Function):
    """Each channel's sum of its last tokens of the document, each times a weight, plus a bias; then
    perhaps SiLU. x [n, channels], weight [channels, 1, kernel], bias [channels] or None, positions
    [n] of the tokens in their documents. Keeps x alone; has no gradient of weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.silu = silu
        return conv_forward(x, weight, bias, positions, silu)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions = ctx.saved_tensors
        if ctx.silu:
            grad = conv_silu_backward(grad, x, weight, bias, positions)
        return conv_backward(grad, weight, positions), None, None, None, None


def conv_sum(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """The convolution before SiLU, fp32."""
    kernel = weight.shape[-1]
    total = 0.0 if bias is None else bias.float()
    for back in range(kernel):  # the token so many before; only if it is of the same document
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].float() * (positions >= back)[:, None]
        total = total + earlier * weight[:, 0, kernel - 1 - back].float()
    return total


@elementwise
def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
) -> Tensor:
    total = conv_sum(x, weight, bias, positions)
    return (F.silu(total) if silu else total).to(x.dtype)


@elementwise
def conv_silu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor
) -> Tensor:
    """The gradient of what SiLU reads."""
    total = conv_sum(x, weight, bias, positions)
    grad_total: Tensor = torch.ops.aten.silu_backward(grad.float(), total)
    return grad_total.to(x.dtype)


@elementwise
def conv_backward(grad: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """The gradient of x from that of conv_sum()."""
    kernel, total = weight.shape[-1], 0
    for ahead in range(kernel):  # to the token so many after, if it is of the same document
        of_later = grad.float() * (positions >= ahead)[:, None]
        of_later = F.pad(of_later, (0, 0, 0, ahead))[ahead:]
        total = total + of_later * weight[:, 0, kernel - 1 - ahead].float()
    return total.to(grad.dtype)


# ---- mixings ----


def short_conv(work: LayerWork, projected: Tensor, mixer: ShortConv) -> Tensor:
    """LFM2's, see ShortConv; b, c and x follow one another in `projected` [n, 3 x hidden]."""
    tensors = work.layer.small_tensors
    b, c, x = projected.chunk(3, 1)
    conv = CausalConv.apply(b * x, tensors["conv.conv.weight"], tensors.get("conv.conv.bias"),
                            work.bin.position_ids, False)
    return c * conv


@dataclasses.dataclass(frozen=True)
class RecordedFunction:
    """A function (work, projected [n, widths], mixer) -> what out reads [n, width], under autograd;
    and what it costs, in values per token."""

    function: Callable[[LayerWork, Tensor, Any], Tensor]
    kept_values: Callable[[Any, int], int]  # of (mixer, hidden): kept for its backward
    live_values: Callable[[Any, int], int]  # alive at once in its backward, besides


MIXINGS: dict[type, RecordedFunction] = {
    # kept: projected, b * x and conv's result; the products' inputs are views
    ShortConv: RecordedFunction(
        short_conv, lambda mixer, hidden: 6 * hidden, lambda mixer, hidden: 7 * hidden)}
