"""Flags: parsing a dataclass of them from the command line and YAML, and what follows from them.

The flags themselves are the fields of Config, in the script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import math
import re
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fsdp_qlora.model.loss import LOSSES
from fsdp_qlora.planner.gpu_specs import parse_cards
from fsdp_qlora.ranks import log
from fsdp_qlora.run.foreign_flags import peer_answer, peer_value

if TYPE_CHECKING:
    from train_fsdp_qlora import Config

GROUPS = {"model": "model and data", "batch_size": "training", "adapter": "adapter",
          "micro_batch_tokens": "memory and speed"}  # the first flag of each group in --help
SWITCHED = "true", "false", "yes", "no", "on", "off", "1", "0"  # values of switches elsewhere


def make_parser(config_class: type[Config], description: str) -> argparse.ArgumentParser:
    """A parser of the fields of `config_class` that raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)

    def fail(message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+): ", r"\1 ", message)
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser.print_help = lambda: log(parser.format_help())  # on rank 0
    types = typing.get_type_hints(config_class)
    for f in dataclasses.fields(config_class):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        kind = [*typing.get_args(types[f.name]), types[f.name]][0]  # of "int | None" int
        options = dict(f.metadata, default=f.default)
        choices = [*LOSSES] if f.name == "loss" else options.pop("choices", ())
        if choices:
            options["metavar"] = f"{{{','.join(choices)}}}"
        if f.default is not None:
            options["help"] += " (default: %(default)s)"
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = functools.partial(parse_value, f.name, kind, choices)
        if isinstance(f.default, tuple) or typing.get_origin(kind) is tuple:
            options["nargs"] = "+"
        group.add_argument(f"--{f.name}", **options)
    group.add_argument("--config", help="YAML or JSON file of these flags, or a run's"
                       " train_config.json; the command line has precedence")
    return parser


def parse_value(name: str, kind: Any, choices: Sequence[str], text: str) -> Any:
    """The value that `text` is for flag `name`: one of `choices`, or of a `kind`. What is none is
    refused with what it may be, and what was probably meant."""
    wanted, meant = "", ""
    if choices and text not in choices:
        wanted = f"one of {', '.join(choices)}"
        wanted += ", and --output_dir names the run" * (name == "resume")
        meant = peer_value(name, text, choices)
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            meant = meant_number(text, kind)
    elif name == "recompute" and not text.isdecimal():
        words = ("all", "none", "auto")
        wanted = "" if text in words else f"{', '.join(words)} or a number of layers"
        meant = peer_value(name, text, words)
    elif name == "eval_dataset" and text.endswith("%"):
        wanted, meant = "files, a Hub id or a fraction of the rows", meant_number(text, float)
    if wanted:
        guess = f"; do you mean {meant}?" if meant else ""
        raise argparse.ArgumentTypeError(f"{text}: must be {wanted}{guess}")
    return text


def meant_number(text: str, kind: Any) -> str:
    """The number that is written as people or C do, 4k, 10%, 24GB, 16.0 or 2e-4f, or ""."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)([kf%]|gi?b)?", text.lower())
    with contextlib.suppress(ValueError):
        if match:
            value = float(match[1]) * {"k": 1024, "%": 0.01}.get(match[2], 1)
            return f"{value:g}" if kind is float else f"{value:.0f}" if value % 1 == 0 else ""
    return ""


def parse_flags(config_class: type[Config], description: str,
                argv: Sequence[str] | None = None) -> Config:
    """The flags as a `config_class`: those of --config, or of the run that is resumed, and then
    those of the command line. Raises ValueError."""
    parser = make_parser(config_class, description)
    argv = list(sys.argv[1:] if argv is None else argv)

    def parse(argv: list[str]) -> dict[str, Any]:
        values, unknown = parser.parse_known_args(argv)
        if unknown:
            # a flag with its value, as torchtune's lr=1e-4; else a value without a flag
            flags = [word.partition("=")[0] for word in unknown if word[0] == "-" or "=" in word]
            if not flags:
                is_switch = {word.lower() for word in unknown} <= {*SWITCHED}
                why = "; what is on or off takes no value: --flag or --no-flag" * is_switch
                raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{why} (see --help)")
            refuse_unknown(config_class, "", flags)
        return vars(values)

    values = parse(argv)
    if values["config"]:
        argv = read_flags(config_class, Path(values["config"])) + argv
        values = parse(argv)
    if values["resume"] == "must":
        runs = sorted(Path("runs").glob("*/train_config.json"), key=lambda p: p.stat().st_mtime)
        if not (values["output_dir"] or runs):
            raise ValueError("--resume must without --output_dir: no run below runs/ to resume")
        directory = values["output_dir"] or str(runs[-1].parent)
        saved_config = Path(directory, "train_config.json")
        if not saved_config.is_file():
            raise ValueError(f"--resume must: no run in {directory} (no {saved_config.name})")
        begun_argv = read_flags(config_class, saved_config)
        values = parse([*begun_argv, *argv, f"--output_dir={directory}"])
    del values["config"]
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return config_class(**fields)


def refuse_unknown(config_class: type[Config], where: str, flags: list[str]) -> NoReturn:
    """Raise ValueError for flags that are none, with what to give instead: what is known of other
    tools' flags, or the flag that is spelled like it. `where` they stand: "--config FILE: "."""
    names, told = [f"--{f.name}" for f in dataclasses.fields(config_class)], []
    for flag in dict.fromkeys(flags):
        flag = f"--{flag.lstrip('-')}"
        parts = flag[2:].replace("-", "_").split(".")  # torchtune's optimizer.lr
        word = f"--{parts[-1]}"
        # a cutoff below which another tool's --num_processes would be --num_epochs
        near = ([known for known in names if known.startswith(word)]
                or difflib.get_close_matches(word, names, 1, cutoff=0.75))
        guess = near and f"do you mean {near[0]}?"
        answers = (peer_answer(flag), "its dashes are missing" if flag in names else "",
                   guess if word in names else "", *map(peer_answer, (parts[-1], parts[0])), guess)
        answer = next(filter(None, answers), "")
        told.append(f"{flag}: {answer}" if answer else flag)
    raise ValueError(f"{where}unrecognized arguments: {' | '.join(told)} (see --help)")


def read_flags(config_class: type[Config], path: Path) -> list[str]:
    """The command line that a YAML or JSON file of flags stands for. Raises ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            # its own takes the last of two alike
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{name} is there twice")
            return super().construct_mapping(node, deep)

    # numbers and dates are text, as on the command line: YAML's 2026_11 is 202611, its 5:00 is 300
    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":bool", ":null"))]
        for first, resolvers in Loader.yaml_implicit_resolvers.items()}
    try:
        content = yaml.load(path.read_text(), Loader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as e:
        raise ValueError(f"--config {path}: cannot be read: {e}")
    content = content.get("flags", content) if isinstance(content, dict) else content
    if not isinstance(content, dict):
        raise ValueError(f"--config {path}: is no table of flags and their values")
    if "config" in content:
        raise ValueError(f"--config {path}: names another file by config: write its flags here")
    names = {f.name for f in dataclasses.fields(config_class)}
    if unknown := [str(name) for name in content if name not in names]:
        refuse_unknown(config_class, f"--config {path}: ", unknown)
    argv = []
    for name, value in content.items():
        is_switch = isinstance(value, bool) and isinstance(getattr(config_class, name, False), bool)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and name != "columns":
                raise ValueError(f"--config {path}: {name} is a table, as other tools have it: give"
                                 " the value alone")
            if isinstance(item, bool) and not is_switch:
                raise ValueError(f"--config {path}: {name}: {item}: YAML takes yes, no, on and off"
                                 " for these: put the value in quotes")
        if is_switch:
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif name == "columns" and isinstance(value, dict):
            argv += [f"--{name}", *(f"{old}={new}" for old, new in value.items())]
        elif isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{name}={value}")
    return argv


def save_interval(config: Config) -> tuple[int, float]:
    """--save_every as (steps, seconds) between checkpoints; (0, inf): only at the end."""
    if config.save_every.endswith("m"):
        return 0, 60 * int(config.save_every[:-1]) or math.inf
    return int(config.save_every), math.inf


def check_combinations(config: Config) -> None:
    """Raise ValueError for flags that do not go together."""
    for f in dataclasses.fields(config):
        losses = [loss for loss, kind in LOSSES.items() if f.name in kind.flags]
        value = getattr(config, f.name)
        if losses and config.loss not in losses and value != f.default:
            raise ValueError(f"--{f.name} {value} is of --loss {' or '.join(losses)}, not of"
                             f" {config.loss}: drop it, or choose another --loss")
    if LOSSES[config.loss].is_unpaired and config.batch_size < 2:
        raise ValueError(f"--batch_size {config.batch_size} with --loss {config.loss}: a step"
                         " compares good answers with bad ones: give at least 2")
    for name in "random_weights", "plan_for":
        if getattr(config, name) and not config.model:
            raise ValueError(f"--{name} needs a --model whose config.json gives the shapes")
    for name in "eval_every", "eval_samples":
        if (n := getattr(config, name)) and not config.eval_dataset:
            raise ValueError(f"--{name} {n} needs an --eval_dataset: files, a Hub id, or a fraction"
                             " of the rows, 0.02")
    if config.offload_activations and config.recompute in ("none", "0"):
        raise ValueError(f"--offload_activations has nothing to keep with --recompute"
                         f" {config.recompute}: drop one of them")
    if config.attn == "flash_attention_2" and config.compute_dtype != "bfloat16":
        raise ValueError("--attn flash_attention_2 computes in bfloat16: drop it or use sdpa")


def resolve_config(config: Config, world_size: int) -> Config:
    """The Config with what follows from the flags alone filled in. Raises ValueError."""
    if config.plan_for:
        world_size = parse_cards(config.plan_for)[0]
    for name, value in vars(config).items():
        if value == "" or isinstance(value, tuple) and "" in value:
            raise ValueError(f"--{name} is empty: leave it out or give a value")

    def check(names: str, is_right: Callable[[Any], Any], wanted: str) -> None:
        for name in names.split():
            value = getattr(config, name)
            if value is not None and not is_right(value):
                raise ValueError(f"--{name} {value}: must be {wanted}")

    check("lora_rank lora_alpha max_seq_len batch_size", lambda n: n >= 1, "at least 1")
    check("keep_checkpoints", lambda n: n >= 2, "at least 2")
    check("num_epochs learning_rate beta desirable_weight undesirable_weight"
          " memory_limit_gib micro_batch_tokens max_grad_norm max_minutes step_timeout_minutes",
          lambda x: 0 < x < math.inf, "positive")
    check("max_steps eval_every eval_samples weight_decay simpo_gamma", lambda x: 0 <= x < math.inf,
          "0 or more")
    check("label_smoothing", lambda x: 0 <= x < 0.5, "at least 0 and below 0.5")
    check("save_every", lambda x: re.fullmatch(r"\d{1,9}m?", x),
          "minutes, as 5m, or a number of steps, or 0")
    check("lora_dropout warmup_fraction", lambda x: 0 <= x < 1, "at least 0 and below 1")
    check("columns", lambda pairs: all(re.fullmatch("[^=]+=[^=]+", pair) for pair in pairs)
          and len({pair.partition("=")[0] for pair in pairs}) == len(pairs),
          "OLD=NEW, each OLD once")
    check("output_dir", lambda path: not path.startswith("~"), "the whole path: the shell has not"
          " replaced its ~")
    check("seed", lambda n: 0 <= n < 2**40, "at least 0 and below 2^40")
    if config.recompute not in ("all", "none", "auto") and not config.recompute.isdecimal():
        raise ValueError(f"--recompute {config.recompute}: must be all, none, auto or a number")
    if config.model and not (config.dataset or config.random_weights or config.plan_for):
        raise ValueError(f"--model {config.model} needs a --dataset: files or a Hub id")
    tracker = config.report_to
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: {tracker} is not installed: `pip install"
                         f" {tracker}`, or use none")
    if config.random_weights and config.eval_dataset and not config.dataset:
        raise ValueError("--eval_dataset needs a --dataset beside --random_weights")
    check_combinations(config)
    shards = config.shard_group_size
    if shards is None and not config.model:
        shards = world_size  # the demo is there to show sharding
    if shards is not None and (shards < 1 or world_size % shards):
        sizes = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
        raise ValueError(f"--shard_group_size {shards} does not divide {world_size} processes: use"
                         f" one of {sizes}")
    return dataclasses.replace(
        config,
        shard_group_size=shards,
        target_modules=tuple(" ".join(config.target_modules).replace(",", " ").split()),
        beta=config.beta or (0.1 if "beta" in LOSSES[config.loss].flags else None),
        learning_rate=config.learning_rate or (
            3e-3 if not config.model else 2e-4 if config.loss == "sft" else 5e-6),
        max_steps=config.max_steps or (None if config.model or config.dataset else 300),
        output_dir=config.output_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}")


def resolve_steps(config: Config, n_rows: int) -> Config:
    """The Config with what follows from the number of rows filled in, in steps."""
    steps = config.max_steps or math.ceil(config.num_epochs * n_rows / config.batch_size)
    every = math.ceil(steps / 10) if config.eval_every is None else config.eval_every
    return dataclasses.replace(config, max_steps=steps, eval_every=every)
