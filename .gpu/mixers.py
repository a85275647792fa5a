"""Mixers on one H100: python3 .gpu/mixers.py rule | gradients | runs NAME.. (9b 9b-chat 9b-plain 27b 35b-a3b lfm2); prints a table.

rule: fla against plain torch against fp32, one layer of Qwen3.5-9B, 8,192 tokens in uneven documents: errors, ms, GiB.
gradients: a small Qwen3.5 in bf16 on the GPU, ours by fla, ours in plain torch, transformers; each against fp32 on the CPU.
runs: the script with --random_weights; tokens/s of the last steps, peak GiB, predicted, seconds to the end of the first step.
"""
import functools, json, os, pathlib, random, subprocess, sys, time, types
HERE = pathlib.Path(__file__).resolve().parent; ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE)]
os.environ["HF_HUB_OFFLINE"] = "1"
OUT = pathlib.Path("/tmp/mixer-runs"); OUT.mkdir(exist_ok=True)


def timed(function, *inputs, grad):
    import torch
    def once():
        out = function(*inputs); return out, torch.autograd.grad(out, inputs, grad)
    once(); torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); base = torch.cuda.memory_allocated()
    start = time.time()
    for _ in range(5): result = once()
    torch.cuda.synchronize(); ms = (time.time() - start) / 5 * 1e3
    return result, ms, (torch.cuda.max_memory_allocated() - base) / 2**30


def rule():
    import torch
    from fsdp_qlora.model import mixers
    from fsdp_qlora.pretrained.architecture import DeltaNet
    print("why no fla:", repr(mixers.why_no_fla(DeltaNet(16, 32, 128, 128, 4), torch.device("cuda"))))
    draw, lengths = random.Random(0), []
    while sum(lengths) < 8192: lengths.append(min(draw.randint(1, 2048), 8192 - sum(lengths)))
    n = sum(lengths); torch.manual_seed(0)
    make = lambda *s: torch.randn(n, *s, device="cuda")
    full = [make(16, 128), make(16, 128), make(32, 128), -torch.rand(n, 32, device="cuda"), torch.rand(n, 32, device="cuda")]
    grad = make(32, 128)
    bounds = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    bin = types.SimpleNamespace(lengths=tuple(lengths), cu_seqlens=bounds, chunks=None)
    of = lambda dtype: [x.to(dtype if i != 3 else torch.float32).requires_grad_() for i, x in enumerate(full)]
    want = None
    print(f"{len(lengths)} documents, {n} tokens | ms | GiB | off: out, query, key, value, g, beta")
    for name, function, dtype in (("plain torch fp32", mixers.document_delta_rule, torch.float32),
                                  ("plain torch bf16", mixers.document_delta_rule, torch.bfloat16),
                                  ("fla bf16", mixers.fla_delta_rule, torch.bfloat16)):
        inputs = of(dtype)
        (out, grads), ms, gib = timed(lambda *x: function(*x, bin), *inputs, grad=grad.to(dtype))
        got = [out.detach(), *grads]; want = want or got
        print(name, f"| {ms:.2f} | {gib:.2f} |", *(f"{float((a.float() - b.float()).norm() / b.float().norm()):.1e}" for a, b in zip(got, want)), flush=True)
    positions = torch.cat([torch.arange(x) for x in lengths]).cuda()
    x = torch.randn(n, 8192, device="cuda", dtype=torch.bfloat16).requires_grad_(); w = torch.randn(8192, 1, 4, device="cuda", dtype=torch.bfloat16)
    _, ms, gib = timed(lambda x: mixers.CausalConv.apply(x, w, None, positions, True), x, grad=torch.randn_like(x))
    print(f"causal convolution 8,192 channels | {ms:.2f} | {gib:.2f} (fla's: 1.68 ms, 0.52 GiB)")
    z = torch.randn(n, 32, 128, device="cuda", dtype=torch.bfloat16).requires_grad_(); o = torch.randn_like(z).requires_grad_()
    _, ms, gib = timed(lambda o, z: mixers.GatedNorm.apply(o, z, w[0, 0, 0].expand(128).contiguous(), 1e-6), o, z, grad=torch.randn_like(z))
    print(f"gated norm | {ms:.2f} | {gib:.2f}")


def gradients():
    import torch, transformers
    from fsdp_qlora.data.bins import make_bin
    from fsdp_qlora.data.encode import rows_of
    from fsdp_qlora.model import attention, mixers
    from fsdp_qlora.model.layer import make_layouts
    from fsdp_qlora.model.model import Model
    from fsdp_qlora.model.shards import set_local
    from fsdp_qlora.planner.plan import Plan
    from fsdp_qlora.pretrained.config import describe_model, rope_frequencies
    from fsdp_qlora.pretrained.tensor_names import rows_in_memory, tensor_names
    from fsdp_qlora.training import check
    from train_fsdp_qlora import fill_model
    config = transformers.Qwen3_5TextConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, linear_key_head_dim=128, linear_value_head_dim=128, linear_num_key_heads=2, linear_num_value_heads=4, pad_token_id=None)
    arch = describe_model(config); generator = torch.Generator().manual_seed(0)
    reference = check.random_reference(config, generator).bfloat16().float()  # so that both quantise the same
    check.LENGTHS = 700, 324
    ids = torch.randint(3, 1024, (sum(check.LENGTHS),), generator=generator)
    tensors = dict(reference.state_dict()); names = tensor_names(arch, tensors)
    flags = types.SimpleNamespace(lora_rank=check.CHECK_RANK, lora_alpha=check.CHECK_ALPHA, lora_dropout=0.0, adapter="lora")
    def ours(dtype, device, kernel, values=None):
        plan = Plan(compute_dtype=dtype, n_layers=4, shard_group_size=1, reshard_after_forward=True, bin_tokens=1024, recomputed=0,
                    keep_middle=False, hold_weights=False, offload_activations=False, offload_params=False)
        model = Model(arch, make_layouts(arch, {x.name for x in arch.all_linears()}, flags), plan)
        fill_model(model, names, functools.partial(rows_in_memory, tensors, names), {}, torch.device(device))
        model.frequencies = [(f.to(device), s) for f, s in (rope_frequencies(r, arch, 1024, config) for r in arch.ropes)]
        for i, layer in enumerate(model.layers):
            value = torch.randn(len(layer.adapter), generator=generator) * 0.05 if values is None else values[i]
            set_local(layer, "adapter", value.to(device))
        same = dict(full=attention.document_attention, window=None, delta_rule=kernel)
        run = check.plain_run(model); run.device = torch.device(device); run.kernels = dict(same=same, any=same)
        bin = make_bin(rows_of([(x, x) for x in ids.split(check.LENGTHS)]), [[0, 1]], 0, None, run)
        model(bin).sum().backward()
        return model, torch.cat([layer.adapter.grad.cpu().float() for layer in model.layers])
    model, want = ours("float32", "cpu", mixers.document_delta_rule)
    values = [layer.adapter.detach().cpu() for layer in model.layers]
    weights = check.read_weights(model, names)
    print("gradients of the adapter against fp32 on the CPU:")
    off = lambda got: f"{float((got - want).norm() / want.norm()):.2e}"
    print("ours, fla, bf16      ", off(ours("bfloat16", "cuda", mixers.fla_delta_rule, values)[1]), flush=True)
    print("ours, plain, bf16    ", off(ours("bfloat16", "cuda", mixers.document_delta_rule, values)[1]), flush=True)
    reference.bfloat16().cuda(); weights = {n: w.bfloat16().cuda() for n, w in weights.items()}
    half = types.SimpleNamespace(layers=[types.SimpleNamespace(adapter=v.bfloat16().cuda(), layout=l.layout) for v, l in zip(values, model.layers)])
    got = check.reference_results(reference, half, names, weights, ids.cuda())
    print("transformers, plain, bf16", off(torch.cat([got[f"gradient of adapter {i}"].cpu().float() for i in range(4)])), flush=True)


RUNS = {  # name: (shapes, flags, chat rows)
    "9b": ("9b", "--batch_size 4 --max_seq_len 2048 --micro_batch_tokens 4096", False),
    "9b-chat": ("9b", "--batch_size 32 --max_seq_len 2048 --micro_batch_tokens 4096", True),
    "9b-plain": ("9b", "--batch_size 4 --max_seq_len 2048 --micro_batch_tokens 4096", False),
    "9b-24gb": ("9b", "--batch_size 4 --max_seq_len 2048 --memory_limit_gib 22.5", False),
    "27b": ("27b", "--batch_size 4 --max_seq_len 2048 --memory_limit_gib 22.5", False),
    "35b-a3b": ("35b-a3b", "--batch_size 8 --max_seq_len 2048 --memory_limit_gib 22.5", False)}


def runs(names):
    import configs
    configs.write(OUT / "shapes")
    print("run | tokens/s | peak GiB | predicted GiB, tokens/s | first step ended, s | said")
    for name in names:
        shape, flags, chat = RUNS[name]; model = OUT / "shapes" / shape
        command = [sys.executable, "train_fsdp_qlora.py", "--model", model, "--random_weights", *flags.split(), "--max_steps", "8",
                   "--output_dir", OUT / f"run-{name}"]
        if chat:
            sys.path.insert(0, str(ROOT / "benchmarks")); import run as bench
            command += ["--dataset", bench.write_chat(model, bench.chat_lengths(256, 2048))]
        env = dict(os.environ)
        if name == "9b-plain":  # an fla that cannot be imported
            (OUT / "no" / "fla").mkdir(parents=True, exist_ok=True); (OUT / "no" / "fla" / "__init__.py").write_text("raise ImportError('left out')")
            env["PYTHONPATH"] = f"{OUT / 'no'}:{env.get('PYTHONPATH', '')}"
        start = time.time(); first = None; lines = []
        process = subprocess.Popen([str(x) for x in command], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in process.stdout:
            lines.append(line.rstrip())
            if first is None and line.startswith("step") and "loss" in line: first = time.time() - start
        process.wait(); metrics = OUT / f"run-{name}" / "metrics.jsonl"
        rows = [json.loads(x) for x in metrics.read_text().splitlines()] if metrics.is_file() else []
        rows = [x for x in rows if "grad_norm" in x]
        said = [x for x in lines if x.startswith(("slower", "attention:", "predicted peak", "plan:", "error"))]
        if process.returncode or not rows: print(name, "FAILED", *lines[-12:], sep="\n  "); continue
        speed, peak = "tokens_per_second_per_gpu", "peak_memory_gib"
        late = [x[speed] for x in rows[3:]]
        print(name, f"| {sum(late) / len(late):,.0f} | {rows[-1][peak]:.2f} |", f"{first or 0:.0f} s |", *said, sep="\n   ", flush=True)


if __name__ == "__main__":
    {"rule": rule, "gradients": gradients}.get(sys.argv[1], lambda: runs(sys.argv[2:]))()
