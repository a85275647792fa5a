#!/usr/bin/env python3
"""What torch's compiler makes of each elementwise function, read without a GPU.

    pip install triton; python benchmarks/compiled.py [--model qwen3-30b-a3b] [--code FUNCTION]

Each is to be one pass over memory: one kernel, or one for each tensor that it writes, and no
temporary as large as what it reads. This prints the kernels with their loads and stores, and the
temporaries and results that are allocated; with --code all of one function's code. The shapes are
those of a model of benchmarks/run.py, for 4,096 tokens in bf16. The compiler is told that CPU
tensors are for Triton; its kernels are written but cannot be run, which is caught.
"""

import argparse
import logging
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from run import BUILTIN_CONFIGS, model_config

from fsdp_qlora.config import Config
from fsdp_qlora.kernels import activations, heads, norms
from fsdp_qlora.layer import grouped_mm
from fsdp_qlora.model import lm_head as vocabulary
from fsdp_qlora.pretrained import families
from fsdp_qlora.pretrained.model_directory import read_model_config

TOKENS, CHUNK, CLAMP = 4096, 512, (7.0, 1.702)  # of gpt-oss


def pretend_hopper():
    """Let Triton believe in a GPU of compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget

    triton.runtime.driver.set_active(SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32), is_active=lambda: True,
        get_active_torch_device=lambda: torch.device("cpu"), get_current_device=lambda: 0,
        get_current_stream=lambda *_: 0, get_device_interface=lambda: torch.cpu))  # fmt: skip


def code_of(function, arguments):
    """The code that the compiler writes for it."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    found, codegen = [], GraphLowering.codegen

    def keep(graph):
        result = codegen(graph)
        found.append(result[0].value)
        return result

    torch._dynamo.reset()
    settings = config.patch(cpu_backend="triton", compile_threads=1, fx_graph_cache=False)
    try:
        with settings, patch.object(GraphLowering, "codegen", keep):
            torch.compile(function.__wrapped__)(*arguments)
    except Exception as e:  # no kernel can be run here
        if not found:
            raise e
    return "\n".join(found)


def calls(arch):
    """(function, its arguments) for TOKENS tokens of such a model."""
    def values(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape).to(dtype)

    hidden, head, n = arch.hidden_size, arch.head_dim, TOKENS
    inner = arch.moe.expert_size if arch.moe else arch.down[0].in_features
    query, key = (values(n, heads, head) for heads in (arch.n_heads, arch.n_kv_heads))
    qkv = values(n, (arch.n_heads + 2 * arch.n_kv_heads) * head)
    table, norm = values(n, head // 2, dtype=torch.float32), None
    if arch.qk_norm:
        norm = values(head)
    normed = qkv if arch.qk_norm else None
    yield heads.qk_norm_rope_forward, (qkv, table, table, None, norm, norm, arch)
    yield heads.qk_norm_rope_backward, (
        query, key, key, None, normed, table, table, None, norm, norm, arch)
    yield heads.gate_heads, (query, query, "sigmoid")
    yield heads.gate_heads_backward, (query, query, query, "sigmoid")
    x, grad, weight = values(n, hidden), values(n, hidden), values(hidden)
    yield norms.fused_norm, (values(n, hidden), x, weight, None, arch.norm_kind, 1e-6)
    yield norms.fused_norm_backward, (x, grad, x, weight, arch.norm_kind, 1e-6)
    gate_up, product = values(n, 2 * inner), values(n, inner)
    weights, parts = values(n, dtype=torch.float32), gate_up.chunk(2, -1)
    yield activations.glu, (product, gate_up, arch.activation, True)
    yield activations.glu_backward_, (product, arch.activation, None, *parts)
    yield activations.glu_backward_, (product, arch.activation, weights, *parts)
    yield activations.glu_weight_gradients, (product, gate_up, arch.activation, True)
    yield activations.clamped_glu_backward_, (product, weights, gate_up, *CLAMP)
    place, factors = torch.randperm(8 * n).view(n, 8), values(n, 8, dtype=torch.float32)
    yield grouped_mm.add_expert_rows, (values(8 * n, hidden), place, factors)
    logits, targets = values(CHUNK, arch.vocab_size), torch.randint(arch.vocab_size, (CHUNK,))
    absent, sums = torch.zeros(CHUNK, dtype=torch.bool), values(CHUNK, dtype=torch.float32)
    yield vocabulary.logits_statistics, (logits, targets, 1.0, None)
    yield vocabulary.logits_gradient, (logits, sums, targets, absent, 1.0, None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", choices=BUILTIN_CONFIGS, default="llama-3-8b")
    parser.add_argument("--code", help="a function whose code is printed")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    pretend_hopper()
    families.BUILTIN_CONFIGS[args.model] = model_config(args.model)
    arch = read_model_config(Path(args.model), Config(model=args.model, random_weights=True))[1]
    print("| function | kernels: loads and stores | allocated |\n|---|---|---|")
    for function, arguments in calls(arch):
        name, code = function.__wrapped__.__name__, code_of(function, arguments)
        if args.code == name:
            print(code)
        kernels = re.findall(r"^def triton_\w+\(.*?'''", code, re.M | re.S)
        passes = (f"{kernel.count('tl.load')} + {kernel.count('tl.store')}" for kernel in kernels)
        made = re.findall(r"= empty_strided_cpu\((\(.*?\)), \(.*?\), torch\.(\w+)\)", code)
        print(f"| {name} | {', '.join(passes)} | {', '.join(' '.join(one) for one in made)} |")


if __name__ == "__main__":
    main()
