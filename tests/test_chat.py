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
    ADD, AGAIN, ASKED, BRIEF, CHATML, MARKED, REASONING, STRICT, TALK, TEMPLATES, THIRD,
    TOOLS, UNCLOSED, chat_tokenizer, encode_row, prepare, refusal, says, trained, trained_runs,
    whole, write_jsonl)
from test_forms import BOS_AND_EOS, add_specials, plain
from transformers import AddedToken, AutoTokenizer

from fsdp_qlora.data import example_formats as formats
from fsdp_qlora.data.chat import closing_tokens
from fsdp_qlora.data.template import set_template, with_template_date


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
        "generation prompt opens reasoning", TALK,
        [["\n</think>\n\nThe answer is 7.</s>"], ["\n</think>\n\nIt is 4.</s>"]]),
    "generation prompt opens reasoning that the template drops": (
        "generation prompt opens reasoning",
        [ASKED[0], thought("3 and 4", "The answer is 7."), AGAIN[0],
         says("assistant", "It is 4.", reasoning_content="2 and 2")],
        [["3 and 4\n</think>\n\nThe answer is 7.</s>"],
         ["2 and 2\n</think>\n\nIt is 4.</s>"]]),
    "not closed": ("not closed", ASKED, [["The answer is 7.</s>"]]),
    "closed by no special token": (
        "closed by plain text", TALK, [["The answer is 7.[end]\n", "It is 4.[end]\n</s>"]]),
    "several answers not closed": (
        "not closed", TALK, [["The answer is 7.<|user|>", "It is 4.</s>"]]),
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
        assert given == before
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


def test_prompt_and_answer_are_tokens_apart_where_one_token_would_take_of_both(tokenizer, tmp_path):
    """Each answer has a document of its own then: as a part of a later prompt it has that token."""
    tokenizer.add_tokens([" The", " It"])
    tokenizer.chat_template = CHATML.replace("assistant\n", "assistant: ").replace(
        "{{ m.role }}\n", "{{ m.role }}: "
    )
    documents = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [["The answer is 7.<|im_end|>"], ["It is 4.<|im_end|>"]]
    for document, before in zip(documents, (TALK[:2], TALK[:4])):
        prompt = document["input_ids"][: document["prompt_length"]].tolist()
        assert prompt == tokenizer.apply_chat_template(
            before, add_generation_prompt=True, return_dict=False)


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
    assert closing_tokens(tokenizer) == [tokenizer.eos_token]


def test_answer_of_which_less_is_marked_once_another_follows_is_refused(tokenizer, tmp_path):
    """It is rewritten by the answer that follows."""
    tokenizer.chat_template = MARKED.replace("{% if m.note %}", "{% if m.note and loop.last %}")
    messages = [*ASKED[:1], says("assistant", "It is 7.", note="Indeed"),
                says("assistant", "Yes, 7.", note="Surely")]  # fmt: skip
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": messages}])
    assert "mixes message 3 with those before it" in refusal([path], tokenizer)


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
# What closes an answer
# ------------------------------------------------------------------------------------------------

# GLM: a turn is closed by the marker of the next one
GLM = (
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}")
CALL_OPEN = '<call>add{"a": 3, "of": "both"}</call>'


@pytest.fixture
def glm(tokenizer):
    tokenizer.add_tokens([AddedToken("<|observation|>", special=True)])
    tokenizer.chat_template = GLM
    return tokenizer


def test_turn_that_the_next_ones_marker_closes_learns_that_marker(glm, tmp_path):
    """By each role that follows; the last one of a document is closed by EOS."""
    (document,) = encode_row({"messages": [*CALLED, *AGAIN]}, glm, tmp_path)
    assert trained([document], glm) == [
        [f"{CALL_OPEN}<|observation|>", "The answer is 7.<|user|>", "It is 4.</s>"]]  # fmt: skip
    assert document["n_loss_tokens"] == 3 + sum(
        len(plain(glm, text)) for text in (CALL_OPEN, "The answer is 7.", "It is 4."))  # fmt: skip
    assert closing_tokens(glm) == ["</s>", "<|user|>", "<|observation|>"]


@pytest.mark.parametrize("change, want", [
    (("{{ m.content }}", "{{ m.content }}\n"), "The answer is 7.\n<|user|>"),
    (("<|{{", "{{ '\n' if m.role == 'user' }}<|{{"), "The answer is 7.\n<|user|>"),
    (("<|{{", "{{ '</s>\n' if m.role == 'user' }}<|{{"), "The answer is 7.</s>"),
    (("<|{{", "{{ '<s>' if m.role == 'user' }}<|{{"), "The answer is 7.")],
    ids=["line's end", "line's end between", "EOS between", "BOS"])  # fmt: skip
def test_what_stands_before_the_marker_is_trained_too(change, want, glm, tmp_path):
    """But BOS is no marker: no model writes it."""
    glm.chat_template = GLM.replace(*change)
    ((first, last),) = trained(encode_row({"messages": TALK}, glm, tmp_path), glm)
    assert first == want and last.strip() in ("It is 4.</s>", "It is 4.\n</s>")


def test_marker_of_another_answer_closes_none(glm, tmp_path):
    """To which the model goes on. Nor is there one where the answer behind it is not trained."""
    two = [*ASKED, says("assistant", "Yes, 7."), *AGAIN]
    assert trained(encode_row({"messages": two}, glm, tmp_path), glm) == [
        ["The answer is 7.", "Yes, 7.<|user|>", "It is 4.</s>"]]
    two[-1] = two[-1] | {"weight": 0}
    assert trained(encode_row({"messages": two}, glm, tmp_path), glm) == [
        ["The answer is 7.", "Yes, 7.</s>"]]


def test_marker_may_be_no_special_token_and_a_call_may_end_in_a_special_one(tokenizer, tmp_path):
    tokenizer.add_tokens([AddedToken("<|observation|>"), AddedToken("</call>", special=True)])
    tokenizer.chat_template = GLM
    assert trained(encode_row({"messages": CALLED}, tokenizer, tmp_path), tokenizer) == [
        [f"{CALL_OPEN}<|observation|>", "The answer is 7.</s>"]]
    last = [*CALLED[:1], CALLED[1]]
    assert trained(encode_row({"messages": last}, tokenizer, tmp_path), tokenizer) == [
        [f"{CALL_OPEN}</s>"]]


def test_generation_prompt_that_is_always_there_is_not_trained(tokenizer, tmp_path):
    """Cohere's stands behind answers, too."""
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
    documents = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [["The answer is 7.<|im_end|>", "It is 4.<|im_end|>"]]
    assert closing_tokens(tokenizer) == ["<|im_end|>"]


def test_calls_are_closed_by_a_token_of_their_own(tokenizer):
    tokenizer.chat_template = TOOLS.replace(
        "</call>{% endfor %}<|im_end|>",
        "{% endfor %}{{ '<|call|>' if m.tool_calls else '<|end|>' }}")
    assert closing_tokens(tokenizer) == ["<|end|>", "<|call|>"]


NOTED = {  # name: (template, the note)
    "no generation prompt": (
        CHATML.split("{% if add")[0], "the assistant's header is trained, too"),
    "none by parts": (
        TEMPLATES["content in parts"].split("{% if add")[0], "the assistant's header is trained"),
    "marks without the closing token": (
        MARKED.replace("<|im_end|>{{ '\\n' }}{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
        "no token that closes an answer is trained"),
    "marks of an open template": (
        MARKED.replace("<|im_end|>{{ '\\n' }}{% endgeneration %}", "{% endgeneration %}"),
        "no token that closes an answer is trained"),
    "marks": (MARKED, ""), "closed": (CHATML, ""), "open": (GLM, ""),
    # as of Llama 2 and Mistral, where what the user says ends with the assistant's marker
    "no header at all": (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' '"
        " + m.content + eos_token }}{% endfor %}", "")}


@pytest.mark.parametrize("name", NOTED)
def test_log_says_what_a_template_trains_besides_or_leaves_out(name, tokenizer, tmp_path):
    tokenizer.chat_template, note = NOTED[name]
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": [*ASKED, *AGAIN]}])
    _, line = prepare([path], tokenizer)
    assert "(1 messages" + (f" ({note}" if note else "; ") in line


def test_template_is_jinja_or_in_json(tokenizer, tmp_path):
    """As a model's chat_template.json and tokenizer_config.json have it."""
    own, path = tokenizer.chat_template, tmp_path / "template"
    for content, want in (
            (TOOLS, TOOLS), ("\ufeff" + TOOLS, TOOLS),
            (json.dumps({"chat_template": TOOLS}), TOOLS),
            (json.dumps(TOOLS), TOOLS)):  # fmt: skip
        path.write_text(content, encoding="utf-8")
        set_template(tokenizer, tmp_path, str(path))
        assert tokenizer.chat_template == want
    for wrong in {"model_max_length": 3}, {"chat_template": [{"name": "a", "template": TOOLS}]}:
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="--chat_template .*JSON without a chat_template"):
            set_template(tokenizer, tmp_path, str(path))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TOOLS}))
    tokenizer.chat_template = own
    set_template(tokenizer, tmp_path, None)
    assert tokenizer.chat_template == own
    tokenizer.chat_template = None
    set_template(tokenizer, tmp_path, None)
    assert tokenizer.chat_template == TOOLS


# ------------------------------------------------------------------------------------------------
# Messages that an answer rewrites
# ------------------------------------------------------------------------------------------------

# gpt-oss: reasoning before a call is there until there is an answer
REWRITTEN = (
    "{% set ns = namespace(final=false) %}{% for m in messages %}"
    "{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = true %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.thinking and not ns.final %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>call<|message|>{{ m.tool_calls[0].function | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}{% if m.thinking and loop.last %}<|start|>assistant<|channel|>"
    "analysis<|message|>{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final"
    "<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
THOUGHT_CALL = says("assistant", "", thinking="so it is", tool_calls=[CALL])


def test_answer_behind_which_reasoning_is_dropped_is_trained_where_the_model_sees_it(
        tokenizer, tmp_path):  # fmt: skip
    """Reasoning, call, reasoning, answer in one turn: the reasoning of the call is still there."""
    tokenizer.chat_template = REWRITTEN
    talk = [ASKED[0], THOUGHT_CALL, says("tool", "7"),
            says("assistant", "It is 7.", thinking="7 it is")]  # fmt: skip
    (document,) = encode_row({"messages": talk}, tokenizer, tmp_path)
    (_, call), (before, answer) = trained_runs(document, tokenizer)
    assert call.endswith("<|call|>") and "so it is<|end|>" in call
    assert answer == ("<|channel|>analysis<|message|>7 it is<|end|><|start|>assistant<|channel|>"
                      "final<|message|>It is 7.<|return|>")  # fmt: skip
    assert before == tokenizer.apply_chat_template(
        talk[:3], add_generation_prompt=True, tokenize=False)
    documents = encode_row({"messages": [*talk, *AGAIN]}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [
        [call, answer], ["<|channel|>final<|message|>It is 4.<|return|>"]]


def test_same_with_marks(tokenizer, tmp_path):
    marked = REWRITTEN
    for mark, before, behind in (
            ("generation", "{% if m.tool_calls %}", "{% if m.thinking"),
            ("endgeneration", "<|call|>", "{%"),
            ("generation", "{% elif m.role == 'assistant' %}", ""),
            ("endgeneration", "'<|end|>' }}", "{% else")):  # fmt: skip
        assert before + behind in marked
        marked = marked.replace(before + behind, f"{before}{{% {mark} %}}{behind}")
    tokenizer.chat_template = marked
    talk = [ASKED[0], THOUGHT_CALL, says("tool", "7"), says("assistant", "It is 7.")]
    (document,) = encode_row({"messages": talk}, tokenizer, tmp_path)
    (_, call), (before, answer) = trained_runs(document, tokenizer)
    assert "so it is<|end|>" in call and "so it is<|end|>" in before
    assert answer.endswith("<|channel|>final<|message|>It is 7.<|return|>")


def test_system_message_that_stands_in_the_last_question_is_not_lost(tokenizer, tmp_path):
    """Mistral's: with the answer it stands there no more."""
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
        "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n"
        "{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}")
    documents = encode_row({"messages": TALK}, tokenizer, tmp_path)
    assert trained(documents, tokenizer) == [[" The answer is 7.</s>"], [" It is 4.</s>"]]
    assert [text.count("Be brief.") for text in whole(documents, tokenizer)] == [1, 1]
    assert whole(documents, tokenizer)[1] == (
        "[INST] What is 3 plus 4?[/INST] The answer is 7.</s>[INST] Be brief.\n\nAnd 2 times 2?"
        "[/INST] It is 4.</s>")  # fmt: skip


def test_answers_that_are_merged_into_one_are_refused(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.first or m.role != loop.previtem.role %}<|im_start|>"
        "{{ m.role }}\n{% endif %}{{ m.content }}\n"
        "{% if loop.last or m.role != loop.nextitem.role %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% endif %}")
    path = write_jsonl(tmp_path / "data.jsonl", [
        {"messages": [*ASKED, says("assistant", "Yes, 7.")]}])  # fmt: skip
    assert "mixes message 3 with those before it" in refusal([path], tokenizer)


# ------------------------------------------------------------------------------------------------
# Tools and calls of other frameworks
# ------------------------------------------------------------------------------------------------

NAMED = {"name": "add", "arguments": {"a": 3, "of": "both"}}
ARGUMENTS = json.dumps(NAMED["arguments"])
CALLS = {  # other ways to write CALL
    "text": CALL | {"function": NAMED | {"arguments": ARGUMENTS}},
    "text of text": CALL | {"function": NAMED | {"arguments": json.dumps(ARGUMENTS)}},
    "python's": CALL | {"function": NAMED | {"arguments": str(NAMED["arguments"])}},
    "flat": NAMED, "call as text": json.dumps(CALL),
    "function as text": {"function": json.dumps(NAMED)},
    "name alone": {"function": "add", "arguments": ARGUMENTS},
    "parameters": {"name": "add", "parameters": NAMED["arguments"]},
    "no type": {"function": NAMED, "id": "call_1"}}


@pytest.mark.parametrize("name", CALLS)
def test_call_of_another_framework_is_taken(name, tokenizer):
    tokenizer.chat_template = TOOLS
    asked = {"messages": [ASKED[0], {"role": "assistant", "tool_calls": [CALL]}]}
    _, want = formats.parse_example(asked, tokenizer)
    call = CALLS[name]
    for calls in [call], json.dumps([call]), str([call]), call:
        asked["messages"][1] = {"role": "assistant", "content": None, "tool_calls": calls}
        assert formats.parse_example(asked, tokenizer)[1] == want
    for role in "function_call", "tool_call", "function-call":
        for content in json.dumps(call), json.dumps([call]):
            talk = [ASKED[0], {"from": role, "value": content}]
            assert formats.parse_example({"conversations": talk}, tokenizer)[1] == want


@pytest.mark.parametrize("given", ["", " ", "{}", {}, None, "null", "None"], ids=repr)
@pytest.mark.parametrize("as_text", [False, True], ids=["object", "text"])
def test_arguments_that_are_empty_are_an_empty_object(given, as_text, tokenizer):
    tokenizer.chat_template = BY_TEXT if as_text else TOOLS
    function = {"name": "now", "arguments": given}
    for function in {"name": "now", "arguments": given}, {"name": "now"}:
        answer = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
        _, ((part,),) = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
        assert '"arguments": {}' in part.text


@pytest.mark.parametrize("call, why", [
    (NAMED | {"arguments": "{'a': "}, "the arguments of a call of add are str"),
    (NAMED | {"arguments": "[3]"}, "the arguments of a call of add are list"),
    (NAMED | {"arguments": 3}, "the arguments of a call of add are int"),
    ({"name": "add", "input": {"a": 3}}, "a call of add has input, but no arguments"),
    ({"arguments": {}}, "must be an object with a name"), ("add", "a call of a tool is str"),
    ({"function": 3}, "must be an object with a name")], ids=repr)
def test_call_that_is_none_is_left_out_in_the_datas_words(call, why, tokenizer, tmp_path):
    tokenizer.chat_template = TOOLS
    answer = {"role": "assistant", "tool_calls": [call]}
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "x"}, {"messages": [ASKED[0], answer]}])
    _, line = prepare([path], tokenizer)
    assert "1 skipped: " in line and why in line and "template" not in line


def test_tools_of_another_framework_are_taken(tokenizer):
    tokenizer.chat_template = TOOLS
    want = formats.parse_example({"messages": ASKED, "tools": [ADD]}, tokenizer)[1]
    for tools in ([json.dumps(ADD)], json.dumps([json.dumps(ADD)]), json.dumps(json.dumps([ADD])),
                  str([ADD]), ADD, [ADD["function"]], json.dumps(ADD["function"]),
                  [{"function": json.dumps(ADD["function"])}]):  # fmt: skip
        assert formats.parse_example({"messages": ASKED, "tools": tools}, tokenizer)[1] == want
    for tools in ["add"], [{"type": "function"}], 3, [[ADD]]:
        with pytest.raises(ValueError, match="^(a tool must be an object with a n|tools is int)"):
            formats.parse_example({"messages": ASKED, "tools": tools}, tokenizer)


# DeepSeek-V3's: a string is put together
BY_TEXT = TOOLS.replace(
    "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")


@pytest.mark.parametrize(
    "template", [BY_TEXT, BY_TEXT.replace("'' + ", "")], ids=["raises", "prints"])
def test_template_that_wants_arguments_as_text_gets_them(template, tokenizer):
    """As they are in the row. An object would raise, or be printed as Python prints it."""
    tokenizer.chat_template = template
    as_object = NAMED["arguments"]
    for given in as_object, ARGUMENTS, '{"a":3,  "of": "\\u00e4"}', str(as_object):
        call = CALL | {"function": NAMED | {"arguments": given}}
        answer = {"role": "assistant", "tool_calls": [call]}
        _, ((part,),) = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
        want = given if str(given)[:2] == '{"' else ARGUMENTS
        assert f'"arguments": {want}}}' in part.text


def test_empty_list_of_calls_is_no_call(tokenizer):
    """To a template that asks whether there is such a key."""
    tokenizer.chat_template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% if 'tool_calls' in m %}{{ m.tool_calls[0].name }}{% endif %}")
    answer = ASKED[1] | {"tool_calls": []}
    _, ((part,),) = formats.parse_example({"messages": [ASKED[0], answer]}, tokenizer)
    assert part.text.endswith("The answer is 7.<|im_end|>")


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
        CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
        {"messages": [ASKED[0], thought("carry nothing", "The answer is 7.")]},
        "message 2", "user, assistant"),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_row_of_which_the_template_leaves_something_out_is_refused(name, tokenizer, tmp_path):
    tokenizer.chat_template, row, what, roles = LEFT_OUT[name]
    path = write_jsonl(tmp_path / "data.jsonl", [{"messages": ASKED}, row])
    if what is None:
        rows, line = prepare([path], tokenizer)
        assert len(rows) == 2 and "skipped" not in line
        return
    message = refusal([path], tokenizer)
    assert f"{path} line 2: the chat template leaves out " in message and what in message
    assert roles in message and message.endswith(", or name another template by --chat_template")
    assert ("--columns tools=unused trains without them" in message) == (what == "tools")


def test_rows_that_the_template_raises_on_are_left_out_and_counted(tokenizer, tmp_path):
    tokenizer.chat_template = STRICT
    path = write_jsonl(
        tmp_path / "data.jsonl", [{"messages": m} for m in (ASKED, TALK, [BRIEF, *THIRD], AGAIN)]
    )
    rows, line = prepare([path], tokenizer)
    assert len(rows) == 2
    assert f"2 skipped: the chat template fails: only user and assistant ({path} line 2)" in line


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
    dated = with_template_date(tokenizer, "2020-01-31")
    (document,) = encode_row({"messages": ASKED}, dated, tmp_path)
    assert "Today Date: 31 Jan 2020<|end|>" in whole([document], dated)[0]
    assert tokenizer.chat_template == template
    today = tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert f"Today Date: {datetime.date.today():%d %b %Y}<|end|>" in today


def test_each_of_several_templates_prints_the_day(tokenizer, tmp_path):
    tokenizer.chat_template = {"default": DATED, "tool_use": DATED.removesuffix(CHATML) + TOOLS}
    dated = with_template_date(tokenizer, "2020-01-31")
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
