"""The files of a merged model: which tensors they have, and all that is beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdp_qlora.data.tokenizer_files import complete_tokenizer
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import TensorShapes, read_json
from fsdp_qlora.merge.merge_base import MergeBase
from fsdp_qlora.merge.trained_run import TrainedRun
from fsdp_qlora.pretrained.hub import copy_small_files
from fsdp_qlora.pretrained.reader import StoredTensor
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import INT4_PACKED, INT4_SHAPE, NF4_SUFFIXES
from fsdp_qlora.quant.blocks import MX_BLOCK


def is_multimodal(model_config: transformers.PreTrainedConfig) -> bool:
    """Return True if the config contains another one, that of its language model."""
    return hasattr(model_config, "text_config")


def auto_class(model_config: transformers.PreTrainedConfig) -> Any:
    """Return transformers' class that loads the model with this config."""
    return (transformers.AutoModelForMultimodalLM if is_multimodal(model_config) else
            transformers.AutoModelForCausalLM)


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


def merged_shapes_and_paths(
    stored: dict[str, StoredTensor], names: TensorNames, nf4_states: dict[str, Any],
) -> tuple[TensorShapes, dict[str, Path]]:
    """Return the TensorShapes of the merged model, file by file, and {name: the base's file with
    the tensor, after which the merged file is named}. Experts in MXFP4 become [experts, in, out],
    the form of gpt-oss, the only family with MXFP4. linears_by_tensor() says where the linears are
    in these tensors."""
    tensors, paths = {}, {}
    used = {*names.shapes, names.lm_head} - {*names.scaled.values()}
    for name, tensor in in_order(stored):
        if name not in used:
            continue
        shape = names.shapes.get(name, tensor.shape)
        if name.startswith(names.layer_prefix):  # it may be a part of a weight in INT4 or MXFP4
            if name.endswith(("_scales", INT4_SHAPE)):
                continue
            if name.endswith(INT4_PACKED):
                linear = names.linears[name]
                shape = linear.out_features, linear.in_features
                name = name.removesuffix(INT4_PACKED)
            elif name.endswith("_blocks"):
                shape = shape[0], shape[2] * MX_BLOCK, shape[1]
                name = name.removesuffix("_blocks")
        # training used these in fp32, so they stay in fp32; transformers also keeps some of them in
        # fp32, such as a router's correction, and rounds the others itself
        is_exact = (name in names.small_tensors and name not in nf4_states
                    and tensor.dtype == "F32")
        tensors[name] = shape, torch.float32 if is_exact else merged_dtype(tensor)
        paths[name] = tensor.path
    return tensors, paths


def merged_dtype(tensor: StoredTensor) -> torch.dtype:
    """Return the dtype of most tensors of a merged model: int64, such as the count of a BatchNorm
    in an audio tower, stays; all others become bf16."""
    return torch.int64 if tensor.dtype == "I64" else torch.bfloat16


def replace_rows(
    table: torch.Tensor, vocab_size: int, ids: Sequence[int], rows: torch.Tensor,
) -> torch.Tensor:
    """Return a copy of `table` with `rows` as those of the tokens `ids`. If it has fewer than
    `vocab_size` rows, rows are added first, each the mean of the table's own rows, as in training,
    see fill_added_rows()."""
    mean = torch.stack([part.double().sum(0) for part in table.split(2**14)]).sum(0) / len(table)
    added = mean.to(table.dtype).expand(vocab_size - len(table), -1)
    table = torch.cat([table, added])
    table[torch.tensor(ids, device=table.device)] = rows.to(table)
    return table


def in_order(stored: dict[str, StoredTensor]) -> list[tuple[str, StoredTensor]]:
    """Return all (name, StoredTensor), file by file, in the order in which they are stored."""
    return sorted(stored.items(), key=lambda item: (item[1].path, item[1].start))


def copy_other_files(directory: Path, base: MergeBase, run: TrainedRun) -> None:
    """Write all but the weights into `directory`: config.json without quantization, the index of
    tensors, the tokenizer and the like. Each of the three copies replaces files of the one before.
    """
    for path in run.tokenizer_files:  # for a base without one
        shutil.copyfile(path, directory / path.name)
    copy_small_files(base.directory, directory)
    # generation_config.json; and the tokenizer, if rows of tokens were trained
    for path in run.replacing_files:
        shutil.copyfile(path, directory / path.name)
    index = {"metadata": {"total_size": base.merged_bytes},
             "weight_map": {name: path.name for name, path in base.paths.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(merged_config(base), indent=2))
    with errors_about(f"{base.directory}: its tokenizer cannot be loaded"):
        complete_tokenizer(directory, run.template_file)


def merged_config(base: MergeBase) -> dict[str, Any]:
    """Return the merged model's config.json: the base's in bf16, with the trained vocabulary."""
    config = read_json(base.directory / "config.json")
    config["dtype"] = "bfloat16"
    if "torch_dtype" in config:  # the older name of dtype
        config["torch_dtype"] = "bfloat16"
    text = config.get("text_config") or config  # that of a multimodal model's language model
    if base.token_ids:
        (vocab_size, _), _ = base.merged_shapes[base.names.embedding]
        for part in [part for part in (config, text) if "vocab_size" in part] or [text]:
            part["vocab_size"] = vocab_size
    for part in config, text:
        part.pop("quantization_config", None)  # if the base is in 4 bits
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    return config
