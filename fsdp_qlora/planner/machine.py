"""Machine: how fast this machine computes and copies, measured at every start."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_qlora.layer.grouped_mm import why_no_grouped_mm
from fsdp_qlora.memory import host_share
from fsdp_qlora.quant.triton_trial import why_no_triton
from fsdp_qlora.ranks import all_gather_objects


@dataclasses.dataclass(frozen=True)
class Machine:
    """The speeds and limits that a plan depends on, besides the number of GPUs and the memory of
    each."""

    flops_per_second: float  # FLOP/s of large matmuls in the compute dtype
    memory_bandwidth: float  # bytes/s of the GPU's memory
    link_bandwidth: float  # bytes/s that a GPU receives from the others in an all-gather
    host_copy_bandwidth: float = 2e10  # bytes/s between host memory and GPU, each way
    launch_seconds: float = 40e-6  # CPU seconds per kernel, including Python
    free_host_bytes: float = math.inf  # free host memory per process
    why_no_triton: str = ""  # why no kernel can read an embedding in host memory; "" if one can
    why_no_grouped_mm: str = ""  # why experts are multiplied one by one; "" if they are not


def rounded(figure: float) -> float:
    """Round a speed to one of ten steps per decade, so that another run finds the same plan."""
    return float(f"{10 ** (round(10 * math.log10(figure)) / 10):.2g}")


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """Measure this Machine, by rank 0. All ranks must call this."""
    facts = {"free_host_bytes": min(all_gather_objects(host_share())),
             "why_no_triton": why_no_triton(),
             "why_no_grouped_mm": why_no_grouped_mm(dtype, device)}
    if device.type == "cpu":
        return Machine(flops_per_second=1e11, memory_bandwidth=1e10, link_bandwidth=1e9, **facts)

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
        "flops_per_second": 2 * 4096**3 / seconds(lambda: a @ b),
        "memory_bandwidth": 2 * 4 * a.nbytes / seconds(lambda: torch.cat([a, a, b, b])),
        # one process receives nothing, and no prediction reads it: any positive number
        "link_bandwidth": max(1, parts.nbytes - own.nbytes) / seconds(
            lambda: dist.all_gather_into_tensor(parts, own)),
        "host_copy_bandwidth": own.nbytes / seconds(lambda: on_host.copy_(own, non_blocking=True))}
    speeds = {name: rounded(figure) for name, figure in figures.items()}
    return Machine(**all_gather_objects(speeds)[0], **facts)
