#!/usr/bin/env python3
"""Fine-tune a language model by QLoRA on several GPUs: initialize NCCL, load the model in NF4 with
bf16 quant_storage and Flash Attention 2, shard it by a hand-written FSDP policy, and train LoRA in
a PagedAdamW8bit loop. The whole job, in one file to copy.

    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model meta-llama/Llama-3.1-8B-Instruct \
        --dataset rows.jsonl --output_dir adapter

A 70B trains on two 24 GB GPUs with --offload, which needs 64 GB of CPU RAM. Each line of the data
set is {"messages": [...]}, of which the assistant's answers are in the loss, or {"text": ...}, all
of which is. Plain python runs the file as one process, without GPUs on the CPU, to try it.

The model is transformers', its 4-bit linears are bitsandbytes', the adapter is PEFT's, and FSDP2
shards all of them. What is missing here, and what does it in train_fsdp_qlora.py:

    tools, preference pairs, other data               --dataset, --loss
    evaluation, checkpoints, resuming                 evaluate(), save_checkpoint()
    mixtures of experts, models already in 4 bits     load_model()
    a memory plan, twice the speed                    choose_plan(), Model

Tested with torch 2.11 and 2.13, transformers 5.17 to 5.24, peft 0.21, bitsandbytes 0.50.
"""

import argparse
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
    CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard)
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available

DTYPE = torch.bfloat16  # of weights outside of NF4, activations and matmuls
# FSDP2 shards only floating-point tensors, so four 4-bit weights are stored as one bf16 number
NF4_KWARGS = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
IGNORED = -100  # label of a token that is not in the loss
LOSS_CHUNK = 1024  # tokens whose logits are in fp32 at once: 0.5 GiB with a vocabulary of 128k
Row = tuple[list[int], list[int]]  # token ids, and labels: the same ids, or IGNORED


def main() -> None:
    args = parse_args()
    device = join_processes()
    check_args(args)
    directory = model_directory(args)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    rows = read_rows(args, tokenizer)
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
        "--batch_size", type=int, default=16, help="rows per optimizer step, over all GPUs")
    parser.add_argument(
        "--micro_batch_size", type=int, default=4, help="rows of --max_seq_len tokens that a GPU"
        " computes at once; of shorter rows it takes as many as have no more tokens")
    parser.add_argument(
        "--max_seq_len", type=int, default=2048, help="tokens; longer rows are cut")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="peak")
    parser.add_argument("--lora_rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--lora_alpha", type=int, default=32, help="scales it, by alpha / rank")
    parser.add_argument(
        "--offload", action="store_true", help="keep the model in CPU RAM, and on the GPU only the"
        " layer that computes: a 70B on 24 GB GPUs")
    return parser.parse_args()


def join_processes() -> torch.device:
    """Join torchrun's processes, or be the only one. Returns this rank's device."""
    single_process = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    rendezvous = {} if "RANK" in os.environ else single_process
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **rendezvous)
        return torch.device("cpu")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # fewer gaps
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **rendezvous)
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
    """End with one line instead of a traceback. All ranks must call this."""
    log(f"error: {message}")
    dist.barrier()  # torchrun kills all ranks when the first one exits: let rank 0 print
    raise SystemExit(1)


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def read_rows(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Returns the rows of all steps in order. Each epoch is shuffled by its number as the seed."""
    if not Path(args.dataset).is_file():
        fail(f"--dataset {args.dataset}: no such file")
    found: list[Row] = []
    for number, line in enumerate(Path(args.dataset).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found += encode(json.loads(line), tokenizer)
        except Exception as error:  # json's, ours, or any that a chat template raises
            fail(f"--dataset {args.dataset}, line {number}: {type(error).__name__}: {error}")
    rows = []
    for ids, labels in found:
        row = ids[: args.max_seq_len], labels[: args.max_seq_len]
        if any(label != IGNORED for label in row[1][1:]):  # no token predicts the first one
            rows.append(row)
    if not rows:
        fail(f"--dataset {args.dataset}: {len(found)} texts and answers, but no token to train on")
    n_cut = sum(len(ids) > args.max_seq_len for ids, _ in found)
    n_epochs = args.max_steps * args.batch_size / len(rows)
    log(f"data: {len(rows):,} of {len(found):,} texts and answers, {n_cut:,} of them cut;"
        f" {n_epochs:.2f} epochs")
    order = []
    for epoch in range(math.ceil(n_epochs)):
        order += random.Random(epoch).sample(rows, len(rows))
    return order


def encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Returns one row for a text, and one for each answer of a conversation.

    An answer stands behind the prompt that a server will make of the messages before it. Answers
    do not share a row, because a template may change one when others follow: Qwen3's drops its
    reasoning.
    """
    check_row(row)
    if "text" in row:
        ids = tokenizer(row["text"] + (tokenizer.eos_token or ""))["input_ids"]
        return [(ids, ids)]
    messages, rows = row["messages"], []
    for i in range(1, len(messages)):
        if messages[i]["role"] == "assistant":
            rows.append(encode_answer(messages[:i], messages[i], tokenizer))
    return rows


def encode_answer(asked: list[dict], answer: dict, tokenizer: PreTrainedTokenizerFast) -> Row:
    """Returns the prompt of the messages in `asked`, not in the loss, and the answer to it."""
    prompt = render(asked, tokenizer, add_generation_prompt=True)
    text = render([*asked, answer], tokenizer)
    if not text.startswith(prompt):
        raise ValueError(f"the chat template's prompt ends with {prompt[-40:]!r}, but its answer"
                         " begins otherwise: train_fsdp_qlora.py knows ways")
    end_of_turn = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    if not text.rstrip().endswith((tokenizer.eos_token, *end_of_turn)):
        text = text.rstrip() + tokenizer.eos_token  # GLM's template leaves the last turn open
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:  # a token crosses from the prompt into the answer
        rest = tokenizer(text.removeprefix(prompt), add_special_tokens=False)["input_ids"]
        ids = prompt_ids + rest
    return ids, [IGNORED] * len(prompt_ids) + ids[len(prompt_ids) :]


def render(messages: list[dict], tokenizer: PreTrainedTokenizerFast, **options: bool) -> str:
    """Returns the chat template's text of the messages, if it contains all of their content."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    for message in messages:
        content = message["content"].rpartition("</think>")[2]  # templates may drop reasoning
        if content.strip() not in text:
            raise ValueError(f"the chat template leaves out {content[:40]!r}")
    return text


def check_row(row: dict[str, Any]) -> None:
    """Raise ValueError for keys and values that are not handled here: most mean something."""
    elsewhere = "train_fsdp_qlora.py reads other forms"
    if not isinstance(row, dict) or set(row) not in ({"text"}, {"messages"}):
        raise ValueError(f"expected only text or only messages, not {', '.join(row)}: {elsewhere}")
    for message in row.get("messages", []):
        if set(message) != {"role", "content"} or not isinstance(message["content"], str):
            raise ValueError("expected messages with a role and a content that is text, not"
                             f" {', '.join(message)}: {elsewhere}")
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"expected system, user or assistant, not {message['role']!r}")
        if message["role"] == "assistant" and not message["content"].strip():
            raise ValueError("an answer is empty")


# ------------------------------------------------------------------------------------------------
# Model
# ------------------------------------------------------------------------------------------------


def model_directory(args: argparse.Namespace) -> Path:
    """Returns the directory of --model, after a download if that is a Hub id."""
    directory = Path(args.model)
    if not directory.is_dir():
        try:
            directory = Path(snapshot_download(args.model, allow_patterns=[
                "*.json", "model*.safetensors", "*.jinja", "*.model"]))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            fail(f"--model {args.model}: no such directory, and no model of the Hub: {reason}")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            fail(f"--model {args.model}: has no {name}; expected safetensors as on the Hub")
    return directory


def build_model(args: argparse.Namespace, directory: Path, device: torch.device) -> PeftModel:
    """Returns the model without memory, on meta: its layers' linears in 4 bits, with LoRA."""
    config = AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        fail(f"--model {args.model}: is quantized already; name the original")
    # buffers are real: rotary frequencies are computed here, no file has them
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    choose_attention(model, device)
    layers = model.get_decoder().layers
    check_dense(layers, args)
    names = {module: name for name, module in model.named_modules()}
    linears = [module for module in layers.modules() if isinstance(module, nn.Linear)]
    targets = [names[linear] for linear in linears]
    for name, linear in zip(targets, linears):
        model.set_submodule(name, bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta",
            compute_dtype=DTYPE, **NF4_KWARGS))
    model.requires_grad_(False)
    model.name_or_path = args.model  # for adapter_config.json
    model.is_loaded_in_4bit = True  # or PEFT would take its LoRA for unquantized linears
    lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=targets,
                      task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)  # LoRA is on meta, too
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()  # transformers checkpoints in training mode only


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Take Flash Attention 2 if it can run, else what transformers takes: PyTorch's sdpa."""
    if device.type != "cuda":
        reason = "no GPU"
    elif not model._supports_flash_attn:
        reason = "transformers has no other for this model"
    elif not is_flash_attn_2_available():
        reason = ("flash-attn is not installed: full attention is as fast without it, sliding"
                  " windows are slower")
    else:
        model.set_attn_implementation("flash_attention_2")
        reason = "flash-attn is installed"
    log(f"attention: {model.config._attn_implementation} ({reason})")


def check_dense(layers: nn.ModuleList, args: argparse.Namespace) -> None:
    """Refuse mixtures of experts: FSDP2 waits for the gradients of experts that got no token.
    Experts are named so, or their weights are stacked in three dimensions, as only convolutions'
    are besides."""
    for name, weight in layers.named_parameters():
        if "expert" in name or (weight.dim() == 3 and "conv" not in name):
            fail(f"--model {args.model}: is a mixture of experts ({name}); use train_fsdp_qlora.py")


def load_and_shard(
    model: PeftModel, args: argparse.Namespace, directory: Path, device: torch.device
) -> None:
    """Read, quantize and shard layer by layer, so that a GPU holds one whole layer at most.
    All ranks must call this."""
    causal_lm = model.get_base_model()
    causal_lm.tie_weights()  # a tied lm_head is no tensor of its own
    handles = open_weights(causal_lm, directory)
    policy = fsdp_policy(args, device)
    torch.manual_seed(0)  # the same LoRA on all ranks
    names = {module: name for name, module in causal_lm.named_modules()}
    for layer in causal_lm.get_decoder().layers:
        for module in layer.modules():
            load_module(module, names.pop(module), handles, device)
        shard_layer(layer, policy)
    for module, name in names.items():
        load_module(module, name, handles, device)
        if isinstance(module, nn.Linear) and module is not causal_lm.get_output_embeddings():
            round_to_nf4(module)
    causal_lm.tie_weights()
    fully_shard(model, **policy)  # the rest, mostly embedding and lm_head, is one more unit


def open_weights(causal_lm: PreTrainedModel, directory: Path) -> dict[str, Any]:
    """Returns {bare name: lazy handle} of the stored tensors. handle[...] reads the tensor."""
    handles = {}
    for path in sorted(directory.glob("model*.safetensors")):
        file = safe_open(path, "pt")
        for name in file.keys():
            if bare_name(name) in handles:
                fail(f"{directory}: two tensors of its files are {bare_name(name)}")
            handles[bare_name(name)] = file.get_slice(name)
    for name, _ in causal_lm.named_parameters():
        if ".lora_" not in name and bare_name(name) not in handles:
            fail(f"{directory}: no model*.safetensors has {bare_name(name)}")
    return handles


def bare_name(name: str) -> str:
    """A tensor's name without what PEFT puts in and without prefixes of multimodal models."""
    return re.sub(r"^((model|language_model)\.)+", "", name.replace(".base_layer", ""))


def load_module(
    module: nn.Module, name: str, handles: dict[str, Any], device: torch.device
) -> None:
    """Give a module's own parameters and buffers, not its children's, their values on `device`."""
    if isinstance(module, LoraLayer):
        init_lora(module, device)
    for key, buffer in list(module.named_buffers(recurse=False)):
        stored = handles.get(bare_name(f"{name}.{key}"))
        value = buffer if stored is None else stored[...]  # most are computed, not stored
        setattr(module, key, value.to(device, buffer.dtype))
    for key, _ in list(module.named_parameters(recurse=False)):
        stored = handles.get(bare_name(f"{name}.{key}"))
        if stored is None:
            continue  # LoRA, or a tied lm_head
        value = stored[...].to(device, DTYPE)
        if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
            weight = bnb.nn.Params4bit(value, module=module, **NF4_KWARGS).to(device)  # quantizes
        else:
            weight = nn.Parameter(value, requires_grad=False)
        setattr(module, key, weight)


def init_lora(module: LoraLayer, device: torch.device) -> None:
    """PEFT's initial values, in fp32: shard_layer() says why."""
    for matrices in (module.lora_A, module.lora_B):
        matrices.to_empty(device=device).float()  # both work in place
    module.reset_lora_parameters("default", init_lora_weights=True)


def round_to_nf4(linear: nn.Linear) -> None:
    """Round a linear outside of the layers as transformers' load_in_4bit does. Gemma 4 has one."""
    codes, state = bnb.functional.quantize_4bit(
        linear.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4")
    linear.weight.data = bnb.functional.dequantize_4bit(codes, state)


def fsdp_policy(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Returns the FSDP policy of every unit, as keywords of fully_shard().

    A unit is a decoder layer: each rank keeps its share of it, and all ranks gather the layer for
    its forward and again for its backward. With --offload the shares wait in pinned CPU RAM.
    """
    if args.offload:
        offload_policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    else:
        offload_policy = OffloadPolicy()
    # an empty MixedPrecisionPolicy casts nothing: shard_layer() says why it must stay so
    return {"reshard_after_forward": True, "mp_policy": MixedPrecisionPolicy(),
            "offload_policy": offload_policy}


def shard_layer(layer: nn.Module, policy: dict[str, Any]) -> None:
    """Make a layer an FSDP2 unit. All ranks must call this.

    FSDP2's trap: about 0.08 % of the packed 4-bit words are NaN patterns when read as bf16. If all
    tensors of a unit have one dtype, FSDP2 copies them by torch._foreach_copy_, which rewrites NaNs
    on CUDA: wrong weights, no error. A unit of several dtypes is copied as raw bytes
    (_get_all_gather_input_metadatas() in torch's _fsdp_collectives.py). So LoRA stays in fp32, no
    MixedPrecisionPolicy casts it to bf16, and we compare what is gathered with what was there.
    """
    linears = [module for module in layer.modules() if isinstance(module, bnb.nn.Linear4bit)]
    before = [linear.weight.clone() for linear in linears]
    fully_shard(layer, **policy)
    layer.set_force_sum_reduction_for_comms(True)  # sum gradients over ranks, do not average them:
    layer.set_gradient_divide_factor(1.0)  # the loss is divided by the labels of all ranks
    layer.unshard()
    for linear, weight in zip(linears, before):
        if not torch.equal(linear.weight.view(torch.uint8), weight.view(torch.uint8)):
            raise RuntimeError("FSDP2 has changed 4-bit weights: is LoRA in fp32? Is it cast?")
    layer.reshard()


def verify(model: PeftModel) -> None:
    """Check that nothing is left on meta, and that LoRA is trained and nothing else."""
    assert not any(p.is_meta for p in model.parameters()), "weights are left on meta"
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    linears = [module for module in model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert len(trained) == 2 * len(linears) and all(".lora_" in name for name in trained), (
        f"{len(trained)} tensors are trained, for {len(linears)} linears")
    shares = [p.to_local() for p in model.parameters()]
    log(f"model: {sum(p.numel() for p in trained.values()):,} trainable parameters; each rank holds"
        f" {sum(p.nbytes for p in shares) / 2**30:.2f} GiB of the model on {shares[0].device.type}")


# ------------------------------------------------------------------------------------------------
# Training
# ------------------------------------------------------------------------------------------------


def train(
    model: PeftModel, rows: list[Row], args: argparse.Namespace, device: torch.device
) -> None:
    """The loop. All ranks must call this."""
    # bitsandbytes cannot step DTensors, so it gets this rank's shares on the GPU: views of the
    # same memory, or with --offload copies. A rank may have no share of a small matrix.
    trained = [p for p in model.parameters() if p.requires_grad and p.to_local().numel()]
    kept = [p.to_local().detach() for p in trained]
    shares = [nn.Parameter(share.to(device)) for share in kept]
    optimizer = bnb.optim.PagedAdamW8bit(shares, weight_decay=0.0)
    for step in range(1, args.max_steps + 1):
        started = time.perf_counter()
        batch = rows[(step - 1) * args.batch_size : step * args.batch_size]  # of all ranks
        n_labels = sum(label != IGNORED for _, labels in batch for label in labels[1:])
        loss = torch.zeros((), device=device)
        for micro_batch in micro_batches(batch, args):
            loss += forward_backward(model, micro_batch, n_labels, device)
        dist.all_reduce(loss)
        for parameter, share in zip(trained, shares):
            share.grad = parameter.grad.to_local().to(device)
        norm = clip_gradient(shares, 1.0, device)
        if not torch.isfinite(loss + norm):
            fail(f"step {step}: loss {loss}, gradient norm {norm}: use a lower --learning_rate")
        if norm == 0:
            fail(f"step {step}: the gradient is 0, so nothing is learned: "
                 + ("are the model's weights right?" if step == 1 else
                    "the run has diverged, use a lower --learning_rate"))
        rate = optimizer.param_groups[0]["lr"] = learning_rate(step, args)
        optimizer.step()
        for old, new in zip(kept, shares):
            old.copy_(new)  # with --offload: back to CPU RAM
        model.zero_grad()
        n_tokens = sum(len(ids) for ids, _ in batch) / dist.get_world_size()
        unit = "GPU" if device.type == "cuda" else "process"
        log(f"step {step:5}/{args.max_steps} loss {loss:7.4f} lr {rate:.1e} grad {norm:6.3f}"
            f" {n_tokens / (time.perf_counter() - started):7,.0f} tok/s/{unit}"
            f" {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")


def micro_batches(batch: list[Row], args: argparse.Namespace) -> Iterator[list[Row]]:
    """Yield this rank's rows of a step, as many at once as fit, the longest first.

    Rows of similar length go together, because all are padded to the longest. Ranks take turns,
    so that all have as many micro-batches: each forward and backward is a collective.
    """
    batch = sorted(batch, key=lambda row: len(row[0]))
    while batch:
        longest = len(batch[-1][0])
        n_rows = args.micro_batch_size * args.max_seq_len // longest * dist.get_world_size()
        yield batch[-n_rows:][dist.get_rank() :: dist.get_world_size()]
        del batch[-n_rows:]


def forward_backward(
    model: PeftModel, rows: list[Row], n_labels: int, device: torch.device
) -> torch.Tensor:
    """Add the gradient of some rows. Returns their share of the step's mean loss.

    Rows are padded behind their end. A causal model's earlier tokens do not see the padding, so
    there is no mask for it, and the loss ignores it. All ranks must call this.
    """
    ids, labels = (
        pad_sequence([torch.tensor(x) for x in column], batch_first=True, padding_value=padding)
        .to(device) for column, padding in zip(zip(*rows), (0, IGNORED)))
    # autocast, because LoRA is in fp32; its cache would keep a bf16 copy of the whole adapter
    with torch.autocast(device.type, DTYPE, cache_enabled=False):
        logits = model(input_ids=ids, use_cache=False).logits  # [rows, tokens, vocabulary]
    next_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # of the token that each predicts
    loss = sum_cross_entropy(logits.flatten(0, 1), next_labels.flatten()) / n_labels
    loss.backward()
    return loss.detach()


def sum_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in fp32 of logits [tokens, vocabulary], summed. checkpoint() computes each chunk
    of tokens again in backward, so that the whole logits are never in fp32."""

    def of_chunk(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")

    chunks = zip(logits.split(LOSS_CHUNK), labels.split(LOSS_CHUNK))
    losses = [checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return torch.stack(losses).sum()


def clip_gradient(
    shares: list[nn.Parameter], max_norm: float, device: torch.device
) -> torch.Tensor:
    """Scale the gradient down to max_norm. Returns its norm before that, over all ranks. All ranks
    must call this."""
    norm = nn.utils.get_total_norm([share.grad for share in shares]).to(device)
    square = norm.square()
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(shares, max_norm, norm)
    return norm


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """The rate of step 1..max_steps: up to its peak in 3 % of them, then down as a cosine."""
    warmup = max(1, round(0.03 * args.max_steps))
    done = max(0, step - warmup) / (args.max_steps + 1 - warmup)
    return args.learning_rate * min(1, step / warmup) * 0.5 * (1 + math.cos(math.pi * done))


def save_adapter(
    model: PeftModel, args: argparse.Namespace, directory: Path, device: torch.device
) -> None:
    """Gather the adapter; rank 0 writes it in PEFT's format, with the tokenizer of the model.
    All ranks must call this."""
    whole = {name: p.detach().to(device).full_tensor().cpu()
             for name, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() == 0:
        model.save_pretrained(args.output_dir, state_dict=whole, save_embedding_layers=False)
        for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
            for path in directory.glob(pattern):
                shutil.copy(path, args.output_dir)
    log(f"adapter saved; to merge it: python merge_adapters.py --adapter_dir {args.output_dir}"
        f" --base_model {args.model} --output_dir {args.output_dir}/merged")


if __name__ == "__main__":
    # PEFT reads a property that transformers has deprecated
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    main()
