"""merge_adapters.py, by its command line, against bitsandbytes, transformers and PEFT themselves.

One run of the real training script on two processes is shared by the tests of this file.
"""

import contextlib
import copy
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import transformers
from conftest import DEVICE, ROOT, SEVERAL
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    BitsAndBytesConfig,
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import merge_adapters
from fsdp_qlora.data.tokenizer_files import generation_settings
from fsdp_qlora.files import digest, json_digest
from fsdp_qlora.merge import compare_logits, open_run
from fsdp_qlora.merge.adapter_without_run import bare_name, slices_by_linear
from fsdp_qlora.merge.trained_run import TrainedRun
from fsdp_qlora.pretrained.model_directory import base_digest, copy_small_files
from fsdp_qlora.pretrained.weight_formats import NF4_STATE
from fsdp_qlora.run.run_results import DIGESTED_FILES

STEPS = 15
ROWS = [
    {"prompt": f"What is {a} plus {b}?\n", "completion": f"The answer is {a + b}."}
    for a in range(4)
    for b in range(4)
]
TARGETS = ["q_proj", "v_proj", "down_proj"]  # so that layers without an adapter are there too


def call(command, cwd, **env):
    """Run a command without a GPU; returns its CompletedProcess with text output."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **env}
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, cwd=cwd, env=env, **options)


def merge_command(run, output, *flags):
    script = [sys.executable, str(ROOT / "merge_adapters.py")]
    return [*script, "--adapter_dir", str(run), "--output_dir", str(output), *flags]


def load_4bit(base, dtype=torch.bfloat16):
    """The base as training had it, by transformers alone, with all else in `dtype`."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantization, dtype=dtype, device_map={"": "cpu"}
    )


@torch.no_grad()
def logits_of(model, rows):
    model.train()  # no dropout here; in eval mode bitsandbytes may take a less exact kernel
    return torch.cat([model(torch.tensor([row])).logits[0].float() for row in rows])


def loss_in_peft(base, adapter):
    """Of ROWS, by PEFT on the 4-bit base in fp32: its own loss in bf16 is up to 0.4 % from that."""
    model = PeftModel.from_pretrained(load_4bit(base, torch.float32), adapter)
    tokenizer, loss, tokens = PreTrainedTokenizerFast.from_pretrained(base), 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logits = logits_of(model, [prompt + answer])[len(prompt) - 1 : -1]
        target = torch.tensor(answer)
        loss += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
        tokens += len(answer)
    return loss / tokens


def nf4_and_back(weight, device="cpu"):
    """A whole weight through bitsandbytes' own layer, whose last bits depend on the device."""
    layer = bnb.nn.Linear4bit(
        *reversed(weight.shape), bias=False, quant_type="nf4", compress_statistics=True
    )
    layer.load_state_dict({"weight": weight.bfloat16()})
    layer = layer.to(torch.bfloat16).to(device)
    assert layer.weight.quant_state is not None
    return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state).cpu()


def tree(path):
    """What is in a directory: {relative path: time of last change}."""
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in sorted(path.rglob("*"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_jobs):
    """A run directory of two processes on a CPU: 16 rows, all of them in every step."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    argv = ["--output_dir", "run", "--dataset", "data.jsonl", "--batch_size", "16", "--max_steps",
            str(STEPS), "--save_every", str(STEPS - 1), "--target_modules", *TARGETS]  # fmt: skip
    if DEVICE == "cpu":
        out, _ = run_jobs(2, [{"argv": argv}], cwd=directory)
    else:  # the session's launch has the GPUs
        (directory / "0.json").write_text(json.dumps([{"argv": argv}]))
        result = call([sys.executable, SEVERAL, directory, "2"], directory)
        assert result.returncode == 0, result.stderr[-3000:]
        out = result.stdout
    (directory / "stdout").write_text(out)
    return directory / "run"


@pytest.fixture(scope="module")
def unsummed(trained, tmp_path_factory):
    """The run without checkpoints and without sums of the base's tensors."""
    run = tmp_path_factory.mktemp("unsummed") / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    described = json.loads((run / "train_config.json").read_text())
    described["quantization"]["tensor_sums"] = {}
    (run / "train_config.json").write_text(json.dumps(described))
    sign(run)
    return run


def sign(run):
    """Give a run the digests of what its files hold now, also of its base, if they can be read."""
    path = run / "train_config.json"
    if not (path.is_file() and path.read_text().startswith("{\"") and path.stat().st_size < 10**5):
        return
    described = {k: v for k, v in json.loads(path.read_text()).items() if k not in DIGESTED_FILES}
    described.pop("sha256", None)
    if Path(described["base_model"]).is_dir():
        described["base_sha256"] = base_digest(Path(described["base_model"]))
    described["sha256"] = json_digest(described)
    for key, name in DIGESTED_FILES.items():
        described |= {key: digest(run / name)} if (run / name).is_file() else {}
    path.write_text(json.dumps(described))


MERGER = """
import os, signal, sys
import merge_adapters

def die(*args):
    print("holding", flush=True)
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)

print("ready", flush=True)
while line := sys.stdin.readline():
    run, out, end = line.split()
    if end == "dies":
        merge_adapters.add_adapter = die
    try:
        merge_adapters.main(["--adapter_dir", run, "--output_dir", out, "--no-check"])
        print("won", flush=True)
    except SystemExit:
        print("lost", flush=True)
"""


@pytest.fixture(scope="module")
def merger():
    """A process that merges what it is told to, line by line."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", MERGER], env=env, text=True, **pipes)
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def merged(trained):
    """The merged model's directory and what the merge printed, by the flags of the command that
    training ended with, from the folder that it was started in. By itself: test_package.py."""
    _, script, *argv = shlex.split((trained.parent / "stdout").read_text().splitlines()[-1])
    assert script.endswith("merge_adapters.py")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(
            io.StringIO()) as printed:  # fmt: skip
        patch.chdir(trained.parent)
        merge_adapters.main([*argv, "--device", "cpu"])
    return trained / "merged", printed.getvalue()


@pytest.fixture(scope="module")
def probes(trained):
    return json.loads((trained / "train_config.json").read_text())["probe_input_ids"]


@pytest.fixture(scope="module")
def noted(trained):
    """Logits of the run without and with the adapter, from what training has noted."""
    states = load_file(trained / "probe.safetensors")
    head = load_file(trained / "demo" / "model" / "model.safetensors")["lm_head.weight"]
    return [(states[name] @ head.t()).float() for name in ("without_adapter", "with_adapter")]


@pytest.fixture(scope="module")
def reference(trained, probes):
    """Logits of the 4-bit base without and with the adapter."""
    model = load_4bit(trained / "demo" / "model")
    plain = logits_of(model, probes)
    return plain, logits_of(PeftModel.from_pretrained(model, trained), probes)


def test_adapter_reproduces_training_loss(trained):
    # the adapter of one step less: a step's loss is taken before its update
    checkpoint = trained / f"checkpoint-{STEPS - 1:06d}"
    loss = loss_in_peft(trained / "demo" / "model", checkpoint)
    *_, last = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    assert last["step"] == STEPS
    print(f"loss {loss:.5f} with PEFT, {last['loss']:.5f} in training")
    assert loss == pytest.approx(last["loss"], rel=2e-3)


def test_training_notes_what_peft_gives(noted, reference):
    """And PEFT's 4-bit model, without the adapter and with it, takes no part in the run."""
    effect = (reference[1] - reference[0]).norm()
    errors = [float((got - want).norm() / effect) for got, want in zip(noted, reference)]
    print(f"errors relative to the adapter's effect: {errors}")
    assert max(errors) < 0.02


@pytest.mark.slow
def test_merged_model_needs_no_bitsandbytes(trained, merged, probes, reference, noted, tmp_path):
    (tmp_path / "bitsandbytes.py").write_text("raise ImportError('not here')\n")
    script = f"""
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
try:
    import bitsandbytes
except ImportError:
    model = AutoModelForCausalLM.from_pretrained({str(merged[0])!r})
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        rows = [model(torch.tensor([row])).logits[0].float() for row in {probes}]
    save_file({{"logits": torch.cat(rows)}}, "logits.safetensors")
    assert AutoTokenizer.from_pretrained({str(merged[0])!r}).chat_template
"""
    result = call([sys.executable, "-c", script], tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    logits = load_file(tmp_path / "logits.safetensors")["logits"]
    plain, adapted = reference
    error = float((logits - adapted).norm() / (adapted - plain).norm())
    print(f"error relative to the adapter's effect: {error:.4f}")
    assert error < 0.20  # the promise
    assert error < 0.02  # bf16 rounding for this adapter: 2**-8 and what the layers add to it
    reported = float(re.search(r"differ by ([\d.]+) % of", merged[1])[1]) / 100
    error = float((logits - noted[1]).norm() / (noted[1] - noted[0]).norm())
    assert reported == pytest.approx(error, rel=0.01)


def test_weights_equal_bitsandbytes(trained, merged):
    base = load_file(trained / "demo" / "model" / "model.safetensors")
    adapter = load_file(trained / "adapter_model.safetensors")
    result = load_file(merged[0] / "model.safetensors")
    assert result.keys() == base.keys()
    n_adapters = 0
    for name, weight in base.items():
        want, prefix = weight, f"base_model.model.{name.removesuffix('.weight')}"
        if "_proj." in name:
            want = nf4_and_back(weight)
            assert not torch.equal(want, weight)
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = (adapter[f"{prefix}.lora_{x}.weight"] for x in "AB")
            want = (want.float() + 32 / 16 * (b @ a)).bfloat16()
            n_adapters += 1
        assert result[name].dtype == torch.bfloat16 and torch.equal(result[name], want), name
    assert n_adapters == 4 * len(TARGETS)


def test_adapter_alone_is_merged_as_the_run_is(trained, merged, tmp_path):
    """Of some linears: those without an adapter go through NF4 as well."""
    for name in "adapter_config.json", "adapter_model.safetensors":
        (tmp_path / "adapter").mkdir(exist_ok=True)
        shutil.copy(trained / name, tmp_path / "adapter")
    base = trained / "demo" / "model"
    flags = ["--base_model", str(base), "--device", "cpu"]  # as what it is compared with
    merge_adapters.main(merge_command(tmp_path / "adapter", tmp_path / "out", *flags)[2:])
    found, wanted = (load_file(d / "model.safetensors") for d in (tmp_path / "out", merged[0]))
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def test_peft_adapter_of_some_layers_is_merged(trained, tmp_path):
    """Also when adapter_config.json names the layers; all others go through NF4 as well."""
    base = trained / "demo" / "model"
    lora = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), lora)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.lora_B["default"].weight.data.normal_()
    model.save_pretrained(tmp_path / "adapter")
    flags = ["--base_model", str(base), "--device", "cpu"]  # as what it is compared with
    merge_adapters.main(merge_command(tmp_path / "adapter", tmp_path / "out", *flags)[2:])
    result = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in load_file(base / "model.safetensors").items():
        want = nf4_and_back(weight) if "_proj." in name else weight
        if name == "model.layers.1.self_attn.q_proj.weight":  # PEFT knows the scaling
            want = (want.float() + layer.get_delta_weight("default")).bfloat16()
        assert torch.equal(result[name], want), name


def test_template_beside_an_adapter_is_its(trained, tmp_path):
    """TRL saves the tokenizer with the adapter: by .jinja, older versions in its settings."""
    base, adapter = trained / "demo" / "model", tmp_path / "adapter"
    adapter.mkdir()
    for name in "adapter_config.json", "adapter_model.safetensors":
        shutil.copy(trained / name, adapter)
    for i, (name, text) in enumerate([
        ("tokenizer_config.json", "{}"), ("tokenizer_config.json", '{"chat_template": "its"}'),
        ("chat_template.jinja", "newer")
    ]):  # fmt: skip
        (adapter / name).write_text(text)
        flags = ["--base_model", str(base)]
        merge_adapters.main(merge_command(adapter, tmp_path / f"out-{i}", *flags)[2:])
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / f"out-{i}")
        its = AutoTokenizer.from_pretrained(base).chat_template
        assert tokenizer.chat_template == [its, "its", "newer"][i]


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU this rate ends in NaN")
def test_run_that_ended_worse_than_it_began_is_not_fine(
        trained, merged, run_main, tmp_path, capsys):
    """A rate of 5, on a base that knows its rows; the model is written all the same."""
    code, _, err = run_main(
        "--model", merged[0], "--dataset", trained.parent / "data.jsonl", "--batch_size", 4,
        "--max_steps", 8, "--learning_rate", 5, "--report_to", "none", "--save_every", 2,
        "--keep_checkpoints", 9, "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    capsys.readouterr()
    merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    *_, load, verdict = capsys.readouterr().out.splitlines()
    assert load.endswith(f'from_pretrained("{tmp_path}/out")') and (tmp_path / "out").is_dir()
    assert re.fullmatch(r"warning: the loss ended at [\d.]+, above the initial [\d.]+;"
                        r" ok: the merged model matches the trained one, to [\d.]+ % .*", verdict)
    # of a checkpoint only the steps until it count
    losses = [1.0] * 5 + [9.0] * 3
    lines = [json.dumps({"step": i, "loss": loss}) for i, loss in enumerate(losses, 1)]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join([*lines, "torn"]))
    for step, begins in (4, "not checked: "), (8, "warning: the loss ended at 9, above the "):
        run = tmp_path / "run" / f"checkpoint-{step:06d}"
        merge_adapters.main(merge_command(run, tmp_path / f"out-{step}", "--no-check")[2:])
        assert capsys.readouterr().out.splitlines()[-1].startswith(begins)


def test_how_to_prompt_is_printed(trained, unsummed, tmp_path, capsys):
    """As training has rendered its rows, in one line before the verdict; nothing where that is the
    template as it is. Also from the key that earlier runs have."""
    run = shutil.copytree(trained, tmp_path / "run")
    variables = {"enable_thinking": False}
    cases = ("template_kwargs", {}), ("template_kwargs", variables), ("asked", variables)
    for i, (key, kwargs) in enumerate(cases):
        config = json.loads((unsummed / "train_config.json").read_text())
        del config["template_kwargs"]
        config[key] = [{"answers": 4, "chat_template_kwargs": kwargs}]
        (run / "train_config.json").write_text(json.dumps(config))
        sign(run)
        capsys.readouterr()
        flags = ["--no-check", "--base_model", str(run / "demo" / "model")]
        merge_adapters.main(merge_command(run, tmp_path / f"out-{i}", *flags)[2:])
        line = capsys.readouterr().out.splitlines()[-2]
        begins = "serve with the template variables used in training: "
        assert line.startswith(begins) == bool(kwargs), key
        if kwargs:
            assert "(messages, add_generation_prompt=True, enable_thinking=False)" in line
            assert line.endswith('"chat_template_kwargs": {"enable_thinking": false}')


def test_files(trained, merged):
    base = trained / "demo" / "model"
    assert {p.name for p in merged[0].iterdir()} == {
        *(p.name for p in base.iterdir()), "model.safetensors.index.json"
    }  # fmt: skip
    for path in merged[0].iterdir():
        assert path.stat().st_mode & 0o777 == 0o644, path
        if path.suffix == ".jinja" or path.name.startswith(("tokenizer", "generation")):
            text = (base / path.name).read_text()  # a name that transformers 4 knows, too
            text = text.replace("TokenizersBackend", "PreTrainedTokenizerFast").rstrip()
            assert path.read_text().rstrip() == text
    index = json.loads((merged[0] / "model.safetensors.index.json").read_text())
    tensors = load_file(merged[0] / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(tensors, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in tensors.values())
    config = json.loads((merged[0] / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert {p.name for p in trained.glob(".*")} <= {".lock"}  # which is the training's
    *_, load, verdict = merged[1].splitlines()
    assert load.endswith('AutoModelForCausalLM.from_pretrained("run/merged")')
    assert re.fullmatch(r"ok: the merged model matches the trained one, to [\d.]+ % of .*", verdict)


def test_chat_template_is_that_of_training(trained, unsummed, tmp_path):
    """Where it was given by --chat_template, also where a checkpoint is merged, and then alone;
    else the base's, with others by name. generation_config.json is the run's, if it has one."""
    run = shutil.copytree(trained, tmp_path / "run")
    shutil.copyfile(unsummed / "train_config.json", run / "train_config.json")
    (run / "generation_config.json").write_text('{"eos_token_id": [2, 1]}')
    other = run / "demo" / "model" / "additional_chat_templates" / "tool_use.jinja"
    other.parent.mkdir()
    other.write_text("of tools")
    (run / "chat_template.jinja").write_text("of training")
    config = json.loads((run / "train_config.json").read_text())
    for i, (adapter, given) in enumerate([
        (run, None), (run, "its.jinja"), (run / f"checkpoint-{STEPS:06d}", "its.jinja")
    ]):  # fmt: skip
        config["config"]["chat_template"] = given
        (run / "train_config.json").write_text(json.dumps(config))
        sign(run)
        out = tmp_path / f"out-{i}"
        base = run / "demo" / "model"
        merge_adapters.main(
            merge_command(adapter, out, "--no-check", "--base_model", str(base))[2:])  # fmt: skip
        assert (out / other.relative_to(base)).exists() == (given is None)
        is_its = (out / "chat_template.jinja").read_text() == "of training"
        assert is_its == (given is not None)
        assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [2, 1]}


def test_checkpoint_merges_alike(trained, merged, tmp_path):
    run = trained / f"checkpoint-{STEPS:06d}"
    merge_adapters.main(merge_command(run, tmp_path / "out", "--no-check")[2:])
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (merged[0] / name).read_bytes()


def write_train_config(run, base, lora, target_modules, **quantization):
    """What training writes beside an adapter that PEFT saved in `run`."""
    config = {
        "lora_rank": lora.r, "lora_alpha": lora.lora_alpha, "target_modules": target_modules,
        "adapter": "rslora" if lora.use_rslora else "lora", "random_weights": False,
    }  # fmt: skip
    quantization = {
        "quant_type": "nf4", "blocksize": 64, "double_quant": True, "nested_blocksize": 256,
        "quantized_from_dtype": "bfloat16", "prequantized": False, "device": "cpu",
        "tensor_sums": {}, **quantization,
    }  # fmt: skip
    probes = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(0)).tolist()
    content = {"config": config, "quantization": quantization, "probe_input_ids": probes}
    (run / "train_config.json").write_text(json.dumps({"base_model": str(base), **content}))


LINEAR_OF_LAYER = r"model\.(language_model\.)?layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight"


@torch.no_grad()
def write_probe(run, base, auto_class=AutoModelForCausalLM):
    """What training notes beside an adapter, by PEFT on the base as training has it."""
    rows = json.loads((run / "train_config.json").read_text())["probe_input_ids"]
    model = auto_class.from_pretrained(base, dtype=torch.bfloat16)
    for name, p in model.named_parameters():
        if re.fullmatch(LINEAR_OF_LAYER, name):
            p.data = nf4_and_back(p.data)
    states = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda module, inputs: states.append(inputs[0][0]))  # fmt: skip
    logits_of(model, rows)
    logits_of(PeftModel.from_pretrained(model, run), rows)
    halves = torch.cat(states).chunk(2)
    probe = {"without_adapter": halves[0].clone(), "with_adapter": halves[1].clone()}
    save_file(probe, run / "probe.safetensors")
    sign(run)


@pytest.fixture
def qwen(tmp_path):
    """A run made by PEFT alone: a tied fp16 base in several files with attention biases, whose
    adapter is by rsLoRA. `scale` of the B matrices decides the adapter's effect."""

    def make(scale):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
            initializer_range=0.1,
        )  # fmt: skip
        model = Qwen2ForCausalLM(config)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.data.normal_()
        model.half().save_pretrained(tmp_path / "base", max_shard_size="60KB")
        lora = LoraConfig(
            r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], use_rslora=True,
            task_type="CAUSAL_LM",
        )  # fmt: skip
        model = get_peft_model(model.float(), lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, scale)
        model.save_pretrained(tmp_path / "run")
        names = ["q_proj", "up_proj"]
        write_train_config(tmp_path / "run", tmp_path / "base", lora, names, device="cuda")
        write_probe(tmp_path / "run", tmp_path / "base")
        return model

    return make


def test_tied_sharded_fp16_base(qwen, tmp_path, capsys):
    model = qwen(0.1)
    out = tmp_path / "out"
    merge_adapters.main(merge_command(tmp_path / "run", out, "--device", "cpu")[2:])
    text = capsys.readouterr().out
    assert "trained on cuda, merging on cpu" in text
    print(error := float(re.search(r"differ by ([\d.]+) % of", text)[1]) / 100)
    assert error < 0.05
    shards = sorted(p.name for p in (tmp_path / "base").glob("*.safetensors"))
    assert len(shards) > 2 and shards == sorted(p.name for p in out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    for name in shards:
        assert {k for k, v in index["weight_map"].items() if v == name} == {*load_file(out / name)}
    result = {k: v for name in shards for k, v in load_file(out / name).items()}
    assert "lm_head.weight" not in result
    layers = dict(model.base_model.model.named_modules())
    for name, weight in model.base_model.model.state_dict().items():
        plain = name.replace(".base_layer", "")
        if ".lora_" in name or name == "lm_head.weight":
            continue
        want = weight.half().bfloat16()
        if "_proj.base_layer.weight" in name or "_proj.weight" in name:
            want = nf4_and_back(want).float()
        if name.endswith(".base_layer.weight"):  # PEFT knows the scaling
            want += layers[name.removesuffix(".base_layer.weight")].get_delta_weight("default")
        assert result[plain].dtype == torch.bfloat16
        assert torch.equal(result[plain], want.bfloat16()), name
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "head_dim": 16,
}  # fmt: skip
MISTRAL3 = {
    "text_config": {**SMALL, "model_type": "mistral", "head_dim": 16}, "vision_config": VISION,
    "image_token_index": 63, "tie_word_embeddings": False,
}  # fmt: skip
OLD_NAMES = {
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.", "model.multi_modal": "multi_modal",
}  # fmt: skip
IN_TEXT = r"model\.language_model\.layers\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)"
GEMMA4 = {
    "text_config": {**SMALL, "model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32,
                    "layer_types": ["sliding_attention", "full_attention"],
                    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    "vision_config": {**VISION, "model_type": "gemma4_vision", "standardize": True},
}  # fmt: skip
GLM4V = {
    "text_config": {**SMALL, "model_type": "glm4v_text", "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5}},
    "vision_config": {**VISION, "model_type": "glm4v_vision", "depth": 1, "num_heads": 2},
}  # fmt: skip
# config's settings, target modules, linear layers in decoder layers, new names' old ones
FAMILIES = {
    "gemma2": ({**SMALL, "head_dim": 24}, ["o_proj", "up_proj"], 14, {}),
    "cohere": ({**SMALL, "use_qk_norm": True}, ["q_proj", "down_proj"], 14, {}),
    "phi3": ({**SMALL, "num_key_value_heads": 4}, ["qkv_proj", "gate_up_proj"], 8, {}),
    "mistral3": (MISTRAL3, IN_TEXT, 14, OLD_NAMES),
    "mistral3 by its new names": (MISTRAL3, IN_TEXT, 14, {}),
    "gemma4": (GEMMA4, IN_TEXT, 13, {}),
    "glm4v": (GLM4V, IN_TEXT, 12, {}),
}


@pytest.fixture
def family(tmp_path):
    """Function (case): a run made by PEFT for one of FAMILIES, on a base whose files have its old
    names. Returns {module's weight: its LoRA layer or None} of the decoder layers' linears, and
    {name in the files: (weight's name in transformers, weight)}."""

    def make(case):
        torch.manual_seed(0)
        settings, targets, n_linears, old_names = FAMILIES[case]
        config = AutoConfig.for_model(case.split()[0], **settings)
        auto = AutoModelForImageTextToText if "text_config" in settings else AutoModelForCausalLM
        model = auto.from_config(config).bfloat16()
        stored, saved = {}, model.state_dict().keys()
        buffers = ((name, x) for name, x in model.named_buffers() if name in saved)
        for name, p in (*model.named_parameters(), *buffers):
            if "norm" in name or "scalar" in name:
                p.data += 0.3 * torch.randn_like(p)
            new = next(filter(name.startswith, old_names), "")
            stored[old_names.get(new, "") + name.removeprefix(new)] = name, p.detach().clone()
        model.save_pretrained(tmp_path / "base")  # for its config
        tensors = {name: p for name, (_, p) in stored.items()}
        save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
        lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
        model = get_peft_model(model.float(), lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1)
        model.save_pretrained(tmp_path / "run")
        modules = [(f"{n}.weight", m) for n, m in model.base_model.model.named_modules()]
        layers = {n: m for n, m in modules if re.fullmatch(LINEAR_OF_LAYER, n)}
        assert len(layers) == n_linears
        names = ["q_proj", "down_proj"] if targets == IN_TEXT else targets
        write_train_config(tmp_path / "run", tmp_path / "base", lora, names)
        write_probe(tmp_path / "run", tmp_path / "base", auto)
        return layers, stored

    return make


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=[pytest.mark.slow] * (case not in ("phi3", "cohere", "gemma4")))
    for case in FAMILIES])
def test_families(case, family, tmp_path, capsys):
    layers, stored = family(case)
    merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    text = capsys.readouterr().out
    print(error := float(re.search(r"differ by ([\d.]+) % of", text)[1]) / 100)
    assert error < 0.05 and "are not used" not in text
    result, n_adapted = load_file(tmp_path / "out" / "model.safetensors"), 0
    assert result.keys() == stored.keys()
    for name, (new, weight) in stored.items():
        want = nf4_and_back(weight) if new in layers else weight
        if isinstance(layers.get(new), LoraLayer):  # PEFT knows the scaling
            want = (want.float() + layers[new].get_delta_weight("default")).bfloat16()
            n_adapted += 1
        assert result[name].dtype == torch.bfloat16 and torch.equal(result[name], want), name
    assert n_adapted == 2 * 2
    auto_class = getattr(transformers, re.search(r"load it: (\w+)\.from_pretrained", text)[1])
    loaded = auto_class.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[new], result[name]) for name, (new, _) in stored.items())
    # PEFT's adapter alone gives the same
    (tmp_path / "run" / "train_config.json").unlink()
    flags = ["--base_model", str(tmp_path / "base")]
    merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "alone", *flags)[2:])
    alone = load_file(tmp_path / "alone" / "model.safetensors")
    assert alone.keys() == result.keys()
    assert all(torch.equal(alone[name], result[name]) for name in result)


def test_lost_tensor_of_a_multimodal_base(family, tmp_path, capsys):
    family("mistral3")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, path)
    with pytest.raises(SystemExit):
        merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    assert "the first is lm_head.weight" in capsys.readouterr().err


def test_vision_tower_in_4bit_is_refused(family, tmp_path, capsys):
    family("mistral3")
    path = tmp_path / "base" / "model.safetensors"
    tensors = load_file(path)
    name = "vision_tower.transformer.layers.0.attention.q_proj.weight.absmax"
    save_file({**tensors, name: torch.zeros(16, dtype=torch.uint8)}, path)
    with pytest.raises(SystemExit):
        merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    assert f"{name} is of a weight in 4-bit outside" in capsys.readouterr().err


def test_too_small_an_effect_is_no_merge(qwen, tmp_path, capsys):
    qwen(1e-5)
    command = merge_command(tmp_path / "run", tmp_path / "out")[2:]
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(command)
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the merged model does not match") and "small beside" in line
    assert not (tmp_path / "out").exists()
    assert_left(tmp_path / ".out.partial", line)
    merge_adapters.main([*command, "--no-check"])  # starts anew
    assert (tmp_path / "out").is_dir() and not (tmp_path / ".out.partial").exists()


def edit_adapter(change):
    """A change of the adapter's tensors {name: tensor}, in place."""

    def apply(run, out):
        path = run / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def edit_json(name, **values):
    def apply(run, out):
        content = json.loads((run / name).read_text())
        (run / name).write_text(json.dumps({**content, **values}))

    return apply


def first(tensors, side):
    return next(name for name in sorted(tensors) if f"lora_{side}" in name)


def drop_layer(tensors):
    for side in "AB":
        del tensors[first(tensors, side)]


def put_nan(tensors):
    tensors[first(tensors, "A")][0, 0] = float("nan")


def add_magnitude(tensors):
    name = first(tensors, "B")
    norms = tensors[name].norm(dim=1)
    tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = norms


def wrong_base(run, out):
    config = Qwen2Config(
        vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(run / "other")
    edit_json("train_config.json", base_model=str(run / "other"))(run, out)


def occupy(run, out):
    out.mkdir()
    (out / "config.json").write_text("{}")


def edit_config(**values):
    """A change of the configuration in train_config.json."""

    def apply(run, out):
        config = json.loads((run / "train_config.json").read_text())["config"]
        edit_json("train_config.json", config={**config, **values})(run, out)

    return apply


def edit_base(name, value):
    """One value of one tensor of a copy of the base, which becomes the base."""

    def apply(run, out):
        shutil.copytree(run / "demo" / "model", run / "other")
        path = run / "other" / "model.safetensors"
        tensors = load_file(path)
        tensors[name].view(-1)[5] = value
        save_file(tensors, path, metadata={"format": "pt"})
        edit_json("train_config.json", base_model=str(run / "other"))(run, out)

    return apply


def put_fifo(name):
    def apply(run, out):
        (run / name).unlink()
        os.mkfifo(run / name)

    return apply


def put_text(name, text):
    return lambda run, out: (run / name).write_text(text)


def kill_run(run, out):
    (run / "adapter_model.safetensors").unlink()
    (run / "checkpoint-000014").mkdir()


BAD = {
    "empty adapter": (edit_adapter(dict.clear), "lora_A.weight is missing"),
    "NaN": (edit_adapter(put_nan), "NaN or infinite"),
    "no partner": (edit_adapter(lambda t: t.pop(first(t, "A"))), "lora_A.weight is missing"),
    "lost layer": (
        edit_adapter(drop_layer), "mlp.down_proj.lora_A.weight is missing, but the base model and"
        " train_config.json ask for (16, 512)",
    ),
    "untrained": (
        edit_adapter(lambda t: [t[n].zero_() for n in t if "lora_B" in n]), "untrained",
    ),
    "wrong base": (wrong_base, "and train_config.json ask for (16, 96)"),
    "magnitudes without DoRA": (
        edit_adapter(add_magnitude), "lora_magnitude_vector is (256,), but the base model and"
        " train_config.json ask for none",
    ),
    "another variant": (
        edit_json("adapter_config.json", lora_bias=True), "lora_bias is True, by train_config.json"
        " False",
    ),
    "PiSSA": (
        edit_json("adapter_config.json", init_lora_weights="pissa"), "is 'pissa', by train_config",
    ),
    "option of the future": (
        edit_json("adapter_config.json", use_more=2), "use_more is 2, by train_config.json None",
    ),
    "rank": (edit_json("adapter_config.json", r=8), "r is 8, by train_config.json 16"),
    "trained rank": (edit_config(lora_rank=8), "r is 16, by train_config.json 8"),
    "alpha": (edit_json("adapter_config.json", lora_alpha=8), "is 8, by train_config.json 32"),
    "trained alpha": (edit_config(lora_alpha=8), "lora_alpha is 32, by train_config.json 8"),
    "rank of some": (
        edit_json("adapter_config.json", rank_pattern={"q_proj": 8}), "rank_pattern is {'q_proj'",
    ),
    "DoRA": (edit_json("adapter_config.json", use_dora=True), "use_dora is True, by train_config"),
    "trained as DoRA": (edit_config(adapter="dora"), "use_dora is False, by train_config"),
    "rsLoRA": (edit_json("adapter_config.json", use_rslora=True), "use_rslora is True"),
    "trained as rsLoRA": (edit_config(adapter="rslora"), "use_rslora is False"),
    "fewer trained targets": (
        edit_config(target_modules=["q_proj", "v_proj"]), "down_proj.lora_A.weight is (16, ",
    ),
    "trained targets": (
        edit_config(target_modules=["all-linear"]), "layers.0.mlp.gate_proj.lora_A.weight is miss",
    ),
    "killed run": (
        kill_run, "no adapter_model.safetensors. Use its latest checkpoint: --adapter_dir",
    ),
    "no base": (lambda run, out: (run / "train_config.json").unlink(), "has no train_config.json"),
    "no such base": (edit_json("train_config.json", base_model="/nowhere"), "--base_model"),
    "random weights": (edit_config(random_weights=True), "random_weights is true; a merge needs"),
    "fp4": (
        edit_json("train_config.json", quantization={"quant_type": "fp4"}), 'quant_type is "fp4"',
    ),
    "no probe": (
        lambda run, out: (run / "probe.safetensors").unlink(), "has no probe.safetensors",
    ),
    "probes": (edit_json("train_config.json", probe_input_ids=[[5, 999]]), "vocabulary of"),
    "output there": (occupy, "already exists"),
    "output is a file": (lambda run, out: out.write_text("mine"), "Not a directory"),
    "config FIFO": (put_fifo("adapter_config.json"), "has no adapter_config.json"),
    "adapter FIFO": (put_fifo("adapter_model.safetensors"), "has no adapter_model.safetensors"),
    "checkpoint FIFO": (lambda run, out: os.mkfifo(run / "checkpoint.json"), "no file"),
    "list": (put_text("adapter_config.json", '[["r", 16]]'), "config.json: not a JSON object"),
    "not text": (
        lambda run, out: (run / "adapter_config.json").write_bytes(b"\xff{}"), "not a JSON object",
    ),
    "nothing": (put_text("train_config.json", ""), "train_config.json: not a JSON object"),
    "deep": (put_text("train_config.json", '{"a":' * 10**5), "config.json: not a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, unsummed, tmp_path, capsys):
    spoil, words = BAD[case]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(unsummed, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    spoil(run, out)
    sign(run)
    before = tree(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(run, out, "--no-check")[2:])
    *_, line = captured = capsys.readouterr().err.splitlines()
    assert len(captured) == 1 and line.startswith("error: ") and words in line, captured
    assert tree(tmp_path) == before


def test_bad_input_by_command_line(trained, tmp_path, monkeypatch, capfd):
    """The file as a command, in a process that has imported the libraries."""
    _, script, *flags = merge_command(trained / "demo", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script, run_name="__main__")
    out, err = capfd.readouterr()
    assert ended.value.code == 1 and "Traceback" not in err and not out
    assert err.splitlines()[-1].startswith("error: --adapter_dir")
    assert not any(tmp_path.iterdir())


def test_link_to_an_empty_directory_is_filled(trained, tmp_path, capsys):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    flags = ["--output_dir", str(tmp_path / "link"), "--no-check"]
    merge_adapters.main(["--adapter_dir", str(trained), *flags])
    assert (tmp_path / "real" / "model.safetensors").is_file()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="not Linux")
def test_mount_point_is_refused_before_any_work(trained, capsys):
    with pytest.raises(SystemExit):
        merge_adapters.main(["--adapter_dir", str(trained), "--output_dir", "/proc"])
    assert capsys.readouterr().err.startswith("error: --output_dir /proc: is a mount point")


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="not Linux")
def test_directory_that_cannot_be_made_ends_the_merge(trained, capsys):
    with pytest.raises(SystemExit):
        merge_adapters.main(["--adapter_dir", str(trained), "--output_dir", "/proc/x/y"])
    assert "No such file or directory: '/proc/x'" in capsys.readouterr().err


def test_merge_that_is_interrupted_leaves_nothing(trained, tmp_path, monkeypatch, capsys):
    """By Ctrl-C while it writes."""
    add_adapter = merge_adapters.add_adapter

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return add_adapter(*args)

    monkeypatch.setattr(merge_adapters, "add_adapter", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's `&`
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(trained, tmp_path / "out")[2:])
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.splitlines()[-1] == "error: stopped"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [  # what torch raises on a CPU and on a GPU
    RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    torch.OutOfMemoryError("CUDA out of memory")])  # fmt: skip
def test_model_too_large_for_the_check_is_merged(error, trained, tmp_path, monkeypatch, capsys):
    def all_logits(*args):
        raise error

    monkeypatch.setattr(compare_logits, "logits_of", all_logits)
    merge_adapters.main(["--adapter_dir", str(trained), "--output_dir", str(tmp_path / "out")])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"not checked: the check did not run here: {error}"
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


def test_check_that_fails_leaves_the_merged_model(trained, tmp_path, monkeypatch, capsys):
    def all_logits(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(compare_logits, "logits_of", all_logits)
    with pytest.raises(SystemExit):
        merge_adapters.main(["--adapter_dir", str(trained), "--output_dir", str(tmp_path / "out")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the check did not run") and "illegal memory" in last
    assert_left(tmp_path / ".out.partial", last)


def assert_left(partial, error):
    """The merged model, in a directory that the error names."""
    assert error.endswith(f"; the merged model is left in {partial}: rename it before the next"
                          " merge, which would delete it")
    names = {path.name for path in partial.iterdir()}
    assert "model.safetensors.index.json" in names and ".lock" not in names


def test_ctrl_c_in_the_check_names_the_merged_model(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        compare_logits, "logits_of", lambda *args: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's `&`
    error = error_of(capsys, trained, tmp_path / "out")
    signal.signal(signal.SIGINT, before)
    assert error.startswith("error: stopped; ")
    assert_left(tmp_path / ".out.partial", error)


def test_unknown_flag(trained, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(trained, tmp_path / "out", "--adapter", "x")[2:])
    assert "error: unrecognized arguments: --adapter x" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_another_base_of_the_same_shapes(trained, tmp_path, capsys):
    """Also where the digest of the whole base does not tell."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    base = Path(json.loads((run / "train_config.json").read_text())["base_model"])
    shutil.copytree(base, tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][:8] *= 1.01  # 8 of 512 rows
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    edit_json("train_config.json", base_model=str(tmp_path / "base"))(run, out)
    sign(run)
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(run, out, "--no-check")[2:])
    (error,) = re.findall("error: .*", capsys.readouterr().err)  # behind the progress bar
    assert "layers.2.mlp.up_proj" in error
    assert "not those of the base model in training" in error
    assert not out.exists() and not (tmp_path / ".out.partial").exists()


def error_of(capsys, *arguments):
    """What a merge that must fail says: one line, maybe behind the progress bar."""
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(*arguments)[2:])
    (error,) = re.findall("error: .*", capsys.readouterr().err)
    return error


def make_huge(tensors):
    for side in "AB":
        tensors[first(tensors, side)].fill_(1e30)


NORM, UP = "model.norm.weight", "model.layers.2.mlp.up_proj.weight"
NOT_FINITE = {
    "copied": (edit_base(NORM, float("inf")), f"what {NORM} becomes"),
    "quantized": (edit_base(UP, float("nan")), UP),
    "sum": (edit_adapter(make_huge), "what model.layers.0.mlp.down_proj.weight becomes"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FINITE)
def test_what_is_not_finite_is_refused(case, unsummed, tmp_path, capsys):
    spoil, what = NOT_FINITE[case]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(unsummed, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    spoil(run, out)
    sign(run)
    before = tree(tmp_path)
    error = error_of(capsys, run, out, "--no-check")
    assert error.endswith(f"/model.safetensors: {what} has values that are NaN or infinite")
    assert tree(tmp_path) == before


def flip(name, at):
    """One bit of a file; of an adapter in its values, so that it is as readable as before."""

    def apply(directory):
        content = bytearray((directory / name).read_bytes())
        content[at] ^= 1
        (directory / name).write_bytes(content)

    return apply


def rewrite_list(change):
    """checkpoint.json with a SHA-256 that is right for what it says."""

    def apply(directory):
        state = json.loads((directory / "checkpoint.json").read_text())
        del state["sha256"]
        change(state)
        text = json.dumps(state, sort_keys=True)
        state["sha256"] = hashlib.sha256(text.encode()).hexdigest()
        (directory / "checkpoint.json").write_text(json.dumps(state))

    return apply


CHANGED = {
    "adapter": (flip("adapter_model.safetensors", -9), "adapter_model.safetensors"),
    "probe": (flip("probe.safetensors", -9), "probe.safetensors"),
    "configuration": (
        lambda d: edit_json("adapter_config.json", revision=None)(d, None), "adapter_config.json",
    ),
    "list": (lambda d: edit_json("checkpoint.json", step=7)(d, None), "checkpoint.json"),
    "not listed": (
        rewrite_list(lambda s: s["files"].pop("adapter_config.json")), "adapter_config.json",
    ),
    "no files": (rewrite_list(lambda state: state.update(files=3)), "checkpoint.json"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGED)
def test_changed_checkpoint_is_refused(case, trained, tmp_path, capsys):
    spoil, file = CHANGED[case]
    run = tmp_path / "checkpoint"
    shutil.copytree(trained / f"checkpoint-{STEPS:06d}", run)
    shutil.copyfile(trained / "train_config.json", tmp_path / "train_config.json")
    (run / "optimizer.safetensors").unlink()  # of no use here
    spoil(run)
    error = error_of(capsys, run, tmp_path / "out")
    assert error == f"error: {run / file}: has another SHA-256 than when it was written"


def copy_base(run, change=lambda tensors: None, **config):
    """A copy of the base with other tensors or another configuration; returns its directory."""
    base = shutil.copytree(run / "demo" / "model", run / "other")
    tensors = load_file(base / "model.safetensors")
    change(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    if config:
        edit_json("config.json", **config)(base, None)
    return base


def spoil_tensor(name, change):
    return lambda run: copy_base(run, lambda t: t.update({name: change(t[name]).contiguous()}))


def one_value(tensor):
    """Between the places that base_digest() looks at."""
    tensor.view(-1)[5000] *= 2
    return tensor


def other_alpha(run):
    edit_json("adapter_config.json", lora_alpha=8)(run, None)
    edit_config(lora_alpha=8)(run, None)


def other_adapter(run):
    """As well trained, by another seed."""
    edit_adapter(lambda t: [t[n].copy_(t[n].flip(0)) for n in t])(run, None)


LINEAR, HEAD, RECORD = "model.layers.1.self_attn.q_proj.weight", "lm_head.weight", "another SHA-256"
RECORDED = {
    "bit of the adapter": (lambda run: flip("adapter_model.safetensors", -9)(run), RECORD),
    "bit of the probe": (lambda run: flip("probe.safetensors", -9)(run), RECORD),
    "adapter": (other_adapter, RECORD),
    "alpha in both files": (other_alpha, RECORD),
    "head": (spoil_tensor(HEAD, lambda t: t * 1.01), "its config.json or its weights"),
    "norm": (spoil_tensor("model.norm.weight", lambda t: t * 2), "its config.json or its weights"),
    "rows": (spoil_tensor(LINEAR, lambda t: t.flip(0)), "its config.json or its weights"),
    "sign": (spoil_tensor(LINEAR, torch.neg), "its config.json or its weights"),
    "rope": (
        lambda run: copy_base(run, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "its config.json or its weights",
    ),
    "one value of a linear": (spoil_tensor(LINEAR, one_value), f"the values of {LINEAR} are not"),
    "one value of the head": (spoil_tensor(HEAD, one_value), f"the values of {HEAD} are not"),
}  # fmt: skip


@pytest.mark.parametrize("case", RECORDED)
def test_what_is_not_as_recorded_is_refused(case, trained, tmp_path, capsys):
    spoil, words = RECORDED[case]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    base = spoil(run) or run / "demo" / "model"
    error = error_of(capsys, run, out, "--no-check", "--base_model", str(base))
    assert words in error and not out.exists()


def test_merge_into_another_base_on_purpose(trained, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    base = spoil_tensor(LINEAR, torch.neg)(run)
    merge_adapters.main(
        merge_command(run, out, "--base_model", str(base), "--allow_other_base")[2:])  # fmt: skip
    assert "warning: --allow_other_base" in capsys.readouterr().out
    k_proj = LINEAR.replace("q_proj", "k_proj")  # without an adapter
    merged, weights = (load_file(d / "model.safetensors") for d in (out, base))
    assert torch.equal(merged[k_proj], nf4_and_back(weights[k_proj]))


def test_another_base_may_have_fewer_tokens_than_the_check_that_is_not_made(trained, capsys):
    base = open_run.read_base(
        str(trained / "demo" / "model"),
        {"prequantized": False, "quantized_from_dtype": "bfloat16"}, {}, [])
    run = TrainedRun(base_model="other", base_sha256=base_digest(base.directory),
                     merge_check_ids=[[base.arch.vocab_size]])  # fmt: skip
    with pytest.raises(ValueError, match="outside the base's vocabulary"):
        open_run.check_base(base, run, allow_other=False)
    open_run.check_base(base, run, allow_other=True)
    assert "warning: --allow_other_base" in capsys.readouterr().out


def test_linear_that_files_call_otherwise_is_no_sign_of_another_base(tmp_path):
    """As of a vision tower, see linears_in_4bit()."""
    stem = "base_model.model.visual.proj"
    for linears, words in (({bare_name(stem): ""}, "have another name for this linear"),
                           ({}, "is not a linear of the layers of")):
        with pytest.raises(ValueError, match=words):
            slices_by_linear([f"{stem}.lora_A.weight"], {}, tmp_path, linears, {})


def test_links_out_of_the_base_are_not_followed(tmp_path, capsys):
    """Those of the Hub's cache, from a snapshot to its blobs, are."""
    secret, hub = tmp_path / "shadow", tmp_path / "models--a--b"
    snapshot, out = hub / "snapshots" / "1f", tmp_path / "out"
    for directory in snapshot, hub / "blobs", out:
        directory.mkdir(parents=True)
    secret.write_text("root")
    (hub / "blobs" / "77").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/77")
    (snapshot / "NOTES.txt").symlink_to(secret)
    (snapshot / "MINE.txt").symlink_to("tokenizer.json")
    (tmp_path / "link").symlink_to(snapshot)
    (snapshot / "adapter_config.json").write_text("{}")  # a merged model has no adapter
    copy_small_files(tmp_path / "link", out)
    assert {path.name for path in out.iterdir()} == {"tokenizer.json", "MINE.txt"}
    assert "NOTES.txt is not copied, it is a link" in capsys.readouterr().out


@pytest.mark.slow
def test_merged_demo_answers_its_own_rows(run_main, tmp_path):
    """At least 95 of 100: `make train` and `make merge` as they are."""
    code, _, err = run_main("--output_dir", tmp_path / "run")
    assert code == 0, err
    merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    lines = (tmp_path / "run" / "demo" / "data.jsonl").read_text().splitlines()
    rows = list(map(json.loads, dict.fromkeys(lines)))
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answers = tokenizer.batch_decode(
        output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)  # fmt: skip
    right = sum(answer == row["completion"] for answer, row in zip(answers, rows))
    assert len(rows) > 90 and right >= 0.95 * len(rows), f"{right} of {len(rows)}"


CLOSING_TEMPLATE = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '<s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def test_generation_stops_where_a_turn_ends(run_main, tiny_model, tmp_path, capsys):
    """By the token that closes it in training, which is not the base's EOS."""
    chat = [{"role": "user", "content": "1 plus 1?"}, {"role": "assistant", "content": "2"}]
    (tmp_path / "data.jsonl").write_text(8 * (json.dumps({"messages": chat}) + "\n"))
    (tmp_path / "chat.jinja").write_text(CLOSING_TEMPLATE)
    run, base = tmp_path / "run", tiny_model("llama")
    flags = ["--model", base, "--dataset", tmp_path / "data.jsonl", "--max_steps", 1]
    flags += ["--output_dir", run, "--chat_template", tmp_path / "chat.jinja"]
    code, said, err = run_main(*flags, "--batch_size", 4, "--learning_rate", 0.01)
    assert code == 0, err
    assert "generation also stops at '<s>', which" in said
    merge_adapters.main(merge_command(run, tmp_path / "out", "--no-check")[2:])
    tokenizer = AutoTokenizer.from_pretrained(base)
    want = [AutoConfig.from_pretrained(base).eos_token_id, tokenizer.bos_token_id]
    for directory in run, tmp_path / "out":
        assert GenerationConfig.from_pretrained(directory).eos_token_id == want
    _, closing = generation_settings(base, tokenizer)  # whose own template closes by EOS
    assert closing is None


SNIPPET = re.search(
    r"```python\n(import peft.*?spider.*?)```", (ROOT / "docs/serving.md").read_text(), re.S)[1]
TWO = [[{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
       for asked, answer in (("hi", "yes"), ("fox?", "The fox"))]  # fmt: skip


def run_snippet(run, question):
    """What the snippet of docs/serving.md prints."""
    code = SNIPPET.replace("runs/chat", str(run))
    with contextlib.redirect_stdout(printed := io.StringIO()):
        exec(code.replace("How many legs does a spider have?", question), {})
    return printed.getvalue()


@pytest.mark.parametrize("template", [
    pytest.param(None, marks=pytest.mark.slow), CLOSING_TEMPLATE])  # fmt: skip
def test_snippet_gives_what_was_trained_and_stops(template, run_main, tmp_path, tiny_model):
    """Also where --chat_template closes answers by a token that is not the base's EOS."""
    rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in TWO)
    (tmp_path / "data.jsonl").write_text(rows)
    (tmp_path / "chat.jinja").write_text(template or "")
    given = ["--chat_template", tmp_path / "chat.jinja"] if template else []
    base = shutil.copytree(tiny_model("llama", num_hidden_layers=2), tmp_path / "base")
    (base / "generation_config.json").unlink(missing_ok=True)
    code, _, err = run_main(
        "--model", base, "--dataset", tmp_path / "data.jsonl", "--output_dir", tmp_path / "run",
        *given, "--max_steps", 25, "--batch_size", 2, "--learning_rate", 0.01, "--lora_rank", 8,
        "--report_to", "none")  # fmt: skip
    assert code == 0, err
    for asked, answer in TWO:
        printed = run_snippet(tmp_path / "run", asked["content"]).rstrip("\n")
        closing = "<s>" if template else "</s>"
        assert printed.endswith(answer["content"] + closing), printed


def test_snippet_loads_a_multimodal_model(family, tmp_path, demo_directory):
    """With its class, so that each weight of the adapter is used."""
    family("mistral3")
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    tokenizer.save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "generation_config.json").write_text("{}")
    path, names = tmp_path / "run" / "adapter_config.json", {}
    base = {"base_model_name_or_path": str(tmp_path / "base")}
    path.write_text(json.dumps(json.loads(path.read_text()) | base))
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*adapter keys")
        code = SNIPPET.replace("runs/chat", str(tmp_path / "run")).partition("inputs = ")[0]
        exec(code, names)
    adapter = load_file(tmp_path / "run" / "adapter_model.safetensors")
    got = dict(names["model"].named_parameters())
    for name, value in adapter.items():
        name = re.sub(r"lora_(.)", r"lora_\1.default", name)
        assert torch.equal(got[name].cpu().float(), value), name


SLOW = r"(\w+\.?)+!"  # some 2**30 ways to fail on a module's name
DEEP = json.loads("[" * 900 + "]" * 900)
MISSING = object()
VALUES = [None, True, -1, 0, 2.5, 10**400, float("nan"), "", "x", "(a+)+$", SLOW, "\0", [],
          [[1]], [-1], ["(a+)+$", 5], {}, {"(a+)+$": -1}, {SLOW: {"a": [4]}}, DEEP]  # fmt: skip
EDITED = [
    *(("adapter_config.json", key) for key in """r lora_alpha use_rslora use_dora rank_pattern
    peft_type bias modules_to_save layers_to_transform""".split()),
    *(("train_config.json", key) for key in """base_model config config.lora_rank config.adapter
    config.target_modules quantization quantization.blocksize quantization.quantized_from_dtype
    quantization.prequantized quantization.tensor_sums base_sha256 probe_input_ids""".split()),
]  # fmt: skip


# some kinds of values; all other edits by `make test-slow`: those of train_config.json are
# refused alike by its SHA-256
QUICK_KEYS = "r", "use_dora", "config", "quantization.tensor_sums", "probe_input_ids"


@pytest.mark.parametrize("file, key", [
    pytest.param(file, key, marks=[pytest.mark.slow] * (
        key not in QUICK_KEYS)) for file, key in EDITED])
def test_no_edit_of_the_configuration_hurts(file, key, unsummed, merged, tmp_path, capsys):
    """Each edit is refused in one line, or leads to the very same model. train_config.json has its
    own SHA-256, by which all its edits are refused."""
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(unsummed, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    before, original = tree(tmp_path), json.loads((run / file).read_text())
    *section, name = key.split(".")
    n_refused = 0
    for value in [*VALUES, MISSING]:
        content = copy.deepcopy(original)
        inner = content[section[0]] if section else content
        inner[name] = value
        if value is MISSING:
            del inner[name]
        (run / file).write_text(json.dumps(content))
        capsys.readouterr()
        start = time.monotonic()
        try:
            merge_adapters.main(merge_command(run, out, "--no-check")[2:])
        except SystemExit as e:
            (line,) = capsys.readouterr().err.splitlines()
            assert e.code == 1 and line.startswith("error: "), value
            assert tree(tmp_path).keys() == before.keys()
            n_refused += 1
        else:
            for path in merged[0].iterdir():
                assert (out / path.name).read_bytes() == path.read_bytes(), value
            shutil.rmtree(out)
        assert time.monotonic() - start < 5, value
    assert n_refused >= len(VALUES) - 3  # 0 is as good as False where PEFT has it


@pytest.mark.parametrize("times", [1, 2, 0])
def test_adapter_that_is_replaced_meanwhile_is_noticed(
    times, trained, tmp_path, monkeypatch, capsys
):
    """Before the check, which takes long; and no model of two adapters is left."""
    run, out, write_merged = tmp_path / "run", tmp_path / "out", merge_adapters.write_merged
    shutil.copytree(trained, run)

    def replace_after(*args):
        write_merged(*args)
        adapter = run / "adapter_model.safetensors"
        for _ in range(times):  # the second may bring back the first inode
            shutil.copy(adapter, run / "new")
            os.replace(run / "new", adapter)
        if not times:  # copied over
            adapter.write_bytes(adapter.read_bytes())

    monkeypatch.setattr(merge_adapters, "write_merged", replace_after)
    monkeypatch.setattr(merge_adapters, "check_merge", lambda *args: pytest.fail("was called"))
    assert "the adapter has changed meanwhile" in error_of(capsys, run, out)
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.fixture(scope="module")
def trained_in_4bit(trained, tmp_path_factory):
    """The run as if its base had been in 4-bit, as transformers saves it."""
    run = tmp_path_factory.mktemp("in-4bit") / "run"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    load_4bit(trained / "demo" / "model").save_pretrained(run / "base")
    config = json.loads((run / "train_config.json").read_text())
    config["quantization"].update(prequantized=True, tensor_sums={})
    config["base_model"] = str(run / "base")
    (run / "train_config.json").write_text(json.dumps(config))
    sign(run)
    return run


def test_base_in_4bit_merges_alike(trained_in_4bit, merged, tmp_path, capsys):
    merge_adapters.main(merge_command(trained_in_4bit, tmp_path / "out")[2:])
    text, name = capsys.readouterr().out, "model.safetensors"
    assert float(re.search(r"differ by ([\d.]+) % of", text)[1]) / 100 < 0.02
    assert (tmp_path / "out" / name).read_bytes() == (merged[0] / name).read_bytes()
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def edit_state(change):
    """What bitsandbytes has stored of a weight, as JSON, changed."""

    def apply(tensors):
        name = f"{UP}.{NF4_STATE}"
        state = change(json.loads(bytes(tensors[name].tolist())))
        tensors[name] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return apply


DAMAGED = {
    "no JSON": lambda tensors: tensors[f"{UP}.{NF4_STATE}"].fill_(0),
    "no object": edit_state(lambda state: [state]),
    "no offset": edit_state(lambda state: state.pop("nested_offset") and state),
    "no dtype": edit_state(lambda state: state.pop("dtype") and state),
    "no codes": lambda tensors: tensors.update({UP: tensors[UP][1:].clone()}),
    "no scales": lambda tensors: tensors.pop(f"{UP}.absmax"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_base_in_4bit_is_named(case, trained_in_4bit, tmp_path, capsys):
    run = shutil.copytree(trained_in_4bit, tmp_path / "run")
    base = run / "base"
    tensors = load_file(base / "model.safetensors")
    DAMAGED[case](tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    edit_json("train_config.json", base_model=str(base))(run, None)
    sign(run)
    error = error_of(capsys, run, tmp_path / "out")
    assert str(base) in error and UP in error
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_second_merge_is_refused(trained, merged, tmp_path, monkeypatch, capsys):
    """Whether the first is writing, about to rename its directory, or has just done so."""
    out, replace, write_merged = tmp_path / "out", os.replace, merge_adapters.write_merged
    lines = []

    def second():
        with monkeypatch.context() as patch:
            patch.setattr(merge_adapters, "write_merged", write_merged)
            patch.setattr(os, "replace", replace)
            lines.append(error_of(capsys, trained, out))

    def second_meanwhile(*args):
        write_merged(*args)
        second()

    def second_around(*paths):
        second()
        replace(*paths)
        second()

    monkeypatch.setattr(merge_adapters, "write_merged", second_meanwhile)
    monkeypatch.setattr(os, "replace", second_around)
    merge_adapters.main(merge_command(trained, out)[2:])
    who = f"process {os.getpid()} on {os.uname().nodename} since "
    assert all(f"error: --output_dir {out}: in use by {who}" in line for line in lines[:2])
    assert "already exists" in lines[2] and len(lines) == 3
    files = {p.name: p.read_bytes() for p in merged[0].iterdir()}
    assert {p.name: p.read_bytes() for p in out.iterdir()} == files
    assert {p.name for p in tmp_path.iterdir()} == {"out"}


def test_lock_of_a_merge_that_ends_meanwhile(trained, tmp_path, monkeypatch, capsys):
    """Another merge renames the directory between this one's look at it and its lock."""
    partial, out, flock = tmp_path / ".out.partial", tmp_path / "out", fcntl.flock

    def end_of_another(*args):
        monkeypatch.setattr(fcntl, "flock", flock)
        (partial / "model.safetensors").write_text("of another")
        partial.rename(out)
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", end_of_another)
    assert "already exists" in error_of(capsys, trained, out)
    assert (out / "model.safetensors").read_text() == "of another" and not partial.exists()


def test_file_system_without_locks(trained, tmp_path, monkeypatch, capsys):
    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")  # what NFS says

    monkeypatch.setattr(fcntl, "flock", flock)
    merge_adapters.main(merge_command(trained, tmp_path / "out", "--no-check")[2:])
    (note,) = [n for n in capsys.readouterr().out.splitlines() if "No locks available" in n]
    assert note.startswith("warning: --output_dir") and (tmp_path / "out" / "config.json").is_file()


@pytest.mark.slow
def test_two_merges_at_once(trained, merged, merger, tmp_path, capsys):
    """Four times one of this process and one of another; then the other is killed in the middle."""

    def tell(out, end):
        print(trained, out, end, file=merger.stdin, flush=True)

    def answer(*words):
        return next(line.strip() for line in merger.stdout if line.strip() in words)

    answer("ready")
    capsys.readouterr()
    n_won, files = 0, {p.name: p.read_bytes() for p in merged[0].iterdir()}
    for i in range(4):
        out = tmp_path / f"out-{i}"
        tell(out, "ends")
        try:
            merge_adapters.main(merge_command(trained, out, "--no-check")[2:])
            assert answer("won", "lost") == "lost"
            n_won += 1
        except SystemExit:
            assert answer("won", "lost") == "won"
        assert {p.name for p in tmp_path.iterdir()} == {f"out-{n}" for n in range(i + 1)}
        assert {p.name: p.read_bytes() for p in out.iterdir()} == files

    errors = re.findall("error: .*", capsys.readouterr().err)
    assert len(errors) == 4 - n_won
    who = f"process {merger.pid} on {os.uname().nodename} since "
    held = [error for error in errors if f": in use by {who}" in error]
    print(f"{n_won} merges of this process were first, of the others {len(held)} saw who was")
    assert all("already exists" in error for error in errors if error not in held)

    out = tmp_path / "out"
    tell(out, "dies")
    answer("holding")
    assert error_of(capsys, trained, out).startswith(f"error: --output_dir {out}: in use by {who}")
    print(file=merger.stdin, flush=True)
    assert merger.wait(60) == -signal.SIGKILL
    assert (tmp_path / ".out.partial" / ".lock").read_text().startswith(who)
    (tmp_path / ".out.partial" / "model-00002.safetensors").write_text("of another base")
    (tmp_path / ".out.partial" / "templates").mkdir()
    merge_adapters.main(merge_command(trained, out, "--no-check")[2:])
    assert {p.name: p.read_bytes() for p in out.iterdir()} == files
    assert not (tmp_path / ".out.partial").exists()
    lines = re.findall("error: .*", merger.stderr.read())
    assert len(lines) == n_won and all("in use by" in s or "already exists" in s for s in lines)


def test_all_is_on_the_disk_before_it_has_its_name(trained, tmp_path, monkeypatch, capsys):
    events, fsync, replace = [], os.fsync, os.replace

    def note_fsync(fd):
        fsync(fd)
        events.append(os.readlink(f"/proc/self/fd/{fd}"))

    def note_replace(*paths):
        replace(*paths)
        events.append(paths)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    partial, out = tmp_path / ".out.partial", tmp_path / "out"
    merge_adapters.main(merge_command(trained, out, "--no-check")[2:])
    at = events.index((partial, out))
    assert {str(partial), *(str(partial / p.name) for p in out.iterdir())} <= {*events[:at]}
    assert str(tmp_path) in events[at + 1 :]


def test_merge_that_loses_much_names_the_page_that_uses_the_adapter_unmerged(
    trained, tmp_path, capsys, monkeypatch
):
    """What that page shows is run by test_snippet_gives_what_was_trained_and_stops."""
    monkeypatch.setattr(compare_logits, "LARGE_ERROR", 0.0)
    merge_adapters.main(merge_command(trained, tmp_path / "out")[2:])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("warning: the merged model differs")
    (page,) = re.findall(r"to use the adapter without merging it, see (\S+)$", last)
    assert SNIPPET in (ROOT / page).read_text()
