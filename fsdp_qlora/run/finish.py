"""The end of a run: why it stops, what of it is saved, and what to type next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from fsdp_qlora.data.template import how_to_prompt
from fsdp_qlora.exit_codes import EXITS, EXIT_RESUMABLE
from fsdp_qlora.log import log
from fsdp_qlora.memory import log_debug_memory
from fsdp_qlora.ranks import RunEnd, all_gather_objects, on_rank_0
from fsdp_qlora.run.checkpoints import DISK_ERRORS, checkpoint_path, write_final_adapter
from fsdp_qlora.run.run import Run
from fsdp_qlora.run.run_results import read_losses, why_worse
from fsdp_qlora.run.status import LOST_LOCK


def stop_run(run: Run, step: int, was_cut_short: bool) -> NoReturn:
    """End a run that was asked to stop, after `step`. `was_cut_short`: its evaluation did not
    finish. All ranks must call this."""
    why = next(filter(None, all_gather_objects(run.status.stop_reason)))
    has_trained = run.status.longest_step > 0  # since this start
    if was_cut_short and not has_trained and why.startswith("--max_minutes"):
        raise RunEnd(f"{why} before the evaluation after step {step} was done,"
                     " and the next start would end there, too. Use more minutes, or evaluate"
                     " fewer rows", EXITS["flags"])
    if why == LOST_LOCK:  # saves the adapter elsewhere, and ends the run with an error
        on_rank_0(write_final_adapter, run, run.adapter.gather_weights(),
                  run.merge_check.tensors(run.model), causes=DISK_ERRORS)
    raise RunEnd(f"{why}, after step {step}; {what_is_saved(run, step)}", EXIT_RESUMABLE)


def what_is_saved(run: Run, step: int) -> str:
    """Return what is saved of a run that stops after `step`, and how it is resumed."""
    latest = checkpoint_path(run.directory, run.saved_step).name
    if not run.saved_step:
        return "no checkpoint is saved, and the same command starts again from the beginning"
    if run.saved_step < step:
        return f"its checkpoint could not be saved; {run.status.how_to_resume} from {latest}"
    return f"{latest} is saved; {run.status.how_to_resume}"


def finish_run(run: Run, script: Path) -> None:
    """Print what a complete run leaves and how to use it, and write status.json. All ranks must
    call this."""
    log_checkpoints(run)
    log_debug_memory("at the end", run.device)
    if how := how_to_prompt(run.rows.template_kwargs):
        log(how)
    if why := on_rank_0(lambda: why_worse(read_losses(run.directory))):
        log(f"warning: {why}. Try a lower --learning_rate")
    log_adapter(run, script)
    run.status.write("complete", 0, "; ".join(filter(None, ["the adapter is saved", how])))


def log_checkpoints(run: Run) -> None:
    """Print which checkpoint is the best, and whether the last one is missing."""
    if run.saved_step < run.config.max_steps:
        log("warning: the final adapter is saved, but its checkpoint is not; latest checkpoint:"
            f" {run.status.checkpoint or 'none'}")
    if best := run.progress.best_step:
        path = checkpoint_path(run.directory, best)
        log(f"best: step {best}, eval loss {run.progress.best_loss:.4f},"
            f" {path if path.is_dir() else 'its checkpoint could not be saved'}")


def log_adapter(run: Run, script: Path) -> None:
    """Print where the adapter is, and the command that merges it."""
    if (run.directory / "merged").exists():
        log(f"warning: {run.directory}/merged is of an earlier adapter; remove it before you merge")
    log(f"done: adapter saved in {run.directory} (PEFT format); to merge it into the base model:")
    log(merge_command(run.directory, script))
    if run.config.trainable_tokens:
        log("note: vLLM and llama.cpp refuse adapters with rows of tokens; serve the merged model")


def merge_command(directory: Path, script: Path) -> str:
    """Return the command that merges the adapter of a run of `script`."""
    merge = script.with_name("merge_adapters.py")
    merge = os.path.relpath(merge) if merge.is_file() else merge.name  # `script` was copied alone
    on_path = shutil.which("python")
    python = os.path.relpath(sys.executable)
    python = sys.executable if python.startswith("..") else python
    if on_path and Path(on_path).parent == Path(sys.executable).parent:
        python = "python"
    output = f"{directory}/merged"
    return shlex.join([python, merge, "--adapter_dir", str(directory), "--output_dir", output])
