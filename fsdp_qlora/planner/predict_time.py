"""Predict a plan's time per token.

    predict_time()           seconds of a token
      layer_seconds()        compute_seconds() with moved_bytes(); n_launches(); wait_seconds()
      lm_head_seconds()
"""

from __future__ import annotations

import dataclasses

from fsdp_qlora.kernels.recurrence import recurrent_mixer_spec
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.plan import SAVE_MLP, Plan
from fsdp_qlora.planner.layer_totals import LayerTotals, saved_bytes, sum_layers
from fsdp_qlora.planner.machine import Machine
from fsdp_qlora.planner.time_constants import CONSTANTS
from fsdp_qlora.pretrained.architecture import Architecture


def predict_time(
    plan: Plan, arch: Architecture, specs: tuple[LayerSpec, ...], machine: Machine,
    mean_document_tokens: float,
) -> Plan:
    """Return the plan with its `seconds_per_token`, the predicted time of one GPU per token.

    For the rows to which TimeConstants were fitted, those of tests/test_memory.py, the predicted
    tokens/s are 0.94 to 1.18 times the measured ones; for hybrids and Gemma 4 up to 1.43 times, see
    benchmarks/RESULTS.md. That is good enough to compare plans on H100s and H200s; other GPUs were
    not compared.
    """
    layer = layer_seconds(plan, arch, sum_layers(specs), machine, mean_document_tokens)
    seconds = layer.total(plan.uses_cuda_graphs) * arch.n_layers
    seconds += lm_head_seconds(plan, arch, machine)
    return dataclasses.replace(plan, seconds_per_token=seconds / plan.micro_batch_tokens)


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
            CONSTANTS.overlap_lost_fraction * min(self.compute, 2 * self.copies) + self.waits)


def layer_seconds(
    plan: Plan, arch: Architecture, totals: LayerTotals, machine: Machine,
    mean_document_tokens: float,
) -> LayerSeconds:
    """Return the LayerSeconds of the mean of all layers."""
    n_layers = arch.n_layers
    compute = compute_seconds(plan, arch, totals, machine, mean_document_tokens)
    active_weights = totals.active_weights / n_layers
    forward = compute * active_weights / (
        2 * active_weights + weights_multiplied_again(plan, totals))
    n_shards = plan.shard_group_size
    gathered = totals.packed_bytes / n_layers + totals.layer_adapter_values * plan.dtype.itemsize
    gathers = gathered * (n_shards - 1) / n_shards / machine.link_bandwidth
    # each way: activations go to the host in forward and come back in backward; weights come twice
    copies = plan.offload_params * gathered / n_shards
    value_bytes = plan.micro_batch_tokens * plan.dtype.itemsize
    copies += plan.offload_activations * saved_bytes(plan, totals, value_bytes)[0] / n_layers
    return LayerSeconds(
        compute=compute, forward=forward,
        gathers=gathers * (2 if plan.reshard_after_forward else 1),
        copies=copies / machine.host_copy_bandwidth,
        launches=n_launches(plan, arch, machine) * machine.launch_seconds,
        waits=wait_seconds(plan, arch, totals, machine))


def fraction_recomputed(plan: Plan) -> float:
    """Return the fraction of the layers that backward recomputes whole."""
    return (plan.n_recomputed - plan.n_mlp_saved) / plan.n_layers


def weights_multiplied_again(plan: Plan, totals: LayerTotals) -> float:
    """Return the number of a mean layer's weights that backward multiplies by once more."""
    # layer 0 stands for all of these: SAVE_ATTENTION multiplies by the same weights again as
    # SAVE_INPUT, and no plan has it beside SAVE_MID_RESIDUAL
    of_whole = fraction_recomputed(plan) * totals.recomputed_weights[plan.save_policy(0)]
    of_mixers = plan.n_mlp_saved / plan.n_layers * totals.recomputed_weights[SAVE_MLP]
    return (of_whole + of_mixers) / plan.n_layers


def compute_seconds(
    plan: Plan, arch: Architecture, totals: LayerTotals, machine: Machine,
    mean_document_tokens: float,
) -> float:
    """Return the predicted time of a mean layer's matmuls and memory traffic, in both passes."""
    n, n_layers = plan.micro_batch_tokens, arch.n_layers
    active_weights = totals.active_weights / n_layers
    flops = 2 * n * (2 * active_weights + weights_multiplied_again(plan, totals))
    if plan.context_parallel_size > 1 and (mla := totals.mla_costs):
        # of keys that are another rank's, or seen by both pieces
        again = fraction_recomputed(plan)
        flops += 2 * n * (plan.visible_keys_per_token - 1) * (2 + again) * mla.kv_b.n_weights
    attended_tokens = min(n * plan.context_parallel_size, mean_document_tokens)
    forwards = CONSTANTS.attention_forwards
    # a recomputed layer's forward, unless its results are reused
    forwards += (plan.n_recomputed - plan.n_attention_saved) / n_layers
    attention_flops = 2 * n * forwards * attended_tokens * totals.mean_query_width
    matmul_speed = CONSTANTS.sustained_fraction * machine.flops_per_second
    kernel_speed = (CONSTANTS.varlen_flops_per_second if plan.is_varlen else
                    CONSTANTS.fixed_len_flops_per_second)
    moved = moved_bytes(plan, arch, totals, attended_tokens)
    return (flops / matmul_speed + attention_flops / min(matmul_speed, kernel_speed)
            + moved / machine.memory_bandwidth)


def moved_bytes(
    plan: Plan, arch: Architecture, totals: LayerTotals, attended_tokens: float
) -> float:
    """Return the bytes that a mean layer reads and writes, besides those of matmuls.
    `attended_tokens`: tokens of a mean document."""
    n, n_layers, itemsize = plan.micro_batch_tokens, arch.n_layers, plan.dtype.itemsize
    # each use of a weight reads 4 bits and writes a number: once in forward, once in backward, and
    # once more for a fraction of the recomputed layers' weights
    share = (CONSTANTS.reused_dequantized_again_fraction if plan.reuse_dequantized
             else CONSTANTS.dequantized_again_fraction)
    uses = 2 * (totals.n_weights / n_layers) + (
        fraction_recomputed(plan) * share * (totals.active_weights / n_layers))
    moved = (uses * (0.5 + itemsize) / CONSTANTS.dequantizing_fraction
             + n * totals.elementwise_values / n_layers * itemsize)
    if plan.context_parallel_size > 1 and (mla := totals.mla_costs):
        # made in forward, and twice in backward; and their gradients
        moved += n * plan.visible_keys_per_token * 4 * mla.values_to_make_kv * itemsize
    if plan.attention_is_eager:
        score_bytes = (CONSTANTS.dropped_score_bytes if arch.attention_dropout
                       else CONSTANTS.score_bytes)
        moved += n * attended_tokens * arch.n_heads * score_bytes
    if arch.moe and plan.n_expert_ranges > 1:  # the experts' rows are copied
        routed = sum(arch.layer_routed) / n_layers
        width = arch.expert_gate_up[0].in_features
        moved += routed * CONSTANTS.range_accesses * n * arch.moe.top_k * width * itemsize
    return moved


def wait_seconds(
    plan: Plan, arch: Architecture, totals: LayerTotals, machine: Machine
) -> float:
    """Return how long a mean layer waits for the GPU, and for other ranks' keys and values."""
    again, routed = fraction_recomputed(plan), sum(arch.layer_routed) / arch.n_layers
    waits = 0.0
    if routed and (plan.n_expert_ranges > 1 or machine.why_no_grouped_mm):
        # the CPU needs row counts
        waits = routed * (1 + again) * CONSTANTS.range_wait_launches * machine.launch_seconds
    # keys and values go to the ranks that need them, again where they are recomputed, and back
    kv_values = max(2 * heads.n_kv * heads.dim for heads in arch.layer_heads)
    if mla := totals.mla_costs:
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
    if mixer := recurrent_mixer_spec(arch):
        n_mixers = sum(
            arch.other_mixers.get(kind.other_mixer or "") is mixer for kind in arch.layer_kinds)
        launches += CONSTANTS.recurrence_launches * (n_mixers / arch.n_layers)
    if arch.moe and machine.why_no_grouped_mm:  # 2 matmuls in forward, 2 in backward
        launches += routed * CONSTANTS.expert_launches * (4 + 2 * again) * arch.moe.n_experts
    return launches


def lm_head_seconds(plan: Plan, arch: Architecture, machine: Machine) -> float:
    """Return the predicted time of the lm_head and the loss for one micro-batch."""
    logits = plan.micro_batch_tokens * arch.vocab_size
    speed = CONSTANTS.sustained_fraction * machine.flops_per_second
    return (CONSTANTS.lm_head_flops * logits * arch.hidden_size / speed
            + CONSTANTS.logits_accesses * logits * plan.dtype.itemsize / machine.memory_bandwidth)
