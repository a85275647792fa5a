"""minimal_fsdp_qlora.py on the ranks of several.py, for test_minimal.py: the case `minimal` of
worker.py. The script is its own; what is put around its functions looks, or is a fault."""

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer

import minimal_fsdp_qlora as script

PROBE = range(3, 67)  # token ids


def minimal(job, process):
    """The script's main() with job["argv"]. What rank 0 has printed, and the error if one has ended
    it, is in the file job["out"] + ".log". Returns the logits of PROBE at the end, and the bytes of
    all 4-bit weights as they are gathered: {name: tensor}, {} after an error."""
    device, _ = process
    seen, log, argv = {}, io.StringIO(), ["minimal_fsdp_qlora.py", *map(str, job["argv"])]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        for owner, name, new in (
            (sys, "argv", argv),
            (script, "join_processes", lambda: device),
            (dist, "destroy_process_group", lambda: None),  # worker.py ends it
            (script, "verify", looking_at_weights(script.verify, seen)),
            (script, "save_adapter", looking_at_logits(script.save_adapter, seen, device)),
            *(FAULTS[job["fault"]]() if "fault" in job else ()),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, new))
        try:
            script.main()
        except (SystemExit, AssertionError, RuntimeError) as e:
            log.write(f"{type(e).__name__}: {e}\n")
            seen.clear()
    if dist.get_rank() == 0:
        Path(job["out"] + ".log").write_text(log.getvalue())
    return seen


def looking_at_weights(verify, seen):
    def look(model):
        verify(model)
        base = model.get_base_model()
        names = {module: name for name, module in base.named_modules()}
        for layer in base.get_decoder().layers:
            layer.unshard()
            for module in layer.modules():
                if isinstance(module, bnb.nn.Linear4bit):
                    name = names[module].replace(".base_layer", ".weight")
                    seen[name] = module.weight.detach().view(torch.uint8).clone()
            layer.reshard()

    return look


def looking_at_logits(save_adapter, seen, device):
    @torch.no_grad()
    def look(model, args):
        with torch.autocast(device.type, torch.bfloat16):
            seen["logits"] = model(input_ids=torch.tensor([PROBE], device=device)).logits[0].float()
        save_adapter(model, args)

    return look


def lora_in_bf16():
    """Then all of a layer is bf16, and CUDA's copies rewrite NaNs; elsewhere the copies here do."""
    fill = script.fill

    def fill_in_bf16(module, *args):
        fill(module, *args)
        if isinstance(module, LoraLayer):
            module.lora_A.bfloat16()
            module.lora_B.bfloat16()

    return [(script, "fill", fill_in_bf16), *copies_as_on_cuda()]


def copies_as_on_cuda():
    if torch.cuda.is_available():
        return []
    copy = torch._foreach_copy_

    def rewriting_copy(targets, sources):
        copy(targets, [torch.where(s.isnan(), torch.nan, s) if s.dtype == torch.bfloat16 else s
                       for s in sources])  # fmt: skip

    return [(torch, "_foreach_copy_", rewriting_copy)]


def norm_is_trained():
    load = script.load_and_shard

    def load_and_train_a_norm(model, *args):
        load(model, *args)
        model.get_base_model().get_decoder().norm.requires_grad_()

    return [(script, "load_and_shard", load_and_train_a_norm)]


def norm_is_not_read():
    fill = script.fill

    def fill_but_norms(module, name, *args):
        if not name.endswith("model.norm"):
            fill(module, name, *args)

    return [(script, "fill", fill_but_norms)]


FAULTS = {f.__name__: f for f in (
    lora_in_bf16, copies_as_on_cuda, norm_is_trained, norm_is_not_read)}  # fmt: skip
