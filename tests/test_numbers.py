"""The numbers: what is gathered, computed and optimised equals what a reference gives."""

import dataclasses
import gc
import json
import random
import re
import weakref
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from conftest import needs_ranks
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import train_fsdp_qlora as script

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = dict(vocab_size=320, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=128, initializer_range=0.06)  # fmt: skip


def write_model(path, config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, p in model.named_parameters():  # norms at exactly 1 and biases at 0 hide mistakes
        if p.dim() == 1:
            torch.nn.init.normal_(p, 1.0 if name.endswith("weight") else 0.0, 0.1)
    model.to(dtype).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Hidden size 96: rows are one and a half blocks of 64, so that shards begin inside rows."""
    base = tmp_path_factory.mktemp("models")
    common = dict(SIZES, hidden_size=96)
    return {
        "llama": write_model(base / "llama", LlamaConfig(intermediate_size=171 * 4, **common)),
        "mistral": write_model(base / "mistral", MistralConfig(intermediate_size=172, **common)),
        # 96 x 171 weights are 256.5 blocks; attention biases; tied embeddings
        "qwen2": write_model(
            base / "qwen2", Qwen2Config(intermediate_size=171, tie_word_embeddings=True, **common)
        ),
    }


def linear_weights(model_dir):
    weights = load_file(Path(model_dir) / "model.safetensors")
    return {k: v for k, v in weights.items() if k.endswith("_proj.weight")}


def write_adapter(path, model_dir, rank=4, dora=False):
    """Random values for A and B: a fresh adapter's B is zero and would hide half the gradients.
    With DoRA also for the magnitudes, which a fresh adapter has as the norms of rows."""
    generator, adapter = torch.Generator().manual_seed(1), {}
    for name, weight in linear_weights(model_dir).items():
        base = f"base_model.model.{name.removesuffix('.weight')}"
        for key, shape in ("lora_A", (rank, weight.shape[1])), ("lora_B", (weight.shape[0], rank)):
            adapter[f"{base}.{key}.weight"] = torch.randn(shape, generator=generator) * 0.05
        if dora:
            factors = 1 + 0.2 * torch.randn(weight.shape[0], generator=generator)
            adapter[f"{base}.lora_magnitude_vector"] = weight.float().norm(dim=1) * factors
    save_file(adapter, path)
    return str(path)


def write_batch(path):
    """Four rows of different lengths and masks, as equal-length tensors."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 320, (4, 24), generator=generator)
    labels = ids.clone()
    for row, start in enumerate((2, 20, 9, 14)):
        labels[row, :start] = -100
    save_file({"input_ids": ids, "labels": labels}, path)
    return str(path)


SETTINGS = {
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "sliced": {"compute_dtype": "float32", "offload_activations": True, "slice_tokens": 7},
    "sliced bfloat16": {"compute_dtype": "bfloat16", "slice_tokens": 7},
    "kept": {"compute_dtype": "float32", "recompute": "none", "reuse_weights": "all"},
    "rslora": {"compute_dtype": "float32", "use_rslora": True},
}
DORA = {  # of an adapter of its own
    "float32": {"compute_dtype": "float32"},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "none": {"compute_dtype": "float32", "recompute": "none"},
    "sliced": {"compute_dtype": "float32", "offload_activations": True, "slice_tokens": 7},
    "halves": {"compute_dtype": "float32", "keep_residual": True, "reuse_weights": "recomputed"},
    "offload": {"compute_dtype": "float32", "offload_params": True},
}
if DEVICE == "cuda":
    SETTINGS["fused"] = {"compute_dtype": "float32", "fused": True}
    SETTINGS["fused bfloat16"] = {"compute_dtype": "bfloat16", "fused": True}


MEMORY_FLAGS = {  # every combination must give the same numbers
    f"{recompute} {activations} {params} {reshard}": {
        "compute_dtype": "float32", "recompute": recompute, "offload_activations": activations,
        "offload_params": params, "reshard_after_forward": reshard,
    }
    for recompute in ("all", "none", "1", "2")
    for activations in (False, True)
    if not (recompute == "none" and activations)
    for params in (False, True)
    for reshard in (False, True)
} | {
    f"{recompute} {activations} residual {residual} reuse {reuse}": {
        "compute_dtype": "float32", "recompute": recompute, "offload_activations": activations,
        "keep_residual": residual, "reuse_weights": reuse,
    }
    for recompute in ("all", "2")
    for activations in (False, True)
    for residual, reuse in ((True, "none"), (False, "recomputed"), (True, "all"))
}  # fmt: skip


@pytest.fixture(scope="module")
def worked(models, tmp_path_factory, run_jobs):
    """worked(nproc): the directory where `nproc` ranks left all cases' results."""
    inputs = tmp_path_factory.mktemp("inputs")
    batch = write_batch(inputs / "batch.safetensors")
    adapters = {
        kind: write_adapter(inputs / f"{kind}.safetensors", model, rank=4)
        for kind, model in models.items()
    }
    adam = write_adapter(inputs / "adam.safetensors", models["llama"], rank=64)
    adapters["dora"] = write_adapter(inputs / "dora.safetensors", models["qwen2"], dora=True)
    done = {}

    def work(nproc):
        if nproc in done:
            return done[nproc]
        needs_ranks(nproc)
        out = done[nproc] = tmp_path_factory.mktemp(f"ranks-{nproc}")
        jobs = [{"case": "quantized", "models": list(models.values()), "out": "quantized"},
                {"case": "magnitudes", "model": models["qwen2"], "out": "magnitudes"},
                {"case": "vocabulary", "out": "vocabulary"}]
        if nproc in (2, 3):
            jobs.append({"case": "optimizer", "model": models["llama"], "adapter": adam,
                         "batch": batch, "rank": 64, "steps": 4, "lr": 1e-2, "out": "optimizer"})
        if nproc in (1, 2):
            jobs += [{"case": "gradients", "model": model, "adapter": adapters[kind],
                      "batch": batch, "settings": {k: {"lora_rank": 4, **v}
                                                   for k, v in SETTINGS.items()}, "out": kind}
                     for kind, model in models.items()]
        if nproc == 2:
            jobs.append({**jobs[-len(models)], "out": "memory", "settings": {
                k: {"lora_rank": 4, **v} for k, v in MEMORY_FLAGS.items()}})
            jobs.append({"case": "logits", "model": models["llama"], "batch": batch,
                         "adapter": adapters["llama"], "out": "logits"})
            jobs.append({"case": "patterns", "out": "patterns"})
        if nproc in (1, 2):
            jobs.append({"case": "gradients", "model": models["qwen2"], "batch": batch,
                         "adapter": adapters["dora"], "out": "dora",
                         "settings": {k: {"lora_rank": 4, "use_dora": True, **v}
                                      for k, v in DORA.items()}})
        for job in jobs:
            job["out"] = str(out / job["out"])
        run_jobs(nproc, jobs, cwd=out)
        return out

    return work, adapters, batch


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_gathered_bytes_equal_bitsandbytes_on_whole_tensors(nproc, models, worked):
    seen, checked = load_file(worked[0](nproc) / "quantized"), 0
    for kind, model_dir in models.items():
        for name, weight in linear_weights(model_dir).items():
            packed, state = bnb.functional.quantize_4bit(
                weight.to(DEVICE), blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            want = {
                "packed": packed.view(-1),
                "codes": state.absmax,
                "nested_absmax": state.state2.absmax,
                "nested_code": state.state2.code,
                "offset": state.offset,
                "dequantized": bnb.functional.dequantize_4bit(packed, state),
            }
            if DEVICE == "cuda":
                want["fused"] = want["dequantized"]
            for key, value in want.items():
                got = seen[f"{kind}/{name.removesuffix('.weight')}.{key}"]
                if key == "packed":  # the last block may not be full
                    got = got.view(-1)[: packed.numel()]
                assert torch.equal(got, value.cpu()), (name, key)
            checked += 1
    assert checked == 3 * 3 * 7


def reference(model_dir, adapter, batch, dtype, **variant):
    """transformers + bitsandbytes + PEFT in one process: the loss and every LoRA gradient."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, quantization_config=quantization, dtype=dtype, device_map={"": DEVICE}
    )
    config = LoraConfig(
        r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM", **variant
    )
    model = get_peft_model(model, config).train()
    values = load_file(adapter)
    set_peft_model_state_dict(model, values)
    taken = get_peft_model_state_dict(model)
    assert taken.keys() == values.keys()
    assert all(torch.equal(taken[name].cpu(), values[name]) for name in values)
    data = {name: tensor.to(DEVICE) for name, tensor in load_file(batch).items()}
    logits = model(input_ids=data["input_ids"]).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), data["labels"][:, 1:].flatten())
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    grads = get_peft_model_state_dict(model, grads)  # by the names that files have
    return loss.item(), {n: grad.cpu() for n, grad in grads.items()}


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
def test_loss_and_gradients_equal_transformers_and_peft(kind, nproc, models, worked):
    work, adapters, batch = worked
    got, adapter = load_file(work(nproc) / kind), adapters[kind]
    loss, exact = reference(models[kind], adapter, batch, torch.float32)
    assert len(exact) == 3 * 7 * 2
    assert abs(got["float32/loss"] - loss) <= 1e-5 * loss
    for name, grad in exact.items():
        assert (got[f"float32/{name}"] - grad).norm() <= 1e-5 * grad.norm(), name

    for other in (n for n in SETTINGS if "bfloat16" not in n and n != "rslora"):
        for name in exact:  # the same terms, summed in another order: up to 1.02e-6, by the CPU
            want = got[f"float32/{name}"]
            assert (got[f"{other}/{name}"] - want).norm() <= 1e-5 * want.norm(), (other, name)


def assert_equal_reference(got, loss, exact):
    assert abs(got["loss"] - loss) <= 1e-5 * loss
    for name, grad in exact.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm(), name


def of_setting(got, setting):
    return {k.removeprefix(f"{setting}/"): v for k, v in got.items() if k.startswith(f"{setting}/")}


def test_rslora_equals_peft(models, worked):
    work, adapters, batch = worked
    got = of_setting(load_file(work(2) / "llama"), "rslora")
    plain, _ = reference(models["llama"], adapters["llama"], batch, torch.float32)
    loss, exact = reference(
        models["llama"], adapters["llama"], batch, torch.float32, use_rslora=True
    )
    assert abs(loss - plain) > 1e-3 * plain
    assert_equal_reference(got, loss, exact)


@pytest.mark.parametrize("nproc", [1, 2])
def test_dora_equals_peft(nproc, models, worked):
    """With biases, which PEFT's DoRA must leave alone, and whatever is recomputed or offloaded."""
    work, adapters, batch = worked
    got = load_file(work(nproc) / "dora")
    exact = reference(models["qwen2"], adapters["dora"], batch, torch.float32, use_dora=True)
    assert len(exact[1]) == 3 * 7 * 3
    for setting in (name for name, v in DORA.items() if v["compute_dtype"] == "float32"):
        assert_equal_reference(of_setting(got, setting), *exact)
    loss, theirs = reference(
        models["qwen2"], adapters["dora"], batch, torch.bfloat16, use_dora=True
    )
    assert abs(got["bfloat16/loss"] - loss) <= 1e-3 * loss
    norm = torch.cat([g.flatten() for g in exact[1].values()]).norm()
    for who, grads in ("theirs", theirs), ("ours", of_setting(got, "bfloat16")):
        off = torch.cat([(grads[n] - g).flatten() for n, g in exact[1].items()]).norm() / norm
        print(f"bf16 gradients of {who}: {off:.2%} from the exact ones")


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
def test_magnitudes_begin_as_norms_of_what_bitsandbytes_gives(nproc, models, worked):
    got, weights = load_file(worked[0](nproc) / "magnitudes"), linear_weights(models["qwen2"])
    assert len(got) == len(weights)
    for name, weight in weights.items():
        packed, state = bnb.functional.quantize_4bit(
            weight.to(DEVICE), blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        want = bnb.functional.dequantize_4bit(packed, state).float().norm(dim=1)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"
        assert torch.equal(got[key], want.cpu()), name


def make_attention(bias=False, targets=("q_proj", "k_proj", "v_proj"), **flags):
    """A module with only q_proj, k_proj and v_proj, of 64 inputs, and what reads all three."""
    torch.manual_seed(0)
    model = torch.nn.Module()
    for name, width in ("q_proj", 128), ("k_proj", 64), ("v_proj", 32):
        linear = torch.nn.Linear(64, width, bias, device=DEVICE).requires_grad_(False)
        packed, state = bnb.functional.quantize_4bit(
            linear.weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        layer = script.NF4Linear(linear, 0)
        blocks = script.NF4Blocks(packed.view(-1, 32), state.absmax)
        layer.weight = torch.nn.Parameter(blocks, requires_grad=False)
        layer.set_nested_state(state.state2.absmax, state.offset)
        model.add_module(name, layer)
    config = dataclasses.replace(script.Config(), target_modules=targets, lora_rank=4, **flags)
    script.add_lora(model, config, "test")
    for p in model.parameters():
        if p.requires_grad:
            torch.nn.init.normal_(p, std=0.2)
    model.forward = lambda x: [layer(x) for layer in model.children()]
    return model


def by_formula(layer, x):
    """The layer's output as autograd records it."""
    base, (name,) = layer.base_layer, layer.active_adapters
    down = F.linear(layer.lora_dropout[name](x), layer.lora_A[name].weight)
    up = F.linear(down, layer.lora_B[name].weight) * layer.scaling[name]
    return F.linear(x, base.dequantize(), base.bias) + up


def outputs_and_gradients(model, forward, x):
    torch.manual_seed(1)  # of dropout
    outs = forward(x)
    inputs = [t for t in (x, *model.parameters()) if t.requires_grad]
    return [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), inputs)]


def assert_near(got, want):
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("input_grad", [True, False])
@pytest.mark.parametrize("bias, dropout", [(False, 0.0), (True, 0.0), (True, 0.5)])
def test_layers_with_one_input_give_together_what_each_gives_alone(bias, dropout, input_grad):
    model = make_attention(bias, lora_dropout=dropout)
    q, k, v = model.children()
    assert [q.siblings, k.siblings, v.siblings] == [() if dropout else (k, v), (), ()]
    x = torch.randn(2, 5, 64, device=DEVICE, requires_grad=input_grad)
    together = outputs_and_gradients(model, model, x)
    recomputed = outputs_and_gradients(
        model, lambda x: checkpoint(lambda x: [t + 0 for t in model(x)], x, use_reentrant=False), x
    )
    assert not script.LoraNF4Linear.waiting
    q.siblings = ()
    alone = outputs_and_gradients(model, model, x)
    formula = outputs_and_gradients(model, lambda x: [by_formula(m, x) for m in (q, k, v)], x)
    assert len(together) == 3 + input_grad + 6
    assert all(t.norm() > 0 for t in together)
    assert all(map(torch.equal, together, recomputed))
    assert_near(together, alone)
    assert_near(together, formula)


def test_layers_without_an_adapter_do_not_join_in():
    q, k, v = make_attention(targets=("q_proj", "v_proj")).children()
    assert q.siblings == (v,) and isinstance(k, script.NF4Linear)
    q, k, v = make_attention(targets=("k_proj",)).children()
    assert k.siblings == ()


def test_layer_called_otherwise_than_its_siblings_works_alone():
    model = make_attention()
    q, k, v = model.children()
    x, y = torch.randn(2, 5, 64, device=DEVICE)
    for layer, t in (q, x), (k, y), (v, x), (q, x), (v, x), (q, y), (k, x), (v, y), (k, y), (q, y):
        assert_near([layer(t)], [by_formula(layer, t)])
    for p in model.parameters():
        if p.requires_grad:
            p.data.mul_(2)
    for layer in q, k, v:  # not what the call before that has left for k and v
        assert_near([layer(y)], [by_formula(layer, y)])
    # an output that nobody asks for has no part in any gradient
    x.requires_grad_()
    got = outputs_and_gradients(model, lambda x: [q(x), v(x)], x)
    want = outputs_and_gradients(
        model, lambda x: [by_formula(q, x), by_formula(v, x), 0 * by_formula(k, x)], x
    )
    assert_near(got, want[:2] + want[3:])


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj",)])  # v_proj without an adapter, with
def test_last_product_of_a_checkpoint_is_not_run_again(targets, monkeypatch):
    calls, dequantize = [], script.NF4Linear.dequantize
    monkeypatch.setattr(
        script.NF4Linear, "dequantize", lambda layer: calls.append(layer) or dequantize(layer)
    )
    *_, v = make_attention(targets=targets).children()
    x = torch.randn(5, 64, device=DEVICE, requires_grad=True)
    checkpoint(v, x, use_reentrant=False).sum().backward()
    assert len(calls) == 2 and x.grad.norm() > 0


def test_no_tensor_outlives_the_block_that_made_it():
    model = make_attention()
    q, k, v = model.children()
    gc.collect()
    gc.disable()  # cycles would keep a block's tensors until some later time
    try:
        for called in (q, k, v), (q, v), (q,):
            x = torch.randn(2, 5, 64, device=DEVICE).requires_grad_() * 1
            outs = [layer(x) for layer in called]
            seen = [weakref.ref(t) for t in (x, *outs, *(t for t, _ in q.waiting.values()))]
            del x, outs
            if called != (q, k, v):
                v(torch.zeros(1, 64, device=DEVICE))  # any layer's next call
            assert not any(ref() is not None for ref in seen), called
    finally:
        gc.enable()


def test_memory_flags_change_no_number(models, worked):
    got = load_file(worked[0](2) / "memory")
    assert len(MEMORY_FLAGS) == 40 and len(got) == 40 * (2 + 3 * 7 * 2)
    # q k v o gate up down, three blocks: forward, recomputation (but of down), backward (but of
    # the first q k v)
    assert got["all False False True/dequantised"].tolist() == [8, 8, 8, 9, 9, 9, 6]
    for activations in "False", "True":
        flags = f"all {activations} residual %s reuse %s/dequantised"
        assert got[flags % (True, "none")].tolist() == [8, 8, 8, 6, 9, 9, 6]
        assert got[flags % (False, "recomputed")].tolist() == [6] * 7
        assert got[flags % (True, "all")].tolist() == [6] * 7
        # two blocks are recomputed, the third is not
        flags = flags.replace("all", "2")
        assert got[flags % (False, "recomputed")].tolist() == [6, 6, 6, 6, 6, 6, 6]
        assert got[flags % (True, "all")].tolist() == [5, 5, 5, 5, 5, 5, 5]
    for flags in MEMORY_FLAGS:
        for key in (k for k in got if re.match("all False False True/.*(loss|lora)", k)):
            want, value = got[key], got[key.replace("all False False True", flags)]
            if DEVICE == "cpu":
                assert torch.equal(value, want), (flags, key)
            else:  # the attention's backward adds with atomics there, in any order
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6)


def test_bf16_gradients_are_as_near_the_exact_ones_as_the_references(models, worked):
    """Both sides round some fifty times in a row, each in its own places: the reference's own
    gradients are 1.5 to 2.2 % (Frobenius) away from the exact ones. Ours must be as near; over
    the three models, so that chance averages out."""
    work, adapters, batch = worked
    squares = {"theirs": 0.0, **{name: 0.0 for name in SETTINGS if name.endswith("bfloat16")}}
    for kind, model in models.items():
        got = load_file(work(2) / kind)
        _, exact = reference(model, adapters[kind], batch, torch.float32)
        loss, theirs = reference(model, adapters[kind], batch, torch.bfloat16)
        assert abs(got["bfloat16/loss"] - loss) <= 1e-3 * loss
        norm = torch.cat([g.flatten() for g in exact.values()]).norm()
        for who in squares:
            grads = theirs if who == "theirs" else {n: got[f"{who}/{n}"] for n in exact}
            distance = torch.cat([(grads[n] - exact[n]).flatten() for n in exact]).norm() / norm
            print(f"{kind}: bf16 gradients of {who}: {distance:.2%} from the exact ones")
            squares[who] += float(distance) ** 2
    for who in squares:
        assert squares[who] ** 0.5 <= 1.1 * squares["theirs"] ** 0.5, who


@pytest.mark.parametrize("nproc", [2, 3])  # rank 64: 3 does not divide it, and CUDA pages it
def test_8bit_adam_over_shards_equals_one_process(nproc, worked):
    for rank in range(nproc):
        got = load_file(worked[0](nproc) / f"optimizer.{rank}")
        assert got["state1_is_uint8"]
        if DEVICE == "cuda":
            assert got["paged"] and got["managed"]
        names = {k.split("/")[1] for k in got if k.startswith("0/")}
        assert len(names) == 3 * 7 * 2
        for name in names:
            alone = torch.nn.Parameter(got[f"0/{name}/before"].to(DEVICE))
            if not alone.numel():
                continue
            adam = bnb.optim.AdamW8bit([alone], lr=1e-2, weight_decay=0.0, min_8bit_size=1)
            for step in range(4):
                alone.grad = got[f"{step}/{name}/grad"].to(DEVICE)
                assert alone.grad.abs().max() > 0
                adam.step()
                assert torch.equal(alone.data.cpu(), got[f"{step}/{name}/after"]), (name, step)


def test_state_of_a_small_adapter_is_in_8_bits_too():
    """Shared by more ranks, each part is smaller: a resumed run must find the same kind."""
    masters = torch.nn.Parameter(torch.zeros(512, device=DEVICE))
    state = script.make_optimizer(masters).state[masters]
    assert state["state1"].dtype == state["state2"].dtype == torch.uint8
    assert len(state["absmax1"]) == 2


def test_sharded_logits_equal_the_unsharded_models(worked):
    got = load_file(worked[0](2) / "logits")
    assert got["whole"].std() > 0
    assert torch.equal(got["sharded"], got["whole"])


def test_every_16_bit_pattern_survives_fsdp(worked):
    got = load_file(worked[0](2) / "patterns")
    for policy in "plain", "mixed", "offload":
        assert torch.equal(got[policy], got["expected"]), policy
        assert torch.equal(got[f"{policy}_codes"], got["expected_codes"]), policy
    wrong = (got["unprotected"] != got["expected"]).view(-1, 2).any(-1).sum()
    print(f"without the byte path {wrong} of 65,536 patterns change")
    assert (wrong > 0) == (DEVICE == "cuda")  # should it ever be 0 there, NF4Blocks can go


def write_rows(path):
    """64 rows whose lengths and learnt parts differ by a factor of up to twenty."""
    draw = random.Random(3)
    words = "what is the answer to this plus minus times 1 2 3 4 5 6 7 8 9".split()
    with open(path, "w") as file:
        for _ in range(64):
            text = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(2)]
            file.write(json.dumps({"prompt": text[0], "completion": text[1]}) + "\n")


@pytest.fixture(scope="module")
def small_runs(tiny_model, tmp_path_factory, run_jobs):
    """small_runs(name): the metrics of one of the runs below, None where there are too few GPUs.
    Of a model so small that a CPU without bf16 products is quick with it, too."""
    base = tmp_path_factory.mktemp("small-runs")
    sizes = dict(hidden_size=128, intermediate_size=160, num_hidden_layers=2)
    # heads of 64, which any build of flash-attn knows
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)
    write_rows(base / "rows.jsonl")
    flags = ["--model", str(model), "--dataset", "rows.jsonl", "--learning_rate", "1e-3"]
    cut = [*flags, "--max_steps", "6", "--save_every", "3", "--batch_size", "12"]
    for nproc in (2, 1, 3, 4):
        jobs = {}
        if nproc != 3:  # processes x 2 rows x accumulation = 8 rows
            same = [*flags, "--max_steps", "20", "--batch_size", "8", "--micro_batch_size", "2"]
            for dtype in "float32", "bfloat16":
                jobs[f"{dtype}-{nproc}"] = {"argv": [*same, "--compute_dtype", dtype]}
        if nproc == 2:
            jobs["whole"] = {"argv": cut}
        elif nproc < 4:
            name = f"resumed-{nproc}"
            before = f"cp -r whole {name}; rm -r {name}/checkpoint-000006"
            jobs[name] = {"argv": [*cut, "--resume"], "before": before}
        if nproc > (torch.cuda.device_count() or nproc):
            continue
        for name, job in jobs.items():
            job["argv"] += ["--output_dir", name]
        run_jobs(nproc, jobs.values(), cwd=base)

    def metrics(name):
        path = base / name / "metrics.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.is_file() else None

    return metrics


@pytest.mark.parametrize("dtype,bar", [("float32", 1e-4), ("bfloat16", 5e-3)])
def test_same_losses_whatever_the_processes_and_accumulation(dtype, bar, small_runs):
    first = small_runs(f"{dtype}-1")
    assert len(first) == 20 and first[-1]["loss"] < first[0]["loss"]
    for nproc in (2, 4):
        if nproc > (torch.cuda.device_count() or nproc):
            continue
        run = small_runs(f"{dtype}-{nproc}")
        gaps = [abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(first, run, strict=True)]
        print(f"{dtype} {nproc}: largest gap {max(gaps):.1e}")
        assert max(gaps) <= bar, (nproc, gaps)
        assert [r["learnt_tokens"] for r in run] == [r["learnt_tokens"] for r in first]
        assert [r["tokens"] for r in run] == [r["tokens"] for r in first]


def test_resume_on_another_number_of_processes(small_runs):
    whole = small_runs("whole")
    for nproc in (1, 3):  # rank 16 does not divide by 3: shards of 6, 6 and 4 rows
        if nproc > (torch.cuda.device_count() or nproc):
            continue
        resumed = small_runs(f"resumed-{nproc}")
        gaps = [abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(whole, resumed, strict=True)]
        print(f"resumed on {nproc}: gaps {gaps}")
        assert gaps[:3] == [0, 0, 0] and max(gaps) <= 5e-3


def test_resumed_run_equals_the_uninterrupted_one(
    run_jobs, run_training, read_metrics, tmp_path
):
    """Resumed in new processes, by the real command line."""
    flags = ["--max_steps", "6", "--save_every", "3", "--lora_dropout", "0.1", "--output_dir"]
    run_jobs(2, [{"argv": [*flags, "whole"]}], cwd=tmp_path)
    whole = read_metrics(tmp_path / "whole")
    (tmp_path / "whole").rename(tmp_path / "broken-off")
    broken_off = tmp_path / "broken-off"
    expected = load_file(broken_off / "adapter_model.safetensors")
    for name in "adapter_model.safetensors", "adapter_config.json":
        (broken_off / name).unlink()
    # the newest checkpoint is torn, as by a full disk: the one before it must be taken
    (broken_off / "checkpoint-000006" / "rank-00001-of-00002.safetensors").write_bytes(b"")
    result = run_training([*flags, "broken-off", "--resume"], nproc=2, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    resumed = read_metrics(broken_off)
    got = load_file(broken_off / "adapter_model.safetensors")
    assert expected.keys() == got.keys() and len(got) == 4 * 7 * 2
    assert all(torch.equal(expected[k], got[k]) for k in got)
    assert any(v.abs().max() > 0 for k, v in got.items() if "lora_B" in k)
    for key in "step", "loss", "grad_norm", "learning_rate", "tokens":
        assert [r[key] for r in resumed] == [r[key] for r in whole]


@pytest.mark.parametrize("nproc", [1, 2, 3])
def test_sharded_vocabulary_equals_embedding_and_cross_entropy(nproc, worked):
    """17 tokens a rank, some without a label, whole and in chunks, over 50 rows of vocabulary."""
    got = load_file(worked[0](nproc) / "vocabulary")
    weight, bias, hidden = (got[name].float() for name in ("weight", "bias", "hidden"))
    hidden.requires_grad_()
    logits = F.linear(hidden, weight, bias)
    want = F.cross_entropy(logits, got["labels"], ignore_index=-100, reduction="sum")
    (grad,) = torch.autograd.grad(want * 0.3, hidden)
    for chunk in "8", "all", "one":
        assert torch.equal(got[f"{chunk}/embedded"], weight[got["ids"]])
        torch.testing.assert_close(got[f"{chunk}/loss"], want, rtol=1e-6, atol=0)
        torch.testing.assert_close(got[f"{chunk}/grad"], grad, rtol=1e-5, atol=1e-6)


def test_learning_rate_warms_up_and_falls_to_nearly_nothing():
    rates = [script.learning_rate(step, 100, 1.0) for step in range(1, 101)]
    assert rates[:3] == [1 / 3, 2 / 3, 1.0]
    assert rates == sorted(rates[:3]) + sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert script.learning_rate(1, 1, 0.5) == 0.5


def test_initial_adapter_is_pefts():
    weight = script.init_lora("a.lora_A.default.weight", (16, 400), 0)
    bound = 1 / 20  # PEFT: kaiming uniform with a = sqrt(5), which is 1 / sqrt(fan in)
    assert weight.abs().max() <= bound and weight.abs().max() > 0.95 * bound
    assert torch.equal(weight, script.init_lora("a.lora_A.default.weight", (16, 400), 0))
    assert not torch.equal(weight, script.init_lora("b.lora_A.default.weight", (16, 400), 0))
    assert not script.init_lora("a.lora_B.default.weight", (400, 16), 0).any()
