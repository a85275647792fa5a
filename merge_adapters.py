#!/usr/bin/env python3
"""Merge a LoRA adapter trained by train_fsdp_qlora.py into its base model: plain bf16 safetensors.

    python merge_adapters.py --adapter_dir runs/my-run --output_dir runs/my-run/merged
    python merge_adapters.py --adapter_dir runs/my-run/checkpoint-000040 --output_dir merged-40
    python merge_adapters.py --adapter_dir adapter --base_model DIR_OR_HUB_ID --output_dir merged

The adapter was trained on NF4 weights, so it is added to those: W + scaling * B @ A in fp32, once
rounded to bf16. W is the base's weight as training had it: quantized to NF4 and dequantized, or
only dequantized where the base is in 4-bit already. DoRA scales each row of the sum to its
magnitude. A linear of the decoder's layers without an adapter becomes W; all else stays the base's
own. --output_dir appears when all is done and gives, for a few rows, what the trained model gave.

The last command merges an adapter of minimal_fsdp_qlora.py, or any that PEFT has saved, where there
is no train_config.json. It cannot be checked: that it was trained on the base in NF4 is taken on
trust. W is then what transformers makes of the base with load_in_4bit.

The whole job stands below, in the order in which it happens; fsdp_qlora/ has what it depends on.
Tested with torch 2.13, transformers 5.20 and 5.24, peft 0.21, bitsandbytes 0.50.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # until all is imported: it would look through ever more, a fifth of the time

# on a CPU it warns that a package is missing, which only its own inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import accelerate
import bitsandbytes as bnb
import torch
import transformers
from peft import LoraConfig
from safetensors import SafetensorError
from torch import nn
from tqdm import tqdm

from fsdp_qlora.data.template import how_to_ask
from fsdp_qlora.data.tokenizer import complete_tokenizer
from fsdp_qlora.files import read_json, sync_file, write_tensors
from fsdp_qlora.lora.peft_names import as_saved, expert_parts, expert_settings, file_parts
from fsdp_qlora.model.lm_head import scaled_logits
from fsdp_qlora.pretrained.config import describe_model, stored_format, text_config
from fsdp_qlora.pretrained.formats import (
    INT4_PACKED, INT4_SHAPE, MX_PARTS, NF4_PARTS, scaled_weight)
from fsdp_qlora.pretrained.hub import base_digest, copy_small_files, model_directory
from fsdp_qlora.pretrained.reader import (
    FLOATS, OTHER_BASE, Stored, read_tensor, tensors_of, weight_files)
from fsdp_qlora.pretrained.tensor_names import TensorNames, check_files, tensor_names
from fsdp_qlora.quant.blocks import BLOCK, MX_BLOCK
from fsdp_qlora.quant.nf4 import mxfp4_values
from fsdp_qlora.ranks import explain, print_error
from fsdp_qlora.run.directory import ADAPTER_FILES, open_partial, read_run
from fsdp_qlora.training.check import without_kernels
from fsdp_qlora.training.divergence import why_worse

LARGE_ERROR = 0.20  # of the adapter's own effect: a warning from here on
FAILED_ERROR = 1.0  # further from what was trained than the base is: not a merge of it
AUTO_CLASSES = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
FREE = """peft_version base_model_name_or_path task_type auto_mapping inference_mode lora_dropout
    target_modules exclude_modules""".split()  # of adapter_config.json: not used here
UNMERGED = """; to use the adapter without merging it:
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(transformers.{}.from_pretrained(\
"{}", quantization_config=nf4), "{}")"""

# of a linear: a function that reads a tensor, file_parts(), scaling
AdapterParts = tuple[Callable[..., torch.Tensor], list[tuple[str, tuple[int, ...], Any]], float]


def main(argv: Sequence[str] | None = None) -> None:
    """Exits with 1 and one line on stderr where the merge fails; Ctrl-C is such a failure."""
    try:
        merge(parse_args(argv))
    except (ValueError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError,
            KeyboardInterrupt) as e:
        print_error(f"error: {str(e).strip() or 'stopped'}")
        sys.exit(1)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the flags. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    add = parser.add_argument
    add("--adapter_dir", required=True,
        help="run of train_fsdp_qlora.py or a checkpoint in it; with --base_model any PEFT adapter")
    add("--output_dir", required=True, help="where the merged model goes: a new directory")
    add("--base_model", help="Hub id or directory; default: the one that train_config.json names")
    add("--device", choices=("cpu", "cuda"), help="quantizes and checks; default: as in training")
    add("--allow_other_base", action="store_true", help="merge into another base, and never check")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare at the end")
    return parser.parse_args(argv)


def merge(args: argparse.Namespace) -> None:
    """The whole job, from the flags to the merged model."""
    adapter_dir, output = Path(args.adapter_dir), Path(args.output_dir)
    transformers.utils.logging.disable_progress_bar()
    file, places = adapter_dir / ADAPTER_FILES[1], (adapter_dir, adapter_dir.resolve().parent)
    saved_config = file.stat() if file.is_file() else None  # else reading says so
    has_config = any((place / "train_config.json").is_file() for place in places)
    read = read_checked if has_config or not args.base_model else read_unchecked
    run, base, adapter, device = read(args, adapter_dir)
    log_base(base, len(adapter))
    partial, lock_fd = open_partial(output)
    with os.fdopen(lock_fd):
        try:
            require(not output.exists() or not any(output.iterdir()),
                    f"--output_dir {output}: exists already and is not empty: name a new one")
            write_merged(partial, output, base, adapter, run, device)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        verdict = "not checked: whether the merged model gives what was trained is not known"
        try:
            if args.check:
                verdict = check(base, run["probe"], partial, run["probe_input_ids"], device)
            if verdict.startswith("not fine") and not base.arch.moe:  # see docs/serving.md
                verdict += UNMERGED.format(base.auto_class.__name__, base.directory, adapter_dir)
            require(saved_config and os.path.samestat(saved_config, file.stat()),
                    f"{adapter_dir}: has got another adapter meanwhile: merge again")
            partial = partial.replace(output.resolve())
        finally:  # not before: another merge would take the directory for that of a dead one
            (partial / ".lock").unlink()
    sync_file(partial.parent)
    print(f'merged model saved; to load it: {base.auto_class.__name__}.from_pretrained("{output}")')
    asked = {json.dumps(way["chat_template_kwargs"]): way["answers"]
             for way in run.get("asked", ())}
    if how := how_to_ask(asked):
        print(how)
    if why := why_worse(run["losses"]):
        verdict = f"not fine: {why}; {re.sub('^(not )?fine: ', '', verdict)}"
    print(verdict)


def log_base(base: argparse.Namespace, n_adapted: int) -> None:
    """Print what is merged."""
    linears, used = base.names.linears, {*base.tensors, *base.names.shapes}
    unused = [n for n in base.files if n not in used and not n.endswith(NF4_PARTS)]
    others = f"; {len(unused)} tensors are not used, as {unused[0]}" if unused else ""
    print(f"base model {base.directory}: {len(linears)} linears in 4 bits, {n_adapted} with an"
          f" adapter{others}")
    if n := sum(x.out_features * x.in_features for x in linears.values() if x.mxfp4):
        print(f"experts in MXFP4, {17 * n / 32 / 2**30:.3g} GiB, are written as bf16,"
              f" {2 * n / 2**30:.3g} GiB")


def read_checked(args: argparse.Namespace, adapter_dir: Path) -> tuple[
        dict[str, Any], argparse.Namespace, dict[str, AdapterParts], str]:
    """Returns what read_run(), read_base() and match_adapter() do, and the device to merge on."""
    run = read_run(adapter_dir)
    base = read_base(args.base_model or run["base_model"], run["quantization"])
    if args.allow_other_base:
        print("WARNING: --allow_other_base: the base may be another one: nothing will be compared")
        base.sums, args.check = {}, False
    elif sha := run.get("base_sha256"):
        require(base_digest(base.directory) == sha, f"{base.directory}: its config.json or its"
                f" weights {OTHER_BASE}")
    adapter = match_adapter(adapter_dir, run["config"], base)
    rows, trained_on = run["probe_input_ids"], run["quantization"]["device"]
    require(max(map(max, rows)) < base.arch.vocab_size, "train_config.json has probe_input_ids"
            f" outside the base's vocabulary of {base.arch.vocab_size}: another base model?")
    device = args.device or (trained_on if torch.cuda.is_available() else "cpu")
    require(device == "cpu" or torch.cuda.is_available(), "--device cuda: there is no GPU here")
    if device != trained_on:
        print(f"note: trained on {trained_on}, merging on {device}: the last bit may differ")
    return run, base, adapter, device


def read_unchecked(args: argparse.Namespace, adapter_dir: Path) -> tuple[
        dict[str, Any], argparse.Namespace, dict[str, AdapterParts], str]:
    """Returns what read_checked() does, of an adapter that PEFT has saved: the base was loaded by
    transformers with load_in_4bit, from bf16."""
    path, file = [adapter_dir / name for name in ADAPTER_FILES]
    settings, stored = {**LoraConfig().to_dict(), **read_json(path)}, tensors_of(file)
    directory = model_directory(args.base_model, "weights", "--base_model")
    with explain(f"--base_model {directory}"):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        require(not stored_format(config), "is quantized already")
    auto_class, files = AUTO_CLASSES[hasattr(config, "text_config")], weight_files(directory)
    print(f"WARNING: {adapter_dir} has no train_config.json: that it was trained on {directory} in"
          f" NF4 is taken on trust (its {path.name} names {settings['base_model_name_or_path']}),"
          " and nothing will be compared")
    in_4bit, others = linears_in_4bit(directory, config, auto_class, files)
    where, r = dict[str, list[tuple[str, tuple[int, ...], Any]]](), settings["r"]
    for stem in sorted({name.rpartition(".lora_")[0] or name for name in stored}):
        name = {**in_4bit, **others}.get(bare_name(stem), "")
        require(name, f"{file}: {stem} is no linear of the layers of {directory}: another base"
                " model?")
        shape = files[name].shape
        parts: dict[str, tuple[int, ...]] = {
            "lora_A.weight": (r, shape[1]), "lora_B.weight": (shape[0], r)}
        parts |= {"lora_magnitude_vector": shape[:1]} if settings["use_dora"] else {}
        where[name] = [(f"{stem}.{part}", shape, ...) for part, shape in parts.items()]
    linears = [*in_4bit.values()]
    if where.keys() & others.values():  # then it was loaded with them
        require(all(others.values()), f"--base_model {directory}: its tensors outside the text"
                " model have other names than transformers: use the adapter unmerged")
        linears += others.values()
    elif others:
        print(f"note: {len(others)} linears outside the text model, as {min(others)}, have no"
              " adapter and stay as the base has them: whether they were in NF4 in training is not"
              " known")
    lora = LoraConfig(r=r, **{key: settings[key] for key in (
        "lora_alpha", "use_rslora", "use_dora")})
    tensors = {n: (x.shape, torch.bfloat16) for n, x in in_order(files) if x.dtype in FLOATS}
    base = argparse.Namespace(
        directory=directory, files=files, nf4_states={}, parts={}, tensors=tensors,
        names=argparse.Namespace(linears=dict.fromkeys(linears, argparse.Namespace(mxfp4=False)),
                                 shapes={}, sources={}, scaled={}),
        auto_class=auto_class, dtype=torch.bfloat16, sums={},
        paths={name: files[name].path for name in tensors},
        n_bytes=sum(2 * math.prod(shape) for shape, _ in tensors.values()))
    args.check, run = False, {
        "tokenizer": [], "extras": [], "template": template_beside(adapter_dir), "losses": []}
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return run, base, read_adapter(adapter_dir, lora, where, "this merge"), device


def linears_in_4bit(
    directory: Path, config: transformers.PreTrainedConfig, auto_class: Any,
    files: dict[str, Stored],
) -> tuple[dict[str, str], dict[str, str]]:
    """Returns {bare_name() of a linear: its tensor's name in the files} of those that transformers
    quantizes with load_in_4bit, in the text model and outside of it, where the name may be "", not
    found. Raises ValueError for a mixture, of which that depends on the version of transformers."""
    with explain(f"--base_model {directory}: transformers does not load it"):
        with accelerate.init_empty_weights(include_buffers=False):
            model = auto_class.from_config(config, dtype=torch.bfloat16)
        quantizer = transformers.quantizers.AutoHfQuantizer.from_config(
            transformers.BitsAndBytesConfig(load_in_4bit=True), pre_quantized=False)
        quantizer.preprocess_model(model, device_map=None)
        of_text = {*model.get_decoder().modules()}
    stored = {bare_name(name).removesuffix(".weight"): name for name in files}
    in_text, outside = dict[str, str](), dict[str, str]()
    for name, module in model.named_modules():
        if module in of_text and not isinstance(module, nn.Conv1d):
            for key, weight in module.named_parameters(name, recurse=False):
                require(weight.dim() < 3, f"--base_model {directory}: has experts: {key} is in NF4"
                        " or in bf16 depending on the version of transformers, which the adapter"
                        " does not tell: use it unmerged, or train with train_fsdp_qlora.py")
        if isinstance(module, bnb.nn.Linear4bit):
            bare = bare_name(name)
            require(bare in stored or module not in of_text, f"--base_model {directory}: has no"
                    f" {name}.weight, which transformers makes of other tensors and quantizes: use"
                    " the adapter unmerged")
            (in_text if module in of_text else outside)[bare] = stored.get(bare, "")
    return in_text, outside


def template_beside(adapter_dir: Path) -> Path | None:
    """Returns the file with the chat template that is saved with an adapter, as TRL does it."""
    for name in "chat_template.jinja", "tokenizer_config.json":
        path = adapter_dir / name
        if path.is_file() and (path.suffix == ".jinja" or isinstance(
                read_json(path).get("chat_template"), str)):
            return path
    return None


def bare_name(name: str) -> str:
    """A name without the prefixes of PEFT and of multimodal models."""
    return re.sub(r"^(base_model\.model\.)?((model|language_model)\.)*", "", name)


def read_base(name: str, quantization: dict[str, Any]) -> argparse.Namespace:
    """Returns what is known of the base model, its files checked as training checks them."""
    directory = model_directory(name, "weights", "--base_model")
    in_4bit = quantization["prequantized"]
    with explain(f"base model {directory}"):
        model_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        arch, files = describe_model(model_config), weight_files(directory)
        names = tensor_names(arch, files)
        states = check_files(files, names, model_config, quantization["quantized_from_dtype"])
        require(in_4bit == bool(states), f"is {'' if states else 'not '}quantized already; with"
                " --base_model name the one that was trained on")
        is_multimodal = text_config(model_config) is not model_config
        tensors, paths = merged_tensors(files, names, states, is_multimodal)
    return argparse.Namespace(
        directory=directory, arch=arch, files=files, nf4_states=states, names=names,
        parts=names.parts(), auto_class=AUTO_CLASSES[is_multimodal],
        tensors=tensors,  # {name: (shape, dtype)} of what the merged model holds, file by file
        paths=paths,  # {name: the file of the base in whose place it goes}
        n_bytes=sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values()),
        dtype=getattr(torch, quantization["quantized_from_dtype"]),
        sums=quantization["tensor_sums"])  # they tell one base from another


def merged_tensors(
    files: dict[str, Stored], names: TensorNames, nf4_states: dict[str, Any], is_multimodal: bool,
) -> tuple[dict[str, tuple[tuple[int, ...], torch.dtype]], dict[str, Path]]:
    """Returns {name: (shape, dtype)} of the merged model's tensors, file by file, and {name: the
    base model's file that its file replaces}. Experts in MXFP4 become [experts, in, out], the form
    of gpt-oss, the only family with MXFP4. Raises ValueError for what cannot be merged."""
    tensors, paths, of_text = {}, {}, names.layer_prefix.removesuffix("layers.")
    known, scales = {*names.shapes, names.head}, {*names.scaled.values()}
    for name, stored in in_order(files):
        shape = names.shapes.get(name, stored.shape)
        if name not in known:
            # a multimodal model has other parts besides its text model, which are copied
            if not is_multimodal or name.startswith(of_text):
                continue
            require(not name.endswith((*NF4_PARTS, INT4_PACKED)), f"{stored.path}: {name} is of a"
                    " weight in 4-bit outside the text model's layers, which is not merged")
        elif name in scales or name.endswith(("_scales", INT4_SHAPE)):
            continue
        elif name.endswith(INT4_PACKED):
            linear = names.linears[name]
            name, shape = name.removesuffix(INT4_PACKED), (linear.out_features, linear.in_features)
        elif name.endswith("_blocks"):
            name = name.removesuffix("_blocks")
            shape = shape[0], shape[2] * MX_BLOCK, shape[1]
        # training used these in fp32, so they stay in fp32; transformers also keeps some of them in
        # fp32, such as a router's correction, and rounds the others itself
        is_exact = (name in names.small_tensors and name not in nf4_states
                    and stored.dtype == "F32")
        tensors[name] = shape, torch.float32 if is_exact else torch.bfloat16
        paths[name] = stored.path
    return tensors, paths


def in_order(files: dict[str, Stored]) -> list[tuple[str, Stored]]:
    """Returns all (name, Stored) file by file, in the order in which they lie there."""
    return sorted(files.items(), key=lambda item: (item[1].path, item[1].start))


def match_adapter(adapter_dir: Path, config: dict[str, Any],
                  base: argparse.Namespace) -> dict[str, AdapterParts]:
    """Returns read_adapter() of a run whose train_config.json has this `config`."""
    r, alpha, kind = config["lora_rank"], config["lora_alpha"], config["adapter"]
    path, file = [adapter_dir / name for name in ADAPTER_FILES]
    arch = as_saved(base.arch, read_json(path), tensors_of(file))
    names, adapted = base.names, set(arch.adapted(config["target_modules"]))
    lora = LoraConfig(r=r, lora_alpha=alpha, use_rslora=kind == "rslora", use_dora=kind == "dora",
                      **expert_settings(arch, r, alpha, adapted))
    where, of_experts = {}, expert_parts(arch, r)
    for name, linear in names.linears.items():
        if linear.name in adapted:
            layer = name.removeprefix(names.layer_prefix).partition(".")[0]
            where[name] = file_parts(arch, layer, linear, r, kind, of_experts)
    return read_adapter(adapter_dir, lora, where, "train_config.json")


def read_adapter(adapter_dir: Path, lora: LoraConfig,
                 where: dict[str, list[tuple[str, tuple[int, ...], Any]]],
                 source: str) -> dict[str, AdapterParts]:
    """Returns {linear's name: (function that reads a tensor, its parts, scaling)}. The parts of A,
    B and DoRA's magnitudes are those of `where`: (name in the file, shape there, index). Raises
    ValueError unless both files have what `source` asks for, which is `lora` and `where`."""
    path, file = [adapter_dir / name for name in ADAPTER_FILES]
    wanted, found = lora.to_dict(), {**LoraConfig().to_dict(), **read_json(path)}
    for name, value in found.items():  # PiSSA, OLoRA and others train on a changed base
        require(name in FREE or value == wanted.get(name) or not (value or name in wanted),
                f"{path}: {name} is {value!r:.80}, by {source} {wanted.get(name)!r}")
    stored = tensors_of(file)
    read = functools.lru_cache(4)(lambda n, to: read_tensor(stored[n], n, to))  # once for experts
    shapes = {name: shape for parts in where.values() for name, shape, _ in parts}
    found = {n: tensor.shape for n, tensor in stored.items()}
    odd = min((n for n in {*found, *shapes} if found.get(n) != shapes.get(n)), default="")
    require(not odd, f"{file}: {odd} is {found.get(odd, 'missing')}, but the base model"
            f" and {source} ask for {shapes.get(odd, 'none')}: another base model?")
    used = [n for n, x in stored.items() if finite(read_tensor(x, n).float(), f"{file}: {n}").any()]
    require(any("lora_B" in n for n in used), f"{file}: is empty or untrained: lora_B is all 0")
    scale = lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)
    return {name: (read, parts, scale) for name, parts in where.items()}


def write_merged(partial: Path, output: Path, base: argparse.Namespace,
                 adapter: dict[str, AdapterParts], run: dict[str, Any], device: str) -> None:
    """Write the merged model into `partial`, which is to become `output`, and print how far
    rounding takes it from the exact sum. ValueError if the disk has no room."""
    gib, free = base.n_bytes / 2**30, shutil.disk_usage(partial).free / 2**30
    require(free >= gib, f"--output_dir {output}: needs {gib:.1f} GiB, {free:.1f} are free")
    sums = {"error": 0.0, "effect": 0.0}
    with tqdm(base.tensors, "merge", unit="tensor", disable=None) as names:  # off in a pipe
        tensors = (merged_tensor(name, base, adapter, device, sums) for name in names)
        write_files(partial, base, tensors, run)
    rounding = math.sqrt(sums["error"] / max(sums["effect"], sys.float_info.min))
    print(f"wrote {len(base.tensors)} tensors, {gib:.3f} GiB; rounding to bf16 moves the"
          f" weights by {rounding:.4f} of what the adapter adds to them, in random"
          " directions that mostly cancel out; the check tells how much reaches the logits")


def merged_tensor(name: str, base: argparse.Namespace, adapter: dict[str, AdapterParts],
                  device: str, sums: dict[str, float]) -> torch.Tensor:
    """Returns one tensor of the merged model, on the CPU."""
    path, (shape, dtype) = base.paths[name], base.tensors[name]
    merged = torch.empty(shape, dtype=dtype)
    for part, index in base.parts.get(name, [(name, ...)]):  # of all experts, or the whole
        tensor, transposed = read_part(base, name, part, index, device)
        if part in base.names.linears or part in base.nf4_states:
            tensor = trained_weight(tensor, part, path, base)
        if part in adapter:
            read, where, scale = adapter[part]
            tensor = add_adapter(tensor, sums, scale, *(read(n, device)[i] for n, _, i in where))
        merged[index] = tensor.t() if transposed else tensor
    return finite(merged, f"{path}: what {name} becomes")


def read_part(base: argparse.Namespace, whole: str, part: str, index: Any,
              device: str) -> tuple[torch.Tensor, bool]:
    """The tensor `whole` of the base model's files or the `part` of it at `index`, see
    TensorNames.parts(); and whether the tensor in 16 bits is its transpose. A linear is [out, in];
    in FP8 and INT4 it is multiplied by its scales; in MXFP4 it becomes fp32. Raises ValueError if
    its content is not that of base.sums."""
    files, names, sums = base.files, base.names, base.sums
    if part in names.linears and names.linears[part].mxfp4:
        blocks, scales = (
            read_tensor(files[whole + end], whole + end, device, sums.get(part + end), index,
                        part + end) for end in MX_PARTS)
        packed, scales = blocks.view(-1, BLOCK // 2), scales.view(-1, BLOCK // MX_BLOCK)
        values = mxfp4_values(packed << 4 | packed >> 4, scales)  # low halves come first in files
        return values.view(len(blocks), -1), True
    name = part if part.endswith(INT4_PACKED) else whole
    transposed = part in names.sources and names.sources[part].columns is not None
    tensor = read_tensor(files[name], name, device, sums.get(part), index, part, transposed)
    if scales := names.scaled.get(part):
        of_scales = read_tensor(files[scales], scales, device, sums.get(scales))
        tensor = scaled_weight(part, tensor, of_scales)
    return tensor, transposed


def trained_weight(weight: torch.Tensor, name: str, path: Path,
                   base: argparse.Namespace) -> torch.Tensor:
    """Returns what training computed with: a weight of the decoder's layers in NF4, dequantized, or
    one that was in MXFP4, as it is."""
    linear = base.names.linears.get(name)  # None: a router in NF4
    if linear and linear.mxfp4:
        return weight.to(base.dtype)
    if name in base.nf4_states:
        parts = [f"{name}.{part}" for part in NF4_PARTS]
        parts = {part: read_tensor(base.files[part], part, content=base.sums.get(part))
                 for part in parts}
        with explain(f"{path}: {name}: its quantization is damaged"):
            state = bnb.functional.QuantState.from_dict(parts, weight.device)
        state.dtype = base.dtype  # of training, whatever it was quantized from
        packed = weight.view(torch.uint8)
    else:
        weight = finite(weight.to(base.dtype), f"{path}: {name}")  # NF4 may hide what is not
        packed, state = bnb.functional.quantize_4bit(
            weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return bnb.functional.dequantize_4bit(packed, state)


def add_adapter(weight: torch.Tensor, sums: dict[str, float], scaling: float, lora_a: torch.Tensor,
                lora_b: torch.Tensor, magnitude: torch.Tensor | None = None) -> torch.Tensor:
    """Returns bf16(W + scaling * B @ A), with DoRA's magnitude [out]; `sums` adds up the squares of
    what the adapter changes and of what rounding does."""
    total = (lora_b.float() @ lora_a.float()).mul_(scaling).add_(weight)  # 0.9 GiB in a 70B
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
    merged = total.bfloat16()
    chunks = [t.reshape(-1).split(2**24) for t in (weight, total, merged)]  # 128 MiB in fp64
    for old, exact, rounded in zip(*chunks):
        sums["effect"] += float((exact.double() - old).square().sum())
        sums["error"] += float((exact.double() - rounded).square().sum())
    return merged


def write_files(directory: Path, base: argparse.Namespace, tensors: Iterator[torch.Tensor],
                run: dict[str, Any]) -> None:
    """Write the merged model of these tensors, in the base's files, with all else that the base
    has, and files of the run: `tokenizer`, where the base has none, `extras` for the base's, and
    its chat template."""
    for path in run["tokenizer"]:
        shutil.copyfile(path, directory / path.name)
    copy_small_files(base.directory, directory)
    index = {"metadata": {"total_size": base.n_bytes},
             "weight_map": {name: path.name for name, path in base.paths.items()}}
    config = read_json(base.directory / "config.json")
    config.update(dict.fromkeys(["dtype", *config.keys() & {"torch_dtype"}], "bfloat16"))
    for part in config, config.get("text_config", {}):
        part.pop("quantization_config", None)  # of a base in 4-bit
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for path in run["extras"]:
        shutil.copyfile(path, directory / path.name)
    with explain(f"{base.directory}: its tokenizer cannot be loaded"):
        complete_tokenizer(directory, run["template"])
    for path in dict.fromkeys(base.paths.values()):
        described = {n: base.tensors[n] for n, its_path in base.paths.items() if its_path == path}
        write_tensors(directory / path.name, described, tensors)
    assert not list(tensors), "there are more tensors than names"
    for path in [*directory.rglob("*"), directory]:
        sync_file(path)


def check(base: argparse.Namespace, merge_check: Path, merged_dir: Path, rows: list[list[int]],
          device: str) -> str:
    """Print how far the merged model is from what was trained, by the file `probe`. Returns the
    verdict, one line; ValueError if it is another model."""
    settings = {"dtype": base.dtype, "trust_remote_code": False, "use_safetensors": True,
                "device_map": "auto" if device == "cuda" else {"": "cpu"}}
    no_kernels = without_kernels() if device == "cpu" else contextlib.nullcontext()
    with explain(f"the check did not run (see --no-check); {merged_dir} is whole: rename it"), \
            no_kernels:
        plain, trained = probed_logits(base, merge_check, device)
        merged = all_logits(base.auto_class.from_pretrained(merged_dir, **settings), rows)
        effect, error = (trained - plain).norm(), merged - trained
    agree = (merged.argmax(-1) == trained.argmax(-1)).float().mean()
    error, effect = float(error.norm() / effect), float(effect / trained.norm())
    print(f"check: the adapter moves the 4-bit model's logits by {effect:.1%} of their norm; the"
          f" merged model's are {error:.4f} of that away; {agree:.2%} of greedy tokens agree")
    why = ("the adapter's effect is too small for bf16: train longer; on a dense model it can be"
           " used unmerged" if effect < 0.1 else
           "the base, the device or a version must be another than in training")
    require(error <= FAILED_ERROR, "the merged model does not agree with what was trained, it is"
            f" {error:.2f} of the adapter's effect away: {why}; left in {merged_dir}")  # NaN too
    if error > LARGE_ERROR:
        return f"not fine: the merged model loses {error:.0%} of the adapter's effect: {why}"
    return (f"fine: the merged model gives what was trained, to {error:.1%} of the adapter's effect"
            " on the logits")


def probed_logits(base: argparse.Namespace, merge_check: Path, device: str) -> list[torch.Tensor]:
    """Returns the 4-bit model's logits without the adapter and with it, fp32 [tokens of all rows,
    vocabulary] on the CPU, from what training has noted, which is what the head reads."""
    name = base.names.embedding if base.arch.tied else base.names.head
    head = read_tensor(base.files[name], name, device).to(base.dtype)
    logits = [read_tensor(tensors_of(merge_check)[name], name, device).to(base.dtype) @ head.t()
              for name in ("without_adapter", "with_adapter")]
    change = base.arch.logits_multiplier, base.arch.logits_softcap
    return [scaled_logits(x.cpu(), *change) for x in logits]


@torch.no_grad()
def all_logits(model: transformers.PreTrainedModel, rows: list[list[int]]) -> torch.Tensor:
    """Returns fp32 [tokens of all rows, vocabulary], on the CPU."""
    inputs = [torch.tensor([row], device=model.device) for row in rows]
    return torch.cat([model(input_ids).logits[0].float().cpu() for input_ids in inputs])


def require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def finite(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Returns the tensor, if all its values are numbers."""
    require(tensor.isfinite().all(), f"{what} has values that are NaN or infinite")
    return tensor


if __name__ == "__main__":
    gc.enable()
    main()
