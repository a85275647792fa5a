"""The parameters of the model: decoder layers, embedding, lm_head and norm, and this rank's part of
them.

load.py fills them, model.py computes with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.layer.layer import DecoderLayer
from fsdp_qlora.layer.offload import make_store
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.micro_batch.context_parallel import ONLY_PROCESS, ContextGroup
from fsdp_qlora.micro_batch.micro_batch import MicroBatchFormat
from fsdp_qlora.model.token_rows import TokenRows
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.rope import rope_frequencies
from fsdp_qlora.ranks import all_gather


# bytes of logits alive at once, and of embeddings before their sum
CHUNK_BYTES = 256 * 2**20


class ModelParameters(nn.Module):
    """Decoder layers, embedding, lm_head and final norm, with the attention kernels and the store
    of activations. Apart from Model, so that embedding.py and lm_head.py can name it without an
    import cycle.

    Each rank has its own rows of embedding, lm_head and per_layer_table, outside of FSDP2, which
    would gather them whole: 2.1 GB each for Llama-3-70B, and twice that while it copies.
    """

    layers: Sequence[DecoderLayer]  # an nn.ModuleList
    # set by fill_model() in load.py, None before; a tied lm_head is the embedding
    embedding: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    lm_head: Tensor
    # for models with an input for each layer: the table, the projection with the values of its NF4,
    # the norm's weight
    per_layer_table: Tensor
    per_layer_projection: Tensor
    per_layer_norm: Tensor
    frequencies: list[tuple[Tensor, float]]  # one for each of arch.ropes, by set_frequencies()
    token_rows: TokenRows | None = None  # set by Adapter, if there are trainable tokens

    def __init__(
        self, arch: Architecture, specs: Sequence[LayerSpec], plan: Plan, kernels: Kernels,
        device: torch.device, shard_group: dist.ProcessGroup | None = None,
        context_group: ContextGroup = ONLY_PROCESS
    ) -> None:
        """`shard_group`: the processes that share one copy of the model; None: this process alone.
        `context_group`: those that share a micro-batch."""
        super().__init__()
        self.arch, self.plan, self.kernels, self.device = arch, plan, kernels, device
        self.store = make_store(plan, device)  # what recomputed layers save for backward
        self.context_group = context_group
        self.shard_group, self.shard_rank, self.shard_group_size = shard_group, 0, 1
        if shard_group:
            self.shard_rank = dist.get_rank(shard_group)
            self.shard_group_size = dist.get_world_size(shard_group)
        # the same rows of every table
        self.local_rows = shard_range(arch.vocab_size, self.shard_rank, self.shard_group_size)
        self.layers = nn.ModuleList(
            DecoderLayer(spec, i, plan) for i, spec in enumerate(specs))
        self.embedding = self.norm = self.norm_bias = self.lm_head = self.frequencies = None
        self.lm_head_bias: Tensor | None = None  # of local_rows; None: the lm_head has no bias
        self.per_layer_table = self.per_layer_projection = self.per_layer_norm = None

    @property
    def micro_batch_format(self) -> MicroBatchFormat:
        """The format of this run's micro-batches."""
        return MicroBatchFormat(
            self.plan.micro_batch_tokens, self.device, self.context_group,
            self.plan.uses_cuda_graphs, self.kernels.recurrence is not None)

    def set_frequencies(
        self, model_config: transformers.PreTrainedConfig, max_seq_len: int
    ) -> None:
        """Set `frequencies`, for texts of at most max_seq_len tokens."""
        self.frequencies = []
        for rope in self.arch.ropes:
            inverse, factor = rope_frequencies(rope, self.arch, max_seq_len, model_config)
            self.frequencies.append((inverse.to(self.device), factor))

    def all_gather(self, own: Tensor) -> Tensor:
        """Return [ranks, *shape], the tensors [*shape] of the ranks that share this copy of the
        model. All ranks of the shard group must call this."""
        return all_gather(own, self.shard_group) if self.shard_group_size > 1 else own[None]

    def write_token_rows(self) -> None:
        """Copy the trained rows of --trainable_tokens into the tables."""
        if self.token_rows:
            self.token_rows.write(self.embedding, self.lm_head)


def shard_range(n: int, shard: int, n_shards: int) -> range:
    """Return the rows of `n` that FSDP2 assigns to a shard, which are those of torch.chunk."""
    size = math.ceil(n / n_shards)
    return range(min(shard * size, n), min((shard + 1) * size, n))
