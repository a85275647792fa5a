"""Recognize an example's format by its keys, and decide which text is in the loss.

Conversations are in chat.py, examples with several answers in preferences.py, reading in
sources.py, tokens in tokenize_documents.py.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.chat import REASONING_KEYS, AnswerStart, Spans, checked_text, parse_chat
from fsdp_qlora.data.tool_calls import openai_tools, read_value
from fsdp_qlora.errors import FatalExample

IGNORE_INDEX = -100  # the label of a token that is not in the loss

# The keys that have a meaning in TRL, Axolotl, LLaMA-Factory or OpenAI's format. If an example has
# such a key and its format does not use it, the run ends. All other keys, and required keys of
# other formats, are logged and ignored.
TEMPLATE_KEYS = ("system", "tools", "chat_template_kwargs")
MASK_KEYS = ("labels", "completion_mask", "assistant_masks", "attention_mask")
COMPLETION = ("prompt", "completion")
INSTRUCTIONS = (("instruction", "output"), ("instruction", "response"))
QUESTIONS = (
    ("question", "answer"), ("question", "response"), ("query", "response"), ("query", "answer"),
    ("prompt", "response"), ("prompt", "answer"), ("prompt", "output"), ("input", "output"))
# {keys of the format: optional keys}; an example has the first format whose keys it has
EXAMPLE_FORMATS = {
    ("input_ids",): MASK_KEYS,
    **dict.fromkeys((("messages",), ("conversations",), COMPLETION), TEMPLATE_KEYS),
    **dict.fromkeys((*INSTRUCTIONS, *QUESTIONS), ("input", "history", *TEMPLATE_KEYS)),
    ("segments",): (), ("text",): ()}
# {key of a question: key of its answer in the first of EXAMPLE_FORMATS that has this question}
ANSWERS = {
    asked: next(format[1] for format in EXAMPLE_FORMATS if format[0] == asked)
    for asked, _ in (COMPLETION, *INSTRUCTIONS, *QUESTIONS) if asked != "input"}
SYNONYMS = {"functions": "tools", "system_prompt": "system", "context": "input", "article": "input"}
LIST_KEYS = {"messages", "conversations", "segments", "input_ids", "history", "tools", *MASK_KEYS,
             "chat_template_kwargs"}  # may be JSON text
OPTIONAL_KEYS = {key for keys in EXAMPLE_FORMATS.values() for key in keys}
REFUSED_KEYS = {key: why for why, keys in {  # keys of examples and of messages
    "pairs of answers need --loss dpo, ipo, simpo, orpo or kto; for --loss sft use the good ones"
    " alone": ("chosen", "rejected", "chosen_response", "rejected_response", "preferred_output",
               "non_preferred_output"),
    "unpaired preference data need --loss kto; for --loss sft use the good ones alone":
        ("label", "kto_tag"),
    "step-wise labels are not supported; use the good answers alone": ("completions",),
    "only text is trained": ("image", "images", "video", "videos", "audio", "audios"),
    "rows are packed during training; write the examples one by one":
        ("position_ids", "seq_lengths"),
    "write it into the question or the answer":
        ("choices", "reflection", "corrected", "critiques", "revision"),
    "chat templates do not use it": ("parallel_tool_calls",),
    "write it as tool_calls": ("function_call",),
    "to train on a part of an answer, write it as segments": ("train_detail",),
    "write it as content": ("refusal",),
}.items() for key in keys}

MEANINGS = {  # {meaning: words in keys that no format has}; "none": not a text to train on
    "none": ("id", "uuid", "url", "lang", "language", "split", "date", "category", "type"),
    "question": ("ask", "question", "query", "prompt", "instruction", "input", "problem", "request",
                 "user", "human", "task"),
    "answer": ("reply", "answer", "response", "completion", "output", "solution", "assistant",
               "target", "gpt", "bot", "summary")}
TRAIN_KEYS = ("train", "training", "train_on_turn", "weight", "loss")  # keys: is it in the loss?
# roles of the assistant's messages whose content is a call
CALL_ROLES = ("function_call", "tool_call")
ROLES = {  # {role of a message in lower case: the name that templates use}
    "system": "system", "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "ai", "bot", "chatbot", "chatgpt", "bing", "bard",
                     *CALL_ROLES), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response"), "tool"),
    "ipython": "ipython", "document": "document", "control": "control"}


class TextPart(NamedTuple):
    """A part of a document."""

    text: str
    in_loss: bool | Spans  # all of it, nothing, or some of its characters
    add_bos: bool  # True: BOS comes before it, if the tokenizer adds one to a text
    add_eos: bool = False  # True: EOS follows, if the text does not end with it
    # True: a space comes before it, if the tokenizer adds one to a text, as SentencePiece does;
    # False: it continues the part before
    add_prefix_space: bool = True
    is_completion: bool = False  # completion of a plain-text prompt, which this part may include
    # of a conversation: all answers in the loss. A document becomes several if a token would
    # contain the end of a prompt and the beginning of its answer
    answers: Sequence[AnswerStart] = ()

    def spans(self) -> Spans:
        """Return the characters in the loss, if only some are."""
        assert not isinstance(self.in_loss, bool), "all of it is in the loss, or nothing"
        return list(self.in_loss)


Ids = tuple[list[int], list[int]]  # (input_ids, labels)
Document = list[TextPart] | Ids


def parse_example(example: Any, tokenizer: PreTrainedTokenizerFast,
                  renames: Sequence[str] = ()) -> tuple[str, list[Document]]:
    """Return the example's format, with what is ignored, as text; and its documents, each a list of
    TextParts, or Ids for an example with input_ids. `renames`: the values of --columns,
    ["old=new"]. A ValueError leaves the example out, a FatalExample ends the run."""
    return parse_object(as_object(example, renames), tokenizer)


def as_object(example: Any, renames: Sequence[str]) -> dict[str, Any]:
    """Return the example with new names for its keys. Raises the example itself if it is an
    exception, and ValueError if it is not an object."""
    if isinstance(example, Exception):
        raise example
    if not isinstance(example, dict):
        raise ValueError(f"is {type(example).__name__}, expected an object")
    return rename_keys(example, dict(rename.split("=") for rename in renames))


def parse_object(example: dict[str, Any], tokenizer: PreTrainedTokenizerFast,
                 format: tuple[str, ...] | None = None,
                 prompt_is_prefix: bool = False,
                 trains_history: bool = True) -> tuple[str, list[Document]]:
    """parse_example() for the result of as_object().

    `format`: one of EXAMPLE_FORMATS; None: determined by the example's keys. `prompt_is_prefix`:
    the prompt is the common beginning of two answers, and may end inside a word. `trains_history`:
    earlier answers of an instruction are in the loss, too.
    """
    refuse_keys(example, ", or rename it: --columns {}=unused")
    format = format or find_format(example)
    example, ignored = take_keys(example, format)
    notes = [f"ignored: {', '.join(ignored)}"] if ignored else []
    documents: list[Document] | None = parse_text(example, format, tokenizer, prompt_is_prefix)
    if documents is None:
        messages = as_messages(example, format)
        if "history" in example and not trains_history:
            messages = [*(m | {"train": False} for m in messages[:-1]), messages[-1]]
        if unread := unread_keys(messages, str(tokenizer.chat_template)):
            notes.append(f"ignored in messages: {', '.join(unread)}")
        if messages and messages[0]["role"] == "assistant" and messages[0]["train"]:
            notes.append("not trained: the assistant's first message, which has no prompt")
        rendered, more_notes = parse_chat(messages, template_options(example), tokenizer)
        notes += more_notes
        documents = [[TextPart(one.text, one.spans, add_bos=False, answers=one.answers)]
                     for one in rendered]
    return " and ".join(format) + (f" ({'; '.join(notes)})" if notes else ""), documents


def printable(text: str) -> str:
    """Return the text with escapes for characters that control a terminal or that it cannot encode.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# ------------------------------------------------------------------------------------------------
# Keys
# ------------------------------------------------------------------------------------------------


def rename_keys(example: dict[str, Any], new_names: dict[str, str]) -> dict[str, Any]:
    """Return the example with new names for these keys, {old: new}."""
    renamed = {}
    for key, value in example.items():
        new = new_names.get(key, key)
        if not is_empty(renamed.get(new)) and not is_empty(value):
            raise FatalExample(f"has {new} twice after --columns: rename the other one, too")
        if renamed.get(new) is None or not is_empty(value):
            renamed[new] = value
    return renamed


def refuse_keys(keys_and_values: dict[str, Any], advice: str) -> None:
    """Raise FatalExample for a key that asks for something unsupported, unless its value is
    empty."""
    for key, value in keys_and_values.items():
        if key in REFUSED_KEYS and not is_empty(value):
            raise FatalExample(f"has {key}: {REFUSED_KEYS[key]}; leave it out{advice.format(key)}")


def find_format(example: dict[str, Any]) -> tuple[str, ...]:
    """Return the first of EXAMPLE_FORMATS whose keys the example has, none of them null. Raises
    ValueError or FatalExample if there is none."""
    keys = {key for key, value in example.items() if value is not None}
    for format in EXAMPLE_FORMATS:
        if keys >= set(format):
            return format
    for format in EXAMPLE_FORMATS:
        if example.keys() >= set(format):
            raise ValueError(f"null in {' and '.join(key for key in format if key not in keys)}")
    listed = [key for key in example if key in keys]
    pairs = [format for format in EXAMPLE_FORMATS if len(format) == 2]
    first = next((one for one, _ in pairs if one in keys), "")
    seconds = [second for one, second in pairs if one == first]
    why = (f"which has {first}, but no {' or '.join(seconds)}" if first else
           "which is not a supported format")
    names = likely_names({key: example[key] for key in listed}, first, seconds)
    renamed = " ".join(shlex.quote(f"{old}={new}") for old, new in names.items())
    raise FatalExample(
        f"has {', '.join(listed) or 'no keys'}, {why}. Use the keys of a supported format:"
        " messages; text; prompt and completion; instruction and output; question and answer;"
        " docs/data.md lists all."
        + f" --columns renames keys, for instance: --columns {renamed}" * bool(names))


def likely_names(example: dict[str, Any], first: str, seconds: list[str]) -> dict[str, str]:
    """Return {key: new name} that would probably turn an example of unknown format into a known
    one; {} if nothing is likely. `first`: the first key of a format, if the example has one;
    `seconds`: its possible second keys, none of which the example has."""
    near = {key: near_key(key, value) for key, value in example.items() if "=" not in key}
    if any({*near.values()} >= set(format) for format in EXAMPLE_FORMATS):
        return {key: name for key, name in near.items() if name not in ("", key)}
    lists = {key: known_key for key in near if (known_key := key_of_list(example[key]))}
    if first == "prompt" and len(lists) == 2 and first in lists:
        return {key: "completion" for key in lists if key != first}
    if lists:
        return dict([*lists.items()][:1])
    texts = {key: meaning_of(key) for key in near if isinstance(example[key], str)
             and key not in (first, "system", "system_prompt")}
    texts = {key: meaning for key, meaning in texts.items() if meaning != "none"}
    asked, answered = (next((key for key in texts if texts[key] == meaning), None)
                       for meaning in ("question", "answer"))
    rest = [key for key in texts if key not in (asked, answered)]
    if first:
        answered = answered or next(iter([*rest, *filter(None, [asked])]), None)
        return {answered: seconds[0]} if answered else {}
    if len(texts) == 1:
        return dict.fromkeys(texts, "text")
    asked = asked or next(iter(rest), None)
    answered = answered or next((key for key in rest if key != asked), None)
    return {asked: "question", answered: "answer"} if asked and answered else {}


def near_key(key: str, value: Any) -> str:
    """Return the key of a format that equals `key`, or of which it is a misspelling, if it may have
    such a value; else ""."""
    of_formats = dict.fromkeys([key for format in EXAMPLE_FORMATS for key in format])
    known = [*of_formats, *OPTIONAL_KEYS, *SYNONYMS]
    close = [key] if key in known else difflib.get_close_matches(key.strip().lower(), known, 1, 0.8)
    if not close or (close[0] in LIST_KEYS) == (key_of_list(value) == ""):
        return ""
    return close[0]


def key_of_list(value: Any) -> str:
    """Return the key of a format that has such a list; "" if none has."""
    value = read_value(value) if isinstance(value, str) else value
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict):
        return ("segments" if first.keys() >= {"text", "label"} else
                "messages" if first.keys() & {"role", "from"} else "")
    return "input_ids" if type(first) is int else ""


def meaning_of(key: str) -> str:
    """Return the key of MEANINGS that the words of a key suggest for its text, or ""."""
    words = [word.removesuffix("s") for word in re.findall(
        "[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", key).lower())]
    return next((meaning for meaning, names in MEANINGS.items() if any(
        difflib.get_close_matches(word, names, 1, 0.8) for word in words)), "")


def take_keys(example: dict[str, Any], format: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
    """Return the example's non-empty keys that its format uses, with JSON text parsed; and the keys
    that are ignored."""
    taken: dict[str, Any] = {}
    ignored = []
    for key, value in example.items():
        name = SYNONYMS.get(key, key)
        value = read_list_text(name, value)
        is_mask = key in MASK_KEYS and key in EXAMPLE_FORMATS[format] and value is not None
        is_own = key in format or is_mask
        if is_empty(value) and (not is_own or name in taken):
            continue
        if is_own or name in EXAMPLE_FORMATS[format]:
            if not is_empty(taken.get(name)):
                raise FatalExample(f"has {key} and another key that means {name}: keep one of"
                                   " them")
            taken[name] = value
        elif name in OPTIONAL_KEYS:
            raise FatalExample(f"has {key}, which has no meaning with {' and '.join(format)}."
                               f" Leave it out, or ignore it: --columns {key}=unused")
        else:
            ignored.append(key)
    return taken, ignored


def unread_keys(messages: list[dict[str, Any]], template: str) -> list[str]:
    """Return the keys of messages that the chat template never names, in order. The reasoning of an
    answer in the loss counts as read, see close_reasoning() in chat.py."""
    keys = dict.fromkeys(key for message in messages for key, value in message.items()
                         if key != "train" and not is_empty(value)
                         and not (message["train"] and key in REASONING_KEYS))
    names = {key: REASONING_KEYS if key in REASONING_KEYS else [key] for key in keys}
    return [key for key in keys if not any(re.search(rf"\b{re.escape(name)}\b", template)
                                           for name in names[key])]


def is_empty(value: Any) -> bool:
    """Return True if a value is empty; blank text is empty."""
    return value in (None, "", [], {}) or isinstance(value, str) and not value.strip()


def read_list_text(key: str, value: Any) -> Any:
    """Return the value; if it is a list that a table had to store as text, return the list."""
    messages = r"""\s*\[\s*\{\s*["'](role|content)["']"""
    if isinstance(value, str) and (
            key in LIST_KEYS or key in COMPLETION and re.match(messages, value)):
        return read_value(value)
    return value


# ------------------------------------------------------------------------------------------------
# Documents
# ------------------------------------------------------------------------------------------------


def parse_text(example: dict[str, Any], format: tuple[str, ...], tokenizer: PreTrainedTokenizerFast,
               prompt_is_prefix: bool) -> list[Document] | None:
    """Return the documents of an example that is not a conversation, else None."""
    if format == ("input_ids",):
        return [checked_ids(example)]
    if format == ("segments",):
        return [[join_segments(list_of(example, "segments"))]]
    if format == ("text",):
        text = text_of(example, "text")
        if not text.strip():  # EOS alone would train the model to stop at once
            raise ValueError("text is empty")
        return [[TextPart(text, in_loss=True, add_bos=True, add_eos=True)]]
    lacks_template = tokenizer.chat_template is None and format in (*INSTRUCTIONS, *QUESTIONS)
    if not lacks_template and (format != COMPLETION or isinstance(example["prompt"], list)):
        return None
    prompt, completion = as_prompt(example, format)
    if not completion.strip():
        raise ValueError("completion is empty")
    if prompt_is_prefix:
        text = prompt + completion.removesuffix(tokenizer.eos_token)
        return [[TextPart(text, [(len(prompt), len(text))], add_bos=True, add_eos=True,
                          is_completion=True)]]
    return [[TextPart(prompt, in_loss=False, add_bos=True),
             TextPart(completion, in_loss=True, add_bos=False, add_eos=True, add_prefix_space=False,
                      is_completion=True)]]


def as_prompt(example: dict[str, Any], format: tuple[str, ...]) -> tuple[str, str]:
    """Return (prompt, completion) in plain text; an instruction gets Alpaca's headings."""
    taken = () if format == COMPLETION else ("input", "system")
    for key in example.keys() - {*format, *taken}:
        raise FatalExample(f"has {key}, which a plain-text prompt cannot use. Write it as"
                           " messages, with a --chat_template if the model has none")
    if format == COMPLETION:
        return text_of(example, "prompt"), text_of(example, "completion")
    asked = question_of(example, format)
    answer = text_of(example, format[1])
    system = [text_of(example, "system")] if "system" in example else []
    if format in QUESTIONS:
        return "\n\n".join([*system, *asked.values()]) + "\n", answer
    headed = [f"### {key.capitalize()}:\n{text}" for key, text in asked.items()]
    return "\n\n".join([*system, *headed, "### Response:\n"]), answer


def question_of(example: dict[str, Any], format: tuple[str, ...]) -> dict[str, str]:
    """Return {key: text} of what an instruction or question asks, without blank texts."""
    texts = {key: text_of(example, key) for key in (format[0], "input") if key in example}
    asked = {key: text for key, text in texts.items() if not is_empty(text)}
    if not asked:
        raise ValueError(f"{format[0]} is blank: nothing is asked")
    return asked


def turns_of(history: list[Any]) -> list[tuple[str, str]]:
    """Return [(question, answer)] of the turns before an instruction, without blank turns."""
    turns = []
    for turn in history:
        if not isinstance(turn, list) or len(turn) != 2:
            raise ValueError("a turn of history must be a list of a question and its answer")
        asked, answer = (checked_text(text, "a text of history") for text in turn)
        if is_empty(asked) != is_empty(answer):
            raise ValueError("a turn of history has no question, or no answer")
        turns += [(asked, answer)] * (not is_empty(asked))
    return turns


def join_segments(segments: list[Any]) -> TextPart:
    """Return the TextPart of consecutive texts, each in the loss or not, that make up a
    document."""
    text = ""
    spans = []
    for segment in segments:
        if not isinstance(segment, dict) or segment.get("label") not in (False, True):
            raise ValueError("a segment must be an object with text and label (true or false)")
        start = len(text)
        text += checked_text(segment.get("text"), "text of a segment")
        spans += [(start, len(text))] * segment["label"]
    return TextPart(text, spans, add_bos=False)


def as_messages(example: dict[str, Any], format: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the messages of an example, in the format of read_message()."""
    if format == COMPLETION:
        asked, answered = ([read_message(m) for m in list_of(example, key)] for key in format)
        messages = [message | {"train": False} for message in asked] + answered
    elif format in (*INSTRUCTIONS, *QUESTIONS):
        asked = "\n\n".join(question_of(example, format).values())
        turns = turns_of(list_of({"history": [], **example}, "history"))
        turns.append((asked, text_of(example, format[1])))
        messages = [{"role": role, "content": text, "train": role == "assistant"}
                    for user, assistant in turns
                    for role, text in (("user", user), ("assistant", assistant))]
    else:
        messages = [read_message(message) for message in list_of(example, *format)]
    if "system" not in example:
        return messages
    first = {"role": "system", "content": example["system"], "train": False}
    if not messages or messages[0]["role"] != "system":
        return [first, *messages]
    if is_empty(messages[0].get("content")):
        return [first, *messages[1:]]
    if messages[0].get("content") != example["system"]:
        raise FatalExample("has a system message and another one in system: keep one of them")
    return messages


def read_message(message: Any) -> dict[str, Any]:
    """Return the message with OpenAI's keys, without nulls, and with `train`: whether it is in the
    loss."""
    if not isinstance(message, dict):
        raise ValueError("a message must be an object with a role")
    message = {key: value for key, value in message.items() if value is not None}
    for theirs, ours in ("from", "role"), ("value", "content"):
        if theirs in message and is_empty(message.get(ours)):
            message[ours] = message.pop(theirs)
    if not isinstance(message.get("role"), str):
        raise ValueError("a message must be an object with a role")
    role = re.sub(r"[ -]", "_", message["role"].strip().lower())  # also Human, function-call
    if role not in ROLES:
        raise FatalExample(f"has a message with role {message['role']!r}; supported are"
                           f" {', '.join(ROLES)}. Rename the role in the example")
    refuse_keys(message, " of the messages")
    flags = {key: message.pop(key) for key in TRAIN_KEYS if key in message}
    for key, flag in flags.items():
        if flag not in (0, 1):
            raise ValueError(f"a message has {key} {flag}, expected 0 or 1")
        if flag and ROLES[role] != "assistant":
            raise FatalExample(f"has {key} {flag} in a {role} message, but only assistant"
                               " messages are trained. Leave it out, or write the example as"
                               " segments")
    if role in CALL_ROLES and is_empty(message.get("tool_calls")):
        message["tool_calls"] = message.pop("content", None)
    is_trained = ROLES[role] == "assistant" and all(flags.values())
    return message | {"role": ROLES[role], "train": is_trained}


def template_options(example: dict[str, Any]) -> dict[str, Any]:
    """Return what the chat template gets besides messages: the tools, and the example's own
    variables."""
    tools = openai_tools(example.get("tools", []))
    variables = example.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise ValueError(f"chat_template_kwargs is {type(variables).__name__}, expected an object")
    if own := variables.keys() & {"tools", "chat_template", "tokenize", "add_generation_prompt",
                                  "continue_final_message", "conversation", "messages"}:
        raise FatalExample(f"has {', '.join(sorted(own))} in chat_template_kwargs: leave it out")
    return {"tools": tools or None, **variables}


def text_of(example: dict[str, Any], key: str) -> str:
    return checked_text(example[key], key)


def list_of(example: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(example[key], list):
        raise ValueError(f"{key} is {type(example[key]).__name__}, expected a list")
    return example[key]


def checked_ids(example: dict[str, Any]) -> Ids:
    """Return (input_ids, labels) of an example that has lists of one length; labels may be
    IGNORE_INDEX. Tokens that a mask leaves out are not in the loss; tokens that attention_mask
    leaves out are padding and are removed."""
    example = {"labels": example["input_ids"], **example}
    for key, values in example.items():
        is_mask = key.endswith(("mask", "masks"))
        allowed = {IGNORE_INDEX} if key == "labels" else set()
        if not isinstance(values, list) or not all(
            value in (0, 1) if is_mask else
            type(value) is int and (0 <= value < 2**31 or value in allowed) for value in values
        ):
            raise ValueError(f"{key} must be a list of {'0 and 1' if is_mask else 'tokens'}")
        if len(values) != len(example["input_ids"]):
            raise ValueError(f"{key} and input_ids differ in length")
    labels = example["labels"]
    for key in example.keys() & {"completion_mask", "assistant_masks"}:
        labels = [label if chosen else IGNORE_INDEX for label, chosen in zip(labels, example[key])]
    attended = example.get("attention_mask", [1] * len(labels))
    ids, labels = ([value for value, real in zip(values, attended) if real]
                   for values in (example["input_ids"], labels))
    return ids, labels
