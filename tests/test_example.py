"""One test to read first: it spells out what the others share through fixtures. A run of the real
command, and the same numbers from transformers, bitsandbytes and PEFT themselves."""

import json

import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

import train_fsdp_qlora
from fsdp_qlora.run.demo import write_demo

ROWS = [{"prompt": "What is 2 plus 3?\n", "completion": "The answer is 5."},
        {"prompt": "What is 4 minus 1?\n", "completion": "It is 3, as all know."}]  # fmt: skip


def test_losses_are_those_of_transformers_and_peft(tmp_path):
    # a small Llama with random weights and its tokenizer, and two rows
    write_demo(tmp_path)
    model, run = tmp_path / "model", tmp_path / "run"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    # train two steps, both rows in each, in this process; then the adapter is in run/
    code = train_fsdp_qlora.main([
        "--model", str(model), "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(run),
        "--batch_size", "2", "--max_steps", "2", "--learning_rate", "1e-3", "--compute_dtype",
        "float32", "--eval_dataset", str(tmp_path / "rows.jsonl"), "--report_to", "none",
    ])  # fmt: skip
    assert code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first_loss = next(record["loss"] for record in records if record.get("step") == 1)
    last_loss = records[-1]["eval_loss"]  # of the trained adapter, on the same rows

    # the same model in 4 bits by transformers and bitsandbytes; of each row the answer is trained
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, device_map={"": device}, quantization_config=BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)

    @torch.no_grad()
    def loss_of(model):
        losses = []
        model.train()  # else bitsandbytes takes another product on a CPU, which rounds otherwise
        for row in ROWS:
            prompt, answer = (tokenizer(row[key])["input_ids"] for key in ("prompt", "completion"))
            ids = torch.tensor([*prompt, *answer, tokenizer.eos_token_id], device=device)
            logits = model(ids[None]).logits[0]
            losses.append(F.cross_entropy(logits[:-1], ids[1:], reduction="none")[len(prompt) - 1:])
        return float(torch.cat(losses).mean())  # over the trained tokens of both

    assert abs(first_loss - loss_of(reference)) < 1e-5 * first_loss
    assert abs(last_loss - loss_of(PeftModel.from_pretrained(reference, run))) < 1e-5 * last_loss
    assert last_loss < first_loss
