"""gpt-oss in MXFP4, as it is released: its experts stay as they are, to the bit.

That it gives the same on two processes is in test_step.py.
"""

import re

import bitsandbytes as bnb
import pytest
import torch
from families import TINY, mxfp4_experts, write_4bit, write_mxfp4
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fsdp_qlora.checks import compare_with_transformers as check
from fsdp_qlora.checks.compare_with_transformers import (
    cpu_model, random_adapter, random_hf_model, dequantized_weights)
from fsdp_qlora.config import Config
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.model.load import copy_mxfp4
from fsdp_qlora.model.shards import LocalBlocks
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.model_directory import read_model_config
from fsdp_qlora.pretrained.reader import stored_tensors
from fsdp_qlora.pretrained.shrunk_config import shrunk_config
from fsdp_qlora.pretrained.stored_weights import StoredWeights
from fsdp_qlora.pretrained.tensor_names import TensorNames, tensor_names
from fsdp_qlora.quant.blocks import BLOCKSIZE, FourBitBlocks
from fsdp_qlora.quant.nf4 import mxfp4_values
from fsdp_qlora.ranks import RunEnd

IN_MXFP4 = {"quant_method": "mxfp4"}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    directory = tmp_path_factory.mktemp("mxfp4") / "model"
    write_mxfp4(directory, 320)
    return directory


def test_every_code_and_scale_means_what_transformers_says():
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).expand(1, 255, 16).contiguous()
    for dtype in torch.bfloat16, torch.float32:
        want = convert_moe_packed_tensors(codes, scales, dtype=dtype)[0].t()
        turned = (codes << 4 | codes >> 4).reshape(-1, 32)
        assert torch.equal(mxfp4_values(turned, scales.view(-1, 2)).to(dtype).view(255, -1), want)


def small_model(kind=None, again=False, inner=None):
    """A shrunk model with experts in MXFP4, here and as transformers has it; `inner`: their width,
    None: as wide as hidden states."""
    small = shrunk_config(TINY["gpt_oss"](320))
    small.intermediate_size = inner or small.hidden_size
    reference = random_hf_model(small, torch.Generator().manual_seed(0))
    tensors, packed = dict(reference.state_dict()), mxfp4_experts(small)
    for name in {name.rpartition("_")[0] for name in packed}:
        values = convert_moe_packed_tensors(
            packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32)
        tensors.pop(name).copy_(values)
    plain, small.quantization_config = make_architecture(small), IN_MXFP4
    arch = make_architecture(small)
    model = cpu_model(small, arch, tensors | packed, 24, kind, again)
    return model, reference, tensor_names(plain, reference.state_dict())


def test_weights_are_dequantized_to_the_bit():
    model, reference, _ = small_model()
    for i, layer in enumerate(model.layers):
        adapter = layer.adapter.bfloat16()
        for key, fused in zip(("gate_up_proj", "down_proj"), layer.spec.mlp_sublayer.fused_linears):
            got = dequantize(layer, fused, adapter)[:, : fused.in_features]
            want = reference.get_parameter(f"model.layers.{i}.mlp.experts.{key}").bfloat16()
            assert torch.equal(got.view(len(want), -1, fused.in_features), want.transpose(1, 2))


def test_a_rank_may_have_a_part_of_a_row():
    """Blocks 2 to 6 of rows of three."""
    model, *_ = small_model(inner=3 * BLOCKSIZE)
    layer = model.layers[0]
    fused = layer.spec.mlp_sublayer.fused_linears[1]
    linear = fused.linears[2]
    assert fused.in_features == 3 * BLOCKSIZE
    local, shard = LocalBlocks(linear, slice(2, 7), slice(1, 6)), FourBitBlocks.zeros(6, "cpu", 2)
    whole = layer.packed_weights.packed[linear.blocks], layer.packed_weights.scales[linear.blocks]

    def read(name):
        blocks = slice(local.rows.start * 3, local.rows.stop * 3)
        packed, scales = (t[blocks].flatten() for t in whole)
        return (packed << 4 | packed >> 4) if name.endswith("_blocks") else scales

    files = StoredWeights(read, TensorNames(), {}, torch.bfloat16)
    assert copy_mxfp4([(local, "down")], shard, files) == []
    for got, want in zip((shard.packed, shard.scales), whole):
        assert torch.equal(got[1:], want[2:7]) and not got[0].any()


@pytest.mark.parametrize("inner", [None, 192])
@pytest.mark.parametrize("again", [False, True])
def test_model_equals_transformers(again, inner):
    model, reference, names = small_model("lora", again, inner)
    weights = dequantized_weights(model, names)
    random_adapter(model, torch.Generator().manual_seed(1))
    ids = torch.randint(3, 128, (sum(check.LENGTHS),), generator=torch.Generator().manual_seed(2))
    ours = check.results(model, ids)
    theirs = check.hf_results(reference, model, names, weights, ids)
    for key, value in ours.items():
        assert (value - theirs[key]).norm() < 1e-5 * theirs[key].norm(), key


def read_config(directory):
    return read_model_config(directory, Config(model=str(directory)))


def checked(directory):
    """What check_files() returns of a model; raises what it raises."""
    model_config, arch = read_config(directory)
    files = stored_tensors(directory)
    return check_files(files, tensor_names(arch, files), model_config, "bfloat16")


def test_parameters_are_counted_as_weights_and_loading_says_what_stays(released, capsys):
    assert checked(released) == {}
    says = "24 linears of experts stay in MXFP4"
    assert says in capsys.readouterr().out
    plain = AutoConfig.from_pretrained(released)
    del plain.quantization_config
    want = tensor_names(make_architecture(plain), {}).n_parameters
    assert tensor_names(read_config(released)[1], stored_tensors(released)).n_parameters == want


def larger_blocks(tensors):
    """Of 64 weights, with one scale each."""
    for name in [name for name in tensors if name.endswith("_blocks")]:
        tensors[name] = tensors[name].unflatten(2, (-1, 2)).flatten(3)
        scales = name.replace("_blocks", "_scales")
        tensors[scales] = tensors[scales][..., ::2].contiguous()


def no_scales(tensors):
    for name in [name for name in tensors if name.endswith("down_proj_scales")]:
        del tensors[name]


def wide_scales(tensors):
    for name in tensors:
        if name.endswith("_scales"):
            tensors[name] = tensors[name].float()


@pytest.mark.parametrize("change, words", [
    (larger_blocks, "_blocks has shape .*: MXFP4 has one scale for 32 weights"),
    (no_scales, "lacks 3 of .* is model.layers.0.mlp.experts.down_proj_scales"),
    (wide_scales, "_scales is F32, which is not supported; U8 are")])  # fmt: skip
def test_tensors_that_are_no_mxfp4_are_refused(change, words, released, tmp_path):
    tensors = load_file(released / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((released / "config.json").read_bytes())
    with pytest.raises(ValueError, match=words):
        checked(tmp_path)


def as_unsloth_has_it(tensors):
    """Of each expert gate_up_projs.N.weight [2 inner, hidden] in NF4 with a bias, down_projs
    alike; and router.linear."""
    found = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found[name.replace(".router.", ".router.linear.")] = tensor
            continue
        for i, values in enumerate(tensor):
            if name.endswith("_bias"):
                found[name.removesuffix("_bias") + f"s.{i}.bias"] = values.clone()
                continue
            key = f"{name}s.{i}.weight"
            found[key], state = bnb.functional.quantize_4bit(
                values.t().contiguous(), compress_statistics=True, quant_type="nf4", blocksize=64)
            found |= {f"{key}.{part}": x for part, x in state.as_dict(packed=True).items()}
    return found


def test_unsloths_copy_in_nf4_is_refused_by_naming_the_original(run_main, demo_directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    tokenizer.save_pretrained(tmp_path)
    write_4bit(tmp_path, TINY["gpt_oss"](len(tokenizer)), 4)
    path = tmp_path / "model.safetensors"
    save_file(as_unsloth_has_it(load_file(path)), path, {"format": "pt"})
    code, _, err = run_main("--model", tmp_path, "--dataset", demo_directory / "data.jsonl",
                            "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 3
    assert re.fullmatch(r"error: .*\.experts\.(down|gate_up)_projs\.0\.weight\.absmax: .* Use"
                        r" openai/gpt-oss-20b or .*", err.strip().splitlines()[-1])


def test_scale_that_is_no_number_is_named(released, run_main, demo_directory, tmp_path):
    """255 is MXFP4's NaN; nothing else among its bytes is none."""
    tensors = load_file(released / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[f"{name}_scales"][2, 3, 1] = 255
    tensors[f"{name}_blocks"][2, 3, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    for path in released / "config.json", *(demo_directory / "model").glob("*token*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code, _, err = run_main(
        "--model", tmp_path, "--dataset", demo_directory / "data.jsonl", "--max_steps", 1,
        "--max_seq_len", 64, "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 3
    assert "model.layers.1.mlp.experts.2.down_proj.weight_scales has values that are not" in err


@pytest.mark.parametrize("name, words", [
    ("gpt_oss", "MXFP4 with rows of 64 and 96 weights is not supported, only with multiples of 64"),
    ("mixtral", "is quantized already, with quant_method mxfp4; only bitsandbytes is"),
    ("llama", "is quantized already, with quant_method mxfp4; only bitsandbytes is")])  # fmt: skip
def test_model_that_cannot_be_in_mxfp4_is_refused(name, words, tmp_path):
    config = TINY[name](320)
    config.intermediate_size, config.quantization_config = 96, IN_MXFP4
    config.save_pretrained(tmp_path)
    with pytest.raises((ValueError, RunEnd), match=words):
        read_config(tmp_path)
