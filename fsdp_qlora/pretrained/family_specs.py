"""LinearShape; the specs of a family's parts: experts, mixers and more; Family, which describes a
family.

Family extends ArchitectureFields, as Architecture does (architecture.py). families.py has the table
of families.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

LAYER_TYPES = {"full_attention", "sliding_attention"}
ACTIVATIONS = "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu2", "xielu"
FromConfig = Any  # "config.x" in a Family and its specs; the value of field x in an Architecture

# shape of the weight of a query or key norm: "head" [head_dim], "heads" [heads, head_dim], "full"
# [all]; or "without weight", by head
QKNorm = Literal["head", "heads", "full", "without weight"]
# layers without rotary: "no_rope_layers" or "layer_rope_theta": those with 0 in this list of the
# config; "full": those without a window; "full_if_window": the same, but none if the model has no
# window
NoRotary = Literal["no_rope_layers", "layer_rope_theta", "full", "full_if_window"]
# layers with a sliding window: all layers, or those with "sliding_attention" in the config's list
WindowedLayers = Literal["all", "layer_types"]
# scores of experts: the softmax over all of a token's logits, or the sigmoid of each logit
ScoreFunc = Literal["softmax", "sigmoid"]
# the shared expert's output plus the others'; "average": half of that sum
ExpertSum = Literal["sum", "average"]
# form of the experts' adapters that PEFT 0.21 loads: "modules", one per expert; "stacked", one for
# all experts; "parameters", saved like "modules", but declared in its config as "stacked"
AdapterForm = Literal["modules", "stacked", "parameters"]


@dataclasses.dataclass(frozen=True)
class LinearShape:
    """Name and shape of one weight matrix of a layer; not an nn.Linear."""

    name: str  # name in the layer, in transformers and checkpoints
    out_features: int
    in_features: int
    bias: bool
    mxfp4: bool = False  # it is in MXFP4 in the files, and stays so; else it is quantized to NF4


@dataclasses.dataclass(frozen=True)
class ExpertNormsSpec:
    """Norms of Gemma 4's experts, which run next to the MLP that other models have: both outputs
    are normed separately and added. Names are those in a layer; the norm before the MLP is
    Family.mlp_norm."""

    before: str = "pre_feedforward_layernorm_2"  # for the experts' inputs
    after: str = "post_feedforward_layernorm_2"  # for the experts' output
    after_shared: str = "post_feedforward_layernorm_1"  # for the output of the MLP (shared expert)
    # a tensor [hidden]. The router has its own norm of the same input as `before`, without weight,
    # times this tensor and hidden ** -0.5
    router_scale: str = "router.scale"


@dataclasses.dataclass(frozen=True)
class MoESpec:
    """The experts of an MoE model: how the router works, and how they differ from Qwen3's.
    "config.x" means the same as in Family.

    The router's logits become scores. Each token goes to the top_k experts with the highest scores
    (plus correction_bias). Their outputs are added, each times its weight, which is its score.
    """

    experts_if: bool | FromConfig = True  # if a config can switch experts off
    n_experts: int | FromConfig = "config.num_experts"
    top_k: int | FromConfig = "config.num_experts_per_tok"
    expert_size: int | FromConfig = "config.moe_intermediate_size"  # inner width of one expert
    # width of a latent space in which the experts work, but not the router and the shared expert;
    # None: they do not. The first of the latent_linears leads into it, the second leads back from
    # the experts' weighted sum
    latent_size: int | FromConfig | None = None
    latent_linears: tuple[str, str] = ("", "")
    shared_size: int | FromConfig = 0  # inner width of the expert that gets all tokens; 0: none
    combination: ExpertSum | FromConfig = "sum"
    n_shared: int | FromConfig = 1  # shared experts, computed as one that is n_shared times as wide
    n_first_dense: int | FromConfig = 0  # number of first layers that have an MLP without experts
    experts_prefix: str = "mlp.experts"  # prefix of the experts' names in a layer
    shared_prefix: str = "mlp.shared_expert"  # prefix of the shared expert's names in a layer
    # the linears that are the MLP of a layer without experts are the shared expert of one with them
    shared_mlp: bool = False
    shared_gate: str | None = None  # a linear whose sigmoid multiplies the shared expert's output
    router: str = "mlp.gate"
    fp32_router: bool = False  # logits are computed in fp32, not in the model's dtype
    score_func: ScoreFunc | FromConfig = "softmax"
    rounded_scores: bool = False  # scores, and their sum, are rounded to the model's dtype
    correction_bias: str | None = None  # a tensor [experts]
    correction_bias_is_row: bool = False  # it is [1, experts]
    topk_by_logits: bool = False  # experts are chosen by logits (plus correction_bias), not scores
    correction_bias_or_zeros: bool = False  # files may lack it; it is then 0
    # a token goes only to experts of its topk_group groups, the ones with the largest sums of their
    # n_best_per_group highest scores
    n_expert_groups: int | FromConfig = 1
    topk_group: int | FromConfig = 1
    n_best_per_group: int = 2
    groups_if: bool | FromConfig = True  # if a config can switch groups off; True or
    #                                      "group_limited_greedy": on
    norm_topk_prob: bool | FromConfig = True  # weights are divided by their sum plus sum_eps
    softmax_of_chosen: bool = False  # softmax is over the top_k logits: always normalized
    sum_eps: float = 0.0
    routed_scaling_factor: float | FromConfig = 1.0  # multiplies the weights
    expert_scale: str | None = None  # a tensor [experts], which also multiplies the weights
    norms: ExpertNormsSpec | None = None  # None: router, experts and shared expert read one norm
    rounded_weights: bool = True  # weights are rounded to the model's dtype
    biases: bool = False  # the router and each expert's two linears have a bias
    # (limit, alpha) of a ClampedGLU; the rows of gate_up_proj are then gate, up, gate, up, ..
    clamped_glu: tuple[float, float] | None = None
    limits: FromConfig = None  # the config's list of limits by layer, see LimitedActivation
    one_gate_up: bool = False  # an expert has one linear gate_up_proj, not gate_proj and up_proj
    transposed: bool = False  # a tensor of all experts is [experts, in, out], also if in = out
    adapter_form: AdapterForm = "modules"
    # pairs: a part of a tensor's name here, and the part that files may have instead
    renames: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class AttentionGateSpec:
    """Attention's output is multiplied by activation(gate) before o_proj. "config.x" means the same
    as in Family."""

    linear: str | None = None  # computes the gates [heads, head_dim] from q_proj's inputs; None:
    #                            q_proj's outputs contain them, each head's after its query
    per_head: bool | FromConfig = False  # True or "per-head": one gate per head
    activation: str = "sigmoid"  # or "softplus"


@dataclasses.dataclass(frozen=True)
class MLASpec:
    """DeepSeek's multi-head latent attention (MLA). "config.x" means the same as in Family.

    q_a_proj and kv_a_proj_with_mqa compute two latents of a token. From the norms of these,
    q_b_proj makes the heads of queries, [nope_dim + rope_dim], and kv_b_proj those of keys and
    values, [nope_dim + value_dim]. The last rope_dim dimensions of a query are rotated. Those of
    keys are one vector for all heads, which kv_a_proj_with_mqa outputs after its latent.
    """

    q_rank: int | FromConfig = "config.q_lora_rank"  # None: q_proj computes the queries
    kv_rank: int | FromConfig = "config.kv_lora_rank"
    nope_dim: int | FromConfig = "config.qk_nope_head_dim"
    rope_dim: int | FromConfig = "config.qk_rope_head_dim"
    value_dim: int | FromConfig = "config.v_head_dim"
    norm_eps: float = 1e-6  # eps of the latents' norms; transformers has no other
    q_norm: str = "self_attn.q_a_layernorm"
    kv_norm: str = "self_attn.kv_a_layernorm"
    # An indexer chooses this many keys for each query. In rows up to this length these are all
    # keys, so the indexer changes nothing and is not computed; longer rows are refused.
    index_topk: int | FromConfig | None = None
    indexer_prefix: str = "self_attn.indexer."  # prefix of the names of its tensors

    def linear_groups(self, hidden: int, heads: int) -> dict[str, list[LinearShape]]:
        """Return the groups of a layer's linears, see Architecture.mixer_groups()."""
        query_width = heads * (self.nope_dim + self.rope_dim)
        key_value_width = heads * (self.nope_dim + self.value_dim)
        kv_a_width = self.kv_rank + self.rope_dim
        kv_a = LinearShape("self_attn.kv_a_proj_with_mqa", kv_a_width, hidden, False)
        kv_b = LinearShape("self_attn.kv_b_proj", key_value_width, self.kv_rank, False)
        out_proj = LinearShape("self_attn.o_proj", hidden, heads * self.value_dim, False)
        if not self.q_rank:
            q = LinearShape("self_attn.q_proj", query_width, hidden, False)
            return {"in_proj": [q, kv_a], "out_proj": [out_proj], "kv_b": [kv_b]}
        q_a = LinearShape("self_attn.q_a_proj", self.q_rank, hidden, False)
        q_b = LinearShape("self_attn.q_b_proj", query_width, self.q_rank, False)
        return {"in_proj": [q_a, kv_a], "out_proj": [out_proj], "q_b": [q_b], "kv_b": [kv_b]}

    def norms(self) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of the weights of its norms."""
        ranks = {self.q_norm: self.q_rank, self.kv_norm: self.kv_rank}
        return {f"{name}.weight": (rank,) for name, rank in ranks.items() if rank}


@dataclasses.dataclass(frozen=True)
class ShortConvSpec:
    """LFM2's token mixer: in_proj outputs b, c and x, [3 x hidden]; out_proj reads c * conv(b * x),
    where conv sums each channel's last `conv_kernel_size` tokens. "config.x" means the same as in
    Family."""

    conv_kernel_size: int | FromConfig = "config.conv_L_cache"
    bias: bool | FromConfig = "config.conv_bias"  # for conv, in_proj and out_proj

    def linears(self, hidden: int) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears that read its input, and those that compute its output."""
        return ([LinearShape("conv.in_proj", 3 * hidden, hidden, self.bias)],
                [LinearShape("conv.out_proj", hidden, hidden, self.bias)])

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of its tensors other than linears."""
        bias = {"conv.conv.bias": (hidden,)} if self.bias else {}
        return {"conv.conv.weight": (hidden, 1, self.conv_kernel_size)} | bias


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetSpec:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5. "config.x" means the same as in Family.

    Its linears output query and key [key heads, key_dim], value and z [value heads, value_dim], b
    and a [value heads]. Query, key and value go through a convolution of `conv_kernel_size`
    tokens and SiLU; the value heads are divided evenly among the key heads. A value head's state S
    [key_dim, value_dim] becomes S exp(g) + beta k (v - k S exp(g)), with k of length 1, beta the
    sigmoid of b and g = -exp(A_log) softplus(a + dt_bias). `out` reads norm(q S) SiLU(z), with q of
    length key_dim ** -0.5.
    """

    n_key_heads: int | FromConfig = "config.linear_num_key_heads"
    n_value_heads: int | FromConfig = "config.linear_num_value_heads"
    key_dim: int | FromConfig = "config.linear_key_head_dim"
    value_dim: int | FromConfig = "config.linear_value_head_dim"
    conv_kernel_size: int | FromConfig = "config.linear_conv_kernel_dim"
    # (name, letters of q, k, v, z, b and a that it outputs) of each linear that reads the input
    in_projs: tuple[tuple[str, str], ...] = (
        ("in_proj_qkv", "qkv"), ("in_proj_z", "z"), ("in_proj_b", "b"), ("in_proj_a", "a"))
    out: str = "out_proj"
    norm: str = "norm"
    norm_eps: float | FromConfig = "config.rms_norm_eps"
    # files have a convolution each for query, key and value, unlike transformers
    split_conv: bool = False
    by_key_head: bool = False  # a linear's outputs are ordered by key head
    double_beta: bool | FromConfig = False  # beta is twice the sigmoid

    @property
    def widths(self) -> dict[str, int]:
        """{letter: width} of q, k, v, z, b and a."""
        keys, values = self.n_key_heads * self.key_dim, self.n_value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values,
                "b": self.n_value_heads, "a": self.n_value_heads}

    def linears(self, hidden: int) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears that read its input, and those that compute its output."""
        widths = self.widths
        return ([LinearShape(f"linear_attn.{name}", sum(widths[x] for x in parts), hidden, False)
                 for name, parts in self.in_projs],
                [LinearShape(f"linear_attn.{self.out}", hidden, widths["v"], False)])

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of its tensors other than linears."""
        channels = {"conv1d": sum(self.widths[x] for x in "qkv")}
        if self.split_conv:
            channels = {f"{x}_conv1d": self.widths[x] for x in "qkv"}
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (n, 1, self.conv_kernel_size) for name, n in channels.items()}
        shapes |= {"A_log": (self.n_value_heads,), "dt_bias": (self.n_value_heads,),
                   f"{self.norm}.weight": (self.value_dim,)}
        return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


@dataclasses.dataclass(frozen=True)
class Mamba2Spec:
    """Mamba-2. "config.x" means the same as in Family.

    in_proj outputs z and x [heads, head_dim], B and C [groups, state_size] and dt [heads]. x, B and
    C go through a convolution of `conv_kernel_size` tokens and SiLU; the heads are divided evenly
    among the groups. dt = softplus(dt + dt_bias), within dt_limits and not below min_dt. A head's
    state S [state_size, head_dim] becomes S exp(-exp(A_log) dt) + B (dt x). out_proj reads norm((C
    S + D x) SiLU(z)) with the norm by group, or norm(C S + D x) SiLU(z) with norm_before_gate.
    """

    n_heads: int | FromConfig = "config.mamba_n_heads"
    head_dim: int | FromConfig = "config.mamba_d_head"
    n_groups: int | FromConfig = "config.mamba_n_groups"
    state_size: int | FromConfig = "config.mamba_d_state"
    conv_kernel_size: int | FromConfig = "config.mamba_d_conv"
    conv_bias: bool | FromConfig = "config.mamba_conv_bias"
    in_bias: bool | FromConfig = "config.mamba_proj_bias"
    out_bias: bool | FromConfig = "config.mamba_proj_bias"
    dt_limits: FromConfig = "config.time_step_limit"
    min_dt: float | FromConfig = 0.0
    norm_eps: float | FromConfig = "config.rms_norm_eps"
    prefix: str = "mamba"  # its name in a layer
    has_norm: bool | FromConfig = True
    norm_before_gate: bool | FromConfig = False
    # factors of in_proj's input; of its outputs z, x, B, C and dt; and of out_proj's output
    in_multiplier: float | FromConfig = 1.0
    multipliers: FromConfig = 1.0  # one for all, or a list
    out_multiplier: float | FromConfig = 1.0

    @property
    def is_multiplied(self) -> bool:
        """True if in_proj's outputs are multiplied, by their own factors or by the factor of its
        input."""
        return self.multipliers != 1.0 or self.in_multiplier != 1.0

    @property
    def widths(self) -> dict[str, int]:
        """{name: width} of in_proj's outputs."""
        inner, states = self.n_heads * self.head_dim, self.n_groups * self.state_size
        return {"z": inner, "x": inner, "B": states, "C": states, "dt": self.n_heads}

    def linears(self, hidden: int) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears that read its input, and those that compute its output."""
        widths = self.widths
        return ([LinearShape(f"{self.prefix}.in_proj", sum(widths.values()), hidden, self.in_bias)],
                [LinearShape(f"{self.prefix}.out_proj", hidden, widths["x"], self.out_bias)])

    def tensors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return {name in the layer: shape} of its tensors other than linears."""
        n_channels = sum(self.widths[part] for part in ("x", "B", "C"))
        shapes: dict[str, tuple[int, ...]] = {
            "conv1d.weight": (n_channels, 1, self.conv_kernel_size), "A_log": (self.n_heads,),
            "dt_bias": (self.n_heads,), "D": (self.n_heads,)}
        shapes |= {"norm.weight": (self.widths["x"],)} if self.has_norm else {}
        shapes |= {"conv1d.bias": (n_channels,)} if self.conv_bias else {}
        return {f"{self.prefix}.{name}": shape for name, shape in shapes.items()}


# token mixers other than softmax attention
OtherMixer = ShortConvSpec | GatedDeltaNetSpec | Mamba2Spec


@dataclasses.dataclass(frozen=True)
class PerLayerInputsSpec:
    """Inputs of their own that each layer has for each token (Gemma 4 E2B). "config.x" means the
    same as in Family.

    `table` and `projection` yield `size` values for each layer: the table by the token, the
    projection from the token's embedding. The input is (norm(projected * hidden ** -0.5) + looked
    up * size ** 0.5) * 2 ** -0.5. After its MLP a layer adds norm(out(activation(gate(x)) *
    input)).
    """

    size: int | FromConfig = "config.hidden_size_per_layer_input"  # 0: the model has none
    vocab_size: int | FromConfig = "config.vocab_size_per_layer_input"
    table: str = "embed_tokens_per_layer"  # this and the next two are names in the model
    projection: str = "per_layer_model_projection"
    projection_norm: str = "per_layer_projection_norm"
    gate: str = "per_layer_input_gate"  # this and the next two are names in a layer
    out: str = "per_layer_projection"
    norm: str = "post_per_layer_input_norm"

    def linears(self, hidden: int) -> tuple[list[LinearShape], list[LinearShape]]:
        """Return the linears of a layer, gate and out."""
        return ([LinearShape(self.gate, self.size, hidden, False)],
                [LinearShape(self.out, hidden, self.size, False)])

    def projection_linear(self, hidden: int, n_layers: int) -> LinearShape:
        """Return the projection, one linear for the whole model."""
        return LinearShape(self.projection, n_layers * self.size, hidden, False)


@dataclasses.dataclass(frozen=True)
class ArchitectureFields:
    """What a Family says of its models, and an Architecture of its model: what layers, files and
    adapters read. "config.x" in a Family means the config's field x, or None; an Architecture has
    the value.
    """

    # ---- norms
    norm_kind: str = "rms"  # see norm_of(); also for the final norm, q_norm and k_norm
    norm_eps: float | FromConfig = "config.rms_norm_eps"
    norm_weight: bool = True  # False: the final norm and the four norms below have no weight
    norm_bias: bool = False  # the final norm and the four norms below have a bias
    attention_norm: str | None = "input_layernorm"  # its name in the layer; None: no such norm
    attention_post_norm: str | None = None  # for attention's output
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None  # for the MLP's output
    # {one of the four norm fields above: its value in layers with one of other_mixers}
    other_mixer_norms: dict[str, str | None] = dataclasses.field(default_factory=dict)
    post_norm_eps: float | FromConfig | None = None  # for the two post norms; None: norm_eps
    post_norm_of_experts: bool = False  # only layers with experts have mlp_post_norm
    final_norm: str = "norm"  # its name in the model
    final_norm_kind: str | None = None  # None: same as norm_kind

    # ---- attention: linears and heads
    attention_prefix: str = "self_attn"  # prefix of q_proj and the like in a layer
    attention_out: str = "self_attn.o_proj"
    one_qkv: bool = False  # one linear "qkv_proj"
    # a tensor that files may have in place of those of q_proj, k_proj and v_proj
    qkv_in_files: str | None = None
    qkv_bias: bool | FromConfig = "config.attention_bias"
    out_bias: bool | FromConfig = "config.attention_bias"
    keys_are_values: bool | FromConfig = False  # in layers without a window, see Heads
    # the MLPs of layers that read others' keys and values are twice as wide
    double_wide_mlp: bool | FromConfig = False
    qk_norm: QKNorm | None = None
    q_norm: str | None = "self_attn.q_norm"  # None in an Architecture without qk_norm
    k_norm: str | None = "self_attn.k_norm"
    qk_norm_after_rotary: bool = False
    value_norm: bool = False  # by head, without weight
    # outputs of q_proj, k_proj and v_proj are clamped to [-this, this]; None: they are not
    qkv_limit: float | FromConfig | None = None
    attention_softcap: float | FromConfig | None = None
    sinks: bool = False  # attention's softmax has one more logit per head, without a value
    attention_gate: AttentionGateSpec | None = None
    mla: MLASpec | None = None  # instead of q_proj, k_proj and v_proj

    # ---- rotary and windows
    # rotates pairs (0, 1), (2, 3), .. instead of halves
    rotary_interleaved: bool | FromConfig = False
    rotary_backwards: bool = False  # rotates by the negative angle

    # ---- MLP
    activation: str = "config.hidden_act"  # one of ACTIVATIONS
    gated: bool = True  # the MLP's last linear reads act(gate) * up; else act(up)
    # the MLP reads attention's normed input, and both outputs are added
    parallel_residual: bool = False

    # ---- factors
    attention_scale: float | FromConfig | None = None  # None: see Family.query_scalar
    # (beta, n): q *= 1 + beta * log(1 + position // n)
    query_temperature: bool | tuple[float, int] = False
    # factors of the input of q, k and v, and of o_proj's output; only if these linears have no
    # biases
    attention_in_multiplier: float | FromConfig = 1.0
    attention_out_multiplier: float | FromConfig = 1.0
    # factors of [the MLP's gate, the MLP's output], or one for both; only without biases
    mlp_multipliers: FromConfig = 1.0
    embedding_multiplier: float | FromConfig = 1.0
    rounded_multiplier: bool = False  # embedding_multiplier is rounded to the embedding's dtype
    residual_multiplier: float | FromConfig = 1.0  # factor of a sublayer's branch
    layer_scalar: str | None = None  # a tensor [1] in each layer, factor of the layer's output
    logits_multiplier: float | FromConfig = 1.0
    logits_softcap: float | FromConfig | None = None

    # ---- dropout
    attention_dropout: float | FromConfig = "config.attention_dropout"
    embedding_dropout: float | FromConfig = 0.0
    residual_dropout: float | FromConfig = 0.0  # for the outputs of o_proj and down_proj

    # ---- other mixers, experts, per-layer inputs
    # {layer type: the mixer that it has instead of softmax attention}
    other_mixers: dict[str, OtherMixer] = dataclasses.field(default_factory=dict)
    # layers with one of other_mixers also have softmax attention, and both outputs are added
    parallel_other_mixers: bool = False
    moe: MoESpec | None = None  # experts, instead of the MLP
    per_layer_inputs: PerLayerInputsSpec | None = None

    # ---- embedding and lm_head
    embedding: str = "embed_tokens"  # its name in the model
    embedding_norm: bool = False  # embeddings are divided by their root mean square
    lm_head_bias: bool = False  # the lm_head has a bias

    # ---- names in files
    # pairs: a part of a tensor's name here, and the part that files may have instead; those of
    # experts are in MoESpec.renames
    renames: tuple[tuple[str, str], ...] = ()
    peft_refuses: tuple[str, ...] = ()  # name endings of linears to which PEFT adds no adapter


@dataclasses.dataclass(frozen=True)
class Family(ArchitectureFields):
    """The differences of a model type from Llama. These fields are read by make_architecture()
    alone, which computes others from them.
    """

    # ---- norms
    post_norm_if: bool | FromConfig = True  # if a config can switch the two post norms off

    # ---- attention: linears and heads
    heads_by_layer: FromConfig = None  # a list in the config, instead of num_attention_heads
    # this many last layers have no keys and values of their own: they read those of the last layer
    # before these with the same layer type
    n_kv_shared_layers: int | FromConfig = 0
    qk_norm_if: bool | FromConfig = True  # if a config can switch it off

    # ---- rotary and windows
    # partial_rotary_factor of rope_parameters is used; with rope_type "proportional" in any case
    partial_rotary: bool = False
    ropes_by_layer_type: bool = False  # rope_parameters has an entry for each layer type
    rope_theta_by_layer: bool = False  # layer_rope_theta of the config has that of each layer
    ntk_alpha: bool = False  # alpha of rope_parameters is used, whatever the length
    rotary_if: bool | FromConfig = True  # if a config can switch it off; True or "rope": on
    no_rotary: NoRotary | None = None  # None: all layers have it
    # 1: layers without experts are rotated, whatever no_rotary says
    dense_rotary_if: int | FromConfig = None
    windowed_layers: WindowedLayers | None = None  # None: no layer has a window

    # ---- MLP
    # linears whose concatenated outputs are gate and up, or up alone
    mlp_in: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    mlp_out: str = "mlp.down_proj"
    mlp_bias: bool | FromConfig = "config.mlp_bias"
    intermediate_size: int | FromConfig = "config.intermediate_size"  # width of gate and up, each
    # LFM2: two thirds of intermediate_size, times a factor, rounded up to a multiple; see
    # mlp_width()
    two_thirds_wide: bool | FromConfig = False
    mlp_limits: FromConfig = None  # like MoESpec.limits, for the MLP and the shared expert

    # ---- factors
    query_scalar: float | FromConfig | None = None  # attention_scale = this ** -0.5; None: head_dim
    query_factor: float | FromConfig = 1.0  # also multiplies it, unless attention_scale is given
    key_multiplier: float | FromConfig = 1.0  # factor of k's output, also in attention_scale
    sqrt_embedding: bool | FromConfig = False  # embedding_multiplier = hidden_size ** 0.5
    depth_scale: float | FromConfig | None = None  # residual_multiplier = this / layers ** 0.5
    logits_divisor: float | FromConfig = 1.0
    base_hidden_size: int | FromConfig | None = None  # logits_divisor = hidden_size / this

    # ---- other mixers, experts, per-layer inputs
    # a layer has one sublayer with one norm: attention, one of other_mixers or, if its layer type
    # is "mlp" or "moe", an MLP or experts
    one_sublayer: bool = False

    # ---- names in files
    prefixes: tuple[str, ...] = ("model.",)  # of a model's names; the first one is transformers'

    # ---- checks of config.json
    # {field of the config: its only value}
    must_be: dict[str, Any] = dataclasses.field(default_factory=dict)
    unused_fields: tuple[str, ...] = ()  # fields of the config that change nothing here
