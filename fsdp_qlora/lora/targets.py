"""The linears that get an adapter, by --target_modules, and PEFT's LoraConfig for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from peft import LoraConfig

from fsdp_qlora.config import Config
from fsdp_qlora.log import log
from fsdp_qlora.lora.peft_names import expert_settings, make_lora_config, token_row_settings
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.tensor_names import renamed


ADAPTER_LABELS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA"}  # in the log


def adaptable_linears(arch: Architecture) -> list[str]:
    """Return the names, in a layer, of the linears that --target_modules can name: all but the
    experts and those that PEFT refuses."""
    experts = set(arch.expert_linear_names())
    return [x.name for x in arch.all_linears()
            if x.name not in experts and not x.name.endswith(arch.peft_refuses)]


def adapted_linears(arch: Architecture, target_modules: Iterable[str]) -> list[str]:
    """Return the names, in a layer, of the linears that --target_modules means. "all-linear" means
    all linears; in an MoE model those of attention and other mixers, except names that PEFT 0.21
    takes for experts' (gate_proj). "experts" means all experts. Any other word is the end of a
    name."""
    adaptable = adaptable_linears(arch)
    ends, every = tuple(f".{target}" for target in target_modules), set()
    if "all-linear" in target_modules and arch.moe:
        expert_names = {name.rsplit(".", 1)[-1] for name in arch.expert_linear_names()}
        every = {x.name for kind in dict.fromkeys(arch.layer_kinds)
                 for group in arch.mixer_groups(kind).values() for x in group
                 if x.name.rsplit(".", 1)[-1] not in expert_names}
    elif "all-linear" in target_modules:
        every = {*adaptable}
    names = [name for name in adaptable if name in every or f".{name}".endswith(ends)]
    return names + arch.expert_linear_names() if "experts" in target_modules else names


def resolve_adapter(
    arch: Architecture, config: Config, base_name: str, token_ids: Sequence[int] = (),
) -> tuple[LoraConfig, list[str]]:
    """Return PEFT's LoraConfig, and the names, within a layer, of the linears that get an adapter.
    `token_ids`: the tokens whose rows are trained. Raises ValueError."""
    if config.trainable_tokens and (arch.per_layer_inputs or arch.embedding_norm):
        raise ValueError("--trainable_tokens: this model's embedding does more than PEFT computes"
                         f" with trained rows ({arch.family}): drop the flag")
    if config.trainable_tokens and arch.lm_head_bias:
        raise ValueError("--trainable_tokens: PEFT 0.21 ignores the bias of an lm_head with trained"
                         f" rows ({arch.family}): drop the flag")
    requested = requested_targets(arch, config)
    log(f"adapter: {ADAPTER_LABELS[config.adapter]}, rank {config.lora_rank}, alpha"
        f" {config.lora_alpha}, on {' '.join(requested)}")
    adapted = adapted_linears(arch, config.target_modules)
    check_lora_rank(arch, config.lora_rank, adapted)
    lora_config = make_lora_config(
        arch, config.adapter_settings, adapted,
        target_modules=peft_targets(arch, config, requested),
        task_type="CAUSAL_LM", base_model_name_or_path=base_name,
        trainable_token_indices=token_row_settings(arch, token_ids))
    return lora_config, adapted


def check_lora_rank(arch: Architecture, rank: int, adapted: list[str]) -> None:
    """Raise ValueError for a rank that no adapted linear can use, and log the linears that cannot
    use all of it. PEFT accepts any rank, but no change of a linear has a higher rank than its
    smaller side."""
    sides = {x.name.rsplit(".", 1)[-1]: min(x.out_features, x.in_features)
             for x in arch.all_linears() if x.name in adapted}
    if rank > (most := max(sides.values())):
        raise ValueError(f"--lora_rank {rank}: a rank above {most} adds nothing to these linears,"
                         f" as the smaller side of none is longer; use at most {most}; 8 to 64 are"
                         " usual")
    if small := [f"{name} ({side})" for name, side in sorted(sides.items()) if rank > side]:
        log(f"note: --lora_rank {rank} is more than the smaller side of {', '.join(small)}; the"
            " part above adds nothing there")


def requested_targets(arch: Architecture, config: Config) -> list[str]:
    """Return the words of --target_modules, each of which names linears of the model; all-linear is
    replaced by the names that it means. Raises ValueError for other words."""
    experts, names = arch.expert_linear_names(), adaptable_linears(arch)
    default = adapted_linears(arch, ["all-linear"])
    short = sorted({name.rsplit(".", 1)[-1] for name in default})
    others = [name for name in names if name not in default]
    expert_names = {name.rsplit(".", 1)[-1] for name in experts}
    choices = ", ".join([*short, *others, *["experts"] * bool(experts), "all-linear"])
    requested = list(dict.fromkeys(name for word in config.target_modules for name in (
        short if word == "all-linear" else [word])))
    for word in requested:
        if word == "experts" and experts:
            continue
        found = [name for name in names if f".{name}".endswith(f".{word}")]
        if word in expert_names:
            raise ValueError(f"--target_modules {word}: PEFT uses this name for all experts, which"
                             f" --target_modules experts adapts; choose from {choices}")
        if not found:
            raise ValueError(f"--target_modules {word}: no such linear in the decoder layers;"
                             f" choose from {choices}")
        ends = {name.rsplit(".", 1)[-1] for name in found}
        if ends & expert_names and arch.moe and arch.moe.adapter_form == "modules":
            log(f"warning: --target_modules {word}: PEFT 0.21 cannot load adapters on {found[0]};"
                " vLLM reads them by their names")
    return requested


def peft_targets(arch: Architecture, config: Config, requested: list[str]) -> list[str] | str:
    """Return PEFT's target_modules for requested_targets(). Raises ValueError."""
    targets = requested
    if "experts" in requested:
        refuse_expert_adapters(arch, config)
        experts, renames = arch.expert_linear_names(), arch.moe.renames if arch.moe else ()
        leaves = {renamed(name, renames).rsplit(".", 1)[-1] for name in experts}
        has_own_settings = expert_settings(arch, config.adapter_settings, experts)
        targets = sorted({*requested} - {"experts"} | (set() if has_own_settings else leaves))
        if arch.expert_down[0].mxfp4:
            log("warning: --target_modules experts: PEFT 0.21 finds no experts in an MXFP4 model."
                " Load it with Mxfp4Config(dequantize=True), or merge, to bf16")
    if arch.module_prefix == "model." or not targets:
        return targets
    # a vision tower may have linears with the same names
    either = "|".join(re.escape(target) for target in targets)
    return rf"{re.escape(arch.module_prefix)}layers\.\d+\..*\b({either})"


def refuse_expert_adapters(arch: Architecture, config: Config) -> None:
    """Raise ValueError if the adapters that the flags request are not possible on experts."""
    if config.adapter == "dora" or config.lora_dropout:
        raise ValueError("--target_modules experts: their adapters have neither DoRA nor dropout,"
                         " here as in PEFT")
    if config.lora_rank % 8:
        raise ValueError(f"--lora_rank {config.lora_rank}: adapters of experts need a multiple of"
                         " 8: torch's grouped matmuls need rows of a multiple of 16 bytes")
    if config.adapter == "rslora" and not (arch.moe and arch.moe.one_gate_up):
        raise ValueError("--target_modules experts: with --adapter rslora PEFT 0.21 would count"
                         " gate and up 1.41 times: use lora")
