"""Whole optimizer steps by the command line, against one process of plain PyTorch.

The reference is transformers' model with bitsandbytes' 4-bit linears in PEFT: it takes the rows of
a step one by one, sums loss and gradients, clips, and lets the script's optimizer update one vector
laid out as a layer's adapter is. What the script must give is that, whatever the processes,
groups, micro-batches and memory flags: the losses and gradient norms of two steps, and the adapter
after them.
"""

import json
import math
import random
import zlib

import pytest
import torch
import torch.nn.functional as F
from conftest import DEVICE, needs_ranks, read_rows, selected_params
from families import TINY, auto_class, write_model
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerFast, BitsAndBytesConfig

from fsdp_qlora.config import Config
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.dropout import N_SITES, drop
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.pretrained.from_config import make_architecture
from fsdp_qlora.run.resolve import resolve_steps
from train_fsdp_qlora import learning_rate, make_optimizer

BATCH, RANK, ALPHA, PEAK, DROPOUT = 7, 4, 64, 1e-2, 0.3
STEPS = 2
FLAGS = ["--dataset", "rows.jsonl", "--batch_size", BATCH, "--max_steps", STEPS,
         "--lora_rank", RANK, "--lora_alpha", ALPHA, "--learning_rate", PEAK,
         "--compute_dtype", "float32", "--max_seq_len", 64]  # fmt: skip
KINDS = {
    "lora": [],
    "dropout": ["--lora_dropout", DROPOUT],
    "dora": ["--adapter", "dora"],
    "some": ["--target_modules", "q_proj", "v_proj", "down_proj"],
}
TARGETS = {"some": ["q_proj", "v_proj", "down_proj"]}
SMALL = ["--micro_batch_tokens", 64]  # the longest row
SHARED = ["--context_parallel_size", 2, "--micro_batch_tokens", 50]  # of two ranks
MIDDLE = ["--micro_batch_tokens", 100]
LARGE = ["--micro_batch_tokens", 1000]
MEMORY = {
    "all recomputed": ["--recompute", "all"],
    "none recomputed": ["--recompute", "none"],
    "two offloaded": ["--recompute", "2", "--offload_activations"],
    "weights offloaded": ["--offload_params", "--recompute", "none"],
    "everything offloaded": ["--offload_params", "--offload_activations", "--recompute", "all"],
}
KEPT = "not resharded"  # in a run's name: gathered weights stay, which the plan chooses and no flag
GATHERED = {KEPT: [], f"{KEPT}, offloaded": MEMORY["two offloaded"]}
# (processes, kind): {name of a run: its flags}
RUNS = {
    (1, "lora"): {"small micro-batches": SMALL, "middle micro-batches": MIDDLE,
                  "one micro-batch": LARGE,
                  **{name: flags + MIDDLE for name, flags in MEMORY.items()}},
    (1, "dropout"): {"small micro-batches": SMALL, "one micro-batch": LARGE,
                     "recomputed": [*MEMORY["all recomputed"], *MIDDLE],
                     "offloaded": [*MEMORY["everything offloaded"], *MIDDLE]},
    (1, "dora"): {"recomputed": [*MEMORY["all recomputed"], *MIDDLE],
                  "kept": [*MEMORY["none recomputed"], *MIDDLE]},
    (1, "some"): {"kept": [*MEMORY["none recomputed"], *MIDDLE],
                  "offloaded": [*MEMORY["two offloaded"], *SMALL]},
    (2, "lora"): {"a copy each": [*SMALL, "--shard_group_size", 1],
                  "sharded, small micro-batches": [*SMALL, "--shard_group_size", 2],
                  **{name: [*flags, *MIDDLE, "--shard_group_size", 2]
                     for name, flags in (MEMORY | GATHERED).items()},
                  "sharded, shared micro-batches": [*SHARED, "--shard_group_size", 2],
                  "a copy each, shared micro-batches": [*SHARED, "--shard_group_size", 1,
                                                        "--recompute", "2"],
                  "a copy each, offloaded": [*MEMORY["everything offloaded"], *SMALL,
                                             "--shard_group_size", 1]},
    (2, "dropout"): {"a copy each": [*MIDDLE, "--shard_group_size", 1],
                     "sharded": [*SMALL, "--shard_group_size", 2, "--recompute", "2"],
                     "shared micro-batches": [*SHARED, "--shard_group_size", 2]},
    (2, "dora"): {"sharded": [*MIDDLE, "--shard_group_size", 2],
                  "shared micro-batches": [*SHARED, "--shard_group_size", 1]},
    (3, "lora"): {"sharded": [*SMALL, "--shard_group_size", 3],
                  "shared micro-batches": ["--context_parallel_size", 3, "--micro_batch_tokens",
                                           22, "--shard_group_size", 3]},
    (4, "lora"): {"sharded": [*MIDDLE, "--shard_group_size", 4],
                  "two copies": [*SMALL, "--shard_group_size", 2],
                  "two copies, two shared micro-batches": [*SHARED, "--shard_group_size", 2],
                  f"two copies, {KEPT}": [*MEMORY["two offloaded"], *SMALL,
                                          "--shard_group_size", 2],
                  "a copy each": [*SMALL, "--shard_group_size", 1]},
    (4, "dropout"): {"two copies": [*MIDDLE, "--shard_group_size", 2]},
}  # fmt: skip
# whose parts others have, by `make test-slow`
SLOW_RUNS = {
    (1, "lora", "middle micro-batches"), (1, "lora", "one micro-batch"),
    (1, "lora", "two offloaded"), (1, "lora", "weights offloaded"),
    (1, "dropout", "small micro-batches"), (1, "dropout", "recomputed"),
    (1, "dropout", "one micro-batch"), (1, "dora", "kept"), (1, "some", "kept"),
    (2, "lora", "none recomputed"), (2, "lora", "two offloaded"), (2, "lora", "weights offloaded"),
    (2, "lora", "a copy each, shared micro-batches"),
    (2, "lora", "a copy each, offloaded"), (2, "lora", KEPT), (2, "dropout", "a copy each"),
    (2, "dropout", "sharded"), (2, "lora", f"{KEPT}, offloaded"),
    (2, "dropout", "shared micro-batches"), (2, "dora", "shared micro-batches"),
    (1, "some", "offloaded")}  # fmt: skip


def slow_if_rare(*run):
    return [pytest.mark.slow] * (run in SLOW_RUNS)


CASES = [pytest.param(n, kind, name,
                      marks=[pytest.mark.slow] * (n > 2 or (n, kind, name) in SLOW_RUNS))
         for (n, kind), runs in RUNS.items() for name in runs]  # fmt: skip


def write_uneven_rows(path):
    """10 rows of 6 to 64 tokens, of which few or nearly all are trained."""
    draw, words = random.Random(3), "what is the answer to this plus minus times 1 2 3".split()
    with path.open("w") as file:
        for n in (1, 30, 4, 3, 12, 2, 22, 7, 1, 16):
            parts = [" ".join(draw.choices(words, k=k)) for k in (draw.randint(1, 9), n)]
            file.write(json.dumps({"prompt": parts[0], "completion": parts[1]}) + "\n")


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    """The directory of model/ and rows.jsonl; attention has biases, shards begin inside rows."""
    directory = tmp_path_factory.mktemp("step")
    model = tiny_model("qwen2", hidden_size=96, intermediate_size=171)
    (directory / "model").symlink_to(model)
    write_uneven_rows(directory / "rows.jsonl")
    return directory


@pytest.fixture(scope="module")
def runs(base, run_jobs, request):
    """runs(processes, kind, name): the directory of a run; those on as many processes are made
    together, of SLOW_RUNS the ones whose tests are selected."""
    done = set()
    selected = {(x["nproc"], x.get("kind", "lora"), x.get("name"))
                for x in selected_params(request) if "nproc" in x}  # fmt: skip

    def directory(nproc, kind, name):
        return f"{nproc}, {kind}, {name}"

    def work(nproc, wanted, name):
        needs_ranks(nproc)
        if nproc not in done:
            done.add(nproc)
            jobs = [
                {"argv": [*map(str, ["--model", "model", *FLAGS, *KINDS[kind], *flags,
                                     "--output_dir", directory(n, kind, each)])],
                 "plan": {"reshard_after_forward": KEPT not in each}}
                for (n, kind), of_kind in RUNS.items() if n == nproc
                for each, flags in of_kind.items()
                if (n, kind, each) not in SLOW_RUNS - selected
            ]  # fmt: skip
            run_jobs(nproc, jobs, cwd=base)
        return base / directory(nproc, wanted, name)

    return work


def all_rows(base):
    """The rows as (input_ids, labels)."""
    return read_rows(base / "rows.jsonl", PreTrainedTokenizerFast.from_pretrained(base / "model"))


def rows_of_step(step, rows):
    """Which rows a step has: every epoch is a new shuffle, seeded with its number."""
    order = []
    for epoch in range(math.ceil(step * BATCH / len(rows))):
        generator = torch.Generator().manual_seed(epoch)
        order += torch.randperm(len(rows), generator=generator).tolist()
    return [rows[i] for i in order[(step - 1) * BATCH : step * BATCH]]


class Dropout(torch.nn.Module):
    """In place of PEFT's: the values that are dropped at this place, from `keys` a token."""

    def __init__(self, site):
        super().__init__()
        self.site, self.keys = site, None

    def forward(self, x):
        return drop(x[0], self.keys, self.site, DROPOUT)[None]


def load_reference(directory, kind, skipped=None, dora=False, **settings):
    """transformers + bitsandbytes + PEFT in fp32 on one process; without what is in 4 bits in the
    file the linears `skipped` stay whole, None: the head."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=skipped,
    )  # fmt: skip
    model_config = AutoConfig.from_pretrained(directory)
    # transformers 5.20 gives Gemma 2 SDPA, which ignores the cap
    has_cap = getattr(model_config.get_text_config(), "attn_logit_softcapping", None)
    model = auto_class(model_config).from_pretrained(
        directory, quantization_config=quantization, dtype=torch.float32,
        device_map={"": DEVICE}, attn_implementation="eager" if has_cap else None,
    ).dequantize()  # once; the same numbers as at each use  # fmt: skip
    targets = kind if isinstance(kind, list) else TARGETS.get(kind, "all-linear")
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_dora=dora or kind == "dora", target_modules=targets,
        exclude_modules=".*vision.*", task_type="CAUSAL_LM", **settings)  # fmt: skip
    return get_peft_model(model, config).train()


def put_dropout(model):
    """The script's dropout in front of every A; the sites are told by number."""
    sites = ["q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj"]
    made = []
    for name, module in model.named_modules():
        if hasattr(module, "lora_dropout"):
            layer, linear = int(name.split(".layers.")[1].split(".")[0]), name.split(".")[-1]
            site = next(i for i, names in enumerate(sites) if linear in names.split())
            made.append(Dropout(layer * N_SITES + site))
            module.lora_dropout = torch.nn.ModuleDict({"default": made[-1]})
    return made


class Vector:
    """All adapters of a model as one vector, laid out as the script's, with its optimizer."""

    def __init__(self, base, kind, model):
        targets = ("q_proj", "v_proj", "down_proj") if kind == "some" else ("all-linear",)
        arch = make_architecture(AutoConfig.from_pretrained(base / "model"))
        config = Config(lora_rank=RANK, lora_alpha=ALPHA, target_modules=targets,
                        adapter="dora" if kind == "dora" else "lora")  # fmt: skip
        adapted = [
            x.name for x in arch.all_linears()
            if targets == ("all-linear",) or x.name.split(".")[-1] in targets
        ]  # fmt: skip
        spec = make_layer_specs(arch, adapted, config.adapter_settings)[0]  # all are alike
        self.params = {
            n.replace(".default", "").replace("vector.weight", "vector"): p
            for n, p in model.named_parameters() if p.requires_grad
        }  # fmt: skip
        assert self.params.keys() == get_peft_model_state_dict(model).keys()
        self.places = {}
        for i in range(arch.n_layers):
            for (linear, key), (where, shape) in spec.adapter_slices().items():
                name = f"base_model.model.model.layers.{i}.{linear}.{key}"
                start = i * spec.n_adapter_values
                self.places[name] = slice(start + where.start, start + where.stop), shape
        assert self.places.keys() == self.params.keys()
        self.weights = torch.nn.Parameter(torch.zeros(arch.n_layers * spec.n_adapter_values,
                                                      device=DEVICE))  # fmt: skip
        self.weights.grad = torch.zeros_like(self.weights)
        self.optimizer = make_optimizer(self.weights, config)

    def start(self):
        """PEFT's distribution, drawn as the script does for the seed 0."""
        for name, p in self.params.items():
            if name.endswith("lora_A.weight"):
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                bound = 1 / math.sqrt(p.shape[1])
                p.data = torch.empty(p.shape).uniform_(-bound, bound, generator=generator)
                p.data = p.data.to(DEVICE)
            where, _ = self.places[name]
            self.weights.data[where] = p.data.flatten()

    def step(self, rate):
        """Clips to a norm of 1 and updates. Returns the norm before."""
        for name, p in self.params.items():
            self.weights.grad[self.places[name][0]] = p.grad.flatten()
            p.grad = None
        norm = self.weights.grad.norm().item()
        self.weights.grad.mul_(min(1.0, 1.0 / norm))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        for name, p in self.params.items():
            where, shape = self.places[name]
            p.data = self.weights.data[where].view(shape).clone()
        return norm


def token_keys(step, row, n):
    """What the dropout of a row's tokens follows from: seed 0, the step, the row's place in it."""
    return hash_ints(hash_ints(hash_ints(torch.tensor(step)) + row) + torch.arange(n))


@pytest.fixture(scope="module")
def expected(base):
    """expected(kind): [(loss, gradient norm) of each step], the adapter before and after them."""
    done = {}

    def compute(kind):
        if kind in done:
            return done[kind]
        model, rows, steps = load_reference(base / "model", kind), all_rows(base), []
        vector = Vector(base, kind, model)
        vector.start()
        before = {name: p.detach().clone() for name, p in vector.params.items()}
        dropouts = put_dropout(model) if "--lora_dropout" in KINDS[kind] else []
        for step in range(1, STEPS + 1):
            batch, loss = rows_of_step(step, rows), 0.0
            trained = sum(int((labels[1:] != -100).sum()) for _, labels in batch)
            for i, (ids, labels) in enumerate(batch):
                for dropout in dropouts:
                    dropout.keys = token_keys(step, i, len(ids)).to(DEVICE)
                logits = model(ids[None].to(DEVICE)).logits[0, :-1].float()
                target = labels[1:].to(DEVICE)
                part = F.cross_entropy(logits, target, reduction="sum") / trained
                part.backward()
                loss += part.item()
            # one step of warm-up, then a cosine to 0 after the last step
            rate = PEAK * 0.5 * (1 + math.cos(math.pi * (step - 1) / STEPS))
            steps.append((loss, vector.step(rate)))
        after = {name: p.detach().cpu() for name, p in vector.params.items()}
        done[kind] = steps, {name: p.cpu() for name, p in before.items()}, after
        return done[kind]

    return compute


def distance(one, other):
    return math.sqrt(sum(float((one[name] - other[name]).norm()) ** 2 for name in other))


@pytest.mark.parametrize("nproc, kind, name", CASES, ids=lambda value: str(value))
def test_steps_equal_the_reference(nproc, kind, name, runs, expected):
    directory = runs(nproc, kind, name)
    steps, before, after = expected(kind)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    got = load_file(directory / "adapter_model.safetensors")
    assert got.keys() == after.keys()
    off = distance(got, after) / distance(before, after)
    assert len(rows) == STEPS
    for row, (loss, norm) in zip(rows, steps, strict=True):
        assert norm > 1.5, "nothing is clipped"
        assert abs(row["loss"] - loss) <= 1e-5 * loss
        assert abs(row["grad_norm"] - norm) <= 1e-5 * norm
    assert off <= 1e-3


@pytest.mark.parametrize("nproc, name", [
    pytest.param(nproc, name, marks=slow_if_rare(nproc, "lora", name))
    for nproc, names in ((1, MEMORY), (2, MEMORY | GATHERED)) for name in list(names)[1:]])
def test_memory_flags_change_no_bit(nproc, name, runs, read_metrics):
    first, other = (runs(nproc, "lora", run) for run in (next(iter(MEMORY)), name))
    plan = json.loads((other / "train_config.json").read_text())["plan"]
    assert plan["reshard_after_forward"] == (name not in GATHERED)
    for row, same in zip(read_metrics(first), read_metrics(other), strict=True):
        for key in "loss", "grad_norm":  # on GPUs attention's backward adds in any order
            bar = 0 if DEVICE == "cpu" else 1e-5
            assert abs(row[key] - same[key]) <= bar * row[key]
    first, other = (load_file(run / "adapter_model.safetensors") for run in (first, other))
    assert first.keys() == other.keys() and len(first) == 3 * 7 * 2
    if DEVICE == "cpu":
        assert all(torch.equal(value, other[key]) for key, value in first.items())


@pytest.mark.parametrize("nproc", [
    1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_speed_is_per_gpu(nproc, runs, read_metrics):
    for row in read_metrics(runs(nproc, "lora", next(iter(RUNS[nproc, "lora"])))):
        tokens = row["tokens_per_second_per_gpu"] * row["seconds"] * nproc
        assert tokens == pytest.approx(row["tokens"], rel=1e-9) and row["tokens"] > 20
        assert 0.5 < row["packing_efficiency"] <= 1  # of the micro-batches of all ranks


def test_tensorboard_has_the_same_numbers_at_the_same_steps(runs, read_metrics):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = runs(1, "lora", "small micro-batches")
    rows, events = read_metrics(directory), EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(rows[0])
    for key in rows[0]:
        seen = [(event.step, event.value) for event in events.Scalars(key)]
        assert seen == [(i, pytest.approx(row[key], rel=1e-6)) for i, row in enumerate(rows, 1)]


@pytest.mark.parametrize("epochs, steps", [(1, 2), (0.5, 1), (0.8, 2), (1.5, 3), (2.8, 4)])
def test_epochs_are_rounded_up_to_whole_steps(epochs, steps):
    """10 rows, 7 a step."""
    assert resolve_steps(Config(num_epochs=epochs, batch_size=7), 10).max_steps == steps


def test_run_has_the_steps_of_its_epochs(base, run_main, monkeypatch, tmp_path):
    monkeypatch.chdir(base)
    flags = ["--model", "model", "--dataset", "rows.jsonl", "--batch_size", 7, "--output_dir"]
    code, out, err = run_main(*flags, tmp_path / "run", "--num_epochs", 1.5)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [(row["step"], row["rows"]) for row in rows] == [(1, 7), (2, 7), (3, 7)]
    config = Config(max_steps=3, learning_rate=2e-4)
    assert 0 < rows[-1]["learning_rate"] == learning_rate(3, config)


# ------------------------------------------------------------------------------------------------
# Families on two processes
# ------------------------------------------------------------------------------------------------

SHARDED = ["cohere_qk_norm", "gemma3", "granite", "phi4_mini", "smollm3_window"]


@pytest.fixture(scope="module")
def family_runs(base, run_jobs, demo_directory, request):
    needs_ranks(2)
    jobs = {1: [], 2: []}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    for name in (params["family"] for params in selected_params(request) if "family" in params):
        write_model(base / name, TINY[name](len(tokenizer)))
        tokenizer.save_pretrained(base / name)
        for nproc in jobs:
            argv = ["--model", name, *FLAGS, *SMALL, "--shard_group_size", nproc,
                    "--output_dir", f"{name} on {nproc}"]  # fmt: skip
            jobs[nproc].append({"argv": list(map(str, argv))})
    for nproc in jobs:
        run_jobs(nproc, jobs[nproc], cwd=base)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("family", SHARDED)
def test_families_give_the_same_on_two_processes(family, family_runs, read_metrics):
    """What they give on one is in test_layer.py; of mixtures, in test_layouts.py."""
    one, two = (family_runs / f"{family} on {nproc}" for nproc in (1, 2))
    rows = zip(read_metrics(one), read_metrics(two), strict=True)
    for bar, (row, other) in zip((1e-5, 1e-4), rows):  # the second one's is after an 8-bit update
        for key in "loss", "grad_norm":
            assert row[key] > 0 and abs(row[key] - other[key]) <= bar * row[key]
