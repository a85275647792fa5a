"""Collectives, and turning one rank's error into an error on all ranks.

The script joins the process group; run/status.py ends a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_qlora.config import Config
from fsdp_qlora.exit_codes import EXIT_OUT_OF_MEMORY
from fsdp_qlora.files import code_digest


def n_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def is_rank_0() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


def rank_name() -> str:
    """Return this process's name for errors."""
    return f"rank {dist.get_rank()} on {socket.gethostname()}"


def all_gather(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return [ranks, *shape], the tensors [*shape] of all ranks. All ranks of the group must call
    this."""
    rows = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(rows), tensor, group=group)
    return rows


def all_gather_objects(value: Any) -> list[Any]:
    """Return the JSON values of all ranks, in rank order; tuples become lists. All ranks must call
    this."""
    # not torch's all_gather_object, which pickles
    data = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8)
    sizes = all_gather(torch.tensor(len(data))).tolist()
    rows = all_gather(F.pad(data, (0, max(sizes) - len(data))))
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes)]


class RunEnd(Exception):
    """Ends the run on all ranks together, so that no rank waits for another: an error, or a
    requested stop. `code`: the exit code; None: EXITS of the phase."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def raise_on_all_ranks(causes: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """If the `with` body fails on one rank, all ranks raise RunEnd with that rank's error.

    The body must not use collectives. `causes` are the errors that may have a cause outside of this
    code; by default nearly all, because libraries raise all kinds of errors for what a user can
    cause. An AssertionError, lack of GPU memory and errors of other kinds end this rank alone. All
    ranks must call this.
    """
    error, code = "", None
    try:
        yield
    except (AssertionError, torch.OutOfMemoryError):
        raise
    except causes as e:
        error = " ".join(str(e).split())
        if not error or not isinstance(e, (ValueError, OSError)):
            error = f"{type(e).__name__}: {error}"
        if isinstance(e, MemoryError):
            code = EXIT_OUT_OF_MEMORY
    failed = [pair for pair in all_gather_objects((error, code)) if pair[0]]
    if failed:
        raise RunEnd(*failed[0])


def on_rank_0(function: Callable[..., Any], *args: Any,
              causes: tuple[type[Exception], ...] = (Exception,)) -> Any:
    """Run `function` on rank 0 only, and return its result on all ranks. Its errors: see
    raise_on_all_ranks(). All ranks must call this."""
    with raise_on_all_ranks(causes):
        value = function(*args) if is_rank_0() else None
    return all_gather_objects(value)[0]


def check_ranks_agree(config: Config, script: Path, versions: dict[str, str]) -> None:
    """Raise RunEnd unless every rank runs the same source, versions {library: version} and flags.
    All ranks must call this."""
    facts = [(f"runs source with SHA-256 {code_digest(script)}",
              f"another version of {script.name}, copy one to all nodes")]
    for library, version in versions.items():
        facts.append((f"has {library} {version}", "install the same on all nodes"))
    for name, value in vars(config).items():
        facts.append((f"runs --{name} {value}", "start all nodes with the same command"))
    (first, first_facts), *others = all_gather_objects((rank_name(), facts))
    for other, other_facts in others:
        for (fact, remedy), (other_fact, _) in zip(first_facts, other_facts):
            if other_fact != fact:
                raise RunEnd(f"{other} {other_fact}, {first} {fact}: {remedy}")
