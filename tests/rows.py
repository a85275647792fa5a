"""Rows, chat templates and tokenizers of the tests of data, and what the package makes of them.

The templates are small, each with a trait of released ones. What of a row is trained is told by
decoding its tokens, never by what the script says of them.
"""

import copy
import functools
import json

import pytest
from conftest import encode_file, one_process
from transformers import AddedToken, PreTrainedTokenizerFast

from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.prepare_data import prepare_rows
from fsdp_qlora.ranks import RunEnd

SPECIAL = ("<|im_start|> <|im_end|> <|start|> <|channel|> <|message|> <|end|> <|return|> <|call|>"
           " <|user|> <|assistant|> <|system|>").split()  # fmt: skip


@functools.cache
def load_tokenizer(directory):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def chat_tokenizer(demo_directory, template):
    """A new tokenizer, which a test may change, with the special tokens of all templates here."""
    tokenizer = copy.deepcopy(load_tokenizer(demo_directory / "model"))
    tokenizer.chat_template = template
    return tokenizer


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def encode_row(row, tokenizer, directory):
    """The documents of one row, none of which is left out."""
    documents = encode_file(write_jsonl(directory / "row.jsonl", [row]), tokenizer, 1024)
    assert [one["left_out"] for one in documents] == [""] * len(documents)
    return documents


def prepare(sources, tokenizer, max_seq_len=1024, day="2020-01-31", renames=()):
    """The Rows of some sources, and the line on them."""
    with one_process():
        return prepare_rows(
            [str(source) for source in sources], tokenizer, max_seq_len, len(tokenizer), day,
            renames,
        )[:2]


def refusal(sources, tokenizer, **settings):
    with pytest.raises(RunEnd) as caught:
        prepare(sources, tokenizer, **settings)
    return str(caught.value)


def trained_runs(document, tokenizer):
    """[(the text before, the text)] of each part that is trained in one go."""
    ids, labels = list(map(int, document["input_ids"])), list(map(int, document["labels"]))
    assert all(label in (token, IGNORE_INDEX) for token, label in zip(ids, labels, strict=True))
    runs, at = [], 0
    while at < len(ids):
        start = at
        while at < len(ids) and labels[at] != IGNORE_INDEX:
            at += 1
        if at > start:
            runs.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start:at])))
        at += 1
    return runs


def trained(documents, tokenizer):
    """The trained texts of each document of a row."""
    return [[text for _, text in trained_runs(one, tokenizer)] for one in documents]


def whole(documents, tokenizer):
    """The text of each document of a row."""
    return [tokenizer.decode(one["input_ids"]) for one in documents]


def says(role, content, **more):
    return {"role": role, "content": content, **more}


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3: answers before the last user's message lose their reasoning, the last one has an empty one
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
# gpt-oss: the last answer is closed by another token than those before it, which also lose what was
# in the analysis channel
CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}"
    "{% if m.thinking and loop.last %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final{% endif %}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# DeepSeek: the generation prompt opens reasoning, which no rendered answer has
OPENED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "<|assistant|>{{ m.content.split('</think>')[-1] }}{{ eos_token }}"
    "{% elif m.role == 'user' %}<|user|>{{ m.content }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# no special token closes an answer
PLAINLY = (
    "{% for m in messages %}[{{ m.role }}]\n{{ m.content }}[end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
# GLM: no answer is closed
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
# SmolLM3: what is trained is marked, here without the header but with the line's end
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if m.unmarked %}{{ m.content }}{% else %}"
    "{% generation %}{{ m.content }}<|im_end|>{{ '\\n' }}{% endgeneration %}{% endif %}"
    "{% if m.note %} {% generation %}{{ m.note }}{% endgeneration %}{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3.5: an answer that follows a question has reasoning, which its prompt opens, or by a switch
# closes; where it is empty, a line's end stands on both sides of where they meet
THINKING = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.asked = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought = m.reasoning_content or '' %}{% set content = m.content %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')"
    "[-1] %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{% if loop.index0 > ns.asked %}<think>\n{{ thought.strip() }}\n</think>\n\n{% endif %}"
    "{{ content.strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# its small sizes: no reasoning unless the switch asks for it
SILENT = THINKING.replace("is false", "is true").replace(
    "<think>\n\n</think>\n\n{% else %}<think>\n", "<think>\n{% else %}<think>\n\n</think>\n\n")
# Nemotron 3: an answer without reasoning is not opened as the prompt opens it, but for a switch
SWITCHED = (
    "{% set enable_thinking = enable_thinking if enable_thinking is defined else True %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n"
    "{% elif '</think>' not in m.content %}<think></think>{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n' if enable_thinking else '<think></think>' }}{% endif %}"
)
# GLM 4.7: the same, with a tag's end alone, and open turns
CLOSED_TAG = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{{ '<think>' + m.reasoning_content + '</think>' if m.reasoning_content else '</think>' }}"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{{ '</think>' if enable_thinking is defined and not enable_thinking else '<think>' }}"
    "{% endif %}"
)
TEMPLATES = {  # by trait
    "closed": CHATML,
    "marked": MARKED,
    "drops reasoning": REASONING,
    "last answer closed otherwise": CHANNELS,
    "generation prompt opens reasoning": OPENED,
    "closed by plain text": PLAINLY,
    "not closed": UNCLOSED,
    "content in parts": PARTS,
    "raises on a system message": STRICT,
    "tools": TOOLS,
    "thinking": THINKING,
    "thinking by a switch": SILENT,
    "answering by a switch": SWITCHED,
    "answering behind a tag's end": CLOSED_TAG,
}

ASKED = [says("user", "What is 3 plus 4?"), says("assistant", "The answer is 7.")]
AGAIN = [says("user", "And 2 times 2?"), says("assistant", "It is 4.")]
THIRD = [says("user", "And 1 minus 1?"), says("assistant", "That is 0.")]
BRIEF = says("system", "Be brief.")
TALK = [BRIEF, *ASKED, *AGAIN]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "of": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
