"""The weights that this rank owns, and the rows of the files that it must read for them.

load.py reads them and fills this rank's shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection

from fsdp_qlora.layer.layer import DecoderLayer
from fsdp_qlora.layer.linears import LinearSlices
from fsdp_qlora.model.fsdp import local_part
from fsdp_qlora.model.parameters import ModelParameters
from fsdp_qlora.pretrained.reader import ReadRequest, StackedSlice
from fsdp_qlora.pretrained.tensor_names import TensorNames
from fsdp_qlora.pretrained.weight_formats import NF4_SUFFIXES, scale_block
from fsdp_qlora.quant.blocks import BLOCKSIZE, MXFP4_BLOCKSIZE


@dataclasses.dataclass(frozen=True)
class LocalBlocks:
    """The 4-bit blocks of one linear that this rank stores; perhaps none."""

    linear: LinearSlices
    in_linear: slice  # counted from the linear's first block
    in_shard: slice  # counted from the first block of this rank's shard of `packed_weights`

    @property
    def rows(self) -> range:
        """The rows of the weight that contain these blocks."""
        n_out, n_in = self.linear.out_features, self.linear.in_features
        stop = min(math.ceil(self.in_linear.stop * BLOCKSIZE / n_in), n_out)
        return range(self.in_linear.start * BLOCKSIZE // n_in, stop)

    @property
    def weights(self) -> slice:
        """Slice into the flat tensor of `rows`: exactly the weights of these blocks."""
        start = self.in_linear.start * BLOCKSIZE % self.linear.in_features
        return slice(start, start + (self.in_linear.stop - self.in_linear.start) * BLOCKSIZE)


def local_blocks(layer: DecoderLayer, shard_rank: int) -> list[LocalBlocks]:
    """Return the LocalBlocks of each linear of a layer, for this rank of a shard group.

    The linears lie end to end, and the whole is cut into equal shards. In a Llama-3-8B shared by
    two ranks, rank 0 has q, k, v, o, gate and a seventh of up, rank 1 the rest of up and down. The
    slices are empty for a linear that is in other shards only. FSDP2 cuts at the same places,
    because LayerParameters pads its parameters to shards of one size.
    """
    n = len(local_part(layer.packed_weights))
    first = shard_rank * n
    blocks = []
    for linear in layer.spec.linears:
        whole = linear.blocks
        start, stop = (min(max(i, whole.start), whole.stop) for i in (first, first + n))
        in_linear = slice(start - whole.start, stop - whole.start)
        blocks.append(LocalBlocks(linear, in_linear, slice(start - first, stop - first)))
    return blocks


def weight_requests(
    model: ModelParameters, names: TensorNames, nf4_states: Collection[str]
) -> list[ReadRequest]:
    """Return the ReadRequests for all that this rank reads, in the order of use. `nf4_states`: the
    names of the weights that are in NF4 in the files, see check_files()."""
    arch = model.arch
    table = (arch.vocab_size - arch.added_rows, arch.hidden_size)
    rows = model.local_rows
    stored_rows = range(min(rows.start, table[0]), min(rows.stop, table[0]))
    requests = [ReadRequest(names.embedding, table, stored_rows)]
    if arch.per_layer_inputs:
        linear = arch.per_layer_inputs.projection_linear(arch.hidden_size, arch.n_layers)
        name = names.of_model(linear.name)
        shape = (linear.out_features, linear.in_features)
        requests.append(ReadRequest(names.of_model(arch.per_layer_inputs.table),
                                    (arch.vocab_size, linear.out_features), model.local_rows))
        requests += whole_requests(name, shape, name in nf4_states)
        requests += whole_requests(
            names.of_model(arch.per_layer_inputs.projection_norm), (arch.per_layer_inputs.size,))
    for i, layer in enumerate(model.layers):
        for local in local_blocks(layer, model.shard_rank):
            name = names.of_layer(i, f"{local.linear.name}.weight")
            requests += linear_requests(local, name, names, name in nf4_states)
        shapes = {name: shape for name, (_, shape) in layer.spec.vectors.items()}
        for name, shape in (shapes | layer.spec.small_tensors).items():
            name = names.of_layer(i, name)
            if name in names.zeros:
                continue
            requests += whole_requests(name, shape, name in nf4_states, names.sources.get(name))
    for name in filter(None, (names.norm, names.norm_bias)):
        requests += whole_requests(name, table[1:])
    if not arch.tied:
        requests.append(ReadRequest(names.lm_head, table, stored_rows))
    if names.lm_head_bias:
        requests.append(ReadRequest(names.lm_head_bias, table[:1], stored_rows))
    return requests


def linear_requests(
    local: LocalBlocks, name: str, names: TensorNames, in_nf4: bool
) -> list[ReadRequest]:
    """Return the ReadRequests for this rank's blocks of a linear: whole rows, in FP8, INT4 and
    MXFP4 with their scales; in NF4 the packed codes, their scales, and the whole second level of
    these scales."""
    linear, blocks = local.linear, local.in_linear
    n_out, n_in = linear.out_features, linear.in_features
    if linear.mxfp4:
        widths = {f"{name}_blocks": n_in // 2, f"{name}_scales": n_in // MXFP4_BLOCKSIZE}  # bytes
        return [ReadRequest(key, (n_out, width), local.rows, names.sources.get(key))
                for key, width in widths.items()]
    if in_nf4:
        n_bytes = n_out * n_in // 2
        half = BLOCKSIZE // 2
        packed = range(blocks.start * half, min(blocks.stop * half, n_bytes))
        n_blocks = local.linear.blocks.stop - local.linear.blocks.start
        return [
            ReadRequest(name, (n_bytes,), packed),
            ReadRequest(f"{name}.absmax", (n_blocks,), range(blocks.start, blocks.stop)),
            *(ReadRequest(f"{name}.{part}", (1,), range(1))
              for part in ("nested_absmax", "nested_quant_map"))]
    requests = [ReadRequest(name, (n_out, n_in), local.rows, names.sources.get(name))]
    if scales := names.scaled.get(name):
        n, _ = scale_block(name)
        rows = range(local.rows.start // n, math.ceil(local.rows.stop / n))
        requests.append(ReadRequest(scales, names.shapes[scales], rows))
    return requests


def whole_requests(
    name: str, shape: tuple[int, ...], in_nf4: bool = False, source: StackedSlice | None = None,
) -> list[ReadRequest]:
    """Return the ReadRequests for a tensor that each rank reads whole."""
    if in_nf4:
        keys = name, *(f"{name}.{part}" for part in NF4_SUFFIXES)
        return [ReadRequest(key, (1,), range(1)) for key in keys]
    shape = shape or (1,)  # a single number
    return [ReadRequest(name, shape, range(shape[0]), source)]
