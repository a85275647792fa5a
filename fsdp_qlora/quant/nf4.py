"""NF4 and MXFP4 codes, and the Triton kernel that dequantizes them.

MXFP4 is the format of gpt-oss's experts. blocks.py stores the codes. The kernel dequantizes all
linears of a matmul at once and is told where each one is by a table, int32 [linears, 7], which
linears_table() in layer/dequantize.py makes. The seven columns of a linear's row are:

    FIRST_BLOCK    its first block, in `packed` and `scales`
    FIRST_OUTPUT   its first output, a row of `out`
    FIRST_NESTED   its first second-level absmax, in `nested_absmax`; unused in MXFP4
    INDEX          its row of `offsets` and `scale_codebooks`; unused in MXFP4
    FIRST_B        the first value of its B, in `adapter`
    FIRST_COLUMN   the first of its columns among LoRA's; -1: it has no adapter
    END_OUTPUT     the output after its last
"""

from __future__ import annotations

import functools
import math

import bitsandbytes as bnb
import torch

from fsdp_qlora.optional_triton import tl, triton
from fsdp_qlora.quant.blocks import BLOCKSIZE, MXFP4_BLOCKSIZE, NESTED_BLOCKSIZE


LORA_ALIGNMENT = 64  # LoRA's columns of a matmul are padded to a multiple, whole cache lines


@functools.lru_cache(None)
def scale_codebook(device: torch.device) -> torch.Tensor:
    """Return the 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


@functools.lru_cache(None)
def nf4_codebook(device: torch.device) -> torch.Tensor:
    """Return the 16 values of NF4, fp32."""
    return bnb.functional.get_4bit_type("nf4", device=device)


@functools.lru_cache(None)
def mxfp4_codebooks(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the 16 values of MXFP4's codes, and the 256 values of its scales, fp32."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    powers = 2.0 ** torch.arange(-127, 129)  # on the CPU, where they are exact
    return torch.cat([values, -values]).to(device), powers.to(device)


def mxfp4_values(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the weights fp32 [n, 2, 32] of n blocks in MXFP4, as FourBitBlocks stores them."""
    codebook, scale_codebook = mxfp4_codebooks(packed.device)
    values = codebook[torch.stack([packed >> 4, packed & 15], -1).int()]
    values = values.view(-1, BLOCKSIZE // MXFP4_BLOCKSIZE, MXFP4_BLOCKSIZE)
    return values * scale_codebook[scales.int()][..., None]


TILE_BLOCKS = 64  # blocks that one program of dequantize_kernel writes
TILE_ROWS = 64  # rows of B that one program writes, LORA_ALIGNMENT columns of them


def launch_dequantize(
    packed: torch.Tensor, scales: torch.Tensor, nested_absmax: torch.Tensor, offsets: torch.Tensor,
    scale_codebooks: torch.Tensor, codebook: torch.Tensor, adapter: torch.Tensor,
    table: torch.Tensor, out: torch.Tensor, n_in: int, rank: int, *, n_linears: int,
    blocks_per_linear: int, in_mxfp4: bool,
) -> None:
    """Launch dequantize_kernel(), which fills `out` [rows, n_in + padded adapter columns].

    `packed`, `scales`: see FourBitBlocks; `nested_absmax`, `offsets`: see NestedScales;
    `scale_codebooks`: the values of the 8-bit scales, [linears, 256], in MXFP4 [256]; `codebook`:
    those of the 4-bit codes, [16]; `table`: see the top of this file; `blocks_per_linear`: see
    blocks_per_linear() in layer/dequantize.py.
    """
    n_rows, padded_lora_width = len(out), out.shape[1] - n_in
    n_tiles = math.ceil(len(packed) / TILE_BLOCKS)
    column_tiles = math.ceil(n_rows / TILE_ROWS) * (padded_lora_width // LORA_ALIGNMENT)
    dequantize_kernel[(n_tiles + column_tiles,)](
        packed, scales, nested_absmax, offsets, scale_codebooks, codebook, adapter, table, out,
        len(packed), n_tiles, n_rows, n_in, padded_lora_width, rank,
        LINEARS=n_linears, BLOCKS_PER_LINEAR=blocks_per_linear, MXFP4=in_mxfp4,
        SCALES_PER_BLOCK=scales.shape[1],
        BLOCKS=TILE_BLOCKS, BLOCK=BLOCKSIZE, NESTED_BLOCK=NESTED_BLOCKSIZE, ROWS=TILE_ROWS,
        COLUMNS=LORA_ALIGNMENT, num_warps=4,
        enable_fp_fusion=False)  # bitsandbytes rounds between multiplying a scale and adding offset


if triton:
    # the table's columns, and their number
    FIRST_BLOCK, FIRST_OUTPUT, FIRST_NESTED, INDEX, FIRST_B, FIRST_COLUMN, END_OUTPUT, FIELDS = map(
        tl.constexpr, range(8))
    SCALE_CODES = tl.constexpr(256)  # values that an 8-bit scale can have

    @triton.jit
    def dequantize_kernel(
        packed, scales, nested_absmax, offsets, scale_codebooks, codebook, adapter, table, out,
        n_blocks, n_tiles, n_rows, n_in, padded_lora_width, rank, LINEARS: tl.constexpr,
        BLOCKS_PER_LINEAR: tl.constexpr, MXFP4: tl.constexpr, SCALES_PER_BLOCK: tl.constexpr,
        BLOCKS: tl.constexpr,
        BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):
        """Kernel of dequantize(), see launch_dequantize(). The first n_tiles programs write BLOCKS
        blocks of W each, the others ROWS rows and COLUMNS columns of B each."""
        tile = tl.program_id(0)
        stride = n_in + padded_lora_width
        if tile < n_tiles:
            block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
            inside = block < n_blocks
            linear = tl.zeros([BLOCKS], tl.int32)
            if BLOCKS_PER_LINEAR:
                linear = tl.minimum(block // BLOCKS_PER_LINEAR, LINEARS - 1).to(tl.int32)
            else:
                for i in tl.static_range(1, LINEARS):
                    linear += (block >= tl.load(table + i * FIELDS + FIRST_BLOCK)).to(tl.int32)
            fields = table + linear * FIELDS
            # counted from the linear's first block
            block_of = block.to(tl.int32) - tl.load(fields + FIRST_BLOCK)
            first_output, end_output = tl.load(fields + FIRST_OUTPUT), tl.load(fields + END_OUTPUT)
            byte_of = tl.arange(0, BLOCK // 2)[None, :]
            byte = block[:, None] * (BLOCK // 2) + byte_of
            codes = tl.load(packed + byte, inside[:, None], 0).to(tl.int32)
            if MXFP4:
                scale_of = (block[:, None] * SCALES_PER_BLOCK
                            + byte_of // (BLOCK // 2 // SCALES_PER_BLOCK))
                scale = tl.load(scales + scale_of, inside[:, None], 0).to(tl.int32)
                factor = tl.load(scale_codebooks + scale)
            else:
                nested = tl.load(fields + FIRST_NESTED) + block_of // NESTED_BLOCK
                index = tl.load(fields + INDEX)
                scale = tl.load(scales + block * SCALES_PER_BLOCK, inside, 0).to(tl.int32)
                absmax = tl.load(scale_codebooks + index * SCALE_CODES + scale)
                absmax = absmax * tl.load(nested_absmax + nested, inside, 0.0)
                factor = (absmax + tl.load(offsets + index))[:, None]
            high = tl.load(codebook + (codes >> 4)) * factor
            low = tl.load(codebook + (codes & 15)) * factor
            values = tl.interleave(high, low).to(out.dtype.element_ty)
            weight = block_of[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            row = weight // n_in  # row of the linear
            if n_in % BLOCK == 0:  # a block is in one row: fewer divisions
                row = (block_of * BLOCK // n_in)[:, None] + tl.zeros([1, BLOCK], tl.int32)
            target = first_output.to(tl.int64)[:, None] * stride + weight + row * padded_lora_width
            inside = inside[:, None] & (first_output[:, None] + row < end_output[:, None])
            tl.store(out + target, values, inside)
        else:
            write_lora_b(adapter, table, out, tile - n_tiles, n_rows, n_in, padded_lora_width, rank,
                         LINEARS, BLOCKS_PER_LINEAR, ROWS, COLUMNS)

    @triton.jit
    def write_lora_b(
        adapter, table, out, tile, n_rows, n_in, padded_lora_width, rank, LINEARS: tl.constexpr,
        BLOCKS_PER_LINEAR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ):
        """Write ROWS rows and COLUMNS columns of B, see dequantize_kernel()."""
        row = tile // (padded_lora_width // COLUMNS) * ROWS + tl.arange(0, ROWS)
        column = tile % (padded_lora_width // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        linear = tl.zeros([ROWS], tl.int32)
        if BLOCKS_PER_LINEAR:  # then the linears also have equally many outputs
            linear = tl.minimum(row // (n_rows // LINEARS), LINEARS - 1).to(tl.int32)
        else:
            for i in tl.static_range(1, LINEARS):
                linear += (row >= tl.load(table + i * FIELDS + FIRST_OUTPUT)).to(tl.int32)
        fields = table + linear * FIELDS
        start, first_column = tl.load(fields + FIRST_B), tl.load(fields + FIRST_COLUMN)
        r = column[None, :] - first_column[:, None]
        there = (first_column >= 0)[:, None] & (r >= 0) & (r < rank) & (row < n_rows)[:, None]
        own_row = row - tl.load(fields + FIRST_OUTPUT)  # row of the linear
        first = start.to(tl.int64) + own_row.to(tl.int64) * rank
        values = tl.load(adapter + first[:, None] + r, there, 0.0)
        target = row.to(tl.int64)[:, None] * (n_in + padded_lora_width) + n_in + column[None, :]
        tl.store(out + target, values, (row < n_rows)[:, None] & (column >= 0)[None, :])
