"""LayerCall: what one forward or backward of a layer works with."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_qlora.kernels.elementwise import N_SITES, drop
from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.parameters import LayerParameters


class LayerCall:
    """Context of one forward or backward of a layer: the gathered adapter in the compute dtype,
    dequantized weights, and in backward the adapter's gradient.

    The gradient is summed in fp32; autograd casts it to the dtype of the parameter.
    """

    def __init__(
        self, layer: LayerParameters, batch: MicroBatch, shared_kv: tuple[Tensor, ...] = (),
        backward: bool = False, evaluation: bool = False
    ) -> None:
        self.layer, self.batch, self.arch, self.spec = layer, batch, layer.arch, layer.spec
        self.is_backward = backward
        self.evaluation = evaluation  # whether no backward will follow
        # whether autograd's graph of this forward is read: by the backward that runs it now, or
        # later, if the layer saves all
        self.saves_graph = backward or layer.saves == "all" and not evaluation
        self.tokens = slice(None)  # of the micro-batch: those that the MLP works on
        # keys and values of its kv_source; its own, where other layers read them; their gradients
        self.shared_kv = shared_kv
        self.kv_to_share: tuple[Tensor, ...] = ()
        self.grad_kv_to_share: tuple[Tensor, ...] = ()
        self.grad_shared_kv: tuple[Tensor, ...] = ()
        self.adapter = layer.adapter.detach().to(layer.vectors.dtype)
        # weights for a second use: a recomputed layer's backward runs forward() again first
        self.dequantized: dict[FusedLinear, Tensor] = {}
        self.reuses_dequantized = (
            backward and layer.plan.reuse_dequantized and layer.saves in ("mid_residual", "input"))
        if backward:
            self.grad_adapter = torch.zeros_like(self.adapter, dtype=torch.float32)

    def weight(self, fused: FusedLinear) -> Tensor:
        """[W, B] of a FusedLinear, [out, width]."""
        weight = self.dequantized.get(fused)
        if weight is None:
            weight = dequantize(self.layer, fused, self.adapter)
        if self.reuses_dequantized:
            self.dequantized[fused] = weight
        return weight

    def vector(self, name: str | None, part: str = "weight") -> Tensor | None:
        """A norm's weight or bias, or attention's sinks, by the name in the layer; or None."""
        if f"{name}.{part}" not in self.spec.vectors:
            return None
        where, shape = self.spec.vectors[f"{name}.{part}"]
        return self.layer.vectors[where].view(shape)

    @property
    def layer_input(self) -> Tensor:
        """The layer's own input of its tokens, see PerLayerInputs."""
        inputs: Tensor = self.batch.layer_inputs[self.tokens, self.layer.index]
        return inputs

    def scaled(self, x: Tensor) -> Tensor:
        """x times the layer's scalar, where the family has one."""
        if not self.arch.layer_scalar:
            return x
        return x * self.layer.small_tensors[self.arch.layer_scalar].to(x.dtype)

    def drop(self, x: Tensor, probability: float, site: int) -> Tensor:
        """x [n, width] after dropout; the same values when it is computed again."""
        if not probability or self.batch.dropout_keys is None:
            return x
        keys = self.batch.dropout_keys[self.tokens]
        return drop(x, keys, self.layer.index * N_SITES + site, probability)
