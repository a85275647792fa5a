"""A conversation, rendered by the tokenizer's chat template, as text and the spans of it that are
trained. It depends on template.py and tools.py; other forms of rows are in forms.py, tokens in
encode.py.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import re
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_qlora.data.sources import RefusedRow
from fsdp_qlora.data.template import PROBE_CALL, PROBE_TOOL, Traits, render, template_traits
from fsdp_qlora.data.tools import openai_calls

Spans = list[tuple[int, int]]  # where in a text, in characters: [(start, end)]


class Answer(NamedTuple):
    """An answer of a conversation, as the chat template renders it."""

    text: str  # the conversation up to it, as a longer document begins where it is not rewritten
    document: str  # the same if nothing follows, up to the token that closes the answer
    spans: Spans  # of the answer, in both
    notes: list[str]  # what the user should know of its training


def parse_chat(messages: list[dict[str, Any]], options: dict[str, Any],
               tokenizer: PreTrainedTokenizerFast) -> tuple[list[tuple[str, Spans]], list[str]]:
    """Returns [(text, spans)], the documents of a conversation and which of their characters are
    trained; and notes on them. `options` is what the template is given besides messages: tools, and
    other variables. Each message says in `train` whether it is trained.

    Each answer (a message of the assistant that is trained) is trained as the model will write it:
    after what the template makes of the messages before it, from the generation prompt to its
    closing token, or what the template marks by {% generation %}. An answer that the template
    rewrites when more messages follow, as Qwen3 does to drop reasoning, gets a document that ends
    with it.
    """
    if not tokenizer.chat_template:
        raise RefusedRow("is a conversation, but the tokenizer has no chat template: give one by"
                         " --chat_template, or use prompt and completion")
    traits = template_traits(tokenizer, str(tokenizer.chat_template))
    cleaned = [clean_message(message, traits) for message in messages]
    messages = [message for message, _ in cleaned]
    # before the first message there is no generation prompt
    answers = [i for i, (_, is_trained) in enumerate(cleaned) if is_trained and i > 0]
    if not answers:
        raise ValueError("no message of the assistant is trained")
    documents: list[tuple[str, Spans]] = []  # the longest first
    notes: dict[str, None] = {}
    for i in reversed(answers):
        answer = render_answer(messages[: i + 1], options, tokenizer, traits)
        notes |= dict.fromkeys(answer.notes)
        for longer, longer_spans in documents:
            if longer.startswith(answer.text):
                longer_spans += spans_within(answer, longer, messages[i + 1]["role"], traits)
                break
        else:
            documents.append((answer.document, answer.spans))
    return documents[::-1], list(notes)


def spans_within(answer: Answer, longer: str, next_role: str, traits: Traits) -> Spans:
    """The spans of an answer in a longer document. Where its template leaves it open, as GLM's do,
    the token by which the next message begins is what the model writes to stop; but not that of
    another answer, to which the model would go on."""
    n = len(answer.text)
    spans = [(start, min(end, n)) for start, end in answer.spans]
    is_open = answer.spans[-1][1] > n  # EOS was added
    if is_open and next_role != "assistant" and (marker := traits.marker.match(longer, n)):
        spans[-1] = spans[-1][0], marker.end()
    return spans


def closing_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The tokens that end an answer in training: of a conversation that goes on or not, of a call
    of a tool. EOS if there is no other."""
    asked: dict[str, Any] = {"role": "user", "content": "probe", "train": False}
    answered = {"role": "assistant", "content": "probe", "train": True}
    called = [{**answered, "content": "", "tool_calls": [PROBE_CALL]},
              {"role": "tool", "tool_call_id": PROBE_CALL["id"], "content": "1", "train": False}]
    found: dict[str, None] = {}
    for talk, tools in (([asked, answered] * 2, None),
                        ([asked, *called, answered], [PROBE_TOOL])):
        with contextlib.suppress(ValueError):  # of the template
            documents, _ = parse_chat(talk, {"tools": tools}, tokenizer)
            special = template_traits(tokenizer, str(tokenizer.chat_template)).special
            for text, spans in reversed(documents):
                for start, end in spans:
                    written = text[start:end].rstrip()
                    found |= {token: None for token in special if written.endswith(token)}
    return list(found) or [tokenizer.eos_token]


def checked_text(value: Any, name: str) -> str:
    """Returns `value` if it is text that can be encoded."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, want a string")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{name} has half a character (a lone surrogate of UTF-16)")
    return value


def render_answer(messages: list[dict[str, Any]], options: dict[str, Any],
                  tokenizer: PreTrainedTokenizerFast, traits: Traits) -> Answer:
    """The Answer with which the messages end. Its document ends with its closing token, or with EOS
    if the template has none; with {% generation %} marks, where the last of them ends."""
    prompt = render(messages[:-1], tokenizer, add_generation_prompt=True, **options)
    text = checked_text(render(messages, tokenizer, **options), "the conversation")
    template, marks = tokenizer.get_chat_template(tools=options["tools"]), []
    if re.search(r"\{%-?\s*generation\b", template):
        marks = marked_spans(messages, options, template, tokenizer)
    found = find_answer(messages, prompt, text, options, tokenizer)
    if not found and not marks:
        raise RefusedRow(f"the chat template mixes message {len(messages)} with those before it:"
                         " its tokens cannot be told")
    given, at = found or ("", 0)
    text, shift = given + text[at:], len(given) - at
    if marks:
        spans = [(start + shift, end + shift) for start, end in marks]
        answer = Answer(text, text[: spans[-1][1]], spans, [])
        if not answer.document.rstrip().endswith(traits.special):
            answer.notes.append("no token that closes an answer is trained: the template's"
                                " {% generation %} marks leave it out")
    else:
        content = content_of(messages[-1])
        answer = close_answer(text, given, prompt, content, tokenizer.eos_token, traits)
    check_rendered(messages, options["tools"], text, text[answer.spans[0][0] :])
    return answer


def close_answer(text: str, given: str, prompt: str, content: str, eos: str,
                 traits: Traits) -> Answer:
    """The Answer of a template without marks: what stands behind `given` in the text."""
    notes, opened = [], text.rpartition(eos)[2]
    if not traits.has_prompt and opened.strip() and prompt.endswith(opened):
        text = text.removesuffix(opened)  # Cohere's: a generation prompt that is always there
    elif not traits.has_prompt and text[len(given) :].partition(content or "\n")[0].strip():
        notes.append("the assistant's header is trained, too: the chat template has no generation"
                     " prompt")
    document = text.rstrip()
    if not document.endswith(traits.special if traits.closes else eos):
        document = text + eos
    return Answer(text, document, [(len(given), len(document))], notes)


def find_answer(messages: list[dict[str, Any]], prompt: str, text: str, options: dict[str, Any],
                tokenizer: PreTrainedTokenizerFast) -> tuple[str, int] | None:
    """What the model is given before the last message, and where this begins in `text`, which the
    template makes of all; None if it mixes them. `prompt` is what it makes of the others, with the
    generation prompt."""
    start = shared_length(prompt, text)
    if start == len(prompt):
        return prompt, start
    before = render(messages[:-1], tokenizer, **options)
    n_before = shared_length(prompt, before)
    if start > n_before:  # an answer is opened otherwise than by the generation prompt
        return text[:start], start
    # With the answer, messages before it are rewritten: gpt-oss drops the reasoning of calls, some
    # of Mistral's the system message. What stands behind those must be the same, and more than the
    # generation prompt.
    rest = text[start:]
    # the longest end of the prompt that `rest` has; of one that it has, it has all shorter ones
    n_same = bisect.bisect_left(range(1, len(prompt) - start), True,
                                key=lambda n: prompt[-n:] not in rest)
    at = start + n_same + (rest.index(prompt[-n_same:]) if n_same else 0)
    is_found = n_same > len(prompt) - n_before and has_text(text[at:], content_of(messages[-1]))
    return (prompt, at) if is_found else None


def marked_spans(messages: list[dict[str, Any]], options: dict[str, Any], template: str,
                 tokenizer: PreTrainedTokenizerFast) -> Spans:
    """Where in the rendered messages the {% generation %} blocks of the last one stand."""
    try:
        rendered: Any = render_jinja_template(
            [messages[:-1], messages], chat_template=template,
            return_assistant_tokens_mask=True, **{**tokenizer.special_tokens_map, **options})
    except Exception as e:
        raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")
    (before, text), (old_blocks, blocks) = rendered
    shared = shared_length(before, text)
    new_blocks = [block for block in blocks if block not in old_blocks]
    if shared < len(before):  # earlier messages are rewritten: they must have as many blocks
        new_blocks = [block for block in blocks if block[0] >= shared]
        new_blocks = new_blocks if new_blocks == blocks[len(old_blocks) :] else []
    if not new_blocks:
        raise RefusedRow("the chat template has {% generation %} marks, but none for message"
                         f" {len(messages)} alone")
    return new_blocks


def shared_length(text: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    return len(os.path.commonprefix([text, other]))


def clean_message(message: dict[str, Any], traits: Traits) -> tuple[dict[str, Any], bool]:
    """A message as templates want it, and whether it is trained."""
    message, is_trained = dict(message), message["train"]
    del message["train"]
    content = message.get("content")
    calls = openai_calls(message.pop("tool_calls", None), traits.calls_as_text)
    if calls:  # to some templates an empty list is a call
        message["tool_calls"] = calls
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise RefusedRow(f"has {part['type']!r} in the content of a message: only text is"
                                 " trained; leave it out")
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a message has content that is no text")
        content = "".join(map(str, texts))
    if content is None and not calls:
        raise ValueError("a message has no content")
    text = checked_text("" if content is None else content, "content")
    if is_trained and not calls and not text.strip():
        raise ValueError("a message of the assistant is empty")
    in_parts = [{"type": "text", "text": text}] if traits.as_parts else text
    return message | {"content": in_parts}, is_trained


def content_of(message: dict[str, Any]) -> str:
    """The content of a message of clean_message(), without white space around it."""
    content = message["content"]
    return str(content[0]["text"] if isinstance(content, list) else content).strip()


def check_rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str,
                   answer: str) -> None:
    """Refuse a row of which the chat template leaves something out. `answer` is the part of `text`
    that the last message became."""
    wanted = [("tools", tool["function"]["name"], text) for tool in tools or ()]
    for i, message in enumerate(messages, 1):
        strings: list[tuple[str, Any]] = [(f"the content of message {i}", content_of(message))]
        if message["role"] != "tool":  # whose name the call before has
            strings.append((f"the name in message {i}", message.get("name")))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            strings += [(f"a tool call of message {i}", string)
                        for string in [function["name"], *strings_in(function["arguments"])]]
        if i == len(messages):
            strings += [(f"{key} of message {i}", message.get(key))
                        for key in ("reasoning_content", "reasoning", "thinking")]
            wanted += [(what, string, answer) for what, string in strings]
        else:  # templates may drop the reasoning of earlier answers
            wanted += [(what, str(string or "").rpartition("</think>")[2], text)
                       for what, string in strings]
    for what, string, rendered in wanted:
        if not has_text(rendered, str(string or "")):
            way_out = ("--columns tools=unused trains without them" if what == "tools" else
                       "leave it out of the row")
            raise RefusedRow(f"the chat template leaves out {what}; the roles are"
                             f" {', '.join(message['role'] for message in messages)}: {way_out}, or"
                             " name another template by --chat_template")


def has_text(rendered: str, text: str) -> bool:
    """Whether a text, or at least each word of it, is in what the template has rendered."""
    return text.strip() in rendered or all(w in rendered for w in re.findall(r"\w+", text))


def strings_in(value: Any) -> list[str]:
    """All texts in an object or list."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [string for item in value for string in strings_in(item)]
    return [value] if isinstance(value, str) else []
