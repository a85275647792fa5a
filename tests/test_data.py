"""From rows of text to bins: what is learnt, and that every row gets its turn."""

import dataclasses
import json
import shutil
import time
import types

import pytest
import torch
import transformers
from conftest import encode_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import train_fsdp_qlora as script

IGNORE = script.IGNORE
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
REWRITING = (  # as templates that drop the reasoning of earlier turns do
    "{% for m in messages %}{{ m.role }}: "
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '-' }}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ('user', 'assistant') %}"
    "{{ raise_exception('only user and assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is 3 plus 4?"},
    {"role": "assistant", "content": "The answer is 7."},
    {"role": "user", "content": "And 2 times 2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture
def tokenizer(demo_directory):
    """A new one for each test, which may change it."""
    return AutoTokenizer.from_pretrained(demo_directory / "model")


def add_specials(tokenizer, template):
    """Let it add BOS and EOS itself, or not: template is '$A', '<s> $A', '$A </s>', ..."""
    names = ("<s>", "</s>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template,
        special_tokens=[(n, tokenizer.convert_tokens_to_ids(n)) for n in names if n in template],
    )
    return tokenizer


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_all(row, tokenizer):
    """[(input_ids, labels)] of the documents of a row."""
    _, documents = script.parse_row(row, tokenizer)
    return script.tokenize(documents, tokenizer)


def encode(row, tokenizer):
    """(input_ids, labels) of a row that is one document."""
    (document,) = encode_all(row, tokenizer)
    return document


def learnt_text(tokenizer, ids, labels):
    return tokenizer.decode([t for t, label in zip(ids, labels) if label != IGNORE])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_config(**settings):
    return dataclasses.replace(script.Config(), **settings)


# ------------------------------------------------------------------------------------------------
# One row
# ------------------------------------------------------------------------------------------------

TEMPLATES = ("$A", "<s> $A", "$A </s>", "<s> $A </s>")


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("prompt", ["What is 3 plus 4?\n", ""])
@pytest.mark.parametrize("completion", ["The answer is 7.", "7"])
def test_completion_and_one_eos_are_learnt(tokenizer, template, prompt, completion):
    add_specials(tokenizer, template)
    ids, labels = encode({"prompt": prompt, "completion": completion}, tokenizer)
    bos = [tokenizer.bos_token_id] if "<s>" in template else []
    not_learnt = bos + plain(tokenizer, prompt)
    learnt = plain(tokenizer, completion) + [tokenizer.eos_token_id]
    assert ids == not_learnt + learnt
    assert labels == [IGNORE] * len(not_learnt) + learnt


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("text", ["The answer is 7.", "The answer is 7.</s>"])
def test_text_is_learnt_with_one_eos(tokenizer, template, text):
    add_specials(tokenizer, template)
    ids, labels = encode({"text": text}, tokenizer)
    bos = [tokenizer.bos_token_id] if "<s>" in template else []
    body = plain(tokenizer, text.removesuffix("</s>"))
    assert ids == bos + body + [tokenizer.eos_token_id]
    assert labels == ids


@pytest.mark.parametrize("template", TEMPLATES)
def test_completion_that_ends_with_eos_gets_no_second(tokenizer, template):
    add_specials(tokenizer, template)
    row = {"prompt": "What is 3 plus 4?\n", "completion": "The answer is 7.</s>"}
    without = {**row, "completion": "The answer is 7."}
    assert encode(row, tokenizer) == encode(without, tokenizer)


def test_row_of_no_known_form_is_refused(tokenizer):
    with pytest.raises(script.RefusedRow, match="has instruction; want messages;.* prompt and"):
        encode({"instruction": "x"}, tokenizer)


# ------------------------------------------------------------------------------------------------
# Conversations
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", TEMPLATES)
def test_assistant_turns_and_their_end_are_learnt(tokenizer, template):
    add_specials(tokenizer, template)
    ids, labels = encode({"messages": CONVERSATION}, tokenizer)
    assert ids == plain(tokenizer, tokenizer.apply_chat_template(CONVERSATION, tokenize=False))
    assert learnt_text(tokenizer, ids, labels) == "The answer is 7.</s>It is 4.</s>"
    assert all(label in (token, IGNORE) for token, label in zip(ids, labels))


def test_eos_is_learnt_once_where_the_template_has_none(tokenizer):
    tokenizer.chat_template = CHATML
    ids, labels = encode({"messages": CONVERSATION}, tokenizer)
    assert ids.count(tokenizer.eos_token_id) == 1 and labels[-1] == tokenizer.eos_token_id
    learnt = learnt_text(tokenizer, ids, labels)
    assert learnt.replace("\n", "") == "The answer is 7.<|end|>It is 4.<|end|></s>"


@pytest.mark.parametrize("template", [None, CHATML], ids=["closed by EOS", "not closed"])
def test_conversation_ends_with_its_last_learnt_turn(tokenizer, template):
    """What the user says behind it is nothing to learn from."""
    tokenizer.chat_template = template or tokenizer.chat_template
    ids, labels = encode({"messages": CONVERSATION[:4]}, tokenizer)
    assert (ids, labels) == encode({"messages": CONVERSATION[:3]}, tokenizer)
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


def test_first_word_is_learnt_where_its_token_takes_the_space_before(tokenizer):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["assistant: The answer", "user: Hi"] * 10, trainer)
    own = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    own.chat_template = tokenizer.chat_template  # its generation prompt is "assistant: "
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The answer"}]
    ids, labels = encode({"messages": messages}, own)
    assert learnt_text(own, ids, labels).strip() == "The answer</s>"


def test_template_prints_the_date_of_the_runs_start(tokenizer):
    today = "{{ strftime_now('%d %b %Y') }} " + tokenizer.chat_template
    tokenizer.chat_template = today
    original = transformers.utils.chat_template_utils.datetime
    try:
        script.fix_date("2020-01-31")
        ids, _ = encode({"messages": CONVERSATION}, tokenizer)
    finally:
        transformers.utils.chat_template_utils.datetime = original
    assert tokenizer.decode(ids).startswith("31 Jan 2020 ")


def test_resumed_run_goes_on_with_the_date_of_its_start(tokenizer, run_main, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} " + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    flags = ["--model", model, "--dataset", tmp_path / "data.jsonl", "--max_steps", 1]
    flags += ["--batch_size", 1, "--output_dir", tmp_path / "run"]
    original = transformers.utils.chat_template_utils.datetime
    try:
        code, out, err = run_main(*flags)
        assert code == 0 and time.strftime("%d %b %Y") in out, err
        path = tmp_path / "run" / "train_config.json"
        begun = json.loads(path.read_text())
        assert begun["date"] == time.strftime("%Y-%m-%d")
        assert run_main(*flags)[0] == 0
        path.write_text(json.dumps({**begun, "date": "2020-01-31"}))
        (tmp_path / "run" / "adapter_model.safetensors").unlink()  # else it is complete
        code, out, err = run_main(*flags)
        assert code == 7 and "another rows: the data set" in err
    finally:
        transformers.utils.chat_template_utils.datetime = original


def test_turn_that_is_rewritten_when_more_follow_is_learnt_as_it_was(tokenizer):
    """In a document of its own; in the next one it is there as rewritten, and not learnt."""
    tokenizer.chat_template = REWRITING
    thoughts = ("<think>three and four</think>", "<think>two and two</think>")
    messages = [dict(message) for message in CONVERSATION]
    messages[2]["content"] = thoughts[0] + messages[2]["content"]
    messages[4]["content"] = thoughts[1] + messages[4]["content"]
    first, second = encode_all({"messages": messages}, tokenizer)
    assert learnt_text(tokenizer, *first) == thoughts[0] + "The answer is 7.</s>"
    assert learnt_text(tokenizer, *second) == thoughts[1] + "It is 4.</s>"
    text = tokenizer.decode(second[0])
    assert "The answer is 7.</s>" in text and thoughts[0] not in text
    (alone,) = encode_all({"messages": CONVERSATION}, tokenizer)  # nothing is rewritten
    assert learnt_text(tokenizer, *alone) == "The answer is 7.</s>It is 4.</s>"


def test_template_that_leaves_out_a_turn_is_refused(tokenizer):
    tokenizer.chat_template = FORGETFUL
    with pytest.raises(script.RefusedRow, match="leaves out the content of message [13];"):
        encode({"messages": CONVERSATION}, tokenizer)
    encode({"messages": CONVERSATION[1:3]}, tokenizer)  # nothing earlier


def test_tokenizer_without_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(script.RefusedRow, match="no chat template.*use prompt and completion"):
        encode({"messages": CONVERSATION}, tokenizer)


def test_conversation_without_assistant_is_left_out(tokenizer, tmp_path):
    rows = [{"text": "fine"}, {"messages": CONVERSATION[:2]}]
    first, second = encode_file(write_jsonl(tmp_path / "data.jsonl", rows), tokenizer)
    assert first["kept"] and not second["kept"]
    assert second["left_out"] == "no message of the assistant is learnt"


def test_row_that_the_template_refuses_is_left_out_and_named(tokenizer, tmp_path):
    tokenizer.chat_template = STRICT
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, {"messages": CONVERSATION}])
    first, second = encode_file(path, tokenizer)
    assert first["kept"] and not second["kept"]
    assert second["left_out"] == "the chat template fails: only user and assistant"
    assert second["where"] == f"{path} line 2"


# ------------------------------------------------------------------------------------------------
# Files and whole data sets
# ------------------------------------------------------------------------------------------------


def read_all(path):
    """The rows of a file, which are exceptions where there is no row."""
    pieces, _ = script.find_pieces(str(path))
    return [row for piece in pieces for _, row in script.read_piece(*piece)]


def test_lines_are_read_whatever_their_ends(tmp_path):
    rows = [{"text": "ä ✓ 🙂 \u2028 \x85"}, {"text": "two\nlines"}, {"text": ""}, {"text": "last"}]
    lines = [json.dumps(row, ensure_ascii=i % 2 == 0).encode() for i, row in enumerate(rows)]
    lines[0] = json.dumps(rows[0], ensure_ascii=False).encode()
    for name, content in {
        "unix": b"\n".join(lines) + b"\n",
        "dos": b"\r\n".join(lines),
        "blank lines": b"\n\n" + b"\n \t\r\n\n".join(lines) + b"\n\n",
        "byte order mark": b"\xef\xbb\xbf" + b"\n".join(lines),
    }.items():
        path = tmp_path / "data.jsonl"
        path.write_bytes(content)
        assert read_all(path) == rows, name


@pytest.mark.parametrize(
    "bad", [b'{"text": ', b"[1, 2]", b"nonsense", b'"text"', b'{"text": "\xe4"}', b"\0"]
)
def test_malformed_line_is_left_out_and_named(tokenizer, tmp_path, bad):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n{"text": "b"}\n' + bad + b'\n{"text": "c"}\n')
    found = encode_file(path, tokenizer)
    assert [row["kept"] for row in found] == [True, True, False, True]
    assert found[2]["where"] == f"{path} line 4"
    assert found[2]["left_out"].startswith(("is no JSON: ", "is list, want", "is str, want"))


def test_missing_file_and_directory_without_any_are_refused(tmp_path):
    with pytest.raises(ValueError, match="none.jsonl: neither a Hub id .* nor a file"):
        script.find_pieces(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=f"{tmp_path}: no file in it ends in .jsonl"):
        script.find_pieces(str(tmp_path))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": 3, "completion": "x"},
        {"prompt": ["x"], "completion": "x"},
        {"prompt": "x", "completion": ["x"]},
        {"text": 3},
        {"text": ["x"]},
        {"text": []},
        {"text": "\ud800"},
        {"messages": []},
        {"messages": "x"},
        {"messages": [3]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant"}]},
        {"messages": [{"content": "x"}]},
    ],
    ids=json.dumps,
)
def test_row_with_a_value_of_another_kind_is_left_out_and_named(tokenizer, tmp_path, row):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row, {"text": "fine"}])
    found = encode_file(path, tokenizer)
    assert [row["kept"] for row in found] == [True, False, True]
    assert found[1]["left_out"] and not found[1]["left_out"].startswith(script.REFUSED)
    assert found[1]["where"] == f"{path} line 2"


def test_row_of_no_known_form_ends_the_run(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, {}])
    _, found = encode_file(path, tokenizer)
    assert found["left_out"].startswith(f"{script.REFUSED}{path} line 2: has ")


@pytest.mark.parametrize(
    "row", [{"messages": None}, {"prompt": "x", "completion": None}], ids=json.dumps
)
def test_row_with_null_where_something_should_be_is_left_out(tokenizer, tmp_path, row):
    path = write_jsonl(tmp_path / "data.jsonl", [{"text": "fine"}, row])
    _, found = encode_file(path, tokenizer)
    assert found["left_out"] == f"{list(row)[-1]} null"


def test_long_rows_are_cut_and_rows_with_nothing_to_learn_left_out(tokenizer, tmp_path):
    rows = [
        {"prompt": "aaaaaaaa", "completion": "bbbb"},  # cut before its EOS
        {"prompt": "aaaaaaaaaaaa", "completion": "bbbb"},  # cut before its completion
        {"text": "c"},
        {"text": " \n"},  # else EOS alone would be learnt
    ]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    whole = [encode(row, tokenizer) for row in rows[:3]]
    assert len(whole[0][0]) == 13
    found = encode_file(path, tokenizer, 12)
    assert [row["kept"] for row in found] == [True, False, True, False]
    assert [row["cut"] for row in found] == [True, True, False, False]
    assert [row["left_out"] for row in found[1::2]] == [
        "nothing to learn in its first 12 tokens", "text is empty"]  # fmt: skip
    for row, (ids, labels) in zip(found[::2], whole[::2]):
        assert row["input_ids"].dtype == row["labels"].dtype == "int32"
        assert row["input_ids"].tolist() == ids[:12] and row["labels"].tolist() == labels[:12]
        assert row["length"] == len(ids[:12])
    assert found[0]["labels"].tolist() == [IGNORE] * 8 + plain(tokenizer, "bbbb")
    assert found[0]["n_learnt"] == 4
    assert not any(row["kept"] for row in encode_file(path, tokenizer, 1))


def test_tokenizer_without_eos_is_refused(tokenizer, run_main, tiny_model, tmp_path):
    model = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": "x"}])
    code, _, err = run_main("--model", model, "--dataset", data, "--output_dir", tmp_path / "run")
    assert code == 4 and "error: the tokenizer has no EOS token" in err


def test_random_rows_are_full_rows_that_depend_on_the_seed_alone():
    config = make_config(batch_size=6, max_seq_len=50, seed=3)
    rows = script.random_rows(97, config)
    assert len(rows) == 6
    for i in range(6):
        ids, labels = rows.tokens(i)
        assert ids.shape == (50,) and torch.equal(ids, labels)
        assert int(ids.min()) >= 0 and int(ids.max()) < 97
    torch.manual_seed(9)
    again = script.random_rows(97, config)
    other = script.random_rows(97, dataclasses.replace(config, seed=4))
    assert torch.equal(rows.digests, again.digests)
    assert not (rows.digests == other.digests).any()


# ------------------------------------------------------------------------------------------------
# Order
# ------------------------------------------------------------------------------------------------


def draw(n_steps, n_examples, **settings):
    """The rows of the first steps, one after the other."""
    config = make_config(**settings)
    steps = [script.step_rows(step, n_examples, config) for step in range(1, n_steps + 1)]
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


def test_neither_batch_size_nor_size_of_bins_changes_the_order():
    rows = draw(6, 10, batch_size=8)
    assert rows == draw(12, 10, batch_size=4)
    for tokens in (64, 2048, None):  # nor so the number of GPUs: it is not asked for
        assert rows == draw(6, 10, batch_size=8, micro_batch_tokens=tokens)


@pytest.mark.parametrize("epochs, steps", [("1", 3), ("2", 5), ("1.5", 4), ("0.4", 1), ("0.1", 1)])
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
        assert code == 0 and "steps: 2 of 4 rows" in out, err


# ------------------------------------------------------------------------------------------------
# Bins
# ------------------------------------------------------------------------------------------------


def random_lengths(n, longest, generator):
    return torch.randint(1, longest + 1, (n,), generator=generator).tolist()


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("n_rows", [1, 2, 9, 64])
def test_each_row_is_dealt_once_into_bins_that_hold_it(n_rows, processes):
    generator = torch.Generator().manual_seed(n_rows * 10 + processes)
    for _ in range(20):
        lengths = random_lengths(n_rows, 100, generator)
        most = max(lengths) + int(torch.randint(200, (), generator=generator))
        micro_batches = script.deal_rows(lengths, processes, most)
        assert all(len(bins) == processes for bins in micro_batches)
        dealt = [row for bins in micro_batches for rows in bins for row in rows]
        assert sorted(dealt) == list(range(n_rows))
        sizes = [sum(lengths[i] for i in rows) for bins in micro_batches for rows in bins]
        assert max(sizes) <= most
        # no more micro-batches than need be, where rows of a quarter of a bin leave at most that
        if max(lengths) * 4 <= most:
            assert len(micro_batches) <= -(-sum(lengths) // (processes * most * 0.75))
        assert micro_batches == script.deal_rows(lengths, processes, most)  # nothing is drawn


def test_rows_of_one_length_fill_every_bin_alike():
    for rows, processes, most in (16, 2, 200), (8, 4, 100), (8, 4, 200), (6, 1, 250):
        micro_batches = script.deal_rows([100] * rows, processes, most)
        at_once = processes * (most // 100)
        assert len(micro_batches) == -(-rows // at_once)
        if rows % (len(micro_batches) * processes) == 0:
            assert len({len(one) for bins in micro_batches for one in bins}) == 1


def test_bins_of_uneven_rows_are_about_equally_full():
    """What the slowest process makes all others wait for: chat rows, 32 a process."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(64, generator=generator)
    lengths = (200 * (0.9 * normal).exp()).int().clamp(16, 2048).tolist()
    for processes, most in (2, 8192), (2, 4096), (4, 4096), (8, 2048):
        for bins in script.deal_rows(lengths, processes, most):
            sizes = [sum(lengths[i] for i in rows) for rows in bins]
            if max(lengths) < min(sizes):
                assert min(sizes) > 0.95 * max(sizes)


def make_run(device="cpu", bin_tokens=10_000):
    plan = script.Plan("float32", 1, 1, True, bin_tokens, 0, False, False, False, False)
    kernels = {"same": "kernel of one length", "any": "kernel of any"}
    device = torch.device(device)
    return types.SimpleNamespace(device=device, plan=plan, kernels=kernels, store=None)


def naive_bin(batch, rows):
    """Token by token: input, position, and where a successor is learnt, and which."""
    input_ids, positions, learnt, labels = [], [], [], []
    for row in rows:
        ids, row_labels = (t.tolist() for t in batch.tokens(row))
        for t, token in enumerate(ids):
            if t + 1 < len(ids) and row_labels[t + 1] != IGNORE:
                learnt.append(len(input_ids))
                labels.append(row_labels[t + 1])
            input_ids.append(token)
            positions.append(t)
    return input_ids, positions, learnt, labels


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("lengths", [[5], [5, 5, 5, 5], [1, 30, 2, 2, 17, 9], [3, 3, 3, 8, 8, 1]],
                         ids=str)  # fmt: skip
def test_bin_equals_one_token_at_a_time(lengths, ranks):
    generator, pairs = torch.Generator().manual_seed(0), []
    for n in lengths:
        ids = torch.randint(1, 9, (n,), generator=generator)
        learnt = torch.rand(n, generator=generator) < 0.5
        pairs.append((ids, torch.where(learnt, ids, IGNORE)))
    batch = script.rows_of(pairs)
    (micro_batch,) = script.deal_rows(lengths, ranks, sum(lengths))
    bins = [script.make_bin(batch, micro_batch, r, torch.tensor(0), make_run())
            for r in range(ranks)]  # fmt: skip
    assert len({len(one.input_ids) for one in bins}) == len({len(one.labels) for one in bins}) == 1
    fullest = max(sum(lengths[i] for i in rows) for rows in micro_batch)
    assert len(bins[0].input_ids) == fullest
    for rows, one in zip(micro_batch, bins):
        input_ids, positions, learnt, labels = naive_bin(batch, rows)
        padding = fullest - len(input_ids)
        assert one.input_ids.tolist() == input_ids + [0] * padding
        assert one.position_ids.tolist()[: len(positions)] == positions
        n = len(learnt)
        assert one.learnt_at.tolist()[:n] == learnt and one.labels.tolist()[:n] == labels
        assert set(one.labels.tolist()[n:]) <= {IGNORE}  # padding is never learnt
        # documents: the rows, then padding in documents no longer than the longest row
        bounds = one.cu_seqlens.tolist()
        assert list(one.lengths) == [b - a for a, b in zip(bounds, bounds[1:])]
        assert bounds[0] == 0 and bounds[-1] == fullest
        assert list(one.lengths[: len(rows)]) == [lengths[i] for i in rows]
        assert max(one.lengths) <= one.longest == max(lengths)
        kernel = "kernel of one length" if len(set(one.lengths)) == 1 else "kernel of any"
        assert one.kernels == kernel


def test_dropout_keys_belong_to_a_row_and_not_to_its_place():
    """In any bin, on any rank; padding and other rows, steps and seeds have others."""
    batch = script.rows_of([(torch.arange(1, n + 1),) * 2 for n in (4, 9, 6)])
    key = torch.tensor(7)

    def keys(micro_batch, rank, row, key=key):
        one = script.make_bin(batch, micro_batch, rank, key, make_run())
        start = one.cu_seqlens[micro_batch[rank].index(row)]
        return one.dropout_keys[start : start + int(batch.lengths[row])].tolist()

    want = keys([[2]], 0, 2)
    assert len(set(want)) == 6
    for micro_batch, rank in ([[0, 2]], 0), ([[0, 1], [2]], 1), ([[2, 1], [0]], 0):
        assert keys(micro_batch, rank, 2) == want
    assert not set(want) & set(keys([[1, 2]], 0, 1))
    # drop() adds to them what tells layers and their places: no mask is another one's, shifted
    assert not {one + n for one in want for n in range(1, 1000)} & set(want)
    assert not set(want) & set(keys([[2]], 0, 2, torch.tensor(8)))


def test_bins_end_at_a_few_lengths_on_a_gpu():
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    lengths = [script.round_up(n, gpu) for n in (1, 63, 64, 65, 2000, 2048, 2049, 9580)]
    assert lengths == [64, 64, 64, 128, 2048, 2048, 2176, 9728]
    assert script.round_up(65, cpu) == 65
    assert len({script.round_up(n, gpu) for n in range(4096, 8193)}) <= 17
