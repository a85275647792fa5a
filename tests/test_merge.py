"""merge_adapters.py, by its command line, against bitsandbytes, transformers and PEFT themselves.

One run of the real training script on two processes is shared by the tests of this file.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import merge_adapters  # noqa: E402

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
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


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
    tokenizer, loss, tokens = AutoTokenizer.from_pretrained(base), 0.0, 0
    for row in ROWS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
        logits = logits_of(model, [prompt + answer])[len(prompt) - 1 : -1]
        target = torch.tensor(answer)
        loss += float(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
        tokens += len(answer)
    return loss / tokens


def nf4_and_back(weight):
    """A whole weight through bitsandbytes' own layer."""
    layer = bnb.nn.Linear4bit(
        *reversed(weight.shape), bias=False, quant_type="nf4", compress_statistics=True
    )
    layer.load_state_dict({"weight": weight.bfloat16()})
    layer = layer.to(torch.bfloat16).to("cpu")
    assert layer.weight.quant_state is not None
    return bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def tree(path):
    """What is in a directory: {relative path: time of last change}."""
    return {str(p.relative_to(path)): p.stat().st_mtime_ns for p in sorted(path.rglob("*"))}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run directory: 16 rows, all of them in every step."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "train_fsdp_qlora.py"), "--output_dir", "run", "--dataset", "data.jsonl"]
    command += ["--batch_size", "16", "--max_steps", str(STEPS), "--save_every", str(STEPS - 1)]
    command += ["--target_modules", *TARGETS]
    result = call(command, directory)
    assert result.returncode == 0, result.stderr[-3000:]
    (directory / "stdout").write_text(result.stdout)
    return directory / "run"


@pytest.fixture(scope="module")
def merged(trained):
    """The merged model's directory and what the merge printed, by the command that training ended
    with, from the folder that it was started in."""
    command = shlex.split((trained.parent / "stdout").read_text().splitlines()[-1])
    result = call(command, trained.parent)
    assert result.returncode == 0, result.stderr[-3000:]
    return trained / "merged", result.stdout


@pytest.fixture(scope="module")
def probes(trained):
    return json.loads((trained / "train_config.json").read_text())["probe_input_ids"]


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


def test_merged_model_needs_no_bitsandbytes(trained, merged, probes, reference, tmp_path):
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
    reported = re.search(r"are ([\d.]+) of that away", merged[1])
    assert float(reported[1]) == pytest.approx(error, rel=0.01)


def test_weights_equal_bitsandbytes(trained, merged):
    base = load_file(trained / "demo" / "model" / "model.safetensors")
    adapter = load_file(trained / "adapter_model.safetensors")
    result = load_file(merged[0] / "model.safetensors")
    assert result.keys() == base.keys()
    n_adapters, error, effect = 0, 0.0, 0.0
    for name, weight in base.items():
        want, prefix = weight, f"base_model.model.{name.removesuffix('.weight')}"
        if "_proj." in name:
            want = nf4_and_back(weight)
            assert not torch.equal(want, weight)
        if f"{prefix}.lora_A.weight" in adapter:
            a, b = (adapter[f"{prefix}.lora_{x}.weight"] for x in "AB")
            exact = want.float() + 32 / 16 * (b @ a)
            want = exact.bfloat16()
            error += float((want.double() - exact.double()).square().sum())
            effect += float((2 * (b.double() @ a.double())).square().sum())
            n_adapters += 1
        assert result[name].dtype == torch.bfloat16 and torch.equal(result[name], want), name
    assert n_adapters == 4 * len(TARGETS)
    reported = re.search(r"the exact sum by ([\d.]+) of", merged[1])
    assert float(reported[1]) == pytest.approx((error / effect) ** 0.5, rel=0.01)


def test_files(trained, merged):
    base = trained / "demo" / "model"
    assert {p.name for p in merged[0].iterdir()} == {
        *(p.name for p in base.iterdir()), "model.safetensors.index.json"
    }  # fmt: skip
    for path in merged[0].iterdir():
        assert path.stat().st_mode & 0o777 == 0o644, path
        if path.suffix == ".jinja" or path.name.startswith(("tokenizer", "generation")):
            assert path.read_bytes() == (base / path.name).read_bytes()
    index = json.loads((merged[0] / "model.safetensors.index.json").read_text())
    tensors = load_file(merged[0] / "model.safetensors")
    assert index["weight_map"] == dict.fromkeys(tensors, "model.safetensors")
    assert index["metadata"]["total_size"] == sum(2 * t.numel() for t in tensors.values())
    config = json.loads((merged[0] / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    assert not [p for p in trained.iterdir() if p.name.startswith(".")]
    last = merged[1].splitlines()[-1]
    assert last.endswith('AutoModelForCausalLM.from_pretrained("run/merged")')


def test_checkpoint_merges_alike(trained, merged, tmp_path):
    run = trained / f"checkpoint-{STEPS:06d}"
    merge_adapters.main(merge_command(run, tmp_path / "out", "--no-check")[2:])
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (merged[0] / name).read_bytes()


def write_train_config(run, base, **quantization):
    """What training writes beside an adapter that PEFT saved in `run`."""
    quantization = {
        "quant_type": "nf4", "blocksize": 64, "double_quant": True, "nested_blocksize": 256,
        "quantized_from_dtype": "bfloat16", **quantization,
    }  # fmt: skip
    content = {"base_model": str(base), "quantization": quantization}
    (run / "train_config.json").write_text(json.dumps(content))


@pytest.fixture
def qwen(tmp_path):
    """A run made by PEFT alone: a tied fp16 base in several files with attention biases, whose
    adapter has two ranks and rsLoRA. `scale` of the B matrices decides the adapter's effect."""

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
            rank_pattern={"up_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 3},
        )  # fmt: skip
        model = get_peft_model(model.float(), lora)
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, scale)
        model.save_pretrained(tmp_path / "run")
        write_train_config(tmp_path / "run", tmp_path / "base", device="cuda")
        return model

    return make


def test_tied_sharded_fp16_base(qwen, tmp_path, capsys):
    model = qwen(0.1)
    out = tmp_path / "out"
    merge_adapters.main(merge_command(tmp_path / "run", out, "--device", "cpu")[2:])
    text = capsys.readouterr().out
    assert "trained on cuda, merging on cpu" in text
    print(error := float(re.search(r"are ([\d.]+) of that away", text)[1]))
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
# config's settings, target modules, linear layers in a decoder layer, new names' old ones
FAMILIES = {
    "gemma2": ({**SMALL, "head_dim": 24}, ["o_proj", "up_proj"], 7, {}),
    "cohere": ({**SMALL, "use_qk_norm": True}, ["q_proj", "down_proj"], 7, {}),
    "phi3": ({**SMALL, "num_key_value_heads": 4}, ["qkv_proj", "gate_up_proj"], 4, {}),
    "mistral3": (MISTRAL3, IN_TEXT, 7, OLD_NAMES),
    "mistral3 by its new names": (MISTRAL3, IN_TEXT, 7, {}),
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
        stored = {}
        for name, p in model.named_parameters():
            if "norm" in name:
                p.data += 0.3 * torch.randn_like(p)
            new = next(filter(name.startswith, old_names), "")
            stored[old_names.get(new, "") + name.removeprefix(new)] = name, p.detach().clone()
        model.save_pretrained(tmp_path / "base")  # for its config
        tensors = {name: p for name, (_, p) in stored.items()}
        save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
        model = get_peft_model(model.float(), LoraConfig(r=4, lora_alpha=8, target_modules=targets))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.data.normal_(0, 0.1)
        model.save_pretrained(tmp_path / "run")
        pattern = r"model\.(language_model\.)?layers\.\d+\.(self_attn|mlp)\.\w+_proj"
        modules = model.base_model.model.named_modules()
        layers = {f"{n}.weight": m for n, m in modules if re.fullmatch(pattern, n)}
        assert len(layers) == 2 * n_linears
        offsets = {name: nf4_offset(p) for name, (new, p) in stored.items() if new in layers}
        write_train_config(tmp_path / "run", tmp_path / "base", absmax_offsets=offsets)
        return layers, stored

    return make


def nf4_offset(weight):
    """The mean absmax, which training records."""
    _, state = bnb.functional.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    return state.offset.item()


@pytest.mark.parametrize("case", FAMILIES)
def test_families(case, family, tmp_path, monkeypatch, capsys):
    layers, stored = family(case)
    in_4bit, all_logits = [], merge_adapters.all_logits

    def spy(model, *args):
        in_4bit.append({n for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)})
        return all_logits(model, *args)

    monkeypatch.setattr(merge_adapters, "all_logits", spy)
    merge_adapters.main(merge_command(tmp_path / "run", tmp_path / "out")[2:])
    text = capsys.readouterr().out
    print(error := float(re.search(r"are ([\d.]+) of that away", text)[1]))
    assert error < 0.05 and "left out" not in text
    # the check's 4-bit model is the one trained on, its vision tower and head as they are
    assert in_4bit[0] == {name.removesuffix(".weight") for name in layers} and not in_4bit[2]
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
    assert line.startswith("error: the merged model does not agree") and "too small for" in line
    assert not (tmp_path / "out").exists() and (tmp_path / ".out.partial").is_dir()
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


BAD = {
    "empty adapter": (edit_adapter(dict.clear), "adapter_config.json targets"),
    "NaN": (edit_adapter(put_nan), "NaN or infinite"),
    "no partner": (
        edit_adapter(lambda t: t.pop(first(t, "A"))), "lacks 1 of the 24 tensors",
    ),
    "lost layer": (edit_adapter(drop_layer), "lacks 2 of the 24 tensors"),
    "untrained": (
        edit_adapter(lambda t: [t[n].zero_() for n in t if "lora_B" in n]), "untrained",
    ),
    "wrong base": (wrong_base, "and adapter_config.json ask for [16, 96]"),
    "no magnitudes": (
        edit_json("adapter_config.json", use_dora=True),
        "lacks 12 of the 36 tensors that adapter_config.json targets, the first is"
        " base_model.model.model.layers.0.mlp.down_proj.lora_magnitude_vector",
    ),
    "magnitudes without DoRA": (edit_adapter(add_magnitude), "lora_magnitude_vector belongs"),
    "another variant": (edit_json("adapter_config.json", lora_bias=True), "lora_bias True is more"),
    "PiSSA": (edit_json("adapter_config.json", init_lora_weights="pissa"), "'pissa' is more"),
    "other alpha rank": (edit_json("adapter_config.json", r=8), "json ask for [8, 512]"),
    "no run": (lambda run, out: (run / "train_config.json").unlink(), "train_config.json that"),
    "no such base": (edit_json("train_config.json", base_model="/nowhere"), "--base_model"),
    "fp4": (edit_json("train_config.json", quantization={"quant_type": "fp4"}), "quant_type fp4"),
    "probes": (edit_json("train_config.json", probe_input_ids=[[5, 999]]), "vocabulary of"),
    "output there": (occupy, "exists already"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case, trained, tmp_path, capsys):
    spoil, words = BAD[case]
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    spoil(run, out)
    before = tree(tmp_path)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(run, out)[2:])
    *_, line = captured = capsys.readouterr().err.splitlines()
    assert len(captured) == 1 and line.startswith("error: ") and words in line, captured
    assert tree(tmp_path) == before


def test_bad_input_by_command_line(trained, tmp_path):
    result = call(merge_command(trained / "demo", tmp_path / "out"), tmp_path)
    assert result.returncode == 1 and "Traceback" not in result.stderr and not result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: --adapter_dir")
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


def test_check_that_cannot_run_leaves_the_merged_model(trained, tmp_path, monkeypatch, capsys):
    def compare(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")  # what torch raises

    monkeypatch.setattr(merge_adapters, "compare", compare)
    with pytest.raises(SystemExit):
        merge_adapters.main(["--adapter_dir", str(trained), "--output_dir", str(tmp_path / "out")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the check did not run") and last.endswith("allocate memory")
    assert (tmp_path / ".out.partial" / "model.safetensors").is_file()


def test_unknown_flag(trained, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(trained, tmp_path / "out", "--adapter", "x")[2:])
    assert "error: unrecognized arguments: --adapter x" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_another_base_of_the_same_shapes(trained, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(trained, run, ignore=shutil.ignore_patterns("checkpoint-*"))
    base = Path(json.loads((run / "train_config.json").read_text())["base_model"])
    shutil.copytree(base, tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"][:8] *= 1.01  # 8 of 512 rows
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    edit_json("train_config.json", base_model=str(tmp_path / "base"))(run, out)
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(merge_command(run, out)[2:])
    (error,) = re.findall("error: .*", capsys.readouterr().err)  # behind the progress bar
    assert "layers.2.mlp.up_proj" in error
    assert "not the base model trained on" in error
    assert not out.exists() and not (tmp_path / ".out.partial").exists()
