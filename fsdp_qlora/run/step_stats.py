"""Step statistics, reduced over all ranks, and the metrics that follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_qlora.data.rows import Rows
from fsdp_qlora.layer.router import BALANCE_METRICS, take_balance
from fsdp_qlora.lora.adapter import Adapter
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.preference_loss import METRICS
from fsdp_qlora.ranks import all_gather


class StepStats(NamedTuple):
    """Statistics of a step that all ranks know at its end, in fp64."""

    grad_norm: torch.Tensor  # [], of the whole gradient, before it is clipped
    action: torch.Tensor  # [], the maximum of all ranks' pending_action()
    sums: torch.Tensor  # [k], over all ranks, see compute_loss()
    # [2], how evenly experts are used, see BALANCE_METRICS; [0] without experts
    balance: torch.Tensor

    def on_host(self) -> StepStats:
        """Copy all fields to the CPU, by one copy."""
        values = torch.cat([number.view(-1) for number in self]).cpu()
        parts = values.split([number.numel() for number in self])
        return StepStats(*(part.view_as(number) for part, number in zip(parts, self)))


def gather_step_stats(model: Model, adapter: Adapter, local_sums: torch.Tensor,
                      action: int) -> StepStats:
    """Return the StepStats, from this rank's sums and action, by one exchange and without waiting
    for the GPU. All ranks must call this."""
    # for this rank's part of the gradient; the rows of --trainable_tokens count on one rank
    n_own = len(adapter.grad) - (adapter.n_token_row_weights if adapter.shard_rank else 0)
    square = adapter.grad[:n_own].norm().double() ** 2
    local = (square[None], torch.full_like(local_sums[:1], action), local_sums,
             take_balance(model.layers, model.device))
    squares, actions, sums, balance = all_gather(torch.cat(local)).split([*map(len, local)], 1)
    norm = squares[: adapter.shard_group_size].sum().sqrt()  # other copies have the same gradients
    # the last number of take_balance() counts what the others add up
    balance_sums, n_summed = balance.sum(0).tensor_split([len(BALANCE_METRICS)])
    return StepStats(norm, actions.max(), sums.sum(0), balance_sums / n_summed)


def mean_metrics(sums: Sequence[float], rows: Rows, prefix: str = "") -> dict[str, float]:
    """Return {name of a metric: its mean}, from the sums of compute_loss() over all of these Rows.
    With KTO, the means over good or over bad answers are left out if there are none."""
    n_desirable = int(rows.desirable.sum())
    counts = {"all": rows.loss_divisor, "chosen": n_desirable,
              "rejected": len(rows.desirable) - n_desirable}
    means = {prefix + name: total / counts[answers]
             for (name, answers), total in zip(METRICS.items(), sums) if counts[answers]}
    chosen, rejected = (means.get(f"{prefix}rewards/{answer}") for answer in ("chosen", "rejected"))
    if chosen is not None and rejected is not None:
        means[f"{prefix}rewards/margins"] = chosen - rejected
    if rows.loss == "sft" and prefix:
        means[f"{prefix}perplexity"] = math.exp(min(means[f"{prefix}loss"], 700))
    return means
