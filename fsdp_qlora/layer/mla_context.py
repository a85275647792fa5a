"""Latent attention under context parallelism.

Ranks that share a micro-batch exchange the latent of keys and values and the rotated part of keys,
512 + 64 values per token in DeepSeek-V3, not the 128 heads that kv_b makes of them. So each rank
computes kv_b for all keys that its queries see. The heads of all these keys would fill the memory:
only kv_b's outputs are saved, and VisibleKV makes the heads of one group at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.heads import rotate
from fsdp_qlora.layer.attention_mixer import all_heads, attend_by_groups, group_gradients
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.mla_heads import key_heads, query_heads, query_heads_backward
from fsdp_qlora.layer.saved import HeadGroup
from fsdp_qlora.micro_batch.context_parallel import ContextShard
from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import MLASpec

rotated_queries, rotated_queries_backward = map(fused_kernel, (query_heads, query_heads_backward))


def exchange_latents(
    shard: ContextShard, kv_latent: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor,
    arch: Architecture, is_evaluation: bool
) -> tuple[Tensor, Tensor]:
    """Return the latents [keys, kv_rank] and the rotated parts [keys, rope] of all keys that this
    rank's queries see, from those of its own tokens. All ranks must call this."""
    k_pe = rotated_key(k_pe, cos, sin, arch, is_evaluation=is_evaluation)
    rows = shard.exchange().gather(torch.cat([kv_latent, k_pe], 1))
    kv_latent, k_pe = rows.split([kv_latent.shape[1], k_pe.shape[1]], 1)
    return kv_latent, k_pe


def exchange_latents_backward(
    shard: ContextShard, grad_kv_latent: Tensor, grad_k_pe: Tensor, cos: Tensor, sin: Tensor,
    arch: Architecture
) -> tuple[Tensor, Tensor]:
    """Return the gradients of exchange_latents()'s inputs, summed over the ranks that saw them."""
    rows = shard.exchange().return_gradients(torch.cat([grad_kv_latent, grad_k_pe], 1))
    grad_kv_latent, grad_k_pe = rows.split([grad_kv_latent.shape[1], grad_k_pe.shape[1]], 1)
    return grad_kv_latent, rotated_key_backward(grad_k_pe, cos, sin, arch)


@fused_kernel
def rotated_key(k_pe: Tensor, cos: Tensor, sin: Tensor, arch: Architecture) -> Tensor:
    """Return the part of keys that all heads share [n, rope], rotated."""
    return rotate(k_pe[:, None].float(), cos, sin, arch).to(k_pe.dtype)


@fused_kernel
def rotated_key_backward(
    grad_k_pe: Tensor, cos: Tensor, sin: Tensor, arch: Architecture
) -> Tensor:
    """Return the gradient of rotated_key()'s first argument, from that of its result."""
    return rotate(grad_k_pe[:, None].float(), cos, -sin, arch).to(grad_k_pe.dtype)


def attend_to_visible_keys(
    call: LayerCall, arch: Architecture, rope_index: int | None, query: Tensor, key_value: Tensor,
    k_pe: Tensor, value_width: int
) -> list[HeadGroup]:
    """Return attend_by_groups() of `query`, the outputs of the queries' linear, for the keys that
    they see: `key_value`, kv_b's outputs [keys, heads, nope + value], and `k_pe` [keys, rope],
    rotated."""
    shard, mla = call.batch.context_shard, arch.mla
    assert shard and mla, "the caller has looked"
    query = rotated_queries(
        query, *call.inputs.rope_tables[rope_index], arch, is_evaluation=call.is_evaluation)
    seen = VisibleKV(mla, value_width, shard.exchange().segments)
    k_pe = k_pe[:, None].expand(-1, arch.n_heads, -1)
    with torch.autograd.graph.saved_tensors_hooks(seen.pack, seen.unpack):
        return attend_by_groups(call, arch, None, (query, key_value, k_pe), seen.make_kv)


def visible_keys_backward(
    groups: list[HeadGroup], grad: Tensor, key_value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the rotated queries [n, heads, nope + rope], of kv_b's outputs and of
    the rotated part of keys [keys, rope], from that of attention's output. Those of kv_b's outputs
    replace `key_value`, group by group, because nothing reads a group's again."""
    grad_queries, grad_k_pe = [], torch.zeros((), device=grad.device)
    places, gradients = key_value.chunk(len(groups), 1), group_gradients(groups, grad)
    for place in places:  # zip() would keep a group's gradients until it has the next one's
        grad_query, grad_of_place, grad_of_k_pe = next(gradients)
        place.copy_(grad_of_place)
        grad_queries.append(grad_query)
        grad_k_pe = grad_k_pe + grad_of_k_pe.float().sum(1)
        del grad_query, grad_of_place, grad_of_k_pe
    return all_heads(grad_queries), key_value.flatten(1), grad_k_pe.to(grad.dtype)


class VisibleKV:
    """The keys and values that this rank's queries see, for a group of heads at a time. A kernel
    saves them for its backward. With pack() and unpack() as autograd's hooks they are freed, and
    made again when backward reads them: that moves memory, but multiplies nothing."""

    def __init__(self, mla: MLASpec, value_width: int, segments: Segments) -> None:
        self.mla, self.value_width, self.segments = mla, value_width, segments
        # of the last group's key and value: (its storage_key(), how to make it)
        self.made: list[tuple[tuple, Callable[[], Tensor]]] = []

    def make_kv(self, key_value: Tensor, k_pe: Tensor) -> tuple[Tensor, Tensor, Segments]:
        """Return key and value of a group, and the Segments of queries and keys. `key_value`:
        kv_b's outputs [keys, heads, nope + value]; `k_pe` [keys, heads, rope], rotated."""
        k_nope, value = key_value.split([self.mla.nope_dim, self.mla.value_dim], 2)
        makers = (functools.partial(key_heads, k_nope.detach(), k_pe.detach()),
                  functools.partial(padded, value.detach(), self.value_width))
        key, value = key_heads(k_nope, k_pe), padded(value, self.value_width)
        self.made = [(storage_key(x), make) for x, make in zip((key, value), makers)]
        return key, value, self.segments

    def pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return a function that returns the tensor."""
        makers = [make for made, make in self.made if made == storage_key(tensor)]
        tensor = tensor.detach()  # a kernel's output would keep its own graph alive
        return makers[0] if makers else lambda: tensor

    def unpack(self, make: Callable[[], Tensor]) -> Tensor:
        return make()


def padded(value: Tensor, width: int) -> Tensor:
    """Return values [n, heads, width], contiguous, padded with 0."""
    padding = width - value.shape[2]
    return F.pad(value, (0, padding)) if padding else value.contiguous()


def storage_key(tensor: Tensor) -> tuple:
    """Return what two tensors have in common if one is the other or a view of all of it."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()
