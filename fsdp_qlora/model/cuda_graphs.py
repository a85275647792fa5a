"""CUDA graphs: forward and backward of a micro-batch in one launch, where the host is slower than
the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.model import Model


MAX_GRAPHS = 64  # each needs some GPU memory outside torch, which the plan does not count


class CapturedGraph(NamedTuple):
    """A graph, and the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    batch: MicroBatch
    loss_weight: Tensor  # factor of the loss
    sums: Tensor  # see compute_loss()


class CUDAGraphs:
    """The CUDA graphs of a model, one for each shape of micro-batch."""

    def __init__(
        self, model: Model, compute_loss: Callable[[Model, MicroBatch], tuple[Tensor, Tensor]]
    ) -> None:
        """`compute_loss(model, micro_batch)` returns the loss and the sums of a micro-batch."""
        self.model = model
        self.compute_loss = compute_loss
        self.pool = None
        # {shape of a micro-batch: its graph}; None: no graph for this shape yet
        self.captured: dict[tuple, CapturedGraph | None] = {}

    def replay(self, batch: MicroBatch, loss_weight: float) -> Tensor | None:
        """Run backward of `loss_weight` times the loss of a micro-batch by replaying its graph.
        Returns the sums of compute_loss(), or None if the caller must run without a graph.

        A shape is captured when it occurs for the second time, because kernels are compiled and
        chosen outside of a capture.
        """
        tensors = batch_tensors(batch)
        lengths = () if batch.is_varlen else batch.lengths  # attention is another kernel
        shape = lengths, batch.max_seqlen, *(tensor.shape for tensor in tensors)
        captured = self.captured.get(shape)
        if captured is None:
            n_graphs = sum(graph is not None for graph in self.captured.values())
            if shape not in self.captured or n_graphs >= MAX_GRAPHS:
                self.captured[shape] = None
                return None
            captured = self.captured[shape] = self.capture(batch)
        for own, tensor in zip(batch_tensors(captured.batch), tensors):
            own.copy_(tensor, non_blocking=True)
        captured.loss_weight.fill_(loss_weight)
        captured.graph.replay()
        return captured.sums.clone()

    def capture(self, batch: MicroBatch) -> CapturedGraph:
        """Capture the graph of micro-batches of this one's shape."""
        # fla caches what it derives from cu_seqlens by the identity of the tensor, so copy it
        static = dataclasses.replace(batch, cu_seqlens=batch.cu_seqlens.clone())
        loss_weight = torch.ones((), device=self.model.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = self.compute_loss(self.model, static)
            (loss * loss_weight).backward()
        self.pool = self.pool or graph.pool()
        del loss  # and with it the LayerInputs
        torch.cuda.empty_cache()  # frees memory used by the run without a graph
        return CapturedGraph(graph, static, loss_weight, sums)


def batch_tensors(batch: MicroBatch) -> list[Tensor]:
    """Return all tensors of a MicroBatch and its PreferenceInputs."""
    fields = [*vars(batch).values(), *(vars(batch.preference).values() if batch.preference else ())]
    return [value for value in fields if isinstance(value, Tensor)]
