#!/usr/bin/env python3
"""What users would take instead, on the same work as a case of run.py, each at its best.

    python benchmarks/run.py speed --cases nemo-1gpu,nemo-1gpu-all --peers unsloth,trl-ddp-liger
    python benchmarks/run.py small --peers all --peers_path .p-site

Choose cases whose model in bf16 a disk can take: peers read a checkpoint, which is made first.
run.py starts this file once for each of them, because Unsloth patches what it imports; nothing of a
peer is imported elsewhere, and --peers_path, where they are installed, is on no other path.

The same for all: random weights in NF4 with double quantization, LoRA of rank 16 on all linears,
bf16, rows of one length that are trained whole, as many a step and GPU as in the case and all of
them at once, 8-bit AdamW with paged state. Recomputed is what the case recomputes: by TRL whole
layers (nonreentrant), by Unsloth whole layers whose inputs are on the host ("unsloth"). What a
peer leaves to choose is set for speed: TRL's DDP does not look for unused parameters, the loss is
read at the first and the last step only, Unsloth does not lengthen rows for cuDNN. Attention: of
TRL SDPA, or flash-attn 2 where the case has it; of Unsloth what it takes itself (flash-attn 2 if
installed), or as "unsloth-sdpa" SDPA.

It writes metrics.jsonl as train_fsdp_qlora.py does. Seconds of a step: between CUDA events at the
ends of steps, so that measuring waits for nothing. peak_memory_gib: rank 0's
torch.cuda.max_memory_allocated() since the training's start, without loading. The loss of all
steps but the first is their mean.
"""

import functools
import json
import os
import sys
import time
from pathlib import Path

RANK, GIB = 16, 2**30
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
           "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]  # fmt: skip


def write_weights(directory):
    """Random weights for the config.json that is there, as a checkpoint in bf16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cuda" if torch.cuda.is_available() else "cpu").tie_weights()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.02) if weight.ndim > 1 else weight.fill_(1)
        for factor in model.buffers():  # Gemma 4's; others are not saved
            factor.fill_(1)
    model.save_pretrained(directory, max_shard_size="4GB")


def meter(work, output):
    """A callback that writes metrics.jsonl when the training has ended."""
    import torch
    from transformers import TrainerCallback

    cuda, marks, losses = torch.cuda.is_available(), [], []

    def mark():
        marks.append(torch.cuda.Event(enable_timing=True) if cuda else time.perf_counter())
        if cuda:
            marks[-1].record()

    class Meter(TrainerCallback):
        def on_train_begin(self, *_, **__):
            if cuda:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            mark()

        def on_step_end(self, *_, **__):
            mark()

        def on_log(self, *_, logs, **__):
            if "loss" in logs:
                losses.append(float(logs["loss"]))

        def on_train_end(self, args, state, control, **_):
            if not state.is_world_process_zero:
                return
            if cuda:
                torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / GIB if cuda else 0.0
            with (output / "metrics.jsonl").open("w") as file:
                for step, (before, after) in enumerate(zip(marks, marks[1:]), 1):
                    seconds = before.elapsed_time(after) / 1000 if cuda else after - before
                    record = {
                        "step": step,
                        "loss": losses[0 if step == 1 else -1],
                        "packing_efficiency": 1,
                        "seconds": seconds,
                        "peak_memory_gib": peak,
                        "tokens_per_second_per_gpu": work["rows"] * work["seq"] / seconds,
                    }
                    print(json.dumps(record), file=file)

    return Meter()


def settings(work, output, **more):
    """Trainer's and TRL's, and the rows."""
    import torch
    from datasets import Dataset
    from transformers import AutoConfig
    from trl import SFTConfig

    config = SFTConfig(
        output_dir=str(output), max_steps=work["steps"], per_device_train_batch_size=work["rows"],
        gradient_accumulation_steps=1,  # which Unsloth makes 2 where it is left out
        max_length=work["seq"], packing=False, optim="paged_adamw_8bit", learning_rate=1e-4,
        lr_scheduler_type="constant", max_grad_norm=1.0, bf16=True, seed=0,
        use_cpu=not torch.cuda.is_available(), gradient_checkpointing=work["recompute"],
        logging_steps=work["steps"], logging_first_step=True, logging_nan_inf_filter=False,
        report_to="none", save_strategy="no", disable_tqdm=True, **more)  # fmt: skip
    n_rows = work["steps"] * work["rows"] * int(os.environ.get("WORLD_SIZE", 1))
    vocab, draw = AutoConfig.from_pretrained(work["model"]).vocab_size, torch.Generator()
    rows = torch.randint(4, vocab, (n_rows, work["seq"]), generator=draw.manual_seed(0))
    return {"args": config, "train_dataset": Dataset.from_dict({"input_ids": rows.tolist()})}


def trl(work, output, fsdp, liger, experts=False):
    """TRL's SFTTrainer with PEFT and bitsandbytes: a copy of the model on each GPU, or with `fsdp`
    one that FSDP1 shards: FSDP2 damages NF4 weights and fails with 8-bit AdamW. With `experts`, of
    a mixture, whose experts bitsandbytes leaves in bf16: all in bf16, transformers' own grouped
    products, adapters on attention."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTTrainer

    sharded = {"version": 1, "reshard_after_forward": "full_shard", "use_orig_params": False,
               "backward_prefetch": "backward_pre", "sync_module_states": False}  # fmt: skip
    # before the model: it starts the process group and takes this rank's GPU
    common = settings(
        work, output, gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=liger, ddp_find_unused_parameters=False, ddp_broadcast_buffers=False,
        **({"fsdp": True, "fsdp_config": sharded} if fsdp else {}),
    )  # fmt: skip
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=torch.bfloat16,
    )  # fmt: skip
    kind = {"quantization_config": quantized}
    if experts:
        kind = {"experts_implementation": "grouped_mm"}
    device = int(os.environ.get("LOCAL_RANK", 0)) if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=torch.bfloat16, attn_implementation=work["attn"],
        device_map={"": device}, **kind,
    )  # fmt: skip
    model.config.use_cache = False
    adapter = LoraConfig(r=RANK, lora_alpha=2 * RANK, bias="none", task_type="CAUSAL_LM",
                         target_modules=TARGETS[:4] if experts else TARGETS)  # fmt: skip
    trainer = SFTTrainer(model, processing_class=AutoTokenizer.from_pretrained(work["model"]),
                         peft_config=adapter, **common)  # fmt: skip
    made = trainer.accelerator.distributed_type
    assert fsdp == (made == "FSDP"), f"Accelerate made it {made}; it shards on GPUs only"
    return trainer


def unsloth(work, output, sdpa, fsdp2=False):
    """Unsloth, with the attention that it takes itself, or with SDPA: on one GPU, or on several by
    its own FSDP2, which has a copy of the frozen weights on each GPU ("fit") or shards them."""
    if sdpa:
        sys.modules["flash_attn"] = None  # it takes that wherever it is installed
    os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_SDPA_CUDNN_BUCKET": "0"}
    if fsdp2:
        frozen = "sharded" if work["layout"] == "sharded" else "fit"
        os.environ |= {"UNSLOTH_FSDP2": "1", "UNSLOTH_FSDP2_LAYOUT": frozen}
    from unsloth import FastLanguageModel  # before TRL and transformers, which it patches

    import torch
    from trl import SFTTrainer

    checkpointing = "unsloth" if work["recompute"] else False
    model, tokenizer = FastLanguageModel.from_pretrained(
        work["model"], max_seq_length=work["seq"], dtype=torch.bfloat16, load_in_4bit=True,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    model = FastLanguageModel.get_peft_model(
        model, r=RANK, lora_alpha=2 * RANK, lora_dropout=0, bias="none", target_modules=TARGETS,
        use_gradient_checkpointing=checkpointing,
    )  # fmt: skip
    return SFTTrainer(model, processing_class=tokenizer, **settings(work, output))


WHOLE = "one GPU", "copies"  # layouts, see run.py's layout()
PEERS = {  # name: (its layouts, what makes its trainer)
    "trl-ddp": (WHOLE, functools.partial(trl, fsdp=False, liger=False)),
    "trl-ddp-liger": (WHOLE, functools.partial(trl, fsdp=False, liger=True)),
    "trl-fsdp": (("sharded",), functools.partial(trl, fsdp=True, liger=False)),
    "trl-fsdp-liger": (("sharded",), functools.partial(trl, fsdp=True, liger=True)),
    "trl-bf16-experts": (
        ("experts",), functools.partial(trl, fsdp=False, liger=False, experts=True)),
    "unsloth": (("one GPU",), functools.partial(unsloth, sdpa=False)),
    "unsloth-sdpa": (("one GPU",), functools.partial(unsloth, sdpa=True)),
    "unsloth-fsdp2": (
        ("copies", "sharded"), functools.partial(unsloth, sdpa=True, fsdp2=True)),
}


def main(name, work):
    work, output = json.loads(work), Path(json.loads(work)["output"])
    output.mkdir(exist_ok=True)
    os.chdir(output)  # Unsloth writes the code that it makes there
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    trainer = PEERS[name][1](work, output)
    trainer.add_callback(meter(work, output))
    trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"{name}: {type(trainer.model).__name__}, {trainer.accelerator.distributed_type},"
          f" {trained:,} trained parameters", flush=True)  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    write_weights(sys.argv[2]) if sys.argv[1] == "weights" else main(*sys.argv[1:])
