"""Inputs of a micro-batch's loss that depend on all rows of its step or evaluation: KTO's estimate
of the KL divergence, ORPO's number of rows for each token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from fsdp_qlora.data.rows import Rows
from fsdp_qlora.evaluation.document_losses import document_losses
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.model.model import Model


def global_loss_inputs(model: Model, rows: Rows, batches: Iterable[Rows]) -> dict[str, Any]:
    """Return the fields of PreferenceInputs that depend on all of these Rows (a step's or an
    evaluation's), if the loss reads any. `batches` yields the Rows a few at a time. All ranks must
    call this."""
    if rows.loss_spec.is_unpaired:
        return {"kl": estimate_kl(model, batches, len(rows))}
    if rows.loss_spec.trains_prompt:
        n_tokens = int(rows.n_targets()[rows.desirable].sum())
        return {"rows_per_token": torch.tensor(
            len(rows) / n_tokens, dtype=torch.float64, device=model.device)}
    return {}


def with_global_inputs(micro_batch: MicroBatch, inputs: dict[str, Any]) -> MicroBatch:
    """Return the micro-batch whose answers, if it has any, have the result of global_loss_inputs().
    """
    if not micro_batch.preference:
        return micro_batch
    preference = dataclasses.replace(micro_batch.preference, **inputs)
    return dataclasses.replace(micro_batch, preference=preference)


def estimate_kl(model: Model, batches: Iterable[Rows], n_rows: int) -> torch.Tensor | None:
    """Return KTO's estimate of the KL divergence from the reference, fp64 []: the mean log-ratio of
    these rows' prompts with answers of other rows, at least 0. None if the run was asked to stop.
    All ranks must call this."""
    ratios = []
    for other in (batch.mismatched for batch in batches):
        if other:
            assert other.ref_logps is not None, "ensure_ref_logps() has set it"
            logps = -document_losses(model, other)
            ratios.append((logps - other.ref_logps.to(model.device)).sum())
    reshard_all(model)
    return (torch.stack(ratios).sum() / n_rows).clamp(min=0) if ratios else None
