"""Multi-head latent attention (MLA) of DeepSeek and related models, as a token mixer.

The sublayer's first matmul computes two latents of each token; the matmuls that make heads of them
are here. The kernels are those of softmax attention. As in DeepSeek's code, `pe` names the
dimensions of a query or key that are rotated, `nope` the others.

    query, kv_latent, k_pe = in_proj(norm(x))           # by the sublayer
    query = q_b(norm(query))                            # _heads(); with q_b, query is its latent
    key_value = kv_b(norm(kv_latent))                   # _heads()
    q, k, v = latent_heads(query, key_value, k_pe)      # rotates pe; all heads share k_pe
    return attention(q, k, v)                           # attend_by_groups(); `out_proj` follows

Ranks that share a micro-batch exchange latents before kv_b: exchange_latents(). For them
attend_to_visible_keys() does the last two lines. Both are in mla_context.py.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.norms import fused_norm_backward
from fsdp_qlora.layer.attention_mixer import (
    all_heads, attend_by_groups, groups_backward)
from fsdp_qlora.layer.call import LayerCall, LayerInputs
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.mla_context import (
    attend_to_visible_keys, exchange_latents, exchange_latents_backward, rotated_queries_backward,
    visible_keys_backward)
from fsdp_qlora.layer.mla_heads import latent_heads, latent_heads_backward
from fsdp_qlora.layer.residual import norm_padded
from fsdp_qlora.layer.saved import SavedMLA
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import MLASpec


@dataclasses.dataclass(frozen=True, eq=False)
class MLAMixer:
    """The latent attention of one layer, see MLASpec."""

    arch: Architecture
    rope_index: int | None  # of arch.ropes
    q_b: FusedLinear | None  # None: in_proj's outputs contain the queries themselves
    kv_b: FusedLinear

    saved_type = SavedMLA

    @property
    def mla(self) -> MLASpec:
        mla: MLASpec = self.arch.mla
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
        ropes, shard = call.inputs.rope_tables[self.rope_index], call.batch.context_shard
        if shard:
            kv_latent, k_pe = exchange_latents(
                shard, kv_latent, k_pe, ropes[0], ropes[1], self.arch, call.is_evaluation)
        # without q_b, a view would keep the tensor alive that also contains the queries
        saved.kv_latent = kv_latent if self.q_b or shard else kv_latent.clone()
        key_value, saved.kv_lora_hidden = self._heads(
            call.for_visible_keys(), self.kv_b, self.mla.kv_norm, kv_latent)
        value_width = kernel_value_width(call.inputs, self.arch)
        if shard:
            saved.key_value = key_value.unflatten(1, (self.arch.n_heads, -1))
            del key_value
            saved.groups = attend_to_visible_keys(
                call, self.arch, self.rope_index, query, saved.key_value, k_pe, value_width)
        else:
            qkv = latent_heads(query, key_value, k_pe, *ropes, self.arch, value_width,
                               is_evaluation=call.is_evaluation)
            del query, key_value, kv_latent, k_pe
            saved.groups = attend_by_groups(call, self.arch, None, qkv)
        return self.recompute_output(call, saved)

    def recompute_output(self, call: LayerCall, saved: SavedMLA) -> Tensor:
        attended = all_heads([group.attended.detach() for group in saved.groups])
        return attended[..., : self.mla.value_dim].flatten(1)

    def backward(self, call: LayerCall, saved: SavedMLA, grad: Tensor) -> Tensor:
        grad = grad.unflatten(1, (self.arch.n_heads, -1))
        groups, saved.groups = saved.groups, None
        grad = F.pad(grad, (0, groups[0].attended.shape[2] - grad.shape[2]))
        ropes, shard = call.inputs.rope_tables[self.rope_index], call.batch.context_shard
        if shard:
            grad_query, grad_key_value, grad_k_pe = visible_keys_backward(
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
            call.for_visible_keys(), self.kv_b, self.mla.kv_norm, saved.kv_latent,
            saved.kv_lora_hidden, grad_key_value)
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
        return fused_norm_backward(
            latent, grad, None, call.vector(norm), self.arch.norm_kind, self.mla.norm_eps)

    @property
    def _projected_widths(self) -> list[int]:
        first = self.mla.q_rank or self.arch.n_heads * self.arch.head_dim
        return [first, self.mla.kv_rank, self.mla.rope_dim]

    @property
    def projected_width(self) -> int:
        return sum(self._projected_widths)


def kernel_value_width(inputs: LayerInputs, arch: Architecture) -> int:
    """Return the width of a head's value for the kernel: plain torch accepts any width, the other
    kernels need the query's."""
    assert arch.mla, "the layer has latent attention"
    return arch.mla.value_dim if inputs.attention_kernels["full"].is_eager else arch.head_dim
