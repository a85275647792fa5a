"""Tokens that the frozen head has never learned are noticed before the first step."""

import json
import re
import shutil
import types

import pytest
import torch
from conftest import needs_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from fsdp_qlora.checks.untrained_tokens import ZERO_ROW, find_untrained_tokens

ASKED = [{"role": "user", "content": "What is 3 plus 4?"},
         {"role": "assistant", "content": "The answer is 7."}]
# an answer is closed by </s> where the model has its own template, here by <pad>
CLOSED_BY_PAD = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<pad>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")


@pytest.fixture(scope="module")
def flags_for(tiny_model, tmp_path_factory):
    """Function (change, kind, closes_by_pad): the flags of a run whose model's head is changed."""

    def make(change, kind="llama", closes_by_pad=True):
        path = tmp_path_factory.mktemp("unlearned")
        model = shutil.copytree(tiny_model(kind), path / "model")
        weights = load_file(model / "model.safetensors")
        tokenizer = AutoTokenizer.from_pretrained(model)
        change(weights.get("lm_head.weight", weights["model.embed_tokens.weight"]), tokenizer)
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        (path / "data.jsonl").write_text(8 * (json.dumps({"messages": ASKED}) + "\n"))
        (path / "chat.jinja").write_text(CLOSED_BY_PAD)
        flags = ["--model", model, "--dataset", path / "data.jsonl", "--batch_size", 4,
                 "--max_steps", 1, "--report_to", "none", "--output_dir", path / "run"]
        return [*flags, *["--chat_template", path / "chat.jinja"] * closes_by_pad]

    return make


def zero(token):
    def change(head, tokenizer):
        head[tokenizer.convert_tokens_to_ids(token)] = 0

    return change


def zero_of_the_answer(head, tokenizer):
    """The last of its tokens in the vocabulary."""
    i = max(tokenizer(ASKED[1]["content"])["input_ids"])
    assert i > len(tokenizer) / 2
    head[i] = 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"], ids=["own head", "tied"])
@pytest.mark.parametrize("token, closes_by_pad", [("<pad>", True), ("</s>", False)])
def test_zero_row_of_the_closing_token_ends_the_start(
        kind, token, closes_by_pad, flags_for, run_main):  # fmt: skip
    code, _, err = run_main(*flags_for(zero(token), kind, closes_by_pad))
    assert code == 3 and f"never learned '{token}', which ends answers" in err
    assert f"Use --trainable_tokens '{token}', the instruct model" in err


def test_zero_row_of_eos_ends_the_start_where_plain_rows_end_with_it(flags_for, run_main):
    """Though a chat would be closed by another token."""
    flags = flags_for(zero("</s>"))
    flags[3].write_text(8 * '{"prompt": "1 or ", "completion": "2"}\n')
    code, _, err = run_main(*flags)
    assert code == 3 and "never learned '</s>', which ends answers" in err


def test_rows_that_were_never_trained_are_found():
    """As they are made or filled in: copies, zeros, tiny values, the mean of all."""
    head = torch.randn(300, 64, generator=torch.Generator().manual_seed(0)) + 1
    head[[4, 5, 6]], head[7], head[8] = head[3].clone(), 0.05 * head[7], 0
    head[9] = 1e-5 * head[9]
    head[10] = head.mean(0)
    model = types.SimpleNamespace(
        lm_head=head.bfloat16(), shard_group_size=1, all_gather=lambda own: own[None],
        arch=types.SimpleNamespace(vocab_size=300))  # fmt: skip
    assert find_untrained_tokens(model) == {
        **dict.fromkeys(range(3, 7), "the same row as 3 of the others"), 7: "a tiny row",
        **dict.fromkeys((8, 9), ZERO_ROW), 10: "the mean of all rows"}  # fmt: skip


def test_other_tokens_that_the_head_never_learned_are_said(flags_for, run_main):
    code, out, err = run_main(*flags_for(zero_of_the_answer))
    assert code == 0, err
    (line,) = re.findall("^warning: .*", out, re.M)
    assert "lm_head never learned: '" in line and "' (a row of zeros, 8 times in the loss)" in line
    assert "--trainable_tokens" in line


def test_model_that_knows_all_tokens_gets_no_warning(flags_for, run_main):
    """Nor is a row asked for that is not trained: no answer here ends with EOS."""
    code, out, err = run_main(*flags_for(zero("</s>")))
    assert code == 0 and "never learned" not in out + err


@pytest.mark.parametrize("change, code", [(zero("<pad>"), 3), (zero_of_the_answer, 0)])
def test_rows_of_a_sharded_head_are_all_looked_at(change, code, flags_for, run_jobs, tmp_path):
    """Of two ranks the first has the row of <pad>, the other that of the answer's token."""
    needs_ranks(2)
    flags = [str(flag) for flag in flags_for(change)]
    out, err = run_jobs(2, [{"argv": [*flags, "--shard_group_size", "2"]}], tmp_path, code=code)
    assert "never learned" in (err if code else out)
