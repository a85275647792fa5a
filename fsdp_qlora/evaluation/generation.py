"""Sample answers: greedy answers to held-out prompts during training.

Each token costs one forward of all samples. There is no cache of keys and values: what answers is
the model that trains, sharded, offloaded, with experts.
"""

from __future__ import annotations

import itertools
import math
import time

import torch

from fsdp_qlora.data.collate import make_micro_batch
from fsdp_qlora.data.example_formats import IGNORE_INDEX
from fsdp_qlora.data.packing import micro_steps_of
from fsdp_qlora.data.rows import Rows, make_rows
from fsdp_qlora.micro_batch.context_parallel import ONLY_PROCESS
from fsdp_qlora.model.fsdp import reshard_all
from fsdp_qlora.model.lm_head import greedy_tokens
from fsdp_qlora.model.model import Model
from fsdp_qlora.ranks import all_gather_objects
from fsdp_qlora.run.metrics import beginning, ending
from fsdp_qlora.run.run import Run
from fsdp_qlora.run.status import Status


SAMPLE_TOKENS = 64  # in an answer, at most
N_SAMPLES = 2  # without --eval_samples
TIME_FRACTION = 0.01  # of training time, which samples may take without --eval_samples
LONGEST_TEXT = 1000  # characters shown of the end of a prompt, and of the expected answer


def generate_samples(run: Run, pace: float | None) -> list[dict[str, str]]:
    """Return [{"prompt", "answer", "expected"}] of the first held-out rows, as texts with special
    tokens; [] if the run was asked to stop, or if samples were not requested and would take too
    long. `pace`: rank 0's seconds per step so far; None: not known yet. All ranks must call this.
    """
    config, rows, tokenizer = run.config, run.eval_rows, run.job.base.tokenizer
    n = config.eval_samples
    budget = math.inf
    if n is None:
        n = N_SAMPLES
        budget = TIME_FRACTION * (pace or 0) * (config.eval_every or config.max_steps or 1)
    if not (n and rows and tokenizer):
        return []
    # each rank computes whole prompts, with context parallelism too
    prompts, expected = choose_prompts(rows, n, run.plan.micro_batch_tokens)
    stop_ids = {ids[-1] for ids in expected if ids} & tokenizer.added_tokens_decoder.keys()
    stop_ids.add(tokenizer.eos_token_id)
    answers = generate(run.model, run.status, prompts, stop_ids, budget)
    texts = [[tokenizer.decode(ids) for ids in some] for some in (prompts, answers, expected)]
    return [{"prompt": ending(prompt, LONGEST_TEXT), "answer": answer,
             "expected": beginning(want, LONGEST_TEXT)}
            for prompt, answer, want in zip(*texts)]


def choose_prompts(
    rows: Rows, n: int, max_tokens: float = math.inf
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the first n different prompts of good answers that are shorter than `max_tokens`, and
    the expected answers to them, as tokens. If a row is in the loss from its beginning, its prompt
    is its first half, 32 tokens at most."""
    documents = rows.as_documents()
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    for i in rows.desirable.nonzero().view(-1)[: 10 * n].tolist():
        ids, labels = (tensor.tolist() for tensor in documents.document(i))
        n_prompt = int(documents.prompt_lengths[i])
        if n_prompt < 2:  # BOS alone is not a prompt
            n_prompt = max(1, min(32, len(ids) // 2))
        end = next((k for k in range(n_prompt, len(ids)) if labels[k] == IGNORE_INDEX), len(ids))
        if n_prompt < max_tokens and ids[:n_prompt] not in prompts:
            prompts.append(ids[:n_prompt])
            expected.append(ids[n_prompt:end])
    return prompts[:n], expected[:n]


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # compiling would take longer than these few tokens
def generate(model: Model, status: Status, prompts: list[list[int]], stop_ids: set[int],
             budget: float) -> list[list[int]]:
    """Return the tokens that the model generates after each prompt, up to the first one in
    `stop_ids`; [] if the run was asked to stop, or if this would take longer than rank 0's
    `budget`, in seconds. All ranks must call this, and each computes the same."""
    max_new_tokens = [min(SAMPLE_TOKENS, model.plan.micro_batch_tokens - len(prompt))
                      for prompt in prompts]
    # pad to the final length, so that the shape of a micro-batch stays the same; attention is
    # causal, so tokens after an answer's end do not change it
    padded = [prompt + [0] * n_new for prompt, n_new in zip(prompts, max_new_tokens)]
    rows, answers = make_rows([(ids, ids) for ids in padded]), [[] for _ in prompts]
    micro_batch_format = model.micro_batch_format._replace(context_group=ONLY_PROCESS)
    micro_steps = micro_steps_of(rows, micro_batch_format)
    for (documents,) in micro_steps:
        micro_batch = make_micro_batch(rows, [documents], micro_batch_format)
        ends = dict(zip(documents, itertools.accumulate(len(padded[i]) for i in documents)))
        unfinished = documents
        while unfinished:
            started = time.monotonic()
            status.extend_deadline()
            last_positions = [ends[i] - max_new_tokens[i] + len(answers[i]) - 1 for i in unfinished]
            hidden_states = model(micro_batch, wants_loss=False)[last_positions]
            tokens = greedy_tokens(model, hidden_states).tolist()
            for i, position, token in zip(unfinished, last_positions, tokens):
                answers[i].append(token)
                if len(answers[i]) < max_new_tokens[i]:
                    micro_batch.input_ids[position + 1] = token
            unfinished = [i for i in unfinished
                          if len(answers[i]) < max_new_tokens[i] and answers[i][-1] not in stop_ids]
            expected_seconds = (time.monotonic() - started) * SAMPLE_TOKENS * len(micro_steps)
            is_second = max(map(len, answers)) == 2  # the first token takes longer than the others
            of_ranks = all_gather_objects(
                (unfinished, expected_seconds > budget and is_second, status.stop_reason))
            # rank 0 decides, because another copy of the model may round differently
            unfinished, is_too_slow, _ = of_ranks[0]
            if is_too_slow or any(reason for *_, reason in of_ranks):
                reshard_all(model)
                return []
    reshard_all(model)
    return answers
