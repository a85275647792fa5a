"""Read safetensors files: headers, read-ahead, this rank's rows, random weights.

tensor_names.py says which tensors there must be, model/shards.py which rows this rank asks for.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from fsdp_qlora.files import read_json
from fsdp_qlora.ranks import all_gather_objects

N_READ_THREADS = 8  # per rank, that read weights; each copies about 5 GB/s from the page cache
READ_CHUNK = 2**24  # bytes that a thread reads at once
READ_AHEAD = 2**29  # bytes read but not yet quantized, so that reading and quantizing overlap
RANDOM_STD = 0.02  # standard deviation of --random_weights
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn, "I32": torch.int32}


class StoredTensor(NamedTuple):
    """The location of a tensor in a file."""

    path: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # the tensor is the bytes [start, stop) of the file
    stop: int


class ReadRequest(NamedTuple):
    """The part of a tensor that a rank reads."""

    name: str
    shape: tuple[int, ...]
    rows: range  # in the first dimension of `shape`; shape (1,) and range(1): the whole tensor
    source: StackedSlice | None = None  # None: the files have a tensor of this name


@dataclasses.dataclass(frozen=True)
class StackedSlice:
    """The place of a tensor that is some rows of a larger one, in the base's files or in a merged
    model: a linear of an expert; q_proj, k_proj or v_proj, or its bias; or a convolution of q, k or
    v."""

    name: str  # name of the larger tensor
    n_rows: int  # rows of the larger tensor as a matrix
    rows: range  # those of this tensor
    columns: range | None = None  # transposed: rows are its inputs, these columns its outputs

    def weight_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view [out, in] of the linear in the larger tensor."""
        return self.weight_in_rows(tensor.view(self.n_rows, -1)[self.rows.start : self.rows.stop])

    def weight_in_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the view [out, in] of the linear in `rows` of the larger tensor."""
        return rows.t()[self.columns.start : self.columns.stop] if self.columns else rows

    def stored_rows(self, stored: StoredTensor) -> StoredTensor:
        """Return the location of `rows`, as a matrix, in the files' larger tensor."""
        row_bytes = (stored.stop - stored.start) // self.n_rows
        start, stop = (stored.start + row * row_bytes for row in (self.rows.start, self.rows.stop))
        shape = len(self.rows), math.prod(stored.shape) // self.n_rows
        return stored._replace(shape=shape, start=start, stop=stop)

    def rows_with(self, outputs: range) -> range:
        """Return the part of `rows` that contains a range of the linear's outputs; if transposed,
        all rows."""
        if self.columns:
            return self.rows if outputs else range(0)
        return self.rows[outputs.start : outputs.stop]


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of all tensors in a directory's safetensors. Raises
    ValueError."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():  # takes precedence over an index, as in transformers
        return read_header(whole)
    if not index.is_file():
        raise ValueError(f"{directory}: has neither {index.name} nor {whole.name}; only"
                         " safetensors are read")
    names = read_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    for file in set(names.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: names {file!r}, a path outside the directory")
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file}: missing, but named in {index.name}")
    found = {file: read_header(directory / file) for file in set(names.values())}
    for name, file in names.items():
        if name not in found[file]:
            raise ValueError(f"{directory / file}: lacks {name}, which the index puts there")
    return {name: found[file][name] for name, file in names.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Return {name: StoredTensor} of a safetensors file, from its header. Raises ValueError."""
    try:
        with safe_open(path, "pt"):
            pass  # opening it checks that it is complete
    except SafetensorError as e:
        raise ValueError(f"{path}: an incomplete or corrupt safetensors file: {e}")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: StoredTensor(path, tensor["dtype"], tuple(tensor["shape"]),
                               *(8 + size + offset for offset in tensor["data_offsets"]))
            for name, tensor in header.items()}


def read_tensor(
    stored: StoredTensor, name: str, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return one tensor. The file is opened for each, because mapped pages would add up."""
    if stored.dtype in DTYPES:
        # safetensors would parse the header again: 27 ms for a file with 24,000 tensors (a CPU)
        tensor = torch.empty(stored.stop - stored.start, dtype=torch.uint8)
        read_chunk(stored.path, stored.start, tensor)
        return tensor.view(DTYPES[stored.dtype]).view(stored.shape).to(device)
    with safe_open(stored.path, "pt") as tensors:
        return tensors.get_tensor(name).to(device)


def all_finite(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return whether all values from a file are finite, as a tensor. Always true for bytes, except
    for the scales of MXFP4, where 255 is NaN."""
    if values.dtype in FLOATS.values():
        return values.sum(dtype=torch.float32).isfinite()  # unlike all(), makes no copy
    if values.dtype == torch.float8_e4m3fn:
        return (values.view(torch.uint8) & 127 != 127).all()
    if name.endswith("_scales"):
        return (values != 255).all()
    return values.new_ones((), dtype=torch.bool)


def rows_of_earlier_ranks(requests: Sequence[ReadRequest]) -> dict[str, int]:
    """Return {tensor's name: number of its first rows that are read by ranks before this one};
    several ranks may read the same row. All ranks must call this."""
    stops = all_gather_objects({request.name: request.rows.stop for request in requests})
    before = stops[: dist.get_rank()]
    return {name: max((stop[name] for stop in before), default=0) for name in stops[0]}


def read_chunk(
    path: Path, start: int, target: torch.Tensor, staging: threading.local | None = None,
) -> None:
    """Read bytes from `start` of a file into `target`, a slice of a uint8 tensor. If `target` is on
    a GPU, they are read into the thread's pinned `staging.buffer` first."""
    buffer = getattr(staging, "buffer", target)[: target.numel()]
    view, done = buffer.numpy().data, 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while n := file.readinto(view[done:]):
                done += n
    except OSError as e:
        raise OSError(f"{path}: cannot be read at byte {start + done}: {e.strerror}")
    if done < len(view):
        raise OSError(f"{path}: ends before byte {start + len(view)}: cut off since the start?")
    if target.is_cuda:
        # on the stream on which `target` is used; blocks, so that the buffer can be reused
        target.copy_(buffer)


class WeightReader:
    """Reader of the requested tensors, ahead of their use.

    Threads read at most READ_AHEAD bytes ahead in the order of the requests, by plain reads: a
    mapping is read one page fault at a time, and its pages count as this process's memory. After a
    failed read nothing more is read. The tensors are then zeros, so that no rank waits in a
    collective for this one, and close() raises the error.
    """

    def __init__(
        self, stored: Mapping[str, StoredTensor], requests: Sequence[ReadRequest],
        device: torch.device,
    ) -> None:
        self.stored, self.device, self.waiting = stored, device, collections.deque(requests)
        # {name: (tensor, futures of its chunks, request)}
        self.ahead: dict[str, tuple[torch.Tensor, list[Future[None]], ReadRequest]] = {}
        self.staging = threading.local()
        self.errors: list[BaseException] = []
        self.pool = ThreadPoolExecutor(N_READ_THREADS, initializer=self._prepare_thread)

    def _prepare_thread(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.staging.buffer = torch.empty(READ_CHUNK, dtype=torch.uint8, pin_memory=True)

    def _extent(self, request: ReadRequest) -> tuple[StoredTensor, int, int]:
        """Return the StoredTensor that contains the rows of a request, the byte of its file
        at which they begin, and their number of bytes."""
        name, n_rows, rows = request.name, request.shape[0], request.rows
        if source := request.source:
            name, n_rows, rows = source.name, source.n_rows, source.rows_with(rows)
        stored = self.stored[name]
        row_bytes = (stored.stop - stored.start) // n_rows
        return stored, stored.start + rows.start * row_bytes, len(rows) * row_bytes

    def _begin_next(self) -> None:
        request = self.waiting.popleft()
        stored, start, size = self._extent(request)
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        offsets = range(0, 0 if self.errors else size, READ_CHUNK)
        chunks = [self.pool.submit(read_chunk, stored.path, start + i, target[i : i + READ_CHUNK],
                                   self.staging) for i in offsets]
        self.ahead[request.name] = target.view(DTYPES[stored.dtype]), chunks, request

    def read(self, name: str) -> torch.Tensor:
        """Return the requested rows of a tensor, flat, on the device. Names may come in any order,
        each once."""
        while name not in self.ahead:
            self._begin_next()
        tensor, chunks, request = self.ahead.pop(name)
        while self.waiting:
            size = self._extent(self.waiting[0])[2]
            n_bytes = sum(tensor.nbytes for tensor, *_ in self.ahead.values())
            if self.ahead and n_bytes + size > READ_AHEAD:
                break
            self._begin_next()
        self.errors.extend(error for chunk in chunks if (error := chunk.exception()))
        tensor = tensor.zero_() if self.errors else tensor
        if request.rows and (source := request.source) and source.columns:
            weight = source.weight_in_rows(tensor.view(len(source.rows), -1))
            tensor = weight[request.rows.start : request.rows.stop].flatten()
        return tensor

    def close(self) -> None:
        """Stop reading, and raise the first error of a read."""
        self.pool.shutdown()
        if self.errors:
            raise self.errors[0]


def rows_in_memory(
    tensors: Mapping[str, torch.Tensor], sources: Mapping[str, StackedSlice], name: str,
) -> torch.Tensor:
    """Return all rows of a tensor in `tensors`, flat, as a WeightReader would read them from files;
    `sources`: see TensorNames."""
    source = sources.get(name)
    return (source.weight_in(tensors[source.name]) if source else tensors[name]).flatten()


class RandomWeights:
    """Replacement of WeightReader for --random_weights: values depend on the name, not on the rank.
    """

    def __init__(
        self, requests: Sequence[ReadRequest], seed: int, dtype: torch.dtype, device: torch.device,
    ) -> None:
        self.requests = {request.name: request for request in requests}
        self.seed, self.dtype, self.device = seed, dtype, device

    def read(self, name: str) -> torch.Tensor:
        _, shape, rows, _ = self.requests[name]
        if "norm" in name or name.endswith(("bias", "scale", "scalar")):
            value = float(not name.endswith("bias"))  # norms and Gemma 4's factors start at 1
            return torch.full((math.prod(shape),), value, dtype=self.dtype, device=self.device)
        seed = self.seed ^ zlib.crc32(name.encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        in_mxfp4 = {"blocks": (0, 256), "scales": (118, 121)}.get(name.rpartition("_")[2])
        if in_mxfp4:  # bytes
            whole = torch.empty(shape, dtype=torch.uint8, device=self.device)
            whole.random_(*in_mxfp4, generator=generator)
        else:
            whole = torch.empty(shape, dtype=self.dtype, device=self.device)
            whole.normal_(0, RANDOM_STD, generator=generator)
        part = whole[rows.start : rows.stop].flatten()
        return part if len(rows) == len(whole) else part.clone()  # so that `whole` is freed

    def close(self) -> None:
        pass
