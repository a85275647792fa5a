"""Logits as a model of its family scales and caps them."""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_logits(logits: Tensor, multiplier: float, cap: float | None) -> Tensor:
    """Return the model's logits, fp32: scaled and, if `cap` is not None, capped."""
    logits = logits.float() * multiplier
    return logits if cap is None else cap * torch.tanh(logits / cap)
