"""What the numeric tests look at on each rank of ranks_runner.py, inside the script's own run.

A job is {"case": a function below, "out": file, ...its inputs}; the results of rank 0, those of
every rank where the case says so, go to the file as safetensors. What a case looks at is wired by
the script's finetune() itself: training() runs it from flags to adapter, with a function of the
test's in place of its steps. `process` is what finetune() wants besides flags: device and Status.
"""

import contextlib
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

import patching
import train_fsdp_qlora
from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.rows import make_rows
from fsdp_qlora.evaluation.generation import generate, generate_samples
from fsdp_qlora.layer.dequantize import dequantize
from fsdp_qlora.layer.linears import OPTIM_BLOCKSIZE
from fsdp_qlora.layer.offload import pinned_copy
from fsdp_qlora.lora.adapter import sharded_state
from fsdp_qlora.memory import host_memory
from fsdp_qlora.micro_batch.context_parallel import ONLY_PROCESS
from fsdp_qlora.model.embedding import embed
from fsdp_qlora.model.fsdp import gathered, set_local
from fsdp_qlora.model.lm_head import LinearCrossEntropy, greedy_tokens
from fsdp_qlora.model.parameters import shard_range
from fsdp_qlora.quant.blocks import FourBitBlocks
from fsdp_qlora.ranks import all_gather, on_rank_0
from fsdp_qlora.run.demo import write_demo
from fsdp_qlora.run.merge_check import MergeCheck
from fsdp_qlora.run.watch import watch_process

from minimal_runs import minimal  # noqa: F401 - a case


def training(job, process, model, flags, look):
    """What `look(run)` returns where finetune() would do its steps; with them ends what finetune()
    does. The data set and the tokenizer are made where the job and the model have none."""
    seen = {}

    def prepare():
        has_tokenizer = any(Path(model).glob("tokenizer*"))
        if not has_tokenizer or "dataset" not in job:
            with tempfile.TemporaryDirectory() as demo:
                write_demo(Path(demo))
                for path in (Path(demo) / "model").glob("*token*") if not has_tokenizer else ():
                    shutil.copy(path, model)
                shutil.copy(Path(demo) / "data.jsonl", f"{job['out']}.jsonl")
        return tempfile.mkdtemp(dir=Path(job["out"]).parent)

    directory = on_rank_0(prepare)

    def training_loop(run):
        seen.update(look(run))
        raise HasLooked

    patching.replace("train", training_loop)
    patching.replace("MergeCheck", MergeCheckOfNoMerge)
    dataset = job.get("dataset", f"{job['out']}.jsonl")
    argv = ["--model", model, "--dataset", dataset, "--output_dir", directory, *flags]
    with contextlib.suppress(HasLooked):
        train_fsdp_qlora.finetune(patching.parse_config([str(arg) for arg in argv]), *process)
    return seen


class HasLooked(Exception):
    """On all ranks: the run need not be saved."""


class MergeCheckOfNoMerge(MergeCheck):
    def record_without_adapter(self, model, adapter):
        """A forward of which nothing is looked at."""


def sharded(*flags):
    """FSDP2 over all processes; a GPU with a whole copy would need none."""
    return "--shard_group_size", dist.get_world_size(), "--max_steps", 4, *flags


def quantized(job, process):
    """Every linear as a forward has it: gathered bytes, nested state, dequantized weight."""

    def look(run):
        out = {}
        for i, layer in enumerate(run.model.layers):
            with gathered(layer):
                no_adapter = layer.vectors.new_zeros(len(layer.adapter))
                for fused in layer.spec.fused_linears:
                    weight = dequantize(layer, fused, no_adapter)
                    for linear in fused.linears:
                        name = f"model.layers.{i}.{linear.name}"
                        values = {
                            "packed": layer.packed_weights.packed[linear.blocks].clone(),
                            "codes": layer.packed_weights.scales[linear.blocks, 0].clone(),
                            "nested_absmax": layer.nested.absmax[linear.nested].clone(),
                            "nested_code": layer.nested.scale_codebooks[linear.index].clone(),
                            "offset": layer.nested.offsets[linear.index].clone(),
                            "dequantized": weight[linear.outputs, : fused.in_features].clone(),
                        }
                        out.update({f"{name}.{key}": value for key, value in values.items()})
        return out

    return {
        f"{Path(model).name}/{key}": value.cpu()
        for model in job["models"]
        for key, value in training(job, process, model, sharded(), look).items()
    }


def initial(job, process):
    """The adapter that a run begins with."""
    look = lambda run: run.adapter.gather_weights()  # noqa: E731
    return training(job, process, job["model"], sharded(*job["flags"]), look)


def evaluations(job, process):
    """Losses of the evaluation rows before and after a change of the adapter, where layers stay
    gathered from forward to backward; before it, the probe comes last."""

    def look(run):
        for layer in run.model.layers:
            layer.set_reshard_after_forward(False)
        losses = [train_fsdp_qlora.evaluate(run)["eval_loss"]]
        run.merge_check.tensors(run.model)
        with torch.no_grad():
            run.adapter.weights += 0.1
        return {"losses": torch.tensor([*losses, train_fsdp_qlora.evaluate(run)["eval_loss"]])}

    return training(job, process, job["model"], sharded("--eval_dataset", "0.1"), look)


def samples(job, process):
    """Answers of generate(): as long as can be; cut at a closing token; none that would take
    too long. And the same one token after the other, each by a forward of one document alone."""

    def alone(run, prompt, n):
        ids, whole = list(prompt), run.model.micro_batch_format._replace(context_group=ONLY_PROCESS)
        for _ in range(n):
            micro_batch = make_micro_batch(make_rows([(ids, ids)]), [[0]], whole)
            ids += greedy_tokens(run.model, run.model(micro_batch, wants_loss=False)[-1:]).tolist()
        return ids[len(prompt) :]

    @torch.no_grad()
    def look(run):
        patching.replace("SAMPLE_TOKENS", job["n"])
        prompts, stop_ids = job["prompts"], {job["n"] + 1000}
        for layer in run.model.layers if dist.get_world_size() > 1 else ():
            layer.set_reshard_after_forward(False)  # what is gathered stays unless it is freed
        before = generate(run.model, run.status, prompts, stop_ids, math.inf)
        generator = torch.Generator(run.device).manual_seed(dist.get_rank())
        run.adapter.weights.normal_(0, 0.2, generator=generator)
        whole = generate(run.model, run.status, prompts, stop_ids, math.inf)
        cut = generate(run.model, run.status, prompts, {whole[1][2]}, math.inf)
        out = {"dear": generate(run.model, run.status, prompts, stop_ids, 0.0),
               "stopped": (run.status.__setattr__("stop_reason", "SIGTERM"),
                           generate(run.model, run.status, prompts, stop_ids, math.inf))[1]}
        run.status.stop_reason = None
        out["n_unasked"] = [len(generate_samples(run, pace)) for pace in (1e6, 1e-9, None)]
        n = [min(job["n"], run.plan.micro_batch_tokens - len(prompt)) for prompt in prompts]
        out |= {f"whole {i}": ids for i, ids in enumerate(whole)}
        out |= {f"cut {i}": ids for i, ids in enumerate(cut)}
        out |= {f"alone {i}": alone(run, *pair) for i, pair in enumerate(zip(prompts, n))}
        out["has_changed"] = [whole != before]
        return {name: torch.tensor(ids) for name, ids in out.items()}

    flags = "--eval_dataset", "0.1", "--compute_dtype", "float32", *job["flags"]
    return training(job, process, job["model"], sharded(*flags), look)


def vocabulary(job, process):
    """Embedding and loss of all ranks' tokens by a sharded vocabulary, and what they came from."""

    def look(run):
        model, out = run.model, {}
        rank, ranks, hidden = model.shard_rank, model.shard_group_size, model.arch.hidden_size
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(17 * ranks, hidden, generator=generator).to(model.norm.dtype)
        labels = torch.randint(model.arch.vocab_size, (17 * ranks,), generator=generator)
        ids = labels.flip(0).clone()
        labels[[2, 9, -1]] = IGNORE_INDEX
        out.update(hidden=x, labels=labels, ids=ids)
        mine = slice(rank * 17, (rank + 1) * 17)
        x, labels, ids = (t[mine].to(run.device) for t in (x, labels, ids))
        target_positions = torch.arange(17, device=run.device).flip(0)  # of tokens in any order
        micro_batch = types.SimpleNamespace(
            targets=labels[target_positions], target_positions=target_positions,
            loss_bounds=torch.tensor([0, 5, 17, 17], device=run.device))
        chunk_bytes, row = patching.get("CHUNK_BYTES"), 4 * model.arch.vocab_size
        own_head = model.lm_head
        for chunk, n_bytes in ("8", row * 8), ("all", chunk_bytes), ("one", 1), ("large", row * 8):
            patching.replace("CHUNK_BYTES", n_bytes)
            model.lm_head = own_head * (1000 if chunk == "large" else 1)
            embedded = embed(model, ids)
            local = x.clone().requires_grad_()
            loss = LinearCrossEntropy.apply(local, model, micro_batch)
            (grad,) = torch.autograd.grad(loss.sum() * 0.25, local)
            gather = lambda t: all_gather(t, model.shard_group)  # noqa: E731
            out[f"{chunk}/embedded"] = gather(embedded).flatten(0, 1)
            out[f"{chunk}/grad"] = gather(grad).flatten(0, 1)
            out[f"{chunk}/loss"] = gather(loss.detach()).sum().float()
        patching.replace("CHUNK_BYTES", chunk_bytes)
        model.lm_head = own_head
        return out

    return {
        f"{dtype}/{key}": value
        for dtype in ("float32", "bfloat16")
        for key, value in training(
            job, process, job["model"], sharded("--compute_dtype", dtype), look
        ).items()
    }


def memory(job, process):
    """How far every rank's host memory grew while it loaded a model."""
    patching.replace("READ_AHEAD", job["ahead"])
    load_model, grown = patching.get("load_model"), []

    def measured(*args):
        before = host_memory().now
        frozen = load_model(*args)
        grown.append(host_memory().peak - before)
        return frozen

    patching.replace("load_model", measured)
    training(job, process, job["model"], sharded(), lambda run: {})
    return {"grown": all_gather(torch.tensor(grown))}


def gradients(job, process):
    """Loss and gradients of one step's rows, by train_step without its clipping and update."""

    def look(run):
        adapter, values = run.adapter, load_file(job["adapter"])
        for i in range(len(run.model.layers)):
            adapter.set_layer(i, values)
        adapter.set_token_rows(values)
        record, _ = train_fsdp_qlora.train_step(run, 1)
        norm = torch.tensor(record["grad_norm"])
        adapter.weights.data.copy_(adapter.weights.grad)
        return {"loss": torch.tensor(record["loss"]), "norm": norm, **adapter.gather_weights()}

    patching.replace("optimizer_step", lambda optimizer, adapter, rate: None)
    widths = count_exchanged()
    out = {}
    for name, flags in job["settings"].items():
        flags = sharded(*flags, "--max_grad_norm", "1e30")
        seen = training(job, process, job["model"], flags, look)
        out |= {f"{name}/{key}": value for key, value in seen.items()}
        if job.get("exchanged"):
            out[f"{name}/exchanged"] = torch.tensor(widths)
        widths.clear()
    return out


def count_exchanged():
    """A list to which each exchange between ranks that share a micro-batch adds the number of
    values of a token that goes from rank to rank, each gradient that returns the negative."""
    widths = []

    class CountedExchange(patching.get("KVExchange")):
        def gather(self, rows):
            widths.append(rows.shape[1])
            return super().gather(rows)

        def return_gradients(self, grad):
            widths.append(-grad.shape[1])
            return super().return_gradients(grad)

    patching.replace("KVExchange", CountedExchange)
    return widths


def preferences(job, process):
    """Of some settings: the reference, metrics of one step and of an evaluation with another
    adapter, and the step's gradients without clipping and update."""

    def look(run):
        adapter, values = run.adapter, load_file(job["adapter"])
        for i in range(len(run.model.layers)):
            adapter.set_layer(i, values)
        found = train_fsdp_qlora.evaluate(run)
        record, _ = train_fsdp_qlora.train_step(run, 1)
        adapter.weights.data.copy_(adapter.weights.grad)
        numbers = {key: torch.tensor(value, dtype=torch.float64)
                   for key, value in {**record, **found}.items()}  # fmt: skip
        none = torch.zeros(0)
        return {"reference": none if run.rows.ref_logps is None else run.rows.ref_logps,
                **numbers, **adapter.gather_weights()}  # fmt: skip

    patching.replace("optimizer_step", lambda optimizer, adapter, rate: None)
    return {
        f"{name}/{key}": value
        for name, flags in job["settings"].items()
        for key, value in training(
            job, process, job["model"], (*flags, "--max_grad_norm", "1e30"), look
        ).items()
    }


def optimizer(job, process):
    """Every rank: its own part of weights and gradients before and after each of some steps."""

    def look(run):
        out, update = {}, patching.get("optimizer_step")

        def watched(optimizer, adapter, rate):
            step = len(out) // 4
            out[f"{step}/before"] = adapter.by_layer(adapter.weights.data).clone()
            out[f"{step}/grad"] = adapter.by_layer(adapter.weights.grad).clone()
            out[f"{step}/rate"] = torch.tensor(rate, dtype=torch.float64)
            update(optimizer, adapter, rate)
            out[f"{step}/after"] = adapter.by_layer(adapter.weights.data).clone()

        patching.replace("optimizer_step", watched)
        for step in range(1, job["steps"] + 1):
            train_fsdp_qlora.train_step(run, step)
        out["n_adapter"] = torch.tensor(run.model.layers[0].spec.n_adapter_values)
        return out

    return training(job, process, job["model"], sharded(*job["flags"]), look)


optimizer.every_rank = True


def resumed(job, process):
    """The optimizer's state as a resumed run goes on with it: each layer's whole, unpadded."""
    out = {}

    def training_loop(run):
        adapter, n = run.adapter, run.model.layers[0].spec.n_adapter_values
        for key, value in sharded_state(run.optimizer).items():
            whole = all_gather(adapter.by_layer(value).contiguous(), adapter.shard_group)
            whole = whole.transpose(0, 1).flatten(1)  # [layers, all ranks' parts]
            out[key] = whole[:, : n // OPTIM_BLOCKSIZE if key.startswith("absmax") else n]
        out["done"] = torch.tensor([run.saved_step, run.optimizer.state[adapter.weights]["step"]])
        out["planned"] = torch.tensor(run.plan.memory.get("optimizer's state", 0))
        return []

    patching.replace("train", training_loop)
    train_fsdp_qlora.finetune(patching.parse_config(job["argv"]), *process)
    return out


def patterns(job, process):
    """All 65,536 16-bit patterns through FSDP2: as FourBitBlocks per policy, and as plain bf16."""
    device, _ = process
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    words = torch.arange(65536, dtype=torch.int32, device=device).to(torch.int16)
    packed = words.view(torch.uint8).view(-1, 32)
    codes = torch.arange(2 * packed.shape[0], device=device).to(torch.uint8).view(-1, 2)
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
            weight = FourBitBlocks.zeros(packed.shape[0], "meta", 2)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        module.bias = torch.nn.Parameter(torch.zeros(8, device=weight.device))  # as norms, LoRA do
        module.forward = lambda _, module=module, seen=seen: seen.update(w=module.weight)
        fully_shard(module, mesh=mesh, **settings)
        rows = shard_range(packed.shape[0], dist.get_rank(), dist.get_world_size())
        part = slice(rows.start, rows.stop)
        if name != "unprotected":
            place = pinned_copy if name == "offload" else torch.clone  # --offload_params
            mine = FourBitBlocks(place(packed[part]), place(codes[part]), device)
            set_local(module, "weight", mine)
            set_local(module, "bias", torch.zeros(8 // dist.get_world_size(), device=device))
        for _ in range(2):  # the first gather allocates, the second fills what was freed
            module(torch.zeros(1, device=device))  # torch 2.11 wants an argument
            gathered = seen["w"].packed if name != "unprotected" else seen["w"].detach()
            out[name] = gathered.view(torch.uint8).view(-1, 32).clone()
            if name != "unprotected":
                out[f"{name}_codes"] = seen["w"].scales.clone()
            module.reshard()
    return out


def run(job):
    device, case = train_fsdp_qlora.init_distributed(), globals()[job["case"]]
    with watch_process() as status:
        results = case(job, (device, status))
    every_rank = getattr(case, "every_rank", False)
    if dist.get_rank() == 0 or every_rank:
        out = job["out"] + (f".{dist.get_rank()}" if every_rank else "")
        save_file({k: v.cpu().contiguous() for k, v in results.items()}, out)
    dist.barrier()
    dist.destroy_process_group()
    return 0
