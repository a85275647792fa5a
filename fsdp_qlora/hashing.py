"""Hashes of integers and of tensor contents."""

from __future__ import annotations

import torch

# values that tensor_checksum() adds at once; they fit in a CPU's cache (2**22 took 20 times longer)
SUM_CHUNK = {"cpu": 2**18, "cuda": 2**23}


def hash_ints(bits: torch.Tensor) -> torch.Tensor:
    """Hash int64 to int64 by the finalizer of MurmurHash3; products wrap around."""
    for factor in (-49064778989728563, -4265267296055464877):
        bits = (bits ^ (bits >> 33 & 0x7FFFFFFF)) * factor
    return bits ^ (bits >> 33 & 0x7FFFFFFF)


def as_hex(value: int) -> str:
    return f"{value % 2**64:016x}"


def tensor_checksum(
    values: torch.Tensor, rows: range = range(1), n_before: int = 0,
) -> torch.Tensor:
    """Return a checksum of a tensor's content, int64 on the device of `values`: the sum of all
    values, as integers, each times a hash of its index, modulo 2^64.

    The sums of a tensor's parts add up to the sum of the whole. `values` are the rows `rows` of the
    tensor; rows below `n_before` are not counted.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize]
    width, first = values.numel() // max(1, len(rows)), max(rows.start, n_before)
    own = values.contiguous().view(-1).view(bits)[(first - rows.start) * width :]
    total, index = torch.zeros((), dtype=torch.int64, device=own.device), first * width
    for chunk in own.split(SUM_CHUNK[own.device.type]):
        indices = torch.arange(index, index + len(chunk), device=own.device)
        total += (hash_ints(indices) * chunk).sum()
        index += len(chunk)
    return total
