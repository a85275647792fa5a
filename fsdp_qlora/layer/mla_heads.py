"""Queries, keys and values of latent attention, made from the outputs of its linears.

As in DeepSeek's code, `pe` names the dimensions of a query or key that are rotated, `nope` the
others. For cos, sin and temperature see rope_tables().
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.heads import rotate
from fsdp_qlora.pretrained.architecture import Architecture


@fused_kernel
def latent_heads(
    query: Tensor, key_value: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Build query and key [n, heads, nope + rope], rotated, and value [n, heads, value_width],
    padded with 0, from the linears' outputs: `query` [n, heads * (nope + rope)], `key_value` [n,
    heads * (nope + value)] and `k_pe` [n, rope], which all heads share."""
    assert arch.mla, "the layer has latent attention"
    query = query_heads(query, cos, sin, temperature, arch)
    key_value = key_value.unflatten(1, (arch.n_heads, -1))
    k_nope, value = key_value.split([arch.mla.nope_dim, arch.mla.value_dim], 2)
    k_pe = rotate(k_pe[:, None].float(), cos, sin, arch).to(query.dtype)
    value = F.pad(value, (0, value_width - arch.mla.value_dim))
    return query, key_heads(k_nope, k_pe[:, None]), value


@fused_kernel
def latent_heads_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of latent_heads()'s first three arguments, from the gradients of its
    results."""
    mla, dtype = arch.mla, grad_query.dtype
    assert mla, "the layer has latent attention"
    grad_query = query_heads_backward(grad_query, cos, sin, temperature, arch)
    grad_k_nope, grad_k_pe = grad_key.split([mla.nope_dim, mla.rope_dim], 2)
    grad_k_pe = rotate(grad_k_pe.float().sum(1, keepdim=True), cos, -sin, arch).to(dtype)
    grad_key_value = torch.cat([grad_k_nope, grad_value[..., : mla.value_dim]], 2).flatten(1)
    return grad_query, grad_key_value, grad_k_pe


def query_heads(
    query: Tensor, cos: Tensor, sin: Tensor, temperature: Tensor | None, arch: Architecture
) -> Tensor:
    """Return queries [n, heads, nope + rope], rotated, from the outputs of their linear."""
    mla, dtype = arch.mla, query.dtype
    assert mla, "the layer has latent attention"
    q_nope, q_pe = query.unflatten(1, (arch.n_heads, -1)).split([mla.nope_dim, mla.rope_dim], 2)
    q_pe = rotate(q_pe.float(), cos, sin, arch).view_as(q_pe).to(dtype)
    query = torch.cat([q_nope, q_pe], 2)
    if temperature is not None:
        query = (query * temperature[:, None, None]).to(dtype)
    return query


def query_heads_backward(
    grad_query: Tensor, cos: Tensor, sin: Tensor, temperature: Tensor | None, arch: Architecture
) -> Tensor:
    """Return the gradient of query_heads()'s first argument, from that of its result."""
    mla, dtype = arch.mla, grad_query.dtype
    assert mla, "the layer has latent attention"
    grad_query = grad_query.float()
    if temperature is not None:
        grad_query = grad_query * temperature[:, None, None]
    grad_q_nope, grad_q_pe = grad_query.split([mla.nope_dim, mla.rope_dim], 2)
    grad_q_pe = rotate(grad_q_pe, cos, -sin, arch).view_as(grad_q_pe)
    return torch.cat([grad_q_nope, grad_q_pe], 2).to(dtype).flatten(1)


def key_heads(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Return keys [n, heads, nope + rope], from their two parts. `k_pe`: rotated; [n, 1, rope] if
    all heads share it."""
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], 2)
