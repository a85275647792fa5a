#!/usr/bin/env python3
"""Fine-tune a language model by QLoRA on several GPUs: the whole job, in one file to copy and edit.

It initializes NCCL, loads the model in NF4 with bf16 quant_storage, uses Flash Attention 2 if it is
installed and the model allows it, shards the model by a hand-written FSDP2 policy, and trains LoRA
in a PagedAdamW8bit loop. The model comes from transformers, the 4-bit linears from bitsandbytes,
the adapter from PEFT.

    pip install "torch>=2.11,<2.14" "transformers>=5.20,<6" "peft>=0.21,<0.22" \
        "bitsandbytes>=0.50,<0.51" accelerate
    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model Qwen/Qwen3-8B \
        --dataset data.jsonl --output_dir adapter
    # a 70B on two 24 GB GPUs: 14 GiB on each (measured on H200s limited to 22.5 GiB), and about
    # 64 GB of host memory in all (estimated)
    torchrun --nproc_per_node=2 minimal_fsdp_qlora.py --model meta-llama/Llama-3.3-70B-Instruct \
        --dataset data.jsonl --output_dir adapter --offload --micro_batch_size 2

It trains the dense models of transformers (Llama, Qwen3, Gemma 3, ...) on text, if their decoder
has `layers` and their files name each tensor as the model does. It refuses, in one line:

    MoE models, Gemma 3n, Gemma 4 E2B and E4B, RecurrentGemma, Falcon-H1, Mamba, Nemotron-H, Zamba
    models without `layers` (GPT-2, Falcon, BLOOM), or whose attention is not causal
    models whose tensors transformers renames while it loads them (the lm_head of Pythia)
    models whose files are quantized, or do not fit their config.json
    Bamba and Granite 4.0, if mamba-ssm is installed

A line of the data set is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant",
"content": "..."}]}, where only the assistant's answers are in the loss, or {"text": "..."}, where
all tokens but the first are in the loss. Without torchrun the file runs as one process on one GPU:
24 GB are enough for a 70B with --offload --micro_batch_size 2. Without a GPU it runs on the CPU.

    to change                                     edit (*: see Recipes, at the end of this file)
    flags                                         parse_args(), check_args()
    which linears have LoRA, dropout *            build_model()
    a model class of your own *                   build_model()
    attention, activation checkpointing           choose_attention(), build_model()
    quantization *                                NF4_KWARGS; use the adapter with the same values
    FSDP units, what is gathered when             shard_layer(), load_and_shard()
    offloading, HSDP *                            fsdp_policy(); for HSDP also clip_gradient()
    micro-batches                                 micro_batches()
    the loss, and what it is divided by *         rows_loss(), cross_entropy(); count_loss_tokens()
    weight of an answer or a token *              check_example(), encode(), encode_answer(), Row,
                                                  make_row(), count_loss_tokens(), rows_loss()
    optimizer, schedule                           train(), lr_factor()
    initial adapter *                             init_lora()
    evaluation, generated text *                  evaluate(), and where train() calls it
    metrics to wandb * or a file                  log_step(), log_eval()
    what is saved                                 save_adapter()
    columns of the data set                       encode()
    rows of your own reader or DataLoader         read_rows(), rows_of_all_steps(), train()
    options of the chat template                  render()
    a data set of the Hub                         nothing: save it as JSONL with Dataset.to_json

Recipes also has how to use the adapter, and how to merge it.

On several machines run torchrun with --nnodes, --rdzv_backend c10d and --rdzv_endpoint on each of
them, with the model and the data there. The machine of rank 0 gets the adapter.

This file needs no other. It comes from the repository FSDP QLoRA, which also has merge_adapters.py,
to merge an adapter into a large model, and train_fsdp_qlora.py, which is faster, resumes, plans
memory, and trains MoE models, preference pairs and tool calls.

It needs Linux, Python 3.10 or newer, and NVIDIA GPUs (Ampere or newer), or a CPU. Tested with torch
2.11 and 2.13, transformers 5.20 to 5.24, peft 0.21, bitsandbytes 0.50.

Copyright (c) 2026 the FSDP QLoRA authors.
SPDX-License-Identifier: MIT
"""

import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import sys
import time
import warnings
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# less fragmentation of GPU memory. `import torch` reads this
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from jinja2 import TemplateError
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard)
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast)
from transformers.utils import is_flash_attn_2_available

# hide a harmless warning: PEFT and build_model() use names that transformers 6 will drop; their new
# names do not exist yet in transformers 5.20
warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)

# dtype of the model's unquantized weights, of activations and of matmuls; LoRA's weights are fp32
DTYPE = torch.bfloat16
# NF4 stores a code of 4 bits for each weight, and a scale for each 64 weights; compress_statistics
# quantizes the scales, too (double quantization). FSDP2 before torch 2.13 cannot shard integers, so
# four codes are stored as one bf16 number. shard_layer() explains how such numbers can be damaged
NF4_KWARGS = {"quant_type": "nf4", "compress_statistics": True, "quant_storage": torch.bfloat16}
SEED = 0  # for the order of the rows and the initial LoRA
MAX_GRAD_NORM = 1.0  # math.inf: no clipping
WARMUP_FRACTION = 0.03  # fraction of all steps
# tokens whose loss is computed at once, in fp32: 0.5 GiB for each copy of their logits, if the
# vocabulary has 128k tokens
LOSS_CHUNK = 1024
IGNORE_INDEX = -100  # label of a token that is not in the loss
# keys in the data set that other trainers or chat templates act on, and this file does not: a line
# that has a value for any of them is refused
UNHANDLED_WITH_TEXT = ("weight", "image", "images", "video", "videos", "audio", "audios")
UNHANDLED_WITH_MESSAGES = (
    *UNHANDLED_WITH_TEXT, "system", "system_prompt", "tools", "functions", "documents",
    "chat_template_kwargs", "enable_thinking", "completion", "chosen", "rejected", "label",
    "kto_tag", "train")


class Row(NamedTuple):
    """The tokens of a text, or of an answer and all messages before it.

    read_rows() truncates every field at --max_seq_len, so a field that you add must have one value
    per token, too.
    """

    ids: Tensor  # [tokens]
    labels: Tensor  # [tokens]: labels[i] is ids[i], or IGNORE_INDEX


def main() -> None:
    """Run the job. Every rank (process) runs the same calls in the same order, because some are
    collectives, which are matched by their order. A call on one rank alone, as in
    `if dist.get_rank() == 0: evaluate(...)`, would wait for the other ranks, or mix its numbers
    with those of their next calls."""
    args = parse_args()
    device = init_distributed()
    check_args(args)
    model_dir = find_model(args)
    # not AutoTokenizer: for some models it rebuilds the tokenizer by the rules of the class that
    # tokenizer_config.json names, which can lose spaces. This class takes tokenizer.json as it is
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_dir)
    model = build_model(args, model_dir, device)  # before the data, because it may refuse the model
    n_needed = args.max_steps * args.batch_size if args.max_steps else math.inf
    train_rows = rows_of_all_steps(read_rows(args.dataset, args, tokenizer, n_needed), args)
    eval_rows = read_rows(args.eval_dataset, args, tokenizer) if args.eval_dataset else []
    check_same_on_all_ranks([*train_rows, *eval_rows], args)
    load_and_shard(model, args, model_dir, device)
    check_loaded(model)
    copy_tokenizer(model_dir, args.output_dir)
    train(model, train_rows, eval_rows, args, device)
    dist.destroy_process_group()


# ---- Flags, processes, the model's files --------------------------------------------------------


def parse_args() -> Namespace:
    parser = ArgumentParser(
        description="Fine-tune a language model by QLoRA on several GPUs.", allow_abbrev=False,
        formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True, help="Hub id, or directory of safetensors")
    parser.add_argument("--dataset", required=True, help="JSONL file with messages or text")
    parser.add_argument("--output_dir", required=True, help="where the adapter goes")
    parser.add_argument("--eval_dataset", help="JSONL file like --dataset; its loss is computed"
                        " before the first step and after each save")
    parser.add_argument("--num_epochs", type=float, default=1.0,
                        help="passes over the data, rounded to whole optimizer steps, at least one")
    parser.add_argument("--max_steps", type=int, help="optimizer steps, in place of --num_epochs")
    parser.add_argument("--batch_size", type=int, default=16,
                        help="rows (texts, or answers) per optimizer step, of all GPUs together")
    parser.add_argument("--micro_batch_size", type=int, default=4,
                        help="rows of max_seq_len tokens that a GPU computes at once: lower it if"
                        " memory runs out; of shorter rows, more are computed at once")
    parser.add_argument("--max_seq_len", type=int, default=2048,
                        help="tokens per row; the rest of a longer row is dropped")
    parser.add_argument("--save_every", type=int, default=100,
                        help="optimizer steps between saves; each overwrites the last")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--lora_rank", type=int, default=16, help="rank of the adapter")
    parser.add_argument("--lora_alpha", type=int, default=32,
                        help="the adapter is scaled by lora_alpha / lora_rank")
    parser.add_argument("--offload", action="store_true",
                        help="keep the model in host memory, except two layers at a time, the"
                        " embedding, the lm_head and the scales of NF4")
    return parser.parse_args()


def init_distributed() -> torch.device:
    """Join the processes that torchrun started; without torchrun, be the only process. Returns this
    rank's device."""
    alone: dict[str, Any] = {}
    if "RANK" not in os.environ:  # torchrun sets RANK and the rest
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", **alone)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device, **alone)
    return device


def check_args(args: Namespace) -> None:
    for name in ("num_epochs", "max_steps", "batch_size", "micro_batch_size", "max_seq_len",
                 "save_every", "learning_rate", "lora_rank", "lora_alpha"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            fail(f"--{name} {value}: must be above 0 and finite")
    for path in (args.dataset, args.eval_dataset):
        if path and not Path(path).is_file():
            fail(f"{path}: no such file")  # now, not after a download
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)  # fail now, not after training
    except OSError as error:
        fail(f"--output_dir {args.output_dir}: {error.strerror}")
    if Path(args.output_dir).resolve() == Path(args.model).resolve():
        fail(f"--output_dir {args.output_dir}: is the model's directory")
    if Path(args.output_dir, "adapter_model.safetensors").exists():
        fail(f"--output_dir {args.output_dir}: already has an adapter")


def log(message: str) -> None:
    if dist.get_rank() == 0:
        print(message, flush=True)


def fail(message: str) -> NoReturn:
    """Print one line and exit, for mistakes in arguments, data and model, and for a run that has
    diverged; torchrun adds a report of its own. Where the code can tell that an edit of this file
    is the mistake, it raises RuntimeError instead, for the traceback."""
    if dist.get_rank() != 0:
        time.sleep(15)  # usually all ranks fail: rank 0 prints, exits, and torchrun ends the others
    print(f"error: {message}", flush=True)
    raise SystemExit(1)


def find_model(args: Namespace) -> Path:
    """Return the directory of --model, downloaded first if it is a Hub id."""
    model_dir = Path(args.model)
    if not model_dir.is_dir():
        try:
            model_dir = Path(snapshot_download(args.model, allow_patterns=[
                "*.json", "model*.safetensors", "*.jinja", "*.model"]))
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())  # in one line
            fail(f"--model {args.model}: no such directory, and the download failed: {reason}")
    for name in ("config.json", "tokenizer.json"):
        if not (model_dir / name).is_file():
            fail(f"--model {args.model}: has no {name}; expected a model as on the Hub:"
                 " config.json, tokenizer.json and safetensors")
    return model_dir


# ---- Model: built on meta, read and quantized layer by layer, sharded ---------------------------


def build_model(args: Namespace, model_dir: Path, device: torch.device) -> PeftModel:
    """Build the model on meta, which needs almost no memory. The linears of its decoder layers
    become 4-bit linears with LoRA. The embedding, the norms and the lm_head stay in bf16."""
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        check_config(config, args)
        # buffers such as rotary frequencies get their values here, because no file has them
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    except ValueError as error:  # no causal LM, or a model type or config.json that it rejects
        fail(f"--model {args.model}: {str(error).splitlines()[0]}")
    choose_attention(model, device)
    check_decoder(model.get_decoder(), args.model)
    in_layers = set(model.get_decoder().layers.modules())
    linears = {name: module for name, module in model.named_modules()
               if module in in_layers and isinstance(module, nn.Linear)}
    for name, linear in linears.items():
        model.set_submodule(name, bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta",
            compute_dtype=DTYPE, **NF4_KWARGS))
    model.requires_grad_(False)
    model.name_or_path = args.model  # for adapter_config.json
    model.is_loaded_in_4bit = True  # or PEFT would use its LoRA layer for plain linears
    lora = LoraConfig(r=args.lora_rank, lora_alpha=args.lora_alpha, target_modules=list(linears),
                      task_type="CAUSAL_LM")
    model = get_peft_model(model, lora, low_cpu_mem_usage=True)  # LoRA is on meta, too
    # a layer keeps only its inputs, and backward computes its forward again: far less memory, up to
    # 1.5 times the work. Delete this line if activations fit
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()  # transformers checkpoints in training mode only


def check_config(config: PreTrainedConfig, args: Namespace) -> None:
    """Refuse a model or flag that config.json alone rules out. check_decoder(), open_weights() and
    load_module() refuse the rest."""
    if getattr(config, "quantization_config", None):
        fail(f"--model {args.model}: is already quantized; pass the original model")
    if config.model_type in ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"):
        fail(f"--model {args.model}: PEFT has no LoRA for the out_proj of {config.model_type}")
    if config.model_type in ("bamba", "granitemoehybrid") and find_spec("mamba_ssm"):
        fail(f"--model {args.model}: uninstall mamba-ssm, whose kernel would take the 4-bit weight"
             " of out_proj without dequantizing it")
    if config.model_type == "zamba2":
        fail(f"--model {args.model}: its layers share weights, so they cannot be FSDP units")
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or math.inf
    if args.max_seq_len > longest:
        fail(f"--max_seq_len {args.max_seq_len}: the model is made for {longest} tokens")
    if (not getattr(text_config, "is_causal", True)
            or getattr(text_config, "use_bidirectional_attention", None) in (True, "all")):
        fail(f"--model {args.model}: its attention is not causal")


def choose_attention(model: PreTrainedModel, device: torch.device) -> None:
    """Use Flash Attention 2 if it is installed and the model allows it, else the model's default in
    transformers, which mostly is PyTorch's SDPA."""
    widest_head = max(getattr(m, "head_dim", None) or 0 for m in model.modules())
    if device.type != "cuda":
        reason = "no GPU"
    elif not model._supports_flash_attn:
        reason = "this model has no Flash Attention in transformers"
    elif widest_head > 256:  # as in the text model of Gemma 4
        reason = f"Flash Attention 2 has no heads of {widest_head} values"
    elif not is_flash_attn_2_available():
        reason = "flash-attn is not installed; it would speed up models with sliding windows"
    else:
        model.set_attn_implementation("flash_attention_2")
        reason = "flash-attn is installed"
    # transformers 5.20 gives Gemma 2 SDPA, which ignores the cap of its attention scores
    has_cap = getattr(model.config.get_text_config(), "attn_logit_softcapping", None)
    if has_cap and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    log(f"attention: {model.config._attn_implementation} ({reason})")


def check_decoder(decoder: nn.Module, model_name: str) -> None:
    """Refuse models that this file would train wrongly, or quantize differently from transformers.

    - Experts (MoE). If all experts are one weight with three dimensions, it would stay in bf16,
      without LoRA. If each is a linear, an expert that gets no token on a rank has no gradient
      there, and the reduce-scatters of the ranks would not match. They are found by name, or by
      three dimensions outside a convolution. This also finds the gates of RecurrentGemma, which
      would stay in bf16, too.
    - A linear outside the layers, as in Gemma 4 E2B and E4B: it would stay in bf16 here, while
      transformers' load_in_4bit quantizes it, so the adapter would not fit when it is used.
    - A subclass of nn.Linear: its own forward() would be lost.
    """
    if not hasattr(decoder, "layers"):
        fail(f"--model {model_name}: its {type(decoder).__name__} has no attribute `layers`")
    for name, weight in decoder.named_parameters():
        if "expert" in name or (weight.dim() == 3 and "conv" not in name):
            fail(f"--model {model_name}: has experts (MoE), or other weights that are neither"
                 f" linears nor convolutions ({name})")
    for name, module in decoder.named_modules():
        if isinstance(module, nn.Linear) and not name.startswith("layers."):
            fail(f"--model {model_name}: has a linear outside its layers ({name})")
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            fail(f"--model {model_name}: {name} is a {type(module).__name__}, whose own forward()"
                 " would be lost with a Linear4bit in its place")


def load_and_shard(
    model: PeftModel, args: Namespace, model_dir: Path, device: torch.device
) -> None:
    """Read, quantize and shard one decoder layer after the other, then the rest of the model.

    Why not from_pretrained(quantization_config=...): it would put the whole 4-bit model on every
    GPU before it can be sharded, 37 GiB for a 70B. Here the only unsharded weights on a GPU are the
    layer that is being loaded, with the copies that shard_layer() compares, and at the end the
    embedding and lm_head (4 GiB for a 70B).

    Every rank reads and quantizes every layer as a whole. It then keeps 1/world_size of the layer:
    on the GPU, or in host memory with --offload. A layer is an FSDP unit: all ranks gather it as a
    whole for its forward and again for its backward. The rest of the model is one more unit,
    gathered for the whole forward and backward.
    """
    causal_lm = model.get_base_model()
    causal_lm.tie_weights()  # or open_weights() would look for the lm_head of a tied model
    handles = open_weights(causal_lm, model_dir)
    policy = fsdp_policy(args.offload, device)
    torch.manual_seed(SEED)  # the same initial LoRA on any number of ranks
    init_lora_weights = model.peft_config["default"].init_lora_weights
    names = {module: name for name, module in causal_lm.named_modules()}
    layers = causal_lm.get_decoder().layers
    for n_loaded, layer in enumerate(layers, start=1):
        for module in layer.modules():
            load_module(module, names[module], handles, device)
            if isinstance(module, LoraLayer):
                init_lora(module, names[module], init_lora_weights, device)
        shard_layer(layer, policy)
        if n_loaded % 10 == 0:
            log(f"loaded {n_loaded} of {len(layers)} layers")
    in_layers = set(layers.modules())
    for module, name in names.items():  # embedding, final norm, lm_head
        if module not in in_layers:
            load_module(module, name, handles, device)
    causal_lm.tie_weights()  # again: load_module() has replaced the embedding's parameter
    # the last unit has the parameters that no layer has; none of them is in NF4
    fully_shard(model, reshard_after_forward=False, **policy)
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            # FSDP2 would average the ranks' gradients, but they must be summed: each rank's loss
            # is already divided by the tokens of all ranks
            unit.set_gradient_divide_factor(1.0)
            # or FSDP2 uses PREMUL_SUM, which gloo does not have
            unit.set_force_sum_reduction_for_comms(True)


def open_weights(causal_lm: PreTrainedModel, model_dir: Path) -> dict[str, Any]:
    """Return {bare name: lazy handle} of the stored tensors, where handle[...] reads the tensor.
    Refuse files that do not fit the model: a tensor is missing, stored twice, tied but different,
    or of a layer that the model lacks. Unlike from_pretrained(), this does not rename or convert
    tensors (transformers' conversion_mapping.py)."""
    handles = {}
    for path in sorted(model_dir.glob("model*.safetensors")):
        file = safe_open(path, "pt")
        for name in file.keys():
            if bare_name(name) in handles:
                fail(f"{model_dir}: its files have two tensors {bare_name(name)}")
            handles[bare_name(name)] = file.get_slice(name)
    for name, _ in causal_lm.named_parameters():
        if ".lora_" not in name and bare_name(name) not in handles:
            fail(f"{model_dir}: no model*.safetensors has {bare_name(name)}: a file is missing, or"
                 " transformers renames or converts this model's tensors while it loads them, which"
                 " this file does not")
    in_model = {bare_name(name) for name, _ in causal_lm.named_buffers(remove_duplicate=False)}
    first_names: dict[nn.Parameter, str] = {}
    # remove_duplicate=False names a tied lm_head, too: some files store it
    for full_name, param in causal_lm.named_parameters(remove_duplicate=False):
        name = bare_name(full_name)
        in_model.add(name)
        first = first_names.setdefault(param, name)
        if name != first and name in handles and not torch.equal(
                handles[name][...], handles[first][...]):
            fail(f"{model_dir}: config.json ties {name} to {first}, but they differ in the files,"
                 " so transformers would leave them untied: set tie_word_embeddings to false in"
                 " config.json")
    unused = sorted(set(handles) - in_model)
    for name in unused:
        if re.fullmatch(r"layers\..*\.(weight|bias)", name):
            fail(f"{model_dir}: its files have {name}, which the model of config.json lacks")
    if unused:
        log(f"{model_dir}: {len(unused):,} tensors are not used: {', '.join(unused[:5])}")
    return handles


def bare_name(name: str) -> str:
    """Return a tensor's name without PEFT's ".base_layer", without any leading "model." and
    "language_model.", and without the "vision_model." of a vision tower: a model's class and its
    files may differ in these. So language_model.model.layers.0 and model.language_model.layers.0
    both become layers.0. A leading dot is removed, too: load_module() makes one for the outermost
    module, whose own name is ""."""
    name = name.replace(".base_layer", "").replace("vision_tower.vision_model.", "vision_tower.")
    return re.sub(r"^\.?((model|language_model)\.)*", "", name)


def load_module(
    module: nn.Module, name: str, handles: dict[str, Any], device: torch.device
) -> None:
    """Load a module's own parameters and buffers, not its children's, to `device`."""
    for key, buffer in list(module.named_buffers(recurse=False)):
        stored = handles.get(bare_name(f"{name}.{key}"))
        value = buffer if stored is None else stored[...]  # most buffers are computed, not stored
        setattr(module, key, value.to(device, buffer.dtype))
    for key, param in list(module.named_parameters(recurse=False)):
        bare = bare_name(f"{name}.{key}")
        stored = handles.get(bare)
        if stored is None:
            continue  # LoRA's, or a tied lm_head: open_weights() has refused any other
        if stored.get_shape() != list(param.shape):  # some would be broadcast, without an error
            fail(f"{bare}: has the shape {stored.get_shape()} in the files, and"
                 f" {list(param.shape)} in the model that config.json describes")
        if stored.get_dtype() not in ("BF16", "F16", "F32"):  # codes, which need their scales
            fail(f"{bare}: is {stored.get_dtype()} in the files, so the model is quantized; pass"
                 " the original model")
        value = stored[...].to(device, DTYPE)
        if isinstance(module, bnb.nn.Linear4bit) and key == "weight":
            # to() quantizes, and leaves the scales in module.quant_state, where forward finds them
            weight = bnb.nn.Params4bit(value, module=module, **NF4_KWARGS).to(device)
        else:
            weight = nn.Parameter(value, requires_grad=param.requires_grad)
        setattr(module, key, weight)


def init_lora(
    module: LoraLayer, name: str, init_lora_weights: bool | str, device: torch.device
) -> None:
    """Materialize LoRA in fp32, with PEFT's initial values. `init_lora_weights` is True or
    "gaussian"; PEFT's other choices do not work here."""
    if not init_lora_weights:
        raise RuntimeError("init_lora_weights=False would leave LoRA uninitialized")
    for matrices in (module.lora_A, module.lora_B):
        matrices.to_empty(device=device).float()  # both work in place
    module.reset_lora_parameters("default", init_lora_weights)


def fsdp_policy(offload: bool, device: torch.device) -> dict[str, Any]:
    """Return the FSDP policy, as keywords of fully_shard().

    With `offload` the shards wait in host memory. Still on the GPU:
    - the layer that computes and the next one, the embedding and the lm_head
    - activations and logits
    - a copy of LoRA's shards with their gradients and optimizer state, see train()
    - all scales of NF4, 1 GiB for a 70B: they are not parameters, so FSDP2 does not handle them
    """
    offload_policy = OffloadPolicy()
    if offload:
        offload_policy = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # param_dtype must stay None, or weights would be damaged: shard_layer() explains how
    return {"offload_policy": offload_policy, "mp_policy": MixedPrecisionPolicy()}


def shard_layer(layer: nn.Module, policy: dict[str, Any]) -> None:
    """Make a decoder layer an FSDP2 unit.

    The trap: four NF4 codes are stored as one bf16 number. In a real model, about 0.08 % of these
    numbers happen to be NaNs. If all parameters of a unit are bf16, FSDP2 gathers the unit by
    copying numbers, and its kernel on GPUs rewrites NaNs: wrong weights, and no error. If a unit
    has several dtypes, FSDP2 gathers it as bytes, and all codes arrive as they were.

    So keep LoRA on every layer, and keep it in fp32: no param_dtype in the policy, no
    model.bfloat16(). If a change breaks this, the comparison below stops a run on several GPUs
    while it loads. On CPUs nothing is rewritten, so try such a change on GPUs. Nothing compares
    again afterwards: do not cast the model, or replace its parameters, once it is sharded.
    """
    linears = [module for module in layer.modules() if isinstance(module, bnb.nn.Linear4bit)]
    before = [linear.weight.view(torch.uint8).clone() for linear in linears]
    # True: the gathered weights are freed after forward. False would be faster, but each GPU would
    # have the whole model in 4 bits from forward to backward
    fully_shard(layer, reshard_after_forward=True, **policy)
    layer.unshard()
    for linear, codes in zip(linears, before, strict=True):
        if not torch.equal(linear.weight.view(torch.uint8), codes):
            raise RuntimeError("gathered 4-bit weights differ from those that this rank quantized:"
                               " every layer must have LoRA in fp32, MixedPrecisionPolicy's"
                               " param_dtype must be None, and all machines need the same model")
    layer.reshard()


def check_loaded(model: PeftModel) -> None:
    """Check that every weight is loaded, and that exactly the LoRA matrices are trainable."""
    for name, param in model.named_parameters():
        if param.is_meta:
            raise RuntimeError(f"{name} is not loaded, but still on meta")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if len(trained) != 2 * len(adapted) or not all(".lora_" in name for name in trained):
        raise RuntimeError(
            f"{len(trained)} tensors are trainable, but LoRA on {len(adapted)} linears has"
            f" {2 * len(adapted)}; anything else would not be saved")
    local_parts = [p.to_local() for p in model.parameters()]
    log(f"model on {dist.get_world_size()} ranks:"
        f" {sum(p.numel() for p in trained.values()):,} trainable parameters;"
        f" {sum(p.nbytes for p in local_parts) / 2**30:.2f} GiB of parameters per rank, on"
        f" {local_parts[0].device.type}; NF4's scales are not counted")


# ---- Training -----------------------------------------------------------------------------------


def train(
    model: PeftModel, train_rows: list[Row], eval_rows: list[Row], args: Namespace,
    device: torch.device,
) -> None:
    """Run the training loop on the rows of all steps, in this order."""
    # bitsandbytes cannot step DTensors, and with --offload they are in host memory. So it steps
    # copies of this rank's shards on the GPU, which are copied back below. Paged: if the GPU's
    # memory is full, CUDA moves optimizer state to host memory, but bitsandbytes pages only that of
    # shards of 100,000 values or more (with Qwen3-8B, rank 16 and two GPUs: none); that of shards
    # below 4,096 values is in fp32, not 8-bit. torch.optim.AdamW would do, too, with the same
    # arguments; Muon and Adafactor would silently take a shard for the whole matrix
    dtensors = [p for p in model.parameters()
                if p.requires_grad and p.to_local().numel()]  # with many ranks a shard can be empty
    shard_copies = [nn.Parameter(p.to_local().detach().to(device, copy=True)) for p in dtensors]
    optimizer = bnb.optim.PagedAdamW8bit(shard_copies, lr=args.learning_rate, weight_decay=0.0)
    n_steps = len(train_rows) // args.batch_size
    scheduler = LambdaLR(optimizer, lambda n_done: lr_factor(n_done + 1, n_steps))
    torch.manual_seed(SEED + dist.get_rank())  # for dropout, the model's or yours
    if eval_rows:
        log_eval(0, evaluate(model, eval_rows, args, device))
    for step in range(1, n_steps + 1):
        started = time.perf_counter()
        # every rank has the whole batch, and micro_batches() deals it out. So a DataLoader, if you
        # use one, must give this same batch to every rank: no DistributedSampler
        batch = train_rows[(step - 1) * args.batch_size : step * args.batch_size]
        # the tokens of all ranks, because the gradients are summed over all ranks
        n_loss_tokens = count_loss_tokens(batch)
        step_loss = torch.zeros((), device=device)
        for micro_batch in micro_batches(batch, args):
            loss = rows_loss(model, micro_batch, device) / n_loss_tokens
            # here FSDP2 gathers each layer again, sums its gradients over the ranks
            # (reduce-scatter), and adds this rank's shard of the sum to dtensor.grad. To sum them
            # only in the last micro-batch would save little: LoRA is small beside what is gathered
            loss.backward()
            step_loss += loss.detach()

        dist.all_reduce(step_loss)  # for the log and the check: the gradients are already summed
        for dtensor, shard_copy in zip(dtensors, shard_copies, strict=True):
            shard_copy.grad = dtensor.grad.to_local().to(device)
        norm = clip_gradient(shard_copies)
        stop_if_diverged(step, step_loss, norm)

        optimizer.step()
        for dtensor, shard_copy in zip(dtensors, shard_copies, strict=True):
            dtensor.to_local().detach().copy_(shard_copy.detach())
        model.zero_grad()  # the DTensors' gradients
        optimizer.zero_grad()  # and the copies', which would use memory during the next step

        n_tokens = sum(len(row.ids) for row in batch)
        speed = n_tokens / (time.perf_counter() - started) / dist.get_world_size()
        log_step(step, n_steps, step_loss, scheduler.get_last_lr()[0], norm, speed)
        scheduler.step()
        if step % args.save_every == 0 or step == n_steps:
            save_adapter(model, args, device)
            log(f"step {step}: adapter saved in {args.output_dir}")
            if eval_rows:
                log_eval(step, evaluate(model, eval_rows, args, device))


def micro_batches(batch: list[Row], args: Namespace) -> Iterator[list[Row]]:
    """Yield this rank's part of `batch`, as many rows at once as fit, the longest first.

    Rows of similar length go together, because they are padded to the longest. All ranks must yield
    equally often, because each forward is a collective. So rows without a loss are added until the
    ranks have equally many.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = sorted(batch, key=lambda row: len(row.ids))
    no_loss = batch[0]._replace(labels=torch.full_like(batch[0].labels, IGNORE_INDEX))
    batch = [no_loss] * (-len(batch) % world_size) + batch
    while batch:
        longest = len(batch[-1].ids)
        # max(): at least one row, even if an edit no longer truncates
        n_rows = max(1, (args.micro_batch_size * args.max_seq_len) // longest)  # of each rank
        yield batch[-n_rows * world_size :][rank::world_size]
        del batch[-n_rows * world_size :]


def count_loss_tokens(rows: list[Row]) -> float:
    """Return the number of tokens in the loss of these rows, which is the loss's divisor. (With
    weights, see Recipes, it is their sum, hence float.) read_rows() leaves out each row for which
    this function returns 0."""
    # from 1: nothing predicts the first token
    return sum((row.labels[1:] != IGNORE_INDEX).sum().item() for row in rows)


def rows_loss(model: PeftModel, rows: list[Row], device: torch.device) -> Tensor:
    """Return the sum of the losses of all tokens in this rank's rows of a micro-batch. train() and
    evaluate() divide it by count_loss_tokens() of the rows of all ranks.

    Rows are right-padded, without a mask: a causal model's tokens do not see what follows them, and
    the loss ignores the padding. Do not pack several texts into a row: they would see each other.
    """
    ids = pad_sequence([row.ids for row in rows], batch_first=True)  # [rows, tokens]
    labels = pad_sequence(
        [row.labels for row in rows], batch_first=True, padding_value=IGNORE_INDEX)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)  # position i predicts token i + 1
    ids, targets = ids.to(device), targets.to(device)
    # autocast for LoRA, which is in fp32; autocast's cache would add a bf16 copy of the adapter
    with torch.autocast(device.type, DTYPE, cache_enabled=False):
        # [rows, tokens, vocabulary] in bf16. With the default flags and a vocabulary of 128k the
        # logits need 2 GiB, and their gradient up to 4: a lower --micro_batch_size helps
        logits = model(input_ids=ids, use_cache=False).logits
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten())  # [rows * tokens]
    return losses.sum()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of each token, fp32 [tokens], 0 where it is not in the loss, from
    logits [tokens, vocabulary]. LOSS_CHUNK tokens are computed at a time, and checkpoint()
    recomputes each chunk in backward, so that only one chunk is ever in fp32."""

    def chunk_losses(chunk_logits: Tensor, chunk_targets: Tensor) -> Tensor:
        return F.cross_entropy(
            chunk_logits.float(), chunk_targets, ignore_index=IGNORE_INDEX, reduction="none")

    chunks = zip(logits.split(LOSS_CHUNK), targets.split(LOSS_CHUNK), strict=True)
    return torch.cat([checkpoint(chunk_losses, *chunk, use_reentrant=False) for chunk in chunks])


@torch.no_grad()
def evaluate(
    model: PeftModel, eval_rows: list[Row], args: Namespace, device: torch.device
) -> float:
    """Return the mean loss per token of eval_rows, which are the same on every rank."""
    model.eval()
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.train()  # in eval mode on a CPU it would pack its weight in another way
    loss = torch.zeros((), device=device)
    for micro_batch in micro_batches(eval_rows, args):
        loss += rows_loss(model, micro_batch, device)
    model.train()
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()  # or embedding and lm_head stay gathered until the next backward
    dist.all_reduce(loss)
    return loss.item() / count_loss_tokens(eval_rows)


def clip_gradient(shards: list[nn.Parameter]) -> Tensor:
    """Scale the gradient of all ranks down to MAX_GRAD_NORM. Returns its norm before that."""
    norm = nn.utils.get_total_norm([shard.grad for shard in shards]).square()
    # shards are disjoint, so their squared norms add up
    dist.all_reduce(norm)
    norm.sqrt_()
    nn.utils.clip_grads_with_norm_(shards, MAX_GRAD_NORM, norm)
    return norm


def stop_if_diverged(step: int, loss: Tensor, norm: Tensor) -> None:
    """Fail if the loss or the gradient is not finite, or if the gradient is 0: nothing would be
    learned. Loss and norm are sums over all ranks, so all ranks fail together."""
    if torch.isfinite(loss + norm) and norm > 0:
        return
    advice = "the run has diverged (use a lower --learning_rate), or a loss of your own is 0"
    if step == 1:
        advice = "nothing is trained yet: are the model's weights, and your edits, right?"
    fail(f"step {step}: loss {loss:.4f}, gradient norm {norm:.4f}: {advice}")


def lr_factor(step: int, n_steps: int) -> float:
    """Return what --learning_rate is multiplied by in step 1..n_steps: linear warm-up (none below
    50 steps), then cosine decay."""
    n_warmup = max(1, round(WARMUP_FRACTION * n_steps))
    progress = max(0, step - n_warmup) / (n_steps + 1 - n_warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return min(1, step / n_warmup) * cosine


def log_step(
    step: int, n_steps: int, loss: Tensor, lr: float, norm: Tensor, speed: float
) -> None:
    """Print a step's metrics. `speed`: tokens per second per rank."""
    worker, memory = "process", ""
    if loss.is_cuda:
        worker, memory = "GPU", f" | peak {torch.cuda.max_memory_allocated() / 2**30:5.2f} GiB"
    log(f"step {step:{len(str(n_steps))}}/{n_steps} | loss {loss:7.4f} | lr {lr:.1e} |"
        f" grad_norm {norm:6.3f} | {speed:6,.0f} tok/s/{worker}{memory}")


def log_eval(step: int, loss: float) -> None:
    """Print the loss of the evaluation rows."""
    log(f"step {step}: eval_loss {loss:.4f}")


# ---- Save the adapter ---------------------------------------------------------------------------


def copy_tokenizer(model_dir: Path, output_dir: str) -> None:
    """Copy the model's tokenizer and chat template to where the adapter goes."""
    if dist.get_rank() == 0:
        # tokenizer.save_pretrained() would write its own version of these files
        for pattern in ("tokenizer*", "special_tokens_map.json", "chat_template*"):
            for path in model_dir.glob(pattern):
                shutil.copy(path, output_dir)


def save_adapter(model: PeftModel, args: Namespace, device: torch.device) -> None:
    """Gather the adapter; rank 0 writes it in PEFT's format.

    Each file is written in partial/, and then replaces that of the last save. So a run that is
    killed during a save can leave half-written files only there.
    """
    state_dict = {name: p.detach().to(device).full_tensor().cpu()
                  for name, p in model.named_parameters() if p.requires_grad}
    if dist.get_rank() != 0:
        return
    partial_dir = Path(args.output_dir, "partial")
    model.save_pretrained(partial_dir, state_dict=state_dict, save_embedding_layers=False)
    for path in partial_dir.iterdir():
        path.replace(Path(args.output_dir, path.name))
    partial_dir.rmdir()


# ---- Data ---------------------------------------------------------------------------------------


class DataError(ValueError):
    """A line of the data set that this file does not handle."""


def read_rows(
    path: str, args: Namespace, tokenizer: PreTrainedTokenizerFast, n_needed: float = math.inf
) -> list[Row]:
    """Return the rows of a data set, truncated to --max_seq_len, that have a token in the loss.
    Lines are read in random order until there are `n_needed` rows. Every rank reads all of this,
    and returns the same rows: 16 bytes of host memory per token, on each rank."""
    # as bytes: str.splitlines() also splits at characters such as U+2028
    lines = list(enumerate(Path(path).read_bytes().splitlines(), start=1))
    random.Random(SEED).shuffle(lines)
    rows: list[Row] = []
    columns: set[str] = set()
    n_read = n_truncated = n_dropped = 0
    for number, line in lines:
        if len(rows) >= n_needed:
            break  # the rest would not be trained
        n_read += 1
        if n_read % 20_000 == 0:
            log(f"{path}: {n_read:,} of {len(lines):,} lines read")
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            encoded = encode(example, tokenizer)
        except json.JSONDecodeError as error:
            fail(f"{path}, line {number}: not JSON at column {error.colno}: {error.msg}; expected"
                 " JSONL, a whole object in each line")
        except (DataError, UnicodeDecodeError, TemplateError) as error:
            fail(f"{path}, line {number}: {type(error).__name__}: {error}")
        except Exception as error:  # perhaps a mistake in an edit: keep the traceback
            raise RuntimeError(f"{path}, line {number}") from error
        columns |= set(example)
        if not encoded:
            n_dropped += 1  # a conversation without an answer, or an empty text
        for whole in encoded:
            # cloned, so that the memory of the rest is freed
            row = Row(*(tensor[: args.max_seq_len].clone() for tensor in whole))
            if count_loss_tokens([row]):
                rows.append(row)
                n_truncated += len(whole.ids) > args.max_seq_len
            else:
                n_dropped += 1  # a prompt that fills --max_seq_len
    if not rows:
        fail(f"{path}: no token to train on")
    log(f"{path}: {len(rows):,} rows from {n_read:,} of {len(lines):,} lines (columns:"
        f" {', '.join(sorted(columns))}); {n_truncated:,} truncated to --max_seq_len, {n_dropped:,}"
        " left out (empty, or nothing in the loss within --max_seq_len)")
    labels = rows[0].labels[1:]  # nothing predicts the first token
    in_loss = tokenizer.decode(labels[labels != IGNORE_INDEX])
    log(f"{path}: first row in random order: {tokenizer.decode(rows[0].ids)[:500]!r}; of it in the"
        f" loss: {in_loss[:500]!r}")
    return rows


def rows_of_all_steps(rows: list[Row], args: Namespace) -> list[Row]:
    """Return the rows of all steps, --batch_size of them for each step, as references to `rows`.
    Each epoch is in an order of its own. --num_epochs is rounded to whole steps, at least one. So
    up to half a batch of rows is left out, or trained once more; fewer rows than half a batch are
    repeated until they fill one. The log has the epochs."""
    n_steps = args.max_steps or max(1, round(args.num_epochs * len(rows) / args.batch_size))
    n_rows = n_steps * args.batch_size
    log(f"training: {n_steps:,} steps, {n_rows / len(rows):.2f} epochs of these rows")
    all_rows: list[Row] = []
    for epoch in range(math.ceil(n_rows / len(rows))):
        all_rows += random.Random(SEED + epoch).sample(rows, len(rows))
    return all_rows[:n_rows]


def check_same_on_all_ranks(rows: list[Row], args: Namespace) -> None:
    """Refuse rows and flags that differ between ranks: they would train wrongly, without an error.
    A machine may have another file, tokenizer or command, or an edit of encode() may draw random
    numbers without a seed."""
    paths = ("model", "dataset", "eval_dataset", "output_dir")  # may differ between machines
    flags = {name: value for name, value in vars(args).items() if name not in paths}
    digest = hashlib.sha256(repr(flags).encode())
    for row in rows:
        for tensor in row:
            digest.update(tensor.numpy())
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    if len(set(digests)) > 1:
        fail("the ranks have different rows or flags: every machine needs the same data, tokenizer"
             " and flags, and encode() must return the same rows on every rank")


def check_example(example: dict[str, Any]) -> None:
    """Raise DataError for what this file would train wrongly. Other columns are ignored."""
    if not isinstance(example, dict):
        raise DataError("expected an object with text or messages")
    if ("text" in example) == ("messages" in example):
        found = ", ".join(example) or "a line without values"
        raise DataError(f"expected either text or messages, not {found}: convert it in encode()")
    messages = example.get("messages", [])
    if not isinstance(example.get("text", ""), str):
        raise DataError("expected a string as text")
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise DataError("expected a list of objects as messages")
    for key in UNHANDLED_WITH_MESSAGES if "messages" in example else UNHANDLED_WITH_TEXT:
        if example.get(key) not in (None, "", [], {}):
            raise DataError(f"{key!r} would change the training in some other trainers or chat"
                            " templates, and this file does not handle it; if it should not matter,"
                            " leave it out of the line")
    for message in messages:
        keys = {key for key, value in message.items() if value is not None}
        if keys != {"role", "content"}:
            found = ", ".join(sorted(keys)) or "nothing"
            raise DataError(f"expected a message of role and content, not of {found}")
        if not isinstance(message["content"], str):
            raise DataError(f"expected a string as content, not {str(message['content'])[:80]}")
        if message["role"] not in ("system", "user", "assistant"):
            raise DataError(f"expected system, user or assistant, not {message['role']!r}")
        if message["role"] == "assistant" and not message["content"].strip():
            raise DataError("an answer is empty")


def encode(example: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[Row]:
    """Tokenize a line of the data set. Returns the row of its text, or a row for each answer of its
    conversation: none for an empty text, or for a conversation without an answer.

    Each answer is a row of its own, after exactly the prompt that a server renders for the messages
    before it. One row for the whole conversation would differ from that, because a template may
    change earlier answers: Qwen3's drops their reasoning. The price: the start of a long
    conversation is computed again for each of its answers.
    """
    # if your data set has other columns, convert a line here, for example:
    #     example = {"messages": [{"role": "user", "content": example["prompt"]}, ...]}
    # check_example() then no longer sees, or refuses, the columns that you leave out
    if isinstance(example, dict):  # Dataset.to_json() writes null for what a row lacks
        example = {key: value for key, value in example.items() if value is not None}
    check_example(example)
    if "text" in example:
        # of an empty text only EOS would be trained: to stop at once
        return [encode_text(example["text"], tokenizer)] if example["text"].strip() else []
    if not tokenizer.chat_template:
        raise DataError("messages need a chat template, and this model has none: name its instruct"
                         " model, or write text")
    # without a message's keys that are null: before transformers 5.24 a template would see them
    messages = [{"role": m["role"], "content": m["content"]} for m in example["messages"]]
    # from 1: a first message that is an answer has no prompt, and is not trained
    return [encode_answer(messages[:i], messages[i], tokenizer)
            for i in range(1, len(messages)) if messages[i]["role"] == "assistant"]


def encode_text(text: str, tokenizer: PreTrainedTokenizerFast) -> Row:
    """Return the row of a text and the EOS token. A text that a chat template has rendered may have
    BOS and EOS already: then they are not added again."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    has_bos = bos is not None and text.startswith(bos)
    ids = tokenizer(text, add_special_tokens=not has_bos)["input_ids"]
    if eos is not None and ids[-1:] != [tokenizer.eos_token_id] and not text.rstrip().endswith(eos):
        ids.append(tokenizer.eos_token_id)
    return make_row(ids, n_prompt=0)


def encode_answer(
    prompt_messages: list[dict], answer: dict, tokenizer: PreTrainedTokenizerFast
) -> Row:
    """Return the row of a prompt, which is not in the loss, and its answer."""
    prompt, answer_text = render_answer(prompt_messages, answer, tokenizer)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    # together, because SentencePiece may add a space before an answer that is tokenized alone
    ids = tokenizer(prompt + answer_text, add_special_tokens=False)["input_ids"]
    if ids[: len(prompt_ids)] != prompt_ids:
        # a token would span the prompt's end and the answer's start: tokenize them apart
        ids = prompt_ids + tokenizer(answer_text, add_special_tokens=False)["input_ids"]
    return make_row(ids, n_prompt=len(prompt_ids))


def render_answer(
    prompt_messages: list[dict], answer: dict, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, str]:
    """Return a prompt as a server renders it, and the answer as the model will write it: up to and
    including its end-of-turn token. Raises DataError if the chat template does not fit."""
    prompt = render(prompt_messages, tokenizer, add_generation_prompt=True)
    text = render([*prompt_messages, answer], tokenizer)
    if not text.startswith(prompt):
        raise DataError(f"the chat template's prompt ends with {prompt[-40:]!r}, but the text with"
                         " the answer does not continue it: set tokenizer.chat_template in main()"
                         " to a template without this mismatch, and serve the adapter with it")
    answer_text = text.removeprefix(prompt)
    # render() does not check the reasoning before </think>, because templates drop that of earlier
    # answers. This answer is trained with its reasoning, so every part must be there
    for part in re.split("</?think>", answer["content"]):
        if part.strip() not in answer_text:
            raise DataError(f"the chat template leaves out {part.strip()[:40]!r}")
    if answer_text.rstrip().endswith(special_tokens(tokenizer)):
        return prompt, answer_text.rstrip()  # the template ends a turn with "\n" after its token
    return prompt, answer_text + (tokenizer.eos_token or "")  # GLM's leaves the last turn open


@functools.cache
def special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values()
                 if token.special)


def render(messages: list[dict], tokenizer: PreTrainedTokenizerFast, **options: bool) -> str:
    """Return the messages as text by the chat template. Raises DataError if the text lacks the
    content of a message."""
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    for message in messages:
        content = message["content"].rpartition("</think>")[2]  # templates may drop reasoning
        if content.strip() not in text:
            raise DataError(f"the chat template leaves out {content[:40]!r}")
    return text


def make_row(ids: list[int], n_prompt: int) -> Row:
    """Return the row of these tokens, the first `n_prompt` of which are not in the loss."""
    labels = [IGNORE_INDEX] * n_prompt + ids[n_prompt:]
    return Row(torch.tensor(ids), torch.tensor(labels))


if __name__ == "__main__":
    main()
    if not torch.cuda.is_available():
        sys.stdout.flush()
        # a process of torch 2.13 with gloo can crash while it ends; all is saved (if you use wandb:
        # call wandb.finish() before)
        os._exit(0)


# ---- Recipes ------------------------------------------------------------------------------------
#
# USE THE ADAPTER with the model in NF4, as it was trained. With another quant_type or
# compress_statistics (here: use_double_quant) than in NF4_KWARGS the 4-bit weights would differ,
# and the adapter would fit them less well, without an error. quant_storage may differ: it only
# packs the same codes in another dtype.
#
#     import torch
#     from peft import PeftModel
#     from transformers import AutoModelForCausalLM, BitsAndBytesConfig
#
#     name = "Qwen/Qwen3-8B"  # --model
#     nf4 = BitsAndBytesConfig(
#         load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
#         bnb_4bit_compute_dtype=torch.bfloat16)
#     model = AutoModelForCausalLM.from_pretrained(
#         name, quantization_config=nf4, dtype=torch.bfloat16, device_map="auto")  # over all GPUs
#     model = PeftModel.from_pretrained(model, "adapter")
#
# load_in_4bit quantizes a vision tower, too, but training left it in bf16: for a Gemma 3 that reads
# images, add llm_int8_skip_modules=["model.vision_tower", "lm_head"] to nf4.
#
# MERGE THE ADAPTER into the dequantized model, because it was trained on the 4-bit values. This
# needs host memory for the whole model in bf16. `name` and `nf4` are those of above:
#
#     model = AutoModelForCausalLM.from_pretrained(
#         name, quantization_config=nf4, dtype=torch.bfloat16, device_map="cpu").dequantize()
#     PeftModel.from_pretrained(model, "adapter").merge_and_unload().save_pretrained("merged")
#
# Then copy tokenizer*, chat_template* and special_tokens_map.json, where they exist, from "adapter"
# to "merged".
#
# CHANGE LORA in the LoraConfig of build_model():
#
#     target_modules=[name for name in linears if ".self_attn." in name]  # every layer needs one
#     lora_dropout=0.05
#     use_rslora=True
#
# Not possible are DoRA, PiSSA and OLoRA, which need the weights, but these are on meta there; and
# modules_to_save, because only LoRA is initialized and saved.
#
# BEGIN WITH AN EXISTING ADAPTER, but not by PeftModel.from_pretrained(), whose values init_lora()
# would overwrite. Add at the end of init_lora()
#
#     file = safe_open("adapter/adapter_model.safetensors", "pt")
#     for part in ("lora_A", "lora_B"):
#         getattr(module, part)["default"].weight.data.copy_(
#             file.get_tensor(f"base_model.model.{name}.{part}.weight"))
#
# and give LoraConfig in build_model() the adapter's r, lora_alpha, use_rslora and target_modules:
# nothing checks that the scale is the same and that no linear of the adapter is left out.
#
# TRAIN A MODEL CLASS OF YOUR OWN: in build_model() write MyConfig.from_pretrained(model_dir) and
# MyForCausalLM._from_config(config, dtype=DTYPE) in place of the Auto classes' calls. It needs
#
#     the base classes PreTrainedModel and GenerationMixin, and config_class = MyConfig
#     supports_gradient_checkpointing = True
#     get_input_embeddings(), and get_decoder(), whose .layers are GradientCheckpointingLayers
#         (transformers.modeling_layers)
#     forward(input_ids, **kwargs), which is causal without a mask, and returns .logits
#     parameters named as in the files; only what bare_name() removes may differ
#     nn.Linear itself in its layers: a subclass is refused, because its forward() would be lost
#
# USE HSDP, where each machine has the whole model: add this to what fsdp_policy() returns,
#
#     "mesh": dist.init_device_mesh(
#         "cuda", (n_machines, n_gpus_of_each), mesh_dim_names=("replicate", "shard"))
#
# and before norm.sqrt_() in clip_gradient(), because each machine adds the norms of all shards,
#
#     norm /= n_machines
#
# WRITE ANOTHER LOSS in rows_loss(). It must be a sum, too, and count_loss_tokens() its divisor. For
# a row without a token in the loss, such as micro_batches() adds, it must be 0, not NaN, and still
# be computed from the model's logits: a constant would skip backward, and forward and backward are
# collectives. It must not compare rows with each other, as a preference loss does: micro_batches()
# sorts them, and deals them to the ranks.
#
# WEIGHT THE TOKENS OR ANSWERS. Give Row a field `weights`, fp32 [tokens], also where a whole answer
# has one weight, and let make_row() fill it. In count_loss_tokens()
#
#     return sum(row.weights[1:][row.labels[1:] != IGNORE_INDEX].sum().item() for row in rows)
#
# and in rows_loss(), shifted as the targets are,
#
#     weights = pad_sequence([row.weights for row in rows], batch_first=True)
#     weights = F.pad(weights[:, 1:], (0, 1)).flatten().to(device)
#     return losses @ weights
#
# If the weights are in the data set, check_example() must accept them, encode() keep them, because
# it reduces each message to role and content, and encode_answer() pass them to make_row().
#
# GENERATE TEXT IN AN EVALUATION. Pass the tokenizer from main() through train() to evaluate(), and
# add this after its loop over micro-batches, on all ranks and equally often:
#
#     row = eval_rows[0]
#     ids = row.ids[row.labels == IGNORE_INDEX][None].to(device)  # its prompt; a text has none
#     model.unshard()  # embedding and lm_head, because generate() calls no forward of `model`
#     output_ids = model.generate(input_ids=ids, max_new_tokens=64, synced_gpus=True)
#     model.reshard()
#     log(tokenizer.decode(output_ids[0]))
#
# LOG TO WANDB: import wandb at the top of the file; in main(), after init_distributed(),
#
#     if dist.get_rank() == 0:
#         wandb.init()
#
# and in log_step()
#
#     if dist.get_rank() == 0:
#         wandb.log({"loss": loss.item()}, step=step)
#
# In log_eval() likewise.
