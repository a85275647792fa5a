#!/usr/bin/env python3
"""Print the tables of what fits where in docs/memory.md, as --plan_for finds it: no GPU is needed.

    python benchmarks/fits.py

Steps of 16 rows of 2,048 tokens, rank 16 on all linears (of mixtures on attention's). In each cell
the GiB that each of 1, 2, 4 or 8 GPUs takes, `a` with --offload_activations, `p` with
--offload_params as well, `-`: does not fit.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import run
from fsdp_qlora.config import Config
from fsdp_qlora.planner.search import DoesNotFit
from fsdp_qlora.run.plan_for import plan_elsewhere

GPU_SPECS, GPUS = ("4090", "L40S", "H100", "H200"), (1, 2, 4, 8)
MARKS = {"--offload_activations": "a", "--offload_activations --offload_params": "p"}
MODELS = {"8B": "llama-3-8b", "32B": "qwen2.5-32b", "Llama-3-70B": "llama-3-70b",
          "405B": "llama-3.1-405b", "Qwen3-30B-A3B": "qwen3-30b-a3b", "gpt-oss-20b": "gpt-oss-20b",
          "gpt-oss-120b": "gpt-oss-120b", "GLM-4.5-Air": "glm-4.5-air",
          "Qwen3-235B-A22B": "qwen3-235b-a22b", "Qwen3.5-9B": "qwen3.5-9b",
          "Qwen3.5-27B": "qwen3.5-27b", "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b",
          "Qwen3.5-122B-A10B": "qwen3.5-122b-a10b",
          "Nemotron 3 Nano 30B-A3B": "nemotron-3-nano-30b",
          "Granite 4.0 H Small": "granite-4-h-small", "GLM-4.7-Flash": "glm-4.7-flash",
          "DeepSeek-V3": "deepseek-v3", "Gemma 4 E4B": "gemma-4-e4b",
          "Gemma 4 31B": "gemma-4-31b", "Gemma 4 26B-A4B": "gemma-4-26b-a4b"}


def cell(directory, card, gpus):
    """One cell; `directory` has a config.json."""
    config = Config(model=str(directory), max_seq_len=2048, plan_for=f"{gpus}x{card}")
    try:
        plan, mark = plan_elsewhere(config)[1], ""
    except DoesNotFit as e:
        if e.flags not in MARKS:
            return "-"
        plan, mark = e.plan, MARKS[e.flags]
    return f"{plan.bytes / 2**30:.0f}{mark}"


def table(models=MODELS):
    """Yield the rows of the tables, card after card."""
    with tempfile.TemporaryDirectory() as folder:
        for card in GPU_SPECS:
            for short, name in models.items():
                run.write_config(directory := Path(folder, name), name, None)
                cells = " | ".join(cell(directory, card, gpus) for gpus in GPUS)
                yield f"| {card} | {short} | {cells} |"


if __name__ == "__main__":
    for row in table():
        print(row, flush=True)
