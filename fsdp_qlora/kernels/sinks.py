"""Attention sinks on top of kernels that do not support them, exact forward and backward.

With a sink s, one number for each head, a query's softmax has one more term, exp(s), whose value is
0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.architecture import Architecture


# A kernel returns out and lse, the logarithm of the sum of a query's exp(score). With the sink they
# become lse' = logaddexp(lse, s) and out' = out * exp(lse - lse'). The kernel's backward computes
# the weights from scores and lse, and from out the term that is subtracted from the weights'
# gradients. If it gets lse' and out' instead, it returns the exact gradients of attention with
# sinks. (out * exp(lse - lse') by autograd would be wrong without an error, because these kernels
# ignore the gradient of lse.)


class SinkAttention(torch.autograd.Function):
    """Attention of query [n, heads, head_dim] with frozen `sinks` [heads].

    forward_kernel(query, key, value) returns out, lse [heads, n] and a tuple of other values that
    backward_kernel needs. backward_kernel(grad, query, key, value, out, lse, *rest) returns three
    gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor,
        forward_kernel: Callable[..., tuple[Tensor, Tensor, Sequence[Tensor]]],
        backward_kernel: Callable[..., Sequence[Tensor]]
    ) -> Tensor:
        out, lse, rest = forward_kernel(query, key, value)
        joined = torch.logaddexp(lse, sinks.float()[:, None])
        out.mul_((lse - joined).exp().t()[..., None])  # in fp32, rounded once
        ctx.save_for_backward(query, key, value, out, joined, *rest)
        ctx.backward_kernel = backward_kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.backward_kernel(grad.contiguous(), *ctx.saved_tensors), None, None, None


def torch_sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, segments: Segments,
    arch: Architecture, window: int | None
) -> Tensor:
    """Attention with sinks, by torch's own kernel for documents of any lengths."""
    bounds = *segments.varlen_args, 0.0, window is None
    settings = dict(scale=arch.attention_scale, window_size_left=window - 1 if window else -1,
                    window_size_right=0)

    def forward(
        query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        out, lse, *state, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, *bounds, False, **settings)
        return out, lse, state

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
        *state: Tensor
    ) -> Sequence[Tensor]:
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse, *bounds, *state, **settings)

    return SinkAttention.apply(query, key, value, sinks, forward, backward)


def flash_sink_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, segments: Segments,
    arch: Architecture, window: int | None
) -> Tensor:
    """Attention with sinks, by Flash Attention 2."""
    from flash_attn.flash_attn_interface import (
        _flash_attn_varlen_backward, _flash_attn_varlen_forward)

    bounds = segments.varlen_args
    settings = dict(
        dropout_p=0.0, softmax_scale=arch.attention_scale, causal=True, softcap=0.0,
        window_size_left=window - 1 if window else -1, window_size_right=0, alibi_slopes=None)

    def forward(
        query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor]]:
        out, lse, _, state = _flash_attn_varlen_forward(query, key, value, *bounds, **settings)
        return out, lse, (state,)

    def backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
        state: Tensor
    ) -> Sequence[Tensor]:
        grads = [torch.empty_like(t) for t in (query, key, value)]
        _flash_attn_varlen_backward(grad, query, key, value, out, lse, *grads, *bounds, **settings,
                                    deterministic=False, rng_state=state)
        return grads

    return SinkAttention.apply(query, key, value, sinks, forward, backward)
