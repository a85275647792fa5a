"""--plan_for: the plan of a run on GPUs that are not here, by their data sheets."""

from __future__ import annotations

import dataclasses
import time

import torch
import torch.distributed as dist

from fsdp_qlora.config import Config
from fsdp_qlora.data.prepare_data import prepare_data
from fsdp_qlora.data.rows import Rows, random_rows
from fsdp_qlora.data.sampling import ShuffledSampler
from fsdp_qlora.kernels.attention import architectures_by_attention_type
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.plan import Plan
from fsdp_qlora.planner.gpu_specs import HOST_GIB, GPUSpec, gpu_machine, parse_gpus
from fsdp_qlora.planner.search import choose_plan
from fsdp_qlora.planner.search_inputs import (
    KernelFacts, SearchInputs, make_workload, why_no_capture)
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.model_directory import find_model, read_model_config
from fsdp_qlora.ranks import on_rank_0, raise_on_all_ranks
from fsdp_qlora.run.base_model import read_model_info
from fsdp_qlora.run.resolve import resolve_config, resolve_max_seq_len, resolve_steps
from fsdp_qlora.run.startup_log import log_plan_elsewhere
from fsdp_qlora.run.status import Status


def print_plan_for(user_config: Config, optimizer_bytes_per_weight: float, status: Status) -> None:
    """Print the plan of the run on the GPUs that --plan_for names, for the rows of --dataset if
    there is one. All ranks must call this."""
    with raise_on_all_ranks():
        config = resolve_config(user_config, dist.get_world_size())
    status.enter("model")
    rows, eval_rows = None, None
    if config.dataset:
        config, base = read_model_info(config, config.model or "")
        status.enter("data")
        template_date = on_rank_0(time.strftime, "%Y-%m-%d")
        rows, eval_rows = prepare_data(
            config, base.directory, base.tokenizer, base.arch.vocab_size, template_date)
        config = resolve_steps(config, len(rows))
        status.enter("model")
    with raise_on_all_ranks():
        log_plan_elsewhere(
            user_config, *plan_elsewhere(config, optimizer_bytes_per_weight, rows, eval_rows))


def expects_attention_reuse(gpu: GPUSpec, arch: Architecture) -> bool:
    """Return what can_reuse_attention_results() is expected to return on this GPU."""
    return (gpu.sdpa_is_cudnn and [*architectures_by_attention_type(arch)] == ["full"]
            and not (arch.attention_softcap or arch.sinks or arch.attention_dropout)
            and all(heads.dim <= 128 for heads in arch.layer_heads))


def plan_elsewhere(
    config: Config, optimizer_bytes_per_weight: float = 0.0, rows: Rows | None = None,
    eval_rows: Rows | None = None,
) -> tuple[Config, Plan, int]:
    """Return the Config with --max_seq_len filled in, the plan of a run on the GPUs that --plan_for
    names, and the bytes of each GPU. Without `rows` it plans for rows of --max_seq_len tokens.
    Reads only config.json of the model. Raises ValueError."""
    world_size, _, gpu = parse_gpus(config.plan_for or "")
    memory_limit = int((config.memory_limit_gib or gpu.free_gib) * 2**30)
    machine = gpu_machine(gpu, config.host_memory_gib or HOST_GIB)
    base = find_model(config.model or "", "config")
    config = dataclasses.replace(config, random_weights=True)
    model_config, arch = read_model_config(base, config)
    config = resolve_max_seq_len(config, model_config, arch)
    _, adapted = resolve_adapter(arch, config, config.model or "")
    specs = make_layer_specs(arch, adapted, config.adapter_settings)
    sampler = ShuffledSampler(rows or random_rows(arch.vocab_size, config), config)
    workload = make_workload(config, sampler, eval_rows, world_size)
    facts = KernelFacts(why_no_capture=why_no_capture(arch, machine),
                        can_reuse_attention_results=expects_attention_reuse(gpu, arch))
    search = SearchInputs(config, arch, specs, workload, memory_limit, machine,
                          torch.device("cuda"), facts, optimizer_bytes_per_weight)
    return config, choose_plan(search), memory_limit
