"""What the machine has: memory of its GPUs and of the host, and how fast it computes and copies.

plan decides how it is used; cards has the machines that are not here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_qlora.model.grouped_mm import why_no_grouped_mm
from fsdp_qlora.quant.nf4 import why_no_triton
from fsdp_qlora.ranks import gather_objects, log_each_rank, raise_on_all_ranks

if TYPE_CHECKING:
    from fsdp_qlora.config import Config


def limit_memory(config: Config, device: torch.device) -> int:
    """The bytes that torch may allocate on each GPU: --memory_limit_gib, or what is free now on the
    GPU with the least free memory; 0 on a CPU without that flag. CUDA and NCCL need about 1 GiB
    more. All ranks must call this."""
    limit = int((config.memory_limit_gib or 0) * 2**30)
    with raise_on_all_ranks():
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info()
            if limit > free:
                raise ValueError(f"--memory_limit_gib {config.memory_limit_gib}: of this GPU's"
                                 f" {total / 2**30:.1f} GiB only {free / 2**30:.1f} are free")
            if limit:
                torch.cuda.set_per_process_memory_fraction(limit / total)
            limit = limit or free
    return min(gather_objects(limit))


def proc_bytes(file: str, name: str) -> float:
    """A size in a file of /proc, in bytes; inf where there is no /proc, as on macOS."""
    path = Path("/proc", file)
    sizes = re.findall(rf"{name}:\s*(\d+) kB", path.read_text()) if path.is_file() else ["inf"]
    return float(sizes[0]) * 2**10


def host_memory() -> tuple[float, float]:
    """This process's resident bytes now and at their peak."""
    return proc_bytes("self/status", "VmRSS"), proc_bytes("self/status", "VmHWM")


def cgroup_free(
    root: str | Path = "/sys/fs/cgroup", own: str | Path = "/proc/self/cgroup",
) -> float:
    """Bytes that this process's container or job may still use (cgroup v2); inf without a limit."""
    free, own = math.inf, Path(own)
    inside = own.read_text().rpartition("0::/")[2].strip() if own.is_file() else ""
    for group in Path(inside, "_").parents:  # the lowest limit of all levels counts
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, or "max": none
            texts = {name: Path(root, group, f"memory.{name}").read_text()
                     for name in ("max", "current", "stat")}
            cached = dict(map(str.split, texts["stat"].splitlines()))["inactive_file"]
            free = min(free, int(texts["max"]) - int(texts["current"]) + int(cached))
    return free


def host_share() -> float:
    """Bytes of free host memory for each process of this machine."""
    free = min(proc_bytes("meminfo", "MemAvailable"), cgroup_free())
    return free / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def memory_gib(device: torch.device, graphs: bool = False) -> tuple[float, float]:
    """GiB now and at the peak: on a GPU what torch has allocated, or reserved with CUDA graphs,
    whose memory does not count as allocated; on a CPU resident memory of the process."""
    if graphs:
        return torch.cuda.memory_reserved() / 2**30, torch.cuda.max_memory_reserved() / 2**30
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    current, peak = host_memory()
    return current / 2**30, peak / 2**30


def log_memory(when: str, device: torch.device) -> None:
    """Print each rank's memory now and at its peak. All ranks must call this."""
    current, peak = memory_gib(device)
    kind = "GPU memory" if device.type == "cuda" else "host memory"
    log_each_rank(f"{kind} {when}", f"{current:.2f} GiB (peak {peak:.2f})")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a plan is made for, besides the number of GPUs and the memory of each."""

    flops: float  # a second, of large products in the compute dtype
    bandwidth: float  # bytes a second, of the GPU's memory
    link: float  # bytes a second that a GPU receives in an all-gather
    host: float = 2e10  # bytes a second between host and GPU, each way
    launch: float = 40e-6  # seconds of the host for a kernel, Python around it included
    host_bytes: float = math.inf  # free host memory for each process
    why_no_triton: str = ""  # why no kernel reads an embedding in host memory; "" if one does
    why_no_grouped: str = ""  # why experts are multiplied one by one; "" if they are not


def rounded(figure: float) -> float:
    """A speed, rounded to one of ten steps a decade, so that another run finds the same plan."""
    return float(f"{10 ** (round(10 * math.log10(figure)) / 10):.2g}")


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """This Machine, by rank 0's measurements. All ranks must call this."""
    facts = {"host_bytes": min(gather_objects(host_share())), "why_no_triton": why_no_triton(),
             "why_no_grouped": why_no_grouped_mm(dtype, device)}
    if device.type == "cpu":
        return Machine(1e11, 1e10, 1e9, **facts)

    def seconds(run: Callable[[], object]) -> float:
        times, events = 20, [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for i in range(2 * times):
            if i == times:  # clocks are up by now
                events[0].record()
            run()
        events[1].record()
        torch.cuda.synchronize()
        return events[0].elapsed_time(events[1]) / 1000 / times

    a, b = torch.randn(2, 4096, 4096, dtype=dtype, device=device)
    parts = torch.empty(dist.get_world_size(), 2**26, dtype=torch.uint8, device=device)
    own = parts[0].clone()
    on_host = torch.empty_like(own, device="cpu", pin_memory=True)
    figures = {
        "flops": 2 * 4096**3 / seconds(lambda: a @ b),
        "bandwidth": 2 * 4 * a.nbytes / seconds(lambda: torch.cat([a, a, b, b])),
        "link": parts.nbytes / seconds(lambda: dist.all_gather_into_tensor(parts, own)),
        "host": own.nbytes / seconds(lambda: on_host.copy_(own, non_blocking=True))}
    speeds = {name: rounded(figure) for name, figure in figures.items()}
    return Machine(**gather_objects(speeds)[0], **facts)
