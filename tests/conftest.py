"""What the tests share: tiny models on disk, and the real command line.

Nothing here is a stand-in: the models are real ones with random weights, the runs are the script
started by torchrun. To see a test fail, copy the script and tests/ to another folder, break the
script there and run pytest there: everything is found from where this file lies.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

# before any Hugging Face library is imported, here and in every child process
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "train_fsdp_qlora.py"
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402

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
    import train_fsdp_qlora

    directory = tmp_path_factory.mktemp("demo")
    train_fsdp_qlora.write_demo(directory)
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


@pytest.fixture(scope="session")
def run_training():
    """Function (args, nproc=None, cwd=None, env=None, timeout=120, script=SCRIPT): runs the script
    by torchrun on nproc processes, or with nproc=None by plain python; returns CompletedProcess.

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
    """Function (*args): the script's main() in this process; (exit code, stdout, stderr)."""
    import torch.distributed as dist

    import train_fsdp_qlora

    def run(*args):
        capsys.readouterr()
        try:
            code = train_fsdp_qlora.main([str(arg) for arg in args])
        except SystemExit as e:
            code = e.code
        finally:
            if dist.is_initialized():  # an exception that main() knows nothing of
                dist.destroy_process_group()
        return (code, *capsys.readouterr())

    return run
