"""What is compiled while weights load is what the first step calls."""

import sys

import pytest
import torch
from families import TINY
from transformers import AutoModelForCausalLM

from fsdp_qlora.data.bins import make_bin
from fsdp_qlora.data.rows import rows_of
from fsdp_qlora.model import attention, elementwise, mixers, per_layer
from fsdp_qlora.model.compile_ahead import compute_kinds
from fsdp_qlora.model.load import fill_model
from fsdp_qlora.pretrained.config import describe_model
from fsdp_qlora.training.check import plain_model, plain_run

# of modules with functions of @elementwise that layers call
MODULES = attention, elementwise, mixers, per_layer
CODES = {function.__wrapped__.__code__ for module in MODULES for function in vars(module).values()
         if hasattr(function, "__wrapped__") and hasattr(function.__wrapped__, "__code__")}
FAMILIES = ("llama", "qwen3_moe", "gemma2", "qwen3_5", "granite4_h_moe", "nemotron_h", "falcon_h1",
            "deepseek_v3", "gemma4_e", "gpt_oss", "cohere")  # fmt: skip


def calls(function):
    """The (name, widths and dtypes of tensors, other arguments) of the elementwise functions that
    function() calls."""
    found = set()

    def look(frame, event, _):
        if event == "call" and frame.f_code in CODES:
            given = [frame.f_locals.get(name) for name in
                     frame.f_code.co_varnames[: frame.f_code.co_argcount]]
            found.add((frame.f_code.co_name, *(
                (value.shape[1:], value.dtype) if isinstance(value, torch.Tensor) else repr(value)
                for value in given)))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_first_steps_kernels_are_compiled_ahead(family, recompute):
    config = TINY[family](128)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arch = describe_model(config)
    model = plain_model(
        config, arch, reference.state_dict(), 64, fill_model, "lora", recompute)  # fmt: skip
    ids = torch.randint(3, arch.vocab_size, (42,))
    bin = make_bin(rows_of([(x, x) for x in ids.split([24, 18])]), [[0, 1]], 0, torch.tensor(0),
                   plain_run(model))
    layouts = [layer.layout for layer in model.layers]
    ahead = calls(lambda: compute_kinds(
        arch, layouts, model.plan, bin, model.frequencies, torch.device("cpu")))
    assert bin.ropes is None and not bin.masks
    first = calls(lambda: model.hidden(bin).sum().backward())
    assert first and first <= ahead
