"""Predict a plan's peak memory and time per token.

    predict_memory()         bytes by kind, at the peak of a step
      count_layers()         LayerTotals of all layers
      activation_peak()      saved and live values, at the worst kind of layer
      lm_head_bytes(), gathered_bytes(), exchanged_bytes(), dora_bytes()
    predict_time()           seconds of a token
      layer_seconds()        compute_seconds() with moved_bytes(); n_launches(); wait_seconds()
      lm_head_seconds()
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from fsdp_qlora.kernels.recurrence import recurrent_mixer
from fsdp_qlora.layer.attention_mixer import n_head_groups
from fsdp_qlora.layer.mlp import SLICE_TOKENS
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.layer_costs.layer import LayerCosts
from fsdp_qlora.layer_costs.mixer_sublayer import MixerSublayerCosts
from fsdp_qlora.layer_costs.mla import MLACosts
from fsdp_qlora.model.embedding import LOGITS_CHUNK_BYTES
from fsdp_qlora.plan import SAVE_POLICIES, Plan, SavePolicy
from fsdp_qlora.planner.machine import Machine
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.quant.blocks import BLOCK


# ------------------------------------------------------------------------------------------------
# Totals over the layers, for both
# ------------------------------------------------------------------------------------------------


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
    n_small: int  # values of the tensors that every rank has whole, see small_tensors()
    n_nested: int  # fp32 values of the second level of 4-bit scales, which every rank has whole
    n_vectors: int  # values of norms and biases
    largest_vectors: int  # of one layer, at most
    n_adapter: int  # values of one layer's adapter, the same for all layers
    n_weights: int  # 4-bit weights
    # weights that one token is multiplied by; those of slow matmuls count more, see LayerCosts
    active_weights: float
    # {SavePolicy: weights that backward multiplies by once more, if all layers save that}; here the
    # weights of slow matmuls do not count more, because TimeConstants were fitted without that
    recomputed_weights: dict[SavePolicy, float]
    mlp_values: int  # values per token that the MLP of a layer saves, at most
    attention_values: int  # values per token of a layer's results of attention, at most
    # values of a token's queries in a layer, mean over the layers; those of wide heads count more
    mean_query_width: float
    elementwise_values: int  # values per token that elementwise work reads or writes


@functools.lru_cache(8)
def count_layers(specs: tuple[LayerSpec, ...]) -> LayerTotals:
    """Return the LayerTotals of a model's layers."""
    by_spec = {spec: LayerCosts(spec) for spec in dict.fromkeys(specs)}
    costs = [by_spec[spec] for spec in specs]

    def running_sum(policy: SavePolicy) -> list[int]:
        values = {layer_costs: layer_costs.saved_values(policy) for layer_costs in by_spec.values()}
        return list(itertools.accumulate((values[x] for x in costs), initial=0))

    def last_indices(layer_costs: LayerCosts) -> list[int]:
        return list(itertools.accumulate(
            (i if x is layer_costs else -1 for i, x in enumerate(costs)), max, initial=-1))

    bytes_each = [spec.n_blocks * (BLOCK // 2 + spec.n_scales) for spec in specs]
    vectors_each = [spec.n_vectors for spec in specs]
    return LayerTotals(
        last_index={layer_costs: last_indices(layer_costs) for layer_costs in by_spec.values()},
        saved_values={policy: running_sum(policy) for policy in SAVE_POLICIES},
        packed_bytes=sum(bytes_each), largest_packed=max(bytes_each),
        n_small=sum(math.prod(shape) for spec in specs
                    for shape in spec.small_tensors.values()),
        n_nested=sum(spec.n_nested for spec in specs),
        n_vectors=sum(vectors_each), largest_vectors=max(vectors_each),
        n_adapter=specs[0].n_adapter,
        n_weights=sum(spec.n_weights for spec in specs),
        active_weights=sum(layer.active_weights(by_time=True) for layer in costs),
        recomputed_weights={
            policy: sum(layer.recomputed_weights(policy) for layer in costs)
            for policy in SAVE_POLICIES},
        mlp_values=max(layer.mlp_sublayer.saved_values for layer in costs),
        attention_values=max(layer.mixer_sublayer.attention_values for layer in costs),
        mean_query_width=sum(
            layer.mixer_sublayer.query_width * attention_slowdown(layer.arch.head_dim)
            for layer in costs) / len(costs),
        elementwise_values=sum(sublayer.elementwise_values for layer in costs
                               for sublayer in (layer.mixer_sublayer, layer.mlp_sublayer)))


def attention_slowdown(head_dim: int) -> float:
    """Return how many times as long the attention of a head takes as its width tells."""
    if head_dim > 256:
        return CONSTANTS.widest_heads
    return CONSTANTS.wide_heads if head_dim > 128 else 1


# ------------------------------------------------------------------------------------------------
# Memory
# ------------------------------------------------------------------------------------------------


def predict_memory(plan: Plan, arch: Architecture, specs: tuple[LayerSpec, ...]) -> Plan:
    """Return the plan with its `memory` and `host_bytes`."""
    shards = plan.shard_group_size
    itemsize = plan.dtype.itemsize
    layers = count_layers(specs)
    value_bytes = plan.micro_batch_tokens * itemsize  # of one value for each token
    packed_bytes = layers.packed_bytes / shards
    adapter_bytes = 4 * layers.n_adapter  # of one layer, in fp32
    # bytes of this rank's rows of the lm_head; the embedding has as many
    table_bytes = arch.vocab_size * arch.hidden_size * itemsize / shards
    # values of all layers' own inputs for a token, see PerLayerInputs
    n_inputs = arch.n_layers * arch.per_layer.size if arch.per_layer else 0
    # of the tables that no matmul reads, which can be in host memory
    looked_up_bytes = (
        table_bytes * (not arch.tied) + arch.vocab_size * n_inputs * itemsize / shards)
    by_recomputed, by_others, live = activation_peak(plan, layers, value_bytes, arch.hidden_size)
    head = lm_head_bytes(plan, arch, table_bytes)
    row_weights = plan.n_token_rows * arch.hidden_size
    memory = {
        "4-bit weights": 0 if plan.offload_params else packed_bytes,
        "embedding, head, norms": table_bytes + looked_up_bytes * (not plan.embedding_on_host)
        + (layers.n_vectors / shards + layers.n_small + n_inputs * arch.hidden_size) * itemsize
        + 4 * layers.n_nested,
        "adapter and gradients": 2 * plan.n_layers * adapter_bytes / shards + 8 * row_weights,
        "optimizer's state": plan.state_bytes * (
            plan.n_layers * layers.n_adapter / shards + row_weights),
        "saved by recomputed layers": by_recomputed,
        "saved by other layers": by_others,
        # plus the shared keys and values, their gradients, and one layer's gradients of them
        "per-layer inputs, shared keys and values":
            (n_inputs + 3 * shared_kv_values(arch)) * value_bytes,
        "live layer or head": head if plan.uses_cuda_graphs else max(live, head),
        # FSDP2 copies it for the sum over ranks
        "one layer's adapter gradient": adapter_bytes * (3 if plan.uses_fsdp else 1),
        "gathered weights": gathered_bytes(plan, layers, itemsize),
        "keys and values of other ranks": exchanged_bytes(plan, arch, specs, value_bytes),
        "DoRA": dora_bytes(plan, specs)}
    if plan.uses_cuda_graphs:  # besides the memory above, which evaluations need
        of_micro_batch = by_recomputed + by_others + live
        memory["CUDA graphs' own"] = plan.cuda_graph_room * of_micro_batch + live
    host = looked_up_bytes * plan.embedding_on_host + packed_bytes * plan.offload_params
    if plan.offload_activations:  # all but the last put(), which stays on the GPU
        offloaded, _ = saved_bytes(plan, layers, value_bytes)
        last = put_values(plan.save_policy(plan.n_recomputed - 1), layers, arch.hidden_size)
        host += max(0, offloaded - last * value_bytes)
    memory = {kind: int(size) for kind, size in memory.items() if size}
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


def lm_head_bytes(plan: Plan, arch: Architecture, table_bytes: float) -> float:
    """Return the bytes that the lm_head and the loss need besides weights. `table_bytes`: those of
    this rank's rows of the lm_head."""
    itemsize = plan.dtype.itemsize
    inputs = 2 * arch.hidden_size * plan.micro_batch_tokens * itemsize  # x and its gradient
    n_rows = min(plan.micro_batch_tokens, LOGITS_CHUNK_BYTES // (4 * arch.vocab_size))
    n_logits = n_rows * arch.vocab_size
    if plan.fused:  # a chunk of logits, its gradient, and a quarter more
        return inputs + 2.5 * itemsize * n_logits
    # logits and gradient with four tensors in fp32, 20 bytes; or the lm_head, and its product with
    # rows of x, in fp32
    both_bytes = (2 * itemsize + 4) * (n_logits + n_rows * arch.hidden_size)
    return inputs + max(20 * n_logits, both_bytes + 4 * table_bytes / itemsize)


def shared_kv_values(arch: Architecture) -> int:
    """Return the values per token of shared keys and values."""
    kv_to_share = [arch.layer_heads[i] for i in {*arch.kv_sources} - {None}]
    return sum(2 * heads.n_kv * heads.dim for heads in kv_to_share)


def layer_ranges(plan: Plan) -> list[tuple[int, int]]:
    """Return (start, stop) of the ranges of layers that save the same, see Plan.save_policy()."""
    first_mlp = plan.n_recomputed - plan.n_mlp_saved
    bounds = 0, first_mlp - plan.n_attention_saved, first_mlp, plan.n_recomputed, plan.n_layers
    return [(start, stop) for start, stop in itertools.pairwise(bounds) if start < stop]


def saved_bytes(
    plan: Plan, layers: LayerTotals, value_bytes: int, first: int | None = None
) -> tuple[int, int]:
    """Return the bytes that recomputed layers save, and those that the others save: of the `first`
    layers, None for all. `value_bytes`: the bytes of one value for each token of a micro-batch."""
    n_layers = plan.n_layers if first is None else first
    recomputed = others = 0
    for start, stop in layer_ranges(plan):
        values = layers.saved_values[plan.save_policy(start)]
        n_bytes = (values[min(stop, n_layers)] - values[min(start, n_layers)]) * value_bytes
        if start < plan.n_recomputed:
            recomputed += n_bytes
        else:
            others += n_bytes
    return recomputed, others


def put_values(policy: SavePolicy, layers: LayerTotals, hidden: int) -> int:
    """Return the values per token of a layer's last put(), see LayerFunction."""
    if policy == "mlp":
        return layers.mlp_values
    return hidden + layers.attention_values * (policy == "attention")


def activation_peak(
    plan: Plan, layers: LayerTotals, value_bytes: int, hidden: int,
) -> tuple[int, int, int]:
    """Return the bytes on the GPU when activations need most: those saved by recomputed layers,
    those saved by other layers, and those that a layer's backward needs besides. Backward frees
    what a layer has saved, from the last layer to the first. So of the layers that cost and save
    the same, the last one needs most."""
    peaks = []
    for start, stop in layer_ranges(plan):
        policy = plan.save_policy(start)
        for layer_costs, last_index in layers.last_index.items():
            if last_index[stop] < start:
                continue  # the range has no such layer
            recomputed, others = saved_bytes(plan, layers, value_bytes, last_index[stop] + 1)
            on_gpu = recomputed
            if plan.offload_activations:  # the mixer's put, and those that are copied at once
                put = put_values(policy, layers, hidden)
                of_mixer = hidden if policy == "mlp" else put
                on_gpu = min(recomputed, value_bytes * (of_mixer + plan.n_copied_at_once * put))
            peaks.append((on_gpu, others, layer_costs.live_bytes(plan, policy)))
    return max(peaks, key=sum)


def mla_costs(layer: LayerCosts) -> MLACosts | None:
    """Return the costs of a layer's latent attention, None if its model has none."""
    sublayer = layer.mixer_sublayer
    mla = sublayer.mixers[0] if isinstance(sublayer, MixerSublayerCosts) else None
    return mla if isinstance(mla, MLACosts) else None


def exchanged_bytes(
    plan: Plan, arch: Architecture, specs: Sequence[LayerSpec], value_bytes: int
) -> float:
    """Return the bytes of keys and values that context parallelism exchanges, and of their
    gradients, beside a layer's own."""
    n = plan.context_parallel_size
    if n == 1:
        return 0
    if mla := mla_costs(LayerCosts(specs[0])):
        # its live_bytes() counts what else backward needs
        n_saved = max(1, plan.n_layers - plan.n_recomputed)
        return n_saved * mla.context_saved_values(plan) * value_bytes
    kv_width = max(2 * heads.n_kv * heads.dim for heads in arch.layer_heads)
    query_width = max(heads.n * heads.dim for heads in arch.layer_heads)
    is_grouped = any(heads.n_kv < heads.n for heads in arch.layer_heads)
    seen = plan.seen_keys_per_token
    # the peak is in the backward of the first group of heads: live_bytes() counts the gradients of
    # all groups' keys and values, but those of the other groups do not exist yet
    n_groups = n_head_groups(arch, value_bytes)
    kept = (seen - 1 + 1 / n_groups) * kv_width
    # a group's kernel makes the gradients of the keys and values that it sees, with grouped-query
    # attention one for each query head; kernel_values() counts those of this rank's own tokens
    in_a_call = seen if plan.is_varlen else seen - 1
    kernel = seen * kv_width + 2 * (in_a_call - 1) * query_width * is_grouped
    if not plan.is_varlen:  # the results of a call are copied to their places
        kernel += in_a_call * kv_width
    # after the kernel: rows sent and received, and their sum in fp32
    exchange = (2.5 * n + 5) * kv_width - (5 if is_grouped else 3) * query_width
    kept_whole = max(0, plan.n_layers - plan.n_recomputed - 1) * seen * kv_width
    return (kept_whole + kept + max(kernel, exchange) / n_groups) * value_bytes


def gathered_bytes(plan: Plan, layers: LayerTotals, itemsize: int) -> int:
    """Return the bytes of weights that FSDP2 has gathered, and of adapters in the compute dtype."""
    layer_bytes = layers.n_adapter * itemsize
    all_bytes = plan.n_layers * layer_bytes
    if plan.uses_fsdp:
        layer_bytes += layers.largest_packed + layers.largest_vectors * itemsize
        all_bytes += layers.packed_bytes + layers.n_vectors * itemsize
        if not plan.reshard_after_forward:
            return all_bytes + layer_bytes  # all layers stay until their backward, and one more
    return 2 * layer_bytes  # a layer and the next one


def dora_bytes(plan: Plan, specs: Sequence[LayerSpec]) -> int:
    """Return the bytes of the norms of all rows of weights, and of outputs that backward
    recomputes."""
    if not specs[0].dora:
        return 0
    widths = [fused.out_features for spec in specs for fused in spec.fused_linears]
    n = plan.micro_batch_tokens
    itemsize = plan.dtype.itemsize
    if plan.save_policy(plan.n_layers - 1) not in ("all", "mlp"):
        # every layer's MLP runs in slices of tokens
        n = min(n, SLICE_TOKENS)
    # in the compute dtype, in fp32, and their gradient in fp32
    size = 4 * sum(widths) + (itemsize + 8) * n * max(widths)
    if plan.context_parallel_size > 1 and (mla := mla_costs(LayerCosts(specs[0]))):
        # kv_b also computes for the keys of other ranks
        size += int((itemsize + 8) * plan.seen_keys_per_token * plan.micro_batch_tokens
                    * mla.kv_b.out_features)
    return size


# ------------------------------------------------------------------------------------------------
# Time
# ------------------------------------------------------------------------------------------------


def predict_time(
    plan: Plan, arch: Architecture, specs: tuple[LayerSpec, ...], machine: Machine,
    mean_document_tokens: float,
) -> Plan:
    """Return the plan with its `token_seconds`, the predicted time of one GPU per token.

    For the rows to which TimeConstants were fitted, those of tests/test_memory.py, the predicted
    tokens/s are 0.94 to 1.18 times the measured ones; for hybrids and Gemma 4 up to 1.43 times, see
    benchmarks/RESULTS.md. That is good enough to compare plans on H100s and H200s; other GPUs were
    not compared.
    """
    layer = layer_seconds(plan, arch, count_layers(specs), machine, mean_document_tokens)
    seconds = layer.total(plan.uses_cuda_graphs) * arch.n_layers
    seconds += lm_head_seconds(plan, arch, machine)
    return dataclasses.replace(plan, token_seconds=seconds / plan.micro_batch_tokens)


@dataclasses.dataclass(frozen=True)
class TimeConstants:
    """Constants of predict_time(), fitted to the tokens/s of the rows of benchmarks/RESULTS.md that
    tests/test_memory.py compares, on H100s and H200s. Not fitted are the constants marked
    "counted", which follow from what is computed, or "measured", each by itself. "Launches" are in
    units of Machine.launch_seconds, the CPU's seconds for one kernel."""

    # fractions of the speeds that measure_machine() finds
    sustained: float = 0.77  # of the FLOP/s, over whole steps
    dequantizing: float = 0.65  # of the bandwidth, while weights are dequantized; measured, twice
    # work of attention in units of its forward, which has 2 matmuls; backward has 5; counted
    attention_passes: float = 3.5
    # FLOP/s of the attention kernels, at most; measured in whole steps of an 8B: cuDNN's for rows
    # of 38,912 and 65,536 tokens (H100), not for long pieces of rows, which are taken for as fast;
    # Flash Attention 2, which does not use Hopper's own instructions, 345 TFLOP/s (2 x H200)
    fixed_len_flops: float = 575e12
    varlen_flops: float = 350e12
    # slowdown of attention for heads of more than 128 values, to 256: by rows of 32,768 tokens of
    # Qwen3.5-9B and GLM-4.7-Flash (H200); for heads of more than 256, by flex_attention, measured:
    # 41 ms for 8,192 tokens of Gemma 4 31B (H100), forward and backward
    wide_heads: float = 1.6
    widest_heads: float = 11
    # bytes that plain torch moves for each score of attention, in both passes, without and with
    # dropout; from one row each
    score_bytes: float = 170
    dropped_score_bytes: float = 640
    # fraction of a recomputed layer's weights that is dequantized a third time
    dequantized_again: float = 1
    reused_dequantized_again: float = 0.5  # with reuse_dequantized
    # launches of a layer in both passes
    launches: float = 100  # of any layer
    recomputed_launches: float = 80  # more if it is recomputed
    fsdp_launches: float = 40  # more with FSDP2
    routed_launches: float = 40  # more if it has experts
    recurrence_launches: float = 200  # more if its mixer has a state; fitted to a delta net
    range_launches: float = 30  # more for each range of experts
    recomputed_range_launches: float = 15  # more for each range if it is recomputed
    # per matmul of an expert's rows, if experts are multiplied one by one; measured: the time of
    # torch.mm in a loop on a CPU alone, because no GPU that needs it was available
    expert_launches: float = 0.3
    # these two apply to several ranges of experts; the MoE rows to which they are fitted have 4
    range_copies: float = 4  # times that a row of an expert's input or output is read or written
    range_wait_launches: float = 30  # a pass waits for the GPU this long, in launches
    # fraction of the shorter of computing and both copies that is lost when they overlap
    copy_disturbance: float = 0.1
    lm_head_flops: float = 4  # per logit and hidden value: 2 matmuls of 2; counted
    logits_passes: float = 5  # times that a logit is read or written


CONSTANTS = TimeConstants()


@dataclasses.dataclass(frozen=True)
class LayerSeconds:
    """Predicted time of a mean layer for one micro-batch, in parts, some of which overlap."""

    compute: float  # matmuls and memory traffic, in both passes
    forward: float  # forward's part of `compute`
    gathers: float  # gathers of weights, in both passes
    copies: float  # copies to host memory in forward; backward copies as much back
    launches: float  # CPU time for all kernels
    waits: float  # for the GPU, with ranges of experts; for other ranks' keys and values

    def total(self, uses_cuda_graphs: bool) -> float:
        """Return the seconds of the layer."""
        # NCCL's kernels delay the matmuls; copies to and from host memory hardly do
        layer = sum(max(work + self.gathers / 2, self.copies)
                    for work in (self.forward, self.compute - self.forward))
        layer = max(layer, 0 if uses_cuda_graphs else self.launches)
        return layer + (
            CONSTANTS.copy_disturbance * min(self.compute, 2 * self.copies) + self.waits)


def layer_seconds(
    plan: Plan, arch: Architecture, layers: LayerTotals, machine: Machine,
    mean_document_tokens: float,
) -> LayerSeconds:
    """Return the LayerSeconds of the mean of all layers."""
    n_layers = arch.n_layers
    compute = compute_seconds(plan, arch, layers, machine, mean_document_tokens)
    active_weights = layers.active_weights / n_layers
    forward = compute * active_weights / (
        2 * active_weights + weights_multiplied_again(plan, layers))
    shards = plan.shard_group_size
    gathered = layers.packed_bytes / n_layers + layers.n_adapter * plan.dtype.itemsize
    gathers = gathered * (shards - 1) / shards / machine.link_bandwidth
    # each way: activations go to the host in forward and come back in backward; weights come twice
    copies = plan.offload_params * gathered / shards
    value_bytes = plan.micro_batch_tokens * plan.dtype.itemsize
    copies += plan.offload_activations * saved_bytes(plan, layers, value_bytes)[0] / n_layers
    return LayerSeconds(
        compute=compute, forward=forward,
        gathers=gathers * (2 if plan.reshard_after_forward else 1),
        copies=copies / machine.host_bandwidth,
        launches=n_launches(plan, arch, machine) * machine.launch_seconds,
        waits=wait_seconds(plan, arch, layers, machine))


def fraction_recomputed(plan: Plan) -> float:
    """Return the fraction of the layers that backward recomputes whole."""
    return (plan.n_recomputed - plan.n_mlp_saved) / plan.n_layers


def weights_multiplied_again(plan: Plan, layers: LayerTotals) -> float:
    """Return the number of a mean layer's weights that backward multiplies by once more."""
    of_whole = fraction_recomputed(plan) * layers.recomputed_weights[plan.save_policy(0)]
    of_mixers = plan.n_mlp_saved / plan.n_layers * layers.recomputed_weights["mlp"]
    return (of_whole + of_mixers) / plan.n_layers


def compute_seconds(
    plan: Plan, arch: Architecture, layers: LayerTotals, machine: Machine,
    mean_document_tokens: float,
) -> float:
    """Return the predicted time of a mean layer's matmuls and memory traffic, in both passes."""
    n, n_layers = plan.micro_batch_tokens, arch.n_layers
    active_weights = layers.active_weights / n_layers
    flops = 2 * n * (2 * active_weights + weights_multiplied_again(plan, layers))
    if plan.context_parallel_size > 1 and (mla := mla_costs(next(iter(layers.last_index)))):
        # of keys that are another rank's, or seen by both pieces
        again = fraction_recomputed(plan)
        flops += 2 * n * (plan.seen_keys_per_token - 1) * (2 + again) * mla.kv_b.n_weights
    attended_tokens = min(n * plan.context_parallel_size, mean_document_tokens)
    # a recomputed layer's forward, unless its results are reused
    passes = CONSTANTS.attention_passes + (plan.n_recomputed - plan.n_attention_saved) / n_layers
    attention_flops = 2 * n * passes * attended_tokens * layers.mean_query_width
    attention_speed = min(
        CONSTANTS.sustained * machine.flops,
        CONSTANTS.varlen_flops if plan.is_varlen else CONSTANTS.fixed_len_flops)
    moved = moved_bytes(plan, arch, layers, attended_tokens)
    return (flops / (CONSTANTS.sustained * machine.flops) + attention_flops / attention_speed
            + moved / machine.bandwidth)


def moved_bytes(
    plan: Plan, arch: Architecture, layers: LayerTotals, attended_tokens: float
) -> float:
    """Return the bytes that a mean layer reads and writes, besides those of matmuls.
    `attended_tokens`: tokens of a mean document."""
    n, n_layers, itemsize = plan.micro_batch_tokens, arch.n_layers, plan.dtype.itemsize
    # each use of a weight reads 4 bits and writes a number: once in forward, once in backward, and
    # once more for a fraction of the recomputed layers' weights
    share = (CONSTANTS.reused_dequantized_again if plan.reuse_dequantized
             else CONSTANTS.dequantized_again)
    uses = 2 * (layers.n_weights / n_layers) + (
        fraction_recomputed(plan) * share * (layers.active_weights / n_layers))
    moved = (uses * (0.5 + itemsize) / CONSTANTS.dequantizing
             + n * layers.elementwise_values / n_layers * itemsize)
    if plan.context_parallel_size > 1 and (mla := mla_costs(next(iter(layers.last_index)))):
        # made in forward, and twice in backward; and their gradients
        moved += n * plan.seen_keys_per_token * 4 * mla.key_values * itemsize
    if plan.attention_is_eager:
        score_bytes = (CONSTANTS.dropped_score_bytes if arch.attention_dropout
                       else CONSTANTS.score_bytes)
        moved += n * attended_tokens * arch.n_heads * score_bytes
    if arch.moe and plan.n_expert_ranges > 1:  # the experts' rows are copied
        routed = sum(arch.layer_routed) / n_layers
        width = arch.expert_gate_up[0].in_features
        moved += routed * CONSTANTS.range_copies * n * arch.moe.top_k * width * itemsize
    return moved


def wait_seconds(
    plan: Plan, arch: Architecture, layers: LayerTotals, machine: Machine
) -> float:
    """Return how long a mean layer waits for the GPU, and for other ranks' keys and values."""
    again, routed = fraction_recomputed(plan), sum(arch.layer_routed) / arch.n_layers
    waits = 0.0
    if routed and (plan.n_expert_ranges > 1 or machine.why_no_grouped):  # the CPU needs row counts
        waits = routed * (1 + again) * CONSTANTS.range_wait_launches * machine.launch_seconds
    # keys and values go to the ranks that need them, again where they are recomputed, and back
    kv_values = max(2 * heads.n_kv * heads.dim for heads in arch.layer_heads)
    if mla := mla_costs(next(iter(layers.last_index))):
        kv_values = mla.exchanged_values
    exchanged = kv_values * plan.micro_batch_tokens * plan.dtype.itemsize
    times = (2 + again) * (plan.context_parallel_size - 1)
    return waits + times * exchanged / machine.link_bandwidth


def n_launches(plan: Plan, arch: Architecture, machine: Machine) -> float:
    """Return the CPU's time for the kernels of a mean layer, in units of Machine.launch_seconds."""
    again, routed = fraction_recomputed(plan), sum(arch.layer_routed) / arch.n_layers
    range_launches = CONSTANTS.range_launches + CONSTANTS.recomputed_range_launches * again
    launches = (CONSTANTS.launches + CONSTANTS.recomputed_launches * again
                + CONSTANTS.fsdp_launches * plan.uses_fsdp
                + routed * (CONSTANTS.routed_launches + range_launches * plan.n_expert_ranges))
    if mixer := recurrent_mixer(arch):
        n_mixers = sum(
            arch.other_mixers.get(name or "") is mixer for name in arch.layer_other_mixer)
        launches += CONSTANTS.recurrence_launches * (n_mixers / arch.n_layers)
    if arch.moe and machine.why_no_grouped:  # 2 matmuls in forward, 2 in backward
        launches += routed * CONSTANTS.expert_launches * (4 + 2 * again) * arch.moe.n_experts
    return launches


def lm_head_seconds(plan: Plan, arch: Architecture, machine: Machine) -> float:
    """Return the predicted time of the lm_head and the loss for one micro-batch."""
    logits = plan.micro_batch_tokens * arch.vocab_size
    speed = CONSTANTS.sustained * machine.flops
    return (CONSTANTS.lm_head_flops * logits * arch.hidden_size / speed
            + CONSTANTS.logits_passes * logits * plan.dtype.itemsize / machine.bandwidth)
