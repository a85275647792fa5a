"""What softmax attention costs."""

from __future__ import annotations

import dataclasses

from fsdp_qlora.kernels.attention import eager_attention_bytes
from fsdp_qlora.layer.attention_mixer import AttentionMixer, n_head_groups
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionCosts:
    """The costs of an AttentionMixer, a TokenMixerCosts."""

    mixer: AttentionMixer

    elementwise_values = 0  # MixerSublayerCosts counts norms

    @property
    def arch(self) -> Architecture:
        return self.mixer.arch

    @property
    def query_width(self) -> int:
        return self.arch.n_heads * self.arch.head_dim

    @property
    def _qkv_width(self) -> int:
        return self.query_width + 2 * self.arch.n_kv_heads * self.arch.head_dim

    @property
    def saves_projected(self) -> bool:
        return self.mixer.saves_projected

    @property
    def saved_values(self) -> int:
        values = self._qkv_width + self.attention_values
        return values + self.mixer.projected_width * self.saves_projected

    @property
    def attention_values(self) -> int:
        return self.query_width + 2 * self.arch.n_heads  # the logsumexps are in fp32

    def live_bytes(self, plan: Plan) -> int:
        itemsize = plan.dtype.itemsize
        others = 0
        # the gradients of q, k and v, and of attention's output
        values = self._qkv_width + self.query_width
        values += kernel_values(self.arch, plan.micro_batch_tokens * itemsize)
        values += 2 * self.query_width * (self.arch.attention_gate is not None)
        if plan.attention_is_eager:  # repeats keys and values for each query head; has gradients
            values += 4 * self.query_width
            others = eager_attention_bytes(self.arch, self.mixer.window, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * itemsize + others


def kernel_values(arch: Architecture, value_bytes: int) -> int:
    """Return the values per token that groups_backward() needs besides its inputs and results, at
    most: for one group a contiguous gradient of its output, that of the queries in fp32, and those
    of keys and values for each query head; less the outputs of the groups before the last."""
    query_width = arch.n_heads * arch.head_dim
    group_width = query_width // n_head_groups(arch, value_bytes)
    of_group = (5 if arch.n_kv_heads < arch.n_heads else 3) * group_width
    return of_group - (query_width - group_width)
