"""The forward of the whole model, and DoRA's norms of weights.

parameters.py has what it holds, lm_head.py the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp_qlora.kernels.dropout import EMBEDDING_SITE, drop
from fsdp_qlora.kernels.heads import rope_tables
from fsdp_qlora.layer.call import LayerInputs
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.offload import DeviceActivations
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.micro_batch.segments import document_segments
from fsdp_qlora.model.embedding import embed
from fsdp_qlora.model.fsdp import gathered
from fsdp_qlora.model.lm_head import LinearCrossEntropy, final_norm
from fsdp_qlora.model.parameters import ModelParameters
from fsdp_qlora.model.per_layer_inputs import per_layer_inputs
from fsdp_qlora.ranks import RunEnd


class Model(ModelParameters):
    """The model's parameters and its forward. The forward of a MicroBatch returns this rank's token
    losses, see LinearCrossEntropy; without wants_loss, the inputs of the lm_head [tokens, hidden].
    """

    def forward(self, batch: MicroBatch, wants_loss: bool = True) -> Tensor:
        x = self.hidden(batch)
        if wants_loss:
            lm_head_rows = self.token_rows.rows[-1] if self.token_rows else None
            return LinearCrossEntropy.apply(x, self, batch, lm_head_rows)
        return final_norm(self, x, is_evaluation=True)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return the last layer's output [tokens, hidden]."""
        x = embed(self, batch.input_ids)
        inputs = self._layer_inputs(batch, x)
        dropout = self.arch.embedding_dropout
        if dropout and batch.dropout_seeds is not None:
            x = drop(x, batch.dropout_seeds, EMBEDDING_SITE, dropout)
        # {index of a layer: the keys and values that it shares; [] if it shares none}
        shared_kv: dict[int | None, list[Tensor]] = {None: []}
        for layer in self.layers:
            x, *shared_kv[layer.index] = layer(x, inputs, *shared_kv[layer.kv_source])
        return x

    def _layer_inputs(self, batch: MicroBatch, embedded: Tensor) -> LayerInputs:
        """Return the LayerInputs of a micro-batch. `embedded`: its embeddings, before dropout."""
        return LayerInputs(
            batch,
            attention_kernels=(
                self.kernels.varlen if batch.is_varlen else self.kernels.fixed_len),
            recurrence=self.kernels.recurrence,
            store=self.store if torch.is_grad_enabled() else DeviceActivations(),
            rope_tables={rope_index: rope_tables(self.arch, self.frequencies, batch, rope_index)
                         for rope_index in (None, *range(len(self.arch.ropes)))},
            segments=None if batch.context_shard else document_segments(
                batch.cu_seqlens, batch.lengths, batch.max_seqlen, batch.dropout_seeds),
            per_layer_inputs=(per_layer_inputs(self, batch.input_ids, embedded)
                              if self.arch.per_layer_inputs else None))


@torch.no_grad()
def measure_weight_norms(model: Model) -> None:
    """Compute, for DoRA, the norms of the rows of all adapted weights, fp32. Raises RunEnd if a
    row is 0. All ranks must call this."""
    for layer in model.layers:
        with gathered(layer):
            no_adapter = layer.vectors.new_zeros(layer.spec.n_adapter_values)
            for fused in layer.spec.fused_linears:
                if fused.lora_width:
                    weight = dequantize(layer, fused, no_adapter)[:, : fused.in_features]
                    norms = torch.cat([rows.float().norm(dim=1) for rows in weight.split(4096)])
                    for linear in fused.adapted:
                        name = linear.name
                        row_norms = norms[linear.outputs]
                        if not row_norms.all():  # PEFT would compute NaN, too
                            raise RunEnd(
                                f"--adapter dora: row {int(row_norms.argmin())} of {name} in"
                                f" layer {layer.index} is all 0, and DoRA divides by its norm: use"
                                " --adapter lora, or leave this linear out of --target_modules")
                        layer.weight_norms[name] = row_norms
