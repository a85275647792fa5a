"""The kernels of decoder layers are compiled before the first step, while weights are read."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fsdp_qlora.model.layer import Layout
from fsdp_qlora.model.load import fill_layer, zero_shard
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.offload import GPUStore
from fsdp_qlora.model.shards import set_local, weight_requests
from fsdp_qlora.pretrained.reader import RandomWeights
from fsdp_qlora.pretrained.tensor_names import tensor_names
from fsdp_qlora.quant.nf4 import why_no_triton
from fsdp_qlora.ranks import say

if TYPE_CHECKING:
    from fsdp_qlora.data.bins import Bin
    from fsdp_qlora.planner.plan import Plan
    from fsdp_qlora.pretrained.architecture import Architecture


@contextlib.contextmanager
def compile_ahead(
    arch: Architecture, layouts: Sequence[Layout], plan: Plan, bin: Bin,
    frequencies: list[tuple[Tensor, float]], device: torch.device,
) -> Iterator[None]:
    """While the `with` body runs, compile in a thread what the first step of a run would compile
    for its layers; `bin` is its first. Not where memory is short. What goes wrong there is left to
    the first step."""
    def compile_all() -> None:
        stream = torch.cuda.Stream(device)  # its memory leaves no gaps between the weights
        try:
            with torch.cuda.stream(stream):
                compute_kinds(arch, layouts, plan, bin, frequencies, device)
            stream.synchronize()
        except Exception as e:
            say(f"kernels are compiled in the first step: {type(e).__name__}: {str(e)[:200]}")

    if why_no_triton() or plan.offload_activations or plan.offload_params or layouts[0].dora:
        yield
        return
    thread = threading.Thread(target=compile_all, daemon=True)
    thread.start()
    yield
    thread.join()
    torch.cuda.empty_cache()


def compute_kinds(
    arch: Architecture, layouts: Sequence[Layout], plan: Plan, bin: Bin,
    frequencies: list[tuple[Tensor, float]], device: torch.device,
) -> None:
    """Forward and backward of one layer of each kind, with random weights, by this process alone:
    calls all that is compiled for layers, with the shapes of `bin`."""
    plan = dataclasses.replace(plan, shard_group_size=1, offload_params=False)
    model, names = Model(arch, layouts, plan), tensor_names(arch, {})
    dtype, hidden = getattr(torch, plan.compute_dtype), arch.hidden_size
    read = RandomWeights(weight_requests(model, names, {}), 0, dtype, device).read
    chosen = one_of_each(model)
    for i in chosen:
        fill_layer(model, i, zero_shard(model, i, device), names, read, {})
        set_local(model.layers[i], "adapter", torch.zeros(len(model.layers[i].adapter)).to(device))
    model.layers, model.frequencies = nn.ModuleList(model.layers[i] for i in chosen), frequencies
    # tables of one token, number 0, instead of the vocabulary
    model.embedding = torch.zeros(1, hidden, dtype=dtype, device=device)
    if record := arch.per_layer:
        width = arch.n_layers * record.size
        model.per_layer_table, model.per_layer_projection, model.per_layer_norm = (
            torch.zeros(shape, dtype=dtype, device=device)
            for shape in ((1, width), (width, hidden), (record.size,)))
    ids = torch.zeros_like(bin.input_ids)
    x = model.hidden(dataclasses.replace(bin, input_ids=ids, store=GPUStore()))
    x.backward(torch.zeros_like(x))


def one_of_each(model: Model) -> list[int]:
    """The numbers of layers of which no two compute and keep the same, and of those that lend their
    keys and values to them."""
    kinds = {(layer.layout, layer.keeps, layer.lends, layer.lender is None): layer
             for layer in model.layers}
    lenders = {layer.lender for layer in kinds.values()} - {None}
    return sorted({layer.index for layer in kinds.values()} | lenders)
