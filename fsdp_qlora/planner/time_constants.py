"""The constants of predict_time()."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class TimeConstants:
    """Constants of predict_time(), fitted to the tokens/s of the rows of benchmarks/RESULTS.md that
    tests/test_memory.py compares, on H100s and H200s. Not fitted are the constants marked
    "counted", which follow from what is computed, or "measured", each by itself. "Launches" are in
    units of Machine.launch_seconds, the CPU's seconds for one kernel."""

    # fractions of the speeds that measure_machine() finds
    sustained_fraction: float = 0.77  # of the FLOP/s, over whole steps
    # of the bandwidth, while weights are dequantized; measured, twice
    dequantizing_fraction: float = 0.65
    # work of attention in units of its forward, which has 2 matmuls; backward has 5; counted
    attention_forwards: float = 3.5
    # FLOP/s of the attention kernels, at most; measured in whole steps of an 8B: cuDNN's for rows
    # of 38,912 and 65,536 tokens (H100), not for long pieces of rows, which are taken for as fast;
    # Flash Attention 2, which does not use Hopper's own instructions, 345 TFLOP/s (2 x H200)
    fixed_len_flops_per_second: float = 575e12
    varlen_flops_per_second: float = 350e12
    # slowdown of attention for heads of more than 128 values, to 256: by rows of 32,768 tokens of
    # Qwen3.5-9B and GLM-4.7-Flash (H200); for heads of more than 256, by flex_attention, measured:
    # 41 ms for 8,192 tokens of Gemma 4 31B (H100), forward and backward
    wide_head_slowdown: float = 1.6
    widest_head_slowdown: float = 11
    # bytes that plain torch moves for each score of attention, in both passes, without and with
    # dropout; from one row each
    score_bytes: float = 170
    dropped_score_bytes: float = 640
    # fraction of a recomputed layer's weights that is dequantized a third time
    dequantized_again_fraction: float = 1
    reused_dequantized_again_fraction: float = 0.5  # with reuse_dequantized
    # launches of a layer in both passes
    launches: float = 100  # of any layer
    recomputed_launches: float = 80  # more if it is recomputed
    fsdp_launches: float = 40  # more with FSDP2
    routed_launches: float = 40  # more if it has experts
    recurrence_launches: float = 200  # more if its mixer has a state; fitted to Gated DeltaNet
    range_launches: float = 30  # more for each range of experts
    recomputed_range_launches: float = 15  # more for each range if it is recomputed
    # per matmul of an expert's rows, if experts are multiplied one by one; measured: the time of
    # torch.mm in a loop on a CPU alone, because no GPU that needs it was available
    expert_launches: float = 0.3
    # these two apply to several ranges of experts; the MoE rows to which they are fitted have 4
    range_accesses: float = 4  # times that a row of an expert's input or output is read or written
    range_wait_launches: float = 30  # a pass waits for the GPU this long, in launches
    # fraction of the shorter of computing and both copies that is lost when they overlap
    overlap_lost_fraction: float = 0.1
    lm_head_flops: float = 4  # per logit and hidden value: 2 matmuls of 2; counted
    logits_accesses: float = 5  # times that a logit is read or written


CONSTANTS = TimeConstants()
