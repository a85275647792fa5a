"""Evaluation: its loss is that of transformers, training is not touched, and what a run leaves.

The loss is compared with transformers' 4-bit model with the adapter in PEFT; a run with evaluations
with the same run without, bit by bit.
"""

import functools
import json
import math
import re
import types

import pytest
import torch
from conftest import DEVICE, one_process, read_rows, selected_params
from peft import set_peft_model_state_dict
from rows import REASONING, chat_tokenizer, write_jsonl
from safetensors.torch import load_file
from short_runs import (
    DROPOUT, EVALUATED, OFFLOADED, STEPS, adapter_of, assert_same, directory_name, evaluations,
    make_base, reference_loss_of, runs_of, trained)
from test_merge_experts import write_base
from test_step import load_reference
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.prepare_data import prepare_data
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.evaluation.generation import choose_prompts
from fsdp_qlora.files import json_digest
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run import metrics
from fsdp_qlora.run.checkpoints import checkpoint_path, drop_checkpoints, verify_checkpoint
from fsdp_qlora.run.metrics import describe_time
from fsdp_qlora.run.run import Progress

# (processes, name): flags of a run that is made with evaluation and without
PAIRS = {
    (1, "plain"): [],
    (1, "dropout"): [*DROPOUT, "--recompute", "none"],
    (1, "offloaded"): OFFLOADED,
    (2, "plain, sharded"): ["--shard_group_size", 2],
    (2, "offloaded, sharded"): [*OFFLOADED, "--shard_group_size", 2],
}
# by `make test-slow`: what "offloaded, sharded" has, and samples and intervals that others have
RARE = ((1, "dropout"), (1, "offloaded"), (2, "plain, sharded"), (1, "tenth"), (1, "never"),
        (2, "samples, sharded"))
SOME_PAIRS = [pytest.param(*pair, marks=[pytest.mark.slow] * (pair in RARE)) for pair in PAIRS]
# these are also cut off after half their steps and resumed
RESUMED = [(1, "offloaded"), (2, "offloaded, sharded")]
SOME_RESUMED = [pair for pair in SOME_PAIRS if pair.values in RESUMED]
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
    (1, "samples"): [*EVALUATED, "--eval_every", 0, "--eval_samples", 3, "--report_to",
                     "tensorboard"],
    (2, "samples, sharded"): [*EVALUATED, "--eval_every", 0, "--eval_samples", 2,
                              "--shard_group_size", 2, "--micro_batch_tokens", 400],
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    return make_base(tmp_path_factory.mktemp("evaluation"), tiny_model)


@pytest.fixture(scope="module")
def reference_loss(base):
    return reference_loss_of(base)


def jobs(nproc, selected):
    """Of PAIRS "evaluated" and "not evaluated", some also ", resumed", of RARE the selected ones;
    and SINGLE."""
    for (n, name), flags in PAIRS.items():
        if n != nproc or ((n, name) in RARE and (n, name) not in selected):
            continue
        for how, evaluation in (("evaluated", EVALUATED), ("not evaluated", [])):
            flags_of_both = [*flags, *evaluation, "--save_every", 2]
            yield (name, how), flags_of_both, {"draws": name == "plain"}
            if (n, name) in RESUMED:
                whole, cut = (directory_name(n, name, h) for h in (how, f"{how}, resumed"))
                before = f"cp -r '{whole}' '{cut}'; cd '{cut}'; rm -r *-000004 adapter*"
                yield (name, f"{how}, resumed"), ["--resume", *flags_of_both], {"before": before}
    for (n, name), flags in SINGLE.items():
        if n == nproc and ((n, name) not in RARE or name in {name for _, name in selected}):
            yield (name,), flags, {"draws": name == "wide steps"}


@pytest.fixture(scope="module")
def runs(base, run_jobs, request):
    selected = {(params.get("nproc"), params.get("name")) for params in selected_params(request)}
    return runs_of(base, run_jobs, functools.partial(jobs, selected=selected))


# ------------------------------------------------------------------------------------------------
# The loss
# ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("nproc, name", SOME_PAIRS, ids=str)
def test_evaluation_loss_equals_the_reference(nproc, name, runs, reference_loss, read_metrics):
    """Before the first step, when the adapter adds nothing, and after the last; without dropout."""
    directory, _ = runs(nproc, name, "evaluated")
    found = evaluations(read_metrics(directory))
    assert [record["step"] for record in found] == [0, 2, 4]
    middle = adapter_of(directory / "checkpoint-000002")
    for record, values in zip(found, (None, middle, adapter_of(directory))):
        want, n_loss_tokens = reference_loss(values)
        assert abs(record["eval_loss"] - want) <= 1e-5 * want, record["step"]
        assert record["eval_loss_tokens"] == n_loss_tokens
        assert record["eval_perplexity"] == math.exp(record["eval_loss"])
    assert abs(found[-1]["eval_loss"] - found[0]["eval_loss"]) > 0.05


# ------------------------------------------------------------------------------------------------
# Sample answers
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def greedy(model, ids, tokenizer):
    """What transformers' model writes after these tokens, until EOS or 64 tokens."""
    ids, n = list(ids), len(ids)
    while len(ids) < n + 64 and (len(ids) == n or ids[-1] != tokenizer.eos_token_id):
        ids.append(int(model(torch.tensor([ids], device=DEVICE)).logits[0, -1].argmax()))
    return tokenizer.decode(ids[n:])


@pytest.mark.parametrize("nproc, name", [
    (1, "samples"), pytest.param(2, "samples, sharded", marks=pytest.mark.slow)])
def test_samples_are_what_transformers_and_peft_write(nproc, name, base, runs, read_metrics):
    directory, out = runs(nproc, name)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "model")
    rows = [json.loads(line) for line in (base / "eval.jsonl").open()][: 4 - nproc]
    found = {record["step"]: record for record in evaluations(read_metrics(directory))}
    model = load_reference(base / "model", "lora")
    set_peft_model_state_dict(model, adapter_of(directory))
    for row, sample in zip(rows, found[4]["eval_samples"], strict=True):
        text = tokenizer.decode(tokenizer(row["prompt"])["input_ids"])
        assert sample["prompt"].startswith(text)
        assert sample["expected"] == row["completion"] + tokenizer.eos_token
        ids = tokenizer(sample["prompt"], add_special_tokens=False)["input_ids"]
        assert sample["answer"] == greedy(model, ids, tokenizer)
        assert (f"sample: prompt   {sample['prompt']!r}\n"
                f"sample: answer   {sample['answer'][:300]!r}\n"
                f"sample: expected {sample['expected']!r}\n") in out  # fmt: skip
    assert found[0]["eval_samples"] != found[4]["eval_samples"]


@pytest.mark.slow
def test_what_a_sample_leaves_out_is_marked(run_main, read_metrics, tmp_path):
    """In the log the beginning of a long prompt, and in metrics.jsonl of a very long one."""
    words = " ".join(str(i % 7) for i in range(600))
    row = {"prompt": f"What is {words}?\n", "completion": "The answer is 6."}
    path = write_jsonl(tmp_path / "eval.jsonl", [row])
    code, out, err = run_main("--max_steps", 1, "--eval_dataset", path, "--eval_samples", 1,
                              "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    (sample,) = evaluations(read_metrics(tmp_path / "run"))[0]["eval_samples"]
    assert sample["prompt"] == f"[..] {row['prompt'][-1000:]}"
    assert sample["expected"] == "The answer is 6.</s>"
    assert f"\nsample: prompt   {'[..] ' + row['prompt'][-150:]!r}\n" in out
    assert [metrics.beginning(text, 2) for text in ("ab", "abc")] == ["ab", "ab [..]"]


def test_samples_are_on_the_board(runs, read_metrics):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory, _ = runs(1, "samples")
    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    shown = {e.step: json.loads(e.tensor_proto.string_val[0])
             for e in events.Tensors("eval_samples/text_summary")}  # fmt: skip
    assert shown == {r["step"]: r["eval_samples"] for r in evaluations(read_metrics(directory))}


@pytest.mark.parametrize("nproc, model, flags", [
    *(pytest.param(n, "qwen3_moe", [], marks=pytest.mark.slow) for n in (1, 2)),
    (2, "gpt_oss", ["--micro_batch_tokens", 33])])  # fmt: skip
def test_samples_are_those_of_one_document_alone(nproc, model, flags, demo_directory, run_jobs,
                                                 tmp_path):  # fmt: skip
    """Of mixtures, on one process and sharded, and where some do not fit into one micro-batch."""
    write_base(model, tmp_path / "base", demo_directory)
    prompts = [[5, 9, 30, 7], [11, 8], [4] * 27]
    job = {"case": "samples", "model": str(tmp_path / "base"), "out": str(tmp_path / "out"),
           "prompts": prompts, "n": 8, "flags": [*flags, "--max_seq_len", 33]}  # fmt: skip
    run_jobs(nproc, [job], cwd=tmp_path)
    found = {name: values.tolist() for name, values in load_file(tmp_path / "out").items()}
    assert found["has_changed"] == [1], "of an adapter that was gathered before it changed"
    whole = [found[f"whole {i}"] for i in range(3)]
    assert [len(answer) for answer in whole] == [8, 8, 6 if flags else 8]
    assert whole == [found[f"alone {i}"] for i in range(3)]
    assert len({token for answer in whole for token in answer}) > 5
    for i, answer in enumerate(whole):
        end = answer.index(whole[1][2]) + 1 if whole[1][2] in answer else len(answer)
        assert found[f"cut {i}"] == answer[:end]
    assert len(found["cut 1"]) <= 3 and found["dear"] == found["stopped"] == []
    assert found["n_unasked"] == [2, 0, 0]  # where a step takes long; a short time; not known yet


def test_prompts_are_those_of_different_good_answers(demo_directory):
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [1, 2, 3, 4], [7, 8, 9, 6]]
    no = IGNORE_INDEX
    trained = [[no, no, 3, 4, no], [no, no, no, 9, 5], [no, no, 3, 4], [7, 8, 9, 6]]
    pairs = list(zip(tokens, trained))
    assert choose_prompts(make_rows(pairs), 9) == (
        [[1, 2], [1, 2, 3], [7, 8]], [[3, 4], [9, 5], [9, 6]])
    assert choose_prompts(make_rows(pairs), 1) == ([[1, 2]], [[3, 4]])
    # two rows, one prompt
    assert choose_prompts(make_rows(pairs, "dpo"), 9) == ([[1, 2]], [[3, 4]])
    assert choose_prompts(make_rows(pairs[1:], "kto"), 9) == ([[1, 2, 3], [7, 8]], [[9, 5], [9, 6]])


# ------------------------------------------------------------------------------------------------
# Training is not touched
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc, name", SOME_PAIRS, ids=str)
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
@pytest.mark.parametrize("nproc, name", SOME_RESUMED, ids=str)
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


@pytest.mark.parametrize("best, keep, left", [
    (None, 2, [4, 5]), (5, 2, [4, 5]), (4, 2, [4, 5]), (3, 2, [3, 4, 5]), (1, 2, [1, 4, 5]),
    (1, 4, [1, 2, 3, 4, 5]), (2, 4, [2, 3, 4, 5]), (2, 9, [1, 2, 3, 4, 5])])  # fmt: skip
def test_best_evaluations_checkpoint_is_kept_besides_the_newest(best, keep, left, tmp_path):
    run = types.SimpleNamespace(directory=tmp_path, config=Config(keep_checkpoints=keep),
                                progress=Progress(best_step=best))  # fmt: skip
    for step in range(1, 6):
        state = {"step": step, "files": {}}
        checkpoint_path(tmp_path, step).mkdir()
        (checkpoint_path(tmp_path, step) / "checkpoint.json").write_text(
            json.dumps({**state, "sha256": json_digest(state)}))
    drop_checkpoints(run, 5)
    assert sorted(int(path.name[-6:]) for path in tmp_path.iterdir()) == left


def test_best_evaluations_checkpoint_is_saved_and_said(base, runs, read_metrics):
    """With steps so wide that the loss falls first and rises then. Of fewer than ten steps each is
    followed by an evaluation, as nothing else is asked for."""
    directory, out = runs(1, "wide steps")
    assert "warning: --learning_rate 0.1 is very high" in out
    rows = read_rows(base / "rows.jsonl", PreTrainedTokenizerFast.from_pretrained(base / "model"))
    longest = max(len(ids) for ids, _ in rows)
    assert re.search(rf"\ntraining: 3 steps of \d+ rows, .* epochs; the longest has {longest}"
                     " tokens; ", out)  # fmt: skip
    found, best, saved = evaluations(read_metrics(directory)), math.inf, []
    assert [record["step"] for record in found] == [0, 1, 2, 3]
    kinds = set()
    for record in found:
        step, is_best = record["step"], record["eval_loss"] < best
        best = min(best, record["eval_loss"])
        line = (f"eval {step}/3 | loss {record['eval_loss']:7.4f} | perplexity"
                f" {record['eval_perplexity']:.2f}")  # fmt: skip
        assert f"{line}{' | best so far' if is_best and step else ''}\n" in out
        if step:
            saved += [step] if is_best or step == 3 else []
            kinds.add(is_best)
    assert kinds == {True, False}, "this run does not show both"
    state = json.loads((directory / "checkpoint-000003" / "checkpoint.json").read_text())
    (step,) = (record["step"] for record in found if record["eval_loss"] == best)
    assert state["progress"]["best_loss"] == best and state["progress"]["best_step"] == step
    kept = {int(path.name[-6:]) for path in directory.glob("checkpoint-*")}
    assert kept == {*saved[-2:]}
    assert f"best: step {step}, eval loss {best:.4f}, " in out
    verify_checkpoint(directory / f"checkpoint-{step:06d}")  # raises if it is not whole


@pytest.mark.parametrize("value", ["1", pytest.param("0", marks=pytest.mark.slow)])
def test_lines_for_a_bug_report_are_printed_on_request(
        value, base, run_main, tmp_path, monkeypatch):  # fmt: skip
    monkeypatch.setenv("FSDP_QLORA_DEBUG", value)
    code, out, err = run_main(
        "--model", base / "model", "--dataset", base / "rows.jsonl", "--max_steps", 1,
        "--report_to", "none", "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    for words in ("no CUDA graphs: attention runs in plain torch", " MB at ", "predicted peak",
                  "host memory after loading, each rank: ", "weights, GiB, each rank: "):
        assert (words in out) == (value == "1" or DEVICE == "cuda" and words == "predicted peak")


def test_line_of_a_step_tells_how_long_the_rest_takes(tmp_path, capsys, monkeypatch):
    """By the pace since the first step, which compiles; with what evaluations and saves take."""
    clock = iter([0, 0, 100, 110, 200, 10000])  # seconds; it is asked once a step
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    run = types.SimpleNamespace(
        config=Config(max_steps=106, report_to="none"), directory=tmp_path,
        status=types.SimpleNamespace(check_lock=lambda: None, write=lambda _: None),
        progress=Progress(), device=torch.device("cpu"))  # fmt: skip
    log = metrics.MetricsWriter(run, 100)
    record = {"loss": 1.0, "learning_rate": 1e-4, "grad_norm": 1.0,
              "tokens_per_second_per_gpu": 1.0, "peak_memory_gib": 1.0}  # fmt: skip
    for step in range(101, 107):
        log.write_step({"step": step, **record})
    lines = capsys.readouterr().out.splitlines()
    assert all(" tok/s/process |  1.00 GiB" in line for line in lines)
    ends = [line.partition("1.00 GiB")[2] for line in lines]
    # no line for the first two, at 0 s
    assert ends == [" | 2:30 left", " | 1:13 left", " | 0:50 left", ""]
    assert describe_time(3 * 3600 + 61.4) == "3:01:01" and describe_time(100 * 3600) == "100:00:00"


def test_losses_are_drawn(runs):
    for directory in (runs(1, "wide steps")[0], runs(1, "plain", "not evaluated")[0]):
        content = (directory / "loss.png").read_bytes()
        assert content.startswith(b"\x89PNG") and content.endswith(b"IEND\xaeB`\x82")
        assert len(content) > 5000


def test_tokenizer_lies_in_the_run(base, runs):
    """With the chat template that the run was given."""
    directory, _ = runs(1, "wide steps")
    got = AutoTokenizer.from_pretrained(directory)
    want = PreTrainedTokenizerFast.from_pretrained(base / "model")
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
    rows = read_rows(base / "many.jsonl", PreTrainedTokenizerFast.from_pretrained(base / "model"))
    n_loss_tokens = sum(int((labels[1:] != IGNORE_INDEX).sum()) for _, labels in rows)
    assert "eval data: 4 rows held out of the training data\n" in out
    records = read_metrics(directory)
    assert [record["step"] for record in evaluations(records)] == [0, 4, 8, 9]
    # 36 rows in 9 steps of 4: one epoch
    of_steps = sum(record.get("loss_tokens", 0) for record in records)
    assert of_steps + records[0]["eval_loss_tokens"] == n_loss_tokens
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
    asked = [{tokenizer.decode(rows.document(i)[0]).partition(" times")[0][-1]
              for i in range(len(rows))} for rows in parts]  # fmt: skip
    assert [len(one) for one in asked] == [7, 3] and not asked[0] & asked[1]


def test_rows_that_are_the_same_are_trained_or_held_out_together(base, tmp_path, capsys):
    """And those of a file that are trained, too, are told."""
    tokenizer = chat_tokenizer(base, REASONING)
    rows = [{"prompt": f"{i}?", "completion": f"{i}."} for i in range(10)]
    write_jsonl(tmp_path / "twice.jsonl", rows + rows[::-1] + rows[:3])
    write_jsonl(tmp_path / "eval.jsonl", [*rows[:2], *rows[:1], {"prompt": "x", "completion": "y"}])

    def parts(evaluation):
        config = Config(dataset=(str(tmp_path / "twice.jsonl"),), max_seq_len=64,
                        eval_dataset=(str(evaluation),))
        with one_process():
            return prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")

    for fraction in 0.2, 0.5, 0.9:
        train, held_out = parts(fraction)
        assert len(held_out.document_hashes.unique()) == round(10 * fraction)
        assert len(train) + len(held_out) == 23
        assert not {*train.document_hashes.tolist()} & {*held_out.document_hashes.tolist()}
    capsys.readouterr()
    parts(tmp_path / "eval.jsonl")
    assert "warning: 3 of the 4 evaluation rows are also trained on" in capsys.readouterr().out


def test_fraction_depends_on_the_seed_alone(base, monkeypatch, capsys):
    monkeypatch.chdir(base)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "model")

    def parts(**settings):
        config = Config(dataset=("many.jsonl",), max_seq_len=64, **settings)
        with one_process():
            return prepare_data(config, base, tokenizer, len(tokenizer), "2020-01-31")

    whole, nothing = parts()
    assert nothing is None and len(set(whole.document_hashes.tolist())) == 40
    seen = []
    for seed in 0, 0, 1:
        rows, kept_out = parts(eval_dataset=("0.2",), seed=seed)
        assert len(kept_out) == 8
        both = rows.document_hashes.tolist() + kept_out.document_hashes.tolist()
        assert sorted(both) == sorted(whole.document_hashes.tolist())
        for one in rows, kept_out:  # the hashes are of these tokens
            for i in range(len(one)):
                again = make_rows([one.document(i)])
                assert again.document_hashes == one.document_hashes[i]
                assert again.lengths == one.lengths[i]
        seen.append(kept_out.sha256())
    assert seen[0] == seen[1] != seen[2]
    for fraction in "1.0", "0.001", "0", "2", "-1":
        with pytest.raises(RunEnd, match=f"--eval_dataset {fraction}: is .* of 40 examples"):
            parts(eval_dataset=(fraction,))


@pytest.mark.parametrize(
    "name, want",
    [pytest.param("tenth", [*range(0, 21, 2)], marks=pytest.mark.slow),
     ("wide steps", [0, 1, 2, 3]), pytest.param("never", [0, 5], marks=pytest.mark.slow)],
    ids=["no flag", "no flag, few steps", "0"],
)
def test_evaluation_comes_as_often_as_eval_every_says(name, want, runs, read_metrics):
    """Left out, after each tenth of the steps, and each step of a few; 0, only before the first
    step and at the end."""
    assert [record["step"] for record in evaluations(read_metrics(runs(1, name)[0]))] == want
