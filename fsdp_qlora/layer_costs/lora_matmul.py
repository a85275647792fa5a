"""What a matmul with adapters needs: dequantized weights, and in backward what DoRA adds."""

from __future__ import annotations

from fsdp_qlora.layer.linears import FusedLinear


def weight_bytes(fused: FusedLinear, itemsize: int, reuse_dequantized: bool) -> int:
    """Return the bytes of a FusedLinear's dequantized weights that are alive at once."""
    sizes = [split.out_features for split in fused.splits]
    return fused.input_width * (sum(sizes) if reuse_dequantized else max(sizes)) * itemsize


def dora_bytes(fused: FusedLinear, n: int, itemsize: int, made_inputs: int = 0) -> int:
    """Return the bytes that DoRA needs beside the others in the backward of a matmul of n rows, see
    input_gradients(); 0 without DoRA. `made_inputs`: values per row of inputs that are computed
    again for it alone."""
    sizes = [split.out_features for split in fused.splits
             if any(linear.magnitude for linear in split.linears)]
    if not sizes:
        return 0
    # outputs before the factor; in fp32 the same, their gradient, and the products of both
    return n * (itemsize * made_inputs + (itemsize + 12) * max(sizes))
