#!/usr/bin/env python3
"""Merge a LoRA adapter into its 4-bit base model, as plain bf16 safetensors.

    python merge_adapters.py --adapter_dir runs/my-run --output_dir runs/my-run/merged
    python merge_adapters.py --adapter_dir runs/my-run/checkpoint-000040 --output_dir merged-40
    python merge_adapters.py --adapter_dir adapter --base_model DIR_OR_HUB_ID --output_dir merged

The adapter was trained on NF4 weights, so it must be merged into those. A weight, for example:

    in the base, bf16           0.013855
    W: rounded to NF4           0.011047   with this weight the adapter was trained
    + scaling * (B @ A)         0.001370
    merged, in fp32             0.012417
    merged, rounded to bf16     0.012390   in training it was not rounded here

A base that is already in 4 bits is only dequantized. With DoRA each row of the sum is rescaled to
its magnitude. A linear of the decoder's layers without an adapter becomes W; all other tensors are
copied from the base. The result is compared with the trained model on a few rows. If it differs by
more than the adapter's whole effect, --output_dir is not made: the error names the hidden directory
that has the result.

The last command is for adapters without train_config.json: those of minimal_fsdp_qlora.py and of
PEFT. They are assumed to be trained on this base in NF4, as transformers' load_in_4bit makes it;
this is not checked.

The job is below: read_base() and open_trained_adapter(); write_merged(), which makes one tensor
after the other by merged_tensor() (read_base_weight(), trained_weight(), add_adapter()) while
write_merged_files() writes them; and compare_logits().
Tested with torch 2.11 and 2.13, transformers 5.20 to 5.24, peft 0.21, bitsandbytes 0.50.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

if __name__ == "__main__":
    gc.disable()  # until the imports are done: collections would take a fifth of their time

# bitsandbytes warns on a CPU that a package is missing, which only its own inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm

from fsdp_qlora.data.template import how_to_prompt
from fsdp_qlora.data.tokenizer import complete_tokenizer
from fsdp_qlora.errors import explain
from fsdp_qlora.evaluation.compare_with_transformers import without_kernels
from fsdp_qlora.files import ADAPTER_FILES, ADAPTER_WEIGHTS, read_json, sync_file
from fsdp_qlora.log import print_error
from fsdp_qlora.lora.peft_files import LinearAdapter, open_linear_adapters
from fsdp_qlora.lora.peft_names import (
    FilePart, as_saved, expert_parts, file_parts, lora_settings, token_row_names,
    token_row_settings)
from fsdp_qlora.lora.targets import adapted_linears
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.describe import describe_model
from fsdp_qlora.pretrained.formats import (
    INT4_PACKED, MX_PARTS, NF4_PARTS, dequantize_stored, nf4_round_trip, scaled_weight,
    swap_nibbles)
from fsdp_qlora.pretrained.hub import base_digest, model_directory
from fsdp_qlora.pretrained.merged_model import (
    MergeBase, auto_class, copy_all_but_weights, merged_tensors, replace_rows, write_weights)
from fsdp_qlora.pretrained.reader import OTHER_BASE, read_tensor, tensors_of, weight_files
from fsdp_qlora.pretrained.tensor_names import check_files, tensor_names
from fsdp_qlora.quant.blocks import BLOCK, MX_BLOCK
from fsdp_qlora.quant.nf4 import mxfp4_values
from fsdp_qlora.run.divergence import why_worse
from fsdp_qlora.run.merge_check import logits_of, trained_logits
from fsdp_qlora.run.new_directory import new_directory
from fsdp_qlora.run.peft_run import open_peft_run
from fsdp_qlora.run.trained_run import TrainedRun, find_train_config, read_run

LARGE_ERROR = 0.20  # fraction of the adapter's own effect: warn above this
SMALL_EFFECT = 0.1  # fraction of the logits' norm: below this rounding to bf16 is too coarse
FAILED_ERROR = 1.0  # above this the merged model is further from the trained one than the base is
UNMERGED = """; to use the adapter without merging it:
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = peft.PeftModel.from_pretrained(transformers.{auto_class}.from_pretrained(\
"{base}", quantization_config=nf4), "{adapter}")"""


def main(argv: Sequence[str] | None = None) -> None:
    """Merge. If that fails, or at Ctrl-C, print one line to stderr and exit with 1."""
    try:
        merge(parse_args(argv))
    except (ValueError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError) as e:
        print_error(f"error: {str(e).strip() or type(e).__name__}")
        sys.exit(1)
    except KeyboardInterrupt:
        print_error("error: stopped")
        sys.exit(1)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the flags. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.add_argument("--adapter_dir", required=True,
                        help="run of train_fsdp_qlora.py or a checkpoint in it; with --base_model"
                        " any PEFT adapter")
    parser.add_argument("--output_dir", required=True,
                        help="where the merged model goes: a new directory")
    parser.add_argument("--base_model",
                        help="Hub id or directory; default: the one that train_config.json names")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        help="device for quantizing and for the check; default: as in training")
    parser.add_argument("--allow_other_base", action="store_true",
                        help="merge into another base, and never check")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True,
                        help="compare the merged model with the trained one")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------
# The whole job
# ------------------------------------------------------------------------------------------------


def merge(args: argparse.Namespace) -> None:
    """Run the whole job: flags in, merged model out."""
    adapter_dir, output = Path(args.adapter_dir), Path(args.output_dir)
    transformers.utils.logging.disable_progress_bar()
    adapter_file = adapter_dir / ADAPTER_WEIGHTS
    # a training run may replace the file meanwhile; a missing one is reported when it is read
    stat_before = adapter_file.stat() if adapter_file.is_file() else None
    run, base, adapter = open_run(args)
    device = choose_device(args.device, run)
    log_base(base, len(adapter.keys() & base.names.linears.keys()))
    with new_directory(output) as new:
        write_merged(new.path, output, base, adapter, run, device)
        new.is_whole = True  # from here an error leaves the directory
        verdict = check_merge(args, run, base, new.path, device)
        require(stat_before and os.path.samestat(stat_before, adapter_file.stat()),
                f"{adapter_dir}: the adapter has changed meanwhile. Merge again")
    print(f'merged model saved; to load it: {base.auto_class.__name__}.from_pretrained("{output}")')
    # the switches of the chat template (such as enable_thinking) that the trained rows used
    counts = {json.dumps(way["chat_template_kwargs"]): way["answers"]
              for way in run.template_kwargs}
    if how := how_to_prompt(counts):
        print(how)
    if why := why_worse(run.losses):
        verdict = Verdict("warning", f"{why}; {verdict.text}")
    print(f"{verdict.level}: {verdict.text}")


def open_run(args: argparse.Namespace) -> tuple[TrainedRun, MergeBase, dict[str, LinearAdapter]]:
    """Return the run that trained the adapter, its base model, and {linear's name: its adapter}.
    Raises ValueError unless they belong together."""
    adapter_dir = Path(args.adapter_dir)
    if args.base_model and not find_train_config(adapter_dir).is_file():
        return open_peft_run(adapter_dir, args.base_model)
    run = read_run(adapter_dir)
    # with sums read_base_weight() would refuse a base that training has not read
    sums = {} if args.allow_other_base else run.quantization["tensor_sums"]
    base = read_base(args.base_model or run.base_model, run.quantization, sums)
    add_token_rows(base, run.token_ids)
    check_base(base, run, args.allow_other_base)
    return run, base, open_trained_adapter(adapter_dir, run, base)


def choose_device(requested: str | None, run: TrainedRun) -> str:
    """Return the device that quantizes: the one used in training, if it exists here."""
    has_gpu = torch.cuda.is_available()
    trained_on = run.quantization.get("device", "cuda")
    device = requested or (trained_on if has_gpu else "cpu")
    require(device == "cpu" or has_gpu, "--device cuda: there is no GPU here")
    if device != run.quantization.get("device", device):
        print(f"note: trained on {trained_on}, merging on {device}: the last bit may differ")
    return device


# ------------------------------------------------------------------------------------------------
# Read the base and the adapter
# ------------------------------------------------------------------------------------------------


def read_base(name: str, quantization: dict[str, Any], sums: dict[str, str]) -> MergeBase:
    """Return the base model, after the same checks of its files as in training. `sums`: those that
    its tensors must have, see MergeBase."""
    directory = model_directory(name, "weights", "--base_model")
    in_4bit, dtype = quantization["prequantized"], quantization["quantized_from_dtype"]
    with explain(f"base model {directory}"):
        model_config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        arch = describe_model(model_config)
        files = weight_files(directory)
        names = tensor_names(arch, files)
        nf4_states = check_files(files, names, model_config, dtype)
        require(in_4bit == bool(nf4_states), f"is {'' if nf4_states else 'not '}quantized already."
                                             " With --base_model name the one in training")
        tensors, paths = merged_tensors(files, names, nf4_states, model_config)
    return MergeBase(
        directory=directory, files=files, names=names, nf4_states=nf4_states, tensors=tensors,
        paths=paths, auto_class=auto_class(model_config), dtype=getattr(torch, dtype), arch=arch,
        sums=sums)


def add_token_rows(base: MergeBase, token_ids: Sequence[int]) -> None:
    """Record in `base` which tokens' rows were trained, and make the vocabulary, embedding and
    lm_head of the merged model large enough for them."""
    if token_ids:
        base.token_ids = token_ids
        base.arch = base.arch.with_token(max(token_ids))
        for name in {base.names.embedding, base.names.head} & base.tensors.keys():
            (_, hidden), dtype = base.tensors[name]
            base.tensors[name] = (base.arch.vocab_size, hidden), dtype


def check_base(base: MergeBase, run: TrainedRun, allow_other: bool) -> None:
    """Raise ValueError unless the base is the one that the run was trained on."""
    if allow_other:
        print("warning: --allow_other_base: the base may be another one: nothing will be compared")
    else:
        require(base_digest(base.directory) == run.base_sha256,
                f"{base.directory}: its config.json or its weights {OTHER_BASE}")
    require(max(map(max, run.probe_input_ids)) < base.arch.vocab_size, "train_config.json has"
            f" probe_input_ids outside the base's vocabulary of {base.arch.vocab_size}: another"
            " base model?")


def open_trained_adapter(adapter_dir: Path, run: TrainedRun,
                         base: MergeBase) -> dict[str, LinearAdapter]:
    """Return {linear's name: its adapter}. Raises ValueError unless the files are those of the run.
    """
    rank, alpha, adapter_type = (run.config[key] for key in ("lora_rank", "lora_alpha", "adapter"))
    path, file = (adapter_dir / name for name in ADAPTER_FILES)
    arch = as_saved(base.arch, read_json(path), tensors_of(file))
    names = base.names
    adapted = set(adapted_linears(arch, run.config["target_modules"]))
    lora = lora_settings(arch, rank, alpha, adapter_type, adapted,
                         trainable_token_indices=token_row_settings(arch, base.token_ids))
    parts = {}
    parts_of_experts = expert_parts(arch, rank)
    for name, linear in names.linears.items():
        if linear.name in adapted:
            layer = name.removeprefix(names.layer_prefix).partition(".")[0]
            parts[name] = file_parts(arch, int(layer), linear, rank, adapter_type, parts_of_experts)
    parts |= token_row_parts(base, arch)
    return open_linear_adapters(adapter_dir, lora, parts, "train_config.json")


def token_row_parts(base: MergeBase, arch: Architecture) -> dict[str, list[FilePart]]:
    """Return {embedding or lm_head: the FilePart of its trained rows}. `arch`: see as_saved()."""
    if not base.token_ids:
        return {}
    names = base.names
    tables = dict(zip((names.embedding, names.head), token_row_names(arch)))
    if arch.tied and names.head in base.tensors:  # a copy of the embedding
        tables[names.head] = tables[names.embedding]
    shape = len(base.token_ids), arch.hidden_size
    return {table: [FilePart(name, shape)] for table, name in tables.items()}


def log_base(base: MergeBase, n_adapted: int) -> None:
    """Print what is merged."""
    linears = base.names.linears
    used = {*base.tensors, *base.names.shapes}
    unused = [n for n in base.files if n not in used and not n.endswith(NF4_PARTS)]
    others = f"; {len(unused)} tensors are not used, as {unused[0]}" if unused else ""
    print(f"base model {base.directory}: {len(linears)} 4-bit linears, {n_adapted} with an"
          f" adapter{others}")
    if n := sum(x.out_features * x.in_features for x in linears.values() if x.mxfp4):
        # in MXFP4 32 weights are 16 bytes of codes and one of scale
        print(f"experts in MXFP4, {17 * n / 32 / 2**30:.3g} GiB, are written as bf16,"
              f" {2 * n / 2**30:.3g} GiB")


# ------------------------------------------------------------------------------------------------
# For each tensor: read, NF4 round trip, add, write
# ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rounding:
    """Sums of squares over all merged weights, to compare rounding with the adapter's effect."""

    effect: float = 0.0  # of the changes by the adapter
    error: float = 0.0  # of the changes by rounding to bf16

    def add(self, old: torch.Tensor, exact: torch.Tensor) -> None:
        """Count one weight: `old` without the adapter, `exact` with it, before rounding."""
        chunks = [x.reshape(-1).split(2**24) for x in (old, exact)]  # 128 MiB in fp64
        for old_part, exact_part in zip(*chunks):
            exact64 = exact_part.double()
            self.effect += float((exact64 - old_part).square().sum())
            self.error += float((exact64 - exact_part.bfloat16()).square().sum())


def write_merged(partial: Path, output: Path, base: MergeBase, adapter: dict[str, LinearAdapter],
                 run: TrainedRun, device: str) -> None:
    """Write the merged model into `partial`, which will be renamed to `output`, and print how much
    rounding to bf16 changes it. Raises ValueError if the disk has no room."""
    gib, free = base.n_bytes / 2**30, shutil.disk_usage(partial).free / 2**30
    require(free >= gib, f"--output_dir {output}: needs {gib:.1f} GiB, but {free:.1f} are free")
    rounding = Rounding()
    with tqdm(base.tensors, "merge", unit="tensor", disable=None) as names:  # off in a pipe
        tensors = (merged_tensor(name, base, adapter, device, rounding) for name in names)
        write_merged_files(partial, base, tensors, run)
    share = math.sqrt(rounding.error / max(rounding.effect, sys.float_info.min))
    print(f"wrote {len(base.tensors)} tensors, {gib:.3f} GiB; rounding to bf16 moves the weights by"
          f" {share:.4f} of what the adapter adds to them, in random directions that mostly cancel"
          " out; the check measures the effect on the logits")


def merged_tensor(name: str, base: MergeBase, adapter: dict[str, LinearAdapter], device: str,
                  rounding: Rounding) -> torch.Tensor:
    """Return one tensor of the merged model, on the CPU."""
    shape, dtype = base.tensors[name]
    merged = torch.empty(shape, dtype=dtype)
    for part, index in base.parts.get(name, [(name, ...)]):  # each expert, or the whole
        weight, is_transposed = read_base_weight(base, name, part, index, device)
        if part in base.names.linears or part in base.nf4_states:
            weight = trained_weight(weight, part, base, base.paths[name])
        if part in (base.names.embedding, base.names.head) and part in adapter:
            (rows,) = adapter[part].tensors(device)
            weight = replace_rows(weight, len(merged), base.token_ids, rows)
        elif part in adapter:
            scaling, tensors = adapter[part].scaling, adapter[part].tensors(device)
            exact = add_adapter(weight, scaling, *tensors)
            rounding.add(weight, exact)
            weight = exact.bfloat16()
            del exact  # up to 0.9 GiB in a 70B
        merged[index] = weight.t() if is_transposed else weight
    return require_finite(merged, f"{base.paths[name]}: what {name} becomes")


def read_base_weight(base: MergeBase, whole: str, part: str, index: Any,
                     device: str) -> tuple[torch.Tensor, bool]:
    """Return a tensor of the base model's files: `whole`, or the `part` of it at `index`, where a
    file stacks experts or fuses linears. Also returns whether the file has its transpose.

    A linear is [out, in]; in FP8 and INT4 it is multiplied by its scales; in MXFP4 it becomes fp32.
    Raises ValueError if the stored values do not match their digest in base.sums.
    """
    files, names, sums = base.files, base.names, base.sums
    if part in names.linears and names.linears[part].mxfp4:
        blocks, scales = (
            read_tensor(files[whole + end], whole + end, device, content=sums.get(part + end),
                        index=index, what=part + end) for end in MX_PARTS)
        packed, scales = blocks.view(-1, BLOCK // 2), scales.view(-1, BLOCK // MX_BLOCK)
        return mxfp4_values(swap_nibbles(packed), scales).view(len(blocks), -1), True
    name = part if part.endswith(INT4_PACKED) else whole
    is_transposed = part in names.sources and names.sources[part].columns is not None
    tensor = read_tensor(files[name], name, device, content=sums.get(part), index=index, what=part,
                         transposed=is_transposed)
    if scales := names.scaled.get(part):
        scale_values = read_tensor(files[scales], scales, device, content=sums.get(scales))
        tensor = scaled_weight(part, tensor, scale_values)
    return tensor, is_transposed


def trained_weight(weight: torch.Tensor, name: str, base: MergeBase, path: Path) -> torch.Tensor:
    """Return W, the weight that training computed with: `weight` quantized to NF4 and dequantized;
    in MXFP4, `weight` itself. `path`: the file that has it."""
    linear = base.names.linears.get(name)  # None: a router in NF4
    if linear and linear.mxfp4:
        return weight.to(base.dtype)
    if name in base.nf4_states:
        keys = [f"{name}.{part}" for part in NF4_PARTS]
        parts = {key: read_tensor(base.files[key], key, content=base.sums.get(key)) for key in keys}
        with explain(f"{path}: {name}: its quantization is damaged"):
            return dequantize_stored(weight, parts, base.dtype)
    # checked before, because NF4 may hide NaN and infinity
    return nf4_round_trip(require_finite(weight.to(base.dtype), f"{path}: {name}"))


def add_adapter(
    weight: torch.Tensor, scaling: float, lora_a: torch.Tensor, lora_b: torch.Tensor,
    magnitude: torch.Tensor | None = None
) -> torch.Tensor:
    """Return W + scaling * B @ A in fp32, with DoRA's magnitude [out]."""
    total = (lora_b.float() @ lora_a.float()).mul_(scaling).add_(weight)
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
    return total


def write_merged_files(directory: Path, base: MergeBase, tensors: Iterator[torch.Tensor],
                       run: TrainedRun) -> None:
    """Write the merged tensors in files like the base's, with copies of all other files of the
    base. Files of the run are added: the tokenizer if the base has none, generation_config.json,
    and the chat template."""
    for path in run.tokenizer:
        shutil.copyfile(path, directory / path.name)
    copy_all_but_weights(base, directory)
    for path in run.extras:
        shutil.copyfile(path, directory / path.name)
    with explain(f"{base.directory}: its tokenizer cannot be loaded"):
        complete_tokenizer(directory, run.template)
    write_weights(base, directory, tensors)
    for path in [*directory.rglob("*"), directory]:
        sync_file(path)


# ------------------------------------------------------------------------------------------------
# Check
# ------------------------------------------------------------------------------------------------


class Verdict(NamedTuple):
    """The last line of a merge."""

    level: str  # "ok", "warning" or "not checked"
    text: str


def check_merge(args: argparse.Namespace, run: TrainedRun, base: MergeBase, merged_dir: Path,
                device: str) -> Verdict:
    """Compare the merged model with the trained one, if that is possible and wanted."""
    if not args.check or not run.merge_check_file or args.allow_other_base:
        return Verdict(
            "not checked", "whether the merged model matches the trained one is not known")
    verdict = compare_logits(base, run.merge_check_file, merged_dir, run.probe_input_ids, device)
    if verdict.level == "warning" and not base.arch.moe:  # why: docs/serving.md
        how_to_load = UNMERGED.format(auto_class=base.auto_class.__name__, base=base.directory,
                                      adapter=args.adapter_dir)
        return verdict._replace(text=verdict.text + how_to_load)
    return verdict


def compare_logits(base: MergeBase, merge_check_file: Path, merged_dir: Path, rows: list[list[int]],
                   device: str) -> Verdict:
    """Print how far the merged model's logits are from the trained model's. The file of MergeCheck
    has the inputs that the trained model's lm_head got for `rows`.

    Raises ValueError if they differ by more than FAILED_ERROR.
    """
    settings = {"dtype": base.dtype, "trust_remote_code": False, "use_safetensors": True,
                "device_map": "auto" if device == "cuda" else {"": "cpu"}}
    no_kernels = without_kernels() if device == "cpu" else contextlib.nullcontext()
    with explain(f"the check did not run (see --no-check); {merged_dir} is whole: rename it"), \
            no_kernels:
        plain, trained = trained_logits(
            merge_check_file, *read_head(base, device), base.arch, base.token_ids)
        merged = logits_of(base.auto_class.from_pretrained(merged_dir, **settings), rows)
    agree = (merged.argmax(-1) == trained.argmax(-1)).float().mean()
    effect_norm = (trained - plain).norm()
    error = float((merged - trained).norm() / effect_norm)
    effect = float(effect_norm / trained.norm())
    print(f"check: merged and trained logits differ by {100 * error:.2f} % of the adapter's effect,"
          f" which is {100 * effect:.1f} % of the logits' norm; {100 * agree:.2f} % of greedy"
          " tokens agree")
    why = ("the adapter's effect is too small for bf16: train longer; on a dense model it can be"
           " used unmerged" if effect < SMALL_EFFECT else
           "the base, the device or a version must be another than in training")
    require(error <= FAILED_ERROR, "the merged model does not match the trained one, it differs by"
                                   f" {error:.2f} of the adapter's effect: {why}; left in"
                                   f" {merged_dir}")  # NaN too
    if error > LARGE_ERROR:
        return Verdict(
            "warning", f"the merged model loses {100 * error:.0f} % of the adapter's effect: {why}")
    return Verdict("ok", f"the merged model matches the trained one, to {100 * error:.1f} % of the"
                         " adapter's effect on the logits")


def read_head(base: MergeBase, device: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the lm_head's weight and its bias, if any."""
    def read(name: str) -> torch.Tensor:
        return read_tensor(base.files[name], name, device).to(base.dtype)

    names = base.names
    head = read(names.embedding if base.arch.tied else names.head)
    return head, read(names.head_bias) if names.head_bias else None


def require(condition: Any, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_finite(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensor if all its values are finite. Raises ValueError otherwise."""
    require(tensor.isfinite().all(), f"{what} has values that are NaN or infinite")
    return tensor


if __name__ == "__main__":
    gc.enable()
    main()
