"""minimal_fsdp_qlora.py on the ranks of ranks_runner.py, for test_minimal.py: the case `minimal` of
rank_cases.py. The script is its own; what is put around its functions looks, or is a fault, or says
how it is to compute."""

import ast
import contextlib
import io
import random
import re
import shutil
import sys
import textwrap
import types
from pathlib import Path
from unittest import mock

import bitsandbytes as bnb
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

import minimal_fsdp_qlora as script

PROBE = range(3, 67)  # token ids


def minimal(job, process):
    """The script's main() with job["argv"] and the patches that job["with"] names. What rank 0 has
    printed, and the error if one has ended it, is in the file job["out"] + ".log". Returns the loss
    of each step, the logits of PROBE at the end, and the bytes of all 4-bit weights as they are
    gathered: {name: tensor}, {} after an error."""
    device, _ = process
    seen, log, argv = {}, io.StringIO(), ["minimal_fsdp_qlora.py", *map(str, job["argv"])]
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(log))
        for key in job.get("with", ()):
            for owner, name, new in edited(key) if key in EDITS else ():
                stack.enter_context(mock.patch.object(owner, name, new))
        for owner, name, new in (
            (sys, "argv", argv),
            (script.time, "sleep", lambda seconds: None),  # no torchrun ends rank 1 meanwhile
            (script, "init_distributed", lambda: device),
            (dist, "destroy_process_group", lambda: None),  # rank_cases.py ends it
            (script, "check_loaded", looking_at_weights(script.check_loaded, seen)),
            *looking_at_losses(seen),
            (script, "train", looking_at_logits(script.train, seen, device)),
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(owner, name, new))
        for key in job.get("with", ()):  # around those above
            for owner, name, new in PATCHES[key]() if key in PATCHES else ():
                stack.enter_context(mock.patch.object(owner, name, new))
        try:
            script.main()
        except (SystemExit, RuntimeError) as e:
            log.write(f"{type(e).__name__}: {e}\n")
            seen.clear()
    if dist.get_rank() == 0:
        Path(job["out"] + ".log").write_text(log.getvalue())
    return seen


def looking_at_weights(check_loaded, seen):
    def look(model):
        check_loaded(model)
        base = model.get_base_model()
        names = {module: name for name, module in base.named_modules()}
        for layer in base.get_decoder().layers:
            layer.unshard()
            for module in layer.modules():
                if isinstance(module, bnb.nn.Linear4bit):
                    name = names[module].replace(".base_layer", ".weight")
                    seen[name] = module.weight.detach().view(torch.uint8).clone()
            layer.reshard()

    return look


def looking_at_losses(seen):
    """To more digits than are printed."""
    rows_loss, clip_gradient, mine = script.rows_loss, script.clip_gradient, []

    def look(model, rows, device):
        loss = rows_loss(model, rows, device)
        n = script.count_loss_tokens(rows)
        if loss.requires_grad:  # not an evaluation
            mine.append(torch.stack([loss.detach().double(), loss.new_tensor(n).double()]))
        return loss

    def end_step(*args):
        total = torch.stack(mine).sum(0)
        dist.all_reduce(total)
        loss = total[0] / total[1]
        seen["losses"] = torch.cat([seen.get("losses", loss.new_empty(0)), loss[None]])
        mine.clear()
        return clip_gradient(*args)

    return [(script, "rows_loss", look), (script, "clip_gradient", end_step)]


def looking_at_logits(train, seen, device):
    @torch.no_grad()
    def logits(model):
        with torch.autocast(device.type, script.DTYPE):
            return model(input_ids=torch.tensor([PROBE], device=device)).logits[0].float()

    def look(model, *args):
        train(model, *args)
        seen["logits"] = logits(model)

    return look


def in_fp32():
    return [(script, "DTYPE", torch.float32)]


def one_by_one():
    """A micro-batch is one row, which has no padding then."""
    return [(script, "micro_batches", lambda batch, args: (
        [row] for row in batch[dist.get_rank() :: dist.get_world_size()]))]


def lora_in_bf16():
    """Then all of a layer is bf16, and CUDA's copies rewrite NaNs; elsewhere the copies here do."""
    init_lora = script.init_lora

    def init_in_bf16(module, *args):
        init_lora(module, *args)
        module.lora_A.bfloat16()
        module.lora_B.bfloat16()

    return [(script, "init_lora", init_in_bf16), *copies_as_on_cuda()]


def copies_as_on_cuda():
    if torch.cuda.is_available():
        return []
    copy = torch._foreach_copy_

    def rewriting_copy(targets, sources):
        copy(targets, [torch.where(s.isnan(), torch.nan, s) if s.dtype == torch.bfloat16 else s
                       for s in sources])  # fmt: skip

    return [(torch, "_foreach_copy_", rewriting_copy)]


def norm_is_trained():
    load = script.load_and_shard

    def load_and_train_a_norm(model, *args):
        load(model, *args)
        model.get_base_model().get_decoder().norm.requires_grad_()

    return [(script, "load_and_shard", load_and_train_a_norm)]


def lm_head_is_unfrozen():
    build_model = script.build_model

    def build(*args):
        model = build_model(*args)
        model.get_base_model().lm_head.requires_grad_()
        return model

    return [(script, "build_model", build)]


def norm_is_not_read():
    load_module = script.load_module

    def load_all_but_norms(module, name, *args):
        if not name.endswith("model.norm"):
            load_module(module, name, *args)

    return [(script, "load_module", load_all_but_norms)]


def evaluated_first():
    """Each micro-batch is evaluated before it is trained."""
    rows_loss = script.rows_loss

    def evaluate(*args):
        with torch.no_grad():
            value = rows_loss(*args)
        loss = rows_loss(*args)
        torch.testing.assert_close(value, loss.detach())
        return loss

    return [(script, "rows_loss", evaluate)]


def killed_while_saving():
    """In the second save, with half of the adapter written. The first one is first-save/, too."""
    save_adapter, save_pretrained, n_saves = script.save_adapter, PeftModel.save_pretrained, []

    def save_half(model, directory, **options):
        save_pretrained(model, directory, **options)
        path = Path(directory, "adapter_model.safetensors")
        path.write_bytes(path.read_bytes()[:100])
        raise RuntimeError("killed")

    def save(model, args, *more):
        n_saves.append(1)
        if len(n_saves) == 1:
            save_adapter(model, args, *more)
            if dist.get_rank() == 0:
                shutil.copytree(args.output_dir, "first-save")
            return
        with mock.patch.object(PeftModel, "save_pretrained", save_half):
            save_adapter(model, args, *more)
        raise RuntimeError("killed")  # on the other ranks

    return [(script, "save_adapter", save)]


def read_recipes():
    """{the capitals that a recipe of the script begins with: its pieces of code}"""
    text = Path(script.__file__).read_text().partition("# ---- Recipes")[2]
    _, *parts = re.split(r"^#\n# ([A-Z]{2,}(?: [A-Z]+\b)*)", text, flags=re.M)
    return {title: [re.sub("^#     ", "", block, flags=re.M)
                    for block in re.findall(r"(?:^#     .*\n)+", recipe, re.M)]
            for title, recipe in zip(parts[::2], parts[1::2], strict=True)}  # fmt: skip


RECIPES = read_recipes()
MESH, DIVIDE_NORM = RECIPES["USE HSDP"]
COUNT_WEIGHTS, WEIGHT_LOSSES = RECIPES["WEIGHT THE TOKENS OR ANSWERS"]
GENERATE = RECIPES["GENERATE TEXT IN AN EVALUATION"][0].replace(
    "tokenizer.decode(output_ids[0])", 'f"generated {len(output_ids[0]) - len(ids[0])} tokens"')
LORA_CHOICES = ", ".join(re.sub("  #.*", "", choice)
                         for choice in RECIPES["CHANGE LORA"][0].splitlines())


def before(line, code):
    """An edit that puts a recipe's code before a line of a function."""
    return line, textwrap.indent(code, "    ") + line


EDITS = {  # as the recipes and the comments tell a user to edit it: text before, text after
    "HSDP": [
        ('"mp_policy": MixedPrecisionPolicy()}', '"mp_policy": MixedPrecisionPolicy(), '
         + MESH.replace('"cuda"', "device.type").replace("n_machines, n_gpus_of_each", "2, 2")
         + "}"),
        before("    norm.sqrt_()", DIVIDE_NORM.replace("n_machines", "2"))],
    "layers stay gathered": [  # by an evaluation, too, until the next backward
        ("layer, reshard_after_forward=True", "layer, reshard_after_forward=False"),
        ("            save_adapter(", "            evaluate(model, eval_rows, args, device)\n"
         "            save_adapter(")],
    "LoRA+": [
        ("PagedAdamW8bit(shard_copies,", 'PagedAdamW8bit([{"params": shard_copies[::2]},'
         ' {"params": shard_copies[1::2], "lr": 16 * args.learning_rate}],')],
    "initial adapter": [
        ('("default", init_lora_weights)', '("default", init_lora_weights)\n' + textwrap.indent(
            RECIPES["BEGIN WITH AN EXISTING ADAPTER"][0], "    ").replace(
                "adapter/adapter_model", "llama-adapter/adapter_model"))],
    "gaussian": [("target_modules=list(linears),",
                  'target_modules=list(linears), init_lora_weights="gaussian",')],
    "weights": [  # of 0.25 for all tokens, which change nothing
        ("    labels: Tensor", "    weights: Tensor\n    labels: Tensor"),
        ("    return Row(torch.tensor(ids),",
         "    return Row(torch.tensor(ids), torch.full([len(ids)], 0.25),"),
        before("    return sum((row.labels[1:] != IGNORE_INDEX).sum().item()", COUNT_WEIGHTS),
        before("    return losses.sum()", WEIGHT_LOSSES)],
    "columns": [
        ("    check_example(example)\n    if",
         '    example = {"messages": [{"role": "user", "content": example["prompt"]},'
         ' {"role": "assistant", "content": example["response"]}]}\n'
         "    check_example(example)\n    if")],
    "attention only": [("target_modules=list(linears),", f"{LORA_CHOICES},")],
    "generation": [before("    model.train()\n    for unit", GENERATE)],
    "AdamW": [("bnb.optim.PagedAdamW8bit(", "torch.optim.AdamW(")],
}  # fmt: skip


def edited(name):
    """The functions and classes of the script that an entry of EDITS changes."""
    source = Path(script.__file__).read_text()
    lines = source.splitlines(True)  # ast.get_source_segment() splits them for each function
    functions = {node.name: "".join(lines[node.lineno - 1 : node.end_lineno]).rstrip()
                 for node in ast.parse(source).body
                 if isinstance(node, (ast.FunctionDef, ast.ClassDef))}  # fmt: skip
    changed = {}
    for old, new in EDITS[name]:
        (name, text), = [(name, text) for name, text in functions.items() if old in text]
        changed[name] = changed.get(name, text).replace(old, new)
    found = {}
    for text in changed.values():
        exec(text, vars(script), found)  # its globals are the script's
    return [(script, name, function) for name, function in found.items()]


def rank_1_has(**values):
    parse_args = script.parse_args

    def parse():
        args = parse_args()
        if dist.get_rank() == 1:
            vars(args).update(values)
        return args

    return [(script, "parse_args", parse)]


def rank_1_has_other_rows():
    return rank_1_has(dataset="five.jsonl")


def rank_1_has_another_rate():
    return rank_1_has(learning_rate=2e-2)


def encode_draws():
    """As an edit of encode() may: without a seed, so differently on each rank."""
    encode, draw = script.encode, random.Random(dist.get_rank())

    def prompted(example, tokenizer):
        return encode({"text": draw.choice("ab") + example["text"]}, tokenizer)

    return [(script, "encode", prompted)]


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, vocab_size=300, hidden_size=64, num_hidden_layers=2, **others):
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**others)


class OwnLayer(GradientCheckpointingLayer):
    """In place of attention the mean of all tokens so far."""

    def __init__(self, size):
        super().__init__()
        self.norm = nn.RMSNorm(size)
        self.up = nn.Linear(size, 2 * size, bias=False)
        self.down = nn.Linear(2 * size, size, bias=False)

    def forward(self, x):
        counts = torch.arange(1, 1 + x.shape[1], device=x.device)[:, None]
        return x + self.down(self.up(self.norm(x).cumsum(1) / counts).relu()).to(x.dtype)


class OwnDecoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            OwnLayer(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    """What the script asks of a model class, and nothing more."""

    config_class = OwnConfig
    supports_gradient_checkpointing = True

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnDecoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_decoder(self):
        return self.model

    def forward(self, input_ids, **others):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)) * self.scale)


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x.relu())


def own_linear():
    """After own_class: its layers have a linear with a forward of its own."""
    build = OwnForCausalLM._from_config

    def from_config(*args, **kwargs):
        model = build(*args, **kwargs)
        model.model.layers[0].up.__class__ = OwnLinear
        return model

    auto_class = types.SimpleNamespace(from_config=from_config)
    return [(script, "AutoModelForCausalLM", auto_class)]


def own_class():
    auto_class = types.SimpleNamespace(from_config=OwnForCausalLM._from_config)
    return [(script, "AutoConfig", OwnConfig), (script, "AutoModelForCausalLM", auto_class)]


PATCHES = {patch.__name__: patch for patch in (
    in_fp32, one_by_one, lora_in_bf16, copies_as_on_cuda, norm_is_trained, lm_head_is_unfrozen,
    norm_is_not_read, own_class, own_linear, rank_1_has_other_rows, rank_1_has_another_rate,
    encode_draws, evaluated_first, killed_while_saving)}
