"""What the numeric tests look at on each rank of several.py, inside the script's own run.

A job is {"case": a function below, "out": file, ...its inputs}; the results of rank 0, those of
every rank where the case says so, go to the file as safetensors. What a case looks at is wired by
the script's train() itself: training() runs it from flags to adapter, with a function of the
test's in place of its steps.
"""

import ctypes
import math
import shutil
import sys
import tempfile
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import train_fsdp_qlora as script


def training(job, device, model, flags, look):
    """What `look(run)` returns where train() would do its steps. The data set and the tokenizer are
    made where the job and the model have none."""
    seen = {}

    def prepare():
        with tempfile.TemporaryDirectory() as demo:
            script.write_demo(Path(demo))
            if not list(Path(model).glob("tokenizer*")):
                for path in (Path(demo) / "model").glob("*token*"):
                    shutil.copy(path, model)
            if "dataset" not in job:
                shutil.copy(Path(demo) / "data.jsonl", f"{job['out']}.jsonl")
        return tempfile.mkdtemp(dir=Path(job["out"]).parent)

    directory = script.on_rank_0(prepare)

    def run_steps(run, done):
        seen.update(look(run))
        (run.directory / "metrics.jsonl").touch()  # of no steps
        return []

    script.run_steps = run_steps
    dataset = job.get("dataset", f"{job['out']}.jsonl")
    argv = ["--model", model, "--dataset", dataset, "--output_dir", directory, *flags]
    script.train(script.parse_config([str(arg) for arg in argv]), device)
    return seen


def sharded(*flags):
    """FSDP2 over all processes; a GPU with a whole copy would need none."""
    return "--shard_group_size", dist.get_world_size(), "--max_steps", 4, *flags


def quantized(job, device):
    """Every linear as a forward has it: gathered bytes, nested state, dequantised weight."""

    def look(run):
        out = {}
        for i, layer in enumerate(run.model.layers):
            with script.gathered(layer):
                blank = torch.zeros(len(layer.adapter), dtype=torch.bfloat16, device=device)
                for group in layer.layout.groups:
                    weight = script.dequantise_group(layer, group, blank)
                    nested, start = layer.nested[group.site], 0
                    for at, place in enumerate(group.places):
                        blocks, rows = place.blocks, place.rows
                        stop = start + math.ceil((blocks.stop - blocks.start) / 256)
                        name = f"model.layers.{i}.{place.linear.name}"
                        values = {
                            "packed": layer.nf4.packed[blocks].clone(),
                            "codes": layer.nf4.absmax_codes[blocks].clone(),
                            "nested_absmax": nested.absmax[start:stop].clone(),
                            "nested_code": nested.code_values[at].clone(),
                            "offset": nested.offsets[at].clone(),
                            "dequantized": weight[rows, : group.in_features].clone(),
                        }
                        start = stop
                        out.update({f"{name}.{key}": value for key, value in values.items()})
        return out

    return {
        f"{Path(model).name}/{key}": value.cpu()
        for model in job["models"]
        for key, value in training(job, device, model, sharded(), look).items()
    }


def initial(job, device):
    """The adapter that a run begins with."""
    look = lambda run: run.adapter.gather()  # noqa: E731
    return training(job, device, job["model"], sharded(*job["flags"]), look)


def vocabulary(job, device):
    """Embedding and loss of all ranks' tokens by a sharded vocabulary, and what they came from."""

    def look(run):
        model, out = run.model, {}
        rank, ranks, hidden = model.shard, model.shards, model.arch.hidden_size
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(17 * ranks, hidden, generator=generator).to(model.norm.dtype)
        labels = torch.randint(model.arch.vocab_size, (17 * ranks,), generator=generator)
        ids = labels.flip(0).clone()
        labels[[2, 9, -1]] = script.IGNORE
        out.update(hidden=x, labels=labels, ids=ids)
        mine = slice(rank * 17, (rank + 1) * 17)
        x, labels, ids = (t[mine].to(device) for t in (x, labels, ids))
        learnt = torch.arange(17, device=device).flip(0)  # of tokens in any order
        bin = types.SimpleNamespace(labels=labels[learnt], learnt_at=learnt)
        chunk_bytes, row = script.CHUNK_BYTES, 4 * model.arch.vocab_size
        for chunk, script.CHUNK_BYTES in ("8", row * 8), ("all", chunk_bytes), ("one", 1):
            embedded = script.embed(model, ids)
            local = x.clone().requires_grad_()
            loss = script.HeadLoss.apply(local, model, bin)
            (grad,) = torch.autograd.grad(loss * 0.25, local)
            gather = lambda t: script.all_gather(t, model.group)  # noqa: E731
            out[f"{chunk}/embedded"] = gather(embedded).flatten(0, 1)
            out[f"{chunk}/grad"] = gather(grad).flatten(0, 1)
            out[f"{chunk}/loss"] = gather(loss.detach()).sum()
        script.CHUNK_BYTES = chunk_bytes
        return out

    return {
        f"{dtype}/{key}": value
        for dtype in ("float32", "bfloat16")
        for key, value in training(
            job, device, job["model"], sharded("--compute_dtype", dtype), look
        ).items()
    }


def memory(job, device):
    """How far every rank's host memory grew while it loaded a model."""
    script.READ_AHEAD, load_weights = job["ahead"], script.load_weights
    grown = []

    def measured(*args):
        before, _ = script.host_memory()
        offsets = load_weights(*args)
        grown.append(script.host_memory()[1] - before)
        return offsets

    script.load_weights = measured
    training(job, device, job["model"], sharded(), lambda run: {})
    return {"grown": script.all_gather(torch.tensor(grown))}


def gradients(job, device):
    """Loss and gradients of one step's rows, by train_step without its clipping and update."""

    def look(run):
        adapter, values = run.adapter, load_file(job["adapter"])
        for i in range(len(run.model.layers)):
            adapter.set_layer(i, values)
        adapter.update = lambda rate: None
        row, _ = script.train_step(run, 1)
        adapter.weights.data.copy_(adapter.weights.grad)
        return {"loss": torch.tensor(row["loss"]), **adapter.gather()}

    return {
        f"{name}/{key}": value
        for name, flags in job["settings"].items()
        for key, value in training(
            job, device, job["model"], sharded(*flags, "--max_grad_norm", "1e30"), look
        ).items()
    }


def optimizer(job, device):
    """Every rank: its own part of weights and gradients before and after each of some steps."""

    def look(run):
        adapter, out, update = run.adapter, {}, run.adapter.update

        def watched(rate):
            step = len(out) // 4
            out[f"{step}/before"] = adapter.by_layer(adapter.weights.data).clone()
            out[f"{step}/grad"] = adapter.by_layer(adapter.weights.grad).clone()
            out[f"{step}/rate"] = torch.tensor(rate, dtype=torch.float64)
            update(rate)
            out[f"{step}/after"] = adapter.by_layer(adapter.weights.data).clone()

        adapter.update = watched
        for step in range(1, job["steps"] + 1):
            script.train_step(run, step)
        state = adapter.state
        out["state1_is_uint8"] = torch.tensor(state["state1"].dtype == torch.uint8)
        if device.type == "cuda":
            out["managed"] = torch.tensor(is_managed(state["state1"].data_ptr()))
        out["n_adapter"] = torch.tensor(adapter.layout.n_adapter)
        return out

    return training(job, device, job["model"], sharded(*job["flags"]), look)


optimizer.every_rank = True


def is_managed(address):
    """Whether CUDA's runtime calls this address managed (paged) memory."""
    attributes = (ctypes.c_byte * 256)()  # CUDA 13's struct is 88 bytes, CUDA 12's was 24
    runtime = ctypes.CDLL("libcudart.so.13" if torch.version.cuda >= "13" else "libcudart.so.12")
    assert runtime.cudaPointerGetAttributes(attributes, ctypes.c_void_p(address)) == 0
    return int.from_bytes(bytes(attributes[:4]), "little") == 3  # cudaMemoryTypeManaged


def resumed(job, device):
    """The optimizer's state as a resumed run goes on with it: each layer's whole, unpadded."""
    out = {}

    def run_steps(run, done):
        adapter = run.adapter
        n = adapter.layout.n_adapter
        for key, part in adapter.state_parts().items():
            whole = script.all_gather(part.contiguous(), adapter.group)
            whole = whole.transpose(0, 1).flatten(1)  # [layers, all ranks' parts]
            out[key] = whole[:, : n if key.startswith("state") else n // script.STATE_BLOCK]
        out["done"] = torch.tensor([done, adapter.state["step"]])
        return []

    script.run_steps = run_steps
    script.train(script.parse_config(job["argv"]), device)
    return out


def patterns(job, device):
    """All 65,536 16-bit patterns through FSDP2: as NF4Blocks per policy, and as plain bf16."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    words = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16)
    packed = words.view(torch.uint8).view(-1, 32)
    codes = torch.arange(packed.shape[0], device=device).to(torch.uint8)
    out = {"expected": packed.cpu(), "expected_codes": codes.cpu()}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, settings in {
        "plain": {},
        "mixed": {"mp_policy": mixed},
        "offload": {"mp_policy": mixed},
        "unprotected": {"mp_policy": mixed},  # without, the fp32 bias makes FSDP2 copy bytes
    }.items():
        module, seen = torch.nn.Module(), {}
        if name == "unprotected":
            weight = words.view(torch.bfloat16)
        else:
            weight = script.NF4Blocks.zeros(packed.shape[0], "meta")
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.bias = torch.nn.Parameter(torch.zeros(8, device=weight.device))  # as norms, LoRA do
        module.forward = lambda _, module=module, seen=seen: seen.update(w=module.weight)
        fully_shard(module, mesh=mesh, **settings)
        rows = script.shard_range(packed.shape[0], dist.get_rank(), dist.get_world_size())
        part = slice(rows.start, rows.stop)
        if name != "unprotected":
            place = script.pinned_copy if name == "offload" else torch.clone  # --offload_params
            mine = script.NF4Blocks(place(packed[part]), place(codes[part]), device)
            script.set_local(module, "weight", mine)
            script.set_local(module, "bias", torch.zeros(8 // dist.get_world_size(), device=device))
        for _ in range(2):  # the first gather allocates, the second fills what was freed
            module(torch.zeros(1, device=device))  # torch 2.11 wants an argument
            gathered = seen["w"].packed if name != "unprotected" else seen["w"].detach()
            out[name] = gathered.view(torch.uint8).view(-1, 32).clone()
            if name != "unprotected":
                out[f"{name}_codes"] = seen["w"].absmax_codes.clone()
            module.reshard()
    return out


def run(job):
    device, case = script.init_distributed(), globals()[job["case"]]
    with script.watched():
        results = case(job, device)
    every_rank = getattr(case, "every_rank", False)
    if dist.get_rank() == 0 or every_rank:
        out = job["out"] + (f".{dist.get_rank()}" if every_rank else "")
        save_file({k: v.cpu().contiguous() for k, v in results.items()}, out)
    dist.barrier()
    dist.destroy_process_group()
    return 0
