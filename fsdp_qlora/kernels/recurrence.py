"""State recurrences of Gated DeltaNet and Mamba-2, in plain PyTorch and by
flash-linear-attention (fla-core).

No state goes from one document to the next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.kernels.attention import MAX_ERROR, recomputed
from fsdp_qlora.log import log
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import GatedDeltaNetSpec, Mamba2Spec
from fsdp_qlora.ranks import n_cores


RECURRENCE_CHUNK = 64  # tokens of a document that are computed at once; chunks pass on the state

# ---- the gated delta rule ----

# eager_delta_rule() and fla_delta_rule() take (query, key, value, g, beta, micro-batch), see
# GatedDeltaNetSpec, and return q S [n, value heads, value_dim]. Query and key are [n, key heads,
# key_dim], not normalized; value is [n, value heads, value_dim]; g, fp32, and beta are [n, value
# heads].


def eager_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, batch: MicroBatch,
    chunk: int = RECURRENCE_CHUNK
) -> Tensor:
    """The gated delta rule in plain torch, in fp32. Only the inputs are saved for backward."""
    return recomputed(chunked_delta_rule, query, key, value, g, beta, batch.lengths, chunk)


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, lengths: Sequence[int],
    chunk: int
) -> Tensor:
    """eager_delta_rule() for documents of these lengths.

    What a chunk's tokens add to the state depends on what the tokens before them have added. These
    equations are triangular. They are solved for values, which yields what is added to a state of
    0; and for keys, which yields what must be subtracted from that for a given state.
    """
    chunked, slots, firsts = chunks_of(lengths, chunk, value.device)
    dtype, n_heads, repeats = value.dtype, value.shape[1], value.shape[1] // key.shape[1]
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
                  for x in (query.float(), key.float()))  # one cast, else two gradients are rounded
    query = query * query.shape[-1] ** -0.5
    query, key = (chunked(x.repeat_interleave(repeats, 1)) for x in (query, key))
    value, g, beta = chunked(value), chunked(g[..., None]), chunked(beta[..., None])
    cum_decay = g.cumsum(2)  # log of the factor on the state before the chunk
    # above the diagonal exp() might overflow
    pairwise_decay = (cum_decay - cum_decay.transpose(2, 3)).tril()
    pairwise_decay = pairwise_decay.exp().tril()
    ut_system = ((beta * key) @ key.transpose(2, 3) * pairwise_decay).tril(-1)
    targets = torch.cat([value, key * cum_decay.exp()], -1) * beta
    solved = torch.linalg.solve_triangular(ut_system, targets, upper=False, unitriangular=True)
    new_values, k_cumdecay = solved.split([value.shape[-1], key.shape[-1]], -1)
    intra_chunk = query @ key.transpose(2, 3) * pairwise_decay
    decayed_query, decayed_key, chunk_decay = decayed_parts(query, key, cum_decay)
    del query, key
    outs = []
    for i, is_first in enumerate(firsts):
        if is_first:
            state = value.new_zeros(n_heads, decayed_key.shape[2], value.shape[3])
        v_new = new_values[i] - k_cumdecay[i] @ state
        outs.append(decayed_query[i] @ state + intra_chunk[i] @ v_new)
        state = state * chunk_decay[i] + decayed_key[i] @ v_new
    return torch.stack(outs).transpose(1, 2).flatten(0, 1)[slots].to(dtype)


def chunks_of(
    lengths: Sequence[int], chunk: int, device: torch.device
) -> tuple[Callable[[Tensor], Tensor], Tensor, list[bool]]:
    """Cut documents of these lengths into chunks. Returns a function of [n, heads, dim] that
    returns fp32 [chunks, heads, chunk, dim], with zeros at the end of each document's last chunk;
    the position of each token in all chunks [n]; and whether each chunk is the first of its
    document."""
    counts = [math.ceil(n / chunk) for n in lengths]
    firsts = [i == 0 for count in counts for i in range(count)]
    starts = itertools.accumulate(counts, initial=0)
    slots = torch.cat([chunk * start + torch.arange(n) for start, n in zip(starts, lengths)])
    slots = slots.to(device)

    def chunked(x: Tensor) -> Tensor:
        rows = x.new_zeros(sum(counts) * chunk, *x.shape[1:], dtype=torch.float32)
        return rows.index_copy(0, slots, x.float()).unflatten(0, (-1, chunk)).transpose(1, 2)

    return chunked, slots, firsts


def decayed_parts(query: Tensor, key: Tensor, cum_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries of the state before a chunk, the keys by which the chunk adds to the state
    after it, and the factor by which the chunk multiplies the state."""
    last = cum_decay[:, :, -1:]
    return query * cum_decay.exp(), (key * (last - cum_decay).exp()).transpose(2, 3), last.exp()


@functools.cache
def limit_fla_autotuning() -> None:
    """Make fla try fewer kernel configurations. For each of its kernels fla compiles all
    configurations that it knows, one after the other, to time them. With a few of them, compiled in
    threads and timed for less long, the first call takes 10 s instead of 88, and later calls are as
    fast (a layer of Qwen3.5-9B, 8,192 tokens, H100: 10.6 and 11.9 ms). Raises
    ModuleNotFoundError."""
    import fla.ops.gated_delta_rule
    import fla.ops.simple_gla  # noqa: F401
    from triton.runtime import Autotuner
    from triton.testing import do_bench

    for name in [name for name in sys.modules if name.startswith("fla.")]:
        for kernel in [*vars(sys.modules[name]).values()]:
            while kernel is not None:
                if isinstance(kernel, Autotuner):
                    usual = [x for x in kernel.configs if (x.num_warps, x.num_stages) == (4, 2)]
                    kernel.configs = usual or kernel.configs[:2]
                    kernel.prune_configs = functools.partial(
                        compile_in_threads, kernel, kernel.prune_configs)
                    kernel.do_bench = functools.partial(do_bench, warmup=5, rep=20)  # ms
                kernel = getattr(kernel, "fn", None)  # the function inside a Triton decorator


def compile_in_threads(
    kernel: Any, prune_configs: Callable[[dict[str, Any]], list[Any]],
    arguments: dict[str, Any]
) -> list[Any]:
    """Return the configurations that a Triton Autotuner is about to time, each compiled in a
    thread."""
    from triton import AsyncCompileMode

    configs = prune_configs(arguments)
    with ThreadPoolExecutor(n_cores()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            kernel.fn.run(*kernel.nargs.values(),
                          **{**arguments, **config.all_kwargs(), "warmup": True})
    return configs


def chunk_table(starts: Tensor, of_any_lengths: bool = False) -> Tensor:
    """Return (document, number of the chunk in it) for all chunks of the documents between
    `starts`, int32 [chunks, 2]. fla needs it because it would wait for the GPU to read the lengths
    there. With `of_any_lengths` the table is as long as this many documents of this many tokens can
    need; the spare chunks belong to the last document, which must be empty."""
    counts = (starts.diff() + RECURRENCE_CHUNK - 1) // RECURRENCE_CHUNK
    documents = torch.arange(len(counts)).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[documents]
    table = torch.stack([documents, torch.arange(len(documents)) - first], 1).int()
    if of_any_lengths:
        n_spare = int(starts[-1]) // RECURRENCE_CHUNK + len(counts) - len(table)
        table = torch.cat([table, table.new_tensor([len(counts) - 1, 0]).expand(n_spare, 2)])
    return table


def fla_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, batch: MicroBatch
) -> Tensor:
    """The gated delta rule by the Triton kernels of flash-linear-attention (fla-core), in bf16."""
    limit_fla_autotuning()
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    out, _ = chunk_gated_delta_rule(
        *(x[None] for x in (query, key, value, g, beta)), use_qk_l2norm_in_kernel=True,
        cu_seqlens=batch.cu_seqlens, chunk_indices=batch.recurrence_chunks)
    return out[0]


def eager_delta_rule_bytes(spec: GatedDeltaNetSpec) -> int:
    """Return the bytes per token that are alive at once in eager_delta_rule()'s backward: fp32
    values of each value head, measured to 2 % with heads of 128 and 128, 96 and 192; and twice the
    projected values."""
    key, value = spec.key_dim, spec.value_dim
    head_values = 13 * key + 11 * value + 8 * RECURRENCE_CHUNK + 2 * key * value // RECURRENCE_CHUNK
    return 4 * spec.n_value_heads * head_values + 8 * sum(spec.widths.values())


# ---- the scan of Mamba-2 ----


# eager_scan() and fla_scan() take (b, c, x, decay, dt, micro-batch), see Mamba2Spec, and return
# C S [n, heads, head_dim]. b and c are [n, groups, state], x is [n, heads, head_dim]; decay, the
# log of the factor on the state, and dt, both fp32, are [n, heads].


def eager_scan(
    b: Tensor, c: Tensor, x: Tensor, decay: Tensor, dt: Tensor, batch: MicroBatch,
    chunk: int = RECURRENCE_CHUNK
) -> Tensor:
    """Mamba-2's scan in plain torch, in fp32. Only the inputs are saved for backward."""
    return recomputed(chunked_scan, b, c, x, decay, dt, batch.lengths, chunk)


def chunked_scan(
    b: Tensor, c: Tensor, x: Tensor, decay: Tensor, dt: Tensor, lengths: Sequence[int], chunk: int
) -> Tensor:
    """eager_scan() for documents of these lengths. Within a chunk each token's C meets the B of
    all tokens before it, like queries and keys, times the decay in between; so the variables are
    named after these."""
    chunked, slots, firsts = chunks_of(lengths, chunk, x.device)
    n_heads, repeats, dtype = x.shape[1], x.shape[1] // b.shape[1], x.dtype
    query, key, value = chunked(c), chunked(b), chunked(x.float() * dt[..., None])
    cum_decay = chunked(decay[..., None]).cumsum(2)  # see chunked_delta_rule()
    # above the diagonal exp() might overflow
    pairwise_decay = (cum_decay - cum_decay.transpose(2, 3)).tril()
    pairwise_decay = pairwise_decay.exp().tril()
    intra_chunk = (query @ key.transpose(2, 3)).repeat_interleave(repeats, 1) * pairwise_decay
    query, key = (part.repeat_interleave(repeats, 1) for part in (query, key))
    decayed_query, decayed_key, chunk_decay = decayed_parts(query, key, cum_decay)
    del query, key
    outs = []
    for i, is_first in enumerate(firsts):
        if is_first:
            state = value.new_zeros(n_heads, decayed_key.shape[2], value.shape[3])
        outs.append(decayed_query[i] @ state)
        state = state * chunk_decay[i] + decayed_key[i] @ value[i]
    out = torch.stack(outs) + intra_chunk @ value
    return out.transpose(1, 2).flatten(0, 1)[slots].to(dtype)


def fla_scan(
    b: Tensor, c: Tensor, x: Tensor, decay: Tensor, dt: Tensor, batch: MicroBatch
) -> Tensor:
    """Mamba-2's scan by the Triton kernels of flash-linear-attention (fla-core), in bf16. It is
    attention with a decay per head, of queries C, keys B and values dt x."""
    limit_fla_autotuning()
    return FlaScan.apply(b, c, x, decay, dt, batch.cu_seqlens, batch.recurrence_chunks)


class FlaScan(torch.autograd.Function):
    """Autograd function of fla_scan(). fla needs B and C for each head, and saves them so: in
    Nemotron 3 Nano four times as much as everything else of a layer. This function saves them for
    each group."""

    @staticmethod
    def forward(
        ctx: Any, b: Tensor, c: Tensor, x: Tensor, decay: Tensor, dt: Tensor, bounds: Tensor,
        chunks: Tensor
    ) -> Tensor:
        from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

        inputs = b, c, x, decay, dt, bounds, chunks
        ctx.save_for_backward(*inputs)
        out, _ = chunk_simple_gla_fwd(**FlaScan._arguments(*inputs))
        return out[0].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from fla.ops.simple_gla.chunk import chunk_simple_gla_bwd
        from fla.ops.utils import chunk_local_cumsum

        arguments = FlaScan._arguments(*ctx.saved_tensors)
        b, c, x, decay, dt, bounds, chunks = ctx.saved_tensors
        dc, db, dv, dg, _ = chunk_simple_gla_bwd(
            **arguments, g_gamma=None, initial_state=None, do=grad[None].contiguous(), dht=None)
        dg = chunk_local_cumsum(
            dg, chunk_size=RECURRENCE_CHUNK, reverse=True, cu_seqlens=bounds, chunk_indices=chunks)
        db, dc = (part[0].unflatten(1, (b.shape[1], -1)).sum(2, dtype=torch.float32).to(b.dtype)
                  for part in (db, dc))
        dv = dv[0].float()
        return (db, dc, (dv * dt[..., None]).to(x.dtype), dg[0].to(decay.dtype),
                (dv * x).sum(-1), None, None)

    @staticmethod
    def _arguments(
        b: Tensor, c: Tensor, x: Tensor, decay: Tensor, dt: Tensor, bounds: Tensor, chunks: Tensor
    ) -> dict[str, Any]:
        """Return the arguments of fla's functions, whose tensors begin with a dimension of 1."""
        from fla.ops.utils import chunk_local_cumsum
        from fla.ops.utils.constant import RCP_LN2

        where = dict(cu_seqlens=bounds, chunk_size=RECURRENCE_CHUNK, chunk_indices=chunks)
        by_head = [part.repeat_interleave(x.shape[1] // b.shape[1], 1)[None] for part in (c, b)]
        value = (x * dt[..., None]).to(x.dtype)[None]
        total = chunk_local_cumsum(decay[None], scale=RCP_LN2, **where)  # fla's kernels use exp2()
        return dict(q=by_head[0], k=by_head[1], v=value, g=total, scale=1.0, **where)


def eager_scan_bytes(spec: Mamba2Spec) -> int:
    """Return the bytes per token that are alive at once in eager_scan()'s backward: fp32 values
    of each head, measured to 6 % with states of 128 and 256; and twice the projected values."""
    head_values = 8 * spec.state_size + 8 * spec.head_dim + 6 * RECURRENCE_CHUNK
    return 4 * spec.n_heads * head_values + 8 * sum(spec.widths.values())


# ---- which of them is used ----


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The functions of one kind of mixer with a state, see above."""

    # in the log: the recurrence, and `eager` as a kernel
    name: str
    eager_name: str
    eager: Callable[..., Tensor]  # in plain torch
    fla: Callable[..., Tensor]  # by flash-linear-attention's kernels
    eager_bytes_per_token: Callable[[Any], int]  # mixer -> alive at once in eager's backward


RECURRENCES: dict[type, Recurrence] = {  # by kind of mixer
    GatedDeltaNetSpec: Recurrence(
        "Gated DeltaNet", "delta rule in plain PyTorch",
        eager_delta_rule, fla_delta_rule, eager_delta_rule_bytes),
    Mamba2Spec: Recurrence(
        "Mamba-2", "Mamba-2 in plain PyTorch", eager_scan, fla_scan, eager_scan_bytes)}


def recurrent_mixer_spec(arch: Architecture) -> GatedDeltaNetSpec | Mamba2Spec | None:
    """Return the mixer of a model's layers that has a state, one of RECURRENCES, or None."""
    specs = arch.other_mixers.values()
    return next((x for x in specs if isinstance(x, (GatedDeltaNetSpec, Mamba2Spec))), None)


def why_no_fla(spec: GatedDeltaNetSpec | Mamba2Spec, device: torch.device) -> str:
    """Return why flash-linear-attention cannot be used; "" if its results match plain torch's,
    forward and backward, for two documents."""
    recurrence = RECURRENCES[type(spec)]
    length = 3 * RECURRENCE_CHUNK // 2
    generator = torch.Generator(device).manual_seed(0)
    n = 2 * length
    if isinstance(spec, GatedDeltaNetSpec):
        shapes = (spec.n_key_heads, spec.key_dim), (spec.n_value_heads, spec.value_dim)
    else:
        shapes = (spec.n_groups, spec.state_size), (spec.n_heads, spec.head_dim)
    settings: dict[str, Any] = dict(dtype=torch.bfloat16, device=device, generator=generator)
    first, second, third, grad = (torch.randn(n, *shapes[i], **settings) for i in (0, 0, 1, 1))
    decay, factor = (torch.rand(n, shapes[1][0], **settings) for _ in range(2))
    factor = factor if isinstance(spec, GatedDeltaNetSpec) else factor.float()
    bounds = torch.tensor([0, length, n], dtype=torch.int32)
    trial: Any = types.SimpleNamespace(
        lengths=(length, length), cu_seqlens=bounds.to(device),
        recurrence_chunks=chunk_table(bounds).to(device))

    def both(function: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        inputs = [t.detach().requires_grad_() for t in (
            first, second, third, -decay.float(), factor)]
        out = function(*inputs, trial)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    try:
        pairs = list(zip(both(recurrence.fla), both(recurrence.eager)))
    except ModuleNotFoundError as e:
        return f"{e.name} is not installed"
    except Exception as e:  # Triton's and fla's errors have no common class
        return f"{type(e).__name__}: {str(e).strip().splitlines()[0]}"
    worst = max(float((got - want).norm() / want.norm()) for got, want in pairs)
    return "" if worst < MAX_ERROR else f"its result is {100 * worst:.0f} % off here"


def choose_recurrence(
    arch: Architecture, compute_dtype: str, device: torch.device
) -> Callable[..., Tensor] | None:
    """Return the function that computes the model's Gated DeltaNet or Mamba-2, None if it has
    neither. On a GPU it is flash-linear-attention's, if its results match plain torch's."""
    spec = recurrent_mixer_spec(arch)
    if spec is None:
        return None
    recurrence = RECURRENCES[type(spec)]
    if device.type != "cuda" or compute_dtype != "bfloat16":
        return recurrence.eager
    if why := why_no_fla(spec, device):
        log(f"warning: slow path for {recurrence.name}: plain PyTorch instead of"
            f" flash-linear-attention ({why}). Try: pip install fla-core einops")
        return recurrence.eager
    return recurrence.fla
