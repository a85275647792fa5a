"""Which rows an optimizer step works on, dealt into bins of equal work, and the tensors of a bin.
It stands on forms.py for what is not trained; Rows come from encode.py, and what is computed of a
bin is in the model."""

import dataclasses
import functools
import heapq
import math

import torch
import torch.nn.functional as F

from fsdp_qlora.data.forms import IGNORE
from fsdp_qlora.elementwise import mix
from fsdp_qlora.offload import GPUStore


@dataclasses.dataclass
class Bin:
    """What a GPU works on at once: documents, each one of Rows, end to end. Padding to a round
    length is documents of its own, no longer than the others."""

    input_ids: torch.Tensor  # int64 [tokens]
    n_unpadded: torch.Tensor  # int64 [1], the first so many are of rows, the others padding
    position_ids: torch.Tensor  # int64 [tokens], 0 at the first token of each document
    cu_seqlens: torch.Tensor  # int32 [documents + 1], where they begin and end
    trained_at: torch.Tensor  # int64 [n], tokens whose next token is trained, padded with 0
    labels: torch.Tensor  # int64 [n], these next tokens, padded with IGNORE
    dropout_keys: torch.Tensor | None  # int64 [tokens], see drop(); None: no dropout
    lengths: tuple  # of the documents, in tokens
    longest: int  # upper bound of `lengths`
    kernels: dict = None  # the attention to use: {"full": function, "window": function}
    store: object = None  # where layers put what they keep
    ropes: dict = None  # cos and sin, see rope_tables


def step_rows(step, n_rows, config):
    """Indices of the rows of an optimizer step (the first is 1): every epoch is a new shuffle."""
    drawn = range((step - 1) * config.batch_size, step * config.batch_size)
    return torch.stack([epoch_order(i // n_rows, n_rows, config.seed)[i % n_rows] for i in drawn])


@functools.lru_cache(2)  # a step may span two epochs
def epoch_order(epoch, n_rows, seed):
    """The shuffled indices of one epoch's rows."""
    return torch.randperm(n_rows, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def deal_rows(lengths, processes, max_tokens):
    """Deal rows of these lengths into micro-batches, each of one bin per process. Returns for each
    micro-batch a list of row indices per process.

    They are the fewest micro-batches for which every bin, all filled evenly, stays within
    `max_tokens`. All ranks know all lengths, so that all get the same.
    """
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    fewest = max(1, math.ceil(sum(lengths) / (processes * max_tokens)))
    for n in range(fewest, len(lengths) + 1):
        # a heap of (tokens, number, rows): the emptiest bin comes first
        bins = [(0, number, []) for number in range(n * processes)]
        for i in longest_first:
            tokens, number, rows = bins[0]
            heapq.heapreplace(bins, (tokens + lengths[i], number, [*rows, i]))
        if max(bins)[0] <= max_tokens:
            break
    bins.sort(key=lambda bin: (-bin[0], bin[1]))  # the fullest first
    fullest_first = [sorted(rows) for _, _, rows in bins]
    return [fullest_first[i : i + processes] for i in range(0, len(bins), processes)]


def round_up(n, device):
    """On a GPU, n up to the next of a few lengths, 16 from one power of 2 to the next: cuBLAS and
    cuDNN choose kernels anew for each new length, and a CUDA graph has one."""
    if device.type == "cpu":
        return n
    multiple = max(64, 2 ** n.bit_length() // 32)
    return math.ceil(n / multiple) * multiple


def make_bin(batch, micro_batch, rank, step_key, run):
    """This rank's Bin of a micro-batch of deal_rows(). `batch` are the Rows of the step, `step_key`
    seeds dropout; None: an evaluation. All ranks pad to one shape, because they compute embedding
    and head together, and every rank waits for the longest bin anyway."""
    n_tokens, n_labels, longest = shape_of_bins(batch, micro_batch, run)
    rows = micro_batch[rank]
    lengths = batch.lengths[rows].tolist()
    n_unpadded = torch.tensor([sum(lengths)])
    n_padding = n_tokens - sum(lengths)
    lengths += [longest] * (n_padding // longest)
    if n_padding % longest:
        lengths.append(n_padding % longest)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    ids, labels = torch.zeros(n_tokens, dtype=torch.int64), torch.full((n_tokens,), IGNORE)
    for i, start in zip(rows, starts.tolist()):
        row_ids, row_labels = batch.tokens(i)
        ids[start : start + len(row_ids)] = row_ids
        labels[start : start + len(row_ids) - 1] = row_labels[1:]
    position_ids = torch.arange(n_tokens) - starts[:-1].repeat_interleave(starts.diff())
    keys = None
    if step_key is not None:
        documents = torch.tensor(rows + [-1] * (len(lengths) - len(rows)))
        seeds = mix(step_key + documents).repeat_interleave(starts.diff())
        keys = mix(seeds + position_ids)  # drop() adds a number for layer and site to each
    trained_at = (labels != IGNORE).nonzero().view(-1)
    padding = (0, n_labels - len(trained_at))
    same = len(set(lengths)) == 1
    if run.plan.graphs and not same:  # one graph serves several numbers of documents
        longest = 2 ** (longest - 1).bit_length()
        spare = 2 ** len(lengths).bit_length() - len(lengths)
        starts = F.pad(starts, (0, spare), value=n_tokens)
    tensors = [ids, n_unpadded, position_ids, starts.int(), F.pad(trained_at, padding),
               F.pad(labels[trained_at], padding, value=IGNORE), keys]
    if run.device.type == "cuda":
        tensors = [None if tensor is None else tensor.pin_memory().to(run.device, non_blocking=True)
                   for tensor in tensors]
    store = GPUStore() if step_key is None else run.store  # an evaluation has no backward
    return Bin(*tensors, tuple(lengths), longest, run.kernels["same" if same else "any"], store)


def shape_of_bins(batch, micro_batch, run):
    """(tokens, trained tokens, longest document) to which all ranks pad their bin."""
    lengths = [batch.lengths[rows].tolist() for rows in micro_batch]
    all_lengths = {length for row_lengths in lengths for length in row_lengths}
    n_tokens = max(map(sum, lengths))
    if len(all_lengths) > 1:
        n_tokens = min(round_up(n_tokens, run.device), run.plan.bin_tokens)  # no more than planned
    n_trained = max(int(batch.n_trained[rows].sum()) for rows in micro_batch)
    return n_tokens, round_up(n_trained, run.device), max(all_lengths)
