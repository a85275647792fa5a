"""Load the tokenizer so that its tokens are those of the model's own tokenizer.json, and check it.

transformers' AutoTokenizer builds many tokenizers anew instead, by rules of the class that
tokenizer_config.json or the type of the model names: of a file for another class the spaces may be
lost. The class PreTrainedTokenizerFast takes the file as it is, and tokenizer_config.json for the
names of special tokens and the chat template.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.data.template import set_template
from fsdp_qlora.errors import errors_about
from fsdp_qlora.files import read_json
from fsdp_qlora.log import log


PROBES = (  # texts on which tokenizers differ: spaces, lines, digits, case, scripts, normal forms
    "It is sunny and warm.", "  two spaces around  ", "one  two   three\ttabs\t\t.", "",
    "def f(x):\n    return {'a': [x, 2.50]}  # 1234567\n\n\n\tend\r\n\r\n",
    "I'm, DON'T, we'LL HTTPServer", "naïve café e\u0301 Straße ﬁ Ａ ½",
    "日本語 한국어 русский العربية हिन्दी", "🙂👩\u200d💻 a\u00a0b\u2003c\u3000d\u0000")
N_DOCUMENTS, N_TOKENS = 16, 1024  # documents of the run that are checked, and tokens of each
# other files from which transformers can make a tokenizer
VOCABULARIES = "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model"


def load_tokenizer(directory: Path, config: Config) -> PreTrainedTokenizerFast | None:
    """Return the model's tokenizer, with --chat_template; None if there is no text."""
    if config.random_weights and not config.dataset:
        return None
    if (directory / "tokenizer.json").is_file():
        with errors_about(f"{directory}: its tokenizer cannot be loaded"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    else:
        tokenizer = make_tokenizer(directory, config.model or str(directory))
    set_template(tokenizer, directory, config.chat_template)
    return tokenizer


def make_tokenizer(directory: Path, model: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer that transformers makes from a model's vocabulary if there is no
    tokenizer.json. `model`: the directory or its Hub id, by which transformers recognizes some
    models."""
    found = [name for name in VOCABULARIES if (directory / name).is_file()]
    if not found:
        raise ValueError(f"{directory}: has no tokenizer.json")
    if found[0] == "tokenizer.model" and not importlib.util.find_spec("sentencepiece"):
        # transformers' error names tiktoken, which cannot read this file
        raise ValueError(f"{directory}: has a tokenizer.model and no tokenizer.json, which needs a"
                         " package: pip install sentencepiece")
    where = {} if Path(model).is_dir() else {"revision": directory.name, "local_files_only": True}
    with errors_about(f"{directory}: its tokenizer cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(
            model if where else directory, **where, mistral_format=False, trust_remote_code=False)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"{directory}: its tokenizer has no fast version (tokenizer.json)")
    compared = "cannot be compared with it"
    if found[0] == "tokenizer.model" and (model_file := read_sentencepiece(directory / found[0])):
        tokenizer = match_sentencepiece(directory, tokenizer, model_file)
        compared = "was compared with sentencepiece"
    if tokenizer.eos_token is None:
        raise ValueError(f"{directory}: {found[0]} does not say which token is EOS, so generation"
                         ' would never stop. Write {"eos_token": "..."} into a'
                         " tokenizer_config.json there")
    log(f"note: no tokenizer.json; the tokenizer that transformers {transformers.__version__} makes"
        f" from {found[0]} {compared}")
    return tokenizer


def read_sentencepiece(path: Path) -> Any:
    """Return the sentencepiece.SentencePieceProcessor of a file; None if it is a file of tiktoken,
    which may have the same name."""
    from sentencepiece import SentencePieceProcessor

    with contextlib.suppress(RuntimeError):
        return SentencePieceProcessor(model_file=str(path))
    return None


def match_sentencepiece(directory: Path, tokenizer: PreTrainedTokenizerFast,
                       model_file: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer if its tokens match the directory's tokenizer.model, else the tokenizer
    that PreTrainedTokenizerFast makes from that file. Raises ValueError if neither matches. The
    classes that tokenizer_config.json names leave out a space before a text that begins with one.
    """
    if sentencepiece_difference(tokenizer, model_file) is None:
        return tokenizer
    with errors_about(f"{directory}: its tokenizer cannot be loaded"):
        general = PreTrainedTokenizerFast.from_pretrained(directory)
    if (text := sentencepiece_difference(general, model_file)) is None:
        return general
    got, want = plain_tokens(general, text), model_file.encode(text)
    is_legacy = read_json(directory / "tokenizer_config.json", {}).get("legacy", True)
    raise ValueError(
        f"{directory}: there is no tokenizer.json, and of {text[:60]!r} transformers"
        f" {transformers.__version__} makes {general.convert_ids_to_tokens(got)[:8]},"
        f" tokenizer.model {model_file.id_to_piece(want)[:8]}: "
        + ("use a newer transformers" if is_legacy else
           'set "legacy": true in tokenizer_config.json')
        + ", or put a tokenizer.json there that makes the same")


def sentencepiece_difference(tokenizer: PreTrainedTokenizerFast, model_file: Any) -> str | None:
    """Return one of PROBES, or a text with a special token, for which the tokenizer and the
    sentencepiece model differ; None if there is none. After a special token, which sentencepiece
    does not know, both continuations are accepted, with a space and without."""
    for text in PROBES:
        if plain_tokens(tokenizer, text) != model_file.encode(text):
            return text
    pieces = map(model_file.id_to_piece, range(model_file.vocab_size()))
    markers = [piece for piece in pieces if re.fullmatch(r"<(?!0x).+>|\[.+\]", piece)][:64]
    for token in dict.fromkeys([*special_tokens(tokenizer), *markers]):
        text, token_id = f"a{token}b", tokenizer.convert_tokens_to_ids(token)
        got, before = plain_tokens(tokenizer, text), model_file.encode("a")
        own = model_file.piece_to_id(token)
        is_own = own in (token_id, model_file.unk_id())
        if got != model_file.encode(text) and not (
                is_own and got[: len(before) + 1] == [*before, token_id]):
            return text
    return None


def check_tokenizer(directory: Path, tokenizer: PreTrainedTokenizerFast | None,
                    rows: Rows) -> None:
    """Raise ValueError unless the tokenizer and the directory's tokenizer.json alone make the same
    tokens, BOS and EOS included, from PROBES, from special tokens inside a text and from some
    documents of the run. Rank 0 only."""
    path = directory / "tokenizer.json"
    if not tokenizer or not path.is_file():
        return
    own = tokenizers.Tokenizer.from_file(str(path))
    own.no_truncation()
    own.no_padding()
    known = {token.content for token in own.get_added_tokens_decoder().values()}
    own.add_tokens([token for token in tokenizer.added_tokens_decoder.values()
                    if token.content not in known])  # tokens that tokenizer_config.json adds
    step = math.ceil(len(rows.starts) / N_DOCUMENTS)
    documents = [rows.document(i)[0][:N_TOKENS] for i in range(0, len(rows.starts), step)]
    texts: list[Any] = list(map(tokenizer.decode, documents))
    for text in [*trial_texts(tokenizer), *texts]:
        got, want = tokens(tokenizer, text), own.encode(text).ids
        if got != want:
            at = len(os.path.commonprefix([got, want]))
            got, want = (tokenizer.convert_ids_to_tokens(ids[at : at + 4]) for ids in (got, want))
            raise ValueError(f"{directory}: tokenizer_config.json changes the tokens of"
                             f" tokenizer.json: in {text[:60]!r} token {at + 1} and those after it"
                             f" are {got}, by the file alone {want}; make both agree")
    log_bos(directory, tokenizer, [int(ids[0]) for ids in documents])


def log_bos(directory: Path, tokenizer: PreTrainedTokenizerFast, first_ids: list[int]) -> None:
    """Log if the documents with these first tokens have BOS, or lack it, contrary to add_bos_token
    in tokenizer_config.json, which is not read."""
    is_wanted = read_json(directory / "tokenizer_config.json", {}).get("add_bos_token")
    bos = tokenizer.bos_token_id
    is_added = tokens(tokenizer, "a")[:1] == [bos]
    if bos is None or is_wanted not in (True, False) or is_wanted == is_added:
        return
    if is_wanted and any(first != bos for first in first_ids):
        log(f"BOS: tokenizer.json puts no {tokenizer.bos_token} before a text, so plain text"
            ' has none; "add_bos_token": true in tokenizer_config.json is not read: write'
            f" {tokenizer.bos_token} into the examples if they are to begin with it")
    if is_added and bos in first_ids:
        log(f"BOS: tokenizer.json puts {tokenizer.bos_token} before each text;"
            ' "add_bos_token": false in tokenizer_config.json is not read')


def trial_texts(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return PROBES, and a text around each special token."""
    return [*PROBES, *(f"a{token}b {token} c\n{token}\n{token} "
                       for token in special_tokens(tokenizer))]


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the special and added tokens; if there are very many added ones, the first 64."""
    added = [token.content for token in tokenizer.added_tokens_decoder.values()][:64]
    return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))


def tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text, with BOS and EOS if the tokenizer adds them."""
    return tokenizer(text, verbose=False)["input_ids"]  # verbose=False: no warning for long texts


def plain_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    """Return the tokens of a text, without BOS and EOS."""
    return tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
