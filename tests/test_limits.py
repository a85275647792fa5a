"""Thresholds from both sides, and keys that are compared: each by itself.

What the values mean is tested where they are used; here a value just below a limit and one just
above must not be treated alike.
"""

import dataclasses
import json
import math
import re
import types
from pathlib import Path

import pytest
import torch
from conftest import one_process
from families import TINY
from patching import parse_config
from rows import CHATML, chat_tokenizer, write_jsonl
from safetensors.torch import save_file
from test_layer import VOCABULARY
from test_memory import H200, PLAN
from train_fsdp_qlora import learning_rate

from fsdp_qlora.checks import compare_with_transformers as check
from fsdp_qlora.checks import untrained_tokens
from fsdp_qlora.checks.compare_with_transformers import compare_with_transformers
from fsdp_qlora.checks.untrained_tokens import ZERO_ROW, find_untrained_tokens
from fsdp_qlora.config import Config
from fsdp_qlora.data import cache
from fsdp_qlora.data.encode_examples import check_tokens
from fsdp_qlora.data.prepare_data import cache_key, prepare_rows
from fsdp_qlora.data.rows import encode_document
from fsdp_qlora.errors import FatalExample
from fsdp_qlora.files import digest
from fsdp_qlora.kernels.attention import Kernels
from fsdp_qlora.merge import compare_logits
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner import search as planner, search_inputs
from fsdp_qlora.planner.search import DoesNotFit, check_host, fastest_plan, with_cuda_graphs
from fsdp_qlora.planner.search_inputs import SearchInputs, Workload
from fsdp_qlora.pretrained.model_directory import base_digest
from fsdp_qlora.run.divergence import stop_if_diverged, why_diverged
from fsdp_qlora.run.resolve import resolve_config
from fsdp_qlora.run.resume import MAY_CHANGE, MUST_MATCH, refuse_other_run, step_to_resume
from fsdp_qlora.run.run import Progress
from fsdp_qlora.run.run_results import why_worse
from fsdp_qlora.run.startup_log import log_startup

NAN = math.nan


# ------------------------------------------------------------------------------------------------
# The check at start
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by, passes", [(9e-5, True), (1.1e-4, False), (NAN, False)])
def test_results_may_differ_by_rounding_alone(by, passes, monkeypatch):
    results = check.results
    monkeypatch.setattr(check, "results", lambda *args: {
        what: value * (1 + by) if what == "logits" else value
        for what, value in results(*args).items()})  # fmt: skip
    check_is(passes, "logits by")


@pytest.mark.parametrize("by, passes", [(0.19, True), (0.21, False), (NAN, False)])
def test_weights_may_differ_by_nf4s_rounding_alone(by, passes, monkeypatch):
    """Relative to the weights as read; what is computed with them does not tell here."""
    seen, make = [], check.random_hf_model
    monkeypatch.setattr(check, "random_hf_model", lambda *args: seen.append(make(*args))
                        or seen[0])  # fmt: skip
    read = check.dequantized_weights
    monkeypatch.setattr(check, "dequantized_weights", lambda *args: {
        name: seen[0].get_parameter(name) / (1 - by) for name in read(*args)})  # fmt: skip
    monkeypatch.setattr(check, "hf_results", lambda *args: dict(seen[1:]))
    monkeypatch.setattr(check, "results", lambda *args: dict(seen[1:]))
    check_is(passes, "weights as read by")


def check_is(passes, words):
    if passes:
        return compare_with_transformers(TINY["llama"](VOCABULARY), "m")
    with pytest.raises(ValueError, match=f"the check at start failed: .*{words}"):
        compare_with_transformers(TINY["llama"](VOCABULARY), "m")


@pytest.mark.parametrize("kind", ["norm", "distance"])
@pytest.mark.parametrize("share, found", [
    (0.0009, "zero"), (0.0011, "small"), (0.098, "small"), (0.102, None)])  # fmt: skip
def test_row_of_the_head_that_was_never_learned(kind, share, found, monkeypatch):
    """By its norm, and by how far it is from the mean row, as parts of the median."""
    monkeypatch.setattr(untrained_tokens, "VALUES_AT_ONCE", 2**16)
    half = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    half /= half.norm(dim=1, keepdim=True)
    head = torch.cat([half, -half]) + 5 * (kind == "distance")
    head[9] = head[9] * share if kind == "norm" else 5 + (head[9] - 5) * share
    model = types.SimpleNamespace(
        lm_head=head, shard_group_size=1, all_gather=lambda own: own[None],
        arch=types.SimpleNamespace(vocab_size=4000))  # fmt: skip
    name = {"norm": "a tiny row", "distance": "the mean of all rows"}[kind]
    name = ZERO_ROW if (kind, found) == ("norm", "zero") else name
    assert find_untrained_tokens(model) == ({9: name} if found else {})


# ------------------------------------------------------------------------------------------------
# The plan
# ------------------------------------------------------------------------------------------------


def plan_of(size, seconds=1.0, **settings):
    return Plan(**{**PLAN, "n_layers": 2, "memory": {"all": size}, "seconds_per_token": seconds,
                   **settings})  # fmt: skip


def picked(plans, limit, monkeypatch):
    """The one that is run of plans whose time is known."""
    monkeypatch.setattr(search_inputs, "predict_time", lambda plan, *_: plan)
    workload = Workload(1, 1, 1, 1.0, False, 1)
    return fastest_plan(
        plans, SearchInputs(None, None, (), workload, limit, H200, torch.device("cuda")))


@pytest.mark.parametrize("size, fits", [(9600, True), (9601, False)])
def test_plan_must_leave_room_for_gaps(size, fits):
    """4 %, of a GPU and of a CPU's host."""
    assert plan_of(size).fits(10_000) == fits and plan_of(size).fits(0)
    machine = dataclasses.replace(H200, free_host_bytes=10_000)
    if fits:
        check_host(plan_of(size - 100, host_bytes=100), machine)
    else:
        with pytest.raises(DoesNotFit):
            check_host(plan_of(size - 100, host_bytes=100), machine)


@pytest.mark.parametrize("size, chosen", [(9300, "fast"), (9301, "small")])
def test_plan_is_chosen_that_leaves_7_percent(size, chosen, monkeypatch):
    plans = {"fast": plan_of(size), "small": plan_of(100, seconds=2.0)}
    assert picked([*plans.values()], 10_000, monkeypatch) == plans[chosen]


@pytest.mark.parametrize("size, chosen", [(9000, "preferred"), (9001, "small")])
def test_plan_is_preferred_that_leaves_10_percent(size, chosen, monkeypatch):
    plans = {"preferred": plan_of(size, reuse_dequantized=True), "small": plan_of(100)}
    assert picked([*plans.values()], 10_000, monkeypatch) == plans[chosen]


@pytest.mark.parametrize("seconds, chosen", [(1.009, "preferred"), (1.011, "fast")])
def test_plans_within_a_percent_are_as_fast(seconds, chosen, monkeypatch):
    plans = {"preferred": plan_of(100, seconds, reuse_dequantized=True), "fast": plan_of(100)}
    assert picked([*plans.values()], 10_000, monkeypatch) == plans[chosen]


@pytest.mark.parametrize("seconds, is_graphed", [(0.94, True), (0.96, False)])
def test_graphs_must_save_a_twentieth_of_the_time(seconds, is_graphed, monkeypatch):
    monkeypatch.setattr(search_inputs, "predict_memory", lambda plan, *_: plan)
    monkeypatch.setattr(search_inputs, "predict_time", lambda plan, *_: dataclasses.replace(
        plan, seconds_per_token=seconds))  # fmt: skip
    workload = Workload(1, 1, 1, 1.0, False, 1)
    search = SearchInputs(None, None, (), workload, 10_000, H200, torch.device("cuda"))
    assert with_cuda_graphs(plan_of(100), search, False).uses_cuda_graphs == is_graphed


GIB = 2**30


@pytest.mark.parametrize("host_gib, allowed", [
    (1000, [10, 58]), (116, [10, 58]), (114, [10]), (15, [10])])  # fmt: skip
def test_host_memory_is_pinned_for_speed_up_to_a_bound(host_gib, allowed, monkeypatch):
    """48 GiB beyond what is needed, and half of what the host has."""
    plans = [plan_of(1, host_bytes=n * GIB) for n in (10, 58, 59)]
    monkeypatch.setattr(planner, "possible_plans", lambda *_: plans)
    workload = Workload(1, 1, 1, 1.0, False, 1)
    machine = dataclasses.replace(H200, free_host_bytes=host_gib * GIB)
    search = SearchInputs(Config(), None, (), workload, 100, machine, torch.device("cpu"))
    found = planner.affordable_plans(search, 1)
    assert [plan.host_bytes // GIB for plan in found] == allowed


# ------------------------------------------------------------------------------------------------
# Steps, data, the merge
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step, loss, largest, ends", [
    (61, 5.0, 1001, True), (60, 5.0, 1001, False), (61, 5.0, 1000, False), (61, 3.0, 1001, False),
    (61, NAN, 1, True), (1, math.inf, 1, True)])  # fmt: skip
def test_run_that_learns_nothing_is_given_50_steps(step, loss, largest, ends):
    """After the warm-up, 10 steps here; the loss must come down to the first one."""
    progress = Progress(first_loss=3.0)
    assert bool(why_diverged(step, loss, 1.0, 10, progress, lambda: largest)) == ends


@pytest.mark.parametrize("largest, ends", [(1000, False), (1001, True)])
def test_gradient_of_zero_ends_a_run_of_large_weights(largest, ends):
    progress = Progress(first_loss=3.0)
    assert bool(why_diverged(2, 1.0, 0.0, 10, progress, lambda: largest, True)) == ends


RUINED = [2.92, 9.0, 12.1, 8.8, 7.9, 11.2, 10.6, 9.9, 10.1, 10.7, 10.4, 10.34]
NOISY = [1.0, 3.0, 0.9, 2.5, 0.8] * 20  # a row a step, nothing learned


@pytest.mark.parametrize("losses, why", [
    (RUINED, "the loss ended at 10.48, above the initial 2.92"),
    ([3.0] * 90 + [3.31] * 10, "the loss ended at 3.31, above the initial 3"),
    ([3.0] * 90 + [3.3] * 10, ""), ([3.0, 4.4], ""), ([3.0, 4.6], "the loss ended at 4.6"),
    ([0.01] * 20 + [0.05] * 3, ""), ([0.01] * 20 + [0.07] * 3, "the loss ended at 0.07"),
    (NOISY, ""), ([3.0] * 90 + [4.0] * 9 + [2.9], "the loss ended at 3.89"),
    ([3.0] * 90 + [4.0] * 8 + [2.9] * 2, ""),
    ([3.0, 9.0, 2.9, 2.8], ""), ([7.0], ""), ([], "")])  # fmt: skip
def test_run_that_ended_worse_than_it_began(losses, why):
    assert why_worse(losses).startswith(why) and bool(why_worse(losses)) == bool(why)


def test_many_rows_of_large_tokens_stay_as_they_are(demo_directory, tmp_path, monkeypatch):
    """Ids and lengths that 16 bits do not hold, more rows than are parsed at once."""
    monkeypatch.setattr(untrained_tokens, "VALUES_AT_ONCE", 1000)
    tokens = torch.randint(3, 200_000, (71_800,), generator=torch.Generator().manual_seed(0))
    wanted = tokens.split([3] * 600 + [70_000])
    path = write_jsonl(tmp_path / "rows.jsonl", [
        {"input_ids": ids.tolist(), "labels": ids.tolist()} for ids in wanted])  # fmt: skip
    tokenizer = chat_tokenizer(demo_directory, CHATML)
    with one_process():
        rows, _, _ = prepare_rows([str(path)], tokenizer, 70_000, 200_000, "2020-01-31")
    assert len(rows) == 601 and rows.lengths.tolist() == [len(ids) for ids in wanted]
    assert all(torch.equal(part, ids) for i, ids in enumerate(wanted) for part in rows.document(i))
    counts = torch.from_numpy(untrained_tokens.loss_token_counts(rows, 200_000))
    assert torch.equal(counts, tokens.bincount(minlength=200_000))


@pytest.mark.parametrize("token, is_refused", [(97, False), (98, True)])
def test_token_must_be_in_the_vocabulary(token, is_refused):
    for ids, labels in ((5, token), (5, token)), ((5, 6), (5, token)):
        error = check_tokens(encode_document(ids, labels, 8), 8, 98)
        assert isinstance(error, FatalExample) == is_refused and (error is None) != is_refused


@pytest.mark.parametrize("n", [7, 8, 9])
def test_row_is_cut_at_the_longest_length(n):
    found = encode_document(range(n), range(n), 8)
    assert (found["length"], found["truncated"]) == (min(n, 8), n > 8)


@pytest.mark.parametrize("by, verdict", [
    (0.0, "ok"), (0.19, "ok"), (0.21, "warning"), (0.99, "warning"), (1.01, None),
    (NAN, None)])  # fmt: skip
@pytest.mark.parametrize("effect, why", [(0.09, "small beside"), (0.11, "may differ from those")])
def test_merged_model_may_lose_a_fifth_of_the_effect(by, verdict, effect, why, monkeypatch):
    """And none that is further from what was trained than the base is passes."""
    trained = torch.eye(8)
    plain = trained * (1 - effect)
    monkeypatch.setattr(compare_logits, "read_lm_head", lambda *_: (None, None))
    monkeypatch.setattr(compare_logits, "recorded_logits", lambda *_: (plain, trained))
    monkeypatch.setattr(compare_logits, "logits_of", lambda *_: trained + by * (trained - plain))
    loads = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
    base = types.SimpleNamespace(training_dtype=torch.bfloat16, auto_class=loads, token_ids=(),
                                 run_arch=types.SimpleNamespace(moe=None))  # fmt: skip
    args = base, Path("run/probe"), [[1]], Path("merged"), "cpu"
    if verdict is None:
        with pytest.raises(ValueError, match=f"does not match the trained one.*{why}"):
            compare_logits.compare_logits(*args)
    else:
        said = compare_logits.compare_logits(*args)
        assert said.level == verdict and (why in said.text) == (verdict != "ok")


@pytest.mark.parametrize("harmed", [None, 0, 1, 2])
def test_table_is_whole_if_each_of_its_files_is(harmed, tmp_path):
    files = [tmp_path / f"{i:04}.arrow" for i in range(3)]
    for file in files:
        file.write_bytes(file.name.encode())
    digests = {file.name: digest(file) for file in files}
    (tmp_path / cache.MANIFEST).write_text(json.dumps(digests))
    if harmed is not None:
        files[harmed].write_bytes(b"other")
    assert cache.has_table(tmp_path) == (harmed is None)


@pytest.mark.parametrize("rate, is_high", [(0.02, False), (0.021, True)])
def test_start_says_what_is_unusual_and_what_the_process_has(rate, is_high, capsys, monkeypatch):
    """On a CPU its memory so far is a part of the peak."""
    monkeypatch.setenv("FSDP_QLORA_DEBUG", "1")
    config, device = Config(learning_rate=rate), torch.device("cpu")
    chosen = dataclasses.replace(config, max_steps=7, target_modules=("q_proj", "v_proj"))
    with one_process():
        log_startup(config, chosen, plan_of(3 * GIB), Kernels({}, {}), 0, device, {})
    out = capsys.readouterr().out
    assert out.startswith("defaults: --max_steps 7 --target_modules q_proj v_proj\n")
    assert ("is very high" in out) == is_high
    assert " tokens; " in out
    assert "; predicted 1 tok/s/process\n" in out
    with one_process():
        log_startup(chosen, chosen, plan_of(3 * GIB), Kernels({}, {}), 0, device, {})
    assert "defaults:" not in capsys.readouterr().out  # of a run all of whose flags were given
    peak, own = map(float, re.search(
        r"peak (\S+) GiB per process: the process so far (\S+), ", out).groups())  # fmt: skip
    assert own > 0.1 and abs(peak - own - 3) < 0.02


# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------

BOUNDS = {  # {flag: ((refused, taken) at its lower bound, the same at its upper one)}
    **dict.fromkeys(("lora_rank", "lora_alpha", "max_seq_len", "batch_size"), ((0, 1), None)),
    "micro_batch_tokens": ((0, 1), None), "max_steps": ((-1, 1), None),
    **dict.fromkeys(("num_epochs", "learning_rate", "beta", "desirable_weight", "memory_limit_gib",
                     "undesirable_weight", "max_grad_norm", "max_minutes", "step_timeout_minutes"),
                    ((0.0, 1e-9), (math.inf, 1e9))),
    **dict.fromkeys(("weight_decay", "simpo_gamma"), ((-1e-9, 0.0), (math.inf, 1e9))),
    **dict.fromkeys(("eval_every", "eval_samples"), ((-1, 0), None)),
    **dict.fromkeys(("lora_dropout", "warmup_fraction"), ((-1e-9, 0.0), (1.0, 0.999))),
    "label_smoothing": ((-1e-9, 0.0), (0.5, 0.499)), "keep_checkpoints": ((1, 2), None),
    "seed": ((-1, 0), (2**40, 2**40 - 1)), "save_every": (("-1", "0"), ("5.5m", "999999999m")),
}  # fmt: skip
LOSS = {"beta": "dpo", "label_smoothing": "dpo", "simpo_gamma": "simpo", "desirable_weight": "kto",
        "undesirable_weight": "kto"}  # fmt: skip


@pytest.mark.parametrize("name", BOUNDS)
def test_flag_is_taken_up_to_its_bound(name):
    config = Config(loss=LOSS.get(name, "sft"), eval_dataset=("0.1",))
    for refused, taken in filter(None, BOUNDS[name]):
        resolve_config(dataclasses.replace(config, **{name: taken}), 1)
        for wrong in (refused, NAN) if isinstance(refused, float) else (refused,):
            with pytest.raises(ValueError, match=f"^--{name} {wrong}: must be"):
                resolve_config(dataclasses.replace(config, **{name: wrong}), 1)


@pytest.mark.parametrize("rank", [64, 65, 128, 129])
def test_rank_is_taken_as_far_as_a_linear_can_use_it(rank, run_main, tiny_model, tmp_path):
    """Of this model k_proj and v_proj are 64 x 128, and no other is smaller than 128 x 128."""
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "2+2=", "completion": "4"}] * 2)
    code, out, err = run_main(
        "--model", tiny_model("llama"), "--dataset", rows, "--max_steps", 1, "--lora_rank", rank,
        "--batch_size", 2, "--report_to", "none", "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == (3 if rank > 128 else 0)
    assert ("--lora_rank 129: a rank above 128 adds nothing" in err) == (rank > 128)
    said = "is more than the smaller side of k_proj (64), v_proj (64); the part above adds nothing"
    assert (said in out) == (64 < rank <= 128)


def test_step_of_kto_compares_two_rows():
    resolve_config(Config(loss="kto", batch_size=2), 1)
    with pytest.raises(ValueError, match="--batch_size 1 with --loss kto"):
        resolve_config(Config(loss="kto", batch_size=1), 1)


@pytest.mark.parametrize("text", ["model: ''", "output_dir: ''", "dataset: ['']",
                                  "dataset: [a.jsonl, '']", "dataset: []"])  # fmt: skip
def test_empty_value_of_a_file_is_refused(text, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"--?{text.partition(':')[0]}"):
        resolve_config(parse_config(["--config", str(tmp_path / "flags.yaml")]), 1)


# ------------------------------------------------------------------------------------------------
# What a resumed run may change
# ------------------------------------------------------------------------------------------------

REFUSED = """random_weights compute_dtype adapter lora_rank lora_alpha lora_dropout target_modules
    trainable_tokens
    init_adapter max_seq_len batch_size seed loss beta label_smoothing simpo_gamma desirable_weight
    undesirable_weight""".split()
SAID = "max_steps learning_rate lr_schedule warmup_fraction weight_decay max_grad_norm".split()
# the first five count by what they give: CONTENT
FREE = """model dataset eval_dataset columns chat_template output_dir resume num_epochs eval_every
    eval_samples save_every keep_checkpoints max_minutes step_timeout_minutes report_to
    micro_batch_tokens shard_group_size context_parallel_size recompute offload_activations
    offload_params memory_limit_gib plan_for host_memory_gib attn""".split()
CONTENT = "data_sha256 base_sha256 eval_sha256".split()


def begun_run():
    """(Config, digests, what a checkpoint says of them)."""
    config, content = Config(max_steps=9), dict.fromkeys(CONTENT, "a")
    return config, content, json.loads(json.dumps(
        {"step": 5, "config": dataclasses.asdict(config), **content}))  # fmt: skip


def test_each_flag_may_change_or_not():
    names = [f.name for f in dataclasses.fields(Config)]
    assert sorted(names) == sorted(REFUSED + SAID + FREE)
    assert {*MUST_MATCH} == {*REFUSED} and {*MAY_CHANGE} == {*SAID}


@pytest.mark.parametrize("key", [*REFUSED, *SAID, *FREE, *CONTENT, None])
def test_run_with_another_value_goes_on_or_is_refused(key):
    config, content, begun = begun_run()
    other = ["another"] if key == "target_modules" else "another"
    (begun if key in CONTENT else begun["config"]).update({key: other} if key else {})
    if key in (*REFUSED, *CONTENT):
        words = rf"--{key} \[?'?another" if key in REFUSED else "other"
        with pytest.raises(ValueError, match=words):
            refuse_other_run(config, Path("run"), content, begun)
    else:
        refuse_other_run(config, Path("run"), content, begun)


@pytest.mark.parametrize("name", SAID)
def test_changed_schedule_is_said_or_refused_once_all_is_done(name, monkeypatch, capsys, tmp_path):
    config, content, begun = begun_run()
    path = tmp_path / "checkpoint-000005"
    monkeypatch.setattr("fsdp_qlora.run.resume.latest_checkpoint", lambda *_: (path, begun))
    begun["config"][name] = 9.5
    assert step_to_resume(config, tmp_path, content) == 5
    assert f"changed on resume: --{name} 9.5 -> {vars(config)[name]} (" in capsys.readouterr().out
    begun["step"] = 9
    if name == "max_steps":
        assert step_to_resume(config, tmp_path, content) == 9
    else:
        with pytest.raises(ValueError, match=f"complete run of .* steps with .*--{name} 9.5 "):
            step_to_resume(config, tmp_path, content)
    begun["step"] = 10
    with pytest.raises(ValueError, match="is already at step 10"):
        step_to_resume(config, tmp_path, content)


def test_directory_of_damaged_checkpoints_is_told_by_its_flag(tmp_path):
    """--resume is "auto" where nobody typed it."""
    config, content, _ = begun_run()
    (tmp_path / "checkpoint-000005").mkdir()
    words = f"^--output_dir {tmp_path} has no complete checkpoint; .*-000005 is incomplete"
    with pytest.raises(ValueError, match=words):
        step_to_resume(config, tmp_path, content)


def test_warm_up_ends_for_the_loss_where_it_ends_for_the_rate():
    """3 % of 10 steps are one step, whose loss is not one of after the warm-up."""
    config = Config(max_steps=10, warmup_fraction=0.03, learning_rate=1e-3)
    progress = Progress()
    run = types.SimpleNamespace(config=config, progress=progress,
                                adapter=types.SimpleNamespace(largest_weight=None))  # fmt: skip
    for step, lowest in (1, None), (2, 3.0), (3, 2.0):
        stop_if_diverged(run, step, [1.0, 3.0, 2.0][step - 1], 1.0)
        assert progress.lowest_loss == lowest
    assert learning_rate(1, config) == config.learning_rate


# ------------------------------------------------------------------------------------------------
# What else tells one thing from another
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, is_other", [
    ({}, False), ({"sources": ["b.jsonl"]}, True), ({"source_digests": [["2"]]}, True),
    ({"max_seq_len": 9}, True), ({"vocab_size": 99}, True), ({"renames": ["a=b"]}, True),
    ({"loss": "dpo"}, True), ({"loss": "kto"}, True), ({"version": "0.0"}, True)])  # fmt: skip
def test_encoded_rows_are_those_of_each_setting(change, is_other, demo_directory, monkeypatch):
    settings = {"sources": ["a.jsonl"], "source_digests": [["1"]], "max_seq_len": 8,
                "vocab_size": 98, "tokenizer": chat_tokenizer(demo_directory, CHATML),
                "renames": [], "loss": "sft"}  # fmt: skip
    before = cache_key(**settings)
    if change == {"version": "0.0"}:
        # that of the function itself: a test before may have loaded the modules anew
        monkeypatch.setattr(cache_key.__globals__["transformers"], "__version__", "0.0")
    else:
        settings |= change
    assert (cache_key(**settings) != before) == is_other


def test_rows_of_all_losses_of_pairs_are_the_same(demo_directory):
    keys = {loss: cache_key(["a"], [["1"]], chat_tokenizer(demo_directory, CHATML), 8, 98, [], loss)
            for loss in ("sft", "dpo", "ipo", "simpo", "orpo", "kto")}  # fmt: skip
    assert len(set(keys.values())) == 3 and keys["dpo"] == keys["orpo"] != keys["kto"]


BASES = {  # what is changed: {tensor's name: tensor}, config.json
    "nothing": ({}, "{}"), "config.json": ({}, "{ }"), "value": ({"a": torch.ones(4, 6)}, "{}"),
    "shape": ({"a": torch.zeros(6, 4)}, "{}"), "name": ({"b": torch.zeros(4, 6)}, "{}"),
    "dtype": ({"a": torch.zeros(4, 6, dtype=torch.int32)}, "{}"),
    "last value": ({"a": torch.zeros(4, 6).index_fill(1, torch.tensor([5]), 1)}, "{}"),
    "more": ({"a": torch.zeros(4, 6), "b": torch.zeros(1)}, "{}")}  # fmt: skip


@pytest.mark.parametrize("what", BASES)
def test_base_model_is_told_by_its_configuration_and_tensors(what, tmp_path):
    digests = []
    for name in "nothing", what:
        tensors, text = BASES[name]
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.json").write_text(text)
        save_file(tensors or {"a": torch.zeros(4, 6)}, tmp_path / name / "model.safetensors")
        digests.append(base_digest(tmp_path / name))
    assert (digests[0] != digests[1]) == (what != "nothing")
