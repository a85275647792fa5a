"""What other models than Llama do: dropout of their own, layers of one width, odd kernels.

What each family computes is in test_layer.py.
"""

import dataclasses
import types

import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import DEVICE, segments_of
from families import TINY, tiny, write_model
from safetensors.torch import load_file, save_file

from fsdp_qlora.checks.compare_with_transformers import eager_kernels
from fsdp_qlora.config import Config
from fsdp_qlora.kernels import attention, cudnn_attention
from fsdp_qlora.kernels.attention import (
    EAGER_KERNEL, FLEX_KERNEL, CUDNN_KERNEL, SDPA_KERNEL, VARLEN_KERNEL, AttentionKernel, Kernels,
    architectures_by_attention_type, can_reuse_attention_results, eager_attention, kernel_matches,
    sdpa_attention)
from fsdp_qlora.kernels.flex import BLOCK_TOKENS, flex_document_attention, visible_blocks
from fsdp_qlora.kernels.sinks import SinkAttention
from fsdp_qlora.model.model import Model
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.check_files import check_files
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.pretrained.reader import stored_tensors
from fsdp_qlora.pretrained.tensor_names import tensor_names
from train_fsdp_qlora import choose_attention

DROPOUT = {  # tiny configs whose own dropout is in one place
    "residual": tiny("seed_oss", head_dim=24, residual_dropout=0.2, attention_dropout=0.0),
    "attention": tiny("llama", attention_dropout=0.2),
    "both": tiny("seed_oss", head_dim=24, residual_dropout=0.2, attention_dropout=0.2),
    "window": tiny("mistral", sliding_window=7, attention_dropout=0.2),
    "embedding": tiny("starcoder2", None, embedding_dropout=0.5),
    "none": tiny("seed_oss", head_dim=24, residual_dropout=0.0, attention_dropout=0.0),
}
APART = [pytest.param(kind, marks=pytest.mark.slow)
         for kind in ("window", "residual", "attention")]
SMALL_BINS = "--micro_batch_tokens", 64


@pytest.fixture
def train(run_main, demo_directory, read_metrics, tmp_path):
    """Function (name, model directory, *flags): (loss, gradient norm) of two steps in fp32, on a
    GPU with torch's deterministic algorithms."""

    def run(name, model, *flags):
        data = "--dataset", demo_directory / "data.jsonl", "--max_seq_len", 64, "--max_steps", 2
        torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)
        code, _, err = run_main("--model", model, *data, "--output_dir", tmp_path / name,
                                "--compute_dtype", "float32", "--learning_rate", "1e-3",
                                "--batch_size", 5, *flags)  # fmt: skip
        torch.use_deterministic_algorithms(False)
        assert code == 0, err
        return [(row["loss"], row["grad_norm"]) for row in read_metrics(tmp_path / name)]

    return run


@pytest.fixture(scope="module")
def model_with_dropout(tmp_path_factory, demo_directory):
    made, tokenizer = {}, transformers.AutoTokenizer.from_pretrained(demo_directory / "model")

    def make(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_model(made[kind], DROPOUT[kind](len(tokenizer)))
            tokenizer.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.mark.parametrize("kind", ["both", *APART])
def test_models_own_dropout_is_the_same_when_recomputed(kind, train, model_with_dropout):
    model = model_with_dropout(kind)
    kept = train("kept", model, "--recompute", "none", *SMALL_BINS)
    assert train("again", model, "--recompute", "all", *SMALL_BINS) == kept
    offloaded = "--recompute", 2, "--offload_activations", "--offload_params"
    assert train("offloaded", model, *offloaded, *SMALL_BINS) == kept


@pytest.mark.slow
def test_models_own_dropout_is_the_same_when_recomputed_in_slices(
    train, model_with_dropout, monkeypatch
):
    kept = train("kept", model_with_dropout("both"), "--recompute", "none")
    monkeypatch.setattr(Plan, "mlp_slice_tokens", 16)
    sliced = train("sliced", model_with_dropout("both"), "--recompute", "all")
    assert sliced == [pytest.approx(row, rel=1e-5) for row in kept]


@pytest.mark.parametrize("kind", ["both", *APART])
def test_models_own_dropout_is_there_and_does_not_depend_on_micro_batches(
    kind, train, model_with_dropout
):
    large, small = (
        train(name, model_with_dropout(kind), "--micro_batch_tokens", tokens)
        for name, tokens in (("large", 1000), ("small", 64))
    )
    assert small == [pytest.approx(row, rel=1e-5) for row in large]
    without = train("without", model_with_dropout("none"))
    assert abs(large[0][1] - without[0][1]) > 1e-2 * without[0][1]


def test_dropout_of_the_embedding_has_its_probability():
    arch = dataclasses.replace(make_architecture(DROPOUT["embedding"](8)), ropes=[])
    plan = Plan(compute_dtype="float32", n_layers=0, shard_group_size=1, reshard_after_forward=True,
                micro_batch_tokens=800, n_recomputed=0, save_mid_residual=False,
                reuse_dequantized=False, offload_activations=False, offload_params=False)
    model = Model(arch, (), plan, eager_kernels(arch), torch.device("cpu"))
    ids = torch.arange(800) % 8
    model.embedding = torch.ones(8, arch.hidden_size)
    for keys, values in (None, [1]), (torch.arange(800) << 20, [0, 2]):
        micro_batch = types.SimpleNamespace(
            input_ids=ids, position_ids=ids, dropout_seeds=keys, context_shard=None, lengths=(800,),
            cu_seqlens=torch.tensor([0, 800]), max_seqlen=800, is_varlen=False)  # fmt: skip
        hidden = model.hidden(micro_batch)
        assert hidden.unique().tolist() == values
        assert hidden.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("recompute", [
    "1", *(pytest.param(n, marks=pytest.mark.slow) for n in ("none", "all"))])  # which "1" has both
def test_adapters_of_the_mlp_alone_are_sliced(train, tiny_model, monkeypatch, recompute):
    """The first MLP's input then needs no gradient."""
    flags = tiny_model("llama"), "--target_modules", "gate_proj", "down_proj"
    want = train("whole", *flags, "--recompute", "none")
    monkeypatch.setattr(Plan, "mlp_slice_tokens", 16)
    got = train("sliced", *flags, "--recompute", recompute)
    assert got == [pytest.approx(row, rel=1e-5) for row in want]


def test_layers_of_one_width_are_planned_for(train, tiny_model):
    assert len(train("run", tiny_model("llama", hidden_size=64, intermediate_size=64))) == 2


def test_micro_batches_are_never_rounded_above_the_plan(train, tiny_model, monkeypatch):
    """On a GPU micro-batches have round lengths; what is kept on the host has room for the
    plan's."""
    flags = tiny_model("llama"), "--recompute", "all", "--micro_batch_tokens", 100
    want = train("plain", *flags)
    # as on a GPU; the check at start stays on the CPU
    monkeypatch.setattr("fsdp_qlora.data.collate.round_up", lambda n, device: -(-n // 64) * 64)
    monkeypatch.setattr("train_fsdp_qlora.compare_with_transformers", lambda *args: None)
    got = train("round", *flags, "--offload_activations")
    assert got == [pytest.approx(row, rel=1e-5) for row in want]


@pytest.mark.parametrize("change, works", [(0, True), (1e-2, False)])
def test_tied_model_whose_file_has_another_head_is_refused(change, works, tmp_path):
    """transformers would not tie them, and the merge would keep the head that was not trained."""
    write_model(tmp_path, TINY["llama3"](320))
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += change
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    model_config = transformers.AutoConfig.from_pretrained(tmp_path)
    arch, files = make_architecture(model_config), stored_tensors(tmp_path)
    names = tensor_names(arch, files)
    if works:
        assert check_files(files, names, model_config, "bfloat16") == {}
        return
    with pytest.raises(ValueError, match="tie_word_embeddings true, but .* lm_head.weight is not"):
        check_files(files, names, model_config, "bfloat16")


@pytest.mark.parametrize("kind, attention_type", [("gemma2", "full"), ("gemma2", "window"),
                                         ("mistral", "window"), ("llama", "full"),
                                         ("gpt_oss", "full"), ("gpt_oss", "window")])  # fmt: skip
def test_kernel_that_computes_something_else_is_found_out(kind, attention_type):
    """One without soft caps, windows or sinks, or with a wrong backward."""
    arch, cpu = make_architecture(TINY[kind](320)), torch.device("cpu")
    if arch.attention_softcap:
        arch = dataclasses.replace(arch, attention_softcap=50.0)  # Gemma 2's, far from most scores
    plain = eager_attention

    def uncapped(q, k, v, sinks, segments, arch, *rest):
        return plain(
            q, k, v, sinks, segments, dataclasses.replace(arch, attention_softcap=None), *rest
        )

    def without_window(q, k, v, sinks, segments, arch, window, layer_index):
        return plain(q, k, v, sinks, segments, arch, None, layer_index)

    def without_sinks(q, k, v, sinks, *rest):
        return plain(q, k, v, None, *rest)

    def halved_backward(*args):
        out = plain(*args)
        return out.detach() + (out - out.detach()) / 2

    right = lambda *args: plain(*args)  # noqa: E731
    wrong = [halved_backward]
    wrong += [uncapped] if arch.attention_softcap else []
    wrong += [without_window] if attention_type == "window" else []
    wrong += [without_sinks] if arch.sinks else []
    for kernel in (right, *wrong):
        record = AttentionKernel(kernel.__name__, kernel, has_softcap=True)
        assert kernel_matches(record, arch, attention_type, cpu) == (kernel is right), record.name


def test_kernels_are_tried_with_the_heads_of_the_layers_that_use_them():
    """Gemma 4's layers without a window have wider heads, and fewer of keys."""
    found = architectures_by_attention_type(make_architecture(TINY["gemma4_text"](320)))
    heads = {attention_type: (arch.n_kv_heads, arch.head_dim, arch.keys_are_values)
             for attention_type, arch in found.items()}  # fmt: skip
    assert heads == {
        "window": (2, 24, False), "window_unreached": (2, 24, False), "full": (1, 32, True)}
    assert architectures_by_attention_type(make_architecture(TINY["mistral"](320))).keys() == {
        "window",
        "window_unreached",
    }
    assert architectures_by_attention_type(make_architecture(TINY["llama"](320))).keys() == {"full"}


@pytest.mark.parametrize("kind, flex", [
    ("llama", set()), ("gemma2", {"full", "window", "window_unreached"}), ("gpt_oss", set())])
@pytest.mark.parametrize("capability", [(8, 6), (9, 0)])
def test_on_a_gpu_no_model_runs_in_plain_torch(capability, kind, flex, monkeypatch):
    """Without flash-attn, flex_attention computes what torch's other kernels do not know; but not
    in fp32, or with dropout on attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(attention, "kernel_matches", lambda kernel, arch, *_: (
        kernel is FLEX_KERNEL or not arch.attention_softcap))
    arch = make_architecture(TINY[kind](320))

    def kernels(arch=arch, **flags):
        chosen = choose_attention(Config(**flags), arch, torch.device("cuda"))
        return {
            attention_type: {chosen.fixed_len[attention_type], chosen.varlen[attention_type]}
            for attention_type in chosen.varlen
        }

    found = kernels()
    assert EAGER_KERNEL not in set.union(*found.values())
    assert {
        attention_type
        for attention_type, used in found.items()
        if used == {FLEX_KERNEL}
    } == flex
    for plain in (kernels(compute_dtype="float32"),
                  kernels(dataclasses.replace(arch, attention_dropout=0.1))):  # fmt: skip
        assert set.union(*plain.values()) == {EAGER_KERNEL}


@pytest.mark.parametrize("capability, attn, want", [
    ((9, 0), None, CUDNN_KERNEL), ((9, 0), "sdpa", CUDNN_KERNEL),
    ((8, 6), None, VARLEN_KERNEL)])  # fmt: skip
def test_pieces_of_documents_have_a_kernel_of_their_own_from_hopper_on(
    capability, attn, want, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(transformers.utils, "is_flash_attn_2_available", lambda: False)
    monkeypatch.setattr(attention, "kernel_matches", lambda kernel, arch, attention_type, *_: (
        attention_type != "window" or kernel.has_windows))
    arch = make_architecture(TINY["mistral"](320))
    chosen = choose_attention(Config(attn=attn), arch, torch.device("cuda"), whole_documents=False)
    assert chosen.fixed_len == {"window": VARLEN_KERNEL, "window_unreached": want}
    assert set(chosen.varlen.values()) == {VARLEN_KERNEL}


@pytest.mark.parametrize("kind, right", [("granite", True), ("gpt_oss", False), ("gemma2", False)])
def test_pieces_have_no_sinks_and_no_caps(kind, right):
    arch = make_architecture(TINY[kind](320))
    matches = [kernel_matches(kernel, arch, "full", torch.device("cpu"), whole_documents=False)
               for kernel in (CUDNN_KERNEL, SDPA_KERNEL)]  # fmt: skip
    assert matches == [right, False]  # SDPA_KERNEL needs as many keys as queries


def test_sdpa_is_not_asked_for_heads_of_which_it_would_keep_all_scores():
    arch = make_architecture(TINY["llama"](320))
    for head_dim, works in (256, True), (512, False):
        wide = dataclasses.replace(arch, head_dim=head_dim)
        for kernel in SDPA_KERNEL, CUDNN_KERNEL:
            assert kernel_matches(kernel, wide, "full", torch.device("cpu")) == works


def test_no_results_are_saved_where_attention_cannot_be_resumed(monkeypatch, capsys):
    """Wherever it fails, as with a torch that has no such kernel; and where it is only wrong."""
    arch, cpu = make_architecture(TINY["granite"](320)), torch.device("cpu")
    windowed = make_architecture(TINY["mistral"](320))

    def can_be_reused(kernel=SDPA_KERNEL, arch=arch):
        by_type = dict.fromkeys(attention.ATTENTION_TYPES, kernel)
        return can_reuse_attention_results(Kernels(by_type, by_type), arch, cpu)

    assert can_be_reused() and can_be_reused(CUDNN_KERNEL)
    assert not can_be_reused(EAGER_KERNEL) and not can_be_reused(arch=windowed)
    assert not capsys.readouterr().out
    backward = cudnn_attention.attend_backward
    for fails in (lambda *_: torch.ops.aten.no_such_kernel(), lambda *_: torch.ops.aten.mm(1),
                  lambda q, *_: torch.empty(2) @ torch.empty(3),
                  lambda *args: [2 * grad for grad in backward(*args)]):  # fmt: skip
        monkeypatch.setattr(cudnn_attention, "attend_backward", fails)
        assert not can_be_reused()
        assert "warning: slow path, recomputed layers run" in capsys.readouterr().out


@pytest.mark.parametrize("length", [13, 64, 256])
def test_batched_attention_reads_gradients_of_any_strides(length):
    """torch 2.11 keeps cuDNN's plans without them: the second layout's gradient was wrong."""
    arch = make_architecture(TINY["granite"](320))
    heads = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads
    generator = torch.Generator(DEVICE).manual_seed(0)
    segments = segments_of((length,) * 3)
    for spare in (2, 0, 5):  # columns of an adapter beside it, in heads
        q, k, v, grad = torch.randn(
            3 * length, sum(heads) + arch.n_heads + spare, arch.head_dim, device=DEVICE,
            dtype=torch.bfloat16, generator=generator,
        ).split([*heads, arch.n_heads + spare], 1)
        qkv = torch.cat([q, k, v], 1)  # the strides of q, k and v are those of every time
        grad = grad.clone()[:, : arch.n_heads]
        results = []
        for function in (sdpa_attention, eager_attention):
            inputs = [t.detach().requires_grad_() for t in qkv.split(heads, 1)]
            out = function(*inputs, None, segments, arch, None, 0)
            results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.parametrize("kind, lengths, window", [
    ("gemma2", (100, 300, 1, 60), None), ("gemma2", (100, 300, 1, 60), 50), ("gemma2", (90,), 7),
    ("gpt_oss", (128, 128, 7), None), ("gpt_oss", (129, 127, 1), 1), ("llama", (400, 112), 200)])
def test_flex_attention_sees_what_plain_torch_sees(kind, lengths, window):
    """On a CPU torch has no backward for it: there is one on GPUs: kernel_matches() compares it."""
    arch, n = make_architecture(TINY[kind](320)), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    heads = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads
    qkv = 3 * torch.randn(n, sum(heads), arch.head_dim, generator=generator)
    sinks = 2 * torch.randn(arch.n_heads, generator=generator) if arch.sinks else None
    segments = segments_of(lengths)
    want, got = (kernel(*qkv.split(heads, 1), sinks, segments, arch, window, 0)
                 for kernel in (eager_attention, flex_document_attention))
    assert (got - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("lengths", [(100, 300, 1, 60, 5), (90,), (128, 256), (200, 184)])
@pytest.mark.parametrize("window", [None, 1, 7, 128, 150])
def test_blocks_that_are_computed_are_those_that_a_query_sees(lengths, window):
    """A block is left out if no query sees a key of it, and not masked if all see all. The last
    block is filled up by queries that see what the last one sees."""
    n_tokens = sum(lengths)
    first, last, *tables = visible_blocks(segments_of(lengths), n_tokens, n_tokens, window)
    n_blocks = -(-n_tokens // BLOCK_TOKENS)
    n, first, last = n_blocks * BLOCK_TOKENS, first.flatten(), last.flatten()
    tokens = torch.arange(n)
    queries = tokens.clamp(max=n_tokens - 1)[:, None]
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    document = F.pad(document, (0, n - n_tokens), value=-1)
    visible = (tokens <= queries) & (document == document[queries])
    if window:
        visible &= tokens > queries - window
    assert torch.equal(visible, (tokens <= last[:, None]) & (tokens >= first[:, None]))
    sides = [slice(i, i + BLOCK_TOKENS) for i in range(0, n, BLOCK_TOKENS)]
    parts = [[visible[rows, columns] for columns in sides] for rows in sides]
    whole = [[bool(part.all()) for part in row] for row in parts]
    partial = [[bool(part.any()) and not part.all() for part in row] for row in parts]
    for i, want in enumerate((partial, whole, zip(*partial), zip(*whole))):
        counts, columns = (table[0, 0].tolist() for table in tables[2 * i : 2 * i + 2])
        want = [[j for j in range(n_blocks) if row[j]] for row in want]
        assert [row[:count] for row, count in zip(columns, counts)] == want


@pytest.mark.parametrize("kind, window", [("gemma2", None), ("gemma2", 7), ("gpt_oss", None),
                                          ("mistral", 7), ("llama", None)])  # fmt: skip
def test_plain_attention_by_a_few_rows_is_that_of_all(kind, window, monkeypatch):
    """Also its gradients and its dropout; and it keeps for backward what it was given alone."""
    arch = make_architecture(TINY[kind](320))
    arch = dataclasses.replace(arch, attention_dropout=0.2 * (kind == "llama"))
    lengths, heads = (40, 1, 23), (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads)
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), sum(heads), arch.head_dim, generator=generator)
    grad = torch.randn(sum(lengths), arch.n_heads, arch.head_dim, generator=generator)
    sinks = 2 * torch.randn(arch.n_heads, generator=generator) if arch.sinks else None
    segments = segments_of(lengths, dropout_seeds=torch.arange(len(qkv)) << 20)

    def both():
        inputs, kept = [t.detach().requires_grad_() for t in qkv.split(heads, 1)], []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.append(t.untyped_storage().data_ptr()) or t, lambda t: t):  # fmt: skip
            out = eager_attention(*inputs, sinks, segments, arch, window, 0)
        given = [t for t in (qkv, sinks, segments.dropout_seeds) if t is not None]
        assert {*kept} <= {t.untyped_storage().data_ptr() for t in given}
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    want = both()
    monkeypatch.setattr("fsdp_qlora.kernels.attention.SCORES_BYTES", 4 * arch.n_heads * 40 * 7)
    for got, whole in zip(both(), want):
        assert (got - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "llama"])
def test_large_scores_do_not_overflow(kind):
    """Capped, beside sinks as large, and by torch's kernel."""
    arch, n = make_architecture(TINY[kind](320)), 30
    heads, generator = (arch.n_heads, arch.n_kv_heads, arch.n_kv_heads), torch.Generator()
    q, k, v = torch.randn(n, sum(heads), arch.head_dim, generator=generator.manual_seed(0)).split(
        heads, 1)
    sinks = 1000 * torch.randn(arch.n_heads, generator=generator) if arch.sinks else None
    inputs = [x.detach().requires_grad_() for x in (100 * q, 10 * k, v)]
    segments = segments_of((n,))
    got = eager_attention(*inputs, sinks, segments, arch, None, 0)
    assert all(x.isfinite().all() for x in torch.autograd.grad(got.sum(), inputs))
    q, k, v = (x.double().repeat_interleave(arch.n_heads // x.shape[1], 1) for x in inputs)
    scores = torch.einsum("qhd,khd->hqk", q, k) * arch.attention_scale
    assert scores.max() > 500
    if arch.attention_softcap:
        scores = arch.attention_softcap * torch.tanh(scores / arch.attention_softcap)
    scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
    if arch.sinks:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, n, 1)], -1)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :n], v)
    assert (got - want).norm() < 1e-4 * want.norm()


def cpu_flash(mask, groups, scale):
    """SinkAttention's two kernels: torch's flash kernel for CPUs, of one document."""
    op = torch.ops.aten

    def whole(t):
        return t.transpose(0, 1)[None]

    def repeated(t):
        return whole(t.repeat_interleave(groups, 1))

    def forward(query, key, value):
        out, lse = op._scaled_dot_product_flash_attention_for_cpu(
            whole(query), repeated(key), repeated(value), attn_mask=mask, scale=scale)
        return out[0].transpose(0, 1), lse[0], ()

    def backward(grad, query, key, value, out, lse):
        grads = op._scaled_dot_product_flash_attention_for_cpu_backward(
            whole(grad), whole(query), repeated(key), repeated(value), whole(out), lse[None], 0.0,
            False, attn_mask=mask, scale=scale)  # fmt: skip
        of_q, of_k, of_v = (t[0].transpose(0, 1) for t in grads)
        return of_q, *(t.unflatten(1, (-1, groups)).sum(2) for t in (of_k, of_v))

    return forward, backward


@pytest.mark.parametrize("size, bar", [(1, 1e-6), (100, 1e-4)])
@pytest.mark.parametrize("window", [None, 7])
def test_a_kernel_that_knows_no_sinks_gives_exact_gradients_with_them(window, size, bar):
    """Because its backward gets out and lse of attention with sinks; also where exp() of scores and
    of sinks is infinite."""
    n, arch = 50, make_architecture(TINY["gpt_oss"](320))
    shapes = arch.n_heads, arch.n_kv_heads, arch.n_kv_heads, arch.n_heads
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(n, heads, arch.head_dim, generator=generator) for heads in shapes)
    sinks, q = 2 * size * torch.randn(arch.n_heads, generator=generator), size * q
    visible = torch.ones(n, n, dtype=torch.bool).tril().triu(1 - window if window else -n)
    mask = torch.zeros(n, n).masked_fill(~visible, -torch.inf)
    segments = segments_of((n,))

    def both(function):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = function(*inputs, sinks)
        return out.detach(), *torch.autograd.grad(out, inputs, grad)

    kernels = cpu_flash(mask, arch.n_heads // arch.n_kv_heads, arch.attention_scale)
    got = both(lambda *inputs: SinkAttention.apply(*inputs, *kernels))
    want = both(lambda *inputs: eager_attention(*inputs, segments, arch, window, 0))
    for one, other in zip(got, want):
        assert (one - other).norm() < bar * other.norm()
