"""Predict a plan's peak memory, and the host memory that it takes.

    predict_memory()         bytes by kind, at the peak of a step
      sum_layers()           LayerTotals of all layers
      activation_peak()      saved and live values, at the worst kind of layer
      lm_head_bytes(), gathered_bytes(), exchanged_bytes()
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from fsdp_qlora.layer.attention_mixer import n_head_groups
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.layer_costs.layer import LayerCosts
from fsdp_qlora.model.parameters import CHUNK_BYTES
from fsdp_qlora.plan import SAVE_MLP, Plan, SavePolicy
from fsdp_qlora.planner.layer_totals import LayerTotals, saved_bytes, sum_layers
from fsdp_qlora.pretrained.architecture import Architecture


def predict_memory(plan: Plan, arch: Architecture, specs: tuple[LayerSpec, ...]) -> Plan:
    """Return the plan with its `memory` and `host_bytes`."""
    n_shards = plan.shard_group_size
    itemsize = plan.dtype.itemsize
    totals = sum_layers(specs)
    value_bytes = plan.micro_batch_tokens * itemsize  # of one value for each token
    packed_bytes = totals.packed_bytes / n_shards
    adapter_bytes = 4 * totals.layer_adapter_values  # of one layer, in fp32
    # bytes of this rank's rows of the lm_head; the embedding has as many
    table_bytes = arch.vocab_size * arch.hidden_size * itemsize / n_shards
    # values of all layers' own inputs for a token, see PerLayerInputsSpec
    n_inputs = arch.n_layers * arch.per_layer_inputs.size if arch.per_layer_inputs else 0
    # of the tables that no matmul reads, which can be in host memory
    looked_up_bytes = (
        table_bytes * (not arch.tied) + arch.vocab_size * n_inputs * itemsize / n_shards)
    by_recomputed, by_others, live = activation_peak(plan, totals, value_bytes, arch.hidden_size)
    head = lm_head_bytes(plan, arch, table_bytes)
    n_token_row_weights = plan.n_token_rows * arch.hidden_size
    memory = {
        "4-bit weights": 0 if plan.offload_params else packed_bytes,
        "embedding, head, norms": table_bytes + looked_up_bytes * (not plan.embedding_on_host)
        + (totals.n_vector_values / n_shards + totals.n_small_values
           + n_inputs * arch.hidden_size) * itemsize
        + 4 * totals.n_nested_values,
        "adapter and gradients":
            2 * plan.n_layers * adapter_bytes / n_shards + 8 * n_token_row_weights,
        "optimizer's state": plan.optimizer_bytes_per_weight * (
            plan.n_layers * totals.layer_adapter_values / n_shards + n_token_row_weights),
        "saved by recomputed layers": by_recomputed,
        "saved by other layers": by_others,
        # plus the shared keys and values, their gradients, and one layer's gradients of them
        "per-layer inputs, shared keys and values":
            (n_inputs + 3 * shared_kv_values(arch)) * value_bytes,
        "live layer or head": head if plan.uses_cuda_graphs else max(live, head),
        # FSDP2 copies it for the sum over ranks
        "one layer's adapter gradient": adapter_bytes * (3 if plan.uses_fsdp else 1),
        "gathered weights": gathered_bytes(plan, totals, itemsize),
        "keys and values of other ranks": exchanged_bytes(plan, arch, specs, value_bytes),
        # the norms of rows of weights, in fp32
        "DoRA": 4 * specs[0].dora * sum(
            fused.out_features for spec in specs for fused in spec.fused_linears
            if fused.lora_width)}
    if plan.uses_cuda_graphs:  # besides the memory above, which evaluations need
        of_micro_batch = by_recomputed + by_others + live
        memory["CUDA graphs' own"] = plan.cuda_graph_micro_batches * of_micro_batch + live
    host = looked_up_bytes * plan.embedding_on_host + packed_bytes * plan.offload_params
    if plan.offload_activations and plan.n_recomputed:
        # all but the last put(), which stays on the GPU
        offloaded, _ = saved_bytes(plan, totals, value_bytes)
        last = last_put_values(plan.save_policy(plan.n_recomputed - 1), totals, arch.hidden_size)
        host += max(0, offloaded - last * value_bytes)
    memory = {kind: int(size) for kind, size in memory.items() if size}
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


def lm_head_bytes(plan: Plan, arch: Architecture, table_bytes: float) -> float:
    """Return the bytes that the lm_head and the loss need besides weights. `table_bytes`: those of
    this rank's rows of the lm_head."""
    itemsize = plan.dtype.itemsize
    inputs = 2 * arch.hidden_size * plan.micro_batch_tokens * itemsize  # x and its gradient
    n_rows = min(plan.micro_batch_tokens, CHUNK_BYTES // (4 * arch.vocab_size))
    n_logits = n_rows * arch.vocab_size
    if plan.fuses_elementwise:  # a chunk of logits, its gradient, and a quarter more
        return inputs + 2.5 * itemsize * n_logits
    # logits and gradient with four tensors in fp32, 20 bytes; or the lm_head, and its product with
    # rows of x, in fp32
    both_bytes = (2 * itemsize + 4) * (n_logits + n_rows * arch.hidden_size)
    return inputs + max(20 * n_logits, both_bytes + 4 * table_bytes / itemsize)


def shared_kv_values(arch: Architecture) -> int:
    """Return the values per token of shared keys and values."""
    kv_to_share = [arch.layer_heads[i] for i in {*arch.kv_sources} - {None}]
    return sum(2 * heads.n_kv * heads.dim for heads in kv_to_share)


def last_put_values(policy: SavePolicy, totals: LayerTotals, hidden: int) -> int:
    """Return the values per token of a layer's last put(), see LayerFunction."""
    if policy == SAVE_MLP:
        return totals.largest_mlp_values
    return hidden + totals.largest_attention_values * policy.attention


def activation_peak(
    plan: Plan, totals: LayerTotals, value_bytes: int, hidden: int,
) -> tuple[int, int, int]:
    """Return the bytes on the GPU when activations need most: those saved by recomputed layers,
    those saved by other layers, and those that a layer's backward needs besides. Backward frees
    what a layer has saved, from the last layer to the first. So of the layers that cost and save
    the same, the last one needs most."""
    peaks = []
    for policy, layers in plan.save_policies():
        for layer_costs, last_index in totals.last_index.items():
            last = last_index[layers.stop]
            if last < layers.start:
                continue  # the range has no such layer
            recomputed, others = saved_bytes(plan, totals, value_bytes, last + 1)
            on_gpu = recomputed
            if plan.offload_activations:  # the mixer's put, and those that are copied at once
                put = last_put_values(policy, totals, hidden)
                of_mixer = hidden if policy == SAVE_MLP else put
                on_gpu = min(recomputed, value_bytes * (of_mixer + plan.n_copied_at_once * put))
            peaks.append((on_gpu, others, layer_costs.live_bytes(plan, policy)))
    return max(peaks, key=sum)


def exchanged_bytes(
    plan: Plan, arch: Architecture, specs: Sequence[LayerSpec], value_bytes: int
) -> float:
    """Return the bytes of keys and values that context parallelism exchanges, and of their
    gradients, beside a layer's own."""
    if plan.context_parallel_size == 1:
        return 0
    if mla := LayerCosts(specs[0]).mla_costs:
        # its live_bytes() counts what else backward needs
        n_saved = max(1, plan.n_layers - plan.n_recomputed)
        return n_saved * mla.context_saved_values(plan) * value_bytes
    kv_width = max(2 * heads.n_kv * heads.dim for heads in arch.layer_heads)
    query_width = max(heads.n * heads.dim for heads in arch.layer_heads)
    is_grouped = any(heads.n_kv < heads.n for heads in arch.layer_heads)
    n_ranks, n_visible = plan.context_parallel_size, plan.visible_keys_per_token
    # the peak is in the backward of the first group of heads: live_bytes() counts the gradients of
    # all groups' keys and values, but those of the other groups do not exist yet
    n_groups = n_head_groups(arch, value_bytes)
    kv_values = (n_visible - 1 + 1 / n_groups) * kv_width
    # a group's kernel makes the gradients of the keys and values that it sees, with grouped-query
    # attention one for each query head; kernel_values() counts those of this rank's own tokens
    n_keys_of_call = n_visible if plan.is_varlen else n_visible - 1
    in_kernel = n_visible * kv_width + 2 * (n_keys_of_call - 1) * query_width * is_grouped
    if not plan.is_varlen:  # the results of a call are copied to their places
        in_kernel += n_keys_of_call * kv_width
    # after the kernel, in kv_width: the gradients of the keys that are seen (n_ranks + 0.5), those
    # sent back and received (1.5 n_ranks + 0.5), in fp32 their sum (2) and the rows to which one
    # rank's part is added (2); less what kernel_values() counts, which is free by then
    after_kernel = (2.5 * n_ranks + 5) * kv_width - (5 if is_grouped else 3) * query_width
    saved = max(0, plan.n_layers - plan.n_recomputed - 1) * n_visible * kv_width
    return (saved + kv_values + max(in_kernel, after_kernel) / n_groups) * value_bytes


def gathered_bytes(plan: Plan, totals: LayerTotals, itemsize: int) -> int:
    """Return the bytes of weights that FSDP2 has gathered, and of adapters in the compute dtype."""
    layer_bytes = totals.layer_adapter_values * itemsize
    all_bytes = plan.n_layers * layer_bytes
    if plan.uses_fsdp:
        layer_bytes += totals.largest_packed + totals.largest_vectors * itemsize
        all_bytes += totals.packed_bytes + totals.n_vector_values * itemsize
        if not plan.reshard_after_forward:
            return all_bytes + layer_bytes  # all layers stay until their backward, and one more
    return 2 * layer_bytes  # a layer and the next one
