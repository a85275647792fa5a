"""What of a conversation is trained: each answer as the model will write it, by any chat template.

The templates are in rows.py, each with a trait of released ones.
"""

import copy
import datetime
import json
import shutil
import time

import pytest
from rows import (
    ADD, AGAIN, ASKED, BRIEF, CHATML, MARKED, OPENED, REASONING, STRICT, TALK, TEMPLATES, THIRD,
    TOOLS, UNCLOSED, chat_tokenizer, encode_row, prepare, refusal, says, trained, trained_runs,
    whole, write_jsonl)
from test_forms import BOS_AND_EOS, add_specials, plain
from transformers import AutoTokenizer

from fsdp_qlora.data.chat import closing_token, with_day


@pytest.fixture
def tokenizer(demo_directory):
    """One that closes answers by a token of its own."""
    return chat_tokenizer(demo_directory, CHATML)


# ------------------------------------------------------------------------------------------------
# Each answer is trained
# ------------------------------------------------------------------------------------------------

def thought(reasoning, answer):
    return says("assistant", f"<think>\n{reasoning}\n</think>\n\n{answer}")


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "of": "both"}}}
CALLED = [ASKED[0], {"role": "assistant", "content": None, "tool_calls": [CALL]},
          says("tool", "7"), ASKED[1]]  # fmt: skip
EMPTY = "<think>\n\n</think>\n\n"
CALL_TEXT = '<call>{"name": "add", "arguments": {"a": 3, "of": "both"}}</call><|im_end|>'
# name: (template, messages, what is trained of each document)
CHATS = {
    "closed": ("closed", TALK, [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "marked": ("marked", TALK, [["The answer is 7.<|im_end|>\n", "It is 4.<|im_end|>\n"]]),
    "one marked answer not trained": (
        "marked", [ASKED[0], says("assistant", "The answer is 7.", weight=0), *AGAIN],
        [["It is 4.<|im_end|>\n"]]),
    "one answer not trained by weight": (
        "closed", [ASKED[0], says("assistant", "The answer is 7.", weight=0), *AGAIN],
        [["It is 4.<|im_end|>"]]),
    "one answer trained by weight": (
        "closed", [ASKED[0], says("assistant", "The answer is 7.", weight=1), *AGAIN],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "one answer not trained by train": (
        "closed", [*ASKED, AGAIN[0], says("assistant", "It is 4.", train=False), *THIRD],
        [["The answer is 7.<|im_end|>", "That is 0.<|im_end|>"]]),
    "last answer not trained": (
        "closed", [*ASKED, AGAIN[0], says("assistant", "It is 4.", train=False)],
        [["The answer is 7.<|im_end|>"]]),
    "two answers of the assistant": (
        "closed", [*ASKED, says("assistant", "It is 4.")],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "content in parts of its own": (
        "closed", [says("user", [{"type": "text", "text": "What is"}, " 3 plus 4?"]), ASKED[1]],
        [["The answer is 7.<|im_end|>"]]),
    "reasoning in the last answer": (
        "drops reasoning", [ASKED[0], thought("3 and 4", "The answer is 7.")],
        [["<think>\n3 and 4\n</think>\n\nThe answer is 7.<|im_end|>"]]),
    "reasoning in all answers": (
        "drops reasoning",
        [BRIEF, ASKED[0], thought("3 and 4", "The answer is 7."), AGAIN[0],
         thought("2 and 2", "It is 4.")],
        [["<think>\n3 and 4\n</think>\n\nThe answer is 7.<|im_end|>"],
         ["<think>\n2 and 2\n</think>\n\nIt is 4.<|im_end|>"]]),
    "no reasoning": (
        "drops reasoning", [*ASKED, *AGAIN, *THIRD],
        [[f"{EMPTY}The answer is 7.<|im_end|>"], [f"{EMPTY}It is 4.<|im_end|>"],
         [f"{EMPTY}That is 0.<|im_end|>"]]),
    "last answer closed otherwise": (
        "last answer closed otherwise", TALK,
        [["<|channel|>final<|message|>The answer is 7.<|return|>"],
         ["<|channel|>final<|message|>It is 4.<|return|>"]]),
    "thinking in its channel": (
        "last answer closed otherwise",
        [ASKED[0], says("assistant", "The answer is 7.", thinking="3 and 4"), *AGAIN],
        [["<|channel|>analysis<|message|>3 and 4<|end|>"
          "<|start|>assistant<|channel|>final<|message|>The answer is 7.<|return|>"],
         ["<|channel|>final<|message|>It is 4.<|return|>"]]),
    "generation prompt opens reasoning": (
        "generation prompt opens reasoning", TALK, [["The answer is 7.</s>", "It is 4.</s>"]]),
    "not closed": ("not closed", ASKED, [["The answer is 7.</s>"]]),
    "closed by no special token": (
        "closed by plain text", TALK, [["The answer is 7.[end]\n", "It is 4.[end]\n</s>"]]),
    "several answers not closed": ("not closed", TALK, [["The answer is 7.", "It is 4.</s>"]]),
    "content in parts": (
        "content in parts", TALK, [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "no system message": (
        "raises on a system message", [*ASKED, *AGAIN],
        [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]),
    "tool calls": ("tools", CALLED, [[CALL_TEXT, "The answer is 7.<|im_end|>"]]),
    "reasoning beside the content": (
        "tools", [ASKED[0], says("assistant", "It is 7.", reasoning_content="3 and 4")],
        [["<think>3 and 4</think>It is 7.<|im_end|>"]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_assistant_answers_are_trained_to_their_closing_token(name, tokenizer, tmp_path):
    kind, messages, want = CHATS[name]
    tokenizer.chat_template = TEMPLATES[kind]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == want


@pytest.mark.parametrize("name", CHATS)
def test_answers_are_trained_as_the_model_sees_them(name, tokenizer, tmp_path):
    """Each once over all documents of the row, behind what the model is given at that point."""
    kind, messages, _ = CHATS[name]
    tokenizer.chat_template = TEMPLATES[kind]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    runs = [run for document in documents for run in trained_runs(document, tokenizer)]
    left = list(runs)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        mark = message["content"] and message["content"].split("</think>")[-1].strip()
        mine = [run for run in runs if (mark or CALL_TEXT) in run[1]]
        if not (message.get("weight", 1) and message.get("train", True)):
            assert not mine, f"message {i + 1} is trained"
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
    assert not left, "more is trained than the answers"


def test_only_the_completions_answers_are_trained_where_earlier_ones_are_rewritten(
    tokenizer, tmp_path
):
    tokenizer.chat_template = REASONING
    before = [ASKED[0], thought("3 and 4", "The answer is 7."), AGAIN[0]]
    row = {"prompt": before, "completion": [thought("2", "It is 4.")]}
    documents = encode_row(row, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [["<think>\n2\n</think>\n\nIt is 4.<|im_end|>"]]
    assert "3 and 4" not in whole(documents, tokenizer)[0]


def test_first_word_is_trained_where_its_token_takes_the_space_before(tokenizer, tmp_path):
    tokenizer.add_tokens([" The", " It"])
    tokenizer.chat_template = CHATML.replace("assistant\n", "assistant: ").replace(
        "{{ m.role }}\n", "{{ m.role }}: "
    )
    documents = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [[" The answer is 7.<|im_end|>", " It is 4.<|im_end|>"]]


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


@pytest.mark.parametrize("template", BOS_AND_EOS)
def test_tokenizer_that_adds_bos_and_eos_adds_none_to_a_conversation(template, tokenizer, tmp_path):
    (text,) = whole(encode_row({"messages": TALK}, tokenizer, tmp_path), tokenizer)
    want = plain(tokenizer, text)
    add_specials(tokenizer, template)
    (document,) = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert document["input_ids"].tolist() == want


@pytest.mark.parametrize("template", [CHATML, UNCLOSED], ids=["closed", "not closed"])
def test_conversation_ends_with_its_last_trained_answer(template, tokenizer, tmp_path):
    """What the user says behind it is nothing to learn from."""
    tokenizer.chat_template = template
    (want,) = encode_row({"messages": TALK[:3]}, tokenizer, tmp_path)
    (got,) = encode_row({"messages": TALK[:4]}, tokenizer, tmp_path)
    assert got["digest"] == want["digest"] and got["labels"][-1] == got["input_ids"][-1]


def test_answer_that_is_rewritten_later_is_trained_as_it_was(tokenizer, tmp_path):
    """In a document of its own; in the next one it is as rewritten, and not trained."""
    tokenizer.chat_template = REASONING
    messages = [ASKED[0], thought("3 and 4", "The answer is 7."), *AGAIN]
    first, second = whole(encode_row({"messages": messages}, tokenizer, tmp_path), tokenizer)
    assert "3 and 4" in first and first.endswith("The answer is 7.<|im_end|>")
    assert "3 and 4" not in second and "The answer is 7.<|im_end|>" in second


def test_answer_marked_twice_is_trained_in_both_places(tokenizer, tmp_path):
    tokenizer.chat_template = MARKED
    messages = [*ASKED, AGAIN[0], says("assistant", "It is 4.", note="Indeed")]
    documents = encode_row({"messages": messages}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [
        ["The answer is 7.<|im_end|>\n", "It is 4.<|im_end|>\n", "Indeed"]]  # fmt: skip


def test_marks_around_the_content_alone_leave_its_closing_untrained(tokenizer, tmp_path):
    """So the template says; where generation stops is then EOS's, as without a template."""
    tokenizer.chat_template = MARKED.replace(
        "<|im_end|>{{ '\\n' }}{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    documents = encode_row({"messages": ASKED}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [["The answer is 7."]]
    assert closing_token(tokenizer) == tokenizer.eos_token


def test_answer_of_which_less_is_marked_once_another_follows_is_refused(tokenizer, tmp_path):
    """Which marks are the last answer's cannot be told."""
    tokenizer.chat_template = MARKED.replace("{% if m.note %}", "{% if m.note and loop.last %}")
    messages = [*ASKED[:1], says("assistant", "It is 7.", note="Indeed"),
                says("assistant", "Yes, 7.", note="Surely")]  # fmt: skip
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}])
    assert "marks, but none for message 3 alone" in refusal([path], tokenizer)


def test_answer_without_marks_is_not_taken_for_the_one_before(tokenizer, tmp_path):
    tokenizer.chat_template = MARKED
    unmarked = says("assistant", "It is 4.", unmarked=True)
    messages = [ASKED[0], says("assistant", "The answer is 7.", weight=0), AGAIN[0], unmarked]
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}])
    assert "marks, but none for message 4" in refusal([path], tokenizer)


def test_template_by_use_of_tools_is_taken(tokenizer, tmp_path):
    """A tokenizer may have several templates, as Command R has."""
    tokenizer.chat_template = {"default": CHATML, "tool_use": TOOLS}
    documents = encode_row({"messages": ASKED}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [["The answer is 7.<|im_end|>"]]
    documents = encode_row({"messages": CALLED, "tools": [ADD]}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [[CALL_TEXT, "The answer is 7.<|im_end|>"]]


# ------------------------------------------------------------------------------------------------
# What a template would lose is refused
# ------------------------------------------------------------------------------------------------

# name: (template, row, what is left out, the roles)
LEFT_OUT = {
    "tools": (CHATML, {"messages": ASKED, "tools": [ADD]}, "tools", "user, assistant"),
    "tool calls": (
        CHATML, {"messages": CALLED[:3] + [says("assistant", "It is 4.")]},
        "a tool call of message 2", "user, assistant"),
    "reasoning": (
        CHATML, {"messages": [ASKED[0], says("assistant", "x", reasoning_content="3 and 4")]},
        "reasoning_content of message 2", "user, assistant"),
    "thinking": (
        CHATML, {"messages": [ASKED[0], says("assistant", "x", thinking="3 and 4")]},
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
    "earlier answers": (
        CHATML.replace("{{ m.content }}",
                       "{{ m.content if loop.last or m.role != 'assistant' else '-' }}"),
        {"messages": TALK}, "the content of message 3", "system, user, assistant"),
    "reasoning within the last answer": (
        OPENED, {"messages": [ASKED[0], thought("carry nothing", "The answer is 7.")]},
        "message 2", "user, assistant"),
}  # fmt: skip


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


def test_conversation_without_a_template_is_refused(tokenizer, tmp_path):
    tokenizer.chat_template = None
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}])
    message = refusal([path], tokenizer)
    assert f"{path} line 1" in message and "--chat_template" in message


# ------------------------------------------------------------------------------------------------
# The date
# ------------------------------------------------------------------------------------------------

# as Llama 3.2's: a variable that the caller may give, else today
DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now(\"%d %b %Y\") %}{% else %}"
    "{% set date_string = \"26 Jul 2024\" %}{% endif %}{% endif %}"
    "<|start|>system\nToday Date: {{ date_string }}<|end|>" + CHATML
)


@pytest.mark.parametrize("quoted", ['"%d %b %Y"', "'%d %b %Y'", "  '%d %b %Y' "])
def test_template_prints_the_day_of_the_run(quoted, tokenizer, tmp_path):
    tokenizer.chat_template = template = DATED.replace('"%d %b %Y"', quoted)
    dated = with_day(tokenizer, "2020-01-31")
    (document,) = encode_row({"messages": ASKED}, dated, tmp_path)
    assert "Today Date: 31 Jan 2020<|end|>" in whole([document], dated)[0]
    assert tokenizer.chat_template == template
    today = tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert f"Today Date: {datetime.date.today():%d %b %Y}<|end|>" in today


def test_each_of_several_templates_prints_the_day(tokenizer, tmp_path):
    tokenizer.chat_template = {"default": DATED, "tool_use": DATED + TOOLS}
    dated = with_day(tokenizer, "2020-01-31")
    for row in {"messages": ASKED}, {"messages": ASKED, "tools": [ADD]}:
        assert "31 Jan 2020" in whole(encode_row(row, dated, tmp_path), dated)[0]
    assert "strftime_now" in tokenizer.chat_template["tool_use"]


def test_run_goes_on_with_the_date_of_its_start(run_main, tiny_model, monkeypatch, tmp_path):
    """The next day it sees the same rows. The template beside its adapter prints today's date."""
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    template = "{{ strftime_now('%d %b %Y') }} " + tokenizer.chat_template
    tokenizer.chat_template = template
    tokenizer.save_pretrained(model)
    write_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}])
    flags = ["--model", model, "--dataset", tmp_path / "data.jsonl", "--batch_size", 1,
             "--report_to", "none", "--output_dir", tmp_path / "run"]  # fmt: skip
    strftime = time.strftime

    def run_on(day, steps):
        today = time.strptime(day, "%Y-%m-%d")
        monkeypatch.setattr(time, "strftime", lambda form, at=today: strftime(form, at))
        return run_main(*flags, "--max_steps", steps)

    code, out, err = run_on("2020-01-31", 1)
    assert code == 0 and "31 Jan 2020" in out, err
    code, out, err = run_on("2020-02-01", 2)
    assert code == 0 and "31 Jan 2020" in out and "resumed from" in out, err
    described = tmp_path / "run" / "train_config.json"
    begun = json.loads(described.read_text())
    assert begun["date"] == "2020-01-31"
    assert AutoTokenizer.from_pretrained(tmp_path / "run").chat_template == template
    described.write_text(json.dumps({**begun, "date": "2020-02-01"}))
    code, _, err = run_on("2020-02-01", 3)
    assert code == 7 and "--output_dir" in err  # they would be other rows
