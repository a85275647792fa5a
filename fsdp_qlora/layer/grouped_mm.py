"""Grouped matmuls: rows, sorted by expert, each times its own expert's weight and adapter.

A token's row is there once for each of its experts, so that an expert's rows are consecutive and
each kind of matmul is one call. router.py sorts them, moe.py computes with them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.layer.call import LayerCall
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.lora_matmul import fp32_matmul
from fsdp_qlora.layer.router import Routing


@functools.lru_cache(None)
def cut_experts(
    gate_up: FusedLinear, down: FusedLinear, n_ranges: int
) -> list[tuple[range, FusedLinear, FusedLinear]]:
    """Cut the experts into ranges: [(range of experts, its part of gate_up, its part of down)]. The
    weights of a range are dequantized at once."""
    n = gate_up.n_experts
    ranges = []
    for i in range(n_ranges):
        experts = range(n * i // n_ranges, n * (i + 1) // n_ranges)
        parts = []
        for fused in (gate_up, down):
            each = len(fused.linears) // n
            parts.append(fused.subset(fused.linears[experts.start * each : experts.stop * each]))
        if experts:
            ranges.append((experts, parts[0], parts[1]))
    return ranges


class ExpertChunk:
    """Rows of a range of experts that are multiplied at once, and these experts' weights."""

    def __init__(
        self, experts: range, rows: slice, routing: Routing, gate_up: Tensor, down: Tensor
    ) -> None:
        self.experts, self.rows = experts, rows
        # [experts, out, input_width]; gate_up: all gates, then all ups, or interleaved, see
        # ClampedGLU
        self.gate_up, self.down = gate_up, down
        self.is_all = rows == slice(0, len(routing.routed_tokens))
        first, stop = rows.start, rows.stop
        # where each expert's rows end within the chunk; on the host too, if matmuls loop
        self.ends = routing.ends[experts.start : experts.stop].clamp(first, stop) - first
        self.bounds = None
        if why_no_grouped_mm(gate_up.dtype, gate_up.device):
            bounds = routing.bounds[experts.start : experts.stop + 1]
            self.bounds = [min(max(bound, first), stop) - first for bound in bounds]


def put_rows(whole: Tensor | None, rows: Tensor, chunk: ExpertChunk, n_rows: int) -> Tensor:
    """Write the rows of one chunk into `whole` [n_rows, width] and return it; `whole` is None
    before the first chunk. If one chunk has all rows, return `rows` itself."""
    if chunk.is_all:
        return rows
    whole = rows.new_empty(n_rows, rows.shape[1]) if whole is None else whole
    whole[chunk.rows] = rows
    return whole


@fused_kernel
def add_row_bias(rows: Tensor, bias: Tensor, expert: Tensor) -> None:
    """Add the bias of its expert to each of rows [n, width]; expert [n], bias [experts, width]."""
    rows.copy_(rows.float() + bias[expert])


@fused_kernel
def add_expert_rows(rows: Tensor, slots: Tensor, weights: Tensor | None) -> Tensor:
    """Return for each token the sum [n, width] of its rows, whose indices are `slots` [n, k], times
    weights [n, k] or None. Sums are in fp32 and in a fixed order, so that results are
    reproducible."""
    total: Tensor | Any = 0
    for i in range(slots.shape[1]):  # sum() would be a reduction: for 8 rows a fourth as fast
        picked = rows[slots[:, i]].float()
        total = total + (picked if weights is None else picked * weights[:, i, None])
    return total.to(rows.dtype)


def grouped_matmul(rows: Tensor, weights: Tensor, chunk: ExpertChunk) -> Tensor:
    """Return rows [m, in], each times its own expert's matrix in `weights` [experts, in, out]."""
    if chunk.bounds is None:
        return F.grouped_mm(rows, weights, offs=chunk.ends)
    out = rows.new_empty(len(rows), weights.shape[2])
    for weight, start, stop in zip(weights, chunk.bounds, chunk.bounds[1:]):
        if start < stop:
            torch.mm(rows[start:stop], weight, out=out[start:stop])
    return out


# ---- adapters of experts ----

# They are columns of the grouped matmuls, as in lora_matmul.py: rows [x, lora_hidden] times an
# expert's [W, B]. grouped_mm needs rows of whole 16 bytes, 8 values of bf16, so ranks must be
# multiples of 8.


def expert_a(call: LayerCall, fused: FusedLinear, chunk: ExpertChunk) -> Tensor:
    """Return A of a chunk's experts, [experts, lora_width, in], a view of the layer's adapter."""
    every = call.adapter[fused.lora_a].view(fused.n_experts, -1, fused.in_features)
    return every[chunk.experts.start : chunk.experts.stop]


def fill_expert_lora_hidden(
    call: LayerCall, fused: FusedLinear, inputs: Tensor, chunk: ExpertChunk
) -> None:
    """Write lora_hidden = s x A.T, with A of each row's expert, into the last columns of inputs
    [m, input_width]."""
    if fused.lora_width:
        lora_hidden = inputs[:, fused.in_features :]
        lora_hidden[:, fused.lora_width :] = 0
        a = expert_a(call, fused, chunk)
        x_a = grouped_matmul(inputs[:, : fused.in_features], a.transpose(1, 2), chunk)
        lora_hidden[:, : fused.lora_width] = x_a * call.layer_spec.scaling


def split_lora_gradient(
    call: LayerCall, fused: FusedLinear, grad_inputs: Tensor, chunk: ExpertChunk
) -> tuple[Tensor, Tensor | None]:
    """Split the gradient of [x, lora_hidden] [m, input_width]. Returns the gradients of x [m, in],
    which includes the part through lora_hidden, and of lora_hidden [m, lora_width]; None for the
    latter if the experts have no adapters."""
    if not fused.lora_width:
        return grad_inputs, None
    n_in = fused.in_features
    grad_x, grad_lora_hidden = grad_inputs[:, :n_in], grad_inputs[:, n_in : n_in + fused.lora_width]
    grad_lora_hidden = grad_lora_hidden.contiguous()
    from_lora = grouped_matmul(grad_lora_hidden, expert_a(call, fused, chunk), chunk)
    return torch.add(grad_x, from_lora, alpha=call.layer_spec.scaling), grad_lora_hidden


def add_expert_gradients(
    call: LayerCall, fused: FusedLinear, x: Tensor, grad_lora_hidden: Tensor, grad: Tensor,
    chunk: ExpertChunk
) -> None:
    """Add the gradients of A and B of a chunk's experts to call.grad_adapter, from x [m, in], the
    gradient of lora_hidden [m, lora_width] and the gradient of the outputs [m, out]. The caller
    must have multiplied a row's routing weight into x or into both gradients."""
    chunk_experts = slice(chunk.experts.start, chunk.experts.stop)
    n = fused.n_experts
    scaling = call.layer_spec.scaling
    lora_width = fused.lora_width
    grad_a = call.grad_adapter[fused.lora_a].view(n, lora_width, fused.in_features)[chunk_experts]
    grad_a.add_(grouped_outer(grad_lora_hidden, x, chunk), alpha=scaling)
    a = expert_a(call, fused, chunk)
    lora_hidden = grouped_matmul(x, a.transpose(1, 2), chunk) * scaling
    first, last = fused.linears[0].lora_b, fused.linears[-1].lora_b
    assert first and last, "all experts have adapters, or none"
    grad_b = call.grad_adapter[first.start : last.stop].view(n, -1, fused.lora_rank)[chunk_experts]
    offset = 0
    for linear in fused.linears[: len(fused.linears) // n]:  # linears of one expert
        stop = offset + linear.out_features
        grad_outputs = grad[:, offset:stop].contiguous()
        hidden = lora_hidden[:, linear.lora_columns].contiguous()
        grad_b[:, offset:stop] += grouped_outer(grad_outputs, hidden, chunk)
        offset = stop


def grouped_outer(a: Tensor, b: Tensor, chunk: ExpertChunk) -> Tensor:
    """Return a.T @ b of each expert's rows, a [m, p] and b [m, q]: fp32 [experts, p, q]."""
    if chunk.bounds is None:
        out = F.grouped_mm(a.t(), b, offs=chunk.ends).float()
        empty = chunk.ends == F.pad(chunk.ends, (1, 0))[:-1]
        return out.masked_fill_(empty[:, None, None], 0)  # garbage on Blackwell, pytorch 172439
    out = torch.zeros(len(chunk.experts), a.shape[1], b.shape[1], device=a.device)
    for i, (start, stop) in enumerate(zip(chunk.bounds, chunk.bounds[1:])):
        if start < stop:
            out[i] = fp32_matmul(a[start:stop].t(), b[start:stop])
    return out


def why_no_grouped_mm(dtype: torch.dtype, device: torch.device) -> str:
    """Return why torch's grouped matmul cannot be used, or "". On other GPUs torch itself loops
    over the experts and waits for the GPU at each matmul."""
    if device.type != "cuda":
        return "a CPU multiplies experts one by one"
    if dtype != torch.bfloat16:
        return "experts are multiplied one by one in fp32"
    if torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return "torch multiplies experts one by one on this GPU"
    return _why_no_kernel(device)


@functools.lru_cache(None)
def _why_no_kernel(device: torch.device) -> str:
    """Try torch's grouped matmul on three experts, one of them without rows."""
    generator = torch.Generator(device).manual_seed(0)
    rows, weights = (torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator)
                     for shape in ((48, 64), (3, 64, 128)))
    ends = torch.tensor([16, 16, 48], dtype=torch.int32, device=device)
    want = torch.cat([rows[:16] @ weights[0], rows[16:] @ weights[2]]).float()
    try:
        got = F.grouped_mm(rows, weights, offs=ends).float()
    except (AttributeError, RuntimeError) as e:
        return f"the grouped matmul fails: {type(e).__name__}: {str(e)[:200]}"
    close = bool((got - want).norm() < 0.01 * want.norm())
    return "" if close else "the grouped matmul is wrong on this GPU"
