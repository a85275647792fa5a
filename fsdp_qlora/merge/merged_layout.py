"""MergedLayout: names, shapes, dtypes and files of a merged model's tensors, and where its linears
are in them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from fsdp_qlora.files import TensorShapes
from fsdp_qlora.pretrained.reader import FLOATS, StackedSlice, StoredTensor
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import INT4_PACKED, INT4_SHAPE, NF4_SUFFIXES
from fsdp_qlora.quant.blocks import MXFP4_BLOCKSIZE


@dataclasses.dataclass(frozen=True)
class MergedLayout:
    """The tensors of a merged model: dicts by their names."""

    shapes: TensorShapes  # file by file
    paths: dict[str, Path]  # the base's file; the merged one has the same file name
    # {name: {name in the base of a linear in this tensor: its place there}}
    linears_in: dict[str, dict[str, StackedSlice]]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())

    def shapes_by_file(self) -> dict[str, TensorShapes]:
        """Return {file name: TensorShapes of this file}."""
        files: dict[str, TensorShapes] = {}
        for name, shape_and_dtype in self.shapes.items():
            files.setdefault(self.paths[name].name, {})[name] = shape_and_dtype
        return files


def add_other_parts(names: TensorNames, stored: dict[str, StoredTensor]) -> None:
    """Add the tensors of the parts that a multimodal model has besides its text model, which a
    merge copies, and the scales of those in FP8. Raises ValueError for what it cannot copy."""
    for name, tensor in stored.items():
        if name in names.shapes or name.startswith(names.prefix):
            continue
        if name.endswith((*NF4_SUFFIXES, INT4_PACKED)):
            raise ValueError(f"{tensor.path}: {name} is of a weight in 4-bit outside the text"
                             " model's layers, which is not merged")
        names.shapes[name] = tensor.shape
        if (scales := f"{name}_scale_inv") in stored:  # as of Qwen 3.5's mtp.*
            names.scaled[name] = scales
        elif tensor.dtype.startswith("F8"):
            raise ValueError(f"{tensor.path}: {name} is {tensor.dtype} without {scales}, which is"
                             " not merged")
        elif tensor.dtype not in (*FLOATS, "I64"):
            raise ValueError(f"{tensor.path}: {name} is {tensor.dtype}, which is not merged outside"
                             " the text model")


def make_merged_layout(
    stored: dict[str, StoredTensor], names: TensorNames, nf4_states: dict[str, Any],
    vocab_size: int
) -> MergedLayout:
    """Return the layout of the model that is merged from these tensors. Experts in MXFP4 become
    [experts, in, out], the form of gpt-oss, the only family with MXFP4."""
    shapes, paths = {}, {}
    # files may have a tied lm_head, which is not in names.shapes; scales go into their weights
    used = {*names.shapes, names.lm_head} - {*names.scaled.values()}
    for name, tensor in in_file_order(stored):
        if name not in used:
            continue
        shape = names.shapes.get(name, tensor.shape)  # not the stored one, which in NF4 is bytes
        if name in (names.embedding, names.lm_head):  # more rows, if tokens were added
            shape = vocab_size, shape[1]
        if name.startswith(names.layer_prefix):  # several tensors of INT4 or MXFP4 become one
            if name.endswith(("_scales", INT4_SHAPE)):
                continue
            if name.endswith(INT4_PACKED):
                linear = names.linears[name]
                shape = linear.out_features, linear.in_features
                name = name.removesuffix(INT4_PACKED)
            elif name.endswith("_blocks"):
                shape = shape[0], shape[2] * MXFP4_BLOCKSIZE, shape[1]
                name = name.removesuffix("_blocks")
        # training used these in fp32, so they stay in fp32; transformers also keeps some of them in
        # fp32, such as a router's correction, and rounds the others itself
        stays_fp32 = (name in names.small_tensors and name not in nf4_states
                      and tensor.dtype == "F32")
        shapes[name] = shape, torch.float32 if stays_fp32 else merged_dtype(tensor)
        paths[name] = tensor.path
    return MergedLayout(shapes, paths, find_linears(names))


def find_linears(names: TensorNames) -> dict[str, dict[str, StackedSlice]]:
    """Return {tensor of the merged model: {linear in it: its place there}} for all linears. A
    tensor is one linear, or stacks several (experts; q, k and v). Names and shapes are those of
    make_merged_layout(), above: experts in MXFP4 become [experts, in, out]."""
    tensors: dict[str, dict[str, StackedSlice]] = {}
    for name, linear in names.linears.items():
        n_out, n_in = linear.out_features, linear.in_features
        if linear.mxfp4:
            source = names.sources[f"{name}_blocks"]
            assert names.shapes[source.name][1] == n_out, "gate and up are one linear"
            expert, n_experts = source.rows.start // n_out, source.n_rows // n_out
            place = StackedSlice(source.name.removesuffix("_blocks"), n_experts * n_in,
                                 range(expert * n_in, (expert + 1) * n_in), range(n_out))
        else:
            alone = StackedSlice(name.removesuffix(INT4_PACKED), n_out, range(n_out))
            place = names.sources.get(name, alone)
        tensors.setdefault(place.name, {})[name] = place
    return tensors


def merged_dtype(tensor: StoredTensor) -> torch.dtype:
    """Return the dtype of most tensors of a merged model: int64, such as the count of a BatchNorm
    in an audio tower, stays; all others become bf16."""
    return torch.int64 if tensor.dtype == "I64" else torch.bfloat16


def in_file_order(stored: dict[str, StoredTensor]) -> list[tuple[str, StoredTensor]]:
    """Return all (name, StoredTensor), file by file, in the order in which they are stored."""
    return sorted(stored.items(), key=lambda item: (item[1].path, item[1].start))
