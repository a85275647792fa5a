"""Adapter: all trainable parameters in one flat fp32 vector, initialized like PEFT's.

The script makes its optimizer, run/checkpoints.py saves it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_qlora.config import Config
from fsdp_qlora.layer.layer import DecoderLayer
from fsdp_qlora.layer.linears import OPTIM_BLOCKSIZE
from fsdp_qlora.lora.init_adapter import read_adapter
from fsdp_qlora.lora.peft_names import (
    expert_slices, peft_name, stack_experts, token_row_names)
from fsdp_qlora.model.fsdp import local_part, set_local
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.token_rows import TokenRows
from fsdp_qlora.ranks import all_gather, is_rank_0, raise_on_all_ranks


TOKEN_ROWS = ".token_rows"  # ends names of optimizer state in checkpoints
MakeOptimizer = Callable[[nn.Parameter, Config], torch.optim.Optimizer]


class Adapter:
    """This rank's shard of all layers' adapters, in one fp32 vector [layers x n_own]: `weights`,
    and its gradient `grad`. Behind it are the rows of --trainable_tokens, whole on every rank.

    With one tensor instead of a thousand, the optimizer is one kernel and its state is pageable.
    Layers compute with views of it. A shard has whole blocks of the optimizer's 8-bit state, so the
    state is the same vector on any number of GPUs, only cut at other places.
    """

    def __init__(self, model: Model, device: torch.device, token_ids: Sequence[int] = (),
                 initial_token_rows: torch.Tensor | None = None) -> None:
        """`initial_token_rows`: the result of initial_token_rows() for these tokens."""
        initial_token_rows = torch.empty(0) if initial_token_rows is None else initial_token_rows
        self.model, self.token_ids, self.initial_token_rows = model, token_ids, initial_token_rows
        self.arch, self.layers, self.shard_group = model.arch, model.layers, model.shard_group
        self.shard_rank, self.shard_group_size = model.shard_rank, model.shard_group_size
        lora_rank = model.layers[0].spec.fused_linears[0].lora_rank
        self.expert_slices = expert_slices(self.arch, lora_rank)  # the ones that PEFT's files stack
        (self.n_own,) = {len(local_part(layer.adapter)) for layer in model.layers}  # all alike
        n_rows = initial_token_rows.numel()
        self.n_token_row_weights = math.ceil(n_rows / OPTIM_BLOCKSIZE) * OPTIM_BLOCKSIZE  # padded
        n_weights = len(self.layers) * self.n_own + self.n_token_row_weights
        self.weights = nn.Parameter(torch.zeros(n_weights, device=device))
        self.weights.grad = self.grad = torch.zeros_like(self.weights)
        # each layer's `adapter` and its gradient are views of these two, so that backward adds to
        # weights.grad and the optimizer changes the layers' adapters
        views = self.by_layer(self.weights.data), self.by_layer(self.weights.grad)
        for layer, weights, grad in zip(self.layers, *views):
            set_local(layer, "adapter", weights)
            p = layer.adapter
            p.grad = DTensor(grad, p._spec, requires_grad=False) if isinstance(p, DTensor) else grad
        self.n_trainable = sum(math.prod(shape) for i in range(len(self.layers))
                               for _, shape in self.peft_slices(i).values()) + n_rows
        if n_rows:
            rows, grad = (self.token_part(x)[:n_rows].view_as(initial_token_rows)
                          for x in (self.weights.data, self.grad))
            model.token_rows = TokenRows(token_ids, model.local_rows, rows, grad)

    def by_layer(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the layers' part, [layers, n], of a vector with the form of `weights` or of
        optimizer state for it."""
        return vector[: len(vector) - len(self.token_part(vector))].view(len(self.layers), -1)

    def token_part(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the part of such a vector that is for the rows of --trainable_tokens."""
        # by ratio, because absmax has one value per OPTIM_BLOCKSIZE weights
        return vector[len(vector) - len(vector) * self.n_token_row_weights // len(self.weights) :]

    def peft_slices(self, i: int) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Return {PEFT's name: (slice of layer i's adapter, shape)}."""
        slices = self.layers[i].spec.adapter_slices()
        return {peft_name(self.arch, i, *part): where for part, where in slices.items()}

    def set_layer(self, i: int, values: dict[str, torch.Tensor]) -> None:
        """Set the adapter of layer i from {PEFT's name: whole tensor}."""
        whole = torch.zeros(self.shard_group_size, self.n_own)
        for name, (where, _) in self.peft_slices(i).items():
            whole.view(-1)[where] = values[name].reshape(-1)
        self.by_layer(self.weights.data)[i] = whole[self.shard_rank]

    def set_token_rows(self, values: dict[str, torch.Tensor]) -> None:
        """Set the rows of --trainable_tokens, if there are any, from {PEFT's name: fp32 tensor}."""
        if self.model.token_rows:
            names = token_row_names(self.arch)
            self.model.token_rows.rows.data.copy_(torch.stack([values[name] for name in names]))
            self.model.write_token_rows()

    def set_weights(self, weights: torch.Tensor) -> None:
        """Set all weights to a copy of `weights` that was made earlier."""
        self.weights.data.copy_(weights)
        self.model.write_token_rows()

    def initialize(self, config: Config) -> None:
        """Load --init_adapter, or set PEFT's initial values: A is random, the same on any number of
        ranks; B is zero; DoRA's magnitudes are the norms of the base weights' rows. All ranks must
        call this."""
        with raise_on_all_ranks():
            loaded = (read_adapter(config, self.arch, self.token_ids)
                      if config.init_adapter else None)
        for i, layer in enumerate(self.layers):
            self.set_layer(i, loaded or self.initial_values(i, layer, config.seed))
        initial = dict(zip(token_row_names(self.arch), self.initial_token_rows))
        self.set_token_rows(loaded or initial)

    def initial_values(self, i: int, layer: DecoderLayer, seed: int) -> dict[str, torch.Tensor]:
        """Return the initial {PEFT's name: tensor} of layer i."""
        values = {}
        for (linear, key), (_, shape) in layer.spec.adapter_slices().items():
            name = peft_name(self.arch, i, linear, key)
            values[name] = torch.zeros(shape)
            if key == "lora_magnitude_vector":
                values[name] = layer.weight_norms[linear].cpu()
            elif key == "lora_A.weight":
                generator = torch.Generator().manual_seed(seed ^ zlib.crc32(name.encode()))
                nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
        return values

    def gather(self, vector: torch.Tensor) -> Iterator[torch.Tensor | None]:
        """Yield each layer's whole part of a vector that is sharded like `weights`: a CPU tensor on
        rank 0, None on other ranks. All ranks must call this, and exhaust it."""
        for own in self.by_layer(vector):
            if self.shard_group_size > 1:  # clone, because NCCL must not read paged memory
                own = all_gather(own.clone(), self.shard_group).view(-1)
            yield own.cpu() if is_rank_0() else None

    def gather_weights(self) -> dict[str, torch.Tensor]:
        """Return {name in PEFT's files: whole fp32 tensor on the CPU} on rank 0, {} on other ranks.
        All ranks must call this."""
        weights = {}
        for i, whole in enumerate(self.gather(self.weights.data)):
            if is_rank_0():
                views = {name: whole[x].view(shape)
                         for name, (x, shape) in self.peft_slices(i).items()}
                weights |= stack_experts(views, self.expert_slices)
        if self.model.token_rows and is_rank_0():
            tables = self.model.token_rows.rows.detach().cpu()
            weights |= {name: rows.clone()
                        for name, rows in zip(token_row_names(self.arch), tables)}
        return weights

    def gather_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the optimizer's state as a checkpoint has it, from sharded_state(): whole CPU
        tensors on rank 0, {name: [layers, n]}, and {name + TOKEN_ROWS: [n]} of the rows of
        --trainable_tokens; {} on other ranks. All ranks must call this."""
        saved = {}
        for name, vector in state.items():
            layers = [whole for whole in self.gather(vector) if whole is not None]
            if is_rank_0():
                saved[name] = torch.stack(layers)
                if self.n_token_row_weights:
                    saved[name + TOKEN_ROWS] = self.token_part(vector).cpu()
        return saved

    def set_state(self, state: Mapping[str, torch.Tensor],
                  saved: Mapping[str, torch.Tensor]) -> None:
        """Set `state`, from sharded_state(), to a result of gather_state(), perhaps of other ranks.
        """
        for name, vector in state.items():
            own = self.by_layer(vector)
            # values that `saved` lacks; < 0: padding to cut
            missing = own.shape[1] * self.shard_group_size - saved[name].shape[1]
            whole = F.pad(saved[name], (0, missing))
            own.copy_(whole.unflatten(1, (self.shard_group_size, -1))[:, self.shard_rank])
            if self.n_token_row_weights:
                self.token_part(vector).copy_(saved[name + TOKEN_ROWS])

    def largest_weight(self) -> float:
        """Return the largest absolute value of all weights. All ranks must call this."""
        return float(all_gather(self.weights.detach().abs().max()).max())


def sharded_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of the part of the optimizer's state that is sharded like the weights:
    one value per weight, or bitsandbytes' scales of blocks of weights."""
    (weights,) = optimizer.param_groups[0]["params"]
    state = optimizer.state[weights]
    sharded = {name: value for name, value in state.items() if name.startswith("absmax")
               or torch.is_tensor(value) and value.numel() == weights.numel()}
    # `step` is the run's, the qmaps are constants
    others = state.keys() - sharded.keys() - {"step", "qmap1", "qmap2"}
    assert not others, f"checkpoints would lose the optimizer's {', '.join(sorted(others))}"
    return sharded


def optimizer_bytes_per_weight(make_optimizer: MakeOptimizer, config: Config) -> float:
    """Return the bytes of optimizer state per weight that must be in GPU memory."""
    state_bytes, is_paged = probe_optimizer(make_optimizer, config)
    return 0 if is_paged else state_bytes


def probe_optimizer(make_optimizer: MakeOptimizer, config: Config) -> tuple[float, bool]:
    """Return the bytes of optimizer state per weight, and whether that is paged."""
    weights = nn.Parameter(torch.zeros(4 * OPTIM_BLOCKSIZE))
    weights.grad = torch.zeros_like(weights)
    optimizer = make_optimizer(weights, config)
    if not optimizer.state:
        optimizer.step()  # creates the state
    state_bytes = sum(value.nbytes for value in sharded_state(optimizer).values()) / len(weights)
    return state_bytes, getattr(optimizer, "is_paged", False)
