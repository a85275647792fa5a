"""Multimodal models by the command line: trained on text, merged, and loaded by their own class.

The files are those that transformers saves. The reference is test_layouts.py's: transformers'
multimodal model with bitsandbytes' NF4, in PEFT.
"""

import json
import re
import warnings

import pytest
import torch
import transformers
from families import OUTER, TINY, from_fp8, to_fp8, write_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from test_layouts import BAR, first_step, make_reference, write_layout
from test_step import FLAGS, LARGE, read_rows, rows_of_step, write_uneven_rows

import merge_adapters
from fsdp_qlora.files import write_header, write_tensor
from fsdp_qlora.merge.merged_layout import find_linears
from fsdp_qlora.merge.open_run import read_base
from fsdp_qlora.pretrained import families
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.reader import stored_tensors
from fsdp_qlora.pretrained.tensor_names import tensor_names

# {model: pair for re.sub()} where transformers saves other names than released files have: 5.24 of
# the first three, 5.20 of the others
RELEASED = {
    "hyperclovax_vision_v2": (
        r"^model\.language_model\.(?!lm_head)", "model.language_model.model."),
    "kimi_k25": (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
    "qianfan_ocr": (r"^language_model\.model\.encoder\.", "language_model.model."),
    **dict.fromkeys(("voxtral", "glmasr", "qwen2_audio", "vibevoice_asr"), (
        r"^language_model\.model\.model\.", "language_model.model."))}
ONLY_RELEASED = RELEASED.keys() - {"hyperclovax_vision_v2"}  # the saved names are refused
NAMES = [*(name for name, make in TINY.items() if make.model_type in families.MULTIMODAL), *OUTER]
CASES = [*((name, "saved") for name in NAMES if name not in ONLY_RELEASED),
         *((name, "released") for name in NAMES if name in RELEASED)]
QUICK = ("llava_next_video", "saved"), ("voxtral", "released")  # video and audio


def write_multimodal(directory, name, how, vocab_size):
    """Write a model as transformers saves it or as it is released, in whole/ too. Returns {name:
    tensor}."""
    write_layout(directory, name, "as saved", vocab_size)
    path = directory / "whole" / "model.safetensors"
    tensors = load_file(path)
    if how == "released":
        tensors = {re.sub(*RELEASED[name], key): tensor for key, tensor in tensors.items()}
        save_file(tensors, path, {"format": "pt"})
    return tensors


@torch.no_grad()
def logits_of(model, rows):
    model.eval()
    return torch.cat([model(input_ids=ids[None].to(model.device)).logits[0].float().cpu()
                      for ids, _ in rows])


@pytest.mark.parametrize("name, how", [
    case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES])
def test_multimodal_model_is_trained_and_merged(
    name, how, run_main, demo_directory, read_metrics, tmp_path, monkeypatch, capsys
):
    """Its first step, the adapter loaded by PEFT, and the merged model loaded by transformers."""
    monkeypatch.chdir(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory / "model")
    tensors = write_multimodal(tmp_path / "model", name, how, len(tokenizer))
    tokenizer.save_pretrained("model")
    write_uneven_rows(tmp_path / "rows.jsonl")
    code, _, err = run_main("--model", "model", *FLAGS, *LARGE, "--output_dir", "run")
    assert code == 0, err
    first, rows = read_metrics("run")[0], read_rows(tmp_path / "rows.jsonl", tokenizer)
    reference = make_reference(tmp_path / "model", name, "as saved")
    loss, norm = first_step(reference, rows_of_step(1, rows))
    off = abs(first["loss"] / loss - 1), abs(first["grad_norm"] / norm - 1)
    assert max(off) <= BAR

    capsys.readouterr()
    merge_adapters.main(["--adapter_dir", "run", "--output_dir", "out"])
    text = capsys.readouterr().out
    assert "\nok: " in text and "are not used" not in text
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*adapter keys")
        peft = PeftModel.from_pretrained(reference.unload(), "run")
    trained = logits_of(peft, rows)
    with peft.disable_adapter():
        plain = logits_of(peft, rows)
    auto = getattr(transformers, re.search(r"load it: (\w+)\.from_pretrained", text)[1])
    loaded, exact = auto.from_pretrained("out", dtype=torch.float32), peft.merge_and_unload()
    error = (logits_of(loaded, rows) - trained).norm() / (trained - plain).norm()
    print(f"| {name} | {off[0]:.1e} | {off[1]:.1e} | {error:.1e} |")
    # of mixtures a router may choose other experts after rounding to bf16
    assert make_architecture(loaded.config).moe or error < 0.02
    weights = loaded.get_decoder().state_dict()
    for key, weight in exact.get_decoder().state_dict().items():
        weight = weight.cpu()
        assert (weights[key] - weight).norm() <= 2**-8 * weight.norm(), key
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    changed = {key for key in found if not torch.equal(found[key], tensors[key])}
    names = tensor_names(make_architecture(loaded.config), tensors)
    assert changed == find_linears(names).keys()


def test_head_tied_by_the_outer_flag_alone_is_refused(tmp_path):
    """As transformers saves a model whose text config has the flag's default; the message says what
    to change, and then it is read."""
    config = OUTER["lighton_ocr"](320)
    config.text_config.tie_word_embeddings = False
    write_model(tmp_path, config)
    path = tmp_path / "config.json"

    def check():
        model_config = transformers.AutoConfig.from_pretrained(tmp_path)
        names = tensor_names(make_architecture(model_config), files := stored_tensors(tmp_path))
        return check_files(files, names, model_config, "bfloat16")

    with pytest.raises(ValueError, match="lacks 1 of .* set tie_word_embeddings to true in"):
        check()
    settings = json.loads(path.read_text())
    settings["text_config"]["tie_word_embeddings"] = True
    path.write_text(json.dumps(settings))
    assert check() == {}


@pytest.mark.parametrize("change, words", [
    ({}, None), ({"mtp.fc.weight_scale_inv": None}, "mtp.fc.weight is F8_E4M3 without .*_scale_in"),
    ({"mtp.fc.weight_packed": torch.zeros(2)}, "mtp.fc.weight_packed is of a weight in 4-bit"),
    ({"mtp.count": torch.tensor(9, dtype=torch.int32)}, "mtp.count is I32, which is not merged")])
def test_fp8_outside_the_text_model_is_multiplied_by_its_scales(change, words, tmp_path):
    """As in Qwen 3.5's layers for multi-token prediction."""
    write_model(tmp_path, TINY["qwen3_5_vl"](320))
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, fc = load_file(path), torch.randn(200, 300, generator=torch.manual_seed(0))
    tensors["mtp.norm.weight"] = torch.ones(200)
    tensors["mtp.fc.weight"], tensors["mtp.fc.weight_scale_inv"] = codes, scales = to_fp8(fc)
    stored = {key: value for key, value in (tensors | change).items() if value is not None}
    save_file(stored, path, {"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": fp8}))
    trained = {"prequantized": False, "quantized_from_dtype": "bfloat16"}
    if words:
        with pytest.raises(ValueError, match=words):
            read_base(str(tmp_path), trained, {}, [])
        return
    base = read_base(str(tmp_path), trained, {}, [])
    assert base.merged_layout.shapes.keys() == tensors.keys() - {"mtp.fc.weight_scale_inv"}
    assert base.unused == []
    merged = merge_adapters.merged_tensor("mtp.fc.weight", base, {}, "cpu")
    assert torch.equal(merged, from_fp8(codes, scales).bfloat16())


def test_integers_outside_the_text_model_stay(tmp_path):
    """Such as the count of a BatchNorm in an audio tower, which bf16 would round."""
    write_model(tmp_path, TINY["qwen3_5_vl"](320))
    path, count = tmp_path / "model.safetensors", torch.tensor(70_001)
    save_file(load_file(path) | {"mtp.count": count}, path, {"format": "pt"})
    base = read_base(
        str(tmp_path), {"prequantized": False, "quantized_from_dtype": "bfloat16"}, {}, [])
    with open(tmp_path / "count.safetensors", "wb") as file:
        write_header(file, {"mtp.count": base.merged_layout.shapes["mtp.count"]})
        write_tensor(file, merge_adapters.merged_tensor("mtp.count", base, {}, "cpu"))
    (found,) = load_file(tmp_path / "count.safetensors").values()
    assert found.dtype == torch.int64 and torch.equal(found, count)
