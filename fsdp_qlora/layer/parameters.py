"""The parameters of a layer: three flat ones, and the slices of them that each weight has.

FSDP2's work on the host is by parameter, so a layer has three only, whatever it computes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fsdp_qlora.layer.linears import OPTIM_BLOCKSIZE, FusedLinear, LinearSlices
from fsdp_qlora.plan import SAVE_ALL, SAVE_INPUT, Plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.quant.blocks import FourBitBlocks, NestedScales


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ParameterLayout:
    """The contents of a layer's three parameters."""

    arch: Architecture  # of layers of this kind, see Architecture.of_kind()
    fused_linears: tuple[FusedLinear, ...]  # slices of `packed_weights` and `adapter`
    # {name in the layer: (slice of `vectors`, shape)} of norms and biases
    vectors: dict[str, tuple[slice, tuple[int, ...]]]
    # {name in the layer: shape} of routers, sinks, mixers' convolutions and the like
    small_tensors: dict[str, tuple[int, ...]]
    n_blocks: int  # blocks of `packed_weights`
    n_vector_values: int  # values of `vectors`
    n_adapter_values: int  # values of `adapter`, a multiple of OPTIM_BLOCKSIZE
    scaling: float  # factor of B @ A
    dropout: float  # probability, for the adapters' inputs
    dora: bool

    @functools.cached_property
    def linears(self) -> list[LinearSlices]:
        """The LinearSlices of all fused linears."""
        return [linear for fused in self.fused_linears for linear in fused.linears]

    @property
    def scales_per_block(self) -> int:
        """Bytes of scales per block, one per scale, see FourBitBlocks."""
        return 2 if any(linear.mxfp4 for linear in self.linears) else 1

    @functools.cached_property
    def n_nested_values(self) -> int:
        """Number of values of the layer's NestedScales: second-level absmax of all blocks, and an
        offset and a table for each linear."""
        absmax_counts = [linear.nested.stop - linear.nested.start for linear in self.linears]
        return sum(n + (1 + 256) * (n > 0) for n in absmax_counts)

    def adapter_slices(self) -> dict[tuple[str, str], tuple[slice, tuple[int, ...]]]:
        """Return {(linear's name, PEFT's key): (slice of `adapter`, shape)}."""
        parts: dict[tuple[str, str], tuple[slice, tuple[int, ...]]] = {}
        for linear in self.linears:
            if linear.lora_columns:
                rank = linear.lora_columns.stop - linear.lora_columns.start
                parts[linear.name, "lora_A.weight"] = linear.lora_a, (rank, linear.in_features)
                parts[linear.name, "lora_B.weight"] = linear.lora_b, (linear.out_features, rank)
            if linear.magnitude:
                key = linear.name, "lora_magnitude_vector"
                parts[key] = linear.magnitude, (linear.out_features,)
        return parts


class LayerParameters(nn.Module):
    """The tensors of one layer: `packed_weights`, the weights of all linears; `vectors`, norms and
    biases; `adapter`, the only trainable one; and small tensors that every rank has whole."""

    def __init__(self, spec: ParameterLayout, index: int, plan: Plan) -> None:
        super().__init__()
        arch = spec.arch
        self.arch, self.spec, self.index, self.plan = arch, spec, index, plan
        self.save_policy = plan.save_policy(index)
        # index of the layer whose keys and values it reads; None: it has its own
        self.kv_source = arch.kv_sources[index]
        self.is_kv_source = index in arch.kv_sources
        assert not arch.parallel_residual or self.save_policy in (SAVE_ALL, SAVE_INPUT), (
            "the MLP reads x")
        self.nested: NestedScales | None = None  # whole on every rank
        self.small_tensors: dict[str, Tensor] = {}  # by name in the layer; whole on every rank
        self.balance: Tensor | None = None  # sums over this step's micro-batches, see add_balance()
        # DoRA: {adapted linear's name: norms of the rows of W, fp32}
        self.weight_norms: dict[str, Tensor] = {}

        def parameter(
            n: int, multiple: int, make: Callable[..., Tensor], trained: bool = False
        ) -> nn.Parameter:
            multiple *= plan.shard_group_size  # padded, so that FSDP2 shards evenly
            n = math.ceil(n / multiple) * multiple
            return nn.Parameter(make(n, device="meta"), requires_grad=trained)

        dtype = plan.dtype
        # this rank's shard while the model loads; gathered by FSDP2's hooks while the layer runs
        self.packed_weights = parameter(spec.n_blocks, 1, functools.partial(
            FourBitBlocks.zeros, scales_per_block=spec.scales_per_block))
        self.vectors = parameter(
            spec.n_vector_values, 1, functools.partial(torch.empty, dtype=dtype))
        self.adapter = parameter(spec.n_adapter_values, OPTIM_BLOCKSIZE, torch.empty, trained=True)
