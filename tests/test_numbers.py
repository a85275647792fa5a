"""The numbers: what is gathered, computed and optimized equals what a reference gives.

What one layer computes is in test_layer.py, whole steps are in test_step.py.
"""

import json
import math
import re

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE, ROOT, SEVERAL, needs_ranks, read_rows, selected_params, selected_tests, write_rows)
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, BitsAndBytesConfig)

from fsdp_qlora.config import Config
from train_fsdp_qlora import learning_rate, make_optimizer

BLOCK, STATE_BLOCK = 64, 256
# by `make test-slow`; test_nodes.py has four in `make test`
ONE, THREE, FOUR = (pytest.param(nproc, marks=pytest.mark.slow) for nproc in (1, 3, 4))


@pytest.fixture(scope="module")
def models(tiny_model, tmp_path_factory):
    """Hidden size 96: rows are one and a half blocks of 64, so that shards begin inside rows. 96 x
    171 weights are 256.5 blocks; qwen2 has attention biases and tied embeddings."""
    base = tmp_path_factory.mktemp("models")
    for kind, intermediate_size in ("llama", 171 * 4), ("qwen2", 171):
        model = tiny_model(kind, hidden_size=96, intermediate_size=intermediate_size)
        (base / kind).symlink_to(model)  # so that its name tells which it is
    return {path.name: path for path in sorted(base.iterdir())}


def linear_weights(model_dir):
    weights = load_file(model_dir / "model.safetensors")
    return {k: v for k, v in weights.items() if k.endswith("_proj.weight")}


def quantize(weight):
    return bnb.functional.quantize_4bit(
        weight.to(DEVICE), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )


def write_adapter(path, model_dir, dora=False):
    """Random values for A and B: a fresh adapter's B is zero and would hide half the gradients.
    With DoRA also for the magnitudes, which a fresh adapter has as the norms of rows."""
    generator, adapter = torch.Generator().manual_seed(1), {}
    for name, weight in linear_weights(model_dir).items():
        base = f"base_model.model.{name.removesuffix('.weight')}"
        for key, shape in ("lora_A", (4, weight.shape[1])), ("lora_B", (weight.shape[0], 4)):
            adapter[f"{base}.{key}.weight"] = torch.randn(shape, generator=generator) * 0.05
        if dora:
            factors = 1 + 0.2 * torch.randn(weight.shape[0], generator=generator)
            adapter[f"{base}.lora_magnitude_vector"] = weight.float().norm(dim=1) * factors
    save_file(adapter, path)
    return str(path)


@pytest.fixture(scope="module")
def worked(models, tmp_path_factory, run_jobs, request):
    """worked(nproc): the directory where `nproc` ranks left all cases' results; of gradients those
    of the selected tests."""
    inputs = tmp_path_factory.mktemp("inputs")
    write_rows(inputs / "rows.jsonl", 16)
    adapters = {
        kind: write_adapter(inputs / kind, models[kind.removesuffix("-dora")], "dora" in kind)
        for kind in ("llama", "qwen2", "qwen2-dora")
    }
    done = {}

    def work(nproc):
        if nproc in done:
            return done[nproc]
        needs_ranks(nproc)
        out = done[nproc] = tmp_path_factory.mktemp(f"ranks-{nproc}")
        jobs = [
            {"case": "quantized", "models": list(models.values())},
            {"case": "initial", "model": models["qwen2"], "flags": ["--adapter", "dora"]},
        ]
        if nproc < 4:
            jobs.append({"case": "vocabulary", "model": models["llama"]})
        if nproc in (2, 3):
            flags = ["--learning_rate", "1e-2", "--batch_size", "6", "--max_seq_len", "64",
                     "--lora_rank", "22"]  # 263 blocks of state a layer
            jobs.append({"case": "optimizer", "model": models["llama"], "steps": 4, "flags": flags})
        kinds = {params.get("kind") for params in selected_params(request)}
        wants_bf16 = (test_bf16_gradients_are_as_near_the_exact_ones_as_the_references.__name__
                      in selected_tests(request))
        if nproc == 2:
            flags = ["--lora_rank", "4", "--batch_size", "16", "--max_seq_len", "64",
                     "--compute_dtype"]  # fmt: skip
            jobs += [
                {"case": "gradients", "model": models[kind.removesuffix("-dora")],
                 "adapter": adapter, "dataset": inputs / "rows.jsonl", "out": kind,
                 "settings": {d: [*flags, d, *["--adapter", "dora"] * ("dora" in kind)]
                              for d in ("float32", *["bfloat16"] * wants_bf16)}}
                for kind, adapter in adapters.items() if kind in kinds or wants_bf16
            ]  # fmt: skip
            jobs.append({"case": "patterns"})
        for job in jobs:
            job["out"] = str(out / job.get("out", job["case"]))
            job.setdefault("dataset", inputs / "rows.jsonl")
        run_jobs(nproc, json.loads(json.dumps(jobs, default=str)), cwd=out)
        return out

    return work, adapters, inputs / "rows.jsonl"


@pytest.mark.parametrize("nproc", [ONE, 2, THREE, FOUR])
def test_gathered_bytes_equal_bitsandbytes_on_whole_tensors(nproc, models, worked):
    seen, checked = load_file(worked[0](nproc) / "quantized"), 0
    for model_dir in models.values():
        for name, weight in linear_weights(model_dir).items():
            packed, state = quantize(weight)
            want = {
                "packed": packed.view(-1),
                "codes": state.absmax,
                "nested_absmax": state.state2.absmax,
                "nested_code": state.state2.code,
                "offset": state.offset,
                "dequantized": bnb.functional.dequantize_4bit(packed, state),
            }
            for key, value in want.items():
                got = seen[f"{model_dir.name}/{name.removesuffix('.weight')}.{key}"]
                if key == "packed":  # the last block may not be full
                    got = got.view(-1)[: packed.numel()]
                assert torch.equal(got, value.cpu()), (name, key)
            checked += 1
    assert checked == 2 * 3 * 7


@pytest.mark.parametrize("nproc", [1, 2, THREE, FOUR])
def test_initial_adapter_is_pefts(nproc, models, worked):
    """By name, shape and distribution; magnitudes are the norms of what bitsandbytes gives."""
    got, model_dir = load_file(worked[0](nproc) / "initial"), models["qwen2"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_dir))
    config = LoraConfig(r=16, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM")
    theirs = get_peft_model_state_dict(get_peft_model(model, config))
    assert {k: v.shape for k, v in got.items()} == {k: v.shape for k, v in theirs.items()}
    assert len(got) == 3 * 7 * 3 and all(v.dtype == torch.float32 for v in got.values())
    firsts = set()
    for name, value in got.items():
        if name.endswith("lora_A.weight"):
            bound = 1 / math.sqrt(value.shape[1])  # kaiming uniform with a = sqrt(5)
            assert value.abs().max() <= bound and value.abs().max() > 0.95 * bound
            assert abs(value.mean()) < 0.1 * bound
            firsts.add(value[0, 0].item())
        elif name.endswith("lora_B.weight"):
            assert not value.any()
    assert len(firsts) == 3 * 7  # no two begin alike
    for name, weight in linear_weights(model_dir).items():
        want = bnb.functional.dequantize_4bit(*quantize(weight)).float().norm(dim=1)
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_magnitude_vector"
        assert torch.equal(got[key], want.cpu()), name


def test_initial_adapter_is_the_same_on_any_number_of_processes(worked):
    first, *others = (load_file(worked[0](nproc) / "initial") for nproc in (1, 2))
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def reference(model_dir, adapter, rows_file, dtype, **variant):
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
    settings = {"target_modules": "all-linear", **variant}
    config = LoraConfig(r=4, lora_alpha=32, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(model, config).train()
    values = load_file(adapter)
    set_peft_model_state_dict(model, values)
    taken = get_peft_model_state_dict(model)
    assert taken.keys() == values.keys()
    assert all(torch.equal(taken[name].cpu(), values[name]) for name in values)
    rows = read_rows(rows_file, PreTrainedTokenizerFast.from_pretrained(model_dir))
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence([row[i] for row in rows], True, padding).to(DEVICE)
        for i, padding in enumerate((0, -100))
    )  # what pads a row comes after it, and nothing looks ahead
    # as trainers call it: outside of it PEFT computes adapters in fp32 beside a bf16 model
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids).logits[:, :-1].float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    grads = get_peft_model_state_dict(model, grads)  # by the names that files have
    return loss.item(), {n: grad.cpu() for n, grad in grads.items()}


def of_setting(got, setting):
    return {k.removeprefix(f"{setting}/"): v for k, v in got.items() if k.startswith(f"{setting}/")}


@pytest.mark.parametrize("kind", [
    "llama", pytest.param("qwen2", marks=pytest.mark.slow), "qwen2-dora"])
def test_loss_and_gradients_equal_transformers_and_peft(kind, models, worked):
    """With DoRA biases are there, which PEFT leaves alone; its magnitudes are gathered in fp32."""
    work, adapters, rows = worked
    model, variant = models[kind.removesuffix("-dora")], {"use_dora": "dora" in kind}
    got = of_setting(load_file(work(2) / kind), "float32")
    loss, exact = reference(model, adapters[kind], rows, torch.float32, **variant)
    assert len(exact) == 3 * 7 * (2 + ("dora" in kind)) and len(got) == 2 + len(exact)
    assert abs(got["loss"] - loss) <= 1e-5 * loss
    for name, grad in exact.items():
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.slow
def test_bf16_gradients_are_as_near_the_exact_ones_as_the_references(models, worked):
    """Both sides round some fifty times in a row, each in its own places: the reference's own
    gradients are 0.7 to 2.2 % (Frobenius) away from the exact ones. Ours must be as near; over
    models and rows, so that chance averages out."""
    work, adapters, rows = worked
    squares = {"theirs": 0.0, "ours": 0.0}
    for kind, adapter in adapters.items():
        model, variant = models[kind.removesuffix("-dora")], {"use_dora": "dora" in kind}
        got = of_setting(load_file(work(2) / kind), "bfloat16")
        _, exact = reference(model, adapter, rows, torch.float32, **variant)
        loss, theirs = reference(model, adapter, rows, torch.bfloat16, **variant)
        assert abs(got["loss"] - loss) <= 1e-3 * loss
        norm = torch.cat([g.flatten() for g in exact.values()]).norm()
        for who, grads in ("theirs", theirs), ("ours", got):
            distance = torch.cat([(grads[n] - exact[n]).flatten() for n in exact]).norm() / norm
            print(f"{kind}: bf16 gradients of {who}: {distance:.2%} from the exact ones")
            squares[who] += float(distance) ** 2
    assert squares["ours"] ** 0.5 <= 1.1 * squares["theirs"] ** 0.5


@pytest.mark.parametrize("nproc", [2, THREE])
def test_optimizer_over_shards_equals_one_process(nproc, worked):
    """Whole vectors, put together from all ranks and without padding, by its own step() at once."""
    ranks = [load_file(worked[0](nproc) / f"optimizer.{rank}") for rank in range(nproc)]
    n = int(ranks[0]["n_adapter"])

    def whole(name):
        return torch.cat([got[name] for got in ranks], 1)[:, :n].contiguous().to(DEVICE)

    padding = sum(got["0/before"].shape[1] for got in ranks) - n
    assert padding > 0
    alone = torch.nn.Parameter(whole("0/before"))
    whole_optimizer = make_optimizer(alone, Config())
    for step in range(4):
        alone.grad = whole(f"{step}/grad")
        assert alone.grad.abs().max() > 0
        rate = whole_optimizer.param_groups[0]["lr"] = ranks[0][f"{step}/rate"].item()
        assert rate > 0
        whole_optimizer.step()
        assert torch.equal(alone.data, whole(f"{step}/after")), step


def test_every_16_bit_pattern_survives_fsdp(worked):
    got = load_file(worked[0](2) / "patterns")
    for policy in "plain", "mixed", "offload":
        assert torch.equal(got[policy], got["expected"]), policy
        assert torch.equal(got[f"{policy}_codes"], got["expected_codes"]), policy
    wrong = (got["unprotected"] != got["expected"]).view(-1, 2).any(-1).sum()
    print(f"without the byte path {wrong} of 65,536 patterns change")
    assert (wrong > 0) == (DEVICE == "cuda")  # should it ever be 0 there, FourBitBlocks can go


# ------------------------------------------------------------------------------------------------
# The vocabulary
# ------------------------------------------------------------------------------------------------


def vocabulary_tables(model_dir, dtype):
    tensors = load_file(model_dir / "model.safetensors")
    names = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
    return [tensors[name].to(dtype) for name in names]


def rms_norm(x, weight, eps):
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.mark.parametrize("nproc", [1, 2, THREE])
def test_sharded_vocabulary_equals_embedding_and_cross_entropy(nproc, models, worked):
    """17 tokens a rank, some without a label, whole and in chunks."""
    got = of_setting(load_file(worked[0](nproc) / "vocabulary"), "float32")
    embedding, head, norm = vocabulary_tables(models["llama"], torch.float32)
    hidden = got["hidden"].requires_grad_()
    logits = F.linear(rms_norm(hidden, norm, 1e-6), head)
    want = F.cross_entropy(logits, got["labels"], ignore_index=-100, reduction="sum")
    (grad,) = torch.autograd.grad(want * 0.25, hidden)
    for chunk in "8", "all", "one":
        assert torch.equal(got[f"{chunk}/embedded"], embedding[got["ids"]])
        torch.testing.assert_close(got[f"{chunk}/loss"], want, rtol=1e-6, atol=0)
        torch.testing.assert_close(got[f"{chunk}/grad"], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nproc", [1, 2, THREE])
def test_large_logits_of_a_sharded_vocabulary_do_not_overflow(nproc, models, worked):
    """The largest is among the rows of one rank; exp() of what others lack to it is 0."""
    got = of_setting(load_file(worked[0](nproc) / "vocabulary"), "float32")
    _, head, norm = vocabulary_tables(models["llama"], torch.float32)
    hidden = got["hidden"].requires_grad_()
    logits = F.linear(rms_norm(hidden, norm, 1e-6), 1000 * head)
    tops = torch.stack([part.amax(-1) for part in logits.chunk(2, -1)])
    assert tops.diff(dim=0).abs().max() > 200
    want = F.cross_entropy(logits, got["labels"], ignore_index=-100, reduction="sum")
    (grad,) = torch.autograd.grad(want * 0.25, hidden)
    torch.testing.assert_close(got["large/loss"], want, rtol=1e-5, atol=0)
    assert (got["large/grad"] - grad).norm() <= 1e-4 * grad.norm()


@pytest.mark.parametrize("nproc", [1, 2, THREE])
def test_heads_gradient_is_rounded_once(nproc, models, worked):
    """In bf16: from the rounded gradient of the logits on, products and sums over ranks are fp32,
    and only what goes to the last layer is rounded again."""
    got = of_setting(load_file(worked[0](nproc) / "vocabulary"), "bfloat16")
    embedding, head, norm = vocabulary_tables(models["llama"], torch.bfloat16)
    hidden, labels = got["hidden"].detach(), got["labels"]
    logits = F.linear(rms_norm(hidden, norm, 1e-6), head).float()
    trained = labels != -100
    hit = F.one_hot(labels.clamp(min=0), len(head))
    at_logits = ((logits.softmax(-1) - hit) * trained[:, None]).bfloat16()
    x = hidden.double().requires_grad_()
    normed = norm.double() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    (exact,) = torch.autograd.grad(normed, x, at_logits.double() @ head.double())
    once = (exact.bfloat16() - exact).norm()
    for chunk in "8", "all", "one":
        assert torch.equal(got[f"{chunk}/embedded"], embedding[got["ids"]])
        away = (4 * got[f"{chunk}/grad"].double() - exact).norm()  # a quarter is exact
        print(f"{chunk}: {away / exact.norm():.2e} away, rounded once {once / exact.norm():.2e}")
        assert away <= 1.1 * once


# ------------------------------------------------------------------------------------------------
# Whole runs
# ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_model(tiny_model):
    """So small that a CPU without bf16 products is quick with it, too."""
    sizes = dict(hidden_size=128, intermediate_size=160, num_hidden_layers=2)
    # heads of 64, which any build of flash-attn knows
    return tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, **sizes)


@pytest.fixture(scope="module")
def small_runs(small_model, tmp_path_factory, run_jobs, request):
    """small_runs(nproc, name): the directory of one of these runs on `nproc` processes."""
    base, done = tmp_path_factory.mktemp("small-runs"), set()
    write_rows(base / "rows.jsonl", 64)
    flags = ["--model", str(small_model), "--dataset", "rows.jsonl", "--learning_rate", "1e-3"]
    cut = [*flags, "--max_steps", "6", "--save_every", "3", "--batch_size", "12"]
    cut += ["--compute_dtype", "float32"]
    same = [*flags, "--max_steps", "5", "--batch_size", "8"]
    micro_batches = {1: "300", 2: "80", 4: "80"}  # the longest row has 71

    dtypes = {params.get("dtype") for params in selected_params(request)}

    def make(nproc):
        jobs = {}
        if nproc != 3:
            for dtype in dtypes - {None}:
                jobs[f"{dtype}-{nproc}"] = {
                    "argv": [
                        *same,
                        "--compute_dtype",
                        dtype,
                        "--micro_batch_tokens",
                        micro_batches[nproc],
                    ]
                }
        if nproc == 2:
            jobs["whole-2"] = {"argv": cut}
        elif nproc < 4:
            name = f"resumed-{nproc}"
            before = f"cp -r whole-2 {name}; rm -r {name}/checkpoint-000006 {name}/adapter_*"
            looked = f"rm -rf looked-{nproc}; cp -r {name} looked-{nproc}"
            looked += f"; rm -rf looked-{nproc}/checkpoint-000006 looked-{nproc}/adapter_*"
            jobs[name] = {"argv": [*cut, "--resume"], "before": before}
            jobs[f"looked-{nproc}"] = {"case": "resumed", "out": str(base / f"state-{nproc}"),
                                       "argv": [*cut, "--resume"], "before": looked}  # fmt: skip
        for name, job in jobs.items():
            job["argv"] += ["--output_dir", name, "--shard_group_size", str(nproc)]
        run_jobs(nproc, jobs.values(), cwd=base)

    def work(nproc, name):
        for n in (2, nproc):  # the runs of two are what others go on with
            needs_ranks(n)
            if n not in done:
                done.add(n)
                make(n)
        return base / f"{name}-{nproc}"

    return work


@pytest.mark.parametrize("nproc", [2, FOUR])
@pytest.mark.parametrize("dtype, bar", [
    ("float32", 1e-4), pytest.param("bfloat16", 5e-3, marks=pytest.mark.slow)])
def test_same_losses_whatever_the_processes_and_micro_batches(
    dtype, bar, nproc, small_runs, read_metrics
):
    first, run = (read_metrics(small_runs(n, dtype)) for n in (1, nproc))
    assert len(first) == 5 and first[-1]["loss"] < first[0]["loss"]
    gaps = [abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(first, run, strict=True)]
    print(f"{dtype} {nproc}: largest gap {max(gaps):.1e}")
    assert max(gaps) <= bar, gaps
    for key in "loss_tokens", "tokens", "rows":
        assert [r[key] for r in run] == [r[key] for r in first]
    assert any(a["micro_batches"] != b["micro_batches"] for a, b in zip(first, run))


def saved_state(checkpoint):
    """{key: [layers, n]}, padded to what the ranks shared evenly."""
    return load_file(checkpoint / "optimizer.safetensors")


def check_state(got, want):
    """After step 3 a run goes on with a checkpoint's state, but for padding."""
    assert got.pop("done").tolist() == [3, 3] and got.keys() == want.keys()
    for key, value in got.items():
        assert len(value) == 2 and value.shape[1] > 10 and (value != value[0, 0]).any()
        assert torch.equal(value, want[key][:, : value.shape[1]]), key
        assert want[key].shape[1] - value.shape[1] < 2 * 256  # that was padding


@pytest.mark.parametrize("nproc", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_resume_on_another_number_of_processes(nproc, small_runs, read_metrics):
    """Two processes' state is cut elsewhere, and nothing else happens to it."""
    checkpoint = small_runs(2, "whole") / "checkpoint-000003"
    want, got = saved_state(checkpoint), load_file(small_runs(nproc, "state"))
    got.pop("planned")
    check_state(got, want)
    whole, resumed = (read_metrics(small_runs(*run)) for run in ((2, "whole"), (nproc, "resumed")))
    gaps = [abs(a["loss"] - b["loss"]) / a["loss"] for a, b in zip(whole, resumed, strict=True)]
    print(f"resumed on {nproc}: gaps {gaps}")
    assert gaps[:3] == [0, 0, 0] and max(gaps) <= 1e-5


def test_another_optimizer_resumes_too(small_model, run_jobs, read_metrics, tmp_path):
    """That of docs/internals.md: on as many processes to the last bit, on more or fewer with the
    same state, cut elsewhere."""
    needs_ranks(2)
    page = (ROOT / "docs" / "internals.md").read_text()
    (adamw,) = re.findall("```python\n(Optimizer = .*?)```", page, re.S)
    write_rows(tmp_path / "rows.jsonl", 16)
    flags = ["--model", str(small_model), "--dataset", "rows.jsonl", "--max_steps", "6",
             "--save_every", "3", "--batch_size", "4", "--compute_dtype", "float32",
             "--lora_rank", "2"]  # 15 blocks of state a layer, which two pad  # fmt: skip

    def run(nproc, name, begun=None, **job):
        argv = [*flags, "--shard_group_size", str(nproc), "--output_dir", name]
        if begun:
            job["before"] = f"cp -r {begun} {name}; rm -r {name}/checkpoint-000006 {name}/adapter_*"
        return {"optimizer": adamw, "deterministic": True, **job, "argv": argv}

    def look(nproc, name, begun):
        return run(nproc, name, begun, case="resumed", out=str(tmp_path / f"state-{nproc}"))

    run_jobs(1, [run(1, "whole-1"), run(1, "resumed-1", "whole-1")], cwd=tmp_path)
    run_jobs(2, [run(2, "whole-2"), run(2, "resumed-2", "whole-2"), look(2, "more", "whole-1")],
             cwd=tmp_path)  # fmt: skip
    run_jobs(1, [look(1, "fewer", "whole-2")], cwd=tmp_path)
    refused = run(1, "refused", "whole-1", optimizer=adamw.replace("AdamW", "SGD"))
    _, err = run_jobs(1, [refused], cwd=tmp_path, code=7)
    assert "checkpoint-000003 is of another optimizer: it has exp_avg, exp_avg_sq;" in err
    for nproc in 1, 2:
        whole, resumed = (tmp_path / f"{name}-{nproc}" for name in ("whole", "resumed"))
        for name in "adapter_model.safetensors", "checkpoint-000006/optimizer.safetensors":
            assert (whole / name).read_bytes() == (resumed / name).read_bytes(), name
        losses, again = ([r["loss"] for r in read_metrics(run)] for run in (whole, resumed))
        assert losses == again and len(losses) == 6
        got = load_file(tmp_path / f"state-{nproc}")
        # the plan knows of it: two values in fp32
        assert got.pop("planned") == 8 * got["exp_avg"].numel() // nproc
        check_state(got, saved_state(tmp_path / f"whole-{3 - nproc}" / "checkpoint-000003"))


@pytest.mark.chaos
def test_resumed_run_equals_the_uninterrupted_one(
    run_jobs, run_training, read_metrics, tiny_model, tmp_path
):
    """Resumed in new processes, by torchrun."""
    model = tiny_model("llama", num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=2)
    write_rows(tmp_path / "rows.jsonl", 16)
    flags = ["--model", str(model), "--dataset", "rows.jsonl", "--shard_group_size", "2",
             "--max_steps", "6", "--save_every", "3", "--batch_size", "4", "--lora_dropout", "0.1",
             "--output_dir"]  # fmt: skip
    run_jobs(2, [{"argv": [*flags, "whole"], "deterministic": True}], cwd=tmp_path)
    whole = read_metrics(tmp_path / "whole")
    (tmp_path / "whole").rename(tmp_path / "broken-off")
    broken_off = tmp_path / "broken-off"
    expected = load_file(broken_off / "adapter_model.safetensors")
    for name in "adapter_model.safetensors", "adapter_config.json":
        (broken_off / name).unlink()
    # the newest checkpoint is torn, as by a full disk: the one before it must be taken
    torn = broken_off / "checkpoint-000006"
    (torn / "optimizer.safetensors").write_bytes(b"")
    job = {"argv": [*flags, "broken-off", "--resume"], "deterministic": True}
    (tmp_path / "0.json").write_text(json.dumps([job]))
    result = run_training([tmp_path], nproc=2, cwd=tmp_path, script=SEVERAL)
    assert result.returncode == 0, result.stderr
    assert "checkpoint-000003 at step 3 of" in result.stdout
    resumed = read_metrics(broken_off)
    got = load_file(broken_off / "adapter_model.safetensors")
    assert expected.keys() == got.keys() and len(got) == 2 * 7 * 2
    assert all(torch.equal(expected[k], got[k]) for k in got)
    assert any(v.abs().max() > 0 for k, v in got.items() if "lora_B" in k)
    for key in "step", "loss", "grad_norm", "learning_rate", "tokens", "micro_batches":
        assert [r[key] for r in resumed] == [r[key] for r in whole]


def test_learning_rate_warms_up_and_falls_to_nearly_nothing():
    config = Config(max_steps=100, learning_rate=1.0)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:3] == [1 / 3, 2 / 3, 1.0]
    assert rates == sorted(rates[:3]) + sorted(rates[3:], reverse=True)
    assert 0 < rates[-1] < 1e-3
    assert learning_rate(1, Config(max_steps=1, learning_rate=0.5)) == 0.5
