#!/usr/bin/env python3
"""How far bf16 gradients are from exact ones: the script's, and those of transformers with PEFT.

    python benchmarks/gradients.py --out bench [--models qwen3_5,granite_h]

Small random models with heads of real sizes, so that a GPU takes the kernels that it takes for
large ones. All start from the same checkpoint, the same random adapter and the rows of one step, of
different lengths. Exact: transformers with bitsandbytes' NF4 and PEFT, in fp32 on the CPU.
transformers takes its own torch functions, not those of flash-linear-attention, which it would call
on a CPU as well. Printed are Frobenius norms of differences, relative to the exact gradient of all
adapters.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from run import ROOT, chat_lengths, write_chat
from safetensors.torch import load_file, save_file

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = dict(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, vocab_size=512, dtype="bfloat16")  # fmt: skip
MODELS = {
    "llama": dict(model_type="llama"),
    "qwen3_5": dict(
        model_type="qwen3_5_text", head_dim=128, linear_num_key_heads=4, linear_num_value_heads=8),
    "granite_h": dict(
        model_type="granitemoehybrid", num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=1024, mamba_n_heads=16, mamba_d_head=64, mamba_d_state=128,
        position_embedding_type="nope", layer_types=["mamba", "mamba", "attention", "mamba"]),
    "gemma4": dict(
        model_type="gemma4_text", head_dim=256, global_head_dim=512, sliding_window=128,
        num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention"] * 3 + ["full_attention"], tie_word_embeddings=True),
    "youtu": dict(  # latent attention
        model_type="youtu", q_lora_rank=256, kv_lora_rank=256, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, num_key_value_heads=4),
}  # fmt: skip
RANK, ALPHA, ROWS, LONGEST = 16, 32, 16, 400


def write_model(directory, settings):
    """A checkpoint with random weights, rows of text, and an adapter whose B is not zero. Returns
    the rows' file."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**SMALL, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(0.25)  # else random queries and keys see one token alone
    model.save_pretrained(directory)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    adapter = get_peft_model_state_dict(get_peft_model(model, lora))
    adapter = {name: torch.randn(value.shape) * 0.02 for name, value in adapter.items()}
    lora.base_model_name_or_path, lora.inference_mode = str(directory), True
    lora.target_modules = sorted({name.split(".")[-3] for name in adapter})
    lora.save_pretrained(directory / "adapter")
    save_file(adapter, directory / "adapter" / "adapter_model.safetensors")
    return write_chat(directory, chat_lengths(ROWS, LONGEST))


def ours(directory, rows, out):
    """{name: gradient} by the script, and the rows as it read them, [(ids, labels)]. It runs in a
    process of its own, see traced()."""
    flags = (f"--model {directory} --dataset {rows} --max_seq_len {LONGEST} --batch_size {ROWS}"
             f" --max_steps 1 --max_grad_norm 1e30 --lora_rank {RANK} --lora_alpha {ALPHA}"
             f" --init_adapter {directory / 'adapter'} --output_dir {out / 'run'}")  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "traced", out / "rows", *flags.split()],
        capture_output=True, text=True, check=False)  # fmt: skip
    (out / "log.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        sys.exit(f"{directory.name}: see {out / 'log.txt'}")
    seen = load_file(out / "rows")
    parts = (seen[key].split(seen["lengths"].tolist()) for key in ("ids", "labels"))
    return load_file(out / "run" / "adapter_model.safetensors"), list(zip(*parts))


def traced(path, argv):
    """The script for one step, which leaves the gradients in the adapter's place and its rows in
    `path`."""
    sys.path.insert(0, str(ROOT))
    import train_fsdp_qlora as script

    rows_of_step = script.rows_of_step

    def looked_at(run, step):
        batch, micro_batches = rows_of_step(run, step)
        ids, labels = map(torch.cat, zip(*(batch.document(i) for i in range(len(batch)))))
        save_file({"ids": ids, "labels": labels, "lengths": batch.lengths}, path)
        return batch, micro_batches

    def leave_gradient(optimizer, adapter, rate):
        adapter.weights.data.copy_(adapter.weights.grad)

    script.rows_of_step, script.optimizer_step = looked_at, leave_gradient
    code = script.main(argv)
    sys.stdout.flush()
    os._exit(code)  # for the reason that the script does


def theirs(directory, rows, dtype, device):
    """{name: gradient} by transformers, bitsandbytes and PEFT."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=quantized, dtype=dtype, device_map={"": device})
    model = PeftModel.from_pretrained(model, directory / "adapter", is_trainable=True).train()
    model.config.use_cache = False
    ids, labels = (torch.nn.utils.rnn.pad_sequence([row[i] for row in rows], True, padding)
                   for i, padding in enumerate((0, -100)))  # nothing looks ahead  # fmt: skip
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(input_ids=ids.to(device)).logits[:, :-1].float()
    F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].to(device).flatten()).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {n: grad.float().cpu() for n, grad in get_peft_model_state_dict(model, grads).items()}


def distance(grads, exact):
    whole = torch.cat([grad.flatten() for grad in exact.values()]).norm()
    return float(torch.cat([(grads[n] - exact[n]).flatten() for n in exact]).norm() / whole)


def main(argv):
    if argv[:1] == ["traced"]:
        traced(argv[1], argv[2:])
    sys.modules["fla"] = None  # so that transformers does not find it
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/gradients"))
    parser.add_argument("--models", default=",".join(MODELS), help="of them, with commas")
    args = parser.parse_args(argv)
    print("| model | the script | transformers + PEFT |\n|---|---|---|")
    for name in args.models.split(","):
        out = args.out.resolve() / name
        shutil.rmtree(out, ignore_errors=True)
        rows = write_model(out / "model", MODELS[name])
        got, seen = ours(out / "model", rows, out)
        exact = theirs(out / "model", seen, torch.float32, "cpu")
        far = distance(got, exact)
        other = distance(theirs(out / "model", seen, torch.bfloat16, DEVICE), exact)
        print(f"| {name} | {100 * far:.2f} % | {100 * other:.2f} % |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
