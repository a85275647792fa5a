#!/usr/bin/env python3
"""flex_attention on one GPU, for documents of uneven lengths: errors, times, compilations.

    python benchmarks/attention.py          # 2 minutes

For each of SHAPES, in bf16: the relative errors of the output and of the gradients of query, key
and value, against plain torch in fp32, and milliseconds of forward and backward. flex is called
with other lengths first; `compiled` says how often torch compiled for both. `static` is a kernel
for these lengths alone, `varlen` torch's varlen_attn, where it knows the shape.
"""

import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._dynamo.utils import counters

from fsdp_qlora.kernels.attention import eager_attention, varlen_attention
from fsdp_qlora.kernels.flex import flex_document_attention, flex_function

BUILTIN_CONFIGS = {  # heads, key/value heads, head_dim, soft cap, window, sinks
    "Gemma 2 27B": (32, 16, 128, 50.0, None, False),
    "Gemma 2 27B, window of 512": (32, 16, 128, 50.0, 512, False),
    "Gemma 2 2B": (8, 4, 256, 50.0, None, False),
    "Gemma 3 12B": (16, 8, 256, None, None, False),
    "Gemma 3 12B, window of 1,024": (16, 8, 256, None, 1024, False),
    "gpt-oss": (64, 8, 64, None, None, True),
    "gpt-oss, window of 128": (64, 8, 64, None, 128, True),
    "Phi-3 mini": (32, 32, 96, None, None, False),
}
LENGTHS = ((5, 900, 2300, 41, 1111),  # 4,357 tokens, no multiple of a block
           (1, 63, 64, 700, 1500, 2048, 2048, 1768))  # 8,192 tokens
REPEATS = 20


def make_case(lengths, heads, kv_heads, head_dim, cap, window, has_sinks, device):
    """(query, key, value, gradient of the output), and a kernel's other arguments."""
    n, sides = sum(lengths), (heads, kv_heads, kv_heads)
    torch.manual_seed(0)
    settings = dict(dtype=torch.bfloat16, device=device)
    query, key, value = torch.randn(n, sum(sides), head_dim, **settings).split(sides, 1)
    grad = torch.randn(n, heads, head_dim, **settings)
    if cap:
        query *= 4  # else no score comes near the cap
    sinks = 2 * torch.randn(heads, device=device) if has_sinks else None
    micro_batch = types.SimpleNamespace(
        lengths=lengths, max_seqlen=max(lengths), masks={}, dropout_seeds=None,
        position_ids=torch.cat([torch.arange(length) for length in lengths]).to(device),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int().to(device))  # fmt: skip
    arch = types.SimpleNamespace(
        n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim, attention_scale=head_dim**-0.5,
        attention_softcap=cap, attention_dropout=0.0, sinks=has_sinks)  # fmt: skip
    return (query, key, value, grad), (sinks, micro_batch, arch, window, 0)


def both(kernel, tensors, rest):
    """The output and the gradients of query, key and value."""
    *inputs, grad = (t.detach() for t in tensors)
    out = kernel(*(t.requires_grad_() for t in inputs), *rest)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def measure(kernel, case, want):
    """Relative errors and milliseconds, as two cells of the table."""
    got = both(kernel, *case)
    errors = (float((a.float() - b).norm() / b.norm()) for a, b in zip(got, want))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPEATS):
        both(kernel, *case)
    end.record()
    torch.cuda.synchronize()
    return " ".join(f"{e:.1e}" for e in errors), f"{start.elapsed_time(end) / REPEATS:.2f}"


def static_kernel(sinks, micro_batch, arch, window, _):
    """flex_document_attention() for these lengths alone."""
    # without marks that leave sizes open
    mask = tuple(t.clone() for t in micro_batch.masks[window])
    compiled = torch.compile(
        flex_function(arch.attention_softcap, arch.attention_scale), dynamic=False)  # fmt: skip
    return lambda query, key, value, *_: compiled(query, key, value, sinks, mask)


def main():
    if not torch.cuda.is_available():
        sys.exit("no GPU here")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}\n")
    print("| shape | compiled | flex, errors | ms | static, errors | ms | varlen, errors | ms |")
    print("|---" * 8 + "|")
    for name, shape in BUILTIN_CONFIGS.items():
        graphs = counters["stats"]["unique_graphs"]
        for lengths in LENGTHS:
            case = tensors, rest = make_case(lengths, *shape, "cuda")
            want = both(eager_attention, [t.float() for t in tensors], rest)
            cells = measure(flex_document_attention, case, want)
        graphs = counters["stats"]["unique_graphs"] - graphs
        cells += measure(static_kernel(*rest), case, want)
        cells += ("", "") if shape[3] else measure(varlen_attention, case, want)
        print(f"| {name} | {graphs} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
