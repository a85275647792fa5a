"""BaseForMerge: the base model of a merge, and its weights, whatever formats its files have."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdp_qlora.hashing import as_hex, tensor_checksum
from fsdp_qlora.merge.merged_layout import MergedLayout
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import StoredTensor, read_tensor
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import NF4_SUFFIXES

OTHER_BASE = ("are not those of the base model in training. Use that one with --base_model;"
              " --allow_other_base merges into this one")


def is_multimodal(model_config: transformers.PreTrainedConfig) -> bool:
    """Return True if the config contains another one, that of its language model."""
    return hasattr(model_config, "text_config")


def auto_class(model_config: transformers.PreTrainedConfig) -> Any:
    """Return transformers' class that loads the model with this config."""
    return (transformers.AutoModelForMultimodalLM if is_multimodal(model_config) else
            transformers.AutoModelForCausalLM)


@dataclasses.dataclass
class BaseForMerge:
    """A base model, and the layout of the model that is merged from it."""

    directory: Path
    stored: dict[str, StoredTensor]  # {name: tensor in the base's files}
    names: TensorNames  # of the base; without train_config.json only its `linears` are filled in
    merged_layout: MergedLayout
    auto_class: Any  # transformers' class that loads both
    training_dtype: torch.dtype  # dtype in which training computed
    # {name of a tensor in NF4: what bitsandbytes stored with it}, from check_files()
    nf4_states: dict[str, Any] = dataclasses.field(default_factory=dict)
    arch: Architecture | None = None  # of the text model; None: there is no train_config.json
    # {tensor: tensor_checksum()}, to tell one base from another
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    token_ids: Sequence[int] = ()  # the tokens whose rows of the embedding and head are trained

    @property
    def run_arch(self) -> Architecture:
        """`arch`, in the merge of a run."""
        assert self.arch, "the base of a run has one"
        return self.arch

    @property
    def unused(self) -> list[str]:
        """The files' tensors that are neither read nor copied."""
        used = {*self.merged_layout.shapes, *self.names.shapes}
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

    def values(self, name: str, device: str) -> torch.Tensor:
        """Return the values of a tensor, whatever its format, a linear as [out, in]: those of
        StoredWeights, which calls read(). Raises ValueError as read() does."""
        read = functools.partial(self.read, device=device)
        files = StoredWeights(read, self.names, self.nf4_states, self.training_dtype)
        return files.values(name)


def replace_rows(
    table: torch.Tensor, vocab_size: int, ids: Sequence[int], rows: torch.Tensor,
) -> torch.Tensor:
    """Return a copy of `table` with `rows` as those of the tokens `ids`. If it has fewer than
    `vocab_size` rows, rows are added first, each the mean of the table's own rows, as in training,
    see fill_added_rows() in lora/initial_token_rows.py."""
    mean = torch.stack([part.double().sum(0) for part in table.split(2**14)]).sum(0) / len(table)
    added = mean.to(table.dtype).expand(vocab_size - len(table), -1)
    table = torch.cat([table, added])
    table[torch.tensor(ids, device=table.device)] = rows.to(table)
    return table
