"""Multi-head latent attention (MLA) of DeepSeek and related models, as a token mixer.

The sublayer's first matmul gives two latents of each token; the matmuls that make heads of them are
here. The kernels are those of softmax attention.

With context parallelism ranks exchange the latent of keys and values and the rotated part of keys,
not the heads that kv_b makes of them. So each rank computes kv_b for all keys that its queries see.
The heads of these keys would fill the memory: only kv_b's outputs are saved, see SeenKeys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.attention import document_attention, explicit_bytes
from fsdp_qlora.kernels.elementwise import elementwise, norm_backward
from fsdp_qlora.kernels.heads import rotate
from fsdp_qlora.layer.attention_mixer import (
    all_heads, attend_by_groups, group_gradients, groups_backward, kernel_values, n_head_groups)
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.residual import norm_padded
from fsdp_qlora.layer.saved import HeadGroup, SavedMLA
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.micro_batch.segments import Segments
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
        query, kv_latent, rotary_key = saved.projected.split(self._projected_widths, 1)
        saved.projected, saved.q_latent = None, None
        if self.q_b:
            saved.q_latent = query
            query, saved.q_lora_hidden = self._heads(call, self.q_b, self.mla.q_norm, query)
        ropes, keys = call.batch.ropes[self.rope], call.of_keys()
        shard = call.batch.context_shard
        if shard:
            rotary_key = rotated_key(
                rotary_key, *ropes[:2], self.arch, is_evaluation=call.is_evaluation)
            rows = shard.exchange().gather(torch.cat([kv_latent, rotary_key], 1))
            kv_latent, rotary_key = rows.split([self.mla.kv_rank, self.mla.rope], 1)
        # without q_b, a view would keep the tensor alive that also contains the queries
        saved.kv_latent = kv_latent if self.q_b or shard else kv_latent.clone()
        key_value, saved.kv_lora_hidden = self._heads(keys, self.kv_b, self.mla.kv_norm, kv_latent)
        if shard:
            saved.key_value = key_value.unflatten(1, (self.arch.n_heads, -1))
            del key_value
            saved.groups = self._attend_to_seen_keys(
                call, shard.exchange().segments, query, saved.key_value, rotary_key)
            return self.recompute_output(call, saved)
        heads = latent_heads(query, key_value, rotary_key, *ropes, self.arch,
                             kernel_value_width(call.batch, self.arch),
                             is_evaluation=call.is_evaluation)
        del query, key_value, kv_latent, rotary_key
        saved.groups = attend_by_groups(call, self.arch, None, heads)
        return self.recompute_output(call, saved)

    def _attend_to_seen_keys(
        self, call: LayerCall, segments: Segments, query: Tensor, key_value: Tensor,
        rotary_key: Tensor
    ) -> list[HeadGroup]:
        """Return attend_by_groups() with context parallelism, from the queries' linear's outputs;
        for the rest see SeenKeys.keys()."""
        query = rotated_queries(
            query, *call.batch.ropes[self.rope], self.arch, is_evaluation=call.is_evaluation)
        seen = SeenKeys(self.mla, kernel_value_width(call.batch, self.arch), segments)
        rotary_key = rotary_key[:, None].expand(-1, self.arch.n_heads, -1)
        with torch.autograd.graph.saved_tensors_hooks(seen.pack, seen.unpack):
            return attend_by_groups(
                call, self.arch, None, (query, key_value, rotary_key), seen.keys)

    def recompute_output(self, call: LayerCall, saved: SavedMLA) -> Tensor:
        attended = all_heads([group.attended.detach() for group in saved.groups])
        return attended[..., : self.mla.value].flatten(1)

    def backward(self, call: LayerCall, saved: SavedMLA, grad: Tensor) -> Tensor:
        grad = grad.unflatten(1, (self.arch.n_heads, -1))
        groups, saved.groups = saved.groups, None
        grad = F.pad(grad, (0, groups[0].attended.shape[2] - grad.shape[2]))
        ropes, shard = call.batch.ropes[self.rope], call.batch.context_shard
        if shard:
            query, key_value, rotary_key = seen_keys_backward(groups, grad, saved.key_value)
            saved.key_value = None
            query = rotated_queries_backward(query, *ropes, self.arch)
        else:
            grads = groups_backward(groups, grad)
            query, key_value, rotary_key = latent_heads_backward(*grads, *ropes, self.arch)
            del grads
        del grad
        if self.q_b:
            query = self._heads_backward(call, self.q_b, self.mla.q_norm, saved.q_latent,
                                         saved.q_lora_hidden, query)
        kv_latent = self._heads_backward(call.of_keys(), self.kv_b, self.mla.kv_norm,
                                         saved.kv_latent, saved.kv_lora_hidden, key_value)
        if shard:
            rows = shard.exchange().return_gradients(torch.cat([kv_latent, rotary_key], 1))
            kv_latent, rotary_key = rows.split([self.mla.kv_rank, self.mla.rope], 1)
            rotary_key = rotated_key_backward(rotary_key, *ropes[:2], self.arch)
        return torch.cat([query, kv_latent, rotary_key], 1)

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
        return self.mla.kv_rank + self.mla.rope

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
    return arch.mla.value if is_plain else arch.head_dim


class SeenKeys:
    """The keys and values that this rank's queries see, for a group of heads at a time. A kernel
    saves them for its backward; with pack() and unpack() as autograd's hooks they are freed, and
    made again when backward reads them. That moves memory, but computes nothing."""

    def __init__(self, mla: LatentAttention, value_width: int, segments: Segments) -> None:
        self.mla, self.value_width, self.segments = mla, value_width, segments
        # of the last group: its key and its value, each as (strides and address, how to make it)
        self.made: list[tuple[tuple, Callable[[], Tensor]]] = []

    def keys(self, key_value: Tensor, rotary_key: Tensor) -> tuple[Tensor, Tensor, Segments]:
        """Return key and value of a group, and the Segments of queries and keys. `key_value`:
        kv_b's outputs [keys, heads, nope + value]; `rotary_key` [keys, heads, rope], rotated."""
        nope, value = key_value.split([self.mla.nope, self.mla.value], 2)
        makers = (functools.partial(key_heads, nope.detach(), rotary_key.detach()),
                  functools.partial(value_heads, value.detach(), self.value_width))
        key, value = key_heads(nope, rotary_key), value_heads(value, self.value_width)
        self.made = [(place_of(x), make) for x, make in zip((key, value), makers)]
        return key, value, self.segments

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the tensor."""
        place = place_of(tensor)
        makers = [make for made, make in self.made if made == place]
        tensor = tensor.detach()  # a kernel's output would keep its own graph alive
        return makers[0] if makers else lambda: tensor

    def unpack(self, make: Callable[[], Tensor]) -> Tensor:
        return make()


def place_of(tensor: Tensor) -> tuple:
    """Return what two tensors have in common if one is the other."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def seen_keys_backward(
    groups: list[HeadGroup], grad: Tensor, key_value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the queries [n, heads, nope + rope], of kv_b's outputs and of the
    rotated part of keys [keys, rope], from that of attention's output. Those of kv_b's outputs
    replace `key_value`, group by group, because nothing reads a group's again."""
    queries, rotary_key = [], torch.zeros((), device=grad.device)
    places, gradients = key_value.chunk(len(groups), 1), group_gradients(groups, grad)
    for place in places:  # zip() would keep a group's gradients until it has the next one's
        query, of_group, rotary = next(gradients)
        place.copy_(of_group)
        queries.append(query)
        rotary_key = rotary_key + rotary.float().sum(1)
        del query, of_group, rotary
    return all_heads(queries), key_value.flatten(1), rotary_key.to(grad.dtype)


def key_heads(nope: Tensor, rotary_key: Tensor) -> Tensor:
    """Return keys [n, heads, nope + rope], from their two parts; the rotated one may be shared by
    all heads, [n, 1, rope]."""
    return torch.cat([nope, rotary_key.expand(-1, nope.shape[1], -1)], 2)


def value_heads(value: Tensor, width: int) -> Tensor:
    """Return values [n, heads, width], contiguous, padded with 0."""
    padding = width - value.shape[2]
    return F.pad(value, (0, padding)) if padding else value.contiguous()


def query_heads(
    query: Tensor, cos: Tensor, sin: Tensor, temperature: Tensor | None, arch: Architecture
) -> Tensor:
    """Return queries [n, heads, nope + rope], rotated, from the outputs of their linear."""
    mla, dtype = arch.mla, query.dtype
    assert mla, "the layer has latent attention"
    nope, turned = query.unflatten(1, (arch.n_heads, -1)).split([mla.nope, mla.rope], 2)
    turned = rotate(turned.float(), cos, sin, arch).view_as(turned).to(dtype)
    query = torch.cat([nope, turned], 2)
    if temperature is not None:
        query = (query * temperature[:, None, None]).to(dtype)
    return query


def query_heads_backward(
    query: Tensor, cos: Tensor, sin: Tensor, temperature: Tensor | None, arch: Architecture
) -> Tensor:
    """Return the gradient of query_heads()'s first argument, from that of its result."""
    mla, dtype = arch.mla, query.dtype
    assert mla, "the layer has latent attention"
    query = query.float() if temperature is None else query.float() * temperature[:, None, None]
    nope, turned = query.split([mla.nope, mla.rope], 2)
    turned = rotate(turned, cos, -sin, arch).view_as(turned)
    return torch.cat([nope, turned], 2).to(dtype).flatten(1)


rotated_queries, rotated_queries_backward = map(elementwise, (query_heads, query_heads_backward))


@elementwise
def rotated_key(rotary_key: Tensor, cos: Tensor, sin: Tensor, arch: Architecture) -> Tensor:
    """Return the part of keys that all heads share [n, rope], rotated."""
    return rotate(rotary_key[:, None].float(), cos, sin, arch).to(rotary_key.dtype)


@elementwise
def rotated_key_backward(
    rotary_key: Tensor, cos: Tensor, sin: Tensor, arch: Architecture
) -> Tensor:
    """Return the gradient of rotated_key()'s first argument, from that of its result."""
    return rotate(rotary_key[:, None].float(), cos, -sin, arch).to(rotary_key.dtype)


@elementwise
def latent_heads(
    query: Tensor, key_value: Tensor, rotary_key: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture, value_width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Build query and key [n, heads, nope + rope], rotated, and value [n, heads, value_width],
    padded with 0, from the linears' outputs: `query` [n, heads * (nope + rope)], `key_value` [n,
    heads * (nope + value)] and `rotary_key` [n, rope]. For cos, sin and temperature see
    rope_tables()."""
    assert arch.mla, "the layer has latent attention"
    mla = arch.mla
    key, value = key_value.unflatten(1, (arch.n_heads, -1)).split([mla.nope, mla.value], 2)
    shared = rotate(rotary_key[:, None].float(), cos, sin, arch).to(query.dtype)
    return (query_heads(query, cos, sin, temperature, arch), key_heads(key, shared[:, None]),
            F.pad(value, (0, value_width - mla.value)))


@elementwise
def latent_heads_backward(
    query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor,
    temperature: Tensor | None, arch: Architecture
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of latent_heads()'s first three arguments, from the gradients of its
    results."""
    mla = arch.mla
    dtype = query.dtype
    assert mla, "the layer has latent attention"
    query = query_heads_backward(query, cos, sin, temperature, arch)
    key, shared = key.split([mla.nope, mla.rope], 2)
    rotary_key = rotate(shared.float().sum(1, keepdim=True), cos, -sin, arch).to(dtype)
    key_value = torch.cat([key, value[..., : mla.value]], 2).flatten(1)
    return query, key_value, rotary_key
