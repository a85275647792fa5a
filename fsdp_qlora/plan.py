"""Plan: what is sharded, recomputed and offloaded, and its predicted memory and time.

planner/search.py finds it.
"""

from __future__ import annotations

import dataclasses

# the share of the GPU's memory that fragmentation takes: with 22.5 GiB a plan of 21.4 GiB ran, one
# of 21.8 GiB did not
GAPS = 0.04


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is laid out on the GPUs; the memory and time that it is predicted to take."""

    compute_dtype: str
    n_layers: int
    shard_group_size: int  # processes that share one copy of the model
    reshard_after_forward: bool  # free a layer's gathered weights until its backward (FULL_SHARD)
    micro_batch_tokens: int  # at most in one micro-batch
    recomputed: int  # how many layers, the first ones, are recomputed in backward
    save_mid_residual: bool  # recomputed layers also save the sum after the mixer
    reuse_dequantized: bool  # backward of these keeps dequantized weights for a second use
    offload_activations: bool
    offload_params: bool
    n_mlp_saved: int = 0  # recomputed layers, the last ones, that save what their MLP needs
    expert_ranges: int = 1  # experts are dequantized in so many ranges, one after the other
    plain_attention: bool = False  # whether a layer's attention runs in plain torch
    plain_recurrence: bool = False  # the same of mixers with a state
    fused: bool = True  # whether elementwise work is compiled to one kernel each, as on a GPU
    embedding_on_host: bool = False  # the tables that no product reads
    state_bytes: float = 0.0  # of the optimizer's state in GPU memory, for each weight
    graphs: bool = False  # whether CUDA graphs are used
    why_no_graphs: str = ""
    graph_room: int = 0  # memory that graphs reserve, in whole micro-batches, see use_graphs()
    # {kind: bytes} at a step's peak
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0  # pinned, of one process
    token_seconds: float = 0.0  # of one GPU, predicted

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 gathers the weights: they are sharded, or offloaded to the host."""
        return self.shard_group_size > 1 or self.offload_params

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())

    def saves(self, index: int) -> str:
        """What a layer saves for backward, see LayerFunction."""
        if index >= self.recomputed:
            return "all"
        if index >= self.recomputed - self.n_mlp_saved:
            return "mlp"
        return "mid_residual" if self.save_mid_residual else "input"

    @property
    def preference(self) -> tuple[int, ...]:
        """Among plans of the same speed the lowest is chosen: small groups, small micro-batches,
        few layers recomputed whole, few expert ranges. It prefers freeing gathered weights, and
        otherwise keeps the most activations and weights."""
        return (self.shard_group_size, self.micro_batch_tokens, self.recomputed - self.n_mlp_saved,
                self.expert_ranges, not self.reshard_after_forward, not self.save_mid_residual,
                not self.reuse_dequantized)

    def fits(self, limit: float, spare: float = GAPS) -> bool:
        """Whether it leaves this share of `limit` bytes free; 0: there is no limit."""
        return not limit or self.bytes <= (1 - spare) * limit

    def fits_both(self, limit: float, host_bytes: float) -> bool:
        """Whether it fits on the GPU and, as far as it is offloaded, into `host_bytes`."""
        return self.fits(limit) and self.host_bytes <= host_bytes
