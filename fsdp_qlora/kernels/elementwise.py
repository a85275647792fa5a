"""Norms, gated activations, dropout: one compiled kernel each.

elementwise() compiles such a function on a GPU, here and elsewhere. Nothing here needs a
micro-batch or a layer.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import types
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.quant.triton_trial import why_no_triton

Result = TypeVar("Result")

LARGE_BYTES = 2**30  # of a tensor; kernels of larger ones are compiled without trying block sizes


def elementwise(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator: compile the function to one kernel on a GPU; not on a CPU, where compiling takes
    minutes.

    When a size differs from the first call's, torch compiles again, now for any size. A kernel for
    any width is half as fast, because it divides to find each value's place. So each width has its
    own kernel, in which only the number of rows may vary. Evaluations have their own kernels, too,
    because their lengths must not change training's kernels, nor the last bit of its results. (One
    kernel for all lengths from the start cost 2 % of a step of Llama-3-8B on an H200.) With
    `dynamic` it is one kernel from the start, for tensors whose lengths vary in any case. See also
    compile_dynamic().
    """
    numbers = itertools.count()

    @functools.cache
    def compiled(is_large: bool, *kind: Any) -> Callable[..., Result]:
        name = f"{function.__name__}_{next(numbers)}"
        # torch tries some sizes of blocks. For that it copies what a function overwrites to pinned
        # host memory, which it keeps: 84 GiB for a row of 262,144 tokens of Qwen3.5-9B
        options = {"triton.autotune_pointwise": False} if is_large else None
        return compiled_copy(function, name, options)

    @functools.wraps(function)
    def call(*args: Any, is_evaluation: bool = False, dynamic: bool = False) -> Result:
        if not args[0].is_cuda or why_no_triton():
            return function(*args)
        tensors = [x for x in args if isinstance(x, Tensor) and x.dim()]
        for tensor in tensors:
            if (dynamic or _all_dynamic) and len(tensor) == len(args[0]):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        widths = ((x.shape[1:], x.stride(0)) for x in tensors)
        # each limit has a kernel of its own: if the limit varies, glu_backward_() compiled by torch
        # 2.13 returns wrong values
        limits = (x for x in args if isinstance(x, LimitedActivation))
        is_large = max(x.nbytes for x in tensors) >= LARGE_BYTES
        n_compiled = compiled.cache_info().misses
        result = compiled(is_large, is_evaluation, dynamic, *limits, *widths)(*args)
        if compiled.cache_info().misses > n_compiled:
            # compiling leaves objects that keep the frames of all callers alive, and so the tensors
            # in them: 2.8 GiB in the first step of GLM-4.7-Flash with a row of 32,768 tokens
            gc.collect()
        return result

    return call


_all_dynamic = False  # set only by compile_dynamic()


def compile_dynamic() -> None:
    """Compile all kernels from now on for any number of rows, for a run whose rows differ in
    length. Otherwise each would be compiled twice, for its first micro-batch and for any; that took
    Qwen3.5-9B's first step from 34 to 51 s (H100)."""
    global _all_dynamic
    _all_dynamic = True


def compiled_copy(
    function: Callable[..., Result], name: str, options: dict[str, Any] | None = None
) -> Callable[..., Result]:
    """Return a compiled copy of a function, with these options of Inductor. To torch it is another
    function, because it has another code object."""
    return torch.compile(types.FunctionType(
        function.__code__.replace(co_name=name), function.__globals__, function.__name__,
        function.__defaults__, function.__closure__), options=options)


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


@elementwise
def normalize(
    out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float
) -> None:
    """Write the norm of x [n, width] into `out`; `bias` may be None."""
    out.copy_(norm_of(x, weight, kind, eps, bias))


@elementwise
def norm_backward(
    x: Tensor, grad: Tensor, grad_residual: Tensor | None, weight: Tensor, kind: str, eps: float
) -> Tensor:
    """Return the gradient of x [n, width] from `grad`, the gradient of its norm, plus
    `grad_residual` or None."""
    grad_x = norm_of_backward(grad, x, weight, kind, eps)
    return (grad_x if grad_residual is None else grad_x + grad_residual).to(x.dtype)


@elementwise
def scale_columns(y: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """Return y [n, out] * factor [out] + bias [out] or None."""
    y32 = y.float() * factor
    return (y32 if bias is None else y32 + bias).to(y.dtype)


SILU = F.silu, torch.ops.aten.silu_backward  # the function and its gradient
GELU_TANH = (functools.partial(F.gelu, approximate="tanh"),
             functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"))
RELU2 = lambda x: F.relu(x).square(), lambda grad, x: grad * 2 * F.relu(x)
# {one of ACTIVATIONS: (the function, its gradient)}
ACTIVATION_PAIRS = {"silu": SILU, "swish": SILU, "gelu": (F.gelu, torch.ops.aten.gelu_backward),
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


PairedActivation = str | XIELUActivation | ScaledActivation | LimitedActivation
Activation = PairedActivation | ClampedGLU


def activation_pair(activation: PairedActivation) -> tuple[Callable[..., Tensor], ...]:
    """Return an activation and its gradient, functions of fp32 x and of (grad, x)."""
    if isinstance(activation, str):
        named: tuple[Callable[..., Tensor], ...] = ACTIVATION_PAIRS[activation]
        return named
    if isinstance(activation, ScaledActivation):
        inner, outer = activation.inner, activation.outer
        function, slope = ACTIVATION_PAIRS[activation.activation]
        return (lambda x: outer * function(inner * x),
                lambda grad, x: slope(inner * outer * grad, inner * x))
    if isinstance(activation, LimitedActivation):
        limit = activation.limit
        function, slope = ACTIVATION_PAIRS[activation.activation]
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
    activated = activation_pair(activation)[0](parts[0])
    return activated * limited_ups(parts[1], activation)[0] if gated else activated


@elementwise
def glu(out: Tensor, gate_up: Tensor, activation: Activation, gated: bool) -> None:
    """Write glu_product() into `out` [n, inner]."""
    out.copy_(glu_product(gate_up, activation, gated))


@elementwise
def glu_backward_(
    grad: Tensor, activation: PairedActivation, weights: Tensor | None, *parts: Tensor
) -> None:
    """Replace `parts` by their gradients, and `grad`, the gradient of glu()'s result, by that
    result, which was not saved. `parts` are gates and ups or, if not gated, ups alone, each [n,
    inner]. `weights` [n], if not None, multiply the gradients, not the result."""
    forward, backward = activation_pair(activation)
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


@elementwise
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


@elementwise
def glu_weight_gradients(
    grad: Tensor, gate_up: Tensor, activation: Activation, gated: bool
) -> Tensor:
    """Return the gradient of the weights of rows, fp32 [n]. `grad` is the gradient of glu()'s
    result for weights of 1. This is not part of glu_backward_(), because a compiled kernel that
    both sums its input and overwrites it was wrong in fp32 (torch 2.11), and slower."""
    return (grad.float() * glu_product(gate_up, activation, gated)).sum(-1)


@elementwise
def add_row_bias(rows: Tensor, bias: Tensor, expert: Tensor) -> None:
    """Add the bias of its expert to each of rows [n, width]; expert [n], bias [experts, width]."""
    rows.copy_(rows.float() + bias[expert])


@elementwise
def add_expert_rows(rows: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """Return for each token the sum [n, width] of its rows, whose indices are `slots` [n, k], times
    weights [n, k] or None. Sums are in fp32 and in a fixed order, so that results are
    reproducible."""
    total: Tensor | Any = 0
    for i in range(slots.shape[1]):  # sum() would be a reduction: for 8 rows a fourth as fast
        picked = rows[slots[:, i]].float()
        total = total + (picked if weights is None else picked * weights[:, i, None])
    return total.to(rows.dtype)


# Numbers of the dropout sites in a layer. The first ones are the inputs of its fused linears; these
# are attention's branch, the MLP's branch, attention's weights and, in the first layer, the
# embedding's output. A layer has N_SITES numbers.
ATTENTION_SITE, MLP_SITE, WEIGHTS_SITE, EMBEDDING_SITE, N_SITES = 8, 9, 10, 11, 12


def drop_eager(x: Tensor, seeds: Tensor, site: int, probability: float) -> Tensor:
    """Dropout of x [n, width]: each value becomes 0 or is divided by 1 - probability.

    The choice depends only on the token's seed [n], the site and the column. So it is the same in a
    recomputation, in any micro-batch and on any number of GPUs.
    """
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
    bits = hash_ints(hash_ints(seeds + site)[:, None] + columns)
    uniform = (bits & (2**24 - 1)).float() / 2**24
    return torch.where(uniform < probability, 0, x.float() / (1 - probability)).to(x.dtype)


drop = elementwise(drop_eager)  # compiled: a model's layers have few different widths
