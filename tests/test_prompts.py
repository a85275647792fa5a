"""What is asked for is what was trained: the tokens before each trained answer are those of the
saved tokenizer's own prompt, for all templates; and a merged model, asked by transformers alone,
gives the answers that it was trained on.
"""

import copy
import json

import pytest
import torch
from conftest import encode_file
from rows import (
    ADD, AGAIN, ASKED, BRIEF, CHATML, MARKED, SWITCHED, TALK, TEMPLATES, THINKING,
    prepare, refusal, says, trained, write_jsonl)
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast)

import merge_adapters
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.template import template_traits
from fsdp_qlora.data.tokenize_documents import tokenize_batch

# of Qwen: line ends are one token together, so that one may belong to a prompt and to its answer
SPLIT = (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TAGS = "<think> </think> <|im_start|> <|im_end|> <|user|> <|assistant|> <|system|>".split()


@pytest.fixture(scope="module")
def qwen():
    """A tokenizer that splits texts as Qwen's does."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    corpus = "user assistant\n\n\n\n : :\n What is it? one two three four It so"
    tokens.train_from_iterator([corpus] * 9, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<|endoftext|>", bos_token="<|begin|>")
    tokenizer.add_tokens([AddedToken(tag, special="think" not in tag) for tag in TAGS])
    assert len(tokenizer("\n\n")["input_ids"]) == 1
    return tokenizer


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "of": "both"}}}
CALLING = says("assistant", "", tool_calls=[CALL])
CONVERSATIONS = {
    "plain": TALK, "one": ASKED,
    "white space": [says("user", "a \n"), says("assistant", "\n\n b \n"), says("user", "\nc"),
                    says("assistant", " d")],
    "reasoning": [ASKED[0], says("assistant", "It is 7.", reasoning_content="so it is")],
    "reasoning in the content": [ASKED[0], says("assistant", "<think>\nso\n</think>\n\nIt is 7.")],
    "some reasoning": [*ASKED, AGAIN[0], says("assistant", "4.", reasoning_content="so it is")],
    "a call": [BRIEF, ASKED[0], CALLING, says("tool", "7"), ASKED[1]],
    "calls": [ASKED[0], says("assistant", "Well.", tool_calls=[CALL, CALL]), says("tool", "7"),
              says("tool", "8"), CALLING, says("tool", "9"), ASKED[1], *AGAIN]}


@pytest.mark.parametrize("thinking", [None, True, False], ids=["unsaid", "on", "off"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_before_each_answer_are_those_of_the_prompt(name, thinking, qwen, tmp_path):
    """Or one line says why they cannot be."""
    qwen = copy.deepcopy(qwen)
    qwen.chat_template = TEMPLATES[name]
    as_parts = template_traits(qwen, qwen.chat_template).as_parts
    n_equal = 0
    for messages in CONVERSATIONS.values():
        row = {"messages": messages, "tools": [ADD] * any("tool_calls" in m for m in messages)}
        said = {} if thinking is None else {"enable_thinking": thinking}
        path = write_jsonl(tmp_path / "row.jsonl", [row | {"chat_template_kwargs": said}])
        documents = encode_file(path, qwen, 4096)
        if why := documents[0]["left_out"]:
            assert any(words in why for words in (
                "the chat template leaves out", "the chat template fails", "mixes message",
                "prompt for an answer has")), why
            continue
        ways = {way: json.loads(way) for way in documents[0]["template_kwargs"].splitlines()}
        wanted = set()
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = copy.deepcopy(messages[:i])
                for one in before if as_parts else []:
                    one["content"] = [{"type": "text", "text": one["content"]}]
                wanted |= {(i, way, tuple(qwen.apply_chat_template(
                    before, tools=row["tools"] or None, add_generation_prompt=True,
                    return_dict=False, **(said | variables)))) for way, variables in ways.items()}
        found = set()
        for document in documents:
            ids, labels = document["input_ids"].tolist(), document["labels"].tolist()
            for k in range(1, len(ids)):
                if labels[k] != IGNORE_INDEX and (labels[k - 1] == IGNORE_INDEX):
                    (found_here,) = {i for i, _, prompt in wanted if prompt == tuple(ids[:k])}
                    found.add(found_here)
        assert found == {i for i, _, _ in wanted}
        n_equal += 1
    assert n_equal >= 2


def test_check_would_see_an_answer_that_begins_inside_a_token(qwen, tmp_path, monkeypatch):
    """What is tokenized whole here has one token for the two line ends."""
    from fsdp_qlora.data import tokenize_documents

    qwen = copy.deepcopy(qwen)
    qwen.chat_template = THINKING
    path = write_jsonl(tmp_path / "row.jsonl", [{"messages": ASKED}])
    (apart,) = encode_file(path, qwen)

    def joins_answers(documents, tokenizers):
        joined = [[part._replace(answers=()) for part in document] for document in documents]
        return tokenize_batch(joined, tokenizers)

    monkeypatch.setattr(tokenize_documents, "tokenize_batch", joins_answers)
    (joined,) = encode_file(path, qwen)
    assert len(apart["input_ids"]) == len(joined["input_ids"]) + 1
    assert trained([apart], qwen) == [["\n</think>\n\nThe answer is 7.<|im_end|>"]]


def test_answers_are_counted_by_their_template_variables(qwen, tmp_path):
    """Those without reasoning by the template's switch, the others as it is."""
    qwen = copy.deepcopy(qwen)
    qwen.chat_template = SWITCHED
    thought = [ASKED[0], says("assistant", "It is 7.", reasoning_content="so it is")]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": m} for m in (TALK, ASKED, thought)])
    rows, _ = prepare([path], qwen)
    assert rows.template_kwargs == {'{"enable_thinking": false}': 3, "{}": 1}
    row = {"messages": thought, "chat_template_kwargs": {"enable_thinking": False}}
    why = refusal([write_jsonl(tmp_path / "row.jsonl", [row])], qwen)
    assert "prompt for an answer has '</think>', but this answer begins with '\\nso it is" in why


@pytest.mark.parametrize("template, why", [
    (MARKED.replace("{% generation %}{{ m.content }}", "{{ m.content }}{% generation %}"),
     "marks leave out 'The answer is 7.'"),
    (CHATML.replace("<|im_start|>assistant\n{%", "<|im_start|>assistant\nSure: {%"),
     "prompt for an answer has 'Sure: ', but this answer begins with 'The answer is 7.")],
    ids=["marks", "no switch"])  # fmt: skip
def test_answer_that_cannot_be_asked_for_ends_the_run(template, why, qwen, tmp_path):
    qwen = copy.deepcopy(qwen)
    qwen.chat_template = template
    path = write_jsonl(tmp_path / "row.jsonl", [{"messages": ASKED}])
    assert why in refusal([path], qwen)


def test_marks_that_have_the_header_too_train_what_stands_behind_it(qwen, tmp_path):
    """As SmolLM3's do."""
    qwen = copy.deepcopy(qwen)
    qwen.chat_template = MARKED.replace(
        "<|im_start|>assistant\n{% if m.unmarked %}{{ m.content }}{% else %}{% generation %}",
        "{% if m.unmarked %}{{ m.content }}{% else %}{% generation %}<|im_start|>assistant\n")
    path = write_jsonl(tmp_path / "row.jsonl", [{"messages": ASKED}])
    assert trained(encode_file(path, qwen), qwen) == [["The answer is 7.<|im_end|>\n"]]


# ------------------------------------------------------------------------------------------------
# Trained, merged, asked
# ------------------------------------------------------------------------------------------------

NUMBERS = ["one", "two", "three", "four"]
TALKS = [[says("user", f"What is it? {n}"), says("assistant", f"It is {n}.")] for n in NUMBERS]
THOUGHTS = [[asked, answer | {"reasoning_content": f"so {n}"}]
            for (asked, answer), n in zip(TALKS, NUMBERS)]
SPACES = [[says("user", f"What is it? {n} "), says("assistant", f"\nIt is {n}.")] for n in NUMBERS]
# name: (template, conversations, how to prompt, what the model then writes)
SERVED = {
    "Qwen3.5": ("thinking", TALKS, {}, "\n</think>\n\nIt is {}."),
    "Qwen3.5, small": ("thinking by a switch", TALKS, {}, "It is {}."),
    "Qwen3.5, small, reasoning": (
        "thinking by a switch", THOUGHTS, {"enable_thinking": True},
        "so {0}\n</think>\n\nIt is {0}."),
    "Nemotron 3": ("answering by a switch", TALKS, {"enable_thinking": False}, "It is {}."),
    "GLM 4.7": ("answering behind a tag's end", TALKS, {"enable_thinking": False}, "It is {}."),
    "R1": ("generation prompt opens reasoning", TALKS, {}, "\n</think>\n\nIt is {}."),
    "R1, reasoning": (
        "generation prompt opens reasoning", THOUGHTS, {}, "so {0}\n</think>\n\nIt is {0}."),
    "ChatML": ("closed", TALKS, {}, "It is {}."),
    "white space": ("closed", SPACES, {}, "\nIt is {}."),
    "plain text": ("closed by plain text", SPACES, {}, "\nIt is {}.[end]\n")}
USUAL = ("Qwen3.5",)  # the others by `make test-slow`


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in USUAL)) for name in SERVED])
def test_merged_model_answers_as_trained_when_asked_by_its_template(
        name, qwen, run_main, tmp_path, capsys):
    """By default, or as the log, the run's directory and the merge's last line say."""
    template, talks, variables, want = SERVED[name]
    model, run = tmp_path / "model", tmp_path / "run"
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=360, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=qwen.eos_token_id,
        initializer_range=0.12))
    base.model.embed_tokens.weight.data.normal_(0, 1)
    base.save_pretrained(model)
    tokenizer = copy.deepcopy(qwen)
    tokenizer.chat_template = TEMPLATES[template]
    tokenizer.save_pretrained(model)
    write_jsonl(tmp_path / "rows.jsonl", [{"messages": talk} for talk in talks])
    code, said, err = run_main(
        "--model", model, "--dataset", tmp_path / "rows.jsonl", "--output_dir", run,
        "--max_steps", 40, "--batch_size", 4, "--learning_rate", 0.006, "--report_to", "none",
        "--eval_dataset", tmp_path / "rows.jsonl", "--eval_every", 0, "--eval_samples", 4)
    assert code == 0, err
    merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(tmp_path / "merged")])
    merged = capsys.readouterr().out
    described = json.loads((run / "train_config.json").read_text())
    assert described["template_kwargs"] == [{"answers": 4, "chat_template_kwargs": variables}]
    for text in said, merged:
        assert (f'"chat_template_kwargs": {json.dumps(variables)}' in text) == bool(variables)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    for (asked, _), number in zip(talks, NUMBERS):
        inputs = tokenizer.apply_chat_template(
            [asked], add_generation_prompt=True, return_tensors="pt", return_dict=True, **variables)
        (ids,) = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = ids[inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer, skip_special_tokens=False).startswith(want.format(number))
        prompt = tokenizer.decode(inputs["input_ids"][0])
        assert f"sample: prompt   {prompt!r}\n" in said  # which asks as a server does
