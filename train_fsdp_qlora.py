#!/usr/bin/env python3
"""Fine-tune a large language model: 4-bit NF4 base weights, LoRA adapters, sharded by FSDP2.

    torchrun --nproc_per_node=2 train_fsdp_qlora.py
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --model meta-llama/Llama-2-70b-hf \
        --dataset data.jsonl --max_seq_len 2048
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --output_dir runs/my-run --resume

The first command needs nothing but this file: it makes a small model and data set and trains on
them, on GPUs (NCCL) or, where there are none, on the CPU (gloo). Written to --output_dir:

    adapter_model.safetensors, adapter_config.json   the adapter, in PEFT's format, fp32
    train_config.json                                the resolved configuration, for merging
    metrics.jsonl                                    one JSON object a step
    tensorboard/                                     the same numbers for TensorBoard
    checkpoint-NNNNNN/                               what --resume needs

Tested with torch 2.11 and 2.13, transformers 5.17 and 5.23, peft 0.21, bitsandbytes 0.50.
"""

import argparse
import ast
import bisect
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import inspect
import itertools
import json
import math
import mmap
import os
import random
import re
import resource
import shlex
import shutil
import socket
import sys
import textwrap
import threading
import time
import types
import typing
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import bitsandbytes as bnb
import huggingface_hub
import peft
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch on CUDA alone
    triton = None

# ------------------------------------------------------------------------------------------------
# Configuration
# ------------------------------------------------------------------------------------------------

BLOCK = 64  # weights that share one absmax; QLoRA's choice and bitsandbytes' default
NESTED_BLOCK = 256  # absmax values that share one second-level absmax (double quantisation)
STATE_BLOCK = 256  # optimizer values that share one scale in bitsandbytes' 8-bit state
WARMUP_FRACTION = 0.03  # of all steps, linear, before the cosine
MAX_GRAD_NORM = 1.0  # over the whole adapter
GAPS = 0.04  # of the GPU's memory that gaps between blocks cost: 21.4 of 22.5 GiB ran, 21.8 did not
HOST_SPARE = 32 * 2**30  # bytes a process may pin for speed alone; pinning takes 0.2 s a GiB
SLICE_TOKENS = 4096  # of a recomputed block's MLP at once; fewer make its products slower
CHUNK_BYTES = 256 * 2**20  # of logits alive at once, of embedded tokens before their sum
ROUND_TO = 64  # tokens; on a GPU cuBLAS and cuDNN choose kernels anew for each new length of rows
IGNORE = -100  # the label of a token that is not trained on
RANDOM_STD = 0.02  # of --random_weights
READERS = 8  # threads of a rank that read weights; one copies some 5 GB/s out of the page cache
READ_CHUNK = 2**24  # bytes that a thread reads at once
READ_AHEAD = 2**29  # bytes read but not yet quantised, so that reading and quantising overlap
LIBRARIES = (torch, transformers, peft, bnb)
SHAPES = {  # what --random_weights knows without a config.json
    name: dict(
        zip(("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings"), values),
        tie_word_embeddings=False,
    )
    for name, *values in (
        ("llama-2-7b", "llama", 32000, 4096, 11008, 32, 32, 32, 4096),
        ("llama-2-70b", "llama", 32000, 8192, 28672, 80, 64, 8, 4096),
        ("llama-3-8b", "llama", 128256, 4096, 14336, 32, 32, 8, 8192),
        ("llama-3-70b", "llama", 128256, 8192, 28672, 80, 64, 8, 8192),
        ("qwen2.5-32b", "qwen2", 152064, 5120, 27648, 64, 40, 8, 32768),
    )
}  # fmt: skip


def knob(default, help_text, **extra):
    """One field of Config: its default, its help and argparse's other keywords."""
    return dataclasses.field(default=default, metadata={"help": help_text, **extra})


@dataclasses.dataclass(frozen=True)
class Config:
    """Every flag of the script. None means: derived from the rest, and printed."""

    model: str | None = knob(
        None, "Hub id or directory of safetensors; none: a built-in demo;"
        " with --random_weights also " + ", ".join(SHAPES),
    )
    dataset: str | None = knob(None, "JSONL file or Hub id; none: the demo's instructions")
    output_dir: str | None = knob(None, "where results go; none: a new directory below runs/")
    resume: bool = knob(False, "continue from the newest whole checkpoint of --output_dir")
    random_weights: bool = knob(False, "random weights: of the model, only config.json is read")
    attn: str | None = knob(
        None,
        "attention; none: flash_attention_2 on CUDA where installed, else sdpa;"
        " auto: the faster of the two, measured at start",
        choices=("flash_attention_2", "sdpa", "auto"),
    )
    compute_dtype: str = knob(
        "bfloat16", "dtype of activations and products", choices=("bfloat16", "float32")
    )
    lora_rank: int = knob(16, "rank of the adapter")
    lora_alpha: int = knob(32, "the adapter's output is scaled by lora_alpha / lora_rank")
    lora_dropout: float = knob(0.0, "dropout on the adapter's input")
    use_rslora: bool = knob(False, "rsLoRA: scale by lora_alpha / sqrt(lora_rank) instead")
    use_dora: bool = knob(
        False, "DoRA: also train the norm of each weight's rows; computed by PEFT, slower"
    )
    target_modules: tuple[str, ...] = knob(
        ("all-linear",), "linear layers that get an adapter, by name: q_proj v_proj"
    )
    reshard_after_forward: bool = knob(
        True, "free a block's gathered weights after its forward (FULL_SHARD), or not until its"
        " backward is done (SHARD_GRAD_OP): faster, needs the whole 4-bit model on each GPU",
    )
    shard_group_size: int | None = knob(
        None, "processes that share one copy of the model, for instance those of a node; every such"
        " group holds one; none: all of them",
    )
    fused: bool | None = knob(
        None, "Triton dequantisation and compiled elementwise work; none: on CUDA, where Triton is"
    )
    recompute: str = knob(
        "all", "decoder blocks recomputed in backward: all, none, a number, or auto: as few as the"
        " memory allows"
    )
    keep_residual: bool | None = knob(
        None, "of a recomputed block also keep what is between attention and MLP, so that"
        " attention's last product is not recomputed; none: where the memory allows"
    )
    reuse_weights: str | None = knob(
        None, "blocks whose dequantised weights are kept for backward: none; recomputed, from their"
        " recomputation on; all, the others from forward on; none given: what the memory allows",
        choices=("none", "recomputed", "all"),
    )
    offload_activations: bool = knob(
        False, "keep the inputs of recomputed blocks in pinned host memory until their backward"
    )
    offload_params: bool = knob(
        False, "keep the 4-bit weights in pinned host memory; each block is copied when needed"
    )
    memory_limit_gib: float | None = knob(
        None, "GPU memory to plan for and never to exceed; none: what is free"
    )
    max_seq_len: int = knob(2048, "tokens; longer rows are cut")
    packing: bool = knob(
        False, "put rows together to packs of at most --max_seq_len tokens, which then count as"
        " rows; what was a row still sees nothing but itself",
    )
    batch_size: int | None = knob(None, "rows an optimizer step, over all GPUs; none: 16 or more")
    micro_batch_size: int = knob(2, "rows a GPU works on at once")
    num_epochs: float = knob(1.0, "passes over the data set; --max_steps overrides it")
    max_steps: int | None = knob(None, "optimizer steps")
    learning_rate: float | None = knob(None, "peak; none: 2e-4, for the demo 5e-3")
    save_every: int = knob(0, "steps between checkpoints; 0: only at the end")
    seed: int = knob(0, "of the adapter's initial values, the data order, dropout")


def parse_config(argv):
    """Flags to Config. Raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def fail(message):
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.print_help = lambda: say(parser.format_help())  # from rank 0 alone
    hints = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        kind = next(t for t in typing.get_args(hints[f.name]) or (hints[f.name],) if t is not None)
        options = dict(f.metadata, default=f.default)
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif f.name == "target_modules":
            options["nargs"] = "+"
        else:
            options["type"] = kind
        parser.add_argument(f"--{f.name}", **options)
    values = vars(parser.parse_args(argv))
    values["target_modules"] = tuple(values["target_modules"])
    return Config(**values)


def resolve_config(config, world_size):
    """Check what the flags alone can tell and fill in what is derived from them."""
    for name, value in vars(config).items():
        if value == "":
            raise ValueError(f"--{name} is empty: leave it out or give a value")
    for name in ("lora_rank", "lora_alpha", "max_seq_len", "micro_batch_size"):
        if getattr(config, name) < 1:
            raise ValueError(f"--{name} {getattr(config, name)}: must be at least 1")
    for name in ("max_steps", "batch_size", "num_epochs", "learning_rate", "memory_limit_gib"):
        if getattr(config, name) is not None and not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"--{name} {getattr(config, name)}: must be positive")
    if not 0 <= config.lora_dropout < 1:
        raise ValueError(f"--lora_dropout {config.lora_dropout}: must be at least 0 and below 1")
    if not 0 <= config.seed < 2**40:
        raise ValueError(f"--seed {config.seed}: must be at least 0 and below 2^40")
    if config.save_every < 0:
        raise ValueError(f"--save_every {config.save_every}: must be 0 (off) or more")
    if config.recompute not in ("all", "none", "auto") and not config.recompute.isdecimal():
        raise ValueError(f"--recompute {config.recompute}: must be all, none, auto or a number")
    if config.offload_activations and config.recompute in ("none", "0"):
        raise ValueError(f"--offload_activations has nothing to keep with --recompute"
                         f" {config.recompute}: drop one of them")
    if config.attn == "flash_attention_2" and config.compute_dtype != "bfloat16":
        raise ValueError("--attn flash_attention_2 computes in bfloat16: drop it or use sdpa")
    if config.model and not config.dataset and not config.random_weights:
        raise ValueError(f"--model {config.model} needs a --dataset: a JSONL file or a Hub id")
    if config.random_weights and not config.model:
        raise ValueError("--random_weights needs a --model whose config.json gives the shapes")
    shards = world_size if config.shard_group_size is None else config.shard_group_size
    if shards < 1 or world_size % shards:
        sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f"--shard_group_size {shards} does not divide {world_size} processes: use"
                         f" one of {sizes}")
    step_rows = config.micro_batch_size * world_size
    batch_size = config.batch_size or math.ceil(16 / step_rows) * step_rows
    if batch_size % step_rows:
        above = math.ceil(batch_size / step_rows) * step_rows
        fits = f"{above - step_rows} or {above}" if batch_size > step_rows else f"{above}"
        raise ValueError(
            f"--batch_size {batch_size} is not a multiple of {config.micro_batch_size} micro-batch"
            f" x {world_size} processes = {step_rows}: use {fits}"
        )
    return dataclasses.replace(
        config,
        shard_group_size=shards,
        batch_size=batch_size,
        learning_rate=config.learning_rate or (2e-4 if config.model else 5e-3),
        max_steps=config.max_steps or (None if config.model or config.dataset else 60),
        output_dir=config.output_dir or default_output_dir(config.resume),
    )


def default_output_dir(resume):
    """A new directory below runs/, or with --resume the newest there."""
    if not resume:
        return f"runs/{time.strftime('%Y%m%d-%H%M%S')}"
    runs = sorted(p.parent for p in Path("runs").glob("*/train_config.json"))
    if not runs:
        raise ValueError("--resume without --output_dir: no run below runs/ to continue")
    return str(runs[-1])


# ------------------------------------------------------------------------------------------------
# Distributed set-up
# ------------------------------------------------------------------------------------------------


TIMEOUT = timedelta(hours=1)  # a node may be slow to read a model that another has in memory


def init_distributed():
    """Join torchrun's processes, or be the only one; returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    if cuda and local_rank >= torch.cuda.device_count():
        sys.exit(f"rank on GPU {local_rank}, but there are {torch.cuda.device_count()} GPUs")
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    options = {"backend": "cpu:gloo,cuda:nccl" if cuda else "gloo", "timeout": TIMEOUT}
    if "RANK" not in os.environ:  # plain `python`: no rendezvous needed
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    if cuda:
        # tensors of all sizes come and go, and gaps between fixed segments cannot be joined
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        options["device_id"] = device
    else:  # torchrun allows each process one thread; share the cores instead
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world_size))
    dist.init_process_group(**options)
    transformers.utils.logging.disable_progress_bar()
    if local_rank:  # one rank of a machine shows how the Hub's downloads go
        huggingface_hub.utils.disable_progress_bars()
    # on a CPU bitsandbytes keeps the paged optimizer's state unpaged, which is what we want there
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    return device


def say(message=""):
    """Print from rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        tqdm.write(message)
        sys.stdout.flush()


def all_gather(tensor, group=None):
    """[ranks, *shape] of every rank's tensor [*shape]. All ranks of the group must call this."""
    rows = tensor.new_empty(dist.get_world_size(group), *tensor.shape)
    dist.all_gather(list(rows), tensor, group=group)
    return rows


def gather_texts(text):
    """Every rank's text, in rank order. All ranks must call this."""
    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    sizes = all_gather(torch.tensor(data.numel())).tolist()
    rows = all_gather(F.pad(data, (0, max(sizes) - data.numel())))
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]


class Stop(Exception):
    """An error that all ranks know of and raise together, so that none is left waiting."""


def together(function, *args):
    """Run `function` on every rank; if it fails on one, all raise Stop with that rank's error.

    Libraries raise all kinds of errors for what a user can cause, so that only an assertion counts
    as a bug here. `function` must not use collectives. All ranks must call this.
    """
    result, error = None, ""
    try:
        result = function(*args)
    except (AssertionError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        error = " ".join(str(e).split())
        if not error or not isinstance(e, (ValueError, OSError)):
            error = f"{type(e).__name__}: {error}"
    failed = [e for e in gather_texts(error) if e]
    if failed:
        raise Stop(failed[0])
    return result


def on_rank_0(function, *args):
    """Run `function` on rank 0 alone; a text it returns goes to all. All ranks must call this."""
    text = together(lambda: function(*args) if dist.get_rank() == 0 else None)
    return gather_texts(text or "")[0]


def limit_memory(config, device):
    """The GPU memory in bytes that this run may use: --memory_limit_gib or what is free now; None
    on a CPU without that flag. The limit is what torch allocates: what CUDA and NCCL need for
    themselves, about 1 GiB, is beside it."""
    limit = config.memory_limit_gib and int(config.memory_limit_gib * 2**30)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        if limit and limit > free:
            raise ValueError(f"--memory_limit_gib {config.memory_limit_gib}: of this GPU's"
                             f" {total / 2**30:.1f} GiB only {free / 2**30:.1f} are free")
        if limit:
            torch.cuda.set_per_process_memory_fraction(limit / total)
        limit = limit or free
    return limit


def check_same(config):
    """Stop unless every rank runs the same flags, script and versions. All ranks must call this."""
    versions = {m.__name__: m.__version__ for m in LIBRARIES}
    versions["python"] = "{}.{}".format(*sys.version_info)
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    mine = {"host": socket.gethostname(), "script": script, "versions": versions}
    mine["flags"] = {name: str(value) for name, value in vars(config).items()}
    first, *others = map(json.loads, gather_texts(json.dumps(mine)))
    for rank, other in enumerate(others, 1):
        who = f"rank {rank} on {other['host']}"
        if other["script"] != first["script"]:
            raise Stop(f"{who} runs another version of {Path(__file__).name} than rank 0 on"
                       f" {first['host']}: copy one to all nodes")
        for name, value in first["versions"].items():
            if other["versions"][name] != value:
                raise Stop(f"{who} has {name} {other['versions'][name]}, rank 0 on {first['host']}"
                           f" {value}: install the same on all nodes")
        for name, value in first["flags"].items():
            if other["flags"][name] != value:
                raise Stop(f"{who} runs --{name} {other['flags'][name]}, rank 0 on {first['host']}"
                           f" --{name} {value}: start all nodes with the same command")


def memory_gib(device):
    """Now and peak: allocated on a GPU, else the resident memory of the process (peak twice)."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated() / 2**30, torch.cuda.max_memory_allocated() / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return peak, peak


def host_memory():
    """This process's resident bytes now and at their peak; None where there is no /proc."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    sizes = dict(line.split(":") for line in lines if line.startswith(("VmRSS", "VmHWM")))
    return tuple(int(sizes[name].split()[0]) * 2**10 for name in ("VmRSS", "VmHWM"))


def say_loading(before, seconds, n_bytes):
    """`before` is host_memory() at the start. All ranks must call this."""
    text, after = f"{n_bytes / 1e9:.3f} GB at {n_bytes / 1e9 / seconds:.2f} GB/s", host_memory()
    if after:  # the peak may be from before: no more than this
        text += f" with at most {(after[1] - before[0]) / 2**30:.2f} GiB more host memory"
    say(f"weights loaded in {seconds:.2f} s; each rank: " + ", ".join(gather_texts(text)))


def say_memory(when, device):
    """All ranks must call this."""
    now, peak = memory_gib(device)
    kind = "GPU memory" if device.type == "cuda" else "host memory"
    texts = gather_texts(f"{now:.2f} (peak {peak:.2f})")
    say(f"{kind} per rank {when}, GiB: " + ", ".join(texts))


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------


def write_demo(directory):
    """A 2.6 M parameter Llama with random weights, its tokenizer and 512 instructions. Rank 0 only.

    The frozen base knows nothing, so what the loss falls by is what the adapter has learnt.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    rows = []
    for _ in range(512):
        a, b = draw.randrange(10), draw.randrange(10)
        word, answer = draw.choice([("plus", a + b), ("times", a * b), ("minus", a - b)])
        prompt, completion = f"What is {a} {word} {b}?\n", f"The answer is {answer}."
        rows.append({"prompt": prompt, "completion": completion})
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((row["prompt"] + row["completion"] for row in rows), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ eos_token if m.role == 'assistant' else '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    tokenizer.save_pretrained(directory / "model")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            initializer_range=0.06,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.to(torch.bfloat16).save_pretrained(directory / "model")


def read_rows(source):
    """The rows of a JSONL file, or of a Hub data set's train split, as a list of dicts."""
    path = Path(source)
    if not path.exists():
        if path.suffix in (".jsonl", ".json") or source.startswith((".", "/")):
            raise ValueError(f"--dataset {source}: no such file")
        import datasets

        try:
            return list(datasets.load_dataset(source, split="train"))
        except Exception as e:  # the Hub client has a dozen kinds of errors; each is the user's
            raise ValueError(f"--dataset {source}: neither a file nor readable from the Hub: {e}")
    if not path.is_file():
        raise ValueError(f"--dataset {source}: is a directory; name a JSONL file")
    rows = []
    with path.open("rb") as file:  # bytes: json tells the encoding, and names the bad line
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{source} line {number}: not JSON: {e}")
            if not isinstance(row, dict):
                raise ValueError(f"{source} line {number}: {type(row).__name__}, want an object")
            rows.append(row)
    return rows


def fix_date(day):
    """Let chat templates take `day`, YYYY-MM-DD, for today, as those of Llama 3 do who print it: a
    run that is resumed must see the same rows, and so must all ranks around midnight."""

    class RunDay(datetime):
        now = classmethod(lambda cls, tz=None: cls.fromisoformat(day))

    transformers.utils.chat_template_utils.datetime = RunDay


def run_date(config, directory):
    """The day when the run was begun. Rank 0 only."""
    path = directory / "train_config.json"
    begun = json.loads(path.read_text()) if config.resume and path.is_file() else {}
    return begun.get("date", time.strftime("%Y-%m-%d"))


def render_chat(messages, tokenizer):
    """A conversation as text, with the (start, end) characters of what the assistant says.

    Each assistant turn begins after the template's generation prompt and ends where the template
    of the conversation up to it ends, so that its end-of-turn token is learnt.
    """
    template = functools.partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = template(messages), []
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = template(messages[:i], add_generation_prompt=True)
            end = template(messages[: i + 1])
            if not (end.startswith(start) and text.startswith(end)):
                raise ValueError("the chat template rewrites earlier turns, so the assistant's"
                                 " part cannot be told; use prompt and completion")
            spans.append((len(start), len(end)))
    if not spans:
        raise ValueError("messages has no assistant turn")
    if not text.rstrip().endswith(tokenizer.eos_token) and spans[-1][1] == len(text):
        text += tokenizer.eos_token
        spans[-1] = (spans[-1][0], len(text))
    return text, spans


def encode_row(row, tokenizer):
    """One row as (input_ids, labels), two lists; labels are IGNORE where nothing is learnt."""
    eos = [tokenizer.eos_token_id]
    for name in ("prompt", "completion", "text"):
        if name in row and not isinstance(row[name], str):
            raise ValueError(f"{name} is {type(row[name]).__name__}, want a string")

    def without_eos(ids):
        while ids[-1:] == eos:
            ids = ids[:-1]
        return ids

    if "messages" in row:
        if not tokenizer.chat_template:
            raise ValueError("has messages, but the tokenizer has no chat template")
        text, spans = render_chat(row["messages"], tokenizer)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = encoded["input_ids"]
        labels = [  # by overlap: a token may begin with the space before the turn
            token if any(a < end and b > start for start, end in spans) else IGNORE
            for token, (a, b) in zip(ids, encoded["offset_mapping"])
        ]
        return ids, labels
    # tokenizers put BOS in front, if they have one; some append EOS too, others do not
    if "prompt" in row and "completion" in row:
        prompt = without_eos(tokenizer(row["prompt"])["input_ids"])
        completion = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
        completion = without_eos(completion) + eos
        return prompt + completion, [IGNORE] * len(prompt) + completion
    if "text" in row:
        if not row["text"].strip():
            return [], []  # else it would be learnt to stop at once
        ids = without_eos(tokenizer(row["text"])["input_ids"]) + eos
        return ids, list(ids)
    raise ValueError(f"has {sorted(row)}; want prompt and completion, text, or messages")


def encode_dataset(rows, tokenizer, max_seq_len, source):
    """All rows as (input_ids, labels) int32 tensors, cut to max_seq_len; those that then have
    nothing to learn are left out. Returns them and the numbers of rows cut and left out."""
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token: generation would never stop")
    examples, cut = [], 0
    for number, row in enumerate(rows, 1):
        try:
            ids, labels = encode_row(row, tokenizer)
        except Exception as e:  # the chat template's own errors are jinja2's
            raise ValueError(f"{source} row {number}: {e}")
        cut += len(ids) > max_seq_len
        ids, labels = ids[:max_seq_len], labels[:max_seq_len]
        # the first token has no predecessor to be predicted from
        if any(label != IGNORE for label in labels[1:]):
            examples.append(
                (torch.tensor(ids, dtype=torch.int32), torch.tensor(labels, dtype=torch.int32))
            )
    if not examples:
        raise ValueError(f"{source}: none of its {len(rows)} rows has anything to learn")
    return examples, cut, len(rows) - len(examples)


def random_examples(vocab_size, config):
    """Rows of random tokens, for measuring without a data set: all of full length, or with
    --packing of any from a sixteenth of it, and enough of them to fill packs well."""
    generator = torch.Generator().manual_seed(config.seed)
    shape, most = (config.batch_size, config.max_seq_len), config.max_seq_len
    if config.packing:
        n_rows = (2 * max(64, config.batch_size),)
        lengths = torch.randint(max(1, most // 16), most + 1, n_rows, generator=generator)
        rows = (torch.randint(vocab_size, (n,), generator=generator, dtype=torch.int32)
                for n in lengths.tolist())  # fmt: skip
        return [(row, row) for row in rows]
    ids = torch.randint(vocab_size, shape, generator=generator, dtype=torch.int32)
    return [(row, row) for row in ids]


def best_fit(lengths, size):
    """Indices of `lengths` in packs whose sum is at most `size`, each index once: the longest
    first, each into the fullest pack that still has room. In O(n log n), whatever the order."""
    packs, spaces, with_space = [], [], collections.defaultdict(list)  # spaces: sorted, those left
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(spaces, lengths[i])
        if at == len(spaces):
            packs.append([])
            space, pack = size, packs[-1]
        else:
            space, pack = spaces[at], with_space[spaces[at]].pop()
            if not with_space[space]:
                del spaces[at]
        pack.append(i)
        space -= lengths[i]
        if space and not with_space[space]:
            bisect.insort(spaces, space)
        with_space[space].append(pack)
    return packs


def pack_examples(examples, max_seq_len):
    """Rows as packs: (input_ids, labels, lengths), the rows' tokens end to end and how many each
    has. No row's first token is learnt: it would be predicted from another's last."""
    packs = []
    for indices in best_fit([len(ids) for ids, _ in examples], max_seq_len):
        ids, labels = (torch.cat([examples[i][part] for i in indices]) for part in (0, 1))
        lengths = tuple(len(examples[i][0]) for i in indices)
        labels[[0, *itertools.accumulate(lengths[:-1])]] = IGNORE
        packs.append((ids, labels, lengths))
    return packs


def digest_examples(examples):
    """SHA-256 of all rows' tokens and labels: whether a resumed run sees the same data."""
    sha = hashlib.sha256()
    for ids, labels, *lengths in examples:
        sha.update(ids.numpy().tobytes())
        sha.update(labels.numpy().tobytes())
        sha.update(str(*lengths).encode())  # nothing where it is no pack
    return sha.hexdigest()


def say_example(examples, tokenizer):
    """Show one row as the model sees it, with what is not learnt in brackets."""
    ids, labels = (t.tolist() for t in examples[0][:2])
    parts, learnt = [], None
    for token, label in zip(ids, labels):
        if learnt != (label != IGNORE):
            learnt = label != IGNORE
            parts.append((learnt, []))
        parts[-1][1].append(token)
    text = "".join(
        tokenizer.decode(tokens) if learnt else f"[not learnt: {tokenizer.decode(tokens)}]"
        for learnt, tokens in parts
    )
    say(f"first row: {text[:600]!r}")


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch, n_examples, seed):
    """The shuffled indices of one epoch's rows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(n_examples, generator=generator)


def step_rows(step, n_examples, config):
    """Indices of the rows of an optimizer step (the first is 1): every epoch is a new shuffle."""
    positions = range((step - 1) * config.batch_size, step * config.batch_size)
    return [
        int(epoch_order(position // n_examples, n_examples, config.seed)[position % n_examples])
        for position in positions
    ]


def join_packs(packs):
    """Several packs as one."""
    ids, labels, lengths = zip(*packs)
    return torch.cat(ids), torch.cat(labels), sum(lengths, ())


def round_length(n_tokens, device):
    return math.ceil(n_tokens / ROUND_TO) * ROUND_TO if device.type == "cuda" else n_tokens


def collate(examples, rank, world_size, device, longest=0):
    """This rank's part of one micro-batch; `examples` are the rows of all ranks.

    input_ids [rows, longest] is padded on the right, where causal attention never looks back
    from a real token, so that no mask is needed; positions [n] index the flattened tokens whose
    successor is learnt, and labels [n] are those successors. All ranks get the same shapes,
    padded with labels of IGNORE: embedding and head are computed together (see Embedding), and
    for the longest row of a micro-batch all wait anyway.

    A rank's packs are one row of documents, its padding, to `longest` tokens, the last of them.
    Three more things say where these begin and end: position_ids [1, longest], 0 at the first token
    of each; cu_seq_lens int32 [documents + 1]; and lengths, a tuple.
    """
    rows, packed = len(examples) // world_size, len(examples[0]) == 3
    if packed:
        examples = [join_packs(examples[i : i + rows]) for i in range(0, len(examples), rows)]
        rows = 1
    longest = round_length(max(longest, *(len(ids) for ids, *_ in examples)), device)
    input_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
    labels = torch.full((len(examples), longest), IGNORE)
    for row, (ids, row_labels, *_) in enumerate(examples):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids) - 1] = row_labels[1:]
    most = int((labels != IGNORE).view(world_size, -1).sum(-1).max())
    mine = slice(rank * rows, (rank + 1) * rows)
    input_ids, labels = input_ids[mine], labels[mine].view(-1)
    positions = (labels != IGNORE).nonzero().view(-1)
    padding = (0, most - len(positions))
    batch = (input_ids, F.pad(positions, padding), F.pad(labels[positions], padding, value=IGNORE))
    lengths = ()
    if packed:
        lengths = examples[rank][2]
        padding, most = longest - sum(lengths), max(lengths)
        # in documents no longer than the others: some rotary embeddings change with the longest
        lengths += (most,) * (padding // most) + (padding % most,) * (padding % most > 0)
        starts = torch.tensor([0, *lengths]).cumsum(0)
        position_ids = torch.arange(longest) - starts[:-1].repeat_interleave(starts.diff())
        batch += position_ids[None], starts.int()
    if device.type == "cuda":
        batch = [tensor.pin_memory().to(device, non_blocking=True) for tensor in batch]
    return (*batch, lengths) if packed else batch


# ------------------------------------------------------------------------------------------------
# Model: 4-bit layers
# ------------------------------------------------------------------------------------------------


class NF4Blocks(torch.Tensor):
    """Storage of NF4 weights: n blocks of 64 weights. Outside a bf16 tensor of shape [n];
    inside packed uint8 [n, 32], the 4-bit codes, and absmax_codes uint8 [n], the 8-bit scales.

    FSDP2 copies parameters into its gather buffer with torch._foreach_copy_, whose CUDA kernel
    rewrites the bf16 NaN patterns among packed codes (torch 2.11: 0.08 % of all words, and no
    error). The two hooks make it gather bytes instead, the scales along with the codes. Outside
    it is bf16 because FSDP2 took no integer parameters before torch 2.13. With --offload_params
    the inner tensors are in pinned host memory, and a gather begins with their copy to the GPU,
    on FSDP2's own stream and thus a block ahead; FSDP2's CPUOffloadPolicy would take the adapter,
    its gradients and the optimizer to the CPU too.
    """

    @staticmethod
    def __new__(cls, packed, absmax_codes, device=None):
        return torch.Tensor._make_wrapper_subclass(
            cls, (packed.shape[0],), dtype=torch.bfloat16, device=device or packed.device
        )

    def __init__(self, packed, absmax_codes, device=None):
        self.packed, self.absmax_codes = packed, absmax_codes

    @classmethod
    def zeros(cls, n_blocks, device):
        packed = torch.zeros(n_blocks, BLOCK // 2, dtype=torch.uint8, device=device)
        return cls(packed, torch.zeros(n_blocks, dtype=torch.uint8, device=device))

    def __repr__(self):
        return f"NF4Blocks({self.shape[0]} blocks, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, _, args, kwargs=None):
        """What FSDP2 and DTensor do to a parameter: all of it acts on whole blocks."""
        aten, op = torch.ops.aten, func.overloadpacket
        inner = [args[0].packed, args[0].absmax_codes]
        kwargs = {k: v for k, v in (kwargs or {}).items() if k not in ("dtype", "layout")}
        if op is aten.copy_:
            args[0].packed.copy_(args[1].packed)
            args[0].absmax_codes.copy_(args[1].absmax_codes)
            return args[0]
        if op is aten.is_pinned:
            return args[0].packed.is_pinned()
        if op is aten.split:
            return [cls(*pair) for pair in zip(*(func(t, *args[1:]) for t in inner))]
        offloaded = inner[0].is_cpu and args[0].is_cuda
        if op is aten.new_zeros:
            (n,) = args[1]
            return cls(inner[0].new_zeros(n, BLOCK // 2, **kwargs), inner[1].new_zeros(n, **kwargs))
        if op in (aten.view, aten.as_strided):  # FSDP2 only ever asks for the shape it has
            assert args[1] in ([-1], list(args[0].shape)), f"{func} of NF4Blocks to {args[1:]}"
            return cls(*inner, args[0].device if offloaded else None)
        if op in (aten.detach, aten.slice, aten._to_copy, aten._pin_memory, aten.clone):
            device = args[0].device if offloaded and op is not aten._to_copy else None
            return cls(*(func(t, *args[1:], **kwargs) for t in inner), device)
        raise NotImplementedError(f"{func} of NF4Blocks")

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        packed = self.packed.to(self.device, non_blocking=True)
        absmax_codes = self.absmax_codes.to(self.device, non_blocking=True)
        # FSDP2 passes the mesh of the shards alone, without its replicas
        if mesh.size() == 1:  # one rank's FSDP2 takes the first of several tensors only
            return (torch.cat([packed.view(-1), absmax_codes]),), None
        return (packed, absmax_codes), None

    # FSDP2 asks for it at every gather; finding it out anew took 5 of 150 ms a micro-batch on a CPU
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        packed, absmax_codes = outputs if len(outputs) == 2 else outputs[0].split(
            [outputs[0].numel() // (BLOCK // 2 + 1) * n for n in (BLOCK // 2, 1)]
        )
        if out is None:
            return NF4Blocks(packed.view(-1, BLOCK // 2), absmax_codes), outputs
        assert out.packed.data_ptr() == packed.data_ptr(), "FSDP2 gathered to another place"


def pinned_copy(tensor):
    """A copy in pinned host memory; on a CPU just a copy."""
    host = pinned_empty(tensor.nbytes, tensor.device).view(tensor.dtype).view(tensor.shape)
    return host.copy_(tensor)


PINNED = []  # holds what is registered: its pages must not go back to the system


def pinned_empty(n_bytes, device):
    """Host memory that `device` copies from and to without waiting, uint8 [n_bytes], for the rest
    of the process. Torch's own pinned memory is rounded up to a power of 2."""
    if device.type != "cuda" or not n_bytes:
        return torch.empty(n_bytes, dtype=torch.uint8)
    # whole pages of its own, as registering wants, and large ones: 0.2 s a GiB, with small ones 0.4
    PINNED.append(mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        PINNED[-1].madvise(mmap.MADV_HUGEPAGE)
    buffer = torch.frombuffer(PINNED[-1], dtype=torch.uint8)
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0)
    if int(error):
        raise MemoryError(f"{n_bytes / 2**30:.2f} GiB of host memory cannot be pinned: {error}")
    return buffer


@functools.lru_cache(None)
def dynamic_map(device):
    """The 256 values of bitsandbytes' 8-bit code, fp32."""
    return bnb.functional.create_dynamic_map().to(device)


class NF4Linear(nn.Linear):
    """A frozen linear layer whose weight [out_features, in_features] is stored as NF4.

    All such layers of a decoder block have one parameter, `weight`, in which this one's blocks
    are those from first_block on, in row-major order: FSDP2's work on the host is by parameter.
    The second level of the double quantisation, 4 bytes for 16,384 weights, is small enough to be
    replicated.
    """

    def __init__(self, linear, first_block):
        nn.Module.__init__(self)  # nn.Linear's own would allocate the weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.first_block = first_block
        self.n_blocks = math.ceil(linear.weight.numel() / BLOCK)
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        self.quant_state = None
        self.fused = self.skipped = self.reused = False
        self.kept_weight = None

    @property
    def W_q(self):
        """By this attribute, HQQ's, PEFT 0.21 knows a layer that it must ask to dequantize()."""
        return self.weight

    def set_nested_state(self, nested_absmax, offset, code=None):
        """nested_absmax fp32 [n_blocks / 256] and offset fp32 [] undo the 8-bit absmax codes, whose
        values are those of `code` fp32 [256], None for today's bitsandbytes'."""
        device = nested_absmax.device
        nested = bnb.functional.QuantState(
            absmax=nested_absmax,
            code=dynamic_map(device) if code is None else code,
            blocksize=NESTED_BLOCK,
            dtype=torch.float32,
        )
        self.quant_state = bnb.functional.QuantState(
            absmax=None,  # the gathered codes, set at each use
            shape=torch.Size((self.out_features, self.in_features)),
            dtype=self.dtype,
            code=bnb.functional.get_4bit_type("nf4", device=device),
            blocksize=BLOCK,
            quant_type="nf4",
            offset=offset,
            state2=nested,
        )

    def gathered(self):
        """packed uint8 [n_blocks, 32] and absmax_codes uint8 [n_blocks] of this layer."""
        mine = slice(self.first_block, self.first_block + self.n_blocks)
        weight = self.weight
        return weight.packed[mine], weight.absmax_codes[mine]

    def dequantize(self):
        """The gathered weight as bitsandbytes gives it: [out_features, in_features]."""
        if self.quant_state is None:  # not loaded yet; PEFT asks for its shape
            shape = self.out_features, self.in_features
            return torch.empty(shape, dtype=self.dtype, device="meta")
        packed, absmax_codes = self.gathered()
        if self.fused:
            return dequantize_fused(packed, absmax_codes, self.quant_state)
        n_bytes = self.out_features * self.in_features // 2
        self.quant_state.absmax = absmax_codes
        weight = bnb.functional.dequantize_4bit(packed.view(-1, 1)[:n_bytes], self.quant_state)
        self.quant_state.absmax = None
        return weight

    def forward_weight(self):
        """The weight; where backward is to use it again, it is left there."""
        weight = self.dequantize()
        if self.reused:
            self.kept_weight = weight
        return weight

    def backward_weight(self):
        return self.dequantize() if self.kept_weight is None else self.kept_weight

    def forward(self, x):
        return FrozenProduct.apply(x.flatten(0, -2), self.bias, self).unflatten(0, x.shape[:-1])


if triton:

    @triton.jit
    def dequantize_kernel(
        packed, absmax_codes, nested_absmax, offset, nf4_code, absmax_code, out,
        n_blocks, n_weights, BLOCKS: tl.constexpr,
        BLOCK: tl.constexpr, NESTED_BLOCK: tl.constexpr,
    ):  # fmt: skip
        """BLOCKS blocks of 64 weights: 4-bit codes and 8-bit scales to `out`'s dtype."""
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        inside = block < n_blocks
        absmax = tl.load(absmax_code + tl.load(absmax_codes + block, inside, 0).to(tl.int32))
        absmax = absmax * tl.load(nested_absmax + block // NESTED_BLOCK, inside, 0.0)
        absmax = absmax + tl.load(offset)
        byte = block[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        codes = tl.load(packed + byte, inside[:, None], 0).to(tl.int32)
        high = tl.load(nf4_code + (codes >> 4)) * absmax[:, None]
        low = tl.load(nf4_code + (codes & 15)) * absmax[:, None]
        weight = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        values = tl.interleave(high, low).to(out.dtype.element_ty)
        tl.store(out + weight, values, weight < n_weights)


    @triton.jit
    def look_up_kernel(ids, table, out, first, n_rows, width, COLUMNS: tl.constexpr):
        """Rows `ids` - first of `table` [n_rows, width]; 0 for those that it does not have."""
        token = tl.program_id(0).to(tl.int64)
        row = tl.load(ids + token) - first
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = (column < width) & (row >= 0) & (row < n_rows)
        values = tl.load(table + row * width + column, there, 0.0)
        tl.store(out + token * width + column, values, column < width)


def look_up(ids, table, first):
    """Embeddings [n, d] of ids [n] from rows first, first + 1, .. `table` [rows, d]; 0 for ids that
    are not there. The table may be in pinned host memory, which the GPU then reads by itself."""
    if table.is_cpu and ids.is_cuda:
        out = torch.empty(len(ids), table.shape[1], dtype=table.dtype, device=ids.device)
        grid = (len(ids), triton.cdiv(table.shape[1], 1024))
        look_up_kernel[grid](ids.contiguous(), table, out, first, len(table), table.shape[1], 1024)
        return out
    local = ids - first
    absent = (local < 0) | (local >= len(table))
    return F.embedding(local.masked_fill(absent, 0), table).masked_fill_(absent[:, None], 0)


def dequantize_fused(packed, absmax_codes, state):
    """A layer's blocks to its weight in one kernel, bit for bit what bitsandbytes' three give.

    Without floating-point fusion: bitsandbytes rounds between the scale's product and its offset.
    """
    out = torch.empty(state.shape, dtype=state.dtype, device=packed.device)
    dequantize_kernel[(triton.cdiv(len(packed), 64),)](
        packed, absmax_codes, state.state2.absmax, state.offset, state.code,
        state.state2.code, out, len(packed), out.numel(), 64, BLOCK, NESTED_BLOCK,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


class FrozenProduct(torch.autograd.Function):
    """x [n, in] times a frozen NF4 weight, plus a frozen bias [out] or None: [n, out].

    Nothing is saved for backward: the weight is dequantised again there, unless the recomputation
    has left it. With nothing after it that the recomputation of a checkpoint needs, a block's last
    product is not recomputed at all.
    """

    @staticmethod
    def forward(ctx, x, bias, layer):
        ctx.layer = layer
        if layer.skipped:  # only the graph is wanted, see SlicedMLP
            return x.new_empty(len(x), layer.out_features)
        return F.linear(x, layer.forward_weight(), bias)

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad @ ctx.layer.backward_weight()
        ctx.layer.kept_weight = None
        return grad_x, None, None


# ------------------------------------------------------------------------------------------------
# Model: vocabulary and loss
# ------------------------------------------------------------------------------------------------


class Embedding(nn.Embedding):
    """The embedding, each rank with its own rows of the vocabulary (see shard_vocabulary).

    Nothing is gathered but the tokens: each rank looks all ranks' tokens up among its own rows,
    and the sum, in which one term is not zero, goes to whom it belongs. Of a vocabulary of 128k
    that is 0.1 GB for 4,096 tokens on 2 GPUs instead of a weight of 2.1 GB. Where memory is short
    the rows are in pinned host memory (see look_up): on 2 GPUs 1 GB less for each.
    """

    on_host = False

    def forward(self, input_ids):
        group, table = self.group, self.weight.to_local()
        ranks = dist.get_world_size(group)
        first = shard_range(self.num_embeddings, dist.get_rank(group), ranks).start
        if ranks == 1:
            return look_up(input_ids.view(-1), table, 0).view(*input_ids.shape, -1)
        ids = all_gather(input_ids.view(-1), group)  # [ranks, n]
        out = torch.empty(
            ids.shape[1], table.shape[1], dtype=table.dtype, device=input_ids.device
        )
        step = max(1, CHUNK_BYTES // (ranks * table[:1].nbytes))
        for chunk in (slice(i, i + step) for i in range(0, len(out), step)):
            rows = look_up(ids[:, chunk].flatten(), table, first)
            dist.reduce_scatter_tensor(out[chunk], rows, group=group)
        return out.view(*input_ids.shape, -1)


class LMHead(nn.Linear):
    """The output layer, sharded like the embedding: with labels the sum of this rank's token
    losses, without them the logits. All ranks must call it, with as many tokens each."""

    def forward(self, hidden, labels=None):
        if labels is None:
            bias = None if self.bias is None else self.bias.full_tensor()
            return F.linear(hidden, self.weight.full_tensor(), bias)
        return ChunkedCrossEntropy.apply(hidden, labels, self)


def logits_maximum(logits):
    """Of each row its maximum and the sum of exp(logits - maximum), fp32."""
    logits = logits.float()
    top = logits.amax(-1)
    return top, (logits - top[:, None]).exp().sum(-1)


def logits_gradient(logits, log_sum, targets, absent):
    """The gradient of the token losses: probabilities minus 1 at the target, 0 without a label."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    hit = (columns[None] == targets[:, None]).float()
    gradient = (logits.float() - log_sum[:, None]).exp() - hit
    return gradient.masked_fill(absent[:, None], 0).to(logits.dtype)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Sum over this rank's tokens of the cross-entropy of hidden [n, d] @ weight.T, fp32.

    Each rank computes the logits of all ranks' tokens for its own part of the vocabulary; what
    the softmax needs of the others is three numbers a token. The head is never gathered, and the
    full logits never exist (5.25 GB at 4,096 tokens and a vocabulary of 128k): the head is frozen,
    so that the gradient of `hidden` is all there is to compute, and it is taken in forward, a
    chunk of tokens at a time. Backward needs neither logits nor head.
    """

    @staticmethod
    def forward(ctx, hidden, labels, head):
        group, weight = head.group, head.weight.to_local()
        bias = None if head.bias is None else head.bias.to_local()
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        gather = functools.partial(all_gather, group=group) if ranks > 1 else lambda t: t[None]
        first = shard_range(head.out_features, rank, ranks).start
        targets = gather(labels)  # [ranks, n]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.grad = torch.empty_like(hidden)
        step = max(1, CHUNK_BYTES // (4 * head.out_features))
        for chunk in (slice(i, i + step) for i in range(0, len(hidden), step)):
            logits = F.linear(gather(hidden[chunk]).flatten(0, 1), weight, bias)
            absent = targets[:, chunk].flatten() == IGNORE
            local = targets[:, chunk].flatten() - first
            mine = (local >= 0) & (local < len(weight)) & ~absent
            at_target = logits.gather(-1, local.where(mine, 0)[:, None])[:, 0].float()
            top, total = head.maximum(logits)
            top, total, at_target = gather(torch.stack([top, total, at_target * mine])).unbind(1)
            top_of_all = top.amax(0)
            log_sum = top_of_all + ((top - top_of_all).exp() * total).sum(0).log()
            losses = (log_sum - at_target.sum(0)).masked_fill(absent, 0)
            loss += losses.view(ranks, -1)[rank].sum()
            gradient = head.gradient(logits, log_sum, local.where(mine, -1), absent)
            grad = exact_product(gradient, weight)
            if ranks > 1:
                part = grad.new_empty(len(grad) // ranks, grad.shape[1])
                dist.reduce_scatter_tensor(part, grad, group=group)
                grad = part
            ctx.grad[chunk] = grad
        return loss

    @staticmethod
    def backward(ctx, grad_loss):
        return ctx.grad.mul_(grad_loss), None, None


def exact_product(a, b):
    """a @ b in fp32, whatever the dtype of the two: ranks' parts are added before rounding."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def token_losses(model, input_ids, positions, labels, *documents):
    """Sum of the losses of one micro-batch (see collate); becomes the model's forward."""
    # transformers hands down to the attention what it does not know itself
    documents = dict(zip(("position_ids", "cu_seq_lens", "lengths"), documents))
    hidden = model.get_decoder()(input_ids=input_ids, use_cache=False, **documents)
    return model.get_output_embeddings()(hidden.last_hidden_state.flatten(0, 1)[positions], labels)


# ------------------------------------------------------------------------------------------------
# Model: attention
# ------------------------------------------------------------------------------------------------


def causal_attention(
    kernel, module, query, key, value, attention_mask=None, *, cu_seq_lens=None, lengths=None,
    scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None, **_,
):  # fmt: skip
    """Causal attention, called as transformers does: query [rows, heads, tokens, size], key and
    value alike; returns [rows, tokens, heads, size]. With `lengths` there is one row, of documents
    that see nothing but themselves.

    Where documents begin and end is known on the host and on the GPU: neither asks the other.
    """
    assert attention_mask is None and softcap is None and s_aux is None, "attends without these"
    if kernel and not dropout:
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        window = (-1 if sliding_window is None else sliding_window - 1, 0)
        return kernel(q, k, v, scaling, window, cu_seq_lens, lengths and max(lengths)), None
    outs, parts = [], [(query, key, value)]
    if lengths:
        parts = zip(*(t.split(lengths, 2) for t in (query, key, value)))
    for q, k, v in parts:
        mask, n = None, q.shape[2]
        if sliding_window is not None and n > sliding_window:
            ones = torch.ones(n, n, dtype=torch.bool, device=q.device)
            mask = ones.tril().triu(1 - sliding_window)
        outs.append(F.scaled_dot_product_attention(
            q, k, v, mask, dropout, mask is None, scale=scaling, enable_gqa=True
        ))  # fmt: skip
    return (outs[0] if len(outs) == 1 else torch.cat(outs, 2)).transpose(1, 2), None


def attention_kernel(attention, config, device):
    """A function (q, k, v [rows, tokens, heads, size], scaling, window, cu_seq_lens, longest) that
    returns the same; with --packing for all of a row's documents at once. None: sdpa is."""
    if attention == "flash_attention_2":
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        def flash(q, k, v, scaling, window, bounds, longest):
            options = dict(softmax_scale=scaling, causal=True, window_size=window)
            if bounds is None:
                return flash_attn_func(q, k, v, **options)
            bounds, longest = (bounds, bounds), (longest, longest)
            return flash_attn_varlen_func(q[0], k[0], v[0], *bounds, *longest, **options)[None]

        return flash
    flash_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    if not config.packing or not flash_gpu or config.compute_dtype != "bfloat16":
        return None
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 takes fewer heads of keys as they are, later ones want to be told
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options = {"enable_gqa": True} if grouped else {}

    def torchs(q, k, v, scaling, window, bounds, longest):
        bounds, longest = (bounds, bounds), (longest, longest)
        return varlen_attn(
            q[0], k[0], v[0], *bounds, *longest, scale=scaling, window_size=window, **options
        )[None]

    return torchs


def has_windows(kernel, device):
    """Whether it computes sliding windows. A flash-attn can be built without, and then gives
    anything, without an error."""
    q, k, v = torch.randn(3, 1, 2, 64, 64, dtype=torch.bfloat16, device=device)
    bounds = torch.tensor([0, 64], dtype=torch.int32, device=device)
    got, want = (
        causal_attention(way, None, q, k, v, cu_seq_lens=bounds, lengths=(64,), sliding_window=8)[0]
        for way in (kernel, None)
    )
    return bool((got - want).norm() < 0.05 * want.norm())


def attend_causally(model, attention, config, device):
    """Make causal_attention the model's, where that is all it does.

    Under a name of its own transformers makes no mask for it. Otherwise it would find out from
    position_ids whether there are several documents, for which the host waits for the GPU in each
    forward, and with Flash Attention 2 and one row in each layer.
    """
    able = model._supports_attention_backend
    if not able or getattr(model.config, "attn_logit_softcapping", None):
        if config.packing:
            raise ValueError(f"--packing: the attention of {type(model).__name__} cannot be told"
                             " where documents begin; leave it out")
        return
    window = getattr(model.config, "sliding_window", None)
    if not config.packing and attention == "sdpa" and window and window < config.max_seq_len:
        return  # it makes one mask for all layers
    kernel = attention_kernel(attention, config, device)
    if kernel and window and window < config.max_seq_len and not has_windows(kernel, device):
        raise ValueError(f"--attn {attention}: as installed it computes no sliding windows, and the"
                         f" model has one of {window} tokens; use --attn sdpa, a"
                         f" --max_seq_len of up to {window}, or build flash-attn with them")
    transformers.AttentionInterface.register("causal", functools.partial(causal_attention, kernel))
    model.set_attn_implementation("causal")
    assert model.config._attn_implementation == "causal", "transformers kept its own attention"


def choose_attention(config, model_config, device):
    """The attention to use and why, as 'name: reason'. Rank 0 only."""
    from transformers.utils import is_flash_attn_2_available

    flash = device.type == "cuda" and is_flash_attn_2_available()
    get_it = "`make flash-attn` builds Flash Attention 2"
    if config.attn == "flash_attention_2" and not flash:
        raise ValueError("--attn flash_attention_2: flash-attn is not installed or there is no GPU;"
                         f" {get_it}, or use --attn sdpa")
    if config.attn in ("sdpa", "flash_attention_2"):
        return f"{config.attn}: as asked"
    if not flash or config.compute_dtype != "bfloat16":
        why = "no GPU" if device.type == "cpu" else f"flash-attn is not installed ({get_it})"
        return f"sdpa: {why if config.compute_dtype == 'bfloat16' else 'computing in float32'}"
    if config.attn is None or config.packing:  # the time of packs depends on what is in them
        return "flash_attention_2: installed"
    times = time_attention(config, model_config, device)
    best = min(times, key=times.get)
    return f"{best}: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())


def time_attention(config, model_config, device):
    """Milliseconds of forward + backward of one layer's attention, at the run's own shape."""
    from flash_attn import flash_attn_func

    heads = model_config.num_attention_heads
    kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
    size = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    shape = (config.micro_batch_size, config.max_seq_len)
    q, k, v = (
        torch.randn(*shape, n, size, dtype=torch.bfloat16, device=device, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    )

    def sdpa():
        args = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)

    def flash():
        return flash_attn_func(q, k, v, causal=True)

    times = {}
    for name, run in ("sdpa", sdpa), ("flash_attention_2", flash):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(8):
            if i == 3:
                start.record()
            run().sum().backward()
        end.record()
        torch.cuda.synchronize()
        times[name] = start.elapsed_time(end) / 5
    return times


# ------------------------------------------------------------------------------------------------
# Model: its files
# ------------------------------------------------------------------------------------------------


def model_directory(name, random_weights):
    """The local directory of a model; downloads it first if `name` is a Hub id."""
    path = Path(name)
    if random_weights and name in SHAPES:
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"--model {name}: the directory has no config.json")
        return path
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ValueError(f"--model {name}: neither a directory nor a Hub id (owner/name)")
    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    twice = ["consolidated*", "*/*.safetensors"]  # the same weights in another form
    try:  # every rank calls it; the Hub client's file locks let one of a node download
        files = patterns if random_weights else [*patterns, "*.safetensors"]
        return Path(huggingface_hub.snapshot_download(
            name, allow_patterns=files, ignore_patterns=twice
        ))  # fmt: skip
    except Exception as e:
        raise ValueError(f"--model {name}: not a directory, and the Hub says: {e}")


def read_model_config(directory, config):
    """The model's own configuration, checked against what this script can do with it."""
    try:
        if config.random_weights and config.model in SHAPES:
            model_config = AutoConfig.for_model(**SHAPES[config.model])
        else:
            model_config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"--model {config.model}: {e}")
    if not hasattr(model_config, "vocab_size"):
        kind = type(model_config).__name__
        raise ValueError(f"--model {config.model}: {kind} is no plain language model")
    check_quantization(getattr(model_config, "quantization_config", None), config.model)
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(model_config, name, None) not in (None, 1.0):
            raise ValueError(f"--model {config.model}: its logits are changed by {name} after the"
                             " head, which the loss here would leave out")
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest and config.max_seq_len > longest and config.dataset:
        raise ValueError(f"--max_seq_len {config.max_seq_len}: the model was made for {longest}")
    return model_config


def check_quantization(settings, name):
    """A model that is quantised already must be so as this script does it."""
    want = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True}  # fmt: skip
    for key, value in want.items() if settings else ():
        if settings.get(key) != value:
            raise ValueError(f"--model {name}: is quantised already, with {key}"
                             f" {settings.get(key)}; only {value} can be read, so name the original"
                             " model")


def weight_files(directory):
    """Which file of the directory holds each tensor: {name: path}."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{index}: no index of safetensors files: {e!r}")
        if not names:
            raise ValueError(f"{index}: weight_map is empty")
        for file in set(names.values()):
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{index}: names {file!r}, a path outside the directory")
            if not (directory / file).is_file():
                raise ValueError(f"{directory / file}: missing, but named in {index.name}")
        return {name: directory / file for name, file in names.items()}
    file = directory / "model.safetensors"
    if not file.is_file():
        raise ValueError(f"{directory}: has neither {index.name} nor {file.name}; only safetensors"
                         " are read")
    try:
        with safe_open(file, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), file)
    except SafetensorError as e:
        raise ValueError(f"{file}: not a whole safetensors file: {e}")


def load_tokenizer(directory):
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as e:
        raise ValueError(f"{directory}: its tokenizer cannot be loaded: {e!r}")


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES = {**FLOATS, "U8": torch.uint8}
NF4_STATE = "quant_state.bitsandbytes__nf4"  # bitsandbytes' name, behind that of the weight


def check_weights(files, shapes):
    """Every tensor of `shapes` {name: shape} must be in `files`, with that shape. Rank 0 only."""
    missing = [name for name in shapes if name not in files]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} of {len(shapes)} tensors that its"
                         f" config.json asks for, the first is {missing[0]}")
    layers = {name.split(".layers.")[0] for name in shapes if ".layers." in name}
    extra = [n for n in files if n not in shapes and n.split(".layers.")[0] in layers
             and ".layers." in n and not n.endswith("inv_freq")]
    if extra:
        raise ValueError(f"the checkpoint has {len(extra)} tensors that its config.json knows"
                         f" nothing of, the first is {extra[0]}")
    for file in sorted(set(files.values())):
        try:
            with safe_open(file, "pt") as tensors:
                absent = {n for n in shapes if files[n] == file}.difference(tensors.keys())
                if absent:
                    raise ValueError(f"{file}: lacks {min(absent)}, which the index puts there")
                for name in (n for n in tensors.keys() if n in shapes):
                    stored = tensors.get_slice(name)
                    shape = tuple(stored.get_shape())
                    if shapes[name] is not None and shape != tuple(shapes[name]):
                        raise ValueError(f"{file.name}: {name} has shape {list(shape)}, but"
                                         f" config.json asks for {list(shapes[name])}")
                    in_4bit = shapes[name] is None or name.endswith(".absmax")
                    if stored.get_dtype() not in (DTYPES if in_4bit else FLOATS):
                        raise ValueError(f"{file.name}: {name} is {stored.get_dtype()}, which is"
                                         f" not read; {', '.join(FLOATS)} are")
        except SafetensorError as e:
            raise ValueError(f"{file}: not a whole safetensors file: {e}")


def stored_shapes(files, shapes, layers):
    """`shapes` as a checkpoint has them whose `layers` bitsandbytes has quantised: {name: shape},
    None where the shape does not matter."""
    plain = [name for name in layers if f"{name}.{NF4_STATE}" not in files]
    if plain:
        raise ValueError(f"config.json says that the model is in 4-bit NF4, but {len(plain)} of its"
                         f" blocks' {len(layers)} linear layers are not, the first is {plain[0]}:"
                         " name the original model")
    other = [n for n in files if n.endswith(".absmax") and n.removesuffix(".absmax") not in layers
             and not n.endswith("nested_absmax")]
    if other:
        raise ValueError(f"{other[0]}: only linear layers of decoder blocks can be in 4-bit: name"
                         " the original model")
    shapes = dict(shapes)
    for name in layers:
        n_blocks = math.ceil(math.prod(shapes[name]) / BLOCK)
        shapes.update({
            name: None,  # packed, in integers or floats of any size
            f"{name}.absmax": (n_blocks,),
            f"{name}.nested_absmax": (math.ceil(n_blocks / NESTED_BLOCK),),
            f"{name}.nested_quant_map": (256,),
            f"{name}.quant_map": (16,),
            f"{name}.{NF4_STATE}": None,
        })  # fmt: skip
    return shapes


def stored_states(files, shapes, layers):
    """What bitsandbytes has stored of each layer's quantisation, {weight name: its JSON object},
    checked to be what NF4Linear computes with."""
    states, places = {}, tensor_places(files)
    tables = {"quant_map": bnb.functional.get_4bit_type("nf4", device="cpu"),
              "nested_quant_map": dynamic_map(torch.device("cpu"))}  # fmt: skip
    for file in sorted(set(files.values())):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():
                name, _, part = key.partition(".weight.")
                if part == NF4_STATE:
                    try:
                        state = json.loads(bytes(tensors.get_tensor(key).tolist()))
                    except ValueError as e:
                        raise ValueError(f"{file}: {key} is not JSON: {e}")
                    states[f"{name}.weight"] = state
                # what it stores may be of another version, and then differ in the last bits
                elif part in tables and not torch.allclose(tensors.get_tensor(key), tables[part]):
                    raise ValueError(f"{file}: {key} is not the code of bitsandbytes' NF4")
    for name in layers:
        want = {"quant_type": "nf4", "blocksize": BLOCK, "shape": list(shapes[name]),
                "nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}  # fmt: skip
        for key, value in want.items():
            if states[name].get(key) != value:
                raise ValueError(f"{files[name]}: {name} was quantised with {key}"
                                 f" {states[name].get(key)}, only {value} can be read")
        _, _, start, stop = places[name]
        if stop - start != math.prod(shapes[name]) // 2:
            raise ValueError(f"{files[name]}: {name} has {stop - start} bytes, but"
                             f" {list(shapes[name])} weights of 4 bits are asked for")
        for part, dtype in ("absmax", torch.uint8), ("nested_absmax", torch.float32):
            if places[f"{name}.{part}"][1] != dtype:
                raise ValueError(f"{files[name]}: {name}.{part} is not {dtype}: without double"
                                 " quantisation?")
    return states


def check_files(files, shapes, model, model_config):
    """What is wrong with a checkpoint's tensors, before they are read; returns stored_states of one
    that is quantised already, else None. All ranks must call this."""
    if not getattr(model_config, "quantization_config", None):
        on_rank_0(check_weights, files, shapes)
        return None
    layers = [f"{n}.weight" for n, m in model.named_modules() if isinstance(m, NF4Linear)]
    on_rank_0(check_weights, files, together(stored_shapes, files, shapes, layers))
    return together(stored_states, files, shapes, layers)


def say_stored(states, compute_dtype):
    """Of a model that is quantised already."""
    dtypes = sorted({state["dtype"] for state in states.values()})
    say(f"model: quantised already, loaded as it is: {len(states)} layers in NF4")
    if dtypes != [compute_dtype]:
        say(f"they were quantised from {', '.join(dtypes)}, to which bitsandbytes dequantises them;"
            f" here they are dequantised to {compute_dtype}, so that some weights differ by its"
            " rounding")


# ------------------------------------------------------------------------------------------------
# Model: built on meta, fused
# ------------------------------------------------------------------------------------------------


def decoder_blocks(model):
    """The decoder blocks: the longest ModuleList below the decoder."""
    lists = [m for m in model.get_decoder().modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len)


def build_model(model_config, attention, dtype, shards):
    """The model on the meta device, its blocks' linear layers to be NF4.

    Returns it and the shapes {name: shape} of the tensors that a checkpoint must have.
    """
    model_config = copy.copy(model_config)
    vars(model_config).pop("quantization_config", None)  # what is in 4-bit is decided here
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, attn_implementation=attention, dtype=dtype, trust_remote_code=False
        )
    shapes = {name: p.shape for name, p in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if others := sorted(model.state_dict().keys() - tied):
        raise ValueError(f"{type(model).__name__}: its checkpoints hold more than parameters, the"
                         f" first is {others[0]}, which is not read here")
    if not shard_range(model_config.vocab_size, shards - 1, shards):
        raise ValueError(f"a vocabulary of {model_config.vocab_size} cannot be shared by {shards}"
                         " processes: use fewer, or a smaller --shard_group_size")
    blocks = decoder_blocks(model)
    linears = [m for m in blocks.modules() if isinstance(m, nn.Linear)]
    in_linears = sum(m.weight.numel() for m in linears)
    in_blocks = sum(p.numel() for p in blocks.parameters())
    if in_linears < 0.95 * in_blocks:
        raise ValueError(f"{type(model).__name__}: {1 - in_linears / in_blocks:.0%} of its blocks'"
                         " weights are not in linear layers (a mixture of experts?) and could"
                         " not be quantised")
    for block in blocks:
        layers, n_blocks = [], 0
        for name, linear in [(n, m) for n, m in block.named_modules() if isinstance(m, nn.Linear)]:
            if linear.weight.numel() % 4:
                raise ValueError(f"{name}: {list(linear.weight.shape)} weights do not fill"
                                 " whole 16-bit words of 4-bit codes")
            layers.append(NF4Linear(linear, n_blocks))
            n_blocks += layers[-1].n_blocks
            block.set_submodule(name, layers[-1])
        padded = math.ceil(n_blocks / shards) * shards  # so that FSDP2 shards it evenly
        weight = nn.Parameter(NF4Blocks.zeros(padded, "meta"), requires_grad=False)
        for layer in layers:
            layer.weight = weight
    make_vocabulary(model)
    model.requires_grad_(False)
    model.forward = types.MethodType(token_losses, model)
    model.train()
    return model, shapes


def make_vocabulary(model):
    """Make embedding and head those above; their parameters stay, the same one where tied."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for module, plain, sharded in (embedding, nn.Embedding, Embedding), (head, nn.Linear, LMHead):
        if type(module) is not plain:
            raise ValueError(f"{type(model).__name__}: its {type(module).__name__} is no plain"
                             f" {plain.__name__}, which this script takes it for")
        module.__class__ = sharded
    head.maximum, head.gradient = logits_maximum, logits_gradient


# what a class must do for its forward to be replaced, as its source says it
RMS_NORM = "return self.weight * hidden_states.to(input_dtype)"
SWIGLU_MLP = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
SWIGLU_MLPS = f"return {SWIGLU_MLP}", f"down_proj = {SWIGLU_MLP}\nreturn down_proj"


@functools.lru_cache(None)
def forward_body(cls):
    """The statements of a module class's forward as ast.unparse writes them."""
    source = textwrap.dedent(inspect.getsource(cls.forward))
    return "\n".join(map(ast.unparse, ast.parse(source).body[0].body))


def is_swiglu_mlp(cls):
    """Whether its forward is mlp_forward, but for the activation, and nothing besides."""
    return forward_body(cls) in SWIGLU_MLPS


@torch.compile
def rms_norm(x, weight, epsilon):
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    return weight * x32.to(x.dtype)


@torch.compile
def swiglu(gate, up):
    return F.silu(gate) * up


def try_fused(device):
    """Why Triton's kernels cannot be used on this machine, or nothing. They are compiled at their
    first use, which takes a C compiler and Python's headers, and must give what others give."""
    if device.type != "cuda" or triton is None:
        return "there is no GPU" if device.type != "cuda" else "there is no Triton"
    weight = torch.randn(256, 256, dtype=torch.bfloat16, device=device)
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    try:
        fused = dequantize_fused(packed.view(-1, BLOCK // 2), state.absmax, state)
    except Exception as e:
        return f"Triton cannot compile here, {type(e).__name__}: {str(e)[:200]}"
    same = torch.equal(fused, bnb.functional.dequantize_4bit(packed, state))
    return "" if same else "its result is not what bitsandbytes gives on this GPU"


def choose_fused(config, why_not):
    """--fused as it will be used; `why_not` is empty where it can be."""
    if config.fused and why_not:
        raise ValueError(f"--fused: {why_not}; leave it out")
    if config.fused is None and why_not and "no GPU" not in why_not:
        say(f"slower than need be, without fused kernels: {why_not}")
    return dataclasses.replace(config, fused=not why_not if config.fused is None else config.fused)


def fuse_model(model):
    """Swap in the Triton dequantisation, and compile what is elementwise in the decoder blocks:
    norms, rotary embedding and gated activation, each a function of tensors alone.

    Not whole blocks: compiled inside the checkpoint, a block's last product is recomputed after
    all, and with the checkpoint inside, torch stops recomputing without a word. Not modules:
    FSDP2 changes their parameters beneath dynamo's guards.
    """
    for module in decoder_blocks(model).modules():
        if isinstance(module, NF4Linear):
            module.fused = True
            continue
        if RMS_NORM in forward_body(type(module)):
            module.forward = functools.partial(norm_forward, module)
        elif is_swiglu_mlp(type(module)) and model.config.hidden_act == "silu":
            module.forward = functools.partial(mlp_forward, module)
    head = model.get_output_embeddings()
    head.maximum, head.gradient = torch.compile(logits_maximum), torch.compile(logits_gradient)
    modeling = sys.modules[type(model).__module__]
    rotary = getattr(modeling, "apply_rotary_pos_emb", None)
    if rotary and not isinstance(rotary, functools.partial):  # once in a process
        modeling.apply_rotary_pos_emb = functools.partial(rotate, torch.compile(rotary))


def rotate(rotary, q, k, cos, sin):
    """Rotary embedding of query and key [rows, heads, tokens, size], computed on [rows, tokens,
    heads, size], which is how they and their gradients lie in memory: nothing is copied."""
    q, k = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    return q.transpose(1, 2), k.transpose(1, 2)


def norm_forward(norm, x):
    return rms_norm(x, norm.weight, norm.variance_epsilon)


def mlp_forward(mlp, x):
    return mlp.down_proj(swiglu(mlp.gate_proj(x), mlp.up_proj(x)))


# ------------------------------------------------------------------------------------------------
# Model: load and quantise
# ------------------------------------------------------------------------------------------------


def tensor_places(files):
    """Where each tensor's bytes are: {name: (file, dtype, start, stop)}."""
    places = {}
    for path in sorted(set(files.values())):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            start, stop = (8 + size + offset for offset in tensor["data_offsets"])
            places[name] = path, DTYPES.get(tensor["dtype"]), start, stop
    return places


def read_chunk(path, start, target, staging):
    """Read bytes from `start` of a file into `target`, a slice of a uint8 tensor."""
    buffer = getattr(staging, "buffer", target)[: target.numel()]
    view, done = memoryview(buffer.numpy()), 0
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            while n := file.readinto(view[done:]):
                done += n
    except OSError as e:
        raise OSError(f"{path}: cannot be read at byte {start + done}: {e.strerror}")
    if done < len(view):
        raise OSError(f"{path}: ends before byte {start + len(view)}: cut off since the start?")
    if target.is_cuda:
        # in the stream that `target` is used in, and done when it returns: the buffer is free again
        target.copy_(buffer)


def file_reader(files, device):
    """A function of requests [(name, shape, rows)] that yields those rows of the tensors, flat.

    Threads read at most READ_AHEAD bytes ahead, with plain reads: a mapping is read one page fault
    at a time, and its pages count as this process's memory. If a read fails, nothing more is read:
    the tensors are then garbage, so that no rank waits in a collective for this one, and the error
    is raised after the last.
    """
    places, staging = tensor_places(files), threading.local()

    def prepare_thread():
        if device.type == "cuda":
            torch.cuda.set_device(device)
            staging.buffer = torch.empty(READ_CHUNK, dtype=torch.uint8, pin_memory=True)

    def locate(name, shape, rows):
        path, dtype, start, stop = places[name]
        row = (stop - start) // shape[0]  # bytes
        return path, dtype, start + rows.start * row, len(rows) * row

    def begin(pool, path, dtype, start, size):
        target = torch.empty(size, dtype=torch.uint8, device=device)
        slices = ((start + at, target[at : at + READ_CHUNK]) for at in range(0, size, READ_CHUNK))
        chunks = [pool.submit(read_chunk, path, at, part, staging) for at, part in slices]
        return target.view(dtype), chunks

    def read(requests):
        todo = collections.deque(locate(*request) for request in requests)
        ahead, in_flight, error = collections.deque(), 0, None
        with ThreadPoolExecutor(READERS, initializer=prepare_thread) as pool:
            while todo or ahead:
                while todo and (not ahead or in_flight + todo[0][3] <= READ_AHEAD) and not error:
                    in_flight += todo[0][3]
                    ahead.append(begin(pool, *todo.popleft()))
                if ahead:
                    target, chunks = ahead.popleft()
                    error = next((e for c in chunks if (e := c.exception())), error)
                    in_flight -= target.nbytes
                else:
                    _, dtype, _, size = todo.popleft()
                    target = torch.zeros(size, dtype=torch.uint8, device=device).view(dtype)
                yield target
                del target  # or it would be kept while the next is waited for
        if error:
            raise error

    return read


def random_reader(seed, dtype, device):
    """The same with random values, which depend on the name and not on who reads. Not ahead: the
    GPU makes them at once, and whole."""

    def read(name, shape, rows):
        if len(shape) == 1:
            value = float(name.endswith("weight"))  # norms start at 1, biases at 0
            return torch.full((len(rows),), value, dtype=dtype, device=device)
        generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
        whole = torch.empty(shape, dtype=dtype, device=device)
        return whole.normal_(0, RANDOM_STD, generator=generator)[rows.start : rows.stop].clone()

    return lambda requests: (read(*request) for request in requests)


def shard_range(n, shard, shards):
    """The rows of `n` that FSDP2 gives to a shard: as torch.chunk does."""
    size = math.ceil(n / shards)
    return range(min(shard * size, n), min((shard + 1) * size, n))


def shard_blocks(layer, shard):
    """Which blocks a shard has of an NF4Linear, of its own n_blocks, and where they are in the
    shard: two slices."""
    local = len(local_part(layer.weight))
    start, stop = (min(max(at - layer.first_block, 0), layer.n_blocks)
                   for at in (shard * local, (shard + 1) * local))  # fmt: skip
    place = start + layer.first_block - shard * local
    return slice(start, stop), slice(place, place + stop - start)


def layer_requests(name, layer, shard, stored):
    """What a rank reads of one NF4Linear, for `file_reader`: whole rows of the weight; or, where it
    is quantised already, packed codes, absmax codes and the nested state."""
    shape, (blocks, _) = (layer.out_features, layer.in_features), shard_blocks(layer, shard)
    if not stored:
        first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, math.prod(shape))
        rows = range(first // shape[1], math.ceil(last / shape[1]))
        return [(name, shape, rows if first < last else range(0))]
    n_bytes, n_nested = math.prod(shape) // 2, math.ceil(layer.n_blocks / NESTED_BLOCK)
    rows = range(blocks.start * BLOCK // 2, min(blocks.stop * BLOCK // 2, n_bytes))
    return [
        (name, (n_bytes,), rows),
        (f"{name}.absmax", (layer.n_blocks,), range(blocks.start, blocks.stop)),
        (f"{name}.nested_absmax", (n_nested,), range(n_nested)),
        (f"{name}.nested_quant_map", (256,), range(256)),
    ]


def quantize_shard(values, layers, group, local):
    """Fill `local`, this rank's NF4Blocks of a decoder block's layers, which are zeros; returns the
    nested state of each. All ranks of `group` must call this.

    Blocks are quantised independently, so that a rank's own blocks have the bytes they would
    have in the whole tensor. The second level takes the mean over all of a layer's: their fp32
    absmax, 4 bytes for 64 weights, is gathered and every rank does that part alike.
    """
    shard, device = dist.get_rank(group), local.device
    absmax = torch.zeros(len(local), dtype=torch.float32, device=device)
    for layer, weights in zip(layers, values):
        blocks, place = shard_blocks(layer, shard)
        if blocks.start == blocks.stop:
            continue
        first = blocks.start * BLOCK
        last = min(blocks.stop * BLOCK, layer.out_features * layer.in_features)
        skip = first % layer.in_features  # what whole rows have in front of the first block
        weights = weights.to(device, layer.dtype).view(-1)[skip : skip + last - first].contiguous()
        codes, state = bnb.functional.quantize_4bit(weights, blocksize=BLOCK, quant_type="nf4")
        local.packed[place].view(-1)[: codes.numel()] = codes.view(-1)
        absmax[place] = state.absmax
    all_absmax, states = all_gather(absmax, group).view(-1), []
    for layer in layers:
        # a tensor of its own: how a sum is split, and rounded, depends on where a tensor begins
        whole = all_absmax[layer.first_block : layer.first_block + layer.n_blocks].clone()
        offset = whole.mean()
        codes, nested = bnb.functional.quantize_blockwise(
            whole - offset, code=dynamic_map(device), blocksize=NESTED_BLOCK
        )
        blocks, place = shard_blocks(layer, shard)
        local.absmax_codes[place] = codes[blocks]
        states.append((nested.absmax, offset, None))
    return states


def stored_shard(values, layers, stored, shard, local):
    """The same of layers that bitsandbytes has quantised and stored: their bytes as they are."""
    states = []
    for layer, state in zip(layers, stored, strict=True):
        _, place = shard_blocks(layer, shard)
        codes, scales, nested_absmax, nested_code = (next(values) for _ in range(4))
        local.packed[place].view(-1)[: codes.nbytes] = codes.view(torch.uint8)
        local.absmax_codes[place] = scales
        offset = torch.tensor(state["nested_offset"], dtype=torch.float32, device=local.device)
        states.append((nested_absmax, offset, nested_code))
    return states


def set_local(module, name, local):
    """Give a meta parameter its local values; returns the new parameter."""
    old = getattr(module, name)
    if isinstance(old, DTensor):
        # as FSDP2 does it; DTensor.from_local would move an offloaded shard to the GPU
        value = DTensor(local, old._spec, requires_grad=False)
    else:
        value = local.to(old.dtype)
    setattr(module, name, nn.Parameter(value, requires_grad=old.requires_grad))
    return getattr(module, name)


def load_weights(model, read, mesh, dtype, device, stored=None, offload=False):
    """Fill every frozen parameter: this rank's rows alone. All ranks must call this.

    `read` is file_reader's or random_reader's result, `stored` that of stored_states where the
    model is quantised already. Returns {layer: its mean absmax}, a fingerprint of the base model.
    """
    group = mesh.get_group("shard")
    shard, shards = dist.get_rank(group), dist.get_world_size(group)
    users, requests = {}, []  # a parameter may have several, and must stay one
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or p.requires_grad:
                continue
            full_name = f"{path}.{name}".replace(".base_layer", "")
            users.setdefault(p, []).append((full_name, module, name))
    homes = {}
    for p, ((full_name, *_), *_) in users.items():
        if isinstance(local_part(p), NF4Blocks):
            if not offload:  # all before what comes and goes: gaps between them would stay
                homes[p] = NF4Blocks.zeros(len(local_part(p)), device)
            for layer_name, layer, _ in users[p]:
                requests += layer_requests(layer_name, layer, shard, stored)
        else:
            requests.append((full_name, p.shape, shard_range(p.shape[0], shard, shards)))
    offsets, n_bytes, before, started = {}, 0, host_memory(), time.perf_counter()

    def count(value):
        nonlocal n_bytes
        n_bytes += value.nbytes
        return value

    values = map(count, read(requests))
    bar = tqdm(users.items(), "load and quantise", unit="tensor", disable=dist.get_rank() != 0)
    for p, places in bar:
        names, modules, (key, *_) = zip(*places)
        if isinstance(local_part(p), NF4Blocks):
            local = homes.pop(p, None)
            if local is None:
                local = NF4Blocks.zeros(len(local_part(p)), device)
            if stored:
                states = [stored[name] for name in names]
                states = stored_shard(values, modules, states, shard, local)
            else:
                states = quantize_shard(values, modules, group, local)
            if offload:
                inner = (pinned_copy(t) for t in (local.packed, local.absmax_codes))
                local = NF4Blocks(*inner, device)
            for layer, state in zip(modules, states):
                layer.set_nested_state(*state)
            offsets.update({name: offset for name, (_, offset, _) in zip(names, states)})
        else:
            local = next(values).view(-1, *p.shape[1:]).to(device, dtype)
            if getattr(modules[0], "on_host", False):
                local = pinned_copy(local)
        new = set_local(modules[0], key, local)
        for module in modules[1:]:
            setattr(module, key, new)
    together(next, values, None)  # a reader's error
    offsets = dict(zip(offsets, torch.stack(list(offsets.values())).tolist()))  # one wait for all
    say_loading(before, time.perf_counter() - started, n_bytes)
    for module in model.modules():  # rotary frequencies: computed from the config, never stored
        if any(b.is_meta for b in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
            model._init_weights(module)
    return offsets


# ------------------------------------------------------------------------------------------------
# LoRA
# ------------------------------------------------------------------------------------------------


class LoraDown(torch.autograd.Function):
    """The first half of the adapters of layers that have one input: x [n, in] times all their A.T
    in one product, times `scaling`: down [n, sum of ranks]. `weights`: all A, then all B.

    Also x as it is, whose graph leads here, where all is saved that LoraUp's backward needs: before
    the frozen products, so that the recomputation of a checkpoint can stop in front of them.
    """

    @staticmethod
    def forward(ctx, x, scaling, *weights):
        n = len(weights) // 2
        a = weights[0] if n == 1 else torch.cat(weights[:n])
        down = scaled_product(x, a.t(), scaling)
        ctx.save_for_backward(x, down, a, *weights[n:])
        ctx.mark_non_differentiable(down)
        ctx.set_materialize_grads(False)
        return x.view_as(x), down

    @staticmethod
    def backward(ctx, grad, _):
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class LoraUp(torch.autograd.Function):
    """The second half, and the frozen products accumulated onto it, which then cost no pass of
    their own: a tuple of [n, out], one for each of `layers`. `weights` are LoraDown's.

    x is LoraDown's, `plain` what it was before dropout, None without. Backward sums the gradients
    of x inside its products too: a pass over [n, in] less for each.
    """

    @staticmethod
    def forward(ctx, x, plain, down, saver, scaling, layers, *weights):
        ctx.saver, ctx.scaling, ctx.layers, ctx.dropped = saver, scaling, layers, plain is not None
        x = plain if ctx.dropped else x
        outs, b = [], weights[len(layers) :]
        ranks = [b_i.shape[1] for b_i in b]
        for layer, b_i, down_i in zip(layers, b, down.split_with_sizes(ranks, 1)):
            outs.append(F.linear(down_i, b_i, layer.bias))
            if not layer.skipped:  # else only the graph is wanted, see SlicedMLP
                outs[-1].addmm_(x, layer.forward_weight().t())
        return tuple(outs)

    @staticmethod
    def backward(ctx, *grads):
        x, down, a, *b = ctx.saver.saved_tensors  # a checkpoint lets them be asked for once
        ranks = [b_i.shape[1] for b_i in b]
        grad_down, grad_b, grad_x, grad_plain = torch.empty_like(down), [], None, None
        downs = down.split_with_sizes(ranks, 1), grad_down.split_with_sizes(ranks, 1)
        for layer, grad, b_i, down_i, grad_down_i in zip(ctx.layers, grads, b, *downs):
            torch.mm(grad, b_i, out=grad_down_i)
            grad_b.append(grad.t() @ down_i)
            if ctx.saver.needs_input_grad[0]:
                # no name for the weight: it must go before the next layer's is there
                grad_x = (grad @ layer.backward_weight() if grad_x is None
                          else grad_x.addmm_(grad, layer.backward_weight()))
            layer.kept_weight = None
        grad_a = scaled_product(grad_down.t(), x, ctx.scaling).split_with_sizes(ranks)
        if ctx.dropped:
            grad_x, grad_plain = scaled_product(grad_down, a, ctx.scaling), grad_x
        elif grad_x is not None:
            grad_x.addmm_(grad_down, a, alpha=ctx.scaling)
        return grad_x, grad_plain, None, None, None, None, *grad_a, *grad_b


def scaled_product(a, b, scaling):
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scaling)


class LoraNF4Linear(nn.Module, LoraLayer):
    """PEFT's LoRA layer with a forward for NF4Linear: the adapter first, then the frozen product
    accumulated onto its output (see LoraUp).

    A layer with `siblings` computes their outputs too and leaves them in `waiting`. A sibling takes
    its own if it is called next with the very same x. Any other call of a layer first drops all
    that waits: whoever was not called, nothing is kept from one block to the next.
    """

    waiting = {}  # of all layers: {sibling: (x, its output)}
    siblings = ()  # the second and third of find_siblings; a tuple is no submodule

    def __init__(self, base_layer, adapter_name, config, r, lora_alpha, **kwargs):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config)

    def forward(self, x):
        known_x, out = self.waiting.pop(self, (None, None))
        if known_x is x:
            return out
        self.waiting.clear()
        (name,) = self.active_adapters
        layers, scaling, rows = (self, *self.siblings), self.scaling[name], x.flatten(0, -2)
        weights = [layer.lora_A[name].weight for layer in layers]
        weights += [layer.lora_B[name].weight for layer in layers]
        dropped = self.lora_dropout[name](rows)
        same, down = LoraDown.apply(dropped, scaling, *weights)
        plain = None if dropped is rows else rows
        frozen = [layer.base_layer for layer in layers]
        outs = LoraUp.apply(same, plain, down, same.grad_fn, scaling, frozen, *weights)
        out, *others = [out.unflatten(0, x.shape[:-1]) for out in outs]
        self.waiting.update(zip(self.siblings, ((x, other) for other in others)))
        return out


def add_lora(model, config, base_name):
    """Inject PEFT's LoRA layers, still on the meta device; returns PEFT's LoraConfig. What is more
    than the formula of LoraNF4Linear, as DoRA, keeps PEFT's own layer and its forward."""
    linear = {name for name, m in model.named_modules() if isinstance(m, NF4Linear)}
    targets = config.target_modules
    for target in () if targets == ("all-linear",) else targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            names = sorted({name.rsplit(".", 1)[-1] for name in linear})
            raise ValueError(f"--target_modules {target}: no such linear layer in the decoder"
                             f" blocks; there are {', '.join(names)}, or all-linear")
    lora_config = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_name,
    )
    variants = [f.name for f in dataclasses.fields(lora_config)
                if f.metadata.get("is_lora_variant") and getattr(lora_config, f.name)]
    if variants:
        say(f"adapter: {', '.join(variants)} runs in PEFT's own forward, which is slower than the"
            " one for plain LoRA here and takes more memory")
    else:
        lora_config._register_custom_module({NF4Linear: LoraNF4Linear})
    inject_adapter_in_model(lora_config, model)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()  # master weights; PEFT gave them the base's dtype
    if not config.lora_dropout:  # with it each layer's adapter has an input of its own
        find_siblings(model)
    return lora_config


def find_siblings(model):
    """Let the layers that a block calls one after the other with the same tensor work together;
    rank and scaling of all are those of one LoraConfig."""
    for parent in model.modules():
        for names in ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"):
            layers = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in layers if isinstance(layer, LoraNF4Linear)]
            if layers:
                layers[0].siblings = tuple(layers[1:])


def init_lora(name, shape, seed):
    """PEFT's initial values of a LoRA weight, the same whatever the number of ranks: fp32, CPU.
    Those of DoRA's magnitudes come from the base, see init_magnitudes."""
    assert re.search(r"\.lora_(A|B|magnitude_vector)\.", name), f"{name}: begins at what?"
    weight = torch.zeros(shape)
    if ".lora_A." in name:
        generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
        nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
    return weight


def saved_lora(name, shape, directory):
    """The same from a checkpoint."""
    with safe_open(directory / "adapter_model.safetensors", "pt") as tensors:
        return tensors.get_tensor(peft_name(name))


def load_lora(model, read, mesh, device):
    """Give every LoRA weight its values: `read(name, shape)` returns the whole tensor.

    Returns the masters: one fp32 parameter [n] that holds this rank's part of the whole adapter,
    and {name: its view there}. One tensor instead of a thousand makes the optimizer one kernel
    and all of its state pageable; each view starts at a multiple of 256 so that the blocks of the
    8-bit state are those that each weight would have alone.
    """
    group = mesh.get_group("shard")
    shard, shards = dist.get_rank(group), dist.get_world_size(group)
    todo = [
        (f"{path}.{name}", module, name)
        for path, module in model.named_modules()
        for name, p in module._parameters.items()
        if p is not None and p.requires_grad
    ]
    parts = [local_part(getattr(m, name)) for _, m, name in todo]
    aligned = [math.ceil(p.numel() / STATE_BLOCK) * STATE_BLOCK for p in parts]
    flat = torch.zeros(sum(aligned), device=device)
    views, offset = {}, 0
    for (full_name, module, name), part, size in zip(todo, parts, aligned, strict=True):
        rows = shard_range(getattr(module, name).shape[0], shard, shards)
        view = flat[offset : offset + part.numel()].view(part.shape)
        view.copy_(read(full_name, getattr(module, name).shape)[rows.start : rows.stop])
        set_local(module, name, view)
        views[full_name] = view
        offset += size
    return nn.Parameter(flat), views


@torch.no_grad()
def init_magnitudes(model, mesh, views, params):
    """DoRA's magnitudes begin as the norms of the base weights' rows, so that the adapter begins as
    nothing; one block at a time is gathered for it. All ranks must call this.

    In fp32, as the forward computes the norms that it divides by: rounded to bf16, as PEFT 0.21
    leaves them, they would be up to 0.4 % off.
    """
    group = mesh.get_group("shard")
    layers = {m: name for name, m in model.named_modules() if isinstance(m, PeftLinear)}
    for block in decoder_blocks(model):
        if isinstance(block, FSDPModule):
            block.unshard()
        for layer in (m for m in block.modules() if m in layers):
            for key, magnitude in layer.lora_magnitude_vector.items():
                weight = layer.base_layer.dequantize().float()
                norms = magnitude.get_weight_norm(weight, 0.0, 1.0)  # PEFT's own formula, B = 0
                rows = shard_range(len(norms), dist.get_rank(group), dist.get_world_size(group))
                view = views[f"{layers[layer]}.lora_magnitude_vector.{key}.weight"]
                view.copy_(norms[rows.start : rows.stop])
        if isinstance(block, FSDPModule):
            block.reshard()
    publish_masters(views, params)


# ------------------------------------------------------------------------------------------------
# Memory plan
# ------------------------------------------------------------------------------------------------


def model_sizes(model, config, shards, longest):
    """What the plan needs to know of the model, still whole and on meta. Bytes, but for widths."""
    block, c = decoder_blocks(model)[0], model.config
    item = getattr(torch, config.compute_dtype).itemsize
    n = {"codes": 0, "scales": 0, "plain": 0, "adapter": 0, "gathered": 0}
    in_block, embedding = set(block.parameters()), model.get_input_embeddings().weight
    for p in model.parameters():
        if isinstance(p, NF4Blocks):
            sizes = {"codes": p.packed.nbytes, "scales": p.absmax_codes.nbytes}
        else:
            sizes = {"adapter" if p.requires_grad else "plain": p.numel() * item}
        for kind, size in sizes.items():
            n[kind] += size / shards
            whole = shards == 1 and not config.offload_params
            n["gathered"] += size if p in in_block and not whole else 0
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    kv_heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
    linears = [m for m in block.modules() if isinstance(m, NF4Linear)]
    inner = getattr(c, "intermediate_size", None) or 4 * c.hidden_size
    weights = {True: [], False: []}  # dequantised bytes of the MLP's layers, of attention's
    for m in linears:
        in_mlp = inner in (m.in_features, m.out_features)
        weights[in_mlp].append(m.in_features * m.out_features * item)
    return types.SimpleNamespace(
        **n,
        item=item,
        blocks=len(decoder_blocks(model)),
        longest=longest,
        hidden=c.hidden_size,
        query=c.num_attention_heads * head_dim,
        key_value=2 * kv_heads * head_dim,
        inner=inner,
        adapted=sum(config.lora_rank for m in block.modules() if isinstance(m, LoraLayer)),
        **peft_sizes(block, config, unkept=item * (2 * c.hidden_size + inner)),
        widest=max(weights[True] + weights[False]),
        mlp_weights=sum(weights[True]),
        attention_weights=sum(weights[False]),
        last_mlp_weight=(weights[True] or [0])[-1],
        last_attention_weight=(weights[False] or [0])[-1],
        has_halves=has_halves(block),
        sliced=any(is_swiglu_mlp(type(m)) for m in block.modules()),
        embedding=embedding.numel() * item / shards,
        on_host=0,
    )


def peft_sizes(block, config, unkept):
    """What PEFT's own forward of DoRA takes of a block besides, in bytes: until backward for each
    token, and for the weights; and for the largest layer's weight while it runs. In fp32, counted
    from PEFT 0.21's source. In the compute dtype it keeps no norm's output and no product of gate
    and up: `unkept` bytes a token less."""
    layers = [m for m in block.modules() if isinstance(m, PeftLinear)]
    weights = [m.in_features * m.out_features for m in layers if config.lora_dropout]
    # the input, each layer its own copy, and dropout's mask; the base's output, which is in the
    # compute dtype without dropout, and the adapter's; its inner values
    a, b = (5, 8) if config.lora_dropout else (4, 6)
    token = sum(a * m.in_features + b * m.out_features + 4 * config.lora_rank for m in layers)
    return {
        "peft_token": max(0, token - unkept),
        "peft_weights": 4 * sum(weights),  # with dropout they are multiplied, and kept, in fp32
        # the weight and B @ A, that scaled, their sum; the unit matrix that gives B @ A
        "peft_at_once": max((4 * m.in_features * (4 * m.out_features + m.in_features)
                             for m in layers), default=0),
    }  # fmt: skip


def memory_plan(config, sizes):
    """{component: bytes} of one GPU at the peak of a step: in backward, or in the head."""
    longest = min(sizes.longest, math.ceil(config.max_seq_len / ROUND_TO) * ROUND_TO)
    tokens = config.micro_batch_size * longest
    recomputed = recomputed_blocks(config, sizes.blocks)
    row = tokens * sizes.item  # bytes of one value a token
    block_input = row * sizes.hidden
    # what autograd saves of a block: norms' inputs and outputs, rotated query and key, value,
    # attention's output; gate, up and their product; the adapter's inner values
    attention = row * (3 * sizes.hidden + 2 * sizes.query + sizes.key_value + sizes.adapted)
    mlp = row * 3 * sizes.inner
    # its backward, as measured: of a half 4 times the inner width (down_proj's: gate, up, product,
    # gradient), of a block 3.5 where autograd frees as it goes, else 5
    in_halves = config.keep_residual and recomputed == sizes.blocks
    at_once = (4 if in_halves else 3.5) * row * sizes.inner
    if recomputed and tokens > SLICE_TOKENS and sizes.sliced:
        at_once = 5 * SLICE_TOKENS * sizes.item * sizes.inner
    live_mlp = row * (4 if in_halves else 2) * sizes.hidden + at_once + sizes.widest
    live_attention = attention + row * (3 * sizes.hidden + 2 * sizes.query + sizes.key_value)
    if not in_halves:
        live_mlp += attention
    reused = config.reuse_weights in ("recomputed", "all")
    if reused and recomputed == sizes.blocks:
        if tokens <= SLICE_TOKENS or not sizes.sliced:
            live_mlp += sizes.mlp_weights - sizes.widest  # down_proj's is in use at that time
        live_mlp += 0 if in_halves else sizes.attention_weights
        live_attention += sizes.attention_weights
    live = max(live_mlp, live_attention)
    kept_block = block_input + attention + mlp
    if config.reuse_weights == "all":
        kept_block += sizes.mlp_weights + sizes.attention_weights
    kept = (sizes.blocks - recomputed) * kept_block
    if recomputed < sizes.blocks:  # the last block, whose backward comes first, is among them
        live -= attention + mlp
    n_inputs = kept_inputs(config, sizes.blocks)
    inputs = min(n_inputs, 3 if config.offload_activations else n_inputs) * block_input
    gathered = 2 if config.reshard_after_forward else sizes.blocks + 1  # and the next one
    head = 4 * block_input + 3 * CHUNK_BYTES
    by_peft = tokens * sizes.peft_token + sizes.peft_weights
    by_peft = by_peft * max(1, sizes.blocks - recomputed) + sizes.peft_at_once
    return {
        "4-bit weights": 0 if config.offload_params else sizes.codes,
        "their scales": 0 if config.offload_params else sizes.scales,
        "embedding, head, norms": sizes.plain - sizes.on_host,
        "adapter and gradients": sizes.adapter * 8 / sizes.item,
        "block inputs": inputs,
        "kept blocks": kept,
        "live block or head": max(live, head),
        "PEFT's forward": by_peft,
        "gathered weights": gathered * sizes.gathered,
    }


def host_bytes(config, sizes):
    """Pinned host memory of one process."""
    longest = min(sizes.longest, math.ceil(config.max_seq_len / ROUND_TO) * ROUND_TO)
    tokens = config.micro_batch_size * longest
    kept = max(0, kept_inputs(config, sizes.blocks) - 1)  # the last one stays on the GPU
    inputs = kept * tokens * sizes.item * sizes.hidden if config.offload_activations else 0
    params = sizes.codes + sizes.scales if config.offload_params else 0
    return sizes.on_host + params + inputs


def planned(config, sizes):
    return sum(memory_plan(config, sizes).values())


def fits(config, sizes, limit, free=GAPS):
    return limit is None or planned(config, sizes) <= (1 - free) * limit


def choose_recompute(config, sizes, limit):
    """Resolve --recompute auto, the fewest blocks whose plan fits, and then what recomputed blocks
    may keep besides, if a tenth of the memory stays free."""
    if config.keep_residual and not sizes.has_halves:
        raise ValueError("--keep_residual: this model's blocks are not made of an attention and an"
                         " MLP with a residual sum each; leave it out")
    if config.recompute == "auto":
        for n in range(sizes.blocks + 1):
            config = dataclasses.replace(config, recompute=str(n))
            if fits(config, sizes, limit):
                break
    n = recomputed_blocks(config, sizes.blocks)  # raises where there are not so many
    choices = {  # the first that there is room for, else the last
        "keep_residual": [True] * (sizes.has_halves and n > 0) + [False],
        "reuse_weights": ["all"] * (n < sizes.blocks) + ["recomputed"] * (n > 0) + ["none"],
    }
    for name, values in choices.items():
        for value in values if getattr(config, name) is None else ():
            more = dataclasses.replace(config, **{name: value})
            enough = fits(more, sizes, limit, 0.1) or planned(more, sizes) < planned(config, sizes)
            pinned = host_bytes(more, sizes)
            for_speed = pinned - host_bytes(config, sizes)
            spare = for_speed <= HOST_SPARE and pinned <= host_share() / 2
            if enough and (spare or for_speed <= 0):
                break
        config = more if getattr(config, name) is None else config
    return config


def host_share():
    """Bytes of this machine's free memory for each of its processes."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return math.inf
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 2**10
    return available / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def make_room(model, config, sizes, limit):
    """Keep the embedding in host memory if that makes it fit: the same numbers, a copy of the
    tokens' rows for each micro-batch. A tied one is the head, too, and stays."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not config.fused or embedding.weight is head.weight:
        return
    too_much = planned(config, sizes) - (1 - GAPS) * limit
    if 0 < too_much <= sizes.embedding:
        embedding.on_host, sizes.on_host = True, sizes.embedding


def check_plan(config, sizes, limit):
    """Raise ValueError, with what would help, if the plan does not fit."""
    needed = planned(config, sizes)
    of_host, share = host_bytes(config, sizes), host_share()
    if of_host > share:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) / 2**30
        raise ValueError(f"this takes {of_host * processes:.1f} GiB of host memory on this machine,"
                         f" of which {share * processes:.1f} GiB are available: offload less")
    if fits(config, sizes, limit):
        return
    flags, smaller = [], config
    for change in (
        {"reshard_after_forward": True}, {"recompute": "all"}, {"offload_activations": True},
        {"offload_params": True}, {"micro_batch_size": 1}, {"max_seq_len": config.max_seq_len // 2},
    ):  # fmt: skip
        if all(getattr(smaller, name) != value for name, value in change.items()):
            smaller = dataclasses.replace(smaller, **change)
            ((name, value),) = change.items()
            flags.append(f"--{name}" + ("" if value is True else f" {value}"))
            if fits(smaller, sizes, limit):
                break
    left = planned(smaller, sizes)
    raise ValueError(
        f"this does not fit: predicted peak {needed / 2**30:.1f} GiB, and {GAPS:.0%} for gaps, of"
        f" {limit / 2**30:.1f} GiB; {' '.join(flags)}"
        f"{'' if fits(smaller, sizes, limit) else ' and more GPUs'} would bring it to"
        f" {left / 2**30:.1f} GiB"
    )


def say_plan(config, sizes, limit):
    plan = memory_plan(config, sizes)
    parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in plan.items() if size)
    host = host_bytes(config, sizes)
    say(f"memory plan of one GPU, GiB: {parts}")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used = total - free - torch.cuda.memory_reserved()
        say(f"beside the plan: CUDA's context, and what else runs on this GPU, hold"
            f" {used / 2**30:.2f} GiB; NCCL will take some more")
    say(f"predicted peak {sum(plan.values()) / 2**30:.2f} GiB"
        + (f" of {limit / 2**30:.2f} GiB" if limit else "")
        + (f", and {host / 2**30:.2f} GiB of pinned host memory" if host else "")
        + f"; {recomputed_blocks(config, sizes.blocks)} of {sizes.blocks} blocks are recomputed"
        + (" in halves" if config.keep_residual else "")
        + (", with weights that backward uses again" if config.reuse_weights != "none" else ""))


def gemm_ceiling(model, dtype, tokens, device):
    """TFLOP/s of nothing but the products of a block's linear layers, each as often as it is."""
    tokens, flops, seconds = min(tokens, 8192), 0, 0.0
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for m in decoder_blocks(model)[0].modules():
        if isinstance(m, NF4Linear):
            a = torch.randn(tokens, m.in_features, device=device, dtype=dtype)
            b = torch.randn(m.out_features, m.in_features, device=device, dtype=dtype)
            a @ b.t()
            wait()
            started, rounds = time.perf_counter(), 20 if device.type == "cuda" else 1
            for _ in range(rounds):
                a @ b.t()
            wait()
            seconds += (time.perf_counter() - started) / rounds
            flops += 2 * tokens * m.in_features * m.out_features
    return flops / seconds / 1e12


def say_speed(run, rows, sizes):
    """The answer of a dry run: how fast, how near to what the GPU can do, how much memory."""
    linears = [m for m in run.model.modules() if isinstance(m, (NF4Linear, LMHead))]
    weights = sum(m.in_features * m.out_features for m in linears)
    recomputed = sizes.mlp_weights + sizes.attention_weights - sizes.last_mlp_weight
    recomputed -= sizes.last_attention_weight if run.config.keep_residual else 0
    recomputed *= recomputed_blocks(run.config, sizes.blocks) / sizes.item
    rates = sorted(row["tokens_per_second_per_gpu"] for row in rows[2:] or rows[-1:])
    rate = rates[len(rates) // 2]
    # forward 2 and backward 2 operations a weight and token, recomputation 2 more
    tflops = rate * (4 * weights + 2 * recomputed) / 1e12
    say(f"measured: {rate:,.0f} tokens/s per GPU, {tflops:.1f} TFLOP/s,"
        f" {100 * tflops / run.ceiling:.1f} % of the GEMM ceiling of {run.ceiling:.1f},"
        f" peak {rows[-1]['peak_memory_gib']:.2f} GiB")


# ------------------------------------------------------------------------------------------------
# Sharding
# ------------------------------------------------------------------------------------------------


class SaveInput(torch.autograd.Function):
    """x as it is, kept for the SlicedMLP after it. With that one's `lora`, so that there is a graph
    to keep it where no adapter comes before the first MLP."""

    @staticmethod
    def forward(ctx, x, *lora):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


class SlicedMLP(torch.autograd.Function):
    """mlp(x) in slices of SLICE_TOKENS; backward recomputes a slice at a time.

    The widest tensors of a block then have the length of a slice, whatever that of the sequence:
    at 32,768 tokens of Llama-2-70B, by the plan, 1.2 GB instead of 6.6. The input is saved by
    SaveInput, before the slices, so that the recomputation of the block around it stops there and
    none of them runs twice.
    """

    @staticmethod
    def forward(ctx, x, saver, mlp, mlp_forward, *lora):
        ctx.saver, ctx.mlp, ctx.mlp_forward, ctx.lora = saver, mlp, mlp_forward, lora
        ctx.rng = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if x.is_cuda else [])]
        rows, out = x.flatten(0, -2), torch.empty_like(x)
        for start in range(0, len(rows), SLICE_TOKENS):
            part = slice(start, start + SLICE_TOKENS)
            out.view_as(rows)[part] = mlp_forward(rows[part])
        return out

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saver.saved_tensors  # recomputes the block up to here
        grad_x, rows, grad = torch.empty_like(x), x.flatten(0, -2), grad.flatten(0, -2)
        # in fp32, so that the sum over slices is rounded once
        grad_lora = [torch.zeros_like(p, dtype=torch.float32) for p in ctx.lora]
        down = getattr(ctx.mlp.down_proj, "base_layer", ctx.mlp.down_proj)
        unread = not isinstance(ctx.mlp.down_proj, PeftLinear)  # a magnitude's gradient reads it
        with torch.random.fork_rng([rows.device] if rows.is_cuda else []), torch.enable_grad():
            torch.set_rng_state(ctx.rng[0])  # dropout as in forward
            if rows.is_cuda:
                torch.cuda.set_rng_state(ctx.rng[1])
            for start in range(0, len(rows), SLICE_TOKENS):
                part = slice(start, start + SLICE_TOKENS)
                part_x = rows[part].detach().requires_grad_()
                down.skipped = unread  # its value is of no use here
                out = ctx.mlp_forward(part_x)
                down.skipped = False
                got, *grads = torch.autograd.grad(out, [part_x, *ctx.lora], grad[part])
                grad_x.flatten(0, -2)[part] = got
                torch._foreach_add_(grad_lora, [g.float() for g in grads])
        grad_lora = [g.to(p.dtype) for g, p in zip(grad_lora, ctx.lora)]
        return grad_x, None, None, None, *grad_lora


def sliced_mlp(mlp, mlp_forward, x):
    if x[..., 0].numel() <= SLICE_TOKENS or not torch.is_grad_enabled():
        return mlp_forward(x)
    lora = [p for p in mlp.parameters() if p.requires_grad]
    saved = SaveInput.apply(x, *lora)
    return SlicedMLP.apply(saved, saved.grad_fn, mlp, mlp_forward, *lora)


def host_hooks(n_kept, n_bytes, device):
    """Functions pack(i, tensor) and unpack(i) that keep the i-th of n_kept inputs, of blocks or of
    their halves, of at most n_bytes, in pinned host memory from its forward to its backward.

    Copies have a stream of their own and come back one ahead. A tensor is let go when the next
    is packed, by when its copy has long ended: at most three are on the GPU. The last one stays,
    its backward comes first.
    """
    cuda = device.type == "cuda"
    stream = torch.cuda.Stream() if cuda else None
    buffers, shapes, leaving, here = {}, {}, [], {}

    def copy(to, source):
        """Returns the event of its end."""
        if not cuda:
            to.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()

    def let_go():
        while leaving:
            _, event = leaving.pop()
            if cuda:  # from here on the memory may be used for something else
                torch.cuda.current_stream().wait_event(event)

    def view(i):
        shape, dtype = shapes[i]
        return buffers[i].view(dtype)[: shape.numel()].view(shape)

    def pack(i, tensor):
        let_go()
        if i == n_kept - 1:
            here[i] = tensor.detach(), None
            return i
        if i not in buffers:
            buffers[i] = pinned_empty(n_bytes, device)
        shapes[i] = tensor.shape, tensor.dtype
        leaving.append((tensor.detach(), copy(view(i), tensor.detach())))
        return i

    def fetch(i):
        tensor = torch.empty(shapes[i][0], dtype=shapes[i][1], device=device)
        here[i] = tensor, copy(tensor, view(i))

    def unpack(i):
        let_go()
        if i not in here:
            fetch(i)
        tensor, event = here.pop(i)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        if i > 0:
            fetch(i - 1)
        return tensor

    return pack, unpack


# a decoder block's forward as Llama and its like have it, as ast.unparse writes it
RESIDUAL_BLOCK = re.compile(
    r"""residual = hidden_states
hidden_states = self\.input_layernorm\(hidden_states\)
hidden_states, _ = self\.self_attn\(hidden_states=hidden_states, [^()]*\)
hidden_states = residual \+ hidden_states
residual = hidden_states
hidden_states = self\.post_attention_layernorm\(hidden_states\)
hidden_states = self\.mlp\(hidden_states\)
hidden_states = residual \+ hidden_states
return hidden_states"""
)


def has_halves(block):
    """Whether attention_half and mlp_half are what this decoder block computes."""
    return bool(RESIDUAL_BLOCK.fullmatch(forward_body(type(block))))


def attention_half(block, hidden_states, **kwargs):
    attended, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)
    return hidden_states + attended


def mlp_half(block, hidden_states):
    return hidden_states + block.mlp(block.post_attention_layernorm(hidden_states))


def both_halves(attention, mlp, hidden_states, **kwargs):
    return mlp(attention(hidden_states, **kwargs))


@contextlib.contextmanager
def weights_reused(layers):
    """What a recomputation dequantises of these NF4Linears stays until their backward."""
    for layer in layers:
        layer.reused = True
    try:
        yield
    finally:
        for layer in layers:
            layer.reused = False


def recompute_blocks(model, config, device, longest):
    """Let the chosen decoder blocks keep only their input and recompute the rest in backward; with
    keep_residual each of their halves its own. `longest` is the longest row of all.

    Around the block's own forward, inside FSDP2's hooks, so that they run once. Not transformers'
    switch: 5.17 puts its checkpoint outside those hooks, 5.23 inside.
    """
    blocks = decoder_blocks(model)
    n = recomputed_blocks(config, len(blocks))
    for layer in blocks[n:].modules():
        if isinstance(layer, NF4Linear):
            layer.reused = config.reuse_weights == "all"
    blocks = list(blocks)[:n]
    # attention's own dropout is no module
    dropouts = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    dropout = max([getattr(model.config, "attention_dropout", None) or 0, *dropouts])
    values = config.micro_batch_size * longest * model.config.hidden_size
    n_bytes = values * getattr(torch, config.compute_dtype).itemsize
    pack, unpack = host_hooks(kept_inputs(config, len(blocks)), n_bytes, device)

    def recomputed(forward, layers, i):
        """`forward` from its input, the i-th that is kept of all."""

        def contexts():  # of forward and of its recomputation
            return contextlib.nullcontext(), weights_reused(layers)

        forward = functools.partial(
            checkpoint, forward, use_reentrant=False, context_fn=contexts,
            preserve_rng_state=dropout > 0,
        )  # fmt: skip
        if not config.offload_activations:
            return forward
        return functools.partial(with_input_on_host, forward, i, pack, unpack)

    for i, block in enumerate(blocks):
        for module in block.modules():
            if is_swiglu_mlp(type(module)):
                module.forward = functools.partial(sliced_mlp, module, module.forward)
        layers = [m for m in block.modules() if isinstance(m, NF4Linear)]
        layers = layers if config.reuse_weights in ("recomputed", "all") else []
        if config.keep_residual:
            block.forward = functools.partial(
                both_halves,
                recomputed(functools.partial(attention_half, block), layers, 2 * i),
                recomputed(functools.partial(mlp_half, block), layers, 2 * i + 1),
            )
        else:
            block.forward = recomputed(block.forward, layers, i)


def with_input_on_host(forward, i, pack, unpack, hidden_states, **kwargs):
    def only_input(tensor):  # torch 2.11's checkpoint also saves an empty tensor
        return pack(i, tensor) if tensor.numel() else tensor

    def restore(kept):
        return kept if isinstance(kept, torch.Tensor) else unpack(kept)

    with torch.autograd.graph.saved_tensors_hooks(only_input, restore):
        return forward(hidden_states, **kwargs)


def recomputed_blocks(config, n_blocks):
    """How many of the decoder blocks --recompute means."""
    n = {"all": n_blocks, "none": 0}.get(config.recompute)
    n = int(config.recompute) if n is None else n
    if n > n_blocks:
        raise ValueError(f"--recompute {n}: the model has {n_blocks} blocks")
    return n


def kept_inputs(config, n_blocks):
    """How many tensors of a block input's size recomputed blocks keep."""
    return recomputed_blocks(config, n_blocks) * (2 if config.keep_residual else 1)


def shard_vocabulary(model, mesh):
    """Give each rank its rows of embedding and head, outside FSDP2, which would gather them whole:
    2.1 GB each for Llama-3-70B, and twice that while it copies. Returns these parameters."""
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    group, sharded = mesh.get_group("shard"), {}
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        module.group = group
        for name, p in module._parameters.items():
            if p is not None and p not in sharded:  # a tied weight stays one parameter
                rows = shard_range(len(p), dist.get_rank(group), dist.get_world_size(group))
                local = DTensor.from_local(
                    p[: len(rows)], mesh, placements, shape=p.shape, stride=p.stride()
                )
                sharded[p] = nn.Parameter(local, requires_grad=False)
            if p is not None:
                setattr(module, name, sharded[p])
    return set(sharded.values())


def make_mesh(shards, device):
    """Groups of `shards` consecutive ranks hold a copy of the model each (HSDP), or all ranks one.
    Within a group weights are gathered and gradients scattered, all the time; across groups only
    the adapter's gradients are summed."""
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    if len(ranks) == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    # not init_device_mesh: it splits the default group, which torch may refuse where that has a
    # backend each for CPU and GPU ("Unknown c10d backend type", pytorch issue 159200)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=TIMEOUT)[0]
        for rows in (ranks.t(), ranks)
    ]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def shard_model(model, mesh, compute_dtype, config):
    """FSDP2 units: a decoder block each, and the root with what is left, the last norm. Where one
    GPU holds a copy of the model there is nothing to gather, and FSDP2 would copy and cast each
    weight at each use all the same: a third of the 8B's kernels. There are none then."""
    # PEFT's own forward computes in the adapter's dtype: in bf16 DoRA's factors, magnitude by norm,
    # would round by up to 0.4 %, as much as they learn in many steps
    by_peft = any(isinstance(m, PeftLinear) for m in model.modules())
    policy = MixedPrecisionPolicy(
        param_dtype=None if by_peft else compute_dtype, reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )  # fmt: skip
    ignored, blocks = shard_vocabulary(model, mesh), decoder_blocks(model)
    if is_whole(mesh, config):
        for p in model.parameters():
            if p.requires_grad and not by_peft:  # the masters stay in fp32
                p.data = p.data.to(compute_dtype)
        return
    shard = functools.partial(fully_shard, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for block in blocks:
        shard(block, reshard_after_forward=config.reshard_after_forward)
    shard(model)
    for unit, following in zip([model, *blocks], blocks):
        # before its own work, not when the next one begins: there the host may be late
        unit.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # the loss is divided by the global number of tokens already, so gradients add up
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def is_whole(mesh, config):
    """Whether one GPU holds a copy of the model; offloaded weights are FSDP2's to bring."""
    return mesh["shard"].size() == 1 and not config.offload_params


def local_part(parameter):
    """What this rank has of a parameter; DTensor.to_local() takes 5 us, for autograd's sake."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()


def verify_model(model, compute_dtype):
    """Assert that loading, LoRA and sharding left what they should; print the bytes per rank.

    All ranks must call this.
    """
    n_bytes = {"4-bit": 0, "other frozen": 0, "adapter": 0, "of these on the host": 0}
    seen, whole = set(), not isinstance(model, FSDPModule)
    by_peft = any(isinstance(m, PeftLinear) for m in model.modules())
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            full_name = f"{path}.{name}"
            local = local_part(p)
            assert whole or isinstance(p, DTensor), f"{full_name} is not sharded"
            assert not local.is_meta, f"{full_name} was not loaded"
            assert p.requires_grad == (".lora_" in full_name), f"{full_name} {p.requires_grad=}"
            if isinstance(local, NF4Blocks):
                shards = 1 if whole else p.device_mesh["shard"].size()
                assert local.shape[0] * shards == p.shape[0], f"{full_name} is not sharded"
                kind, parts = "4-bit", [local.packed, local.absmax_codes]
            else:
                want = torch.float32 if p.requires_grad and not whole else compute_dtype
                assert by_peft or p.dtype == want, f"{full_name} is {p.dtype}, not {want}"
                kind, parts = "adapter" if p.requires_grad else "other frozen", [local]
            if p in seen:
                continue
            seen.add(p)
            on_host = parts[0].is_cpu and torch.cuda.is_available()
            n_bytes["of these on the host"] += on_host * sum(part.nbytes for part in parts)
            n_bytes[kind] += sum(part.nbytes for part in parts)
        assert not any(b.is_meta for b in module.buffers(recurse=False)), f"{path} buffers on meta"
    text = ", ".join(f"{kind} {n / 2**30:.3f}" for kind, n in n_bytes.items() if n)
    for rank, line in enumerate(gather_texts(text)):
        say(f"rank {rank} holds, GiB: {line}")


# ------------------------------------------------------------------------------------------------
# Optimizer and schedule
# ------------------------------------------------------------------------------------------------


def learning_rate(step, max_steps, peak):
    """Of step 1..max_steps: linear warm-up to `peak`, then a cosine to 0."""
    warmup = max(1, round(WARMUP_FRACTION * max_steps))
    if step <= warmup:
        return peak * step / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (max_steps + 1 - warmup)))


def make_optimizer(masters):
    """bitsandbytes' paged 8-bit AdamW over this rank's part of the adapter."""
    # in 8 bits whatever the size: another number of ranks must find the same kind of state
    optimizer = bnb.optim.PagedAdamW8bit([masters], lr=0.0, weight_decay=0.0, min_8bit_size=0)
    optimizer.init_state(optimizer.param_groups[0], masters, 0, 0)
    return optimizer


@torch.no_grad()
def update_masters(optimizer, masters, rate):
    """What the optimizer's step() does, which would also wait for the GPU, twice: of its paged
    state nothing is read on the host but in save_checkpoint, which waits itself."""
    (group,) = optimizer.param_groups
    group["lr"] = rate
    optimizer.prefetch_state(masters)
    optimizer.update_step(group, masters, 0, 0)
    masters.grad = None


def set_master_grad(masters, views, params):
    """Add the gradients of {name: parameter} to the masters' one gradient."""
    parts = []
    for name in views:
        grad, params[name].grad = local_part(params[name].grad).reshape(-1), None
        parts += [grad, grad.new_zeros(-grad.numel() % STATE_BLOCK)]
    grad = torch.cat(parts).float()  # the GPU waits for this: not a copy for each
    masters.grad = grad if masters.grad is None else masters.grad.add_(grad)


@torch.no_grad()
def publish_masters(views, params):
    """Renew what is computed with where that is not the masters themselves: a copy in the compute
    dtype, or FSDP2's padded one of a weight that does not divide by the ranks."""
    pairs = [(local_part(params[name]), view) for name, view in views.items()]
    pairs = [(local, view) for local, view in pairs if local.data_ptr() != view.data_ptr()]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))


# ------------------------------------------------------------------------------------------------
# Checkpoints
# ------------------------------------------------------------------------------------------------

CHECKPOINT = "checkpoint-{:06d}"
MUST_MATCH = (  # what a resumed run cannot change and still be the same run
    "model", "dataset", "random_weights", "compute_dtype", "lora_rank", "lora_alpha",
    "lora_dropout", "use_rslora", "use_dora", "target_modules", "max_seq_len", "packing",
    "batch_size", "seed",
)  # fmt: skip


def peft_name(name):
    """A LoRA parameter's name in an adapter file of PEFT's."""
    name = name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector")
    return f"base_model.model.{name.replace('.default.', '.')}"


def sync_file(path):
    """Make a written file or directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def write_text(path, text):
    """Replace a file whole: a reader sees the old text or the new."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    sync_file(part)
    os.replace(part, path)
    sync_file(path.parent)


def write_tensors(path, tensors):
    """Replace a safetensors file whole; safetensors itself neither syncs nor leaves it readable."""
    part = path.with_name(f".{path.name}.part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.chmod(0o644)
    sync_file(part)
    os.replace(part, path)
    sync_file(path.parent)


def digest(path):
    """SHA-256 of a file; safetensors has no checksum of its own."""
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 24):
            sha.update(chunk)
    return sha.hexdigest()


def gather_adapter(params, views):
    """{PEFT name: whole fp32 weight on the CPU} on rank 0, {} elsewhere. All ranks must call."""
    adapter = {}
    for name, p in params.items():
        whole = p.detach().full_tensor() if isinstance(p, DTensor) else views[name]
        if dist.get_rank() == 0:
            adapter[peft_name(name)] = whole.cpu()
    return adapter


def write_adapter(directory, adapter, lora_config):
    """Rank 0 only."""
    write_tensors(directory / "adapter_model.safetensors", adapter)
    lora_config.inference_mode = True
    lora_config.save_pretrained(directory)


def state_slices(run):
    """The optimizer's state a weight at a time, {name.key: the slice of the live tensor}."""
    state, slices = run.optimizer.state[run.masters], {}
    for name, view in run.views.items():
        start, stop = view.storage_offset(), view.storage_offset() + view.numel()
        for key in ("state1", "state2"):
            slices[f"{name}.{key}"] = state[key][start:stop]
        for key in ("absmax1", "absmax2"):
            blocks = slice(start // STATE_BLOCK, math.ceil(stop / STATE_BLOCK))
            slices[f"{name}.{key}"] = state[key][blocks]
    return slices


def rank_file(rank, world_size):
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def save_checkpoint(run, directory, step):
    """Write checkpoint-<step>, whole or not at all. All ranks must call this.

    Everything goes to a hidden directory that gets its name when each rank's part is written,
    synced and listed with its SHA-256: a directory with the right name is a whole checkpoint.
    """
    final = directory / CHECKPOINT.format(step)
    temporary = directory / f".{final.name}.part"
    part = rank_file(dist.get_rank(), dist.get_world_size())
    adapter = gather_adapter(run.params, run.views)
    if run.masters.is_cuda:
        torch.cuda.synchronize()  # paged state is read on the host, where no stream orders it

    def prepare():
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write_part():
        tensors = {k: v.cpu().clone() for k, v in state_slices(run).items()}
        tensors["rng.cpu"] = torch.get_rng_state()
        if run.masters.is_cuda:
            tensors["rng.cuda"] = torch.cuda.get_rng_state()
        write_tensors(temporary / part, tensors)
        return f"{part} {digest(temporary / part)}"

    def finish(lines):
        write_adapter(temporary, adapter, run.lora_config)
        files = dict(line.split() for line in lines)
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            files[name] = digest(temporary / name)
        state = {
            "step": step,
            "rows_seen": step * run.config.batch_size,
            "world_size": dist.get_world_size(),
            "optimizer_step": run.optimizer.state[run.masters]["step"],
            "data_sha256": run.data_sha256,
            "config": dataclasses.asdict(run.config),
            "files": files,
        }
        state["sha256"] = text_digest(state)
        write_text(temporary / "checkpoint.json", json.dumps(state, indent=2))
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        sync_file(directory)

    on_rank_0(prepare)  # nobody writes before it is there
    lines = gather_texts(together(write_part))
    on_rank_0(finish, lines)


def text_digest(state):
    """SHA-256 of a JSON object, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def read_checkpoint(path):
    """The state in a checkpoint's list, if it and all files it names are what was written."""
    try:
        state = json.loads((path / "checkpoint.json").read_text())
        if state.pop("sha256") != text_digest(state):
            raise ValueError("checkpoint.json has another SHA-256 than when it was written")
        for name, sha in state["files"].items():
            if digest(path / name) != sha:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path}, which is not whole: {e}")
    return state


def whole_checkpoint(directory):
    """The newest whole checkpoint of a run. Rank 0 only."""
    broken = []
    for path in sorted(directory.glob("checkpoint-*"), reverse=True):
        try:
            read_checkpoint(path)
        except ValueError as e:
            broken.append(str(e))
            continue
        for text in broken:
            say(f"skipped {text}")
        return str(path)
    raise ValueError("; ".join([f"--resume: {directory} has no whole checkpoint", *broken]))


def check_resume(path, config, data_sha256):
    """The state of a whole checkpoint, if this run can continue it."""
    state = json.loads((path / "checkpoint.json").read_text())
    now = json.loads(json.dumps(dataclasses.asdict(config)))
    for name in MUST_MATCH:
        was = state["config"].get(name, getattr(Config, name))  # it may be from before the flag
        if was != now[name]:
            raise ValueError(f"--resume: {path} was made with --{name} {was}, not {now[name]}")
    if state["data_sha256"] != data_sha256:
        raise ValueError(f"--resume: the rows are not those that {path} was made with: the data"
                         " set or the tokenizer has changed")
    return state


def check_base(directory, offsets):
    """Whether a resumed run's base model is the one it began with, by each layer's mean absmax."""
    before = json.loads((directory / "train_config.json").read_text())["quantization"]
    for name, now in offsets.items():
        was = before["absmax_offsets"][name]
        if abs(now - was) > 1e-5 * was:  # another kind of device moves it by 1e-7
            raise ValueError(f"--resume: the base model has changed: {name} has a mean absmax of"
                             f" {now:.8g}, when the run began it was {was:.8g}")


def saved_layout(state):
    """Of a checkpoint: how many processes saved it, and how many of them held one copy."""
    ranks = state["world_size"]  # a checkpoint from before the flag was one copy over all of them
    return ranks, state["config"].get("shard_group_size", ranks)


def load_optimizer(run, path, state):
    """Restore this rank's optimizer and random state, bit for bit in the layout that saved it."""
    live_state = run.optimizer.state[run.masters]
    live_state["step"] = state["optimizer_step"]
    # momentum of padding is 0; the code 0 would be the block's largest
    live_state["state1"].fill_(int(live_state["qmap1"].abs().argmin()))
    if saved_layout(state) != (dist.get_world_size(), run.config.shard_group_size):
        recut_optimizer(run, path, *saved_layout(state))
        torch.manual_seed(run.config.seed + dist.get_rank() + 2**40 * state["step"])
        return
    with safe_open(path / rank_file(dist.get_rank(), dist.get_world_size()), "pt") as tensors:
        for name, live in state_slices(run).items():
            live.copy_(tensors.get_tensor(name))
        torch.set_rng_state(tensors.get_tensor("rng.cpu"))
        if run.masters.is_cuda:
            torch.cuda.set_rng_state(tensors.get_tensor("rng.cuda"))


def recut_optimizer(run, path, saved_ranks, saved_shards):
    """Restore the optimizer's state from what another layout of ranks saved.

    A weight's state is put together from the first of the replicas, which are all alike, and this
    rank's rows are quantised anew: the same bytes where the shards begin at whole blocks, else
    within the rounding of 8 bits.
    """
    state, slices = run.optimizer.state[run.masters], state_slices(run)
    shards = run.config.shard_group_size
    files = [safe_open(path / rank_file(rank, saved_ranks), "pt") for rank in range(saved_shards)]
    for name, view in run.views.items():
        rows, *columns = run.params[name].shape  # of a magnitude none
        mine = shard_range(rows, dist.get_rank() % shards, shards)
        mine = slice(mine.start * math.prod(columns), mine.stop * math.prod(columns))
        for n in "12":
            parts = [file.get_tensor(f"{name}.state{n}") for file in files]
            if view.numel():
                code = state[f"qmap{n}"].cpu()
                scales = [file.get_tensor(f"{name}.absmax{n}") for file in files]
                whole = torch.cat([
                    bnb.functional.dequantize_blockwise(
                        part, absmax=scale, code=code, blocksize=STATE_BLOCK
                    ) for part, scale in zip(parts, scales) if part.numel()
                ])  # fmt: skip
                codes, quantized = bnb.functional.quantize_blockwise(
                    whole[mine], code=code, blocksize=STATE_BLOCK
                )
                slices[f"{name}.state{n}"].copy_(codes)
                slices[f"{name}.absmax{n}"].copy_(quantized.absmax)


# ------------------------------------------------------------------------------------------------
# Training step
# ------------------------------------------------------------------------------------------------


def moment(device):
    """A point in the GPU's work; on a CPU, which does its work at once, in time."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(before, after):
    """Waits for the GPU to come to `after`, and for nothing that it is told to do after that."""
    if isinstance(after, float):
        return after - before
    after.synchronize()
    return before.elapsed_time(after) / 1000


def train_step(run, step):
    """Tell the GPU all of one optimizer step. Returns what finish_step makes its metrics of: loss
    (mean over the learnt tokens of the global batch), gradient norm before clipping, tokens. The
    next step may be begun before that, so that the GPU never waits for the host. All ranks must
    call this."""
    config, masters = run.config, run.masters
    rank, world_size, rows = dist.get_rank(), dist.get_world_size(), config.micro_batch_size
    sharded = isinstance(run.model, FSDPModule)
    batch = [run.examples[i] for i in step_rows(step, len(run.examples), config)]
    # every rank holds all rows' tokens, so that the global count needs no communication
    learnt_tokens = sum(int((labels[1:] != IGNORE).sum()) for _, labels, *_ in batch)
    local_loss = torch.zeros((), dtype=torch.float64, device=masters.device)
    for start in range(0, config.batch_size, world_size * rows):
        micro_batch = batch[start : start + world_size * rows]
        micro_batch = collate(micro_batch, rank, world_size, masters.device, run.pack_tokens)
        run.micro_batch_shape = micro_batch[0].shape
        last = start + world_size * rows >= config.batch_size
        if sharded and config.shard_group_size < world_size:
            # copies of the model exchange gradients once a step, not once a micro-batch
            run.model.set_requires_all_reduce(last)
        loss = run.model(*micro_batch)
        (loss / learnt_tokens).backward()
        local_loss += loss.detach()
        if last or not sharded:  # FSDP2 adds up in fp32 by itself
            set_master_grad(masters, run.views, run.params)
    if not sharded and world_size > 1:
        dist.all_reduce(masters.grad)

    everyone = all_gather(torch.stack([local_loss, masters.grad.norm().double() ** 2]))
    everyone[config.shard_group_size :, 1] = 0  # replicas, which have the same gradients
    loss, norm = everyone.sum(0).unbind()
    loss, norm = loss / learnt_tokens, norm.sqrt()
    masters.grad.mul_((MAX_GRAD_NORM / norm).clamp(max=1))
    rate = learning_rate(step, config.max_steps, config.learning_rate)
    update_masters(run.optimizer, masters, rate)
    publish_masters(run.views, run.params)
    tokens = sum(len(ids) for ids, *_ in batch)
    row = {"step": step, "loss": None, "learning_rate": rate, "grad_norm": None, "tokens": tokens,
           "learnt_tokens": learnt_tokens}  # fmt: skip
    numbers = torch.stack([loss, norm])
    numbers = torch.empty_like(numbers, device="cpu", pin_memory=numbers.is_cuda).copy_(
        numbers, non_blocking=True
    )
    return row, numbers, moment(masters.device)


def finish_step(step, before, device):
    """The metrics of what train_step returned, which is waited for; `before` is the moment when it
    began. All ranks see the same numbers and stop together if these are no numbers; the update
    that they led to is never saved."""
    row, numbers, end = step
    row["seconds"] = seconds_between(before, end)
    row["tokens_per_second_per_gpu"] = row["tokens"] / row["seconds"] / dist.get_world_size()
    row["peak_memory_gib"] = memory_gib(device)[1]
    loss, norm = numbers.tolist()
    if not math.isfinite(loss + norm):
        raise Stop(f"step {row['step']}: loss {loss}, gradient norm {norm}; stopped, and nothing of"
                   " this step is saved. A lower --learning_rate may help; --resume continues the"
                   " last checkpoint")
    return {**row, "loss": loss, "grad_norm": norm}


# ------------------------------------------------------------------------------------------------
# Main
# ------------------------------------------------------------------------------------------------


MARK = ".opened"  # a file of the output directory by which ranks tell that it is the same one


def open_output(config, directory):
    """Make the output directory, or say why not; returns what see_output() must find there. Rank 0
    only."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"--output_dir {directory}: cannot be made: {e}; name another")
    used = [p.name for p in directory.iterdir() if p.name.startswith(("adapter_", "checkpoint-"))]
    if used and not config.resume:
        raise ValueError(f"--output_dir {directory} holds a run already ({used[0]}): add --resume"
                         " to continue it, or name another directory")
    for torn in directory.glob(".checkpoint-*.part"):  # of a run that ended while saving
        shutil.rmtree(torn)
    mark = f"{socket.gethostname()} {time.time_ns()}"
    write_text(directory / MARK, mark)
    return mark


def see_output(directory, mark):
    """Whether this rank sees the directory that rank 0 opened: all of them write checkpoints."""
    try:
        seen = (directory / MARK).read_text() == mark
    except OSError:
        seen = False
    if not seen:
        raise ValueError(f"--output_dir {directory}: rank {dist.get_rank()} on"
                         f" {socket.gethostname()} does not see what rank 0 wrote there on"
                         f" {mark.split()[0]}: name a directory that all nodes share")


def prepare_data(config, directory, tokenizer, vocab_size):
    """The examples, and a line on what became of the rows."""
    if config.random_weights and not config.dataset:
        examples = random_examples(vocab_size, config)
        return pack_data(examples, config, f"data: {len(examples)} rows of random tokens")
    source = config.dataset or str(directory / "demo" / "data.jsonl")
    rows = read_rows(source)
    if not rows:
        raise ValueError(f"--dataset {source}: has no rows")
    examples, cut, dropped = encode_dataset(rows, tokenizer, config.max_seq_len, source)
    largest = max(int(ids.max()) for ids, _ in examples)
    if largest >= vocab_size:
        raise ValueError(f"the tokenizer gives token {largest}, but the model's vocabulary ends at"
                         f" {vocab_size - 1}")
    tokens = sum(len(ids) for ids, _ in examples)
    learnt = sum(int((labels[1:] != IGNORE).sum()) for _, labels in examples)
    return pack_data(
        examples, config,
        f"data: {source}: {len(rows)} rows, {dropped} left out with nothing to learn, {cut} cut to"
        f" {config.max_seq_len} tokens; {tokens:,} tokens, {learnt:,} of them learnt",
    )  # fmt: skip


def pack_data(examples, config, data_line):
    """What prepare_data returns, with packs in place of rows where that is asked for."""
    if not config.packing:
        return examples, data_line
    packs = pack_examples(examples, config.max_seq_len)
    full = sum(len(ids) for ids, *_ in packs) / len(packs) / config.max_seq_len
    return packs, (f"{data_line}\npacking: {len(examples)} rows in {len(packs)} packs of at most"
                   f" {config.max_seq_len} tokens, {full:.1%} full")


def describe_run(config, base, attention, device, examples, offsets, stored, date):
    """What train_config.json holds: the configuration, and all that a merge must know."""
    return {
        "config": dataclasses.asdict(config),
        "base_model": str(base) if Path(config.model or base).is_dir() else config.model,
        "quantization": {
            "quant_type": "nf4",
            "blocksize": BLOCK,
            "double_quant": True,
            "nested_blocksize": NESTED_BLOCK,
            "quantized_from_dtype": config.compute_dtype,
            "prequantized": bool(stored),  # its bytes are the base's own, dequantised to that dtype
            "device": device.type,
            "absmax_offsets": offsets,  # the mean absmax of each layer: tells one base from another
        },
        "attention": attention,
        "world_size": dist.get_world_size(),
        "date": date,
        "versions": {m.__name__: m.__version__ for m in LIBRARIES},
        "probe_input_ids": [ids[:64].tolist() for ids, *_ in examples[:4]],
    }


def say_start(config, attention, data_line, device):
    """What this run is, before it begins."""
    say(f"configuration: {json.dumps(dataclasses.asdict(config))}")
    versions = ", ".join(f"{m.__name__} {m.__version__}" for m in LIBRARIES)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, gloo"
    say(f"{versions}; {dist.get_world_size()} x {gpu}")
    say(f"attention: {attention}")
    say(data_line)


def train(config, device):
    """The whole job, from flags to adapter. All ranks must call this."""
    config = together(resolve_config, config, dist.get_world_size())
    why_not = next((text for text in gather_texts(try_fused(device)) if text), "")
    config = together(choose_fused, config, why_not)
    config = dataclasses.replace(config, output_dir=on_rank_0(lambda: config.output_dir))
    limit = together(limit_memory, config, device)
    limit = limit and min(int(text) for text in gather_texts(str(limit)))
    directory = Path(config.output_dir)
    together(see_output, directory, on_rank_0(open_output, config, directory))
    on_rank_0((directory / MARK).unlink)
    if not config.model:
        say("No --model: training the built-in demo, a small Llama with random weights"
            + ("." if config.dataset else " and 512 made-up instructions (no --dataset)."))
        if not config.resume:  # the base that an adapter belongs to is not made anew
            on_rank_0(write_demo, directory / "demo")
    torch.manual_seed(config.seed + dist.get_rank())  # dropout differs between ranks

    # what can be wrong is found out before any weight is read
    base = together(model_directory, config.model or str(directory / "demo" / "model"),
                    config.random_weights)  # fmt: skip
    model_config = together(read_model_config, base, config)
    attention = on_rank_0(choose_attention, config, model_config, device)
    tokenizer = None
    if config.dataset or not config.random_weights:
        tokenizer = together(load_tokenizer, base)
    vocab_size = model_config.vocab_size
    date = on_rank_0(run_date, config, directory)
    fix_date(date)
    examples, data_line = together(prepare_data, config, directory, tokenizer, vocab_size)
    data_sha256 = digest_examples(examples)
    epoch_steps = math.ceil(config.num_epochs * len(examples) / config.batch_size)
    config = dataclasses.replace(config, max_steps=config.max_steps or epoch_steps)
    done, resume_from = 0, None
    if config.resume:
        resume_from = Path(on_rank_0(whole_checkpoint, directory))
        resume_state = together(check_resume, resume_from, config, data_sha256)
        done = resume_state["step"]

    # order: NF4 layers, LoRA, recomputation, FSDP2, all on meta; then each rank's own bytes
    compute_dtype = getattr(torch, config.compute_dtype)
    mesh = make_mesh(config.shard_group_size, device)
    shards = mesh["shard"].size()
    model, shapes = together(
        build_model, model_config, attention.partition(":")[0], compute_dtype, shards
    )
    together(attend_causally, model, attention.partition(":")[0], config, device)
    stored = None
    if config.random_weights:
        read = random_reader(config.seed, compute_dtype, device)
    else:
        files = together(weight_files, base)
        stored = check_files(files, shapes, model, model_config)
        read = together(file_reader, files, device)
    if config.fused:
        fuse_model(model)
    lora_config = together(add_lora, model, config, config.model or str(base))
    longest = round_length(max(len(ids) for ids, *_ in examples), device)
    sizes = together(model_sizes, model, config, shards, longest)
    config = together(choose_recompute, config, sizes, limit)
    make_room(model, config, sizes, limit)
    say_plan(config, sizes, limit)
    together(check_plan, config, sizes, limit)
    recompute_blocks(model, config, device, sizes.longest)
    shard_model(model, mesh, compute_dtype, config)

    say_start(config, attention, data_line, device)
    if tokenizer:
        say_example(examples, tokenizer)
    tokens, ceiling = config.micro_batch_size * sizes.longest, None
    # micro-batches of packs have all one shape: nothing is compiled, or memory cut, anew
    pack_tokens = tokens if config.packing else 0
    if config.random_weights:
        ceiling = gemm_ceiling(model, compute_dtype, tokens, device)
    if stored:
        say_stored(stored, config.compute_dtype)
    offload = config.offload_params
    offsets = load_weights(model, read, mesh, compute_dtype, device, stored, offload)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading used and training would use in other sizes
    say_memory("after loading", device)
    if resume_from:
        on_rank_0(check_base, directory, offsets)
    described = describe_run(config, base.resolve(), attention, device, examples, offsets,
                             stored, date)  # fmt: skip
    on_rank_0(write_text, directory / "train_config.json", json.dumps(described, indent=2))

    first_values = functools.partial(init_lora, seed=config.seed)
    if resume_from:
        first_values = functools.partial(saved_lora, directory=resume_from)
    masters, views = load_lora(model, first_values, mesh, device)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert list(params) == list(views), "the adapter's weights are not all in the optimizer"
    if config.use_dora and not resume_from:
        init_magnitudes(model, mesh, views, params)
    verify_model(model, compute_dtype)
    trainable, total = sum(p.numel() for p in params.values()), sum(map(math.prod, shapes.values()))
    say(f"parameters: {trainable:,} trainable (LoRA), {total:,} frozen")
    say_memory("before step 1", device)
    run = types.SimpleNamespace(
        config=config, model=model, params=params, masters=masters, views=views,
        optimizer=make_optimizer(masters), examples=examples, data_sha256=data_sha256,
        lora_config=lora_config, ceiling=ceiling, micro_batch_shape=(0, 0),
        pack_tokens=pack_tokens,
    )  # fmt: skip
    if resume_from:
        together(load_optimizer, run, resume_from, resume_state)
        say(f"resumed from {resume_from}: {done} of {config.max_steps} steps are done")
        if saved_layout(resume_state) != (dist.get_world_size(), config.shard_group_size):
            say("saved by {} processes with --shard_group_size {}: the optimizer's state is cut"
                " anew, and dropout goes on with other random numbers"
                .format(*saved_layout(resume_state)))

    rows = run_steps(run, directory, done)
    if config.random_weights and rows:
        say_speed(run, rows, sizes)

    adapter = gather_adapter(params, views)
    on_rank_0(write_adapter, directory, adapter, lora_config)
    say_memory("at the end", device)
    say(f"adapter saved in {directory}; to merge it into the base model:")
    merge = Path(__file__).with_name("merge_adapters.py")
    merge = os.path.relpath(merge) if merge.is_file() else merge.name  # copied alone
    say(shlex.join([this_python(), merge, "--adapter_dir", str(directory),
                    "--output_dir", f"{directory}/merged"]))  # fmt: skip


def this_python():
    """What to type for the Python that runs this: `python` only where that is the same one."""
    found = shutil.which("python")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "python"
    path = os.path.relpath(sys.executable)
    return sys.executable if path.startswith("..") else path


def run_steps(run, directory, done):
    """The training loop: steps, metrics, checkpoints. Returns the metrics of its steps. All ranks
    must call this."""
    config, rank, world_size = run.config, dist.get_rank(), dist.get_world_size()
    accumulation = config.batch_size // (config.micro_batch_size * world_size)
    unit = "packs" if config.packing else "rows"
    say(f"steps: {config.max_steps} of {config.batch_size} {unit} = {world_size} processes x"
        f" {config.micro_batch_size} {unit} x {accumulation} accumulation; peak learning rate"
        f" {config.learning_rate}")
    metrics = board = None
    if rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        path = directory / "metrics.jsonl"
        kept = path.read_text().splitlines(True) if done and path.is_file() else []
        write_text(path, "".join(kept[:done]))
        metrics = path.open("a")
        board = SummaryWriter(directory / "tensorboard", purge_step=done + 1)
    bar = tqdm(initial=done, total=config.max_steps, unit="step", disable=rank != 0)
    device, rows, launched = run.masters.device, [], []
    before = moment(device)
    for step in range(done + 1, config.max_steps + 1):
        try:
            launched.append(train_step(run, step))
        except torch.OutOfMemoryError as e:
            n_rows, n_tokens = run.micro_batch_shape
            e.where = f"at step {step}, micro-batch of {n_rows} rows x {n_tokens} tokens"
            raise
        if step == done + 1:  # what is there now stays: a full collection would go through it all,
            gc.collect()  # on one rank at a time, while the others wait
            gc.freeze()
        save = step == config.max_steps or config.save_every and step % config.save_every == 0
        while len(launched) > (0 if save else 1):  # else the GPU has the last one yet to do
            rows.append(finish_step(launched[0], before, device))
            *_, before = launched.pop(0)
            bar.update()
            if rank == 0:
                log_step(rows[-1], config.max_steps, metrics, board)
        if save:
            save_checkpoint(run, directory, step)
            before = moment(device)
    bar.close()
    if rank == 0:
        metrics.close()
        board.close()
    return rows


def log_step(row, max_steps, metrics, board):
    """One step's numbers to metrics.jsonl, TensorBoard and the log. Rank 0 only."""
    metrics.write(json.dumps(row) + "\n")
    metrics.flush()
    for key, value in row.items():
        board.add_scalar(key, value, row["step"])
    say(f"step {row['step']:6d}/{max_steps}  loss {row['loss']:7.4f}"
        f"  lr {row['learning_rate']:.2e}  grad {row['grad_norm']:8.4f}"
        f"  {row['tokens_per_second_per_gpu']:9,.0f} tok/s/GPU"
        f"  peak {row['peak_memory_gib']:6.2f} GiB")


def say_out_of_memory(error, config, device):
    """One line from the rank that it happened to, whether on its GPU or on the host."""
    helps = [flag for flag, is_on in (
        ("--reshard_after_forward", config.reshard_after_forward),
        ("--recompute all", config.recompute == "all"),
        ("--offload_activations", config.offload_activations),
        ("--offload_params", config.offload_params),
        ("a smaller --micro_batch_size", config.micro_batch_size == 1),
        ("a shorter --max_seq_len", False),
    ) if not is_on]  # fmt: skip
    where = getattr(error, "where", "outside of the steps (loading or saving)")
    details = "".join(f", {found[1]} {what}" for what, pattern in (
        ("more asked for", r"Tried to allocate ([\d.]+ \w+)"),
        ("in gaps", r"([\d.]+ \w+) is reserved by PyTorch but unallocated"),
    ) if (found := re.search(pattern, str(error))))  # fmt: skip
    text = (f"rank {dist.get_rank()} on {socket.gethostname()} ran out of memory {where}; peak"
            f" {memory_gib(device)[1]:.2f} GiB allocated{details}; try, in this order:"
            f" {', '.join(helps)}")
    if isinstance(error, MemoryError):
        text = (f"rank {dist.get_rank()} on {socket.gethostname()}:"
                f" {error or 'no host memory left'}; offload less")
    # on a new line: rank 0 may have drawn a progress bar on this one
    print(f"\nerror: {text}", file=sys.stderr, flush=True)


def main(argv=None):
    """Returns the exit code."""
    device = init_distributed()
    exit_code = 0
    try:
        config = together(parse_config, argv)
        check_same(config)
        train(config, device)
    except (torch.OutOfMemoryError, MemoryError) as e:
        # the others wait in a collective that this rank will never join: torchrun ends them
        say_out_of_memory(e, config, device)
        return 1
    except Stop as e:
        if dist.get_rank() == 0:
            print(f"error: {e}", file=sys.stderr, flush=True)
        dist.barrier()  # torchrun kills rank 0 when another exits; let it print first
        exit_code = 1
    dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: with torch 2.13 and gloo, one exit in ten aborts in a C++ thread's destructor
    # ("terminate called without an active exception"), after everything was written
    os._exit(code)
