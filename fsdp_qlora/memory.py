"""Memory limits and use, of the GPU and of the host."""

from __future__ import annotations

import contextlib
import math
import os
import re
from pathlib import Path
from typing import NamedTuple

import torch

from fsdp_qlora.config import Config
from fsdp_qlora.log import log_debug_each_rank
from fsdp_qlora.ranks import all_gather_objects, raise_on_all_ranks


def limit_memory(config: Config, device: torch.device) -> int:
    """Return the bytes that torch may allocate on each GPU: --memory_limit_gib, or what is free now
    on the GPU with the least free memory; 0 on a CPU without that flag. CUDA and NCCL need about 1
    GiB more. All ranks must call this."""
    limit = int((config.memory_limit_gib or 0) * 2**30)
    with raise_on_all_ranks():
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            if limit > free:
                raise ValueError(f"--memory_limit_gib {config.memory_limit_gib}: only"
                                 f" {free / 2**30:.1f} of this GPU's {total / 2**30:.1f} GiB are"
                                 " free")
            if limit:
                torch.cuda.set_per_process_memory_fraction(limit / total)
            limit = limit or free
    return min(all_gather_objects(limit))


def proc_bytes(file: str, name: str) -> float:
    """Return a size in a file of /proc, in bytes; inf where there is no /proc, as on macOS."""
    path = Path("/proc", file)
    sizes = re.findall(rf"{name}:\s*(\d+) kB", path.read_text()) if path.is_file() else ["inf"]
    return float(sizes[0]) * 2**10


class HostMemory(NamedTuple):
    """A process's resident bytes."""

    now: float
    peak: float


def host_memory() -> HostMemory:
    """Return this process's HostMemory."""
    return HostMemory(proc_bytes("self/status", "VmRSS"), proc_bytes("self/status", "VmHWM"))


def cgroup_free(
    root: str | Path = "/sys/fs/cgroup", own: str | Path = "/proc/self/cgroup",
) -> float:
    """Return the bytes that this process's container or job may still use (cgroup v2); inf without
    a limit."""
    free, own = math.inf, Path(own)
    inside = own.read_text().rpartition("0::/")[2].strip() if own.is_file() else ""
    for group in Path(inside, "_").parents:  # the lowest limit of all levels counts
        with contextlib.suppress(OSError, ValueError, KeyError):  # no file, or "max": no limit
            texts = {name: Path(root, group, f"memory.{name}").read_text()
                     for name in ("max", "current", "stat")}
            cached = dict(map(str.split, texts["stat"].splitlines()))["inactive_file"]
            free = min(free, int(texts["max"]) - int(texts["current"]) + int(cached))
    return free


def host_share() -> float:
    """Return the bytes of free host memory per process of this machine."""
    free = min(proc_bytes("meminfo", "MemAvailable"), cgroup_free())
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_gib(device: torch.device, cuda_graphs: bool = False) -> tuple[float, float]:
    """Return GiB now and at the peak: on a GPU what torch has allocated, or has reserved if CUDA
    graphs are used, whose memory does not count as allocated; on a CPU the process's resident
    memory."""
    if cuda_graphs:
        return torch.cuda.memory_reserved() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    resident = host_memory()
    return resident.now / 2**30, resident.peak / 2**30


def log_debug_memory(when: str, device: torch.device) -> None:
    """Print each rank's memory now and at its peak, with FSDP_QLORA_DEBUG=1. All ranks must call
    this."""
    current, peak = memory_gib(device)
    kind = "GPU memory" if device.type == "cuda" else "host memory"
    log_debug_each_rank(f"{kind} {when}", f"{current:.2f} GiB (peak {peak:.2f})")
