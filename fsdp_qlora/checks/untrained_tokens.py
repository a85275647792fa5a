"""Find tokens in the data that the frozen lm_head has never learned.

No adapter can make the model write them: a base model with its instruct model's template would
never stop.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F

from fsdp_qlora.data.chat import closing_tokens
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.log import log
from fsdp_qlora.model.model import Model
from fsdp_qlora.ranks import raise_on_all_ranks
from fsdp_qlora.run.base_model import BaseModelInfo


ZERO, SMALL = 1e-3, 0.1  # times the median over all tokens; random and trained rows are above 0.3
ZERO_ROW = "a row of zeros"
VALUES_AT_ONCE = 2**22  # labels or weights that are read at once


def find_untrained_tokens(model: Model) -> dict[int, str]:
    """Return the tokens whose rows of the lm_head were never trained, {token: the evidence in
    words}. All ranks of the shard group must call this."""
    vocab_size, lm_head = model.arch.vocab_size, model.lm_head
    size = math.ceil(vocab_size / model.shard_group_size)

    def gather(own: torch.Tensor) -> torch.Tensor:
        """Return [vocabulary, ..] on the CPU from every rank's own rows [rows, ..]."""
        own = F.pad(own, (0, 0) * (own.dim() - 1) + (0, size - len(own)))
        return model.all_gather(own).flatten(0, 1)[:vocab_size].cpu()

    parts = lm_head.split(max(1, VALUES_AT_ONCE // lm_head.shape[1]))
    total = sum(part.float().sum(0) for part in parts)
    mean = model.all_gather(total).sum(0) / vocab_size
    norms = gather(torch.cat([part.float().norm(dim=1) for part in parts]))
    distances = gather(torch.cat([(part.float() - mean).norm(dim=1) for part in parts]))
    # the first 16 bytes of a row differ from those of all other rows, unless both are untrained
    keys = gather(lm_head[:, : 16 // lm_head.itemsize].contiguous().view(torch.int64))
    _, group, n_alike = keys.unique(dim=0, return_inverse=True, return_counts=True)
    n_alike, found = n_alike[group], dict[int, str]()
    for name, sizes in ("the mean of all rows", distances), ("a tiny row", norms):
        small = sizes < SMALL * sizes.median()
        found |= dict.fromkeys(small.nonzero().view(-1).tolist(), name)
    found |= {i: f"the same row as {n_alike[i] - 1} of the others"
              for i in (n_alike > 1).nonzero().view(-1).tolist()}
    zero = norms <= ZERO * norms.median()
    return found | dict.fromkeys(zero.nonzero().view(-1).tolist(), ZERO_ROW)


def check_untrained_tokens(model: Model, rows: Rows, base: BaseModelInfo) -> dict[int, str]:
    """Return find_untrained_tokens(), {} if there is no text. Raises RunEnd if a token that ends
    answers in training has a row of zeros in the lm_head, and logs the other tokens in the loss
    that the lm_head has never learned; except for those of --trainable_tokens. All ranks must call
    this."""
    if not (tokenizer := base.tokenizer):
        return {}
    untrained = find_untrained_tokens(model)
    counts = loss_token_counts(rows, base.arch.vocab_size)
    frozen = {i: why for i, why in untrained.items() if i not in base.trainable_ids}
    zero = {i for i, why in frozen.items() if why == ZERO_ROW}
    with raise_on_all_ranks():
        for token in (*closing_tokens(tokenizer), tokenizer.eos_token):
            i = tokenizer.convert_tokens_to_ids(token)
            if counts[i] and i in zero:
                raise ValueError(
                    f"the model never learned {token!r}, which ends answers {counts[i]:,} times in"
                    " training: its row of the lm_head is all zeros and stays frozen, so generation"
                    f" would never stop. Use --trainable_tokens {token!r}, the instruct model, or a"
                    " --chat_template with other tokens")
    found = [i for i in np.argsort(-counts, kind="stable").tolist() if counts[i] and i in frozen]
    if found:
        named = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({frozen[i]}, {counts[i]:,}"
                          " times in the loss)" for i in found[:5])
        more = f" and {len(found) - 5:,} more" if len(found) > 5 else ""
        log("warning: your data has tokens in the loss that the frozen lm_head never learned:"
            f" {named}{more}. The model will hardly ever generate them. Name them in"
            " --trainable_tokens, or use the instruct model or a chat template with other tokens")
    return untrained


def loss_token_counts(rows: Rows, vocab_size: int) -> np.ndarray:
    """Return how often each token is in the loss, [vocabulary]."""
    counts = np.zeros(vocab_size, np.int64)
    for labels in rows.labels:
        for start in range(0, len(labels), VALUES_AT_ONCE):
            part = labels[start : start + VALUES_AT_ONCE]
            counts += np.bincount(part[part >= 0], minlength=vocab_size)
    return counts
