"""Weights in 4 bits: how FSDP2 shards their bytes exactly, and the kernel that dequantises them.

Values of MXFP4, the format of gpt-oss's experts, are exact. How a weight gets here from a file is
in load.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

import bitsandbytes as bnb
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch on CUDA alone
    triton = None

if TYPE_CHECKING:
    from fsdp_qlora.model.layer import DecoderLayer
    from fsdp_qlora.model.linears import FusedLinear

BLOCK = 64  # weights that share one absmax; QLoRA's choice and bitsandbytes' default
MX_BLOCK = 32  # weights that share one scale, a power of two, in MXFP4: half a block
NESTED_BLOCK = 256  # absmax values that share one second-level absmax (double quantisation)
LORA_COLUMNS = 64  # an adapter's columns of a product are padded to whole cache lines
# FSDP2 before torch 2.13 does not shard integers, so 4-bit codes are declared as bf16. If they were
# also copied as bf16, they would be damaged without an error: CUDA rewrites NaN patterns, 0.08 % of
# the words. The hooks of NF4Blocks make FSDP2 copy bytes.
QUANT_STORAGE = torch.bfloat16


class NF4Blocks(torch.Tensor):
    """Storage of 4-bit weights: n blocks of 64 weights each.

    For FSDP2 it is a tensor [n] of QUANT_STORAGE. It holds two uint8 tensors, which the two hooks
    let FSDP2 gather as bytes: `packed` [n, 32], the 4-bit codes, the first of a byte in its high
    half; `scales` [n, 1], the 8-bit code of a block's absmax. If a layer has linears in MXFP4,
    `scales` is [n, 2]: a block is two blocks of MXFP4, with an exponent each; in NF4 the second
    scale is 0. With --offload_params both tensors are in pinned host memory, and a gather starts
    with their copy to the GPU, on FSDP2's stream and thus one layer ahead. (FSDP2's
    CPUOffloadPolicy would also move the adapter, its gradients and the optimizer to the CPU.)
    """

    @staticmethod
    def __new__(
        cls, packed: torch.Tensor, scales: torch.Tensor, device: torch.device | None = None,
        dtype: torch.dtype = QUANT_STORAGE,
    ) -> NF4Blocks:
        return torch.Tensor._make_wrapper_subclass(
            cls, (packed.shape[0],), dtype=dtype, device=device or packed.device)

    def __init__(
        self, packed: torch.Tensor, scales: torch.Tensor, device: torch.device | None = None,
        dtype: torch.dtype = QUANT_STORAGE,
    ) -> None:
        self.packed, self.scales = packed, scales

    @classmethod
    def zeros(
        cls, n_blocks: int, device: torch.device | str, n_scales: int = 1,
        quant_storage: torch.dtype = QUANT_STORAGE,
    ) -> NF4Blocks:
        packed = torch.zeros(n_blocks, BLOCK // 2, dtype=torch.uint8, device=device)
        scales = torch.zeros(n_blocks, n_scales, dtype=torch.uint8, device=device)
        return cls(packed, scales, dtype=quant_storage)

    def zeros_on(self, device: torch.device, quant_storage: torch.dtype) -> NF4Blocks:
        """The same number of blocks, all zeros."""
        return NF4Blocks.zeros(len(self), device, self.scales.shape[1], quant_storage)

    def __repr__(self) -> str:
        return f"NF4Blocks({self.shape[0]} blocks, {self.device})"

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, _: Any, args: tuple, kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """What FSDP2 and DTensor do to a parameter: all of it acts on whole blocks."""
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
        if op in (aten.view, aten.as_strided):  # FSDP2 asks only for the shape that it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of NF4Blocks to {args[1:]}"
            return cls(*inner, device=args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice):
            inner = [func(t, *args[1:], **kwargs) for t in inner]
            return cls(*inner, device=args[0].device if offloaded else None)
        raise NotImplementedError(f"{func} of NF4Blocks")

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...],
        module: torch.nn.Module, mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], int]:
        """FSDP2 calls it before a gather. Returns (the tensors to gather, metadata)."""
        packed = self.packed.to(self.device, non_blocking=True)
        scales = self.scales.to(self.device, non_blocking=True)
        # FSDP2 passes the mesh of the shards alone, without its replicas
        if mesh.size() == 1:  # one rank's FSDP2 takes the first of several tensors only
            return (torch.cat([packed.view(-1), scales.view(-1)]),), scales.shape[1]
        return (packed, scales), scales.shape[1]

    # FSDP2 reads the signature at every gather; building it anew took 5 of 150 ms per micro-batch
    # on a CPU
    vars(fsdp_pre_all_gather)["__signature__"] = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(
        self, outputs: tuple[torch.Tensor, ...], n_scales: int, param_dtype: torch.dtype, *,
        out: NF4Blocks | None = None,
    ) -> tuple[NF4Blocks, tuple[torch.Tensor, ...]] | None:
        """FSDP2 calls it with the gathered tensors. Returns (the whole NF4Blocks, the tensors that
        FSDP2 frees with it); None if `out` already holds them."""
        packed, scales = outputs if len(outputs) == 2 else outputs[0].split(
            [outputs[0].numel() // (BLOCK // 2 + n_scales) * n for n in (BLOCK // 2, n_scales)])
        if out is None:
            return NF4Blocks(packed.view(-1, BLOCK // 2), scales.view(-1, n_scales)), outputs
        assert out.packed.data_ptr() == packed.data_ptr(), "FSDP2 gathered to another place"
        return None


@dataclasses.dataclass
class Nested:
    """The second level of quantisation of a layer's linears: turns 8-bit codes into absmax.

    It takes 4 bytes for 16,384 weights, so every rank has all of it.
    """

    absmax: torch.Tensor  # fp32 [blocks / 256], one linear after the other
    offsets: torch.Tensor  # fp32 [linears], the mean absmax of each
    code_values: torch.Tensor  # fp32 [linears, 256], what the 8-bit codes mean


@functools.lru_cache(None)
def dynamic_map(device: torch.device) -> torch.Tensor:
    """The 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


@functools.lru_cache(None)
def nf4_code(device: torch.device) -> torch.Tensor:
    """The 16 values of NF4, fp32."""
    return bnb.functional.get_4bit_type("nf4", device=device)


@functools.lru_cache(None)
def mxfp4_code(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 values of MXFP4's codes, and the 256 of its scales, fp32."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    powers = 2.0 ** torch.arange(-127, 129)  # on the CPU, where they are exact
    return torch.cat([values, -values]).to(device), powers.to(device)


def dequantise(layer: DecoderLayer, fused: FusedLinear, adapter: torch.Tensor) -> torch.Tensor:
    """[W, B] of a FusedLinear, [out, width], in the dtype of `adapter`, the layer's whole adapter.

    W are the weights of its linears, one below the other, bit for bit as bitsandbytes dequantises
    NF4 and transformers MXFP4. B of each linear is in its adapter's columns, which are 0 for the
    other linears.
    """
    weight = adapter.new_empty(fused.out_features, fused.width)
    blocks: NF4Blocks = layer.nf4
    packed, scales, nested = blocks.packed[fused.blocks], blocks.scales[fused.blocks], layer.nested
    in_mxfp4 = fused.places[0].linear.mxfp4
    if weight.is_cuda and not why_no_triton():
        code, of_scales = mxfp4_code(weight.device)
        if not in_mxfp4:
            code, of_scales = nf4_code(weight.device), nested.code_values
        launch_dequantise(
            packed, scales, nested.absmax, nested.offsets, of_scales, code, adapter,
            place_table(fused, weight.device), weight, fused.in_features, fused.lora_rank,
            n_linears=len(fused.places), equal=equal_blocks(fused), in_mxfp4=in_mxfp4)
        return weight
    weight[:, fused.in_features :] = 0
    for p in fused.places:
        part = slice(p.blocks.start - fused.blocks.start, p.blocks.stop - fused.blocks.start)
        shape, rows = (p.linear.out_features, p.linear.in_features), fused.local_outputs(p)
        if p.columns:
            b = adapter[p.lora_b].view(-1, fused.lora_rank)
            weight[rows, fused.in_features :][:, p.columns] = b
        if in_mxfp4:
            values = mxfp4_values(packed[part], scales[part])
            weight[rows, : fused.in_features] = values.view(shape)
            continue
        nested_state = bnb.functional.QuantState(
            absmax=nested.absmax[p.nested], code=nested.code_values[p.index],
            blocksize=NESTED_BLOCK, dtype=torch.float32)
        state = bnb.functional.QuantState(
            absmax=scales[part, 0].contiguous(), code=nf4_code(weight.device), blocksize=BLOCK,
            quant_type="nf4", shape=torch.Size(shape), dtype=weight.dtype,
            offset=nested.offsets[p.index], state2=nested_state)
        codes = packed[part].view(-1, 1)[: math.prod(shape) // 2]
        weight[rows, : fused.in_features] = bnb.functional.dequantize_4bit(codes, state)
    return weight


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights fp32 [n, 2, 32] of n blocks in MXFP4, as NF4Blocks stores them."""
    code, of_scales = mxfp4_code(packed.device)
    values = code[torch.stack([packed >> 4, packed & 15], -1).int()]
    return values.view(-1, BLOCK // MX_BLOCK, MX_BLOCK) * of_scales[scales.int()][..., None]


FIELDS = 7  # of a row of place_table
TILE_BLOCKS = 64  # blocks that one program of dequantise_kernel writes


@functools.lru_cache(None)
def place_table(fused: FusedLinear, device: torch.device) -> torch.Tensor:
    """For dequantise_kernel, of each linear: its first block, first output, first second-level
    absmax, index, first value of B and first column (-1: no adapter), and the output after its
    last. int32 [linears, FIELDS]."""
    table = [[p.blocks.start - fused.blocks.start, fused.local_outputs(p).start, p.nested.start,
              p.index, p.lora_b.start if p.columns else 0, p.columns.start if p.columns else -1,
              fused.local_outputs(p).stop] for p in fused.places]
    return torch.tensor(table, dtype=torch.int32, device=device)


@functools.lru_cache(None)
def equal_blocks(fused: FusedLinear) -> int:
    """The number of blocks of each linear if it is the same for all, as for experts; else 0."""
    sizes = {(p.blocks.stop - p.blocks.start, p.linear.out_features) for p in fused.places}
    return sizes.pop()[0] if len(sizes) == 1 else 0


def launch_dequantise(
    packed: torch.Tensor, scales: torch.Tensor, nested_absmax: torch.Tensor, offsets: torch.Tensor,
    code_values: torch.Tensor, code: torch.Tensor, adapter: torch.Tensor, table: torch.Tensor,
    out: torch.Tensor, n_in: int, rank: int, *, n_linears: int, equal: int, in_mxfp4: bool,
) -> None:
    """Launch dequantise_kernel(), which fills `out` [rows, n_in + padded adapter columns]."""
    n_rows, n_columns = len(out), out.shape[1] - n_in
    n_tiles = triton.cdiv(len(packed), TILE_BLOCKS)
    column_tiles = triton.cdiv(n_rows, 64) * (n_columns // LORA_COLUMNS)
    dequantise_kernel[(n_tiles + column_tiles,)](
        packed, scales, nested_absmax, offsets, code_values, code, adapter, table, out,
        len(packed), n_tiles, n_rows, n_in, n_columns, rank,
        LINEARS=n_linears, EQUAL=equal, MXFP4=in_mxfp4, N_SCALES=scales.shape[1],
        BLOCKS=TILE_BLOCKS, BLOCK=BLOCK, NESTED_BLOCK=NESTED_BLOCK, COLUMNS=LORA_COLUMNS,
        FIELDS=FIELDS, num_warps=4,
        enable_fp_fusion=False)  # bitsandbytes rounds between a scale's product and offset


if triton:

    @triton.jit
    def dequantise_kernel(
        packed, scales, nested_absmax, offsets, code_values, code, adapter, table, out,
        n_blocks, n_tiles, n_rows, n_in, n_columns, rank, LINEARS: tl.constexpr,
        EQUAL: tl.constexpr, MXFP4: tl.constexpr, N_SCALES: tl.constexpr, BLOCKS: tl.constexpr,
        BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
        FIELDS: tl.constexpr,
    ):
        """See dequantise(). The first n_tiles programs write BLOCKS blocks of W each, the others
        64 rows and COLUMNS columns of B each. `table` is place_table(); what 8-bit scales mean is
        in code_values, [linears, 256] or in MXFP4 [256]."""
        tile = tl.program_id(0)
        stride = n_in + n_columns
        if tile < n_tiles:
            block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
            inside = block < n_blocks
            linear = tl.zeros([BLOCKS], tl.int32)
            if EQUAL:
                linear = tl.minimum(block // EQUAL, LINEARS - 1).to(tl.int32)
            else:
                for i in tl.static_range(1, LINEARS):
                    linear += (block >= tl.load(table + i * FIELDS)).to(tl.int32)
            fields = table + linear * FIELDS
            block_of = block.to(tl.int32) - tl.load(fields)  # counted from the linear's first
            first, last = tl.load(fields + 1), tl.load(fields + 6)
            byte_of = tl.arange(0, BLOCK // 2)[None, :]
            byte = block[:, None] * (BLOCK // 2) + byte_of
            codes = tl.load(packed + byte, inside[:, None], 0).to(tl.int32)
            if MXFP4:
                scale_of = block[:, None] * N_SCALES + byte_of // (BLOCK // 2 // N_SCALES)
                scale = tl.load(scales + scale_of, inside[:, None], 0).to(tl.int32)
                factor = tl.load(code_values + scale)
            else:
                nested = tl.load(fields + 2) + block_of // NESTED_BLOCK
                index = tl.load(fields + 3)
                scale = tl.load(scales + block * N_SCALES, inside, 0).to(tl.int32)
                absmax = tl.load(code_values + index * 256 + scale)
                absmax = absmax * tl.load(nested_absmax + nested, inside, 0.0)
                factor = (absmax + tl.load(offsets + index))[:, None]
            high = tl.load(code + (codes >> 4)) * factor
            low = tl.load(code + (codes & 15)) * factor
            values = tl.interleave(high, low).to(out.dtype.element_ty)
            weight = block_of[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            row = weight // n_in  # of the linear
            if n_in % BLOCK == 0:  # then a block lies in one row: fewer divisions
                row = (block_of * BLOCK // n_in)[:, None] + tl.zeros([1, BLOCK], tl.int32)
            target = first.to(tl.int64)[:, None] * stride + weight + row * n_columns
            inside = inside[:, None] & (first[:, None] + row < last[:, None])
            tl.store(out + target, values, inside)
        else:
            write_columns(adapter, table, out, tile - n_tiles, n_rows, n_in, n_columns, rank,
                          LINEARS, EQUAL, COLUMNS, FIELDS)

    @triton.jit
    def write_columns(
        adapter, table, out, tile, n_rows, n_in, n_columns, rank, LINEARS: tl.constexpr,
        EQUAL: tl.constexpr, COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
    ):
        """64 rows and COLUMNS columns of B, see dequantise_kernel()."""
        row = tile // (n_columns // COLUMNS) * 64 + tl.arange(0, 64)
        column = tile % (n_columns // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        linear = tl.zeros([64], tl.int32)
        if EQUAL:  # then its linears have as many outputs each, too
            linear = tl.minimum(row // (n_rows // LINEARS), LINEARS - 1).to(tl.int32)
        else:
            for i in tl.static_range(1, LINEARS):
                linear += (row >= tl.load(table + i * FIELDS + 1)).to(tl.int32)
        fields = table + linear * FIELDS
        start, first_column = tl.load(fields + 4), tl.load(fields + 5)
        r = column[None, :] - first_column[:, None]
        there = (first_column >= 0)[:, None] & (r >= 0) & (r < rank) & (row < n_rows)[:, None]
        first = start.to(tl.int64) + (row - tl.load(fields + 1)).to(tl.int64) * rank
        values = tl.load(adapter + first[:, None] + r, there, 0.0)
        target = row.to(tl.int64)[:, None] * (n_in + n_columns) + n_in + column[None, :]
        tl.store(out + target, values, (row < n_rows)[:, None] & (column >= 0)[None, :])


@functools.lru_cache(None)
def why_no_triton() -> str:
    """Why Triton's kernels cannot be used on this machine; "" if they can. Triton compiles at the
    first use, which needs a C compiler and Python's headers."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if triton is None:
        return "there is no Triton"
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    packed, nested, cuda = packed.view(-1, BLOCK // 2), state.state2, weight.device
    table = torch.tensor([[0, 0, 0, 0, 0, -1, 256]], dtype=torch.int32, device="cuda")
    mx_scales = (torch.arange(2048, device="cuda") % 128 + 64).to(torch.uint8).view(-1, 2)
    mx_code, mx_powers = mxfp4_code(cuda)
    same = []
    for is_mx, scales, of_scales, code, want in (
        (False, state.absmax.view(-1, 1), nested.code, nf4_code(cuda),
         bnb.functional.dequantize_4bit(packed.view(-1, 1), state)),
        (True, mx_scales, mx_powers, mx_code, mxfp4_values(packed, mx_scales).to(weight.dtype))):
        out = torch.empty_like(weight)
        try:
            launch_dequantise(
                packed, scales, nested.absmax, state.offset, of_scales, code, weight, table, out,
                256, 16, n_linears=1, equal=0, in_mxfp4=is_mx)
        except Exception as e:
            return f"Triton cannot compile here, {type(e).__name__}: {str(e)[:200]}"
        same.append(torch.equal(out, want.view(256, 256)))
    return "" if all(same) else "on this GPU its result differs from that of bitsandbytes or torch"
