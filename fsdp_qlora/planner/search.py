"""Find the fastest plan that fits in memory.

    agree_on_plan()          measures the machine, make_workload(); all ranks take rank 0's plan
      choose_plan()          the plan to run, or DoesNotFit; refuse_flags() first
        find_plan()          affordable_plans() lists possible_plans(), each with predict_memory();
                             fastest_plan() takes the fastest of those that fit, by predict_time()
        check_plan(),        raise if it does not fit; suggest_flags() tries flags and names those
        check_host()         that help; check_host() on a CPU
        with_cuda_graphs()   CUDA graphs, where they make it faster

search_inputs.py holds what all of them read, possible_plans.py lists the plans.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.data.sampling import RowSampler
from fsdp_qlora.kernels import attention
from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.kernels.recurrence import RECURRENCES, recurrent_mixer_spec
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.micro_batch.context_parallel import MIN_TOKENS_PER_RANK
from fsdp_qlora.plan import FRAGMENTATION, Plan
from fsdp_qlora.planner.machine import Machine, measure_machine
from fsdp_qlora.planner.possible_plans import LONG_DOCUMENT, possible_plans
from fsdp_qlora.planner.search_inputs import (
    KernelFacts, SearchInputs, Workload, make_workload, why_no_capture)
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.ranks import all_gather_objects, raise_on_all_ranks


# fractions of the memory, FRAGMENTATION included. The fastest plan is sought among those that leave
# MIN_FREE, and of equally fast ones those that leave GOOD_FREE are preferred. If none leaves
# MIN_FREE, the smallest plan runs, unless it leaves less than FRAGMENTATION
MIN_FREE, GOOD_FREE = 0.07, 0.1
# ranks share micro-batches if a step then takes less than this fraction of its time
MUCH_FASTER = 0.8
SAME_TIME = 1.01  # predicted times that differ by this factor count as equal
# bytes of host memory that a process may pin for speed alone; pinning takes 0.2 s a GiB
MAX_PINNED_FOR_SPEED = 48 * 2**30


def agree_on_plan(
    config: Config, arch: Architecture, specs: tuple[LayerSpec, ...], sampler: RowSampler,
    eval_rows: Rows | None, memory_limit: int, device: torch.device, kernels: Kernels,
    optimizer_bytes_per_weight: float = 0.0,
) -> Plan:
    """Return the plan of this run, rank 0's on all ranks. All ranks must call this."""
    machine = measure_machine(getattr(torch, config.compute_dtype), device)
    if device.type == "cuda":  # so that reported peaks exclude the measurements above
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    attention_is_eager = any(kernel.is_eager for kernel in kernels.of_attention)
    recurrence_is_eager = kernels.recurrence in [each.eager for each in RECURRENCES.values()]
    workload = make_workload(config, sampler, eval_rows, dist.get_world_size())
    facts = KernelFacts(
        attention_is_eager=attention_is_eager, recurrence_is_eager=recurrence_is_eager,
        why_no_capture=why_no_capture(arch, machine, attention_is_eager, recurrence_is_eager),
        # no trial for short documents, for which can_save_attention() returns False in any case
        can_reuse_attention_results=workload.mean_document_tokens >= LONG_DOCUMENT
        and attention.can_reuse_attention_results(kernels, arch, device))
    search = SearchInputs(config, arch, specs, workload, memory_limit, machine, device, facts,
                          optimizer_bytes_per_weight)
    with raise_on_all_ranks():
        plan = choose_plan(search)
    # free host memory differs between nodes, so all ranks use rank 0's plan
    return Plan(**all_gather_objects(dataclasses.asdict(plan))[0])


def choose_plan(search: SearchInputs) -> Plan:
    """Return the plan to run. Raises ValueError with what would help."""
    config, workload = search.config, search.workload
    refuse_flags(config, search.arch, workload)
    plan = find_plan(search)
    if not search.only_host_limits:
        check_plan(plan, search)
    if search.device.type == "cpu":
        check_host(plan, search.machine)
    # micro-batches have several shapes if the rows do, or if a step's last micro-batches have fewer
    # rows
    least = workload.min_micro_batch_tokens(plan.context_parallel_size)
    n_groups = workload.world_size // plan.context_parallel_size
    n_rows = n_groups * (plan.micro_batch_tokens // least)
    uneven_micro_batches = (workload.uneven_lengths or workload.uneven_targets
                            or config.batch_size % n_rows > 0)
    return with_cuda_graphs(plan, search, uneven_micro_batches)


def refuse_flags(config: Config, arch: Architecture, workload: Workload) -> None:
    """Raise ValueError for flags that no plan for this model and these rows can satisfy."""
    if config.recompute.isdecimal() and int(config.recompute) > arch.n_layers:
        raise ValueError(f"--recompute {config.recompute}: the model has {arch.n_layers} layers")
    size = config.context_parallel_size or 1
    if size > 1 and recurrent_mixer_spec(arch):
        raise ValueError(f"--context_parallel_size {size}: a model with recurrent layers needs all"
                         " tokens of a row on one GPU")
    least = workload.min_micro_batch_tokens(size)
    if config.micro_batch_tokens and config.micro_batch_tokens < least:
        shared = f", {least} on each of {size} GPUs" if size > 1 else ""
        raise ValueError(f"--micro_batch_tokens {config.micro_batch_tokens}: the longest row has"
                         f" {least * size} tokens{shared}; use at least that or a shorter"
                         " --max_seq_len")


def find_plan(search: SearchInputs) -> Plan:
    """Return the best plan, without CUDA graphs; if none fits, the smallest one.

    Ranks share micro-batches of long rows if the plan does not fit otherwise, or if steps are much
    faster then, because they have fewer rows than there are ranks."""
    config, workload = search.config, search.workload

    def best_plan(context_parallel_size: int) -> Plan:
        return fastest_plan(affordable_plans(search, context_parallel_size), search)

    def fits_both(plan: Plan) -> bool:
        return plan.fits_both(search.usable_bytes, search.machine.free_host_bytes)

    best = best_plan(config.context_parallel_size or 1)
    if config.context_parallel_size or recurrent_mixer_spec(search.arch):
        return best
    has_idle_ranks = workload.max_step_tokens < workload.world_size * workload.max_document_tokens
    for size in range(2, workload.world_size + 1):
        fits = fits_both(best)
        is_long = workload.min_micro_batch_tokens(size) >= MIN_TOKENS_PER_RANK
        if workload.world_size % size or not is_long or (fits and not has_idle_ranks):
            continue
        plan = best_plan(size)
        is_faster = workload.step_seconds(plan) < MUCH_FASTER * workload.step_seconds(best)
        if fits_both(plan) and (is_faster or not fits):
            best = plan
    return best


def affordable_plans(search: SearchInputs, context_parallel_size: int) -> list[Plan]:
    """Return the possible plans that do not pin too much host memory. If none of them leaves
    MIN_FREE of the GPU's memory, all plans get the embedding in host memory, where that is
    possible."""
    arch, machine, usable_bytes = search.arch, search.machine, search.usable_bytes
    plans = list(possible_plans(search, context_parallel_size))
    if not plans:
        raise ValueError(f"a vocabulary of {arch.vocab_size} cannot be sharded over"
                         f" {search.config.shard_group_size} processes: use a smaller"
                         " --shard_group_size")
    fits = any(plan.fits(usable_bytes, MIN_FREE) for plan in plans)
    can_move_table = search.device.type == "cuda" and not machine.why_no_triton
    if not fits and can_move_table and (arch.per_layer_inputs or not arch.tied):
        # same results, at the cost of a copy of the tokens' rows for each micro-batch
        plans = [search.with_memory(dataclasses.replace(plan, embedding_on_host=True))
                 for plan in plans]
    runnable = [plan for plan in plans if plan.fits_both(usable_bytes, machine.free_host_bytes)]
    with_min_free = [plan for plan in runnable if plan.fits(usable_bytes, MIN_FREE)]
    needed = min(plan.host_bytes for plan in with_min_free or runnable or plans)
    # beyond what is needed, host memory is pinned only for speed
    allowed = min(needed + MAX_PINNED_FOR_SPEED, max(needed, machine.free_host_bytes / 2))
    return [plan for plan in plans if plan.host_bytes <= allowed]


def fastest_plan(plans: list[Plan], search: SearchInputs) -> Plan:
    """Return the plan to run, among those that leave MIN_FREE of the memory free.

    Among the plans that are as fast as the fastest, by SAME_TIME, it is the preferred one that
    leaves GOOD_FREE, else the smallest. If no plan leaves MIN_FREE, it is the smallest plan.
    """
    smallest = min(plans, key=lambda plan: plan.bytes)
    fitting = [p for p in plans if p.fits(search.usable_bytes, MIN_FREE)]
    fitting = [search.with_time(p) for p in fitting or [smallest]]
    fastest = min(p.seconds_per_token for p in fitting)
    near = [p for p in fitting if p.seconds_per_token <= SAME_TIME * fastest]
    with_good_free = [p for p in near if p.fits(search.usable_bytes, GOOD_FREE)]
    if with_good_free:
        return min(with_good_free, key=lambda plan: plan.tie_break)
    return min(near, key=lambda plan: plan.bytes)


class DoesNotFit(ValueError, MemoryError):
    """The run would need more memory than there is. It is a ValueError because the user's flags
    cause it, and a MemoryError for the exit code, see raise_on_all_ranks()."""

    def __init__(self, message: str, flags: str = "", plan: Plan | None = None) -> None:
        """`flags`: the run fits with these flags, as `plan`; "": no such flags were found."""
        super().__init__(message)
        self.flags, self.plan = flags, plan


def check_plan(plan: Plan, search: SearchInputs) -> None:
    """Raise DoesNotFit, with what would help, if the plan does not fit."""
    memory_limit, machine = search.memory_limit, search.machine
    if plan.host_bytes > machine.free_host_bytes:
        raise DoesNotFit(f"does not fit: needs {plan.host_bytes / 2**30:.1f} GiB of host memory per"
                         " process on this machine, but only"
                         f" {machine.free_host_bytes / 2**30:.1f} GiB are available. Offload less")
    if plan.fits(memory_limit):
        return
    flags, smaller = suggest_flags(plan, search)
    size = f"{smaller.bytes / 2**30:.1f} GiB per GPU"
    is_enough = smaller.fits_both(memory_limit, machine.free_host_bytes)
    if smaller.host_bytes:
        size += f" and {smaller.host_bytes / 2**30:.1f} GiB of host memory per process"
    advice = f"Add {flags}: {size}, predicted {1 / smaller.seconds_per_token:,.0f} tok/s/GPU"
    if not is_enough:
        advice = f"With {flags} it still needs {size}. Use more GPUs as well"
    text = (f"does not fit: predicted peak {plan.bytes / 2**30:.1f} GiB plus"
            f" {100 * FRAGMENTATION:.0f} % for fragmentation, but only"
            f" {memory_limit / 2**30:.1f} GiB per GPU are available. {advice}")
    raise DoesNotFit(text, flags if is_enough else "", smaller)


def suggest_flags(plan: Plan, search: SearchInputs) -> tuple[str, Plan]:
    """Return what helps if `plan` does not fit: the fewest flags, in the order in which to try
    them, that the user has not set, and the plan with them; all flags if they do not suffice."""
    config, workload = search.config, search.workload
    least = workload.min_micro_batch_tokens(1)
    shorter: dict[str, Any] = {"micro_batch_tokens": least}
    if plan.micro_batch_tokens <= least:  # a micro-batch is the longest row alone: shorten the rows
        shorter = {"micro_batch_tokens": config.micro_batch_tokens and least // 2,
                   "max_seq_len": min(least, config.max_seq_len or least) // 2}
    flags: list[str] = []
    for tried in ({"recompute": "all"}, {"offload_activations": True}, {"offload_params": True},
                  shorter):
        change: dict[str, Any] = {name: value for name, value in tried.items()
                                  if value not in (None, getattr(config, name))}
        if not change or "recompute" in change and config.recompute == "auto":
            continue
        config = dataclasses.replace(config, **change)
        if "max_seq_len" in change:
            mean = min(least // 2, workload.mean_document_tokens)
            workload = dataclasses.replace(
                workload, max_document_tokens=workload.max_document_tokens // 2,
                max_row_tokens=workload.max_row_tokens // 2, mean_document_tokens=mean)
        flags += [f"--{name}" if value is True else f"--{name} {value}"
                  for name, value in change.items()]
        plan = find_plan(dataclasses.replace(search, config=config, workload=workload))
        if plan.fits_both(search.memory_limit, search.machine.free_host_bytes):
            break
    return " ".join(flags), plan


def check_host(plan: Plan, machine: Machine) -> None:
    """Raise DoesNotFit if a plan for a CPU, which has only host memory, does not fit."""
    needed = plan.bytes + plan.host_bytes
    if needed > (1 - FRAGMENTATION) * machine.free_host_bytes:
        raise DoesNotFit(
            f"does not fit on this machine's CPU: predicted peak {needed / 2**30:.1f} GiB of host"
            f" memory per process, but only {machine.free_host_bytes / 2**30:.1f} GiB are"
            " available. Fewer processes, a smaller model, or a shorter --max_seq_len may fit")


def with_cuda_graphs(plan: Plan, search: SearchInputs, uneven_micro_batches: bool) -> Plan:
    """Return the plan, with CUDA graphs if the CPU is slower than the GPU, or with the reason why
    they are not used.

    Graphs never free their memory. If micro-batches have several shapes, that memory has gaps, and
    micro-batches without a graph need memory of their own: cuda_graph_micro_batches is 2. If all
    micro-batches have one shape, the memory of the runs before the capture is free again.
    """
    graphed = dataclasses.replace(
        plan, uses_cuda_graphs=True, cuda_graph_micro_batches=2 if uneven_micro_batches else 0)
    graphed = search.with_time(search.with_memory(graphed))
    why_no_capture = search.kernel_facts.why_no_capture
    reasons = (
        (plan.uses_fsdp, "FSDP2 gathers the weights"),
        (plan.offload_activations, "activations are offloaded"),
        (plan.context_parallel_size > 1, "ranks exchange keys and values"),
        (why_no_capture, why_no_capture),
        (plan.n_expert_ranges > 1, "ranges of experts wait for the GPU"),
        (graphed.seconds_per_token > 0.95 * plan.seconds_per_token, "the host is fast enough"),
        (not graphed.fits(search.usable_bytes), "no memory for them"))
    reason = next((text for is_so, text in reasons if is_so), "")
    return dataclasses.replace(plan, why_no_cuda_graphs=reason) if reason else graphed
