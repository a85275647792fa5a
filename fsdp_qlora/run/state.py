"""Run: everything a training step needs, and mutable progress."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Literal

import torch
from bitsandbytes.optim import PagedAdamW8bit
from peft import LoraConfig
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.packing import RowSource
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.lora.adapter import Adapter
from fsdp_qlora.model.graphs import Graphs
from fsdp_qlora.model.model import Model
from fsdp_qlora.plan import Plan
from fsdp_qlora.run.merge_check import MergeCheck
from fsdp_qlora.run.status import Status


@dataclasses.dataclass
class Progress:
    """How far a run has come. It is saved in checkpoints."""

    evaluated: int | None = None  # the step after which it was evaluated last
    best_loss: float | None = None  # the lowest of evaluations
    best_step: int | None = None
    first_loss: float | None = None  # of training
    lowest_loss: float | None = None
    init_adapter: str | None = None  # digest of --init_adapter's file, for DPO's reference


@dataclasses.dataclass
class Run:
    """What finetune() has built and what the steps change."""

    config: Config
    plan: Plan  # what is sharded, recomputed, offloaded
    status: Status  # signals, deadlines, status.json
    directory: Path
    device: torch.device
    source: RowSource  # of the rows of a step
    eval_rows: Rows | None  # to evaluate on
    tokenizer: PreTrainedTokenizerFast | None  # None: there is no text
    digests: dict[str, str | None]  # of rows and base model, for checkpoints
    lora_config: LoraConfig
    model: Model
    adapter: Adapter
    optimizer: PagedAdamW8bit
    merge_check: MergeCheck
    graphs: Graphs | Literal[False]
    # all below changes
    progress: Progress = dataclasses.field(default_factory=Progress)
    saved_step: int = 0  # of the newest checkpoint
    save_due: float = math.inf  # by the clock
    step_start: float = 0.0  # by the clock
    # the next step's rows and micro-batches
    prefetched: tuple[Rows, list[MicroBatch]] | None = None

    @property
    def rows(self) -> Rows:
        """All rows to train on."""
        return self.source.rows
