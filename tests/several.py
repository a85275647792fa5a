"""What test_nodes.py runs under torchrun: python -m torch.distributed.run several.py JOBS.json.

Each job is one main() of the script, with its "argv" and what may be given besides: "port", where
its processes meet (torchrun's own store serves one main() only); "script", a copy to run instead;
"cwd"; "peft", the version that this node seems to have; "before", a command that rank 0 runs first;
"out_of_memory", the step at which rank 1 runs out of memory. Every rank writes the exit codes
beside the jobs. One launch for many jobs: starting costs more than they do.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import torch


def load(path):
    spec = importlib.util.spec_from_file_location("train_fsdp_qlora", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_out_of_memory(script, at):
    """An injected fault: torch's own error, in place of what a CPU cannot do."""
    train_step = script.train_step

    def step_or_fail(run, step):
        if step == at and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return train_step(run, step)

    script.train_step = step_or_fail


def main():
    path, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    original = Path(__file__).resolve().parents[1] / "train_fsdp_qlora.py"
    version, codes = peft.__version__, []
    script = load(original)
    for job in json.loads(path.read_text()):
        if "port" in job:
            os.environ.update(MASTER_PORT=job["port"], TORCHELASTIC_USE_AGENT_STORE="False")
        os.chdir(job.get("cwd", path.parent))
        peft.__version__ = job.get("peft", version)
        if rank == 0 and "before" in job:
            subprocess.run(job["before"], shell=True, check=True)
        if "out_of_memory" in job:
            run_out_of_memory(script, job["out_of_memory"])
        codes.append((load(job["script"]) if "script" in job else script).main(job["argv"]))
        sys.stderr.flush()
    path.with_suffix(f".{rank}").write_text(json.dumps(codes))
    return max(codes)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as the script does
