"""The token-mixing sublayer: x + out_proj(mixer(in_proj(norm(x)))).

The mixers are AttentionMixer (attention_mixer.py), MLAMixer (mla.py) and AutogradMixer
(autograd_mixers.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import MaybeTensor, lora_matmul, lora_matmul_backward, widen
from fsdp_qlora.layer.residual import ResidualSum, norm_padded, norm_padded_backward
from fsdp_qlora.layer.saved import SavedMixerSublayer, SavedTokenMixer
from fsdp_qlora.pretrained.architecture import Architecture


class TokenMixer(Protocol):
    """Interface of the modules that mix tokens within each document of a micro-batch. What they
    cost is in layer_costs/, see TokenMixerCosts."""

    @property
    def saved_type(self) -> type[SavedTokenMixer]:
        """The dataclass of what the mixer saves, passed to the functions below."""

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        """The mixer's own linears, between the sublayer's two matmuls."""

    @property
    def projected_width(self) -> int:
        """Number of outputs of in_proj that the mixer reads."""

    def forward(self, call: LayerCall, saved: Any) -> Tensor:
        """Return the inputs of out_proj [n, out_proj.in_features], from saved.projected [n,
        projected_width]. May replace saved.projected; stores in `saved` what recompute_output() and
        backward() need."""

    def recompute_output(self, call: LayerCall, saved: Any) -> Tensor:
        """Return forward()'s result again."""

    def backward(self, call: LayerCall, saved: Any, grad: Tensor) -> Tensor:
        """Return the gradient of saved.projected, from the gradient of forward()'s result. Sets the
        fields of `saved` that it has used to None."""


@dataclasses.dataclass(frozen=True, eq=False)
class MixerSublayer:
    """One layer's norm, input projection, token mixer, output projection and residual sum."""

    arch: Architecture
    in_proj: FusedLinear  # q, k and v in attention
    out_proj: FusedLinear
    token_mixer: TokenMixer
    residual_sum: ResidualSum
    # a second (out_proj, token_mixer), which reads the remaining outputs of in_proj; both results
    # are added, see Family.parallel_other_mixers
    second_path: tuple[FusedLinear, TokenMixer] | None = None

    @property
    def paths(self) -> tuple[tuple[FusedLinear, TokenMixer], ...]:
        """One or two (out_proj, token_mixer), whose outputs are added."""
        first_path = self.out_proj, self.token_mixer
        return (first_path, *([self.second_path] if self.second_path else ()))

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.in_proj, *(out_proj for out_proj, _ in self.paths), *self.mixer_linears

    @property
    def mixer_linears(self) -> tuple[FusedLinear, ...]:
        """The FusedLinears of the mixers themselves."""
        return tuple(fused for _, mixer in self.paths for fused in mixer.fused_linears)

    def forward(
        self, call: LayerCall, x: Tensor, wants_sum: bool = True
    ) -> tuple[MaybeTensor, SavedMixerSublayer]:
        """Return x + the branch [tokens, hidden], None without wants_sum; and what backward()
        needs."""
        arch = self.arch
        saved = SavedMixerSublayer(x=x)
        inputs = norm_padded(call, arch.attention_norm, x, self.in_proj)
        projected, saved.lora_hidden = lora_matmul(call, self.in_proj, inputs)
        del inputs  # backward makes them again, by a pass over x
        widths = [mixer.projected_width for _, mixer in self.paths]
        saved.paths = [mixer.saved_type(projected=part) for (_, mixer), part in zip(
            self.paths, projected.split(widths, 1))]
        del projected
        needs_branch = self.residual_sum.needs_branch(wants_sum)
        branch = None
        for (out_proj, mixer), saved_path in zip(self.paths, saved.paths):
            out_inputs = widen(mixer.forward(call, saved_path), out_proj)
            added, saved_path.out_lora_hidden = lora_matmul(
                call, out_proj, out_inputs, needs_branch)
            branch = added if branch is None else branch.add_(added)
        out, saved.branch = None, None
        if branch is not None:
            out, saved.branch = self.residual_sum.add(call, x, branch, wants_sum)
        return out, saved

    def backward(
        self, call: LayerCall, saved: SavedMixerSublayer, grad: Tensor, grad_residual: Tensor,
        wants_grad_x: bool
    ) -> Tensor | None:
        """Return `grad_residual` + the gradient of x through this sublayer; None without
        wants_grad_x. `grad` is the gradient of forward()'s sum."""
        arch = self.arch
        grads = []
        upstream = self.residual_sum.backward(call, saved.branch, grad)
        saved.branch = None
        for (out_proj, mixer), saved_path in zip(self.paths, saved.paths):
            mixed = mixer.recompute_output(call, saved_path)
            grad_mixed = lora_matmul_backward(
                call, out_proj, saved_path.out_lora_hidden, upstream, mixed)
            mixed = None
            grads.append(mixer.backward(call, saved_path, grad_mixed))
        del upstream, grad_mixed
        grad_projected = torch.cat(grads, 1) if len(grads) > 1 else grads[0]
        del grads
        inputs = norm_padded(call, arch.attention_norm, saved.x, self.in_proj)
        inputs = inputs[:, : self.in_proj.in_features]
        grad_inputs = lora_matmul_backward(
            call, self.in_proj, saved.lora_hidden, grad_projected, inputs, wants_grad_x)
        del grad_projected
        if not wants_grad_x:
            return None
        return norm_padded_backward(call, arch.attention_norm, saved.x, grad_inputs, grad_residual)
