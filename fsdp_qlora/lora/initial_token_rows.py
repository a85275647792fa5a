"""The values with which the rows of --trainable_tokens begin."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_qlora.data.trainable_tokens import TrainableToken
from fsdp_qlora.log import log
from fsdp_qlora.model.embedding import look_up_sharded
from fsdp_qlora.model.parameters import ModelParameters


def initial_token_rows(model: ModelParameters, tokens: Sequence[TrainableToken],
                       untrained: Collection[int]) -> Tensor:
    """Return the first values of TokenRows.rows, fp32 [tables, tokens, hidden].

    A token that the model knows keeps its rows. A new one begins as the mean of the tokens that its
    text was made of before; a new one of no tokens, or one whose row was never trained (in
    `untrained`), as the mean of all rows. Rows that pad a table get that mean, too. All ranks of
    the shard group must call this.
    """
    if not tokens:
        return torch.empty(0)
    tables = []
    for table in (model.embedding, model.lm_head)[: model.arch.n_token_tables]:
        mean, rows = fill_added_rows(model, table), []
        for token in tokens:
            ids = (token.id,) if token.old_ids is None else token.old_ids
            if token.id in untrained and token.old_ids is None:
                ids = ()
            rows.append(look_up_sharded(model, torch.tensor(ids, device=model.device), table)
                        .double().mean(0) if ids else mean)
        tables.append(torch.stack(rows).float())
    log_trainable_tokens(tokens, untrained)
    return torch.stack(tables)


def fill_added_rows(model: ModelParameters, table: Tensor) -> Tensor:
    """Set the rows of a table that the files lack to the mean of the others, and return that mean,
    fp64 [hidden]. All ranks of the shard group must call this."""
    n_stored = model.arch.vocab_size - model.arch.added_rows
    n_own = max(0, min(n_stored, model.local_rows.stop) - model.local_rows.start)
    total = torch.zeros(table.shape[1], dtype=torch.float64, device=model.device)
    for part in table[:n_own].split(2**14):
        total += part.to(model.device).double().sum(0)
    if model.shard_group_size > 1:
        dist.all_reduce(total, group=model.shard_group)
    mean = total / n_stored
    table[n_own:] = mean.to(table)
    return mean


def log_trainable_tokens(tokens: Sequence[TrainableToken], untrained: Collection[int]) -> None:
    """Log which tokens are trained, and how the rows of tokens unknown to the model begin."""
    new = [token.text for token in tokens if token.old_ids]
    blank = [token.text for token in tokens
             if not (token.old_ids or token.old_ids is None and token.id not in untrained)]
    text = f"trainable tokens: {' '.join(token.text for token in tokens)}"
    if new:
        text += f"; {' '.join(new)} new, as the mean of the tokens of the text"
    if blank:
        text += f"; {' '.join(blank)} untrained until now, as the mean of all rows"
    log(text)
