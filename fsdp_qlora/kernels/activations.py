"""Activations and gated units: act(gate) * up, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel


SILU = F.silu, torch.ops.aten.silu_backward  # the function and its gradient
GELU_TANH = (functools.partial(F.gelu, approximate="tanh"),
             functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"))
RELU2 = lambda x: F.relu(x).square(), lambda grad, x: grad * 2 * F.relu(x)
# {one of ACTIVATIONS: (the function, its gradient)}
ACTIVATIONS_AND_GRADIENTS = {
    "silu": SILU, "swish": SILU, "gelu": (F.gelu, torch.ops.aten.gelu_backward),
    "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH, "relu2": RELU2}


@dataclasses.dataclass(frozen=True)
class ScaledActivation:
    """outer * activation(inner * x), as in Falcon-H1."""

    activation: str
    inner: float
    outer: float


@dataclasses.dataclass(frozen=True)
class LimitedActivation:
    """An activation whose result is at most `limit`, with ups clamped to [-limit, limit]."""

    # if the limit varies, glu_backward_() compiled by torch 2.13 returns wrong values
    has_own_kernel: ClassVar[bool] = True  # see fused_kernel()
    activation: str
    limit: float


def limited(activation: str, limit: float | None) -> str | LimitedActivation:
    """Return the activation with this limit; None: without one."""
    return LimitedActivation(activation, limit) if limit else activation


class XIELUActivation(NamedTuple):
    """Apertus's activation, whose parameters are frozen tensors."""

    scalars: Tensor  # [4]: alpha_p and alpha_n, before their softplus, beta and eps


class ClampedGLU(NamedTuple):
    """gpt-oss's gated unit: (ups + 1) * gates * sigmoid(alpha * gates), see clamped_parts()."""

    limit: float
    alpha: float


ElementwiseActivation = str | XIELUActivation | ScaledActivation | LimitedActivation
Activation = ElementwiseActivation | ClampedGLU


def activation_and_gradient(activation: ElementwiseActivation) -> tuple[Callable[..., Tensor], ...]:
    """Return an activation and its gradient, functions of fp32 x and of (grad, x)."""
    if isinstance(activation, str):
        named: tuple[Callable[..., Tensor], ...] = ACTIVATIONS_AND_GRADIENTS[activation]
        return named
    if isinstance(activation, ScaledActivation):
        inner, outer = activation.inner, activation.outer
        function, slope = ACTIVATIONS_AND_GRADIENTS[activation.activation]
        return (lambda x: outer * function(inner * x),
                lambda grad, x: slope(inner * outer * grad, inner * x))
    if isinstance(activation, LimitedActivation):
        limit = activation.limit
        function, slope = ACTIVATIONS_AND_GRADIENTS[activation.activation]
        return (lambda x: function(x).clamp(max=limit),
                lambda grad, x: slope(grad * (function(x) <= limit), x))
    alpha_p, alpha_n, beta, eps = activation.scalars.float()
    alpha_p, alpha_n = F.softplus(alpha_p), beta + F.softplus(alpha_n)

    def forward(x: Tensor) -> Tensor:
        below = (torch.expm1(torch.minimum(x, eps)) - x) * alpha_n
        return torch.where(x > 0, alpha_p * x * x, below) + beta * x

    def backward(grad: Tensor, x: Tensor) -> Tensor:
        below = (torch.where(x < eps, torch.exp(x), 0) - 1) * alpha_n
        return grad * (torch.where(x > 0, 2 * alpha_p * x, below) + beta)

    return forward, backward


def limited_ups(ups: Tensor, activation: Activation) -> tuple[Tensor, Tensor | bool]:
    """Return ups, fp32, clamped to the activation's limit, if it has one; and where they were
    within it."""
    if not isinstance(activation, LimitedActivation):
        return ups, True
    limit = activation.limit
    return ups.clamp(-limit, limit), ups.abs() <= limit


def glu_product(gate_up: Tensor, activation: Activation, gated: bool) -> Tensor:
    """Return activation(gates) * ups, fp32 [n, inner], of gate_up [n, 2 inner]; if not gated,
    activation(ups) of [n, inner]. A ClampedGLU has its own product."""
    if isinstance(activation, ClampedGLU):
        gates, ups, sigmoid, _ = clamped_parts(gate_up, activation.limit, activation.alpha)
        return (ups + 1) * gates * sigmoid
    parts = gate_up.float().chunk(1 + gated, -1)
    activated = activation_and_gradient(activation)[0](parts[0])
    return activated * limited_ups(parts[1], activation)[0] if gated else activated


@fused_kernel
def glu(out: Tensor, gate_up: Tensor, activation: Activation, gated: bool) -> None:
    """Write glu_product() into `out` [n, inner]."""
    out.copy_(glu_product(gate_up, activation, gated))


@fused_kernel
def glu_backward_(
    grad: Tensor, activation: ElementwiseActivation, weights: Tensor | None, *parts: Tensor
) -> None:
    """Replace `parts` by their gradients, and `grad`, the gradient of glu()'s result, by that
    result, which was not saved. `parts` are gates and ups or, if not gated, ups alone, each [n,
    inner]. `weights` [n], if not None, multiply the gradients, not the result."""
    forward, backward = activation_and_gradient(activation)
    grad32, first32 = grad.float(), parts[0].float()
    activated = forward(first32)
    if weights is not None:
        grad32 = grad32 * weights[:, None]
    results = activated, backward(grad32, first32)
    if len(parts) == 2:
        ups32, inside = limited_ups(parts[1].float(), activation)
        results = activated * ups32, backward(grad32 * ups32, first32), grad32 * activated * inside
    for tensor, result in zip((grad, *parts), results):
        tensor.copy_(result)


def clamped_parts(
    gate_up: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Return gpt-oss's gates, at most `limit`, and ups, between -limit and limit, fp32 [n, inner];
    the sigmoid of alpha * gates; and where gates and where ups were within the limit, so that the
    clamp passes their gradient. In gate_up [n, 2 inner] gates and ups alternate."""
    gates, ups = gate_up.float().unflatten(-1, (-1, 2)).unbind(-1)
    inside = gates <= limit, ups.abs() <= limit
    gates, ups = gates.clamp(max=limit), ups.clamp(-limit, limit)
    return gates, ups, torch.sigmoid(alpha * gates), inside


@fused_kernel
def clamped_glu_backward_(
    grad: Tensor, weights: Tensor, gate_up: Tensor, limit: float, alpha: float
) -> Tensor:
    """glu_backward_() of a ClampedGLU. Returns the gradient of gate_up in a new tensor: gates and
    ups alternate in it, so one pass cannot overwrite them."""
    gates, ups, sigmoid, (gate_inside, up_inside) = clamped_parts(gate_up, limit, alpha)
    activated = gates * sigmoid
    grad32 = grad.float() * weights[:, None]
    slope = sigmoid * (1 + alpha * gates * (1 - sigmoid))
    grads = grad32 * (ups + 1) * slope * gate_inside, grad32 * activated * up_inside
    grad.copy_(activated * (ups + 1))
    return torch.stack([part.to(gate_up.dtype) for part in grads], -1).flatten(-2)


def gate_up_gradient_(
    grad: Tensor, gate_up: Tensor, activation: Activation, gated: bool,
    weights: Tensor | None = None
) -> Tensor:
    """Return the gradient of gate_up, in a new tensor or in gate_up itself, and replace `grad`, the
    gradient of glu()'s result, by that result. `weights`: see glu_backward_()."""
    if isinstance(activation, ClampedGLU):
        assert weights is not None, "only experts have it"
        return clamped_glu_backward_(grad, weights, gate_up, activation.limit, activation.alpha)
    # gates and ups as two tensors, so that one kernel can read and write their columns
    glu_backward_(grad, activation, weights, *gate_up.chunk(1 + gated, -1))
    return gate_up


@fused_kernel
def glu_weight_gradients(
    grad: Tensor, gate_up: Tensor, activation: Activation, gated: bool
) -> Tensor:
    """Return the gradient of the weights of rows, fp32 [n]. `grad` is the gradient of glu()'s
    result for weights of 1. This is not part of glu_backward_(), because a compiled kernel that
    both sums its input and overwrites it was wrong in fp32 (torch 2.11), and slower."""
    return (grad.float() * glu_product(gate_up, activation, gated)).sum(-1)
