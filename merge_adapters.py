#!/usr/bin/env python3
"""Merge a LoRA adapter trained by train_fsdp_qlora.py into its base model: plain bf16 safetensors.

    python merge_adapters.py --adapter_dir runs/my-run --output_dir runs/my-run/merged
    python merge_adapters.py --adapter_dir runs/my-run/checkpoint-000040 --output_dir merged-40
    python merge_adapters.py --adapter_dir runs/my-run --output_dir merged --no-check

The adapter was trained on NF4 weights, so those are what it is added to: W + D, where W is the
base's weight quantised and dequantised as in training (only dequantised where the base is stored in
4-bit already) and D = scaling * B @ A, is computed in fp32 and rounded to bf16 once. With DoRA each
row of the sum is scaled to the norm that its magnitude says, before it is rounded. Linear layers
without an adapter are W, all other tensors the base's own. Weights pass through one at a time.
Written to --output_dir, which appears only when all is done:

    *.safetensors, model.safetensors.index.json    one file for each of the base's
    config.json, generation_config.json, tokenizer files, chat template

Then the check: the same prompts through the 4-bit base, the same with the adapter, and the merged
model, which must agree with the second. It needs room for one model at a time.

Tested with torch 2.13, transformers 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import functools
import gc
import json
import math
import os
import re
import resource
import shutil
import sys
from pathlib import Path

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------

NF4 = {"quant_type": "nf4", "blocksize": 64, "double_quant": True, "nested_blocksize": 256}
LARGE_ERROR = 0.20  # of the adapter's own effect: said plainly from here on
FAILED_ERROR = 1.0  # further from what was trained than the base is: not a merge of it
SAME_OFFSET = 1e-5  # relative; summing in another order, on another device, moves it by 1e-7
CHUNK = 2**24  # weights whose rounding error is summed in fp64 at once: 128 MiB
NF4_STATE = "quant_state.bitsandbytes__nf4"  # what bitsandbytes stores beside a weight, and
NF4_PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map", NF4_STATE)
ADAPTER_NAME = r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|(magnitude_vector))"
HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # a model's small files
TWICE = ["consolidated*", "*/*.safetensors"]  # the same weights in another form
# what adapter_config.json may say; other options must have their default
MERGEABLE = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision",
    "task_type", "inference_mode", "r", "lora_alpha", "lora_dropout", "rank_pattern",
    "alpha_pattern", "use_rslora", "use_dora", "init_lora_weights", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern",
}  # fmt: skip


def parse_config(argv):
    """The flags. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)

    def fail(message):
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.add_argument("--adapter_dir", required=True,
                        help="run directory of train_fsdp_qlora.py, or a checkpoint-NNNNNN in it")
    parser.add_argument("--output_dir", required=True,
                        help="where the merged model goes: a new directory")
    parser.add_argument("--base_model",
                        help="Hub id or directory; default: the one that train_config.json names")
    parser.add_argument("--device", choices=("cpu", "cuda"),
                        help="that quantises and checks; default: the kind that training used")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True,
                        help="compare with the 4-bit model; needs room for one model at a time")
    return parser.parse_args(argv)


# ------------------------------------------------------------------------------------------------
# The run: its configuration, base model and adapter
# ------------------------------------------------------------------------------------------------


def read_json(path):
    try:
        content = json.loads(path.read_text())
    except ValueError as e:
        raise ValueError(f"{path}: not JSON: {e}")
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def open_tensors(path):
    """safe_open with the file's name in its errors."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path}: not a whole safetensors file: {e}")


def read_run(adapter_dir):
    """train_config.json of a run directory or of a checkpoint's parent, checked."""
    if not adapter_dir.is_dir():
        raise ValueError(f"--adapter_dir {adapter_dir}: no such directory")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (adapter_dir / name).is_file():
            raise ValueError(f"--adapter_dir {adapter_dir}: has no {name}; name a run directory of"
                             " train_fsdp_qlora.py or a checkpoint in it")
    path = adapter_dir / "train_config.json"
    if not path.is_file():
        path = adapter_dir.resolve().parent / "train_config.json"
    if not path.is_file():
        raise ValueError(f"--adapter_dir {adapter_dir}: neither it nor the directory above has the"
                         " train_config.json that says what the adapter was trained on")
    run = read_json(path)
    quantization = run.get("quantization", {})
    for name, value in NF4.items():
        if quantization.get(name) != value:
            raise ValueError(f"{path}: quantization has {name} {quantization.get(name)}; only"
                             f" {value} can be merged")
    if quantization.get("quantized_from_dtype") not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"{path}: quantization has no known quantized_from_dtype")
    if run.get("config", {}).get("random_weights") or not run.get("base_model"):
        raise ValueError(f"{path}: trained with --random_weights, on a base that is nowhere saved")
    return run


def model_directory(name):
    """The local directory of the base model; downloads it first if `name` is a Hub id."""
    path = Path(name)
    if (path / "config.json").is_file():
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"base model {name}: not a directory with a config.json; if it has moved,"
                         " name it with --base_model")
    from huggingface_hub import snapshot_download

    try:
        files = [*HUB_FILES, "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=files, ignore_patterns=TWICE))
    except Exception as e:  # the Hub client has a dozen kinds of errors; each is the user's
        raise ValueError(f"base model {name}: not a directory, and the Hub says: {e}")


def weight_files(base):
    """Which file of the base holds each tensor: {name: path}, in the files' order."""
    index = base / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        names = set(read_json(index)["weight_map"].values())
    files = {}
    for name in sorted(names):
        if Path(name).name != name or not (base / name).is_file():
            raise ValueError(f"base model {base}: has no file {name}; only safetensors are read")
        with open_tensors(base / name) as tensors:
            files.update(dict.fromkeys(tensors.offset_keys(), base / name))
    return files


def meta_model(base, prequantized):
    """The base model without its weights, for names and shapes; checked to be as in training."""
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    if getattr(config, "quantization_config", None) and not prequantized:
        raise ValueError(f"base model {base}: is quantised already; the original one is needed")
    if prequantized and not vars(config).pop("quantization_config", None):
        raise ValueError(f"base model {base}: is not quantised; the one in 4-bit is needed that the"
                         " adapter was trained on")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def linear_layers(model):
    """The names of the linear layers that training quantised, those of the decoder blocks (the
    longest ModuleList), and of the others."""
    lists = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList)]
    in_blocks = {id(m) for m in max(lists, key=len).modules()}
    linear = {name: id(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    quantised = [name for name, m in linear.items() if m in in_blocks]
    return quantised, [name for name, m in linear.items() if m not in in_blocks]


def check_base(base, files, shapes, stored):
    """Every tensor of `shapes` must be in `files`, with that shape; those of `stored` in 4-bit,
    with all that bitsandbytes stores of them."""
    wanted = [*shapes, *(f"{name}.{part}" for name in stored for part in NF4_PARTS)]
    missing = [name for name in wanted if name not in files]
    if missing:
        raise ValueError(f"base model {base}: lacks {len(missing)} of {len(wanted)} tensors that"
                         f" its config.json asks for, the first is {missing[0]}")
    for file in sorted(set(files.values())):
        with open_tensors(file) as tensors:
            for name in (n for n in tensors.keys() if n in shapes and n not in stored):
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != shapes[name]:
                    raise ValueError(f"{file}: {name} has shape {list(shape)}, but config.json"
                                     f" asks for {list(shapes[name])}")


def read_lora_config(path):
    """PEFT's LoraConfig of an adapter that is LoRA, rsLoRA or DoRA."""
    settings, defaults = read_json(path), LoraConfig().to_dict()
    for name, value in settings.items():
        if name not in MERGEABLE and value and value != defaults.get(name):
            raise ValueError(f"{path}: {name} {value!r} is more than LoRA, rsLoRA and DoRA and is"
                             " not merged here")
    if settings.get("peft_type") != "LORA" or "r" not in settings or "lora_alpha" not in settings:
        raise ValueError(f"{path}: not LoRA, or without r and lora_alpha")
    # these leave the base as it is; PiSSA, OLoRA, LoftQ and CorDA train on a changed one
    if settings.get("init_lora_weights", True) not in (True, False, "gaussian"):
        raise ValueError(f"{path}: init_lora_weights {settings['init_lora_weights']!r} changes the"
                         " base's weights and is not merged here")
    return LoraConfig(**{name: value for name, value in settings.items() if name in MERGEABLE})


def read_adapter(adapter_dir, shapes, quantised):
    """The adapter's scaling by module: {module: scaling}. PEFT itself takes adapters that are
    empty, broken, partial or of another model, and says nothing or prints a warning."""
    lora = read_lora_config(adapter_dir / "adapter_config.json")
    path, found, trained = adapter_dir / "adapter_model.safetensors", {}, False
    with open_tensors(path) as tensors:
        for name in tensors.keys():
            match = re.fullmatch(ADAPTER_NAME, name)
            if not match or match[1] not in quantised:
                raise ValueError(f"{path}: {name} belongs to no linear layer of the base's decoder"
                                 " blocks: another base model?")
            tensor = tensors.get_tensor(name)
            if not tensor.isfinite().all():
                raise ValueError(f"{path}: {name} has values that are NaN or infinite")
            found.setdefault(match[1], {})[match[2] or match[3]] = tuple(tensor.shape)
            trained |= match[2] == "B" and bool(tensor.any())
    scaling = {}
    for module, parts in found.items():
        r = lora.rank_pattern.get(get_pattern_key(lora.rank_pattern, module), lora.r)
        alpha = lora.alpha_pattern.get(get_pattern_key(lora.alpha_pattern, module), lora.lora_alpha)
        out_features, in_features = shapes[f"{module}.weight"]
        wanted = {"A": (r, in_features), "B": (out_features, r)}
        if lora.use_dora:
            wanted["magnitude_vector"] = (out_features,)
        elif "magnitude_vector" in parts:
            raise ValueError(f"{path}: {module} has a lora_magnitude_vector, but"
                             " adapter_config.json says use_dora False")
        for part, shape in wanted.items():
            if parts.get(part) != shape:
                has = f"has shape {list(parts[part])}" if part in parts else "is missing"
                raise ValueError(f"{path}: lora_{part} of {module} {has}; the base model and rank"
                                 f" {r} ask for {list(shape)}")
        scaling[module] = alpha / (math.sqrt(r) if lora.use_rslora else r)
    wanted = [name for name in quantised if check_target_module_exists(lora, name)]
    missing = [name for name in wanted if name not in scaling]
    if missing:
        raise ValueError(f"{path}: lacks {len(missing)} of the {len(wanted)} layers that"
                         f" adapter_config.json targets, the first is {missing[0]}")
    if not trained:
        raise ValueError(f"{path}: is empty or untrained: no lora_B has a value other than 0")
    return scaling


def choose_device(asked, run):
    """The kind of device that training quantised on, where there is one."""
    trained = run["quantization"].get("device", "cpu")
    device = asked or (trained if trained == "cpu" or torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: there is no GPU here")
    if device != trained:
        print(f"note: trained on {trained}, merging on {device}: the scales' mean can differ in its"
              " last bit, and some weights then by one bf16 step from those trained on")
    return torch.device(device)


# ------------------------------------------------------------------------------------------------
# Merge
# ------------------------------------------------------------------------------------------------


def training_weight(weight, dtype, device, trained_offset):
    """What training computed with: quantised from `dtype` to NF4, and back.

    `trained_offset` is the mean absmax that training saw, None where it was not recorded.
    """
    packed, state = bnb.functional.quantize_4bit(
        weight.to(device, dtype), blocksize=NF4["blocksize"], compress_statistics=True,
        quant_type="nf4",
    )  # fmt: skip
    check_offset(state, trained_offset)
    return bnb.functional.dequantize_4bit(packed, state)


def check_offset(state, trained_offset):
    offset = state.offset.item()
    if trained_offset and abs(offset - trained_offset) > SAME_OFFSET * trained_offset:
        raise ValueError(f"has a mean absmax of {offset:.8g}, in training it was"
                         f" {trained_offset:.8g}: this is not the base model trained on")


def stored_weight(packed, name, shape, files, dtype, device, trained_offset):
    """The same of a weight that bitsandbytes has quantised and stored: its bytes, dequantised."""
    parts = {}
    for part in NF4_PARTS:
        with open_tensors(files[f"{name}.{part}"]) as tensors:
            parts[part] = tensors.get_tensor(f"{name}.{part}")
    state = bnb.functional.QuantState.from_dict(parts, device)
    if state.shape != shape or packed.nbytes != math.prod(shape) // 2:
        raise ValueError(f"has {packed.nbytes} bytes of {list(state.shape)} weights, but"
                         f" config.json asks for {list(shape)}")
    check_offset(state, trained_offset)
    state.dtype = dtype  # of training, whatever it was quantised from
    return bnb.functional.dequantize_4bit(packed.view(torch.uint8).to(device), state)


def add_adapter(weight, lora_a, lora_b, scaling, sums, magnitude=None):
    """bf16(W + D), D = scaling * B @ A in fp32, or with DoRA's magnitude [out] that in the norms it
    gives to rows; adds to `sums` the squares of its rounding error and of what W changes by."""
    total = (lora_b.float() @ lora_a.float()).mul_(scaling)
    chunks = total.view(-1).split(CHUNK)
    if magnitude is None:
        sums["effect"] += sum(float(d.double().square().sum()) for d in chunks)
    total += weight  # in place: the largest layer of a 70B is 0.9 GiB in fp32
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
        sums["effect"] += sum(float((new.double() - old.double()).square().sum())
                              for new, old in zip(chunks, weight.reshape(-1).split(CHUNK)))
    merged = total.bfloat16()
    for exact, rounded in zip(chunks, merged.view(-1).split(CHUNK)):
        sums["error"] += float((rounded.double() - exact.double()).square().sum())
    return merged


def merged_tensor(file, name, quantised, dequantise, scaling, adapter_dir, device, sums):
    """One tensor of the merged model, bf16 on the CPU. `dequantise(weight, name)` is what training
    computed with."""
    # files are opened anew each time, so that the pages they mapped do not add up in this process
    with open_tensors(file) as tensors:
        tensor = tensors.get_tensor(name)
    module = name.removesuffix(".weight")
    if module in quantised:
        try:
            tensor = dequantise(tensor, name)
        except ValueError as e:
            raise ValueError(f"{file}: {name} {e}")
    if module in scaling:
        prefix = f"base_model.model.{module}"
        with open_tensors(adapter_dir / "adapter_model.safetensors") as adapter:
            pair = [adapter.get_tensor(f"{prefix}.lora_{x}.weight").to(device) for x in "AB"]
            magnitude = None
            if f"{prefix}.lora_magnitude_vector" in adapter.keys():  # just where DoRA is, see above
                magnitude = adapter.get_tensor(f"{prefix}.lora_magnitude_vector").to(device)
        tensor = add_adapter(tensor, *pair, scaling[module], sums, magnitude)
    return tensor.to("cpu", torch.bfloat16).contiguous()


def write_file(path, pieces):
    """Write bytes so that the file is there whole or not at all, and readable by others."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.chmod(0o644)
    os.replace(temporary, path)


def n_bytes(shapes):
    """Of all tensors {name: shape} in bf16."""
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def safetensors_header(shapes):
    """The head of a safetensors file of bf16 tensors {name: shape}, stored in that order.

    Written by hand because safetensors' own writer takes a file's tensors all at once.
    """
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_weights(directory, files, shapes, tensor_of):
    """All weight files, one for each of the base's, and their index. `tensor_of(file, name)`
    makes a tensor when its turn has come."""
    weight_map = {}

    def pieces(file, names, bar):
        yield safetensors_header({name: shapes[name] for name in names})
        for name in names:
            tensor = tensor_of(file, name)
            assert tensor.shape == shapes[name], f"{name}: {tensor.shape}, not {shapes[name]}"
            yield tensor.view(-1).view(torch.uint8).numpy()
            bar.update()

    with tqdm(total=len(shapes), desc="merge", unit="tensor") as bar:  # closed before any error
        for file in sorted(set(files.values())):
            names = [name for name in files if files[name] == file and name in shapes]
            if names:
                write_file(directory / file.name, pieces(file, names, bar))
                weight_map.update(dict.fromkeys(names, file.name))
    index = {"metadata": {"total_size": n_bytes(shapes)}, "weight_map": weight_map}
    write_file(directory / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])


def write_small_files(directory, base):
    """config.json of a bf16 model, and the base's other small files as they are."""
    config = read_json(base / "config.json")
    config.update(dict.fromkeys(["dtype", *config.keys() & {"torch_dtype"}], "bfloat16"))
    config.pop("quantization_config", None)  # of a base in 4-bit
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    write_file(directory / "config.json", [json.dumps(config, indent=2).encode()])
    for path in sorted(p for pattern in HUB_FILES for p in base.glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            write_file(directory / path.name, [path.read_bytes()])


# ------------------------------------------------------------------------------------------------
# Check
# ------------------------------------------------------------------------------------------------


def probe_rows(run, vocab_size):
    """Token ids [rows of any length] to compare the models on: the run's own, or random ones."""
    rows = [row for row in run.get("probe_input_ids", []) if row]
    if not rows:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(vocab_size, (4, 64), generator=generator).tolist()
    if not all(0 <= token < vocab_size for row in rows for token in row):
        raise ValueError(f"train_config.json: probe_input_ids has tokens outside the base model's"
                         f" vocabulary of {vocab_size}: another base model?")
    return rows


@torch.no_grad()
def all_logits(model, rows):
    """fp32 [tokens of all rows, vocabulary], on the CPU."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # in eval mode, which PEFT sets as well, on CPUs with AVX512-BF16, bitsandbytes 0.50
            # rounds the scales to bf16, and fails where in_features is no multiple of 64
            module.training = True
            module.weight.quant_state.dtype = module.compute_dtype  # whatever it was quantised from
    device = model.get_input_embeddings().weight.device
    return torch.cat([model(torch.tensor([row], device=device)).logits[0].float().cpu()
                      for row in rows])  # fmt: skip


def load_model(directory, dtype, device, **kwargs):
    """from_pretrained, over all GPUs where one is not enough."""
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        device_map="auto" if device.type == "cuda" else {"": "cpu"},
        trust_remote_code=False,
        use_safetensors=True,
        **kwargs,
    ).eval()


def compare(base, adapter_dir, merged_dir, others, rows, dtype, device):
    """Three ratios: how far the merged model's logits are from those of the 4-bit base with the
    adapter, by the adapter's own effect; that effect by the logits; equal greedy tokens by all."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=others,
    )
    config = AutoConfig.from_pretrained(base, trust_remote_code=False)
    settings = {"quantization_config": quantization}
    if getattr(config, "quantization_config", None):  # which would be taken all the same
        config.quantization_config["bnb_4bit_compute_dtype"] = str(dtype).removeprefix("torch.")
        settings = {"config": config}
    model = load_model(base, dtype, device, **settings)
    plain = all_logits(model, rows)
    model = PeftModel.from_pretrained(model, adapter_dir, torch_device=str(device))
    trained = all_logits(model, rows)
    del model  # room for the next one
    gc.collect()
    torch.cuda.empty_cache()
    merged = all_logits(load_model(merged_dir, dtype, device), rows)
    effect = (trained - plain).norm()
    agreement = (merged.argmax(-1) == trained.argmax(-1)).float().mean()
    return float((merged - trained).norm() / effect), float(effect / trained.norm()), agreement


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


def open_output(output, size):
    """The hidden directory that becomes `output`; on an error before that, nothing is left."""
    if output.resolve().is_mount():
        raise ValueError(f"--output_dir {output}: is a mount point, which cannot be replaced; name"
                         " a new directory in it")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ValueError(f"--output_dir {output}: exists already and is not an empty directory;"
                         " name a new one")
    temporary = output.resolve().with_name(f".{output.resolve().name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of an earlier merge that did not end well
    temporary.mkdir(parents=True)
    free = shutil.disk_usage(temporary).free
    if free < size:
        temporary.rmdir()
        raise ValueError(f"--output_dir {output}: the merged model needs {size / 2**30:.1f} GiB,"
                         f" the disk has {free / 2**30:.1f} GiB free")
    return temporary


def report_check(error, effect, agreement, rounding, temporary):
    """Print how far the merged model is from what was trained; ValueError if it is another one."""
    print(f"check: the adapter moves the 4-bit model's logits by {effect:.1%} of their norm; the"
          f" merged model's are {error:.4f} of that away; {agreement:.2%} of greedy tokens agree")
    if error <= LARGE_ERROR:
        return
    why = "the base model, the device or a version must be another than in training"
    if rounding > LARGE_ERROR / 2 or effect < 0.1:
        why = ("the adapter's effect is too small for bf16: train it longer, or use it unmerged")
    if not error <= FAILED_ERROR:  # NaN too
        raise ValueError("the merged model does not agree with what was trained, it is"
                         f" {error:.2f} of the adapter's effect away: {why}; left in {temporary}")
    print(f"WARNING: the merged model loses {error:.0%} of the adapter's effect: {why}")


def merge(args):
    """The whole job, from flags to merged model."""
    adapter_dir, output = Path(args.adapter_dir), Path(args.output_dir)
    run = read_run(adapter_dir)
    base = model_directory(args.base_model or run["base_model"])
    prequantized = run["quantization"].get("prequantized", False)
    model = meta_model(base, prequantized)
    # a tied weight is listed once, under its first name, and is written once
    shapes = {name: p.shape for name, p in model.named_parameters()}
    quantised, others = linear_layers(model)
    files = weight_files(base)
    stored = {f"{name}.weight" for name in quantised} if prequantized else set()
    check_base(base, files, shapes, stored)
    scaling = read_adapter(adapter_dir, shapes, quantised)
    rows = probe_rows(run, model.get_input_embeddings().num_embeddings)
    dtype = getattr(torch, run["quantization"]["quantized_from_dtype"])
    device = choose_device(args.device, run)
    temporary = open_output(output, n_bytes(shapes))

    print(f"base model {base}: {len(quantised)} layers in NF4, {len(scaling)} with an adapter")
    left_out = [n for n in files if n not in shapes and n.partition(".weight.")[2] not in NF4_PARTS]
    if left_out:
        print(f"left out {len(left_out)} tensors that the model does not use, as {left_out[0]}")
    sums = {"error": 0.0, "effect": 0.0}
    offsets = run["quantization"].get("absmax_offsets", {})

    def dequantise(weight, name):
        if prequantized:
            return stored_weight(weight, name, shapes[name], files, dtype, device,
                                 offsets.get(name))  # fmt: skip
        return training_weight(weight, dtype, device, offsets.get(name))

    tensor_of = functools.partial(merged_tensor, quantised=quantised, dequantise=dequantise,
                                  scaling=scaling, adapter_dir=adapter_dir, device=device,
                                  sums=sums)  # fmt: skip
    try:
        write_weights(temporary, files, shapes, tensor_of)
        write_small_files(temporary, base)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    rounding = math.sqrt(sums["error"] / sums["effect"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"wrote {len(shapes)} tensors, {n_bytes(shapes) / 2**30:.3f} GiB; peak host memory"
          f" {peak:.2f} GiB")
    print(f"weights: rounding to bf16 differs from the exact sum by {rounding:.4f} of the adapter's"
          " effect")
    if args.check:
        try:
            figures = compare(base, adapter_dir, temporary, others, rows, dtype, device)
        except (ValueError, RuntimeError, OSError, ImportError) as e:  # libraries raise all kinds
            raise ValueError(f"the check did not run; the merged model in {temporary} is whole:"
                             f" rename it, since a new merge deletes it; --no-check does without"
                             f" the check: {e}")
        report_check(*figures, rounding, temporary)
    os.replace(temporary, output.resolve())
    print(f'merged model saved; to load it: AutoModelForCausalLM.from_pretrained("{output}")')


def main(argv=None):
    try:
        merge(parse_config(argv))
    except (ValueError, OSError, SafetensorError, torch.OutOfMemoryError) as e:
        print("error: " + " ".join(str(e).split()), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
