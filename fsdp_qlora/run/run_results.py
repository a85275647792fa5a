"""What a run leaves for those who read it later: names of its files, how it quantized, its losses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path

from fsdp_qlora.files import ADAPTER_WEIGHTS, read_records
from fsdp_qlora.quant.blocks import BLOCKSIZE, NESTED_BLOCKSIZE

MERGE_CHECK_FILE = "probe.safetensors"  # inputs of the lm_head for a few rows, see MergeCheck
# {name of the SHA-256 in train_config.json: a file that a run writes when it ends}
DIGESTED_FILES = {"adapter_sha256": ADAPTER_WEIGHTS, "probe_sha256": MERGE_CHECK_FILE}
# how training quantizes, in train_config.json
QUANTIZATION = {"quant_type": "nf4", "blocksize": BLOCKSIZE, "double_quant": True,
                "nested_blocksize": NESTED_BLOCKSIZE}
LAST_FRACTION = 0.1  # fraction of a run's steps that why_worse() looks at, at least three steps
# the last losses may exceed the first by chance: by this fraction of it, or by this much
MARGIN, MIN_MARGIN = 0.1, 0.05


def read_losses(directory: Path, last_step: float = math.inf) -> list[float]:
    """Return the losses of the steps until `last_step` from a run's metrics.jsonl; [] if it cannot
    be read."""
    with contextlib.suppress(OSError):
        return [record["loss"] for record in read_records(directory / "metrics.jsonl")
                if isinstance(record.get("loss"), float) and record["step"] <= last_step]
    return []


def why_worse(losses: Sequence[float]) -> str:
    """Return one line if a run's losses, one for each step, ended above where they began; else "".

    The first step's loss is that of the model before training. Because each step has other rows,
    the mean of the last losses must exceed it by a margin, which is wider in a short run, and nine
    of ten of them must exceed it.
    """
    n = len(losses)
    if n < 2:
        return ""
    first, last = losses[0], losses[-min(n - 1, max(3, round(LAST_FRACTION * n))):]
    mean = sum(last) / len(last)
    margin = max(MIN_MARGIN, abs(first) * max(MARGIN, 1 / n))
    n_above = sum(loss > first for loss in last)
    if mean <= first + margin or n_above < 0.9 * len(last):
        return ""
    return f"the loss ended at {mean:.4g}, above the initial {first:.4g}"
