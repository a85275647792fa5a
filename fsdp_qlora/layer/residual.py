"""What the two sublayers of a layer share: the norm before them, and the residual sum after them.

A half is x + norm(products(norm(x))), with each norm only where the family has one. What products()
gives is the half's branch. `work` is a LayerWork of layer.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.kernels.elementwise import norm_backward, normalize
from fsdp_qlora.layer.call import LayerWork
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import fill_columns, lora_matmul, widen


def norm_inputs(work: LayerWork, name: str | None, x: Tensor, fused: FusedLinear) -> Tensor:
    """A new [n, fused.width] with the norm of x [n, in] in its first columns; x without a norm."""
    if name is None:
        return widen(x, fused)
    arch, inputs = work.arch, x.new_empty(len(x), fused.width)
    normalize(inputs[:, : fused.in_features], x, work.vector(name), work.vector(name, "bias"),
              arch.norm, arch.norm_eps, evaluation=work.evaluation)
    return inputs


def normed(work: LayerWork, name: str, x: Tensor) -> Tensor:
    """The norm of x [n, hidden]."""
    arch, out = work.arch, torch.empty_like(x)
    normalize(out, x, work.vector(name), work.vector(name, "bias"), arch.norm, arch.norm_eps,
              evaluation=work.evaluation)
    return out


def keep_inputs(
    work: LayerWork, kept: types.SimpleNamespace, inputs: Tensor, fused: FusedLinear | None
) -> None:
    """Set kept.inputs and kept.columns, what backward needs of `inputs`, which norm_inputs()
    returned. product() has filled their last columns for `fused`; None: it has not. The normed
    inputs are cheap to make again, so they are kept only if backward is running."""
    kept.inputs = inputs if work.is_backward else None
    kept.columns = last_columns(inputs, fused) if fused else None


def kept_inputs(
    work: LayerWork, kept: types.SimpleNamespace, name: str | None, x: Tensor, fused: FusedLinear
) -> Tensor:
    """The norm of x [n, in]: kept.inputs or, where that is None, made again."""
    inputs = norm_inputs(work, name, x, fused) if kept.inputs is None else kept.inputs
    return inputs[:, : fused.in_features]


def norm_gradient(
    work: LayerWork, name: str | None, x: Tensor, grad: Tensor, residual: Tensor
) -> Tensor:
    """Returns `residual` + the gradient of x, from `grad`, the gradient of norm(x)."""
    if name is None:
        return residual + grad
    return norm_backward(x, grad, residual, work.vector(name), work.arch.norm, work.arch.norm_eps)


def add_branch(
    work: LayerWork, x: Tensor | None, fused: FusedLinear, inputs: Tensor, site: int,
    post_norm: str | None, want_sum: bool
) -> tuple[Tensor | None, Tensor | None]:
    """end_branch() of the product of `inputs`, which is not computed where
    neither the sum nor the norm's backward needs it."""
    if not (want_sum or post_norm):
        fill_columns(work, fused, inputs)  # backward reads them
        return None, None
    return end_branch(work, x, lora_matmul(work, fused, inputs), post_norm, site, want_sum)


def end_branch(
    work: LayerWork, x: Tensor | None, branch: Tensor, post_norm: str | None, site: int,
    want_sum: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Returns x + multiplier * norm(branch), None without want_sum; and the branch, which backward
    reads if there is a norm, None where it was added without one. Both after the model's own
    dropout of the branch."""
    arch = work.arch
    added = branch = work.drop(branch, arch.residual_dropout, site)
    if not want_sum:
        return None, branch
    assert x is not None, "the sum needs it"
    if post_norm:
        added = torch.empty_like(branch)
        normalize(added, branch, work.vector(post_norm), work.vector(post_norm, "bias"),
                  arch.norm, arch.post_norm_eps, evaluation=work.evaluation)
    out = torch.add(x, added, alpha=arch.residual_multiplier)
    return out, branch if post_norm else None


def last_columns(inputs: Tensor, fused: FusedLinear) -> Tensor:
    """A copy of the columns of product()'s inputs that backward reads besides x."""
    return inputs[:, fused.in_features :].clone()


def branch_gradient(
    work: LayerWork, branch: Tensor | None, grad: Tensor, post_norm: str | None, site: int
) -> Tensor:
    """The gradient of end_branch()'s branch, from `grad`, that of the sum."""
    arch = work.arch
    if arch.residual_multiplier != 1:
        grad = grad * arch.residual_multiplier
    if post_norm:
        weight = work.vector(post_norm)
        grad = norm_backward(branch, grad, None, weight, arch.norm, arch.post_norm_eps)
    return work.drop(grad, arch.residual_dropout, site)


def keep(**values: Any) -> types.SimpleNamespace:
    """What a half keeps for its backward, which drops each part after its use."""
    return types.SimpleNamespace(**values)


def weight_bytes(fused: FusedLinear, item: int, reuse_dequantized: bool) -> int:
    """Bytes of the dequantized weights of a FusedLinear that are alive at once."""
    sizes = [one.out_features for one in fused.splits]
    return fused.width * (sum(sizes) if reuse_dequantized else max(sizes)) * item
