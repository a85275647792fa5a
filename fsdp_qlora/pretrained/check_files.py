"""The check of a base model's files, before they are read: all tensors are there, nothing else is.

tensor_names.py says which tensors that are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from fsdp_qlora.log import log
from fsdp_qlora.pretrained.from_config import quantization_config_of, text_config
from fsdp_qlora.pretrained.reader import (
    DTYPES, FLOATS, READ_CHUNK, ReadRequest, StoredTensor, WeightReader)
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import (
    INT4_PACKED, INT4_SHAPE, MX_SUFFIXES, NF4_STATE)
from fsdp_qlora.quant.blocks import BLOCKSIZE, NESTED_BLOCKSIZE
from fsdp_qlora.quant.nf4 import nf4_codebook, scale_codebook

# {name: (shape, or None for any, dtypes)} of tensors that the files must have
ExpectedTensors = dict[str, tuple[tuple[int, ...] | None, Collection[str]]]


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
    method = quantization_config_of(model_config).get("quant_method")
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
        n_blocks = math.ceil(math.prod(names.shapes[name]) / BLOCKSIZE)
        wanted[name] = None, DTYPES  # packed, in integers or floats of any size
        wanted[f"{name}.absmax"] = (n_blocks,), ["U8"]
        wanted[f"{name}.nested_absmax"] = (math.ceil(n_blocks / NESTED_BLOCKSIZE),), ["F32"]
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
    want = {"quant_type": "nf4", "blocksize": BLOCKSIZE, "shape": list(shape),
            "nested_blocksize": NESTED_BLOCKSIZE, "nested_dtype": "float32"}
    for key, value in want.items():
        if state.get(key) != value:
            raise ValueError(f"{stored.path}: {name} was quantized with {key} {state.get(key)},"
                             f" only {value} can be read")
    n_bytes = stored.stop - stored.start
    if n_bytes != math.prod(shape) // 2:
        raise ValueError(f"{stored.path}: {name} has {n_bytes} bytes, but {list(shape)} weights of"
                         " 4 bits are asked for")
    cpu = torch.device("cpu")
    tables = {"quant_map": nf4_codebook(cpu), "nested_quant_map": scale_codebook(cpu)}
    for part, table in tables.items():
        # the last bits may differ between versions of bitsandbytes
        if not torch.allclose(read(f"{name}.{part}"), table):
            raise ValueError(f"{stored.path}: {name}.{part} is not the code of bitsandbytes' NF4")
    return state
