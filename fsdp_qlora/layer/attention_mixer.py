"""Softmax attention as a token mixer."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fsdp_qlora.kernels.cudnn_attention import attention_with_lse
from fsdp_qlora.kernels.heads import (
    gate_heads, gate_heads_backward, qk_norm_rope_backward, qk_norm_rope_forward, split_heads,
    split_projected)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.saved import HeadGroup, SavedAttention
from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.architecture import Architecture


# A kernel's backward needs several times the memory of its queries: their gradient in fp32, and in
# most kernels the gradients of keys and values for each query head. So long micro-batches run a
# group of heads at a time, with at most this many bytes of queries, where there are enough heads.
GROUP_BYTES = 2**27
# makes the key and value that a rank's queries see, of a group of heads; and their Segments
MakeKV = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Segments]]


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionMixer:
    """The softmax attention of one layer, a TokenMixer."""

    arch: Architecture
    window: int | None  # number of keys that a query sees; None: all
    rope_index: int | None  # of arch.ropes; None: no rotary

    saved_type = SavedAttention
    fused_linears = ()

    def forward(self, call: LayerCall, saved: SavedAttention) -> Tensor:
        rotated = qk_norm_rope_forward(
            saved.projected, *self._qk_norm_rope_arguments(call), is_evaluation=call.is_evaluation)
        if not self.saves_projected:
            saved.projected = None
        qkv = split_heads(self.arch, rotated)
        del rotated
        if call.kv_in:
            qkv = [qkv[0], *call.kv_in]
        elif call.layer.is_kv_source and not call.is_backward:
            # cloned, because a view would keep the queries alive
            call.kv_out = tuple(part.clone() for part in qkv[1:])
        saved.groups = attend_by_groups(call, self.arch, self.window, qkv)
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
        attended = all_heads([group.attended.detach() for group in saved.groups])
        if self._output_factor != 1:
            attended = attended * self._output_factor
        gate = self.arch.attention_gate
        if not gate:
            return attended.flatten(1)
        gates = split_projected(self.arch, saved.projected)[3]
        return gate_heads(attended, gates, gate.activation, is_evaluation=call.is_evaluation)

    def backward(self, call: LayerCall, saved: SavedAttention, grad: Tensor) -> Tensor:
        grad = grad.unflatten(1, (self.arch.n_heads, -1))
        grad_gate = None
        assert self._output_factor == 1 or not self.arch.attention_gate, "no family has both"
        if self._output_factor != 1:
            grad = grad * self._output_factor
        if gate := self.arch.attention_gate:
            gates = split_projected(self.arch, saved.projected)[3]
            attended = all_heads([group.attended.detach() for group in saved.groups])
            grad, grad_gate = gate_heads_backward(grad, attended, gates, gate.activation)
            del attended
        groups, saved.groups = saved.groups, None
        grads = groups_backward(groups, grad)
        if call.kv_in:
            call.grad_kv_in = grads[1:]
            # this layer has not projected keys and values: their gradient has 0 heads
            grads = grads[0], *(x[:, :0] for x in grads[1:])
        elif call.layer.is_kv_source:
            grads = grads[0], *map(torch.add, grads[1:], call.grad_kv_out)
        return qk_norm_rope_backward(
            *grads, grad_gate, saved.projected, *self._qk_norm_rope_arguments(call))

    def _qk_norm_rope_arguments(self, call: LayerCall) -> tuple[Tensor | Architecture | None, ...]:
        """Return the last arguments of qk_norm_rope_forward() and qk_norm_rope_backward(): (cos,
        sin, temperature, q_norm's weight, k_norm's weight, arch)."""
        norms = call.vector(self.arch.q_norm), call.vector(self.arch.k_norm)
        return *call.inputs.rope_tables[self.rope_index], *norms, self.arch

    @functools.cached_property
    def projected_width(self) -> int:
        return sum(linear.out_features for linear in self.arch.attention_linears()[0])


def n_head_groups(arch: Architecture, value_bytes: int) -> int:
    """Return the number of groups of heads, see GROUP_BYTES. `value_bytes`: the bytes of one value
    for each token."""
    n_kv = max(1, arch.n_kv_heads)
    if arch.attention_dropout:  # draws for all heads at once
        return 1
    least = min(n_kv, arch.n_heads * arch.head_dim * value_bytes / GROUP_BYTES)
    return next(n for n in range(1, n_kv + 1) if n_kv % n == 0 and n >= least)


def attend_by_groups(
    call: LayerCall, arch: Architecture, window: int | None, qkv: Sequence[Tensor],
    make_kv: MakeKV | None = None
) -> list[HeadGroup]:
    """Run attend() on query, key and value [n, heads, head_dim], a group of heads at a time. With
    `make_kv` they are the query, and two tensors of which it makes key and value."""
    query = qkv[0]
    groups = []
    n_groups = n_head_groups(arch, query[:, 0, 0].numel() * query.itemsize)
    for i, group in enumerate(zip(*(part.chunk(n_groups, 1) for part in qkv))):
        saved = call.saved_attention_results
        saved_results = saved.pop(0) if saved else ()
        with torch.enable_grad():  # autograd records only this, to call the kernel's backward
            leaves = [part.detach().requires_grad_() for part in group]
            attended, lse = attend(
                call, arch, window, leaves, (i, n_groups), saved_results, make_kv)
        groups.append(HeadGroup(leaves, attended))
        if lse is not None and not saved_results:
            call.attention_results.append((attended.detach(), lse))
    return groups


def groups_backward(groups: list[HeadGroup], grad: Tensor) -> list[Tensor]:
    """Return the gradients of query, key and value, from that of the output of all heads."""
    return [all_heads(parts) for parts in zip(*group_gradients(groups, grad))]


def group_gradients(groups: list[HeadGroup], grad: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the gradients of each group's `leaves`, from that of the output of all heads. Empties
    `groups`, so that each group's memory is free before the next one runs."""
    for part in grad.chunk(len(groups), 1):
        group = groups.pop(0)
        grads = torch.autograd.grad(group.attended, group.leaves, part)
        del group
        yield grads
        del grads


def all_heads(parts: Sequence[Tensor]) -> Tensor:
    """Return the tensors of all groups as one [n, heads, head_dim]."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def attend(
    call: LayerCall, arch: Architecture, window: int | None, qkv: Sequence[Tensor],
    group: tuple[int, int], saved_results: Sequence[Tensor] = (), make_kv: MakeKV | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return causal attention within each document of the micro-batch, [n, heads, width of a
    value]; and its logsumexps, if the layer saves them. `window`: number of keys that a query sees;
    None: all. `qkv`: query, key and value of the i-th of n groups, with `group` = (i, n).
    `saved_results`: these results, if the layer has saved them. `make_kv`: see attend_by_groups();
    None: ranks that share the micro-batch exchange keys and values."""
    query, key, value = qkv
    batch = call.batch
    attention_type = "window" if window else "full"
    if window is not None and window >= batch.max_seqlen:
        window, attention_type = None, "window_unreached"
    kernel = call.inputs.attention_kernels[attention_type]
    segments = call.inputs.segments
    if make_kv:
        key, value, segments = make_kv(key, value)
    elif batch.context_shard:
        # attention dropout draws by a key's place in its document, so every rank needs all keys,
        # not only the window's
        key, value, segments = batch.context_shard.gather_kv(
            key, value, None if arch.attention_dropout else window)
    sinks = call.layer.small_tensors.get("self_attn.sinks")
    if sinks is not None:
        sinks = sinks.chunk(group[1])[group[0]]
    assert segments, "of the micro-batch or of the keys gathered for it"
    if call.saves_attention and kernel.gives_lse:
        # without sinks, soft cap and window: attention's results are saved only where a trial gave
        # the same as with them, see can_reuse_attention_results()
        return attention_with_lse(query, key, value, segments, arch.attention_scale, saved_results)
    out = kernel.function(query, key, value, sinks, segments, arch, window, call.layer.index)
    return out, None
