"""Parameters under FSDP2: read or set this rank's shard, gather a layer, free what is gathered.

shard_model() of the script says what is an FSDP2 unit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def local_part(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter. (DTensor.to_local() records autograd, which takes 5
    us.)"""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def set_local(module: nn.Module, name: str, local: Tensor) -> None:
    """Replace a meta parameter by this rank's values."""
    old = getattr(module, name)
    if isinstance(old, DTensor):
        # the way FSDP2 does it; DTensor.from_local would move an offloaded shard to the GPU
        local = DTensor(local, old._spec, requires_grad=False)
    setattr(module, name, nn.Parameter(local, requires_grad=old.requires_grad))


@contextlib.contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Gather the layer's parameters for the `with` body. All ranks must call this."""
    if isinstance(layer, FSDPModule):
        layer.unshard()
    try:
        yield
    finally:
        if isinstance(layer, FSDPModule):
            layer.reshard()


def reshard_all(model: nn.Module) -> None:
    """Free what FSDP2 has gathered for a forward without a backward, because the adapter will
    change."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
