"""What the tests run on several ranks: python -m torch.distributed.run ranks_runner.py DIRECTORY,
or python ranks_runner.py DIRECTORY RANKS, which forks them and is faster.

Every rank does the jobs of DIRECTORY/0.json; the jobs' exit codes are in 0.RANK. Where there is a
named pipe DIRECTORY/wake.RANK, it does those of 0.json, 1.json and so on, one for each byte that
comes, until that has ended. One launch for many jobs: starting costs more than they do.

A job is one main() of the script, with its "argv", or a "case" of rank_cases.py. What may be given
besides: "nproc", where the first ranks alone take part; "nodes", of how many machines they are to
take themselves for processes; "deterministic", for what must be the same to the last bit on a GPU,
where the attention's backward adds in any order otherwise; "cwd"; "before", a command that rank 0
runs first; "draws", for loss.png, which no other run draws; "script", another to run instead: an
assembled one, one with its package beside it, or one that depends on this tree's package;
"optimizer", the code of another one; "group_bytes", attention_mixer.GROUP_BYTES; "pieces", whether
CUDNN_KERNEL computes what it does on a GPU, where pieces may be short; "peft", the
version that this node seems to have; "plan", what the plan is to have whatever would be chosen;
"cut_off", a file that rank 1 cuts off before the weights are read, and where; "others", what is
different for the ranks but 0, or from "first_other" on.
"""

import collections
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

gc.disable()  # it would look through ever more of what is imported, a fifth of the time

# what the script imports when it comes to it, here once for all ranks
import datasets  # noqa: E402, F401
import matplotlib.backends.backend_agg  # noqa: E402, F401
import matplotlib.figure  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401
from torch.distributed.tensor import debug  # noqa: E402
import patching  # noqa: E402
import rank_cases  # noqa: E402
from fsdp_qlora.kernels.attention import CUDNN_KERNEL  # noqa: E402

gc.freeze()
gc.enable()


@contextlib.contextmanager
def other_script(path):
    """In the `with` body the script at `path` is the package, with the package beside it if there
    is one."""
    ours, folder = {module.__name__: module for module in patching.modules()}, Path(path).parent
    for name in ours if (folder / "fsdp_qlora").is_dir() else ["train_fsdp_qlora"]:
        del sys.modules[name]
    sys.dont_write_bytecode = True  # nothing appears beside it
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("train_fsdp_qlora", path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield
    finally:
        sys.path.remove(str(folder))
        for module in patching.modules():
            del sys.modules[module.__name__]
        sys.modules.update(ours)


def replace_plan(fields):
    """What no flag asks for, as it depends on the machine."""
    patching.wrap("choose_plan", lambda choose: (
        lambda *args, **kwargs: dataclasses.replace(choose(*args, **kwargs), **fields)))


def cut_off(file, size):
    """An injected fault: after the check of the files, before the read."""

    def after_cutting(make_reader):
        def cut_off_first(*args):
            if dist.get_rank() == 1:
                os.truncate(file, size)
            dist.barrier()
            return make_reader(*args)

        return cut_off_first

    patching.wrap("WeightReader", after_cutting)


def call_main(job):
    return sys.modules["train_fsdp_qlora"].main(job["argv"])


stores = collections.deque(maxlen=2)  # of rank 0; the others may not have left the one before


def meet(path, rank):
    """Let the processes of a job find each other by a store of its own, as torchrun makes one:
    without that rank 1 would try again and again until rank 0 has come."""
    if rank == 0:
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        write_atomic(path, str(stores[-1].port))
    while not path.exists():
        time.sleep(0.005)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=path.read_text(),
                      TORCHELASTIC_USE_AGENT_STORE="True")  # fmt: skip


def do(job, rank):
    """The exit code of one job."""
    if "cwd" in job:
        os.chdir(job["cwd"])
    if rank == 0 and "before" in job:
        subprocess.run(job["before"], shell=True, check=True)
    names = patching.snapshot()
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(job.get("deterministic", False), warn_only=True)
    with other_script(job["script"]) if "script" in job else contextlib.nullcontext():
        if not job.get("draws"):
            patching.replace("draw_losses", lambda directory: None)
        if "peft" in job:
            patching.wrap("VERSIONS", lambda versions: versions | {"peft": job["peft"]})
        if "plan" in job:
            replace_plan(job["plan"])
        if "optimizer" in job:
            exec(job["optimizer"], vars(sys.modules["train_fsdp_qlora"]))
        if "group_bytes" in job:
            patching.replace("GROUP_BYTES", job["group_bytes"])
        if job.get("pieces"):
            patching.replace("MIN_TOKENS_PER_RANK", 1)
            patching.wrap("choose_attention", with_pieces)
        if "cut_off" in job:
            cut_off(*job["cut_off"])
        code = rank_cases.run(job) if "case" in job else call_main(job)
    patching.restore(names)  # faults end with their job, and what a case has changed
    return code


def with_pieces(choose):
    """choose_attention() that chooses, of documents without windows, what it does on Hopper."""

    def chosen(config, arch, device, whole_documents=True):
        kernels = choose(config, arch, device, whole_documents)
        if not whole_documents:
            kernels.fixed_len["full"] = CUDNN_KERNEL
        return kernels

    return chosen


def take_part(job, rank, ranks, meeting):
    """The exit code of one job; 0 of a rank that it does not want."""
    nproc = job.get("nproc", ranks)
    if rank >= nproc:
        return 0
    if rank >= job.get("first_other", 1):
        job.update(job.get("others", {}))
    local = nproc // job.get("nodes", 1)
    os.environ.update(WORLD_SIZE=str(nproc), LOCAL_WORLD_SIZE=str(local),
                      LOCAL_RANK=str(rank % local))  # fmt: skip
    meet(meeting, rank)
    code = do(job, rank)
    end_groups()
    return code


def end_groups():
    """Let go of the process groups of a job: each has a thread of gloo's that wakes a hundred times
    a second. A circle of references keeps them, and what DTensor knows of shards."""
    for name in "_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache":
        getattr(debug, name, lambda: None)()  # not every version of torch has both
    gc.collect()


def write_atomic(path, text):
    """For a reader that looks for the file: it is there once all of it is."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.rename(path)


def lists_of_jobs(directory, rank):
    """The paths of 0.json, 1.json and so on, each once it is there."""
    wake = directory / f"wake.{rank}"
    if not wake.exists():
        yield directory / "0.json"
        return
    pipe = os.open(wake, os.O_RDONLY | os.O_NONBLOCK)  # its other end may be closed already
    os.set_blocking(pipe, True)
    for number in itertools.count():
        if not os.read(pipe, 1):  # it ends with pytest, however that ends
            return
        yield directory / f"{number}.json"


def fork_ranks(n):
    """Become one of n ranks; the process that was started waits for them and ends them all when
    one fails, as torchrun does."""
    ranks = []
    for rank in range(n):
        if (child := os.fork()) == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(n))
            return
        ranks.append(child)

    def end(*_):
        for child in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    worst = 0
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and not worst:
            worst = 1
            end()
    os._exit(worst)


def main():
    if len(sys.argv) > 2:
        fork_ranks(int(sys.argv[2]))
    rank, ranks, worst = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 0
    gc.freeze = lambda: None  # what a run freezes would stay, see end_groups()
    for path in lists_of_jobs(Path(sys.argv[1]), rank):
        codes = [take_part(job, rank, ranks, path.with_suffix(f".meeting-{i}"))
                 for i, job in enumerate(json.loads(path.read_text()))]  # fmt: skip
        sys.stdout.flush()
        sys.stderr.flush()
        write_atomic(path.with_suffix(f".{rank}"), json.dumps(codes))
        worst = max(worst, *codes)
    return worst


if __name__ == "__main__":
    patching.check_each_model_once()
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as the script does
