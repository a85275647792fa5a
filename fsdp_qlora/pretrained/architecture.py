"""Architecture: all that determines what the layers of one model compute; LayerKind.

family_specs.py has the dataclasses that it extends and holds, from_config.py makes one of a
config.json, layer/linears.py says where a layer's values are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

from fsdp_qlora.pretrained.family_specs import ArchitectureFields, LinearShape

XIELU = "mlp.act_fn"  # prefix of a layer's xIELU scalars
XIELU_SHAPES: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}

# sublayers of a layer: mixer and MLP, or only one of them
Sublayers = Literal["both", "mixer", "mlp"]


class Heads(NamedTuple):
    """The heads of a layer's softmax attention."""

    n: int  # query heads
    n_kv: int  # key-value heads; 0: those of another layer, see Architecture.kv_sources
    dim: int
    keys_are_values: bool  # no v_proj: values are the keys, before norm and rotary


class ActivationLimits(NamedTuple):
    """Limits of a layer's gates and ups, see LimitedActivation; None: no limit."""

    experts: float | None
    mlp: float | None  # for the MLP or the shared expert


class LayerKind(NamedTuple):
    """The properties in which layers of one model may differ."""

    window: int | None  # number of keys that a query sees, its own included; None: all
    rope_index: int | None  # of Architecture.ropes; None: no rotary
    other_mixer: str | None  # key of Architecture.other_mixers; None: softmax attention
    routed: bool  # True: it has experts
    heads: Heads
    sublayers: Sublayers
    limits: ActivationLimits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture(ArchitectureFields):
    """All that determines what the layers of one model compute, in values, never "config.x"."""

    family: str  # model_type of the text model
    n_layers: int
    hidden_size: int
    # after of_kind() these three are those of the kind's layers
    n_heads: int  # num_attention_heads of config.json
    n_kv_heads: int  # this and head_dim are those of the first layer, see layer_heads
    head_dim: int  # width of queries and keys
    vocab_size: int
    # in layers without experts; their concatenated outputs are gate and up, or up alone without a
    # gate
    gate_up: list[LinearShape]
    down: list[LinearShape]
    shared_gate_up: list[LinearShape]  # in layers with experts: the shared expert's, or none
    shared_down: list[LinearShape]
    expert_latent: list[LinearShape]  # into the latent space of the experts and back; or none
    expert_gate_up: list[LinearShape]  # those of expert 0, expert 1, ..
    expert_down: list[LinearShape]
    # settings for rope_frequencies(), one for each kind of rotary, with the layers' "head_dim"
    ropes: list[dict[str, Any]]
    layer_kinds: list[LayerKind]  # one for each layer; most layers are alike
    # for each layer, the index of the layer whose keys and values it reads; None: it has its own
    kv_sources: list[int | None]
    tied: bool
    added_rows: int  # rows of the embedding and of the lm_head that the files lack
    module_prefix: str  # module = module_prefix + f"layers.{i}." + name
    checkpoint_prefixes: list[str]  # such prefixes in files; tried in turn
    lm_head_names: list[str]  # names of the lm_head's weight in files; tried in turn

    def with_token(self, last_id: int) -> Architecture:
        """Return this Architecture with tables that have a row for token `last_id`. Longer tables
        have a multiple of 64 rows, for which matmuls are fast."""
        if last_id < self.vocab_size:
            return self
        vocab_size = math.ceil((last_id + 1) / 64) * 64
        return dataclasses.replace(
            self, vocab_size=vocab_size, added_rows=vocab_size - self.vocab_size)

    @property
    def n_token_tables(self) -> int:
        """Tables with a row for each token: the embedding and, unless it is tied, the lm_head."""
        return 1 if self.tied else 2

    @property
    def layer_heads(self) -> list[Heads]:
        return [kind.heads for kind in self.layer_kinds]

    @property
    def layer_routed(self) -> list[bool]:
        return [kind.routed for kind in self.layer_kinds]

    def of_kind(self, kind: LayerKind) -> Architecture:
        """Return this Architecture with the norms and heads of layers of this kind."""
        norms: dict[str, Any] = self.other_mixer_norms if kind.other_mixer else {}
        if kind.sublayers == "mixer":
            norms = norms | dict(mlp_norm=None, mlp_post_norm=None)
        elif kind.sublayers == "mlp":
            norms = norms | dict(attention_norm=None, attention_post_norm=None)
        if self.post_norm_of_experts and not kind.routed:
            norms = norms | dict(mlp_post_norm=None)
        heads = Heads(self.n_heads, self.n_kv_heads, self.head_dim, bool(self.keys_are_values))
        if kind.heads == heads and not norms:
            return self
        n, n_kv, dim, keys_are_values = kind.heads
        return dataclasses.replace(self, n_heads=n, n_kv_heads=n_kv, head_dim=dim,
                                   keys_are_values=keys_are_values, **norms)

    def has_attention(self, kind: LayerKind) -> bool:
        """Return True if layers of this kind have softmax attention."""
        return (self.parallel_other_mixers or not kind.other_mixer) and kind.sublayers != "mlp"

    def attention_linears(self) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears whose concatenated outputs are q, k, v and perhaps attention's gates;
        and those that compute attention's output."""
        width, kv_width = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        widths = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        if self.keys_are_values:
            del widths["v_proj"]
        widths = {name: n for name, n in widths.items() if n}
        if self.one_qkv:
            widths = {"qkv_proj": sum(widths.values())}
        if gate := self.attention_gate:
            name = gate.linear or "q_proj"
            n_gates = self.n_heads if gate.per_head in (True, "per-head") else width
            widths[name] = widths.get(name, 0) + n_gates
        return ([LinearShape(f"{self.attention_prefix}.{name}", n, self.hidden_size, self.qkv_bias)
                 for name, n in widths.items()],
                [LinearShape(self.attention_out, self.hidden_size, width, self.out_bias)])

    def mixer_groups(self, kind: LayerKind) -> dict[str, list[LinearShape]]:
        """Return the groups of fused_groups() that belong to the token mixer's sublayer."""
        if kind.sublayers == "mlp":
            return {"in_proj": [], "out_proj": []}
        if self.mla:
            return self.mla.linear_groups(self.hidden_size, kind.heads.n)
        in_proj, out_proj = self.of_kind(kind).attention_linears()
        if not kind.other_mixer:
            return {"in_proj": in_proj, "out_proj": out_proj}
        mixer_in, mixer_out = self.other_mixers[kind.other_mixer].linears(self.hidden_size)
        if not self.parallel_other_mixers:
            return {"in_proj": mixer_in, "out_proj": mixer_out}
        return {"in_proj": in_proj + mixer_in, "out_proj": out_proj, "mixer_out_proj": mixer_out}

    def mlp_groups(self, kind: LayerKind) -> dict[str, list[LinearShape]]:
        """Return the groups of fused_groups() that belong to the MLP sublayer."""
        if kind.sublayers == "mixer":
            return {"gate_up": [], "down": []}
        groups = {"gate_up": self.gate_up, "down": self.down}
        if kind.routed:
            groups = {"shared_gate_up": self.shared_gate_up, "shared_down": self.shared_down}
            groups |= {name: [linear] for name, linear in zip(
                ("latent_in_proj", "latent_out_proj"), self.expert_latent)}
            groups |= {"expert_gate_up": self.expert_gate_up, "expert_down": self.expert_down}
        if self.double_wide_mlp and not kind.heads.n_kv:
            groups = {
                "gate_up": [dataclasses.replace(x, out_features=2 * x.out_features)
                            for x in self.gate_up],
                "down": [dataclasses.replace(x, in_features=2 * x.in_features)
                         for x in self.down]}
        if self.per_layer_inputs:
            gate, out = self.per_layer_inputs.linears(self.hidden_size)
            groups |= {"per_layer_gate": gate, "per_layer_out": out}
        return groups

    def fused_groups(self, kind: LayerKind) -> dict[str, list[LinearShape]]:
        """Return {name: Linears that read one input, perhaps none} of a layer. Their values follow
        one another in this order, and the number of a group is its dropout site, see drop()."""
        return self.mixer_groups(kind) | self.mlp_groups(kind)

    def linears(self, kind: LayerKind) -> list[LinearShape]:
        return [linear for group in self.fused_groups(kind).values() for linear in group]

    def all_linears(self) -> list[LinearShape]:
        """Return the linears of all kinds of layers, each name once."""
        return list({x.name: x for kind in dict.fromkeys(self.layer_kinds)
                     for x in self.linears(kind)}.values())

    def expert_linear_names(self) -> list[str]:
        """Return the names, in a layer, of the linears of all experts."""
        return [linear.name for linear in self.expert_gate_up + self.expert_down]

    def vectors(self, kind: LayerKind) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of a layer's norms and biases, without those inside
        mixers."""
        arch = self.of_kind(kind)
        norms = arch.attention_norm, arch.attention_post_norm, arch.mlp_norm, arch.mlp_post_norm
        parts = ("weight",) * self.norm_weight + ("bias",) * self.norm_bias
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.{part}": (self.hidden_size,) for name in norms if name for part in parts}
        if self.per_layer_inputs:
            shapes[f"{self.per_layer_inputs.norm}.weight"] = (self.hidden_size,)
        if kind.routed and self.moe and (own := self.moe.norms):
            shapes |= {f"{name}.weight": (self.hidden_size,)
                       for name in (own.before, own.after, own.after_shared)}
        if self.qk_norm and self.qk_norm != "without weight" and self.has_attention(kind):
            for name, heads in ((self.q_norm, arch.n_heads), (self.k_norm, arch.n_kv_heads)):
                if not heads:
                    continue
                shapes[f"{name}.weight"] = {
                    "head": (arch.head_dim,), "heads": (heads, arch.head_dim),
                    "full": (heads * arch.head_dim,)}[self.qk_norm]
        if self.mla:
            shapes |= self.mla.norms()
        if self.activation == "xielu":
            shapes |= {f"{XIELU}.{part}": shape for part, shape in XIELU_SHAPES.items()}
        linears = self.linears(kind)
        return shapes | {f"{x.name}.bias": (x.out_features,) for x in linears if x.bias}

    def small_tensors(self, kind: LayerKind) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of a layer's other tensors that are not 4-bit linears:
        the router, the experts' biases, the shared expert's gate; convolutions and decays of
        mixers; attention's sinks; the layer's scalar. Every rank has them whole, in the dtype of
        the files."""
        moe, shapes = self.moe, dict[str, tuple[int, ...]]()
        if self.layer_scalar:
            shapes[self.layer_scalar] = (1,)
        if self.sinks and self.has_attention(kind):
            shapes["self_attn.sinks"] = (kind.heads.n,)
        if kind.other_mixer:
            shapes |= self.other_mixers[kind.other_mixer].tensors(self.hidden_size)
        if kind.routed and moe:
            shapes[f"{moe.router}.weight"] = moe.n_experts, self.hidden_size
            if moe.biases:
                shapes[f"{moe.router}.bias"] = (moe.n_experts,)
                for linear in (self.expert_gate_up[0], self.expert_down[0]):
                    key = linear.name.rsplit(".", 1)[-1]
                    shapes[f"{moe.experts_prefix}.{key}_bias"] = (
                        moe.n_experts, linear.out_features)
            if moe.correction_bias:
                shapes[moe.correction_bias] = (1,) * moe.correction_bias_is_row + (moe.n_experts,)
            if moe.norms:
                shapes[moe.norms.router_scale] = (self.hidden_size,)
            if moe.expert_scale:
                shapes[moe.expert_scale] = (moe.n_experts,)
            if moe.shared_gate:
                shapes[f"{moe.shared_gate}.weight"] = 1, self.hidden_size
        return shapes


def rotary_dim(rope: dict[str, Any], head_dim: int) -> int:
    """Return the number of a head's first dimensions that these rope_parameters rotate;
    "proportional" ones rotate all, most of them by an angle of 0."""
    if rope.get("rope_type") == "proportional":
        return head_dim
    return int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
