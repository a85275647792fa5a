"""Turn a config.json into an Architecture, or explain why it is not supported.

    make_architecture()
      check_model()              every field of config.json is known
      fill_spec()                "config.x" -> its value
      make_moe(), make_per_layer_inputs()
                                 the specs of experts and of per-layer inputs, None without them
      make_layer_kinds()         what each layer is (layer_kinds.py)
      make_factors(), make_linears(), make_names()
                                 {field of Architecture: value}

`c` is the text config in all functions here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.families import ADAPTER_FORMS_INSIDE, FAMILIES, MULTIMODAL, TEXT_MODULES
from fsdp_qlora.pretrained.family_specs import (
    ACTIVATIONS, LAYER_TYPES, ArchitectureFields, Family, LinearShape, MoESpec,
    PerLayerInputsSpec)
from fsdp_qlora.pretrained.layer_kinds import Rope, kv_sources, make_layer_kinds, routed_layers
from fsdp_qlora.quant.blocks import BLOCKSIZE

# Fields of config classes that make_architecture() reads for every family, or that change no
# output. Any other field that no spec names must have its default value, else it could switch on
# an unsupported feature.
KNOWN_FIELDS = set("""vocab_size hidden_size intermediate_size num_hidden_layers head_dim dtype
    num_attention_heads num_key_value_heads tie_word_embeddings rope_parameters layer_types
    sliding_window use_sliding_window max_window_layers sliding_window_pattern no_rope_layers
    no_rope_layer_interval layer_rope_theta max_position_embeddings
    original_max_position_embeddings use_cache initializer_range pad_token_id bos_token_id
    eos_token_id eod_token_id transformers_version architectures output_hidden_states return_dict
    id2label label2id problem_type pretraining_tp mlp_only_layers mlp_layer_types
    decoder_sparse_step moe_layer_interval moe_layer_end_index router_aux_loss_coef
    output_router_logits num_mtp_layers
    block_multiple_of block_ffn_dim_multiplier
    """.split())
# fields of Architecture with the linears of experts
EXPERT_FIELDS = "shared_gate_up", "shared_down", "expert_latent", "expert_gate_up", "expert_down"
# fields of a config whose values may differ between layers
BY_LAYER = {"head_dim", "num_attention_heads", "num_key_value_heads"}
AnySpec = TypeVar("AnySpec")  # Family, or a spec in its fields


def text_config(model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's config inside a multimodal one; else the config itself."""
    return model_config.text_config if model_config.model_type in MULTIMODAL else model_config


def quantization_config_of(model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return the quantization_config of a config.json or of the text config in it, as in Kimi
    K2.5's, which describes the format of the files; {} if there is none."""
    settings = (getattr(x, "quantization_config", None)
                for x in (model_config, text_config(model_config)))
    return dict(next(filter(None, settings), {}))


def check_model(model_config: PreTrainedConfig) -> None:
    """Raise ValueError for a model that is not in the table or that its Family cannot express."""
    outer, c = model_config.model_type, text_config(model_config)
    name = outer if c is model_config else f"{outer} with {c.model_type}"
    if c.model_type not in (MULTIMODAL.get(outer) or FAMILIES):
        words = {"num_local_experts": "a router not known, ",
                 "num_experts": "a router not known, ", "is_encoder_decoder": ""}
        why = [f"{words[x]}{x}={getattr(c, x)}" for x in words if getattr(c, x, None)]
        why += sorted(set(getattr(c, "layer_types", None) or ()) - LAYER_TYPES)
        why = f" ({', '.join(why)})" if why else ""
        raise ValueError(f"model_type {name} is not supported{why}: use one of"
                         f" {', '.join([*FAMILIES, *MULTIMODAL])}")
    if getattr(c, "is_causal", True) is False:
        raise ValueError(f"{name}: is_causal=False is not supported: only causal attention is")
    if other := sorted((c.per_layer_attributes or set()) - BY_LAYER):
        raise ValueError(f"{name}: layers that differ in {', '.join(other)} are not supported")
    c = c.per_layer_config[0]
    family = FAMILIES[c.model_type]
    known = {value.removeprefix("config.")
             for spec in specs_of(family) for value in vars(spec).values()
             if isinstance(value, str) and value.startswith("config.")}
    known |= KNOWN_FIELDS.union(family.unused_fields)
    for field in dataclasses.fields(c):
        value, default = getattr(c, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = family.must_be.get(field.name, default)
        if field.name not in known and value != default and (value or default):
            raise ValueError(f"{name}: {field.name}={value} is not supported, only {default}")


def specs_of(spec: Any) -> Iterator[Any]:
    """Yield a spec, and the specs in its fields: a family's experts, mixers and so on."""
    yield spec
    for value in vars(spec).values():
        for inner in value.values() if isinstance(value, dict) else (value,):
            if dataclasses.is_dataclass(inner):
                yield from specs_of(inner)


def make_architecture(model_config: PreTrainedConfig) -> Architecture:
    """Return the Architecture of a config from AutoConfig. Raises ValueError if no spec can
    express it."""
    check_model(model_config)
    c = text_config(model_config)
    layer_configs = list(c.per_layer_config)
    c = layer_configs[0]  # stands for all layers, except in BY_LAYER
    spec = FAMILIES[c.model_type]
    family = fill_spec(spec, c)
    if family.activation not in ACTIVATIONS:
        raise ValueError(f"{spec.activation.removeprefix('config.')} {family.activation} is not"
                         f" supported: only {', '.join(ACTIVATIONS)}")
    family = dataclasses.replace(family, moe=make_moe(c, family, model_config.model_type))
    layer_kinds, ropes = make_layer_kinds(layer_configs, family)
    heads = layer_kinds[0].heads
    in_mxfp4 = quantization_config_of(model_config).get("quant_method") == "mxfp4"
    values = {field.name: getattr(family, field.name)
              for field in dataclasses.fields(ArchitectureFields)}
    values |= make_factors(c, family, heads.dim, ropes) | dict(
        keys_are_values=heads.keys_are_values, per_layer_inputs=make_per_layer_inputs(c, family),
        final_norm_kind=family.final_norm_kind or family.norm_kind,
        post_norm_eps=family.norm_eps if family.post_norm_eps is None else family.post_norm_eps,
        attention_dropout=family.attention_dropout or 0.0)
    if not (family.qk_norm and family.qk_norm_if):
        values |= dict(qk_norm=None, q_norm=None, k_norm=None)
    if not family.post_norm_if:
        values |= dict(attention_post_norm=None, mlp_post_norm=None)
    return Architecture(
        **values, **make_linears(c, family, in_mxfp4), **make_names(model_config, family),
        family=c.model_type, n_layers=c.num_hidden_layers, hidden_size=c.hidden_size,
        n_heads=c.num_attention_heads, n_kv_heads=heads.n_kv, head_dim=heads.dim,
        vocab_size=c.vocab_size, ropes=ropes, layer_kinds=layer_kinds,
        kv_sources=kv_sources(c, family),
        # mistral3's outer flag is True by default, though released models are not tied; Qwen3-VL's
        # text config may lack the flag, Voxtral's outer one does
        tied=getattr(c, "tie_word_embeddings", True) and getattr(
            model_config, "tie_word_embeddings", False),
        added_rows=0)


def make_names(model_config: PreTrainedConfig, family: Family) -> dict[str, Any]:
    """Return {field of Architecture: value} of the fields about names in files."""
    prefixes, lm_head_names = [*family.prefixes], ["lm_head.weight"]
    if model_config.model_type in MULTIMODAL:
        module = TEXT_MODULES.get(model_config.model_type, "model.language_model")
        prefixes = [f"{module}.", *(f"language_model.{prefix}" for prefix in family.prefixes),
                    "model.language_model.model.", "model."]  # HyperCLOVA X's, Qwen2-VL's files
        lm_head_names += ["language_model.lm_head.weight", "model.language_model.lm_head.weight"]
    return dict(
        module_prefix=prefixes[0], checkpoint_prefixes=prefixes, lm_head_names=lm_head_names)


def make_per_layer_inputs(c: PreTrainedConfig, family: Family) -> PerLayerInputsSpec | None:
    """Return Architecture.per_layer_inputs."""
    spec = family.per_layer_inputs
    if not spec or not spec.size:
        return None
    if family.moe:
        raise ValueError(f"hidden_size_per_layer_input={spec.size} is not supported in a model"
                         " with experts")
    if spec.vocab_size != c.vocab_size:
        raise ValueError(f"vocab_size_per_layer_input={spec.vocab_size} is not supported, only"
                         f" vocab_size={c.vocab_size}")
    return spec


def make_factors(
    c: PreTrainedConfig, family: Family, head_dim: int, ropes: list[Rope]
) -> dict[str, Any]:
    """Return {field of Architecture: value} of the factors of scores, embeddings, sums and logits.
    """
    scale, divisor = family.attention_scale, family.logits_divisor
    if family.query_scalar or scale is None:
        scale = (family.query_scalar or head_dim) ** -0.5 * family.query_factor
    scale *= family.key_multiplier * family.attention_in_multiplier**2
    factors: dict[str, Any] = {
        "attention_scale": scale * yarn_factor(ropes[0]) if family.mla else scale}
    if family.sqrt_embedding:
        factors["embedding_multiplier"] = c.hidden_size**0.5
    if family.depth_scale is not None:
        factors["residual_multiplier"] = family.depth_scale / c.num_hidden_layers**0.5
    if family.base_hidden_size:
        divisor = c.hidden_size / family.base_hidden_size
    if family.query_temperature:
        factors["query_temperature"] = (
            ropes[0]["llama_4_scaling_beta"], ropes[0]["original_max_position_embeddings"])
    return factors | {"logits_multiplier": family.logits_multiplier / divisor}


def yarn_factor(rope: Rope) -> float:
    """Return the factor by which DeepSeek's yarn multiplies attention_scale."""
    scale, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    if rope["rope_type"] == "default" or not scale or factor <= 1:
        return 1.0
    return float((0.1 * scale * math.log(factor) + 1) ** 2)


def mlp_width(c: PreTrainedConfig, family: Family) -> int:
    """Return the width of gate and up, each, in layers without experts."""
    inner = family.intermediate_size
    if inner is None:  # Cohere's layers without experts may have no width of their own
        inner = getattr(c, "intermediate_size", None)
    if inner is None:
        name = str(FAMILIES[c.model_type].intermediate_size).removeprefix("config.")
        raise ValueError(f"the config of {c.model_type} has no {name}: its Family in families.py"
                         " needs another intermediate_size")
    if not family.two_thirds_wide:
        return int(inner)
    wanted = int((c.block_ffn_dim_multiplier or 1) * int(2 * inner / 3))
    return math.ceil(wanted / c.block_multiple_of) * int(c.block_multiple_of)


def fill_spec(spec: AnySpec, c: PreTrainedConfig) -> AnySpec:
    """Return the spec with the text config's values in place of "config.x"; None if the config
    declares no such field. A list of one value per layer, all equal, becomes that value."""
    values, declared = dict(vars(spec)), {field.name for field in dataclasses.fields(c)}
    for key, value in values.items():
        if dataclasses.is_dataclass(value):
            values[key] = fill_spec(value, c)
        elif isinstance(value, dict):  # of mixers; or of names and values, which stay
            values[key] = {name: fill_spec(inner, c) if dataclasses.is_dataclass(inner) else inner
                           for name, inner in value.items()}
        elif str(value).startswith("config."):
            name = value.removeprefix("config.")
            value = getattr(c, name) if name in declared else None
            is_uniform = isinstance(value, list) and value and value == value[:1] * len(value)
            values[key] = value[0] if is_uniform else value
    return type(spec)(**values)


def make_moe(c: PreTrainedConfig, family: Family, outer_type: str) -> MoESpec | None:
    """Return Architecture.moe; None if no layer has experts. `outer_type`: model_type of the whole
    config."""
    moe = family.moe
    if not moe or not moe.experts_if or moe.shared_mlp and moe.n_experts == 0:
        return None
    sizes = moe.n_experts, moe.top_k, moe.expert_size
    if not all(isinstance(n, int) and n > 0 for n in sizes) or moe.top_k > moe.n_experts:
        raise ValueError(f"{sizes[0]} experts, {sizes[1]} for a token, of size {sizes[2]} are not"
                         " supported")
    if not any(routed_layers(c, family)):
        return None
    if moe.groups_if not in (True, "group_limited_greedy"):
        moe = dataclasses.replace(moe, n_expert_groups=1)
    if moe.softmax_of_chosen and moe.score_func == "softmax":
        moe = dataclasses.replace(moe, norm_topk_prob=True, rounded_scores=False)
    if moe.score_func not in ("softmax", "sigmoid") or moe.combination not in ("sum", "average"):
        raise ValueError(f"experts with {moe.score_func} scores and the {moe.combination} with"
                         " shared experts are not supported")
    adapter_form = ADAPTER_FORMS_INSIDE.get(outer_type, moe.adapter_form)
    return dataclasses.replace(moe, adapter_form=adapter_form)


def make_linears(c: PreTrainedConfig, family: Family, in_mxfp4: bool) -> dict[str, Any]:
    """Return {field of Architecture: value} of the linears of MLPs and of experts. `in_mxfp4`: the
    files have the experts in MXFP4."""
    hidden, inner, bias = c.hidden_size, mlp_width(c, family), family.mlp_bias
    n_out = inner * (1 + family.gated) // len(family.mlp_in)
    gate_up = [LinearShape(name, n_out, hidden, bias) for name in family.mlp_in]
    down = [LinearShape(family.mlp_out, hidden, inner, bias)]
    linears: dict[str, list[LinearShape]] = {"gate_up": gate_up, "down": down}
    linears |= {field: [] for field in EXPERT_FIELDS}
    moe = family.moe
    if not moe:
        return linears
    if shared_size := (moe.shared_size or 0) * (moe.n_shared or 0):
        linears["shared_gate_up"], linears["shared_down"] = mlp_linears(
            moe.shared_prefix, shared_size, hidden, family.gated, bias)
    if moe.shared_mlp and inner:  # Granite's may have no shared expert
        linears["shared_gate_up"], linears["shared_down"] = gate_up, down
    if size := moe.latent_size:
        into, back = moe.latent_linears
        linears["expert_latent"] = [
            LinearShape(into, size, hidden, bias), LinearShape(back, hidden, size, bias)]
    experts = [expert_linears(f"{moe.experts_prefix}.{i}", family, moe, hidden, in_mxfp4)
               for i in range(moe.n_experts)]
    return linears | {"expert_gate_up": [linear for gate_up, _ in experts for linear in gate_up],
                      "expert_down": [linear for _, down in experts for linear in down]}


def mlp_linears(
    stem: str, inner: int, outer: int, gated: bool, bias: bool
) -> tuple[list[LinearShape], list[LinearShape]]:
    """Return the linears of an MLP that read its input, and those that compute its output."""
    names = ("gate", "up") if gated else ("up",)
    return ([LinearShape(f"{stem}.{x}_proj", inner, outer, bias) for x in names],
            [LinearShape(f"{stem}.down_proj", outer, inner, bias)])


def expert_linears(
    stem: str, family: Family, moe: MoESpec, hidden: int, in_mxfp4: bool
) -> tuple[list[LinearShape], list[LinearShape]]:
    """Return mlp_linears() of the expert whose names begin with `stem`."""
    inner = moe.expert_size
    if not moe.one_gate_up:
        return mlp_linears(stem, inner, moe.latent_size or hidden, family.gated, False)
    if in_mxfp4 and (hidden % BLOCKSIZE or inner % BLOCKSIZE):
        raise ValueError(f"MXFP4 with rows of {hidden} and {inner} weights is not supported, only"
                         f" with multiples of {BLOCKSIZE}")
    return ([LinearShape(f"{stem}.gate_up_proj", 2 * inner, hidden, False, in_mxfp4)],
            [LinearShape(f"{stem}.down_proj", hidden, inner, False, in_mxfp4)])
