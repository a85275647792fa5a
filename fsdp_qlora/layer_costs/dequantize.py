"""Memory of dequantized weights."""

from __future__ import annotations

from fsdp_qlora.layer.linears import FusedLinear


def weight_bytes(fused: FusedLinear, itemsize: int, reuse_dequantized: bool) -> int:
    """Return the bytes of a FusedLinear's dequantized weights that are alive at once."""
    sizes = [split.out_features for split in fused.splits]
    return fused.width * (sum(sizes) if reuse_dequantized else max(sizes)) * itemsize
