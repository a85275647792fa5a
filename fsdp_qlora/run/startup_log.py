"""What a run prints before its first step: its choices, hardware, plan, and the first row.

metrics.py prints the steps.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.kernels.recurrence import RECURRENCES
from fsdp_qlora.log import log, log_debug
from fsdp_qlora.memory import host_memory
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.gpu_specs import HOST_GIB, parse_gpus
from fsdp_qlora.quant.triton_trial import why_no_triton
from fsdp_qlora.run.metrics import compiles_kernels, unit_of
from fsdp_qlora.run.run import Run


HIGH_RATE = 0.02  # --learning_rate above it gets a line
FLAGS_LOGGED_SEPARATELY = ("output_dir", "shard_group_size")  # in other lines of the log
# of the first row's long parts, in the loss or not, at each end
SHOWN_TOKENS = {True: 60, False: 30}


def log_startup(
        user_config: Config, config: Config, plan: Plan, kernels: Kernels,
        memory_limit: int, device: torch.device, versions: dict[str, str]) -> None:
    """Print what this run is, before it begins: what it has chosen for flags that were not given,
    on what it runs, and the plan."""
    world_size = dist.get_world_size()
    defaults = {name: value for name, value in vars(config).items()
                if value != vars(user_config)[name] and name not in FLAGS_LOGGED_SEPARATELY}
    if defaults:
        log("defaults: " + " ".join(
            f"--{name} {' '.join(value) if isinstance(value, tuple) else value}"
            for name, value in defaults.items()))
    hardware = (f"{world_size} x {torch.cuda.get_device_name(device)}, NCCL"
                if device.type == "cuda" else f"CPU, {pluralize(world_size, 'process')}, gloo")
    log(f"hardware: {hardware}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if config.learning_rate > HIGH_RATE:
        log(f"warning: --learning_rate {config.learning_rate:g} is very high; adapters usually"
            " train at 1e-5 to 1e-2")
    if device.type == "cuda" and why_no_triton():
        log(f"warning: slow path, no Triton kernels: {why_no_triton()}")
    names = {kernel.name for kernel in kernels.of_attention}
    if kernels.recurrence:
        eager_names = {record.eager: record.eager_name for record in RECURRENCES.values()}
        names.add(eager_names.get(kernels.recurrence, "flash-linear-attention"))
    log_on_gpu = log if device.type == "cuda" else log_debug
    log_on_gpu(f"attention: {', '.join(sorted(names))}")
    if device.type == "cuda":
        if any(kernel.is_eager for kernel in kernels.of_attention):
            log("warning: slow path, attention of one document at a time: no fused kernel fits this"
                " model, dtype and GPU")
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        log(f"memory: {outside / 2**30:.2f} GiB of this GPU already in use (CUDA context, NCCL,"
            " other programs)")
    resident = host_memory().now if device.type == "cpu" else 0
    log_plan(user_config, plan, memory_limit, world_size, unit_of(device),
             resident if resident < math.inf else 0)


def log_plan_elsewhere(user_config: Config, config: Config, plan: Plan, memory_limit: int) -> None:
    """Print the answer to --plan_for, if the plan fits."""
    world_size, gpu, _ = parse_gpus(config.plan_for or "")
    lengths = "" if config.dataset else f" of {config.max_seq_len:,} tokens"
    log(f"plan for {world_size} x {gpu} (from data sheets, not measured): {config.batch_size:,}"
        f" {row_word(config)}{lengths} per step, {config.host_memory_gib or HOST_GIB:g} GiB of host"
        " memory per GPU")
    log_plan(user_config, plan, memory_limit, world_size)
    pinned = f" and {plan.host_bytes / 2**30:.1f} GiB of host memory" if plan.host_bytes else ""
    log(f"fits: {plan.bytes / 2**30:.1f} of {memory_limit / 2**30:.1f} GiB{pinned} per GPU,"
        f" predicted {1 / plan.seconds_per_token:,.0f} tok/s/GPU")


def log_plan(
    user_config: Config, plan: Plan, memory_limit: int, world_size: int, unit: str = "GPU",
    resident: float = 0,
) -> None:
    """Print the plan: the memory that it is predicted to take, and how the work is laid out.
    `resident`: bytes that the process has already, on a CPU, where they count."""
    speed = f"predicted {1 / plan.seconds_per_token:,.0f} tok/s/{unit}"
    shared_by = plan.context_parallel_size
    recomputed = f"activation checkpointing in {plan.n_recomputed} of {plan.n_layers} layers"
    if not plan.n_recomputed:
        recomputed = "no activation checkpointing"
    notes = {
        describe_weight_layout(plan, world_size, unit): True,
        f"micro-batches of up to {plan.micro_batch_tokens * shared_by:,} tokens": True,
        f"each shared by {shared_by} {unit}s (context parallelism)": shared_by > 1,
        recomputed: True,
        "nothing to offload": plan.offload_activations and not plan.n_recomputed,
        "embeddings in host memory": plan.embedding_on_host,
        "CUDA graphs": plan.uses_cuda_graphs,
        speed: unit == "GPU" and not user_config.plan_for}
    log("plan: " + "; ".join(note for note, holds in notes.items() if holds))
    details = {
        "recomputed layers save the sum after the mixer":
            plan.n_recomputed and plan.save_mid_residual,
        f"{plan.n_attention_saved} of them save the results of attention": plan.n_attention_saved,
        f"{plan.n_mlp_saved} of them save the activations of their MLP": plan.n_mlp_saved,
        "dequantized weights are reused in backward": plan.reuse_dequantized,
        "no resharding after forward": not plan.reshard_after_forward,
        f"no CUDA graphs: {plan.why_no_cuda_graphs}": not plan.uses_cuda_graphs,
        speed: unit != "GPU"}
    if any(details.values()):
        log_debug("plan details: " + "; ".join(note for note, holds in details.items() if holds))
    memory = {"the process so far": resident, **plan.memory}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items()
                      if size > 2**30 / 200)
    of_limit = f" of {memory_limit / 2**30:.2f} GiB" if memory_limit else ""
    pinned = f", and {plan.host_bytes / 2**30:.2f} GiB of pinned host memory"
    log_on_gpu = log if unit == "GPU" else log_debug
    log_on_gpu(f"memory: predicted peak {sum(memory.values()) / 2**30:.2f} GiB{of_limit} per"
               f" {unit}{pinned if plan.host_bytes else ''}: {parts}")


def describe_weight_layout(plan: Plan, n: int, unit: str) -> str:
    """Describe the layout of the weights over `n` GPUs or processes."""
    n_shards = plan.shard_group_size
    if n == 1:
        return f"weights on one {unit}"
    if n_shards == 1:
        return f"weights replicated on {pluralize(n, unit)}"
    copies = f", {n // n_shards} copies" if n_shards < n else ""
    return f"weights sharded over {pluralize(n_shards, unit)}{copies}"


def pluralize(n: int, noun: str) -> str:
    """Return a number of things with their noun: 1 process, 2 processes, 2 GPUs."""
    return f"{n} {noun}{('es' if noun.endswith('s') else 's') * (n > 1)}"


def row_word(config: Config) -> str:
    """Return the word for what --batch_size counts."""
    return "pairs" if LOSSES[config.loss].documents_per_row == 2 else "rows"


def log_rows(rows: Rows, tokenizer: PreTrainedTokenizerFast | None, n: int = 1) -> None:
    """Print the first row as the model sees it, or `n` rows of the whole data set, with what is not
    in the loss in brackets, if there is a tokenizer; with a preference loss both answers, or
    whether its answer is good."""
    if not tokenizer:
        return
    for row in range(0, len(rows), math.ceil(len(rows) / n)):
        which, first = f"row {row + 1:,}" if row else "first row", row * rows.documents_per_row
        names = [", chosen", ", rejected"] if rows.documents_per_row == 2 else [""]
        if rows.loss_spec.is_unpaired:
            names = [" (good)" if rows.desirable[first] else " (bad)"]
        for i, name in enumerate(names):
            log(f"{which}{name}: {show_document(*rows.document(first + i), tokenizer)!r}")


def show_document(ids: torch.Tensor, labels: torch.Tensor,
                  tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the text of a document, with what is not in the loss in brackets. A long document is
    cut to its first and last parts, and a long part to its beginning and end, because a reader
    wants to see where the loss begins and that it ends with the closing token."""
    all_ids, shown, start = ids.tolist(), [], 0
    for in_loss, part in itertools.groupby((labels != IGNORE_INDEX).tolist()):
        stop = start + len(list(part))
        shown.append((in_loss, start, stop))
        start = stop
    texts = []
    for in_loss, start, stop in shown[:3] + shown[3:][-4:]:
        n, n_tokens = SHOWN_TOKENS[in_loss], stop - start
        if n_tokens > 3 * n:
            text = (f"{decode(all_ids, start, start + n, tokenizer)} .. {n_tokens - 2 * n:,} tokens"
                    f" .. {decode(all_ids, stop - n, stop, tokenizer)}")
        else:
            text = decode(all_ids, start, stop, tokenizer)
        texts.append(text if in_loss else f"[masked: {text}]")
    if len(shown) > 7:
        texts.insert(3, f" .. {len(shown) - 7} more parts .. ")
    return "".join(texts)


def decode(ids: list[int], start: int, stop: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the text of ids[start:stop]. Decoded alone, a part may lose the space with which it
    begins."""
    before = ids[max(0, start - 8) : start]
    whole: str = tokenizer.decode(before + ids[start:stop])
    return whole[len(tokenizer.decode(before)) :]


def log_extension(config: Config, start_step: int, last_rate: float, next_rate: float) -> None:
    """Log the jump of the learning rate where a complete run continues."""
    log(f"note: the run was complete at step {start_step} and now continues to step"
        f" {config.max_steps}. Its learning rate jumps from {last_rate:.1e} to {next_rate:.1e}; a"
        " new run with --init_adapter would start with a warm-up")


def log_parameters(n_trainable: int, n_frozen: int) -> None:
    log(f"parameters: {n_trainable:,} trainable, {n_frozen:,} frozen")


def describe_steps(config: Config) -> str:
    """Return a dry run's description of the run."""
    return f"the run has {config.max_steps:,} steps of {config.batch_size:,} {row_word(config)}"


def log_steps(run: Run) -> None:
    """Log how many steps the loop is about to run."""
    config, rows = run.config, run.rows
    epochs = config.max_steps * config.batch_size / len(rows)
    longest = rows.row_lengths().max()
    log(f"training: {config.max_steps:,} steps of {config.batch_size:,} {row_word(config)},"
        f" {epochs:.3g} epochs; the longest has {longest:,} tokens; peak learning rate"
        f" {config.learning_rate}")
    if compiles_kernels(run.device):
        log("step 1 compiles kernels: up to a minute, a few seconds when cached")
