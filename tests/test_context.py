"""Context parallelism: how documents are cut, which keys go where, and what runs give with it.

Whole steps against plain PyTorch are in test_step.py ("shared micro-batches").
"""

import json
import random
import types

import pytest
import torch
from conftest import DEVICE, needs_ranks, segments_of, selected_params
from families import TINY, write_model
from safetensors.torch import load_file, save_file
from test_numbers import of_setting

from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.kernels.attention import eager_attention
from fsdp_qlora.kernels.cudnn_attention import cudnn_attention
from fsdp_qlora.kernels.flex import flex_document_attention
from fsdp_qlora.micro_batch.context_parallel import (
    ContextGroup, KVExchange, cut_documents, make_context_shard)
from fsdp_qlora.micro_batch.micro_batch import MicroBatchFormat
from fsdp_qlora.micro_batch.segments import Segments
from fsdp_qlora.pretrained.from_config import make_architecture


def random_lengths(draw, n):
    """Of documents whose sum is a multiple of n."""
    lengths = [draw.randrange(1, draw.choice([3, 10, 100])) for _ in range(draw.randrange(1, 9))]
    return [*lengths, *[-sum(lengths) % n] * (sum(lengths) % n > 0)]


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_all_ranks_have_as_many_tokens_and_each_token_has_one(n):
    draw = random.Random(n)
    for _ in range(200):
        lengths = random_lengths(draw, n)
        pieces = cut_documents(lengths, n)
        tokens = [[t for piece in own for t in range(piece.start, piece.stop)] for own in pieces]
        assert sorted(sum(tokens, [])) == list(range(sum(lengths)))
        assert {len(own) for own in tokens} == {sum(lengths) // n}
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        for piece in sum(pieces, []):
            end = piece.document_start + lengths[starts.index(piece.document_start)]
            assert piece.document_start <= piece.start < piece.stop <= end


@pytest.mark.parametrize("lengths", [[60_000], [60_000, *[100] * 40], [4_001, 7_003, 12_996]])
@pytest.mark.parametrize("n", [2, 4, 8])
def test_all_ranks_have_as_much_attention(lengths, n):
    work = [sum((p.stop - p.start) * (p.start + p.stop - 2 * p.document_start) / 2 for p in own)
            for own in cut_documents(lengths, n)]  # fmt: skip
    assert max(work) < 1.001 * min(work)


@pytest.mark.parametrize("window", [None, 1, 2, 7])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_ranks_attend_together_as_one_does(n, window):
    """What each rank would receive is put together here; gradients come back the same way."""
    torch.manual_seed(0)
    lengths = (301, 2, 40, 1, 129, 6 + -(301 + 2 + 40 + 1 + 129 + 6) % n)
    arch = types.SimpleNamespace(
        n_heads=4, attention_scale=0.3, attention_softcap=None, attention_dropout=0.0)
    q, k, v = (torch.randn(sum(lengths), heads, 8, requires_grad=True) for heads in (4, 2, 2))
    want = eager_attention(q, k, v, None, segments_of(lengths), arch, window, 0)
    weights, grads = torch.randn_like(want), []
    want_grads = torch.autograd.grad((want * weights).sum(), (q, k, v))
    shards = [make_context_shard(lengths, ContextGroup(n, rank, 0, 1)) for rank in range(n)]
    exchanges = [KVExchange.make(shard, window) for shard in shards]
    for rank, (shard, exchange) in enumerate(zip(shards, exchanges)):
        sent = [other.tokens[theirs.sent[rank]] for other, theirs in zip(shards, exchanges)]
        assert [len(part) for part in sent] == exchange.n_received
        received = torch.cat(sent)
        assert len(received.unique()) == len(received)
        if window:  # only what is seen is sent
            assert len(received) < len(shard.tokens) + window * 2 * len(lengths)
        at = received[exchange.key_at]
        for kernel in eager_attention, flex_document_attention:
            inputs = q[shard.tokens], k[at], v[at], None, exchange.segments, arch, window, 0
            with torch.set_grad_enabled(kernel is eager_attention):  # flex has no backward here
                got = kernel(*inputs)
            assert (got - want[shard.tokens]).norm() < 1e-5 * want.norm()
            if got.requires_grad:
                loss = (got * weights[shard.tokens]).sum()
                grads.append(torch.autograd.grad(loss, (q, k, v)))
    for got, want in zip(map(sum, zip(*grads)), want_grads):
        assert (got - want).norm() < 1e-5 * max(want.norm(), 1)  # of one key alone it is 0


@pytest.mark.parametrize("lengths_q, lengths_k", [
    ([64], [64]),  # no keys before
    ([50, 50], [50, 200]),  # the pieces of one document
    ([33, 34, 33, 34], [33, 134, 33, 134]),  # of two
    ([1, 300], [40, 1000])])  # fmt: skip
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (4, 1)])
def test_pieces_equal_plain_torch(heads, kv_heads, lengths_q, lengths_k):
    torch.manual_seed(0)
    arch = types.SimpleNamespace(
        n_heads=heads, attention_scale=0.3, attention_softcap=None, attention_dropout=0.0)
    bounds = [torch.tensor([0, *n]).cumsum(0).int() for n in (lengths_q, lengths_k)]
    segments = Segments(*bounds, tuple(lengths_q), tuple(lengths_k), max(lengths_q), max(lengths_k))
    both = torch.randn(sum(lengths_k), 2 * kv_heads, 16)  # with the strides of what was exchanged
    inputs = torch.randn(sum(lengths_q), heads, 16), *both.chunk(2, 1)
    grad = torch.randn(heads, sum(lengths_q), 16).transpose(0, 1)
    results = []
    for kernel in cudnn_attention, eager_attention:
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = kernel(*leaves, None, segments, arch, None, 0)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, grad)])
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() < 1e-6 * want.norm()


def runs_one_by_one(lengths, micro_step, context):
    """Whether the first micro-batch of a micro-step takes the kernels that run one piece after the
    other, of rows of these lengths."""
    rows = make_rows([([1] * n, [1] * n) for n in lengths])
    micro_batch_format = MicroBatchFormat(sum(lengths), torch.device("cpu"), context)
    return not make_micro_batch(rows, micro_step, micro_batch_format).is_varlen


@pytest.mark.parametrize("shared_by, lengths, is_one_by_one", [
    (2, [8192], True), (2, [8193], False), (2, [8190], False), (4, [16_384, 16_384], True),
    (4, [8192], False), (2, [8192, 9000], True), (2, [8192, 30], False),
    (1, [30, 30], True), (1, [30, 31], False)])  # fmt: skip
def test_long_pieces_run_one_by_one(shared_by, lengths, is_one_by_one):
    context = ContextGroup(shared_by, 0, 0, 1)
    assert runs_one_by_one(lengths, [[*range(len(lengths))]], context) == is_one_by_one


@pytest.mark.parametrize("other, is_one_by_one", [(8192, True), (8196, False), (8448, True)])
def test_padding_of_very_short_pieces_runs_in_one_call(other, is_one_by_one):
    """The micro-batch is padded to as many tokens as another group's."""
    context = ContextGroup(2, 0, 0, 2)
    assert runs_one_by_one([8192, other], [[0], [1]], context) == is_one_by_one


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------

LENGTHS = 301, 13, 1, 129, 2, 64  # characters, and so about as many tokens
FLAGS = ["--compute_dtype", "float32", "--max_steps", "2", "--batch_size", "6", "--max_seq_len",
         "512", "--lora_rank", "4", "--learning_rate", "1e-2", "--save_every", "0"]  # fmt: skip
FAMILIES = {  # what attention, or what a token's place decides, differs in
    "mistral": [], "qwen3": [], "gemma2": [], "gemma3_text": [], "gemma4_e": [], "gpt_oss": [],
    "phi3_longrope": [], "qwen3_moe": [], "deepseek_v3": ["--recompute", "all"],
    "attention_dropout": [], "windowed_dropout": []}  # fmt: skip
LOSSES = "dpo", "orpo", "kto"
# of rows of one length, one by one; the last ones save the results of attention
PIECES = {"pieces": "qwen3", "latent_pieces": "deepseek_v3", "saved_pieces": "qwen3",
          "saved_latent_pieces": "deepseek_v3"}  # fmt: skip
SAVES_ATTENTION = {"n_attention_saved": 1}  # in the last layer, after those that save x
# windows and caps, sinks and experts, pieces; the others by `make test-slow`
QUICK = "gemma2", "gpt_oss", "saved_pieces"
CASES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK))
         for name in (*FAMILIES, *LOSSES, *PIECES)]  # fmt: skip


def tiny_config(kind, vocab_size):
    """Those of TINY, and two with dropout on attention's weights."""
    source = {"attention_dropout": "granite", "windowed_dropout": "mistral"}.get(kind, kind)
    config = TINY[source](vocab_size)
    config.max_position_embeddings = max(config.max_position_embeddings, 512)
    if source != kind:
        config.attention_dropout = 0.2
    return config


def write_data(directory):
    draw = random.Random(0)

    def text(n):
        return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz ,.", k=n))

    for loss in ("sft", *LOSSES):
        rows = []
        for i, n in enumerate(LENGTHS):
            row = {"prompt": text(n // 3 + 1), "completion": text(n // 2 + 2)}
            if loss in ("dpo", "orpo"):
                row = {"prompt": row["prompt"], "chosen": row["completion"], "rejected": text(n)}
            rows.append(row | ({"label": i % 2 == 0} if loss == "kto" else {}))
        (directory / f"{loss}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # as many tokens as two ranks can share without padding
    row = json.dumps({"prompt": text(21), "completion": text(104)}) + "\n"
    (directory / "one_length.jsonl").write_text(6 * row)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    """The directory of the models and of rows."""
    base, tokenizer = tmp_path_factory.mktemp("context"), tiny_model("llama")
    for kind in FAMILIES:
        vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
        (base / kind).mkdir()
        write_model(base / kind, tiny_config(kind, vocab_size), seed=1, dtype=torch.float32)
        for path in tokenizer.glob("*token*"):
            (base / kind / path.name).write_bytes(path.read_bytes())
    write_data(base)
    return base


@pytest.fixture(scope="module")
def runs(base, run_jobs, request):
    """runs(n, name): the directory of a run on n ranks, which share micro-batches if n is 2. Those
    of the selected tests are made together."""
    done, selected = set(), {params.get("name") for params in selected_params(request)}
    cases = {kind: [kind, "--dataset", "sft.jsonl", *flags] for kind, flags in FAMILIES.items()}
    cases |= {loss: ["qwen3", "--dataset", f"{loss}.jsonl", "--loss", loss, "--eval_dataset",
                     f"{loss}.jsonl", "--eval_every", "1"] for loss in LOSSES}  # fmt: skip

    cases |= {name: [kind, "--dataset", "one_length.jsonl"] for name, kind in PIECES.items()}
    for name in "saved_pieces", "saved_latent_pieces":
        cases[name] += ["--recompute", "all", "--offload_activations"]

    def work(n, name):
        if n not in done:
            done.add(n)
            needs_ranks(n)
            shared = ["--micro_batch_tokens", "700"]
            if n == 2:
                shared = ["--micro_batch_tokens", "350", "--context_parallel_size", "2"]
            run_jobs(n, [
                {"argv": ["--model", *argv, *FLAGS, *shared, "--output_dir", f"{n}-{case}"],
                 # 2 ranks exchange one key head at a time
                 "group_bytes": 1 if n == 2 else 2**27, "pieces": case in PIECES,
                 "plan": SAVES_ATTENTION if case.startswith("saved") else {}}
                for case, argv in cases.items() if case in selected], cwd=base)  # fmt: skip
        return base / f"{n}-{name}"

    return work


@pytest.mark.parametrize("name", CASES)
def test_shared_micro_batches_change_no_number(name, runs, read_metrics):
    one, two = (read_metrics(runs(n, name)) for n in (1, 2))
    assert len(one) == len(two) >= 2
    bar = 1e-6 if DEVICE == "cpu" else 5e-3
    for row, same in zip(one, two, strict=True):
        assert row.keys() == same.keys() and row.get("tokens") == same.get("tokens")
        for key in row.keys() & {"loss", "grad_norm", "eval_loss", "rewards/chosen", "kl"}:
            assert abs(row[key] - same[key]) <= bar * max(abs(row[key]), 0.1), key


@pytest.mark.parametrize("model", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_run_goes_on_with_another_number_of_ranks(model, base, run_jobs, read_metrics):
    """Two ranks share micro-batches, then one has them alone, then two share them again."""
    argv = ["--model", model, "--dataset", "sft.jsonl", *FLAGS, "--learning_rate", "1e-2"]
    argv += ["--lora_dropout", "0.2"] * (model == "deepseek_v3")
    parts = {}
    for run, ranks in ("whole", [1]), ("resumed", [2, 1, 2]):
        for steps, n in zip([6] if run == "whole" else [2, 4, 6], ranks):
            shared = ["--context_parallel_size", "2"] if n == 2 else []
            run_jobs(n, [{"argv": [*argv, *shared, "--micro_batch_tokens", str(700 // n),
                                   "--max_steps", str(steps), "--lr_schedule", "constant",
                                   "--warmup_fraction", "0", "--output_dir", f"{model}-{run}"]}],
                     cwd=base)  # fmt: skip
        parts[run] = read_metrics(base / f"{model}-{run}")
    assert len(parts["whole"]) == len(parts["resumed"]) == 6
    for row, same in zip(*parts.values()):
        assert abs(row["loss"] - same["loss"]) <= 1e-4 * row["loss"]  # 8-bit AdamW, six steps
    assert abs(parts["whole"][1]["loss"] - parts["resumed"][1]["loss"]) < 1e-5


# ------------------------------------------------------------------------------------------------
# Latent attention: ranks exchange latents, and each makes the keys and values that it needs
# ------------------------------------------------------------------------------------------------

LATENT = "youtu", "minicpm3"  # with a latent of the queries, and without
LATENT_FLAGS = ["--compute_dtype", "float32", "--batch_size", "6", "--max_seq_len", "512",
                "--lora_rank", "4"]  # fmt: skip
DROPOUT = ["--lora_dropout", "0.3"]
LATENT_SETTINGS = {
    "kept": ["--recompute", "none"], "dropout": [*DROPOUT, "--recompute", "all"],
    "dora": ["--adapter", "dora", *DROPOUT, "--recompute", "1", "--offload_activations"]}


def write_random_adapter(path, directory, arch):
    """Also B and DoRA's magnitudes, which begin as what hides the others' gradients."""
    generator, adapter = torch.Generator().manual_seed(1), {}
    weights = load_file(directory / "model.safetensors")
    for i, kind in enumerate(arch.layer_kinds):
        for linear in arch.linears(kind):
            stem = f"base_model.model.model.layers.{i}.{linear.name}"
            norms = weights[f"model.layers.{i}.{linear.name}.weight"].float().norm(dim=1)
            random = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
            adapter |= {
                f"{stem}.lora_A.weight": 0.05 * random(4, linear.in_features),
                f"{stem}.lora_B.weight": 0.05 * random(linear.out_features, 4),
                f"{stem}.lora_magnitude_vector": norms * (1 + 0.2 * random(len(norms)))}
    save_file(adapter, path)


@pytest.fixture(scope="module")
def latent_gradients(tmp_path_factory, tiny_model, run_jobs, request):
    """latent_gradients(n, name): loss and gradients of a step, by setting, on n ranks that share
    each micro-batch."""
    base, done = tmp_path_factory.mktemp("latent"), set()
    selected = {(params.get("n"), params.get("name")) for params in selected_params(request)}
    settings = {params.get("setting") for params in selected_params(request)}
    tokenizer = tiny_model("llama")
    vocab_size = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    write_data(base)
    for name in LATENT:
        (base / name).mkdir()
        config = tiny_config(name, vocab_size)
        write_model(base / name, config, seed=1, dtype=torch.float32)
        for path in tokenizer.glob("*token*"):
            (base / name / path.name).write_bytes(path.read_bytes())
        write_random_adapter(base / f"{name}.adapter", base / name, make_architecture(config))

    def work(n, name):
        if n not in done:
            done.add(n)
            needs_ranks(n)
            shared = ["--context_parallel_size", n, "--micro_batch_tokens", 700 // n]
            run_jobs(n, [
                {"case": "gradients", "model": str(base / each), "dataset": str(base / "sft.jsonl"),
                 "adapter": str(base / f"{each}.adapter"), "out": str(base / f"{each} on {n}"),
                 "settings": {setting: [*LATENT_FLAGS, *flags, *map(str, shared)]
                              for setting, flags in LATENT_SETTINGS.items()
                              if setting in settings},
                 "exchanged": True, "group_bytes": 1 if n == 2 else 2**27}
                for each in LATENT
                if any(each == name and n in (1, ranks) for ranks, name in selected)],
                cwd=base)  # fmt: skip
        return load_file(base / f"{name} on {n}")

    return work


@pytest.mark.parametrize("setting", [
    "kept", "dropout", pytest.param("dora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("n, name", [
    (2, "youtu"), *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        (2, "minicpm3"), (3, "minicpm3"), (4, "youtu")))])  # fmt: skip
def test_shared_latents_change_no_gradient(n, name, setting, latent_gradients):
    one, shared = (of_setting(latent_gradients(ranks, name), setting) for ranks in (1, n))
    one.pop("exchanged")
    shared.pop("exchanged")
    assert one.keys() == shared.keys() and any("kv_b_proj" in key for key in one)
    bar = 1e-6 if DEVICE == "cpu" else 5e-3
    for key in "loss", "norm":
        assert abs(one[key] - shared[key]) <= bar * one[key]
    # whole heads as well are 1e-6 apart in one of the queries' linears
    for key, want in one.items():
        assert want.norm() > 0 and (shared[key] - want).norm() <= 2 * bar * want.norm(), key
    together = [torch.cat([grads[key].flatten() for key in sorted(one)]) for grads in (one, shared)]
    assert (together[0] - together[1]).norm() <= bar * together[0].norm()


@pytest.mark.parametrize("setting, passes", [("kept", 1), ("dropout", 2)])
@pytest.mark.parametrize("n, name", [(2, "youtu")])
def test_ranks_exchange_latents_alone(n, name, setting, passes, latent_gradients):
    """Of each token a layer's latent and rotated key, and their gradients; and, once for a
    micro-batch, the token's seed of dropout."""
    widths = of_setting(latent_gradients(n, name), setting)["exchanged"].tolist()
    arch = make_architecture(tiny_config(name, 512))
    width = arch.mla.kv_rank + arch.mla.rope_dim
    assert width < arch.n_heads * (arch.head_dim + arch.mla.value_dim)  # whole keys and values
    assert {*widths} - {1} == {width, -width} and (1 in widths) == (setting == "dropout")
    assert widths.count(-width) % arch.n_layers == 0
    assert widths.count(width) == passes * widths.count(-width)
