"""Multi-head latent attention (MLA) of DeepSeek and related models, as a token mixer.

The sublayer's first matmul computes two latents of each token; the matmuls that make heads of them
are here. The kernels are those of softmax attention. As in DeepSeek's code, `pe` names the
dimensions of a query or key that are rotated, `nope` the others.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.attention import document_attention, explicit_bytes
from fsdp_qlora.kernels.elementwise import elementwise, norm_backward
from fsdp_qlora.kernels.heads import rotate
from fsdp_qlora.layer.attention_mixer import (
    all_heads, attend_by_groups, groups_backward, kernel_values)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.residual import norm_padded
from fsdp_qlora.layer.saved import SavedMLA
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture, LatentAttention


@dataclasses.dataclass(frozen=True, eq=False)
class MLAMixer:
    """The latent attention of one layer, see LatentAttention."""

    arch: Architecture
    rope: int | None  # index of arch.ropes
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
        # without q_b, a view would keep the tensor alive that also contains the queries
        saved.kv_latent = kv_latent if self.q_b else kv_latent.clone()
        key_value, saved.kv_lora_hidden = self._heads(call, self.kv_b, self.mla.kv_norm, kv_latent)
        heads = latent_heads(query, key_value, k_pe, *call.batch.ropes[self.rope], self.arch,
                             kernel_value_width(call.batch, self.arch),
                             is_evaluation=call.is_evaluation)
        del query, key_value, kv_latent, k_pe
        saved.groups = attend_by_groups(call, self.arch, None, heads)
        return self.recompute_output(call, saved)

    def recompute_output(self, call: LayerCall, saved: SavedMLA) -> Tensor:
        attended = all_heads([group.attended.detach() for group in saved.groups])
        return attended[..., : self.mla.value].flatten(1)

    def backward(self, call: LayerCall, saved: SavedMLA, grad: Tensor) -> Tensor:
        grad = grad.unflatten(1, (self.arch.n_heads, -1))
        groups, saved.groups = saved.groups, None
        grad = F.pad(grad, (0, groups[0].attended.shape[2] - grad.shape[2]))
        grads = groups_backward(groups, grad)
        grad_query, grad_key_value, grad_k_pe = latent_heads_backward(
            *grads, *call.batch.ropes[self.rope], self.arch)
        del grads, grad
        if self.q_b:  # then of their latent
            grad_query = self._heads_backward(
                call, self.q_b, self.mla.q_norm, saved.q_latent, saved.q_lora_hidden, grad_query)
        grad_kv_latent = self._heads_backward(
            call, self.kv_b, self.mla.kv_norm, saved.kv_latent, saved.kv_lora_hidden,
            grad_key_value)
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
        return [first, self.mla.kv_rank, self.mla.rope]

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
        others = 0
        # the gradients of query, key, value and attention's output, and of the tensors that these
        # heads are made from
        values = 4 * self.query_width + self.query_width + self.kv_b.out_features
        values += kernel_values(self.arch, plan.micro_batch_tokens * itemsize)
        if plan.plain_attention:
            values += 4 * self.query_width
            others = explicit_bytes(self.arch, None, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * itemsize + others


def kernel_value_width(batch: MicroBatch, arch: Architecture) -> int:
    """Return the width of a head's value for the kernel: plain torch accepts any width, the other
    kernels need the query's."""
    is_plain = batch.kernels["full"] is document_attention
    assert arch.mla, "the layer has latent attention"
    return arch.mla.value if is_plain else arch.head_dim


@elementwise
def latent_heads(
    query: Tensor, key_value: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Build query and key [n, heads, nope + rope], rotated, and value [n, heads, value_width],
    padded with 0, from the linears' outputs: `query` [n, heads * (nope + rope)], `key_value` [n,
    heads * (nope + value)] and `k_pe` [n, rope], which all heads share. For cos, sin and
    temperature see rope_tables()."""
    mla = arch.mla
    dtype = query.dtype
    assert mla, "the layer has latent attention"
    query, key_value = (x.unflatten(1, (arch.n_heads, -1)) for x in (query, key_value))
    q_nope, q_pe = query.split([mla.nope, mla.rope], 2)
    q_pe = rotate(q_pe.float(), cos, sin, arch).view_as(q_pe).to(dtype)
    query = torch.cat([q_nope, q_pe], 2)
    if temperature is not None:
        query = (query * temperature[:, None, None]).to(dtype)
    k_nope, value = key_value.split([mla.nope, mla.value], 2)
    k_pe = rotate(k_pe[:, None].float(), cos, sin, arch).to(dtype)
    key = torch.cat([k_nope, k_pe[:, None].expand(-1, arch.n_heads, -1)], 2)
    return query, key, F.pad(value, (0, value_width - mla.value))


@elementwise
def latent_heads_backward(
    grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of latent_heads()'s first three arguments, from the gradients of its
    results."""
    mla = arch.mla
    dtype = grad_query.dtype
    assert mla, "the layer has latent attention"
    grad_query = grad_query.float()
    if temperature is not None:
        grad_query = grad_query * temperature[:, None, None]
    grad_q_nope, grad_q_pe = grad_query.split([mla.nope, mla.rope], 2)
    grad_q_pe = rotate(grad_q_pe, cos, -sin, arch).view_as(grad_q_pe)
    grad_query = torch.cat([grad_q_nope, grad_q_pe], 2).to(dtype).flatten(1)
    grad_k_nope, grad_k_pe = grad_key.split([mla.nope, mla.rope], 2)
    grad_k_pe = rotate(grad_k_pe.float().sum(1, keepdim=True), cos, -sin, arch).to(dtype)
    grad_key_value = torch.cat([grad_k_nope, grad_value[..., : mla.value]], 2).flatten(1)
    return grad_query, grad_key_value, grad_k_pe
