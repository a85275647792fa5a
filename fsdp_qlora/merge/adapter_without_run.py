"""Open an adapter without train_config.json, such as PEFT's, and its base as transformers loads it
in 4 bits."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import accelerate
import bitsandbytes as bnb
import torch
import transformers
from peft import LoraConfig
from torch import nn

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import ADAPTER_FILES, read_json
from fsdp_qlora.lora.peft_files import WeightAdapter, open_adapter, weight_adapters
from fsdp_qlora.lora.peft_names import AdapterSlice, linear_adapter_shapes
from fsdp_qlora.merge.base_for_merge import BaseForMerge, auto_class
from fsdp_qlora.merge.merged_layout import MergedLayout, find_linears, in_file_order, merged_dtype
from fsdp_qlora.merge.trained_run import TrainedRun
from fsdp_qlora.pretrained.family_specs import LinearShape
from fsdp_qlora.pretrained.from_config import quantization_config_of
from fsdp_qlora.pretrained.model_directory import find_model
from fsdp_qlora.pretrained.reader import FLOATS, StoredTensor, read_header, stored_tensors
from fsdp_qlora.pretrained.tensor_names import TensorNames


def open_adapter_without_run(
    adapter_dir: Path, base_model: str
) -> tuple[TrainedRun, BaseForMerge, dict[str, WeightAdapter]]:
    """open_run() for an adapter without train_config.json: return the run, the base and the
    adapters for a merge that cannot be checked. That transformers loaded the base with
    load_in_4bit, from bf16, is taken on trust."""
    config_file, adapter_file = (adapter_dir / name for name in ADAPTER_FILES)
    settings = {**LoraConfig().to_dict(), **read_json(config_file)}
    adapter_names = read_header(adapter_file).keys()  # before the base, which may be a download
    directory = find_model(base_model, "weights", "--base_model")
    with errors_about(f"--base_model {directory}"):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        if quantization_config_of(config):
            raise ValueError("is quantized already")
    model_class, stored = auto_class(config), stored_tensors(directory)
    print(f"warning: {adapter_dir} has no train_config.json, so it is assumed that it was"
          f" trained on {directory} in NF4 with double quantization, quantized from bf16 (its"
          f" {config_file.name} names {settings['base_model_name_or_path']}), and nothing will be"
          " compared")
    in_text, outside = linears_in_4bit(directory, config, model_class, stored)
    with errors_about(str(adapter_file)):
        slices = slices_by_linear(
            adapter_names, settings, directory, {**in_text, **outside}, stored)
    linears = [*in_text.values(), *quantized_outside(directory, outside, slices)]
    # these settings may have any value; open_adapter() refuses all others that change weights and
    # are not PEFT's defaults. layers_to_transform only selects linears, which the file names
    lora = LoraConfig(**{key: settings[key] for key in (
        "r", "lora_alpha", "use_rslora", "use_dora", "layers_to_transform")})
    shapes = {part.name: part.shape for parts in slices.values() for part in parts}
    adapter_tensors = open_adapter(adapter_dir, lora, shapes, "this merge")
    adapter_type = "rslora" if lora.use_rslora else "lora"  # for the scaling: DoRA's is LoRA's
    scaling = AdapterSettings(lora.r, lora.lora_alpha, adapter_type).scaling
    adapters = weight_adapters(adapter_dir, adapter_tensors, scaling, slices)
    base = base_in_16_bits(directory, stored, linears, model_class)
    run = TrainedRun(base_model=str(directory), template_file=template_beside(adapter_dir))
    return run, base, adapters


def linears_in_4bit(
    directory: Path, config: transformers.PreTrainedConfig, model_class: Any,
    stored: dict[str, StoredTensor],
) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts of the linears that transformers quantizes with load_in_4bit, {bare_name():
    its tensor's name in the files}: those of the text model, and those outside of it. The name is
    "" for one outside of it that the files do not have under transformers' name. Raises ValueError
    if the text model has experts, or a linear that the files do not have under this name; or if any
    linear is a Conv1D."""
    with errors_about(f"--base_model {directory}: transformers does not load it"):
        with accelerate.init_empty_weights(include_buffers=False):
            model = model_class.from_config(config, dtype=torch.bfloat16)
        quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
            transformers.BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False)
        quantizer.preprocess_model(model, device_map=None)
        text_modules = {*model.get_decoder().modules()}
    refuse_experts(directory, model, text_modules)
    by_name = {bare_name(name).removesuffix(".weight"): name for name in stored}
    in_text, outside = dict[str, str](), dict[str, str]()
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit):
            if module.source_cls is not nn.Linear:  # GPT-2's Conv1D, a linear
                raise ValueError(f"--base_model {directory}: {name} is a Conv1D, which the files"
                                 " have as [in, out]: use the adapter unmerged")
            bare = bare_name(name)
            if bare not in by_name and module in text_modules:
                raise ValueError(f"--base_model {directory}: has no {name}.weight, which"
                                 " transformers makes of other tensors and quantizes: use the"
                                 " adapter unmerged")
            (in_text if module in text_modules else outside)[bare] = by_name.get(bare, "")
    return in_text, outside


def refuse_experts(directory: Path, model: nn.Module, text_modules: set[nn.Module]) -> None:
    """Raise ValueError if the text model has experts: the version of transformers decides whether
    those are in NF4, and the adapter does not tell it."""
    for name, module in model.named_modules():
        # a weight with three dimensions is that of experts, if it is not a convolution's
        if module in text_modules and not isinstance(module, nn.Conv1d):
            for key, weight in module.named_parameters(name, recurse=False):
                if weight.dim() == 3:
                    raise ValueError(
                        f"--base_model {directory}: has experts: {key} is in NF4 or in bf16"
                        " depending on the version of transformers, which the adapter does not"
                        " tell: use it unmerged, or train with train_fsdp_qlora.py")


def slices_by_linear(
    adapter_names: Iterable[str], settings: dict[str, Any], directory: Path,
    linears: dict[str, str], stored: dict[str, StoredTensor]
) -> dict[str, list[AdapterSlice]]:
    """Return {linear: the AdapterSlice of each tensor of its adapter}. `linears`: both
    dicts of linears_in_4bit(), of the base in `directory`. Raises ValueError if the adapter has
    another linear."""
    slices = {}
    for stem in sorted({name.rpartition(".lora_")[0] or name for name in adapter_names}):
        if (bare := bare_name(stem)) not in linears:
            raise ValueError(f"{stem} is not a linear of the layers of {directory}: another base"
                             " model, or an adapter of more than linears in layers (lm_head,"
                             " embeddings, modules_to_save)?")
        if not (name := linears[bare]):  # outside the text model, see linears_in_4bit()
            raise ValueError(f"{stem}: the files of {directory} have another name for this linear"
                             " than transformers: use the adapter unmerged")
        n_out, n_in = stored[name].shape
        shapes = linear_adapter_shapes(n_out, n_in, settings["r"], settings["use_dora"])
        slices[name] = [AdapterSlice(f"{stem}.{key}", shape) for key, shape in shapes.items()]
    return slices


def quantized_outside(
    directory: Path, outside: dict[str, str], slices: dict[str, list[AdapterSlice]]
) -> list[str]:
    """Return the linears outside the text model that were in NF4 in training: all of them if one
    has an adapter; else it is not known, and none. Raises ValueError if the files have other
    names."""
    if slices.keys() & outside.values():  # then the base was loaded with these linears
        if not all(outside.values()):
            raise ValueError(f"--base_model {directory}: its tensors outside the text model have"
                             " other names than transformers: use the adapter unmerged")
        return [*outside.values()]
    if outside:
        print(f"note: {len(outside)} linears outside the text model, such as {min(outside)}, have"
              " no adapter and stay as the base has them: whether they were in NF4 in training is"
              " not known")
    return []


def base_in_16_bits(
    directory: Path, stored: dict[str, StoredTensor], linears: list[str], model_class: Any
) -> BaseForMerge:
    """Return the base, of which training had the tensors named `linears` in NF4."""
    names = TensorNames(
        linears={name: LinearShape(name, stored[name].shape[0], stored[name].shape[1], bias=False)
                 for name in linears})
    # other dtypes are left out, and counted as not used
    shapes = {name: (tensor.shape, merged_dtype(tensor))
              for name, tensor in in_file_order(stored) if tensor.dtype in (*FLOATS, "I64")}
    paths = {name: stored[name].path for name in shapes}
    return BaseForMerge(
        directory=directory, stored=stored, names=names,
        merged_layout=MergedLayout(shapes, paths, find_linears(names)),
        auto_class=model_class, training_dtype=torch.bfloat16)


def template_beside(adapter_dir: Path) -> Path | None:
    """Return the file with the chat template that is saved with an adapter, as TRL saves it."""
    for name in "chat_template.jinja", "tokenizer_config.json":
        path = adapter_dir / name
        if path.is_file() and (path.suffix == ".jinja" or isinstance(
                read_json(path).get("chat_template"), str)):
            return path
    return None


def bare_name(name: str) -> str:
    """Return a name without the prefixes of PEFT and of multimodal models."""
    return re.sub(r"^(base_model\.model\.)?((model|language_model)\.)*", "", name)
