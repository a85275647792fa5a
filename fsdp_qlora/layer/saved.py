"""What each sublayer saves for its backward, as records.

Backward sets to None the tensors whose memory must be free before it ends; the rest goes with the
record. A field that only some models need is None for the others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from fsdp_qlora.layer.router import Routing


@dataclasses.dataclass
class SavedInputs:
    """The inputs of a sublayer's first matmul, as saved by save_inputs()."""

    inputs: Tensor = None  # normed; None: saved_or_recomputed_inputs() computes them again
    lora_hidden: Tensor = None  # d, padded: their last columns, see lora_matmul.py


@dataclasses.dataclass
class SavedMixing:
    """A token mixer's inputs, and inputs of the matmul that follows it."""

    projected: Tensor = None  # [n, projected_width], in_proj's outputs for this mixer
    out_lora_hidden: Tensor = None  # like SavedInputs.lora_hidden, for the matmul after the mixer


class HeadGroup(NamedTuple):
    """One call of an attention kernel: of some key heads and the query heads that share them."""

    heads: list[Tensor]  # query, key and value, leaves of autograd's graph of the kernel
    attended: Tensor  # [n, query heads, head_dim], the kernel's output


@dataclasses.dataclass
class SavedAttention(SavedMixing):
    groups: list[HeadGroup] = None


@dataclasses.dataclass
class SavedMLA(SavedAttention):
    q_latent: Tensor = None  # both latents are before their norms
    kv_latent: Tensor = None
    q_lora_hidden: Tensor = None  # like SavedInputs.lora_hidden
    kv_lora_hidden: Tensor = None


@dataclasses.dataclass
class SavedGraph(SavedMixing):
    """The tensors that an AutogradMixer saves."""

    start: Any = None  # the graph's edge at which autograd returns the gradient of `projected`
    mixed: Tensor = None  # [n, width], the mixer's output


@dataclasses.dataclass
class SavedMixer(SavedInputs):
    """The tensors that a MixerSublayer saves."""

    x: Tensor = None  # [n, hidden], the sublayer's input
    branch: Tensor = None  # [n, hidden], the branch before its norm
    mixers: list[SavedMixing] = None  # one for each of MixerSublayer.paths


@dataclasses.dataclass
class SavedPerLayer:
    """The tensors that a PerLayerGate saves."""

    per_layer_x: Tensor = None
    per_layer_gates: Tensor = None
    per_layer_branch: Tensor = None
    per_layer_gate_lora_hidden: Tensor = None  # both: like SavedInputs.lora_hidden
    per_layer_out_lora_hidden: Tensor = None


@dataclasses.dataclass
class SavedMLP(SavedInputs, SavedPerLayer):
    """The tensors that an MLPSublayer saves."""

    mlp_input: Tensor = None  # [n, hidden], the input of its norm
    gate_up: Tensor = None  # [n, gate and up]
    branch: Tensor = None  # [n, hidden], the branch before its norm
    down_lora_hidden: Tensor = None  # like SavedInputs.lora_hidden


@dataclasses.dataclass
class SavedMoE(SavedInputs):
    """The tensors that a MoESublayer saves."""

    mlp_input: Tensor = None  # [n, hidden], the input of its norm
    branch: Tensor = None  # [n, hidden], the branch before its norm
    routing: Routing = None
    gate_ups: list[Tensor] | None = None  # one per ExpertChunk; None: they are computed again
    expert_output: Tensor = None  # [n, hidden], the experts' output, before a norm of their own
    # for the shared expert
    shared_gate_up: Tensor = None
    down_lora_hidden: Tensor = None  # like SavedInputs.lora_hidden
    shared_output: Tensor = None  # its output, before a norm of its own
    shared_out: Tensor = None  # its output, before the factor of its gate
    shared_factor: Tensor = None
    # for the latent space, see ExpertLatent
    latent: Tensor = None
    entry_lora_hidden: Tensor = None  # like SavedInputs.lora_hidden
    exit_inputs: Tensor = None
