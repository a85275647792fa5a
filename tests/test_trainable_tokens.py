"""--trainable_tokens: rows of the embedding and of the lm_head beside the adapter."""

import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, read_rows, selected_params, write_rows
from families import TINY
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_layouts import make_reference, write_layout
from transformers import PreTrainedTokenizerFast

BAR = 1e-5
QUICK = ["llama3", "qwen2", "gemma2", "muse_glimmer"]  # tied, not, scaled, normed in a wrapper
FAMILIES = QUICK + [pytest.param(name, marks=pytest.mark.slow) for name in (
    "granite4", "falcon_h1", "qwen3_moe", "gpt_oss", "nemotron_h", "qwen3_5", "kimi_k25",
    "gemma3", "mistral3", "deepseek_v3")]
SETTINGS = {"kept": ["--recompute", "none"], "recomputed": ["--recompute", "all"],
            "split": ["--recompute", "all", "--micro_batch_tokens", "64"]}
FLAGS = ["--lora_rank", "4", "--lora_alpha", "64", "--batch_size", "32", "--max_seq_len", "64",
         "--compute_dtype", "float32"]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, 32)
    return path


@pytest.fixture(scope="module")
def tokenizer(demo_directory):
    return PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")


@pytest.fixture(scope="module")
def known(rows_file, tokenizer):
    """Three tokens of the vocabulary: a frequent one, one that ends rows, one that no row has."""
    ids = torch.cat([ids for ids, _ in read_rows(rows_file, tokenizer)])
    counts = ids.bincount(minlength=len(tokenizer))
    counts[tokenizer.eos_token_id] = 1
    chosen = [int(counts.argmax()), tokenizer.eos_token_id, int(counts.argmin())]
    return tokenizer.convert_ids_to_tokens(chosen)


@pytest.fixture(scope="module")
def gradients(request, rows_file, tokenizer, known, tmp_path_factory, run_jobs):
    """gradients(name, processes): the directory of the family's model, and what worker.gradients()
    has seen there. All wanted families are done together."""
    base, done = tmp_path_factory.mktemp("gradients"), {}
    names = list(dict.fromkeys(x["name"] for x in selected_params(request) if "name" in x))

    def get(name, nproc):
        if nproc not in done:
            needs_ranks(nproc)
            jobs = []
            for each in names:
                if not (base / each).exists():
                    write_base(base / each, each, tokenizer, known)
                flags = [*FLAGS, "--trainable_tokens", *known]
                jobs.append({
                    "case": "gradients", "model": str(base / each), "dataset": str(rows_file),
                    "adapter": str(base / each / "values"), "out": str(base / f"{each}-{nproc}"),
                    "settings": {key: [*flags, *more] for key, more in SETTINGS.items()}})
            run_jobs(nproc, jobs, cwd=base)
            done[nproc] = True
        return base / name, load_file(base / f"{name}-{nproc}")

    return get


def token_settings(model, known, tokenizer):
    """PEFT's trainable_token_indices for rows of both tables."""
    ids = sorted(tokenizer.convert_tokens_to_ids(known))
    config = TINY[model.name](len(tokenizer))
    head = [] if config.tie_word_embeddings else ["lm_head"]
    embedding = "embeddings" if model.name == "nemotron_h" else "embed_tokens"
    return {"trainable_token_indices": {key: ids for key in [embedding, *head]}}


def write_base(model, name, tokenizer, known):
    """Write a model, and random values of an adapter that PEFT makes for it."""
    write_layout(model, name, "as saved", len(tokenizer))
    tokenizer.save_pretrained(model)
    peft = make_reference(model, name, "as saved", **token_settings(model, known, tokenizer))
    generator = torch.Generator().manual_seed(1)
    values = {key: 0.05 * torch.randn(value.shape, generator=generator)
              for key, value in get_peft_model_state_dict(peft).items()}
    save_file(values, model / "values")


def reference(model, rows_file, known, tokenizer):
    """transformers and PEFT: the loss and all gradients, by the names of PEFT's files."""
    peft = make_reference(model, model.name, "as saved", **token_settings(model, known, tokenizer))
    set_peft_model_state_dict(peft, load_file(model / "values"))
    rows = read_rows(rows_file, tokenizer)
    n_trained = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    total = 0.0
    for ids, labels in rows:
        logits = peft(ids[None].to(DEVICE)).logits[0, :-1].float()
        loss = F.cross_entropy(logits, labels[1:].to(DEVICE), reduction="sum") / n_trained
        loss.backward()
        total += loss.item()
    grads = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    return total, {n: grad.cpu() for n, grad in get_peft_model_state_dict(peft, grads).items()}


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_equal_pefts(name, nproc, gradients, rows_file, known, tokenizer):
    model, seen = gradients(name, nproc)
    loss, exact = reference(model, rows_file, known, tokenizer)
    rows = [key for key in exact if "trainable_tokens" in key]
    assert len(rows) == 2 - TINY[name](320).tie_word_embeddings
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in exact.values()))
    for setting in SETTINGS:
        got = {key.removeprefix(f"{setting}/"): value for key, value in seen.items()
               if key.startswith(f"{setting}/")}
        assert got.keys() == exact.keys() | {"loss", "norm"}
        assert abs(got["loss"] - loss) <= BAR * loss and abs(got["norm"] - norm) <= BAR * norm
        for key, grad in exact.items():
            assert (got[key] - grad).norm() <= BAR * grad.norm(), (setting, key)
