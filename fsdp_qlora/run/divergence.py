"""Detect a diverged run from loss and gradient norm."""

from __future__ import annotations

import math
from collections.abc import Callable

from fsdp_qlora.config import warmup_steps
from fsdp_qlora.exit_codes import EXIT_DIVERGED
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run.run import Progress, Run

PATIENCE = 50  # steps after the warm-up in which the loss must fall below the first step's loss
MAX_ADAPTER_WEIGHT = 1000  # if the loss has not, an adapter with a larger weight has diverged


def why_diverged(step: int, loss: float, norm: float, n_warmup: int, progress: Progress,
                 largest_weight: Callable[[], float], saturates: bool = False) -> str:
    """Return why the run has diverged, or "". Also records the losses in `progress`.

    `largest_weight` is called only if the rest is suspicious. `saturates`: the loss is a preference
    loss, whose gradient is 0 where rewards are high enough.
    """
    if progress.first_loss is None:
        progress.first_loss = loss
    if step > n_warmup:
        lowest = progress.lowest_loss
        progress.lowest_loss = loss if lowest is None else min(loss, lowest)
    if not math.isfinite(loss + norm):
        return f"loss {loss}, gradient norm {norm}"
    if norm == 0 and not (saturates and largest_weight() <= MAX_ADAPTER_WEIGHT):
        return f"loss {loss:.4f}, but a gradient norm of exactly 0"
    if step > n_warmup + PATIENCE and progress.lowest_loss > progress.first_loss:
        largest = largest_weight()
        if largest > MAX_ADAPTER_WEIGHT:
            return (f"since the warm-up the loss has not been below the first step's"
                    f" {progress.first_loss:.4f}, and the adapter has weights of {largest:.0f}")
    return ""


def stop_if_diverged(run: Run, step: int, loss: float, norm: float) -> None:
    """Raise RunEnd if the run has diverged, before the update. All ranks must call this."""
    why = why_diverged(step, loss, norm, warmup_steps(run.config), run.progress,
                       run.adapter.largest_weight, saturates=run.config.loss != "sft")
    if not why:
        return
    advice = "the run has diverged, and this step is not saved. Try a lower --learning_rate"
    if run.status.checkpoint:
        advice += f"; with it, {run.status.how_to_resume} from {run.status.checkpoint}"
    if step == 1:
        advice = "nothing was trained yet. Try --compute_dtype float32, or is the model damaged?"
    raise RunEnd(f"step {step}: {why}; {advice}", EXIT_DIVERGED)
