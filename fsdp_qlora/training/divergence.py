"""Whether a run learns nothing any more: each step's loss and gradient norm tell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

PATIENCE = 50  # steps after the warm-up in which the loss has to come below the first step's
LARGEST_WEIGHT = 1000  # of an adapter that learns; of one whose loss did not come below: diverged


def why_diverged(step: int, loss: float, norm: float, warmup_steps: float, progress: dict[str, Any],
                 largest_weight: Callable[[], float], saturates: bool = False) -> str:
    """Why the run learns nothing any more, or "". Also notes the losses in `progress`.

    `largest_weight` is a function, which is called only where the rest makes it suspicious.
    `saturates`: the loss is one of preferences, whose gradient is 0 where rewards are high enough.
    """
    if progress["first_loss"] is None:
        progress["first_loss"] = loss
    if step > warmup_steps:
        lowest = progress["lowest_loss"]
        progress["lowest_loss"] = loss if lowest is None else min(loss, lowest)
    if not math.isfinite(loss + norm):
        return f"loss {loss}, gradient norm {norm}"
    if norm == 0 and not (saturates and largest_weight() <= LARGEST_WEIGHT):
        return f"loss {loss:.4f}, but a gradient norm of exactly 0: nothing is learned any more"
    if step > warmup_steps + PATIENCE and progress["lowest_loss"] > progress["first_loss"]:
        largest = largest_weight()
        if largest > LARGEST_WEIGHT:
            return (f"since the warm-up the loss has not been below the first step's"
                    f" {progress['first_loss']:.4f}, and the adapter has weights of {largest:.0f}")
    return ""
