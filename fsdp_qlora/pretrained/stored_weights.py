"""StoredWeights: the values of a model's files, whatever their formats, to load or merge them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fsdp_qlora.errors import errors_about
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import (
    MX_SUFFIXES, NF4_SUFFIXES, dequantize_stored, mxfp4_weight, scale_block, scaled_weight)


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model's files, in any format."""

    # (name) -> a tensor of the files as it is stored: whole; or this rank's rows of it, flat
    read: Callable[[str], torch.Tensor]
    names: TensorNames
    # {name of a tensor in NF4: the JSON object that bitsandbytes stored with it}, see check_files()
    nf4_states: Mapping[str, dict[str, Any]]
    dtype: torch.dtype  # in which training computes; NF4 becomes it

    def values(self, name: str, first_row: int = 0) -> torch.Tensor:
        """Return the values of a tensor: NF4 as `dtype`, MXFP4 as fp32, FP8 and INT4 multiplied by
        their scales, all others as read() returns them.

        A merge reads whole tensors. Loading reads this rank's rows, flat, from row `first_row` on;
        FP8 and INT4 then become [rows, in]. Loading does not call this for what it keeps as bytes,
        the layers' linears in NF4 and MXFP4 (copy_nf4() and copy_mxfp4() in model/load.py), nor for
        tables and norms, which are never quantized.
        """
        names = self.names
        linear = names.linears.get(name)
        if linear and linear.mxfp4:
            return mxfp4_weight(*(self.read(name + end) for end in MX_SUFFIXES))
        value = self.read(name)
        if name in self.nf4_states:
            parts = {key: self.read(key) for key in (f"{name}.{part}" for part in NF4_SUFFIXES)}
            with errors_about(f"{name}: its quantization is damaged"):
                return dequantize_stored(value, parts, self.dtype)
        if name not in names.scaled:
            return value
        scales = self.read(names.scaled[name])
        if value.dim() == 1:  # WeightReader returns rows flat
            value = value.view(-1, names.shapes[name][1])
            scales = scales.view(-1, names.shapes[names.scaled[name]][1])
        return scaled_weight(name, value, scales, first_row % scale_block(name)[0])
