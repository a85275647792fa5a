"""The tokens of --trainable_tokens; those that the vocabulary lacks are added to the tokenizer.

model/token_rows.py trains their rows of the embedding and of the lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.load_tokenizer import plain_tokens


class TrainableToken(NamedTuple):
    """A token whose rows are trained."""

    text: str
    id: int
    # the tokens that its text was made of before it was added; None if the vocabulary had it
    old_ids: tuple[int, ...] | None


def add_trainable_tokens(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str],
) -> tuple[TrainableToken, ...]:
    """Return the TrainableTokens with these texts, by id; the tokenizer gets those that it lacks.

    A new token of the form <|..|> is special: texts for people leave it out, and it can end an
    answer. The others stay in such texts, as <tool_call> must.
    """
    known = tokenizer.get_vocab()
    old_ids = dict[str, tuple[int, ...]]()
    for text in texts:
        if text not in known:
            ids = plain_tokens(tokenizer, text)
            old_ids[text] = tuple(i for i in ids if i != tokenizer.unk_token_id)
    for text in old_ids:
        is_special = bool(re.fullmatch(r"<\|.+\|>", text))
        tokenizer.add_tokens([AddedToken(text, special=is_special, normalized=False)])
    ids_of_texts = tokenizer.get_vocab()
    found = {TrainableToken(text, ids_of_texts[text], old_ids.get(text)) for text in texts}
    return tuple(sorted(found, key=lambda token: token.id))
