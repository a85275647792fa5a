#!/usr/bin/env python3
"""Fine-tune a language model by QLoRA on any number of GPUs: the whole job, in one file to copy.

    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model meta-llama/Llama-3.1-8B \
        --dataset rows.jsonl --output_dir adapter

The model is transformers', its 4-bit linears are bitsandbytes', the adapter is PEFT's LoRA, and
PyTorch's FSDP2 shards all of them. A row is {"text": ...} or {"messages": [...]}; the loss is over
all of its tokens, the questions in a conversation too. PEFT loads what is saved, merge_adapters.py
merges it. Without GPUs the script runs on the CPU, to try it. What it leaves out, and what has that
in train_fsdp_qlora.py:

    a loss over the answers alone, other data sets    --dataset
    evaluation, checkpoints, resuming                 evaluate(), save_checkpoint()
    short rows together; fewer, larger micro-batches  --micro_batch_tokens
    mixtures of experts, models already in 4 bits     fill_model()
    less memory, and a plan of what fits              --offload_params, --offload_activations
    faster layers: here they are transformers'        Model

Tested with torch 2.11 and 2.13, transformers 5.17 and 5.24, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import json
import math
import os
import random
import re
import sys
import time
import warnings
from pathlib import Path
from typing import NoReturn

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available

# FSDP2 shards only floating-point tensors, so four 4-bit weights are stored as one bf16 number
NF4 = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="Hub id, or directory of safetensors")
    add("--dataset", required=True, help="JSONL file, a row with text or messages a line")
    add("--output_dir", required=True, help="where the adapter goes")
    add("--max_steps", type=int, default=100, help="optimizer steps")
    add("--batch_size", type=int, default=16, help="rows a step, over all GPUs")
    add("--max_length", type=int, default=2048, help="tokens; longer rows are cut")
    add("--learning_rate", type=float, default=2e-4, help="at its peak")
    add("--lora_rank", type=int, default=16, help="rank of the adapter")
    args = parser.parse_args()
    device = join_processes()
    if args.batch_size % dist.get_world_size():
        refuse(f"--batch_size {args.batch_size} is not a multiple of {dist.get_world_size()} GPUs")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # fail now, not after training
    directory = Path(args.model)
    if not directory.is_dir():
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.model"]
        directory = Path(snapshot_download(args.model, allow_patterns=patterns,
                                           ignore_patterns=["*/*", "consolidated*"]))
    rows = read_rows(args, directory)
    model = build_model(args, directory, device)
    load_and_shard(model, directory, device)
    verify(model)
    train(model, rows, args, device)
    save_adapter(model, args)
    dist.destroy_process_group()


def join_processes() -> torch.device:
    """Join torchrun's processes over NCCL, on CPUs over gloo. Returns this rank's device."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # old names
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    # segments of fixed sizes would leave gaps, as rows have many lengths
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def log(message: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(message, flush=True)


def refuse(message: str) -> NoReturn:
    """End with one line instead of a traceback. All ranks must call this."""
    log(f"error: {message}")
    dist.barrier()  # torchrun kills rank 0 once another rank exits
    sys.exit(1)


def read_rows(args: argparse.Namespace, directory: Path) -> list[list[int]]:
    """Returns the token ids of each row of the data set, shuffled."""
    # the class that takes tokenizer.json as it is: AutoTokenizer's may make other tokens
    tokenizer, rows = PreTrainedTokenizerFast.from_pretrained(directory), []
    with open(args.dataset) as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if "messages" in row:
                rows.append(tokenizer.apply_chat_template(row["messages"], return_dict=False))
            elif "text" in row:
                rows.append([*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id])
            else:
                refuse(f"{args.dataset} line {number} has neither text nor messages")
    n_cut = sum(len(row) > args.max_length for row in rows)
    log(f"data: {len(rows):,} rows of {sum(map(len, rows)):,} tokens, {n_cut:,} rows are cut")
    random.Random(0).shuffle(rows)  # the same on all ranks
    return [row[: args.max_length] for row in rows]


def build_model(args: argparse.Namespace, directory: Path, device: torch.device) -> PeftModel:
    """Returns the model with its weights on meta, where they take no memory. The linears of its
    decoder layers are 4-bit ones, with LoRA beside them."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        refuse(f"{args.model} is quantised already: name the original")
    with init_empty_weights(include_buffers=False):  # rotary frequencies and the like are computed
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if device.type == "cuda" and is_flash_attn_2_available() and model._supports_flash_attn:
        model.set_attn_implementation("flash_attention_2")
    layers = model.get_decoder().layers
    names = {module: name for name, module in model.named_modules()}
    linears = {names[m]: m for m in layers.modules() if isinstance(m, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta",
            compute_dtype=torch.bfloat16, **NF4))
    for name, weight in layers.named_parameters():
        # experts are one 3-D tensor, no linears; or where one gets no tokens on a rank, it gets no
        # gradient there, for which the other ranks wait
        if "expert" in name or weight.dim() == 3 and "conv" not in name:
            refuse(f"{args.model} is a mixture of experts ({name}): use train_fsdp_qlora.py")
    model.requires_grad_(False)
    model.name_or_path, model.is_loaded_in_4bit = args.model, True  # PEFT reads both
    lora = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=list(linears),
                      task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)  # LoRA is on meta, too
    model.gradient_checkpointing_enable({"use_reentrant": False})  # backward recomputes layers
    return model


def load_and_shard(model: PeftModel, directory: Path, device: torch.device) -> None:
    """Read, quantise and shard layer by layer, so that memory is needed for only one whole layer.
    All ranks must call this."""
    stored = {}  # {short name: slice of a file, which is read where it is indexed}
    for path in sorted(directory.glob("*.safetensors")):
        file = safe_open(path, "pt")
        stored |= {short(name): file.get_slice(name) for name in file.keys()}
    causal_lm = model.get_base_model()
    causal_lm.tie_weights()  # a tied head is no tensor of its own
    for name, _ in causal_lm.named_parameters():
        if ".lora_" not in name and short(name) not in stored:
            refuse(f"{directory}: no *.safetensors has {short(name)}")
    torch.manual_seed(0)  # the same LoRA weights on all ranks
    names = {module: name for name, module in causal_lm.named_modules()}
    for layer in causal_lm.get_decoder().layers:
        for module in layer.modules():
            fill(module, names.pop(module), stored, device)
        shard_layer(layer)
    for module, name in names.items():
        fill(module, name, stored, device)
    causal_lm.tie_weights()
    fully_shard(model)  # what is in no layer, as embedding and head: whole while a row is computed


def short(name: str) -> str:
    """A tensor's name without what differs: PEFT's words, and the prefixes of multimodal models."""
    return re.sub(r"^((model|language_model)\.)+", "", name.replace(".base_layer", ""))


def fill(module: nn.Module, name: str, stored: dict, device: torch.device) -> None:
    """Give the weights and buffers of a module, but not of its children, their values: LoRA's
    initial ones, or those of the checkpoint, which 4-bit linears quantise."""
    if isinstance(module, LoraLayer):
        for matrices in module.lora_A, module.lora_B:
            matrices.to_empty(device=device).float()  # fp32: see shard_layer()
        module.reset_lora_parameters("default", init_lora_weights=True)
    for key, buffer in list(module.named_buffers(recurse=False)):
        value = stored.get(short(f"{name}.{key}"), buffer)
        setattr(module, key, value[...].to(device, buffer.dtype))
    for key, _ in list(module.named_parameters(recurse=False)):
        if (full := short(f"{name}.{key}")) in stored:  # else it is LoRA's, or a tied head
            value = stored[full][...].to(device, torch.bfloat16)
            if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
                weight = bnb.nn.Params4bit(value, requires_grad=False, module=module, **NF4)
                module.weight = weight.to(device)  # quantises
            else:
                setattr(module, key, nn.Parameter(value, requires_grad=False))


def shard_layer(layer: nn.Module) -> None:
    """Make a decoder layer an FSDP2 unit: each rank keeps a part of it, and all gather the whole
    for its forward and again for its backward. All ranks must call this.

    The trap: FSDP2 copies by torch._foreach_copy_, which on CUDA rewrites NaNs, and 0.08 % of what
    is stored here as bf16 are NaNs. Only where a unit's weights have two dtypes it copies bytes. So
    LoRA is in fp32, there is no MixedPrecisionPolicy, and what is gathered is compared.
    """
    linears = [module for module in layer.modules() if isinstance(module, bnb.nn.Linear4bit)]
    quantised = [linear.weight.detach().clone() for linear in linears]
    fully_shard(layer, reshard_after_forward=True)
    layer.unshard()
    for linear, weight in zip(linears, quantised):
        assert torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8)), (
            "FSDP2 has changed 4-bit weights: is LoRA in fp32, is there no MixedPrecisionPolicy?")
    layer.reshard()


def verify(model: PeftModel) -> None:
    """Check that nothing is left on meta, and that LoRA is trained and nothing else."""
    assert not any(p.is_meta for p in model.parameters()), "weights are left on meta"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(trained) == 2 * len(linears) and all(".lora_" in name for name in trained), (
        f"{len(trained)} tensors are trained, beside {len(linears)} linears")
    log(f"model: {sum(x.in_features * x.out_features for x in linears):,} weights in 4 bits,"
        f" {sum(p.numel() for p in trained.values()):,} trained;"
        f" {sum(p.to_local().nbytes for p in model.parameters()) / 2**30:.3f} GiB on each rank")


def train(model: PeftModel, rows: list, args: argparse.Namespace, device: torch.device) -> None:
    """The loop. Each rank computes its rows of a step one by one. All ranks must call this."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # bitsandbytes knows no DTensor: it gets this rank's shards, which are the same memory
    shards = {p: nn.Parameter(p.to_local().detach()) for p in trained if p.to_local().numel()}
    optimizer = bnb.optim.PagedAdamW8bit(shards.values(), weight_decay=0.0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model.train()
    for step in range(1, args.max_steps + 1):
        started = time.perf_counter()
        first = (step - 1) * args.batch_size
        batch = [rows[i % len(rows)] for i in range(first, first + args.batch_size)]  # of all ranks
        n_predicted = sum(len(row) - 1 for row in batch)
        loss = torch.zeros((), device=device)
        for row in batch[rank::world_size]:
            ids = torch.tensor([row], device=device)  # [1, tokens]
            with torch.autocast(device.type, torch.bfloat16):  # for LoRA, which is in fp32
                logits = model(input_ids=ids, use_cache=False).logits  # [1, tokens, vocabulary]
            row_loss = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            row_loss = row_loss / n_predicted  # the sum over all ranks is the mean over all tokens
            (row_loss * world_size).backward()  # FSDP2 divides gradients by world_size
            loss += row_loss.detach()
        dist.all_reduce(loss)
        norm = nn.utils.clip_grad_norm_(trained, 1.0).full_tensor()
        if not torch.isfinite(loss + norm):
            refuse(f"step {step}: loss {loss}, gradient norm {norm}: try a lower --learning_rate")
        for parameter, shard in shards.items():
            shard.grad = parameter.grad.to_local()
        rate = optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        optimizer.step()
        model.zero_grad()
        speed = sum(map(len, batch)) / (time.perf_counter() - started) / world_size
        gib = torch.cuda.max_memory_allocated() / 2**30
        log(f"step {step:5}/{args.max_steps} loss {loss:7.4f} lr {rate:.1e} grad {norm:6.3f}"
            f" {speed:7,.0f} tok/s/GPU {gib:.2f} GiB")


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The rate of step 1..max_steps: up to its peak in 3 % of them, then down as a cosine."""
    warmup = max(1, round(0.03 * args.max_steps))
    done = max(0, step - warmup) / (args.max_steps + 1 - warmup)
    return args.learning_rate * min(1, step / warmup) * 0.5 * (1 + math.cos(math.pi * done))


def save_adapter(model: PeftModel, args: argparse.Namespace) -> None:
    """Gather the adapter; rank 0 writes it in PEFT's format. All ranks must call this."""
    whole = {name: p.full_tensor().cpu() for name, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        model.save_pretrained(args.output_dir, state_dict=whole, save_embedding_layers=False)
    log(f"adapter saved; to merge it: python merge_adapters.py --adapter_dir {args.output_dir}"
        f" --base_model {args.model} --output_dir {args.output_dir}/merged")


if __name__ == "__main__":
    main()
