"""Layers with experts: every way of the router, ranges of experts, layouts of files.

That each family equals transformers is in test_layer.py, on two processes in test_step.py.
"""

import functools
import math

import bitsandbytes as bnb
import pytest
import torch
from families import TINY, make_model
from safetensors.torch import load_file, save_file

from fsdp_qlora import check, experts, router
from fsdp_qlora.check import plain_model, random_adapter, random_reference, read_weights
from fsdp_qlora.configs import describe_model, shrunk_config
from fsdp_qlora.plan import Plan
from fsdp_qlora.names import check_files, rows_in_memory, tensor_names
from fsdp_qlora.weights import Request, WeightReader, weight_files
from train_fsdp_qlora import fill_model

BAR = 1e-5  # of a relative difference in fp32


def seed(n=0):
    return torch.Generator().manual_seed(n)


def worst(name, again, monkeypatch, edit=None, ranges=1, torch_grouped=False, tokens=None):
    """The largest relative difference of logits, loss and gradients to transformers'. `edit`
    changes the reference's tensors before both get them; `tokens`: of the two documents."""
    monkeypatch.setattr(check, "LENGTHS", tokens or check.LENGTHS)
    monkeypatch.setattr(check, "Plan", functools.partial(changed_plan, ranges))
    if torch_grouped:
        monkeypatch.setattr(experts, "why_no_grouped_mm", lambda tensor: "")
    small = shrunk_config(TINY[name](320))
    arch, reference = describe_model(small), random_reference(small, seed())
    tensors = reference.state_dict()
    if edit:
        edit(tensors)
    model = plain_model(small, arch, tensors, 24, fill_model, "lora", again)
    weights = read_weights(model, tensor_names(arch, tensors))
    random_adapter(model, seed(1))
    ids = torch.randint(3, arch.vocab_size, (sum(check.LENGTHS),), generator=seed(2))
    ours = check.results(model, ids)
    theirs = check.reference_results(reference, model, weights, ids)
    return max(float((ours[key] - theirs[key]).norm() / theirs[key].norm()) for key in ours)


def changed_plan(ranges, **settings):
    return Plan(**settings | {"expert_ranges": ranges})


@pytest.mark.parametrize("torch_grouped", [False, True])
@pytest.mark.parametrize("ranges", [1, 3, 8])
@pytest.mark.parametrize("again", [False, True])
def test_ranges_of_experts_give_the_same(again, ranges, torch_grouped, monkeypatch):
    """Whether the products loop or are torch's, which on a CPU works, too."""
    difference = worst("glm4_moe", again, monkeypatch, ranges=ranges, torch_grouped=torch_grouped)
    assert difference < BAR


def routers(tensors):
    return [tensor for name, tensor in tensors.items() if name.endswith("mlp.gate.weight")]


def same_scores(tensors):
    """All experts are equally good, for all tokens."""
    for weight in routers(tensors):
        weight.copy_(weight[:1].expand_as(weight))


def one_for_all(tensors):
    """Every token goes to the first top_k experts, the others get none."""
    for weight in routers(tensors):
        weight[3:] = 0
    for name, norm in tensors.items():
        if name.endswith("post_attention_layernorm.weight"):
            norm.zero_()  # so that logits are 0 but for the bias
            norm[0] = 1
    # logits are then x[0] * weight[:, 0]: of both signs, so the first and the last experts
    for weight in routers(tensors):
        weight[:, 1:] = 0


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name, edit", [
    ("qwen3_moe", same_scores), ("qwen3_moe", one_for_all), ("mixtral", same_scores),
    ("qwen2_moe", one_for_all)])  # fmt: skip
def test_extreme_routers_equal_transformers(name, edit, again, monkeypatch):
    for ranges in 1, 4:
        assert worst(name, again, monkeypatch, edit=edit, ranges=ranges) < BAR


def wide(tensors):
    """Many of gpt-oss's gates and ups are beyond its clamp."""
    for name, tensor in tensors.items():
        if name.endswith("gate_up_proj"):
            tensor *= 4


@pytest.mark.parametrize("ranges", [1, 3])
@pytest.mark.parametrize("again", [False, True])
def test_clamped_gate_and_biases_equal_transformers(again, ranges, monkeypatch):
    assert worst("gpt_oss", again, monkeypatch, edit=wide, ranges=ranges) < BAR


def test_two_tokens_are_enough(monkeypatch):
    """Most experts have no row; each document has one token to predict."""
    assert worst("qwen3_moe", True, monkeypatch, tokens=(2, 2), ranges=4) < BAR


@pytest.mark.parametrize("ranges", [1, 4])
def test_backward_repeats_forwards_choice(ranges, monkeypatch):
    """A second look at the router would choose other experts here."""
    true, calls = router.best_experts, []

    def fickle(scores, mixture):
        calls.append(scores)
        return true(scores if len(calls) <= 4 else -scores, mixture)

    monkeypatch.setattr(router, "best_experts", fickle)
    # results() looks twice at each of two layers: for the logits, then for loss and gradient
    assert worst("mixtral", True, monkeypatch, ranges=ranges) < BAR
    assert len(calls) == 4


# ---- files ----


def layouts_of_files(name, directory):
    """{layout: directory} of one model: as transformers saves it, which is as it is released, and
    as it is in memory. Returns its text config as well."""
    config = TINY[name](320)
    config.tie_word_embeddings = False
    model = make_model(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "released")
    (directory / "memory").mkdir()
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(tensors, directory / "memory" / "model.safetensors")
    return model.config, {key: directory / key for key in ("released", "memory")}


MIXTURES = [name for name, make in TINY.items() if describe_model(make(320)).mixture]


@pytest.mark.parametrize("name", MIXTURES)
def test_layouts_of_files_give_the_same_values(name, tmp_path):
    """Every tensor that is read has the same rows, whichever layout holds it."""
    config, directories = layouts_of_files(name, tmp_path)
    arch, found = describe_model(config), {}
    for layout, directory in directories.items():
        files = weight_files(directory)
        names = tensor_names(arch, files)
        check_files(files, names, config, "bfloat16")
        requests = [Request(n, (x.out_features, x.in_features), range(1, x.out_features),
                            names.sources.get(n)) for n, x in names.linears.items()]  # fmt: skip
        reader = WeightReader(files, requests, torch.device("cpu"))
        found[layout] = {names.linears[r.name].name + str(i): reader.read(r.name)
                         for i, r in enumerate(requests)}  # fmt: skip
        reader.close()
    released, memory = found["released"], found["memory"]
    assert released.keys() == memory.keys()
    assert all(torch.equal(value, memory[key]) for key, value in released.items())
    tensors = load_file(directory / "model.safetensors")
    for i, (name, linear) in enumerate(names.linears.items()):
        whole = rows_in_memory(tensors, names, name)
        assert torch.equal(memory[linear.name + str(i)], whole[linear.in_features :]), name


def test_a_rank_reads_nothing_of_an_expert_that_it_has_no_part_of(tmp_path):
    """And of one whose matrix lies transposed, all, however few its rows."""
    config, directories = layouts_of_files("gpt_oss", tmp_path)
    files = weight_files(directories["released"])
    names = tensor_names(describe_model(config), files)
    name, linear = next(x for x in names.linears.items() if ".experts.1.gate_up" in x[0])
    shape, sizes = (linear.out_features, linear.in_features), []
    for rows in range(5, 5), range(5, 8):
        request = Request(name, shape, rows, names.sources[name])
        reader = WeightReader(files, [request], torch.device("cpu"))
        sizes.append(reader._extent(request)[2])
        assert reader.read(name).numel() == len(rows) * linear.in_features
        reader.close()
    assert sizes == [0, 2 * math.prod(shape)]


def test_an_experts_bytes_are_bitsandbytes_own():
    """Of its 2-D matrices, though files may have all experts' in one tensor."""
    small = shrunk_config(TINY["qwen3_moe"](320))
    arch, reference = describe_model(small), random_reference(small, seed())
    tensors = dict(reference.state_dict())
    model = plain_model(small, arch, tensors, 24, fill_model)
    names, layer = tensor_names(arch, tensors), model.layers[0]
    for place in layer.layout.places:
        name = names.of_layer(0, f"{place.linear.name}.weight")
        weight = rows_in_memory(tensors, names, name).view(-1, place.linear.in_features)
        codes, state = bnb.functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4")
        assert torch.equal(layer.nf4.packed[place.blocks].view(-1, 1), codes), name
        assert torch.equal(layer.nf4.scales[place.blocks, 0], state.absmax), name
        assert torch.equal(layer.nested.offsets[place.index], state.offset), name
        assert torch.equal(layer.nested.absmax[place.nested], state.state2.absmax), name


@pytest.mark.parametrize("change, words", [
    ({"num_experts": 0}, "0 experts"), ({"num_experts_per_tok": 9}, "9 for a token"),
    ({"router_jitter_noise": 0.1}, "router_jitter_noise")])  # fmt: skip
def test_mixture_that_cannot_be_computed_is_refused(change, words):
    name = "mixtral" if "router_jitter_noise" in change else "qwen3_moe"
    config = TINY[name](320)
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=words):
        describe_model(config)


def test_missing_expert_is_named(tmp_path):
    config, directories = layouts_of_files("mixtral", tmp_path)
    files = weight_files(directories["released"])
    lost = next(name for name in files if ".experts.2.w3." in name)
    del files[lost]
    with pytest.raises(ValueError, match="lacks 1 of .* tensors.*" + lost.replace(".", r"\.")):
        check_files(files, tensor_names(describe_model(config), files), config, "bfloat16")
