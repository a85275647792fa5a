"""Frozen MoE router: which experts each token goes to, and the gradient through its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.norms import norm_of, norm_of_backward
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.parameters import LayerParameters
from fsdp_qlora.pretrained.family_specs import MoESpec


# keys in metrics.jsonl, see add_balance()
BALANCE_METRICS = "load_balancing_loss", "busiest_expert_load"


class RoutingChoice(NamedTuple):
    """The decisions of a router that a recomputation must repeat."""

    topk_experts: Tensor  # int16 [n, k], the experts of each token
    bounds: list[int] | None  # see Routing


@dataclasses.dataclass
class Routing:
    """The experts of the tokens of a micro-batch: n tokens, k experts each, n * k rows sorted by
    expert."""

    scores: Tensor  # fp32 [n, experts]
    topk_experts: Tensor  # int64 [n, k], the experts of each token
    topk_weights: Tensor  # fp32 [n, k], factors of these experts' outputs
    routed_tokens: Tensor  # int64 [n * k], the token of each row
    routed_experts: Tensor  # int64 [n * k], the expert of each row
    slots: Tensor  # int64 [n, k], positions of a token's copies among the sorted rows
    routed_weights: Tensor  # fp32 [n * k], the weight of each row
    ends: Tensor  # int32 [experts], where each expert's rows end
    bounds: list[int] | None  # [0, *ends] on the host; None where it is not needed

    @property
    def choice(self) -> RoutingChoice:
        return RoutingChoice(self.topk_experts.to(torch.int16), self.bounds)


def route(
    call: LayerCall, x: Tensor, choice: RoutingChoice | None = None, wants_bounds: bool = False
) -> Routing:
    """Return the Routing of x [n, hidden]. `choice`: the choice of an earlier Routing of the same
    tokens. With wants_bounds this waits for the GPU, unless `choice` has the bounds. With
    ExpertNormsSpec, x is not normed."""
    moe: MoESpec = call.arch.moe
    tensors = call.layer.small_tensors
    if moe.norms:
        x = router_norm(x, tensors[moe.norms.router_scale], call.arch.norm_eps)
    weight = tensors[f"{moe.router}.weight"]
    x_of_router = x.float() if moe.fp32_router else x
    bias = tensors.get(f"{moe.router}.bias")
    bias = None if bias is None else bias.to(x_of_router.dtype)
    logits = F.linear(x_of_router, weight.to(x_of_router.dtype), bias).float()
    scores = logits.sigmoid() if moe.score_func == "sigmoid" else logits.softmax(-1)
    if moe.rounded_scores:
        scores = scores.to(x.dtype).float()
    if choice is None:
        ranked = logits if moe.topk_by_logits else scores
        if moe.correction_bias:
            ranked = ranked + tensors[moe.correction_bias].view(-1)
        topk_experts, bounds = select_experts(ranked, moe), None
    else:
        topk_experts, bounds = choice.topk_experts.long(), choice.bounds
    weights = unscaled_topk_weights(scores, topk_experts, moe, x.dtype)[0]
    if moe.rounded_weights:
        weights = weights.to(x.dtype).float()
    weights = weights * weight_factor(call, topk_experts)
    experts, order = topk_experts.flatten().sort(stable=True)
    every = torch.arange(moe.n_experts, device=x.device)
    ends = torch.searchsorted(experts, every, right=True).int()  # without waiting for the GPU
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=x.device)
    if bounds is None and wants_bounds:
        bounds = [0, *ends.tolist()]
    return Routing(scores, topk_experts, weights, order // moe.top_k, experts,
                   slots.view_as(topk_experts), weights.flatten()[order], ends, bounds)


@fused_kernel
def router_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the router's inputs, from x [n, hidden], see ExpertNormsSpec."""
    return norm_of(x, None, "rms", eps) * scale.to(x.dtype) * x.shape[1] ** -0.5


@fused_kernel
def router_norm_backward(grad: Tensor, x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Return the gradient of x from the gradient of router_norm()'s result."""
    grad = grad.float() * scale.float() * x.shape[1] ** -0.5
    return norm_of_backward(grad, x, None, "rms", eps).to(x.dtype)


def weight_factor(call: LayerCall, topk_experts: Tensor) -> float | Tensor:
    """Return the factor of the chosen experts' weights: a number, or fp32 [n, k]."""
    moe: MoESpec = call.arch.moe
    if not moe.expert_scale:
        return moe.routed_scaling_factor
    expert_scale = call.layer.small_tensors[moe.expert_scale].float()
    return expert_scale[topk_experts] * moe.routed_scaling_factor


def count_experts(routing: Routing, n_unpadded: Tensor) -> Tensor:
    """Return each expert's number of tokens and sum of scores, fp32 [2, experts], of the first
    n_unpadded tokens, int64 [1], which may be more than there are, or negative."""
    n = len(routing.scores)
    counted = torch.arange(n, device=n_unpadded.device) < n_unpadded
    rows_before = F.pad((routing.routed_tokens < n_unpadded).cumsum(0), (1, 0))[routing.ends]
    tokens = rows_before.diff(prepend=rows_before.new_zeros(1))  # number of tokens of each expert
    return torch.stack([tokens.float(), counted.float() @ routing.scores])


def add_balance(layer: LayerParameters, counts: Sequence[Tensor]) -> None:
    """Add to layer.balance [3]: the auxiliary loss of Switch Transformers, which is 1 if all
    experts get the same number of tokens; the busiest expert's share of the tokens, times the
    number of experts; and 1, to count this micro-batch. `counts`: count_experts() of its slices of
    tokens; a micro-batch of padding alone adds 0. The numbers are logged only, not trained on.
    """
    tokens, probabilities = torch.stack([*counts]).sum(0)
    n_experts = len(tokens)
    shares = tokens / tokens.sum()
    probabilities = probabilities / probabilities.sum()
    sums = (shares * probabilities).sum() * n_experts, shares.max() * n_experts
    if layer.balance is None:
        layer.balance = torch.zeros(3, device=shares.device)
    is_counted = (tokens.sum() > 0).float()
    layer.balance += torch.stack([*sums, is_counted]).nan_to_num()  # 0 / 0 without a token


def take_balance(layers: Iterable[LayerParameters], device: torch.device) -> Tensor:
    """Return the sums of add_balance() over all layers, fp64 [3], and reset them to 0. Without
    experts, return an empty tensor."""
    sums = [layer.balance for layer in layers if layer.balance is not None]
    if not sums:
        return torch.zeros(0, dtype=torch.float64, device=device)
    total = torch.stack(sums).sum(0).double()
    for balance in sums:
        balance.zero_()
    return total


def select_experts(scores: Tensor, moe: MoESpec) -> Tensor:
    """Return the top_k experts of each token, int64 [n, k], by scores [n, experts]."""
    if moe.n_expert_groups > 1:
        groups = scores.unflatten(1, (moe.n_expert_groups, -1))
        best = groups.topk(moe.n_best_per_group, -1)[0].sum(-1).topk(moe.topk_group, -1)[1]
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        scores = groups.masked_fill(is_out[..., None], -math.inf).flatten(1)
    return scores.topk(moe.top_k, -1)[1]


def unscaled_topk_weights(
    scores: Tensor, topk_experts: Tensor, moe: MoESpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the weights of the chosen experts before scaling, fp32 [n, k]; their scores; and the
    sum [n, 1] by which the scores are divided, None if they are not. `dtype`: the model's."""
    topk_scores = scores.gather(1, topk_experts)
    total = None
    if moe.norm_topk_prob:
        total = topk_scores.sum(-1, keepdim=True) + moe.sum_eps
        if moe.rounded_scores:
            total = total.to(dtype).to(topk_scores.dtype)
    return topk_scores if total is None else topk_scores / total, topk_scores, total


def route_backward(call: LayerCall, routing: Routing, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of route()'s x [n, hidden] through the weights, from `grad`, the gradient
    of the weights, fp32 [n, k]. x is read only with ExpertNormsSpec; else only its dtype is."""
    moe: MoESpec = call.arch.moe
    topk_experts = routing.topk_experts
    _, topk_scores, total = unscaled_topk_weights(routing.scores, topk_experts, moe, x.dtype)
    grad = grad * weight_factor(call, topk_experts)
    if total is not None:
        grad = (grad - (grad * topk_scores).sum(-1, keepdim=True) / total) / total
    grad = grad * topk_scores
    if moe.score_func == "sigmoid":
        grad = torch.zeros_like(routing.scores).scatter_(1, topk_experts, grad * (1 - topk_scores))
    else:
        grad = (-grad.sum(-1, keepdim=True) * routing.scores).scatter_add_(1, topk_experts, grad)
    weight = call.layer.small_tensors[f"{moe.router}.weight"]
    matmul_dtype = torch.float32 if moe.fp32_router else x.dtype
    grad = (grad.to(matmul_dtype) @ weight.to(matmul_dtype)).to(x.dtype)
    if moe.norms:
        scale = call.layer.small_tensors[moe.norms.router_scale]
        return router_norm_backward(grad, x, scale, call.arch.norm_eps)
    return grad
