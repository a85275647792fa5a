"""What other models than Llama do differently: dropout of their own, MLPs that only look alike."""

import dataclasses

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mistral.modeling_mistral import MistralMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP
from transformers.models.seed_oss.modeling_seed_oss import SeedOssMLP

import train_fsdp_qlora as script

SIZES = dict(hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=2,
             num_key_value_heads=2, max_position_embeddings=2048)  # fmt: skip


@pytest.fixture
def train(run_main, demo_directory, read_metrics, tmp_path):
    """Function (name, model directory, *flags): the metrics of a run of two steps in fp32."""

    def run(name, model, *flags):
        data = "--dataset", demo_directory / "data.jsonl", "--max_seq_len", 64, "--max_steps", 2
        code, out, err = run_main("--model", model, *data, "--output_dir", tmp_path / name,
                                  "--compute_dtype", "float32", "--learning_rate", "1e-3",
                                  *flags)  # fmt: skip
        assert code == 0, err
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)]

    return run


def build(config, shards=1):
    return script.build_model(config, "sdpa", torch.bfloat16, shards)[0]


def test_models_own_dropout_is_the_same_when_recomputed(train, demo_directory, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory / "model")
    config = transformers.PhiConfig(vocab_size=len(tokenizer), resid_pdrop=0.2, **SIZES)
    torch.manual_seed(0)
    transformers.PhiForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    runs = [train(n, tmp_path / "model", "--recompute", n) for n in ("none", "all")]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("residual", ["--keep_residual", "--no-keep_residual"])
def test_adapters_of_the_mlp_alone_are_sliced(train, tiny_model, monkeypatch, residual):
    """The first MLP's input then needs no gradient."""
    flags = tiny_model("llama"), "--target_modules", "gate_proj", "down_proj"
    want = train("whole", *flags, "--recompute", "none")
    monkeypatch.setattr(script, "SLICE_TOKENS", 16)
    got = train("sliced", *flags, residual)
    assert got == [pytest.approx(row, rel=1e-5) for row in want]


def test_mlp_is_replaced_only_where_its_forward_does_nothing_else():
    assert all(map(script.is_swiglu_mlp, (LlamaMLP, MistralMLP, Qwen2MLP)))
    # dropout at the end; gate and up in one
    assert not any(map(script.is_swiglu_mlp, (SeedOssMLP, Phi3MLP)))


def test_plan_slices_no_mlp_that_training_does_not():
    config = dataclasses.replace(
        script.Config(), model="x", recompute="all", max_seq_len=32768, micro_batch_size=1
    )
    plans = []
    for kind in transformers.Phi3Config, transformers.LlamaConfig:
        wide = {**SIZES, "intermediate_size": 65536}  # so that no head needs more
        model = build(kind(vocab_size=320, pad_token_id=0, **wide))
        sizes = script.model_sizes(model, config, 1, 32768)
        sizes.widest = sizes.mlp_weights = 0
        plans.append(script.memory_plan(config, sizes)["live block or head"])
    unsliced, sliced = plans
    # at 3.5 times the inner width for each token, instead of 5 times for each of a slice
    assert unsliced - sliced == (3.5 * 32768 - 5 * script.SLICE_TOKENS) * 2 * 65536


def test_layers_of_one_width_are_planned_for(train, tiny_model):
    assert len(train("run", tiny_model("llama", hidden_size=64, intermediate_size=64))) == 2


def test_vocabulary_of_fewer_rows_than_ranks_is_refused():
    config = transformers.LlamaConfig(vocab_size=325, **SIZES)
    build(config, 25)
    with pytest.raises(ValueError, match="325 cannot be shared by 32 processes"):
        build(config, 32)


def test_buffers_in_a_checkpoint_are_refused():
    config = transformers.ApertusConfig(vocab_size=320, **SIZES)
    with pytest.raises(ValueError, match="hold more than parameters, the first is .*act_fn"):
        build(config)
