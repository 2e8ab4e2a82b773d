"""Declaration of multi-latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.model.spec.parts import FP32, AttentionSpec, NormSpec, Pass
from megatron_ds.parallel.weights import Partial, ShardSpec, Weight, linear_weights

SEQUENCE = Partial.SEQUENCE


@dataclass(frozen=True)
class MLASpec(AttentionSpec):
    """Attention whose keys and values are products of a latent vector that all heads share.

    The projections of the hidden states to latent vectors are replicated; those from them to the
    heads are sharded by heads.
    """

    @property
    def ranks(self) -> dict[str, int]:
        """Sizes of the latent vectors, by the names of their projections without `_down`."""
        queries, keys_values = self.model.q_lora_rank, self.model.kv_lora_rank
        return ({} if queries is None else {"q": queries}) | {"kv": keys_values}

    @property
    def sections(self) -> tuple[int, int, int]:
        heads, model = self.model.num_attention_heads, self.model
        return heads * model.head_dim, heads * model.head_dim, heads * model.v_head_dim

    def weights(self) -> Iterator[Weight]:
        model, hidden, std = self.model, self.model.hidden_size, self.model.init_method_std
        q, k, v = self.sections
        rows = {"q": q, "kv": k - model.num_attention_heads * model.qk_pos_emb_head_dim + v}
        if "q" not in self.ranks:
            yield from linear_weights("q", (q, hidden), ShardSpec(0, (q,)), bias=False, std=std)
        for name, rank in self.ranks.items():
            shared = model.qk_pos_emb_head_dim if name == "kv" else 0
            yield Weight(
                f"{name}_down.weight", (rank + shared, hidden), None, std, partial_over=SEQUENCE
            )
            shape, shard = (rows[name], rank), ShardSpec(0, (rows[name],))
            yield from linear_weights(f"{name}_up", shape, shard, bias=False, std=std)
        shape, std, shard = (hidden, v), self.residual_std, ShardSpec(1, (v,))
        yield from linear_weights("proj", shape, shard, bias=model.attention_bias, std=std)
        for name, norm in self.norms.items():
            yield from norm.named(name).values()

    @property
    def norms(self) -> dict[str, NormSpec]:
        """Norms of the latent vectors."""
        ranks = self.ranks if self.model.qk_layernorm else {}
        return {f"{name}_norm": NormSpec(self.model, rank) for name, rank in ranks.items()}

    @property
    def latents(self) -> int:
        return sum(self.ranks.values()) + self.model.qk_pos_emb_head_dim

    @property
    def sums_inputs(self) -> bool:
        return "q" not in self.ranks

    def products(self, keys: int) -> int:
        q, _, v = self.sections
        plain = super(AttentionSpec, self).products(keys)
        return plain + min(keys, self.rule.window or keys) * (q + v)

    def describe(self) -> str:
        model = self.model
        shown = f"{model.num_attention_heads} heads of {model.qk_head_dim} + "
        shown += f"{model.qk_pos_emb_head_dim} rotated, values of {model.v_head_dim}"
        ranks = " and ".join(f"{rank} for {name}" for name, rank in self.ranks.items())
        norms = [f", {norm.describe()} of them" for norm in self.norms.values()][:1]
        return f"{shown}, latent vectors of {ranks}{''.join(norms)}"

    def exchanged(self, tp_size: int, sp_size: int) -> tuple[int, int]:
        """Elements of a token's queries, as of its keys, and of its values, as of the output."""
        q, _, v = self.sections
        return q // tp_size, v // tp_size

    def saved(self, run: Pass) -> int:
        """Attention per document is estimated for samples of one document."""
        model, size = self.model, run.tokens * run.element
        heads, drops = model.num_attention_heads // run.tp_size, model.attention_dropout > 0
        q, k, v = (rows // run.tp_size for rows in self.sections)
        saved = run.residual + run.mask + size * (self.latents + v)
        for norm, rank in zip(self.norms.values(), self.ranks.values(), strict=False):
            element = FP32 if norm.is_wide else run.element
            rows, is_copied = run.tokens // run.shards, norm.is_composed(run) and element < FP32
            rest = model.qk_pos_emb_head_dim * (rank == model.kv_lora_rank)
            saved += norm.computed(rows, run) + rows * (rank + rest) * element * (not is_copied)
        product = heads * model.qk_head_dim + v  # of the latent vectors; values are a part of it
        # torch's kernel for CPUs, which saves no scores, has values of the size of keys.
        is_fused = not run.on_cpu or not (drops or model.head_dim != model.v_head_dim)
        if run.saves_core and not is_fused:
            scores = heads * model.seq_length * (3 if drops else 1)
            values = v if run.element < FP32 else product
            return saved + run.tokens * FP32 * (q + k + values + scores)
        is_copied = run.sp_size > 1 or (run.is_per_document and run.saves_core)
        values = 2 * v if is_copied else product  # copied as the outputs are
        return saved + size * (q + k + values) + run.tokens * heads * FP32 * run.saves_core
