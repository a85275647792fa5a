"""Runs of a few steps on a tiny model, made together, each of which a test then looks at.

A file makes a directory by make_base(), and its runs there by runs_of(), when its first test asks.
"""

import json
import math
import random
import shutil

import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, read_rows
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_step import ALPHA, RANK, load_reference, write_uneven_rows
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from fsdp_qlora.data.example_formats import IGNORE_INDEX

PEAK, STEPS = 1e-2, 4
FLAGS = ["--model", "model", "--dataset", "rows.jsonl", "--batch_size", 4, "--max_steps", STEPS,
         "--lora_rank", RANK, "--lora_alpha", ALPHA, "--learning_rate", PEAK, "--max_seq_len", 64,
         "--compute_dtype", "float32", "--micro_batch_tokens", 100,
         "--report_to", "none"]  # fmt: skip
EVALUATED = ["--eval_dataset", "eval.jsonl", "--eval_every", 2]
DROPOUT = ["--lora_dropout", 0.3]
OFFLOADED = [*DROPOUT, "--recompute", "all", "--offload_activations"]


def make_base(directory, tiny_model):
    """Fill a directory with model/, rows to train and to evaluate on, and a chat template."""
    model = tiny_model("qwen2", hidden_size=96, intermediate_size=171, num_hidden_layers=2)
    (directory / "model").symlink_to(model)
    write_uneven_rows(directory / "rows.jsonl")
    draw, words = random.Random(5), "what is the answer to this plus minus times 1 2 3".split()
    for name, n in ("eval.jsonl", 9), ("many.jsonl", 40):
        lines = [{"prompt": " ".join(draw.choices(words, k=draw.randint(1, 9))),
                  "completion": " ".join(draw.choices(words, k=draw.randint(1, 25)))}
                 for _ in range(n)]  # fmt: skip
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "chat.jinja").write_text("{% for m in messages %}>{{ m.content }}{% endfor %}")
    return directory


def make_peft_adapters(base):
    """Adapters that PEFT itself saved, with values for B that are not zero."""
    for name, more in {
        "peft": {}, "peft-dora": {"use_dora": True}, "peft-rank": {"r": RANK + 1},
        "peft-targets": {"target_modules": ["q_proj"]}, "peft-alphas": {"alpha_pattern": {"k": 7}},
        "peft-pissa": {"init_lora_weights": "pissa"},
        "peft-saved": {"modules_to_save": ["lm_head"]}, "peft-bias": {"bias": "lora_only"},
        "peft-ranks": {"rank_pattern": {"k_proj": 4}},
        "peft-tokens": {"trainable_token_indices": [3, 7]},
        "peft-layers": {"layers_to_transform": [1], "target_modules": ["q_proj"]},
        "peft-alora": {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
    }.items():  # fmt: skip
        write_peft_adapter(base, name, **more)
    values = load_file(base / "peft" / "adapter_model.safetensors")
    next(iter(values.values()))[0, 0] = math.nan
    shutil.copytree(base / "peft", base / "peft-nan")
    save_file(values, base / "peft-nan" / "adapter_model.safetensors")


def write_peft_adapter(base, name, **more):
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    settings = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, LoraConfig(**{**settings, **more}))
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(0, 0.02)
    model.save_pretrained(base / name)


def runs_of(base, run_jobs, jobs):
    """Function (processes, *name): the directory of a run, and what its launch printed. `jobs`
    (processes) are [(name, flags, what else the job has)] of the runs, made together."""
    done = {}

    def get(nproc, *name):
        needs_ranks(nproc)
        if nproc not in done:
            made = []
            for names, flags, more in jobs(nproc):
                argv = [*FLAGS, *flags, "--output_dir", directory_name(nproc, *names)]
                made.append({"argv": list(map(str, argv)), "deterministic": True, **more})
            done[nproc] = run_jobs(nproc, made, cwd=base)
        return base / directory_name(nproc, *name), done[nproc][0]

    return get


def directory_name(nproc, *name):
    return ", ".join([str(nproc), *name])


def adapter_of(directory):
    return load_file(directory / "adapter_model.safetensors")


def assert_same(got, want):
    assert got.keys() == want.keys() and len(got) >= 28
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


def evaluations(records):
    return [record for record in records if "eval_loss" in record]


def trained(records):
    """What must be the same of each training step."""
    keys = (
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "rows",
        "tokens",
        "loss_tokens",
        "micro_batches",
    )
    return [[record[key] for key in keys] for record in records if "loss" in record]


def reference_loss_of(base):
    """Function (values of an adapter or None): the loss of eval.jsonl by transformers and PEFT."""
    model = load_reference(base / "model", "lora")
    rows = read_rows(base / "eval.jsonl", PreTrainedTokenizerFast.from_pretrained(base / "model"))
    lengths = sorted(len(ids) for ids, _ in rows)
    assert lengths[-1] > 4 * lengths[0]
    fresh = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def compute(values):
        for name, p in model.named_parameters():
            if name in fresh:
                p.copy_(fresh[name])
        if values is not None:
            found = set_peft_model_state_dict(model, values)
            assert not found.unexpected_keys
        total, n_loss_tokens = 0.0, 0
        for ids, labels in rows:
            logits = model(ids[None].to(DEVICE)).logits[0, :-1].float()
            total += F.cross_entropy(logits, labels[1:].to(DEVICE), reduction="sum").item()
            n_loss_tokens += int((labels[1:] != IGNORE_INDEX).sum())
        return total / n_loss_tokens, n_loss_tokens

    return compute
