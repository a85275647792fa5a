#!/usr/bin/env python3
"""What minimal_fsdp_qlora.py does on two GPUs: 4 minutes on H100s, without a network.

    python benchmarks/minimal.py

Of models with random weights it prints the losses on one GPU and on two; how many 4-bit words FSDP2
changes, with LoRA in fp32, as it is, and in bf16; the speed and memory of a 7B on two GPUs that may
use 12 GiB each. Without GPUs it tries itself, on tiny models.
"""

import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
GPU, LIMIT_GIB, LENGTH = torch.cuda.is_available(), 12, 2048 if torch.cuda.is_available() else 64
SHAPES = {  # Llama-3-8B's with 4 layers, and Llama-2-7B's
    "8b-4-layers": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
                    "num_hidden_layers": 4, "num_key_value_heads": 8},
    "7b": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008}}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "vocab_size": 512}


def main() -> None:
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # memory: 18 GB are written
    with tempfile.TemporaryDirectory(dir=place) as work:
        draw, words = random.Random(0), "what is the answer to this plus minus times".split()
        for name, least, most in ("rows", LENGTH // 20, LENGTH // 5), ("long", LENGTH, LENGTH):
            texts = [" ".join(draw.choices(words, k=draw.randint(least, most))) for _ in range(48)]
            Path(work, f"{name}.jsonl").write_text("\n".join(f'{{"text": "{t}"}}' for t in texts))
        for name, shape in SHAPES.items():
            write_model(f"{work}/{name}", shape if GPU else {**shape, **TINY})
        one, _ = launch(work, "8b-4-layers", "rows", 1, 8)
        two, in_fp32 = launch(work, "8b-4-layers", "rows", 2, 8, COUNT="fp32")
        _, in_bf16 = launch(work, "8b-4-layers", "rows", 2, 1, COUNT="bf16")
        large, _ = launch(work, "7b", "long", 2, 6, LIMIT_GIB=str(LIMIT_GIB))
    largest = max((abs(a[0] - b[0]) for a, b in zip(one, two)), default=float("nan"))
    print(f"\n{torch.cuda.get_device_name() if GPU else 'CPU, tiny'}, torch {torch.__version__}\n")
    print("| run | losses | tokens/s/GPU | GiB |\n|---|---|---|---|")
    for name, steps in ("1 GPU", one), ("2 GPUs", two), (f"7B, 2 x {LIMIT_GIB} GiB", large):
        losses, speeds, gib = zip(*steps) if steps else (["failed"], [0], [0])
        print("|", name, "|", *losses, "|", sorted(speeds)[len(speeds) // 2], "|", gib[-1], "|")
    print(f"\n1 and 2 GPUs differ by {largest:.4f}\nLoRA in fp32: {in_fp32}\nin bf16: {in_bf16}")


def write_model(directory: str, shape: dict[str, int]) -> None:
    """A Llama with random weights, and a tokenizer whose tokens are bytes."""
    with torch.device("cuda" if GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    model.save_pretrained(directory)
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(directory)


def launch(work: str, model: str, rows: str, gpus: int, steps: int, **env: str) -> tuple[list, str]:
    """Returns (loss, tokens/s/GPU, GiB) of each step, and what watch() counts if there is `env`."""
    torch.cuda.empty_cache()
    flags = {"model": f"{work}/{model}", "dataset": f"{work}/{rows}.jsonl", "batch_size": 8,
             "output_dir": f"{work}/adapter", "max_steps": steps, "max_length": LENGTH}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               f"--nproc_per_node={gpus}", __file__ if env else f"{ROOT}/minimal_fsdp_qlora.py",
               *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True)
    print(f"{model}, {gpus} processes, {env}:\n{done.stdout}", flush=True)
    found = re.findall(r"^step .* loss +(\S+) .* (\S+) tok/s/GPU (\S+) GiB", done.stdout, re.M)
    counted = re.findall(r"^words: .*", done.stdout, re.M)[-1:]
    return [[float(x.replace(",", "")) for x in step] for step in found], "".join(counted)


def watch(script, dtype: str | None, limit_gib: str | None) -> None:
    """Have the script count the words that FSDP2 changes, with LoRA in `dtype`, or limit memory."""
    fill, shard_layer, seen = script.fill, script.shard_layer, [0] * 4

    def fill_with_lora_in_dtype(module, *args):
        fill(module, *args)
        if dtype == "bf16" and hasattr(module, "lora_A"):
            module.lora_A.bfloat16(), module.lora_B.bfloat16()

    def shard_and_count(layer):
        linears = [m for m in layer.modules() if isinstance(m, script.bnb.nn.Linear4bit)]
        before = [linear.weight.detach().clone() for linear in linears]
        try:
            shard_layer(layer)
            layer.unshard()
        except RuntimeError:
            seen[3] += 1  # and the layer is still gathered
        for linear, old in zip(linears, before):
            changed = linear.weight.view(torch.int16) != old.view(torch.int16)
            for i, n in enumerate((old.numel(), old.isnan().sum(), changed.sum())):
                seen[i] += int(n)
        layer.reshard()
        script.log("words: {:,}, NaN as bf16 {:,}, changed {:,}; found in {} layers".format(*seen))

    if dtype:
        script.fill, script.shard_layer = fill_with_lora_in_dtype, shard_and_count
    if limit_gib and GPU:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # as the script does
        part = float(limit_gib) * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(part, int(os.environ["LOCAL_RANK"]))


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:  # started by launch()
        sys.path.insert(0, str(ROOT))
        import minimal_fsdp_qlora as script
        watch(script, os.environ.get("COUNT"), os.environ.get("LIMIT_GIB"))
        script.main()
    else:
        main()
