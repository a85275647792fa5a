#!/usr/bin/env python3
"""Fine-tune a large language model: 4-bit NF4 base weights, LoRA adapters, sharded by FSDP2.

    torchrun --nproc_per_node=2 train_fsdp_qlora.py
    torchrun --nproc_per_node=2 train_fsdp_qlora.py --model meta-llama/Llama-2-70b-hf \
        --dataset data.jsonl --offload_activations --output_dir runs/my-run

The first command needs no files: it makes a small model and data set and trains on them, on GPUs
(NCCL) or, where there are none, on the CPU (gloo). The second trains a 70B on two 24 GB GPUs
(measured on larger ones that were limited to 22.5 GiB). Run it again to resume; once the run is
complete it does nothing. --output_dir then has the adapter in PEFT's format, the tokenizer,
metrics.jsonl, checkpoint-NNNNNN/ for resuming, and train_config.json for merging.

This file is the job, from the top down; the package fsdp_qlora/ does the rest, and
docs/internals.md is its map. Where to look:

    NCCL, torchrun               init_distributed()
    data, tokenizer              prepare(), in fsdp_qlora/run/prepare.py
    Flash Attention 2            choose_attention()
    FSDP policy                  shard_model(), make_mesh()
    NF4                          quantize(), called by load_model(), in fsdp_qlora/model/load.py
    LoRA                         make_adapter(); the matmul: lora_matmul() in
                                 fsdp_qlora/layer/lora_matmul.py
    recomputing, offloading      make_plan(); Plan.save_policy() in fsdp_qlora/plan.py, and
                                 LayerFunction in fsdp_qlora/layer/layer.py
    PagedAdamW8bit, schedule     make_optimizer(), optimizer_step(), learning_rate()
    loss                         compute_loss(); the loss of each token: LinearCrossEntropy in
                                 fsdp_qlora/model/lm_head.py
    the loop, a step             train(), train_step()
    evaluation                   evaluate(), evaluate_and_save()
    what `job`, `run` hold       Job, Run in fsdp_qlora/run/run.py
    resume                       find_start(), start_adapter(); step_to_resume() in
                                 fsdp_qlora/run/resume.py
    checkpoint files             fsdp_qlora/run/checkpoints.py
    gather and save              save_checkpoint(), save_final_adapter()

Tested with torch 2.11 and 2.13, transformers 5.20 to 5.24, peft 0.21, bitsandbytes 0.50.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import logging
import math
import os
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from fsdp_qlora.run.process import before_imports

    # without torchrun: --help and a wrong flag end here, before slow imports. It also turns gc off,
    # and sets torch's allocator, which torch reads when it is imported
    before_imports()

# bitsandbytes warns on a CPU that a package is missing, which only its own inference would use
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

from fsdp_qlora.checks.compare_with_transformers import compare_with_transformers
from fsdp_qlora.checks.untrained_tokens import check_untrained_tokens
from fsdp_qlora.config import SCHEDULES, Config, warmup_steps
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.packing import micro_steps_of
from fsdp_qlora.data.rows import Rows
from fsdp_qlora.data.sampling import RowSampler, ShuffledSampler
from fsdp_qlora.evaluation.document_losses import evaluation_batches, evaluation_micro_batches
from fsdp_qlora.evaluation.generation import generate_samples
from fsdp_qlora.evaluation.global_loss_inputs import global_loss_inputs, with_global_inputs
from fsdp_qlora.evaluation.ref_logps import ensure_ref_logps
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels import attention
from fsdp_qlora.kernels.attention import AttentionKernel, Kernels
from fsdp_qlora.kernels.compiled import use_dynamic_shapes
from fsdp_qlora.kernels.recurrence import choose_recurrence
from fsdp_qlora.layer.router import BALANCE_METRICS
from fsdp_qlora.log import fail_before_init, log
from fsdp_qlora.lora.adapter import Adapter, optimizer_bytes_per_weight, sharded_state
from fsdp_qlora.lora.initial_token_rows import initial_token_rows
from fsdp_qlora.memory import limit_memory, memory_gib
from fsdp_qlora.micro_batch.context_parallel import ContextGroup
from fsdp_qlora.micro_batch.micro_batch import MicroBatch
from fsdp_qlora.model.cuda_graphs import CUDAGraphs
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.model.load import load_model, verify_model
from fsdp_qlora.model.model import Model, measure_weight_norms
from fsdp_qlora.model.preference_loss import preference_loss
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.search import agree_on_plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.ranks import (
    RunEnd, all_gather, check_ranks_agree, is_rank_0, n_cores, on_rank_0, raise_on_all_ranks)
from fsdp_qlora.run import checkpoints
from fsdp_qlora.run.directory import open_output_dir, save_tokenizer, write_train_config
from fsdp_qlora.run.divergence import stop_if_diverged
from fsdp_qlora.run.finish import finish_run, stop_run
from fsdp_qlora.run.flags import parse_flags
from fsdp_qlora.run.merge_check import MergeCheck
from fsdp_qlora.run.metrics import MetricsWriter, draw_losses, log_evaluation, log_speed
from fsdp_qlora.run.plan_for import print_plan_for
from fsdp_qlora.run.prepare import prepare
from fsdp_qlora.run.process import end_process
from fsdp_qlora.run.resolve import resolve_config, save_interval
from fsdp_qlora.run.resume import check_resumable, set_aside_newer, step_to_resume
from fsdp_qlora.run.run import Job, Run
from fsdp_qlora.run.startup_log import (
    describe_steps, log_extension, log_parameters, log_startup, log_steps)
from fsdp_qlora.run.status import ACTIONS, Status
from fsdp_qlora.run.step_stats import gather_step_stats, mean_metrics
from fsdp_qlora.run.watch import watch_process

SCRIPT = Path(__file__)
VERSIONS = {m.__name__: m.__version__ for m in (torch, transformers, peft, bnb)}
TIMEOUT = timedelta(hours=12)  # one process may tokenize a large file while the others wait
RETRY_SECONDS = 60  # after a save that failed
clock = time.monotonic  # seconds
Metrics = dict[str, float]  # metrics by their names in metrics.jsonl


# ------------------------------------------------------------------------------------------------
# The whole job
# ------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> int:
    """Run the job and return the exit code: 0, or one of those in exit_codes.py."""
    device = init_distributed()
    with watch_process() as status:
        try:
            with raise_on_all_ranks():
                config = parse_flags(argv)
            if config.plan_for:
                print_plan_for(config, optimizer_bytes_per_weight(make_optimizer, config), status)
            else:
                finetune(config, device, status)
            code = 0
        except RunEnd as e:
            code = status.end_together(e)
            with contextlib.suppress(RuntimeError):  # another rank may have left alone
                dist.barrier()  # torchrun kills rank 0 when another exits; let it print first
        except SystemExit as e:  # from --help
            dist.barrier()  # some ranks may not have joined yet
            code = int(e.code or 0)
        except Exception as e:
            # other ranks wait in a collective that this rank will never join: torchrun ends them
            return status.end_alone(e, device)
    dist.destroy_process_group()
    return code


def finetune(user_config: Config, device: torch.device, status: Status) -> None:
    """Run the whole job: flags in, saved adapter out. All ranks must call this.

    `user_config` has the flags as they were typed; `config` has also what follows from them alone
    and, after prepare(), what follows from model and rows. status.enter() begins a phase, which
    decides the exit code of an error and what a signal does.
    """
    # 1. Agree on flags, source and versions, and on one output directory
    check_ranks_agree(user_config, SCRIPT, VERSIONS | {"python": "{}.{}".format(*sys.version_info)})
    is_dry_run = user_config.max_steps == 0  # below, config has a whole run's steps instead
    config = agree_on_config(user_config)
    with open_output_dir(config, user_config, status) as (directory, is_complete):
        if is_complete:
            return

        # 2. The model, the rows and all flags. Weights are downloaded, but not read: what is wrong
        # is found early
        memory_limit = limit_memory(config, device)
        job = prepare(config, directory, status, is_dry_run)
        config, base = job.config, job.base

        # 3. The step from which the run resumes, that of its latest checkpoint; 0: a new run
        start_step = find_start(job, directory, status, is_dry_run)
        on_rank_0(checkpoints.check_disk_space, config, directory, job.n_adapter_weights,
                  make_optimizer)

        # 4. The attention kernels, and the plan: what is sharded, recomputed and offloaded
        status.enter("model")
        sampler = ShuffledSampler(job.rows, config)
        kernels, plan = make_plan(job, sampler, memory_limit, device)
        status.plan = plan
        log_startup(user_config, config, plan, kernels, memory_limit, device, VERSIONS)
        if not config.random_weights:
            on_rank_0(compare_with_transformers, base.model_config, config.model)
        if is_dry_run:  # ends all ranks together, as an error would, but with code 0
            raise RunEnd(f"--max_steps 0: nothing was trained; {describe_steps(config)}", 0)

        # 5. The model, built on meta, sharded by FSDP2; each rank loads its shard in NF4
        mesh = make_mesh(plan.shard_group_size, device)
        context_group = make_context_group(plan.context_parallel_size)
        model = Model(base.arch, job.layer_specs, plan, kernels, device, mesh.get_group("shard"),
                      context_group)
        shard_model(model, mesh, plan)
        loaded = load_model(model, job.weights_dir, base.model_config, config)

        # 6. The adapter, new or from a checkpoint, and its optimizer
        adapter = make_adapter(model, job)
        run = make_run(job, plan, status, directory, sampler, model, adapter, start_step)
        start_adapter(run)
        verify_model(model)
        log_parameters(adapter.n_trainable, loaded.n_parameters)
        status.enter("saving")
        on_rank_0(write_train_config, run, user_config, loaded, VERSIONS)
        on_rank_0(save_tokenizer, directory, job.weights_dir, base)

        # 7. Loop, save, and say what to do next
        status.enter("training")
        ensure_ref_logps(run)
        status.extend_deadline()
        # a forward of a few rows without the adapter, by which a merge will be checked
        run.merge_check.record_without_adapter(model, adapter)
        records = train(run)
        log_speed(run, records)  # with --random_weights
        save_final_adapter(run)
        finish_run(run, SCRIPT)


def agree_on_config(user_config: Config) -> Config:
    """Return the flags, with those filled in that depend neither on the model nor on the rows. All
    ranks must call this."""
    with raise_on_all_ranks():
        config = resolve_config(user_config, dist.get_world_size())
    # the default of --output_dir has the time in it
    return dataclasses.replace(config, output_dir=on_rank_0(lambda: config.output_dir))


def find_start(job: Job, directory: Path, status: Status, is_dry_run: bool) -> int:
    """Return the step of the latest complete checkpoint, from which the run continues; 0 if the run
    is new or a dry run, which only checks that it could continue. From here on `status` writes
    status.json, unless it is a dry run. All ranks must call this."""
    config = job.config
    status.enter("checkpoint")
    if is_dry_run:
        on_rank_0(check_resumable, config, directory, job.digests, job.train_config)
        return 0
    start_step = on_rank_0(step_to_resume, config, directory, job.digests)
    on_rank_0(set_aside_newer, directory, start_step)
    status.start_writing(config, start_step)
    if start_step:
        status.checkpoint = checkpoints.checkpoint_path(directory, start_step).name
    return start_step


def make_plan(job: Job, sampler: RowSampler, memory_limit: int,
              device: torch.device) -> tuple[Kernels, Plan]:
    """Return the kernels of token mixers, and the fastest plan that fits. All ranks must call this.
    """
    config = job.config
    arch = job.base.arch
    with raise_on_all_ranks():
        kernels = choose_attention(config, arch, device)._replace(
            recurrence=choose_recurrence(arch, config.compute_dtype, device))
    plan = agree_on_plan(config, arch, job.layer_specs, sampler, job.eval_rows, memory_limit,
                         device, kernels, optimizer_bytes_per_weight(make_optimizer, config))
    if plan.context_parallel_size > 1:
        # `recurrence` stays None: no plan shares the micro-batches of a recurrent model
        with raise_on_all_ranks():
            kernels = choose_attention(config, arch, device, whole_documents=False)
    return kernels, plan


def make_adapter(model: Model, job: Job) -> Adapter:
    """Return the adapter of all layers and of --trainable_tokens: one flat vector, of which each
    layer's (sharded) parameter becomes a view. start_adapter() sets its values. All ranks must call
    this."""
    base = job.base
    untrained = check_untrained_tokens(model, job.rows, base)
    token_rows = initial_token_rows(model, base.trainable_tokens, untrained)
    adapter = Adapter(model, model.device, base.trainable_ids, token_rows)
    if job.config.adapter == "dora":
        measure_weight_norms(model)
    return adapter


def make_run(job: Job, plan: Plan, status: Status, directory: Path, sampler: RowSampler,
             model: Model, adapter: Adapter, start_step: int) -> Run:
    """Make the Run, with its optimizer and, if planned, CUDA graphs."""
    cuda_graphs = None
    if plan.uses_cuda_graphs:
        cuda_graphs = CUDAGraphs(model, functools.partial(compute_loss, config=job.config))
    return Run(
        job=job, plan=plan, status=status, directory=directory, device=model.device,
        sampler=sampler, eval_rows=job.eval_rows, model=model, adapter=adapter,
        optimizer=make_optimizer(adapter.weights, job.config), merge_check=MergeCheck(job.rows),
        cuda_graphs=cuda_graphs, saved_step=start_step)


def start_adapter(run: Run) -> None:
    """Initialize the adapter, or load it and the optimizer's state from the latest checkpoint. All
    ranks must call this."""
    config = run.config
    step = run.saved_step
    if not step:
        run.adapter.initialize(config)
        return
    run.status.enter("checkpoint")
    path = checkpoints.checkpoint_path(run.directory, step)
    with raise_on_all_ranks():
        run.progress = checkpoints.load_checkpoint(path, run.adapter, run.optimizer)
    log(f"resumed from {path} at step {step} of {config.max_steps}")
    before = run.job.train_config["config"]["max_steps"]
    if step == before < config.max_steps:  # the run was complete
        last_rate = learning_rate(step, dataclasses.replace(config, max_steps=before))
        log_extension(config, step, last_rate, learning_rate(step + 1, config))


# ------------------------------------------------------------------------------------------------
# Processes and devices
# ------------------------------------------------------------------------------------------------


def init_distributed() -> torch.device:
    """Join torchrun's processes over NCCL, or over gloo on CPUs. Returns this rank's device."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    options: dict[str, Any] = {"backend": "gloo", "timeout": TIMEOUT}
    if "RANK" not in os.environ:  # plain `python`, a run of one process
        options.update(store=dist.HashStore(), rank=0, world_size=1)
    elif lacks := {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
        fail_before_init(f"RANK is set, but not {' and '.join(sorted(lacks))}. Start it with"
                         " torchrun")
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            fail_before_init(f"rank on GPU {local_rank}, but there are {torch.cuda.device_count()}"
                             " GPUs: lower --nproc_per_node")
        device = torch.device("cuda", local_rank)
        options.update(backend="cpu:gloo,cuda:nccl", device_id=device)
        torch.cuda.set_device(device)
        torch.set_num_threads(1)  # CPU work is small here: waking threads takes longer
    else:
        device = torch.device("cpu")
        if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun allows each process one thread; share cores
            torch.set_num_threads(max(1, n_cores() // int(os.environ["LOCAL_WORLD_SIZE"])))
    dist.init_process_group(**options)
    quiet_libraries(local_rank)
    return device


def quiet_libraries(local_rank: int) -> None:
    """Turn off progress bars and warnings that a user cannot act on."""
    transformers.utils.logging.disable_progress_bar()
    if local_rank:  # one rank of each machine shows the progress of downloads from the Hub
        huggingface_hub.utils.disable_progress_bars()
    # on a CPU bitsandbytes does not page the optimizer's state, which is right there
    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    # the kernel trial runs a few tokens through flex_attention without compiling it
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile")


# ------------------------------------------------------------------------------------------------
# Attention kernels
# ------------------------------------------------------------------------------------------------


def choose_attention(config: Config, arch: Architecture, device: torch.device,
                     whole_documents: bool = True) -> Kernels:
    """Return the attention kernels to use. Raises ValueError if --attn flash_attention_2 cannot
    be used.

    For rows of one length, torch's SDPA (cuDNN) is the fastest on Hopper and newer GPUs, Flash
    Attention 2 on older ones. For rows of different lengths it is Flash Attention 2 or, where that
    is not installed, torch's own varlen kernel; for what that lacks, such as soft caps, torch's
    flex_attention. A kernel is used only if its results match plain torch: a flash-attn built
    without windows or caps returns wrong results without an error. Plain torch computes all else:
    on CPUs and GPUs before Ampere, in fp32, with attention dropout. For context parallelism
    `whole_documents` is False: then Hopper and newer GPUs run cuDNN on one piece of a document
    after the other, if the pieces are long.
    """
    from transformers.utils import is_flash_attn_2_available

    has_flash = device.type == "cuda" and is_flash_attn_2_available()
    if config.attn == "flash_attention_2" and not has_flash:
        raise ValueError("--attn flash_attention_2: flash-attn is not installed or there is no GPU."
                         " `make flash-attn` builds it, or use --attn sdpa")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    may_use_kernels = capability >= (8, 0) and config.compute_dtype == "bfloat16"
    flash = [attention.FLASH_KERNEL] if has_flash and config.attn != "sdpa" else []
    sdpa_first = capability >= (9, 0) and config.attn != "flash_attention_2"
    sdpa = [attention.SDPA_KERNEL]
    fixed_len = sdpa + flash if sdpa_first else flash + sdpa
    if not whole_documents:
        fixed_len = [attention.CUDNN_KERNEL, *flash] if sdpa_first else flash
    varlen = [attention.VARLEN_KERNEL, attention.FLEX_KERNEL]

    def first_that_works(
            kernels: list[AttentionKernel], layer_arch: Architecture, attention_type: str
    ) -> AttentionKernel:
        if not may_use_kernels or layer_arch.attention_dropout:
            return attention.EAGER_KERNEL
        usable = (kernel for kernel in kernels if attention.kernel_matches(
            kernel, layer_arch, attention_type, device, whole_documents))
        return next(usable, attention.EAGER_KERNEL)

    chosen = Kernels({}, {})
    for attention_type, layer_arch in attention.architectures_by_attention_type(arch).items():
        chosen.varlen[attention_type] = first_that_works(
            flash + varlen, layer_arch, attention_type)
        chosen.fixed_len[attention_type] = first_that_works(
            fixed_len + varlen, layer_arch, attention_type)
    flash_is_used = attention.FLASH_KERNEL in chosen.varlen.values()
    if config.attn == "flash_attention_2" and not flash_is_used:
        raise ValueError("--attn flash_attention_2: as installed it does not compute this model's"
                         " attention; use --attn sdpa")
    return chosen


# ------------------------------------------------------------------------------------------------
# The FSDP2 policy
# ------------------------------------------------------------------------------------------------


def make_mesh(shard_group_size: int, device: torch.device) -> DeviceMesh:
    """Make groups of `shard_group_size` consecutive ranks, or one group of all. The ranks of a
    group share one copy of the model: they gather the weights of each layer and scatter its
    gradients. Between groups (HSDP) only the adapter's gradients are summed, once per step."""
    ranks = torch.arange(dist.get_world_size()).view(-1, shard_group_size)
    if len(ranks) == 1:
        return init_device_mesh(device.type, (shard_group_size,), mesh_dim_names=("shard",))
    # not init_device_mesh: it splits the default group, which torch may refuse if that group has
    # one backend for CPUs and one for GPUs ("Unknown c10d backend type", pytorch issue 159200)
    groups = [
        dist.new_subgroups_by_enumeration(rows.tolist(), timeout=TIMEOUT)[0]
        for rows in (ranks.t(), ranks)]
    names = ("replicate", "shard")
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def make_context_group(size: int) -> ContextGroup:
    """Return this process's group of `size` consecutive ranks, which share each micro-batch."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    group = None
    if 1 < size < world_size:
        ranks = torch.arange(world_size).view(-1, size).tolist()
        group = dist.new_subgroups_by_enumeration(ranks, timeout=TIMEOUT)[0]
    return ContextGroup(size=size, rank=rank % size, group_index=rank // size,
                        n_context_groups=world_size // size, process_group=group)


def shard_model(model: Model, mesh: DeviceMesh, plan: Plan) -> None:
    """Make each decoder layer an FSDP2 unit, of its 4-bit weights, norms, biases and adapter. Do
    nothing if there is nothing to gather, see Plan.uses_fsdp.

    FourBitBlocks, in fsdp_qlora/quant/blocks.py, lets FSDP2 gather 4-bit weights as bytes; with
    --offload_params from host memory, in place of CPUOffloadPolicy. The embedding and lm_head are
    not FSDP2 parameters, see ModelParameters in fsdp_qlora/model/parameters.py.
    plan.reshard_after_forward frees a layer's gathered weights until its backward (FULL_SHARD), or
    keeps them (SHARD_GRAD_OP).
    """
    if not plan.uses_fsdp:
        return
    dtype = plan.dtype
    # casts the fp32 adapter when it is gathered. 4-bit weights are gathered as they are
    policy = MixedPrecisionPolicy(
        # in bf16 DoRA's magnitudes would round by up to 0.4 %, as much as many steps change them
        param_dtype=None if model.layers[0].spec.dora else dtype,
        reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy,
                    reshard_after_forward=plan.reshard_after_forward)
    # the root has no parameters of its own; by it all layers share FSDP2's streams
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for unit, following in zip([model, *model.layers], model.layers):
        # start the gather of the next layer before this layer's kernels are queued
        unit.set_modules_to_forward_prefetch([following])
    for unit in (model, *model.layers):
        # the loss is divided by the global number of tokens already, so gradients add up
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_gradient_divide_factor(1.0)


# ------------------------------------------------------------------------------------------------
# The adapter's optimizer and its schedule
# ------------------------------------------------------------------------------------------------


Optimizer = bnb.optim.PagedAdamW8bit


def make_optimizer(weights: nn.Parameter, config: Config) -> Optimizer:
    """Return bitsandbytes' AdamW over the adapter's flat vector. Its state is in 8 bits and paged:
    the driver moves it to host memory when the GPU runs short of memory."""
    # lr: optimizer_step() sets it. 8 bits whatever the size, so that a run resumed on other ranks
    # finds the same kind of state
    optimizer = Optimizer([weights], lr=0.0, weight_decay=config.weight_decay, min_8bit_size=0)
    # step() would make the state, but optimizer_step() does not call it
    optimizer.init_state(optimizer.param_groups[0], weights, gindex=0, pindex=0)
    return optimizer


@torch.no_grad()
def optimizer_step(optimizer: Optimizer, adapter: Adapter, lr: float) -> None:
    """Update the adapter once and set its gradient to 0. This is bitsandbytes' step() without its
    two waits for the GPU: only checkpoints read the paged state on the host, and they wait."""
    (group,) = optimizer.param_groups
    group["lr"] = lr
    optimizer.prefetch_state(adapter.weights)
    optimizer.update_step(group, adapter.weights, gindex=0, pindex=0)
    adapter.grad.zero_()


def learning_rate(step: int, config: Config) -> float:
    """Return the learning rate of step 1..max_steps: linear warm-up to the peak, then
    --lr_schedule, see SCHEDULES."""
    warmup = warmup_steps(config)
    if step <= warmup:
        return config.learning_rate * step / warmup
    # + 1: a falling rate reaches 0 one step after the last
    progress = (step - warmup) / (config.max_steps + 1 - warmup)
    return config.learning_rate * SCHEDULES[config.lr_schedule](progress)


# ------------------------------------------------------------------------------------------------
# The loop
# ------------------------------------------------------------------------------------------------


def train(run: Run) -> list[Metrics]:
    """Run the training loop: steps, evaluations, metrics, checkpoints. Returns the metrics of all
    steps with --random_weights, else []. All ranks must call this."""
    config = run.config
    status = run.status
    start_step = run.saved_step
    records: list[Metrics] = []
    log_steps(run)
    if run.rows.lengths.min() != run.rows.lengths.max():
        use_dynamic_shapes()  # else kernels would be compiled anew for each number of tokens
    with raise_on_all_ranks():
        writer = MetricsWriter(run, start_step) if is_rank_0() else None
    gc.collect()  # else what is garbage by now would be frozen, too
    gc.freeze()  # garbage collection need not look at what is left
    run.step_start = clock()
    run.save_due = run.step_start + save_interval(config).seconds
    status.extend_deadline()
    try:
        # the model before step 1; or, resumed, an evaluation that a stop had cut short
        evaluate_and_save(run, writer, start_step, None)
        for step in range(start_step + 1, config.max_steps + 1):
            status.extend_deadline()
            status.step = step
            status.where = (f"at step {step}, in micro-batches of at most"
                            f" {run.plan.micro_batch_tokens} tokens")
            record, action = train_step(run, step)
            if config.random_weights:
                records.append(record)
            if writer:
                writer.write_step(record)
            if step == start_step + 1:
                # freeze also what this step compiled: garbage collection would scan it again
                # and again, on one rank at a time while the others wait
                gc.collect()
                gc.freeze()
            evaluate_and_save(run, writer, step, action)
    finally:
        status.deadline = math.inf
        if writer:
            writer.close()
    return records


def evaluate_and_save(run: Run, writer: MetricsWriter | None, step: int,
                      action: str | None) -> None:
    """Do what is due after `step`, and the requested `action` of ACTIONS: evaluate, save a
    checkpoint, end the run by RunEnd. All ranks must call this."""
    config = run.config
    progress = run.progress
    is_last = step == config.max_steps
    was_cut_short = False
    evaluates = step == 0 or is_last or is_due(step, config.eval_every)
    if run.eval_rows and evaluates and progress.evaluated != step and action != "stop":
        was_cut_short = not evaluate_and_log(run, writer, step)
        action = "stop" if was_cut_short else action
    is_best = progress.best_step == step
    save_steps = save_interval(config).steps
    saves = is_last or is_best or action is not None or is_due(step, save_steps)
    if saves and run.saved_step < step:  # a resumed run begins with a saved step
        save_checkpoint(run, step)
    if evaluates or saves:
        run.step_start = clock()  # evaluating and saving do not count as time of a step
    if action == "stop":
        stop_run(run, step, was_cut_short)


def is_due(step: int, every: int | None) -> bool:
    """Return True if what happens every `every` steps (None, 0: never) is due after this step."""
    return bool(every and step % every == 0)


# ------------------------------------------------------------------------------------------------
# A training step
# ------------------------------------------------------------------------------------------------


def train_step(run: Run, step: int) -> tuple[Metrics, str | None]:
    """Run one optimizer step. Returns its metrics, and the action that any rank requested: "save",
    "stop" or None. All ranks must call this.

    The loss is the sum over the tokens in the loss, or over preference rows, divided by their
    number, both over all ranks, so it does not depend on how many ranks there are.
    """
    config = run.config
    rows, micro_batches = run.prefetched or rows_of_step(run, step)
    counts = step_counts(run, rows, micro_batches)  # before the list is emptied
    local_sums = accumulate_gradient(run, rows, micro_batches)
    sum_gradient(run)
    # one exchange: the sums of the losses, the gradient norm, what any rank requests
    stats = gather_step_stats(run.model, run.adapter, local_sums, pending_action(run))
    clip_gradient(run, stats.grad_norm)
    # prepared on the CPU while the GPU computes
    run.prefetched = rows_of_step(run, step + 1) if step < config.max_steps else None
    stats = stats.on_host()  # waits for the GPU, once a step
    metrics = mean_metrics(stats.sums.tolist(), rows)
    norm = float(stats.grad_norm)
    stop_if_diverged(run, step, metrics["loss"], norm)
    lr = learning_rate(step, config)
    optimizer_step(run.optimizer, run.adapter, lr)
    run.model.write_token_rows()  # of --trainable_tokens, into the tables that forward reads
    record = {"step": step, **metrics, "learning_rate": lr, "grad_norm": norm, **counts,
              **step_performance(run, counts["tokens"]),
              **dict(zip(BALANCE_METRICS, stats.balance.tolist()))}
    return record, ACTIONS[int(stats.action)]


def step_counts(run: Run, rows: Rows, micro_batches: list[MicroBatch]) -> Metrics:
    """Return the metrics that tell how large a step is, over all ranks. Every rank knows the
    lengths of all rows, and all ranks pad to one size, so this needs no communication."""
    tokens = int(rows.lengths.sum())
    computed_tokens = sum(len(x.input_ids) for x in micro_batches) * dist.get_world_size()
    return {"rows": len(rows), "tokens": tokens,
            "loss_tokens": int(rows.n_loss_tokens.sum()),
            "micro_batches": len(micro_batches) * run.model.context_group.n_context_groups,
            "packing_efficiency": tokens / computed_tokens}


def step_performance(run: Run, tokens: float) -> Metrics:
    """Return the metrics of the time and memory that a step of so many tokens took. The time of the
    next step begins here."""
    now = clock()
    seconds = now - run.step_start
    run.step_start = now
    run.status.longest_step = max(run.status.longest_step, seconds)
    return {"seconds": seconds,
            "tokens_per_second_per_gpu": tokens / seconds / dist.get_world_size(),
            "peak_memory_gib": memory_gib(run.device, run.plan.uses_cuda_graphs)[1]}


def accumulate_gradient(run: Run, rows: Rows, micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Run forward and backward of all micro-batches of a step, and empty the list. Returns this
    rank's sums of compute_loss(). All ranks must call this."""
    plan = run.plan
    sums = []
    # inputs of the loss that depend on all rows of the step: KTO's KL estimate, which takes one
    # more forward; ORPO's weights of tokens
    global_inputs = global_loss_inputs(run.model, rows, [rows])
    while micro_batches:
        # not a for loop: frees each one's memory after use
        micro_batch = with_global_inputs(micro_batches.pop(0), global_inputs)
        if plan.uses_fsdp and plan.shard_group_size < dist.get_world_size():
            # copies of the model sum their gradients once per step, not once per micro-batch
            run.model.set_requires_all_reduce(not micro_batches)
        sums.append(forward_backward(run, micro_batch, 1 / rows.loss_divisor))
    return sum(sums, start=torch.zeros_like(sums[0]))


def rows_of_step(run: Run, step: int) -> tuple[Rows, list[MicroBatch]]:
    """Return the rows of a step, and this rank's micro-batches of them."""
    rows = run.rows.select(run.sampler.indices(step))
    step_seed = hash_ints(torch.tensor(run.config.seed * 1_000_003 + step))  # seeds dropout
    micro_batch_format = run.model.micro_batch_format
    return rows, [make_micro_batch(rows, micro_step, micro_batch_format, step_seed)
                  for micro_step in micro_steps_of(rows, micro_batch_format)]


def forward_backward(run: Run, micro_batch: MicroBatch, loss_weight: float) -> torch.Tensor:
    """Run forward, and backward of `loss_weight` times the loss, of one micro-batch. Gradients
    accumulate in adapter.grad, one vector, of which each layer's gradients are views. Returns the
    sums of compute_loss(). All ranks must call this."""
    # None: no graph yet; replay() captures one when a shape occurs for the second time
    if run.cuda_graphs and (sums := run.cuda_graphs.replay(micro_batch, loss_weight)) is not None:
        return sums
    loss, sums = compute_loss(run.model, micro_batch, run.config)
    (loss * loss_weight).backward()
    return sums


def compute_loss(model: Model, micro_batch: MicroBatch,
                 config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of one micro-batch, summed over its tokens or preference rows; and this
    rank's share of the sums from which the mean metrics are computed, fp64 [k], the loss first. All
    ranks must call this.

    The names of the sums, in this order, are METRICS in fsdp_qlora/model/preference_loss.py;
    mean_metrics() in fsdp_qlora/run/step_stats.py divides them. accumulate_gradient() divides the
    loss, by Rows.loss_divisor. With plan.uses_cuda_graphs this function is captured: it must not
    wait for the GPU, nor read a Python value that changes between steps.
    """
    token_losses = model(micro_batch)  # cross-entropy of each token in the loss, fp64 [tokens]
    if config.loss != "sft":
        return preference_loss(token_losses, micro_batch, config, model.context_group.size)
    loss = token_losses.sum()
    return loss, loss.detach()[None]


def sum_gradient(run: Run) -> None:
    """Sum over the ranks what FSDP2 has not summed: the whole gradient without FSDP2, else that of
    the rows of --trainable_tokens, which FSDP2 does not know. All ranks must call this."""
    adapter = run.adapter
    if dist.get_world_size() == 1:
        return
    if not run.plan.uses_fsdp:
        dist.all_reduce(adapter.grad)
    elif adapter.n_token_row_weights:
        dist.all_reduce(adapter.token_part(adapter.grad))


def clip_gradient(run: Run, norm: torch.Tensor) -> None:
    """Scale the gradient, whose norm is `norm`, down to --max_grad_norm."""
    run.adapter.grad.mul_((run.config.max_grad_norm / norm).clamp(max=1))


def pending_action(run: Run) -> int:
    """Return the action that this rank requests of all ranks after the step, an index into ACTIONS.
    """
    run.status.check_time()
    action = None
    if clock() > run.save_due:
        action = "save"
    if run.status.stop_reason:
        action = "stop"
    return ACTIONS.index(action)


# ------------------------------------------------------------------------------------------------
# Evaluation
# ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(run: Run) -> Metrics | None:
    """Return the metrics over all evaluation rows, without dropout, {name in metrics.jsonl: value};
    None if the run was asked to stop meanwhile. All ranks must call this."""
    assert run.eval_rows, "there is nothing to evaluate on"
    sums: Any = 0
    rows = run.eval_rows
    n_seen = 0
    batches = functools.partial(evaluation_batches, rows, run.config.batch_size, run.status)
    global_inputs = global_loss_inputs(run.model, rows, (batch for _, batch in batches()))
    for _, batch in batches():
        n_seen += len(batch)
        for micro_batch, _ in evaluation_micro_batches(run.model, batch):
            micro_batch = with_global_inputs(micro_batch, global_inputs)
            sums += compute_loss(run.model, micro_batch, run.config)[1]
    reshard_all(run.model)  # no backward has freed what the last forward gathered
    if n_seen < len(rows):  # evaluation_batches() ended early, because a stop was requested
        return None
    return mean_metrics(all_gather(sums).sum(0).tolist(), rows, "eval_")


def evaluate_and_log(run: Run, writer: MetricsWriter | None, step: int) -> bool:
    """Evaluate after `step`, and record the result. Returns False if the run was asked to stop
    meanwhile; then nothing is recorded. All ranks must call this."""
    progress = run.progress
    started = clock()
    if (metrics := evaluate(run)) is None:
        return False
    loss = metrics["eval_loss"]
    is_best = progress.best_loss is None or loss < progress.best_loss
    progress.evaluated = step
    if is_best:
        progress.best_loss = loss
        progress.best_step = step
    seconds = clock() - started
    samples = generate_samples(run, writer.pace if writer else None)
    log_evaluation(step, run.config.max_steps, metrics, samples, is_best and step > 0)
    if writer:
        assert run.eval_rows, "it was evaluated"
        n_tokens = int(run.eval_rows.n_loss_tokens.sum())
        writer.write_record({"step": step, **metrics, "eval_loss_tokens": n_tokens,
                             "eval_seconds": seconds,
                             **({"eval_samples": samples} if samples else {})})
    return True


# ------------------------------------------------------------------------------------------------
# Saving
# ------------------------------------------------------------------------------------------------


def save_checkpoint(run: Run, step: int) -> None:
    """Gather adapter and optimizer state on rank 0, which writes checkpoint-<step>. If writing
    fails, log it and try again later. All ranks must call this."""
    run.status.extend_deadline()
    started = clock()
    name = checkpoints.checkpoint_path(run.directory, step).name
    torch.get_device_module(run.device).synchronize()  # CPU reads of paged state need this
    weights = run.adapter.gather_weights()
    merge_check = run.merge_check.tensors(run.model)  # by a forward of a few rows
    optimizer_state = run.adapter.gather_state(sharded_state(run.optimizer))
    try:
        on_rank_0(checkpoints.write_checkpoint, run, step, weights, optimizer_state, merge_check,
                  causes=checkpoints.DISK_ERRORS)
    except RunEnd as e:
        run.save_due = clock() + RETRY_SECONDS
        log(f"warning: could not save {name}: {e}. If training continues, the next attempt is in"
            f" {RETRY_SECONDS} s")
        return
    run.saved_step = step
    run.save_due = clock() + save_interval(run.config).seconds
    run.status.checkpoint = name
    log(f"saved {name} ({clock() - started:.1f} s)")
    run.status.write("training")
    on_rank_0(checkpoints.drop_checkpoints, run, step, causes=checkpoints.DISK_ERRORS)


def save_final_adapter(run: Run) -> None:
    """Gather the adapter on rank 0 and save it, with a plot of the losses. All ranks must call
    this."""
    run.status.enter("saving")
    weights = run.adapter.gather_weights()
    merge_check = run.merge_check.tensors(run.model)  # by a forward of a few rows
    on_rank_0(checkpoints.write_final_adapter, run, weights, merge_check,
              causes=checkpoints.DISK_ERRORS)
    on_rank_0(draw_losses, run.directory)


if __name__ == "__main__":
    gc.enable()
    end_process(main())
