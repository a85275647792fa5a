"""What a row of a data set means: its form by its keys, its documents, and which text of them is
trained. It stands on chat.py for conversations, and leaves reading to files.py, tokens to
encode.py."""

from typing import NamedTuple

from fsdp_qlora.data.chat import checked_text, parse_chat
from fsdp_qlora.data.files import RefusedRow

IGNORE = -100  # the label of a token that is not trained

COMPLETION, ALPACA, QUESTION = (
    ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = {  # keys that a row must have: keys that it may have
    ("messages",): ("system", "tools"), ("conversations",): ("system", "tools"),
    COMPLETION: ("tools",), ALPACA: ("input", "system", "history"), QUESTION: (),
    ("text",): (), ("input_ids",): ("labels",)}

SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "model": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "tool": "tool", "observation": "tool", "function": "tool"}


class Part(NamedTuple):
    """A part of a document."""

    text: str
    trained: bool | list  # all of it, nothing, or spans of characters [(start, end)]
    may_begin: bool  # whether the tokenizer may put BOS in front


def parse_row(row, tokenizer):
    """Returns the row's form with the keys that are ignored, as text, and its documents: each a
    list of Parts, or of a row with input_ids the tuple (input_ids, labels). A ValueError leaves the
    row out, a RefusedRow ends the run."""
    if isinstance(row, Exception):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"is {type(row).__name__}, want an object")
    form = find_form(row)
    row = {key: value for key, value in row.items() if value is not None}
    ignored = [key for key in row if key not in form + FORMS[form]]
    form_text = " and ".join(form)
    if ignored:
        form_text += f" (ignored: {', '.join(ignored)})"
    row = {key: value for key, value in row.items() if key not in ignored}
    return form_text, make_documents(row, form, tokenizer)


def find_form(row):
    """The first of FORMS whose keys the row has, none of them null."""
    keys = {key for key, value in row.items() if value is not None}
    for form in FORMS:
        if keys >= set(form):
            return form
    if any(row.keys() >= set(form) for form in FORMS):
        nulls = [key for key in row if key not in keys]
        raise ValueError(f"{' and '.join(nulls)} null")
    wanted = "; ".join(" and ".join(form) for form in FORMS)
    advice = "name its keys like one of these"
    if keys & {"chosen", "rejected"}:
        advice = "preferences are not trained; name the better answer completion to train on it"
    listed = ", ".join(key for key in row if key in keys) or "no keys"
    raise RefusedRow(f"has {listed}; want {wanted}: {advice}")


def make_documents(row, form, tokenizer):
    """The documents of a row of this form, which has no other keys and no nulls."""
    if form == ("input_ids",):
        return [checked_ids(row["input_ids"], row.get("labels", row["input_ids"]))]
    if form == ("text",):
        text = text_of(row, "text")
        if not text.strip():  # EOS alone would be trained: to stop at once
            raise ValueError("text is empty")
        return [[Part(text, trained=True, may_begin=True)]]
    if row.get("history"):
        raise RefusedRow("has history, which would be lost: write it as messages")
    is_plain = tokenizer.chat_template is None and form in (ALPACA, QUESTION)
    if is_plain or form == COMPLETION and not isinstance(row["prompt"], list):
        prompt, completion = as_prompt(row, form)
        if not completion.strip():
            raise ValueError("completion is empty")
        return [[Part(prompt, trained=False, may_begin=True),
                 Part(completion, trained=True, may_begin=False)]]
    messages = with_system(row, as_messages(row, form))
    documents = parse_chat(messages, row.get("tools"), tokenizer)
    return [[Part(text, spans, may_begin=False)] for text, spans in documents]


def as_prompt(row, form):
    """(prompt, completion) in plain text, of an instruction under Alpaca's headings."""
    if form == COMPLETION:
        if row.get("tools") not in (None, [], "", "[]"):
            raise RefusedRow("has tools, which a prompt in plain text cannot take: write prompt and"
                             " completion as lists of messages")
        return text_of(row, "prompt"), text_of(row, "completion")
    if form == QUESTION:
        return text_of(row, "question") + "\n", text_of(row, "answer")
    prompt = f"### Instruction:\n{text_of(row, 'instruction')}\n\n"
    if row.get("system"):
        prompt = f"{text_of(row, 'system')}\n\n{prompt}"
    if more := text_of({"input": "", **row}, "input"):
        prompt += f"### Input:\n{more}\n\n"
    return f"{prompt}### Response:\n", text_of(row, "output")


def as_messages(row, form):
    """The messages of a row, without the one that its `system` is."""
    if form == ("messages",):
        return list_of(row, "messages")
    if form == ("conversations",):
        return [from_sharegpt(message) for message in list_of(row, "conversations")]
    if form == COMPLETION:
        prompt = [message | {"train": False} if isinstance(message, dict) else message
                  for message in row["prompt"]]
        return prompt + list_of(row, "completion")
    asked, answer = (text_of(row, key) for key in form)
    if more := text_of({"input": "", **row}, "input"):
        asked += f"\n\n{more}"
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def with_system(row, messages):
    """The messages behind the row's `system`, with which they may begin already."""
    if not row.get("system"):
        return messages
    first = {"role": "system", "content": row["system"]}
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "system":
        return [first, *messages]
    if messages[0].get("content") != row["system"]:
        raise RefusedRow("has a system message and another one in system: keep one of them")
    return messages


def from_sharegpt(message):
    """A message of ShareGPT in OpenAI's words; anything else is returned unchanged."""
    if not isinstance(message, dict) or not isinstance(message.get("from"), str):
        return message
    role = message["from"]
    if role not in SHAREGPT_ROLES:
        raise RefusedRow(f"has a message from {role!r}; known are {', '.join(SHAREGPT_ROLES)}")
    more = {key: message[key] for key in ("weight", "train") if key in message}
    return {"role": SHAREGPT_ROLES[role], "content": message.get("value"), **more}


def text_of(row, key):
    return checked_text(row[key], key)


def list_of(row, key):
    if not isinstance(row[key], list):
        raise ValueError(f"{key} is {type(row[key]).__name__}, want a list of messages")
    return row[key]


def checked_ids(input_ids, labels):
    """Returns both if they are lists of tokens of the same length; labels may be IGNORE."""
    for key, values in ("input_ids", input_ids), ("labels", labels):
        allowed = {IGNORE} if key == "labels" else set()
        if not isinstance(values, list) or not all(
            type(token) is int and (0 <= token < 2**31 or token in allowed) for token in values
        ):
            raise ValueError(f"{key} is no list of tokens")
    if len(input_ids) != len(labels):
        raise ValueError("labels and input_ids are not equally many")
    return input_ids, labels
