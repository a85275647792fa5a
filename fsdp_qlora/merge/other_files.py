"""What a merged model has beside its tensors: config.json, the index and the tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from fsdp_qlora.data.tokenizer_files import complete_tokenizer
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import read_json
from fsdp_qlora.merge.base_for_merge import BaseForMerge
from fsdp_qlora.merge.trained_run import TrainedRun
from fsdp_qlora.pretrained.model_directory import copy_small_files


def copy_other_files(directory: Path, base: BaseForMerge, run: TrainedRun) -> None:
    """Write all but the weights into `directory`: config.json without quantization, the index of
    tensors, the tokenizer and the like. Each of the three copies replaces files of the one before.
    """
    for path in run.tokenizer_files:  # for a base without one
        shutil.copyfile(path, directory / path.name)
    copy_small_files(base.directory, directory)
    # generation_config.json; and the tokenizer, if rows of tokens were trained
    for path in run.replacing_files:
        shutil.copyfile(path, directory / path.name)
    index = {"metadata": {"total_size": base.merged_layout.n_bytes},
             "weight_map": {name: path.name for name, path in base.merged_layout.paths.items()}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(merged_config(base), indent=2))
    with errors_about(f"{base.directory}: its tokenizer cannot be loaded"):
        complete_tokenizer(directory, run.template_file)


def merged_config(base: BaseForMerge) -> dict[str, Any]:
    """Return the merged model's config.json: the base's in bf16, with the trained vocabulary."""
    config = read_json(base.directory / "config.json")
    config["dtype"] = "bfloat16"
    if "torch_dtype" in config:  # the older name of dtype
        config["torch_dtype"] = "bfloat16"
    text = config.get("text_config") or config  # that of a multimodal model's language model
    if base.token_ids:
        (vocab_size, _), _ = base.merged_layout.shapes[base.names.embedding]
        for part in [part for part in (config, text) if "vocab_size" in part] or [text]:
            part["vocab_size"] = vocab_size
    for part in config, text:
        part.pop("quantization_config", None)  # of a base that is quantized in its files
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    return config
