"""Softmax attention as a token mixer: forward, backward, and what it costs."""

from __future__ import annotations

import dataclasses
import types

import torch
from torch import Tensor

from fsdp_qlora.kernels.attention import explicit_bytes
from fsdp_qlora.kernels.heads import (
    gate_heads, gate_heads_backward, rotate_backward, rotate_forward, split_heads, split_projected)
from fsdp_qlora.layer.call import LayerWork
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture


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
