"""Dataclasses of what each sublayer saves for its backward.

Backward sets to None the tensors whose memory must be free before it ends; the rest goes with the
dataclass. A field that only some models need is None for the others. `lora_hidden`, of a
FusedLinear, is lora_matmul()'s second result.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor

from fsdp_qlora.layer.router import Routing


@dataclasses.dataclass
class SavedTokenMixer:
    """The tensors that any TokenMixer saves, and lora_hidden of the matmul that follows it."""

    projected: Tensor = None  # [n, projected_width], in_proj's outputs for this mixer
    out_lora_hidden: Tensor = None  # of the matmul after the mixer


class HeadGroup(NamedTuple):
    """One call of an attention kernel: of some key heads and the query heads that share them."""

    # query, key and value, or what the MakeKV makes key and value of; leaves of autograd's graph of
    # the kernel
    leaves: list[Tensor]
    attended: Tensor  # [n, query heads, width of a value], the kernel's output


@dataclasses.dataclass
class SavedAttention(SavedTokenMixer):
    """The tensors that an AttentionMixer saves."""

    groups: list[HeadGroup] = None


@dataclasses.dataclass
class SavedMLA(SavedAttention):
    """The tensors that an MLAMixer saves."""

    q_latent: Tensor = None  # both latents are before their norms
    kv_latent: Tensor = None
    q_lora_hidden: Tensor = None
    kv_lora_hidden: Tensor = None
    # with context parallelism, of all keys that this rank's queries see, as kv_latent then is:
    key_value: Tensor = None  # kv_b's outputs [keys, heads, nope + value]


@dataclasses.dataclass
class SavedAutogradMixer(SavedTokenMixer):
    """The tensors that an AutogradMixer saves."""

    start: Any = None  # the graph's edge at which autograd returns the gradient of `projected`
    mixed: Tensor = None  # [n, width], the mixer's output


@dataclasses.dataclass
class SavedMixerSublayer:
    """The tensors that a MixerSublayer saves."""

    x: Tensor = None  # [n, hidden], the sublayer's input
    lora_hidden: Tensor = None  # of in_proj
    branch: Tensor = None  # [n, hidden], the branch before its norm
    paths: list[SavedTokenMixer] = None  # one for each of MixerSublayer.paths


@dataclasses.dataclass
class SavedPerLayerGate:
    """The tensors that a PerLayerGate saves."""

    per_layer_x: Tensor = None
    per_layer_gates: Tensor = None
    per_layer_branch: Tensor = None
    per_layer_gate_lora_hidden: Tensor = None
    per_layer_out_lora_hidden: Tensor = None


@dataclasses.dataclass
class SavedMLPInput:
    """The input of an MLP or of experts."""

    mlp_input: Tensor = None  # [n, hidden], the input of the norm
    # [n, input_width], the norm's output, which is cheap: saved only while backward runs, else
    # None, see saved_or_recomputed_inputs()
    normed_inputs: Tensor = None


@dataclasses.dataclass
class SavedGatedMLP:
    """The tensors that a gated MLP saves between its two matmuls."""

    gate_up: Tensor = None  # [n, gate and up]
    lora_hidden: Tensor = None  # of gate_up
    down_lora_hidden: Tensor = None


@dataclasses.dataclass
class SavedMLP(SavedMLPInput, SavedGatedMLP, SavedPerLayerGate):
    """The tensors that a dense MLP saves. Flat, because put_saved() offloads all tensors of the
    dataclass in one put()."""

    branch: Tensor = None  # [n, hidden], the branch before its norm


@dataclasses.dataclass
class SavedSharedExpert(SavedGatedMLP):
    """The tensors that a SharedExpert saves."""

    before_gate: Tensor = None  # [n, hidden], its output before the factor of its gate
    factor: Tensor = None  # [n, 1]
    before_norm: Tensor = None  # [n, hidden], its output before its norm


@dataclasses.dataclass
class SavedMoE(SavedMLPInput):
    """The tensors that a MoESublayer saves."""

    branch: Tensor = None  # [n, hidden], the branch before its norm
    routing: Routing = None
    gate_ups: list[Tensor] | None = None  # one per ExpertChunk; None: they are computed again
    expert_output: Tensor = None  # [n, hidden], the experts' output, before a norm of their own
    shared: SavedSharedExpert = None
    # for the latent space, see ExpertLatent
    latent_inputs: Tensor = None  # [n, latent], the experts' inputs
    latent_in_lora_hidden: Tensor = None
    latent_out_inputs: Tensor = None
