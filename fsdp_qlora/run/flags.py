"""Parse the flags, which are the fields of Config, from the command line and YAML.

Nothing here imports torch, so that --help, --version and a wrong flag are answered at once.
resolve.py derives what was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import os
import re
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fsdp_qlora.config import VERSION, Config
from fsdp_qlora.run.foreign_flags import flag_hint, value_hint

DESCRIPTION = ("QLoRA fine-tuning on one or more GPUs: 4-bit NF4 base weights sharded by FSDP2,"
               " LoRA adapters on top.")
EXAMPLES = """examples:
  python train_fsdp_qlora.py --model Qwen/Qwen3-8B --dataset chat.jsonl --output_dir runs/8b
  torchrun --nproc_per_node=2 train_fsdp_qlora.py ...   the same on two GPUs
  python train_fsdp_qlora.py --resume must              resume the latest run below runs/
"""
GROUPS = {"model": "model and data", "batch_size": "training", "adapter": "adapter",
          "micro_batch_tokens": "memory and speed"}  # the first flag of each group in --help
SWITCH_VALUES = "true", "false", "yes", "no", "on", "off", "1", "0"  # in other tools


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the fields of Config that raises ValueError where argparse would exit."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--flag value ...]", description=DESCRIPTION, epilog=EXAMPLES,
        allow_abbrev=False, formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=28, width=100))

    def fail(message: str) -> NoReturn:
        message = re.sub(r"^argument (--\w+): ", r"\1 ", message)
        raise ValueError(f"{message} (see --help)")

    parser.error = fail
    parser._print_message = print_on_rank_0
    parser.add_argument("--version", action="version", version=f"FSDP QLoRA {VERSION}")
    types = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        if f.name in GROUPS:
            group = parser.add_argument_group(GROUPS[f.name])
        kind = [*typing.get_args(types[f.name]), types[f.name]][0]  # int for "int | None"
        options = dict(f.metadata, default=f.default)
        del options["on_resume"]
        choices = options.pop("choices", ())
        if choices:
            options["metavar"] = f"{{{','.join(choices)}}}"
        else:
            options["metavar"] = {int: "N", float: "X", bool: None}.get(kind, "VALUE")
        if f.default is not None:
            options["help"] += " (default: %(default)s)"
        if kind is bool:
            del options["metavar"]
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
    """Return the value of flag `name` for `text`: one of `choices`, or of type `kind`. The error
    for any other text names what is accepted and what was probably meant."""
    wanted, meant = "", ""
    if choices and text not in choices:
        wanted = f"one of {', '.join(choices)}"
        wanted += ", and --output_dir names the run" * (name == "resume")
        meant = value_hint(name, text, choices)
    elif kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            meant = meant_number(text, kind)
    elif name == "recompute" and not text.isdecimal():
        words = ("all", "none", "auto")
        wanted = "" if text in words else f"{', '.join(words)} or a number of layers"
        meant = value_hint(name, text, words)
    elif name == "eval_dataset" and text.endswith("%"):
        wanted, meant = "files, a Hub id or a fraction of the examples", meant_number(text, float)
    if wanted:
        guess = f"; did you mean {meant}?" if meant else ""
        raise argparse.ArgumentTypeError(f"{text}: must be {wanted}{guess}")
    return text


def meant_number(text: str, kind: Any) -> str:
    """Return the number in a text such as 4k, 10%, 24GB, 16.0 or 2e-4f, or ""."""
    match = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)([kf%]|gi?b)?", text.lower())
    with contextlib.suppress(ValueError):
        if match:
            value = float(match[1]) * {"k": 1024, "%": 0.01}.get(match[2], 1)
            return f"{value:g}" if kind is float else f"{value:.0f}" if value % 1 == 0 else ""
    return ""


def print_on_rank_0(message: str, file: Any = None) -> None:
    """Replaces argparse's function that prints --help and --version."""
    if os.environ.get("RANK", "0") == "0":
        print(message, end="", flush=True)


def parse_flags(argv: Sequence[str] | None = None) -> Config:
    """Return the flags as a Config: from --config, or from the run to resume, overridden by the
    command line. Raises ValueError."""
    parser = make_parser()
    argv = list(sys.argv[1:] if argv is None else argv)

    def parse(argv: list[str]) -> dict[str, Any]:
        values, unknown = parser.parse_known_args(argv)
        if unknown:
            # flags, also torchtune's lr=1e-4; the other words are values without a flag
            flags = [word.partition("=")[0] for word in unknown if word[0] == "-" or "=" in word]
            if not flags:
                is_switch = {word.lower() for word in unknown} <= {*SWITCH_VALUES}
                why = "; what is on or off takes no value: --flag or --no-flag" * is_switch
                raise ValueError(f"unrecognized arguments: {' '.join(unknown)}{why} (see --help)")
            refuse_unknown("", flags)
        return vars(values)

    values = parse(argv)
    if values["config"]:
        argv = read_flags(Path(values["config"])) + argv
        values = parse(argv)
    if values["resume"] == "must":
        runs = sorted(Path("runs").glob("*/train_config.json"), key=lambda p: p.stat().st_mtime)
        if not (values["output_dir"] or runs):
            raise ValueError("--resume must without --output_dir: no run below runs/ to resume")
        directory = values["output_dir"] or str(runs[-1].parent)
        config_file = Path(directory, "train_config.json")
        if not config_file.is_file():
            raise ValueError(f"--resume must: no run in {directory} (no {config_file.name})")
        values = parse([*read_flags(config_file), *argv, f"--output_dir={directory}"])
    del values["config"]
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Config(**fields)


def refuse_unknown(where: str, flags: list[str]) -> NoReturn:
    """Raise ValueError for unknown flags, with what to use instead: the answer for another tool's
    flag, or the flag with a similar spelling. `where` the flags are: "--config FILE: "."""
    names, told = [f"--{f.name}" for f in dataclasses.fields(Config)], []
    for flag in dict.fromkeys(flags):
        flag = f"--{flag.lstrip('-')}"
        parts = flag[2:].replace("-", "_").split(".")  # torchtune's optimizer.lr
        word = f"--{parts[-1]}"
        # a cutoff below which another tool's --num_processes would be --num_epochs
        near = ([known for known in names if known.startswith(word)]
                or difflib.get_close_matches(word, names, 1, cutoff=0.75))
        guess = near and f"did you mean {near[0]}?"
        answers = (flag_hint(flag), "its dashes are missing" if flag in names else "",
                   guess if word in names else "", *map(flag_hint, (parts[-1], parts[0])), guess)
        answer = next(filter(None, answers), "")
        told.append(f"{flag}: {answer}" if answer else flag)
    raise ValueError(f"{where}unrecognized arguments: {' | '.join(told)} (see --help)")


def read_flags(path: Path) -> list[str]:
    """Return the command line that is equivalent to a YAML or JSON file of flags. Raises
    ValueError."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            # SafeLoader would silently use the last of two equal keys
            names = [key.value for key, _ in node.value]
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"{name} occurs twice")
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
        raise ValueError(f"--config {path}: must be a mapping of flags to values")
    if "config" in content:
        raise ValueError(f"--config {path}: names another file by config: write its flags here")
    names = {f.name for f in dataclasses.fields(Config)}
    if unknown := [str(name) for name in content if name not in names]:
        refuse_unknown(f"--config {path}: ", unknown)
    argv = []
    for name, value in content.items():
        is_switch = isinstance(value, bool) and isinstance(getattr(Config, name, False), bool)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict) and name != "columns":
                raise ValueError(f"--config {path}: {name} is a table, as in other tools. Write the"
                                 " value alone")
            if isinstance(item, bool) and not is_switch:
                raise ValueError(f"--config {path}: {name}: {item}: YAML reads yes, no, on and off"
                                 " as these. Put the value in quotes")
        if is_switch:
            argv.append(f"--{name}" if value else f"--no-{name}")
        elif name == "columns" and isinstance(value, dict):
            argv += [f"--{name}", *(f"{old}={new}" for old, new in value.items())]
        elif isinstance(value, list):
            argv += [f"--{name}", *map(str, value)]
        elif value is not None:
            argv.append(f"--{name}={value}")
    return argv
