"""What a user can get wrong: one line that names it, an exit code, and no weight read before."""

import io
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import ROOT, SIZES, needs_model_type, one_process
from families import TINY
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_fsdp_qlora
from fsdp_qlora.config import Config
from fsdp_qlora.files import digest, json_digest, read_json
from fsdp_qlora.kernels import norms
from fsdp_qlora.layer import offload
from fsdp_qlora.pretrained.model_directory import read_model_config
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run import base_model
from fsdp_qlora.run.directory import open_output_dir
from fsdp_qlora.run.resolve import resolve_max_seq_len
from fsdp_qlora.run.watch import watch_process

FLAGS, MODEL, DATA, DIVERGED, CHECKPOINT, OUT_OF_MEMORY = 2, 3, 4, 6, 7, 8  # exit codes
LOADING = "load and quantize"  # the progress bar of the weights


def refused(want, result, *words):
    """Assert that a run_main() ended with the exit code `want`, before it read any weight, and by
    one line that has these words. Returns the line."""
    code, out, err = result
    assert code == want, err
    lines = err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert str(word) in lines[0]
    assert LOADING not in out + err
    return lines[0]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "What is 1 plus 1?", "completion": "The answer is 2."}\n' * 8)
    return path


@pytest.fixture
def model(tiny_model, tmp_path):
    """A private copy of a model in one file."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


@pytest.fixture
def sharded(tiny_model, tmp_path):
    """A private copy of a model in several files with an index."""
    directory = tiny_model("llama", max_shard_size="400KB")
    assert len(list(directory.glob("*.safetensors"))) > 2
    return Path(shutil.copytree(directory, tmp_path / "sharded"))


@pytest.fixture
def start(run_main, tmp_path, data):
    """Function (model, *flags): main() with that model, a good data set, a new directory."""

    def run(model, *flags, dataset=data, output_dir=tmp_path / "out"):
        args = ["--dataset", dataset, "--output_dir", output_dir, "--max_seq_len", 64]
        return run_main("--model", model, *args, "--max_steps", 1, "--batch_size", 2, *flags)

    return run


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def edit_map(directory, change):
    """Change the {tensor: file} of an index in place."""
    path = directory / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    change(weight_map)
    edit_json(path, weight_map=weight_map)


# ------------------------------------------------------------------------------------------------
# Flags
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no_such_flag", "3"], ["--no_such_flag", "--help"]),
        (["--lr", "1"], ["--lr"]),  # not taken for --lr_schedule
        (["--max_step", "3"], ["--max_step"]),  # not taken for --max_steps
        (["word"], ["word"]),
        (["--max_steps", "many"], ["--max_steps", "many"]),
        (["--attn", "auto"], ["--attn", "auto", "sdpa"]),
        (["--adapter", "vera"], ["--adapter", "vera", "lora", "rslora", "dora"]),
        (["--micro_batch_size", "4"], ["--micro_batch_size", "--help"]),
        (["--packing"], ["--packing"]),
        (["--micro_batch_tokens", "0"], ["--micro_batch_tokens 0"]),
        (["--shard_group_size", "2"], ["--shard_group_size 2"]),
        (["--shard_group_size", "0"], ["--shard_group_size 0"]),
        (["--batch_size", "0"], ["--batch_size 0"]),
        (["--max_steps", "-1"], ["--max_steps -1"]),
        (["--max_seq_len", "0"], ["--max_seq_len 0"]),
        (["--learning_rate", "nan"], ["--learning_rate nan"]),
        (["--num_epochs", "-1"], ["--num_epochs -1"]),
        (["--lora_rank", "0"], ["--lora_rank 0"]),
        (["--lora_dropout", "1"], ["--lora_dropout 1"]),
        (["--save_every", "-1"], ["--save_every -1"]),
        (["--recompute", "some"], ["--recompute some", "all, none"]),
        (["--recompute", "-1"], ["--recompute -1", "all, none"]),
        (["--recompute", "none", "--offload_activations"], ["--offload_activations", "none"]),
        (["--memory_limit_gib", "0"], ["--memory_limit_gib 0"]),
        (["--seed", str(2**64)], ["--seed"]),
        (["--model", "some/model"], ["--model some/model", "--dataset"]),
        (["--random_weights"], ["--random_weights", "--model"]),
        (["--attn", "flash_attention_2", "--compute_dtype", "float32"], ["flash_attention_2"]),
        (["--model", "llama-2-7b", "--random_weights", "--eval_dataset", "0.1"],
         ["--eval_dataset", "--dataset"]),
        (["--resume", "must", "--output_dir", "typo"], ["--resume", "typo"]),
        (["--output_dir=~/run"], ["--output_dir ~/run", "whole path"]),
        (["--eval_every", "1"], ["--eval_every 1", "--eval_dataset"]),
        (["--eval_samples", "2"], ["--eval_samples 2", "--eval_dataset"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_flags_are_refused_before_anything_is_written(
    run_main, tmp_path, monkeypatch, flags, words
):
    monkeypatch.chdir(tmp_path)
    refused(FLAGS, run_main(*flags), *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("line", ["recompute: no", "report_to: off"])
def test_yaml_that_makes_a_word_a_truth_value_is_refused(line, run_main, tmp_path):
    (tmp_path / "flags.yaml").write_text(f"lora_rank: 4\nrandom_weights: no\n{line}\n")
    refused(FLAGS, run_main("--config", tmp_path / "flags.yaml"), line.split(":")[0])


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_tracker_that_is_not_there_is_named(run_main, tmp_path, monkeypatch, tracker):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, tracker, None)  # as if it were not installed
    refused(FLAGS, run_main("--report_to", tracker), f"--report_to {tracker}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU it may be there")
def test_flash_attention_without_a_gpu_is_refused(start, model):
    refused(MODEL, start(model, "--attn", "flash_attention_2"), "--attn sdpa")


def test_micro_batches_below_the_longest_row_are_refused(start, model):
    flag = "--micro_batch_tokens"
    line = refused(MODEL, start(model, flag, 9), f"{flag} 9", "--max_seq_len")
    longest = int(line.partition("the longest row has ")[2].split()[0])
    refused(MODEL, start(model, flag, longest - 1), f"{flag} {longest - 1}")
    code, out, err = start(model, flag, longest)
    assert code == 0 and f"micro-batches of up to {longest} tokens" in out, err


def test_more_recomputed_layers_than_there_are_are_refused(start, model):
    refused(MODEL, start(model, "--recompute", "4"), "--recompute 4", "3 layers")


def test_target_that_matches_nothing_is_refused(start, model):
    there = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj", "all-linear"]
    result = start(model, "--target_modules", "q_proj", "qproj")
    refused(MODEL, result, "--target_modules qproj", *there)
    refused(MODEL, start(model, "--target_modules", "lm_head"), "--target_modules lm_head")


def test_what_does_not_fit_is_refused_with_what_would(run_main, tmp_path):
    result = run_main("--model", "llama-2-70b", "--random_weights", "--memory_limit_gib", 20,
                      "--output_dir", tmp_path / "out")  # fmt: skip
    line = refused(OUT_OF_MEMORY, result, "20.0 GiB", "--offload_params")
    assert "--recompute all" not in line


def test_offloading_more_than_the_host_has_is_refused(run_main, tmp_path):
    refused(
        OUT_OF_MEMORY,
        run_main("--model", "llama-2-70b", "--random_weights", "--offload_activations",
                 "--recompute", "all", "--max_seq_len", 2**22, "--output_dir", tmp_path / "out",
                 "--batch_size", 1),
        "host memory",
    )  # fmt: skip


@pytest.mark.slow
def test_host_memory_that_cannot_be_pinned_ends_the_run_in_one_line(
    run_main, tmp_path, monkeypatch
):
    def fail(n_bytes, device):
        raise MemoryError("1.00 GiB of host memory cannot be pinned")

    monkeypatch.setattr(offload, "pinned_empty", fail)
    flags = ["--output_dir", tmp_path / "out", "--max_steps", 1, "--recompute", "all"]
    for flag in "--offload_params", "--offload_activations":
        code, _, errors = run_main(*flags, flag)
        lines = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert code == OUT_OF_MEMORY and len(lines) == 1 and "Traceback" not in errors
        assert "rank 0 on" in lines[0] and "1.00 GiB of host memory" in lines[0]
    monkeypatch.setattr(base_model, "load_tokenizer", fail)  # where all ranks hear of it
    code, _, errors = run_main(*flags)
    assert code == OUT_OF_MEMORY and "1.00 GiB of host" in errors


def test_longer_rows_than_the_model_are_refused(start, model):
    refused(MODEL, start(model, "--max_seq_len", "4096"), "--max_seq_len 4096", "2048")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LENGTHS = {  # name: (class of the config, its max_position_embeddings and rope, the longest row)
    "none": ("Llama", 2560, None, 2560),
    "yarn as Qwen documents it": ("Qwen3", 2560, YARN, 8192),
    "by its old name": ("Qwen2", 2048, {"type" if k == "rope_type" else k: v
                                        for k, v in YARN.items()}, 8192),
    "yarn without the original": ("Qwen3", 2048, {"rope_type": "yarn", "factor": 4.0}, 8192),
    "yarn, scaled already": ("Qwen3", 8192, YARN, 8192),
    "linear": ("Llama", 2048, {"rope_type": "linear", "factor": 2.0}, 4096),
    "dynamic": ("Llama", 2048, {"rope_type": "dynamic", "factor": 3.0}, 6144),
    "llama3": ("Llama", 8192, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                               "high_freq_factor": 4.0, "original_max_position_embeddings": 4096},
               8192),
    "of some layers": ("Gemma3Text", 2048, {"rope_type": "linear", "factor": 8.0}, 2048),
}


def max_seq_len_of(directory, **flags):
    config = Config(model=str(directory), dataset=("x.jsonl",), **flags)
    return resolve_max_seq_len(config, *read_model_config(directory, config)).max_seq_len


def test_rows_for_which_an_indexer_counts_are_refused(tmp_path):
    TINY["deepseek_v32"](99).save_pretrained(tmp_path)  # made for 64 tokens
    config = json.loads((tmp_path / "config.json").read_text())
    for chosen, longest in (16, 16), (2048, 64):
        (tmp_path / "config.json").write_text(json.dumps(config | {"index_topk": chosen}))
        assert max_seq_len_of(tmp_path, max_seq_len=longest) == longest
        assert max_seq_len_of(tmp_path) == longest
        with pytest.raises(ValueError, match=f"--max_seq_len {longest + 1}: .*{longest}"):
            max_seq_len_of(tmp_path, max_seq_len=longest + 1)


@pytest.mark.parametrize("name", LENGTHS)
def test_rows_may_be_as_long_as_a_scaled_rope_allows(name, tmp_path):
    kind, n, rope, longest = LENGTHS[name]
    sizes = {key: value for key, value in SIZES.items() if key != "max_position_embeddings"}
    config = getattr(transformers, f"{kind}Config")(
        **sizes, max_position_embeddings=n, head_dim=32, vocab_size=99,
        **{"rope_scaling": rope} if rope else {})
    config.save_pretrained(tmp_path)
    assert max_seq_len_of(tmp_path, max_seq_len=longest) == longest
    with pytest.raises(ValueError, match=f"{longest + 1}: the model supports up to {longest};"):
        max_seq_len_of(tmp_path, max_seq_len=longest + 1)


# ------------------------------------------------------------------------------------------------
# The model
# ------------------------------------------------------------------------------------------------


def test_missing_model_is_refused(start, tmp_path):
    missing = tmp_path / "nowhere"
    refused(MODEL, start(missing), f"--model {missing}")
    refused(MODEL, start("nobody/nothing"), "--model nobody/nothing", "Hub")  # which is offline
    (tmp_path / "empty").mkdir()
    refused(MODEL, start(tmp_path / "empty"), f"--model {tmp_path / 'empty'}", "no config.json")
    (tmp_path / "file").touch()
    refused(MODEL, start(tmp_path / "file"), f"--model {tmp_path / 'file'}")


SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 400,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "{}",
        "[]",
        '{"model_type": "nothing"}',
        '{"model_type": "llama", "hidden_size": "many"}',
        '{"model_type": "llama", "hidden_size": 128, "num_attention_heads": 3}',
        '{"model_type": "llama", "hidden_act": "nothing"}',
    ],
)
def test_config_that_cannot_be_used_is_refused(start, model, config):
    (model / "config.json").write_text(config)
    refused(MODEL, start(model, "--random_weights"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2"]),
        ({"model_type": "clip"}, ["clip"]),  # no language model
        ({"model_type": "phimoe", **SMALL}, ["phimoe", "a router not known, num_local_experts=16"]),
        ({"model_type": "jamba", **SMALL}, ["jamba"]),  # another state space
        ({"model_type": "longcat_flash", **SMALL}, ["longcat_flash"]),  # two attentions in a layer
        ({"model_type": "bamba", **SMALL}, ["bamba"]),
        ({"model_type": "recurrent_gemma", **SMALL}, ["recurrent_gemma"]),
        ({"model_type": "mamba"}, ["mamba"]),
        ({"model_type": "bert"}, ["bert"]),  # encoders
        ({"model_type": "modernbert"}, ["modernbert"]),
        ({"model_type": "t5"}, ["t5", "is_encoder_decoder=True"]),
        ({"model_type": "gemma3", "text_config": {"model_type": "gemma2"}}, ["gemma3"]),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)  # fmt: skip
def test_model_type_that_the_table_lacks_is_refused_with_what_it_has(
    start, model, settings, words
):
    (model / "config.json").write_text(json.dumps(settings))
    line = refused(MODEL, start(model, "--random_weights"), f"--model {model}: model_type ", *words)
    for name in ("llama", "qwen3", "gemma2", "cohere2", "phi3", "mistral3"):
        assert f" {name}" in line.partition("use one of")[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model_type": "llama", "is_causal": False}, ["is_causal"]),
        ({"model_type": "llama", "hidden_act": "relu"}, ["hidden_act relu", "silu"]),
        ({"model_type": "llama", "num_key_value_heads": 3}, ["4 attention heads", "3 key-value"]),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "partial_rotary_factor": 0.5}},
         ["partial_rotary_factor=0.5"]),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "axial",
                                                     "rope_theta": 1e4}}, ["rope"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "chunked_attention"]},
         ["chunked_attention"]),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, ["layer"]),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, ["resid_pdrop=0.1"]),
        ({"model_type": "mistral", "sliding_window": -1}, ["sliding_window=-1"]),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True},
         ["use_bidirectional_attention=True"]),
        ({"model_type": "gemma4_text"}, ["vocab_size_per_layer_input=262144"]),
        ({"model_type": "gemma4_text", "enable_moe_block": True, "num_experts": 8,
          "top_k_experts": 2, "moe_intermediate_size": 64}, ["hidden_size_per_layer_input=256"]),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
          "num_kv_shared_layers": 1}, ["num_kv_shared_layers=1", "full_attention"]),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
          "use_bidirectional_attention": "all"}, ["is_causal=False"]),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
          "per_layer_config": {"0": {"intermediate_size": 64}}},
         ["layers that differ in intermediate_size"]),
        ({"model_type": "qwen3", "layer_types": ["linear_attention", "full_attention"]},
         ["1 of 2 layers are of linear_attention, which is not"]),
        ({"model_type": "lfm3", "use_attention_gate": False}, ["use_attention_gate=False"]),
        ({"model_type": "lfm3", "attention_bias": True}, ["attention_bias=True"]),
        ({"model_type": "granite_swa", "layer_rope_theta": [1e4]},
         ["layer_rope_theta has 1 entries for 2 layers"]),
        ({"model_type": "cohere2_moe", "rms_norm_eps": 1e-5}, ["rms_norm_eps=1e-05"]),
        ({"model_type": "cohere2_moe", "expert_selection_fn": "tanh"}, ["tanh scores"]),
        ({"model_type": "cohere2_moe", "shared_expert_combination_strategy": "product"},
         ["the product with shared"]),
        ({"model_type": "phi", "qk_layernorm": True}, ["qk_layernorm=True"]),
        ({"model_type": "sarvam_mla", "attention_bias": True}, ["attention_bias=True"]),
        ({"model_type": "laguna", "moe_router_logit_softcapping": 30.0},
         ["moe_router_logit_softcapping=30.0"]),
        ({"model_type": "step3p5", "swiglu_limits_shared": [7.0, 0, 0]},
         ["limits of 3 layers, [7.0, 0, 0], for 2"]),
        ({"model_type": "step3p5"}, ["step3p5 only inside a multimodal model"]),
    ],
    ids=lambda value: str({**value, "model_type": 0}) if isinstance(value, dict) else "",
)  # fmt: skip
def test_settings_that_no_family_can_express_are_refused(start, model, settings, words):
    needs_model_type(settings.get("model_type", "llama"))
    (model / "config.json").write_text(json.dumps({**SMALL, **settings}))
    refused(MODEL, start(model, "--random_weights"), f"--model {model}", *words)


def test_failed_check_at_start_ends_the_run_in_one_line(start, model, monkeypatch):
    """The package's norm is wrong."""
    standardized = norms.standardized

    def wrong(x, kind, eps):
        return standardized(x + 0.1, kind, eps)

    monkeypatch.setattr(norms, "standardized", wrong)
    refused(MODEL, start(model), f"--model {model}", "check at start", "llama")


def test_quantized_model_is_refused(start, model):
    edit_json(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    refused(MODEL, start(model), f"--model {model}", "quantized")


def test_remote_code_is_neither_run_nor_asked_about(start, model, tmp_path, monkeypatch):
    (model / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_json(model / "config.json", model_type="own", auto_map=auto_map)
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answers)
    refused(MODEL, start(model), model, "code")
    assert answers.tell() == 0 and not (tmp_path / "was_run").exists()


def test_missing_or_malformed_tokenizer_is_refused(start, model):
    (model / "tokenizer.json").write_text("{}")
    refused(MODEL, start(model), model)
    (model / "tokenizer.json").write_text("{")
    refused(MODEL, start(model), model)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    refused(MODEL, start(model), model)


def test_tokenizer_without_eos_is_refused(start, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    refused(DATA, start(model), "EOS")


def test_adapter_beside_the_weights_is_refused(start, model):
    """transformers would load it, too."""
    (model / "adapter_config.json").write_text("{}")
    refused(MODEL, start(model), model, "adapter_config.json", "--init_adapter")


@pytest.mark.parametrize("pad", [302, -303])
def test_pad_token_outside_of_the_vocabulary_is_refused(pad, start, model):
    edit_json(model / "config.json", pad_token_id=pad)
    refused(MODEL, start(model), model, f"pad_token_id {pad}", "302")


@pytest.mark.parametrize("pad", [301, -302, None])
def test_pad_token_that_transformers_takes_is_taken(pad, model):
    edit_json(model / "config.json", pad_token_id=pad)
    model_config, _ = read_model_config(model, Config(model=str(model)))
    assert model_config.vocab_size == 302 and model_config.pad_token_id == pad
    AutoModelForCausalLM.from_pretrained(model)


def test_tokenizer_of_another_model_is_refused(start, model):
    edit_json(model / "config.json", vocab_size=40)
    refused(DATA, start(model, "--random_weights"), "vocabulary", "39")


# ------------------------------------------------------------------------------------------------
# Its weights
# ------------------------------------------------------------------------------------------------


def test_missing_files_are_named(start, model, sharded):
    (model / "model.safetensors").unlink()
    result = start(model)
    refused(MODEL, result, model, "model.safetensors")
    assert result[0] == 3  # of the model
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    refused(MODEL, start(sharded), shard, "missing", "model.safetensors.index.json")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "..", 3])
def test_index_that_leads_elsewhere_is_refused(start, sharded, file):
    def change(weight_map):
        weight_map["model.norm.weight"] = file

    edit_map(sharded, change)
    refused(MODEL, start(sharded), "model.safetensors.index.json", file)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}'])
def test_malformed_index_is_named(start, sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(MODEL, start(sharded), "model.safetensors.index.json")


def test_tensor_that_the_index_puts_in_another_file_is_named(start, sharded):
    name = "model.layers.1.mlp.up_proj.weight"

    def change(weight_map):
        weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])

    edit_map(sharded, change)
    refused(MODEL, start(sharded), name)


def test_missing_tensor_is_named(start, model, sharded):
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_tensors(model / "model.safetensors", lambda tensors: tensors.pop(name))
    refused(MODEL, start(model), "lacks 1 of", name)
    edit_map(sharded, lambda weight_map: weight_map.pop(name))
    refused(MODEL, start(sharded), "lacks 1 of", name)


@pytest.mark.parametrize("shape", [(128, 64), (64 * 128,), (65, 128), (0, 128)])
def test_tensor_of_another_shape_is_named(start, model, shape):
    name = "model.layers.1.self_attn.k_proj.weight"
    other = {name: torch.zeros(shape, dtype=torch.bfloat16)}
    edit_tensors(model / "model.safetensors", lambda tensors: tensors.update(other))
    refused(MODEL, start(model), "model.safetensors", name, list(shape), "[64, 128]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_tensor_of_another_dtype_is_named(start, model, dtype):
    name = "model.layers.1.self_attn.k_proj.weight"
    other = {name: torch.zeros(64, 128).to(dtype)}
    edit_tensors(model / "model.safetensors", lambda tensors: tensors.update(other))
    refused(MODEL, start(model), "model.safetensors", name, "BF16")


@pytest.mark.parametrize("keep", [0, 5, 300, -1])
def test_truncated_file_is_named(start, model, sharded, keep):
    for directory in (model, sharded):
        file = sorted(directory.glob("*.safetensors"))[-1]
        file.write_bytes(file.read_bytes()[:keep])
        refused(MODEL, start(directory), file)


def test_other_number_of_layers_is_refused(start, model):
    edit_json(model / "config.json", num_hidden_layers=2)
    refused(MODEL, start(model), "config.json", "model.layers.2.")
    edit_json(model / "config.json", num_hidden_layers=4)
    refused(MODEL, start(model), "config.json", "model.layers.3.")


# ------------------------------------------------------------------------------------------------
# The data set
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["no examples"]),
        ("\n\r\n", ["no examples"]),
        ('{"text"\n\n{"text"\n', ["none of its 2 examples", "2 skipped", "not JSON", "line 1"]),
        ('{"text": "a"}\n{"question": "a"}\n', ["line 2", "question", "prompt and completion"]),
        ('\n{"prompt": 3, "completion": "a"}\n',
         ["none of its 1 examples", "line 2", "prompt is int"]),
        ('{"text": ["a"]}\n', ["none of its 1 examples", "line 1", "text is list"]),
        ('{"text": ""}\n{"text": ""}\n', ["none of its 2 examples", "text is empty"]),
        (json.dumps({"prompt": "a " * 99, "completion": "b"}), ["none of its 1 examples"]),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', ["line 1", "no assistant message"]),
        ('{"message": [{"role": "user"}]}\n', ["has message", "--columns message=messages"]),
        ('{"question": "", "answer": "a"}\n', ["1 skipped: question is blank: nothing is asked"]),
    ],
    ids=lambda value: None if isinstance(value, list) else ascii(value)[:40],
)
def test_data_set_that_cannot_be_used_is_refused(start, model, data, content, words):
    data.write_text(content)
    refused(DATA, start(model), data, *words)


def test_data_set_in_utf_16_is_refused(start, model, data):
    """Each of its lines is JSON to Python, some read shifted by a byte."""
    for encoding in "utf-16", "utf-16-be":
        text = '{"text": "a"}\n{"text": "\u0430"}\n'
        data.write_bytes(text.encode(encoding))
        line = refused(DATA, start(model), data)
        assert line == f"error: --dataset {data}: is UTF-16: save it as UTF-8"


def test_rows_that_cannot_be_used_are_left_out_and_counted(start, model, data, read_metrics):
    lines = data.read_text().splitlines()[:2]
    lines += ['{"text"', "", '{"text": ["a"]}', '{"text": ""}', '{"text": " "}']
    data.write_text("\n".join(lines))
    code, out, err = start(model)
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if line.startswith("data: ")]
    assert ": 2 rows, " in line and f"; {data}); 2 skipped: text is empty" in line
    assert all(f"({data} line {number})" in line for number in (3, 5, 6))


def test_missing_data_set_is_refused(start, model, tmp_path):
    refused(DATA, start(model, dataset=tmp_path / "no.jsonl"), "--dataset", "no.jsonl")
    (tmp_path / "empty").mkdir()
    refused(DATA, start(model, dataset=tmp_path / "empty"), "--dataset", tmp_path / "empty")
    refused(DATA, start(model, dataset="nobody/nothing"), "--dataset nobody/nothing", "Hub")
    refused(DATA, start(model, "--eval_dataset", "no.jsonl"), "error: --eval_dataset no.jsonl")


# ------------------------------------------------------------------------------------------------
# The output directory and its checkpoints
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code, flags, word",
    [
        (DATA, ["--dataset", "none.jsonl"], "none.jsonl"),
        (DATA, ["--dataset", "odd.jsonl"], "odd.jsonl line 1"),
        (DATA, ["--eval_dataset", "none.jsonl"], "none.jsonl"),
        (DATA, ["--eval_dataset", "1.5"], "--eval_dataset 1.5"),
        (MODEL, ["--chat_template", "none.jinja"], "--chat_template none.jinja: cannot be read"),
        (MODEL, ["--max_seq_len", 99999], "--max_seq_len 99999"),
    ],
    ids=str,
)
def test_start_that_fails_leaves_no_directory(code, flags, word, start, model, tmp_path,
                                              monkeypatch):  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("odd.jsonl").write_text('{"poem": "x"}\n')
    refused(code, start(model, *flags, output_dir=tmp_path / "runs" / "one"), word)
    assert not (tmp_path / "runs").exists()


def test_start_that_fails_leaves_what_was_there(start, model, tmp_path):
    """The directory that it was given, and other runs that have begun beside it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    missing = tmp_path / "none.jsonl"
    refused(DATA, start(model, dataset=missing, output_dir=tmp_path / "mine"), missing)
    assert (tmp_path / "mine" / "notes").read_text() == "x"
    config = Config(output_dir=str(tmp_path / "runs" / "one"))
    with (watch_process() as status, one_process(), pytest.raises(RunEnd),
          open_output_dir(config, config, status) as (directory, _)):  # fmt: skip
        beside = directory.parent / "two"
        beside.mkdir()
        raise RunEnd("this one fails")
    assert beside.is_dir() and not directory.exists()
    with (watch_process() as status, one_process(), pytest.raises(RunEnd),
          open_output_dir(config, config, status) as (directory, _)):  # fmt: skip
        (directory / "notes").write_text("put there meanwhile")
        raise RunEnd("this one fails")
    assert [path.name for path in directory.iterdir()] == ["notes"]


def test_output_directory_that_is_read_from_is_refused(start, model, data, tmp_path):
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for flag, value in ("--model", model), ("--dataset", tmp_path), ("--eval_dataset", tmp_path):
        more = [] if flag == "--model" else [flag, f"{value}/,split=train"]
        result = start(model, *more, output_dir=f"{value}/.")
        refused(FLAGS, result, f"--output_dir {value} is what {flag} names")
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_output_directory_that_cannot_be_is_refused(start, model, tmp_path):
    (tmp_path / "file").touch()
    refused(FLAGS, start(model, output_dir=tmp_path / "file"), "--output_dir", tmp_path / "file")
    below = tmp_path / "file" / "below"
    refused(FLAGS, start(model, output_dir=below), "--output_dir", below)


@pytest.fixture(scope="module")
def finished_run(tiny_model, tmp_path_factory):
    """The directory of a run of two steps with a checkpoint at each, and its flags."""
    directory = tmp_path_factory.mktemp("finished")
    data = directory / "data.jsonl"
    data.write_text('{"prompt": "What is 1 plus 1?", "completion": "The answer is 2."}\n' * 8)
    flags = ["--model", tiny_model("llama"), "--dataset", data, "--max_seq_len", 64]
    flags = [str(flag) for flag in [*flags, "--batch_size", 2, "--max_steps", 2, "--save_every", 1]]
    assert train_fsdp_qlora.main([*flags, "--output_dir", str(directory / "run")]) == 0
    return directory / "run", flags


def test_diverged_run_stops_and_saves_nothing_of_it(run_main, tmp_path, read_metrics):
    """It is found before the update, and so before the save that is due then."""
    run = tmp_path / "run"
    flags = ["--learning_rate", "1e25", "--max_steps", "5", "--save_every", "2", "--batch_size", 2]
    code, _, errors = run_main(*flags, "--output_dir", run)
    assert code == DIVERGED
    (line,) = [line for line in errors.splitlines() if "error: " in line]
    assert "step 2" in line and "--learning_rate" in line
    assert [row["step"] for row in read_metrics(run)] == [1]
    assert not list(run.glob("*checkpoint*")) and not list(run.glob("adapter*"))


@pytest.fixture
def resume(finished_run, tmp_path, run_main):
    """A copy of the finished run as if it had been killed before its end, and a function (*flags)
    that starts there again."""
    run, flags = finished_run
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    (copy / "adapter_model.safetensors").unlink()
    return copy, lambda *more: run_main(*flags, "--output_dir", copy, *more)


def flip_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_run_is_not_overwritten(resume, finished_run):
    run, again = resume
    shutil.copy(finished_run[0] / "adapter_model.safetensors", run)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    refused(FLAGS, again("--resume", "never"), f"--output_dir {run}", "--resume must")
    code, out, _ = again()
    assert code == 0 and out.startswith(f"{run} is already complete; nothing to do. ")
    after = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert {p for p in run.rglob("*") if before.get(p) != after.get(p)} <= {run / ".lock"}
    (run / "train_config.json").write_text('{"flags":')
    refused(FLAGS, again(), f"--output_dir {run}", "train_config.json is damaged", "--init_adapter")


def test_resume_without_checkpoint_is_refused(resume, run_main, tmp_path, monkeypatch):
    run, again = resume
    for path in run.glob("checkpoint-*"):
        shutil.rmtree(path)
    refused(CHECKPOINT, again("--resume"), "--resume", run)
    monkeypatch.chdir(tmp_path)
    refused(FLAGS, run_main("--resume"), "--resume", "runs/")


def test_resume_without_a_directory_continues_the_newest_run(
    finished_run, run_main, tmp_path, monkeypatch
):
    run, flags = finished_run
    for i, name in enumerate(("chat", "20200101-000000", "20300101-000000")):  # the last is newest
        shutil.copytree(run, tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "train_config.json", (i, i))
    (tmp_path / "runs" / "20310101-000000").mkdir()  # which ended before it began
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(*flags, "--resume", "--max_steps", 3)
    assert code == 0 and "resumed from runs/20300101-000000/checkpoint-000002" in out, err
    assert (tmp_path / "runs/20300101-000000/checkpoint-000003").is_dir()


def test_checkpoint_is_on_the_disk_before_it_gets_its_name(
    finished_run, run_main, tmp_path, monkeypatch
):
    """By the order of the calls: a power cut after any of them leaves whole checkpoints."""
    _, flags = finished_run
    fsync, replace = os.fsync, os.replace
    synced, unsynced, renamed = {}, {}, []  # {inode: its time}, {inode of a directory: name}

    def watched_fsync(fd):
        fsync(fd)
        state = os.fstat(fd)
        synced[state.st_ino] = state.st_mtime_ns
        unsynced.pop(state.st_ino, None)

    def on_disk(path):
        return synced.get(path.stat().st_ino) == path.stat().st_mtime_ns

    def watched_replace(source, target):
        source, target = Path(source), Path(target)
        assert not unsynced, f"{unsynced}: a name that is not on the disk before the next"
        if target.name == "status.json" or target.suffix == ".old":  # a power cut may undo these
            return replace(source, target)
        if not source.is_dir():
            assert on_disk(source), f"{source} is renamed before it is on the disk"
        elif target.name.startswith("checkpoint-"):
            listed = read_json(source / "checkpoint.json")["files"]
            assert all(digest(source / name) == sha for name, sha in listed.items())
            assert {*listed, "checkpoint.json"} == {p.name for p in source.iterdir()}
            assert all(map(on_disk, [source, *source.iterdir()]))
            renamed.append(target)
        replace(source, target)
        unsynced[target.parent.stat().st_ino] = target

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    code, _, err = run_main(*flags, "--output_dir", tmp_path / "run")
    assert code == 0, err
    assert not unsynced
    assert [path.name for path in renamed] == ["checkpoint-000001", "checkpoint-000002"]
    assert {path.name for path in (tmp_path / "run").glob("*checkpoint*")} == {
        path.name for path in renamed
    }
    for name in "adapter_model.safetensors", "adapter_config.json", "train_config.json":
        assert on_disk(tmp_path / "run" / name), name


def test_resume_with_other_settings_is_refused(resume):
    run, again = resume
    refused(CHECKPOINT, again("--resume", "--lora_rank", 4), "--resume", "--lora_rank 16", "now 4")
    refused(CHECKPOINT, again("--resume", "--seed", 4), "--resume", "--seed 0", "now 4")
    refused(CHECKPOINT, again("--resume", "--adapter", "dora"), "--resume", "--adapter lora")


def test_resume_with_other_rows_is_refused(model, run_main, tmp_path):
    """Other tokens, and the same tokens of which others are trained."""
    data = tmp_path / "data.jsonl"
    flags = ["--model", model, "--dataset", data, "--output_dir", tmp_path / "run"]
    flags += ["--batch_size", 2, "--max_steps", 1]

    def write(prompt, completion):
        data.write_text(json.dumps({"prompt": prompt, "completion": completion}) + "\n")

    write("####%%", "@@")
    code, _, err = run_main(*flags)
    assert code == 0, err
    for row in ("####%%", "@@@"), ("####", "%%@@"):
        write(*row)
        refused(CHECKPOINT, run_main(*flags, "--max_steps", 2), "--output_dir", "data set")
    write("####%%", "@@")
    code, _, err = run_main(*flags, "--resume")
    assert code == 0, err


# each damage of one file; of the others by `make test-slow`
DAMAGES = flip_byte, Path.unlink, lambda path: path.write_bytes(b"")
CHECKPOINT_FILES = "adapter_model.safetensors", "optimizer*", "checkpoint.json"


@pytest.mark.parametrize("file, damage", [
    pytest.param(file, damage, marks=[pytest.mark.slow] * (i != j))
    for i, file in enumerate(CHECKPOINT_FILES) for j, damage in enumerate(DAMAGES)])
def test_damaged_checkpoint_is_passed_over(resume, file, damage):
    run, again = resume
    (path,) = (run / "checkpoint-000002").glob(file)
    damage(path)
    code, out, _ = again("--resume", "--max_steps", 1)  # continues the older one, with no step
    assert code == 0
    assert f"skipped a checkpoint: {run / 'checkpoint-000002'}" in out
    assert f"resumed from {run / 'checkpoint-000001'}" in out


def test_changed_base_model_is_refused(resume, tmp_path, finished_run):
    run, again = resume
    flags = [str(flag) for flag in finished_run[1]]
    base = tmp_path / "base"
    shutil.copytree(flags[flags.index("--model") + 1], base)
    weights = load_file(base / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    for path in run.glob("checkpoint-*/checkpoint.json"):  # as if it had changed in its place
        state = json.loads(path.read_text())
        state["config"]["model"] = str(base)
        del state["sha256"]
        path.write_text(json.dumps({**state, "sha256": json_digest(state)}))
    before = (run / "train_config.json").read_bytes()
    refused(CHECKPOINT, again("--model", base), "--output_dir", "base model")
    assert before == (run / "train_config.json").read_bytes()


@pytest.mark.parametrize("text", ["[]", "{}", '{"files": {}}', '{"files": []}', '{"files": "ab"}'])
def test_checkpoint_of_another_shape_is_passed_over(resume, text):
    run, again = resume
    for path in run.glob("checkpoint-*/checkpoint.json"):
        path.write_text(text)
    refused(CHECKPOINT, again("--resume"), "--resume", "checkpoint-000001", "checkpoint-000002")


def test_changed_step_of_a_checkpoint_is_not_believed(resume):
    run, again = resume
    for path in run.glob("checkpoint-*/checkpoint.json"):
        edit_json(path, step=7)
    refused(CHECKPOINT, again("--resume"), "--resume", "checkpoint-000001", "checkpoint-000002")


def test_no_whole_checkpoint_names_them_all(resume):
    run, again = resume
    for path in run.glob("checkpoint-*/adapter_model.safetensors"):
        flip_byte(path)
    names = [run / "checkpoint-000001", run / "checkpoint-000002", "adapter_model.safetensors"]
    refused(CHECKPOINT, again("--resume"), "--resume", *names)


# ------------------------------------------------------------------------------------------------
# The real command line
# ------------------------------------------------------------------------------------------------


def refused_by_ranks(out, err, *words):
    """The same for what several ranks wrote, among what torchrun says itself."""
    assert err.count("error: ") == 1, err  # lines of two ranks may come as one
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    for word in words:
        assert str(word) in line
    assert f'File "{ROOT}/' not in err  # a traceback; torchrun has its own
    assert LOADING not in err + out


def test_two_ranks_say_once_that_the_groups_do_not_divide_them(run_jobs, tmp_path):
    out, err = run_jobs(2, [{"argv": ["--shard_group_size", "3"]}], cwd=tmp_path, code=2)
    refused_by_ranks(
        out, err, "--shard_group_size 3"
    )
    assert list(tmp_path.iterdir()) == []


def test_no_rank_waits_when_rank_0_alone_finds_the_error(run_jobs, model, data, tmp_path):
    wrong = {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 128, dtype=torch.bfloat16)}
    edit_tensors(model / "model.safetensors", lambda tensors: tensors.update(wrong))
    args = ["--model", model, "--dataset", data, "--output_dir", tmp_path / "out"]
    jobs = [{"argv": list(map(str, args))}]
    out, err = run_jobs(2, jobs, cwd=tmp_path, code=3, timeout=60)
    refused_by_ranks(out, err, *wrong, "[3, 128]")


def test_rank_0_reports_what_another_rank_finds(run_jobs, model, data, tmp_path):
    """As on a second node that lacks the data set: rank 1 starts in another directory."""
    args = ["--model", model, "--dataset", data.name, "--output_dir", tmp_path / "out"]
    job = {"argv": list(map(str, args)), "others": {"cwd": str(model)}}
    out, err = run_jobs(2, [job], cwd=data.parent, code=4)
    refused_by_ranks(out, err, "--dataset data.jsonl")


def assert_help(text):
    assert text.startswith("usage: ") and text.count("usage: ") == 1
    for name in Config.__dataclass_fields__:
        assert f"--{name}" in text


def test_help_is_printed_once_by_two_ranks(run_jobs, tmp_path):
    out, _ = run_jobs(2, [{"argv": ["--help"]}], cwd=tmp_path)
    assert_help(out)
    assert not list(tmp_path.iterdir())
