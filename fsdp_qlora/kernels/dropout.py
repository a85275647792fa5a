"""Dropout that depends on the token and the place in the model alone."""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.compiled import fused_kernel


# Numbers of the dropout sites in a layer. The first ones are the inputs of its fused linears; these
# are the mixer's branch, the MLP's branch, attention's weights and, in the first layer, the
# embedding's output. A layer has N_SITES numbers.
MIXER_BRANCH_SITE, MLP_BRANCH_SITE, ATTENTION_WEIGHTS_SITE, EMBEDDING_SITE = 8, 9, 10, 11
N_SITES = 12


def drop_eager(x: Tensor, seeds: Tensor, site: int, probability: float) -> Tensor:
    """Dropout of x [n, width]: each value becomes 0 or is divided by 1 - probability.

    The choice depends only on the token's seed [n], the site and the column. So it is the same in a
    recomputation, in any micro-batch and on any number of GPUs.
    """
    columns = torch.arange(x.shape[1], device=x.device, dtype=torch.int64)
    bits = hash_ints(hash_ints(seeds + site)[:, None] + columns)
    uniform = (bits & (2**24 - 1)).float() / 2**24
    return torch.where(uniform < probability, 0, x.float() / (1 - probability)).to(x.dtype)


drop = fused_kernel(drop_eager)  # compiled: a model's layers have few different widths
