"""The memory plan against what was measured, and what follows from it."""

import dataclasses
import functools
import math

import pytest
import torch
from test_numbers import DEVICE, make_attention
from torch import nn

import train_fsdp_qlora as script

# peak allocated, GiB, on H200s (benchmarks/RESULTS.md), random weights, rank 16 on all layers:
# name, layers, GPUs, peak, flags. Two constants of the plan were fitted to the first eight.
CAPPED = {"offload_activations": True}
ONE_ROW = {"micro_batch_size": 1, **CAPPED}
HALVES = {"keep_residual": True}
MEASURED = [
    ("llama-3-8b", 32, 2, 4.86, {}),
    ("llama-3-8b", 32, 2, 20.47, {"recompute": "none"}),
    ("llama-3-8b", 32, 2, 10.15, {"max_seq_len": 65536, **ONE_ROW}),
    ("llama-2-70b", 8, 2, 5.18, {}),
    ("llama-2-70b", 8, 2, 4.78, CAPPED),
    ("llama-2-70b", 8, 2, 3.47, {"offload_params": True}),
    ("llama-2-70b", 8, 2, 5.84, {"max_seq_len": 8192, **ONE_ROW}),
    ("llama-2-70b", 8, 2, 8.25, {"max_seq_len": 32768, "offload_params": True, **ONE_ROW}),
    ("llama-2-70b", 80, 2, 20.32, CAPPED),
    ("llama-2-70b", 80, 2, 24.81, {}),
    ("llama-2-70b", 80, 2, 102.87, {"recompute": "none"}),
    ("llama-2-70b", 80, 2, 21.38, {"max_seq_len": 8192, **ONE_ROW}),
    ("llama-2-70b", 80, 2, 8.97, {"max_seq_len": 32768, "offload_params": True, **ONE_ROW}),
    ("llama-3-8b", 32, 1, 7.07, {"max_seq_len": 8192, **ONE_ROW}),
    ("llama-2-70b", 80, 4, 16.12, {}),
    ("llama-3-8b", 32, 4, 3.44, {}),
    ("llama-2-70b", 80, 2, 20.25, {**CAPPED, **HALVES}),
    ("llama-3-70b", 80, 2, 21.72, {**CAPPED, **HALVES}),
    ("llama-2-70b", 8, 2, 6.45, {"reuse_weights": "recomputed", **HALVES}),
    ("llama-3-8b", 16, 2, 4.06, {"reuse_weights": "recomputed", **HALVES}),
    ("llama-3-8b", 32, 1, 36.18, {"recompute": "none", "reuse_weights": "all"}),
    ("llama-3-8b", 32, 1, 82.34, {"recompute": "none", "reuse_weights": "all", "use_dora": True}),
    ("llama-3-8b", 32, 1, 11.16, {"reuse_weights": "recomputed", "use_dora": True, **HALVES}),
]


@functools.lru_cache(None)
def meta_model(name, layers, shards, config, tied):
    model_config = script.read_model_config(script.Path(name), config)
    model_config.num_hidden_layers, model_config.tie_word_embeddings = layers, tied
    model, _ = script.build_model(model_config, "sdpa", torch.bfloat16, shards)
    script.add_lora(model, config, name)
    return model


def sizes_of(name, layers, config, shards=2):
    model = meta_model(name, layers, shards, make_config(name, use_dora=config.use_dora), False)
    return script.model_sizes(model, config, shards, config.max_seq_len)


def make_config(name, **flags):
    return dataclasses.replace(script.Config(), model=name, random_weights=True, **flags)


@pytest.mark.parametrize("name, layers, gpus, measured, flags", MEASURED)
def test_predicted_peak_is_what_was_measured(name, layers, gpus, measured, flags):
    config = make_config(name, **flags)
    plan = script.memory_plan(config, sizes_of(name, layers, config, gpus))
    predicted = sum(plan.values()) / 2**30
    print(f"predicted {predicted:.2f}, measured {measured:.2f}: {predicted / measured - 1:+.1%}")
    assert abs(predicted - measured) <= 0.07 * measured


def test_plan_of_dora_has_what_pefts_forward_keeps():
    """By what autograd saves of one layer, and not a byte more for plain LoRA."""
    plain, config = (make_config("llama-3-8b", use_dora=dora) for dora in (False, True))
    sizes = sizes_of("llama-3-8b", 4, plain)
    assert sizes.peft_token == sizes.peft_weights == sizes.peft_at_once == 0
    model_config = script.read_model_config(script.Path("llama-3-8b"), config)
    model_config.num_hidden_layers = 4
    model, _ = script.build_model(model_config, "sdpa", torch.bfloat16, 2)
    script.add_lora(model, config, "llama-3-8b")
    with_dora = script.model_sizes(model, config, 2, 2048)
    plans = [script.planned(plain, sizes), script.planned(config, with_dora)]
    print("plain and DoRA, GiB:", *(round(size / 2**30, 2) for size in plans))
    assert plans[1] > plans[0] + with_dora.peft_at_once > plans[0] + 14336**2 * 4

    layer = make_attention(targets=("q_proj",), use_dora=True).q_proj
    layer.base_layer.dtype = layer.base_layer.quant_state.dtype = torch.bfloat16

    def saved(n_tokens):
        sizes = {}

        def keep(t):
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(n_tokens, 64, dtype=torch.bfloat16, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            assert layer(x.to(DEVICE)).requires_grad
        return sum(sizes.values())

    per_token = (saved(200) - saved(100)) / 100
    planned = script.peft_sizes(layer, make_config("x", lora_rank=4), unkept=0)["peft_token"]
    print(f"{per_token} bytes a token are saved, {planned} planned")
    assert per_token == planned


def test_auto_keeps_as_many_blocks_as_fit():
    config = make_config("llama-3-8b", recompute="auto")
    sizes, chosen = sizes_of("llama-3-8b", 32, config), []
    for limit_gib in (6, 12, 22.5, 40):
        limit = limit_gib * 2**30
        resolved = script.choose_recompute(config, sizes, limit)
        n = int(resolved.recompute)
        assert sum(script.memory_plan(resolved, sizes).values()) <= (1 - script.GAPS) * limit
        if n:
            more = dataclasses.replace(resolved, recompute=str(n - 1))
            assert sum(script.memory_plan(more, sizes).values()) > (1 - script.GAPS) * limit
        chosen.append(n)
    assert chosen == sorted(chosen, reverse=True) and chosen[0] > chosen[1] > chosen[3] == 0
    none = script.choose_recompute(config, sizes, None)
    assert none.recompute == "0"
    assert script.host_bytes(dataclasses.replace(none, offload_activations=True), sizes) == 0
    assert script.choose_recompute(config, sizes, 2**30).recompute == "32"  # nothing fits


def test_recomputed_blocks_keep_more_where_memory_allows(monkeypatch):
    config = make_config("llama-2-70b", offload_activations=True)
    sizes = sizes_of("llama-2-70b", 80, config)

    def kept(config, limit_gib, host_gib=64):
        monkeypatch.setattr(script, "host_share", lambda: host_gib * 2**30)
        resolved = script.choose_recompute(config, sizes, limit_gib * 2**30)
        return resolved.keep_residual, resolved.reuse_weights

    assert kept(config, 22.5) == (True, "none")  # two inputs on the host, less to recompute at once
    assert kept(config, 24) == (True, "recomputed")
    assert kept(config, 22.5, host_gib=16) == (False, "none")
    sizes.longest = 32768  # 85 GiB would be pinned
    assert not kept(dataclasses.replace(config, max_seq_len=32768), 140, host_gib=400)[0]
    sizes.longest = 2048
    on_gpu = dataclasses.replace(config, offload_activations=False)
    # 17 GiB of weights a process are on the host anyway
    assert kept(dataclasses.replace(on_gpu, offload_params=True), 140, 20) == (True, "recomputed")
    assert kept(on_gpu, 27) == (False, "none")
    assert kept(on_gpu, 34) == (True, "none")
    assert kept(dataclasses.replace(config, keep_residual=False), 24) == (False, "recomputed")
    assert kept(dataclasses.replace(on_gpu, recompute="none"), 140) == (False, "none")
    some = dataclasses.replace(on_gpu, recompute="40", keep_residual=False)
    assert kept(some, 80) == (False, "recomputed")
    assert kept(some, 160) == (False, "all")
    sizes.has_halves = False
    assert kept(config, 24) == (False, "recomputed")
    with pytest.raises(ValueError, match="--keep_residual: this model's blocks"):
        kept(dataclasses.replace(config, keep_residual=True), 24)


def test_embedding_moves_to_the_host_where_that_makes_it_fit():
    config = make_config("llama-3-70b", offload_activations=True, fused=True)
    for tied in (False, True):
        model = meta_model("llama-3-70b", 80, 2, make_config("llama-3-70b"), tied)
        for limit_gib, moves in (22.5, not tied), (24, False), (15, False):
            sizes = script.model_sizes(model, config, 2, config.max_seq_len)
            before = sum(script.memory_plan(config, sizes).values())
            script.make_room(model, config, sizes, limit_gib * 2**30)
            saved = before - sum(script.memory_plan(config, sizes).values())
            assert model.get_input_embeddings().on_host == moves, (tied, limit_gib)
            assert saved == (128256 * 8192 if moves else 0)
            assert script.host_bytes(config, sizes) == 79 * 4096 * 8192 * 2 + saved
            model.get_input_embeddings().on_host = False


def test_refusal_names_flags_that_bring_it_under():
    config = make_config("llama-2-70b")
    sizes = sizes_of("llama-2-70b", 80, config)
    script.check_plan(config, sizes, 27 * 2**30)
    with pytest.raises(ValueError, match="predicted peak 2.* of 22.5 GiB; --offload_activations w"):
        script.check_plan(config, sizes, 22.5 * 2**30)
    kept = dataclasses.replace(config, reshard_after_forward=False)
    with pytest.raises(ValueError, match="; --reshard_after_forward --offload_activations w"):
        script.check_plan(kept, sizes, 22.5 * 2**30)
    with pytest.raises(ValueError, match="--offload_activations --offload_params w"):
        script.check_plan(config, sizes, 5 * 2**30)
    with pytest.raises(ValueError, match="and more GPUs would bring it to"):
        script.check_plan(config, sizes, 2**30)
    with pytest.raises(ValueError, match="of host memory on this machine"):
        huge = dataclasses.replace(
            config, offload_activations=True, micro_batch_size=512, max_seq_len=2**20
        )
        sizes.longest = 2**20
        script.check_plan(huge, sizes, None)


def test_sliced_mlp_draws_the_same_dropout_again(monkeypatch):
    """Slices with dropout against a loop that autograd records."""
    monkeypatch.setattr(script, "SLICE_TOKENS", 5)
    torch.manual_seed(0)

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down_proj(torch.tanh(self.up_proj(nn.functional.dropout(x, 0.5))))

    mlp, x = MLP(), torch.randn(2, 9, 8, requires_grad=True)
    parameters = [x, *mlp.parameters()]
    torch.manual_seed(1)
    want = torch.cat([mlp(x.flatten(0, 1)[i : i + 5]) for i in range(0, 18, 5)]).view_as(x)
    want_grads = torch.autograd.grad(want.square().sum(), parameters)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    got = script.sliced_mlp(mlp, mlp.forward, x)
    torch.manual_seed(2)  # whatever was drawn in between
    grads = torch.autograd.grad(got.square().sum(), parameters)
    assert torch.equal(got, want)
    for grad, want_grad in zip(grads, want_grads):
        torch.testing.assert_close(grad, want_grad, rtol=1e-6, atol=1e-6)
    torch.manual_seed(1)
    script.sliced_mlp(mlp, mlp.forward, x)
    assert torch.equal(torch.get_rng_state(), state)  # forward draws as many numbers


def test_pinned_memory_holds_what_was_put_there():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    values = [torch.randn(n, 3, device=device, dtype=torch.bfloat16) for n in (1, 2, 700)]
    for value in values:
        copy = script.pinned_copy(value)
        assert copy.device.type == "cpu" and torch.equal(copy, value.cpu())
        assert copy.is_pinned() == (device.type == "cuda")


def test_shapes_have_the_parameters_of_their_names():
    published = {"llama-2-7b": 6738415616, "llama-2-70b": 68976648192, "llama-3-8b": 8030261248,
                 "llama-3-70b": 70553706496, "qwen2.5-32b": 32763876352}  # fmt: skip
    assert published.keys() == script.SHAPES.keys()
    for name, want in published.items():
        config = make_config(name)
        _, shapes = script.build_model(
            script.read_model_config(script.Path(name), config), "sdpa", torch.bfloat16, 1
        )
        assert sum(map(math.prod, shapes.values())) == want
