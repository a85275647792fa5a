"""LayerCall: what a layer's forward or backward works with; LayerInputs: what all layers read."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.kernels.attention import AttentionKernel
from fsdp_qlora.kernels.dropout import N_SITES, drop
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.offload import ActivationStore
from fsdp_qlora.layer.parameters import LayerParameters
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.micro_batch.segments import Segments


@dataclasses.dataclass(frozen=True, eq=False)
class LayerInputs:
    """What all layers read in one forward of a micro-batch, and in its backward."""

    batch: MicroBatch
    attention_kernels: dict[str, AttentionKernel]  # {one of ATTENTION_TYPES: kernel}
    recurrence: Callable[..., Tensor] | None  # kernel of a mixer with a state; None: there is none
    store: ActivationStore  # where layers put what they save
    rope_tables: dict[int | None, Any]  # {index of arch.ropes, or None: rope_tables()}
    segments: Segments | None  # the keys that attention reads; None: see MicroBatch.context_shard
    per_layer_inputs: Tensor | None  # all layers' own inputs, see per_layer_inputs()


class LayerCall:
    """Context of one forward or backward of a layer: the gathered adapter in the compute dtype,
    dequantized weights and, in backward, the adapter's gradient.

    The gradient is summed in fp32; autograd casts it to the parameter's dtype.
    """

    def __init__(
        self, layer: LayerParameters, inputs: LayerInputs, kv_in: tuple[Tensor, ...] = (),
        is_backward: bool = False, is_evaluation: bool = False
    ) -> None:
        # what the call reads
        self.layer, self.arch, self.layer_spec = layer, layer.arch, layer.spec
        self.inputs, self.batch = inputs, inputs.batch
        self.adapter = layer.adapter.detach().to(layer.vectors.dtype)
        self.kv_in = kv_in  # keys and values of the kv_source
        self.is_backward = is_backward
        self.is_evaluation = is_evaluation  # True: no backward will follow
        policy = layer.save_policy
        # True if autograd's graph of this forward is needed: by the backward that is running it
        # now, or later, if the layer saves everything
        self.needs_graph = is_backward or policy.mixer and not is_evaluation
        self.saves_attention = policy.attention and not is_evaluation
        self.reuses_dequantized = (
            is_backward and layer.plan.reuse_dequantized and not policy.mlp)
        # what changes while the sublayers run
        self.tokens = slice(None)  # the tokens of the micro-batch that the MLP works on
        self.dropout_seeds = self.batch.dropout_seeds  # see drop()
        # weights to use twice: a recomputed layer's backward first runs forward() again
        self.dequantized: dict[FusedLinear, Tensor] = {}
        # pairs of results of attention_with_lse(), one for each group of heads; none if the
        # micro-batch's kernel does not give them
        self.attention_results: list[tuple[Tensor, Tensor]] = []  # made in forward, to be saved
        self.saved_attention_results: list[tuple[Tensor, Tensor]] = []  # in backward, until used
        # what the sublayers return through the call
        self.kv_out: tuple[Tensor, ...] = ()  # this layer's, which other layers read
        self.grad_kv_out: tuple[Tensor, ...] = ()  # from those layers
        self.grad_kv_in: tuple[Tensor, ...] = ()  # for the kv_source
        if is_backward:
            self.grad_adapter = torch.zeros_like(self.adapter, dtype=torch.float32)

    def for_visible_keys(self) -> LayerCall:
        """Return the call for the tokens whose keys this rank's queries see: with context
        parallelism and dropout a copy that has their dropout seeds and adds to the same gradient,
        otherwise this call. All ranks must call this."""
        shard = self.batch.context_shard
        if not (shard and self.layer_spec.dropout):
            return self
        call = copy.copy(self)
        call.dropout_seeds = shard.key_dropout_seeds
        return call

    def weight(self, fused: FusedLinear) -> Tensor:
        """Return [W, B] of a FusedLinear, [out, input_width]."""
        weight = self.dequantized.get(fused)
        if weight is None:
            weight = dequantize(self.layer, fused, self.adapter)
        if self.reuses_dequantized:
            self.dequantized[fused] = weight
        return weight

    def vector(self, name: str | None, part: str = "weight") -> Tensor | None:
        """Return a norm's weight or bias by its name in the layer; None if the layer has none or
        `name` is None."""
        if name is None or f"{name}.{part}" not in self.layer_spec.vectors:
            return None
        where, shape = self.layer_spec.vectors[f"{name}.{part}"]
        return self.layer.vectors[where].view(shape)

    @property
    def per_layer_input(self) -> Tensor:
        """The layer's own input for its tokens, see PerLayerInputsSpec."""
        return self.inputs.per_layer_inputs[self.tokens, self.layer.index]

    def times_layer_scalar(self, x: Tensor) -> Tensor:
        """Return x times the layer's scalar, if the family has one."""
        if not self.arch.layer_scalar:
            return x
        return x * self.layer.small_tensors[self.arch.layer_scalar].to(x.dtype)

    def drop(self, x: Tensor, probability: float, site: int) -> Tensor:
        """Return x [n, width] after dropout. A recomputation drops the same values."""
        if not probability or self.dropout_seeds is None:
            return x
        seeds = self.dropout_seeds[self.tokens]
        return drop(x, seeds, self.layer.index * N_SITES + site, probability)
