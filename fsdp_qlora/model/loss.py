"""Preference losses (DPO, IPO, SimPO, ORPO, KTO), as functions of the log-probabilities of whole
answers.

The loss of supervised fine-tuning is compute_loss() in the script. Both start from the token losses
of LinearCrossEntropy in lm_head.py, and autograd does the rest. training/reference.py has what a
loss compares with, the model before the first step.

To add a preference loss, write a function like dpo() and its record in LOSSES: --loss takes its
name, and its rows, its reference, its metrics and its evaluation follow from the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_qlora.config import Config
from fsdp_qlora.kernels.micro_batch import Answers, MicroBatch
from fsdp_qlora.ranks import all_gather


# Each returns the loss of each row [rows], and the rewards [rows, answers] that are logged. They
# are as TRL 1.16 has them.


def dpo(answers: Answers, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Direct preference optimization; with --label_smoothing cDPO, for which so many of the pairs
    are labeled the wrong way round."""
    rewards: torch.Tensor = config.beta * (answers.logps - answers.reference)
    margins = rewards[:, 0] - rewards[:, 1]
    wrong = config.label_smoothing
    return -(1 - wrong) * F.logsigmoid(margins) - wrong * F.logsigmoid(-margins), rewards


def ipo(answers: Answers, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Identity preference optimization: the margin per token is to be 1 / (2 beta)."""
    scores = answers.logps - answers.reference
    margins = (scores / answers.n_trainable_tokens).diff(dim=1)[:, 0].neg()
    return (margins - 1 / (2 * config.beta)) ** 2, config.beta * scores


def simpo(answers: Answers, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """SimPO: no reference, log-probabilities per token, and a margin of --simpo_gamma."""
    rewards: torch.Tensor = config.beta * answers.logps
    return -F.logsigmoid(rewards[:, 0] - rewards[:, 1] - config.simpo_gamma), rewards


def orpo(answers: Answers, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """ORPO: the cross-entropy of the chosen documents, prompts included, whose mean is over the
    tokens of the step, and beta times the log of the odds of chosen to rejected."""
    assert answers.logps is not None, "read_answers() has set it"
    logps = answers.logps.clamp(max=-1e-12)  # of a certain answer the odds are infinite
    odds = logps - torch.log(-torch.expm1(logps))
    ratio = F.logsigmoid(odds[:, 0] - odds[:, 1])
    cross_entropy = (answers.prompt_losses[:, 0]
                     - answers.logps[:, 0] * answers.n_trainable_tokens[:, 0])
    # the mean over rows of this is the mean over tokens
    cross_entropy = cross_entropy * answers.rows_per_token
    return cross_entropy - config.beta * ratio, config.beta * logps


def kto(answers: Answers, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """KTO: good answers are to be above the step's estimate of the KL divergence, bad ones below.
    """
    rewards: torch.Tensor = config.beta * (answers.logps - answers.reference)
    above = rewards - config.beta * answers.kl
    losses = torch.where(answers.desirable, config.desirable_weight * above.neg().sigmoid(),
                         config.undesirable_weight * above.sigmoid())
    return losses[:, 0], rewards


@dataclasses.dataclass(frozen=True)
class Loss:
    """One of --loss."""

    function: Callable | None  # as above; None: the mean over the tokens in the loss
    flags: tuple[str, ...] = ("beta",)  # of the flags that are of some losses alone, those it reads
    n_answers: int = 2  # of a row
    has_reference: bool = True  # reads Answers.reference
    per_token: bool = False  # reads mean log-probabilities
    trains_prompt: bool = False  # reads Answers.prompt_losses of chosen answers, rows_per_token

    @property
    def is_unpaired(self) -> bool:
        """Whether a row has one answer, good or bad, whose reward is compared with Answers.kl."""
        return self.function is not None and self.n_answers == 1


LOSSES = {
    "sft": Loss(None, flags=(), n_answers=1, has_reference=False),
    "dpo": Loss(dpo, flags=("beta", "label_smoothing")),
    "ipo": Loss(ipo),
    "simpo": Loss(simpo, flags=("beta", "simpo_gamma"), has_reference=False, per_token=True),
    "orpo": Loss(orpo, has_reference=False, per_token=True, trains_prompt=True),
    "kto": Loss(kto, flags=("beta", "desirable_weight", "undesirable_weight"), n_answers=1)}
# {name in metrics.jsonl, TRL's: the answers that it is the mean over}. preference_loss() sums them
# in this order: of --loss sft the first alone, of pairs all but the last
METRICS = {
    "loss": "all", "rewards/chosen": "good", "rewards/rejected": "bad", "rewards/accuracies": "all",
    "logps/chosen": "good", "logps/rejected": "bad", "kl": "all"}


class DocumentSums(torch.autograd.Function):
    """The sum of the token losses [n] of each document of a micro-batch, fp64 [documents]; where a
    loss also reads prompts, of its answer and of its prompt, see MicroBatch.loss_bounds."""

    @staticmethod
    def forward(ctx: Any, token_losses: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        ctx.batch = batch
        # not index_add_() into documents: on a GPU its order, and so the sum, would vary
        return torch.segment_reduce(token_losses, "sum", offsets=batch.loss_bounds, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad_sums: torch.Tensor) -> tuple[torch.Tensor, None]:
        bounds, n = ctx.batch.loss_bounds, len(ctx.batch.labels)
        numbers = torch.arange(n, device=grad_sums.device)
        sum_of = torch.searchsorted(bounds, numbers, right=True) - 1  # of each token
        # padding is behind the last sum: it takes any gradient, which LinearCrossEntropy ignores
        return grad_sums[sum_of.clamp(max=len(grad_sums) - 1)], None


def sum_documents(token_losses: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
    """See DocumentSums."""
    sums: torch.Tensor = DocumentSums.apply(token_losses, batch)
    return sums


def preference_loss(token_losses: torch.Tensor, batch: MicroBatch,
                    config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of a micro-batch of preference rows, a sum over its rows, and this rank's share of
    the sums that metrics are the means of, see METRICS, from the losses of this rank's tokens. All
    ranks must call this."""
    assert batch.answers, "there are no preference rows"
    # every rank computes all rows of the micro-batch; autograd stops at the documents of others
    kind = LOSSES[config.loss]
    answers = read_answers(batch.answers, sum_documents(token_losses, batch), kind)
    losses, rewards = kind.function(answers, config)
    is_row = batch.answers.n_trainable_tokens[:, 0] > 0
    losses = losses.where(is_row, 0)
    assert answers.logps is not None, "read_answers() has set it"
    rewards, logps = rewards.detach(), answers.logps.detach()
    good, bad = (which & is_row[:, None] for which in (answers.desirable, ~answers.desirable))
    if kind.is_unpaired:
        above = rewards - config.beta * answers.kl
        is_right = torch.where(answers.desirable, above > 0, above < 0)[:, 0]
    else:
        is_right = rewards[:, 0] > rewards[:, 1]
    sums = [losses.detach().sum(), (rewards * good).sum(), (rewards * bad).sum(),
            (is_right & is_row).sum().double(), (logps * good).sum(), (logps * bad).sum()]
    if kind.is_unpaired:
        sums.append(answers.kl * is_row.sum())
    # unlike the sum of token losses, which is of this rank's own, every rank has these of all rows
    return losses.sum(), torch.stack(sums) / dist.get_world_size()


def read_answers(answers: Answers, document_losses: torch.Tensor, kind: Loss) -> Answers:
    """The Answers with their log-probabilities, of the losses of all ranks' documents. All ranks
    must call this."""
    sums = gather_documents(document_losses)
    if kind.trains_prompt:
        sums, prompts = sums.view(-1, 2).unbind(1)
        answers = dataclasses.replace(answers, prompt_losses=prompts[answers.documents])
    n_trainable_tokens = answers.n_trainable_tokens.clamp(min=1)  # of padding
    logps = -sums[answers.documents]
    if kind.per_token:
        logps = logps / n_trainable_tokens
    return dataclasses.replace(answers, n_trainable_tokens=n_trainable_tokens, logps=logps)


def gather_documents(document_losses: torch.Tensor) -> torch.Tensor:
    """The losses [n] of every rank's documents, [ranks x n]; a gradient reaches this rank's own.
    All ranks must call this."""
    if dist.get_world_size() == 1:
        return document_losses
    parts = [*all_gather(document_losses.detach())]
    parts[dist.get_rank()] = document_losses
    return torch.cat(parts)
