"""Weight formats in checkpoint files (NF4, MXFP4, FP8, INT4): the names of their parts, and their
values.

stored_weights.py applies them, for loading and for merging.
"""

from __future__ import annotations

from collections.abc import Mapping

import bitsandbytes as bnb
import torch

from fsdp_qlora.quant.blocks import BLOCKSIZE, MXFP4_BLOCKSIZE
from fsdp_qlora.quant.nf4 import mxfp4_values

NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, after that of the weight
NF4_SUFFIXES = "absmax", "nested_absmax", "nested_quant_map", "quant_map", NF4_STATE  # all parts
MX_SUFFIXES = "_blocks", "_scales"  # ends of the names of tensors in MXFP4; both are bytes
FP8_BLOCK = 128  # rows and columns of a weight in FP8 that share one scale
INT4_GROUP = 32  # weights of a row in INT4 that share one scale
# compressed-tensors' names of the parts of a weight in INT4, after the weight's name
INT4_PACKED, INT4_SCALE, INT4_SHAPE = "_packed", "_scale", "_shape"
PER_INT32 = 8  # INT4 weights in one int32


def scale_block(name: str) -> tuple[int, int]:
    """Return the rows and columns that share one scale in a linear with this name, in FP8 or INT4.
    """
    return (1, INT4_GROUP) if name.endswith(INT4_PACKED) else (FP8_BLOCK, FP8_BLOCK)


def scaled_weight(
    name: str, value: torch.Tensor, scales: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Return the weight [out, in] of a linear. FP8 values are multiplied by the scales of their
    blocks, fp32. INT4, int32 [out, in / 8], is multiplied by the scales of its groups and rounded
    to the scales' dtype, as compressed-tensors does. `first`: the row within the first block at
    which the values begin."""
    (rows, columns), dtype = scale_block(name), torch.float32
    if name.endswith(INT4_PACKED):  # the lowest four bits are the first weight, plus 8
        in_bytes, dtype = value.view(torch.uint8), scales.dtype
        value = torch.stack([in_bytes & 15, in_bytes >> 4], -1).flatten(1).float() - 8
    scales = scales.float().repeat_interleave(rows, 0)[first : first + len(value)]
    return (value.float() * scales.repeat_interleave(columns, 1)[:, : value.shape[1]]).to(dtype)


def mxfp4_weight(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [out, in] of a linear in MXFP4, fp32. `blocks` [out, in / 2] and `scales`
    [out, in / 32]: the rows of this linear in the tensors of MX_SUFFIXES, bytes."""
    packed = swap_nibbles(blocks.view(-1, BLOCKSIZE // 2))
    return mxfp4_values(packed, scales.view(-1, BLOCKSIZE // MXFP4_BLOCKSIZE)).view(len(blocks), -1)


def dequantize_stored(
    codes: torch.Tensor, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the weight [out, in] that is stored in NF4, dequantized by bitsandbytes. `parts`: the
    tensors of NF4_SUFFIXES, by name in the files."""
    state = bnb.functional.QuantState.from_dict(dict(parts), codes.device)
    state.dtype = dtype  # training's dtype, whatever it was quantized from
    return bnb.functional.dequantize_4bit(
        codes.view(torch.uint8).view(-1, 1), state)


def nf4_round_trip(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight after quantization to NF4, with double quantization, and dequantization."""
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCKSIZE, compress_statistics=True, quant_type="nf4")
    return bnb.functional.dequantize_4bit(packed, state)


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes in bitsandbytes' order, a byte's first code in its high half; MXFP4 in
    files has it in the low half."""
    return packed << 4 | packed >> 4
