"""Read and write adapters in PEFT's file format.

--init_adapter and the merge read by the same functions. peft_names.py has the names of the tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.files import (
    ADAPTER_CONFIG, ADAPTER_FILES, ADAPTER_WEIGHTS, read_json, write_atomic)
from fsdp_qlora.lora.peft_names import (
    AdapterSlice, AdapterSlices, adapter_shapes, expert_slices, make_lora_config, token_row_names,
    token_row_settings)
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import AdapterForm
from fsdp_qlora.pretrained.reader import FLOATS, StoredTensor, read_header, read_tensor

IGNORED = set("""lora_dropout target_modules exclude_modules peft_version task_type revision
    base_model_name_or_path inference_mode auto_mapping layers_pattern megatron_core
    qalora_group_size eva_config""".split())  # settings of adapter_config.json that change no value
# values of init_lora_weights that leave the base unchanged, unlike PiSSA, OLoRA and others
PLAIN_INITS = True, False, None, "gaussian", "eva", "orthogonal"


def with_adapter_form(arch: Architecture, directory: Path) -> Architecture:
    """Return `arch` with the AdapterForm in which the adapter in this directory was saved, which
    may be an older one than its family's. Raises ValueError or OSError if there is no adapter."""
    # for dense models, too: these two raise if there is no adapter
    settings = read_json(directory / ADAPTER_CONFIG)
    stored = read_header(directory / ADAPTER_WEIGHTS)
    if not arch.moe:
        return arch
    form: AdapterForm = "modules"
    if settings.get("target_parameters"):
        form = "parameters" if any(".experts.0." in name for name in stored) else "stacked"
    return dataclasses.replace(arch, moe=dataclasses.replace(arch.moe, adapter_form=form))


def open_own_adapter(
    directory: Path, arch: Architecture, settings: AdapterSettings, adapted: Collection[str],
    token_ids: Sequence[int], source: str, flags: Mapping[str, str] | None = None,
) -> tuple[dict[str, StoredTensor], AdapterSlices]:
    """open_adapter() for an adapter that train_fsdp_qlora.py wrote, or could have written, with
    these settings and rows of these tokens. Returns its result and {peft_name() or one of
    token_row_names(): where it is in the file}. `arch`: from with_adapter_form()."""
    wanted = make_lora_config(arch, settings, adapted,
                              trainable_token_indices=token_row_settings(arch, token_ids))
    shapes = dict[str, tuple[int, ...]]()
    for of_linear in adapter_shapes(arch, settings, adapted).values():
        shapes |= of_linear
    if token_ids:
        shapes |= dict.fromkeys(token_row_names(arch), (len(token_ids), arch.hidden_size))
    of_experts = expert_slices(arch, settings.rank)
    slices = {name: of_experts.get(name, AdapterSlice(name, shape))
              for name, shape in shapes.items()}
    in_file = {part.name: part.shape for part in slices.values()}
    return open_adapter(directory, wanted, in_file, source, flags), slices


def open_adapter(
    directory: Path, wanted: LoraConfig, shapes: Mapping[str, tuple[int, ...]], source: str,
    flags: Mapping[str, str] | None = None,
) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of the tensors of an adapter.

    Raises ValueError unless its settings match `wanted`, and its tensors have these names and
    shapes and only finite numbers. `source` names what requires that, for errors; `flags` is
    {setting: the flag that sets it}.
    """
    path, file = (directory / name for name in ADAPTER_FILES)
    check_settings(path, read_json(path), wanted.to_dict(), source, flags or {})
    stored = read_header(file)
    found = {name: tensor.shape for name, tensor in stored.items()}
    odd = min((n for n in {*found, *shapes} if found.get(n) != shapes.get(n)), default="")
    if odd:
        same = "same base model" + ", and same --target_modules" * bool(flags)
        raise ValueError(f"{file}: {odd} is {found.get(odd, 'missing')}, but the base model and"
                         f" {source} ask for {shapes.get(odd, 'none')}: {same}?")
    for name, tensor in stored.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{file}: {name} is {tensor.dtype}, which is not a floating-point"
                             " dtype")
        if not read_tensor(tensor, name).float().isfinite().all():
            raise ValueError(f"{file}: {name} has values that are NaN or infinite")
    return stored


def check_settings(path: Path, settings: Mapping[str, Any], wanted: Mapping[str, Any], source: str,
                   flags: Mapping[str, str]) -> None:
    """Raise ValueError if the settings of an adapter_config.json give the tensors another meaning
    than `wanted`, or name more than adapters of linears."""
    all_settings = {**LoraConfig().to_dict(), **settings}
    for key, value in all_settings.items():
        here = wanted.get(key)
        value, here = (sorted(x, key=str) if isinstance(x, (list, set)) else x
                       for x in (value, here))
        if key == "init_lora_weights" and value in PLAIN_INITS:
            continue
        is_unknown_and_off = key not in wanted and not value  # of another version of PEFT
        if key in IGNORED or value == here or is_unknown_and_off:
            continue
        advice = f". Use the same {flags[key]}" if key in flags else ""
        raise ValueError(f"{path}: {key} is {value!r:.80}, by {source} {here!r:.80}{advice}")


@dataclasses.dataclass(frozen=True)
class WeightAdapter:
    """What PEFT's files have for one weight: a linear's A and B, or a table's trained rows."""

    read: Callable[[str, str], torch.Tensor]  # (name, device) -> a tensor of the file
    slices: list[AdapterSlice]  # A, B and, with DoRA, magnitudes; or the rows alone
    scaling: float  # factor of B @ A; a table's rows are not scaled

    def tensors(self, device: str) -> list[torch.Tensor]:
        """Return the tensors of `slices`, in their order, on this device."""
        return [self.read(part.name, device)[part.index] for part in self.slices]


def weight_adapters(
    directory: Path, stored: Mapping[str, StoredTensor], scaling: float,
    slices: Mapping[str, list[AdapterSlice]]
) -> dict[str, WeightAdapter]:
    """Return {name of a weight: its WeightAdapter} for a merge, from each weight's list of
    AdapterSlice and open_adapter()'s result. Raises ValueError for an untrained adapter."""
    if not any(read_tensor(x, name).any() for name, x in stored.items() if "lora_B" in name):
        raise ValueError(f"{directory / ADAPTER_WEIGHTS}: is empty or untrained: lora_B is all 0")
    # 4: experts' A and B, of gate_up and of down; each tensor may contain those of all experts
    read = functools.lru_cache(4)(lambda name, device: read_tensor(stored[name], name, device))
    return {name: WeightAdapter(read, parts, scaling) for name, parts in slices.items()}


def write_adapter(directory: Path, weights: dict[str, torch.Tensor],
                  lora_config: LoraConfig) -> None:
    """Write the adapter in PEFT's format. Rank 0 only."""
    write_atomic(directory / ADAPTER_WEIGHTS, weights)
    settings = {key: sorted(value) if isinstance(value, set) else value
                for key, value in lora_config.to_dict().items()} | {"inference_mode": True}
    write_atomic(directory / ADAPTER_CONFIG, json.dumps(settings, indent=2, sort_keys=True))
