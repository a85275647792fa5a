"""CUDA graphs: forward and backward of a micro-batch in one launch, where the host is slower than
the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.model.model import Model


MAX_GRAPHS = 64  # each takes some GPU memory beside torch's, which the plan does not count


class Graphs:
    """The CUDA graphs of a model, one for each shape of a micro-batch."""

    def __init__(
        self, model: Model, compute_loss: Callable[[Model, MicroBatch], tuple[Tensor, Tensor]]
    ) -> None:
        """compute_loss(model, micro-batch) returns the loss and the sums of a micro-batch."""
        self.model, self.compute_loss, self.pool = model, compute_loss, None
        # {shape: (graph, MicroBatch, factor, sums)}; None: no graph, seen once so far
        self.captured: dict[tuple, Any] = {}

    def replay(self, batch: MicroBatch, loss_weight: float) -> Tensor | None:
        """Backward of `loss_weight` times the loss of a micro-batch, by a graph. Returns the sums
        of compute_loss().

        A shape is captured when it comes a second time: kernels are compiled and chosen outside of
        a capture. Returns None where the caller must do without a graph.
        """
        tensors = batch_tensors(batch)
        is_fixed_len = batch.kernels is self.model.kernels.fixed_len  # for which attention differs
        lengths = batch.lengths if is_fixed_len else ()
        shape = lengths, batch.longest, *(tensor.shape for tensor in tensors)
        if self.captured.get(shape) is None:
            n_graphs = sum(graph is not None for graph in self.captured.values())
            if shape not in self.captured or n_graphs >= MAX_GRAPHS:
                self.captured[shape] = None
                return None
            self.captured[shape] = self.capture(batch)
        graph, static, factor, sums = self.captured[shape]
        for own, tensor in zip(batch_tensors(static), tensors):
            own.copy_(tensor, non_blocking=True)
        factor.fill_(loss_weight)
        graph.replay()
        return sums.clone()

    def capture(self, batch: MicroBatch) -> tuple[torch.cuda.CUDAGraph, MicroBatch, Tensor, Tensor]:
        """A graph, and the tensors that it reads and writes: the MicroBatch, the factor on the
        loss, the sums."""
        # fla keeps what it made of bounds that it has seen, by the tensor's identity
        static = dataclasses.replace(batch, cu_seqlens=batch.cu_seqlens.clone())
        factor = torch.ones((), device=self.model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = self.compute_loss(self.model, static)
            (loss * factor).backward()
        self.pool = self.pool or graph.pool()
        static.ropes, static.masks, static.layer_inputs = None, {}, None
        torch.cuda.empty_cache()  # what ran without a graph used this
        return graph, static, factor, sums


def batch_tensors(batch: MicroBatch) -> list[Tensor]:
    """All tensors of a MicroBatch and its Answers."""
    fields = [*vars(batch).values(), *(vars(batch.answers).values() if batch.answers else ())]
    return [value for value in fields if isinstance(value, Tensor)]
