#!/usr/bin/env python3
"""Loss curves of this script's own compute path against the plain one, from the same seed.

    python benchmarks/curves.py --out bench [--steps 200] [--gpus 2] [--dtypes float32]

Plain: bitsandbytes' dequantization, PEFT's formula, autograd's backward, nothing compiled. Loading,
sharding, data and optimizer are the script's in both, so that all that differs is the arithmetic of
a decoder layer. Each in bf16 and fp32, on the built-in demo; a table of the gaps is the last thing
printed. Without a GPU --gpus is the number of CPU processes.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from run import ROOT, launch

sys.path.insert(0, str(ROOT))


def plain_product(layer, fused, x):
    """The outputs of a fused linear's frozen weights, and what PEFT's formula adds to them."""
    from fsdp_qlora.layer.dequantize import dequantize

    adapter, parts = layer.adapter.to(x.dtype), layer.spec.adapter_slices()
    blank = torch.zeros_like(adapter, requires_grad=False)
    weights = dequantize(layer, fused, blank)[:, : fused.in_features]
    outputs = []
    for linear in fused.linears:
        outputs.append(F.linear(x, weights[linear.outputs]))
        name = linear.name
        if (name, "lora_A.weight") in parts:
            a, b = (adapter[where].view(shape) for where, shape in (
                parts[name, f"lora_{which}.weight"] for which in "AB"))  # fmt: skip
            outputs[-1] = outputs[-1] + F.linear(F.linear(x, a), b) * layer.spec.scaling
    return outputs


def plain_layer(layer, x, inputs):
    """A Llama decoder layer as one would write it, for autograd; with DoRA the script's own."""
    from fsdp_qlora.layer.layer import LayerFunction

    if layer.spec.dora:  # of the check at start
        return LayerFunction.apply(x, layer.adapter, layer, inputs, torch.is_grad_enabled())
    arch, (qkv, out, gate_up, down) = layer.arch, layer.spec.fused_linears

    def norm(name, x):
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + arch.norm_eps)
        where, shape = layer.spec.vectors[f"{name}.weight"]
        return layer.vectors[where].view(shape) * (x.float() * scale).to(x.dtype)

    def rotated(x):
        rope_index = layer.spec.mixer_sublayer.token_mixer.rope_index
        cos, sin = (t[:, None] for t in inputs.rope_tables[rope_index][:2])
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    normed = norm(arch.attention_norm, x)
    query, key, value = (part.unflatten(1, (-1, arch.head_dim))
                         for part in plain_product(layer, qkv, normed))  # fmt: skip
    documents = zip(*(t.split(inputs.batch.lengths) for t in (rotated(query), rotated(key), value)))
    attended = [
        F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in document), is_causal=True,
                                       enable_gqa=True)[0].transpose(0, 1).flatten(1)
        for document in documents
    ]  # fmt: skip
    x = x + plain_product(layer, out, torch.cat(attended))[0]
    gates, ups = plain_product(layer, gate_up, norm(arch.mlp_norm, x))
    return (x + plain_product(layer, down, F.silu(gates) * ups)[0],)


def driver(path, argv):
    import train_fsdp_qlora as script
    from fsdp_qlora.kernels import compiled
    from fsdp_qlora.layer import layer
    from fsdp_qlora.run import metrics, startup_log
    from fsdp_qlora.planner import machine, search

    if path == "plain":
        layer.DecoderLayer.forward = plain_layer
        for user in (compiled, metrics, startup_log, machine):
            user.why_no_triton = lambda: "plain"
        search.with_cuda_graphs = lambda plan, *_: plan
    code = script.main(argv)
    sys.stdout.flush()
    os._exit(code)  # for the reason that the script does


def losses(path, dtype, args):
    """Of one run, a torchrun of its own."""
    name = f"curve-{path}-{dtype}"
    results = args.out / name
    shutil.rmtree(results, ignore_errors=True)
    flags = ["--output_dir", results, "--max_steps", args.steps, "--compute_dtype", dtype,
             "--batch_size", 16, "--learning_rate", args.learning_rate, "--attn", "sdpa",
             "--recompute", "none" if path == "plain" else "all"]  # fmt: skip
    program = [__file__, "driver", path, *flags]
    code, _, text = launch(args.gpus, program, args.out / f"{name}.log", args.limit)
    if code != 0:
        sys.exit(f"{name}: exit code {code}: {text[-600:]}")
    rows = map(json.loads, (results / "metrics.jsonl").read_text().splitlines())
    return torch.tensor([row["loss"] for row in rows], dtype=torch.float64)


def main(argv):
    if argv[:1] == ["driver"]:
        driver(argv[1], argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where results go")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--learning_rate", default="1e-3", help="at the demo's 3e-3 spikes grow")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--limit", type=float, default=600, help="seconds a run may take")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    lines = ["| dtype | first loss | last loss | largest gap | at step | mean gap |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for dtype in args.dtypes:
        ours, plain = (losses(path, dtype, args) for path in ("ours", "plain"))
        gap = (ours - plain).abs()
        lines.append(f"| {dtype} | {ours[0]:.4f} | {ours[-1]:.4f} | {gap.max():.1e} |"
                     f" {int(gap.argmax()) + 1} | {gap.mean():.1e} |")  # fmt: skip
        (args.out / "curves.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
