"""What a step makes of the gradient: the schedule of rates, weight decay, the norm it is cut to."""

import math

import pytest
import torch
from conftest import DEVICE
from safetensors.torch import load_file
from short_runs import PEAK, adapter_of, make_base, make_peft_adapters, runs_of

SCHEDULED = ["--max_steps", 5, "--warmup_fraction", 0.4, "--batch_size", 1, "--lr_schedule"]
INIT = ["--init_adapter", "peft", "--max_steps", 1]  # neither matrix of its adapter is 0
RUNS = {
    "cosine": [*SCHEDULED, "cosine"],
    "linear": [*SCHEDULED, "linear"],
    "constant": [*SCHEDULED, "constant"],
    "not decayed": [*INIT, "--learning_rate", 0.1],
    "decayed": [*INIT, "--learning_rate", 0.1, "--weight_decay", 0.5],
    "not clipped": [*INIT, "--max_grad_norm", 1e9],
    "clipped": [*INIT, "--max_grad_norm", 0.25],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    directory = make_base(tmp_path_factory.mktemp("optimizer"), tiny_model)
    make_peft_adapters(directory)
    return directory


@pytest.fixture(scope="module")
def runs(base, run_jobs):
    return runs_of(base, run_jobs, lambda nproc: [
        ((name,), flags, {}) for name, flags in RUNS.items()])  # fmt: skip


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
        load_file(directory / "checkpoint-000001" / "optimizer.safetensors")
        for directory in directories
    )
    scale = 0.25 / norms[0]
    for key, factor in ("absmax1", scale), ("absmax2", scale**2):
        torch.testing.assert_close(got[key], want[key] * factor, rtol=1e-4, atol=0)
        assert float(want[key].max()) > 0
