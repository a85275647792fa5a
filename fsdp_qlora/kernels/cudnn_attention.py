"""Attention of long pieces of documents by cuDNN: as context parallelism has them, and of whole
documents whose results a layer saves.

    keys:     before    own            A piece's queries see all keys before it, a rectangle, and of
            +---------+----+           its own keys those up to their own, a causal square. Each is
    queries | # # # # | #  |           one call of a kernel. To join the results, each is weighted
            | # # # # | ## |           by its share of the sum of exp(score).
            +---------+----+
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.architecture import Architecture


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, segments: Segments,
    arch: Architecture, window: int | None, layer_index: int
) -> Tensor:
    """Attention of a few long segments, one after the other, without windows and sinks."""
    return attention_with_lse(query, key, value, segments, arch.attention_scale)[0]


def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None,
    saved_results: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """Return cudnn_attention() [n, heads, head_dim], and the logsumexp of each query's scores.
    `saved_results`: these two results, if they were saved; then a kernel runs in backward alone."""
    out, lse = CudnnAttention.apply(query, key, value, segments, scale, saved_results)
    return out, lse


class CudnnAttention(torch.autograd.Function):
    """Attention of segments that have as many keys as queries, or more."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, segments: Segments,
        scale: float | None, saved_results: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        out, lse = saved_results or attend_to_segments(query, key, value, segments, scale)
        out = out.detach()  # else autograd would change the caller's tensor
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.segments, ctx.scale = segments, scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """A kernel's backward computes the weights of keys from their scores and lse, and from out
        the term that is subtracted from the weights' gradients. Here it gets the lse and the out of
        attention to all keys, so its results are parts of the gradients of that attention."""
        query, key, value, out, lse = ctx.saved_tensors
        grad = grad.contiguous()  # like `out`, see sdpa_attention()

        def gradients(queries: slice, keys: slice, causal: bool) -> list[Tensor]:
            return attend_backward(
                grad[queries], query[queries], key[keys], value[keys], out[queries],
                lse[:, :, queries].contiguous(), causal, ctx.scale)

        calls = [(queries, *one) for queries, each in kernel_calls(ctx.segments) for one in each]
        if len(calls) == 1:  # of a whole document: nothing to add up
            return *gradients(*calls[0]), None, None, None
        grad_query, grad_key, grad_value = (torch.zeros_like(t) for t in (query, key, value))
        for queries, keys, causal in calls:
            of_queries, grad_key[keys], grad_value[keys] = gradients(queries, keys, causal)
            grad_query[queries] += of_queries
        return grad_query, grad_key, grad_value, None, None, None


def attend_to_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention_with_lse()'s results."""
    out = query.new_empty(*query.shape[:2], value.shape[2])
    lse = query.new_empty(1, query.shape[1], len(query), 1, dtype=torch.float32)
    for queries, calls in kernel_calls(segments):
        results = [attend_forward(query[queries], key[keys], value[keys], causal, scale)
                   for keys, causal in calls]
        out[queries], lse[:, :, queries] = join(*results) if len(results) > 1 else results[0]
        del results  # before the next piece
    return out, lse


def kernel_calls(segments: Segments) -> Iterator[tuple[slice, list[tuple[slice, bool]]]]:
    """Yield, for each segment, its queries, and (keys, whether attention to them is causal) of the
    square and, if there are keys before, of the rectangle."""
    q = k = 0
    for n_queries, n_keys in zip(segments.lengths_q, segments.lengths_k, strict=True):
        own, stop = k + n_keys - n_queries, k + n_keys
        calls = [(slice(own, stop), True), (slice(k, own), False)]
        yield slice(q, q + n_queries), calls if own > k else calls[:1]
        q, k = q + n_queries, stop


def join(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention to two sets of keys together, in fp32, and its logsumexp, from those of
    each."""
    (out, lse), (other_out, other_lse) = one, other
    joined_lse = torch.logaddexp(lse, other_lse)
    share, other_share = (by_token((x - joined_lse).exp()) for x in (lse, other_lse))
    return (out * share).addcmul_(other_out, other_share), joined_lse


# ------------------------------------------------------------------------------------------------
# torch's kernels, of tensors [n, heads, width] and logsumexps [1, heads, n, 1] in fp32
# ------------------------------------------------------------------------------------------------


def attend_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return attention, and the logsumexp of each query's scores."""
    q, k, v = by_head(query), by_head(key), by_head(value)
    if query.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, scale=scale)
        return by_token(out), lse
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, scale=scale)
    return by_token(out), lse[..., None]


def attend_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
    causal: bool, scale: float | None
) -> list[Tensor]:
    """Return the gradients of query, key and value."""
    tensors = [by_head(t) for t in (grad, query, key, value, out)]
    if query.is_cuda:
        seed = torch.empty((), dtype=torch.int64, device=query.device)  # of dropout, not read
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, lse, seed, seed, None, None, None, len(query), len(key), 0.0, causal,
            scale=scale)
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, lse[..., 0], 0.0, causal, scale=scale)
    return [by_token(t) for t in grads]


def by_head(tensor: Tensor) -> Tensor:
    """Return a view [1, heads, n, width] of a tensor [n, heads, width]."""
    return tensor[None].transpose(1, 2)


def by_token(tensor: Tensor) -> Tensor:
    """Return a view [n, heads, width] of a tensor [1, heads, n, width]."""
    return tensor.transpose(1, 2)[0]
