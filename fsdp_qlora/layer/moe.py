"""The MoE sublayer: routed experts and an optional shared one (shared_expert.py).

pretrained/families.py says which models have experts.

    x = norm(mlp_input)                                     # _forward_slice()
    routing = route(x)                                      # k experts a token; rows by expert
    for chunk in _chunks():                                 # a range of experts, some of the rows
        inputs = x[routing.routed_tokens[chunk.rows]]       # _chunk_gate_up()
        gate_up = inputs @ chunk.gate_up.T                  # grouped: each row by its own expert
        rows[chunk.rows] = glu(gate_up) @ chunk.down.T      # _chunk_forward()
    branch = sum of a token's k rows, times their weights   # add_expert_rows()
    return mid_residual + norm(branch + shared(x))          # ResidualSum.add()

With ExpertNormsSpec (Gemma 4), router and experts each read mlp_input through a norm of their
own. With ExpertLatent (latent_moe.py), the experts read and write a narrower space.

No token is dropped, however uneven the router is. Work is cut three times: slices of tokens
(Plan.expert_slice_tokens), only where experts are recomputed; ranges of experts
(Plan.n_expert_ranges), which are dequantized together; chunks, at most an even share of the rows,
which are multiplied together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.activations import (
    Activation, ClampedGLU, gate_up_gradient_, glu, glu_weight_gradients, limited)
from fsdp_qlora.kernels.norms import fused_norm_backward
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.grouped_mm import (
    ExpertChunk, add_expert_gradients, add_expert_rows, add_row_bias, cut_experts,
    fill_expert_lora_hidden, grouped_matmul, put_rows, split_lora_gradient, why_no_grouped_mm)
from fsdp_qlora.layer.latent_moe import ExpertLatent
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import MaybeTensor, widen
from fsdp_qlora.layer.mlp import each_slice, joined
from fsdp_qlora.layer.residual import (
    ResidualSum, apply_norm, norm_padded, norm_padded_backward, saved_or_recomputed_inputs)
from fsdp_qlora.layer.router import (
    Routing, RoutingChoice, add_balance, count_experts, route, route_backward)
from fsdp_qlora.layer.saved import SavedMoE
from fsdp_qlora.layer.shared_expert import SharedExpert
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import ExpertNormsSpec, MoESpec


@dataclasses.dataclass(frozen=True, eq=False)
class MoESublayer:
    """The experts of one layer, an MLPSublayer (spec.py)."""

    arch: Architecture
    shared: SharedExpert | None
    # None: experts read the same inputs as router and shared expert
    expert_latent: ExpertLatent | None
    expert_gate_up: FusedLinear  # all experts, one after the other
    expert_down: FusedLinear
    residual_sum: ResidualSum
    limit: float | None  # see LimitedActivation

    @property
    def moe(self) -> MoESpec:
        assert self.arch.moe, "the layer has experts"
        return self.arch.moe

    @property
    def sum_factor(self) -> float:
        """Factor of the sum of the routed experts' outputs and the shared expert's."""
        return 0.5 if self.moe.combination == "average" and self.shared else 1.0

    @property
    def dense_linears(self) -> tuple[FusedLinear, ...]:
        """Those that all tokens use: of the shared expert, and around the experts' latent space."""
        shared = self.shared.fused_linears if self.shared else ()
        latent = self.expert_latent.fused_linears if self.expert_latent else ()
        return *shared, *latent

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return *self.dense_linears, self.expert_gate_up, self.expert_down

    @property
    def first_linear(self) -> FusedLinear:
        """The FusedLinear that reads the normed inputs; if several do, the shared expert's."""
        if self.shared:
            return self.shared.gate_up
        return self.expert_latent.in_proj if self.expert_latent else self.expert_gate_up

    def forward(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, SavedMoE]:
        out, saved = self._forward_slice(call, mid_residual, mlp_input)
        if not call.is_evaluation:
            add_balance(call.layer, [count_experts(saved.routing, call.batch.n_unpadded)])
        return out, saved

    def _forward_slice(
        self, call: LayerCall, mid_residual: Tensor | None, mlp_input: Tensor,
        wants_sum: bool = True, routing_choice: RoutingChoice | None = None,
        save_gate_ups: bool = True
    ) -> tuple[MaybeTensor, SavedMoE]:
        """forward() for the tokens call.tokens, without add_balance(). The sum is None without
        wants_sum.

        When forward() is recomputed, `routing_choice` is that of the first time, so that a tie is
        not decided another way. Without save_gate_ups, backward() computes the experts' gate and up
        again.
        """
        arch = self.arch
        norms = self.moe.norms
        branch = None
        saved = SavedMoE(mlp_input=mlp_input)
        # includes columns for the shared expert's adapter, which lora_matmul() fills
        inputs = norm_padded(call, arch.mlp_norm, mlp_input, self.first_linear)
        x = inputs[:, : arch.hidden_size]
        wants_bounds = call.layer.plan.n_expert_ranges > 1 or bool(
            why_no_grouped_mm(x.dtype, x.device))
        saved.routing = route(call, mlp_input if norms else x, routing_choice, wants_bounds)
        needs_branch = self.residual_sum.needs_branch(wants_sum)
        if self.expert_latent:
            self.expert_latent.project_in(call, saved, x)
        runs_experts = needs_branch or (  # out_proj's A gradient reads their sum
            self.expert_latent is not None and self.expert_latent.out_proj.lora_width > 0)
        if runs_experts:
            expert_inputs = self._expert_inputs(call, saved, x)
            branch, saved.gate_ups = self._experts_forward(
                call, saved.routing, expert_inputs, save_gate_ups)
            if self.expert_latent:
                branch = self.expert_latent.project_out(call, saved, branch, needs_branch)
        shared_output = self.shared.forward(call, saved, inputs) if self.shared else None
        if norms:
            assert branch is not None, "the norm after the experts needs it"
            saved.expert_output = branch
            branch = apply_norm(call, norms.after, branch)
        if shared_output is not None and needs_branch:
            branch += shared_output
            if self.sum_factor != 1:
                branch *= self.sum_factor
        saved.normed_inputs = inputs if call.is_backward else None
        out = None
        if branch is not None:
            out, saved.branch = self.residual_sum.add(call, mid_residual, branch, wants_sum)
        return out, saved

    def backward(self, call: LayerCall, saved: SavedMoE, grad: Tensor) -> Tensor:
        arch, norms = self.arch, self.moe.norms
        upstream = self.residual_sum.backward(call, saved.branch, grad)
        saved.branch = None
        if self.sum_factor != 1:
            upstream = upstream * self.sum_factor
        if norms:
            return self._backward_with_expert_norms(call, saved, upstream, grad, norms)
        grad_out = upstream
        if self.expert_latent:
            grad_out = self.expert_latent.project_out_backward(call, saved, upstream)
        grad_x, grad_weights = self._experts_backward(call, saved, grad_out)
        if self.expert_latent:
            grad_x = self.expert_latent.project_in_backward(
                call, saved, grad_x, self._inputs(call, saved))
        grad_x += route_backward(call, saved.routing, grad_weights, grad_x)
        if self.shared:
            grad_x += self.shared.backward(call, saved, upstream)
        return norm_padded_backward(call, arch.mlp_norm, saved.mlp_input, grad_x, grad)

    def _backward_with_expert_norms(
        self, call: LayerCall, saved: SavedMoE, upstream: Tensor, grad: Tensor,
        norms: ExpertNormsSpec
    ) -> Tensor:
        """backward() with ExpertNormsSpec: experts, router and shared expert each have a norm.
        `upstream`: the gradient of the sum of their normed outputs."""
        mlp_input, kind, eps = saved.mlp_input, self.arch.norm_kind, self.arch.norm_eps
        grad_out = fused_norm_backward(
            saved.expert_output, upstream, None, call.vector(norms.after), kind, eps)
        grad_x, grad_weights = self._experts_backward(call, saved, grad_out)
        grad = norm_padded_backward(call, norms.before, mlp_input, grad_x, grad)
        grad += route_backward(call, saved.routing, grad_weights, mlp_input)
        saved.expert_output = grad_out = None
        assert self.shared, "it is in the place of these layers' MLP"
        grad_x = self.shared.backward(call, saved, upstream)
        return norm_padded_backward(call, self.arch.mlp_norm, mlp_input, grad_x, grad)

    def forward_in_slices(
        self, call: LayerCall, mid_residual: Tensor, mlp_input: Tensor
    ) -> tuple[Tensor, list[RoutingChoice]]:
        sums, choices, counts = [], [], []
        for tokens in each_slice(call, len(mid_residual), call.layer.plan.expert_slice_tokens):
            out, saved = self._forward_slice(
                call, mid_residual[tokens], mlp_input[tokens], save_gate_ups=False)
            sums.append(out)
            choices.append(saved.routing.choice)
            if not call.is_evaluation:
                n_unpadded = call.batch.n_unpadded - tokens.start
                counts.append(count_experts(saved.routing, n_unpadded))
            del out, saved  # before the next slice allocates its own
        if counts:
            add_balance(call.layer, counts)
        return joined(sums), choices

    def backward_in_slices(
        self, call: LayerCall, mlp_input: Tensor, grad: Tensor,
        routing_choices: list[RoutingChoice]
    ) -> Tensor:
        grads = []
        slices = each_slice(call, len(mlp_input), call.layer.plan.expert_slice_tokens)
        for tokens, choice in zip(slices, routing_choices, strict=True):
            saved = self._forward_slice(
                call, None, mlp_input[tokens], wants_sum=False, routing_choice=choice,
                save_gate_ups=False)[1]
            grads.append(self.backward(call, saved, grad[tokens]))
            del saved
        call.dequantized.clear()
        return joined(grads)

    # ---- the experts ----

    @property
    def _activation(self) -> Activation:
        if self.moe.clamped_glu:
            return ClampedGLU(*self.moe.clamped_glu)
        return limited(self.arch.activation, self.limit)

    def _inputs(self, call: LayerCall, saved: SavedMoE) -> Tensor:
        """Return the normed inputs [n, hidden] of router and experts in backward()."""
        return saved_or_recomputed_inputs(call, saved, self.arch.mlp_norm, self.first_linear)

    def _expert_inputs(
        self, call: LayerCall, saved: SavedMoE, x: Tensor | None = None
    ) -> Tensor:
        """Return the inputs of the routed experts. `x`: the normed inputs [n, hidden] in forward();
        None: they are saved or computed again."""
        if self.expert_latent:
            return saved.latent_inputs
        if norms := self.moe.norms:
            return apply_norm(call, norms.before, saved.mlp_input)
        return self._inputs(call, saved) if x is None else x

    def _experts_forward(
        self, call: LayerCall, routing: Routing, x: Tensor, save_gate_ups: bool
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Return the weighted sum [n, hidden] of the outputs of each token's experts; and, with
        save_gate_ups, gate and up of each chunk."""
        outputs = None
        saved = []
        for chunk in self._chunks(call, routing):
            rows, gate_up = self._chunk_forward(call, routing, x, chunk)
            outputs = put_rows(outputs, rows, chunk, len(routing.routed_tokens))
            if save_gate_ups:
                saved.append(gate_up)
            del rows, gate_up, chunk  # before the next range is dequantized
        out = add_expert_rows(
            outputs, routing.slots, routing.topk_weights, is_evaluation=call.is_evaluation)
        return out, saved or None

    def _chunk_forward(
        self, call: LayerCall, routing: Routing, x: Tensor, chunk: ExpertChunk
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [m, hidden] of the rows of one chunk; and their gate and up."""
        gate_up = self._chunk_gate_up(call, routing, x, chunk)
        activated = gate_up.new_empty(len(gate_up), self.expert_down.input_width)
        glu(activated[:, : self.expert_down.in_features], gate_up, self._activation,
            self.arch.gated, is_evaluation=call.is_evaluation)
        fill_expert_lora_hidden(call, self.expert_down, activated, chunk)
        rows = grouped_matmul(activated, chunk.down.transpose(1, 2), chunk)
        self._add_bias(call, "down_proj", rows, routing, chunk)
        return rows, gate_up

    def _chunk_gate_up(
        self, call: LayerCall, routing: Routing, x: Tensor, chunk: ExpertChunk
    ) -> Tensor:
        """Return gate and up of the rows of one chunk, [m, 2 inner]."""
        inputs = x[routing.routed_tokens[chunk.rows]]
        if self.expert_gate_up.lora_width:
            inputs = widen(inputs, self.expert_gate_up)
            fill_expert_lora_hidden(call, self.expert_gate_up, inputs, chunk)
        gate_up = grouped_matmul(inputs, chunk.gate_up.transpose(1, 2), chunk)
        self._add_bias(call, "gate_up_proj", gate_up, routing, chunk)
        return gate_up

    def _bias(self, call: LayerCall, key: str) -> Tensor | None:
        """Return the biases [experts, out] of all experts' linears `key`; None if they have none.
        """
        return call.layer.small_tensors.get(f"{self.moe.experts_prefix}.{key}_bias")

    def _add_bias(
        self, call: LayerCall, key: str, rows: Tensor, routing: Routing, chunk: ExpertChunk
    ) -> None:
        """Add to the rows of a chunk the biases of their experts' linears `key`, if any."""
        bias = self._bias(call, key)
        if bias is not None:
            add_row_bias(rows, bias, routing.routed_experts[chunk.rows],
                         is_evaluation=call.is_evaluation)

    def _experts_backward(
        self, call: LayerCall, saved: SavedMoE, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the experts' inputs [n, hidden] and of the routing weights, fp32
        [n, k], from `grad`, the gradient of the experts' sum."""
        routing = saved.routing
        x = None
        if not saved.gate_ups or self.expert_gate_up.lora_width:  # to recompute them; for A's grad
            x = self._expert_inputs(call, saved)
        grad_rows = None
        n_rows = len(routing.routed_tokens)
        grad_weights = torch.empty(n_rows, dtype=torch.float32, device=grad.device)
        for chunk in self._chunks(call, routing):
            rows, grad_weights[chunk.rows] = self._chunk_backward(call, saved, chunk, x, grad)
            grad_rows = put_rows(grad_rows, rows, chunk, n_rows)
            del rows, chunk  # before the next range is dequantized
        x = None
        grad_x = add_expert_rows(grad_rows, routing.slots, None)
        grad_weights = grad_weights[routing.slots]
        bias = self._bias(call, "down_proj")
        if bias is not None:  # the bias is a part of an expert's output
            grad_of_bias = F.linear(grad, bias.to(grad.dtype)).float()
            grad_weights += grad_of_bias.gather(1, routing.topk_experts)
        return grad_x, grad_weights

    def _chunk_backward(
        self, call: LayerCall, saved: SavedMoE, chunk: ExpertChunk, x: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the inputs [m, hidden] of the rows of one chunk, and of their
        routing weights [m]."""
        grad_gate_up, grad_weights = self._chunk_down_backward(call, saved, chunk, x, grad)
        rows = grouped_matmul(grad_gate_up, chunk.gate_up, chunk)
        rows, grad_lora_hidden = split_lora_gradient(call, self.expert_gate_up, rows, chunk)
        if grad_lora_hidden is not None:
            add_expert_gradients(
                call, self.expert_gate_up, x[saved.routing.routed_tokens[chunk.rows]],
                grad_lora_hidden, grad_gate_up, chunk)
        return rows, grad_weights

    def _chunk_down_backward(
        self, call: LayerCall, saved: SavedMoE, chunk: ExpertChunk, x: Tensor | None, grad: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of gate and up [m, 2 inner] of the rows of one chunk, and of their
        routing weights [m]. Removes gate and up from saved.gate_ups and overwrites them.

        The gradient of a token's weight for an expert is grad . (the expert's output). It is
        computed before the last matmul, as (grad W) . activated, so that this matmul is never
        recomputed.
        """
        routing = saved.routing
        if saved.gate_ups:
            gate_up = saved.gate_ups.pop(0)
        else:
            assert x is not None, "made by _experts_backward()"
            gate_up = self._chunk_gate_up(call, routing, x, chunk)
        # grad_activated and grad_lora_hidden exclude the routing weights, grad_gate_up has them
        upstream = grad[routing.routed_tokens[chunk.rows]]
        grad_activated = grouped_matmul(upstream, chunk.down, chunk)
        grad_activated, grad_lora_hidden = split_lora_gradient(
            call, self.expert_down, grad_activated, chunk)
        grad_weights = glu_weight_gradients(
            grad_activated, gate_up, self._activation, self.arch.gated)
        weights = routing.routed_weights[chunk.rows]
        grad_gate_up = gate_up_gradient_(
            grad_activated, gate_up, self._activation, self.arch.gated, weights)
        activated = grad_activated  # overwritten by gate_up_gradient_()
        if grad_lora_hidden is not None:
            add_expert_gradients(
                call, self.expert_down, activated * weights[:, None].to(activated.dtype),
                grad_lora_hidden, upstream, chunk)
        return grad_gate_up, grad_weights

    def _chunks(self, call: LayerCall, routing: Routing) -> Iterator[ExpertChunk]:
        """Yield the chunks that are multiplied at once: a range of experts with their weights, and
        at most an even share of the rows, so that memory does not depend on the router's choice."""
        n_rows = len(routing.routed_tokens)
        ranges = cut_experts(
            self.expert_gate_up, self.expert_down, call.layer.plan.n_expert_ranges)
        most = math.ceil(n_rows / len(ranges))
        for experts, *parts in ranges:
            first, stop = 0, n_rows
            if routing.bounds:
                first, stop = routing.bounds[experts.start], routing.bounds[experts.stop]
            weights = None
            for start in range(first, stop, most):
                if weights is None:  # experts without a token are not dequantized
                    weights = [dequantize(call.layer, part, call.adapter).view(
                        len(experts), -1, part.input_width) for part in parts]
                yield ExpertChunk(experts, slice(start, min(start + most, stop)), routing, *weights)
