"""What a plan costs: the memory that it takes at a step's peak, and the time of a token.

Depends on mlp, nf4 and head for a few sizes. The Layouts of layer tell it what their parts
keep and compute; which plan is run is decided in plan.
"""

import dataclasses
import functools
import itertools

import torch

from fsdp_qlora.model.mlp import SLICE_TOKENS
from fsdp_qlora.quant.nf4 import BLOCK
from fsdp_qlora.model.head import CHUNK_BYTES

KEEPS = "all", "mlp", "middle", "x"  # what a layer may keep, see LayerFunction
SUSTAINED = 0.77  # of the speed that measure_machine() finds, over whole steps
DEQUANTISING = 0.65  # of the memory's speed


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
    # {what a layer keeps: weights that backward multiplies by once more, if all layers keep that};
    # by their number, not by time, as the fit wants it
    recomputed_weights: dict
    mlp_values: int  # values per token that the MLP of a layer keeps, at most
    mean_query_width: float  # values of a token's queries in a layer, mean over the layers
    elementwise_values: int  # by elementwise work, per token


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
        kept_values={keeps: running_sum(keeps) for keeps in KEEPS},
        nf4_bytes=sum(bytes_each), largest_nf4=max(bytes_each),
        vectors=sum(vectors_each), largest_vectors=max(vectors_each),
        adapter=layouts[0].n_adapter,
        weights=sum(layout.n_weights for layout in layouts),
        token_weights=sum(layout.token_weights(by_time=True) for layout in layouts),
        recomputed_weights={
            keeps: sum(layout.recomputed_weights(keeps) for layout in layouts)
            for keeps in KEEPS},
        mlp_values=max(layout.mlp.kept_values for layout in layouts),
        mean_query_width=sum(layout.attention.query_width for layout in layouts) / len(layouts),
        elementwise_values=sum(half.elementwise_values for layout in layouts
                          for half in (layout.attention, layout.mlp)))


def predict_memory(plan, arch, layouts):
    """The plan with its `memory` and `host_bytes`."""
    item, shards = getattr(torch, plan.compute_dtype).itemsize, plan.shard_group_size
    layers, value_bytes = count_layers(layouts), plan.bin_tokens * item
    adapter = layers.adapter * 4  # of one layer, in fp32
    table = arch.vocab_size * arch.hidden_size * item / shards
    kept = kept_bytes(plan, layers, value_bytes)
    recomputed, others, live = activation_peak(plan, layers, value_bytes, arch.hidden_size)
    # beside x and its gradient: a chunk of logits, its gradient, and a quarter more
    head = 2 * arch.hidden_size * value_bytes + 1.25 * CHUNK_BYTES * item / 2
    memory = {
        "4-bit weights": 0 if plan.offload_params else layers.nf4_bytes / shards,
        "embedding, head, norms": table * (2 - arch.tied - plan.embedding_on_host)
        + layers.vectors * item / shards,
        "adapter and gradients": 2 * plan.n_layers * adapter / shards,
        "kept by recomputed layers": recomputed,
        "kept by other layers": others,
        "live layer or head": head if plan.graphs else max(live, head),
        # FSDP2 has copies of it for the sum over ranks
        "one layer's adapter gradient": adapter * (3 if plan.uses_fsdp else 1),
        "gathered weights": gathered_bytes(plan, layers, item),
        "DoRA": dora_bytes(plan, layouts)}
    if plan.graphs:  # evaluations run beside them
        memory["CUDA graphs' own"] = plan.graph_room * (recomputed + others + live) + live
    host = table * plan.embedding_on_host + layers.nf4_bytes / shards * plan.offload_params
    if plan.offload_activations:  # all but what is put last, whose backward comes first
        last = layers.mlp_values if plan.n_mlp_kept else arch.hidden_size
        host += max(0, kept[0] - last * value_bytes)
    memory = {kind: int(size) for kind, size in memory.items() if size}
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


def kept_bytes(plan, layers, value_bytes):
    """What is kept by the layers that are recomputed and by the others. `value_bytes`: of one value
    of each token of a bin."""
    def of_layers(start, stop):  # that keep alike
        values = layers.kept_values[plan.keeps(start)]
        return (values[stop] - values[start]) * value_bytes

    first_mlp = plan.recomputed - plan.n_mlp_kept
    recomputed = of_layers(0, first_mlp) + of_layers(first_mlp, plan.recomputed)
    return recomputed, of_layers(plan.recomputed, plan.n_layers)


def activation_peak(plan, layers, value_bytes, hidden):
    """What is on the GPU when activations take most: of what the recomputed layers keep, of what
    the others do, and what a layer's backward takes besides. Layers that keep alike are next to one
    another, and backward frees the others' first."""
    recomputed, others = kept_bytes(plan, layers, value_bytes)
    peaks = []
    for keeps in {plan.keeps(i) for i in (0, max(0, plan.recomputed - 1), plan.n_layers - 1)}:
        live = max(layout.live_bytes(plan, keeps) for layout in layers.kinds)
        on_gpu = recomputed
        if plan.offload_activations:  # x, and twice what a HostStore gets after it
            second = layers.mlp_values if keeps == "mlp" else hidden
            on_gpu = min(recomputed, value_bytes * (hidden + 2 * second))
        peaks.append((on_gpu, others if keeps == "all" else 0, live))
    return max(peaks, key=sum)


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
    n, item = plan.bin_tokens, getattr(torch, plan.compute_dtype).itemsize
    if plan.keeps(plan.n_layers - 1) in ("middle", "x"):  # no layer's MLP has all tokens at once
        n = min(n, SLICE_TOKENS)
    # in the compute dtype, in fp32, and their gradient in fp32
    return 4 * sum(widths) + (item + 8) * n * max(widths)


def predict_time(plan, arch, layouts, machine, mean_document_tokens):
    """The plan with its `token_seconds`, the time of one GPU for a token.

    The constants are fitted to rows of benchmarks/RESULTS.md, on H100s and H200s, for which it
    predicts 0.94 to 1.18 times the speed: good enough to compare plans.
    """
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    layers, n_layers = count_layers(layouts), arch.n_layers
    weights, token_weights = layers.weights / n_layers, layers.token_weights / n_layers
    again = (plan.recomputed - plan.n_mlp_kept) / n_layers
    weights_again = (again * layers.recomputed_weights[plan.keeps(0)]
                     + plan.n_mlp_kept / n_layers * layers.recomputed_weights["mlp"]) / n_layers
    flops = 2 * n * (2 * token_weights + weights_again)
    flops += 2 * n * 3.5 * min(n, mean_document_tokens) * layers.mean_query_width  # attention
    # each use of a weight: 4 bits are read, a number is written; twice for each, and for recomputed
    # layers a share of token_weights that is fitted, not counted
    uses = 2 * weights + again * (0.5 if plan.hold_weights else 1) * token_weights
    moved = uses * (0.5 + item) / DEQUANTISING + n * layers.elementwise_values / n_layers * item
    routed = sum(arch.layer_routed) / n_layers
    waits = 0
    if routed and plan.expert_ranges > 1:  # their rows are copied, and first waited for
        moved += routed * 4 * n * arch.mixture.top_k * arch.hidden_size * item
        waits = routed * (1 + again) * 30 * machine.launch
    speed = SUSTAINED * machine.flops
    compute = flops / speed + moved / machine.bandwidth
    gathered = layers.nf4_bytes / n_layers + layers.adapter * item
    shards = plan.shard_group_size
    gathers = gathered * (shards - 1) / shards / machine.link
    gathers *= 2 if plan.reshard_after_forward else 1
    # each way; activations go to the host in forward and come back in backward, weights come twice
    copies = plan.offload_params * gathered / shards
    copies += plan.offload_activations * kept_bytes(plan, layers, n * item)[0] / n_layers
    copies /= machine.host
    forward = compute * token_weights / (2 * token_weights + weights_again)
    launches = (100 + 80 * again + 40 * plan.uses_fsdp
                + routed * (40 + (30 + 15 * again) * plan.expert_ranges)) * machine.launch
    # NCCL's kernels take the GPU from the products, copies from the host hardly do
    layer = sum(max(work + gathers / 2, copies) for work in (forward, compute - forward))
    layer = max(layer, 0 if plan.graphs else launches)
    layer += 0.1 * min(compute, 2 * copies) + waits
    logits = n * arch.vocab_size
    head = 4 * logits * arch.hidden_size / speed + 5 * logits * item / machine.bandwidth
    return dataclasses.replace(plan, token_seconds=(layer * n_layers + head) / n)
