"""Packs: every row once, no row seen by another, and the numbers that the rows have alone."""

import dataclasses
import functools
import json
import random
import time

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_numbers import DEVICE, SIZES, write_model, write_rows
from test_numbers import write_adapter as write_random_adapter

import train_fsdp_qlora as script

IGNORE = script.IGNORE
LENGTHS = [4, 30, 12, 25, 3, 21, 17, 9, 14, 6]  # packs of 40: 30 9, 25 14, 21 17, 12 6 4 3
CHANGED = 4  # of the documents in these packs


def make_config(**settings):
    return dataclasses.replace(script.Config(), **settings)


def make_rows(lengths, seed=0, vocab=320):
    """Rows of random tokens, each with a random part of them learnt, the last one always."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for n in lengths:
        ids = torch.randint(3, vocab, (n,), generator=generator, dtype=torch.int32)
        learnt = torch.rand(n, generator=generator) < torch.rand((), generator=generator)
        learnt[-1] = True
        rows.append((ids, torch.where(learnt, ids, IGNORE)))
    return rows


# ------------------------------------------------------------------------------------------------
# Which rows share a pack
# ------------------------------------------------------------------------------------------------


def naive_best_fit(lengths, size):
    """How much is in each pack, looking through all packs for each row."""
    packs = []
    for n in sorted(lengths, reverse=True):
        fullest = max((pack for pack in packs if pack + n <= size), default=0)
        if fullest:
            packs.remove(fullest)
        packs.append(fullest + n)
    return sorted(packs)


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
def test_every_row_is_in_one_pack_and_no_pack_is_too_long(size):
    draw = random.Random(size)
    for n_rows in (1, 2, 30, 400):
        lengths = [draw.randint(1, size) for _ in range(n_rows)]
        packs = script.best_fit(lengths, size)
        assert sorted(i for pack in packs for i in pack) == list(range(n_rows))
        sums = [sum(lengths[i] for i in pack) for pack in packs]
        assert max(sums) <= size
        assert sorted(sums) == naive_best_fit(lengths, size)  # which of equals does not matter
        assert packs == script.best_fit(lengths, size)


def test_many_rows_are_packed_quickly():
    draw, started = random.Random(0), time.perf_counter()
    lengths = [draw.randint(2, 4096) for _ in range(200_000)]
    packs = script.best_fit(lengths, 4096)
    assert time.perf_counter() - started < 30  # one second on two cores; hours in O(n^2)
    assert sum(lengths) > 0.99 * 4096 * len(packs)


def test_packs_hold_the_rows_and_learn_no_first_token():
    rows = make_rows(LENGTHS)
    for _, labels in rows:
        labels[0] = 5  # as the first token of plain text, which a row alone never learns either
    kept = [(ids.tolist(), labels.tolist()) for ids, labels in rows]
    packs, found = script.pack_examples(rows, 40), []
    assert [lengths for *_, lengths in packs] == [(30, 9), (25, 14), (21, 17), (12, 6, 4, 3)]
    for ids, labels, lengths in packs:
        assert ids.dtype == labels.dtype == torch.int32
        for part, learnt in zip(ids.split(lengths), labels.split(lengths)):
            assert learnt[0] == IGNORE
            found.append((part.tolist(), [5, *learnt[1:].tolist()]))
    assert sorted(found) == sorted(kept)
    assert [(ids.tolist(), labels.tolist()) for ids, labels in rows] == kept  # left as they were


def test_digest_tells_where_rows_end():
    ids = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    labels = torch.full_like(ids, IGNORE)
    digests = {
        script.digest_examples([(ids, labels, *lengths)])
        for lengths in ([], [(4,)], [(2, 2)], [(1, 3)], [(3, 1)])
    }
    assert len(digests) == 5


def test_random_rows_fill_packs():
    config = make_config(
        random_weights=True, packing=True, batch_size=6, max_seq_len=512, seed=3
    )  # fmt: skip
    packs, line = script.prepare_data(config, None, None, 97)
    again, _ = script.prepare_data(config, None, None, 97)
    assert all(torch.equal(a[0], b[0]) and a[2] == b[2] for a, b in zip(packs, again))
    lengths = [n for *_, lengths in packs for n in lengths]
    assert len(lengths) == 128 and len(packs) > 6
    assert 512 // 16 <= min(lengths) < 64 and 480 < max(lengths) <= 512
    full = sum(lengths) / 512 / len(packs)
    assert full > 0.95
    assert line.endswith(f"128 rows in {len(packs)} packs of at most 512 tokens, {full:.1%} full")


# ------------------------------------------------------------------------------------------------
# Micro-batches and attention
# ------------------------------------------------------------------------------------------------


def naive_batch(packs, rank, ranks):
    """What collate says it returns of packs, one token at a time."""
    n, parts = len(packs) // ranks, []
    for part in range(ranks):
        ids, position_ids, lengths, positions, successors = [], [], [], [], []
        for pack_ids, labels, pack_lengths in packs[part * n : (part + 1) * n]:
            at = 0
            for length in pack_lengths:
                for t in range(length):
                    if t + 1 < length and labels[at + t + 1] != IGNORE:
                        positions.append(len(ids))
                        successors.append(int(labels[at + t + 1]))
                    ids.append(int(pack_ids[at + t]))
                    position_ids.append(t)
                lengths.append(length)
                at += length
        parts.append((ids, positions, successors, position_ids, lengths))
    longest, most = max(len(p[0]) for p in parts), max(len(p[1]) for p in parts)
    ids, positions, successors, position_ids, lengths = parts[rank]
    padding, more, longest_row = longest - len(ids), most - len(positions), max(lengths)
    ids += [0] * padding
    while padding:  # in documents that are no longer than the rows
        lengths.append(min(padding, longest_row))
        position_ids += range(lengths[-1])
        padding -= lengths[-1]
    return (
        [ids], positions + [0] * more, successors + [IGNORE] * more, [position_ids],
        [sum(lengths[:i]) for i in range(len(lengths) + 1)], lengths,
    )  # fmt: skip


def test_collate_equals_one_token_at_a_time():
    draw = random.Random(0)
    for n_packs, ranks in (1, 1), (3, 1), (2, 2), (6, 3):
        for seed in range(10):
            lengths = [draw.randint(2, 20) for _ in range(40)]
            packs = script.pack_examples(make_rows(lengths, seed), 31)[-n_packs:]
            for rank in range(ranks):
                got = script.collate(packs, rank, ranks, torch.device("cpu"))
                want = naive_batch(packs, rank, ranks)
                assert [t.tolist() for t in got[:-1]] == list(want[:-1])
                assert got[-1] == tuple(want[-1])
                assert got[3].dtype == torch.int64 and got[4].dtype == torch.int32


def masked_attention(q, k, v, lengths, window, scaling):
    """One product over all tokens, and a mask of who sees whom."""
    document = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], device=q.device)
    back = torch.arange(len(document), device=q.device)
    back = back[:, None] - back
    seen = (document[:, None] == document) & (back >= 0) & (back < (window or len(document)))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


KERNELS = [("sdpa", "float32")]
if DEVICE == "cuda":
    KERNELS += [("sdpa", "bfloat16")]
    if transformers.utils.is_flash_attn_2_available():
        KERNELS += [("flash_attention_2", "bfloat16")]


@pytest.mark.parametrize("name, dtype", KERNELS)
@pytest.mark.parametrize("window", [None, 8])
def test_attention_equals_one_with_a_mask(name, dtype, window):
    torch.manual_seed(0)
    config, lengths = make_config(compute_dtype=dtype, packing=True), (30, 9, 1, 17, 8)
    kernel = script.attention_kernel(name, config, torch.device(DEVICE))
    assert (kernel is None) == (dtype == "float32")
    if kernel and window and not script.has_windows(kernel, torch.device(DEVICE)):
        pytest.skip(f"{name} is built without sliding windows")
    q, k, v = (
        torch.randn(1, sum(lengths), heads, 64, device=DEVICE).transpose(1, 2)
        for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()
    results = []
    for exact in True, False:
        inputs = [t.to(torch.float32 if exact else getattr(torch, dtype)) for t in (q, k, v)]
        inputs = [t.detach().requires_grad_() for t in inputs]
        if exact:
            out = masked_attention(*inputs, lengths, window, 0.1)
        else:
            out, _ = script.causal_attention(
                kernel, None, *inputs, cu_seq_lens=bounds, lengths=lengths, scaling=0.1,
                sliding_window=window, position_ids=None,
            )  # fmt: skip
        generator = torch.Generator(DEVICE).manual_seed(1)
        grad = torch.randn(out.shape, generator=generator, device=DEVICE)
        results.append([out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))])
    for want, got in zip(*results):
        distance = (got.float() - want).norm() / want.norm()
        assert distance <= (1e-6 if dtype == "float32" else 1e-2)


def test_kernel_that_ignores_the_window_is_found_out():
    def attend(window_used, q, k, v, scaling, window, bounds, longest):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        window = window[0] + 1 if window_used else None
        out, _ = script.causal_attention(None, None, q, k, v, scaling=scaling,
                                         sliding_window=window)  # fmt: skip
        return out

    for window_used in True, False:
        kernel = functools.partial(attend, window_used)
        assert script.has_windows(kernel, torch.device(DEVICE)) == window_used


# ------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------

SETTINGS = {
    "plain": {},
    "packed": {"packing": True},
    "nothing recomputed": {"packing": True, "recompute": "none"},
    "in halves": {"packing": True, "keep_residual": True, "reuse_weights": "all",
                  "offload_activations": True, "offload_params": True},
    "sliced": {"packing": True, "slice_tokens": 7},
}  # fmt: skip


@pytest.fixture(scope="module")
def worked(tmp_path_factory, run_jobs):
    """{model: the results of worker.packed on 2 ranks}. Mistral has a window of 8 tokens."""
    base = tmp_path_factory.mktemp("packed")
    sizes = dict(SIZES, hidden_size=96, intermediate_size=172)
    configs = {
        "llama": transformers.LlamaConfig(**sizes),
        "mistral": transformers.MistralConfig(sliding_window=8, **sizes),
        "qwen2": transformers.Qwen2Config(tie_word_embeddings=True, **sizes),
    }
    rows, jobs = {}, []
    for i, (ids, labels) in enumerate(make_rows(LENGTHS)):
        rows.update({f"{i}/ids": ids, f"{i}/labels": labels})
    save_file(rows, base / "rows")
    for kind, config in configs.items():
        model = write_model(base / kind, config)
        adapter = write_random_adapter(base / f"{kind}.adapter", model)
        settings = {
            name: {"lora_rank": 4, "compute_dtype": "float32", **flags}
            for name, flags in SETTINGS.items()
        }
        jobs.append({"case": "packed", "model": model, "adapter": adapter, "size": 40,
                     "rows": str(base / "rows"), "settings": settings, "changed": CHANGED,
                     "out": str(base / f"{kind}.out")})  # fmt: skip
    run_jobs(2, jobs, cwd=base)
    return {kind: load_file(base / f"{kind}.out") for kind in configs}


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_loss_and_gradients_are_those_of_the_rows_alone(kind, worked):
    got = worked[kind]
    # what the two ranks had: 30 9 25 14; 21 17 12 6 4 3 and 15 of padding
    assert got["lengths"].tolist() == [[4, 78], [7, 78]]
    names = [name.removeprefix("plain/") for name in got if name.startswith("plain/")]
    assert len(names) == 1 + 3 * 7 * 2
    for other in (name for name in SETTINGS if name != "plain"):
        for name in names:
            want = got[f"plain/{name}"]
            assert want.norm() > 0
            assert (got[f"{other}/{name}"] - want).norm() <= 1e-5 * want.norm(), (other, name)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_no_document_sees_another(kind, worked):
    before, after = worked[kind]["losses before"], worked[kind]["losses after"]
    assert len(before) == len(LENGTHS) and (before > 0).all()
    assert (before != after).nonzero().view(-1).tolist() == [CHANGED]


def test_model_whose_attention_cannot_be_told_is_refused():
    config = transformers.FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="--packing: the attention of FalconForCausalLM cannot"):
        script.attend_causally(model, "sdpa", make_config(packing=True), torch.device("cpu"))


# ------------------------------------------------------------------------------------------------
# Whole runs
# ------------------------------------------------------------------------------------------------

FLAGS = ["--dataset", "rows.jsonl", "--packing", "--max_seq_len", "200", "--max_steps", "6",
         "--save_every", "3", "--batch_size", "4", "--micro_batch_size", "1",
         "--learning_rate", "1e-3", "--compute_dtype", "float32", "--lora_dropout"]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model, run_jobs):
    """The directory with runs of 2 processes, and the flags of all."""
    base = tmp_path_factory.mktemp("packed-runs")
    write_rows(base / "rows.jsonl")
    model = tiny_model("llama", hidden_size=64, intermediate_size=160, num_hidden_layers=2)
    flags, jobs = ["--model", str(model), *FLAGS], []
    broken_off = "cp -r whole resumed; rm -r resumed/checkpoint-000006 resumed/adapter_*"
    jobs = [
        {"argv": [*flags, "0", "--output_dir", "two"]},
        {"argv": [*flags, "0.1", "--output_dir", "whole"]},
        {"argv": [*flags, "0.1", "--output_dir", "resumed", "--resume"], "before": broken_off},
    ]
    run_jobs(2, jobs, cwd=base)
    return base, flags


def read_run(directory):
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    return rows, load_file(directory / "adapter_model.safetensors")


def test_processes_change_no_loss(runs, run_main, monkeypatch):
    base, flags = runs
    monkeypatch.chdir(base)
    code, output, errors = run_main(*flags, "0", "--output_dir", "one")
    assert code == 0, errors
    assert "packing: 64 rows in" in output and "packs of at most 200 tokens" in output
    (one, _), (two, _) = read_run(base / "one"), read_run(base / "two")
    assert len(one) == 6 and one[-1]["loss"] < one[0]["loss"]
    for mine, other in zip(one, two, strict=True):
        assert abs(mine["loss"] - other["loss"]) <= 1e-4 * mine["loss"]
        assert abs(mine["grad_norm"] - other["grad_norm"]) <= 1e-3 * mine["grad_norm"]
        for key in "tokens", "learnt_tokens":
            assert mine[key] == other[key]
        assert 400 < mine["tokens"] <= 4 * 200


def test_resumed_run_equals_the_uninterrupted_one(runs):
    (whole, expected), (resumed, got) = (read_run(runs[0] / n) for n in ("whole", "resumed"))
    assert [(r["loss"], r["grad_norm"]) for r in whole] == [
        (r["loss"], r["grad_norm"]) for r in resumed
    ]
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in got)


def test_run_is_not_resumed_the_other_way(runs, run_main, monkeypatch):
    base, flags = runs
    monkeypatch.chdir(base)
    flags = [flag for flag in flags if flag != "--packing"]
    code, _, errors = run_main(*flags, "0", "--output_dir", "two", "--resume")
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code == 1 and line.endswith("was made with --packing True, not False")


def test_checkpoint_from_before_the_flag_counts_as_unpacked(tmp_path):
    config = make_config(packing=False)
    was = {name: value for name, value in vars(config).items() if name != "packing"}
    was["target_modules"] = list(was["target_modules"])
    state = {"config": was, "data_sha256": "x"}
    (tmp_path / "checkpoint.json").write_text(json.dumps(state))
    assert script.check_resume(tmp_path, config, "x") == state
    with pytest.raises(ValueError, match="made with --packing False, not True"):
        script.check_resume(tmp_path, dataclasses.replace(config, packing=True), "x")
