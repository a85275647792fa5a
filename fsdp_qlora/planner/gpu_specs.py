"""GPU data sheets, for --plan_for."""

from __future__ import annotations

import re
from typing import NamedTuple

from fsdp_qlora.planner.machine import Machine, rounded


class GPUSpec(NamedTuple):
    """Speeds of a GPU according to NVIDIA: the data sheets of A100, L40S, H100, H200 (SXM where it
    exists), A6000 and HGX B200, and the whitepapers on GA102, Ada and RTX Blackwell. Matmuls of the
    4060, 3060 and 4060Ti follow from the 4090's and 3090's by tensor cores and clock."""

    size_gb: int  # as it is sold
    free_gib: float  # what CUDA and NCCL leave: what torch reports, less 1.2 to 2
    tflops: float  # of dense bf16 matmuls with fp32 sums; for GeForce half of fp16's
    bandwidth_gb_s: float  # of its memory
    link_gb_s: float  # received from the other GPUs: by NVLink, else by its bus
    host_gb_s: float  # between GPU and host memory, each way: PCIe 4.0 or 5.0, x8 or x16
    # True if torch has grouped matmuls for it, see why_no_grouped_mm()
    has_grouped_mm: bool = False
    sdpa_is_cudnn: bool = False  # True if torch's SDPA runs cuDNN's kernel


GPU_SPECS = {  # among GPUs of one size, the slowest comes first
    "4060": GPUSpec(8, 7.4, 30, 272, 16, 16),
    "3060": GPUSpec(12, 11.2, 25, 360, 32, 32),
    "4060Ti": GPUSpec(16, 15, 44, 288, 16, 16),
    "3090": GPUSpec(24, 22.5, 71, 936, 32, 32),
    "4090": GPUSpec(24, 22.5, 165, 1008, 32, 32),
    "5090": GPUSpec(32, 30, 209, 1792, 64, 64),
    "A100-40GB": GPUSpec(40, 38, 312, 1555, 300, 32),
    "A6000": GPUSpec(48, 45, 155, 768, 32, 32),
    "L40S": GPUSpec(48, 43, 362, 864, 32, 32),
    "A100": GPUSpec(80, 77.5, 312, 2039, 300, 32),
    "H100": GPUSpec(80, 77.5, 989, 3350, 450, 64, has_grouped_mm=True, sdpa_is_cudnn=True),
    "H200": GPUSpec(141, 138, 989, 4800, 450, 64, has_grouped_mm=True, sdpa_is_cudnn=True),
    "B200": GPUSpec(180, 176, 2250, 7700, 900, 64, has_grouped_mm=True, sdpa_is_cudnn=True)}
# The fractions of these speeds that measure_machine() finds on H100s and H200s (LINK_FRACTION: on
# two H200s). Other GPUs were not available; the same fractions are assumed for them.
FLOPS_FRACTION, BANDWIDTH_FRACTION, LINK_FRACTION, HOST_FRACTION = 0.81, 0.85, 0.51, 0.78
HOST_GIB = 120  # free host memory per GPU, without --host_memory_gib


def parse_gpus(text: str) -> tuple[int, str, GPUSpec]:
    """Return the number of GPUs, their name and their GPUSpec from --plan_for, such as 4x4090; for
    2x24GB, the slowest GPU of that size. Raises ValueError."""
    match = re.fullmatch(r"(?:(\d+) ?x ?)?(.*)", text.strip().lower())
    count, name = match.groups() if match else (None, "")
    names = {key.lower().replace("-", ""): key for key in GPU_SPECS}
    # the first GPU of a size comes last and wins
    names |= {f"{gpu.size_gb}gb": key for key, gpu in reversed(GPU_SPECS.items())}
    key = names.get(re.sub(r"nvidia|geforce|rtx|[\s_-]", "", name))
    if not key or count and not 1 <= int(count) <= 1024:
        raise ValueError(f"--plan_for {text}: expected a number of GPUs and one of"
                         f" {', '.join(GPU_SPECS)}, such as 4x4090, or the memory of one of them,"
                         " such as 2x24GB. For other GPUs use one that is as fast, with their"
                         " memory by --memory_limit_gib")
    return int(count or 1), key, GPU_SPECS[key]


def gpu_machine(gpu: GPUSpec, host_gib: float = HOST_GIB) -> Machine:
    """Return the Machine that measure_machine() would find with this GPU, and with `host_gib` of
    free host memory per GPU."""
    return Machine(
        flops_per_second=rounded(FLOPS_FRACTION * 1e12 * gpu.tflops),
        memory_bandwidth=rounded(BANDWIDTH_FRACTION * 1e9 * gpu.bandwidth_gb_s),
        link_bandwidth=rounded(LINK_FRACTION * 1e9 * gpu.link_gb_s),
        host_copy_bandwidth=rounded(HOST_FRACTION * 1e9 * gpu.host_gb_s),
        free_host_bytes=int(host_gib * 2**30),
        why_no_grouped_mm=(
            "" if gpu.has_grouped_mm else "torch multiplies experts one by one on this GPU"))
