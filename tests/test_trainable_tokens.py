"""--trainable_tokens: rows of the embedding and of the lm_head beside the adapter."""

import copy
import functools
import itertools
import json
import math
import re
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import (
    DEVICE, needs_ranks, read_rows, selected_params, selected_tests, write_rows)
from families import TINY
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from rows import CHATML, says
from safetensors.torch import load_file, save_file
from test_layouts import make_reference, write_layout
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, LlamaConfig,
    LlamaForCausalLM, PreTrainedTokenizerFast)

import merge_adapters
from fsdp_qlora.config import Config
from fsdp_qlora.data.trainable_tokens import TrainableToken, add_trainable_tokens
from fsdp_qlora.lora.initial_token_rows import initial_token_rows
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.merge.compare_logits import logits_of, recorded_logits
from fsdp_qlora.model.token_rows import EmbeddingRows
from fsdp_qlora.pretrained.from_config import make_architecture

BAR = 1e-5
QUICK = ["qwen2", "gemma2"]  # not tied, tied and scaled
QUICK_ON_TWO: list[str] = []  # test_two_processes_train_the_same_rows has two processes
FAMILIES = [*QUICK, "qwen3_vl", "llama3", "granite4", "falcon_h1", "qwen3_moe", "gpt_oss",
            "nemotron_h", "qwen3_5", "gemma3", "mistral3", "deepseek_v3", "exaone", "sarvam_moe"]
SETTINGS = {"kept": ["--recompute", "none"],
            "recomputed, split": ["--recompute", "all", "--micro_batch_tokens", "64"]}
FLAGS = ["--lora_rank", "4", "--lora_alpha", "64", "--batch_size", "16", "--max_seq_len", "64",
         "--compute_dtype", "float32"]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, 16)
    return path


@pytest.fixture(scope="module")
def tokenizer(demo_directory):
    return PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")


@pytest.fixture(scope="module")
def known(rows_file, tokenizer):
    """Three tokens of the vocabulary: a frequent one, one that ends rows, one that no row has."""
    ids = torch.cat([ids for ids, _ in read_rows(rows_file, tokenizer)])
    counts = ids.bincount(minlength=len(tokenizer))
    counts[tokenizer.eos_token_id] = 1
    chosen = [int(counts.argmax()), tokenizer.eos_token_id, int(counts.argmin())]
    return tuple(tokenizer.convert_ids_to_tokens(chosen))


@pytest.fixture(scope="module")
def gradients(request, rows_file, tokenizer, known, tmp_path_factory, run_jobs):
    """gradients(name, processes): the directory of the family's model, and what is seen there by
    rank_cases.gradients(). All wanted families are done together."""
    base, done = tmp_path_factory.mktemp("gradients"), {}
    wanted = [(x["name"], x["nproc"]) for x in selected_params(request) if "name" in x]

    def get(name, nproc):
        if nproc not in done:
            needs_ranks(nproc)
            jobs = []
            for each in dict.fromkeys(name for name, n in wanted if n == nproc):
                if not (base / each).exists():
                    write_base(base / each, each, tokenizer, known)
                flags = [*FLAGS, "--trainable_tokens", *known]
                jobs.append({
                    "case": "gradients", "model": str(base / each), "dataset": str(rows_file),
                    "adapter": str(base / each / "values"), "out": str(base / f"{each}-{nproc}"),
                    "settings": {key: [*flags, *more] for key, more in SETTINGS.items()}})
            run_jobs(nproc, jobs, cwd=base)
            done[nproc] = True
        return base / name, load_file(base / f"{name}-{nproc}")

    return get


def token_settings(model, known, tokenizer):
    """PEFT's trainable_token_indices for rows of both tables."""
    ids = sorted(tokenizer.convert_tokens_to_ids(known))
    config = TINY[model.name](len(tokenizer))
    head = [] if config.tie_word_embeddings else ["lm_head"]
    embedding = "embeddings" if model.name == "nemotron_h" else "embed_tokens"
    return {"trainable_token_indices": dict.fromkeys([embedding, *head], ids)}


def write_base(model, name, tokenizer, known):
    """Write a model, and random values of an adapter that PEFT makes for it."""
    write_layout(model, name, "as saved", len(tokenizer))
    tokenizer.save_pretrained(model)
    peft = make_reference(model, name, "as saved", **token_settings(model, known, tokenizer))
    generator = torch.Generator().manual_seed(1)
    values = {key: 0.05 * torch.randn(value.shape, generator=generator)
              for key, value in get_peft_model_state_dict(peft).items()}
    save_file(values, model / "values")


@functools.cache  # for both numbers of processes
def reference(model, rows_file, known, tokenizer):
    """transformers and PEFT: the loss and all gradients, by the names of PEFT's files."""
    peft = make_reference(model, model.name, "as saved", **token_settings(model, known, tokenizer))
    set_peft_model_state_dict(peft, load_file(model / "values"))
    rows = read_rows(rows_file, tokenizer)
    n_trained = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    total = 0.0
    for ids, labels in rows:
        logits = peft(ids[None].to(DEVICE)).logits[0, :-1].float()
        loss = F.cross_entropy(logits, labels[1:].to(DEVICE), reduction="sum") / n_trained
        loss.backward()
        total += loss.item()
    grads = {n: p.grad for n, p in peft.named_parameters() if p.requires_grad}
    return total, {n: grad.cpu() for n, grad in get_peft_model_state_dict(peft, grads).items()}


@pytest.mark.parametrize("name, nproc", [
    pytest.param(name, n, marks=[pytest.mark.slow] * (name not in quick))
    for n, quick in ((1, QUICK), (2, QUICK_ON_TWO)) for name in FAMILIES])
def test_gradients_equal_pefts(name, nproc, gradients, rows_file, known, tokenizer):
    model, seen = gradients(name, nproc)
    loss, exact = reference(model, rows_file, known, tokenizer)
    rows = [key for key in exact if "trainable_tokens" in key]
    assert len(rows) == 2 - TINY[name](320).tie_word_embeddings
    # gradients of Gated DeltaNet's linears differ as much: transformers sums in another order
    bar = 1e-4 if name == "qwen3_5" else BAR
    norm = math.sqrt(sum(float(grad.double().square().sum()) for grad in exact.values()))
    for setting in SETTINGS:
        got = {key.removeprefix(f"{setting}/"): value for key, value in seen.items()
               if key.startswith(f"{setting}/")}
        assert got.keys() == exact.keys() | {"loss", "norm"}
        assert abs(got["loss"] - loss) <= BAR * loss and abs(got["norm"] - norm) <= bar * norm
        for key, grad in exact.items():
            assert (got[key] - grad).norm() <= bar * grad.norm(), (setting, key)


@pytest.mark.parametrize("family", ["phi", "nanochat"])
def test_model_whose_tables_peft_computes_wrongly_is_refused(family):
    config = Config(model="m", trainable_tokens=("x",))
    with pytest.raises(ValueError, match=rf"--trainable_tokens: .* \({family}\): drop the flag"):
        resolve_adapter(make_architecture(TINY[family](320)), config, "m")


def test_gradients_of_long_micro_batches_are_summed():
    ids, row_ids = torch.arange(40_000) % 11, torch.tensor([2, 5, 77])
    grad, rows = torch.ones(40_000, 4), torch.zeros(3, 4, requires_grad=True)
    EmbeddingRows.apply(torch.zeros(40_000, 4), rows, ids, row_ids).backward(grad)
    want = [int((ids == i).sum()) for i in row_ids]
    assert want[2] == 0 and torch.equal(rows.grad, torch.tensor(want).float()[:, None].expand(3, 4))


def test_new_tokens_are_added_once_and_stay_in_texts_unless_they_are_markers(chat_tokenizer):
    tokenizer = copy.deepcopy(chat_tokenizer)
    before = tokenizer("a<tool>")["input_ids"]
    tokens = add_trainable_tokens(tokenizer, ["<|end|>", "is", "<tool>", "<|end|>"])
    n, is_id = len(chat_tokenizer), chat_tokenizer.convert_tokens_to_ids("is")
    assert [(token.text, token.id) for token in tokens] == [
        ("is", is_id), ("<|end|>", n), ("<tool>", n + 1)]
    assert tokens[0].old_ids is None and [*tokens[2].old_ids] == before[1:]
    ids = tokenizer("It<tool><|end|>")["input_ids"]
    assert ids[-2:] == [n + 1, n] and tokenizer.decode(ids, skip_special_tokens=True) == "It<tool>"


def test_rows_begin_as_what_their_text_was_or_as_the_mean(capsys):
    """Of tables with 6 rows in the files, which have got 4 more."""
    stored = {name: torch.randn(6, 16).bfloat16() for name in ("embedding", "lm_head")}
    tables = {name: F.pad(table, (0, 0, 0, 4)) for name, table in stored.items()}
    model = types.SimpleNamespace(
        **tables, shard_group_size=1, local_rows=range(10), device=torch.device("cpu"),
        arch=types.SimpleNamespace(n_token_tables=2, vocab_size=10, added_rows=4))
    tokens = [TrainableToken("known", 1, None), TrainableToken("untrained", 4, None),
              TrainableToken("new", 6, (0, 3, 3)), TrainableToken("of nothing", 7, ())]
    rows = initial_token_rows(model, tokens, {4})
    for values, (name, table) in zip(rows, stored.items(), strict=True):
        mean = table.double().mean(0).float()
        assert torch.equal(values[0], table[1].float()) and torch.equal(values[1], mean)
        assert torch.equal(values[2], table[[0, 3, 3]].double().mean(0).float())
        assert torch.equal(values[3], mean) and torch.equal(tables[name][:6], table)
        assert torch.equal(tables[name][6:], mean.bfloat16().expand(4, -1))
    said = capsys.readouterr().out
    assert "new new, as the mean of the tokens of the text; untrained of nothing untrained" in said


# ------------------------------------------------------------------------------------------------
# A base model whose tokens the chat template does not know: trained, merged, asked
# ------------------------------------------------------------------------------------------------

NUMBERS = ["one", "two", "three", "four"]
TALKS = [[says("user", f"What is it? {n}"), says("assistant", f"It is {n}.")] for n in NUMBERS]
MARKERS = ["<|im_start|>", "<|im_end|>"]
BASES = {  # (whether the tokenizer has MARKERS, rows of the tables)
    "untrained": (True, 360), "new, in spare rows": (False, 360), "new": (False, None)}
SOME_BASES = [("new", True)]  # the others by `make test-slow`


@pytest.fixture(scope="module")
def chat_tokenizer():
    """A tokenizer of bytes and a few words, without ChatML's tokens."""
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=340, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokens.train_from_iterator(["user assistant\n What is it? one two three four It is im"] * 9,
                               trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<|endoftext|>")


def write_chat_base(directory, tokenizer, has_markers, n_rows, tied=False):
    """Write a base model that never saw ChatML's tokens."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHATML
    if has_markers:
        tokenizer.add_tokens([AddedToken(tag, special=True) for tag in MARKERS])
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=n_rows or len(tokenizer), hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        eos_token_id=tokenizer.eos_token_id, initializer_range=0.12, tie_word_embeddings=tied))
    model.model.embed_tokens.weight.data.normal_(0, 0.4 if tied else 1)
    n_known = len(tokenizer) - len(MARKERS) * has_markers
    for table in (model.model.embed_tokens, model.lm_head):
        table.weight.data[n_known:] = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "rows.jsonl").write_text(
        "".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))


def chat_flags(directory, *more):
    return ["--model", directory, "--dataset", f"{directory}/rows.jsonl", "--max_steps", 40,
            "--batch_size", 4, "--learning_rate", 0.006, "--report_to", "none",
            "--trainable_tokens", *MARKERS, *more]


def in_peft(directory, run, n_rows):
    """The run's adapter on its base in NF4, fp32, loaded by transformers and PEFT."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=quantization, dtype=torch.float32, device_map={"": DEVICE})
    model = model.dequantize()  # once; the same numbers as at each use
    model.resize_token_embeddings(n_rows, mean_resizing=False)
    for table in {model.get_input_embeddings(), model.get_output_embeddings()}:
        n_stored = AutoConfig.from_pretrained(directory).vocab_size
        table.weight.data[n_stored:] = table.weight.data[:n_stored].mean(0)
    return PeftModel.from_pretrained(model, run).eval()


@pytest.mark.parametrize("kind, tied", [
    pytest.param(kind, tied, marks=[pytest.mark.slow] * ((kind, tied) not in SOME_BASES))
    for kind in BASES for tied in (False, True)])
def test_base_learns_to_stop(
        kind, tied, chat_tokenizer, run_main, read_metrics, tmp_path, capsys):
    """And PEFT reads the adapter as it was trained."""
    base, run, merged = (tmp_path / name for name in ("base", "run", "merged"))
    write_chat_base(base, chat_tokenizer, *BASES[kind], tied)
    code, said, err = run_main(*chat_flags(
        base, "--output_dir", run, "--compute_dtype", "float32", "--eval_dataset",
        base / "rows.jsonl", "--eval_every", 0, "--eval_samples", 0))
    assert code == 0, err
    begin = "mean of all rows" if kind == "untrained" else "mean of the tokens of the text"
    assert f"{' '.join(MARKERS)}" in said and begin in said
    merge_adapters.main(["--adapter_dir", str(run), "--output_dir", str(merged)])
    off = re.search("ok: the merged model matches the trained one, to (.*) %",
                    capsys.readouterr().out)
    assert float(off[1]) <= 1
    model = AutoModelForCausalLM.from_pretrained(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    grown = math.ceil((len(chat_tokenizer) + 2) / 64) * 64
    assert model.config.vocab_size == (grown if kind == "new" else 360)
    end = tokenizer.convert_tokens_to_ids(MARKERS[1])
    peft = in_peft(base, run, model.config.vocab_size)
    for (asked, _), number in zip(TALKS, NUMBERS):
        inputs = tokenizer.apply_chat_template(
            [asked], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        (ids,) = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        answer = ids[inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == f"It is {number}.<|im_end|>" and answer[-1] == end
    config = json.loads((run / "train_config.json").read_text())
    head = load_file(base / "model.safetensors")
    head = head["model.embed_tokens.weight" if tied else "lm_head.weight"]
    _, trained = recorded_logits(run / "probe.safetensors", head, None,
                                make_architecture(model.config), config["trainable_token_ids"])
    logits = logits_of(peft, config["probe_input_ids"])
    assert (logits - trained).norm() <= BAR * trained.norm()
    rows = read_rows(base / "rows.jsonl", PreTrainedTokenizerFast.from_pretrained(run))
    losses = [F.cross_entropy(logits_of(peft, [ids.tolist()])[:-1], labels[1:], reduction="sum")
              for ids, labels in rows]
    loss = sum(losses) / sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    assert abs(loss - read_metrics(run)[-1]["eval_loss"]) <= BAR * max(1, loss)


# ------------------------------------------------------------------------------------------------
# On several processes, resumed, from another adapter, with a preference loss
# ------------------------------------------------------------------------------------------------

FP32 = ["--compute_dtype", "float32", "--lr_schedule", "constant", "--learning_rate", 1e-3,
        "--eval_dataset", "rows.jsonl", "--eval_every", 0, "--eval_samples", 0]
HALF, WHOLE = ["--max_steps", 2], ["--max_steps", 4]
DPO = ["--loss", "dpo", "--dataset", "pairs.jsonl", "--eval_dataset", "pairs.jsonl"]
# {processes: [(directory, flags)]}, in this order
RUNS = [
    (1, "one", WHOLE), (1, "halves", HALF), (1, "halves", WHOLE), (1, "begun on 1", HALF),
    (1, "dpo on 1", [*WHOLE, *DPO]),
    (2, "sharded", [*WHOLE, "--shard_group_size", 2]),
    (2, "copies", [*WHOLE, "--shard_group_size", 1]),
    (2, "on the host", [*WHOLE, "--shard_group_size", 2, "--offload_params"]),
    (2, "shared", [*WHOLE, "--context_parallel_size", 2, "--micro_batch_tokens", 40]),
    (2, "begun on 1", [*WHOLE, "--shard_group_size", 2]),
    (2, "dpo on 2", [*HALF, *DPO, "--shard_group_size", 2]),
    (2, "dpo on 2", [*WHOLE, *DPO, "--shard_group_size", 2]),
    (1, "from one", [*HALF, "--init_adapter", "one"])]
RARE = "on the host", "copies", "shared"  # by `make test-slow`, as are those with DPO


@pytest.fixture(scope="module")
def runs(chat_tokenizer, tmp_path_factory, run_jobs, request):
    """The directory of RUNS, of rare ones and those with DPO if their tests are selected, and of
    base/."""
    directory = tmp_path_factory.mktemp("token-runs")
    write_chat_base(directory / "base", chat_tokenizer, *BASES["new"])
    (directory / "rows.jsonl").symlink_to("base/rows.jsonl")
    pairs = [{"prompt": talk[:1], "chosen": talk[1:], "rejected": [says("assistant", "What?")]}
             for talk in TALKS]
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    needs_ranks(2)
    selected = {params.get("how") for params in selected_params(request)}
    wants_dpo = any("reference" in name for name in selected_tests(request))
    wanted = [run for run in RUNS if (
        wants_dpo if run[1].startswith("dpo") else run[1] not in RARE or run[1] in selected)]
    for nproc, group in itertools.groupby(wanted, lambda run: run[0]):
        run_jobs(nproc, [{"argv": [str(flag) for flag in [
            *chat_flags("base"), "--dataset", "rows.jsonl", *FP32, *flags, "--output_dir", name]]}
            for _, name, flags in group], cwd=directory)
    return directory


def make_rows(run):
    return {key: value for key, value in load_file(run / "adapter_model.safetensors").items()
            if "trainable_tokens" in key}


@pytest.mark.parametrize("how", [
    "sharded", *(pytest.param(how, marks=pytest.mark.slow) for how in RARE)])
def test_two_processes_train_the_same_rows(how, runs, read_metrics):
    one, two = (read_metrics(runs / run) for run in ("one", how))
    steps = [(row, other) for row, other in zip(one, two, strict=True) if "grad_norm" in row]
    for bar, (row, other) in zip((BAR, 10 * BAR, 10 * BAR, 10 * BAR), steps, strict=True):
        for key in "loss", "grad_norm":
            assert abs(row[key] - other[key]) <= bar * row[key]
    begin = load_file(runs / "one" / "probe.safetensors")["rows_without_adapter"]
    for key, rows in make_rows(runs / "one").items():
        assert len(rows) == 2 and ("head" not in key or (rows - begin).abs().mean() > 1e-3)
        assert (rows - make_rows(runs / how)[key]).abs().max() <= 1e-3 * rows.abs().max()


def test_resumed_run_equals_the_whole_one(runs):
    one, halves = (load_file(runs / name / "checkpoint-000004" / "optimizer.safetensors")
                   for name in ("one", "halves"))
    assert one.keys() == halves.keys() and any(key.endswith(".token_rows") for key in one)
    assert all(torch.equal(value, halves[key]) for key, value in one.items())
    one, halves = (load_file(runs / name / "adapter_model.safetensors")
                   for name in ("one", "halves"))
    assert all(torch.equal(value, halves[key]) for key, value in one.items())


def test_run_is_resumed_on_another_number_of_processes(runs, read_metrics):
    last, other = (read_metrics(runs / name)[-1] for name in ("one", "begun on 1"))
    assert abs(last["eval_loss"] - other["eval_loss"]) <= 10 * BAR * last["eval_loss"]
    states = [load_file(runs / name / "probe.safetensors") for name in ("one", "begun on 1")]
    for key in "without_adapter", "rows_without_adapter":  # is of the base model, whenever it is
        assert (states[0][key] - states[1][key]).norm() <= BAR * states[0][key].norm()


def test_run_begins_with_rows_of_another_run(runs, read_metrics):
    last = [row for row in read_metrics(runs / "one") if "eval_loss" in row][-1]
    first = next(row for row in read_metrics(runs / "from one") if "eval_loss" in row)
    assert abs(first["eval_loss"] - last["eval_loss"]) <= BAR * last["eval_loss"]


@pytest.mark.slow
def test_reference_is_of_the_rows_with_which_the_run_began(runs, read_metrics):
    one, two = ({row["step"]: row["loss"] for row in read_metrics(runs / f"dpo on {n}")
                 if "loss" in row} for n in (1, 2))
    assert one.keys() == two.keys() == {1, 2, 3, 4} and abs(one[1] - math.log(2)) <= 1e-6
    assert all(abs(one[step] - two[step]) <= 10 * BAR for step in one)
    references = [load_file(runs / f"dpo on {n}" / "reference.safetensors") for n in (1, 2)]
    for key, values in references[0].items():
        assert (values - references[1][key]).abs().max() <= 1e-4


@pytest.mark.slow
def test_lost_reference_is_computed_with_the_first_rows_again(runs, run_main, read_metrics,
                                                              tmp_path, monkeypatch):
    monkeypatch.chdir(runs)
    flags = [*chat_flags("base"), "--dataset", "rows.jsonl", *FP32, *DPO, "--max_steps", 5]
    losses = []
    for name in "kept", "lost":
        run = shutil.copytree(runs / "dpo on 1", tmp_path / name)
        if name == "lost":
            (run / "reference.safetensors").unlink()
        code, said, err = run_main(*flags, "--output_dir", run)
        assert code == 0 and ("computing log-probs" in said) == (name == "lost"), err
        losses += [row["loss"] for row in read_metrics(run) if row["step"] == 5 and "loss" in row]
    assert abs(losses[0] - losses[1]) <= BAR
    before, after = (load_file(place / "reference.safetensors")["train"]
                     for place in (runs / "dpo on 1", tmp_path / "lost"))
    assert (before - after).abs().max() <= 1e-4
