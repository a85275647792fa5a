"""LatentMoE (Nemotron 3 Super and Ultra): the projections into and out of the experts' smaller
space.

Router and shared expert read the hidden states themselves.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import (
    fill_lora_hidden, matmul_with_lora_hidden, lora_matmul, lora_matmul_backward, widen)
from fsdp_qlora.layer.saved import SavedMoE


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertLatent:
    """The two projections around one layer's experts, see MoESpec.latent_size."""

    in_proj: FusedLinear  # from the inputs of router and shared expert to the experts' inputs
    out_proj: FusedLinear  # from the experts' weighted sum to the hidden size

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.in_proj, self.out_proj

    def project_in(self, call: LayerCall, saved: SavedMoE, x: Tensor) -> None:
        """Project x [n, hidden] to the experts' inputs [n, latent], and set saved.latent_inputs to
        them.
        """
        saved.latent_inputs, saved.latent_in_lora_hidden = lora_matmul(
            call, self.in_proj, widen(x, self.in_proj))

    def project_out(
        self, call: LayerCall, saved: SavedMoE, summed: Tensor, wants_output: bool
    ) -> Tensor | None:
        """Project the experts' sum [n, latent] to the output of `out_proj` [n, hidden]; None
        without wants_output."""
        inputs = widen(summed, self.out_proj)
        fill_lora_hidden(call, self.out_proj, inputs)
        if self.out_proj.lora_width:
            saved.latent_out_inputs = inputs
        return matmul_with_lora_hidden(call, self.out_proj, inputs) if wants_output else None

    def project_out_backward(
        self, call: LayerCall, saved: SavedMoE, grad: Tensor
    ) -> Tensor:
        """Return the gradient of the experts' sum, from the gradient of project_out()'s result."""
        inputs, saved.latent_out_inputs = saved.latent_out_inputs, None
        if inputs is None:  # without an adapter they are not read
            inputs = grad.new_empty(0, self.out_proj.input_width)
        summed, lora_hidden = inputs.tensor_split([self.out_proj.in_features], 1)
        return lora_matmul_backward(call, self.out_proj, lora_hidden, grad, summed)

    def project_in_backward(
        self, call: LayerCall, saved: SavedMoE, grad: Tensor, x: Tensor
    ) -> Tensor:
        """Return the gradient of x, from the gradient of saved.latent_inputs."""
        saved.latent_inputs = None
        return lora_matmul_backward(call, self.in_proj, saved.latent_in_lora_hidden, grad, x)
