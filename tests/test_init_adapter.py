"""--init_adapter: a run begins with an adapter of PEFT's or of another run, if it fits."""

import contextlib

import pytest
from peft import LoraConfig
from short_runs import (
    EVALUATED, FLAGS, adapter_of, assert_same, evaluations, make_base, make_peft_adapters,
    reference_loss_of, runs_of)

from fsdp_qlora.lora.peft_files import check_settings

INIT = ["--max_steps", 1, "--learning_rate", 1e-30, "--init_adapter"]  # a step that changes no bit
RUNS = {
    (1, "peft"): [*INIT, "peft", *EVALUATED],
    (2, "peft"): [*INIT, "peft", *EVALUATED, "--shard_group_size", 2],
    (1, "dora"): [*INIT, "peft-dora", "--adapter", "dora"],
    (1, "first"): [],
    (1, "of first"): [*INIT, "1, first"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    directory = make_base(tmp_path_factory.mktemp("init"), tiny_model)
    make_peft_adapters(directory)
    return directory


@pytest.fixture(scope="module")
def runs(base, run_jobs):
    return runs_of(base, run_jobs, lambda nproc: [
        ((name,), flags, {}) for (n, name), flags in RUNS.items() if n == nproc])  # fmt: skip


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_begins_with_the_adapter_that_peft_saved(nproc, base, runs, read_metrics):
    directory, _ = runs(nproc, "peft")
    values = adapter_of(base / "peft")
    assert_same(adapter_of(directory), values)
    first = evaluations(read_metrics(directory))[0]
    reference_loss = reference_loss_of(base)
    want, _ = reference_loss(values)
    fresh, _ = reference_loss(None)
    assert abs(first["eval_loss"] - want) <= 1e-5 * want < 1e-2 * abs(want - fresh)


def test_run_begins_with_an_adapter_of_another_kind(base, runs):
    got = adapter_of(runs(1, "dora")[0])
    assert any("magnitude" in name for name in got)
    assert_same(got, adapter_of(base / "peft-dora"))


def test_run_begins_with_the_adapter_of_another_run(runs):
    assert_same(adapter_of(runs(1, "of first")[0]), adapter_of(runs(1, "first")[0]))


# name: (flags, what of the way out the message names)
REFUSED = {
    "another rank": (["peft-rank"], "--lora_rank"),
    "another alpha": (["peft", "--lora_alpha", 7], "--lora_alpha"),
    "another kind": (["peft", "--adapter", "dora"], "--adapter"),
    "another scale": (["peft", "--adapter", "rslora"], "--adapter"),
    "other linears": (["peft-targets"], "--target_modules"),
    "another model": (["peft", "--model", "{other}"], "same base model"),
    "values not finite": (["peft-nan"], "NaN or infinite"),
    "another scale by linear": (["peft-alphas"], "alpha_pattern is {'k': 7}, by this run {}"),
    "another base": (["peft-pissa"], "init_lora_weights"),
    "a head beside it": (["peft-saved"], "modules_to_save is ['lm_head'], by this run None"),
    "biases beside it": (["peft-bias"], "bias is 'lora_only', by this run 'none'"),
    "other ranks by linear": (["peft-ranks"], "rank_pattern is {'k_proj': 4}, by this run {}"),
    "tokens beside it": (["peft-tokens"], "trainable_token_indices is [3, 7]"),
    "some layers alone": (["peft-layers"], "layers_to_transform is [1]"),
    "after some tokens alone": (["peft-alora"], "alora_invocation_tokens"),
    "no adapter": (["model"], "is not an adapter"),
    "no directory": (["nowhere"], "nowhere"),
}


@pytest.mark.parametrize("how, fits", [
    (True, True), ("gaussian", True), ("orthogonal", True), ("pissa", False), ("olora", False),
    ("loftq", False)])
def test_initialization_matters_only_where_it_changes_the_base(how, fits, tmp_path):
    """For --init_adapter and for a merge, which ask the same function."""
    wanted = LoraConfig().to_dict()
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="is 'p|is 'o|is 'l"):
        check_settings(tmp_path, {"init_lora_weights": how}, wanted, "this run", {})


@pytest.mark.parametrize("name", REFUSED)
def test_adapter_that_does_not_fit_is_refused(name, base, tiny_model, run_main, monkeypatch,
                                              tmp_path):  # fmt: skip
    """Before the output directory is kept."""
    monkeypatch.chdir(base)
    flags, wanted = REFUSED[name]
    flags = [str(flag).format(other=tiny_model("llama")) for flag in flags]
    code, _, err = run_main(*FLAGS, "--init_adapter", *flags, "--output_dir", tmp_path / "new")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 3 and "--init_adapter" in line and wanted in line
    assert not (tmp_path / "new").exists()
