"""Evaluation, and how a run is told what to do: configuration files, an adapter to begin with,
schedules.

Runs are made together, by a fixture for each number of processes, and each test reads what its own
have left. The loss of an evaluation is compared with transformers' 4-bit model with the adapter in
PEFT; a run with evaluations with the same run without, bit by bit.
"""

import dataclasses
import json
import math
import os
import random
import shutil

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, one_process, read_rows
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from test_step import ALPHA, RANK, load_reference, write_uneven_rows
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

import train_fsdp_qlora as script

PEAK, STEPS = 1e-2, 4
FLAGS = ["--model", "model", "--dataset", "rows.jsonl", "--batch_size", 4, "--max_steps", STEPS,
         "--lora_rank", RANK, "--lora_alpha", ALPHA, "--learning_rate", PEAK, "--max_seq_len", 64,
         "--compute_dtype", "float32", "--micro_batch_tokens", 100,
         "--report_to", "none"]  # fmt: skip
EVALUATED = ["--eval_dataset", "eval.jsonl", "--eval_every", 2]
DROPOUT = ["--lora_dropout", 0.3]
OFFLOADED = [*DROPOUT, "--recompute", "all", "--offload_activations"]
# (processes, name): flags of a run that is made with evaluation and without
PAIRS = {
    (1, "plain"): [],
    (1, "dropout"): [*DROPOUT, "--recompute", "none"],
    (1, "offloaded"): OFFLOADED,
    (2, "plain, sharded"): ["--shard_group_size", 2],
    (2, "offloaded, sharded"): [*OFFLOADED, "--shard_group_size", 2],
    (2, "offloaded, a copy each"): [*OFFLOADED, "--shard_group_size", 1],
}
# these are also cut off after half their steps and resumed
RESUMED = [(1, "offloaded"), (2, "offloaded, sharded")]
INIT = ["--init_adapter", "peft", "--max_steps", 1]
SCHEDULED = ["--max_steps", 5, "--warmup_fraction", 0.4, "--batch_size", 1, "--lr_schedule"]
# (processes, name): flags of a run of its own
SINGLE = {
    (1, "wide steps"): [*EVALUATED, "--eval_every", 1, "--max_steps", 3, "--learning_rate", 0.1,
                        "--lr_schedule", "constant", "--report_to", "tensorboard",
                        "--chat_template", "chat.jinja"],
    (1, "fraction"): ["--dataset", "many.jsonl", "--eval_dataset", 0.1, "--max_steps", 9,
                      "--eval_every", 4],
    (1, "tenth"): ["--dataset", "many.jsonl", "--eval_dataset", "eval.jsonl", "--max_steps", 20,
                   "--batch_size", 1],
    (1, "init"): [*INIT, *EVALUATED, "--learning_rate", 1e-30],
    (2, "init"): [*INIT, *EVALUATED, "--learning_rate", 1e-30, "--shard_group_size", 2],
    (1, "init dora"): ["--adapter", "dora", "--init_adapter", "peft-dora", "--max_steps", 1,
                       "--learning_rate", 1e-30],
    (1, "init own"): ["--init_adapter", "1, plain, not evaluated", "--max_steps", 1,
                      "--learning_rate", 1e-30],
    (1, "not decayed"): [*INIT, "--learning_rate", 0.1],
    (1, "decayed"): [*INIT, "--learning_rate", 0.1, "--weight_decay", 0.5],
    (1, "not clipped"): [*INIT, "--max_grad_norm", 1e9],
    (1, "clipped"): [*INIT, "--max_grad_norm", 0.25],
    (1, "cosine"): [*SCHEDULED, "cosine"],
    (1, "linear"): [*SCHEDULED, "linear"],
    (1, "constant"): [*SCHEDULED, "constant", "--eval_dataset", "eval.jsonl", "--eval_every", 0],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    """A directory of model/, rows to train and to evaluate on, adapters of PEFT, a template."""
    directory = tmp_path_factory.mktemp("evaluation")
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
    for name, more in {
        "peft": {}, "peft-dora": {"use_dora": True}, "peft-rank": {"r": RANK + 1},
        "peft-targets": {"target_modules": ["q_proj"]}, "peft-alphas": {"alpha_pattern": {"k": 7}},
        "peft-pissa": {"init_lora_weights": "pissa"},
    }.items():  # fmt: skip
        write_peft_adapter(directory, name, **more)
    values = load_file(directory / "peft" / "adapter_model.safetensors")
    next(iter(values.values()))[0, 0] = math.nan
    shutil.copytree(directory / "peft", directory / "peft-nan")
    save_file(values, directory / "peft-nan" / "adapter_model.safetensors")
    return directory


def write_peft_adapter(base, name, **more):
    """Saved by PEFT itself, with values for B that are not zero."""
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    settings = dict(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model, LoraConfig(**{**settings, **more}))
    for key, p in model.named_parameters():
        if "lora_B" in key:
            p.data.normal_(0, 0.02)
    model.save_pretrained(base / name)


def run_name(nproc, name, how):
    return f"{nproc}, {name}, {how}"


@pytest.fixture(scope="module")
def runs(base, run_jobs):
    """runs(processes, name, how=None): the directory of that run, and what its launch printed;
    how is "evaluated", "not evaluated", or one of these and ", resumed"."""
    done = {}

    def make(nproc):
        jobs = []

        def add(name, *flags, **more):
            argv = list(map(str, [*FLAGS, *flags, "--output_dir", name]))
            jobs.append({"argv": argv, "deterministic": True, **more})

        for (n, name), flags in PAIRS.items():
            for how, evaluation in (("evaluated", EVALUATED), ("not evaluated", [])):
                if n != nproc:
                    continue
                whole = run_name(n, name, how)
                add(whole, *flags, *evaluation, "--save_every", 2)
                if (n, name) in RESUMED:
                    cut = f"{whole}, resumed"
                    before = f"cp -r '{whole}' '{cut}'; cd '{cut}'; rm -r *-000004 adapter*"
                    add(cut, "--resume", *flags, *evaluation, "--save_every", 2, before=before)
        for (n, name), flags in SINGLE.items():
            if n == nproc:
                add(run_name(n, name, None), *flags)
        return run_jobs(nproc, jobs, cwd=base)

    def get(nproc, name, how=None):
        needs_ranks(nproc)
        if nproc not in done:
            done[nproc] = make(nproc)
        return base / run_name(nproc, name, how), done[nproc][0]

    return get


def adapter_of(directory):
    return load_file(directory / "adapter_model.safetensors")


def assert_same(got, want):
    assert got.keys() == want.keys() and len(got) >= 28
    assert [key for key in want if not torch.equal(got[key], want[key])] == []


def evaluations(records):
    return [record for record in records if "eval_loss" in record]


def trained(records):
    """What must be the same of each training step."""
    keys = ("step", "loss", "grad_norm", "learning_rate", "rows", "tokens", "learnt_tokens", "bins")
    return [[record[key] for key in keys] for record in records if "loss" in record]


# ------------------------------------------------------------------------------------------------
# The loss
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference_loss(base):
    """Function (values of an adapter or None): the loss of eval.jsonl by transformers and PEFT."""
    model = load_reference(base, "lora")
    rows = read_rows(base / "eval.jsonl", AutoTokenizer.from_pretrained(base / "model"))
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
        total, learnt = 0.0, 0
        for ids, labels in rows:
            logits = model(ids[None].to(DEVICE)).logits[0, :-1].float()
            total += F.cross_entropy(logits, labels[1:].to(DEVICE), reduction="sum").item()
            learnt += int((labels[1:] != script.IGNORE).sum())
        return total / learnt, learnt

    return compute


@pytest.mark.parametrize("nproc, name", PAIRS, ids=str)
def test_evaluation_loss_equals_the_reference(nproc, name, runs, reference_loss, read_metrics):
    """Before the first step, when the adapter adds nothing, and after the last; without dropout."""
    directory, _ = runs(nproc, name, "evaluated")
    found = evaluations(read_metrics(directory))
    assert [record["step"] for record in found] == [0, 2, 4]
    middle = adapter_of(directory / "checkpoint-000002")
    for record, values in zip(found, (None, middle, adapter_of(directory))):
        want, learnt = reference_loss(values)
        assert abs(record["eval_loss"] - want) <= 1e-5 * want, record["step"]
        assert record["eval_tokens"] == learnt
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
        for path in one.glob("optimizer-*"):
            state, want = load_file(path), load_file(other / path.name)
            assert all(torch.equal(state[key], want[key]) for key in want)


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
    """With steps so wide that the loss falls first and rises then."""
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
    script.read_checkpoint(directory / f"checkpoint-{step:06d}")  # raises if it is not whole


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
    learnt = [int((labels[1:] != script.IGNORE).sum()) for _, labels in rows]
    assert "evaluation: 4 of these rows, which are not trained on\n" in out
    records = read_metrics(directory)
    assert [record["step"] for record in evaluations(records)] == [0, 4, 8, 9]
    # 36 rows in 9 steps of 4: one epoch
    assert sum(record.get("learnt_tokens", 0) for record in records) + records[0][
        "eval_tokens"
    ] == sum(learnt)
    assert sum(record.get("rows", 0) for record in records) == 36


def test_fraction_is_one_of_conversations(base, tmp_path):
    """Of which each turn has a row of its own where the template rewrites earlier ones."""
    from test_rows import REASONING, SPECIAL

    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.chat_template = REASONING
    talks = [[{"role": "user", "content": f"{i} times {j}?"} if j % 2 == 0 else
              {"role": "assistant", "content": f"{i} and {j}."} for j in range(6)]
             for i in range(10)]  # fmt: skip
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    config = script.Config(dataset=(str(path),), eval_dataset=("0.3",), max_seq_len=512)
    with one_process():
        parts = script.prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")
    assert [len(rows) for rows in parts] == [21, 9]
    asked = [{tokenizer.decode(rows.tokens(i)[0]).partition(" times")[0][-1]
              for i in range(len(rows))} for rows in parts]  # fmt: skip
    assert [len(one) for one in asked] == [7, 3] and not asked[0] & asked[1]


def test_fraction_depends_on_the_seed_alone(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    tokenizer = AutoTokenizer.from_pretrained(base / "model")

    def parts(**settings):
        config = script.Config(dataset=("many.jsonl",), max_seq_len=64, **settings)
        with one_process():
            return script.prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")

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
                ids, labels = one.tokens(i)
                again = script.columns_of(ids, labels, 64)["digest"]
                assert again == one.digests[i] and len(ids) == one.lengths[i]
        seen.append(kept_out.sha256())
    assert seen[0] == seen[1] != seen[2]
    for fraction in "1.0", "0.001", "0", "2", "-1":
        with pytest.raises(script.Stop, match=f"--eval_dataset {fraction}: is .* of 40 rows"):
            parts(eval_dataset=(fraction,))


@pytest.mark.parametrize(
    "name, want", [("tenth", [*range(0, 21, 2)]), ("constant", [0, 5])], ids=["no flag", "0"]
)
def test_evaluation_comes_as_often_as_eval_every_says(name, want, runs, read_metrics):
    """Left out, after each tenth of the steps; 0, only before the first step and at the end."""
    assert [record["step"] for record in evaluations(read_metrics(runs(1, name)[0]))] == want


# ------------------------------------------------------------------------------------------------
# An adapter to begin with
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 2])
def test_run_begins_with_the_adapter_that_peft_saved(
    nproc, base, runs, reference_loss, read_metrics
):
    """One step so short that it changes no bit."""
    directory, _ = runs(nproc, "init")
    values = adapter_of(base / "peft")
    assert_same(adapter_of(directory), values)
    first = evaluations(read_metrics(directory))[0]
    want, _ = reference_loss(values)
    fresh, _ = reference_loss(None)
    assert abs(first["eval_loss"] - want) <= 1e-5 * want < 1e-2 * abs(want - fresh)


def test_run_begins_with_an_adapter_of_another_kind_and_of_another_run(base, runs):
    got = adapter_of(runs(1, "init dora")[0])
    assert any("magnitude" in name for name in got)
    assert_same(got, adapter_of(base / "peft-dora"))
    own = adapter_of(runs(1, "init own")[0])
    assert_same(own, adapter_of(runs(1, "plain", "not evaluated")[0]))


REFUSED = {
    "another rank": (["--init_adapter", "peft-rank"], "has r 5: give the same by --lora_rank"),
    "another alpha": (["--init_adapter", "peft", "--lora_alpha", 7], "same by --lora_alpha"),
    "another kind": (["--init_adapter", "peft", "--adapter", "dora"], "same by --adapter"),
    "another scale": (["--init_adapter", "peft", "--adapter", "rslora"], "same by --adapter"),
    "other linears": (["--init_adapter", "peft-targets"], "same model and --target_modules?"),
    "another model": (["--init_adapter", "peft", "--model", "{other}"], "same model"),
    "values not finite": (["--init_adapter", "peft-nan"], "not finite"),
    "another scale by linear": (["--init_adapter", "peft-alphas"], "has alpha_pattern"),
    "another base": (["--init_adapter", "peft-pissa"], "has init_lora_weights pissa"),
    "no adapter": (["--init_adapter", "model"], "is no adapter in PEFT's format"),
    "no data": (["--dataset", "none.jsonl"], "none.jsonl"),
    "no rows to evaluate on": (["--eval_dataset", "none.jsonl"], "none.jsonl"),
    "more than all rows to evaluate on": (["--eval_dataset", "1.5"], "15 of 10 rows"),
    "no template": (["--chat_template", "none.jinja"], "none.jinja"),
    "row of no form": (["--dataset", "odd.jsonl"], "odd.jsonl line 1"),
    "rows longer than the model": (["--max_seq_len", 99999], "the model was made for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_start_that_fails_leaves_no_directory(
    name, base, tiny_model, run_main, monkeypatch, tmp_path
):
    monkeypatch.chdir(base)
    flags, wanted = REFUSED[name]
    (base / "odd.jsonl").write_text('{"poem": "x"}\n')
    other = tiny_model("llama")
    flags = [str(flag).format(other=other) for flag in flags]
    code, _, err = run_main(*FLAGS, *flags, "--output_dir", tmp_path / "runs" / "one")
    assert code in (3, 4) and wanted in err  # the model, the data
    assert [line for line in err.splitlines() if line.startswith("error: ")] == [
        err.splitlines()[-1]
    ]
    assert not (tmp_path / "runs").exists()


def test_start_that_fails_leaves_what_was_there(base, run_main, monkeypatch, tmp_path):
    """The directory that it was given, and other runs that have begun beside it."""
    monkeypatch.chdir(base)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    code, *_ = run_main(*FLAGS, "--dataset", "none.jsonl", "--output_dir", tmp_path / "mine")
    assert code == 4 and (tmp_path / "mine" / "notes").read_text() == "x"
    config = script.Config(output_dir=str(tmp_path / "runs" / "one"))
    with (script.watched(), one_process(), pytest.raises(script.Stop),
          script.open_output(config, config) as (directory, _)):  # fmt: skip
        beside = directory.parent / "two"
        beside.mkdir()
        raise script.Stop("this one fails")
    assert beside.is_dir() and not directory.exists()


# ------------------------------------------------------------------------------------------------
# Schedule and optimizer
# ------------------------------------------------------------------------------------------------


def test_learning_rates_are_those_of_the_schedule(runs, read_metrics):
    """Two steps of warm-up; after the last of 5, a cosine and a line would come to 0."""
    after = {
        "cosine": [0.5 * (1 + math.cos(math.pi * i / 4)) for i in (1, 2, 3)],
        "linear": [3 / 4, 2 / 4, 1 / 4],
        "constant": [1, 1, 1],
    }
    for name, shape in after.items():
        rates = [record["learning_rate"] for record in read_metrics(runs(1, name)[0])
                 if "loss" in record]  # fmt: skip
        assert rates == pytest.approx([PEAK * x for x in [0.5, 1, *shape]], rel=1e-12), name


def test_weight_decay_shrinks_all_of_the_adapter(base, runs):
    """By learning rate times decay, of what was there before the step; on GPUs after it."""
    got, want = (adapter_of(runs(1, name)[0]) for name in ("decayed", "not decayed"))
    before = adapter_of(base / "peft")
    for key, value in want.items():
        shrunk = value - 0.1 * 0.5 * (before[key] if DEVICE == "cpu" else value)
        assert torch.allclose(got[key], shrunk, rtol=1e-5, atol=1e-7), key


def test_gradient_is_scaled_to_the_norm_that_is_given(runs, read_metrics):
    """Which the optimizer's state tells: its scales are those of the gradient and of its square."""
    directories = [runs(1, name)[0] for name in ("clipped", "not clipped")]
    norms = [read_metrics(directory)[0]["grad_norm"] for directory in directories]
    assert norms[0] == norms[1] > 0.3  # before it is scaled
    got, want = (
        load_file(directory / "checkpoint-000001" / "optimizer-00000-of-00001.safetensors")
        for directory in directories
    )
    scale = 0.25 / norms[0]
    for key, factor in ("absmax1", scale), ("absmax2", scale**2):
        torch.testing.assert_close(got[key], want[key] * factor, rtol=1e-4, atol=0)
        assert float(want[key].max()) > 0


# ------------------------------------------------------------------------------------------------
# Configuration files
# ------------------------------------------------------------------------------------------------

FEW = ["--model", "m", "--dataset", "a.jsonl", "b,split=x", "--learning_rate", "1e-4",
       "--batch_size", "3", "--random_weights", "--offload_params", "--target_modules", "q_proj",
       "v_proj", "--eval_dataset", "0.1", "--lr_schedule", "linear", "--recompute", "2",
       "--num_epochs", "1.5", "--no-offload_activations"]  # fmt: skip
AS_YAML = """
model: m
dataset: [a.jsonl, "b,split=x"]
learning_rate: 1e-4
batch_size: 3
random_weights: true
offload_params: yes
offload_activations: false
target_modules:
  - q_proj
  - v_proj
eval_dataset: 0.1
lr_schedule: linear
recompute: 2
num_epochs: 1.5
memory_limit_gib: null
"""


def test_file_gives_the_same_configuration_as_flags(tmp_path):
    want = script.parse_config(FEW)
    assert want != script.Config() and want.dataset == ("a.jsonl", "b,split=x")
    assert want.learning_rate == 1e-4 and want.target_modules == ("q_proj", "v_proj")
    (tmp_path / "flags.yaml").write_text(AS_YAML)
    values = dataclasses.asdict(want)
    (tmp_path / "flags.json").write_text(json.dumps(values))
    (tmp_path / "train_config.json").write_text(
        json.dumps({"flags": values, "config": {"model": "another"}, "date": "2020-01-31"})
    )
    for name in "flags.yaml", "flags.json", "train_config.json":
        assert script.parse_config(["--config", str(tmp_path / name)]) == want, name
        assert script.parse_config([f"--config={tmp_path / name}"]) == want, name


def test_command_line_counts_more_than_the_file(tmp_path):
    (tmp_path / "flags.yaml").write_text(AS_YAML)
    more = ["--dataset", "c.jsonl", "--no-random_weights", "--offload_activations", "--seed=5"]
    want = dataclasses.replace(
        script.parse_config(FEW), dataset=("c.jsonl",), random_weights=False,
        offload_activations=True, seed=5,
    )  # fmt: skip
    config = ["--config", str(tmp_path / "flags.yaml")]
    assert script.parse_config(config + more) == script.parse_config(more + config) == want


@pytest.mark.parametrize(
    "name, meant",
    [("lr", "learning_rate"), ("epochs", "num_epochs"), ("batchsize", "batch_size"),
     ("learning-rate", "learning_rate"), ("rank", "lora_rank"), ("max_steps_", "max_steps"),
     ("datasets", "dataset"), ("no-resumes", "resume")],
)  # fmt: skip
def test_unknown_flag_and_key_name_the_nearest(name, meant, tmp_path):
    for argv in ([f"--{name}", "1"], [f"--{name}=1"], ["--model", "m", f"--{name}"]):
        with pytest.raises(ValueError) as caught:
            script.parse_config(argv)
        said = name.removeprefix("no-")
        assert f"unknown flag --{said}: --{meant}?" in str(caught.value)
    for file, text in ("flags.yaml", f"{name}: 1"), ("flags.json", json.dumps({name: 1})):
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=f"--{meant}?"):
            script.parse_config(["--config", str(tmp_path / file)])


@pytest.mark.parametrize(
    "text, wanted",
    [("- model", "no table of flags"), ("3", "no table of flags"), ("", "no table of flags"),
     ("model: [", "cannot be read"), ("\0", "cannot be read"), ("batch_size: many", "batch_size"),
     ("batch_size: 1.5", "batch_size"), ("lr_schedule: wavy", "lr_schedule"),
     ("model: {a: 1}\nbatch_size: [1, 2]", "2"), ("{a", "cannot be read")],
)  # fmt: skip
def test_file_of_something_else_is_refused(text, wanted, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=wanted):
        script.parse_config(["--config", str(tmp_path / "flags.yaml")])
    with pytest.raises(ValueError, match="none.yaml: cannot be read"):
        script.parse_config(["--config", str(tmp_path / "none.yaml")])


def test_run_is_repeated_by_its_own_configuration(base, runs, run_main, read_metrics, monkeypatch,
                                                  tmp_path):  # fmt: skip
    """train_config.json as --config: the same flags and the same run, in a directory of its own."""
    monkeypatch.chdir(base)
    directory, _ = runs(1, "offloaded", "evaluated")
    written = directory / "train_config.json"
    argv = [*map(str, FLAGS), *map(str, OFFLOADED), *map(str, EVALUATED), "--save_every", "2"]
    assert script.parse_config(["--config", str(written)]) == script.parse_config(argv)
    code, _, err = run_main("--config", written, "--output_dir", tmp_path / "again")
    assert code == 0, err
    assert trained(read_metrics(tmp_path / "again")) == trained(read_metrics(directory))
    assert_same(adapter_of(tmp_path / "again"), adapter_of(directory))


def test_resume_needs_the_directory_alone(base, runs, run_main, read_metrics, monkeypatch,
                                          tmp_path):  # fmt: skip
    """And without even that it is the newest run below runs/."""
    monkeypatch.chdir(tmp_path)
    for name in "model", "rows.jsonl", "eval.jsonl":
        os.symlink(base / name, tmp_path / name)
    whole, _ = runs(1, "offloaded", "evaluated")
    for argv in (["--resume", "--output_dir", "runs/1"], ["--resume"]):
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(whole, "runs/1")
        shutil.rmtree("runs/1/checkpoint-000004")
        (tmp_path / "runs" / "1" / "adapter_model.safetensors").unlink()
        code, out, err = run_main(*argv)
        assert code == 0, err
        assert "checkpoint-000002: 2 of 4 steps are done" in out
        assert trained(read_metrics("runs/1")) == trained(read_metrics(whole))
        assert_same(adapter_of(tmp_path / "runs" / "1"), adapter_of(whole))
    shutil.rmtree("runs")
    code, _, err = run_main("--resume")
    assert code == 2 and "no run below runs/ to resume" in err
