"""Rotary embeddings: the frequencies of a model, and how long a text it was made for."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fsdp_qlora.pretrained.architecture import Architecture, rotary_dim
from fsdp_qlora.pretrained.from_config import text_config


def max_context_length(c: PreTrainedConfig) -> int | None:
    """Return the number of tokens that the model with this text config was made for, None if
    unknown: its max_position_embeddings, or more if its rope is scaled."""
    longest = c.max_position_embeddings
    rope = getattr(c, "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else list(rope.values())  # one per layer type
    if not longest or not ropes:
        return longest
    scaled = {"yarn": "original_max_position_embeddings", "linear": "", "dynamic": ""}
    lengths = [int((r.get(scaled[r["rope_type"]]) or longest) * (r.get("factor") or 1))
               if r.get("rope_type") in scaled else longest for r in ropes]
    return max(longest, min(lengths))


def rope_frequencies(
    rope: dict[str, Any], arch: Architecture, max_seq_len: int, model_config: PreTrainedConfig,
) -> tuple[torch.Tensor, float]:
    """Return (fp32 [rotary_dim / 2] inverse frequencies, factor of cos and sin) of one of
    arch.ropes; for longrope [2, rotary_dim / 2], for short documents and for long ones. max_seq_len
    chooses the base of "dynamic" once, for all batches."""
    dim = rotary_dim(rope, rope["head_dim"])
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    if rope["rope_type"] != "proportional":
        rope = rope | {"partial_rotary_factor": 1.0}  # dim is already the rotated part of the head
    view = types.SimpleNamespace(
        rope_parameters=rope, head_dim=dim,
        hidden_size=arch.hidden_size, num_attention_heads=arch.n_heads,
        max_position_embeddings=text_config(model_config).max_position_embeddings,
        standardize_rope_params=lambda: None)
    compute = functools.partial(ROPE_INIT_FUNCTIONS[rope["rope_type"]], view, "cpu")
    if rope["rope_type"] == "longrope":
        original = rope["original_max_position_embeddings"]
        (short, factor), (long, _) = compute(seq_len=original), compute(seq_len=original + 1)
        return torch.stack([short, long]).float(), float(factor)
    inv_freq, factor = compute(seq_len=max_seq_len)
    return inv_freq.float(), float(factor)
