#!/usr/bin/env python3
"""Merge a LoRA adapter trained by train_fsdp_qlora.py into its base model: plain bf16 safetensors.

    python merge_adapters.py --adapter_dir runs/my-run --output_dir runs/my-run/merged
    python merge_adapters.py --adapter_dir runs/my-run/checkpoint-000040 --output_dir merged-40

The adapter was trained on NF4 weights, so it is added to those: W + scaling * B @ A in fp32, once
rounded to bf16. W is the base's weight as training had it: quantised to NF4 and dequantised, or
only dequantised where the base is in 4-bit already. DoRA scales each row of the sum to its
magnitude. A linear of the decoder's layers without an adapter becomes W; all else stays the base's
own. --output_dir appears when all is done and compared with the 4-bit base and the adapter.
Tested with torch 2.13, transformers 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import bitsandbytes as bnb
import torch
import transformers
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

# ---- Part I: the recipe ------------------------------------------------------------------------

LARGE_ERROR = 0.20  # of the adapter's own effect: a warning from here on
FAILED_ERROR = 1.0  # further from what was trained than the base is: not a merge of it
SAME_OFFSET = 1e-5  # relative; summing in another order, on another device, moves it by 1e-7
LONGEST_SECONDS = 120  # that other people's files may keep a library busy


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
    run, begun = read_run(adapter_dir), os.stat(adapter_dir / ADAPTER_FILES[1])
    base = read_base(args.base_model or run["base_model"], run["quantization"])
    lora, adapter = read_adapter(adapter_dir, run["config"], base)
    rows, trained_on = run["probe_input_ids"], run["quantization"]["device"]
    require(max(map(max, rows)) < base.vocab_size, "train_config.json has probe_input_ids outside"
            f" the base's vocabulary of {base.vocab_size}: another base model?")
    device = args.device or (trained_on if torch.cuda.is_available() else "cpu")
    require(device == "cpu" or torch.cuda.is_available(), "--device cuda: there is no GPU here")
    if device != trained_on:
        print(f"note: trained on {trained_on}, merging on {device}: the last bit may differ")
    unused = [n for n in base.files if n not in base.shapes and not n.endswith(NF4_PARTS)]
    print(f"base model {base.directory}: {len(base.quantised)} linears in NF4, {len(adapter)} with"
          f" an adapter; tensors that the model does not use: {len(unused)} {unused[:1]}")
    sums, gib = {"error": 0.0, "effect": 0.0}, base.size / 2**30
    temporary, lock = open_output(output)
    with lock:
        try:
            require(not output.exists() or not any(output.iterdir()),
                    f"--output_dir {output}: exists already and is not empty: name a new one")
            free = shutil.disk_usage(temporary).free / 2**30
            require(free >= gib, f"--output_dir {output}: needs {gib:.1f} GiB, {free:.1f} are free")
            tensors = (merged_tensor(name, base, adapter, device, sums) for name in base.shapes)
            write_files(temporary, base, run["template"], tensors)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        rounding = math.sqrt(sums["error"] / max(sums["effect"], sys.float_info.min))
        print(f"wrote {len(base.shapes)} tensors, {gib:.3f} GiB; rounding to bf16 differs from the"
              f" exact sum by {rounding:.4f} of the adapter's effect")
        try:
            if args.check:
                check(base, lora, adapter_dir, temporary, rows, device)
            require(os.path.samestat(begun, os.stat(adapter_dir / ADAPTER_FILES[1])),
                    f"{adapter_dir}: has got another adapter meanwhile: merge again")
            temporary = temporary.replace(output.resolve())
        finally:  # not before: another merge would take the directory for that of a dead one
            (temporary / ".lock").unlink()
    sync(temporary.parent)
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
    tensor = tensor.to("cpu", torch.bfloat16).contiguous()
    return finite(tensor, f"{base.files[name]}: what {name} becomes")


def trained_weight(weight, name, base):
    """What training computed with: a weight of the decoder's layers in NF4, dequantised."""
    shape, file = base.shapes[name], base.files[name]
    if base.in_4bit:
        parts = [f"{name}.{part}" for part in NF4_PARTS]
        parts = {part: open_tensors(base.files[part]).get_tensor(part) for part in parts}
        with time_limit(0, f"{file}: {name}: its quantisation is damaged"):
            state = bnb.functional.QuantState.from_dict(parts, weight.device)
        state.dtype = base.dtype  # of training, whatever it was quantised from
        packed = weight.view(torch.uint8)
        require(state.shape == shape and packed.numel() == math.prod(shape) // 2, f"{file}: {name}"
                f" has {packed.numel()} bytes of {list(state.shape)}, not of {list(shape)}")
    else:
        weight = finite(weight.to(base.dtype), f"{file}: {name}")  # NF4 may hide what is not
        packed, state = bnb.functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    offset = state.offset.item()
    trained = base.absmax_offsets.get(name) or offset  # where it was not recorded
    require(abs(offset - trained) <= SAME_OFFSET * offset, f"{file}: {name} has a mean absmax of"
            f" {offset:.8g}, in training {trained:.8g}: this is not the base model trained on")
    return bnb.functional.dequantize_4bit(packed, state)


def add_adapter(weight, sums, scaling, lora_a, lora_b, magnitude=None):
    """bf16(W + scaling * B @ A), with DoRA's magnitude [out]; `sums` adds up squares of changes."""
    total = (lora_b.float() @ lora_a.float()).mul_(scaling).add_(weight)  # 0.9 GiB in a 70B
    if magnitude is not None:
        total *= (magnitude.float() / torch.linalg.norm(total, dim=1))[:, None]
    merged = total.bfloat16()
    chunks = [t.reshape(-1).split(2**24) for t in (weight, total, merged)]  # 128 MiB in fp64
    for old, exact, rounded in zip(*chunks):
        sums["effect"] += float((exact.double() - old).square().sum())
        sums["error"] += float((exact.double() - rounded).square().sum())
    return merged


UNMERGED = """; to use the adapter without merging it:
    nf4 = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
    model = peft.AutoPeftModelForCausalLM.from_pretrained("{}", quantization_config=nf4)"""


def check(base, lora, adapter_dir, merged_dir, rows, device):
    """Print how far the merged model is from what was trained; ValueError if it is another one."""
    settings = {"dtype": base.dtype, "trust_remote_code": False, "use_safetensors": True,
                "device_map": "auto" if device == "cuda" else {"": "cpu"}}
    nf4 = {} if base.in_4bit else {"quantization_config": transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_storage=torch.bfloat16, llm_int8_skip_modules=base.unquantised)}
    with time_limit(0, "the check did not run, --no-check does without; the merged model in"
                    f" {merged_dir} is whole, rename it to keep it"):
        model = base.auto_class.from_pretrained(base.directory, **nf4, **settings)
        plain = all_logits(model, rows, base.dtype)
        model = PeftModel.from_pretrained(model, adapter_dir, config=lora, torch_device=device)
        trained = all_logits(model, rows, base.dtype)
        del model  # room for the next one
        gc.collect()
        torch.cuda.empty_cache()
        model = base.auto_class.from_pretrained(merged_dir, **settings)
        merged = all_logits(model, rows, base.dtype)
    effect, agree = (trained - plain).norm(), (merged.argmax(-1) == trained.argmax(-1)).float()
    error, effect = float((merged - trained).norm() / effect), float(effect / trained.norm())
    print(f"check: the adapter moves the 4-bit model's logits by {effect:.1%} of their norm; the"
          f" merged model's are {error:.4f} of that away; {agree.mean():.2%} of greedy tokens"
          " agree")
    why = ("the adapter's effect is too small for bf16: train longer, or use it unmerged" if
           effect < 0.1 else "the base, the device or a version must be another than in training")
    require(error <= FAILED_ERROR, "the merged model does not agree with what was trained, it is"
            f" {error:.2f} of the adapter's effect away: {why}; left in {merged_dir}")  # NaN too
    if error > LARGE_ERROR:
        print(f"WARNING: the merged model loses {error:.0%} of the adapter's effect: {why}"
              + UNMERGED.format(adapter_dir))


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


# ---- Part II: the engine room ------------------------------------------------------------------

TRAINED = {  # what train_config.json may say: the JSON of each value, as a regular expression
    "base_model": '".+"', "probe_input_ids": r"\[(\[\d[\d, ]*\](, )?)+\]",
    "config.lora_rank": r"[1-9]\d{0,8}", "config.lora_alpha": r"[1-9]\d{0,8}",
    "config.adapter": '"(lora|rslora|dora)"', "config.random_weights": "false",
    "config.target_modules": r'\["[^"]+"(, "[^"]+")*\]',
    "quantization.quant_type": '"nf4"', "quantization.blocksize": "64",
    "quantization.double_quant": "true", "quantization.nested_blocksize": "256",
    "quantization.quantized_from_dtype": '"(bfloat16|float16|float32)"',
    "quantization.prequantized": "true|false", "quantization.device": '"(cpu|cuda)"',
    "quantization.absmax_offsets": r'\{("[^"]+": [\de.-]{1,25}(, )?)*\}'}
FREE = """peft_version base_model_name_or_path task_type inference_mode lora_dropout
    target_modules""".split()  # of adapter_config.json: not used here
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NF4_PARTS = ("absmax", "nested_absmax", "nested_quant_map", "quant_map",
             "quant_state.bitsandbytes__nf4")  # what bitsandbytes stores beside a weight
HUB_FILES = ["*.json", "*.model", "*.txt", "*.jinja"]  # a model's small files
TEMPLATES = "additional_chat_templates"  # where those stand that are not the default


def require(condition, message):
    if not condition:
        raise ValueError(message)


def finite(tensor, what):
    require(tensor.isfinite().all(), f"{what} has values that are NaN or infinite")
    return tensor


@contextlib.contextmanager
def time_limit(seconds, what):
    """Makes any error in the block a ValueError about `what`, and a longer time (0: no limit)."""
    start = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: require(False, ""))
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)  # again each second: a library may catch it
    try:
        yield
    except Exception as e:  # a library may have made any other of the alarm's
        late = 0 < seconds <= time.monotonic() - start
        why = f"longer than {seconds} s" if late else f"{type(e).__name__}: {e}"
        raise ValueError(f"{what}: {why}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def read_json(path):
    with time_limit(0, f"{path}: not a JSON object"):
        require(path.is_file(), "no file")  # a FIFO would wait for a writer
        return {**json.loads(path.read_text())}


def sync(path):
    """Make a file or directory that was written survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_tensors(path):
    """A safetensors file. It is opened anew for each tensor: mapped pages would add up."""
    with time_limit(0, f"{path}: not a whole safetensors file"):
        require(path.is_file(), "no file, and only safetensors are read")
        return safe_open(path, "pt")


def read_run(adapter_dir):
    """train_config.json of a run directory or of a checkpoint's parent, checked."""
    path = adapter_dir / "train_config.json"
    path = path if path.is_file() else adapter_dir.resolve().parent / path.name
    needed = [path, *(adapter_dir / name for name in ADAPTER_FILES)]
    missing = [p.name for p in needed if not p.is_file()]
    require(not missing, f"--adapter_dir {adapter_dir}: has no {' and no '.join(missing)}; name a"
            " run directory of train_fsdp_qlora.py or a checkpoint in it")
    if os.path.lexists(list_path := adapter_dir / "checkpoint.json"):
        state, changed = read_json(list_path), "has another SHA-256 than when it was written"
        written, files = state.pop("sha256", None), state.get("files")
        found = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
        require(found == written and isinstance(files, dict), f"{list_path}: {changed}")
        for file in needed[1:]:
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            require(found == files.get(file.name), f"{file}: {changed}")
    run = read_json(path)
    for name, pattern in TRAINED.items():
        value = run
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        require(re.fullmatch(pattern, text := json.dumps(value)),
                f"{path}: {name} is {text:.80}; a merge takes only {pattern}")
    used = run["config"].get("chat_template")
    return {**run, "template": [path.with_name("chat_template.jinja")] if used else []}


def model_directory(name):
    """The local directory of the base model; downloads it first if `name` is a Hub id."""
    if (Path(name) / "config.json").is_file():
        return Path(name)
    with time_limit(0, f"base model {name}: not a directory with a config.json (if it has moved,"
                    " name --base_model), and of the Hub"):
        return Path(snapshot_download(name, allow_patterns=[*HUB_FILES, "*.safetensors"],
                                      ignore_patterns=["consolidated*", "*/*.safetensors"]))


def read_base(name, quantization):
    """The base model, its files compared with what transformers' class for it asks for."""
    directory, in_4bit = model_directory(name), quantization["prequantized"]
    with time_limit(LONGEST_SECONDS, f"building the model of {directory / 'config.json'}"):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
        is_4bit = bool(vars(config).pop("quantization_config", None))
        kind = "ImageTextToText" if hasattr(config, "text_config") else "CausalLM"
        auto_class = getattr(transformers, f"AutoModelFor{kind}")
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=False)
        decoder = next(n for n, module in model.named_modules() if module is model.get_decoder())
        vocab_size = model.get_input_embeddings().num_embeddings
    require(in_4bit == is_4bit, f"base model {directory}: is {'' if is_4bit else 'not '}quantised"
            " already; with --base_model name the one that was trained on")
    # a vision tower is copied, whatever it holds: transformers may have other names for it
    text = (f"{decoder}.", "lm_head.") if kind == "ImageTextToText" else ""
    linears = [n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    trained = {n for n in linears if n.startswith(f"{decoder}.layers.")}
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
    return argparse.Namespace(
        directory=directory, auto_class=auto_class, files=files,  # {tensor name: path}
        vocab_size=vocab_size, in_4bit=in_4bit, size=2 * sum(map(math.prod, shapes.values())),
        shapes=shapes,  # {tensor name: shape} of what the merged model holds, file by file
        quantised=quantised,  # {tensor name: module name} of the weights that training had in NF4
        unquantised=[n for n in linears if n not in trained],  # module names
        dtype=getattr(torch, quantization["quantized_from_dtype"]),
        absmax_offsets=quantization["absmax_offsets"])  # they tell one base from another


def stored_tensors(directory):
    """Name, file and shape of each of the base's tensors, file by file."""
    paths, index = [directory / "model.safetensors"], directory / "model.safetensors.index.json"
    if index.is_file():
        with time_limit(0, index):
            paths = sorted({index.with_name(n) for n in read_json(index)["weight_map"].values()})
    for path in paths:
        with open_tensors(path) as tensors:
            for name in tensors.offset_keys():
                yield name, path, tuple(tensors.get_slice(name).get_shape())


def read_adapter(adapter_dir, config, base):
    """PEFT's configuration; {tensor name in the base: (file, names of A, B and more, scaling)}.
    Which linears have an adapter is what train_config.json says and the tensors' names must say."""
    path, file = [adapter_dir / name for name in ADAPTER_FILES]
    r, alpha, kind = config["lora_rank"], config["lora_alpha"], config["adapter"]
    ends = tuple("" if n == "all-linear" else f".{n}" for n in config["target_modules"])
    targets = {module for module in base.quantised.values() if f".{module}".endswith(ends)}
    lora = LoraConfig(r=r, lora_alpha=alpha, target_modules=targets,
                      use_rslora=kind == "rslora", use_dora=kind == "dora")
    wanted, found = lora.to_dict(), {**LoraConfig().to_dict(), **read_json(path)}
    for name, value in found.items():  # PiSSA, OLoRA and others train on a changed base
        require(name in FREE or value == wanted.get(name) or not (value or name in wanted),
                f"{path}: {name} is {value!r:.80}, by train_config.json {wanted.get(name)!r}")
    adapter, shapes = {}, {}
    for name, module in base.quantised.items():
        if module in targets:
            (n_out, n_in), prefix = base.shapes[name], f"base_model.model.{module}.lora_"
            parts = {f"{prefix}A.weight": (r, n_in), f"{prefix}B.weight": (n_out, r)}
            parts |= {f"{prefix}magnitude_vector": (n_out,)} if kind == "dora" else {}
            adapter[name] = file, list(parts), alpha / (math.sqrt(r) if kind == "rslora" else r)
            shapes.update(parts)
    with open_tensors(file) as tensors:  # PEFT takes broken ones with a warning at most
        stored = {n: tuple(tensors.get_slice(n).get_shape()) for n in tensors.keys()}
        odd = min((n for n in {*stored, *shapes} if stored.get(n) != shapes.get(n)), default=None)
        require(not odd, f"{file}: {odd} is {stored.get(odd, 'missing')}, but the base model"
                f" and train_config.json ask for {shapes.get(odd, 'none')}: another base model?")
        used = [n for n in stored if finite(tensors.get_tensor(n).float(), f"{file}: {n}").any()]
    require(any("lora_B" in n for n in used), f"{file}: is empty or untrained: lora_B is all 0")
    return lora, adapter


def open_output(output):
    """The hidden directory that becomes `output`, and its file that this merge has locked."""
    target = output.resolve()
    require(not target.is_mount(), f"--output_dir {output}: is a mount point; name a new one in it")
    temporary, is_held = target.with_name(f".{target.name}.partial"), False
    while not is_held:
        with contextlib.suppress(FileNotFoundError):  # another merge has just ended: start over
            with contextlib.suppress(FileExistsError):
                temporary.mkdir(parents=True)
            lock = (temporary / ".lock").open("a+", buffering=1)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)  # the other one may just have begun, and writes who it is
                holder = os.pread(lock.fileno(), 200, 0).decode()
                raise ValueError(f"--output_dir {output}: in use by {holder}: wait or name another")
            except OSError as e:
                print(f"note: no locks beside {output} ({e}): start no second merge into it")
            is_held = os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    lock.truncate(0)
    print(f"process {os.getpid()} on {os.uname().nodename} since {time.ctime()}", file=lock)
    for path in {*temporary.iterdir()} - {temporary / ".lock"}:  # of a merge that died
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return temporary, lock


def write_files(directory, base, template, tensors):
    """The merged model, and the file of --chat_template if training had one; safetensors' own
    writer takes a file's tensors at once."""
    weight_map = {name: base.files[name].name for name in base.shapes}
    with tqdm(total=len(weight_map), desc="merge", unit="tensor") as bar:  # closed before any error
        for file in dict.fromkeys(weight_map.values()):
            header, end = {}, 0
            for name in (n for n in weight_map if weight_map[n] == file):
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
    index = {"metadata": {"total_size": base.size}, "weight_map": weight_map}
    config = read_json(base.directory / "config.json")
    config.update(dict.fromkeys(["dtype", *config.keys() & {"torch_dtype"}], "bfloat16"))
    config.pop("quantization_config", None)  # of a base in 4-bit
    config.pop("auto_map", None)  # remote code, which is neither used nor copied here
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    others = [p for pattern in HUB_FILES for p in base.directory.glob(pattern)]
    for path in others + template:
        if path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, directory / path.name)
    for path in base.directory.glob(f"{TEMPLATES}/*.jinja"):
        (directory / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(path, directory / TEMPLATES / path.name)
    for path in [*directory.rglob("*"), directory]:
        sync(path)


def main(argv=None):
    try:
        merge(parse_config(argv))
    except (ValueError, OSError, SafetensorError, MemoryError, torch.OutOfMemoryError,
            KeyboardInterrupt) as e:
        print(f"error: {' '.join(str(e).split()) or 'stopped'}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
