"""Atomic file writes, file digests, and the names of an adapter's files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file

# the files of an adapter, by PEFT's names
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS
TensorShapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # {name: (shape, dtype)}


def read_json(path: Path, default: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the object in a JSON file. If it is missing or damaged: return `default`, or raise
    ValueError if that is None. Raises OSError if it cannot be read, because it may be undamaged."""
    try:
        if not path.is_file():  # reading a FIFO would wait
            raise ValueError("no file")
        return {**json.loads(path.read_text())}  # dict() would accept a list of pairs
    except (FileNotFoundError, ValueError, TypeError, RecursionError) as e:
        if default is None:
            raise ValueError(f"{path}: not a JSON object: {' '.join(str(e).split())}")
        return default


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of metrics.jsonl. A line that is not a record is skipped; the end of a run
    may have cut it."""
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is int:
                yield record


def open_no_follow(path: Path, flags: int) -> int:
    """Open a file of the run for writing, by os.open()'s `flags`. Raises OSError if it is a link: a
    run writes only into its directory, and a link may lead to a file of someone else."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def remove(path: Path) -> None:
    """Delete a file, a directory with its contents, or a link, but not the link's target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Make a file or directory that was written survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, content: str | dict[str, torch.Tensor],
                metadata: Mapping[str, str] | tuple[()] = ()) -> None:
    """Replace a file by a text, or by {name: tensor} with `metadata` {name: text}. A reader sees
    either the old file or the new one."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # may be a link, see open_no_follow()
    try:
        part.touch()
        mode = part.stat().st_mode  # as the umask has it
        if isinstance(content, str):
            part.write_text(content)
        else:
            save_file(content, part, metadata={"format": "pt", **dict(metadata)})
        part.chmod(mode)  # safetensors makes it readable by its owner only
        put_in_place(part, path)
    except Exception:
        part.unlink(missing_ok=True)  # to free the space, which may be what is missing
        raise


def put_in_place(part: Path, path: Path) -> None:
    """Sync a file to disk and rename it to `path`, which it replaces."""
    sync_file(part)
    os.replace(part, path)
    sync_file(path.parent)


DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}


def write_header(file: BinaryIO, shapes: TensorShapes) -> None:
    """Write the header of a safetensors file of tensors in bf16, fp32 or int64. They follow by
    write_tensor(), in the order of `shapes`, one at a time; safetensors' own writer needs all
    tensors of a file at once."""
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in shapes.items():
        start, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)


def write_tensor(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write the next tensor of a safetensors file, from the CPU."""
    file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def digest(path: Path | str) -> str:
    """Return the SHA-256 of a file; safetensors has no checksum of its own."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            sha.update(chunk)
    return sha.hexdigest()


def code_digest(script: Path) -> str:
    """Return the SHA-256 of a script and of the package beside it, if there is one."""
    return json_digest([digest(file) for file in
                        (script, *sorted(script.parent.glob("fsdp_qlora/**/*.py")))])


def json_digest(state: Any) -> str:
    """Return the SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def as_json(value: Any) -> Any:
    """Return the value as it comes back from a JSON file, with lists instead of tuples."""
    return json.loads(json.dumps(value))
