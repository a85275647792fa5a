"""What the tests share: tiny models on disk, and the real command line.

How it all runs. Nothing here is a stand-in: the models are real ones with random weights (three
layers of every family in families.py), the references are transformers, PEFT and bitsandbytes
themselves, the runs are the script's own. Three ways lead to it. run_main calls its main() in this
process. run_training starts the file by torchrun, as a user does. run_jobs has the ranks of a
launch of ranks_runner.py call main() with one list of flags after the other: a launch serves the
whole session, since to start one takes longer than most runs; on a CPU it is forked from this
process and forks four ranks, of which a job takes as many as it wants. A file's runs are made
together, by a fixture, when its first test asks for them, and each test then reads what its own run
has left: a case that goes wrong fails under its own name. Where files do not tell, a job is a case
of rank_cases.py, which looks at the run that finetune() has wired, in place of its steps. Computed
in fp32 and on a CPU, numbers equal the references to 1e-5; what must be the same bytes is compared
by torch.equal. `make test` shares the files out to two processes, each with launches of its own.

Two things take as long as the few steps of such a run, an eighth of the time of all tests together:
the check at start, which a session does once for each shrunk configuration, and loss.png, which is
drawn where a test looks at it. Where the script is started by torchrun or python, and in
test_layer.py, nothing is left out.

To see a test fail, copy the scripts, fsdp_qlora/ and tests/ to another folder, break something
there and run pytest there: everything is found from where this file lies.
"""

import contextlib
import gc
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# before any Hugging Face library is imported, here and in every child process
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if "PYTEST_XDIST_WORKER" not in os.environ:  # else it is that of the process that started this one
    CACHE = tempfile.TemporaryDirectory(prefix="datasets-", ignore_cleanup_errors=True)
    os.environ["HF_DATASETS_CACHE"] = CACHE.name
    CHECKS = tempfile.TemporaryDirectory(prefix="checks-", ignore_cleanup_errors=True)
    os.environ["PASSED_CHECKS"] = CHECKS.name  # of patching.py
# torch asks for the name of each address that it connects to, also 127.0.0.1; where the name server
# does not answer, each time for the 5 seconds that are the default
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# what is computed is small: a second thread takes longer to wake than it saves; one of torchrun's
# ranks that waits for another leaves its core to those that have work
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_fsdp_qlora.py"
SEVERAL = ROOT / "tests" / "ranks_runner.py"
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":  # where bitsandbytes would compile its dequantization: 2 s for each odd shape
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# gate, up and down hold 320 x 128 / 64 = 640 blocks, which 3 ranks cannot share evenly. For what 2
# and 4 cannot share either, and blocks that straddle rows: intermediate_size=191, hidden_size=64
# (not with bitsandbytes' own CPU inference, which wants rows of whole blocks)
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
}


@pytest.fixture(scope="session")
def demo_directory(tmp_path_factory):
    """The script's own demo: model/ with a tokenizer, and data.jsonl."""
    from fsdp_qlora.run.demo import write_demo

    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory, demo_directory):
    """Function (kind, **sizes): the directory of a tiny bf16 model with the demo's tokenizer.

    kind is "llama", "mistral" or "qwen2" (attention biases, embedding and head tied); other sizes
    than SIZES by name, and max_shard_size="100KB" for several files with an index. Each is made
    once a session: copy the directory before changing it.
    """
    import torch
    import transformers

    made = {}

    def make(kind, max_shard_size="1GB", **sizes):
        key = (kind, max_shard_size, tuple(sorted(sizes.items())))
        if key not in made:
            tokenizer = transformers.AutoTokenizer.from_pretrained(demo_directory / "model")
            config_class = {
                "llama": transformers.LlamaConfig,
                "mistral": transformers.MistralConfig,
                "qwen2": transformers.Qwen2Config,
            }[kind]
            config = config_class(
                vocab_size=len(tokenizer),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                tie_word_embeddings=kind == "qwen2",
                **{**SIZES, **sizes},
            )
            torch.manual_seed(1)
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            for name, p in model.named_parameters():  # transformers starts biases at 0
                if name.endswith("bias"):
                    p.data.normal_(0, 0.06)
            directory = tmp_path_factory.mktemp(f"{kind}-") / "model"
            model.save_pretrained(directory, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(directory)
            made[key] = directory
        return made[key]

    return make


def pytest_xdist_auto_num_workers():
    """Two of pytest-xdist's processes, which `make test` asks for; on GPUs one, as memory is short
    there."""
    return 1 if torch.cuda.is_available() else 2


# The longest first, so that two processes end together; xdist would go by the number of tests.
LONG = """nothing_lost layer minimal preferences experts evaluation merge package memory numbers
    context bad_input plan_for loading layouts merge_experts nodes step trainable_tokens
    live_memory files readme dora prompts tokenizers models released per_layer packing forms
    init_adapter dry_run cache multimodal optimizer""".split()


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


gc.disable()  # it would look again and again through all that is imported, a fifth of the time


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


SPARES, SERVERS = [], []  # what the first Launch and the Forks become of


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session):
    """Before the first test; of pytest-xdist's processes, in those that run tests."""
    wanted = {name for item in session.items for name in item.fixturenames}
    if session.config.option.collectonly or not wanted & {"launch", "run_main", "forks"}:
        return
    import patching

    patching.check_each_model_once()
    if "launch" in wanted and DEVICE == "cpu":
        import ranks_runner
        from prefork import Spare

        SPARES.append(Spare(ranks_runner.main))
    if "forks" in wanted and DEVICE == "cpu":
        from fork_server import Forks

        SERVERS.append(Forks([spare.end for spare in SPARES]))


def selected_params(request):
    """The parameters of this file's selected tests, for a fixture that makes their runs alone."""
    return [item.callspec.params for item in request.session.items
            if item.path == request.path and hasattr(item, "callspec")]  # fmt: skip


def selected_tests(request):
    """The names of this file's selected tests."""
    return {item.originalname for item in request.session.items if item.path == request.path}


def needs_ranks(nproc):
    """On a machine with GPUs each rank needs its own."""
    if 0 < torch.cuda.device_count() < nproc:
        pytest.skip(f"{nproc} ranks on {torch.cuda.device_count()} GPUs")


def needs_model_type(name):
    """The oldest transformers that is allowed lacks some."""
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {name}")


@contextlib.contextmanager
def one_process():
    """What prepare_rows and others that speak to all ranks need, here."""
    dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_rows(path, n=64):
    """n rows whose lengths and trained parts differ by a factor of up to twenty."""
    draw = random.Random(3)
    words = "what is the answer to this plus minus times 1 2 3 4 5 6 7 8 9".split()
    with open(path, "w") as file:
        for _ in range(n):
            text = [" ".join(draw.choices(words, k=draw.randint(1, 20))) for _ in range(2)]
            file.write(json.dumps({"prompt": text[0], "completion": text[1]}) + "\n")


def segments_of(lengths, dropout_seeds=None):
    """The Segments of documents of these lengths."""
    from fsdp_qlora.micro_batch.segments import document_segments

    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return document_segments(bounds, lengths, max(lengths), dropout_seeds)


def read_rows(path, tokenizer, max_seq_len=64):
    """The rows of a file that are trained on, as the script's (input_ids, labels), int64."""
    found = encode_file(path, tokenizer, max_seq_len)
    return [tuple(torch.as_tensor(row[key], dtype=torch.int64) for key in ("input_ids", "labels"))
            for row in found if row["kept"]]  # fmt: skip


def encode_file(path, tokenizer, max_seq_len=64):
    """What the script's table holds of each document of a file's rows."""
    from fsdp_qlora.data.encode_examples import encode_fragments
    from fsdp_qlora.data.sources import find_fragments

    pieces, _ = find_fragments(str(path))
    return list(encode_fragments(pieces, tokenizer, max_seq_len, len(tokenizer)))


def ranks_command(nproc, directory):
    """What starts the ranks of ranks_runner.py."""
    if DEVICE == "cpu":
        return [sys.executable, SEVERAL, directory, str(nproc)]
    # bitsandbytes asks the driver when it is imported, and that does not survive a fork
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    return [sys.executable, *torchrun, SEVERAL, directory]


def run_once(nproc, job, directory, env=None):
    """CompletedProcess of a launch of ranks_runner.py for one job, which may end its ranks."""
    (directory / "0.json").write_text(json.dumps([job]))
    return subprocess.run(
        ranks_command(nproc, directory), cwd=directory, env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


class Launch:
    """The ranks of ranks_runner.py, which wait for jobs until they are ended."""

    def __init__(self, directory):
        self.directory, self.n_lists = directory, 0
        self.ranks = min(4, torch.cuda.device_count() or 4)
        self.wakes = []
        for rank in range(self.ranks):
            os.mkfifo(directory / f"wake.{rank}")
            self.wakes.append(os.open(directory / f"wake.{rank}", os.O_RDWR))  # waits for no reader
        paths = [directory / name for name in ("stdout", "stderr")]
        with paths[0].open("w") as out, paths[1].open("w") as err:
            if SPARES:
                argv = SEVERAL, directory, self.ranks
                self.process = SPARES.pop().start(argv, *paths)
            else:
                self.process = subprocess.Popen(
                    ranks_command(self.ranks, directory),
                    stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                    env={**os.environ, "PYTHONFAULTHANDLER": "1"},
                )  # fmt: skip
        self.output = [path.open() for path in paths]

    def run(self, nproc, jobs, timeout):
        """The exit codes of each of `nproc` ranks, or None where a rank ended or none came in time;
        and what was written to stdout and stderr meanwhile."""
        path = self.directory / f"{self.n_lists}.json"
        self.n_lists += 1
        path.write_text(json.dumps([{"nproc": nproc, **job} for job in jobs]))
        for wake in self.wakes:
            os.write(wake, b".")
        results = [path.with_suffix(f".{rank}") for rank in range(self.ranks)]
        until = time.monotonic() + timeout
        while not (done := all(result.exists() for result in results)):
            if self.process.poll() is not None or time.monotonic() > until:
                break
            time.sleep(0.02)
        codes = [json.loads(result.read_text()) for result in results[:nproc]] if done else None
        if codes is None or DEVICE == "cuda":  # where it would keep what was compiled
            self.end()
        return codes, *(file.read() for file in self.output)

    def end(self):
        while self.wakes:
            os.close(self.wakes.pop())
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # it then ends its ranks
            self.process.wait()


@pytest.fixture(scope="session")
def launch(tmp_path_factory):
    """Function (): the Launch, one for the whole session unless it has ended."""
    started = []

    def launch():
        if not started or started[-1].process.poll() is not None:
            started.append(Launch(tmp_path_factory.mktemp("launch")))
        return started[-1]

    yield launch
    for one in started:
        one.end()


@contextlib.contextmanager
def small_disk(directory, size):
    """In the `with` body `directory` is a disk of its own with so much room: "3m"."""
    directory.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def do_here(jobs, cwd):
    """The same in this process, which is one rank as well as any; a case leaves nothing behind."""
    import patching
    from ranks_runner import do

    out, err, before, names = io.StringIO(), io.StringIO(), Path.cwd(), patching.snapshot()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            codes = [do({"cwd": str(cwd), **job}, 0) for job in jobs]
    finally:
        os.chdir(before)
        patching.restore(names)
        if torch.distributed.is_initialized():  # an exception that main() knows nothing of
            torch.distributed.destroy_process_group()
    return codes, out.getvalue(), err.getvalue()


@pytest.fixture(scope="session")
def run_jobs(launch):
    """Function (nproc, jobs, cwd, code=0): has torchrun's `nproc` ranks do these jobs of
    ranks_runner.py there, each of which must end with that exit code on all ranks; (stdout,
    stderr)."""

    def run(nproc, jobs, cwd, code=0, timeout=300):
        needs_ranks(nproc)
        jobs = list(jobs)
        if nproc == 1 and not any("script" in job for job in jobs):
            codes, out, err = do_here(jobs, cwd)
            assert codes == [code] * len(jobs), err
            return out, err
        codes, out, err = launch().run(nproc, [{"cwd": str(cwd), **job} for job in jobs], timeout)
        assert codes == [[code] * len(jobs)] * nproc, err
        return out, err

    return run


@pytest.fixture(scope="session")
def run_training():
    """Function (args, nproc=None, cwd=None, env=None, timeout=120, script=SCRIPT): runs the script,
    or another, by torchrun on nproc processes, or with nproc=None by plain python; returns
    CompletedProcess.

    A run that hangs raises TimeoutExpired.
    """

    def run(args, nproc=None, cwd=None, env=None, timeout=120, script=SCRIPT):
        command = [sys.executable]
        if nproc is not None:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
        command += [str(script), *map(str, args)]
        return subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    return run


@pytest.fixture(scope="session")
def read_metrics():
    """Function (output_dir): the rows of its metrics.jsonl, as dicts."""

    def read(output_dir):
        return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").open()]

    return read


@pytest.fixture
def run_main(capsys):
    """Function (*args, draws=False): the script's main() in this process; (exit code, stdout,
    stderr). Without `draws` it does all but loss.png, which takes as long as a few steps."""
    import torch.distributed as dist

    import train_fsdp_qlora

    def run(*args, draws=False):
        capsys.readouterr()
        draw_losses = train_fsdp_qlora.draw_losses
        if not draws:
            train_fsdp_qlora.draw_losses = lambda directory: None
        try:
            code = train_fsdp_qlora.main([str(arg) for arg in args])
        except SystemExit as e:
            code = e.code
        finally:
            train_fsdp_qlora.draw_losses = draw_losses
            if dist.is_initialized():  # an exception that main() knows nothing of
                dist.destroy_process_group()
        return (code, *capsys.readouterr())

    return run
