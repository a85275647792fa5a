"""Preference losses beside TRL's own trainers, on the same NF4 base, adapter and rows, in fp32.

    PYTHONPATH=path/to/trl python benchmarks/preferences.py [--seeds 4,5] [--losses dpo,kto]

For each loss, on one process and on two that share the model, with all layers kept and recomputed:
the largest difference of loss, rewards and log-probabilities from TRL's (relative where they are
above 1), and of the gradients of all adapter matrices, relative to their norms. The last two
columns say whose rounding that is: how far our gradients and TRL's are from those in fp64, of
transformers' model with the dequantized NF4 weights and of the formulas that are written down in
tests/test_preferences.py.

TRL 1.16 is no requirement of this project; without a GPU it takes a minute. What must be so that
all see the same numbers: TRL casts the adapters of a 4-bit base to bf16, here they are set back to
fp32; its CPO and ORPO trainers put BOS before prompts even where the tokenizer does not, here they
have none; its KTO pairs each prompt with the answer of the row before in the file, so the rows are
given to it in the order in which ours are paired.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch
from conftest import DEVICE, run_once
from families import TINY, write_model
from safetensors.torch import load_file, save_file
from test_preferences import FLAGS, LOSS_FLAGS, Reference, data_flags, write_preferences

from fsdp_qlora.run.demo import write_demo

LENGTH = 128  # so that nothing is cut: TRL joins KTO's mismatched answers before it cuts them
LOSSES = "dpo", "ipo", "simpo", "orpo", "kto"
LAYOUTS = {  # {name: (processes, flags)}
    "one process": (1, ["--recompute", "none"]),
    "one process, recomputed, small micro-batches": (
        1, ["--recompute", "all", "--micro_batch_tokens", 2 * LENGTH]),
    "two processes, pairs in two micro-batches": (
        2, ["--recompute", "none", "--shard_group_size", 2, "--micro_batch_tokens", LENGTH]),
    "two processes, recomputed": (2, ["--recompute", "all", "--shard_group_size", 2])}
RANK, ALPHA, SEED, ROWS, BATCH = 4, 64, 0, 7, 7


def trl_results(loss, base):
    """{name: tensor} of one batch by TRL's trainer."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        base / "model", quantization_config=quantization, dtype=torch.float32,
        device_map={"": "cuda" if torch.cuda.is_available() else "cpu"})
    path = base / f"rows{'_unpaired' * (loss == 'kto')}.jsonl"
    rows = [json.loads(line) for line in path.open()]
    if loss == "kto":
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(SEED)).tolist()
        rows = [rows[i] for i in order]
    config_class, trainer_class, options = trl_classes(loss)
    arguments = config_class(
        output_dir=str(base / "trl"), per_device_train_batch_size=BATCH, max_length=LENGTH,
        bf16=False, gradient_checkpointing=False, use_cpu=not torch.cuda.is_available(),
        report_to="none", disable_tqdm=True, **options)
    tokenizer = AutoTokenizer.from_pretrained(base / "model")
    if loss in ("simpo", "orpo"):
        tokenizer.bos_token = None
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear",
                               task_type="CAUSAL_LM"))
    params = {name.replace(".default", ""): p for name, p in trainer.model.named_parameters()
              if p.requires_grad}
    for name, value in load_file(base / "now.safetensors").items():
        params[name].data = value.to(params[name].device)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(ROWS)])
    trainer.model.train()
    value = trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))
    value.backward()
    metrics = trainer._metrics if hasattr(trainer, "_metrics") else trainer._stored_metrics
    found = {name: torch.tensor(values[-1], dtype=torch.float64)
             for name, values in metrics["train"].items()}
    return {**found, "loss": value.detach().double().cpu(),
            **{name: p.grad.cpu() for name, p in params.items()}}


def trl_classes(loss):
    """(config, trainer, what the config has for our flags) of TRL for a loss."""
    flags = LOSS_FLAGS[loss][2:]
    options = {name.removeprefix("--"): value for name, value in zip(flags[::2], flags[1::2])}
    if loss in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        kind = ["sigmoid" if loss == "dpo" else "ipo"]
        return DPOConfig, DPOTrainer, {"loss_type": kind, **options}
    if loss == "kto":
        from trl import KTOConfig, KTOTrainer

        return KTOConfig, KTOTrainer, options
    if loss == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOConfig, CPOTrainer, {"loss_type": "simpo", "cpo_alpha": 0.0, **options}
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return ORPOConfig, ORPOTrainer, options


def make_base(base, seed):
    """model/, rows.jsonl, rows_unpaired.jsonl, and an adapter whose B is not 0."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_demo(base / "demo")
    tokenizer = AutoTokenizer.from_pretrained(base / "demo" / "model")
    config = TINY["llama"](len(tokenizer))
    config.max_position_embeddings = LENGTH
    config.intermediate_size = 128  # bitsandbytes on a CPU wants rows of whole blocks
    write_model(base / "model", config)
    tokenizer.save_pretrained(base / "model")
    for name in "rows", "eval":
        write_preferences(base, name, ROWS, seed=3)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype=torch.float32)
    torch.manual_seed(seed)
    model = with_adapter(model)
    save_file({name.replace(".default", ""): torch.randn_like(p) * 0.03
               for name, p in model.named_parameters() if p.requires_grad},
              base / "now.safetensors")


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM",
                                            target_modules="all-linear"))


def exact_model(base):
    """The model with its dequantized NF4 weights, all in fp64, also norms and softmax, which
    transformers else computes in fp32."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base / "model", dtype=torch.float32, attn_implementation="sdpa")
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            stored = quantize_4bit(module.weight.data, quant_type="nf4", compress_statistics=True)
            module.weight.data = dequantize_4bit(*stored)
        elif hasattr(module, "variance_epsilon"):
            norm = torch.nn.RMSNorm(len(module.weight), eps=module.variance_epsilon)
            norm.weight.data = module.weight.data
            model.set_submodule(name, norm)
    return with_adapter(model.double()).double().to(DEVICE)


def own_results(base, losses):
    """{(layout, loss): {name: tensor}}"""
    flags = [flag for pair in zip(FLAGS[::2], FLAGS[1::2]) for flag in pair
             if pair[0] not in ("--lora_rank", "--lora_alpha", "--batch_size", "--max_seq_len")]
    flags += ["--lora_rank", RANK, "--lora_alpha", ALPHA, "--batch_size", BATCH,
              "--max_seq_len", LENGTH]
    found = {}
    for nproc in 1, 2:
        settings = {
            f"{layout}|{loss}": [*LOSS_FLAGS[loss], *data_flags(loss), *flags, *more]
            for layout, (n, more) in LAYOUTS.items() if n == nproc for loss in losses}
        job = {"case": "preferences", "out": str(base / f"out-{nproc}"), "model": "model",
               "dataset": "rows.jsonl", "adapter": "now.safetensors", "settings": settings,
               "cwd": str(base), "nproc": nproc}
        (launch := base / f"launch-{nproc}").mkdir()
        done = run_once(nproc, job, launch)
        if not (base / f"out-{nproc}").exists():
            sys.exit(done.stdout + done.stderr)
        for key, value in load_file(base / f"out-{nproc}").items():
            name, _, key = key.partition("/")
            found.setdefault(tuple(name.split("|")), {})[key] = value
    return found


def distances(got, want):
    """{kind: the largest relative distance of what both have}"""
    worst = dict.fromkeys(("loss", "rewards", "logps", "lora", "kl"))
    for name in want.keys() & got.keys():
        kind = "lora" if "lora" in name else name.split("/")[0]
        if kind in worst:
            value = want[name].double()
            size = value.norm() if kind == "lora" else value.abs().clamp(min=1)
            off = float((got[name].double() - value).norm() / size)
            worst[kind] = max(off, worst[kind] or 0.0)
    return worst


def compare(seed, losses):
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        make_base(base, seed)
        own, reference = own_results(base, losses), Reference(base, exact_model(base), LENGTH)
        for loss in losses:
            trl, exact = trl_results(loss, base), reference.of_rows(loss, "rows", [*range(ROWS)])
            for layout in LAYOUTS:
                got = own[layout, loss]
                cells = [*distances(got, trl).values(), distances(got, exact)["lora"],
                         distances(trl, exact)["lora"]]
                cells = " ".join(" " * 9 if off is None else f"{off:9.1e}" for off in cells)
                cells += f"  KL {float(exact['kl']):.3f}" if "kl" in exact else ""
                print(f"{seed:4} {loss:6} {layout:36} {cells}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", default="4", help="of the adapters, with commas")
    parser.add_argument("--losses", default=",".join(LOSSES), help="with commas")
    args = parser.parse_args()
    titles = "loss rewards logps gradients kl fp64,ours fp64,TRL".split()
    print(f"seed {'loss':6} {'layout':36}", *(f"{title:>9}" for title in titles))
    for seed in args.seeds.split(","):
        compare(int(seed), args.losses.split(","))


if __name__ == "__main__":
    main()
