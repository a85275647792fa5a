"""A conversation, rendered by the tokenizer's chat template, as text and the spans of it that are
trained. It depends on transformers' rendering; other forms of rows are in forms.py, tokens in
encode.py."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from fsdp_qlora.data.sources import RefusedRow

Spans = list[tuple[int, int]]  # where in a text, in characters: [(start, end)]


def parse_chat(messages: list[dict[str, Any]], options: dict[str, Any],
               tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, Spans]]:
    """Returns [(text, spans)]: the documents of a conversation, and which of their
    characters are trained. `options` is what the template is given besides messages: tools, and
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
    _, as_parts = template_traits(tokenizer, str(tokenizer.chat_template))
    cleaned = [clean_message(message, as_parts) for message in messages]
    messages = [message for message, _ in cleaned]
    # before the first message there is no generation prompt
    answers = [i for i, (_, is_trained) in enumerate(cleaned) if is_trained and i > 0]
    if not answers:
        raise ValueError("no message of the assistant is trained")
    documents = []  # the longest first
    for i in reversed(answers):
        text, document, spans = render_answer(messages[: i + 1], options, tokenizer)
        for longer, longer_spans in documents:
            if longer.startswith(text):
                longer_spans += [(start, min(end, len(text))) for start, end in spans]
                break
        else:
            documents.append((document, spans))
    return documents[::-1]


def closing_token(tokenizer: PreTrainedTokenizerFast) -> str:
    """The special token that ends an answer in a conversation; EOS if there is no other."""
    probe = [{"role": role, "content": "probe", "train": role == "assistant"}
             for role in ("user", "assistant")]
    with contextlib.suppress(ValueError):  # of the template
        document = parse_chat(probe, {"tools": None}, tokenizer)[-1][0].rstrip()
        special, _ = template_traits(tokenizer, str(tokenizer.chat_template))
        return next(filter(document.endswith, special), tokenizer.eos_token)
    return tokenizer.eos_token


def with_day(tokenizer: PreTrainedTokenizerFast, day: str) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer whose chat templates print `day`, YYYY-MM-DD, where they ask for
    today's date, as Llama 3's and gpt-oss's do: a resumed run must see the same rows, and so must
    all ranks around midnight.

    The day is written into the text of the templates, because transformers 5.23 makes a string of
    a function `strftime_now` that is given as a variable. A format that is no literal stays.
    """

    def dated(template: str) -> str:
        return re.sub(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""",
                      lambda call: repr(datetime.fromisoformat(day).strftime(call[2])), template)

    tokenizer, template = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        tokenizer.chat_template = {name: dated(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = dated(template)
    return tokenizer


def checked_text(value: Any, name: str) -> str:
    """Returns `value` if it is text that can be encoded."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is {type(value).__name__}, want a string")
    if not value.isascii() and re.search("[\ud800-\udfff]", value):
        raise ValueError(f"{name} has half a character (a lone surrogate of UTF-16)")
    return value


def render_answer(messages: list[dict[str, Any]], options: dict[str, Any],
                  tokenizer: PreTrainedTokenizerFast) -> tuple[str, str, Spans]:
    """Render messages that end with an answer. Returns their text, the document that it is if no
    more follow, and the answer's spans of characters in both. The document ends with the answer's
    closing token, or with EOS if the template has none; with {% generation %} marks, where the last
    of them ends."""
    prompt = render(messages[:-1], tokenizer, add_generation_prompt=True, **options)
    text = checked_text(render(messages, tokenizer, **options), "the conversation")
    template = tokenizer.get_chat_template(tools=options["tools"])
    if re.search(r"\{%-?\s*generation\b", template):
        spans = marked_spans(messages, options, template, tokenizer)
        document = text[: spans[-1][1]]
    else:
        start = shared_length(prompt, text)
        if start < len(prompt):  # a template may open an answer otherwise than its prompt does
            before = render(messages[:-1], tokenizer, **options)
            if start <= shared_length(prompt, before):
                raise RefusedRow(f"the chat template mixes message {len(messages)} with those"
                                 " before it: its tokens cannot be told")
        document = text.rstrip()
        closing_tokens, _ = template_traits(tokenizer, str(tokenizer.chat_template))
        if not document.endswith(closing_tokens):
            document = text + tokenizer.eos_token
        spans = [(start, len(document))]
    check_rendered(messages, options["tools"], text, text[spans[0][0] :])
    return text, document, spans


def render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast,
           **options: Any) -> str:
    """The text that the chat template makes of messages."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
    except Exception as e:  # Jinja's own, and whatever the template's operations raise
        raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")


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
    new_blocks = [block for block in blocks if block[0] >= shared]
    # where earlier messages are rewritten, they must at least have as many blocks as before
    is_rewritten = shared < len(before)
    if not new_blocks or (is_rewritten and new_blocks != blocks[len(old_blocks) :]):
        raise RefusedRow("the chat template has {% generation %} marks, but none for message"
                         f" {len(messages)} alone")
    return new_blocks


def shared_length(text: str, other: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    return len(os.path.commonprefix([text, other]))


@functools.lru_cache(1)
def template_traits(tokenizer: PreTrainedTokenizerFast,
                    template: str) -> tuple[tuple[str, ...], bool]:
    """The special tokens, one of which closes an answer, as a tuple of texts; and whether the
    template wants a message's content as a list of parts. `template`, the tokenizer's as text, only
    makes the cache tell templates apart.
    """
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    probe = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "probe"}]
    try:
        as_parts = "probe" not in tokenizer.apply_chat_template(probe, tokenize=False)
    except Exception:
        as_parts = True
    return tuple(special), as_parts


def clean_message(message: dict[str, Any], as_parts: bool) -> tuple[dict[str, Any], bool]:
    """A message as templates want it, and whether it is trained."""
    message, is_trained = dict(message), message["train"]
    del message["train"]
    content, calls = message.get("content"), message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise ValueError("a message has tool_calls that are no list of objects")
        message["tool_calls"] = [clean_call(call) for call in calls]
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
    return message | {"content": [{"type": "text", "text": text}] if as_parts else text}, is_trained


def clean_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, as templates want it; OpenAI writes JSON text.
    """
    function = dict(call.get("function") or call)
    if isinstance(function.get("arguments"), str):
        with contextlib.suppress(ValueError):
            function["arguments"] = json.loads(function["arguments"])
    return {**call, "function": function} if "function" in call else function


def check_rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, text: str,
                   answer: str) -> None:
    """Refuse a row of which the chat template leaves something out. `answer` is the part of `text`
    that the last message became."""
    wanted = [("tools", tool.get("function", tool).get("name"), text) for tool in tools or ()]
    for i, message in enumerate(messages, 1):
        content = message["content"]
        content = content[0]["text"] if isinstance(content, list) else content
        strings = [(f"the content of message {i}", content)]
        if message["role"] != "tool":  # whose name the call before has
            strings.append((f"the name in message {i}", message.get("name")))
        for call in message.get("tool_calls", ()):
            call = call.get("function", call)
            strings += [(f"a tool call of message {i}", string)
                        for string in [call.get("name"), *strings_in(call.get("arguments"))]]
        if i == len(messages):
            strings += [(f"{key} of message {i}", message.get(key))
                        for key in ("reasoning_content", "reasoning", "thinking")]
            wanted += [(what, string, answer) for what, string in strings]
        else:  # templates may drop the reasoning of earlier answers
            wanted += [(what, str(string or "").rpartition("</think>")[2], text)
                       for what, string in strings]
    for what, string, rendered in wanted:
        string = str(string or "").strip()
        if string not in rendered and not all(w in rendered for w in re.findall(r"\w+", string)):
            raise RefusedRow(f"the chat template leaves out {what}; the roles are"
                             f" {', '.join(message['role'] for message in messages)}")


def strings_in(value: Any) -> list[str]:
    """All texts in an object or list."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [string for item in value for string in strings_in(item)]
    return [value] if isinstance(value, str) else []
