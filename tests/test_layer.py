"""The decoder layer of every family against transformers and PEFT, and the check at start.

A model here is the Model of the script, with the linears of two small layers in NF4, and beside it
transformers' own in fp32 with the same weights dequantised, in PEFT. Both get two documents, the
script's model in one bin.
"""

import dataclasses
import functools
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from families import TINY, write_model
from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_fsdp_qlora as script

LENGTHS = (24, 21)
CPU = torch.device("cpu")
CONFIG = script.Config(model="test", lora_rank=4, lora_alpha=8)
VOCABULARY = 320
# What a layer keeps from forward to backward, whether its backward holds dequantised weights, and
# how many tokens a slice of the MLP has
SLICED = 7
KEPT = {
    "all": ("all", False, 4096),
    "middle": ("middle", False, 4096),
    "middle, sliced, held": ("middle", True, SLICED),
    "x, sliced": ("x", False, SLICED),
    "x, held": ("x", True, 4096),
}


def make_plan(n_layers, keeps="all", hold_weights=False, compute_dtype="float32"):
    """The plan of one process that keeps the same of every layer."""
    fields = {field.name for field in dataclasses.fields(script.Plan)}
    plan = dict(
        compute_dtype=compute_dtype, n_layers=n_layers, shard_group_size=1,
        reshard_after_forward=True, bin_tokens=sum(LENGTHS),
        recomputed=0 if keeps == "all" else n_layers, keep_middle=keeps == "middle",
        hold_weights=hold_weights, offload_activations=False, offload_params=False,
    )  # fmt: skip
    assert plan.keys() <= fields
    return script.Plan(**plan)


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan():
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills torch.empty()
    yield
    torch.use_deterministic_algorithms(False)


def make_run(model):
    """What make_bin asks for of a run on a CPU."""
    kernels = script.choose_attention(CONFIG, model.arch, CPU)
    return types.SimpleNamespace(
        device=CPU, plan=model.plan, store=script.GPUStore(), kernels=kernels
    )


def make_reference(model_config):
    """transformers' model in fp32, with random norms and biases: 1 and 0 would hide mistakes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        model_config, dtype=torch.float32, attn_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p += torch.empty_like(p).normal_(0, 0.2, generator=generator)
    return model


def make_model(model_config, arch, tensors, config=CONFIG, plan=None):
    """The script's model of this process alone, from transformers' tensors; adapters are zero."""
    plan = plan or make_plan(arch.n_layers)
    _, adapted = script.choose_adapted(arch, config, "test")
    model = script.Model(arch, script.make_layout(arch, adapted, config), plan)
    names = script.tensor_names(arch, tensors)
    values = (
        tensors[name][rows.start : rows.stop].flatten()
        for name, _, rows in script.weight_requests(model, names)
    )
    homes = [script.NF4Blocks.zeros(len(layer.nf4), CPU) for layer in model.layers]
    script.fill_model(model, names, values, homes, CPU)
    model.frequencies = [
        script.rope_frequencies(rope, arch, max(LENGTHS), model_config) for rope in arch.ropes
    ]
    for layer in model.layers:
        script.set_local(layer, "adapter", torch.zeros(len(layer.adapter)))
    return model


def adapter_values(model, values):
    """Give a model's layers the adapter {PEFT's name: tensor}."""
    for name, where, _, i in adapter_names(model):
        with torch.no_grad():
            model.layers[i].adapter[where] = values[name].flatten()
    if model.layers[0].layout.dora:
        script.measure_weight_norms(model)


def adapter_names(model):
    """(PEFT's name, where it is in the layer's adapter, its shape, the layer's number) of all."""
    for i, layer in enumerate(model.layers):
        for (linear, key), (where, shape) in layer.layout.adapter_parts().items():
            yield f"base_model.model.model.layers.{i}.{linear}.{key}", where, shape, i


class Pair:
    """The script's model and PEFT's of one family, with the same weights and the same adapter."""

    def __init__(self, name, intermediate_size=96, **settings):
        self.config = dataclasses.replace(CONFIG, **settings)
        self.model_config = script.shrunk_config(TINY[name](VOCABULARY))
        self.model_config.intermediate_size = intermediate_size
        self.arch = dataclasses.replace(
            script.describe_model(self.model_config), attention_dropout=0.0, residual_dropout=0.0
        )
        reference = make_reference(self.model_config)
        self.tensors = {key: tensor.clone() for key, tensor in reference.state_dict().items()}
        model, linears = self.make(), dict(reference.named_modules())
        for i, layer in enumerate(model.layers):  # the reference computes with what NF4 has left
            for group in layer.layout.groups:
                weight = script.dequantise_group(layer, group, layer.adapter)
                for p in group.places:
                    target = linears[f"model.layers.{i}.{p.linear.name}"].weight
                    target.data.copy_(weight[p.rows, : group.in_features])
        generator = torch.Generator().manual_seed(1)
        self.values = {}
        for key, _, shape, _ in adapter_names(model):  # a fresh B of 0 hides half the gradients
            value = torch.randn(shape, generator=generator) * 0.1
            if key.endswith("lora_magnitude_vector"):
                linear = key.removeprefix("base_model.model.").rpartition(".")[0]
                value = linears[linear].weight.norm(dim=1) * (1 + value)
            self.values[key] = value.detach()
        lora_config, _ = script.choose_adapted(self.arch, self.config, "test")
        self.peft = get_peft_model(reference, lora_config).eval()
        set_peft_model_state_dict(self.peft, self.values)
        taken = get_peft_model_state_dict(self.peft)
        assert taken.keys() == self.values.keys()
        self.ids = torch.randint(3, self.arch.vocab_size, (sum(LENGTHS),), generator=generator)

    def make(self, plan=None):
        return make_model(self.model_config, self.arch, self.tensors, self.config, plan)

    def expected(self):
        """The sum of the token losses and {PEFT's name: gradient}, by transformers and PEFT."""
        loss = 0.0
        for part in self.ids.split(LENGTHS):
            logits = self.peft(part[None]).logits[0].float()
            loss += F.cross_entropy(logits[:-1], part[1:], reduction="sum")
        loss.backward()
        grads = {n: p.grad for n, p in self.peft.named_parameters() if p.requires_grad}
        return loss.item(), get_peft_model_state_dict(self.peft, grads)

    def computed(self, keeps, hold_weights, compute_dtype="float32"):
        """The same by the script's model."""
        if self.arch.parallel and keeps == "middle":
            keeps = "x"  # which is what its MLP reads
        model = self.make(make_plan(self.arch.n_layers, keeps, hold_weights, compute_dtype))
        adapter_values(model, self.values)
        rows = script.rows_of([(part, part) for part in self.ids.split(LENGTHS)])
        loss = model(script.make_bin(rows, [[0, 1]], 0, torch.tensor(0), make_run(model)))
        loss.backward()
        names = adapter_names(model)
        return loss.item(), {
            key: model.layers[i].adapter.grad[where].view(shape) for key, where, shape, i in names
        }


@functools.lru_cache(1)  # the cases of one pair follow one another
def pair_and_expected(name, **settings):
    pair = Pair(name, **settings)
    return pair, pair.expected()


def assert_equal(kept, monkeypatch, name, **settings):
    keeps, hold_weights, slice_tokens = KEPT[kept]
    pair, (loss, grads) = pair_and_expected(name, **settings)
    monkeypatch.setattr(script, "SLICE_TOKENS", slice_tokens)
    if slice_tokens == SLICED:
        monkeypatch.setattr(script, "LARGE_WEIGHT", 0)  # and each linear's weight by itself
    got_loss, got = pair.computed(keeps, hold_weights)
    assert abs(got_loss - loss) <= 1e-5 * loss
    assert got.keys() == grads.keys()
    for key, grad in grads.items():
        assert grad.norm() > 0, key
        assert (got[key] - grad).norm() <= 1e-5 * grad.norm(), key


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", TINY)
def test_every_family_equals_transformers_and_peft(name, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name)


@pytest.mark.parametrize("keeps", ["all", "middle", "x"])
@pytest.mark.parametrize("name", ["llama", "cohere", "glm4"])
def test_what_is_computed_again_is_there_once(name, keeps, monkeypatch):
    """One slice of the MLP at a time; weights are held for their second use alone, and the
    attention's not beside the MLP's."""
    pair, mlp, slices, at_once = pair_and_expected(name)[0], script.mlp, [], []

    def watched(work, *args, **settings):
        at_once.append(sum(ref() is not None for ref in slices))
        out = mlp(work, *args, **settings)
        if keeps != "all":
            slices.append(weakref.ref(out[1].gate_up))
        assert {piece.site for piece in work.held} <= {2, 3}
        assert bool(work.held) == (work.hold and keeps != "all")
        return out

    monkeypatch.setattr(script, "mlp", watched)
    monkeypatch.setattr(script, "SLICE_TOKENS", SLICED)
    pair.computed(keeps, True)
    assert len(at_once) > 4 * (keeps != "all") and set(at_once) == {0}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3", "cohere", "glm4"])
@pytest.mark.parametrize("adapter", ["rslora", "dora"])
def test_other_adapters_equal_peft(adapter, name, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name, adapter=adapter)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name, adapter", [("qwen2", "lora"), ("llama", "dora")])
@pytest.mark.parametrize(
    "targets",
    [("q_proj", "v_proj"), ("k_proj",), ("o_proj",), ("down_proj",), ("gate_proj", "down_proj")],
    ids=" ".join,
)
def test_adapters_of_some_linears_equal_peft(targets, name, adapter, kept, monkeypatch):
    assert_equal(kept, monkeypatch, name, adapter=adapter, target_modules=targets)


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("name, adapter", [("qwen3", "lora"), ("glm4", "lora"), ("llama", "dora")])
def test_bf16_reads_nothing_that_was_not_written(name, adapter, kept, monkeypatch):
    """Until a tensor is written it is NaN here, and products by 0 are no way to write it. With rows
    of whole cache lines CPUs take another path."""
    keeps, hold_weights, slice_tokens = KEPT[kept]
    pair, (loss, grads) = pair_and_expected(name, intermediate_size=171, adapter=adapter)
    monkeypatch.setattr(script, "SLICE_TOKENS", slice_tokens)
    if slice_tokens == SLICED:
        monkeypatch.setattr(script, "LARGE_WEIGHT", 0)  # and each linear's weight by itself
    got_loss, got = pair.computed(keeps, hold_weights, "bfloat16")
    assert abs(got_loss - loss) <= 1e-2 * loss
    for key in grads:
        assert got[key].norm() > 0 and got[key].isfinite().all(), key


def test_families_here_are_all_families_of_the_table():
    outer = {make(VOCABULARY).model_type for make in TINY.values()}
    inner = {script.text_config(make(VOCABULARY)).model_type for make in TINY.values()}
    assert inner == set(script.FAMILIES) and script.MULTIMODAL.keys() <= outer


def test_no_document_sees_another():
    """A changed document changes its own loss and no other's, to the bit."""
    pair = Pair("gemma2")  # a window, a cap, layers of two kinds
    model = pair.make()
    adapter_values(model, pair.values)

    def losses(ids):
        parts = ids.split((9, 20, 4, 12))
        for learnt in range(len(parts)):
            rows = [
                (part, part if i == learnt else torch.full_like(part, -100))
                for i, part in enumerate(parts)
            ]
            batch = script.rows_of(rows)
            bin = script.make_bin(batch, [[2, 0, 3, 1]], 0, torch.tensor(0), make_run(model))
            yield model(bin).item()

    before, changed = list(losses(pair.ids)), pair.ids.clone()
    changed[29:33] = changed[29:33].flip(0)  # the third
    after = list(losses(changed))
    assert min(before) > 0
    assert [i for i in range(4) if before[i] != after[i]] == [2]


# ------------------------------------------------------------------------------------------------
# The check at start
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_check_at_start_passes(name):
    model_config = TINY[name](VOCABULARY)
    state = torch.random.get_rng_state()
    script.check_family(model_config, CONFIG)
    assert torch.equal(torch.random.get_rng_state(), state)


# {what is wrong: (a family, fields of its record or of the Architecture)}
PLANTED = {
    "norm offset": ("gemma", {"norm": "rms"}),
    "halves instead of pairs": ("glm4", {"rotary_interleaved": False}),
    "pairs instead of halves": ("llama", {"rotary_interleaved": True}),
    "multiplier of residuals": ("granite", {"residual_multiplier": 1.0}),
    "multiplier of embeddings": ("gemma", {"sqrt_embedding": False}),
    "multiplier of attention": ("granite", {"attention_scale": None}),
    "multiplier of logits": ("cohere", {"logits_multiplier": 1.0}),
    "query and key norm": ("qwen3", {"qk_norm": None}),
    "norm after rotary": ("hunyuan", {"qk_norm_after_rotary": False}),
    "window": ("mistral", {"window": None}),
    "window of some layers": ("gemma2", {"layer_window": (None, None)}),
    "cap on scores": ("gemma2", {"attention_softcap": None}),
}


def plant(monkeypatch, model_type, fields):
    """Make the table, or the Architecture made from it, wrong. The fields that both have are the
    record's."""
    record = script.FAMILIES[model_type]
    if hasattr(record, next(iter(fields))):
        wrong = dataclasses.replace(record, **fields)
        monkeypatch.setitem(script.FAMILIES, model_type, wrong)
        return
    describe = script.describe_model
    monkeypatch.setattr(
        script, "describe_model", lambda c: dataclasses.replace(describe(c), **fields)
    )


@pytest.mark.parametrize("error", PLANTED)
def test_check_at_start_catches(error, monkeypatch):
    name, fields = PLANTED[error]
    model_config = TINY[name](VOCABULARY)
    family = model_config.model_type
    monkeypatch.setattr(script, "check_model", lambda config: None)  # fields that now no one names
    plant(monkeypatch, family, fields)
    with pytest.raises(ValueError, match=f"the check at start failed: {family} "):
        script.check_family(model_config, CONFIG)


def test_failed_check_ends_a_run_with_one_line(run_main, monkeypatch, demo_directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    write_model(tmp_path / "model", TINY["qwen3"](len(tokenizer)))
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--dataset", demo_directory / "data.jsonl"]
    flags += ["--max_seq_len", "64", "--max_steps", "1", "--batch_size", "2", "--output_dir"]
    code, _, err = run_main(*flags, tmp_path / "right")
    assert code == 0, err
    plant(monkeypatch, "qwen3", {"qk_norm_after_rotary": True})
    code, _, err = run_main(*flags, tmp_path / "wrong")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 3 and "the check at start failed: qwen3 " in line and "Traceback" not in err
    assert str(tmp_path / "model") in line
    assert not list((tmp_path / "wrong").glob("adapter*"))
