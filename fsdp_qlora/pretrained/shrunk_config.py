"""The small config for the check at start: few small layers with every feature of the model."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from fsdp_qlora.pretrained.architecture import Architecture, Heads, rotary_dim
from fsdp_qlora.pretrained.families import FAMILIES
from fsdp_qlora.pretrained.family_specs import Family, Mamba2Spec
from fsdp_qlora.pretrained.from_config import make_architecture, text_config


# {config field with limits by layer: limit in the small layers of the check}. These limits clamp
# about 0.3 % of values; with limits of 1, one of 20,000 values was so close to the limit that
# rounding moved it to the other side
SMALL_LIMITS = {"swiglu_limits": 6.0, "swiglu_limits_shared": 7.0}
LISTS_BY_LAYER = ("layer_types", "no_rope_layers", "layer_rope_theta", "mlp_layer_types",
                  "num_attention_heads_per_layer", *SMALL_LIMITS)  # fields of configs, by layer


def shrunk_config(model_config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a text config with few small layers that has every feature of the model.

    The kinds of layers are taken from the config's own lists, so that make_architecture()'s reading
    of these lists is checked. """
    arch = make_architecture(model_config)
    c = copy.deepcopy(text_config(model_config))
    c.per_layer_config = None  # shrinking_changes() sets it for the small layers
    vars(c).pop("quantization_config", None)  # the check's weights are random, quantized to NF4
    applies = {
        "always": lambda name: True,
        "if declared": lambda name: hasattr(c, name),
        "if used": lambda name: getattr(c, name, None)}
    for condition, changes in shrinking_changes(c, arch):
        for name, value in changes.items():
            if applies[condition](name):
                setattr(c, name, value)
    ropes = getattr(c, "rope_parameters", None) or {}
    for rope in [ropes, *ropes.values()]:
        if isinstance(rope, dict) and ("long_factor" in rope or "llama_4_scaling_beta" in rope):
            shrink_rope(c, rope, arch)
        if isinstance(rope, dict) and rope.get("mrope_section"):  # frequencies of three positions
            n = rotary_dim(rope, 16) // 2
            rope["mrope_section"] = [n - 2 * (n // 3), n // 3, n // 3]
    return c


def shrinking_changes(
    c: PreTrainedConfig, arch: Architecture,
) -> list[tuple[str, dict[str, Any]]]:
    """Return the changes of shrunk_config(), as rows (condition, {field of the config: new value}).
    The condition applies to each field: "always"; "if declared", the config has the field; "if
    used", the field has a value that is not 0, None or empty."""
    spec = FAMILIES[c.model_type]
    inner, eps = (str(name).removeprefix("config.")
                  for name in (spec.intermediate_size, spec.norm_eps))
    # multiples of 64: bitsandbytes on a CPU dequantizes others wrongly; square if the model is
    hidden = 64 if arch.n_heads * arch.head_dim == arch.hidden_size else 128
    by_layer = {name: getattr(c, name, None) for name in LISTS_BY_LAYER}
    kv_sources = {i: source for i, source in enumerate(arch.kv_sources) if source is not None}
    layers = layers_to_check(by_layer, kv_sources, spec)
    return [
        ("if used", {name: values and [values[i] and SMALL_LIMITS.get(name, values[i])
                                       for i in layers]
                     for name, values in by_layer.items() if not is_computed(c, name)}),
        # the check takes seconds on a CPU
        ("always", {"num_hidden_layers": len(layers), "vocab_size": 128}),
        # a multimodal config has this flag outside its text config
        ("always", {"tie_word_embeddings": arch.tied}),
        # with the released values, a wrong attention scale or a wrong eps would go unnoticed
        ("if declared", {"initializer_range": 0.2, "attention_multiplier": 0.2, eps: 0.05}),
        ("if used", {inner: hidden if getattr(c, inner, None) == arch.hidden_size else 192}),
        ("if declared", {"post_norm_eps": 0.1}),
        # of a standard deviation of 1.6 or 2.3, so that some values are clamped, see SMALL_LIMITS
        ("if used", {"clip_qkv": 5.0}),
        # these change no output
        ("if declared", {"use_cache": False, "return_dict": True, "output_attentions": False,
                         "output_hidden_states": False}),
        *expert_changes(arch, c, hidden),
        ("if declared", {"linear_num_key_heads": 2, "linear_num_value_heads": 4,
                         "linear_key_head_dim": 16, "linear_value_head_dim": 32}),
        *mamba_changes(arch, c),
        # key-value heads: one, as many as heads, or a number between
        ("if used", {"num_attention_heads_per_layer": [
            4 if arch.layer_heads[i].n == arch.n_heads else 8 for i in layers]}),
        ("always", {"num_attention_heads": 4,
                    "num_key_value_heads": {1: 1, arch.n_heads: 4}.get(arch.n_kv_heads, 2)}),
        ("always", {"hidden_size": hidden}),
        ("if declared", {"head_dim": 16}),
        *heads_changes([arch.layer_heads[kv_sources.get(i, i)] for i in layers], spec),
        ("if used", {"num_kv_shared_layers": len({*kv_sources.values()})}),
        ("if declared", {"hidden_size_per_layer_input": 64 if arch.per_layer_inputs else 0,
                         "vocab_size_per_layer_input": 128}),
        *mla_changes(arch, c),
        ("if used", {"sliding_window": 5}),  # shorter than the checked documents
        # the released ids may be outside the small vocabulary
        ("always", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2})]


def layers_to_check(by_layer: dict[str, list[Any] | None], kv_sources: dict[int, int],
                    family: Family) -> list[int]:
    """Return the layers of the model that the small one has. `by_layer`: the config's
    LISTS_BY_LAYER; `kv_sources`: {layer: the layer whose keys and values it reads}."""
    if kv_sources:  # all source layers, and the last layer that reads each of them
        last = {source: i for i, source in kv_sources.items()}
        return sorted([*last, *last.values()])
    kinds = list(zip(*filter(None, by_layer.values()))) or [()]
    if family.one_sublayer:  # one of each kind
        return [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    # one of the first kind, one that differs most from it, one of each layer type that neither has
    differences = [sum(x != y for x, y in zip(kind, kinds[0])) for kind in kinds]
    other = differences.index(max(differences))
    types = by_layer["layer_types"] or []
    further = [types.index(x) for x in dict.fromkeys(types) if x not in (types[0], types[other])]
    return [0, other, *further]


def heads_changes(
    layer_heads: list[Heads], family: Family,
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of shrinking_changes() for layers whose heads are wider than the first
    layer's, or whose number of key-value heads differs, or of heads, if that is not in a list of
    the config."""
    first, changes = layer_heads[0], dict[int, dict[str, int]]()
    for i, heads in enumerate(layer_heads):
        change = {"head_dim": 32} if heads.dim != first.dim else {}
        if heads.n_kv != first.n_kv:
            change["num_key_value_heads"] = 1 if heads.n_kv < first.n_kv else 4
        if heads.n != first.n and not family.heads_by_layer:
            change["num_attention_heads"] = 8
        changes |= {i: change} if change else {}
    return [("always", {"per_layer_config": changes})] if changes else []


def is_computed(c: PreTrainedConfig, name: str) -> bool:
    """Return True if the config computes this field from others."""
    name = c.attribute_map.get(name, name)
    return isinstance(getattr(type(c), name, None), property)


def expert_changes(
    arch: Architecture, c: PreTrainedConfig, hidden: int,
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of shrinking_changes() for experts; `hidden`: the small model's hidden size.
    """
    if not arch.moe:
        return []
    sizes = {
        # groups are ranked by their two best experts
        "n_experts": max(8, 2 * arch.moe.n_expert_groups),
        "top_k": min(3, arch.moe.top_k), "shared_size": 128,
        "expert_size": hidden if arch.moe.expert_size == arch.hidden_size else 64,
        "latent_size": 192, "n_first_dense": 1}
    spec = FAMILIES[arch.family].moe
    fields = {str(getattr(spec, key)).removeprefix("config."): size
              for key, size in sizes.items()}  # if two sizes are one field, the last one wins
    # in some families this is also the experts' size; it is set by shrinking_changes()
    fields.pop(str(FAMILIES[arch.family].intermediate_size).removeprefix("config."), None)
    return [
        # few small experts, only in the second layer if the first layers have none
        ("if used", fields),
        # one layer without experts, if there are such layers
        ("if used", {"mlp_only_layers": [0]}),
        ("if used", {"decoder_sparse_step": min(2, getattr(c, "decoder_sparse_step", 1))}),
        ("if declared", {"moe_layer_end_index": 1})]


def mla_changes(arch: Architecture, c: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of shrinking_changes() for latent attention. Values stay narrower than
    queries, or as wide."""
    mla = arch.mla
    if not mla:
        return []
    value = 64 if mla.value_dim == arch.head_dim else 32
    sizes = {"qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "qk_head_dim": 64, "v_head_dim": value,
             "index_head_dim": 32, "index_n_heads": 2}
    if c.head_dim == arch.head_dim:
        sizes |= {"head_dim": 64}
    return [("if declared", {"kv_lora_rank": 64, **sizes}), ("if used", {"q_lora_rank": 128})]


def mamba_changes(arch: Architecture, c: PreTrainedConfig) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of shrinking_changes() for Mamba-2: 4 heads, of whole blocks of 64 weights.
    """
    mixers = FAMILIES[arch.family].other_mixers.values()
    spec = next((x for x in mixers if isinstance(x, Mamba2Spec)), None)
    if not spec:
        return []
    sizes = {"n_heads": 4, "head_dim": 32, "n_groups": min(2, getattr(
        c, str(spec.n_groups).removeprefix("config."))), "state_size": 16}
    fields = {str(getattr(spec, key)).removeprefix("config."): n for key, n in sizes.items()}
    return [("always", fields), ("if declared", {"mamba_expand": 2, "mamba_d_ssm": 128})]


def shrink_rope(c: PreTrainedConfig, rope: dict[str, Any], arch: Architecture) -> None:
    """Change rope settings that treat long documents differently, so that the documents of the
    check, 18 and 24 tokens, are on both sides of the limit."""
    ratio = c.max_position_embeddings / rope["original_max_position_embeddings"]
    rope["original_max_position_embeddings"] = 20
    c.max_position_embeddings = int(20 * ratio)
    if hasattr(c, "original_max_position_embeddings"):
        c.original_max_position_embeddings = 20
    if arch.mla and "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = c.qk_rope_head_dim / c.head_dim
    for name in {"short_factor", "long_factor"} & rope.keys():
        rope[name] = rope[name][: rotary_dim(rope, 16) // 2]
