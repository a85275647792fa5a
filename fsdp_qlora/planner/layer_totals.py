"""LayerTotals: sums over a model's layers, from which its memory and its time are predicted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.layer_costs.layer import LayerCosts
from fsdp_qlora.layer_costs.mla import MLACosts
from fsdp_qlora.plan import SAVE_POLICIES, Plan, SavePolicy
from fsdp_qlora.planner.time_constants import CONSTANTS
from fsdp_qlora.quant.blocks import BLOCKSIZE


@dataclasses.dataclass(frozen=True)
class LayerTotals:
    """Totals of a model's layers that the planner needs. Counts are sums over all layers unless the
    comment says otherwise."""

    # {costs of each different LayerSpec: index of its last layer among the first 0, 1, 2, .. ones;
    # -1: none}
    last_index: dict[LayerCosts, list[int]]
    # {SavePolicy: values per token that the first 0, 1, 2, .. layers save}
    saved_values: dict[SavePolicy, list[int]]
    packed_bytes: int  # of 4-bit weights and their scales
    largest_packed: int  # of one layer, at most
    n_small_values: int  # values of the tensors that every rank has whole, see small_tensors()
    # fp32 values of the second level of 4-bit scales, which every rank has whole
    n_nested_values: int
    n_vector_values: int  # values of norms and biases
    largest_vectors: int  # of one layer, at most
    layer_adapter_values: int  # values of ONE layer's adapter, the same for all layers
    n_weights: int  # 4-bit weights
    # weights that one token is multiplied by; those of slow matmuls count more, see LayerCosts
    active_weights: float
    # {SavePolicy: weights that backward multiplies by once more, if all layers save that}; here the
    # weights of slow matmuls do not count more, because TimeConstants were fitted without that
    recomputed_weights: dict[SavePolicy, float]
    largest_mlp_values: int  # values per token that the MLP of a layer saves, at most
    largest_attention_values: int  # values per token of a layer's results of attention, at most
    # values of a token's queries in a layer, mean over the layers; those of wide heads count more
    mean_query_width: float
    elementwise_values: int  # values per token that elementwise work reads or writes

    @property
    def mla_costs(self) -> MLACosts | None:
        """The costs of latent attention, which all layers have if the first has it; else None."""
        return next(iter(self.last_index)).mla_costs


@functools.lru_cache(8)
def sum_layers(specs: tuple[LayerSpec, ...]) -> LayerTotals:
    """Return the LayerTotals of a model's layers."""
    by_spec = {spec: LayerCosts(spec) for spec in dict.fromkeys(specs)}
    costs = [by_spec[spec] for spec in specs]

    def running_sum(policy: SavePolicy) -> list[int]:
        values = {layer_costs: layer_costs.saved_values(policy) for layer_costs in by_spec.values()}
        return list(itertools.accumulate((values[x] for x in costs), initial=0))

    def last_indices(layer_costs: LayerCosts) -> list[int]:
        return list(itertools.accumulate(
            (i if x is layer_costs else -1 for i, x in enumerate(costs)), max, initial=-1))

    bytes_each = [spec.n_blocks * (BLOCKSIZE // 2 + spec.scales_per_block) for spec in specs]
    vectors_each = [spec.n_vector_values for spec in specs]
    return LayerTotals(
        last_index={layer_costs: last_indices(layer_costs) for layer_costs in by_spec.values()},
        saved_values={policy: running_sum(policy) for policy in SAVE_POLICIES},
        packed_bytes=sum(bytes_each), largest_packed=max(bytes_each),
        n_small_values=sum(math.prod(shape) for spec in specs
                           for shape in spec.small_tensors.values()),
        n_nested_values=sum(spec.n_nested_values for spec in specs),
        n_vector_values=sum(vectors_each), largest_vectors=max(vectors_each),
        layer_adapter_values=specs[0].n_adapter_values,
        n_weights=sum(spec.n_weights for spec in specs),
        active_weights=sum(layer.active_weights(by_time=True) for layer in costs),
        recomputed_weights={
            policy: sum(layer.recomputed_weights(policy) for layer in costs)
            for policy in SAVE_POLICIES},
        largest_mlp_values=max(layer.mlp_sublayer.saved_values for layer in costs),
        largest_attention_values=max(layer.mixer_sublayer.attention_values for layer in costs),
        mean_query_width=sum(
            layer.mixer_sublayer.query_width * attention_slowdown(layer.arch.head_dim)
            for layer in costs) / len(costs),
        elementwise_values=sum(sublayer.elementwise_values for layer in costs
                               for sublayer in (layer.mixer_sublayer, layer.mlp_sublayer)))


def attention_slowdown(head_dim: int) -> float:
    """Return how many times as long the attention of a head takes as its width tells."""
    if head_dim > 256:
        return CONSTANTS.widest_head_slowdown
    return CONSTANTS.wide_head_slowdown if head_dim > 128 else 1


def saved_bytes(
    plan: Plan, totals: LayerTotals, value_bytes: int, first: int | None = None
) -> tuple[int, int]:
    """Return the bytes that recomputed layers save, and those that the others save: of the `first`
    layers, None for all. `value_bytes`: the bytes of one value for each token of a micro-batch."""
    n_layers = plan.n_layers if first is None else first
    recomputed = others = 0
    for policy, layers in plan.save_policies():
        values = totals.saved_values[policy]
        n_values = values[min(layers.stop, n_layers)] - values[min(layers.start, n_layers)]
        n_bytes = n_values * value_bytes
        if layers.start < plan.n_recomputed:
            recomputed += n_bytes
        else:
            others += n_bytes
    return recomputed, others
