"""The trial that tells whether Triton's kernels can be used on this machine."""

from __future__ import annotations

import functools

import bitsandbytes as bnb
import torch

from fsdp_qlora.optional_triton import triton
from fsdp_qlora.quant.blocks import BLOCKSIZE
from fsdp_qlora.quant.nf4 import launch_dequantize, mxfp4_codebooks, mxfp4_values, nf4_codebook


@functools.lru_cache(None)
def why_no_triton() -> str:
    """Return why Triton's kernels cannot be used on this machine, or "". Triton compiles at the
    first use, which needs a C compiler and Python's headers."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if triton is None:
        return "there is no Triton"
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCKSIZE, compress_statistics=True, quant_type="nf4")
    packed, nested, cuda = packed.view(-1, BLOCKSIZE // 2), state.state2, weight.device
    # one linear of 256 outputs, without an adapter
    table = torch.tensor([[0, 0, 0, 0, 0, -1, 256]], dtype=torch.int32, device="cuda")
    mx_scales = (torch.arange(2048, device="cuda") % 128 + 64).to(torch.uint8).view(-1, 2)
    mx_codebook, mx_scale_codebook = mxfp4_codebooks(cuda)
    same = []
    for is_mx, scales, scale_codebook, codebook, want in (
        (False, state.absmax.view(-1, 1), nested.code, nf4_codebook(cuda),
         bnb.functional.dequantize_4bit(packed.view(-1, 1), state)),
        (True, mx_scales, mx_scale_codebook, mx_codebook,
         mxfp4_values(packed, mx_scales).to(weight.dtype))):
        out = torch.empty_like(weight)
        try:
            launch_dequantize(
                packed, scales, nested.absmax, state.offset, scale_codebook, codebook, weight,
                table, out, 256, 16, n_linears=1, blocks_per_linear=0, in_mxfp4=is_mx)
        except Exception as e:
            return f"Triton cannot compile here, {type(e).__name__}: {str(e)[:200]}"
        same.append(torch.equal(out, want.view(256, 256)))
    return "" if all(same) else "on this GPU its result differs from that of bitsandbytes or torch"
