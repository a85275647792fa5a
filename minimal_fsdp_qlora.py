#!/usr/bin/env python3
"""Fine-tune a language model by QLoRA on several GPUs: initialize NCCL, load the model in NF4 with
bf16 quant_storage and Flash Attention 2, shard it by a hand-written FSDP policy, and train LoRA in
a PagedAdamW8bit loop. The whole job, in one file to copy.

    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model meta-llama/Llama-3.1-8B-Instruct \
        --dataset rows.jsonl --output_dir adapter

A line of the data set is {"messages": [...]}, where only the assistant's answers are in the loss,
or {"text": "..."}, where every token is. With --offload --micro_batch_size 2, a 70B trains on one
or two 24 GB GPUs: 15 GiB per GPU for rows of 2,048 tokens, and about 64 GB of host memory in all.
Without torchrun the file runs as one process, and without a GPU on the CPU.

The model is transformers', its 4-bit linears are bitsandbytes', the adapter is PEFT's, and FSDP2
shards all of them. What is missing here, and where train_fsdp_qlora.py has it:

    tools, preference pairs, other data               --dataset, --loss
    evaluation, checkpoints, resuming                 evaluate(), save_checkpoint()
    mixtures of experts, models already in 4 bits     load_model()
    a plan of memory and speed                        agree_on_plan()

Tested with torch 2.11 and 2.13, transformers 5.20 to 5.24, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import functools
import json
import math
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

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
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available

DTYPE = torch.bfloat16  # dtype of unquantized weights, activations and matmuls
# before torch 2.13 FSDP2 cannot shard integers: so four 4-bit weights are stored as a bf16 number
NF4_KWARGS = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
MAX_GRAD_NORM = 1.0
WARMUP_FRACTION = 0.03  # fraction of all steps
LOSS_CHUNK = 1024  # tokens whose logits are in fp32 at once: 0.5 GiB for a vocabulary of 128k
IGNORE_INDEX = -100  # label of a token that is not in the loss
# token ids, and targets: targets[i] is ids[i + 1], or IGNORE_INDEX if that token is not in the loss
Row = tuple[list[int], list[int]]


def main() -> None:
    args = parse_args()
    device = init_distributed()
    check_args(args)
    directory = model_directory(args)
    # this class reads tokenizer.json as it is, whatever class the model names
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    rows = rows_of_all_steps(read_rows(args, tokenizer), args)
    model = build_model(args, directory, device)
    load_and_shard(model, args, directory, device)
    verify(model)
    train(model, rows, args, device)
    save_adapter(model, args, directory, device)
    dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a language model by QLoRA on several GPUs.", allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id, or directory of safetensors")
    parser.add_argument("--dataset", required=True, help="JSONL file with messages or text")
    parser.add_argument("--output_dir", required=True, help="where the adapter goes")
    parser.add_argument("--max_steps", type=int, default=100, help="optimizer steps")
    parser.add_argument(
        "--batch_size", type=int, default=16,
        help="rows (texts, or answers) per optimizer step, summed over all GPUs")
    parser.add_argument(
        "--micro_batch_size", type=int, default=4,
        help="a GPU computes micro_batch_size * max_seq_len tokens at once: that many full rows,"
        " or more short ones")
    parser.add_argument(
        "--max_seq_len", type=int, default=2048, help="tokens; longer rows are cut")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--lora_rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument(
        "--lora_alpha", type=int, default=32,
        help="the adapter is scaled by lora_alpha / lora_rank")
    parser.add_argument(
        "--offload", action="store_true",
        help="keep the model in host memory, and on the GPU only the layers that compute")
    return parser.parse_args()


def init_distributed() -> torch.device:
    """Join the processes that torchrun started; without torchrun, be the only process. Returns this
    rank's device."""
    single_process = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    group = {} if "RANK" in os.environ else single_process  # torchrun sets RANK and the rest
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **group)
        return torch.device("cpu")
    # less fragmentation; read at the first allocation on the GPU
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **group)
    return device


def check_args(args: argparse.Namespace) -> None:
    for name in ("max_steps", "batch_size", "micro_batch_size", "max_seq_len", "learning_rate",
                 "lora_rank", "lora_alpha"):
        value = getattr(args, name)
        if not value > 0:
            fail(f"--{name} {value}: must be above 0")
    if args.batch_size % dist.get_world_size():
        fail(f"--batch_size {args.batch_size} is not a multiple of {dist.get_world_size()} GPUs")
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # fail now, not after training


def log(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def fail(message: str) -> NoReturn:
    """Print one line instead of a traceback, and exit. Each rank that fails prints its own."""
    print(f"error: {message}", flush=True)
    raise SystemExit(1)  # torchrun then ends the other ranks


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def read_rows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Return the rows of the data set that have a token in the loss."""
    if not Path(args.dataset).is_file():
        fail(f"--dataset {args.dataset}: no such file")
    encoded = []
    # as bytes: str.splitlines() also splits at characters such as U+2028
    for number, line in enumerate(Path(args.dataset).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            encoded += encode(json.loads(line), tokenizer)
        except Exception as error:  # json's, encode()'s, or any that a chat template raises
            fail(f"--dataset {args.dataset}, line {number}: {type(error).__name__}: {error}")
    rows = []
    for ids, labels in encoded:
        ids, labels = ids[: args.max_seq_len], labels[: args.max_seq_len]
        targets = labels[1:] + [IGNORE_INDEX]  # shift: position i predicts token i + 1
        if any(target != IGNORE_INDEX for target in targets):
            rows.append((ids, targets))
    if not rows:
        fail(f"--dataset {args.dataset}: no token to train on in {len(encoded)} rows")
    n_cut = sum(len(ids) > args.max_seq_len for ids, _ in encoded)
    n_epochs = args.max_steps * args.batch_size / len(rows)
    log(f"data: {len(rows):,} of {len(encoded):,} rows have tokens to train on, {n_cut:,}"
        f" are truncated; {n_epochs:.2f} epochs")
    return rows


def rows_of_all_steps(rows: list[Row], args: argparse.Namespace) -> list[Row]:
    """Repeat the rows for as many epochs as the steps need, each in an order of its own."""
    all_rows: list[Row] = []
    epoch = 0
    while len(all_rows) < args.max_steps * args.batch_size:
        all_rows += random.Random(epoch).sample(rows, len(rows))
        epoch += 1
    return all_rows


def encode(
    example: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> list[tuple[list[int], list[int]]]:
    """Tokenize a line of the data set. Returns (ids, labels) of its text, or of each answer in its
    conversation. A label is the token's own id, or IGNORE_INDEX if the token is not in the loss;
    read_rows() shifts them.

    Each answer follows exactly the prompt that a server renders for the messages before it. Each
    answer is a row of its own that repeats these messages, because a template may change an answer
    that other messages follow: Qwen3's drops its reasoning.
    """
    check_keys(example)
    if "text" in example:
        ids = tokenizer(example["text"] + (tokenizer.eos_token or ""))["input_ids"]
        return [(ids, ids)]
    messages = example["messages"]
    return [encode_answer(messages[:i], messages[i], tokenizer)
            for i in range(1, len(messages)) if messages[i]["role"] == "assistant"]


def encode_answer(
    prompt_messages: list[dict], answer: dict, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[int]]:
    """Return (ids, labels) of a prompt, which is not in the loss, and its answer."""
    prompt = render(prompt_messages, tokenizer, add_generation_prompt=True)
    text = render([*prompt_messages, answer], tokenizer)
    if not text.startswith(prompt):
        raise ValueError(f"the chat template's prompt ends with {prompt[-40:]!r}, but its answer"
                         " begins otherwise: train_fsdp_qlora.py trains such models")
    if text.rstrip().endswith(special_tokens(tokenizer)):
        text = text.rstrip()  # the model stops there: what follows is not learned
    else:
        text += tokenizer.eos_token or ""  # GLM's template leaves the last turn open
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:  # a token would cross from the prompt into the answer
        rest = text.removeprefix(prompt)
        ids = prompt_ids + tokenizer(rest, add_special_tokens=False)["input_ids"]
    return ids, [IGNORE_INDEX] * len(prompt_ids) + ids[len(prompt_ids) :]


@functools.cache
def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    return tuple(t.content for t in tokenizer.added_tokens_decoder.values() if t.special)


def render(messages: list[dict], tokenizer: PreTrainedTokenizerFast, **options: bool) -> str:
    """Return the messages as text by the chat template. Raises ValueError if the text lacks the
    content of a message."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    for message in messages:
        content = message["content"].rpartition("</think>")[2]  # templates may drop reasoning
        if content.strip() not in text:
            raise ValueError(f"the chat template leaves out {content[:40]!r}")
    return text


def check_keys(example: dict[str, Any]) -> None:
    """Raise ValueError for keys and roles that this file does not handle. Most other keys would
    change the training."""
    if not isinstance(example, dict) or set(example) not in ({"text"}, {"messages"}):
        raise ValueError(f"expected text alone or messages alone, not {str(example)[:80]}")
    for message in example.get("messages", []):
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            raise ValueError(f"expected a role and a content of text, not {str(message)[:80]}")
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"expected system, user or assistant, not {message['role']!r}")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError("an answer is empty")


# ------------------------------------------------------------------------------------------------
# Model: built on meta, read and quantized layer by layer, sharded
# ------------------------------------------------------------------------------------------------


def model_directory(args: argparse.Namespace) -> Path:
    """Return the directory of --model, downloaded first if it is a Hub id."""
    directory = Path(args.model)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(args.model, allow_patterns=[
                "*.json", "model*.safetensors", "*.jinja", "*.model"]))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            fail(f"--model {args.model}: no such directory, and not found on the Hub: {reason}")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            fail(f"--model {args.model}: has no {name}; expected safetensors as on the Hub")
    return directory


def build_model(args: argparse.Namespace, directory: Path, device: torch.device) -> PeftModel:
    """Build the model on meta, which needs no memory. The linears of its decoder layers become
    4-bit linears with LoRA."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        fail(f"--model {args.model}: is quantized already; name the original")
    # buffers such as rotary frequencies get their values here, because no file has them
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    choose_attention(model, device)
    layers = model.get_decoder().layers
    check_dense(layers, args.model)
    in_layers = set(layers.modules())
    linears = {name: module for name, module in model.named_modules()
               if module in in_layers and isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta",
            compute_dtype=DTYPE, **NF4_KWARGS))
    model.requires_grad_(False)
    model.name_or_path = args.model  # for adapter_config.json
    model.is_loaded_in_4bit = True  # or PEFT would use its LoRA layer for plain linears
    # target_modules may name fewer linears, but at least one in each layer: see shard_layer()
    lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=list(linears),
                      task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)  # LoRA is on meta, too
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # transformers checkpoints in training mode only


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Use Flash Attention 2 if it can run, else transformers' default: PyTorch's sdpa."""
    if device.type != "cuda":
        reason = "no GPU"
    elif not model._supports_flash_attn:
        reason = "this model has no Flash Attention in transformers"
    elif not is_flash_attn_2_available():
        reason = "flash-attn is not installed; without it, sliding windows are slower"
    else:
        try:
            import flash_attn  # noqa: F401

            model.set_attn_implementation("flash_attention_2")
            reason = "flash-attn is installed"
        except ImportError as error:  # it was built for another version of torch
            reason = f"flash-attn cannot be imported: {error}"
    log(f"attention: {model.config._attn_implementation} ({reason})")


def check_dense(layers: nn.ModuleList, model_name: str) -> None:
    """Refuse mixtures of experts: an expert that got no token has no gradient, so the ranks'
    reduce-scatters would not match. Experts are found by name, or by weights with three dimensions
    that are not convolutions. Delete this if you train dense models only."""
    for name, weight in layers.named_parameters():
        if "expert" in name or (weight.dim() == 3 and "conv" not in name):
            fail(f"--model {model_name}: is a mixture of experts ({name}); use train_fsdp_qlora.py")


def load_and_shard(
    model: PeftModel, args: argparse.Namespace, directory: Path, device: torch.device
) -> None:
    """Read, quantize and shard one decoder layer after the other, so that no GPU ever needs memory
    for all of them. All ranks must call this.

    Each decoder layer is an FSDP unit: a rank stores its shard of the layer, and all ranks gather
    the whole layer for its forward and again for its backward. The rest of the model is one more
    unit, gathered for the whole forward and backward.
    """
    causal_lm = model.get_base_model()
    causal_lm.tie_weights()  # the lm_head may share the embedding's tensor
    handles = open_weights(causal_lm, directory)
    policy = fsdp_policy(args.offload, device)
    torch.manual_seed(0)  # the same initial LoRA on any number of ranks
    unloaded = {module: name for name, module in causal_lm.named_modules()}
    for layer in causal_lm.get_decoder().layers:
        for module in layer.modules():
            load_module(module, unloaded.pop(module), handles, device)
        shard_layer(layer, policy)
    in_decoder = set(causal_lm.get_decoder().modules())
    for module, name in unloaded.items():  # embedding, final norm, lm_head
        load_module(module, name, handles, device)
        if isinstance(module, nn.Linear) and module in in_decoder:
            round_gemma4_projection(module)  # Gemma 4 E2B and E4B only
    causal_lm.tie_weights()
    # the last unit: embedding, final norm, lm_head. All bf16, but true numbers, not packed codes,
    # so the trap that shard_layer() describes does not matter
    fully_shard(model, **policy)
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Let FSDP2 sum the ranks' gradients and not average them: each rank's loss is already divided
    by the tokens of all ranks."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def open_weights(causal_lm: PreTrainedModel, directory: Path) -> dict[str, Any]:
    """Return {bare name: lazy handle} of the stored tensors. handle[...] reads the tensor."""
    handles = {}
    for path in sorted(directory.glob("model*.safetensors")):
        file = safe_open(path, "pt")
        for name in file.keys():
            if bare_name(name) in handles:
                fail(f"{directory}: its files have two tensors {bare_name(name)}")
            handles[bare_name(name)] = file.get_slice(name)
    for name, _ in causal_lm.named_parameters():
        if ".lora_" not in name and bare_name(name) not in handles:
            fail(f"{directory}: no model*.safetensors has {bare_name(name)}")
    return handles


def bare_name(name: str) -> str:
    """Return a tensor's name without PEFT's additions and without prefixes of multimodal models."""
    return re.sub(r"^((model|language_model)\.)+", "", name.replace(".base_layer", ""))


def load_module(
    module: nn.Module, name: str, handles: dict[str, Any], device: torch.device
) -> None:
    """Load a module's own parameters and buffers, not its children's, to `device`."""
    if isinstance(module, LoraLayer):
        init_lora(module, device)
    for key, buffer in list(module.named_buffers(recurse=False)):
        stored = handles.get(bare_name(f"{name}.{key}"))
        value = buffer if stored is None else stored[...]  # most buffers are computed, not stored
        setattr(module, key, value.to(device, buffer.dtype))
    for key, _ in list(module.named_parameters(recurse=False)):
        stored = handles.get(bare_name(f"{name}.{key}"))
        if stored is None:
            continue  # LoRA, or a tied lm_head
        value = stored[...].to(device, DTYPE)
        if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
            # to() quantizes, and leaves the scales in module.quant_state, where forward finds them
            weight = bnb.nn.Params4bit(value, module=module, **NF4_KWARGS).to(device)
        else:
            weight = nn.Parameter(value, requires_grad=False)
        setattr(module, key, weight)


def init_lora(module: LoraLayer, device: torch.device) -> None:
    """Materialize LoRA with PEFT's initial values, in fp32; shard_layer() explains why fp32."""
    for matrices in (module.lora_A, module.lora_B):
        matrices.to_empty(device=device).float()  # both work in place
    module.reset_lora_parameters("default", init_lora_weights=True)


def round_gemma4_projection(linear: nn.Linear) -> None:
    """Round Gemma 4's per_layer_model_projection to NF4 and store it in bf16, as transformers'
    load_in_4bit does. It is the only linear of a decoder that is outside its layers. For other
    models delete this function and its call."""
    codes, state = bnb.functional.quantize_4bit(linear.weight.data, **NF4_KWARGS)
    linear.weight.data = bnb.functional.dequantize_4bit(codes, state)


def fsdp_policy(offload: bool, device: torch.device) -> dict[str, Any]:
    """Return the FSDP policy, as keywords of fully_shard(). load_and_shard() decides which modules
    are units.

    With `offload` the shards wait in host memory. bitsandbytes' scales are not parameters: each GPU
    stores all of them, 1 GiB for a 70B.
    """
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # param_dtype must stay None, or the weights would be damaged: shard_layer() explains how
    return {"offload_policy": offload_policy, "mp_policy": MixedPrecisionPolicy()}


def shard_layer(layer: nn.Module, policy: dict[str, Any]) -> None:
    """Make a decoder layer an FSDP2 unit. All ranks must call this.

    The trap: four NF4 codes are stored as one bf16 number, and 0.08 % of these bit patterns are
    NaNs. torch._foreach_copy_, by which FSDP2 copies a unit that is all bf16, rewrites NaNs on
    CUDA: wrong weights, and no error. A unit of several dtypes is copied as bytes
    (foreach_all_gather() in torch's _fsdp_collectives.py). Therefore:

    - every layer has LoRA, and it is in fp32;
    - no MixedPrecisionPolicy casts it to bf16;
    - the weights are compared with what FSDP2 gathers.
    """
    linears = [module for module in layer.modules() if isinstance(module, bnb.nn.Linear4bit)]
    before = [linear.weight.clone() for linear in linears]
    fully_shard(layer, **policy)
    layer.unshard()
    for linear, weight in zip(linears, before):
        if not torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8)):
            raise RuntimeError("FSDP2 has changed 4-bit weights: every layer must have LoRA in"
                               " fp32, and MixedPrecisionPolicy's param_dtype must be None")
    layer.reshard()


def verify(model: PeftModel) -> None:
    """Check that nothing is left on meta, and that exactly the LoRA weights are trainable."""
    assert not any(p.is_meta for p in model.parameters()), "weights are left on meta"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert len(trained) == 2 * len(adapted) and all(".lora_" in name for name in trained), (
        f"{len(trained)} tensors are trained, for LoRA on {len(adapted)} linears")
    shards = [p.to_local() for p in model.parameters()]
    log(f"model: {sum(p.numel() for p in trained.values()):,} trainable parameters;"
        f" {sum(p.nbytes for p in shards) / 2**30:.2f} GiB of the model per rank, on"
        f" {shards[0].device.type}")


# ------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------


def train(
    model: PeftModel, rows: list[Row], args: argparse.Namespace, device: torch.device
) -> None:
    """Run the training loop. All ranks must call this."""
    # bitsandbytes cannot step DTensors, so it steps this rank's shards: the same memory, or copies
    # on the GPU with --offload. A small matrix may have no rows on this rank, hence numel()
    params = [p for p in model.parameters() if p.requires_grad and p.to_local().numel()]
    local_params = [
        nn.Parameter(p.to_local().detach().to(device, copy=args.offload)) for p in params]
    optimizer = bnb.optim.PagedAdamW8bit(local_params, weight_decay=0.0)
    for step in range(1, args.max_steps + 1):
        started = time.perf_counter()
        batch = rows[(step - 1) * args.batch_size : step * args.batch_size]  # for all ranks
        n_loss_tokens = sum(target != IGNORE_INDEX for _, targets in batch for target in targets)
        loss = torch.zeros((), device=device)
        for micro_batch in micro_batches(batch, args):
            loss += forward_backward(model, micro_batch, n_loss_tokens, device)
        dist.all_reduce(loss)
        copy_gradients(params, local_params, device)
        norm = clip_gradient(local_params, device)
        stop_if_diverged(step, loss, norm)
        lr = learning_rate(step, args.max_steps, peak=args.learning_rate)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        if args.offload:
            copy_back(params, local_params)
        model.zero_grad()
        optimizer.zero_grad()  # else this gradient would use memory during the next step
        n_tokens = sum(len(ids) for ids, _ in batch)
        speed = n_tokens / (time.perf_counter() - started) / dist.get_world_size()
        log_step(step, args.max_steps, loss, lr, norm, speed)


def copy_gradients(
    params: list[nn.Parameter], local_params: list[nn.Parameter], device: torch.device
) -> None:
    """Give the optimizer's parameters the gradients that FSDP2 has summed."""
    for param, local_param in zip(params, local_params):
        local_param.grad = param.grad.to_local().to(device)


def copy_back(params: list[nn.Parameter], local_params: list[nn.Parameter]) -> None:
    """Copy the optimizer's parameters, which it has updated, into the shards in host memory."""
    for param, local_param in zip(params, local_params):
        param.to_local().detach().copy_(local_param.detach())


def micro_batches(batch: list[Row], args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield this rank's rows of a step, as many at once as fit, the longest first.

    Rows of similar length go together, because they are padded to the longest. Row i goes to rank
    i % world_size, so that all ranks yield equally often: each forward is a collective.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = sorted(batch, key=lambda row: len(row[0]))
    while batch:
        longest = len(batch[-1][0])
        n_rows = (args.micro_batch_size * args.max_seq_len // longest) * world_size
        yield batch[-n_rows:][rank::world_size]
        del batch[-n_rows:]


def forward_backward(
    model: PeftModel, rows: list[Row], n_loss_tokens: int, device: torch.device
) -> torch.Tensor:
    """Run forward and backward of some rows; gradients accumulate. Returns the sum of the rows'
    losses, divided by the step's n_loss_tokens.

    Rows are right-padded, without a mask: a causal model's tokens do not see what follows them, and
    the loss ignores the padding. All ranks must call this.
    """

    def pad(sequences: Any, value: int) -> torch.Tensor:  # [rows, tokens]
        tensors = [torch.tensor(sequence) for sequence in sequences]
        return pad_sequence(tensors, batch_first=True, padding_value=value).to(device)

    ids, targets = zip(*rows)
    # autocast for LoRA, which is in fp32; autocast's cache would add a bf16 copy of the adapter
    with torch.autocast(device.type, DTYPE, cache_enabled=False):
        logits = model(input_ids=pad(ids, 0), use_cache=False).logits  # [rows, tokens, vocabulary]
    loss = cross_entropy(logits.flatten(0, 1), pad(targets, IGNORE_INDEX).flatten()) / n_loss_tokens
    loss.backward()
    return loss.detach()


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Sum the cross-entropy of logits [tokens, vocabulary], LOSS_CHUNK tokens at a time.
    checkpoint() recomputes each chunk in backward, so that only one chunk is ever in fp32."""

    def chunk_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")

    chunks = zip(logits.split(LOSS_CHUNK), targets.split(LOSS_CHUNK))
    losses = [checkpoint(chunk_loss, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum()


def clip_gradient(local_params: list[nn.Parameter], device: torch.device) -> torch.Tensor:
    """Scale the gradient down to MAX_GRAD_NORM. Returns its norm before clipping, over all ranks.
    All ranks must call this."""
    norm = nn.utils.get_total_norm([p.grad for p in local_params]).to(device).square()
    dist.all_reduce(norm)
    norm.sqrt_()
    nn.utils.clip_grads_with_norm_(local_params, MAX_GRAD_NORM, norm)
    return norm


def stop_if_diverged(step: int, loss: torch.Tensor, norm: torch.Tensor) -> None:
    """Fail if loss or gradient is not finite, or the gradient is 0. Both are sums over all ranks,
    so all ranks fail together."""
    if not torch.isfinite(loss + norm):
        fail(f"step {step}: loss {loss}, gradient norm {norm}: use a lower --learning_rate")
    if norm == 0 and step == 1:
        fail("step 1: the gradient is 0, so nothing is learned: are the model's weights right?")
    if norm == 0:
        fail(f"step {step}: the gradient is 0, so nothing is learned: the run has diverged, use a"
             " lower --learning_rate")


def learning_rate(step: int, max_steps: int, peak: float) -> float:
    """Return the learning rate of step 1..max_steps: linear warm-up, then cosine decay."""
    n_warmup = max(1, round(WARMUP_FRACTION * max_steps))
    progress = max(0, step - n_warmup) / (max_steps + 1 - n_warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * min(1, step / n_warmup) * cosine


def log_step(
    step: int, max_steps: int, loss: torch.Tensor, lr: float, norm: torch.Tensor, speed: float
) -> None:
    """Print a step's metrics. `speed`: tokens per second per rank."""
    unit, memory = "process", ""
    if loss.is_cuda:
        unit, memory = "GPU", f" | {torch.cuda.max_memory_allocated() / 2**30:5.2f} GiB"
    log(f"step {step:{len(str(max_steps))}}/{max_steps} | loss {loss:7.4f} | lr {lr:.1e} |"
        f" grad_norm {norm:6.3f} | {speed:6,.0f} tok/s/{unit}{memory}")


# ------------------------------------------------------------------------------------------------
# Save the adapter
# ------------------------------------------------------------------------------------------------


def save_adapter(
    model: PeftModel, args: argparse.Namespace, directory: Path, device: torch.device
) -> None:
    """Gather the adapter; rank 0 writes it in PEFT's format, with the model's tokenizer. All ranks
    must call this."""
    state_dict = {name: p.detach().to(device).full_tensor().cpu()
                  for name, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        model.save_pretrained(
            args.output_dir, state_dict=state_dict, save_embedding_layers=False)
        for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
            for path in directory.glob(pattern):
                shutil.copy(path, args.output_dir)
    log(f"adapter saved; to merge it: python merge_adapters.py --adapter_dir {args.output_dir}"
        f" --base_model {args.model} --output_dir {args.output_dir}/merged")


if __name__ == "__main__":
    # transformers is about to rename gradient checkpointing, which PEFT uses, too
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    main()
    os._exit(0)  # not the usual exit, in which a thread of gloo (CPUs only) sometimes aborts
