"""Preference losses (DPO, IPO, SimPO, ORPO, KTO), as functions of the log-probabilities of whole
answers.

The loss of supervised fine-tuning is compute_loss() in the script. Both start from the token losses
of LinearCrossEntropy in lm_head.py, and autograd does the rest. evaluation/ref_logps.py has what a
loss compares with, the model before the first step.

To add a preference loss, write a function like dpo() and its LossSpec in LOSSES: --loss takes its
name, and its rows, its reference, its metrics and its evaluation follow from the LossSpec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_qlora.config import Config
from fsdp_qlora.micro_batch.micro_batch import MicroBatch, PreferenceInputs
from fsdp_qlora.ranks import all_gather


# Each function returns the loss of each row [rows], and the rewards [rows, answers] that are
# logged, both as in TRL 1.16.


def dpo(preference: PreferenceInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct preference optimization; with --label_smoothing it is cDPO, which assumes that this
    fraction of the pairs has swapped labels."""
    rewards: torch.Tensor = config.beta * (preference.logps - preference.ref_logps)
    margins = rewards[:, 0] - rewards[:, 1]
    wrong = config.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), rewards


def ipo(preference: PreferenceInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Identity preference optimization: the target of the margin per token is 1 / (2 beta)."""
    scores = preference.logps - preference.ref_logps
    margins = (scores / preference.n_loss_tokens).diff(dim=1)[:, 0].neg()
    return (margins - 1 / (2 * config.beta)) ** 2, config.beta * scores


def simpo(preference: PreferenceInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """SimPO: no reference, log-probabilities per token, and a margin of --simpo_gamma."""
    rewards: torch.Tensor = config.beta * preference.logps
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - config.simpo_gamma), rewards


def orpo(preference: PreferenceInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """ORPO: the cross-entropy of the chosen documents, prompts included, averaged over the tokens
    of the step, minus beta times the log-sigmoid of the log odds ratio of chosen to rejected."""
    assert preference.logps is not None, "with_logps() has set it"
    logps = preference.logps.clamp(max=-1e-12)  # the odds of a certain answer would be infinite
    odds = logps - torch.log(-torch.expm1(logps))
    ratio = F.logsigmoid(odds[:, 0] - odds[:, 1])
    cross_entropy = (preference.prompt_losses[:, 0]
                     - preference.logps[:, 0] * preference.n_loss_tokens[:, 0])
    # the mean of this over rows is the mean over tokens
    cross_entropy = cross_entropy * preference.rows_per_token
    return cross_entropy - config.beta * ratio, config.beta * logps


def kto(preference: PreferenceInputs, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """KTO: the rewards of good answers should be above the step's estimate of the KL divergence,
    those of bad answers below it."""
    rewards: torch.Tensor = config.beta * (preference.logps - preference.ref_logps)
    above = rewards - config.beta * preference.kl
    losses = torch.where(preference.desirable, config.desirable_weight * above.neg().sigmoid(),
                         config.undesirable_weight * above.sigmoid())
    return losses[:, 0], rewards


@dataclasses.dataclass(frozen=True)
class LossSpec:
    """What one --loss reads and computes."""

    function: Callable | None  # one of the above; None: the mean over the tokens in the loss
    flags: tuple[str, ...] = ("beta",)  # the loss-specific flags that it reads
    documents_per_row: int = 2  # 2: a pair of answers
    has_reference: bool = True  # reads PreferenceInputs.ref_logps
    per_token: bool = False  # reads mean log-probabilities
    # reads PreferenceInputs.prompt_losses of chosen answers, rows_per_token
    trains_prompt: bool = False

    @property
    def is_unpaired(self) -> bool:
        """True if a row has one answer, good or bad, whose reward is compared with
        PreferenceInputs.kl."""
        return self.function is not None and self.documents_per_row == 1


LOSSES = {
    "sft": LossSpec(None, flags=(), documents_per_row=1, has_reference=False),
    "dpo": LossSpec(dpo, flags=("beta", "label_smoothing")),
    "ipo": LossSpec(ipo),
    "simpo": LossSpec(simpo, flags=("beta", "simpo_gamma"), has_reference=False, per_token=True),
    "orpo": LossSpec(orpo, has_reference=False, per_token=True, trains_prompt=True),
    "kto": LossSpec(kto, flags=("beta", "desirable_weight", "undesirable_weight"),
                    documents_per_row=1)}
# {name in metrics.jsonl, which is TRL's: the answers that it averages over}. The sums have this
# order: --loss sft has the first only, pairs have all but the last. mean_metrics()
# divides them, in run/step_stats.py
METRICS = {
    "loss": "all", "rewards/chosen": "chosen", "rewards/rejected": "rejected",
    "rewards/accuracies": "all", "logps/chosen": "chosen", "logps/rejected": "rejected",
    "kl": "all"}


class DocumentSums(torch.autograd.Function):
    """Sums the token losses [n] of each document of a micro-batch: fp64 [documents]. If a loss also
    reads prompts, there are two sums per document, of its answer and of its prompt, see
    MicroBatch.loss_bounds."""

    @staticmethod
    def forward(ctx: Any, token_losses: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        ctx.batch = batch
        # not index_add_() into documents: on a GPU its order would vary, and so would the sum
        return torch.segment_reduce(token_losses, "sum", offsets=batch.loss_bounds, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad_sums: torch.Tensor) -> tuple[torch.Tensor, None]:
        bounds = ctx.batch.loss_bounds
        n = len(ctx.batch.targets)
        numbers = torch.arange(n, device=grad_sums.device)
        sum_of = torch.searchsorted(bounds, numbers, right=True) - 1  # each token's sum
        # padding is after the last sum: its gradient does not matter, LinearCrossEntropy ignores it
        return grad_sums[sum_of.clamp(max=len(grad_sums) - 1)], None


def sum_documents(token_losses: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """Return the sums of each document's token losses, see DocumentSums."""
    return DocumentSums.apply(token_losses, batch)


def preference_loss(token_losses: torch.Tensor, batch: MicroBatch, config: Config,
                    context_parallel_size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch of preference rows, summed over its rows, and this rank's
    share of the sums from which the mean metrics are computed, see METRICS. `token_losses` are
    those of this rank's tokens. All ranks must call this."""
    assert batch.preference, "there are no preference rows"
    # every rank computes all rows of the micro-batch; autograd stops at the documents of others
    loss_spec = LOSSES[config.loss]
    document_losses = all_gather_document_losses(
        sum_documents(token_losses, batch), context_parallel_size)
    preference = with_logps(batch.preference, document_losses, loss_spec)
    losses, rewards = loss_spec.function(preference, config)
    is_row = batch.preference.n_loss_tokens[:, 0] > 0  # else padding
    losses = losses.where(is_row, 0)
    assert preference.logps is not None, "with_logps() has set it"
    rewards, logps = rewards.detach(), preference.logps.detach()
    chosen, rejected = (which & is_row[:, None]
                        for which in (preference.desirable, ~preference.desirable))
    if loss_spec.is_unpaired:
        above = rewards - config.beta * preference.kl
        is_right = torch.where(preference.desirable, above > 0, above < 0)[:, 0]
    else:
        is_right = rewards[:, 0] > rewards[:, 1]
    sums = [losses.detach().sum(), (rewards * chosen).sum(), (rewards * rejected).sum(),
            (is_right & is_row).sum().double(), (logps * chosen).sum(), (logps * rejected).sum()]
    if loss_spec.is_unpaired:
        sums.append(preference.kl * is_row.sum())
    # divided, because every rank has these sums over all rows, not over its own only
    return losses.sum(), torch.stack(sums) / dist.get_world_size()


def with_logps(
    preference: PreferenceInputs, sums: torch.Tensor, loss_spec: LossSpec
) -> PreferenceInputs:
    """Return the PreferenceInputs with the log-probabilities of all ranks' documents, from the
    losses that all_gather_document_losses() returned."""
    if loss_spec.trains_prompt:
        sums, prompts = sums.view(-1, 2).unbind(1)
        preference = dataclasses.replace(preference, prompt_losses=prompts[preference.documents])
    n_loss_tokens = preference.n_loss_tokens.clamp(min=1)  # 0 in padding
    logps = -sums[preference.documents]
    if loss_spec.per_token:
        logps = logps / n_loss_tokens
    return dataclasses.replace(preference, n_loss_tokens=n_loss_tokens, logps=logps)


def all_gather_document_losses(
    document_losses: torch.Tensor, context_parallel_size: int
) -> torch.Tensor:
    """Return the sums of DocumentSums [n] of every rank, [ranks x n]; with context parallelism
    added up over each group's ranks, [groups x n]. Only this rank's own tokens have a gradient. All
    ranks must call this."""
    if dist.get_world_size() == 1:
        return document_losses
    parts = [*all_gather(document_losses.detach())]
    parts[dist.get_rank()] = document_losses
    return torch.stack(parts).unflatten(0, (-1, context_parallel_size)).sum(1).flatten()
