"""Weight formats in checkpoint files (NF4, MXFP4, FP8, INT4): the names of their parts, and their
values.

Loading and merging read a stored weight by the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping

import bitsandbytes as bnb
import torch

from fsdp_qlora.quant.blocks import BLOCK

NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, after that of the weight
NF4_PARTS = "absmax", "nested_absmax", "nested_quant_map", "quant_map", NF4_STATE  # all of them
MX_PARTS = "_blocks", "_scales"  # what the names of tensors in MXFP4 end with; both are bytes
FP8_BLOCK = 128  # rows and columns of a weight in FP8 that share one scale
INT4_GROUP = 32  # weights of a row in INT4 that share one scale
# what compressed-tensors calls the parts of a weight in INT4: after its name, "weight"
INT4_PACKED, INT4_SCALE, INT4_SHAPE = "_packed", "_scale", "_shape"
PER_INT32 = 8  # weights in INT4 that are in one int32


def scale_block(name: str) -> tuple[int, int]:
    """Rows and columns that share one scale, of a linear in FP8 or INT4 of this name."""
    return (1, INT4_GROUP) if name.endswith(INT4_PACKED) else (FP8_BLOCK, FP8_BLOCK)


def scaled_weight(
    name: str, value: torch.Tensor, scales: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """The weight [out, in] of a linear: FP8 values times the scales of their blocks, fp32; or INT4,
    int32 [out, in / 8], times those of their groups, rounded to the scales' dtype as
    compressed-tensors does. `first`: the row of the first block at which the values begin."""
    (rows, columns), dtype = scale_block(name), torch.float32
    if name.endswith(INT4_PACKED):  # the lowest four bits are the first weight, plus 8
        in_bytes, dtype = value.view(torch.uint8), scales.dtype
        value = torch.stack([in_bytes & 15, in_bytes >> 4], -1).flatten(1).float() - 8
    scales = scales.float().repeat_interleave(rows, 0)[first : first + len(value)]
    return (value.float() * scales.repeat_interleave(columns, 1)[:, : value.shape[1]]).to(dtype)


def dequantize_stored(
    codes: torch.Tensor, parts: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """The weight [out, in] that is stored in NF4, by bitsandbytes. `parts`: the tensors of
    NF4_PARTS, by name in the files."""
    state = bnb.functional.QuantState.from_dict(dict(parts), codes.device)
    state.dtype = dtype  # of training, whatever it was quantized from
    values: torch.Tensor = bnb.functional.dequantize_4bit(
        codes.view(torch.uint8).view(-1, 1), state)
    return values


def nf4_round_trip(weight: torch.Tensor) -> torch.Tensor:
    """The weight after quantization to NF4, with double quantization, and dequantization."""
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    values: torch.Tensor = bnb.functional.dequantize_4bit(packed, state)
    return values


def swap_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """4-bit codes in the order of bitsandbytes, high half of a byte first; MXFP4 in files has its
    low halves first."""
    return packed << 4 | packed >> 4
