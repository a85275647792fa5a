"""Weights in NF4: how FSDP2 shards their bytes exactly, and the kernel that dequantises them.

Stands on bitsandbytes, whose values it gives bit for bit. What quantises a weight and reads a file
is in the script and in weights.
"""

import dataclasses
import functools
import inspect
import math

import bitsandbytes as bnb
import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch on CUDA alone
    triton = None

BLOCK = 64  # weights that share one absmax; QLoRA's choice and bitsandbytes' default
NESTED_BLOCK = 256  # absmax values that share one second-level absmax (double quantisation)
LORA_COLUMNS = 64  # an adapter's columns of a product are padded to whole cache lines
# FSDP2 before torch 2.13 shards no integers, so 4-bit codes look like bf16. Copied as bf16 they
# would be damaged without an error: CUDA rewrites NaN patterns, 0.08 % of the words. The hooks of
# NF4Blocks make FSDP2 copy bytes.
QUANT_STORAGE = torch.bfloat16


class NF4Blocks(torch.Tensor):
    """Storage of NF4 weights: n blocks of 64 weights each.

    For FSDP2 it is a tensor [n] of QUANT_STORAGE. It holds `packed` uint8 [n, 32], the 4-bit codes,
    and `absmax_codes` uint8 [n], the 8-bit scales; its two hooks let FSDP2 gather both as bytes.
    With --offload_params both are in pinned host memory, and a gather begins with their copy to the
    GPU, on FSDP2's stream and thus a layer ahead. (FSDP2's CPUOffloadPolicy would also move the
    adapter, its gradients and the optimizer to the CPU.)
    """

    @staticmethod
    def __new__(cls, packed, absmax_codes, device=None, dtype=QUANT_STORAGE):
        return torch.Tensor._make_wrapper_subclass(
            cls, (packed.shape[0],), dtype=dtype, device=device or packed.device)

    def __init__(self, packed, absmax_codes, device=None, dtype=QUANT_STORAGE):
        self.packed, self.absmax_codes = packed, absmax_codes

    @classmethod
    def zeros(cls, n_blocks, device, quant_storage=QUANT_STORAGE):
        packed = torch.zeros(n_blocks, BLOCK // 2, dtype=torch.uint8, device=device)
        absmax_codes = torch.zeros(n_blocks, dtype=torch.uint8, device=device)
        return cls(packed, absmax_codes, dtype=quant_storage)

    def __repr__(self):
        return f"NF4Blocks({self.shape[0]} blocks, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, _, args, kwargs=None):
        """What FSDP2 and DTensor do to a parameter: all of it acts on whole blocks."""
        aten, op = torch.ops.aten, func.overloadpacket
        inner = [args[0].packed, args[0].absmax_codes]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k not in ("dtype", "layout")}
        if op is aten.copy_:
            args[0].packed.copy_(args[1].packed)
            args[0].absmax_codes.copy_(args[1].absmax_codes)
            return args[0]
        if op is aten.split:
            return [cls(*pair) for pair in zip(*(func(t, *args[1:]) for t in inner))]
        offloaded = inner[0].is_cpu and args[0].is_cuda
        if op is aten.new_zeros:
            (n,) = args[1]
            return cls(inner[0].new_zeros(n, BLOCK // 2, **kwargs), inner[1].new_zeros(n, **kwargs))
        if op in (aten.view, aten.as_strided):  # FSDP2 only ever asks for the shape it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of NF4Blocks to {args[1:]}"
            return cls(*inner, args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice):
            inner = [func(t, *args[1:], **kwargs) for t in inner]
            return cls(*inner, args[0].device if offloaded else None)
        raise NotImplementedError(f"{func} of NF4Blocks")

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """FSDP2 calls it before a gather. Returns (the tensors to gather, metadata)."""
        packed = self.packed.to(self.device, non_blocking=True)
        absmax_codes = self.absmax_codes.to(self.device, non_blocking=True)
        # FSDP2 passes the mesh of the shards alone, without its replicas
        if mesh.size() == 1:  # one rank's FSDP2 takes the first of several tensors only
            return (torch.cat([packed.view(-1), absmax_codes]),), None
        return (packed, absmax_codes), None

    # FSDP2 asks for it at every gather; finding it out anew took 5 of 150 ms a micro-batch on a CPU
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        """FSDP2 calls it with the gathered tensors. Returns (the whole NF4Blocks, the tensors that
        FSDP2 frees with it); None where `out` is that already."""
        packed, absmax_codes = outputs if len(outputs) == 2 else outputs[0].split(
            [outputs[0].numel() // (BLOCK // 2 + 1) * n for n in (BLOCK // 2, 1)])
        if out is None:
            return NF4Blocks(packed.view(-1, BLOCK // 2), absmax_codes), outputs
        assert out.packed.data_ptr() == packed.data_ptr(), "FSDP2 gathered to another place"


@dataclasses.dataclass
class Nested:
    """The second level of quantisation of a layer's linears: turns 8-bit codes into absmax.

    It takes 4 bytes for 16,384 weights, so every rank has all of it.
    """

    absmax: torch.Tensor  # fp32 [blocks / 256], one linear after the other
    offsets: torch.Tensor  # fp32 [linears], the mean absmax of each
    code_values: torch.Tensor  # fp32 [linears, 256], what the 8-bit codes mean


@functools.lru_cache(None)
def dynamic_map(device):
    """The 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


@functools.lru_cache(None)
def nf4_code(device):
    """The 16 values of NF4, fp32."""
    return bnb.functional.get_4bit_type("nf4", device=device)


def dequantise(layer, fused, adapter):
    """[W, B] of a FusedLinear, [out, width], in the dtype of `adapter`, the layer's whole adapter.

    W are the weights of its linears, one below the other, bit for bit as bitsandbytes gives them;
    B of each linear is in its adapter's columns, which are 0 for the other linears.
    """
    weight = adapter.new_empty(fused.out_features, fused.width)
    packed = layer.nf4.packed[fused.blocks]
    absmax_codes, nested = layer.nf4.absmax_codes[fused.blocks], layer.nested
    if weight.is_cuda and not why_no_triton():
        tiles, n_columns = triton.cdiv(len(packed), 64), fused.width - fused.in_features
        dequantise_kernel[(tiles + triton.cdiv(len(weight), 64) * (n_columns // LORA_COLUMNS),)](
            packed, absmax_codes, nested.absmax, nested.offsets, nested.code_values,
            nf4_code(weight.device), adapter, place_table(fused, weight.device), weight,
            len(packed), tiles, len(weight), fused.in_features, n_columns, fused.lora_rank,
            len(fused.places), equal_blocks(fused), 64, BLOCK, NESTED_BLOCK, LORA_COLUMNS, FIELDS,
            num_warps=4,
            enable_fp_fusion=False,  # bitsandbytes rounds between a scale's product and offset
        )
        return weight
    weight[:, fused.in_features :] = 0
    for p in fused.places:
        blocks = slice(p.blocks.start - fused.blocks.start, p.blocks.stop - fused.blocks.start)
        shape, rows = (p.linear.out_features, p.linear.in_features), fused.local_outputs(p)
        nested_state = bnb.functional.QuantState(
            absmax=nested.absmax[p.nested], code=nested.code_values[p.index],
            blocksize=NESTED_BLOCK, dtype=torch.float32)
        state = bnb.functional.QuantState(
            absmax=absmax_codes[blocks], code=nf4_code(weight.device), blocksize=BLOCK,
            quant_type="nf4", shape=torch.Size(shape), dtype=weight.dtype,
            offset=nested.offsets[p.index], state2=nested_state)
        codes = packed[blocks].view(-1, 1)[: math.prod(shape) // 2]
        weight[rows, : fused.in_features] = bnb.functional.dequantize_4bit(codes, state)
        if p.columns:
            b = adapter[p.lora_b].view(-1, fused.lora_rank)
            weight[rows, fused.in_features :][:, p.columns] = b
    return weight


FIELDS = 7  # of a row of place_table


@functools.lru_cache(None)
def place_table(fused, device):
    """For dequantise_kernel, of each linear: its first block, first output, first second-level
    absmax, index, first value of B and first column (-1: no adapter), and the output after its
    last. int32 [linears, FIELDS]."""
    table = [[p.blocks.start - fused.blocks.start, fused.local_outputs(p).start, p.nested.start,
              p.index, p.lora_b.start if p.columns else 0, p.columns.start if p.columns else -1,
              fused.local_outputs(p).stop] for p in fused.places]
    return torch.tensor(table, dtype=torch.int32, device=device)


@functools.lru_cache(None)
def equal_blocks(fused):
    """The blocks of each of its linears where all have as many, as those of experts; else 0."""
    sizes = {(p.blocks.stop - p.blocks.start, p.linear.out_features) for p in fused.places}
    return sizes.pop()[0] if len(sizes) == 1 else 0


if triton:

    @triton.jit
    def dequantise_kernel(
        packed, absmax_codes, nested_absmax, offsets, code_values, nf4_code, adapter, table, out,
        n_blocks, n_tiles, n_rows, n_in, n_columns, rank, LINEARS: tl.constexpr,
        EQUAL: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
        COLUMNS: tl.constexpr, FIELDS: tl.constexpr,
    ):
        """See dequantise(). The first n_tiles programs write BLOCKS blocks of W each, the others
        64 rows and COLUMNS columns of B each. `table` is place_table()."""
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
            nested = tl.load(fields + 2) + block_of // NESTED_BLOCK
            index = tl.load(fields + 3)
            code = tl.load(absmax_codes + block, inside, 0).to(tl.int32)
            absmax = tl.load(code_values + index * 256 + code)
            absmax = absmax * tl.load(nested_absmax + nested, inside, 0.0)
            absmax = absmax + tl.load(offsets + index)
            byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
            codes = tl.load(packed + byte, inside[:, None], 0).to(tl.int32)
            high = tl.load(nf4_code + (codes >> 4)) * absmax[:, None]
            low = tl.load(nf4_code + (codes & 15)) * absmax[:, None]
            values = tl.interleave(high, low).to(out.dtype.element_ty)
            weight = block_of[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            row = weight // n_in  # of the linear
            if n_in % BLOCK == 0:  # then a block lies in one row: fewer divisions
                row = (block_of * BLOCK // n_in)[:, None] + tl.zeros([1, BLOCK], tl.int32)
            place = first.to(tl.int64)[:, None] * stride + weight + row * n_columns
            inside = inside[:, None] & (first[:, None] + row < last[:, None])
            tl.store(out + place, values, inside)
        else:  # other names: Triton wants one type for a name in both branches
            b_tile = tile - n_tiles
            out_row = b_tile // (n_columns // COLUMNS) * 64 + tl.arange(0, 64)
            column = b_tile % (n_columns // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
            linear_of = tl.zeros([64], tl.int32)
            if EQUAL:  # then its linears have as many outputs each, too
                linear_of = tl.minimum(out_row // (n_rows // LINEARS), LINEARS - 1).to(tl.int32)
            else:
                for i in tl.static_range(1, LINEARS):
                    linear_of += (out_row >= tl.load(table + i * FIELDS + 1)).to(tl.int32)
            b_fields = table + linear_of * FIELDS
            b_row = out_row - tl.load(b_fields + 1)
            b_start, first_column = tl.load(b_fields + 4), tl.load(b_fields + 5)
            r = column[None, :] - first_column[:, None]
            there = (first_column >= 0)[:, None] & (r >= 0) & (r < rank)
            there = there & (out_row < n_rows)[:, None]
            b_first = b_start.to(tl.int64) + b_row.to(tl.int64) * rank
            b_values = tl.load(adapter + b_first[:, None] + r, there, 0.0)
            b_place = out_row.to(tl.int64)[:, None] * stride + n_in + column[None, :]
            tl.store(out + b_place, b_values, (out_row < n_rows)[:, None] & (column >= 0)[None, :])


@functools.lru_cache(None)
def why_no_triton():
    """Why Triton's kernels cannot be used on this machine; "" if they can. Triton compiles at the
    first use, which takes a C compiler and Python's headers."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    if triton is None:
        return "there is no Triton"
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device="cuda")
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    out = torch.empty_like(weight)
    table = torch.tensor([[0, 0, 0, 0, 0, -1, 256]], dtype=torch.int32, device="cuda")
    try:
        dequantise_kernel[(16,)](
            packed.view(-1, BLOCK // 2), state.absmax, state.state2.absmax, state.offset,
            state.state2.code, nf4_code(weight.device), weight, table, out, 1024, 16, 256, 256, 0,
            16, 1, 0, 64, BLOCK, NESTED_BLOCK, LORA_COLUMNS, FIELDS, num_warps=4,
            enable_fp_fusion=False)
    except Exception as e:
        return f"Triton cannot compile here, {type(e).__name__}: {str(e)[:200]}"
    same = torch.equal(out, bnb.functional.dequantize_4bit(packed, state))
    return "" if same else "its result is not what bitsandbytes gives on this GPU"
