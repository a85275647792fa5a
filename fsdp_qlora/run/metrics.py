"""The metrics of a run: a line of the log for steps and evaluations, metrics.jsonl, trackers and
loss.png.

During training nothing that goes wrong with any of them ends a run. startup_log.py prints what
comes before the first step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fsdp_qlora.files import json_digest, open_no_follow, put_in_place, read_records, write_atomic
from fsdp_qlora.layer_costs.layer import LayerCosts
from fsdp_qlora.log import log
from fsdp_qlora.quant.triton_trial import why_no_triton
from fsdp_qlora.run.run import Run


LOG_SECONDS = 2  # between lines of steps in the log


class MetricsWriter:
    """Writer of metrics.jsonl, the tracker of --report_to, and a progress bar. Rank 0 only."""

    def __init__(self, run: Run, start_step: int) -> None:
        """Start after step `start_step`; later records of an earlier start are removed."""
        self.max_steps, self.status = run.config.max_steps, run.status
        self.unit, self.compiles = unit_of(run.device), compiles_kernels(run.device)
        self.first: tuple[int, float] | None = None  # first step of this start, and when it ended
        self.pace: float | None = None  # seconds per step since, evaluations and saves included
        self.path = run.directory / "metrics.jsonl"
        evaluated = run.progress.evaluated or 0
        write_atomic(self.path, earlier_records(self.path, start_step, evaluated))
        self.size = self.path.stat().st_size  # bytes of whole lines in the file
        self.unwritten = b""  # lines that the disk has not accepted yet
        self.is_failing, self.why = False, ""  # did the last write fail, and by which error
        self.bar: tqdm | None = None
        self.last_line = 0.0  # time.monotonic() of the last step in the log
        trackers = {"tensorboard": tensorboard, "wandb": wandb_run, "none": lambda *_: (None, None)}
        self.name = run.config.report_to
        self.track, self.close_tracker = trackers[self.name](run, start_step)

    def write(self) -> None:
        """Append the unwritten lines. If the disk does not accept all of them, they are kept and
        written again next time, over the part that it accepted."""
        try:
            self.status.check_lock()
            file, written = open_no_follow(self.path, os.O_WRONLY | os.O_CREAT), 0
            try:
                while written < len(self.unwritten):
                    written += os.pwrite(file, self.unwritten[written:], self.size + written)
            finally:
                os.close(file)  # NFS may report only here that the disk is full
            self.size += written
            self.unwritten = b""
            self.is_failing = False
        except OSError as e:
            self.why = e.strerror or str(e)
            if not self.is_failing:
                log(f"warning: cannot write {self.path} ({self.why}). Training continues; the lines"
                    " are kept and written later")
            self.is_failing = True

    def write_record(self, record: dict[str, Any]) -> None:
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

    def write_step(self, record: dict[str, Any]) -> None:
        """Write the record of a step, and log it unless another step was logged just before."""
        self.write_record(record)
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
            speed = f"{record['tokens_per_second_per_gpu']:6,.0f} tok/s/{self.unit}"
            if self.compiles and step == self.first[0]:
                speed = "(compiling)".rjust(len(speed))
            log("step {step_text} | loss {loss:7.4f}{metrics} | lr {learning_rate:.1e} | grad_norm"
                " {grad_norm:6.3f} | {speed} | {peak_memory_gib:5.2f} GiB{eta}".format(
                    step_text=describe_step(step, max_steps), metrics=describe_metrics(record),
                    speed=speed, eta=eta, **record))

    def close(self) -> None:
        self.write()
        if n_lost := self.unwritten.count(b"\n"):
            log(f"warning: the last {n_lost} lines of {self.path} are lost: {self.why}")
        for close in (self.bar and self.bar.close, self.close_tracker):
            with contextlib.suppress(Exception):
                if close:
                    close()


def unit_of(device: torch.device) -> str:
    """Return what speeds are per: "GPU", or "process" where there is none."""
    return "GPU" if device.type == "cuda" else "process"


def compiles_kernels(device: torch.device) -> bool:
    """Return True if the first step compiles kernels, which takes a while."""
    return device.type == "cuda" and not why_no_triton()


def describe_time(seconds: float) -> str:
    """Return minutes and seconds, 2:03, or hours, minutes and seconds, 1:02:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe_step(step: int, max_steps: int | None) -> str:
    """Return 'step/steps', padded to a fixed width: " 15/300", as wide as "300/300"."""
    return f"{step:{len(str(max_steps))}d}/{max_steps}"


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


def log_evaluation(step: int, max_steps: int | None, metrics: dict[str, float],
                   samples: list[dict[str, str]], is_best: bool) -> None:
    """Print the loss of an evaluation, and its sample answers."""
    best = " | best so far" if is_best else ""
    log(f"eval {describe_step(step, max_steps)} | loss {metrics['eval_loss']:7.4f}"
        f"{describe_metrics(metrics, 'eval_')}{best}")
    for sample in samples:
        log_sample(sample)


def log_sample(sample: dict[str, str]) -> None:
    """Print one of generate_samples()."""
    log(f"sample: prompt   {ending(sample['prompt'], 150)!r}")
    log(f"sample: answer   {beginning(sample['answer'], 300)!r}")
    log(f"sample: expected {beginning(sample['expected'], 300)!r}")


def beginning(text: str, n: int) -> str:
    """Return a text's first n characters, with a mark if more follow."""
    return text if len(text) <= n else f"{text[:n]} [..]"


def ending(text: str, n: int) -> str:
    """Return a text's last n characters, with a mark if more precede them."""
    return text if len(text) <= n else f"[..] {text[-n:]}"


def log_speed(run: Run, records: list[dict[str, Any]]) -> None:
    """Print the answer of --random_weights, if there are records of steps: speed, FLOP/s and
    memory."""
    if not records:
        return
    arch, plan, layers = run.model.arch, run.plan, run.model.layers
    rates = sorted(r["tokens_per_second_per_gpu"] for r in records[2:] or records[-1:])
    rate, peak = rates[len(rates) // 2], records[-1]["peak_memory_gib"]
    # per weight and token: 2 operations in forward, 2 in backward, 2 more if recomputed
    weights = sum(LayerCosts(layer.spec).active_weights() for layer in layers)
    weights += arch.vocab_size * arch.hidden_size
    recomputed_weights = sum(
        LayerCosts(layer.spec).recomputed_weights(layer.save_policy) for layer in layers)
    tflops = rate * (4 * weights + 2 * recomputed_weights) / 1e12
    unit = unit_of(run.device)
    log(f"measured: {rate:,.0f} tok/s/{unit}, {tflops:.1f} TFLOP/s, peak {peak:.2f} GiB; predicted"
        f" {1 / plan.seconds_per_token:,.0f} tok/s/{unit}")


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
            project="fsdp-qlora", id=f"{path.name}-{json_digest(str(path))[:8]}", name=path.name,
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
        part.unlink(missing_ok=True)  # may be a link, see open_no_follow()
        figure.savefig(part, format="png", dpi=120)
        put_in_place(part, directory / "loss.png")
    except Exception as e:
        log(f"no loss.png: {e}")
