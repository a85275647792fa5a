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

What the base has in NF4 or MXFP4 is only dequantized; FP8 and INT4 are multiplied by their scales,
then rounded to NF4. With DoRA each row of the sum is rescaled to its magnitude. A linear without an
adapter becomes W too, if training had it in 4 bits. All other tensors stay the base's, in bf16 (a
few small ones in fp32, int64 as it is). With --trainable_tokens the embedding and the lm_head get
the trained rows. A run's merge leaves out tensors of the text model that training does not know,
such as DeepSeek's layers for multi-token prediction (MTP); the line "base model .." counts them.

The merged model is compared with the trained one, by the logits of the first 64 tokens of four
training rows. The last line says how large the difference is, as a fraction of the adapter's own
effect on the logits:

    ok:           at most a fifth
    warning:      more; or the run's loss ended above where it began: the line then ends with the
                  verdict that it would have been
    not checked:  --no-check, --allow_other_base, too little memory, or an adapter without
                  train_config.json
    error:        more than the whole effect, or an error in the check: exit code 1. The result
                  stays in a hidden directory, which the error names, and which the next merge into
                  --output_dir empties

With --base_model, as in the third command, it merges adapters without train_config.json: those of
minimal_fsdp_qlora.py and of PEFT. It assumes, and cannot check, that they were trained on this
base, quantized from bf16 to NF4 with double quantization; transformers' default is FP4 without it.
All linears that load_in_4bit quantizes become W (in a multimodal model those outside the text model
only if one of them has an adapter), all other floats become bf16, int64 stays as it is, tensors of
any other dtype are left out (the line "base model .." counts them), and nothing is compared.

    merge
        open_run                the run, its base model and its adapter, which belong together
        write_merged            into a hidden directory, file by file
            copy_other_files        config.json, the index, the tokenizer and its template
            merged_tensor           for each tensor of the merged model, in bf16, one of three:
                merged_linears          its linears: one, or several (experts; q, k and v):
                    base.values             read it, in any format
                    frozen_weight           W: round it to NF4
                    adapter.tensors         read A and B, if the linear has an adapter
                    add_adapter             W + scaling * B @ A, in fp32
                merged_table            embedding or lm_head: put in the trained rows of tokens
                base.values             any other
            write_tensor            as soon as it is made
        check_merge             compare its logits with the trained model's

Tested with torch 2.11 and 2.13, transformers 5.20 to 5.24, peft 0.21, bitsandbytes 0.50.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# bitsandbytes warns on a CPU that a package is missing, which only its own inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import torch
import transformers
from safetensors import SafetensorError
from tqdm import tqdm

from fsdp_qlora.data.template import how_to_prompt
from fsdp_qlora.files import ADAPTER_WEIGHTS, sync_file, write_header, write_tensor
from fsdp_qlora.log import print_error
from fsdp_qlora.lora.peft_files import WeightAdapter
from fsdp_qlora.merge.base_for_merge import BaseForMerge, replace_rows
from fsdp_qlora.merge.compare_logits import Verdict, compare_logits
from fsdp_qlora.merge.new_directory import new_directory
from fsdp_qlora.merge.open_run import open_run
from fsdp_qlora.merge.other_files import copy_other_files
from fsdp_qlora.merge.trained_run import TrainedRun
from fsdp_qlora.pretrained.weight_formats import nf4_round_trip
from fsdp_qlora.run.run_results import why_worse


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
    """Return the flags. Raises ValueError for wrong ones, where argparse would exit with 2."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)

    def fail(message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.add_argument("--adapter_dir", required=True,
                        help="run of train_fsdp_qlora.py or a checkpoint in it; with --base_model"
                        " also a LoRA, rsLoRA or DoRA adapter of PEFT on a dense base in 16 bits")
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
    version_before = file_version(adapter_file)
    run, base, adapters = open_run(adapter_dir, args.base_model, args.allow_other_base)
    device = choose_device(args.device, run)
    log_base(base, len(adapters.keys() & base.names.linears.keys()))
    with new_directory(output) as new:
        write_merged(new.path, output, base, adapters, run, device)
        require(version_before == file_version(adapter_file),
                f"{adapter_dir}: the adapter has changed meanwhile. Merge again")
        new.is_whole = True  # from here on an error or Ctrl-C leaves the directory, and names it
        verdict = check_merge(args, run, base, new.path, device)
    print(f'merged model saved; to load it: {base.auto_class.__name__}.from_pretrained("{output}")')
    # the template variables (such as enable_thinking) with which trained answers were rendered
    if how := how_to_prompt(run.template_kwargs):
        print(how)
    if why := why_worse(run.losses):
        verdict = Verdict("warning", f"{why}; {verdict.level}: {verdict.text}")
    print(f"{verdict.level}: {verdict.text}")


def file_version(path: Path) -> tuple[int, int, int] | None:
    """Return a file's inode, size and time of change, to tell whether it was replaced or written
    again; None: there is no file. The inode alone may be the same after two replacements."""
    if not path.is_file():
        return None
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def choose_device(requested: str | None, run: TrainedRun) -> str:
    """Return the device that quantizes: --device, or the one used in training; if that is not known
    the GPU, and without a GPU the CPU."""
    has_gpu = torch.cuda.is_available()
    device = requested or ((run.device or "cuda") if has_gpu else "cpu")
    require(device == "cpu" or has_gpu, "--device cuda: there is no GPU here")
    if run.device not in (None, device):
        print(f"note: trained on {run.device}, merging on {device}: the last bit may differ")
    return device


def log_base(base: BaseForMerge, n_adapted: int) -> None:
    """Print what is merged."""
    linears = base.names.linears
    unused = base.unused
    others = f"; {len(unused)} tensors are not used, such as {unused[0]}" if unused else ""
    print(f"base model {base.directory}: {len(linears)} 4-bit linears, {n_adapted} with an"
          f" adapter{others}")
    if n := sum(x.out_features * x.in_features for x in linears.values() if x.mxfp4):
        # in MXFP4 32 weights are 16 bytes of codes and one of scale
        print(f"experts in MXFP4, {17 * n / 32 / 2**30:.3g} GiB, are written as bf16,"
              f" {2 * n / 2**30:.3g} GiB")


# ------------------------------------------------------------------------------------------------
# For each tensor: read, NF4 round trip, add, write
# ------------------------------------------------------------------------------------------------


def write_merged(directory: Path, output: Path, base: BaseForMerge,
                 adapters: dict[str, WeightAdapter], run: TrainedRun, device: str) -> None:
    """Write the merged model into `directory`, one tensor after the other, in files like the
    base's. Raises ValueError if the disk has no room. `output`: what the user calls the directory.
    """
    gib, free = base.merged_layout.n_bytes / 2**30, shutil.disk_usage(directory).free / 2**30
    require(free >= gib, f"--output_dir {output}: needs {gib:.1f} GiB, but {free:.1f} are free")
    copy_other_files(directory, base, run)
    n_tensors = len(base.merged_layout.shapes)
    with tqdm(desc="merge", total=n_tensors, unit="tensor", disable=None) as bar:  # off in a pipe
        for file_name, shapes in base.merged_layout.shapes_by_file().items():
            with (directory / file_name).open("wb") as file:
                write_header(file, shapes)
                for name in shapes:
                    write_tensor(file, merged_tensor(name, base, adapters, device))
                    bar.update()
    for path in [*directory.rglob("*"), directory]:
        sync_file(path)
    print(f"wrote {n_tensors} tensors, {gib:.3f} GiB")


def merged_tensor(name: str, base: BaseForMerge, adapters: dict[str, WeightAdapter],
                  device: str) -> torch.Tensor:
    """Return one tensor of the merged model, on the CPU."""
    if name in base.merged_layout.linears_in:  # one or several linears that were in 4 bits
        merged = merged_linears(name, base, adapters, device)
    elif name in adapters:  # the embedding or the lm_head, with trained rows
        merged = merged_table(name, base, adapters[name], device)
    else:  # as the base has it, but for the dtype
        merged = base.values(name, device)
    shape, dtype = base.merged_layout.shapes[name]
    assert merged.shape == shape, f"{name} is {merged.shape}"
    path = base.merged_layout.paths[name]
    return require_finite(merged.to("cpu", dtype), f"{path}: what {name} becomes")


def merged_linears(name: str, base: BaseForMerge, adapters: dict[str, WeightAdapter],
                   device: str) -> torch.Tensor:
    """Return a merged tensor of linears, on the CPU: one linear; or all experts, or q, k and
    v, if the files have these in one tensor."""
    shape, dtype = base.merged_layout.shapes[name]
    merged = torch.empty(shape, dtype=dtype)
    for linear, place in base.merged_layout.linears_in[name].items():
        weight = frozen_weight(base.values(linear, device), linear, base)  # [out, in]
        if adapter := adapters.get(linear):
            lora_a, lora_b, *magnitude = adapter.tensors(device)  # the magnitudes: only with DoRA
            weight = add_adapter(weight, adapter.scaling, lora_a, lora_b, *magnitude)
        # into the linear's part of `merged`, a view [out, in]
        place.weight_in(merged).copy_(weight.to(dtype))
    return merged


def frozen_weight(weight: torch.Tensor, linear: str, base: BaseForMerge) -> torch.Tensor:
    """Return W, the weight that training computed with, from the one in the base's files."""
    weight = weight.to(base.training_dtype)
    if base.in_training_format(linear):
        return weight
    # checked before, because NF4 may hide NaN and infinity
    return nf4_round_trip(require_finite(weight, f"{base.location(linear).path}: {linear}"))


def add_adapter(
    weight: torch.Tensor, scaling: float, lora_a: torch.Tensor, lora_b: torch.Tensor,
    magnitude: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `weight` + scaling * B @ A, fp32 [out, in], from A [rank, in] and B [out, rank]. With
    DoRA each row is then rescaled, so that its norm is its `magnitude` [out]."""
    total = (lora_b.float() @ lora_a.float()).mul_(scaling).add_(weight)
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
    return total


def merged_table(
    name: str, base: BaseForMerge, adapter: WeightAdapter, device: str
) -> torch.Tensor:
    """Return the embedding or the lm_head with the trained rows of base.token_ids."""
    (n_rows, _), _ = base.merged_layout.shapes[name]
    (rows,) = adapter.tensors(device)
    return replace_rows(base.values(name, device), n_rows, base.token_ids, rows)


# ------------------------------------------------------------------------------------------------
# Check
# ------------------------------------------------------------------------------------------------


def check_merge(args: argparse.Namespace, run: TrainedRun, base: BaseForMerge, merged_dir: Path,
                device: str) -> Verdict:
    """Compare the merged model with the trained one, if that is possible and wanted."""
    if not args.check:
        return Verdict("not checked", "--no-check")
    if args.allow_other_base:
        return Verdict("not checked", "--allow_other_base")
    if not run.merge_check_file:
        return Verdict("not checked", "an adapter without train_config.json says nothing of the"
                                      " model that was trained")
    return compare_logits(base, run.merge_check_file, run.merge_check_ids, merged_dir, device)


# ------------------------------------------------------------------------------------------------
# Errors
# ------------------------------------------------------------------------------------------------


def require(condition: Any, message: str) -> None:
    """Raise ValueError with this message unless the condition holds."""
    if not condition:
        raise ValueError(message)


def require_finite(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return the tensor if all its values are finite. Raises ValueError otherwise."""
    require(tensor.isfinite().all(), f"{what} has values that are NaN or infinite")
    return tensor


if __name__ == "__main__":
    main()
