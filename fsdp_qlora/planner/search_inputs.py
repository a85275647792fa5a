"""SearchInputs: flags, model, workload, limits, machine and kernels, for which a plan is sought.

make_workload() makes the Workload, why_no_capture() one of the KernelFacts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.data.sampling import RowSampler
from fsdp_qlora.kernels.recurrence import recurrent_mixer_spec
from fsdp_qlora.layer.spec import LayerSpec
from fsdp_qlora.micro_batch.context_parallel import has_long_pieces
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.machine import Machine
from fsdp_qlora.planner.predict_memory import predict_memory
from fsdp_qlora.planner.predict_time import predict_time
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import Mamba2Spec


@dataclasses.dataclass(frozen=True)
class Workload:
    """The work of a run that the plan depends on."""

    max_step_tokens: int  # of the first 200 steps, over all processes
    max_document_tokens: int  # of the longest document
    max_row_tokens: int  # of the longest row, with both answers of a pair
    mean_document_tokens: float  # of the document that a token is in: what attention works on
    uneven_lengths: bool  # True if the documents that are trained differ in length
    world_size: int
    uneven_targets: bool = False  # True if they differ in the number of their tokens in the loss
    min_document_tokens: int = 0  # of the shortest document that is trained

    def is_varlen(self, context_parallel_size: int) -> bool:
        """Return Plan.is_varlen. make_micro_batch() decides for each micro-batch, by its own
        documents and padding."""
        if context_parallel_size == 1:
            return self.uneven_lengths
        return not has_long_pieces(self.min_document_tokens, context_parallel_size)

    def min_micro_batch_tokens(self, context_parallel_size: int) -> int:
        """Return the fewest tokens that a rank's micro-batch must fit, if so many ranks share a
        micro-batch. A pair may be split between micro-batches, but not if there is only one."""
        n = (self.max_row_tokens if context_parallel_size == self.world_size
             else self.max_document_tokens)
        return math.ceil(n / context_parallel_size)

    def step_seconds(self, plan: Plan) -> float:
        """Return the predicted seconds of a step, as if all its micro-batches had
        plan.micro_batch_tokens."""
        n_tokens = plan.micro_batch_tokens
        n_micro_steps = math.ceil(self.max_step_tokens / (self.world_size * n_tokens))
        return n_micro_steps * n_tokens * plan.seconds_per_token


class KernelFacts(NamedTuple):
    """What the plan depends on of a run's kernels of token mixers."""

    attention_is_eager: bool = False  # see Plan
    recurrence_is_eager: bool = False
    why_no_capture: str = ""  # why CUDA graphs cannot capture a layer; "" if they can
    can_reuse_attention_results: bool = False  # see can_reuse_attention_results()


@dataclasses.dataclass(frozen=True)
class SearchInputs:
    """The inputs of the search: flags, model, workload, limits, machine, kernels."""

    config: Config
    arch: Architecture
    specs: tuple[LayerSpec, ...]
    workload: Workload
    memory_limit: int  # bytes per GPU; 0: no limit, or on a CPU the memory of the host
    machine: Machine
    device: torch.device
    kernel_facts: KernelFacts = KernelFacts()
    optimizer_bytes_per_weight: float = 0.0  # see Plan

    @property
    def only_host_limits(self) -> bool:
        """True if host memory is the only limit."""
        return self.device.type == "cpu" and not self.memory_limit

    @property
    def usable_bytes(self) -> float:
        """Bytes that a plan may need of the memory that it computes in; 0: any number."""
        return self.machine.free_host_bytes if self.only_host_limits else self.memory_limit

    def with_memory(self, plan: Plan) -> Plan:
        return predict_memory(plan, self.arch, self.specs)

    def with_time(self, plan: Plan) -> Plan:
        return predict_time(
            plan, self.arch, self.specs, self.machine, self.workload.mean_document_tokens)


def make_workload(
    config: Config, sampler: RowSampler, eval_rows: Rows | None, world_size: int
) -> Workload:
    """Return the Workload of a run on the rows of this sampler."""
    rows = sampler.rows
    longest, longest_row = (max(map(count, filter(None, (rows, eval_rows))))
                            for count in (longest_document, longest_of_rows))
    uneven_lengths, uneven_targets = (
        bool((numbers != numbers[0]).any()) for numbers in (rows.lengths, rows.n_targets()))
    steps = range(1, min(config.max_steps or 200, 200) + 1)
    row_lengths = rows.row_lengths()
    tokens = max(int(row_lengths[sampler.indices(s)].sum()) for s in steps)
    lengths = rows.lengths.double()
    return Workload(
        max_step_tokens=tokens, max_document_tokens=longest, max_row_tokens=longest_row,
        min_document_tokens=int(rows.lengths.min()),
        mean_document_tokens=float(lengths.square().sum() / lengths.sum()),
        uneven_lengths=uneven_lengths, uneven_targets=uneven_targets, world_size=world_size)


def longest_document(rows: Rows) -> int:
    """Return the tokens of the longest document of these Rows, mismatched answers included."""
    longest = int(rows.lengths.max())
    return max(longest, longest_document(rows.mismatched)) if rows.mismatched else longest


def longest_of_rows(rows: Rows) -> int:
    """Return the tokens of the longest of these Rows, with both answers of a pair."""
    return max(longest_document(rows), int(rows.row_lengths().max()))


def why_no_capture(
    arch: Architecture, machine: Machine, attention_is_eager: bool = False,
    recurrence_is_eager: bool = False,
) -> str:
    """Return why CUDA graphs cannot capture a layer, or ""."""
    if attention_is_eager:
        return "attention runs in plain torch"
    if recurrence_is_eager:
        return "the recurrence runs in plain torch"
    if isinstance(recurrent_mixer_spec(arch), Mamba2Spec):
        return "flash-linear-attention waits for the GPU in Mamba-2"
    return machine.why_no_grouped_mm if arch.moe else ""
