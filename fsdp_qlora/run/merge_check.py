"""MergeCheck: inputs of the lm_head recorded in training, by which a merge is checked.

checkpoints.py writes them, merge/compare_logits.py makes logits of them for merge_adapters.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.packing import pack_rows
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.lora.adapter import Adapter
from fsdp_qlora.lora.peft_names import token_row_names
from fsdp_qlora.micro_batch.context_parallel import ONLY_PROCESS
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.model.model import Model

CHECK_ROWS, CHECK_TOKENS = 4, 64  # the first rows, and the first tokens of each


class MergeCheck:
    """The first tokens of a few rows, and the lm_head's inputs for them without the adapter."""

    def __init__(self, rows: Rows) -> None:
        documents = rows.as_documents()
        first = documents.select(torch.arange(min(CHECK_ROWS, len(documents))))
        self.rows = dataclasses.replace(first, lengths=first.lengths.clamp(max=CHECK_TOKENS))
        self.input_ids = [self.rows.document(i)[0].tolist() for i in range(len(self.rows))]
        # until record_without_adapter()
        self.without_adapter = self.initial_lm_head_rows = torch.empty(0)

    def record_without_adapter(self, model: Model, adapter: Adapter) -> None:
        """Record the lm_head's inputs without the adapter. All ranks must call this."""
        if model.token_rows:
            self.initial_lm_head_rows = adapter.initial_token_rows[-1].cpu()
        with no_adapter(adapter):
            self.without_adapter = self.lm_head_inputs(model)

    def tensors(self, model: Model) -> dict[str, torch.Tensor]:
        """Return what a merge is checked by: the lm_head's inputs, {"with_adapter": as they are
        now, "without_adapter": from record_without_adapter()}; and with --trainable_tokens the
        lm_head's rows of these tokens, rows_with_adapter and rows_without_adapter [tokens, hidden].
        All ranks must call this."""
        inputs = {"with_adapter": self.lm_head_inputs(model),
                  "without_adapter": self.without_adapter}
        if trained := model.token_rows:
            inputs["rows_with_adapter"] = trained.rows[-1].cpu()
            inputs["rows_without_adapter"] = self.initial_lm_head_rows
        return inputs

    @torch.no_grad()
    def lm_head_inputs(self, model: Model) -> torch.Tensor:
        """Return the lm_head's inputs for all tokens, one row after the other, [tokens, hidden] on
        the CPU. All ranks must call this.

        Each rank computes the same rows. Nothing is compiled for them: that would take longer than
        everything else, and could change the kernels of training and evaluation.
        """
        state_of_row, rows = {}, self.rows
        with torch.compiler.set_stance("force_eager"):
            # each rank computes whole rows, with context parallelism too
            micro_batch_format = model.micro_batch_format._replace(context_group=ONLY_PROCESS)
            n_tokens = max(micro_batch_format.max_tokens, int(rows.lengths.max()))
            for micro_step in pack_rows(rows.lengths.tolist(), 1, n_tokens):
                micro_batch = make_micro_batch(rows, micro_step, micro_batch_format)
                hidden_states = model(micro_batch, wants_loss=False).cpu()
                state_of_row.update(zip(  # padding is after the rows
                    micro_step[0], hidden_states.split(micro_batch.lengths)))
        reshard_all(model)
        return torch.cat([state_of_row[i] for i in range(len(rows))])


@contextlib.contextmanager
def no_adapter(adapter: Adapter) -> Iterator[None]:
    """Disable the adapter in the `with` body: B is 0, DoRA's magnitudes are the norms of the
    weights' rows, and the rows of --trainable_tokens are as they began."""
    weights = adapter.weights.data.clone()
    for i, layer in enumerate(adapter.layers):  # B is 0, so any A gives the base model
        adapter.set_layer(i, adapter.initial_values(i, layer, seed=0))
    adapter.set_token_rows(dict(zip(token_row_names(adapter.arch), adapter.initial_token_rows)))
    yield
    adapter.set_weights(weights)
