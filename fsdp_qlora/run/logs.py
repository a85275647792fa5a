"""Console log, metrics.jsonl, trackers and loss.png.

During training nothing that goes wrong with any of them ends a run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.forms import IGNORE
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.files import put_in_place, read_records, text_digest, write_whole
from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.memory import host_memory
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.gpu_specs import HOST_GIB, parse_gpus
from fsdp_qlora.quant.nf4 import why_no_triton
from fsdp_qlora.ranks import log, log_debug
from fsdp_qlora.run.state import Run


LOG_SECONDS = 2  # between lines of steps in the log
HIGH_RATE = 0.02  # --learning_rate above it gets a line
KERNEL_NAMES = {  # of functions in kernels/, in the log; others by their own name
    "batched_attention": "SDPA (equal lengths)", "flash_attention": "Flash Attention 2",
    "varlen_attention": "varlen_attn", "flex_document_attention": "flex_attention",
    "document_attention": "one sequence at a time", "fla_delta_rule": "flash-linear-attention",
    "fla_scan": "flash-linear-attention", "document_delta_rule": "delta rule in plain PyTorch",
    "document_scan": "Mamba-2 in plain PyTorch"}
FLAGS_LOGGED_SEPARATELY = ("output_dir", "shard_group_size")  # in other lines of the log
SHOWN_TOKENS = {True: 60, False: 30}  # of the first row's long parts, trained or not, at each end


class MetricsWriter:
    """Writer of metrics.jsonl, the tracker of --report_to, and a progress bar. Rank 0 only."""

    def __init__(self, run: Run, start_step: int) -> None:
        """Start after step `start_step`; later records of an earlier start are removed."""
        self.max_steps, self.status = run.config.max_steps, run.status
        self.place, self.compiles = device_word(run.device), compiles_kernels(run.device)
        self.first: tuple[int, float] | None = None  # first step of this start, and when it ended
        self.pace: float | None = None  # seconds per step since, evaluations and saves included
        self.path = run.directory / "metrics.jsonl"
        evaluated = run.progress.evaluated or 0
        write_whole(self.path, earlier_records(self.path, start_step, evaluated))
        self.size, self.unwritten, self.is_failing = self.path.stat().st_size, b"", False
        self.bar, self.last_line = None, 0.0
        trackers = {"tensorboard": tensorboard, "wandb": wandb_run, "none": lambda *_: (None, None)}
        self.name = run.config.report_to
        self.track, self.close_tracker = trackers[self.name](run, start_step)

    def write(self) -> None:
        """Append the unwritten lines. If the disk does not accept all of them, they are kept and
        written again next time, over the part that it accepted."""
        try:
            self.status.check_lock()
            file, written = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), 0
            try:
                while written < len(self.unwritten):
                    written += os.pwrite(file, self.unwritten[written:], self.size + written)
            finally:
                os.close(file)  # NFS may report only here that the disk is full
            self.size, self.unwritten, self.is_failing = self.size + written, b"", False
        except OSError as e:
            self.why = getattr(e, "strerror", None) or e
            if not self.is_failing:
                log(f"warning: cannot write {self.path} ({self.why}). Training continues; the lines"
                    " are kept and written later")
            self.is_failing = True

    def record(self, record: dict[str, Any]) -> None:
        """Write the record of a step or an evaluation."""
        self.unwritten += json.dumps(record).encode() + b"\n"
        self.write()
        try:
            if self.track:
                self.track(record)
        except Exception as e:
            log(f"warning: {self.name} failed ({getattr(e, 'strerror', None) or e}); no more"
                " metrics are sent to it")
            self.track = None

    def step(self, record: dict[str, Any]) -> None:
        """Write the record of a step, and log it unless another step was logged just before."""
        self.record(record)
        step, now, max_steps = record["step"], time.monotonic(), self.max_steps
        self.first = self.first or (step, now)  # not counted: this step also compiles
        if step > self.first[0]:
            self.pace = (now - self.first[1]) / (step - self.first[0])
        with contextlib.suppress(OSError):  # the terminal may be gone
            if self.bar is None:  # created now: its rate excludes the first step's compiling
                self.bar = tqdm(initial=step, total=max_steps, unit="step", disable=None)
            else:
                self.bar.update()
        if now - self.last_line >= LOG_SECONDS or step == max_steps:
            self.last_line = now
            self.status.write("training")
            left = max_steps - step
            eta = f" | {describe_time(left * self.pace)} left" if left and self.pace else ""
            speed = f"{record['tokens_per_second_per_gpu']:6,.0f} tok/s/{self.place}"
            if self.compiles and step == self.first[0]:
                speed = "(compiling)".rjust(len(speed))
            log("step {of_all} | loss {loss:7.4f}{metrics} | lr {learning_rate:.1e} | grad_norm"
                " {grad_norm:6.3f} | {speed} | {peak_memory_gib:5.2f} GiB{eta}".format(
                    of_all=of_all_steps(step, max_steps), metrics=describe_metrics(record),
                    speed=speed, eta=eta, **record))

    def close(self) -> None:
        self.write()
        if n_lost := self.unwritten.count(b"\n"):
            log(f"warning: the last {n_lost} lines of {self.path} are lost: {self.why}")
        for close in (self.bar and self.bar.close, self.close_tracker):
            with contextlib.suppress(Exception):
                if close:
                    close()


def device_word(device: torch.device) -> str:
    """Return what speeds are per: "GPU", or "process" where there is none."""
    return "GPU" if device.type == "cuda" else "process"


def compiles_kernels(device: torch.device) -> bool:
    """Whether the first step compiles kernels, which takes a while."""
    return device.type == "cuda" and not why_no_triton()


def describe_time(seconds: float) -> str:
    """Minutes and seconds, 2:03, or hours, minutes and seconds, 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def of_all_steps(step: int, max_steps: int | None) -> str:
    """" 15/300", as wide as "300/300"."""
    return f"{step:{len(str(max_steps))}d}/{max_steps}"


def log_extension(config: Config, start_step: int, last_rate: float, next_rate: float) -> None:
    """Log the jump of the learning rate where a complete run goes on."""
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
    longest = rows.lengths.view(-1, rows.n_answers).sum(1).max()
    log(f"training: {config.max_steps:,} steps of {config.batch_size:,} {row_word(config)},"
        f" {epochs:.3g} epochs; the longest has {longest:,} tokens; peak learning rate"
        f" {config.learning_rate}")
    if compiles_kernels(run.device):
        log("step 1 compiles kernels: up to a minute, a few seconds when cached")


def log_evaluation(step: int, max_steps: int | None, metrics: dict[str, float],
                   samples: list[dict[str, str]], is_best: bool) -> None:
    """Print the loss of an evaluation, and its sample answers."""
    best = " | best so far" if is_best else ""
    log(f"eval {of_all_steps(step, max_steps)} | loss {metrics['eval_loss']:7.4f}"
        f"{describe_metrics(metrics, 'eval_')}{best}")
    for sample in samples:
        log_sample(sample)


def log_sample(sample: dict[str, str]) -> None:
    """Print one of sample_answers()."""
    log(f"sample: prompt   {ending(sample['prompt'], 150)!r}")
    log(f"sample: answer   {beginning(sample['answer'], 300)!r}")
    log(f"sample: expected {beginning(sample['wanted'], 300)!r}")


def beginning(text: str, n: int) -> str:
    """Return a text's first n characters, with a mark if more follow."""
    return text if len(text) <= n else f"{text[:n]} [..]"


def ending(text: str, n: int) -> str:
    """Return a text's last n characters, with a mark if more precede them."""
    return text if len(text) <= n else f"[..] {text[-n:]}"


def describe_metrics(record: dict[str, Any], prefix: str = "") -> str:
    """Return a record's preference metrics for a line of the log; "" in supervised fine-tuning.
    Log-probabilities are shown for evaluations only: a step's line is long."""
    found = {key.removeprefix(prefix): value for key, value in record.items()
             if key.startswith(prefix)}
    parts = [f"perplexity {found['perplexity']:.2f}"] if "perplexity" in found else []
    parts += [f"{name} {found[key]:6.3f}" for name, key in (("margin", "rewards/margins"),
                                                            ("kl", "kl")) if key in found]
    if "rewards/accuracies" in found:
        parts.append(f"accuracy {100 * found['rewards/accuracies']:5.1f} %")
    for name in ("rewards", "logps") if prefix else ("rewards",):
        pair = [f"{answer} {found[key]:6.3f}" for answer in ("chosen", "rejected")
                if (key := f"{name}/{answer}") in found]
        if pair:
            parts.append(f"{name} {', '.join(pair)}")
    return "".join(f" | {part}" for part in parts)


def earlier_records(path: Path, start_step: int, evaluated: int) -> str:
    """Return the lines of metrics.jsonl for steps up to `start_step` and for evaluations up to step
    `evaluated`, each step once."""
    lines = {}
    for record in read_records(path) if start_step and path.is_file() else []:
        is_evaluation = "eval_loss" in record
        if record["step"] <= (evaluated if is_evaluation else start_step):
            lines[record["step"], is_evaluation] = json.dumps(record) + "\n"
    return "".join(lines.values())


def tensorboard(
        run: Run, start_step: int) -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    """Return a function that tracks a record, and a function that closes the tracker."""
    from torch.utils.tensorboard import SummaryWriter

    # on a full disk its thread would print a traceback; the next add_scalar() raises the error
    threading.excepthook = lambda hook: (
        isinstance(hook.exc_value, OSError) or threading.__excepthook__(hook))
    board = SummaryWriter(run.directory / "tensorboard", purge_step=start_step + 1)

    def track(record: dict[str, Any]) -> None:
        for key, value in record.items():
            if isinstance(value, list):
                board.add_text(key, json.dumps(value, indent=2), record["step"])
            else:
                board.add_scalar(key, value, record["step"])

    return track, board.close


def wandb_run(
        run: Run, start_step: int) -> tuple[Callable[[dict[str, Any]], None], Callable[[], None]]:
    """Return the functions of tensorboard() for Weights & Biases. Raises ValueError if it cannot be
    reached."""
    import wandb

    path = run.directory.resolve()
    try:
        tracker = wandb.init(
            project="fsdp-qlora", id=f"{path.name}-{text_digest(str(path))[:8]}", name=path.name,
            resume="allow", dir=path, config=dataclasses.asdict(run.config))
    except Exception as e:
        raise ValueError(f"--report_to wandb: {e}")

    def track(record: dict[str, Any]) -> None:
        tables = {key: wandb.Table(columns=[*value[0]], data=[[*row.values()] for row in value])
                  for key, value in record.items() if isinstance(value, list)}
        tracker.log({**record, **tables}, step=record["step"])

    return track, tracker.finish


def draw_losses(directory: Path) -> None:
    """Plot metrics.jsonl as loss.png. Rank 0 only."""
    try:
        from matplotlib.figure import Figure

        records, figure = [*read_records(directory / "metrics.jsonl")], Figure(figsize=(8, 5))
        losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for axes, key, style in ((losses, "loss", "-"), (losses, "eval_loss", "o-"),
                                 (rates, "learning_rate", "-")):
            points = [(record["step"], record[key]) for record in records if key in record]
            if points:
                axes.plot(*zip(*points), style, label=key.replace("_", " "))
                axes.set_ylabel("loss" if axes is losses else "learning rate")
        losses.legend()
        rates.set_xlabel("optimizer step")
        part = directory / ".loss.png.part"
        part.unlink(missing_ok=True)  # matplotlib would follow a link
        figure.savefig(part, format="png", dpi=120)
        put_in_place(part, directory / "loss.png")
    except Exception as e:
        log(f"no loss.png: {e}")


def log_startup(
        user_config: Config, config: Config, plan: Plan, kernels: Kernels,
        limit: int, device: torch.device, versions: dict[str, str]) -> None:
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
                if device.type == "cuda" else f"CPU, {count(world_size, 'process')}, gloo")
    log(f"hardware: {hardware}; "
        + ", ".join(f"{name} {version}" for name, version in versions.items()))
    if config.learning_rate > HIGH_RATE:
        log(f"warning: --learning_rate {config.learning_rate:g} is very high; adapters usually"
            " train at 1e-5 to 1e-2")
    if device.type == "cuda" and why_no_triton():
        log(f"warning: slow path, no Triton kernels: {why_no_triton()}")
    used = {f.__name__ for kind in kernels for f in kind.values()}
    log_on_gpu = log if device.type == "cuda" else log_debug
    names = sorted({KERNEL_NAMES.get(name, name) for name in used})
    log_on_gpu(f"attention: {', '.join(names)}")
    if device.type == "cuda":
        if "document_attention" in used:
            log("warning: slow path, attention of one sequence at a time: no fused kernel fits this"
                " model, dtype and GPU")
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        log(f"memory: {outside / 2**30:.2f} GiB of this GPU already in use (CUDA context, NCCL,"
            " other programs)")
    resident = host_memory()[0] if device.type == "cpu" else 0
    log_plan(user_config, plan, limit, world_size, device_word(device),
             resident if resident < math.inf else 0)


def log_plan_elsewhere(user_config: Config, config: Config, plan: Plan, limit: int) -> None:
    """Print the answer to --plan_for, if the plan fits."""
    world_size, gpu, _ = parse_gpus(config.plan_for or "")
    lengths = "" if config.dataset else f" of {config.max_seq_len:,} tokens"
    log(f"plan for {world_size} x {gpu} (from data sheets, not measured): {config.batch_size:,}"
        f" {row_word(config)}{lengths} per step, {config.host_memory_gib or HOST_GIB:g} GiB of host"
        " memory per GPU")
    log_plan(user_config, plan, limit, world_size)
    pinned = f" and {plan.host_bytes / 2**30:.1f} GiB of host memory" if plan.host_bytes else ""
    log(f"fits: {plan.bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB{pinned} per GPU, predicted"
        f" {1 / plan.token_seconds:,.0f} tok/s/GPU")


def log_plan(
    user_config: Config, plan: Plan, limit: int, world_size: int, place: str = "GPU",
    resident: float = 0,
) -> None:
    """Print the plan: the memory that it is predicted to take, and how the work is laid out.
    `resident`: bytes that the process has already, on a CPU, where they count."""
    speed = f"predicted {1 / plan.token_seconds:,.0f} tok/s/{place}"
    shared_by = plan.context_parallel_size
    checkpointed = f"activation checkpointing in {plan.recomputed} of {plan.n_layers} layers"
    if not plan.recomputed:
        checkpointed = "no activation checkpointing"
    notes = {
        describe_copies(plan, world_size, place): True,
        f"micro-batches of up to {plan.micro_batch_tokens * shared_by:,} tokens": True,
        f"each shared by {shared_by} {place}s (context parallelism)": shared_by > 1,
        checkpointed: True,
        "nothing to offload": plan.offload_activations and not plan.recomputed,
        "embeddings in host memory": plan.embedding_on_host,
        "CUDA graphs": plan.graphs,
        speed: place == "GPU" and not user_config.plan_for}
    log("plan: " + "; ".join(note for note, holds in notes.items() if holds))
    details = {
        "checkpointed layers save the residual stream after attention":
            plan.recomputed and plan.save_mid_residual,
        f"{plan.n_mlp_saved} of them save the activations of their MLP": plan.n_mlp_saved,
        "dequantized weights are reused in backward": plan.reuse_dequantized,
        "no resharding after forward": not plan.reshard_after_forward,
        f"no CUDA graphs: {plan.why_no_graphs}": not plan.graphs,
        speed: place != "GPU"}
    if any(details.values()):
        log_debug("plan details: " + "; ".join(note for note, holds in details.items() if holds))
    memory = {"the process so far": resident, **plan.memory}
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items()
                      if size > 2**30 / 200)
    of_limit = f" of {limit / 2**30:.2f} GiB" if limit else ""
    pinned = f", and {plan.host_bytes / 2**30:.2f} GiB of pinned host memory"
    log_on_gpu = log if place == "GPU" else log_debug
    log_on_gpu(f"memory: predicted peak {sum(memory.values()) / 2**30:.2f} GiB{of_limit} per"
               f" {place}{pinned if plan.host_bytes else ''}: {parts}")


def describe_copies(plan: Plan, n: int, place: str) -> str:
    """Describe the layout of the weights over `n` GPUs or processes."""
    shards = plan.shard_group_size
    if n == 1:
        return f"weights on one {place}"
    if shards == 1:
        return f"weights replicated on {count(n, place)}"
    copies = f", {n // shards} copies" if shards < n else ""
    return f"weights sharded over {count(shards, place)}{copies}"


def count(n: int, noun: str) -> str:
    """1 process, 2 processes, 2 GPUs."""
    return f"{n} {noun}{('es' if noun.endswith('s') else 's') * (n > 1)}"


def row_word(config: Config) -> str:
    """The word for what --batch_size counts."""
    return "pairs" if LOSSES[config.loss].n_answers == 2 else "sequences"


def log_examples(rows: Rows, tokenizer: PreTrainedTokenizerFast | None, n: int = 1) -> None:
    """Print the first row as the model sees it, or `n` rows of the whole data set, with what is not
    in the loss in brackets, if there is a tokenizer; of preferences both answers, or whether its
    answer is good."""
    if not tokenizer:
        return
    for row in range(0, len(rows), math.ceil(len(rows) / n)):
        which, first = f"example {row + 1:,}" if row else "first example", row * rows.n_answers
        names = [", chosen", ", rejected"] if rows.n_answers == 2 else [""]
        if rows.kind.is_unpaired:
            names = [" (good)" if rows.desirable[first] else " (bad)"]
        for i, name in enumerate(names):
            log(f"{which}{name}: {show_document(*rows.tokens(first + i), tokenizer)!r}")


def show_document(ids: torch.Tensor, labels: torch.Tensor,
                  tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the text of a document, with what is not in the loss in brackets. A long document is
    cut to its first and last parts, and a long part to its beginning and end, because a reader
    wants to see where the loss begins and that it ends with the closing token."""
    all_ids, shown, start = ids.tolist(), [], 0
    for is_trained, part in itertools.groupby((labels != IGNORE).tolist()):
        stop = start + len(list(part))
        shown.append((is_trained, start, stop))
        start = stop
    texts = []
    for is_trained, start, stop in shown[:3] + shown[3:][-4:]:
        n, n_tokens = SHOWN_TOKENS[is_trained], stop - start
        if n_tokens > 3 * n:
            text = (f"{decode(all_ids, start, start + n, tokenizer)} .. {n_tokens - 2 * n:,} tokens"
                    f" .. {decode(all_ids, stop - n, stop, tokenizer)}")
        else:
            text = decode(all_ids, start, stop, tokenizer)
        texts.append(text if is_trained else f"[masked: {text}]")
    if len(shown) > 7:
        texts.insert(3, f" .. {len(shown) - 7} more parts .. ")
    return "".join(texts)


def decode(ids: list[int], start: int, stop: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the text of ids[start:stop]. Decoded alone, a part may lose the space with which it
    begins."""
    before = ids[max(0, start - 8) : start]
    whole: str = tokenizer.decode(before + ids[start:stop])
    return whole[len(tokenizer.decode(before)) :]


def log_speed(run: Run, records: list[dict[str, Any]]) -> None:
    """Print the answer of --random_weights, if there are records of steps: speed, FLOP/s and
    memory."""
    if not records:
        return
    arch, plan, layers = run.model.arch, run.plan, run.model.layers
    rates = sorted(r["tokens_per_second_per_gpu"] for r in records[2:] or records[-1:])
    rate, peak = rates[len(rates) // 2], records[-1]["peak_memory_gib"]
    # per weight and token: 2 operations in forward, 2 in backward, 2 more if recomputed
    weights = sum(layer.spec.token_weights() for layer in layers)
    again = sum(layer.spec.recomputed_weights(layer.saves) for layer in layers)
    tflops = rate * (4 * (weights + arch.vocab_size * arch.hidden_size) + 2 * again) / 1e12
    place = device_word(run.device)
    log(f"measured: {rate:,.0f} tok/s/{place}, {tflops:.1f} TFLOP/s, peak {peak:.2f} GiB; predicted"
        f" {1 / plan.token_seconds:,.0f} tok/s/{place}")
