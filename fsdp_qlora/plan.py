"""The plan: of all layouts of the work that fit into memory, the one predicted to be the fastest.

Stands on machine. The Layouts of layer tell it what their parts keep and compute. What the plan
decides is done by the script, model and layer.
"""

import dataclasses
import functools
import itertools
import math

import torch
import torch.distributed as dist

from fsdp_qlora.data.bins import round_up, step_rows
from fsdp_qlora.attention import document_attention
from fsdp_qlora.grouped import why_no_grouped_mm
from fsdp_qlora.machine import host_share, measure_machine
from fsdp_qlora.mlp import SLICE_TOKENS
from fsdp_qlora.nf4 import BLOCK, why_no_triton
from fsdp_qlora.ranks import gather_objects, together
from fsdp_qlora.vocabulary import CHUNK_BYTES, shard_range

GAPS = 0.04  # of the GPU's memory lost between tensors: of 22.5 GiB a plan of 21.4 ran, 21.8 not
SPARE, AMPLE_SPARE = 0.07, 0.1  # of it that a plan is to leave free, gaps among it; better still
SAME_TIME = 1.02  # predicted times that differ by this factor count as equal
HOST_SPARE = 32 * 2**30  # bytes a process may pin for speed alone; pinning takes 0.2 s a GiB
PCIE_BYTES = 20e9  # a second, between host and GPU


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
    hold_weights: bool  # their backward dequantises a weight once, not twice
    offload_activations: bool
    offload_params: bool
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
        return "middle" if self.keep_middle else "x"

    @property
    def preference(self):
        """Of plans that are as fast, the one with the lowest is run: it has small groups, small
        bins, few layers that are recomputed, and keeps most."""
        return (self.shard_group_size, self.bin_tokens, self.recomputed, self.expert_ranges,
                not self.reshard_after_forward, not self.keep_middle, not self.hold_weights)

    def fits(self, limit, spare=GAPS):
        return not limit or self.bytes <= (1 - spare) * limit


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a run gives its processes to do, as far as the plan depends on it."""

    tokens: int  # the most that a step has, over all processes
    longest: int  # tokens of the longest row
    uneven: bool  # whether rows differ in length or in how much of them is trained
    world_size: int
    device: torch.device
    why_no_capture: str = ""  # why CUDA graphs cannot capture a layer; "" if they can


@dataclasses.dataclass(frozen=True)
class LayerTotals:
    """What the plan adds up of a model's layers: counts are of all layers, where it does not say of
    one."""

    kinds: tuple  # the different Layouts
    kept_values: dict  # {what a layer keeps: values per token of the first 0, 1, 2, .. layers}
    nf4_bytes: int
    largest_nf4: int  # bytes of one layer
    vectors: int  # values of norms and biases
    largest_vectors: int
    adapter: int  # values of one layer, the same for all
    weights: int  # how many
    token_weights: float  # that one token is multiplied by, counted by the time that it takes
    # {keep_middle: how many weights backward multiplies by once more, were all layers recomputed}
    recomputed_weights: dict
    mean_query_width: float  # values of a token's queries in a layer, mean over the layers
    passed_values: int  # by elementwise work, per token


@functools.lru_cache(8)
def count_layers(layouts):
    """The LayerTotals of these Layouts, a tuple."""
    def running_sum(keeps):
        values = {layout: layout.kept_values(keeps) for layout in set(layouts)}
        return list(itertools.accumulate((values[x] for x in layouts), initial=0))

    bytes_each = [layout.n_blocks * (BLOCK // 2 + layout.n_scales) for layout in layouts]
    vectors_each = [layout.n_vectors for layout in layouts]
    return LayerTotals(
        kinds=tuple(dict.fromkeys(layouts)),
        kept_values={keeps: running_sum(keeps) for keeps in ("all", "middle", "x")},
        nf4_bytes=sum(bytes_each), largest_nf4=max(bytes_each),
        vectors=sum(vectors_each), largest_vectors=max(vectors_each),
        adapter=layouts[0].n_adapter,
        weights=sum(layout.n_weights for layout in layouts),
        token_weights=sum(layout.token_weights(by_time=True) for layout in layouts),
        recomputed_weights={
            middle: sum(layout.recomputed_weights(middle, by_time=True) for layout in layouts)
            for middle in (True, False)},
        mean_query_width=sum(layout.attention.query_width for layout in layouts) / len(layouts),
        passed_values=sum(half.passed_values for layout in layouts
                          for half in (layout.attention, layout.mlp)))


def predict_memory(plan, arch, layouts):
    """The plan with its `memory` and `host_bytes`."""
    item, shards = getattr(torch, plan.compute_dtype).itemsize, plan.shard_group_size
    layers, token = count_layers(layouts), plan.bin_tokens * item  # bytes of one value a token
    adapter = layers.adapter * 4  # of one layer, in fp32
    table = arch.vocab_size * arch.hidden_size * item / shards
    recomputed, others, live = activation_bytes(plan, layers, token)
    # beside x and its gradient: a chunk of logits, its gradient, and a quarter more
    head = 2 * arch.hidden_size * token + 1.25 * CHUNK_BYTES * item / 2
    memory = {
        "4-bit weights": 0 if plan.offload_params else layers.nf4_bytes / shards,
        "embedding, head, norms": table * (2 - arch.tied - plan.embedding_on_host)
        + layers.vectors * item / shards,
        "adapter and gradients": 2 * plan.n_layers * adapter / shards,
        # a HostStore has at most three tensors on the GPU
        "kept by recomputed layers": min(recomputed, 3 * arch.hidden_size * token)
        if plan.offload_activations else recomputed,
        "kept by other layers": others,
        "live layer or head": max(live, head),
        # FSDP2 has copies of it for the sum over ranks
        "one layer's adapter gradient": adapter * (3 if plan.uses_fsdp else 1),
        "gathered weights": gathered_bytes(plan, layers, item),
        "DoRA": dora_bytes(plan, layouts)}
    if plan.graphs:  # evaluations run beside them
        memory["CUDA graphs' own"] = plan.graph_room * (recomputed + others + live) + live
    host = table * plan.embedding_on_host + layers.nf4_bytes / shards * plan.offload_params
    if plan.offload_activations:  # all but the last, whose backward comes first
        host += max(0, recomputed - arch.hidden_size * token)
    memory = {kind: int(size) for kind, size in memory.items() if size}
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


def activation_bytes(plan, layers, token):
    """What is kept by the layers that are recomputed and by the others, and the most that a layer's
    backward takes besides; `token`: bytes of one value a token."""
    first, last = plan.keeps(0), plan.keeps(plan.n_layers - 1)
    recomputed = layers.kept_values[first][plan.recomputed] * token
    others = layers.kept_values["all"]
    others = (others[plan.n_layers] - others[plan.recomputed]) * token
    live = max(layout.live_bytes(plan, last) for layout in layers.kinds)
    if first != last:  # when the first layer's backward runs, what the last ones kept is gone
        of_first = max(layout.live_bytes(plan, first) for layout in layers.kinds)
        live = max(live, of_first - others)
    return recomputed, others, live


def gathered_bytes(plan, layers, item):
    """Of whole weights that FSDP2 has gathered, or of a layer's adapter in the compute dtype."""
    one = layers.adapter * item
    every = plan.n_layers * one
    if plan.uses_fsdp:
        one += layers.largest_nf4 + layers.largest_vectors * item
        every += layers.nf4_bytes + layers.vectors * item
        if not plan.reshard_after_forward:
            return every + one  # of all layers until their backward, and one more
    return 2 * one  # of a layer and the next one


def dora_bytes(plan, layouts):
    """Of the norms of all rows of weights, and of outputs that backward computes again."""
    if not layouts[0].dora:
        return 0
    widths = [fused.out_features for layout in layouts for fused in layout.fused_linears]
    # in the compute dtype, in fp32, and their gradient in fp32
    return 4 * sum(widths) + 10 * min(plan.bin_tokens, SLICE_TOKENS) * max(widths)


def predict_time(plan, arch, layouts, machine):
    """The plan with its `token_seconds`, the time of one GPU for a token.

    The constants are fitted to the H200 rows of benchmarks/RESULTS.md, which take 10 to 30 % longer
    than predicted: good enough to compare plans.
    """
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    layers, n_layers = count_layers(layouts), arch.n_layers
    weights, token_weights = layers.weights / n_layers, layers.token_weights / n_layers
    weights_again = layers.recomputed_weights[plan.keep_middle] / n_layers
    again = plan.recomputed / n_layers
    flops = 2 * n * (2 * token_weights + again * weights_again)
    flops += 2 * n * 3.5 * min(n, 2048) * layers.mean_query_width  # attention, rows of 2,048 tokens
    # each use of a weight: 4 bits are read, a number is written and read
    uses = 2 * weights + again * (0.5 if plan.hold_weights else 1) * token_weights
    moved = uses * (0.5 + item) + n * layers.passed_values / n_layers * item
    compute = flops / (machine.flops * n / (n + 256)) + moved / machine.bandwidth
    gathered = layers.nf4_bytes / n_layers + layers.adapter * item
    shards = plan.shard_group_size
    gathers = gathered * (shards - 1) / shards / machine.link
    gathers *= 2 if plan.reshard_after_forward else 1
    copies = plan.offload_params * 2 * gathered / shards / PCIE_BYTES
    routed = sum(arch.layer_routed) / n_layers
    launches = (100 + 80 * again + 40 * plan.uses_fsdp
                + routed * (40 + (30 + 15 * again) * plan.expert_ranges)) * machine.launch
    # NCCL's kernels take the GPU from the products, copies from the host hardly do
    layer = max(compute + gathers, copies, 0 if plan.graphs else launches)
    layer += 0.1 * min(compute, copies)
    head = 4 * n * arch.vocab_size * arch.hidden_size / machine.flops
    return dataclasses.replace(plan, token_seconds=(layer * n_layers + head) / n)


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
    ranges = (1, 4, 16) if arch.mixture else (1,)
    for shards, bin_tokens, n in itertools.product(groups, sizes, counts):
        if shard_range(arch.vocab_size, shards - 1, shards):  # else a process would have no rows
            reshards = [True] if shards == 1 or config.offload_params else [True, False]
            for reshard, (middle, hold), n_ranges in itertools.product(
                reshards, keep if n else keep[-1:], ranges
            ):
                plan = Plan(config.compute_dtype, arch.n_layers, shards, reshard, bin_tokens, n,
                            middle, hold, config.offload_activations, config.offload_params,
                            n_ranges)
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
    if not any(plan.fits(limit) for plan in plans) and device.type == "cuda" and not (
        arch.tied or why_no_triton()
    ):  # the same numbers, at the price of a copy of the tokens' rows for each micro-batch
        plans = [predict_memory(dataclasses.replace(plan, embedding_on_host=True), arch, layouts)
                 for plan in plans]
    plan = min(plans, key=lambda plan: plan.bytes)
    fitting = [p for p in plans if p.fits(limit, SPARE)]
    fitting = [predict_time(p, arch, layouts, machine) for p in fitting or [plan]]
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
    return use_graphs(plan, arch, layouts, machine, limit, workload.why_no_capture, uneven_bins)


def use_graphs(plan, arch, layouts, machine, limit, why_no_capture, uneven_bins):
    """The plan, with CUDA graphs where the host is slower than the GPU, or why they are not used.

    Graphs keep their memory for good. If bins have several shapes, there are gaps in it, and bins
    without a graph need theirs besides: graph_room is 2 bins. If all have one shape, what ran
    before the capture is free by then.
    """
    graphed = dataclasses.replace(plan, graphs=True, graph_room=2 if uneven_bins else 0)
    graphed = predict_memory(graphed, arch, layouts)
    graphed = predict_time(graphed, arch, layouts, machine)
    reasons = {
        "FSDP2 brings the weights": plan.uses_fsdp,
        "activations are offloaded": plan.offload_activations,
        why_no_capture: why_no_capture,
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
        f"this does not fit: predicted peak {plan.bytes / 2**30:.1f} GiB, and {GAPS:.0%} for gaps,"
        f" of {limit / 2**30:.1f} GiB; {advice}")


def agree_on_plan(config, arch, layouts, rows, eval_rows, limit, device, kernels):
    """The plan of this run, rank 0's on all ranks. All ranks must call this."""
    longest = max(int(r.lengths.max()) for r in (rows, eval_rows) if r)
    uneven = bool((rows.lengths != longest).any() or (rows.n_trained != rows.n_trained[0]).any())
    dtype = getattr(torch, config.compute_dtype)
    machine = measure_machine(dtype, device)
    if device.type == "cuda":  # peaks are to be those of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = range(1, min(config.max_steps, 200) + 1)
    tokens = max(int(rows.lengths[step_rows(s, len(rows), config)].sum()) for s in steps)
    why_no_capture = why_no_grouped_mm(dtype, device) if arch.mixture else ""
    if any(document_attention in pair.values() for pair in kernels.values()):
        why_no_capture = "attention runs in plain torch"
    workload = Workload(tokens, longest, uneven, dist.get_world_size(), device, why_no_capture)
    with together():
        plan = choose_plan(config, arch, layouts, workload, limit, machine)
    # host memory differs by rank and moment: all take rank 0's plan
    return Plan(**gather_objects(dataclasses.asdict(plan))[0])
