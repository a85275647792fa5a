#!/usr/bin/env python3
"""Merge a LoRA adapter trained by train_fsdp_qlora.py into its base model: plain bf16 safetensors.

    python merge_adapters.py --adapter_dir runs/my-run --output_dir runs/my-run/merged
    python merge_adapters.py --adapter_dir runs/my-run/checkpoint-000040 --output_dir merged-40

The adapter was trained on NF4 weights, so it is added to those: W + scaling * B @ A in fp32, once
rounded to bf16. W is the base's weight as training had it: quantised to NF4 and dequantised, or
only dequantised where the base is in 4-bit already. DoRA scales each row of the sum to its
magnitude. A linear of the decoder's layers without an adapter becomes W; all else stays the base's
own. One weight at a time is in memory; --output_dir appears when all is done. The check compares
the merged model with the 4-bit base and the adapter, one model at a time in memory.
Tested with torch 2.13, transformers 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import gc
import itertools
import json
import math
import os
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import bitsandbytes as bnb
import torch
import transformers
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

# ---- Part I: the recipe ------------------------------------------------------------------------

LARGE_ERROR = 0.20  # of the adapter's own effect: a warning from here on
FAILED_ERROR = 1.0  # further from what was trained than the base is: not a merge of it
SAME_OFFSET = 1e-5  # relative; summing in another order, on another device, moves it by 1e-7


def parse_config(argv):
    """The flags. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.error = lambda message: require(False, f"{message} (see --help)")
    add = parser.add_argument
    add("--adapter_dir", required=True, help="run of train_fsdp_qlora.py, or a checkpoint in it")
    add("--output_dir", required=True, help="where the merged model goes: a new directory")
    add("--base_model", help="Hub id or directory; default: the one that train_config.json names")
    add("--device", choices=("cpu", "cuda"), help="quantises and checks; default: as in training")
    add("--check", action=argparse.BooleanOptionalAction, default=True, help="compare at the end")
    return parser.parse_args(argv)


def merge(args):
    """The whole job, from flags to merged model."""
    adapter_dir, output = Path(args.adapter_dir), Path(args.output_dir)
    run = read_run(adapter_dir)
    base = read_base(args.base_model or run["base_model"], run["quantization"])
    adapter = read_adapter(adapter_dir, base)
    rows = probe_rows(run, base.vocab_size)
    device = choose_device(args.device, run["quantization"].get("device", "cpu"))
    temporary = open_output(output, size := 2 * sum(map(math.prod, base.shapes.values())))
    print(f"base model {base.directory}: {len(base.quantised)} linear layers in NF4,"
          f" {len(adapter)} with an adapter")
    if unused := [n for n in base.files if n not in base.shapes and not n.endswith(NF4_PARTS)]:
        print(f"left out {len(unused)} tensors that the model does not use, as {unused[0]}")
    sums = {"error": 0.0, "effect": 0.0}
    try:
        tensors = (merged_tensor(name, base, adapter, device, sums) for name in base.shapes)
        write_weights(temporary, base, tensors, size)
        write_small_files(temporary, base.directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    rounding = math.sqrt(sums["error"] / max(sums["effect"], sys.float_info.min))
    print(f"wrote {len(base.shapes)} tensors, {size / 2**30:.3f} GiB; peak memory"
          f" {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB;"
          f" rounding to bf16 differs from the exact sum by {rounding:.4f} of the adapter's effect")
    if args.check:
        try:
            figures = compare(base, adapter_dir, temporary, rows, device)
        except (ValueError, RuntimeError, OSError, ImportError) as e:  # libraries raise all kinds
            raise ValueError(f"the check did not run, --no-check does without; the merged model in"
                             f" {temporary} is whole, rename it to keep it: {e}")
        report_check(*figures, rounding, temporary, adapter_dir)
    os.replace(temporary, output.resolve())
    print(f'merged model saved; to load it: {base.auto_class.__name__}.from_pretrained("{output}")')


def merged_tensor(name, base, adapter, device, sums):
    """One tensor of the merged model, bf16 on the CPU."""
    tensor = open_tensors(base.files[name]).get_tensor(name)
    if name in base.quantised:
        tensor = trained_weight(tensor.to(device), name, base)
    if name in adapter:
        file, part_names, scaling = adapter[name]
        parts = [open_tensors(file).get_tensor(part).to(device) for part in part_names]
        tensor = add_adapter(tensor, sums, scaling, *parts)
    return tensor.to("cpu", torch.bfloat16).contiguous()


def trained_weight(weight, name, base):
    """What training computed with: a weight of the decoder's layers in NF4, dequantised."""
    shape = base.shapes[name]
    if base.in_4bit:
        names = [f"{name}.{part}" for part in NF4_PARTS]
        parts = {n: open_tensors(base.files[n]).get_tensor(n) for n in names}
        state = bnb.functional.QuantState.from_dict(parts, weight.device)
        packed = weight.view(torch.uint8)
        state.dtype = base.dtype  # of training, whatever it was quantised from
        require(state.shape == shape and packed.numel() == math.prod(shape) // 2,
                f"{base.files[name]}: {name} has {packed.numel()} bytes of {list(state.shape)}"
                f" weights, but config.json asks for {list(shape)}")
    else:
        packed, state = bnb.functional.quantize_4bit(
            weight.to(base.dtype), blocksize=64, compress_statistics=True, quant_type="nf4")
    offset = state.offset.item()
    trained = base.absmax_offsets.get(name) or offset  # where it was not recorded
    require(abs(offset - trained) <= SAME_OFFSET * trained,
            f"{base.files[name]}: {name} has a mean absmax of {offset:.8g}, in training it was"
            f" {trained:.8g}: this is not the base model trained on")
    return bnb.functional.dequantize_4bit(packed, state)


def add_adapter(weight, sums, scaling, lora_a, lora_b, magnitude=None):
    """bf16(W + scaling * B @ A), its rows scaled to DoRA's magnitude [out]; adds to `sums` the
    squares of what it changes in W and of its rounding error."""
    # in place: the largest weight of a 70B is 0.9 GiB in fp32
    total = (lora_b.float() @ lora_a.float()).mul_(scaling).add_(weight)
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
    merged = total.bfloat16()
    chunks = [t.reshape(-1).split(2**24) for t in (weight, total, merged)]  # 128 MiB in fp64
    for old, exact, rounded in zip(*chunks):
        sums["effect"] += float((exact.double() - old).square().sum())
        sums["error"] += float((exact.double() - rounded).square().sum())
    return merged


def compare(base, adapter_dir, merged_dir, rows, device):
    """Three ratios: how far the merged model's logits are from those of the 4-bit base with the
    adapter, by the adapter's own effect; that effect by the logits; equal greedy tokens by all."""
    settings = {"dtype": base.dtype, "trust_remote_code": False, "use_safetensors": True,
                "device_map": "auto" if device.type == "cuda" else {"": "cpu"}}
    nf4 = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16, llm_int8_skip_modules=base.unquantised)
    nf4 = {} if base.in_4bit else {"quantization_config": nf4}
    model = base.auto_class.from_pretrained(base.directory, **nf4, **settings)
    plain = all_logits(model, rows, base.dtype)
    model = PeftModel.from_pretrained(model, adapter_dir, torch_device=str(device))
    trained = all_logits(model, rows, base.dtype)
    del model  # room for the next one
    gc.collect()
    torch.cuda.empty_cache()
    merged = all_logits(base.auto_class.from_pretrained(merged_dir, **settings), rows, base.dtype)
    effect, agree = (trained - plain).norm(), (merged.argmax(-1) == trained.argmax(-1)).float()
    return float((merged - trained).norm() / effect), float(effect / trained.norm()), agree.mean()


@torch.no_grad()
def all_logits(model, rows, dtype):
    """fp32 [tokens of all rows, vocabulary], on the CPU."""
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            # in eval mode, which PEFT sets as well, on CPUs with AVX512-BF16, bitsandbytes 0.50
            # rounds the scales to bf16, and fails where in_features is no multiple of 64
            module.training = True
            module.compute_dtype = module.weight.quant_state.dtype = dtype  # files may say another
    device = model.get_input_embeddings().weight.device
    inputs = [torch.tensor([row], device=device) for row in rows]
    return torch.cat([model(input_ids).logits[0].float().cpu() for input_ids in inputs])


UNMERGED = """; to use the adapter without merging it:
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = peft.AutoPeftModelForCausalLM.from_pretrained("{}", quantization_config=nf4)"""


def report_check(error, effect, agreement, rounding, temporary, adapter_dir):
    """Print how far the merged model is from what was trained; ValueError if it is another one."""
    print(f"check: the adapter moves the 4-bit model's logits by {effect:.1%} of their norm; the"
          f" merged model's are {error:.4f} of that away; {agreement:.2%} of greedy tokens agree")
    why = "the base model, the device or a version must be another than in training"
    if rounding > LARGE_ERROR / 2 or effect < 0.1:
        why = "the adapter's effect is too small for bf16: train it longer, or use it unmerged"
    require(error <= FAILED_ERROR, "the merged model does not agree with what was trained, it is"
            f" {error:.2f} of the adapter's effect away: {why}; left in {temporary}")  # NaN too
    if error > LARGE_ERROR:
        print(f"WARNING: the merged model loses {error:.0%} of the adapter's effect: {why}"
              + UNMERGED.format(adapter_dir))


# ---- Part II: the engine room ------------------------------------------------------------------

QUANTIZATIONS = {  # what train_config.json may say
    "quant_type": ["nf4"], "blocksize": [64], "double_quant": [True], "nested_blocksize": [256],
    "quantized_from_dtype": ["bfloat16", "float16", "float32"]}
NF4_PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map",
             "quant_state.bitsandbytes__nf4")  # what bitsandbytes stores beside a weight
HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # a model's small files
# what adapter_config.json may say; other options must have their default
MERGEABLE = """peft_version auto_mapping base_model_name_or_path revision task_type inference_mode r
    lora_alpha lora_dropout rank_pattern alpha_pattern use_rslora use_dora target_modules
    exclude_modules layers_to_transform layers_pattern""".split()


def require(condition, message):
    if not condition:
        raise ValueError(message)


def read_json(path):
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as e:
        raise ValueError(f"{path}: not a JSON object: {e}")


def open_tensors(path):
    """A safetensors file. It is opened anew for each tensor: mapped pages would add up."""
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path}: not a whole safetensors file: {e}")


def read_run(adapter_dir):
    """train_config.json of a run directory or of a checkpoint's parent, checked."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        require((adapter_dir / name).is_file(), f"--adapter_dir {adapter_dir}: has no {name}; name"
                " a run directory of train_fsdp_qlora.py or a checkpoint in it")
    path = adapter_dir / "train_config.json"
    if not path.is_file():
        path = adapter_dir.resolve().parent / path.name
    require(path.is_file(), f"--adapter_dir {adapter_dir}: neither it nor the directory above has"
            " the train_config.json that says what the adapter was trained on")
    run = read_json(path)
    for name, values in QUANTIZATIONS.items():
        value = run.get("quantization", {}).get(name)
        require(value in values, f"{path}: quantization has {name} {value}; only {values} can be"
                " merged")
    require(run.get("base_model") and not run.get("config", {}).get("random_weights"),
            f"{path}: trained with --random_weights, on a base that is nowhere saved")
    return run


def probe_rows(run, vocab_size):
    """Token ids [rows of any length] to compare the models on: the run's own, or random ones."""
    rows = [row for row in run.get("probe_input_ids", []) if row]
    require(all(0 <= token < vocab_size for row in rows for token in row), "train_config.json has"
            f" probe_input_ids outside the base's vocabulary of {vocab_size}: another base model?")
    seed = torch.Generator().manual_seed(0)
    return rows or torch.randint(vocab_size, (4, 64), generator=seed).tolist()


def choose_device(asked, trained):
    """The kind of device that training quantised on, where there is one."""
    device = asked or (trained if torch.cuda.is_available() else "cpu")
    require(device == "cpu" or torch.cuda.is_available(), "--device cuda: there is no GPU here")
    if device != trained:
        print(f"note: trained on {trained}, merging on {device}: the scales' mean can differ in its"
              " last bit, and some weights then by one bf16 step from those trained on")
    return torch.device(device)


def model_directory(name):
    """The local directory of the base model; downloads it first if `name` is a Hub id."""
    path = Path(name)
    if (path / "config.json").is_file():
        return path
    require(not path.exists() and name[0] not in "./~" and name.count("/") == 1, "base model"
            f" {name}: not a directory with a config.json; if it has moved, name --base_model")
    try:
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, "*.safetensors"],
                                      ignore_patterns=["consolidated*", "*/*.safetensors"]))
    except Exception as e:  # the Hub client has a dozen kinds of errors; each is the user's
        raise ValueError(f"base model {name}: not a directory, and the Hub says: {e}")


def read_base(name, quantization):
    """The base model, its files compared with what transformers' class for it asks for."""
    directory, in_4bit = model_directory(name), quantization.get("prequantized", False)
    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    found = "quantised already" if vars(config).pop("quantization_config", 0) else "not quantised"
    require(in_4bit == (found != "not quantised"), f"base model {directory}: is {found}; with"
            " --base_model name the one that was trained on")
    kind = "ImageTextToText" if hasattr(config, "text_config") else "CausalLM"
    auto_class = getattr(transformers, f"AutoModelFor{kind}")
    with torch.device("meta"):
        model = auto_class.from_config(config, trust_remote_code=False)
    decoder = next(n for n, module in model.named_modules() if module is model.get_decoder())
    # a vision tower is copied, whatever it holds: transformers may have other names for it
    text = (f"{decoder}.", "lm_head.") if hasattr(config, "text_config") else ""
    linear = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    trained = {n for n in linear if n.startswith(f"{decoder}.layers.")}
    wanted = {n: p.shape for n, p in model.named_parameters(remove_duplicate=False)}
    files, shapes, quantised, names = {}, {}, {}, set()
    for tensor, path, shape in stored_tensors(directory):
        # older multimodal files have their own prefixes, which transformers renames on load
        n = tensor.replace("language_model.model.", "model.language_model.")
        n = n.replace("language_model.lm_head.", "lm_head.")
        files[tensor] = path
        names |= {tensor, n}
        if n.removesuffix(".weight") in trained:
            quantised[tensor] = n.removesuffix(".weight")
        if n in wanted and n.startswith(text):
            shapes[tensor] = wanted[n]
            require(shape == wanted[n] or (in_4bit and tensor in quantised), f"{path}: {tensor} has"
                    f" shape {list(shape)}, but config.json asks for {list(wanted[n])}")
        elif not n.startswith(text):
            shapes[tensor] = shape
            require(not n.endswith(NF4_PARTS), f"{path}: {tensor} is of a weight in 4-bit outside"
                    " the text model's layers, which is not merged")
    needed = [n for n, _ in model.named_parameters() if n.startswith(text)]  # a tied weight once
    needed += [f"{tensor}.{part}" for tensor in quantised for part in NF4_PARTS if in_4bit]
    missing = [n for n in needed if n not in names]
    require(not missing, f"base model {directory}: lacks {len(missing)} of {len(needed)} tensors"
            f" that its config.json asks for, the first is {next(iter(missing), None)}")
    return SimpleNamespace(
        directory=directory, auto_class=auto_class, files=files,  # {tensor name: path}
        vocab_size=model.get_input_embeddings().num_embeddings,
        shapes=shapes,  # {tensor name: shape} of what the merged model holds, file by file
        quantised=quantised,  # {tensor name: module name} of the weights that training had in NF4
        unquantised=[n for n in linear if n not in trained],  # module names of the other linears
        in_4bit=in_4bit, dtype=getattr(torch, quantization["quantized_from_dtype"]),
        absmax_offsets=quantization.get("absmax_offsets", {}))  # they tell one base from another


def stored_tensors(directory):
    """Name, file and shape of each of the base's tensors, file by file."""
    index, names = directory / "model.safetensors.index.json", ["model.safetensors"]
    if index.is_file():
        names = sorted(set(read_json(index)["weight_map"].values()))
    for path in [directory / name for name in names]:
        require(path.parent == directory and path.is_file(),
                f"base model {directory}: has no file {path.name}; only safetensors are read")
        with open_tensors(path) as tensors:
            for name in tensors.offset_keys():
                yield name, path, tuple(tensors.get_slice(name).get_shape())


def read_adapter(adapter_dir, base):
    """{tensor name in the base: (file, names of its A, B and DoRA's magnitude there, scaling)}."""
    file, path = adapter_dir / "adapter_model.safetensors", adapter_dir / "adapter_config.json"
    settings, defaults = read_json(path), LoraConfig().to_dict()
    for name, value in settings.items():  # PiSSA, OLoRA and others train on a changed base
        require(name in MERGEABLE or not value or value in (defaults.get(name), "gaussian"),
                f"{path}: {name} {value!r} is more than LoRA, rsLoRA and DoRA and is not merged")
    lora = LoraConfig(**{name: settings[name] for name in MERGEABLE if name in settings})
    adapter, shapes = {}, {}
    for name, module in base.quantised.items():
        if not check_target_module_exists(lora, module):
            continue
        r = lora.rank_pattern.get(get_pattern_key(lora.rank_pattern, module), lora.r)
        alpha = lora.alpha_pattern.get(get_pattern_key(lora.alpha_pattern, module), lora.lora_alpha)
        out_features, in_features = base.shapes[name]
        parts = {"A.weight": (r, in_features), "B.weight": (out_features, r)}
        if lora.use_dora:
            parts["magnitude_vector"] = (out_features,)
        parts = {f"base_model.model.{module}.lora_{part}": shape for part, shape in parts.items()}
        adapter[name] = file, list(parts), alpha / (math.sqrt(r) if lora.use_rslora else r)
        shapes.update(parts)
    check_adapter(file, shapes, lora.use_dora)
    return adapter


def check_adapter(file, shapes, use_dora):
    """It must hold the trained {name: shape}: PEFT takes broken adapters with a warning at most."""
    trained, missing = False, dict(shapes)
    with open_tensors(file) as tensors:
        for name in tensors.keys():
            require(name in shapes, f"{file}: {name} belongs to no weight that adapter_config.json,"
                    f" with use_dora {use_dora}, targets in the base: another base model?")
            tensor, shape = tensors.get_tensor(name), missing.pop(name)
            require(tensor.shape == shape, f"{file}: {name} has shape {list(tensor.shape)}; the"
                    f" base model and adapter_config.json ask for {list(shape)}")
            require(tensor.isfinite().all(), f"{file}: {name} has values that are NaN or infinite")
            trained |= "lora_B" in name and bool(tensor.any())
    require(not missing, f"{file}: lacks {len(missing)} of the {len(shapes)} tensors that"
            f" adapter_config.json targets, the first is {next(iter(missing), None)}")
    require(trained, f"{file}: is empty or untrained: no lora_B has a value other than 0")


def open_output(output, size):
    """The hidden directory that becomes `output`; on an error before that, nothing is left."""
    target = output.resolve()
    require(not target.is_mount(), f"--output_dir {output}: is a mount point, which cannot be"
            " replaced; name a new directory in it")
    require(not output.exists() or (output.is_dir() and not any(output.iterdir())),
            f"--output_dir {output}: exists already and is not an empty directory; name a new one")
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)  # of an earlier merge that did not end well
    free = shutil.disk_usage(next(p for p in target.parents if p.exists())).free
    require(free >= size, f"--output_dir {output}: the merged model needs {size / 2**30:.1f} GiB,"
            f" the disk has {free / 2**30:.1f} GiB free")
    temporary.mkdir(parents=True)
    return temporary


def write_weights(directory, base, tensors, size):
    """All weight files and their index; safetensors' own writer takes a file's tensors at once."""
    weight_map = {name: base.files[name].name for name in base.shapes}
    with tqdm(total=len(weight_map), desc="merge", unit="tensor") as bar:  # closed before any error
        for file, names in itertools.groupby(weight_map, weight_map.get):
            header, end = {}, 0
            for name in names:
                start, end = end, end + 2 * math.prod(base.shapes[name])
                header[name] = {"dtype": "BF16", "shape": list(base.shapes[name]),
                                "data_offsets": [start, end]}
            text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
            text += b" " * (-len(text) % 8)
            with (directory / file).open("wb") as out:
                out.write(len(text).to_bytes(8, "little") + text)
                for name, tensor in zip(header, tensors):
                    assert tensor.shape == base.shapes[name], f"{name} became {tensor.shape}"
                    out.write(tensor.view(-1).view(torch.uint8).numpy())
                    bar.update()
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_small_files(directory, base_directory):
    """config.json of a bf16 model, and the base's other small files as they are."""
    config = read_json(base_directory / "config.json")
    config.update(dict.fromkeys(["dtype", *config.keys() & {"torch_dtype"}], "bfloat16"))
    config.pop("quantization_config", None)  # of a base in 4-bit
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    for path in (p for pattern in HUB_FILES for p in base_directory.glob(pattern)):
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
    os.sync()  # all is on the disk before the directory gets its name


def main(argv=None):
    try:
        merge(parse_config(argv))
    except (ValueError, OSError, SafetensorError, torch.OutOfMemoryError) as e:
        print("error: " + " ".join(str(e).split()), file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
