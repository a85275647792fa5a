"""What both sublayers share: the norm before and the residual sum after.

A sublayer is x + norm(matmuls(norm(x))), with each norm only where the family has one. The output
of the matmuls is its branch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_qlora.kernels.norms import fused_norm, fused_norm_backward
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, widen
from fsdp_qlora.layer.saved import SavedMLPInput


def norm_padded(
    call: LayerCall, name: str | None, x: Tensor, fused: FusedLinear, eps: float | None = None
) -> Tensor:
    """Return the norm of x [n, in], or x itself if `name` is None, in the first columns of a new
    tensor [n, fused.input_width], with room for LoRA's columns. `eps`: None: arch.norm_eps."""
    if name is None:
        return widen(x, fused)
    inputs = x.new_empty(len(x), fused.input_width)
    fused_norm(inputs[:, : fused.in_features], x, call.vector(name), call.vector(name, "bias"),
               call.arch.norm_kind, call.arch.norm_eps if eps is None else eps,
               is_evaluation=call.is_evaluation)
    return inputs


def apply_norm(call: LayerCall, name: str, x: Tensor, eps: float | None = None) -> Tensor:
    """Return the norm of x [n, hidden]. `eps`: None: arch.norm_eps."""
    out = torch.empty_like(x)
    fused_norm(out, x, call.vector(name), call.vector(name, "bias"), call.arch.norm_kind,
               call.arch.norm_eps if eps is None else eps, is_evaluation=call.is_evaluation)
    return out


def saved_or_recomputed_inputs(
    call: LayerCall, saved: SavedMLPInput, name: str | None, fused: FusedLinear
) -> Tensor:
    """Return the norm of saved.mlp_input [n, in]: saved.normed_inputs or, if that is None, computed
    again."""
    inputs = saved.normed_inputs
    if inputs is None:
        inputs = norm_padded(call, name, saved.mlp_input, fused)
    return inputs[:, : fused.in_features]


def norm_padded_backward(
    call: LayerCall, name: str | None, x: Tensor, grad: Tensor, grad_residual: Tensor
) -> Tensor:
    """Return `grad_residual` + the gradient of x, from `grad`, the gradient of norm(x)."""
    if name is None:
        return grad_residual + grad
    return fused_norm_backward(
        x, grad, grad_residual, call.vector(name), call.arch.norm_kind, call.arch.norm_eps)


class ResidualSum(NamedTuple):
    """The end of a sublayer, x + multiplier * norm(dropout(branch))."""

    post_norm: str | None  # the norm's name in the layer; None: the family has none
    site: int  # of the model's own dropout

    def needs_branch(self, wants_sum: bool) -> bool:
        """Return True if the sum or the norm's backward needs the branch."""
        return wants_sum or self.post_norm is not None

    def matmul_and_add(
        self, call: LayerCall, x: Tensor | None, fused: FusedLinear, inputs: Tensor, wants_sum: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return add() of the matmul of `inputs`, and LoRA's hidden values as lora_matmul() does.
        The matmul is skipped if nothing needs the branch."""
        branch, lora_hidden = lora_matmul(call, fused, inputs, self.needs_branch(wants_sum))
        if branch is None:
            return None, None, lora_hidden
        return *self.add(call, x, branch, wants_sum), lora_hidden

    def add(
        self, call: LayerCall, x: Tensor | None, branch: Tensor, wants_sum: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the sum, None without wants_sum; and the branch after dropout, which the norm's
        backward reads, None if it was added without a norm."""
        arch = call.arch
        added = branch = call.drop(branch, arch.residual_dropout, self.site)
        if not wants_sum:
            return None, branch
        assert x is not None, "the sum needs it"
        if self.post_norm:
            added = apply_norm(call, self.post_norm, branch, arch.post_norm_eps)
        out = torch.add(x, added, alpha=arch.residual_multiplier)
        return out, branch if self.post_norm else None

    def backward(self, call: LayerCall, branch: Tensor | None, grad: Tensor) -> Tensor:
        """Return the gradient of add()'s branch, from `grad`, the gradient of the sum."""
        arch = call.arch
        if arch.residual_multiplier != 1:
            grad = grad * arch.residual_multiplier
        if self.post_norm:
            weight = call.vector(self.post_norm)
            grad = fused_norm_backward(
                branch, grad, None, weight, arch.norm_kind, arch.post_norm_eps)
        return call.drop(grad, arch.residual_dropout, self.site)
