"""Derive the flags that were left out, and refuse combinations that cannot be."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from fsdp_qlora.config import Config
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.planner.gpu_specs import parse_gpus
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.from_config import text_config
from fsdp_qlora.pretrained.rope import max_context_length
from fsdp_qlora.run.flags import parse_value


class SaveInterval(NamedTuple):
    """What lies between two checkpoints; (0, inf): there is only one, at the end."""

    steps: int  # 0: any number
    seconds: float


def save_interval(config: Config) -> SaveInterval:
    """Return --save_every as a SaveInterval."""
    if config.save_every.endswith("m"):
        return SaveInterval(0, 60 * int(config.save_every[:-1]) or math.inf)
    return SaveInterval(int(config.save_every), math.inf)


def check_combinations(config: Config) -> None:
    """Raise ValueError for an unknown loss, and for flags that cannot be combined."""
    try:
        parse_value("loss", str, [*LOSSES], config.loss)
    except argparse.ArgumentTypeError as e:
        raise ValueError(f"--loss {e} (see --help)")
    for f in dataclasses.fields(config):
        losses = [loss for loss, loss_spec in LOSSES.items() if f.name in loss_spec.flags]
        value = getattr(config, f.name)
        if losses and config.loss not in losses and value != f.default:
            raise ValueError(f"--{f.name} {value} applies to --loss {' or '.join(losses)}, not to"
                             f" {config.loss}. Drop it, or choose another --loss")
    if LOSSES[config.loss].is_unpaired and config.batch_size < 2:
        raise ValueError(f"--batch_size {config.batch_size} with --loss {config.loss}: a step"
                         " compares good answers with bad ones. Use at least 2")
    for name in "random_weights", "plan_for":
        if getattr(config, name) and not config.model:
            raise ValueError(f"--{name} needs a --model whose config.json gives the shapes")
    if config.host_memory_gib and not config.plan_for:
        raise ValueError("--host_memory_gib is for --plan_for: a run finds what is free")
    for name in "eval_every", "eval_samples":
        if (n := getattr(config, name)) and not config.eval_dataset:
            raise ValueError(f"--{name} {n} needs an --eval_dataset: files, a Hub id, or a fraction"
                             " of the examples, 0.02")
    if config.offload_activations and config.recompute in ("none", "0"):
        raise ValueError("--offload_activations has nothing to offload with --recompute"
                         f" {config.recompute}. Drop one of them")
    if config.attn == "flash_attention_2" and config.compute_dtype != "bfloat16":
        raise ValueError("--attn flash_attention_2 computes in bfloat16: drop it or use sdpa")


def check_values(config: Config, world_size: int) -> None:
    """Raise ValueError for flags with wrong values, and for those that cannot be combined."""
    for name, value in vars(config).items():
        if value == "" or isinstance(value, tuple) and "" in value:
            raise ValueError(f"--{name} is empty. Leave it out or pass a value")

    def check(names: str, is_right: Callable[[Any], Any], wanted: str) -> None:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not is_right(value):
                raise ValueError(f"--{name} {value}: must be {wanted}")

    check("lora_rank lora_alpha max_seq_len batch_size", lambda n: n >= 1, "at least 1")
    check("keep_checkpoints", lambda n: n >= 2, "at least 2")
    check("num_epochs learning_rate beta desirable_weight undesirable_weight"
          " memory_limit_gib micro_batch_tokens max_grad_norm max_minutes step_timeout_minutes",
          lambda x: 0 < x < math.inf, "positive")
    check("max_steps eval_every eval_samples weight_decay simpo_gamma", lambda x: 0 <= x < math.inf,
          "0 or more")
    check("label_smoothing", lambda x: 0 <= x < 0.5, "at least 0 and below 0.5")
    check("save_every", lambda x: re.fullmatch(r"\d{1,9}m?", x),
          "minutes, such as 5m, or a number of steps, or 0")
    check("lora_dropout warmup_fraction", lambda x: 0 <= x < 1, "at least 0 and below 1")
    check("columns", lambda pairs: all(re.fullmatch("[^=]+=[^=]+", pair) for pair in pairs)
          and len({pair.partition("=")[0] for pair in pairs}) == len(pairs),
          "OLD=NEW, each OLD once")
    check("output_dir", lambda path: not path.startswith("~"), "the whole path: the shell has not"
          " replaced its ~")
    check("seed", lambda n: 0 <= n < 2**40, "at least 0 and below 2^40")
    if config.recompute not in ("all", "none", "auto") and not config.recompute.isdecimal():
        raise ValueError(f"--recompute {config.recompute}: must be all, none, auto or a number")
    if config.model and not (config.dataset or config.random_weights or config.plan_for):
        raise ValueError(f"--model {config.model} needs a --dataset: files or a Hub id")
    tracker = config.report_to
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: {tracker} is not installed: `pip install"
                         f" {tracker}`, or use none")
    if config.random_weights and config.eval_dataset and not config.dataset:
        raise ValueError("--eval_dataset needs a --dataset beside --random_weights")
    check_combinations(config)
    n_shards = config.shard_group_size
    if n_shards is not None and (n_shards < 1 or world_size % n_shards):
        sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f"--shard_group_size {n_shards} does not divide {world_size} processes:"
                         f" use one of {sizes}")
    shared_by = config.context_parallel_size
    if shared_by is not None and (shared_by < 1 or world_size % shared_by):
        raise ValueError(f"--context_parallel_size {shared_by} does not divide {world_size}"
                         " processes")


def resolve_config(config: Config, world_size: int) -> Config:
    """Return the Config with everything filled in that follows from the flags alone. Raises
    ValueError."""
    if config.plan_for:
        world_size = parse_gpus(config.plan_for)[0]
    check_values(config, world_size)
    n_shards = config.shard_group_size
    if n_shards is None and not config.model:
        n_shards = world_size  # the demo is there to show sharding
    return dataclasses.replace(
        config,
        shard_group_size=n_shards,
        target_modules=tuple(" ".join(config.target_modules).replace(",", " ").split()),
        beta=config.beta or (0.1 if "beta" in LOSSES[config.loss].flags else None),
        learning_rate=config.learning_rate or (
            3e-3 if not config.model else 2e-4 if config.loss == "sft" else 5e-6),
        max_steps=config.max_steps or (None if config.model or config.dataset else 300),
        output_dir=config.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


def resolve_max_seq_len(
        config: Config, model_config: PreTrainedConfig, arch: Architecture) -> Config:
    """Return the Config with --max_seq_len filled in, by what the model supports. Raises ValueError
    if the one that was given is longer."""
    longest = max_context_length(text_config(model_config))
    if longest and (config.max_seq_len or 0) > longest and config.dataset:
        raise ValueError(f"--max_seq_len {config.max_seq_len}: the model supports up to {longest};"
                         " more needs a rope_scaling in its config.json")
    chosen = arch.mla.index_topk if arch.mla else None
    max_seq_len = config.max_seq_len or min(2048, longest or 2048, chosen or 2048)
    if chosen and max_seq_len > chosen:
        raise ValueError(f"--max_seq_len {max_seq_len}: in rows of more than {chosen} tokens this"
                         " model's indexer chooses the keys that a query sees, which is not"
                         f" supported. Use at most {chosen}")
    return dataclasses.replace(config, max_seq_len=max_seq_len)


def resolve_steps(config: Config, n_rows: int) -> Config:
    """Return the Config with --max_steps and --eval_every filled in, in steps, from the number of
    rows."""
    steps = config.max_steps or math.ceil(config.num_epochs * n_rows / config.batch_size)
    every = math.ceil(steps / 10) if config.eval_every is None else config.eval_every
    return dataclasses.replace(config, max_steps=steps, eval_every=every)
