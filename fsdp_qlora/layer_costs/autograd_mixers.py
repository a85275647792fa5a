"""What the mixers of layer/autograd_mixers.py cost: short convolution, Gated DeltaNet, Mamba-2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from fsdp_qlora.kernels.recurrence import RECURRENCES, RECURRENCE_CHUNK
from fsdp_qlora.layer.autograd_mixers import AutogradMixer
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.family_specs import GatedDeltaNetSpec, Mamba2Spec, ShortConvSpec


@dataclasses.dataclass(frozen=True, eq=False)
class AutogradCosts:
    """The costs of an AutogradMixer, a TokenMixerCosts."""

    mixer: AutogradMixer

    query_width = attention_values = 0

    @property
    def _costs(self) -> FunctionCosts:
        return FUNCTION_COSTS[type(self.mixer.mixer_spec)]

    @property
    def saves_projected(self) -> bool:
        spec = self.mixer.mixer_spec
        if isinstance(spec, GatedDeltaNetSpec):
            return not spec.by_key_head  # else it saves copies of its parts instead
        return not (isinstance(spec, Mamba2Spec) and spec.is_multiplied)

    @property
    def saved_values(self) -> int:
        return self._costs.saved_values(self.mixer.mixer_spec, self.mixer.arch.hidden_size)

    def live_bytes(self, plan: Plan) -> int:
        n, spec = plan.micro_batch_tokens, self.mixer.mixer_spec
        itemsize = plan.dtype.itemsize
        if plan.recurrence_is_eager and (recurrence := RECURRENCES.get(type(spec))):
            return recurrence.eager_bytes_per_token(spec) * n
        return self._costs.live_values(spec, self.mixer.arch.hidden_size) * n * itemsize

    @property
    def elementwise_values(self) -> int:
        return self._costs.elementwise_values(self.mixer.mixer_spec, self.mixer.arch.hidden_size)


@dataclasses.dataclass(frozen=True)
class FunctionCosts:
    """The costs of a function of OTHER_MIXERS, as functions (spec, hidden) -> values per
    token."""

    saved_values: Callable[[Any, int], int]  # saved for backward
    live_values: Callable[[Any, int], int]  # alive at once in backward in addition
    elementwise_values: Callable[[Any, int], int]  # read or written, forward and backward


def delta_saved_values(spec: GatedDeltaNetSpec, hidden: int) -> int:
    """Values that gated_delta_net() saves for backward: `projected`, without b and a if the parts
    are copies; query, key and value as the delta rule reads them; its output, before and after norm
    and gate. For each value head: a chunk's products, g and its input, fp32, and b before and after
    its factor. For each key head: the norms of query and key, fp32."""
    widths = spec.widths
    copied = 2 * spec.n_value_heads * spec.by_key_head
    return (sum(widths.values()) - copied + sum(widths[x] for x in "qkv") + 2 * widths["v"]
            + (RECURRENCE_CHUNK + 6) * spec.n_value_heads + 4 * spec.n_key_heads)


def delta_live_values(spec: GatedDeltaNetSpec, hidden: int) -> int:
    """Values of fla's backward at its end: the states and their gradient; for each value head w,
    its gradient and that of k; u, its gradient, the new values and two gradients of v; those of q
    and k. Besides, the gradients of the gated norm's result and of z, and that of its input, which
    is free by then. Counted in fla 0.6; a row of 262,144 tokens of Qwen3.5-9B took 0.3 % more."""
    states = spec.n_value_heads * spec.key_dim * spec.value_dim // RECURRENCE_CHUNK
    head_values = spec.n_value_heads * spec.key_dim
    widths = spec.widths
    is_grouped = spec.n_key_heads < spec.n_value_heads
    of_key_heads = widths["q"] + widths["k"] * (2 if is_grouped else 1)
    return 2 * states + 3 * head_values + of_key_heads + 6 * widths["v"]


def delta_elementwise_values(spec: GatedDeltaNetSpec, hidden: int) -> int:
    """Values moved by convolution, norm and gate, and by the delta rule's kernels, which take as
    long as moving this many. Counted, not measured."""
    widths = spec.widths
    head_values = spec.n_value_heads * (spec.key_dim + spec.value_dim)
    return 10 * sum(widths[x] for x in "qkv") + 8 * widths["v"] + 40 * head_values


def mamba2_saved_values(spec: Mamba2Spec, hidden: int) -> int:
    """Values that mamba2() saves for backward: `projected`; x, B and C as the scan reads them;
    decay, step and step's two intermediate results, fp32; the scan's output plus D x, before and
    after norm and gate."""
    widths = spec.widths
    return (sum(widths.values()) + widths["x"] + widths["B"] + widths["C"] + 2 * widths["x"]
            + 8 * spec.n_heads)


def mamba2_live_values(spec: Mamba2Spec, hidden: int) -> int:
    """Gradients of the saved values; B and C and their gradients for each head; fla's states, fp32.
    Counted, not measured."""
    widths = spec.widths
    states = spec.n_heads * spec.state_size * spec.head_dim // RECURRENCE_CHUNK
    return (2 * sum(widths.values()) + 4 * spec.n_heads * spec.state_size + 3 * widths["x"]
            + 4 * states)


def mamba2_elementwise_values(spec: Mamba2Spec, hidden: int) -> int:
    """Values moved, see delta_elementwise_values()."""
    widths = spec.widths
    head_values = spec.n_heads * (spec.state_size + spec.head_dim)
    return 10 * (widths["x"] + widths["B"] + widths["C"]) + 12 * widths["x"] + 30 * head_values


FUNCTION_COSTS: dict[type, FunctionCosts] = {
    # saved: projected, b * x, conv's result, and that result times c
    ShortConvSpec: FunctionCosts(
        lambda spec, hidden: 6 * hidden, lambda spec, hidden: 7 * hidden,
        lambda spec, hidden: 25 * hidden),
    GatedDeltaNetSpec: FunctionCosts(
        delta_saved_values, delta_live_values, delta_elementwise_values),
    Mamba2Spec: FunctionCosts(mamba2_saved_values, mamba2_live_values, mamba2_elementwise_values)}
