"""Host memory that the GPU copies from and to without waiting, and where layers keep activations.

Stands on torch alone. What is kept of a layer is decided in plan, when it is read in layer.
"""

import mmap

import torch

PINNED = []  # holds what is registered: its pages must not go back to the system


def pinned_empty(n_bytes, device):
    """Pinned host memory, uint8 [n_bytes], held until the process ends. On a CPU: plain memory.

    Torch's own pinned memory is rounded up to a power of 2. Raises MemoryError."""
    if device.type != "cuda" or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8)
    # registering wants whole pages; large ones take 0.2 s a GiB, small ones 0.4
    PINNED.append(mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    PINNED[-1].madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(PINNED[-1], dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0)
    if int(error):
        raise MemoryError(f"{n_bytes / 2**30:.2f} GiB of host memory cannot be pinned: {error}")
    return buffer


def pinned_copy(tensor):
    """A copy in pinned host memory; on a CPU just a copy."""
    host = pinned_empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


class GPUStore:
    """Where layers keep tensors from forward to backward: here they stay on the GPU."""

    put = take = staticmethod(lambda tensor: tensor)


class HostStore:
    """A store in pinned host memory; take() is called in the reverse order of put().

    Its own stream copies, and fetches one tensor ahead. put() frees the GPU memory of the tensor
    before, whose copy has ended by then: at most three are on the GPU. The last of `n_kept` stays
    there, because its backward comes first.
    """

    def __init__(self, n_kept, n_bytes, device):
        self.n_kept, self.n_bytes, self.device = n_kept, n_bytes, device
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self.buffers, self.shapes, self.leaving, self.here = {}, {}, [], {}
        self.next = 0  # number of the next tensor of this bin

    def copy(self, to, source):
        """Start a copy on the stream; returns the event of its end, None on a CPU."""
        if self.stream is None:
            to.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def let_go(self):
        while self.leaving:
            _, event = self.leaving.pop()
            if event is not None:  # from here on the memory may be used for something else
                torch.cuda.current_stream().wait_event(event)

    def view(self, i):
        shape, dtype = self.shapes[i]
        return self.buffers[i].view(dtype)[: shape.numel()].view(shape)

    def put(self, tensor):
        """Returns the key for take()."""
        self.let_go()
        i, self.next = self.next, (self.next + 1) % self.n_kept
        if i == self.n_kept - 1:
            self.here[i] = tensor, None
            return i
        if i not in self.buffers:
            self.buffers[i] = pinned_empty(self.n_bytes, self.device)
        self.shapes[i] = tensor.shape, tensor.dtype
        self.leaving.append((tensor, self.copy(self.view(i), tensor)))
        return i

    def fetch(self, i):
        tensor = torch.empty(self.shapes[i][0], dtype=self.shapes[i][1], device=self.device)
        self.here[i] = tensor, self.copy(tensor, self.view(i))

    def take(self, i):
        self.let_go()
        tensor, event = self.here.pop(i)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if i > 0:
            self.fetch(i - 1)
        return tensor


def make_store(plan, arch, device):
    """Where layers keep their inputs: on the GPU or in host memory."""
    if not plan.offload_activations or not plan.recomputed:
        return GPUStore()
    n_bytes = plan.bin_tokens * arch.hidden_size * getattr(torch, plan.compute_dtype).itemsize
    return HostStore(plan.recomputed * (2 if plan.keep_middle else 1), n_bytes, device)
