"""stored_values(): the values that files store for a tensor, in any format, to load or merge it.

Loading does not ask for linears of layers that are in NF4 or MXFP4 in the files: copy_nf4() and
copy_mxfp4() keep their bytes. Nor does it for tables and norms, which are never quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from fsdp_qlora.errors import errors_about
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import (
    MX_SUFFIXES, NF4_SUFFIXES, dequantize_stored, mxfp4_weight, scale_block, scaled_weight)


def stored_values(
    name: str, read: Callable[[str], torch.Tensor], names: TensorNames,
    nf4_states: Collection[str], dtype: torch.dtype, first_row: int = 0
) -> torch.Tensor:
    """Return the values of the tensor `name`, or of those of its rows that `read` returns, the
    first of which is `first_row`. `read(name)` returns a tensor of the files: this one, or a part
    of it, such as its scales. If its result is flat, so are values that are not quantized.
    `nf4_states`: the names of the tensors in NF4, which become `dtype`. MXFP4 becomes fp32; FP8 and
    INT4 are multiplied by their scales."""
    linear = names.linears.get(name)
    if linear and linear.mxfp4:
        return mxfp4_weight(*(read(name + end) for end in MX_SUFFIXES))
    value = read(name)
    if name in nf4_states:
        parts = {key: read(key) for key in (f"{name}.{part}" for part in NF4_SUFFIXES)}
        with errors_about(f"{name}: its quantization is damaged"):
            return dequantize_stored(value, parts, dtype)
    if name not in names.scaled:
        return value
    scales = read(names.scaled[name])
    if value.dim() == 1:  # WeightReader returns rows flat
        value = value.view(-1, names.shapes[name][1])
        scales = scales.view(-1, names.shapes[names.scaled[name]][1])
    return scaled_weight(name, value, scales, first_row % scale_block(name)[0])
