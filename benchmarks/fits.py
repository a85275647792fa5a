#!/usr/bin/env python3
"""Print the tables of what fits where in docs/memory.md, by the plan alone: no GPU is needed.

    python benchmarks/fits.py

Steps of 16 rows of 2,048 tokens, rank 16 on all linears (of mixtures on attention's), the speeds of
an H200 and its NVLink, by which the fastest layout is chosen, and 120 GiB of host memory a GPU. In
each cell the GiB that each of 1, 2, 4 or 8 GPUs takes, `a` with --offload_activations, `p` with
--offload_params as well, `-`: does not fit. The limits are what CUDA and NCCL leave of cards of 24,
48, 80 and 141 GB.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import run
from fsdp_qlora.planner import plan
from fsdp_qlora.lora.adapter import choose_adapted
from fsdp_qlora.pretrained.hub import read_model_config
from fsdp_qlora.pretrained.families import SHAPES
from fsdp_qlora.model.layer import make_layouts
from fsdp_qlora.planner.machine import Machine
from train_fsdp_qlora import Config

LIMITS = {"24 GB": 22.5, "48 GB": 46, "80 GB": 77.5, "141 GB": 138}  # GiB
GPUS, HOST, ROWS = (1, 2, 4, 8), 120, 16  # GPUs, GiB, rows
FLAGS = {"": {}, "a": {"offload_activations": True},
         "p": {"offload_activations": True, "offload_params": True}}
KEYS = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim")
MORE_SHAPES = {  # besides those of fsdp_qlora/pretrained/families.py
    "llama-3.1-405b": ("llama", 128256, 16384, 53248, 126, 128, 8, 128)}
MIXTURES = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b",  # shapes as in run.py
            "gpt-oss-120b": "gpt-oss-120b", "GLM-4.5-Air": "glm-4.5-air",
            "Qwen3-235B-A22B": "qwen3-235b-a22b"}
MODELS = {"8B": "llama-3-8b", "32B": "qwen2.5-32b", "Llama-3-70B": "llama-3-70b",
          "405B": "llama-3.1-405b", **MIXTURES}


def cell(name, limit, gpus):
    machine = Machine(flops=8e14, bandwidth=4e12, link=3e11, host=5e10)
    for mark, flags in FLAGS.items():
        config = Config(model=name, random_weights=True, max_seq_len=2048, **flags)
        config, _, arch = read_model_config(Path(name), config)
        _, adapted = choose_adapted(arch, config, name)
        layouts = make_layouts(arch, adapted, config)
        try:
            workload = plan.Workload(
                ROWS * 2048, longest=2048, mean_document_tokens=2048, uneven=True,
                                     world_size=gpus, device=torch.device("cuda"))
            chosen = plan.choose_plan(
                config, arch, layouts, workload, int(limit * 2**30), machine)
        except ValueError:
            continue
        return f"{chosen.bytes / 2**30:.0f}{mark}"
    return "-"


def table():
    """The rows of the tables, card after card."""
    for name, values in MORE_SHAPES.items():
        SHAPES[name] = {**dict(zip(KEYS, values)), "max_position_embeddings": 131072,
                        "tie_word_embeddings": False}
    for name in MIXTURES.values():
        SHAPES[name] = run.model_config(name)
    plan.host_share, plan.why_no_triton = lambda: HOST * 2**30, lambda: ""  # as on GPUs
    return [f"| {card} | {short} | " + " | ".join(cell(name, limit, gpus) for gpus in GPUS) + " |"
            for card, limit in LIMITS.items() for short, name in MODELS.items()]


if __name__ == "__main__":
    print(*table(), sep="\n")
