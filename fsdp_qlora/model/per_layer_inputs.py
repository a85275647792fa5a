"""Per-layer inputs of Gemma 4 E2B and E4B, computed before the first layer.
layer/per_layer_gate.py uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_qlora.kernels.compiled import fused_kernel
from fsdp_qlora.kernels.norms import norm_of
from fsdp_qlora.model.embedding import look_up_sharded
from fsdp_qlora.model.parameters import ModelParameters
from fsdp_qlora.pretrained.architecture import Architecture


def per_layer_inputs(model: ModelParameters, ids: Tensor, embeddings: Tensor) -> Tensor:
    """Return the inputs of all layers [n, layers, size] for tokens `ids` [n] with these embeddings.
    All ranks of the shard group must call this, with the same n."""
    arch, spec = model.arch, model.arch.per_layer_inputs
    assert spec, "the family has them"
    shape = arch.n_layers, spec.size
    looked_up = look_up_sharded(model, ids, model.per_layer_table)
    # the factor is rounded to the table's dtype, like the embedding's factor
    looked_up.mul_(torch.tensor(spec.size**0.5, dtype=looked_up.dtype))
    projected = embeddings @ model.per_layer_projection.t()
    return add_inputs(projected.unflatten(1, shape), looked_up.unflatten(1, shape),
                      model.per_layer_norm, arch, is_evaluation=not torch.is_grad_enabled())


@fused_kernel
def add_inputs(projected: Tensor, looked_up: Tensor, weight: Tensor, arch: Architecture) -> Tensor:
    """Combine the two parts of per_layer_inputs()'s result."""
    projected = norm_of(projected * arch.hidden_size**-0.5, weight, arch.norm_kind, arch.norm_eps)
    return (projected + looked_up) * 2**-0.5
