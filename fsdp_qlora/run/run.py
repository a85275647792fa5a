"""Job, what a run is to do; Run, everything a training step needs; Progress, saved in checkpoints.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.data.sampling import RowSampler
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.lora.adapter import Adapter
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.cuda_graphs import CUDAGraphs
from fsdp_qlora.model.model import Model
from fsdp_qlora.plan import Plan
from fsdp_qlora.run.base_model import BaseModelInfo
from fsdp_qlora.run.merge_check import MergeCheck
from fsdp_qlora.run.status import Status


@dataclasses.dataclass(frozen=True)
class Job:
    """What a run is to do: all that it needs besides the base model's weights. prepare() makes it.
    """

    config: Config  # the flags, all filled in
    base: BaseModelInfo
    weights_dir: Path  # the directory of the base model's weights, which a dry run may lack
    rows: Rows
    eval_rows: Rows | None  # None: no evaluation
    template_date: str  # the date for chat templates that have one; a resumed run keeps it
    lora_config: LoraConfig
    layer_specs: tuple[LayerSpec, ...]
    # SHA-256 of rows and base model by their keys in train_config.json, see agree_on_digests()
    digests: dict[str, str | None]
    train_config: dict[str, Any]  # train_config.json of the run in the directory; {}: a new run

    @property
    def n_adapter_weights(self) -> int:
        """The adapter's weights, those of the rows of --trainable_tokens included."""
        arch = self.base.arch
        n_token_row_weights = arch.n_token_tables * len(self.base.trainable_ids) * arch.hidden_size
        return n_token_row_weights + sum(
            math.prod(shape) for spec in self.layer_specs
            for _, shape in spec.adapter_slices().values())


@dataclasses.dataclass
class Progress:
    """The progress of a run, saved in checkpoints."""

    evaluated: int | None = None  # step of the last evaluation
    best_loss: float | None = None  # lowest loss of all evaluations
    best_step: int | None = None
    first_loss: float | None = None  # training loss of the first step
    lowest_loss: float | None = None  # lowest training loss after the warm-up
    init_adapter: str | None = None  # digest of --init_adapter's file, for DPO's reference


@dataclasses.dataclass
class Run:
    """Everything that finetune() has built, and the state that the steps change."""

    job: Job
    plan: Plan  # what is sharded, recomputed and offloaded
    status: Status  # signals, deadlines, status.json
    directory: Path
    device: torch.device
    sampler: RowSampler  # chooses the rows of a step
    eval_rows: Rows | None  # those of the job; ensure_ref_logps() adds what DPO needs
    model: Model
    adapter: Adapter
    optimizer: Any  # the Optimizer of the script, which may be another one
    merge_check: MergeCheck
    cuda_graphs: CUDAGraphs | None  # None: CUDA graphs are not used
    # the fields below change during training
    progress: Progress = dataclasses.field(default_factory=Progress)
    saved_step: int = 0  # step of the latest checkpoint
    save_due: float = math.inf  # time.monotonic() of the next timed checkpoint
    step_start: float = 0.0  # time.monotonic() at the start of the step
    # the next step's rows and micro-batches
    prefetched: tuple[Rows, list[MicroBatch]] | None = None

    @property
    def config(self) -> Config:
        """The flags, all filled in."""
        return self.job.config

    @property
    def rows(self) -> Rows:
        """All rows to train on; ensure_ref_logps() adds what DPO needs."""
        return self.sampler.rows
