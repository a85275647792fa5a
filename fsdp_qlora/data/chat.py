"""Render a conversation with the chat template, and mark the spans of it that are in the loss.

It uses template.py and tool_calls.py; other forms of examples are in example_formats.py, tokens in
tokenize_documents.py.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import os
import re
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_qlora.data.template import PROBE_CALL, PROBE_TOOL, TemplateTraits, render, template_traits
from fsdp_qlora.data.tool_calls import openai_calls
from fsdp_qlora.errors import FatalExample

Spans = list[tuple[int, int]]  # parts of a text, in characters: [(start, end)]
REASONING_KEYS = "reasoning_content", "reasoning", "thinking"  # message keys with the same meaning


class AnswerStart(NamedTuple):
    """Where an answer in the loss begins, and how its prompt, the text before it, is rendered."""

    at: int  # in characters of the document's text
    template_kwargs: str  # the template's variables as JSON, see Rows.template_kwargs


class ChatDocument(NamedTuple):
    """One training document of a conversation: a text that the template renders."""

    text: str
    spans: Spans  # the parts of the text that are in the loss
    answers: list[AnswerStart]  # of all answers in the loss


class RenderedAnswer(NamedTuple):
    """One answer of a conversation, as the chat template renders it."""

    # the conversation, this answer included; a longer document begins with it, unless the template
    # rewrites a part of it there
    text: str
    document: str  # the conversation up to the token that closes the answer, if nothing follows
    start: int  # where the answer begins in both: after its prompt
    spans: Spans  # the parts that are in the loss, in both
    template_kwargs: str  # see AnswerStart
    notes: list[str]  # remarks on it for the user


def parse_chat(messages: list[dict[str, Any]], options: dict[str, Any],
               tokenizer: PreTrainedTokenizerFast) -> tuple[list[ChatDocument], list[str]]:
    """Return the training documents of a conversation, and notes on them. `options`: what the
    template gets besides messages, tools and other variables. Each message has `train`: whether it
    is in the loss.

    Each answer (a message of the assistant that is in the loss) is trained as the model will write
    it: after its prompt, which is exactly what the template renders for the messages before it when
    a server asks; and up to its closing token, or what the template marks by {% generation %}. An
    answer that the template rewrites when more messages follow, as Qwen3's drops reasoning, gets a
    document that ends with it.
    """
    if not tokenizer.chat_template:
        raise FatalExample("is a conversation, but the tokenizer has no chat template. Pass one"
                           " with --chat_template, or use prompt and completion")
    traits = template_traits(tokenizer, str(tokenizer.chat_template))
    # before the first message there is no generation prompt
    trained = [i for i, message in enumerate(messages) if message["train"] and i > 0]
    messages = [clean_message(message, traits) for message in messages]
    if not trained:
        raise ValueError("no assistant message to train on")
    documents: list[ChatDocument] = []  # the longest first
    notes: dict[str, None] = {}
    for i in reversed(trained):
        answer = render_answer(messages[: i + 1], options, tokenizer, traits)
        start = AnswerStart(answer.start, answer.template_kwargs)
        notes |= dict.fromkeys(answer.notes)
        for longer in documents:
            if longer.text.startswith(answer.text):
                spans = spans_within(answer, longer.text, messages[i + 1]["role"], traits)
                longer.spans.extend(spans)
                longer.answers.append(start)
                break
        else:
            documents.append(ChatDocument(answer.document, answer.spans, [start]))
    return documents[::-1], list(notes)


def spans_within(
    answer: RenderedAnswer, longer: str, next_role: str, traits: TemplateTraits
) -> Spans:
    """Return the spans of an answer in a longer document.

    Some templates, such as GLM's, leave an answer open. The model then stops by writing the token
    that opens the next message, so this token is in the loss, unless the next message is an answer
    too.
    """
    n = len(answer.text)
    spans = [(start, min(end, n)) for start, end in answer.spans]
    is_open = answer.spans[-1][1] > n  # EOS was added
    if is_open and next_role != "assistant" and (marker := traits.marker.match(longer, n)):
        spans[-1] = spans[-1][0], marker.end()
    return spans


def closing_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the tokens that end an answer in training: with or without further messages, and after
    a tool call. EOS if there is no other."""
    asked: dict[str, Any] = {"role": "user", "content": "probe", "train": False}
    answered = {"role": "assistant", "content": "probe", "train": True}
    called = [{**answered, "content": "", "tool_calls": [PROBE_CALL]},
              {"role": "tool", "tool_call_id": PROBE_CALL["id"], "content": "1", "train": False}]
    tokens: dict[str, None] = {}
    for talk, tools in (([asked, answered] * 2, None),
                        ([asked, *called, answered], [PROBE_TOOL])):
        with contextlib.suppress(ValueError):  # the template may fail
            documents, _ = parse_chat(talk, {"tools": tools}, tokenizer)
            special = template_traits(tokenizer, str(tokenizer.chat_template)).special
            for document in reversed(documents):
                for start, end in document.spans:
                    written = document.text[start:end].rstrip()
                    tokens |= {token: None for token in special if written.endswith(token)}
    return list(tokens) or [tokenizer.eos_token]


def checked_text(value: Any, name: str) -> str:
    """Return `value` if it is text that can be encoded. Raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, expected a string")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{name} contains half a character (a lone UTF-16 surrogate)")
    return value


def render_answer(messages: list[dict[str, Any]], options: dict[str, Any],
                  tokenizer: PreTrainedTokenizerFast, traits: TemplateTraits) -> RenderedAnswer:
    """Return the answer with which the messages end, after its prompt. Its document ends with its
    closing token, or with EOS if the template has none; with {% generation %} marks, where the last
    mark ends.

    Some templates open an answer differently from the prompt, such as those of thinking models for
    an answer without reasoning. Then the answer is rendered with the template's own switch that
    makes both agree. Without such a switch, the answer gets the reasoning, which may be empty, that
    its prompt opens. Raises FatalExample if they cannot agree.
    """
    notes: list[str] = []
    options, prompt, text, at = align_with_prompt(messages, options, tokenizer, traits)
    template, marks = tokenizer.get_chat_template(tools=options["tools"]), []
    if re.search(r"\{%-?\s*generation\b", template):
        marks = marked_spans(messages, options, template, tokenizer)
    elif at is None and (closed := close_reasoning(messages[-1], prompt, text, template)):
        at = len(prompt)
        text = prompt + closed
        notes.append("answers continue the reasoning that the generation prompt opens; where an"
                     " example has none, it is empty")
    if at is None:
        raise FatalExample(why_prompt_differs(prompt, text))
    text, shift = prompt + text[at:], len(prompt) - at
    if marks:
        answer = marked_answer(text, prompt, [(a + shift, b + shift) for a, b in marks], traits)
    else:
        content = content_of(messages[-1])
        answer = close_answer(text, prompt, content, tokenizer.eos_token, traits)
    answer.notes.extend(notes)
    check_rendered(messages, options["tools"], text, text[len(prompt) :])
    kwargs = {name: value for name, value in options.items() if name in traits.variables}
    return answer._replace(template_kwargs=json.dumps(kwargs, sort_keys=True))


def align_with_prompt(
    messages: list[dict[str, Any]], options: dict[str, Any], tokenizer: PreTrainedTokenizerFast,
    traits: TemplateTraits
) -> tuple[dict[str, Any], str, str, int | None]:
    """Return the options with which the prompt of the last message and all messages are rendered,
    both texts, and where in the second the answer begins; None if it opens the answer differently.
    """
    prompt = render(messages[:-1], tokenizer, add_generation_prompt=True, **options)
    text = checked_text(render(messages, tokenizer, **options), "the conversation")
    if text.startswith(prompt):
        return options, prompt, text, len(prompt)
    for kwargs in traits.kwargs_choices:
        # a variable that the example itself sets stays as it is
        if not kwargs.keys() & options.keys() and (
                found := render_with_kwargs(messages, text, options | kwargs, tokenizer)):
            return options | kwargs, *found, len(found[0])
    return options, prompt, text, find_answer(messages, prompt, text, options, tokenizer)


def render_with_kwargs(messages: list[dict[str, Any]], text: str, options: dict[str, Any],
                       tokenizer: PreTrainedTokenizerFast) -> tuple[str, str] | None:
    """Return the prompt of the last message rendered with other `options` of the template, and a
    text that continues it: `text`, rendered without these options, or all messages rendered with
    them. None if neither continues it."""
    with contextlib.suppress(ValueError):  # the template may fail
        prompt = render(messages[:-1], tokenizer, add_generation_prompt=True, **options)
        if not text.startswith(prompt):
            text = checked_text(render(messages, tokenizer, **options), "the conversation")
        if text.startswith(prompt):
            return prompt, text
    return None


def marked_answer(text: str, prompt: str, marks: Spans, traits: TemplateTraits) -> RenderedAnswer:
    """Return the answer of a template with {% generation %} marks, which enclose the model's words.
    What they enclose of the prompt is not in the loss."""
    spans = [(max(start, len(prompt)), end) for start, end in marks if end > len(prompt)]
    if not spans or (between := text[len(prompt) : spans[0][0]]):
        raise FatalExample("the chat template's {% generation %} marks leave out"
                           f" {(between[:60] if spans else 'the answer')!r}, which follows the"
                           " generation prompt, so the model would never learn to write it. Use"
                           " another template with --chat_template")
    answer = RenderedAnswer(text, text[: spans[-1][1]], len(prompt), spans, "", [])
    if not answer.document.rstrip().endswith(traits.special):
        answer.notes.append("no token that closes an answer is trained, because the template's {%"
                            " generation %} marks leave it out")
    return answer


def close_answer(
    text: str, prompt: str, content: str, eos: str, traits: TemplateTraits
) -> RenderedAnswer:
    """Return the answer of a template without marks: the part of the text after the prompt."""
    notes = []
    opened = text.rpartition(eos)[2]
    if not traits.has_prompt and opened.strip() and prompt.endswith(opened):
        text = text.removesuffix(opened)  # Cohere's template always appends the generation prompt
    elif not traits.has_prompt and text[len(prompt) :].partition(content or "\n")[0].strip():
        notes.append("the assistant's header is trained, too, because the chat template has no"
                     " generation prompt")
    document = text.rstrip()
    if not document.endswith(traits.special if traits.closes else eos):
        document = text + eos
    return RenderedAnswer(text, document, len(prompt), [(len(prompt), len(document))], "", notes)


def close_reasoning(message: dict[str, Any], prompt: str, text: str, template: str) -> str:
    """Return what the model writes after a prompt that ends with a tag, such as <think>, if the
    template renders the message without this tag, as DeepSeek R1's does: the message's reasoning,
    which may be empty, the closing tag, and the answer. "" if this does not apply."""
    opened = re.search(r"<([\w:]+)>(\s*)$", prompt)
    if not opened or not text.startswith(prompt[: opened.start()]):
        return ""
    tag, close, gap = opened[0].rstrip(), f"</{opened[1]}>", opened[2]
    answer = text[opened.start() :]
    if answer.startswith(tag):  # only the white space after the tag differs
        return answer.removeprefix(tag)
    if close not in template:
        return ""
    within = content_of(message).rpartition(close)[0].removeprefix(tag)
    raw_reasoning = next((message[key] for key in REASONING_KEYS if message.get(key)), within)
    reasoning = checked_text(raw_reasoning, "reasoning").strip()
    return f"{reasoning}{gap}{close}{2 * gap}{answer.lstrip()}"


def why_prompt_differs(prompt: str, text: str) -> str:
    """Return why an answer cannot be trained after the prompt that the model gets."""
    at = shared_length(prompt, text)
    at = max(prompt.rfind("\n", 0, at), prompt.rfind(">", 0, at)) + 1  # not within a tag
    return (f"the chat template's prompt for an answer has {prompt[at:][:60]!r}, but this answer"
            f" begins with {text[at:][:60]!r}, so the model would be trained on another prompt than"
            " it gets in use. Change the reasoning of the answer or chat_template_kwargs, or use"
            " another template with --chat_template")


def find_answer(messages: list[dict[str, Any]], prompt: str, text: str, options: dict[str, Any],
                tokenizer: PreTrainedTokenizerFast) -> int | None:
    """Return where the last message begins in `text`, the rendering of all messages, if it rewrites
    earlier messages. `prompt`: the rendering of the earlier messages with the generation prompt.
    None if `text` opens the message differently from the prompt. Raises FatalExample if the
    message is mixed with earlier ones."""
    start = shared_length(prompt, text)
    before = render(messages[:-1], tokenizer, **options)
    n_before = shared_length(prompt, before)
    if start >= n_before:
        return None
    # Earlier messages are rewritten once the answer follows: gpt-oss's template drops the reasoning
    # of calls, some of Mistral's drop the system message. What comes after the rewritten part must
    # be the same, and longer than the generation prompt.
    rest = text[start:]
    # the longest end of the prompt that is in `rest`; then all shorter ends are in it, too
    n_same = bisect.bisect_left(range(1, len(prompt) - start), True,
                                key=lambda n: prompt[-n:] not in rest)
    at = start + n_same + (rest.index(prompt[-n_same:]) if n_same else 0)
    if n_same > len(prompt) - n_before and has_text(text[at:], content_of(messages[-1])):
        return at
    raise FatalExample(f"the chat template mixes message {len(messages)} with those before it, so"
                       " its tokens cannot be separated")


def marked_spans(messages: list[dict[str, Any]], options: dict[str, Any], template: str,
                 tokenizer: PreTrainedTokenizerFast) -> Spans:
    """Return the spans of the last message's {% generation %} blocks in the rendered messages."""
    try:
        rendered: Any = render_jinja_template(
            [messages[:-1], messages], chat_template=template,
            return_assistant_tokens_mask=True, **{**tokenizer.special_tokens_map, **options})
    except Exception as e:
        raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")
    (before, text), (old_blocks, blocks) = rendered
    shared = shared_length(before, text)
    new_blocks = [block for block in blocks if block not in old_blocks]
    if shared < len(before):  # earlier messages are rewritten: their blocks must be as many
        new_blocks = [block for block in blocks if block[0] >= shared]
        new_blocks = new_blocks if new_blocks == blocks[len(old_blocks) :] else []
    if not new_blocks:
        raise FatalExample("the chat template has {% generation %} marks, but none for message"
                           f" {len(messages)} alone")
    return new_blocks


def shared_length(text: str, other: str) -> int:
    """Return the number of equal characters at the beginning of two texts."""
    return len(os.path.commonprefix([text, other]))


def clean_message(message: dict[str, Any], traits: TemplateTraits) -> dict[str, Any]:
    """Return a message in the form that templates expect, without `train`."""
    message = dict(message)
    is_trained = message.pop("train")
    content = message.get("content")
    calls = openai_calls(message.pop("tool_calls", None), traits.calls_as_text)
    if calls:  # some templates treat an empty list as a call
        message["tool_calls"] = calls
    if isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise FatalExample(f"has {part['type']!r} in the content of a message: only text"
                                   " is trained; leave it out")
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("the content of a message is not text")
        content = "".join(map(str, texts))
    if content is None and not calls:
        raise ValueError("a message has no content")
    text = checked_text("" if content is None else content, "content")
    if is_trained and not calls and not text.strip():
        raise ValueError("an assistant message is empty")
    in_parts = [{"type": "text", "text": text}] if traits.as_parts else text
    return message | {"content": in_parts}


def content_of(message: dict[str, Any]) -> str:
    """Return the content of a message of clean_message(), without white space around it."""
    content = message["content"]
    return str(content[0]["text"] if isinstance(content, list) else content).strip()


def check_rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str,
                   answer: str) -> None:
    """Raise FatalExample if the chat template leaves out a part of the example. `answer` is the
    part of `text` that the last message became."""
    wanted = [("tools", tool["function"]["name"], text) for tool in tools or ()]
    for i, message in enumerate(messages, 1):
        strings: list[tuple[str, Any]] = [(f"the content of message {i}", content_of(message))]
        if message["role"] != "tool":  # a tool's name is in the call before it
            strings.append((f"the name in message {i}", message.get("name")))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            strings += [(f"a tool call of message {i}", string)
                        for string in [function["name"], *strings_in(function["arguments"])]]
        if i == len(messages):
            strings += [(f"{key} of message {i}", message.get(key))
                        for key in REASONING_KEYS]
            wanted += [(what, string, answer) for what, string in strings]
        else:  # templates may drop the reasoning of earlier answers
            wanted += [(what, str(string or "").rpartition("</think>")[2], text)
                       for what, string in strings]
    for what, string, rendered in wanted:
        if not has_text(rendered, str(string or "")):
            way_out = ("--columns tools=unused trains without them" if what == "tools" else
                       "leave it out of the example")
            raise FatalExample(f"the chat template leaves out {what}; the roles are"
                               f" {', '.join(message['role'] for message in messages)}:"
                               f" {way_out}, or name another template by --chat_template")


def has_text(rendered: str, text: str) -> bool:
    """Return True if a text, or at least each word of it, is in what the template has rendered."""
    return text.strip() in rendered or all(w in rendered for w in re.findall(r"\w+", text))


def strings_in(value: Any) -> list[str]:
    """Return all strings in an object or list."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [string for item in value for string in strings_in(item)]
    return [value] if isinstance(value, str) else []
