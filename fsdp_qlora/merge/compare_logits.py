"""Compare the logits of a merged model with those of the trained one: the check of a merge."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp_qlora.checks.without_kernels import without_kernels
from fsdp_qlora.errors import errors_about
from fsdp_qlora.merge.base_for_merge import BaseForMerge, replace_rows
from fsdp_qlora.model.logits import scaled_logits
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import read_header, read_tensor

LARGE_ERROR = 0.20  # fraction of the adapter's own effect: warn above this
SMALL_EFFECT = 0.1  # fraction of the logits' norm: below this rounding to bf16 is too coarse
FAILED_ERROR = 1.0  # above this the 4-bit base is nearer to the trained model than the merged one


class Verdict(NamedTuple):
    """The last line of a merge."""

    level: str  # "ok", "warning" or "not checked"
    text: str


def compare_logits(base: BaseForMerge, merge_check_file: Path, rows: list[list[int]],
                   merged_dir: Path, device: str) -> Verdict:
    """Print how far the merged model's logits are from the trained model's, as a fraction of the
    adapter's effect on them, and return the Verdict. Raises ValueError above FAILED_ERROR. `rows`:
    token ids; `merge_check_file`: the inputs that the trained model's lm_head got for them, see
    MergeCheck."""
    arch = base.run_arch
    settings = {"dtype": base.training_dtype, "trust_remote_code": False, "use_safetensors": True,
                "device_map": "auto" if device == "cuda" else {"": "cpu"}}
    no_kernels = without_kernels() if device == "cpu" else contextlib.nullcontext()
    what = "the check did not run (see --no-check; the merged model is whole)"
    with errors_about(what), no_kernels:
        try:
            without_adapter, trained = recorded_logits(
                merge_check_file, *read_lm_head(base, arch, device), arch, base.token_ids)
            merged = logits_of(base.auto_class.from_pretrained(merged_dir, **settings), rows)
        except (MemoryError, RuntimeError) as e:
            too_little = "allocate memory|not enough memory|out of memory|ALLOC_FAILED"
            if not (isinstance(e, MemoryError) or re.search(too_little, str(e))):
                raise
            return Verdict("not checked", f"the check did not run here: {e}")
    agree = (merged.argmax(-1) == trained.argmax(-1)).float().mean()
    effect_norm = (trained - without_adapter).norm()
    error = float((merged - trained).norm() / effect_norm)
    effect = float(effect_norm / trained.norm())
    print(f"check: merged and trained logits differ by {100 * error:.2f} % of the adapter's effect,"
          f" which is {100 * effect:.1f} % of the logits' norm; {100 * agree:.2f} % of greedy"
          " tokens agree")
    why = ("the adapter's effect is small beside the rounding of weights to bf16"
           if effect < SMALL_EFFECT else
           "the device or a version may differ from those in training")
    if not arch.moe:  # transformers 5 loads no experts in 4 bits: PEFT has no base for these
        why += "; to use the adapter without merging it, see docs/serving.md"
    if not error <= FAILED_ERROR:  # or NaN
        raise ValueError("the merged model does not match the trained one, it differs by"
                         f" {error:.2f} of the adapter's effect: {why}")
    if error > LARGE_ERROR:
        return Verdict("warning", f"the merged model differs from the trained one by"
                                  f" {100 * error:.0f} % of the adapter's effect: {why}")
    return Verdict("ok", f"the merged model matches the trained one, to {100 * error:.1f} % of the"
                         " adapter's effect on the logits")


def read_lm_head(
    base: BaseForMerge, arch: Architecture, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the lm_head's weight and its bias, if any."""
    names, dtype = base.names, base.training_dtype
    bias = base.values(names.lm_head_bias, device).to(dtype) if names.lm_head_bias else None
    head = base.values(names.embedding if arch.tied else names.lm_head, device)
    return head.to(dtype), bias


def recorded_logits(
    file: Path, lm_head: torch.Tensor, bias: torch.Tensor | None, arch: Architecture,
    token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 4-bit model's logits without the adapter and with it, fp32 [tokens of all rows,
    vocabulary] on the CPU, from what training has recorded in `file`, see MergeCheck.tensors().
    `lm_head`, `bias`: the base's lm_head; `token_ids`: the tokens whose rows were trained."""
    recorded = {name: read_tensor(stored, name, str(lm_head.device)).to(lm_head.dtype)
                for name, stored in read_header(file).items()}

    def logits(name: str) -> torch.Tensor:
        weight = lm_head
        if token_ids:
            weight = replace_rows(lm_head, arch.vocab_size, token_ids, recorded[f"rows_{name}"])
        return scaled_logits(F.linear(recorded[name], weight, bias).cpu(),
                             arch.logits_multiplier, arch.logits_softcap)

    return logits("without_adapter"), logits("with_adapter")


@torch.no_grad()
def logits_of(model: PreTrainedModel, rows: list[list[int]]) -> torch.Tensor:
    """Return transformers' logits of these rows, fp32 [tokens of all rows, vocabulary] on the CPU.
    """
    inputs = [torch.tensor([row], device=model.device) for row in rows]
    return torch.cat([model(input_ids).logits[0].float().cpu() for input_ids in inputs])
