"""Locate the base model: directory, Hub id or built-in config; its config.json and digest."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from fsdp_qlora.config import Config
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import ADAPTER_CONFIG, ADAPTER_FILES, read_json
from fsdp_qlora.log import log
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.families import BUILTIN_CONFIGS
from fsdp_qlora.pretrained.from_config import make_architecture, quantization_config_of, text_config
from fsdp_qlora.pretrained.reader import stored_tensors
from fsdp_qlora.pretrained.weight_formats import FP8_BLOCK, INT4_GROUP


SMALL_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # a model's files other than its weights
NOT_COPIED = "config.json", ADAPTER_CONFIG  # the second makes transformers load an adapter
NO_GGUF = ("is a GGUF file, which is for llama.cpp. Use the model that it was made from, a Hub id"
           " or a directory of safetensors")
# places per tensor, and bytes at each, that base_digest() hashes
N_SAMPLED_PLACES, SAMPLED_BYTES = 16, 256


def find_model(name: str, needs: str, flag: str = "--model") -> Path:
    """Return the local directory of a model, downloaded first if `name` is a Hub id. `needs`:
    "config"; "tokenizer", which includes it; or "weights", which includes both. Raises ValueError
    about `flag`, with which the user named the model."""
    path = Path(name)
    if needs != "weights" and name in BUILTIN_CONFIGS:
        return path
    if path.is_dir():
        if why := why_no_model(path, name, needs):
            raise ValueError(f"{flag} {name}: {why}")
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        why = "neither a directory nor a Hub id (owner/name)"
        raise ValueError(f"{flag} {name}: {NO_GGUF if path.suffix == '.gguf' else why}")
    files = {"config": ["config.json"], "tokenizer": SMALL_FILES,
             "weights": [*SMALL_FILES, "*.safetensors"]}[needs]
    twice = ["consolidated*", "*/*.safetensors"]  # copies of the weights in another form
    with errors_about(f"{flag} {name}: not a directory, and the Hub says"):
        # every rank calls it; the Hub client's file locks let one rank of a node download
        found = Path(huggingface_hub.snapshot_download(
            name, allow_patterns=files, ignore_patterns=twice))
    if why := why_no_model(found, name, needs):
        raise ValueError(f"{flag} {name}: {why}")
    return found


def why_no_model(directory: Path, name: str, needs: str) -> str:
    """Return why the directory has no model that can be read, and what to use instead; "" if it may
    have one. `name` and `needs`: see find_model()."""
    # .gguf files of a Hub id are not downloaded, so also look at its name
    is_gguf = any(directory.glob("*.gguf")) or name.lower().endswith("gguf")
    lacks_weights = needs == "weights" and not any(directory.glob("*.safetensors"))
    if (directory / "config.json").is_file() and not (is_gguf and lacks_weights):
        return ""
    adapter = read_json(directory / ADAPTER_CONFIG, {})
    if adapter:
        base = adapter.get("base_model_name_or_path")
        return (f"is an adapter. Use the model that it was trained on, {base};"
                " train_fsdp_qlora.py --init_adapter trains an adapter further")
    if is_gguf:
        return NO_GGUF
    return "has no config.json: is it the directory of a model, with its safetensors?"


def copy_small_files(directory: Path, target: Path, patterns: Sequence[str] = SMALL_FILES) -> None:
    """Copy a model's tokenizer, chat templates and the like, but no weights, index, config.json or
    adapter, and no link to a file outside the directory."""
    own = directory.resolve()
    # a directory of the Hub's cache links to ../../blobs
    own = own.parent.parent if own.parent.name == "snapshots" else own
    for pattern in (*patterns, "additional_chat_templates/*.jinja"):
        for path in directory.glob(pattern):
            if not path.resolve().is_relative_to(own):
                log(f"note: {path} is not copied, it is a link to another directory")
            elif path.name not in NOT_COPIED and not path.name.endswith(".index.json"):
                copy = target / path.relative_to(directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


def read_model_config(
        directory: Path, config: Config) -> tuple[PreTrainedConfig, Architecture]:
    """Return transformers' config of the model, and its Architecture. Raises ValueError if the
    model cannot be trained."""
    with errors_about(f"--model {config.model}"):
        if config.random_weights and config.model in BUILTIN_CONFIGS:
            model_config = AutoConfig.for_model(**BUILTIN_CONFIGS[config.model])
        else:
            model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        arch = make_architecture(model_config)
    refuse_misleading(directory, config, model_config, arch)
    refuse_format(config, model_config, arch)
    if config.loss != "sft":  # preference losses train without the model's own dropout, as in TRL
        arch = dataclasses.replace(
            arch, attention_dropout=0.0, embedding_dropout=0.0, residual_dropout=0.0)
    return model_config, arch


def refuse_format(config: Config, model_config: PreTrainedConfig, arch: Architecture) -> None:
    """Raise ValueError if the weights are in a quantized format that weight_formats.py does not
    have."""
    settings = quantization_config_of(model_config)
    if not settings or arch.expert_down and arch.expert_down[0].mxfp4:
        return  # in MXFP4 the experts stay as they are, and nothing else is quantized
    want: dict[str, Any] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True}
    if settings.get("quant_method") == "fp8":
        want = {"weight_block_size": [FP8_BLOCK, FP8_BLOCK]}
    if settings.get("quant_method") == "compressed-tensors":
        want = {"format": "pack-quantized", "type": "int", "num_bits": 4, "symmetric": True,
                "group_size": INT4_GROUP}
        for group in settings.get("config_groups", {}).values():
            settings |= group["weights"]
    for key, value in want.items():
        if settings.get(key) != value:
            raise ValueError(f"--model {config.model}: is quantized already, with {key}"
                             f" {settings.get(key)}; only {value} is supported. Use the original"
                             " model")


def refuse_misleading(directory: Path, config: Config, model_config: PreTrainedConfig,
                      arch: Architecture) -> None:
    """Raise ValueError for models that could be trained, but whose result would not be the model
    that transformers loads from the directory."""
    if (directory / ADAPTER_CONFIG).is_file():
        raise ValueError(f"--model {config.model}: has an adapter beside its weights, which"
                         f" transformers would add to them: move {' and '.join(ADAPTER_FILES)}"
                         " elsewhere; --init_adapter continues with them")
    is_text = text_config(model_config) is model_config
    if is_text and type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--model {config.model}: transformers has {arch.family} only"
                         " inside a multimodal model, and would not load the merged model")
    pad = text_config(model_config).pad_token_id
    if pad is not None and not -arch.vocab_size <= pad < arch.vocab_size:
        raise ValueError(f"--model {config.model}: config.json has pad_token_id {pad}, outside of"
                         f" its vocabulary of {arch.vocab_size}, and transformers would not load"
                         " the merged model: set it to null")


def base_digest(directory: Path) -> str:
    """Return the SHA-256 of the base model: of config.json, and of the name, dtype, shape and some
    bytes of each tensor."""
    sha = hashlib.sha256((directory / "config.json").read_bytes())
    stored = stored_tensors(directory)
    tensors = sorted(stored.items(), key=lambda tensor: (tensor[1].path, tensor[0]))
    for path, file_tensors in itertools.groupby(tensors, lambda tensor: tensor[1].path):
        with path.open("rb") as file:
            for name, (_, dtype, shape, start, stop) in file_tensors:
                sha.update(f"{name} {dtype} {shape}".encode())
                last = max(start, stop - SAMPLED_BYTES)
                for at in np.linspace(start, last, N_SAMPLED_PLACES, dtype=np.int64):
                    sha.update(os.pread(file.fileno(), min(SAMPLED_BYTES, stop - start), int(at)))
    return sha.hexdigest()
