"""CUDA graphs: forward and backward of a micro-batch as one launch, where the host is too slow for
more."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from fsdp_qlora.config import Config
from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.model.loss import micro_batch_loss
from fsdp_qlora.model.model import Model


MAX_GRAPHS = 64  # each takes some GPU memory beside torch's, which the plan does not count


class Graphs:
    """The CUDA graphs of a model, one for each shape of a micro-batch."""

    def __init__(self, model: Model, config: Config, device: torch.device) -> None:
        self.model, self.config, self.device, self.pool = model, config, device, None
        # {shape: (graph, MicroBatch, factor, sums)}; None: no graph, seen once so far
        self.captured: dict[tuple, Any] = {}

    def sums(self, batch: MicroBatch, scale: float) -> Tensor | None:
        """The sums of micro_batch_loss(); adds the gradient of `scale` times the micro-batch's
        loss.

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
        factor.fill_(scale)
        graph.replay()
        return sums.clone()

    def capture(self, batch: MicroBatch) -> tuple[torch.cuda.CUDAGraph, MicroBatch, Tensor, Tensor]:
        """A graph, and the tensors that it reads and writes: the MicroBatch, the factor on the
        loss, the sums."""
        # fla keeps what it made of bounds that it has seen, by the tensor's identity
        static = dataclasses.replace(batch, cu_seqlens=batch.cu_seqlens.clone())
        factor = torch.ones((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = micro_batch_loss(self.model(static), static, self.config)
            (loss * factor).backward()
        self.pool = self.pool or graph.pool()
        static.ropes, static.masks, static.layer_inputs = None, {}, None
        torch.cuda.empty_cache()  # what ran without a graph used this
        return graph, static, factor, sums


def batch_tensors(batch: MicroBatch) -> list[Tensor]:
    """All tensors of a MicroBatch and its Answers."""
    fields = [*vars(batch).values(), *(vars(batch.answers).values() if batch.answers else ())]
    return [value for value in fields if isinstance(value, Tensor)]
