#!/usr/bin/env python3
"""Measure the scripts on a GPU machine: named cases, each a torchrun of its own.

    python benchmarks/run.py memory --out bench [--cases 70b-2k,70b-8k] [--flags='--attn sdpa']
    python benchmarks/run.py scale --out bench        # 2 GPUs against all of the machine
    python benchmarks/run.py speed --out bench [--peer baseline_trl.py]    # TRL beside it
    python benchmarks/run.py chat --out bench [--peer baseline_trl.py]     # rows of uneven length
    python benchmarks/run.py small --out bench        # small models, with and without CUDA graphs
    python benchmarks/run.py speed --out bench --cases nemo-1gpu --peers all    # see peers.py
    python benchmarks/run.py layouts --out bench      # what the plan chooses, beside others
    python benchmarks/run.py preferences --out bench  # DPO and its kin against SFT
    python benchmarks/run.py minimal --out bench --peers trl-fsdp   # minimal_fsdp_qlora.py
    python benchmarks/run.py start --out bench        # seconds from the launch to the first step
    python benchmarks/run.py profile --out bench --cases 70b8-nooffload     # of any group
    python benchmarks/run.py ceiling llama-2-70b:4096 # of bf16 matmuls on 4,096 tokens
    python benchmarks/run.py memory --list

Written to --out after each case: GROUP.md, the table; results.jsonl, one object a case, appended;
CASE.log; for a profile CASE.profile.md and CASE.trace.json.gz. A case that fails stops no other.
With --peers the ratio is to the fastest peer that does the same work in the same layout.
tokens/s: without padding, median of the steps after the second, or after the first where that
leaves none. TFLOP/s: 6 x the parameters of the linear layers, head included, a token, whatever is
really computed. NCCL_P2P_DISABLE=1 in front of a command imitates a bus without NVLink.
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from peers import PEERS

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS, PROFILED_STEPS = 4, 2
BUILTIN_CONFIGS = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3-8b-dropout": (4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": (16384, 53248, 126, 128, 8, 128256),
    "qwen2.5-72b": (8192, 29568, 80, 64, 8, 152064),
    "qwen2.5-32b": (5120, 27648, 64, 40, 8, 152064),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 151936),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256),
    "smollm2-135m": (576, 1536, 30, 9, 3, 49152),
    "qwen3-30b-a3b": (2048, 6144, 48, 32, 4, 151936),
    "qwen3-235b-a22b": (4096, 12288, 94, 64, 4, 151936),
    "glm-4.5-air": (4096, 10944, 46, 96, 8, 151552),
    "gpt-oss-20b": (2880, 2880, 24, 64, 8, 201088),
    "gpt-oss-120b": (2880, 2880, 36, 64, 8, 201088),
    "mistral-nemo-12b": (5120, 14336, 40, 32, 8, 131072),
    "qwen3-14b": (5120, 17408, 40, 40, 8, 151936),
    "gemma-2-2b": (2304, 9216, 26, 8, 4, 256000),
    "gemma-2-27b": (4608, 36864, 46, 32, 16, 256000),
    "gemma-3-12b": (3840, 15360, 48, 16, 8, 262208),
    "qwen3.5-9b": (4096, 12288, 32, 16, 4, 248320),
    "qwen3.5-27b": (5120, 17408, 64, 24, 4, 248320),
    "qwen3.5-35b-a3b": (2048, 512, 40, 16, 2, 248320),
    "qwen3.5-122b-a10b": (3072, 1024, 48, 32, 2, 248320),
    "granite-4-h-small": (4096, 1536, 40, 32, 8, 100352),
    "nemotron-3-nano-30b": (2688, 1856, 52, 32, 2, 131072),
    "glm-4.7-flash": (2048, 10240, 47, 20, 20, 154880),
    "deepseek-v3": (7168, 18432, 61, 128, 128, 129280),
    "gemma-4-31b": (5376, 21504, 60, 32, 16, 262144),
    "gemma-4-26b-a4b": (2816, 2112, 30, 16, 8, 262144),
    "gemma-4-e4b": (2560, 10240, 42, 8, 2, 262144),
    "step-3.7-flash": (4096, 11264, 45, 64, 8, 128896),
    "qwen3-next-80b-a3b": (2048, 5120, 48, 16, 2, 151936),
    "falcon-h1-7b": (3072, 12288, 44, 12, 2, 130048),
    "qwen3.5-4b": (2560, 9216, 32, 16, 4, 248320),
    "lfm2-8b-a1b": (2048, 7168, 24, 32, 8, 65536),
    "lfm3-1.7b": (2048, 7680, 24, 16, 4, 128000),  # the defaults of transformers' Lfm3Config
}
HEAD_DIM = {  # where it is not hidden / heads
    "mistral-nemo-12b": 128, "qwen3-8b": 128, "gemma-2-2b": 256, "gemma-2-27b": 128,
    "gemma-3-12b": 256}  # fmt: skip
TIED = (  # embedding and head
    "llama-3.2-1b", "smollm2-135m", "gemma-2-2b", "gemma-2-27b", "gemma-3-12b", "gemma-4-31b",
    "gemma-4-26b-a4b", "gemma-4-e4b", "qwen3.5-4b", "lfm2-8b-a1b", "lfm3-1.7b")
GEMMA2 = dict(model_type="gemma2", sliding_window=4096)  # soft caps are its config's defaults
GEMMAS = {  # what else their config.json says
    "gemma-2-2b": dict(GEMMA2, query_pre_attn_scalar=256),
    "gemma-2-27b": dict(GEMMA2, query_pre_attn_scalar=144),
    "gemma-3-12b": dict(
        model_type="gemma3_text", query_pre_attn_scalar=256, sliding_window=1024),
}  # fmt: skip
MIXTURES = {  # what else their config.json says; above, `intermediate` is of the experts of a token
    "qwen3-30b-a3b": dict(
        model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True),
    "qwen3-235b-a22b": dict(
        model_type="qwen3_moe", head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1536, norm_topk_prob=True),
    "glm-4.5-air": dict(
        model_type="glm4_moe", head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1,
        attention_bias=True, routed_scaling_factor=1.0, norm_topk_prob=True),
    "gpt-oss-20b": dict(
        model_type="gpt_oss", head_dim=64, num_local_experts=32, num_experts_per_tok=4),
    "gpt-oss-120b": dict(
        model_type="gpt_oss", head_dim=64, num_local_experts=128, num_experts_per_tok=4),
    "step-3.7-flash": dict(  # inside of a multimodal model
        model_type="step3p5", head_dim=128, num_sliding_attention_heads=96, sliding_window=512,
        layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
        rope_parameters={
            "full_attention": {
                "rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 42, moe_router_scaling_factor=3.0,
        swiglu_limits=[None] * 43 + [7, 7], swiglu_limits_shared=[None] * 44 + [16]),
}  # fmt: skip

QWEN3_5 = dict(
    model_type="qwen3_5_text", head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32,
    rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25})
QWEN3_5_MOE = dict(
    QWEN3_5, model_type="qwen3_5_moe_text", num_experts=256, num_experts_per_tok=8,
    moe_intermediate_size=512, shared_expert_intermediate_size=512)
MIXERS = {  # the same; not all of their layers are attention
    "qwen3.5-4b": QWEN3_5,
    "qwen3.5-9b": QWEN3_5,
    "qwen3.5-27b": dict(QWEN3_5, linear_num_value_heads=48),
    "qwen3.5-35b-a3b": QWEN3_5_MOE,
    "qwen3.5-122b-a10b": dict(
        QWEN3_5_MOE, linear_num_value_heads=64, moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024),
    "granite-4-h-small": dict(
        model_type="granitemoehybrid", num_local_experts=72, num_experts_per_tok=10,
        intermediate_size=768,
        shared_intermediate_size=1536, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128,
        position_embedding_type="nope", embedding_multiplier=12, residual_multiplier=0.22,
        attention_multiplier=0.0078125, logits_scaling=16,
        layer_types=["attention" if i % 10 == 5 else "mamba" for i in range(40)]),
    "nemotron-3-nano-30b": dict(
        model_type="nemotron_h", head_dim=128, mamba_num_heads=64, mamba_head_dim=64,
        ssm_state_size=128, n_groups=8, n_routed_experts=128, num_experts_per_tok=6,
        moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5, layer_norm_epsilon=1e-5, hybrid_override_pattern=(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME")),
    "qwen3-next-80b-a3b": dict(
        QWEN3_5_MOE, model_type="qwen3_next", num_experts=512, num_experts_per_tok=10,
        norm_topk_prob=True),
    "falcon-h1-7b": dict(
        model_type="falcon_h1", head_dim=128, mamba_d_ssm=3072, mamba_n_heads=24, mamba_d_head=128,
        mamba_d_state=256, mamba_n_groups=1, mamba_rms_norm=False, key_multiplier=0.3,
        embedding_multiplier=5.6, lm_head_multiplier=0.013, attention_in_multiplier=1.0,
        attention_out_multiplier=0.04, mlp_multipliers=[0.88, 0.13], ssm_in_multiplier=0.88,
        ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.35], ssm_out_multiplier=0.12),
    "lfm2-8b-a1b": dict(
        model_type="lfm2_moe", num_experts=32, num_experts_per_tok=4, moe_intermediate_size=1792,
        num_dense_layers=2, norm_topk_prob=True, use_expert_bias=True, layer_types=[
            "full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)]),
    "lfm3-1.7b": dict(model_type="lfm3"),
}  # fmt: skip

MLA = dict(kv_lora_rank=512, qk_rope_head_dim=64, norm_topk_prob=True, n_shared_experts=1)
LATENT = {
    "glm-4.7-flash": dict(
        MLA, model_type="glm4_moe_lite", q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256,
        first_k_dense_replace=1, moe_intermediate_size=1536, n_routed_experts=64,
        num_experts_per_tok=4, n_group=1, topk_group=1, routed_scaling_factor=1.8),
    "deepseek-v3": dict(
        MLA, model_type="deepseek_v3", q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128,
        first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256,
        num_experts_per_tok=8, n_group=8, topk_group=4, routed_scaling_factor=2.5),
}  # fmt: skip
GEMMA4 = dict(  # what is left out here is its config's default
    model_type="gemma4_text", sliding_window=1024, head_dim=256, global_head_dim=512,
    final_logit_softcapping=30.0, hidden_size_per_layer_input=0, attention_k_eq_v=True,
    pad_token_id=0)
GEMMAS_4 = {
    "gemma-4-e4b": dict(
        GEMMA4, attention_k_eq_v=False, hidden_size_per_layer_input=256, num_kv_shared_layers=18),
    "gemma-4-31b": dict(GEMMA4, num_global_key_value_heads=4),
    "gemma-4-26b-a4b": dict(
        GEMMA4, num_global_key_value_heads=2, enable_moe_block=True, num_experts=128,
        top_k_experts=8, moe_intermediate_size=704),
}  # fmt: skip


def case(name, model, rows, seq, steps, flags="", gpus=2, layers=None, base=None, at_once=None,
         chat=False, graphs=True, cache=None, minimal=False):  # fmt: skip
    """One measurement: `rows` of `seq` tokens a GPU and step. gpus None: all of the machine, which
    {gpus} in the flags stands for; layers None: the whole model; base: the case that the table's
    ratio is to; at_once: tokens at once, None: all of them, 0: what the script chooses; chat: `seq`
    is the longest of rows of uneven length; graphs: whether CUDA graphs are allowed; cache: the
    one of compiled kernels, "cold" or "warm", None: the user's own; minimal: by
    minimal_fsdp_qlora.py."""
    return locals()


CAP, OFFLOAD, FLASH = "--memory_limit_gib 22.5", "--offload_activations", "--attn flash_attention_2"
ALL, NONE = "--recompute all", "--recompute none"
RANK_32 = f"--lora_rank 32 {OFFLOAD}"  # as in Unsloth's table of longest rows
LONG = 16_384  # tokens in a row; peers recompute all with such rows
SHARED = "--shard_group_size {gpus}"  # one copy of the model on all GPUs
MEDIAN, SPREAD, SHORTEST = 200, 0.9, 16  # of chat rows' lengths, which are log-normal
GROUPS = {
    "memory": [
        case("70b-2k", "llama-2-70b", 2, 2048, 6, f"{CAP} {OFFLOAD} {ALL}",
             base="70b-2k-nooffload"),
        case("70b-2k-auto", "llama-2-70b", 2, 2048, 6, f"{CAP} {OFFLOAD}", base="70b-2k"),
        case("70b-2k-1gpu", "llama-2-70b", 2, 2048, 6, f"{CAP} {OFFLOAD} --offload_params", gpus=1),
        case("70b-2k-nooffload", "llama-2-70b", 2, 2048, 6, f"{ALL} {SHARED}"),
        case("70b8-offload", "llama-2-70b", 2, 2048, 12, f"{OFFLOAD} {ALL} {SHARED}", layers=8,
             base="70b8-nooffload"),
        case("70b8-nooffload", "llama-2-70b", 2, 2048, 12, f"{ALL} {SHARED}", layers=8),
        case("l3-70b-2k", "llama-3-70b", 2, 2048, 6, f"{CAP} {OFFLOAD} {ALL}"),
        case("qwen-72b-2k", "qwen2.5-72b", 2, 2048, 6, f"{CAP} {OFFLOAD} {ALL}", at_once=0),
        case("70b-8k", "llama-2-70b", 1, 8192, 3, f"{CAP} {OFFLOAD} {ALL}"),
        case("70b-32k", "llama-2-70b", 1, 32768, 2, f"{CAP} {OFFLOAD} --offload_params {ALL}"),
        case("8b-none", "llama-3-8b", 2, 2048, 8, f"{CAP} {NONE} {SHARED}"),
        case("8b-64k", "llama-3-8b", 1, 65536, 2, f"{CAP} {OFFLOAD} {ALL} {SHARED}"),
        case("8b-1gpu", "llama-3-8b", 1, 8192, 4, f"{CAP} {OFFLOAD} {ALL}", gpus=1),
        case("8b-dora", "llama-3-8b", 2, 2048, 8, f"{NONE} --adapter dora", gpus=1),
        case("70b-auto", "llama-2-70b", 2, 2048, 6, base="70b-2k-nooffload"),
    ],
    "scale": [
        case("70b-2gpus", "llama-2-70b", 2, 2048, 6, f"{ALL} {SHARED}"),
        case("70b-all", "llama-2-70b", 2, 2048, 6, f"{ALL} {SHARED}", gpus=None, base="70b-2gpus"),
        case("8b-2gpus", "llama-3-8b", 2, 2048, 12, f"{ALL} {SHARED}"),
        case("8b-all", "llama-3-8b", 2, 2048, 12, f"{ALL} {SHARED}", gpus=None, base="8b-2gpus"),
        case("8b-all-groups", "llama-3-8b", 2, 2048, 12, f"{ALL} --shard_group_size 2", gpus=None,
             base="8b-2gpus"),
        case("8b-all-copies", "llama-3-8b", 2, 2048, 12, ALL, gpus=None, base="8b-2gpus"),
    ],
    "speed": [
        *(case(name, model, 2, 2048, 9, flags, layers=layers, base=f"trl-{name}")
          for name, model, layers, flags in (
              ("70b8-sdpa", "llama-2-70b", 8, f"--attn sdpa {ALL} {SHARED}"),
              ("70b8-flash", "llama-2-70b", 8, f"{FLASH} {ALL} {SHARED}"),
              ("8b16-flash", "llama-3-8b", 16, f"{FLASH} {ALL}"),
              ("8b16-flash-none", "llama-3-8b", 16, f"{FLASH} {NONE}"),
          )),
        case("8b-default", "llama-3-8b", 2, 2048, 12, base="8b-shared"),
        case("8b-copies", "llama-3-8b", 2, 2048, 12, ALL, base="8b-shared"),
        case("8b-shared", "llama-3-8b", 2, 2048, 12, f"{ALL} {SHARED}"),
        case("8b-1gpu-none", "llama-3-8b", 2, 2048, 9, f"{NONE} --attn sdpa", gpus=1),
        case("8b-1gpu-all", "llama-3-8b", 2, 2048, 9, ALL, gpus=1, base="8b-1gpu-none"),
        *(case(f"nemo{name}", "mistral-nemo-12b", 2, 2048, 9, flags, gpus=gpus, layers=20,
               base=name and "nemo")
          for name, gpus, flags in (
              ("", 2, ""), ("-all", 2, ALL), ("-shared", 2, f"{ALL} {SHARED}"),
              ("-shared-none", 2, f"{NONE} {SHARED}"), ("-1gpu", 1, ""), ("-1gpu-all", 1, ALL),
              ("-1gpu-offload", 1, f"{ALL} {OFFLOAD}"),
              ("-1gpu-offload-auto", 1, f"{OFFLOAD} --memory_limit_gib 7.7"),
          )),
        *(case(f"qwen3-14b20{name}", "qwen3-14b", 2, 2048, 9, flags, gpus=1, layers=20)
          for name, flags in (("", NONE), ("-all", ALL), ("-offload", f"{ALL} {OFFLOAD}"))),
    ],
    "chat": [  # 32 chat rows have some 9,600 tokens
        case("8b-fixed", "llama-3-8b", 4, 2048, 12, at_once=0),
        case("8b-chat", "llama-3-8b", 32, 2048, 12, at_once=0, chat=True, base="8b-fixed"),
        case("8b16-chat", "llama-3-8b", 32, 2048, 12, FLASH, layers=16, at_once=0, chat=True,
             base="trl-8b16-chat"),
    ],
    "small": [
        case(f"{short}{name}", model, 2, 2048, 24, gpus=1, graphs=graphs, base=f"{short}-plain")
        for short, model in (("1b", "llama-3.2-1b"), ("135m", "smollm2-135m"))
        for name, graphs in (("", True), ("-plain", False))
    ],
    "experts": [
        *(case(f"{short}-{name}", "qwen3-30b-a3b", 1, tokens, 9, flags, gpus=1, layers=4)
          for short, tokens in (("qwen30b4-4k", 4096), ("qwen30b4-16k", 16384))
          for name, flags in (("none", NONE), ("all", ALL))),
        case("qwen30b", "qwen3-30b-a3b", 8, 2048, 6, gpus=1, at_once=0),
        case("qwen30b-24gb", "qwen3-30b-a3b", 8, 2048, 5, CAP, gpus=1, at_once=0),
        case("qwen30b-24gb-offload", "qwen3-30b-a3b", 8, 2048, 5, f"{CAP} {OFFLOAD}", gpus=1,
             at_once=0),
        case("qwen30b4-adapters", "qwen3-30b-a3b", 1, 4096, 9,
             f"{NONE} --target_modules q_proj k_proj v_proj o_proj experts", gpus=1, layers=4),
        case("gpt-oss-20b-24gb", "gpt-oss-20b", 8, 2048, 5, CAP, gpus=1, at_once=0),
        case("gpt-oss-120b", "gpt-oss-120b", 8, 2048, 5, at_once=0),
        case("gpt-oss-120b-shared", "gpt-oss-120b", 8, 2048, 5, SHARED, at_once=0),
        *(case(f"{name}-1gpu", model, 8, 2048, 5, gpus=1, at_once=0) for name, model in (
            ("gpt-oss-120b", "gpt-oss-120b"), ("glm-air", "glm-4.5-air"),
            ("qwen235b", "qwen3-235b-a22b"))),
        case("glm-air", "glm-4.5-air", 8, 2048, 5, at_once=0),
        case("glm-air-46gb", "glm-4.5-air", 4, 2048, 5, f"--memory_limit_gib 46 {SHARED}",
             at_once=0),
        case("qwen235b", "qwen3-235b-a22b", 4, 2048, 4, SHARED, at_once=0),
        case("step37", "step-3.7-flash", 8, 2048, 4, SHARED, at_once=0),
    ],
    "layouts": [  # what the plan chooses, and for the 70B others by hand
        *(case(name, model, 8, 2048, 5, flags, gpus=gpus, at_once=at_once)
          for name, model, gpus, at_once, flags in (
              ("8b-plan", "llama-3-8b", 2, 0, ""),
              ("32b-plan", "qwen2.5-32b", 2, 0, ""),
              ("70b-plan", "llama-2-70b", 2, 0, ""),
              ("70b-copies", "llama-2-70b", 2, 0, "--shard_group_size 1"),
              ("70b-copies-4k", "llama-2-70b", 2, 4096, "--shard_group_size 1"),
              ("70b-shared", "llama-2-70b", 2, 0, SHARED),
              ("70b-shared-8k", "llama-2-70b", 2, 8192, SHARED),
              ("32b-24gb", "qwen2.5-32b", 2, 0, CAP),
              ("32b-48gb", "qwen2.5-32b", 2, 0, "--memory_limit_gib 46"),
              ("8b-24gb", "llama-3-8b", 1, 0, CAP),
              ("qwen3-8b-24gb", "qwen3-8b", 1, 0, CAP),
          )),
    ],
    "preferences": [  # a row of dpo has two documents; all steps have as many
        *(case(f"8b-{loss}", "llama-3-8b", rows, 1024, 9, f"{NONE} --loss {loss}", gpus=1,
               at_once=8192, base=None if loss == "sft" else "8b-sft")
          for loss, rows in (("sft", 32), ("dpo", 16), ("orpo", 16), ("kto", 32))),
        *(case(f"70b-{loss}-24gb", "llama-2-70b", rows, 2048, 4, f"{CAP} {OFFLOAD} --loss {loss}",
               at_once=2048, base=None if loss == "sft" else "70b-sft-24gb")
          for loss, rows in (("sft", 2), ("dpo", 1), ("kto", 2))),
    ],
    "minimal": [  # beside the same work by train_fsdp_qlora.py
        *(case(f"minimal-{name}", model, rows, 2048, steps, flags, gpus=gpus, chat=chat, base=base,
               minimal=True)
          for name, model, rows, steps, gpus, chat, base, flags in (
              ("8b", "llama-3-8b", 4, 12, 2, False, "8b-4-rows", ""),
              ("8b-sdpa", "llama-3-8b", 4, 6, 2, False, "minimal-8b", "--no_flash_attn"),
              ("8b-offload", "llama-3-8b", 4, 6, 2, False, "minimal-8b", "--offload"),
              ("8b-1gpu", "llama-3-8b", 4, 6, 1, False, None, CAP),
              ("8b-chat", "llama-3-8b", 64, 6, 2, True, "minimal-8b", ""),
              ("70b", "llama-3-70b", 2, 5, 2, False, "70b-2-rows",
               f"{CAP} --offload --micro_batch_size 2"),
              ("70b-1-row", "llama-3-70b", 1, 5, 2, False, None, f"{CAP} --offload"),
              ("70b-on-gpu", "llama-3-70b", 1, 5, 2, False, "minimal-70b-1-row", ""),
              ("70b-1gpu", "llama-3-70b", 2, 4, 1, False, None,
               f"{CAP} --offload --micro_batch_size 2"),
          )),
        case("8b-4-rows", "llama-3-8b", 4, 2048, 12, f"{ALL} {SHARED}"),
        case("70b-2-rows", "llama-3-70b", 2, 2048, 5, f"{CAP} {OFFLOAD}", at_once=0),
    ],
    "start": [
        case(f"{short}-{cache}", model, 8, 2048, 1, gpus=1, at_once=0, cache=cache)
        for short, model in (
            ("8b", "llama-3-8b"), ("14b", "qwen3-14b"), ("30b", "qwen3-30b-a3b"))
        for cache in ("cold", "warm")
    ],
    "mixers": [  # flash-linear-attention's kernels need torch 2.13; which are taken is in the log
        case("qwen9b", "qwen3.5-9b", 8, 2048, 6, gpus=1, at_once=0),
        case("qwen9b-4k", "qwen3.5-9b", 2, 2048, 9, NONE, gpus=1),  # for --peers
        case("qwen9b-chat", "qwen3.5-9b", 54, 2048, 6, gpus=1, at_once=0, chat=True, base="qwen9b"),
        *(case(f"{short}-24gb", model, 8, 2048, 4, f"{CAP} {OFFLOAD}", gpus=1, at_once=0)
          for short, model in (("qwen9b", "qwen3.5-9b"), ("qwen27b", "qwen3.5-27b"),
                               ("qwen35b", "qwen3.5-35b-a3b"))),
        case("qwen122b", "qwen3.5-122b-a10b", 8, 2048, 4, at_once=0),
        case("granite-h-small", "granite-4-h-small", 8, 2048, 5, gpus=1, at_once=0),
        case("nemotron-nano", "nemotron-3-nano-30b", 8, 2048, 5, gpus=1, at_once=0),
        case("qwen3next", "qwen3-next-80b-a3b", 8, 2048, 5, gpus=1, at_once=0),
        case("falconh1", "falcon-h1-7b", 8, 2048, 5, gpus=1, at_once=0),
        case("qwen4b", "qwen3.5-4b", 8, 2048, 5, gpus=1, at_once=0),
        case("lfm2-8b", "lfm2-8b-a1b", 8, 2048, 5, gpus=1, at_once=0),
        case("lfm3", "lfm3-1.7b", 8, 2048, 5, gpus=1, at_once=0),
    ],
    "latent": [
        *(case(f"glm-flash{name}", "glm-4.7-flash", 8, 2048, 5, flags, gpus=gpus, at_once=0)
          for name, gpus, flags in (
              ("", 1, ""), ("-24gb", 1, CAP), ("-24gb-shared", 2, f"{CAP} {SHARED}"))),
        case("deepseek4", "deepseek-v3", 8, 2048, 5, SHARED, layers=4, at_once=0),
    ],
    "gemma4": [
        case("gemma4-31b", "gemma-4-31b", 8, 2048, 5, gpus=1, at_once=0),
        case("gemma4-31b12-4k", "gemma-4-31b", 2, 2048, 9, NONE, gpus=1, layers=12),  # for --peers
        *(case(f"{short}-24gb", model, 8, 2048, 4, f"{CAP} {OFFLOAD}", gpus=1, at_once=0)
          for short, model in (("gemma4-31b", "gemma-4-31b"), ("gemma4-26b", "gemma-4-26b-a4b"))),
        case("gemma4-31b-24gb-shared", "gemma-4-31b", 8, 2048, 4, f"{CAP} {SHARED}", at_once=0),
        case("gemma4-26b", "gemma-4-26b-a4b", 8, 2048, 5, gpus=1, at_once=0),
        case("gemma4-e4b-12gb", "gemma-4-e4b", 8, 2048, 4, "--memory_limit_gib 11", gpus=1,
             at_once=0),
    ],
    "attention": [  # which kernel they take is in the log
        case("gemma2-27b-1gpu", "gemma-2-27b", 8, 2048, 5, gpus=1, at_once=0),
        case("gemma2-27b", "gemma-2-27b", 8, 2048, 5, at_once=0),
        case("gemma3-12b", "gemma-3-12b", 8, 2048, 5, gpus=1, at_once=0),
        case("qwen3-14b", "qwen3-14b", 8, 2048, 5, gpus=1, at_once=0),
        case("gpt-oss-20b", "gpt-oss-20b", 8, 2048, 5, gpus=1, at_once=0),
        case("8b-dropout", "llama-3-8b-dropout", 8, 2048, 5, gpus=1, at_once=0),
    ],
    "long": [  # one row, near the longest that the plan allows; the last ones take some minutes
        *(case(f"long-8b-{card}gb", "llama-3-8b", 1, seq, 2, f"--memory_limit_gib {gib} {RANK_32}",
               gpus=1)
          for card, gib, seq in (
              (8, 7.4, 24_576), (12, 11.2, 75_776), (16, 15, 131_072), (24, 22.5, 229_376),
              (48, 45, 401_408))),
        case("long-8b-8gb-params", "llama-3-8b", 1, 65_536, 2,
             f"--memory_limit_gib 7.4 --offload_params {RANK_32}", gpus=1),
        case("long-8b-80gb", "llama-3-8b", 1, 401_408, 2, RANK_32, gpus=1),
        case("long-l3-70b", "llama-3-70b", 1, 90_112, 2, RANK_32, gpus=1),
        case("long-gpt-oss-20b", "gpt-oss-20b", 1, 421_888, 2, OFFLOAD, gpus=1),
        case("long-gpt-oss-20b-530k", "gpt-oss-20b", 1, 530_432, 2, f"{ALL} {RANK_32}", gpus=1),
        case("long-8b-32k", "llama-3-8b", 1, 32_768, 3, gpus=1),
        case("long-70b-32k", "llama-2-70b", 1, 32_768, 2, OFFLOAD, gpus=1),
        case("long-gpt-oss-20b-65k", "gpt-oss-20b", 1, 65_536, 3, OFFLOAD, gpus=1),
        *(case(f"long-qwen9b-{tokens // 1000}k", "qwen3.5-9b", 1, tokens, 2, OFFLOAD, gpus=1)
          for tokens in (32_768, 131_072, 262_144)),
        case("long-8b-131k", "llama-3-8b", 1, 131_072, 2, OFFLOAD, gpus=1),
        case("long-8b8-131k", "llama-3-8b", 1, 131_072, 3, f"{ALL} {OFFLOAD}", gpus=1, layers=8),
        case("long-8b8-131k-kept", "llama-3-8b", 1, 131_072, 3, ALL, gpus=1, layers=8,
             base="long-8b8-131k"),
        case("long-8b8-131k-2gpus", "llama-3-8b", 0.5, 131_072, 3,
             f"{ALL} {OFFLOAD} --context_parallel_size {{gpus}}", layers=8, base="long-8b8-131k"),
        case("long-8b-131k-2gpus", "llama-3-8b", 0.5, 131_072, 2,
             f"{OFFLOAD} --context_parallel_size {{gpus}}", base="long-8b-131k"),
        case("long-glm-flash4-32k", "glm-4.7-flash", 1, 32_768, 3, f"{ALL} {OFFLOAD}", gpus=1,
             layers=4),
        case("long-glm-flash4-32k-2gpus", "glm-4.7-flash", 0.5, 32_768, 3,
             f"{ALL} {OFFLOAD} --context_parallel_size {{gpus}}", layers=4,
             base="long-glm-flash4-32k"),
        # the longest rows by the plan that GPU memory alone holds
        case("long-8b-24gb-kept", "llama-3-8b", 1, 54_272, 3, f"{CAP} {ALL} --lora_rank 32",
             gpus=1),
        case("long-8b-24gb-kept-2gpus", "llama-3-8b", 0.5, 118_784, 3,
             f"{CAP} {ALL} --lora_rank 32 --context_parallel_size {{gpus}}",
             base="long-8b-24gb-kept"),
    ],
}  # fmt: skip
CASES = {c["name"]: c for group in GROUPS.values() for c in group}
GROUPS["speed"] += [CASES["70b-auto"], CASES["70b-2k"]]
GROUPS["profile"] = [CASES[name] for name in ("70b8-nooffload", "8b-2gpus", "qwen30b4-16k-none")]

BESIDE_PEERS = "speed", "small", "experts", "mixers", "gemma4", "minimal", "long"

COLUMNS = {  # title: (key of a row, format)
    "case": ("case", ""), "work": ("work", ""), "GPUs": ("gpus", ""),
    "tokens/s per GPU": ("tokens_per_second", ",.0f"), "TFLOP/s": ("tflops", ".0f"),
    "% of ceiling": ("ceiling_percent", ".1f"), "by the script": ("script_percent", ".1f"),
    "at_once full": ("packing_efficiency", ".2f"), "first step, s": ("first_step_seconds", ".1f"),
    "predicted GiB": ("predicted_gib", ".2f"), "peak GiB": ("peak_gib", ".2f"),
    "off by %": ("off_percent", "+.1f"), "first loss": ("first_loss", ".4f"),
    "last loss": ("last_loss", ".4f"), "seconds": ("seconds", ".0f"), "result": ("result", ""),
    "ratio": ("ratio", ".3f"), "to": ("base", ""),
}  # fmt: skip

# ---- shapes ------------------------------------------------------------------------------------


def products(model):
    """(how many, inputs, outputs) of a layer's matmuls: qkv, o, gate and up, down."""
    hidden, intermediate, _, heads, kv_heads, _ = BUILTIN_CONFIGS[model]
    head_dim = HEAD_DIM.get(model, hidden // heads)
    return ((1, hidden, (heads + 2 * kv_heads) * head_dim), (1, heads * head_dim, hidden),
            (2, hidden, intermediate), (1, intermediate, hidden))  # fmt: skip


def tflops(chosen, tokens_per_second):
    hidden, _, layers, *_, vocab = BUILTIN_CONFIGS[chosen["model"]]
    layer = sum(n * inputs * outputs for n, inputs, outputs in products(chosen["model"]))
    parameters = (chosen["layers"] or layers) * layer + hidden * vocab
    return 6 * parameters * tokens_per_second / 1e12


def shape_of(chosen):
    """What its GEMM ceiling depends on; with more tokens it stays as it is."""
    return f"{chosen['model']}:{min(8192, chosen['rows'] * chosen['seq'])}"


def model_config(model, layers=None):
    """What config.json says of a model with that many layers, None: its own."""
    hidden, intermediate, whole, heads, kv_heads, vocab = BUILTIN_CONFIGS[model]
    own = {"qwen2.5": {"model_type": "qwen2"}, "qwen3": {"model_type": "qwen3"},
           "mistral": {"model_type": "mistral", "sliding_window": None},
           "llama-3-8b-dropout": {"model_type": "llama", "attention_dropout": 0.1}}  # fmt: skip
    known = MIXTURES | GEMMAS | MIXERS | LATENT | GEMMAS_4
    own = known.get(model) or own.get(model) or own.get(
        model.partition("-")[0], {"model_type": "llama"})
    if model in HEAD_DIM:
        own["head_dim"] = HEAD_DIM[model]
    config = {
        "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers or whole, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2**20, "tie_word_embeddings": model in TIED, **own,
    }  # fmt: skip
    if model == "step-3.7-flash":
        return {"model_type": "step3p7", "text_config": config}
    return config


def write_config(directory, model, layers):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(model, layers)))


def chat_lengths(n, longest):
    """Tokens of n chat rows.

    >>> chat_lengths(4, 2048), chat_lengths(4, 180)
    ([169, 205, 375, 183], [169, 180, 180, 180])
    """
    draw = random.Random(0)
    lengths = (int(draw.lognormvariate(math.log(MEDIAN), SPREAD)) for _ in range(n))
    return [min(max(length, SHORTEST), longest) for length in lengths]


def write_tokenizer(directory):
    """The demo's, which makes one token of each character that the demo does not have."""
    sys.path.insert(0, str(ROOT))
    from fsdp_qlora.run.demo import write_demo

    write_demo(directory / "demo")
    for path in (directory / "demo" / "model").glob("*token*"):
        shutil.copy(path, directory)


def write_chat(directory, lengths):
    """data.jsonl with rows of these lengths, to which the tokenizer adds EOS."""
    write_tokenizer(directory)
    draw, path = random.Random(1), directory / "data.jsonl"
    texts = ("".join(draw.choices("#$%&*+/<=>@^_{|}~", k=length - 1)) for length in lengths)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def gemm_ceiling(model, tokens):
    """TFLOP/s of torch.matmul in bf16 over a layer's matmuls; about a second on one GPU."""
    import torch

    flops = seconds = 0
    for n, inputs, outputs in products(model):
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        one = 2 * tokens * inputs * outputs
        times = max(5, int(0.2 * 700e12 / one))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(times + 5):
            if i == 5:
                start.record()
            torch.matmul(x, weight.T)
        end.record()
        torch.cuda.synchronize()
        flops += n * one
        seconds += n * start.elapsed_time(end) / 1000 / times
    return flops / seconds / 1e12


# ---- one case ----------------------------------------------------------------------------------

MARKS = ("loading ", "data: ", "plan: ", "base model", "training: ", "step +1/")  # of a log


def launch(gpus, program, log, limit, **env):
    """`program` by torchrun, or for one process by plain Python, its output in `log`, and at its
    end when each of MARKS was reached. Returns the exit code (None: time limit), seconds and
    output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    command = [sys.executable, *(torchrun if gpus > 1 else []), *map(str, program)]
    started, code, reached = time.perf_counter(), None, {}
    with log.open("w") as file:
        print("$", shlex.join(command), file=file, flush=True)
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file,
                                 stderr=subprocess.STDOUT,
                                 env={**os.environ, "FSDP_QLORA_DEBUG": "1", **env})  # fmt: skip
        try:
            while code is None and (seconds := time.perf_counter() - started) < limit:
                text = log.read_text(errors="replace") if len(reached) < len(MARKS) else ""
                for mark in MARKS:
                    if mark not in reached and re.search(mark, text):
                        reached[mark] = f"reached after {seconds:.1f} s: {mark}"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(min(0.1, limit - seconds))
            if code is None:
                print(f"time limit: {limit} s", file=file, flush=True)
        finally:
            if child.poll() is None:  # SIGKILL would leave torchrun's workers running
                child.terminate()
                try:
                    child.wait(90)  # it gives them 30 s
                except subprocess.TimeoutExpired:
                    child.kill()
            print("", *reached.values(), sep="\n", file=file, flush=True)
    text = log.read_text(errors="replace").replace("\r", "\n")  # tqdm's bar ends no line
    return code, time.perf_counter() - started, text


def outcome(code, text, steps):
    """The row's result, and the line that says why."""
    said = re.findall(r"^(?:.*\])?error: (.*)", text, re.M)
    raised = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*Error: .*)", text, re.M)
    result = f"exit code {code}"
    if code in (0, None):
        result = "time limit" if code is None else "ok"
    elif re.search(r"OutOfMemoryError|ran out of memory|(?i:cuda\b.{0,20}out of memory)", text):
        result = "out of memory"
    elif said and not steps:
        result = "refused"
    return {"result": result, "error": "" if code == 0 else (said + raised + [""])[0]}


def number_in(pattern, text):
    """The number N of the pattern where it occurs last, or None."""
    found = re.findall(pattern.replace("N", r"(\d[\d,]*\.?\d*)"), text)
    return float(found[-1].replace(",", "")) if found else None


def measurements(text, steps):
    """What the script printed and wrote to its metrics.jsonl."""
    speeds = [step["tokens_per_second_per_gpu"] for step in steps]
    measured = (re.findall(r"measured: .*tok/s.*", text) or [""])[-1]
    predicted = number_in("predicted peak N GiB", text)
    peak = number_in("peak N GiB", measured)
    if peak is None and steps:
        peak = max(step["peak_memory_gib"] for step in steps)
    return {
        "tokens_per_second": statistics.median(speeds[2:] or speeds[1:]) if speeds[1:] else None,
        "script_percent": number_in("N %", measured), "measured": measured,
        "predicted_gib": predicted, "peak_gib": peak,
        "off_percent": 100 * (predicted / peak - 1) if predicted and peak else None,
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None, "steps": steps,
        "packing_efficiency": statistics.mean(
            step["packing_efficiency"] for step in steps) if steps else None,
        "first_step_seconds": number_in(r"reached after N s: step", text),
        "machine": (re.findall(r"^hardware: (.*)", text, re.M) or [""])[0],
    }  # fmt: skip


def describe(chosen):
    layers = f", {chosen['layers']} layers" if chosen["layers"] else ""
    rows = f"{chosen['rows']} {'chat rows up to' if chosen['chat'] else 'x'} {chosen['seq']:,}"
    graphs = "" if chosen["graphs"] else " without CUDA graphs"
    flags = chosen["flags"].replace("{gpus}", str(chosen["gpus"] or "all"))
    return f"{chosen['model']}{layers}, {rows} {flags}{graphs}".strip()


def script_flags(chosen, gpus, scratch):
    """Writes the model's config.json, and chat rows, below `scratch`."""
    model, batch = scratch / f"{chosen['model']}-{chosen['layers']}", int(chosen["rows"] * gpus)
    write_config(model, chosen["model"], chosen["layers"])
    flags = [f"--model {model} --random_weights --max_seq_len {chosen['seq']} --batch_size {batch}"
             f" --max_steps {chosen['steps']}"]  # fmt: skip
    if chosen["at_once"] != 0:
        tokens = chosen["at_once"] or int(chosen["rows"] * chosen["seq"])
        flags.append(f"--micro_batch_tokens {tokens}")
    if chosen["chat"]:
        lengths = chat_lengths(batch * chosen["steps"], chosen["seq"])
        flags.append(f"--dataset {write_chat(model, lengths)}")
    return shlex.split(" ".join([*flags, chosen["flags"].replace("{gpus}", str(gpus))]))


def minimal_flags(chosen, gpus, scratch):
    """The same for minimal_fsdp_qlora.py, which needs rows and a tokenizer in any case."""
    model, batch = scratch / f"{chosen['model']}-{chosen['layers']}", chosen["rows"] * gpus
    write_config(model, chosen["model"], chosen["layers"])
    n_rows = batch * chosen["steps"]
    lengths = chat_lengths(n_rows, chosen["seq"]) if chosen["chat"] else [chosen["seq"]] * n_rows
    values = {"model": model, "dataset": write_chat(model, lengths), "batch_size": batch,
              "max_seq_len": chosen["seq"], "max_steps": chosen["steps"]}  # fmt: skip
    flags = [f"--{name} {value}" for name, value in values.items()]
    return shlex.split(" ".join([*flags, chosen["flags"]]))


def minimal_steps(text):
    """What minimal_fsdp_qlora.py prints of each step, as metrics.jsonl has it."""
    pattern = r"^step +(\d+)/\d+ \| loss +(\S+) .* (\S+) tok/s/\S+(?: \|(?: peak)? +(\S+) GiB)?$"
    names = "step", "loss", "tokens_per_second_per_gpu", "peak_memory_gib"
    steps = [{name: float(x.replace(",", "") or 0) for name, x in zip(names, found)}
             for found in re.findall(pattern, text, re.M)]  # fmt: skip
    return [{"packing_efficiency": 1, **step} for step in steps]


def cache_of(chosen, scratch):
    """Where compiled kernels are kept, by environment variables."""
    if not chosen["cache"]:
        return {}
    if chosen["cache"] == "cold":
        shutil.rmtree(scratch / "cache", ignore_errors=True)
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    return {name: str(scratch / "cache" / below) for name, below in names.items()}


def read_steps(results):
    """The whole lines of a run's metrics.jsonl; removes the run's directory."""
    metrics = results / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True) if metrics.is_file() else []
    shutil.rmtree(results, ignore_errors=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_case(chosen, gpus, out, scratch, limit, profile=False):
    """The row of one run of the script, or with `profile` or without CUDA graphs of the driver
    below around it."""
    name = chosen["name"]
    if chosen["cache"] == "warm" and not (scratch / "cache").exists():
        run_case({**chosen, "cache": "cold"}, gpus, out, scratch, limit)  # chosen without that one
    results = scratch / f"run-{name}"  # not in `out`: adapters and checkpoints are gigabytes
    make_flags = minimal_flags if chosen["minimal"] else script_flags
    flags = [*make_flags(chosen, gpus, scratch), "--output_dir", str(results)]
    program, log = [ROOT / "train_fsdp_qlora.py"], out / f"{name}.log"
    if chosen["minimal"]:
        program = [ROOT / "benchmarks" / "minimal.py"]
    elif profile:
        program, log = [__file__, "profiled", out / name], out / f"{name}.profile.log"
    elif not chosen["graphs"]:
        program = [__file__, "plain"]
    cache = cache_of(chosen, scratch)
    code, seconds, text = launch(gpus, [*program, *flags], log, limit, **cache)
    steps = read_steps(results) or minimal_steps(text)
    return {"case": name, "work": describe(chosen), "gpus": gpus, "base": chosen["base"],
            "seconds": seconds, "flags": flags, **outcome(code, text, steps),
            "start": cache and re.findall(r"^reached after ([\d.]+) s: (\w+)", text, re.M),
            **measurements(text, steps)}  # fmt: skip


def run_peer(chosen, gpus, out, scratch, limit, peer):
    """The same work by TRL. It reads its weights from a disk, so they are made first; its tokens/s
    are the mean of the steps after the third. Chat rows it packs, and counts as full: that is a few
    tokens more than there are."""
    name, size = chosen["base"], chosen["model"].rpartition("-")[2]
    model = scratch / f"peer-{size}"
    if not model.is_dir():
        make = [peer, "--make-model", model, "--size", size, "--layers", chosen["layers"]]
        launch(0, make, out / f"{name}-weights.log", limit)
    flags = {
        "model": model, "attn": re.findall(r"--attn (\w+)", chosen["flags"])[-1], "fsdp": 1,
        "gc": "nonreentrant" if ALL in chosen["flags"] else "none",
        "bs": 4 if chosen["chat"] else chosen["rows"], "seq": chosen["seq"],
        "steps": chosen["steps"], "warmup": 3,
    }  # fmt: skip
    program = [__file__, "packed", peer] if chosen["chat"] else [peer]
    program += [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    code, seconds, text = launch(gpus, program, out / f"{name}.log", limit,
                                 BASELINE_OUT=str(scratch / name))  # fmt: skip
    row = {"case": name, "work": describe(chosen), "gpus": gpus, "base": None, "seconds": seconds}
    decoder = json.JSONDecoder()  # two ranks' lines may run together
    ranks = [decoder.raw_decode(part)[0] for part in re.split(r"RESULT (?=\{)", text)[1:]]
    if ranks:
        row |= {"tokens_per_second": statistics.mean(rank["tok_s_gpu"] for rank in ranks),
                "peak_gib": max(rank.get("train_peak_alloc", 0) for rank in ranks),
                "first_loss": ranks[0]["loss_first"], "last_loss": ranks[0]["loss_last"]}
    return {**row, **outcome(code, text, ranks)}


def layout(chosen, gpus):
    """Which peers can do the same: what is on each GPU."""
    if chosen["model"] in MIXTURES:
        return "experts"
    if gpus == 1:
        return "one GPU"
    return "sharded" if "--shard_group_size" in chosen["flags"] or chosen["minimal"] else "copies"


def peer_work(chosen, gpus):
    """What a peer is to do, see peers.py: the same for cases that differ in the script's flags."""
    return {
        "rows": chosen["rows"], "seq": chosen["seq"], "steps": chosen["steps"],
        "recompute": ALL in chosen["flags"] or chosen["minimal"] or chosen["seq"] >= LONG,
        "gpus": gpus,
        "layout": layout(chosen, gpus),
        "attn": "flash_attention_2" if FLASH in chosen["flags"] else "sdpa",
        "model": f"{chosen['model']}-{chosen['layers']}",
    }  # fmt: skip


def run_beside(peer, chosen, gpus, out, scratch, limit, path):
    """The row of one of peers.py. It reads its weights from a disk, so they are made first. On one
    GPU it is started without torchrun, with which Accelerate would wrap the model in DDP, and it
    must see one alone, or Trainer takes all of them."""
    name, work = f"{peer}-{chosen['name']}", peer_work(chosen, gpus)
    model, output = scratch / f"peers-{work['model']}", scratch / f"run-{peer}-{chosen['name']}"
    program = ROOT / "benchmarks" / "peers.py"
    env = {"PYTHONPATH": f"{path.resolve()}:{os.environ.get('PYTHONPATH', '')}"}
    if not model.is_dir():
        write_config(model, chosen["model"], chosen["layers"])
        write_tokenizer(model)
        launch(0, [program, "weights", model], out / f"{model.name}.log", limit, **env)
    work |= {"model": str(model), "output": str(output)}
    if gpus == 1:
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    program = [program, peer, json.dumps(work)]
    code, seconds, text = launch(gpus, program, out / f"{name}.log", limit, **env)
    steps = read_steps(output)
    how = f"{peer}, {work['layout']}, {'all' if work['recompute'] else 'nothing'} recomputed"
    return {"case": name, "work": describe({**chosen, "flags": how}), "gpus": gpus, "base": None,
            "seconds": seconds, "flags": work, **outcome(code, text, steps),
            **measurements(text, steps)}  # fmt: skip


# ---- profile -----------------------------------------------------------------------------------

KINDS = (  # of kernels, by name; the first that fits
    ("memcpy", "^Mem(cpy|set)"),
    ("NCCL", "nccl"),
    ("elementwise, other", "^triton_(?!tem)"),  # torch.compile names them after all that they fuse
    ("attention", "flash|fmha|sdpa|attention|cudnn"),  # before GEMM: flash-attn names cutlass types
    ("dequantize", "dequant"),
    ("GEMM", "gemm|nvjet|cutlass|gemv|splitK|cublas|triton_tem"),
    ("elementwise, other", ""),
)
TRANSFERS = ("NCCL", "memcpy")  # what computation can hide


def kind_of(name):
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.I))


def covered(spans):
    """The length of the union of (start, end) spans.

    >>> covered([(0, 2), (5, 6), (1, 3), (1, 2)])
    4
    """
    total, reached = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def breakdown(kernels, wall):
    """Kernels as (name, start, end) to {kind: (time, of that exposed)}. Exposed: while nothing
    computes. Idle: while nothing runs at all.

    >>> breakdown([("gemm", 0, 4), ("ncclDevKernel", 3, 7), ("Memcpy DtoH", 6, 8)], 10)
    {'memcpy': (2, 2), 'NCCL': (4, 3), 'GEMM': (4, None), 'idle': (2, None)}
    """
    spans = {kind: [] for kind, _ in KINDS}
    for name, start, end in kernels:
        spans[kind_of(name)].append((start, end))
    computing = [span for kind in spans if kind not in TRANSFERS for span in spans[kind]]
    times = {}
    for kind, mine in spans.items():
        if mine:
            exposed = covered(mine + computing) - covered(computing)
            times[kind] = sum(e - s for s, e in mine), exposed if kind in TRANSFERS else None
    return {**times, "idle": (wall - covered(sum(spans.values(), [])), None)}


def profile_text(kernels, wall):
    """Markdown, in milliseconds a step; kernels and wall are microseconds of PROFILED_STEPS."""
    scale = 1 / 1000 / PROFILED_STEPS
    launches = len(kernels) // PROFILED_STEPS
    lines = [f"{wall * scale:.1f} ms a step under the profiler, {launches:,} kernels", "",
             "| kind of kernel | ms a step | exposed |", "|---|---|---|"]  # fmt: skip
    for kind, (total, exposed) in breakdown(kernels, wall).items():
        cell = "" if exposed is None else f"{exposed * scale:.1f}"
        lines.append(f"| {kind} | {total * scale:.1f} | {cell} |")
    totals, counts = Counter(), Counter(name for name, *_ in kernels)
    for name, start, end in kernels:
        totals[name] += end - start
    lines += ["", "| ms a step | launches | kind | kernel |", "|---|---|---|---|"]
    for name, total in totals.most_common(15):
        lines.append(f"| {total * scale:.2f} | {counts[name] / PROFILED_STEPS:g} | {kind_of(name)}"
                     f" | `{name.replace('|', '/')[:110]}` |")  # fmt: skip
    return "\n".join(lines) + "\n"


def driver(stem, argv):
    """The script with rank 0's last steps profiled; with stem None without CUDA graphs instead. All
    ranks must call this."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    import train_fsdp_qlora as script
    from fsdp_qlora.planner import search

    if stem is None:
        search.with_cuda_graphs = lambda plan, *_: plan
        os._exit(script.main(argv))
    train_step, cuda = script.train_step, torch.cuda.is_available()
    rank = int(os.environ.get("RANK", 0))
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(
        activities=[activity.CUDA if cuda else activity.CPU],
        schedule=torch.profiler.schedule(wait=WARM_STEPS - 1, warmup=1, active=PROFILED_STEPS),
    )
    edges = []  # the profiled steps may run into one another, as they do without it

    def profiled_step(run, step):
        if rank == 0 and step == 1:
            profiler.start()
        of_step = train_step(run, step)
        if step in (WARM_STEPS, WARM_STEPS + PROFILED_STEPS):
            dist.barrier()  # so that the profile begins with no wait for another rank
            if cuda:
                torch.cuda.synchronize()
            edges.append(time.perf_counter())
        if rank == 0:
            profiler.step()
        return of_step

    script.train_step = profiled_step
    code = script.main(argv)
    if rank == 0 and code == 0:
        trace = f"{stem}.trace.json.gz"
        profiler.export_chrome_trace(trace)
        with gzip.open(trace, "rt") as file:
            kernels = [(e["name"], e["ts"], e["ts"] + e["dur"])
                       for e in json.load(file)["traceEvents"]
                       if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]  # fmt: skip
        text = profile_text(kernels, 1e6 * (edges[1] - edges[0]))
        Path(f"{stem}.profile.md").write_text(text)
    sys.stdout.flush()
    os._exit(code)  # for the reason that the script does


def packed(peer, argv):
    """TRL's script with packing, on chat rows in place of its own rows of one length."""
    import runpy

    import datasets
    import trl

    make, config = datasets.Dataset.from_dict, trl.SFTConfig
    longest = int(argv[argv.index("--seq") + 1])

    def chat(columns, **settings):
        datasets.Dataset.from_dict = make  # what TRL itself makes later stays
        draw, rows = random.Random(1), columns["input_ids"]
        lengths = chat_lengths(8 * len(rows), longest)  # more tokens than its own rows have
        return make({"input_ids": [draw.choices(rows[0], k=n) for n in lengths]}, **settings)

    datasets.Dataset.from_dict = chat
    trl.SFTConfig = lambda **settings: config(**{**settings, "packing": True})
    sys.argv = [peer, *argv]
    runpy.run_path(peer, run_name="__main__")


# ---- all cases ---------------------------------------------------------------------------------


def base_of(row, speeds):
    """The case that the ratio is to; of several the fastest.

    >>> base_of({"base": ["slow", "fast", "failed"]}, {"slow": 1, "fast": 2, "failed": None})
    'fast'
    """
    bases = row["base"] if isinstance(row["base"], list) else [row["base"]]
    return max(bases, key=lambda base: speeds.get(base) or 0)


def table(rows):
    """Markdown; ratios are of tokens/s to the base's row."""
    speeds = {row["case"]: row.get("tokens_per_second") for row in rows}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        base = base_of(row, speeds)
        mine, its = speeds[row["case"]], speeds.get(base)
        values = {**row, "base": base, "ratio": mine / its if mine and its else None}
        cells = ["" if values.get(key) is None else format(values[key], form)
                 for key, form in COLUMNS.values()]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    notes = [f"{row['case']}: {row['error'][:300]}" for row in rows if row["error"]]
    notes += [f"{row['case']}, seconds until: "
               + ", ".join(f"{mark} {seconds}" for seconds, mark in row["start"])
               for row in rows if row.get("start")]  # fmt: skip
    machine = next((row["machine"] for row in rows if row.get("machine")), "")
    return "\n".join([machine, "", *lines, "", *notes]).strip() + "\n"


def run_cases(group, cases, device_count, out, limit, peer=None, peers=(), peers_path=ROOT):
    """One after the other; what is known is written after each. Returns the rows."""
    out.mkdir(parents=True, exist_ok=True)
    rows, ceilings, peer_rows = [], {}, {}
    if device_count:  # in a process of its own: this one shall hold no GPU memory
        shapes = sorted(set(map(shape_of, cases)))
        _, _, text = launch(0, [__file__, "ceiling", *shapes], out / "ceiling.log", limit)
        ceilings = dict(re.findall(r"^GEMM ceiling (\S+) (\S+) TFLOP/s", text, re.M))
        print("GEMM ceilings, TFLOP/s:", ceilings or text[-300:], flush=True)

    def finish(row, chosen):
        if row.get("tokens_per_second"):
            row["tflops"] = tflops(chosen, row["tokens_per_second"])
            if shape_of(chosen) in ceilings:
                row["ceiling_percent"] = 100 * row["tflops"] / float(ceilings[shape_of(chosen)])
        rows.append(row)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps({"group": group, **row}) + "\n")
        (out / f"{group}.md").write_text(table(rows))
        print(f"{row['case']}: {row['result']}, {row['seconds']:.0f} s {row['error']}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for chosen in cases:
            gpus = chosen["gpus"] or device_count
            if device_count and gpus > device_count or not chosen["gpus"] and device_count <= 2:
                print(f"{chosen['name']}: skipped, here are {device_count} GPUs", flush=True)
                continue
            common = gpus, out, Path(scratch), limit
            if peer and (chosen["base"] or "").startswith("trl-"):
                finish(run_peer(chosen, *common, peer), chosen)
            beside = [p for p in peers if layout(chosen, gpus) in PEERS[p][0]]
            for one in beside:  # once for all cases with this work
                key = one, json.dumps(peer_work(chosen, gpus))
                if key not in peer_rows:
                    peer_rows[key] = f"{one}-{chosen['name']}"
                    finish(run_beside(one, chosen, *common, peers_path), chosen)
            if beside:
                work = json.dumps(peer_work(chosen, gpus))
                chosen = {**chosen, "base": [peer_rows[one, work] for one in beside]}
            if group == "profile":
                chosen = {**chosen, "steps": WARM_STEPS + PROFILED_STEPS}
            finish(run_case(chosen, *common, profile=group == "profile"), chosen)
            report = out / f"{chosen['name']}.profile.md"
            if group == "profile" and rows[-1]["result"] == "ok":
                print(report.read_text(), flush=True)
    print(table(rows))
    return rows


def main(argv):
    if argv[:1] == ["profiled"]:
        driver(argv[1], argv[2:])
    if argv[:1] == ["plain"]:
        driver(None, argv[1:])
    if argv[:1] == ["packed"]:
        return packed(argv[1], argv[2:])
    if argv[:1] == ["ceiling"]:
        for shape in argv[1:]:
            model, _, tokens = shape.partition(":")
            print(f"GEMM ceiling {shape} {gemm_ceiling(model, int(tokens)):.1f} TFLOP/s")
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("group", choices=GROUPS, nargs="?", help="none: that of the first case")
    parser.add_argument("--cases", help="names with commas; none: all of the group")
    parser.add_argument("--list", action="store_true", help="show the cases and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where results go")
    parser.add_argument("--limit", type=float, default=240, help="seconds a case may take")
    parser.add_argument("--flags", default="", help="added to every case: --flags='--attn sdpa'")
    parser.add_argument("--peer", type=Path, help="TRL's script, for speed and chat")
    parser.add_argument("--peers", default="", help=f"all, or of {', '.join(PEERS)}")
    parser.add_argument("--peers_path", type=Path, default=ROOT / ".p-site",
                        help="where they are installed, by pip install --target")  # fmt: skip
    args = parser.parse_args(argv)
    names = args.cases.split(",") if args.cases else []
    if args.group is None:
        args.group = next((group for group, cases in GROUPS.items()
                           if names and names[0] in {c["name"] for c in cases}), None)
    if args.list and not (args.group or names):
        names = list(CASES)
    elif args.group is None:
        parser.error(f"name a group or a case: {', '.join((*GROUPS, *CASES))}")
    peers = list(PEERS) if args.peers == "all" else [p for p in args.peers.split(",") if p]
    if set(peers) - set(PEERS) or peers and args.group not in BESIDE_PEERS:
        groups = ", ".join(BESIDE_PEERS)
        parser.error(f"--peers {args.peers}: groups {groups} have {', '.join(PEERS)}")
    names = names or [c["name"] for c in GROUPS[args.group]]
    if set(names) - set(CASES):
        parser.error(f"--cases {args.cases}: the cases are {', '.join(CASES)}")
    cases = [{**CASES[n], "flags": f"{CASES[n]['flags']} {args.flags}".strip()} for n in names]
    if args.list:
        for chosen in cases:
            print(f"{chosen['name']:18} {chosen['gpus'] or 'all'} GPUs  {describe(chosen)}")
        return
    import torch

    if not torch.cuda.device_count():  # asks the driver and takes no GPU memory
        sys.exit("no GPU here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the case ends with this
    run_cases(args.group, cases, torch.cuda.device_count(), args.out, args.limit, args.peer, peers,
              args.peers_path)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
