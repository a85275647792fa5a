"""BaseForMerge: the base model of a merge, and its weights, whatever formats its files have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp_qlora.files import TensorShapes
from fsdp_qlora.hashing import as_hex, tensor_checksum
from fsdp_qlora.merge.merged_layout import linears_by_tensor
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import StackedSlice, StoredTensor, read_tensor
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import NF4_SUFFIXES

OTHER_BASE = ("are not those of the base model in training. Use that one with --base_model;"
              " --allow_other_base merges into this one")


@dataclasses.dataclass
class BaseForMerge:
    """A base model, and which tensors and files the merged model will have."""

    directory: Path
    stored: dict[str, StoredTensor]  # {name: tensor in the base's files}
    names: TensorNames  # of the base; without train_config.json only its `linears` are filled in
    merged_shapes: TensorShapes  # of the merged model, file by file
    paths: dict[str, Path]  # {name: the base's file; the merged one has the same file name}
    auto_class: Any  # transformers' class that loads it
    training_dtype: torch.dtype  # dtype in which training computed
    # for weights that are in NF4 in the files, see check_files()
    nf4_states: dict[str, Any] = dataclasses.field(default_factory=dict)
    arch: Architecture | None = None  # of the text model; None: there is no train_config.json
    # {tensor: tensor_checksum()}, to tell one base from another
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    token_ids: Sequence[int] = ()  # the tokens whose rows of the embedding and head are trained

    @functools.cached_property
    def linears_by_tensor(self) -> dict[str, dict[str, StackedSlice]]:
        """{tensor of the merged model: {linear in it: its place there}}"""
        return linears_by_tensor(self.names)

    @property
    def merged_bytes(self) -> int:
        """Bytes of the merged model."""
        return sum(math.prod(shape) * dtype.itemsize
                   for shape, dtype in self.merged_shapes.values())

    def merged_shapes_by_file(self) -> dict[str, TensorShapes]:
        """Return {file name: TensorShapes of this file} of the merged model."""
        files: dict[str, TensorShapes] = {}
        for name, shape_and_dtype in self.merged_shapes.items():
            files.setdefault(self.paths[name].name, {})[name] = shape_and_dtype
        return files

    @property
    def unused(self) -> list[str]:
        """The files' tensors that are neither read nor copied."""
        used = {*self.merged_shapes, *self.names.shapes}
        return [name for name in self.stored
                if name not in used and not name.endswith(NF4_SUFFIXES)]

    def in_training_format(self, linear: str) -> bool:
        """Return whether the files have the weight as training stored it: in NF4 or MXFP4."""
        return linear in self.nf4_states or self.names.linears[linear].mxfp4

    def location(self, name: str) -> StoredTensor:
        """Return the location of a tensor, or of the rows that contain it in a larger one."""
        source = self.names.sources.get(name)
        return source.stored_rows(self.stored[source.name]) if source else self.stored[name]

    def read(self, name: str, device: str) -> torch.Tensor:
        """Return a tensor in the files' format, a linear as [out, in]. Raises ValueError if
        `checksums` has another checksum of it."""
        stored = self.location(name)
        tensor = read_tensor(stored, name, device)
        if source := self.names.sources.get(name):
            tensor = source.weight_in_rows(tensor).contiguous()
        checksum = self.checksums.get(name)
        if checksum and checksum != as_hex(int(tensor_checksum(tensor))):
            raise ValueError(f"{stored.path}: the values of {name} {OTHER_BASE}")
        return tensor

    def weight(self, name: str, device: str) -> torch.Tensor:
        """Return a tensor, or a linear as [out, in], with the values that the files store: NF4
        becomes `training_dtype`; FP8 is multiplied by its scales, as INT4 is; MXFP4 becomes fp32.
        Raises ValueError as read() does."""
        read = functools.partial(self.read, device=device)
        files = StoredWeights(read, self.names, self.nf4_states, self.training_dtype)
        return files.values(name)
