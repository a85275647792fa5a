"""Loading: reading ahead within bounded memory, broken reads, and models in 4-bit already."""

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from conftest import DEVICE, run_once
from families import TINY, write_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig

import merge_adapters
from fsdp_qlora.hashing import tensor_checksum
from fsdp_qlora.merge import open_run
from fsdp_qlora.pretrained.model_directory import base_digest
from fsdp_qlora.pretrained.reader import (
    DTYPES, RandomWeights, ReadRequest, WeightReader, read_header, stored_tensors)
from fsdp_qlora.pretrained.weight_formats import NF4_STATE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import loading  # noqa: E402

HERE = torch.empty(0, device=DEVICE).device
LAYER = "model.layers.1.mlp.up_proj.weight"
STORAGES = {"uint8": torch.uint8, "bfloat16": torch.bfloat16, "float32": torch.float32}


# ------------------------------------------------------------------------------------------------
# Reading
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path, monkeypatch):
    """Tensors of all dtypes in four files, to be read in small pieces: {name: tensor}, {name:
    StoredTensor} and ReadRequests of whole and partial tensors and of no rows."""
    monkeypatch.setattr("fsdp_qlora.pretrained.reader.READ_CHUNK", 1000)  # no whole rows, weights
    monkeypatch.setattr("fsdp_qlora.pretrained.reader.READ_AHEAD", 20_000)  # less than the largest
    generator = torch.Generator().manual_seed(0)
    tensors, files, requests = {}, {}, []
    for dtype in DTYPES.values():
        for shape in (7,), (9, 31), (101, 77), (5, 3, 2):
            for rows in range(shape[0]), range(2, 5), range(4, 4):
                name = f"{dtype}-{len(shape)}-{shape[0]}-{len(rows)}"
                tensors[name] = (torch.randn(shape, generator=generator) * 100).abs().to(dtype)
                files[name] = tmp_path / f"{len(files) % 4}.safetensors"
                requests.append(ReadRequest(name, shape, rows))
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, file)
    return tensors, {n: read_header(file)[n] for n, file in files.items()}, requests


def right(tensors, request, got):
    """Whether `got` is what was requested."""
    want = tensors[request.name][request.rows.start : request.rows.stop]
    return got.dtype == want.dtype and torch.equal(got.cpu(), want.flatten())


@pytest.mark.parametrize("order", ["as requested", "backwards", "shuffled"])
def test_any_rows_of_any_dtype_are_read_in_any_order(stored, order):
    tensors, files, requests = stored
    reader, asked = WeightReader(files, requests, HERE), list(requests)
    if order == "backwards":
        asked.reverse()
    elif order == "shuffled":
        random.Random(3).shuffle(asked)
    for request in asked:
        assert right(tensors, request, reader.read(request.name)), request
    reader.close()


def test_what_is_read_ahead_is_bounded(stored):
    """What was asked for counts no more, so that at most one tensor is there besides."""
    tensors, files, requests = stored
    reader, most = WeightReader(files, requests, HERE), 0
    for request in requests:
        assert right(tensors, request, reader.read(request.name))
        most = max(most, sum(tensor.nbytes for tensor, *_ in reader.ahead.values()))
    largest = max(tensor.nbytes for tensor in tensors.values())  # it comes alone
    assert 10_000 < most <= max(20_000, largest)


def test_after_a_failed_read_there_are_zeros_and_an_error_at_the_end(stored):
    """Of a file that was cut off: what comes before is right, all that comes after is zeros."""
    tensors, files, requests = stored
    requests = [request for request in requests if request.rows]
    cut = files[requests[20].name]
    os.truncate(cut.path, cut.start + 1)
    missing = [r.name for r in requests if files[r.name].path == cut.path
               and files[r.name].start >= cut.start]  # fmt: skip
    reader = WeightReader(files, requests, HERE)
    are_right = []
    for request in requests:
        got = reader.read(request.name)
        assert got.numel() == tensors[request.name][request.rows.start : request.rows.stop].numel()
        are_right.append(right(tensors, request, got))
        assert are_right[-1] or not got.float().any()  # CUDA has no any() of FP8
    first = are_right.index(False)
    assert requests[first].name in missing and first > 0
    assert not any(are_right[first:])
    with pytest.raises(OSError, match=f"{cut.path}: ends before byte "):
        reader.close()


def test_random_weights_follow_from_names(stored):
    _, _, requests = stored
    whole = [ReadRequest(r.name, r.shape, range(r.shape[0])) for r in requests]
    readers = [RandomWeights(r, 7, torch.float32, HERE) for r in (requests, whole, whole[::-1])]
    for request in requests:
        part, *wholes = (reader.read(request.name) for reader in readers)
        assert torch.equal(*wholes) and wholes[0].std() > 0.005
        rows = wholes[0].view(request.shape)[request.rows.start : request.rows.stop]
        assert torch.equal(part, rows.flatten())
    # what 60 layers multiply with must not be 0.02 each
    factors = ("layer_scalar", 1), ("router.scale", 1), ("norm.weight", 1), ("q_proj.bias", 0)
    for name, value in factors:
        reader = RandomWeights([ReadRequest(name, (3,), range(3))], 7, torch.float32, HERE)
        assert reader.read(name).tolist() == [value] * 3
    other = RandomWeights(requests, 8, torch.float32, HERE).read(requests[0].name)
    assert not torch.equal(other, readers[1].read(requests[0].name))


def test_weights_are_told_by_name_alone(run_main, tiny_model, tmp_path):
    """Gate and up are of one shape: where they have changed names in the file it is another model,
    where the tensors lie in other files it is the same."""
    base, up, gate = tiny_model("llama"), LAYER, LAYER.replace("up_proj", "gate_proj")
    swapped = Path(shutil.copytree(base, tmp_path / "swapped"))
    tensors = load_file(base / "model.safetensors")
    tensors[up], tensors[gate] = tensors[gate], tensors[up]
    save_file(tensors, swapped / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "data.jsonl").write_text('{"text": "What is 1 plus 1?"}\n' * 8)
    seen = []
    for i, model in enumerate((base, tiny_model("llama", max_shard_size="100KB"), swapped)):
        out = tmp_path / f"run {i}"
        flags = "--dataset", tmp_path / "data.jsonl", "--max_steps", 1, "--batch_size", 4
        code, _, err = run_main("--model", model, *flags, "--output_dir", out)
        assert code == 0, err
        quantization = json.loads((out / "train_config.json").read_text())["quantization"]
        loss = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        seen.append((quantization["tensor_sums"], loss))
    (sums, loss), same, (exchanged, other_loss) = seen
    assert same == (sums, loss)
    assert abs(other_loss - loss) > 1e-5 * loss
    assert exchanged == {**sums, up: sums[gate], gate: sums[up]} != sums


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.uint8))
def test_sums_of_parts_add_up_to_that_of_the_whole(dtype, monkeypatch):
    """Whatever rows several ranks read; another order, sign or value gives another sum."""
    monkeypatch.setattr("fsdp_qlora.hashing.SUM_CHUNK", {"cpu": 50})
    whole = torch.randint(1, 200, (9, 24)).to(dtype)
    parts = [(range(4), 0), (range(3, 7), 4), (range(7), 7), (range(2, 9), 7), (range(9), 9)]
    sums = [tensor_checksum(whole[rows.start : rows.stop], rows, n) for rows, n in parts]
    total = tensor_checksum(whole)
    assert torch.equal(sum(sums), total) and total.dtype == torch.int64
    changed = whole.clone()
    changed[8, 23] += 1
    for other in whole.flip(0), whole.flip(1), whole.neg(), changed:
        assert not torch.equal(tensor_checksum(other), total)


@pytest.mark.parametrize("place", range(16))
def test_base_digest_looks_at_all_of_a_tensor(place, tiny_model, tmp_path):
    base = Path(shutil.copytree(tiny_model("llama"), tmp_path / "base"))
    before, path = base_digest(base), base / "model.safetensors"
    stored = read_header(path)[LAYER]
    content = bytearray(path.read_bytes())
    content[stored.start + (stored.stop - 1 - stored.start) * place // 15] ^= 1
    path.write_bytes(content)
    assert base_digest(base) != before


def test_whole_file_beside_an_index_is_the_model(tmp_path):
    """As transformers has it, which reads an index only where there is no model.safetensors."""
    config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=1)  # fmt: skip
    for seed, size in enumerate(("1KB", "1GB")):  # the second one leaves what the first wrote
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(
            tmp_path / size, max_shard_size=size)  # fmt: skip
    shutil.copytree(tmp_path / "1GB", tmp_path / "1KB", dirs_exist_ok=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "1KB").state_dict()
    path = stored_tensors(tmp_path / "1KB")["model.norm.weight"].path
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(load_file(path)[name], theirs[name])


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="hidden by CUDA's own; see benchmarks/")
def test_reading_stops_within_bounded_memory(tmp_path, monkeypatch):
    """A rank reads 200 of 400 MB and keeps 56; what it needs beyond that is 65 MB, mostly
    bitsandbytes' own. Read all at once it would be 200."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8}
    LlamaConfig(vocab_size=512, **sizes).save_pretrained(tmp_path / "shapes")
    monkeypatch.setattr(loading, "SHARD", 1e8)
    model = tmp_path / "model"
    loading.write_model(model, *loading.model_shapes(tmp_path / "shapes", 0.4))
    files = [path.stat().st_size for path in model.glob("*.safetensors")]
    assert len(files) >= 4 and sum(files) > 0.4e9
    # glibc would keep what bitsandbytes' CPU code frees, in a heap full of holes
    env = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    job = {"case": "memory", "model": str(model), "ahead": 2**24, "out": str(tmp_path / "out")}
    result = run_once(2, job, tmp_path, env)
    assert result.returncode == 0, result.stderr
    grown = load_file(tmp_path / "out")["grown"]
    print(f"host memory grew by {grown.tolist()} bytes")
    assert 0 < grown.max() < 0.18e9


def test_file_cut_off_while_loading_ends_all_ranks(run_jobs, tiny_model, tmp_path):
    """After the check, before the read: of the last tensor, 256 bytes, rank 1 alone misses some."""
    model = Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))
    file = model / "model.safetensors"
    size = file.stat().st_size - 100
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "What is 1 plus 1?"}\n' * 8)
    args = ["--model", model, "--dataset", data, "--output_dir", tmp_path / "out"]
    job = {"argv": list(map(str, args)), "cut_off": [str(file), size]}
    _, err = run_jobs(2, [job], cwd=tmp_path, code=3, timeout=60)
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    assert f"{file}: ends before byte {size + 100}" in lines[0]
    assert "Traceback" not in err.partition("error: ")[0]
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------
# Quantized already
# ------------------------------------------------------------------------------------------------


def save_4bit(base, directory, storage, dtype=torch.bfloat16, skip=None):
    """The base as transformers and bitsandbytes save it in 4-bit, with its tokenizer; linears named
    in `skip` stay as they are."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=storage,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=skip,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=quantization, dtype=dtype, device_map={"": DEVICE}
    )
    model.save_pretrained(directory, max_shard_size="40KB")
    for path in Path(base).glob("*token*"):
        shutil.copy(path, directory)
    return directory


def saved_tensors(directory):
    return {k: v for f in sorted(directory.glob("*.safetensors")) for k, v in load_file(f).items()}


@pytest.fixture(scope="module")
def in_4bit(tiny_model, tmp_path_factory):
    """Function (storage name, dtype=bfloat16): the tiny llama's directory, saved in 4-bit."""
    made = {}

    def make(storage, dtype=torch.bfloat16):
        if (storage, dtype) not in made:
            directory = tmp_path_factory.mktemp("in-4bit") / f"{storage}-{dtype}"
            made[storage, dtype] = save_4bit(tiny_model("llama"), directory, STORAGES[storage],
                                             dtype)  # fmt: skip
        return made[storage, dtype]

    return make


def test_stored_bytes_are_those_computed_with(run_jobs, tiny_model, tmp_path):
    # 64 x 191 weights are 191 blocks, 96 x 171 are 256.5: shards begin inside rows, and are padded
    bases = {
        "uint8": tiny_model("llama", hidden_size=64, intermediate_size=191),
        "bfloat16": tiny_model("qwen2", hidden_size=96, intermediate_size=171),
    }
    models = [save_4bit(base, tmp_path / name, STORAGES[name]) for name, base in bases.items()]
    # in these some linears are in NF4, others not: up in all layers; all experts
    mixed = save_4bit(bases["uint8"], tmp_path / "mixed", torch.uint8, skip=["lm_head", "up_proj"])
    moe = tmp_path / "moe"
    tokenizer = AutoTokenizer.from_pretrained(bases["uint8"])
    write_4bit(moe, TINY["qwen3_moe"](len(tokenizer)), 5, torch.bfloat16)
    tokenizer.save_pretrained(moe)
    models += [mixed, moe]
    for path in models[0].glob("*.safetensors"):  # another version's last bits
        tensors = load_file(path)
        for name in tensors:
            if name.endswith("nested_quant_map"):
                tensors[name] *= 1 - 2**-20
        save_file(tensors, path, {"format": "pt"})
    out = tmp_path / "out"
    job = {"case": "quantized", "models": [str(m) for m in models], "out": str(out)}
    run_jobs(2, [job], cwd=tmp_path)
    seen = load_file(out)
    for directory in models:
        tensors = saved_tensors(directory)
        assert len(list(directory.glob("*.safetensors"))) > 2 or directory == moe
        layers = [k.removesuffix(".weight") for k in tensors if k.endswith("_proj.weight")]
        in_4bit = sum(k.endswith("weight.absmax") for k in tensors)
        assert len(layers) == 3 * (4 + 3 * (8 if directory == moe else 1))
        assert in_4bit == {mixed: 3 * 6, moe: 3 * 4}.get(directory, 3 * 7)
        for layer in layers:
            weight, prefix = tensors[f"{layer}.weight"], f"{layer}.weight."
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if not state:  # what bitsandbytes makes of it
                weight, whole = bnb.functional.quantize_4bit(
                    weight, compress_statistics=True, quant_type="nf4", blocksize=64)  # fmt: skip
                state = whole.as_dict(packed=True)
            stored = bnb.functional.QuantState.from_dict(dict(state), DEVICE)
            packed = weight.view(torch.uint8).view(-1)
            want = {
                "codes": state["absmax"],
                "nested_absmax": state["nested_absmax"],
                "nested_code": state["nested_quant_map"],
                "offset": stored.offset,
                "dequantized": bnb.functional.dequantize_4bit(
                    packed.view(-1, 1).to(DEVICE), stored
                ),
            }
            got = {key: seen[f"{directory.name}/{layer}.{key}"] for key in [*want, "packed"]}
            assert torch.equal(got["packed"].view(-1)[: packed.numel()], packed), layer
            for key, value in want.items():
                assert torch.equal(got[key], value.cpu()), (layer, key)


def run_and_merge(run_main, model, directory, capsys):
    """Losses of two steps, what was printed, and the merged model's tensors."""
    data = directory.parent / "data.jsonl"
    data.write_text('{"prompt": "What is 1 plus 1?", "completion": "The answer is 2."}\n' * 8)
    code, out, err = run_main(
        "--model", model, "--dataset", data, "--output_dir", directory, "--max_steps", 2,
        "--batch_size", 4, "--learning_rate", 1e-2,
    )  # fmt: skip
    assert code == 0, err
    losses = [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").open()]
    merged = directory / "merged"
    merge_adapters.main(["--adapter_dir", str(directory), "--output_dir", str(merged)])
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    return losses, out + capsys.readouterr().out, saved_tensors(merged)


def test_training_and_merging_equal_those_of_the_original(
    run_main, tiny_model, in_4bit, tmp_path, capsys
):
    losses, out, merged = run_and_merge(run_main, tiny_model("llama"), tmp_path / "base", capsys)
    assert "quantized already" not in out and losses[0] != losses[1]
    for storage in "uint8", "bfloat16":
        got = run_and_merge(run_main, in_4bit(storage), tmp_path / storage, capsys)
        assert got[0][0] == losses[0]
        assert "already NF4, loaded as is (21 linears)" in got[1]
        assert "dequantized to" not in got[1]
        assert got[2].keys() == merged.keys()
        if DEVICE == "cpu":  # the attention's backward adds with atomics on a GPU, in any order
            assert got[0] == losses
            assert all(torch.equal(got[2][name], merged[name]) for name in merged)


def test_model_in_4bit_from_another_dtype(run_main, in_4bit, tmp_path, capsys):
    model = in_4bit("float32", torch.float16)
    losses, out, merged = run_and_merge(run_main, model, tmp_path / "run", capsys)
    assert "quantized from float16" in out and "dequantized to bfloat16" in out
    # the merge's own check, against a model that dequantizes to bfloat16 as well
    assert float(re.search(r"differ by ([\d.]+) % of", out)[1]) < 10
    tensors, adapter = saved_tensors(model), load_file(tmp_path / "run/adapter_model.safetensors")
    state = {k: v for k, v in tensors.items() if k.startswith(f"{LAYER}.")}
    state = bnb.functional.QuantState.from_dict(state, DEVICE)
    assert state.dtype == torch.float16
    state.dtype = torch.bfloat16
    packed = tensors[LAYER].view(torch.uint8).to(DEVICE)
    a, b = (adapter[f"base_model.model.{LAYER.removesuffix('weight')}lora_{x}.weight"].to(DEVICE)
            for x in "AB")  # fmt: skip
    want = bnb.functional.dequantize_4bit(packed, state).float() + 32 / 16 * (b @ a)
    assert torch.equal(merged[LAYER], want.bfloat16().cpu())


def test_merge_wants_the_model_trained_on(run_main, in_4bit, tiny_model, tmp_path, capsys):
    bases = [str(tiny_model("llama")), str(in_4bit("uint8"))]
    for base, other, words in zip(bases, bases[::-1], ["is in NF4", "is not in NF4"]):
        run = tmp_path / Path(base).name
        run_and_merge(run_main, base, run, capsys)
        with pytest.raises(SystemExit, match="1"):
            merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(tmp_path / "out"),
                                 "--base_model", other])  # fmt: skip
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: base model") and words in line


@pytest.mark.parametrize("part", [
    "", *(pytest.param(part, marks=pytest.mark.slow) for part in (".absmax", ".nested_absmax"))])
def test_merge_wants_the_codes_and_scales_of_training(part, run_main, in_4bit, tmp_path, capsys,
                                                      monkeypatch):  # fmt: skip
    """Of a base in 4 bits, also where its digest, which looks at some places, is the same."""
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(in_4bit("uint8"), base)
    run_and_merge(run_main, base, run, capsys)
    same = base_digest(base)
    monkeypatch.setattr(open_run, "base_digest", lambda _: same)
    (file,) = (path for path in base.glob("*.safetensors") if LAYER in load_file(path))
    tensors = load_file(file)
    tensors[LAYER + part].view(torch.uint8).view(-1)[5] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SystemExit, match="1"):
        merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(tmp_path / "out"),
                             "--no-check"])  # fmt: skip
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the values of {LAYER}{part} are not those" in line


def edit(part, change):
    """A change of one of the layer's stored tensors; its new value, None to remove it."""

    def apply(tensors):
        name = f"{LAYER}.{part}" if part else LAYER
        value = change(tensors.pop(name, None))
        if value is not None:
            tensors[name] = value

    return apply


def edit_state(**values):
    def change(tensor):
        state = {**json.loads(bytes(tensor.tolist())), **values}
        return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)

    return edit(NF4_STATE, change)


def quantize_head(tensors):
    tensors["lm_head.weight.absmax"] = torch.zeros(9, dtype=torch.uint8)


WRONG_TENSORS = {
    "no state": (edit(NF4_STATE, lambda t: None), [LAYER, "can be in 4-bit, in NF4"]),
    "head in 4-bit": (quantize_head, ["lm_head.weight"]),
    "fp4": (edit_state(quant_type="fp4"), [LAYER, "quant_type fp4"]),
    "blocksize": (edit_state(blocksize=128), [LAYER, "blocksize 128"]),
    "nested blocksize": (edit_state(nested_blocksize=128), [LAYER, "nested_blocksize 128"]),
    "shape": (edit_state(shape=[128, 320]), [LAYER, "[128, 320]"]),
    "code": (edit("quant_map", lambda t: t.flip(0)), ["quant_map", "code"]),
    "nested code": (edit("nested_quant_map", lambda t: t * 1.01), ["nested_quant_map", "code"]),
    "no absmax": (edit("absmax", lambda t: None), ["lacks 1 of", f"{LAYER}.absmax"]),
    "short absmax": (edit("absmax", lambda t: t[1:].clone()), ["absmax", "[639]", "[640]"]),
    "float absmax": (edit("absmax", lambda t: t.float()), ["absmax", "double"]),
    "short weight": (edit("", lambda t: t[1:].clone()), [LAYER, "20479 bytes"]),
    "not JSON": (edit(NF4_STATE, lambda t: t[:9].clone()), [LAYER, "not a JSON object"]),
}


@pytest.fixture
def refused(run_main, in_4bit, tmp_path):
    """Function (*words, settings={}, change=None): the model in 4-bit with those settings of its
    quantization_config and that change of its tensors is refused in one line of those words."""

    def run(*words, settings=(), change=None):
        directory = Path(shutil.copytree(in_4bit("uint8"), tmp_path / "model"))
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"].update(settings)
        (directory / "config.json").write_text(json.dumps(config))
        if change:
            tensors = saved_tensors(directory)
            for path in directory.glob("model*.safetensors*"):
                path.unlink()
            change(tensors)
            save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        data = tmp_path / "data.jsonl"
        data.write_text('{"text": "What is 1 plus 1?"}\n' * 8)
        code, out, err = run_main("--model", directory, "--dataset", data, "--max_steps", 1,
                                  "--output_dir", tmp_path / "out")  # fmt: skip
        (line,) = err.strip().splitlines()
        assert code != 0 and line.startswith("error: ") and "base model loaded" not in out
        assert all(word in line for word in words), line

    return run


@pytest.mark.parametrize(
    "settings",
    [{"quant_method": "gptq"}, {"bnb_4bit_quant_type": "fp4"},
     {"bnb_4bit_use_double_quant": False}, {"load_in_4bit": False}],
    ids=str,
)  # fmt: skip
def test_model_quantized_otherwise_is_refused(refused, settings):
    ((key, value),) = settings.items()
    refused("quantized already", f"{key} {value}", "the original model", settings=settings)


def test_fp8_of_other_blocks_is_refused(refused):
    settings = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    refused("quantized already", "weight_block_size [64, 64]; only [128, 128]", settings=settings)


@pytest.mark.parametrize("form, weights, words", [
    ("pack-quantized", {"num_bits": 8}, "num_bits 8; only 4"),
    ("pack-quantized", {"group_size": 128}, "group_size 128; only 32"),
    ("pack-quantized", {"symmetric": False}, "symmetric False; only True"),
    ("nvfp4-pack-quantized", {}, "format nvfp4-pack-quantized; only pack-quantized")])  # fmt: skip
def test_other_forms_of_compressed_tensors_are_refused(refused, form, weights, words):
    int4 = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, **weights}
    settings = {"quant_method": "compressed-tensors", "format": form,
                "config_groups": {"group_0": {"weights": int4}}}  # fmt: skip
    refused("quantized already", words, settings=settings)


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_in_4bit_that_cannot_be_used_are_refused(refused, case):
    change, words = WRONG_TENSORS[case]
    refused(*words, change=change)


@pytest.mark.slow
def test_benchmark_measures_a_load(tiny_model, tmp_path, monkeypatch, capsys):
    flags = ["--gb", "0.001", "--shapes", str(tiny_model("llama")), "--nproc", "1"]
    monkeypatch.setattr(sys, "argv", ["loading.py", str(tmp_path / "model"), *flags])
    loading.main()
    header, _, row = capsys.readouterr().out.splitlines()[-3:]
    assert header.count("|") == row.count("|") == 7 and row.startswith("| 0.0 ")
