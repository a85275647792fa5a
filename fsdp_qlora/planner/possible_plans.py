"""Possible plans: those from which the search chooses, each with its predicted memory.

    possible_plans()         all that the flags allow
      shard_group_sizes()    GPUs per copy of the model
      micro_batch_sizes()    tokens of a micro-batch
      recomputed_counts()    how many layers are recomputed
      ways_to_recompute()    what these save and reuse; can_save_attention(), saved_counts()
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fsdp_qlora.config import Config
from fsdp_qlora.data.collate import round_up
from fsdp_qlora.layer_costs.layer import LayerCosts
from fsdp_qlora.model.parameters import shard_range
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.search_inputs import SearchInputs
from fsdp_qlora.pretrained.architecture import Architecture


# tokens of a mean document, from which attention's results may be saved: its forward then takes
# longer than the matmul that saving mid_residual saves. With 8,192 an 8B is 2 % faster, predicted
LONG_DOCUMENT = 8192


def possible_plans(search: SearchInputs, context_parallel_size: int) -> Iterator[Plan]:
    """Yield all plans that the flags allow."""
    config, arch, workload = search.config, search.arch, search.workload
    is_varlen = workload.is_varlen(context_parallel_size)
    plan_with = functools.partial(
        Plan, compute_dtype=config.compute_dtype, n_layers=arch.n_layers,
        offload_activations=config.offload_activations, offload_params=config.offload_params,
        is_varlen=is_varlen, attention_is_eager=search.kernel_facts.attention_is_eager,
        recurrence_is_eager=search.kernel_facts.recurrence_is_eager,
        fuses_elementwise=search.device.type == "cuda",
        context_parallel_size=context_parallel_size,
        optimizer_bytes_per_weight=search.optimizer_bytes_per_weight,
        n_token_rows=len(config.trainable_tokens or ()) * arch.n_token_tables)
    saves_attention = can_save_attention(search) and not is_varlen
    n_experts = arch.moe.n_experts if arch.moe else 1
    ranges = sorted({min(n, n_experts) for n in (1, 4, 16)})
    for n_shards, n_tokens, n_recomputed in itertools.product(
            shard_group_sizes(search), micro_batch_sizes(search, context_parallel_size),
            recomputed_counts(config, arch)):
        reshards = [True] if n_shards == 1 or config.offload_params else [True, False]
        ways = list(ways_to_recompute(search, n_recomputed, saves_attention))
        for reshard, way, n_ranges in itertools.product(reshards, ways, ranges):
            plan = plan_with(
                shard_group_size=n_shards, reshard_after_forward=reshard,
                micro_batch_tokens=n_tokens, n_recomputed=n_recomputed, n_expert_ranges=n_ranges,
                **way._asdict())
            yield search.with_memory(plan)


def shard_group_sizes(search: SearchInputs) -> list[int]:
    """Return the possible --shard_group_size, ascending, with which each process has rows of the
    vocabulary."""
    given, n = search.config.shard_group_size, search.workload.world_size
    sizes = [given] if given else [size for size in range(1, n + 1) if n % size == 0]
    return [size for size in sizes if shard_range(search.arch.vocab_size, size - 1, size)]


def micro_batch_sizes(search: SearchInputs, context_parallel_size: int) -> list[int]:
    """Return the possible --micro_batch_tokens, ascending."""
    if search.config.micro_batch_tokens:
        return [search.config.micro_batch_tokens]
    workload = search.workload
    longest = workload.min_micro_batch_tokens(context_parallel_size)
    # by factors of 2, up to the tokens of a step per process
    sizes = [max(longest, math.ceil(workload.max_step_tokens / workload.world_size))]
    while sizes[-1] > longest:
        sizes.append(max(longest, math.ceil(sizes[-1] / 2)))
    return sorted({n if n == longest else round_up(n, search.device) for n in sizes})


def recomputed_counts(config: Config, arch: Architecture) -> Sequence[int]:
    """Return the possible numbers of recomputed layers, ascending."""
    if config.recompute == "auto":
        return range(arch.n_layers + 1)
    if config.recompute == "all":
        return [arch.n_layers]
    return [0 if config.recompute == "none" else int(config.recompute)]


class WayToRecompute(NamedTuple):
    """The fields of a Plan that say what its recomputed layers save and reuse."""

    save_mid_residual: bool
    reuse_dequantized: bool
    n_mlp_saved: int
    n_attention_saved: int


def ways_to_recompute(
    search: SearchInputs, n_recomputed: int, saves_attention: bool
) -> Iterator[WayToRecompute]:
    """Yield what `n_recomputed` layers may save and reuse. `saves_attention`: they may save the
    results of attention."""
    config, arch = search.config, search.arch
    # if all layers are recomputed, they can also save what their MLP needs, in host memory
    can_save_mlp = (config.offload_activations and config.recompute == "auto"
                    and not arch.moe and not arch.parallel_residual
                    and n_recomputed == arch.n_layers)
    n_saved = list(saved_counts(
        n_recomputed, range(n_recomputed + 1) if can_save_mlp else (0,), saves_attention,
        in_part=n_recomputed == recomputed_counts(config, arch)[-1]))
    # in a parallel layer the MLP reads x
    mid_residual = (False,) if arch.parallel_residual else (True, False)
    options = list(itertools.product(mid_residual, (True, False)))
    # no layer recomputed: all options are the same plan
    for (saves_mid, reuses), (n_mlp, n_attention) in itertools.product(
            options if n_recomputed else options[-1:], n_saved):
        if not (saves_mid and n_attention):  # attention's results are worth more
            yield WayToRecompute(saves_mid, reuses, n_mlp, n_attention)


def can_save_attention(search: SearchInputs) -> bool:
    """Return True if recomputed layers may save the results of attention. A parallel layer may not,
    and no layer that has another one's keys."""
    arch = search.arch
    return (search.kernel_facts.can_reuse_attention_results
            and search.workload.mean_document_tokens >= LONG_DOCUMENT
            and not arch.parallel_residual and set(arch.kv_sources) == {None}
            and all(LayerCosts(spec).mixer_sublayer.attention_values for spec in search.specs))


def saved_counts(
    n: int, mlp_counts: Iterable[int], saves_attention: bool, in_part: bool
) -> Iterator[tuple[int, int]]:
    """Yield (n_mlp_saved, n_attention_saved) of n recomputed layers. With `saves_attention`, none
    or all of the layers that do not save their MLP's values save the results of attention; with
    `in_part`, where no layer saves its MLP's values, also an eighth of them, two eighths, .."""
    for n_mlp in mlp_counts:
        eighths = range(0, 9, 1 if in_part and not n_mlp else 8) if saves_attention else (0,)
        yield from ((n_mlp, (n - n_mlp) * eighth // 8) for eighth in eighths)
