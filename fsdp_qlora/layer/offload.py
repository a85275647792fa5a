"""Pinned host memory, and asynchronous offloading of activations.

layer/layer.py puts and takes them; the Plan says of which layers.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.plan import Plan


PINNED: list[mmap.mmap] = []  # keeps registered memory alive: its pages must not be freed


def pinned_empty(n_bytes: int, device: torch.device) -> Tensor:
    """Return pinned host memory, uint8 [n_bytes], which stays allocated until the process ends;
    plain memory if `device` is a CPU.

    Torch's own pinned memory is rounded up to a power of 2. Raises MemoryError.
    """
    if device.type != "cuda" or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8)
    # registering needs whole pages; large pages take 0.2 s per GiB, small ones 0.4
    PINNED.append(mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    PINNED[-1].madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(PINNED[-1], dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0)
    if int(error):
        raise MemoryError(f"{n_bytes / 2**30:.2f} GiB of host memory cannot be pinned: {error}")
    return buffer


def pinned_copy(tensor: Tensor) -> Tensor:
    """Return a copy in pinned host memory; on a CPU, a plain copy."""
    host = pinned_empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


Take = Callable[[], Sequence[Tensor]]  # takes the tensors of a put() from the store, once


class DeviceActivations:
    """Store of the tensors that layers save for backward: they stay on the GPU."""

    def put(self, *tensors: Tensor) -> Take:
        return [tensors].pop  # does not keep them alive once they are taken


class OffloadedActivations:
    """Store of the tensors that layers save for backward, in pinned host memory. They are taken in
    the reverse order of put().

    Copies run on a stream of its own. At most `n_at_once` puts are on their way to the host: before
    one more, put() frees the GPU memory of the oldest. take() starts the way back of the
    `n_at_once` puts before its own. The last of a micro-batch's `n_puts` stays on the GPU, because
    its backward comes first.
    """

    def __init__(
        self, n_puts: int, n_at_once: int, micro_batch_tokens: int, device: torch.device
    ) -> None:
        self.n_puts, self.n_at_once = n_puts, n_at_once
        self.micro_batch_tokens, self.device = micro_batch_tokens, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        # {i: pinned uint8 buffer, large enough for the i-th put() of the longest micro-batch}
        self.buffers = {}
        # {i: (shape, dtype, bytes) of each tensor of this micro-batch's i-th put()}
        self.shapes = {}
        # [(tensors, event at the end of their copy)] of the latest puts, not yet freed on the GPU
        self.offloading = []
        self.on_device = {}  # {i: (tensors on the GPU, event to wait for or None)}
        self.next_put = 0  # number of the next put() of this micro-batch

    def copy(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> torch.cuda.Event | None:
        """Start to copy tensors on the stream. Returns an event at the end of the copies, None on a
        CPU."""
        if self.stream is None:
            for a, b in zip(to, source):
                a.copy_(b)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for a, b in zip(to, source):
                a.copy_(b, non_blocking=True)
            return self.stream.record_event()

    def release(self, n_kept: int = 0) -> None:
        """Free the GPU memory of what is copied to the host, but for the latest `n_kept` puts."""
        while len(self.offloading) > n_kept:
            _, event = self.offloading.pop(0)
            if event is not None:  # after this event the memory may be reused
                torch.cuda.current_stream().wait_event(event)

    def views(self, i: int) -> list[Tensor]:
        """Return the tensors of the i-th put() in host memory."""
        shapes, dtypes, sizes = zip(*self.shapes[i])
        parts = self.buffers[i][: sum(sizes)].split(sizes)
        return [part.view(dtype).view(shape) for part, dtype, shape in zip(parts, dtypes, shapes)]

    def put(self, *tensors: Tensor) -> Take:
        """Save tensors of all tokens of a micro-batch, the first one [tokens, ..]."""
        self.release(self.n_at_once - 1)
        i, self.next_put = self.next_put, (self.next_put + 1) % self.n_puts
        take = functools.partial(self.take, i)
        if i == self.n_puts - 1:
            self.on_device[i] = tensors, None
            return take
        self.shapes[i] = [(t.shape, t.dtype, t.nbytes) for t in tensors]
        token_bytes = sum(t.nbytes for t in tensors) // len(tensors[0])
        n_bytes = token_bytes * self.micro_batch_tokens  # for the longest micro-batch
        # a layer may save more of a later micro-batch, with another attention kernel
        if i not in self.buffers or len(self.buffers[i]) < n_bytes:
            self.buffers[i] = pinned_empty(n_bytes, self.device)
        self.offloading.append((tensors, self.copy(self.views(i), tensors)))
        return take

    def fetch(self, i: int) -> None:
        """Start to copy the tensors of the i-th put() back to the GPU."""
        tensors = [torch.empty(shape, dtype=dtype, device=self.device)
                   for shape, dtype, _ in self.shapes[i]]
        self.on_device[i] = tensors, self.copy(tensors, self.views(i))

    def take(self, i: int) -> Sequence[Tensor]:
        """Return the tensors of the i-th put(), once; start to fetch those of the `n_at_once`
        puts before it."""
        self.release()
        tensors, event = self.on_device.pop(i)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        for earlier in range(i - 1, max(i - self.n_at_once, 0) - 1, -1):
            if earlier not in self.on_device:
                self.fetch(earlier)
        return tensors


ActivationStore = DeviceActivations | OffloadedActivations


def put_saved(store: ActivationStore, saved: Any) -> Callable[[], Any]:
    """Put the tensors of a dataclass of tensors and None into a store. Returns a function that
    takes them from the store, as such a dataclass."""
    kind, names = type(saved), [name for name, value in vars(saved).items() if value is not None]
    take = store.put(*(getattr(saved, name) for name in names))
    return lambda: kind(**dict(zip(names, take())))  # must not keep the tensors alive


def make_store(plan: Plan, device: torch.device) -> ActivationStore:
    """Return the store of what recomputed layers save for backward: on the GPU or in host memory.
    """
    if not plan.offload_activations or not plan.n_recomputed:
        return DeviceActivations()
    n_puts = sum(plan.save_policy(i).n_puts for i in range(plan.n_layers))
    return OffloadedActivations(n_puts, plan.n_copied_at_once, plan.micro_batch_tokens, device)
