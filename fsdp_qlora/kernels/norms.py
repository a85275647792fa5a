"""Norms: RMSNorm and LayerNorm in all families' kinds, forward and backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel


def standardized(x: Tensor, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / rms(x) and 1 / rms(x), fp32; kind "layer" subtracts the mean of x first."""
    x = x.float()
    if kind.startswith("layer"):
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


def norm_of(
    x: Tensor, weight: Tensor | None, kind: str, eps: float, bias: Tensor | None = None
) -> Tensor:
    """Return the norm of x over its last dimension; `weight` must broadcast, None: 1.

    `kind` is "rms" (Llama: rounds before the weight), "rms_fp32" (OLMo 2: rounds after it),
    "rms_plus_one" (Gemma: times 1 + weight), "layer" (Cohere: mean subtracted) or "layer_plus_one"
    (Nemotron: rounds 1 + weight). The last two may have a bias.
    """
    if weight is None:
        return standardized(x, kind, eps)[0].to(x.dtype)
    if bias is not None:  # the same function as in transformers, to be equal to the bit in bf16
        return F.layer_norm(x, weight.shape, norm_factor(weight, kind).to(x.dtype), bias, eps)
    standard, _ = standardized(x, kind, eps)
    if kind == "rms":
        return weight * standard.to(x.dtype)
    return (norm_factor(weight, kind) * standard).to(x.dtype)


def norm_factor(weight: Tensor, kind: str) -> Tensor:
    """Return the factor by which the norm multiplies, fp32."""
    if kind == "layer_plus_one":
        return (weight + 1).float()
    return weight.float() + (kind == "rms_plus_one")


def norm_of_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, kind: str, eps: float
) -> Tensor:
    """Return the gradient of x, fp32, from the gradient of norm_of(x)."""
    standard, scale = standardized(x, kind, eps)
    grad = grad.float() if weight is None else grad.float() * norm_factor(weight, kind)
    inner = grad - standard * (grad * standard).mean(-1, keepdim=True)
    if kind.startswith("layer"):
        inner = inner - grad.mean(-1, keepdim=True)
    return inner * scale


@fused_kernel
def fused_norm(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> None:
    """Write the norm of x [n, width] into `out`; `bias` may be None."""
    out.copy_(norm_of(x, weight, kind, eps, bias))


@fused_kernel
def fused_norm_backward(
    x: Tensor, grad: Tensor, grad_residual: Tensor | None, weight: Tensor, kind: str, eps: float
) -> Tensor:
    """Return the gradient of x [n, width] from `grad`, the gradient of its norm, plus
    `grad_residual` or None."""
    grad_x = norm_of_backward(grad, x, weight, kind, eps)
    return (grad_x if grad_residual is None else grad_x + grad_residual).to(x.dtype)
