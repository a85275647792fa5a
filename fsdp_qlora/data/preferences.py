"""Parse preference data: pairs of answers, and unpaired answers with a label.

The question with one of the answers is an example of example_formats.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from fsdp_qlora.data.example_formats import (
    ANSWERS, COMPLETION, Document, as_object, find_format, is_empty, parse_object, read_list_text,
    read_message)
from fsdp_qlora.errors import FatalExample
from fsdp_qlora.model.preference_loss import LOSSES

# keys of the chosen and the rejected answer
PAIR_KEYS = (("chosen", "rejected"), ("chosen_response", "rejected_response"),
             ("preferred_output", "non_preferred_output"))
LABEL_KEYS = ("label", "kto_tag")
CONVERSATION_KEYS = ("messages", "conversations")


def parse_preference(example: Any, tokenizer: PreTrainedTokenizerFast, renames: Sequence[str],
                     loss: str) -> tuple[str, list[Document], list[bool]]:
    """parse_example() of an example for this preference loss. Also returns whether each document is
    a desirable answer. Of two answers the chosen one comes first."""
    example = as_object(example, renames)
    is_unpaired = LOSSES[loss].is_unpaired
    kinds = [*PAIR_KEYS, *((key,) for key in LABEL_KEYS)] if is_unpaired else PAIR_KEYS
    given = {key for key, value in example.items() if value is not None}
    found = [keys for keys in kinds if given & {*keys}]
    # or keys with null values
    found = found or [keys for keys in kinds if example.keys() & {*keys}][:1]
    if len(found) > 1:
        raise FatalExample(f"has {found[0][0]} and {found[1][0]}: keep one of them, or ignore"
                           f" one: --columns {found[1][0]}=unused")
    if found and found[0] in PAIR_KEYS:
        return parse_pair(example, *found[0], tokenizer)
    if found:
        return parse_unpaired(example, found[0][0], tokenizer)
    wanted = "label (true or false)" if is_unpaired else "chosen and rejected"
    raise FatalExample(f"has {', '.join(example) or 'no keys'}; --loss {loss} needs {wanted} as"
                       " well as a prompt. Rename keys with --columns OLD=NEW, or train on such"
                       " examples with --loss "
                       + ("kto" if example.keys() & {*LABEL_KEYS} else "sft"))


def parse_pair(example: dict[str, Any], chosen_key: str, rejected_key: str,
               tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[Document], list[bool]]:
    """parse_preference() of an example with two answers, in these keys."""
    answers = []
    for key in chosen_key, rejected_key:
        if key not in example:
            other = chosen_key if key == rejected_key else rejected_key
            raise FatalExample(f"has {other}, but no {key}")
        if example[key] is None:
            raise ValueError(f"{key} is null")
        answers.append(example[key])
    if answers[0] == answers[1]:
        raise ValueError("both answers are the same")
    example = {key: value for key, value in example.items()
               if key not in (chosen_key, rejected_key)}
    if isinstance(example.get("input"), dict):  # OpenAI's format
        given = {key: value for key, value in example.pop("input").items()
                 if key != "parallel_tool_calls" and not is_empty(value)}
        if both := [key for key in given if not is_empty(example.get(key))]:
            raise FatalExample(f"has {both[0]} and another one in input: keep one of them")
        example |= given
    examples, format, prompt_is_prefix = examples_of_answers(example, answers)
    (name, chosen), (_, rejected) = (
        parse_object(one, tokenizer, format, prompt_is_prefix, trains_history=False)
        for one in examples)
    if len(chosen) + len(rejected) > 2:  # the template rewrites answers when more messages follow
        raise ValueError("this chat template makes several rows of an answer of several"
                         " messages. Write all but the last message in the prompt")
    if chosen == rejected:
        raise ValueError("both answers are the same")
    return f"pairs of {name}", chosen + rejected, [True, False]


def parse_unpaired(example: dict[str, Any], label: str,
                   tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[Document], list[bool]]:
    """parse_preference() of an example with one answer, whose key `label` says whether it is good.
    """
    is_good = example[label]
    if is_good is None:
        raise ValueError(f"{label} is null")
    if isinstance(is_good, str):  # from a CSV file
        read = {"true": True, "1": True, "false": False, "0": False}
        is_good = read.get(is_good.lower(), is_good)
    if is_good not in (True, False):  # 1 and 0 equal these
        raise FatalExample(f"has {label} {is_good!r}, expected true or false")
    format = None
    given = {key: value for key, value in example.items() if key != label}
    example = {key: value for key, value in given.items() if value is not None}
    answered = next((key for key in ANSWERS.values() if key in example), None)
    if answered:
        (example,), format, _ = examples_of_answers(example, [example.pop(answered)])
        if format == COMPLETION != (format[0], answered) and isinstance(example["completion"], str):
            format = "prompt", answered  # a question and its answer, through the chat template
            example[answered] = example.pop("completion")
    elif conversation := next((key for key in CONVERSATION_KEYS if key in example), None):
        messages = list_of_messages(example, conversation)  # the label is for the last one
        (example,), format, _ = examples_of_answers(example, [messages])
    else:
        format = find_format(given)
    name, documents = parse_object(example, tokenizer, format, trains_history=False)
    if len(documents) > 1:
        raise ValueError("this chat template makes several rows of an answer of several"
                         " messages. Write all but the last message in the prompt")
    return f"unpaired {name}", documents, [bool(is_good)]


def examples_of_answers(
    example: dict[str, Any], answers: list[Any]
) -> tuple[list[dict[str, Any]], tuple[str, ...], bool]:
    """Return an example of example_formats.py for each of the one or two `answers` to what the rest
    of the example asks; their format; and whether the common beginning of two texts was used as
    their prompt.

    The question is in a key of ANSWERS or CONVERSATION_KEYS, or the answers contain it.
    """
    asks = [key for key in (*ANSWERS, *CONVERSATION_KEYS) if key in example]
    if asks and all(example[key] is None for key in asks):
        raise ValueError(f"{asks[0]} is null")
    example = without_blank_questions(example)
    answers = [read_list_text("completion", answer) for answer in answers]
    if {type(answer) for answer in answers} not in ({str}, {list}, {dict}):
        raise ValueError("an answer must be a text, a message or a list of messages, and two"
                         " answers of the same kind")
    if isinstance(answers[0], dict):
        answers = [[answer] for answer in answers]
    is_whole = are_conversations(answers)
    example, answers = in_one_form(example, answers, is_whole)
    for asked, answered in ANSWERS.items():
        if asked in example:
            check_answers(asked, example[asked], answers)
            return [{**example, answered: answer} for answer in answers], (asked, answered), False
    n = question_length(answers, is_whole)
    if not n:
        raise FatalExample(f"has answers, but no prompt, only {', '.join(example) or 'them'}."
                           " Name its key with --columns OLD=prompt, or write an empty prompt")
    examples = [{**example, "prompt": answer[:n], "completion": answer[n:]} for answer in answers]
    return examples, COMPLETION, isinstance(answers[0], str)


def in_one_form(
    example: dict[str, Any], answers: list[Any], is_whole: bool
) -> tuple[dict[str, Any], list[Any]]:
    """Return the example with its question in a key of ANSWERS, and the answers: a prompt and its
    answers are texts or messages, all of them. `is_whole`: the answers contain the question, so its
    copies in the example are left out."""
    example = dict(example)
    for key in CONVERSATION_KEYS:
        if key in example and is_whole:  # a copy of the conversation, as in UltraFeedback
            del example[key]
        elif key in example and "prompt" not in example:
            example["prompt"] = list_of_messages(example, key)
    if "input" in example and not example.keys() & ANSWERS.keys():
        example["question"] = example.pop("input")
    if "prompt" in example:
        example["prompt"] = prompt = read_list_text("prompt", example["prompt"])
        if is_whole:
            check_prompt(prompt, answers[0])
            del example["prompt"]
        elif isinstance(prompt, list) and isinstance(answers[0], str):
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        elif isinstance(prompt, str) and isinstance(answers[0], list):
            if is_empty(prompt):
                raise ValueError("prompt is blank: nothing is asked")
            example["prompt"] = [{"role": "user", "content": prompt}]
    return example, answers


def question_length(answers: list[Any], is_whole: bool) -> int:
    """Return how many characters or messages of the answers are their question: all but the last
    message of a single conversation, or the common beginning of two answers."""
    if len(answers) == 1:
        return len(answers[0]) - 1 if is_whole else 0
    shortest = min(map(len, answers))
    n = next((i for i, (a, b) in enumerate(zip(*answers)) if a != b), shortest)
    if n == shortest:
        raise ValueError("one answer is the beginning of the other, so where their prompt ends is"
                         " unknown. Write it in a key of its own, prompt")
    if is_whole and (role := next((read_message(answer[n])["role"] for answer in answers
                                   if read_message(answer[n])["role"] != "assistant"), None)):
        raise ValueError(f"the two conversations differ in message {n + 1}, of {role}, before their"
                         " answers: make it the same in both, or write the messages that are asked"
                         " in prompt and the answers alone in chosen and rejected")
    return n


def without_blank_questions(example: dict[str, Any]) -> dict[str, Any]:
    """Return the example without keys that are null, and without blank questions if another key
    asks."""
    example = {key: value for key, value in example.items() if value is not None}
    full = {key for key, value in example.items() if not is_empty(value)}
    may_go = {*ANSWERS, *CONVERSATION_KEYS} if full & {*ANSWERS, *CONVERSATION_KEYS} else set()
    if "input" in full:  # a blank instruction must stay, because it determines the format
        may_go |= {"prompt"}
    return {key: value for key, value in example.items() if key in full or key not in may_go}


def list_of_messages(example: dict[str, Any], key: str) -> list[Any]:
    """Remove the conversation in this key from the example, and return it."""
    messages = read_list_text(key, example.pop(key))
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{key} must be a list of messages")
    return messages


def are_conversations(answers: list[Any]) -> bool:
    """Return True if the answers are whole conversations, which contain the question."""
    found = {isinstance(answer, list) and bool(answer)
             and read_message(answer[0])["role"] in ("system", "user", "developer")
             for answer in answers}
    if len(found) > 1:
        raise ValueError("one answer is a whole conversation, the other is not")
    return found.pop()


def check_answers(asked: str, question: Any, answers: list[Any]) -> None:
    """Raise ValueError for a pair of texts that both begin with their question, which would be
    repeated."""
    if len(answers) == 2 and isinstance(question, str) and (question := question.strip()) and all(
            isinstance(answer, str) and answer.strip().startswith(question) for answer in answers):
        raise ValueError(f"both answers begin with their {asked}: if all examples are so, drop it,"
                         f" --columns {asked}=unused")


def check_prompt(prompt: Any, conversation: list[Any]) -> None:
    """Raise FatalExample for a prompt that is not in a whole conversation."""
    messages = [read_message(message) for message in conversation]
    asked = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    texts = ["", *map(text_of_message, messages)]
    if any(text_of_message(read_message(message)) not in texts for message in asked):
        raise FatalExample("has a prompt that is not in the conversation of its answer: leave it"
                           " out, --columns prompt=unused")


def text_of_message(message: dict[str, Any]) -> str:
    """Return the text of a message, without spaces around it."""
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part)
                          for part in content)
    return str(content or "").strip()
