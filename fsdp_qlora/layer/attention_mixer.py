"""Softmax attention as a token mixer: forward, backward, and what it costs."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from fsdp_qlora.kernels.attention import explicit_bytes
from fsdp_qlora.kernels.heads import (
    gate_heads, gate_heads_backward, rotate_backward, rotate_forward, split_heads, split_projected)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.saved import SavedAttention
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMixer:
    """The softmax attention of one layer, a TokenMixer."""

    arch: Architecture
    window: int | None  # number of keys that a query sees; None: all
    rope: int | None  # index of arch.ropes; None: no rotary

    saved_type = SavedAttention
    fused_linears = ()

    def forward(self, call: LayerCall, saved: SavedAttention) -> Tensor:
        rotated = rotate_forward(
            saved.projected, *self._rotate_arguments(call), evaluation=call.evaluation)
        if not self.saves_projected:
            saved.projected = None
        heads = split_heads(self.arch, rotated)
        del rotated
        if call.kv_in:
            heads = [heads[0], *call.kv_in]
        elif call.layer.is_kv_source and not call.is_backward:
            # cloned, because a view would keep the queries alive
            call.kv_out = tuple(part.clone() for part in heads[1:])
        with torch.enable_grad():  # autograd records only this, to call the kernel's backward
            saved.heads = [part.detach().requires_grad_() for part in heads]
            saved.attended = attend(call, self.arch, self.window, *saved.heads)
        return self.recompute_output(call, saved)

    @property
    def saves_projected(self) -> bool:
        """True if backward reads saved.projected, as the backward of norms, of the gate and of
        clamping does."""
        arch = self.arch
        return bool(arch.qk_norm or arch.value_norm or arch.attention_gate or arch.qkv_limit)

    @property
    def _output_factor(self) -> float:
        """Factor of the kernel's outputs: attention_in_multiplier, which the values still need
        (queries and keys have it in attention_scale), times attention_out_multiplier."""
        return self.arch.attention_in_multiplier * self.arch.attention_out_multiplier

    def recompute_output(self, call: LayerCall, saved: SavedAttention) -> Tensor:
        attended: Tensor = saved.attended.detach()
        if self._output_factor != 1:
            attended = attended * self._output_factor
        gate = self.arch.attention_gate
        if not gate:
            return attended.flatten(1)
        gates = split_projected(self.arch, saved.projected)[3]
        return gate_heads(attended, gates, gate.activation, evaluation=call.evaluation)

    def backward(self, call: LayerCall, saved: SavedAttention, grad: Tensor) -> Tensor:
        grad, grad_gate = grad.reshape(saved.attended.shape), None
        assert self._output_factor == 1 or not self.arch.attention_gate, "no family has both"
        if self._output_factor != 1:
            grad = grad * self._output_factor
        if gate := self.arch.attention_gate:
            gates = split_projected(self.arch, saved.projected)[3]
            grad, grad_gate = gate_heads_backward(grad, saved.attended.detach(), gates,
                                                  gate.activation)
        grads = torch.autograd.grad(saved.attended, saved.heads, grad)
        saved.attended = saved.heads = None
        if call.kv_in:
            call.grad_kv_in = grads[1:]
            # this layer has not projected keys and values: their gradient has 0 heads
            grads = grads[0], *(x[:, :0] for x in grads[1:])
        elif call.layer.is_kv_source:
            grads = grads[0], *map(torch.add, grads[1:], call.grad_kv_out)
        return rotate_backward(*grads, grad_gate, saved.projected, *self._rotate_arguments(call))

    def _rotate_arguments(self, call: LayerCall) -> tuple[Tensor | Architecture | None, ...]:
        """Return the last arguments of rotate_forward() and rotate_backward(): (cos, sin,
        temperature, q_norm's weight, k_norm's weight, arch)."""
        norms = call.vector(self.arch.q_norm), call.vector(self.arch.k_norm)
        return *call.batch.ropes[self.rope], *norms, self.arch

    @functools.cached_property
    def projected_width(self) -> int:
        return sum(linear.out_features for linear in self.arch.attention_linears()[0])

    # ---- what it costs, for the planner ----

    elementwise_values = 0  # MixerSublayer counts norms

    @property
    def query_width(self) -> int:
        return self.arch.n_heads * self.arch.head_dim

    @property
    def _qkv_width(self) -> int:
        return self.query_width + 2 * self.arch.n_kv_heads * self.arch.head_dim

    @property
    def saved_values(self) -> int:
        arch = self.arch
        values = self._qkv_width + self.query_width + 2 * arch.n_heads  # the kernel's sums, fp32
        return values + self.projected_width * self.saves_projected

    @property
    def recomputed_values(self) -> int:
        gated = self.query_width * (self.arch.attention_gate is not None)
        return max(self.projected_width, self._qkv_width) + self.query_width + gated

    def live_bytes(self, plan: Plan) -> int:
        item, others = getattr(torch, plan.compute_dtype).itemsize, 0
        # the gradients of q, k and v before and after rotation, and of attention's output; some
        # kernels sum the query's gradient in fp32
        values = self.projected_width + max(self.projected_width, self._qkv_width)
        values += 3 * self.query_width
        values += 2 * self.query_width * (self.arch.attention_gate is not None)
        if plan.plain_attention:  # repeats keys and values for each query head, and has gradients
            values += 4 * self.query_width
            others = explicit_bytes(self.arch, self.window, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * item + others


def attend(
    call: LayerCall, arch: Architecture, window: int | None, query: Tensor, key: Tensor,
    value: Tensor
) -> Tensor:
    """Causal attention within each document of the micro-batch, [n, heads, width of a value].
    `window`: number of keys that a query sees; None: all."""
    batch, attention_type = call.batch, "window" if window else "full"
    if window is not None and window >= batch.longest:
        window, attention_type = None, "within"
    kernel, segments = batch.kernels[attention_type], batch.segments
    # attention dropout draws by a key's place in its document, so every rank needs all keys, not
    # only the window's
    if batch.shard:
        key, value, segments = batch.shard.gather_keys(
            key, value, None if arch.attention_dropout else window)
    sinks = call.layer.small_tensors.get("self_attn.sinks")
    return kernel(query, key, value, sinks, segments, arch, window, call.layer.index)
