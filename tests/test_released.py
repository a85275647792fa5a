"""Configurations with the fields and spelling of models on the Hub, sizes and all: each must be
read and pass the check at start. What a family computes is in test_layer.py.
"""

import json

import pytest
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING

from families import TINY

from fsdp_qlora.checks.compare_with_transformers import compare_with_transformers
from fsdp_qlora.config import Config
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.model_directory import read_model_config
from fsdp_qlora.pretrained.shrunk_config import shrunk_config
from fsdp_qlora.run.resolve import resolve_max_seq_len

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
LONGROPE = {"type": "longrope", "long_factor": [1 + i / 10 for i in range(48)],
            "short_factor": [1 + i / 100 for i in range(48)]}  # fmt: skip
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
        "rope_theta": 1e6, "rope_type": "yarn", "type": "yarn"}  # fmt: skip
HUNYUAN = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
           "mscale_all_dim": 1.0, "type": "dynamic"}  # fmt: skip
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA_NET = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
             "linear_num_value_heads": 32, "linear_value_head_dim": 128, "head_dim": 256,
             "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
             "full_attention_interval": 4}  # fmt: skip
QWEN3_5 = DELTA_NET | {
    "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "max_position_embeddings": 262144,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10],
                        "partial_rotary_factor": 0.25, "rope_theta": 10000000,
                        "rope_type": "default"}}  # fmt: skip
SLIDING = ["sliding_attention"] * 3 + ["full_attention"]
STEP = ["full_attention"] + ["sliding_attention"] * 3
SIGLIP = {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
          "model_type": "siglip_vision_model", "num_attention_heads": 16,
          "num_hidden_layers": 27, "vision_use_head": False}  # fmt: skip
PIXTRAL = {"attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024,
           "image_size": 1540, "intermediate_size": 4096, "model_type": "pixtral",
           "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14}  # fmt: skip
MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
QWEN3_VISION = {"deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_size": 1024,
                "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
                "num_heads": 16, "out_hidden_size": 2560, "patch_size": 16,
                "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
GEMMA4 = {
    "sliding_window": 1024, "head_dim": 256, "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0, "attention_bias": False, "attention_dropout": 0.0,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "rms_norm_eps": 1e-6,
    "use_bidirectional_attention": "vision", "tie_word_embeddings": True, "pad_token_id": 0,
    "max_position_embeddings": 262144, "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6,
                           "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}}  # fmt: skip
GEMMA4_E = {
    "sliding_window": 512, "hidden_size_per_layer_input": 256, "max_position_embeddings": 131072,
    "attention_k_eq_v": False, "num_global_key_value_heads": None, "enable_moe_block": False,
    "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}  # fmt: skip
PHI3 = {"attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}  # fmt: skip
GRANITE = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "logits_scaling": 16.0,
           "residual_multiplier": 0.22, "hidden_act": "silu", "mlp_bias": False,
           "rope_scaling": None, "tie_word_embeddings": True}  # fmt: skip
GRANITE4 = GRANITE | {
    "shared_intermediate_size": 8192, "num_local_experts": 0, "num_experts_per_tok": 0,
    "layer_types": ["attention"] * 40, "position_embedding_type": "rope", "init_method": "mup",
    "normalization_function": "rmsnorm", "attention_bias": False, "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.01, "output_router_logits": False, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 80,
    "mamba_proj_bias": False}  # fmt: skip
NEMOTRON_H = {
    "head_dim": 128, "attention_bias": False, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
    "n_groups": 8, "expand": 2, "ssm_state_size": 128, "conv_kernel": 4, "chunk_size": 128,
    "use_conv_bias": True, "use_bias": False, "time_step_min": 0.001, "time_step_max": 0.1,
    "time_step_floor": 1e-4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2",
    "mlp_bias": False, "residual_in_fp32": False, "rescale_prenorm_residual": True,
    "hidden_dropout": 0.0, "num_logits_to_keep": 1, "use_mamba_kernels": True,
    "mamba_ssm_cache_dtype": "float32"}  # fmt: skip
GLM_V = {"hidden_act": "silu", "max_position_embeddings": 65536, "partial_rotary_factor": 0.5,
         "rms_norm_eps": 1e-5,
         "rope_scaling": {"type": "default", "mrope_section": [8, 12, 12]}}  # fmt: skip
MLA = {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
       "kv_lora_rank": 512, "qk_rope_head_dim": 64, "tie_word_embeddings": False}  # fmt: skip
DEEPSEEK = MLA | {
    "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536, "ep_size": 1,
    "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-6,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "topk_group": 4, "topk_method": "noaux_tc", "max_position_embeddings": 163840,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]}}  # fmt: skip
INT4 = {"config_groups": {"group_0": {
    "input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": {
        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
        "num_bits": 4, "observer": "minmax", "observer_kwargs": {}, "strategy": "group",
        "symmetric": True, "type": "int"}}},
    "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
    "kv_cache_scheme": None, "quant_method": "compressed-tensors",
    "quantization_status": "compressed"}  # fmt: skip
DEEPSEEK_V2 = MLA | {
    "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "aux_loss_alpha": 0.001, "ep_size": 1, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_experts_per_tok": 6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "scoring_func": "softmax",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707,
                     "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "max_position_embeddings": 163840, "seq_aux": True}  # fmt: skip
EXAONE = {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip


def text(model_type, *sizes, **more):
    """A config.json of hidden and inner size, layers, heads, heads of keys, vocabulary."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "vocab_size")  # fmt: skip
    return {"model_type": model_type, "torch_dtype": "bfloat16", "use_cache": True,
            "initializer_range": 0.02, "transformers_version": "4.46.0",
            **dict(zip(keys, sizes, strict=False)), **more}  # fmt: skip


def multimodal(model_type, text_config, vision_config, **more):
    return {"model_type": model_type, "torch_dtype": "bfloat16", "image_token_index": 10,
            "text_config": text_config, "vision_config": vision_config, **more}  # fmt: skip


CONFIGS = {
    "Llama 2 7B": text("llama", 4096, 11008, 32, 32, 32, 32000, max_position_embeddings=4096,
                       rope_scaling=None, tie_word_embeddings=False),
    "Llama 3.1 8B": text("llama", 4096, 14336, 32, 32, 8, 128256, rope_scaling=LLAMA3,
                         rope_theta=5e5, max_position_embeddings=131072, attention_bias=False,
                         eos_token_id=[128001, 128008, 128009], pretraining_tp=1),
    "Code Llama 13B": text("llama", 5120, 13824, 40, 40, 40, 32016, rope_theta=1e6,
                           max_position_embeddings=16384, pretraining_tp=2),
    "linear": text("llama", 7168, 19200, 62, 56, 8, 32256, rope_theta=1e5,
                   max_position_embeddings=16384, rope_scaling={"factor": 4.0, "type": "linear"}),
    "dynamic": text("llama", 4096, 10240, 48, 32, 2, 128512, head_dim=128, rope_theta=5e7,
                    max_position_embeddings=32768, bias=False, qkv_bias=False,
                    rope_scaling={"factor": 6.0, "rope_type": "dynamic"}),
    "SmolLM2 1.7B": text("llama", 2048, 8192, 24, 32, 32, 49152, rope_theta=130000,
                         max_position_embeddings=8192, tie_word_embeddings=True,
                         rope_interleaved=False, is_llama_config=True),
    "InternLM3 8B": text("internlm3", 4096, 10240, 48, 32, 2, 128512, head_dim=128, bias=False,
                         max_position_embeddings=32768, qkv_bias=False, rope_theta=5e7,
                         rope_scaling={"factor": 6.0, "rope_type": "dynamic"}),
    "AFM 4.5B": text("arcee", 2560, 18432, 36, 20, 4, 128004, head_dim=128, hidden_act="relu2",
                     attention_bias=False, max_position_embeddings=65536, mlp_bias=False,
                     rope_theta=1e4, rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0,
                                                   "factor": 20.0, "mscale": 1.0,
                                                   "original_max_position_embeddings": 4096,
                                                   "rope_type": "yarn", "type": "yarn"}),
    "Minitron 4B": text("nemotron", 3072, 9216, 32, 24, 8, 256000, head_dim=128,
                        hidden_act="relu2", max_position_embeddings=4096, norm_eps=1e-5,
                        attention_bias=False, mlp_bias=False, partial_rotary_factor=0.5,
                        rope_theta=1e4, bos_token_id=2, eos_token_id=3),
    "StarCoder2 3B": text("starcoder2", 3072, 12288, 30, 24, 2, 49152, attention_dropout=0.1,
                          activation_function="gelu", embedding_dropout=0.1, residual_dropout=0.1,
                          hidden_act="gelu_pytorch_tanh", max_position_embeddings=16384,
                          mlp_type="default", norm_epsilon=1e-5, norm_type="layer_norm",
                          rope_theta=999999.4420358813, sliding_window=4096, use_bias=True),
    "StableLM 2 1.6B": text("stablelm", 2048, 5632, 24, 32, 32, 100352, layer_norm_eps=1e-5,
                            hidden_act="silu", max_position_embeddings=4096, rope_theta=1e4,
                            partial_rotary_factor=0.25, use_qkv_bias=True, norm_eps=1e-5,
                            rotary_scaling_factor=1.0, tie_word_embeddings=False),
    "Jais 2 8B": text("jais2", 3328, 26624, 32, 26, 26, 150272, head_dim=128, hidden_act="relu2",
                      attention_bias=True, mlp_bias=True, layer_norm_eps=1e-5, rope_theta=5e5,
                      max_position_embeddings=8192, rope_scaling=None),
    "CWM 32B": text("cwm", 6144, 21504, 64, 48, 8, 128256, head_dim=128, sliding_window=8192,
                    max_position_embeddings=131072, rope_theta=1e6,
                    layer_types=(["full_attention"] + ["sliding_attention"] * 3) * 16,
                    rope_scaling=LLAMA3 | {"factor": 16.0}),
    "Mistral 7B v0.1": text("mistral", 4096, 14336, 32, 32, 8, 32000, sliding_window=4096,
                            max_position_embeddings=32768, rope_theta=1e4),
    "Mistral Nemo": text("mistral", 5120, 14336, 40, 32, 8, 131072, head_dim=128, rope_theta=1e6,
                         max_position_embeddings=131072, sliding_window=None),
    "Mistral Small 3.1": multimodal(
        "mistral3", text("mistral", 5120, 32768, 40, 32, 8, 131072, head_dim=128, rope_theta=1e9,
                         max_position_embeddings=131072, sliding_window=None), PIXTRAL,
        multimodal_projector_bias=False, spatial_merge_size=2, vision_feature_layer=-1),
    "Ministral 3 8B": multimodal(
        "mistral3", text("ministral3", 4096, 14336, 34, 32, 8, 131072, head_dim=128,
                         max_position_embeddings=262144, sliding_window=None, rope_parameters=YARN,
                         tie_word_embeddings=False), PIXTRAL, spatial_merge_size=2),
    "Qwen2 1.5B, YaRN": text("qwen2", 1536, 8960, 28, 12, 2, 151936, max_window_layers=28,
                             max_position_embeddings=32768, rope_theta=1e6, sliding_window=32768,
                             use_sliding_window=False, use_mrope=False, tie_word_embeddings=True,
                             rope_scaling={"factor": 4.0, "type": "yarn",
                                           "original_max_position_embeddings": 32768}),
    "Qwen2.5 7B": text("qwen2", 3584, 18944, 28, 28, 4, 152064, max_window_layers=28,
                       max_position_embeddings=32768, rope_theta=1e6, sliding_window=131072,
                       use_sliding_window=False),
    "Qwen3 8B": text("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, max_window_layers=36,
                     max_position_embeddings=40960, rope_theta=1e6, rope_scaling=None,
                     sliding_window=None, use_sliding_window=False, attention_bias=False),
    "Qwen2.5-VL 7B": text(
        "qwen2_5_vl", 3584, 18944, 28, 28, 4, 152064, max_position_embeddings=128000,
        max_window_layers=28, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]},
        rope_theta=1e6, sliding_window=32768, tie_word_embeddings=False, use_sliding_window=False,
        vision_config={"depth": 32, "model_type": "qwen2_5_vl"}),
    "GLM-4.1V 9B": multimodal(
        "glm4v", text("glm4v_text", 4096, 13696, 40, 32, 2, 151552, attention_bias=True,
                      attention_dropout=0.0, head_dim=128, **GLM_V, rope_theta=1e4),
        {"depth": 24, "model_type": "glm4v"}, image_token_id=151343, tie_word_embeddings=False),
    "GLM-4.5V": multimodal(
        "glm4v_moe", text(
            "glm4v_moe_text", 4096, 10944, 46, 96, 8, 151552, attention_bias=True,
            attention_dropout=0.0, head_dim=128, **GLM_V, rope_theta=1e4, n_group=1, topk_group=1,
            n_shared_experts=1, n_routed_experts=128, num_experts_per_tok=8, norm_topk_prob=True,
            first_k_dense_replace=1, moe_intermediate_size=1408, routed_scaling_factor=1.0,
            use_qk_norm=False),
        {"depth": 24, "model_type": "glm4v_moe"}, image_token_id=151363,
        tie_word_embeddings=False),
    "Qwen3-VL 4B": multimodal(
        "qwen3_vl", text("qwen3_vl_text", 2560, 9728, 36, 32, 8, 151936, head_dim=128,
                         max_position_embeddings=262144, attention_bias=False, rope_theta=5e6,
                         rope_scaling=MROPE, tie_word_embeddings=True), QWEN3_VISION,
        tie_word_embeddings=True, vision_start_token_id=151652, vision_end_token_id=151653),
    "Qwen3-VL 8B": multimodal(
        "qwen3_vl", text("qwen3_vl_text", 4096, 12288, 36, 32, 8, 151936, head_dim=128,
                         max_position_embeddings=262144, attention_bias=False, rope_theta=5e6,
                         rope_scaling=MROPE), QWEN3_VISION, tie_word_embeddings=False),
    "Qwen3.5 9B": multimodal(
        "qwen3_5", text("qwen3_5_text", 4096, 12288, 32, 16, 4, 248320, layer_types=LINEAR * 8,
                        **QWEN3_5, tie_word_embeddings=False),
        {"depth": 27, "model_type": "qwen3_5"}, image_token_id=248056, tie_word_embeddings=False),
    "Qwen3.5 35B-A3B": multimodal(
        "qwen3_5_moe", text(
            "qwen3_5_moe_text", 2048, 512, 40, 16, 2, 248320, layer_types=LINEAR * 10, **QWEN3_5,
            moe_intermediate_size=512, num_experts=256, num_experts_per_tok=8,
            shared_expert_intermediate_size=512, output_router_logits=False),
        {"depth": 27, "model_type": "qwen3_5_moe"}, tie_word_embeddings=False),
    "Qwen3-Next 80B-A3B": text(
        "qwen3_next", 2048, 5120, 48, 16, 2, 151936, **DELTA_NET, decoder_sparse_step=1,
        max_position_embeddings=262144, mlp_only_layers=[], moe_intermediate_size=512,
        norm_topk_prob=True, num_experts=512, num_experts_per_tok=10, partial_rotary_factor=0.25,
        rope_scaling=None, rope_theta=10000000, shared_expert_intermediate_size=512,
        use_sliding_window=False),
    "LFM2 1.2B": text(
        "lfm2", 2048, 12288, 16, 32, 8, 65536, block_auto_adjust_ff_dim=True, block_dim=2048,
        block_ff_dim=12288, block_ffn_dim_multiplier=1.0, block_multiple_of=256, norm_eps=1e-5,
        block_mlp_init_scale=1.0, block_norm_eps=1e-5, block_out_init_scale=1.0,
        block_use_swiglu=True, block_use_xavier_init=True, conv_L_cache=3, conv_bias=False,
        conv_dim=2048, conv_dim_out=2048, conv_use_xavier_init=True,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], max_position_embeddings=128000, num_heads=32,
        rope_theta=1e6, tie_embedding=True, use_pos_enc=True),
    "LFM3 1.7B": text(
        "lfm3", 2048, 7680, 24, 16, 4, 128000, attention_bias=False, attention_dropout=0.0,
        conv_L_cache=7, conv_bias=False, head_dim=128, max_position_embeddings=128000,
        norm_eps=1e-5, pad_token_id=124893, bos_token_id=124894, eos_token_id=124900,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                               "partial_rotary_factor": 0.5}},
        sliding_window=256, tie_word_embeddings=True, use_attention_gate=True,
        use_sandwich_norm=True),
    "LFM2 8B-A1B": text(
        "lfm2_moe", 2048, 7168, 24, 32, 8, 65536, conv_L_cache=3, conv_bias=False,
        layer_types=["conv", "conv", "full_attention", "conv"] * 6, max_position_embeddings=128000,
        moe_intermediate_size=1792, norm_eps=1e-5, norm_topk_prob=True, num_dense_layers=2,
        num_experts=32, num_experts_per_tok=4, rope_theta=1e6, routed_scaling_factor=1.0,
        use_expert_bias=True),
    "OLMo hybrid 7B": text(
        "olmo_hybrid", 3840, 11008, 32, 30, 30, 100352, layer_types=LINEAR * 8,
        linear_allow_neg_eigval=True, linear_conv_kernel_dim=4, linear_key_head_dim=96,
        linear_num_key_heads=30, linear_num_value_heads=30, linear_value_head_dim=192,
        max_position_embeddings=65536, rope_parameters={"rope_theta": None, "rope_type": "default"},
        tie_word_embeddings=False),
    "Phi-2": text("phi", 2560, 10240, 32, 32, 32, 51200, attention_dropout=0.0, embd_pdrop=0.0,
                  hidden_act="gelu_new", layer_norm_eps=1e-5, max_position_embeddings=2048,
                  partial_rotary_factor=0.4, qk_layernorm=False, resid_pdrop=0.1, rope_scaling=None,
                  rope_theta=10000.0, tie_word_embeddings=False),
    "Phi-3 mini 4k": text("phi3", 3072, 8192, 32, 32, 32, 32064, **PHI3, sliding_window=2047,
                          max_position_embeddings=4096, original_max_position_embeddings=4096),
    "Phi-3.5 mini": text("phi3", 3072, 8192, 32, 32, 32, 32064, **PHI3, sliding_window=262144,
                         max_position_embeddings=131072, original_max_position_embeddings=4096,
                         rope_scaling=LONGROPE, auto_map={"AutoConfig": "a.B"}),
    "Phi-4": text("phi3", 5120, 17920, 40, 40, 10, 100352, **PHI3, rope_theta=250000,
                  max_position_embeddings=16384, sliding_window=None, rope_scaling=None),
    "Phi-4 mini": text("phi3", 3072, 8192, 32, 24, 8, 200064,
                       **PHI3 | {"tie_word_embeddings": True}, partial_rotary_factor=0.75,
                       rope_scaling=LONGROPE, sliding_window=262144,
                       max_position_embeddings=131072, original_max_position_embeddings=4096,
                       full_attn_mod=1, interpolate_factor=1, lm_head_bias=False, mlp_bias=False),
    "Gemma 7B": text("gemma", 3072, 24576, 28, 16, 16, 256000, head_dim=256, hidden_act="gelu",
                     hidden_activation=None, max_position_embeddings=8192),
    "Gemma 2 27B": text("gemma2", 4608, 36864, 46, 32, 16, 256000, head_dim=128,
                        hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0,
                        final_logit_softcapping=30.0, query_pre_attn_scalar=144,
                        sliding_window=4096, sliding_window_size=4096,
                        cache_implementation="hybrid", max_position_embeddings=8192),
    "Gemma 3 1B": text("gemma3_text", 1152, 6912, 26, 4, 1, 262144, head_dim=256,
                       rope_local_base_freq=10000, rope_theta=1e6, sliding_window=512,
                       sliding_window_pattern=6, query_pre_attn_scalar=256, rope_scaling=None,
                       attn_logit_softcapping=None, final_logit_softcapping=None),
    "Gemma 3 4B": multimodal(
        "gemma3", {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                   "num_hidden_layers": 34, "sliding_window": 1024,
                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}, SIGLIP),
    "Gemma 3 27B": multimodal(
        "gemma3", text("gemma3_text", 5376, 21504, 62, 32, 16, head_dim=128, sliding_window=1024,
                       query_pre_attn_scalar=168,
                       rope_scaling={"factor": 8.0, "rope_type": "linear"}), SIGLIP),
    "Gemma 4 31B": multimodal(
        "gemma4", text("gemma4_text", 5376, 21504, 60, 32, 16, 262144, **GEMMA4,
                       num_global_key_value_heads=4, attention_k_eq_v=True, enable_moe_block=False,
                       num_experts=None, top_k_experts=None, moe_intermediate_size=None),
        {"model_type": "gemma4_vision", "standardize": True}),
    "Gemma 4 26B-A4B": multimodal(
        "gemma4", text("gemma4_text", 2816, 2112, 30, 16, 8, 262144, **GEMMA4,
                       num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True,
                       num_experts=128, top_k_experts=8, moe_intermediate_size=704),
        {"model_type": "gemma4_vision", "standardize": True}),
    "Gemma 4 E2B": multimodal(
        "gemma4", text("gemma4_text", 1536, 6144, 35, 8, 1, 262144, **GEMMA4 | GEMMA4_E | {
                       "num_kv_shared_layers": 20, "use_double_wide_mlp": True},
                       layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7),
        {"model_type": "gemma4_vision", "standardize": False}),
    "Gemma 4 E4B": multimodal(
        "gemma4", text("gemma4_text", 2560, 10240, 42, 8, 2, 262144, **GEMMA4 | GEMMA4_E | {
                       "num_kv_shared_layers": 18},
                       layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 7),
        {"model_type": "gemma4_vision", "standardize": False}),
    "Gemma 4 12B": multimodal(
        "gemma4_unified", text("gemma4_unified_text", 3840, 15360, 48, 16, 8, 262144, **GEMMA4,
                               num_global_key_value_heads=1,
                               attention_k_eq_v=True), {"model_type": "gemma4_unified_vision"}),
    "Granite 3.0 8B": text("granite", 4096, 12800, 40, 32, 8, 49155, **GRANITE,
                           attention_dropout=0.1, max_position_embeddings=4096),
    "Granite 3.3 8B": text("granite", 4096, 12800, 40, 32, 8, 49159, **GRANITE, rope_theta=1e7,
                           attention_dropout=0.0, max_position_embeddings=131072),
    "Granite 4.0 Micro": text("granitemoehybrid", 2560, 8192, 40, 40, 8, 100352, **GRANITE4,
                              rope_theta=1e7, max_position_embeddings=131072),
    "Aya Expanse 8B": text("cohere", 4096, 14336, 32, 32, 8, 256000, logit_scale=0.125,
                           layer_norm_eps=1e-5, max_position_embeddings=8192, use_qk_norm=False,
                           model_max_length=131072, rope_theta=1e4),
    "Command R+": text("cohere", 12288, 33792, 64, 96, 8, 256000, logit_scale=0.8333333333333334,
                       layer_norm_eps=1e-5, max_position_embeddings=8192, use_qk_norm=True,
                       model_max_length=131072, rope_theta=75000000.0),
    "Command R7B": text("cohere2", 4096, 14336, 32, 32, 8, 256000, logit_scale=0.25, head_dim=128,
                        layer_norm_eps=1e-5, max_position_embeddings=132096, rope_theta=50000,
                        sliding_window=4096, sliding_window_pattern=4, rope_scaling=None,
                        position_embedding_type="rope_gptj", rotary_pct=1.0, layer_switch=4,
                        order_of_interleaved_layers="local_attn_first",
                        use_embedding_sharing=True, use_parallel_block=True),
    "OLMo 1.7 7B": text("olmo", 4096, 11008, 32, 32, 32, 50304, attention_bias=False, clip_qkv=8.0,
                        attention_dropout=0.0, hidden_act="silu", max_position_embeddings=4096,
                        rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=False),
    "OLMo 2 7B": text("olmo2", 4096, 11008, 32, 32, 32, 100352, max_position_embeddings=4096,
                      rms_norm_eps=1e-6, rope_scaling=None, rope_theta=5e5),
    "OLMo 3 7B": text("olmo3", 4096, 11008, 32, 32, 32, 100278, max_position_embeddings=65536,
                      layer_types=SLIDING * 8, sliding_window=4096, rope_theta=5e5,
                      rope_scaling={"attention_factor": 1.2079441541679836, "beta_fast": 32,
                                    "beta_slow": 1, "factor": 8.0, "rope_type": "yarn",
                                    "original_max_position_embeddings": 8192}),
    "SmolLM3 3B": text("smollm3", 2048, 11008, 36, 16, 4, 128256, max_position_embeddings=65536,
                       layer_types=["full_attention"] * 36, no_rope_layers=[1, 1, 1, 0] * 9,
                       no_rope_layer_interval=4, max_window_layers=28, pretraining_tp=2,
                       rope_theta=5e6, sliding_window=None, use_sliding_window=False),
    "GLM-4 9B": text("glm", 4096, 13696, 40, 32, 2, 151552, attention_bias=True, head_dim=128,
                     partial_rotary_factor=0.5, rms_norm_eps=1.5625e-7, pad_token_id=151329,
                     max_position_embeddings=131072),
    "GLM-4 9B 0414": text("glm4", 4096, 13696, 40, 32, 2, 151552, attention_bias=True,
                          head_dim=128, partial_rotary_factor=0.5, pad_token_id=151329,
                          max_position_embeddings=32768),
    "ERNIE 4.5 0.3B": text("ernie4_5", 1024, 3072, 18, 16, 2, 103424, head_dim=128, use_bias=False,
                           max_position_embeddings=131072, rope_theta=5e5, rope_scaling=None,
                           tie_word_embeddings=True, use_flash_attention=False),
    "Seed-OSS 36B": text("seed_oss", 5120, 27648, 64, 80, 8, 155136, attention_bias=True,
                         attention_out_bias=False, attention_dropout=0.1, residual_dropout=0.1,
                         head_dim=128, max_position_embeddings=524288, rope_theta=1e7,
                         rope_scaling={"rope_type": "default"}, pretraining_tp=1),
    "EXAONE 3.5 7.8B": {
        "model_type": "exaone", "activation_function": "silu", "attention_dropout": 0.0,
        "bos_token_id": 1, "embed_dropout": 0.0, "eos_token_id": 361, "head_dim": 128,
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "layer_norm_epsilon": 1e-5, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_layers": 32, "pad_token_id": 0, "rope_theta": 1e6,
        "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0",
        "use_cache": True, "vocab_size": 102400},
    "EXAONE 4.0 32B": text("exaone4", 5120, 27392, 64, 40, 8, 102400, head_dim=128,
                           layer_types=SLIDING * 16, sliding_window=4096, rope_theta=1e6,
                           sliding_window_pattern="LLLG", rope_scaling=EXAONE,
                           max_position_embeddings=131072),
    "EXAONE 4.0 1.2B": text("exaone4", 2048, 4096, 30, 32, 8, 102400, head_dim=64, rope_theta=1e6,
                            layer_types=["full_attention"] * 30, sliding_window=None,
                            sliding_window_pattern=None, rope_scaling=EXAONE,
                            max_position_embeddings=65536, tie_word_embeddings=True),
    "Hunyuan 7B": text("hunyuan_v1_dense", 4096, 14336, 32, 32, 8, 128167, head_dim=128,
                       attention_head_dim=128, max_position_embeddings=32768, rope_scaling=HUNYUAN,
                       use_qk_norm=True, use_cla=False, cla_share_factor=2, norm_type="rms",
                       mask_init_id=12, org_vocab_size=128167, add_classification_head=False,
                       tie_word_embeddings=True),
    "gpt-oss 20B": text("gpt_oss", 2880, 2880, 24, 64, 8, 201088, attention_bias=True,
                        attention_dropout=0.0, eos_token_id=200002, experts_per_token=4,
                        head_dim=64, hidden_act="silu", initial_context_length=4096,
                        layer_types=["sliding_attention", "full_attention"] * 12,
                        max_position_embeddings=131072, num_experts_per_tok=4,
                        num_local_experts=32, output_router_logits=False, pad_token_id=199999,
                        quantization_config={
                            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
                            "quant_method": "mxfp4"},
                        rms_norm_eps=1e-5, rope_scaling={
                            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                            "original_max_position_embeddings": 4096, "rope_type": "yarn",
                            "truncate": False},
                        rope_theta=150000, router_aux_loss_coef=0.9, sliding_window=128,
                        swiglu_limit=7.0, tie_word_embeddings=False),
    "Laguna XS.2": text("laguna", 2048, 8192, 40, 48, 8, 100352, gating=True, head_dim=128,
                        hidden_act="silu", layer_types=SLIDING * 10, moe_intermediate_size=512,
                        mlp_layer_types=["dense"] + ["sparse"] * 39, num_experts=256,
                        num_attention_heads_per_layer=[64, 64, 64, 48] * 10,
                        num_experts_per_tok=8, shared_expert_intermediate_size=512,
                        moe_routed_scaling_factor=2.5, sliding_window=512, rope_parameters={
                            "full_attention": {"rope_type": "default", "rope_theta": 5e5,
                                               "partial_rotary_factor": 0.5},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4,
                                                  "partial_rotary_factor": 1.0}}),
    "Step 3.7 Flash": multimodal(
        "step3p7", text(
            "step3p5", 4096, 11264, 45, 64, vocab_size=128896, head_dim=128, num_attention_groups=8,
            attention_other_setting={
                "attention_type": "sliding_attention", "num_attention_heads": 96,
                "num_attention_groups": 8, "head_dim": 128, "true_head_dim": 128},
            layer_types=STEP * 12, max_position_embeddings=262144, moe_every_n_layer=1,
            moe_intermediate_size=1280, moe_layer_offset=0, moe_num_experts=288, moe_top_k=8,
            moe_layers_enum=",".join(map(str, range(3, 45))), moe_router_activation="sigmoid",
            moe_router_scaling_factor=3.0, need_fp32_gate=True, norm_expert_weight=True,
            num_nextn_predict_layers=3, partial_rotary_factors=[0.5, 1.0, 1.0, 1.0] * 12,
            rope_scaling=LLAMA3 | {"factor": 2.0, "high_freq_factor": 32.0,
                                   "original_max_position_embeddings": 131072},
            rope_theta=[5e6, 1e4, 1e4, 1e4] * 12, share_expert_dim=1280, sliding_window=512,
            swiglu_limits=[0.0] * 43 + [7, 7] + [0.0] * 3,
            swiglu_limits_shared=[0.0] * 44 + [16] + [0.0] * 3, tie_word_embeddings=False,
            use_head_wise_attn_gate=True, use_moe=True, use_moe_router_bias=True,
            yarn_only_types=["full_attention"], zero_centered=True),
        {"model_type": "perception_encoder", "width": 1536, "layers": 47, "heads": 16,
         "image_size": 728, "patch_size": 14, "ls_init_value": 0.1, "mlp_ratio": 8960 / 1536},
        image_token_id=128001, projector_bias=False, understand_projector_stride=2),
    "Granite 4.0 H Tiny": text(
        "granitemoehybrid", 1536, 512, 40, 12, 4, 100352, **GRANITE4 | {
            "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4,
            "position_embedding_type": "nope", "num_local_experts": 64, "num_experts_per_tok": 6,
            "shared_intermediate_size": 1024, "mamba_n_heads": 48}),
    "Nemotron 3 Nano 30B": text(
        "nemotron_h", 2688, 1856, 52, 32, 2, 131072, **NEMOTRON_H, mamba_num_heads=64,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, routed_scaling_factor=2.5),
    "Nemotron 3 Super 120B": text(
        "nemotron_h", 4096, 2688, 88, 32, 2, 131072, **NEMOTRON_H, mamba_num_heads=128,
        hybrid_override_pattern="MEMEMEM*E" + "MEMEMEM*E" * 2 + "MEMEMEMEM*E" * 4 + "MEMEMEM*E"
        + "MEMEMEME", moe_latent_size=1024, moe_shared_expert_overlap=False,
        n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688,
        moe_shared_expert_intermediate_size=5376, routed_scaling_factor=5.0,
        num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E"),
    "Nemotron 3 Ultra 550B": text(
        "nemotron_h", 8192, 5120, None, 64, 2, 131072, **NEMOTRON_H, mamba_num_heads=256,
        layers_block_type=(["mamba", "moe"] * 4 + ["attention"]) * 12, moe_latent_size=2048,
        moe_shared_expert_overlap=False, n_routed_experts=512, num_experts_per_tok=22,
        moe_intermediate_size=5120, moe_shared_expert_intermediate_size=10240,
        routed_scaling_factor=5.0, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        mtp_layers_block_type=["attention", "moe"], rope_theta=10000, sliding_window=None),
    "Falcon-H1 1.5B Deep": text(
        "falcon_h1", 1280, 3072, 66, 6, 2, 65537, head_dim=128, rope_theta=1e11, rms_norm_eps=1e-5,
        mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_n_groups=1, mamba_d_state=256,
        mamba_d_conv=4, mamba_expand=2, mamba_chunk_size=128, mamba_conv_bias=True,
        mamba_proj_bias=False, mamba_norm_before_gate=False, mamba_rms_norm=False,
        projectors_bias=False, attention_bias=False, mlp_bias=False, key_multiplier=0.0625,
        embedding_multiplier=5.656854249492381, lm_head_multiplier=0.0390625,
        attention_in_multiplier=1.0, attention_out_multiplier=0.9375, ssm_in_multiplier=1.25,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
        ssm_out_multiplier=0.23570226039551587, mlp_multipliers=[0.8838834764831844, 0.58925565]),
    "GLM-4.7-Flash": text(
        "glm4_moe_lite", 2048, 10240, 47, 20, 20, 154880, **MLA, q_lora_rank=768,
        qk_nope_head_dim=192, v_head_dim=256, max_position_embeddings=202752, n_group=1,
        first_k_dense_replace=1, moe_intermediate_size=1536, n_routed_experts=64,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=4, topk_group=1,
        num_nextn_predict_layers=1, partial_rotary_factor=1.0, rms_norm_eps=1e-5,
        rope_scaling=None, rope_theta=1e6, routed_scaling_factor=1.8, topk_method="noaux_tc"),
    "DeepSeek V3": text("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, **DEEPSEEK),
    "Moonlight 16B-A3B": text(
        "deepseek_v3", 2048, 11264, 27, 16, 16, 163840, **DEEPSEEK | {
            "q_lora_rank": None, "first_k_dense_replace": 1, "moe_intermediate_size": 1408,
            "n_group": 1, "topk_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5,
            "rope_scaling": None, "rope_theta": 50000, "routed_scaling_factor": 2.446,
            "max_position_embeddings": 8192, "quantization_config": None}),
    "DeepSeek V2": text(
        "deepseek_v2", 5120, 12288, 60, 128, 128, 102400, **DEEPSEEK_V2, q_lora_rank=1536,
        moe_intermediate_size=1536, n_group=8, n_routed_experts=160, routed_scaling_factor=16.0,
        topk_group=3, topk_method="group_limited_greedy"),
    "DeepSeek V2-Lite": text(
        "deepseek_v2", 2048, 10944, 27, 16, 16, 102400, **DEEPSEEK_V2, q_lora_rank=None,
        moe_intermediate_size=1408, n_group=1, n_routed_experts=64, routed_scaling_factor=1.0,
        topk_group=1, topk_method="greedy"),
    "DeepSeek V3.2": text(
        "deepseek_v32", 7168, 18432, 61, 128, 128, 129280, **DEEPSEEK, index_head_dim=128,
        index_n_heads=64, index_topk=2048),
    "GLM-5": text(
        "glm_moe_dsa", 6144, 12288, 78, 64, 64, 154880, **MLA, q_lora_rank=2048,
        qk_nope_head_dim=192, v_head_dim=256, max_position_embeddings=202752, n_group=1,
        first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256,
        n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8, topk_group=1,
        num_nextn_predict_layers=1, rms_norm_eps=1e-5, routed_scaling_factor=2.5,
        rope_parameters={"rope_theta": 1000000, "rope_type": "default"}, scoring_func="sigmoid",
        topk_method="noaux_tc", index_head_dim=128, index_n_heads=32, index_topk=2048),
    "Mistral Small 4": multimodal(
        "mistral3", text(
            "mistral4", 4096, 12288, 36, 32, 32, 131072, **MLA | {"kv_lora_rank": 256},
            q_lora_rank=1024, qk_nope_head_dim=64, v_head_dim=128, n_group=1, topk_group=1,
            first_k_dense_replace=0, moe_intermediate_size=2048, n_routed_experts=128,
            n_shared_experts=1, num_experts_per_tok=4, norm_topk_prob=True, rope_interleave=True,
            routed_scaling_factor=1.0, max_position_embeddings=1048576,
            rope_parameters=YARN | {"factor": 128.0, "original_max_position_embeddings": 8192,
                                    "rope_theta": 10000.0}), PIXTRAL, spatial_merge_size=2),
    "Kimi K2.5": multimodal(
        "kimi_k25", text(
            "kimi_k2", 7168, 18432, 61, 64, 64, 163840, **DEEPSEEK | {
                "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384,
                "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5, "rope_theta": 50000,
                "routed_scaling_factor": 2.827, "quantization_config": INT4}),
        {"model_type": "kimi_k25_vision"}, tie_word_embeddings=False),
    "Sarvam 30B": text(
        "sarvam_moe", 4096, 8192, 19, 64, 4, 262144, head_dim=64, first_k_dense_replace=1,
        hidden_act="silu", max_position_embeddings=131072, moe_intermediate_size=1024, n_group=1,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=6, num_shared_experts=1,
        rms_norm_eps=1e-6, rope_theta=8e6, routed_scaling_factor=2.5, tie_word_embeddings=False,
        topk_group=1, use_qk_norm=True, use_qkv_bias=False),
    "Sarvam 105B": text(
        "sarvam_mla", 4096, 16384, 32, 64, 64, 262144, **MLA, first_k_dense_replace=1,
        head_dim=576, max_position_embeddings=131072, moe_intermediate_size=2048,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, num_shared_experts=1,
        q_head_dim=192, q_lora_rank=None, qk_nope_head_dim=128, rms_norm_eps=1e-6,
        rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                      "type": "deepseek_yarn"},
        rope_theta=10000, routed_scaling_factor=2.5, v_head_dim=128),
    "Youtu-LLM 2B": text(
        "youtu", 2048, 6144, 32, 16, 16, 128256, **MLA | {"tie_word_embeddings": True},
        q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128, max_position_embeddings=131072,
        mlp_bias=False, rms_norm_eps=1e-6, rope_interleave=True, rope_theta=1600000,
        embedding_initializer_range=0.04),
    "MiniCPM3 4B": text(
        "minicpm3", 2560, 6400, 62, 40, 40, 73448, **MLA | {
            "kv_lora_rank": 256, "qk_rope_head_dim": 32, "tie_word_embeddings": True},
        q_lora_rank=768, qk_nope_head_dim=64, v_head_dim=64, max_position_embeddings=32768,
        dim_model_base=256, scale_depth=1.4, scale_emb=12, rms_norm_eps=1e-5,
        rope_scaling={"type": "longrope", "long_factor": [1 + i / 10 for i in range(16)],
                      "short_factor": [1 + i / 100 for i in range(16)],
                      "original_max_position_embeddings": 32768}),
    "Flint": text(
        "flint", 2048, 6144, 49, 32, 4, 150144, decoder_sparse_step=1, head_dim=128,
        layer_types=["full_attention"] * 2 + (STEP[1:] + ["full_attention"]) * 11
        + ["sliding_attention"] * 2 + ["full_attention"], max_position_embeddings=262144,
        mlp_only_layers=[0, 1], moe_intermediate_size=512, norm_topk_prob=True, num_experts=256,
        num_experts_per_tok=6, rms_norm_eps=1e-6, router_aux_loss_coef=0.0005,
        shared_expert_intermediate_size=1024, sliding_window=513),
    "Hunyuan A13B": text("hunyuan_v1_moe", 4096, 3072, 32, 32, 8, 128167, attention_head_dim=128,
                         head_dim=128, max_position_embeddings=32768, rope_scaling=HUNYUAN,
                         use_qk_norm=True, use_cla=False, use_mixed_mlp_moe=True, norm_type="rms",
                         moe_intermediate_size=[3072] * 32, moe_topk=[8] * 32, num_experts=64,
                         num_shared_expert=[1] * 32, tie_word_embeddings=True),
}  # fmt: skip


# of some families older versions of transformers know nothing
KNOWN = [name for name, config in CONFIGS.items() if config["model_type"] in CONFIG_MAPPING]
if Version(transformers.__version__) < Version("5.24"):
    KNOWN.remove("MiniCPM3 4B")  # 5.20 cannot make it: KeyError 'factor'

# of the commonest families; the others by `make test-slow`
QUICK = ("Llama 3.1 8B", "Mistral 7B v0.1", "Qwen2.5 7B", "Qwen3 8B", "Qwen3.5 9B", "Phi-4",
         "Gemma 3 4B", "Gemma 4 31B", "gpt-oss 20B", "DeepSeek V3",
         "Nemotron 3 Nano 30B")  # fmt: skip
assert set(QUICK) < set(CONFIGS)


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in KNOWN])
def test_config_as_released_passes_the_check_at_start(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    config = Config(model=name, dataset=("rows.jsonl",))
    model_config, arch = read_model_config(tmp_path, config)
    compare_with_transformers(model_config, name)
    text_model = CONFIGS[name].get("text_config", CONFIGS[name])
    family = {"kimi_k2": "deepseek_v3", "qwen2_5_vl": "qwen2_5_vl_text"}
    assert arch.family == family.get(text_model["model_type"], text_model["model_type"])
    assert arch.hidden_size == text_model["hidden_size"] and resolve_max_seq_len(
        config, model_config, arch).max_seq_len == 2048


@pytest.mark.parametrize("name", [x for x in ("laguna", "step3p7") if x in CONFIG_MAPPING])
def test_check_at_start_has_layers_of_both_numbers_of_heads(name):
    small = shrunk_config(TINY[name](320))
    assert len({heads.n for heads in make_architecture(small).layer_heads}) == 2
