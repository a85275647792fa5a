"""minimal_fsdp_qlora.py, by torchrun and on the ranks of ranks_runner.py, against transformers,
PEFT, bitsandbytes and train_fsdp_qlora.py; and merge_adapters.py on what it and PEFT save."""

import argparse
import ast
import itertools
import json
import math
import random
import re
import shutil
import sys

import bitsandbytes as bnb
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import DEVICE, ROOT, do_here, needs_ranks, one_process, selected_params
from minimal_runs import EDITS, PROBE, RECIPES, OwnConfig, OwnForCausalLM
from peft import (
    LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict)
from peft.tuners.lora import LoraLayer
from rows import CHATML, SWITCHED, UNCLOSED
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedTokenizerFast)
from transformers.utils import is_flash_attn_2_available

import merge_adapters
import minimal_fsdp_qlora
import train_fsdp_qlora
from minimal_fsdp_qlora import bare_name

from fsdp_qlora.config import Config

SCRIPT = ROOT / "minimal_fsdp_qlora.py"
# inner widths in multiples of 64: bitsandbytes on a CPU dequantizes rows that share a block wrongly
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.06,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
           "head_dim": 32}  # fmt: skip
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 2, "patch_size": 14, "image_size": 28}  # fmt: skip
TIED = {"tie_word_embeddings": True}
FAMILIES = {  # model type: settings besides SIZES
    "llama": {"attention_bias": True},
    "qwen3": {"head_dim": 64},
    "olmo2": {},
    "gemma3_text": {**SLIDING, **TIED, "query_pre_attn_scalar": 32},
    "gemma4_text": {
        **SLIDING, **TIED, "global_head_dim": 64, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
    },
    "qwen3_5_text": {
        "head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "lfm2": {
        **TIED, "layer_types": ["conv", "full_attention"], "block_multiple_of": 64,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"], "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 192, "mamba_n_heads": 8,
        "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 16,
    },
    "youtu": {
        "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "gemma3": {"text": "gemma3_text", "vision_model": "siglip_vision_model"},  # multimodal
}  # fmt: skip
# by `make test-slow`
RARE = "olmo2", "gemma3_text", "gemma4_text", "lfm2", "granitemoehybrid", "youtu", "gemma3"
SOME_FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in FAMILIES]
MERGED = ["llama", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_5_text"]
MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}
FLAGS = ["--max_steps", 3, "--batch_size", 4, "--max_seq_len", 64, "--learning_rate", 5e-3]
STEP = re.compile(r"^step +(\d+)/\d+ \| loss +([\d.]+) \| lr \S+ \| grad_norm +([\d.]+) ", re.M)


def config_of(model_type, vocab_size):
    settings = dict(FAMILIES.get(model_type, MIXTURE))
    if "hidden_size_per_layer_input" in settings:
        settings["vocab_size_per_layer_input"] = vocab_size
    if text := settings.pop("text", None):
        vision = {**VISION, "model_type": settings.pop("vision_model")}
        return transformers.AutoConfig.for_model(
            model_type, text_config=config_of(text, vocab_size).to_dict(), vision_config=vision,
            mm_tokens_per_image=4, boi_token_index=3, eoi_token_index=4, image_token_index=5,
            **TIED)  # fmt: skip
    return transformers.AutoConfig.for_model(
        model_type, vocab_size=vocab_size, **{"tie_word_embeddings": False, **SIZES, **settings})


def write_model(directory, model_type, tokenizer):
    """A tiny bf16 model; one of a Llama is in several files with an index."""
    torch.manual_seed(1)
    config = config_of(model_type, len(tokenizer))
    auto = (transformers.AutoModelForImageTextToText if hasattr(config, "vision_config")
            else AutoModelForCausalLM)  # fmt: skip
    model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():  # transformers starts at 1 and at 0
            if "norm" in name or name.endswith(".bias"):
                value.add_(torch.randn_like(value) * 0.1)
        for name, value in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4
                value.mul_(0.9)
    size = "300KB" if model_type == "llama" else "1GB"
    model.to(torch.bfloat16).save_pretrained(directory, max_shard_size=size)
    tokenizer.save_pretrained(directory)
    if model_type == "gemma3":  # released so; transformers 5.24 saves vision_tower.embeddings.*
        shutil.copytree(directory, directory.with_name("gemma3_saved"))
        path, vision = directory / "model.safetensors", r"vision_tower\.(?!vision_model)"
        save_file({re.sub(vision, "vision_tower.vision_model.", name): value
                   for name, value in load_file(path).items()}, path, {"format": "pt"})  # fmt: skip


@pytest.fixture(scope="module")
def wanted(request):
    """The families: of RARE those of the selected tests."""
    selected = {params.get("family") for params in selected_params(request)}
    return [name for name in FAMILIES if name in selected or name not in RARE]


@pytest.fixture(scope="module")
def base(tmp_path_factory, demo_directory, wanted):
    """A directory with the models, text.jsonl, and mixed.jsonl, which has conversations too."""
    directory = tmp_path_factory.mktemp("minimal")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    for model_type in *wanted, "mixtral":
        write_model(directory / model_type, model_type, tokenizer)
    torch.manual_seed(1)
    OwnForCausalLM(OwnConfig(vocab_size=len(tokenizer))).bfloat16().save_pretrained(
        directory / "own")
    tokenizer.save_pretrained(directory / "own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES["gemma4_text"], "hidden_size_per_layer_input", 64)
        write_model(directory / "gemma4_e", "gemma4_text", tokenizer)
    shutil.copytree(demo_directory / "model", directory / "demo")
    save_file({"vision_tower.patches.weight": torch.ones(4)},
              directory / "demo" / "model-more.safetensors")
    shutil.copytree(demo_directory / "model", directory / "biased")
    save_file({"model.layers.0.self_attn.q_proj.bias": torch.ones(4)},
              directory / "biased" / "model-more.safetensors")
    for model_type in "qwen2_5_vl", "unknown":
        edit_config(shutil.copytree(demo_directory / "model", directory / model_type),
                    model_type=model_type)
    shutil.copytree(directory / "llama", directory / "lacking")
    index = directory / "lacking" / "model.safetensors.index.json"
    (index.parent / json.loads(index.read_text())["weight_map"]["model.norm.weight"]).unlink()
    shutil.copytree(directory / "llama", directory / "falcon_h1")
    (directory / "falcon_h1" / "config.json").write_text('{"model_type": "falcon_h1"}')
    shutil.copytree(directory / "qwen3", directory / "cut")  # a norm, which would be broadcast
    weights = load_file(directory / "cut" / "model.safetensors")
    name = next(name for name in weights if name.endswith("q_norm.weight"))
    weights[name] = weights[name][:1].clone()
    save_file(weights, directory / "cut" / "model.safetensors", {"format": "pt"})
    weights = load_file(directory / "qwen3" / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    shutil.copytree(directory / "qwen3", directory / "fp8")
    save_file({**weights, name: weights[name].to(torch.float8_e4m3fn)},
              directory / "fp8" / "model.safetensors", {"format": "pt"})
    edit_config(shutil.copytree(directory / "qwen3", directory / "tied"), tie_word_embeddings=True)
    edit_config(shutil.copytree(directory / "qwen3", directory / "same_head"),
                tie_word_embeddings=True)
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()},
              directory / "same_head" / "model.safetensors", {"format": "pt"})
    edit_config(shutil.copytree(directory / "qwen3", directory / "encoder"), is_causal=False)
    shutil.copytree(directory / "qwen3", directory / "twice")
    shutil.copy(directory / "twice/model.safetensors", directory / "twice/model-2.safetensors")
    edit_config(shutil.copytree(directory / "qwen3", directory / "quantized"),
                quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    draw, words = random.Random(3), "what is the answer to this plus minus times 1 2 3 4 5".split()
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 30))) for _ in range(24)]
    rows = [{"text": text} for text in texts]
    write_jsonl(directory / "text.jsonl", rows)
    rows[::3] = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "4"}]}
        for text in texts[::3]]  # fmt: skip
    write_jsonl(directory / "mixed.jsonl", rows)
    write_jsonl(directory / "few.jsonl", rows[:12])
    write_jsonl(directory / "talks.jsonl", [row for row in rows if "messages" in row][:3])
    write_jsonl(directory / "five.jsonl", [{"text": text[::-1]} for text in texts[:5]])
    write_jsonl(directory / "answers.jsonl", [{"prompt": text, "response": "4"} for text in texts])
    open_ended = [{"messages": [{"role": role, "content": "4"}]} for role in ("user", "assistant")]
    write_jsonl(directory / "unanswered.jsonl", [*open_ended, *rows])
    write_jsonl(directory / "odd.jsonl", [rows[0], {"prompt": "1", "completion": "2"}])
    write_jsonl(directory / "null.jsonl", [{"text": None}])
    (directory / "broken.jsonl").write_text('{"text": "1"}\n\n{"text": "2}\n')
    (directory / "taken").mkdir()
    (directory / "taken" / "adapter_model.safetensors").touch()
    (directory / "gguf").mkdir()
    (directory / "gguf" / "model.gguf").touch()
    shutil.copytree(directory / "qwen3", directory / "zeros")
    path = directory / "zeros" / "model.safetensors"
    zeros = {name: torch.zeros_like(value) for name, value in load_file(path).items()}
    save_file(zeros, path, {"format": "pt"})
    return directory


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


N_OUTPUTS = itertools.count()


def flags(model, output, *more, rows="text.jsonl"):
    """output "x": a directory that no other run has."""
    output = f"x{next(N_OUTPUTS)}" if output == "x" else output
    return ["--model", model, "--dataset", rows, "--output_dir", output, *FLAGS, *more]


def whole(model, output, dtype):
    rows, n = FEW_OR_ALL[dtype]
    return flags(model, output, *WHOLE, "--batch_size", n, rows=rows)


def as_lists(rows):
    """The rows of minimal_fsdp_qlora.py with lists in place of tensors."""
    return [(row.ids.tolist(), row.labels.tolist()) for row in rows]


def read(path, args, tokenizer, n_needed=math.inf):
    """The rows of a file, and those of all steps."""
    with one_process():
        rows = minimal_fsdp_qlora.read_rows(str(path), args, tokenizer, n_needed)
        return rows, minimal_fsdp_qlora.rows_of_all_steps(rows, args)


def losses(text):
    return [float(loss) for _, loss, _ in STEP.findall(text)]


def gradients(text):
    return [float(norm) for *_, norm in STEP.findall(text)]


UNEVEN = "qwen3", "gemma3_text", "qwen3_5_text", "lfm2", "granitemoehybrid"
HYBRID = "qwen3_5_text"  # of Gated DeltaNet and attention; the others by `make test-slow`
# all rows in each step, in several micro-batches; in bf16 the more rows, the less noise
WHOLE = ["--max_steps", 2, "--lora_alpha", 64]
FEW_OR_ALL = {"fp32": ("few.jsonl", 12), "bf16": ("mixed.jsonl", 24)}
AT_ONCE = {"fp32": ["--micro_batch_size", 2], "bf16": []}
BESIDE = {  # of the big script: name: (processes, dtype, more flags, patches)
    f"{dtype} on {n}{flag and ' offloaded'}, {rows or 'micro-batches'}": (
        n, dtype, flag, [f"in_{dtype}"] * (dtype == "fp32") + [rows] * bool(rows))
    for n in (1, 2) for flag in ("", "--offload") for rows in ("", "one_by_one")
    for dtype in ("fp32", "bf16") if dtype == "fp32" or n == 2 and bool(flag) != bool(rows)
}  # fmt: skip
SOME_BESIDE = ["fp32 on 2 offloaded, micro-batches"]  # the others by `make test-slow`
# whose tests are by `make test-slow`
SLOW_RUNS = "on 4", "copies as on CUDA", "evaluated", "saved each step", "unanswered"
ODD = ["--max_steps", 5, "--lora_rank", 2, "--batch_size", 5]
EVALUATED = ["--eval_dataset", "five.jsonl", "--save_every", 1]
RUNS = {  # name: (processes, what the job has)
    **{name: (2, {"argv": flags(name, f"{name}-adapter")}) for name in FAMILIES},
    **{f"{name}, {how}": (2, {"argv": flags(name, "x", "--batch_size", 12, "--max_steps", 2,
                                            rows="few.jsonl"),
                              "with": ["in_fp32"] + [how] * (how == "one_by_one")})
       for name in UNEVEN for how in ("micro-batches", "one_by_one")},
    **{name: (n, {"argv": [*whole("llama", "x", dtype), *AT_ONCE[dtype], *flag.split()],
                  "with": patches}) for name, (n, dtype, flag, patches) in BESIDE.items()},
    # more ranks than rows of A; a step's rows are no multiple of the ranks
    **{f"on {n}": (n, {"argv": flags("llama", f"on-{n}", *ODD, rows="mixed.jsonl")})
       for n in (1, 4)},
    "edit: HSDP": (4, {"argv": flags("llama", "x", *ODD, rows="mixed.jsonl"),
                       "with": ["HSDP"]}),
    **{f"edit: {name}": (2, {"argv": flags("llama", name, *more, rows=rows),
                             "with": [name]})
       for name, rows, *more in (
           ("layers stay gathered", "text.jsonl", *EVALUATED),
           ("LoRA+", "text.jsonl"), ("initial adapter", "text.jsonl"),
           ("gaussian", "text.jsonl"), ("weights", "text.jsonl"),
           ("columns", "answers.jsonl"),
           ("generation", "text.jsonl", "--eval_dataset", "talks.jsonl"),
           ("attention only", "text.jsonl"), ("AdamW", "text.jsonl"))},
    "own class": (2, {"argv": flags("own", "own-adapter"), "with": ["own_class"]}),
    "copies as on CUDA": (2, {"argv": flags("llama", "x"), "with": ["copies_as_on_cuda"]}),
    "LoRA in bf16": (2, {"argv": flags("llama", "x"), "with": ["lora_in_bf16"]}),
    "the lm_head is unfrozen": (2, {"argv": flags("qwen3", "x"), "with": ["lm_head_is_unfrozen"]}),
    "a norm is trained": (2, {"argv": flags("llama", "x"), "with": ["norm_is_trained"]}),
    "a norm is not read": (2, {"argv": flags("llama", "x"), "with": ["norm_is_not_read"]}),
    "evaluated": (2, {"argv": flags("llama", "x"), "with": ["evaluated_first"]}),
    "saved each step": (2, {"argv": flags("llama", "saved", "--save_every", 1)}),
    "held out": (2, {"argv": flags("llama", "held", "--eval_dataset", "five.jsonl",
                                      "--save_every", 2, "--micro_batch_size", 1)}),
    "killed": (2, {"argv": flags("llama", "killed", "--save_every", 1),
                   "with": ["killed_while_saving"]}),
    "unanswered": (2, {"argv": flags("llama", "x", "--max_steps", 1, "--batch_size", 25,
                                        rows="unanswered.jsonl")}),
    "mamba": (2, {"argv": flags("falcon_h1", "x")}),
    "moe": (2, {"argv": flags("mixtral", "x")}),
    "gemma4_e": (2, {"argv": flags("gemma4_e", "x")}),
    "lacking": (2, {"argv": flags("lacking", "x")}),
    "quantized": (2, {"argv": flags("quantized", "x")}),
    "twice": (2, {"argv": flags("twice", "x")}),
    "cut": (2, {"argv": flags("cut", "x")}),
    "fp8": (2, {"argv": flags("fp8", "x")}),
    "tied": (2, {"argv": flags("tied", "x")}),
    "same head": (2, {"argv": flags("same_head", "x", "--max_steps", 1)}),
    "encoder": (2, {"argv": flags("encoder", "x")}),
    "biased": (2, {"argv": flags("biased", "x")}),
    "a vision model": (2, {"argv": flags("qwen2_5_vl", "x")}),
    "another type": (2, {"argv": flags("unknown", "x")}),
    "the model's directory": (2, {"argv": flags("llama", "llama")}),
    "own linear": (2, {"argv": flags("own", "x"), "with": ["own_class", "own_linear"]}),
    "odd rows": (2, {"argv": flags("llama", "x", rows="odd.jsonl")}),
    "no batch": (2, {"argv": flags("llama", "x", "--batch_size", 0)}),
    "no rate": (2, {"argv": flags("llama", "x", "--learning_rate", "nan")}),
    "no model": (2, {"argv": flags("none", "x")}),
    "a GGUF": (2, {"argv": flags("gguf", "x")}),
    "broken rows": (2, {"argv": flags("llama", "x", rows="broken.jsonl")}),
    "no gradient": (2, {"argv": flags("zeros", "x")}),
    "no file": (2, {"argv": flags("llama", "x", rows="none.jsonl")}),
    "other rows": (2, {"argv": flags("llama", "x"), "with": ["rank_1_has_other_rows"]}),
    "other rates": (2, {"argv": flags("llama", "x"), "with": ["rank_1_has_another_rate"]}),
    "random rows": (2, {"argv": flags("llama", "x"), "with": ["encode_draws"]}),
    "null rows": (2, {"argv": flags("llama", "x", rows="null.jsonl")}),
    "no directory": (2, {"argv": flags("llama", "taken")}),
    "a file": (2, {"argv": flags("llama", "odd.jsonl")}),
    "too long": (2, {"argv": flags("llama", "x", "--max_seq_len", 10**6)}),
    "no rows": (2, {"argv": flags("llama", "x", "--max_seq_len", 1)}),
    "too fast": (2, {"argv": flags("demo", "x", "--learning_rate", 1e9)}),
}  # fmt: skip


EDITED = [f"edit: {edit}" for edit in EDITS]


@pytest.fixture(scope="module")
def runs(base, run_jobs, wanted, request):
    """Function (name): what a run of RUNS has printed, and what minimal_runs has seen in it."""
    done = set()
    uneven = [item.callspec.params["family"] for item in request.session.items
              if item.path == request.path
              and item.originalname == test_padded_rows_change_no_loss.__name__]
    selected = {params.get("run") or f"edit: {params.get('edit')}"
                for params in selected_params(request)}
    selected |= {"on 4"} & {plain_run(edit) for edit in selected}

    def get(name):
        nproc = RUNS[name][0]
        if nproc not in done:
            run_jobs(nproc, [{"case": "minimal", "out": str(base / f"{name}.seen"), **job}
                             for name, (n, job) in RUNS.items()
                             if n == nproc and (family := name.partition(",")[0])
                             and (name not in (*BESIDE, *EDITED, *SLOW_RUNS) or name in selected)
                             and (family not in FAMILIES or family == name and family in wanted
                                  or family in uneven)], cwd=base)
            done.add(nproc)
        return (base / f"{name}.seen.log").read_text(), load_file(base / f"{name}.seen", DEVICE)

    return get


@pytest.fixture(scope="module")
def launched(base, run_training, tmp_path_factory):
    """The script by torchrun, alone in a directory: CompletedProcess, and the directory."""
    needs_ranks(2)
    alone = tmp_path_factory.mktemp("alone")
    shutil.copy(SCRIPT, alone)
    argv = flags(base / "llama", "adapter", *ODD, rows=base / "mixed.jsonl")
    return run_training(argv, 2, cwd=alone, script=SCRIPT.name), alone


def test_file_alone_trains_by_torchrun(launched):
    done, alone = launched
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert [int(step) for step, *_ in STEP.findall(done.stdout)] == list(range(1, 6))
    assert found[-1] < found[0] - 0.2
    assert {path.name for path in alone.iterdir()} == {SCRIPT.name, "adapter"}
    assert done.stdout.splitlines()[-1] == "step 5: adapter saved in adapter"
    assert re.search(r"^attention: (flash_attention_2|sdpa) \(.+\)$", done.stdout, re.M)
    assert "/GPU" in done.stdout if DEVICE == "cuda" else "tok/s/process" in done.stdout


def test_adapter_has_the_tokenizer_of_the_model(launched, base):
    _, alone = launched
    ours, its = map(AutoTokenizer.from_pretrained, (alone / "adapter", base / "llama"))
    talk = [{"role": "user", "content": "what is 1 plus 2"}]
    assert ours.apply_chat_template(talk, add_generation_prompt=True) == its.apply_chat_template(
        talk, add_generation_prompt=True)
    assert ours.chat_template == its.chat_template and ours.get_vocab() == its.get_vocab()


@pytest.mark.parametrize("run", ["on 1", pytest.param("on 4", marks=pytest.mark.slow)])
def test_same_losses_whatever_the_processes(run, launched, runs):
    """And gradients: Adam would hide that all of them are half as large."""
    want, norms = losses(launched[0].stdout), gradients(launched[0].stdout)
    text, _ = runs(run)
    print(run, max(abs(a - b) for a, b in zip(losses(text), want)))
    assert losses(text) == pytest.approx(want, abs=5e-3) and len(want) == 5
    assert gradients(text) == pytest.approx(norms, rel=0.03)


@pytest.fixture(scope="module")
def beside(base, read_metrics):
    """Function (dtype): the losses of train_fsdp_qlora.py with the rows and the initial adapter of
    the runs of BESIDE."""
    found = {}

    def get(compute_dtype):
        if not found:
            start = [*whole("llama", "start", "fp32"), "--max_steps", 1, "--learning_rate", 1e-60]
            jobs = [{"case": "minimal", "argv": start, "out": str(base / "start.seen")}]
            for name, dtype in ("float32", "fp32"), ("bfloat16", "bf16"):
                jobs.append({"argv": [*map(str, whole("llama", f"big-{name}", dtype)),
                                      "--init_adapter", "start", "--compute_dtype", name,
                                      "--report_to", "none"]})
            codes, _, err = do_here(jobs, base)
            assert codes == [0] * 3, err
            found.update({name: [record["loss"] for record in read_metrics(base / f"big-{name}")
                                 if "loss" in record] for name in ("float32", "bfloat16")})
        return found[compute_dtype]

    return get


@pytest.mark.parametrize("run", [
    pytest.param(run, marks=[pytest.mark.slow] * (run not in SOME_BESIDE)) for run in BESIDE])
def test_losses_are_those_of_the_big_script(run, runs, beside):
    """Offloaded or not, in padded micro-batches or row by row. The second loss comes after a step
    of Adam; only later ones depend on how its state is rounded."""
    needs_ranks(BESIDE[run][0])
    got, want = runs(run)[1]["losses"].tolist(), beside("float32" if "fp32" in run else "bfloat16")
    print([a - b for a, b in zip(got, want)])
    assert want[1] < want[0] - 0.1
    assert got == pytest.approx(want, abs=1e-6 if "fp32" in run and DEVICE == "cpu" else 1e-3)


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=[pytest.mark.slow] * (name != HYBRID)) for name in UNEVEN])
def test_padded_rows_change_no_loss(family, base, runs):
    """Of attention, windows, Gated DeltaNet, convolutions, Mamba-2."""
    needs_ranks(2)
    padded, alone = (
        runs(f"{family}, {how}")[1]["losses"] for how in ("micro-batches", "one_by_one"))
    print((padded - alone).abs().tolist())
    assert padded.tolist() == pytest.approx(alone.tolist(), abs=1e-6) and len(padded) == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_take_each_row_once_in_turn(world_size, monkeypatch):
    draw = random.Random(0)
    batch = [minimal_fsdp_qlora.Row(torch.full([draw.randint(2, 64)], i), torch.tensor([i]))
             for i in range(31)]  # fmt: skip
    args = argparse.Namespace(micro_batch_size=2, max_seq_len=64)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: world_size)
    dealt = []
    for rank in range(world_size):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        dealt.append(list(minimal_fsdp_qlora.micro_batches(batch, args)))
    rows = [row for of_rank in dealt for rows in of_rank for row in rows]
    in_loss = [int(row.labels) for row in rows if row.labels != minimal_fsdp_qlora.IGNORE_INDEX]
    assert sorted(in_loss) == [*range(31)] and len(rows) == 30 + world_size
    assert len({len(of_rank) for of_rank in dealt}) == 1  # each one is a collective
    for of_rank in dealt:
        sizes = [(len(rows), max(len(row.ids) for row in rows)) for rows in of_rank]
        assert all(n * longest <= 128 for n, longest in sizes)
        # of similar length: with one more of the next a micro-batch would not fit
        assert len(of_rank) <= 32 // world_size / 2 and sizes[0][0] == 2 and sizes[-2][0] > 2


def test_loss_in_chunks_is_the_whole(monkeypatch):
    """And its gradient; the last chunk is smaller, and one has nothing in the loss."""
    monkeypatch.setattr(minimal_fsdp_qlora, "LOSS_CHUNK", 4)
    labels = torch.randint(0, 9, (10,))
    labels[3:9] = -100
    got, want = (torch.randn(10, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
                 for _ in range(2))
    losses = (minimal_fsdp_qlora.cross_entropy(got, labels),
              F.cross_entropy(want, labels, reduction="none"))
    for loss in losses:
        loss.sum().backward()
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(got.grad, want.grad)


def load_trained(base, family, adapter=None):
    """The 4-bit model of transformers, and with the adapter PEFT's."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        base / family, quantization_config=settings, dtype=torch.bfloat16, device_map=DEVICE)
    model = PeftModel.from_pretrained(model, base / (adapter or f"{family}-adapter"))
    return model.train()  # no dropout here; in eval mode bitsandbytes may take another kernel


@torch.no_grad()
def logits_of(model, ids):
    with torch.autocast(DEVICE, torch.bfloat16):
        return model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0].float()


def test_recipes_use_and_merge_the_adapter(base, runs, tmp_path):
    """The two pieces of code at the file's end: both models have the logits that training ended
    with, to a twentieth of the adapter's effect."""
    _, seen = runs("llama")
    use, merge_it = ("".join(RECIPES[title]) for title in ("USE THE ADAPTER", "MERGE THE ADAPTER"))
    use = use.replace('"Qwen/Qwen3-8B"', repr(str(base / "llama")))
    names = {}
    merged_dir = str(tmp_path / "merged")
    for code in use, merge_it:
        exec(code.replace('"adapter"', repr(str(base / "llama-adapter")))
             .replace('"merged"', repr(merged_dir)), names)
        if code == use:
            used = names["model"].to(DEVICE).train()
            with used.disable_adapter():
                plain = logits_of(used, PROBE)
    merged = AutoModelForCausalLM.from_pretrained(merged_dir, device_map=DEVICE)
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    effect = (seen["logits"].to(DEVICE) - plain).norm()
    for model in used, merged:
        error = float((logits_of(model, PROBE) - seen["logits"].to(DEVICE)).norm() / effect)
        print(error)
        assert error < 0.05


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_family_trains_and_peft_gives_the_same(family, base, runs):
    """Its first loss is that of transformers' 4-bit model, its last logits are those that PEFT
    computes with the adapter."""
    text, seen = runs(family)
    model = load_trained(base, family)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / family)
    args = argparse.Namespace(max_seq_len=64, max_steps=3, batch_size=4)
    rows = read(base / "text.jsonl", args, tokenizer, n_needed=12)[1][:4]
    assert all(ids == labels and ids[-1] == tokenizer.eos_token_id
               for ids, labels in as_lists(rows))
    rows.sort(key=lambda row: len(row.ids))
    total = 0.0
    with model.disable_adapter(), torch.no_grad():
        plain = logits_of(model, PROBE)
        for of_rank in rows[::2], rows[1::2]:  # padded like them, because in bf16 sizes matter
            ids = torch.nn.utils.rnn.pad_sequence([row.ids for row in of_rank], batch_first=True)
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(input_ids=ids.to(DEVICE)).logits.float()
            for row, its_logits in zip(of_rank, logits):
                total += F.cross_entropy(its_logits[: len(row.ids) - 1],
                                         row.labels[1:].to(DEVICE), reduction="sum").item()
    found = losses(text)
    want = total / minimal_fsdp_qlora.count_loss_tokens(rows)
    print(found[0] - want)
    assert found[0] == pytest.approx(want, abs=1e-4 if DEVICE == "cpu" else 1e-3)
    assert found[-1] < found[0] - 0.02
    adapted = logits_of(model, PROBE)
    error = float((seen["logits"] - adapted).norm() / (adapted - plain).norm())
    print(f"losses {found}, logits differ by {error:.5f} of the adapter's effect")
    assert error < 0.02


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_gathered_words_are_bitsandbytes(family, base, runs):
    stored = {}
    for path in (base / family).glob("*.safetensors"):
        stored |= {bare_name(name): value for name, value in load_file(path, DEVICE).items()}
    _, seen = runs(family)
    words = {bare_name(name): value for name, value in seen.items()
             if name not in ("logits", "losses")}
    assert len(words) >= 4 * SIZES["num_hidden_layers"]
    n_nan = 0
    for name, gathered in words.items():
        codes, _ = bnb.functional.quantize_4bit(
            stored[name], blocksize=64, compress_statistics=True, quant_type="nf4")  # fmt: skip
        assert torch.equal(gathered.flatten(), codes.flatten()), name
        n_nan += int(codes.flatten().view(torch.bfloat16).isnan().sum())
    assert n_nan  # else a copy that rewrites them would not be seen


@pytest.mark.parametrize("run", [pytest.param("copies as on CUDA", marks=pytest.mark.slow)])
def test_rewritten_words_do_no_harm_as_long_as_lora_is_in_fp32(run, runs):
    needs_ranks(2)
    assert len(losses(runs(run)[0])) == 3


def test_check_at_start_finds_rewritten_words(runs):
    needs_ranks(2)
    text, _ = runs("LoRA in bf16")
    assert "RuntimeError: gathered 4-bit weights differ from those that this rank quantized" in text
    assert not losses(text)


@pytest.mark.parametrize("run,words", [
    ("a norm is trained", "RuntimeError: 29 tensors are trainable, but LoRA on 14 linears has 28"),
    ("the lm_head is unfrozen", "tensors are trainable, but LoRA on"),
    ("a norm is not read", ".norm.weight is not loaded, but still on meta"),
])  # fmt: skip
def test_check_loaded_finds(run, words, runs):
    text, _ = runs(run)
    assert words in text and not losses(text)


@pytest.mark.parametrize("run,words", [
    ("mamba", "--model falcon_h1: PEFT has no LoRA for the out_proj of falcon_h1"),
    ("moe", "--model mixtral: has experts (MoE), or other weights that are neither linears nor"),
    ("gemma4_e", "gemma4_e: has a linear outside its layers (per_layer_model_projection)"),
    ("lacking", "lacking: no model*.safetensors has layers.0.mlp.down_proj."),
    ("quantized", "--model quantized: is already quantized; pass the original model"),
    ("twice", "twice: its files have two tensors "),
    ("cut", "q_norm.weight: has the shape [1] in the files, and [64] in the model that config"),
    ("fp8", "down_proj.weight: is F8_E4M3 in the files, so the model is quantized; pass the"),
    ("tied", "config.json ties lm_head.weight to embed_tokens.weight, but they differ in the"),
    ("encoder", "--model encoder: its attention is not causal"),
    ("biased", "its files have layers.0.self_attn.q_proj.bias, which the model of config.json"),
    ("a vision model", "--model qwen2_5_vl: Unrecognized configuration class"),
    ("another type", "--model unknown: The checkpoint you are trying to load has model type"),
    ("the model's directory", "--output_dir llama: is the model's directory"),
    ("own linear", "layers.0.up is a OwnLinear, whose own forward() would be lost"),
    ("too long", "--max_seq_len 1000000: the model is made for "),
    ("no model", "--model none: no such directory, and the download failed: "),
    ("a GGUF", "--model gguf: has no config.json; expected a model as on the Hub: config.json,"),
    ("odd rows", "odd.jsonl, line 2: DataError: expected either text or messages, not prompt"),
    ("broken rows", "broken.jsonl, line 3: not JSON at column 10: Unterminated string"),
    ("no batch", "--batch_size 0: must be above 0 and finite"),
    ("no rate", "--learning_rate nan: must be above 0"),
    ("no file", "none.jsonl: no such file"),
    ("other rows", "the ranks have different rows or flags: every machine needs the same data"),
    ("other rates", "the ranks have different rows or flags"),
    ("random rows", "the ranks have different rows or flags"),
    ("null rows", "null.jsonl, line 1: DataError: expected either text or messages, not a line"),
    ("no directory", "--output_dir taken: already has an adapter"),
    ("a file", "--output_dir odd.jsonl: File exists"),
    ("no rows", "text.jsonl: no token to train on"),
    ("too fast", "the run has diverged (use a lower --learning_rate)"),
    ("no gradient", "gradient norm 0.0000: nothing is trained yet: are the model's weights, and"),
])  # fmt: skip
def test_one_line_says_what_is_wrong(run, words, runs):
    *_, line, last = runs(run)[0].splitlines()
    assert line.startswith("error: ") and words in line and last == "SystemExit: 1"


def test_tied_lm_head_may_be_stored(runs):
    text, _ = runs("same head")
    assert len(losses(text)) == 1 and "are not used" not in text


def test_stored_tensors_that_no_module_has_are_named(runs):
    text, _ = runs("too fast")
    assert "demo: 1 tensors are not used: vision_tower.patches.weight\n" in text
    assert not any("are not used" in runs(family)[0] for family in ("llama", "qwen3"))


@pytest.mark.parametrize("run", [pytest.param("evaluated", marks=pytest.mark.slow)])
def test_evaluation_changes_no_training(run, runs):
    """rows_loss() under no_grad() is the loss that is then trained."""
    needs_ranks(2)
    plain, evaluated = (runs(name)[1]["losses"] for name in ("llama", run))
    assert len(plain) == 3 and plain.tolist() == pytest.approx(evaluated.tolist(), abs=1e-6)


def test_eval_loss_is_that_of_the_saved_adapter(base, runs):
    """By PEFT, on five rows, one of which is alone in its micro-batch on two ranks."""
    needs_ranks(2)
    text, _ = runs("held out")
    shown = re.findall(r"^step (\d): eval_loss (\S+)$", text, re.M)
    model = load_trained(base, "llama", "held")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    args = argparse.Namespace(max_seq_len=64, max_steps=1, batch_size=1)
    rows, _ = read(base / "five.jsonl", args, tokenizer)
    total = sum(F.cross_entropy(logits_of(model, row.ids.tolist())[:-1], row.labels[1:].to(DEVICE),
                                reduction="sum").item() for row in rows)
    assert [step for step, _ in shown] == ["0", "2", "3"] and len(rows) == 5
    want = total / minimal_fsdp_qlora.count_loss_tokens(rows)
    assert float(shown[-1][1]) == pytest.approx(want, abs=1e-3)
    assert float(shown[0][1]) > float(shown[1][1]) > float(shown[2][1])


def plain_run(edit):
    """The run that one with this edit is compared with."""
    return "on 4" if edit.endswith("HSDP") else "llama"


@pytest.mark.parametrize("edit", [
    pytest.param(edit, marks=() if edit == "weights" else pytest.mark.slow)
    for edit in EDITS])
def test_edits_that_the_file_describes(edit, base, runs):
    """Its table names all that a change needs: other functions are as they were."""
    needs_ranks(4 if edit == "HSDP" else 2)
    text, seen = runs(f"edit: {edit}")
    plain, seen_plain = runs(plain_run(edit))
    found, want = ({"loss": losses(log), "norm": gradients(log)} for log in (text, plain))
    if edit == "HSDP":  # and its clipping is as without it
        assert found["loss"] == pytest.approx(want["loss"], abs=5e-3)
        assert found["norm"] == pytest.approx(want["norm"], rel=0.03)
    elif edit == "layers stay gathered":
        assert found == want and len(re.findall(r"^step \d: eval_loss", text, re.M)) == 4
        assert (base / edit / "adapter_model.safetensors").read_bytes() == (
            base / "llama-adapter" / "adapter_model.safetensors").read_bytes()
    elif edit == "generation":
        assert found == want and len(re.findall(r"^generated [1-9]\d* tokens$", text, re.M)) == 2
    elif edit == "LoRA+":  # the schedule keeps each group's own rate
        assert found["loss"][0] == want["loss"][0] and found["loss"][2] < want["loss"][2] - 0.01
    elif edit == "initial adapter":
        assert found["loss"][0] < want["loss"][-1] + 0.05 < want["loss"][0]
    elif edit == "gaussian":
        bounds = {name: value.shape[1] ** -0.5 for name, value in load_file(
            base / edit / "adapter_model.safetensors").items() if "lora_A" in name}
        made, usual = (load_file(base / name / "adapter_model.safetensors")
                       for name in (edit, "llama-adapter"))
        assert all(made[name].abs().max() > 1.5 * bound > usual[name].abs().max()
                   for name, bound in bounds.items())
    elif edit == "weights":
        assert seen["losses"].tolist() == pytest.approx(seen_plain["losses"].tolist(), abs=1e-5)
    elif edit == "AdamW":
        assert found["loss"][0] == want["loss"][0] and found["loss"][2] < want["loss"][0] - 0.1
    else:
        assert len(found["loss"]) == 3 and found["loss"][2] < found["loss"][0]


def test_model_class_of_ones_own_is_trained(base, runs):
    """One that transformers does not know, with all that the file says it needs, and a parameter of
    the outermost module."""
    needs_ranks(2)
    text, _ = runs("own class")
    found = losses(text)
    assert len(found) == 3 and found[2] < found[0], text
    adapter = load_file(base / "own-adapter" / "adapter_model.safetensors")
    assert len(adapter) == 8 and any(x.any() for name, x in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("run", [pytest.param("saved each step", marks=pytest.mark.slow)])
def test_saves_change_no_training(run, base, runs):
    needs_ranks(2)
    text, _ = runs(run)
    assert re.findall(r"^step (\d): adapter saved in saved$", text, re.M) == ["1", "2", "3"]
    saved, plain = (load_file(base / name / "adapter_model.safetensors")
                    for name in ("saved", "llama-adapter"))
    assert not (base / "saved" / "partial").exists()
    torch.testing.assert_close(saved, plain, atol=0 if DEVICE == "cpu" else 1e-3, rtol=0)


def test_kill_leaves_the_earlier_adapter(base, runs):
    needs_ranks(2)
    text, _ = runs("killed")
    assert "step 1: adapter saved" in text and text.endswith("RuntimeError: killed\n")
    before, after = (load_file(base / name / "adapter_model.safetensors")
                     for name in ("first-save", "killed"))
    assert len(before) == 28 and all(torch.equal(value, after[name])
                                     for name, value in before.items())
    assert any(value.any() for name, value in before.items() if "lora_B" in name)


@pytest.mark.parametrize("run", [pytest.param("unanswered", marks=pytest.mark.slow)])
def test_rows_without_an_answer_are_counted(run, runs):
    """A conversation of a question alone, and of an answer alone, which no prompt asks for."""
    needs_ranks(2)
    text, _ = runs(run)
    assert "unanswered.jsonl: 24 rows from 26 of 26 lines (columns: messages, text);" in text
    assert ", 2 left out (empty, or nothing in the loss within --max_seq_len)\n" in text
    assert len(losses(text)) == 1


def test_rows(base):
    """Text with EOS is trained whole, of conversations the answers; cut; each epoch is another
    order."""
    args = argparse.Namespace(max_seq_len=20, max_steps=None, num_epochs=2, batch_size=1)
    tokenizer, want = PreTrainedTokenizerFast.from_pretrained(base / "llama"), []
    rows = as_lists(read(base / "mixed.jsonl", args, tokenizer)[1])
    for line in (base / "mixed.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt, answer = [], [*tokenizer(row.get("text", "4") + tokenizer.eos_token)["input_ids"]]
        if "messages" in row:  # its prompt ends in a space, which a token of the answer could take
            prompt = tokenizer.apply_chat_template(
                row["messages"][:1], add_generation_prompt=True, return_dict=False)
        ids, n_asked = prompt + answer, len(prompt)
        labels = [-100] * n_asked + ids[n_asked:]
        if n_asked < 20:
            want.append((ids[:20], labels[:20]))
    first, second = rows[: len(want)], rows[len(want) :]
    assert sorted(first) == sorted(second) == sorted(want) and len(want) < 24
    assert first != second and want not in (first, second)
    some = as_lists(read(base / "mixed.jsonl", args, tokenizer, n_needed=5)[0])
    assert len(some) == 5 and all(row in want for row in some) and some != want[:5]


# rows of other scripts: what each would lose here
UNREAD = {
    "tools": {"tools": [{"type": "function"}]}, "a system message apart": {"system": "Be brief."},
    "variables": {"chat_template_kwargs": {"enable_thinking": False}},
    "a variable": {"enable_thinking": False},
    "a completion": {"completion": "1"}, "a bad answer": {"label": False},
    "LLaMA-Factory's label": {"kto_tag": False}, "images": {"images": ["1.png"]},
    "a system prompt": {"system_prompt": "Be brief."},
    "functions": {"functions": [{"name": "f"}]}}
UNREAD_IN_MESSAGES = {
    "weight": {"weight": 0}, "train": {"train": False}, "a call": {"tool_calls": []},
    "reasoning": {"reasoning_content": "so"}, "parts": {"content": [{"type": "text", "text": "4"}]},
    "null": {"content": None}, "another role": {"role": "tool"}, "nothing": {"content": " "}}


@pytest.mark.parametrize("name", [*UNREAD, *UNREAD_IN_MESSAGES, "a template without system"])
def test_what_would_be_lost_is_refused(name, base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    row = {"messages": [{"role": role, "content": "4"} for role in ("system", "user", "assistant")]}
    assert len(minimal_fsdp_qlora.encode(row, tokenizer)) == 1
    row |= UNREAD.get(name, {})
    row["messages"][-1] |= UNREAD_IN_MESSAGES.get(name, {})
    if name == "a template without system":
        tokenizer.chat_template = tokenizer.chat_template.replace("messages %}", "messages[1:] %}")
        row["messages"][0]["content"] = "Be brief."
    with pytest.raises(ValueError, match="expected |is empty|leaves out|would change the training"):
        minimal_fsdp_qlora.encode(row, tokenizer)


@pytest.mark.parametrize("example", [
    [1], 5, {"text": None}, {"text": 5}, {"messages": None}, {"messages": ["hi"]}])  # fmt: skip
def test_what_is_no_example_is_refused(example, base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    with pytest.raises(ValueError, match="^expected "):
        minimal_fsdp_qlora.encode(example, tokenizer)


def test_other_columns_are_ignored(base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "4"}]
    # null: what datasets' to_json() writes where lines have different keys
    row = {"messages": talk, "prompt": "1", "prompt_id": "x", "tools": None, "text": None}
    (got,), (want,) = (as_lists(minimal_fsdp_qlora.encode(example, tokenizer))
                       for example in (row, {"messages": talk}))
    assert got == want


def test_text_has_bos_and_eos_once(base):
    """Also if it was rendered by a chat template that writes them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    rows = [as_lists(minimal_fsdp_qlora.encode({"text": text}, tokenizer))
            for text in ("1 plus 2", f"{bos}1 plus 2", f"1 plus 2{eos}", f"{bos}1 plus 2{eos}",
                         f"1 plus 2{eos}\n")]
    assert all(row == rows[0] for row in rows[:4])
    assert rows[4][0][0].count(tokenizer.eos_token_id) == 1
    ((ids, _),) = rows[0]
    assert ids.count(tokenizer.eos_token_id) == 1 == ids.count(tokenizer.bos_token_id)
    for empty in "", " \n":  # EOS alone would train the model to stop at once
        assert minimal_fsdp_qlora.encode({"text": empty}, tokenizer) == []


@pytest.mark.parametrize("width, reason", [
    (512, "Flash Attention 2 has no heads of 512 values"), (64, "flash-attn is not installed")])
def test_heads_too_wide_for_flash_attention_use_the_models_default(width, reason, capsys):
    """As those of Gemma 4's text model, whose class in transformers allows it."""
    settings = {**SIZES, **FAMILIES["gemma4_text"], "global_head_dim": width}
    with torch.device("meta"), one_process():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma4_text", **settings))
        assert model._supports_flash_attn
        if is_flash_attn_2_available() and width == 64:
            pytest.skip("flash-attn is installed")
        minimal_fsdp_qlora.choose_attention(model, torch.device("cuda"))
    assert f"attention: sdpa ({reason}" in capsys.readouterr().out


def test_capped_attention_does_not_run_by_sdpa(capsys):
    """Which ignores the cap; transformers 5.20 chooses it for Gemma 2."""
    with torch.device("meta"), one_process():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **SIZES))
        model.config._attn_implementation = "sdpa"
        minimal_fsdp_qlora.choose_attention(model, torch.device("cpu"))
    assert "attention: eager (no GPU)" in capsys.readouterr().out


def test_templates_see_no_key_that_is_null(base, monkeypatch):
    """transformers leaves them out from 5.24 on; what is looked at is what the template gets."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "4"}]
    monkeypatch.setattr(minimal_fsdp_qlora, "encode_answer", lambda *messages_and_tokenizer:
                        messages_and_tokenizer)
    row = {"messages": [{**message, "name": None, "tool_calls": None} for message in talk]}
    assert minimal_fsdp_qlora.encode(row, tokenizer) == [(talk[:1], talk[1], tokenizer)]


def test_mamba_layers_are_refused_beside_mamba_ssm(tmp_path, monkeypatch, capsys):
    config = AutoConfig.for_model("bamba", num_hidden_layers=2)
    args = argparse.Namespace(model="bamba", max_seq_len=64)
    minimal_fsdp_qlora.check_config(config, args)
    (tmp_path / "mamba_ssm").mkdir()
    (tmp_path / "mamba_ssm/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with one_process(), pytest.raises(SystemExit):
        minimal_fsdp_qlora.check_config(config, args)
    assert capsys.readouterr().out.startswith("error: --model bamba: uninstall mamba-ssm")


def test_messages_need_a_chat_template(base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    tokenizer.chat_template = None
    assert minimal_fsdp_qlora.encode({"text": "1"}, tokenizer)
    with pytest.raises(ValueError, match="need a chat template"):
        minimal_fsdp_qlora.encode({"messages": [{"role": "user", "content": "1"}]}, tokenizer)


def test_reasoning_of_the_trained_answer_must_be_in_its_text(base):
    """Of earlier answers, which are in the prompt, templates may drop it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    talk = [{"role": "user", "content": "1"},
            {"role": "assistant", "content": "<think>2 + 2</think>4"}] * 2  # fmt: skip
    tokenizer.chat_template = CHATML
    assert len(minimal_fsdp_qlora.encode({"messages": talk}, tokenizer)) == 2
    last_only = "m.content if loop.last else m.content.split('</think>')[-1]"
    tokenizer.chat_template = CHATML.replace("m.content", f"({last_only})")
    assert len(minimal_fsdp_qlora.encode({"messages": talk}, tokenizer)) == 2
    tokenizer.chat_template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(ValueError, match="leaves out '2 \\+ 2'"):
        minimal_fsdp_qlora.encode({"messages": talk}, tokenizer)


def test_mistake_in_an_edit_of_encode_keeps_its_traceback(base, tmp_path, monkeypatch):
    """A data set's mistake is one line instead, see test_one_line_says_what_is_wrong()."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    (tmp_path / "rows.jsonl").write_text('{"text": "1"}')
    args = argparse.Namespace(max_seq_len=64)
    monkeypatch.setattr(minimal_fsdp_qlora, "encode", lambda example, _: example["question"])
    with one_process(), pytest.raises(RuntimeError, match="rows.jsonl, line 1") as e:
        minimal_fsdp_qlora.read_rows(str(tmp_path / "rows.jsonl"), args, tokenizer)
    assert isinstance(e.value.__cause__, KeyError)


def test_answer_stands_behind_the_prompt_that_a_server_makes(base):
    """Where a token would take of both, in tokens apart; what is opened otherwise is refused."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    tokenizer.add_tokens([": It"])
    tokenizer.chat_template = CHATML.replace("assistant\n", "assistant:").replace(
        "{{ m.role }}\n", "{{ m.role }}:")
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": " It is 4."}]
    ((ids, labels),) = as_lists(
        minimal_fsdp_qlora.encode({"messages": talk}, tokenizer))
    prompt = tokenizer.apply_chat_template(
        talk[:1], add_generation_prompt=True, return_dict=False)
    n = len(prompt)
    assert ids[:n] == prompt and labels == [-100] * n + ids[n:]
    assert tokenizer.decode(labels[n:]).startswith(" It is 4.<|im_end|>")
    tokenizer.chat_template = SWITCHED
    with pytest.raises(ValueError, match="prompt ends with .*<think>.*, but the text with"):
        minimal_fsdp_qlora.encode({"messages": talk}, tokenizer)


def test_line_end_behind_a_closed_turn_is_not_learned(base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = CHATML  # ends each turn by <|im_end|> and a line end
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "4"}]
    ((ids, labels),) = as_lists(
        minimal_fsdp_qlora.encode({"messages": talk}, tokenizer))
    assert tokenizer.decode(ids[-1]) == tokenizer.decode(labels[-1]) == "<|im_end|>"


def test_turn_that_its_template_leaves_open_is_closed(base):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    tokenizer.chat_template = UNCLOSED
    talk = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "4"}]
    ((ids, _),) = as_lists(
        minimal_fsdp_qlora.encode({"messages": talk}, tokenizer))
    assert ids[-1] == tokenizer.eos_token_id


def test_each_answer_is_trained_once_as_the_model_will_write_it(base):
    """Also with a template that drops the reasoning of answers that others follow."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(base / "llama")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if loop.last and m.role == 'assistant' %}why "
        "{% endif %}{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    messages = [{"role": role, "content": text} for role, text in (
        ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"), ("user", "5"))]
    rows = as_lists(minimal_fsdp_qlora.encode({"messages": messages}, tokenizer))
    eos = tokenizer.eos_token
    asked = [f"user: 1{eos}assistant: ", f"user: 1{eos}assistant: 2{eos}user: 3{eos}assistant: "]
    for (ids, labels), question, answer in zip(rows, asked, ("why 2", "why 4"), strict=True):
        assert tokenizer.decode(ids) == question + answer + eos
        trained = [label for label in labels if label != -100]
        assert tokenizer.decode(trained).strip() == answer + eos
        assert labels == [-100] * (len(ids) - len(trained)) + ids[-len(trained) :]


def test_runs_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert minimal_fsdp_qlora.init_distributed().type == DEVICE
    assert torch.distributed.get_world_size() == 1
    torch.distributed.destroy_process_group()


def test_learning_rate():
    rates = [2.0 * minimal_fsdp_qlora.lr_factor(step, 100) for step in range(1, 101)]
    config = Config(max_steps=100, learning_rate=2.0, warmup_fraction=0.03)
    assert rates == pytest.approx(
        [train_fsdp_qlora.learning_rate(step, config) for step in range(1, 101)])


def merge(*argv):
    merge_adapters.main(list(map(str, argv)))


@pytest.mark.parametrize("family", MERGED)
def test_merged_weights_are_those_trained(family, base, runs, tmp_path, capsys):
    """W as bitsandbytes dequantizes it, with the adapter; all else as it was."""
    runs(family)
    adapter = base / f"{family}-adapter"
    merge("--adapter_dir", adapter, "--base_model", base / family, "--output_dir", tmp_path / "out")
    text = capsys.readouterr().out
    assert text.startswith(f"warning: {adapter} has no train_config.json, so it is assumed")
    before, after = {}, {}
    for tensors, directory in (before, base / family), (after, tmp_path / "out"):
        for path in directory.glob("*.safetensors"):
            tensors |= load_file(path)
    assert before.keys() == after.keys()
    n, lora = 0, load_file(adapter / "adapter_model.safetensors")
    for name, value in before.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if family == "gemma3":  # as the file names it, and as the model does
            stem = stem.replace("model.language_model.model.", "model.model.language_model.")
        if f"{stem}.lora_A.weight" in lora:
            codes, state = bnb.functional.quantize_4bit(
                value.to(DEVICE), blocksize=64, compress_statistics=True, quant_type="nf4")
            a, b = (lora[f"{stem}.lora_{x}.weight"].to(DEVICE) for x in "AB")
            value = bnb.functional.dequantize_4bit(codes, state).float() + 2 * (b @ a)
            value, n = value.bfloat16().cpu(), n + 1
        assert after[name].dtype == torch.bfloat16
        assert torch.equal(after[name], value), name
    assert 2 * n == len(lora) >= 2 * 3 * 4


def test_merged_model_is_loaded(base, runs, tmp_path):
    _, seen = runs("llama")
    merge("--adapter_dir", base / "llama-adapter", "--base_model", base / "llama",
          "--output_dir", tmp_path / "out")  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map=DEVICE)
    assert model.dtype == torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(base / "llama", device_map=DEVICE)
    want = seen["logits"]
    error = (logits_of(model, PROBE) - want).norm() / (logits_of(plain, PROBE) - want).norm()
    print(float(error))
    assert error < 0.1


@pytest.mark.parametrize("argv,words", [
    (["--base_model", "llama"], "lora_B.weight is (128, 16), but the base model and this merge"),
    (["--base_model", "qwen3_5_text"],
     "layers.0.self_attn.k_proj is not a linear of the layers of qwen3_5_text: another base"),
    (["--base_model", "mixtral"],
     "mixtral: has experts: model.layers.0.mlp.experts.gate_up_proj is in NF4 or in bf16 depend"),
    (["--base_model", "quantized"], "quantized: is quantized already"),
    ([], "a LoRA adapter that PEFT has saved is merged, unchecked, with --base_model"),
])  # fmt: skip
def test_merge_refuses(argv, words, base, runs, tmp_path, capsys, monkeypatch):
    runs("qwen3")
    monkeypatch.chdir(base)
    with pytest.raises(SystemExit, match="1"):
        merge("--adapter_dir", "qwen3-adapter", *argv, "--output_dir", tmp_path / "out")
    assert words in capsys.readouterr().err


def test_merge_refuses_conv1d(tmp_path, capsys):
    """GPT-2's files have these weights as [in, out]; transformers quantizes their transposes."""
    config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=1, vocab_size=64, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "base")
    # attention's output is square: its shape tells nothing
    lora = LoraConfig(r=8, target_modules=["attn.c_proj"], init_lora_weights=False)
    model = get_peft_model(model, lora)  # sets fan_in_fan_out, which it does not in 4 bits
    lora.fan_in_fan_out = False
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(SystemExit, match="1"):
        merge("--adapter_dir", tmp_path / "adapter", "--base_model", tmp_path / "base",
              "--output_dir", tmp_path / "out")  # fmt: skip
    assert "c_attn is a Conv1D, which the files have as [in, out]" in capsys.readouterr().err


def save_peft(base, adapter, targets):
    """Save an adapter of PEFT's on a base that transformers loaded with load_in_4bit. Returns
    {parameter: value} of the model that would be trained, merged and dequantized."""
    config = transformers.AutoConfig.from_pretrained(base)
    auto = (transformers.AutoModelForImageTextToText if hasattr(config, "vision_config")
            else AutoModelForCausalLM)  # fmt: skip
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    model = auto.from_pretrained(base, quantization_config=settings, dtype=torch.bfloat16,
                                 device_map=DEVICE)  # fmt: skip
    wanted = {}
    for name, value in model.named_parameters():
        if isinstance(value, bnb.nn.Params4bit):
            value = bnb.functional.dequantize_4bit(value.data, value.quant_state)
        wanted[name] = value
    torch.manual_seed(2)
    task = "CAUSAL_LM" if "llama" in str(base) else None
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=targets, task_type=task)
    model = get_peft_model(model, lora)
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            a, b = (getattr(module, f"lora_{x}")["default"].weight.detach() for x in "AB")
            b.normal_(0, 0.1)
            key = f"{name}.weight"
            wanted[key] = (wanted[key].float() + 2 * (b.float() @ a.float())).bfloat16()
    model.save_pretrained(adapter)
    return {name: value.detach().cpu() for name, value in wanted.items()}


def merged_weights(directory, adapter, base):
    merge("--adapter_dir", adapter, "--base_model", base, "--output_dir", directory)
    return {name: value for path in directory.glob("*.safetensors")
            for name, value in load_file(path).items()}


@pytest.mark.parametrize("family, targets, is_whole", [
    ("llama", ["q_proj", "v_proj"], True), ("gemma4_e", ["q_proj", "v_proj"], True),
    ("qwen3_5_text", ["down_proj"], True),
    *(pytest.param("gemma3", *case, marks=pytest.mark.slow) for case in (
        (["q_proj", "v_proj"], True), (r".*language_model.*\.[qv]_proj", False)))])  # fmt: skip
def test_adapter_of_some_linears_is_merged_into_what_peft_trained(
        family, targets, is_whole, base, tmp_path, capsys):
    """All that transformers quantizes goes through NF4, adapted or not; of a multimodal model the
    vision tower too if a linear of it is adapted, else it stays, which is said."""
    model = base / ("gemma3_saved" if family == "gemma3" else family)
    wanted = save_peft(model, tmp_path / "adapter", targets)
    found = merged_weights(tmp_path / "out", tmp_path / "adapter", model)
    text = capsys.readouterr().out
    stored = {}
    for path in model.glob("*.safetensors"):
        stored |= {bare_name(name): value for name, value in load_file(path).items()}
    wanted = {bare_name(name): value for name, value in wanted.items()}
    n_nf4 = 0
    for name, value in found.items():
        name = bare_name(name)
        if not is_whole and "vision" in name:
            assert torch.equal(value, stored[name]), name
        elif name in wanted:
            assert torch.equal(value, wanted[name]), name
            n_nf4 += not torch.equal(value, stored[name])
    assert n_nf4 >= 12 and stored.keys() == {bare_name(name) for name in found}
    assert ("linears outside the text model, such as" in text) == (not is_whole)


TREE = ast.parse(SCRIPT.read_text())


def test_file_stands_alone():
    nodes = list(ast.walk(TREE))
    names = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    ours = {path.stem for path in ROOT.glob("*.py")} | {"fsdp_qlora", "tests"}
    assert not {name.partition(".")[0] for name in names} & ours
    assert {name.partition(".")[0] for name in names} - sys.stdlib_module_names <= {
        "accelerate", "bitsandbytes", "flash_attn", "huggingface_hub", "jinja2", "peft",
        "safetensors", "torch", "transformers"}  # fmt: skip


def test_docstring_says_what_to_edit():
    table = ast.get_docstring(TREE).partition("to change")[2].partition("\n\n")[0]
    words = re.findall(r"(\w+)\(\)", table)
    assert len(words) >= 12 and set(words) <= {node.name for node in TREE.body
                                              if isinstance(node, ast.FunctionDef)}


# ------------------------------------------------------------------------------------------------
# Every step against a plain loop
# ------------------------------------------------------------------------------------------------

LONGEST, PEAK = 80, 5e-2  # norms of gradients are then below and above that which is clipped
# {processes: (rank, steps, rows a step)}. On one process the optimizer's state has 8 bits, as
# matrices have 4,096 values, and the warm-up has two steps. Shards of others are smaller: fp32
STEPS = {1: (64, 50, 1), 2: (8, 6, 4), 4: (8, 6, 4)}


@pytest.fixture(scope="module")
def stepped(tmp_path_factory, demo_directory, run_jobs):
    """stepped(processes): what a run has printed. Its adapter is in adapter-{processes}/, those
    before the first step of a rank in start-{rank}/; as are model/ and rows.jsonl."""
    directory, done = tmp_path_factory.mktemp("steps"), set()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo_directory / "model")
    tokenizer.chat_template = CHATML
    small = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "llama", {"attention_bias": True, **small})
        write_model(directory / "model", "llama", tokenizer)
    draw, words = random.Random(3), "what is the answer to this plus minus times 1 2 3 4 5".split()
    texts = [" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(14)]
    rows = [{"text": f"{text} " * 3} for text in texts]
    for i, text in enumerate(texts[::3]):
        rows[3 * i] = {"messages": [{"role": "user", "content": text[:20]},
                                    {"role": "assistant", "content": text}]}  # fmt: skip
    write_jsonl(directory / "rows.jsonl", rows)

    def argv(output, *settings):
        names = "output_dir", "lora_rank", "max_steps", "batch_size", "learning_rate"
        given = {"model": "model", "dataset": "rows.jsonl", "max_seq_len": LONGEST}
        given |= dict(zip(names, (output, *settings), strict=True))
        given["lora_alpha"] = 2 * given["lora_rank"]
        return [word for name, value in given.items() for word in (f"--{name}", str(value))]

    def work(nproc, jobs):
        run_jobs(nproc, [
            {"case": "minimal", "argv": argv(*job), "with": ["one_by_one"],
             "out": str(directory / f"{job[0]}.{nproc}")} for job in jobs], cwd=directory)

    def run(nproc):
        if not done:  # a rate that is 0 in fp32
            work(1, [(f"start-{rank}", rank, 1, 1, 1e-60) for rank in (8, 64)])
        if nproc not in done:
            done.add(nproc)
            work(nproc, [("adapter", *STEPS[nproc], PEAK)])
            (directory / "adapter").rename(directory / f"adapter-{nproc}")
        return (directory / f"adapter.{nproc}.log").read_text()

    run.directory = directory
    return run


def plain_rows(directory, n):
    """The token ids and labels of the rows of n draws, an epoch after the other."""
    tokenizer, found = PreTrainedTokenizerFast.from_pretrained(directory / "model"), []
    for row in map(json.loads, (directory / "rows.jsonl").open()):
        if "text" in row:
            ids, n_asked = tokenizer(row["text"] + tokenizer.eos_token)["input_ids"], 0
        else:
            # its template closes a turn by no token of this tokenizer: EOS follows
            ids = [*tokenizer.apply_chat_template(row["messages"], return_dict=False),
                   tokenizer.eos_token_id]
            n_asked = len(tokenizer.apply_chat_template(
                row["messages"][:-1], add_generation_prompt=True, return_dict=False))
        found.append((ids[:LONGEST], ([-100] * n_asked + ids[n_asked:])[:LONGEST]))
    random.Random(0).shuffle(found)  # lines are read in this order, and only as many as are needed
    found = found[:n]
    return [row for epoch in range(math.ceil(n / len(found)))
            for row in random.Random(epoch).sample(found, len(found))]


def plain_loop(directory, rank, n_steps, batch):
    """Yields (loss, rate, gradient norm) of each step; at last the adapter. transformers' 4-bit
    model in PEFT on one process."""
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        directory / "model", quantization_config=settings, dtype=torch.bfloat16, device_map=DEVICE)
    model = get_peft_model(model, LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    start = load_file(directory / f"start-{rank}" / "adapter_model.safetensors", DEVICE)
    assert not set_peft_model_state_dict(model, start).unexpected_keys
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = bnb.optim.AdamW8bit(trained, weight_decay=0.0)
    rows, warmup = plain_rows(directory, n_steps * batch), max(1, round(0.03 * n_steps))
    for step in range(n_steps):
        loss, batch_rows = 0.0, rows[step * batch :][:batch]
        n_loss_tokens = sum(label != -100 for _, labels in batch_rows for label in labels[1:])
        for ids, labels in batch_rows:
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(input_ids=torch.tensor([ids], device=DEVICE)).logits[0, :-1]
            targets = torch.tensor(labels[1:], device=DEVICE)
            part = F.cross_entropy(logits.float(), targets, reduction="sum") / n_loss_tokens
            part.backward()
            loss += part.item()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).item()
        part_done = max(0, step + 1 - warmup) / (n_steps + 1 - warmup)
        rate = min(1, (step + 1) / warmup) * PEAK * 0.5 * (1 + math.cos(math.pi * part_done))
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        yield loss, rate, norm
    yield get_peft_model_state_dict(model)


@pytest.mark.parametrize("nproc", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_steps_equal_a_plain_loop(nproc, stepped):
    """What is printed of each step, and the adapter after the last one, to the bit on a CPU."""
    needs_ranks(nproc)
    text, directory = stepped(nproc), stepped.directory
    rank = STEPS[nproc][0]
    *want, after = plain_loop(directory, *STEPS[nproc])
    printed = re.findall(r"^step .* loss +(\S+) \| lr (\S+) \| grad_norm +(\S+)", text, re.M)
    assert min(norm for *_, norm in want) < 0.8 and max(norm for *_, norm in want) > 1.3
    for (loss, rate, norm), (its_loss, its_rate, its_norm) in zip(want, printed, strict=True):
        assert float(its_loss) == pytest.approx(loss, abs=2e-4)
        assert its_rate == f"{rate:.1e}"
        assert float(its_norm) == pytest.approx(norm, abs=2e-3)
    start, got = (load_file(directory / name / "adapter_model.safetensors", DEVICE)
                  for name in (f"start-{rank}", f"adapter-{nproc}"))  # fmt: skip
    assert start.keys() == got.keys() == after.keys() and len(got) == 2 * 7
    off, moved = (torch.cat([(one[key] - after[key]).flatten() for key in after]).norm()
                  for one in (got, start))  # fmt: skip
    print(f"{nproc}: {off / moved:.1e} of what training has moved them")
    assert off <= (1e-5 if DEVICE == "cpu" else 0.05) * moved
    for key, value in start.items():
        assert value.abs().max() <= value.shape[1] ** -0.5 and value.any() == ("lora_A" in key)
