"""Preferences: losses, rewards and gradients against plain PyTorch; what rows mean; runs that are
stopped and go on.

The reference is transformers' model with bitsandbytes' 4-bit linears in PEFT, fp32, one document
after the other; what it trains is written down here once more, as TRL has it. (TRL itself runs
beside this in benchmarks/preferences.py.)
"""

import dataclasses
import json
import math
import random
import re
import shutil
import types

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, one_process, selected_params
from families import TINY, write_model
from rows import chat_tokenizer, write_jsonl
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from short_runs import write_peft_adapter
from test_step import ALPHA, RANK, load_reference
from transformers import PreTrainedTokenizerFast

import train_fsdp_qlora
from fsdp_qlora.config import Config
from fsdp_qlora.data.encode_examples import encode_fragments
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.packing import pack_rows
from fsdp_qlora.data.preferences import parse_preference
from fsdp_qlora.data.prepare_data import prepare_data, prepare_rows
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.data.sampling import ShuffledSampler
from fsdp_qlora.data.sources import find_fragments
from fsdp_qlora.data.tokenize_documents import both_tokenizers, tokenize
from fsdp_qlora.errors import FatalExample
from fsdp_qlora.evaluation import document_losses, global_loss_inputs, ref_logps
from fsdp_qlora.evaluation.ref_logps import read_ref_logps, tensor_digest, write_ref_logps
from fsdp_qlora.micro_batch.micro_batch import PreferenceInputs
from fsdp_qlora.model.preference_loss import LOSSES, LossSpec, preference_loss
from fsdp_qlora.ranks import RunEnd
from fsdp_qlora.run.status import Status

LENGTH = 64
FLAGS = ["--lora_rank", RANK, "--lora_alpha", ALPHA, "--compute_dtype", "float32", "--max_seq_len",
         LENGTH, "--batch_size", 7, "--report_to", "none"]  # fmt: skip
# {first word of a setting: flags}
LOSS_FLAGS = {
    "dpo": ["--loss", "dpo", "--beta", 0.3],
    "cdpo": ["--loss", "dpo", "--beta", 0.3, "--label_smoothing", 0.2],
    "ipo": ["--loss", "ipo", "--beta", 0.3],
    "simpo": ["--loss", "simpo", "--beta", 2.0, "--simpo_gamma", 0.7],
    "orpo": ["--loss", "orpo", "--beta", 0.4],
    "kto": ["--loss", "kto", "--beta", 0.3, "--undesirable_weight", 1.5],
}  # fmt: skip
# by the tokens of a micro-batch: one document or one pair, or all
SMALL, PAIR, LARGE = (["--micro_batch_tokens", n] for n in (LENGTH, 2 * LENGTH, 2000))
ALL = ["--recompute", "all"]
STARTED = ["--init_adapter", "start"]
SHARED = ["--shard_group_size", 2]
SETTINGS = {  # {processes: {name: flags}}
    1: {"dpo pair": PAIR, "dpo large": LARGE, "dpo recomputed": [*ALL, *PAIR],
        "dpo offloaded": [*ALL, *PAIR, "--offload_params", "--offload_activations"],
        "dpo some": ["--recompute", "1", *LARGE], "dpo started": [*STARTED, *LARGE],
        "cdpo": PAIR, "ipo": PAIR, "simpo": LARGE, "orpo": PAIR,
        "orpo recomputed": [*ALL, *LARGE], "kto": SMALL, "kto started": [*STARTED, *ALL, *LARGE]},
    2: {"dpo split": [*SMALL, *SHARED], "dpo copies": [*PAIR, "--shard_group_size", 1],
        "dpo split copies": [*SMALL, "--shard_group_size", 1],
        "dpo recomputed sharded": [*ALL, *LARGE, *SHARED],
        "dpo started sharded": [*STARTED, *PAIR, *SHARED], "ipo sharded": [*LARGE, *SHARED],
        "simpo split": [*SMALL, *SHARED], "orpo split": [*SMALL, *SHARED],
        "kto split": [*SMALL, *SHARED], "kto copies": [*ALL, *LARGE, "--shard_group_size", 1]},
    4: {"dpo two copies": [*PAIR, *SHARED], "kto two copies": [*SMALL, *SHARED]},
}  # fmt: skip
# what others hold together; by `make test-slow`
RARE = ("dpo large", "dpo recomputed", "orpo recomputed", "dpo copies", "dpo recomputed sharded",
        "ipo sharded", "kto copies", "kto resumed", "dpo resumed by two", "dpo some",
        "dpo started", "dpo started sharded", "simpo split", "orpo split", "dpo split copies",
        "dpo shared", "kto shared", "kto resumed with a damaged reference", "cdpo", "ipo", "simpo",
        "dpo offloaded", "dpo resumed", "dpo resumed with a part of its reference",
        "dpo with dropout", "dpo with dropout, small micro-batches")  # fmt: skip
CASES = [pytest.param(n, name, marks=[pytest.mark.slow] * (n == 4 or name in RARE))
         for n, settings in SETTINGS.items() for name in settings]  # fmt: skip


def write_preferences(directory, name, n, seed):
    """n questions with answers of 1 to 40 words, a few longer than --max_seq_len: pairs in
    <name>.jsonl, and one labeled answer of each in <name>_unpaired.jsonl."""
    draw, words = random.Random(seed), "what is the answer to this plus minus times 1 2 3".split()
    pairs, unpaired = [], []
    for i in range(n):
        text = [" ".join(draw.choices(words, k=draw.randint(1, k))) for k in (9, 40, 40)]
        pairs.append({"prompt": f"{text[0]}\n", "chosen": text[1], "rejected": text[2]})
        unpaired.append({"prompt": f"{text[0]}\n", "completion": text[1], "label": i % 3 > 0})
    write_jsonl(directory / f"{name}.jsonl", pairs)
    write_jsonl(directory / f"{name}_unpaired.jsonl", unpaired)


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    directory = tmp_path_factory.mktemp("preferences")
    model = tiny_model("qwen2", hidden_size=96, intermediate_size=171, num_hidden_layers=2)
    (directory / "model").symlink_to(model)
    write_preferences(directory, "rows", 10, seed=3)
    write_preferences(directory, "eval", 5, seed=4)
    write_peft_adapter(directory, "start")
    values = load_file(directory / "start" / "adapter_model.safetensors")
    torch.manual_seed(13)  # for which KTO's KL term is above 0
    for name in values:
        values[name] = values[name] + torch.randn_like(values[name]) * 0.03
    save_file(values, directory / "now.safetensors")
    return directory


def data_flags(loss):
    unpaired = "_unpaired" * (loss == "kto")
    return ["--dataset", f"rows{unpaired}.jsonl", "--eval_dataset", f"eval{unpaired}.jsonl"]


@pytest.fixture(scope="module")
def results(base, run_jobs, request):
    """results(processes): {setting/name: tensor} of rank_cases.py's `preferences`."""
    done, selected = {}, {params.get("name") for params in selected_params(request)}

    def work(nproc):
        needs_ranks(nproc)
        if nproc not in done:
            settings = {name: [*LOSS_FLAGS[name.split()[0]], *data_flags(name.split()[0]), *FLAGS,
                               *flags]
                        for name, flags in SETTINGS[nproc].items() if name in selected}  # fmt: skip
            job = {"case": "preferences", "out": str(base / f"out-{nproc}"), "model": "model",
                   "dataset": "rows.jsonl", "adapter": "now.safetensors", "settings": settings}
            run_jobs(nproc, [job], cwd=base)
            done[nproc] = load_file(base / f"out-{nproc}")
        return done[nproc]

    return work


# ------------------------------------------------------------------------------------------------
# The reference
# ------------------------------------------------------------------------------------------------


def documents_of(path, tokenizer):
    """[[(prompt, answer), ..] of each row], lists of tokens, by TRL's rules for plain text: the
    answer and EOS are trained. No token reaches across the end of a line."""
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        prompt = tokenizer(row["prompt"])["input_ids"]
        answers = [row[key] for key in ("chosen", "rejected", "completion") if key in row]
        rows.append([(prompt, [*tokenizer(answer, add_special_tokens=False)["input_ids"],
                               tokenizer.eos_token_id]) for answer in answers])  # fmt: skip
    return rows


def mismatch(rows, length):
    """The prompts of rows of one answer, each with the answer of the row before it in a random
    order, or what cutting has left of it."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    answers = [answer[: length - len(prompt)] for ((prompt, answer),) in rows]
    return [[(rows[i][0][0], answers[order[order.index(i) - 1]])] for i in range(len(rows))]


class Reference:
    """What a step and an evaluation are to give, by a model of transformers in PEFT, in its dtype;
    rows are cut to `length` tokens."""

    def __init__(self, base, model, length):
        self.base, self.tokenizer = base, PreTrainedTokenizerFast.from_pretrained(base / "model")
        self.model, self.length, self.done = model, length, {}
        self.params = {name.replace(".default", ""): p for name, p in self.model.named_parameters()
                       if p.requires_grad}  # fmt: skip

    def load(self, path):
        for name, value in load_file(path).items():
            self.params[name].data.copy_(value)

    def token_losses(self, prompt, answer):
        """The losses of all tokens of a document but the first, and which are the answer's."""
        ids = torch.tensor([*prompt, *answer][: self.length])
        logits = self.model(ids[None].to(DEVICE)).logits[0, :-1]
        losses = F.cross_entropy(logits, ids[1:].to(DEVICE), reduction="none")
        return losses, torch.arange(1, len(ids)) >= len(prompt)

    def logps(self, rows):
        """[rows, answers]"""
        def one(document):
            losses, is_answer = self.token_losses(*document)
            return -losses[is_answer.to(DEVICE)].sum()

        return torch.stack([torch.stack([one(document) for document in row]) for row in rows])

    def before(self, rows, started):
        """logps() before the first step."""
        with torch.no_grad():
            if started:
                self.load(self.base / "start" / "adapter_model.safetensors")
                return self.logps(rows)
            with self.model.disable_adapter():
                return self.logps(rows)

    def metrics(self, name, rows, before, kl, good, prefix=""):
        """{name in metrics.jsonl: value}; `before`: logps() of the rows before the first step."""
        flags = LOSS_FLAGS[name]
        beta = flags[3]
        now = self.logps(rows)
        n = torch.tensor([[len([*p, *a][: self.length]) - len(p) for p, a in row] for row in rows])
        n = n.to(DEVICE)
        ratio, values = now - before, {}
        if name in ("dpo", "cdpo"):
            margin = beta * (ratio[:, 0] - ratio[:, 1])
            wrong = 0.2 if name == "cdpo" else 0.0
            losses = (1 - wrong) * F.softplus(-margin) + wrong * F.softplus(margin)
        elif name == "ipo":
            losses = (ratio[:, 0] / n[:, 0] - ratio[:, 1] / n[:, 1] - 0.5 / beta).square()
        elif name == "simpo":
            now = ratio = now / n
            losses = F.softplus(0.7 - beta * (ratio[:, 0] - ratio[:, 1]))
        elif name == "orpo":
            now = ratio = now / n
            odds = ratio - torch.log1p(-ratio.exp())
            chosen = torch.cat([self.token_losses(*row[0])[0] for row in rows])
            losses = chosen.mean() + beta * F.softplus(odds[:, 1] - odds[:, 0])
        else:
            above = beta * (ratio[:, 0] - kl)
            losses = torch.where(good[:, 0], (-above).sigmoid(), 1.5 * above.sigmoid())
            values["kl"] = kl
        rewards = (beta * ratio).detach()
        right = rewards[:, 0] > rewards[:, -1]
        if name == "kto":
            right = torch.where(good[:, 0], above > 0, above < 0)
        c, r = rewards[good].mean(), rewards[~good].mean()
        values |= {"loss": losses.mean(), "rewards/chosen": c, "rewards/rejected": r,
                   "rewards/margins": c - r, "rewards/accuracies": right.float().mean(),
                   "logps/chosen": now[good].mean(), "logps/rejected": now[~good].mean()}
        return {prefix + key: torch.as_tensor(value) for key, value in values.items()}

    def results(self, name, started):
        """Of the rows of the first step and of the evaluation."""
        if (name, started) not in self.done:
            order = torch.randperm(10, generator=torch.Generator().manual_seed(0)).tolist()[:7]
            self.done[name, started] = {**self.of_rows(name, "rows", order, started),
                                        **self.of_rows(name, "eval", [*range(5)], started, "eval_")}
        return self.done[name, started]

    def of_rows(self, name, file, which, started=False, prefix=""):
        """Of the rows of a file with these numbers; without a prefix also the gradients."""
        unpaired = "_unpaired" * (name == "kto")
        rows = documents_of(self.base / f"{file}{unpaired}.jsonl", self.tokenizer)
        before = self.before(rows, started)
        mismatched = mismatch(rows, self.length) if unpaired else rows
        before_mismatched = self.before(mismatched, started)
        self.load(self.base / "now.safetensors")
        with torch.no_grad():
            now = self.logps([mismatched[i] for i in which])
        kl = (now - before_mismatched[which]).mean().clamp(min=0)
        good = torch.tensor([[i % 3 > 0] if unpaired else [True, False] for i in which])
        with torch.set_grad_enabled(not prefix):
            found = self.metrics(name, [rows[i] for i in which], before[which], kl,
                                 good.to(DEVICE), prefix)  # fmt: skip
        if not prefix:
            found["reference"] = before.flatten()
            found["loss"].backward()
            found |= {name: p.grad.clone() for name, p in self.params.items()}
            for p in self.params.values():
                p.grad = None
        return {key: value.detach().double().cpu() for key, value in found.items()}


@pytest.fixture(scope="module")
def expected(base):
    return Reference(base, load_reference(base / "model", "lora"), LENGTH)


@pytest.mark.parametrize("nproc, name", CASES)
def test_loss_rewards_and_gradients_equal_the_reference(nproc, name, results, expected):
    loss = name.split()[0]
    want = expected.results(loss, "started" in name)
    got = {key.removeprefix(f"{name}/"): value for key, value in results(nproc).items()
           if key.startswith(f"{name}/")}  # fmt: skip
    for key, value in want.items():
        if key == "reference":
            if len(got[key]):  # only the rows that are drawn
                drawn = ~got[key].isnan()
                assert drawn.sum() >= 7 * LOSSES.get(loss, LOSSES["dpo"]).documents_per_row
                torch.testing.assert_close(got[key][drawn], value[drawn], rtol=1e-5, atol=1e-4)
            continue
        size = value.norm() if "lora" in key else value.abs().clamp(min=1)
        off = float((got[key].double() - value).norm() / size)
        assert off < (2e-5 if "lora" in key else 1e-5), (key, off)
    assert len(got["reference"]) == (0 if loss in ("simpo", "orpo") else len(want["reference"]))
    assert 0 < want["rewards/accuracies"] <= 1
    if "split" in name and loss != "kto":  # no micro-batch holds two documents of full length
        assert got["micro_batches"] >= 2 * 4
    assert {float(want[key].norm() > 0) for key in want if "lora" in key} == {1.0}
    assert loss != "kto" or max(want["kl"], want["eval_kl"]) > 0.1


def test_answers_of_a_pair_may_be_in_micro_batches_of_two_ranks():
    """The micro-batches are as small as the longest document; every pair is in one micro-batch."""
    draw = random.Random(1)
    lengths = [draw.randint(1, 64) for _ in range(80)]
    for processes, tokens in (1, 128), (2, 64), (2, 300), (3, 64), (4, 1000):
        micro_steps = pack_rows(lengths, processes, tokens, 2)
        assert sorted(
            i for micro_batches in micro_steps for micro_batch in micro_batches for i in micro_batch
        ) == list(range(80))
        for micro_batches in micro_steps:
            assert len(micro_batches) == processes
            assert all(
                sum(lengths[i] for i in micro_batch) <= tokens for micro_batch in micro_batches
            )
            documents = {i for micro_batch in micro_batches for i in micro_batch}
            assert documents == {i ^ 1 for i in documents}
    apart = [i for packed in pack_rows(lengths, 2, 64, 2) for documents in packed
             for i in documents if i ^ 1 not in documents]  # fmt: skip
    assert len(apart) > 40


@pytest.mark.parametrize("losses, value", [([7.0, 7, 0, 0], 0.0), ([0.0] * 4, 1.0)])
def test_kl_estimate_is_that_of_all_rows_and_not_below_0(losses, value, monkeypatch):
    """Not of the few of an evaluation that are computed together: some may be below 0."""
    rows = make_rows([([5, 6 + i], [IGNORE_INDEX, 6 + i]) for i in range(4)], "kto")
    before = dataclasses.replace(
        rows.mismatch(seed=0, max_tokens=9), ref_logps=torch.full((4,), -1.0, dtype=torch.float64)
    )
    rows = dataclasses.replace(rows, mismatched=before)
    found = iter(torch.tensor(losses, dtype=torch.float64).split(2))
    monkeypatch.setattr(global_loss_inputs, "document_losses", lambda run, rows: next(found))
    monkeypatch.setattr(global_loss_inputs, "reshard_all", lambda model: None)
    run = types.SimpleNamespace(device="cpu", model=None)
    batches = (rows.select(torch.arange(4)[part]) for part in (slice(2), slice(2, 4)))
    assert global_loss_inputs.global_loss_inputs(run, rows, batches) == {"kl": value}


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def log_odds(logp):
    return logp - math.log1p(-math.exp(logp))


# of one pair: log-probabilities -3 of 2 tokens and -5 of 4, before the first step -3.5 and -4;
# beta 0.4, 20 % of the labels wrong, a margin of 0.7
REWARDS = 0.4 * 0.5, 0.4 * -1.0
BY_HAND = {  # {loss: (its value, rewards)}
    "dpo": (-0.8 * log_sigmoid(0.6) - 0.2 * log_sigmoid(-0.6), REWARDS),
    "ipo": ((0.5 / 2 + 1.0 / 4 - 1 / 0.8) ** 2, REWARDS),
    "simpo": (-log_sigmoid(0.4 * (-3 / 2 + 5 / 4) - 0.7), (0.4 * -1.5, 0.4 * -1.25)),
    # 9 is the prompt's loss, beside the good answer's 3; a step of 0.01 rows a token
    "orpo": ((9 + 3) * 0.01 - 0.4 * log_sigmoid(log_odds(-1.5) - log_odds(-1.25)),
             (0.4 * -1.5, 0.4 * -1.25)),
    # two rows; 0.01 is the estimate of the KL divergence, bad answers weigh 1.5, good ones 0.8
    "kto": (0.8 / (1 + math.exp(0.4 * (0.5 - 0.01))) + 1.5 / (1 + math.exp(-0.4 * (-1.0 - 0.01))),
            REWARDS)}  # fmt: skip


def one_token_each(n, answers):
    """A micro-batch of n sums of one token each."""
    return types.SimpleNamespace(
        preference=answers, loss_bounds=torch.arange(n + 1), targets=torch.zeros(n))


@pytest.mark.parametrize("loss", BY_HAND)
def test_loss_and_rewards_of_one_pair(loss):
    kind, (value, rewards) = LOSSES[loss], BY_HAND[loss]
    config = Config(loss=loss, beta=0.4, label_smoothing=0.2 * (loss == "dpo"), simpo_gamma=0.7,
                    desirable_weight=0.8, undesirable_weight=1.5)  # fmt: skip
    numbers = [[0, 1], [2.0, 4.0], [-3.5, -4.0], [True, False]]
    value_of_all = torch.tensor(0.01, dtype=torch.float64)
    answers = PreferenceInputs(*(torch.tensor(x).view(-1, kind.documents_per_row) for x in numbers),
                      kl=value_of_all, rows_per_token=value_of_all)  # fmt: skip
    sums = [3.0, 9.0, 5.0, 0.0] if kind.trains_prompt else [3.0, 5.0]
    with one_process():
        got, metrics = preference_loss(torch.tensor(sums, dtype=torch.float64),
                                       one_token_each(len(sums), answers), config)
    assert float(got) == pytest.approx(value, rel=1e-7)
    assert metrics[:3].tolist() == pytest.approx([value, *rewards], rel=1e-7)
    right = {"kto": 2, "simpo": 0, "orpo": 0}.get(loss, 1)
    assert metrics[3:].tolist()[0] == right
    logps = (-1.5, -1.25) if kind.per_token else (-3, -5)
    assert metrics[4:6].tolist() == pytest.approx(logps)


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss != "sft"])
def test_rows_that_pad_a_graph_count_nowhere(loss):
    kind, config = LOSSES[loss], Config(loss=loss, beta=0.5)
    sums = torch.tensor([3.0, 1, 2, 5, 4, 6, 2, 7], dtype=torch.float64)
    documents = torch.arange(4).view(-1, kind.documents_per_row)
    answers = documents, documents + 2.0, -documents - 1.0, documents % 2 == 0
    found = []
    for n in 0, 3:
        padded = (F.pad(tensor, (0, 0, 0, n)) for tensor in answers)
        value = torch.tensor(0.5, dtype=torch.float64)
        micro_batch = one_token_each(
            len(sums), PreferenceInputs(*padded, kl=value, rows_per_token=value))
        with one_process():
            found.append(preference_loss(sums, micro_batch, config))
    for one, another in zip(*found):
        assert torch.equal(one, another)


# ------------------------------------------------------------------------------------------------
# Runs
# ------------------------------------------------------------------------------------------------

STEPS = 6
TRAIN = ["--model", "model", *FLAGS, *LARGE, "--max_steps", STEPS, "--learning_rate", 3e-3,
         "--eval_every", 2, "--save_every", 2, "--keep_checkpoints", 9]  # fmt: skip
# {name: (processes, loss, flags, what is done to a copy of the loss's whole run before)}
RAN = {
    "dpo whole": (1, "dpo", [], None),
    "kto whole": (1, "kto", [], None),
    "dpo shared": (2, "dpo", SHARED, None),
    "kto shared": (2, "kto", SHARED, None),
    "dpo resumed": (1, "dpo", [], "cut"),
    "kto resumed": (1, "kto", [], "cut"),
    "dpo resumed without reference": (1, "dpo", [], "lost"),
    "kto resumed with a damaged reference": (1, "kto", [], "damaged"),
    "dpo resumed with a part of its reference": (1, "dpo", [], "part"),
    "dpo resumed by two": (2, "dpo", SHARED, "cut"),
    "kto resumed by two": (2, "kto", SHARED, "cut"),
    "dpo with dropout": (1, "dpo", ["--lora_dropout", 0.2], None),
    "dpo with dropout, small micro-batches": (1, "dpo", ["--lora_dropout", 0.2, *PAIR], None),
}  # fmt: skip


LIKE_WHOLE = [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE))
              for name in RAN if "whole" not in name]  # fmt: skip
RESUMED = [case for case in LIKE_WHOLE if RAN[case.values[0]][3]]


def cut_run(whole, directory, what):
    """Copy a run as if it had been killed after step 3; and do something to its reference."""
    shutil.copytree(whole, directory)
    for path in [*directory.glob("adapter*"), *directory.glob("checkpoint-00000[46]")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    path = directory / "reference.safetensors"
    if what == "lost":
        path.unlink()
    if what == "damaged":
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
    if what == "part":
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            values = {name: file.get_tensor(name) for name in file.keys()}
        values["eval"][:] = math.nan  # as when it was stopped between two parts
        metadata["eval"] = tensor_digest(values["eval"])
        save_file(values, path, metadata)


@pytest.fixture(scope="module")
def trained(base, run_jobs):
    """trained(name): the directory of one of RAN."""
    printed = {}

    def run(name):
        nproc, loss, flags, what = RAN[name]
        needs_ranks(nproc)
        if not (base / name).exists():
            if what:
                cut_run(run(f"{loss} whole"), base / name, what)
            argv = [*TRAIN, *LOSS_FLAGS[loss], *data_flags(loss), *flags, "--output_dir", name]
            out, _ = run_jobs(
                nproc, [{"argv": list(map(str, argv)), "deterministic": True}], cwd=base)
            printed[name] = out
            (base / name / "printed").write_text(out)
        return base / name

    return run


@pytest.mark.parametrize("name", LIKE_WHOLE)
def test_runs_end_alike(name, trained, read_metrics):
    """Resumed on as many processes: to the byte; on others: as far as sums in another order go."""
    nproc, loss, _, what = RAN[name]
    other = f"{loss} whole" if what or nproc > 1 else "dpo with dropout"
    runs = trained(other), trained(name)
    want, got = (load_file(path / "adapter_model.safetensors") for path in runs)
    is_same = nproc == 1 and "small micro-batches" not in name
    for key, value in want.items():
        assert torch.equal(got[key], value) or not is_same, key
    records = [read_metrics(path) for path in runs]
    assert [r["step"] for r in records[0]] == [r["step"] for r in records[1]]
    changing = {"seconds", "eval_seconds", "tokens_per_second_per_gpu", "micro_batches",
                "peak_memory_gib", "packing_efficiency"}  # fmt: skip
    for one, another in zip(*records):
        if one["step"] < 2:  # rewards differ by rounding alone, and which is larger is chance
            changing = {*changing, "rewards/accuracies", "eval_rewards/accuracies"}
        for key in one.keys() - changing:
            tolerance = 0 if is_same else 1e-3 * max(1, abs(one[key]))
            assert abs(one[key] - another[key]) <= tolerance, (one["step"], key)
    if loss == "dpo":
        evaluation, first, *_, last, _ = records[1]
        for loss in evaluation["eval_loss"], first["loss"]:
            assert math.isclose(loss, math.log(2), rel_tol=1e-6)
        assert last["rewards/margins"] > 0.1


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_reference_of_the_run_before(name, trained):
    """Also what is computed anew: with the adapter as it was before the first step."""
    _, loss, _, what = RAN[name]
    want, got = (load_file(trained(n) / "reference.safetensors") for n in (f"{loss} whole", name))
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=0, equal_nan=True)
    is_computed = "reference: done" in (trained(name) / "printed").read_text()
    assert is_computed == (what != "cut")


@pytest.mark.parametrize("name", [
    "as it is", "truncated", "without metadata", "another's", "of other rows", "longer",
    "of another start", "of another start, resumed"])  # fmt: skip
def test_a_reference_that_is_not_this_runs_is_computed_again(name, tmp_path):
    path = tmp_path / "reference.safetensors"
    found = {"train": torch.full((3,), math.nan, dtype=torch.float64)}
    run = types.SimpleNamespace(
        directory=tmp_path, job=types.SimpleNamespace(digests={"rows": "1"}), saved_step=0,
        status=Status(),
        config=types.SimpleNamespace(init_adapter=None))  # fmt: skip
    run.status.check_lock = lambda: None
    values = torch.arange(4 if name == "longer" else 3, dtype=torch.float64)
    write_ref_logps(run, {"train": values})
    if name == "truncated":
        path.write_bytes(path.read_bytes()[:-9])
    if name == "without metadata":
        save_file({"train": values}, path)
    if name == "another's":
        save_file({"train": values.bfloat16()}, path, {"format": "pt"})
    if name == "of other rows":
        run.job.digests = {"rows": "2"}
    if "another start" in name:
        (tmp_path / "adapter_model.safetensors").touch()
        run.config.init_adapter = tmp_path
    run.saved_step = 2 if "resumed" in name else 0
    with one_process():
        read_ref_logps(run, found)
    is_read = name in ("as it is", "of another start, resumed")
    assert torch.equal(found["train"].isnan(), torch.full((3,), not is_read))


@pytest.mark.slow
def test_a_run_that_is_made_longer_needs_the_reference_of_more_rows(base, run_main, monkeypatch):
    """In a single epoch, of which each step has other rows; it is that of before the first step."""
    monkeypatch.chdir(base)
    flags = [*TRAIN, "--loss", "dpo", *data_flags("dpo"), "--batch_size", 5, "--save_every", 1]
    found = []
    for name, steps in ("longer", 1), ("longer", 2), ("long", 2):
        code, _, err = run_main(*flags, "--max_steps", steps, "--output_dir", name)
        assert code == 0, err
        found.append(load_file(base / name / "reference.safetensors"))
    assert [int((~values["train"].isnan()).sum()) for values in found] == [10, 20, 20]
    for key, value in found[2].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_a_reference_that_takes_longer_than_the_run_may_is_made_in_parts(
        base, trained, run_jobs, monkeypatch):
    """Each start is stopped after one part; none begins anew."""
    argv = [*TRAIN, *LOSS_FLAGS["dpo"], *data_flags("dpo"), "--output_dir", "in parts"]
    computed, statuses, measured = [], [], ref_logps.document_losses

    def stopped(model, batch):
        computed.append(len(batch))
        statuses[-1].stop_reason = "--max_minutes is over"
        return measured(model, batch)

    def few(rows, batch_size, status, must_begin):
        statuses.append(status)
        for numbers, batch in document_losses.evaluation_batches(
                rows, batch_size, status, must_begin):
            for part in torch.arange(len(batch)).split(4):
                if status.stop_reason and not must_begin:
                    return
                must_begin = False
                yield numbers[part], batch.select(part)

    monkeypatch.chdir(base)
    with monkeypatch.context() as patch:
        patch.setattr(ref_logps, "document_losses", stopped)
        patch.setattr(ref_logps, "evaluation_batches", few)
        while sum(computed) < 15:
            assert train_fsdp_qlora.main([str(x) for x in argv]) == 75
    assert computed == [4, 4, 2, 4, 1]
    run_jobs(1, [{"argv": list(map(str, argv)), "deterministic": True}], cwd=base)
    want, got = (load_file(directory / "reference.safetensors")
                 for directory in (trained("dpo whole"), base / "in parts"))  # fmt: skip
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=0, equal_nan=True)


class FirstRows(ShuffledSampler):
    """The same rows in each step."""

    def indices(self, step):
        return torch.arange(self.config.batch_size)


def test_rows_may_come_from_another_source(base, run_main, tmp_path, monkeypatch):
    """One class alone: the loop, the plan and the reference ask it."""
    monkeypatch.setattr(train_fsdp_qlora, "ShuffledSampler", FirstRows)
    monkeypatch.chdir(base)
    code, _, err = run_main(*TRAIN, *LOSS_FLAGS["dpo"], *data_flags("dpo"), "--max_steps", 2,
                            "--batch_size", 2, "--output_dir", tmp_path / "run")
    assert code == 0, err
    known = ~load_file(tmp_path / "run" / "reference.safetensors")["train"].isnan()
    assert known.nonzero().view(-1).tolist() == [0, 1, 2, 3]  # both answers of two pairs


@pytest.mark.slow
def test_an_evaluation_in_parts_is_that_of_all_rows(
        base, trained, run_main, read_metrics, monkeypatch):
    """Also KTO's estimate, which is one for all."""

    def few(rows, *others):
        for numbers, batch in document_losses.evaluation_batches(rows, *others):
            for part in torch.arange(len(batch)).split(2):
                yield numbers[part], batch.select(part)

    whole = read_metrics(trained("kto whole"))
    monkeypatch.chdir(base)
    monkeypatch.setattr(train_fsdp_qlora, "evaluation_batches", few)
    code, _, err = run_main(*TRAIN, *LOSS_FLAGS["kto"], *data_flags("kto"), "--output_dir",
                            "evaluated in parts")  # fmt: skip
    assert code == 0, err
    for one, another in zip(whole, read_metrics(base / "evaluated in parts"), strict=True):
        for key in one.keys() & {"eval_loss", "eval_kl", "eval_rewards/margins"}:
            assert math.isclose(one[key], another[key], rel_tol=1e-4, abs_tol=1e-6), (one, key)
    assert max(row.get("eval_kl", 0) for row in whole) > 0.01


def test_a_run_that_is_stopped_at_once_gets_ahead_with_its_reference(base, run_main, monkeypatch):
    """With a limit shorter than the start, too: each start computes one part at least."""
    monkeypatch.chdir(base)
    argv = *TRAIN, *LOSS_FLAGS["dpo"], *data_flags("dpo"), "--output_dir", "at once"
    for known in 1, 2:
        code, _, err = run_main(*argv, "--max_minutes", 0.00001)
        assert code == 75 and "before the reference was complete" in err
        sets = load_file(base / "at once" / "reference.safetensors").values()
        assert sum(not values.isnan().all() for values in sets) == known


def test_a_kto_evaluation_that_is_stopped_before_its_first_rows_is_no_bug(
        base, trained, run_main, monkeypatch):
    monkeypatch.chdir(base)
    shutil.copytree(trained("kto whole"), base / "stopped")
    for path in [*(base / "stopped").glob("adapter*"), *(base / "stopped").glob("checkpoint-*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    code, _, err = run_main(*TRAIN, *LOSS_FLAGS["kto"], *data_flags("kto"), "--output_dir",
                            "stopped", "--max_minutes", 0.00001)  # fmt: skip
    assert code == 2 and "before the evaluation after step 0 was done" in err


def hinge(answers, config):
    """The loss of SLiC: the chosen answer's reward is to be 1 above that of the rejected one."""
    rewards = config.beta * (answers.logps - answers.ref_logps)
    return F.relu(1 - (rewards[:, 0] - rewards[:, 1])), rewards


def test_a_new_loss_is_one_function_and_its_spec(
        base, trained, run_main, read_metrics, monkeypatch):
    monkeypatch.setitem(LOSSES, "hinge", LossSpec(hinge))
    monkeypatch.chdir(base)
    argv = [*TRAIN, *data_flags("hinge"), "--loss", "hinge", "--output_dir", "hinge"]
    code, out, err = run_main(*argv, "--beta", 0.5)
    assert code == 0, err
    assert "first row, rejected" in out
    rows = read_metrics(base / "hinge")
    of_dpo = read_metrics(trained("dpo whole"))
    assert [row.keys() for row in rows] == [row.keys() for row in of_dpo]
    steps = [row for row in rows if "loss" in row]
    assert math.isclose(steps[0]["loss"], 1, abs_tol=1e-6)  # the model is the reference yet
    assert steps[-1]["loss"] < 0.8
    for row in steps:  # the hinge is convex
        assert row["loss"] >= 1 - row["rewards/margins"] - 1e-9
    code, _, err = run_main(*argv, "--beta", 0.5, "--simpo_gamma", 0.7, "--resume", "never")
    assert code == 2 and "--simpo_gamma 0.7 applies to --loss simpo, not to hinge" in err


@pytest.mark.parametrize("lost, code", [
    pytest.param(False, 0, marks=pytest.mark.slow), (True, 7)])
def test_a_changed_start_adapter_counts_only_where_it_is_needed(
        lost, code, base, run_main, monkeypatch):
    """A resumed run has its reference; where that is lost, no other one takes its place."""
    name = f"start changed {lost}"
    monkeypatch.chdir(base)
    shutil.copytree(base / "start", base / f"{name} adapter")
    argv = [*TRAIN, *LOSS_FLAGS["dpo"], *data_flags("dpo"), "--output_dir", name, "--init_adapter",
            f"{name} adapter"]  # fmt: skip
    assert run_main(*argv, "--max_steps", 2)[0] == 0
    for path in (base / name).glob("adapter*"):
        path.unlink()
    path = base / f"{name} adapter" / "adapter_model.safetensors"
    save_file({key: value * 2 for key, value in load_file(path).items()}, path)
    if lost:
        (base / name / "reference.safetensors").unlink()
    found, _, err = run_main(*argv, "--max_steps", 3)
    assert found == code and ("has changed" in err) == lost, err


@pytest.mark.parametrize("name, flags, text", [
    ("dpo", ["--beta", 0.2], "--beta 0.3 (now 0.2)"),
    ("dpo", ["--label_smoothing", 0.1], "--label_smoothing 0.0 (now 0.1)"),
    ("dpo", ["--loss", "ipo"], "--loss dpo (now ipo)"),
    ("kto", ["--undesirable_weight", 2], "--undesirable_weight 1.5 (now 2.0)"),
    ("kto", ["--desirable_weight", 2], "--desirable_weight 1.0 (now 2.0)")])  # fmt: skip
def test_another_loss_is_another_run(name, flags, text, trained, run_main, monkeypatch, base):
    directory = trained(f"{name} whole")
    monkeypatch.chdir(base)
    code, _, err = run_main(*TRAIN, *LOSS_FLAGS[name], *data_flags(name), "--output_dir", directory,
                            "--max_steps", STEPS + 1, *flags)  # fmt: skip
    assert code == 7 and text in err


# ------------------------------------------------------------------------------------------------
# Data
# ------------------------------------------------------------------------------------------------

QUESTION = "What is 3 plus 4?"
ASKED = {"role": "user", "content": QUESTION}
IN_PARTS = {"role": "user", "content": [{"type": "text", "text": QUESTION}]}
AGAIN = {"role": "user", "content": "Sure?"}
SYSTEM = {"role": "system", "content": "Be brief."}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is 7.", "It is 8."))
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
HEAD = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
TALK = (HEAD, "It is 7.<|im_end|>"), (HEAD, "It is 8.<|im_end|>")
BRIEF = tuple((f"<|im_start|>system\nBe brief.<|im_end|>\n{q}", a) for q, a in TALK)
TURNS = tuple((f"{TALK[0][0]}It is 7.<|im_end|>\n{HEAD.replace(QUESTION, 'Sure?')}", a)
              for _, a in TALK)  # fmt: skip
TEXT = ("3 plus 4 is ", "7.</s>"), ("3 plus 4 is ", "8.</s>")
FROM_TO = [{"from": "human", "value": QUESTION}]
ANSWERED = [{"from": "gpt", "value": text} for text in ("It is 7.", "It is 8.")]
PAIRS = {  # name: (row, (question, answer) twice)
    "TRL, texts": ({"prompt": "3 plus 4 is ", "chosen": "7.", "rejected": "8."}, TEXT),
    "TRL, implicit texts": ({"chosen": "3 plus 4 is 7.", "rejected": "3 plus 4 is 8."},
                            tuple((f"{q[:-1]}", f" {a}") for q, a in TEXT)),
    "TRL, messages": ({"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, TALK),
    "TRL, implicit messages": ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, TALK),
    "JSON text": ({"prompt": json.dumps([ASKED]), "chosen": json.dumps([GOOD]),
                   "rejected": json.dumps([BAD])}, TALK),
    "UltraFeedback": ({"prompt": QUESTION, "prompt_id": "a", "chosen": [ASKED, GOOD],
                       "rejected": [ASKED, BAD], "messages": [ASKED, GOOD], "score_chosen": 8.0,
                       "score_rejected": 2.0}, TALK),
    "a system message in both": ({"prompt": QUESTION, "chosen": [SYSTEM, ASKED, GOOD],
                                  "rejected": [SYSTEM, ASKED, BAD]}, BRIEF),
    "Argilla": ({"instruction": QUESTION, "chosen_response": "It is 7.",
                 "rejected_response": "It is 8."}, TALK),
    "Axolotl, icr": ({"system": "Be brief.", "input": QUESTION, "chosen": "It is 7.",
                      "rejected": "It is 8."}, BRIEF),
    "Axolotl, intel": ({"system": "", "question": QUESTION, "chosen": "It is 7.",
                        "rejected": "It is 8."}, TALK),
    "Axolotl, chat_template": ({"messages": [SYSTEM, ASKED], "chosen": GOOD, "rejected": BAD},
                               BRIEF),
    "LLaMA-Factory, Alpaca": ({"instruction": QUESTION, "input": "", "chosen": "It is 7.",
                               "rejected": "It is 8."}, TALK),
    "LLaMA-Factory, ShareGPT": ({"conversations": FROM_TO, "chosen": ANSWERED[0],
                                 "rejected": ANSWERED[1]}, TALK),
    "OpenAI": ({"input": {"messages": [ASKED], "tools": [], "parallel_tool_calls": True},
                "preferred_output": [GOOD], "non_preferred_output": [BAD]}, TALK),
    "UltraFeedback, spaces and content in parts": (
        {"prompt": f" {QUESTION}\n", "chosen": [IN_PARTS, GOOD], "rejected": [IN_PARTS, BAD]},
        TALK),
    "a prompt of messages in both": (
        {"prompt": [IN_PARTS], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, TALK),
    "turns in both": ({"prompt": QUESTION, "chosen": [ASKED, GOOD, AGAIN, GOOD],
                       "rejected": [ASKED, GOOD, AGAIN, BAD]}, TURNS),
    "a prompt of a space": ({"prompt": " ", "chosen": " 7.", "rejected": " 8."},
                            ((" ", " 7.</s>"), (" ", " 8.</s>"))),
    "a prompt beside messages": ({"prompt": QUESTION, "chosen": [GOOD], "rejected": [BAD]}, TALK),
    "a blank instruction": ({"instruction": "", "input": QUESTION, "chosen": "It is 7.",
                             "rejected": "It is 8."}, TALK),
    "a blank prompt beside input": ({"prompt": " ", "input": QUESTION, "chosen": "It is 7.",
                                     "rejected": "It is 8."}, TALK),
    "a blank prompt beside messages": ({"prompt": "", "messages": [ASKED], "chosen": GOOD,
                                        "rejected": BAD}, TALK),
    "a blank prompt beside a question": ({"prompt": "", "question": QUESTION, "system": "\n",
                                          "context": " ", "chosen": "It is 7.",
                                          "rejected": "It is 8."}, TALK),
    "history": ({"instruction": "Sure?", "history": [[QUESTION, "It is 7."]],
                 "chosen": "It is 7.", "rejected": "It is 8."}, TURNS),
    "null keys of other pairs": ({"prompt": QUESTION, "chosen": None, "rejected": None,
                                  "label": None, "chosen_response": [GOOD],
                                  "rejected_response": [BAD]}, TALK),
    "prompt and messages": ({"prompt": [ASKED], "messages": [AGAIN], "chosen": GOOD,
                             "rejected": BAD}, TALK),
    "messages and conversations": ({"conversations": [AGAIN], "messages": [ASKED], "chosen": GOOD,
                                    "rejected": BAD}, TALK),
    "prompt and questions": ({"question": "Sure?", "instruction": "Sure?", "prompt": QUESTION,
                              "chosen": [GOOD], "rejected": [BAD]}, TALK),
    "instruction and question": ({"question": "Sure?", "instruction": QUESTION,
                                  "chosen": "It is 7.", "rejected": "It is 8."}, TALK),
    "other messages beside conversations": (
        {"messages": [AGAIN, BAD], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, TALK),
    "no messages beside a question": ({"messages": [], "question": QUESTION, "chosen": "It is 7.",
                                       "rejected": "It is 8."}, TALK),
    "system beside conversations": ({"system": "Be brief.", "chosen": [ASKED, GOOD],
                                     "rejected": [ASKED, BAD]}, BRIEF),
}  # fmt: skip
JUDGED = {  # name: (row, (question, answer))
    "TRL, texts": ({"prompt": "3 plus 4 is ", "completion": "7.", "label": True}, TEXT[0]),
    "TRL, messages": ({"prompt": [ASKED], "completion": [BAD], "label": False}, TALK[1]),
    "prompt and response": ({"prompt": QUESTION, "response": "It is 7.", "label": True}, TALK[0]),
    "CSV": ({"prompt": "3 plus 4 is ", "completion": "8.", "label": "False"}, TEXT[1]),
    "a null label beside another": ({"prompt": QUESTION, "response": "It is 7.", "label": None,
                                     "kto_tag": True}, TALK[0]),
    "messages beside an answer": ({"prompt": QUESTION, "response": "It is 7.", "label": True,
                                   "messages": [ASKED, BAD]}, TALK[0]),
    "two answers": ({"prompt": [ASKED], "completion": [GOOD], "response": "It is 8.",
                     "label": True}, TALK[0]),
    "0 and 1": ({"prompt": [ASKED], "completion": [BAD], "label": 0}, TALK[1]),
    "Argilla, capybara": ({"prompt": QUESTION, "completion": [GOOD], "label": True}, TALK[0]),
    "Axolotl, argilla_chat": ({"completion": [ASKED, GOOD], "label": True}, TALK[0]),
    "Axolotl, intel": ({"question": QUESTION, "completion": "It is 7.", "label": True}, TALK[0]),
    "LLaMA-Factory, ShareGPT": ({"conversations": [*FROM_TO, ANSWERED[1]], "kto_tag": False},
                                TALK[1]),
    "LLaMA-Factory, messages": ({"messages": [SYSTEM, ASKED, GOOD], "label": True}, BRIEF[0]),
    "LLaMA-Factory, Alpaca": ({"instruction": QUESTION, "input": "", "output": "It is 8.",
                               "kto_tag": False}, TALK[1]),
}  # fmt: skip
WRONG = {  # name: (loss, row, the type of the error, a part of its text)
    "rows of SFT": ("dpo", {"prompt": "a", "completion": "b"}, FatalExample, "with --loss sft"),
    "unpaired rows": ("dpo", {"prompt": "a", "completion": "b", "label": True}, FatalExample,
                      "with --loss kto"),
    "no label": ("kto", {"prompt": "a", "completion": "b"}, FatalExample, "needs label"),
    "no rejected": ("dpo", {"prompt": "a", "chosen": "b"}, FatalExample,
                    "chosen, but no rejected"),
    "no chosen": ("kto", {"prompt": "a", "rejected": "b"}, FatalExample,
                  "rejected, but no chosen"),
    "null": ("dpo", {"prompt": "a", "chosen": "b", "rejected": None}, ValueError, "is null"),
    "the same": ("dpo", {"prompt": "a", "chosen": "b", "rejected": "b"}, ValueError, "the same"),
    "the same conversation": ("dpo", {"chosen": [ASKED, GOOD], "rejected": [ASKED, GOOD]},
                              ValueError, "the same"),
    "a prompt three times": ("dpo", {"prompt": "2+2=", "chosen": "2+2= 4", "rejected": "2+2= 5"},
                             ValueError, "begin with their prompt: .*--columns prompt=unused"),
    "a question three times": ("kto", {"question": "2+2?\n", "chosen": "2+2? 4",
                                       "rejected": "2+2? 5"}, ValueError, "their question"),
    "one conversation": ("dpo", {"prompt": QUESTION, "chosen": [GOOD], "rejected": [ASKED, BAD]},
                         ValueError, "one answer is a whole conversation"),
    "no list": ("dpo", {"conversations": ASKED, "chosen": GOOD, "rejected": BAD}, ValueError,
                "conversations must be a list of messages"),
    "no list, unpaired": ("kto", {"messages": QUESTION, "label": True}, ValueError,
                          "messages must be a list of messages"),
    "a label": ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "label": True},
                FatalExample,
                "--loss kto"),
    "kinds": ("dpo", {"prompt": "a", "chosen": "b", "rejected": [BAD]}, ValueError, "same kind"),
    "other prompt": ("dpo", {"prompt": "Hello", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
                     FatalExample, "not in the conversation"),
    "empty": ("dpo", {"prompt": "a", "chosen": "b", "rejected": " "}, ValueError, "empty"),
    "words as labels": ("kto", {"prompt": "a", "completion": "b", "label": "good"}, FatalExample,
                        "label 'good', expected true or false"),
    "a score as label": ("kto", {"prompt": "a", "completion": "b", "label": 0.5}, FatalExample,
                         "expected true or false"),
    "no question": ("dpo", {"problem": "a", "chosen": "b", "rejected": "c"}, FatalExample,
                    "no prompt, only problem"),
    "a null prompt": ("dpo", {"prompt": None, "chosen": "b", "rejected": "c"}, ValueError,
                      "prompt is null"),
    "a null answer": ("kto", {"prompt": "a", "completion": None, "label": True}, ValueError,
                      "null in completion"),
    "a null label": ("kto", {"prompt": "a", "completion": "b", "label": None}, ValueError, "null"),
    "an answer and more": ("dpo", {"chosen": "2+2? 4", "rejected": "2+2? 42"}, ValueError,
                           "one answer is the beginning of the other, .* a key of its own, prompt"),
    "a conversation and more": ("kto", {"chosen": [ASKED, GOOD],
                                        "rejected": [ASKED, GOOD, AGAIN, BAD]}, ValueError,
                                "one answer is the beginning of the other"),
    "another system": ("dpo", {"chosen": [SYSTEM, ASKED, GOOD],
                               "rejected": [{**SYSTEM, "content": "Be long."}, ASKED, BAD]},
                       ValueError, "differ in message 1, of system, before their answers: make it "
                       "the same in both, or write the messages that are asked in prompt"),
    "another question": ("dpo", {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, AGAIN, BAD]},
                         ValueError, "differ in message 2, of user"),
    "a blank prompt of messages": ("dpo", {"prompt": " ", "chosen": GOOD, "rejected": BAD},
                                   ValueError, "prompt is blank: nothing is asked"),
    "a blank question": ("kto", {"question": "", "answer": "b", "label": True}, ValueError,
                         "question is blank: nothing is asked"),
    "a pair and a label": ("kto", {"prompt": "a", "chosen": "b", "rejected": "c", "label": True},
                           FatalExample, "chosen and label: keep one .* --columns label=unused"),
    "two labels": ("kto", {"prompt": "a", "completion": "b", "label": True, "kto_tag": False},
                   FatalExample, "has label and kto_tag: keep one of them"),
    "two pairs": ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c", "chosen_response": "d",
                          "rejected_response": "e"}, FatalExample,
                  "has chosen and chosen_response: keep one of them"),
    "tools of OpenAI twice": ("dpo", {"input": {"messages": [ASKED], "tools": [{"name": "x"}]},
                                      "tools": [{"name": "y"}], "preferred_output": [GOOD],
                                      "non_preferred_output": [BAD]}, FatalExample,
                              "has tools and another one in input"),
    "tools of OpenAI beside its input": (
        "dpo", {"input": {"messages": [ASKED]}, "tools": [{"name": "get_day"}],
                "preferred_output": [GOOD], "non_preferred_output": [BAD]}, FatalExample,
        "the chat template leaves out tools"),  # they were given to it
    "nobody answers": ("kto", {"messages": [ASKED, ASKED], "label": True}, ValueError, "train on"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(demo_directory):
    return chat_tokenizer(demo_directory, CHATML)


def decoded(document, tokenizer):
    """(what is read, what is trained) of a document."""
    (((ids, labels),),) = tokenize([document], both_tokenizers(tokenizer))
    trained = [label for label in labels if label != IGNORE_INDEX]
    assert ids[len(ids) - len(trained) :] == trained
    read = tokenizer.decode(ids[: len(ids) - len(trained)]).removeprefix("<s>")
    return read, tokenizer.decode(trained)


@pytest.mark.parametrize("name", PAIRS)
def test_pairs(name, tokenizer):
    row, want = PAIRS[name]
    for loss in "dpo", "kto":
        _, documents, desirable = parse_preference(row, tokenizer, (), loss)
        assert tuple(decoded(document, tokenizer) for document in documents) == want
        assert desirable == [True, False]


@pytest.mark.parametrize("name", JUDGED)
def test_unpaired_answers(name, tokenizer):
    row, want = JUDGED[name]
    _, documents, desirable = parse_preference(row, tokenizer, (), "kto")
    assert decoded(*documents, tokenizer) == want
    assert desirable == [want[1].startswith(("7", "It is 7"))]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows(name, tokenizer):
    loss, row, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        parse_preference(row, tokenizer, (), loss)


def test_rows_of_pairs(tokenizer, tmp_path):
    """Documents are cut one by one; a pair goes where one answer has no trained token left, and is
    counted once."""
    path = write_jsonl(tmp_path / "rows.jsonl", [
        {"prompt": "", "chosen": "1 2 3 4 5 6 7 8 9", "rejected": "9 8"},
        {"prompt": "1 2 3 4 5 6 7 8 9 1 2 3 4 5 6", "chosen": "1", "rejected": "2"},
        {"prompt": "3 plus 4 is ", "chosen": "7", "rejected": "8"}])  # fmt: skip
    pieces, _ = find_fragments(str(path))
    found = list(encode_fragments(pieces, tokenizer, 8, len(tokenizer), loss="dpo"))
    assert [row["kept"] for row in found] == [True, True, False, True, True]
    assert found[0]["truncated"] and found[0]["length"] == 8 and not found[1]["truncated"]
    assert [row["desirable"] for row in found if row["kept"]] == [True, False] * 2
    with one_process():
        rows, line, _ = prepare_rows([str(path)], tokenizer, 8, len(tokenizer), "2026-01-01",
                                     loss="dpo")  # fmt: skip
    assert len(rows) == 2 and len(rows.lengths) == 4
    assert line.startswith("2 pairs, ") and "(2 pairs of prompt and completion; " in line
    assert "1 skipped: nothing to train on within its first 8 tokens" in line
    assert len(rows.select(torch.tensor([1])).lengths) == 2
    assert rows.prompt_lengths[2:].tolist() == [len(tokenizer("3 plus 4 is ")["input_ids"])] * 2


def test_answers_with_the_same_tokens_are_left_out(tokenizer, tmp_path):
    long = " ".join("123456789" * 4)
    path = write_jsonl(tmp_path / "rows.jsonl", [
        {"prompt": "3", "chosen": f"{long} yes", "rejected": f"{long} no"},
        {"prompt": "3", "chosen": "4", "rejected": "4</s>"},
        {"prompt": "3", "chosen": "4", "rejected": "5"}])  # fmt: skip
    pieces, _ = find_fragments(str(path))
    found = list(encode_fragments(pieces, tokenizer, 16, len(tokenizer), loss="dpo"))
    assert [row["kept"] for row in found] == [False, False, True, True]
    assert found[0]["left_out"].endswith("the same tokens within the first 16")


@pytest.mark.parametrize("loss, n", [("dpo", 3), ("kto", 6)])
def test_answers_to_one_question_are_held_out_together(loss, n, tokenizer, tmp_path):
    """And no answer that is held out is mismatched to what is trained, nor the other way round."""
    path = write_jsonl(tmp_path / "rows.jsonl", [
        {"prompt": f"{i} or" * (1 + i % 2 * 3), "chosen": f" yes {i}" * (4 - i % 2 * 3),
         "rejected": f" no {i}"} for i in range(10)])  # fmt: skip
    config = Config(dataset=(str(path),), eval_dataset=("0.3",), loss=loss, max_seq_len=64)
    with one_process():
        parts = prepare_data(config, tmp_path, tokenizer, len(tokenizer), "2026-01-01")
    assert [len(rows) for rows in parts] == [n * 7 // 3, n]
    examples = [{*rows.example_ids.tolist()} for rows in parts]
    assert [len(one) for one in examples] == [7, 3] and len(examples[0] | examples[1]) == 10
    for rows in parts:
        if loss == "kto":
            assert {*rows.mismatched.answer_starts.tolist()} == {
                *(rows.starts + rows.prompt_lengths).tolist()}  # fmt: skip
            answers = dict(zip((rows.starts + rows.prompt_lengths).tolist(),
                               (rows.lengths - rows.prompt_lengths).tolist()))  # fmt: skip
            whole = [n + answers[start] for n, start in zip(
                rows.prompt_lengths.tolist(), rows.mismatched.answer_starts.tolist())]
            assert rows.mismatched.lengths.tolist() == whole  # no more is cut than 64 tokens
            assert len(rows) < 7 or max(whole) > rows.lengths.max()


def test_rows_of_another_loss_or_label_are_other_rows(tokenizer, tmp_path):
    row, path = {"prompt": "3", "completion": "4", "label": True}, tmp_path / "rows.jsonl"
    write_jsonl(path, [row, {**row, "label": False}])
    settings = [str(path)], tokenizer, 8, len(tokenizer), "2026-01-01"
    with one_process():
        rows, *_ = prepare_rows(*settings, loss="kto")
        assert rows.document_hashes[0] != rows.document_hashes[1]
        with pytest.raises(RunEnd, match="or train on such examples with --loss kto"):
            prepare_rows(*settings, loss="dpo")


def test_only_the_last_answer_is_unpaired(tokenizer):
    row = {"instruction": "b", "history": [["x", "y"]], "output": "a", "label": False}
    _, documents, _ = parse_preference(row, tokenizer, (), "kto")
    assert decoded(*documents, tokenizer)[1] == "a<|im_end|>"


EARLIER = {  # {where earlier turns are: what a row has of them and of the question}
    "history": {"instruction": "Sure?", "history": [[QUESTION, "It is 7."]]},
    "prompt": {"prompt": [ASKED, GOOD, AGAIN]},
    "prompt, marked": {"prompt": [ASKED, GOOD | {"train": True}, AGAIN]},
    "messages": {"messages": [ASKED, GOOD, AGAIN]},
    "conversations": {"conversations": [*FROM_TO, ANSWERED[0], AGAIN]},
}  # fmt: skip


@pytest.mark.parametrize("where", EARLIER)
def test_earlier_answers_of_a_pair_count_in_neither(where, tokenizer):
    as_texts = where == "history"
    answers = [a["content"] if as_texts else [a] for a in (GOOD, BAD)]
    row = EARLIER[where] | dict(zip(("chosen", "rejected"), answers))
    _, documents, _ = parse_preference(row, tokenizer, (), "dpo")
    assert tuple(decoded(document, tokenizer) for document in documents) == TURNS


def test_an_answer_without_a_prompt_has_room_after_another_one():
    """Nothing predicts the first token of a row, but after a prompt it counts."""
    rows = make_rows([([5, 6, 7], [5, 6, 7]), ([1, 2, 8], [IGNORE_INDEX, IGNORE_INDEX, 8])], "kto")
    other = rows.mismatch(seed=0, max_tokens=9)
    for i in range(2):
        ids, labels = other.document(i)
        assert (labels[1:] != IGNORE_INDEX).sum() <= other.n_loss_tokens[i]
    assert other.document(1)[1].tolist() == [IGNORE_INDEX, IGNORE_INDEX, 5, 6, 7]


def test_mismatched_rows_have_each_answer_once(tokenizer):
    prompts, answers = ([[k] * (i % 3 + k) for i in range(9)] for k in (1, 5))
    rows = make_rows(
        [(p + a, [IGNORE_INDEX] * len(p) + a) for p, a in zip(prompts, answers)], "kto")
    other = rows.mismatch(seed=3, max_tokens=8)
    found = [tuple(t.tolist() for t in other.document(i)) for i in range(9)]
    for (ids, labels), prompt, length in zip(found, prompts, other.lengths.tolist()):
        assert ids[: len(prompt)] == prompt and len(ids) == length <= 8
        assert labels == [IGNORE_INDEX] * len(prompt) + ids[len(prompt) :]
    longer = rows.mismatch(seed=3, max_tokens=99)
    found = [longer.document(i)[0].tolist()[len(prompts[i]) :] for i in range(9)]
    assert sorted(found) == sorted(answers)
    assert sum(a == b for a, b in zip(found, answers)) < 9


BAD_RUNS = {  # name: (flags, rows, what stderr says)
    "one kind": (["--loss", "kto"], [{"prompt": "a", "completion": "b", "label": True}] * 4,
                 "4 of 4 rows have label true"),
    "one row a step": (["--loss", "kto", "--batch_size", 1], [], "Use at least 2"),
    "beta 0": (["--loss", "dpo", "--beta", 0], [], "--beta 0.0: must be positive"),
    "beta of sft": (["--beta", 0.1], [], "--beta 0.1 applies to --loss dpo or ipo"),
    "margin of dpo": (["--loss", "dpo", "--simpo_gamma", 1], [],
                      "applies to --loss simpo, not to dpo"),
    "all alike": (["--loss", "dpo"], [{"prompt": "a", "chosen": "b", "rejected": "b"}] * 3,
                  "none of its 3 examples can be trained on: 3 skipped: both answers are the same"),
    "one answer": (["--loss", "ipo"], [{"prompt": "a", "chosen": "b"}], "but no rejected"),
    "sft of pairs": ([], [{"prompt": "a", "chosen": "b", "rejected": "c"}],
                     "pairs of answers need --loss dpo"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_RUNS)
def test_bad_input_ends_with_one_line_before_a_weight_is_read(name, run_main, base, tmp_path):
    flags, rows, text = BAD_RUNS[name]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    code, out, err = run_main("--model", base / "model", "--dataset", path, "--output_dir",
                              tmp_path / "run", "--report_to", "none", *flags)  # fmt: skip
    assert code in (2, 4) and text in err and err.count("\n") == 1
    assert "base model loaded" not in out


@pytest.mark.slow
def test_a_loss_without_slope_ends_no_run(run_main, read_metrics, base, monkeypatch):
    """After the first step all answers are so far from the estimate that no gradient is left."""
    monkeypatch.chdir(base)
    code, _, err = run_main(*TRAIN, *data_flags("kto"), "--loss", "kto", "--beta", 1e5,
                            "--output_dir", "saturated")  # fmt: skip
    assert code == 0, err
    norms = [row["grad_norm"] for row in read_metrics(base / "saturated") if "loss" in row]
    assert norms[0] > 0 and norms[1:] == [0] * 5


@pytest.mark.parametrize("name, settings, flags", [
    ("qwen3", {"attention_dropout": 0.3}, ["--adapter", "dora"]),
    pytest.param("qwen3_moe", {}, [], marks=pytest.mark.slow)])
def test_models_own_dropout_is_off_and_experts_are_trained(
        name, settings, flags, run_main, demo_directory, tmp_path):
    """The first loss of DPO is ln 2 only if the model computes what the reference is of."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    write_preferences(tmp_path, "rows", 8, seed=1)
    config = TINY[name](len(tokenizer))
    config.update(settings)
    write_model(tmp_path / name, config)
    tokenizer.save_pretrained(tmp_path / name)
    code, out, err = run_main(
        "--model", tmp_path / name, "--dataset", tmp_path / "rows.jsonl", "--output_dir",
        tmp_path / "run", "--report_to", "none", "--loss", "dpo", "--max_steps", 8,
        "--learning_rate", 1e-2, "--batch_size", 4, *flags)  # fmt: skip
    assert code == 0, err
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert math.isclose(steps[0]["loss"], math.log(2), rel_tol=1e-6)
    assert steps[-1]["loss"] < 0.6 and steps[-1]["rewards/accuracies"] > 0.7


@pytest.mark.slow
def test_the_demo_learns_a_preference(run_main, tmp_path):
    code, out, err = run_main("--loss", "dpo", "--max_steps", 12, "--learning_rate", 1e-3,
                              "--eval_dataset", 0.1, "--eval_every", 0,
                              "--output_dir", tmp_path / "run")  # fmt: skip
    assert code == 0, err
    assert "first row, chosen: '[masked: What is" in out and "first row, rejected: " in out
    assert ("reference: computing log-probs of 192 training pairs"
            " of 449 (the others are known, or no step uses them) and 63 evaluation pairs\n"
            ) in out  # fmt: skip
    numbers = r"chosen +-?[\d.]+, rejected +-?[\d.]+"
    both = rf" .* \| margin .* \| accuracy .* % \| rewards {numbers} \| "
    assert re.search(rf"\nstep{both}lr ", out)
    assert re.search(rf"\neval{both}logps {numbers}( \| best so far)?\n", out)
    before, after = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()
                     if "eval_loss" in line]  # fmt: skip
    assert before["eval_rewards/accuracies"] == 0  # all rewards are 0, and a tie is wrong
    # of pairs that are trained in no form: so few steps learn the others, not yet the rule
    assert after["eval_rewards/accuracies"] > 0.3 and after["eval_loss"] < 0.75
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()
             if "learning_rate" in line]  # fmt: skip
    assert steps[-1]["rewards/accuracies"] > 0.6 and steps[-1]["loss"] < 0.68
