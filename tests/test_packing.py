"""Steps and micro-batches: every row once an epoch, few micro-batches, and what the tensors of a
micro-batch hold.

What a micro-batch must hold is made here one token at a time.
"""

import dataclasses
import itertools
import json
import math
import random
import types
from pathlib import Path

import pytest
import torch
from conftest import one_process, read_rows
from transformers import AutoTokenizer

from fsdp_qlora.config import Config
from fsdp_qlora.data.collate import make_micro_batch, round_up
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.packing import pack_rows
from fsdp_qlora.data.rows import make_rows, random_rows
from fsdp_qlora.data.sampling import ShuffledSampler, epoch_order, step_indices
from fsdp_qlora.hashing import hash_ints
from fsdp_qlora.kernels.dropout import N_SITES, drop
from fsdp_qlora.kernels.recurrence import chunk_table
from fsdp_qlora.micro_batch.context_parallel import ContextGroup
from fsdp_qlora.micro_batch.micro_batch import MicroBatchFormat
from train_fsdp_qlora import rows_of_step

CPU = torch.device("cpu")


def make_pairs(lengths, seed=0, vocabulary=320):
    """Rows of random tokens, each with a random part of them trained, the last one always."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for n in lengths:
        ids = torch.randint(3, vocabulary, (n,), generator=generator)
        trained = torch.rand(n, generator=generator) < torch.rand((), generator=generator)
        trained[-1] = True
        rows.append((ids, torch.where(trained, ids, IGNORE_INDEX)))
    return rows


# ------------------------------------------------------------------------------------------------
# Which rows a step works on
# ------------------------------------------------------------------------------------------------

def draw(n_steps, n_examples, **settings):
    """The rows of the first steps, one after the other."""
    config = Config(**settings)
    steps = [step_indices(step, n_examples, config) for step in range(1, n_steps + 1)]
    assert all(len(step) == config.batch_size for step in steps)
    return [int(row) for step in steps for row in step]


@pytest.mark.parametrize("n_examples", [1, 7, 10, 12])
@pytest.mark.parametrize("batch_size", [1, 4, 12, 30])  # 30: several epochs in one step
def test_every_row_comes_once_an_epoch(n_examples, batch_size):
    rows = draw(60, n_examples, batch_size=batch_size)
    whole_epochs = len(rows) // n_examples
    for epoch in range(whole_epochs):
        part = rows[epoch * n_examples : (epoch + 1) * n_examples]
        assert sorted(part) == list(range(n_examples)), f"epoch {epoch}"
    assert len(set(rows[whole_epochs * n_examples :])) == len(rows) % n_examples


def test_order_depends_on_seed_and_epoch_alone():
    rows = draw(15, 100, batch_size=20, seed=1)
    torch.manual_seed(9)  # not on the global generator
    assert rows == draw(15, 100, batch_size=20, seed=1)
    assert rows != draw(15, 100, batch_size=20, seed=2)
    epochs = [rows[i : i + 100] for i in (0, 100, 200)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert list(range(100)) not in epochs


def test_neither_batch_size_nor_size_of_micro_batches_changes_the_order():
    rows = draw(6, 10, batch_size=8)
    assert rows == draw(12, 10, batch_size=4)
    for tokens in (64, 2048, None):  # nor so the number of GPUs: it is not asked for
        assert rows == draw(6, 10, batch_size=8, micro_batch_tokens=tokens)


def test_random_rows_are_full_rows_that_depend_on_the_seed_alone():
    config = Config(batch_size=6, max_seq_len=50, seed=3)
    rows = random_rows(97, config)
    assert len(rows) == 6
    for i in range(6):
        ids, labels = rows.document(i)
        assert ids.shape == (50,) and torch.equal(ids, labels)
        assert int(ids.min()) >= 0 and int(ids.max()) < 97
    torch.manual_seed(9)
    again = random_rows(97, config)
    other = random_rows(97, dataclasses.replace(config, seed=4))
    assert torch.equal(rows.document_hashes, again.document_hashes)
    assert not (rows.document_hashes == other.document_hashes).any()


# ------------------------------------------------------------------------------------------------
# Which rows share a micro-batch
# ------------------------------------------------------------------------------------------------


def filled(lengths, micro_batches):
    return [sum(lengths[i] for i in rows) for batch in micro_batches for rows in batch]


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("most", [1, 7, 64, 1000])
def test_every_row_is_in_one_micro_batch_and_no_micro_batch_is_too_full(most, processes):
    draw = random.Random(most)
    for n_rows in (1, 2, 5, 30, 300):
        lengths = [draw.randint(1, most) for _ in range(n_rows)]
        micro_steps = pack_rows(lengths, processes, most)
        assert all(len(batch) == processes for batch in micro_steps)
        rows = [i for batch in micro_steps for micro_batch in batch for i in micro_batch]
        assert sorted(rows) == list(range(n_rows))
        sums = filled(lengths, micro_steps)
        assert max(sums) <= most
        assert len(micro_steps) >= math.ceil(sum(lengths) / (processes * most))
        assert micro_steps == pack_rows(list(lengths), processes, most)


def fits(lengths, micro_batches, most):
    """Whether so many micro-batches can hold all, trying every way there is."""
    room = [most] * micro_batches

    def place(at):
        if at == len(lengths):
            return True
        for i in range(micro_batches):
            if room[i] >= lengths[at] and room[i] not in room[:i]:
                room[i] -= lengths[at]
                if place(at + 1):
                    return True
                room[i] += lengths[at]
        return False

    return place(0)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_number_of_micro_batches_is_as_good_as_the_least_one(processes):
    """Finding the least is hard: of small steps one in twenty may take one more, none takes two."""
    draw, more = random.Random(processes), 0
    for _ in range(200):
        most = draw.choice((8, 20, 50))
        lengths = [draw.randint(1, most) for _ in range(draw.randint(1, 10))]
        n = len(pack_rows(lengths, processes, most))
        longest_first = sorted(lengths, reverse=True)
        least = next(k for k in itertools.count(1) if fits(longest_first, k * processes, most))
        assert least <= n <= least + 1, (lengths, most)
        more += n > least
    print(f"{processes} processes: {more} of 200 take one more than the least")
    assert more <= 10


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_chat_rows_fill_their_micro_batches(processes):
    """Lengths as of chats: micro-batches as few as their tokens ask for, and each about as full."""
    draw = random.Random(processes)
    for _ in range(20):
        lengths = [min(2048, max(16, int(math.exp(draw.gauss(5.3, 0.9))))) for _ in range(64)]
        micro_steps = pack_rows(lengths, processes, 4096)
        sums = filled(lengths, micro_steps)
        assert len(micro_steps) <= max(1, math.ceil(1.02 * sum(lengths) / (processes * 4096)))
        if len(sums) <= 8:  # of so many rows that their lengths even out
            assert max(sums) - min(sums) <= max(lengths)
            assert max(sums) <= max(1.05 * sum(lengths) / len(sums), max(lengths))


def test_rows_of_one_length_fill_every_micro_batch_alike():
    for rows, processes, most in (16, 2, 200), (8, 4, 100), (8, 4, 200), (6, 1, 250):
        micro_batches = pack_rows([100] * rows, processes, most)
        at_once = processes * (most // 100)
        assert len(micro_batches) == -(-rows // at_once)
        if rows % (len(micro_batches) * processes) == 0:
            assert len({len(one) for micro_batches in micro_batches for one in micro_batches}) == 1


def test_micro_batches_of_uneven_rows_are_about_equally_full():
    """The slowest process makes all others wait: chat rows, 32 a process."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, generator=generator)
    lengths = (200 * (0.9 * normal).exp()).int().clamp(16, 2048).tolist()
    for processes, most in (2, 8192), (2, 4096), (4, 4096), (8, 2048):
        for micro_batches in pack_rows(lengths, processes, most):
            sizes = [sum(lengths[i] for i in rows) for rows in micro_batches]
            if max(lengths) < min(sizes):
                assert min(sizes) > 0.95 * max(sizes)


def test_rows_are_balanced_over_processes():
    """Between the micro-batches of one micro-step, for whose longest all wait."""
    lengths = [100, 10, 10, 10, 10, 10, 50, 50, 90, 60]
    micro_steps = pack_rows(lengths, 2, 1000)
    assert len(micro_steps) == 1 and filled(lengths, micro_steps) == [200, 200]
    micro_steps = pack_rows([5, 5], 4, 1000)  # fewer rows than processes
    assert len(micro_steps) == 1 and sorted(map(len, micro_steps[0])) == [0, 0, 1, 1]


@pytest.mark.parametrize("lengths, processes, documents_per_row", [
    ([], 2, 1), ([], 2, 2), ([11], 2, 1), ([4, 11, 4, 4], 1, 1), ([6, 5], 1, 2)])
def test_rows_that_fit_no_micro_batch_are_a_bug(lengths, processes, documents_per_row):
    """The plan's micro-batches have room for the longest row, and there are rows."""
    with pytest.raises(AssertionError, match="into micro-batches of 10 tokens"):
        pack_rows(lengths, processes, 10, documents_per_row)


def test_many_rows_are_dealt():
    draw = random.Random(0)
    lengths = [draw.randint(2, 4096) for _ in range(50_000)]
    micro_steps = pack_rows(lengths, 8, 4096 * 2)
    assert sum(lengths) > 0.95 * 8 * 4096 * 2 * len(micro_steps)
    assert sum(len(micro_batch) for batch in micro_steps for micro_batch in batch) == len(lengths)


# ------------------------------------------------------------------------------------------------
# What a micro-batch holds
# ------------------------------------------------------------------------------------------------


def micro_batch_format(max_tokens, rank=0, **settings):
    return MicroBatchFormat(max_tokens, CPU, ContextGroup(group_index=rank), **settings)


def naive_micro_batch(rows, packed, rank):
    """What a MicroBatch says it holds, one token at a time."""
    micro_batches = []
    for mine in packed:
        ids, position_ids, lengths, trained, labels = [], [], [], [], []
        for i in mine:
            row_ids, row_labels = (t.tolist() for t in rows[i])
            for t, token in enumerate(row_ids):
                if t + 1 < len(row_ids) and row_labels[t + 1] != IGNORE_INDEX:
                    trained.append(len(ids))
                    labels.append(row_labels[t + 1])
                ids.append(token)
                position_ids.append(t)
            lengths.append(len(row_ids))
        micro_batches.append((ids, position_ids, lengths, trained, labels))
    n_tokens, most = max(len(b[0]) for b in micro_batches), max(len(b[3]) for b in micro_batches)
    longest = max(n for b in micro_batches for n in b[2])
    ids, position_ids, lengths, trained, labels = micro_batches[rank]
    while len(ids) < n_tokens:  # documents that are no longer than the rows
        lengths.append(min(n_tokens - len(ids), longest))
        ids += [0] * lengths[-1]
        position_ids += range(lengths[-1])
    padding = most - len(trained)
    bounds = [0, *itertools.accumulate(lengths)]
    return (ids, position_ids, bounds, trained + [0] * padding, labels + [IGNORE_INDEX] * padding,
            lengths)


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_micro_batch_equals_one_token_at_a_time(processes):
    draw, checked = random.Random(0), 0
    for seed in range(10):
        rows = make_pairs([draw.randint(2, 20) for _ in range(draw.randint(1, 24))], seed)
        for most in (20, 45, 400):
            micro_steps = pack_rows([len(ids) for ids, _ in rows], processes, most)
            for packed in micro_steps:
                for rank in range(processes):
                    got = make_micro_batch(
                        make_rows(rows), packed, micro_batch_format(most, rank), torch.tensor(7))
                    ids, position_ids, bounds, trained, labels, lengths = naive_micro_batch(
                        rows, packed, rank
                    )
                    assert got.input_ids.tolist() == ids
                    assert got.position_ids.tolist() == position_ids
                    assert got.cu_seqlens.tolist() == bounds
                    assert got.target_positions.tolist() == trained
                    assert got.targets.tolist() == labels
                    assert got.lengths == tuple(lengths) and got.max_seqlen >= max(lengths)
                    assert got.input_ids.dtype == got.position_ids.dtype == torch.int64
                    assert got.cu_seqlens.dtype == torch.int32
                    # torch's batched kernel, where all documents have one length
                    assert got.is_varlen == (len(set(lengths)) > 1)
                    checked += len(ids)
    assert checked > 4000


def test_micro_batches_end_at_a_few_lengths_on_a_gpu():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    lengths = [round_up(n, gpu) for n in (1, 63, 64, 65, 2000, 2048, 2049, 9580)]
    assert lengths == [64, 64, 64, 128, 2048, 2048, 2176, 9728]
    assert round_up(65, cpu) == 65
    assert len({round_up(n, gpu) for n in range(4096, 8193)}) <= 17


def test_chunks_for_flash_linear_attention():
    """A micro-batch of several lengths has, for CUDA graphs, as many chunks as any lengths can
    give; those that are not there belong to an empty document."""
    assert chunk_table(torch.tensor([0, 70, 71, 135, 200])).tolist() == [
        [0, 0], [0, 1], [1, 0], [2, 0], [3, 0], [3, 1]]
    tables = []
    for lengths in [70, 1, 64, 65], [100, 100], [64, 64, 72]:
        batch = make_rows(make_pairs(lengths))
        for graphs in False, True:
            settings = {"uses_cuda_graphs": graphs, "has_recurrence": True}
            micro_batch = make_micro_batch(
                batch, [list(range(len(lengths)))], micro_batch_format(200, **settings),
                torch.tensor(0))
            real = [[i, k] for i, n in enumerate(lengths) for k in range(-(-n // 64))]
            assert (
                micro_batch.recurrence_chunks.dtype == torch.int32
                and micro_batch.recurrence_chunks[: len(real)].tolist() == real
            )
            spare = micro_batch.recurrence_chunks[len(real) :]
            if graphs and len(lengths) > 2:
                tables.append(len(micro_batch.recurrence_chunks))
                assert tables[-1] == 200 // 64 + len(micro_batch.cu_seqlens) - 1
                assert (
                    not spare[:, 1].any() and not micro_batch.cu_seqlens.diff()[spare[:, 0]].any()
                )
            else:
                assert not len(spare)
    micro_batch = make_micro_batch(batch, [[0]], micro_batch_format(200), torch.tensor(0))
    assert micro_batch.recurrence_chunks is None
    assert len(tables) == 2


def test_first_token_is_never_trained():
    rows = [(ids, ids) for ids, _ in make_pairs([5, 3])]
    batch = make_rows(rows)
    got = make_micro_batch(batch, [[0, 1]], micro_batch_format(8), torch.tensor(0))
    assert got.target_positions.tolist() == [0, 1, 2, 3, 5, 6]
    assert got.targets.tolist() == [*rows[0][0][1:].tolist(), *rows[1][0][1:].tolist()]
    assert batch.n_loss_tokens.tolist() == [4, 2]


def test_padding_is_no_longer_than_the_longest_document():
    """However much another process has: kernels are told how long a document may be."""
    batch = make_rows(make_pairs([7, 7, 7, 4]))
    micro_step = [[0, 1, 2, 3], [], [3]]
    got = make_micro_batch(batch, micro_step, micro_batch_format(25, 1))
    assert got.lengths == (7, 7, 7, 4) and got.max_seqlen == 7
    got = make_micro_batch(batch, micro_step, micro_batch_format(25, 2))
    assert got.lengths == (4, 7, 7, 7) and got.cu_seqlens.tolist() == [0, 4, 11, 18, 25]


def keys_of_rows(rows, most, processes, step):
    """{row: the dropout seeds of its tokens}, however the rows are dealt."""
    keys, batch = {}, make_rows(rows)
    for packed in pack_rows(batch.lengths.tolist(), processes, most):
        for rank, mine in enumerate(packed):
            key = hash_ints(torch.tensor(step))
            micro_batch = make_micro_batch(batch, packed, micro_batch_format(most, rank), key)
            parts = micro_batch.dropout_seeds.split(micro_batch.lengths)
            keys.update({i: part.tolist() for i, part in zip(mine, parts)})
    return keys


def test_seed_decides_order_and_dropout():
    """And no seed has another one's later epochs."""
    orders = {tuple(epoch_order(epoch, 50, seed).tolist()) for seed in range(4)
              for epoch in range(4)}  # fmt: skip
    assert len(orders) == 16
    rows, keys = make_rows(make_pairs([5])), []
    for seed in 0, 0, 1:
        run = types.SimpleNamespace(
            model=types.SimpleNamespace(micro_batch_format=micro_batch_format(8)),
            config=Config(batch_size=1, seed=seed))
        run.sampler, run.rows = ShuffledSampler(rows, run.config), rows
        with one_process():
            _, (micro_batch,) = rows_of_step(run, 1)
        keys.append(micro_batch.dropout_seeds.tolist())
    assert keys[0] == keys[1] and not set(keys[0]) & set(keys[2])


def test_dropout_of_a_token_does_not_depend_on_its_micro_batch():
    rows = make_pairs([9, 4, 12, 7, 3, 11])
    first = keys_of_rows(rows, 12, 1, 1)
    assert len(first) == 6
    for most, processes in (100, 1), (12, 2), (30, 3), (20, 4):
        assert keys_of_rows(rows, most, processes, 1) == first
    everything = [key for keys in first.values() for key in keys]
    assert len(set(everything)) == len(everything) == 46
    again = [key for keys in keys_of_rows(rows, 12, 1, 2).values() for key in keys]
    assert not set(everything) & set(again)
    # drop() adds to them what tells layers and sites: no mask is another one's, shifted
    assert not {key + n for key in everything for n in range(1, 1000)} & set(everything)


def test_dropout_differs_between_rows_tokens_layers_places_and_steps():
    p, n, width = 0.3, 64, 257
    masks = {}
    for step in (1, 2):
        for row in (0, 1):
            key = hash_ints(hash_ints(torch.tensor(step)) + row)
            for layer in (0, 1):
                for place in range(4):
                    ones = torch.ones(n, width)
                    keys = hash_ints(key + torch.arange(n))
                    out = drop(ones, keys, layer * N_SITES + place, p)
                    masks[step, row, layer, place] = out > 0
                    kept = 1 / (1 - p)
                    assert ((out == 0) | ((out - kept).abs() < 1e-6)).all()
    dropped = 1 - torch.stack(list(masks.values())).float().mean()
    assert abs(dropped - p) < 0.005
    for one, other in itertools.permutations(masks.values(), 2):  # as two throws of a die agree
        for shift in 0, 1, N_SITES:  # what layers and sites add to the keys
            same = one[shift:] == other[: n - shift]
            assert abs(same.float().mean() - (p * p + (1 - p) ** 2)) < 0.03
    (mask, *_) = masks.values()
    for shifted in mask[1:] == mask[:-1], mask[:, 1:] == mask[:, :-1]:  # tokens, columns
        assert abs(shifted.float().mean() - (p * p + (1 - p) ** 2)) < 0.03
    keys = hash_ints(hash_ints(hash_ints(torch.tensor(1))) + torch.arange(n))
    again = drop(torch.ones(n, width), keys, 0, p) > 0
    assert torch.equal(again, mask)


def test_digest_tells_tokens_labels_and_where_rows_end():
    def digest(*rows):
        return make_rows(rows).sha256()

    same = digest(([1, 2, 3, 4], [1, 2, 3, 4]))
    assert digest(([1, 2, 3, 4], [1, 2, 3, 4])) == same
    others = {
        digest(([1, 2, 3, 4], [IGNORE_INDEX, 2, 3, 4])),
        digest(([1, 2, 3, 4], [IGNORE_INDEX, IGNORE_INDEX, 3, 4])),
        digest(([1, 2, 4, 3], [1, 2, 3, 4])),
        digest(([1, 2], [1, 2]), ([3, 4], [3, 4])),
        digest(([1], [1]), ([2, 3, 4], [2, 3, 4])),
        digest(([1, 2, 3], [1, 2, 3]), ([4], [4])),
        digest(([3, 4], [3, 4]), ([1, 2], [1, 2])),
    }
    assert len(others) == 7 and same not in others


# ------------------------------------------------------------------------------------------------
# Whole runs
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def two_data_sets(tmp_path, monkeypatch):
    """first.jsonl and second.jsonl, of the same tokens, of which not the same are trained."""
    rows = [(f"What is {a} plus {b}?", f" It is {a + b}.") for a in range(4) for b in range(4)]
    for name, more in ("first", 0), ("second", 3):
        with (tmp_path / f"{name}.jsonl").open("w") as file:
            for prompt, completion in rows:
                row = {"prompt": prompt + completion[:more], "completion": completion[more:]}
                file.write(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)


def test_run_is_not_resumed_with_other_labels(two_data_sets, run_main, demo_directory):
    """The file has the same name, and the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(demo_directory / "model")
    first, second = (read_rows(name, tokenizer) for name in ("first.jsonl", "second.jsonl"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second))
    flags = ["--dataset", "rows.jsonl", "--output_dir", "run", "--batch_size", 4, "--save_every", 1]
    Path("rows.jsonl").symlink_to("first.jsonl")
    code, _, err = run_main(*flags, "--max_steps", 1)
    assert code == 0, err
    Path("rows.jsonl").unlink()
    Path("rows.jsonl").symlink_to("second.jsonl")
    code, _, err = run_main(*flags, "--max_steps", 2, "--resume")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 7 and "--output_dir run" in line and "data set" in line


def test_metrics_say_how_full_the_micro_batches_are(two_data_sets, run_main, read_metrics):
    code, _, err = run_main("--dataset", "first.jsonl", "--output_dir", "full", "--batch_size", 5,
                            "--max_steps", 2, "--micro_batch_tokens", 40)  # fmt: skip
    assert code == 0, err
    rows = read_metrics("full")
    assert [row["rows"] for row in rows] == [5, 5]
    for row in rows:
        assert row["micro_batches"] >= row["tokens"] / 40 and 0.5 < row["packing_efficiency"] <= 1


@pytest.mark.parametrize("epochs, steps", [
    ("1.5", 4), ("0.1", 1),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1", 3), ("2", 5), ("0.4", 1)))])
def test_run_has_as_many_steps_as_its_epochs_take(run_main, tiny_model, tmp_path, epochs, steps):
    """10 rows in batches of 4; a part of a step is a whole one. With --max_steps that many."""
    (tmp_path / "data.jsonl").write_text('{"text": "The answer is 7."}\n' * 10)
    flags = ["--model", tiny_model("llama"), "--dataset", tmp_path / "data.jsonl"]
    flags += ["--batch_size", 4, "--output_dir", tmp_path / "run", "--num_epochs", epochs]
    code, _, err = run_main(*flags)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["rows"] == 4 for row in rows)
    flags[flags.index(tmp_path / "run")] = tmp_path / "other"
    if epochs == "2":
        code, out, err = run_main(*flags, "--max_steps", 2)
        assert code == 0 and "training: 2 steps of 4 rows" in out, err
        assert ("the first step compiles kernels" in out) == torch.cuda.is_available()
