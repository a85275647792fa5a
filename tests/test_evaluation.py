"""Evaluation: its loss is that of transformers, training is not touched, and what a run leaves.

The loss is compared with transformers' 4-bit model with the adapter in PEFT; a run with evaluations
with the same run without, bit by bit.
"""

import json
import math

import pytest
import torch
from conftest import one_process, read_rows
from rows import REASONING, chat_tokenizer, write_jsonl
from safetensors.torch import load_file
from short_runs import (
    DROPOUT, EVALUATED, OFFLOADED, STEPS, adapter_of, assert_same, directory_name, evaluations,
    make_base, reference_loss_of, runs_of, trained)
from transformers import AutoTokenizer

from fsdp_qlora.run.checkpoints import read_checkpoint
from fsdp_qlora.data.encode import prepare_data, rows_of
from fsdp_qlora.data.forms import IGNORE
from fsdp_qlora.ranks import Stop
from train_fsdp_qlora import Config

# (processes, name): flags of a run that is made with evaluation and without
PAIRS = {
    (1, "plain"): [],
    (1, "dropout"): [*DROPOUT, "--recompute", "none"],
    (1, "offloaded"): OFFLOADED,
    (2, "plain, sharded"): ["--shard_group_size", 2],
    (2, "offloaded, sharded"): [*OFFLOADED, "--shard_group_size", 2],
}
# these are also cut off after half their steps and resumed
RESUMED = [(1, "offloaded"), (2, "offloaded, sharded")]
# (processes, name): flags of a run of its own
SINGLE = {
    (1, "wide steps"): ["--eval_dataset", "eval.jsonl", "--max_steps", 3, "--learning_rate", 0.1,
                        "--lr_schedule", "constant", "--report_to", "tensorboard",
                        "--chat_template", "chat.jinja"],
    (1, "fraction"): ["--dataset", "many.jsonl", "--eval_dataset", 0.1, "--max_steps", 9,
                      "--eval_every", 4],
    (1, "tenth"): ["--dataset", "many.jsonl", "--eval_dataset", "eval.jsonl", "--max_steps", 20,
                   "--batch_size", 1],
    (1, "never"): ["--max_steps", 5, "--eval_dataset", "eval.jsonl", "--eval_every", 0],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    return make_base(tmp_path_factory.mktemp("evaluation"), tiny_model)


@pytest.fixture(scope="module")
def reference_loss(base):
    return reference_loss_of(base)


def jobs(nproc):
    """Of PAIRS "evaluated" and "not evaluated", some also ", resumed"; and SINGLE."""
    for (n, name), flags in PAIRS.items():
        for how, evaluation in (("evaluated", EVALUATED), ("not evaluated", [])):
            flags_of_both = [*flags, *evaluation, "--save_every", 2]
            if n == nproc:
                yield (name, how), flags_of_both, {}
            if n == nproc and (n, name) in RESUMED:
                whole, cut = (directory_name(n, name, h) for h in (how, f"{how}, resumed"))
                before = f"cp -r '{whole}' '{cut}'; cd '{cut}'; rm -r *-000004 adapter*"
                yield (name, f"{how}, resumed"), ["--resume", *flags_of_both], {"before": before}
    for (n, name), flags in SINGLE.items():
        if n == nproc:
            yield (name,), flags, {}


@pytest.fixture(scope="module")
def runs(base, run_jobs):
    return runs_of(base, run_jobs, jobs)


# ------------------------------------------------------------------------------------------------
# The loss
# ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("nproc, name", PAIRS, ids=str)
def test_evaluation_loss_equals_the_reference(nproc, name, runs, reference_loss, read_metrics):
    """Before the first step, when the adapter adds nothing, and after the last; without dropout."""
    directory, _ = runs(nproc, name, "evaluated")
    found = evaluations(read_metrics(directory))
    assert [record["step"] for record in found] == [0, 2, 4]
    middle = adapter_of(directory / "checkpoint-000002")
    for record, values in zip(found, (None, middle, adapter_of(directory))):
        want, n_trained = reference_loss(values)
        assert abs(record["eval_loss"] - want) <= 1e-5 * want, record["step"]
        assert record["eval_tokens"] == n_trained
        assert record["eval_perplexity"] == math.exp(record["eval_loss"])
    assert abs(found[-1]["eval_loss"] - found[0]["eval_loss"]) > 0.05


# ------------------------------------------------------------------------------------------------
# Training is not touched
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc, name", PAIRS, ids=str)
def test_evaluation_changes_no_bit_of_training(nproc, name, runs, read_metrics):
    with_it, without = (runs(nproc, name, how)[0] for how in ("evaluated", "not evaluated"))
    assert trained(read_metrics(with_it)) == trained(read_metrics(without))
    assert len(trained(read_metrics(without))) == STEPS and not evaluations(read_metrics(without))
    assert_same(adapter_of(with_it), adapter_of(without))
    for step in "000002", "000004":
        one, other = (run / f"checkpoint-{step}" for run in (with_it, without))
        assert_same(adapter_of(one), adapter_of(other))
        state, want = (load_file(path / "optimizer.safetensors") for path in (one, other))
        assert state.keys() == want.keys() and all(torch.equal(state[k], want[k]) for k in want)


def test_nothing_stays_gathered_after_evaluation_and_probe(base, run_jobs, tmp_path):
    job = {"case": "evaluations", "model": str(base / "model"), "out": str(tmp_path / "losses")}
    run_jobs(2, [job], cwd=tmp_path)
    before, after = load_file(tmp_path / "losses")["losses"].tolist()
    assert abs(after - before) > 0.01


@pytest.mark.parametrize("how", ["evaluated", "not evaluated"])
@pytest.mark.parametrize("nproc, name", RESUMED, ids=str)
def test_resumed_run_equals_the_whole_one(nproc, name, how, runs, read_metrics):
    whole, resumed = (runs(nproc, name, h)[0] for h in (how, f"{how}, resumed"))
    want, got = read_metrics(whole), read_metrics(resumed)
    assert trained(got) == trained(want)
    assert [(r["step"], r["eval_loss"]) for r in evaluations(got)] == [
        (r["step"], r["eval_loss"]) for r in evaluations(want)
    ]
    assert_same(adapter_of(resumed), adapter_of(whole))
    states = [json.loads((run / "checkpoint-000004" / "checkpoint.json").read_text())
              for run in (whole, resumed)]  # fmt: skip
    assert states[0]["progress"] == states[1]["progress"]


# ------------------------------------------------------------------------------------------------
# What a run with evaluations leaves
# ------------------------------------------------------------------------------------------------


def test_best_evaluations_checkpoint_is_kept_and_said(runs, read_metrics):
    """With steps so wide that the loss falls first and rises then. Of fewer than ten steps each is
    followed by an evaluation, as nothing else is asked for."""
    directory, out = runs(1, "wide steps")
    found, best, saved = evaluations(read_metrics(directory)), math.inf, []
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    kinds = set()
    for record in found:
        step, is_best = record["step"], record["eval_loss"] < best
        best = min(best, record["eval_loss"])
        line = (f"evaluation after step {step}: loss {record['eval_loss']:.4f}, perplexity"
                f" {record['eval_perplexity']:.2f}")  # fmt: skip
        assert f"{line}{', the best so far' if is_best and step else ''}\n" in out
        if step:
            saved += [step] if is_best or step == 3 else []
            kinds.add(is_best)
    assert kinds == {True, False}, "this run does not show both"
    state = json.loads((directory / "checkpoint-000003" / "checkpoint.json").read_text())
    (step,) = (record["step"] for record in found if record["eval_loss"] == best)
    assert state["progress"]["best_loss"] == best and state["progress"]["best_step"] == step
    kept = {int(path.name[-6:]) for path in directory.glob("checkpoint-*")}
    assert kept == {step, *saved[-2:]}
    assert f"the best evaluation was after step {step}, loss {best:.4f}: " in out
    read_checkpoint(directory / f"checkpoint-{step:06d}")  # raises if it is not whole


def test_losses_are_drawn(runs):
    for directory in (runs(1, "wide steps")[0], runs(1, "plain", "not evaluated")[0]):
        content = (directory / "loss.png").read_bytes()
        assert content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82")
        assert len(content) > 5000


def test_tokenizer_lies_in_the_run(base, runs):
    """With the chat template that the run was given."""
    directory, _ = runs(1, "wide steps")
    got, want = map(AutoTokenizer.from_pretrained, (directory, base / "model"))
    text = "What is 3 plus 4? <s> ä"
    assert got(text)["input_ids"] == want(text)["input_ids"] and len(got) == len(want)
    assert got.chat_template == (base / "chat.jinja").read_text() != want.chat_template
    own = AutoTokenizer.from_pretrained(runs(1, "plain", "evaluated")[0])
    assert own.chat_template == want.chat_template


def test_board_is_written_where_it_is_asked_for(runs, read_metrics):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert not (runs(1, "plain", "evaluated")[0] / "tensorboard").exists()  # --report_to none
    directory, _ = runs(1, "wide steps")
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    for key in "loss", "eval_loss", "eval_perplexity", "learning_rate":
        want = [(r["step"], r[key]) for r in read_metrics(directory) if key in r]
        assert [(e.step, e.value) for e in events.Scalars(key)] == [
            (step, pytest.approx(value, rel=1e-6)) for step, value in want
        ]


def test_fraction_of_the_rows_is_not_trained_on(base, runs, read_metrics):
    directory, out = runs(1, "fraction")
    rows = read_rows(base / "many.jsonl", AutoTokenizer.from_pretrained(base / "model"))
    n_trained = sum(int((labels[1:] != IGNORE).sum()) for _, labels in rows)
    assert "evaluation: 4 of these rows, which are not trained on\n" in out
    records = read_metrics(directory)
    assert [record["step"] for record in evaluations(records)] == [0, 4, 8, 9]
    # 36 rows in 9 steps of 4: one epoch
    of_steps = sum(record.get("learnt_tokens", 0) for record in records)
    assert of_steps + records[0]["eval_tokens"] == n_trained
    assert sum(record.get("rows", 0) for record in records) == 36


def test_fraction_is_one_of_conversations(base, tmp_path):
    """Whose answers have a row each where the template rewrites earlier ones."""
    tokenizer = chat_tokenizer(base, REASONING)
    talks = [[{"role": "user", "content": f"{i} times {j}?"} if j % 2 == 0 else
              {"role": "assistant", "content": f"{i} and {j}."} for j in range(6)]
             for i in range(10)]  # fmt: skip
    path = write_jsonl(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    config = Config(dataset=(str(path),), eval_dataset=("0.3",), max_seq_len=512)
    with one_process():
        parts = prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")
    assert [len(rows) for rows in parts] == [21, 9]
    asked = [{tokenizer.decode(rows.tokens(i)[0]).partition(" times")[0][-1]
              for i in range(len(rows))} for rows in parts]  # fmt: skip
    assert [len(one) for one in asked] == [7, 3] and not asked[0] & asked[1]


def test_fraction_depends_on_the_seed_alone(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    tokenizer = AutoTokenizer.from_pretrained(base / "model")

    def parts(**settings):
        config = Config(dataset=("many.jsonl",), max_seq_len=64, **settings)
        with one_process():
            return prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")

    whole, nothing = parts()
    assert nothing is None and len(set(whole.digests.tolist())) == 40
    seen = []
    for seed in 0, 0, 1:
        rows, kept_out = parts(eval_dataset=("0.2",), seed=seed)
        assert len(kept_out) == 8
        both = rows.digests.tolist() + kept_out.digests.tolist()
        assert sorted(both) == sorted(whole.digests.tolist())
        for one in rows, kept_out:  # the digests are of these tokens
            for i in range(len(one)):
                again = rows_of([one.tokens(i)])
                assert again.digests == one.digests[i] and again.lengths == one.lengths[i]
        seen.append(kept_out.sha256())
    assert seen[0] == seen[1] != seen[2]
    for fraction in "1.0", "0.001", "0", "2", "-1":
        with pytest.raises(Stop, match=f"--eval_dataset {fraction}: is .* of 40 rows"):
            parts(eval_dataset=(fraction,))


@pytest.mark.parametrize(
    "name, want",
    [("tenth", [*range(0, 21, 2)]), ("wide steps", [0, 1, 2, 3]), ("never", [0, 5])],
    ids=["no flag", "no flag, few steps", "0"],
)
def test_evaluation_comes_as_often_as_eval_every_says(name, want, runs, read_metrics):
    """Left out, after each tenth of the steps, and each step of a few; 0, only before the first
    step and at the end."""
    assert [record["step"] for record in evaluations(read_metrics(runs(1, name)[0]))] == want
