"""Heads of softmax attention: their split, norms, rotary embedding and output gates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.norms import norm_of, norm_of_backward
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.pretrained.architecture import Architecture


def rope_tables(
    arch: Architecture, frequencies: list[tuple[Tensor, float]], batch: MicroBatch,
    rope_index: int | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (cos, sin, temperature) for the tokens of a micro-batch.

    cos and sin are fp32 [tokens, rotary_dim / 2] by frequencies[rope_index], see
    rope_frequencies(); None if rope_index is None. temperature is Ministral 3's factor on queries
    [tokens], or None.
    """
    temperature = None
    position_ids = batch.position_ids
    if arch.query_temperature:
        beta, original = arch.query_temperature
        temperature = 1 + beta * torch.log1p((position_ids // original).float())
    if rope_index is None:
        return None, None, temperature
    inverse, factor = frequencies[rope_index]
    if inverse.dim() == 2:  # longrope: depends on the length of the document, as in transformers
        bounds = batch.cu_seqlens
        tokens = torch.arange(len(position_ids), device=inverse.device)
        if batch.context_shard:
            tokens = batch.context_shard.tokens
        is_long = bounds.diff() > arch.ropes[rope_index]["original_max_position_embeddings"]
        inverse = inverse[is_long.long()[torch.bucketize(tokens, bounds[1:], right=True)]]
    angles = position_ids[:, None].float() * (-inverse if arch.rotary_backwards else inverse)
    return angles.cos() * factor, angles.sin() * factor, temperature


def split_heads(arch: Architecture, qkv: Tensor) -> list[Tensor]:
    """Return views of query, key, value [n, heads, head_dim] in qkv [n, all their widths]."""
    widths = [heads * arch.head_dim for heads in (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads)]
    return [part.unflatten(1, (-1, arch.head_dim)) for part in qkv.split(widths, 1)]


def split_projected(arch: Architecture, projected: Tensor) -> list[Tensor | Any]:
    """Return views of query, key, value and gate [n, heads, head_dim] in the outputs of their
    linears [n, all their widths]. The gate is [n, heads, 1] if there is one per head, and None
    without gates; with keys_are_values the value is the key."""
    if arch.keys_are_values:
        heads = projected.unflatten(1, (-1, arch.head_dim))
        query, key = heads.split([arch.n_heads, arch.n_kv_heads], 1)
        return [query, key, key, None]
    if not arch.attention_gate:
        return [*split_heads(arch, projected), None]
    width, kv_width = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    if arch.attention_gate.linear:
        n = width + 2 * kv_width
        gates = projected[:, n:].unflatten(1, (arch.n_heads, -1))
        return [*split_heads(arch, projected[:, :n]), gates]
    query, gates = projected[:, : 2 * width].unflatten(1, (arch.n_heads, 2, -1)).unbind(2)
    keys = projected[:, 2 * width :].unflatten(1, (2, arch.n_kv_heads, -1))
    return [query, *keys.unbind(1), gates]


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, arch: Architecture) -> Tensor:
    """Rotary embedding of x [n, heads, head_dim], returned as [n, heads * head_dim]; cos and sin
    are fp32 [n, rotary_dim / 2] or None. With -sin it computes its own backward."""
    if cos is None or sin is None:
        return x.flatten(1)
    # When compiled, a cat() of rotated parts goes through memory, and an index by two remainders is
    # read value by value; so use flip(), and one flatten() at the end.
    sign = torch.arange(-1, 2, 2, device=x.device)
    half = cos.shape[1]
    if arch.rotary_interleaved:
        pieces = x.unflatten(-1, (-1, 2))
        pairs, axis = pieces[:, :, :half], 3
        cos, sin = cos[:, None, :, None], sin[:, None, :, None]
    else:
        width, sign = math.gcd(half, arch.head_dim), sign[:, None, None]
        pieces = x.unflatten(-1, (-1, width))
        pairs, axis = pieces[:, :, : 2 * half // width].unflatten(2, (2, -1)), 2
        cos, sin = (t.unflatten(1, (-1, width))[:, None, None] for t in (cos, sin))
    rotated = pairs * cos + pairs.flip(axis) * (sin * sign)
    if not arch.rotary_interleaved:
        rotated = rotated.flatten(2, 3)
    n, n_rotated = pieces.shape[2], rotated.shape[2]
    if n_rotated < n:
        is_rotated = torch.arange(n, device=x.device)[:, None] < n_rotated
        rotated = torch.where(is_rotated, F.pad(rotated, (0, 0, 0, n - n_rotated)), pieces)
    return rotated.flatten(1)


def normed_heads(
    x: Tensor, weight: Tensor | None, arch: Architecture, grad: Tensor | None = None
) -> Tensor:
    """Return the norm of x [n, heads, head_dim], by head or over all heads; x itself if the family
    has none. With `grad`, the gradient of that norm, return the gradient of x instead."""
    if not arch.qk_norm:
        return x
    shape = x.shape
    if arch.qk_norm == "full":
        x = x.flatten(1)
        grad = None if grad is None else grad.flatten(1)
    if grad is None:
        return norm_of(x, weight, arch.norm_kind, arch.norm_eps).view(shape)
    return norm_of_backward(grad, x, weight, arch.norm_kind, arch.norm_eps).view(shape)


def clamped(projected: Tensor, limit: float | None) -> Tensor:
    """Return `projected` within [-limit, limit]; itself without a limit."""
    return projected.clamp(-limit, limit) if limit else projected


@fused_kernel
def qk_norm_rope_forward(
    projected: Tensor, cos: Tensor | None, sin: Tensor | None, temperature: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, arch: Architecture
) -> Tensor:
    """Return a copy of query, key and value of split_projected(), [n, all their widths]; query and
    key are rotated, and query and key, or all three, are normed if the family does so."""
    query, key, value, _ = split_projected(arch, clamped(projected, arch.qkv_limit))
    out = []
    for x, weight in (query, q_weight), (key, k_weight):
        if not arch.qk_norm_after_rotary:
            x = normed_heads(x, weight, arch)
        x = rotate(x.float(), cos, sin, arch).to(projected.dtype)
        if arch.qk_norm_after_rotary:
            x = normed_heads(x.unflatten(1, (-1, arch.head_dim)), weight, arch).flatten(1)
        out.append(x)
    if temperature is not None:
        out[0] = (out[0] * temperature[:, None]).to(projected.dtype)
    if arch.value_norm:
        value = norm_of(value, None, arch.norm_kind, arch.norm_eps)
    return torch.cat([*out, value.flatten(1)], 1)


@fused_kernel
def qk_norm_rope_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, grad_gates: Tensor | None,
    projected: Tensor | None, cos: Tensor | None, sin: Tensor | None, temperature: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, arch: Architecture
) -> Tensor:
    """Return the gradient of qk_norm_rope_forward()'s `projected` from the gradients of query, key,
    value and gates [n, heads, head_dim]; grad_gates is None without gates. `projected` is needed
    only if heads are normed or clamped, else None."""
    before: Sequence[Tensor | None] = (None, None)  # inputs of the norms of query and key, if any
    dtype = grad_value.dtype
    if arch.qk_norm or arch.value_norm:
        assert projected is not None, "these norms need it"
        *heads_before, value_before, _ = split_projected(arch, clamped(projected, arch.qkv_limit))
        if arch.qk_norm:
            before = heads_before
        if arch.value_norm:
            grad_value = norm_of_backward(
                grad_value, value_before, None, arch.norm_kind, arch.norm_eps)
    grads = [grad_query.float(), grad_key.float()]
    out = []
    if temperature is not None:
        grads[0] = grads[0] * temperature[:, None, None]
    back = None if sin is None else -sin
    as_heads = 1, (-1, arch.head_dim)
    for grad, x, weight in zip(grads, before, (q_weight, k_weight)):
        if x is not None and arch.qk_norm_after_rotary:
            rotated = rotate(x.float(), cos, sin, arch).unflatten(*as_heads).to(dtype)
            grad = normed_heads(rotated, weight, arch, grad)
        grad = rotate(grad, cos, back, arch)
        if x is not None and not arch.qk_norm_after_rotary:
            grad = normed_heads(x, weight, arch, grad.unflatten(*as_heads)).flatten(1)
        out.append(grad)
    if arch.keys_are_values:
        out[1] = out[1] + grad_value.flatten(1)
    else:
        out.append(grad_value.flatten(1))
    out = [x.to(dtype) for x in out]
    if grad_gates is not None and arch.attention_gate and arch.attention_gate.linear:
        out.append(grad_gates.flatten(1))
    elif grad_gates is not None:  # each head's gates follow its query
        out[0] = torch.stack([out[0].view_as(grad_gates), grad_gates], 2).flatten(1)
    grad_projected = torch.cat(out, 1)
    if arch.qkv_limit:
        assert projected is not None, "clamping needs it"
        grad_projected = grad_projected.masked_fill(projected.abs() > arch.qkv_limit, 0)
    return grad_projected


def gate_factor(gates: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return activation(gates) and its slope, fp32."""
    gates = gates.float()
    sigmoid = gates.sigmoid()
    if activation == "softplus":
        return F.softplus(gates), sigmoid
    return sigmoid, sigmoid * (1 - sigmoid)


@fused_kernel
def gate_heads(attended: Tensor, gates: Tensor, activation: str) -> Tensor:
    """Return attended [n, heads, head_dim] times activation(gates), as [n, heads * head_dim]; gates
    are [n, heads, head_dim] or [n, heads, 1]."""
    factor, _ = gate_factor(gates, activation)
    return (attended.float() * factor).to(attended.dtype).flatten(1)


@fused_kernel
def gate_heads_backward(
    grad: Tensor, attended: Tensor, gates: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `attended` and `gates`, from the gradient of gate_heads()'s result,
    `grad` [n, heads, head_dim]."""
    factor, slope = gate_factor(gates, activation)
    grad32 = grad.float()
    grad_gates = grad32 * attended.float()
    if gates.shape[2] == 1:
        grad_gates = grad_gates.sum(2, keepdim=True)
    return (grad32 * factor).to(grad.dtype), (grad_gates * slope).to(grad.dtype)
