"""Declaration of multi-latent attention (DeepSeek-V2, 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.dataclass import dataclass
from megatron_ds.model.declaration.forward_pass import FP32, Pass
from megatron_ds.model.declaration.parts import AttentionSpec, NormSpec
from megatron_ds.parallel.weights import Partial, ShardSpec, Weight, Width, linear_weights

SEQUENCE = Partial.SEQUENCE


@dataclass(frozen=True)
class MLASpec(AttentionSpec):
    """Attention whose keys and values are projections of a latent vector that all heads share.

    The projections of the hidden states to latent vectors are replicated; the projections from
    latent vectors to heads are sharded by heads.
    """

    @property
    def ranks(self) -> dict[str, int]:
        """Sizes of the latent vectors, by the names of their projections without `_down`."""
        queries = self.model.q_lora_rank
        keys_values = self.model.kv_lora_rank
        return ({} if queries is None else {"q": queries}) | {"kv": keys_values}

    @property
    def sections(self) -> tuple[int, int, int]:
        heads = self.model.num_attention_heads
        model = self.model
        return heads * model.head_dim, heads * model.head_dim, heads * model.v_head_dim

    def weights(self) -> Iterator[Weight]:
        model = self.model
        hidden = self.model.hidden_size
        std = self.model.init_method_std
        q, k, v = self.sections
        rows = {"q": q, "kv": k - model.num_attention_heads * model.qk_pos_emb_head_dim + v}
        if "q" not in self.ranks:
            widths = (Width.HEADS, Width.HIDDEN)
            yield from linear_weights(
                "q", (q, hidden), ShardSpec(0, (q,)), widths=widths, bias=False, std=std
            )
        for name, rank in self.ranks.items():
            shared = model.qk_pos_emb_head_dim if name == "kv" else 0
            yield Weight(
                f"{name}_down.weight",
                (rank + shared, hidden),
                None,
                std,
                partial_over=SEQUENCE,
                widths=(Width.LATENT, Width.HIDDEN),
            )
            shape = (rows[name], rank)
            shard = ShardSpec(0, (rows[name],))
            widths = (Width.HEADS, Width.LATENT)
            yield from linear_weights(
                f"{name}_up", shape, shard, widths=widths, bias=False, std=std
            )
        shape = (hidden, v)
        std = self.residual_std
        shard = ShardSpec(1, (v,))
        widths = (Width.HIDDEN, Width.HEADS)
        yield from linear_weights(
            "proj", shape, shard, widths=widths, bias=model.attention_bias, std=std
        )
        for name, norm in self.norms.items():
            yield from norm.named(name).values()

    @property
    def norms(self) -> dict[str, NormSpec]:
        """Norms of the latent vectors."""
        ranks = self.ranks if self.model.qk_layernorm else {}
        return {
            f"{name}_norm": NormSpec(self.model, rank, width=Width.LATENT)
            for name, rank in ranks.items()
        }

    @property
    def latents(self) -> int:
        return sum(self.ranks.values()) + self.model.qk_pos_emb_head_dim

    @property
    def sums_inputs(self) -> bool:
        return "q" not in self.ranks

    def matmul_macs(self, keys: int) -> int:
        q, _, v = self.sections
        plain = super(AttentionSpec, self).matmul_macs(keys)
        return plain + min(keys, self.rule.window or keys) * (q + v)

    def describe(self) -> str:
        model = self.model
        shown = f"{model.num_attention_heads} heads of {model.qk_head_dim} + "
        shown += f"{model.qk_pos_emb_head_dim} rotated, values of {model.v_head_dim}"
        ranks = " and ".join(f"{rank} for {name}" for name, rank in self.ranks.items())
        norms = [f", {norm.describe()} of them" for norm in self.norms.values()][:1]
        return f"{shown}, latent vectors of {ranks}{''.join(norms)}"

    def exchanged(self, tp_size: int, ulysses_size: int) -> tuple[int, int]:
        """Elements per token of q (and k), and of v (and the output)."""
        q, _, v = self.sections
        return q // tp_size, v // tp_size

    def exchanged_in_context(self, tp_size: int, ulysses_size: int) -> int:
        """Elements of the latent vector and the shared key, or with Ulysses of keys and values."""
        if ulysses_size > 1:
            return self.keys_and_values(tp_size, ulysses_size)
        return self.model.kv_lora_rank + self.model.qk_pos_emb_head_dim

    def keys_and_values(self, tp_size: int, ulysses_size: int) -> int:
        return sum(self.exchanged(tp_size, ulysses_size))

    def saved(self, run: Pass) -> int:
        """Attention per document is estimated for samples of one document."""
        model = self.model
        size = run.tokens * run.element
        heads = model.num_attention_heads // run.tp_size
        drops = model.attention_dropout > 0
        q, k, v = (rows // run.tp_size for rows in self.sections)
        saved = run.residual + run.mask + size * (self.latents + v)
        for norm, rank in zip(self.norms.values(), self.ranks.values(), strict=False):
            element = FP32 if norm.is_wide else run.element
            rows = run.tokens // run.shards
            is_copied = norm.is_composed(run) and element < FP32
            rotated = model.qk_pos_emb_head_dim * (rank == model.kv_lora_rank)
            saved += norm.computed(rows, run) + rows * (rank + rotated) * element * (not is_copied)
        product = heads * model.qk_head_dim + v  # of the latent vectors; values are a part of it
        # torch's kernel for CPUs, which saves no scores, has values of the size of keys.
        is_fused = not run.on_cpu or not (drops or model.head_dim != model.v_head_dim)
        if run.saves_core and not is_fused:
            scores = heads * model.seq_length * (3 if drops else 1)
            values = v if run.element < FP32 else product
            return saved + run.tokens * FP32 * (q + k + values + scores)
        is_copied = run.ulysses_size > 1 or (run.is_per_document and run.saves_core)
        values = 2 * v if is_copied else product  # copied as the outputs are
        return saved + size * (q + k + values) + run.tokens * heads * FP32 * run.saves_core
