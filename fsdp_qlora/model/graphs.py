"""CUDA graphs: forward and backward of a bin as one launch, where the host is too slow for more."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsdp_qlora.model.loss import bin_objective

if TYPE_CHECKING:
    from fsdp_qlora.data.bins import Bin
    from fsdp_qlora.model.model import Model
    from train_fsdp_qlora import Config


MAX_GRAPHS = 64  # each takes some GPU memory beside torch's, which the plan does not count


class Graphs:
    """The CUDA graphs of a model, one for each shape of a bin."""

    def __init__(self, model: Model, config: Config, device: torch.device) -> None:
        self.model, self.config, self.device, self.pool = model, config, device, None
        # {shape: (graph, Bin, factor, sums)}; None: no graph, seen once so far
        self.captured: dict[tuple, Any] = {}

    def sums(self, bin: Bin, scale: float, is_even: bool) -> Tensor | None:
        """The sums of bin_objective(); adds the gradient of `scale` times the bin's loss.

        A shape is captured when it comes a second time: kernels are compiled and chosen outside of
        a capture. Returns None where the caller must do without a graph. `is_even`: all documents
        of the bin have one length, for which attention is another.
        """
        tensors = bin_tensors(bin)
        shape = (is_even and bin.lengths, bin.longest, *(tensor.shape for tensor in tensors))
        if self.captured.get(shape) is None:
            n_graphs = sum(graph is not None for graph in self.captured.values())
            if shape not in self.captured or n_graphs >= MAX_GRAPHS:
                self.captured[shape] = None
                return None
            self.captured[shape] = self.capture(bin)
        graph, static, factor, sums = self.captured[shape]
        for own, tensor in zip(bin_tensors(static), tensors):
            own.copy_(tensor, non_blocking=True)
        factor.fill_(scale)
        graph.replay()
        return sums.clone()

    def capture(self, bin: Bin) -> tuple[torch.cuda.CUDAGraph, Bin, Tensor, Tensor]:
        """A graph, and the tensors that it reads and writes: the Bin, the factor on the loss, the
        sums."""
        # fla keeps what it made of bounds that it has seen, by the tensor's identity
        static = dataclasses.replace(bin, cu_seqlens=bin.cu_seqlens.clone())
        factor = torch.ones((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = bin_objective(self.model(static), static, self.config)
            (loss * factor).backward()
        self.pool = self.pool or graph.pool()
        static.ropes, static.masks, static.layer_inputs = None, {}, None
        torch.cuda.empty_cache()  # what ran without a graph used this
        return graph, static, factor, sums


def bin_tensors(bin: Bin) -> list[Tensor]:
    """All tensors of a Bin and its Answers."""
    fields = [*vars(bin).values(), *(vars(bin.answers).values() if bin.answers else ())]
    return [value for value in fields if isinstance(value, Tensor)]
