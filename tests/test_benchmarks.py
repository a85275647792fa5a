"""benchmarks/run.py: its arithmetic, its cases' flags, and tiny cases as it runs the real ones."""

import doctest
import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, encode_file, needs_model_type, one_process
from patching import parse_config

from fsdp_qlora.data.load_tokenizer import load_tokenizer
from fsdp_qlora.layer import layer
from fsdp_qlora.pretrained.model_directory import find_model, read_model_config
from fsdp_qlora.run.resolve import resolve_config, resolve_max_seq_len

sys.path.insert(0, str(ROOT / "benchmarks"))  # as where run.py is started
spec = importlib.util.spec_from_file_location("benchmark", ROOT / "benchmarks" / "run.py")
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)

FLASH_BACKWARD = (
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8, 4,"
    " 2, 2, false, false, cutlass::bfloat16_t> >(Flash_bwd_params)"
)


def test_examples():
    assert doctest.testmod(bench).attempted == 4
    assert doctest.testmod(bench).failed == 0


def test_covered_counts_every_point_once():
    draw = random.Random(0)
    for _ in range(50):
        starts = [draw.randrange(40) for _ in range(draw.randrange(12))]
        spans = [(start, start + draw.randrange(9)) for start in starts]
        points = {point for start, end in spans for point in range(start, end)}
        assert bench.covered(spans) == len(points)


def test_breakdown_of_two_streams():
    """Computation 0-3 and 5-9, NCCL 2-6 and 10-12, a copy inside NCCL; 20 in all."""
    times = bench.breakdown(
        [
            ("nvjet_tst_128x256", 0, 2),
            ("triton_poi_fused_mm_0", 2, 3),
            ("flash_fwd_kernel", 5, 9),
            ("ncclDevKernel_AllGather_RING_LL", 2, 6),
            ("ncclDevKernel_ReduceScatter", 10, 12),
            ("Memcpy DtoH (Device -> Pinned)", 10, 11),
        ],
        20,
    )
    assert times["NCCL"] == (6, 4)
    assert times["memcpy"] == (1, 1)
    assert times["GEMM"] == (2, None)
    assert times["attention"] == (4, None)
    assert times["idle"] == (20 - 11, None)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("GEMM", "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NNT"),
        ("GEMM", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas"),
        ("GEMM", "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>(Params)"),
        ("GEMM", "void cublasLt::splitKreduce_kernel<32, 16, int, float>(float)"),
        ("attention", FLASH_BACKWARD),
        ("attention", "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_32"),
        ("attention", "void cudnn::fusion::compute_dot_do_o_specialized<true>(float)"),
        ("dequantize", "dequantize_kernel"),
        ("dequantize", "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*)"),
        ("NCCL", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"),
        ("memcpy", "Memset (Device)"),
        ("elementwise, other", "triton_poi_fused__flash_attention_gemm_0"),
        ("elementwise, other", "void at::native::vectorized_elementwise_kernel<4>(int)"),
    ],
)
def test_kernels_are_told_by_name(kind, name):
    assert bench.kind_of(name) == kind


def parsed(name, directory):
    """The script's Config and Architecture of a case."""
    chosen = bench.CASES[name]
    gpus = chosen["gpus"] or 4
    words = bench.script_flags(chosen, gpus, directory)
    config = resolve_config(parse_config(words), gpus)
    model_config, arch = read_model_config(find_model(config.model, "config"), config)
    return chosen, resolve_max_seq_len(config, model_config, arch), arch


@pytest.mark.parametrize("name", [name for name, c in bench.CASES.items() if not c["minimal"]])
def test_flags_are_the_scripts(name, tmp_path):
    if name.startswith("lfm3"):
        needs_model_type("lfm3")
    chosen, config, arch = parsed(name, tmp_path)
    hidden, inner, layers, heads, kv_heads, vocab = bench.BUILTIN_CONFIGS[chosen["model"]]
    assert (arch.n_layers, arch.hidden_size, arch.down[0].in_features, arch.n_heads,
            arch.n_kv_heads, arch.vocab_size) == (chosen["layers"] or layers, hidden, inner, heads,
                                                  kv_heads, vocab)  # fmt: skip
    gpus = chosen["gpus"] or 4
    assert config.batch_size == chosen["rows"] * gpus
    tokens = (
        chosen["rows"] * chosen["seq"] if chosen["at_once"] is None else chosen["at_once"] or None
    )
    assert config.micro_batch_tokens == tokens
    assert (config.dataset is None) == (not chosen["chat"])


@pytest.mark.slow
@pytest.mark.parametrize("name, words", [("fp32", "found in 0 layers"), (None, None)])
def test_minimal_is_measured(name, words, tmp_path, monkeypatch):
    """On random weights, offloaded: its steps as a row, and the words that FSDP2 changes."""
    monkeypatch.setitem(bench.BUILTIN_CONFIGS, "demo", (256, 512, 4, 4, 2, 384))
    flags = "--offload" + (f" --words {name}" if name else "")
    case = bench.case("tiny", "demo", 3, 64, 2, flags, layers=1, gpus=1, chat=True, minimal=True)
    (row,) = bench.run_cases("minimal", [case], 0, tmp_path, 100)
    assert row["result"] == "ok", row["error"]
    log = (tmp_path / "tiny.log").read_text()
    printed = re.findall(r"^step +\d/2 \| loss +(\S+) .* (\S+) tok/s", log, re.M)
    assert [step["loss"] for step in row["steps"]] == [float(loss) for loss, _ in printed]
    assert row["tokens_per_second"] == float(printed[1][1].replace(",", ""))
    assert words in log if words else "words: " not in log


def test_chat_rows_have_the_lengths_asked_for(tmp_path):
    _, config, _ = parsed("8b-chat", tmp_path)
    tokenizer = load_tokenizer(tmp_path / "llama-3-8b-None", config)
    rows = encode_file(config.dataset[0], tokenizer, config.max_seq_len)
    assert [row["length"] for row in rows] == bench.chat_lengths(len(rows), 2048)
    assert len(rows) == config.max_steps * config.batch_size == 12 * 64
    assert all(row["kept"] and not row["truncated"] for row in rows)
    lengths = sorted(row["length"] for row in rows)
    assert lengths[0] == 16 and lengths[-1] == 2048
    assert abs(lengths[len(lengths) // 2] - 200) < 20  # the median


def test_names_and_bases_exist():
    """Each case has a log of its own, and what its ratio is to is measured in the same group."""
    names = [c["name"] for g in bench.GROUPS if g != "profile" for c in bench.GROUPS[g]]
    assert len(names) == len(bench.CASES) + 2 and set(names) == set(bench.CASES)  # two are in both
    for group in bench.GROUPS:
        names = {case["name"] for case in bench.GROUPS[group]}
        if group not in ("speed", "profile"):
            bases = {case["base"] for case in bench.GROUPS[group]} - {None}
            assert {base for base in bases if not base.startswith("trl-")} <= names


@pytest.mark.parametrize(
    "model, parameters, vocab, hidden, layers, layer",
    [  # of the whole published model, and of a layer's linears
        ("llama-2-70b", 68_976_648_192, 32000, 8192, 80, 855_638_016),
        ("llama-3-70b", 70_553_706_496, 128256, 8192, 80, 855_638_016),
        ("llama-3-8b", 8_030_261_248, 128256, 4096, 32, 218_103_808),
        ("llama-3.2-1b", 1_235_814_400, 128256, 2048, 16, 60_817_408),
        ("smollm2-135m", 134_515_008, 49152, 576, 30, 3_538_944),
        ("mistral-nemo-12b", 12_247_782_400, 131072, 5120, 40, 272_629_760),
    ],
)
def test_shapes_are_the_published_ones(model, parameters, vocab, hidden, layers, layer):
    whole = bench.case("x", model, 2, 2048, 1)
    linear = parameters - (2 * layers + 1) * hidden  # the norms
    linear -= vocab * hidden * (model not in bench.TIED)  # the embedding
    assert bench.tflops(whole, 1000) == pytest.approx(6 * linear / 1e9)
    part = bench.tflops({**whole, "layers": 8}, 1000)
    assert bench.tflops(whole, 1000) - part == pytest.approx(6 * (layers - 8) * layer / 1e9)


def test_output_is_read():
    text = (
        "predicted peak 99.00 GiB\npredicted peak 21.00 GiB of 22.50\nstep 1\r 50%| | 1/2"
        "\nmeasured: 1,259.5 tok/s/GPU, 520 TFLOP/s, 71.4 % of the GEMM ceiling, peak 20.00"
        " GiB; predicted 1,300 tok/s/GPU\n\nreached after 3.2 s: plan: \nreached after 21.5 s: step"
        " +1/\n"
    )
    row = bench.measurements(text, [])
    assert (row["predicted_gib"], row["peak_gib"]) == (21, 20)
    assert row["first_step_seconds"] == 21.5
    assert row["script_percent"] == 71.4
    assert row["off_percent"] == pytest.approx(5)
    nothing = bench.measurements("", [])
    assert not any(nothing.values())


@pytest.mark.parametrize(
    "result, code, text, steps",
    [
        ("ok", 0, "all well", [1]),
        ("time limit", None, "", []),
        ("refused", 1, "x\nerror: --lora_rank 0\n", []),
        ("exit code 1", 1, "50%|# | 1/2 [00:01]error: step 2: loss nan\n", [1]),
        ("exit code 1", 1, "Traceback\n[rank0]: RuntimeError: CUDA error: launch failed\n", []),
        ("out of memory", 1, "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried\n", [1]),
        ("out of memory", 1, "error: rank 1 on node-a ran out of memory at step 3, peak\n", [1]),
        ("out of memory", 1, "error: OutOfMemoryError: CUDA out of memory. Tried\n", []),
        ("out of memory", 1, "DistBackendError: NCCL: Cuda failure 2 'out of memory'\n", []),
    ],
)
def test_outcomes(result, code, text, steps):
    row = bench.outcome(code, text, steps)
    assert row["result"] == result
    assert bool(row["error"]) == (code not in (0, None))


@pytest.mark.slow
def test_cases_run_and_a_bad_one_stops_none(tmp_path, monkeypatch):
    monkeypatch.setitem(bench.BUILTIN_CONFIGS, "demo", (256, 512, 4, 4, 2, 384))
    cases = [
        bench.case("bad", "demo", 2, 64, 1, "--lora_rank 0", gpus=1, layers=1),
        bench.case("good", "demo", 2, 64, 4, bench.SHARED, layers=1, base="bad", graphs=False),
    ]
    rows = bench.run_cases("memory", cases, 0, tmp_path, 100)
    assert [row["result"] for row in rows] == ["refused", "ok"], rows
    bad, good = rows
    assert "lora_rank" in bad["error"] and bad["first_step_seconds"] is None
    speeds = [step["tokens_per_second_per_gpu"] for step in good["steps"]]
    assert good["tokens_per_second"] == pytest.approx(sum(speeds[2:]) / 2)
    assert good["peak_gib"] > 0.1 and good["packing_efficiency"] == 1
    assert 4 < good["last_loss"] != good["first_loss"] < 8
    assert 0 < good["first_step_seconds"] < good["seconds"]
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["case"] for line in lines] == ["bad", "good"]
    table = (tmp_path / "memory.md").read_text()
    assert table.startswith("CPU, 2 processes, gloo; torch ")
    cells = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    assert [row[1].strip() for row in cells] == ["case", "bad", "good"]
    assert f"{good['tokens_per_second']:,.0f}" in cells[2][4]


def test_peers_do_the_work_of_cases_in_their_layout():
    """Cases that differ in the script's flags alone share a peer's run."""
    layouts = {name: bench.layout(c, c["gpus"] or 4) for name, c in bench.CASES.items()}
    of_nemo = [layouts[f"nemo{name}"] for name in ("", "-all", "-shared", "-1gpu", "-1gpu-offload")]
    assert of_nemo == ["copies", "copies", "sharded", "one GPU", "one GPU"]
    work = {name: bench.peer_work(c, c["gpus"] or 4) for name, c in bench.CASES.items()}
    assert work["nemo-1gpu-all"] == work["nemo-1gpu-offload"]
    names = "nemo", "nemo-all", "nemo-shared", "nemo-shared-none", "nemo-1gpu", "nemo-1gpu-all"
    assert len({json.dumps(work[name]) for name in names}) == len(names)
    assert not work["nemo"]["recompute"] and work["nemo-all"]["recompute"]
    assert work["8b16-flash"]["attn"] == "flash_attention_2" and work["nemo"]["attn"] == "sdpa"
    fit = {kind: [n for n, (kinds, _) in bench.PEERS.items() if kind in kinds]
           for kind in ("one GPU", "copies", "sharded")}  # fmt: skip
    trl = ["trl-ddp", "trl-ddp-liger"]
    assert fit == {"one GPU": [*trl, "unsloth", "unsloth-sdpa"],
                   "copies": [*trl, "unsloth-fsdp2"],
                   "sharded": ["trl-fsdp", "trl-fsdp-liger", "unsloth-fsdp2"]}  # fmt: skip


def test_ratio_is_to_the_fastest_peer():
    speeds = {"ours": 300.0, "a": 100.0, "b": 200.0, "failed": None}
    rows = [{"case": name, "tokens_per_second": speed, "base": None, "error": ""}
            for name, speed in speeds.items()]  # fmt: skip
    rows[0]["base"], rows[3]["error"] = ["a", "b", "failed"], "RuntimeError: no"
    text = bench.table(rows)
    assert text.splitlines()[2].endswith("| 1.500 | b |")
    assert text.endswith("failed: RuntimeError: no\n")
    rows[0]["base"] = ["failed"]
    assert bench.table(rows).splitlines()[2].endswith("|  | failed |")


@pytest.mark.parametrize("words", [["speed", "--peers", "axolotl"], ["scale", "--peers", "all"]])
def test_unknown_peers_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        bench.main(words)
    assert "gemma4, minimal, long have trl-ddp, trl-ddp-liger" in capsys.readouterr().err


@pytest.mark.slow
def test_peer_that_fails_is_a_row(tmp_path, monkeypatch):
    """Its weights are whole, and Unsloth is not among what is installed for the tests."""
    monkeypatch.setitem(bench.BUILTIN_CONFIGS, "demo", (256, 512, 4, 4, 2, 384))
    case = bench.case("tiny", "demo", 2, 64, 4, bench.NONE, layers=1, gpus=1)
    rows = bench.run_cases("speed", [case], 0, tmp_path, 100, None, ["unsloth"], tmp_path)
    assert [(row["case"], row["result"]) for row in rows] == [
        ("unsloth-tiny", "exit code 1"), ("tiny", "ok")]  # fmt: skip
    assert rows[0]["error"] == "ModuleNotFoundError: No module named 'unsloth'"
    assert rows[1]["base"] == ["unsloth-tiny"]


@pytest.mark.slow
def test_trl_runs_with_ddp(tmp_path, monkeypatch):
    """It is not among what is installed for the tests. Before 1.16 its loss runs on GPUs only."""
    pytest.importorskip("trl", minversion="1.16")
    monkeypatch.setitem(bench.BUILTIN_CONFIGS, "demo", (256, 512, 4, 4, 2, 384))
    case = bench.case("tiny", "demo", 2, 64, 4, bench.ALL, layers=1)
    row = bench.run_beside("trl-ddp", case, 2, tmp_path, tmp_path, 200, tmp_path)
    assert row["result"] == "ok", (tmp_path / "trl-ddp-tiny.log").read_text()
    assert len(row["steps"]) == 4 and 5 < row["first_loss"] < 7 and 5 < row["last_loss"] < 7
    speeds = [2 * 64 / step["seconds"] for step in row["steps"][2:]]
    assert row["tokens_per_second"] == pytest.approx(sum(speeds) / 2)


def test_compile_cache_is_emptied_for_a_cold_start(tmp_path):
    cold, warm = (bench.case("x", "demo", 2, 64, 1, cache=cache) for cache in ("cold", "warm"))
    for directory in map(Path, bench.cache_of(cold, tmp_path).values()):
        directory.mkdir(parents=True)
    kept = bench.cache_of(warm, tmp_path)
    assert kept.keys() == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    assert all(Path(directory).is_dir() for directory in kept.values())
    assert bench.cache_of(cold, tmp_path) == kept
    assert not any(Path(directory).exists() for directory in kept.values())
    assert bench.cache_of(bench.case("x", "demo", 2, 64, 1), tmp_path) == {}


def test_warm_start_alone_is_made_warm_first(tmp_path, monkeypatch):
    runs = []

    def launch(*args, **env):
        runs.append(env)
        for directory in env.values():
            Path(directory).mkdir(parents=True, exist_ok=True)
        return 0, 1.0, "\nreached after 2.5 s: data: \nreached after 9.0 s: step +1/\n"

    monkeypatch.setattr(bench, "launch", launch)
    for n_runs in 2, 3:  # then it is
        row = bench.run_case(bench.CASES["8b-warm"], 1, tmp_path, tmp_path, 9)
        assert len(runs) == n_runs and all(env == runs[0] != {} for env in runs)
    assert "8b-warm, seconds until: data 2.5, step 9.0" in bench.table([row])


PEER = """
import argparse, json
from datasets import Dataset
from trl import SFTConfig

rows = [[5, 6, 7] * 40] * 4
data, settings = Dataset.from_dict({"input_ids": rows}), SFTConfig(packing=False, seq=40)
print(json.dumps([data, settings, Dataset.from_dict({"input_ids": rows})]))
"""


def test_peer_is_given_chat_rows_to_pack(tmp_path):
    """By stand-ins for datasets and TRL, which is not among what is installed for the tests."""
    (tmp_path / "peer.py").write_text(PEER)
    (tmp_path / "trl.py").write_text("SFTConfig = dict\n")
    (tmp_path / "datasets.py").write_text(
        "class Dataset:\n    from_dict = staticmethod(lambda columns: columns)\n"
    )
    log = tmp_path / "log"
    program = [bench.__file__, "packed", tmp_path / "peer.py", "--seq", "100"]
    code, _, text = bench.launch(1, program, log, 60, PYTHONPATH=str(tmp_path))
    assert code == 0 and "torch.distributed.run" not in text, text
    chat, settings, own = json.loads(text.splitlines()[1])
    lengths = [len(row) for row in chat["input_ids"]]
    assert lengths == bench.chat_lengths(32, 100) and {5, 6, 7} == set(chat["input_ids"][0])
    assert settings == {"packing": True, "seq": 40}
    assert own["input_ids"] == [[5, 6, 7] * 40] * 4


def test_plain_curve_is_the_scripts(run_main, tmp_path, monkeypatch, read_metrics):
    """What benchmarks/curves.py compares with, which also passes the check at start."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import curves

    flags = ["--max_steps", 3, "--compute_dtype", "float32", "--batch_size", 4]
    for name in "ours", "plain":
        code, _, err = run_main(*flags, "--output_dir", tmp_path / name)
        assert code == 0, err
        monkeypatch.setattr(layer.DecoderLayer, "forward", curves.plain_layer)
    ours, plain = ([row["loss"] for row in read_metrics(tmp_path / n)] for n in ("ours", "plain"))
    assert plain == pytest.approx(ours, rel=1e-5) and plain != ours


@pytest.mark.slow
def test_profile_of_chat_rows_runs(tmp_path, monkeypatch):
    """On a CPU there are no kernels, so that all of a step is idle."""
    monkeypatch.setitem(bench.BUILTIN_CONFIGS, "demo", (256, 512, 4, 4, 2, 384))
    case = bench.case(
        "tiny", "demo", 8, 64, 1, layers=1, gpus=1, at_once=0, chat=True, cache="cold"
    )
    (row,) = bench.run_cases("profile", [case], 0, tmp_path, 100)
    assert row["result"] == "ok", (tmp_path / "tiny.profile.log").read_text()
    n_steps, tokens = bench.WARM_STEPS + bench.PROFILED_STEPS, [s["tokens"] for s in row["steps"]]
    assert len(tokens) == n_steps and len(set(tokens)) > 1
    assert sum(tokens) == sum(bench.chat_lengths(8 * n_steps, 64))
    text = (tmp_path / "tiny.profile.md").read_text()
    idle, wall = text.partition("| idle | ")[2].split(" ")[0], text.split(" ")[0]
    assert float(idle) == float(wall) > 0
    assert (tmp_path / "tiny.trace.json.gz").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True])
def test_table_of_what_fits_is_that_of_the_plan(others, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import fits

    page = (ROOT / "docs" / "memory.md").read_text().splitlines()
    models = {short: name for short, name in fits.MODELS.items()
              if others != (short == "8B")}  # fmt: skip
    with one_process():
        rows = list(fits.table(models))
    assert len(rows) == 4 * len(models) > 0 and [row for row in rows if row not in page] == []
