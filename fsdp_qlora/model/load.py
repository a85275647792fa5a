"""Load the base model: read each weight, quantize it to NF4 or copy it, into this rank's shard.

load_model() opens and checks the files; fill_model() and what it calls read them as StoredWeights.
verify_model() checks what was loaded and sharded.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.tensor import DTensor
from tqdm import tqdm

from fsdp_qlora.config import Config
from fsdp_qlora.hashing import as_hex, tensor_checksum
from fsdp_qlora.layer.layer import DecoderLayer
from fsdp_qlora.layer.offload import pinned_copy
from fsdp_qlora.log import log, log_debug_each_rank
from fsdp_qlora.memory import host_memory, log_debug_memory
from fsdp_qlora.model.fsdp import local_part, set_local
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.shards import LocalBlocks, local_blocks, weight_requests
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.family_specs import LinearShape
from fsdp_qlora.pretrained.reader import (
    RandomWeights, WeightReader, all_finite, rows_of_earlier_ranks, stored_tensors)
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import tensor_names
from fsdp_qlora.pretrained.weight_formats import nf4_round_trip, swap_nibbles
from fsdp_qlora.quant.blocks import (
    BLOCKSIZE, MXFP4_BLOCKSIZE, NESTED_BLOCKSIZE, FourBitBlocks, NestedScales)
from fsdp_qlora.quant.nf4 import scale_codebook
from fsdp_qlora.ranks import is_rank_0, raise_on_all_ranks

# this rank's part of each linear, and its name in files
LocalLinears = list[tuple[LocalBlocks, str]]


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """The facts about the loaded weights that train_config.json records."""

    # {name in files: tensor_checksum() as hex}, to tell one base from another
    checksums: dict[str, str]
    prequantized: bool  # True if the files have weights in NF4; False for MXFP4 and INT4
    n_parameters: int


def load_model(model: Model, weights_dir: Path, model_config: transformers.PreTrainedConfig,
               config: Config) -> LoadResult:
    """Load this rank's part of all frozen weights from the files in weights_dir. Raises RunEnd if
    the files are not the model's, or if a value is not finite. All ranks must call this."""
    assert config.max_seq_len, "resolve_max_seq_len() fills it in"
    arch = model.arch
    device = model.device
    nf4_states: dict[str, dict[str, Any]] = {}  # check_files()'s result
    dtype = model.plan.dtype
    if config.random_weights:
        names = tensor_names(arch, {})
    else:
        with raise_on_all_ranks():
            stored = stored_tensors(weights_dir)
            names = tensor_names(arch, stored)
            nf4_states = check_files(stored, names, model_config, config.compute_dtype)
    requests = weight_requests(model, names, nf4_states)
    n_before = rows_of_earlier_ranks(requests)
    shares = {r.name: (r.rows, n_before[r.name]) for r in requests}
    resident_before, started = host_memory().now, time.monotonic()
    reader = CheckedReader(
        RandomWeights(requests, config.seed, dtype, device) if config.random_weights
        else WeightReader(stored, requests, device), shares, nf4_states)
    fill_model(model, StoredWeights(reader.read, names, nf4_states, dtype))
    with raise_on_all_ranks():
        reader.close()  # until here all ranks continue, whatever is wrong
    dist.all_reduce(totals := torch.stack(list(reader.checksums.values())))
    model.set_frequencies(model_config, config.max_seq_len)
    torch.cuda.empty_cache()  # training needs blocks of other sizes than loading
    log_loaded(reader.n_bytes, time.monotonic() - started, host_memory().peak - resident_before)
    log_debug_memory("after loading", device)
    return LoadResult(dict(zip(reader.checksums, map(as_hex, totals.tolist()))), bool(nf4_states),
                      names.n_parameters)


class CheckedReader:
    """Reads tensors for StoredWeights, and records what is checked of them."""

    def __init__(
        self, reader: RandomWeights | WeightReader, shares: dict[str, tuple[range, int]],
        nf4_states: Collection[str],
    ) -> None:
        self.reader = reader
        # {name: (its rows that this rank reads, the number of its first rows that earlier ranks
        # read, which are in their checksums)}
        self.shares = shares
        self.nf4_states = nf4_states  # names of the weights that are in NF4 in the files
        self.checksums: dict[str, torch.Tensor] = {}  # of this rank's share
        self.finite: dict[str, torch.Tensor] = {}  # {name: whether all values are finite}
        self.n_bytes = 0

    def read(self, name: str) -> torch.Tensor:
        value = self.reader.read(name)
        self.n_bytes += value.nbytes
        self.checksums[name] = tensor_checksum(value, *self.shares[name])
        if name not in self.nf4_states:
            self.finite[name] = all_finite(value, name)
        return value

    def close(self) -> None:
        """Stop reading. Raises the first error of a read, or ValueError if a value is not finite.
        """
        self.reader.close()
        are_finite = torch.stack(list(self.finite.values())).tolist()
        if not all(are_finite):
            damaged = list(self.finite)[are_finite.index(False)]
            raise ValueError(f"the model's {damaged} has values that are not finite: is its file"
                             " damaged? Fetch it again")


def log_loaded(n_bytes: int, seconds: float, grown: float) -> None:
    """Log how fast the weights were read. `grown`: the most bytes that host memory grew by."""
    unit, size = ("GB", 1e9) if n_bytes > 1e9 else ("MB", 1e6)
    log(f"base model loaded in {seconds:.1f} s")
    log_debug_each_rank(
        "base model", f"{n_bytes / size:.2f} {unit} at {n_bytes / size / seconds:.2f} {unit}/s"
                      f" with at most {grown / 2**30:.2f} GiB more host memory")


def fill_model(model: Model, files: StoredWeights) -> None:
    """Set the model's embedding, layers, norm and lm_head. Each tensor is read once, in the order
    of weight_requests(), except that MXFP4 comes first in a layer. All ranks of the shard group
    must call this."""
    plan, device = model.plan, model.device
    read, names, dtype = files.read, files.names, files.dtype

    def table(name: str, width: int, on_host: bool = False) -> torch.Tensor:
        rows = read(name).view(-1, width).to(device, dtype)
        if model.arch.added_rows:  # zeros until initial_token_rows() sets them
            rows = F.pad(rows, (0, 0, 0, len(model.local_rows) - len(rows)))
        return pinned_copy(rows) if on_host else rows

    arch, hidden = model.arch, model.arch.hidden_size
    model.embedding = table(names.embedding, hidden, plan.embedding_on_host and not arch.tied)
    if arch.per_layer_inputs:
        linear = arch.per_layer_inputs.projection_linear(hidden, arch.n_layers)
        model.per_layer_table = table(
            names.of_model(arch.per_layer_inputs.table), linear.out_features,
            plan.embedding_on_host)
        model.per_layer_projection = quantized_values(
            files, names.of_model(linear.name), linear, device)
        model.per_layer_norm = read(
            names.of_model(arch.per_layer_inputs.projection_norm)).to(device, dtype)
    # Allocate the 4-bit weights before anything temporary, else gaps between them would stay.
    shards = [None if plan.offload_params else zero_shard(model, i, device)
              for i in range(len(model.layers))]
    quiet = len(model.layers) < 3 or not (is_rank_0() and sys.stderr.isatty())
    bar = tqdm(shards, "load and quantize", unit="layer", leave=False, disable=quiet)
    for i, shard in enumerate(bar):
        if shard is None:
            shard = zero_shard(model, i, device)
        fill_layer(model, i, shard, files)
    model.norm, model.norm_bias = (name and read(name).to(device, dtype)
                                   for name in (names.norm, names.norm_bias))
    model.lm_head = model.embedding if arch.tied else table(names.lm_head, hidden)
    model.lm_head_bias = names.lm_head_bias and read(names.lm_head_bias).to(device, dtype)


def zero_shard(model: Model, i: int, device: torch.device) -> FourBitBlocks:
    """Return zeros for this rank's blocks of layer i."""
    layer: DecoderLayer = model.layers[i]
    local: FourBitBlocks = local_part(layer.packed_weights)
    return local.zeros_on(device)


def fill_layer(model: Model, i: int, shard: FourBitBlocks, files: StoredWeights) -> None:
    """Set layer i's 4-bit weights, written into `shard`, FourBitBlocks of zeros on the device; its
    norms and biases; and its small tensors, such as the experts' router. All ranks of the shard
    group must call this."""
    device = shard.device
    names = files.names
    layer: DecoderLayer = model.layers[i]
    local_linears = [(local, names.of_layer(i, f"{local.linear.name}.weight"))
                     for local in local_blocks(layer, model.shard_rank)]
    local_linears = copy_mxfp4(local_linears, shard, files)
    layer.nested = quantize(local_linears, shard, files, model)
    if model.plan.offload_params:
        shard = FourBitBlocks(pinned_copy(shard.packed), pinned_copy(shard.scales), device)
    set_local(layer, "packed_weights", shard)
    local_size = len(local_part(layer.vectors))
    vectors = torch.zeros(model.shard_group_size, local_size, dtype=files.dtype, device=device)
    for name, (where, _) in layer.spec.vectors.items():
        vectors.view(-1)[where] = files.read(names.of_layer(i, name)).to(device, files.dtype)
    set_local(layer, "vectors", vectors[model.shard_rank].clone())
    for name, shape in layer.spec.small_tensors.items():  # whole on every rank, not quantized
        if names.of_layer(i, name) in names.zeros:
            layer.small_tensors[name] = torch.zeros(shape, device=device)
            continue
        layer.small_tensors[name] = files.values(names.of_layer(i, name)).to(device).view(shape)


def quantize(
    local_linears: LocalLinears, shard: FourBitBlocks, files: StoredWeights, model: Model,
) -> NestedScales:
    """Quantize this rank's blocks of a layer to NF4 with double quantization, into `shard`,
    FourBitBlocks of zeros. Linears that are in NF4 in the files keep their bytes. Returns the
    layer's NestedScales. All ranks of the shard group must call this.

    Blocks of 64 weights are quantized independently, so they get the same bytes as in the whole
    tensor. The second level subtracts the mean absmax of the whole linear: all ranks gather the
    absmax, 4 bytes per 64 weights, and compute the same second level.
    """
    absmax = torch.zeros(len(shard), dtype=torch.float32, device=shard.device)
    nested, codebook = {}, scale_codebook(shard.device)  # {name: its (absmax, offset, codebook)}
    for local, name in local_linears:
        if name in files.nf4_states:
            nested[name] = copy_nf4(local, name, shard, files)
            continue
        rows = files.values(name, local.rows.start).flatten()
        weights = rows.to(shard.device, files.dtype)[local.weights]
        if len(weights):
            codes, state = bnb.functional.quantize_4bit(
                weights, blocksize=BLOCKSIZE, quant_type="nf4")
            shard.packed[local.in_shard].view(-1)[: codes.numel()] = codes.view(-1)
            absmax[local.in_shard] = state.absmax
    all_absmax = model.all_gather(absmax).view(-1)
    for local, name in local_linears:
        if name not in files.nf4_states:
            # a tensor of its own, because the rounding of a sum depends on where a tensor begins
            whole = all_absmax[local.linear.blocks].clone()
            whole -= (offset := whole.mean())
            codes, state = bnb.functional.quantize_blockwise(
                whole, codebook, blocksize=NESTED_BLOCKSIZE)
            shard.scales[local.in_shard, 0] = codes[local.in_linear]
            nested[name] = state.absmax, offset, codebook
    parts = [nested[name] for _, name in local_linears]
    return NestedScales(
        absmax=torch.cat([absmax for absmax, _, _ in parts]),
        offsets=torch.stack([offset for _, offset, _ in parts]),
        scale_codebooks=torch.stack([codebook for _, _, codebook in parts]))


def copy_mxfp4(
    local_linears: LocalLinears, shard: FourBitBlocks, files: StoredWeights,
) -> LocalLinears:
    """Copy this rank's blocks of the linears that are in MXFP4 in the files into `shard`. Returns
    the other linears."""
    for local, name in local_linears:
        if local.linear.mxfp4:
            first = local.weights.start // BLOCKSIZE  # read() returns whole rows
            blocks = slice(first, first + local.in_linear.stop - local.in_linear.start)
            packed = files.read(f"{name}_blocks").view(-1, BLOCKSIZE // 2)[blocks]
            shard.packed[local.in_shard] = swap_nibbles(packed)
            scales = files.read(f"{name}_scales").view(-1, BLOCKSIZE // MXFP4_BLOCKSIZE)[blocks]
            shard.scales[local.in_shard] = scales
    return [(local, name) for local, name in local_linears if not local.linear.mxfp4]


def copy_nf4(
    local: LocalBlocks, name: str, shard: FourBitBlocks, files: StoredWeights,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy this rank's blocks of a linear that is in NF4 in the files into `shard`. Returns the
    linear's (absmax, offset, codebook) for NestedScales."""
    read = files.read
    state = files.nf4_states[name]
    codes = read(name)
    shard.packed[local.in_shard].view(-1)[: codes.nbytes] = codes.view(torch.uint8)
    shard.scales[local.in_shard, 0] = read(f"{name}.absmax")
    offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=shard.device)
    return read(f"{name}.nested_absmax"), offset, read(f"{name}.nested_quant_map")


def quantized_values(
    files: StoredWeights, name: str, linear: LinearShape, device: torch.device,
) -> torch.Tensor:
    """Return a whole linear outside of the layers, [out, in], with the values that its NF4 has."""
    shape = linear.out_features, linear.in_features
    weight = files.values(name).to(device, files.dtype).view(shape)
    if name in files.nf4_states:
        return weight
    return nf4_round_trip(weight)


def verify_model(model: Model) -> None:
    """Assert that loading and sharding were complete, and log the bytes per rank. All ranks must
    call this."""
    uses_fsdp, n_bytes = model.plan.uses_fsdp, collections.Counter()
    for i, layer in enumerate(model.layers):
        for name, p in layer.named_parameters():
            local = local_part(p)
            assert isinstance(p, DTensor) == uses_fsdp, (
                f"layer {i}: {name} is{' not' * uses_fsdp} FSDP2's")
            assert not local.is_meta, f"layer {i}: {name} was not loaded"
            assert p.requires_grad == (name == "adapter"), f"layer {i}: {name} {p.requires_grad=}"
            n_shards = p.device_mesh["shard"].size() if isinstance(p, DTensor) else 1
            assert len(local) * n_shards == len(p), f"layer {i}: {name} is not sharded evenly"
            parts = [local.packed, local.scales] if isinstance(local, FourBitBlocks) else [local]
            kind = {"packed_weights": "4-bit", "vectors": "other frozen"}.get(name, "adapter")
            n_bytes[kind] += sum(part.nbytes for part in parts)
            if parts[0].is_cpu and torch.cuda.is_available():
                n_bytes["of these on the host"] += sum(part.nbytes for part in parts)
        n_bytes["other frozen"] += sum(t.nbytes for t in layer.small_tensors.values())
    tables = {id(t): t.nbytes for t in (
        model.embedding, model.lm_head, model.lm_head_bias, model.norm, model.norm_bias,
        model.per_layer_table, model.per_layer_projection, model.per_layer_norm) if t is not None}
    n_bytes["other frozen"] += sum(tables.values())
    log_debug_each_rank(
        "weights, GiB", ", ".join(f"{kind} {n / 2**30:.3f}" for kind, n in n_bytes.items()))
