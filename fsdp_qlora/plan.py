"""Plan: what is sharded, recomputed and offloaded, and its predicted memory and time.

planner/search.py finds it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar, NamedTuple

import torch


class SavePolicy(NamedTuple):
    """What a layer saves for backward, besides its input x. Backward computes the rest again."""

    name: str
    mixer: bool = False  # the mixer's tensors
    mlp: bool = False  # the MLP's tensors
    mid_residual: bool = False  # the sum after the mixer, alone
    attention: bool = False  # attention's results

    @property
    def recomputes_mid_residual(self) -> bool:
        """True if backward computes the sum after the mixer again, to run the MLP."""
        return not (self.mlp or self.mid_residual)

    @property
    def n_puts(self) -> int:
        """Number of the layer's put()s into the store of activations, see LayerFunction."""
        return 0 if self.mixer else 1 + (self.mlp or self.mid_residual)


# the policies; each comment says what backward computes again
SAVE_ALL = SavePolicy("all", mixer=True, mlp=True)  # nothing
SAVE_MLP = SavePolicy("mlp", mlp=True)  # the mixer
SAVE_MID_RESIDUAL = SavePolicy("mid_residual", mid_residual=True)  # mixer; MLP, in slices of tokens
SAVE_ATTENTION = SavePolicy("attention", attention=True)  # mixer but its kernel; MLP, in slices
SAVE_INPUT = SavePolicy("input")  # mixer; MLP, in slices
SAVE_POLICIES = SAVE_ALL, SAVE_MLP, SAVE_MID_RESIDUAL, SAVE_ATTENTION, SAVE_INPUT

# fraction of the GPU's memory lost to fragmentation: with 22.5 GiB a plan of 21.4 GiB ran, one of
# 21.8 GiB did not
FRAGMENTATION = 0.04


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The distribution of the work over the GPUs, and its predicted memory and time."""

    # ---- the same in every plan
    # tokens of a recomputed MLP at once; fewer make its matmuls slower
    mlp_slice_tokens: ClassVar[int] = 4096
    # tokens of recomputed experts at once. Each slice dequantizes all experts three times. In a
    # layer of gpt-oss-20b that takes 3 ms of a slice's 100 on an H100 (counted), so predict_time()
    # counts one slice alone
    expert_slice_tokens: ClassVar[int] = 65536

    # ---- given: by flags, model, rows and machine
    compute_dtype: str
    n_layers: int
    offload_activations: bool
    offload_params: bool
    # attention of a micro-batch is one call for documents of any lengths or for short pieces of
    # them; False: documents have one length, or long pieces run one after the other
    is_varlen: bool = False
    attention_is_eager: bool = False  # a layer's attention runs in plain torch
    recurrence_is_eager: bool = False  # a mixer with a state runs in plain torch
    # each elementwise function is compiled to one kernel, as on a GPU
    fuses_elementwise: bool = True
    # of the optimizer's states in GPU memory, for each trained weight
    optimizer_bytes_per_weight: float = 0.0
    n_token_rows: int = 0  # rows of the embedding and of the lm_head that are trained

    # ---- decided
    shard_group_size: int  # processes that share one copy of the model
    reshard_after_forward: bool  # free a layer's gathered weights until its backward (FULL_SHARD)
    micro_batch_tokens: int  # maximum per micro-batch
    n_recomputed: int  # number of layers, the first ones, that are recomputed in backward
    save_mid_residual: bool  # recomputed layers also save the sum after the mixer
    reuse_dequantized: bool  # their backward keeps dequantized weights for a second use
    n_mlp_saved: int = 0  # recomputed layers, the last ones, that save what their MLP needs
    n_attention_saved: int = 0  # the last ones before those, that save the results of attention
    n_expert_ranges: int = 1  # ranges in which experts are dequantized, one after the other
    context_parallel_size: int = 1  # processes that share each micro-batch
    embedding_on_host: bool = False  # the tables that no matmul reads are in host memory
    uses_cuda_graphs: bool = False
    why_no_cuda_graphs: str = ""
    # memory that graphs reserve, in whole micro-batches, see with_cuda_graphs()
    cuda_graph_micro_batches: int = 0

    # ---- predicted
    # {kind, as printed: bytes} at a step's peak, see predict_memory()
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0  # pinned host memory of one process
    seconds_per_token: float = 0.0  # predicted seconds of one GPU per token

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of `compute_dtype`."""
        dtype: torch.dtype = getattr(torch, self.compute_dtype)
        return dtype

    @property
    def uses_fsdp(self) -> bool:
        """True if FSDP2 gathers the weights: they are sharded, or offloaded to host memory."""
        return self.shard_group_size > 1 or self.offload_params

    @property
    def visible_keys_per_token(self) -> float:
        """Number of keys that the two pieces of a rank see, for each of its tokens, if ranks share
        micro-batches."""
        return self.context_parallel_size + 0.5

    @property
    def n_copied_at_once(self) -> int:
        """Number of put()s whose copies to host memory, or back, may run at the same time. One is
        enough for a layer's inputs. What an MLP needs is several times as large, and the next
        layer's inputs follow it at once."""
        return 2 if self.n_mlp_saved else 1

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    def save_policies(self) -> list[tuple[SavePolicy, range]]:
        """Return [(what layers save for backward, these layers)], in the order of the layers."""
        first_mlp = self.n_recomputed - self.n_mlp_saved
        bounds = 0, first_mlp - self.n_attention_saved, first_mlp, self.n_recomputed, self.n_layers
        policies = (SAVE_MID_RESIDUAL if self.save_mid_residual else SAVE_INPUT,
                    SAVE_ATTENTION, SAVE_MLP, SAVE_ALL)
        return [(policy, range(start, stop)) for policy, (start, stop) in zip(
            policies, itertools.pairwise(bounds)) if start < stop]

    def save_policy(self, index: int) -> SavePolicy:
        """Return what a layer saves for backward."""
        return next(policy for policy, layers in self.save_policies() if index in layers)

    @property
    def tie_break(self) -> tuple[int, ...]:
        """Sort key among plans of the same speed; the lowest is chosen: small groups, small
        micro-batches, few layers recomputed whole, few expert ranges. It prefers freeing gathered
        weights, and otherwise keeping the most activations and weights."""
        return (self.shard_group_size, self.micro_batch_tokens,
                self.n_recomputed - self.n_mlp_saved, self.n_expert_ranges,
                not self.reshard_after_forward, not self.save_mid_residual,
                not self.reuse_dequantized, -self.n_attention_saved)

    def fits(self, memory_limit: float, spare: float = FRAGMENTATION) -> bool:
        """Return True if the plan leaves this fraction of `memory_limit` bytes free; a limit of 0
        means none."""
        return not memory_limit or self.bytes <= (1 - spare) * memory_limit

    def fits_both(self, memory_limit: float, free_host_bytes: float) -> bool:
        """Return True if the plan fits on the GPU, and its offloaded part in `free_host_bytes`."""
        return self.fits(memory_limit) and self.host_bytes <= free_host_bytes
