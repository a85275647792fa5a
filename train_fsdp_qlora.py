#!/usr/bin/env python3
"""Fine-tune a large language model: 4-bit NF4 base weights, LoRA adapters, sharded by FSDP2.

    torchrun --nproc_per_node=2 train_fsdp_qlora.py
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --model meta-llama/Llama-2-70b-hf \
        --dataset data.jsonl --max_seq_len 2048
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --output_dir runs/my-run --resume must

The first command needs nothing but this file: it makes a small model and data set and trains on
them, on GPUs (NCCL) or, where there are none, on the CPU (gloo). The same command line starts a
run, resumes it, and does nothing once it is complete. Written to --output_dir:

    adapter_model.safetensors, adapter_config.json   the adapter, in PEFT's format, fp32
    train_config.json                                the resolved configuration, for merging
    metrics.jsonl, loss.png                          one JSON object a step or evaluation
    tensorboard/                                     the same numbers for TensorBoard
    tokenizer.json, ..                               the tokenizer with its chat template
    checkpoint-NNNNNN/                               what resuming needs
    status.json                                      what the run does, or how it ended

Map of this file. Part I is what you read and change, Part II what it stands on.

    Part I, the recipe         flags; train(), the whole job in six steps, its loop and evaluation;
                               data: what of a row is learnt, the order of rows, bins; what is
                               adapted, what is sharded; schedule, training step
    Part II, the engine room   parsing of flags; ranks and errors; signals and how a run ends;
                               output directory and logs; data: files, conversations, encoding;
                               the decoder layer, forward and backward; NF4; vocabulary and loss;
                               families of models; files and loading; the plan; CUDA graphs;
                               adapter and optimizer; checkpoints; check at start; demo

Tested with torch 2.11 and 2.13, transformers 5.17 and 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import bisect
import collections
import contextlib
import copy
import ctypes
import dataclasses
import difflib
import errno
import faulthandler
import fcntl
import functools
import gc
import glob
import gzip
import hashlib
import heapq
import importlib.util
import inspect
import itertools
import json
import logging
import math
import mmap
import os
import random
import re
import select
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import typing
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

# on a CPU it warns that a package is missing, which only its own inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import bitsandbytes as bnb
import huggingface_hub
import numpy as np
import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import LoraConfig
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.chat_template_utils import render_jinja_template

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

LIBRARIES = (torch, transformers, peft, bnb)
now = time.monotonic
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


GROUPS = {"model": "model and data", "batch_size": "training", "adapter": "adapter",
          "micro_batch_tokens": "memory and speed"}  # the first flag of each group in --help


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of the script. None means: derived from the rest, and printed, or not used."""

    model: str | None = knob(
        None, "Hub id or directory of safetensors; left out: a built-in demo;"
        " with --random_weights also " + ", ".join(SHAPES))
    dataset: tuple[str, ...] | None = knob(
        None, "files (JSONL, JSON, Parquet, CSV, also .gz), patterns, directories, what"
        " save_to_disk wrote, or a Hub id; behind these two may stand ,split=train_sft, behind"
        " a Hub id also ,name=CONFIGURATION ,revision=TAG; left out: the demo's instructions")
    eval_dataset: tuple[str, ...] | None = knob(
        None, "the same for evaluation, or a fraction of the rows of --dataset: 0.02")
    max_seq_len: int | None = knob(
        None, "tokens; longer rows are cut; left out: 2048, or what the model was made for if less")
    chat_template: str | None = knob(None, "Jinja file to use instead of the tokenizer's own")
    output_dir: str | None = knob(None, "where results go; left out: a new directory below runs/")
    resume: str = knob(
        "auto", "auto: resume the run in --output_dir, if there is one with the same flags; never:"
        " begin a new one; must, or no value: resume it, with the flags that it began with unless"
        " others are given", choices=("auto", "never", "must"),
        nargs="?", const="must")
    random_weights: bool = knob(False, "random weights: of the model, only config.json is read")
    batch_size: int = knob(16, "rows an optimizer step, over all GPUs")
    num_epochs: float = knob(1.0, "passes over the data set; --max_steps overrides it")
    max_steps: int | None = knob(None, "optimizer steps")
    learning_rate: float | None = knob(None, "peak; left out: 2e-4, for the demo 5e-3")
    lr_schedule: str = knob(
        "cosine", "after the warm-up: to 0 as a cosine or linear, or constant",
        choices=("cosine", "linear", "constant"))
    warmup_fraction: float = knob(0.03, "of all steps, in which the rate rises to its peak")
    weight_decay: float = knob(0.0, "of AdamW, on all of the adapter")
    max_grad_norm: float = knob(1.0, "the adapter's whole gradient is scaled down to this norm")
    eval_every: int | None = knob(
        None, "steps between evaluations, besides the one before the first step and the one at the"
        " end; 0: only these two; left out: a tenth of all steps")
    save_every: str = knob(
        "5m", "between checkpoints: minutes, 5m, or steps, 100; 0: only at the end")
    keep_checkpoints: int = knob(2, "the newest that stay, besides the one of the best evaluation")
    max_minutes: float | None = knob(
        None, "from the launch; then the run saves and ends, and the same command resumes it")
    step_timeout_minutes: float | None = knob(
        None, "in which a step must end, else all ranks write down where they are and end; left"
        " out: 20 times the longest step so far and at least 10 minutes")
    seed: int = knob(0, "of the adapter's initial values, the data order, dropout")
    report_to: str = knob(
        "tensorboard", "where metrics go besides metrics.jsonl; wandb must be installed",
        choices=("tensorboard", "wandb", "none"))
    adapter: str = knob(
        "lora", "kind: lora; rslora, which scales by lora_alpha / sqrt(lora_rank); dora, which also"
        " trains the norm of each weight's rows", choices=("lora", "rslora", "dora"))
    lora_rank: int = knob(16, "rank of the adapter")
    lora_alpha: int = knob(32, "the adapter's output is scaled by lora_alpha / lora_rank")
    lora_dropout: float = knob(0.0, "dropout on the adapter's input")
    target_modules: tuple[str, ...] = knob(
        ("all-linear",), "linears that get an adapter, by name: q_proj v_proj")
    init_adapter: str | None = knob(
        None, "directory of an adapter to begin with, of this script or of PEFT")
    micro_batch_tokens: int | None = knob(
        None, "tokens a GPU works on at once, at least the longest row; left out: what is fastest"
        " and fits")
    shard_group_size: int | None = knob(
        None, "processes that share one copy of the model, for instance those of a node; every such"
        " group holds one; left out: as few as the memory allows, if that is faster")
    recompute: str = knob(
        "auto", "decoder layers recomputed in backward: all, none, a number, or auto: as few as the"
        " memory allows")
    offload_activations: bool = knob(
        False, "keep the inputs of recomputed layers in pinned host memory until their backward")
    offload_params: bool = knob(
        False, "keep the 4-bit weights in pinned host memory; each layer is copied when needed")
    memory_limit_gib: float | None = knob(
        None, "GPU memory to plan for and never to exceed; left out: what is free")
    attn: str | None = knob(
        None, "attention; left out: on Hopper sdpa for rows of one length, else flash_attention_2"
        " where it is installed, else sdpa", choices=("flash_attention_2", "sdpa"))
    compute_dtype: str = knob(
        "bfloat16", "dtype of activations and products", choices=("bfloat16", "float32"))


def resolve_config(config, world_size):
    """Check what the flags alone can tell and fill in what follows from them."""
    for name, value in vars(config).items():
        if value == "" or isinstance(value, tuple) and "" in value:
            raise ValueError(f"--{name} is empty: leave it out or give a value")
    def check(names, is_right, wanted):
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not is_right(value):
                raise ValueError(f"--{name} {value}: must be {wanted}")

    check("lora_rank lora_alpha max_seq_len batch_size", lambda n: n >= 1, "at least 1")
    check("keep_checkpoints", lambda n: n >= 2, "at least 2")
    check("max_steps num_epochs learning_rate memory_limit_gib micro_batch_tokens max_grad_norm"
          " max_minutes step_timeout_minutes", lambda x: 0 < x < math.inf, "positive")
    check("eval_every weight_decay", lambda x: 0 <= x < math.inf, "0 or more")
    check("save_every", lambda x: re.fullmatch(r"\d{1,9}m?", x),
          "minutes, as 5m, or a number of steps, or 0")
    check("lora_dropout warmup_fraction", lambda x: 0 <= x < 1, "at least 0 and below 1")
    check("seed", lambda n: 0 <= n < 2**40, "at least 0 and below 2^40")
    if config.recompute not in ("all", "none", "auto") and not config.recompute.isdecimal():
        raise ValueError(f"--recompute {config.recompute}: must be all, none, auto or a number")
    if config.offload_activations and config.recompute in ("none", "0"):
        raise ValueError(f"--offload_activations has nothing to keep with --recompute"
                         f" {config.recompute}: drop one of them")
    if config.attn == "flash_attention_2" and config.compute_dtype != "bfloat16":
        raise ValueError("--attn flash_attention_2 computes in bfloat16: drop it or use sdpa")
    if config.model and not config.dataset and not config.random_weights:
        raise ValueError(f"--model {config.model} needs a --dataset: files or a Hub id")
    tracker = config.report_to
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: {tracker} is not installed: `pip install"
                         f" {tracker}`, or use none")
    if config.random_weights and config.eval_dataset and not config.dataset:
        raise ValueError("--eval_dataset needs a --dataset beside --random_weights")
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
        output_dir=config.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


# ------------------------------------------------------------------------------------------------
# The whole job
# ------------------------------------------------------------------------------------------------


def main(argv=None):
    """Returns the exit code: 0, or one of those above EXITS."""
    device, config, code = init_distributed(), None, 0
    with watched():
        try:
            with together():
                config = parse_config(argv)
            train(config, device)
        except Stop as e:
            code, status.ending = e.code, True
            if is_rank_0():
                say_end(code, str(e))
            with contextlib.suppress(RuntimeError):  # of a rank that has left alone
                dist.barrier()  # torchrun kills rank 0 when another exits; let it print first
        except SystemExit as e:  # of --help; some ranks may not have joined yet
            dist.barrier()
            code = e.code or 0
        except Exception as e:
            # the others wait in a collective that this rank will never join: torchrun ends them
            return end_alone(e, config, device)
    dist.destroy_process_group()
    return code


def train(given, device):
    """The whole job, from the flags that were given to the adapter. All ranks must call this."""
    # 1. Agree: the same flags, script and versions on all ranks, one output directory
    check_same(given)
    with together():
        config = resolve_config(given, dist.get_world_size())
    config = dataclasses.replace(config, output_dir=on_rank_0(lambda: config.output_dir))
    if not given.output_dir:
        status.how_to_resume = f"the same command with --output_dir {config.output_dir} resumes it"
    with open_output(config, given) as (directory, is_complete):
        if is_complete:
            say(f"already complete: {directory}; nothing was touched")
            return
        limit = limit_memory(config, device)

        # 2. Data: all that can be wrong is found out before any weight is read
        if not config.model:
            make_demo(config, directory)
        enter("model")
        with together():
            base = model_directory(config.model or str(directory / "demo" / "model"),
                                   config.random_weights)
            base_sha256 = text_digest(str(base)) if config.random_weights else base_digest(base)
            config, model_config, arch = read_model_config(base, config)
            tokenizer = load_tokenizer(base, config)
        enter("data")
        begun = on_rank_0(read_json, directory / "train_config.json", {})
        day = begun.get("date", on_rank_0(time.strftime, "%Y-%m-%d"))
        fix_date(day)
        rows, eval_rows = prepare_data(config, directory, tokenizer, arch.vocab_size, day)
        steps = config.max_steps or math.ceil(config.num_epochs * len(rows) / config.batch_size)
        every = max(1, steps // 10) if config.eval_every is None else config.eval_every
        config = dataclasses.replace(config, max_steps=steps, eval_every=every)
        content = agree_on_content(config, rows, eval_rows, base_sha256)
        enter("checkpoint")
        done = on_rank_0(find_checkpoint, config, directory, content)  # steps; 0: a new run
        status.is_ours, status.max_steps, status.step = True, steps, done
        status.checkpoint = checkpoint_path(directory, done).name if done else None

        # 3. Model: what of it is adapted, and the plan: what is sharded, recomputed, offloaded
        enter("model")
        with together():
            lora_config, adapted = choose_adapted(arch, config, config.model or str(base))
            layout = make_layout(arch, adapted, config)
            kernels = choose_attention(config, arch, device)
        plan = agree_on_plan(config, arch, layout, rows, eval_rows, limit, device, kernels)
        say_start(config, plan, kernels, limit, device)
        if tokenizer:
            say_example(rows, tokenizer)
        if not config.random_weights:
            on_rank_0(check_family, model_config, config)

        # 4. Shard and load: built on meta, sharded by FSDP2, then each rank reads its own part
        mesh = make_mesh(plan.shard_group_size, device)
        model = Model(arch, layout, plan, mesh.get_group("shard"))
        shard_model(model, mesh, plan)
        frozen = load_model(model, base, model_config, config, device)
        say_memory("after loading", device)

        # 5. Adapter: fresh, another run's, or from a checkpoint
        adapter = Adapter(model, arch, layout, config, device)
        if config.adapter == "dora":
            measure_weight_norms(model)
        if done:
            enter("checkpoint")
            progress = adapter.resume(checkpoint_path(directory, done), config)
        else:
            progress = adapter.start(config)
        run = types.SimpleNamespace(
            config=config, plan=plan, model=model, adapter=adapter, rows=rows, eval_rows=eval_rows,
            device=device, content=content, lora_config=lora_config, directory=directory,
            kernels=kernels, store=make_store(plan, arch, device), graphs={}, graph_pool=None,
            progress=progress, dealt=None, saved=done, save_due=math.inf, longest_step=0,
            clock_start=now())
        enter("saving")
        on_rank_0(describe_run, run, given, base.resolve(), frozen, day, tokenizer)
        verify_model(model, plan)
        say(f"parameters: {adapter.n_trainable:,} trainable ({config.adapter}),"
            f" {frozen.n_parameters:,} frozen")
        say_memory("before step 1", device)

        # 6. Loop and save
        enter("training")
        records = run_steps(run, done)
        if config.random_weights and records:
            say_speed(run, records)
        finish_run(run)


def run_steps(run, done):
    """The training loop: steps, evaluations, metrics, checkpoints. Returns one record of metrics a
    step. All ranks must call this."""
    config, plan, progress, records = run.config, run.plan, run.progress, []
    passes = config.max_steps * config.batch_size / len(run.rows)
    say(f"steps: {config.max_steps} of {config.batch_size} rows, {passes:.3g} passes over the data,"
        f" in bins of at most {plan.bin_tokens:,} tokens on {dist.get_world_size()} processes; peak"
        f" learning rate {config.learning_rate}")
    with together():
        log = open_log(run, done) if is_rank_0() else None
    save_steps, save_seconds = save_interval(config)
    run.clock_start, run.save_due = now(), now() + save_seconds
    try:
        # from `done`: a run that was stopped before the evaluation of that step does it now
        for step in range(done, config.max_steps + 1):
            request, is_last, is_best = None, step == config.max_steps, False
            extend_deadline(run)
            status.step = step
            if step > done:
                status.where = f"at step {step}, in bins of at most {plan.bin_tokens} tokens"
                record, request = train_step(run, step)
                records.append(record)
                if log:
                    log_step(log, record)
            # what there is now lives to the end: frozen, it is not scanned by each full garbage
            # collection, on one rank at a time while the others wait
            if step == done + 1:
                gc.collect()
                gc.freeze()
            evaluates = step == 0 or is_last or (config.eval_every
                                                 and step % config.eval_every == 0)
            if run.eval_rows and evaluates and progress["evaluated"] != step and request != "stop":
                is_best = log_evaluation(run, log, step)
                if is_best is None:  # it was broken off
                    request = "stop"
            saves = is_last or request or is_best or (save_steps and step % save_steps == 0)
            if saves and run.saved < step:
                save_checkpoint(run, step)
            if evaluates or saves:
                run.clock_start = now()  # they do not count as time of a step
            if request == "stop":
                why = next(filter(None, gather_objects(status.stop_reason)))
                if is_best is None and step == done and why.startswith("--max_minutes"):
                    raise Stop(f"{why} before the evaluation after step {step} was done, and so it"
                               " would go again: give more, or evaluate fewer rows", EXITS["flags"])
                saved = checkpoint_path(run.directory, run.saved).name
                left = f"{saved} is whole" if run.saved else "nothing is saved"
                raise Stop(f"{why}, after step {step}; {left}; {status.how_to_resume}", AGAIN)
    finally:
        status.deadline = math.inf
        if log:
            close_log(log)
    return records


def finish_run(run):
    """The adapter, the picture of the losses, and what to type next. All ranks must call this."""
    enter("saving")
    weights, directory, progress = run.adapter.gather(), run.directory, run.progress
    on_rank_0(save_adapter, directory, weights, run.lora_config)
    on_rank_0(draw_losses, directory)
    if best := progress["best_step"]:
        path = checkpoint_path(directory, best)
        say(f"the best evaluation was after step {best}, loss {progress['best_loss']:.4f}:"
            f" {path if path.is_dir() else 'which could not be saved'}")
    say_memory("at the end", run.device)
    say(f"adapter saved in {directory}; to merge it into the base model:")
    say(merge_command(directory))
    write_status("complete", 0, "the adapter is saved")


@torch.no_grad()
def evaluate(run):
    """The mean loss over the learnt tokens of all evaluation rows, without dropout; None if the run
    was asked to stop meanwhile. All ranks must call this."""
    global evaluating
    evaluating = True
    rows, loss, rank, world_size = run.eval_rows, None, dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for some in torch.arange(len(rows)).split(max(64, run.config.batch_size)):
        check_time(run)
        if any(gather_objects(status.stop_reason)):
            break
        extend_deadline(run)
        batch = rows.select(some)
        for micro_batch in deal_rows(batch.lengths.tolist(), world_size, run.plan.bin_tokens):
            total += run.model(make_bin(batch, micro_batch, rank, None, run))
    else:
        loss = float(all_gather(total).sum()) / int(rows.n_learnt.sum())
    for unit in run.model.modules():  # nothing that was gathered may stay: the adapter will change
        if isinstance(unit, FSDPModule):
            unit.reshard()
    evaluating = False
    return loss


def log_evaluation(run, log, step):
    """Evaluate after `step`. Returns whether the loss is the best so far, None where the run was
    asked to stop. All ranks must call this."""
    progress, started = run.progress, now()
    if (loss := evaluate(run)) is None:
        return None
    is_best = progress["best_loss"] is None or loss < progress["best_loss"]
    progress["evaluated"] = step
    if is_best:
        progress.update(best_loss=loss, best_step=step)
    perplexity = math.exp(min(loss, 700))
    if log:
        log_record(log, {"step": step, "eval_loss": loss, "eval_perplexity": perplexity,
                         "eval_tokens": int(run.eval_rows.n_learnt.sum()),
                         "eval_seconds": now() - started})
    say(f"evaluation after step {step}: loss {loss:.4f}, perplexity {perplexity:.2f}"
        + (", the best so far" if is_best and step else ""))
    return is_best and step > 0


# ------------------------------------------------------------------------------------------------
# Data: what of a row is learnt
# ------------------------------------------------------------------------------------------------

IGNORE = -100  # the label of a token that is not learnt


class RefusedRow(ValueError):
    """A row that ends the run: what it asks for would be lost in all rows like it."""


FORMS = {  # keys that a row must have: keys that it may have
    ("messages",): ("system", "tools"), ("conversations",): ("system", "tools"),
    ("prompt", "completion"): ("tools",), ("instruction", "output"): ("input", "system", "history"),
    ("question", "answer"): (), ("text",): (), ("input_ids",): ("labels",)}


def parse_row(row, tokenizer):
    """A row's form with the keys that it ignores, and its documents. A document is a list of
    (text, what of it is learnt, whether the tokenizer may put BOS in front); what is learnt is
    everything, nothing, or spans of characters; of input_ids it is (input_ids, labels). A
    ValueError leaves the row out, a RefusedRow ends the run."""
    if isinstance(row, Exception):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, want an object")
    nulls = [key for key, value in row.items() if value is None]
    row = {key: value for key, value in row.items() if value is not None}
    form = next((form for form in FORMS if row.keys() >= set(form)), None)
    if form is None:
        if any({*row, *nulls} >= set(form) for form in FORMS):
            raise ValueError(f"{' and '.join(nulls)} null")
        wanted = "; ".join(" and ".join(form) for form in FORMS)
        advice = "name its keys like one of these"
        if row.keys() & {"chosen", "rejected"}:
            advice = "preferences are not learnt; name the better answer completion to learn it"
        raise RefusedRow(f"has {', '.join(row) or 'no keys'}; want {wanted}: {advice}")
    ignored = [key for key in row if key not in form + FORMS[form]]
    form_text = printable(" and ".join(form) + f" (ignored: {', '.join(ignored)})" * bool(ignored))
    row = plain_form(row, form, tokenizer.chat_template is not None)
    if "messages" in row:
        try:
            with time_limit(RENDER_SECONDS, "rendering"):
                return form_text, parse_chat(row["messages"], row.get("tools"), tokenizer)
        except TimeoutError as e:
            raise RefusedRow(f"is not rendered by the chat template: {e}")
    if "input_ids" in row:
        return form_text, [as_ids(row["input_ids"], row.get("labels", row["input_ids"]))]
    if "tools" in FORMS[form] and row.get("tools") not in (None, [], "", "[]"):
        raise RefusedRow("has tools, which a prompt in plain text cannot take: write prompt and"
                         " completion as lists of messages")
    if "text" in row:
        if not as_text(row, "text").strip():  # EOS would be learnt alone: to stop at once
            raise ValueError("text is empty")
        return form_text, [[(row["text"], True, True)]]
    prompt, completion = as_text(row, "prompt"), as_text(row, "completion")
    if not completion.strip():
        raise ValueError("completion is empty")
    return form_text, [[(prompt, False, True), (completion, True, False)]]


def parse_chat(messages, tools, tokenizer):
    """The documents of a conversation. Each assistant turn that is learnt is learnt as the model
    will see it at that point: from the generation prompt to the turn's closing token, or what the
    template marks by {% generation %}, behind what the template makes of the turns before it. A
    turn that it writes otherwise when more follow, as Qwen3 does to drop reasoning, has a document
    of its own."""
    if not tokenizer.chat_template:
        raise RefusedRow("is a conversation, but the tokenizer has no chat template: give one by"
                         " --chat_template, or use prompt and completion")
    special, as_parts = chat_traits(tokenizer, str(tokenizer.chat_template))
    tools = (json.loads(tools or "null") if isinstance(tools, str) else tools) or None
    template = tokenizer.get_chat_template(tools=tools)
    cleaned = [clean_message(message, as_parts) for message in messages]
    messages, learnt = [m for m, _ in cleaned], [is_learnt for _, is_learnt in cleaned]
    if not any(learnt[1:]):  # before the first message there is no generation prompt
        raise ValueError("no message of the assistant is learnt")

    def render(n, **options):
        try:
            return tokenizer.apply_chat_template(
                messages[:n], tools=tools, tokenize=False, **options)
        except Exception as e:  # Jinja's own, and whatever the template's operations raise
            raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")

    documents = []  # (text, spans), the last turn's first
    for i in reversed([i for i, is_learnt in enumerate(learnt) if is_learnt and i > 0]):
        before, text = render(i, add_generation_prompt=True), render(i + 1)
        as_text({"the conversation": text}, "the conversation")
        start, whole = len(os.path.commonprefix([before, text])), text.rstrip()
        if re.search(r"\{%-?\s*generation\b", template):
            turn = marked_spans(messages[: i + 1], tools, template, tokenizer)
            start, whole = turn[0][0], text[: turn[-1][1]]
        elif start < len(before) and start <= len(os.path.commonprefix([before, render(i)])):
            raise RefusedRow(f"the chat template mixes message {i + 1} with those before it: its"
                             " tokens cannot be told")
        else:
            if not whole.endswith(special):  # a turn that the template does not close
                whole = text + tokenizer.eos_token
            turn = [(start, len(whole))]
        check_rendered(messages[: i + 1], tools, text, text[start:])
        for longer, spans in documents:
            if longer.startswith(text):
                spans += [(start, min(end, len(text))) for start, end in turn]
                break
        else:
            documents.append((whole, turn))
    return [[(text, spans, False)] for text, spans in reversed(documents)]


# ------------------------------------------------------------------------------------------------
# Data: rows and their order
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Rows:
    """Encoded rows, one for each document of parse_row(): a row of the data set may become several.
    Their tokens lie end to end in a few arrays, int32, views of a memory-mapped file, which all
    ranks of a node share."""

    input_ids: list  # of arrays
    labels: list  # of arrays of the same sizes
    bounds: list  # where among all tokens each array begins
    starts: torch.Tensor  # [rows], where among all tokens each row begins
    lengths: torch.Tensor  # [rows], tokens
    n_learnt: torch.Tensor  # [rows], tokens that the loss is taken of
    digests: torch.Tensor  # int64 [rows], of tokens and labels
    sources: torch.Tensor  # int64 [rows], numbers of the data set's rows that they were made of

    def __len__(self):
        return len(self.starts)

    def tokens(self, i):
        """(input_ids, labels) of a row, int64; labels are IGNORE where nothing is learnt."""
        start, n = int(self.starts[i]), int(self.lengths[i])
        at = bisect.bisect_right(self.bounds, start) - 1
        part = slice(start - self.bounds[at], start - self.bounds[at] + n)
        return tuple(torch.from_numpy(arrays[at][part].astype(np.int64))
                     for arrays in (self.input_ids, self.labels))

    def select(self, which):
        columns = {name: column[which] for name, column in vars(self).items()
                   if isinstance(column, torch.Tensor)}
        return dataclasses.replace(self, **columns)

    def sha256(self):
        """Hash of all rows in order, by which a resumed run sees that its data are the same."""
        return hashlib.sha256(self.digests.numpy().tobytes()).hexdigest()


def prepare_data(config, directory, tokenizer, vocab_size, day):
    """The Rows to train on and those to evaluate on, or None. All ranks must call this."""
    if config.random_weights and not config.dataset:
        say(f"data: {config.batch_size} rows of random tokens")
        return random_rows(vocab_size, config), None
    settings = tokenizer, config.max_seq_len, vocab_size, day
    sources = config.dataset or (str(directory / "demo" / "data.jsonl"),)
    rows, line = prepare_rows(sources, *settings)
    say(f"data: {line}")
    if not config.eval_dataset:
        return rows, None
    try:
        fraction = float(config.eval_dataset[0])
    except ValueError:
        fraction = None
    if fraction is not None:
        sources = rows.sources.unique()  # conversations, of which one may have become several rows
        n = round(fraction * len(sources)) if abs(fraction) < 1e9 else fraction
        if not 0 < n < len(sources) or len(config.eval_dataset) > 1:
            raise Stop(f"--eval_dataset {' '.join(config.eval_dataset)}: is {n} of {len(sources)}"
                       " rows: give one fraction between 0 and 1, or files")
        order = torch.randperm(len(sources), generator=torch.Generator().manual_seed(config.seed))
        held_out = torch.isin(rows.sources, sources[order[:n]])
        say(f"evaluation: {held_out.sum():,} of these rows, which are not trained on")
        return rows.select(~held_out), rows.select(held_out)
    eval_rows, line = prepare_rows(config.eval_dataset, *settings)
    say(f"evaluation: {line}")
    return rows, eval_rows


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch, n_rows, seed):
    """The shuffled indices of one epoch's rows."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def step_rows(step, n_rows, config):
    """Indices of the rows of an optimizer step (the first is 1): every epoch is a new shuffle."""
    at = range((step - 1) * config.batch_size, step * config.batch_size)
    return torch.stack([epoch_order(i // n_rows, n_rows, config.seed)[i % n_rows] for i in at])


# ------------------------------------------------------------------------------------------------
# Data: bins
# ------------------------------------------------------------------------------------------------


def deal_rows(lengths, processes, most):
    """Deal rows of these lengths into the fewest micro-batches, of one bin per process, for which
    every bin, all filled evenly, stays within `most` tokens. Returns for each micro-batch a list of
    row indices per process; the same on all ranks, which all know all lengths."""
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
    """What a GPU works on at once: documents, each one of Rows, end to end. Padding to a round
    length is documents of its own, no longer than the others."""

    input_ids: torch.Tensor  # int64 [tokens]
    position_ids: torch.Tensor  # int64 [tokens], 0 at the first token of each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], where they begin and end
    learnt_at: torch.Tensor  # int64 [n], tokens whose successor is learnt, padded with 0
    labels: torch.Tensor  # int64 [n], these successors, padded with IGNORE
    dropout_keys: torch.Tensor | None  # int64 [tokens], see drop(); None: no dropout
    lengths: tuple  # of the documents
    longest: int  # upper bound of `lengths`
    kernels: dict = None  # the attention to use: {"full": function, "window": function}
    store: object = None  # where layers put what they keep
    ropes: dict = None  # cos and sin, see rope_tables


def make_bin(batch, micro_batch, rank, step_key, run):
    """This rank's Bin of a micro-batch of deal_rows(); `batch` are the Rows of the step, step_key
    seeds dropout, None in an evaluation. All ranks pad to one shape, because they compute embedding
    and head together, and every rank waits for the longest bin anyway."""
    device, batch_lengths = run.device, batch.lengths.tolist()
    lengths = [[batch_lengths[i] for i in rows] for rows in micro_batch]
    all_lengths = {n for row in lengths for n in row}
    n_tokens, longest = max(map(sum, lengths)), max(all_lengths)
    if len(all_lengths) > 1:
        n_tokens = min(round_up(n_tokens, device), run.plan.bin_tokens)  # no more than planned
    most = max(int(batch.n_learnt[rows].sum()) for rows in micro_batch)
    mine, lengths = micro_batch[rank], lengths[rank]
    left = n_tokens - sum(lengths)
    lengths = lengths + [longest] * (left // longest) + [left % longest] * (left % longest > 0)
    ids, labels = torch.zeros(n_tokens, dtype=torch.int64), torch.full((n_tokens,), IGNORE)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for i, start in zip(mine, starts.tolist()):
        row_ids, row_labels = batch.tokens(i)
        ids[start : start + len(row_ids)] = row_ids
        labels[start : start + len(row_ids) - 1] = row_labels[1:]
    learnt_at = (labels != IGNORE).nonzero().view(-1)
    padding = (0, round_up(most, device) - len(learnt_at))
    position_ids = torch.arange(n_tokens) - starts[:-1].repeat_interleave(starts.diff())
    keys = None
    if step_key is not None:
        seeds = mix(step_key + torch.tensor([*mine, *[-1] * (len(lengths) - len(mine))]))
        # mixed, as drop() adds a number for the layer and the site to each
        keys = mix(seeds.repeat_interleave(torch.tensor(lengths)) + position_ids)
    same = len(set(lengths)) == 1
    if run.plan.graphs and not same:  # one graph serves several numbers of documents
        longest = 2 ** (longest - 1).bit_length()
        spare = 2 ** len(lengths).bit_length() - len(lengths)
        starts = F.pad(starts, (0, spare), value=n_tokens)
    tensors = [ids, position_ids, starts.int(), F.pad(learnt_at, padding),
               F.pad(labels[learnt_at], padding, value=IGNORE), keys]
    if device.type == "cuda":
        tensors = [t if t is None else t.pin_memory().to(device, non_blocking=True)
                   for t in tensors]
    kernels = run.kernels["same" if same else "any"]
    store = GPUStore() if step_key is None else run.store  # an evaluation has no backward
    return Bin(*tensors, tuple(lengths), longest, kernels, store)


# ------------------------------------------------------------------------------------------------
# What is adapted, and what is sharded
# ------------------------------------------------------------------------------------------------


def choose_adapted(arch, config, base_name):
    """PEFT's LoraConfig, and the names below a layer of the linears that get an adapter."""
    names = [linear.name for linear in arch.linears]
    short = sorted({name.rsplit(".", 1)[-1] for name in names})
    targets = short if config.target_modules == ("all-linear",) else list(config.target_modules)
    ends = tuple(f".{target}" for target in targets)
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ValueError(f"--target_modules {target}: no such linear in the decoder layers;"
                             f" there are {', '.join(short)}, or all-linear")
    if arch.module_prefix != "model.":  # a vision tower may have linears of the same names
        either = "|".join(re.escape(target) for target in targets)
        targets = rf"{re.escape(arch.module_prefix)}layers\.\d+\..*\b({either})"
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.adapter == "rslora",
        use_dora=config.adapter == "dora",
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name)
    return lora_config, [name for name in names if f".{name}".endswith(ends)]


def shard_model(model, mesh, plan):
    """Make each decoder layer an FSDP2 unit, where there is something to gather."""
    if not plan.uses_fsdp:
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


def learning_rate(step, config):
    """Of step 1..max_steps: linear warm-up to the peak, then by --lr_schedule."""
    warmup = max(1, round(config.warmup_fraction * config.max_steps))
    if step <= warmup:
        return config.learning_rate * step / warmup
    done = (step - warmup) / (config.max_steps + 1 - warmup)
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    return config.learning_rate * shapes[config.lr_schedule]


def train_step(run, step):
    """One optimizer step. Returns its record of metrics, whose loss is the mean over the learnt
    tokens of the global batch and whose gradient norm is that before clipping; and what any rank
    requests of all: "save", "stop" or None. All ranks must call this."""
    config, plan, adapter = run.config, run.plan, run.adapter
    batch, bins = run.dealt or deal_step(run, step)
    # every rank knows all rows' lengths, so that the global count needs no communication
    learnt_tokens, tokens = int(batch.n_learnt.sum()), int(batch.lengths.sum())
    local_loss, n_bins, room = torch.zeros((), dtype=torch.float64, device=run.device), 0, 0
    while bins:
        bin = bins.pop(0)
        n_bins, room = n_bins + dist.get_world_size(), room + len(bin.input_ids)
        if isinstance(run.model, FSDPModule) and plan.shard_group_size < dist.get_world_size():
            # copies of the model exchange gradients once a step, not once a micro-batch
            run.model.set_requires_all_reduce(not bins)
        local_loss += bin_loss(run, bin, 1 / learnt_tokens)
    numbers = adapter.clip(local_loss, config.max_grad_norm, request_here(run))
    # on the host, while the GPU computes
    run.dealt = deal_step(run, step + 1) if step < config.max_steps else None
    loss, norm, request = numbers.tolist()  # waits for the GPU
    loss /= learnt_tokens
    check_progress(run, step, loss, norm)
    rate = learning_rate(step, config)
    adapter.update(rate)
    seconds, run.clock_start = now() - run.clock_start, now()
    run.longest_step = max(run.longest_step, seconds)
    record = {
        "step": step, "loss": loss, "learning_rate": rate, "grad_norm": norm, "rows": len(batch),
        "tokens": tokens, "learnt_tokens": learnt_tokens, "bins": n_bins,
        "bins_full": tokens / (room * dist.get_world_size()), "seconds": seconds,
        "tokens_per_second_per_gpu": tokens / seconds / dist.get_world_size(),
        "peak_memory_gib": memory_gib(run.device, plan.graphs)[1]}
    return record, REQUESTS[int(request)]


def deal_step(run, step):
    """The rows of a step and this rank's bins of them."""
    batch = run.rows.select(step_rows(step, len(run.rows), run.config))
    micro_batches = deal_rows(batch.lengths.tolist(), dist.get_world_size(), run.plan.bin_tokens)
    step_key = mix(torch.tensor(run.config.seed * 1_000_003 + step))
    return batch, [make_bin(batch, m, dist.get_rank(), step_key, run) for m in micro_batches]


def bin_loss(run, bin, scale):
    """The sum of the bin's token losses; adds the gradient of `scale` times it to the adapter's.
    All ranks must call this."""
    loss = graphed_loss(run, bin, scale) if run.plan.graphs else None
    if loss is None:
        loss = run.model(bin)
        (loss * scale).backward()
    return loss.detach()


# ================================================================================================
# Part II, the engine room
# ================================================================================================


# ------------------------------------------------------------------------------------------------
# Flags: parsing
# ------------------------------------------------------------------------------------------------


def make_parser():
    """A parser of Config's fields that raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False)

    def fail(message):
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.print_help = lambda: say(parser.format_help())  # from rank 0 alone
    for f in dataclasses.fields(Config):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        kind = [*typing.get_args(f.type), f.type][0]  # of "int | None" int
        options = dict(f.metadata, default=f.default)
        if f.default is not None:
            options["help"] += " (default: %(default)s)"
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif isinstance(f.default, tuple) or typing.get_origin(kind) is tuple:
            options["nargs"] = "+"
        else:
            options["type"] = kind
        group.add_argument(f"--{f.name}", **options)
    group.add_argument("--config", help="YAML or JSON file of these flags, or a run's"
                       " train_config.json; what the command line says as well counts instead")
    return parser


def parse_config(argv=None):
    """Flags to Config: those of --config, or of the run that is resumed, then the command line's.
    Raises ValueError for what is wrong with them."""
    parser, argv = make_parser(), list(sys.argv[1:] if argv is None else argv)

    def parse(argv):
        values, unknown = parser.parse_known_args(argv)
        for word in unknown:
            name = re.sub("^--(no-)?|=.*", "", word)
            if name != word:
                raise ValueError(f"unknown flag --{name}: --{nearest(name)}? (see --help)")
            raise ValueError(f"{word}: belongs to no flag (see --help)")
        return vars(values)

    values = parse(argv)
    if values["config"]:
        argv = read_flags(Path(values["config"])) + argv
        values = parse(argv)
    if values["resume"] == "must":
        runs = sorted(Path("runs").glob("*/train_config.json"), key=lambda p: p.stat().st_mtime)
        if not (values["output_dir"] or runs):
            raise ValueError("--resume must without --output_dir: no run below runs/ to resume")
        directory = values["output_dir"] or str(runs[-1].parent)
        begun = Path(directory, "train_config.json")
        if not begun.is_file():
            raise ValueError(f"--resume must: no run in {directory} (no {begun.name})")
        values = parse([*read_flags(begun), *argv, f"--output_dir={directory}"])
    del values["config"]
    return Config(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def nearest(name):
    """The flag that an unknown one is likely to mean, as lr means learning_rate."""

    def likeness(known):
        initials = "".join(word[0] for word in known.split("_"))
        return 2 if name == initials else difflib.SequenceMatcher(None, name, known).ratio()

    return max((f.name for f in dataclasses.fields(Config)), key=likeness)


def read_flags(path):
    """The flags that a YAML or JSON file stands for, as on a command line."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as e:
        raise ValueError(f"--config {path}: cannot be read: {e}")
    content = content.get("flags", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: is no table of flags and their values")
    argv = []
    for name, value in content.items():
        if isinstance(value, bool):
            if not isinstance(getattr(Config, name, False), bool):
                raise ValueError(f"--config {path}: {name}: {value}: YAML takes yes, no, on and off"
                                 " for these: put the value in quotes")
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{name}={value}")
    return argv


def save_interval(config):
    """Steps and seconds between checkpoints; 0 and inf: not by these."""
    if config.save_every.endswith("m"):
        return 0, 60 * int(config.save_every[:-1]) or math.inf
    return int(config.save_every), math.inf


# ------------------------------------------------------------------------------------------------
# Ranks and errors
# ------------------------------------------------------------------------------------------------

TIMEOUT = timedelta(hours=12)  # one process may encode a large file while the others wait


def init_distributed():
    """Join torchrun's processes, or be the only one. Returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    options = {"backend": "gloo", "timeout": TIMEOUT}
    if "RANK" not in os.environ:  # plain `python`: no rendezvous needed
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            print_error(f"error: rank on GPU {local_rank}, but there are"
                        f" {torch.cuda.device_count()} GPUs: lower --nproc_per_node")
            sys.exit(EXITS["flags"])
        device = torch.device("cuda", local_rank)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device)
        # tensors of all sizes come and go, and gaps between fixed segments cannot be joined
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # what the host computes is small: waking threads takes longer
    else:  # torchrun allows each process one thread; share the cores instead
        device = torch.device("cpu")
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(max(1, n_cores() // processes))
    dist.init_process_group(**options)
    transformers.utils.logging.disable_progress_bar()
    if local_rank:  # one rank of a machine shows how the Hub's downloads go
        huggingface_hub.utils.disable_progress_bars()
    # on a CPU bitsandbytes keeps the paged optimizer's state unpaged, which is what we want there
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    return device


def n_cores():
    """That this process may use, of a machine that others may use as well."""
    affinity = getattr(os, "sched_getaffinity", None)  # of Linux
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def is_rank_0():
    return int(os.environ.get("RANK", 0)) == 0


def this_rank():
    """What errors call this process."""
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def say(message):
    """Print from rank 0."""
    with contextlib.suppress(OSError):  # the terminal may be gone, and the run shall be saved yet
        if is_rank_0():
            tqdm.write(message)
            sys.stdout.flush()


def print_error(message):
    """Print to stderr, on a line of its own: there may be a progress bar on this one."""
    with contextlib.suppress(OSError):
        start = "\n" if sys.stderr.isatty() else ""
        print(f"{start}{' '.join(message.split())}", file=sys.stderr, flush=True)


def all_gather(tensor, group=None):
    """[ranks, *shape] of every rank's tensor [*shape]. All ranks of the group must call this."""
    rows = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(rows), tensor, group=group)
    return rows


def gather_objects(value):
    """Every rank's JSON value in rank order; tuples come back as lists. All ranks must call this.
    """
    # not torch's all_gather_object: it pickles
    data = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor(len(data))).tolist()
    rows = all_gather(F.pad(data, (0, max(sizes) - len(data))))
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]


class Stop(Exception):
    """Ends the run on all ranks together, so that none is left waiting: an error, or a stop that
    was asked for. `code` is the exit code; None: that of the phase, see EXITS."""

    def __init__(self, message, code=None):
        super().__init__(message)
        self.code = EXITS[status.phase] if code is None else code


@contextlib.contextmanager
def together():
    """If the `with` body fails on one rank, all ranks raise Stop with that rank's error.

    Libraries raise all kinds of errors for what a user can cause, so that only an assertion counts
    as a bug here. The body must not use collectives. All ranks must call this.
    """
    error, code = "", None
    try:
        yield
    except (AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        error = " ".join(str(e).split())
        if not error or not isinstance(e, (ValueError, OSError)):
            error = f"{type(e).__name__}: {error}"
        if isinstance(e, MemoryError):
            code = OUT_OF_MEMORY
    failed = [pair for pair in gather_objects((error, code)) if pair[0]]
    if failed:
        raise Stop(*failed[0])


def on_rank_0(function, *args):
    """Run `function` on rank 0 alone; all get what it returns. All ranks must call this."""
    with together():
        value = function(*args) if is_rank_0() else None
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


def say_each(what, text):
    """Print what each rank says, once if all say the same. All ranks must call this."""
    texts = gather_objects(text)
    say(f"{what}, each rank: {texts[0] if len(set(texts)) == 1 else '; '.join(texts)}")


# ------------------------------------------------------------------------------------------------
# Signals, and how a run ends
# ------------------------------------------------------------------------------------------------

# What all ranks know of is a Stop, with which main() ends them together. What happens to one rank
# alone goes to end_alone(), and torchrun ends the others. The thread of watch() cannot wait for the
# main thread: it calls leave().
AGAIN, DISK, DIVERGED, OUT_OF_MEMORY, FROZEN, BUG = 75, 5, 6, 8, 9, 70  # exit codes
EXITS = {"flags": 2, "model": 3, "data": 4, "training": DISK, "saving": DISK,
         "checkpoint": 7}  # by phase
REQUESTS = (None, "save", "stop")  # of one rank to all; the last counts most
LOST = "another process of this run has ended"
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
LIBC, SET_PDEATHSIG = ctypes.CDLL(None), 1  # of prctl(2)


def new_status():
    """What the main thread and that of watch() tell each other, and status.json."""
    return types.SimpleNamespace(
        phase="flags", directory=None, is_ours=False, step=0, max_steps=None, checkpoint=None,
        lock_fd=None, where="outside of the steps (loading or saving)", ending=False,
        started=now(), deadline=math.inf, stop_reason=None, signal_at=-math.inf,
        end_lock=threading.Lock(), end_said=False, how_to_resume="the same command resumes it")


status = new_status()


@contextlib.contextmanager
def watched():
    """While the `with` body runs, a thread looks after this process, whatever its main thread waits
    for: signals, the end of torchrun, a step that does not end, see watch()."""
    global status
    status = new_status()
    receive, send = socket.socketpair()
    send.setblocking(False)
    under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS
                if not (under_nohup and number == signal.SIGHUP)}
    wakeup = signal.set_wakeup_fd(send.fileno(), warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=forget_signals)  # the data's processes end by theirs
    thread = threading.Thread(target=watch, args=(receive,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        send.close()
        thread.join()
        receive.close()
        if status.lock_fd is not None:
            os.close(status.lock_fd)
            status.lock_fd = None


def forget_signals():
    """In a forked process: it ends with its parent, drops the parent's lock and takes default
    signals."""
    with contextlib.suppress(AttributeError, OSError):  # of Linux alone
        LIBC.prctl(SET_PDEATHSIG, signal.SIGKILL)
    if status.lock_fd is not None:
        os.close(status.lock_fd)
        status.lock_fd = None
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.SIG_DFL)


def watch(receive):
    """Look after this process until `receive` is closed."""
    torchrun = parent = os.getppid()
    most, missing, looked = 0, 0, now()
    while True:
        reasons = []
        if select.select([receive], [], [], 0.2)[0]:
            if not (numbers := receive.recv(64)):
                return
            reasons = [signal.Signals(n).name for n in numbers if n in SIGNALS]
        if (gap := now() - looked) > 5:  # this process was stopped, perhaps the whole job
            status.deadline += gap
        looked = now()
        if os.getppid() != parent and "RANK" in os.environ:  # plain Python may outlive its shell
            reasons, parent = ["torchrun has ended"], os.getppid()
        if reasons and not status.ending:
            ask_to_stop(reasons[0])
        if status.phase == "training" and not status.ending:
            most = max(most, processes := processes_here())
            is_one_lost = (processes < min(most, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
                           and os.getppid() == torchrun)  # else all have another parent now
            missing = missing + 1 if is_one_lost else 0
            if missing > 1:  # a second look, as torchrun may just be ending
                leave(AGAIN, f"{LOST}; {status.how_to_resume}")  # NCCL would wait for it
        if now() > status.deadline:
            leave_frozen()


def processes_here():
    """How many processes torchrun has on this node; 0 where Linux does not tell."""
    path = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
    with contextlib.suppress(OSError):
        return len(path.read_text().split())
    return 0


def ask_to_stop(why):
    """A signal: let the run save after this step and end; at once before the first step, or at a
    second signal."""
    if now() < status.signal_at + 3:
        return  # torchrun passes on what a terminal has sent to all
    if status.signal_at > 0 or status.phase not in ("training", "saving"):
        when = "again" if status.signal_at > 0 else "before the first step"
        leave(AGAIN, f"{why} {when}; {status.how_to_resume}")
    status.stop_reason, status.signal_at = status.stop_reason or why, now()
    if is_rank_0():
        print_error(f"{why}: what the run is at is finished and saved; again: it ends at once")


def leave(code, message):
    """End this process now, whatever its main thread does."""
    status.ending = True
    end_soon(code)
    say_end(code, message)
    os._exit(code)


def end_soon(code):
    """End this process in 15 s, also if the disk or the terminal answers nobody any more."""
    timer = threading.Timer(15, os._exit, [code])
    timer.daemon = True
    timer.start()


def say_end(code, message):
    """Write down why the run ends, and print it; of a stop that all know of, rank 0 alone."""
    with status.end_lock:  # the main thread and that of watch() may come here at once
        is_alone = code != AGAIN or message.startswith(LOST)  # rank 0 may be what is lost
        if (is_rank_0() or is_alone) and not status.end_said:
            write_status("stopped" if code == AGAIN else "failed", code, message)
            print_error(f"{'stopped' if code == AGAIN else 'error'}: {message}")
        status.end_said = True


def end_alone(error, config, device):
    """Say and write down what happened to this rank alone. Returns its exit code."""
    status.ending = True
    is_lack = isinstance(error, RuntimeError) and "out of memory" in str(error)  # CUDA's, NCCL's
    if is_lack or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        code, text = OUT_OF_MEMORY, out_of_memory_text(error, config, device)
    elif isinstance(error, dist.DistError) or isinstance(error, RuntimeError) and re.search(
        "onnection |Broken pipe|[Tt]imed? ?out|unreachable|No route", str(error)  # gloo's
    ):
        code, text = AGAIN, f"{LOST}; {status.how_to_resume}"
    else:
        traceback.print_exception(error)
        code, text = BUG, f"has a bug: {type(error).__name__}: {error}: please report it"
    say_end(code, text if code == AGAIN else f"{this_rank()} {text}")
    return code


def out_of_memory_text(error, config, device):
    """What ran out, on the GPU or on the host, and what helps."""
    if isinstance(error, MemoryError):
        return f"ran out of host memory: {error}; offload less"
    is_on = {
        "--recompute all": config.recompute == "all",
        "--offload_activations": config.offload_activations,
        "--offload_params": config.offload_params}
    helps = [flag for flag in is_on if not is_on[flag]]
    helps += ["a smaller --micro_batch_tokens", "a shorter --max_seq_len"]
    text = f"ran out of memory {status.where}; peak {memory_gib(device)[1]:.2f} GiB allocated"
    if asked := re.search(r"Tried to allocate ([\d.]+ \w+)", str(error)):
        text += f", {asked[1]} more asked for"
    if gaps := re.search(r"([\d.]+ \w+) is reserved by PyTorch but unallocated", str(error)):
        text += f", {gaps[1]} in gaps"
    return f"{text}; try, in this order: {', '.join(helps)}"


def leave_frozen():
    """Write down where all threads are and end: some rank does nothing any more."""
    end_soon(FROZEN)
    path = status.directory / f"stacks-{os.environ.get('RANK', 0)}.txt"
    with contextlib.suppress(OSError), path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
    time.sleep(2)  # all ranks come here at about the same time, before torchrun ends them
    leave(FROZEN, f"{this_rank()} has waited too long {status.where}: is another process frozen, or"
          f" its node? See {status.directory}/stacks-*.txt, and --step_timeout_minutes")


def extend_deadline(run):
    """The step, or the like of it, that begins now has as long as --step_timeout_minutes says."""
    minutes = run.config.step_timeout_minutes
    longest = run.longest_step or 180  # the first step compiles, too
    status.deadline = now() + (60 * minutes if minutes else max(600, 20 * longest))


def check_time(run):
    """When --max_minutes are over, or would be after another step, this rank asks to stop."""
    minutes = run.config.max_minutes
    if minutes and now() + run.longest_step > status.started + 60 * minutes:
        status.stop_reason = status.stop_reason or f"--max_minutes {minutes:g} are over"


def request_here(run):
    """What this rank wants of all, an index of REQUESTS."""
    check_time(run)
    if status.stop_reason:
        return REQUESTS.index("stop")
    return REQUESTS.index("save" if now() > run.save_due else None)


def enter(phase):
    """Begin a phase of the run. It decides which exit code an error has, what a signal does, and
    stands in status.json."""
    status.phase = phase
    write_status(phase)


def write_status(state, code=None, message=""):
    """Replace status.json: rank 0, and others with an exit code. A stop never replaces a failure
    that another rank has written, which may be its cause. Until find_checkpoint has accepted these
    flags for the run in the directory, nothing but a stop is written."""
    may_write = status.is_ours or code == AGAIN
    if status.directory is None or not may_write or not (is_rank_0() or code):
        return
    path = status.directory / "status.json"
    content = {
        "state": state, "code": code, "message": message, "step": status.step,
        "max_steps": status.max_steps, "last_checkpoint": status.checkpoint,
        "process": f"{os.getpid()} on {socket.gethostname()}",
        "time": time.strftime("%Y-%m-%d %H:%M:%S")}
    part = path.with_name(f".status.{os.environ.get('RANK', 0)}.{threading.get_ident()}")
    with contextlib.suppress(OSError, ValueError):
        was = read_json(path, {}).get("state") if status.is_ours else None  # by another rank?
        if was == "failed" and (code == AGAIN or state == "training"):
            return
        if was in ("stopped", "complete") and message.startswith(LOST):
            return
        part.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(part, path)


PATIENCE = 50  # steps after the warm-up; a run whose loss was never below the first by then ..
LARGEST_WEIGHT = 1000  # .. and whose adapter has a weight above this has diverged


def check_progress(run, step, loss, norm):
    """End a run that learns nothing any more, on all ranks and before the update. All ranks must
    call this."""
    config, progress = run.config, run.progress
    warmup = config.warmup_fraction * config.max_steps
    if progress["first_loss"] is None:
        progress["first_loss"] = loss
    if step > warmup:
        progress["lowest_loss"] = min(loss, progress["lowest_loss"] or math.inf)
    if not math.isfinite(loss + norm):
        why = f"loss {loss}, gradient norm {norm}"
    elif norm == 0:
        why = f"loss {loss:.4f}, but a gradient norm of exactly 0: nothing is learnt any more"
    elif (step > warmup + PATIENCE and progress["lowest_loss"] > progress["first_loss"]
            and (largest := run.adapter.largest()) > LARGEST_WEIGHT):
        why = (f"since the warm-up the loss has not been below the first step's"
               f" {progress['first_loss']:.4f}, and the adapter has weights of {largest:.0f}")
    else:
        return
    advice = "a lower --learning_rate may help"
    if status.checkpoint:
        advice += f"; with it, {status.how_to_resume} from {status.checkpoint}"
    if run.adapter.state["step"] == 0:
        advice = "nothing was trained yet: --compute_dtype float32, or is the model damaged?"
    raise Stop(f"step {step}: {why}; nothing of this step is saved; {advice}", DIVERGED)


@contextlib.contextmanager
def time_limit(seconds, what):
    """Raise TimeoutError if the `with` body, somebody else's code, takes longer. Main thread only.
    """
    start = now()
    # it raises KeyboardInterrupt, which the body's `except Exception` lets pass
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except BaseException:  # torch makes a RuntimeError of one that comes at a wrong moment
        if now() < start + seconds:
            raise
        raise TimeoutError(f"{what} took more than {seconds:g} seconds")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------
# Output directory and logs
# ------------------------------------------------------------------------------------------------

LOG_SECONDS = 2  # between lines of steps in the log


@contextlib.contextmanager
def open_output(config, given):
    """Yields the output directory, locked, and whether the run in it is complete. All ranks must
    see it: each writes its part of a checkpoint. A directory that this start has made is removed
    where it ends by a Stop before it is used. All ranks must call this."""
    directory = Path(config.output_dir)

    def make():
        made = [str(p) for p in (directory, *directory.parents) if not p.exists()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            holder = lock(directory)
        except OSError as e:
            raise ValueError(f"--output_dir {directory}: cannot be made: {e}; name another")
        begun = read_json(directory / "train_config.json", {})
        used = [*directory.glob("adapter_*"), *directory.glob("checkpoint-*")]
        if used and not begun or begun and config.resume == "never":
            raise ValueError(f"--output_dir {directory} holds a run already: name another directory"
                             + (", or resume it by --resume must" if begun else ""))
        is_own = begun.get("flags") == as_json(flags_of(given))
        state = read_json(directory / "status.json", {}).get("state")
        has_adapter = (directory / "adapter_model.safetensors").is_file()
        is_complete = is_own and state == "complete" and has_adapter
        if not is_complete:
            for torn in directory.glob(".checkpoint-*"):  # of a run that ended while saving
                shutil.rmtree(torn, ignore_errors=True)
            for torn in directory.glob(".status.*"):
                torn.unlink()
        return holder, made, is_complete, not is_complete and (is_own or not begun)

    holder, made, is_complete, may_write_status = on_rank_0(make)
    # whether this start has the flags of the run in it, or begins one, see write_status
    status.directory, status.is_ours = directory, may_write_status
    try:
        with together():
            if not (path := directory / ".lock").is_file() or path.read_text() != holder:
                raise ValueError(f"--output_dir {directory}: {this_rank()} does not see the {path}"
                                 " that rank 0 wrote: name a directory that all nodes share")
        yield directory, is_complete
    except Stop:
        if is_rank_0() and made and not (directory / "train_config.json").exists():
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run may be beside it
                for parent in made[1:]:
                    os.rmdir(parent)
        raise


def lock(directory):
    """Hold the directory's .lock until this process ends, however it ends, and say in it who does.
    By flock, which NFS from version 4 and Lustre with -o flock pass on between nodes. Returns what
    it says. Rank 0 only."""
    status.lock_fd = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(status.lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(status.lock_fd, 200).decode(errors="replace")
        raise ValueError(f"--output_dir {directory}: in use by {holder or 'a run that begins'}:"
                         " wait for it, or name another directory")
    except OSError as e:
        say(f"--output_dir {directory}: its file system has no locks ({e.strerror}): two runs in it"
            " at once will not be noticed")
    holder = (f"process {os.getpid()} on {socket.gethostname()} since"
              f" {time.strftime('%Y-%m-%d %H:%M:%S')}")
    os.ftruncate(status.lock_fd, 0)
    os.pwrite(status.lock_fd, holder.encode(), 0)
    os.fsync(status.lock_fd)  # other nodes read it
    return holder


def read_json(path, default=None):
    """The object in a JSON file. Missing or damaged, `default`, or ValueError if that is None."""
    try:
        if not path.is_file():  # a FIFO would be waited for
            raise ValueError("is no file")
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as e:
        if default is None:
            raise ValueError(f"{path}: {' '.join(str(e).split())}")
        return default


def sync_file(path):
    """Make a file or directory that was written survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path, content):
    """Replace a file whole by a text or by {name: tensor}: a reader sees the old or the new."""
    part = path.with_name(f".{path.name}.part")
    if isinstance(content, str):
        part.write_text(content)
    else:
        save_file(content, part, metadata={"format": "pt"})
    os.umask(umask := os.umask(0o077))  # to read it is to set it
    part.chmod(0o666 & ~umask)  # safetensors leaves it readable by its owner alone
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


def as_json(value):
    """As it comes back from a file, with lists for tuples."""
    return json.loads(json.dumps(value))


def open_log(run, done):
    """metrics.jsonl without what a resumed run will do again, what --report_to names, and a bar.
    Rank 0 only."""
    config, path, records = run.config, run.directory / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if done and path.is_file() else ():
        with contextlib.suppress(ValueError):  # torn by the end of the run
            record = json.loads(line)
            is_evaluation = "eval_loss" in record  # that of step `done` may be done again
            newest = (run.progress["evaluated"] or 0) if is_evaluation else done
            if record["step"] <= newest:
                records[record["step"], is_evaluation] = line + "\n"
    write_whole(path, "".join(records.values()))
    log = types.SimpleNamespace(
        max_steps=config.max_steps, path=path, size=path.stat().st_size, unwritten=b"", printed=0,
        failed=False, board=None, wandb=None, bar=None)
    if config.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        # its thread would print a traceback of a full disk, which the next add_scalar() raises
        threading.excepthook = lambda hook: (
            isinstance(hook.exc_value, OSError) or threading.__excepthook__(hook))
        log.board = SummaryWriter(run.directory / "tensorboard", purge_step=done + 1)
    elif config.report_to == "wandb":
        import wandb

        path = run.directory.resolve()
        try:
            log.wandb = wandb.init(
                project="fsdp-qlora", id=f"{path.name}-{text_digest(str(path))[:8]}",
                name=path.name, resume="allow", dir=path, config=dataclasses.asdict(config))
        except Exception as e:
            raise ValueError(f"--report_to wandb: {e}")
    return log


def write_metrics(log):
    """Append what is unwritten to metrics.jsonl. What the disk does not take is kept for the next
    time, and written over what it took of it. Rank 0 only."""
    try:
        file, done = os.open(log.path, os.O_WRONLY | os.O_CREAT, 0o666), 0
        try:
            while done < len(log.unwritten):
                done += os.pwrite(file, log.unwritten[done:], log.size + done)
        finally:
            os.close(file)  # NFS may say here alone that the disk is full
        log.size, log.unwritten, log.failed = log.size + done, b"", False
    except OSError as e:
        if not log.failed:
            say(f"{log.path}: cannot be written ({e.strerror}): training goes on, and its lines"
                " are written when they can be")
        log.failed = True


def log_record(log, record):
    """Rank 0 only."""
    log.unwritten += json.dumps(record).encode() + b"\n"
    write_metrics(log)
    try:
        for key, value in record.items() if log.board else ():
            log.board.add_scalar(key, value, record["step"])
    except OSError as e:
        say(f"tensorboard: cannot be written ({e.strerror}): it gets nothing more")
        log.board = None
    try:
        if log.wandb:
            log.wandb.log(record, step=record["step"])
    except Exception as e:
        say(f"wandb: {e}: it gets nothing more")
        log.wandb = None


def log_step(log, record):
    """Log a step; print it unless another has just been printed. Rank 0 only."""
    log_record(log, record)
    step = record["step"]
    with contextlib.suppress(OSError):  # the terminal may be gone
        if log.bar is None:  # from here on, so that its rate is without the first step's compiling
            log.bar = tqdm(initial=step, total=log.max_steps, unit="step", disable=None)
        else:
            log.bar.update()
    if now() - log.printed >= LOG_SECONDS or step == log.max_steps:
        log.printed = now()
        write_status("training")
        say("step {step:6d}/{max_steps}  loss {loss:7.4f}  lr {learning_rate:.2e}"
            "  grad {grad_norm:8.4f}  {rows} rows  {tokens:,} tokens in {bins} bins"
            " {bins_full:.0%} full  {tokens_per_second_per_gpu:9,.0f} tok/s/GPU"
            "  peak {peak_memory_gib:6.2f} GiB".format(max_steps=log.max_steps, **record))


def close_log(log):
    """Rank 0 only."""
    write_metrics(log)
    for part, close in (log.bar, "close"), (log.board, "close"), (log.wandb, "finish"):
        with contextlib.suppress(Exception):  # nothing that goes wrong with these is the run's
            if part is not None:
                getattr(part, close)()


def draw_losses(directory):
    """loss.png from metrics.jsonl; nothing that goes wrong with it is the run's. Rank 0 only."""
    try:
        from matplotlib.figure import Figure

        lines = (directory / "metrics.jsonl").read_text().splitlines()
        records, figure = [json.loads(line) for line in lines], Figure(figsize=(8, 5))
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for axes, key, style in ((losses, "loss", "-"), (losses, "eval_loss", "o-"),
                                 (rates, "learning_rate", "-")):
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points), style, label=key.replace("_", " "))
                axes.set_ylabel("loss, nats a token" if axes is losses else "learning rate")
        losses.legend()
        rates.set_xlabel("optimizer step")
        figure.savefig(directory / "loss.png", dpi=120)
    except Exception as e:
        say(f"no loss.png: {e}")


def flags_of(given):
    """The flags that a run is made of."""
    flags = dataclasses.asdict(given)
    return {name: value for name, value in flags.items() if name not in ("resume", "output_dir")}


def describe_run(run, given, base, frozen, day, tokenizer):
    """Write train_config.json, the configuration and all that a merge must know, and the tokenizer.
    Rank 0 only."""
    config, rows = run.config, run.rows
    described = {
        "flags": flags_of(given),
        "config": dataclasses.asdict(config),
        **run.content,
        "plan": dataclasses.asdict(run.plan),
        "base_model": str(base) if Path(config.model or base).is_dir() else config.model,
        "quantization": {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "double_quant": True,
            "nested_blocksize": NESTED_BLOCK,
            "quantized_from_dtype": config.compute_dtype,
            "prequantized": frozen.prequantised,  # its bytes are the base's own
            "device": run.device.type,
            "absmax_offsets": frozen.offsets,  # each linear's mean absmax: tells bases apart
        },
        "world_size": dist.get_world_size(),
        "date": day,
        "versions": {m.__name__: m.__version__ for m in LIBRARIES},
        "probe_input_ids": [rows.tokens(i)[0][:64].tolist() for i in range(min(4, len(rows)))]}
    write_whole(run.directory / "train_config.json", json.dumps(described, indent=2))
    if tokenizer:
        tokenizer.save_pretrained(run.directory)


def say_start(config, plan, kernels, limit, device):
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
    say_plan(plan, config, limit)


def say_example(rows, tokenizer):
    """Show one row as the model sees it, with what is not learnt in brackets."""
    text, pairs = "", zip(*(t.tolist() for t in rows.tokens(0)))
    for is_learnt, part in itertools.groupby(pairs, lambda pair: pair[1] != IGNORE):
        decoded = tokenizer.decode([token for token, _ in part])
        text += decoded if is_learnt else f"[not learnt: {decoded}]"
    say(f"first row: {text[:600]!r}")


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
# Data: files
# ------------------------------------------------------------------------------------------------

JSON_KINDS, TABLE_KINDS = (".jsonl", ".json", ".ndjson"), {".parquet": "parquet", ".csv": "csv"}
PIECE_BYTES, PIECE_ROWS = 2**20, 5000  # of JSON or of a table: what a process takes at once
BATCH = 256  # rows that the tokenizer takes at once


def find_pieces(source):
    """Split a --dataset into pieces that processes can read in parallel, (file, None, start, stop)
    in bytes or (name, table, start, stop) in rows. Also returns what tells its content from any
    other."""
    name, *options = [source] if Path(source).exists() else source.split(",")
    options = dict(option.partition("=")[::2] for option in options)
    if not options.keys() <= {"split", "name", "revision"}:
        raise ValueError(f"--dataset {source}: behind a comma stands split=, name= or revision=")
    is_pattern = glob.has_magic(name) and not Path(name).exists()
    paths = sorted(glob.glob(name, recursive=True)) if is_pattern else [name]
    if not paths:
        raise ValueError(f"--dataset {name}: no file matches")
    pieces, contents = [], []
    for path in map(Path, paths):
        kinds = *JSON_KINDS, *TABLE_KINDS
        files, saved = [path], {"state.json", "dataset_dict.json"} & set(
            os.listdir(path) if path.is_dir() else ())
        taken = {"split"} if "dataset_dict.json" in saved else set()
        if path.exists() and options.keys() - taken:
            raise ValueError(f"--dataset {source}: what stands behind the comma is for Hub ids, and"
                             " split= for several splits by save_to_disk: name the files you want")
        if path.is_dir() and not saved:
            files = sorted(p for p in path.rglob("*") if p.is_file() and file_kind(p) in kinds
                           and not is_set_aside(p, path))
            if not files:
                raise ValueError(f"--dataset {path}: no file in it ends in {', '.join(kinds)}")
        for file in files:
            if file.is_file() and file_kind(file) in JSON_KINDS:
                whole = file.suffix == ".gz" or first_byte(file) == b"["
                table, size, content = None, file.stat().st_size, digest(file)
                step = size if whole else PIECE_BYTES
            else:
                table = open_table(source, file, options, saved)
                size, step, content = len(table), PIECE_ROWS, table._fingerprint
            pieces += [(str(file), table, at, at + step) for at in range(0, size, max(1, step))]
            contents.append(content)
    return pieces, contents


def is_set_aside(file, directory):
    """Whether a file below a --dataset is hidden, or what a run has written there."""
    below = file.relative_to(directory)
    return any(part.startswith(".") for part in below.parts) or any(
        (directory / parent / ".lock").exists() for parent in below.parents)


def file_kind(path):
    return Path(path.name.removesuffix(".gz")).suffix


def open_file(path):
    return gzip.open(path, "rb") if str(path).endswith(".gz") else open(path, "rb")


def first_byte(path):
    with open_file(path) as file:
        return file.read(2**16).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def open_table(source, path, options, saved):
    """The datasets.Dataset of a Parquet or CSV file, a directory of save_to_disk or a Hub id."""
    import datasets
    import pandas

    kind, split, what = TABLE_KINDS.get(file_kind(path)), options.get("split", "train"), ""
    try:
        if saved:
            table = datasets.load_from_disk(str(path))
            table = table[split] if isinstance(table, datasets.DatasetDict) else table
        elif kind and path.is_file():
            all_text = {}
            if kind == "csv":  # "12" stays text, and "null"; the first column is no index
                names = pandas.read_csv(path, nrows=0, index_col=False).columns
                kinds = {name: datasets.Value("string") for name in names}
                all_text = {"features": datasets.Features(kinds), "keep_default_na": False,
                            "index_col": False}
            with warnings.catch_warnings():
                # of a row with more cells than the header has names
                warnings.simplefilter("error", pandas.errors.ParserWarning)
                table = datasets.load_dataset(kind, data_files=str(path), split="train", **all_text)
        elif path.exists() or file_kind(path) in (*JSON_KINDS, *TABLE_KINDS) or (
            source[0] in "./~" or str(path).count("/") != 1
        ):
            raise ValueError("neither a Hub id (owner/name) nor a file, pattern or directory; files"
                             f" end in {', '.join((*JSON_KINDS, *TABLE_KINDS))}, or that and .gz")
        else:
            what = "no such file here, and the Hub says: "
            table = datasets.load_dataset(str(path), **{"split": "train", **options})
    except Exception as e:  # the Hub client has a dozen kinds of errors; each is the user's
        raise ValueError(f"--dataset {source}: {what}{e.__cause__ or e}")
    return table


def read_piece(source, table, start, stop):
    """Yield ((source, start, number of the line or row behind it), row) of a piece. What is no row
    is the exception that says why."""
    if table is not None:
        for i, row in enumerate(table.select(range(start, min(stop, len(table)))), 1):
            yield (f"{source} row", start, i), {k: without_none(v) for k, v in row.items()}
    elif first_byte(source) == b"[":
        with open_file(source) as file:
            try:
                rows = json.load(file)
            except (ValueError, RecursionError) as e:
                rows = [RefusedRow(f"is no JSON: {e}")]
        yield from (((f"{source} row", 0, i), row) for i, row in enumerate(rows, 1))
    else:
        with open_file(source) as file:
            skipped = 0
            if start:  # the line that it begins in is the piece's before
                file.seek(start - 1)
                skipped = file.readline() != b"\n"
            lines = file if source.endswith(".gz") else iter(
                lambda: file.readline() if file.tell() < stop else b"", b"")
            for i, line in enumerate(lines, 1 + skipped):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as e:  # alike for all rows, wherever in them
                    why = getattr(e, "reason", str(e).partition(":")[0])
                    row = ValueError(f"is no JSON: {why}")
                yield (source, start, i), row


def read_pieces(pieces):
    """What read_piece yields of each; a file that cannot be read ends with a RefusedRow."""
    for source, table, start, stop in pieces:
        where = source, start, 0
        try:
            for where, row in read_piece(source, table, start, stop):
                yield where, row
        except (OSError, EOFError, zlib.error) as e:
            yield (*where[:2], where[2] + 1), RefusedRow(f"cannot be read: {e}")


@functools.lru_cache(None)
def lines_before(path, start):
    with open(path, "rb") as file:
        return sum(file.read(min(2**20, start - at)).count(b"\n") for at in range(0, start, 2**20))


def say_where(source, start, number):
    """In words where read_piece found a row."""
    if Path(source).is_file():
        return f"{source} line {number + lines_before(source, start)}"
    return f"{source} {start + number}"


def without_none(value):
    """Arrow gives each row all keys that any row has."""
    if isinstance(value, dict):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------
# Data: forms of rows, conversations
# ------------------------------------------------------------------------------------------------

RENDER_SECONDS = 20  # of a chat template
SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "model": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool"}


def plain_form(row, form, has_template):
    """The row as text, prompt and completion, messages or input_ids."""
    if form == ("messages",):
        return row | {"messages": with_system(row, as_list(row, "messages"))}
    if form == ("conversations",):
        messages = as_list(row, "conversations")
        messages = [from_sharegpt(m) if isinstance(m, dict) and isinstance(m.get("from"), str)
                    else m for m in messages]
        return {"messages": with_system(row, messages), "tools": row.get("tools")}
    if form == ("prompt", "completion") and isinstance(row["prompt"], list):
        read_only = [m | {"train": False} if isinstance(m, dict) else m
                     for m in as_list(row, "prompt")]
        return {"messages": read_only + as_list(row, "completion"), "tools": row.get("tools")}
    if form == ("instruction", "output"):
        if row.get("history"):
            raise RefusedRow("has history, which would be lost: write it as messages")
        prompt, more = as_text(row, "instruction"), as_text({"input": "", **row}, "input")
        answer = as_text(row, "output")
        if not has_template:
            more = f"### Input:\n{more}\n\n" if more else ""
            prompt = f"### Instruction:\n{prompt}\n\n{more}### Response:\n"
            prompt = as_text(row, "system") + "\n\n" + prompt if row.get("system") else prompt
        elif more:
            prompt = f"{prompt}\n\n{more}"
    elif form == ("question", "answer"):
        prompt, answer = as_text(row, "question"), as_text(row, "answer")
        prompt += "" if has_template else "\n"
    else:
        return row
    if has_template:
        turns = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
        return {"messages": with_system(row, list(turns))}
    return {"prompt": prompt, "completion": answer}


def with_system(row, messages):
    """The messages behind the row's `system`, which they may begin with already."""
    if not row.get("system"):
        return messages
    first = {"role": "system", "content": row["system"]}
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "system":
        return [first, *messages]
    if messages[0].get("content") != row["system"]:
        raise RefusedRow("has a system message and another one in system: keep one of them")
    return messages


def from_sharegpt(message):
    """A message of ShareGPT in OpenAI's words."""
    if (role := message["from"]) not in SHAREGPT_ROLES:
        raise RefusedRow(f"has a message from {role!r}; known are {', '.join(SHAREGPT_ROLES)}")
    more = {key: message[key] for key in ("weight", "train") if key in message}
    return {"role": SHAREGPT_ROLES[role], "content": message.get("value"), **more}


def printable(text):
    return text.encode(errors="replace").decode()


def as_text(row, key):
    if not isinstance(row[key], str):
        raise ValueError(f"{key} is {type(row[key]).__name__}, want a string")
    if not row[key].isascii() and re.search("[\ud800-\udfff]", row[key]):
        raise ValueError(f"{key} has half a character (a lone surrogate of UTF-16)")
    return row[key]


def as_ids(ids, labels):
    for key, values in ("input_ids", ids), ("labels", labels):
        if not isinstance(values, list) or not all(
            type(n) is int and (0 <= n < 2**31 or n == IGNORE and key == "labels") for n in values
        ):
            raise ValueError(f"{key} is no list of tokens")
    if len(ids) != len(labels):
        raise ValueError("labels and input_ids are not equally many")
    return ids, labels


def as_list(row, key):
    if not isinstance(row[key], list):
        raise ValueError(f"{key} is {type(row[key]).__name__}, want a list of messages")
    return row[key]


def marked_spans(messages, tools, template, tokenizer):
    """Where in the rendered messages the last one's {% generation %} blocks stand."""
    try:
        (before, text), (old, blocks) = render_jinja_template(
            [messages[:-1], messages], tools=tools, chat_template=template,
            return_assistant_tokens_mask=True, **tokenizer.special_tokens_map)
    except Exception as e:
        raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")
    shared = len(os.path.commonprefix([before, text]))
    new = [block for block in blocks if block[0] >= shared]
    # where the turns before are rewritten, their blocks must at least be as many as they were
    if not new or shared < len(before) and new != blocks[len(old) :]:
        raise RefusedRow("the chat template has {% generation %} marks, but none for message"
                         f" {len(messages)} alone")
    return new


@functools.lru_cache(1)
def chat_traits(tokenizer, template):
    """The special tokens that can close a turn; whether a template wants content as parts."""
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    probe = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "probe"}]
    try:
        as_parts = "probe" not in tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:
        as_parts = True
    return tuple(special), as_parts


def clean_message(message, as_parts):
    """A message as templates want it, and whether it is learnt."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError("a message is no object with a role")
    message = {key: value for key, value in message.items() if value is not None}
    weight, train = message.pop("weight", 1), message.pop("train", True)
    if weight not in (0, 1) or train not in (False, True):
        raise ValueError(f"a message has weight {weight}, train {train}: want 0 or 1")
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a message has content that is no text")
        content = "".join(texts)
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError("a message has tool_calls that are no list of objects")
        message["tool_calls"] = [clean_call(call) for call in calls]
    if content is None and not calls:
        raise ValueError("a message has no content")
    learnt = message["role"] == "assistant" and bool(train and weight)
    if learnt and not calls and not str(content).strip():
        raise ValueError("a message of the assistant is empty")
    text = as_text({"content": "" if content is None else content}, "content")
    return message | {"content": [{"type": "text", "text": text}] if as_parts else text}, learnt


def clean_call(call):
    """OpenAI writes a call's arguments as JSON text, templates want the object."""
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function} if "function" in call else function


def check_rendered(messages, tools, text, answer):
    """Refuse a row of which the chat template leaves something out. `answer` is the part of `text`
    that the last message became."""

    def strings(value):  # in an object or list
        if isinstance(value, (dict, list)):
            values = value.values() if isinstance(value, dict) else value
            return [string for item in values for string in strings(item)]
        return [value] if isinstance(value, str) else []

    wanted = [("tools", tool.get("function", tool).get("name"), False) for tool in tools or ()]
    for i, message in enumerate(messages, 1):
        is_last, content = i == len(messages), message["content"]
        content = content[0]["text"] if isinstance(content, list) else content
        wanted.append((f"the content of message {i}", content, is_last))
        for call in message.get("tool_calls", ()):
            call = call.get("function", call)
            wanted += [(f"a tool call of message {i}", string, is_last)
                       for string in [call.get("name"), *strings(call.get("arguments"))]]
        if is_last:  # of earlier turns reasoning may be dropped
            wanted += [(f"{key} of message {i}", message.get(key), True)
                       for key in ("reasoning_content", "thinking")]
    for what, string, is_last in wanted:
        string, where = str(string or ""), answer if is_last else text
        string = (string if is_last else string.rpartition("</think>")[2]).strip()
        if string not in where and not all(w in where for w in re.findall(r"\w+", string)):
            raise RefusedRow(f"the chat template leaves out {what}; the roles are"
                             f" {', '.join(m['role'] for m in messages)}")


def fix_date(day):
    """Let chat templates that print today's date, as Llama 3's does, print `day`, YYYY-MM-DD: a
    resumed run must see the same rows, and so must all ranks around midnight."""

    class RunDay(datetime):
        now = classmethod(lambda cls, tz=None: cls.fromisoformat(day))

    transformers.utils.chat_template_utils.datetime = RunDay


# ------------------------------------------------------------------------------------------------
# Data: encoded rows
# ------------------------------------------------------------------------------------------------

REFUSED = "refused: "  # how encode_pieces marks the reason of a RefusedRow
ENCODED = {"input_ids": "int32", "labels": "int32", "length": "int32", "n_learnt": "int32",
           "digest": "int64", "cut": "bool", "kept": "bool", "is_first": "bool", "form": "string",
           "left_out": "string", "where": "string"}  # see encode_pieces


def columns_of(ids, labels, most):
    """The numbers of ENCODED of one document, cut to `most` tokens."""
    cut, ids, labels = len(ids) > most, *(np.asarray(x[:most], np.int32) for x in (ids, labels))
    sha = hashlib.blake2b(ids.tobytes() + labels.tobytes(), digest_size=8).digest()
    n_learnt = int((labels[1:] != IGNORE).sum())  # the first token is not predicted from anything
    return {"input_ids": ids, "labels": labels, "length": len(ids), "n_learnt": n_learnt,
            "cut": cut, "digest": int.from_bytes(sha, "little", signed=True)}


def tokenize(documents, tokenizer):
    """(input_ids, labels), two lists, of each document of parse_row."""
    texts, encodings, eos = {True: [], False: []}, {}, tokenizer.eos_token_id
    for document in documents:
        for text, _, may_begin in document if isinstance(document, list) else ():
            texts[may_begin].append(text)
    for may_begin, strings in texts.items():
        if strings:
            encoded = tokenizer(strings, verbose=False, add_special_tokens=may_begin,
                                return_offsets_mapping=True, return_attention_mask=False,
                                return_token_type_ids=False)
            encodings[may_begin] = zip(encoded["input_ids"], encoded["offset_mapping"])
    found = []
    for document in documents:
        if not isinstance(document, list):
            found.append(document)
            continue
        ids, labels = [], []
        for _, learnt, may_begin in document:
            new, offsets = next(encodings[may_begin])
            if new[:2] == 2 * [tokenizer.bos_token_id] and offsets[0] == (0, 0):
                new, offsets = new[1:], offsets[1:]  # the text has its own
            if isinstance(learnt, bool):
                while new[-1:] == [eos] and offsets[len(new) - 1] == (0, 0):
                    new = new[:-1]  # it was not in the text: some tokenizers append it to all
                labels += new if learnt else [IGNORE] * len(new)
            else:  # by overlap: a token may begin with the space before the turn
                chosen = [IGNORE] * len(new)
                for start, end in learnt:
                    part = slice(bisect.bisect_right(offsets, start, key=lambda token: token[1]),
                                 bisect.bisect_left(offsets, end, key=lambda token: token[0]))
                    chosen[part] = new[part]
                labels += chosen
            ids += new
        if learnt is True and ids[-1:] != [eos]:
            ids, labels = [*ids, eos], [*labels, eos]
        found.append((ids, labels))
    return found


def encode_pieces(pieces, tokenizer, max_seq_len, vocab_size):
    """Yield ENCODED of each document of each row, and of a row left out the reason."""
    rows, nothing = read_pieces(pieces), [([], [])]
    while batch := list(itertools.islice(rows, BATCH)):
        parsed = []
        for where, row in batch:
            try:
                parsed.append((where, *parse_row(row, tokenizer), ""))
            except RefusedRow as e:
                parsed.append((where, "", nothing, REFUSED + f"{say_where(*where)}: {e}"))
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as e:
                parsed.append((where, "", nothing, str(e) or type(e).__name__))
        tokens = iter(tokenize([d for _, _, documents, _ in parsed for d in documents], tokenizer))
        for where, form, documents, reason in parsed:
            for i in range(len(documents)):
                columns, why = columns_of(*next(tokens), max_seq_len), reason
                largest = max(columns[key].max(initial=0) for key in ("input_ids", "labels"))
                if largest >= vocab_size:
                    why = (f"{REFUSED}{say_where(*where)}: has token {largest}, but the model's"
                           f" vocabulary ends at {vocab_size - 1}")
                elif not columns["n_learnt"]:
                    start = f"its first {max_seq_len} tokens" if columns["cut"] else "it"
                    why = why or f"nothing to learn in {start}"
                yield {**columns, "is_first": i == 0, "kept": not why, "form": form,
                       "left_out": printable(why), "where": say_where(*where) if why else ""}


def encode_batches(pieces, **settings):
    """Yield the columns of BATCH documents at a time, their tokens end to end, as one row of
    datasets; a row per document takes half as long again. Runs in several processes, which share
    out the pieces."""
    documents = encode_pieces(pieces, **settings)
    while batch := list(itertools.islice(documents, BATCH)):
        columns = {name: [document[name] for document in batch] for name in ENCODED}
        yield columns | {name: np.concatenate(columns[name]) for name in ("input_ids", "labels")}


def encode_table(pieces, key, **settings):
    """The columns ENCODED of all documents, {name: pyarrow's ChunkedArray}, None where there are no
    rows: from the file that an earlier call with this key has left in the cache of datasets, or
    else encoded by all cores."""
    import datasets
    from pyarrow.compute import list_flatten

    features = {name: datasets.List(datasets.Value(kind)) for name, kind in ENCODED.items()}
    processes = min(n_cores(), len(pieces))
    if not (is_rank_0() and sys.stderr.isatty()):
        datasets.disable_progress_bars()
    try:
        table = datasets.Dataset.from_generator(
            encode_batches, datasets.Features(features), gen_kwargs={"pieces": pieces, **settings},
            fingerprint=key, num_proc=processes if processes > 1 else None, writer_batch_size=16)
    except datasets.exceptions.DatasetGenerationError as e:
        # of another process this is the text of a traceback, and of what came of it
        first = str(e.__cause__ or e).partition("\nThe above exception was")[0]
        raise ValueError(f"the rows cannot be encoded: {first.strip().splitlines()[-1]}")
    except ValueError:  # nothing was yielded
        return None
    return {name: list_flatten(table.data.column(name)) for name in ENCODED}


def prepare_rows(sources, tokenizer, max_seq_len, vocab_size, day):
    """The Rows of all `sources`, and a line on what became of them. All ranks must call this."""
    with together():
        if tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no EOS token: generation would never stop")
        found = [find_pieces(source) for source in sources]
        template = str(tokenizer.chat_template or "")
        key = text_digest([
            digest(__file__), sources, [contents for _, contents in found], max_seq_len, vocab_size,
            template, tokenizer.backend_tokenizer.to_str(), tokenizer.special_tokens_map,
            day if "strftime_now" in template else ""])
        pieces, table = [piece for pieces, _ in found for piece in pieces], None
    encodes = int(os.environ.get("LOCAL_RANK", 0)) == 0  # the others of its node find the file
    for turn in (encodes, not encodes):
        with together():
            if turn and pieces:
                table = encode_table(pieces, key, tokenizer=tokenizer, max_seq_len=max_seq_len,
                                     vocab_size=vocab_size)
    with together():
        if table is None:
            raise ValueError(f"--dataset {' '.join(sources)}: has no rows")
        forms, reasons = (
            {c["values"]: c["counts"] for c in column.value_counts().to_pylist()}
            for column in (table["form"].filter(table["kept"]), table["left_out"]))
        reasons.pop("", None)
        for reason in reasons:
            if reason.startswith(REFUSED):
                raise ValueError(reason.removeprefix(REFUSED))
        left_out, rare = [], sum(reasons.values())
        for reason in sorted(reasons, key=reasons.get, reverse=True)[:5]:
            first = table["where"][table["left_out"].index(reason).as_py()]
            left_out.append(f"{reasons[reason]:,} left out: {reason} ({first})")
            rare -= reasons[reason]
        left_out = "; ".join(left_out) + f"; {rare:,} left out for other reasons" * bool(rare)
        kept, cut, is_first, lengths, n_learnt, digests = (
            torch.from_numpy(table[name].to_numpy().copy())
            for name in ("kept", "cut", "is_first", "length", "n_learnt", "digest"))
        if not kept.any():
            raise ValueError(f"{' '.join(sources)}: none of its {len(kept)} rows can be learnt:"
                             f" {left_out}")
        arrays = ([chunk.to_numpy() for chunk in table[name].chunks]
                  for name in ("input_ids", "labels"))
        rows = make_rows(*arrays, lengths, n_learnt, digests, is_first.cumsum(0)).select(kept)
        cut &= kept
        forms = ", ".join(f"{n:,} {form}" for form, n in forms.items())
        return rows, (
            f"{' '.join(sources)}: {len(rows):,} rows, {forms}; {rows.lengths.sum():,} tokens,"
            f" {rows.n_learnt.sum():,} of them learnt"
            + f"; {cut.sum():,} cut to {max_seq_len} tokens" * bool(cut.any())
            + f"; {left_out}" * bool(left_out))


def random_rows(vocab_size, config):
    """Rows of random tokens, all of full length, for measuring without a data set."""
    generator = torch.Generator().manual_seed(config.seed)
    shape = (config.batch_size, config.max_seq_len)
    ids = torch.randint(vocab_size, shape, generator=generator, dtype=torch.int32)
    return rows_of([(row, row) for row in ids])


def make_rows(input_ids, labels, lengths, *columns):
    """The Rows whose tokens follow one another in these arrays."""
    bounds = np.cumsum([0, *map(len, input_ids)]).tolist()[:-1]
    return Rows(input_ids, labels, bounds, lengths.cumsum(0) - lengths, lengths, *columns)


def rows_of(pairs):
    """Rows in memory from [(input_ids, labels)]."""
    columns = [columns_of(ids, labels, len(ids)) for ids, labels in pairs]
    tokens = ([np.concatenate([c[key] for c in columns])] for key in ("input_ids", "labels"))
    numbers = (torch.tensor([c[key] for c in columns]) for key in ("length", "n_learnt", "digest"))
    return make_rows(*tokens, *numbers, torch.arange(len(columns)))


# ------------------------------------------------------------------------------------------------
# The decoder layer: forward and backward
# ------------------------------------------------------------------------------------------------

COLUMNS = 64  # an adapter's columns of a product are filled up to whole cache lines
LARGE_WEIGHT = 2**28  # weights; a group of linears with more is dequantised one by one
SLICE_TOKENS = 4096  # of a recomputed MLP at once; fewer make its products slower
# where dropout is in a layer, besides the inputs of its groups, which are 0 to 3: on what attention
# and the MLP add, and on attention's weights
ATTENTION_SITE, MLP_SITE, WEIGHTS_SITE, SITES = 4, 5, 6, 8


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
    """Where one linear's values are in its layer's parameters and in its group's tensors."""

    linear: object  # a Linear
    index: int  # in its group
    blocks: slice  # of the layer's `nf4`
    nested: int  # where its second-level absmax begin in its group's
    rows: slice  # of the group's weight and outputs
    columns: slice | None  # its adapter's, among all that the group's have; None: no adapter
    b_rows: slice | None  # of the group's B and magnitudes


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Linears that read one input and are computed as one product."""

    site: int  # 0 to 3: tells groups apart, and their dropout
    places: tuple  # of Place, one a linear
    in_features: int
    out_features: int
    lora_rank: int
    n_columns: int  # of all adapters, lora_rank each
    a: slice  # of the layer's `adapter`: A of all, [n_columns, in]
    b: slice  # B of all, one below the other, [rows of the adapted linears, lora_rank]
    m: slice  # DoRA's magnitudes, [rows of the adapted linears]; else empty
    bias: slice | None  # of the layer's `vectors`

    @property
    def adapted(self):
        return [place for place in self.places if place.columns]

    @property
    def rows(self):
        """Of the whole group's weight and outputs."""
        return slice(self.places[0].rows.start, self.places[-1].rows.stop)

    def local(self, place):
        """The place's rows counted from the first of these."""
        return slice(place.rows.start - self.rows.start, place.rows.stop - self.rows.start)

    @functools.cached_property
    def pieces(self):
        """What is dequantised and multiplied at once: the group, or each of its linears."""
        if self.out_features * self.in_features <= LARGE_WEIGHT:
            return (self,)
        return tuple(dataclasses.replace(self, places=(p,), out_features=p.linear.out_features)
                     for p in self.places)

    @property
    def width(self):
        """Columns of an input and of the weight: `in_features`, then those of the adapters, filled
        up to whole cache lines."""
        return self.in_features + math.ceil(self.n_columns / COLUMNS) * COLUMNS


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
                    group.a, p.columns.start, group.lora_rank, group.in_features)
                parts[name, "lora_B.weight"] = part(group.b, p.b_rows.start, n_out, group.lora_rank)
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
        places, rows, nested, n_columns, b_rows = [], 0, 0, 0, 0
        for i, x in enumerate(linears):
            blocks = take("blocks", math.ceil(x.out_features * x.in_features / BLOCK))
            columns = of_b = None
            if x.name in adapted:
                columns = slice(n_columns, n_columns + config.lora_rank)
                of_b = slice(b_rows, b_rows + x.out_features)
                n_columns, b_rows = columns.stop, of_b.stop
            own_rows = slice(rows, rows + x.out_features)
            places.append(Place(x, i, blocks, nested, own_rows, columns, of_b))
            nested += math.ceil((blocks.stop - blocks.start) / NESTED_BLOCK)
            rows += x.out_features
        bias = None
        if linears[0].bias:
            first, last = (vectors[f"{linears[i].name}.bias"][0] for i in (0, -1))
            bias = slice(first.start, last.stop)
        # so that no block of the optimizer's state belongs to two of A, B, magnitudes
        a, b, m = (take("adapter", n, STATE_BLOCK) for n in (
            n_columns * linears[0].in_features, b_rows * config.lora_rank,
            b_rows * (config.adapter == "dora")))
        groups.append(Group(site, tuple(places), linears[0].in_features, rows, config.lora_rank,
                            n_columns, a, b, m, bias))
    root = math.sqrt(config.lora_rank) if config.adapter == "rslora" else config.lora_rank
    return Layout(tuple(groups), vectors, counts["blocks"], counts["vectors"], counts["adapter"],
                  config.lora_alpha / root, config.lora_dropout, config.adapter == "dora")


class DecoderLayer(nn.Module):
    """One decoder layer. It has three parameters, because FSDP2's work on the host is by parameter:
    `nf4`, the weights of all linears; `vectors`, norms and biases; `adapter`, what is trained."""

    def __init__(self, arch, layout, index, plan):
        super().__init__()
        self.arch, self.layout, self.index, self.plan = arch, layout, index, plan
        self.keeps = plan.keeps(index)
        assert not (arch.parallel and self.keeps == "middle"), "the MLP of a parallel layer reads x"
        self.window, self.rope = arch.layer_window[index], arch.layer_rope[index]
        self.nested = {}  # {group's site: Nested}
        self.weight_norms = {}  # DoRA: {adapted linear's name: norms of the rows of W, fp32}

        def parameter(n, multiple, make, trained=False):  # padded, so that FSDP2 shards evenly
            multiple *= plan.shard_group_size
            n = math.ceil(n / multiple) * multiple
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
    after attention, in a parallel layer never, as its MLP reads x; "x" alone. What is not kept is
    computed again in backward. There the parameters are read from the layer, where FSDP2 has put
    the gathered ones back.
    """

    @staticmethod
    def forward(ctx, x, adapter, layer, bin):
        ctx.layer, ctx.bin, x = layer, bin, x.detach()
        work, put = LayerWork(layer, bin), bin.store.put
        if layer.keeps == "all":
            middle, of_attention = attention_half(work, x)
            out, of_mlp = mlp(work, middle, x if layer.arch.parallel else middle)
            ctx.kept = of_attention, of_mlp
            return out
        first = put(x)  # on its way to the host while attention runs
        middle = attention_half(work, x)[0]
        ctx.kept = first, put(middle) if layer.keeps == "middle" else None
        return mlp_in_slices(work, middle, x)

    @staticmethod
    def backward(ctx, grad):
        layer, bin, (first, second) = ctx.layer, ctx.bin, ctx.kept
        ctx.kept, work, take = None, LayerWork(layer, bin, backward=True), bin.store.take
        parallel = layer.arch.parallel
        if layer.keeps == "all":
            of_attention, grad_middle = first, mlp_backward(work, second, grad)
        elif layer.keeps == "middle":
            grad_middle = mlp_recomputed_backward(work, take(second), grad)
            x = take(first)  # it came back while the MLP ran
            of_attention = attention_half(work, x, want_sum=False)[1]
        else:
            x = take(first)
            middle, of_attention = attention_half(work, x, want_sum=not parallel)
            work.held.clear()  # room for the MLP's weights
            grad_middle = mlp_recomputed_backward(work, x if parallel else middle, grad)
            del middle
        # in a parallel layer (Cohere) attention gets the layer's own gradient, and what came
        # through the MLP is x's already
        upstream = grad if parallel else grad_middle
        needs_x = ctx.needs_input_grad[0]
        grad_x = attention_backward(work, of_attention, upstream, grad_middle, needs_x)
        return grad_x, work.grad_adapter, None, None


class LayerWork:
    """What one forward or backward of a layer works with: the gathered adapter in the compute
    dtype, dequantised weights, and in backward the adapter's gradient, fp32, which autograd then
    gives the dtype of the parameter, under FSDP2 its param_dtype."""

    def __init__(self, layer, bin, backward=False):
        self.layer, self.bin, self.arch, self.layout = layer, bin, layer.arch, layer.layout
        self.tokens = slice(None)  # of the bin: those that are worked on, see mlp_in_slices
        self.adapter = layer.adapter.detach().to(layer.vectors.dtype)
        self.held = {}  # {piece: weight} for their second use, where memory allows
        self.hold = backward and layer.plan.hold_weights and layer.keeps != "all"
        norms = self.vector(self.arch.q_norm), self.vector(self.arch.k_norm)
        self.rotary = *bin.ropes[layer.rope], *norms, self.arch  # for rotate_forward and _backward
        if backward:
            self.grad_adapter = torch.zeros_like(self.adapter, dtype=torch.float32)

    def weight(self, piece):
        """[W, B] of a piece of a group, [out, width]."""
        weight = self.held.get(piece)
        if weight is None:
            weight = dequantise_group(self.layer, piece, self.adapter)
        if self.hold:
            self.held[piece] = weight
        return weight

    def vector(self, name):
        """A norm's weight by its name below the layer; None for None."""
        if name is None:
            return None
        where, shape = self.layout.vectors[f"{name}.weight"]
        return self.layer.vectors[where].view(shape)

    def drop(self, x, probability, site):
        """x [n, width] after dropout; the same at the same site when computed again."""
        if not probability or self.bin.dropout_keys is None:
            return x
        return drop(x, self.bin.dropout_keys[self.tokens], self.layer.index * SITES + site,
                    probability)


def attention_half(work, x, want_sum=True):
    """x + attention(norm(x)) [tokens, hidden], unless only its backward is wanted, and what that
    needs."""
    arch, (qkv, out, *_) = work.arch, work.layout.groups
    kept = types.SimpleNamespace(x=x, branch=None)
    kept.inputs = norm_inputs(work, arch.attention_norm, x, qkv)
    projected = product(work, qkv, kept.inputs)
    kept.qkv = projected if arch.qk_norm else None  # the norms' backward reads it
    heads = split_heads(arch, rotate_forward(projected, *work.rotary))
    del projected
    with torch.enable_grad():  # autograd is asked here alone: for the kernel's own backward
        kept.heads = [part.detach().requires_grad_() for part in heads]
        kept.attended = attention(work, *kept.heads)
    kept.out_inputs = widen(kept.attended.detach().flatten(1), out)
    site, post_norm = ATTENTION_SITE, arch.attention_post_norm
    return add_branch(work, x, out, kept.out_inputs, kept, site, post_norm, want_sum), kept


def attention_backward(work, kept, grad, residual, needs_x):
    """The gradient of x: `residual` plus what comes through attention from `grad`, the gradient of
    attention_half's sum."""
    arch, (qkv, out, *_) = work.arch, work.layout.groups
    grad = branch_gradient(work, kept.branch, grad, arch.attention_post_norm, ATTENTION_SITE)
    grad = product_backward(work, out, kept.out_inputs, grad)
    kept.out_inputs = kept.branch = None
    grads = torch.autograd.grad(kept.attended, kept.heads, grad.reshape(kept.attended.shape))
    kept.attended = kept.heads = None
    grad = rotate_backward(*grads, kept.qkv, *work.rotary)
    del grads
    grad = product_backward(work, qkv, kept.inputs, grad, needs_x)
    return norm_gradient(work, arch.attention_norm, kept.x, grad, residual) if needs_x else None


def mlp_in_slices(work, middle, x):
    """mlp() of all tokens [tokens, hidden], with the widest tensors as long as a slice of them."""
    source, sums = x if work.arch.parallel else middle, []
    for tokens in token_slices(len(middle)):
        work.tokens = tokens
        sums.append(mlp(work, middle[tokens], source[tokens])[0])
    return torch.cat(sums)


def mlp_recomputed_backward(work, source, grad):
    """Compute the MLP of `source` again and return mlp_backward's gradient, a slice at a time."""
    grads = []
    for tokens in token_slices(len(source)):
        work.tokens = tokens
        kept = mlp(work, None, source[tokens], want_sum=False)[1]
        grads.append(mlp_backward(work, kept, grad[tokens]))
        del kept  # not beside the next slice's
    work.tokens = slice(None)
    work.held.clear()
    return torch.cat(grads)


def token_slices(n):
    """Even slices of n tokens, each at most SLICE_TOKENS."""
    size = math.ceil(n / math.ceil(n / SLICE_TOKENS))
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def mlp(work, middle, source, want_sum=True):
    """middle + MLP(norm(source)) of the tokens work.tokens, unless only its backward is wanted, and
    what that needs. `source` is middle, in a parallel layer x."""
    arch, (*_, gate_up, down) = work.arch, work.layout.groups
    kept = types.SimpleNamespace(source=source, branch=None)
    kept.inputs = norm_inputs(work, arch.mlp_norm, source, gate_up)
    kept.gate_up = product(work, gate_up, kept.inputs)
    kept.activated = kept.gate_up.new_empty(len(source), down.width)
    gate(kept.activated[:, : down.in_features], kept.gate_up, arch.activation)
    site, post_norm = MLP_SITE, arch.mlp_post_norm
    return add_branch(work, middle, down, kept.activated, kept, site, post_norm, want_sum), kept


def add_branch(work, x, group, inputs, kept, site, post_norm, want_sum):
    """The end of both halves: x plus the product of `inputs`, normed where the family does that,
    which is then kept; None where only the backward is wanted."""
    if not (want_sum or post_norm):
        fill_columns(work, group, inputs)
        return None
    branch = product(work, group, inputs)
    kept.branch = branch if post_norm else None
    return residual_sum(work, x, branch, post_norm, site) if want_sum else None


def mlp_backward(work, kept, grad):
    """`grad`, the gradient of mlp's sum, plus what comes from it through the MLP to its source."""
    arch, (*_, gate_up, down) = work.arch, work.layout.groups
    upstream = branch_gradient(work, kept.branch, grad, arch.mlp_post_norm, MLP_SITE)
    upstream = product_backward(work, down, kept.activated, upstream)
    kept.activated = kept.branch = None
    # in place; as two tensors, whose columns one kernel can then read and write at once
    gate_backward(*kept.gate_up.chunk(2, -1), upstream, arch.activation)
    del upstream
    grad_inputs = product_backward(work, gate_up, kept.inputs, kept.gate_up)
    return norm_gradient(work, arch.mlp_norm, kept.source, grad_inputs, grad)


def kept_values(arch, layout, keeps):
    """For the plan: values per token that a layer keeps from forward to backward, by what the
    functions above put into `kept`."""
    qkv_in, out_in, gate_up_in, down_in = (group.width for group in layout.groups)
    heads, _, gate_up, _ = (group.out_features for group in layout.groups)
    hidden, query = arch.hidden_size, arch.n_heads * arch.head_dim
    if keeps != "all":
        return hidden * (2 if keeps == "middle" else 1)
    log_sums = 2 * arch.n_heads  # attention's own, fp32
    attention = hidden + qkv_in + heads * (2 if arch.qk_norm else 1) + query + log_sums + out_in
    attention += hidden * (arch.attention_post_norm is not None)
    mlp = hidden * (not arch.parallel) + gate_up_in + gate_up + down_in
    return attention + mlp + hidden * (arch.mlp_post_norm is not None)


def live_bytes(arch, layout, plan, keeps):
    """The most bytes that a layer's backward takes besides what is kept: gradients, weights, and
    what is computed again."""
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    qkv_in, out_in, gate_up_in, down_in = (group.width for group in layout.groups)
    heads, _, gate_up, _ = (group.out_features for group in layout.groups)
    again = keeps != "all"
    hold = plan.hold_weights and again
    at_once = sum if hold else max  # pieces
    w_qkv, w_out, w_gate_up, w_down = (
        g.width * at_once(piece.out_features for piece in g.pieces) * item for g in layout.groups)
    hidden, query = arch.hidden_size, arch.n_heads * arch.head_dim
    t = token_slices(n)[0].stop if again else n  # tokens of the MLP at once
    # the MLP: the gradient of its inner values, with down's weight; then that of its input, with
    # gate and up's
    first = t * (down_in * (1 + again) + hidden) * item + w_down + hold * w_gate_up
    second = t * gate_up_in * item + w_gate_up + hold * w_down
    mlp = again * t * (gate_up + gate_up_in) * item + max(first, second)
    mlp += (2 * n - again * t) * hidden * item  # the sum's, and those of slices that are done
    # attention: all that it keeps, and its gradients; some kernels add up query's in fp32
    attention = again * (heads + query + qkv_in + out_in)
    attention += 2 * heads + query + qkv_in + 2 * hidden + 2 * query
    attention = attention * n * item + w_qkv + hold * w_out
    taken = 2 * n * hidden * item * again  # x and the sum, where they are not counted as kept
    if keeps == "x":  # attention is computed again first, to come to the sum
        taken += n * (hidden + qkv_in + heads + query + out_in) * item
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


def fill_columns(work, group, inputs):
    """Compute d = s x A.T of all adapted linears into the last columns of inputs [n, width]."""
    if not group.n_columns:
        return
    x, columns = inputs[:, : group.in_features], inputs[:, group.in_features :]
    a = work.adapter[group.a].view(-1, group.in_features)
    columns.zero_()  # torch 2.13 on a CPU reads what is there even with beta=0, and 0 * NaN is NaN
    torch.addmm(a.new_zeros(()), work.drop(x, work.layout.dropout, group.site), a.t(), beta=0,
                alpha=work.layout.scaling, out=columns[:, : group.n_columns])


def product(work, group, inputs):
    """Outputs [n, out] of a group's linears with their adapters; fills the last columns of
    inputs [n, width]."""
    fill_columns(work, group, inputs)
    if len(group.pieces) == 1:
        return piece_product(work, group, inputs)
    out = inputs.new_empty(len(inputs), group.out_features)
    for piece in group.pieces:
        if inputs.is_cuda and piece.bias is None and not work.layout.dora:
            torch.mm(inputs, work.weight(piece).t(), out=out[:, piece.rows])  # without a copy
        else:
            out[:, piece.rows] = piece_product(work, piece, inputs)
    return out


def piece_product(work, piece, inputs):
    bias = None if piece.bias is None else work.layer.vectors[piece.bias][piece.rows]
    weight = work.weight(piece)
    if not work.layout.dora or not piece.adapted:
        return F.linear(inputs, weight, bias)
    factor, _ = dora_factors(work, piece, weight)
    return scale_columns(inputs @ weight.t(), factor, bias)


def product_backward(work, group, inputs, grad, needs_x=True):
    """From the outputs' gradient [n, out] that of x [n, in]; adds those of A, B and magnitudes to
    work.grad_adapter."""
    n_in, layout, grad_inputs = group.in_features, work.layout, None
    a = work.adapter[group.a].view(-1, n_in)  # [n_columns, in]
    x, d = inputs[:, :n_in], inputs[:, n_in:]
    grad_b = work.grad_adapter[group.b].view(-1, group.lora_rank)
    for piece in group.pieces:
        weight, part = work.weight(piece), grad[:, piece.rows]
        if layout.dora and piece.adapted:
            # y = c u + bias with c = m / norm, where PEFT takes the norm for a constant
            factor, norm = dora_factors(work, piece, weight)
            sums = (part.float() * (inputs @ weight.t()).float()).sum(0) / norm
            for p in piece.adapted:
                work.grad_adapter[group.m][p.b_rows] += sums[piece.local(p)]
            part = scale_columns(part, factor, None)
        used = weight if needs_x else weight[:, n_in:]
        if grad_inputs is None:
            grad_inputs = part @ used
        else:
            grad_inputs.addmm_(part, used)
        del weight, used
        for p in piece.adapted:
            grad_b[p.b_rows] += fp32_product(part[:, piece.local(p)].t(), d[:, p.columns])
    columns = group.width - n_in
    grad_x, grad_d = grad_inputs.split([grad_inputs.shape[1] - columns, columns], 1)
    if not group.n_columns:
        return grad_x
    grad_d = grad_d[:, : group.n_columns]
    grad_a = fp32_product(grad_d.t(), work.drop(x, layout.dropout, group.site))
    work.grad_adapter[group.a].view(-1, n_in).add_(grad_a, alpha=layout.scaling)
    if not needs_x:
        return None
    if layout.dropout:
        return grad_x + work.drop(layout.scaling * (grad_d @ a), layout.dropout, group.site)
    return grad_x.addmm_(grad_d, a, alpha=layout.scaling)


def dora_factors(work, piece, weight):
    """DoRA's c = m / ||W + s B A|| and that norm, both fp32 [out]; 1 where there is no adapter.

    The norm needs no [out, in] of its own: it is ||W||^2 + 2 s B.(W A.T) + s^2 B.(B A A.T), by row.
    """
    a = work.adapter[piece.a].view(-1, piece.in_features)
    b = work.adapter[piece.b].view(-1, piece.lora_rank)
    w_a, s = fp32_product(weight[:, : piece.in_features], a.t()), work.layout.scaling
    a, b, norm = a.float(), b.float(), torch.ones(piece.out_features, device=weight.device)
    factor = norm.clone()
    for p in piece.adapted:
        a_p, b_p, rows = a[p.columns], b[p.b_rows], piece.local(p)
        cross = (b_p * w_a[rows, p.columns]).sum(1)
        own = (b_p @ (a_p @ a_p.t()) * b_p).sum(1)
        squares = work.layer.weight_norms[p.linear.name].square()
        norm[rows] = (squares + 2 * s * cross + s * s * own).sqrt()
        magnitudes = work.layer.adapter.detach()[piece.m][p.b_rows].float()
        factor[rows] = magnitudes / norm[rows]
    return factor, norm


def fp32_product(a, b):
    """a @ b in fp32, whatever the dtype of the two, so that sums of parts are rounded once."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


# ------------------------------------------------------------------------------------------------
# The layer's elementwise work, one compiled kernel each on a GPU
# ------------------------------------------------------------------------------------------------


evaluating = False  # see elementwise


def elementwise(function):
    """Compile `function` where its tensors are on a GPU; on a CPU that would take minutes. An
    evaluation has kernels of its own, by a code object of its own: torch compiles anew for the
    lengths that it has seen, and these must not change training's kernels, nor their last bit."""
    code = function.__code__.replace(co_name=f"{function.__name__}_of_evaluation")
    twin = types.FunctionType(code, function.__globals__, function.__name__,
                              function.__defaults__, function.__closure__)
    compiled = {False: torch.compile(function), True: torch.compile(twin)}

    @functools.wraps(function)
    def call(first, *args):
        on_gpu = first.is_cuda and not why_no_triton()
        return (compiled[evaluating] if on_gpu else function)(first, *args)

    return call


def norm_inputs(work, name, x, group):
    """norm(x) [n, in] at the left of a new [n, group.width]; without a norm x itself."""
    if name is None:
        return widen(x, group)
    arch, inputs = work.arch, x.new_empty(len(x), group.width)
    normalise(inputs[:, : group.in_features], x, work.vector(name), arch.norm, arch.norm_eps)
    return inputs


def norm_gradient(work, name, x, grad, residual):
    """`residual` + the gradient of x from that of norm(x)."""
    if name is None:
        return residual + grad
    return norm_backward(x, grad, work.vector(name), residual, work.arch.norm, work.arch.norm_eps)


def residual_sum(work, x, branch, post_norm, site):
    """x + multiplier * norm(branch), after the model's own dropout."""
    arch, branch = work.arch, work.drop(branch, work.arch.residual_dropout, site)
    if post_norm:
        normed = torch.empty_like(branch)
        normalise(normed, branch, work.vector(post_norm), arch.norm, arch.norm_eps)
        branch = normed
    return torch.add(x, branch, alpha=arch.residual_multiplier)


def branch_gradient(work, branch, grad, post_norm, site):
    """The gradient of what residual_sum adds, from that of the sum."""
    arch = work.arch
    if arch.residual_multiplier != 1:
        grad = grad * arch.residual_multiplier
    if post_norm:
        weight = work.vector(post_norm)
        grad = norm_backward(branch, grad, weight, None, arch.norm, arch.norm_eps)
    return work.drop(grad, arch.residual_dropout, site)


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
    """The norm of x [n, heads, head_dim], by head or over all of them; x itself without a weight.
    Given `grad`, the gradient of that norm, the gradient of x instead."""
    if weight is None:
        return x
    shape = x.shape
    if arch.qk_norm == "full":
        x, grad = x.flatten(1), None if grad is None else grad.flatten(1)
    if grad is None:
        return norm_of(x, weight, arch.norm, arch.norm_eps).view(shape)
    return norm_grad_of(grad, x, weight, arch.norm, arch.norm_eps).view(shape)


@elementwise
def rotate_forward(qkv, cos, sin, temperature, q_weight, k_weight, arch):
    """qkv [n, ...] with query and key normed, where the family does that, and rotated."""
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
    """The gradient of qkv [n, ...] from those of query, key, value [n, heads, head_dim]; `qkv`
    itself where it was normed, else None."""
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


def attention(work, query, key, value):
    """Causal attention of query [n, heads, head_dim], key and value [n, kv_heads, head_dim] inside
    each document of the bin; returns [n, heads, head_dim]."""
    arch, bin, window = work.arch, work.bin, work.layer.window
    if window is not None and window >= bin.longest:
        window = None
    kernel = bin.kernels["window" if window else "full"]
    return kernel(query, key, value, bin, arch, window, work.layer.index)


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
    bounds, longest = (bin.cu_seqlens, bin.cu_seqlens), (bin.longest, bin.longest)
    return varlen_attn(query, key, value, *bounds, *longest, scale=arch.attention_scale,
                       window_size=(window - 1 if window else -1, 0), **GROUPED)


# torch 2.11 takes fewer heads of keys as they are, later ones want to be told
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def document_attention(query, key, value, bin, arch, window, index):
    """Each document by itself, in plain torch: whatever the others cannot do, and on a CPU."""
    outs, start = [], 0
    for q, k, v in zip(*(t.split(bin.lengths) for t in (query, key, value))):
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        n, mask = q.shape[2], None
        keys = None if bin.dropout_keys is None else bin.dropout_keys[start : start + n]
        dropout = 0.0 if keys is None else arch.attention_dropout
        if window is not None and n > window or arch.attention_softcap or dropout:
            mask = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
            mask = mask.triu(1 - window) if window else mask
        if arch.attention_softcap or dropout:
            site = index * SITES + WEIGHTS_SITE
            out = explicit_attention(q, k, v, mask, arch, keys, dropout, site)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=mask is None, scale=arch.attention_scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
        start += n
    return torch.cat(outs)


def explicit_attention(q, k, v, mask, arch, keys, dropout, site):
    """Gemma 2's scores are cap * tanh(scores / cap); dropout is on the weights, see drop()."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)).float() * arch.attention_scale
    if arch.attention_softcap:
        scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype)
    if dropout:  # a query's heads side by side
        rows = weights[0].transpose(0, 1)
        weights = drop(rows.flatten(1), keys, site, dropout).view(rows.shape).transpose(0, 1)[None]
    return weights @ v


# ------------------------------------------------------------------------------------------------
# NF4: storage and kernels
# ------------------------------------------------------------------------------------------------

BLOCK = 64  # weights that share one absmax; QLoRA's choice and bitsandbytes' default
NESTED_BLOCK = 256  # absmax values that share one second-level absmax (double quantisation)


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
        if op is aten.split:
            return [cls(*pair) for pair in zip(*(func(t, *args[1:]) for t in inner))]
        offloaded = inner[0].is_cpu and args[0].is_cuda
        if op is aten.new_zeros:
            (n,) = args[1]
            return cls(inner[0].new_zeros(n, BLOCK // 2, **kwargs), inner[1].new_zeros(n, **kwargs))
        if op in (aten.view, aten.as_strided):  # FSDP2 only ever asks for the shape it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of NF4Blocks to {args[1:]}"
            return cls(*inner, args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice):
            inner = [func(t, *args[1:], **kwargs) for t in inner]
            return cls(*inner, args[0].device if offloaded else None)
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
    code_values: torch.Tensor  # fp32 [linears, 256], of the 8-bit codes


@functools.lru_cache(None)
def dynamic_map(device):
    """The 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


@functools.lru_cache(None)
def nf4_code(device):
    """The 16 values of NF4, fp32."""
    return bnb.functional.get_4bit_type("nf4", device=device)


def dequantise_group(layer, piece, adapter):
    """[W, B] of a group's linears, or of a piece of it, [out, width]: their weights below one
    another, bit for bit what bitsandbytes gives, and B of each in its adapter's columns, else 0.
    `adapter` is the layer's whole one in the dtype of the result."""
    weight = adapter.new_empty(piece.out_features, piece.width)
    first = piece.places[0]
    blocks = slice(first.blocks.start, piece.places[-1].blocks.stop)
    packed, absmax_codes = layer.nf4.packed[blocks], layer.nf4.absmax_codes[blocks]
    nested, b = layer.nested[piece.site], adapter[piece.b].view(-1, piece.lora_rank)
    offsets, code_values = nested.offsets[first.index :], nested.code_values[first.index :]
    device = packed.device
    if weight.is_cuda and not why_no_triton():
        tiles, n_columns = triton.cdiv(len(packed), 64), piece.width - piece.in_features
        dequantise_kernel[(tiles + triton.cdiv(len(weight), 64) * (n_columns // COLUMNS),)](
            packed, absmax_codes, nested.absmax, offsets, code_values, nf4_code(device), b,
            piece_table(piece, device), weight, len(packed), tiles, len(weight),
            piece.in_features, n_columns, piece.lora_rank, len(piece.places), 64, BLOCK,
            NESTED_BLOCK, COLUMNS, num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds between a scale's product and offset
        )
        return weight
    weight[:, piece.in_features :] = 0
    for i, p in enumerate(piece.places):
        mine = slice(p.blocks.start - blocks.start, p.blocks.stop - blocks.start)
        nested_state = bnb.functional.QuantState(
            absmax=nested.absmax[p.nested :], code=code_values[i], blocksize=NESTED_BLOCK,
            dtype=torch.float32)
        state = bnb.functional.QuantState(
            absmax=absmax_codes[mine], code=nf4_code(device), blocksize=BLOCK, quant_type="nf4",
            shape=torch.Size((p.linear.out_features, p.linear.in_features)), dtype=weight.dtype,
            offset=offsets[i], state2=nested_state)
        values = packed[mine].view(-1, 1)[: math.prod(state.shape) // 2]
        weight[piece.local(p), : piece.in_features] = bnb.functional.dequantize_4bit(values, state)
        if p.columns:
            weight[piece.local(p), piece.in_features :][:, p.columns] = b[p.b_rows]
    return weight


@functools.lru_cache(None)
def piece_table(piece, device):
    """Where each linear of a piece begins: its blocks, rows, second-level absmax, rows of B and
    first column, -1 without an adapter. int32 [linears, 5]."""
    table, first = [], piece.places[0].blocks.start
    for p in piece.places:
        adapter = (p.b_rows.start, p.columns.start) if p.columns else (0, -1)
        table.append([p.blocks.start - first, piece.local(p).start, p.nested, *adapter])
    return torch.tensor(table, dtype=torch.int32, device=device)


if triton:

    @triton.jit
    def dequantise_kernel(
        packed, absmax_codes, nested_absmax, offsets, code_values, nf4_code, b, table, out,
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
            absmax = tl.load(code_values + linear * 256 + code)
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
        """Returns the key for take()."""
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
        tensor, event = self.here.pop(i)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if i > 0:
            self.fetch(i - 1)
        return tensor


# ------------------------------------------------------------------------------------------------
# The model around its layers: vocabulary and loss
# ------------------------------------------------------------------------------------------------

CHUNK_BYTES = 256 * 2**20  # of logits alive at once, of embedded tokens before their sum


class Model(nn.Module):
    """Embedding, decoder layers, norm and head. A forward of a Bin returns the sum of its token
    losses.

    Each rank of a group has its own rows of embedding and head, outside FSDP2, which would gather
    them whole: 2.1 GB each for Llama-3-70B, and twice that while it copies.
    """

    def __init__(self, arch, layout, plan, group=None):
        super().__init__()
        self.arch, self.group, self.plan = arch, group, plan
        # of the processes that share one copy of the model; without a group this one alone
        self.shard, self.shards = (
            (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1))
        self.own_rows = shard_range(arch.vocab_size, self.shard, self.shards)  # of both tables
        self.layers = nn.ModuleList(
            DecoderLayer(arch, layout, i, plan) for i in range(arch.n_layers))
        self.embedding = self.norm = self.head = None  # tensors, see load_weights
        self.frequencies = None  # of each kind of rotary embedding: (fp32 [rotary_dim / 2], factor)

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
    """(cos, sin, temperature): cos and sin fp32 [tokens, rotary_dim / 2] by arch.ropes[i], None
    where i is None; temperature [tokens], Ministral 3's factor on queries, else None."""
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
    shards, table, first = model.shards, model.embedding, model.own_rows.start
    if shards == 1:
        out = look_up(ids, table, 0)
    else:
        ids = all_gather(ids, model.group)  # [shards, n]
        out = torch.empty(ids.shape[1], table.shape[1], dtype=table.dtype, device=ids.device)
        step = max(1, CHUNK_BYTES // (shards * table[:1].nbytes))
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
    full logits never exist (in fp32 2.1 GB at 4,096 tokens and a vocabulary of 128k): the head is
    frozen, so that the gradient of x is all there is to compute, and it is taken in forward, a
    chunk of tokens at a time. Backward needs neither logits nor head.
    """

    @staticmethod
    def forward(ctx, x, model, bin):
        arch, weight, shards = model.arch, model.head, model.shards

        def gather(tensor):
            return all_gather(tensor, model.group) if shards > 1 else tensor[None]

        change = arch.logits_multiplier, arch.logits_softcap
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        grad_x = torch.zeros_like(x)
        targets = gather(bin.labels)  # [shards, n]
        step = max(1, CHUNK_BYTES // (4 * arch.vocab_size))
        for chunk in (slice(i, i + step) for i in range(0, len(bin.labels), step)):
            part = x[bin.learnt_at[chunk]]
            hidden = torch.empty_like(part)
            normalise(hidden, part, model.norm, arch.norm, arch.norm_eps)
            logits = gather(hidden).flatten(0, 1) @ weight.t()
            target = targets[:, chunk].flatten()
            absent, local = target == IGNORE, target - model.own_rows.start
            local = local.where((local >= 0) & (local < len(weight)) & ~absent, -1)
            top, total, at_target = gather(logits_statistics(logits, *change, local)).unbind(1)
            top_of_all = top.amax(0)
            log_sum = top_of_all + ((top - top_of_all).exp() * total).sum(0).log()
            losses = (log_sum - at_target.sum(0)).masked_fill(absent, 0)
            loss += losses.view(shards, -1)[model.shard].sum()
            if not ctx.needs_input_grad[0]:  # an evaluation
                continue
            grad = fp32_product(logits_gradient(logits, *change, log_sum, local, absent), weight)
            if shards > 1:
                own = grad.new_empty(len(grad) // shards, grad.shape[1])
                dist.reduce_scatter_tensor(own, grad, group=model.group)
                grad = own
            grad = norm_backward(part, grad, model.norm, None, arch.norm, arch.norm_eps)
            grad_x.index_add_(0, bin.learnt_at[chunk], grad)  # padding adds 0 to token 0
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
    no_rotary: str | None = None  # layers without: "no_rope_layers": those that this list of the
    #                               config marks; "full": those without a window; "full_if_window":
    #                               the same, but none if the model has no window
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
    architectures output_hidden_states return_dict id2label label2id problem_type
    pretraining_tp""".split())


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
# Files of a model, sharding, loading
# ------------------------------------------------------------------------------------------------

RANDOM_STD = 0.02  # of --random_weights
READERS = 8  # threads of a rank that read weights; one copies some 5 GB/s out of the page cache
READ_CHUNK = 2**24  # bytes that a thread reads at once
READ_AHEAD = 2**29  # bytes read but not yet quantised, so that reading and quantising overlap
BUILD_SECONDS = 120  # to make what a config.json asks for


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
    """The Config with --max_seq_len filled in, the model's own configuration, its Architecture."""
    try:
        if config.random_weights and config.model in SHAPES:
            model_config = AutoConfig.for_model(**SHAPES[config.model])
        else:
            model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        with time_limit(BUILD_SECONDS, "building it from its config.json"):
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
    if longest and (config.max_seq_len or 0) > longest and config.dataset:
        raise ValueError(f"--max_seq_len {config.max_seq_len}: the model was made for {longest}")
    max_seq_len = config.max_seq_len or min(2048, longest or 2048)
    return dataclasses.replace(config, max_seq_len=max_seq_len), model_config, arch


def load_tokenizer(directory, config):
    """The model's tokenizer, with --chat_template; None where there is no text."""
    if config.random_weights and not config.dataset:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"{directory}: its tokenizer cannot be loaded: {e!r}")
    if not tokenizer.is_fast:
        raise ValueError(f"{directory}: its tokenizer has no fast version (tokenizer.json)")
    if config.chat_template:
        tokenizer.chat_template = Path(config.chat_template).read_text()
    return tokenizer


def weight_files(directory):
    """Where the directory's safetensors files hold each tensor: {name: Stored}."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.is_file():
        if not whole.is_file():
            raise ValueError(f"{directory}: has neither {index.name} nor {whole.name}; only"
                             " safetensors are read")
        return tensors_of(whole)
    names = read_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    for file in set(names.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: names {file!r}, a path outside the directory")
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file}: missing, but named in {index.name}")
    found = {file: tensors_of(directory / file) for file in set(names.values())}
    for name, file in names.items():
        if name not in found[file]:
            raise ValueError(f"{directory / file}: lacks {name}, which the index puts there")
    return {name: found[file][name] for name, file in names.items()}


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "U8": torch.uint8}
NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, behind that of the weight
Stored = collections.namedtuple("Stored", "path dtype shape start stop")  # bytes [start, stop)
Names = collections.namedtuple("Names", "shapes linears tables layer_prefix")  # see tensor_names


def tensors_of(path):
    """What a safetensors file holds, by its header: {tensor's name: Stored}."""
    try:
        with safe_open(path, "pt"):
            pass  # it is whole
    except SafetensorError as e:
        raise ValueError(f"{path}: not a whole safetensors file: {e}")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: Stored(path, tensor["dtype"], tuple(tensor["shape"]),
                         *(8 + size + offset for offset in tensor["data_offsets"]))
            for name, tensor in header.items()}


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
    """Check a checkpoint's tensors before they are read. Returns check_prequantised's states of a
    model that is quantised already, else None."""
    wanted = {name: (shape, FLOATS) for name, shape in names.shapes.items()}
    if not getattr(model_config, "quantization_config", None):
        check_tensors(files, names, wanted)
        return None
    states = check_prequantised(files, names, wanted)
    dtypes = sorted({state["dtype"] for state in states.values()})
    say(f"model: quantised already, loaded as it is: {len(states)} linears in NF4")
    if dtypes != [compute_dtype]:
        say(f"they were quantised from {', '.join(dtypes)}, to which bitsandbytes dequantises them;"
            f" here they are dequantised to {compute_dtype}, so that some weights differ by its"
            " rounding")
    return states


def check_tensors(files, names, wanted):
    """The files must have the tensors `wanted`, {name: (shape or None, dtypes)}, and no others in
    layers."""
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that its"
                         f" config.json asks for, the first is {missing[0]}")
    extra = [name for name in files if name.startswith(names.layer_prefix) and name not in wanted
             and not name.endswith("inv_freq")]
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config.json knows"
                         f" nothing of, the first is {extra[0]}")
    for name, (shape, dtypes) in wanted.items():
        path, dtype, found, *_ = files[name]
        if shape not in (None, found):
            raise ValueError(f"{path.name}: {name} has shape {list(found)}, but config.json asks"
                             f" for {list(shape)}")
        if dtype not in dtypes:
            hint = ": without double quantisation?" if name.endswith("absmax") else ""
            raise ValueError(f"{path.name}: {name} is {dtype}, which is not read;"
                             f" {', '.join(dtypes)} are{hint}")


def check_prequantised(files, names, wanted):
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
    check_tensors(files, names, wanted)
    states, cpu = {}, torch.device("cpu")
    tables = {"quant_map": nf4_code(cpu), "nested_quant_map": dynamic_map(cpu)}
    parts = [f"{name}.{part}" for name in names.linears for part in (NF4_STATE, *tables)]
    values = file_reader(files, cpu)((part, (1,), range(1)) for part in parts)
    for name in names.linears:
        (file, *_, start, stop), shape = files[name], list(names.shapes[name])
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
        if stop - start != math.prod(shape) // 2:
            raise ValueError(f"{file}: {name} has {stop - start} bytes, but {shape} weights of 4"
                             " bits are asked for")
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
    staging, ahead, errors = threading.local(), collections.deque(), []

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
                path, dtype, _, start, stop = files[name]
                row = (stop - start) // shape[0]  # bytes
                while ahead and sum(t.nbytes for t, _ in ahead) + len(rows) * row > READ_AHEAD:
                    yield finish()
                start += rows.start * row
                ahead.append(begin(pool, path, DTYPES[dtype], start, len(rows) * row))
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
    first = model.shard * n
    for p in itertools.chain.from_iterable(group.places for group in layer.layout.groups):
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


def prequantised_shard(own, values, local, states):
    """The same of linears that bitsandbytes has quantised: their bytes as they are."""
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


def load_model(model, base, model_config, config, device):
    """Fill all of the model that is frozen. Returns `offsets`, see load_weights, whether the files
    are `prequantised`, and `n_parameters`. All ranks must call this."""
    arch, prequantised = model.arch, None
    names = tensor_names(arch, {})
    if config.random_weights:
        read = random_reader(config.seed, getattr(torch, config.compute_dtype), device)
    else:
        with together():
            files = weight_files(base)
            names = tensor_names(arch, files)
            prequantised = check_files(files, names, model_config, config.compute_dtype)
        read = file_reader(files, device)
    offsets = load_weights(model, names, read, device, prequantised)
    model.frequencies = [
        (f.to(device), factor) for f, factor in
        (rope_frequencies(rope, arch, config.max_seq_len, model_config) for rope in arch.ropes)]
    torch.cuda.empty_cache()  # what loading used and training would use in other sizes
    return types.SimpleNamespace(offsets=offsets, prequantised=bool(prequantised),
                                 n_parameters=sum(map(math.prod, names.shapes.values())))


def load_weights(model, names, read, device, prequantised=None):
    """Fill all that is frozen: of embedding, head and each layer this rank's part alone. `read` is
    file_reader's or random_reader's result, `prequantised` that of check_files. Returns {linear's
    name in the checkpoint: its mean absmax}, a fingerprint of the base model. All ranks must call
    this."""
    n_bytes, before, started, finite = 0, host_memory(), now(), {}
    requests = weight_requests(model, names, prequantised)

    def note(value, name):
        nonlocal n_bytes
        n_bytes += value.nbytes
        packed = prequantised and name in names.linears
        if value.is_floating_point() and not packed:
            finite[name] = value.sum(dtype=torch.float32).isfinite()  # no copy, as all() has
        return value

    # 4-bit weights before all that comes and goes: gaps between them would stay
    sizes = [len(local_part(layer.nf4)) for layer in model.layers]
    homes = [None if model.plan.offload_params else NF4Blocks.zeros(n, device) for n in sizes]
    values = map(note, read(requests), (name for name, *_ in requests))
    fill_model(model, names, values, homes, device, prequantised)
    with together():
        next(values, None)  # a reader's error
        are_finite = torch.stack(list(finite.values())).tolist()
        if not all(are_finite):
            damaged = list(finite)[are_finite.index(False)]
            raise ValueError(f"the model's {damaged} has values that are not finite: is its file"
                             " damaged? Fetch it again")
    offsets = torch.cat([n.offsets for layer in model.layers for n in layer.nested.values()])
    seconds, more = now() - started, (host_memory()[1] - before[0]) / 2**30
    say_each(f"weights loaded in {seconds:.2f} s", f"{n_bytes / 1e9:.3f} GB at"
             f" {n_bytes / 1e9 / seconds:.2f} GB/s with at most {more:.2f} GiB more host memory")
    return dict(zip(names.linears, offsets.tolist()))


def weight_requests(model, names, prequantised=None):
    """What this rank reads, in fill_model's order: [(name, shape, rows)]. Of a linear it is whole
    rows; or, where it is quantised already, packed codes, absmax codes and the nested state."""
    requests, own = [], {p.linear: blocks for p, blocks, _ in own_blocks(model)}
    for name, shape in names.shapes.items():
        if name not in names.linears:
            rows = model.own_rows if name in names.tables else range(shape[0])
            requests.append((name, shape, rows))
            continue
        (n_out, n_in), blocks = shape, own[names.linears[name]]
        if not prequantised:
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


def fill_model(model, names, values, homes, device, prequantised=None):
    """Give the model what weight_requests() asked for, one tensor of `values` after the other.
    `homes` are zeros for each layer's NF4 weights; None: made when it is their turn."""
    plan, layout, shards = model.plan, model.layers[0].layout, model.shards
    dtype, own = getattr(torch, plan.compute_dtype), own_blocks(model)
    states = prequantised and iter(prequantised.values())

    def table():
        return next(values).view(-1, model.arch.hidden_size).to(device, dtype)

    model.embedding = pinned_copy(table()) if plan.embedding_on_host else table()
    quiet = len(model.layers) < 3 or not (is_rank_0() and sys.stderr.isatty())
    bar = tqdm(model.layers, "load and quantise", unit="layer", leave=False, disable=quiet)
    for layer, local in zip(bar, homes):
        if local is None:
            local = NF4Blocks.zeros(len(local_part(layer.nf4)), device)
        if prequantised:
            nested = iter(prequantised_shard(own, values, local, states))
        else:
            among = model.group if shards > 1 else None
            nested = iter(quantise_shard(own, values, local, dtype, among))
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
        set_local(layer, "vectors", vectors.view(shards, -1)[model.shard].clone())
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
def measure_weight_norms(model):
    """For DoRA: the norms of all weights' rows, fp32. All ranks must call this."""
    for layer in model.layers:
        with gathered(layer):
            blank = layer.vectors.new_zeros(layer.layout.n_adapter)
            for group in layer.layout.groups:
                if group.n_columns:
                    weight = dequantise_group(layer, group, blank)[:, : group.in_features]
                    norms = torch.cat([rows.float().norm(dim=1) for rows in weight.split(4096)])
                    layer.weight_norms.update((p.linear.name, norms[p.rows]) for p in group.adapted)


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
            assert isinstance(p, DTensor) == plan.uses_fsdp, (
                f"layer {i}: {name} is{' not' * plan.uses_fsdp} FSDP2's")
            assert not local.is_meta, f"layer {i}: {name} was not loaded"
            assert p.requires_grad == (name == "adapter"), f"layer {i}: {name} {p.requires_grad=}"
            shards = p.device_mesh["shard"].size() if plan.uses_fsdp else 1
            assert len(local) * shards == len(p), f"layer {i}: {name} is not sharded evenly"
            parts = [local.packed, local.absmax_codes] if name == "nf4" else [local]
            kind = {"nf4": "4-bit", "vectors": "other frozen"}.get(name, "adapter")
            n_bytes[kind] += sum(part.nbytes for part in parts)
            if parts[0].is_cpu and torch.cuda.is_available():
                n_bytes["of these on the host"] += sum(part.nbytes for part in parts)
    tables = {id(t): t.nbytes for t in (model.embedding, model.head, model.norm)}
    n_bytes["other frozen"] += sum(tables.values())
    say_each("weights, GiB", ", ".join(f"{kind} {n / 2**30:.3f}" for kind, n in n_bytes.items()))


# ------------------------------------------------------------------------------------------------
# The plan
# ------------------------------------------------------------------------------------------------

GAPS = 0.04  # of the GPU's memory lost between tensors: of 22.5 GiB a plan of 21.4 ran, 21.8 not
HOST_SPARE = 32 * 2**30  # bytes a process may pin for speed alone; pinning takes 0.2 s a GiB


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


def cgroup_free(root="/sys/fs/cgroup", own="/proc/self/cgroup"):
    """Bytes that the container or job which this process is in may still take (cgroup v2); inf
    where nothing limits it."""
    free, own = math.inf, Path(own)
    inside = own.read_text().rpartition("0::/")[2].strip() if own.is_file() else ""
    for group in Path(inside, "_").parents:  # a limit of each counts
        with contextlib.suppress(OSError, ValueError, KeyError):  # it has none; "max" is none
            texts = {name: Path(root, group, f"memory.{name}").read_text()
                     for name in ("max", "current", "stat")}
            cached = dict(map(str.split, texts["stat"].splitlines()))["inactive_file"]
            free = min(free, int(texts["max"]) - int(texts["current"]) + int(cached))
    return free


def host_share():
    """Bytes of free memory, of this machine or of what limits this job, for each of its processes.
    """
    free = min(proc_bytes("meminfo", "MemAvailable"), cgroup_free())
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_gib(device, graphs=False):
    """Now and at the peak: allocated on a GPU, with CUDA graphs reserved, as no tensor is allocated
    in what they keep for themselves; else the resident memory of the process."""
    if graphs:
        return torch.cuda.memory_reserved() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    return tuple(n_bytes / 2**30 for n_bytes in host_memory())


def say_memory(when, device):
    """All ranks must call this."""
    current, peak = memory_gib(device)
    kind = "GPU memory" if device.type == "cuda" else "host memory"
    say_each(f"{kind} {when}", f"{current:.2f} GiB (peak {peak:.2f})")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is laid out on the GPUs, what that takes, and how long."""

    compute_dtype: str
    n_layers: int
    shard_group_size: int  # processes that share one copy of the model
    reshard_after_forward: bool  # free a layer's gathered weights until its backward (FULL_SHARD)
    bin_tokens: int  # the most in one bin
    recomputed: int  # layers, the first ones, that do not keep everything
    keep_middle: bool  # of these: keep the sum after attention, too
    hold_weights: bool  # dequantise a weight once in a layer's backward, not twice
    offload_activations: bool
    offload_params: bool
    embedding_on_host: bool = False
    graphs: bool = False  # CUDA graphs; if not:
    why_no_graphs: str = ""
    graph_room: int = 0  # memory that they have for themselves, in whole bins, see use_graphs
    memory: dict = dataclasses.field(default_factory=dict)  # {kind: bytes} at a step's peak
    host_bytes: int = 0  # pinned, of one process
    token_seconds: float = 0.0  # of one GPU, predicted

    @property
    def uses_fsdp(self):
        """Whether FSDP2 brings the weights: they are sharded, or offloaded to the host."""
        return self.shard_group_size > 1 or self.offload_params

    @property
    def bytes(self):
        return sum(self.memory.values())

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
    n_layers, n, by_fsdp = arch.n_layers, plan.bin_tokens, plan.uses_fsdp
    token = n * item  # bytes of one value a token
    nf4, adapter = layout.n_blocks * (BLOCK // 2 + 1), layout.n_adapter * 4
    table = arch.vocab_size * arch.hidden_size * item / shards
    first, last = plan.keeps(0), plan.keeps(n_layers - 1)
    inputs = plan.recomputed * kept_values(arch, layout, first) * token
    others = (n_layers - plan.recomputed) * kept_values(arch, layout, "all") * token
    live = live_bytes(arch, layout, plan, last)
    if first != last:  # when the first layer's backward runs, what the last ones kept is gone
        live = max(live, live_bytes(arch, layout, plan, first) - others)
    logits = 1.25 * CHUNK_BYTES * item / 2  # a chunk of them and their gradient
    gathered = by_fsdp * (nf4 + layout.n_vectors * item) + layout.n_adapter * item
    copies = 2 if plan.reshard_after_forward or not by_fsdp else n_layers + 1  # and the next one
    dora = 0
    if layout.dora:  # norms of rows; the outputs computed again, in fp32 with their gradient
        dora = 4 * n_layers * sum(g.out_features for g in layout.groups)
        dora += 10 * min(n, SLICE_TOKENS) * max(g.out_features for g in layout.groups)
    memory = {
        "4-bit weights": 0 if plan.offload_params else n_layers * nf4 / shards,
        "embedding, head, norms": table * (2 - arch.tied - plan.embedding_on_host)
        + n_layers * layout.n_vectors * item / shards,
        "adapter and gradients": 2 * n_layers * adapter / shards,
        "kept by recomputed layers": min(inputs, 3 * arch.hidden_size * token)
        if plan.offload_activations else inputs,
        "kept by other layers": others,
        "live layer or head": max(live, 2 * arch.hidden_size * token + logits),
        "one layer's adapter gradient": adapter * (3 if by_fsdp else 1),
        "gathered weights": copies * gathered,
        "DoRA": dora}
    if plan.graphs:  # beside which evaluations run
        memory["CUDA graphs' own"] = plan.graph_room * (inputs + others + live) + live
    host = table * plan.embedding_on_host + n_layers * nf4 / shards * plan.offload_params
    host += plan.offload_activations * max(0, inputs - arch.hidden_size * token)
    memory = {kind: int(size) for kind, size in memory.items() if size}
    return dataclasses.replace(plan, memory=memory, host_bytes=int(host))


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan's time is predicted by."""

    flops: float  # a second, of large products in the compute dtype
    bandwidth: float  # bytes a second, of the GPU's memory
    link: float  # bytes a second that a GPU receives in an all-gather
    launch: float = 40e-6  # seconds of the host for a kernel, Python around it included


def product_weights(plan, arch):
    """The weights of a layer's products, and of those that a backward computes again: down's is
    not, nor out's where the sum after attention is kept or not read."""
    weights = sum(x.out_features * x.in_features for x in arch.linears)
    again = weights - arch.down[0].in_features * arch.hidden_size
    if plan.keep_middle or arch.parallel:
        again -= arch.out[0].in_features * arch.hidden_size
    return weights, again


def predict_time(plan, arch, layout, machine):
    """The plan with the seconds that one GPU takes for a token. Its numbers are fitted to the H200
    rows of benchmarks/RESULTS.md, which take 10 to 30 % longer than it says; plans need no more
    than to be compared."""
    item, n = getattr(torch, plan.compute_dtype).itemsize, plan.bin_tokens
    weights, weights_again = product_weights(plan, arch)
    again = plan.recomputed / arch.n_layers
    flops = 2 * n * (2 * weights + again * weights_again)
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
    launches = (100 + 80 * again + 40 * plan.uses_fsdp) * machine.launch
    layer = max(compute, gathers, 0 if plan.graphs else launches)
    layer += 0.1 * min(compute, gathers)  # they slow each other down
    head = 4 * n * arch.vocab_size * arch.hidden_size / machine.flops
    return dataclasses.replace(plan, token_seconds=(layer * arch.n_layers + head) / n)


def measure_machine(dtype, device):
    """The Machine, in round numbers, so that the same plan is found again. All ranks must call
    this: all take rank 0's."""
    if device.type == "cpu":
        return Machine(1e11, 1e10, 1e9)

    def seconds(run):
        times, events = 20, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
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
        while sizes[0] > longest:
            sizes.insert(0, max(longest, math.ceil(sizes[0] / 2)))
        sizes = sorted({n if n == longest else round_up(n, device) for n in sizes})
    middles = (False,) if arch.parallel else (True, False)  # there the MLP reads x
    keep = list(itertools.product(middles, (True, False)))
    for shards, bin_tokens, n in itertools.product(groups, sizes, counts):
        if shard_range(arch.vocab_size, shards - 1, shards):  # else a process would have no rows
            reshards = [True] if shards == 1 or config.offload_params else [True, False]
            for reshard, (middle, hold) in itertools.product(reshards, keep if n else keep[-1:]):
                plan = Plan(config.compute_dtype, arch.n_layers, shards, reshard, bin_tokens, n,
                            middle, hold, config.offload_activations, config.offload_params)
                yield predict(plan, arch, layout)


def choose_plan(config, arch, layout, tokens, longest, uneven, limit, machine, device, world_size,
                capturable):
    """Of the plans that leave 7 % of the memory free, those within 2 % of the fastest; of these the
    first that leaves 10 %, else the smallest. If none leaves 7 %: the smallest, which must leave
    GAPS. `tokens` are the most of a step, `longest` the longest row, `uneven` whether bins of
    them have several shapes, `capturable` whether CUDA graphs can capture attention. Raises
    ValueError with what would help."""
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
    check_plan(plan, arch, layout, longest, limit, config.recompute == "auto")
    uneven = uneven or config.batch_size % (world_size * (plan.bin_tokens // longest)) > 0
    return use_graphs(plan, arch, layout, machine, limit, capturable, uneven)


def use_graphs(plan, arch, layout, machine, limit, capturable, uneven):
    """CUDA graphs where the host would be slower than the GPU, or the reason why not. What they ran
    in is theirs for good; with bins of several shapes there are gaps in it, and others still run
    beside it. Where all have one shape, what ran before the capture has been freed by then."""
    graphed = dataclasses.replace(plan, graphs=True, graph_room=2 if uneven else 0)
    graphed = predict(graphed, arch, layout)
    graphed = predict_time(graphed, arch, layout, machine)
    reasons = {
        "FSDP2 brings the weights": plan.uses_fsdp,
        "activations are offloaded": plan.offload_activations,
        "attention runs in plain torch": not capturable,
        "the host is fast enough": graphed.token_seconds > 0.95 * plan.token_seconds,
        "no memory for them": not graphed.fits(limit)}
    reason = next((text for text, is_so in reasons.items() if is_so), "")
    return dataclasses.replace(plan, why_no_graphs=reason) if reason else graphed


class DoesNotFit(ValueError, MemoryError):
    """Memory that a run would not have; found before anything is read."""


def check_plan(plan, arch, layout, longest, limit, recompute_is_auto):
    """Raise DoesNotFit, with what would help, if the plan does not fit."""
    if plan.host_bytes > (share := host_share()):
        raise DoesNotFit(f"this takes {plan.host_bytes / 2**30:.1f} GiB of host memory on this"
                         f" machine for each process, and {share / 2**30:.1f} GiB are available:"
                         " offload less")
    if plan.fits(limit):
        return
    flags, smaller = [], plan
    fewer, shorter = longest, f"--micro_batch_tokens {longest}"
    if plan.bin_tokens <= longest:
        fewer, shorter = longest // 2, f"--max_seq_len {longest // 2}"
    for flag, change in (
        ("--recompute all", {"recomputed": arch.n_layers}),
        ("--offload_activations", {"offload_activations": True}),
        ("--offload_params", {"offload_params": True}),
        (shorter, {"bin_tokens": fewer}),
    ):
        if all(getattr(smaller, name) != value for name, value in change.items()):
            smaller = predict(dataclasses.replace(smaller, **change), arch, layout)
            if flag != "--recompute all" or not recompute_is_auto:
                flags.append(flag)
            if smaller.fits(limit):
                break
    more = "" if smaller.fits(limit) else " and more GPUs"
    raise DoesNotFit(
        f"this does not fit: predicted peak {plan.bytes / 2**30:.1f} GiB, and {GAPS:.0%} for gaps,"
        f" of {limit / 2**30:.1f} GiB; {' '.join(flags)}{more} would bring it to"
        f" {smaller.bytes / 2**30:.1f} GiB")


def agree_on_plan(config, arch, layout, rows, eval_rows, limit, device, kernels):
    """The plan of this run. All ranks must call this."""
    longest = max(int(r.lengths.max()) for r in (rows, eval_rows) if r)
    uneven = bool((rows.lengths != longest).any() or (rows.n_learnt != rows.n_learnt[0]).any())
    machine = measure_machine(getattr(torch, config.compute_dtype), device)
    if device.type == "cuda":  # peaks are to be those of training
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    steps = range(1, min(config.max_steps, 200) + 1)
    tokens = max(int(rows.lengths[step_rows(s, len(rows), config)].sum()) for s in steps)
    used = {function for pair in kernels.values() for function in pair.values()}
    capturable = device.type == "cuda" and document_attention not in used
    with together():
        plan = choose_plan(config, arch, layout, tokens, longest, uneven, limit, machine, device,
                           dist.get_world_size(), capturable)
    # host memory differs by rank and moment: all take rank 0's plan
    return Plan(**gather_objects(dataclasses.asdict(plan))[0])


def say_plan(plan, config, limit):
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.memory.items()
                      if size > 2**30 / 200)
    say(f"memory plan of one GPU, GiB: {parts}")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free - torch.cuda.memory_reserved()
        say(f"beside the plan: CUDA's context, NCCL, and what else runs on this GPU, hold"
            f" {used / 2**30:.2f} GiB")
    why = "as asked" if config.shard_group_size else "the fastest that fits"
    copy_of = "each process has a copy of the model"
    if plan.shard_group_size > 1:
        copy_of = (f"{plan.shard_group_size} of {dist.get_world_size()} processes share one copy of"
                   " the model")
    say(f"plan: {copy_of} ({why}); bins of at most {plan.bin_tokens:,} tokens;"
        f" {plan.recomputed} of {plan.n_layers} layers are recomputed"
        + (", from x and the sum after attention" if plan.recomputed and plan.keep_middle else "")
        + (", weights dequantised once a backward" if plan.hold_weights else "")
        + ("" if plan.reshard_after_forward else "; gathered weights stay until backward")
        + ("; nothing to offload" if plan.offload_activations and not plan.recomputed else "")
        + ("; the embedding is in host memory" if plan.embedding_on_host else "")
        + ("; CUDA graphs" if plan.graphs else f"; no CUDA graphs: {plan.why_no_graphs}")
        + f"; {1e6 * plan.token_seconds:,.1f} us a token predicted")
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
    layer, again = product_weights(plan, arch)
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
    kernels_can = config.compute_dtype == "bfloat16" and not arch.attention_dropout
    if kernels_can and capability >= (8, 0):
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
    probe = types.SimpleNamespace(lengths=(64, 64), longest=64, cu_seqlens=bounds,
                                  dropout_keys=None)

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
    then the host launches one thing instead of thousands. None where it must do without."""
    tensors = {name: t for name, t in vars(bin).items() if isinstance(t, torch.Tensor)}
    same = bin.kernels is run.kernels["same"]
    key = (same and bin.lengths, bin.longest, *map(len, tensors.values()))
    if run.graphs.get(key) is None:  # not seen yet, or seen and run without
        captured = sum(graph is not None for graph in run.graphs.values())
        if key not in run.graphs or captured >= MAX_GRAPHS:
            run.graphs[key] = None  # kernels are compiled and chosen outside of a capture
            return None
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

STATE_BLOCK = 256  # optimizer values that share one scale in bitsandbytes' 8-bit state


class Adapter:
    """All that is trained, this rank's part of each layer's, as one fp32 vector [layers x n_own]:
    `weights`, its gradient, and bitsandbytes' paged 8-bit AdamW over it.

    One tensor instead of a thousand makes the optimizer one kernel and its state pageable. Layers
    compute with views of it. A part is whole blocks of the 8-bit state, so that on any number of
    GPUs the state is the same vector, cut elsewhere.
    """

    def __init__(self, model, arch, layout, config, device):
        self.arch, self.layout, self.layers, self.group = arch, layout, model.layers, model.group
        self.tensors = layout.adapter_parts()
        self.shard, self.shards = model.shard, model.shards
        self.n_own = len(local_part(model.layers[0].adapter))
        n = len(self.layers) * self.n_own
        self.weights = nn.Parameter(torch.zeros(n, device=device))
        self.weights.grad = torch.zeros_like(self.weights)
        flat = self.weights.data, self.weights.grad
        for layer, weights, grad in zip(self.layers, *map(self.by_layer, flat)):
            set_local(layer, "adapter", weights)
            p = layer.adapter
            p.grad = DTensor(grad, p._spec, requires_grad=False) if isinstance(p, DTensor) else grad
        # in 8 bits whatever the size: another number of ranks must find the same kind of state
        self.optimizer = bnb.optim.PagedAdamW8bit(
            [self.weights], lr=0.0, weight_decay=config.weight_decay, min_8bit_size=0)
        self.optimizer.init_state(self.optimizer.param_groups[0], self.weights, 0, 0)
        self.state = self.optimizer.state[self.weights]
        self.n_trainable = len(self.layers) * sum(math.prod(s) for _, s in self.tensors.values())

    def by_layer(self, tensor):
        return tensor.view(len(self.layers), -1)

    def names(self, i):
        """{PEFT's name in an adapter file: (slice of the layer's adapter, shape)}."""
        stem = f"base_model.model.{self.arch.module_prefix}layers.{i}."
        return {f"{stem}{linear}.{key}": part for (linear, key), part in self.tensors.items()}

    def set_layer(self, i, values):
        """Give layer i its part of the whole values {PEFT's name: tensor}."""
        whole = torch.zeros(self.shards, self.n_own)
        for name, (where, _) in self.names(i).items():
            whole.view(-1)[where] = values[name].reshape(-1)
        self.by_layer(self.weights.data)[i] = whole[self.shard]

    def start(self, config):
        """The values of --init_adapter, or PEFT's initial ones, the same whatever the number of
        ranks: A at random, B zero, DoRA's magnitudes the norms of the base weights' rows. Returns
        the progress of a new run. All ranks must call this."""
        with together():
            given = read_adapter(config, self) if config.init_adapter else None
        for i, layer in enumerate(self.layers):
            values = {}
            for (linear, key), (name, (_, shape)) in zip(self.tensors, self.names(i).items()):
                values[name] = torch.zeros(shape)
                if key == "lora_magnitude_vector":
                    values[name] = layer.weight_norms[linear].cpu()
                elif key == "lora_A.weight":
                    seed = config.seed ^ zlib.crc32(name.encode())
                    generator = torch.Generator().manual_seed(seed)
                    nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
            self.set_layer(i, given or values)
        return dict.fromkeys(PROGRESS)

    def gather(self):
        """{PEFT's name: whole fp32 tensor on the CPU} on rank 0, {} elsewhere. All ranks must call
        this."""
        weights = {}
        for i, own in enumerate(self.by_layer(self.weights.data)):
            whole = own if self.shards == 1 else all_gather(own, self.group).view(-1)
            if is_rank_0():
                whole = whole.cpu()
                for name, (where, shape) in self.names(i).items():
                    weights[name] = whole[where].view(shape).clone()
        return weights

    def clip(self, local_loss, max_norm, request=0):
        """Sum loss and gradient over all ranks, scale the gradient down to `max_norm`. Returns the
        global loss, the norm before and the largest `request` of a rank, without a host sync. All
        ranks must call this."""
        grad, copies = self.weights.grad, dist.get_world_size() // self.shards
        if copies > 1 and not isinstance(self.layers[0], FSDPModule):  # which sums them itself
            dist.all_reduce(grad)
        request = torch.full_like(local_loss, request)
        everyone = all_gather(torch.stack([local_loss, grad.norm().double() ** 2, request]))
        everyone[self.shards :, 1] = 0  # other copies of the model have the same gradients
        loss, norm = everyone[:, 0].sum(), everyone[:, 1].sum().sqrt()
        grad.mul_((max_norm / norm).clamp(max=1))
        return torch.stack([loss, norm, everyone[:, 2].max()])

    def largest(self):
        """The largest magnitude of all weights. All ranks must call this."""
        return float(all_gather(self.weights.detach().abs().max()).max())

    @torch.no_grad()
    def update(self, rate):
        """What the optimizer's step() does, which would also wait for the GPU, twice: of its paged
        state nothing is read on the host but in write_checkpoint, which waits itself."""
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
        the progress until then. All ranks must call this."""
        with together():
            saved = json.loads((path / "checkpoint.json").read_text())
            weights = load_file(path / "adapter_model.safetensors")
            for i in range(len(self.layers)):
                self.set_layer(i, weights)
            files = [load_file(path / name) for name in saved["optimizer_files"]]
            blank = int(self.state["qmap1"].abs().argmin())  # padding's momentum is 0, not code 0
            for key, live in self.state_parts().items():
                whole = torch.cat([file[key] for file in files], 1)
                missing = live.shape[1] * self.shards - whole.shape[1]  # below 0: padding to cut
                whole = F.pad(whole, (0, missing), value=blank if key == "state1" else 0)
                live.copy_(whole.unflatten(1, (self.shards, -1))[:, self.shard])
            self.state["step"] = saved["optimizer_step"]
        say(f"resumed from {path}: {saved['step']} of {config.max_steps} steps are done")
        return saved["progress"]


def read_adapter(config, adapter):
    """The tensors of --init_adapter, an adapter like this run's: {PEFT's name: fp32}."""
    directory = Path(config.init_adapter)
    try:
        settings = json.loads((directory / "adapter_config.json").read_text())
        values = load_file(directory / "adapter_model.safetensors")
    except (OSError, ValueError, SafetensorError) as e:
        raise ValueError(f"--init_adapter {directory}: is no adapter in PEFT's format: {e}")
    for flag, wanted, key in (
        ("lora_rank", config.lora_rank, "r"), ("lora_alpha", config.lora_alpha, "lora_alpha"),
        ("adapter", config.adapter == "dora", "use_dora"),
        ("adapter", config.adapter == "rslora", "use_rslora")):
        if settings.get(key, False) != wanted:
            raise ValueError(f"--init_adapter {directory}: has {key} {settings.get(key)}: give the"
                             f" same by --{flag}")
    for key, works in (("init_lora_weights", (True, False, None, "gaussian", "eva", "orthogonal")),
                       ("alpha_pattern", ({}, None)), ("lora_bias", (False, None))):
        if settings.get(key) not in works:  # PiSSA and others train on a changed base
            raise ValueError(f"--init_adapter {directory}: has {key} {settings[key]}, by which its"
                             " values mean another adapter than they would here")
    shapes = {name: shape for i in range(len(adapter.layers))
              for name, (_, shape) in adapter.names(i).items()}
    if shapes != {name: tuple(value.shape) for name, value in values.items()}:
        odd = sorted(shapes.keys() ^ values.keys()) or ["one of another shape"]
        raise ValueError(f"--init_adapter {directory}: its tensors are not those of this adapter,"
                         f" the first is {odd[0]}: same model and --target_modules?")
    for name, value in values.items():
        if not value.isfinite().all():
            raise ValueError(f"--init_adapter {directory}: {name} has values that are not finite")
    return {name: value.float() for name, value in values.items()}


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------

RETRY_SECONDS = 60  # after a save that failed
SAMPLES, SAMPLE = 16, 256  # places of a tensor, and bytes at each, that tell one base from another
MUST_MATCH = (  # what a resumed run cannot change, besides rows and base model, see content
    "random_weights", "compute_dtype", "adapter", "lora_rank", "lora_alpha", "lora_dropout",
    "target_modules", "init_adapter", "max_seq_len", "batch_size", "seed")
SCHEDULE = ("max_steps", "learning_rate", "lr_schedule", "warmup_fraction", "weight_decay",
            "max_grad_norm")  # what it can, and says
# of a run, kept in checkpoints: the first three are log_evaluation's, the others check_progress's
PROGRESS = ("evaluated", "best_loss", "best_step", "first_loss", "lowest_loss")


def write_adapter(directory, weights, lora_config):
    """The adapter in PEFT's format. Rank 0 only."""
    write_whole(directory / "adapter_model.safetensors", weights)
    lora_config.inference_mode = True
    settings = {key: sorted(value) if isinstance(value, set) else value
                for key, value in lora_config.to_dict().items()}
    write_whole(directory / "adapter_config.json", json.dumps(settings, indent=2, sort_keys=True))


def save_adapter(directory, weights, lora_config):
    """Write the trained adapter, elsewhere if --output_dir does not take it. Rank 0 only."""
    errors = []
    for place in directory, directory.resolve().parent, Path(tempfile.gettempdir()):
        try:
            if errors:
                place = Path(tempfile.mkdtemp(prefix=f"{directory.name}-adapter-", dir=place))
            write_adapter(place, weights, lora_config)
            break
        except (OSError, SafetensorError) as e:
            errors.append(f"{place}: {e}")
    if errors:
        where = f"it is in {place}" if len(errors) < 3 else "the last checkpoint has what there is"
        raise OSError(f"the adapter could not be saved in {'; nor in '.join(errors)}; {where}")


def checkpoint_path(directory, step):
    return directory / f"checkpoint-{step:06d}"


def save_checkpoint(run, step):
    """Write checkpoint-<step>; if that fails, say so and try again later. All ranks must call this.
    """
    extend_deadline(run)
    started = now()
    try:
        write_checkpoint(run, step)
    except Stop as e:
        run.save_due = now() + RETRY_SECONDS
        say(f"checkpoint-{step:06d} could not be saved: {e}; if training goes on, it is tried again"
            f" in {RETRY_SECONDS} s")
        return
    run.saved, run.save_due = step, now() + save_interval(run.config)[1]
    status.checkpoint = checkpoint_path(run.directory, step).name
    say(f"{status.checkpoint} saved in {now() - started:.2f} s")
    write_status("training")
    on_rank_0(drop_checkpoints, run, step)


def write_checkpoint(run, step):
    """Write checkpoint-<step>, whole or not at all. All ranks must call this.

    Everything goes to a hidden directory that gets its name when each rank's part is written,
    synced and listed with its SHA-256: a directory with the right name is a whole checkpoint.
    """
    adapter, rank, entry = run.adapter, dist.get_rank(), None
    final = checkpoint_path(run.directory, step)
    hidden = run.directory / f".{final.name}.part"
    weights = adapter.gather()
    torch.get_device_module(run.device).synchronize()  # no stream orders reads of paged state

    def make():
        remove_at_once(hidden)  # of a save that failed
        needed = 1.02 * (4 + 2) * adapter.n_trainable + 2**20  # weights, two states of 8 bits
        if (free := shutil.disk_usage(run.directory).free) < needed:
            raise OSError(errno.ENOSPC, f"it takes {needed / 2**30:.3f} GiB, and {free / 2**30:.3f}"
                          " are free")
        hidden.mkdir()

    on_rank_0(make)  # nobody writes before it is there
    try:
        with together():
            if rank < adapter.shards:  # other copies of the model have the same state
                part = hidden / f"optimizer-{rank:05d}-of-{adapter.shards:05d}.safetensors"
                write_whole(part, {k: v.cpu().clone() for k, v in adapter.state_parts().items()})
                entry = part.name, digest(part)
        files = dict(filter(None, gather_objects(entry)))
        on_rank_0(finish_checkpoint, run, step, files, weights, hidden, final)
    except Stop:
        on_rank_0(remove_at_once, hidden)  # its room may be what is missing
        raise


def finish_checkpoint(run, step, files, weights, hidden, final):
    """Add what rank 0 writes of a checkpoint, and give it its name. Rank 0 only."""
    optimizer_files = sorted(files)
    write_adapter(hidden, weights, run.lora_config)
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        files[name] = digest(hidden / name)
    state = {
        "step": step,
        "optimizer_step": run.adapter.state["step"],
        "optimizer_files": optimizer_files,
        **run.content,
        "progress": run.progress,
        "config": dataclasses.asdict(run.config),
        "files": files}
    state["sha256"] = text_digest(state)
    write_whole(hidden / "checkpoint.json", json.dumps(state, indent=2))
    remove_at_once(final)  # something else of that name
    os.replace(hidden, final)
    sync_file(run.directory)


def remove_at_once(path):
    """Delete a file, link or directory: renamed first, its path is free even if that takes long or
    is broken off. Rank 0 only."""
    if path.is_symlink() or path.exists():
        aside = path.with_name(f".checkpoint-{time.time_ns()}.old")
        os.replace(path, aside)
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink()


def checkpoints_of(directory):
    """[(step, path)] of what is named like a checkpoint, the newest first. Rank 0 only."""
    found = [(int(match[1]), path) for path in directory.iterdir()
             if (match := re.fullmatch(r"checkpoint-(\d{6,18})", path.name))]
    return sorted(found, reverse=True)


def drop_checkpoints(run, step):
    """Remove those that --keep_checkpoints does not keep, once the newest is seen to be whole. Rank
    0 only."""
    try:
        older = [(s, path) for s, path in checkpoints_of(run.directory) if s < step]
        older = [path for s, path in older[run.config.keep_checkpoints - 1 :]
                 if s != run.progress["best_step"]]
        if older:
            read_checkpoint(checkpoint_path(run.directory, step))
        for path in older:
            remove_at_once(path)
    except (OSError, ValueError) as e:
        say(f"older checkpoints stay: {e}")


def read_checkpoint(path):
    """The state in a checkpoint's list, if it and all files it names are what was written."""
    try:
        state = read_json(path / "checkpoint.json")
        if state.pop("sha256") != text_digest(state):
            raise ValueError("checkpoint.json has another SHA-256 than when it was written")
        if checkpoint_path(path.parent, state["step"]) != path:
            raise ValueError(f"it is a copy of that of step {state['step']}")
        for name, sha in state["files"].items():
            if digest(path / name) != sha:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}, which is not whole: {e}")
    return state


def newest_checkpoint(directory):
    """The path and the state of a run's newest whole checkpoint, or two None; what is skipped is
    said. Rank 0 only."""
    broken = []
    for _, path in checkpoints_of(directory):
        try:
            return path, read_checkpoint(path)
        except ValueError as e:
            broken.append(str(e))
            say(f"skipped {e}")
    if broken:
        raise ValueError("; ".join([f"--resume: {directory} has no whole checkpoint", *broken]))
    return None, None


def find_checkpoint(config, directory, content):
    """The step of the newest whole checkpoint of the run in --output_dir, 0 if it has none yet.
    Raises ValueError if this is another run: with other flags, data or base model. Rank 0 only."""
    path, state = newest_checkpoint(directory)
    begun = state or read_json(directory / "train_config.json", {})
    if config.resume == "must" and not path:
        raise ValueError(f"--resume must: {directory} has no whole checkpoint")
    if not path and (directory / "adapter_model.safetensors").is_file():
        raise ValueError(f"--output_dir {directory} holds a trained adapter, but no checkpoint to"
                         " resume from: name another directory; --init_adapter can begin with it")
    if not begun:
        return 0
    if path and "progress" not in state:
        raise ValueError(f"--resume: {path} was made by an older version of this script: finish the"
                         " run with that version")
    before, same = begun.get("config", {}), as_json(dataclasses.asdict(config))
    for values in before, same:
        values["target_modules"] = sorted(values.get("target_modules", ()))
    changed = [f"--{name} {before.get(name)}, not {same[name]}" for name in MUST_MATCH
               if before.get(name) != same[name]]
    if changed:
        raise ValueError(f"--output_dir {directory} holds a run with {'; '.join(changed)}: name"
                         " another directory, or resume it with its own flags by --resume must")
    for key, what in (("data_sha256", "rows: the data set or the tokenizer has changed"),
                      ("base_sha256", "base model: its files or its config.json have changed"),
                      ("eval_sha256", "evaluation rows: --eval_dataset has changed")):
        if begun.get(key, content[key]) != content[key]:  # older runs have no eval_sha256
            raise ValueError(f"--output_dir {directory} holds a run with another {what}")
    for name in SCHEDULE if path else ():
        if before.get(name) != same[name]:
            say(f"changed: --{name} is {same[name]}, and was {before.get(name)} until step"
                f" {state['step']}")
    if path and state["step"] > config.max_steps:
        raise ValueError(f"--max_steps {config.max_steps}: {path} has more steps")
    for step, skipped in checkpoints_of(directory) if path else ():
        if step > state["step"]:  # else it would count as one of --keep_checkpoints, or come back
            with contextlib.suppress(OSError):
                os.replace(skipped, skipped.with_name(f"{skipped.name}.broken-{time.time_ns()}"))
    return state["step"] if path else 0


def agree_on_content(config, rows, eval_rows, base_sha256):
    """What tells the rows and the base model from others. All ranks must call this."""
    content = {"data_sha256": rows.sha256(), "base_sha256": base_sha256,
               "eval_sha256": eval_rows and eval_rows.sha256()}
    flags = {"data_sha256": "dataset", "base_sha256": "model", "eval_sha256": "eval_dataset"}
    for other in gather_objects(content):
        for key, flag in flags.items():
            if other[key] != content[key]:
                value = as_json(vars(config)[flag])
                value = " ".join(value) if isinstance(value, list) else value
                raise Stop(f"--{flag} {value}: not the same on all nodes")
    return content


def base_digest(base):
    """SHA-256 of the base model: of config.json, of what its files have by their headers, and of
    some bytes of every tensor."""
    sha = hashlib.sha256((base / "config.json").read_bytes())
    tensors = sorted(weight_files(base).items(), key=lambda tensor: (tensor[1].path, tensor[0]))
    for path, some in itertools.groupby(tensors, lambda tensor: tensor[1].path):
        with path.open("rb") as file:
            for name, (_, dtype, shape, start, stop) in some:
                sha.update(f"{name} {dtype} {shape}".encode())
                for at in np.linspace(start, max(start, stop - SAMPLE), SAMPLES, dtype=np.int64):
                    sha.update(os.pread(file.fileno(), min(SAMPLE, stop - start), int(at)))
    return sha.hexdigest()


# ------------------------------------------------------------------------------------------------
# The check at start, and the demo
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_family(model_config, config):
    """Compare the layer here with transformers' on two layers of the user's own model, shrunk, with
    two documents in one bin: logits and loss in fp32 on the CPU. Rank 0 only."""
    small, cpu = shrunk_config(model_config), torch.device("cpu")
    arch = describe_model(small)
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
    bin = make_bin(rows_of([(ids, ids) for ids in documents]), [[0, 1]], 0, None, run)
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
    plan = Plan(
        compute_dtype="float32", n_layers=arch.n_layers, shard_group_size=1,
        reshard_after_forward=True, bin_tokens=64, recomputed=0, keep_middle=False,
        hold_weights=False, offload_activations=False, offload_params=False)
    model = Model(arch, make_layout(arch, (), config), plan)
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
    on_rank_0(lambda: (directory / "train_config.json").exists() or write_demo(directory / "demo"))


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
    for stream in sys.stdout, sys.stderr:  # a row may have what the terminal cannot show
        stream.reconfigure(errors="backslashreplace")
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: with torch 2.13 and gloo, one exit in ten aborts in a C++ thread's destructor
    # ("terminate called without an active exception"), after everything was written
    os._exit(code)
