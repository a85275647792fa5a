"""Dequantize a layer's linears from NF4 or MXFP4, with their adapters' B beside them.

quant/nf4.py has the codes and the kernel.
"""

from __future__ import annotations

import functools
import math

import bitsandbytes as bnb
import torch
from torch import Tensor

from fsdp_qlora.layer.linears import FusedLinear, LinearSlices
from fsdp_qlora.layer.parameters import LayerParameters
from fsdp_qlora.quant.blocks import BLOCKSIZE, NESTED_BLOCKSIZE, FourBitBlocks, NestedScales
from fsdp_qlora.quant.nf4 import launch_dequantize, mxfp4_codebooks, mxfp4_values, nf4_codebook
from fsdp_qlora.quant.triton_trial import why_no_triton


def dequantize(layer: LayerParameters, fused: FusedLinear, adapter: Tensor) -> Tensor:
    """Return [W, B] of a FusedLinear, [out, input_width], in the dtype of `adapter`, the layer's
    whole adapter.

    W contains the weights of its linears, one below the other, bit for bit as bitsandbytes
    dequantizes NF4 and transformers MXFP4. B of each linear is in its lora_columns, which are 0
    for the other linears. One kernel writes both, so B needs no launch of its own.
    """
    weight = adapter.new_empty(fused.out_features, fused.input_width)
    blocks: FourBitBlocks = layer.packed_weights
    packed, scales = blocks.packed[fused.blocks], blocks.scales[fused.blocks]
    nested: NestedScales = layer.nested
    in_mxfp4 = fused.linears[0].mxfp4
    if weight.is_cuda and not why_no_triton():
        codebook, scale_codebooks = mxfp4_codebooks(weight.device)
        if not in_mxfp4:
            codebook, scale_codebooks = nf4_codebook(weight.device), nested.scale_codebooks
        launch_dequantize(
            packed, scales, nested.absmax, nested.offsets, scale_codebooks, codebook, adapter,
            linears_table(fused, weight.device), weight, fused.in_features, fused.lora_rank,
            n_linears=len(fused.linears), blocks_per_linear=blocks_per_linear(fused),
            in_mxfp4=in_mxfp4)
        return weight
    weights, lora_b = weight.split([fused.in_features, fused.padded_lora_width], 1)
    lora_b.zero_()
    for linear in fused.linears:
        outputs = fused.relative_outputs(linear)
        first = fused.blocks.start
        part = slice(linear.blocks.start - first, linear.blocks.stop - first)
        if in_mxfp4:
            weights[outputs] = mxfp4_values(packed[part], scales[part]).view(-1, fused.in_features)
        else:
            weights[outputs] = nf4_values(packed[part], scales[part], nested, linear, weight.dtype)
        if linear.lora_columns:
            lora_b[outputs, linear.lora_columns] = adapter[linear.lora_b].view(-1, fused.lora_rank)
    return weight


def nf4_values(
    packed: Tensor, scales: Tensor, nested: NestedScales, linear: LinearSlices, dtype: torch.dtype
) -> Tensor:
    """Return the weights [out, in] of one NF4 linear, dequantized from its blocks by bitsandbytes.
    """
    shape = linear.out_features, linear.in_features
    nested_state = bnb.functional.QuantState(
        absmax=nested.absmax[linear.nested], code=nested.scale_codebooks[linear.index],
        blocksize=NESTED_BLOCKSIZE, dtype=torch.float32)
    state = bnb.functional.QuantState(
        absmax=scales[:, 0].contiguous(), code=nf4_codebook(packed.device), blocksize=BLOCKSIZE,
        quant_type="nf4", shape=torch.Size(shape), dtype=dtype,
        offset=nested.offsets[linear.index], state2=nested_state)
    codes = packed.view(-1, 1)[: math.prod(shape) // 2]
    return bnb.functional.dequantize_4bit(codes, state)


@functools.lru_cache(None)
def linears_table(fused: FusedLinear, device: torch.device) -> Tensor:
    """Return dequantize_kernel's table of the linears, int32 [linears, 7], whose columns are in
    quant/nf4.py."""
    table = []
    for linear in fused.linears:
        outputs = fused.relative_outputs(linear)
        b_start = linear.lora_b.start if linear.lora_b else 0
        column = linear.lora_columns.start if linear.lora_columns else -1
        table.append([linear.blocks.start - fused.blocks.start, outputs.start, linear.nested.start,
                      linear.index, b_start, column, outputs.stop])
    return torch.tensor(table, dtype=torch.int32, device=device)


@functools.lru_cache(None)
def blocks_per_linear(fused: FusedLinear) -> int:
    """Return the number of blocks of each linear if all have the same size, as experts do; else 0.
    """
    sizes = {(linear.blocks.stop - linear.blocks.start, linear.out_features)
             for linear in fused.linears}
    return sizes.pop()[0] if len(sizes) == 1 else 0
