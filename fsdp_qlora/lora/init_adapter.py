"""--init_adapter: read the adapter that a run begins with, and check that it fits the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import ADAPTER_CONFIG, read_json
from fsdp_qlora.log import log
from fsdp_qlora.lora.peft_files import open_own_adapter, with_adapter_form
from fsdp_qlora.lora.peft_names import stack_experts, unstack_experts
from fsdp_qlora.lora.targets import adapted_linears
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import read_tensor


# {setting of adapter_config.json: the flag that sets it}
SETTING_FLAGS = {"r": "--lora_rank", "lora_alpha": "--lora_alpha", "use_dora": "--adapter",
                 "use_rslora": "--adapter", "trainable_token_indices": "--trainable_tokens"}


def read_adapter(config: Config, arch: Architecture,
                 token_ids: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Return {PEFT's name: fp32 tensor} of --init_adapter. Raises ValueError unless it has the form
    of this run's adapter, with rows of these tokens."""
    directory = Path(str(config.init_adapter))
    with errors_about(f"--init_adapter {directory}"):
        with errors_about("is not an adapter in PEFT's format"):
            arch = with_adapter_form(arch, directory)
        stored, slices = open_own_adapter(
            directory, arch, config.adapter_settings,
            {*adapted_linears(arch, config.target_modules)}, token_ids, "this run", SETTING_FLAGS)
        values = {name: read_tensor(tensor, name) for name, tensor in stored.items()}
        own = unstack_experts(values, slices)
        for name, value in stack_experts(own, slices).items():
            if not torch.equal(value, values[name]):
                raise ValueError(f"in its {name} gate and up of an expert are not apart, as they"
                                 " are here")
    return {name: value.float() for name, value in own.items()}


def check_init_adapter_base(config: Config, base_sha256: str,
                            tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raise ValueError if the run that --init_adapter comes from had another base model than
    `base_sha256` ("": not known); log a line if it had another chat template. Rank 0 only."""
    directory = Path(str(config.init_adapter))
    train_config = next((found for place in (directory, directory.resolve().parent)
                         if (found := read_json(place / "train_config.json", {}))), {})
    theirs = train_config.get("base_sha256")
    if theirs and base_sha256 and theirs != base_sha256 and not config.random_weights:
        raise ValueError(f"--init_adapter {directory}: was trained on another base model,"
                         f" {train_config.get('base_model')}. Use that one as --model; or merge the"
                         " adapter, and use the merged model without --init_adapter")
    named = read_json(directory / ADAPTER_CONFIG, {}).get("base_model_name_or_path")
    if not train_config and named and Path(named).name != Path(str(config.model)).name:
        log(f"note: --init_adapter {directory}: names {named} as its base model, this run trains on"
            f" {config.model}: are they the same?")
    for place in directory, directory.resolve().parent:
        if (path := place / "chat_template.jinja").is_file() and tokenizer:
            if path.read_text() != tokenizer.chat_template:
                log(f"note: --init_adapter {directory}: was trained with another chat template. To"
                    f" use it: --chat_template {path}")
            break
