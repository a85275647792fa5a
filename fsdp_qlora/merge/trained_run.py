"""TrainedRun: what a merge reads of a run or of a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_qlora.files import ADAPTER_FILES, digest, json_digest, read_json
from fsdp_qlora.run.run_results import (
    DIGESTED_FILES, MERGE_CHECK_FILE, QUANTIZATION, read_losses)


def find_train_config(directory: Path) -> Path:
    """Return the path of the train_config.json of a run, or of the run that contains a checkpoint;
    it may not exist."""
    path = directory / "train_config.json"
    return path if path.is_file() else directory.resolve().parent / path.name


@dataclass(frozen=True)
class TrainedRun:
    """The part of a run that a merge needs. The defaults are those of an adapter without
    train_config.json."""

    # values in train_config.json
    base_model: str
    # the flags; a merge reads lora_rank, lora_alpha, adapter and target_modules
    config: dict[str, Any] = field(default_factory=dict)
    # a merge reads device, prequantized, quantized_from_dtype and tensor_sums
    quantization: dict[str, Any] = field(default_factory=dict)
    base_sha256: str | None = None
    # {JSON of chat template variables: number of answers that were rendered with them}
    template_kwargs: dict[str, int] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)  # the tokens of --trainable_tokens
    merge_check_ids: list[list[int]] = field(default_factory=list)  # of each row's first tokens

    # files
    merge_check_file: Path | None = None  # MERGE_CHECK_FILE; None: nothing to compare with
    tokenizer_files: list[Path] = field(default_factory=list)  # to use if the base has none
    replacing_files: list[Path] = field(default_factory=list)  # they replace the base's
    # of --chat_template, or beside a PEFT adapter; None: the base's template
    template_file: Path | None = None

    losses: list[float] = field(default_factory=list)  # of each step until the adapter was saved

    @property
    def device(self) -> str | None:
        """The device on which training quantized, "cuda" or "cpu"; None: not known."""
        return self.quantization.get("device")


def read_run(directory: Path) -> TrainedRun:
    """Return the run in a directory, or the run that contains a checkpoint. Raises ValueError if a
    file is missing; if train_config.json, checkpoint.json or a file whose SHA-256 one of them has
    was changed; or if a merge does not support the run."""
    path = find_train_config(directory)
    needed = [path, *(directory / name for name in (*ADAPTER_FILES, MERGE_CHECK_FILE))]
    missing = [p.name for p in needed if not p.is_file()]
    if missing:
        latest = max(directory.glob("checkpoint-" + 6 * "[0-9]"), default=None)
        raise ValueError(f"--adapter_dir {directory}: has no {' and no '.join(missing)}. Use "
                         + (f"its latest checkpoint: --adapter_dir {latest}" if latest else
                            "a run directory of train_fsdp_qlora.py or a checkpoint in it; a"
                            " LoRA adapter that PEFT has saved is merged, unchecked, with"
                            " --base_model"))
    train_config = read_json(path)
    check_digests(directory, path, train_config)
    refuse_unmergeable(train_config, path)

    def found(*names: str) -> list[Path]:
        return [file for name in names if (file := path.with_name(name)).is_file()]

    has_own_template = bool(train_config["config"].get("chat_template"))
    token_ids = train_config.get("trainable_token_ids", [])
    tokenizer = found("tokenizer.json", "tokenizer_config.json")
    # earlier runs have it as "asked", the earliest not at all
    template_kwargs = train_config.get("template_kwargs", train_config.get("asked", []))
    return TrainedRun(
        base_model=train_config["base_model"], config=train_config["config"],
        quantization=train_config["quantization"], base_sha256=train_config["base_sha256"],
        template_kwargs={json.dumps(entry["chat_template_kwargs"]): entry["answers"]
                         for entry in template_kwargs},
        token_ids=token_ids, merge_check_ids=train_config["probe_input_ids"],
        merge_check_file=directory / MERGE_CHECK_FILE, tokenizer_files=tokenizer,
        # with --trainable_tokens the tokenizer may have more tokens than the base's
        replacing_files=[*found("generation_config.json"), *(tokenizer if token_ids else [])],
        template_file=path.with_name("chat_template.jinja") if has_own_template else None,
        losses=read_losses(path.parent, saved_step(directory)))


def check_digests(directory: Path, path: Path, train_config: dict[str, Any]) -> None:
    """Raise ValueError if train_config.json (`train_config`, read from `path`) or checkpoint.json
    has changed since it was written, or a file in `directory` whose SHA-256 one of them has."""
    changed = "has another SHA-256 than when it was written"
    files = {directory / name: train_config.get(key) for key, name in DIGESTED_FILES.items()}
    # without the digests of files, which were added when the run ended
    digested = {key: value for key, value in train_config.items()
                if key != "sha256" and key not in DIGESTED_FILES}
    if train_config.get("sha256") != json_digest(digested):
        raise ValueError(f"{path}: {changed}")
    if (checkpoint := directory / "checkpoint.json").exists():
        state = read_json(checkpoint)
        written, listed = state.pop("sha256", None), state.get("files")
        if json_digest(state) != written or not isinstance(listed, dict):
            raise ValueError(f"{checkpoint}: {changed}")
        files = {directory / name: listed.get(name) for name in (*ADAPTER_FILES, MERGE_CHECK_FILE)}
    for file, sha in files.items():
        if digest(file) != sha:
            raise ValueError(f"{file}: {changed}")


def saved_step(directory: Path) -> float:
    """Return the step at which the adapter was saved; infinity: the run's last."""
    checkpoint = directory / "checkpoint.json"
    return read_json(checkpoint)["step"] if checkpoint.exists() else math.inf


def refuse_unmergeable(train_config: dict[str, Any], path: Path) -> None:
    """Raise ValueError if `train_config`, read from train_config.json at `path`, was trained on
    weights that a merge cannot make: random ones, or ones that were quantized in another way."""
    config, quantization = train_config["config"], train_config["quantization"]
    facts = [("config.random_weights", config["random_weights"], False)]
    facts += [(f"quantization.{key}", quantization.get(key), value)
              for key, value in QUANTIZATION.items()]
    for name, value, needed in facts:
        if value != needed:
            raise ValueError(
                f"{path}: {name} is {json.dumps(value)}; a merge needs {json.dumps(needed)}")
