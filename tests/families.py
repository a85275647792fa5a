"""Tiny configs of every supported family and variant, and checkpoints of them as released ones
look."""

import copy
import json
import re

import bitsandbytes as bnb
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BitsAndBytesConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fsdp_qlora.pretrained.from_config import make_architecture

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16)
# As Ministral 3 ships it: query temperature counts from position 8 on
YARN_LLAMA4 = YARN | dict(
    original_max_position_embeddings=8,
    mscale=1.0,
    mscale_all_dim=1.0,
    beta_fast=32.0,
    beta_slow=1.0,
    llama_4_scaling_beta=0.1,
)
MROPE = dict(
    rope_type="default", rope_theta=10000.0, mrope_interleaved=True, mrope_section=[3, 3, 2]
)
MROPE_IN_ROW = dict(rope_type="default", rope_theta=10000.0, mrope_section=[3, 3, 2])
MROPE_HALF = MROPE_IN_ROW | dict(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])
MROPE25 = MROPE | dict(partial_rotary_factor=0.25, mrope_section=[1, 1, 0])
GRANITE4 = dict(
    layer_types=["attention"] * 3,
    num_local_experts=0,
    num_experts_per_tok=0,
    shared_intermediate_size=96,
    mamba_n_heads=16,
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.1,
    logits_scaling=8.0,
)
GEMMA4 = dict(
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=7,
    head_dim=24,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    final_logit_softcapping=3.0,
    tie_word_embeddings=True,
    hidden_size_per_layer_input=0,
)
# The last three layers read others' keys and values
GEMMA4_E = GEMMA4 | dict(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    num_global_key_value_heads=None,
    attention_k_eq_v=False,
    num_kv_shared_layers=3,
    hidden_size_per_layer_input=32,
)
GRANITE_SWA = dict(
    layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    sliding_window=7,
    layer_rope_theta=[0, 500.0, 10000.0],
    embedding_multiplier=2.0,
    residual_multiplier=0.4,
    attention_multiplier=0.3,
    logits_scaling=2.0,
    tie_word_embeddings=True,
)
GRANITE4_H = GRANITE4 | dict(layer_types=["mamba", "attention", "mamba"], mamba_d_state=16)
HYBRID = ["linear_attention", "linear_attention", "full_attention"]
DELTA_NET = dict(
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=32,
)
LATENT = dict(
    num_key_value_heads=4,
    q_lora_rank=64,
    kv_lora_rank=64,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
YARN_MLA = dict(rope_parameters=YARN | dict(mscale=0.8, mscale_all_dim=1.2))
DEEPSEEK = dict(
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    first_k_dense_replace=1,
)
INDEXER = dict(index_head_dim=16, index_n_heads=2)
FALCON = dict(
    mamba_d_ssm=96,
    mamba_n_heads=4,
    mamba_n_groups=2,
    mamba_d_state=16,
    lm_head_multiplier=0.3,
    embedding_multiplier=5.656854249492381,
    mlp_multipliers=[0.9, 0.4],
    key_multiplier=0.4,
    attention_in_multiplier=0.9,
    attention_out_multiplier=0.7,
    ssm_multipliers=[0.35, 0.25, 0.18, 0.5, 0.35],
    ssm_in_multiplier=1.25,
    ssm_out_multiplier=0.25,
)
NEMOTRON_H = dict(
    head_dim=24,
    layer_types=["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
    mamba_num_heads=4,
    mamba_head_dim=16,
    n_groups=2,
    ssm_state_size=8,
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=48,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
)
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def longrope(n_factors):
    """Factors as Phi-3 ships them: near 1 for short, growing with the wavelength for long rows."""
    return dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0 + 0.05 * i for i in range(n_factors)],
        long_factor=[1.0 + 0.9 * i for i in range(n_factors)],
    )


def tiny(model_type, head_dim=16, **settings):
    """A function vocab_size -> config of three layers; head_dim None: the family has none."""

    def make(vocab_size):
        base = dict(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.06,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        if head_dim:
            base["head_dim"] = head_dim
        return AutoConfig.for_model(model_type, **copy.deepcopy(base | settings))

    make.model_type = model_type
    return make


def gemma4_e(**settings):
    """As tiny(), of a Gemma 4 whose layers have inputs of their own and share keys and values."""

    def make(vocab_size):
        inputs = dict(vocab_size_per_layer_input=vocab_size)
        return tiny("gemma4_text", **GEMMA4_E | inputs | settings)(vocab_size)

    make.model_type = "gemma4_text"
    return make


def multimodal(model_type, text, vision_type, tied, vision_too=(), **settings):
    """A function vocab_size -> config with a vision tower of one layer, whose config also has
    `vision_too`, and text's tiny config. vision_type None: no vision tower."""

    def make(vocab_size):
        vision = dict(
            model_type=vision_type,
            hidden_size=32,
            intermediate_size=48,
            image_size=28,
            num_hidden_layers=1,
            num_attention_heads=2,
            patch_size=14,
            head_dim=16,
        ) | dict(vision_too)
        text_config = text(vocab_size).to_dict() | {"tie_word_embeddings": tied}
        return AutoConfig.for_model(
            model_type,
            text_config=text_config,
            tie_word_embeddings=tied,
            initializer_range=0.06,
            **dict(vision_config=vision, image_token_index=vocab_size - 1) if vision_type else {},
            **copy.deepcopy(settings),
        )

    make.model_type = model_type
    return make


def ovis2(vocab_size):
    """As multimodal(); sizes of the text model are in the outer config, too."""
    make = multimodal(
        "ovis2", tiny("qwen2", None), "ovis2_vision", True, dict(vocab_size=24), hidden_size=64,
        vocab_size=vocab_size)  # fmt: skip
    return make(vocab_size)


ovis2.model_type = "ovis2"
GEMMA3 = tiny(
    "gemma3_text",
    query_pre_attn_scalar=24,
    sliding_window=7,
    layer_types=MIXED,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
)
GLM4V_TEXT = tiny("glm4v_text", None, rope_parameters=MROPE_HALF)
MINISTRAL3 = tiny("ministral3", head_dim=24, rope_parameters=YARN_LLAMA4)
TINY = {
    "llama": tiny("llama"),
    "llama_bias": tiny(
        "llama", attention_bias=True, mlp_bias=True, head_dim=24, num_key_value_heads=4
    ),
    "llama3": tiny(
        "llama", rope_parameters=LLAMA3, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "llama_linear": tiny(
        "llama", rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)
    ),
    "llama_proportional": tiny(
        "llama",
        rope_parameters=dict(rope_type="proportional", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "llama_dynamic": tiny(
        "llama",
        max_position_embeddings=16,
        rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0),
    ),
    "llama_yarn": tiny("llama", rope_parameters=YARN),
    "internlm3": tiny("internlm3", head_dim=24, attention_bias=True, mlp_bias=True),
    "arcee": tiny("arcee", head_dim=24, attention_bias=True, tie_word_embeddings=True),
    "jais2": tiny("jais2", head_dim=24),
    "nemotron": tiny("nemotron", head_dim=24, mlp_bias=True),
    "starcoder2": tiny("starcoder2", None, sliding_window=7, tie_word_embeddings=True),
    "stablelm": tiny("stablelm", None, use_qkv_bias=True),
    "iquestcoder": tiny("iquestcoder", head_dim=24),
    "cwm": tiny("cwm", sliding_window=7, layer_types=MIXED, rope_parameters=LLAMA3),
    "helium": tiny("helium"),
    "helium_bias": tiny("helium", attention_bias=True, mlp_bias=True),
    "hyperclovax": tiny(
        "hyperclovax",
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=0.125,
    ),
    "hyperclovax_no_post_norm": tiny("hyperclovax", use_post_norm=False, attention_bias=True),
    "vaultgemma": tiny(
        "vaultgemma", query_pre_attn_scalar=24, sliding_window=7, layer_types=MIXED
    ),
    "mistral": tiny("mistral", sliding_window=7),
    "mistral_full": tiny("mistral", sliding_window=None, head_dim=24),
    "ministral": tiny("ministral", sliding_window=7, layer_types=MIXED),
    "ministral3": MINISTRAL3,
    "qwen2": tiny("qwen2", None),
    "qwen2_window": tiny(
        "qwen2",
        None,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
        tie_word_embeddings=True,
    ),
    "qwen3": tiny("qwen3", head_dim=24),
    "qwen3_yarn": tiny(
        "qwen3", rope_parameters=YARN, attention_bias=True, tie_word_embeddings=True
    ),
    "qwen3_window": tiny(
        "qwen3", use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "apertus": tiny("apertus", None, rope_parameters=LLAMA3),
    "phi": tiny("phi", None),
    "phi_tied": tiny("phi", head_dim=24, tie_word_embeddings=True),
    "phi3": tiny("phi3", None, num_key_value_heads=4),
    "phi3_window": tiny("phi3", None, sliding_window=7, num_key_value_heads=4),
    "phi3_longrope": tiny(
        "phi3",
        None,
        original_max_position_embeddings=16,
        num_key_value_heads=4,
        rope_parameters=longrope(8),
    ),
    "phi4_mini": tiny(
        "phi3",
        None,
        original_max_position_embeddings=16,
        tie_word_embeddings=True,
        rope_parameters=longrope(6) | dict(partial_rotary_factor=0.75),
    ),
    "gemma": tiny("gemma", head_dim=32, num_key_value_heads=1),
    "gemma2": tiny(
        "gemma2",
        query_pre_attn_scalar=24,
        sliding_window=7,
        layer_types=MIXED,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3_text": tiny(
        "gemma3_text", sliding_window=7, layer_types=MIXED, query_pre_attn_scalar=16
    ),
    "gemma3_text_linear": GEMMA3,
    "gemma4_text": tiny("gemma4_text", **GEMMA4),
    "gemma4_moe": tiny("gemma4_text", **GEMMA4 | dict(
        enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=32)),
    "gemma4_values": tiny("gemma4_text", **GEMMA4 | dict(attention_k_eq_v=False)),
    "gemma4_e": gemma4_e(),
    "gemma4_wide": gemma4_e(
        use_double_wide_mlp=True, attention_k_eq_v=True, num_global_key_value_heads=1,
        tie_word_embeddings=False),
    "gemma4_inputs": gemma4_e(num_kv_shared_layers=0),
    "granite": tiny(
        "granite",
        None,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
        logits_scaling=8.0,
        tie_word_embeddings=True,
    ),
    "granite_swa": tiny(
        "granite_swa", None, **GRANITE_SWA, attention_bias=True, mlp_bias=True),
    "granite4": tiny("granitemoehybrid", None, position_embedding_type="rope", **GRANITE4),
    "granite4_nope": tiny(
        "granitemoehybrid", None, attention_bias=True, tie_word_embeddings=True, **GRANITE4
    ),
    "granite4_h": tiny(
        "granitemoehybrid",
        None,
        **GRANITE4_H | dict(mamba_n_heads=4, mamba_n_groups=1),
    ),
    "falcon_h1": tiny("falcon_h1", mamba_norm_before_gate=False, mamba_rms_norm=True, **FALCON),
    "falcon_h1_no_norm": tiny("falcon_h1", None, **FALCON),
    "cohere": tiny("cohere", None, logit_scale=0.25),
    "cohere_qk_norm": tiny("cohere", None, use_qk_norm=True, attention_bias=True),
    "cohere2": tiny("cohere2", None, sliding_window=7, layer_types=MIXED, logit_scale=0.25),
    "olmo": tiny("olmo", None, clip_qkv=1.0),
    "olmo_no_clip": tiny("olmo", None, tie_word_embeddings=True, attention_bias=True),
    "olmo2": tiny("olmo2", None),
    "olmo3": tiny("olmo3", None, sliding_window=7, layer_types=MIXED),
    "olmo3_yarn": tiny(
        "olmo3",
        None,
        sliding_window=7,
        layer_types=MIXED,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "nanochat": tiny("nanochat", None, final_logit_softcapping=3.0),
    "nanochat_bias": tiny(
        "nanochat", None, attention_bias=True, final_logit_softcapping=None, rope_parameters=YARN),
    "smollm3": tiny("smollm3", None, no_rope_layers=[1, 0, 1]),
    "smollm3_window": tiny(
        "smollm3", None, no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=7
    ),
    "glm": tiny("glm"),
    "glm4": tiny("glm4", head_dim=24),
    "ernie4_5": tiny("ernie4_5", head_dim=24),
    "ernie4_5_bias": tiny("ernie4_5", use_bias=True),
    "seed_oss": tiny("seed_oss", head_dim=24),
    "exaone": tiny("exaone", attention_bias=True, mlp_bias=True),
    "exaone4": tiny("exaone4", None, sliding_window=7, layer_types=MIXED),
    "exaone4_full": tiny("exaone4", None, sliding_window=None, layer_types=["full_attention"] * 3),
    "hunyuan": tiny("hunyuan_v1_dense"),
    "hunyuan_alpha": tiny(
        "hunyuan_v1_dense",
        head_dim=24,
        tie_word_embeddings=True,
        rope_parameters=dict(
            rope_type="dynamic",
            rope_theta=1e4,
            alpha=1000.0,
            factor=1.0,
            beta_fast=32,
            beta_slow=1,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
    ),
    "lfm2": tiny(
        "lfm2", None, layer_types=["conv", "full_attention", "conv"], tie_word_embeddings=True),
    "lfm2_bias": tiny(
        "lfm2", None, layer_types=["full_attention", "conv", "conv"], conv_bias=True,
        block_auto_adjust_ff_dim=False, tie_word_embeddings=False),
    "lfm3": tiny(
        "lfm3", layer_types=["conv", "full_attention", "sliding_attention"], sliding_window=7,
        tie_word_embeddings=True),
    "lfm3_plain": tiny(
        "lfm3", layer_types=["full_attention", "conv", "sliding_attention"], sliding_window=7,
        tie_word_embeddings=False, use_sandwich_norm=False, conv_bias=True),
    "lfm2_moe": tiny(
        "lfm2_moe", None, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1,
        moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.5),
    "qwen3_5": tiny("qwen3_5_text", layer_types=HYBRID, **DELTA_NET),
    "qwen3_5_moe": tiny(
        "qwen3_5_moe_text", layer_types=HYBRID, **DELTA_NET, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=3),
    "qwen3_next": tiny(
        "qwen3_next", layer_types=HYBRID, **DELTA_NET, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, num_experts=8, num_experts_per_tok=3,
        mlp_only_layers=[1]),
    "olmo_hybrid": tiny("olmo_hybrid", None, layer_types=HYBRID, **DELTA_NET),
    "qwen3_moe": tiny("qwen3_moe", moe_intermediate_size=32, num_experts=8, num_experts_per_tok=3),
    "qwen3_moe_dense": tiny(
        "qwen3_moe",
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen2_moe": tiny(
        "qwen2_moe",
        None,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        num_experts=6,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "flint": tiny(
        "flint",
        head_dim=24,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_only_layers=[0],
    ),
    "kolibri1": tiny(
        "kolibri1",
        head_dim=24,
        sliding_window=7,
        layer_types=MIXED,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_local_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "cohere2_moe": tiny(
        "cohere2_moe",
        head_dim=24,
        logit_scale=0.25,
        sliding_window=7,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        prefix_dense_intermediate_size=80,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        norm_topk_prob=False,
    ),
    "cohere2_moe_sigmoid": tiny(
        "cohere2_moe",
        attention_bias=True,
        sliding_window=7,
        layer_types=MIXED,
        prefix_dense_sliding_window_pattern=4,
        expert_selection_fn="sigmoid",
        shared_expert_combination_strategy="sum",
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
    ),
    "cohere2_moe_routed": tiny(
        "cohere2_moe", sliding_window=7, layer_types=MIXED, mlp_layer_types=[
            "sparse", "sparse", "dense"], num_experts=4, norm_topk_prob=False,
        expert_selection_fn="sigmoid"),
    "mixtral": tiny("mixtral", num_local_experts=4),
    "minimax_m2": tiny(
        "minimax_m2",
        num_local_experts=8,
        num_experts_per_tok=3,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "olmoe": tiny("olmoe", None, num_experts=8, num_experts_per_tok=2),
    "flex_olmo": tiny("flex_olmo", None, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "granitemoe": tiny(
        "granitemoe",
        None,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_multiplier=0.3,
        embedding_multiplier=2.0,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "granitemoeshared": tiny(
        "granitemoeshared", None, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=48, attention_multiplier=0.3, embedding_multiplier=2.0,
        residual_multiplier=0.4, logits_scaling=2.0),
    "granitemoe_swa": tiny(
        "granitemoe_swa", None, **GRANITE_SWA, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=48),
    "granitemoe_swa_routed": tiny(
        "granitemoe_swa", None, **GRANITE_SWA, num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=0),
    "granite4_h_moe": tiny(
        "granitemoehybrid",
        None,
        **GRANITE4_H
        | dict(
            mamba_n_heads=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=48,
        ),
    ),
    "nemotron_h": tiny("nemotron_h", **NEMOTRON_H),
    "nemotron_h_latent": tiny("nemotron_h", **NEMOTRON_H, moe_latent_size=40),
    "hunyuan_moe": tiny("hunyuan_v1_moe", num_experts=4, moe_topk=2),
    "glm4_moe": tiny(
        "glm4_moe",
        head_dim=24,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
    ),
    "sarvam_moe": tiny(
        "sarvam_moe", head_dim=24, **DEEPSEEK, n_group=4, topk_group=2, attention_bias=True),
    "sarvam_moe_no_norm": tiny(
        "sarvam_moe", **DEEPSEEK, use_qk_norm=False,
        rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    "sarvam_mla": tiny(
        "sarvam_mla", None, **LATENT | YARN_MLA | dict(q_lora_rank=None), **DEEPSEEK, n_group=4,
        topk_group=2),
    "youtu": tiny("youtu", None, **LATENT | dict(v_head_dim=24)),
    "minicpm3": tiny(
        "minicpm3", None, **LATENT | dict(q_lora_rank=None, v_head_dim=24), scale_emb=12,
        scale_depth=1.4, dim_model_base=32),
    "glm4_moe_lite": tiny(
        "glm4_moe_lite", None, **LATENT | dict(v_head_dim=24), moe_intermediate_size=32,
        n_routed_experts=8, num_experts_per_tok=3,
        mlp_layer_types=["dense", "sparse", "sparse"]),
    "deepseek_v3": tiny(
        "deepseek_v3", None, **LATENT | YARN_MLA, **DEEPSEEK, n_group=4, topk_group=2,
        routed_scaling_factor=2.5),
    "deepseek_v3_moonlight": tiny(
        "deepseek_v3", None, **LATENT | dict(q_lora_rank=None), **DEEPSEEK, n_group=1,
        topk_group=1, rope_interleave=False),
    "deepseek_v2": tiny(
        "deepseek_v2", None, **LATENT | YARN_MLA, **DEEPSEEK, n_group=4, topk_group=2,
        topk_method="group_limited_greedy", routed_scaling_factor=4.0),
    "deepseek_v2_lite": tiny(
        "deepseek_v2", None, **LATENT | dict(q_lora_rank=None), **DEEPSEEK, n_group=4,
        topk_group=2),
    "axk1": tiny(
        "axk1", None, **LATENT | YARN_MLA, moe_intermediate_size=32, n_routed_experts=8,
        num_experts_per_tok=3, n_shared_experts=2, n_group=4, topk_group=2,
        mlp_layer_types=["dense", "sparse", "sparse"]),
    "deepseek_v32": tiny(
        "deepseek_v32", None, **LATENT | YARN_MLA, **DEEPSEEK, **INDEXER, n_group=4, topk_group=2),
    "glm_moe_dsa": tiny(
        "glm_moe_dsa", None, **LATENT | dict(v_head_dim=24), **DEEPSEEK, **INDEXER,
        indexer_types=["full", "shared", "full"]),
    "mistral4": multimodal(
        "mistral3", tiny(
            "mistral4", None, **LATENT, **DEEPSEEK, n_group=1, topk_group=1,
            rope_parameters=YARN_LLAMA4),
        "pixtral", False),
    "kimi_k25": multimodal(
        "kimi_k25", tiny("deepseek_v3", None, **LATENT, **DEEPSEEK, n_group=1, topk_group=1),
        "kimi_k25_vision", False),
    "dots1": tiny(
        "dots1",
        None,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        sliding_window=7,
        max_window_layers=2,
    ),
    "solar_open": tiny(
        "solar_open",
        head_dim=24,
        attention_bias=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=1.5,
    ),
    "exaone_moe": tiny(
        "exaone_moe",
        None,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        sliding_window=7,
        layer_types=MIXED,
    ),
    "hy_v3": tiny(
        "hy_v3",
        head_dim=24,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "mellum": tiny(
        "mellum",
        head_dim=24,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        sliding_window=7,
        layer_types=MIXED,
        mlp_layer_types=["dense", "sparse", "sparse"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "laguna": tiny(
        "laguna",
        head_dim=32,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
        moe_routed_scaling_factor=2.5,
        sliding_window=7,
        layer_types=MIXED,
        num_attention_heads_per_layer=[6, 4, 6],
        rope_parameters={
            "full_attention": YARN | dict(partial_rotary_factor=0.5),
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "laguna_elements": tiny(
        "laguna",
        moe_intermediate_size=32,
        num_experts=8,
        gating="per-element",
    ),
    "afmoe": tiny(
        "afmoe",
        head_dim=24,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=2,
        num_dense_layers=1,
        route_scale=1.5,
        mup_enabled=True,
        sliding_window=7,
        layer_types=MIXED,
    ),
    "ernie4_5_moe": tiny(
        "ernie4_5_moe",
        None,
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=32,
    ),
    "gpt_oss": tiny(  # as released, its down_proj is square: no shape tells that it is transposed
        "gpt_oss",
        intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=7,
        layer_types=MIXED,
        rope_parameters=YARN | dict(truncate=False, beta_fast=32.0, beta_slow=1.0),
    ),
    "gemma3": multimodal(
        "gemma3",
        GEMMA3,
        "siglip_vision_model",
        True,
        mm_tokens_per_image=4,
        boi_token_index=3,
        eoi_token_index=4,
    ),
    "gemma4": multimodal(
        "gemma4", tiny("gemma4_text", **GEMMA4), "gemma4_vision", True),
    "gemma4_e_vl": multimodal("gemma4", gemma4_e(), "gemma4_vision", True),
    "gemma4_unified": multimodal(
        "gemma4_unified", tiny("gemma4_unified_text", **GEMMA4), "gemma4_unified_vision", True),
    "mistral3": multimodal(
        "mistral3", tiny("mistral", sliding_window=None, head_dim=24), "pixtral", False
    ),
    "internvl": multimodal("internvl", tiny("qwen3"), "internvl_vision", False),
    "internvl_qwen2": multimodal("internvl", tiny("qwen2", None), "internvl_vision", True),
    "llava": multimodal("llava", tiny("mistral", sliding_window=None), "pixtral", False),
    "exaone4_5": multimodal(
        "exaone4_5",
        tiny("exaone4", None, sliding_window=7, layer_types=MIXED),
        "exaone4_5_vision",
        False,
    ),
    "qwen3_vl": multimodal(
        "qwen3_vl",
        tiny("qwen3_vl_text", head_dim=24, rope_parameters=MROPE),
        "qwen3_vl_vision",
        True,
    ),
    "qwen3_vl_moe": multimodal(
        "qwen3_vl_moe",
        tiny(
            "qwen3_vl_moe_text",
            head_dim=24,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=3,
            mlp_only_layers=[1],
            rope_parameters=MROPE,
        ),
        "qwen3_vl_moe_vision",
        True,
    ),
    "qwen2_vl": multimodal(
        "qwen2_vl", tiny("qwen2_vl_text", None, rope_parameters=MROPE_IN_ROW), "qwen2_vl_vision",
        False, dict(embed_dim=32, hidden_size=48, num_heads=2, depth=1).items()),  # fmt: skip
    "qwen2_5_vl": multimodal(
        "qwen2_5_vl", tiny("qwen2_5_vl_text", None, rope_parameters=MROPE_IN_ROW),
        "qwen2_5_vl_vision", False),  # fmt: skip
    "glm4v": multimodal("glm4v", GLM4V_TEXT, "glm4v_vision", False),
    "glm4v_moe": multimodal(
        "glm4v_moe", tiny(
            "glm4v_moe_text", None, **DEEPSEEK, n_group=4, topk_group=2, rope_parameters=MROPE_HALF,
            routed_scaling_factor=2.5), "glm4v_moe_vision", False),
    "muse_glimmer": multimodal(
        "muse_glimmer",
        tiny(
            "muse_glimmer_text",
            head_dim=24,
            sliding_window=7,
            layer_types=MIXED,
            layer_rope_theta=[10000.0, 0, 10000.0],
            final_logit_softcapping=3.0,
        ),
        "muse_glimmer_vision",
        False,
        out_hidden_size=64,
        projector_hidden_size=32,
    ),
    "step3p7": multimodal(
        "step3p7",
        tiny(
            "step3p5",
            head_dim=32,
            moe_intermediate_size=32,
            share_expert_dim=48,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_router_scaling_factor=3.0,
            num_sliding_attention_heads=6,
            sliding_window=7,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            mlp_layer_types=["dense", "sparse", "sparse"],
            swiglu_limits=[None, 0.0, 0.4],
            swiglu_limits_shared=[0.3, 0, 0.5],
            rope_parameters={
                "full_attention": LLAMA3 | dict(partial_rotary_factor=0.5),
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            },
        ),
        "step3p5_vision",
        False,
    ),
    "qwen3_5_vl": multimodal(
        "qwen3_5", tiny("qwen3_5_text", layer_types=HYBRID, rope_parameters=MROPE25, **DELTA_NET),
        "qwen3_5_vision", False),
    "qwen3_5_moe_vl": multimodal(
        "qwen3_5_moe",
        tiny("qwen3_5_moe_text", layer_types=HYBRID, rope_parameters=MROPE25, **DELTA_NET,
             moe_intermediate_size=32, shared_expert_intermediate_size=64, num_experts=8,
             num_experts_per_tok=3),
        "qwen3_5_moe_vision", True),
    "mistral3_ministral3": multimodal("mistral3", MINISTRAL3, "pixtral", True),
}


# Others around a text model that is there already
OUTER = {
    name: multimodal(name, TINY[text], vision, text == "lfm2")
    for name, text, vision in (
        ("llava_next", "mistral", "clip_vision_model"),
        ("llava_onevision", "qwen2", "siglip_vision_model"),
        ("idefics3", "llama", "idefics3_vision"), ("smolvlm", "llama", "smolvlm_vision"),
        ("lfm2_vl", "lfm2", "siglip2_vision_model"))}  # fmt: skip
OUTER["lfm3_vl"] = multimodal(
    "lfm3_vl", TINY["lfm3"], "lfm3_vl_vision", True, dict(
        num_key_value_heads=1, layer_types=["full_attention"]).items())
OUTER["glm46v"] = multimodal("glm46v", GLM4V_TEXT, "glm4v_vision", False)
OUTER["gemma4_moe_vl"] = multimodal("gemma4", TINY["gemma4_moe"], "gemma4_vision", True)
AUDIO = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
QWEN_AUDIO = dict(
    d_model=32, encoder_ffn_dim=48, encoder_layers=1, encoder_attention_heads=2, num_mel_bins=8)
VIBEVOICE = dict(
    model_type="vibevoice_acoustic_tokenizer_encoder", hidden_size=16, num_filters=4,
    depths=[1, 1], downsampling_ratios=[2])
TIMM = dict(model_args={"embed_dim": 32})  # as in a config of timm, which the tests do not need
OUTER |= {
    "glmga": multimodal("glmga", GLM4V_TEXT, "glm4v_vision", False),
    "llava_next_video": multimodal("llava_next_video", TINY["llama"], "clip_vision_model", False),
    "video_llava": multimodal("video_llava", TINY["llama"], "clip_vision_model", False),
    "vipllava": multimodal(
        "vipllava", TINY["llama"], "clip_vision_model", False, vision_feature_layer=[0]),
    "video_llama_3": multimodal("video_llama_3", TINY["qwen2"], "video_llama_3_vision", False),
    "idefics2": multimodal(
        "idefics2", TINY["mistral"], "idefics2_vision", False, perceiver_config=dict(
            hidden_size=64, resampler_n_latents=4, resampler_depth=1, resampler_n_heads=2,
            resampler_head_dim=16, num_key_value_heads=1)),
    "perception_lm": multimodal(
        "perception_lm", TINY["llama"], "siglip_vision_model", False, TIMM),
    "fast_vlm": multimodal("fast_vlm", TINY["qwen2"], "siglip_vision_model", False, TIMM),
    "ovis2": ovis2,
    "deepseek_vl": multimodal("deepseek_vl", TINY["llama"], "siglip_vision_model", False),
    "janus": multimodal(
        "janus", TINY["llama"], "janus_vision_model", False, dict(projection_dim=64),
        vq_config=dict(
            base_channels=32, channel_multiplier=[1], num_res_blocks=1, num_embeddings=16,
            latent_channels=32, projection_dim=64, image_token_embed_dim=64)),
    "minicpmv4_6": multimodal(
        "minicpmv4_6", TINY["qwen3_5"], "minicpmv4_6_vision", False, insert_layer_id=0),
    "minicpmv4_7": multimodal(
        "minicpmv4_7", TINY["qwen3_5"], "minicpmv4_7_vision", False, insert_layer_id=0),
    "minicpm_ocr": multimodal(
        "minicpm_ocr", TINY["qwen3_5"], "minicpm_ocr_vision", True, insert_layer_id=0),
    "got_ocr2": multimodal(
        "got_ocr2", TINY["qwen2"], "got_ocr2_vision", True, dict(
            output_channels=8, mlp_dim=32, window_size=2, global_attn_indexes=[0])),
    "lighton_ocr": multimodal("lighton_ocr", TINY["qwen3"], "pixtral", True),
    "qianfan_ocr": multimodal("qianfan_ocr", TINY["qwen3"], "qianfan_ocr_vision", False),
    "hyperclovax_vision_v2": multimodal(
        "hyperclovax_vision_v2", TINY["hyperclovax"], "qwen2_5_vl_vision", False, dict(
            depth=1, num_heads=2, out_hidden_size=32)),
    "nemotron_h_omni": multimodal(
        "nemotron_h_omni", TINY["nemotron_h"], "radio", False, dict(video_temporal_patch_size=2),
        audio_config=None, projector_hidden_size=32, vision_hidden_size=32),
    "voxtral": multimodal("voxtral", TINY["llama"], None, False, audio_config=dict(
        model_type="voxtral_encoder", num_mel_bins=8, **AUDIO)),
    "glmasr": multimodal("glmasr", TINY["llama"], None, True, audio_config=dict(
        model_type="glmasr_encoder", num_mel_bins=8, **AUDIO)),
    "omniasr": multimodal("omniasr", TINY["llama"], None, False, audio_config=dict(
        model_type="omniasr_audio", initializer_range=0.06, conv_dim=[8], conv_kernel=[4],
        conv_stride=[4], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **AUDIO)),
    "qwen2_audio": multimodal("qwen2_audio", TINY["qwen2"], None, False, audio_config=dict(
        model_type="qwen2_audio_encoder", **QWEN_AUDIO)),
    "qwen3_asr": multimodal(
        "qwen3_asr", TINY["qwen3"], None, True, pad_token_id=0, audio_config=dict(
            model_type="qwen3_asr_encoder", output_dim=64, downsample_hidden_size=8,
            **QWEN_AUDIO)),
    "vibevoice_asr": multimodal(
        "vibevoice_asr", TINY["qwen2"], None, False,
        acoustic_tokenizer_encoder_config=VIBEVOICE, semantic_tokenizer_encoder_config=VIBEVOICE),
}
# of some families older versions of transformers know nothing
TINY, OUTER = (
    {name: make for name, make in models.items() if make.model_type in CONFIG_MAPPING}
    for models in (TINY, OUTER))
MIXTURES = [name for name, make in TINY.items() if make_architecture(make(320)).moe]


def auto_class(config):
    """transformers' auto class of a multimodal model or of a text model."""
    return AutoModelForMultimodalLM if hasattr(config, "text_config") else AutoModelForCausalLM


def make_model(config, seed=0, dtype=torch.float32, **settings):
    """The model with random norms and biases too, which transformers initializes to 1 and 0."""
    auto = auto_class(config)
    torch.manual_seed(seed)
    model, text = auto.from_config(config, **settings), getattr(config, "text_config", config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name or name.endswith(
                    (".bias", "router.scale", "per_expert_scale", "sinks")):
                value.add_(torch.randn_like(value) * 0.3)
            # six layers of sharp attention would show the rounding of fp32
            if name.endswith("q_norm.weight") and getattr(text, "num_kv_shared_layers", 0):
                value.mul_(0.1)
        for name, value in model.named_buffers():
            if name.endswith("layer_scalar"):
                value.mul_(0.7)
    return model.to(dtype).eval()


def mxfp4_experts(config, seed=0):
    """{name in a file: random bytes} of the experts of a gpt-oss in MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    n, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    found = {}
    for i in range(config.num_hidden_layers):
        for key, n_out, n_in in ("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner):
            name, shape = f"model.layers.{i}.mlp.experts.{key}", (n, n_out, n_in // 32)
            for part, limits in ("blocks", (0, 256)), ("scales", (119, 124)):
                values = torch.empty(*shape, *[16] * (part == "blocks"), dtype=torch.uint8)
                found[f"{name}_{part}"] = values.random_(*limits, generator=generator)
    return found


def write_mxfp4(directory, vocab_size):
    """Write a gpt-oss as it is released: its experts in MXFP4, the rest in bf16; in whole/ what
    transformers makes of it in bf16."""
    config = TINY["gpt_oss"](vocab_size)
    config.intermediate_size = 128
    tensors = dict(make_model(config, dtype=torch.bfloat16).state_dict())
    experts, whole = mxfp4_experts(config), dict(tensors)
    for name in {name.rpartition("_")[0] for name in experts}:
        del tensors[name]
        whole[name] = convert_moe_packed_tensors(
            experts[f"{name}_blocks"], experts[f"{name}_scales"], dtype=torch.bfloat16)
    config.save_pretrained(directory / "whole")
    config.quantization_config = {"quant_method": "mxfp4"}
    config.save_pretrained(directory)
    save_file({**tensors, **experts}, directory / "model.safetensors", {"format": "pt"})
    whole = {name: tensor.contiguous() for name, tensor in whole.items()}
    save_file(whole, directory / "whole" / "model.safetensors", {"format": "pt"})


# what transformers 4.57.3 makes a 4-bit linear of in a mixture, as seen in what it saves; 5 leaves
# experts as they are
LINEARS_IN_4 = r".*layers\..*(_proj|\.w[123]|_gate|\.gate|\.wg|router\.layer)\.weight"
ROUTER_NO_LINEAR_IN_4 = {"glm4_moe", "dots1", "gpt_oss"}


def write_4bit(directory, config, version, dtype=torch.float32):
    """Write a mixture as transformers of this version saves it after loading it in 4 bits: 5, which
    is asked to, or 4. Returns {name: tensor} of what was loaded."""
    write_model(directory / "whole", config)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype)  # fmt: skip
    model = auto_class(config).from_pretrained(
        directory / "whole", quantization_config=settings, dtype=dtype, device_map={"": "cpu"})
    model.save_pretrained(directory)
    whole = load_file(directory / "whole" / "model.safetensors")
    if version == 4:
        tensors = {}
        for name, weight in whole.items():
            tensors[name] = weight
            is_linear = re.fullmatch(LINEARS_IN_4, name) and weight.dim() == 2
            if config.model_type in ROUTER_NO_LINEAR_IN_4 and name.endswith("mlp.gate.weight"):
                is_linear = False
            if is_linear:
                tensors[name], state = bnb.functional.quantize_4bit(
                    weight.to(dtype), compress_statistics=True, quant_type="nf4", blocksize=64)
                parts = state.as_dict(packed=True)
                tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return whole


def to_fp8(weight):
    """A weight [out, in] in FP8 and the scales of its blocks of 128 x 128, as DeepSeek has them."""
    n_out, n_in = weight.shape
    padded = torch.zeros(-(-n_out // 128) * 128, -(-n_in // 128) * 128)
    padded[:n_out, :n_in] = weight
    blocks = padded.view(len(padded) // 128, 128, -1, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[:n_out, :n_in]
    return codes.to(torch.float8_e4m3fn), scales


def from_fp8(codes, scales):
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


def write_fp8(directory, config, dtype=torch.float32):
    """Write a mixture as it is released in FP8; in whole/ the values that it means, in `dtype`."""
    write_model(directory / "whole", config)
    whole = load_file(directory / "whole" / "model.safetensors")
    fp8, linears = dict(whole), tuple(
        f"{end}.weight" for end in ("proj", "proj_with_mqa", "w1", "w2", "w3"))
    for key, weight in whole.items():
        if "layers." in key and key.endswith(linears):
            fp8[key], fp8[f"{key}_scale_inv"] = to_fp8(weight.float())
            whole[key] = from_fp8(fp8[key], fp8[f"{key}_scale_inv"]).to(dtype)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    config = json.loads((directory / "whole" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    save_file(fp8, directory / "model.safetensors", {"format": "pt"})
    save_file(whole, directory / "whole" / "model.safetensors", {"format": "pt"})


def to_int4(weight):
    """A weight [out, in] in INT4 as compressed-tensors packs it: {end of a name: tensor}."""
    groups = weight.float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / 7.5).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1).long() + 8
    words = (codes.unflatten(1, (-1, 8)) << 4 * torch.arange(8)).sum(-1)
    words = torch.where(words < 2**31, words, words - 2**32).int()
    return {"_packed": words, "_scale": scales, "_shape": torch.tensor(weight.shape)}


def from_int4(parts):
    """In bf16, number by number."""
    rows = [[int(word) % 2**32 >> 4 * i & 15 for word in row for i in range(8)]
            for row in parts["_packed"]]  # fmt: skip
    codes = torch.tensor(rows, dtype=torch.bfloat16) - 8
    return codes * parts["_scale"].repeat_interleave(32, 1)


def write_int4(directory, config, dtype=torch.float32):
    """Write a mixture with experts in INT4, as Kimi K2.5 is released; in whole/ the values that it
    means, in `dtype`."""
    write_model(directory / "whole", config)
    saved = load_file(directory / "whole" / "model.safetensors")
    # by the released names; transformers 5.24 saves others of Kimi K2.5's text model
    whole = {key.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
             for key, tensor in saved.items()}  # fmt: skip
    tensors = dict(whole)
    for key in whole:
        if re.search(r"\.experts\.\d+\..*_proj\.weight", key):
            parts = to_int4(tensors.pop(key))
            tensors |= {key + end: part for end, part in parts.items()}
            whole[key] = from_int4(parts).to(dtype)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32,
               "symmetric": True, "dynamic": False, "observer": "minmax"}  # fmt: skip
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
                "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]}  # fmt: skip
    config = json.loads((directory / "whole" / "config.json").read_text())
    config.get("text_config", config)["quantization_config"] = settings
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(whole, directory / "whole" / "model.safetensors", {"format": "pt"})


def write_model(directory, config, seed=0, dtype=torch.bfloat16):
    """Write config.json and model.safetensors, named as transformers saves them."""
    make_model(config, seed, dtype).save_pretrained(directory)
