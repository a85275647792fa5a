"""What a step makes of the gradient: the schedule of rates, weight decay, the norm it is cut to,
the optimizer's update."""

import ctypes
import math
import types

import bitsandbytes as bnb
import pytest
import torch
from conftest import DEVICE
from safetensors.torch import load_file
from short_runs import PEAK, adapter_of, make_base, make_peft_adapters, runs_of

from fsdp_qlora.config import Config
from fsdp_qlora.lora.adapter import optimizer_bytes_per_weight
from fsdp_qlora.run.checkpoints import check_disk_space
from train_fsdp_qlora import make_optimizer, optimizer_step

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
    moments = sorted(key for key in want if not key.startswith("state"))  # in 8 bits their scales
    for key, factor in zip(moments, (scale, scale**2), strict=True):
        torch.testing.assert_close(got[key], want[key] * factor, rtol=1e-4, atol=0)
        assert float(want[key].max()) > 0


def is_managed(address):
    """Whether CUDA's runtime calls this address managed (paged) memory."""
    attributes = (ctypes.c_byte * 256)()  # CUDA 13's struct is 88 bytes, CUDA 12's was 24
    runtime = ctypes.CDLL("libcudart.so.13" if torch.version.cuda >= "13" else "libcudart.so.12")
    assert runtime.cudaPointerGetAttributes(attributes, ctypes.c_void_p(address)) == 0
    return int.from_bytes(bytes(attributes[:4]), "little") == 3  # cudaMemoryTypeManaged


@pytest.mark.parametrize("blocks", [3, 512])  # below bitsandbytes' own bounds for 8 bits and paging
def test_optimizer_is_bitsandbytes_paged_adamw_in_8_bits(blocks):
    """This test alone, with the plan's bytes in it, knows which optimizer it is. Of small adapters
    too: shared by more ranks, each part is smaller, and a resumed run must find the same kind."""
    config, generator = Config(weight_decay=0.1), torch.Generator().manual_seed(0)
    weights, want = (torch.nn.Parameter(torch.ones(blocks * 256, device=DEVICE)) for _ in range(2))
    optimizer = make_optimizer(weights, config)
    theirs = bnb.optim.AdamW8bit([want], lr=0.0, weight_decay=0.1, min_8bit_size=0)
    for rate in 1e-3, 1e-2, 1e-4:
        want.grad = torch.randn(len(want), generator=generator).to(DEVICE)
        weights.grad = want.grad.clone()
        optimizer_step(optimizer, types.SimpleNamespace(weights=weights, grad=weights.grad), rate)
        theirs.param_groups[0]["lr"] = rate
        theirs.step()
        assert torch.equal(weights, want) and not weights.grad.any()
    state = optimizer.state[weights]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    in_gpu_memory = optimizer_bytes_per_weight(make_optimizer, config)  # that must be there
    assert in_gpu_memory == 0
    if DEVICE == "cuda" and blocks > 3:
        assert is_managed(state["state1"].data_ptr())


@pytest.mark.parametrize("make, state_bytes", [
    (make_optimizer, 2 * (1 + 4 / 256)),  # two states of 8 bits, with an fp32 scale per 256
    (lambda weights, config: torch.optim.AdamW([weights]), 8)])  # fmt: skip
def test_room_on_the_disk_is_that_of_the_optimizers_own_state(make, state_bytes, tmp_path):
    """The adapter and four checkpoints: two, the best one, and the one that is being written."""
    n = 10**15
    gib = (4 * n + 4 * (n * (4 + state_bytes) + 2**20)) / 2**30
    with pytest.raises(ValueError, match=f"needs {gib:.2f} GiB for the adapter and checkpoints"):
        check_disk_space(Config(keep_checkpoints=2), tmp_path, n, make)
