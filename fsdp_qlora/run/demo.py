"""The built-in demo: a tiny random Llama, its tokenizer and 512 instructions.

The frozen model knows nothing, so the fall of the loss is what the adapter has learned.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers

from fsdp_qlora.config import Config
from fsdp_qlora.log import log
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.ranks import on_rank_0


def make_demo(config: Config, directory: Path) -> None:
    """Write the demo's model and data, unless an earlier start has written them. All ranks must
    call this."""
    log("demo: no --model, so this trains a tiny random Llama" if config.dataset else
        "demo: no --model and no --dataset, so this trains a tiny random Llama on 512 made-up sums")

    def write_once() -> None:
        if not (directory / "train_config.json").exists():
            write_demo(directory / "demo", config.loss)

    on_rank_0(write_once)


def write_demo(directory: Path, loss: str = "sft") -> None:
    """Write a Llama of 2.6 M parameters, its tokenizer and the instructions: with right answers,
    for preference losses also with wrong ones. Rank 0 only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    draw, examples = random.Random(0), []
    for _ in range(512):
        a, b = draw.randrange(6), draw.randrange(6)
        word, answer = draw.choice([("plus", a + b), ("times", a * b), ("minus", a - b)])
        prompt, completion = f"What is {a} {word} {b}?\n", f"The answer is {answer}."
        examples.append({"prompt": prompt, "completion": completion})
    lines = examples if loss == "sft" else [
        preference_example(example, loss, i) for i, example in enumerate(examples)]
    (directory / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    bpe, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    specials = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=384, special_tokens=list(specials.values()),
                                  initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((one["prompt"] + one["completion"] for one in examples), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, **specials)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    tokenizer.save_pretrained(directory / "model")

    model_config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
        initializer_range=0.06, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(model_config).bfloat16()
    model.save_pretrained(directory / "model")


def preference_example(example: dict[str, str], loss: str, i: int) -> dict[str, Any]:
    """Return the demo's i-th example for a preference loss: a pair of its answer and a wrong one
    or, for an unpaired loss, one of the two in turn."""
    right = example["completion"]
    number = int(right.split()[-1].rstrip("."))
    wrong = f"The answer is {number + (-1, 1, 2, -2)[i % 4]}."
    if LOSSES[loss].is_unpaired:
        return {**example, "completion": (right, wrong)[i % 2], "label": i % 2 == 0}
    return {"prompt": example["prompt"], "chosen": right, "rejected": wrong}
