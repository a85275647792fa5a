"""Prepare a run: its model, rows, adapter and flags, before the base model's weights are read."""

from __future__ import annotations

import time
from pathlib import Path

from fsdp_qlora.config import Config
from fsdp_qlora.data.load_tokenizer import check_tokenizer
from fsdp_qlora.data.prepare_data import prepare_data
from fsdp_qlora.files import read_json
from fsdp_qlora.layer.spec import make_layer_specs
from fsdp_qlora.lora.init_adapter import check_init_adapter_base, read_adapter
from fsdp_qlora.lora.targets import resolve_adapter
from fsdp_qlora.ranks import on_rank_0, raise_on_all_ranks
from fsdp_qlora.run.base_model import fetch_weights, read_model_info
from fsdp_qlora.run.demo import make_demo
from fsdp_qlora.run.resolve import resolve_steps
from fsdp_qlora.run.resume import agree_on_digests
from fsdp_qlora.run.run import Job
from fsdp_qlora.run.startup_log import log_rows
from fsdp_qlora.run.status import Status


N_DRY_RUN_ROWS = 5  # rows that a dry run prints


def prepare(config: Config, directory: Path, status: Status, is_dry_run: bool) -> Job:
    """Read the model's config and the rows, check that all fits together, and download the weights,
    but not for a dry run. `config`: the result of resolve_config(). All ranks must call this."""
    # the model, but for its weights
    if not config.model:
        make_demo(config, directory)
    model_name = config.model or str(directory / "demo" / "model")
    status.enter("model")
    config, base = read_model_info(config, model_name)  # fills in --max_seq_len
    arch, tokenizer, token_ids = base.arch, base.tokenizer, base.trainable_ids

    # the rows
    status.enter("data")
    train_config = on_rank_0(read_json, directory / "train_config.json", {})
    is_new = not train_config  # otherwise this run resumes
    template_date = train_config.get("date", on_rank_0(time.strftime, "%Y-%m-%d"))
    rows, eval_rows = prepare_data(config, directory, tokenizer, arch.vocab_size, template_date)
    log_rows(rows, tokenizer, N_DRY_RUN_ROWS if is_dry_run else 1)
    config = resolve_steps(config, len(rows))  # fills in --max_steps and --eval_every

    # what is adapted, and the files of the weights
    status.enter("model")
    on_rank_0(check_tokenizer, base.directory, tokenizer, rows)
    with raise_on_all_ranks():
        lora_config, adapted = resolve_adapter(
            arch, config, config.model or str(base.directory), token_ids)
        layer_specs = make_layer_specs(arch, adapted, config.adapter_settings)
        if config.init_adapter and is_new:
            read_adapter(config, arch, token_ids)  # only to see that it fits
        weights_dir, base_sha256 = fetch_weights(config, base.directory, model_name, is_dry_run)
    digests = agree_on_digests(config, rows, eval_rows, base_sha256)
    if config.init_adapter and is_new:
        on_rank_0(check_init_adapter_base, config, base_sha256, tokenizer)
    return Job(
        config=config, base=base, weights_dir=weights_dir, rows=rows, eval_rows=eval_rows,
        template_date=template_date, lora_config=lora_config, layer_specs=layer_specs,
        digests=digests, train_config=train_config)
