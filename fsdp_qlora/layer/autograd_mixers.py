"""Token mixers whose backward is autograd's: short convolution (LFM2), Gated DeltaNet, Mamba-2.

No mixer sees across the bounds of documents. pretrained/families.py says which layers have one,
pretrained/family_specs.py what the letters of a mixer mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.norms import norm_of, norm_of_backward
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.saved import SavedAutogradMixer
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import (
    GatedDeltaNetSpec, Mamba2Spec, OtherMixer, ShortConvSpec)


@dataclasses.dataclass(frozen=True, eq=False)
class AutogradMixer:
    """A TokenMixer that runs a function of OTHER_MIXERS, whose backward is autograd's."""

    mixer_spec: OtherMixer
    arch: Architecture

    saved_type = SavedAutogradMixer
    fused_linears = ()

    def forward(self, call: LayerCall, saved: SavedAutogradMixer) -> Tensor:
        function = OTHER_MIXERS[type(self.mixer_spec)]
        projected, saved.projected = saved.projected, None
        with torch.set_grad_enabled(call.needs_graph):
            if call.needs_graph:
                projected = GraphStart.apply(torch.empty(0, requires_grad=True), projected)
                saved.start = get_gradient_edge(projected)
            saved.mixed = function(call, projected, self.mixer_spec)
        return self.recompute_output(call, saved)

    def recompute_output(self, call: LayerCall, saved: SavedAutogradMixer) -> Tensor:
        return saved.mixed.detach()

    def backward(self, call: LayerCall, saved: SavedAutogradMixer, grad: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad(saved.mixed, saved.start, grad)
        saved.mixed = saved.start = None
        return grad

    @property
    def projected_width(self) -> int:
        return sum(x.out_features for x in self.mixer_spec.linears(self.arch.hidden_size)[0])


class GraphStart(torch.autograd.Function):
    """Returns x as the start of autograd's graph. The graph saves only what its backward reads. If
    x were a leaf, the graph would save all of it, as well as the copies that a mixer makes of its
    parts."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("the gradient is taken at what forward() returned")


# ---- causal convolution ----


class CausalConv(torch.autograd.Function):
    """Causal convolution by channel within each document, plus a bias, then optionally SiLU. x [n,
    channels], weight [channels, 1, kernel], bias [channels] or None, positions [n] of the tokens in
    their documents. Saves x only; computes no gradients of weight and bias."""

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
    """Return the convolution before SiLU, fp32."""
    kernel = weight.shape[-1]
    total: Tensor | Any = 0.0 if bias is None else bias.float()
    for back in range(kernel):  # the token `back` places earlier, if it is in the same document
        earlier = F.pad(x, (0, 0, back, 0))[: len(x)].float() * (positions >= back)[:, None]
        total = total + earlier * weight[:, 0, kernel - 1 - back].float()
    return total


@fused_kernel
def conv_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, silu: bool
) -> Tensor:
    total = conv_sum(x, weight, bias, positions)
    return (F.silu(total) if silu else total).to(x.dtype)


@fused_kernel
def conv_silu_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor
) -> Tensor:
    """Return the gradient of SiLU's input."""
    total = conv_sum(x, weight, bias, positions)
    grad_total: Tensor = torch.ops.aten.silu_backward(grad.float(), total)
    return grad_total.to(x.dtype)


@fused_kernel
def conv_backward(grad: Tensor, weight: Tensor, positions: Tensor) -> Tensor:
    """Return the gradient of x from the gradient of conv_sum()."""
    kernel = weight.shape[-1]
    total: Tensor | Any = 0
    for ahead in range(kernel):  # the token `ahead` places later, if it is in the same document
        grad_later = grad.float() * (positions >= ahead)[:, None]
        grad_later = F.pad(grad_later, (0, 0, 0, ahead))[ahead:]
        total = total + grad_later * weight[:, 0, kernel - 1 - ahead].float()
    return total.to(grad.dtype)


class GatedNorm(torch.autograd.Function):
    """norm(x) * SiLU(z) for x and z [n, heads, dim], or norm(x * SiLU(z)) with gate_first. The norm
    is "rms" of norm_of(), per head, with a weight [dim] or [heads, dim]; if weight is None there is
    no norm. Saves x and z; computes no gradient of `weight`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, z: Tensor, weight: Tensor | None, eps: float, gate_first: bool = False
    ) -> Tensor:
        ctx.save_for_backward(x, z, weight)
        ctx.settings = eps, gate_first
        return gated_norm_forward(x, z, weight, eps, gate_first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *gated_norm_backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None


@fused_kernel
def gated_norm_forward(
    x: Tensor, z: Tensor, weight: Tensor | None, eps: float, gate_first: bool
) -> Tensor:
    if weight is None:
        return (x.float() * F.silu(z.float())).to(x.dtype)
    if gate_first:
        return norm_of(x.float() * F.silu(z.float()), weight, "rms", eps).to(x.dtype)
    return (norm_of(x, weight, "rms", eps) * F.silu(z.float())).to(x.dtype)


@fused_kernel
def gated_norm_backward(
    grad: Tensor, x: Tensor, z: Tensor, weight: Tensor | None, eps: float, gate_first: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and z."""
    grad32, z32 = grad.float(), z.float()
    if weight is None or gate_first:
        x32, gate = x.float(), F.silu(z32)
        if weight is not None:
            grad32 = norm_of_backward(grad32, x32 * gate, weight, "rms", eps)
        grad_z = torch.ops.aten.silu_backward(grad32 * x32, z32)
        return (grad32 * gate).to(x.dtype), grad_z.to(z.dtype)
    grad_x = norm_of_backward(grad32 * F.silu(z32), x, weight, "rms", eps)
    grad_z = torch.ops.aten.silu_backward(grad32 * norm_of(x, weight, "rms", eps), z32)
    return grad_x.to(x.dtype), grad_z.to(z.dtype)


# ---- mixers ----


def short_conv(call: LayerCall, projected: Tensor, spec: ShortConvSpec) -> Tensor:
    """LFM2's mixer, see ShortConvSpec. `projected` [n, 3 x hidden] contains b, c and x."""
    tensors = call.layer.small_tensors
    b, c, x = projected.chunk(3, 1)
    conv = CausalConv.apply(b * x, tensors["conv.conv.weight"], tensors.get("conv.conv.bias"),
                            call.batch.position_ids, False)
    return c * conv


def gated_delta_net(call: LayerCall, projected: Tensor, spec: GatedDeltaNetSpec) -> Tensor:
    """Gated DeltaNet, see GatedDeltaNetSpec."""
    tensors = {name.removeprefix("linear_attn."): tensor
               for name, tensor in call.layer.small_tensors.items()}
    parts = delta_parts(projected, spec)
    positions = call.batch.position_ids
    weights = [tensors.get(f"{letter}_conv1d.weight") for letter in "qkv"]
    if not spec.split_conv:
        weights = tensors["conv1d.weight"].split([spec.widths[letter] for letter in "qkv"])
    query, key, value = (
        CausalConv.apply(parts[letter], weight, None, positions, True).unflatten(1, (heads, -1))
        for letter, weight, heads in zip(
            "qkv", weights, (spec.n_key_heads, spec.n_key_heads, spec.n_value_heads)))
    beta = parts["b"].sigmoid() * (2 if spec.double_beta else 1)
    g = -tensors["A_log"].float().exp() * F.softplus(parts["a"].float() + tensors["dt_bias"])
    assert call.inputs.recurrence, "the model has a mixer with a state"
    out = call.inputs.recurrence(query, key, value, g, beta, call.batch)
    z = parts["z"].unflatten(1, (spec.n_value_heads, -1))
    weight = tensors[f"{spec.norm}.weight"]
    mixed: Tensor = GatedNorm.apply(out, z, weight, spec.norm_eps)
    return mixed.flatten(1)


def mamba2(call: LayerCall, projected: Tensor, spec: Mamba2Spec) -> Tensor:
    """Mamba-2, see Mamba2Spec."""
    tensors = {name.removeprefix(f"{spec.prefix}."): tensor
               for name, tensor in call.layer.small_tensors.items()}
    widths, multipliers = spec.widths, spec.multipliers
    if spec.is_multiplied:
        by_part = multipliers if isinstance(multipliers, list) else [multipliers] * len(widths)
        projected = torch.cat([part * (factor * spec.in_multiplier) for part, factor in zip(
            projected.split(list(widths.values()), 1), by_part, strict=True)], 1)
    n_channels = widths["x"] + widths["B"] + widths["C"]
    z, before_conv, raw_dt = projected.split([widths["z"], n_channels, widths["dt"]], 1)
    conv = CausalConv.apply(before_conv, tensors["conv1d.weight"], tensors.get("conv1d.bias"),
                            call.batch.position_ids, True)
    x, b, c = conv.split([widths["x"], widths["B"], widths["C"]], 1)
    x, b, c = (part.unflatten(1, (heads, -1)) for part, heads in zip(
        (x, b, c), (spec.n_heads, spec.n_groups, spec.n_groups)))
    low, high = spec.dt_limits
    low = max(low, spec.min_dt)
    dt = F.softplus(raw_dt.float() + tensors["dt_bias"].float()).clamp(low, high)
    decay = -tensors["A_log"].float().exp() * dt
    assert call.inputs.recurrence, "the model has a mixer with a state"
    out = call.inputs.recurrence(b, c, x, decay, dt, call.batch)
    out = (out + tensors["D"].float()[:, None] * x).to(x.dtype)
    out, z = (part.reshape(len(x), spec.n_groups, -1) for part in (out, z))
    weight = tensors["norm.weight"].view(spec.n_groups, -1) if spec.has_norm else None
    mixed: Tensor = GatedNorm.apply(out, z, weight, spec.norm_eps, not spec.norm_before_gate)
    return mixed.flatten(1) * spec.out_multiplier


def delta_parts(projected: Tensor, spec: GatedDeltaNetSpec) -> dict[str, Tensor]:
    """Split the outputs of the linears into {q, k, v, z, b, a: [n, width]}."""
    groups = spec.n_key_heads if spec.by_key_head else 1
    parts = {}
    first = 0
    for _, names in spec.in_projs:
        widths = [spec.widths[name] for name in names]
        columns = projected[:, first : first + sum(widths)].unflatten(1, (groups, -1))
        for name, part in zip(names, columns.split([width // groups for width in widths], 2)):
            parts[name] = part.flatten(1)
        first += sum(widths)
    return parts


# {kind of mixer: function (call, projected [n, widths], spec) -> inputs of the output projection
# [n, width], recorded by autograd}
OTHER_MIXERS: dict[type, Callable[[LayerCall, Tensor, Any], Tensor]] = {
    ShortConvSpec: short_conv, GatedDeltaNetSpec: gated_delta_net, Mamba2Spec: mamba2}
