"""Attention kernels, what each can do, and the trial that tells whether one can be used.

Each computes causal attention inside each document of a micro-batch. choose_attention() of
train_fsdp_qlora.py chooses among them.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.kernels.cudnn_attention import attention_with_lse, cudnn_attention
from fsdp_qlora.kernels.dropout import ATTENTION_WEIGHTS_SITE, N_SITES, drop_eager
from fsdp_qlora.kernels.flex import BLOCK_TOKENS, flex_document_attention
from fsdp_qlora.kernels.sinks import flash_sink_attention, torch_sink_attention
from fsdp_qlora.log import log
from fsdp_qlora.micro_batch.segments import Segments, document_segments
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.quant.triton_trial import why_no_triton


# The attention types of layers, and of the kernels for them. "window_unreached": a layer whose
# window is longer than all documents of the micro-batch. Layers of two types may also differ in
# their heads.
ATTENTION_TYPES = "full", "window", "window_unreached"
# largest accepted error of a kernel, relative to plain torch; rounding in bf16 makes 0.0033 at most
# (benchmarks/LOG.md)
MAX_ERROR = 0.05
SCORES_BYTES = 2**27  # bytes of scores, in fp32, that plain torch has in memory at once
# torch 2.11 accepts fewer heads of keys without it; later versions need this argument
GQA_KWARGS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {})


class Kernels(NamedTuple):
    """The kernels of token mixers. Of attention they are {one of ATTENTION_TYPES: kernel}, for
    micro-batches whose documents have one length or any lengths."""

    # documents of one length; with context parallelism long pieces of any lengths, see
    # has_long_pieces()
    fixed_len: dict[str, AttentionKernel]
    varlen: dict[str, AttentionKernel]  # any lengths
    recurrence: Callable | None = None  # of a mixer with a state; None: there is none

    @property
    def of_attention(self) -> set[AttentionKernel]:
        """All attention kernels."""
        return {*self.fixed_len.values(), *self.varlen.values()}


@dataclasses.dataclass(frozen=True)
class AttentionKernel:
    """An attention kernel and what it can do."""

    name: str  # in the log
    function: AttentionFunction
    has_softcap: bool = False
    has_windows: bool = True
    max_head_dim: float = math.inf
    gives_lse: bool = False  # True: layers can save its results, see attention_with_lse()
    needs_triton: bool = False
    is_eager: bool = False  # plain torch: values may be narrower than queries; no CUDA graphs


class AttentionFunction(Protocol):
    """Causal attention within the segments of a micro-batch."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
        arch: Architecture, window: int | None, layer_index: int
    ) -> Tensor:
        """Return [n, heads, head_dim], from query [n, heads, head_dim], and key and value [n_keys,
        heads, head_dim], which may have fewer heads.

        `sinks` [heads] or None; a kernel that does not support them is not chosen, see
        kernel_matches(). `segments`: which keys each query sees. `window`: number of keys that a
        query sees; None: all. `layer_index`: for dropout.
        """


def sdpa_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of documents of one length by torch's SDPA, which on Hopper calls cuDNN's kernel.
    """
    n_documents = len(segments.lengths_q)
    rows = [t.unflatten(0, (n_documents, -1)).transpose(1, 2) for t in (query, key, value)]
    out = F.scaled_dot_product_attention(
        *rows, is_causal=True, scale=arch.attention_scale, enable_gqa=True)
    out = out.transpose(1, 2).flatten(0, 1)
    # torch caches cuDNN's plans by the shapes and strides of the inputs, not of this gradient.
    # Without contiguous(), it is read with the strides of the first gradient of that shape
    out.register_hook(Tensor.contiguous)
    return out


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of documents of any lengths by Flash Attention 2."""
    if sinks is not None:
        return flash_sink_attention(query, key, value, sinks, segments, arch, window)
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func(
        query, key, value, *segments.varlen_args, softmax_scale=arch.attention_scale, causal=True,
        window_size=(window - 1 if window else -1, 0), softcap=arch.attention_softcap or 0.0)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of documents of any lengths by torch's own kernel."""
    if sinks is not None:
        return torch_sink_attention(query, key, value, sinks, segments, arch, window)
    out: Tensor = varlen_attn(
        query, key, value, *segments.varlen_args, scale=arch.attention_scale,
        window_size=(window - 1 if window else -1, 0), **GQA_KWARGS)
    return out


def eager_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of each document by itself in plain torch: on a CPU, in fp32, with dropout on
    weights, and where no other kernel works. Only the inputs are saved for backward."""
    outs = []
    start = 0
    site = layer_index * N_SITES + ATTENTION_WEIGHTS_SITE
    of_segments = (query.split(segments.lengths_q), key.split(segments.lengths_k),
                   value.split(segments.lengths_k))
    for q, k, v in zip(*of_segments):
        n = len(q)
        seeds = segments.dropout_seeds if arch.attention_dropout else None
        before = len(k) - n  # keys that the first query sees, besides its own
        seeds = None if seeds is None else seeds[start : start + n]
        start += n
        if not before and (window is None or n <= window) and not (
                arch.attention_softcap or sinks is not None or seeds is not None):
            outs.append(recomputed(sdpa, q, k, v, arch.attention_scale))
            continue
        rows = max(1, SCORES_BYTES // (4 * arch.n_heads * len(k)))
        for first in range(0, n, rows):  # a few queries at a time, and the keys they may see
            # dropout draws by a key's place in its document
            low = max(0, before + first - window + 1) if window and seeds is None else 0
            some, seen = slice(first, first + rows), slice(low, before + first + rows)
            outs.append(recomputed(
                masked_eager_attention, q[some], k[seen], v[seen], sinks, arch, window,
                None if seeds is None else seeds[some], site))
    return torch.cat(outs)


def recomputed(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Return function(*arguments); its backward recomputes all of it."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: Tensor | None = None
) -> Tensor:
    """torch's SDPA of one document [n, heads, head_dim]; causal unless there is a mask [queries,
    keys]."""
    query, key, value = with_equal_heads(q, k, v)
    out = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scale)
    return out[0].transpose(0, 1)


def with_equal_heads(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Return query, key and value as [1, heads, n, head_dim], with equally many heads: with fewer,
    SDPA on a GPU would save all scores in fp32."""
    tensors = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (q, k, v))
    return [t.transpose(0, 1)[None] for t in tensors]


def masked_eager_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, arch: Architecture, window: int | None,
    dropout_seeds: Tensor | None, site: int
) -> Tensor:
    """Attention of some of a document's queries, with a mask: [rows, heads, head_dim]. `k` and `v`
    end with the last query's own. Where SDPA cannot compute it, all weights are in memory: for
    Gemma 2's capped scores, for dropout on weights, for sinks. `dropout_seeds` [rows], see drop();
    None: no dropout."""
    before = len(k) - len(q)  # number of keys before the first query's own
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(before)
    mask = mask.triu(before - window + 1) if window else mask
    if not arch.attention_softcap and sinks is None and dropout_seeds is None:
        return sdpa(q, k, v, arch.attention_scale, mask)
    query, key, value = with_equal_heads(q, k, v)
    scores = (query @ key.transpose(-1, -2)).float() * arch.attention_scale
    if arch.attention_softcap:
        scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:  # one more key, whose value is 0
        column = sinks.float().view(-1, 1, 1).expand(*scores.shape[1:3], 1)
        scores = torch.cat([scores, column[None]], -1)
    weights = scores.softmax(-1).to(q.dtype)[..., : len(k)]
    if dropout_seeds is not None:  # in an order that does not depend on the number of keys
        by_query = weights[0].permute(1, 2, 0)
        dropped = drop_eager(by_query.flatten(1), dropout_seeds, site, arch.attention_dropout)
        weights = dropped.view(by_query.shape).permute(2, 0, 1)[None]
    return (weights @ value)[0].transpose(0, 1)


# with wider heads, SDPA would have all scores in memory. From Hopper on, SDPA_KERNEL is cuDNN's, as
# CUDNN_KERNEL and attention_with_lse() are
CUDNN_LIMITS: Any = {"has_windows": False, "max_head_dim": 256, "gives_lse": True}

SDPA_KERNEL = AttentionKernel("SDPA (equal lengths)", sdpa_attention, **CUDNN_LIMITS)
CUDNN_KERNEL = AttentionKernel("cuDNN (long pieces)", cudnn_attention, **CUDNN_LIMITS)
FLASH_KERNEL = AttentionKernel("Flash Attention 2", flash_attention, has_softcap=True)
VARLEN_KERNEL = AttentionKernel("varlen_attn", varlen_attention)
FLEX_KERNEL = AttentionKernel(
    "flex_attention", flex_document_attention, has_softcap=True, needs_triton=True)
EAGER_KERNEL = AttentionKernel(
    "one document at a time", eager_attention, has_softcap=True, is_eager=True)


def eager_attention_bytes(arch: Architecture, window: int | None, n_tokens: int) -> int:
    """Return the peak bytes of scores and other intermediate values in eager_attention(),
    forward or backward, with micro-batches of n_tokens."""
    scores = min(SCORES_BYTES, 4 * arch.n_heads * n_tokens**2)
    if arch.attention_dropout:
        return 11 * scores  # counted; the hash of dropout is in int64
    return 5 * scores if arch.attention_softcap or arch.sinks else scores if window else 0


def architectures_by_attention_type(arch: Architecture) -> dict[str, Architecture]:
    """Return {one of the model's ATTENTION_TYPES: the Architecture of the layers with this type}.
    """
    architectures = {}
    for kind in filter(arch.has_attention, arch.layer_kinds):
        for attention_type in ("window", "window_unreached") if kind.window else ("full",):
            architectures.setdefault(attention_type, arch.of_kind(kind))
    return architectures


def can_reuse_attention_results(kernels: Kernels, arch: Architecture, device: torch.device) -> bool:
    """Return True if layers can save the results of attention, for backward to reuse: if
    all attention is full and by a kernel that gives its logsumexps, and if a trial gives what
    eager_attention() gives."""
    if [*architectures_by_attention_type(arch)] != ["full"] \
            or not kernels.fixed_len["full"].gives_lse \
            or device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return False

    def with_reused_lse(
        query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
        arch: Architecture, window: int | None, layer_index: int
    ) -> Tensor:
        inputs = query, key, value, segments, arch.attention_scale
        with torch.no_grad():
            results = attention_with_lse(*inputs)
        return attention_with_lse(*inputs, results)[0]

    kernel = dataclasses.replace(kernels.fixed_len["full"], function=with_reused_lse)
    if kernel_matches(kernel, arch, "full", device):
        return True
    log("warning: slow path, recomputed layers run attention's forward again: a trial to reuse"
        " its saved results failed on this GPU")
    return False


def kernel_matches(
    kernel: AttentionKernel, arch: Architecture, attention_type: str, device: torch.device,
    whole_documents: bool = True
) -> bool:
    """Return True if the kernel can do what these layers need, and its results match
    eager_attention()'s, forward and backward, for two documents or, without whole_documents, for
    the ends of two. `arch` is that of layers with this attention type, see
    architectures_by_attention_type()."""
    if arch.attention_softcap and not kernel.has_softcap \
            or attention_type == "window" and not kernel.has_windows \
            or arch.head_dim > kernel.max_head_dim or kernel.needs_triton and why_no_triton():
        return False
    length = 3 * BLOCK_TOKENS // 2  # flex_attention uses another kernel for a single block
    generator = torch.Generator(device).manual_seed(0)
    n_tokens = 2 * length
    heads = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads
    qkv, grad = (torch.randn(n_tokens, n, arch.head_dim, dtype=torch.bfloat16, device=device,
                             generator=generator) for n in (sum(heads), arch.n_heads))
    q, k, v = qkv.split(heads, 1)  # with the same strides as in a layer
    q *= arch.attention_softcap or 1  # else no score would come near the cap
    # about as large as the sum over all keys, else a kernel without sinks would match, too
    sinks = math.log(length) + 2 * torch.randn(arch.n_heads, device=device, generator=generator)
    sinks = sinks if arch.sinks else None
    bounds = torch.tensor([0, length, n_tokens], dtype=torch.int32, device=device)
    trial = document_segments(bounds, (length, length), length)
    if not whole_documents:
        n = 2 * length // 3
        q, grad = (t.unflatten(0, (2, length))[:, -n:].flatten(0, 1) for t in (q, grad))
        trial = dataclasses.replace(trial, cu_seqlens_q=bounds * 2 // 3, lengths_q=(n, n),
                                    max_seqlen_q=n)

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = function(*inputs, sinks, trial, arch, 8 if attention_type == "window" else None, 0)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    try:
        pairs = list(zip(both(kernel.function), both(eager_attention)))
    except (AttributeError, ImportError, RuntimeError, TypeError, ValueError):
        return False  # AttributeError: this torch has no such kernel
    return all(bool((got - want).norm() < MAX_ERROR * want.norm()) for got, want in pairs)
