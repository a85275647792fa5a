"""BaseModelInfo: config, architecture and tokenizer of the model to train, without its weights.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import transformers

from fsdp_qlora.config import Config
from fsdp_qlora.data.load_tokenizer import load_tokenizer
from fsdp_qlora.data.trainable_tokens import TrainableToken, add_trainable_tokens
from fsdp_qlora.files import json_digest
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.model_directory import base_digest, find_model, read_model_config
from fsdp_qlora.ranks import raise_on_all_ranks
from fsdp_qlora.run.resolve import resolve_max_seq_len


@dataclasses.dataclass(frozen=True)
class BaseModelInfo:
    """A base model without its weights, which may not be downloaded yet."""

    directory: Path
    model_config: transformers.PreTrainedConfig
    arch: Architecture
    tokenizer: transformers.PreTrainedTokenizerFast | None  # None: there is no text
    trainable_tokens: tuple[TrainableToken, ...]

    @property
    def trainable_ids(self) -> list[int]:
        return [token.id for token in self.trainable_tokens]

    @property
    def has_new_tokens(self) -> bool:
        """Whether --trainable_tokens names tokens that the vocabulary lacked."""
        return any(token.old_ids is not None for token in self.trainable_tokens)


def read_model_info(config: Config, name: str) -> tuple[Config, BaseModelInfo]:
    """Read all but the weights of a model, a directory or a Hub id. Returns the flags with
    --max_seq_len filled in, and the model. All ranks must call this."""
    needs = "tokenizer" if config.dataset or not config.random_weights else "config"
    if Path(name).is_dir() and not config.random_weights:
        needs = "weights"
    with raise_on_all_ranks():
        directory = find_model(name, needs)
        model_config, arch = read_model_config(directory, config)
        config = resolve_max_seq_len(config, model_config, arch)
        tokenizer = load_tokenizer(directory, config)
        tokens = ()
        if config.trainable_tokens:
            if not tokenizer:
                raise ValueError("--trainable_tokens needs a tokenizer, and there is none without"
                                 " a --dataset")
            tokens = add_trainable_tokens(tokenizer, config.trainable_tokens)
            arch = arch.with_token(tokens[-1].id)
    return config, BaseModelInfo(directory, model_config, arch, tokenizer, tokens)


def fetch_weights(config: Config, directory: Path, name: str, is_dry_run: bool) -> tuple[Path, str]:
    """Return the directory of the model's weights, downloaded if necessary, and the digest by which
    a resumed run recognizes them. The digest is "" in a dry run without weights."""
    if config.random_weights:
        return directory, json_digest(str(directory))
    if is_dry_run and not any(directory.glob("*.safetensors")):
        return directory, ""
    directory = find_model(name, "weights")
    return directory, base_digest(directory)
