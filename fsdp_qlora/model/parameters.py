"""The parameters of the model: decoder layers, embedding, head and norm, and this rank's part of
them.

load.py fills them, model.py computes with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.kernels.offload import make_store
from fsdp_qlora.layer.layer import DecoderLayer, LayerSpec
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture


class ModelParameters(nn.Module):
    """Decoder layers, embedding, head and final norm, and how to run them: the attention kernels,
    and where activations are stored.

    Of embedding, head and per_layer_table each rank has its own rows, outside of FSDP2, which would
    gather them whole: 2.1 GB each for Llama-3-70B, and twice that while it copies.
    """

    layers: Sequence[DecoderLayer]  # an nn.ModuleList
    # filled by fill_model() in load.py, None before; a tied head is the embedding
    embedding: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    head: Tensor
    # of models with an input for each layer: the table, the projection with the values of its NF4,
    # the norm's weight
    per_layer_table: Tensor
    per_layer_projection: Tensor
    per_layer_norm: Tensor
    frequencies: list[tuple[Tensor, float]]  # of each of arch.ropes, see rope_frequencies()

    def __init__(
        self, arch: Architecture, specs: Sequence[LayerSpec], plan: Plan, kernels: Kernels,
        device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: of the processes that share one copy of the model; None: this process alone."""
        super().__init__()
        self.arch, self.plan, self.kernels, self.device = arch, plan, kernels, device
        self.store = make_store(plan, device)  # of what recomputed layers need for backward
        self.group, self.shard, self.shards = group, 0, 1
        if group:
            self.shard, self.shards = dist.get_rank(group), dist.get_world_size(group)
        self.own_rows = shard_range(arch.vocab_size, self.shard, self.shards)  # of all tables
        self.layers = nn.ModuleList(
            DecoderLayer(arch, spec, i, plan) for i, spec in enumerate(specs))
        self.embedding = self.norm = self.norm_bias = self.head = self.frequencies = None
        self.per_layer_table = self.per_layer_projection = self.per_layer_norm = None


def shard_range(n: int, shard: int, shards: int) -> range:
    """The rows of `n` that FSDP2 gives to a shard, as torch.chunk does."""
    size = math.ceil(n / shards)
    return range(min(shard * size, n), min((shard + 1) * size, n))
