"""All trainable parameters: one flat fp32 vector, initialized like PEFT's.

The script makes its optimizer, run/checkpoints.py saves it.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig
from safetensors import SafetensorError
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from fsdp_qlora.config import Config
from fsdp_qlora.files import read_json
from fsdp_qlora.layer.layer import DecoderLayer, LayerSpec
from fsdp_qlora.layer.linears import STATE_BLOCK
from fsdp_qlora.lora.peft_files import ADAPTER_FILES, open_adapter
from fsdp_qlora.lora.peft_names import (
    as_saved, expert_parts, expert_settings, lora_settings, peft_name, stack_experts,
    token_row_names, token_row_settings, unstack_experts)
from fsdp_qlora.model.model import Model
from fsdp_qlora.model.shards import local_part, set_local
from fsdp_qlora.model.token_rows import TokenRows
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.reader import read_tensor, tensors_of
from fsdp_qlora.pretrained.tensor_names import renamed
from fsdp_qlora.ranks import all_gather, explain, is_rank_0, log, raise_on_all_ranks

KINDS = {"lora": "LoRA", "rslora": "rsLoRA", "dora": "DoRA"}  # in the log
# settings of adapter_config.json: the flags that give the same
SETTING_FLAGS = {"r": "--lora_rank", "lora_alpha": "--lora_alpha", "use_dora": "--adapter",
                 "use_rslora": "--adapter", "trainable_token_indices": "--trainable_tokens"}
TOKEN_ROWS = ".token_rows"  # ends names of optimizer state in checkpoints


def resolve_adapter(
    arch: Architecture, config: Config, base_name: str, token_ids: Sequence[int] = (),
) -> tuple[LoraConfig, list[str]]:
    """Return PEFT's LoraConfig, and the names, within a layer, of the linears that get an adapter.
    `token_ids`: the tokens whose rows are trained. Raises ValueError."""
    if config.trainable_tokens and (arch.per_layer or arch.embedding_norm):
        raise ValueError("--trainable_tokens: this model's embedding does more than PEFT computes"
                         f" with trained rows ({arch.family}): drop the flag")
    if config.trainable_tokens and arch.head_bias:
        raise ValueError("--trainable_tokens: PEFT 0.21 ignores the bias of an lm_head with trained"
                         f" rows ({arch.family}): drop the flag")
    words = requested_words(arch, config)
    log(f"adapter: {KINDS[config.adapter]}, rank {config.lora_rank}, alpha {config.lora_alpha}, on"
        f" {' '.join(words)}")
    adapted = arch.adapted(config.target_modules)
    check_rank(arch, config.lora_rank, adapted)
    lora_config = lora_settings(
        arch, config.lora_rank, config.lora_alpha, config.adapter, adapted,
        lora_dropout=config.lora_dropout, target_modules=peft_targets(arch, config, words),
        task_type="CAUSAL_LM", base_model_name_or_path=base_name,
        trainable_token_indices=token_row_settings(arch, token_ids))
    return lora_config, adapted


def check_rank(arch: Architecture, rank: int, adapted: list[str]) -> None:
    """Raise ValueError for a rank that no adapted linear can use, and log the linears that cannot
    use all of it. PEFT accepts any rank, but no change of a linear has a higher rank than its
    smaller side."""
    sides = {x.name.rsplit(".", 1)[-1]: min(x.out_features, x.in_features)
             for x in arch.all_linears() if x.name in adapted}
    if rank > (most := max(sides.values())):
        raise ValueError(f"--lora_rank {rank}: a rank above {most} adds nothing to these linears,"
                         f" as the smaller side of none is longer; use at most {most}; 8 to 64 are"
                         " usual")
    if small := [f"{name} ({side})" for name, side in sorted(sides.items()) if rank > side]:
        log(f"note: --lora_rank {rank} is more than the smaller side of {', '.join(small)}; the"
            " part above adds nothing there")


def requested_words(arch: Architecture, config: Config) -> list[str]:
    """Return the words of --target_modules, each of which names linears of the model; all-linear is
    replaced by the names that it means. Raises ValueError for other words."""
    experts, names, default = arch.experts(), arch.adaptable(), arch.adapted(["all-linear"])
    short = sorted({name.rsplit(".", 1)[-1] for name in default})
    others = [name for name in names if name not in default]
    expert_names = {name.rsplit(".", 1)[-1] for name in experts}
    choices = ", ".join([*short, *others, *["experts"] * bool(experts), "all-linear"])
    words = list(dict.fromkeys(name for word in config.target_modules for name in (
        short if word == "all-linear" else [word])))
    for word in words:
        if word == "experts" and experts:
            continue
        found = [name for name in names if f".{name}".endswith(f".{word}")]
        if word in expert_names:
            raise ValueError(f"--target_modules {word}: PEFT uses this name for all experts, which"
                             f" are experts here; choose from {choices}")
        if not found:
            raise ValueError(f"--target_modules {word}: no such linear in the decoder layers;"
                             f" choose from {choices}")
        ends = {name.rsplit(".", 1)[-1] for name in found}
        if ends & expert_names and arch.moe and arch.moe.adapters == "modules":
            log(f"warning: --target_modules {word}: PEFT 0.21 cannot load adapters on {found[0]};"
                " vLLM reads them by their names")
    return words


def peft_targets(arch: Architecture, config: Config, words: list[str]) -> list[str] | str:
    """Return PEFT's target_modules for requested_words(). Raises ValueError."""
    targets = words
    if "experts" in words:
        refuse_expert_adapters(arch, config)
        experts, renames = arch.experts(), arch.moe.renames if arch.moe else ()
        leaves = {renamed(name, renames).rsplit(".", 1)[-1] for name in experts}
        has_own_settings = expert_settings(arch, config.lora_rank, config.lora_alpha, experts)
        targets = sorted({*words} - {"experts"} | (set() if has_own_settings else leaves))
        if arch.expert_down[0].mxfp4:
            log("warning: --target_modules experts: PEFT 0.21 finds no experts in an MXFP4 model."
                " Load it with Mxfp4Config(dequantize=True), or merge, to bf16")
    if arch.module_prefix == "model." or not targets:
        return targets
    # a vision tower may have linears with the same names
    either = "|".join(re.escape(target) for target in targets)
    return rf"{re.escape(arch.module_prefix)}layers\.\d+\..*\b({either})"


def refuse_expert_adapters(arch: Architecture, config: Config) -> None:
    """Raise ValueError if the adapters that the flags request are not possible on experts."""
    if config.adapter == "dora" or config.lora_dropout:
        raise ValueError("--target_modules experts: their adapters have neither DoRA nor dropout,"
                         " here as in PEFT")
    if config.lora_rank % 8:
        raise ValueError(f"--lora_rank {config.lora_rank}: adapters of experts need a multiple of"
                         " 8: torch's grouped products need rows of a multiple of 16 bytes")
    if config.adapter == "rslora" and not (arch.moe and arch.moe.one_gate_up):
        raise ValueError("--target_modules experts: with --adapter rslora PEFT 0.21 would count"
                         " gate and up 1.41 times: use lora")


class Adapter:
    """This rank's shard of all layers' adapters, in one fp32 vector [layers x n_own]: `weights`,
    and its gradient `grad`. Behind it are the rows of --trainable_tokens, whole on every rank.

    With one tensor instead of a thousand, the optimizer is one kernel and its state is pageable.
    Layers compute with views of it. A shard has whole blocks of the optimizer's 8-bit state, so the
    state is the same vector on any number of GPUs, only cut at other places.
    """

    def __init__(self, model: Model, device: torch.device, token_ids: Sequence[int] = (),
                 initial_rows: torch.Tensor | None = None) -> None:
        """`initial_rows`: the result of initial_rows() for these tokens."""
        initial_rows = torch.empty(0) if initial_rows is None else initial_rows
        self.model, self.token_ids, self.initial_rows = model, token_ids, initial_rows
        self.arch, self.layers, self.group = model.arch, model.layers, model.group
        self.shard, self.shards = model.shard, model.shards
        rank = model.layers[0].spec.fused_linears[0].lora_rank
        self.expert_parts = expert_parts(self.arch, rank)  # the ones that PEFT's files stack
        (self.n_own,) = {len(local_part(layer.adapter)) for layer in model.layers}  # all alike
        n_rows = initial_rows.numel()
        self.n_token_weights = math.ceil(n_rows / STATE_BLOCK) * STATE_BLOCK
        n_weights = len(self.layers) * self.n_own + self.n_token_weights
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
                               for _, shape in self.names(i).values()) + n_rows
        if n_rows:
            rows, grad = (self.token_part(x)[:n_rows].view_as(initial_rows)
                          for x in (self.weights.data, self.grad))
            model.token_rows = TokenRows(token_ids, model.own_rows, rows, grad)

    def by_layer(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the layers' part, [layers, n], of a vector with the form of `weights` or of
        optimizer state for it."""
        return vector[: len(vector) - len(self.token_part(vector))].view(len(self.layers), -1)

    def token_part(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the part of such a vector that is for the rows of --trainable_tokens."""
        # by ratio, because absmax has one value per STATE_BLOCK weights
        return vector[len(vector) - len(vector) * self.n_token_weights // len(self.weights) :]

    def name(self, i: int, linear: str, key: str) -> str:
        """Return PEFT's name of a part of layer i's adapter, see peft_name()."""
        return peft_name(self.arch, i, linear, key)

    def names(self, i: int) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Return {PEFT's name: (slice of layer i's adapter, shape)}."""
        return layer_names(self.arch, i, self.layers[i].spec)

    def set_layer(self, i: int, values: dict[str, torch.Tensor]) -> None:
        """Set the adapter of layer i from {PEFT's name: whole tensor}."""
        whole = torch.zeros(self.shards, self.n_own)
        for name, (where, _) in self.names(i).items():
            whole.view(-1)[where] = values[name].reshape(-1)
        self.by_layer(self.weights.data)[i] = whole[self.shard]

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
        specs = [layer.spec for layer in self.layers]
        with raise_on_all_ranks():
            loaded = (read_adapter(config, self.arch, specs, self.token_ids)
                      if config.init_adapter else None)
        for i, layer in enumerate(self.layers):
            self.set_layer(i, loaded or self.initial_values(i, layer, config.seed))
        self.set_token_rows(loaded or dict(zip(token_row_names(self.arch), self.initial_rows)))

    def initial_values(self, i: int, layer: DecoderLayer, seed: int) -> dict[str, torch.Tensor]:
        """Return the initial {PEFT's name: tensor} of layer i."""
        values = {}
        for (linear, key), (_, shape) in layer.spec.adapter_parts().items():
            name = self.name(i, linear, key)
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
            if self.shards > 1:  # clone, because NCCL must not read paged memory
                own = all_gather(own.clone(), self.group).view(-1)
            yield own.cpu() if is_rank_0() else None

    def gather_weights(self) -> dict[str, torch.Tensor]:
        """Return {name in PEFT's files: whole fp32 tensor on the CPU} on rank 0, {} on other ranks.
        All ranks must call this."""
        weights = {}
        for i, whole in enumerate(self.gather(self.weights.data)):
            if is_rank_0():
                views = {name: whole[x].view(shape) for name, (x, shape) in self.names(i).items()}
                weights |= stack_experts(views, self.expert_parts)
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
                if self.n_token_weights:
                    saved[name + TOKEN_ROWS] = self.token_part(vector).cpu()
        return saved

    def set_state(self, state: Mapping[str, torch.Tensor],
                  saved: Mapping[str, torch.Tensor]) -> None:
        """Set `state`, from sharded_state(), to a result of gather_state(), perhaps of other ranks.
        """
        for name, vector in state.items():
            own = self.by_layer(vector)
            missing = own.shape[1] * self.shards - saved[name].shape[1]  # < 0: padding to cut
            whole = F.pad(saved[name], (0, missing))
            own.copy_(whole.unflatten(1, (self.shards, -1))[:, self.shard])
            if self.n_token_weights:
                self.token_part(vector).copy_(saved[name + TOKEN_ROWS])

    def largest(self) -> float:
        """Return the largest magnitude of all weights. All ranks must call this."""
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


def optimizer_state_bytes(
    make_optimizer: Callable[[nn.Parameter, Config], torch.optim.Optimizer], config: Config,
) -> float:
    """Return the bytes of optimizer state per weight that must be in GPU memory."""
    weights = nn.Parameter(torch.zeros(4 * STATE_BLOCK))
    weights.grad = torch.zeros_like(weights)
    optimizer = make_optimizer(weights, config)
    if getattr(optimizer, "is_paged", False):
        return 0
    optimizer.step()  # creates the state
    return sum(value.nbytes for value in sharded_state(optimizer).values()) / len(weights)


def layer_names(
    arch: Architecture, i: int, spec: LayerSpec,
) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """Return {PEFT's name: (slice of layer i's adapter, shape)}."""
    return {peft_name(arch, i, *part): where for part, where in spec.adapter_parts().items()}


def check_origin(config: Config, base_sha256: str,
                 tokenizer: PreTrainedTokenizerFast | None) -> None:
    """Raise ValueError if the run that --init_adapter comes from had another base model than
    `base_sha256` ("": not known); log a line if it had another chat template. Rank 0 only."""
    directory = Path(str(config.init_adapter))
    saved_config = next((found for place in (directory, directory.resolve().parent)
                         if (found := read_json(place / "train_config.json", {}))), {})
    theirs = saved_config.get("base_sha256")
    if theirs and base_sha256 and theirs != base_sha256 and not config.random_weights:
        raise ValueError(f"--init_adapter {directory}: was trained on another base model,"
                         f" {saved_config.get('base_model')}; --model must be that one, or the"
                         " adapter merged into it without --init_adapter")
    named = read_json(directory / "adapter_config.json", {}).get("base_model_name_or_path")
    if not saved_config and named and Path(named).name != Path(str(config.model)).name:
        log(f"note: --init_adapter {directory}: names {named} as its base model, this run trains on"
            f" {config.model}: are they the same?")
    for place in directory, directory.resolve().parent:
        if (path := place / "chat_template.jinja").is_file() and tokenizer:
            if path.read_text() != tokenizer.chat_template:
                log(f"note: --init_adapter {directory}: was trained with another chat template. To"
                    f" use it: --chat_template {path}")
            break


def read_adapter(config: Config, arch: Architecture, specs: Sequence[LayerSpec],
                 token_ids: Sequence[int] = ()) -> dict[str, torch.Tensor]:
    """Return {PEFT's name: fp32 tensor} of --init_adapter. Raises ValueError unless it has the form
    of this run's adapter, whose layers have these `specs`, with rows of these tokens."""
    directory = Path(str(config.init_adapter))
    with explain(f"--init_adapter {directory}"):
        path, file = (directory / name for name in ADAPTER_FILES)
        try:
            own_arch, arch = arch, as_saved(arch, read_json(path), tensors_of(file))
        except (OSError, ValueError, SafetensorError) as e:
            raise ValueError(f"is not an adapter in PEFT's format: {e}")
        wanted = lora_settings(
            arch, config.lora_rank, config.lora_alpha, config.adapter,
            arch.adapted(config.target_modules),
            trainable_token_indices=token_row_settings(arch, token_ids))
        shapes = {name: shape for i, spec in enumerate(specs)
                  for name, (_, shape) in layer_names(own_arch, i, spec).items()}
        parts = expert_parts(arch, config.lora_rank)
        shapes = {parts[name].name if name in parts else name:
                  parts[name].shape if name in parts else shape for name, shape in shapes.items()}
        rows = dict.fromkeys(token_row_names(arch), (len(token_ids), arch.hidden_size))
        shapes |= rows if token_ids else {}
        stored = open_adapter(directory, wanted, shapes, "this run", SETTING_FLAGS)
        values = {name: read_tensor(tensor, name) for name, tensor in stored.items()}
        own = unstack_experts(values, parts)
        for name, value in stack_experts(own, parts).items():
            if not torch.equal(value, values[name]):
                raise ValueError(f"in its {name} gate and up of an expert are not apart, as they"
                                 " are here")
    return {name: value.float() for name, value in own.items()}
