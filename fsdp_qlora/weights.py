"""The base model's safetensors: what they hold, whether it is all there, and how it is read.

Stands on files, elementwise and on nf4's constants. Reading gives a tensor by its name; which rows
this rank asks for is in model, what is done with them, quantising too, in the script.
"""

import collections
import dataclasses
import json
import math
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from fsdp_qlora.elementwise import mix
from fsdp_qlora.files import read_json
from fsdp_qlora.nf4 import BLOCK, NESTED_BLOCK, dynamic_map, nf4_code
from fsdp_qlora.ranks import gather_objects, say

READERS = 8  # threads of a rank that read weights; one copies some 5 GB/s out of the page cache
READ_CHUNK = 2**24  # bytes that a thread reads at once
READ_AHEAD = 2**29  # bytes read but not yet quantised, so that reading and quantising overlap
OTHER_BASE = ("are not those of the base model trained on: name that by --base_model;"
              " --allow_other_base merges into this one")
SUM_CHUNK = {"cpu": 2**18, "cuda": 2**23}  # values that content_sum() takes at once: what a CPU's
#                                            cache holds (2**22 took 20 times longer)
RANDOM_STD = 0.02  # of --random_weights
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "U8": torch.uint8}
NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, behind that of the weight
NF4_PARTS = "absmax", "nested_absmax", "nested_quant_map", "quant_map", NF4_STATE  # all of them
Stored = collections.namedtuple("Stored", "path dtype shape start stop")  # bytes [start, stop)
# `rows`: a range of the first dimension of `shape`; with shape (1,) and range(1) all of the tensor
Request = collections.namedtuple("Request", "name shape rows")


def weight_files(directory):
    """Where the directory's safetensors hold each tensor: {name: Stored}. Raises ValueError."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if not index.is_file():
        if not whole.is_file():
            raise ValueError(f"{directory}: has neither {index.name} nor {whole.name}; only"
                             " safetensors are read")
        return tensors_of(whole)
    names = read_json(index).get("weight_map")
    if not names or not isinstance(names, dict):
        raise ValueError(f"{index}: has no weight_map from tensors to files")
    for file in set(names.values()):
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: names {file!r}, a path outside the directory")
        if not (directory / file).is_file():
            raise ValueError(f"{directory / file}: missing, but named in {index.name}")
    found = {file: tensors_of(directory / file) for file in set(names.values())}
    for name, file in names.items():
        if name not in found[file]:
            raise ValueError(f"{directory / file}: lacks {name}, which the index puts there")
    return {name: found[file][name] for name, file in names.items()}


def tensors_of(path):
    """What a safetensors file holds by its header: {name: Stored}. Raises ValueError."""
    try:
        with safe_open(path, "pt"):
            pass  # it is whole
    except SafetensorError as e:
        raise ValueError(f"{path}: not a whole safetensors file: {e}")
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    return {name: Stored(path, tensor["dtype"], tuple(tensor["shape"]),
                         *(8 + size + offset for offset in tensor["data_offsets"]))
            for name, tensor in header.items()}


def read_tensor(path, name, device="cpu", content=None):
    """One whole tensor. Raises ValueError if it has not this `content`, content_sum() as hex. The
    file is opened for each: mapped pages would add up."""
    with safe_open(path, "pt") as tensors:
        tensor = tensors.get_tensor(name).to(device)
    if content and content != as_hex(content_sum(tensor).item()):
        raise ValueError(f"{path}: the values of {name} {OTHER_BASE}")
    return tensor


def as_hex(sum):
    return f"{sum % 2**64:016x}"


def content_sum(values, rows=range(1), n_before=0):
    """An int64, on the device of `values`, that tells a tensor's content from any other: the sum of
    all values, as integers, each times a hash of its place, modulo 2^64.

    The sums of a tensor's parts add up to that of the whole: `values` are the rows `rows` of it;
    those below `n_before` are not counted.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[values.itemsize]
    width, first = values.numel() // max(1, len(rows)), max(rows.start, n_before)
    own = values.contiguous().view(-1).view(bits)[(first - rows.start) * width :]
    total, place = torch.zeros((), dtype=torch.int64, device=own.device), first * width
    for chunk in own.split(SUM_CHUNK[own.device.type]):
        total += (mix(torch.arange(place, place + len(chunk), device=own.device)) * chunk).sum()
        place += len(chunk)
    return total


def rows_before(requests):
    """{tensor's name: how many of its rows the ranks before this one read}; several ranks may read
    one row. All ranks must call this."""
    stops = gather_objects({request.name: request.rows.stop for request in requests})
    before = stops[: dist.get_rank()]
    return {name: max((stop[name] for stop in before), default=0) for name in stops[0]}


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """What a checkpoint calls the tensors that are read."""

    shapes: dict  # {name: shape} of all of them
    linears: dict  # {name: Linear} of those that are in 4 bits here
    embedding: str
    norm: str
    norm_bias: str | None
    head: str
    layer_prefix: str

    def of_layer(self, index, name):
        """The name in files of what is called `name` in layer `index`."""
        return f"{self.layer_prefix}{index}.{name}"


def tensor_names(arch, files):
    """The TensorNames of a model; `files` {name: ..} tells which spelling a checkpoint has."""
    stems = arch.checkpoint_prefixes
    stem = next((s for s in stems if f"{s}embed_tokens.weight" in files), stems[0])
    head = next((name for name in arch.head_names if name in files), arch.head_names[0])
    embedding, norm = f"{stem}embed_tokens.weight", f"{stem}norm.weight"
    norm_bias = f"{stem}norm.bias" if arch.norm_bias else None
    table = arch.vocab_size, arch.hidden_size
    names = TensorNames({embedding: table}, {}, embedding, norm, norm_bias, head,
                        f"{stem}layers.")
    for i in range(arch.n_layers):
        for linear in arch.linears:
            name = names.of_layer(i, f"{linear.name}.weight")
            names.linears[name] = linear
            names.shapes[name] = linear.out_features, linear.in_features
        for key, shape in arch.vectors.items():
            names.shapes[names.of_layer(i, key)] = shape
    for name in filter(None, (norm, norm_bias)):
        names.shapes[name] = (arch.hidden_size,)
    if not arch.tied:
        names.shapes[head] = table
    return names


def check_files(files, names, model_config, compute_dtype):
    """Check a checkpoint's tensors before they are read. Returns {} or, for a model that is
    quantised already, {weight's name: what bitsandbytes has stored of it}. Raises ValueError."""
    wanted = {name: (shape, FLOATS) for name, shape in names.shapes.items()}
    if not getattr(model_config, "quantization_config", None):
        check_tensors(files, names, wanted)
        return {}
    states = check_prequantised(files, names, wanted)
    dtypes = sorted({state["dtype"] for state in states.values()})
    say(f"model: quantised already, loaded as it is: {len(states)} linears in NF4")
    if dtypes != [compute_dtype]:
        say(f"they were quantised from {', '.join(dtypes)}, to which bitsandbytes dequantises them;"
            f" here they are dequantised to {compute_dtype}, so that some weights differ by its"
            " rounding")
    return states


def check_tensors(files, names, wanted):
    """Raise ValueError unless the files have the tensors `wanted`, {name: (shape or None, dtypes)},
    and in layers no others."""
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(wanted)} tensors that its"
                         f" config.json asks for, the first is {missing[0]}")
    extra = [name for name in files if name.startswith(names.layer_prefix) and name not in wanted
             and not name.endswith("inv_freq")]
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config.json knows"
                         f" nothing of, the first is {extra[0]}")
    for name, (shape, dtypes) in wanted.items():
        path, dtype, found, *_ = files[name]
        if shape not in (None, found):
            raise ValueError(f"{path.name}: {name} has shape {list(found)}, but config.json asks"
                             f" for {list(shape)}")
        if dtype not in dtypes:
            hint = ": without double quantisation?" if name.endswith("absmax") else ""
            raise ValueError(f"{path.name}: {name} is {dtype}, which is not read;"
                             f" {', '.join(dtypes)} are{hint}")
    is_tied = names.head not in wanted
    if is_tied and names.head in files and not same_bytes(files[names.head],
                                                          files[names.embedding]):
        raise ValueError(f"config.json has tie_word_embeddings true, but the checkpoint's"
                         f" {names.head} is not its {names.embedding}: transformers then uses both;"
                         " set tie_word_embeddings to false there")


def same_bytes(one, other):
    """Whether two Stored tensors are the same, read a chunk at a time."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.path.open("rb") as a, other.path.open("rb") as b:
        a.seek(one.start), b.seek(other.start)
        sizes = (min(READ_CHUNK, one.stop - at) for at in range(one.start, one.stop, READ_CHUNK))
        return all(a.read(size) == b.read(size) for size in sizes)


def check_prequantised(files, names, wanted):
    """check_tensors() where bitsandbytes has quantised the linears, which must be as it is done
    here. Returns {weight's name: the JSON object that it has stored}."""
    other = [name for name in names.linears if f"{name}.{NF4_STATE}" not in files]
    if other:
        raise ValueError(f"config.json says that the model is in 4-bit NF4, but {len(other)} of its"
                         f" layers' {len(names.linears)} linears are not, the first is {other[0]}:"
                         " name the original model")
    for name in files:
        if name.endswith(".absmax") and name.removesuffix(".absmax") not in names.linears:
            raise ValueError(f"{name}: only linears of decoder layers can be in 4-bit: name the"
                             " original model")
    for name in names.linears:
        n_blocks = math.ceil(math.prod(names.shapes[name]) / BLOCK)
        wanted[name] = None, DTYPES  # packed, in integers or floats of any size
        wanted[f"{name}.absmax"] = (n_blocks,), ["U8"]
        wanted[f"{name}.nested_absmax"] = (math.ceil(n_blocks / NESTED_BLOCK),), ["F32"]
        wanted[f"{name}.quant_map"] = (16,), ["F32"]
        wanted[f"{name}.nested_quant_map"] = (256,), ["F32"]
        wanted[f"{name}.{NF4_STATE}"] = None, ["U8"]
    check_tensors(files, names, wanted)
    parts = NF4_STATE, "quant_map", "nested_quant_map"
    requests = [Request(f"{name}.{part}", (1,), range(1)) for name in names.linears
                for part in parts]
    reader = WeightReader(files, requests, torch.device("cpu"))
    states = {name: _read_state(name, files[name], names.shapes[name], reader.read)
              for name in names.linears}
    reader.close()
    return states


def _read_state(name, stored, shape, read):
    """What bitsandbytes has stored of one weight: a JSON object, checked."""
    try:
        state = {**json.loads(bytes(read(f"{name}.{NF4_STATE}").tolist()))}
    except (ValueError, TypeError) as e:
        raise ValueError(f"{stored.path}: {name}.{NF4_STATE} is not JSON, or no object: {e}")
    for key, kind in {"dtype": str, "nested_offset": float}.items():
        if not isinstance(state.get(key), kind):
            raise ValueError(f"{stored.path}: {name}.{NF4_STATE} has {key} {state.get(key)}")
    want = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shape),
            "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
    for key, value in want.items():
        if state.get(key) != value:
            raise ValueError(f"{stored.path}: {name} was quantised with {key} {state.get(key)},"
                             f" only {value} can be read")
    n_bytes = stored.stop - stored.start
    if n_bytes != math.prod(shape) // 2:
        raise ValueError(f"{stored.path}: {name} has {n_bytes} bytes, but {list(shape)} weights of"
                         " 4 bits are asked for")
    cpu = torch.device("cpu")
    for part, table in {"quant_map": nf4_code(cpu), "nested_quant_map": dynamic_map(cpu)}.items():
        # another version of the library may have stored other last bits
        if not torch.allclose(read(f"{name}.{part}"), table):
            raise ValueError(f"{stored.path}: {name}.{part} is not the code of bitsandbytes' NF4")
    return state


def read_chunk(path, start, target, staging):
    """Read bytes from `start` of a file into `target`, a slice of a uint8 tensor."""
    buffer = getattr(staging, "buffer", target)[: target.numel()]
    view, done = memoryview(buffer.numpy()), 0
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
        # in the stream that `target` is used in, and done when it returns: the buffer is free again
        target.copy_(buffer)


class WeightReader:
    """Reads the requested tensors ahead of their use.

    Threads read at most READ_AHEAD bytes ahead in the order of the requests, by plain reads: a
    mapping is read one page fault at a time, and its pages count as this process's memory. After a
    failed read nothing more is read: the tensors are zeros, so that no rank waits in a collective
    for this one, and close() raises the error.
    """

    def __init__(self, files, requests, device):
        self.files, self.device, self.waiting = files, device, collections.deque(requests)
        self.ahead = {}  # {name: (tensor, futures of its chunks)}
        self.staging, self.errors = threading.local(), []
        self.pool = ThreadPoolExecutor(READERS, initializer=self._prepare_thread)

    def _prepare_thread(self):
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            self.staging.buffer = torch.empty(READ_CHUNK, dtype=torch.uint8, pin_memory=True)

    def _row_bytes(self, request):
        stored = self.files[request.name]
        return (stored.stop - stored.start) // request.shape[0]

    def _begin_next(self):
        request = self.waiting.popleft()
        stored, row_bytes = self.files[request.name], self._row_bytes(request)
        start = stored.start + request.rows.start * row_bytes
        size = len(request.rows) * row_bytes
        target = torch.empty(size, dtype=torch.uint8, device=self.device)
        offsets = range(0, 0 if self.errors else size, READ_CHUNK)
        chunks = [self.pool.submit(read_chunk, stored.path, start + i, target[i : i + READ_CHUNK],
                                   self.staging) for i in offsets]
        self.ahead[request.name] = target.view(DTYPES[stored.dtype]), chunks

    def read(self, name):
        """The requested rows of a tensor, flat, on the device. Names may come in any order, each
        once."""
        while name not in self.ahead:
            self._begin_next()
        tensor, chunks = self.ahead.pop(name)
        while self.waiting:
            size = len(self.waiting[0].rows) * self._row_bytes(self.waiting[0])
            n_bytes = sum(tensor.nbytes for tensor, _ in self.ahead.values())
            if self.ahead and n_bytes + size > READ_AHEAD:
                break
            self._begin_next()
        self.errors.extend(error for chunk in chunks if (error := chunk.exception()))
        return tensor.zero_() if self.errors else tensor

    def close(self):
        """Raise the first error of a read."""
        self.pool.shutdown()
        if self.errors:
            raise self.errors[0]


class RandomWeights:
    """A WeightReader for --random_weights: its values depend on the name and not on the rank."""

    def __init__(self, requests, seed, dtype, device):
        self.requests = {request.name: request for request in requests}
        self.seed, self.dtype, self.device = seed, dtype, device

    def read(self, name):
        _, shape, rows = self.requests[name]
        if "norm" in name or name.endswith("bias"):
            value = float(name.endswith("weight"))  # norms start at 1, biases at 0
            return torch.full((math.prod(shape),), value, dtype=self.dtype, device=self.device)
        seed = self.seed ^ zlib.crc32(name.encode())
        generator = torch.Generator(self.device).manual_seed(seed)
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        whole.normal_(0, RANDOM_STD, generator=generator)
        return whole[rows.start : rows.stop].flatten().clone()  # so that `whole` is freed

    def close(self):
        pass
