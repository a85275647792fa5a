"""MicroBatch: what one GPU computes at once, as tensors. data/collate.py makes them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from fsdp_qlora.micro_batch.context_parallel import ContextGroup, ContextShard


class MicroBatchFormat(NamedTuple):
    """What is the same for all micro-batches of a run."""

    max_tokens: int  # of a micro-batch, on one rank
    device: torch.device
    # ONLY_PROCESS: every rank makes the first micro-batch of a micro-step, whole
    context_group: ContextGroup
    uses_cuda_graphs: bool = False  # True: sizes are rounded up, so that there are few graphs
    has_recurrence: bool = False  # True: the model has a mixer with a state


@dataclasses.dataclass(frozen=True, eq=False)
class MicroBatch:
    """One packed micro-batch of one rank: documents of Rows laid end to end. Padding consists of
    extra documents, none longer than the longest real one.

    With context parallelism the ranks of a group share it: cu_seqlens, lengths and max_seqlen are
    of all its documents, `preference` is of all ranks, and everything else is of this rank's own
    tokens.
    """

    input_ids: torch.Tensor  # int64 [tokens]
    n_unpadded: torch.Tensor  # int64 [1], number of tokens from rows; the rest is padding
    position_ids: torch.Tensor  # int64 [tokens], 0 at the first token of each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], where documents begin and end
    targets: torch.Tensor  # int64 [n], tokens whose loss is computed, padded with IGNORE_INDEX
    target_positions: torch.Tensor  # int64 [n], the token before each of `targets`, padded with 0
    # int64 [sums + 1]: where in `targets` the tokens of each document begin and end. If the loss
    # also reads prompts: first the tokens of its answer, then the tokens of its prompt. All ranks
    # have the same number of sums
    loss_bounds: torch.Tensor
    dropout_seeds: torch.Tensor | None  # int64 [tokens], see drop(); None: no dropout
    preference: PreferenceInputs | None  # answers of all ranks in this micro-step; None: --loss sft
    lengths: tuple[int, ...]  # lengths of the documents, in tokens
    max_seqlen: int  # upper bound of `lengths`
    is_varlen: bool  # True: Kernels.varlen compute its attention; False: Kernels.fixed_len do
    recurrence_chunks: torch.Tensor | None = None  # see chunk_table(); None: no recurrence
    context_shard: ContextShard | None = None  # this rank's part; None: it has all


@dataclasses.dataclass
class PreferenceInputs:
    """Inputs of a preference loss: all rows of a micro-step, which may be spread over ranks. A row
    has two answers, the better one first, or one."""

    documents: torch.Tensor  # int64 [rows, answers], index among the documents of all ranks
    n_loss_tokens: torch.Tensor  # fp64 [rows, answers], targets of the answer; 0: padding
    ref_logps: torch.Tensor  # fp64 [rows, answers], `logps` before the first step, see Rows
    desirable: torch.Tensor  # bool [rows, answers]: is it a good answer?
    # the next two: fp64 [], of the whole step or evaluation, see global_loss_inputs()
    kl: torch.Tensor | None = None  # KTO's estimate of the KL divergence
    rows_per_token: torch.Tensor | None = None  # ORPO: rows / all tokens of chosen documents
    # fp64 [rows, answers]: log-probability of each answer, the sum over its tokens or, if the loss
    # is `per_token`, the mean
    logps: torch.Tensor | None = None
    prompt_losses: torch.Tensor | None = None  # fp64 [rows, answers]: sums of token losses
