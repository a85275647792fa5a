"""Write a tokenizer's files so that they load as the tokenizer used in training, with its template.

load_tokenizer.py reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.data.chat import closing_tokens
from fsdp_qlora.data.load_tokenizer import PROBES, tokens, trial_texts
from fsdp_qlora.data.template import read_template, set_template
from fsdp_qlora.files import read_json, remove
from fsdp_qlora.log import log
from fsdp_qlora.pretrained.model_directory import copy_small_files

TOKENIZER_FILES = ["*token*.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.*"]
# files that may have a chat template in the key chat_template
TEMPLATE_FILES = "tokenizer_config.json", "processor_config.json", "chat_template.json"
# two names of the class that reads tokenizer.json as it is; transformers 4 lacks the second
PLAIN_CLASS, NEW_NAME = "PreTrainedTokenizerFast", "TokenizersBackend"


def write_tokenizer(directory: Path, weights_dir: Path, tokenizer: PreTrainedTokenizerFast,
                    has_new_tokens: bool = False) -> None:
    """Write the tokenizer into an empty directory: the base's own files, if tokenizer.json is one
    of them and no token was added. The chat template used in training becomes the only one."""
    if (weights_dir / "tokenizer.json").is_file() and not has_new_tokens:
        copy_small_files(weights_dir, directory, TOKENIZER_FILES)
    else:
        tokenizer.save_pretrained(directory)
    write_only_template(directory, tokenizer.chat_template)
    name_class(directory, tokenizer)


def complete_tokenizer(directory: Path, template: Path | None) -> None:
    """Adapt the tokenizer files that a merged model's directory has from its base, so that they
    load as the tokenizer used in training, with the chat template in the file `template`; None:
    with the base's."""
    if (directory / "tokenizer.json").is_file():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
        set_template(tokenizer, directory, str(template) if template else None)
        write_only_template(directory, tokenizer.chat_template)
        name_class(directory, tokenizer)
    elif template:
        write_only_template(directory, read_template(template))


def write_only_template(directory: Path, template: str | dict[str, str] | None) -> None:
    """Make `template`, one text or several by name, the only one in a directory that was written.
    Readers differ in where they look first: transformers in chat_template.jinja, its processors in
    chat_template.json, llama.cpp's converter in tokenizer_config.json."""
    jinja = directory / "chat_template.jinja"
    named = directory / "additional_chat_templates"
    with_template = {}
    for path in (directory / name for name in TEMPLATE_FILES):
        if "chat_template" in (settings := read_json(path, {})):
            with_template[path.name] = settings.pop("chat_template"), path, settings
    has_files = jinja.exists() or named.exists()
    if not template or isinstance(template, dict) and not has_files:
        return  # several templates by name may all be in tokenizer_config.json
    if not has_files and [(key, value) for key, (value, *_) in with_template.items()] == [
            ("tokenizer_config.json", template)]:
        return
    for name, (_, path, settings) in with_template.items():
        if name == "chat_template.json":
            path.unlink()
        else:
            path.write_text(json.dumps(settings, indent=2))
    if isinstance(template, str):
        remove(named)
        jinja.write_text(template, encoding="utf-8")


def name_class(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Make AutoTokenizer load the tokens of `tokenizer` from a directory that was written and that
    has the base's tokenizer_config.json. Unless the class named there does so, name
    PreTrainedTokenizerFast, which does in all versions."""
    path = directory / "tokenizer_config.json"
    version = transformers.__version__
    settings = read_json(path, {})
    named = settings.get("tokenizer_class")
    if named == PLAIN_CLASS and not (directory / "config.json").is_file():
        return  # with a config.json, the type of the model may take precedence
    taken, text = autotokenizer_difference(directory, tokenizer)
    is_taken = named == PLAIN_CLASS or named and named.removesuffix("Fast") == taken
    if text is None and is_taken and named != NEW_NAME:
        return
    settings.pop("auto_map", None)  # remote code
    settings["tokenizer_class"] = PLAIN_CLASS
    path.write_text(json.dumps(settings, indent=2))
    why = f"transformers {version} does not take it for a {named}"
    if text is not None:
        why = f"{named or taken} of transformers {version} makes other tokens of {text[:60]!r}"
        if autotokenizer_difference(directory, tokenizer)[1] is not None:
            why += ", and AutoTokenizer still does, for this type of model: load it by this class"
    if text is not None or named not in (None, NEW_NAME):
        log(f"note: tokenizer saved as {PLAIN_CLASS}, because {why}")


def autotokenizer_difference(
    directory: Path, tokenizer: PreTrainedTokenizerFast
) -> tuple[str, str | None]:
    """Return the class that AutoTokenizer chooses, and a text that it tokenizes differently from
    `tokenizer`; None if there is none."""
    try:
        auto: Any = AutoTokenizer.from_pretrained(
            directory, mistral_format=False, trust_remote_code=False)
        return type(auto).__name__, next((text for text in trial_texts(tokenizer) if tokens(
            auto, text) != tokens(tokenizer, text)), None)
    except Exception:  # any kind of error, such as a missing class or package
        return "AutoTokenizer", PROBES[0]


def generation_settings(
    directory: Path, tokenizer: PreTrainedTokenizerFast,
) -> tuple[dict[str, Any], list[str] | None]:
    """Return the model's generation_config.json, with the tokens that end a turn in training added
    to its eos_token_id; and the added tokens, or None if eos_token_id has them already."""
    config = read_json(directory / "config.json", {})
    config = {**config, **(config.get("text_config") or {})}
    keys = "bos_token_id", "eos_token_id", "pad_token_id"
    settings = {key: config[key] for key in keys if config.get(key) is not None}
    settings |= read_json(directory / "generation_config.json", {})
    ids = settings.get("eos_token_id", [])
    ids = ids if isinstance(ids, list) else [ids]
    closing = {tokenizer.convert_tokens_to_ids(token): token for token in closing_tokens(tokenizer)}
    new = {token_id: token for token_id, token in closing.items() if token_id not in ids}
    return {**settings, "eos_token_id": [*ids, *new]}, list(new.values()) or None
