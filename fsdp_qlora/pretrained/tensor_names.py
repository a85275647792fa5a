"""Expected tensor names in a checkpoint, and the check that all are there.

weight_formats.py knows how other formats than 16 bits name the parts of a weight.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedConfig

from fsdp_qlora.log import log
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.from_config import stored_format, text_config
from fsdp_qlora.pretrained.reader import (
    DTYPES, FLOATS, READ_CHUNK, ReadRequest, StackedSlice, StoredTensor, WeightReader)
from fsdp_qlora.pretrained.records import LinearShape
from fsdp_qlora.pretrained.weight_formats import (
    FP8_BLOCK, INT4_GROUP, INT4_PACKED, INT4_SCALE, INT4_SHAPE, MX_SUFFIXES, NF4_STATE, PER_INT32)
from fsdp_qlora.quant.blocks import BLOCK, MX_BLOCK, NESTED_BLOCK
from fsdp_qlora.quant.nf4 import dynamic_map, nf4_code

# {name: (shape, or None for any, dtypes)} of tensors that the files must have
ExpectedTensors = dict[str, tuple[tuple[int, ...] | None, Collection[str]]]
HasShape = StoredTensor | torch.Tensor


@dataclass
class TensorNames:
    """The names, in the files, of the tensors that are read; tensor_names() fills it."""

    # {name: LinearShape} of the linears that are in 4 bits in training
    linears: dict[str, LinearShape] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # {name: shape} of all tensors
    # {name: StackedSlice} of tensors that are a part of a larger one, whose name is then in
    # `shapes`; in MXFP4, which has two tensors, {name + each of MX_SUFFIXES: StackedSlice}
    sources: dict[str, StackedSlice] = field(default_factory=dict)
    # {name of a linear in FP8 or INT4: name of its scales}
    scaled: dict[str, str] = field(default_factory=dict)
    # the names in `shapes` of Architecture.small_tensors()
    small_tensors: set[str] = field(default_factory=set)
    # the names of those that these files lack, and that are then 0
    zeros: set[str] = field(default_factory=set)
    embedding: str = ""
    norm: str | None = None  # None: it has no weight
    norm_bias: str | None = None
    lm_head: str = ""
    lm_head_bias: str | None = None  # None: it has no bias
    stem: str = ""  # prefix of the text model's names
    layer_prefix: str = "layers."  # prefix of the layers' names, before a layer's number
    # those of MoERecord.renames that these files use; Family.renames are in `aliases`
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
        return f"{self.stem}{name}.weight"

    def of_layer(self, index: int, name: str) -> str:
        """Return the name in the files of the tensor `name` of layer `index`."""
        name = f"{self.stem}layers.{index}." + renamed(name, self.renames)
        return self.aliases.get(name, name)

    def linears_by_tensor(self) -> dict[str, list[tuple[str, Any]]]:
        """Return {name of a tensor in 16 bits: [(name of a linear, its index in the tensor)]} for
        all linears."""
        parts = {}
        for name, linear in self.linears.items():
            whole, index = name.removesuffix(INT4_PACKED), ...
            if source := self.sources.get(f"{name}_blocks" if linear.mxfp4 else name):
                whole, rows, columns = source.name, source.rows, source.columns
                shape = self.shapes[whole]
                if len(shape) == 2:  # query, key and value
                    index = slice(rows.start, rows.stop)
                else:  # [experts, ..]
                    expert, first = divmod(rows.start, shape[1])
                    index = expert, slice(first, first + len(rows))
                    if columns:
                        index = *index, slice(columns.start, columns.stop)
                    elif len(rows) == shape[1]:
                        index = expert
                    # a merge writes MXFP4 as [experts, in, out]: only a whole expert has one index
                    assert index == expert or not linear.mxfp4, "gate and up are one linear"
            parts.setdefault(whole.removesuffix("_blocks"), []).append((name, index))
        return parts


def renamed(name: str, renames: Iterable[tuple[str, str]]) -> str:
    """Return the name with the first part of each pair replaced by the second, as files may have
    it."""
    for here, there in renames:
        name = name.replace(here, there)
    return name


def tensor_names(arch: Architecture, stored: Mapping[str, HasShape]) -> TensorNames:
    """Return the TensorNames of a model whose files have the tensors `stored`, with the files'
    spelling."""
    stems = arch.checkpoint_prefixes
    stem = next((s for s in stems if name_in_files(f"{s}{arch.embedding}.weight", arch, stored)
                 in stored), stems[0])
    head = next((name for name in arch.lm_head_names if name in stored), arch.lm_head_names[0])
    embedding, norm, bias = (name_in_files(f"{stem}{name}", arch, stored) for name in (
        f"{arch.embedding}.weight", f"{arch.final_norm}.weight", f"{arch.final_norm}.bias"))
    layer_prefix = renamed(f"{stem}layers.", arch.renames)
    if not any(name.startswith(layer_prefix) for name in stored):
        layer_prefix = f"{stem}layers."
    table, renames = (arch.vocab_size - arch.added_rows, arch.hidden_size), ()
    if arch.moe:  # only the renames that these files use
        renames = tuple(p for p in arch.moe.renames if any(p[1] in name for name in stored))
    names = TensorNames(
        shapes={embedding: table}, embedding=embedding, norm=norm if arch.norm_weight else None,
        norm_bias=bias if arch.norm_bias else None, lm_head=head,
        lm_head_bias=head.removesuffix("weight") + "bias" if arch.lm_head_bias else None, stem=stem,
        layer_prefix=layer_prefix, renames=renames)
    if arch.per_layer:
        add_per_layer(names, arch)
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
    parts = add_fused(names, arch, i, stored)
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
        add_unread(names, names.of_layer(i, arch.mla.indexer), stored)
    if arch.kv_sources[i] is not None:  # released files have keys and values all the same
        for key in "k_proj", "v_proj", "k_norm", "v_norm":
            add_unread(names, names.of_layer(i, f"{arch.attention}.{key}."), stored)
    if arch.post_norm_of_experts and not kind.routed:  # released files have it all the same
        norm = names.of_layer(i, f"{arch.mlp_post_norm}.weight")
        add_unread(names, name_in_files(norm, arch, stored), stored)
    if kind.routed and (moe := arch.moe) and moe.correction and moe.correction_or_zeros:
        names.zeros.update({names.of_layer(i, moe.correction)} - stored.keys())
    for key in [*vectors, *small]:
        if key not in parts and names.of_layer(i, key) not in names.zeros:
            names.shapes[names.of_layer(i, key)] = (vectors | small)[key]
    names.small_tensors.update({names.of_layer(i, key) for key in small} - names.zeros)


def add_fused(
    names: TensorNames, arch: Architecture, i: int, stored: Mapping[str, HasShape]
) -> set[str]:
    """Add the larger tensors in which the files have some tensors of layer i. Returns the names, in
    the layer, of these tensors."""
    kind = arch.layer_kinds[i]
    stacked = stacked_experts(arch, names, i, stored) if kind.routed else {}
    conv_rows = {key: shape[0] for key, shape in arch.small_tensors(kind).items()
                 if key.endswith("_conv1d.weight")}  # transformers has them in one tensor in memory
    fused = fused_rows(conv_rows, names.of_layer(i, "linear_attn.conv1d.weight"), stored)
    if arch.qkv_in_files and arch.has_attention(kind):
        in_proj, _ = arch.of_kind(kind).attention_linears()
        for part in "weight", "bias":
            whole = names.of_layer(i, f"{arch.qkv_in_files}.{part}")
            rows = {f"{linear.name}.{part}": linear.out_features for linear in in_proj}
            fused |= fused_rows(rows, name_in_files(whole, arch, stored), stored)
    shapes = {key: (source, tuple(stored[source.name].shape)) for key, source in fused.items()}
    for key, (source, shape) in (stacked | shapes).items():
        names.sources[names.of_layer(i, key)] = source
        names.shapes[source.name] = shape
    return {*stacked, *fused}


def add_int4(names: TensorNames, name: str, linear: LinearShape) -> None:
    """Add the tensors of a linear in INT4 whose weight would be called `name` in 16 bits."""
    packed, scales, n_out = name + INT4_PACKED, name + INT4_SCALE, linear.out_features
    names.linears[packed], names.aliases[name], names.scaled[packed] = linear, packed, scales
    names.shapes[packed] = n_out, linear.in_features // PER_INT32
    names.shapes[scales] = n_out, linear.in_features // INT4_GROUP
    names.shapes[name + INT4_SHAPE] = (2,)


def add_per_layer(names: TensorNames, arch: Architecture) -> None:
    """Add the tensors of PerLayerInputs that are outside of the layers."""
    record = arch.per_layer
    assert record, "the family has them"
    linear = record.projection_linear(arch.hidden_size, arch.n_layers)
    name = names.of_model(linear.name)
    names.linears[name] = linear
    names.shapes.update({
        names.of_model(record.table): (arch.vocab_size, linear.out_features),
        name: (linear.out_features, linear.in_features),
        names.of_model(record.projection_norm): (record.size,)})


def add_unread(names: TensorNames, prefix: str, stored: Mapping[str, HasShape]) -> None:
    """Add the files' tensors with this prefix, which training does not read, but a merge copies."""
    for name in (name for name in stored if name.startswith(prefix)):
        names.shapes[name] = tuple(stored[name].shape)
        if (scales := f"{name}_scale_inv") in stored:
            names.scaled[name] = scales


def fused_rows(
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
    if names.of_layer(layer, f"{moe.experts}.gate_proj") in stored:
        apart = {"gate_proj": arch.expert_gate_up[::2], "up_proj": arch.expert_gate_up[1::2]}
        groups = apart | {"down_proj": arch.expert_down}
    for key, linears in groups.items():
        whole, n, n_in = f"{moe.experts}.{key}", moe.n_experts, linears[0].in_features
        n_out = sum(linear.out_features for linear in linears) // n  # outputs of one expert
        transposed = False
        if linears[0].mxfp4:
            parts = {"_blocks": (n, n_out, n_in // MX_BLOCK, MX_BLOCK // 2),
                     "_scales": (n, n_out, n_in // MX_BLOCK)}
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
                rows, columns, expert = range(first, stop), None, first // n_out
                if transposed:
                    columns = range(first - expert * n_out, stop - expert * n_out)
                    rows = range(expert * n_in, (expert + 1) * n_in)
                sources[f"{linear.name}.weight{part}"] = StackedSlice(
                    names.of_layer(layer, whole + part), n * shape[1], rows, columns), shape
                first = stop
    return sources


def check_files(
    stored: dict[str, StoredTensor], names: TensorNames, model_config: PreTrainedConfig,
    compute_dtype: str,
) -> dict[str, dict[str, Any]]:
    """Check a checkpoint's tensors before they are read. Returns {name: the JSON object that
    bitsandbytes stored with it} of the tensors that are in NF4 in the files. Raises ValueError."""
    wanted: ExpectedTensors = {
        name: (shape, ["U8"] if name.endswith(MX_SUFFIXES) else FLOATS)
        for name, shape in names.shapes.items()}
    for name in names.scaled:
        in_int4 = name.endswith(INT4_PACKED)
        wanted[name] = names.shapes[name], ["I32"] if in_int4 else ["F8_E4M3"]
        if in_int4:
            wanted[name.removesuffix(INT4_PACKED) + INT4_SHAPE] = (2,), ["I32", "I64"]
    stored = drop_further_layers(stored, names, model_config)
    n_mxfp4 = sum(linear.mxfp4 for linear in names.linears.values())
    if n_mxfp4 or not has_nf4(model_config):
        check_tensors(stored, names, wanted)
        if n_mxfp4:
            log(f"model: {n_mxfp4} linears of experts stay in MXFP4")
        return {}
    states = check_prequantized(stored, names, wanted)
    dtypes = sorted({state["dtype"] for state in states.values()})
    n = sum(name in states for name in names.linears)
    n_whole, n_gates = len(names.linears) - n, len(states) - n
    log(f"model: already NF4, loaded as is ({n} linears)"
        + f"; {n_whole} others are quantized now" * (n_whole > 0)
        + f"; {n_gates} router and gate tensors are dequantized" * (n_gates > 0))
    if dtypes not in ([], [compute_dtype]):
        log(f"note: quantized from {', '.join(dtypes)}, but dequantized to {compute_dtype} here;"
            " some weights differ by rounding")
    return states


def has_nf4(model_config: PreTrainedConfig) -> bool:
    """Return True if the files have linears that bitsandbytes quantized to 4 bits."""
    method = stored_format(model_config).get("quant_method")
    return method not in (None, "fp8", "mxfp4", "compressed-tensors")


def drop_further_layers(
    stored: dict[str, StoredTensor], names: TensorNames, model_config: PreTrainedConfig,
) -> dict[str, StoredTensor]:
    """Return the files' tensors without the layers after the last one that config.json declares,
    which predict further tokens (MTP)."""
    config, found = text_config(model_config), dict[str, StoredTensor]()
    n = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "num_mtp_layers", 0)
    for i in range(config.num_hidden_layers, config.num_hidden_layers + (n or 0)):
        stem = f"{names.layer_prefix}{i}."
        found |= {name: tensor for name, tensor in stored.items() if name.startswith(stem)}
    if found:
        log(f"model: skipped {len(found)} multi-token-prediction (MTP) tensors, of layers after the"
            " last")
    return {name: tensor for name, tensor in stored.items() if name not in found}


def check_tensors(
    stored: Mapping[str, StoredTensor], names: TensorNames, wanted: ExpectedTensors
) -> None:
    """Raise ValueError unless the files have all tensors of `wanted`, and no others in layers."""
    missing = [name for name in wanted if name not in stored]
    if missing:
        hint = ""
        if missing == [names.lm_head]:
            hint = (". If the head is tied, set tie_word_embeddings to true in config.json, also in"
                    " its text_config")
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that its"
                         f" config.json asks for, the first is {missing[0]}{hint}")
    extra = [name for name in stored if name.startswith(names.layer_prefix) and name not in wanted
             and not name.endswith("inv_freq")]
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config.json does not"
                         f" describe, the first is {extra[0]}")
    for name, (shape, dtypes) in wanted.items():
        path, dtype, found, *_ = stored[name]
        if shape not in (None, found):
            raise ValueError(f"{path.name}: {name} has shape {list(found)}, but config.json asks"
                             f" for {list(shape)}" + ": MXFP4 has one scale for 32 weights"
                             * name.endswith(MX_SUFFIXES))
        if dtype not in dtypes:
            hint = ": without double quantization?" * name.endswith("absmax")
            if dtype == "F8_E4M3" and name in names.linears:
                hint = f", and F8_E4M3 with its {name}_scale_inv"
            raise ValueError(f"{path.name}: {name} is {dtype}, which is not supported;"
                             f" {', '.join(dtypes)} are{hint}")
    is_tied = names.lm_head not in wanted
    if is_tied and names.lm_head in stored and not same_bytes(
            stored[names.lm_head], stored[names.embedding]):
        raise ValueError(f"config.json has tie_word_embeddings true, but the checkpoint's"
                         f" {names.lm_head} is not its {names.embedding}: transformers then uses"
                         " both; set tie_word_embeddings to false there")


def same_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two StoredTensor tensors are equal; reads a chunk at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(one.start)
        b.seek(other.start)
        sizes = (min(READ_CHUNK, one.stop - at) for at in range(one.start, one.stop, READ_CHUNK))
        return all(a.read(size) == b.read(size) for size in sizes)


def check_prequantized(
    stored: Mapping[str, StoredTensor], names: TensorNames, wanted: ExpectedTensors,
) -> dict[str, dict[str, Any]]:
    """check_tensors() for files in which bitsandbytes has quantized linears, with the same settings
    as here. Not all linears need to be quantized: transformers 5 does not quantize experts, and
    transformers 4 also quantized routers. Adds the tensors that bitsandbytes stores to `wanted`.
    Returns {name: the JSON object that bitsandbytes stored with it} of the quantized weights."""
    in_nf4 = [name for name in (*names.linears, *sorted(names.small_tensors))
              if f"{name}.{NF4_STATE}" in stored and name in names.shapes]
    for name in stored:
        if name.endswith(".absmax") and name.removesuffix(".absmax") not in in_nf4:
            original = "the original model"
            if "_projs." in name:  # Unsloth's gpt-oss, which stores each expert separately
                original = "openai/gpt-oss-20b or openai/gpt-oss-120b, which are in MXFP4"
            raise ValueError(f"{name}: only linears and routers can be in 4-bit, in NF4, by the"
                             f" names that transformers gives them. Use {original}")
    for name in in_nf4:
        n_blocks = math.ceil(math.prod(names.shapes[name]) / BLOCK)
        wanted[name] = None, DTYPES  # packed, in integers or floats of any size
        wanted[f"{name}.absmax"] = (n_blocks,), ["U8"]
        wanted[f"{name}.nested_absmax"] = (math.ceil(n_blocks / NESTED_BLOCK),), ["F32"]
        wanted[f"{name}.quant_map"] = (16,), ["F32"]
        wanted[f"{name}.nested_quant_map"] = (256,), ["F32"]
        wanted[f"{name}.{NF4_STATE}"] = None, ["U8"]
    check_tensors(stored, names, wanted)
    parts = NF4_STATE, "quant_map", "nested_quant_map"
    requests = [ReadRequest(f"{name}.{part}", (1,), range(1)) for name in in_nf4 for part in parts]
    reader = WeightReader(stored, requests, torch.device("cpu"))
    states = {name: _read_state(name, stored[name], names.shapes[name], reader.read)
              for name in in_nf4}
    reader.close()
    return states


def _read_state(
    name: str, stored: StoredTensor, shape: tuple[int, ...], read: Callable[[str], torch.Tensor],
) -> dict[str, Any]:
    """Return the JSON object that bitsandbytes stored with one weight, after checking it."""
    try:
        state = {**json.loads(bytes(read(f"{name}.{NF4_STATE}").tolist()))}
    except (ValueError, TypeError) as e:
        raise ValueError(f"{stored.path}: {name}.{NF4_STATE} is not a JSON object: {e}")
    for key, kind in {"dtype": str, "nested_offset": float}.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(f"{stored.path}: {name}.{NF4_STATE} has {key} {state.get(key)}")
    want = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape),
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    for key, value in want.items():
        if state.get(key) != value:
            raise ValueError(f"{stored.path}: {name} was quantized with {key} {state.get(key)},"
                             f" only {value} can be read")
    n_bytes = stored.stop - stored.start
    if n_bytes != math.prod(shape) // 2:
        raise ValueError(f"{stored.path}: {name} has {n_bytes} bytes, but {list(shape)} weights of"
                         " 4 bits are asked for")
    cpu = torch.device("cpu")
    for part, table in {"quant_map": nf4_code(cpu), "nested_quant_map": dynamic_map(cpu)}.items():
        # the last bits may differ between versions of bitsandbytes
        if not torch.allclose(read(f"{name}.{part}"), table):
            raise ValueError(f"{stored.path}: {name}.{part} is not the code of bitsandbytes' NF4")
    return state
