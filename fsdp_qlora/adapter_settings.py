"""AdapterSettings: rank, alpha, type and dropout of a run's adapter."""

from __future__ import annotations

import math
from typing import NamedTuple


class AdapterSettings(NamedTuple):
    """The flags of a run's adapter that determine the meaning of its weights, and its dropout."""

    rank: int
    alpha: int
    adapter_type: str  # a value of --adapter: "lora", "rslora" or "dora"
    dropout: float = 0.0  # probability, for the adapters' inputs

    @property
    def scaling(self) -> float:
        """Factor of B @ A."""
        return self.alpha / (math.sqrt(self.rank) if self.is_rslora else self.rank)

    @property
    def is_rslora(self) -> bool:
        return self.adapter_type == "rslora"

    @property
    def is_dora(self) -> bool:
        return self.adapter_type == "dora"
