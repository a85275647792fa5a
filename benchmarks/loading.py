#!/usr/bin/env python3
"""How fast train_fsdp_qlora.py loads a large checkpoint, and what memory that takes.

    python benchmarks/loading.py /tmp/loading --gb 60
    python benchmarks/loading.py /tmp/loading --gb 60 --cold     (as root: empties the page cache)

Writes a checkpoint of random bf16 weights of Llama-2-70B shapes, with as many layers as --gb asks
for, reads its files plainly, one after the other, and then has the training script load it and take
one step. Prints one table; the directory can be used again and is not removed.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from fsdp_qlora.run.demo import write_demo

SHARD = 5e9  # bytes of a file
BUFFER = 2**26  # bytes of random weights, written over and over; of a plain read


def model_shapes(shapes_dir, gb):
    """The config of a model of `gb` gigabytes in bf16, and {name: shape}."""
    config = AutoConfig.from_pretrained(shapes_dir)

    def shapes(n_layers):
        config.num_hidden_layers = n_layers
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    one, two = (2 * sum(map(math.prod, shapes(n).values())) for n in (1, 2))
    return shapes(max(1, math.ceil((gb * 1e9 - one) / (two - one)) + 1)), config


def write_model(directory, shapes, config):
    """Random weights in files of about 5 GB, an index, the config, a tokenizer and a few rows."""
    write_demo(directory / "demo")
    for path in (directory / "demo" / "model").glob("*token*"):
        shutil.copy(path, directory)
    config.save_pretrained(directory)
    noise = memoryview(torch.randn(BUFFER // 2).mul_(0.02).bfloat16().view(torch.uint8).numpy())
    groups, size = [[]], 0
    for name, shape in shapes.items():
        if size and size + 2 * math.prod(shape) > SHARD:
            groups, size = [*groups, []], 0
        groups[-1].append(name)
        size += 2 * math.prod(shape)
    weight_map = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file))
        header, end = {}, 0
        for name in names:
            start, end = end, end + 2 * math.prod(shapes[name])
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / file, "wb", buffering=0) as out:
            out.write(len(text).to_bytes(8, "little") + text)
            while end:
                end -= out.write(noise[: min(end, BUFFER)])
    total = 2 * sum(map(math.prod, shapes.values()))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def read_plainly(files):
    """Seconds to read all files, one after the other, into one buffer."""
    buffer, started = bytearray(BUFFER), time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def empty_page_cache():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def load(directory, nproc):
    """What a training run of one step prints about loading."""
    out = directory / "run"
    shutil.rmtree(out, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}",
         ROOT / "train_fsdp_qlora.py", "--model", directory,
         "--dataset", directory / "demo" / "data.jsonl", "--output_dir", out, "--max_steps", "1",
         "--max_seq_len", "64", "--batch_size", str(nproc), "--shard_group_size", str(nproc),
         "--lora_rank", "1"],
        stdout=subprocess.PIPE, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
             "FSDP_QLORA_DEBUG": "1"},
    )  # fmt: skip
    if done.returncode:
        sys.exit(done.stdout + f"the load ended with exit code {done.returncode}")
    (seconds,) = re.findall("^base model loaded in (.*) s$", done.stdout, re.M)
    (line,) = re.findall("^base model, each rank: .*", done.stdout, re.M)
    (memory,) = re.findall("^.* memory after loading, each rank: .*", done.stdout, re.M)
    print(f"loaded in {seconds} s\n{line}\n{memory}")
    ranks = re.findall(r"([\d.]+) ([GM])B at [\d.]+ .B/s with at most ([\d.]+) GiB", line)
    peaks = re.findall(r"([\d.]+) GiB \(peak ([\d.]+)\)", memory)
    ranks = ranks * nproc if len(ranks) == 1 else ranks  # what all say alike is said once
    return {
        "seconds": float(seconds),
        "gb": sum(float(size) / {"G": 1, "M": 1000}[unit] for size, unit, _ in ranks),
        "host": max(float(gib) for *_, gib in ranks),
        "device": max(float(peak) - float(now) for now, peak in peaks),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--gb", type=float, default=60, help="of weights")
    parser.add_argument("--shapes", default=ROOT / "benchmarks" / "llama-2-70b",
                        help="directory of the config.json whose shapes are taken")
    parser.add_argument("--nproc", type=int, default=2, help="processes that load")
    parser.add_argument("--cold", action="store_true", help="empty the page cache before each read")
    args = parser.parse_args()
    if not (args.directory / "model.safetensors.index.json").is_file():
        args.directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        write_model(args.directory, *model_shapes(args.shapes, args.gb))
        print(f"written in {time.perf_counter() - started:.0f} s", flush=True)
    else:
        print(f"{args.directory}: measures the checkpoint there; --gb and --shapes are not used")
    files = sorted(args.directory.glob("*.safetensors"))
    gb = sum(path.stat().st_size for path in files) / 1e9
    prepare = empty_page_cache if args.cold else lambda: read_plainly(files)
    prepare()
    plain = gb / read_plainly(files)
    prepare()
    loaded = load(args.directory, args.nproc)
    rate = loaded["gb"] / max(loaded["seconds"], 0.01)  # a tiny model takes 0.00 s
    print(f"\npage cache {'cold' if args.cold else 'warm'}, {args.nproc} processes\n\n"
          "| GB | plain read, GB/s | loading, all ranks, GB/s | ratio"
          " | host memory above start, GiB per rank | device peak above final, GiB |\n"
          "|---|---|---|---|---|---|\n"
          f"| {gb:.1f} | {plain:.2f} | {rate:.2f} | {rate / plain:.2f}"
          f" | {loaded['host']:.2f} | {loaded['device']:.2f} |")


if __name__ == "__main__":
    main()
