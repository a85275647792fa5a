"""What the numeric tests run on each rank of several.py, on the script's own functions.

A job is {"case": a function below, "out": file, ...its inputs}; the results of rank 0, of the
optimizer's case those of every rank, go to the file as safetensors.
"""

import contextlib
import ctypes
import dataclasses
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import train_fsdp_qlora as script


def make_model(model_dir, device, adapter=None, mesh=None, **settings):
    """The sharded model with its adapter, wired as train() does."""
    script.SLICE_TOKENS = settings.pop("slice_tokens", 4096)
    config = dataclasses.replace(script.Config(), model=model_dir, **settings)
    dtype = getattr(torch, config.compute_dtype)
    mesh = mesh or init_device_mesh(
        device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)
    )
    model_config = script.read_model_config(Path(model_dir), config)
    model, shapes = script.build_model(model_config, config.attn or "sdpa", dtype, mesh.size())
    script.attend_causally(model, config.attn or "sdpa", config, device)
    files = script.weight_files(Path(model_dir))
    stored = script.check_files(files, shapes, model, model_config)
    if config.fused:
        script.fuse_model(model)
    script.add_lora(model, config, model_dir)
    script.recompute_blocks(model, config, device, 128)
    script.shard_model(model, mesh, dtype, config)
    read = script.file_reader(files, device)
    script.load_weights(model, read, mesh, dtype, device, stored, config.offload_params)
    values = load_file(adapter) if adapter else None

    def read(name, shape):
        return values[script.peft_name(name)] if values else script.init_lora(name, shape, 0)

    masters, views = script.load_lora(model, read, mesh, device)
    script.verify_model(model, dtype)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return model, params, masters, views


def quantized(job, device):
    """Every NF4 layer as the forward sees it: gathered bytes, nested state, dequantised weight."""
    out = {}
    for model_dir in job["models"]:
        model, *_ = make_model(model_dir, device)
        seen = {}

        def look(layer, args, seen=seen):
            packed, codes = layer.gathered()
            seen[layer] = {
                "packed": packed.clone(),
                "codes": codes.clone(),
                "nested_absmax": layer.quant_state.state2.absmax,
                "nested_code": layer.quant_state.state2.code.clone(),
                "offset": layer.quant_state.offset,
                "dequantized": layer.dequantize(),
            }

            if device.type == "cuda":
                layer.fused = True
                seen[layer]["fused"] = layer.dequantize()

        layers = {n: m for n, m in model.named_modules() if isinstance(m, script.LoraNF4Linear)}
        for layer in layers.values():
            layer.register_forward_pre_hook(lambda m, args: look(m.base_layer, args))
        ids = torch.arange(8, device=device)[None]
        with torch.no_grad():
            model(ids, torch.arange(7, device=device), ids[0, 1:])
        for name, layer in layers.items():
            for key, value in seen[layer.base_layer].items():
                out[f"{Path(model_dir).name}/{name}.{key}"] = value.cpu().contiguous()
    return out


def magnitudes(job, device):
    """The values that DoRA's magnitudes begin with."""
    mesh = init_device_mesh(
        device.type, (dist.get_world_size(),), mesh_dim_names=("shard",)
    )
    model, params, masters, views = make_model(
        job["model"], device, mesh=mesh, use_dora=True, compute_dtype="bfloat16"
    )
    script.init_magnitudes(model, mesh, views, params)
    return {k: v for k, v in script.gather_adapter(params, views).items() if "magnitude" in k}


def vocabulary(job, device):
    """Embedding and loss of all ranks' tokens by a sharded vocabulary, and what they came from."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    generator = torch.Generator().manual_seed(0)
    weight, bias, hidden = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((50, 16), (50,), (17 * ranks, 16))
    )
    labels = torch.randint(50, (17 * ranks,), generator=generator).to(device)
    ids = labels.flip(0).clone()
    labels[[2, 9, -1]] = script.IGNORE
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)
    model.get_input_embeddings, model.get_output_embeddings = (
        lambda: model.embedding,
        lambda: model.head,
    )
    script.make_vocabulary(model)
    script.shard_vocabulary(model, mesh)
    rows = script.shard_range(50, rank, ranks)
    for module, name, value in (
        (model.embedding, "weight", weight), (model.head, "weight", weight),
        (model.head, "bias", bias),
    ):  # fmt: skip
        script.set_local(module, name, value[rows.start : rows.stop].clone())
    out = {"weight": weight, "bias": bias, "hidden": hidden, "labels": labels, "ids": ids}
    mine = slice(rank * 17, (rank + 1) * 17)
    chunk_bytes = script.CHUNK_BYTES
    for chunk, script.CHUNK_BYTES in ("8", 4 * 50 * 8), ("all", chunk_bytes), ("one", 1):
        embedded = model.embedding(ids[mine][None])[0]
        if script.triton:
            on_gpu = model.embedding.weight
            script.set_local(model.embedding, "weight", script.pinned_copy(on_gpu.to_local()))
            assert torch.equal(model.embedding(ids[mine][None])[0], embedded), "pinned table"
            model.embedding.weight = on_gpu
        local = hidden[mine].clone().requires_grad_()
        loss = model.head(local, labels[mine])
        (grad,) = torch.autograd.grad(loss * 0.3, local)
        out[f"{chunk}/embedded"] = script.all_gather(embedded).flatten(0, 1)
        out[f"{chunk}/grad"] = script.all_gather(grad).flatten(0, 1)
        out[f"{chunk}/loss"] = script.all_gather(loss.detach()).sum()
    script.CHUNK_BYTES = chunk_bytes
    return out


def memory(job, device):
    """How far every rank's host memory grew while it made a model."""
    script.READ_AHEAD = job["ahead"]
    before, _ = script.host_memory()
    make_model(job["model"], device)
    return {"grown": script.all_gather(torch.tensor(script.host_memory()[1] - before))}


def whole(tensor):
    """On one GPU, or one process, nothing is sharded."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


LINEARS = "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"


@contextlib.contextmanager
def counted_dequantisations(model):
    """Counts by the layers' own names how often a layer's weight is dequantised."""
    counts, dequantize = Counter(), script.NF4Linear.dequantize
    names = {m: n.split(".")[-2] for n, m in model.named_modules() if hasattr(m, "quant_state")}

    def counted(layer):
        counts[names[layer]] += 1
        return dequantize(layer)

    script.NF4Linear.dequantize = counted
    yield counts
    script.NF4Linear.dequantize = dequantize


def assert_gathered_in_fp32(layer, args):
    """bf16 has no room for what DoRA's magnitudes learn."""
    assert all(p.dtype == torch.float32 for p in layer.lora_magnitude_vector.parameters())


def gradients(job, device):
    """Loss and gradients of one batch, its rows dealt to the ranks as train_step does."""
    batch = load_file(job["batch"])
    out = {}
    for name, settings in job["settings"].items():
        model, params, masters, views = make_model(job["model"], device, job["adapter"], **settings)
        rows = list(zip(batch["input_ids"], batch["labels"]))
        tokens = sum(int((labels[1:] != script.IGNORE).sum()) for _, labels in rows)
        ranks = dist.get_world_size()
        for layer in (m for m in model.modules() if isinstance(m, script.PeftLinear)):
            layer.register_forward_pre_hook(assert_gathered_in_fp32)
        rows = [row for rank in range(ranks) for row in rows[rank::ranks]]
        with counted_dequantisations(model) as counts:
            loss = model(*script.collate(rows, dist.get_rank(), ranks, device))
            (loss / tokens).backward()
        out[f"{name}/dequantised"] = torch.tensor([counts[n] for n in LINEARS])
        loss = loss.detach().clone()
        layers = [m for m in model.modules() if isinstance(m, script.LoraNF4Linear)]
        # in each block k and v come with q, and up with gate; and all was taken
        assert sum(len(layer.siblings) for layer in layers) == 3 * len(layers) / 7
        assert not script.LoraNF4Linear.waiting
        # backward must have left everything as it was
        again = model(*script.collate(rows, dist.get_rank(), ranks, device)).detach()
        torch.testing.assert_close(again, loss, rtol=1e-6, atol=0, msg=name)
        dist.all_reduce(loss)
        out[f"{name}/loss"] = (loss / tokens).cpu()
        for key, p in params.items():
            out[f"{name}/{script.peft_name(key)}"] = whole(p.grad).cpu()
    return out


def packed(job, device):
    """Loss and gradients of the same rows, as they are and in packs, dealt to the ranks; and each
    row's own loss in a pack, before and after another row of it is changed."""
    data, out, script.ROUND_TO = load_file(job["rows"]), {}, 1
    rows = [(data[f"{i}/ids"], data[f"{i}/labels"]) for i in range(len(data) // 2)]
    tokens = sum(int((labels[1:] != script.IGNORE).sum()) for _, labels in rows)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for name, settings in job["settings"].items():
        model, params, *_ = make_model(job["model"], device, job["adapter"], **settings)
        packs = script.pack_examples(rows, job["size"])
        batch = script.collate(packs if settings.get("packing") else rows, rank, ranks, device)
        loss = model(*batch)
        (loss / tokens).backward()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        out[f"{name}/loss"] = loss / tokens
        for key, p in params.items():
            out[f"{name}/{script.peft_name(key)}"] = whole(p.grad)
    out["lengths"] = script.all_gather(torch.tensor([len(batch[-1]), batch[0].shape[1]]))

    input_ids, positions, labels, *documents = script.collate(packs, 0, 1, device)
    starts = documents[1].tolist()
    for when in "before", "after":
        losses = []
        for start, end in zip(starts, starts[1:]):
            mine = (positions >= start) & (positions < end)
            with torch.no_grad():
                losses.append(model(input_ids, positions[mine], labels[mine], *documents))
        out[f"losses {when}"] = torch.stack(losses)
        changed = slice(starts[job["changed"]], starts[job["changed"] + 1])
        input_ids[:, changed] = input_ids[:, changed].flip(1)
    return out


def optimizer(job, device):
    """Every rank: values and gradients of its own shards before and after each of some steps."""
    model, params, masters, views = make_model(
        job["model"], device, job["adapter"], lora_rank=job["rank"]
    )
    adam = script.make_optimizer(masters)
    batch, out = load_file(job["batch"]), {}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = list(zip(batch["input_ids"], batch["labels"]))
    rows = rows[: len(rows) // ranks * ranks]
    for step in range(job["steps"]):
        (model(*script.collate(rows, rank, ranks, device)) / 100).backward()
        for name, p in params.items():
            out[f"{step}/{name}/before"] = p.to_local().detach().clone()
            out[f"{step}/{name}/grad"] = p.grad.to_local().clone()
        script.set_master_grad(masters, views, params)
        script.update_masters(adam, masters, job["lr"])
        script.publish_masters(views, params)
        for name, p in params.items():
            out[f"{step}/{name}/after"] = p.to_local().detach().clone()
    state = adam.state[masters]
    out["state1_is_uint8"] = torch.tensor(state["state1"].dtype == torch.uint8)
    out["paged"] = torch.tensor(getattr(state["state1"], "is_paged", False))
    if device.type == "cuda":
        out["managed"] = torch.tensor(is_managed(state["state1"].data_ptr()))
    return out


def is_managed(address):
    """Whether CUDA's runtime calls this address managed (paged) memory."""
    attributes = (ctypes.c_byte * 256)()  # CUDA 13's struct is 88 bytes, CUDA 12's was 24
    runtime = ctypes.CDLL("libcudart.so.13" if torch.version.cuda >= "13" else "libcudart.so.12")
    assert runtime.cudaPointerGetAttributes(attributes, ctypes.c_void_p(address)) == 0
    return int.from_bytes(bytes(attributes[:4]), "little") == 3  # cudaMemoryTypeManaged


def logits(job, device):
    """The logits of one batch by the model sharded over all ranks, and over this rank alone."""
    out, ids = {}, load_file(job["batch"])["input_ids"].to(device)
    alone = DeviceMesh.from_group(
        [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()],
        device.type,
        mesh_dim_names=("shard",),
    )
    for name, mesh in ("sharded", None), ("whole", alone):
        model, *_ = make_model(job["model"], device, job["adapter"], mesh=mesh, lora_rank=4)
        del model.forward  # the model's own, which returns logits
        with torch.no_grad():
            out[name] = model(input_ids=ids, use_cache=False).logits.cpu()
    return out


def patterns(job, device):
    """All 65,536 16-bit patterns through FSDP2: as NF4Blocks per policy, and as plain bf16."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    words = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16)
    packed = words.view(torch.uint8).view(-1, 32)
    codes = torch.arange(packed.shape[0], device=device).to(torch.uint8)
    out = {"expected": packed.cpu(), "expected_codes": codes.cpu()}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")}
    for name, settings in {
        "plain": {},
        "mixed": {"mp_policy": mixed},
        "offload": {"mp_policy": mixed, **offload},
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
        where = "cpu" if "offload_policy" in settings else device
        if name != "unprotected":
            mine = script.NF4Blocks(packed[part].to(where), codes[part].to(where))
            script.set_local(module, "weight", mine)
            script.set_local(module, "bias", torch.zeros(8 // dist.get_world_size(), device=where))
        for _ in range(2):  # the first gather allocates, the second fills what was freed
            module(torch.zeros(1, device=device))  # torch 2.11 wants an argument
            gathered = seen["w"].packed if name != "unprotected" else seen["w"].detach()
            out[name] = gathered.view(torch.uint8).view(-1, 32).clone()
            if name != "unprotected":
                out[f"{name}_codes"] = seen["w"].absmax_codes.clone()
            module.reshard()
    return out


def run(job):
    device = script.init_distributed()
    results = globals()[job["case"]](job, device)
    if dist.get_rank() == 0 or job["case"] == "optimizer":
        out = job["out"] + (f".{dist.get_rank()}" if job["case"] == "optimizer" else "")
        save_file({k: v.cpu().contiguous() for k, v in results.items()}, out)
    dist.barrier()
    dist.destroy_process_group()
    return 0
