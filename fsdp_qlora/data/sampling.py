"""Choose the rows of each optimizer step. packing.py then distributes them over micro-batches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol

import torch

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows


class RowSampler(Protocol):
    """Which rows a step draws, for the training loop, the planner and DPO's reference. To draw
    rows another way, write a class like ShuffledSampler, and name it in finetune() of
    train_fsdp_qlora.py and, for --plan_for, in plan_elsewhere() of run/plan_for.py."""

    rows: Rows  # all of them

    def indices(self, step: int) -> torch.Tensor:
        """Return the rows of an optimizer step (the first is 1), int64, the same on all ranks."""


@dataclasses.dataclass
class ShuffledSampler:
    """--batch_size rows for each step; every epoch is a new shuffle."""

    rows: Rows
    config: Config

    def indices(self, step: int) -> torch.Tensor:
        return step_indices(step, len(self.rows), self.config)


def step_indices(step: int, n_rows: int, config: Config) -> torch.Tensor:
    """Return the indices of the rows of an optimizer step (the first is 1). Every epoch is a new
    shuffle."""
    drawn = range((step - 1) * config.batch_size, step * config.batch_size)
    return torch.stack([epoch_order(i // n_rows, n_rows, config.seed)[i % n_rows] for i in drawn])


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch: int, n_rows: int, seed: int) -> torch.Tensor:
    """Return the shuffled indices of one epoch's rows."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
