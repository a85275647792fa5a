#!/usr/bin/env python3
"""Measure train_fsdp_qlora.py on a GPU machine: named cases, each a torchrun of its own.

    python benchmarks/run.py memory --out bench [--cases 70b-2k,70b-8k] [--flags='--attn sdpa']
    python benchmarks/run.py scale --out bench        # 2 GPUs against all of the machine
    python benchmarks/run.py speed --out bench [--peer baseline_trl.py]    # TRL beside it
    python benchmarks/run.py profile --out bench --cases 70b8-nooffload     # of any group
    python benchmarks/run.py ceiling llama-2-70b:4096 # of bf16 products on 4,096 tokens
    python benchmarks/run.py memory --list

Written to --out after each case: GROUP.md, the table; results.jsonl, one object a case, appended;
CASE.log; for a profile CASE.profile.md and CASE.trace.json.gz. A case that fails stops no other.
tokens/s: median of the steps after the second, or after the first where that leaves none. TFLOP/s:
6 x the parameters of the linear layers, head included, a token, whatever is really computed.
"""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARM_STEPS, PROFILED_STEPS = 4, 2
SHAPES = {  # hidden, intermediate, layers, heads, key/value heads, vocabulary
    "llama-2-70b": (8192, 28672, 80, 64, 8, 32000),
    "llama-3-8b": (4096, 14336, 32, 32, 8, 128256),
    "llama-3-70b": (8192, 28672, 80, 64, 8, 128256),
}


def case(name, model, rows, seq, steps, flags="", gpus=2, layers=None, base=None):
    """One measurement: `rows` of `seq` tokens a GPU and step. gpus None: all of the machine;
    layers None: the whole model; base: the case that the table's ratio is to."""
    return locals()


CAP, OFFLOAD, FLASH = "--memory_limit_gib 22.5", "--offload_activations", "--attn flash_attention_2"
KEPT = "--no-reshard_after_forward"
GROUPS = {
    "memory": [
        case("70b-2k", "llama-2-70b", 2, 2048, 6, f"{CAP} {OFFLOAD}", base="70b-2k-nooffload"),
        case("70b-2k-nooffload", "llama-2-70b", 2, 2048, 6),
        case("70b8-offload", "llama-2-70b", 2, 2048, 12, OFFLOAD, layers=8, base="70b8-nooffload"),
        case("70b8-nooffload", "llama-2-70b", 2, 2048, 12, layers=8),
        case("l3-70b-2k", "llama-3-70b", 2, 2048, 6, f"{CAP} {OFFLOAD}"),
        case("70b-8k", "llama-2-70b", 1, 8192, 3, f"{CAP} {OFFLOAD}"),
        case("70b-32k", "llama-2-70b", 1, 32768, 2, f"{CAP} {OFFLOAD} --offload_params"),
        case("8b-none", "llama-3-8b", 2, 2048, 8, f"{CAP} --recompute none"),
        case("8b-64k", "llama-3-8b", 1, 65536, 2, f"{CAP} {OFFLOAD}"),
        case("8b-1gpu", "llama-3-8b", 1, 8192, 4, f"{CAP} {OFFLOAD}", gpus=1),
        case("70b-auto", "llama-2-70b", 2, 2048, 6, "--recompute auto", base="70b-2k-nooffload"),
    ],
    "scale": [
        case("70b-2gpus", "llama-2-70b", 2, 2048, 6),
        case("70b-all", "llama-2-70b", 2, 2048, 6, gpus=None, base="70b-2gpus"),
        case("8b-2gpus", "llama-3-8b", 2, 2048, 12),
        case("8b-all", "llama-3-8b", 2, 2048, 12, gpus=None, base="8b-2gpus"),
        case("8b-2gpus-kept", "llama-3-8b", 2, 2048, 12, KEPT),
        case("8b-all-kept", "llama-3-8b", 2, 2048, 12, KEPT, gpus=None, base="8b-2gpus-kept"),
        case("8b-all-groups", "llama-3-8b", 2, 2048, 12, "--shard_group_size 2", gpus=None,
             base="8b-2gpus"),
    ],
    "speed": [
        *(case(name, model, 2, 2048, 9, flags, layers=layers, base=f"trl-{name}")
          for name, model, layers, flags in (
              ("70b8-sdpa", "llama-2-70b", 8, "--attn sdpa"),
              ("70b8-flash", "llama-2-70b", 8, FLASH),
              ("8b16-flash", "llama-3-8b", 16, FLASH),
              ("8b16-flash-none", "llama-3-8b", 16, f"{FLASH} --recompute none"),
          )),
        case("8b16-packed", "llama-3-8b", 2, 2048, 9, f"{FLASH} --packing", layers=16,
             base="8b16-flash"),
        case("8b16-packed-sdpa", "llama-3-8b", 2, 2048, 9, "--attn sdpa --packing", layers=16,
             base="8b16-flash"),
        case("8b-1gpu-none", "llama-3-8b", 2, 2048, 9, "--recompute none --attn sdpa", gpus=1),
    ],
}  # fmt: skip
CASES = {c["name"]: c for group in GROUPS.values() for c in group}
GROUPS["speed"] += [CASES["70b-auto"], CASES["70b-2k"]]
GROUPS["profile"] = [CASES["70b8-nooffload"], CASES["8b-2gpus"]]

COLUMNS = {  # title: (key of a row, format)
    "case": ("case", ""), "work": ("work", ""), "GPUs": ("gpus", ""),
    "tokens/s per GPU": ("tokens_per_second", ",.0f"), "TFLOP/s": ("tflops", ".0f"),
    "% of ceiling": ("ceiling_percent", ".1f"), "by the script": ("script_percent", ".1f"),
    "predicted GiB": ("predicted_gib", ".2f"), "peak GiB": ("peak_gib", ".2f"),
    "off by %": ("off_percent", "+.1f"), "first loss": ("first_loss", ".4f"),
    "last loss": ("last_loss", ".4f"), "seconds": ("seconds", ".0f"), "result": ("result", ""),
    "ratio": ("ratio", ".3f"), "to": ("base", ""),
}  # fmt: skip

# ---- shapes ------------------------------------------------------------------------------------


def products(model):
    """(how many, inputs, outputs) of a block's matrix products: qkv, o, gate and up, down."""
    hidden, intermediate, _, heads, kv_heads, _ = SHAPES[model]
    return ((1, hidden, hidden + 2 * hidden * kv_heads // heads), (1, hidden, hidden),
            (2, hidden, intermediate), (1, intermediate, hidden))  # fmt: skip


def tflops(chosen, tokens_per_second):
    hidden, _, layers, *_, vocab = SHAPES[chosen["model"]]
    block = sum(n * inputs * outputs for n, inputs, outputs in products(chosen["model"]))
    parameters = (chosen["layers"] or layers) * block + hidden * vocab
    return 6 * parameters * tokens_per_second / 1e12


def shape_of(chosen):
    """What its GEMM ceiling depends on."""
    return f"{chosen['model']}:{chosen['rows'] * chosen['seq']}"


def write_config(directory, model, layers):
    """The model's config.json with that many blocks."""
    hidden, intermediate, _, heads, kv_heads, vocab = SHAPES[model]
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    }))  # fmt: skip


def gemm_ceiling(model, tokens):
    """TFLOP/s of torch.matmul in bf16 over a block's products; about a second on one GPU."""
    import torch

    flops = seconds = 0
    for n, inputs, outputs in products(model):
        x = torch.randn(tokens, inputs, dtype=torch.bfloat16, device="cuda")
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
        one = 2 * tokens * inputs * outputs
        times = max(5, int(0.2 * 700e12 / one))
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for i in range(times + 5):
            if i == 5:
                start.record()
            torch.matmul(x, weight.T)
        end.record()
        torch.cuda.synchronize()
        flops += n * one
        seconds += n * start.elapsed_time(end) / 1000 / times
    return flops / seconds / 1e12


# ---- one case ----------------------------------------------------------------------------------


def launch(gpus, program, log, limit, **env):
    """`program` by torchrun, or with gpus 0 by plain Python, its output in `log`. Returns the exit
    code (None: time limit), seconds and output."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"]
    command = [sys.executable, *(torchrun if gpus else []), *map(str, program)]
    started, code = time.perf_counter(), None
    with log.open("w") as file:
        print("$", shlex.join(command), file=file, flush=True)
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file,
                                 stderr=subprocess.STDOUT, env={**os.environ, **env})  # fmt: skip
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"time limit: {limit} s", file=file, flush=True)
        finally:
            if child.poll() is None:  # SIGKILL would leave torchrun's workers running
                child.terminate()
                try:
                    child.wait(90)  # it gives them 30 s
                except subprocess.TimeoutExpired:
                    child.kill()
    text = log.read_text(errors="replace").replace("\r", "\n")  # tqdm's bar ends no line
    return code, time.perf_counter() - started, text


def outcome(code, text, steps):
    """The row's result, and the line that says why."""
    said = re.findall(r"^(?:.*\])?error: (.*)", text, re.M)
    raised = re.findall(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*Error: .*)", text, re.M)
    result = f"exit code {code}"
    if code in (0, None):
        result = "time limit" if code is None else "ok"
    elif re.search(r"OutOfMemoryError|ran out of memory|(?i:cuda\b.{0,20}out of memory)", text):
        result = "out of memory"
    elif said and not steps:
        result = "refused"
    return {"result": result, "error": "" if code == 0 else (said + raised + [""])[0]}


def number_in(pattern, text):
    """The number N of the pattern where it occurs last, or None."""
    found = re.findall(pattern.replace("N", r"(\d[\d,]*\.?\d*)"), text)
    return float(found[-1].replace(",", "")) if found else None


def measurements(text, steps):
    """What the script printed and wrote to its metrics.jsonl."""
    speeds = [step["tokens_per_second_per_gpu"] for step in steps]
    measured = (re.findall(r"measured: .*tokens/s.*", text) or [""])[-1]
    predicted = number_in("predicted peak N GiB", text)
    peak = number_in("peak N GiB", measured)
    if peak is None and steps:
        peak = max(step["peak_memory_gib"] for step in steps)
    return {
        "tokens_per_second": statistics.median(speeds[2:] or speeds[1:]) if speeds[1:] else None,
        "script_percent": number_in("N %", measured), "measured": measured,
        "predicted_gib": predicted, "peak_gib": peak,
        "off_percent": 100 * (predicted / peak - 1) if predicted and peak else None,
        "first_loss": steps[0]["loss"] if steps else None,
        "last_loss": steps[-1]["loss"] if steps else None, "steps": steps,
        "machine": (re.findall(r"^torch \d.*; \d+ x .*", text, re.M) or [""])[0],
    }  # fmt: skip


def describe(chosen):
    layers = f", {chosen['layers']} layers" if chosen["layers"] else ""
    return f"{chosen['model']}{layers}, {chosen['rows']} x {chosen['seq']:,} {chosen['flags']}"


def script_flags(chosen, gpus, scratch):
    """For a part of a model this writes its config.json below `scratch`."""
    model = chosen["model"]
    if chosen["layers"]:
        model = scratch / f"{model}-{chosen['layers']}"
        write_config(model, chosen["model"], chosen["layers"])
    return shlex.split(
        f"--model {model} --random_weights --lora_rank 16 --target_modules all-linear"
        f" --max_seq_len {chosen['seq']} --micro_batch_size {chosen['rows']}"
        f" --batch_size {chosen['rows'] * gpus} --max_steps {chosen['steps']} {chosen['flags']}"
    )


def run_case(chosen, gpus, out, scratch, limit, profile=False):
    """The row of one run of the script, or with `profile` of the driver below around it."""
    name = chosen["name"]
    results = scratch / f"run-{name}"  # not in `out`: adapters and checkpoints are gigabytes
    flags = [*script_flags(chosen, gpus, scratch), "--output_dir", str(results)]
    program, log = [ROOT / "train_fsdp_qlora.py"], out / f"{name}.log"
    if profile:
        program, log = [__file__, "driver", out / name], out / f"{name}.profile.log"
    code, seconds, text = launch(gpus, [*program, *flags], log, limit)
    metrics = results / "metrics.jsonl"
    lines = metrics.read_text().splitlines(True) if metrics.is_file() else []
    steps = [json.loads(line) for line in lines if line.endswith("\n")]
    shutil.rmtree(results, ignore_errors=True)
    return {"case": name, "work": describe(chosen), "gpus": gpus, "base": chosen["base"],
            "seconds": seconds, "flags": flags, **outcome(code, text, steps),
            **measurements(text, steps)}  # fmt: skip


def run_peer(chosen, gpus, out, scratch, limit, peer):
    """The same work by TRL. It reads its weights from a disk, so they are made first; its tokens/s
    are the mean of the steps after the third."""
    name, size = chosen["base"], chosen["model"].rpartition("-")[2]
    model = scratch / f"peer-{size}"
    if not model.is_dir():
        make = [peer, "--make-model", model, "--size", size, "--layers", chosen["layers"]]
        launch(0, make, out / f"{name}-weights.log", limit)
    flags = {
        "model": model, "attn": re.findall(r"--attn (\w+)", chosen["flags"])[-1], "fsdp": 1,
        "gc": "none" if "--recompute none" in chosen["flags"] else "nonreentrant",
        "bs": chosen["rows"], "seq": chosen["seq"], "steps": chosen["steps"], "warmup": 3,
    }  # fmt: skip
    flags = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    code, seconds, text = launch(gpus, [peer, *flags], out / f"{name}.log", limit,
                                 BASELINE_OUT=str(scratch / name))  # fmt: skip
    row = {"case": name, "work": describe(chosen), "gpus": gpus, "base": None, "seconds": seconds}
    decoder = json.JSONDecoder()  # two ranks' lines may run together
    ranks = [decoder.raw_decode(part)[0] for part in re.split(r"RESULT (?=\{)", text)[1:]]
    if ranks:
        row |= {"tokens_per_second": statistics.mean(rank["tok_s_gpu"] for rank in ranks),
                "peak_gib": max(rank.get("train_peak_alloc", 0) for rank in ranks),
                "first_loss": ranks[0]["loss_first"], "last_loss": ranks[0]["loss_last"]}
    return {**row, **outcome(code, text, ranks)}


# ---- profile -----------------------------------------------------------------------------------

KINDS = (  # of kernels, by name; the first that fits
    ("memcpy", "^Mem(cpy|set)"),
    ("NCCL", "nccl"),
    ("elementwise, other", "^triton_(?!tem)"),  # torch.compile names them after all that they fuse
    ("attention", "flash|fmha|sdpa|attention|cudnn"),  # before GEMM: flash-attn names cutlass types
    ("dequantise", "dequant"),
    ("GEMM", "gemm|nvjet|cutlass|gemv|splitK|cublas|triton_tem"),
    ("elementwise, other", ""),
)
TRANSFERS = ("NCCL", "memcpy")  # what computation can hide


def kind_of(name):
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.I))


def covered(spans):
    """The length of the union of (start, end) spans.

    >>> covered([(0, 2), (5, 6), (1, 3), (1, 2)])
    4
    """
    total, reached = 0, float("-inf")
    for start, end in sorted(spans):
        total += max(0, end - max(start, reached))
        reached = max(reached, end)
    return total


def breakdown(kernels, wall):
    """Kernels as (name, start, end) to {kind: (time, of that exposed)}. Exposed: while nothing
    computes. Idle: while nothing runs at all.

    >>> breakdown([("gemm", 0, 4), ("ncclDevKernel", 3, 7), ("Memcpy DtoH", 6, 8)], 10)
    {'memcpy': (2, 2), 'NCCL': (4, 3), 'GEMM': (4, None), 'idle': (2, None)}
    """
    spans = {kind: [] for kind, _ in KINDS}
    for name, start, end in kernels:
        spans[kind_of(name)].append((start, end))
    computing = [span for kind in spans if kind not in TRANSFERS for span in spans[kind]]
    times = {}
    for kind, mine in spans.items():
        if mine:
            exposed = covered(mine + computing) - covered(computing)
            times[kind] = sum(e - s for s, e in mine), exposed if kind in TRANSFERS else None
    return {**times, "idle": (wall - covered(sum(spans.values(), [])), None)}


def profile_text(kernels, wall):
    """Markdown, in milliseconds a step; kernels and wall are microseconds of PROFILED_STEPS."""
    scale = 1 / 1000 / PROFILED_STEPS
    launches = len(kernels) // PROFILED_STEPS
    lines = [f"{wall * scale:.1f} ms a step under the profiler, {launches:,} kernels", "",
             "| kind of kernel | ms a step | exposed |", "|---|---|---|"]  # fmt: skip
    for kind, (total, exposed) in breakdown(kernels, wall).items():
        cell = "" if exposed is None else f"{exposed * scale:.1f}"
        lines.append(f"| {kind} | {total * scale:.1f} | {cell} |")
    totals, counts = Counter(), Counter(name for name, *_ in kernels)
    for name, start, end in kernels:
        totals[name] += end - start
    lines += ["", "| ms a step | launches | kind | kernel |", "|---|---|---|---|"]
    for name, total in totals.most_common(15):
        lines.append(f"| {total * scale:.2f} | {counts[name] / PROFILED_STEPS:g} | {kind_of(name)}"
                     f" | `{name.replace('|', '/')[:110]}` |")  # fmt: skip
    return "\n".join(lines) + "\n"


def driver(stem, argv):
    """The script with rank 0's last steps profiled. All ranks must call this."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT))
    import train_fsdp_qlora as script

    train_step, cuda, rank = script.train_step, torch.cuda.is_available(), int(os.environ["RANK"])
    activity = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(
        activities=[activity.CUDA if cuda else activity.CPU],
        schedule=torch.profiler.schedule(wait=WARM_STEPS - 1, warmup=1, active=PROFILED_STEPS),
    )
    edges = []  # the profiled steps may run into one another, as they do without it

    def profiled_step(run, step):
        if rank == 0 and step == 1:
            profiler.start()
        of_step = train_step(run, step)
        if step in (WARM_STEPS, WARM_STEPS + PROFILED_STEPS):
            dist.barrier()  # so that the profile begins with no wait for another rank
            if cuda:
                torch.cuda.synchronize()
            edges.append(time.perf_counter())
        if rank == 0:
            profiler.step()
        return of_step

    script.train_step = profiled_step
    code = script.main(argv)
    if rank == 0 and code == 0:
        trace = f"{stem}.trace.json.gz"
        profiler.export_chrome_trace(trace)
        with gzip.open(trace, "rt") as file:
            kernels = [(e["name"], e["ts"], e["ts"] + e["dur"])
                       for e in json.load(file)["traceEvents"]
                       if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]  # fmt: skip
        text = profile_text(kernels, 1e6 * (edges[1] - edges[0]))
        Path(f"{stem}.profile.md").write_text(text)
    sys.stdout.flush()
    os._exit(code)  # for the reason that the script does


# ---- all cases ---------------------------------------------------------------------------------


def table(rows):
    """Markdown; ratios are of tokens/s to the base's row."""
    speeds = {row["case"]: row.get("tokens_per_second") for row in rows}
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    for row in rows:
        mine, base = speeds[row["case"]], speeds.get(row["base"])
        values = {**row, "ratio": mine / base if mine and base else None}
        cells = ["" if values.get(key) is None else format(values[key], form)
                 for key, form in COLUMNS.values()]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    errors = [f"{row['case']}: {row['error'][:300]}" for row in rows if row["error"]]
    machine = next((row["machine"] for row in rows if row.get("machine")), "")
    return "\n".join([machine, "", *lines, "", *errors]).strip() + "\n"


def run_cases(group, cases, device_count, out, limit, peer=None):
    """One after the other; what is known is written after each. Returns the rows."""
    out.mkdir(parents=True, exist_ok=True)
    rows, ceilings = [], {}
    if device_count:  # in a process of its own: this one shall hold no GPU memory
        shapes = sorted(set(map(shape_of, cases)))
        _, _, text = launch(0, [__file__, "ceiling", *shapes], out / "ceiling.log", limit)
        ceilings = dict(re.findall(r"^GEMM ceiling (\S+) (\S+) TFLOP/s", text, re.M))
        print("GEMM ceilings, TFLOP/s:", ceilings or text[-300:], flush=True)

    def finish(row, chosen):
        if row.get("tokens_per_second"):
            row["tflops"] = tflops(chosen, row["tokens_per_second"])
            if shape_of(chosen) in ceilings:
                row["ceiling_percent"] = 100 * row["tflops"] / float(ceilings[shape_of(chosen)])
        rows.append(row)
        with (out / "results.jsonl").open("a") as file:
            file.write(json.dumps({"group": group, **row}) + "\n")
        (out / f"{group}.md").write_text(table(rows))
        print(f"{row['case']}: {row['result']}, {row['seconds']:.0f} s {row['error']}", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        for chosen in cases:
            gpus = chosen["gpus"] or device_count
            if device_count and gpus > device_count or not chosen["gpus"] and device_count <= 2:
                print(f"{chosen['name']}: skipped, here are {device_count} GPUs", flush=True)
                continue
            common = gpus, out, Path(scratch), limit
            if peer and (chosen["base"] or "").startswith("trl-"):
                finish(run_peer(chosen, *common, peer), chosen)
            if group == "profile":
                chosen = {**chosen, "steps": WARM_STEPS + PROFILED_STEPS}
            finish(run_case(chosen, *common, profile=group == "profile"), chosen)
            report = out / f"{chosen['name']}.profile.md"
            if group == "profile" and rows[-1]["result"] == "ok":
                print(report.read_text(), flush=True)
    print(table(rows))
    return rows


def main(argv):
    if argv[:1] == ["driver"]:
        driver(argv[1], argv[2:])
    if argv[:1] == ["ceiling"]:
        for shape in argv[1:]:
            model, _, tokens = shape.partition(":")
            print(f"GEMM ceiling {shape} {gemm_ceiling(model, int(tokens)):.1f} TFLOP/s")
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--cases", help="names with commas; none: all of the group")
    parser.add_argument("--list", action="store_true", help="show the cases and stop")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="where results go")
    parser.add_argument("--limit", type=float, default=240, help="seconds a case may take")
    parser.add_argument("--flags", default="", help="added to every case: --flags='--attn sdpa'")
    parser.add_argument("--peer", type=Path, help="TRL's script, for the group speed")
    args = parser.parse_args(argv)
    known = CASES if args.group == "profile" else {c["name"]: c for c in GROUPS[args.group]}
    names = args.cases.split(",") if args.cases else [c["name"] for c in GROUPS[args.group]]
    if set(names) - set(known):
        parser.error(f"--cases {args.cases}: {args.group} has {', '.join(known)}")
    cases = [{**known[n], "flags": f"{known[n]['flags']} {args.flags}".strip()} for n in names]
    if args.list:
        for chosen in cases:
            print(f"{chosen['name']:18} {chosen['gpus'] or 'all'} GPUs  {describe(chosen)}")
        return
    import torch

    if not torch.cuda.device_count():  # asks the driver and takes no GPU memory
        sys.exit("no GPU here")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the case ends with this
    run_cases(args.group, cases, torch.cuda.device_count(), args.out, args.limit, args.peer)


if __name__ == "__main__":
    main(sys.argv[1:])
