"""Config: all flags of train_fsdp_qlora.py, with their defaults and help. run/flags.py parses them.

Nothing here needs torch, so that --help is there at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

VERSION = "0.9.0"  # of --version and train_config.json


def flag(default: Any, help_text: str, **extra: Any) -> Any:
    """One field of Config: its default, its help and argparse's other keywords."""
    return dataclasses.field(default=default, metadata={"help": help_text, **extra})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of the script. None means: derived from the rest, and printed, or not used."""

    model: str | None = flag(
        None, "Hub id or directory of safetensors; left out: a built-in demo; with --random_weights"
        " or --plan_for also llama-2-7b, llama-2-70b, llama-3-8b, llama-3-70b, qwen2.5-32b")
    dataset: tuple[str, ...] | None = flag(
        None, "files (JSONL, JSON, Parquet, CSV, TSV, text, also .gz), patterns, directories, what"
        " save_to_disk wrote, or a Hub id; after a directory or a Hub id may stand"
        " ,split=train_sft, after a Hub id also ,name=CONFIGURATION ,revision=TAG; left out: the"
        " demo's instructions")
    eval_dataset: tuple[str, ...] | None = flag(
        None, "the same for evaluation, or a fraction of the rows of --dataset: 0.02")
    columns: tuple[str, ...] | None = flag(None, "new names for keys of rows: context=input")
    max_seq_len: int | None = flag(
        None, "tokens; longer rows are cut; left out: 2048, or what the model was made for if less")
    chat_template: str | None = flag(
        None, "Jinja file, or JSON like chat_template.json, to use instead of the tokenizer's own")
    output_dir: str | None = flag(None, "where results go; left out: a new directory below runs/")
    resume: str = flag(
        "auto", "auto: resume the run in --output_dir, if there is one; never:"
        " begin a new one; must, or no value: resume it, with the flags that it began with unless"
        " others are given", choices=("auto", "never", "must"), nargs="?", const="must")
    random_weights: bool = flag(False, "random weights: of the model, only config.json is read")
    loss: str = flag(
        "sft", "what is trained: sft, text; dpo, ipo, simpo or orpo, a chosen answer rather than a"
        " rejected one; kto, good answers rather than bad ones",
        choices=("sft", "dpo", "ipo", "simpo", "orpo", "kto"))
    beta: float | None = flag(
        None, "of the other losses: how far the model may move from the reference, less the higher;"
        " of simpo the scale of rewards (its authors take 2 to 10), of orpo the weight of the odds;"
        " left out: 0.1")
    label_smoothing: float = flag(0.0, "of dpo: the share of pairs that are the wrong way round")
    simpo_gamma: float = flag(0.5, "of simpo: the margin between rewards")
    desirable_weight: float = flag(1.0, "of kto: of the losses of good answers")
    undesirable_weight: float = flag(1.0, "of kto: of the losses of bad answers")
    batch_size: int = flag(16, "rows an optimizer step, over all GPUs")
    num_epochs: float = flag(1.0, "passes over the data set; --max_steps overrides it")
    max_steps: int | None = flag(
        None, "optimizer steps; 0: a dry run, which reads and checks all but the weights and shows"
        " what would be trained; left out: by --num_epochs, for the demo 300")
    learning_rate: float | None = flag(
        None, "peak; left out: 2e-4, of preferences 5e-6, for the demo 3e-3")
    lr_schedule: str = flag(
        "cosine", "after the warm-up: to 0 as a cosine or linear, or constant",
        choices=("cosine", "linear", "constant"))
    warmup_fraction: float = flag(0.03, "of all steps, in which the rate rises to its peak")
    weight_decay: float = flag(0.0, "of AdamW, on all of the adapter")
    max_grad_norm: float = flag(1.0, "the adapter's whole gradient is scaled down to this norm")
    eval_every: int | None = flag(
        None, "steps between evaluations, besides the one before the first step and the one at the"
        " end; 0: only these two; left out: a tenth of all steps")
    eval_samples: int | None = flag(
        None, "greedy answers to held-out rows that each evaluation shows beside what is wanted; 0:"
        " none; left out: 2 where they take less than a hundredth of the time")
    save_every: str = flag(
        "5m", "between checkpoints: minutes, 5m, or steps, 100; 0: only at the end")
    keep_checkpoints: int = flag(2, "the newest that stay, besides the one of the best evaluation")
    max_minutes: float | None = flag(
        None, "from the launch; then the run saves and ends, and the same command resumes it")
    step_timeout_minutes: float | None = flag(
        None, "in which a step must end, else all ranks write down where they are and end; left"
        " out: 20 times the longest step so far and at least 10 minutes, an hour for the first")
    seed: int = flag(
        0, "of the adapter's initial values, the data order, the rows held out, dropout, random"
        " weights")
    report_to: str = flag(
        "tensorboard", "where metrics go besides metrics.jsonl; wandb must be installed",
        choices=("tensorboard", "wandb", "none"))
    adapter: str = flag(
        "lora", "kind: lora; rslora, which scales by lora_alpha / sqrt(lora_rank); dora, which also"
        " trains the norm of each weight's rows", choices=("lora", "rslora", "dora"))
    lora_rank: int = flag(16, "rank of the adapter")
    lora_alpha: int = flag(32, "scales the adapter, by lora_alpha / lora_rank; rslora: / its root")
    lora_dropout: float = flag(0.0, "dropout on the adapter's input")
    target_modules: tuple[str, ...] = flag(
        ("all-linear",), "linears that get an adapter, by name: q_proj v_proj; all-linear: all of"
        " the decoder layers, of mixtures those of attention; experts: all experts, too")
    init_adapter: str | None = flag(
        None, "directory of an adapter to begin with, of this script or of PEFT")
    micro_batch_tokens: int | None = flag(
        None, "tokens a GPU works on at once, at least the longest row; left out: what is fastest"
        " and fits")
    shard_group_size: int | None = flag(
        None, "processes that share one copy of the model, for instance those of a node; every such"
        " group holds one; left out: what is fastest and fits")
    recompute: str = flag(
        "auto", "decoder layers recomputed in backward: all, none, a number, auto (fastest)")
    offload_activations: bool = flag(
        False, "keep what recomputed layers need in pinned host memory until their backward")
    offload_params: bool = flag(
        False, "keep the 4-bit weights in pinned host memory; each layer is copied when needed")
    memory_limit_gib: float | None = flag(
        None, "GPU memory to plan for and never to exceed; left out: what is free")
    plan_for: str | None = flag(
        None, "print the plan of this run on other GPUs and end: 4x4090, 8xH100, 2x24GB; needs no"
        " GPU, and reads of the model only config.json")
    attn: str | None = flag(
        None, "attention; left out: from Hopper on sdpa for rows of one length, else"
        " flash_attention_2 where it is installed, else sdpa",
        choices=("flash_attention_2", "sdpa"))
    compute_dtype: str = flag(
        "bfloat16", "dtype of activations and products", choices=("bfloat16", "float32"))
