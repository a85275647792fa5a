"""The MLP sublayer of a layer with experts: those that each token goes to, and perhaps a shared
one, forward and backward, and what it costs.

No token is dropped, however uneven the router is. Which models have experts is in families.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.elementwise import (
    MLP_SITE, LimitedActivation, add_expert_rows, add_row_bias, clamped_gate_backward, gate,
    gate_backward, gate_weight_gradients, limited, norm_backward)
from fsdp_qlora.layer.call import LayerWork
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.grouped_mm import (
    Pass, add_expert_gradients, cut_experts, fill_expert_columns, grouped, put_rows, split_columns,
    why_no_grouped_mm)
from fsdp_qlora.layer.latent_moe import ExpertLatent
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import add_a_gradient, lora_matmul, lora_matmul_backward, widen
from fsdp_qlora.layer.residual import (
    branch_gradient, end_branch, keep, keep_inputs, kept_inputs, last_columns, norm_gradient,
    norm_inputs, normed)
from fsdp_qlora.layer.router import Routing, add_balance, route, route_backward
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture, ExpertNorms, Limits


GROUPED_SPEED = 0.66  # of grouped products, as a part of that of large ones; on an H200


@dataclasses.dataclass(frozen=True, eq=False)
class MoESublayer:
    """One layer's experts, with the same functions as MLPSublayer."""

    arch: Architecture
    shared_gate_up: FusedLinear | None  # None: there is no shared expert
    shared_down: FusedLinear | None
    latent: ExpertLatent | None  # None: experts read what the router and the shared expert do
    expert_gate_up: FusedLinear  # of all experts, one after the other
    expert_down: FusedLinear
    limits: Limits

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        shared = (self.shared_gate_up, self.shared_down) if self.shared_gate_up else ()
        latent = self.latent.fused_linears if self.latent else ()
        return *shared, *latent, self.expert_gate_up, self.expert_down

    def forward(
        self, work: LayerWork, mid_residual: Tensor | None, source: Tensor, want_sum: bool = True,
        choice: tuple[Tensor, list[int] | None] | None = None, keep_gate_ups: bool = True
    ) -> tuple[Tensor | Any, types.SimpleNamespace]:
        """Returns middle + MLP(norm(source)), None without want_sum, and what backward() needs.

        When forward() is computed again, `choice` is that of the first time: a tie must not be
        decided another way. Without keep_gate_ups, backward() computes the experts' gate and up
        again.
        """
        arch, norms, branch = self.arch, self.arch.moe.norms, None
        kept = keep(source=source, branch=None, gate_ups=None)
        # with columns for the shared expert's adapter, which product() fills
        inputs = norm_inputs(work, arch.mlp_norm, source, self.fused_linears[0])
        x = inputs[:, : arch.hidden_size]
        needs_bounds = work.layer.plan.expert_ranges > 1 or bool(
            why_no_grouped_mm(x.dtype, x.device))
        kept.routing = route(work, source if norms else x, choice, needs_bounds)
        if not (work.is_backward or work.evaluation):
            add_balance(work.layer, kept.routing, work.batch.n_unpadded)
        needs_branch = want_sum or arch.mlp_post_norm is not None
        read = self.latent.enter(work, kept, x) if self.latent else x
        if needs_branch or self.latent and self.latent.exit.n_columns:
            read = normed(work, norms.before, source) if norms else read
            branch, kept.gate_ups = self._experts_forward(work, kept.routing, read, keep_gate_ups)
            if self.latent:
                branch = self.latent.leave(work, kept, branch, needs_branch)
        if self.shared_gate_up:
            shared = self._shared_forward(work, kept, inputs)
            if norms:
                assert branch is not None, "the norm after the half needs it"
                kept.given, kept.shared_given = branch, shared
                branch = normed(work, norms.after, branch)
                shared = normed(work, norms.after_shared, shared)
            if needs_branch:
                branch += shared
        keep_inputs(work, kept, inputs, self.shared_gate_up)
        out = None
        if branch is not None:
            out, kept.branch = end_branch(work, mid_residual, branch, arch.mlp_post_norm, MLP_SITE,
                                          want_sum)
        return out, kept

    def backward(self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor) -> Tensor:
        """Returns the gradient of `middle`, which includes that of `source` through the MLP. `grad`
        is the gradient of forward()'s sum."""
        arch, norms = self.arch, self.arch.moe.norms
        upstream = branch_gradient(work, kept.branch, grad, arch.mlp_post_norm, MLP_SITE)
        kept.branch = None
        if norms:
            return self._apart_backward(work, kept, upstream, grad, norms)
        of_given = self.latent.leave_backward(work, kept, upstream) if self.latent else upstream
        grad_x, grad_weights = self._experts_backward(work, kept, of_given)
        if self.latent:
            x = kept_inputs(work, kept, arch.mlp_norm, kept.source, self.fused_linears[0])
            grad_x = self.latent.enter_backward(work, kept, grad_x, x)
        grad_x += route_backward(work, kept.routing, grad_weights, grad_x)
        if self.shared_gate_up:
            grad_x += self._shared_backward(work, kept, upstream)
        return norm_gradient(work, arch.mlp_norm, kept.source, grad_x, grad)

    def _apart_backward(
        self, work: LayerWork, kept: types.SimpleNamespace, upstream: Tensor, grad: Tensor,
        norms: ExpertNorms
    ) -> Tensor:
        """backward() where experts, router and shared expert have norms of their own. `upstream`:
        the gradient of the sum of what experts and shared expert give, normed."""
        source, kind, eps = kept.source, self.arch.norm, self.arch.norm_eps
        of_given = norm_backward(kept.given, upstream, None, work.vector(norms.after), kind, eps)
        grad_x, grad_weights = self._experts_backward(work, kept, of_given)
        grad = norm_gradient(work, norms.before, source, grad_x, grad)
        grad += route_backward(work, kept.routing, grad_weights, source)
        kept.given = of_given = None
        of_shared = norm_backward(
            kept.shared_given, upstream, None, work.vector(norms.after_shared), kind, eps)
        grad_x, kept.shared_given = self._shared_backward(work, kept, of_shared), None
        return norm_gradient(work, self.arch.mlp_norm, source, grad_x, grad)

    def forward_to_recompute(
        self, work: LayerWork, mid_residual: Tensor, source: Tensor
    ) -> tuple[Tensor, tuple[Tensor, list[int] | None]]:
        """Returns forward()'s sum, and the choice for recomputed_backward(): all that is kept."""
        # not in slices of tokens, as without experts: each slice would dequantize all of them
        out, kept = self.forward(work, mid_residual, source, keep_gate_ups=False)
        return out, kept.routing.choice

    def recomputed_backward(
        self, work: LayerWork, source: Tensor, grad: Tensor, choice: tuple[Tensor, list[int] | None]
    ) -> Tensor:
        """backward() with forward() computed again."""
        kept = self.forward(work, None, source, False, choice, keep_gate_ups=False)[1]
        grad = self.backward(work, kept, grad)
        work.held.clear()
        return grad

    # ---- the experts ----

    @property
    def _activation(self) -> str | LimitedActivation | tuple[float, float]:
        return self.arch.moe.clamp or limited(self.arch.activation, self.limits.experts)

    def _experts_forward(
        self, work: LayerWork, routing: Routing, x: Tensor, keep_gate_ups: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """The sum [n, hidden] of what each token's experts give, times its weights for them; and,
        with keep_gate_ups, gate and up of each pass."""
        outputs, kept = None, []
        for passed in self._passes(work, routing):
            gate_up = self._expert_gate_up(work, routing, x, passed)
            activated = gate_up.new_empty(len(gate_up), self.expert_down.width)
            gate(activated[:, : self.expert_down.in_features], gate_up, self._activation,
                 self.arch.gated, evaluation=work.evaluation)
            fill_expert_columns(work, self.expert_down, activated, passed)
            rows = grouped(activated, passed.down.transpose(1, 2), passed)
            self._add_bias(work, "down_proj", rows, routing, passed)
            outputs = put_rows(outputs, rows, passed, len(routing.token))
            if keep_gate_ups:
                kept.append(gate_up)
            del gate_up, activated, rows, passed  # before the next range is dequantized
        out = add_expert_rows(outputs, routing.token_rows, routing.weights,
                              evaluation=work.evaluation)
        return out, kept or None

    def _expert_gate_up(self, work: LayerWork, routing: Routing, x: Tensor, passed: Pass) -> Tensor:
        """gate and up of the rows of one pass, [m, 2 inner]."""
        inputs = x[routing.token[passed.rows]]
        if self.expert_gate_up.n_columns:
            inputs = widen(inputs, self.expert_gate_up)
            fill_expert_columns(work, self.expert_gate_up, inputs, passed)
        gate_up = grouped(inputs, passed.gate_up.transpose(1, 2), passed)
        self._add_bias(work, "gate_up_proj", gate_up, routing, passed)
        return gate_up

    def _bias(self, work: LayerWork, key: str) -> Tensor | None:
        """[experts, out] of all experts' linears `key`; None where they have none."""
        return work.layer.small_tensors.get(f"{self.arch.moe.experts}.{key}_bias")

    def _add_bias(
        self, work: LayerWork, key: str, rows: Tensor, routing: Routing, passed: Pass
    ) -> None:
        """Add to the rows of a pass the bias of their experts' linears `key`, if any."""
        bias = self._bias(work, key)
        if bias is not None:
            add_row_bias(rows, bias, routing.expert[passed.rows], evaluation=work.evaluation)

    def _experts_backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of what the experts read [n, hidden] and of the weights, fp32 [n, k], from
        that of the experts' sum.

        The gradient of a token's weight for an expert is grad . (what the expert gave). It is
        computed before the last product, as (grad W) . activated, so that this product is never
        computed again. Takes kept.gate_ups one by one, and writes over them.
        """
        routing, x = kept.routing, None
        if not kept.gate_ups or self.expert_gate_up.n_columns:  # to compute them; for A's gradient
            if self.latent:
                x = kept.latent
            elif norms := self.arch.moe.norms:
                x = normed(work, norms.before, kept.source)
            else:
                x = kept_inputs(work, kept, self.arch.mlp_norm, kept.source, self.fused_linears[0])
        grad_rows, n_rows = None, len(routing.token)
        grad_weights = torch.empty(n_rows, dtype=torch.float32, device=grad.device)
        for passed in self._passes(work, routing):
            if kept.gate_ups:
                gate_up = kept.gate_ups.pop(0)
            else:
                assert x is not None, "made above"
                gate_up = self._expert_gate_up(work, routing, x, passed)
            # grad_inner and grad_d are without the tokens' weights; grad_gate_up is with them
            upstream = grad[routing.token[passed.rows]]
            grad_inner = grouped(upstream, passed.down, passed)
            grad_inner, grad_d = split_columns(work, self.expert_down, grad_inner, passed)
            grad_weights[passed.rows] = gate_weight_gradients(
                grad_inner, gate_up, self._activation, self.arch.gated)
            weights = routing.row_weights[passed.rows]
            grad_gate_up = self._gate_backward(grad_inner, weights, gate_up)
            activated = grad_inner  # _gate_backward() wrote gate()'s result there
            if grad_d is not None:
                weighted = activated * weights[:, None].to(activated.dtype)
                add_expert_gradients(work, self.expert_down, weighted, grad_d, upstream, passed)
            del grad_inner, activated, upstream, gate_up
            rows = grouped(grad_gate_up, passed.gate_up, passed)
            rows, grad_d = split_columns(work, self.expert_gate_up, rows, passed)
            if grad_d is not None:
                inputs = x[routing.token[passed.rows]]
                add_expert_gradients(
                    work, self.expert_gate_up, inputs, grad_d, grad_gate_up, passed)
            grad_rows = put_rows(grad_rows, rows, passed, n_rows)
            del grad_gate_up, rows, passed
        x = None
        grad_x = add_expert_rows(grad_rows, routing.token_rows, None)
        grad_weights, bias = grad_weights[routing.token_rows], self._bias(work, "down_proj")
        if bias is not None:  # it is a part of what an expert gives
            grad_weights += F.linear(grad, bias.to(grad.dtype)).float().gather(1, routing.chosen)
        return grad_x, grad_weights

    def _gate_backward(self, grad: Tensor, weights: Tensor, gate_up: Tensor) -> Tensor:
        """Returns the gradient of gate_up times `weights`: a new tensor, or gate_up, overwritten.
        Writes gate()'s result over `grad`, its gradient."""
        activation = self._activation
        if isinstance(activation, tuple):
            return clamped_gate_backward(grad, weights, gate_up, *activation)
        gate_backward(grad, activation, weights, *gate_up.chunk(1 + self.arch.gated, -1))
        return gate_up

    def _passes(self, work: LayerWork, routing: Routing) -> Iterator[Pass]:
        """Yields what is multiplied at once: a range of experts with their weights, and at most an
        even share of the rows, so that memory does not depend on the router's choice."""
        n_rows = len(routing.token)
        ranges = cut_experts(
            self.expert_gate_up, self.expert_down, work.layer.plan.expert_ranges)
        most = math.ceil(n_rows / len(ranges))
        for experts, *parts in ranges:
            first, stop = 0, n_rows
            if routing.bounds:
                first, stop = routing.bounds[experts.start], routing.bounds[experts.stop]
            weights = None
            for start in range(first, stop, most):
                if weights is None:  # experts without a token are not dequantized
                    weights = [dequantize(work.layer, part, work.adapter).view(
                        len(experts), -1, part.width) for part in parts]
                yield Pass(experts, slice(start, min(start + most, stop)), routing, *weights)

    # ---- the shared expert ----

    @property
    def _shared_activation(self) -> str | LimitedActivation:
        return limited(self.arch.activation, self.limits.mlp)

    def _shared_forward(
        self, work: LayerWork, kept: types.SimpleNamespace, inputs: Tensor
    ) -> Tensor:
        """What the shared expert gives [n, hidden], times the sigmoid of its gate, if any."""
        assert self.shared_gate_up and self.shared_down, "asked for above"
        kept.shared_gate_up = lora_matmul(work, self.shared_gate_up, inputs)
        activated = kept.shared_gate_up.new_empty(len(inputs), self.shared_down.width)
        gate(activated[:, : self.shared_down.in_features], kept.shared_gate_up,
             self._shared_activation, self.arch.gated, evaluation=work.evaluation)
        out = lora_matmul(work, self.shared_down, activated)
        kept.down_columns = last_columns(activated, self.shared_down)
        if name := self.arch.moe.shared_gate:
            kept.shared_out = out
            x = inputs[:, : self.arch.hidden_size]
            weight = work.layer.small_tensors[f"{name}.weight"].to(x.dtype)
            kept.shared_factor = F.linear(x, weight).sigmoid()
            out = out * kept.shared_factor
        return out

    def _shared_backward(
        self, work: LayerWork, kept: types.SimpleNamespace, grad: Tensor
    ) -> Tensor:
        """The gradient of x [n, hidden] through the shared expert, from that of its output."""
        assert self.shared_gate_up and self.shared_down, "asked for above"
        arch, from_factor, activated = self.arch, 0, None
        if name := arch.moe.shared_gate:
            factor = kept.shared_factor.float()
            slope = (grad.float() * kept.shared_out.float()).sum(-1, keepdim=True)
            slope = (slope * factor * (1 - factor)).to(grad.dtype)
            from_factor = slope @ work.layer.small_tensors[f"{name}.weight"].to(slope.dtype)
            grad, kept.shared_out = grad * kept.shared_factor, None
        if work.spec.dora:
            activated = grad.new_empty(len(grad), self.shared_down.in_features)
            gate(activated, kept.shared_gate_up, self._shared_activation, arch.gated)
        activated, grad_d = lora_matmul_backward(work, self.shared_down, kept.down_columns, grad,
                                                 activated)
        gate_backward(activated, self._shared_activation, None,
                      *kept.shared_gate_up.chunk(1 + arch.gated, -1))
        add_a_gradient(work, self.shared_down, activated, grad_d)  # gate()'s result by now
        inputs = kept_inputs(work, kept, arch.mlp_norm, kept.source, self.shared_gate_up)
        grad_x, grad_d = lora_matmul_backward(work, self.shared_gate_up, kept.columns,
                                              kept.shared_gate_up, inputs)
        add_a_gradient(work, self.shared_gate_up, inputs, grad_d)
        return grad_x + from_factor

    # ---- for the plan ----

    product_speed = GROUPED_SPEED

    @property
    def choice_values(self) -> int:
        """Values kept per token if all else is computed again: the chosen experts, int16."""
        return self.arch.moe.top_k

    @property
    def _gate_up_size(self) -> int:
        """Outputs of one expert's gate and up together."""
        return self.expert_gate_up.out_features // self.arch.moe.n_experts

    @property
    def kept_values(self) -> int:
        """Values kept from forward to backward, if nothing is recomputed; 2 bytes each."""
        arch, moe = self.arch, self.arch.moe
        values = moe.top_k * self._gate_up_size + arch.hidden_size * (not arch.parallel)
        # the Routing: scores in fp32; of each row four numbers in int64 and two weights in fp32
        values += 2 * moe.n_experts + (4 * 4 + 2 * 2) * moe.top_k
        if self.shared_gate_up:
            columns = self.shared_gate_up.padded_columns + self.shared_down.padded_columns
            values += self.shared_gate_up.out_features + columns
            values += (arch.hidden_size + 1) * (moe.shared_gate is not None)
        if moe.norms:  # what experts and shared expert give
            values += 2 * arch.hidden_size
        if self.latent:
            values += self.latent.kept_values
        return values + arch.hidden_size * (arch.mlp_post_norm is not None)

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        """The peak bytes of backward(), besides what is kept."""
        n, item = plan.micro_batch_tokens, getattr(torch, plan.compute_dtype).itemsize
        hidden, moe = self.arch.hidden_size, self.arch.moe
        width = self.expert_gate_up.in_features  # that of hidden states, or of a latent
        rows, up, down = n * moe.top_k, self.expert_gate_up, self.expert_down
        # gate and up once more if they are computed again, and if their gradient is a new tensor
        of_row, of_adapters = up.width + down.width, 0
        if up.n_columns:  # a gradient of rows, the part from d and their sum; A's, in fp32 too
            of_row = max(3 * up.width, up.width + 3 * down.width)
            of_adapters = 3 * moe.n_experts * up.n_columns * width
        of_row += self._gate_up_size * (recomputed + bool(moe.clamp))
        of_pass = math.ceil((rows * of_row + of_adapters) / plan.expert_ranges)
        if recomputed and self.shared_gate_up:
            of_pass += n * (self.shared_gate_up.out_features + self.shared_down.width)
        weights = sum(fused.out_features * fused.width for fused in (up, down))
        weights = math.ceil(weights / plan.expert_ranges)
        values = rows * width * (plan.expert_ranges > 1) + of_pass + weights + 3 * n * hidden
        if moe.norms:  # what experts read, also for A's gradient, and that of what they give
            values += n * hidden * (2 + 2 * recomputed + bool(up.n_columns))
        if self.latent:
            values += n * (self.latent.live_values + recomputed * self.latent.kept_values)
            values += max(fused.out_features * fused.width for fused in self.latent.fused_linears)
        # of the router in fp32: four values a row, and three tensors like its scores
        return values * item + 4 * (4 * rows + 3 * n * moe.n_experts)

    @property
    def token_weights(self) -> float:
        """Weights that one token is multiplied by."""
        share = self.arch.moe.top_k / self.arch.moe.n_experts
        shared = sum(fused.n_weights for fused in self.fused_linears[:-2])
        return shared + share * (self.expert_gate_up.n_weights + self.expert_down.n_weights)

    @property
    def recomputed_weights(self) -> float:
        """Those of token_weights that recomputed_backward() multiplies again."""
        share = self.arch.moe.top_k / self.arch.moe.n_experts
        shared = sum(fused.n_weights for fused in self.fused_linears[:-2])
        return shared + share * self.expert_gate_up.n_weights

    @property
    def elementwise_values(self) -> int:
        """Values that elementwise work reads or writes, forward and backward; counted."""
        # of a row, each way: gathered, put in its place, summed, 2 + 2 + 1; all gates: 1.5 + 4.5
        hidden, top_k = self.arch.hidden_size, self.arch.moe.top_k
        width = self.expert_gate_up.in_features
        rows = top_k * (10 * width + 6 * self._gate_up_size)
        if self.expert_gate_up.n_columns:  # narrow products, which take as long; fitted
            rows += top_k * 40 * (width + self._gate_up_size // 2)
        if self.arch.moe.norms:  # four more norms, the first of them for a second reader
            rows += 20 * hidden
        return 15 * hidden + rows
