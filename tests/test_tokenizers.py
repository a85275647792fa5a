"""What is trained are the tokens of the model's own tokenizer.json, whatever tokenizer_config.json
says of its class; and what is saved and merged gives them again.

The tokenizers are small ones of the kinds that are released, trained here on a few lines. What is
right is told by the library `tokenizers`, which reads the file alone.
"""

import base64
import functools
import io
import json
import random
import shutil
import sys

import huggingface_hub
import pytest
import transformers
from tokenizers import (
    AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors,
    trainers)
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

import merge_adapters
from fsdp_qlora.config import Config
from fsdp_qlora.data.load_tokenizer import check_tokenizer, load_tokenizer, read_sentencepiece
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.data.tokenizer_files import complete_tokenizer, name_class, write_tokenizer
from fsdp_qlora.pretrained.model_directory import copy_small_files

LINES = ["It is sunny and warm in Paris, isn't it? I'LL see; 2024, 1000, 12345 degrees.\n\n\n",
         "def f(x):\n    return x  # two  spaces\n\n\tnaïve café Straße 日本語 日本"]  # fmt: skip
# the patterns by which released tokenizers split a text into words
GPT4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
QWEN = GPT4.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip


def add_special(tokenizer, special, bos):
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])  # fmt: skip
    return tokenizer


def byte_level(special, pattern=None, bos=None, normalizer=None, digits=False):
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] * digits
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)])
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(4 * LINES, trainers.BpeTrainer(
        vocab_size=302, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=special))  # fmt: skip
    return add_special(tokenizer, special, bos)


def sentencepiece(special, bos, kind):
    """BPE with a byte for what is unknown. `kind` is "legacy", with a space before each text and
    after each special token, "new", with one before the text alone, or "gemma", without."""
    to_train = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    to_train.normalizer = normalizers.Replace(" ", "▁")
    to_train.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    every_byte = [f"<0x{i:02X}>" for i in range(256)]
    to_train.train_from_iterator(4 * LINES[:1], trainers.BpeTrainer(
        vocab_size=302, special_tokens=[*special, *every_byte], show_progress=False))  # fmt: skip
    model = json.loads(to_train.to_str())["model"]
    merges = list(map(tuple, model["merges"]))
    tokenizer = Tokenizer(models.BPE(
        model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))  # fmt: skip
    tokenizer.normalizer = {
        "legacy": normalizers.Sequence([normalizers.Prepend("▁"), to_train.normalizer]),
        "gemma": to_train.normalizer}.get(kind)  # fmt: skip
    if kind == "new":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return add_special(tokenizer, special, bos)


def unigram(special, bos):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(4 * LINES, trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token=special[0],
        show_progress=False))  # fmt: skip
    return add_special(tokenizer, special, bos)


LLAMA = ["<unk>", "<s>", "</s>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
COHERE = "<PAD> <UNK> <CLS> <SEP> <MASK_TOKEN> <BOS_TOKEN> <|END_OF_TURN_TOKEN|>".split()
NFC = normalizers.NFC()
KINDS = {  # name: how it is made, special tokens, the model's type, its right class, more settings
    "gpt2": (byte_level, ["<|end|>"], {}, "starcoder2", "GPT2TokenizerFast", {}),
    "llama3": (byte_level, ["<|begin|>", "<|eot|>"], dict(pattern=GPT4, bos="<|begin|>"), "llama",
               "PreTrainedTokenizerFast", {}),
    "r1_distill": (byte_level, ["<|begin|>", "<|end|>"], dict(pattern=GPT4, bos="<|begin|>"),
                   "llama", "LlamaTokenizerFast", {"add_bos_token": True}),
    "qwen": (byte_level, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
             dict(pattern=QWEN, normalizer=NFC), "qwen3", "Qwen2Tokenizer", {}),
    "minimax": (byte_level, ["<b>", "<e>"], dict(pattern=GPT4), "minimax_m2", "GPT2Tokenizer", {}),
    "cohere": (byte_level, COHERE, dict(normalizer=NFC, digits=True, bos="<BOS_TOKEN>"), "cohere",
               "CohereTokenizerFast", {}),
    "tekken": (byte_level, [*LLAMA, "[INST]", "[/INST]"], dict(pattern=TEKKEN, bos="<s>"),
               "mistral", "PreTrainedTokenizerFast", {}),
    "llama2": (sentencepiece, LLAMA, dict(bos="<s>", kind="legacy"), "llama",
               "LlamaTokenizerFast", {"legacy": True}),
    "llama2_new": (sentencepiece, LLAMA, dict(bos="<s>", kind="new"), "llama",
                   "LlamaTokenizerFast", {"legacy": False}),
    "llama2_unsaid": (sentencepiece, LLAMA, dict(bos="<s>", kind="legacy"), "llama",
                      "LlamaTokenizerFast", {}),
    "phi3": (sentencepiece, [*LLAMA, "<|user|>", "<|end|>"], dict(bos="<s>", kind="legacy"),
             "phi3", "LlamaTokenizerFast", {"legacy": False, "add_eos_token": False}),
    "gemma": (sentencepiece, GEMMA, dict(bos="<bos>", kind="gemma"), "gemma2",
              "GemmaTokenizerFast", {}),
    "unigram": (unigram, LLAMA, dict(bos="<s>"), "llama", "T5TokenizerFast", {}),
}  # fmt: skip


@functools.cache
def of_kind(kind):
    """(tokenizer.json as text, {tokenizer_config.json}, the model's type)."""
    make, special, options, model_type, right, more = KINDS[kind]
    bos = {"bos_token": options["bos"]} if "bos" in options else {}
    settings = {"eos_token": special[-1], "tokenizer_class": right, **bos, **more}
    return make(special, **options).to_str(), settings, model_type


def write_base(directory, kind, class_name="", **changes):
    """A base's tokenizer and a config.json. `class_name`: named instead of the right one; None:
    none is."""
    text, settings, model_type = of_kind(kind)
    settings = {**settings, **changes}
    if class_name != "":
        settings["tokenizer_class"] = class_name
    settings = {name: value for name, value in settings.items() if value is not None}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(text)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps(
        {"model_type": model_type, "transformers_version": "4.44.0"}))  # fmt: skip
    return directory


@functools.cache
def texts(kind):
    """The kind's special tokens inside texts, and random ones of many scripts and spaces."""
    special, draw = KINDS[kind][1], random.Random(0)
    alphabet = [*"abcXYZ'.,:(){}=_-0123456789é ", *3 * [" ", "\n", "\t", "\r\n"], " the", "  ",
                "'s", "I'LL ", "e\u0301", "ﬁ", "½", "日本", "ру", "عر", "🙂", "\u00a0", "\u3000",
                *special]
    return ["", " ", "It is sunny.", *("".join(draw.choices(alphabet, k=draw.randint(1, 30)))
                                       for _ in range(100))]  # fmt: skip


def no_difference(tokenizer, kind):
    own = Tokenizer.from_str(of_kind(kind)[0])
    return all(tokenizer(text, add_special_tokens=adds)["input_ids"]
               == own.encode(text, add_special_tokens=adds).ids
               for text in texts(kind) for adds in (True, False))  # fmt: skip


def config_of(directory, **settings):
    return Config(model=str(directory), dataset=("rows.jsonl",), **settings)


def some_rows(tokenizer, lines=LINES):
    rows = [tokenizer(line)["input_ids"] for line in lines]
    return make_rows([(row, row) for row in rows])


# the others by `make test-slow`
QUICK_KINDS = "gpt2", "llama2", "llama3", "qwen", "gemma", "tekken"


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK_KINDS)) for kind in KINDS])
def test_tokens_are_those_of_tokenizer_json(kind, tmp_path):
    """Under the class that is right, the general one, a wrong one and none: loaded here, and by
    AutoTokenizer from what is saved beside an adapter and from a merged model. The base's files are
    saved as they are, but for a class that is missing, not taken, or gives other tokens."""
    right = KINDS[kind][4]
    wrong = "GPT2TokenizerFast" if right == "LlamaTokenizerFast" else "LlamaTokenizerFast"
    for i, name in enumerate([right, "PreTrainedTokenizerFast", wrong, None]):
        base = write_base(tmp_path / f"base-{i}", kind, name)
        tokenizer = load_tokenizer(base, config_of(base))
        assert no_difference(tokenizer, kind), name
        check_tokenizer(base, tokenizer, some_rows(tokenizer))
        (saved := tmp_path / f"saved-{i}").mkdir()
        write_tokenizer(saved, base, tokenizer)
        assert no_difference(AutoTokenizer.from_pretrained(saved), kind), name
        assert (saved / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
        (base / "config.json").rename(saved / "config.json")
        assert no_difference(AutoTokenizer.from_pretrained(saved), kind), name
        auto = AutoTokenizer.from_pretrained(base)
        classes = {"PreTrainedTokenizerFast": "TokenizersBackend"}  # two names of one
        is_taken = type(auto).__name__ == classes.get(name, str(name).removesuffix("Fast"))
        is_right = is_taken and no_difference(auto, kind)
        old, new = (json.loads((d / "tokenizer_config.json").read_text()) for d in (base, saved))
        assert new == (old if is_right else {**old, "tokenizer_class": "PreTrainedTokenizerFast"})


def test_name_that_transformers_4_does_not_know_is_not_saved(tmp_path, capsys):
    """That of PreTrainedTokenizerFast in transformers 5, which newer bases have."""
    base = write_base(tmp_path / "base", "qwen", "TokenizersBackend")
    tokenizer = load_tokenizer(base, config_of(base))
    for files in ["tokenizer_config.json"], ["tokenizer_config.json", "config.json"]:
        (saved := tmp_path / f"saved-{len(files)}").mkdir()
        write_tokenizer(saved, base, tokenizer)
        for name in files:
            shutil.copy(base / name, saved)
        name_class(saved, tokenizer)
        settings = json.loads((saved / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert no_difference(AutoTokenizer.from_pretrained(saved), "qwen")
    assert "saved as" not in capsys.readouterr().out  # its tokens are the same


def added(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False,
            "single_word": False, "special": True, **flags}


@pytest.fixture
def model(tiny_model, tmp_path):
    """Function (kind, class, **settings): a llama with such a tokenizer."""

    def make(*args, **settings):
        directory = shutil.copytree(tiny_model("llama"), tmp_path / "model")
        config = (directory / "config.json").read_text()
        write_base(directory, *args, **settings)
        (directory / "config.json").write_text(config)
        return directory

    return make


def test_settings_that_change_the_tokens_are_refused(run_main, model, tmp_path):
    base = model("qwen", added_tokens_decoder={"1": added("<|im_start|>", rstrip=True)})
    (tmp_path / "data.jsonl").write_text('{"text": "It is sunny."}\n')
    code, _, err = run_main("--model", base, "--dataset", tmp_path / "data.jsonl", "--max_steps", 1,
                            "--batch_size", 1, "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 3 and len(err.splitlines()) == 1, err
    assert f"{base}: tokenizer_config.json changes the tokens" in err and "<|im_start|>" in err


def test_type_of_the_model_that_counts_for_more_is_said(tmp_path, capsys):
    """transformers takes its own class for qwen2, whatever is named."""
    base = write_base(tmp_path / "base", "llama3")
    tokenizer = load_tokenizer(base, config_of(base))
    (base / "config.json").write_text('{"model_type": "qwen2"}')
    assert not no_difference(AutoTokenizer.from_pretrained(base), "llama3")
    name_class(base, tokenizer)
    assert "AutoTokenizer still does, for this type of model" in capsys.readouterr().out


def test_rows_of_the_run_are_compared(tmp_path):
    """Of very many special tokens no text but a row may have the one that differs."""
    text, settings, _ = of_kind("llama3")
    tokenizer = Tokenizer.from_str(text)
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(100)])
    base = write_base(tmp_path / "base", "llama3", added_tokens_decoder={
        str(tokenizer.token_to_id("<|reserved_90|>")): added("<|reserved_90|>", rstrip=True)})
    tokenizer.save(str(base / "tokenizer.json"))
    tokenizer = load_tokenizer(base, config_of(base))
    check_tokenizer(base, tokenizer, some_rows(tokenizer))
    own = Tokenizer.from_file(str(base / "tokenizer.json"))
    rows = [own.encode(line).ids for line in [*LINES, "a <|reserved_90|> b"]]
    with pytest.raises(ValueError, match=r"in '.*a <\|reserved_90\|> b' token"):
        check_tokenizer(base, tokenizer, make_rows([(row, row) for row in rows]))


def test_tokens_that_only_the_settings_add_are_no_difference(tmp_path):
    """An EOS that is an entry of the vocabulary alone, a PAD that is new; nor are padding and
    truncation in the file, which rows do without."""
    text, _, _ = of_kind("llama2")
    content = json.loads(text)
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] != "</s>"]
    base = write_base(tmp_path / "base", "llama2", pad_token="[PAD]")
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(base / "tokenizer.json"))
    tokenizer = load_tokenizer(base, config_of(base))
    check_tokenizer(base, tokenizer, some_rows(tokenizer, [*LINES, "a</s> b [PAD]"]))
    assert tokenizer("a</s>")["input_ids"][-1] == tokenizer.eos_token_id == 2


def test_mistral_common_is_not_taken_for_tokenizer_json(monkeypatch, tmp_path):
    """Where that package is installed and a tekken.json lies beside, AutoTokenizer would."""
    monkeypatch.setattr(
        transformers.integrations.mistral.tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(
        tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral", "MistralCommonBackend")
    base = write_base(tmp_path / "base", "tekken", None)
    (base / "tekken.json").write_text("{}")
    with pytest.raises(Exception, match="mistral.common"):  # that it is not installed here
        AutoTokenizer.from_pretrained(base)
    tokenizer = load_tokenizer(base, config_of(base))
    assert no_difference(tokenizer, "tekken")
    (saved := tmp_path / "saved").mkdir()
    write_tokenizer(saved, base, tokenizer)
    assert {p.name for p in saved.iterdir()} == {"tokenizer.json", "tokenizer_config.json"}


def test_directory_without_tokenizer_json(monkeypatch, tmp_path):
    """It is refused if there is nothing else, and if what there is needs a package that is not
    installed, which is named."""
    base = write_base(tmp_path / "base", "llama2")
    (base / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"{base}: has no tokenizer.json"):
        load_tokenizer(base, config_of(base))
    (base / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(ValueError, match="pip install sentencepiece$"):
        load_tokenizer(base, config_of(base))


def test_vocabulary_of_the_hub_is_made_a_tokenizer(monkeypatch, tmp_path, capsys):
    """By the model's id, which transformers has lists of; the log says that nothing is compared.
    What was trained is saved."""
    cache = tmp_path / "models--owner--name"
    base = write_base(cache / "snapshots" / (40 * "5"), "qwen",
                      additional_special_tokens=KINDS["qwen"][1])
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(40 * "6")  # of a download that began meanwhile
    model = json.loads(of_kind("qwen")[0])["model"]
    (base / "tokenizer.json").unlink()
    (base / "vocab.json").write_text(json.dumps(model["vocab"]))
    (base / "merges.txt").write_text("#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    tokenizer = load_tokenizer(base, config_of("owner/name"))
    assert tokenizer.name_or_path == "owner/name" and no_difference(tokenizer, "qwen")
    assert "no tokenizer.json" in capsys.readouterr().out
    check_tokenizer(base, tokenizer, some_rows(tokenizer))
    (saved := tmp_path / "saved").mkdir()
    write_tokenizer(saved, base, tokenizer)
    assert no_difference(AutoTokenizer.from_pretrained(saved), "qwen")


def test_run_trains_and_saves_the_tokens_of_the_file(run_main, model, tmp_path):
    """By the command line, of a base whose class would lose all spaces; those of the run are merged
    where the base has no tokenizer.json."""
    base = model("llama2", "GPT2TokenizerFast")
    assert not no_difference(AutoTokenizer.from_pretrained(base), "llama2")
    own = Tokenizer.from_str(of_kind("llama2")[0])
    # where EOS stands already and where BOS does, none is added
    lines = [t for t in texts("llama2") if t.strip() and t[:3] != "<s>" and t[-4:] != "</s>"][:24]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in lines))
    code, out, err = run_main(
        "--model", base, "--dataset", tmp_path / "data.jsonl", "--max_steps", 1, "--batch_size", 8,
        "--learning_rate", 0.01, "--report_to", "none",
        "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert "saved as PreTrainedTokenizerFast, because GPT2TokenizerFast of transformers" in out
    want = [[*own.encode(line).ids, 2] for line in lines]  # and EOS
    assert f"data: {len(lines)} rows, {sum(map(len, want)):,} tokens, " in out
    rows = json.loads((tmp_path / "run" / "train_config.json").read_text())["probe_input_ids"]
    assert rows and all(row in want for row in rows)
    for name in "merged", "merged-by-the-run":
        merge_adapters.main(["--adapter_dir", str(tmp_path / "run"), "--no-check",
                             "--output_dir", str(tmp_path / name)])  # fmt: skip
        (base / "tokenizer.json").unlink(missing_ok=True)
    for name in "run", "merged", "merged-by-the-run":
        assert no_difference(AutoTokenizer.from_pretrained(tmp_path / name), "llama2")


# ------------------------------------------------------------------------------------------------
# Without a tokenizer.json; BOS
# ------------------------------------------------------------------------------------------------

# it reads no tokenizer.model as sentencepiece does
IS_OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
FOXES = [*LINES, "the quick brown fox jumps over the lazy dog", "  a fox,  of   foxes "]
AS_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
OF_LLAMA = {"tokenizer_class": "LlamaTokenizer"}
# name: (tokenizer_config.json, how the model of sentencepiece is trained)
MODELS = {
    "legacy unsaid": (OF_LLAMA, AS_IS),
    "legacy": ({**OF_LLAMA, "legacy": True}, AS_IS),
    "no class": ({}, AS_IS),
    "BOS": ({**OF_LLAMA, "add_bos_token": True}, AS_IS),
    "no space before a text": (OF_LLAMA, {**AS_IS, "add_dummy_prefix": False}),
    "normal forms": (OF_LLAMA, {"normalization_rule_name": "nmt_nfkc"}),
    "pieces of users": (OF_LLAMA, {**AS_IS, "user_defined_symbols": ["<|user|>", "\t\t"]}),
    "a piece that its class forgets": (
        {"tokenizer_class": "GemmaTokenizer", "additional_special_tokens": ["<|extra|>"]},
        {**AS_IS, "add_dummy_prefix": False, "user_defined_symbols": ["<|user|>"]}),
    "no bytes": (OF_LLAMA, {**AS_IS, "byte_fallback": False, "vocab_size": 200}),
    "unigram": (OF_LLAMA, {"model_type": "unigram", "hard_vocab_limit": False}),
}  # fmt: skip


def write_sentencepiece(directory, settings, options):
    """A base with a tokenizer.model, and no tokenizer.json. Returns the model itself."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(8 * FOXES), model_writer=model, minloglevel=2,
        **{"model_type": "bpe", "vocab_size": 340, "byte_fallback": True,
           "allow_whitespace_only_pieces": True, **options})  # fmt: skip
    directory.mkdir()
    (directory / "tokenizer.model").write_bytes(model.getvalue())
    (directory / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **settings}))  # fmt: skip
    (directory / "config.json").write_text('{"model_type": "llama"}')
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_a_sentencepiece_model_are_its_own(name, tmp_path, capsys):
    """What a text begins with, several spaces, normal forms; and what is saved gives them again."""
    base = tmp_path / "base"
    model = write_sentencepiece(base, *MODELS[name])
    if IS_OLD and name != "no space before a text":
        with pytest.raises(ValueError, match="use a newer transformers, or put a tokenizer.json"):
            load_tokenizer(base, config_of(base))
        return
    tokenizer = load_tokenizer(base, config_of(base))
    assert "makes from tokenizer.model was compared with sentencepiece" in capsys.readouterr().out
    (saved := tmp_path / "saved").mkdir()
    write_tokenizer(saved, base, tokenizer)
    for one in tokenizer, AutoTokenizer.from_pretrained(saved):
        for text in ["  fox", " ", "a<|user|>b", *(t for t in texts("llama2") if "<" not in t)]:
            assert one(text, add_special_tokens=False)["input_ids"] == model.encode(text), text
        ids, before = one("a fox</s>a")["input_ids"], one("a fox")["input_ids"]
        assert ids[: len(before) + 1] == [*before, 2] and len(ids) > len(before) + 1
        assert one("a")["input_ids"] == [1] * (name == "BOS") + model.encode("a")


def test_tokens_that_are_not_sentencepieces_end_the_start(tmp_path):
    """Of a setting by which transformers drops a space before a text; what is advised helps."""
    base = tmp_path / "base"
    write_sentencepiece(base, {**OF_LLAMA, "legacy": False}, AS_IS)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(base, config_of(base))
    assert str(caught.value).startswith(f"{base}: there is no tokenizer.json, and of '")
    assert 'set "legacy": true in tokenizer_config.json, or put a tok' in str(caught.value)
    if IS_OLD:
        return
    settings = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**settings, "legacy": True}))
    tokenizer = load_tokenizer(base, config_of(base))
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer.backend_tokenizer.save(str(base / "tokenizer.json"))
    assert load_tokenizer(base, config_of(base))("  fox").tokens() == tokenizer("  fox").tokens()


def test_tokenizer_model_of_tiktoken_is_not_sentencepieces(tmp_path):
    pytest.importorskip("sentencepiece")
    lines = (f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256))
    (tmp_path / "tokenizer.model").write_text("\n".join(lines))
    assert read_sentencepiece(tmp_path / "tokenizer.model") is None


def test_vocabulary_that_names_no_eos_ends_the_start(tmp_path, capsys):
    """Mistral's tekken.json; what is advised helps."""
    base = write_base(tmp_path / "base", "tekken")
    (base / "tokenizer.json").unlink()
    (base / "tokenizer_config.json").unlink()
    pieces = [{"rank": i, "token_bytes": base64.b64encode(bytes([i])).decode(), "token_str": None}
              for i in range(256)]  # fmt: skip
    special = [{"rank": i, "token_str": token, "is_control": True}
               for i, token in enumerate(LLAMA)]  # fmt: skip
    config = {"pattern": TEKKEN, "num_vocab_tokens": 256, "default_vocab_size": 259,
              "default_num_special_tokens": 3, "version": "v3"}  # fmt: skip
    (base / "tekken.json").write_text(
        json.dumps({"config": config, "vocab": pieces, "special_tokens": special}))
    with pytest.raises(ValueError, match="tekken.json does not say which token is EOS, .* Write "
                                         r"{\"eos_token\": \"...\"} into a tokenizer_config.json"):
        load_tokenizer(base, config_of(base))
    (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert load_tokenizer(base, config_of(base)).eos_token_id == 2
    assert "makes from tekken.json cannot be compared with it" in capsys.readouterr().out


@pytest.mark.parametrize("kind, wanted, first_ids, words", [
    ("llama3", False, [0], 'puts <|begin|> before each text; "add_bos_token": false'),
    ("llama3", False, [0, 5], 'puts <|begin|> before each text; "add_bos_token": false'),
    ("llama3", True, [0], ""), ("llama3", None, [0], ""), ("llama3", False, [5], ""),
    ("gpt2", True, [5], 'puts no <|end|> before a text, so plain text has none; "add_bo'),
    ("gpt2", True, [0, 5], 'puts no <|end|> before a text, so plain text has none'),
    ("gpt2", True, [0], ""), ("gpt2", False, [5], ""), ("gpt2", None, [5], "")])  # fmt: skip
def test_bos_that_the_settings_want_otherwise_is_said(
        kind, wanted, first_ids, words, tmp_path, capsys):  # fmt: skip
    """Where the rows show it: those of chats have it of their template."""
    bos = {"bos_token": KINDS[kind][1][0]}
    base = write_base(tmp_path / "base", kind, add_bos_token=wanted, **bos)
    tokenizer = load_tokenizer(base, config_of(base))
    rows = [([first, 6, 7], [first, 6, 7]) for first in first_ids * 40]
    check_tokenizer(base, tokenizer, make_rows(rows))
    said = capsys.readouterr().out
    assert said.count("BOS: tokenizer.json ") == (words != "") and words in said


OLD = "{% for m in messages %}old {{ m.content }}{{ eos_token }}{% endfor %}"
NEW = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
NAMED = [{"name": "default", "template": OLD}, {"name": "tool_use", "template": "of tools"}]
BY_NAME = {x["name"]: x["template"] for x in NAMED}
MORE = "additional_chat_templates/tool_use.jinja"
PLACES = {  # {file: its chat template} of a base, what transformers' tokenizer takes, what is left
    "in the settings": ({"tokenizer_config.json": OLD}, OLD, {"tokenizer_config.json": OLD}),
    "a file": ({"chat_template.jinja": OLD}, OLD, {"chat_template.jinja": OLD}),
    "the processor's": ({"chat_template.json": OLD}, OLD, {"chat_template.jinja": OLD}),
    "in its settings too": ({"chat_template.jinja": OLD, "processor_config.json": OLD}, OLD,
                            {"chat_template.jinja": OLD}),
    "twice": ({"tokenizer_config.json": OLD, "chat_template.json": OLD}, OLD,
              {"chat_template.jinja": OLD}),
    "two": ({"tokenizer_config.json": "other", "chat_template.jinja": OLD}, OLD,
            {"chat_template.jinja": OLD}),
    "by name": ({"tokenizer_config.json": NAMED}, BY_NAME, {"tokenizer_config.json": NAMED}),
    "by name in files": (
        {"tokenizer_config.json": "other", "chat_template.jinja": OLD, MORE: "of tools"}, BY_NAME,
        {"chat_template.jinja": OLD, MORE: "of tools"}),
    "none": ({}, None, {}),
}  # fmt: skip


def write_templates(base, places):
    for name, template in places.items():
        (path := base / name).parent.mkdir(exist_ok=True)
        settings = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(template if path.suffix == ".jinja" else
                        json.dumps(settings | {"chat_template": template}))  # fmt: skip


def templates_in(directory):
    """{file: its chat template} of a directory."""
    found = {str(path.relative_to(directory)): path.read_text()
             for path in directory.rglob("*.jinja")}
    for path in directory.glob("*.json"):
        settings = json.loads(path.read_text())
        found |= {path.name: settings["chat_template"]} if "chat_template" in settings else {}
    return found


def as_llama_cpp_reads(directory):
    """The chat template that its converter finds, by gguf.SpecialVocab: one, or several by name."""
    found, more = None, [*directory.glob("additional_chat_templates/*.jinja")]
    if (path := directory / "chat_template.jinja").is_file():
        found = path.read_text()
        found = {"default": found, **{x.stem: x.read_text() for x in more}} if more else found
    elif (path := directory / "chat_template.json").is_file():
        found = json.loads(path.read_text()).get("chat_template")
    found = json.loads((directory / "tokenizer_config.json").read_text()).get(
        "chat_template", found)
    return {x["name"]: x["template"] for x in found} if isinstance(found, list) else found


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("given", [False, True])
def test_one_chat_template_is_written(place, given, tmp_path):
    """Beside an adapter and in a merged model, for transformers and llama.cpp: that of training."""
    places, own, left = PLACES[place]
    write_templates(base := write_base(tmp_path / "base", "qwen"), places)
    (tmp_path / "new.jinja").write_text(NEW)
    config = config_of(base, chat_template=str(tmp_path / "new.jinja") if given else None)
    tokenizer, want = load_tokenizer(base, config), NEW if given else own
    assert tokenizer.chat_template == want
    (run := tmp_path / "run").mkdir()
    write_tokenizer(run, base, tokenizer)
    (merged := tmp_path / "merged").mkdir()
    copy_small_files(base, merged)
    complete_tokenizer(merged, run / "chat_template.jinja" if given else None)
    for directory in run, merged:
        assert AutoTokenizer.from_pretrained(directory).chat_template == want
        assert as_llama_cpp_reads(directory) == want
        assert templates_in(directory) == ({"chat_template.jinja": NEW} if given else left)


def test_template_of_a_run_is_the_one_that_is_merged(run_main, model, tmp_path):
    """By the command lines; a second start leaves nothing of the first one's template."""
    base = model("qwen")
    write_templates(base, {"tokenizer_config.json": OLD, "chat_template.json": OLD,
                           "processor_config.json": OLD})  # fmt: skip
    (tmp_path / "new.jinja").write_text(NEW)
    chat = [{"role": "user", "content": "It is"}, {"role": "assistant", "content": "sunny."}]
    (tmp_path / "data.jsonl").write_text(2 * (json.dumps({"messages": chat}) + "\n"))
    (tmp_path / "run" / "additional_chat_templates").mkdir(parents=True)
    (tmp_path / "run" / "additional_chat_templates" / "tool_use.jinja").write_text("stale")
    (tmp_path / "run" / "chat_template.json").write_text("{}")
    code, out, err = run_main(
        "--model", base, "--dataset", tmp_path / "data.jsonl", "--max_steps", 1, "--batch_size", 2,
        "--learning_rate", 0.01, "--report_to", "none", "--chat_template", tmp_path / "new.jinja",
        "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert "user: It is<|im_end|>" in out
    merge_adapters.main(["--adapter_dir", str(tmp_path / "run"), "--no-check",
                         "--output_dir", str(tmp_path / "merged")])  # fmt: skip
    for directory in tmp_path / "run", tmp_path / "merged":
        assert templates_in(directory) == {"chat_template.jinja": NEW}
        assert not (directory / "chat_template.json").exists()
        assert AutoTokenizer.from_pretrained(directory).chat_template == NEW
        assert as_llama_cpp_reads(directory) == NEW
