"""Softmax attention, forward and backward, and what it costs; then its parts: heads with their
norms and rotary embedding, and the kernels.

The products before and after it are in mixing.
Which kernel a run uses is chosen in the script; which layers have a window or no rotary embedding
is in families.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from fsdp_qlora.model.elementwise import (
    N_SITES, WEIGHTS_SITE, drop_eager, elementwise, norm_grad_of, norm_of)
from fsdp_qlora.model.flex import BLOCK_TOKENS, flex_document_attention
from fsdp_qlora.model.sinks import flash_sink_attention, torch_sink_attention
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.quant.nf4 import why_no_triton

if TYPE_CHECKING:
    from fsdp_qlora.data.packing import MicroBatch
    from fsdp_qlora.model.layer import LayerWork
    from fsdp_qlora.planner.plan import Plan


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMixer:
    """One layer's softmax attention, as a mixing of MixerSublayer."""

    arch: Architecture
    window: int | None  # a query sees this many keys; None: all
    rope: int | None  # index of arch.ropes; None: no rotary

    def forward(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        rotated = rotate_forward(
            kept.projected, *self._rotate_arguments(work), evaluation=work.evaluation)
        if not self.keeps_projected:
            kept.projected = None
        heads = split_heads(self.arch, rotated)
        del rotated
        if work.borrowed:
            heads = [heads[0], *work.borrowed]
        elif work.layer.lends and not work.is_backward:
            work.lent = tuple(part.clone() for part in heads[1:])  # a view would keep the queries
        with torch.enable_grad():  # autograd records only this, to call the kernel's backward
            kept.heads = [part.detach().requires_grad_() for part in heads]
            kept.attended = attend(work, self.arch, self.window, *kept.heads)
        return self.mixed(work, kept)

    @property
    def keeps_projected(self) -> bool:
        """Whether backward reads kept.projected: that of norms and of the gate does."""
        return bool(self.arch.qk_norm or self.arch.value_norm or self.arch.attention_gate)

    @property
    def _output_factor(self) -> float:
        """What attention gives is multiplied by this: the multiplier of what q, k and v read, which
        values still need (attention_scale has that of queries and keys), and that of the output."""
        factor: float = self.arch.attention_in_multiplier * self.arch.attention_out_multiplier
        return factor

    def mixed(self, work: LayerWork, kept: types.SimpleNamespace) -> Tensor:
        attended: Tensor = kept.attended.detach()
        if self._output_factor != 1:
            attended = attended * self._output_factor
        gate = self.arch.attention_gate
        if not gate:
            return attended.flatten(1)
        gates = split_projected(self.arch, kept.projected)[3]
        return gate_heads(attended, gates, gate.activation, evaluation=work.evaluation)

    def backward(self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor) -> Tensor:
        grad, grad_gate = grad.reshape(kept.attended.shape), None
        assert self._output_factor == 1 or not self.arch.attention_gate, "no family has both"
        if self._output_factor != 1:
            grad = grad * self._output_factor
        if gate := self.arch.attention_gate:
            gates = split_projected(self.arch, kept.projected)[3]
            grad, grad_gate = gate_heads_backward(grad, kept.attended.detach(), gates,
                                                  gate.activation)
        grads = torch.autograd.grad(kept.attended, kept.heads, grad)
        kept.attended = kept.heads = None
        if work.borrowed:
            work.grad_borrowed = grads[1:]
            # this layer has projected no keys and values: the gradient has 0 heads of them
            grads = grads[0], *(x[:, :0] for x in grads[1:])
        elif work.layer.lends:
            grads = grads[0], *(own + lent for own, lent in zip(grads[1:], work.grad_lent))
        return rotate_backward(*grads, grad_gate, kept.projected, *self._rotate_arguments(work))

    def _rotate_arguments(self, work: LayerWork) -> tuple[Tensor | Architecture | None, ...]:
        """(cos, sin, temperature, q_norm's weight, k_norm's weight, arch): the last arguments of
        rotate_forward() and rotate_backward()."""
        norms = work.vector(self.arch.q_norm), work.vector(self.arch.k_norm)
        return *work.batch.ropes[self.rope], *norms, self.arch

    fused_linears = ()
    elementwise_values = 0  # MixerSublayer counts what norms take

    @property
    def query_width(self) -> int:
        return self.arch.n_heads * self.arch.head_dim

    @property
    def _qkv_width(self) -> int:
        return self.query_width + 2 * self.arch.n_kv_heads * self.arch.head_dim

    @property
    def projected_width(self) -> int:
        return sum(linear.out_features for linear in self.arch.attention_linears()[0])

    @property
    def kept_values(self) -> int:
        arch = self.arch
        values = self._qkv_width + self.query_width + 2 * arch.n_heads  # the kernel's sums, fp32
        return values + self.projected_width * self.keeps_projected

    @property
    def recomputed_values(self) -> int:
        gated = self.query_width * (self.arch.attention_gate is not None)
        return max(self.projected_width, self._qkv_width) + self.query_width + gated

    def live_bytes(self, plan: Plan) -> int:
        item, others = getattr(torch, plan.compute_dtype).itemsize, 0
        # the gradients of what was projected, before and after rotation, and of what attention
        # gives; some kernels add up the query's in fp32
        values = self.projected_width + max(self.projected_width, self._qkv_width)
        values += 3 * self.query_width
        values += 2 * self.query_width * (self.arch.attention_gate is not None)
        if plan.plain_attention:  # with keys and values for each query's head, and their gradients
            values += 4 * self.query_width
            others = explicit_bytes(self.arch, self.window, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * item + others


def attend(
    work: LayerWork, arch: Architecture, window: int | None, query: Tensor, key: Tensor,
    value: Tensor
) -> Tensor:
    """Causal attention inside each document of the micro-batch, [n, heads, width of a value].
    `window`: a query sees this many keys; None: all."""
    batch, attention_type = work.batch, "window" if window else "full"
    if window is not None and window >= batch.longest:
        window, attention_type = None, "within"
    kernel = batch.kernels[attention_type]
    sinks = work.vector("self_attn", "sinks")
    return kernel(query, key, value, sinks, batch, arch, window, work.layer.index)


# ---- heads and rotary embedding ----


def rope_tables(
    arch: Architecture, frequencies: list[tuple[Tensor, float]], batch: MicroBatch,
    index: int | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(cos, sin, temperature) of the tokens of a micro-batch.

    cos and sin are fp32 [tokens, rotary_dim / 2] by frequencies[index], see rope_frequencies();
    None where index is None. temperature is Ministral 3's factor on queries [tokens], or None.
    """
    temperature, position_ids = None, batch.position_ids
    if arch.query_temperature:
        beta, original = arch.query_temperature
        temperature = 1 + beta * torch.log1p((position_ids // original).float())
    if index is None:
        return None, None, temperature
    inverse, factor = frequencies[index]
    if inverse.dim() == 2:  # longrope: by the length of each token's document, as transformers
        bounds, tokens = batch.cu_seqlens, torch.arange(len(position_ids), device=inverse.device)
        is_long = bounds.diff() > arch.ropes[index]["original_max_position_embeddings"]
        inverse = inverse[is_long.long()[torch.bucketize(tokens, bounds[1:], right=True)]]
    angles = position_ids[:, None].float() * inverse
    return angles.cos() * factor, angles.sin() * factor, temperature


def split_heads(arch: Architecture, qkv: Tensor) -> list[Tensor]:
    """Views of query, key, value [n, heads, head_dim] in qkv [n, all their widths]."""
    widths = [heads * arch.head_dim for heads in (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads)]
    return [part.unflatten(1, (-1, arch.head_dim)) for part in qkv.split(widths, 1)]


def split_projected(arch: Architecture, projected: Tensor) -> list[Tensor | Any]:
    """Views of query, key, value and gate [n, heads, head_dim] in what their linears give,
    [n, all their widths]. The gate is [n, heads, 1] where a head has one, None without gates; with
    keys_are_values the value is the key."""
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
    are fp32 [n, rotary_dim / 2] or None. With -sin it is its own backward."""
    if cos is None:
        return x.flatten(1)
    # Compiled, a cat() of rotated parts goes through memory, and an index by two remainders is read
    # value by value: hence flip(), and one flatten() at the end.
    sign, half = torch.arange(-1, 2, 2, device=x.device), cos.shape[1]
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
    """The norm of x [n, heads, head_dim], by head or over all heads; x itself where the
    family has none. With `grad`, the gradient of that norm, it returns that of x instead."""
    if not arch.qk_norm:
        return x
    shape = x.shape
    if arch.qk_norm == "full":
        x, grad = x.flatten(1), None if grad is None else grad.flatten(1)
    if grad is None:
        return norm_of(x, weight, arch.norm, arch.norm_eps).view(shape)
    return norm_grad_of(grad, x, weight, arch.norm, arch.norm_eps).view(shape)


@elementwise
def rotate_forward(
    projected: Tensor, cos: Tensor | None, sin: Tensor | None, temperature: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, arch: Architecture
) -> Tensor:
    """A copy of query, key and value of split_projected(), [n, all their widths], with query and
    key rotated and, where the family does that, with these or all normed."""
    query, key, value, _ = split_projected(arch, projected)
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
        value = norm_of(value, None, arch.norm, arch.norm_eps)
    return torch.cat([*out, value.flatten(1)], 1)


@elementwise
def rotate_backward(
    query: Tensor, key: Tensor, value: Tensor, gates: Tensor | None, projected: Tensor | None,
    cos: Tensor | None, sin: Tensor | None, temperature: Tensor | None, q_weight: Tensor | None,
    k_weight: Tensor | None, arch: Architecture
) -> Tensor:
    """The gradient of rotate_forward's `projected` from those of query, key, value and gates, None
    without gates, [n, heads, head_dim]. `projected` is needed only where these are normed, else
    None."""
    before: Sequence[Tensor | None] = (None, None)  # query and key, where a norm has read them
    dtype = value.dtype
    if arch.qk_norm or arch.value_norm:
        assert projected is not None, "these norms need it"
        *heads_before, value_before, _ = split_projected(arch, projected)
        if arch.qk_norm:
            before = heads_before
        if arch.value_norm:
            value = norm_grad_of(value, value_before, None, arch.norm, arch.norm_eps)
    grads, out = [query.float(), key.float()], []
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
        out[1] = out[1] + value.flatten(1)
    else:
        out.append(value.flatten(1))
    out = [x.to(dtype) for x in out]
    if gates is not None and arch.attention_gate.linear:
        out.append(gates.flatten(1))
    elif gates is not None:  # each head's after its query
        out[0] = torch.stack([out[0].view_as(gates), gates], 2).flatten(1)
    return torch.cat(out, 1)


# ---- gates on what attention gives ----


def gate_factor(gates: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """activation(gates) and its slope, fp32."""
    gates = gates.float()
    sigmoid = gates.sigmoid()
    if activation == "softplus":
        return F.softplus(gates), sigmoid
    return sigmoid, sigmoid * (1 - sigmoid)


@elementwise
def gate_heads(attended: Tensor, gates: Tensor, activation: str) -> Tensor:
    """attended [n, heads, head_dim] times activation(gates), [n, heads * head_dim]; gates are
    [n, heads, head_dim] or [n, heads, 1]."""
    factor, _ = gate_factor(gates, activation)
    return (attended.float() * factor).to(attended.dtype).flatten(1)


@elementwise
def gate_heads_backward(
    grad: Tensor, attended: Tensor, gates: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradients of `attended` and `gates` from that of gate_heads()'s result, `grad`
    [n, heads, head_dim]."""
    factor, slope = gate_factor(gates, activation)
    grad32 = grad.float()
    of_gates = grad32 * attended.float()
    if gates.shape[2] == 1:
        of_gates = of_gates.sum(2, keepdim=True)
    return (grad32 * factor).to(grad.dtype), (of_gates * slope).to(grad.dtype)


# ---- kernels ----

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
    """Whether a kernel gives what document_attention() gives, forward and backward, for two
    documents. `arch` is that of layers of this reach, see architectures_by_attention_type()."""
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
