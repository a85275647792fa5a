"""Names and shapes of the tensors that a model needs from its files.

weight_formats.py knows how other formats than 16 bits name the parts of a weight.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import LinearShape
from fsdp_qlora.pretrained.reader import StackedSlice, StoredTensor
from fsdp_qlora.pretrained.weight_formats import (
    FP8_BLOCK, INT4_GROUP, INT4_PACKED, INT4_SCALE, INT4_SHAPE, PER_INT32)
from fsdp_qlora.quant.blocks import MXFP4_BLOCKSIZE

HasShape = StoredTensor | torch.Tensor


@dataclass
class TensorNames:
    """The names, in the files, of the tensors that training reads, and of those that only a merge
    copies. tensor_names() fills it, and for the merge of a multimodal model add_other_parts()."""

    # {name: LinearShape} of the linears that are in 4 bits in training
    linears: dict[str, LinearShape] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {name: shape} of all tensors
    # {name: StackedSlice} of tensors that are a part of a larger one, whose name is then in
    # `shapes`; in MXFP4, which has two tensors, {name + each of MX_SUFFIXES: StackedSlice}
    sources: dict[str, StackedSlice] = field(default_factory=dict)
    # {name of a linear in FP8 or INT4: name of its scales}
    scaled: dict[str, str] = field(default_factory=dict)
    # the names of Architecture.small_tensors(); parts of a fused convolution are in `sources`
    small_tensors: set[str] = field(default_factory=set)
    # the names of those that these files lack, and that are then 0
    zeros: set[str] = field(default_factory=set)
    embedding: str = ""
    norm: str | None = None  # None: it has no weight
    norm_bias: str | None = None
    lm_head: str = ""
    lm_head_bias: str | None = None  # None: it has no bias
    prefix: str = ""  # prefix of the text model's names
    layer_prefix: str = "layers."  # prefix of the layers' names, before a layer's number
    # those of MoESpec.renames that these files use; Family.renames are in `aliases`
    renames: tuple[tuple[str, str], ...] = ()
    # {name of a tensor of Family.renames, or of a linear in INT4: its name in these files}
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def n_parameters(self) -> int:
        """Number of weights, without their scales; a byte of MXFP4 contains two."""
        others, each = {*self.scaled.values()}, {"_blocks": 2, INT4_PACKED: PER_INT32}
        return sum(math.prod(shape) * each.get(name[name.rfind("_"):], 1)
                   for name, shape in self.shapes.items()
                   if name not in others and not name.endswith(("_scales", INT4_SHAPE)))

    def of_model(self, name: str) -> str:
        """Return the name in the files of the weight of `name`, which is outside of the layers."""
        return f"{self.prefix}{name}.weight"

    def of_layer(self, index: int, name: str) -> str:
        """Return the name in the files of the tensor `name` of layer `index`."""
        name = f"{self.prefix}layers.{index}." + renamed(name, self.renames)
        return self.aliases.get(name, name)


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Return the name with the first part of each pair replaced by the second, as files may have
    it."""
    for here, there in renames:
        name = name.replace(here, there)
    return name


def tensor_names(arch: Architecture, stored: Mapping[str, HasShape]) -> TensorNames:
    """Return the TensorNames of a model whose files have the tensors `stored`, with the files'
    spelling."""
    prefixes = arch.checkpoint_prefixes
    prefix = next((x for x in prefixes if name_in_files(f"{x}{arch.embedding}.weight", arch, stored)
                   in stored), prefixes[0])
    head = next((name for name in arch.lm_head_names if name in stored), arch.lm_head_names[0])
    embedding, norm, bias = (name_in_files(f"{prefix}{name}", arch, stored) for name in (
        f"{arch.embedding}.weight", f"{arch.final_norm}.weight", f"{arch.final_norm}.bias"))
    layer_prefix = renamed(f"{prefix}layers.", arch.renames)
    if not any(name.startswith(layer_prefix) for name in stored):
        layer_prefix = f"{prefix}layers."
    table, renames = (arch.vocab_size - arch.added_rows, arch.hidden_size), ()
    if arch.moe:  # only the renames that these files use
        renames = tuple(p for p in arch.moe.renames if any(p[1] in name for name in stored))
    names = TensorNames(
        shapes={embedding: table}, embedding=embedding, norm=norm if arch.norm_weight else None,
        norm_bias=bias if arch.norm_bias else None, lm_head=head,
        lm_head_bias=head.removesuffix("weight") + "bias" if arch.lm_head_bias else None,
        prefix=prefix, layer_prefix=layer_prefix, renames=renames)
    if arch.per_layer_inputs:
        add_per_layer_inputs(names, arch)
    for i in range(arch.n_layers):
        add_layer(names, arch, i, stored)
    n_routed = sum(arch.layer_routed)
    if 0 < len(names.zeros) < n_routed:
        raise ValueError(f"the checkpoint lacks {min(names.zeros)}, but {n_routed} layers have"
                         f" experts and {n_routed - len(names.zeros)} have such a tensor")
    for name in filter(None, (names.norm, names.norm_bias)):
        names.shapes[name] = (arch.hidden_size,)
    if not arch.tied:
        names.shapes[head] = table
    if names.lm_head_bias:
        names.shapes[names.lm_head_bias] = table[:1]
    return names


def name_in_files(name: str, arch: Architecture, stored: Mapping[str, HasShape]) -> str:
    """Return the name, or the one that Family.renames makes of it, if the files have that."""
    other = renamed(name, arch.renames)
    return other if other in stored else name


def add_layer(
    names: TensorNames, arch: Architecture, i: int, stored: Mapping[str, HasShape]
) -> None:
    """Add the tensors of layer i."""
    kind = arch.layer_kinds[i]
    vectors, small, linears = arch.vectors(kind), arch.small_tensors(kind), arch.linears(kind)
    if arch.renames:
        for key in (*(f"{linear.name}.weight" for linear in linears), *vectors, *small):
            name = names.of_layer(i, key)
            if (other := name_in_files(name, arch, stored)) != name:
                names.aliases[name] = other
    parts = add_stacked(names, arch, i, stored)
    for linear in linears:
        name = names.of_layer(i, f"{linear.name}.weight")
        if name + INT4_PACKED in stored:
            add_int4(names, name, linear)
            continue
        names.linears[name] = linear
        if not linear.mxfp4 and f"{linear.name}.weight" not in parts:
            names.shapes[name] = linear.out_features, linear.in_features
        if (scales := f"{name}_scale_inv") in stored:
            names.scaled[name] = scales
            names.shapes[scales] = tuple(
                math.ceil(n / FP8_BLOCK) for n in (linear.out_features, linear.in_features))
    if arch.mla and arch.mla.index_topk:
        add_unread(names, names.of_layer(i, arch.mla.indexer_prefix), stored)
    if arch.kv_sources[i] is not None:  # released files have keys and values all the same
        for key in "k_proj", "v_proj", "k_norm", "v_norm":
            add_unread(names, names.of_layer(i, f"{arch.attention_prefix}.{key}."), stored)
    if arch.post_norm_of_experts and not kind.routed:  # released files have it all the same
        norm = names.of_layer(i, f"{arch.mlp_post_norm}.weight")
        add_unread(names, name_in_files(norm, arch, stored), stored)
    if kind.routed and (moe := arch.moe) and moe.correction_bias and moe.correction_bias_or_zeros:
        names.zeros.update({names.of_layer(i, moe.correction_bias)} - stored.keys())
    for key in [*vectors, *small]:
        if key not in parts and names.of_layer(i, key) not in names.zeros:
            names.shapes[names.of_layer(i, key)] = (vectors | small)[key]
    names.small_tensors.update({names.of_layer(i, key) for key in small} - names.zeros)


def add_stacked(
    names: TensorNames, arch: Architecture, i: int, stored: Mapping[str, HasShape]
) -> set[str]:
    """Add the larger tensors in which the files have some tensors of layer i. Returns the names, in
    the layer, of these tensors."""
    kind = arch.layer_kinds[i]
    experts = stacked_experts(arch, names, i, stored) if kind.routed else {}
    conv_rows = {key: shape[0] for key, shape in arch.small_tensors(kind).items()
                 if key.endswith("_conv1d.weight")}  # transformers has them in one tensor in memory
    others = stacked_rows(conv_rows, names.of_layer(i, "linear_attn.conv1d.weight"), stored)
    if arch.qkv_in_files and arch.has_attention(kind):
        in_proj, _ = arch.of_kind(kind).attention_linears()
        for part in "weight", "bias":
            whole = names.of_layer(i, f"{arch.qkv_in_files}.{part}")
            rows = {f"{linear.name}.{part}": linear.out_features for linear in in_proj}
            others |= stacked_rows(rows, name_in_files(whole, arch, stored), stored)
    shapes = {key: (source, tuple(stored[source.name].shape)) for key, source in others.items()}
    for key, (source, shape) in (experts | shapes).items():
        names.sources[names.of_layer(i, key)] = source
        names.shapes[source.name] = shape
    return {*experts, *others}


def add_int4(names: TensorNames, name: str, linear: LinearShape) -> None:
    """Add the tensors of a linear in INT4 whose weight would be called `name` in 16 bits."""
    packed, scales, n_out = name + INT4_PACKED, name + INT4_SCALE, linear.out_features
    names.linears[packed] = linear
    names.aliases[name] = packed
    names.scaled[packed] = scales
    names.shapes[packed] = n_out, linear.in_features // PER_INT32
    names.shapes[scales] = n_out, linear.in_features // INT4_GROUP
    names.shapes[name + INT4_SHAPE] = (2,)


def add_per_layer_inputs(names: TensorNames, arch: Architecture) -> None:
    """Add the tensors of PerLayerInputsSpec that are outside of the layers."""
    spec = arch.per_layer_inputs
    assert spec, "the family has them"
    linear = spec.projection_linear(arch.hidden_size, arch.n_layers)
    name = names.of_model(linear.name)
    names.linears[name] = linear
    names.shapes.update({
        names.of_model(spec.table): (arch.vocab_size, linear.out_features),
        name: (linear.out_features, linear.in_features),
        names.of_model(spec.projection_norm): (spec.size,)})


def add_unread(names: TensorNames, prefix: str, stored: Mapping[str, HasShape]) -> None:
    """Add the files' tensors with this prefix, which training does not read, but a merge copies."""
    for name in (name for name in stored if name.startswith(prefix)):
        names.shapes[name] = tuple(stored[name].shape)
        if (scales := f"{name}_scale_inv") in stored:
            names.scaled[name] = scales


def stacked_rows(
    rows: Mapping[str, int], whole: str, stored: Mapping[str, HasShape],
) -> dict[str, StackedSlice]:
    """Return {name: its StackedSlice} of the tensors in `rows`, {name: number of rows}, if the
    files have them one after the other in the tensor `whole`. Raises ValueError if that has other
    rows."""
    n_rows = sum(rows.values())
    if not rows or whole not in stored:
        return {}
    if (found := tuple(stored[whole].shape))[0] != n_rows:
        raise ValueError(f"{whole} has shape {list(found)}, but config.json asks for {n_rows} rows")
    stops = dict(zip(rows, itertools.accumulate(rows.values())))
    return {key: StackedSlice(whole, n_rows, range(stop - rows[key], stop))
            for key, stop in stops.items()}


def stacked_experts(
    arch: Architecture, names: TensorNames, layer: int, stored: Mapping[str, HasShape],
) -> dict[str, tuple[StackedSlice, tuple[int, ...]]]:
    """Return {name in a layer of a linear's tensor: (StackedSlice, shape of the larger tensor)} if
    the files have the linears of all experts in one tensor, as transformers 5 has in memory,
    [experts, out, in] or transposed; or gates and ups in two such tensors; or, in MXFP4, in two
    tensors of bytes. Else {}."""
    sources, moe = {}, arch.moe
    assert moe, "the layer has experts"
    first_key = "gate_up_proj" if arch.gated else "up_proj"
    groups = {first_key: arch.expert_gate_up, "down_proj": arch.expert_down}
    if names.of_layer(layer, f"{moe.experts_prefix}.gate_proj") in stored:
        apart = {"gate_proj": arch.expert_gate_up[::2], "up_proj": arch.expert_gate_up[1::2]}
        groups = apart | {"down_proj": arch.expert_down}
    for key, linears in groups.items():
        whole, n, n_in = f"{moe.experts_prefix}.{key}", moe.n_experts, linears[0].in_features
        n_out = sum(linear.out_features for linear in linears) // n  # outputs of one expert
        transposed = False
        if linears[0].mxfp4:
            parts = {"_blocks": (n, n_out, n_in // MXFP4_BLOCKSIZE, MXFP4_BLOCKSIZE // 2),
                     "_scales": (n, n_out, n_in // MXFP4_BLOCKSIZE)}
        elif names.of_layer(layer, whole) in stored:
            found_shape = tuple(stored[names.of_layer(layer, whole)].shape)
            transposed = found_shape == (n, n_in, n_out) and (n_in != n_out or moe.transposed)
            parts = {"": (n, n_in, n_out) if transposed else (n, n_out, n_in)}
        else:
            parts = {}
        for part, shape in parts.items():
            first = 0  # the linear's first output, counted over all experts
            for linear in linears:
                stop = first + linear.out_features
                rows, columns = range(first, stop), None
                expert = first // n_out
                if transposed:
                    columns = range(first - expert * n_out, stop - expert * n_out)
                    rows = range(expert * n_in, (expert + 1) * n_in)
                sources[f"{linear.name}.weight{part}"] = StackedSlice(
                    names.of_layer(layer, whole + part), n * shape[1], rows, columns), shape
                first = stop
    return sources
