"""The shared expert of an MoE sublayer: a gated MLP for all tokens, beside the routed experts."""

from __future__ import annotations

import dataclasses

import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.activations import LimitedActivation, limited
from fsdp_qlora.kernels.norms import fused_norm_backward
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.gated_mlp import activate, down_backward
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import lora_matmul, lora_matmul_backward
from fsdp_qlora.layer.residual import apply_norm, saved_or_recomputed_inputs
from fsdp_qlora.layer.saved import SavedMoE, SavedSharedExpert
from fsdp_qlora.pretrained.architecture import Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class SharedExpert:
    """One layer's shared expert, norm(gate(x) * mlp(x)), where x is normed. In most families it has
    neither that gate nor that norm."""

    arch: Architecture
    gate_up: FusedLinear
    down: FusedLinear
    gate: str | None  # a linear whose sigmoid multiplies the output, see MoESpec.shared_gate
    post_norm: str | None  # see ExpertNormsSpec
    limit: float | None  # see LimitedActivation

    @property
    def fused_linears(self) -> tuple[FusedLinear, ...]:
        return self.gate_up, self.down

    @property
    def _activation(self) -> str | LimitedActivation:
        return limited(self.arch.activation, self.limit)

    def forward(self, call: LayerCall, saved: SavedMoE, inputs: Tensor) -> Tensor:
        """Return the output [n, hidden], from inputs [n, gate_up.input_width], and set
        saved.shared."""
        saved.shared = shared = SavedSharedExpert()
        shared.gate_up, shared.lora_hidden = lora_matmul(call, self.gate_up, inputs)
        activated = activate(call, shared, self.down, self._activation)
        out, shared.down_lora_hidden = lora_matmul(call, self.down, activated)
        if self.gate:
            shared.before_gate = out
            x = inputs[:, : self.arch.hidden_size]
            weight = call.layer.small_tensors[f"{self.gate}.weight"].to(x.dtype)
            shared.factor = F.linear(x, weight).sigmoid()
            out = out * shared.factor
        if self.post_norm:
            shared.before_norm = out
            out = apply_norm(call, self.post_norm, out)
        return out

    def backward(self, call: LayerCall, saved: SavedMoE, grad: Tensor) -> Tensor:
        """Return the gradient of x [n, hidden], from the gradient of the output."""
        arch, shared = self.arch, saved.shared
        if self.post_norm:
            weight = call.vector(self.post_norm)
            grad = fused_norm_backward(
                shared.before_norm, grad, None, weight, arch.norm_kind, arch.norm_eps)
            shared.before_norm = None
        from_gate: Tensor | int = 0  # the gradient of x through the gate
        if self.gate:
            factor = shared.factor.float()
            slope = (grad.float() * shared.before_gate.float()).sum(-1, keepdim=True)
            slope = (slope * factor * (1 - factor)).to(grad.dtype)
            from_gate = slope @ call.layer.small_tensors[f"{self.gate}.weight"].to(slope.dtype)
            grad = grad * shared.factor
            shared.before_gate = None
        grad_gate_up = down_backward(call, shared, self.down, self._activation, grad)
        x = saved_or_recomputed_inputs(call, saved, arch.mlp_norm, self.gate_up)
        grad_x = lora_matmul_backward(call, self.gate_up, shared.lora_hidden, grad_gate_up, x)
        return grad_x + from_gate
