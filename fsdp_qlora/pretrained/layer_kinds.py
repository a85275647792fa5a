"""Read from a config.json what its layers are: one LayerKind for each, and the ropes they name.

    make_layer_kinds()
      layer_windows(), layer_ropes(), layer_heads(), layer_limits(), routed_layers()

`c` is the text config in all functions here.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from fsdp_qlora.pretrained.architecture import ActivationLimits, Heads, LayerKind, rotary_dim
from fsdp_qlora.pretrained.family_specs import LAYER_TYPES, Family

ROPE_TYPES = {"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional"}
# mrope's keys are allowed: with text only, its three positions are equal, as in ordinary rotary
ROPE_KEYS = set("""rope_type type rope_theta factor partial_rotary_factor alpha attention_factor
    original_max_position_embeddings max_position_embeddings beta_fast beta_slow mscale truncate
    mscale_all_dim short_factor long_factor low_freq_factor high_freq_factor llama_4_scaling_beta
    mrope_section mrope_interleaved""".split())
Rope = dict[str, Any]  # an entry of Architecture.ropes


def make_layer_kinds(
    layer_configs: list[PreTrainedConfig], family: Family
) -> tuple[list[LayerKind], list[Rope]]:
    """Return the LayerKind of each layer, and Architecture.ropes. `layer_configs`: the text config
    of each layer."""
    c = layer_configs[0]
    types = layer_types(c, family)
    heads, windows = layer_heads(layer_configs, family, types), layer_windows(c, family, types)
    ropes, rope_indices = layer_ropes(c, family, types, windows, [one.dim for one in heads])
    other_mixers = [x if x in family.other_mixers else None for x in types]
    sublayers = ["both" if not family.one_sublayer else
                 "mlp" if layer_type in ("mlp", "moe") else "mixer" for layer_type in types]
    kinds = zip(windows, rope_indices, other_mixers, routed_layers(c, family), heads, sublayers,
                layer_limits(c, family), strict=True)
    return [LayerKind(*kind) for kind in kinds], ropes


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


def layer_heads(
    layer_configs: list[PreTrainedConfig], family: Family, types: list[str]
) -> list[Heads]:
    """Return the Heads of each layer; `types`: the layers' types, here and below."""
    heads, c = [], layer_configs[0]
    n_heads = [one.num_attention_heads for one in layer_configs]
    if by_layer := family.heads_by_layer:  # one number if all are equal, see fill_spec()
        n_heads = by_layer if isinstance(by_layer, list) else [by_layer] * len(layer_configs)
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


def layer_windows(c: PreTrainedConfig, family: Family, types: list[str]) -> list[int | None]:
    """Return LayerKind.window of each layer."""
    window, windowed = getattr(c, "sliding_window", None), family.windowed_layers
    slides = [windowed == "all" and window is not None
              or windowed == "layer_types" and layer_type == "sliding_attention"
              for layer_type in types]
    used = getattr(c, "use_sliding_window", True)
    if any(slides) and not ((window or 0) > 0 and used):
        raise ValueError(f"layers with a sliding window, but sliding_window={window},"
                         f" use_sliding_window={used}")
    return [window if slide else None for slide in slides]


def layer_ropes(
    c: PreTrainedConfig, family: Family, types: list[str], windows: list[int | None],
    head_dims: list[int],
) -> tuple[list[Rope], list[int | None]]:
    """Return Architecture.ropes, all different, and LayerKind.rope_index of each layer. `windows`,
    `head_dims`: those of each layer."""
    ropes: list[Rope] = []
    indices: list[int | None] = []
    thetas = c.layer_rope_theta if family.rope_theta_by_layer else [None] * len(types)
    for layer_type, rotates, theta, head_dim in zip(
            types, rotary_layers(c, family, windows), thetas, head_dims, strict=True):
        has_attention = layer_type not in family.other_mixers or family.parallel_other_mixers
        rope = None
        if has_attention and (rotates or not family.one_sublayer):
            rope = rope_of_layer(c, family, layer_type, theta if rotates else None, head_dim)
        if rope and rope not in ropes:
            ropes.append(rope)
        indices.append(ropes.index(rope) if rope and rotates else None)
    for rope in ropes:
        part, dim = rope.get("partial_rotary_factor") or 1.0, rope["head_dim"]
        is_known = family.partial_rotary or rope["rope_type"] == "proportional" or part == 1.0
        if rotary_dim(rope, dim) % 2 or not is_known:
            raise ValueError(f"partial_rotary_factor={part} of {dim} dimensions is not supported")
    return ropes, indices


def rotary_layers(
    c: PreTrainedConfig, family: Family, windows: list[int | None]
) -> list[bool]:
    """Return for each layer whether its attention has rotary embeddings."""
    n_layers, has_window = len(windows), getattr(c, "sliding_window", None) is not None
    rotated = [family.rotary_if in (True, "rope")] * n_layers
    if family.no_rotary in ("no_rope_layers", "layer_rope_theta"):
        rotated = [bool(marked) for marked in getattr(c, family.no_rotary)]
    if len(rotated) != n_layers:
        raise ValueError(f"{family.no_rotary} has {len(rotated)} entries for {n_layers} layers")
    if family.no_rotary == "full" or family.no_rotary == "full_if_window" and has_window:
        rotated = [window is not None for window in windows]
    if family.dense_rotary_if == 1:
        rotated = [x or not routed for x, routed in zip(rotated, routed_layers(c, family))]
    return rotated


def rope_of_layer(
    c: PreTrainedConfig, family: Family, layer_type: str, theta: float | None, head_dim: int
) -> Rope | None:
    """Return the entry of Architecture.ropes of a layer of this type; None if it has none. `theta`:
    the layer's own rope_theta; None: that of all layers."""
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


def routed_layers(c: PreTrainedConfig, family: Family) -> list[bool]:
    """Return whether each layer has experts."""
    n_layers = c.num_hidden_layers
    if not family.moe:
        return [False] * n_layers
    if family.one_sublayer:
        return [layer_type == "moe" for layer_type in c.layer_types]
    if types := getattr(c, "mlp_layer_types", None):  # overrides the other fields
        if len(types) != n_layers or set(types) - {"dense", "sparse"}:
            raise ValueError(f"mlp_layer_types {types} is not supported for {n_layers} layers,"
                             " only dense and sparse are, one for each")
        return [layer_type == "sparse" for layer_type in types]
    dense, n_first_dense = getattr(c, "mlp_only_layers", None) or (), family.moe.n_first_dense or 0
    every = getattr(c, "decoder_sparse_step", None) or getattr(c, "moe_layer_interval", None) or 1
    last = getattr(c, "moe_layer_end_index", n_layers - 1)
    return [n_first_dense <= i <= last and i not in dense and (i + 1) % every == 0
            for i in range(n_layers)]


def layer_limits(c: PreTrainedConfig, family: Family) -> list[ActivationLimits]:
    """Return LayerKind.limits of each layer."""
    n_layers, columns = c.num_hidden_layers, []
    for limits in family.moe.limits if family.moe else None, family.mlp_limits:
        column = limits if isinstance(limits, list) else [limits] * n_layers
        if len(column) != n_layers:
            raise ValueError(f"there are limits of {len(column)} layers, {column}, for {n_layers}")
        columns.append([limit or None for limit in column])
    return list(map(ActivationLimits, *columns))


def kv_sources(c: PreTrainedConfig, family: Family) -> list[int | None]:
    """Return Architecture.kv_sources."""
    n_own, types = c.num_hidden_layers - (family.n_kv_shared_layers or 0), layer_types(c, family)
    last_of_type = {layer_type: i for i, layer_type in enumerate(types[: max(0, n_own)])}
    if missing := set(types) - last_of_type.keys():
        raise ValueError(f"num_kv_shared_layers={family.n_kv_shared_layers}: none of the other"
                         f" layers has keys and values of {', '.join(sorted(missing))} that they"
                         " could read")
    return [None if i < n_own else last_of_type[layer_type] for i, layer_type in enumerate(types)]
