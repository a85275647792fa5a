"""What each sublayer saves for its backward, as records. Backward sets a field to None when it has
used it, so that its memory is free again.

A field that only some models need is None for the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from fsdp_qlora.layer.router import Routing


@dataclasses.dataclass
class SavedInputs:
    """What save_inputs() saves of the inputs of a sublayer's first matmul."""

    inputs: Tensor = None  # normed; None: normed_inputs() makes them again
    columns: Tensor = None  # their last columns, which hold d, see lora_matmul.py


@dataclasses.dataclass
class SavedMixing:
    """What a token mixer saves: of its inputs, and of the matmul that follows it."""

    projected: Tensor = None  # [n, projected_width], what in_proj gave for this mixer
    out_columns: Tensor = None  # as SavedInputs.columns, of the matmul after the mixer


@dataclasses.dataclass
class SavedAttention(SavedMixing):
    heads: list[Tensor] = None  # query, key and value, leaves of autograd's graph of the kernel
    attended: Tensor = None  # [n, heads, head_dim], what the kernel gave


@dataclasses.dataclass
class SavedMLA(SavedAttention):
    q_latent: Tensor = None  # before their norms
    kv_latent: Tensor = None
    q_columns: Tensor = None  # as SavedInputs.columns
    kv_columns: Tensor = None


@dataclasses.dataclass
class SavedGraph(SavedMixing):
    """Of a mixer whose backward is autograd's."""

    start: Any = None  # the edge of the graph where the gradient of `projected` comes out
    mixed: Tensor = None  # [n, width], what the mixer gave


@dataclasses.dataclass
class SavedMixer(SavedInputs):
    """Of a MixerSublayer."""

    x: Tensor = None  # [n, hidden], what the sublayer read
    branch: Tensor = None  # [n, hidden], what it adds, before its norm
    mixers: list[SavedMixing] = None  # one for each of MixerSublayer.paths


@dataclasses.dataclass
class SavedEnd:
    """Of a PerLayerEnd."""

    end_x: Tensor = None
    end_gates: Tensor = None
    end_branch: Tensor = None
    end_columns: Tensor = None  # as SavedInputs.columns, of gate and of out
    end_out_columns: Tensor = None


@dataclasses.dataclass
class SavedMLP(SavedInputs, SavedEnd):
    """Of an MLPSublayer."""

    source: Tensor = None  # [n, hidden], what its norm read
    gate_up: Tensor = None  # [n, gate and up]
    branch: Tensor = None  # [n, hidden], what it adds, before its norm
    down_columns: Tensor = None  # as SavedInputs.columns


@dataclasses.dataclass
class SavedMoE(SavedInputs):
    """Of an MoESublayer."""

    source: Tensor = None  # [n, hidden], what its norm read
    branch: Tensor = None  # [n, hidden], what it adds, before its norm
    routing: Routing = None
    gate_ups: list[Tensor] | None = None  # of each ExpertChunk; None: they are computed again
    given: Tensor = None  # [n, hidden], what the experts gave, before a norm of their own
    # of the shared expert
    shared_gate_up: Tensor = None
    down_columns: Tensor = None  # as SavedInputs.columns
    shared_given: Tensor = None  # what it gave, before a norm of its own
    shared_out: Tensor = None  # what it gave, before the factor of its gate
    shared_factor: Tensor = None
    # of the latent space, see ExpertLatent
    latent: Tensor = None
    entry_columns: Tensor = None  # as SavedInputs.columns
    exit_inputs: Tensor = None
