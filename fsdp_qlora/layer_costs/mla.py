"""What latent attention costs."""

from __future__ import annotations

import dataclasses

from fsdp_qlora.kernels.attention import eager_attention_bytes
from fsdp_qlora.layer.attention_mixer import n_head_groups
from fsdp_qlora.layer.linears import FusedLinear
from fsdp_qlora.layer.mla import MLAMixer
from fsdp_qlora.layer_costs.attention_mixer import kernel_values
from fsdp_qlora.layer_costs.lora_matmul import dora_bytes
from fsdp_qlora.plan import Plan
from fsdp_qlora.pretrained.architecture import Architecture
from fsdp_qlora.pretrained.family_specs import MLASpec


@dataclasses.dataclass(frozen=True, eq=False)
class MLACosts:
    """The costs of an MLAMixer, a TokenMixerCosts."""

    mixer: MLAMixer

    @property
    def arch(self) -> Architecture:
        return self.mixer.arch

    @property
    def mla(self) -> MLASpec:
        return self.mixer.mla

    @property
    def kv_b(self) -> FusedLinear:
        return self.mixer.kv_b

    @property
    def query_width(self) -> int:
        return self.arch.n_heads * self.arch.head_dim

    @property
    def saves_projected(self) -> bool:
        return self.mixer.q_b is not None

    @property
    def saved_values(self) -> int:
        """Latents and LoRA's hidden values; query, key and value, each as wide as the queries; the
        results of attention."""
        latents = self.mixer.projected_width if self.saves_projected else self.mla.kv_rank
        padded_lora_width = sum(fused.padded_lora_width for fused in self.mixer.fused_linears)
        return latents + padded_lora_width + 3 * self.query_width + self.attention_values

    @property
    def attention_values(self) -> int:
        return self.query_width + 2 * self.arch.n_heads  # the logsumexps are in fp32

    @property
    def elementwise_values(self) -> int:
        """Values for the norms of latents, counted like the sublayer's own norm, and for heads,
        forward and backward."""
        return 15 * ((self.mla.q_rank or 0) + self.mla.kv_rank) + 8 * self.query_width

    def live_bytes(self, plan: Plan) -> int:
        itemsize = plan.dtype.itemsize
        if plan.context_parallel_size > 1:
            return int(self._context_live_values(plan) * plan.micro_batch_tokens * itemsize)
        others = 0
        # the gradients of query, key, value and attention's output, and of the tensors that these
        # heads are made from
        values = 4 * self.query_width + self.query_width + self.kv_b.out_features
        dora = max(dora_bytes(fused, 1, itemsize) for fused in self.mixer.fused_linears)
        values += max(kernel_values(self.arch, plan.micro_batch_tokens * itemsize),
                      dora // itemsize)  # not at the same time
        if plan.attention_is_eager:
            values += 4 * self.query_width
            others = eager_attention_bytes(self.arch, None, plan.micro_batch_tokens)
        return values * plan.micro_batch_tokens * itemsize + others

    # ---- with context parallelism ----

    @property
    def exchanged_values(self) -> int:
        """Values that go from rank to rank."""
        return self.mla.kv_rank + self.mla.rope_dim

    @property
    def values_to_make_kv(self) -> int:
        """Values that one pass reads or writes to make the heads of a key and of its value."""
        return self.kv_b.out_features + 2 * self.query_width

    def context_saved_values(self, plan: Plan) -> float:
        """Return how many values per token of a rank's own are saved beside saved_values: instead
        of heads of keys and values the rows that were received, LoRA's hidden values and kv_b's
        outputs."""
        rows = self.exchanged_values + self.kv_b.padded_lora_width + self.kv_b.out_features
        if plan.attention_is_eager:  # its graph keeps keys and values
            rows += 2 * self.query_width
        return plan.visible_keys_per_token * rows - 2 * self.query_width

    def _context_live_values(self, plan: Plan) -> float:
        """Return live_bytes(), besides context_saved_values(), as values per token of a rank's own.
        The gradients of kv_b's outputs replace these."""
        seen, queries = plan.visible_keys_per_token, self.query_width
        n_groups = n_head_groups(self.arch, plan.micro_batch_tokens * plan.dtype.itemsize)
        # a group's keys, values, and their gradients; where pieces run one after the other, also
        # those of a call, which are copied to their places; and see kernel_values()
        in_a_call = 0 if plan.is_varlen else seen - 1
        group = 4 * seen + 2 * in_a_call + 3
        if plan.attention_is_eager:
            group += 4 * seen
        # afterwards kv_b's inputs and their gradient, in two dtypes
        itemsize = plan.dtype.itemsize
        projecting = seen * (
            4 * self.kv_b.input_width + dora_bytes(self.kv_b, 1, itemsize) / itemsize)
        # the gradient of the queries, and twice that of attention's output: padded, and before
        return 3 * queries + max(group * queries / n_groups, projecting)
