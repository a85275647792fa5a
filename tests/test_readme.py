"""The commands, flags, error texts, metrics and files of README.md and docs/ are the real ones; so
are the names of tests in tests/README.md."""

import ast
import dataclasses
import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import transformers
from conftest import do_here
from packaging.version import Version
from patching import parse_config
from rows import CHATML, chat_tokenizer
from torch.distributed.run import get_args_parser
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

import merge_adapters
from fsdp_qlora import exit_codes
from fsdp_qlora.config import Config
from fsdp_qlora.data.encode_examples import try_example
from fsdp_qlora.data.example_formats import (
    EXAMPLE_FORMATS, OPTIONAL_KEYS, REFUSED_KEYS, SYNONYMS, TRAIN_KEYS)
from fsdp_qlora.data.preferences import LABEL_KEYS, PAIR_KEYS
from fsdp_qlora.layer.router import BALANCE_METRICS
from fsdp_qlora.model.preference_loss import LOSSES, METRICS
from fsdp_qlora.pretrained import family_specs
from fsdp_qlora.pretrained.families import FAMILIES, MULTIMODAL
from fsdp_qlora.pretrained.from_config import check_model
from fsdp_qlora.run.resolve import resolve_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
TEXT = "\n".join(PAGES.values())
MAKEFILE = (ROOT / "Makefile").read_text()
FENCED = r"^```(\w+)\n(.*?)^```"
BLOCKS = re.findall(FENCED, TEXT, re.M | re.S)
INLINE = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.M | re.S))
COMMANDS = [
    line
    for language, text in BLOCKS
    if language == "bash"
    for line in text.replace("\\\n", " ").splitlines()
] + INLINE


def arguments_after(file, commands=COMMANDS):
    """The words after `file` in each command that runs it."""
    runs = re.compile(rf"(torchrun|python) .*?{re.escape(file)}(.*)")
    return [shlex.split(m[2]) for m in map(runs.fullmatch, commands) if m]


def tables(heading):
    """The tables of all pages that begin with this heading, one at least, each as its rows."""
    found = [text.partition("\n\n")[0] for page in PAGES.values()
             for text in f"\n{page}".split(f"\n{heading}")[1:]]  # fmt: skip
    assert found, heading
    return found


def first_cells(heading):
    """What the first cells of the only table with this heading have in backquotes, in order."""
    (table,) = tables(heading)
    return re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))


TRAINING = [(c, *arguments_after("train_fsdp_qlora.py", [c])) for c in COMMANDS]


def test_pages_are_readable():
    pages = ("data.md", "running.md", "serving.md", "memory.md", "models.md", "internals.md",
             "long_sequences.md")  # fmt: skip
    assert PAGES.keys() == {"README.md", *pages}
    for name in PAGES:
        assert [line for line in PAGES[name].splitlines() if len(line) > 220] == [], name
        assert name == "README.md" or f"(docs/{name}" in PAGES["README.md"], name
        # hashes of commits belong into RESULTS.md
        assert not re.search(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7}\b", PAGES[name]), name


def anchors(page):
    """What GitHub calls the headings of a page."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.*)$", prose, re.M):
        yield re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    folder = ROOT if name == "README.md" else ROOT / "docs"
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        file, _, anchor = link.partition("#")
        path = folder / file if file else folder / name
        assert file.startswith("https://") or path.exists(), link
        assert not anchor or anchor in anchors(path.read_text()), link


@pytest.mark.parametrize("command,argv", [pair for pair in TRAINING if len(pair) == 2])
def test_training_commands_parse(command, argv):
    if argv == ["--help"]:
        with pytest.raises(SystemExit) as e:
            parse_config(argv)
        assert e.value.code == 0
    else:
        counts = re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", command)
        resolve_config(parse_config(argv), math.prod(map(int, counts)))


def test_slurm_job_is_begun_again_unless_complete_or_failed(tmp_path):
    """The job script as it is, with stand-ins for Slurm's commands that say what they are given."""
    (job,) = [text for _, text in BLOCKS if "#SBATCH" in text]  # one, in docs/running.md
    (tmp_path / "job").write_text(job.replace("/shared/", f"{tmp_path}/"))
    for name in "srun", "scontrol":
        (tmp_path / name).write_text(f'#!/bin/sh\nprintf "%s\\n" {name} "$@"\n')
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}",
           "SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}  # fmt: skip
    run = tmp_path / "runs" / "llama"
    run.mkdir(parents=True)
    for state, restarts in (None, 0), ("complete", 0), ("failed", 0), ("stopped", 50), (
            "training", 1), ("stopped", 1):  # fmt: skip
        again = state in ("training", "stopped") and restarts < 50
        env["SLURM_RESTART_COUNT"] = str(restarts)
        if state:
            (run / "status.json").write_text(json.dumps({"state": state}, indent=2))
        done = subprocess.run(["bash", tmp_path / "job"], env=env, capture_output=True, text=True)
        assert not done.stderr or state is None
        words = done.stdout.splitlines()
        assert words[words.index("scontrol") :] == ["scontrol", "requeue", "7"] if again else (
            "scontrol" not in words)  # fmt: skip
    words = words[: words.index("scontrol")]
    at = words.index("train_fsdp_qlora.py")
    torchrun = get_args_parser().parse_args(words[words.index("torchrun") + 1 : at + 1])
    assert (torchrun.nnodes, torchrun.nproc_per_node, torchrun.rdzv_id) == ("2", "8", "7")
    config = resolve_config(parse_config(words[at + 1 :]), 16)
    assert config.resume == "auto" and config.shard_group_size == 8


def test_exit_codes_are_documented():
    (table,) = tables("| code | what happened |")
    cells = " ".join(re.findall(r"^\| ([\d, ]+) \|", table, re.M))
    assert {int(code) for code in re.findall(r"\d+", cells)} == {
        0, *exit_codes.EXITS.values(), exit_codes.EXIT_RESUMABLE, exit_codes.EXIT_STEP_TIMEOUT,
        exit_codes.EXIT_BUG, exit_codes.EXIT_DISK, exit_codes.EXIT_DIVERGED,
        exit_codes.EXIT_OUT_OF_MEMORY}  # fmt: skip


@pytest.fixture
def merge_flags(capsys):
    with pytest.raises(SystemExit, match="0"):
        merge_adapters.main(["--help"])
    return set(re.findall(r"--([a-z_-]+)", capsys.readouterr().out))


def test_flags_exist(merge_flags):
    fields = {f.name: f.type for f in dataclasses.fields(Config)}
    known = set(fields) | {f"no-{name}" for name, kind in fields.items() if "bool" in str(kind)}
    others = {"help", "config"}
    others |= {o.lstrip("-") for a in get_args_parser()._actions for o in a.option_strings}
    others |= {"logdir"}  # TensorBoard's
    others |= {"enable-lora", "lora-modules", "max-lora-rank"}  # vLLM's
    others |= {"nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "time",
               "requeue", "open-mode", "signal", "kill-on-bad-exit"}  # Slurm's  # fmt: skip
    used = set(re.findall(r"(?<![\w-])--([a-z][a-z_-]*)", TEXT))
    minimal = ROOT / "minimal_fsdp_qlora.py"
    others |= set(re.findall(r"\"--(\w+)", minimal.read_text() if minimal.exists() else ""))
    unknown = used - known - others
    assert not unknown or unknown <= merge_flags, unknown


def test_merge_commands_have_real_flags(merge_flags):
    commands = arguments_after("merge_adapters.py")
    assert commands
    used = {word[2:] for argv in commands for word in argv if word.startswith("--")}
    assert used <= merge_flags


def test_make_targets_and_variables_exist():
    targets = set(re.findall(r"^([a-z-]+):.*?## ", MAKEFILE, re.M))
    variables = set(re.findall(r"^([A-Z]+) \?=", MAKEFILE, re.M)) | {"CUDA_HOME"}
    commands = [shlex.split(c)[1:] for c in COMMANDS if c.startswith("make ")]
    assert commands
    for words in commands:
        assert words[0] in targets, words
        assert {word.partition("=")[0] for word in words[1:]} <= variables, words
    assert {word[:-1] for word in INLINE if re.fullmatch("[A-Z]+=", word)} <= variables


def test_make_passes_real_flags():
    """What `make train` does with the variables of README.md and docs/."""
    env = {"PATH": os.environ["PATH"]}  # not the variables of the make that may run the tests
    for command in (c for c in COMMANDS if c.startswith("make train")):
        make = ["make", "--dry-run", *shlex.split(command)[1:], "NPROC=2"]
        done = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
        argv = shlex.split(done.stdout.replace("\\\n", " ").partition("train_fsdp_qlora.py")[2])
        resolve_config(parse_config(argv), world_size=2)


def test_make_takes_several_files():
    make = ["make", "--dry-run", "train", "MODEL=m", "DATASET=a.jsonl some/b*.jsonl", "NPROC=1"]
    done = subprocess.run(make, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True,
                          text=True, check=True)  # fmt: skip
    argv = shlex.split(done.stdout.replace("\\\n", " ").partition("train_fsdp_qlora.py")[2])
    assert parse_config(argv).dataset == ("a.jsonl", "some/b*.jsonl")


def test_quick_tests_exist():
    """What `make test-fast` names: files, and words of tests that are left out."""
    make = ["make", "--dry-run", "test-fast"]
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    files = re.findall(r"tests/test_\w+\.py", done.stdout)
    tests = "".join((ROOT / file).read_text() for file in files)
    left_out = re.search(r"not \((.*?)\)", done.stdout)[1].split(" or ")
    assert len(files) > 5 and len(left_out) > 1
    assert all(re.search(rf"^def test_\w*{word}", tests, re.M) for word in left_out)


SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for path in (*ROOT.glob("*.py"), *sorted((ROOT / "fsdp_qlora").rglob("*.py")))
    if path.name != "__init__.py"
}


def defined(tree):
    """The functions, methods, classes and constants of a file."""
    kinds = ast.FunctionDef | ast.ClassDef
    assigned = ((node.targets if isinstance(node, ast.Assign) else [node.target])
                for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign))  # fmt: skip
    constants = (x for targets in assigned for x in targets if isinstance(x, ast.Name))
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)} | {
        constant.id for constant in constants}  # fmt: skip


def named(words):
    """Functions with their (), CamelCase and UPPER_CASE names."""
    shapes = (r"(\w+)\(\)|((?:[A-Z]\w*[a-z]\w*){2,}|[A-Z]+_[A-Z_]+|FAMILIES|QUESTIONS"
              r"|SCHEDULES|Config|Rows)")
    return {m[1] or m[2] for m in (re.fullmatch(shapes, word) for word in words) if m}


def test_named_functions_exist():
    names = named(INLINE)
    assert len(names) > 12
    missing = names - set().union(*map(defined, SOURCES.values()))
    assert missing <= {  # PEFT's and transformers'
        "merge_and_unload", "AutoTokenizer", "PreTrainedTokenizerFast", "AutoModelForCausalLM",
        "AutoModelForMultimodalLM"}


def test_what_people_change_is_where_the_pages_say():
    """In the tables of what to change each name is followed by the file that has it; README.md
    shortens fsdp_qlora/data/example_formats.py to data/example_formats.py."""
    all_tables = tables("| to change |")
    for table in all_tables:
        waiting, found = [], 0
        for word in re.findall(r"`([^`]+)`", table):
            if word.endswith(".py"):
                tree = SOURCES.get(word) or SOURCES[f"fsdp_qlora/{word}"]
                assert waiting and set(waiting) <= defined(tree), (waiting, word)
                found, waiting = found + len(waiting), []
            else:
                waiting += named([word])
        assert found >= 10 and not waiting
    for concern in ("data", "what is adapted", "loss", "optimizer", "schedule", "kernel", "family"):
        assert re.search(rf"^\|[^|]*\b{concern}\b", "\n".join(all_tables), re.M), concern


def test_names_in_drawings_exist():
    """The functions in the pictures of the paths of a weight, of a row and of a config."""
    blocks = re.findall(FENCED, PAGES["internals.md"], re.M | re.S)
    drawings = [text for language, text in blocks if language == "text" and "v\n" in text]
    names = set(re.findall(r"(\w+)\(\)", "".join(drawings)))
    assert len(drawings) == 3 and len(names) > 20
    assert names <= set().union(*map(defined, SOURCES.values()), {"read"})


def test_the_map_has_every_module_once():
    shown = [name for name in tree_names() if name.endswith(".py")]
    assert sorted(shown) == sorted(SOURCES)


def test_table_of_claims_names_tests_that_exist():
    text = (ROOT / "tests" / "README.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text)
    assert len(named) > 40
    for file, test in named:
        wanted = f"\ndef {test}(" if test else "\ndef test_"
        assert wanted in (ROOT / "tests" / file).read_text(), (file, test)
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert all("`test_" in row or row.startswith("| **") for row in rows)


def tree_names():
    """The files and folders of the last block of docs/internals.md, the map of the repository."""
    blocks = re.findall(FENCED, PAGES["internals.md"], re.M | re.S)
    tree = [text for language, text in blocks if language == "text"][-1]
    return [name for line in tree.splitlines() for name in line.split("  ")[0].split(", ")]


def error_patterns():
    """(regular expression, length of its fixed text) for each text and f-string of the scripts."""
    for tree in SOURCES.values():
        for node in ast.walk(tree):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            texts = [p.value if isinstance(p, ast.Constant) else None for p in parts]
            if all(isinstance(t, str | None) for t in texts):
                pattern = "".join(".+" if t is None else re.escape(t) for t in texts)
                yield re.compile(pattern), sum(len(t) for t in texts if t)


ERRORS = [word[len("error: ") :] for word in INLINE if word.startswith("error: ")]


@pytest.mark.parametrize("error", ERRORS)
def test_error_texts_are_the_scripts(error):
    assert any(p.search(error) and fixed >= 0.4 * len(error) for p, fixed in error_patterns())


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One step of the demo with an evaluation, as the pages show its log."""
    directory = tmp_path_factory.mktemp("demo")
    argv = ["--max_steps", "1", "--output_dir", "run", "--eval_dataset", "0.1",
            "--eval_samples", "1"]  # fmt: skip
    codes, out, err = do_here([{"argv": argv, "draws": True}], directory)
    assert codes == [0], err
    return directory / "run", out.splitlines()


def test_metrics_are_documented(demo):
    directory, _ = demo
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "loss" in row]
    evaluated = [list(row) for row in rows if "loss" not in row]
    assert len(evaluated) == 2
    assert {*evaluated[0]} == {*first_cells("| field of an evaluation |")}
    # these of mixtures alone
    assert [*row, *BALANCE_METRICS] == first_cells("| field of `metrics.jsonl` |")
    assert {*[*METRICS][1:], "rewards/margins"} == {*first_cells("| field of a preference loss |")}


def test_keys_that_end_a_run_or_leave_an_answer_out_are_all_there():
    (table,) = tables("| keys of an example or a message | what to do |")
    refused = re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.M)))
    assert sorted(refused) == sorted(REFUSED_KEYS)
    keys = {*TRAIN_KEYS, *OPTIONAL_KEYS, *SYNONYMS, *LABEL_KEYS,
            *(key for form in EXAMPLE_FORMATS for key in form),
            *(key for pair in PAIR_KEYS for key in pair)}  # fmt: skip
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGES["data.md"]] == []


def example_rows():
    """(the form's name, the row, whether it is preference data) of each table `form, example`."""
    text, _, preferences = PAGES["data.md"].partition("\n## Preferences")
    for page, is_preference in (text, False), (preferences, True):
        for name, row in re.findall(r"^\| ([^|`]*) \| `(\{.*\})` \|$", page, re.M):
            yield name, json.loads(row), is_preference
        for block in re.findall(r"^```json\n(.*?)^```", page, re.M | re.S):
            yield "json", json.loads(block), is_preference


@pytest.mark.parametrize("name,row,is_preference", [*example_rows()])
def test_example_rows_are_trained(name, row, is_preference, demo_directory):
    tokenizer = chat_tokenizer(demo_directory, CHATML)
    losses = [loss for loss, kind in LOSSES.items() if kind.function] if is_preference else ["sft"]
    is_unpaired = bool(row.keys() & {*LABEL_KEYS})
    for loss in losses:
        error, form, documents, _ = try_example(row, tokenizer, (), loss)
        if is_unpaired and loss != "kto":
            assert isinstance(error, ValueError)
            continue
        assert error is None and documents, (loss, error)
        assert "ignored" not in form


def test_each_form_and_each_way_to_give_preferences_has_an_example():
    rows = [(row, is_preference) for _, row, is_preference in example_rows()]
    for form in EXAMPLE_FORMATS:
        assert any(row.keys() >= {*form} for row, is_preference in rows if not is_preference), form
    for keys in (*PAIR_KEYS, *((label,) for label in LABEL_KEYS)):
        assert any(row.keys() >= {*keys} for row, is_preference in rows if is_preference), keys


def rows_of_types(heading):
    """[(type, last cell)] of the only table of model types with this heading."""
    (table,) = tables(heading)
    return re.findall(r"^\| `(\w+)` \| .*? \| (.*) \|$", table, re.M)


def kind_of(model_type):
    """As the table of types has it, from a type's Family."""
    if texts := MULTIMODAL.get(model_type):
        word = "multimodal" if model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "audio"
        return f"{word}: {', '.join(f'`{text}`' for text in texts)}"
    family = FAMILIES[model_type]
    is_dense = not (family.moe or family.other_mixers or family.mla)
    if family.moe and str(family.moe.experts_if).startswith("config."):  # only some have experts
        is_dense = True
    words = {"dense": is_dense, "MoE": family.moe, "hybrid": family.other_mixers,
             "latent attention": family.mla}  # fmt: skip
    return ", ".join(word for word, holds in words.items() if holds)


def test_table_of_types_is_that_of_the_families():
    """Each type once, in order, with its kind."""
    rows = rows_of_types("| `model_type` | released models | kind |")
    # text models that are only ever a part of a multimodal one
    parts = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text",
             "glm4v_text", "glm4v_moe_text", "muse_glimmer_text", "mistral4",
             "step3p5"}  # fmt: skip
    assert [name for name, _ in rows] == sorted({*FAMILIES, *MULTIMODAL} - parts)
    known = [(name, kind) for name, kind in rows if name in CONFIG_MAPPING]
    assert known == [(name, kind_of(name)) for name, _ in known]


def test_refused_types_are_refused():
    rows = rows_of_types("| `model_type` | released models | why it is refused |")
    types = [name for name, _ in rows]
    assert types == sorted({*types})
    for name in filter(CONFIG_MAPPING.__contains__, types):
        if name in FAMILIES:  # refused alone, by refuse_misleading()
            assert CONFIG_MAPPING[name] not in MODEL_FOR_CAUSAL_LM_MAPPING
            continue
        with pytest.raises(ValueError, match="is not supported"):
            check_model(CONFIG_MAPPING[name]())


def test_types_of_models_are_those_of_transformers():
    refused = rows_of_types("| `model_type` | released models | why it is refused |")
    newest = Version(transformers.__version__) >= Version("5.24")
    unknown = {*FAMILIES, *MULTIMODAL, *dict(refused)} - {*CONFIG_MAPPING}
    assert not unknown or not newest, unknown


def test_specs_of_a_family_have_the_fields_shown():
    """In the table of how to add one: `Spec`: `field`, of Family."""
    (table,) = tables("| the family has | dataclass, and the field of `Family` that holds it |")
    fields = {f.name: str(f.type) for spec in (family_specs.Family, family_specs.MoESpec)
              for f in dataclasses.fields(spec)}  # fmt: skip
    seen = 0
    for row in table.splitlines()[2:]:
        words = re.findall(r"`(\w+)`", row.split("|")[2])
        assert {word for word in words if word.islower()} <= fields.keys(), row
        for *named, field in re.findall(r"((?:`[A-Z]\w+`,? ?)+): `(\w+)`", row):
            for spec in re.findall(r"\w+", named[0]):
                mixers = "ShortConvSpec | GatedDeltaNetSpec | Mamba2Spec]"
                annotation = fields[field].replace("OtherMixer]", mixers)
                assert hasattr(family_specs, spec) and spec in annotation, row
                seen += 1
    assert seen >= 7


def test_measured_speeds_are_the_newest():
    """Those of README.md and docs/models.md stand in tables of RESULTS.md, not only in its notes
    of what was before."""
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    newest = {*re.findall(r"\d+,\d{3}", "".join(re.findall(r"^\|.*$", results, re.M)))}
    measured = PAGES["README.md"].partition("## Measured")[2].partition("\n## ")[0]
    lines = [line for line in PAGES["models.md"].splitlines() if "tokens/s" in line]
    shown = re.findall(r"\d+,\d{3}(?! tokens per GPU)", "\n".join([measured, *lines]))
    assert len(shown) > 12 and [number for number in shown if number not in newest] == []


def test_written_files_are_documented(demo):
    directory, _ = demo
    documented = {name.rstrip("/") for name in first_cells("| file | what it is |")}
    written = {re.sub(r"-\d+$", "-NNNNNN", p.name) for p in directory.iterdir()}
    assert written | {"reference.safetensors"} == documented  # of losses with a reference


def test_log_has_the_form_shown(demo):
    """Lines that a page shows come in this order in the real log, [...] stands for some; of the end
    docs/running.md shows four lines, README.md two."""
    _, lines = demo

    def form(line):
        # the pages show two ranks on a CPU, here is one, maybe on a GPU
        line = line.replace("tok/s/GPU", "tok/s/process")
        line = re.sub(r" \| [\d:]+ left$", "", line)
        line = re.sub(r"runs/[\w-]+|\brun\b", "RUN", line)
        # the environment's, or its path; the script's from the folder that training ran in
        line = re.sub(r"^\S*python[\d.]* \S*merge_", "PYTHON merge_", line)
        return re.sub(r"[ \d.,e+-]*\d", "#", line)

    logs = {}
    for name, page in PAGES.items():
        for _, text in re.findall(FENCED, page, re.M | re.S):
            if text.startswith("$ make"):
                logs[name] = [line for line in text.splitlines()[1:] if line != "[...]"]
    assert {"README.md", "running.md"} <= logs.keys()
    real = [form(line) for line in lines]
    for name, shown in logs.items():
        n = 4 if name == "running.md" else 2
        assert [form(line) for line in shown[-n:]] == real[-n:]
        at = 0
        for line in dict.fromkeys(map(form, shown)):  # the real log has one step
            if (kind := line.partition(": ")[0]) in ("first row", "sample"):
                at = next(i for i in range(at, len(real)) if real[i].startswith(f"{kind}: "))
            else:
                at = real.index(line, at)


def test_file_tree():
    """Equal in a clean checkout; a file of your own beside them is no failure."""

    def listed(*kinds):
        git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", *kinds]
        done = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no git checkout: {done.stderr.strip()}")
        return {line.split("/")[0] for line in done.stdout.splitlines()}

    shown = {name.split("/")[0] for name in tree_names()}
    assert listed("--cached") <= shown
    assert shown <= listed("--cached", "--others", "--exclude-standard")
