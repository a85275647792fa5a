#!/usr/bin/env python3
"""Fine-tune a large language model: 4-bit NF4 base weights, LoRA adapters, sharded by FSDP2.

    torchrun --nproc_per_node=2 train_fsdp_qlora.py
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --model meta-llama/Llama-2-70b-hf \
        --dataset data.jsonl --max_seq_len 2048
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --output_dir runs/my-run --resume must

The first command needs no files: it makes a small model and data set and trains on them, on GPUs
(NCCL) or, where there are none, on the CPU (gloo). With --output_dir the same command line starts a
run, resumes it, and does nothing once it is complete. There the run leaves the adapter in PEFT's
format, tokenizer, metrics, checkpoint-NNNNNN/ for resuming, and train_config.json for merging.

This file is the whole job, in the order in which it happens: main() and finetune(); processes;
the choice of attention; the FSDP2 policy; loading to NF4; the adapter's optimizer; schedule, step,
evaluation, loop; saving. docs/internals.md is the map of fsdp_qlora/, on which it stands.

Tested with torch 2.13, transformers 5.20 and 5.24, peft 0.21, bitsandbytes 0.50.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import logging
import math
import os
import signal
import sys
import time
import warnings
from datetime import timedelta
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    gc.disable()  # until all is imported: collections would take a fifth of that time
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until watch_process(): no traceback of an import
    for name in "stdout", "stderr":  # it may be closed; a row may have what it cannot show
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115
        getattr(sys, name).reconfigure(errors="backslashreplace")
    with contextlib.suppress(ImportError):  # as one file it has no package beside it
        importlib.import_module("fsdp_qlora.run.flags").answer_at_once(sys.argv[1:])
if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    with contextlib.suppress(OSError):  # it may be closed
        print("importing torch, transformers, peft, bitsandbytes", file=sys.stderr, flush=True)

# on a CPU it warns that a package is missing, which only its own inference would use
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

import bitsandbytes as bnb
import huggingface_hub
import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fsdp_qlora.config import Config
from fsdp_qlora.data.packing import make_micro_batch, pack_rows, step_rows
from fsdp_qlora.data.prepare import prepare_data
from fsdp_qlora.data.rows import Rows, random_rows
from fsdp_qlora.data.template import how_to_ask
from fsdp_qlora.data.tokenizer import check_tokenizer, load_tokenizer
from fsdp_qlora.files import read_json, text_digest
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.attention import (
    Kernels, architectures_by_attention_type, batched_attention, document_attention,
    flash_attention, kernel_matches, varlen_attention)
from fsdp_qlora.kernels.elementwise import compile_for_any_rows
from fsdp_qlora.kernels.flex import flex_document_attention
from fsdp_qlora.kernels.micro_batch import MicroBatch
from fsdp_qlora.kernels.recurrence import RECURRENCES, mixer_with_state, why_no_fla
from fsdp_qlora.layer.layer import make_layer_specs
from fsdp_qlora.layer.linears import STATE_BLOCK
from fsdp_qlora.layer.router import BALANCE
from fsdp_qlora.lora.adapter import Adapter, check_origin, read_adapter, resolve_target_modules
from fsdp_qlora.memory import limit_memory, log_memory, memory_gib
from fsdp_qlora.model.graphs import Graphs
from fsdp_qlora.model.load import load_model
from fsdp_qlora.model.loss import micro_batch_loss
from fsdp_qlora.model.model import Model, measure_weight_norms, verify_model
from fsdp_qlora.model.shards import reshard_all
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.gpu_specs import gpu_machine, parse_gpus
from fsdp_qlora.planner.search import agree_on_plan, choose_plan, describe_workload, why_no_capture
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.hub import base_digest, model_directory, read_model_config
from fsdp_qlora.quant.nf4 import why_no_triton
from fsdp_qlora.ranks import (
    DIVERGED, EXITS, EXIT_RESUMABLE, RunError, all_gather, check_same, fail_before_init,
    gather_objects, is_rank_0, log, n_cores, on_rank_0, raise_on_all_ranks)
from fsdp_qlora.run.checkpoints import (
    DISK_ERRORS, agree_on_digests, check_room, check_run, checkpoint_path, drop_checkpoints,
    find_checkpoint, load_checkpoint, save_adapter, sharded_state, write_checkpoint)
from fsdp_qlora.run.demo import make_demo
from fsdp_qlora.run.directory import (
    describe_run, losses_of, merge_command, open_output, save_tokenizer)
from fsdp_qlora.run.flags import parse_flags
from fsdp_qlora.run.logs import (
    MetricsWriter, describe_metrics, draw_losses, log_examples, log_plan_elsewhere, log_sample,
    log_speed, log_startup)
from fsdp_qlora.run.merge_check import MergeCheck
from fsdp_qlora.run.resolve import resolve_config, resolve_steps, save_interval
from fsdp_qlora.run.state import Run
from fsdp_qlora.run.status import ACTIONS, LOST_DIRECTORY, Status, watch_process
from fsdp_qlora.training.check import check_family
from fsdp_qlora.training.divergence import why_diverged, why_worse
from fsdp_qlora.training.evaluation import evaluation_batches, evaluation_micro_batches
from fsdp_qlora.training.reference import find_reference, values_of_all
from fsdp_qlora.training.samples import sample_answers
from fsdp_qlora.training.step_stats import gather_step_stats, mean_metrics
from fsdp_qlora.training.untrained_tokens import check_untrained_tokens

SCRIPT = Path(__file__)
VERSIONS = {m.__name__: m.__version__ for m in (torch, transformers, peft, bnb)}
TIMEOUT = timedelta(hours=12)  # one process may encode a large file while the others wait
RETRY_SECONDS = 60  # after a save that failed
DRY_EXAMPLES = 5  # rows that a dry run shows
clock = time.monotonic  # seconds
Record = dict[str, float]  # a line of metrics.jsonl


# ------------------------------------------------------------------------------------------------
# The whole job
# ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 or one of those in ranks."""
    device = join_processes()
    with watch_process() as status:
        try:
            with raise_on_all_ranks():
                config = parse_flags(argv)
            if config.plan_for:
                answer_plan_for(config, status)
            else:
                finetune(config, device, status)
            code = 0
        except RunError as e:
            code = status.stop_together(e)
            with contextlib.suppress(RuntimeError):  # of a rank that has left alone
                dist.barrier()  # torchrun kills rank 0 when another exits; let it print first
        except SystemExit as e:  # of --help
            dist.barrier()  # some ranks may not have joined yet
            code = int(e.code or 0)
        except Exception as e:
            # the others wait in a collective that this rank will never join: torchrun ends them
            return status.end_alone(e, device)
    dist.destroy_process_group()
    return code


def finetune(user_config: Config, device: torch.device, status: Status) -> None:
    """The whole job, from the flags that were given to the adapter. All ranks must call this."""
    # 1. Agree: the same flags, source and versions on all ranks, one output directory
    check_same(user_config, SCRIPT, VERSIONS | {"python": "{}.{}".format(*sys.version_info)})
    with raise_on_all_ranks():
        config = resolve_config(user_config, dist.get_world_size())
    is_dry = user_config.max_steps == 0
    config = dataclasses.replace(config, output_dir=on_rank_0(lambda: config.output_dir))
    with open_output(config, user_config, status) as (directory, is_complete):
        if is_complete:
            log(f"already complete: {directory}; nothing was touched")
            return
        limit = limit_memory(config, device)

        # 2. Model and data: what is wrong with them is found before any weight is fetched or read
        if not config.model:
            make_demo(config, directory)
        status.enter("model")
        name = config.model or str(directory / "demo" / "model")
        config, base, model_config, arch, tokenizer = open_model(config, name)
        status.enter("data")
        saved_config = on_rank_0(read_json, directory / "train_config.json", {})
        template_date = saved_config.get("date", on_rank_0(time.strftime, "%Y-%m-%d"))
        rows, eval_rows = prepare_data(config, directory, tokenizer, arch.vocab_size, template_date)
        config = resolve_steps(config, len(rows))

        # 3. What is adapted, and which run this is: its adapter is looked at, then its weights
        status.enter("model")
        on_rank_0(check_tokenizer, base, tokenizer, rows)
        with raise_on_all_ranks():
            lora_config, adapted = resolve_target_modules(arch, config, config.model or str(base))
            specs = make_layer_specs(arch, adapted, config)
            if config.init_adapter and not saved_config:
                read_adapter(config, arch, specs)
            base, base_sha256 = find_weights(config, base, name, is_dry)
        digests = agree_on_digests(config, rows, eval_rows, base_sha256)
        if config.init_adapter and not saved_config:
            on_rank_0(check_origin, config, base_sha256, tokenizer)
        start_step = find_start_step(config, directory, digests, saved_config, status, is_dry)
        on_rank_0(check_room, config, directory, specs)

        # 4. Which attention, and the plan: what is sharded, recomputed, offloaded
        status.enter("model")
        with raise_on_all_ranks():
            kernels = choose_attention(config, arch, device)
            choose_recurrence(kernels, config, arch, device)
        plan = agree_on_plan(config, arch, specs, rows, eval_rows, limit, device, kernels,
                             state_bytes(config))
        status.plan = plan
        log_startup(user_config, config, plan, kernels, limit, device, VERSIONS)
        log_examples(rows, tokenizer, DRY_EXAMPLES if is_dry else 1)
        if not config.random_weights:
            on_rank_0(check_family, model_config, config.model)
        if is_dry:
            raise RunError(f"--max_steps 0: nothing was trained; the run has {config.max_steps:,}"
                           f" steps of {config.batch_size:,} rows", 0)

        # 5. The model: built on meta, sharded by FSDP2, then each rank loads its part in NF4
        mesh = make_mesh(plan.shard_group_size, device)
        model = Model(arch, specs, plan, kernels, device, mesh.get_group("shard"))
        shard_model(model, mesh, plan)
        loaded = load_model(model, base, model_config, config)
        check_untrained_tokens(model, rows, tokenizer)

        # 6. The adapter, new or from a checkpoint, and its optimizer
        adapter = Adapter(model, device)
        optimizer = make_optimizer(adapter.weights, config)
        if config.adapter == "dora":
            measure_weight_norms(model)
        run = Run(
            config, plan, status, directory, device, rows, eval_rows, tokenizer, digests,
            lora_config=lora_config, model=model, adapter=adapter, optimizer=optimizer,
            merge_check=MergeCheck(rows),
            graphs=plan.graphs and Graphs(model, config, device), saved_step=start_step)
        start_adapter(run, start_step)
        status.enter("saving")
        on_rank_0(describe_run, run, user_config, base.resolve(), loaded, template_date, VERSIONS)
        on_rank_0(save_tokenizer, directory, base, tokenizer)
        verify_model(model, plan)
        log(f"parameters: {adapter.n_trainable:,} trainable ({config.adapter}),"
            f" {loaded.n_parameters:,} frozen")

        # 7. Loop and save
        status.enter("training")
        find_reference(run)
        status.extend_deadline()
        run.merge_check.begin(model, adapter)
        if records := train(run, start_step):
            log_speed(run, records)
        finish_run(run)


def open_model(config: Config, name: str) -> tuple[
        Config, Path, transformers.PretrainedConfig, Architecture,
        transformers.PreTrainedTokenizerFast | None]:
    """What is known of a model without its weights, which are not fetched yet: the config with
    --max_seq_len filled in, its directory, its config, what it is made of, and its tokenizer. All
    ranks must call this."""
    needs = "tokenizer" if config.dataset or not config.random_weights else "config"
    if Path(name).is_dir() and not config.random_weights:
        needs = "weights"
    with raise_on_all_ranks():
        base = model_directory(name, needs)
        config, model_config, arch = read_model_config(base, config)
        tokenizer = load_tokenizer(base, config)
    return config, base, model_config, arch, tokenizer


def find_weights(config: Config, base: Path, name: str, is_dry: bool) -> tuple[Path, str]:
    """The directory of the model's weights, fetched if they must be, and the digest by which a
    resumed run knows them; "": a dry run does without."""
    if config.random_weights:
        return base, text_digest(str(base))
    if is_dry and not any(base.glob("*.safetensors")):
        return base, ""
    base = model_directory(name, "weights")
    return base, base_digest(base)


def find_start_step(config: Config, directory: Path, digests: dict[str, str | None],
                    saved_config: dict[str, Any], status: Status, is_dry: bool) -> int:
    """After how many steps the run in the directory goes on, by its newest whole checkpoint; 0: it
    is new, or is only looked at. `saved_config` is its train_config.json. All ranks must call
    this."""
    status.enter("checkpoint")
    if is_dry:
        on_rank_0(check_run, config, directory, digests, saved_config)
        return 0
    start_step: int = on_rank_0(find_checkpoint, config, directory, digests)
    status.begin(config, start_step)
    status.checkpoint = checkpoint_path(directory, start_step).name if start_step else None
    log_extension(config, saved_config, start_step)
    return start_step


def start_adapter(run: Run, start_step: int) -> None:
    """Set the adapter to its first values, or to those of checkpoint `start_step`, with the
    optimizer's state. All ranks must call this."""
    if not start_step:
        run.adapter.initialize(run.config)
        return
    run.status.enter("checkpoint")
    path = checkpoint_path(run.directory, start_step)
    with raise_on_all_ranks():
        run.progress = load_checkpoint(path, run.adapter, run.optimizer)
    log(f"resumed from {path}: {start_step} of {run.config.max_steps} steps are done")


def answer_plan_for(user_config: Config, status: Status) -> None:
    """Print what the run would be on the GPUs that --plan_for names, on the rows of --dataset if
    there are any. All ranks must call this."""
    with raise_on_all_ranks():
        config = resolve_config(user_config, dist.get_world_size())
    status.enter("model")
    rows, eval_rows = None, None
    if config.dataset:
        config, base, _, arch, tokenizer = open_model(config, config.model or "")
        status.enter("data")
        template_date = on_rank_0(time.strftime, "%Y-%m-%d")
        rows, eval_rows = prepare_data(config, base, tokenizer, arch.vocab_size, template_date)
        config = resolve_steps(config, len(rows))
        status.enter("model")
    with raise_on_all_ranks():
        log_plan_elsewhere(user_config, *plan_elsewhere(config, rows, eval_rows))


def plan_elsewhere(config: Config, rows: Rows | None = None,
                   eval_rows: Rows | None = None) -> tuple[Config, Plan, int]:
    """The plan of a run on the GPUs that --plan_for names, on these rows or on some of
    --max_seq_len tokens, which is filled in, and the bytes of each GPU. Of the model only
    config.json is read. Raises ValueError."""
    world_size, _, gpu = parse_gpus(config.plan_for or "")
    limit, machine = int((config.memory_limit_gib or gpu.free) * 2**30), gpu_machine(gpu)
    base = model_directory(config.model or "", "config")
    config = dataclasses.replace(config, random_weights=True)
    config, _, arch = read_model_config(base, config)
    _, adapted = resolve_target_modules(arch, config, config.model or "")
    specs = make_layer_specs(arch, adapted, config)
    rows = rows or random_rows(arch.vocab_size, config)
    work = describe_workload(config, rows, eval_rows, world_size, torch.device("cuda"),
                         why_no_capture(arch, machine), state_bytes=state_bytes(config))
    return config, choose_plan(config, arch, specs, work, limit, machine), limit


# ------------------------------------------------------------------------------------------------
# Processes and devices
# ------------------------------------------------------------------------------------------------


def join_processes() -> torch.device:
    """Join torchrun's processes over NCCL, on CPUs over gloo. Returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    options: dict[str, Any] = {"backend": "gloo", "timeout": TIMEOUT}
    if "RANK" not in os.environ:  # plain `python`, a run of one process
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    elif lacks := {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        fail_before_init(f"RANK is set, {' and '.join(sorted(lacks))} not: start it by torchrun")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            fail_before_init(f"rank on GPU {local_rank}, but there are {torch.cuda.device_count()}"
                             " GPUs: lower --nproc_per_node")
        device = torch.device("cuda", local_rank)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device)
        # tensors of all sizes come and go, and gaps between fixed segments cannot be joined
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # what the host computes is small: waking threads takes longer
    else:
        device = torch.device("cpu")
        if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun allows each process one thread; share cores
            torch.set_num_threads(max(1, n_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group(**options)
    transformers.utils.logging.disable_progress_bar()
    if local_rank:  # one rank of a machine shows how the Hub's downloads go
        huggingface_hub.utils.disable_progress_bars()
    # on a CPU bitsandbytes keeps the paged optimizer's state unpaged, which is what we want there
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    # of the probe's few tokens, for which nothing is compiled
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
    return device


# ------------------------------------------------------------------------------------------------
# Which attention
# ------------------------------------------------------------------------------------------------


def choose_attention(config: Config, arch: Architecture, device: torch.device) -> Kernels:
    """The attention to use. Raises ValueError.

    From Hopper on torch's SDPA (cuDNN) is the fastest for rows of one length, else Flash Attention
    2; where that is not installed, torch's own kernel for any lengths, and for what that does not
    know, as soft caps, its flex_attention. A kernel is used only if it gives what plain torch
    gives: a flash-attn built without windows or caps returns wrong results without an error.
    """
    from transformers.utils import is_flash_attn_2_available

    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if config.attn == "flash_attention_2" and not has_flash:
        raise ValueError("--attn flash_attention_2: flash-attn is not installed or there is no GPU;"
                         " `make flash-attn` builds it, or use --attn sdpa")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    has_kernels = capability >= (8, 0) and config.compute_dtype == "bfloat16"
    flash = [flash_attention] if has_flash and config.attn != "sdpa" else []
    batched_first = capability >= (9, 0) and config.attn != "flash_attention_2"
    of_one_length = [batched_attention, *flash] if batched_first else [*flash, batched_attention]
    of_any_lengths = [varlen_attention, flex_document_attention]

    def first_that_works(
            kernels: list[Callable], arch: Architecture, attention_type: str) -> Callable:
        if not has_kernels or arch.attention_dropout:
            return document_attention
        works = (f for f in kernels if kernel_matches(f, arch, attention_type, device))
        return next(works, document_attention)

    chosen = Kernels({}, {})
    for attention_type, of_layers in architectures_by_attention_type(arch).items():
        fastest = flash if attention_type == "window" else of_one_length
        for kernels, first in (chosen.varlen, flash), (chosen.fixed_len, fastest):
            kernels[attention_type] = first_that_works(
                [*first, *of_any_lengths], of_layers, attention_type)
    if config.attn == "flash_attention_2" and flash_attention not in chosen.varlen.values():
        raise ValueError("--attn flash_attention_2: as installed it does not compute this model's"
                         " attention; use --attn sdpa")
    return chosen


def choose_recurrence(
    kernels: Kernels, config: Config, arch: Architecture, device: torch.device,
) -> None:
    """Add "recurrence", what computes a gated delta net or Mamba-2, where the model has one. On a
    GPU that is flash-linear-attention, if it gives what plain torch gives."""
    mixer = mixer_with_state(arch)
    if mixer is None:
        return
    recurrence = RECURRENCES[type(mixer)]
    rule = recurrence.plain
    if device.type == "cuda" and config.compute_dtype == "bfloat16":
        if why := why_no_fla(mixer, device):
            log(f"slower: {type(mixer).__name__} runs in plain torch, as flash-linear-attention's"
                f" kernels (`pip install fla-core einops`) are not used: {why}")
        else:
            rule = recurrence.fla
    for kind in kernels:
        kind["recurrence"] = rule


# ------------------------------------------------------------------------------------------------
# The FSDP2 policy
# ------------------------------------------------------------------------------------------------


def make_mesh(shards: int, device: torch.device) -> DeviceMesh:
    """Groups of `shards` consecutive ranks share a copy of the model each (HSDP), or all ranks one.
    Within a group weights are gathered and gradients scattered, all the time; between groups only
    the adapter's gradients are summed."""
    ranks = torch.arange(dist.get_world_size()).view(-1, shards)
    if len(ranks) == 1:
        return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))
    # not init_device_mesh: it splits the default group, which torch may refuse where that has a
    # backend each for CPU and GPU ("Unknown c10d backend type", pytorch issue 159200)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=TIMEOUT)[0]
        for rows in (ranks.t(), ranks)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def shard_model(model: Model, mesh: DeviceMesh, plan: Plan) -> None:
    """Make each decoder layer an FSDP2 unit, where there is something to gather.

    plan.reshard_after_forward frees a layer's gathered weights until its backward (FULL_SHARD), or
    keeps them (SHARD_GRAD_OP). Embedding and head are no units, see Model.
    """
    if not plan.uses_fsdp:
        return
    dtype = getattr(torch, plan.compute_dtype)
    policy = MixedPrecisionPolicy(
        # in bf16 DoRA's magnitudes would round by up to 0.4 %, as much as many steps change them
        param_dtype=None if model.layers[0].spec.dora else dtype,
        reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy,
                    reshard_after_forward=plan.reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit, following in zip([model, *model.layers], model.layers):
        # gather the next layer before this one's work: when it begins, the host may be late
        unit.set_modules_to_forward_prefetch([following])
    for unit in (model, *model.layers):
        # the loss is divided by the global number of tokens already, so gradients add up
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)


# ------------------------------------------------------------------------------------------------
# Optimizer and schedule
# ------------------------------------------------------------------------------------------------


Optimizer = bnb.optim.PagedAdamW8bit


def make_optimizer(weights: nn.Parameter, config: Config) -> Optimizer:
    """bitsandbytes' AdamW over the adapter's one vector, its state in 8 bits and paged: on a GPU
    that is short of memory the driver moves it to the host."""
    # in 8 bits whatever the size: another number of ranks must find the same kind of state
    optimizer = Optimizer([weights], lr=0.0, weight_decay=config.weight_decay, min_8bit_size=0)
    optimizer.init_state(optimizer.param_groups[0], weights, 0, 0)
    return optimizer


def state_bytes(config: Config) -> float:
    """The bytes of the optimizer's state for each weight that must be in the GPU's memory."""
    weights = nn.Parameter(torch.zeros(4 * STATE_BLOCK))
    weights.grad = torch.zeros_like(weights)
    optimizer = make_optimizer(weights, config)
    if getattr(optimizer, "is_paged", False):
        return 0
    optimizer.step()  # makes the state
    return sum(value.nbytes for value in sharded_state(optimizer).values()) / len(weights)


@torch.no_grad()
def optimizer_step(optimizer: Optimizer, adapter: Adapter, rate: float) -> None:
    """One update of the adapter; the gradient is then 0. It is bitsandbytes' step() without its two
    waits for the GPU: only checkpoints read the paged state on the host, and they wait."""
    (group,) = optimizer.param_groups
    group["lr"] = rate
    optimizer.prefetch_state(adapter.weights)
    optimizer.update_step(group, adapter.weights, 0, 0)
    adapter.weights.grad.zero_()


def log_extension(config: Config, saved_config: dict[str, Any], start_step: int) -> None:
    """Log what becomes of the rate where a run goes on that was complete after `start_step` steps,
    by its train_config.json."""
    if start_step and start_step == saved_config["config"]["max_steps"] < config.max_steps:
        last, next_rate = (learning_rate(step, dataclasses.replace(config, max_steps=n))
                           for step, n in ((start_step, start_step),
                                           (start_step + 1, config.max_steps)))
        log(f"the run was complete after {start_step} steps and goes on to {config.max_steps}: the"
            f" learning rate was {last:.1e} and is {next_rate:.1e} now; a new run with"
            " --init_adapter would begin with a warm-up")


def learning_rate(step: int, config: Config) -> float:
    """The rate of step 1..max_steps: linear warm-up to the peak, then by --lr_schedule."""
    warmup = max(1, round(config.warmup_fraction * config.max_steps))
    if step <= warmup:
        return config.learning_rate * step / warmup
    progress = (step - warmup) / (config.max_steps + 1 - warmup)
    shapes = {"cosine": 0.5 * (1 + math.cos(math.pi * progress)), "linear": 1 - progress,
              "constant": 1.0}
    return config.learning_rate * shapes[config.lr_schedule]


# ------------------------------------------------------------------------------------------------
# A training step
# ------------------------------------------------------------------------------------------------


def train_step(run: Run, step: int) -> tuple[Record, str | None]:
    """One optimizer step. Returns its record of metrics, and what any rank requests of all: "save",
    "stop" or None. All ranks must call this.

    The loss is the sum over the trained tokens, or over preference data, divided by their
    number, both over all ranks, so it does not depend on how many ranks there are.
    """
    config, plan, world_size = run.config, run.plan, dist.get_world_size()
    batch, micro_batches = run.prefetched or next_step(run, step)
    # every rank knows all rows' lengths, so that the global counts need no communication
    n_trainable_tokens, tokens = int(batch.n_trainable_tokens.sum()), int(batch.lengths.sum())
    local_sums: Any = 0
    n_micro_batches, capacity, of_all = 0, 0, values_of_all(run.model, batch, [batch])
    while micro_batches:
        micro_batch = micro_batches.pop(0)  # not a for loop: its memory is free once it is done
        is_last = not micro_batches
        if micro_batch.answers:
            micro_batch.answers = dataclasses.replace(micro_batch.answers, **of_all)
        n_micro_batches += world_size
        capacity += len(micro_batch.input_ids) * world_size
        if plan.uses_fsdp and plan.shard_group_size < world_size:
            # copies of the model exchange gradients once a step, not once a micro-batch
            run.model.set_requires_all_reduce(is_last)
        local_sums += forward_backward(run, micro_batch, 1 / batch.num_items_in_batch)
    sum_gradient(run)
    numbers = gather_step_stats(run.model, run.adapter, local_sums, pending_action(run))
    clip_gradient(run, numbers.grad_norm)
    # on the host, while the GPU computes
    run.prefetched = next_step(run, step + 1) if step < config.max_steps else None
    numbers = numbers.on_host()  # waits for the GPU, once a step
    metrics, norm = mean_metrics(numbers.sums.tolist(), batch), float(numbers.grad_norm)
    stop_if_diverged(run, step, metrics["loss"], norm)
    rate = learning_rate(step, config)
    optimizer_step(run.optimizer, run.adapter, rate)
    seconds, run.step_start = clock() - run.step_start, clock()
    run.status.longest_step = max(run.status.longest_step, seconds)
    record = {
        "step": step, **metrics, "learning_rate": rate, "grad_norm": norm, "rows": len(batch),
        "tokens": tokens, "trainable_tokens": n_trainable_tokens, "micro_batches": n_micro_batches,
        "packing_efficiency": tokens / capacity, "seconds": seconds,
        "tokens_per_second_per_gpu": tokens / seconds / world_size,
        "peak_memory_gib": memory_gib(run.device, plan.graphs)[1],
        **dict(zip(BALANCE, numbers.balance.tolist()))}
    return record, ACTIONS[int(numbers.request)]


def next_step(run: Run, step: int) -> tuple[Rows, list[MicroBatch]]:
    """The rows of a step, and this rank's micro-batches of them."""
    batch = run.rows.select(step_rows(step, len(run.rows), run.config))
    micro_steps = pack_rows(batch.lengths.tolist(), dist.get_world_size(),
                            run.plan.micro_batch_tokens, batch.n_answers)
    step_key = hash_ints(torch.tensor(run.config.seed * 1_000_003 + step))
    return batch, [make_micro_batch(batch, m, dist.get_rank(), step_key, run.model)
                   for m in micro_steps]


def forward_backward(run: Run, micro_batch: MicroBatch, scale: float) -> torch.Tensor:
    """Add the gradient of `scale` times a micro-batch's loss to the adapter's. Returns the sums of
    micro_batch_loss(). All ranks must call this."""
    sums = None
    if run.graphs:
        sums = run.graphs.sums(micro_batch, scale)
    if sums is None:
        loss, sums = micro_batch_loss(run.model(micro_batch), micro_batch, run.config)
        (loss * scale).backward()
    return sums


def pending_action(run: Run) -> int:
    """What this rank asks of all ranks after the step, an index of REQUESTS."""
    run.status.check_time()
    return ACTIONS.index(
        "stop" if run.status.stop_reason else "save" if clock() > run.save_due else None)


def sum_gradient(run: Run) -> None:
    """Add up the gradient over copies of the model. All ranks must call this."""
    if dist.get_world_size() > run.adapter.shards and not run.plan.uses_fsdp:  # else FSDP2 has
        dist.all_reduce(run.adapter.weights.grad)


def clip_gradient(run: Run, norm: torch.Tensor) -> None:
    """Scale the gradient, which has this norm, down to --max_grad_norm."""
    run.adapter.weights.grad.mul_((run.config.max_grad_norm / norm).clamp(max=1))


def stop_if_diverged(run: Run, step: int, loss: float, norm: float) -> None:
    """End a run that learns nothing any more, before the update. All ranks must call this."""
    warmup = run.config.warmup_fraction * run.config.max_steps
    why = why_diverged(step, loss, norm, warmup, run.progress, run.adapter.largest,
                       saturates=run.config.loss != "sft")
    if not why:
        return
    advice = "a lower --learning_rate may help"
    if run.status.checkpoint:
        advice += f"; with it, {run.status.how_to_resume} from {run.status.checkpoint}"
    if step == 1:
        advice = "nothing was trained yet: --compute_dtype float32, or is the model damaged?"
    raise RunError(f"step {step}: {why}; nothing of this step is saved; {advice}", DIVERGED)


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: Run) -> Record | None:
    """The metrics of all evaluation rows, without dropout, {name in metrics.jsonl: value}; None if
    the run was asked to stop meanwhile. All ranks must call this."""
    assert run.eval_rows, "there is nothing to evaluate on"
    sums: Any = 0
    rows, n_seen = run.eval_rows, 0
    batches = functools.partial(evaluation_batches, rows, run.config.batch_size, run.status)
    of_all = values_of_all(run.model, rows, (batch for _, batch in batches()))
    for _, batch in batches():
        n_seen += len(batch)
        for micro_batch, _ in evaluation_micro_batches(run.model, batch):
            if micro_batch.answers:
                micro_batch.answers = dataclasses.replace(micro_batch.answers, **of_all)
            sums += micro_batch_loss(run.model(micro_batch), micro_batch, run.config)[1]
    reshard_all(run.model)
    if n_seen < len(rows):
        return None
    return mean_metrics(all_gather(sums).sum(0).tolist(), rows, "eval_")


def log_evaluation(run: Run, writer: MetricsWriter | None, step: int) -> tuple[bool, bool]:
    """Evaluate after `step`. Returns whether it was cut short, because the run was asked to stop,
    and whether the loss is the best so far, which that before the first step never is. All ranks
    must call this."""
    progress, started = run.progress, clock()
    if (found := evaluate(run)) is None:
        return True, False
    loss = found["eval_loss"]
    is_best = progress.best_loss is None or loss < progress.best_loss
    progress.evaluated = step
    if is_best:
        progress.best_loss, progress.best_step = loss, step
    seconds, best = clock() - started, ", the best so far" if is_best and step else ""
    log(f"evaluation after step {step}: loss {loss:.4f}{describe_metrics(found, 'eval_')}{best}")
    samples = sample_answers(run.model, run.tokenizer, run.eval_rows, run.config, run.status,
                             writer.pace if writer else None)
    for sample in samples:
        log_sample(sample)
    if writer:
        n_tokens = int(run.eval_rows.n_trainable_tokens.sum())
        writer.record({"step": step, **found, "eval_tokens": n_tokens, "eval_seconds": seconds,
                       **({"eval_samples": samples} if samples else {})})
    return False, is_best and step > 0


# ------------------------------------------------------------------------------------------------
# The loop
# ------------------------------------------------------------------------------------------------


def train(run: Run, start_step: int) -> list[Record]:
    """The training loop: steps, evaluations, metrics, checkpoints. With
    --random_weights it returns the records of metrics, one a step. All ranks must call this."""
    config, plan, status, records = run.config, run.plan, run.status, []
    epochs = config.max_steps * config.batch_size / len(run.rows)
    n, longest = dist.get_world_size(), run.rows.lengths.view(-1, run.rows.n_answers).sum(1).max()
    log(f"steps: {config.max_steps} of {config.batch_size} rows, {epochs:.3g} epochs, in"
        f" micro-batches of at most {plan.micro_batch_tokens:,} tokens on {n}"
        f" process{'es' * (n > 1)}; the longest row has {longest:,} tokens; peak learning rate"
        f" {config.learning_rate}")
    if run.device.type == "cuda" and not why_no_triton():
        log("the first step compiles kernels: up to a minute, a few seconds once they are cached")
    if run.rows.lengths.min() != run.rows.lengths.max():
        compile_for_any_rows()
    with raise_on_all_ranks():
        writer = MetricsWriter(run, start_step) if is_rank_0() else None
    save_steps, save_seconds = save_interval(config)
    run.step_start, run.save_due = clock(), clock() + save_seconds
    try:
        # from `start_step`: a run that was stopped before the evaluation of that step does it now
        for step in range(start_step, config.max_steps + 1):
            request, cut_short, is_best, is_last = None, False, False, step == config.max_steps
            status.extend_deadline()
            status.step = step
            if step > start_step:
                status.where = (f"at step {step}, in micro-batches of at most"
                                f" {plan.micro_batch_tokens} tokens")
                record, request = train_step(run, step)
                if config.random_weights:  # for log_speed()
                    records.append(record)
                if writer:
                    writer.step(record)
            if step == start_step + 1:
                # freeze what exists by now: garbage collection would look through it again and
                # again, on one rank at a time while the others wait
                gc.collect()
                gc.freeze()
            evaluates = step == 0 or is_last or config.eval_every and step % config.eval_every == 0
            if (run.eval_rows and evaluates and run.progress.evaluated != step
                    and request != "stop"):
                cut_short, is_best = log_evaluation(run, writer, step)
                request = "stop" if cut_short else request
            saves = is_last or request or is_best or save_steps and step % save_steps == 0
            if saves and run.saved_step < step:
                save_checkpoint(run, step)
            if evaluates or saves:
                run.step_start = clock()  # they do not count as time of a step
            if request == "stop":
                stop_run(run, step, cut_short, is_first=step == start_step)
    finally:
        status.deadline = math.inf
        if writer:
            writer.close()
    return records


def stop_run(run: Run, step: int, cut_short: bool, is_first: bool) -> NoReturn:
    """End the run as it was asked to; `cut_short`: its evaluation was. All ranks must call this."""
    why = next(filter(None, gather_objects(run.status.stop_reason)))
    if is_first and cut_short and why.startswith("--max_minutes"):
        raise RunError(f"{why} before the evaluation after step {step} was done, and so it would go"
                       " again: give more, or evaluate fewer rows", EXITS["flags"])
    if why == LOST_DIRECTORY:  # this saves elsewhere, says where, and ends the run
        on_rank_0(save_adapter, run, run.adapter.gather_weights(),
                  run.merge_check.states(run.model), causes=DISK_ERRORS)
    newest = checkpoint_path(run.directory, run.saved_step).name
    if not run.saved_step:
        left = "no checkpoint is saved, and the same command begins anew"
    elif run.saved_step < step:
        left = f"its checkpoint could not be saved; {run.status.how_to_resume} from {newest}"
    else:
        left = f"{newest} is whole; {run.status.how_to_resume}"
    raise RunError(f"{why}, after step {step}; {left}", EXIT_RESUMABLE)


# ------------------------------------------------------------------------------------------------
# Saving
# ------------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, step: int) -> None:
    """Gather adapter and optimizer state on rank 0, which writes checkpoint-<step>; if the disk
    does not take it, say so and try again later. All ranks must call this."""
    run.status.extend_deadline()
    started, name = clock(), checkpoint_path(run.directory, step).name
    torch.get_device_module(run.device).synchronize()  # no stream orders reads of paged state
    weights, merge_check = run.adapter.gather_weights(), run.merge_check.states(run.model)
    state_by_layer = {name: list(run.adapter.gather(value))
                      for name, value in sharded_state(run.optimizer).items()}
    try:
        on_rank_0(write_checkpoint, run, step, weights, state_by_layer, merge_check,
                  causes=DISK_ERRORS)
    except RunError as e:
        run.save_due = clock() + RETRY_SECONDS
        log(f"{name} could not be saved: {e}; if training goes on, it is tried again in"
            f" {RETRY_SECONDS} s")
        return
    run.saved_step, run.save_due = step, clock() + save_interval(run.config)[1]
    run.status.checkpoint = name
    log(f"{name} saved in {clock() - started:.2f} s")
    run.status.write("training")
    on_rank_0(drop_checkpoints, run, step, causes=DISK_ERRORS)


def finish_run(run: Run) -> None:
    """Gather the adapter on rank 0, save it and the picture of the losses, and say what to type
    next. All ranks must call this."""
    run.status.enter("saving")
    weights, directory = run.adapter.gather_weights(), run.directory
    on_rank_0(save_adapter, run, weights, run.merge_check.states(run.model), causes=DISK_ERRORS)
    on_rank_0(draw_losses, directory)
    if run.saved_step < run.config.max_steps:
        log("the checkpoint of the last step could not be saved, but its adapter is; the newest"
            f" checkpoint: {run.status.checkpoint or 'none'}")
    if best := run.progress.best_step:
        path = checkpoint_path(directory, best)
        log(f"the best evaluation was after step {best}, loss {run.progress.best_loss:.4f}:"
            f" {path if path.is_dir() else 'its checkpoint could not be saved'}")
    log_memory("at the end", run.device)
    how = how_to_ask(run.rows.asked)
    if how:
        log(how)
    if why := on_rank_0(lambda: why_worse(losses_of(directory))):
        log(f"warning: {why}: a lower --learning_rate may help")
    if (directory / "merged").exists():
        log(f"{directory}/merged is of an earlier adapter: remove it before you merge")
    log(f"adapter saved in {directory}; to merge it into the base model:")
    log(merge_command(directory, SCRIPT))
    run.status.write("complete", 0, "; ".join(filter(None, ["the adapter is saved", how])))


if __name__ == "__main__":
    gc.enable()
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # not sys.exit: with torch 2.13 and gloo, one exit in ten aborts in a C++ thread's destructor
    # ("terminate called without an active exception"), after everything was written
    os._exit(code)
