#!/usr/bin/env python3
"""Fine-tune a large language model: 4-bit NF4 base weights, LoRA adapters, sharded by FSDP2.

    torchrun --nproc_per_node=2 train_fsdp_qlora.py
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --model meta-llama/Llama-2-70b-hf \
        --dataset data.jsonl --max_seq_len 2048
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --output_dir runs/my-run --resume

The first command needs nothing but this file: it makes a small model and data set and trains on
them, on GPUs (NCCL) or, where there are none, on the CPU (gloo). Written to --output_dir:

    adapter_model.safetensors, adapter_config.json   the adapter, in PEFT's format, fp32
    train_config.json                                the resolved configuration, for merging
    metrics.jsonl                                    one JSON object a step
    tensorboard/                                     the same numbers for TensorBoard
    checkpoint-NNNNNN/                               what --resume needs

Map of this file. Part I is what you read and change, Part II what it stands on.

    Part I, the recipe         flags; train(), the whole job in six steps; data: rows, their tokens,
                               bins; what is adapted, what is sharded; schedule, training step
    Part II, the engine room   ranks, errors, logs; the decoder layer, forward and backward; NF4;
                               vocabulary and loss; families of models; files and loading; the plan;
                               CUDA graphs; adapter and optimizer; checkpoints; check at start; demo

Tested with torch 2.11 and 2.13, transformers 5.17 and 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import heapq
import inspect
import itertools
import json
import math
import mmap
import os
import random
import re
import shlex
import shutil
import socket
import sys
import threading
import time
import types
import typing
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import bitsandbytes as bnb
import huggingface_hub
import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch on CUDA alone
    triton = None

# ================================================================================================
# Part I, the recipe
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------

WARMUP_FRACTION = 0.03  # of all steps, linear, before the cosine
MAX_GRAD_NORM = 1.0  # over the whole adapter
IGNORE = -100  # the label of a token that is not learnt
BLOCK = 64  # weights that share one absmax; QLoRA's choice and bitsandbytes' default
NESTED_BLOCK = 256  # absmax values that share one second-level absmax (double quantisation)
STATE_BLOCK = 256  # optimizer values that share one scale in bitsandbytes' 8-bit state
COLUMNS = 64  # an adapter's columns of a product are filled up to whole cache lines
SLICE_TOKENS = 4096  # of a recomputed MLP at once; fewer make its products slower
CHUNK_BYTES = 256 * 2**20  # of logits alive at once, of embedded tokens before their sum
GAPS = 0.04  # of the GPU's memory that gaps between tensors cost: 21.4 of 22.5 GiB ran, 21.8 not
HOST_SPARE = 32 * 2**30  # bytes a process may pin for speed alone; pinning takes 0.2 s a GiB
RANDOM_STD = 0.02  # of --random_weights
READERS = 8  # threads of a rank that read weights; one copies some 5 GB/s out of the page cache
READ_CHUNK = 2**24  # bytes that a thread reads at once
READ_AHEAD = 2**29  # bytes read but not yet quantised, so that reading and quantising overlap
LIBRARIES = (torch, transformers, peft, bnb)
SHAPES = {  # what --random_weights knows without a config.json
    name: dict(
        zip(("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings"), values),
        tie_word_embeddings=False)
    for name, *values in (
        ("llama-2-7b", "llama", 32000, 4096, 11008, 32, 32, 32, 4096),
        ("llama-2-70b", "llama", 32000, 8192, 28672, 80, 64, 8, 4096),
        ("llama-3-8b", "llama", 128256, 4096, 14336, 32, 32, 8, 8192),
        ("llama-3-70b", "llama", 128256, 8192, 28672, 80, 64, 8, 8192),
        ("qwen2.5-32b", "qwen2", 152064, 5120, 27648, 64, 40, 8, 32768))}


def knob(default, help_text, **extra):
    """One field of Config: its default, its help and argparse's other keywords."""
    return dataclasses.field(default=default, metadata={"help": help_text, **extra})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of the script. None means: derived from the rest, and printed."""

    model: str | None = knob(
        None, "Hub id or directory of safetensors; none: a built-in demo;"
        " with --random_weights also " + ", ".join(SHAPES))
    dataset: str | None = knob(None, "JSONL file or Hub id; none: the demo's instructions")
    output_dir: str | None = knob(None, "where results go; none: a new directory below runs/")
    resume: bool = knob(False, "continue from the newest whole checkpoint of --output_dir")
    random_weights: bool = knob(False, "random weights: of the model, only config.json is read")
    max_seq_len: int = knob(2048, "tokens; longer rows are cut")
    batch_size: int = knob(16, "rows an optimizer step, over all GPUs")
    num_epochs: float = knob(1.0, "passes over the data set; --max_steps overrides it")
    max_steps: int | None = knob(None, "optimizer steps")
    learning_rate: float | None = knob(None, "peak; none: 2e-4, for the demo 5e-3")
    adapter: str = knob(
        "lora", "kind: lora; rslora, which scales by lora_alpha / sqrt(lora_rank); dora, which also"
        " trains the norm of each weight's rows", choices=("lora", "rslora", "dora"))
    lora_rank: int = knob(16, "rank of the adapter")
    lora_alpha: int = knob(32, "the adapter's output is scaled by lora_alpha / lora_rank")
    lora_dropout: float = knob(0.0, "dropout on the adapter's input")
    target_modules: tuple[str, ...] = knob(
        ("all-linear",), "linears that get an adapter, by name: q_proj v_proj")
    save_every: int = knob(0, "steps between checkpoints; 0: only at the end")
    seed: int = knob(0, "of the adapter's initial values, the data order, dropout")
    micro_batch_tokens: int | None = knob(
        None, "tokens a GPU works on at once, at least the longest row; none: what is fastest and"
        " fits")
    shard_group_size: int | None = knob(
        None, "processes that share one copy of the model, for instance those of a node; every such"
        " group holds one; none: as few as the memory allows, if that is faster")
    reshard_after_forward: bool = knob(
        True, "free a layer's gathered weights after its forward (FULL_SHARD), or not until its"
        " backward is done (SHARD_GRAD_OP): faster, needs the whole 4-bit model on each GPU")
    recompute: str = knob(
        "auto", "decoder layers recomputed in backward: all, none, a number, or auto: as few as the"
        " memory allows")
    offload_activations: bool = knob(
        False, "keep the inputs of recomputed layers in pinned host memory until their backward")
    offload_params: bool = knob(
        False, "keep the 4-bit weights in pinned host memory; each layer is copied when needed")
    memory_limit_gib: float | None = knob(
        None, "GPU memory to plan for and never to exceed; none: what is free")
    attn: str | None = knob(
        None, "attention; none: on Hopper sdpa for rows of one length, else flash_attention_2 where"
        " it is installed, else sdpa", choices=("flash_attention_2", "sdpa"))
    compute_dtype: str = knob(
        "bfloat16", "dtype of activations and products", choices=("bfloat16", "float32"))


def parse_config(argv):
    """Flags to Config. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def fail(message):
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.print_help = lambda: say(parser.format_help())  # from rank 0 alone
    hints = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        kind = next(t for t in typing.get_args(hints[f.name]) or (hints[f.name],) if t is not None)
        options = dict(f.metadata, default=f.default)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif f.name == "target_modules":
            options["nargs"] = "+"
        else:
            options["type"] = kind
        parser.add_argument(f"--{f.name}", **options)
    values = vars(parser.parse_args(argv))
    values["target_modules"] = tuple(values["target_modules"])
    return Config(**values)


def resolve_config(config, world_size):
    """Check what the flags alone can tell and fill in what follows from them."""
    for name, value in vars(config).items():
        if value == "":
            raise ValueError(f"--{name} is empty: leave it out or give a value")
    for name in ("lora_rank", "lora_alpha", "max_seq_len", "batch_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} {getattr(config, name)}: must be at least 1")
    for name in ("max_steps", "num_epochs", "learning_rate", "memory_limit_gib",
                 "micro_batch_tokens"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"--{name} {getattr(config, name)}: must be positive")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"--lora_dropout {config.lora_dropout}: must be at least 0 and below 1")
    if not 0 <= config.seed < 2**40:
        raise ValueError(f"--seed {config.seed}: must be at least 0 and below 2^40")
    if config.save_every < 0:
        raise ValueError(f"--save_every {config.save_every}: must be 0 (off) or more")
    if config.recompute not in ("all", "none", "auto") and not config.recompute.isdecimal():
        raise ValueError(f"--recompute {config.recompute}: must be all, none, auto or a number")
    if config.offload_activations and config.recompute in ("none", "0"):
        raise ValueError(f"--offload_activations has nothing to keep with --recompute"
                         f" {config.recompute}: drop one of them")
    if config.attn == "flash_attention_2" and config.compute_dtype != "bfloat16":
        raise ValueError("--attn flash_attention_2 computes in bfloat16: drop it or use sdpa")
    if config.model and not config.dataset and not config.random_weights:
        raise ValueError(f"--model {config.model} needs a --dataset: a JSONL file or a Hub id")
    if config.random_weights and not config.model:
        raise ValueError("--random_weights needs a --model whose config.json gives the shapes")
    shards = config.shard_group_size
    if shards is None and not config.model:
        shards = world_size  # the demo is there to show sharding
    if shards is not None and (shards < 1 or world_size % shards):
        sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f"--shard_group_size {shards} does not divide {world_size} processes: use"
                         f" one of {sizes}")
    return dataclasses.replace(
        config,
        shard_group_size=shards,
        learning_rate=config.learning_rate or (2e-4 if config.model else 5e-3),
        max_steps=config.max_steps or (None if config.model or config.dataset else 60),
        output_dir=config.output_dir or default_output_dir(config.resume))


def default_output_dir(resume):
    """A new directory below runs/, or with --resume the newest there."""
    if not resume:
        return f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    runs = sorted(p.parent for p in Path("runs").glob("*/train_config.json"))
    if not runs:
        raise ValueError("--resume without --output_dir: no run below runs/ to continue")
    return str(runs[-1])


# ------------------------------------------------------------------------------------------------
# The whole job
# ------------------------------------------------------------------------------------------------


def main(argv=None):
    """Returns the exit code."""
    device, config, exit_code = init_distributed(), None, 0
    try:
        with together():
            config = parse_config(argv)
        train(config, device)
    except (torch.OutOfMemoryError, MemoryError) as e:
        # the others wait in a collective that this rank will never join: torchrun ends them
        say_out_of_memory(e, config, device)
        return 1
    except Stop as e:
        if dist.get_rank() == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
        dist.barrier()  # torchrun kills rank 0 when another exits; let it print first
        exit_code = 1
    dist.destroy_process_group()
    return exit_code


def train(config, device):
    """The whole job, from flags to adapter. All ranks must call this."""
    # 1. Agree: the same flags, script and versions on all ranks, one output directory
    check_same(config)
    with together():
        config = resolve_config(config, dist.get_world_size())
    config = dataclasses.replace(config, output_dir=on_rank_0(lambda: config.output_dir))
    directory = open_output(config)
    limit = limit_memory(config, device)

    # 2. Data: all that can be wrong is found out before any weight is read
    if not config.model:
        make_demo(config, directory)
    with together():
        base = model_directory(config.model or str(directory / "demo" / "model"),
                               config.random_weights)
        model_config, arch = read_model_config(base, config)
        tokenizer = load_tokenizer(base) if config.dataset or not config.random_weights else None
    date = on_rank_0(run_date, config, directory)
    fix_date(date)
    with together():
        examples, data_line = prepare_data(config, directory, tokenizer, arch.vocab_size)
        data_sha256 = digest_examples(examples)
    if len(set(gather_objects(data_sha256))) > 1:
        raise Stop(f"--dataset {config.dataset}: not the same rows on all nodes: copy one to all")
    epoch_steps = math.ceil(config.num_epochs * len(examples) / config.batch_size)
    config = dataclasses.replace(config, max_steps=config.max_steps or epoch_steps)
    resume_from = find_checkpoint(config, directory, data_sha256) if config.resume else None

    # 3. Model: what of it is adapted, and the plan: what is sharded, recomputed, offloaded
    with together():
        lora_config, adapted = choose_adapted(arch, config, config.model or str(base))
        layout = make_layout(arch, adapted, config)
        kernels = choose_attention(config, arch, device)
    plan = agree_on_plan(config, arch, layout, examples, limit, device, kernels)
    say_start(config, plan, kernels, limit, data_line, device)
    if tokenizer:
        say_example(examples, tokenizer)
    if not config.random_weights:
        on_rank_0(check_family, model_config, config)

    # 4. Shard and load: built on meta, sharded by FSDP2, then each rank reads its own part
    mesh = make_mesh(plan.shard_group_size, device)
    model = Model(arch, layout, plan, plan.shard_group_size, mesh.get_group("shard"))
    shard_model(model, mesh, plan)
    names, stored = tensor_names(arch, {}), None
    if config.random_weights:
        read = random_reader(config.seed, getattr(torch, config.compute_dtype), device)
    else:
        with together():
            files = weight_files(base)
            names = tensor_names(arch, files)
        stored = check_files(files, names, model_config, config.compute_dtype)
        with together():
            read = file_reader(files, device)
    offsets = load_weights(model, names, read, device, stored)
    model.frequencies = [
        (f.to(device), factor) for f, factor in
        (rope_frequencies(rope, arch, config.max_seq_len, model_config) for rope in arch.ropes)]
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading used and training would use in other sizes
    say_memory("after loading", device)

    # 5. Adapter: fresh or from a checkpoint
    if resume_from:
        on_rank_0(check_base, directory, offsets)
    described = describe_run(config, plan, base.resolve(), device, examples, offsets, stored, date)
    on_rank_0(write_whole, directory / "train_config.json", json.dumps(described, indent=2))
    adapter = Adapter(model, arch, layout, device)
    if config.adapter == "dora":
        measure_rows(model)
    done = adapter.resume(resume_from, config) if resume_from else adapter.start(config.seed)
    verify_model(model, plan)
    frozen = sum(map(math.prod, names.shapes.values()))
    say(f"parameters: {adapter.n_trainable:,} trainable ({config.adapter}), {frozen:,} frozen")
    say_memory("before step 1", device)

    # 6. Loop and save
    run = types.SimpleNamespace(
        config=config, plan=plan, model=model, adapter=adapter, examples=examples, device=device,
        data_sha256=data_sha256, lora_config=lora_config, directory=directory, kernels=kernels,
        store=make_store(plan, arch, device), graphs={}, graph_pool=None)
    records = run_steps(run, done)
    if config.random_weights and records:
        say_speed(run, records)
    weights = adapter.gather()
    on_rank_0(write_adapter, directory, weights, lora_config)
    say_memory("at the end", device)
    say(f"adapter saved in {directory}; to merge it into the base model:")
    say(merge_command(directory))


def run_steps(run, done):
    """The training loop: steps, metrics, checkpoints. Returns one record of metrics a step. All
    ranks must call this."""
    config, plan, device, rank = run.config, run.plan, run.device, dist.get_rank()
    say(f"steps: {config.max_steps} of {config.batch_size} rows, in bins of at most"
        f" {plan.bin_tokens:,} tokens on {dist.get_world_size()} processes; peak learning rate"
        f" {config.learning_rate}")
    metrics, board = open_metrics(run.directory, done) if rank == 0 else (None, None)
    bar = tqdm(initial=done, total=config.max_steps, unit="step", disable=rank != 0)
    records, launched, before = [], [], moment(device)
    for step in range(done + 1, config.max_steps + 1):
        try:
            launched.append(train_step(run, step))
        except torch.OutOfMemoryError as e:
            e.where = f"at step {step}, in bins of at most {plan.bin_tokens} tokens"
            raise
        if step == done + 1:  # what is there now stays: a full collection would go through it all,
            gc.collect()  # on one rank at a time, while the others wait
            gc.freeze()
        save = step == config.max_steps or config.save_every and step % config.save_every == 0
        while len(launched) > (0 if save else 1):  # one stays launched: the GPU never waits
            records.append(finish_step(launched[0], before, device))
            *_, before = launched.pop(0)
            bar.update()
            if rank == 0:
                log_step(records[-1], config.max_steps, metrics, board)
        if save:
            save_checkpoint(run, step)
            before = moment(device)
    bar.close()
    if rank == 0:
        metrics.close()
        board.close()
    return records


# ------------------------------------------------------------------------------------------------
# Data: rows
# ------------------------------------------------------------------------------------------------


def read_rows(source):
    """The rows of a JSONL file, or of a Hub data set's train split, as a list of dicts."""
    path = Path(source)
    if not path.exists():
        if path.suffix in (".jsonl", ".json") or source.startswith((".", "/")):
            raise ValueError(f"--dataset {source}: no such file")
        import datasets

        try:
            return list(datasets.load_dataset(source, split="train"))
        except Exception as e:  # the Hub client has a dozen kinds of errors; each is the user's
            raise ValueError(f"--dataset {source}: neither a file nor readable from the Hub: {e}")
    if not path.is_file():
        raise ValueError(f"--dataset {source}: is a directory; name a JSONL file")
    rows = []
    with path.open("rb") as file:  # bytes: json tells the encoding, and names the bad line
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{source} line {number}: not JSON: {e}")
            if not isinstance(row, dict):
                raise ValueError(f"{source} line {number}: {type(row).__name__}, want an object")
            rows.append(row)
    return rows


def fix_date(day):
    """Let chat templates that print today's date, as Llama 3's does, print `day`, YYYY-MM-DD: a
    resumed run must see the same rows, and so must all ranks around midnight."""

    class RunDay(datetime):
        now = classmethod(lambda cls, tz=None: cls.fromisoformat(day))

    transformers.utils.chat_template_utils.datetime = RunDay


def run_date(config, directory):
    """The day when the run was begun. Rank 0 only."""
    path = directory / "train_config.json"
    begun = json.loads(path.read_text()) if config.resume and path.is_file() else {}
    return begun.get("date", time.strftime("%Y-%m-%d"))


def encode_chat(messages, tokenizer):
    """A conversation as (input_ids, labels); what the assistant says is learnt.

    Each assistant turn begins after the template's generation prompt and ends where the template
    of the conversation up to it ends, so that its end-of-turn token is learnt.
    """
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = template(messages), []  # (start, end) in characters
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = template(messages[:i], add_generation_prompt=True)
            end = template(messages[: i + 1])
            if not (end.startswith(start) and text.startswith(end)):
                raise ValueError("the chat template rewrites earlier turns, so the assistant's"
                                 " part cannot be told; use prompt and completion")
            spans.append((len(start), len(end)))
    if not spans:
        raise ValueError("messages has no assistant turn")
    if not text.rstrip().endswith(tokenizer.eos_token) and spans[-1][1] == len(text):
        text += tokenizer.eos_token
        spans[-1] = (spans[-1][0], len(text))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = encoded["input_ids"]
    labels = [  # by overlap: a token may begin with the space before the turn
        token if any(a < end and b > start for start, end in spans) else IGNORE
        for token, (a, b) in zip(ids, encoded["offset_mapping"])]
    return ids, labels


def encode_row(row, tokenizer):
    """One row as (input_ids, labels), two lists; labels are IGNORE where nothing is learnt."""
    for name in ("prompt", "completion", "text"):
        if name in row and not isinstance(row[name], str):
            raise ValueError(f"{name} is {type(row[name]).__name__}, want a string")
    if "messages" in row:
        if not tokenizer.chat_template:
            raise ValueError("has messages, but the tokenizer has no chat template")
        return encode_chat(row["messages"], tokenizer)
    eos = [tokenizer.eos_token_id]

    def tokenize(text, **options):  # tokenizers put BOS in front, if they have one; some append EOS
        ids = tokenizer(text, **options)["input_ids"]
        while ids[-1:] == eos:
            ids = ids[:-1]
        return ids

    if "prompt" in row and "completion" in row:
        prompt = tokenize(row["prompt"])
        completion = tokenize(row["completion"], add_special_tokens=False) + eos
        return prompt + completion, [IGNORE] * len(prompt) + completion
    if "text" in row:
        # without text EOS would be learnt alone: to stop at once
        ids = tokenize(row["text"]) + eos if row["text"].strip() else []
        return ids, ids
    raise ValueError(f"has {sorted(row)}; want prompt and completion, text, or messages")


def encode_dataset(rows, tokenizer, max_seq_len, source):
    """All rows as (input_ids, labels) int32 tensors, cut to max_seq_len; those that then have
    nothing to learn are left out. Returns them and the numbers of rows cut and left out."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token: generation would never stop")
    examples, cut = [], 0
    for number, row in enumerate(rows, 1):
        try:
            ids, labels = encode_row(row, tokenizer)
        except Exception as e:  # the chat template's own errors are jinja2's
            raise ValueError(f"{source} row {number}: {e}")
        cut += len(ids) > max_seq_len
        ids, labels = torch.tensor([ids[:max_seq_len], labels[:max_seq_len]], dtype=torch.int32)
        if (labels[1:] != IGNORE).any():  # the first token has no predecessor to be predicted from
            examples.append((ids, labels))
    if not examples:
        raise ValueError(f"{source}: none of its {len(rows)} rows has anything to learn")
    return examples, cut, len(rows) - len(examples)


def random_examples(vocab_size, config):
    """Rows of random tokens, all of full length, for measuring without a data set."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.batch_size, config.max_seq_len)
    ids = torch.randint(vocab_size, shape, generator=generator, dtype=torch.int32)
    return [(row, row) for row in ids]


def prepare_data(config, directory, tokenizer, vocab_size):
    """The examples, and a line on what became of the rows."""
    if config.random_weights and not config.dataset:
        examples = random_examples(vocab_size, config)
        return examples, f"data: {len(examples)} rows of random tokens"
    source = config.dataset or str(directory / "demo" / "data.jsonl")
    rows = read_rows(source)
    if not rows:
        raise ValueError(f"--dataset {source}: has no rows")
    examples, cut, dropped = encode_dataset(rows, tokenizer, config.max_seq_len, source)
    largest = max(int(ids.max()) for ids, _ in examples)
    if largest >= vocab_size:
        raise ValueError(f"the tokenizer gives token {largest}, but the model's vocabulary ends at"
                         f" {vocab_size - 1}")
    tokens, learnt = sum(len(ids) for ids, _ in examples), count_learnt(examples)
    return examples, (
        f"data: {source}: {len(rows)} rows, {dropped} left out with nothing to learn, {cut} cut to"
        f" {config.max_seq_len} tokens; {tokens:,} tokens, {learnt:,} of them learnt")


def count_learnt(examples):
    """Tokens that the loss is taken of; the first has no predecessor to be predicted from."""
    return sum(int((labels[1:] != IGNORE).sum()) for _, labels in examples)


def digest_examples(examples):
    """SHA-256 of all rows' tokens and labels: whether a resumed run sees the same data."""
    sha = hashlib.sha256()
    for ids, labels in examples:
        sha.update(len(ids).to_bytes(8, "little"))  # where rows end
        sha.update(ids.numpy().tobytes() + labels.numpy().tobytes())
    return sha.hexdigest()


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch, n_examples, seed):
    """The shuffled indices of one epoch's rows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n_examples, generator=generator).tolist()


def step_rows(step, n_examples, config):
    """Indices of the rows of an optimizer step (the first is 1): every epoch is a new shuffle."""
    return [epoch_order(at // n_examples, n_examples, config.seed)[at % n_examples]
            for at in range((step - 1) * config.batch_size, step * config.batch_size)]


# ------------------------------------------------------------------------------------------------
# Data: bins
# ------------------------------------------------------------------------------------------------


def deal_rows(lengths, processes, most):
    """Deal rows of these lengths into bins of at most `most` tokens: as few micro-batches of one
    bin a process as even bins allow. Returns for each micro-batch a list of row indices
    for each process; the same on all ranks, which all know all lengths."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for n in range(max(1, math.ceil(sum(lengths) / (processes * most))), len(lengths) + 1):
        bins = [(0, at, []) for at in range(n * processes)]  # a heap: the emptiest comes first
        for i in longest_first:
            tokens, at, rows = bins[0]
            heapq.heapreplace(bins, (tokens + lengths[i], at, [*rows, i]))
        if max(bins)[0] <= most:
            break
    fullest_first = [sorted(rows) for _, _, rows in sorted(bins, key=lambda b: (-b[0], b[1]))]
    return [fullest_first[i : i + processes] for i in range(0, len(bins), processes)]


def round_up(n, device):
    """On a GPU, n up to the next of a few lengths, 16 from one power of 2 to the next: cuBLAS and
    cuDNN choose kernels anew for each new length, and a CUDA graph has one."""
    if device.type == "cpu":
        return n
    step = max(64, 2 ** n.bit_length() // 32)
    return math.ceil(n / step) * step


@dataclasses.dataclass
class Bin:
    """What a GPU works on at once: documents, which are rows of the data set, end to end. Padding
    to a round length is documents of its own, no longer than the others."""

    input_ids: torch.Tensor  # int64 [tokens]
    position_ids: torch.Tensor  # int64 [tokens], 0 at the first token of each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], where they begin and end
    learnt: torch.Tensor  # int64 [n], tokens whose successor is learnt, padded with 0
    labels: torch.Tensor  # int64 [n], these successors, padded with IGNORE
    dropout_keys: torch.Tensor  # int64 [tokens], see drop()
    lengths: tuple  # of the documents
    seeds: tuple  # of the documents, for attention's own dropout
    longest: int  # upper bound of `lengths`
    kernels: dict = None  # the attention to use: {"full": function, "window": function}
    store: object = None  # where layers put what they keep
    ropes: dict = None  # cos and sin, see rope_tables


def make_bin(batch, micro_batch, rank, step_key, run):
    """This rank's Bin of a micro-batch of deal_rows(); `batch` are the rows of the step. All ranks'
    bins have one shape: embedding and head are computed together, and for the longest all wait."""
    device = run.device
    lengths = [[len(batch[i][0]) for i in rows] for rows in micro_batch]
    all_lengths = {n for row in lengths for n in row}
    n_tokens, longest = max(map(sum, lengths)), max(all_lengths)
    if len(all_lengths) > 1:
        n_tokens = min(round_up(n_tokens, device), run.plan.bin_tokens)  # no more than planned
    most = max(count_learnt([batch[i] for i in rows]) for rows in micro_batch)
    mine, lengths = micro_batch[rank], lengths[rank]
    left = n_tokens - sum(lengths)
    lengths = lengths + [longest] * (left // longest) + [left % longest] * (left % longest > 0)
    ids, labels = torch.zeros(n_tokens, dtype=torch.int64), torch.full((n_tokens,), IGNORE)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for i, start in zip(mine, starts.tolist()):
        row_ids, row_labels = batch[i]
        ids[start : start + len(row_ids)] = row_ids
        labels[start : start + len(row_ids) - 1] = row_labels[1:]
    learnt = (labels != IGNORE).nonzero().view(-1)
    padding = (0, round_up(most, device) - len(learnt))
    position_ids = torch.arange(n_tokens) - starts[:-1].repeat_interleave(starts.diff())
    seeds = mix(step_key + torch.tensor([*mine, *[-1] * (len(lengths) - len(mine))]))
    same = len(set(lengths)) == 1
    if run.plan.graphs and not same:  # one graph serves several numbers of documents
        longest = 2 ** (longest - 1).bit_length()
        spare = 2 ** len(lengths).bit_length() - len(lengths)
        starts = F.pad(starts, (0, spare), value=n_tokens)
    tensors = (
        ids, position_ids, starts.int(), F.pad(learnt, padding),
        F.pad(labels[learnt], padding, value=IGNORE),
        seeds.repeat_interleave(torch.tensor(lengths)) + position_ids)
    if device.type == "cuda":
        tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    kernels = run.kernels["same" if same else "any"]
    seeds = tuple(abs(seed) for seed in seeds.tolist())
    return Bin(*tensors, tuple(lengths), seeds, longest, kernels, run.store)


# ------------------------------------------------------------------------------------------------
# What is adapted, and what is sharded
# ------------------------------------------------------------------------------------------------


def choose_adapted(arch, config, base_name):
    """PEFT's LoraConfig, and the names below a layer of the linears that get an adapter."""
    names = [linear.name for linear in arch.linears]
    short = sorted({name.rsplit(".", 1)[-1] for name in names})
    targets = short if config.target_modules == ("all-linear",) else list(config.target_modules)
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ValueError(f"--target_modules {target}: no such linear in the decoder layers;"
                             f" there are {', '.join(short)}, or all-linear")
    if arch.module_prefix != "model.":  # a vision tower may have linears of the same names
        ends = "|".join(re.escape(target) for target in targets)
        targets = rf"{re.escape(arch.module_prefix)}layers\.\d+\..*\b({ends})"
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.adapter == "rslora",
        use_dora=config.adapter == "dora",
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name)
    stem = f"{arch.module_prefix}layers.0."
    adapted = [n for n in names if check_target_module_exists(lora_config, stem + n)]
    return lora_config, adapted


def shard_model(model, mesh, plan):
    """Make each decoder layer an FSDP2 unit. Where a GPU holds a whole copy of the model there is
    nothing to gather, and no FSDP2; offloaded weights are FSDP2's to bring."""
    if plan.whole:
        return
    dtype = getattr(torch, plan.compute_dtype)
    policy = MixedPrecisionPolicy(
        # in bf16 DoRA's magnitudes would round by up to 0.4 %, as much as they learn in many steps
        param_dtype=None if model.layers[0].layout.dora else dtype,
        reduce_dtype=torch.float32, cast_forward_inputs=False)
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    for layer in model.layers:
        shard(layer, reshard_after_forward=plan.reshard_after_forward)
    shard(model)
    for unit, following in zip([model, *model.layers], model.layers):
        # before its own work, not when the next one begins: there the host may be late
        unit.set_modules_to_forward_prefetch([following])
    for unit in (model, *model.layers):
        # the loss is divided by the global number of tokens already, so gradients add up
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)


# ------------------------------------------------------------------------------------------------
# Schedule and training step
# ------------------------------------------------------------------------------------------------


def learning_rate(step, max_steps, peak):
    """Of step 1..max_steps: linear warm-up to `peak`, then a cosine to 0."""
    warmup = max(1, round(WARMUP_FRACTION * max_steps))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps + 1 - warmup)))


def train_step(run, step):
    """Launch one optimizer step; do not wait. Returns what finish_step needs: a record of metrics;
    loss (mean over the learnt tokens of the global batch) and gradient norm before clipping, on
    their way to the host; the moment of its end. All ranks must call this."""
    config, plan, adapter = run.config, run.plan, run.adapter
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch = [run.examples[i] for i in step_rows(step, len(run.examples), config)]
    # every rank holds all rows' tokens, so that the global count needs no communication
    learnt_tokens, tokens = count_learnt(batch), sum(len(ids) for ids, _ in batch)
    micro_batches = deal_rows([len(ids) for ids, _ in batch], world_size, plan.bin_tokens)
    step_key = mix(torch.tensor(config.seed * 1_000_003 + step))
    local_loss, room = torch.zeros((), dtype=torch.float64, device=run.device), 0
    for micro_batch in micro_batches:
        bin = make_bin(batch, micro_batch, rank, step_key, run)
        room += world_size * len(bin.input_ids)
        if isinstance(run.model, FSDPModule) and plan.shard_group_size < world_size:
            # copies of the model exchange gradients once a step, not once a micro-batch
            run.model.set_requires_all_reduce(micro_batch is micro_batches[-1])
        local_loss += bin_loss(run, bin, 1 / learnt_tokens)
    loss, norm = adapter.clip(local_loss)
    rate = learning_rate(step, config.max_steps, config.learning_rate)
    adapter.update(rate)
    record = {"step": step, "loss": None, "learning_rate": rate, "grad_norm": None,
              "rows": len(batch), "tokens": tokens, "learnt_tokens": learnt_tokens,
              "bins": world_size * len(micro_batches), "bins_full": tokens / room}
    numbers = torch.stack([loss / learnt_tokens, norm])
    numbers = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda).copy_(
        numbers, non_blocking=True)
    return record, numbers, moment(run.device)


def bin_loss(run, bin, scale):
    """The sum of the bin's token losses; adds the gradient of `scale` times it to the adapter's.
    All ranks must call this."""
    if run.plan.graphs:
        return graphed_loss(run, bin, scale)
    loss = run.model(bin)
    (loss * scale).backward()
    return loss.detach()


def finish_step(launched, before, device):
    """Wait for what train_step launched and return its record; `before`: the moment when the step
    before it ended. All ranks see the same loss and norm, and stop together if they are not finite;
    the update that they led to is never saved."""
    record, numbers, end = launched
    record["seconds"] = seconds = seconds_between(before, end)
    record["tokens_per_second_per_gpu"] = record["tokens"] / seconds / dist.get_world_size()
    record["peak_memory_gib"] = memory_gib(device)[1]
    loss, norm = numbers.tolist()
    if not math.isfinite(loss + norm):
        raise Stop(f"step {record['step']}: loss {loss}, gradient norm {norm}; stopped, and nothing"
                   " of this step is saved. A lower --learning_rate may help; --resume continues"
                   " the last checkpoint")
    return {**record, "loss": loss, "grad_norm": norm}


# ================================================================================================
# Part II, the engine room
# ================================================================================================

# ------------------------------------------------------------------------------------------------
# Ranks and errors
# ------------------------------------------------------------------------------------------------

TIMEOUT = timedelta(hours=1)  # a node may be slow to read a model that another has in memory


def init_distributed():
    """Join torchrun's processes, or be the only one. Returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    options = {"backend": "gloo", "timeout": TIMEOUT}
    if "RANK" not in os.environ:  # plain `python`: no rendezvous needed
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            sys.exit(f"rank on GPU {local_rank}, but there are {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local_rank)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device)
        # tensors of all sizes come and go, and gaps between fixed segments cannot be joined
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # what the host computes is small: waking threads takes longer
    else:  # torchrun allows each process one thread; share the cores instead
        device = torch.device("cpu")
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group(**options)
    transformers.utils.logging.disable_progress_bar()
    if local_rank:  # one rank of a machine shows how the Hub's downloads go
        huggingface_hub.utils.disable_progress_bars()
    # on a CPU bitsandbytes keeps the paged optimizer's state unpaged, which is what we want there
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    return device


def is_rank_0():
    return int(os.environ.get("RANK", 0)) == 0


def this_rank():
    """What errors call this process."""
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def say(message):
    """Print from rank 0."""
    if is_rank_0():
        tqdm.write(message)
        sys.stdout.flush()


def all_gather(tensor, group=None):
    """[ranks, *shape] of every rank's tensor [*shape]. All ranks of the group must call this."""
    rows = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(rows), tensor, group=group)
    return rows


def gather_objects(value):
    """Every rank's value, of a kind that JSON has, in rank order. All ranks must call this."""
    # not torch's all_gather_object: it pickles
    data = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor(len(data))).tolist()
    rows = all_gather(F.pad(data, (0, max(sizes) - len(data))))
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]


class Stop(Exception):
    """An error that all ranks know of and raise together, so that none is left waiting."""


@contextlib.contextmanager
def together():
    """If the `with` body fails on one rank, all ranks raise Stop with that rank's error.

    Libraries raise all kinds of errors for what a user can cause, so that only an assertion counts
    as a bug here. The body must not use collectives. All ranks must call this.
    """
    error = ""
    try:
        yield
    except (AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        error = " ".join(str(e).split())
        if not error or not isinstance(e, (ValueError, OSError)):
            error = f"{type(e).__name__}: {error}"
    failed = [e for e in gather_objects(error) if e]
    if failed:
        raise Stop(failed[0])


def on_rank_0(function, *args):
    """Run `function` on rank 0 alone; all get what it returns. All ranks must call this."""
    value = None
    with together():
        if dist.get_rank() == 0:
            value = function(*args)
    return gather_objects(value)[0]


def check_same(config):
    """Stop unless every rank runs the same script, versions and flags. All ranks must call this."""
    script, python = Path(__file__), "python {}.{}".format(*sys.version_info)
    facts = [(f"runs a script with SHA-256 {digest(script)}",
              f"another version of {script.name}, copy one to all nodes")]
    for version in [*(f"{m.__name__} {m.__version__}" for m in LIBRARIES), python]:
        facts.append((f"has {version}", "install the same on all nodes"))
    for name, value in vars(config).items():
        facts.append((f"runs --{name} {value}", "start all nodes with the same command"))
    (first, first_facts), *others = gather_objects((this_rank(), facts))
    for other, other_facts in others:
        for (fact, remedy), (other_fact, _) in zip(first_facts, other_facts):
            if other_fact != fact:
                raise Stop(f"{other} {other_fact}, {first} {fact}: {remedy}")


def open_output(config):
    """Make the output directory, which all ranks must see: each writes its part of a checkpoint.
    All ranks must call this."""
    directory = Path(config.output_dir)

    def make():
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ValueError(f"--output_dir {directory}: cannot be made: {e}; name another")
        used = [*directory.glob("adapter_*"), *directory.glob("checkpoint-*")]
        if used and not config.resume:
            raise ValueError(f"--output_dir {directory} holds a run already ({used[0].name}): add"
                             " --resume to continue it, or name another directory")
        for torn in directory.glob(".checkpoint-*.part"):  # of a run that ended while saving
            shutil.rmtree(torn)
        mark = directory / f".opened-on-{socket.gethostname()}-{time.time_ns()}"
        mark.touch()
        return str(mark)

    mark = Path(on_rank_0(make))
    with together():
        if not mark.is_file():
            raise ValueError(f"--output_dir {directory}: {this_rank()} does not see {mark.name},"
                             " which rank 0 wrote there: name a directory that all nodes share")
    on_rank_0(mark.unlink)
    return directory


def limit_memory(config, device):
    """The GPU memory in bytes that this run may use: --memory_limit_gib or what is free now, of all
    GPUs the least; 0 on a CPU without that flag. The limit is what torch allocates: what CUDA and
    NCCL need for themselves, about 1 GiB, is beside it. All ranks must call this."""
    limit = int((config.memory_limit_gib or 0) * 2**30)
    with together():
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            if limit > free:
                raise ValueError(f"--memory_limit_gib {config.memory_limit_gib}: of this GPU's"
                                 f" {total / 2**30:.1f} GiB only {free / 2**30:.1f} are free")
            if limit:
                torch.cuda.set_per_process_memory_fraction(limit / total)
            limit = limit or free
    return min(gather_objects(limit))


def proc_bytes(file, name):
    """A size that a file of /proc names, in bytes; inf where there is no /proc, as on macOS."""
    path = Path("/proc", file)
    sizes = re.findall(rf"{name}:\s*(\d+) kB", path.read_text()) if path.is_file() else ["inf"]
    return float(sizes[0]) * 2**10


def host_memory():
    """This process's resident bytes now and at their peak."""
    return proc_bytes("self/status", "VmRSS"), proc_bytes("self/status", "VmHWM")


def host_share():
    """Bytes of this machine's free memory for each of its processes."""
    return proc_bytes("meminfo", "MemAvailable") / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_gib(device):
    """Now and at the peak: allocated on a GPU, else the resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    now, peak = host_memory()
    return now / 2**30, peak / 2**30


def say_loading(before, seconds, n_bytes):
    """`before` is host_memory() at the start. All ranks must call this."""
    more = (host_memory()[1] - before[0]) / 2**30  # the peak may be from before
    texts = gather_objects(f"{n_bytes / 1e9:.3f} GB at {n_bytes / 1e9 / seconds:.2f} GB/s with at"
                           f" most {more:.2f} GiB more host memory")
    say(f"weights loaded in {seconds:.2f} s; each rank: {', '.join(texts)}")


def say_memory(when, device):
    """All ranks must call this."""
    now, peak = memory_gib(device)
    kind = "GPU memory" if device.type == "cuda" else "host memory"
    texts = gather_objects(f"{now:.2f} (peak {peak:.2f})")
    say(f"{kind} per rank {when}, GiB: {', '.join(texts)}")


def say_out_of_memory(error, config, device):
    """One line from the rank that it happened to, whether on its GPU or on the host."""
    if isinstance(error, MemoryError):
        text = f": {error or 'no host memory left'}; offload less"
    else:
        is_on = {
            "--reshard_after_forward": config.reshard_after_forward,
            "--recompute all": config.recompute == "all",
            "--offload_activations": config.offload_activations,
            "--offload_params": config.offload_params}
        helps = [flag for flag in is_on if not is_on[flag]]
        helps += ["a smaller --micro_batch_tokens", "a shorter --max_seq_len"]
        where = getattr(error, "where", "outside of the steps (loading or saving)")
        text = f" ran out of memory {where}; peak {memory_gib(device)[1]:.2f} GiB allocated"
        if asked := re.search(r"Tried to allocate ([\d.]+ \w+)", str(error)):
            text += f", {asked[1]} more asked for"
        if gaps := re.search(r"([\d.]+ \w+) is reserved by PyTorch but unallocated", str(error)):
            text += f", {gaps[1]} in gaps"
        text += f"; try, in this order: {', '.join(helps)}"
    # on a new line: rank 0 may have drawn a progress bar on this one
    print(f"\nerror: {this_rank()}{text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------------
# Sharding and logs
# ------------------------------------------------------------------------------------------------


def make_mesh(shards, device):
    """Groups of `shards` consecutive ranks hold a copy of the model each (HSDP), or all ranks one.
    Within a group weights are gathered and gradients scattered, all the time; across groups only
    the adapter's gradients are summed."""
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    if len(ranks) == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    # not init_device_mesh: it splits the default group, which torch may refuse where that has a
    # backend each for CPU and GPU ("Unknown c10d backend type", pytorch issue 159200)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=TIMEOUT)[0]
        for rows in (ranks.t(), ranks)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def verify_model(model, plan):
    """Assert that loading and sharding left what they should; print the bytes per rank. All ranks
    must call this."""
    n_bytes = collections.Counter()
    for i, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            local = local_part(p)
            assert plan.whole or isinstance(p, DTensor), f"layer {i}: {name} is not sharded"
            assert not local.is_meta, f"layer {i}: {name} was not loaded"
            assert p.requires_grad == (name == "adapter"), f"layer {i}: {name} {p.requires_grad=}"
            shards = 1 if plan.whole else p.device_mesh["shard"].size()
            assert len(local) * shards == len(p), f"layer {i}: {name} is not sharded evenly"
            parts = [local.packed, local.absmax_codes] if name == "nf4" else [local]
            kind = {"nf4": "4-bit", "vectors": "other frozen"}.get(name, "adapter")
            n_bytes[kind] += sum(part.nbytes for part in parts)
            if parts[0].is_cpu and torch.cuda.is_available():
                n_bytes["of these on the host"] += sum(part.nbytes for part in parts)
    tables = {id(t): t.nbytes for t in (model.embedding, model.head, model.norm)}
    n_bytes["other frozen"] += sum(tables.values())
    text = ", ".join(f"{kind} {n / 2**30:.3f}" for kind, n in n_bytes.items())
    for rank, line in enumerate(gather_objects(text)):
        say(f"rank {rank} holds, GiB: {line}")


def open_metrics(directory, done):
    """metrics.jsonl and TensorBoard, without what a resumed run will do again. Rank 0 only."""
    from torch.utils.tensorboard import SummaryWriter

    path = directory / "metrics.jsonl"
    kept = path.read_text().splitlines(True) if done and path.is_file() else []
    write_whole(path, "".join(kept[:done]))
    return path.open("a"), SummaryWriter(directory / "tensorboard", purge_step=done + 1)


def log_step(record, max_steps, metrics, board):
    """One step's record to metrics.jsonl, TensorBoard and the log. Rank 0 only."""
    metrics.write(json.dumps(record) + "\n")
    metrics.flush()
    for key, value in record.items():
        board.add_scalar(key, value, record["step"])
    say("step {step:6d}/{max_steps}  loss {loss:7.4f}  lr {learning_rate:.2e}"
        "  grad {grad_norm:8.4f}  {rows} rows  {tokens:,} tokens in {bins} bins"
        " {bins_full:.0%} full  {tokens_per_second_per_gpu:9,.0f} tok/s/GPU"
        "  peak {peak_memory_gib:6.2f} GiB".format(max_steps=max_steps, **record))


def say_example(examples, tokenizer):
    """Show one row as the model sees it, with what is not learnt in brackets."""
    parts = []
    for token, label in zip(*(t.tolist() for t in examples[0])):
        if not parts or parts[-1][0] != (label != IGNORE):
            parts.append((label != IGNORE, []))
        parts[-1][1].append(token)
    text = "".join(
        tokenizer.decode(tokens) if learnt else f"[not learnt: {tokenizer.decode(tokens)}]"
        for learnt, tokens in parts)
    say(f"first row: {text[:600]!r}")


def moment(device):
    """A time stamp among the GPU's launched work; on a CPU, which does not launch ahead, now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before, after):
    """Seconds between two moments. Waits until the GPU has come to `after`, not for later work."""
    if isinstance(after, float):
        return after - before
    after.synchronize()
    return before.elapsed_time(after) / 1000


def merge_command(directory):
    """What to type to merge the adapter of a run."""
    merge = Path(__file__).with_name("merge_adapters.py")
    merge = os.path.relpath(merge) if merge.is_file() else merge.name  # copied alone
    found, python = shutil.which("python"), os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    if found and Path(found).parent == Path(sys.executable).parent:
        python = "python"
    output = f"{directory}/merged"
    return shlex.join([python, merge, "--adapter_dir", str(directory), "--output_dir", output])


# ------------------------------------------------------------------------------------------------
# The decoder layer: forward and backward
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where one linear's values are in its layer's parameters and in its group's tensors."""

    linear: object  # a Linear
    blocks: slice  # of the layer's `nf4`
    rows: slice  # of the group's weight and outputs
    ranks: slice | None  # of the adapter's columns; None: no adapter
    b_rows: slice | None  # of the group's B and magnitudes


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Linears that read one input and are computed as one product."""

    site: int  # 0 to 3: tells groups apart, and their dropout
    places: tuple  # of Place, one a linear
    in_features: int
    out_features: int
    rank: int  # of each adapter
    a: slice  # of the layer's `adapter`: A of all, [ranks, in]
    b: slice  # B of all, one below the other, [rows of the adapted linears, rank]
    m: slice | None  # DoRA's magnitudes, [rows of the adapted linears]
    bias: slice | None  # of the layer's `vectors`

    @property
    def adapted(self):
        return [place for place in self.places if place.ranks]

    @property
    def ranks(self):
        return len(self.adapted) * self.rank

    @property
    def width(self):
        """Columns of an input and of the weight: `in_features`, then one a rank, filled up to
        whole cache lines."""
        return self.in_features + math.ceil(self.ranks / COLUMNS) * COLUMNS


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a layer's three parameters hold; the same for all layers of a model."""

    groups: tuple  # of Group: qkv, out, gate_up, down
    vectors: dict  # {name below the layer: (slice, shape)}
    n_blocks: int  # of `nf4`
    n_vectors: int  # values of `vectors`
    n_adapter: int  # values of `adapter`, a multiple of STATE_BLOCK
    scaling: float  # of B @ A
    dropout: float  # on the adapters' input
    dora: bool

    @property
    def places(self):
        return [place for group in self.groups for place in group.places]

    def adapter_parts(self):
        """{(linear's name, PEFT's key): (slice of `adapter`, shape)}."""

        def part(whole, first_row, *shape):
            start = whole.start + first_row * math.prod(shape[1:])
            return slice(start, start + math.prod(shape)), shape

        parts = {}
        for group in self.groups:
            for p in group.adapted:
                name, n_out = p.linear.name, p.linear.out_features
                parts[name, "lora_A.weight"] = part(
                    group.a, p.ranks.start, group.rank, group.in_features)
                parts[name, "lora_B.weight"] = part(group.b, p.b_rows.start, n_out, group.rank)
                if self.dora:
                    parts[name, "lora_magnitude_vector"] = part(group.m, p.b_rows.start, n_out)
        return parts


def make_layout(arch, adapted, config):
    """The Layout of a model whose linears named `adapted`, below a layer, get an adapter."""
    vectors, counts, groups = {}, collections.Counter(), []

    def take(kind, n, multiple=1):
        start = counts[kind]
        counts[kind] += math.ceil(n / multiple) * multiple
        return slice(start, start + n)

    for name, shape in arch.vectors.items():  # biases of one group follow one another
        vectors[name] = take("vectors", math.prod(shape)), shape
    for site, linears in enumerate((arch.qkv, arch.out, arch.gate_up, arch.down)):
        places, rows, ranks, b_rows = [], 0, 0, 0
        for x in linears:
            blocks = take("blocks", math.ceil(x.out_features * x.in_features / BLOCK))
            place = Place(x, blocks, slice(rows, rows + x.out_features), None, None)
            if x.name in adapted:
                place = dataclasses.replace(
                    place, ranks=slice(ranks, ranks + config.lora_rank),
                    b_rows=slice(b_rows, b_rows + x.out_features))
                ranks, b_rows = place.ranks.stop, place.b_rows.stop
            places.append(place)
            rows += x.out_features
        bias = None
        if linears[0].bias:
            first, last = (vectors[f"{linears[i].name}.bias"][0] for i in (0, -1))
            bias = slice(first.start, last.stop)
        # so that no block of the optimizer's state belongs to two of A, B, magnitudes
        a, b, m = (take("adapter", n, STATE_BLOCK) for n in (
            ranks * linears[0].in_features, b_rows * config.lora_rank,
            b_rows * (config.adapter == "dora")))
        groups.append(Group(site, tuple(places), linears[0].in_features, rows, config.lora_rank,
                            a, b, m if config.adapter == "dora" else None, bias))
    root = math.sqrt(config.lora_rank) if config.adapter == "rslora" else config.lora_rank
    return Layout(tuple(groups), vectors, counts["blocks"], counts["vectors"], counts["adapter"],
                  config.lora_alpha / root, config.lora_dropout, config.adapter == "dora")


class DecoderLayer(nn.Module):
    """One decoder layer. It has three parameters, because FSDP2's work on the host is by parameter:
    `nf4`, the weights of all linears; `vectors`, norms and biases; `adapter`, A and B of all."""

    def __init__(self, arch, layout, index, plan, shards):
        super().__init__()
        self.arch, self.layout, self.index, self.plan = arch, layout, index, plan
        self.keeps = plan.keeps(index)
        self.window, self.rope = arch.layer_window[index], arch.layer_rope[index]
        self.nested = {}  # {group's site: Nested}
        self.row_norms = {}  # DoRA: {group's site: norms of the rows of W, fp32}

        def parameter(n, multiple, make, trained=False):  # padded, so that FSDP2 shards evenly
            n = math.ceil(n / multiple / shards) * multiple * shards
            return nn.Parameter(make(n, device="meta"), requires_grad=trained)

        dtype = getattr(torch, plan.compute_dtype)
        self.nf4 = parameter(layout.n_blocks, 1, NF4Blocks.zeros)
        self.vectors = parameter(layout.n_vectors, 1, functools.partial(torch.empty, dtype=dtype))
        self.adapter = parameter(layout.n_adapter, STATE_BLOCK, torch.empty, trained=True)

    def forward(self, x, bin):
        return LayerFunction.apply(x, self.adapter, self, bin)


class LayerFunction(torch.autograd.Function):
    """A decoder layer from x [tokens, hidden] to the same: attention, then the MLP, each with its
    residual sum.

    What is kept from forward to backward is one of three: "all"; "middle", which is x and the sum
    after attention; "x" alone. What is not kept is computed again in backward. There the parameters
    are read from the layer, where FSDP2 has put the gathered ones back.
    """

    @staticmethod
    def forward(ctx, x, adapter, layer, bin):
        ctx.layer, ctx.bin, x = layer, bin, x.detach()
        run, keep, put = LayerRun(layer, bin), layer.keeps == "all", bin.store.put
        first = None if keep else put(x)  # on its way to the host while attention runs
        middle, of_attention = attention_half(run, x)
        if not keep:
            of_attention = None
            ctx.kept = first, put(middle) if layer.keeps == "middle" else None
        out, of_mlp = mlp_half(run, middle, x, keep)
        if keep:
            ctx.kept = of_attention, of_mlp
        return out

    @staticmethod
    def backward(ctx, grad):
        layer, bin, (first, second) = ctx.layer, ctx.bin, ctx.kept
        ctx.kept, run = None, LayerRun(layer, bin, backward=True)
        if layer.keeps == "all":
            of_attention, of_mlp = first, second
            grad_middle = mlp_backward(run, of_mlp, grad)
        else:
            take, of_attention = bin.store.take, None
            middle = take(second) if layer.keeps == "middle" else None
            x = take(first) if middle is None or layer.arch.parallel else None
            if middle is None:
                middle, of_attention = attention_half(run, x)
            grad_middle = mlp_half_again(run, middle, x, grad)
            x = take(first) if x is None else x  # it came back while the MLP ran
            run.held.clear()
            if of_attention is None:
                _, of_attention = attention_half(run, x, again=True)
            del middle, x
        # in a parallel layer (Cohere) attention gets the layer's own gradient, and what came
        # through the MLP is x's already
        upstream = grad if layer.arch.parallel else grad_middle
        needs_x = ctx.needs_input_grad[0]
        grad_x = attention_backward(run, of_attention, upstream, grad_middle, needs_x)
        return grad_x, run.grad_adapter, None, None


class LayerRun:
    """What one forward or backward of a layer works with: the gathered adapter in the compute
    dtype, dequantised weights, and in backward the adapter's gradient, fp32."""

    def __init__(self, layer, bin, backward=False):
        self.layer, self.bin, self.arch, self.layout = layer, bin, layer.arch, layer.layout
        self.tokens = slice(None)  # of the bin: those that are worked on, see mlp_half
        self.adapter = layer.adapter.detach().to(layer.vectors.dtype)
        self.held, self.hold = {}, backward and layer.plan.hold_weights  # {group's site: weight}
        if backward:
            self.grad_adapter = torch.zeros_like(self.adapter, dtype=torch.float32)

    def weight(self, group):
        """[W, B] of a group, [out, width]; in backward held, where memory allows, for its second
        use."""
        weight = self.held.get(group.site)
        if weight is None:
            weight = dequantise_group(self.layer, group, self.adapter)
        if self.hold:
            self.held[group.site] = weight
        return weight

    def vector(self, name):
        """A norm's weight by its name below the layer; None for None."""
        if name is None:
            return None
        where, shape = self.layout.vectors[f"{name}.weight"]
        return self.layer.vectors[where].view(shape)

    def drop(self, x, probability, site):
        """x [n, width] after dropout; the same at the same site when computed again."""
        if not probability:
            return x
        return drop(x, self.bin.dropout_keys[self.tokens], self.layer.index * 8 + site, probability)


def attention_half(run, x, again=False):
    """x + attention(norm(x)) [tokens, hidden], and what its backward needs. `again`: in backward,
    where the sum is not wanted."""
    arch, (qkv, out, *_) = run.arch, run.layout.groups
    kept = types.SimpleNamespace(x=x, branch=None, qkv=None)
    kept.inputs = norm_inputs(run, arch.attention_norm, x, qkv)
    projected = product(run, qkv, kept.inputs)
    if arch.qk_norm:
        kept.qkv = projected  # the norms' backward reads it
    heads = split_heads(arch, rotate_heads(run, projected))
    del projected
    with torch.enable_grad():  # autograd is asked here alone: for the kernel's own backward
        kept.heads = [part.detach().requires_grad_() for part in heads]
        kept.attended = attention(run, *kept.heads)
    kept.out_inputs = widen(kept.attended.detach().flatten(1), out)
    if again and not arch.attention_post_norm:
        fill_columns(run, out, kept.out_inputs)
        return None, kept
    branch = product(run, out, kept.out_inputs)
    if arch.attention_post_norm:
        kept.branch = branch
    return None if again else residual_sum(run, x, branch, arch.attention_post_norm, 4), kept


def attention_backward(run, kept, grad, residual, needs_x):
    """The gradient of x: `residual` plus what comes through attention from `grad`, the gradient of
    attention_half's sum."""
    arch, (qkv, out, *_) = run.arch, run.layout.groups
    grad = branch_gradient(run, kept.branch, grad, arch.attention_post_norm, 4)
    grad = product_backward(run, out, kept.out_inputs, grad)
    kept.out_inputs = kept.branch = None
    grads = torch.autograd.grad(kept.attended, kept.heads, grad.reshape(kept.attended.shape))
    kept.attended = kept.heads = None
    grad = rotate_heads_backward(run, grads, kept.qkv)
    del grads
    grad = product_backward(run, qkv, kept.inputs, grad, needs_x)
    return norm_gradient(run, arch.attention_norm, kept.x, grad, residual) if needs_x else None


def mlp_half(run, middle, x, keep):
    """middle + mlp(norm(middle)), in a parallel layer norm(x), [tokens, hidden]; and with `keep`
    what its backward needs. Without, the widest tensors are as long as a slice of the tokens."""
    source = x if run.arch.parallel else middle
    if keep:
        return mlp(run, middle, source)
    out = torch.empty_like(middle)
    for run.tokens in token_slices(len(middle)):
        out[run.tokens], _ = mlp(run, middle[run.tokens], source[run.tokens])
    return out, None


def mlp_half_again(run, middle, x, grad):
    """Compute the MLP again and return mlp_backward's gradient, a slice at a time."""
    source, out = x if run.arch.parallel else middle, torch.empty_like(grad)
    for run.tokens in token_slices(len(middle)):
        _, kept = mlp(run, middle[run.tokens], source[run.tokens], again=True)
        out[run.tokens] = mlp_backward(run, kept, grad[run.tokens])
    run.tokens = slice(None)
    return out


def token_slices(n):
    """Even slices of n tokens, each at most SLICE_TOKENS."""
    size = math.ceil(n / math.ceil(n / SLICE_TOKENS))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def mlp(run, middle, source, again=False):
    """One slice of mlp_half."""
    arch, (*_, gate_up, down) = run.arch, run.layout.groups
    kept = types.SimpleNamespace(source=source, branch=None)
    kept.inputs = norm_inputs(run, arch.mlp_norm, source, gate_up)
    kept.gate_up = product(run, gate_up, kept.inputs)
    kept.activated = kept.gate_up.new_empty(len(source), down.width)
    gate(kept.activated[:, : down.in_features], kept.gate_up, arch.activation)
    if again and not arch.mlp_post_norm:
        fill_columns(run, down, kept.activated)
        return None, kept
    branch = product(run, down, kept.activated)
    if arch.mlp_post_norm:
        kept.branch = branch
    return None if again else residual_sum(run, middle, branch, arch.mlp_post_norm, 5), kept


def mlp_backward(run, kept, grad):
    """`grad`, the gradient of mlp's sum, plus what comes from it through the MLP to its source."""
    arch, (*_, gate_up, down) = run.arch, run.layout.groups
    upstream = branch_gradient(run, kept.branch, grad, arch.mlp_post_norm, 5)
    upstream = product_backward(run, down, kept.activated, upstream)
    kept.activated = kept.branch = None
    # in place; as two tensors, whose columns one kernel can then read and write at once
    gate_backward(*kept.gate_up.chunk(2, -1), upstream, arch.activation)
    del upstream
    grad_inputs = product_backward(run, gate_up, kept.inputs, kept.gate_up)
    return norm_gradient(run, arch.mlp_norm, kept.source, grad_inputs, grad)


def kept_values(arch, layout, keeps):
    """For the plan: values a token that a layer keeps from forward to backward, as above."""
    qkv, out, gate_up, down = (group.width for group in layout.groups)
    hidden, query = arch.hidden_size, arch.n_heads * arch.head_dim
    if keeps != "all":
        return hidden * (2 if keeps == "middle" else 1)
    heads = query + 2 * arch.n_kv_heads * arch.head_dim
    log_sums = 2 * arch.n_heads  # attention's own, fp32
    attention = hidden + qkv + heads * (2 if arch.qk_norm else 1) + query + log_sums + out
    attention += hidden * (arch.attention_post_norm is not None)
    mlp = hidden * (not arch.parallel) + gate_up + layout.groups[2].out_features + down
    return attention + mlp + hidden * (arch.mlp_post_norm is not None)


def live_bytes(arch, layout, plan, keeps):
    """The most bytes that a layer's backward takes besides what is kept: gradients, weights, and
    what is computed again."""
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    qkv, out, gate_up, down = (group.width for group in layout.groups)
    w_qkv, w_out, w_gate_up, w_down = (g.width * g.out_features * item for g in layout.groups)
    hidden, query = arch.hidden_size, arch.n_heads * arch.head_dim
    heads, again, hold = layout.groups[0].out_features, keeps != "all", plan.hold_weights
    t = token_slices(n)[0].stop if again else n  # tokens of the MLP at once
    # the MLP: the gradient of its inner values, with down's weight; then that of its input, with
    # gate and up's
    first = t * (down * (1 + again) + hidden) * item + w_down + hold * w_gate_up
    second = t * gate_up * item + w_gate_up + hold * w_down
    mlp = again * t * (layout.groups[2].out_features + gate_up) * item + max(first, second)
    mlp += 2 * n * hidden * item
    # attention: all that it keeps, and its gradients; some kernels add up query's in fp32
    attention = again * (heads + query + qkv + out)
    attention += 2 * heads + query + qkv + 2 * hidden + 2 * query
    attention = attention * n * item + w_qkv + hold * w_out
    taken = 2 * n * hidden * item * again  # x and the sum, where they are not counted as kept
    if keeps == "x":  # attention is computed again first, to come to the sum
        taken += n * (hidden + qkv + heads + query + out) * item
    return max(mlp, attention) + taken


# ------------------------------------------------------------------------------------------------
# The layer's products, with the adapter
# ------------------------------------------------------------------------------------------------

# y = x W.T + s x A.T B.T is one product, [x, d] [W, B].T with d = s x A.T: the adapter costs a few
# columns, not a pass over y. So is its backward: y's gradient times [W, B] is x's and d's.


def widen(x, group):
    """x [n, in] at the left of a new [n, group.width]."""
    wide = x.new_empty(len(x), group.width)
    wide[:, : group.in_features] = x
    return wide


def adapter_of(run, group):
    """A [ranks, in] and B [rows of the adapted linears, rank]."""
    return (run.adapter[group.a].view(-1, group.in_features),
            run.adapter[group.b].view(-1, group.rank))


def fill_columns(run, group, inputs):
    """Compute d = s x A.T of all adapted linears into the last columns of inputs [n, width]."""
    if not group.ranks:
        return
    x, columns = inputs[:, : group.in_features], inputs[:, group.in_features :]
    a, _ = adapter_of(run, group)
    columns.zero_()  # torch 2.13 on a CPU reads what is there even with beta=0, and 0 * NaN is NaN
    torch.addmm(a.new_zeros(()), run.drop(x, run.layout.dropout, group.site), a.t(), beta=0,
                alpha=run.layout.scaling, out=columns[:, : group.ranks])


def product(run, group, inputs):
    """Outputs [n, out] of a group's linears with their adapters; fills the last columns of
    inputs [n, width]."""
    fill_columns(run, group, inputs)
    bias = None if group.bias is None else run.layer.vectors[group.bias]
    weight = run.weight(group)
    if not run.layout.dora or not group.ranks:
        return F.linear(inputs, weight, bias)
    factor, _ = dora_factors(run, group, weight)
    return scale_columns(inputs @ weight.t(), factor, bias)


def product_backward(run, group, inputs, grad, needs_x=True):
    """From the outputs' gradient [n, out] that of x [n, in]; adds those of A, B and magnitudes to
    run.grad_adapter."""
    weight, n_in, layout = run.weight(group), group.in_features, run.layout
    if layout.dora and group.ranks:
        # y = c u + bias with c = m / norm, where PEFT takes the norm for a constant
        factor, norm = dora_factors(run, group, weight)
        sums = (grad.float() * (inputs @ weight.t()).float()).sum(0) / norm
        for p in group.adapted:
            run.grad_adapter[group.m][p.b_rows] += sums[p.rows]
        grad = scale_columns(grad, factor, None)
    grad_inputs = grad @ (weight if needs_x else weight[:, n_in:])
    del weight
    columns = group.width - n_in
    grad_x, grad_d = grad_inputs.split([grad_inputs.shape[1] - columns, columns], 1)
    if not group.ranks:
        return grad_x
    a, _ = adapter_of(run, group)
    x, d, grad_d = inputs[:, :n_in], inputs[:, n_in:], grad_d[:, : group.ranks]
    grad_a = exact_product(grad_d.t(), run.drop(x, layout.dropout, group.site))
    run.grad_adapter[group.a].view(-1, n_in).add_(grad_a, alpha=layout.scaling)
    grad_b = run.grad_adapter[group.b].view(-1, group.rank)
    for p in group.adapted:
        grad_b[p.b_rows] += exact_product(grad[:, p.rows].t(), d[:, p.ranks])
    if not needs_x:
        return None
    if layout.dropout:
        return grad_x + run.drop(layout.scaling * (grad_d @ a), layout.dropout, group.site)
    return grad_x.addmm_(grad_d, a, alpha=layout.scaling)


def dora_factors(run, group, weight):
    """DoRA's c = m / ||W + s B A|| and that norm, both fp32 [out]; 1 where there is no adapter.

    The norm needs no [out, in] of its own: it is ||W||^2 + 2 s B.(W A.T) + s^2 B.(B A A.T), by row.
    """
    a, b = adapter_of(run, group)
    w_a, s = exact_product(weight[:, : group.in_features], a.t()), run.layout.scaling
    a, b, norm = a.float(), b.float(), torch.ones(group.out_features, device=weight.device)
    factor = norm.clone()
    for p in group.adapted:
        a_p, b_p = a[p.ranks], b[p.b_rows]
        cross = (b_p * w_a[p.rows, p.ranks]).sum(1)
        own = (b_p @ (a_p @ a_p.t()) * b_p).sum(1)
        squares = run.layer.row_norms[group.site][p.rows].square()
        norm[p.rows] = (squares + 2 * s * cross + s * s * own).sqrt()
        magnitudes = run.layer.adapter.detach()[group.m][p.b_rows].float()
        factor[p.rows] = magnitudes / norm[p.rows]
    return factor, norm


def exact_product(a, b):
    """a @ b in fp32, whatever the dtype of the two, so that sums of parts are rounded once."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# ------------------------------------------------------------------------------------------------
# The layer's elementwise work, one compiled kernel each on a GPU
# ------------------------------------------------------------------------------------------------


def elementwise(function):
    """Compile `function` where its tensors are on a GPU; on a CPU that would take minutes."""
    compiled = torch.compile(function)

    @functools.wraps(function)
    def call(first, *args):
        return (compiled if first.is_cuda and not why_no_triton() else function)(first, *args)

    return call


def norm_inputs(run, name, x, group):
    """norm(x) [n, in] at the left of a new [n, group.width]; without a norm x itself."""
    if name is None:
        return widen(x, group)
    inputs = x.new_empty(len(x), group.width)
    normalise(inputs[:, : group.in_features], x, run.vector(name), run.arch.norm, run.arch.norm_eps)
    return inputs


def norm_gradient(run, name, x, grad, residual):
    """`residual` + the gradient of x from that of norm(x)."""
    if name is None:
        return residual + grad
    return norm_backward(x, grad, run.vector(name), residual, run.arch.norm, run.arch.norm_eps)


def residual_sum(run, x, branch, post_norm, site):
    """x + multiplier * norm(branch), after the model's own dropout."""
    arch, branch = run.arch, run.drop(branch, run.arch.residual_dropout, site)
    if post_norm:
        normed = torch.empty_like(branch)
        normalise(normed, branch, run.vector(post_norm), arch.norm, arch.norm_eps)
        branch = normed
    return torch.add(x, branch, alpha=arch.residual_multiplier)


def branch_gradient(run, branch, grad, post_norm, site):
    """The gradient of what residual_sum adds, from that of the sum."""
    arch = run.arch
    if arch.residual_multiplier != 1:
        grad = grad * arch.residual_multiplier
    if post_norm:
        weight = run.vector(post_norm)
        grad = norm_backward(branch, grad, weight, None, arch.norm, arch.norm_eps)
    return run.drop(grad, arch.residual_dropout, site)


def standardised(x, kind, eps):
    """x in fp32, of mean square 1 (with "layer" after its mean is taken off), and 1 / its root."""
    x = x.float()
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x * scale, scale


def norm_of(x, weight, kind, eps):
    """The norm over the last dimension; `weight` must broadcast. Families round differently."""
    standard, _ = standardised(x, kind, eps)
    if kind == "rms":
        return weight * standard.to(x.dtype)
    return ((weight.float() + (kind == "rms_plus_one")) * standard).to(x.dtype)


def norm_grad_of(grad, x, weight, kind, eps):
    """The gradient of x, fp32."""
    standard, scale = standardised(x, kind, eps)
    grad = grad.float() * (weight.float() + (kind == "rms_plus_one"))
    inner = grad - standard * (grad * standard).mean(-1, keepdim=True)
    if kind == "layer":
        inner = inner - grad.mean(-1, keepdim=True)
    return inner * scale


@elementwise
def normalise(out, x, weight, kind, eps):
    out.copy_(norm_of(x, weight, kind, eps))


@elementwise
def norm_backward(x, grad, weight, residual, kind, eps):
    grad_x = norm_grad_of(grad, x, weight, kind, eps)
    return (grad_x if residual is None else grad_x + residual).to(x.dtype)


@elementwise
def scale_columns(y, factor, bias):
    """y [n, out] * factor [out] + bias [out] or None."""
    y32 = y.float() * factor
    return (y32 if bias is None else y32 + bias).to(y.dtype)


SILU = F.silu, torch.ops.aten.silu_backward  # with torch's formula for the backward
GELU_TANH = (functools.partial(F.gelu, approximate="tanh"),
             functools.partial(torch.ops.aten.gelu_backward, approximate="tanh"))
ACTIVATIONS = {"silu": SILU, "swish": SILU, "gelu": (F.gelu, torch.ops.aten.gelu_backward),
               "gelu_pytorch_tanh": GELU_TANH, "gelu_new": GELU_TANH}


@elementwise
def gate(out, gate_up, activation):
    """activation(gate) * up into `out` [n, inner], from gate_up [n, 2 inner]."""
    gates, ups = gate_up.float().chunk(2, -1)
    out.copy_(ACTIVATIONS[activation][0](gates) * ups)


@elementwise
def gate_backward(gates, ups, grad, activation):
    """Replace gate and up, each [n, inner], by their gradients, from that of gate()'s result."""
    forward, backward = ACTIVATIONS[activation]
    gates32, ups32, grad = gates.float(), ups.float(), grad.float()
    grads = backward(grad * ups32, gates32), grad * forward(gates32)
    gates.copy_(grads[0])
    ups.copy_(grads[1])


@elementwise
def drop(x, keys, site, probability):
    """x [n, width] with each value 0 or divided by 1 - probability. Which is a pure function of the
    token's key [n], the site and the column: the same when computed again, in whatever bin a row
    lies, on however many GPUs."""
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
    bits = mix(mix(keys + site)[:, None] + columns)
    uniform = (bits & (2**24 - 1)).float() / 2**24
    return torch.where(uniform < probability, 0, x.float() / (1 - probability)).to(x.dtype)


def mix(bits):
    """Well mixed int64 from int64, by the finaliser of MurmurHash3; products wrap around."""
    for factor in (-49064778989728563, -4265267296055464877):
        bits = (bits ^ (bits >> 33 & 0x7FFFFFFF)) * factor
    return bits ^ (bits >> 33 & 0x7FFFFFFF)


# ------------------------------------------------------------------------------------------------
# Rotary embedding and attention
# ------------------------------------------------------------------------------------------------


def split_heads(arch, qkv):
    """Views of query, key, value [n, heads, head_dim] in qkv [n, all their widths]."""
    widths = [heads * arch.head_dim for heads in (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads)]
    return [part.unflatten(1, (-1, arch.head_dim)) for part in qkv.split(widths, 1)]


def rotate_heads(run, qkv):
    """qkv [n, ...] with query and key normed, where the family does that, and rotated."""
    arch, layer = run.arch, run.layer
    weights = run.vector(arch.q_norm), run.vector(arch.k_norm)
    if layer.rope is None and weights[0] is None:
        return qkv
    return rotate_forward(qkv, *run.bin.ropes[layer.rope], *weights, arch)


def rotate_heads_backward(run, grads, qkv):
    """The gradient of qkv from those of query, key and value; qkv itself where it was normed."""
    arch, layer = run.arch, run.layer
    weights = run.vector(arch.q_norm), run.vector(arch.k_norm)
    return rotate_backward(*grads, qkv, *run.bin.ropes[layer.rope], *weights, arch)


def rotate(x, cos, sin, arch):
    """Rotary embedding of x [n, heads, head_dim] by cos and sin fp32 [n, rotary_dim / 2]; with -sin
    its backward."""
    if cos is None:
        return x
    turned, rest = x[..., : arch.rotary_dim], x[..., arch.rotary_dim :]
    pairs = arch.rotary_interleaved
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if pairs else turned.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.stack(parts, -1).flatten(-2) if pairs else torch.cat(parts, -1)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def normed_heads(x, weight, arch, grad=None):
    """The norm of x [n, heads, head_dim], by head or over all of them; with `grad`, that of the
    norm, the gradient of x."""
    if weight is None:
        return x if grad is None else grad
    shape = x.shape
    if arch.qk_norm == "full":
        x, grad = x.flatten(1), None if grad is None else grad.flatten(1)
    if grad is None:
        return norm_of(x, weight, arch.norm, arch.norm_eps).view(shape)
    return norm_grad_of(grad, x, weight, arch.norm, arch.norm_eps).view(shape)


@elementwise
def rotate_forward(qkv, cos, sin, temperature, q_weight, k_weight, arch):
    query, key, value = split_heads(arch, qkv)
    out = []
    for x, weight in (query, q_weight), (key, k_weight):
        if not arch.qk_norm_after_rotary:
            x = normed_heads(x, weight, arch)
        x = rotate(x.float(), cos, sin, arch).to(qkv.dtype)
        if arch.qk_norm_after_rotary:
            x = normed_heads(x, weight, arch)
        out.append(x)
    if temperature is not None:
        out[0] = (out[0] * temperature[:, None, None]).to(qkv.dtype)
    return torch.cat([x.flatten(1) for x in (*out, value)], 1)


@elementwise
def rotate_backward(query, key, value, qkv, cos, sin, temperature, q_weight, k_weight, arch):
    """The gradient of qkv [n, ...] from those of query, key, value [n, heads, head_dim]."""
    before = (None, None) if qkv is None else split_heads(arch, qkv)[:2]
    grads, out = [query.float(), key.float()], []
    if temperature is not None:
        grads[0] = grads[0] * temperature[:, None, None]
    back = None if sin is None else -sin
    for grad, x, weight in zip(grads, before, (q_weight, k_weight)):
        if x is not None and arch.qk_norm_after_rotary:
            turned = rotate(x.float(), cos, sin, arch).to(qkv.dtype)
            grad = normed_heads(turned, weight, arch, grad)
        grad = rotate(grad, cos, back, arch)
        if x is not None and not arch.qk_norm_after_rotary:
            grad = normed_heads(x, weight, arch, grad)
        out.append(grad)
    return torch.cat([x.flatten(1).to(value.dtype) for x in (*out, value)], 1)


def attention(run, query, key, value):
    """Causal attention of query [n, heads, head_dim], key and value [n, kv_heads, head_dim] inside
    each document of the bin; returns [n, heads, head_dim]."""
    arch, bin, window = run.arch, run.bin, run.layer.window
    if window is not None and window >= bin.longest:
        window = None
    kernel = bin.kernels["window" if window else "full"]
    return kernel(query, key, value, bin, arch, window, run.layer.index)


def batched_attention(query, key, value, bin, arch, window, index):
    """Documents of one length by torch's SDPA, on Hopper cuDNN's kernel."""
    rows = [t.unflatten(0, (len(bin.lengths), -1)).transpose(1, 2) for t in (query, key, value)]
    out = F.scaled_dot_product_attention(
        *rows, is_causal=True, scale=arch.attention_scale, enable_gqa=True)
    return out.transpose(1, 2).flatten(0, 1)


def flash_attention(query, key, value, bin, arch, window, index):
    """Documents of any lengths by Flash Attention 2."""
    from flash_attn import flash_attn_varlen_func

    bounds, longest = (bin.cu_seqlens, bin.cu_seqlens), (bin.longest, bin.longest)
    return flash_attn_varlen_func(
        query, key, value, *bounds, *longest, softmax_scale=arch.attention_scale, causal=True,
        window_size=(window - 1 if window else -1, 0), softcap=arch.attention_softcap or 0.0)


def varlen_attention(query, key, value, bin, arch, window, index):
    """Documents of any lengths by torch's own kernel."""
    kernel, options = varlen_kernel()
    bounds, longest = (bin.cu_seqlens, bin.cu_seqlens), (bin.longest, bin.longest)
    return kernel(query, key, value, *bounds, *longest, scale=arch.attention_scale,
                  window_size=(window - 1 if window else -1, 0), **options)


@functools.lru_cache(None)
def varlen_kernel():
    """torch's varlen_attn and the options that this version wants."""
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer heads of keys as they are, later ones want to be told
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return varlen_attn, {"enable_gqa": True} if grouped else {}


def document_attention(query, key, value, bin, arch, window, index):
    """Each document by itself, in plain torch: whatever the others cannot do, and on a CPU."""
    outs = []
    parts = zip(*(t.split(bin.lengths) for t in (query, key, value)), bin.seeds)
    for q, k, v, seed in parts:
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        n, mask = q.shape[2], None
        if window is not None and n > window or arch.attention_softcap:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            mask = mask.triu(1 - window) if window else mask
        with seeded(arch.attention_dropout and seed + index, q.device):
            if arch.attention_softcap:
                out = capped_attention(q, k, v, mask, arch)
            else:
                out = F.scaled_dot_product_attention(
                    q, k, v, mask, arch.attention_dropout, mask is None,
                    scale=arch.attention_scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def capped_attention(q, k, v, mask, arch):
    """Gemma 2: scores are cap * tanh(scores / cap)."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * arch.attention_scale
    scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype)
    return F.dropout(weights, arch.attention_dropout) @ v


@contextlib.contextmanager
def seeded(seed, device):
    """Random numbers that depend on `seed` alone, for attention's own dropout; 0: nothing to do."""
    if not seed:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


# ------------------------------------------------------------------------------------------------
# NF4: storage and kernels
# ------------------------------------------------------------------------------------------------


class NF4Blocks(torch.Tensor):
    """Storage of NF4 weights: n blocks of 64 weights. Outside a bf16 tensor of shape [n];
    inside packed uint8 [n, 32], the 4-bit codes, and absmax_codes uint8 [n], the 8-bit scales.

    FSDP2 copies parameters into its gather buffer with torch._foreach_copy_, whose CUDA kernel
    rewrites the bf16 NaN patterns among packed codes (torch 2.11: 0.08 % of all words, and no
    error). The two hooks make it gather bytes instead, the scales along with the codes. Outside
    it is bf16 because FSDP2 took no integer parameters before torch 2.13. With --offload_params
    the inner tensors are in pinned host memory, and a gather begins with their copy to the GPU,
    on FSDP2's own stream and thus a layer ahead; FSDP2's CPUOffloadPolicy would take the adapter,
    its gradients and the optimizer to the CPU too.
    """

    @staticmethod
    def __new__(cls, packed, absmax_codes, device=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, (packed.shape[0],), dtype=torch.bfloat16, device=device or packed.device)

    def __init__(self, packed, absmax_codes, device=None):
        self.packed, self.absmax_codes = packed, absmax_codes

    @classmethod
    def zeros(cls, n_blocks, device):
        packed = torch.zeros(n_blocks, BLOCK // 2, dtype=torch.uint8, device=device)
        return cls(packed, torch.zeros(n_blocks, dtype=torch.uint8, device=device))

    def __repr__(self):
        return f"NF4Blocks({self.shape[0]} blocks, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, _, args, kwargs=None):
        """What FSDP2 and DTensor do to a parameter: all of it acts on whole blocks."""
        aten, op = torch.ops.aten, func.overloadpacket
        inner = [args[0].packed, args[0].absmax_codes]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k not in ("dtype", "layout")}
        if op is aten.copy_:
            args[0].packed.copy_(args[1].packed)
            args[0].absmax_codes.copy_(args[1].absmax_codes)
            return args[0]
        if op is aten.is_pinned:
            return args[0].packed.is_pinned()
        if op is aten.split:
            return [cls(*pair) for pair in zip(*(func(t, *args[1:]) for t in inner))]
        offloaded = inner[0].is_cpu and args[0].is_cuda
        if op is aten.new_zeros:
            (n,) = args[1]
            return cls(inner[0].new_zeros(n, BLOCK // 2, **kwargs), inner[1].new_zeros(n, **kwargs))
        if op in (aten.view, aten.as_strided):  # FSDP2 only ever asks for the shape it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of NF4Blocks to {args[1:]}"
            return cls(*inner, args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice, aten._to_copy, aten._pin_memory, aten.clone):
            device = args[0].device if offloaded and op is not aten._to_copy else None
            return cls(*(func(t, *args[1:], **kwargs) for t in inner), device)
        raise NotImplementedError(f"{func} of NF4Blocks")

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        packed = self.packed.to(self.device, non_blocking=True)
        absmax_codes = self.absmax_codes.to(self.device, non_blocking=True)
        # FSDP2 passes the mesh of the shards alone, without its replicas
        if mesh.size() == 1:  # one rank's FSDP2 takes the first of several tensors only
            return (torch.cat([packed.view(-1), absmax_codes]),), None
        return (packed, absmax_codes), None

    # FSDP2 asks for it at every gather; finding it out anew took 5 of 150 ms a micro-batch on a CPU
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        packed, absmax_codes = outputs if len(outputs) == 2 else outputs[0].split(
            [outputs[0].numel() // (BLOCK // 2 + 1) * n for n in (BLOCK // 2, 1)])
        if out is None:
            return NF4Blocks(packed.view(-1, BLOCK // 2), absmax_codes), outputs
        assert out.packed.data_ptr() == packed.data_ptr(), "FSDP2 gathered to another place"


@dataclasses.dataclass
class Nested:
    """The second level of quantisation of a group's linears, which undoes the 8-bit codes of their
    absmax. At 4 bytes for 16,384 weights it is small enough for every rank to have it whole."""

    absmax: torch.Tensor  # fp32 [blocks / 256], of one linear after the other
    offsets: torch.Tensor  # fp32 [linears], the mean absmax of each
    codes: torch.Tensor  # fp32 [linears, 256], the values of the codes


@functools.lru_cache(None)
def dynamic_map(device):
    """The 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


@functools.lru_cache(None)
def nf4_code(device):
    """The 16 values of NF4, fp32."""
    return bnb.functional.get_4bit_type("nf4", device=device)


def dequantise_group(layer, group, adapter):
    """[W, B] of a group's linears, [out, width]: their weights below one another, bit for bit what
    bitsandbytes gives, and B of each in the columns of its ranks, else 0. `adapter` is the layer's
    whole one in the dtype of the result."""
    weight = adapter.new_empty(group.out_features, group.width)
    blocks = slice(group.places[0].blocks.start, group.places[-1].blocks.stop)
    packed, codes = layer.nf4.packed[blocks], layer.nf4.absmax_codes[blocks]
    nested, b = layer.nested[group.site], adapter[group.b].view(-1, group.rank)
    table, device = group_table(group, packed.device), packed.device
    if weight.is_cuda and not why_no_triton():
        tiles, n_columns = triton.cdiv(len(packed), 64), group.width - group.in_features
        dequantise_kernel[(tiles + triton.cdiv(len(weight), 64) * (n_columns // COLUMNS),)](
            packed, codes, nested.absmax, nested.offsets, nested.codes, nf4_code(device), b, table,
            weight, len(packed), tiles, len(weight), group.in_features, n_columns, group.rank,
            len(group.places), 64, BLOCK, NESTED_BLOCK, COLUMNS, num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds between a scale's product and offset
        )
        return weight
    weight[:, group.in_features :] = 0
    for i, (p, (start, _, at, *_)) in enumerate(zip(group.places, table.tolist())):
        mine = slice(start, start + p.blocks.stop - p.blocks.start)
        nested_state = bnb.functional.QuantState(
            absmax=nested.absmax[at:], code=nested.codes[i], blocksize=NESTED_BLOCK,
            dtype=torch.float32)
        state = bnb.functional.QuantState(
            absmax=codes[mine], shape=torch.Size((p.linear.out_features, p.linear.in_features)),
            dtype=weight.dtype, code=nf4_code(device), blocksize=BLOCK, quant_type="nf4",
            offset=nested.offsets[i], state2=nested_state)
        values = packed[mine].view(-1, 1)[: math.prod(state.shape) // 2]
        weight[p.rows, : group.in_features] = bnb.functional.dequantize_4bit(values, state)
        if p.ranks:
            weight[p.rows, group.in_features :][:, p.ranks] = b[p.b_rows]
    return weight


@functools.lru_cache(None)
def group_table(group, device):
    """Where each linear of a group begins: its blocks, rows, second-level absmax, rows of B and
    columns of ranks, -1 without an adapter. int32 [linears, 5]."""
    table, nested, first = [], 0, group.places[0].blocks.start
    for p in group.places:
        adapter = (p.b_rows.start, p.ranks.start) if p.ranks else (0, -1)
        table.append([p.blocks.start - first, p.rows.start, nested, *adapter])
        nested += math.ceil((p.blocks.stop - p.blocks.start) / NESTED_BLOCK)
    return torch.tensor(table, dtype=torch.int32, device=device)


if triton:

    @triton.jit
    def dequantise_kernel(
        packed, absmax_codes, nested_absmax, offsets, nested_codes, nf4_code, b, table, out,
        n_blocks, n_tiles, n_rows, n_in, n_columns, rank, LINEARS: tl.constexpr,
        BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr,
    ):
        """See dequantise_group: first tiles of BLOCKS blocks, 4-bit codes and 8-bit scales to
        `out`'s dtype, then tiles of 64 rows and COLUMNS columns of B."""
        tile = tl.program_id(0)
        stride = n_in + n_columns
        if tile < n_tiles:
            block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
            inside = block < n_blocks
            linear = tl.zeros([BLOCKS], tl.int32)
            for i in tl.static_range(1, LINEARS):
                linear += (block >= tl.load(table + i * 5)).to(tl.int32)
            block_of = block.to(tl.int32) - tl.load(table + linear * 5)
            nested = tl.load(table + linear * 5 + 2) + block_of // NESTED_BLOCK
            code = tl.load(absmax_codes + block, inside, 0).to(tl.int32)
            absmax = tl.load(nested_codes + linear * 256 + code)
            absmax = absmax * tl.load(nested_absmax + nested, inside, 0.0)
            absmax = absmax + tl.load(offsets + linear)
            byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            codes = tl.load(packed + byte, inside[:, None], 0).to(tl.int32)
            high = tl.load(nf4_code + (codes >> 4)) * absmax[:, None]
            low = tl.load(nf4_code + (codes & 15)) * absmax[:, None]
            values = tl.interleave(high, low).to(out.dtype.element_ty)
            weight = block_of[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            first, last = tl.load(table + linear * 5 + 1), tl.full([BLOCKS], n_rows, tl.int32)
            for i in tl.static_range(1, LINEARS):
                last = tl.where(linear == i - 1, tl.load(table + i * 5 + 1), last)
            row = weight // n_in  # of the linear
            if n_in % BLOCK == 0:  # then a block lies in one row: fewer divisions
                row = (block_of * BLOCK // n_in)[:, None] + tl.zeros([1, BLOCK], tl.int32)
            place = first.to(tl.int64)[:, None] * stride + weight + row * n_columns
            inside = inside[:, None] & (first[:, None] + row < last[:, None])
            tl.store(out + place, values, inside)
        else:  # other names: Triton wants one type for a name in both branches
            b_tile = tile - n_tiles
            out_row = b_tile // (n_columns // COLUMNS) * 64 + tl.arange(0, 64)
            column = b_tile % (n_columns // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
            of = tl.zeros([64], tl.int32)
            for i in tl.static_range(1, LINEARS):
                of += (out_row >= tl.load(table + i * 5 + 1)).to(tl.int32)
            b_row = out_row - tl.load(table + of * 5 + 1) + tl.load(table + of * 5 + 3)
            at = tl.load(table + of * 5 + 4)
            r = column[None, :] - at[:, None]
            there = (at >= 0)[:, None] & (r >= 0) & (r < rank) & (out_row < n_rows)[:, None]
            b_values = tl.load(b + b_row.to(tl.int64)[:, None] * rank + r, there, 0.0)
            b_place = out_row.to(tl.int64)[:, None] * stride + n_in + column[None, :]
            tl.store(out + b_place, b_values, (out_row < n_rows)[:, None] & (column >= 0)[None, :])


    @triton.jit
    def look_up_kernel(ids, table, out, first, n_rows, width, COLUMNS: tl.constexpr):
        """Rows `ids` - first of `table` [n_rows, width]; 0 for those that it does not have."""
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(ids + token) - first
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = (column < width) & (row >= 0) & (row < n_rows)
        values = tl.load(table + row * width + column, there, 0.0)
        tl.store(out + token * width + column, values, column < width)


@functools.lru_cache(None)
def why_no_triton():
    """Why Triton's kernels cannot be used on this machine, or "". They are compiled at their first
    use, which takes a C compiler and Python's headers, and must give what others give."""
    if not torch.cuda.is_available() or triton is None:
        return "there is no Triton" if torch.cuda.is_available() else "there is no GPU"
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    out, table = torch.empty_like(weight), torch.zeros(1, 5, dtype=torch.int32, device="cuda")
    try:
        dequantise_kernel[(16,)](
            packed.view(-1, BLOCK // 2), state.absmax, state.state2.absmax, state.offset,
            state.state2.code, nf4_code(weight.device), weight, table, out, 1024, 16, 256, 256, 0,
            16, 1, 64, BLOCK, NESTED_BLOCK, COLUMNS, num_warps=4, enable_fp_fusion=False)
    except Exception as e:
        return f"Triton cannot compile here, {type(e).__name__}: {str(e)[:200]}"
    same = torch.equal(out, bnb.functional.dequantize_4bit(packed, state))
    return "" if same else "its result is not what bitsandbytes gives on this GPU"


PINNED = []  # holds what is registered: its pages must not go back to the system


def pinned_empty(n_bytes, device):
    """Host memory that `device` copies from and to without waiting, uint8 [n_bytes], for the rest
    of the process. Torch's own pinned memory is rounded up to a power of 2."""
    if device.type != "cuda" or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8)
    # whole pages of its own, as registering wants, and large ones: 0.2 s a GiB, with small ones 0.4
    PINNED.append(mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        PINNED[-1].madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(PINNED[-1], dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0)
    if int(error):
        raise MemoryError(f"{n_bytes / 2**30:.2f} GiB of host memory cannot be pinned: {error}")
    return buffer


def pinned_copy(tensor):
    """A copy in pinned host memory; on a CPU just a copy."""
    host = pinned_empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


class GPUStore:
    """Where layers put what they keep of a bin from forward to backward: here it stays as it is."""

    put = take = staticmethod(lambda tensor: tensor)


class HostStore:
    """The same in pinned host memory; backward takes in the reverse order.

    A stream of its own copies, and fetches one tensor ahead. put() frees the GPU memory of the
    tensor before, whose copy has long ended: at most three are on the GPU. The last of `n_kept`
    stays there, because its backward comes first.
    """

    def __init__(self, n_kept, n_bytes, device):
        self.n_kept, self.n_bytes, self.device = n_kept, n_bytes, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.buffers, self.shapes, self.leaving, self.here = {}, {}, [], {}
        self.next = 0  # of this bin

    def copy(self, to, source):
        """Returns the event of its end."""
        if self.stream is None:
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def let_go(self):
        while self.leaving:
            _, event = self.leaving.pop()
            if event is not None:  # from here on the memory may be used for something else
                torch.cuda.current_stream().wait_event(event)

    def view(self, i):
        shape, dtype = self.shapes[i]
        return self.buffers[i].view(dtype)[: shape.numel()].view(shape)

    def put(self, tensor):
        """Returns what take() wants to know."""
        self.let_go()
        i, self.next = self.next, (self.next + 1) % self.n_kept
        if i == self.n_kept - 1:
            self.here[i] = tensor, None
            return i
        if i not in self.buffers:
            self.buffers[i] = pinned_empty(self.n_bytes, self.device)
        self.shapes[i] = tensor.shape, tensor.dtype
        self.leaving.append((tensor, self.copy(self.view(i), tensor)))
        return i

    def fetch(self, i):
        tensor = torch.empty(self.shapes[i][0], dtype=self.shapes[i][1], device=self.device)
        self.here[i] = tensor, self.copy(tensor, self.view(i))

    def take(self, i):
        self.let_go()
        if i not in self.here:
            self.fetch(i)
        tensor, event = self.here.pop(i)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if i > 0:
            self.fetch(i - 1)
        return tensor


# ------------------------------------------------------------------------------------------------
# The model around its layers: vocabulary and loss
# ------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Embedding, decoder layers, norm and head. A forward of a Bin returns the sum of its token
    losses.

    Each rank of a group has its own rows of embedding and head, outside FSDP2, which would gather
    them whole: 2.1 GB each for Llama-3-70B, and twice that while it copies.
    """

    def __init__(self, arch, layout, plan, shards, group=None):
        super().__init__()
        self.arch, self.group, self.plan = arch, group, plan  # group None: of this process alone
        self.layers = nn.ModuleList(
            DecoderLayer(arch, layout, i, plan, shards) for i in range(arch.n_layers))
        self.embedding = self.norm = self.head = None  # tensors, see load_weights
        self.frequencies = None  # of each kind of rotary embedding: (fp32 [rotary_dim / 2], factor)

    @property
    def place(self):
        """(rank, ranks) in the group that shares one vocabulary."""
        if self.group is None:
            return 0, 1
        return dist.get_rank(self.group), dist.get_world_size(self.group)

    def forward(self, bin):
        return HeadLoss.apply(self.hidden(bin), self, bin)

    def hidden(self, bin):
        """What the last layer returns, [tokens, hidden]."""
        x = embed(self, bin.input_ids)
        bin.ropes = {i: rope_tables(self, bin, i) for i in (None, *range(len(self.arch.ropes)))}
        for layer in self.layers:
            x = layer(x, bin)
        return x


def rope_tables(model, bin, i):
    """cos and sin fp32 [tokens, rotary_dim / 2] of the i-th kind of rotary embedding, None: of
    none; and Ministral 3's factor on queries, [tokens], or None."""
    temperature = None
    if model.arch.query_temperature:
        beta, original = model.arch.query_temperature
        temperature = 1 + beta * torch.log1p((bin.position_ids // original).float())
    if i is None:
        return None, None, temperature
    frequencies, factor = model.frequencies[i]
    angles = bin.position_ids[:, None].float() * frequencies
    return angles.cos() * factor, angles.sin() * factor, temperature


def shard_range(n, shard, shards):
    """The rows of `n` that FSDP2 gives to a shard: as torch.chunk does."""
    size = math.ceil(n / shards)
    return range(min(shard * size, n), min((shard + 1) * size, n))


def look_up(ids, table, first):
    """Embeddings [n, d] of ids [n] from rows first, first + 1, .. `table` [rows, d]; 0 for ids that
    are not there. The table may be in pinned host memory, which the GPU then reads by itself."""
    if table.is_cpu and ids.is_cuda:
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=ids.device)
        grid = (len(ids), triton.cdiv(table.shape[1], 1024))
        look_up_kernel[grid](ids.contiguous(), table, out, first, len(table), table.shape[1], 1024)
        return out
    local = ids - first
    absent = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill(absent, 0), table).masked_fill_(absent[:, None], 0)


def embed(model, ids):
    """Embeddings [n, hidden] of ids [n]. All ranks of the group must call this, with as many ids.

    Nothing is gathered but the ids: each rank looks all ranks' tokens up among its own rows, and
    the sum, in which one term is not zero, goes to whom it belongs. Of a vocabulary of 128k that is
    0.1 GB for 4,096 tokens on 2 GPUs instead of a weight of 2.1 GB.
    """
    (rank, ranks), table = model.place, model.embedding
    first = shard_range(model.arch.vocab_size, rank, ranks).start
    if ranks == 1:
        out = look_up(ids, table, 0)
    else:
        ids = all_gather(ids, model.group)  # [ranks, n]
        out = torch.empty(ids.shape[1], table.shape[1], dtype=table.dtype, device=ids.device)
        step = max(1, CHUNK_BYTES // (ranks * table[:1].nbytes))
        for chunk in (slice(i, i + step) for i in range(0, len(out), step)):
            rows = look_up(ids[:, chunk].flatten(), table, first)
            dist.reduce_scatter_tensor(out[chunk], rows, group=model.group)
    if model.arch.embedding_multiplier == 1:
        return out
    # rounded to the dtype first, as Gemma does
    return out * torch.tensor(model.arch.embedding_multiplier, dtype=out.dtype)


def scaled_logits(logits, multiplier, cap):
    """Logits as the model means them, fp32."""
    logits = logits.float() * multiplier
    return logits if cap is None else cap * torch.tanh(logits / cap)


@elementwise
def logits_statistics(logits, multiplier, cap, targets):
    """Of each row its maximum, the sum of exp(logit - maximum), the logit at the target or 0 where
    that is -1: fp32 [3, n]."""
    logits = scaled_logits(logits, multiplier, cap)
    top = logits.amax(-1)
    at_target = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.stack([top, (logits - top[:, None]).exp().sum(-1), at_target * (targets >= 0)])


@elementwise
def logits_gradient(logits, multiplier, cap, log_sum, targets, absent):
    """The gradient of the token losses: probabilities minus 1 at the target, 0 without a label."""
    capped = scaled_logits(logits, multiplier, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = (columns[None] == targets[:, None]).float()
    gradient = ((capped - log_sum[:, None]).exp() - hit) * multiplier
    if cap is not None:
        gradient = gradient * (1 - (capped / cap).square())
    return gradient.masked_fill(absent[:, None], 0).to(logits.dtype)


class HeadLoss(torch.autograd.Function):
    """From what the last layer returns [tokens, hidden] to the sum of this rank's token losses,
    fp32: norm, head, cross-entropy of the tokens that are learnt.

    Each rank computes the logits of all ranks' tokens for its own part of the vocabulary; what
    the softmax needs of the others is three numbers a token. The head is never gathered, and the
    full logits never exist (5.25 GB at 4,096 tokens and a vocabulary of 128k): the head is frozen,
    so that the gradient of x is all there is to compute, and it is taken in forward, a chunk of
    tokens at a time. Backward needs neither logits nor head.
    """

    @staticmethod
    def forward(ctx, x, model, bin):
        arch, weight, (rank, ranks) = model.arch, model.head, model.place

        def gather(tensor):
            return all_gather(tensor, model.group) if ranks > 1 else tensor[None]

        first = shard_range(arch.vocab_size, rank, ranks).start
        change = arch.logits_multiplier, arch.logits_softcap
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.zeros_like(x)
        targets = gather(bin.labels)  # [ranks, n]
        step = max(1, CHUNK_BYTES // (4 * arch.vocab_size))
        for chunk in (slice(i, i + step) for i in range(0, len(bin.labels), step)):
            part = x[bin.learnt[chunk]]
            hidden = torch.empty_like(part)
            normalise(hidden, part, model.norm, arch.norm, arch.norm_eps)
            logits = gather(hidden).flatten(0, 1) @ weight.t()
            target = targets[:, chunk].flatten()
            absent, local = target == IGNORE, target - first
            local = local.where((local >= 0) & (local < len(weight)) & ~absent, -1)
            top, total, at_target = gather(logits_statistics(logits, *change, local)).unbind(1)
            top_of_all = top.amax(0)
            log_sum = top_of_all + ((top - top_of_all).exp() * total).sum(0).log()
            losses = (log_sum - at_target.sum(0)).masked_fill(absent, 0)
            loss += losses.view(ranks, -1)[rank].sum()
            grad = exact_product(logits_gradient(logits, *change, log_sum, local, absent), weight)
            if ranks > 1:
                own = grad.new_empty(len(grad) // ranks, grad.shape[1])
                dist.reduce_scatter_tensor(own, grad, group=model.group)
                grad = own
            grad = norm_backward(part, grad, model.norm, None, arch.norm, arch.norm_eps)
            grad_x.index_add_(0, bin.learnt[chunk], grad)  # padding adds 0 to token 0
        ctx.grad_x = grad_x
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        grad_x, ctx.grad_x = ctx.grad_x, None
        return grad_x.mul_(grad_loss), None, None
# ------------------------------------------------------------------------------------------------
# Families of models
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Family:
    """How a model type differs from Llama. "config.x": the config's x, None if it declares none."""

    norm: str = "rms"  # a kind of norm_of; of the final norm, q_norm and k_norm too
    norm_eps: float | str = "config.rms_norm_eps"
    attention_norm: str | None = "input_layernorm"  # its name below the layer; None: there is none
    attention_post_norm: str | None = None  # of what attention returns
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None  # of what the MLP returns
    parallel: bool = False  # the MLP reads attention's normed input and both are added
    activation: str = "config.hidden_act"  # a key of ACTIVATIONS
    qkv_bias: bool | str = "config.attention_bias"
    out_bias: bool | str = "config.attention_bias"
    mlp_bias: bool | str = "config.mlp_bias"
    fused_qkv: bool = False  # one linear "qkv_proj"
    fused_gate_up: bool = False  # one linear "gate_up_proj"
    qk_norm: str | None = None  # weight: "head" [head_dim], "heads" [heads, head_dim], "full" [all]
    qk_norm_if: bool | str = True  # where a config can switch it off
    q_norm: str | None = "self_attn.q_norm"  # None in an Architecture without qk_norm
    k_norm: str | None = "self_attn.k_norm"
    qk_norm_after_rotary: bool = False
    rotary_interleaved: bool = False  # pairs (0, 1), (2, 3), .. instead of halves
    partial_rotary: bool = False  # partial_rotary_factor of rope_parameters counts
    ropes_by_layer_type: bool = False  # rope_parameters has an entry for each layer type
    ntk_alpha: bool = False  # alpha of rope_parameters counts, whatever the length
    no_rotary: str | None = None  # layers without: those of "no_rope_layers", "full" ones, or with
    #                               "full_if_window" full ones if the model has a window at all
    window: str | None = None  # layers with a sliding window: "all", or those of "layer_types"
    attention_scale: float | str | None = None  # None: head_dim ** -0.5
    query_scalar: float | str | None = None  # attention_scale = this ** -0.5
    attention_softcap: float | str | None = None
    logits_softcap: float | str | None = None
    query_temperature: bool | tuple = False  # beta, n: q *= 1 + beta * log(1 + position // n)
    sqrt_embedding: bool = False  # embedding_multiplier = hidden_size ** 0.5
    embedding_multiplier: float | str = 1.0  # round it to the embedding's dtype first (Gemma)
    residual_multiplier: float | str = 1.0  # on what attention and the MLP add, after post-norms
    logits_multiplier: float | str = 1.0
    logits_divisor: float | str = 1.0
    attention_dropout: float | str = "config.attention_dropout"
    residual_dropout: float | str = 0.0  # on what o_proj and down_proj return


POST_NORMS = dict(attention_norm=None, attention_post_norm="post_attention_layernorm",
                  mlp_norm=None, mlp_post_norm="post_feedforward_layernorm")
GEMMA = dict(norm="rms_plus_one", sqrt_embedding=True)
GEMMA2 = GEMMA | POST_NORMS | dict(
    attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm", window="layer_types",
    activation="config.hidden_activation", query_scalar="config.query_pre_attn_scalar")
COHERE = dict(norm="layer", norm_eps="config.layer_norm_eps", mlp_norm="input_layernorm",
              parallel=True, rotary_interleaved=True, logits_multiplier="config.logit_scale")
OLMO2 = POST_NORMS | dict(norm="rms_fp32", qk_norm="full")
GLM = dict(out_bias=False, fused_gate_up=True, rotary_interleaved=True, partial_rotary=True)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window="all"),
    "ministral": Family(window="layer_types"),
    "ministral3": Family(window="all", query_temperature=True),
    "qwen2": Family(qkv_bias=True, window="layer_types"),
    "qwen3": Family(qk_norm="head", window="layer_types"),
    "phi3": Family(fused_qkv=True, fused_gate_up=True, partial_rotary=True, window="all"),
    "gemma": Family(**GEMMA),
    "gemma2": Family(**GEMMA2, attention_softcap="config.attn_logit_softcapping",
                     logits_softcap="config.final_logit_softcapping"),
    "gemma3_text": Family(**GEMMA2, qk_norm="head", ropes_by_layer_type=True),
    "granite": Family(attention_scale="config.attention_multiplier",
                      embedding_multiplier="config.embedding_multiplier",
                      residual_multiplier="config.residual_multiplier",
                      logits_divisor="config.logits_scaling"),
    "cohere": Family(**COHERE, qk_norm="heads", qk_norm_if="config.use_qk_norm"),
    "cohere2": Family(**COHERE, no_rotary="full", window="layer_types"),
    "olmo2": Family(**OLMO2),
    "olmo3": Family(**OLMO2, ropes_by_layer_type=True, window="layer_types"),
    "smollm3": Family(no_rotary="no_rope_layers", window="layer_types"),
    "glm": Family(**GLM),
    "glm4": Family(**GLM, attention_post_norm="post_self_attn_layernorm",
                   mlp_post_norm="post_mlp_layernorm"),
    "ernie4_5": Family(qkv_bias="config.use_bias", out_bias="config.use_bias",
                       mlp_bias="config.use_bias", rotary_interleaved=True),
    "seed_oss": Family(out_bias="config.attention_out_bias",
                       residual_dropout="config.residual_dropout"),
    "exaone4": Family(**POST_NORMS, qk_norm="head", window="layer_types",
                      no_rotary="full_if_window"),
    "hunyuan_v1_dense": Family(qk_norm="head", qk_norm_after_rotary=True, ntk_alpha=True,
                               q_norm="self_attn.query_layernorm",
                               k_norm="self_attn.key_layernorm")}
MULTIMODAL = {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}  # outer: text's


@dataclasses.dataclass(frozen=True)
class Linear:
    name: str  # below the layer, as transformers and checkpoints name it
    out_features: int
    in_features: int
    bias: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(Family):
    """A family's record with one model's values; what a layer computes follows from this alone."""

    family: str  # model_type of the text model
    n_layers: int
    hidden_size: int
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    qkv: list[Linear]  # their outputs, concatenated, are q, k, v
    out: list[Linear]
    gate_up: list[Linear]  # their outputs, concatenated, are gate, up
    down: list[Linear]
    rotary_dim: int  # the first dimensions of a head that are rotated
    ropes: list[dict]  # settings for rope_frequencies, one for each kind of rotary
    layer_rope: list[int | None]  # for each layer which of `ropes`; None: no rotary
    layer_window: list[int | None]  # a query sees this many keys, itself included; None: all
    tied: bool
    module_prefix: str  # module = module_prefix + f"layers.{i}." + name
    checkpoint_prefixes: list[str]  # the same in files; tried in turn
    head_names: list[str]  # the head's weight in files; tried in turn

    @property
    def linears(self):
        return self.qkv + self.out + self.gate_up + self.down

    @property
    def vectors(self):
        """{name below the layer: shape} of all of a layer's parameters but its linears' weights."""
        norms = self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm
        shapes = {f"{name}.weight": (self.hidden_size,) for name in norms if name}
        if self.qk_norm:
            for name, heads in ((self.q_norm, self.n_heads), (self.k_norm, self.n_kv_heads)):
                shapes[f"{name}.weight"] = {
                    "head": (self.head_dim,), "heads": (heads, self.head_dim),
                    "full": (heads * self.head_dim,)}[self.qk_norm]
        return shapes | {f"{x.name}.bias": (x.out_features,) for x in self.linears if x.bias}


LAYER_TYPES = {"full_attention", "sliding_attention"}
ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3"}
ROPE_KEYS = set("""rope_type type rope_theta factor partial_rotary_factor alpha attention_factor
    original_max_position_embeddings max_position_embeddings beta_fast beta_slow mscale truncate
    mscale_all_dim short_factor long_factor low_freq_factor high_freq_factor llama_4_scaling_beta
    """.split())
# Fields of config classes that describe_model reads for every family, or that change no output.
# Any other field that no record names must have its default: it could be a mechanism unknown here.
KNOWN_FIELDS = set("""vocab_size hidden_size intermediate_size num_hidden_layers head_dim dtype
    num_attention_heads num_key_value_heads tie_word_embeddings rope_parameters layer_types
    sliding_window use_sliding_window max_window_layers sliding_window_pattern no_rope_layers
    no_rope_layer_interval max_position_embeddings original_max_position_embeddings use_cache
    initializer_range pad_token_id bos_token_id eos_token_id eod_token_id transformers_version
    architectures output_hidden_states return_dict id2label label2id problem_type""".split())


def text_config(model_config):
    """The language model's config inside a multimodal one; else the config itself."""
    return model_config.text_config if model_config.model_type in MULTIMODAL else model_config


def check_model(model_config):
    """Raise ValueError for a model that the table lacks or that its record cannot express."""
    outer, c = model_config.model_type, text_config(model_config)
    name = outer if c is model_config else f"{outer} with {c.model_type}"
    if c.model_type not in (MULTIMODAL.get(outer) or FAMILIES):
        words = "num_local_experts", "num_experts", "n_routed_experts", "is_encoder_decoder"
        why = [f"{x}={getattr(c, x)}" for x in words if getattr(c, x, None)]
        why += sorted(set(getattr(c, "layer_types", None) or ()) - LAYER_TYPES)
        why = f" ({', '.join(why)})" if why else ""
        raise ValueError(f"model_type {name} is not supported{why}: use one of"
                         f" {', '.join([*FAMILIES, *MULTIMODAL])}")
    if getattr(c, "is_causal", True) is False:
        raise ValueError(f"{name}: is_causal=False is not supported: only causal attention is")
    record = vars(FAMILIES[c.model_type]).values()
    known = KNOWN_FIELDS | {str(value).removeprefix("config.") for value in record}
    for field in dataclasses.fields(c):
        value, default = getattr(c, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name not in known and value != default and (value or default):
            raise ValueError(f"{name}: {field.name}={value} is not supported, only {default}")


def describe_model(model_config):
    """The Architecture of a config from AutoConfig; ValueError where no record can express it."""
    check_model(model_config)
    c = text_config(model_config)
    record, values = FAMILIES[c.model_type], {}
    declared = {field.name for field in dataclasses.fields(c)}
    for key, value in vars(record).items():
        if str(value).startswith("config."):
            name = value.removeprefix("config.")
            value = getattr(c, name) if name in declared else None
        values[key] = value
    family = dataclasses.replace(record, **values)
    if family.activation not in ACTIVATIONS:
        raise ValueError(f"{record.activation.removeprefix('config.')} {family.activation} is not"
                         f" supported: only {', '.join(ACTIVATIONS)}")
    hidden, inner = c.hidden_size, c.intermediate_size
    heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are no multiple of {kv_heads} key-value heads")
    head_dim = getattr(c, "head_dim", None) or hidden // heads
    values.update(describe_positions(c, family, head_dim))
    if not (family.qk_norm and family.qk_norm_if):
        values.update(qk_norm=None, q_norm=None, k_norm=None)
    if family.query_scalar or family.attention_scale is None:
        values["attention_scale"] = (family.query_scalar or head_dim) ** -0.5
    if family.sqrt_embedding:
        values["embedding_multiplier"] = hidden**0.5
    values["logits_multiplier"] = family.logits_multiplier / family.logits_divisor
    values["attention_dropout"] = family.attention_dropout or 0.0
    qkv = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    qkv = {"qkv": sum(qkv.values())} if family.fused_qkv else qkv
    gate_up = {"gate_up": 2 * inner} if family.fused_gate_up else {"gate": inner, "up": inner}
    prefixes = ["model."]
    if c is not model_config:
        prefixes = ["model.language_model.", "language_model.model."]
    return Architecture(
        **values, family=c.model_type, n_layers=c.num_hidden_layers, hidden_size=hidden,
        intermediate_size=inner, n_heads=heads, n_kv_heads=kv_heads, head_dim=head_dim,
        vocab_size=c.vocab_size,
        qkv=[Linear(f"self_attn.{x}_proj", n, hidden, family.qkv_bias) for x, n in qkv.items()],
        out=[Linear("self_attn.o_proj", hidden, heads * head_dim, family.out_bias)],
        gate_up=[Linear(f"mlp.{x}_proj", n, hidden, family.mlp_bias) for x, n in gate_up.items()],
        down=[Linear("mlp.down_proj", hidden, inner, family.mlp_bias)],
        # mistral3's outer flag is True by default though released models are not tied
        tied=c.tie_word_embeddings and model_config.tie_word_embeddings,
        module_prefix=prefixes[0], checkpoint_prefixes=prefixes,
        head_names=["lm_head.weight", "language_model.lm_head.weight"][: len(prefixes)])


def describe_positions(c, family, head_dim):
    """What an Architecture says of positions: {name of its field: value}, from a text config."""
    n_layers, window = c.num_hidden_layers, getattr(c, "sliding_window", None)
    kinds = getattr(c, "layer_types", None) or ["full_attention"] * n_layers
    if set(kinds) - LAYER_TYPES or len(kinds) != n_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {n_layers} layers:"
                         f" {sorted(set(kinds))}; full_attention and sliding_attention work")
    slides = [family.window == "all" and window is not None
              or family.window == "layer_types" and kind == "sliding_attention" for kind in kinds]
    used = getattr(c, "use_sliding_window", True)
    if any(slides) and not (window and used):
        raise ValueError(f"layers with a sliding window, but sliding_window={window},"
                         f" use_sliding_window={used}")
    rotated = c.no_rope_layers if family.no_rotary == "no_rope_layers" else [True] * n_layers
    if family.no_rotary == "full" or family.no_rotary == "full_if_window" and window is not None:
        rotated = slides
    ropes, layer_rope = [], []
    for kind, rotates in zip(kinds, rotated, strict=True):
        rope = dict(c.rope_parameters)
        if family.ropes_by_layer_type and "rope_type" not in rope:  # else they are of no layer type
            rope = dict(rope.get(kind) or {})
        if rope.get("rope_type") not in ROPE_TYPES or not rope.keys() <= ROPE_KEYS:
            raise ValueError(f"rope_parameters {c.rope_parameters} are not supported")
        if family.query_temperature and not rope.get("llama_4_scaling_beta"):
            raise ValueError(f"rope_parameters {rope} have no llama_4_scaling_beta")
        if family.ntk_alpha and rope["rope_type"] == "dynamic" and rope.get("alpha"):
            theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
            rope = {"rope_type": "default", "rope_theta": theta}  # no longer depends on length
        if rope not in ropes:
            ropes.append(rope)
        layer_rope.append(ropes.index(rope) if rotates else None)
    part = ropes[0].get("partial_rotary_factor") or 1.0
    if len({x.get("partial_rotary_factor") for x in ropes}) > 1 or int(head_dim * part) % 2 \
            or part != 1.0 and not family.partial_rotary:
        raise ValueError(f"partial_rotary_factor={part} of {head_dim} dimensions is not supported")
    temperature = family.query_temperature and (
        ropes[0]["llama_4_scaling_beta"], ropes[0]["original_max_position_embeddings"])
    return dict(rotary_dim=int(head_dim * part), ropes=ropes, layer_rope=layer_rope,
                layer_window=[window if slide else None for slide in slides],
                query_temperature=temperature)


def rope_frequencies(rope, arch, max_seq_len, model_config):
    """(fp32 [rotary_dim / 2] inverse frequencies, factor on cos and sin) of one of arch.ropes.
    max_seq_len chooses longrope's factors and dynamic's base once, for all batches."""
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, arch.rotary_dim, 2, dtype=torch.float) / arch.rotary_dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    view = types.SimpleNamespace(
        rope_parameters=rope | {"partial_rotary_factor": 1.0}, head_dim=arch.rotary_dim,
        hidden_size=arch.hidden_size, num_attention_heads=arch.n_heads,
        max_position_embeddings=text_config(model_config).max_position_embeddings,
        standardize_rope_params=lambda: None)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](view, "cpu", seq_len=max_seq_len)
    return inv_freq.float(), float(factor)


def shrunk_config(model_config):
    """A text config of two small layers, one of each kind, that has every feature of the model."""
    arch = describe_model(model_config)
    c = copy.deepcopy(text_config(model_config))
    kinds = list(zip(arch.layer_rope, arch.layer_window))
    other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), 0)
    for name in ("layer_types", "no_rope_layers"):
        if getattr(c, name, None):
            setattr(c, name, [getattr(c, name)[0], getattr(c, name)[other]])
    c.num_hidden_layers, c.vocab_size, c.intermediate_size = 2, 128, 96
    c.initializer_range = 0.2  # at 0.02 attention is so even that a wrong scale goes unnoticed
    c.num_attention_heads = 4
    c.num_key_value_heads = {1: 1, arch.n_heads: 4}.get(arch.n_kv_heads, 2)
    c.hidden_size = 64 if arch.n_heads * arch.head_dim == arch.hidden_size else 48
    if hasattr(c, "head_dim"):
        c.head_dim = 16
    if getattr(c, "sliding_window", None):
        c.sliding_window = 5
    for rope in [c.rope_parameters, *c.rope_parameters.values()]:
        if isinstance(rope, dict) and ("long_factor" in rope or "llama_4_scaling_beta" in rope):
            ratio = c.max_position_embeddings / rope["original_max_position_embeddings"]
            rope["original_max_position_embeddings"] = 16  # so that short rows reach both sides
            c.max_position_embeddings = int(16 * ratio)
            if hasattr(c, "original_max_position_embeddings"):
                c.original_max_position_embeddings = 16
            for name in {"short_factor", "long_factor"} & rope.keys():
                rope[name] = rope[name][: arch.rotary_dim * 8 // arch.head_dim]
    c.pad_token_id, c.bos_token_id, c.eos_token_id = None, 1, 2
    return c


# ------------------------------------------------------------------------------------------------
# Files of a model, and loading
# ------------------------------------------------------------------------------------------------


def model_directory(name, random_weights):
    """The local directory of a model; downloads it first if `name` is a Hub id."""
    path = Path(name)
    if random_weights and name in SHAPES:
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--model {name}: the directory has no config.json")
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"--model {name}: neither a directory nor a Hub id (owner/name)")
    files = ["*.json", "*.model", "*.txt", "*.jinja"] + ["*.safetensors"] * (not random_weights)
    twice = ["consolidated*", "*/*.safetensors"]  # the same weights in another form
    try:  # every rank calls it; the Hub client's file locks let one of a node download
        path = huggingface_hub.snapshot_download(name, allow_patterns=files, ignore_patterns=twice)
    except Exception as e:
        raise ValueError(f"--model {name}: not a directory, and the Hub says: {e}")
    return Path(path)


def read_model_config(directory, config):
    """The model's own configuration and its Architecture."""
    try:
        if config.random_weights and config.model in SHAPES:
            model_config = AutoConfig.for_model(**SHAPES[config.model])
        else:
            model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        arch = describe_model(model_config)
    except Exception as e:
        raise ValueError(f"--model {config.model}: {e}")
    settings = getattr(model_config, "quantization_config", None)
    want = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True}
    for key, value in want.items():
        if settings and settings.get(key) != value:
            raise ValueError(f"--model {config.model}: is quantised already, with {key}"
                             f" {settings.get(key)}; only {value} can be read, so name the original"
                             " model")
    longest = text_config(model_config).max_position_embeddings
    if longest and config.max_seq_len > longest and config.dataset:
        raise ValueError(f"--max_seq_len {config.max_seq_len}: the model was made for {longest}")
    return model_config, arch


def load_tokenizer(directory):
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"{directory}: its tokenizer cannot be loaded: {e!r}")


def weight_files(directory):
    """Which file of the directory holds each tensor: {name: path}."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{index}: no index of safetensors files: {e!r}")
        if not names:
            raise ValueError(f"{index}: weight_map is empty")
        for file in set(names.values()):
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{index}: names {file!r}, a path outside the directory")
            if not (directory / file).is_file():
                raise ValueError(f"{directory / file}: missing, but named in {index.name}")
        return {name: directory / file for name, file in names.items()}
    file = directory / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"{directory}: has neither {index.name} nor {file.name}; only safetensors"
                         " are read")
    return {name: file for _, name in tensor_places([file])}


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "U8": torch.uint8}
NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, behind that of the weight
Stored = collections.namedtuple("Stored", "dtype shape start stop")  # bytes [start, stop) of a file
Names = collections.namedtuple("Names", "shapes linears tables in_layers")  # see tensor_names


def tensor_places(paths):
    """What safetensors files hold, by their headers: {(path, tensor's name): Stored}."""
    places = {}
    for path in set(paths):
        try:
            with safe_open(path, "pt"):
                pass  # it is whole
        except SafetensorError as e:
            raise ValueError(f"{path}: not a whole safetensors file: {e}")
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, stop = (8 + size + offset for offset in tensor["data_offsets"])
            places[path, name] = Stored(tensor["dtype"], tuple(tensor["shape"]), start, stop)
    return places


def tensor_names(arch, files):
    """What a checkpoint calls the tensors that are read: {name: shape} in the order of reading;
    {name: Linear} of those that are in 4 bits here; the names of embedding and head, of which each
    rank has its own rows; how the names in layers begin. `files` tells which spelling it has."""
    stems = arch.checkpoint_prefixes
    stem = next((s for s in stems if f"{s}embed_tokens.weight" in files), stems[0])
    head = next((name for name in arch.head_names if name in files), arch.head_names[0])
    embedding, table = f"{stem}embed_tokens.weight", (arch.vocab_size, arch.hidden_size)
    shapes, linears = {embedding: table}, {}
    for i in range(arch.n_layers):
        for linear in arch.linears:
            name = f"{stem}layers.{i}.{linear.name}.weight"
            shapes[name], linears[name] = (linear.out_features, linear.in_features), linear
        for key, shape in arch.vectors.items():
            shapes[f"{stem}layers.{i}.{key}"] = shape
    shapes[f"{stem}norm.weight"] = (arch.hidden_size,)
    if not arch.tied:
        shapes[head] = table
    return Names(shapes, linears, (embedding, head), f"{stem}layers.")


def check_files(files, names, model_config, compute_dtype):
    """Check a checkpoint's tensors before they are read. Returns check_stored's states of a model
    that is quantised already, else None. All ranks must call this."""
    with together():
        wanted = {name: (shape, FLOATS) for name, shape in names.shapes.items()}
        if not getattr(model_config, "quantization_config", None):
            check_tensors(files, names, wanted)
            return None
        states = check_stored(files, names, wanted)
        dtypes = sorted({state["dtype"] for state in states.values()})
    say(f"model: quantised already, loaded as it is: {len(states)} linears in NF4")
    if dtypes != [compute_dtype]:
        say(f"they were quantised from {', '.join(dtypes)}, to which bitsandbytes dequantises them;"
            f" here they are dequantised to {compute_dtype}, so that some weights differ by its"
            " rounding")
    return states


def check_tensors(files, names, wanted):
    """The files must have the tensors `wanted`, {name: (shape or None, dtypes)}, and no others in
    layers. Returns their tensor_places."""
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that its"
                         f" config.json asks for, the first is {missing[0]}")
    extra = [name for name in files if name.startswith(names.in_layers) and name not in wanted
             and not name.endswith("inv_freq")]
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config.json knows"
                         f" nothing of, the first is {extra[0]}")
    places = tensor_places(files.values())
    for name, (shape, dtypes) in wanted.items():
        file = files[name]
        if (file, name) not in places:
            raise ValueError(f"{file}: lacks {name}, which the index puts there")
        stored = places[file, name]
        if shape not in (None, stored.shape):
            raise ValueError(f"{file.name}: {name} has shape {list(stored.shape)}, but config.json"
                             f" asks for {list(shape)}")
        if stored.dtype not in dtypes:
            hint = ": without double quantisation?" if name.endswith("absmax") else ""
            raise ValueError(f"{file.name}: {name} is {stored.dtype}, which is not read;"
                             f" {', '.join(dtypes)} are{hint}")
    return places


def check_stored(files, names, wanted):
    """The same where bitsandbytes has quantised the linears, which must be as it is done here.
    Returns what it has stored of each, {weight's name: its JSON object}."""
    other = [name for name in names.linears if f"{name}.{NF4_STATE}" not in files]
    if other:
        raise ValueError(f"config.json says that the model is in 4-bit NF4, but {len(other)} of its"
                         f" layers' {len(names.linears)} linears are not, the first is {other[0]}:"
                         " name the original model")
    for name in files:
        if name.endswith(".absmax") and name.removesuffix(".absmax") not in names.linears:
            raise ValueError(f"{name}: only linears of decoder layers can be in 4-bit: name the"
                             " original model")
    for name in names.linears:
        n_blocks = math.ceil(math.prod(names.shapes[name]) / BLOCK)
        wanted[name] = None, DTYPES  # packed, in integers or floats of any size
        wanted[f"{name}.absmax"] = (n_blocks,), ["U8"]
        wanted[f"{name}.nested_absmax"] = (math.ceil(n_blocks / NESTED_BLOCK),), ["F32"]
        wanted[f"{name}.quant_map"] = (16,), ["F32"]
        wanted[f"{name}.nested_quant_map"] = (256,), ["F32"]
        wanted[f"{name}.{NF4_STATE}"] = None, ["U8"]
    places, states, cpu = check_tensors(files, names, wanted), {}, torch.device("cpu")
    tables = {"quant_map": nf4_code(cpu), "nested_quant_map": dynamic_map(cpu)}
    parts = [f"{name}.{part}" for name in names.linears for part in (NF4_STATE, *tables)]
    values = file_reader(files, cpu)((part, (1,), range(1)) for part in parts)
    for name in names.linears:
        file, shape = files[name], list(names.shapes[name])
        try:
            state = states[name] = json.loads(bytes(next(values).tolist()))
        except ValueError as e:
            raise ValueError(f"{file}: {name}.{NF4_STATE} is not JSON: {e}")
        want = {"quant_type": "nf4", "blocksize": BLOCK, "shape": shape,
                "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        for key, value in want.items():
            if state.get(key) != value:
                raise ValueError(f"{file}: {name} was quantised with {key} {state.get(key)}, only"
                                 f" {value} can be read")
        n_bytes = places[file, name].stop - places[file, name].start
        if n_bytes != math.prod(shape) // 2:
            raise ValueError(f"{file}: {name} has {n_bytes} bytes, but {shape} weights of 4 bits"
                             " are asked for")
        for part, table in tables.items():
            # what it stores may be of another version, and then differ in the last bits
            if not torch.allclose(next(values), table):
                raise ValueError(f"{file}: {name}.{part} is not the code of bitsandbytes' NF4")
    return states


def read_chunk(path, start, target, staging):
    """Read bytes from `start` of a file into `target`, a slice of a uint8 tensor."""
    buffer = getattr(staging, "buffer", target)[: target.numel()]
    view, done = memoryview(buffer.numpy()), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while n := file.readinto(view[done:]):
                done += n
    except OSError as e:
        raise OSError(f"{path}: cannot be read at byte {start + done}: {e.strerror}")
    if done < len(view):
        raise OSError(f"{path}: ends before byte {start + len(view)}: cut off since the start?")
    if target.is_cuda:
        # in the stream that `target` is used in, and done when it returns: the buffer is free again
        target.copy_(buffer)


def file_reader(files, device):
    """A function of requests [(name, shape, rows)] that yields those rows of the tensors, flat.

    Threads read at most READ_AHEAD bytes ahead, with plain reads: a mapping is read one page fault
    at a time, and its pages count as this process's memory. If a read fails, nothing more is read:
    the tensors are then zeros, so that no rank waits in a collective for this one, and the error
    is raised after the last.
    """
    places, staging = tensor_places(files.values()), threading.local()
    ahead, errors = collections.deque(), []

    def prepare_thread():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            staging.buffer = torch.empty(READ_CHUNK, dtype=torch.uint8, pin_memory=True)

    def begin(pool, path, dtype, start, size):
        target = torch.empty(size, dtype=torch.uint8, device=device)
        slices = [slice(at, at + READ_CHUNK) for at in range(0, 0 if errors else size, READ_CHUNK)]
        return target.view(dtype), [
            pool.submit(read_chunk, path, start + s.start, target[s], staging) for s in slices]

    def finish():
        target, chunks = ahead.popleft()
        errors.extend(e for chunk in chunks if (e := chunk.exception()))
        return target.zero_() if errors else target

    def read(requests):
        with ThreadPoolExecutor(READERS, initializer=prepare_thread) as pool:
            for name, shape, rows in requests:
                dtype, _, start, stop = places[files[name], name]
                row = (stop - start) // shape[0]  # bytes
                while ahead and sum(t.nbytes for t, _ in ahead) + len(rows) * row > READ_AHEAD:
                    yield finish()
                start += rows.start * row
                ahead.append(begin(pool, files[name], DTYPES[dtype], start, len(rows) * row))
            while ahead:
                yield finish()
        if errors:
            raise errors[0]

    return read


def random_reader(seed, dtype, device):
    """The same with random values, which depend on the name and not on the rank. Not ahead of use:
    the GPU makes a whole tensor at once."""

    def make(name, shape, rows):
        if "norm" in name or name.endswith("bias"):
            value = float(name.endswith("weight"))  # norms start at 1, biases at 0
            return torch.full((math.prod(shape),), value, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
        whole = torch.empty(shape, dtype=dtype, device=device)
        return whole.normal_(0, RANDOM_STD, generator=generator)[rows.start : rows.stop].clone()

    return lambda requests: (make(*request) for request in requests)


def own_blocks(model):
    """Which blocks this rank has of each of a layer's linears: [(Place, blocks counted from the
    linear's first, where they are in the rank's part of `nf4`)]. All layers are alike."""
    layer, found = model.layers[0], []
    n = len(local_part(layer.nf4))
    first = model.place[0] * n
    for p in layer.layout.places:
        start, stop = (min(max(at, p.blocks.start), p.blocks.stop) for at in (first, first + n))
        blocks = slice(start - p.blocks.start, stop - p.blocks.start)
        found.append((p, blocks, slice(start - first, stop - first)))
    return found


def quantise_shard(own, values, local, dtype, group):
    """Fill `local`, this rank's NF4Blocks of a layer, which are zeros. Returns (nested absmax,
    offset, code) of each linear. All ranks of the group must call this.

    Blocks are quantised independently, so that a rank's own blocks have the bytes they would
    have in the whole tensor. The second level takes the mean over all of a linear's: their fp32
    absmax, 4 bytes for 64 weights, is gathered and every rank does that part alike.
    """
    device, nested = local.device, []
    absmax = torch.zeros(len(local), dtype=torch.float32, device=device)
    for p, blocks, at in own:
        weights = next(values)
        if blocks.start == blocks.stop:
            continue
        skip = blocks.start * BLOCK % p.linear.in_features  # of its row, before the first block
        weights = weights.to(device, dtype).view(-1)[skip:][: (blocks.stop - blocks.start) * BLOCK]
        codes, state = bnb.functional.quantize_4bit(weights, blocksize=BLOCK, quant_type="nf4")
        local.packed[at].view(-1)[: codes.numel()] = codes.view(-1)
        absmax[at] = state.absmax
    all_absmax = all_gather(absmax, group).view(-1) if group else absmax
    for p, blocks, at in own:
        # a tensor of its own: how a sum is split, and rounded, depends on where a tensor begins
        whole = all_absmax[p.blocks].clone()
        offset, code = whole.mean(), dynamic_map(device)
        whole -= offset
        codes, state = bnb.functional.quantize_blockwise(whole, code, blocksize=NESTED_BLOCK)
        local.absmax_codes[at] = codes[blocks]
        nested.append((state.absmax, offset, code))
    return nested


def stored_shard(own, values, local, states):
    """The same of linears that bitsandbytes has quantised and stored: their bytes as they are."""
    nested = []
    for _, _, at in own:
        codes, absmax_codes, absmax, code = (next(values) for _ in range(4))
        local.packed[at].view(-1)[: codes.nbytes] = codes.view(torch.uint8)
        local.absmax_codes[at] = absmax_codes
        offset = torch.tensor(next(states)["nested_offset"], dtype=torch.float32)
        nested.append((absmax, offset.to(local.device), code))
    return nested


def local_part(parameter):
    """What this rank has of a parameter; DTensor.to_local() takes 5 us, for autograd's sake."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def set_local(module, name, local):
    """Give a meta parameter this rank's values."""
    old = getattr(module, name)
    if isinstance(old, DTensor):
        # as FSDP2 does it; DTensor.from_local would move an offloaded shard to the GPU
        local = DTensor(local, old._spec, requires_grad=False)
    setattr(module, name, nn.Parameter(local, requires_grad=old.requires_grad))


def load_weights(model, names, read, device, stored=None):
    """Fill all that is frozen: of embedding, head and each layer this rank's part alone. `read` is
    file_reader's or random_reader's result, `stored` that of check_files. Returns {linear's name in
    the checkpoint: its mean absmax}, a fingerprint of the base model. All ranks must call this."""
    n_bytes, before, started = 0, host_memory(), time.perf_counter()

    def count(value):
        nonlocal n_bytes
        n_bytes += value.nbytes
        return value

    # 4-bit weights before all that comes and goes: gaps between them would stay
    sizes = [len(local_part(layer.nf4)) for layer in model.layers]
    homes = [None if model.plan.offload_params else NF4Blocks.zeros(n, device) for n in sizes]
    values = map(count, read(weight_requests(model, names, stored)))
    fill_model(model, names, values, homes, device, stored)
    with together():
        next(values, None)  # a reader's error
    offsets = torch.cat([n.offsets for layer in model.layers for n in layer.nested.values()])
    say_loading(before, time.perf_counter() - started, n_bytes)
    return dict(zip(names.linears, offsets.tolist()))


def weight_requests(model, names, stored=None):
    """What this rank reads, in fill_model's order: [(name, shape, rows)]. Of a linear it is whole
    rows; or, where it is quantised already, packed codes, absmax codes and the nested state."""
    requests, own = [], {p.linear: blocks for p, blocks, _ in own_blocks(model)}
    own_rows = shard_range(model.arch.vocab_size, *model.place)
    for name, shape in names.shapes.items():
        if name not in names.linears:
            rows = own_rows if name in names.tables else range(shape[0])
            requests.append((name, shape, rows))
            continue
        (n_out, n_in), blocks = shape, own[names.linears[name]]
        if not stored:
            stop = min(math.ceil(blocks.stop * BLOCK / n_in), n_out)
            requests.append((name, shape, range(blocks.start * BLOCK // n_in, stop)))
            continue
        n_bytes, n_blocks, half = n_out * n_in // 2, math.ceil(n_out * n_in / BLOCK), BLOCK // 2
        requests += [
            (name, (n_bytes,), range(blocks.start * half, min(blocks.stop * half, n_bytes))),
            (f"{name}.absmax", (n_blocks,), range(blocks.start, blocks.stop)),
            (f"{name}.nested_absmax", (1,), range(1)),  # all of it
            (f"{name}.nested_quant_map", (1,), range(1))]
    return requests


def fill_model(model, names, values, homes, device, stored=None):
    """Give the model what weight_requests() asked for, one tensor of `values` after the other.
    `homes` are zeros for each layer's NF4 weights; None: made when it is their turn."""
    plan, layout, (shard, shards) = model.plan, model.layers[0].layout, model.place
    dtype, own = getattr(torch, plan.compute_dtype), own_blocks(model)
    states = stored and iter([stored[name] for name in names.linears])

    def table():
        return next(values).view(-1, model.arch.hidden_size).to(device, dtype)

    model.embedding = pinned_copy(table()) if plan.embedding_on_host else table()
    hidden = len(model.layers) < 3 or not is_rank_0()
    bar = tqdm(model.layers, "load and quantise", unit="layer", leave=False, disable=hidden)
    for layer, local in zip(bar, homes):
        if local is None:
            local = NF4Blocks.zeros(len(local_part(layer.nf4)), device)
        if stored:
            nested = iter(stored_shard(own, values, local, states))
        else:
            group = model.group if shards > 1 else None
            nested = iter(quantise_shard(own, values, local, dtype, group))
        if plan.offload_params:
            local = NF4Blocks(*map(pinned_copy, (local.packed, local.absmax_codes)), device)
        for group in layout.groups:
            absmax, offsets, codes = zip(*(next(nested) for _ in group.places))
            layer.nested[group.site] = Nested(torch.cat(absmax), torch.stack(offsets),
                                              torch.stack(codes))
        set_local(layer, "nf4", local)
        vectors = torch.zeros(len(local_part(layer.vectors)) * shards, dtype=dtype, device=device)
        for where, _ in layout.vectors.values():
            vectors[where] = next(values).to(device, dtype)
        set_local(layer, "vectors", vectors.view(shards, -1)[shard].clone())
    model.norm = next(values).to(device, dtype)
    model.head = model.embedding if model.arch.tied else table()


@contextlib.contextmanager
def gathered(layer):
    """The layer's whole parameters, outside of a forward. All ranks must call this."""
    if isinstance(layer, FSDPModule):
        layer.unshard()
    yield
    if isinstance(layer, FSDPModule):
        layer.reshard()


@torch.no_grad()
def measure_rows(model):
    """For DoRA: the norms of all weights' rows, fp32. All ranks must call this."""
    for layer in model.layers:
        with gathered(layer):
            blank = layer.vectors.new_zeros(layer.layout.n_adapter)
            for group in layer.layout.groups:
                if group.ranks:
                    weight = dequantise_group(layer, group, blank)[:, : group.in_features]
                    norms = torch.cat([rows.float().norm(dim=1) for rows in weight.split(4096)])
                    layer.row_norms[group.site] = norms

# ------------------------------------------------------------------------------------------------
# The plan
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is laid out on the GPUs, what that takes, and how long."""

    compute_dtype: str
    n_layers: int
    shard_group_size: int  # processes that share one copy of the model
    reshard_after_forward: bool
    bin_tokens: int  # the most in one bin
    recomputed: int  # layers, the first ones, that do not keep everything
    keep_middle: bool  # of these: keep the sum after attention, too
    hold_weights: bool  # dequantise a weight once in a layer's backward, not twice
    offload_activations: bool
    offload_params: bool
    embedding_on_host: bool = False
    graphs: bool = False  # CUDA graphs; if not:
    why_no_graphs: str = ""
    memory: tuple = ()  # of (kind, bytes) of one GPU at the peak of a step
    host_bytes: int = 0  # pinned, of one process
    token_seconds: float = 0.0  # of one GPU, predicted

    @property
    def whole(self):
        """Whether a GPU holds a copy of the model of its own; offloaded weights are FSDP2's to
        bring."""
        return self.shard_group_size == 1 and not self.offload_params

    @property
    def bytes(self):
        return sum(size for _, size in self.memory)

    def keeps(self, index):
        """What a layer keeps from forward to backward, see LayerFunction."""
        if index >= self.recomputed:
            return "all"
        return "middle" if self.keep_middle else "x"

    def fits(self, limit, spare=GAPS):
        return not limit or self.bytes <= (1 - spare) * limit


def predict(plan, arch, layout):
    """The plan with its memory filled in."""
    item, shards = getattr(torch, plan.compute_dtype).itemsize, plan.shard_group_size
    n_layers, n, sharded = arch.n_layers, plan.bin_tokens, not plan.whole
    token = n * item  # bytes of one value a token
    codes, adapter = layout.n_blocks * (BLOCK // 2 + 1), layout.n_adapter * 4
    table = arch.vocab_size * arch.hidden_size * item / shards
    first, last = plan.keeps(0), plan.keeps(n_layers - 1)
    inputs = plan.recomputed * kept_values(arch, layout, first) * token if plan.recomputed else 0
    others = (n_layers - plan.recomputed) * kept_values(arch, layout, "all") * token
    live = live_bytes(arch, layout, plan, last)
    if first != last:  # when the first layer's backward runs, what the last ones kept is gone
        live = max(live, live_bytes(arch, layout, plan, first) - others)
    logits = 1.25 * CHUNK_BYTES * item / 2  # a chunk of them and their gradient
    gathered = sharded * (codes + layout.n_vectors * item) + layout.n_adapter * item
    copies = 2 if plan.reshard_after_forward or plan.whole else n_layers + 1  # and the next one
    dora = 0
    if layout.dora:  # norms of rows; the outputs computed again, in fp32 with their gradient
        dora = 4 * n_layers * sum(g.out_features for g in layout.groups)
        dora += 10 * min(n, SLICE_TOKENS) * max(g.out_features for g in layout.groups)
    memory = {
        "4-bit weights": 0 if plan.offload_params else n_layers * codes / shards,
        "embedding, head, norms": table * (2 - arch.tied - plan.embedding_on_host)
        + n_layers * layout.n_vectors * item / shards,
        "adapter and gradients": 2 * n_layers * adapter / shards,
        "kept by recomputed layers": min(inputs, 3 * arch.hidden_size * token)
        if plan.offload_activations else inputs,
        "kept by other layers": others,
        "live layer or head": max(live, 2 * arch.hidden_size * token + logits),
        "one layer's adapter gradient": adapter * (3 if sharded else 1),
        "gathered weights": copies * gathered,
        "DoRA": dora}
    if plan.graphs:  # they keep what they ran in
        memory["CUDA graphs' own"] = inputs + others + live
    host = table * plan.embedding_on_host + n_layers * codes / shards * plan.offload_params
    host += plan.offload_activations * max(0, inputs - arch.hidden_size * token)
    memory = tuple((kind, int(size)) for kind, size in memory.items() if size)
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan's time is predicted by."""

    flops: float  # a second, of large products in the compute dtype
    bandwidth: float  # bytes a second, of the GPU's memory
    link: float  # bytes a second that a GPU receives in an all-gather
    launch: float = 40e-6  # seconds of the host for a kernel, Python around it included


def predict_time(plan, arch, layout, machine):
    """The plan with the seconds that one GPU takes for a token."""
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    weights = sum(x.out_features * x.in_features for x in arch.linears)
    again = plan.recomputed / arch.n_layers  # products of the second half are not computed again
    skipped = arch.down[0].in_features * arch.hidden_size
    skipped += plan.keep_middle * arch.out[0].in_features * arch.hidden_size
    flops = 2 * n * (2 * weights + again * (weights - skipped))
    flops += 2 * n * 3.5 * min(n, 2048) * arch.n_heads * arch.head_dim
    # each use of a weight: 4 bits read, a number written and read
    uses = 2 + again * (0.5 if plan.hold_weights else 1)
    passes = 30 * arch.hidden_size + 12 * arch.intermediate_size
    moved = uses * weights * (0.5 + item) + n * passes * item
    compute = flops / (machine.flops * n / (n + 256)) + moved / machine.bandwidth
    gathered = layout.n_blocks * (BLOCK // 2 + 1) + layout.n_adapter * item
    shards = plan.shard_group_size
    gathers = gathered * (shards - 1) / shards / machine.link
    gathers *= 2 if plan.reshard_after_forward else 1
    gathers += plan.offload_params * 2 * gathered / shards / 20e9  # over PCI Express
    launches = (100 + 80 * again + 40 * (not plan.whole)) * machine.launch
    layer = max(compute, gathers, 0 if plan.graphs else launches)
    layer += 0.1 * min(compute, gathers)  # they slow each other down
    head = 4 * n * arch.vocab_size * arch.hidden_size / machine.flops
    return dataclasses.replace(plan, token_seconds=(layer * arch.n_layers + head) / n)


def measure_machine(dtype, device):
    """The Machine, in round numbers, so that the same plan is found again. All ranks must call
    this: all take rank 0's."""
    if device.type == "cpu":
        return Machine(1e11, 1e10, 1e9)

    def seconds(run, times=20):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for i in range(2 * times):
            if i == times:  # clocks are up by now
                events[0].record()
            run()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1000 / times

    a, b = torch.randn(2, 4096, 4096, dtype=dtype, device=device)
    parts = torch.empty(dist.get_world_size(), 2**26, dtype=torch.uint8, device=device)
    own = parts[0].clone()
    figures = {
        "flops": 2 * 4096**3 / seconds(lambda: a @ b),
        "bandwidth": 2 * 4 * a.nbytes / seconds(lambda: torch.cat([a, a, b, b])),
        "link": parts.nbytes / seconds(lambda: dist.all_gather_into_tensor(parts, own))}
    rounded = {name: float(f"{figure:.1g}") for name, figure in figures.items()}
    return Machine(**gather_objects(rounded)[0])


def possible_plans(config, arch, layout, tokens, longest, world_size, device):
    """All plans that the flags leave open, those that keep most first: smaller groups, smaller
    bins, fewer layers recomputed."""
    groups = [n for n in range(1, world_size + 1) if world_size % n == 0]
    groups = [config.shard_group_size] if config.shard_group_size else groups
    counts = {"all": [arch.n_layers], "none": [0], "auto": range(arch.n_layers + 1)}
    counts = counts.get(config.recompute) or [int(config.recompute)]
    sizes = [config.micro_batch_tokens]
    if not config.micro_batch_tokens:  # by factors of 2 up to what a step has for each process
        sizes = [max(longest, math.ceil(tokens / world_size))]
        while sizes[0] > max(longest, 2048):
            sizes.insert(0, max(longest, math.ceil(sizes[0] / 2)))
        sizes = sorted({n if n == longest else round_up(n, device) for n in sizes})
    keep = [(True, True), (True, False), (False, True), (False, False)]
    for shards, bin_tokens, n in itertools.product(groups, sizes, counts):
        if shard_range(arch.vocab_size, shards - 1, shards):
            for middle, hold in keep if n else keep[-1:]:
                plan = Plan(config.compute_dtype, arch.n_layers, shards,
                            config.reshard_after_forward, bin_tokens, n, middle, hold,
                            config.offload_activations, config.offload_params)
                yield predict(plan, arch, layout)


def choose_plan(config, arch, layout, tokens, longest, limit, machine, device, world_size,
                capturable):
    """The fastest plan that fits, give or take 2 % for a tenth of the memory free. `tokens` are the
    most of any step, `longest` the longest row, `capturable` whether CUDA graphs can capture
    attention. Raises ValueError with what would help."""
    if config.recompute.isdecimal() and int(config.recompute) > arch.n_layers:
        raise ValueError(f"--recompute {config.recompute}: the model has {arch.n_layers} layers")
    if config.micro_batch_tokens and config.micro_batch_tokens < longest:
        raise ValueError(f"--micro_batch_tokens {config.micro_batch_tokens}: the longest row has"
                         f" {longest} tokens; use at least that or a shorter --max_seq_len")
    plans = list(possible_plans(config, arch, layout, tokens, longest, world_size, device))
    if not plans:
        raise ValueError(f"a vocabulary of {arch.vocab_size} cannot be shared by"
                         f" {config.shard_group_size} processes: use a smaller --shard_group_size")
    least = min(plan.host_bytes for plan in plans)
    most = min(least + HOST_SPARE, max(least, host_share() / 2))  # what is pinned for speed alone
    plans = [plan for plan in plans if plan.host_bytes <= most]
    if not any(plan.fits(limit) for plan in plans) and device.type == "cuda" and not (
        arch.tied or why_no_triton()
    ):  # the same numbers, at the price of a copy of the tokens' rows for each micro-batch
        plans = [predict(dataclasses.replace(plan, embedding_on_host=True), arch, layout)
                 for plan in plans]
    plan = min(plans, key=lambda plan: plan.bytes)
    fitting = [p for p in plans if p.fits(limit, 0.07)]
    fitting = [predict_time(p, arch, layout, machine) for p in fitting or [plan]]
    fastest = min(p.token_seconds for p in fitting)
    near = [p for p in fitting if p.token_seconds <= 1.02 * fastest]
    roomy = [p for p in near if p.fits(limit, 0.1)]  # in the order from what keeps most
    plan = roomy[0] if roomy else min(near, key=lambda plan: plan.bytes)
    check_plan(plan, config, arch, layout, limit)
    return use_graphs(plan, arch, layout, machine, limit, capturable)


def use_graphs(plan, arch, layout, machine, limit, capturable):
    """CUDA graphs where the host would be slower than the GPU, or the reason why not."""
    graphed = predict(dataclasses.replace(plan, graphs=True), arch, layout)
    graphed = predict_time(graphed, arch, layout, machine)
    reasons = {
        "FSDP2 gathers the weights": not plan.whole,
        "activations are offloaded": plan.offload_activations,
        "attention runs in plain torch": not capturable,
        "the host is fast enough": graphed.token_seconds > 0.95 * plan.token_seconds,
        "no memory for them": not graphed.fits(limit)}
    reason = next((text for text, is_so in reasons.items() if is_so), "")
    return dataclasses.replace(plan, why_no_graphs=reason) if reason else graphed


def check_plan(plan, config, arch, layout, limit):
    """Raise ValueError, with what would help, if the plan does not fit."""
    share = host_share()
    if plan.host_bytes > share:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / 2**30
        raise ValueError(f"this takes {plan.host_bytes * processes:.1f} GiB of host memory on this"
                         f" machine, of which {share * processes:.1f} GiB are available: offload"
                         " less")
    if plan.fits(limit):
        return
    flags, smaller = [], plan
    for flag, change in (
        ("--reshard_after_forward", {"reshard_after_forward": True}),
        ("--recompute all", {"recomputed": arch.n_layers}),
        ("--offload_activations", {"offload_activations": True}),
        ("--offload_params", {"offload_params": True}),
        (f"--max_seq_len {config.max_seq_len // 2}", {"bin_tokens": plan.bin_tokens // 2}),
    ):
        if all(getattr(smaller, name) != value for name, value in change.items()):
            smaller = predict(dataclasses.replace(smaller, **change), arch, layout)
            flags.append(flag)
            if smaller.fits(limit):
                break
    more = "" if smaller.fits(limit) else " and more GPUs"
    raise ValueError(
        f"this does not fit: predicted peak {plan.bytes / 2**30:.1f} GiB, and {GAPS:.0%} for gaps,"
        f" of {limit / 2**30:.1f} GiB; {' '.join(flags)}{more} would bring it to"
        f" {smaller.bytes / 2**30:.1f} GiB")


def agree_on_plan(config, arch, layout, examples, limit, device, kernels):
    """The plan of this run. All ranks must call this."""
    lengths = [len(ids) for ids, _ in examples]
    machine = measure_machine(getattr(torch, config.compute_dtype), device)
    if device.type == "cuda":  # peaks are to be those of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = range(1, min(config.max_steps, 200) + 1)
    tokens = max(sum(lengths[i] for i in step_rows(s, len(lengths), config)) for s in steps)
    used = {function for pair in kernels.values() for function in pair.values()}
    capturable = device.type == "cuda" and document_attention not in used
    with together():
        plan = choose_plan(config, arch, layout, tokens, max(lengths), limit, machine, device,
                           dist.get_world_size(), capturable)
    # host memory differs by rank and moment: all take rank 0's plan
    first = gather_objects(dataclasses.asdict(plan))[0]
    return Plan(**{**first, "memory": tuple(map(tuple, first["memory"]))})


def say_plan(plan, config, limit):
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.memory)
    say(f"memory plan of one GPU, GiB: {parts}")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free - torch.cuda.memory_reserved()
        say(f"beside the plan: CUDA's context, NCCL, and what else runs on this GPU, hold"
            f" {used / 2**30:.2f} GiB")
    why = "as asked" if config.shard_group_size else "the fastest that fits"
    say(f"plan: {plan.shard_group_size} of {dist.get_world_size()} processes share one copy of the"
        f" model ({why}); bins of at most {plan.bin_tokens:,} tokens;"
        f" {plan.recomputed} of {plan.n_layers} layers are recomputed"
        + (", from x and the sum after attention" if plan.recomputed and plan.keep_middle else "")
        + (", weights dequantised once a backward" if plan.hold_weights else "")
        + ("; nothing to offload" if plan.offload_activations and not plan.recomputed else "")
        + ("; the embedding is in host memory" if plan.embedding_on_host else "")
        + ("; CUDA graphs" if plan.graphs else f"; no CUDA graphs: {plan.why_no_graphs}")
        + f"; {1e6 * plan.token_seconds:.3g} us a token predicted")
    say(f"predicted peak {plan.bytes / 2**30:.2f} GiB"
        + (f" of {limit / 2**30:.2f} GiB" if limit else "")
        + (f", and {plan.host_bytes / 2**30:.2f} GiB of pinned host memory"
           if plan.host_bytes else ""))


def make_store(plan, arch, device):
    """Where recomputed layers keep their inputs."""
    if not plan.offload_activations or not plan.recomputed:
        return GPUStore()
    n_bytes = plan.bin_tokens * arch.hidden_size * getattr(torch, plan.compute_dtype).itemsize
    return HostStore(plan.recomputed * (2 if plan.keep_middle else 1), n_bytes, device)


def say_speed(run, records):
    """The answer of a dry run: how fast, how much is computed, how much memory."""
    arch, plan = run.model.arch, run.plan
    layer = sum(x.in_features * x.out_features for x in arch.linears)
    again = layer - arch.down[0].in_features * arch.hidden_size
    again -= plan.keep_middle * arch.out[0].in_features * arch.hidden_size
    rates = sorted(r["tokens_per_second_per_gpu"] for r in records[2:] or records[-1:])
    rate, peak = rates[len(rates) // 2], records[-1]["peak_memory_gib"]
    # forward 2 and backward 2 operations a weight and token, recomputation 2 more
    weights = 4 * (arch.n_layers * layer + arch.vocab_size * arch.hidden_size)
    tflops = rate * (weights + 2 * again * plan.recomputed) / 1e12
    say(f"measured: {rate:,.0f} tokens/s per GPU, {tflops:.1f} TFLOP/s, peak {peak:.2f} GiB;"
        f" predicted {1 / plan.token_seconds:,.0f} tokens/s")


# ------------------------------------------------------------------------------------------------
# Attention's kernel, and CUDA graphs
# ------------------------------------------------------------------------------------------------


def choose_attention(config, arch, device):
    """The attention to use, {"same": bins of documents of one length, "any": others}, each as
    {"full": function, "window": function}.

    On Hopper torch's SDPA (cuDNN) is the fastest for rows of one length, else Flash Attention 2;
    torch's own kernel for any lengths is where that is not installed. A kernel that does not give
    what plain torch gives is not used: a flash-attn can be built without sliding windows or caps,
    and computes anything, silently.
    """
    from transformers.utils import is_flash_attn_2_available

    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if config.attn == "flash_attention_2" and not has_flash:
        raise ValueError("--attn flash_attention_2: flash-attn is not installed or there is no GPU;"
                         " `make flash-attn` builds it, or use --attn sdpa")
    chosen = dict.fromkeys(("same", "any"), dict.fromkeys(("full", "window"), document_attention))
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    bf16 = config.compute_dtype == "bfloat16" and not arch.attention_dropout
    if bf16 and capability >= (8, 0):
        flash = [flash_attention] if has_flash and config.attn != "sdpa" else []
        batched_first = capability >= (9, 0) and config.attn != "flash_attention_2"
        same = [*([] if batched_first else flash), batched_attention]
        chosen = {"same": {}, "any": {}}
        for kind, reach in itertools.product(chosen, ("full", "window")):
            if reach == "full" or any(arch.layer_window):
                kernels = same if (kind, reach) == ("same", "full") else [*flash, varlen_attention]
                works = (f for f in kernels if attends(f, arch, reach, device))
                chosen[kind][reach] = next(works, document_attention)
    if config.attn == "flash_attention_2" and flash_attention not in chosen["any"].values():
        raise ValueError("--attn flash_attention_2: as installed it does not compute this model's"
                         " attention; use --attn sdpa")
    return chosen


def attends(kernel, arch, reach, device):
    """Whether a kernel gives what plain torch gives, forward and backward, on two documents."""
    if arch.attention_softcap and kernel is not flash_attention:
        return False
    generator = torch.Generator(device).manual_seed(0)
    heads = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads, arch.n_heads
    q, k, v, grad = (torch.randn(128, n, arch.head_dim, dtype=torch.bfloat16, device=device,
                                 generator=generator) for n in heads)
    q = q * (arch.attention_softcap or 1)  # else no score comes near the cap
    bounds = torch.tensor([0, 64, 128], dtype=torch.int32, device=device)
    probe = types.SimpleNamespace(lengths=(64, 64), longest=64, cu_seqlens=bounds, seeds=(0, 0))

    def both(function):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        out = function(*inputs, probe, arch, 8 if reach == "window" else None, 0)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    try:
        pairs = list(zip(both(kernel), both(document_attention)))
    except (ImportError, RuntimeError, TypeError, ValueError):
        return False
    return all(bool((got - want).norm() < 0.05 * want.norm()) for got, want in pairs)


MAX_GRAPHS = 64  # each takes some GPU memory beside torch's, which no plan counts


def graphed_loss(run, bin, scale):
    """bin_loss() by a CUDA graph of the bin's shape, captured when the shape comes a second time:
    then the host launches one thing instead of thousands."""
    tensors = {name: t for name, t in vars(bin).items() if isinstance(t, torch.Tensor)}
    same = bin.kernels is run.kernels["same"]
    key = (same and bin.lengths, bin.longest, *map(len, tensors.values()))
    if run.graphs.get(key) is None:
        captured = sum(graph is not None for graph in run.graphs.values())
        if key not in run.graphs or captured >= MAX_GRAPHS:
            run.graphs[key] = None  # kernels are compiled and chosen outside of a capture
            loss = run.model(bin)
            (loss * scale).backward()
            return loss.detach()
        run.graphs[key] = capture_graph(run, bin)
    graph, static, factor, loss = run.graphs[key]
    for name, tensor in tensors.items():
        getattr(static, name).copy_(tensor, non_blocking=True)
    factor.fill_(scale)
    graph.replay()
    return loss.clone()


def capture_graph(run, bin):
    """A graph of a bin's forward and backward, and what it reads and writes: the Bin, the factor on
    the loss, the loss."""
    static, factor = dataclasses.replace(bin), torch.ones((), device=run.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=run.graph_pool):
        loss = run.model(static)
        (loss * factor).backward()
        loss = loss.detach()
    run.graph_pool = run.graph_pool or graph.pool()
    static.ropes = None
    torch.cuda.empty_cache()  # what ran without a graph had taken
    return graph, static, factor, loss


# ------------------------------------------------------------------------------------------------
# The adapter and its optimizer
# ------------------------------------------------------------------------------------------------


class Adapter:
    """All that is trained, this rank's part of each layer's, as one fp32 vector [layers x part]:
    `weights`, its gradient, and bitsandbytes' paged 8-bit AdamW over it.

    One tensor instead of a thousand makes the optimizer one kernel and its state pageable. Layers
    compute with views of it. A part is whole blocks of the 8-bit state, so that on any number of
    GPUs the state is the same vector, cut elsewhere.
    """

    def __init__(self, model, arch, layout, device):
        self.arch, self.layout, self.layers, self.group = arch, layout, model.layers, model.group
        self.parts = layout.adapter_parts()
        self.rank, self.shards = model.place
        self.part = len(local_part(model.layers[0].adapter))
        n = len(self.layers) * self.part
        self.weights = nn.Parameter(torch.zeros(n, device=device))
        self.weights.grad = torch.zeros_like(self.weights)
        flat = self.weights.data, self.weights.grad
        for layer, weights, grad in zip(self.layers, *map(self.by_layer, flat)):
            set_local(layer, "adapter", weights)
            p = layer.adapter
            p.grad = DTensor(grad, p._spec, requires_grad=False) if isinstance(p, DTensor) else grad
        # in 8 bits whatever the size: another number of ranks must find the same kind of state
        self.optimizer = bnb.optim.PagedAdamW8bit(
            [self.weights], lr=0.0, weight_decay=0.0, min_8bit_size=0)
        self.optimizer.init_state(self.optimizer.param_groups[0], self.weights, 0, 0)
        self.state = self.optimizer.state[self.weights]

    @property
    def n_trainable(self):
        return len(self.layers) * sum(math.prod(shape) for _, shape in self.parts.values())

    def by_layer(self, tensor):
        return tensor.view(len(self.layers), -1)

    def names(self, i):
        """{PEFT's name in an adapter file: (slice of the layer's adapter, shape)}."""
        stem = f"base_model.model.{self.arch.module_prefix}layers.{i}."
        return {f"{stem}{linear}.{key}": part for (linear, key), part in self.parts.items()}

    def set_layer(self, i, values):
        """Give layer i its part of the whole values {PEFT's name: tensor}."""
        whole = torch.zeros(self.part * self.shards)
        for name, (where, _) in self.names(i).items():
            whole[where] = values[name].reshape(-1)
        mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
        self.by_layer(self.weights.data)[i] = whole[mine]

    def start(self, seed):
        """PEFT's initial values, the same whatever the number of ranks: A at random, B zero, DoRA's
        magnitudes the norms of the base weights' rows. Returns the steps done: 0."""
        for i, layer in enumerate(self.layers):
            values = {}
            for name, (_, shape) in self.names(i).items():
                values[name] = torch.zeros(shape)
                if name.endswith("lora_A.weight"):
                    generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
                    nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
            for group in self.layout.groups if self.layout.dora else ():
                for p in group.adapted:
                    stem = f"base_model.model.{self.arch.module_prefix}layers.{i}."
                    norms = layer.row_norms[group.site][p.rows].cpu()
                    values[f"{stem}{p.linear.name}.lora_magnitude_vector"] = norms
            self.set_layer(i, values)
        return 0

    def gather(self):
        """{PEFT's name: whole fp32 tensor on the CPU} on rank 0, {} elsewhere. All ranks must call
        this."""
        weights = {}
        for i, part in enumerate(self.by_layer(self.weights.data)):
            whole = part if self.shards == 1 else all_gather(part, self.group).view(-1)
            if dist.get_rank() == 0:
                whole = whole.cpu()
                for name, (where, shape) in self.names(i).items():
                    weights[name] = whole[where].view(shape).clone()
        return weights

    def clip(self, local_loss):
        """Sum loss and gradient over all ranks, scale the gradient to a norm of at most
        MAX_GRAD_NORM. Returns the global loss and that norm before, without a host sync. All ranks
        must call this."""
        grad = self.weights.grad
        if 1 == self.shards < dist.get_world_size() and not isinstance(self.layers[0], FSDPModule):
            dist.all_reduce(grad)
        everyone = all_gather(torch.stack([local_loss, grad.norm().double() ** 2]))
        everyone[self.shards :, 1] = 0  # other copies of the model have the same gradients
        loss, norm = everyone.sum(0).unbind()
        norm = norm.sqrt()
        grad.mul_((MAX_GRAD_NORM / norm).clamp(max=1))
        return loss, norm

    @torch.no_grad()
    def update(self, rate):
        """What the optimizer's step() does, which would also wait for the GPU, twice: of its paged
        state nothing is read on the host but in save_checkpoint, which waits itself."""
        (group,) = self.optimizer.param_groups
        group["lr"] = rate
        self.optimizer.prefetch_state(self.weights)
        self.optimizer.update_step(group, self.weights, 0, 0)
        self.weights.grad.zero_()

    def state_parts(self):
        """The optimizer's state by layer: {key: [layers, this rank's part]}."""
        return {key: self.by_layer(self.state[key]) for key in ("state1", "state2", "absmax1",
                                                               "absmax2")}

    def resume(self, path, config):
        """Weights and state of a checkpoint, whatever the number of ranks that saved it. Returns
        the steps done. All ranks must call this."""
        with together():
            saved = json.loads((path / "checkpoint.json").read_text())
            weights = load_file(path / "adapter_model.safetensors")
            for i in range(len(self.layers)):
                self.set_layer(i, weights)
            files = [load_file(path / name) for name in saved["optimizer_files"]]
            blank = int(self.state["qmap1"].abs().argmin())  # padding's momentum is 0, not code 0
            for key, live in self.state_parts().items():
                whole = torch.cat([file[key] for file in files], 1)
                values = blank if key == "state1" else 0
                whole = F.pad(whole, (0, max(0, live.shape[1] * self.shards - whole.shape[1])),
                              value=values)
                live.copy_(whole[:, self.rank * live.shape[1] : (self.rank + 1) * live.shape[1]])
            self.state["step"] = saved["optimizer_step"]
        say(f"resumed from {path}: {saved['step']} of {config.max_steps} steps are done")
        return saved["step"]


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------

MUST_MATCH = (  # what a resumed run cannot change and still be the same run
    "model", "dataset", "random_weights", "compute_dtype", "adapter", "lora_rank", "lora_alpha",
    "lora_dropout", "target_modules", "max_seq_len", "batch_size", "seed")


def sync_file(path):
    """Make a file or directory that was written survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_whole(path, content):
    """Replace a file whole by a text or by {name: tensor}: a reader sees the old or the new."""
    part = path.with_name(f".{path.name}.part")
    if isinstance(content, str):
        part.write_text(content)
    else:
        save_file(content, part, metadata={"format": "pt"})
    part.chmod(0o644)  # safetensors leaves it readable by its owner alone
    sync_file(part)
    os.replace(part, path)
    sync_file(path.parent)


def digest(path):
    """SHA-256 of a file; safetensors has no checksum of its own."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            sha.update(chunk)
    return sha.hexdigest()


def text_digest(state):
    """SHA-256 of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def write_adapter(directory, weights, lora_config):
    """The adapter in PEFT's format. Rank 0 only."""
    write_whole(directory / "adapter_model.safetensors", weights)
    lora_config.inference_mode = True
    lora_config.save_pretrained(directory)
    sync_file(directory / "adapter_config.json")


def save_checkpoint(run, step):
    """Write checkpoint-<step>, whole or not at all. All ranks must call this.

    Everything goes to a hidden directory that gets its name when each rank's part is written,
    synced and listed with its SHA-256: a directory with the right name is a whole checkpoint.
    """
    adapter, rank, entry = run.adapter, dist.get_rank(), None
    final = run.directory / f"checkpoint-{step:06d}"
    hidden = run.directory / f".{final.name}.part"
    weights = adapter.gather()
    if run.device.type == "cuda":
        torch.cuda.synchronize()  # paged state is read on the host, where no stream orders it
    on_rank_0(hidden.mkdir)  # nobody writes before it is there
    with together():
        if rank < adapter.shards:  # other copies of the model have the same state
            part = hidden / f"optimizer-{rank:05d}-of-{adapter.shards:05d}.safetensors"
            write_whole(part, {k: v.cpu().clone() for k, v in adapter.state_parts().items()})
            entry = part.name, digest(part)
    files = dict(filter(None, gather_objects(entry)))

    def finish():
        optimizer_files = sorted(files)
        write_adapter(hidden, weights, run.lora_config)
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            files[name] = digest(hidden / name)
        state = {
            "step": step,
            "rows_seen": step * run.config.batch_size,
            "optimizer_step": adapter.state["step"],
            "optimizer_files": optimizer_files,
            "data_sha256": run.data_sha256,
            "config": dataclasses.asdict(run.config),
            "files": files}
        state["sha256"] = text_digest(state)
        write_whole(hidden / "checkpoint.json", json.dumps(state, indent=2))
        shutil.rmtree(final, ignore_errors=True)  # one that was not whole
        os.replace(hidden, final)
        sync_file(run.directory)

    on_rank_0(finish)


def read_checkpoint(path):
    """The state in a checkpoint's list, if it and all files it names are what was written."""
    try:
        state = json.loads((path / "checkpoint.json").read_text())
        if state.pop("sha256") != text_digest(state):
            raise ValueError("checkpoint.json has another SHA-256 than when it was written")
        for name, sha in state["files"].items():
            if digest(path / name) != sha:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}, which is not whole: {e}")
    return state


def newest_checkpoint(directory):
    """The newest whole checkpoint of a run and its state. Rank 0 only."""
    broken = []
    for path in sorted(directory.glob("checkpoint-*"), reverse=True):
        try:
            return str(path), read_checkpoint(path)
        except ValueError as e:
            broken.append(str(e))
            say(f"skipped {e}")
    raise ValueError("; ".join([f"--resume: {directory} has no whole checkpoint", *broken]))


def find_checkpoint(config, directory, data_sha256):
    """The newest whole checkpoint, if this run can continue it. All ranks must call this."""
    path, state = on_rank_0(newest_checkpoint, directory)
    path = Path(path)
    with together():
        if "optimizer_files" not in state:
            raise ValueError(f"--resume: {path} was made by an older version of this script, whose"
                             " optimizer state was laid out otherwise: finish the run with that"
                             " version")
        now = json.loads(json.dumps(dataclasses.asdict(config)))
        for name in MUST_MATCH:
            if state["config"][name] != now[name]:
                raise ValueError(f"--resume: {path} was made with --{name} {state['config'][name]},"
                                 f" not {now[name]}")
        if state["data_sha256"] != data_sha256:
            raise ValueError(f"--resume: the rows are not those that {path} was made with: the data"
                             " set or the tokenizer has changed")
    return path


def check_base(directory, offsets):
    """Whether a resumed run's base model is the one it began with, by each linear's mean absmax."""
    before = json.loads((directory / "train_config.json").read_text())["quantization"]
    for name, now in offsets.items():
        was = before["absmax_offsets"][name]
        if abs(now - was) > 1e-5 * was:  # another kind of device moves it by 1e-7
            raise ValueError(f"--resume: the base model has changed: {name} has a mean absmax of"
                             f" {now:.8g}, when the run began it was {was:.8g}")


def describe_run(config, plan, base, device, examples, offsets, stored, date):
    """What train_config.json holds: the configuration, and all that a merge must know."""
    return {
        "config": dataclasses.asdict(config),
        "plan": dataclasses.asdict(plan),
        "base_model": str(base) if Path(config.model or base).is_dir() else config.model,
        "quantization": {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "double_quant": True,
            "nested_blocksize": NESTED_BLOCK,
            "quantized_from_dtype": config.compute_dtype,
            "prequantized": bool(stored),  # its bytes are the base's own, dequantised to that dtype
            "device": device.type,
            "absmax_offsets": offsets,  # each linear's mean absmax: tells one base from another
        },
        "world_size": dist.get_world_size(),
        "date": date,
        "versions": {m.__name__: m.__version__ for m in LIBRARIES},
        "probe_input_ids": [ids[:64].tolist() for ids, _ in examples[:4]]}


def say_start(config, plan, kernels, limit, data_line, device):
    """What this run is, before it begins."""
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in LIBRARIES)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, gloo"
    say(f"configuration: {json.dumps(dataclasses.asdict(config))}")
    say(f"{versions}; {dist.get_world_size()} x {gpu}")
    if device.type == "cuda" and why_no_triton():
        say(f"slower than need be, without fused kernels: {why_no_triton()}")
    say("attention: " + "; ".join(
        f"bins of {'rows of one length' if kind == 'same' else 'other rows'}:"
        f" {', '.join(sorted({function.__name__ for function in kernels[kind].values()}))}"
        for kind in kernels))
    say(data_line)
    say_plan(plan, config, limit)


# ------------------------------------------------------------------------------------------------
# The check at start, and the demo
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_family(model_config, config):
    """Compare the layer here with transformers' on two layers of the user's own model, shrunk, with
    two documents in one bin: logits and loss in fp32 on the CPU. Rank 0 only."""
    small, cpu = shrunk_config(model_config), torch.device("cpu")
    arch = dataclasses.replace(describe_model(small), attention_dropout=0.0, residual_dropout=0.0)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(
            small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
    for p in reference.parameters():  # norms of 1 and biases of 0 would hide mistakes
        if p.dim() == 1:
            p += torch.empty_like(p).normal_(0, 0.2, generator=generator)
    lengths = (24, 21)
    model = plain_model(small, arch, dict(reference.state_dict()), max(lengths))
    for i, layer in enumerate(model.layers):  # the reference gets what NF4 has made of its weights
        for group in layer.layout.groups:
            weight = dequantise_group(layer, group, layer.adapter)
            for p in group.places:
                target = reference.get_parameter(f"model.layers.{i}.{p.linear.name}.weight")
                target.copy_(weight[p.rows, : group.in_features])
    ids = torch.randint(3, arch.vocab_size, (sum(lengths),), generator=generator)
    documents = ids.split(lengths)
    logits = [reference(document[None]).logits[0].float() for document in documents]
    loss = sum(F.cross_entropy(rows[:-1], document[1:], reduction="sum")
               for rows, document in zip(logits, documents))
    kernels = choose_attention(Config(), arch, cpu)
    run = types.SimpleNamespace(device=cpu, store=GPUStore(), plan=model.plan, kernels=kernels)
    batch = [(document.int(), document.int()) for document in documents]
    bin = make_bin(batch, [[0, 1]], 0, torch.tensor(0), run)
    hidden = model.hidden(bin)
    normed = torch.empty_like(hidden)
    normalise(normed, hidden, model.norm, arch.norm, arch.norm_eps)
    here = scaled_logits(normed @ model.head.t(), arch.logits_multiplier, arch.logits_softcap)
    loss_here = model(bin)
    off = (here - torch.cat(logits)).norm() / torch.cat(logits).norm()
    if not (off < 1e-4 and abs(loss_here - loss) < 1e-4 * loss):
        kinds = sorted({str((layer.window, layer.rope)) for layer in model.layers})
        raise ValueError(
            f"--model {config.model}: the check at start failed: {arch.family} with layers {kinds}"
            f" (window, rotary) gives logits that are {off:.1e} from those of transformers"
            f" {transformers.__version__}, and a loss of {loss_here:.6f}, not {loss:.6f}: please"
            " report this")


def plain_model(model_config, arch, tensors, max_seq_len):
    """A Model of this process alone, in fp32 on the CPU, from tensors {checkpoint name: tensor}."""
    config = Config(compute_dtype="float32")
    plan = Plan("float32", arch.n_layers, 1, True, 64, 0, False, False, False, False)
    model = Model(arch, make_layout(arch, (), config), plan, 1)
    names, cpu = tensor_names(arch, tensors), torch.device("cpu")
    values = (tensors[name][rows.start : rows.stop].flatten()
              for name, _, rows in weight_requests(model, names))
    homes = [NF4Blocks.zeros(len(layer.nf4), cpu) for layer in model.layers]
    fill_model(model, names, values, homes, cpu)
    for layer in model.layers:
        set_local(layer, "adapter", torch.zeros(len(layer.adapter)))
    model.frequencies = [
        rope_frequencies(rope, arch, max_seq_len, model_config) for rope in arch.ropes]
    return model


def make_demo(config, directory):
    """The demo's model and data, unless the base that an adapter belongs to is there already. All
    ranks must call this."""
    say("No --model: training the built-in demo, a small Llama with random weights"
        + ("." if config.dataset else " and 512 made-up instructions (no --dataset)."))
    if not config.resume:
        on_rank_0(write_demo, directory / "demo")


def write_demo(directory):
    """A 2.6 M parameter Llama with random weights, its tokenizer and 512 instructions. Rank 0 only.

    The frozen base knows nothing, so what the loss falls by is what the adapter has learnt.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), []
    for _ in range(512):
        a, b = draw.randrange(10), draw.randrange(10)
        word, answer = draw.choice([("plus", a + b), ("times", a * b), ("minus", a - b)])
        prompt, completion = f"What is {a} {word} {b}?\n", f"The answer is {answer}."
        rows.append({"prompt": prompt, "completion": completion})
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    bpe, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(specials.values()),
                                  initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **specials)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    tokenizer.save_pretrained(directory / "model")

    model_config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.06, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(model_config)
    model.to(torch.bfloat16).save_pretrained(directory / "model")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: with torch 2.13 and gloo, one exit in ten aborts in a C++ thread's destructor
    # ("terminate called without an active exception"), after everything was written
    os._exit(code)
