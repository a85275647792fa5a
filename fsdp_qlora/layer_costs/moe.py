"""What the MoE sublayer costs: routed experts, shared expert and LatentMoE."""

from __future__ import annotations

import dataclasses
import functools
import math

from fsdp_qlora.layer.latent_moe import ExpertLatent
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.mlp import token_slices
from fsdp_qlora.layer.moe import MoESublayer
from fsdp_qlora.layer.shared_expert import SharedExpert
from fsdp_qlora.layer_costs.lora_matmul import dora_bytes
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import MoESpec


GROUPED_SPEED = 0.66  # speed of grouped matmuls relative to large matmuls, on an H200


@dataclasses.dataclass(frozen=True, eq=False)
class MoECosts:
    """The costs of a MoESublayer, an MLPSublayerCosts."""

    sublayer: MoESublayer

    matmul_speed = GROUPED_SPEED

    @property
    def arch(self) -> Architecture:
        return self.sublayer.arch

    @property
    def moe(self) -> MoESpec:
        return self.sublayer.moe

    @property
    def gate_up(self) -> FusedLinear:
        return self.sublayer.expert_gate_up

    @property
    def down(self) -> FusedLinear:
        return self.sublayer.expert_down

    @functools.cached_property
    def shared(self) -> SharedExpertCosts | None:
        return SharedExpertCosts(self.sublayer.shared) if self.sublayer.shared else None

    @functools.cached_property
    def expert_latent(self) -> ExpertLatentCosts | None:
        latent = self.sublayer.expert_latent
        return ExpertLatentCosts(latent) if latent else None

    @property
    def _dense_weights(self) -> int:
        """Weights that all tokens use: all but the routed experts'."""
        return sum(fused.n_weights for fused in self.sublayer.dense_linears)

    @property
    def choice_values(self) -> int:
        return self.moe.top_k

    @property
    def _gate_up_size(self) -> int:
        """Outputs of one expert's gate and up together."""
        return self.gate_up.out_features // self.moe.n_experts

    @property
    def saved_values(self) -> int:
        arch, moe = self.arch, self.moe
        values = moe.top_k * self._gate_up_size + arch.hidden_size * (not arch.parallel_residual)
        # the Routing: scores in fp32; for each row, four int64 numbers and two fp32 weights
        values += 2 * moe.n_experts + (4 * 4 + 2 * 2) * moe.top_k
        if self.shared:
            values += self.shared.saved_values
        if moe.norms:  # the experts' output
            values += arch.hidden_size
        if self.expert_latent:
            values += self.expert_latent.saved_values
        return values + arch.hidden_size * (arch.mlp_post_norm is not None)

    def live_bytes(self, plan: Plan, recomputed: bool) -> int:
        moe, hidden, n_tokens = self.moe, self.arch.hidden_size, plan.micro_batch_tokens
        n = token_slices(n_tokens, plan.expert_slice_tokens)[0].stop if recomputed else n_tokens
        values = max(self._values_in_experts(n, plan, recomputed),
                     self._values_after_experts(n, recomputed))
        if recomputed and self.shared:
            values += n * self.shared.recomputed_values
        if n < n_tokens:  # gradients: of the sum and of finished slices, which are joined at last
            values = max(values + 2 * (n_tokens - n) * hidden, 3 * n_tokens * hidden)
        if moe.norms:  # the experts' inputs, again for A's gradient; the gradient of their outputs
            values += n * hidden * (2 + 2 * recomputed + (self.gate_up.lora_width > 0))
        if self.sublayer.sum_factor != 1:  # the gradient of the sum before its factor
            values += n * hidden
        if self.expert_latent:
            values += n * (self.expert_latent.live_values
                           + recomputed * self.expert_latent.saved_values)
            values += max(fused.out_features * fused.input_width
                          for fused in self.expert_latent.projections.fused_linears)
        # the router, in fp32: five values per row, three tensors as large as its scores, and each
        # expert's rows, counted twice
        router = 5 * n * moe.top_k + 3 * n * moe.n_experts + 2 * moe.n_experts
        itemsize = plan.dtype.itemsize
        dora = max((dora_bytes(fused, n, itemsize, fused.in_features)
                    for fused in self.sublayer.dense_linears), default=0)
        return values * itemsize + 4 * router + dora

    def _values_in_experts(self, n: int, plan: Plan, recomputed: bool) -> int:
        """Values alive while the experts of n tokens run: a chunk's rows and weights, the gradient
        of the sum and, where they are needed, the experts' inputs."""
        gate_up, down, rows = self.gate_up, self.down, n * self.moe.top_k
        row_values = self._row_values(recomputed)
        chunk = rows * row_values
        if gate_up.lora_width:  # A's gradient, also in fp32
            chunk += 3 * self.moe.n_experts * gate_up.lora_width * gate_up.in_features
        weights = sum(fused.out_features * fused.input_width for fused in (gate_up, down))
        values = math.ceil(chunk / plan.n_expert_ranges) + math.ceil(weights / plan.n_expert_ranges)
        has_inputs = recomputed or gate_up.lora_width > 0
        values += n * self.arch.hidden_size * (1 + has_inputs + self._has_branch_gradient)
        if plan.n_expert_ranges > 1:
            # and all rows' outputs in forward, their gradients in backward, when the first range's
            # saved gate and up are gone
            only_backward = row_values - gate_up.input_width - down.input_width
            gone = 0 if recomputed else min(self._gate_up_size, only_backward)
            values += max(0, rows * gate_up.in_features - rows * gone // plan.n_expert_ranges)
        return values

    def _row_values(self, recomputed: bool) -> int:
        """Values alive per row of a chunk; plus gate and up, if they are recomputed, and if their
        gradient is a new tensor."""
        gate_up, down = self.gate_up.input_width, self.down.input_width
        values = gate_up + down
        if self.gate_up.lora_width:  # the rows' gradient, its part from lora_hidden, their sum
            values = max(3 * gate_up, gate_up + 3 * down)
        return values + self._gate_up_size * (recomputed + bool(self.moe.clamped_glu))

    def _values_after_experts(self, n: int, recomputed: bool) -> int:
        """Values alive after the experts of n tokens: the gradient of their inputs beside that of
        the rows, or beside the shared expert's; less the saved gate and up, which are gone."""
        rows = n * self.moe.top_k
        shared = self.shared.live_values if self.shared else 0
        values = max(rows * self.gate_up.in_features, n * shared)
        values += n * self.arch.hidden_size * (3 + recomputed + self._has_branch_gradient)
        return values if recomputed else values - rows * self._gate_up_size

    @property
    def _has_branch_gradient(self) -> bool:
        """True if the gradient of the branch is another tensor than that of the sum."""
        return bool(self.arch.mlp_post_norm) or self.arch.residual_multiplier != 1

    @property
    def active_weights(self) -> float:
        share = self.moe.top_k / self.moe.n_experts
        return self._dense_weights + share * (self.gate_up.n_weights + self.down.n_weights)

    @property
    def recomputed_weights(self) -> float:
        share = self.moe.top_k / self.moe.n_experts
        return self._dense_weights + share * self.gate_up.n_weights

    @property
    def elementwise_values(self) -> int:
        """Counted, not measured."""
        # per row, each way: gathered, put in its place, summed, 2 + 2 + 1; all gates: 1.5 + 4.5
        hidden, top_k = self.arch.hidden_size, self.moe.top_k
        width = self.gate_up.in_features
        rows = top_k * (10 * width + 6 * self._gate_up_size)
        if self.gate_up.lora_width:  # narrow matmuls, which take as long as this; fitted
            rows += top_k * 40 * (width + self._gate_up_size // 2)
        if self.moe.norms:  # four more norms: of both experts' outputs, and the router's and
            # routed experts' own norms of `mlp_input`
            rows += 20 * hidden
        return 15 * hidden + rows


@dataclasses.dataclass(frozen=True, eq=False)
class SharedExpertCosts:
    """The costs of a SharedExpert. The properties count values per token."""

    expert: SharedExpert

    @property
    def saved_values(self) -> int:
        """Values saved for backward, if nothing is recomputed."""
        expert, hidden = self.expert, self.expert.arch.hidden_size
        values = (expert.gate_up.out_features + expert.gate_up.padded_lora_width
                  + expert.down.padded_lora_width)
        values += (hidden + 1) * (expert.gate is not None)
        return values + hidden * (expert.post_norm is not None)

    @property
    def recomputed_values(self) -> int:
        """Values that a recomputed forward() adds to those alive in backward."""
        return self.expert.gate_up.out_features + self.expert.down.input_width

    @property
    def live_values(self) -> int:
        """Values alive in backward in addition: the gradients of down's inputs and of x."""
        return self.expert.down.input_width + self.expert.arch.hidden_size


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLatentCosts:
    """The costs of an ExpertLatent. The properties count values per token."""

    projections: ExpertLatent

    @property
    def saved_values(self) -> int:
        """Values saved from forward to backward, if nothing is recomputed."""
        in_proj, out_proj = self.projections.fused_linears
        out_inputs = out_proj.input_width if out_proj.lora_width else 0
        return in_proj.out_features + in_proj.padded_lora_width + out_inputs

    @property
    def live_values(self) -> int:
        """Values alive in backward in addition: both inputs, and the gradients of the latent and of
        its sum."""
        in_proj, out_proj = self.projections.fused_linears
        return in_proj.input_width + out_proj.input_width + 2 * in_proj.out_features
