#!/usr/bin/env python3
"""Run minimal_fsdp_qlora.py on random weights that no disk has, for the group `minimal` of run.py.

    torchrun --nproc_per_node=2 benchmarks/minimal.py --model DIRECTORY --dataset FILE ... \
        [--memory_limit_gib 22.5] [--no_flash_attn] [--words fp32|bf16]

DIRECTORY has config.json and a tokenizer; the other flags are the script's own, which is unchanged
but for what it reads. --words counts the 4-bit words that FSDP2 changes when a layer is gathered,
with LoRA in fp32, as it is, or in bf16: the trap of shard_layer().
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import minimal_fsdp_qlora as script  # before torch, which reads the script's setting
import torch

DEVICE = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


class RandomTensor:
    """Stands for a slice of a safetensors file: [...] makes it, the same on all ranks."""

    def __init__(self, name, shape):
        self.name, self.shape = name, shape

    def get_shape(self):
        return list(self.shape)

    def get_dtype(self):
        return "BF16"

    def __getitem__(self, _):
        value = torch.ones(self.shape, dtype=torch.bfloat16, device=DEVICE)
        if len(self.shape) > 1:
            draw = torch.Generator(DEVICE).manual_seed(sum(map(ord, self.name)))
            value.normal_(0, 0.02, generator=draw)
        return value


def random_handles(causal_lm, directory):
    """In place of open_weights()."""
    return {script.bare_name(name): RandomTensor(name, p.shape)
            for name, p in causal_lm.named_parameters() if ".lora_" not in name}


def limit_memory(gib):
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total, DEVICE)


def count_words(dtype):
    """Have the script count the words that FSDP2 changes, with LoRA in `dtype`."""
    init_lora, shard_layer, seen = script.init_lora, script.shard_layer, [0] * 4

    def init_in_dtype(module, *args):
        init_lora(module, *args)
        if dtype == "bf16":
            module.lora_A.bfloat16(), module.lora_B.bfloat16()

    def shard_and_count(layer, policy):
        linears = [m for m in layer.modules() if isinstance(m, script.bnb.nn.Linear4bit)]
        before = [linear.weight.detach().clone() for linear in linears]
        try:
            shard_layer(layer, policy)
            layer.unshard()
        except RuntimeError:
            seen[3] += 1  # and the layer is still gathered
        for linear, old in zip(linears, before):
            changed = linear.weight.view(torch.int16) != old.view(torch.int16)
            for i, n in enumerate((old.numel(), old.isnan().sum(), changed.sum())):
                seen[i] += int(n)
        layer.reshard()
        script.log("words: {:,}, NaN as bf16 {:,}, changed {:,}; found in {} layers".format(*seen))

    script.init_lora, script.shard_layer = init_in_dtype, shard_and_count


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--memory_limit_gib", type=float)
    parser.add_argument("--no_flash_attn", action="store_true")
    parser.add_argument("--words", choices=("fp32", "bf16"))
    args, sys.argv[1:] = parser.parse_known_args()
    script.open_weights = random_handles
    if args.memory_limit_gib and DEVICE != "cpu":
        limit_memory(args.memory_limit_gib)
    if args.no_flash_attn:
        script.is_flash_attn_2_available = lambda: False
    if args.words:
        count_words(args.words)
    script.main()


if __name__ == "__main__":
    main()
