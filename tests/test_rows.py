"""Every form, every kind of file, every trait of chat templates: what of a row is learnt, exactly.

The templates here are small, each with a trait of released ones. What is learnt is told by decoding
the encoded rows, never by what the script says of them.
"""

import copy
import csv
import gzip
import json
import re

import datasets
import pytest
import tokenizers
from conftest import one_process
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer

import train_fsdp_qlora as script

IGNORE = script.IGNORE
SPECIAL = ("<|im_start|> <|im_end|> <|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>"
           " <|user|> <|assistant|> <|system|>").split()  # fmt: skip


@pytest.fixture(scope="module")
def made(demo_directory):
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


@pytest.fixture
def tokenizer(made):
    """A new one for each test, which may change it; it closes turns by tokens of its own."""
    tokenizer = copy.deepcopy(made)
    tokenizer.chat_template = CHATML
    return tokenizer


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode(source, tokenizer, max_seq_len=1024):
    """What encode_pieces gives for a file."""
    pieces, _ = script.find_pieces(str(source))
    return list(script.encode_pieces(pieces, tokenizer, max_seq_len, len(tokenizer)))


def encode_row(row, tokenizer, directory):
    """The documents of one row, none of which is left out."""
    documents = encode(write_jsonl(directory / "row.jsonl", [row]), tokenizer)
    assert [one["left_out"] for one in documents] == [""] * len(documents)
    return documents


def prepare(sources, tokenizer, max_seq_len=1024, day="2020-01-31"):
    """The Rows of some sources, and the line on them."""
    with one_process():
        return script.prepare_rows(
            [str(source) for source in sources], tokenizer, max_seq_len, len(tokenizer), day
        )


def refusal(sources, tokenizer):
    with pytest.raises(script.Stop) as caught:
        prepare(sources, tokenizer)
    return str(caught.value)


def learnt_runs(document, tokenizer):
    """[(the text before, the text)] of each part that is learnt in one go."""
    ids, labels = list(map(int, document["input_ids"])), list(map(int, document["labels"]))
    assert all(label in (token, IGNORE) for token, label in zip(ids, labels, strict=True))
    runs, at = [], 0
    while at < len(ids):
        start = at
        while at < len(ids) and labels[at] != IGNORE:
            at += 1
        if at > start:
            runs.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:at])))
        at += 1
    return runs


def learnt(documents, tokenizer):
    """The learnt texts of each document of a row."""
    return [[text for _, text in learnt_runs(one, tokenizer)] for one in documents]


def whole(documents, tokenizer):
    return [tokenizer.decode(one["input_ids"]) for one in documents]


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


# ------------------------------------------------------------------------------------------------
# Templates
# ------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: reasoning of turns before the last user's is dropped, the last turn has an empty one
REASONING = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set parts = m.content.split('</think>') %}"
    "{% set thought = parts[0].replace('<think>', '').strip() if parts[1:] else '' %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.asked and (thought or loop.last) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].strip() }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# gpt-oss: the last turn is closed by another token than those before it, which also lose what was
# in the analysis channel
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# DeepSeek: the generation prompt opens reasoning, which no rendered turn has
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# GLM: no turn is closed
UNCLOSED = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# SmolLM3: what is learnt is marked, here without the header but with the line's end
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.unmarked %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}<|im_end|>{{ '\\n' }}{% endgeneration %}{% endif %}"
    "{% if m.note %} {% generation %}{{ m.note }}{% endgeneration %}{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "closed": CHATML,
    "marked": MARKED,
    "drops reasoning": REASONING,
    "last turn closed otherwise": CHANNELS,
    "generation prompt opens reasoning": OPENED,
    "not closed": UNCLOSED,
    "content in parts": PARTS,
    "raises on a system message": STRICT,
    "tools": TOOLS,
}

ASKED = [turn("user", "What is 3 plus 4?"), turn("assistant", "The answer is 7.")]
AGAIN = [turn("user", "And 2 times 2?"), turn("assistant", "It is 4.")]
THIRD = [turn("user", "And 1 minus 1?"), turn("assistant", "That is 0.")]
BRIEF = turn("system", "Be brief.")
TALK = [BRIEF, *ASKED, *AGAIN]


# ------------------------------------------------------------------------------------------------
# Forms
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
# name: (row, whether the tokenizer has a chat template, whole text, what of it is learnt)
FORMS = {
    "text": ({"text": "The answer is 7."}, True, "The answer is 7.</s>", ["The answer is 7.</s>"]),
    "text without template": ({"text": "It is 7."}, False, "It is 7.</s>", ["It is 7.</s>"]),
    "prompt and completion": (
        {"prompt": "What is 3 plus 4?\n", "completion": "It is 7."}, True,
        "What is 3 plus 4?\nIt is 7.</s>", ["It is 7.</s>"]),
    "message lists": (
        {"prompt": TALK[:4], "completion": TALK[4:]}, True, CHAT_TEXT, ["It is 4.<|im_end|>"]),
    "completion of several turns": (
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
    "null beside a form": (
        {"messages": None, "tools": None, "text": "It is 7."}, True, "It is 7.</s>",
        ["It is 7.</s>"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form_is_learnt_as_specified(name, tokenizer, tmp_path):
    row, has_template, text, parts = FORMS[name]
    if not has_template:
        tokenizer.chat_template = None
    documents = encode_row(row, tokenizer, tmp_path)
    assert whole(documents, tokenizer) == [text]
    assert learnt(documents, tokenizer) == [parts]
    (document,) = documents
    assert document["n_learnt"] == sum(int(x) != IGNORE for x in document["labels"][1:])
    assert document["length"] == len(document["input_ids"]) and not document["cut"]


@pytest.mark.parametrize("labels", [None, [IGNORE, IGNORE, 7, IGNORE], [9, 8, 7, 6]], ids=str)
def test_ids_are_taken_as_they_are(labels, tokenizer, tmp_path):
    row = {"input_ids": [5, 6, 7, 8], "labels": labels}
    (document,) = encode_row(row, tokenizer, tmp_path)
    assert document["input_ids"].tolist() == [5, 6, 7, 8]
    assert document["labels"].tolist() == (labels or [5, 6, 7, 8])
    assert document["n_learnt"] == (1 if labels and IGNORE in labels else 3)


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
        {"input_ids": [5, IGNORE, 7]},
        {"input_ids": [5, 2, 99999]},
        {"input_ids": [2**40, 1]},
        {"input_ids": [5, 6, 7], "labels": [5, 6]},
        {"input_ids": [5, 6], "labels": [5, 6, 7]},
        {"input_ids": [5, 6], "labels": "ab"},
        {"input_ids": [5, 6], "labels": 6},
        {"input_ids": [5, 6], "labels": [5, 99999]},
        {"input_ids": [5, 6], "labels": [-7, -7]},
        {"input_ids": [5, 6], "labels": [IGNORE, 2**40]},
    ],
    ids=json.dumps,
)
def test_ids_of_another_kind_are_never_learnt(row, tokenizer, tmp_path):
    """Left out or refused, with the line named."""
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    first, second = encode(path, tokenizer)
    assert first["kept"] and not second["kept"]
    assert second["left_out"] and "data.jsonl line 2" in second["where"]


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
    assert f"data.jsonl: {len(rows)} rows, " in line and "left out" not in line
    for form in (
        "2 text", "3 prompt and completion", "4 messages", "4 instruction and output",
        "3 conversations", "1 question and answer", "1 text (ignored: id, source)",
    ):  # fmt: skip
        assert f", {form}" in line or f": {form}" in line, form
    (record,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").open())
    assert f"{record['tokens']:,} tokens, {record['learnt_tokens']:,} of them learnt" in line


FORMED = (  # a template whose markers are in the demo's vocabulary
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    "row, wanted",
    [
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "name the better answer completion"),
        ({"chosen": TALK, "rejected": TALK}, "preferences are not learnt"),
        ({"poem": "x", "title": "y"}, "has poem, title; want messages"),
        ({"instruction": "x"}, "instruction and output"),
        ({}, "has no keys"),
    ],
    ids=json.dumps,
)
def test_row_of_no_known_form_is_refused(row, wanted, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, {"text": "too"}, row])
    message = refusal([path], tokenizer)
    assert f"{path} line 3: " in message and wanted in message
    assert "prompt and completion" in message  # what it can be named


def test_conversation_without_a_template_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}])
    message = refusal([path], tokenizer)
    assert f"{path} line 1" in message and "--chat_template" in message


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"text": " \n"}, "text is empty"),
        ({"text": 3}, "text is int"),
        ({"text": "\ud800"}, "half a character"),
        ({"prompt": "x", "completion": ["y"]}, "completion is list"),
        ({"prompt": TALK, "completion": "y"}, "completion is str"),
        ({"messages": TALK[:2]}, "no message of the assistant"),
        ({"messages": [*ASKED, turn("user", "x"), turn("assistant", " ")]}, "assistant is empty"),
        ({"messages": [turn("user", "x"), turn("assistant", 0)]}, "content"),
        ({"messages": [turn("user", "x"), turn("assistant", {})]}, "content"),
        ({"messages": [turn("user", "x"), {"role": "assistant"}]}, "no content"),
        ({"messages": [turn("user", "x"), {"content": "y"}]}, "no object with a role"),
        ({"messages": [turn("user", [{"type": "image"}]), ASKED[1]]}, "content that is no text"),
        ({"messages": [ASKED[0], turn("assistant", "y", weight=0.5)]}, "weight 0.5"),
        ({"messages": "x"}, "messages is str, want a list"),
        ({"messages": 3}, "messages is int, want a list"),
        ({"prompt": "x", "completion": " "}, "completion is empty"),
        ({"instruction": "x", "output": ""}, "assistant is empty"),
        ({"messages": [turn("user\ud800", "x"), ASKED[1]]}, ""),
        ({"messages": ASKED, "tools": "{"}, ""),
        ({"conversations": "x"}, "conversations is str"),
        ({"conversations": [{"from": None, "value": "x"}]}, "no object with a role"),
        ({"question": 3, "answer": "x"}, "question is int"),
        (["x"], "is list, want an object"),
    ],
    ids=json.dumps,
)
def test_row_that_cannot_be_learnt_is_left_out_and_counted(row, reason, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 1
    assert re.search(rf"; 1 left out: .*{re.escape(reason)}.* \({re.escape(str(path))} line 2\)",
                     line)  # fmt: skip


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
    assert found.lengths.tolist() == [12, 2] and "; 1 cut to 12 tokens" in line
    assert "1 left out: nothing to learn in its first 12 tokens" in line and "line 2" in line
    ids, labels = (t.tolist() for t in found.tokens(0))
    assert tokenizer.decode(ids) == "aaaaaaaabbbb" and labels == [IGNORE] * 8 + ids[8:]


@pytest.mark.parametrize(
    "row, words",
    [({"conversations": [{"from": "human", "value": "x"}, {"from": "function_call", "value": "y"},
                         {"from": "gpt", "value": "z"}]}, "message from 'function_call'; known"),
     ({**NO_INPUT, "history": [["x", "y"]]}, "has history, which would be lost"),
     ({"system": "Be long.", "messages": TALK}, "has a system message and another one")],
    ids=["role", "history", "system"],
)  # fmt: skip
def test_what_would_not_be_learnt_ends_the_run(row, words, tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    assert f"{path} line 2: has " in refusal([path], tokenizer)
    assert words in refusal([path], tokenizer)


def test_text_that_begins_with_bos_gets_no_second(tokenizer, tmp_path):
    tokenizer = copy.deepcopy(tokenizer)
    bos = tokenizer.bos_token_id
    tokenizer._tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)])  # fmt: skip
    for row in {"text": "{}It is 7."}, {"prompt": "{}What?", "completion": "It is 7."}:
        first, *rest = row
        for start in "", "<s>":
            filled = {first: row[first].format(start), **{key: row[key] for key in rest}}
            (one,) = encode_row(filled, tokenizer, tmp_path)
            ids = one["input_ids"].tolist()
            assert ids[0] == bos and ids.count(bos) == 1
            assert one["length"] == len(one["labels"])


# ------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------

FLAT = [
    {"prompt": prompt, "completion": completion}
    for prompt, completion in [
        ("What is 3 plus 4?\n", "The answer is 7."), ("", "NA"), ("null", "1.50"), ("a, b", '"x"'),
        ("ä ✓ 🙂", "two\nlines"), ("007", "None"), ("2020-01-31", "true"), ("nan", "-0"),
    ]
]  # fmt: skip
NESTED = [
    {"messages": TALK},
    {"messages": [ASKED[0], turn("assistant", "It is 7.", weight=0), *AGAIN]},
    {"messages": ASKED, "id": 3},
    {"messages": THIRD},
    {"messages": AGAIN},
]


def write_table(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)


def write_csv(path, rows, opened=open):
    with opened(path, "wt", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_kind(kind, directory, rows):
    """The sources that are these rows."""
    half, path = len(rows) // 2, directory / "data"
    if kind in ("jsonl", "ndjson", "json of lines"):
        return [write_jsonl(directory / f"data.{kind.split()[0]}", rows)]
    if kind == "json":
        path = directory / "data.json"
        path.write_text(f"\ufeff\n {json.dumps(rows, indent=1)}\n", encoding="utf-8")
    elif kind in ("jsonl.gz", "json.gz"):
        path = directory / f"data.{kind}"
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        text = lines if kind == "jsonl.gz" else json.dumps(rows)
        path.write_bytes(gzip.compress(text.encode()))
    elif kind == "parquet":
        path = directory / "data.parquet"
        write_table(path, rows)
    elif kind == "csv":
        path = directory / "data.csv"
        write_csv(path, rows)
    elif kind == "csv.gz":
        path = directory / "data.csv.gz"
        write_csv(path, rows, gzip.open)
    elif kind == "saved Dataset":
        datasets.Dataset.from_list(rows).save_to_disk(path)
    elif kind == "saved DatasetDict":
        parts = {"train": [{"text": "another"}], "test_sft": rows}
        datasets.DatasetDict(
            {name: datasets.Dataset.from_list(part) for name, part in parts.items()}
        ).save_to_disk(path)
        return [f"{path},split=test_sft"]
    else:  # several files
        (path / "below").mkdir(parents=True)
        write_jsonl(path / "a.jsonl", rows[:half])
        write_table(path / "below" / "b.parquet", rows[half:])
        (path / "README.md").write_text("no rows")
        if kind == "several":
            return [path / "a.jsonl", path / "below" / "b.parquet"]
        if kind == "pattern":
            return [path / "**" / "[ab].*"]
        assert kind == "directory"
    return [path]


KINDS = ("jsonl", "ndjson", "json of lines", "json", "jsonl.gz", "json.gz", "parquet",
         "saved Dataset", "saved DatasetDict", "directory", "several", "pattern")  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "csv", "csv.gz"])
def test_every_kind_of_file_gives_the_same_rows(kind, tokenizer, tmp_path):
    for name, rows in {"flat": FLAT, "nested": NESTED}.items():
        if name == "nested" and kind.startswith("csv"):
            continue
        want = [document for row in rows for document in encode_row(row, tokenizer, tmp_path)]
        (tmp_path / name).mkdir()
        sources = write_kind(kind, tmp_path / name, rows)
        found, line = prepare(sources, tokenizer)
        assert f"{len(want)} rows" in line and "left out" not in line
        assert len(found) == len(want)
        for i, one in enumerate(want):
            ids, labels = (t.tolist() for t in found.tokens(i))
            assert ids == one["input_ids"].tolist() and labels == one["labels"].tolist()
        assert found.lengths.tolist() == [one["length"] for one in want]
        assert found.n_learnt.tolist() == [one["n_learnt"] for one in want]
        assert found.digests.tolist() == [one["digest"] for one in want]


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
def test_table_is_read_whole_whatever_its_pieces(rows, monkeypatch, tokenizer, tmp_path):
    monkeypatch.setattr(script, "PIECE_ROWS", rows)
    (source,) = write_kind("saved Dataset", tmp_path, [*FLAT, {"prompt": "x", "completion": None}])
    pieces, _ = script.find_pieces(str(source))
    assert len(pieces) == -(-9 // rows)
    read = [(where, row) for piece in pieces for where, row in script.read_piece(*piece)]
    assert [row for _, row in read[:-1]] == FLAT and read[-1][1]["prompt"] == "x"
    named = [script.say_where(*where) for where, _ in read]
    assert named == [f"{source} row {i}" for i in range(1, 10)]
    assert f"; 1 left out: completion null ({source} row 9)" in prepare([source], tokenizer)[1]


LINES = {
    "unix": b"\n".join,
    "dos": b"\r\n".join,
    "last line ends": lambda lines: b"".join(line + b"\n" for line in lines),
    "blank lines": lambda lines: b"\n\n" + b"\n \t\r\n\n".join(lines) + b"\n\n",
    "byte order mark": lambda lines: b"\xef\xbb\xbf" + b"\n".join(lines),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("size", [1, 2, 7, 40, 100, 2**20])
def test_every_line_is_read_once_and_named_whatever_the_pieces(size, name, monkeypatch, tmp_path):
    """Lines of 11 to 130 bytes in pieces that end anywhere in them."""
    texts = [f"row {i} " + "x✓\u2028"[i % 3] * (i * 5 % 40) for i in range(40)]
    lines = [
        json.dumps({"text": text}, ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(texts)
    ]
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINES[name](lines))
    monkeypatch.setattr(script, "PIECE_BYTES", size)
    pieces, _ = script.find_pieces(str(path))
    assert len(pieces) == -(-path.stat().st_size // size)
    read = [(where, row) for piece in pieces for where, row in script.read_piece(*piece)]
    assert [row for _, row in read] == [{"text": text} for text in texts]
    by_line = path.read_bytes().split(b"\n")
    for where, row in read:
        source, _, number = script.say_where(*where).rpartition(" line ")
        line = by_line[int(number) - 1].removeprefix(b"\xef\xbb\xbf")
        assert source == str(path) and json.loads(line) == row


@pytest.mark.parametrize("at", [0, 1, 25, 49])
@pytest.mark.parametrize("size", [60, 333, 2**20])
def test_bad_line_is_named_in_a_file_of_several_pieces(at, size, monkeypatch, tokenizer, tmp_path):
    lines = [json.dumps({"text": f"row {i} " + "x" * (i % 50)}) for i in range(50)]
    lines[at] = f'{{"text": "row {at}'
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(script, "PIECE_BYTES", size)
    monkeypatch.setattr(script, "n_cores", lambda: 1)
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 49 and "1 left out: is no JSON" in line
    assert f"({path} line {at + 1})" in line


def test_several_processes_encode_a_large_file_in_its_order(tokenizer, tmp_path):
    n, filler = 700, "answer " * 300
    path = write_jsonl(tmp_path / "data.jsonl", ({"text": f"row {i} {filler}"} for i in range(n)))
    with path.open("a") as file:
        file.write('{"text": 5}\n')
    assert path.stat().st_size > script.PIECE_BYTES
    rows, line = prepare([path], tokenizer, max_seq_len=12)
    assert f"1 left out: text is int, want a string ({path} line {n + 1})" in line
    texts = [tokenizer.decode(rows.tokens(i)[0]) for i in range(len(rows))]
    assert [text.split()[1] for text in texts] == [str(i) for i in range(n)]


@pytest.mark.parametrize(
    "bad", [b'{"text": ', b"nonsense", b'{"text": "\xe4"}', b"\0", b"[" * 100_000], ids=repr
)
def test_line_that_is_no_json_is_left_out(bad, tokenizer, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}\n' + bad + b'\n{"text": "c"}\n')
    kept = [one for one in encode(path, tokenizer) if one["kept"]]
    (left_out,) = (one for one in encode(path, tokenizer) if not one["kept"])
    assert whole(kept, tokenizer) == ["a</s>", "b</s>", "c</s>"]
    assert "is no JSON" in left_out["left_out"] and left_out["where"] == f"{path} line 4"


def test_row_of_an_array_is_named(tokenizer, tmp_path):
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": "fine"}, {"text": 5}], indent=1))
    _, line = prepare([path], tokenizer)
    assert f"({path} row 2)" in line


@pytest.mark.parametrize(
    "source, wanted",
    [
        ("none.jsonl", "none.jsonl"),
        ("none/*.jsonl", "no file matches"),
        ("nothing", "no file in it ends in"),
        ("data.jsonl,part=3", "split=, name= or revision="),
        ("data.jsonl,split=test", "what stands behind the comma is for Hub ids"),
        ("nothing,split=test", "what stands behind the comma is for Hub ids"),
        ("saved,name=large", "what stands behind the comma is for Hub ids"),
        ("saved,split=test", "test"),
        ("empty.jsonl", "has no rows"),
        ("broken.json", "is no JSON"),
        ("broken.parquet", "broken.parquet"),
        ("data.txt", "neither a Hub id"),
    ],
)
def test_source_that_has_no_rows_is_refused(source, wanted, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nothing").mkdir()
    for name, text in {"empty.jsonl": "", "broken.json": "[1,", "broken.parquet": "PAR1",
                       "data.txt": "x", "data.jsonl": "{}"}.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    if source.startswith("saved"):
        datasets.DatasetDict({"train": datasets.Dataset.from_list(FLAT)}).save_to_disk("saved")
    assert wanted in refusal([f"./{source}"], tokenizer)


@pytest.mark.parametrize(
    "text, words",
    [("prompt,completion\nWhat is 1+1?,two,\nWhat is 2+2?,four,\n", "Length of header"),
     ("question,answer\nIn Paris, who?,the mayor\nWhat?,four\n", "Length of header"),
     ("question,answer\nWhat?,four\nIn Paris, who?,the mayor\n", "Expected 2 fields in line 3"),
     ("question,answer\n", "no data")],
    ids=["trailing comma", "first row too long", "later row too long", "header only"],
)  # fmt: skip
def test_csv_of_more_cells_than_names_is_refused(text, words, tokenizer, tmp_path):
    """Pandas would take the first column for an index, and shift the others."""
    (tmp_path / "data.csv").write_text(text)
    found = refusal([tmp_path / "data.csv"], tokenizer)
    assert "data.csv" in found and words in found


def test_what_lies_aside_in_a_directory_is_no_data(tokenizer, tmp_path):
    """Hidden copies, and what runs have written there."""
    path = tmp_path / "data"
    for name in ".ipynb_checkpoints/a.jsonl", "run/metrics.jsonl", "run/demo/data.jsonl", "a.jsonl":
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path / name, [{"text": name}])
    (path / "run" / ".lock").touch()
    assert len(prepare([path], tokenizer)[0]) == 1
    assert "no file in it" in refusal([path / "run"], tokenizer)


@pytest.mark.parametrize("name", ["lr=1,bs=4.jsonl", "a[1].jsonl", "what?.jsonl"])
def test_name_of_a_file_is_taken_as_it_is(name, tokenizer, tmp_path):
    write_jsonl(tmp_path / name, [{"text": "x"}])
    assert len(prepare([tmp_path / name], tokenizer)[0]) == 1


@pytest.mark.parametrize(
    "name, content, words",
    [("bad.json", b"[1,", "bad.json row 1: is no JSON"),
     ("bad.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "bad.jsonl.gz line ")],
    ids=["array", "torn"],
)  # fmt: skip
def test_bad_file_among_others_is_named_in_one_line(name, content, words, tokenizer, tmp_path):
    """They are read by several processes, whose errors come with a traceback."""
    good = write_jsonl(tmp_path / "good.jsonl", [{"text": "x"}])
    (tmp_path / name).write_bytes(content)
    found = refusal([good, tmp_path / name], tokenizer)
    assert words in found and len(found) < 400


@pytest.mark.parametrize("source", ["owner/rows-2.5", "owner/rows,revision=refs/convert/parquet"])
def test_name_like_that_of_a_hub_id_is_asked_for_there(source, tokenizer):
    assert "neither a Hub id" not in refusal([source], tokenizer)


def test_all_rows_that_are_left_out_are_counted(tokenizer, tmp_path):
    """Also those of rare reasons; of lines that are no JSON wherever in them that shows."""
    lines = ['{"text": "fine"}', *('{"text": "' + "x" * n for n in range(1, 5))]
    kinds = 1, 1.5, None, [1], {"a": 1}, True  # six more reasons
    lines += [json.dumps({"text": kind}) for kind in kinds]
    path = tmp_path / "data.jsonl"
    latin = [f'{{"text": "{"x" * n}ä"}}'.encode("latin-1") for n in (1, 3)]
    path.write_bytes(b"\n".join([*map(str.encode, lines), *latin]))
    _, line = prepare([path], tokenizer)
    assert "data.jsonl: 1 rows, 1 text; " in line
    assert f"; 4 left out: is no JSON: Invalid control character at ({path} line 2)" in line
    assert f"; 2 left out: is no JSON: invalid continuation byte ({path} line 12)" in line
    assert line.endswith("; 3 left out for other reasons")


def test_end_of_a_prompt_stays_where_it_was_written(tokenizer, tmp_path):
    row = {"prompt": "What is 3 plus 4?</s>", "completion": "It is 7."}
    (document,) = encode_row(row, tokenizer, tmp_path)
    assert whole([document], tokenizer) == ["What is 3 plus 4?</s>It is 7.</s>"]


def test_tools_beside_text_are_not_lost(tokenizer, tmp_path):
    row = {"prompt": "What is 3 plus 4?", "completion": "It is 7.", "tools": [ADD]}
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    assert f"{path} line 2: has tools, which a prompt in plain text" in refusal([path], tokenizer)
    for other in {**row, "tools": []}, {"text": "rendered with them", "tools": [ADD]}:
        encode_row(other, tokenizer, tmp_path)


# ------------------------------------------------------------------------------------------------
# Conversations
# ------------------------------------------------------------------------------------------------


def thought(reasoning, answer):
    return turn("assistant", f"<think>\n{reasoning}\n</think>\n\n{answer}")


PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "of": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "of": "both"}}}
CALLED = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [CALL]},
          turn("tool", "7"), ASKED[1]]  # fmt: skip
EMPTY = "<think>\n\n</think>\n\n"
CALL_TEXT = '<call>{"name": "add", "arguments": {"a": 3, "of": "both"}}</call><|im_end|>'
# name: (template, messages, what is learnt of each document)
CHATS = {
    "closed": ("closed", TALK, [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "marked": ("marked", TALK, [["The answer is 7.<|im_end|>\n", "It is 4.<|im_end|>\n"]]),
    "one marked turn not learnt": (
        "marked", [ASKED[0], turn("assistant", "The answer is 7.", weight=0), *AGAIN],
        [["It is 4.<|im_end|>\n"]]),
    "one turn not learnt by weight": (
        "closed", [ASKED[0], turn("assistant", "The answer is 7.", weight=0), *AGAIN],
        [["It is 4.<|im_end|>"]]),
    "one turn learnt by weight": (
        "closed", [ASKED[0], turn("assistant", "The answer is 7.", weight=1), *AGAIN],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "one turn not learnt by train": (
        "closed", [*ASKED, AGAIN[0], turn("assistant", "It is 4.", train=False), *THIRD],
        [["The answer is 7.<|im_end|>", "That is 0.<|im_end|>"]]),
    "last turn not learnt": (
        "closed", [*ASKED, AGAIN[0], turn("assistant", "It is 4.", train=False)],
        [["The answer is 7.<|im_end|>"]]),
    "two turns of the assistant": (
        "closed", [*ASKED, turn("assistant", "It is 4.")],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "content in parts of its own": (
        "closed", [turn("user", [{"type": "text", "text": "What is"}, " 3 plus 4?"]), ASKED[1]],
        [["The answer is 7.<|im_end|>"]]),
    "reasoning in the last turn": (
        "drops reasoning", [ASKED[0], thought("3 and 4", "The answer is 7.")],
        [["<think>\n3 and 4\n</think>\n\nThe answer is 7.<|im_end|>"]]),
    "reasoning in all turns": (
        "drops reasoning",
        [BRIEF, ASKED[0], thought("3 and 4", "The answer is 7."), AGAIN[0],
         thought("2 and 2", "It is 4.")],
        [["<think>\n3 and 4\n</think>\n\nThe answer is 7.<|im_end|>"],
         ["<think>\n2 and 2\n</think>\n\nIt is 4.<|im_end|>"]]),
    "no reasoning": (
        "drops reasoning", [*ASKED, *AGAIN, *THIRD],
        [[f"{EMPTY}The answer is 7.<|im_end|>"], [f"{EMPTY}It is 4.<|im_end|>"],
         [f"{EMPTY}That is 0.<|im_end|>"]]),
    "last turn closed otherwise": (
        "last turn closed otherwise", TALK,
        [["<|channel|>final<|message|>The answer is 7.<|return|>"],
         ["<|channel|>final<|message|>It is 4.<|return|>"]]),
    "thinking in its channel": (
        "last turn closed otherwise",
        [ASKED[0], turn("assistant", "The answer is 7.", thinking="3 and 4"), *AGAIN],
        [["<|channel|>analysis<|message|>3 and 4<|end|>"
          "<|start|>assistant<|channel|>final<|message|>The answer is 7.<|return|>"],
         ["<|channel|>final<|message|>It is 4.<|return|>"]]),
    "generation prompt opens reasoning": (
        "generation prompt opens reasoning", TALK, [["The answer is 7.</s>", "It is 4.</s>"]]),
    "not closed": ("not closed", ASKED, [["The answer is 7.</s>"]]),
    "several turns not closed": ("not closed", TALK, [["The answer is 7.", "It is 4.</s>"]]),
    "content in parts": (
        "content in parts", TALK, [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "no system message": (
        "raises on a system message", [*ASKED, *AGAIN],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "tool calls": ("tools", CALLED, [[CALL_TEXT, "The answer is 7.<|im_end|>"]]),
    "reasoning beside the content": (
        "tools", [ASKED[0], turn("assistant", "It is 7.", reasoning_content="3 and 4")],
        [["<think>3 and 4</think>It is 7.<|im_end|>"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_assistant_turns_are_learnt_to_their_closing_token(name, tokenizer, tmp_path):
    kind, messages, want = CHATS[name]
    tokenizer.chat_template = TEMPLATES[kind]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == want


@pytest.mark.parametrize("name", CHATS)
def test_turns_are_learnt_as_the_model_sees_them(name, tokenizer, tmp_path):
    """Each once over all documents of the row, behind what the model is given at that point."""
    kind, messages, _ = CHATS[name]
    tokenizer.chat_template = TEMPLATES[kind]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    runs = [run for document in documents for run in learnt_runs(document, tokenizer)]
    left = list(runs)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        mark = message["content"] and message["content"].split("</think>")[-1].strip()
        mine = [run for run in runs if (mark or CALL_TEXT) in run[1]]
        if not (message.get("weight", 1) and message.get("train", True)):
            assert not mine, f"message {i + 1} is learnt"
            continue
        ((before, text),) = mine  # once
        left.remove((before, text))
        shown = copy.deepcopy(messages[:i])
        for one in shown:
            content = one["content"] or ""
            if isinstance(content, list):
                content = "".join(p if isinstance(p, str) else p["text"] for p in content)
            in_parts = kind == "content in parts"
            one["content"] = [{"type": "text", "text": content}] if in_parts else content
        given = tokenizer.apply_chat_template(shown, add_generation_prompt=True, tokenize=False)
        assert given.startswith(before)
        assert given.removeprefix(before) == ("<think>\n" if "opens" in kind else "")
    assert not left, "more is learnt than the turns"


def test_only_the_completions_turns_are_learnt_where_earlier_ones_are_rewritten(
    tokenizer, tmp_path
):
    tokenizer.chat_template = REASONING
    before = [ASKED[0], thought("3 and 4", "The answer is 7."), AGAIN[0]]
    row = {"prompt": before, "completion": [thought("2", "It is 4.")]}
    documents = encode_row(row, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == [["<think>\n2\n</think>\n\nIt is 4.<|im_end|>"]]
    assert "3 and 4" not in whole(documents, tokenizer)[0]


def test_first_word_is_learnt_where_its_token_takes_the_space_before(tokenizer, tmp_path):
    tokenizer.add_tokens([" The", " It"])
    tokenizer.chat_template = CHATML.replace("assistant\n", "assistant: ").replace(
        "{{ m.role }}\n", "{{ m.role }}: "
    )
    documents = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == [[" The answer is 7.<|im_end|>", " It is 4.<|im_end|>"]]


def test_tools_are_a_list_or_json_text(tokenizer, tmp_path):
    tokenizer.chat_template = TOOLS
    (want,) = encode_row({"messages": CALLED, "tools": [ADD]}, tokenizer, tmp_path)
    assert '"name": "add", "parameters"' in tokenizer.decode(want["input_ids"])
    for row in (
        {"messages": CALLED, "tools": json.dumps([ADD])},
        {"prompt": CALLED[:1], "completion": CALLED[1:], "tools": [ADD]},
    ):
        (got,) = encode_row(row, tokenizer, tmp_path)
        assert got["digest"] == want["digest"]
    (without,) = encode_row({"messages": CALLED, "tools": []}, tokenizer, tmp_path)
    assert "parameters" not in tokenizer.decode(without["input_ids"])


def test_arguments_of_a_tool_call_are_an_object_or_json_text(tokenizer, tmp_path):
    tokenizer.chat_template = TOOLS
    (want,) = encode_row({"messages": CALLED}, tokenizer, tmp_path)
    messages = copy.deepcopy(CALLED)
    function = messages[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    (got,) = encode_row({"messages": messages}, tokenizer, tmp_path)
    assert got["digest"] == want["digest"]


# name: (template, row, what is left out, the roles)
LEFT_OUT = {
    "tools": (CHATML, {"messages": ASKED, "tools": [ADD]}, "tools", "user, assistant"),
    "tool calls": (
        CHATML, {"messages": CALLED[:3] + [turn("assistant", "It is 4.")]},
        "a tool call of message 2", "user, assistant"),
    "reasoning": (
        CHATML, {"messages": [ASKED[0], turn("assistant", "x", reasoning_content="3 and 4")]},
        "reasoning_content of message 2", "user, assistant"),
    "thinking": (
        CHATML, {"messages": [ASKED[0], turn("assistant", "x", thinking="3 and 4")]},
        "thinking of message 2", "user, assistant"),
    "a role": (
        CHATML.replace("{% for m in messages %}",
                       "{% for m in messages if m.role in ('user', 'assistant') %}"),
        {"messages": TALK}, "the content of message 1", "system, user, assistant"),
    "another role": (
        CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'observation' }}"),
        {"conversations": [{"from": "human", "value": "What is 3 plus 4?"},
                           {"from": "observation", "value": "sunshine"},
                           {"from": "gpt", "value": "It is 7."}]},
        None, "user, tool, assistant"),
    "a role of a template that knows tool": (
        CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}"),
        {"conversations": [{"from": "human", "value": "What is 3 plus 4?"},
                           {"from": "observation", "value": "sunshine"},
                           {"from": "gpt", "value": "It is 7."}]},
        "the content of message 2", "user, tool, assistant"),
    "reasoning within the last turn": (
        OPENED, {"messages": [ASKED[0], thought("carry nothing", "The answer is 7.")]},
        "message 2", "user, assistant"),
}  # fmt: skip


def test_turn_marked_twice_is_learnt_in_both_places(tokenizer, tmp_path):
    tokenizer.chat_template = MARKED
    messages = [*ASKED, AGAIN[0], turn("assistant", "It is 4.", note="Indeed")]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == [
        ["The answer is 7.<|im_end|>\n", "It is 4.<|im_end|>\n", "Indeed"]]  # fmt: skip


def test_turn_of_which_less_is_marked_once_another_follows_is_refused(tokenizer, tmp_path):
    """Which marks are the last turn's cannot be told."""
    tokenizer.chat_template = MARKED.replace("{% if m.note %}", "{% if m.note and loop.last %}")
    messages = [*ASKED[:1], turn("assistant", "It is 7.", note="Indeed"),
                turn("assistant", "Yes, 7.", note="Surely")]  # fmt: skip
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}])
    assert "marks, but none for message 3 alone" in refusal([path], tokenizer)


def test_turn_without_marks_is_not_taken_for_the_one_before(tokenizer, tmp_path):
    tokenizer.chat_template = MARKED
    unmarked = turn("assistant", "It is 4.", unmarked=True)
    messages = [ASKED[0], turn("assistant", "The answer is 7.", weight=0), AGAIN[0], unmarked]
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}])
    assert "marks, but none for message 4" in refusal([path], tokenizer)


@pytest.mark.parametrize("name", LEFT_OUT)
def test_row_of_which_the_template_leaves_something_out_is_refused(name, tokenizer, tmp_path):
    tokenizer.chat_template, row, what, roles = LEFT_OUT[name]
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": ASKED}, row])
    if what is None:
        rows, line = prepare([path], tokenizer)
        assert len(rows) == 2 and "left out" not in line
        return
    message = refusal([path], tokenizer)
    assert f"{path} line 2: the chat template leaves out " in message and what in message
    assert roles in message


def test_rows_that_the_template_raises_on_are_left_out_and_counted(tokenizer, tmp_path):
    tokenizer.chat_template = STRICT
    path = write_jsonl(
        tmp_path / "data.jsonl", [{"messages": m} for m in (ASKED, TALK, [BRIEF, *THIRD], AGAIN)]
    )
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 2
    assert f"2 left out: the chat template fails: only user and assistant ({path} line 2)" in line


def test_template_by_use_of_tools_is_taken(tokenizer, tmp_path):
    """A tokenizer may have several templates, as Command R has."""
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOLS}
    documents = encode_row({"messages": ASKED}, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == [["The answer is 7.<|im_end|>"]]
    documents = encode_row({"messages": CALLED, "tools": [ADD]}, tokenizer, tmp_path)
    assert learnt(documents, tokenizer) == [[CALL_TEXT, "The answer is 7.<|im_end|>"]]


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
    lambda asked, answered, more: [turn("user", asked), turn("assistant", answered), *more],
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


@pytest.mark.parametrize("template", [*TEMPLATES, None])
def test_any_row_is_learnt_or_left_out_or_refused(template, made, tmp_path):
    """Whatever JSON can say: with documents of which each label is an id or -100, or a reason."""
    tokenizer, most = copy.deepcopy(made), 50
    tokenizer.chat_template = TEMPLATES.get(template)
    path = tmp_path / "data.jsonl"
    seen = {"kept": 0, "left out": 0, "refused": 0}

    @settings(max_examples=70, derandomize=True, deadline=None, database=None,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(rows=st.lists(ROWS, min_size=1, max_size=3))
    def check(rows):
        write_jsonl(path, [{"text": "fine"}, *rows])  # a file that begins with [ is one array
        fine, *documents = encode(path, tokenizer, most)
        assert fine["kept"] and len(documents) >= sum(row is not None for row in rows)
        for one in documents:
            ids, labels = one["input_ids"].tolist(), one["labels"].tolist()
            for key in "form", "left_out", "where":
                one[key].encode()  # Arrow holds nothing else
            if one["kept"]:
                seen["kept"] += 1
                assert not one["left_out"] and one["form"]
                assert len(ids) == len(labels) == one["length"] <= most
                assert all(0 <= token < len(tokenizer) for token in ids)
                assert all(label == IGNORE or 0 <= label < len(tokenizer) for label in labels)
                assert one["n_learnt"] == sum(label != IGNORE for label in labels[1:]) > 0
            else:
                is_refused = one["left_out"].startswith(script.REFUSED)
                seen["refused" if is_refused else "left out"] += 1
                assert one["left_out"].removeprefix(script.REFUSED).strip()
                assert re.fullmatch(rf"{re.escape(str(path))} line [2-4]", one["where"])
                assert not is_refused or one["where"] in one["left_out"]

    check()
    assert min(seen.values()) > 3, seen  # all three come up


# ------------------------------------------------------------------------------------------------
# What was encoded is found again
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def parsed(monkeypatch):
    """Each row that is parsed, from now on."""
    rows, parse_row = [], script.parse_row

    def counted(row, tokenizer):
        rows.append(row)
        return parse_row(row, tokenizer)

    monkeypatch.setattr(script, "parse_row", counted)
    monkeypatch.setattr(script, "n_cores", lambda: 1)  # in this process
    return rows


def n_parsed(parsed, *args, **settings):
    parsed.clear()
    rows, _ = prepare(*args, **settings)
    return len(parsed), rows.sha256()


def test_encoded_rows_are_found_again(parsed, tokenizer, made, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [*NESTED, {"text": "found again"}])
    n, first = n_parsed(parsed, [path], tokenizer)
    assert n == len(NESTED) + 1
    assert n_parsed(parsed, [path], tokenizer) == (0, first)
    assert n_parsed(parsed, [path], copy.deepcopy(tokenizer), day="2021-01-31") == (0, first)


@pytest.mark.parametrize(
    "change", ["content", "max_seq_len", "template", "post-processor", "several", "day"]
)
def test_other_content_or_settings_are_encoded_anew(change, parsed, tokenizer, tmp_path):
    from tokenizers.processors import TemplateProcessing

    path = write_jsonl(tmp_path / "data.jsonl", [*NESTED, {"text": "It is 7."}])
    sources, options = [path], {}
    if change == "day":
        tokenizer.chat_template = "{{ strftime_now('%Y') }} " + CHATML
    _, before = n_parsed(parsed, sources, tokenizer)
    if change == "content":
        path.write_text(path.read_text().replace("It is 7.", "It is 8."))
    elif change == "max_seq_len":
        options["max_seq_len"] = 11
    elif change == "template":
        tokenizer.chat_template = CHATML.replace("<|im_start|>", "<|start|>")
    elif change == "post-processor":
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    elif change == "several":
        sources = [path, write_jsonl(tmp_path / "more.jsonl", [{"text": "fine"}])]
    elif change == "day":
        options["day"] = "2021-01-31"
    n, after = n_parsed(parsed, sources, tokenizer, **options)
    assert n >= 6 and (after != before or change == "day")


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet", "csv", "saved Dataset"])
def test_file_of_another_content_under_its_name_is_read_anew(kind, tokenizer, tmp_path):
    """Even one of as many bytes, written within the same second."""
    shas = []
    for answer in "It is 7.", "It is 8.":
        (source,) = write_kind(kind, tmp_path, [{"prompt": "x", "completion": answer}])
        rows, _ = prepare([source], tokenizer)
        assert tokenizer.decode(rows.tokens(0)[0]) == f"x{answer}</s>"
        shas.append(rows.sha256())
    assert len(set(shas)) == 2


def test_message_names_the_file_that_was_given(tokenizer, tmp_path):
    """Not another of the same content, which was encoded before."""
    for name in "first.jsonl", "second.jsonl":
        path = write_jsonl(tmp_path / name, [{"text": "fine, named"}, {"text": 5}])
        assert f"({path} line 2)" in prepare([path], tokenizer)[1]
