"""FAMILIES: how each supported model type differs from Llama.

To add a family whose parts are known, add one Family to FAMILIES. from_config.py makes an
Architecture of it and a config.json.
"""

from __future__ import annotations

import math
from typing import Any

from fsdp_qlora.pretrained.family_specs import (
    AdapterForm, AttentionGateSpec, ExpertNormsSpec, Family, GatedDeltaNetSpec, Mamba2Spec,
    MLASpec, MoESpec, PerLayerInputsSpec, ShortConvSpec)

BUILTIN_CONFIGS: dict[str, dict[str, Any]] = {  # for --random_weights, without a config.json
    name: dict(
        zip(("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "num_key_value_heads", "max_position_embeddings"), values),
        tie_word_embeddings=False)
    for name, *values in (
        ("llama-2-7b", "llama", 32000, 4096, 11008, 32, 32, 32, 4096),
        ("llama-2-70b", "llama", 32000, 8192, 28672, 80, 64, 8, 4096),
        ("llama-3-8b", "llama", 128256, 4096, 14336, 32, 32, 8, 8192),
        ("llama-3-70b", "llama", 128256, 8192, 28672, 80, 64, 8, 8192),
        ("qwen2.5-32b", "qwen2", 152064, 5120, 27648, 64, 40, 8, 32768))}
POST_NORMS: dict[str, Any] = dict(
    attention_norm=None, attention_post_norm="post_attention_layernorm",
    mlp_norm=None, mlp_post_norm="post_feedforward_layernorm")
GEMMA: dict[str, Any] = dict(
    norm_kind="rms_plus_one", sqrt_embedding=True, rounded_multiplier=True)
GEMMA2: dict[str, Any] = GEMMA | POST_NORMS | dict(
    attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm",
    windowed_layers="layer_types", activation="config.hidden_activation",
    query_scalar="config.query_pre_attn_scalar")
GEMMA4: dict[str, Any] = GEMMA2 | dict(
    norm_kind="rms_fp32", query_scalar=None, attention_scale=1.0, qk_norm="head", value_norm=True,
    keys_are_values="config.attention_k_eq_v", ropes_by_layer_type=True,
    logits_softcap="config.final_logit_softcapping", layer_scalar="layer_scalar",
    n_kv_shared_layers="config.num_kv_shared_layers", double_wide_mlp="config.use_double_wide_mlp",
    per_layer_inputs=PerLayerInputsSpec(),
    # with "vision" only pixels see later tokens; with "all", is_causal is False
    unused_fields=("use_bidirectional_attention",))
COHERE: dict[str, Any] = dict(
    norm_kind="layer", norm_eps="config.layer_norm_eps", mlp_norm="input_layernorm",
    parallel_residual=True,
    rotary_interleaved=True, logits_multiplier="config.logit_scale")
OLMO2: dict[str, Any] = POST_NORMS | dict(norm_kind="rms_fp32", qk_norm="full")
ONE_GATE_UP: dict[str, Any] = dict(mlp_in=("mlp.gate_up_proj",))
GLM: dict[str, Any] = ONE_GATE_UP | dict(
    out_bias=False, rotary_interleaved=True, partial_rotary=True)
GLM4: dict[str, Any] = GLM | dict(
    attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
UNGATED: dict[str, Any] = dict(gated=False, mlp_in=("mlp.up_proj",))
LAYER_NORM: dict[str, Any] = dict(
    norm_kind="layer", norm_bias=True, norm_eps="config.layer_norm_eps")
NEMOTRON: dict[str, Any] = dict(
    norm_kind="layer_plus_one", norm_eps="config.norm_eps", partial_rotary=True)
GRANITE: dict[str, Any] = dict(
    attention_scale="config.attention_multiplier",
    embedding_multiplier="config.embedding_multiplier",
    residual_multiplier="config.residual_multiplier")
GRANITE_SWA: dict[str, Any] = GRANITE | dict(
    logits_divisor="config.logits_scaling", sinks=True, windowed_layers="layer_types",
    no_rotary="layer_rope_theta", rope_theta_by_layer=True)
GRANITE_SHARED: dict[str, Any] = dict(
    mlp_in=("shared_mlp.input_linear",), mlp_out="shared_mlp.output_linear",
    intermediate_size="config.shared_intermediate_size")
GRANITE_EXPERTS: dict[str, Any] = dict(
    n_experts="config.num_local_experts", expert_size="config.intermediate_size",
    experts_prefix="block_sparse_moe.experts", router="block_sparse_moe.router",
    adapter_form="stacked",
    renames=(("moe.experts.gate_up_proj", "moe.input_linear.weight"),
             ("moe.experts.down_proj", "moe.output_linear.weight"),
             ("router.weight", "router.layer.weight")))
MIXTRAL: dict[str, Any] = dict(
    n_experts="config.num_local_experts", expert_size="config.intermediate_size",
    renames=(("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"),
             ("down_proj", "w2")))
DEEPSEEK: dict[str, Any] = dict(
    n_experts="config.n_routed_experts", n_first_dense="config.first_k_dense_replace",
    shared_size="config.moe_intermediate_size", n_shared="config.n_shared_experts",
    shared_prefix="mlp.shared_experts", fp32_router=True, score_func="sigmoid",
    correction_bias="mlp.gate.e_score_correction_bias", n_expert_groups="config.n_group",
    topk_group="config.topk_group", norm_topk_prob="config.norm_topk_prob",
    sum_eps=1e-20, routed_scaling_factor="config.routed_scaling_factor", rounded_weights=False)
MLA: dict[str, Any] = dict(
    mla=MLASpec(), qkv_bias=False, out_bias=False, mlp_bias=False,
    rotary_interleaved="config.rope_interleave")
INDEXED: dict[str, Any] = MLA | dict(
    mla=MLASpec(index_topk="config.index_topk"), rotary_interleaved=True,
    unused_fields=("index_head_dim", "index_n_heads", "indexer_types"))
HUNYUAN: dict[str, Any] = dict(
    qk_norm="head", qk_norm_after_rotary=True, ntk_alpha=True,
    q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
LFM2: dict[str, Any] = dict(
    norm_eps="config.norm_eps", attention_norm="operator_norm", mlp_norm="ffn_norm",
    final_norm="embedding_norm", qk_norm="head", q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm", attention_out="self_attn.out_proj", activation="silu",
    mlp_in=("feed_forward.w1", "feed_forward.w3"), mlp_out="feed_forward.w2",
    other_mixers={"conv": ShortConvSpec()})
QWEN3_NEXT: dict[str, Any] = dict(
    norm_kind="rms_plus_one", qk_norm="head", partial_rotary=True,
    attention_gate=AttentionGateSpec())
QWEN3_NEXT_EXPERTS: dict[str, Any] = dict(
    shared_size="config.shared_expert_intermediate_size", shared_gate="mlp.shared_expert_gate")
FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "internlm3": Family(),
    "arcee": Family(**UNGATED),
    "jais2": Family(**UNGATED, **LAYER_NORM),
    "nemotron": Family(**UNGATED, **LAYER_NORM | NEMOTRON),
    "starcoder2": Family(
        **LAYER_NORM | dict(norm_eps="config.norm_epsilon"), gated=False, mlp_in=("mlp.c_fc",),
        mlp_out="mlp.c_proj", qkv_bias="config.use_bias", out_bias="config.use_bias",
        mlp_bias="config.use_bias", windowed_layers="all",
        embedding_dropout="config.embedding_dropout", residual_dropout="config.residual_dropout"),
    "stablelm": Family(**LAYER_NORM, qkv_bias="config.use_qkv_bias", partial_rotary=True),
    "iquestcoder": Family(),
    "cwm": Family(windowed_layers="layer_types"),
    "helium": Family(norm_kind="rms_fp32", rotary_interleaved=True, out_bias=False),
    "mistral": Family(windowed_layers="all"),
    "ministral": Family(windowed_layers="layer_types"),
    "ministral3": Family(windowed_layers="all", query_temperature=True),
    "qwen2": Family(qkv_bias=True, windowed_layers="layer_types"),
    "qwen2_vl_text": Family(qkv_bias=True, windowed_layers="layer_types"),
    "qwen2_5_vl_text": Family(qkv_bias=True, windowed_layers="layer_types"),
    "qwen3": Family(qk_norm="head", windowed_layers="layer_types"),
    "qwen3_vl_text": Family(qk_norm="head"),
    "apertus": Family(**UNGATED, qk_norm="head", attention_norm="attention_layernorm",
                      mlp_norm="feedforward_layernorm"),
    "phi": Family(
        **LAYER_NORM, gated=False, mlp_in=("mlp.fc1",), mlp_out="mlp.fc2",
        mlp_norm="input_layernorm", parallel_residual=True, qkv_bias=True, out_bias=True,
        mlp_bias=True,
        attention_out="self_attn.dense", partial_rotary=True, final_norm="final_layernorm",
        lm_head_bias=True, embedding_dropout="config.embd_pdrop",
        residual_dropout="config.resid_pdrop"),
    "phi3": Family(**ONE_GATE_UP, one_qkv=True, partial_rotary=True, windowed_layers="all"),
    "gemma": Family(**GEMMA),
    "gemma2": Family(**GEMMA2, attention_softcap="config.attn_logit_softcapping",
                     logits_softcap="config.final_logit_softcapping"),
    "vaultgemma": Family(**GEMMA2 | dict(attention_post_norm=None, mlp_post_norm=None),
                         attention_softcap="config.attn_logit_softcapping",
                         logits_softcap="config.final_logit_softcapping"),
    "gemma3_text": Family(**GEMMA2, qk_norm="head", ropes_by_layer_type=True),
    "gemma4_text": Family(**GEMMA4, moe=MoESpec(
        experts_if="config.enable_moe_block", top_k="config.top_k_experts",
        experts_prefix="experts",
        router="router.proj", shared_mlp=True, rounded_weights=False, norms=ExpertNormsSpec(),
        expert_scale="router.per_expert_scale", adapter_form="stacked")),
    "gemma4_unified_text": Family(**GEMMA4),
    "muse_glimmer_text": Family(
        **POST_NORMS | dict(attention_norm="input_layernorm", mlp_norm="pre_feedforward_layernorm"),
        norm_kind="rms_plus_one", post_norm_eps="config.post_norm_eps", final_norm_kind="rms_fp32",
        embedding_norm=True, qkv_bias=False, out_bias=False, qk_norm="without weight",
        query_factor="config.qk_scale_factor", windowed_layers="layer_types",
        no_rotary="layer_rope_theta", attention_gate=AttentionGateSpec("gate_proj"),
        activation="config.hidden_activation", logits_multiplier="config.output_multiplier",
        logits_softcap="config.final_logit_softcapping"),
    "granite": Family(**GRANITE, logits_divisor="config.logits_scaling"),
    "granite_swa": Family(**GRANITE_SWA),
    "granitemoehybrid": Family(
        **GRANITE, **GRANITE_SHARED, logits_divisor="config.logits_scaling",
        rotary_if="config.position_embedding_type",
        other_mixers={"linear_attention": Mamba2Spec()},
        unused_fields=("output_router_logits", "router_aux_loss_coef", "mamba_expand",
                "mamba_chunk_size"),
        moe=MoESpec(**GRANITE_EXPERTS, shared_mlp=True)),
    "falcon_h1": Family(
        peft_refuses=("out_proj",), final_norm="final_layernorm", mlp_norm="pre_ff_layernorm",
        qkv_bias=False, out_bias=False, mlp_bias=False, mlp_out="feed_forward.down_proj",
        mlp_in=("feed_forward.gate_proj", "feed_forward.up_proj"), parallel_other_mixers=True,
        embedding_multiplier="config.embedding_multiplier",
        logits_multiplier="config.lm_head_multiplier", key_multiplier="config.key_multiplier",
        attention_in_multiplier="config.attention_in_multiplier",
        attention_out_multiplier="config.attention_out_multiplier",
        mlp_multipliers="config.mlp_multipliers", other_mixers={"hybrid": Mamba2Spec(
            in_bias=False, out_bias=False, has_norm="config.mamba_rms_norm",
            norm_before_gate="config.mamba_norm_before_gate",
            in_multiplier="config.ssm_in_multiplier", multipliers="config.ssm_multipliers",
            out_multiplier="config.ssm_out_multiplier")},
        unused_fields=("mamba_d_ssm", "mamba_expand", "mamba_chunk_size", "num_logits_to_keep")),
    "hyperclovax": Family(**GRANITE, logits_multiplier="config.logits_scaling",
                          attention_post_norm="post_norm1", mlp_post_norm="post_norm2",
                          post_norm_if="config.use_post_norm"),
    "cohere": Family(**COHERE, qk_norm="heads", qk_norm_if="config.use_qk_norm"),
    "cohere2": Family(**COHERE, no_rotary="full", windowed_layers="layer_types"),
    "olmo": Family(
        norm_kind="layer", norm_weight=False, norm_eps=1e-5, qkv_limit="config.clip_qkv"),
    "olmo2": Family(**OLMO2),
    "olmo3": Family(**OLMO2, ropes_by_layer_type=True, windowed_layers="layer_types"),
    "nanochat": Family(
        norm_weight=False, embedding_norm=True, gated=False, mlp_in=("mlp.fc1",),
        mlp_out="mlp.fc2", qk_norm="without weight", qk_norm_after_rotary=True,
        rotary_backwards=True, logits_softcap="config.final_logit_softcapping"),
    "smollm3": Family(no_rotary="no_rope_layers", windowed_layers="layer_types"),
    "glm": Family(**GLM),
    "glm4": Family(**GLM4),
    "glm4v_text": Family(**GLM4, qkv_bias=True),
    "ernie4_5": Family(qkv_bias="config.use_bias", out_bias="config.use_bias",
                       mlp_bias="config.use_bias", rotary_interleaved=True),
    "seed_oss": Family(out_bias="config.attention_out_bias",
                       residual_dropout="config.residual_dropout"),
    "exaone": Family(
        prefixes=("model.", "transformer."),
        renames=(("transformer.embed_tokens.", "transformer.wte."),
                 ("transformer.layers.", "transformer.h."),
                 ("transformer.norm.", "transformer.ln_f."),
                 (".self_attn.o_proj.", ".attn.attention.out_proj."),
                 (".self_attn.", ".attn.attention."), (".input_layernorm.", ".ln_1."),
                 (".post_attention_layernorm.", ".ln_2."), (".mlp.gate_proj.", ".mlp.c_fc_0."),
                 (".mlp.up_proj.", ".mlp.c_fc_1."), (".mlp.down_proj.", ".mlp.c_proj."))),
    "exaone4": Family(**POST_NORMS, qk_norm="head", windowed_layers="layer_types",
                      no_rotary="full_if_window"),
    "hunyuan_v1_dense": Family(**HUNYUAN),
    "lfm2": Family(**LFM2, two_thirds_wide="config.block_auto_adjust_ff_dim",
                   unused_fields=("full_attn_idxs",)),
    # qkv_bias=False, else g_proj would also have a bias
    "lfm3": Family(**LFM2 | dict(
        qkv_bias=False, out_bias=False, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm",
        attention_out="self_attn.o_proj", attention_gate=AttentionGateSpec("g_proj",
            per_head=True),
        attention_post_norm="post_operator_norm", mlp_post_norm="post_ffn_norm",
        post_norm_if="config.use_sandwich_norm", windowed_layers="layer_types",
        ropes_by_layer_type=True, renames=(("self_attn.g_proj", "self_attn.gate_proj"),))),
    "youtu": Family(**MLA, unused_fields=("embedding_initializer_range",)),
    "minicpm3": Family(
        **MLA | dict(rotary_interleaved=False), embedding_multiplier="config.scale_emb",
        rounded_multiplier=True, depth_scale="config.scale_depth",
        base_hidden_size="config.dim_model_base"),
    # AutoModelForCausalLM loads the text model of a multimodal one, and saves it with the names
    # that it has there
    "qwen3_5_text": Family(
        **QWEN3_NEXT, prefixes=("model.", "model.language_model."),
        other_mixers={"linear_attention": GatedDeltaNetSpec()}),
    "olmo_hybrid": Family(
        **OLMO2, other_mixers={"linear_attention": GatedDeltaNetSpec(
            in_projs=tuple((f"{x}_proj", "z" if x == "g" else x) for x in "qkvgba"), out="o_proj",
            norm="o_norm", norm_eps=1e-5, double_beta="config.linear_allow_neg_eigval",
            split_conv=True)},
        renames=(("input_layernorm", "attention_layer_norm"),
                 ("post_attention_layernorm", "feedforward_layer_norm")),
        other_mixer_norms=dict(attention_norm="input_layernorm", attention_post_norm=None,
                               mlp_norm="post_attention_layernorm", mlp_post_norm=None),
        unused_fields=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max",
                "linear_dt_init_floor")),
    # MoE models
    "qwen3_moe": Family(qk_norm="head", windowed_layers="all", moe=MoESpec(
        norm_topk_prob="config.norm_topk_prob")),
    "qwen2_moe": Family(qkv_bias="config.qkv_bias", windowed_layers="layer_types", moe=MoESpec(
        shared_size="config.shared_expert_intermediate_size",
        shared_gate="mlp.shared_expert_gate", norm_topk_prob="config.norm_topk_prob",
        adapter_form="parameters")),
    "mixtral": Family(windowed_layers="all", moe=MoESpec(**MIXTRAL, rounded_weights=False)),
    "minimax_m2": Family(qk_norm="full", partial_rotary=True, moe=MoESpec(
        **MIXTRAL, score_func="sigmoid", correction_bias="mlp.e_score_correction_bias",
        rounded_weights=False)),
    "olmoe": Family(qk_norm="full", must_be={"clip_qkv": None}, moe=MoESpec(
        expert_size="config.intermediate_size", norm_topk_prob="config.norm_topk_prob")),
    "flex_olmo": Family(**OLMO2, moe=MoESpec(
        expert_size="config.intermediate_size", norm_topk_prob="config.norm_topk_prob")),
    "cohere2_moe": Family(
        **COHERE, no_rotary="full", windowed_layers="layer_types",
        dense_rotary_if="config.prefix_dense_sliding_window_pattern",
        intermediate_size="config.prefix_dense_intermediate_size",
        unused_fields=("rope_theta", "rope_scaling"),  # both are in rope_parameters, too
        moe=MoESpec(
            expert_size="config.intermediate_size", shared_size="config.intermediate_size",
            n_shared="config.num_shared_experts", shared_prefix="mlp.shared_experts",
            combination="config.shared_expert_combination_strategy",
            score_func="config.expert_selection_fn", topk_by_logits=True, rounded_scores=True,
            softmax_of_chosen=True, norm_topk_prob="config.norm_topk_prob")),
    "granitemoe": Family(**GRANITE, logits_divisor="config.logits_scaling",
                         moe=MoESpec(**GRANITE_EXPERTS)),
    "granitemoeshared": Family(**GRANITE, **GRANITE_SHARED, logits_divisor="config.logits_scaling",
                               moe=MoESpec(**GRANITE_EXPERTS, shared_mlp=True)),
    "granitemoe_swa": Family(**GRANITE_SWA, **GRANITE_SHARED,
                             moe=MoESpec(**GRANITE_EXPERTS, shared_mlp=True)),
    "flint": Family(
        norm_kind="rms_fp32", qk_norm="head", windowed_layers="layer_types", no_rotary="full",
        sinks=True, renames=(("self_attn.sinks", "self_attn.softmax_offset"),), moe=MoESpec(
            shared_size="config.shared_expert_intermediate_size", fp32_router=True,
            score_func="sigmoid", norm_topk_prob="config.norm_topk_prob", rounded_weights=False,
            adapter_form="parameters")),
    "hunyuan_v1_moe": Family(**HUNYUAN, moe=MoESpec(
        top_k="config.moe_topk", expert_size="config.intermediate_size",
        shared_size="config.intermediate_size", shared_prefix="mlp.shared_mlp",
        router="mlp.gate.wg",
        fp32_router=True, rounded_weights=False)),
    "glm4_moe": Family(out_bias=False, partial_rotary=True, qk_norm="head",
                       qk_norm_if="config.use_qk_norm", moe=MoESpec(**DEEPSEEK)),
    "sarvam_moe": Family(
        out_bias=False, partial_rotary=True, qk_norm="head", qk_norm_if="config.use_qk_norm",
        qkv_in_files="self_attn.query_key_value",
        moe=MoESpec(**DEEPSEEK, adapter_form="parameters"),
        renames=(("model.embed_tokens.", "model.word_embeddings."),
                 (".self_attn.o_proj.", ".attention.dense."),
                 (".self_attn.q_norm.", ".attention.query_layernorm."),
                 (".self_attn.k_norm.", ".attention.key_layernorm."),
                 (".self_attn.", ".attention."),
                 (".mlp.gate.e_score_correction_bias", ".mlp.gate.expert_bias"))),
    "sarvam_mla": Family(**MLA, moe=MoESpec(**DEEPSEEK)),
    "glm4v_moe_text": Family(out_bias=False, partial_rotary=True, moe=MoESpec(**DEEPSEEK)),
    "glm4_moe_lite": Family(**MLA, moe=MoESpec(**DEEPSEEK)),
    "deepseek_v3": Family(**MLA, moe=MoESpec(**DEEPSEEK)),
    "axk1": Family(
        **MLA, mlp_post_norm="mlp.post_mlp_layernorm", post_norm_of_experts=True,
        renames=(("mlp.post_mlp_layernorm", "post_mlp_layernorm"),),
        moe=MoESpec(**DEEPSEEK, correction_bias_or_zeros=True, adapter_form="parameters")),
    "deepseek_v2": Family(**MLA | dict(rotary_interleaved=True), moe=MoESpec(**DEEPSEEK | dict(
        score_func="softmax", correction_bias=None, norm_topk_prob=False, n_best_per_group=1,
        groups_if="config.topk_method"))),
    "deepseek_v32": Family(**INDEXED, moe=MoESpec(**DEEPSEEK)),
    "glm_moe_dsa": Family(**INDEXED, moe=MoESpec(**DEEPSEEK)),
    "mistral4": Family(**MLA, query_temperature=True, moe=MoESpec(**DEEPSEEK | dict(
        fp32_router=False, score_func="softmax", rounded_scores=True, correction_bias=None,
        rounded_weights=True, adapter_form="stacked"))),
    "dots1": Family(qk_norm="head", windowed_layers="layer_types", moe=MoESpec(**DEEPSEEK)),
    "solar_open": Family(out_bias=False, intermediate_size="config.moe_intermediate_size",
                         moe=MoESpec(**DEEPSEEK)),
    "kolibri1": Family(
        qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm="head",
        windowed_layers="layer_types", no_rotary="full_if_window",
        intermediate_size="config.moe_intermediate_size",
        attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm",
        renames=((".mlp.gate.e_score_correction_bias", ".moe.router.expert_bias"),
                 (".post_self_attn_layernorm.", ".post_attn_norm."),
                 (".post_mlp_layernorm.", ".post_ffn_norm.")), moe=MoESpec(
            shared_size="config.shared_expert_intermediate_size",
            shared_prefix="mlp.shared_experts", fp32_router=True, score_func="sigmoid",
            correction_bias="mlp.gate.e_score_correction_bias",
            topk_by_logits=True, norm_topk_prob="config.norm_topk_prob", rounded_weights=False,
            adapter_form="parameters")),
    "exaone_moe": Family(
        qk_norm="head", windowed_layers="layer_types", no_rotary="full_if_window", moe=MoESpec(
            **DEEPSEEK | dict(n_experts="config.num_experts", n_shared="config.num_shared_experts"),
            renames=(("mlp.gate.e_score", "mlp.e_score"),))),
    "hy_v3": Family(qk_norm="head", unused_fields=("enable_moe_fp32_combine",), moe=MoESpec(
        shared_size="config.moe_intermediate_size", n_shared="config.num_shared_experts",
        shared_prefix="mlp.shared_experts", fp32_router=True, score_func="sigmoid",
        correction_bias="mlp.e_score_correction_bias", sum_eps=1e-20,
        routed_scaling_factor="config.router_scaling_factor", rounded_weights=False,
        adapter_form="parameters",
        renames=(("mlp.gate.weight", "mlp.router.gate.weight"),
                 ("mlp.e_score_correction_bias", "mlp.expert_bias"),
                 ("mlp.shared_experts.", "mlp.shared_mlp.")))),
    "mellum": Family(qk_norm="head", windowed_layers="layer_types", ropes_by_layer_type=True,
                     unused_fields=("mtp_layer_types", "mtp_mlp_layer_types"), moe=MoESpec(
                         norm_topk_prob="config.norm_topk_prob")),
    "qwen3_5_moe_text": Family(
        **QWEN3_NEXT, intermediate_size="config.moe_intermediate_size",
        prefixes=("model.", "model.language_model."),
        other_mixers={"linear_attention": GatedDeltaNetSpec()},
        moe=MoESpec(**QWEN3_NEXT_EXPERTS, adapter_form="parameters")),
    "qwen3_next": Family(
        **QWEN3_NEXT, other_mixers={"linear_attention": GatedDeltaNetSpec(
            in_projs=(("in_proj_qkvz", "qkvz"), ("in_proj_ba", "ba")), by_key_head=True)},
        moe=MoESpec(**QWEN3_NEXT_EXPERTS, norm_topk_prob="config.norm_topk_prob")),
    "lfm2_moe": Family(**LFM2, must_be={"use_expert_bias": True}, moe=MoESpec(
        n_first_dense="config.num_dense_layers", experts_prefix="feed_forward.experts",
        router="feed_forward.gate", score_func="sigmoid", rounded_scores=True,
        correction_bias="feed_forward.expert_bias",
        norm_topk_prob="config.norm_topk_prob", sum_eps=1e-6,
        routed_scaling_factor="config.routed_scaling_factor",
        adapter_form="parameters",
        # renames for experts only, whose names have a number before: layers without experts have w1
        renames=tuple((f"{digit}.{here}", f"{digit}.{there}") for digit in range(10) for here, there
                      in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))))),
    "qwen3_vl_moe_text": Family(qk_norm="head", moe=MoESpec(adapter_form="stacked")),
    "nemotron_h": Family(
        peft_refuses=("out_proj",), norm_kind="rms_fp32", norm_eps="config.layer_norm_epsilon",
        one_sublayer=True, embedding="embeddings", final_norm="norm_f",
        prefixes=("model.", "backbone."), attention_norm="norm", mlp_norm="norm",
        attention_prefix="mixer", attention_out="mixer.o_proj",
        qkv_bias=False, out_bias=False, rotary_if=False, gated=False, mlp_in=("mixer.up_proj",),
        mlp_out="mixer.down_proj", activation="config.mlp_hidden_act", other_mixers={
            "linear_attention": Mamba2Spec(
                n_heads="config.mamba_num_heads", head_dim="config.mamba_head_dim",
                n_groups="config.n_groups", state_size="config.ssm_state_size",
                conv_kernel_size="config.conv_kernel", conv_bias="config.use_conv_bias",
                in_bias="config.use_bias", out_bias="config.use_bias",
                dt_limits=(0.0, math.inf), min_dt="config.time_step_min",
                norm_eps="config.layer_norm_epsilon", prefix="mixer")},
        moe=MoESpec(**DEEPSEEK | dict(
            experts_prefix="mixer.experts", router="mixer.gate",
            shared_prefix="mixer.shared_experts",
            adapter_form="stacked",
            correction_bias="mixer.gate.e_score_correction_bias", n_first_dense=0, n_shared=1,
            latent_size="config.moe_latent_size",
            latent_linears=("mixer.fc1_latent_proj", "mixer.fc2_latent_proj"),
            shared_size="config.moe_shared_expert_intermediate_size")),
        unused_fields=tuple("""layers_block_type time_step_limit time_step_max time_step_floor
            expand chunk_size mamba_proj_bias mamba_ssm_cache_dtype use_mamba_kernels
            num_logits_to_keep n_shared_experts moe_shared_expert_overlap
            rescale_prenorm_residual num_nextn_predict_layers mtp_layers_block_type""".split())),
    # qkv_bias=False in this Family and the next, else g_proj would also have a bias
    "laguna": Family(
        qkv_bias=False, out_bias=False, qk_norm="head", windowed_layers="layer_types",
        partial_rotary=True, ropes_by_layer_type=True,
        heads_by_layer="config.num_attention_heads_per_layer",
        attention_gate=AttentionGateSpec(
            "g_proj", per_head="config.gating", activation="softplus"), moe=MoESpec(
            shared_size="config.shared_expert_intermediate_size",
            shared_prefix="mlp.shared_experts",
            score_func="sigmoid", correction_bias="mlp.gate.e_score_correction_bias",
            routed_scaling_factor="config.moe_routed_scaling_factor", adapter_form="parameters",
            renames=(("mlp.shared_experts.", "mlp.shared_expert."),
                     ("mlp.gate.e_score", "mlp.experts.e_score")))),
    "step3p5": Family(
        norm_kind="rms_plus_one", qkv_bias=False, out_bias=False, qk_norm="head",
        windowed_layers="layer_types", partial_rotary=True, ropes_by_layer_type=True,
        query_scalar="config.query_pre_attn_scalar",
        attention_gate=AttentionGateSpec("g_proj", per_head=True),
        mlp_limits="config.swiglu_limits_shared",
        unused_fields=("num_sliding_attention_heads", "num_local_experts", "mtp_layer_types",
                "mtp_mlp_layer_types"),
        moe=MoESpec(
            n_experts="config.n_routed_experts", shared_size="config.share_expert_dim",
            shared_prefix="mlp.shared_experts", score_func="sigmoid", rounded_weights=False,
            correction_bias="mlp.gate.e_score_correction_bias", limits="config.swiglu_limits",
            routed_scaling_factor="config.moe_router_scaling_factor", adapter_form="stacked",
            renames=(("mlp.gate.weight", "moe.gate.weight"),
                     ("mlp.gate.e_score_correction_bias", "moe.router_bias"),
                     ("mlp.shared_experts.", "share_expert."),
                     *((f"mlp.experts.{x}_proj", f"moe.{x}_proj.weight")
                       for x in ("gate", "up", "down"))))),
    "afmoe": Family(
        norm_kind="rms_fp32", qkv_bias=False, out_bias=False, qk_norm="head",
        windowed_layers="layer_types", no_rotary="full",
        attention_gate=AttentionGateSpec("gate_proj"),
        sqrt_embedding="config.mup_enabled",
        attention_post_norm="post_attention_layernorm", mlp_norm="pre_mlp_layernorm",
        mlp_post_norm="post_mlp_layernorm", unused_fields=("global_attn_every_n_layers",),
        moe=MoESpec(
            shared_size="config.moe_intermediate_size", n_shared="config.num_shared_experts",
            shared_prefix="mlp.shared_experts", n_first_dense="config.num_dense_layers",
            router="mlp.router.gate", score_func="sigmoid", correction_bias="mlp.expert_bias",
            sum_eps=1e-20, routed_scaling_factor="config.route_scale", rounded_weights=False)),
    # use_bias in a config is refused, because it would also give the lm_head a bias
    "ernie4_5_moe": Family(rotary_interleaved=True, moe=MoESpec(
        n_experts="config.moe_num_experts", top_k="config.moe_k",
        shared_size="config.moe_intermediate_size", n_shared="config.moe_num_shared_experts",
        n_first_dense="config.moe_layer_start_index", shared_prefix="mlp.shared_experts",
        fp32_router=True, correction_bias="mlp.gate.moe_statics.e_score_correction_bias",
        correction_bias_is_row=True, renames=(("mlp.gate.moe_statics", "mlp.moe_statics"),))),
    # another swiglu_limit or swiglu_alpha than these in a config is refused
    "gpt_oss": Family(
        norm_kind="rms_fp32", windowed_layers="layer_types", sinks=True, moe=MoESpec(
            n_experts="config.num_local_experts", expert_size="config.intermediate_size",
            router="mlp.router", biases=True, clamped_glu=(7.0, 1.702), one_gate_up=True,
            transposed=True, adapter_form="stacked"))}
# {outer model type: types of its text models}; the outer model changes no logits
MULTIMODAL: dict[str, tuple[str, ...]] = {
    "gemma3": ("gemma3_text",), "gemma4": ("gemma4_text",),
    "gemma4_unified": ("gemma4_unified_text",),
    "mistral3": ("mistral", "ministral3", "mistral4"), "kimi_k25": ("deepseek_v3",),
    "internvl": ("qwen2", "qwen3"), "llava": ("llama", "mistral"), "exaone4_5": ("exaone4",),
    "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_vl": ("qwen3_vl_text",), "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "qwen2_vl": ("qwen2_vl_text",), "qwen2_5_vl": ("qwen2_5_vl_text",),
    "glm4v": ("glm4v_text",), "glm46v": ("glm4v_text",), "glm4v_moe": ("glm4v_moe_text",),
    "glmga": ("glm4v_text",), "llava_next": ("llama", "mistral", "qwen2"),
    "llava_next_video": ("llama", "mistral"), "llava_onevision": ("qwen2",),
    "video_llava": ("llama",), "vipllava": ("llama",), "video_llama_3": ("qwen2",),
    "idefics2": ("mistral",), "idefics3": ("llama",), "smolvlm": ("llama",),
    "perception_lm": ("llama",), "fast_vlm": ("qwen2",), "ovis2": ("qwen2",),
    "deepseek_vl": ("llama",), "janus": ("llama",), "lfm2_vl": ("lfm2",), "lfm3_vl": ("lfm3",),
    "minicpmv4_6": ("qwen3_5_text",), "minicpmv4_7": ("qwen3_5_text",),
    "minicpm_ocr": ("qwen3_5_text",), "got_ocr2": ("qwen2",), "lighton_ocr": ("qwen3",),
    "qianfan_ocr": ("qwen3",), "hyperclovax_vision_v2": ("hyperclovax",),
    "nemotron_h_omni": ("nemotron_h",), "muse_glimmer": ("muse_glimmer_text",),
    "step3p7": ("step3p5",),
    # audio
    "voxtral": ("llama",), "glmasr": ("llama",), "omniasr": ("llama",), "qwen2_audio": ("qwen2",),
    "qwen3_asr": ("qwen3",), "vibevoice_asr": ("qwen2",)}
# {outer model type: MoESpec.adapter_form inside it}, if the text model alone has another
ADAPTER_FORMS_INSIDE: dict[str, AdapterForm] = {"kimi_k25": "parameters", "qwen3_5_moe": "stacked"}
# {outer model type: the text model's module inside it}, if it is not model.language_model
TEXT_MODULES = {"nemotron_h_omni": "language_model.model"} | dict.fromkeys(
    ("idefics2", "idefics3", "smolvlm"), "model.text_model")
