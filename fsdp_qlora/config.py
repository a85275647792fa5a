"""Config: all flags of train_fsdp_qlora.py, with their defaults and help.

Nothing here needs torch, so that --help answers at once. run/flags.py parses them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from fsdp_qlora.adapter_settings import AdapterSettings

VERSION = "0.9.0"  # for --version and train_config.json
# {--lr_schedule: share of the peak learning rate after the warm-up, by the share of steps done}
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def flag(default: Any, help_text: str, on_resume: str = "", **extra: Any) -> Any:
    """Return a field of Config with its default, its help and argparse's other keywords.

    `on_resume`: what happens if a resumed run has another value. "refused": the run is refused;
    "logged": a line of the log says so; "": nothing, right for a flag that changes no number.
    """
    return dataclasses.field(
        default=default, metadata={"help": help_text, "on_resume": on_resume, **extra})


@dataclasses.dataclass(frozen=True)
class Config:
    """All flags of train_fsdp_qlora.py. None means that the value is derived from the rest and
    printed, or that the flag is not used."""

    model: str | None = flag(
        None, "Hub id, or directory with safetensors. With --random_weights or --plan_for also a"
        " built-in config: llama-2-7b, llama-2-70b, llama-3-8b, llama-3-70b, qwen2.5-32b (default:"
        " a tiny built-in demo model)")
    dataset: tuple[str, ...] | None = flag(
        None, "training data: files (JSONL, JSON, Parquet, CSV, TSV, text, also .gz), globs,"
        " directories, output of save_to_disk(), or a Hub id. Append ,split=NAME to a directory or"
        " Hub id, and ,name=CONFIG or ,revision=TAG to a Hub id (default: the demo's data)")
    eval_dataset: tuple[str, ...] | None = flag(
        None, "evaluation data: like --dataset, or a fraction of --dataset to hold out, such as"
        " 0.02 (default: no evaluation)")
    columns: tuple[str, ...] | None = flag(
        None, "rename keys of the data, OLD=NEW, such as context=input")
    max_seq_len: int | None = flag(
        None, "maximum length of a row in tokens, of a pair that of each answer; longer ones are"
        " truncated (default: 2048, or the model's limit if lower)", on_resume="refused")
    chat_template: str | None = flag(
        None, "chat template: a Jinja file, or JSON like chat_template.json (default: the"
        " tokenizer's)")
    output_dir: str | None = flag(
        None, "where to write the run (default: a new directory under runs/)")
    resume: str = flag(
        "auto", "auto: resume the run in --output_dir if there is one. never: start a new run, and"
        " fail if there is one. must (or --resume alone): resume, with the run's own flags for all"
        " that are not given here", choices=("auto", "never", "must"), nargs="?", const="must")
    random_weights: bool = flag(
        False, "use random weights and read only the model's config.json, to measure speed and"
        " memory", on_resume="refused")
    loss: str = flag(
        "sft", "training objective. sft: supervised fine-tuning. dpo, ipo, simpo, orpo: prefer the"
        " chosen to the rejected answer of each pair. kto: good and bad answers, unpaired",
        on_resume="refused")
    beta: float | None = flag(
        None, "preference losses only. dpo, ipo, kto: strength of the pull towards the reference"
        " model. simpo: scale of rewards (its authors use 2 to 10). orpo: weight of the odds ratio"
        " (default: 0.1)", on_resume="refused")
    label_smoothing: float = flag(
        0.0, "dpo only: assumed fraction of pairs with swapped labels", on_resume="refused")
    simpo_gamma: float = flag(0.5, "simpo only: target reward margin", on_resume="refused")
    desirable_weight: float = flag(
        1.0, "kto only: loss weight of good answers", on_resume="refused")
    undesirable_weight: float = flag(
        1.0, "kto only: loss weight of bad answers", on_resume="refused")
    batch_size: int = flag(
        16, "rows (tokenized examples; for dpo, ipo, simpo and orpo, pairs) per optimizer step,"
        " over all GPUs; gradient accumulation is automatic", on_resume="refused")
    num_epochs: float = flag(1.0, "number of passes over the data; ignored with --max_steps")
    max_steps: int | None = flag(
        None, "number of optimizer steps; 0: a dry run, which reads and checks all but the weights"
        " and shows what would be trained (default: by --num_epochs; demo: 300)",
        on_resume="logged")
    learning_rate: float | None = flag(
        None, "peak learning rate (default: 2e-4; preference losses: 5e-6; demo: 3e-3)",
        on_resume="logged")
    lr_schedule: str = flag(
        "cosine", "schedule after the warm-up: cosine or linear decay to 0, or constant",
        on_resume="logged", choices=tuple(SCHEDULES))
    warmup_fraction: float = flag(
        0.03, "fraction of all steps used for linear warm-up", on_resume="logged")
    weight_decay: float = flag(
        0.0, "AdamW's weight decay, on all adapter weights", on_resume="logged")
    max_grad_norm: float = flag(
        1.0, "clip the global gradient norm to this value", on_resume="logged")
    eval_every: int | None = flag(
        None, "evaluate every N steps, as well as before step 1 and at the end; 0: only those two"
        " (default: a tenth of all steps)")
    eval_samples: int | None = flag(
        None, "number of held-out prompts to answer greedily and print at each evaluation; 0: none"
        " (default: 2, if that costs under 1 percent of the time)")
    save_every: str = flag(
        "5m", "checkpoint interval: minutes (5m) or steps (100); 0: only at the end")
    keep_checkpoints: int = flag(
        2, "number of latest checkpoints to keep, in addition to the best one")
    max_minutes: float | None = flag(
        None, "time limit from the launch: save and exit with code 75; the same command resumes"
        " (default: none)")
    step_timeout_minutes: float | None = flag(
        None, "abort a step that takes longer; every rank first writes its stack to stacks-*.txt"
        " (default: 20 times the longest step so far, at least 10; 60 for the first step)")
    seed: int = flag(
        0, "seed of the adapter's initial values, data order, held-out split, dropout and random"
        " weights", on_resume="refused")
    report_to: str = flag(
        "tensorboard", "metrics tracker, in addition to metrics.jsonl (wandb: install it first)",
        choices=("tensorboard", "wandb", "none"))
    adapter: str = flag(
        "lora", "adapter type, on the 4-bit model. lora; rslora: LoRA scaled by lora_alpha /"
        " sqrt(lora_rank); dora: also trains a magnitude per output feature", on_resume="refused",
        choices=("lora", "rslora", "dora"))
    lora_rank: int = flag(16, "LoRA rank", on_resume="refused")
    lora_alpha: int = flag(
        32, "LoRA alpha: the adapter is scaled by lora_alpha / lora_rank (rslora: /"
        " sqrt(lora_rank))", on_resume="refused")
    lora_dropout: float = flag(0.0, "dropout on the adapter's input", on_resume="refused")
    target_modules: tuple[str, ...] = flag(
        ("all-linear",), "linear layers to adapt: names (q_proj v_proj); all-linear: every linear"
        " in the decoder layers, in MoE models of the token mixers only; experts: all experts as"
        " well", on_resume="refused")
    trainable_tokens: tuple[str, ...] | None = flag(
        None, "tokens whose rows of the embedding and of the lm_head are trained as well, such"
        " as '<|im_start|>' '<|im_end|>'; those that the vocabulary lacks are added to it",
        on_resume="refused")
    init_adapter: str | None = flag(
        None, "start from this adapter (of a run of this script, or saved by PEFT)",
        on_resume="refused")
    micro_batch_tokens: int | None = flag(
        None, "tokens per GPU in one forward and backward, at least the longest row (default:"
        " the fastest that fits)")
    shard_group_size: int | None = flag(
        None, "number of GPUs that share one sharded copy of the model; 1: a full copy on each"
        " GPU, like DDP; fewer than all: HSDP, for instance the GPUs of a node (default: the"
        " fastest that fits)")
    context_parallel_size: int | None = flag(
        None, "number of GPUs that share each micro-batch, so that a row may be that many times as"
        " long (default: 1; more if a row does not fit or there are fewer rows than GPUs)")
    recompute: str = flag(
        "auto", "activation checkpointing: how many decoder layers to recompute in backward: all,"
        " none, a number, or auto (the fastest that fits)")
    offload_activations: bool = flag(
        False, "keep the saved activations of recomputed layers in pinned host memory")
    offload_params: bool = flag(
        False, "keep the 4-bit weights in pinned host memory; each layer is copied to the GPU when"
        " needed")
    memory_limit_gib: float | None = flag(
        None, "GPU memory limit in GiB (default: all that is free)")
    plan_for: str | None = flag(
        None, "print the plan for other GPUs and exit, e.g. 4x4090, 8xH100, 2x24GB; needs no GPU"
        " and reads only the model's config.json")
    host_memory_gib: float | None = flag(
        None, "for --plan_for: free host memory per GPU, in GiB (default: 120)")
    attn: str | None = flag(
        None, "attention implementation (default: sdpa for equal-length rows on Hopper or"
        " newer; else flash_attention_2 if installed, else sdpa)",
        choices=("flash_attention_2", "sdpa"))
    compute_dtype: str = flag(
        "bfloat16", "dtype of activations and matmuls", on_resume="refused",
        choices=("bfloat16", "float32"))

    @property
    def adapter_settings(self) -> AdapterSettings:
        return AdapterSettings(self.lora_rank, self.lora_alpha, self.adapter, self.lora_dropout)


def warmup_steps(config: Config) -> int:
    """Return the number of steps in which the learning rate rises to its peak, at least one."""
    return max(1, round(config.warmup_fraction * config.max_steps))
