"""Storage of 4-bit weights as a tensor subclass that FSDP2 gathers byte for byte.

nf4.py knows what the codes mean, model/load.py fills them from files.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

BLOCKSIZE = 64  # weights that share one absmax in NF4; QLoRA's choice and bitsandbytes' default
MXFP4_BLOCKSIZE = 32  # weights that share one scale, a power of two, in MXFP4: half a block
NESTED_BLOCKSIZE = 256  # absmax values that share one second-level absmax (double quantization)
# FSDP2 before torch 2.13 does not shard integers, so 4-bit codes are declared as bf16. If they were
# also copied as bf16, they would be damaged without an error: CUDA rewrites NaN patterns, 0.08 % of
# the words. The hooks of FourBitBlocks make FSDP2 copy bytes.
QUANT_STORAGE = torch.bfloat16


class FourBitBlocks(torch.Tensor):
    """Storage of 4-bit weights: n blocks of 64 weights each.

    For FSDP2 it is a tensor [n] of QUANT_STORAGE. It contains two uint8 tensors, which the two
    hooks let FSDP2 gather as bytes: `packed` [n, 32], the 4-bit codes, a byte's first code in its
    high half; and `scales` [n, 1], the 8-bit code of a block's absmax. If a layer has linears in
    MXFP4, `scales` is [n, 2]: a block is two blocks of MXFP4, with an exponent each; in NF4 the
    second scale is 0. With --offload_params both tensors are in pinned host memory, but `device`,
    which FSDP2 reads, is still the GPU; a gather starts with their copy to it, on FSDP2's stream
    and thus one layer ahead. (FSDP2's CPUOffloadPolicy would also move the adapter, its gradients
    and the optimizer to the CPU.)
    """

    @staticmethod
    def __new__(
        cls, packed: torch.Tensor, scales: torch.Tensor, device: torch.device | None = None,
    ) -> FourBitBlocks:
        return torch.Tensor._make_wrapper_subclass(
            cls, (packed.shape[0],), dtype=QUANT_STORAGE, device=device or packed.device)

    def __init__(
        self, packed: torch.Tensor, scales: torch.Tensor, device: torch.device | None = None,
    ) -> None:
        self.packed, self.scales = packed, scales

    @classmethod
    def zeros(
        cls, n_blocks: int, device: torch.device | str, scales_per_block: int = 1,
    ) -> FourBitBlocks:
        packed = torch.zeros(n_blocks, BLOCKSIZE // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(n_blocks, scales_per_block, dtype=torch.uint8, device=device)
        return cls(packed, scales)

    def zeros_on(self, device: torch.device) -> FourBitBlocks:
        """Return the same number of blocks on `device`, all zeros."""
        return FourBitBlocks.zeros(len(self), device, self.scales.shape[1])

    def __repr__(self) -> str:
        return f"FourBitBlocks({self.shape[0]} blocks, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, _: Any, args: tuple, kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """The operations of FSDP2 and DTensor on a parameter; all of them act on whole blocks."""
        aten, op = torch.ops.aten, func.overloadpacket
        inner = [args[0].packed, args[0].scales]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k not in ("dtype", "layout")}
        if op is aten.copy_:
            args[0].packed.copy_(args[1].packed)
            args[0].scales.copy_(args[1].scales)
            return args[0]
        if op is aten.split:
            return [cls(*pair) for pair in zip(*(func(t, *args[1:]) for t in inner))]
        offloaded = inner[0].is_cpu and args[0].is_cuda
        if op is aten.new_zeros:
            (n,) = args[1]
            return cls(*(t.new_zeros(n, t.shape[1], **kwargs) for t in inner))
        if op in (aten.view, aten.as_strided):  # FSDP2 only requests the shape that it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of FourBitBlocks to {args[1:]}"
            return cls(*inner, device=args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice):
            inner = [func(t, *args[1:], **kwargs) for t in inner]
            return cls(*inner, device=args[0].device if offloaded else None)
        raise NotImplementedError(f"{func} of FourBitBlocks")

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...],
        module: torch.nn.Module, mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """Hook that FSDP2 calls before a gather. Returns (the tensors to gather, metadata)."""
        packed = self.packed.to(self.device, non_blocking=True)
        scales = self.scales.to(self.device, non_blocking=True)
        # FSDP2 passes the mesh of the shards only, without replicas
        if mesh.size() == 1:  # with one rank, FSDP2 uses only the first of several tensors
            return (torch.cat([packed.view(-1), scales.view(-1)]),), scales.shape[1]
        return (packed, scales), scales.shape[1]

    # FSDP2 reads the signature at every gather; building it anew took 5 of 150 ms per micro-batch
    # on a CPU
    vars(fsdp_pre_all_gather)["__signature__"] = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], scales_per_block: int, param_dtype: torch.dtype, *,
        out: FourBitBlocks | None = None,
    ) -> tuple[FourBitBlocks, tuple[torch.Tensor, ...]] | None:
        """Hook that FSDP2 calls with the gathered tensors. Returns (the whole FourBitBlocks, the
        tensors that FSDP2 frees with it); None if `out` already contains them."""
        n_bytes = BLOCKSIZE // 2  # of a block's codes
        packed, scales = outputs if len(outputs) == 2 else outputs[0].split(
            [outputs[0].numel() // (n_bytes + scales_per_block) * n
             for n in (n_bytes, scales_per_block)])
        if out is None:
            blocks = FourBitBlocks(packed.view(-1, n_bytes), scales.view(-1, scales_per_block))
            return blocks, outputs
        assert out.packed.data_ptr() == packed.data_ptr(), "FSDP2 gathered to another place"
        return None


@dataclasses.dataclass
class NestedScales:
    """The second level of quantization of a layer's linears, which turns 8-bit codes into absmax.

    Block i of a linear has absmax[i // 256] * codebook[its 8-bit code] + offset as its absmax.
    This needs 4 bytes per 16,384 weights, so every rank has all of it.
    """

    absmax: torch.Tensor  # fp32 [blocks / 256], one linear after the other
    offsets: torch.Tensor  # fp32 [linears], the mean absmax of each
    scale_codebooks: torch.Tensor  # fp32 [linears, 256], values of the 8-bit codes
