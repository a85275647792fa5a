"""The chat template: where it comes from, and what it does with a few probe messages.

transformers renders it; chat.py says which text of a conversation is in the loss.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.meta
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.tool_calls import openai_calls
from fsdp_qlora.errors import errors_about

PROBE_CALL: dict[str, Any] = {  # satisfies strict templates: Mistral's require an id like this one
    "id": "probe0001", "type": "function",
    "function": {"name": "probe", "arguments": {"of": "probe"}}}
PROBE_TOOL = {"type": "function", "function": {
    "name": "probe", "description": "probe", "parameters": {
        "type": "object", "properties": {"of": {"type": "string", "description": "probe"}}}}}

# variables that a caller does not set: those that are always passed, and functions
NOT_TEMPLATE_KWARGS = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception",
                       "strftime_now")


class TemplateTraits(NamedTuple):
    """Properties of a chat template, found by rendering a few probes."""

    special: tuple[str, ...]  # the tokenizer's special tokens, one of which may close an answer
    marker: re.Pattern[str]  # a token that may open a message, and the white space before it
    as_parts: bool  # it expects a message's content as a list of parts
    closes: bool  # it closes the last answer by a special token
    has_prompt: bool  # it has a generation prompt
    calls_as_text: bool  # it expects the arguments of a call as JSON text
    # each {variable: value} that a caller may set and that changes the generation prompt, such as
    # {"enable_thinking": False}
    kwargs_choices: tuple[dict[str, Any], ...]
    variables: frozenset[str]  # the variables of all kwargs_choices


def set_template(tokenizer: PreTrainedTokenizerFast, directory: Path, file: str | None) -> None:
    """Set the chat template of a model's tokenizer from `file`, --chat_template; or, if the
    tokenizer has none, from chat_template.json in its directory, which transformers reads for
    processors only."""
    own = directory / "chat_template.json"
    if file:
        with errors_about(f"--chat_template {file}: cannot be read"):
            tokenizer.chat_template = read_template(Path(file))
    elif not tokenizer.chat_template and own.is_file():
        with errors_about(f"{own}: cannot be read"):
            tokenizer.chat_template = read_template(own)


def read_template(path: Path) -> str:
    """Return the template in a file of Jinja, or of JSON like chat_template.json and
    tokenizer_config.json."""
    text = path.read_text(encoding="utf-8-sig")
    try:
        template = json.loads(text)
    except ValueError:
        return text
    if isinstance(template, dict):
        template = template.get("chat_template")
    if not isinstance(template, str):
        raise ValueError("it is JSON without a chat_template, or with several. Use one of them")
    return template


def with_template_date(
    tokenizer: PreTrainedTokenizerFast, template_date: str
) -> PreTrainedTokenizerFast:
    """Return a copy of the tokenizer whose chat templates print `template_date`, YYYY-MM-DD, where
    they ask for today's date, as Llama 3's and gpt-oss's do. A resumed run must see the same
    examples, and so must all ranks around midnight.

    The date is written into the text of the templates, because transformers 5.23 turns a function
    that is passed as the variable `strftime_now` into a string. A format that is not a literal
    stays.
    """

    def dated(template: str) -> str:
        date = datetime.fromisoformat(template_date)
        return re.sub(r"""\bstrftime_now\(\s*(["'])(.*?)\1\s*\)""",
                      lambda call: repr(date.strftime(call[2])), template)

    tokenizer, template = copy.copy(tokenizer), tokenizer.chat_template
    if isinstance(template, dict):  # several, by name
        tokenizer.chat_template = {name: dated(text) for name, text in template.items()}
    elif template:
        tokenizer.chat_template = dated(template)
    return tokenizer


def render(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast,
           **options: Any) -> str:
    """Return the messages as text, rendered by the chat template."""
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return text
    except Exception as e:  # Jinja's own, and whatever the template's operations raise
        raise ValueError(f"the chat template fails: {' '.join(str(e).split())}")


@functools.lru_cache(1)
def template_traits(tokenizer: PreTrainedTokenizerFast, template: str) -> TemplateTraits:
    """Return the TemplateTraits of the tokenizer's chat template. `template`, the same as text, is
    an argument only so that the cache distinguishes templates."""
    added = tokenizer.added_tokens_decoder.values()
    special = (tokenizer.eos_token, *(token.content for token in added if token.special))
    # BOS opens conversations, not messages
    openers = {token.content for token in added} - {tokenizer.bos_token} | {tokenizer.eos_token}
    longest_first = sorted(openers, key=len, reverse=True)

    def rendered(*messages: dict[str, Any], **options: Any) -> str:
        """Return what the template makes of messages, "" if it fails."""
        with contextlib.suppress(ValueError):
            return render(list(messages), tokenizer, **options)
        return ""

    asked, answered = ({"role": role, "content": "probe"} for role in ("user", "assistant"))
    as_parts = "probe" not in rendered(asked, answered)
    if as_parts:
        asked, answered = ({**message, "content": [{"type": "text", "text": "probe"}]}
                           for message in (asked, answered))
    answer = rendered(asked, answered)
    with_object, with_text = (
        rendered(asked, {**answered, "tool_calls": openai_calls([PROBE_CALL], as_text)},
                 tools=[PROBE_TOOL]) for as_text in (False, True))
    # with an object the template may fail, like DeepSeek-V3's, or print it as Python does
    calls_as_text = bool(with_text) and (
        not with_object or str(PROBE_CALL["function"]["arguments"]) in with_object)

    def generation_prompt(**options: Any) -> str:
        """Return what is added after a question to ask for an answer."""
        question = rendered(asked, **options)
        return rendered(asked, add_generation_prompt=True, **options).removeprefix(question)

    usual = generation_prompt()
    choices = tuple(kwargs for kwargs in possible_template_kwargs(tokenizer)
                    if generation_prompt(**kwargs) not in ("", usual))
    return TemplateTraits(
        special=special, marker=re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})"),
        as_parts=as_parts, closes=not answer or answer.rstrip().endswith(special),
        has_prompt=rendered(asked) != rendered(asked, add_generation_prompt=True),
        calls_as_text=calls_as_text, kwargs_choices=choices,
        variables=frozenset(name for kwargs in choices for name in kwargs))


def how_to_prompt(template_kwargs: dict[str, int]) -> str:
    """Return how to prompt for the answers of a data set as they are trained, from
    Rows.template_kwargs; "" if the chat template needs no variables."""
    if template_kwargs.keys() <= {"{}"}:
        return ""
    parts = []
    for kwargs, n in sorted(template_kwargs.items(), key=lambda item: -item[1]):
        variables = json.loads(kwargs)
        named = ", ".join(f"{name}={value!r}" for name, value in variables.items())
        parts.append(f"{n:,} answers with {named}: apply_chat_template(messages,"
                     f" add_generation_prompt=True, {named}), in a request to a server"
                     f' "chat_template_kwargs": {kwargs}' if variables else f"{n:,} without any")
    return f"serve with the template variables used in training: {'; '.join(parts[:5])}"


def possible_template_kwargs(tokenizer: PreTrainedTokenizerFast) -> list[dict[str, Any]]:
    """Return {variable: value} for each variable that the tokenizer's chat templates read and do
    not set, and each value that it may have: False, True, or a constant that the template compares
    it with."""
    template = tokenizer.chat_template
    found: list[dict[str, Any]] = []
    for text in template.values() if isinstance(template, dict) else [template]:
        text = re.sub(r"\{%-?\s*(end)?generation\b.*?%\}", "", text)  # transformers' own tag
        with contextlib.suppress(jinja2.TemplateError):
            tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(text)
            names = jinja2.meta.find_undeclared_variables(tree)
            values = {name: [False, True] for name in sorted(
                names - {*NOT_TEMPLATE_KWARGS, *tokenizer.special_tokens_map})}
            for compared in tree.find_all(jinja2.nodes.Compare):
                sides = [compared.expr, *(operand.expr for operand in compared.ops)]
                constants = [side.value for side in sides if isinstance(side, jinja2.nodes.Const)]
                for side in sides:
                    if isinstance(side, jinja2.nodes.Name) and side.name in values:
                        values[side.name] += constants
            found += [{name: value} for name in values for value in values[name]
                      if {name: value} not in found]
    return found
