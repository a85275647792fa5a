"""What is looked at before the base is loaded: a dry run of the data, the adapter to begin with,
the room on the disk; and the plan for the rows of a data set.
"""

import re
import shutil

import pytest
from conftest import small_disk
from rows import ASKED, REASONING, TALK, says, write_jsonl
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

ONE = ["--batch_size", 1, "--report_to", "none"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_model):
    """A directory with model/, rows.jsonl, and a run on both."""
    directory = tmp_path_factory.mktemp("dry")
    shutil.copytree(tiny_model("llama"), directory / "model")
    write_jsonl(directory / "rows.jsonl", 4 * [{"messages": TALK}] + 8 * [{"messages": ASKED}])
    return directory


@pytest.fixture(scope="module")
def first_run(base, run_jobs):
    argv = [*map(str, flags_of(base, "--max_steps", 2, "--output_dir", base / "first"))]
    run_jobs(1, [{"argv": argv, "draws": True}], cwd=base)
    return base / "first"


def flags_of(base, *more):
    return ["--model", base / "model", "--dataset", base / "rows.jsonl", *ONE, *more]


def test_dry_run_shows_what_a_run_would_train_and_leaves_nothing(base, run_main, tmp_path):
    """Without weights."""
    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    code, out, err = run_main(
        "--model", tmp_path / "model", "--dataset", base / "rows.jsonl", "--batch_size", 2,
        "--num_epochs", 2, "--max_steps", 0, "--output_dir", tmp_path / "run")
    assert code == 0, err
    assert "data: 12 rows, " in out and f"(12 messages; {base}/rows.jsonl)" in out
    assert "each of 16 answers is trained after the prompt that the template makes" in out
    shown = re.findall(r"^(first row|row \d+): '\[masked: ", out, re.M)
    assert shown == ["first row", "row 4", "row 7", "row 10"]
    assert "]The answer is 7.</s>" in out and "plan: " in out
    assert err.splitlines()[-1].endswith("nothing was trained; the run has 12 steps of 2 rows")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("row, code", [
    ({"messages": ASKED, "images": ["a"]}, 4), ({"messages": [says("gpt9", "x")]}, 4)], ids=str)
def test_dry_run_ends_as_the_run_would(row, code, base, run_main, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": ASKED}, row])
    ends = [run_main("--model", base / "model", "--dataset", path, "--max_steps", steps,
                     "--output_dir", tmp_path / "run") for steps in (0, 1)]
    assert [end[0] for end in ends] == [code, code]
    assert ends[0][2].splitlines()[-1] == ends[1][2].splitlines()[-1]


def test_dry_run_in_the_directory_of_a_run_changes_nothing_there(base, first_run, run_main):
    def content():
        return {path: path.read_bytes() for path in first_run.rglob("*") if path.is_file()
                and path.name != ".lock"}

    before = content()
    code, _, err = run_main(*flags_of(base, "--max_steps", 0, "--output_dir", first_run))
    assert code == 0 and content() == before, err
    code, _, err = run_main(*flags_of(
        base, "--max_steps", 0, "--output_dir", first_run, "--lora_rank", 5))
    assert code == 7 and "--lora_rank 16 (now 5)" in err and content() == before


def test_plan_for_other_cards_is_for_the_rows_of_the_data_set(base, run_main):
    flags = ["--model", base / "model", "--plan_for", "2x24GB", "--max_seq_len", 64]
    code, full, err = run_main(*flags)
    assert code == 0, err
    code, short, err = run_main(*flags, "--dataset", base / "rows.jsonl", "--eval_dataset", 0.5)
    assert code == 0, err
    assert "data: 12 rows, " in short and "(12 messages; " in short and "eval data: " in short
    micro_batches = [int(re.search("micro-batches of up to ([0-9,]+)", out)[1].replace(",", ""))
            for out in (full, short)]
    assert micro_batches[1] < micro_batches[0] and ": 16 rows per step, " in short


# ------------------------------------------------------------------------------------------------
# The adapter to begin with
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags, wanted", [
    (["nowhere"], "is not an adapter"), (["{run}", "--lora_rank", 5], "--lora_rank")], ids=str)
def test_adapter_that_does_not_fit_is_told_before_the_base_is_read(
        flags, wanted, base, first_run, run_main, tmp_path):  # fmt: skip
    """Here a base that cannot be read."""
    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    flags = [str(flag).format(run=first_run) for flag in flags]
    code, _, err = run_main(
        "--model", tmp_path / "model", "--dataset", base / "rows.jsonl", *ONE, "--max_steps", 1,
        "--output_dir", tmp_path / "run", "--init_adapter", *flags)
    assert code == 3 and "--init_adapter" in err and wanted in err


def test_adapter_of_another_base_is_refused(base, first_run, run_main, tmp_path):
    """Of the same shapes, by the digest in its run's directory, or of the run of a checkpoint."""
    shutil.copytree(base / "model", tmp_path / "model")
    values = load_file(tmp_path / "model" / "model.safetensors")
    save_file({name: value + 0.01 for name, value in values.items()},
              tmp_path / "model" / "model.safetensors", {"format": "pt"})
    for adapter in first_run, first_run / "checkpoint-000002":
        code, _, err = run_main(
            "--model", tmp_path / "model", "--dataset", base / "rows.jsonl", *ONE, "--max_steps",
            1, "--output_dir", tmp_path / "run", "--init_adapter", adapter)
        assert code == 3 and "was trained on another base model" in err
        assert not (tmp_path / "run").exists()


def test_adapter_of_another_chat_template_is_told(base, first_run, run_main, tmp_path):
    (tmp_path / "other.jinja").write_text(REASONING.replace("<|im_end|>", "{{ eos_token }}"))
    flags = flags_of(base, "--max_steps", 0, "--init_adapter", first_run)
    said = "was trained with another chat template"
    code, out, err = run_main(*flags, "--output_dir", tmp_path / "run")
    assert code == 0 and said not in out, err
    code, out, err = run_main(*flags, "--output_dir", tmp_path / "run",
                              "--chat_template", tmp_path / "other.jinja")
    assert code == 0 and said in out, err


# ------------------------------------------------------------------------------------------------
# The output directory
# ------------------------------------------------------------------------------------------------


def test_disk_without_room_for_one_checkpoint_is_told_at_the_start(base, run_main, tmp_path):
    with small_disk(tmp_path / "small", "300k"):
        code, _, err = run_main(*flags_of(base, "--output_dir", tmp_path / "small" / "run"))
        assert code == 7 and "for the adapter and checkpoints" in err and "Free disk space" in err
        assert not (tmp_path / "small" / "run").exists()


def test_complete_run_that_goes_on_says_what_becomes_of_the_rate_and_of_its_merge(
        base, first_run, run_main, tmp_path):  # fmt: skip
    run = shutil.copytree(first_run, tmp_path / "run")
    (run / "merged").mkdir()
    (run / "merged" / "config.json").write_text("{}")
    code, out, err = run_main(*flags_of(base, "--max_steps", 8, "--output_dir", run))
    assert code == 0, err
    assert ("note: the run was complete at step 2 and now continues to step 8. Its learning rate"
            " jumps from 1.0e-04 to 1.7e-04; ") in out  # fmt: skip
    assert f"{run}/merged is of an earlier adapter" in out


def test_run_whose_loss_ended_above_where_it_began_says_so(base, run_main, tmp_path):
    """As one that spoils what it begins with."""
    good, bad = (tmp_path / name for name in ("good", "bad"))
    code, out, err = run_main(*flags_of(
        base, "--max_steps", 20, "--learning_rate", 0.01, "--output_dir", good))
    assert code == 0 and "warning" not in out, err
    code, out, err = run_main(*flags_of(
        base, "--max_steps", 8, "--learning_rate", 0.5, "--init_adapter", good,
        "--output_dir", bad))
    assert code == 0, err
    assert out.splitlines()[-3].startswith("warning: the loss ended at ")


def test_saved_tokenizer_is_that_of_the_run(first_run, base):
    saved, own = (AutoTokenizer.from_pretrained(path) for path in (first_run, base / "model"))
    assert saved.chat_template == own.chat_template
