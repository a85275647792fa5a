"""Open what a merge reads: a run, its base model and its adapter, checked to belong together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdp_qlora.adapter_settings import AdapterSettings
from fsdp_qlora.errors import errors_about
from fsdp_qlora.lora.peft_files import (
    WeightAdapter, open_own_adapter, weight_adapters, with_adapter_form)
from fsdp_qlora.lora.peft_names import adapter_shapes, token_row_names
from fsdp_qlora.lora.targets import adapted_linears
from fsdp_qlora.merge.adapter_without_run import open_adapter_without_run
from fsdp_qlora.merge.base_for_merge import (
    OTHER_BASE, BaseForMerge, auto_class, is_multimodal)
from fsdp_qlora.merge.merged_layout import add_other_parts, make_merged_layout
from fsdp_qlora.merge.trained_run import TrainedRun, find_train_config, read_run
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.model_directory import base_digest, find_model
from fsdp_qlora.pretrained.reader import stored_tensors
from fsdp_qlora.pretrained.tensor_names import tensor_names


def open_run(
    adapter_dir: Path, base_model: str | None, allow_other_base: bool
) -> tuple[TrainedRun, BaseForMerge, dict[str, WeightAdapter]]:
    """Return the run that trained the adapter, its base model, and {name of a linear, or of a table
    with trained rows: its adapter}. Raises ValueError unless they belong together. `base_model`:
    None for the run's."""
    if base_model and not find_train_config(adapter_dir).is_file():
        return open_adapter_without_run(adapter_dir, base_model)
    run = read_run(adapter_dir)
    # base.read() compares each tensor with the checksum that training took of it. Tensors without
    # one are compared only by base_digest()'s samples: those that training did not read (a vision
    # tower), and those that it read in parts but a merge copies whole (Sarvam's bias of q, k and v;
    # OLMo-Hybrid's convolutions)
    checksums = {} if allow_other_base else run.quantization["tensor_sums"]
    base = read_base(base_model or run.base_model, run.quantization, checksums, run.token_ids)
    check_base(base, run, allow_other_base)
    return run, base, adapters_of_run(adapter_dir, run, base)


def read_base(name: str, quantization: dict[str, Any], checksums: dict[str, str],
              token_ids: Sequence[int]) -> BaseForMerge:
    """Return the base model of a run, after the same checks of its files as in training.
    `checksums`: those that its tensors must have; `token_ids`: the tokens whose rows were trained;
    see BaseForMerge."""
    directory = find_model(name, "weights", "--base_model")
    in_nf4, dtype = quantization["prequantized"], quantization["quantized_from_dtype"]
    with errors_about(f"base model {directory}"):
        model_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        arch = make_architecture(model_config)
        if token_ids:  # the merged vocabulary, embedding and lm_head are large enough for them
            arch = arch.with_token(max(token_ids))
        stored = stored_tensors(directory)
        names = tensor_names(arch, stored)
        nf4_states = check_files(stored, names, model_config, dtype)
        if in_nf4 != bool(nf4_states):
            raise ValueError(f"is {'' if nf4_states else 'not '}in NF4, unlike the one in training."
                             " Name that one with --base_model")
        if is_multimodal(model_config):
            add_other_parts(names, stored)
        layout = make_merged_layout(stored, names, nf4_states, arch.vocab_size)
    return BaseForMerge(
        directory=directory, stored=stored, names=names, nf4_states=nf4_states,
        merged_layout=layout, auto_class=auto_class(model_config),
        training_dtype=getattr(torch, dtype), arch=arch, checksums=checksums,
        token_ids=token_ids)


def check_base(base: BaseForMerge, run: TrainedRun, allow_other: bool) -> None:
    """Raise ValueError unless the base is the one that the run was trained on."""
    if allow_other:
        print("warning: --allow_other_base: the base may be another one: nothing will be compared")
        return
    if base_digest(base.directory) != run.base_sha256:
        raise ValueError(f"{base.directory}: its config.json or its weights {OTHER_BASE}")
    if max(map(max, run.merge_check_ids)) >= base.run_arch.vocab_size:
        raise ValueError("train_config.json has probe_input_ids outside the base's vocabulary of"
                         f" {base.run_arch.vocab_size}: another base model?")


def adapters_of_run(
    adapter_dir: Path, run: TrainedRun, base: BaseForMerge
) -> dict[str, WeightAdapter]:
    """Return {name of a linear, or of a table with trained rows: its adapter}. Raises ValueError
    unless the files are those of the run."""
    config = run.config
    settings = AdapterSettings(config["lora_rank"], config["lora_alpha"], config["adapter"])
    arch = with_adapter_form(base.run_arch, adapter_dir)
    adapted = {*adapted_linears(arch, config["target_modules"])}
    stored, slices = open_own_adapter(
        adapter_dir, arch, settings, adapted, base.token_ids, "train_config.json")
    # {name of a weight: its A, B and magnitudes, or its rows}
    slices_of = {base.names.of_layer(layer, f"{linear}.weight"): [slices[name] for name in shapes]
                 for (layer, linear), shapes in adapter_shapes(arch, settings, adapted).items()}
    if base.token_ids:
        slices_of |= {table: [slices[name]] for table, name in token_row_tables(base, arch).items()}
    # one scaling for all: an alpha_pattern of experts has the factor of their rank_pattern
    return weight_adapters(adapter_dir, stored, settings.scaling, slices_of)


def token_row_tables(base: BaseForMerge, arch: Architecture) -> dict[str, str]:
    """Return {embedding or lm_head: the one of token_row_names() that has its trained rows}."""
    names = base.names
    tables = dict(zip((names.embedding, names.lm_head), token_row_names(arch)))
    if arch.tied and names.lm_head in base.merged_layout.shapes:  # a copy of the embedding
        tables[names.lm_head] = tables[names.embedding]
    return tables
