"""MicroBatch: what one GPU computes at once, as tensors. data/packing.py makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fsdp_qlora.kernels.offload import DeviceActivations, OffloadedActivations


@dataclasses.dataclass
class MicroBatch:
    """One packed micro-batch of one rank: documents of Rows laid end to end. Padding is added as
    extra documents, none longer than the longest real one."""

    input_ids: torch.Tensor  # int64 [tokens]
    n_unpadded: torch.Tensor  # int64 [1], the first so many are of rows, the others padding
    position_ids: torch.Tensor  # int64 [tokens], 0 at the first token of each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], where they begin and end
    trained_at: torch.Tensor  # int64 [n], tokens whose next token is trained, padded with 0
    labels: torch.Tensor  # int64 [n], these next tokens, padded with IGNORE
    # int64 [sums + 1]: where in `labels` the tokens of each document begin and end; of a loss that
    # also reads prompts those of its answer, then those of its prompt. All ranks have as many
    loss_bounds: torch.Tensor
    dropout_keys: torch.Tensor | None  # int64 [tokens], see drop(); None: no dropout
    answers: Answers | None  # of all ranks in this micro-step; None: --loss sft
    lengths: tuple[int, ...]  # of the documents, in tokens
    longest: int  # upper bound of `lengths`
    # {one of ATTENTION_TYPES: the attention to use; "recurrence": of a mixer with a state}
    kernels: dict[str, Callable]
    store: DeviceActivations | OffloadedActivations  # where layers put what they save
    ropes: dict | None = None  # cos and sin, see rope_tables
    layer_inputs: torch.Tensor | None = None  # of all layers, see per_layer_inputs()
    # {window, None: without: what queries see}, of flex_document_attention() alone
    masks: dict[int | None, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)
    chunks: torch.Tensor | None = None  # see chunk_table(); None: no mixer has a state


@dataclasses.dataclass
class Answers:
    """Inputs of a preference loss: all rows of a micro-step, which may be spread over ranks. A row
    has two answers, the better one first, or one."""

    documents: torch.Tensor  # int64 [rows, answers], their numbers among the sums of all ranks
    n_trainable_tokens: torch.Tensor  # fp64 [rows, answers], trained tokens; 0: the row is padding
    reference: torch.Tensor  # fp64 [rows, answers], `logps` before the first step, see Rows
    desirable: torch.Tensor  # bool [rows, answers]: is it a good answer?
    # fp64 [], each of the whole step or evaluation, see values_of_all() in reference:
    kl: torch.Tensor | None = None  # KTO's estimate of the KL divergence
    rows_per_token: torch.Tensor | None = None  # ORPO's: rows / all tokens of chosen documents
    # fp64 [rows, answers]: log-probability of each answer, the sum over its tokens or, where a
    # loss is `per_token`, their mean
    logps: torch.Tensor | None = None
    prompt_losses: torch.Tensor | None = None  # fp64 [rows, answers]: sums of token losses
