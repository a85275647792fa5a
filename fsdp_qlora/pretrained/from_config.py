"""Turn a config.json into an Architecture, or explain why it is not supported.

    make_architecture()
      check_model()              every field of config.json is known
      fill_record()              "config.x" -> its value
      make_heads(), make_positions(), make_factors(), make_kv_sources(),
      make_limits(), make_per_layer(), make_experts(), make_names()
                                 {field of Architecture: value}, or the value of one field

`c` is the text config in all functions here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from fsdp_qlora.pretrained.architecture import ActivationLimits, Architecture, Heads, rotary_dim
from fsdp_qlora.pretrained.families import ADAPTERS_INSIDE, FAMILIES, MULTIMODAL, TEXT_MODULES
from fsdp_qlora.pretrained.records import (
    ACTIVATIONS, LAYER_TYPES, Family, LinearShape, MoERecord, PerLayerInputs)
from fsdp_qlora.quant.blocks import BLOCK

ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
# mrope's keys are allowed: with text only, its three positions are equal, as in ordinary rotary
ROPE_KEYS = set("""rope_type type rope_theta factor partial_rotary_factor alpha attention_factor
    original_max_position_embeddings max_position_embeddings beta_fast beta_slow mscale truncate
    mscale_all_dim short_factor long_factor low_freq_factor high_freq_factor llama_4_scaling_beta
    mrope_section mrope_interleaved""".split())
# Fields of config classes that make_architecture() reads for every family, or that change no
# output. Any other field that no record names must have its default value, else it could switch on
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
AnyRecord = TypeVar("AnyRecord")  # Family, or a record in its fields


def text_config(model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the language model's config inside a multimodal one; else the config itself."""
    return model_config.text_config if model_config.model_type in MULTIMODAL else model_config


def stored_format(model_config: PreTrainedConfig) -> dict[str, Any]:
    """Return the quantization_config of a config.json or of the text config in it, as in Kimi
    K2.5's, which describes the format of the files; {} if there is none."""
    settings = (getattr(x, "quantization_config", None)
                for x in (model_config, text_config(model_config)))
    return dict(next(filter(None, settings), {}))


def check_model(model_config: PreTrainedConfig) -> None:
    """Raise ValueError for a model that is not in the table or that its record cannot express."""
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
             for record in records_of(family) for value in vars(record).values()
             if isinstance(value, str) and value.startswith("config.")}
    known |= KNOWN_FIELDS.union(family.unused)
    for field in dataclasses.fields(c):
        value, default = getattr(c, field.name), field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        default = family.must_be.get(field.name, default)
        if field.name not in known and value != default and (value or default):
            raise ValueError(f"{name}: {field.name}={value} is not supported, only {default}")


def records_of(record: Any) -> Iterator[Any]:
    """Yield a record, and the records in its fields: a family's experts, mixers and so on."""
    yield record
    for value in vars(record).values():
        for inner in value.values() if isinstance(value, dict) else (value,):
            if dataclasses.is_dataclass(inner):
                yield from records_of(inner)


def make_architecture(model_config: PreTrainedConfig) -> Architecture:
    """Return the Architecture of a config from AutoConfig. Raises ValueError if no record can
    express it."""
    check_model(model_config)
    c = text_config(model_config)
    layer_configs = list(c.per_layer_config)
    c = layer_configs[0]  # stands for all layers, except in BY_LAYER
    record = FAMILIES[c.model_type]
    family = fill_record(record, c)
    if family.activation not in ACTIVATIONS:
        raise ValueError(f"{record.activation.removeprefix('config.')} {family.activation} is not"
                         f" supported: only {', '.join(ACTIVATIONS)}")
    hidden, inner = c.hidden_size, mlp_width(c, family)
    if inner is None:
        name = str(record.intermediate_size).removeprefix("config.")
        raise ValueError(f"the config of {c.model_type} has no {name}: its record in families.py"
                         " needs another intermediate_size")
    layer_heads = make_heads(layer_configs, family)
    _, kv_heads, head_dim, keys_are_values = layer_heads[0]
    # the family's fields, some of them replaced below, then those that only an Architecture has
    values = dict(vars(family), keys_are_values=keys_are_values)
    values.update(make_positions(c, family, layer_heads))
    if not (family.qk_norm and family.qk_norm_if):
        values.update(qk_norm=None, q_norm=None, k_norm=None)
    if not family.post_norm_if:
        values.update(attention_post_norm=None, mlp_post_norm=None)
    values.update(make_factors(c, family, head_dim, values["ropes"]))
    values["final_norm_kind"] = family.final_norm_kind or family.norm_kind
    if family.post_norm_eps is None:
        values["post_norm_eps"] = family.norm_eps
    values["attention_dropout"] = family.attention_dropout or 0.0
    values["kv_sources"] = make_kv_sources(c, family)
    values["layer_activation_limits"] = make_limits(c, family)
    values["per_layer"] = make_per_layer(c, family)
    n_out = inner * (1 + family.gated) // len(family.mlp_in)
    gate_up = [LinearShape(name, n_out, hidden, family.mlp_bias) for name in family.mlp_in]
    down = [LinearShape(family.mlp_out, hidden, inner, family.mlp_bias)]
    in_mxfp4 = stored_format(model_config).get("quant_method") == "mxfp4"
    values.update(make_experts(c, family, in_mxfp4, (gate_up, down)))
    if values["moe"] and (form := ADAPTERS_INSIDE.get(model_config.model_type)):
        values["moe"] = dataclasses.replace(values["moe"], adapters=form)
    return Architecture(
        **values, **make_names(model_config, family), family=c.model_type,
        n_layers=c.num_hidden_layers, hidden_size=hidden, n_heads=c.num_attention_heads,
        n_kv_heads=kv_heads, head_dim=head_dim, vocab_size=c.vocab_size, layer_heads=layer_heads,
        gate_up=gate_up, down=down,
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


def make_heads(layer_configs: list[PreTrainedConfig], family: Family) -> list[Heads]:
    """Return the Heads of each layer, from the layers' text configs."""
    heads, c = [], layer_configs[0]
    n_heads = [one.num_attention_heads for one in layer_configs]
    if by_layer := family.heads_by_layer:  # one number if all are equal, see fill_record()
        n_heads = by_layer if isinstance(by_layer, list) else [by_layer] * len(layer_configs)
    types = getattr(c, "layer_types", None) or [None] * len(layer_configs)
    for one, n, layer_type in zip(layer_configs, n_heads, types, strict=True):
        if mla := family.mla:
            heads.append(Heads(n, n, mla.nope_dim + mla.rope_dim, False))
            continue
        n_kv = one.num_key_value_heads
        if odd := [x for x in (c.num_attention_heads, n) if x % n_kv]:
            raise ValueError(f"{odd[0]} attention heads are not a multiple of {n_kv} key-value"
                             " heads")
        dim = getattr(one, "head_dim", None) or c.hidden_size // c.num_attention_heads
        if len(heads) >= c.num_hidden_layers - (family.n_kv_shared_layers or 0):
            heads.append(Heads(n, 0, dim, False))
            continue
        keys_are_values = bool(family.keys_are_values) and layer_type == "full_attention"
        heads.append(Heads(n, n_kv, dim, keys_are_values))
    return heads


def make_kv_sources(c: PreTrainedConfig, family: Family) -> list[int | None]:
    """Return Architecture.kv_sources."""
    n_own, types = c.num_hidden_layers - (family.n_kv_shared_layers or 0), layer_types(c, family)
    last_of_type = {layer_type: i for i, layer_type in enumerate(types[: max(0, n_own)])}
    if missing := set(types) - last_of_type.keys():
        raise ValueError(f"num_kv_shared_layers={family.n_kv_shared_layers}: none of the other"
                         f" layers has keys and values of {', '.join(sorted(missing))} that they"
                         " could read")
    return [None if i < n_own else last_of_type[layer_type] for i, layer_type in enumerate(types)]


def make_limits(c: PreTrainedConfig, family: Family) -> list[ActivationLimits]:
    """Return Architecture.layer_activation_limits."""
    n_layers, columns = c.num_hidden_layers, []
    for limits in family.moe.limits if family.moe else None, family.mlp_limits:
        column = limits if isinstance(limits, list) else [limits] * n_layers
        if len(column) != n_layers:
            raise ValueError(f"there are limits of {len(column)} layers, {column}, for {n_layers}")
        columns.append([limit or None for limit in column])
    return list(map(ActivationLimits, *columns))


def make_per_layer(c: PreTrainedConfig, family: Family) -> PerLayerInputs | None:
    """Return Architecture.per_layer."""
    record = family.per_layer
    if not record or not record.size:
        return None
    if family.moe and family.moe.used:
        raise ValueError(f"hidden_size_per_layer_input={record.size} is not supported in a model"
                         " with experts")
    if record.vocab_size != c.vocab_size:
        raise ValueError(f"vocab_size_per_layer_input={record.vocab_size} is not supported, only"
                         f" vocab_size={c.vocab_size}")
    return record


def make_factors(
    c: PreTrainedConfig, family: Family, head_dim: int, ropes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return {field of Architecture: value} of the factors of scores, embeddings, sums and logits.
    """
    scale, divisor = family.attention_scale, family.logits_divisor
    if family.query_scalar or scale is None:
        scale = (family.query_scalar or head_dim) ** -0.5 * family.query_factor
    scale *= family.key_multiplier * family.attention_in_multiplier**2
    factors = {"attention_scale": scale * yarn_factor(ropes[0]) if family.mla else scale}
    if family.sqrt_embedding:
        factors["embedding_multiplier"] = c.hidden_size**0.5
    if family.residual_scale is not None:
        factors["residual_multiplier"] = family.residual_scale / c.num_hidden_layers**0.5
    if family.logits_width:
        divisor = c.hidden_size / family.logits_width
    return factors | {"logits_multiplier": family.logits_multiplier / divisor}


def yarn_factor(rope: dict[str, Any]) -> float:
    """Return the factor by which DeepSeek's yarn multiplies attention_scale."""
    scale, factor = rope.get("mscale_all_dim"), rope.get("factor") or 1.0
    if rope["rope_type"] == "default" or not scale or factor <= 1:
        return 1.0
    return float((0.1 * scale * math.log(factor) + 1) ** 2)


def mlp_width(c: PreTrainedConfig, family: Family) -> int | None:
    """Return the width of gate and up, each; None if the config lacks it."""
    inner = family.intermediate_size
    if inner is None:  # Cohere's layers without experts may have no width of their own
        inner = getattr(c, "intermediate_size", None)
    if not family.two_thirds_wide or inner is None:
        return inner
    wanted = int((c.block_ffn_dim_multiplier or 1) * int(2 * inner / 3))
    return math.ceil(wanted / c.block_multiple_of) * c.block_multiple_of


def fill_record(record: AnyRecord, c: PreTrainedConfig) -> AnyRecord:
    """Return the record with the text config's values in place of "config.x"; None if the config
    declares no such field. A list of one value per layer, all equal, becomes that value."""
    values, declared = dict(vars(record)), {field.name for field in dataclasses.fields(c)}
    for key, value in values.items():
        if dataclasses.is_dataclass(value):
            values[key] = fill_record(value, c)
        elif isinstance(value, dict):  # of mixers; or of names and values, which stay
            values[key] = {name: fill_record(inner, c) if dataclasses.is_dataclass(inner) else inner
                           for name, inner in value.items()}
        elif str(value).startswith("config."):
            name = value.removeprefix("config.")
            value = getattr(c, name) if name in declared else None
            is_uniform = isinstance(value, list) and value and value == value[:1] * len(value)
            values[key] = value[0] if is_uniform else value
    return type(record)(**values)


def make_experts(
    c: PreTrainedConfig, family: Family, in_mxfp4: bool,
    dense: tuple[list[LinearShape], list[LinearShape]],
) -> dict[str, Any]:
    """Return {field of Architecture: value} of the fields about experts. `in_mxfp4`: the files
    have the experts in MXFP4. `dense`: the linears of the MLP without experts."""
    moe = family.moe
    none = {"layer_routed": [False] * c.num_hidden_layers, "moe": None,
            **dict.fromkeys(EXPERT_FIELDS, [])}
    if not moe or not moe.used or moe.shared_mlp and moe.n_experts == 0:
        return none
    sizes = moe.n_experts, moe.top_k, moe.expert_size
    if not all(isinstance(n, int) and n > 0 for n in sizes) or moe.top_k > moe.n_experts:
        raise ValueError(f"{sizes[0]} experts, {sizes[1]} for a token, of size {sizes[2]} are not"
                         " supported")
    if moe.groups_if not in (True, "group_limited_greedy"):
        moe = dataclasses.replace(moe, n_groups=1)
    routed = routed_layers(c, family)
    if not any(routed):
        return none
    if moe.softmax_of_chosen and moe.scores == "softmax":
        moe = dataclasses.replace(moe, normalized=True, rounded_scores=False)
    if moe.scores not in ("softmax", "sigmoid") or moe.combination not in ("sum", "average"):
        raise ValueError(f"experts with {moe.scores} scores and the {moe.combination} with shared"
                         " experts are not supported")
    return {"layer_routed": routed, "moe": moe,
            **expert_linears(c.hidden_size, family, moe, in_mxfp4, dense)}


def expert_linears(
    hidden: int, family: Family, moe: MoERecord, in_mxfp4: bool,
    dense: tuple[list[LinearShape], list[LinearShape]],
) -> dict[str, list[LinearShape]]:
    """Return {field of Architecture: its linears} of EXPERT_FIELDS. `in_mxfp4`, `dense`: see
    make_experts()."""
    def mlp(
        stem: str, inner: int, bias: bool, outer: int
    ) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears of an MLP that read its input, and those that compute its output."""
        names = ("gate", "up") if family.gated else ("up",)
        return ([LinearShape(f"{stem}.{x}_proj", inner, outer, bias) for x in names],
                [LinearShape(f"{stem}.down_proj", outer, inner, bias)])

    def expert(i: int) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return mlp() of one expert."""
        stem, inner = f"{moe.experts}.{i}", moe.expert_size
        if not moe.one_gate_up:
            return mlp(stem, inner, False, moe.latent_size or hidden)
        if in_mxfp4 and (hidden % BLOCK or inner % BLOCK):
            raise ValueError(f"MXFP4 with rows of {hidden} and {inner} weights is not supported,"
                             f" only with multiples of {BLOCK}")
        return ([LinearShape(f"{stem}.gate_up_proj", 2 * inner, hidden, False, in_mxfp4)],
                [LinearShape(f"{stem}.down_proj", hidden, inner, False, in_mxfp4)])

    shared: tuple[list[LinearShape], list[LinearShape]] = [], []
    if shared_size := (moe.shared_size or 0) * (moe.n_shared or 0):
        shared = mlp(moe.shared, shared_size, family.mlp_bias, hidden)
    if moe.shared_mlp and dense[1][0].in_features:  # Granite's may have no shared expert
        shared = dense
    latent = list[LinearShape]()
    if size := moe.latent_size:
        into, back = moe.latent_linears
        latent = [LinearShape(into, size, hidden, family.mlp_bias),
                  LinearShape(back, hidden, size, family.mlp_bias)]
    experts = [expert(i) for i in range(moe.n_experts)]
    return {"shared_gate_up": shared[0], "shared_down": shared[1], "expert_latent": latent,
            "expert_gate_up": [linear for gate_up, _ in experts for linear in gate_up],
            "expert_down": [linear for _, down in experts for linear in down]}


def routed_layers(c: PreTrainedConfig, family: Family) -> list[bool]:
    """Return whether each layer has experts, in a family with experts."""
    assert family.moe, "the family has experts"
    n_layers, first_dense = c.num_hidden_layers, family.moe.first_dense or 0
    if family.one_sublayer:
        return [layer_type == "moe" for layer_type in c.layer_types]
    if types := getattr(c, "mlp_layer_types", None):  # overrides the other fields
        if len(types) != n_layers or set(types) - {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types {types} is not supported for {n_layers} layers,"
                             " only dense and sparse are, one for each")
        return [layer_type == "sparse" for layer_type in types]
    dense = getattr(c, "mlp_only_layers", None) or ()
    every = getattr(c, "decoder_sparse_step", None) or getattr(c, "moe_layer_interval", None) or 1
    last = getattr(c, "moe_layer_end_index", n_layers - 1)
    return [first_dense <= i <= last and i not in dense and (i + 1) % every == 0
            for i in range(n_layers)]


def layer_types(c: PreTrainedConfig, family: Family) -> list[str]:
    """Return the type of each layer. Raises ValueError for types that the family does not have."""
    n_layers = c.num_hidden_layers
    types = getattr(c, "layer_types", None) or ["full_attention"] * n_layers
    if len(types) != n_layers:
        raise ValueError(f"layer_types has {len(types)} entries for {n_layers} layers")
    known = LAYER_TYPES.union(family.other_mixers, {"mlp", "moe"} if family.one_sublayer else ())
    if family.mla and family.mla.index_topk:
        known = {"indexed_attention"}
    if other := sorted(set(types) - known):
        n_other = sum(layer_type in other for layer_type in types)
        raise ValueError(f"{n_other} of {n_layers} layers are of"
                         f" {', '.join(other)}, which is not supported, only"
                         f" {' and '.join(sorted(known))} are")
    return list(types)


def make_positions(
    c: PreTrainedConfig, family: Family, layer_heads: list[Heads]
) -> dict[str, Any]:
    """Return {field of Architecture: value} of the fields about positions; and layer_other_mixer
    and layer_sublayers, which follow from the same layer types."""
    types = layer_types(c, family)
    slides = sliding_layers(c, family, types)
    ropes: list[dict[str, Any]] = []
    layer_rope: list[int | None] = []
    thetas = c.layer_rope_theta if family.rope_theta_by_layer else [None] * len(types)
    for layer_type, rotates, theta, heads in zip(
            types, rotary_layers(c, family, slides), thetas, layer_heads, strict=True):
        has_attention = layer_type not in family.other_mixers or family.parallel_other_mixers
        rope = None
        if has_attention and (rotates or not family.one_sublayer):
            rope = rope_of_layer(c, family, layer_type, theta if rotates else None, heads)
        if rope and rope not in ropes:
            ropes.append(rope)
        layer_rope.append(ropes.index(rope) if rope and rotates else None)
    for rope in ropes:
        part, dim = rope.get("partial_rotary_factor") or 1.0, rope["head_dim"]
        is_known = family.partial_rotary or rope["rope_type"] == "proportional" or part == 1.0
        if rotary_dim(rope, dim) % 2 or not is_known:
            raise ValueError(f"partial_rotary_factor={part} of {dim} dimensions is not supported")
    temperature = family.query_temperature and (
        ropes[0]["llama_4_scaling_beta"], ropes[0]["original_max_position_embeddings"])
    return dict(ropes=ropes, layer_rope=layer_rope,
                layer_window=[c.sliding_window if slide else None for slide in slides],
                layer_other_mixer=[layer_type if layer_type in family.other_mixers else None
                                   for layer_type in types],
                layer_sublayers=["both" if not family.one_sublayer else
                                 "mlp" if layer_type in ("mlp", "moe") else "mixer"
                                 for layer_type in types],
                query_temperature=temperature)


def sliding_layers(c: PreTrainedConfig, family: Family, types: list[str]) -> list[bool]:
    """Return for each layer whether its attention has a sliding window."""
    window = getattr(c, "sliding_window", None)
    windowed = family.windowed_layers
    slides = [windowed == "all" and window is not None
              or windowed == "layer_types" and layer_type == "sliding_attention"
              for layer_type in types]
    used = getattr(c, "use_sliding_window", True)
    if any(slides) and not ((window or 0) > 0 and used):
        raise ValueError(f"layers with a sliding window, but sliding_window={window},"
                         f" use_sliding_window={used}")
    return slides


def rotary_layers(c: PreTrainedConfig, family: Family, slides: list[bool]) -> list[bool]:
    """Return for each layer whether its attention has rotary embeddings. `slides`: the result of
    sliding_layers()."""
    n_layers, has_window = len(slides), getattr(c, "sliding_window", None) is not None
    rotated = [family.rotary_if in (True, "rope")] * n_layers
    if family.no_rotary in ("no_rope_layers", "layer_rope_theta"):
        rotated = [bool(marked) for marked in getattr(c, family.no_rotary)]
    if len(rotated) != n_layers:
        raise ValueError(f"{family.no_rotary} has {len(rotated)} entries for {n_layers} layers")
    if family.no_rotary == "full" or family.no_rotary == "full_if_window" and has_window:
        rotated = slides
    if family.moe and family.dense_rotary == 1:
        rotated = [x or not routed for x, routed in zip(rotated, routed_layers(c, family))]
    return rotated


def rope_of_layer(c: PreTrainedConfig, family: Family, layer_type: str, theta: float | None,
                  heads: Heads) -> dict[str, Any] | None:
    """Return the entry of Architecture.ropes of a layer of this type; None if it has none. `theta`:
    the layer's own rope_theta; None: that of all layers."""
    head_dim = heads.dim
    rope = dict(c.rope_parameters)
    if family.ropes_by_layer_type and "rope_type" not in rope:  # else all layers share it
        rope = dict(rope.get(layer_type) or {})
    if theta is not None:
        rope["rope_theta"] = theta
    if rope.get("rope_type") not in ROPE_TYPES or not rope.keys() <= ROPE_KEYS:
        raise ValueError(f"rope_parameters {c.rope_parameters} are not supported")
    if family.query_temperature and not rope.get("llama_4_scaling_beta"):
        raise ValueError(f"rope_parameters {rope} have no llama_4_scaling_beta")
    if family.mla:  # the rotated part of a head; Mistral 4's config has it in two fields
        part, whole = rope.pop("partial_rotary_factor", 1.0), head_dim
        head_dim = family.mla.rope_dim
        if part != 1.0 and int(part * whole) != head_dim:
            raise ValueError(f"rope_parameters {c.rope_parameters} do not rotate"
                             f" qk_rope_head_dim={head_dim} dimensions")
    if family.ntk_alpha and rope["rope_type"] == "dynamic" and rope.get("alpha"):
        theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        rope = {"rope_type": "default", "rope_theta": theta}  # independent of the length
    if rope.get("rope_theta") is None:  # OLMo hybrid may have none
        return None
    return {**rope, "head_dim": head_dim}
