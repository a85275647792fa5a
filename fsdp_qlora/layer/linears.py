"""LinearSlices and FusedLinear: which part of a layer's flat parameters, and which rows of a fused
matmul, belong to each linear.

pretrained/architecture.py says which linears a model has, model/load.py fills them, lora_matmul.py
computes with them. For k_proj, with `local` its LocalBlocks on rank 0:

  packed_weights   |  q  |  k  |  v  |  o  | gate ..   linear.blocks: from the layer's first block
    ranks' shards  |   0    |   1    |   2    | ..
    k on rank 0          [==]                          local.in_linear: from k's first block
                         [==]                          local.in_shard: from the shard's first block
    one matmul     |  q  |  k  |  v  |                 linear.outputs: from the matmul's first row
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.pretrained.family_specs import LinearShape
from fsdp_qlora.quant.blocks import BLOCKSIZE, NESTED_BLOCKSIZE
from fsdp_qlora.quant.nf4 import LORA_ALIGNMENT


LARGE_WEIGHT = 2**28  # weights; a fused linear with more is dequantized one linear at a time
OPTIM_BLOCKSIZE = 256  # values of the adapter that share one scale in bitsandbytes' 8-bit AdamW


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class LinearSlices(LinearShape):
    """A linear, and the slices of the layer's parameters that have its values. Made by
    fuse_linears() only."""

    index: int  # its number in the layer: row of `offsets` and `scale_codebooks` of NestedScales,
    #             which have no rows for linears in MXFP4 (these come last)
    blocks: slice  # into the layer's `packed_weights`, in blocks of 64 weights
    nested: slice  # into `absmax` of NestedScales
    outputs: slice  # into the outputs of its FusedLinear
    # of the lora_hidden of its FusedLinear, see lora_matmul.py; None: no adapter
    lora_columns: slice | None = None
    lora_a: slice | None = None  # into the layer's `adapter`: A [lora_rank, in]
    lora_b: slice | None = None  # into the layer's `adapter`: B [out, lora_rank]
    magnitude: slice | None = None  # into the layer's `adapter`: DoRA's magnitudes [out]


@dataclasses.dataclass(frozen=True, eq=False)
class FusedLinear:
    """Linears that read the same input and are computed as one matmul, such as q, k and v."""

    dropout_site: int  # number in the layer, see drop()
    linears: tuple[LinearSlices, ...]
    in_features: int
    out_features: int
    lora_rank: int
    lora_width: int  # LoRA's hidden values of a token: lora_rank for each adapted linear
    lora_a: slice  # into the layer's `adapter`: all A, one below the other, [lora_width, in]
    bias: slice | None  # into the layer's `vectors`
    n_experts: int = 0  # number of experts, whose linears follow one another; lora_a is then
    #                     [experts, lora_width, in], and every expert uses the same columns of
    #                     lora_hidden

    @property
    def adapted(self) -> list[LinearSlices]:
        return [linear for linear in self.linears if linear.lora_columns]

    @property
    def outputs(self) -> slice:
        """Slice of the outputs of the whole FusedLinear; this one may be a subset() of it."""
        return slice(self.linears[0].outputs.start, self.linears[-1].outputs.stop)

    @property
    def blocks(self) -> slice:
        """Slice into the layer's `packed_weights`, with all its blocks."""
        return slice(self.linears[0].blocks.start, self.linears[-1].blocks.stop)

    def relative_outputs(self, linear: LinearSlices) -> slice:
        """Return the slice of a linear's outputs, counted from the first output of this
        FusedLinear."""
        start = self.outputs.start
        return slice(linear.outputs.start - start, linear.outputs.stop - start)

    def subset(self, linears: Sequence[LinearSlices]) -> FusedLinear:
        """Return a FusedLinear of some of the linears; input_width, lora_width, lora_a and bias
        stay those of the whole one."""
        n_out = sum(linear.out_features for linear in linears)
        return dataclasses.replace(self, linears=tuple(linears), out_features=n_out)

    @functools.cached_property
    def splits(self) -> tuple[FusedLinear, ...]:
        """The FusedLinears that are dequantized and multiplied at once: [self] or, if it is large,
        one per linear."""
        if self.out_features * self.in_features <= LARGE_WEIGHT:
            return (self,)
        return tuple(self.subset([linear]) for linear in self.linears)

    @property
    def input_width(self) -> int:
        """Columns of an input and of the weight: in_features plus padded_lora_width."""
        return self.in_features + self.padded_lora_width

    @property
    def padded_lora_width(self) -> int:
        return math.ceil(self.lora_width / LORA_ALIGNMENT) * LORA_ALIGNMENT

    @property
    def n_weights(self) -> int:
        return self.out_features * self.in_features


class Allocator:
    """Assigns ranges of values in a layer's parameters, one after the other."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def reserve(self, kind: str, n: int, multiple: int = 1) -> slice:
        """Return the slice of the next n values; the values after them begin at a multiple of
        `multiple`."""
        start = self.counts.get(kind, 0)
        self.counts[kind] = start + math.ceil(n / multiple) * multiple
        return slice(start, start + n)


def fuse_linears(
    dropout_site: int, linears: list[LinearShape], adapted: Collection[str],
    settings: AdapterSettings,
    vectors: dict[str, tuple[slice, tuple[int, ...]]], allocator: Allocator, n_experts: int = 0
) -> FusedLinear:
    """Return the FusedLinear of these linears; the linears named in `adapted` get an adapter.

    `vectors` is {name: (slice, shape)} of the layer's norms and biases. With n_experts, the linears
    belong to that many experts, one after the other, and all have adapters or none has.
    """
    rank = settings.rank
    n_in = linears[0].in_features
    with_adapter = [linear for linear in linears if linear.name in adapted]
    lora_width = rank * len(with_adapter) // max(1, n_experts)
    adapted_out_features = sum(linear.out_features for linear in with_adapter)
    # each begins at a multiple of OPTIM_BLOCKSIZE: no block of the optimizer's state has both A and
    # B
    sizes = (rank * len(with_adapter) * n_in, adapted_out_features * rank,
             adapted_out_features * settings.is_dora)
    lora_a, lora_b, magnitude = (allocator.reserve("adapter", n, OPTIM_BLOCKSIZE) for n in sizes)

    placed: list[LinearSlices] = []
    outputs = column = b_row = 0
    for linear in linears:
        n_out = linear.out_features
        adapter: dict[str, Any] = {}
        if linear in with_adapter:
            first_column = column % lora_width  # starts at 0 for each expert, see n_experts
            adapter = {"lora_columns": slice(first_column, first_column + rank),
                       "lora_a": _part(lora_a, column * n_in, rank * n_in),
                       "lora_b": _part(lora_b, b_row * rank, n_out * rank)}
            if settings.is_dora:
                adapter["magnitude"] = _part(magnitude, b_row, n_out)
            column, b_row = column + rank, b_row + n_out
        n_blocks = math.ceil(n_out * n_in / BLOCKSIZE)
        n_nested = 0 if linear.mxfp4 else math.ceil(n_blocks / NESTED_BLOCKSIZE)
        placed.append(LinearSlices(
            **vars(linear), **adapter, index=allocator.reserve("linears", 1).start,
            blocks=allocator.reserve("blocks", n_blocks),
            nested=allocator.reserve("nested", n_nested), outputs=slice(outputs, outputs + n_out)))
        outputs += n_out
    bias = None
    if linears[0].bias:  # the biases of a fused linear follow one another in `vectors`
        first, last = (vectors[f"{linears[i].name}.bias"][0] for i in (0, -1))
        bias = slice(first.start, last.stop)
    return FusedLinear(dropout_site, tuple(placed), n_in, outputs, rank, lora_width, lora_a, bias,
                       n_experts)


def _part(whole: slice, start: int, n: int) -> slice:
    """Return the slice of n values that starts at value `start` of the slice `whole`."""
    return slice(whole.start + start, whole.start + start + n)
