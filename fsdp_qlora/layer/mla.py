"""Multi-head latent attention (MLA) of DeepSeek and related models, as a token mixer.

The sublayer's first matmul computes two latents of each token; the matmuls that make heads of them
are here. The kernels are those of softmax attention. As in DeepSeek's code, `pe` names the
dimensions of a query or key that are rotated, `nope` the others.

Ranks that share a micro-batch exchange latents, see mla_context.py.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.attention import document_attention, explicit_bytes
from fsdp_qlora.kernels.elementwise import norm_backward
from fsdp_qlora.layer.attention_mixer import (
    all_heads, attend_by_groups, groups_backward, kernel_values, n_head_groups)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.mla_context import (
    attend_to_seen_keys, exchange_latents, exchange_latents_backward, rotated_queries_backward,
    seen_keys_backward)
from fsdp_qlora.layer.mla_heads import latent_heads, latent_heads_backward
from fsdp_qlora.layer.residual import norm_padded
from fsdp_qlora.layer.saved import SavedMLA
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture, LatentAttention


@dataclasses.dataclass(frozen=True, eq=False)
class MLAMixer:
    """The latent attention of one layer, see LatentAttention."""

    arch: Architecture
    rope_index: int | None  # of arch.ropes
    q_b: FusedLinear | None  # None: in_proj's outputs contain the queries themselves
    kv_b: FusedLinear

    saved_type = SavedMLA

    @property
    def mla(self) -> LatentAttention:
        mla: LatentAttention = self.arch.mla
        return mla

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return (self.q_b, self.kv_b) if self.q_b else (self.kv_b,)

    def forward(self, call: LayerCall, saved: SavedMLA) -> Tensor:
        query, kv_latent, k_pe = saved.projected.split(self._projected_widths, 1)
        saved.projected, saved.q_latent = None, None
        if self.q_b:
            saved.q_latent = query
            query, saved.q_lora_hidden = self._heads(call, self.q_b, self.mla.q_norm, query)
        ropes, shard = call.batch.ropes[self.rope_index], call.batch.context_shard
        if shard:
            kv_latent, k_pe = exchange_latents(
                shard, kv_latent, k_pe, ropes[0], ropes[1], self.arch, call.is_evaluation)
        # without q_b, a view would keep the tensor alive that also contains the queries
        saved.kv_latent = kv_latent if self.q_b or shard else kv_latent.clone()
        key_value, saved.kv_lora_hidden = self._heads(
            call.of_keys(), self.kv_b, self.mla.kv_norm, kv_latent)
        value_width = kernel_value_width(call.batch, self.arch)
        if shard:
            saved.key_value = key_value.unflatten(1, (self.arch.n_heads, -1))
            del key_value
            saved.groups = attend_to_seen_keys(
                call, self.arch, self.rope_index, query, saved.key_value, k_pe, value_width)
        else:
            heads = latent_heads(query, key_value, k_pe, *ropes, self.arch, value_width,
                                 is_evaluation=call.is_evaluation)
            del query, key_value, kv_latent, k_pe
            saved.groups = attend_by_groups(call, self.arch, None, heads)
        return self.recompute_output(call, saved)

    def recompute_output(self, call: LayerCall, saved: SavedMLA) -> Tensor:
        attended = all_heads([group.attended.detach() for group in saved.groups])
        return attended[..., : self.mla.value_dim].flatten(1)

    def backward(self, call: LayerCall, saved: SavedMLA, grad: Tensor) -> Tensor:
        grad = grad.unflatten(1, (self.arch.n_heads, -1))
        groups, saved.groups = saved.groups, None
        grad = F.pad(grad, (0, groups[0].attended.shape[2] - grad.shape[2]))
        ropes, shard = call.batch.ropes[self.rope_index], call.batch.context_shard
        if shard:
            grad_query, grad_key_value, grad_k_pe = seen_keys_backward(
                groups, grad, saved.key_value)
            saved.key_value = None
            grad_query = rotated_queries_backward(grad_query, *ropes, self.arch)
        else:
            grads = groups_backward(groups, grad)
            grad_query, grad_key_value, grad_k_pe = latent_heads_backward(
                *grads, *ropes, self.arch)
            del grads
        del grad
        if self.q_b:  # then of their latent
            grad_query = self._heads_backward(
                call, self.q_b, self.mla.q_norm, saved.q_latent, saved.q_lora_hidden, grad_query)
        grad_kv_latent = self._heads_backward(
            call.of_keys(), self.kv_b, self.mla.kv_norm, saved.kv_latent, saved.kv_lora_hidden,
            grad_key_value)
        if shard:
            grad_kv_latent, grad_k_pe = exchange_latents_backward(
                shard, grad_kv_latent, grad_k_pe, ropes[0], ropes[1], self.arch)
        return torch.cat([grad_query, grad_kv_latent, grad_k_pe], 1)

    def _heads(
        self, call: LayerCall, fused: FusedLinear, norm: str, latent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return lora_matmul() of `fused` for the norm of a latent."""
        inputs = norm_padded(call, norm, latent, fused, self.mla.norm_eps)
        return lora_matmul(call, fused, inputs)

    def _heads_backward(
        self, call: LayerCall, fused: FusedLinear, norm: str, latent: Tensor, lora_hidden: Tensor,
        grad: Tensor
    ) -> Tensor:
        """Return the gradient of the latent, from the gradient of _heads()'s outputs."""
        inputs = norm_padded(call, norm, latent, fused, self.mla.norm_eps)[:, : fused.in_features]
        grad = lora_matmul_backward(call, fused, lora_hidden, grad, inputs)
        return norm_backward(
            latent, grad, None, call.vector(norm), self.arch.norm, self.mla.norm_eps)

    @property
    def _projected_widths(self) -> list[int]:
        first = self.mla.q_rank or self.query_width
        return [first, self.mla.kv_rank, self.mla.rope_dim]

    @property
    def projected_width(self) -> int:
        return sum(self._projected_widths)

    @property
    def saves_projected(self) -> bool:
        return self.q_b is not None

    # ---- what it costs, for the planner ----

    @property
    def query_width(self) -> int:
        return self.arch.n_heads * self.arch.head_dim

    @property
    def saved_values(self) -> int:
        """Latents and LoRA's hidden values; query, key and value, each as wide as the queries; the
        results of attention."""
        latents = self.projected_width if self.saves_projected else self.mla.kv_rank
        padded_lora = sum(fused.padded_lora for fused in self.fused_linears)
        return latents + padded_lora + 3 * self.query_width + self.attention_values

    @property
    def attention_values(self) -> int:
        return self.query_width + 2 * self.arch.n_heads  # the logsumexps are in fp32

    @property
    def elementwise_values(self) -> int:
        """Values for the norms of latents, counted like the sublayer's own norm, and for heads,
        forward and backward."""
        return 15 * ((self.mla.q_rank or 0) + self.mla.kv_rank) + 8 * self.query_width

    def live_bytes(self, plan: Plan) -> int:
        itemsize = plan.dtype.itemsize
        if plan.context_parallel_size > 1:
            return int(self._shared_values(plan) * plan.micro_batch_tokens * itemsize)
        others = 0
        # the gradients of query, key, value and attention's output, and of the tensors that these
        # heads are made from
        values = 4 * self.query_width + self.query_width + self.kv_b.out_features
        values += kernel_values(self.arch, plan.micro_batch_tokens * itemsize)
        if plan.plain_attention:
            values += 4 * self.query_width
            others = explicit_bytes(self.arch, None, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * itemsize + others

    @property
    def exchanged_values(self) -> int:
        """Values that go from rank to rank with context parallelism."""
        return self.mla.kv_rank + self.mla.rope_dim

    @property
    def key_values(self) -> int:
        """Values that one pass reads or writes to make the heads of a key and of its value."""
        return self.kv_b.out_features + 2 * self.query_width

    def values_more_saved(self, plan: Plan) -> float:
        """Return how many values per token of a rank's own are saved with context parallelism
        beside saved_values: instead of heads of keys and values the rows that were received, LoRA's
        hidden values and kv_b's outputs."""
        rows = self.exchanged_values + self.kv_b.padded_lora + self.kv_b.out_features
        if plan.plain_attention:  # its graph keeps keys and values
            rows += 2 * self.query_width
        return plan.seen_keys * rows - 2 * self.query_width

    def _shared_values(self, plan: Plan) -> float:
        """Return live_bytes() with context parallelism, besides values_more_saved(), as values per
        token of a rank's own. The gradients of kv_b's outputs replace these."""
        seen, queries = plan.seen_keys, self.query_width
        n_groups = n_head_groups(self.arch, plan.micro_batch_tokens * plan.dtype.itemsize)
        # a group's keys, values, and their gradients; where pieces run one after the other, also
        # those of a call, which are copied to their places; and see kernel_values()
        in_a_call = 0 if plan.varlen_attention else seen - 1
        group = 4 * seen + 2 * in_a_call + 3
        if plan.plain_attention:
            group += 4 * seen
        # afterwards kv_b's inputs and their gradient, in two dtypes
        projecting = 4 * seen * self.kv_b.width
        # the gradient of the queries, and twice that of attention's output: padded, and before
        return 3 * queries + max(group * queries / n_groups, projecting)


def kernel_value_width(batch: MicroBatch, arch: Architecture) -> int:
    """Return the width of a head's value for the kernel: plain torch accepts any width, the other
    kernels need the query's."""
    is_plain = batch.kernels["full"] is document_attention
    assert arch.mla, "the layer has latent attention"
    return arch.mla.value_dim if is_plain else arch.head_dim
