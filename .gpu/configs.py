"""Write config.json of Qwen3.5's shapes: python .gpu/configs.py DIRECTORY [layers]. Sizes of 27B and 122B-A10B from memory."""
import json, pathlib, sys
BASE = dict(dtype="bfloat16", head_dim=256, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=16,
            linear_conv_kernel_dim=4, vocab_size=248320, rms_norm_eps=1e-6, max_position_embeddings=262144, hidden_act="silu",
            rope_parameters=dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[11, 11, 10]))
DENSE = BASE | dict(model_type="qwen3_5_text", tie_word_embeddings=False)
MOE = BASE | dict(model_type="qwen3_5_moe_text", tie_word_embeddings=False, num_experts=256, num_experts_per_tok=8)
CONFIGS = {
    "9b": DENSE | dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=32, num_attention_heads=16, num_key_value_heads=4, linear_num_value_heads=32),
    "27b": DENSE | dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24, num_key_value_heads=4, linear_num_value_heads=48),
    "35b-a3b": MOE | dict(hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2, linear_num_value_heads=32,
                          moe_intermediate_size=512, shared_expert_intermediate_size=512),
    "122b-a10b": MOE | dict(hidden_size=3072, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=2, linear_num_value_heads=64,
                            moe_intermediate_size=1024, shared_expert_intermediate_size=1024)}
def write(directory, layers=None):
    for name, config in CONFIGS.items():
        at = pathlib.Path(directory) / name; at.mkdir(parents=True, exist_ok=True)
        (at / "config.json").write_text(json.dumps(config | ({"num_hidden_layers": layers} if layers else {})))
if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else None)
