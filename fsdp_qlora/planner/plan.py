"""The plan: of all plans that fit into memory, the one predicted to be the fastest.

Depends on costs, which predicts memory and time, and machine. What the plan decides is done by the
script, model and layer.
"""

import dataclasses
import itertools
import math

import torch
import torch.distributed as dist

from fsdp_qlora.data.bins import round_up, step_rows
from fsdp_qlora.model.attention import document_attention
from fsdp_qlora.planner.costs import predict_memory, predict_time
from fsdp_qlora.model.grouped import why_no_grouped_mm
from fsdp_qlora.planner.machine import host_share, measure_machine
from fsdp_qlora.quant.nf4 import why_no_triton
from fsdp_qlora.run.ranks import gather_objects, together
from fsdp_qlora.model.head import shard_range

GAPS = 0.04  # of the GPU's memory, lost to fragmentation: of 22.5 GiB a plan of 21.4 ran, 21.8 not
SPARE, AMPLE_SPARE = 0.07, 0.1  # of it that a plan must leave free, GAPS included; that it should
SAME_TIME = 1.01  # predicted times that differ by this factor count as equal
HOST_SPARE = 48 * 2**30  # bytes a process may pin for speed alone; pinning takes 0.2 s a GiB


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is laid out on the GPUs; the memory and time that it is predicted to take."""

    compute_dtype: str
    n_layers: int
    shard_group_size: int  # processes that share one copy of the model
    reshard_after_forward: bool  # free a layer's gathered weights until its backward (FULL_SHARD)
    bin_tokens: int  # at most in one bin
    recomputed: int  # how many layers, the first ones, are recomputed in backward
    keep_middle: bool  # these keep the sum after attention, too
    hold_weights: bool  # their backward keeps dequantised weights for a second use
    offload_activations: bool
    offload_params: bool
    n_mlp_kept: int = 0  # recomputed layers, the last ones, that keep what their MLP needs
    expert_ranges: int = 1  # experts are dequantised in so many ranges, one after the other
    embedding_on_host: bool = False
    graphs: bool = False  # whether CUDA graphs are used
    why_no_graphs: str = ""
    graph_room: int = 0  # memory that graphs reserve, in whole bins, see use_graphs()
    memory: dict = dataclasses.field(default_factory=dict)  # {kind: bytes} at a step's peak
    host_bytes: int = 0  # pinned, of one process
    token_seconds: float = 0.0  # of one GPU, predicted

    @property
    def uses_fsdp(self):
        """Whether FSDP2 brings the weights: they are sharded, or offloaded to the host."""
        return self.shard_group_size > 1 or self.offload_params

    @property
    def bytes(self):
        return sum(self.memory.values())

    def keeps(self, index):
        """What a layer keeps from forward to backward, see LayerFunction."""
        if index >= self.recomputed:
            return "all"
        if index >= self.recomputed - self.n_mlp_kept:
            return "mlp"
        return "middle" if self.keep_middle else "x"

    @property
    def preference(self):
        """Of plans that are as fast, the one with the lowest is run: it has small groups, small
        bins, few layers recomputed whole, few expert ranges; it frees gathered weights, and else
        keeps most."""
        return (self.shard_group_size, self.bin_tokens, self.recomputed - self.n_mlp_kept,
                self.expert_ranges, not self.reshard_after_forward, not self.keep_middle,
                not self.hold_weights)

    def fits(self, limit, spare=GAPS):
        return not limit or self.bytes <= (1 - spare) * limit


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a run gives its processes to do, as far as the plan depends on it."""

    tokens: int  # the most that one of the first 200 steps has, over all processes
    longest: int  # tokens that a bin must hold at least: of the longest document, or pair of them
    mean_document_tokens: float
    uneven: bool  # whether training rows differ in length or in how much of them is trained
    world_size: int
    device: torch.device
    why_no_capture: str = ""  # why CUDA graphs cannot capture a layer; "" if they can


def possible_plans(config, arch, layouts, workload):
    """All plans that the flags leave open."""
    longest, world_size = workload.longest, workload.world_size
    groups = [n for n in range(1, world_size + 1) if world_size % n == 0]
    groups = [config.shard_group_size] if config.shard_group_size else groups
    counts = {"all": [arch.n_layers], "none": [0], "auto": range(arch.n_layers + 1)}
    counts = counts.get(config.recompute) or [int(config.recompute)]
    sizes = [config.micro_batch_tokens]
    if not config.micro_batch_tokens:  # by factors of 2 up to what a step has for each process
        sizes = [max(longest, math.ceil(workload.tokens / world_size))]
        while sizes[0] > longest:
            sizes.insert(0, max(longest, math.ceil(sizes[0] / 2)))
        sizes = sorted({n if n == longest else round_up(n, workload.device) for n in sizes})
    keep_middle = (False,) if arch.parallel else (True, False)  # there the MLP reads x
    keep = list(itertools.product(keep_middle, (True, False)))
    n_experts = arch.mixture.n_experts if arch.mixture else 1
    ranges = sorted({min(n, n_experts) for n in (1, 4, 16)})
    # in host memory layers can keep what their MLP needs, besides, if all are recomputed
    can_keep_mlp = (config.offload_activations and config.recompute == "auto"
                    and not arch.mixture and not arch.parallel)
    for shards, bin_tokens, n in itertools.product(groups, sizes, counts):
        if shard_range(arch.vocab_size, shards - 1, shards):  # else a process would have no rows
            reshards = [True] if shards == 1 or config.offload_params else [True, False]
            mlp_counts = range(n + 1) if can_keep_mlp and n == arch.n_layers else (0,)
            for reshard, (middle, hold), n_mlp_kept, n_ranges in itertools.product(
                reshards, keep if n else keep[-1:], mlp_counts, ranges
            ):
                plan = Plan(config.compute_dtype, arch.n_layers, shards, reshard, bin_tokens, n,
                            middle, hold, config.offload_activations, config.offload_params,
                            n_mlp_kept, n_ranges)
                yield predict_memory(plan, arch, layouts)


def choose_plan(config, arch, layouts, workload, limit, machine):
    """The plan to run; raises ValueError with what would help.

    Plans must leave SPARE of the memory, `limit` bytes, free. Of those that are as fast as the
    fastest, by SAME_TIME, the preferred one that leaves AMPLE_SPARE is chosen, else the smallest.
    If no plan leaves SPARE, the smallest plan is chosen, which must leave GAPS.
    """
    longest, device = workload.longest, workload.device
    if config.recompute.isdecimal() and int(config.recompute) > arch.n_layers:
        raise ValueError(f"--recompute {config.recompute}: the model has {arch.n_layers} layers")
    if config.micro_batch_tokens and config.micro_batch_tokens < longest:
        raise ValueError(f"--micro_batch_tokens {config.micro_batch_tokens}: the longest row has"
                         f" {longest} tokens; use at least that or a shorter --max_seq_len")
    if is_by_host := device.type == "cpu" and not limit:
        limit = host_share()
    plans = list(possible_plans(config, arch, layouts, workload))
    if not plans:
        raise ValueError(f"a vocabulary of {arch.vocab_size} cannot be shared by"
                         f" {config.shard_group_size} processes: use a smaller --shard_group_size")
    needed = min(plan.host_bytes for plan in plans)
    # beyond what is needed, host memory is pinned for speed alone
    allowed = min(needed + HOST_SPARE, max(needed, host_share() / 2))
    plans = [plan for plan in plans if plan.host_bytes <= allowed]
    if not any(plan.fits(limit, SPARE) for plan in plans) and device.type == "cuda" and not (
        arch.tied or why_no_triton()
    ):  # the same numbers, at the price of a copy of the tokens' rows for each micro-batch
        plans = [predict_memory(dataclasses.replace(plan, embedding_on_host=True), arch, layouts)
                 for plan in plans]
    plan = min(plans, key=lambda plan: plan.bytes)
    fitting = [p for p in plans if p.fits(limit, SPARE)]
    fitting = [predict_time(p, arch, layouts, machine, workload.mean_document_tokens)
               for p in fitting or [plan]]
    fastest = min(p.token_seconds for p in fitting)
    near = [p for p in fitting if p.token_seconds <= SAME_TIME * fastest]
    roomy = [p for p in near if p.fits(limit, AMPLE_SPARE)]
    if roomy:
        plan = min(roomy, key=lambda plan: plan.preference)
    else:
        plan = min(near, key=lambda plan: plan.bytes)
    if not is_by_host:
        check_plan(plan, arch, layouts, longest, limit, config.recompute == "auto")
    if device.type == "cpu":
        check_host(plan)
    # bins have several shapes if the rows have, or if a step's last bins hold fewer rows
    n_rows = workload.world_size * (plan.bin_tokens // longest)
    uneven_bins = workload.uneven or config.batch_size % n_rows > 0
    return use_graphs(plan, arch, layouts, machine, limit, workload, uneven_bins)


def use_graphs(plan, arch, layouts, machine, limit, workload, uneven_bins):
    """The plan, with CUDA graphs where the host is slower than the GPU, or why they are not used.

    Graphs keep their memory for good. If bins have several shapes, there are gaps in it, and bins
    without a graph need theirs besides: graph_room is 2 bins. If all have one shape, what ran
    before the capture is free by then.
    """
    graphed = dataclasses.replace(plan, graphs=True, graph_room=2 if uneven_bins else 0)
    graphed = predict_memory(graphed, arch, layouts)
    graphed = predict_time(graphed, arch, layouts, machine, workload.mean_document_tokens)
    reasons = {
        "FSDP2 brings the weights": plan.uses_fsdp,
        "activations are offloaded": plan.offload_activations,
        workload.why_no_capture: workload.why_no_capture,
        "ranges of experts wait for the GPU": plan.expert_ranges > 1,
        "the host is fast enough": graphed.token_seconds > 0.95 * plan.token_seconds,
        "no memory for them": not graphed.fits(limit)}
    reason = next((text for text, is_so in reasons.items() if is_so), "")
    return dataclasses.replace(plan, why_no_graphs=reason) if reason else graphed


class DoesNotFit(ValueError, MemoryError):
    """The run would need more memory than there is: a ValueError, as what the user asked for cannot
    be, and a MemoryError for its exit code, see together()."""


def check_host(plan):
    """Raise DoesNotFit if a plan for a CPU, where all is host memory, does not fit."""
    needed, share = plan.bytes + plan.host_bytes, host_share()
    if needed > (1 - GAPS) * share:
        raise DoesNotFit(
            f"this does not fit on this machine's CPU: predicted peak {needed / 2**30:.1f} GiB of"
            f" host memory for each process, and {share / 2**30:.1f} GiB are available: fewer"
            " processes, a smaller model, or a shorter --max_seq_len may fit")


def check_plan(plan, arch, layouts, longest, limit, recompute_is_auto):
    """Raise DoesNotFit, with what would help, if the plan does not fit."""
    if plan.host_bytes > (share := host_share()):
        raise DoesNotFit(f"this takes {plan.host_bytes / 2**30:.1f} GiB of host memory on this"
                         f" machine for each process, and {share / 2**30:.1f} GiB are available:"
                         " offload less")
    if plan.fits(limit):
        return
    flags, smaller = [], plan
    fewer, shorter = longest, f"--micro_batch_tokens {longest}"
    if plan.bin_tokens <= longest:
        fewer, shorter = longest // 2, f"--max_seq_len {longest // 2}"
    for flag, change in (
        ("--recompute all", {"recomputed": arch.n_layers}),
        ("--offload_activations", {"offload_activations": True}),
        ("--offload_params", {"offload_params": True}),
        (shorter, {"bin_tokens": fewer}),
    ):
        if all(getattr(smaller, name) != value for name, value in change.items()):
            smaller = predict_memory(dataclasses.replace(smaller, **change), arch, layouts)
            if flag != "--recompute all" or not recompute_is_auto:
                flags.append(flag)
            if smaller.fits(limit):
                break
    advice = f"{' '.join(flags)} would bring it to {smaller.bytes / 2**30:.1f} GiB"
    if not smaller.fits(limit):
        advice = (f"with {' '.join(flags)} it still takes {smaller.bytes / 2**30:.1f} GiB: use more"
                  " GPUs as well")
    raise DoesNotFit(
        f"this does not fit: predicted peak {plan.bytes / 2**30:.1f} GiB, and {GAPS:.0%} for"
        f" fragmentation, of {limit / 2**30:.1f} GiB; {advice}")


def longest_in_a_bin(rows):
    """The tokens that a bin must hold at least for these Rows: of the longest document; where one
    process has both answers of a pair, of the longest pair."""
    together = rows.n_answers if dist.get_world_size() == 1 else 1
    longest = int(rows.lengths.view(-1, together).sum(1).max())
    return max(longest, longest_in_a_bin(rows.mismatched)) if rows.mismatched else longest


def agree_on_plan(config, arch, layouts, rows, eval_rows, limit, device, kernels):
    """The plan of this run, rank 0's on all ranks. All ranks must call this."""
    longest = max(longest_in_a_bin(r) for r in (rows, eval_rows) if r)
    uneven = any(bool((x != x[0]).any()) for x in (rows.lengths, rows.n_scored()))
    dtype = getattr(torch, config.compute_dtype)
    machine = measure_machine(dtype, device)
    if device.type == "cuda":  # peaks are to be those of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = range(1, min(config.max_steps, 200) + 1)
    of_rows = rows.lengths.view(-1, rows.n_answers).sum(1)
    tokens = max(int(of_rows[step_rows(s, len(rows), config)].sum()) for s in steps)
    why_no_capture = why_no_grouped_mm(dtype, device) if arch.mixture else ""
    if any(document_attention in pair.values() for pair in kernels.values()):
        why_no_capture = "attention runs in plain torch"
    workload = Workload(tokens, longest, float(rows.lengths.float().mean()), uneven,
                        dist.get_world_size(), device, why_no_capture)
    with together():
        plan = choose_plan(config, arch, layouts, workload, limit, machine)
    # host memory differs by rank and moment: all take rank 0's plan
    return Plan(**gather_objects(dataclasses.asdict(plan))[0])
