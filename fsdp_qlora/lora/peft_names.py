"""Names and shapes of the adapter's tensors in PEFT's file format, and how PEFT stores experts'
adapters."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from peft import LoraConfig

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.tensor_names import renamed


Index = EllipsisType | slice | tuple[Any, ...]  # selects a part of a tensor


class AdapterSlice(NamedTuple):
    """A part of an adapter in PEFT's files."""

    name: str  # name of the tensor in the file
    shape: tuple[int, ...]  # shape of that tensor
    index: Index = ...  # selects the part of that tensor


AdapterSlices = dict[str, AdapterSlice]  # see expert_slices()


def peft_name(arch: Architecture, layer: int, linear: str, key: str) -> str:
    """Return PEFT's name of a part of a linear's adapter. A single expert has the name used in the
    released files of its family."""
    renames = arch.moe.renames if arch.moe else ()
    stem = f"base_model.model.{arch.module_prefix}layers.{layer}"
    return f"{stem}.{renamed(linear, renames)}.{key}"


def adapter_shapes(
    arch: Architecture, settings: AdapterSettings, adapted: Collection[str]
) -> dict[tuple[int, str], dict[str, tuple[int, ...]]]:
    """Return {(layer, linear): {peft_name(): shape}} of A, B and, with DoRA, magnitudes of all
    linears named in `adapted`."""
    found = {}
    for layer, kind in enumerate(arch.layer_kinds):
        for linear in (x for x in arch.linears(kind) if x.name in adapted):
            shapes = linear_adapter_shapes(
                linear.out_features, linear.in_features, settings.rank, settings.is_dora)
            found[layer, linear.name] = {
                peft_name(arch, layer, linear.name, key): shape for key, shape in shapes.items()}
    return found


def linear_adapter_shapes(
    n_out: int, n_in: int, rank: int, is_dora: bool
) -> dict[str, tuple[int, ...]]:
    """Return {PEFT's key: shape} of A, B and, with DoRA, magnitudes of one linear."""
    shapes: dict[str, tuple[int, ...]] = {
        "lora_A.weight": (rank, n_in), "lora_B.weight": (n_out, rank)}
    return shapes | {"lora_magnitude_vector": (n_out,)} if is_dora else shapes


def token_row_names(arch: Architecture) -> list[str]:
    """Return PEFT's names of TokenRows.rows, one for each table."""
    modules = [f"{arch.module_prefix}{arch.embedding}"]
    modules += [] if arch.tied else [arch.lm_head_names[0].removesuffix(".weight")]
    return [f"base_model.model.{module}.token_adapter.trainable_tokens_delta" for module in modules]


def token_row_settings(arch: Architecture, ids: Sequence[int]) -> dict[str, list[int]] | None:
    """Return trainable_token_indices of PEFT's LoraConfig: {name of a module: ids of the tokens
    whose rows of it are trained}; None if there are none."""
    modules = [arch.embedding] + ["lm_head"] * (not arch.tied)
    return {module: [*ids] for module in modules} if ids else None


def make_lora_config(
    arch: Architecture, settings: AdapterSettings, adapted: Collection[str], **others: Any
) -> LoraConfig:
    """Return PEFT's LoraConfig with these settings and `others`. `adapted`: names of linears in the
    layer."""
    return LoraConfig(
        r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout,
        use_rslora=settings.is_rslora, use_dora=settings.is_dora,
        **expert_settings(arch, settings, adapted), **others)


def expert_settings(arch: Architecture, settings: AdapterSettings,
                    adapted: Collection[str]) -> dict[str, Any]:
    """Return the settings of PEFT's LoraConfig for the experts among the linears `adapted`, if PEFT
    adapts one parameter of all experts. The adapter of gate and up together has the ranks of both
    and twice alpha, so that the scale is unchanged."""
    experts = {*adapted} & {*arch.expert_linear_names()}
    if not arch.moe or arch.moe.adapter_form == "modules" or not experts:
        return {}
    stem, n = arch.moe.experts_prefix, arch.moe.n_experts
    first = f"{stem}.gate_up_proj" if arch.gated else f"{stem}.up_proj"
    found: dict[str, Any] = {"target_parameters": [f"{stem}.down_proj", first]}
    if (each := len(arch.expert_gate_up) // n) > 1:
        found["rank_pattern"] = {first: each * settings.rank}
        found["alpha_pattern"] = {first: each * settings.alpha}
    return found


def expert_slices(arch: Architecture, rank: int) -> AdapterSlices:
    """Return {peft_name() of A or B of an expert's linear: its AdapterSlice}, if PEFT's files have
    one A and one B for all experts; `index` then selects this expert's part.

    In A an expert has consecutive rows, in B every n-th column. In A and B of gate and up together,
    gate has the first half of an expert's ranks and up the second; B is 0 where the outputs of one
    meet the ranks of the other. For two experts, a and b, with rank 2, gate and up together:

        A [8, in]      rows, one below the other: a.gate a.gate a.up a.up b.gate b.gate b.up b.up
        B [2 out, 8]   columns     a b a b | a b a b      (a's first, b's first, a's second, ..)
                       gate's out  g g g g | 0 0 0 0
                       up's out    0 0 0 0 | u u u u
    """
    slices: AdapterSlices = {}
    for layer, routed in enumerate(arch.layer_routed):
        if not (routed and arch.moe) or arch.moe.adapter_form != "stacked":
            continue
        # PEFT wraps the experts' module once for down_proj, and inside that for gate and up
        for end, linears in (".base_layer", arch.expert_gate_up), ("", arch.expert_down):
            n, n_out = arch.moe.n_experts, linears[0].out_features
            whole, n_columns = arch.moe.experts_prefix + end, rank * len(linears)
            for i, linear in enumerate(linears):
                expert, k = divmod(i, len(linears) // n)
                columns = slice(rank * k * n + expert, rank * (k + 1) * n, n)
                for key, shape, index in (
                    ("lora_A.weight", (n_columns, linear.in_features),
                     slice(rank * i, rank * (i + 1))),
                    ("lora_B.weight", (n_out * len(linears) // n, n_columns),
                     (slice(n_out * k, n_out * (k + 1)), columns))):
                    slices[peft_name(arch, layer, linear.name, key)] = AdapterSlice(
                        peft_name(arch, layer, whole, key), shape, index)
    return slices


def stack_experts(
    tensors: dict[str, torch.Tensor], slices: AdapterSlices
) -> dict[str, torch.Tensor]:
    """Return {name in PEFT's files: tensor} from {peft_name(): tensor}; `slices`: see
    expert_slices()."""
    stacked = {}
    for name, tensor in tensors.items():
        stored, shape, index = slices.get(name, AdapterSlice(name, tensor.shape))
        if stored not in stacked:
            stacked[stored] = tensor.new_zeros(shape)
        stacked[stored][index] = tensor
    return stacked


def unstack_experts(
    tensors: dict[str, torch.Tensor], slices: AdapterSlices
) -> dict[str, torch.Tensor]:
    """Return {peft_name(): tensor} from {name in PEFT's files: tensor}, the inverse of
    stack_experts()."""
    own = {name: tensors[stored][index] for name, (stored, _, index) in slices.items()
           if stored in tensors}
    stacked = {stored for stored, *_ in slices.values()}
    return own | {name: tensor for name, tensor in tensors.items() if name not in stacked}
