#!/usr/bin/env python3
"""Fine-tune a language model by QLoRA on any number of GPUs: the whole job, in one file to copy.

    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model meta-llama/Llama-3.1-8B-Instruct \
        --dataset rows.jsonl --output_dir adapter

The model is transformers', its 4-bit linears are bitsandbytes', the adapter is PEFT's LoRA, and
PyTorch's FSDP2 shards all of them. A row is {"messages": [...]}, of which the answers are trained,
or {"text": ...}, which is trained whole. Plain python runs it as one process, without GPUs on the
CPU, to try it. What it leaves out, and what has that in train_fsdp_qlora.py:

    other forms of rows, other data sets              --dataset
    evaluation, checkpoints, resuming                 evaluate(), save_checkpoint()
    short rows together; fewer, larger micro-batches  --micro_batch_tokens
    mixtures of experts, models already in 4 bits     load_model()
    less memory: 24 GB hold an 8B, 2 x 24 GB no 70B   --offload_params, --offload_activations

Tested with torch 2.13, transformers 5.20 and 5.24, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import json
import math
import os
import random
import re
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
from safetensors import safe_open
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available

# FSDP2 shards only floating-point tensors, so four 4-bit weights are stored as one bf16 number
NF4 = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
Row = tuple[list[int], list[int]]  # token ids, and labels: the same, -100 where not trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, help="Hub id, or directory of safetensors")
    add("--dataset", required=True, help="JSONL file, a row with messages or text a line")
    add("--output_dir", required=True, help="where the adapter goes")
    add("--max_steps", type=int, default=100, help="optimizer steps")
    add("--batch_size", type=int, default=16, help="rows a step, over all GPUs")
    add("--max_length", type=int, default=2048, help="tokens; longer rows are cut")
    add("--learning_rate", type=float, default=2e-4, help="at its peak")
    add("--lora_rank", type=int, default=16, help="rank of the adapter")
    args = parser.parse_args()
    device = join_processes()
    for name, value in vars(args).items():
        if not isinstance(value, str) and not value > 0:
            refuse(f"--{name} {value}: it must be above 0")
    if args.batch_size % dist.get_world_size():
        refuse(f"--batch_size {args.batch_size} is not a multiple of {dist.get_world_size()} GPUs")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # fail now, not after training
    directory = Path(args.model)
    if not directory.is_dir():
        directory = Path(snapshot_download(args.model, allow_patterns=[
            "*.json", "model*.safetensors", "*.jinja", "*.model"]))
    rows = read_rows(args, directory)
    model = build_model(args, directory, device)
    load_and_shard(model, directory, device)
    verify(model)
    train(model, rows, args, device)
    save_adapter(model, args)
    dist.destroy_process_group()


def join_processes() -> torch.device:
    """Join torchrun's processes, if it has started this one. Returns this rank's device."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_", FutureWarning)  # transformers renames it
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **alone)
        return torch.device("cpu")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # fewer gaps
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **alone)
    return device


def log(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def refuse(message: str) -> NoReturn:
    """End with one line instead of a traceback. All ranks must call this."""
    log(f"error: {message}")
    dist.barrier()  # the first rank that exits makes torchrun kill the others: rank 0 prints first
    raise SystemExit(1)


def read_rows(args: argparse.Namespace, directory: Path) -> list[Row]:
    """Returns the rows of all steps, cut. An epoch's number is the seed of its shuffle."""
    tokenizer, end = PreTrainedTokenizerFast.from_pretrained(directory), args.max_length
    found, number = list[Row](), 0
    try:
        with open(args.dataset, encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    found += encode(json.loads(line), tokenizer)
    except Exception as e:  # a chat template raises what it likes
        refuse(f"--dataset {args.dataset}, line {number}: {type(e).__name__}: {e}")
    rows = [(x[:end], y[:end]) for x, y in found if max(y[1:end], default=-100) >= 0]
    if not rows:
        refuse(f"--dataset {args.dataset}: nothing to train in {len(found)} texts and answers")
    n_epochs = args.max_steps * args.batch_size / len(rows)
    log(f"data: {len(rows):,} of {len(found):,} texts and answers are trained {n_epochs:.2f} times,"
        f" {sum(len(x) > end for x, _ in found):,} are cut")
    return [row for epoch in range(math.ceil(n_epochs))
            for row in random.Random(epoch).sample(rows, len(rows))]


def encode(row: dict, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Returns a text, or each answer of a conversation behind its prompt, which is what a server
    makes of the messages before it. A template may change an answer when others follow, as Qwen3's
    drops reasoning, so each answer is a row of its own."""
    check_keys(row)
    if "text" in row:
        ids = tokenizer(row["text"] + (tokenizer.eos_token or ""))["input_ids"]
        return [(ids, ids)]
    rows = []
    for i, message in enumerate(row["messages"]):
        if i > 0 and message["role"] == "assistant":
            prompt = render(row["messages"][:i], tokenizer, add_generation_prompt=True)
            text = render(row["messages"][: i + 1], tokenizer)
            if not text.startswith(prompt):
                raise ValueError(f"the chat template asks with {prompt[-40:]!r}, but renders the"
                                 " answer otherwise: train_fsdp_qlora.py knows ways")
            special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
            closed = text.rstrip()
            if not closed.endswith((tokenizer.eos_token, *special)):
                closed = text + tokenizer.eos_token  # the last turn is left open, as GLM's is
            prompt_ids, ids = (tokenizer(t, add_special_tokens=False)["input_ids"]
                               for t in (prompt, closed))
            if ids[: len(prompt_ids)] != prompt_ids:  # a token goes over from one to the other
                answer = closed.removeprefix(prompt)
                ids = prompt_ids + tokenizer(answer, add_special_tokens=False)["input_ids"]
            rows.append((ids, [-100] * len(prompt_ids) + ids[len(prompt_ids) :]))
    return rows


def render(messages: list[dict], tokenizer: PreTrainedTokenizerFast, **options: bool) -> str:
    """Returns what the chat template makes of messages, if it has all that they say."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    for message in messages:
        content = message["content"].rpartition("</think>")[2]  # templates may drop reasoning
        if content.strip() not in text:
            raise ValueError(f"the chat template leaves out {content[:40]!r}")
    return text


def check_keys(row: dict) -> None:
    """Raise ValueError for what is not handled here: most of it means something elsewhere."""
    if row.keys() not in ({"text"}, {"messages"}):
        raise ValueError(f"has {', '.join(row)}; want messages or text alone: train_fsdp_qlora.py"
                         " reads tools, weights and other forms")
    for message in row.get("messages", ()):
        content = message.get("content")
        if message.keys() != {"role", "content"} or not isinstance(content, str):
            raise ValueError(f"a message has {', '.join(message)}; want role and content, a text:"
                             " train_fsdp_qlora.py reads calls of tools, parts and reasoning")
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"a message is of {message['role']!r}; known are system, user and"
                             " assistant")
        if message["role"] == "assistant" and not content.strip():
            raise ValueError("an answer is empty")


def build_model(args: argparse.Namespace, directory: Path, device: torch.device) -> PeftModel:
    """Returns the model on meta, without memory: its layers' linears in 4 bits, with LoRA."""
    if hasattr(config := AutoConfig.from_pretrained(directory), "quantization_config"):
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
    for name, weight in layers.named_parameters():  # an expert without tokens has no gradient
        if "expert" in name or (weight.dim() == 3 and "conv" not in name):
            refuse(f"{args.model} is a mixture of experts ({name}): use train_fsdp_qlora.py")
    model.requires_grad_(False)
    model.name_or_path, model.is_loaded_in_4bit = args.model, True  # for PEFT's config and class
    lora = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=list(linears),
                      task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)  # LoRA is on meta, too
    model.gradient_checkpointing_enable({"use_reentrant": False})  # inputs need no gradients then
    return model


def load_and_shard(model: PeftModel, directory: Path, device: torch.device) -> None:
    """Read, quantise, shard: layer by layer, so that one is whole. All ranks must call this."""
    stored = {}  # {bare name: slice of a file; slice[...] reads all of it}
    for file in (safe_open(path, "pt") for path in sorted(directory.glob("model*.safetensors"))):
        for name in file.keys():
            if bare_name(name) in stored:
                refuse(f"{directory}: two tensors of its files are {bare_name(name)}")
            stored[bare_name(name)] = file.get_slice(name)
    causal_lm = model.get_base_model()
    causal_lm.tie_weights()  # a tied head is no tensor of its own
    for name, _ in causal_lm.named_parameters():
        if ".lora_" not in name and bare_name(name) not in stored:
            refuse(f"{directory}: no model*.safetensors has {bare_name(name)}")
    torch.manual_seed(0)  # the same LoRA weights on all ranks
    names = {module: name for name, module in causal_lm.named_modules()}
    for layer in causal_lm.get_decoder().layers:
        for module in layer.modules():
            fill(module, names.pop(module), stored, device)
        shard_layer(layer)
    outer = {m for m in causal_lm.get_decoder().modules() if isinstance(m, nn.Linear)} & {*names}
    for module, name in names.items():
        fill(module, name, stored, device)
        if module in outer:  # Gemma 4 has one: stays in bf16, rounded as transformers' NF4 does
            codes = bnb.functional.quantize_4bit(
                module.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
            module.weight.data = bnb.functional.dequantize_4bit(*codes)
    causal_lm.tie_weights()
    fully_shard(model)  # the rest, as embedding and head: whole in a step, of a 70B 4 GiB


def bare_name(name: str) -> str:
    """A tensor's name without PEFT's words and the prefixes of multimodal models."""
    return re.sub(r"^((model|language_model)\.)+", "", name.replace(".base_layer", ""))


def fill(module: nn.Module, name: str, stored: dict, device: torch.device) -> None:
    """Give a module's own weights and buffers, not those of its children, their values."""
    if hasattr(module, "lora_A"):  # LoRA: PEFT's initial values, in fp32: see shard_layer()
        for matrices in module.lora_A, module.lora_B:
            matrices.to_empty(device=device).float()  # both in place
        module.reset_lora_parameters("default", init_lora_weights=True)
    for key, buffer in list(module.named_buffers(recurse=False)):  # most are computed, not stored
        full = bare_name(f"{name}.{key}")
        value = stored[full][...] if full in stored else buffer
        setattr(module, key, value.to(device, buffer.dtype))
    for key, _ in list(module.named_parameters(recurse=False)):
        if (full := bare_name(f"{name}.{key}")) in stored:  # else it is LoRA's, or a tied head
            value = stored[full][...].to(device, torch.bfloat16)
            weight = nn.Parameter(value, requires_grad=False)
            if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
                weight = bnb.nn.Params4bit(value, module=module, **NF4).to(device)  # to() quantises
            setattr(module, key, weight)


def shard_layer(layer: nn.Module) -> None:
    """Make a layer an FSDP2 unit: each rank holds a part of it, and all gather the whole for its
    forward and again for its backward. All ranks must call this.

    The trap: of what is stored as bf16 here 0.08 % are NaNs. FSDP2 copies by torch._foreach_copy_,
    which rewrites NaNs on CUDA: wrong weights, no error. Only a unit of several dtypes is copied as
    bytes (_get_all_gather_input_metadatas() in torch's _fsdp_collectives.py). So LoRA is in fp32,
    no MixedPrecisionPolicy makes it bf16, and what is gathered is compared.
    """
    before = [(m, m.weight.clone()) for m in layer.modules() if isinstance(m, bnb.nn.Linear4bit)]
    fully_shard(layer, reshard_after_forward=True)
    layer.unshard()
    for linear, weight in before:
        if not torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8)):
            raise RuntimeError("FSDP2 has changed 4-bit weights: is LoRA in fp32? No policy?")
    layer.reshard()


def verify(model: PeftModel) -> None:
    """Check that nothing is left on meta, and that LoRA is trained and nothing else."""
    assert not any(p.is_meta for p in model.parameters()), "weights are left on meta"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(trained) == 2 * len(linears) and all(".lora_" in name for name in trained), (
        f"{len(trained)} tensors are trained, beside {len(linears)} linears")
    log(f"model: {sum(p.numel() for p in trained.values()):,} weights are trained; each rank holds"
        f" {sum(p.to_local().nbytes for p in model.parameters()) / 2**30:.3f} GiB")


def train(model: PeftModel, rows: list, args: argparse.Namespace, device: torch.device) -> None:
    """The loop. Each rank computes its rows of a step one by one. All ranks must call this."""
    trained = [p for p in model.parameters() if p.requires_grad]
    # bitsandbytes knows no DTensor: it gets this rank's rows, the same memory, if it has any
    shards = {p: nn.Parameter(p.to_local().detach()) for p in trained if p.to_local().numel()}
    optimizer = bnb.optim.PagedAdamW8bit(shards.values(), weight_decay=0.0)
    world_size = dist.get_world_size()
    for step in range(1, args.max_steps + 1):
        started = time.perf_counter()
        batch = rows[(step - 1) * args.batch_size : step * args.batch_size]  # of all ranks
        n_trained = sum(label >= 0 for _, labels in batch for label in labels[1:])
        loss = torch.zeros((), device=device)
        for row in batch[dist.get_rank() :: world_size]:
            ids, labels = torch.tensor(row, device=device)  # both [tokens]
            with torch.autocast(device.type, torch.bfloat16):  # for LoRA, which is in fp32
                logits = model(input_ids=ids[None], use_cache=False).logits[0]  # [tokens, vocab]
            row_loss = F.cross_entropy(logits[:-1].float(), labels[1:], reduction="sum") / n_trained
            (row_loss * world_size).backward()  # FSDP2 divides gradients by world_size
            loss += row_loss.detach()
        dist.all_reduce(loss)
        norm = nn.utils.clip_grad_norm_(trained, 1.0).full_tensor()
        if not torch.isfinite(loss + norm) or norm == 0:
            refuse(f"step {step}: loss {loss}, gradient norm {norm}: try a lower --learning_rate")
        for parameter, shard in shards.items():
            shard.grad = parameter.grad.to_local()
        rate = optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        optimizer.step()
        model.zero_grad()
        speed = sum(len(ids) for ids, _ in batch) / (time.perf_counter() - started) / world_size
        log(f"step {step:5}/{args.max_steps} loss {loss:7.4f} lr {rate:.1e} grad {norm:6.3f}"
            f" {speed:7,.0f} tok/s/GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


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
