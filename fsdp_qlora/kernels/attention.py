"""Attention kernels, and the trial that tells whether one can be used.

Each computes causal attention inside each document of a micro-batch. choose_attention() of the
script chooses among them.
"""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.kernels.elementwise import N_SITES, WEIGHTS_SITE, drop_eager
from fsdp_qlora.kernels.flex import BLOCK_TOKENS, flex_document_attention
from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.kernels.sinks import flash_sink_attention, torch_sink_attention
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.quant.nf4 import why_no_triton


# Each is a function (query, key, value, sinks, micro-batch, arch, window, layer's index) of [n,
# heads, head_dim], with fewer heads for key and value: causal attention inside the documents of a
# micro-batch. It returns [n, heads, head_dim]. `sinks` are [heads] or None; a kernel that knows
# nothing of them is not chosen, see kernel_matches(). `window` is how many keys a query sees, None:
# all. Layers differ in their attention type, and with that perhaps in their heads; "within": a
# layer with a window that is longer than all documents of the micro-batch.
ATTENTION_TYPES = "full", "window", "within"


class Kernels(NamedTuple):
    """{one of ATTENTION_TYPES: the attention to use; "recurrence": of a mixer with a state}, by the
    lengths of a micro-batch's documents."""

    fixed_len: dict[str, Callable]  # all of one length
    varlen: dict[str, Callable]  # any lengths


def batched_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, batch: MicroBatch,
    arch: Architecture, window: int | None, index: int
) -> Tensor:
    """Documents of one length by torch's SDPA, which on Hopper calls cuDNN's kernel."""
    rows = [t.unflatten(0, (len(batch.lengths), -1)).transpose(1, 2) for t in (query, key, value)]
    out = F.scaled_dot_product_attention(
        *rows, is_causal=True, scale=arch.attention_scale, enable_gqa=True)
    out = out.transpose(1, 2).flatten(0, 1)
    # torch caches cuDNN's plans by the shapes and strides of the inputs, not of this gradient.
    # Without contiguous(), it is read with the strides of the first gradient of that shape
    out.register_hook(Tensor.contiguous)
    return out


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, batch: MicroBatch,
    arch: Architecture, window: int | None, index: int
) -> Tensor:
    """Documents of any lengths by Flash Attention 2."""
    if sinks is not None:
        return flash_sink_attention(query, key, value, sinks, batch, arch, window)
    from flash_attn import flash_attn_varlen_func

    bounds, longest = (batch.cu_seqlens, batch.cu_seqlens), (batch.longest, batch.longest)
    return flash_attn_varlen_func(
        query, key, value, *bounds, *longest, softmax_scale=arch.attention_scale, causal=True,
        window_size=(window - 1 if window else -1, 0), softcap=arch.attention_softcap or 0.0)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, batch: MicroBatch,
    arch: Architecture, window: int | None, index: int
) -> Tensor:
    """Documents of any lengths by torch's own kernel."""
    if sinks is not None:
        return torch_sink_attention(query, key, value, sinks, batch, arch, window)
    bounds, longest = (batch.cu_seqlens, batch.cu_seqlens), (batch.longest, batch.longest)
    out: Tensor = varlen_attn(
        query, key, value, *bounds, *longest, scale=arch.attention_scale,
        window_size=(window - 1 if window else -1, 0), **GROUPED)
    return out


# torch 2.11 accepts fewer heads of keys as they are; later versions want this argument
GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {})


SCORES_BYTES = 2**27  # of the scores, in fp32, that plain torch has at once


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, batch: MicroBatch,
    arch: Architecture, window: int | None, index: int
) -> Tensor:
    """Each document by itself in plain torch: on a CPU, in fp32, with dropout on weights, and where
    no other kernel works. Only the inputs are kept for backward."""
    outs, start, site = [], 0, index * N_SITES + WEIGHTS_SITE
    for q, k, v in zip(*(t.split(batch.lengths) for t in (query, key, value))):
        n, drop_keys = len(q), batch.dropout_keys if arch.attention_dropout else None
        drop_keys = None if drop_keys is None else drop_keys[start : start + n]
        start += n
        if (window is None or n <= window) and not (
                arch.attention_softcap or sinks is not None or drop_keys is not None):
            outs.append(recomputed(sdpa, q, k, v, arch.attention_scale))
            continue
        rows = max(1, SCORES_BYTES // (4 * arch.n_heads * n))
        for first in range(0, n, rows):  # a few queries at a time, and what they may see
            # dropout counts a document's keys from its first one
            low = max(0, first - window + 1) if window and drop_keys is None else 0
            some, seen = slice(first, first + rows), slice(low, first + rows)
            outs.append(recomputed(
                explicit_attention, q[some], k[seen], v[seen], sinks, arch, window,
                None if drop_keys is None else drop_keys[some], site))
    return torch.cat(outs)


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """function(*arguments); its backward computes all of it again."""
    out: Tensor = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return out


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """torch's SDPA of one document [n, heads, head_dim]; causal without a mask [queries, keys]."""
    query, key, value = by_head(q, k, v)
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)


def by_head(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Query, key and value as [1, heads, n, head_dim], with as many heads each: on a GPU fewer
    would make SDPA keep all scores in fp32."""
    tensors = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (q, k, v))
    return [t.transpose(0, 1)[None] for t in tensors]


def explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arch: Architecture, window: int | None,
    drop_keys: Tensor | None, site: int
) -> Tensor:
    """The last rows of a document's attention, with a mask: [rows, heads, head_dim]. Where SDPA
    cannot compute it, all weights are in memory: for Gemma 2's capped scores, for dropout on
    weights, for sinks. `drop_keys` [rows] are drop()'s keys, None: no dropout."""
    before = len(k) - len(q)  # keys that the first query sees, besides its own
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
    mask = mask.triu(before - window + 1) if window else mask
    if not arch.attention_softcap and sinks is None and drop_keys is None:
        return sdpa(q, k, v, arch.attention_scale, mask)
    query, key, value = by_head(q, k, v)
    scores = (query @ key.transpose(-1, -2)).float() * arch.attention_scale
    if arch.attention_softcap:
        scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:  # one more key, whose value is 0
        column = sinks.float().view(-1, 1, 1).expand(*scores.shape[1:3], 1)
        scores = torch.cat([scores, column[None]], -1)
    weights = scores.softmax(-1).to(q.dtype)[..., : len(k)]
    if drop_keys is not None:  # in an order that further keys do not change
        of_queries = weights[0].permute(1, 2, 0)
        dropped = drop_eager(of_queries.flatten(1), drop_keys, site, arch.attention_dropout)
        weights = dropped.view(of_queries.shape).permute(2, 0, 1)[None]
    return (weights @ value)[0].transpose(0, 1)


def explicit_bytes(arch: Architecture, window: int | None, n_tokens: int) -> int:
    """The most bytes of scores and the like that document_attention() has at once, forward or
    backward, in micro-batches of n_tokens."""
    scores = min(SCORES_BYTES, 4 * arch.n_heads * n_tokens**2)
    if arch.attention_dropout:
        return 11 * scores  # counted; the hash of dropout is in int64
    return 5 * scores if arch.attention_softcap or arch.sinks else scores if window else 0


def architectures_by_attention_type(arch: Architecture) -> dict[str, Architecture]:
    """{one of ATTENTION_TYPES that the model has: the Architecture of the layers that need it}."""
    found = {}
    for kind in filter(arch.has_attention, arch.layer_kinds):
        for attention_type in ("window", "within") if kind.window else ("full",):
            found.setdefault(attention_type, arch.of_kind(kind))
    return found


def kernel_matches(
    kernel: Callable[..., Tensor], arch: Architecture, attention_type: str, device: torch.device
) -> bool:
    """Return True if the kernel gives what document_attention() gives, forward and backward, for
    two documents. `arch` is that of layers of this attention type, see
    architectures_by_attention_type()."""
    if arch.attention_softcap and kernel not in (flash_attention, flex_document_attention):
        return False
    if kernel is batched_attention and arch.head_dim > 256:
        return False  # SDPA would have all scores in memory
    if kernel is flex_document_attention and why_no_triton():
        return False
    length = 3 * BLOCK_TOKENS // 2  # for one block alone flex_attention's kernel is another
    generator, n_tokens = torch.Generator(device).manual_seed(0), 2 * length
    heads = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads
    qkv, grad = (torch.randn(n_tokens, n, arch.head_dim, dtype=torch.bfloat16, device=device,
                             generator=generator) for n in (sum(heads), arch.n_heads))
    q, k, v = qkv.split(heads, 1)  # with the strides that a layer's have
    q *= arch.attention_softcap or 1  # else no score comes near the cap
    sinks = 2 * torch.randn(arch.n_heads, device=device, generator=generator)
    sinks = sinks if arch.sinks else None
    bounds = torch.tensor([0, length, n_tokens], dtype=torch.int32, device=device)
    trial = types.SimpleNamespace(
        lengths=(length, length), longest=length, cu_seqlens=bounds, dropout_keys=None, masks={},
        position_ids=torch.arange(n_tokens, device=device) % length)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = function(*inputs, sinks, trial, arch, 8 if attention_type == "window" else None, 0)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    try:
        pairs = list(zip(both(kernel), both(document_attention)))
    except (ImportError, RuntimeError, TypeError, ValueError):
        return False
    return all(bool((got - want).norm() < 0.05 * want.norm()) for got, want in pairs)
