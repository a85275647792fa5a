"""Gemma 4 E2B and E4B: layers that read others' keys and values, and inputs of their own.

The whole tiny model, in which two layers read the keys and values of one, by the command line; what
two small layers of each kind compute is in test_layer.py, first steps are in test_layouts.py.
"""

import pytest
import torch
from conftest import write_rows
from families import TINY, write_model
from safetensors.torch import load_file, save_file
from test_numbers import of_setting, reference
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.pretrained.config import describe_model

NAMES = "gemma4_e", "gemma4_wide"
FLAGS = ["--lora_rank", "4", "--batch_size", "16", "--max_seq_len", "64", "--compute_dtype",
         "float32"]  # fmt: skip
SETTINGS = {
    "kept": ["--recompute", "none"],
    "recomputed": ["--recompute", "all"],
    # those that lend are computed again, those that read are not
    "some recomputed": ["--recompute", "3"],
    "offloaded": ["--recompute", "5", "--offload_activations", "--offload_params"],
}


@pytest.fixture(scope="module")
def base(tmp_path_factory, demo_directory):
    """The directory of the models, each with an adapter of random values, and rows.jsonl."""
    directory = tmp_path_factory.mktemp("per_layer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    write_rows(directory / "rows.jsonl", 16)
    for name in NAMES:
        config, generator = TINY[name](len(tokenizer)), torch.Generator().manual_seed(1)
        write_model(directory / name, config)
        tokenizer.save_pretrained(directory / name)
        arch, adapter = describe_model(config), {}
        for i, kind in enumerate(arch.layer_kinds):
            for linear in arch.linears(kind):
                stem = f"base_model.model.model.layers.{i}.{linear.name}"
                for key, shape in (("lora_A", (4, linear.in_features)),
                                   ("lora_B", (linear.out_features, 4))):  # fmt: skip
                    value = torch.randn(shape, generator=generator) * 0.05
                    adapter[f"{stem}.{key}.weight"] = value
        save_file(adapter, directory / f"{name}.adapter")
    return directory


@pytest.fixture(scope="module")
def worked(base, run_jobs):
    """worked(nproc): makes the gradients of all models and SETTINGS on so many processes."""
    done = set()

    def work(nproc):
        if nproc not in done:
            done.add(nproc)
            settings = {name: FLAGS + flags for name, flags in SETTINGS.items()}
            run_jobs(nproc, [
                {"case": "gradients", "model": str(base / name), "settings": settings,
                 "adapter": str(base / f"{name}.adapter"), "dataset": str(base / "rows.jsonl"),
                 "out": str(base / f"{name} on {nproc}")} for name in NAMES], cwd=base)

    return work


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_shared_keys_and_values_equal_transformers(
    name, nproc, setting, base, worked
):
    worked(nproc)
    got = of_setting(load_file(base / f"{name} on {nproc}"), setting)
    adapter = base / f"{name}.adapter"
    targets = {key.split(".lora_")[0].rsplit(".", 1)[-1] for key in load_file(adapter)}
    loss, exact = reference(base / name, adapter, base / "rows.jsonl", torch.float32,
                            target_modules=sorted(targets))  # fmt: skip
    assert len(got) == 1 + len(exact) and not any("layers.3.self_attn.k_proj" in n for n in exact)
    assert abs(got["loss"] - loss) <= 1e-5 * loss
    for key, grad in exact.items():
        assert grad.norm() > 0 and (got[key] - grad).norm() <= 1e-5 * grad.norm(), key
