"""The logits by which a merge is checked: of the trained model, and of the merged one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from fsdp_qlora.merge.merged_model import replace_rows
from fsdp_qlora.model.lm_head import scaled_logits
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import read_header, read_tensor


def trained_logits(
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
