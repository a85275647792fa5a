"""The whole model: embedding, decoder layers, loss; which part a rank has and reads; CUDA graphs.

Depends on layer, head and loss, and on reader for the form of a request. What is an FSDP2
unit is decided in the script, which also fills the model.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdp_qlora.model.attention import rope_tables
from fsdp_qlora.model.elementwise import EMBEDDING_SITE, drop, normalise
from fsdp_qlora.model.layer import DecoderLayer, Layout
from fsdp_qlora.model.linears import LinearPlace
from fsdp_qlora.training.loss import bin_objective
from fsdp_qlora.pretrained.tensor_names import FP8_BLOCK, NF4_PARTS
from fsdp_qlora.quant.nf4 import BLOCK, MX_BLOCK, NF4Blocks, dequantise
from fsdp_qlora.run.ranks import say_each
from fsdp_qlora.model.head import HeadLoss, embed, shard_range
from fsdp_qlora.pretrained.reader import Request

if TYPE_CHECKING:
    from fsdp_qlora.data.bins import Bin
    from fsdp_qlora.planner.plan import Plan
    from fsdp_qlora.pretrained.architecture import Architecture
    from fsdp_qlora.pretrained.tensor_names import TensorNames
    from train_fsdp_qlora import Config


class Model(nn.Module):
    """Embedding, decoder layers, norm and head. Its forward of a Bin returns the sums of the token
    losses of its documents, see HeadLoss; without wants_loss what the head reads, [tokens, hidden].

    Of embedding and head each rank has its own rows, outside of FSDP2, which would gather them
    whole: 2.1 GB each for Llama-3-70B, and twice that while it copies.
    """

    layers: Sequence[DecoderLayer]  # an nn.ModuleList
    # loaded by the script, None before; a tied head is the embedding
    embedding: Tensor
    norm: Tensor
    norm_bias: Tensor | None
    head: Tensor
    frequencies: list[tuple[Tensor, float]]  # of each of arch.ropes, see rope_frequencies()

    def __init__(
        self, arch: Architecture, layouts: Sequence[Layout], plan: Plan,
        group: dist.ProcessGroup | None = None
    ) -> None:
        """`group`: of the processes that share one copy of the model; None: this process alone."""
        super().__init__()
        self.arch, self.group, self.plan = arch, group, plan
        self.shard, self.shards = 0, 1
        if group:
            self.shard, self.shards = dist.get_rank(group), dist.get_world_size(group)
        self.own_rows = shard_range(arch.vocab_size, self.shard, self.shards)  # of both tables
        self.layers = nn.ModuleList(
            DecoderLayer(arch, layout, i, plan) for i, layout in enumerate(layouts))
        self.embedding = self.norm = self.norm_bias = self.head = self.frequencies = None

    def forward(self, bin: Bin, wants_loss: bool = True) -> Tensor:
        x, arch = self.hidden(bin), self.arch
        if wants_loss:
            return HeadLoss.apply(x, self, bin)
        normed = torch.empty_like(x)
        normalise(normed, x, self.norm, self.norm_bias, arch.norm, arch.norm_eps, evaluation=True)
        return normed

    def hidden(self, bin: Bin) -> Tensor:
        """What the last layer returns, [tokens, hidden]."""
        x, dropout = embed(self, bin.input_ids), self.arch.embedding_dropout
        if dropout and bin.dropout_keys is not None:
            x = drop(x, bin.dropout_keys, EMBEDDING_SITE, dropout)
        bin.ropes = {index: rope_tables(self.arch, self.frequencies, bin, index)
                     for index in (None, *range(len(self.arch.ropes)))}
        bin.masks = {}
        for layer in self.layers:
            x = layer(x, bin)
        return x


def local_part(parameter: Tensor) -> Tensor:
    """This rank's shard of a parameter. (DTensor.to_local() records autograd, which takes 5 us.)"""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def set_local(module: nn.Module, name: str, local: Tensor) -> None:
    """Replace a meta parameter by this rank's values."""
    old = getattr(module, name)
    if isinstance(old, DTensor):
        # as FSDP2 does it; DTensor.from_local would move an offloaded shard to the GPU
        local = DTensor(local, old._spec, requires_grad=False)
    setattr(module, name, nn.Parameter(local, requires_grad=old.requires_grad))


@dataclasses.dataclass(frozen=True)
class OwnBlocks:
    """The NF4 blocks of one linear that this rank keeps; perhaps none."""

    place: LinearPlace
    blocks: slice  # counted from the linear's first block
    local: slice  # the same blocks in this rank's shard of the layer's `nf4`

    @property
    def rows(self) -> range:
        """The rows of the weight in which these blocks lie."""
        n_out, n_in = self.place.linear.out_features, self.place.linear.in_features
        stop = min(math.ceil(self.blocks.stop * BLOCK / n_in), n_out)
        return range(self.blocks.start * BLOCK // n_in, stop)

    @property
    def weights(self) -> slice:
        """Slice into the flat tensor of `rows`: exactly the weights of these blocks."""
        start = self.blocks.start * BLOCK % self.place.linear.in_features
        return slice(start, start + (self.blocks.stop - self.blocks.start) * BLOCK)


def own_blocks(layer: DecoderLayer, shard: int) -> list[OwnBlocks]:
    """The OwnBlocks of each of a layer's linears, for the rank that has this shard.

    The linears lie end to end, and the whole is cut into equal shards: of a Llama-3-8B shared by
    two, rank 0 has q, k, v, o, gate and a seventh of up, rank 1 the rest of up and down. Of a
    linear in other shards alone the slices are empty. FSDP2 cuts at the same places, because
    DecoderLayer pads its parameters to shards of one size.
    """
    n = len(local_part(layer.nf4))
    first, found = shard * n, []
    for place in layer.layout.places:
        linear = place.blocks
        start, stop = (min(max(i, linear.start), linear.stop) for i in (first, first + n))
        blocks = slice(start - linear.start, stop - linear.start)
        found.append(OwnBlocks(place, blocks, slice(start - first, stop - first)))
    return found


def weight_requests(model: Model, names: TensorNames, nf4_states: Collection[str]) -> list[Request]:
    """The Requests for all that this rank reads, in the order in which it is used. `nf4_states`:
    the names of the weights that are in NF4 in the files, see check_files()."""
    table = model.arch.vocab_size, model.arch.hidden_size
    requests = [Request(names.embedding, table, model.own_rows)]
    for i, layer in enumerate(model.layers):
        for own in own_blocks(layer, model.shard):
            name = names.of_layer(i, f"{own.place.linear.name}.weight")
            requests += linear_requests(own, name, names, name in nf4_states)
        shapes = {name: shape for name, (_, shape) in layer.layout.vectors.items()}
        for name, shape in (shapes | layer.layout.mixture_tensors).items():
            name = names.of_layer(i, name)
            requests += whole_requests(name, shape, name in nf4_states)
    for name in filter(None, (names.norm, names.norm_bias)):
        requests += whole_requests(name, table[1:])
    return requests if model.arch.tied else [*requests, Request(names.head, table, model.own_rows)]


def linear_requests(own: OwnBlocks, name: str, names: TensorNames, in_nf4: bool) -> list[Request]:
    """The Requests for this rank's blocks of a linear: whole rows, in FP8 and MXFP4 with their
    scales; in NF4 the packed codes, their scales, and all of these scales' second level."""
    linear, blocks = own.place.linear, own.blocks
    n_out, n_in = linear.out_features, linear.in_features
    if linear.mxfp4:
        widths = {f"{name}_blocks": n_in // 2, f"{name}_scales": n_in // MX_BLOCK}  # bytes
        return [Request(key, (n_out, width), own.rows, names.sources.get(key))
                for key, width in widths.items()]
    if in_nf4:
        n_bytes, half = n_out * n_in // 2, BLOCK // 2
        packed = range(blocks.start * half, min(blocks.stop * half, n_bytes))
        n_blocks = own.place.blocks.stop - own.place.blocks.start
        return [
            Request(name, (n_bytes,), packed),
            Request(f"{name}.absmax", (n_blocks,), range(blocks.start, blocks.stop)),
            *(Request(f"{name}.{part}", (1,), range(1))
              for part in ("nested_absmax", "nested_quant_map"))]
    requests = [Request(name, (n_out, n_in), own.rows, names.sources.get(name))]
    if scales := names.scaled.get(name):
        rows = range(own.rows.start // FP8_BLOCK, -(-own.rows.stop // FP8_BLOCK))
        requests.append(Request(scales, names.shapes[scales], rows))
    return requests


def whole_requests(name: str, shape: tuple[int, ...], in_nf4: bool = False) -> list[Request]:
    """The Requests for a tensor that each rank reads whole."""
    if in_nf4:
        keys = name, *(f"{name}.{part}" for part in NF4_PARTS)
        return [Request(key, (1,), range(1)) for key in keys]
    return [Request(name, shape, range(shape[0]))]


@contextlib.contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """In the `with` body the layer's parameters are whole. All ranks must call this."""
    if isinstance(layer, FSDPModule):
        layer.unshard()
    yield
    if isinstance(layer, FSDPModule):
        layer.reshard()


@torch.no_grad()
def measure_weight_norms(model: Model) -> None:
    """For DoRA: compute the norms of the rows of all adapted weights, fp32. All ranks must call
    this."""
    for layer in model.layers:
        with gathered(layer):
            no_adapter = layer.vectors.new_zeros(layer.layout.n_adapter)
            for fused in layer.layout.fused_linears:
                if fused.n_columns:
                    weight = dequantise(layer, fused, no_adapter)[:, : fused.in_features]
                    norms = torch.cat([rows.float().norm(dim=1) for rows in weight.split(4096)])
                    for place in fused.adapted:
                        layer.weight_norms[place.linear.name] = norms[place.outputs]


def verify_model(model: Model, plan: Plan) -> None:
    """Assert that loading and sharding left what they should; print the bytes per rank. All ranks
    must call this."""
    n_bytes = collections.Counter()
    for i, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            local = local_part(p)
            assert isinstance(p, DTensor) == plan.uses_fsdp, (
                f"layer {i}: {name} is{' not' * plan.uses_fsdp} FSDP2's")
            assert not local.is_meta, f"layer {i}: {name} was not loaded"
            assert p.requires_grad == (name == "adapter"), f"layer {i}: {name} {p.requires_grad=}"
            shards = p.device_mesh["shard"].size() if isinstance(p, DTensor) else 1
            assert len(local) * shards == len(p), f"layer {i}: {name} is not sharded evenly"
            parts = [local.packed, local.scales] if isinstance(local, NF4Blocks) else [local]
            kind = {"nf4": "4-bit", "vectors": "other frozen"}.get(name, "adapter")
            n_bytes[kind] += sum(part.nbytes for part in parts)
            if parts[0].is_cpu and torch.cuda.is_available():
                n_bytes["of these on the host"] += sum(part.nbytes for part in parts)
        n_bytes["other frozen"] += sum(t.nbytes for t in layer.mixture_tensors.values())
    tables = {id(t): t.nbytes for t in (model.embedding, model.head, model.norm, model.norm_bias)
              if t is not None}
    n_bytes["other frozen"] += sum(tables.values())
    say_each("weights, GiB", ", ".join(f"{kind} {n / 2**30:.3f}" for kind, n in n_bytes.items()))


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
        static, factor = dataclasses.replace(bin), torch.ones((), device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss, sums = bin_objective(self.model(static), static, self.config)
            (loss * factor).backward()
        self.pool = self.pool or graph.pool()
        static.ropes, static.masks = None, {}
        torch.cuda.empty_cache()  # what ran without a graph used this
        return graph, static, factor, sums


def bin_tensors(bin: Bin) -> list[Tensor]:
    """All tensors of a Bin and its Answers."""
    fields = [*vars(bin).values(), *(vars(bin.answers).values() if bin.answers else ())]
    return [value for value in fields if isinstance(value, Tensor)]
