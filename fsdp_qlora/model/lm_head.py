"""Vocabulary-parallel, chunked linear cross-entropy (as Megatron's and Liger's): the logits never
exist as a whole.

To train another loss of a token, change eager_losses(), and logits_statistics(),
logits_gradient() and LinearCrossEntropy.forward(), which are compared with it at every start.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.norms import fused_norm, fused_norm_backward
from fsdp_qlora.layer.lora_matmul import fp32_matmul
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.logits import scaled_logits
from fsdp_qlora.model.parameters import CHUNK_BYTES, ModelParameters


def logits_of_hidden(model: ModelParameters, hidden_states: Tensor) -> Tensor:
    """Return the logits, fp32 [n, tokens of this rank's rows], of normed `hidden_states` [n,
    hidden]."""
    logits = F.linear(hidden_states, model.lm_head, model.lm_head_bias)
    return scaled_logits(logits, model.arch.logits_multiplier, model.arch.logits_softcap)


def greedy_tokens(model: ModelParameters, hidden_states: Tensor) -> Tensor:
    """Return the most probable next token after each of the normed `hidden_states` [n, hidden],
    int64 [n]. All ranks of the shard group must call this, with the same hidden_states."""
    max_logit, best = logits_of_hidden(model, hidden_states).max(-1)
    max_logit, best = model.all_gather(max_logit), model.all_gather(best + model.local_rows.start)
    return best.gather(0, max_logit.argmax(0)[None])[0]


def final_norm(model: ModelParameters, x: Tensor, is_evaluation: bool = False) -> Tensor:
    """Return the final norm of the last layer's outputs x [n, hidden]."""
    out = torch.empty_like(x)
    arch = model.arch
    fused_norm(out, x, model.norm, model.norm_bias, arch.final_norm_kind, arch.norm_eps,
               is_evaluation=is_evaluation, dynamic=not is_evaluation)
    return out


def eager_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the losses [n] that LinearCrossEntropy must equal, in plain PyTorch, for whole logits
    [n, vocabulary] and targets [n]."""
    return F.cross_entropy(logits, targets, reduction="none")


@fused_kernel
def logits_statistics(
    logits: Tensor, targets: Tensor, multiplier: float, cap: float | None
) -> Tensor:
    """Return fp32 [3, n] for logits [n, columns]: the maximum of each row, the sum of exp(logit -
    maximum), and the logit in column `targets`, 0 where that is -1."""
    logits = scaled_logits(logits, multiplier, cap)
    max_logit = logits.amax(-1)
    target_logit = logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    exp_sum = (logits - max_logit[:, None]).exp().sum(-1)
    return torch.stack([max_logit, exp_sum, target_logit * (targets >= 0)])


@fused_kernel
def logits_gradient(
    logits: Tensor, lse: Tensor, targets: Tensor, ignored: Tensor, multiplier: float,
    cap: float | None
) -> Tensor:
    """Return the gradient of the cross-entropies [n, columns]: probabilities, minus 1 at the
    target; 0 for tokens that are `ignored`. lse [n] is over the whole vocabulary.
    """
    capped = scaled_logits(logits, multiplier, cap)
    columns = torch.arange(logits.shape[1], device=logits.device)
    is_target = (columns[None] == targets[:, None]).float()
    gradient = ((capped - lse[:, None]).exp() - is_target) * multiplier
    if cap is not None:
        gradient = gradient * (1 - (capped / cap).square())
    return gradient.masked_fill(ignored[:, None], 0).to(logits.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    """Final norm, lm_head and cross-entropy of the last layer's outputs [tokens, hidden]. Returns
    the cross-entropy of each entry of MicroBatch.targets, fp64 [n], 0 where padded. In fp64,
    because thousands are summed, in an order that depends on the packing: a preference loss is a
    small difference of two such sums, and the loss in the log is the same on any number of GPUs.

    Each rank computes the logits of all ranks' tokens for its own rows of the vocabulary; for the
    softmax the ranks exchange three numbers per token. The lm_head is never gathered, and the full
    logits never exist (2.1 GB in fp32 for 4,096 tokens and a vocabulary of 128k). Because the
    lm_head is frozen, only the gradient of x is needed: forward computes it for a weight of 1, a
    chunk of tokens at a time, and backward multiplies each token's row by the gradient of its loss.
    The rows of --trainable_tokens are not frozen: forward also keeps the gradients of their logits,
    from which backward computes theirs. `lm_head_rows` tells autograd of them; None: all are
    frozen.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: ModelParameters, batch: MicroBatch,
                lm_head_rows: Tensor | None = None) -> Tensor:
        arch = model.arch
        weight = model.lm_head
        n_shards = model.shard_group_size

        def reduce_scatter(whole: Tensor) -> Tensor:
            """Return this rank's tokens of the sum over ranks of [tokens of all ranks, width]."""
            if n_shards == 1:
                return whole
            own = whole.new_empty(len(whole) // n_shards, whole.shape[1])
            dist.reduce_scatter_tensor(own, whole, group=model.shard_group)
            return own

        logits_args = arch.logits_multiplier, arch.logits_softcap
        is_evaluation = not ctx.needs_input_grad[0]
        token_losses = torch.empty(len(batch.targets), dtype=torch.float64, device=x.device)
        grad_x = torch.zeros_like(x)
        all_targets = model.all_gather(batch.targets)  # [n_shards, n], negative where padded
        trained = None if is_evaluation or lm_head_rows is None else model.token_rows
        if trained:  # the gradients of the logits of trained rows
            ctx.grad_logits = x.new_empty(len(batch.targets), len(trained.ids))
        size = max(1, CHUNK_BYTES // (4 * arch.vocab_size))
        for chunk in (slice(i, i + size) for i in range(0, len(batch.targets), size)):
            part = x[batch.target_positions[chunk]]
            logits = F.linear(
                model.all_gather(final_norm(model, part)).flatten(0, 1), weight, model.lm_head_bias)
            targets = all_targets[:, chunk].flatten()
            ignored = targets < 0
            local_targets = targets - model.local_rows.start
            is_own = (local_targets >= 0) & (local_targets < len(weight)) & ~ignored
            local_targets = local_targets.where(is_own, -1)
            statistics = logits_statistics(logits, local_targets, *logits_args, dynamic=True)
            statistics = model.all_gather(statistics)
            # each [n_shards, tokens of all ranks in this chunk]
            max_logit, exp_sum, target_logit = statistics.unbind(1)
            global_max = max_logit.amax(0)
            lse = global_max + ((max_logit - global_max).exp() * exp_sum).sum(0).log()
            losses = (lse - target_logit.sum(0)).masked_fill(ignored, 0)
            token_losses[chunk] = losses.view(n_shards, -1)[model.shard_rank]
            if is_evaluation:
                continue
            grad = logits_gradient(
                logits, lse, local_targets, ignored, *logits_args, dynamic=True)
            if trained:
                whole = grad.new_zeros(len(grad), len(trained.ids))
                whole[:, trained.own] = grad[:, trained.table_rows]
                ctx.grad_logits[chunk] = reduce_scatter(whole)
            grad = reduce_scatter(fp32_matmul(grad, weight))
            grad = fused_norm_backward(part, grad, None, model.norm, arch.final_norm_kind,
                                       arch.norm_eps, dynamic=True)
            grad_x.index_add_(0, batch.target_positions[chunk], grad)  # padding: adds 0 to token 0
        ctx.grad_x, ctx.batch, ctx.model, ctx.chunk_size = grad_x, batch, model, size
        ctx.x = x.detach() if trained else None
        return token_losses

    @staticmethod
    def backward(
            ctx: Any, grad_losses: Tensor) -> tuple[Tensor, None, None, Tensor | None]:
        grad_x, batch, ctx.grad_x = ctx.grad_x, ctx.batch, None
        # padded targets point to token 0 and add 0 to it
        weights = grad_losses.float().masked_fill(batch.targets < 0, 0)
        token_factors = weights.new_zeros(len(grad_x))
        token_factors.index_add_(0, batch.target_positions, weights)
        grad_rows = None if ctx.x is None else lm_head_row_gradient(ctx, weights)
        return grad_x.mul_(token_factors[:, None]), None, None, grad_rows


def lm_head_row_gradient(ctx: Any, weights: Tensor) -> Tensor:
    """Return the gradient of the lm_head's trained rows [tokens, hidden], fp32, over this rank's
    targets with these `weights` [n]. `ctx` is that of LinearCrossEntropy; the lm_head's inputs are
    computed again."""
    total = weights.new_zeros(ctx.grad_logits.shape[1], ctx.x.shape[1])
    for chunk in (slice(i, i + ctx.chunk_size) for i in range(0, len(weights), ctx.chunk_size)):
        hidden = final_norm(ctx.model, ctx.x[ctx.batch.target_positions[chunk]])
        total += (ctx.grad_logits[chunk].float() * weights[chunk, None]).t() @ hidden.float()
    ctx.x = ctx.grad_logits = None
    return total
