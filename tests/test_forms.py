"""What of a row is trained, by its form; and which rows are skipped or refused.

Conversations are in test_chat.py, files in test_files.py.
"""

import contextlib
import itertools
import json
import re
import shlex

import pytest
from conftest import encode_file, one_process
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rows import (
    ADD, AGAIN, ASKED, CHATML, TALK, TEMPLATES, chat_tokenizer, encode_row, prepare, refusal, says,
    trained, whole, write_jsonl)
from tokenizers import (
    AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers)
from tokenizers.processors import ByteLevel, RobertaProcessing, Sequence, TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data import example_formats as formats, tokenize_documents
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.prepare_data import prepare_data
from fsdp_qlora.data.tool_calls import openai_calls
from fsdp_qlora.errors import FatalExample
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run.startup_log import log_rows


@pytest.fixture
def tokenizer(demo_directory):
    return chat_tokenizer(demo_directory, CHATML)


# ------------------------------------------------------------------------------------------------
# What is trained
# ------------------------------------------------------------------------------------------------

CHAT_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n"
    "<|im_start|>assistant\nThe answer is 7.<|im_end|>\n<|im_start|>user\nAnd 2 times 2?<|im_end|>"
    "\n<|im_start|>assistant\nIt is 4.<|im_end|>"
)
SHORT_TEXT = (
    "<|im_start|>user\nWhat is 3 plus 4?<|im_end|>\n"
    "<|im_start|>assistant\nThe answer is 7.<|im_end|>"
)
ALPACA = {"instruction": "Add.", "input": "3 and 4", "output": "It is 7."}
NO_INPUT = {"instruction": "Add 3 and 4.", "output": "It is 7."}
ALPACA_CHAT = (
    "<|im_start|>user\nAdd.\n\n3 and 4<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>"
)
NO_INPUT_CHAT = (
    "<|im_start|>user\nAdd 3 and 4.<|im_end|>\n<|im_start|>assistant\nIt is 7.<|im_end|>"
)
ALPACA_PLAIN = "### Instruction:\nAdd.\n\n### Input:\n3 and 4\n\n### Response:\nIt is 7.</s>"
# name: (row, whether the tokenizer has a chat template, whole text, what of it is trained)
FORMS = {
    "text": ({"text": "The answer is 7."}, True, "The answer is 7.</s>", ["The answer is 7.</s>"]),
    "text without template": ({"text": "It is 7."}, False, "It is 7.</s>", ["It is 7.</s>"]),
    "prompt and completion": (
        {"prompt": "What is 3 plus 4?\n", "completion": "It is 7."}, True,
        "What is 3 plus 4?\nIt is 7.</s>", ["It is 7.</s>"]),
    "message lists": (
        {"prompt": TALK[:4], "completion": TALK[4:]}, True, CHAT_TEXT, ["It is 4.<|im_end|>"]),
    "completion of several answers": (
        {"prompt": TALK[:2], "completion": TALK[2:]}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "messages": (
        {"messages": TALK}, True, CHAT_TEXT, ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "messages with system and empty tools beside them": (
        {"system": "Be brief.", "messages": TALK[1:], "tools": ""}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "messages that end with the user": (
        {"messages": [*ASKED, AGAIN[0]]}, True, SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "sharegpt": (
        {"conversations": [
            {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
             "value": m["content"]} for m in TALK]}, True,
        CHAT_TEXT, ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "sharegpt with system beside it": (
        {"system": "Be brief.", "conversations": [
            {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
            for m in TALK[1:]]}, True,
        CHAT_TEXT, ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "messages that begin with the system beside them": (
        {"system": "Be brief.", "messages": TALK}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "sharegpt with other names": (
        {"conversations": [
            {"from": {"user": "user", "assistant": "chatgpt"}.get(m["role"], m["role"]),
             "value": m["content"], "weight": i == 2} for i, m in enumerate(TALK)]}, True,
        SHORT_TEXT.replace("<|im_start|>user", CHAT_TEXT[:39] + "<|im_start|>user", 1),
        ["The answer is 7.<|im_end|>"]),
    "alpaca with system": (
        {**NO_INPUT, "system": "Be brief.", "history": []}, True, CHAT_TEXT[:39] + NO_INPUT_CHAT,
        ["It is 7.<|im_end|>"]),
    "alpaca with system and without template": (
        {**ALPACA, "system": "Be brief."}, False, "Be brief.\n\n" + ALPACA_PLAIN,
        ["It is 7.</s>"]),
    "alpaca": (ALPACA, True, ALPACA_CHAT, ["It is 7.<|im_end|>"]),
    "alpaca without input": (NO_INPUT, True, NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "alpaca with empty input": (
        {**NO_INPUT, "input": ""}, True, NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "alpaca without template": (ALPACA, False, ALPACA_PLAIN, ["It is 7.</s>"]),
    "alpaca with neither": (
        NO_INPUT, False, "### Instruction:\nAdd 3 and 4.\n\n### Response:\nIt is 7.</s>",
        ["It is 7.</s>"]),
    "question and answer": (
        {"question": "What is 3 plus 4?", "answer": "The answer is 7."}, True, SHORT_TEXT,
        ["The answer is 7.<|im_end|>"]),
    "question and answer without template": (
        {"question": "What is 3 plus 4?", "answer": "It is 7."}, False,
        "What is 3 plus 4?\nIt is 7.</s>", ["It is 7.</s>"]),
    "keys that are not of the form": (
        {"question": "What is 3 plus 4?", "answer": "The answer is 7.", "text": "x", "id": 3},
        True, SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "dolly": (
        {"instruction": "Add.", "context": "3 and 4", "response": "It is 7.", "category": "x"},
        True, ALPACA_CHAT, ["It is 7.<|im_end|>"]),
    "prompt and response": (
        {"prompt": "What is 3 plus 4?", "response": "The answer is 7."}, True, SHORT_TEXT,
        ["The answer is 7.<|im_end|>"]),
    "input and output": (
        {"input": "What is 3 plus 4?", "output": "The answer is 7.", "system": ""}, True,
        SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "prompt and response without template": (
        {"prompt": "What is 3 plus 4?", "response": "It is 7."}, False,
        "What is 3 plus 4?\nIt is 7.</s>", ["It is 7.</s>"]),
    "openorca": (
        {"system_prompt": "Be brief.", "question": "Add 3 and 4.", "response": "It is 7."}, True,
        CHAT_TEXT[:39] + NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "question with context and system, without template": (
        {"system": "Be brief.", "question": "Add.", "context": "3 and 4", "answer": "7"}, False,
        "Be brief.\n\nAdd.\n\n3 and 4\n7</s>", ["7</s>"]),
    "history": (
        {"system": "Be brief.", "instruction": "And 2 times 2?", "output": "It is 4.",
         "history": [["What is 3 plus 4?", "The answer is 7."]]}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "input that looks like an empty list": (
        {"instruction": "Sort.", "input": "[]", "output": "[]"}, True,
        "<|im_start|>user\nSort.\n\n[]<|im_end|>\n<|im_start|>assistant\n[]<|im_end|>",
        ["[]<|im_end|>"]),
    "json text": (
        {"messages": json.dumps(TALK), "tools": "[]"}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "message lists as json text": (
        {"prompt": json.dumps(TALK[:4]), "completion": json.dumps(TALK[4:])}, True, CHAT_TEXT,
        ["It is 4.<|im_end|>"]),
    "training": (
        {"conversations": [{"role": "human", "value": "What is 3 plus 4?"},
                           {"from": "model", "content": "The answer is 7."},
                           {"role": "user", "content": "x"},
                           {"role": "model", "content": "bad", "training": False}]}, True,
        SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "segments": (
        {"segments": [{"label": True, "text": "<s>Hello "}, {"label": False, "text": "good bye "},
                      {"label": True, "text": "it is 7"}]}, True,
        "<s>Hello good bye it is 7", ["<s>Hello ", "it is 7"]),
    "null beside a form": (
        {"messages": None, "tools": None, "text": "It is 7."}, True, "It is 7.</s>",
        ["It is 7.</s>"]),
}  # fmt: skip

BLANK = {  # what is blank is not joined
    "question of an input alone": (
        {"question": "", "input": "What is 3 plus 4?", "answer": "The answer is 7."}, True,
        SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "query of a context alone": (
        {"query": "\n", "context": "What is 3 plus 4?", "response": "The answer is 7."}, True,
        SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "instruction of a context alone": (
        {"instruction": " ", "context": "Add 3 and 4.", "response": "It is 7."}, True,
        NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "blank input": (
        {**NO_INPUT, "input": " \n"}, True, NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "blank input and a context that asks": (
        {"input": " ", "context": "Add 3 and 4.", "output": "It is 7."}, True, NO_INPUT_CHAT,
        ["It is 7.<|im_end|>"]),
    "blank system": (
        {**NO_INPUT, "system_prompt": "  "}, True, NO_INPUT_CHAT, ["It is 7.<|im_end|>"]),
    "blank system message and another one": (
        {"system": "Be brief.", "messages": [says("system", " "), *TALK[1:]]}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "blank system beside a system message": (
        {"system": "\t", "messages": TALK}, True, CHAT_TEXT,
        ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "blank turn of history": (
        {"system": "Be brief.", "instruction": "And 2 times 2?", "output": "It is 4.",
         "history": [["", " "], ["What is 3 plus 4?", "The answer is 7."], ["", ""]]}, True,
        CHAT_TEXT, ["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]),
    "blank text beside its other name": (
        {"conversations": [{"from": "human", "content": "", "value": "What is 3 plus 4?"},
                           {"role": "", "from": "gpt", "value": "The answer is 7."}]}, True,
        SHORT_TEXT, ["The answer is 7.<|im_end|>"]),
    "input alone, without template": (
        {"instruction": "", "input": "3 and 4", "output": "It is 7."}, False,
        "### Input:\n3 and 4\n\n### Response:\nIt is 7.</s>", ["It is 7.</s>"]),
    "blank parts, without template": (
        {"question": " ", "context": "3 and 4", "system": "\n", "answer": "7"}, False,
        "3 and 4\n7</s>", ["7</s>"]),
    "blank input and system, without template": (
        {"instruction": "Add 3 and 4.", "input": " ", "system": " ", "output": "It is 7."}, False,
        "### Instruction:\nAdd 3 and 4.\n\n### Response:\nIt is 7.</s>", ["It is 7.</s>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*FORMS, *BLANK])
def test_form_is_trained_as_specified(name, tokenizer, tmp_path):
    row, has_template, text, parts = {**FORMS, **BLANK}[name]
    if not has_template:
        tokenizer.chat_template = None
    documents = encode_row(row, tokenizer, tmp_path)
    assert whole(documents, tokenizer) == [text]
    assert trained(documents, tokenizer) == [parts]
    (document,) = documents
    assert document["n_loss_tokens"] == sum(int(x) != IGNORE_INDEX for x in document["labels"][1:])
    assert document["length"] == len(document["input_ids"]) and not document["truncated"]


@pytest.mark.parametrize(
    "labels", [None, [IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX], [9, 8, 7, 6]], ids=str)
def test_ids_are_taken_as_they_are(labels, tokenizer, tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "labels": labels}
    (document,) = encode_row(row, tokenizer, tmp_path)
    assert document["input_ids"].tolist() == [5, 6, 7, 8]
    assert document["labels"].tolist() == (labels or [5, 6, 7, 8])
    assert document["n_loss_tokens"] == (1 if labels and IGNORE_INDEX in labels else 3)


BOS_AND_EOS = ("$A", "<s> $A", "$A </s>", "<s> $A </s>")


def add_specials(tokenizer, template):
    """Let it add BOS and EOS as one of BOS_AND_EOS says. Returns BOS, if any."""
    special_tokens = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[pair for pair in special_tokens if pair[0] in template]
    )
    return [tokenizer.bos_token_id] if "<s>" in template else []


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def sentencepiece(kind):
    """A tokenizer that puts a space before each text, as SentencePiece's do."""
    tokens = Tokenizer(models.BPE(unk_token="<unk>"))
    if kind == "llama 2":
        tokens.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        tokens.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    tokens.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=99, special_tokens=["<unk>", "<s>", "</s>"])
    tokens.train_from_iterator(["What is 3 plus 4?", " 7.", " 3 and 4\n"] * 9, trainer)
    # some files have these so, and then text before them hides them
    tokens.add_special_tokens([AddedToken(x, normalized=True) for x in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def first_row(rows, tokenizer, capsys):
    capsys.readouterr()
    log_rows(rows, tokenizer)
    (line,) = capsys.readouterr().out.splitlines()
    return line


@pytest.mark.parametrize("n_tools", [0, 30])
def test_first_row_in_the_log_shows_what_is_trained_whatever_its_length(
        n_tools, tokenizer, tmp_path, capsys):  # fmt: skip
    """The untrained parts are shortened, in the middle."""
    tokenizer.chat_template = TEMPLATES["tools"]
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": TALK[1:], "tools": [ADD] * n_tools}])
    line = first_row(prepare([path], tokenizer, 9999)[0], tokenizer, capsys)
    assert line.endswith(
        "<|im_start|>assistant\\n]The answer is 7.<|im_end|>[masked: \\n<|im_start|>user\\n"
        "And 2 times 2?<|im_end|>\\n<|im_start|>assistant\\n]It is 4.<|im_end|>'")
    assert line.startswith("first row: '[masked: <|im_start|>")
    assert (" tokens .. " in line) == (n_tools > 0) and len(line) < 600


def test_first_row_of_many_or_long_parts_is_shortened(tokenizer, tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl", [{"messages": [*ASKED, *AGAIN] * 9}])
    line = first_row(prepare([path], tokenizer, 9999)[0], tokenizer, capsys)
    assert line.count("The answer is 7.") == 2 and line.endswith("It is 4.<|im_end|>'")
    assert " .. 29 more parts .. " in line
    write_jsonl(path, [{"prompt": "x", "completion": "first" + "7" * 999 + "last"}])
    line = first_row(prepare([path], tokenizer, 9999)[0], tokenizer, capsys)
    assert "x]first777" in line and line.endswith("7last</s>'") and len(line) < 400
    write_jsonl(path, [{"prompt": "\U0001f642" * 9, "completion": "\U0001f642" * 2 + "y"}])
    line = first_row(prepare([path], tokenizer)[0], tokenizer, capsys)
    assert line.endswith("\U0001f642]" + "\U0001f642" * 2 + "y</s>'")


def test_first_row_in_the_log_shows_the_space_that_an_answer_begins_with(tmp_path, capsys):
    tokenizer, prompt = sentencepiece("llama 2"), "3 and 4"
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": " 7."}])
    rows, _ = prepare([path], tokenizer)
    log_rows(rows, tokenizer)
    assert f"first row: '[masked: {prompt}] 7." in capsys.readouterr().out


@pytest.mark.parametrize("template", ["$A", "<s> $A </s>"])
@pytest.mark.parametrize("kind", ["llama 2", "first", "always"])
@pytest.mark.parametrize("prompt, completion", [
    ("What is 3 plus 4? ", "7."), ("What is 3 plus 4?", " 7."), ("What is 3 plus 4?\n", "7.</s>")])
def test_completion_is_no_text_of_its_own_where_texts_begin_with_a_space(
        kind, prompt, completion, template, tmp_path):  # fmt: skip
    tokenizer = sentencepiece(kind)
    bos = add_specials(tokenizer, template)
    (document,) = encode_row({"prompt": prompt, "completion": completion}, tokenizer, tmp_path)
    before, joined = plain(tokenizer, prompt), plain(tokenizer, prompt + completion)
    *answer, eos = document["labels"][document["labels"] != IGNORE_INDEX].tolist()
    assert document["input_ids"].tolist() == [*bos, *before, *answer, eos]
    assert "".join(tokenizer.convert_ids_to_tokens(answer)) == (
        completion.removesuffix("</s>").replace(" ", "\u2581"))
    assert eos == tokenizer.eos_token_id
    if not prompt.endswith(" "):  # else the space would be in a token of both
        assert [*before, *answer] == joined[: len(before + answer)]


@pytest.mark.parametrize("template", BOS_AND_EOS)
@pytest.mark.parametrize("prompt", ["What is 3 plus 4?\n", ""])
@pytest.mark.parametrize("completion", ["The answer is 7.", "7", "The answer is 7.</s>"])
def test_completion_and_one_eos_are_trained(template, prompt, completion, tokenizer, tmp_path):
    bos = add_specials(tokenizer, template)
    row = {"prompt": prompt, "completion": completion}
    (document,) = encode_row(row, tokenizer, tmp_path)
    before = bos + plain(tokenizer, prompt)
    after = plain(tokenizer, completion.removesuffix("</s>")) + [tokenizer.eos_token_id]
    assert document["input_ids"].tolist() == before + after
    assert document["labels"].tolist() == [IGNORE_INDEX] * len(before) + after


@pytest.mark.parametrize("template", BOS_AND_EOS)
@pytest.mark.parametrize("text", ["The answer is 7.", "The answer is 7.</s>"])
def test_text_is_trained_with_one_eos(template, text, tokenizer, tmp_path):
    bos = add_specials(tokenizer, template)
    (document,) = encode_row({"text": text}, tokenizer, tmp_path)
    body = plain(tokenizer, text.removesuffix("</s>"))
    assert document["input_ids"].tolist() == bos + body + [tokenizer.eos_token_id]
    assert document["labels"].tolist() == document["input_ids"].tolist()


@pytest.mark.parametrize("template", ["</s> $A", "</s> $A </s>"])
def test_bos_that_is_eos_too_is_not_lost_before_an_empty_prompt(template, tokenizer, tmp_path):
    tokenizer.bos_token = tokenizer.eos_token
    add_specials(tokenizer, template)
    eos, answer = tokenizer.eos_token_id, plain(tokenizer, "7")
    for prompt, completion, ids in (("", "7", []), ("", "7</s>", []), ("</s>", "7", []),
                                    ("</s>3", "7", plain(tokenizer, "3"))):  # fmt: skip
        row = {"prompt": prompt, "completion": completion}
        (document,) = encode_row(row, tokenizer, tmp_path)
        assert document["input_ids"].tolist() == [eos, *ids, *answer, eos]
        assert document["labels"].tolist() == [IGNORE_INDEX] * (1 + len(ids)) + [*answer, eos]


@pytest.mark.parametrize("processor", [
    ByteLevel(trim_offsets=True), RobertaProcessing(("</s>", 2), ("<s>", 1), trim_offsets=True),
    Sequence([ByteLevel(trim_offsets=True), TemplateProcessing(single="$A", special_tokens=[])])],
    ids=["byte level", "roberta", "sequence"])  # fmt: skip
def test_tokens_of_spaces_are_trained_where_offsets_are_trimmed(processor, tokenizer, tmp_path):
    """As of Llama 3: at both ends of a span, and where it is spaces alone."""
    segments = [{"text": text, "label": label} for text, label in
                [("A:   ", False), ("7  \n\n", True), ("  3 ", False), (" 4 ", True), (" ", False),
                 ("  ", True)]]  # fmt: skip
    talk = [ASKED[0], says("assistant", "    7    and\n\n    4")]
    rows = [{"segments": segments}, {"messages": talk}, {"messages": [*talk, *talk]}]
    want = [encode_row(row, tokenizer, tmp_path)[0]["labels"].tolist() for row in rows]
    tokenizer.backend_tokenizer.post_processor = processor
    saved = tokenizer.backend_tokenizer.to_str()
    got = [encode_row(row, tokenizer, tmp_path)[0]["labels"].tolist() for row in rows]
    assert got == want and all(labels[-1] != IGNORE_INDEX for labels in got)
    for labels in got[1:]:  # all of an answer, in one go
        trained = [label != IGNORE_INDEX for label in labels]
        assert sum(a < b for a, b in zip(trained, trained[1:])) == labels.count(labels[-1])
    assert tokenizer.backend_tokenizer.to_str() == saved  # the one that is saved


def test_text_that_begins_with_bos_gets_no_second(tokenizer, tmp_path):
    (bos,) = add_specials(tokenizer, "<s> $A")
    for row in {"text": "{}It is 7."}, {"prompt": "{}What?", "completion": "It is 7."}:
        first, *rest = row
        for start in "", "<s>":
            filled = {first: row[first].format(start), **{key: row[key] for key in rest}}
            (one,) = encode_row(filled, tokenizer, tmp_path)
            ids = one["input_ids"].tolist()
            assert ids[0] == bos and ids.count(bos) == 1
            assert one["length"] == len(one["labels"])


def test_end_of_a_prompt_stays_where_it_was_written(tokenizer, tmp_path):
    row = {"prompt": "What is 3 plus 4?</s>", "completion": "It is 7."}
    (document,) = encode_row(row, tokenizer, tmp_path)
    assert whole([document], tokenizer) == ["What is 3 plus 4?</s>It is 7.</s>"]


def test_several_forms_in_one_file_train_together(tokenizer, run_main, tiny_model, tmp_path):
    """And keys that no form has are named."""
    rows = [row for row, has_template, _, _ in FORMS.values() if has_template]
    rows.append({"text": "It is 7.", "id": 3, "source": "web"})
    write_jsonl(tmp_path / "data.jsonl", rows)
    (tmp_path / "chatml.jinja").write_text(FORMED)
    flags = ["--model", tiny_model("llama"), "--dataset", tmp_path / "data.jsonl", "--max_steps", 1]
    flags += ["--batch_size", len(rows), "--chat_template", tmp_path / "chatml.jinja"]
    code, out, err = run_main(*flags, "--output_dir", tmp_path / "run", "--report_to", "none")
    assert code == 0, err
    (line,) = re.findall("^data: .*", out, re.M)
    assert f": {len(rows)} rows, " in line and "skipped" not in line
    for form in (
        "2 text", "4 prompt and completion", "5 messages", "6 instruction and output",
        "4 conversations", "1 question and answer", "1 text (ignored: id, source)",
        "1 question and answer (ignored: text, id)",
        "1 instruction and response (ignored: category)",
    ):  # fmt: skip
        assert f", {form}" in line or f"({form}" in line, form
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
    assert f"{record['tokens']:,} tokens, {record['loss_tokens']:,} of them in the" in line


FORMED = (  # a template whose markers are in the demo's vocabulary
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


# ------------------------------------------------------------------------------------------------
# What is not
# ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(
    "row",
    [
        {"input_ids": 5},
        {"input_ids": "abc"},
        {"input_ids": {"a": 1}},
        {"input_ids": [None, 1]},
        {"input_ids": ["5", "6"]},
        {"input_ids": [[1, 2], [3, 4]]},
        {"input_ids": [[1, 2], [3]]},
        {"input_ids": [1.5, 2.5]},
        {"input_ids": [-5, 2]},
        {"input_ids": [5, IGNORE_INDEX, 7]},
        {"input_ids": [5, 2, 99999]},
        {"input_ids": [2**40, 1]},
        {"input_ids": [5, 6, 7], "labels": [5, 6]},
        {"input_ids": [5, 6], "labels": [5, 6, 7]},
        {"input_ids": [5, 6], "labels": "ab"},
        {"input_ids": [5, 6], "labels": 6},
        {"input_ids": [5, 6], "labels": [5, 99999]},
        {"input_ids": [5, 6], "labels": [-7, -7]},
        {"input_ids": [5, 6], "labels": [IGNORE_INDEX, 2**40]},
    ],
    ids=json.dumps,
)
def test_ids_of_another_kind_are_never_trained(row, tokenizer, tmp_path):
    """Left out or refused, with the line named."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    first, second = encode_file(path, tokenizer)
    assert first["kept"] and not second["kept"]
    assert second["left_out"] and "data.jsonl line 2" in second["where"]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": " \n"}, "text is empty"),
        ({"text": 3}, "text is int"),
        ({"text": ["x"]}, "text is list"),
        ({"text": []}, "text is list"),
        ({"prompt": 3, "completion": "x"}, "prompt is int"),
        ({"text": "\ud800"}, "half a character"),
        ({"prompt": "x", "completion": ["y"]}, "completion is list"),
        ({"prompt": TALK, "completion": "y"}, "completion is str"),
        ({"prompt": ["x"], "completion": "x"}, "must be an object with a role"),
        ({"prompt": "x", "completion": None}, "null in completion"),
        ({"messages": None}, "null in messages"),
        ({"messages": []}, "no assistant message"),
        ({"messages": [3]}, "must be an object with a role"),
        ({"messages": TALK[:2]}, "no assistant message"),
        ({"messages": [*ASKED, says("user", "x"), says("assistant", " ")]}, "message is empty"),
        ({"messages": [says("user", "x"), says("assistant", 0)]}, "content"),
        ({"messages": [says("user", "x"), says("assistant", {})]}, "content"),
        ({"messages": [says("user", "x"), {"role": "assistant"}]}, "no content"),
        ({"messages": [says("user", "x"), {"content": "y"}]}, "must be an object with a role"),
        ({"messages": [ASKED[0], says("assistant", "y", weight=0.5)]}, "weight 0.5"),
        ({"messages": "x"}, "messages is str, expected a list"),
        ({"messages": 3}, "messages is int, expected a list"),
        ({"prompt": "x", "completion": " "}, "completion is empty"),
        ({"instruction": "x", "output": ""}, "an assistant message is empty"),
        ({"segments": [{"text": "x"}]}, "a segment must be an object"),
        ({"messages": ASKED, "tools": "{"}, ""),
        ({"conversations": "x"}, "conversations is str"),
        ({"conversations": [{"from": None, "value": "x"}]}, "must be an object with a role"),
        ({"question": 3, "answer": "x"}, "question is int"),
        ({"question": " ", "answer": "x"}, "question is blank: nothing is asked"),
        ({"instruction": "", "input": " ", "output": "x"}, "instruction is blank: nothing is"),
        ({**NO_INPUT, "history": [["", "x"]]}, "a turn of history has no question, or no answer"),
        ({**NO_INPUT, "history": [["x", " "]]}, "a turn of history has no question, or no answer"),
        ({**NO_INPUT, "history": ASKED}, "a turn of history must be a list of a question"),
        ({**NO_INPUT, "history": ["ab"]}, "a turn of history must be a list of a question"),
        (["x"], "is list, expected an object"),
    ],
    ids=json.dumps,
)
def test_row_that_cannot_be_trained_is_left_out_and_counted(row, reason, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 1
    assert re.search(rf"; 1 skipped: .*{re.escape(reason)}.* \({re.escape(str(path))} line 2\)",
                     line)  # fmt: skip


def test_tokenizer_gets_a_bounded_text_at_once(tokenizer, tmp_path, monkeypatch):
    """Long rows go through it one by one, short ones together; what comes out is the same."""
    rows = [{"text": "x" * n} for n in (3, 900, 4, 5, 6, 200, 7, 2000, 2)] + [{"input_ids": [5, 6]}]
    path, sizes = write_jsonl(tmp_path / "data.jsonl", rows), []
    tokenize = tokenize_documents.tokenize_batch

    def noted(documents, tokenizers):
        sizes.append([sum(len(part.text) for part in document) for document in documents
                      if isinstance(document, list)])  # fmt: skip
        return tokenize(documents, tokenizers)

    want = [document["digest"] for document in encode_file(path, tokenizer)]
    monkeypatch.setattr(tokenize_documents, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(tokenize_documents, "tokenize_batch", noted)
    assert [document["digest"] for document in encode_file(path, tokenizer)] == want
    assert [n for batch in sizes for n in batch] == [len(row.get("text", "")) for row in rows[:-1]]
    assert all(sum(batch[1:]) < 500 for batch in sizes) and len(sizes) < len(rows)


def test_key_that_is_half_a_character_can_be_said(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine", "\ud800": 1}])
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 1 and "(ignored: " in line
    write_jsonl(path, [{"text": "x"}, {"\ud800": 1}])
    assert f"{path} line 2" in refusal([path], tokenizer)


def test_long_rows_are_cut_and_counted(tokenizer, tmp_path):
    rows = [{"prompt": "aaaaaaaa", "completion": "bbbb"}, {"prompt": "a" * 12, "completion": "bb"}]
    path = write_jsonl(tmp_path / "data.jsonl", [*rows, {"text": "c"}])
    found, line = prepare([path], tokenizer, max_seq_len=12)
    assert found.lengths.tolist() == [12, 2] and "; 1 truncated to 12 tokens" in line
    assert "1 skipped: nothing to train on within its first 12 tokens" in line and "line 2" in line
    assert prepare([path], tokenizer, max_seq_len=2)[0].lengths.tolist() == [2]
    assert "none of its 3 examples can be trained on" in refusal([path], tokenizer, max_seq_len=1)
    ids, labels = (t.tolist() for t in found.document(0))
    assert tokenizer.decode(ids) == "aaaaaaaabbbb" and labels == [IGNORE_INDEX] * 8 + ids[8:]


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"poem": "x", "title": "y"}, "poem, title, which is not a supported format. Use the keys"),
        ({"poem": "x", "title": "y"}, "--columns poem=question title=answer"),
        ({"query": "x", "reply": "y"}, "has query, but no response or answer"),
        ({"query": "x", "reply": "y"}, "--columns reply=response"),
        ({}, "has no keys"),
    ],
    ids=json.dumps,
)
def test_row_of_no_known_form_is_refused(row, wanted, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, {"text": "too"}, row])
    message = refusal([path], tokenizer)
    assert f"{path} line 3: " in message and wanted in message
    assert "prompt and completion" in message  # what it can be named


SHAREGPT_TALK = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
LIKELY = {  # keys that no form has: (row, what is advised, the form that comes of it)
    "message": ({"message": ASKED}, "message=messages", "messages"),
    "message, a text": ({"message": "x"}, "message=text", "text"),
    "conversation": ({"conversation": SHAREGPT_TALK}, "conversation=conversations",
                     "conversations"),
    "dialog": ({"id": "7", "dialog": ASKED}, "dialog=messages", "messages (ignored: id)"),
    "chat as text": ({"chat": json.dumps(ASKED)}, "chat=messages", "messages"),
    "prompt": ({"prompt": ASKED}, "prompt=messages", "messages"),
    "capitals": ({"Instruction": "x", "Input": "y", "Output": "z"},
                 "Instruction=instruction Input=input Output=output", "instruction and output"),
    "misspelt": ({"instruction": "x", "respones": "y"}, "respones=response",
                 "instruction and response"),
    "misspelt answer": ({"question": "x", "anwser": "y"}, "anwser=answer", "question and answer"),
    "words": ({"question_id": "7", "user_text": "x", "model_answer": "y"},
              "user_text=question model_answer=answer",
              "question and answer (ignored: question_id)"),
    "answer first": ({"reply": "y", "ask": "x"}, "ask=question reply=answer",
                     "question and answer"),
    "camels": ({"userMessage": "x", "assistantMessage": "y"},
               "userMessage=question assistantMessage=answer", "question and answer"),
    "translation": ({"source": "x", "target": "y"}, "source=question target=answer",
                    "question and answer"),
    "summary": ({"article": "x", "summary": "y"}, "article=question summary=answer",
                "question and answer"),
    "system": ({"system": "x", "user": "y", "bot": "z"}, "user=question bot=answer",
               "question and answer"),
    "spaces": ({"My question": "x", "The answer": "y"},
               "'My question=question' 'The answer=answer'", "question and answer"),
    "semicolon": ({"a;b": "x"}, "'a;b=text'", "text"),
    "half": ({"prompt": "x", "model_output": "y"}, "model_output=completion",
             "prompt and completion"),
    "half of lists": ({"prompt": ASKED[:1], "answers": ASKED[1:]}, "answers=completion",
                      "prompt and completion"),
    "tokens": ({"tokens": [5, 6]}, "tokens=input_ids", "input_ids"),
    "segment": ({"segment": [{"text": "x", "label": True}]}, "segment=segments", "segments"),
    "unknown words": ({"n": 3, "poem": "x", "title": "y"}, "poem=question title=answer",
                      "question and answer (ignored: n)"),
    "one text": ({"url": "u", "body": "x"}, "body=text", "text (ignored: url)"),
    "nothing": ({"dialog": ["x", "y"], "n": 3}, "", ""),
    "half alone": ({"question": "x"}, "", ""),
    "no list of messages": ({"conversation": [{"input": "x", "output": "y"}]}, "", ""),
    "a key that cannot be renamed": ({"a=b": ASKED}, "", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LIKELY)
def test_advice_on_keys_helps_when_it_is_followed(name, tokenizer):
    row, advice, form = LIKELY[name]
    words = "Use the keys of a supported format: messages; "
    with pytest.raises(FatalExample, match=words) as caught:
        formats.parse_example(row, tokenizer)
    said = str(caught.value).partition(" --columns renames keys, for instance: --columns ")[2]
    assert said == advice
    if advice:
        found, (document,) = formats.parse_example(row, tokenizer, shlex.split(said))
        assert found == form and document


ROWS_OF_FORMS = {
    "input_ids": {"input_ids": [5, 6]}, "messages": {"messages": ASKED},
    "conversations": {"conversations": ASKED}, "prompt": {"prompt": "x", "completion": "y"},
    "instruction": NO_INPUT, "question": {"question": "x", "answer": "y"},
    "segments": {"segments": [{"text": "x", "label": True}]}, "text": {"text": "x"},
}  # fmt: skip


@pytest.mark.parametrize("form", ROWS_OF_FORMS)
def test_each_key_that_has_a_meaning_is_obeyed_or_ends_the_run(form, tokenizer):
    """The whole table: what a form takes changes its documents, or a row is refused for it."""
    row = ROWS_OF_FORMS[form]
    known = formats.EXAMPLE_FORMATS
    taken = next(known[keys] for keys in known if row.keys() >= set(keys))
    for key in {*formats.REFUSED_KEYS, *formats.OPTIONAL_KEYS, *formats.SYNONYMS} - row.keys():
        for value in ("x", False) if key in formats.REFUSED_KEYS else ("x",):
            if formats.SYNONYMS.get(key, key) in taken and (form, key) != ("prompt", "system"):
                continue  # see the forms above, and below
            with pytest.raises(FatalExample, match=rf"^has {key}"):
                formats.parse_example({**row, key: value}, tokenizer)
    for key in formats.REFUSED_KEYS:  # also in a message; empty it asks for nothing
        talk = [ASKED[0], {**ASKED[1], key: "x"}]
        with pytest.raises(FatalExample, match=f"^has {key}: .*leave it out"):
            formats.parse_example({"messages": talk}, tokenizer)
        assert formats.parse_example({**row, key: []}, tokenizer)[1]
        renamed, _ = formats.parse_example({**row, key: "x"}, tokenizer, [f"{key}=unused"])
        assert renamed.endswith("(ignored: unused)")


@pytest.mark.parametrize(
    "row, words",
    [({"conversations": [{"from": "human", "value": "x"}, {"from": "critic", "value": "y"},
                         {"from": "gpt", "value": "z"}]}, "message with role 'critic'; supp"),
     ({"messages": [says("user", "x"), says("Ass istant", "y")]}, "role 'Ass istant'; supported"),
     ({"messages": [says("user", "x", train=True), ASKED[1]]}, "train True in a user message"),
     ({"messages": [says("user", [{"type": "image", "text": "x"}]), ASKED[1]]},
      "'image' in the content"),
     ({"messages": [says("user", "x", name="Zoe"), ASKED[1]]}, "leaves out the name in message 1"),
     ({**NO_INPUT, "input": "x", "context": "y"}, "another key that means input"),
     ({"system": "Be long.", "messages": TALK}, "has a system message and another one"),
     ({"messages": ASKED, "tools": [ADD], "chat_template_kwargs": {"tools": []}}, "has tools in"),
     ({"messages": ASKED, "chat_template_kwargs": {"tokenize": True}}, "has tokenize in chat_"),
     ({"prompt": "x", "completion": "y", "tools": [ADD]}, "tools, which a plain-text prompt")],
    ids=["role", "assistant", "user", "image", "name", "twice", "system", "tools twice",
         "variables", "tools"],
)  # fmt: skip
def test_what_would_not_be_trained_ends_the_run(row, words, tokenizer):
    with pytest.raises(FatalExample, match=words):
        formats.parse_example(row, tokenizer)


def test_masks_beside_ids_are_obeyed(tokenizer, tmp_path):
    """Padding goes, and what any mask leaves out is not trained."""
    for mask in "completion_mask", "assistant_masks":
        row = {"input_ids": [5, 6, 7, 8], mask: [0, 0, 1, 1], "attention_mask": [1, 1, 1, 0]}
        (one,) = encode_row(row, tokenizer, tmp_path)
        assert one["input_ids"].tolist() == [5, 6, 7]
        assert one["labels"].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 7]
    _, ((_, labels),) = formats.parse_example(
        {"input_ids": [5, 6], "labels": "[5, 6]", "completion_mask": [0, 1]}, tokenizer)
    assert labels == [IGNORE_INDEX, 6]


# rows of a padded data set: the keys of each, and the (ids, labels) that are left of it
NO = IGNORE_INDEX
PADDED = {
    "right": ({"input_ids": [5, 6, 7, 0, 0], "labels": [NO, 6, 7, NO, NO],
               "attention_mask": [1, 1, 1, 0, 0]}, ([5, 6, 7], [NO, 6, 7])),
    "left": ({"input_ids": [0, 0, 8, 9, 10], "labels": [NO, NO, NO, 9, 10],
              "attention_mask": [0, 0, 1, 1, 1]}, ([8, 9, 10], [NO, 9, 10])),
    "both": ({"input_ids": [0, 11, 12, 13, 0], "labels": [NO, NO, 12, 13, NO],
              "attention_mask": [0, 1, 1, 1, 0]}, ([11, 12, 13], [NO, 12, 13])),
    "labels of padding": ({"input_ids": [0, 14, 15, 0], "labels": [0, NO, 15, 0],
                           "attention_mask": [0, 1, 1, 0]}, ([14, 15], [NO, 15])),
    "no labels": ({"input_ids": [0, 16, 17], "attention_mask": [0, 1, 1]}, ([16, 17], [16, 17])),
    "mask of the completion": (
        {"input_ids": [0, 18, 19, 20, 0], "completion_mask": [0, 0, 1, 1, 0],
         "attention_mask": [0, 1, 1, 1, 0]}, ([18, 19, 20], [NO, 19, 20])),
    "mask of the completion, also of padding": (
        {"input_ids": [0, 21, 22, 0], "completion_mask": [1, 0, 1, 1],
         "attention_mask": [0, 1, 1, 0]}, ([21, 22], [NO, 22])),
    "labels and masks": (
        {"input_ids": [5, 6, 7, 8, 9, 0], "labels": [5, NO, 7, 8, 30, NO],
         "completion_mask": [0, 1, 1, 1, 1, 1], "assistant_masks": [1, 1, 0, 1, 1, 0],
         "attention_mask": [1, 1, 1, 1, 1, 0]}, ([5, 6, 7, 8, 9], [NO, NO, NO, 8, 30])),
    "padding alone is trained": (
        {"input_ids": [5, 6, 0], "labels": [NO, NO, 0], "attention_mask": [1, 1, 0]}, None),
}  # fmt: skip


@pytest.mark.parametrize("names", [PADDED, [*PADDED][::-1]], ids=["down", "up"])
def test_padding_goes_with_its_labels(names, tokenizer, tmp_path):
    """A label that stayed would shift those of all later rows. What any of the masks or labels
    excludes is not trained; a label may be another token than the one it stands at."""
    path = write_jsonl(tmp_path / "data.jsonl", [PADDED[name][0] for name in names])
    rows, line = prepare([path], tokenizer)
    assert "1 skipped: nothing to train on" in line
    want = [PADDED[name][1] for name in names if PADDED[name][1]]
    assert len(rows) == len(want)
    for i, (ids, labels) in enumerate(want):
        assert [tensor.tolist() for tensor in rows.document(i)] == [ids, labels], i
        assert rows.n_loss_tokens[i] == sum(label != NO for label in labels[1:])


ORDER = [  # of the table in docs/data.md
    ["input_ids"], ["messages"], ["conversations"], ["prompt", "completion"],
    ["instruction", "output"], ["instruction", "response"], ["question", "answer"],
    ["question", "response"], ["query", "response"], ["query", "answer"], ["prompt", "response"],
    ["prompt", "answer"], ["prompt", "output"], ["input", "output"], ["segments"], ["text"]]


def test_of_several_forms_the_upper_one_in_the_table_is_taken(tokenizer):
    assert len(ORDER) == len(formats.EXAMPLE_FORMATS)
    for upper, lower in itertools.combinations(ORDER, 2):
        for keys in [*upper, *lower], [*lower, *upper]:
            first = next(form for form in ORDER if {*form} <= {*keys})
            assert formats.find_format(dict.fromkeys(keys, "x")) == tuple(first)
    form, (document,) = formats.parse_example({"text": "x", "conversations": SHAREGPT_TALK,
                                               "messages": ASKED, **NO_INPUT}, tokenizer)
    assert form == "messages (ignored: text, conversations, instruction, output)"
    assert [document[0].text[slice(*span)] for span in document[0].in_loss] == [
        "The answer is 7.<|im_end|>"]  # fmt: skip


# of two values for one thing: (row, another way to write it without the one that loses, columns)
WINS = {
    "text over null after --columns": (
        {"poem": "x", "text": None}, {"text": "x"}, ("poem=text",)),
    "text over blank after --columns": ({"poem": "x", "text": " "}, {"text": "x"}, ("poem=text",)),
    "empty prompt over null after --columns": (
        {"hint": None, "prompt": "", "completion": "x"}, {"prompt": "", "completion": "x"},
        ("hint=prompt",)),
    "input over a blank context": (
        {"context": " ", "input": "x", "output": "y"}, {"input": "x", "output": "y"}, ()),
    "context over a blank input": (
        {"context": "x", "input": " ", "output": "y"}, {"input": "x", "output": "y"}, ()),
    "system over a blank one": (
        {"system_prompt": "x", "system": "", **NO_INPUT}, {"system": "x", **NO_INPUT}, ()),
    "tools of a synonym over an empty list": (
        {"messages": ASKED, "tools": [], "functions": [ADD]}, {"messages": ASKED, "tools": [ADD]},
        ()),
    "tool_calls over a blank call": (
        {"messages": [ASKED[0], {"role": "function_call", "content": "", "tool_calls": [
            {"name": "add", "arguments": {"a": 3}}]}], "tools": [ADD]},
        {"messages": [ASKED[0], {"role": "assistant", "tool_calls": [
            {"function": {"name": "add", "arguments": {"a": 3}}}]}], "tools": [ADD]}, ()),
    "speech beside tool_calls": (
        {"messages": [ASKED[0], {"role": "tool_call", "content": "Let me see.", "tool_calls": [
            {"name": "add", "arguments": {"a": 3}}]}], "tools": [ADD]},
        {"messages": [ASKED[0], {"role": "assistant", "content": "Let me see.", "tool_calls": [
            {"name": "add", "arguments": {"a": 3}}]}], "tools": [ADD]}, ()),
    "variables of the row": (
        {"messages": ASKED, "tools": None, "chat_template_kwargs": {"tools_of": "x"}},
        {"messages": ASKED}, ()),
}  # fmt: skip


@pytest.mark.parametrize("name", WINS)
def test_what_is_empty_gives_way_in_any_order(name, tokenizer):
    row, want, columns = WINS[name]
    tokenizer.chat_template = TEMPLATES["tools"]
    _, documents = formats.parse_example(want, tokenizer)
    for keys in row, [*row][::-1]:
        found = formats.parse_example({key: row[key] for key in keys}, tokenizer, columns)[1]
        assert found == documents


@pytest.mark.parametrize("row, columns, words", [
    ({"context": "x", "input": "y", "output": "z"}, (), "another key that means input"),
    ({"context": "x", "article": "y", **NO_INPUT}, (), "another key that means input"),
    ({"system_prompt": "x", "system": "y", **NO_INPUT}, (), "another key that means system"),
    ({"functions": [ADD], "tools": [ADD], "messages": ASKED}, (), "another key that means tools"),
    ({"poem": "x", "text": "y"}, ("poem=text",), "has text twice after --columns"),
    ({"poem": "x", "song": "y"}, ("poem=text", "song=text"), "has text twice after --columns"),
], ids=["input", "synonyms", "system", "tools", "columns", "two columns"])  # fmt: skip
def test_two_values_for_one_thing_end_the_run_in_any_order(row, columns, words, tokenizer):
    for keys in row, [*row][::-1]:
        with pytest.raises(FatalExample, match=words):
            formats.parse_example({key: row[key] for key in keys}, tokenizer, columns)


def test_an_answer_is_trained_if_all_its_flags_say_so(tokenizer):
    flags = [key for key in formats.TRAIN_KEYS if key != "weight"]
    for key in flags:
        for pair in {key: True, "weight": 1}, {"weight": 1, key: True}:
            assert formats.read_message({**ASKED[1], **pair})["train"] is True
        for pair in ({key: True, "weight": 0}, {"weight": 0, key: True}, {key: False, "weight": 1},
                     {"weight": 1, key: False}):  # fmt: skip
            assert formats.read_message({**ASKED[1], **pair})["train"] is False
    answers = [{**ASKED[1], "weight": 0}, *AGAIN]
    _, (document,) = formats.parse_example({"prompt": ASKED[:1], "completion": answers}, tokenizer)
    assert [document[0].text[slice(*span)] for span in document[0].in_loss] == [
        "It is 4.<|im_end|>"]  # fmt: skip


def test_other_names_in_a_message_give_way_and_are_named(tokenizer):
    talk = [{"role": "user", "from": "gpt", "value": "y", "content": "What is 3 plus 4?"},
            {"from": "human", "role": "assistant", "content": "The answer is 7."}]
    form, documents = formats.parse_example({"messages": talk}, tokenizer)
    assert form == "messages (ignored in messages: from, value)"
    assert documents == formats.parse_example({"messages": ASKED}, tokenizer)[1]


def test_reasoning_beside_reasoning_in_the_content_is_all_trained(tokenizer):
    """As a template that takes both renders it; else the row is refused."""
    answer = says("assistant", "<think>by hand</think>It is 7.", reasoning_content="so")
    tokenizer.chat_template = TEMPLATES["tools"]
    _, (document,) = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
    assert [document[0].text[slice(*span)] for span in document[0].in_loss] == [
        "<think>so</think><think>by hand</think>It is 7.<|im_end|>"]  # fmt: skip
    tokenizer.chat_template = TEMPLATES["drops reasoning"]
    with pytest.raises(FatalExample, match="leaves out reasoning_content of message 2"):
        formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)


def test_greeting_of_the_assistant_is_said_not_to_be_trained(tokenizer):
    form, (document,) = formats.parse_example(
        {"messages": [says("assistant", "Hello."), *ASKED]}, tokenizer)
    assert "(not trained: the assistant's first message" in form
    (part,) = document
    assert [part.text[slice(*span)] for span in part.in_loss] == ["The answer is 7.<|im_end|>"]


def test_variables_of_a_row_are_given_to_the_template(tokenizer, tmp_path):
    tokenizer.chat_template = "{{ effort }}" + CHATML
    for value in {"effort": "low"}, json.dumps({"effort": "low"}):
        row = {"messages": ASKED, "chat_template_kwargs": value}
        assert whole(encode_row(row, tokenizer, tmp_path), tokenizer)[0].startswith("low<")


def test_calls_and_tools_of_other_frameworks_are_openais(tokenizer):
    call = {"name": "add", "arguments": {"a": 3}}
    tokenizer.chat_template = TEMPLATES["tools"]
    want = formats.parse_example(
        {"messages": [ASKED[0], {"role": "assistant", "tool_calls": [{"function": call}]}],
         "tools": [ADD]}, tokenizer)[1]
    asked = {"from": "human", "value": ASKED[0]["content"]}
    for more in {"functions": [ADD["function"]]}, {"tools": json.dumps([ADD["function"]])}:
        talk = [asked, {"from": "function_call", "value": json.dumps(call)}]
        assert formats.parse_example({"conversations": talk, **more}, tokenizer)[1] == want


@pytest.mark.parametrize("call", [
    {"name": "add", "arguments": "", "parameters": {"a": 3}},
    {"name": "add", "parameters": None, "args": {"a": 3}, "arguments": {}},
    {"name": "add", "arguments": '{"a": 3}', "parameters": {"a": 3}},
    {"function": {"name": "add"}, "arguments": {"a": 3}},
    {"function": {"name": "add", "arguments": {}}, "parameters": {"a": 3}},
    {"function": "add", "args": {"a": 3}, "arguments": None}], ids=json.dumps)  # fmt: skip
def test_arguments_of_a_call_are_found_in_any_of_their_places(call, tokenizer):
    ((found,), (as_text,)) = (openai_calls([call], as_text) for as_text in (False, True))
    assert found == {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}
    assert json.loads(as_text["function"]["arguments"]) == {"a": 3}


@pytest.mark.parametrize("call", [
    {"name": "add", "arguments": {"a": 3}, "parameters": {"a": 4}},
    {"function": {"name": "add", "arguments": {"a": 3}}, "arguments": {"a": 4}},
    {"function": "add", "args": {"a": 3}, "arguments": {"a": 4}}], ids=json.dumps)  # fmt: skip
def test_arguments_of_a_call_that_differ_leave_the_row_out(call, tokenizer):
    with pytest.raises(ValueError, match="a call of add has ar.* and .*, which differ"):
        openai_calls([call], as_text=False)


@pytest.mark.parametrize("user, assistant", [
    ("Human", "Assistant"), ("USER", "AI"), (" user ", "Bot"), ("prompter", "GPT")])  # fmt: skip
def test_roles_have_other_names(user, assistant, tokenizer):
    want = formats.parse_example({"messages": ASKED}, tokenizer)
    for role, content in ("role", "content"), ("from", "value"):
        talk = [{role: user, content: ASKED[0]["content"]},
                {role: assistant, content: ASKED[1]["content"]}]  # fmt: skip
        assert formats.parse_example({"messages": talk}, tokenizer) == want


def test_lists_may_be_text_as_python_prints_them(tokenizer):
    """As pandas writes them into a CSV."""
    want = formats.parse_example({"messages": ASKED}, tokenizer)
    assert formats.parse_example({"messages": str(ASKED), "tools": "None"}, tokenizer) == want
    lists = {"prompt": ASKED[:1], "completion": ASKED[1:]}
    _, want = formats.parse_example(lists, tokenizer)
    texts = {key: str(value) for key, value in lists.items()}
    assert formats.parse_example(texts, tokenizer)[1] == want
    with pytest.raises(ValueError, match="messages is str"):
        formats.parse_example({"messages": "[print('x')]"}, tokenizer)


def test_columns_are_renamed_before_the_form_is_found(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"poem": "It is 7.", "label": 1}])
    message = refusal([path], tokenizer, renames=("label=unused",))
    assert "has poem, unused, which is not a supported format" in message
    rows, line = prepare([path], tokenizer, renames=("poem=text", "label=unused"))
    assert len(rows) == 1 and "1 text (ignored: unused)" in line
    twice = write_jsonl(path, [{"poem": "x", "text": "y"}])
    assert "has text twice" in refusal([twice], tokenizer, renames=("poem=text",))


def test_column_that_no_row_has_ends_the_run(tokenizer, tmp_path):
    """Of the rows to train on and those to evaluate on; it may be null."""
    row = {"instruction": "Add 3 and 4.", "output": "It is 7."}
    train = write_jsonl(tmp_path / "train.jsonl", [row | {"hint": None}])
    test = write_jsonl(tmp_path / "test.jsonl", [row | {"label": 1}])
    for fault, eval_dataset, *columns in (
        ("", [test], "hint=input", "label=unused"), ("label=unused", [], "label=unused"),
        ("hnt=input", [test], "hnt=input", "label=unused"),
    ):  # fmt: skip
        config = Config(dataset=(str(train),), eval_dataset=tuple(map(str, eval_dataset)),
                        columns=tuple(columns), max_seq_len=64)
        words = f"--columns {fault}: no example has the key"
        expected = (pytest.raises(RunEnd, match=words) if fault
                    else contextlib.nullcontext())  # fmt: skip
        with one_process(), expected:
            prepare_data(config, tmp_path, tokenizer, len(tokenizer), "2020-01-31")


def test_keys_of_messages_that_the_template_does_not_name_are_told(tokenizer):
    answer = ASKED[1] | {"wieght": 0, "mood": "good", "tool_calls": [], "train": True}
    form, _ = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
    assert form == "messages (ignored in messages: wieght, mood)"
    talk = [ASKED[0], ASKED[1] | {"loss": False, "mood": "bad"}, ASKED[0], answer]
    _, ((part,),) = formats.parse_example({"messages": talk}, tokenizer)
    assert len(part.in_loss) == 1
    tokenizer.chat_template = CHATML.replace("m.role }}", "m.role }}{{ m.mood }}")
    with pytest.raises(ValueError, match="prompt for an answer has 'assistant.n', but this"):
        formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
    tokenizer.chat_template = CHATML.replace("m.content }}", "m.content }}{{ m.mood }}")
    form, ((part,),) = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
    assert form == "messages (ignored in messages: wieght)" and "7.good" in part.text
    # transformers gives it by all its names
    thought = [{"reasoning_content": "so", "train": False}]
    assert not formats.unread_keys(thought, "{{ m.thinking }}")
    assert formats.unread_keys(thought, "{{ m.content }}") == ["reasoning_content"]


def test_keys_cannot_command_a_terminal(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "x", "\x1b[2J": 1}])
    _, line = prepare([path], tokenizer)
    assert line.isprintable() and r"(ignored: \x1b[2J)" in line


# ------------------------------------------------------------------------------------------------
# Any row
# ------------------------------------------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # lone surrogates too
TEXTS = st.one_of(
    ANY_TEXT, st.sampled_from(["", " ", "</s>", "<|im_end|>", "<think>", "</think>", "{{ x }}"]),
    st.builds(lambda text, n: text * n, ANY_TEXT, st.sampled_from([100, 3000])),
)  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(ANY_TEXT, inner, max_size=3)
    ),
    max_leaves=6,
)


def mostly(right, other=VALUES):
    """One in twelve is something else."""
    return st.integers(0, 11).flatmap(lambda n: other if n == 7 else right)


def some_of(**parts):
    return st.fixed_dictionaries({}, optional={key: mostly(part) for key, part in parts.items()})


CALLS = st.lists(mostly(st.one_of(
    some_of(function=some_of(name=TEXTS, arguments=st.one_of(VALUES, VALUES.map(json.dumps)))),
    some_of(name=TEXTS, arguments=VALUES))), max_size=2)  # fmt: skip
CONTENTS = mostly(
    TEXTS, st.lists(mostly(st.one_of(TEXTS, some_of(type=TEXTS, text=TEXTS))), max_size=3)
)
MESSAGES = st.lists(
    mostly(st.builds(
        lambda role, content, more: {"role": role, "content": content, **more},
        mostly(st.sampled_from(["user", "assistant", "system", "tool"]), ANY_TEXT),
        mostly(CONTENTS),
        some_of(tool_calls=CALLS, weight=st.sampled_from([0, 1]), train=st.booleans(),
                reasoning_content=TEXTS, thinking=TEXTS, name=TEXTS))),
    max_size=4)  # fmt: skip
TALKS = st.builds(
    lambda asked, answered, more: [says("user", asked), says("assistant", answered), *more],
    TEXTS, TEXTS, mostly(st.just([]), MESSAGES),
)  # fmt: skip
SHAREGPT = st.lists(
    mostly(st.builds(lambda a, b: {"from": a, "value": b},
                     st.sampled_from(["human", "gpt", "system", "tool"]), mostly(TEXTS))),
    max_size=4)  # fmt: skip
DEFINED = st.lists(
    mostly(some_of(type=st.just("function"), function=some_of(name=TEXTS, parameters=VALUES))),
    max_size=2,
)
TOOL_LISTS = st.one_of(DEFINED, DEFINED.map(json.dumps))
IDS = st.lists(mostly(st.integers(-2, 400)), max_size=6)
PARTS_OF_ROWS = [
    {"messages": MESSAGES, "tools": TOOL_LISTS},
    {"messages": TALKS},
    {"conversations": SHAREGPT, "system": TEXTS, "tools": TOOL_LISTS},
    {"prompt": TEXTS, "completion": TEXTS},
    {"prompt": MESSAGES, "completion": MESSAGES, "tools": TOOL_LISTS},
    {"instruction": TEXTS, "input": TEXTS, "output": TEXTS},
    {"question": TEXTS, "answer": TEXTS},
    {"text": TEXTS},
    {"input_ids": IDS, "labels": IDS},
]
ROWS = st.one_of(
    VALUES,
    *(st.fixed_dictionaries({k: mostly(v) for k, v in parts.items()}) for parts in PARTS_OF_ROWS),
    st.builds(lambda row, more: row | more, some_of(**PARTS_OF_ROWS[0]),
              st.dictionaries(ANY_TEXT, VALUES, max_size=2)),
)  # fmt: skip


@pytest.mark.parametrize("template", [
    "drops reasoning", None,
    *(pytest.param(trait, marks=pytest.mark.slow) for trait in TEMPLATES
      if trait != "drops reasoning")])  # fmt: skip
def test_any_row_is_trained_or_left_out_or_refused(template, tokenizer, tmp_path):
    """Whatever JSON can say: with documents of which each label is an id or -100, or a reason."""
    tokenizer.chat_template, most = TEMPLATES.get(template), 50
    path = tmp_path / "data.jsonl"
    seen = {"kept": 0, "skipped": 0, "refused": 0}

    @settings(max_examples=70, derandomize=True, deadline=None, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(rows=st.lists(ROWS, min_size=1, max_size=3))
    def check(rows):
        write_jsonl(path, [{"text": "fine"}, *rows])  # a file that begins with [ is one array
        fine, *documents = encode_file(path, tokenizer, most)
        assert fine["kept"] and len(documents) >= sum(row is not None for row in rows)
        for one in documents:
            ids, labels = one["input_ids"].tolist(), one["labels"].tolist()
            for key in "format", "left_out", "where":
                one[key].encode()  # Arrow holds nothing else
            if one["kept"]:
                seen["kept"] += 1
                assert not one["left_out"] and one["format"]
                assert len(ids) == len(labels) == one["length"] <= most
                assert all(0 <= token < len(tokenizer) for token in ids)
                assert all(label == IGNORE_INDEX or 0 <= label < len(tokenizer) for label in labels)
                n_loss_tokens = sum(label != IGNORE_INDEX for label in labels[1:])
                assert one["n_loss_tokens"] == n_loss_tokens > 0
            else:
                is_refused = one["refused"]
                seen["refused" if is_refused else "skipped"] += 1
                assert one["left_out"].strip()
                assert re.fullmatch(rf"{re.escape(str(path))} line [2-4]", one["where"])

    check()
    assert min(seen.values()) > 3, seen  # all three come up
