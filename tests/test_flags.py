"""Flags: a file of them is the same as the command line, and so is a run's own configuration."""

import dataclasses
import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT
from patching import parse_config
from short_runs import (
    EVALUATED, FLAGS, OFFLOADED, adapter_of, assert_same, make_base, runs_of, trained)

from transformers import TrainingArguments

from fsdp_qlora.config import VERSION, Config
from fsdp_qlora.model.preference_loss import LOSSES
from fsdp_qlora.run.foreign_flags import VALUES, flag_hint, read_foreign_flags
from fsdp_qlora.run.resolve import resolve_config
from train_fsdp_qlora import init_distributed


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    return make_base(tmp_path_factory.mktemp("flags"), tiny_model)


@pytest.fixture(scope="module")
def whole(base, run_jobs):
    """The directory of a run."""
    flags = [*OFFLOADED, *EVALUATED, "--save_every", 2]
    return runs_of(base, run_jobs, lambda nproc: [(("whole",), flags, {})])(1, "whole")[0]


FEW = ["--model", "m", "--dataset", "a.jsonl", "b,split=x", "--learning_rate", "1e-4",
       "--batch_size", "3", "--random_weights", "--offload_params", "--target_modules", "q_proj",
       "v_proj", "--eval_dataset", "0.1", "--lr_schedule", "linear", "--recompute", "2",
       "--num_epochs", "1.5", "--columns", "context=input", "a=b",
       "--no-offload_activations"]  # fmt: skip
AS_YAML = """
model: m
dataset: [a.jsonl, "b,split=x"]
learning_rate: 1e-4
batch_size: 3
random_weights: true
offload_params: yes
offload_activations: false
target_modules:
  - q_proj
  - v_proj
eval_dataset: 0.1
lr_schedule: linear
recompute: 2
num_epochs: 1.5
memory_limit_gib: null
columns: {context: input, a: b}
"""


def test_file_gives_the_same_configuration_as_flags(tmp_path):
    want = parse_config(FEW)
    assert want != Config() and want.dataset == ("a.jsonl", "b,split=x")
    assert want.learning_rate == 1e-4 and want.target_modules == ("q_proj", "v_proj")
    (tmp_path / "flags.yaml").write_text(AS_YAML)
    values = dataclasses.asdict(want)
    (tmp_path / "flags.json").write_text(json.dumps(values))
    (tmp_path / "train_config.json").write_text(
        json.dumps({"flags": values, "config": {"model": "another"}, "date": "2020-01-31"})
    )
    for name in "flags.yaml", "flags.json", "train_config.json":
        assert parse_config(["--config", str(tmp_path / name)]) == want, name
        assert parse_config([f"--config={tmp_path / name}"]) == want, name


def test_text_of_a_file_stays_as_it_is_written(tmp_path):
    (tmp_path / "flags.yaml").write_text(
        "output_dir: 20261125_0346\nsave_every: 1:30\ndataset: [012, 2026-11-25 1:2:3]\nseed: 012")
    config = parse_config(["--config", str(tmp_path / "flags.yaml")])
    assert (config.output_dir, config.save_every) == ("20261125_0346", "1:30")
    assert (config.dataset, config.seed) == (("012", "2026-11-25 1:2:3"), 12)


@pytest.mark.parametrize("words", [["q_proj,v_proj"], ["q_proj,", "v_proj"], ["q_proj , v_proj"]])
def test_names_of_linears_may_have_commas_between_them(words):
    config = resolve_config(parse_config(["--target_modules", *words]), 1)
    assert config.target_modules == ("q_proj", "v_proj")


def test_command_line_counts_more_than_the_file(tmp_path):
    (tmp_path / "flags.yaml").write_text(AS_YAML)
    more = ["--dataset", "c.jsonl", "--no-random_weights", "--offload_activations", "--seed=5"]
    want = dataclasses.replace(
        parse_config(FEW), dataset=("c.jsonl",), random_weights=False,
        offload_activations=True, seed=5,
    )  # fmt: skip
    config = ["--config", str(tmp_path / "flags.yaml")]
    assert parse_config(config + more) == parse_config(more + config) == want


@pytest.mark.parametrize("name", ["lr", "epochs", "learning-rate", "max_steps_", "no-resumes"])
def test_unknown_flag_and_key_are_refused(name, tmp_path):
    for argv in ([f"--{name}", "1"], [f"--{name}=1"], ["--model", "m", f"--{name}"]):
        with pytest.raises(ValueError, match=f"--{name}"):
            parse_config(argv)
    for file, text in ("flags.yaml", f"{name}: 1"), ("flags.json", json.dumps({name: 1})):
        (tmp_path / file).write_text(text)
        with pytest.raises(ValueError, match=f"--{name}"):
            parse_config(["--config", str(tmp_path / file)])


@pytest.mark.parametrize(
    "text, wanted",
    [("- model", "must be a mapping"), ("3", "must be a mapping"), ("", "must be a mapping"),
     ("model: [", "cannot be read"), ("\0", "cannot be read"), ("batch_size: many", "batch_size"),
     ("batch_size: 1.5", "batch_size"), ("lr_schedule: wavy", "lr_schedule"),
     ("model: {a: 1}", "model is a table"), ("batch_size: [1, 2]", "arguments: 2"),
     ("dataset: [{path: a.jsonl}]", "dataset is a table"), ("{a", "cannot be read"),
     ("target_modules: [yes, v_proj]", "True: YAML reads yes"),
     ("seed: 1\nseed: 2", "seed occurs twice"), ("config: other.yaml", "write its flags here")],
)  # fmt: skip
def test_file_of_something_else_is_refused(text, wanted, tmp_path):
    (tmp_path / "flags.yaml").write_text(text)
    with pytest.raises(ValueError, match=wanted):
        parse_config(["--config", str(tmp_path / "flags.yaml")])
    with pytest.raises(ValueError, match="none.yaml: cannot be read"):
        parse_config(["--config", str(tmp_path / "none.yaml")])


AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: true
datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: alpaca
val_set_size: 0.1
sample_packing: true
sequence_len: 2048
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
flash_attention: true
wandb_project:
special_tokens:
  pad_token: "<|end_of_text|>"
"""
LLAMA_FACTORY = {
    "model_name_or_path": "--model", "finetuning_type": "LoRA", "lora_target": "--target_modules",
    "cutoff_len": "--max_seq_len", "per_device_train_batch_size": "--batch_size",
    "num_train_epochs": "--num_epochs", "lr_scheduler_type": "--lr_schedule",
    "warmup_ratio": "--warmup_fraction", "quantization_bit": "NF4", "val_size": "--eval_dataset",
    "eval_steps": "--eval_every", "pref_beta": "--beta", "pref_loss": "--loss",
    "gradient_checkpointing": "--recompute", "resume_from_checkpoint": "the same command",
    "save_steps": "--save_every", "dataset_name": "--dataset", "packing": "packed",
    "train_on_prompt": "text", "enable_thinking": "chat_template_kwargs",
    "adapter_folder": "--init_adapter", "moe_aux_loss_coef": "frozen"}  # fmt: skip
ANSWER_DOT_AI = {
    "train_type": "LoRA", "context_length": "--max_seq_len", "precision": "--compute_dtype",
    "use_gradient_checkpointing": "--recompute", "use_cpu_offload": "--offload_params",
    "use_activation_cpu_offload": "--offload_activations", "reentrant_checkpointing": "--recompute",
    "sharding_strategy": "--shard_group_size", "grad_norm": "--max_grad_norm",
    "wd": "--weight_decay", "log_to": "metrics.jsonl", "project_name": "--report_to",
    "world_size": "torchrun", "n_bits": "NF4", "low_memory": "not needed"}  # fmt: skip


def answers(argv):
    """{flag: its answer} of the one line about unknown flags."""
    with pytest.raises(ValueError, match="unrecognized arguments: ") as e:
        parse_config(argv)
    told = str(e.value).partition("unrecognized arguments: ")[2].removesuffix(" (see --help)")
    return dict(entry.split(": ", 1) for entry in told.split(" | "))


def test_flags_of_other_tools_are_each_answered(tmp_path):
    for names in LLAMA_FACTORY, ANSWER_DOT_AI:
        found = answers([word for name in names for word in (f"--{name}", "1")])
        assert [*found] == [f"--{name}" for name in names]
        for (name, words), told in zip(names.items(), found.values()):
            assert words in told, name
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    found = answers(["--config", str(tmp_path / "axolotl.yaml")])
    keys = [line.partition(":")[0] for line in AXOLOTL.strip().splitlines() if line[0] != " "]
    assert [*found] == [f"--{key}" for key in keys if key != "learning_rate"]
    for key, words in (("base_model", "--model"), ("datasets", "--dataset"), ("bf16", "bf16"),
                       ("micro_batch_size", "--batch_size"), ("special_tokens", "not supported"),
                       ("optimizer", "not needed, because"), ("wandb_project", "--report_to"),
                       ("sequence_len", "--max_seq_len")):  # fmt: skip
        assert words in found[f"--{key}"], key
    assert answers(["--model", "m", "epochs=3", "lr=1e-4"]) == {  # torchtune's
        "--epochs": "use --num_epochs", "--lr": "use --learning_rate"}
    assert "--attn overrides" in answers(["--attention", "sdpa"])["--attention"]
    assert answers(["--learning-rate", "3"]) == {"--learning-rate": "did you mean --learning_rate?"}


def test_flags_of_torchtune_are_answered_by_the_part_that_is_known():
    found = answers(["--model", "m", "optimizer.lr=1e-4", "dataset.packed=True", "tokenizer.path=x",
                     "tokenizer.max_seq_len=9", "model.lora_rank=8", "batch_size=2"])  # fmt: skip
    assert found.pop("--dataset.packed").startswith("not needed, because rows are always packed")
    assert found.pop("--tokenizer.path").startswith("use --model")
    assert found == {
        "--optimizer.lr": "use --learning_rate", "--batch_size": "its dashes are missing",
        "--tokenizer.max_seq_len": "did you mean --max_seq_len?",
        "--model.lora_rank": "did you mean --lora_rank?"}  # fmt: skip


def test_a_flag_is_guessed_only_if_it_is_spelled_almost_so():
    """Of the flags of other tools one that is answered wrongly is worse than one that is not."""
    for name in "num_processes", "nnodes", "master_port", "num_gpus", "enable_thinking":
        assert "did you mean" not in answers([f"--{name}", "1"])[f"--{name}"]
    with pytest.raises(ValueError, match=r"arguments: --save_ggml \(see --help\)$"):
        parse_config(["--save_ggml", "1"])
    for name, ours in (("num_train_epoch", "num_epochs"), ("lora_alfa", "lora_alpha"),
                       ("batchsize", "batch_size")):  # fmt: skip
        assert answers([f"--{name}", "1"]) == {f"--{name}": f"did you mean --{ours}?"}


@pytest.mark.parametrize("flag, value, meant", [
    ("adapter", "qlora", "lora"), ("attn", "flash", "flash_attention_2"), ("attn", "fa2",
    "flash_attention_2"), ("attn", "eager", "sdpa"), ("loss", "DPO", "dpo"), ("loss", "sigmoid",
    "dpo"), ("lr_schedule", "cos", "cosine"), ("lr_schedule", "constant_with_warmup", "constant"),
    ("compute_dtype", "bf16", "bfloat16"), ("report_to", "tensorboard,wandb", "tensorboard"),
    ("report_to", "tensorbord", "tensorboard"), ("recompute", "full", "all"),
    ("recompute", "None", "none"), ("resume", "true", "must"), ("resume", "runs/x", None),
    ("loss", "grpo", None), ("adapter", "full", None), ("recompute", "half", None),
    ("max_seq_len", "4k", "4096"), ("max_seq_len", "8K", "8192"), ("batch_size", "16.0", "16"),
    ("batch_size", "1.5", None), ("learning_rate", "2e-4f", "0.0002"), ("learning_rate", "x", None),
    ("lora_dropout", "5%", "0.05"), ("memory_limit_gib", "24GB", "24"),
    ("eval_dataset", "10%", "0.1")])  # fmt: skip
def test_wrong_value_is_answered_by_the_one_that_is_meant(flag, value, meant, tmp_path):
    """On the command line and in a file: what the flag takes, and what was probably meant."""
    (tmp_path / "flags.yaml").write_text(f"{flag}: '{value}'")
    for argv in [f"--{flag}", value], ["--config", str(tmp_path / "flags.yaml")]:
        with pytest.raises(ValueError, match=f"^--{flag} {re.escape(value)}: must be ") as e:
            resolve_config(parse_config(argv), 1)
        guess = re.search(r"; did you mean (\S+)\?", str(e.value))
        assert (guess and guess[1]) == meant
        assert "\n" not in str(e.value)
    if meant and flag != "resume":  # which needs a run; what is said to be meant is taken
        parse_config([f"--{flag}", meant])


def test_values_of_other_tools_are_answered_by_ours():
    fields = {f.name: f for f in dataclasses.fields(Config)}
    choices = {"loss": LOSSES, "recompute": ("all", "none", "auto")}
    for flag, values in VALUES.items():
        taken = choices.get(flag) or fields[flag].metadata["choices"]
        assert {*values.values()} <= {*taken} and not {*values} & {*taken}, flag


@pytest.mark.parametrize("value", ["true", "False", "1"])
def test_value_of_a_switch_is_answered(value):
    with pytest.raises(ValueError, match=f"arguments: {value}; .* takes no value: --flag or --no-"):
        parse_config(["--offload_activations", value])


def test_table_of_other_tools_knows_all_of_the_trainers():
    fields = {f.name for f in dataclasses.fields(Config)}
    known = [f.name for f in dataclasses.fields(TrainingArguments)]
    assert [name for name in known if not (flag_hint(name) or name in fields)] == []
    assert len(known) > 80 and flag_hint("no_such_word") == ""
    for name, answer in read_foreign_flags():
        assert set(re.findall(r"--(\w+)", answer)) <= fields, answer
        assert name not in fields, "it is a flag"
        assert flag_hint(name.replace("*", "x")) == answer, "an earlier name hides it"


def test_table_of_other_tools_is_that_of_the_pages():
    """Docs show some: each word of TRL and Axolotl beside a flag is answered by that flag."""
    seen = 0
    for page in "running.md", "data.md":
        text = (ROOT / "docs" / page).read_text().partition("Flag names in")[2]
        for line in re.findall(r"^\| `--.*", text.partition("\n## ")[0], re.M):
            flag, *theirs = [re.findall(r"`([\w-]+)", cell) for cell in line.split("|")[1:-1]]
            for name in sum(theirs, []):
                if (answer := flag_hint(name)) and "`DPO" not in line:
                    seen += 1
                    assert answer.startswith(f"use {flag[0]}"), (name, answer)
    assert seen > 25


def test_run_is_repeated_by_its_own_configuration(base, whole, run_main, read_metrics, monkeypatch,
                                                  tmp_path):  # fmt: skip
    """train_config.json as --config: the same flags and the same run, in a directory of its own."""
    monkeypatch.chdir(base)
    written = whole / "train_config.json"
    argv = [*map(str, FLAGS), *map(str, OFFLOADED), *map(str, EVALUATED), "--save_every", "2"]
    assert parse_config(["--config", str(written)]) == parse_config(argv)
    code, _, err = run_main("--config", written, "--output_dir", tmp_path / "again")
    assert code == 0, err
    assert trained(read_metrics(tmp_path / "again")) == trained(read_metrics(whole))
    assert_same(adapter_of(tmp_path / "again"), adapter_of(whole))


def test_resume_needs_the_directory_alone(base, whole, run_main, read_metrics, monkeypatch,
                                          tmp_path):  # fmt: skip
    """And without even that it is the newest run below runs/."""
    monkeypatch.chdir(tmp_path)
    for name in "model", "rows.jsonl", "eval.jsonl":
        os.symlink(base / name, tmp_path / name)
    for argv in (["--resume", "--output_dir", "runs/1"], ["--resume"]):
        shutil.rmtree("runs", ignore_errors=True)
        shutil.copytree(whole, "runs/1")
        shutil.rmtree("runs/1/checkpoint-000004")
        (tmp_path / "runs" / "1" / "adapter_model.safetensors").unlink()
        code, out, err = run_main(*argv)
        assert code == 0, err
        assert "checkpoint-000002 at step 2 of" in out
        assert trained(read_metrics("runs/1")) == trained(read_metrics(whole))
        assert_same(adapter_of(tmp_path / "runs" / "1"), adapter_of(whole))
    shutil.rmtree("runs")
    code, _, err = run_main("--resume")
    assert code == 2 and "no run below runs/ to resume" in err


def test_rank_without_a_meeting_point_is_one_line(monkeypatch, capsys):
    """As by srun without torchrun."""
    for name in "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as e:
        init_distributed()
    err = capsys.readouterr().err
    assert e.value.code == 2 and err.count("\n") == 1 and "Start it with torchrun" in err


@pytest.mark.parametrize("flag, code", [("--help", 0), ("--unknown", 2)])
def test_closed_output_ends_no_start(flag, code, monkeypatch):
    """As Python begins after `>&- 2>&-`."""
    for name in "stdout", "stderr":
        monkeypatch.setattr(sys, name, None)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), flag])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert e.value.code == code


def test_output_that_cannot_show_a_letter_ends_no_start(monkeypatch):
    """As by `LC_ALL=C`."""
    shown = {name: io.TextIOWrapper(io.BytesIO(), "ascii") for name in ("stdout", "stderr")}
    for name, stream in shown.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--café"])
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as e:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert e.value.code == 2 and b"arguments: --caf\\xe9" in shown["stderr"].buffer.getvalue()


def test_help_names_all_losses():
    (field,) = [f for f in dataclasses.fields(Config) if f.name == "loss"]
    assert set(LOSSES) <= set(re.findall(r"\w+", field.metadata["help"]))


@pytest.mark.parametrize("argv, code, words", [
    (["--help"], 0, "--max_seq_len"), (["--version"], 0, f"FSDP QLoRA {VERSION}"),
    (["--learning_rte", "1"], 2, "did you mean --learning_rate?"),
    (["--batch_size", "4k"], 2, "--batch_size 4k: must be a whole number; did you mean 4096?")])
def test_flags_are_answered_before_torch_is_imported(argv, code, words):
    command = [sys.executable, "-X", "importtime", ROOT / "train_fsdp_qlora.py", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and words in done.stdout + done.stderr
    imported = re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.M)
    assert "fsdp_qlora.config" in imported and "torch" not in imported
