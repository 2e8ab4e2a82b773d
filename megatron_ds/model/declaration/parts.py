"""Declarations of attention, feed-forward layers, norms and the ends of the model.

A part declares its weights, from which its module is built, and what it computes, stores and sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import counted
from megatron_ds.dataclass import dataclass
from megatron_ds.model.attention.rule import AttentionRule, attention_rules
from megatron_ds.model.declaration.forward_pass import FP32, Pass
from megatron_ds.parallel.weights import (
    FIXED,
    GATE,
    GATE_UP,
    QUERY_KEY_VALUE,
    Partial,
    Role,
    ShardSpec,
    Weight,
    Width,
    linear_weights,
)


@dataclass(frozen=True)
class Part:
    """A part of the model."""

    model: ModelConfig
    regions: ClassVar[int] = 0
    """Number of all-reduces over TP in a forward pass, and as many in a backward pass."""

    @property
    def latents(self) -> int:
        """Latent features per token that each TP rank receives in addition to the hidden states."""
        return 0

    @property
    def sums_inputs(self) -> bool:
        """Whether one all-reduce of a backward pass is of the hidden states' gradient."""
        return self.regions > 0

    @property
    def statistics(self) -> int:
        """fp32 statistics per token that are also all-reduced over TP, in both passes."""
        return 0

    def saved(self, run: Pass) -> int:
        """Bytes that a forward pass saves, its input included, its output not."""
        del run
        return 0

    def table(self, run: Pass) -> int:
        """Bytes of tables that equal parts of all layers share."""
        del run
        return 0

    def weights(self) -> Iterator[Weight]:
        """Its weights, with names below the part, in the order of the module's parameters."""
        yield from ()

    def matmul_macs(self, keys: int) -> int:
        """Multiply-adds of matmuls per token in a forward pass over `keys` keys."""
        del keys
        return sum(
            math.prod(weight.shape) for weight in self.weights() if weight.role is Role.MATRIX
        )

    def describe(self) -> str:
        """Text of the banner."""
        return ""

    def named(self, prefix: str) -> dict[str, Weight]:
        """Its weights with canonical names, by their names below the part."""
        return {
            weight.name: dataclasses.replace(self._drawn(weight), name=f"{prefix}.{weight.name}")
            for weight in self.weights()
        }

    def _scaled(self, weight: Weight) -> Weight:
        """A weight with the ratio of its inputs to those in the base model of muP, and with the
        initial deviation of a matrix that has so many."""
        if not self.model.use_mup or weight.width_mult is not None or weight.role is Role.STATE:
            return weight
        grows = weight.role is Role.MATRIX and weight.widths[-1] is not FIXED
        ratio = self.model.width_mult if grows else 1.0
        return dataclasses.replace(weight, width_mult=ratio, std=weight.std / ratio**0.5)

    def _drawn(self, weight: Weight) -> Weight:
        """A weight whose initial values are those that the options select."""
        weight = self._scaled(weight)
        model = self.model
        embedding_std = self.model.embedding_init_method_std
        tables = (Role.WORDS, Role.POSITIONS, *((Role.OUTPUT,) if model.use_mup else ()))
        if not weight.std:
            return weight
        if embedding_std is not None and weight.role in tables:
            return dataclasses.replace(weight, std=embedding_std)
        if not model.init_method_xavier_uniform:
            return weight
        rows, columns = weight.shape[weight.is_stacked :]
        std = (2.0 / (rows - weight.padding + columns)) ** 0.5
        return dataclasses.replace(weight, std=std, is_uniform=True)

    def layer(self, prefix: str, name: str) -> list[Weight]:
        """Weight and bias of one of its linear layers, with canonical names."""
        weights = self.named(prefix).items()
        return [weight for key, weight in weights if key.rpartition(".")[0] == name]

    @property
    def residual_std(self) -> float:
        """Standard deviation of matrices that write to the residual stream."""
        std: float = self.model.init_method_std / (2.0 * self.model.residual_layers) ** 0.5
        return std


@dataclass(frozen=True)
class NormSpec(Part):
    """A norm."""

    size: int | None = None
    """Size of the normalized dimension. None: the hidden size."""
    partial_over: Partial = Partial.SEQUENCE
    is_sharded: bool = False
    """Whether tensor-parallel ranks share the normalized dimension."""
    has_weight: bool = True
    """Whether the norm has a learned weight. Without one it is RMSNorm, regardless of
    --normalization."""
    width: Width | None = Width.HIDDEN
    """What the normalized dimension grows with."""

    def weights(self) -> Iterator[Weight]:
        if not self.has_weight:
            return
        shape = (self.size or self.model.hidden_size,)
        shard = None
        if self.is_sharded:
            shard = ShardSpec(0, shape)
        means = {"weight": 1.0 - self.offset}
        means |= {"bias": 0.0} if self.model.normalization == "LayerNorm" else {}
        for name, mean in means.items():
            yield Weight(
                name,
                shape,
                shard,
                mean=mean,
                role=Role.VECTOR,
                partial_over=self.partial_over,
                widths=(self.width,),
            )

    @property
    def offset(self) -> float:
        """Constant that is added to the weight: 1 with --apply-layernorm-1p, else 0."""
        return float(self.model.apply_layernorm_1p)

    @property
    def is_wide(self) -> bool:
        """Whether its input and its weight are converted to fp32 before it is computed."""
        wide = self.model.apply_layernorm_1p or self.model.fp32_residual_connection
        return wide or self.is_sharded or not self.has_weight

    def describe(self) -> str:
        name = self.model.normalization if self.has_weight else "RMSNorm without weights"
        return f"{name} with weights around 0" if self.has_weight and self.offset else name

    def saved(self, run: Pass) -> int:
        element = FP32 if self.is_wide else run.element
        is_copied = self.is_composed(run) and element < FP32
        size = 0 if is_copied else run.residual // run.element * element
        return self.computed(run.tokens // run.shards, run) + size

    def computed(self, vectors: int, run: Pass) -> int:
        """Bytes saved for `vectors` normalized vectors, without the input.

        Of a sharded dimension, the vectors are heads.
        """
        size = self.size or self.model.hidden_size
        is_composed = self.is_composed(run)
        if self.is_sharded:
            size = self.model.head_dim
            is_composed = is_composed or run.tp_size > 1
        if self.model.normalization == "LayerNorm" and self.has_weight and not is_composed:
            return 2 * vectors * FP32
        elements = vectors * size * (is_composed and self.has_weight)
        is_wide = self.is_wide or run.element == FP32
        copies = FP32 if is_wide else FP32 + 2 * run.element
        return vectors * FP32 + elements * copies

    def is_composed(self, run: Pass) -> bool:
        """Whether torch composes it of several operations, on a copy of the input in fp32."""
        return run.on_cpu and not (self.model.normalization == "LayerNorm" and self.has_weight)


@dataclass(frozen=True)
class AttentionSpec(Part):
    """Self-attention: the fused projection of queries, keys and values, and the output's."""

    rule: AttentionRule
    """Its computation apart from the weights."""
    regions = 1

    @classmethod
    def of(cls, model: ModelConfig, layer: int) -> AttentionSpec:
        """The attention of a layer."""
        return cls(model, attention_rules(model)[layer])

    def table(self, run: Pass) -> int:
        """The bias of ALiBi, or the mask of a window on a CPU."""
        length = self.model.seq_length
        ranks = run.tp_size * run.ulysses_size
        side = self.rule.table_length(length)
        heads = self.model.num_attention_heads // ranks if self.rule.alibi else 1
        has_table = self.rule.alibi or (run.on_cpu and self.rule.is_windowed(length))
        return has_table * heads * side**2 * run.element

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of the projections of queries, keys and values."""
        kv = self.model.kv_heads * self.model.head_dim
        return self.model.num_attention_heads * self.model.head_dim, kv, kv

    def weights(self) -> Iterator[Weight]:
        model = self.model
        sections = self.sections
        hidden = self.model.hidden_size
        if model.softmax_type == "learnable":
            heads = (model.num_attention_heads,)
            yield Weight(
                "sinks",
                heads,
                ShardSpec(0, heads),
                model.init_method_std,
                role=Role.VECTOR,
                widths=(Width.HEADS,),
            )
        gate = ((model.gate_size,), (GATE,)) if model.gate_size else ((), ())
        rows = ShardSpec(0, (*sections, *gate[0]), (*QUERY_KEY_VALUE, *gate[1]))
        columns = ShardSpec(1, sections[:1])
        shape = (sum(rows.sections), hidden)
        std = model.init_method_std
        widths = (Width.HEADS, Width.HIDDEN)
        yield from linear_weights("qkv", shape, rows, widths=widths, bias=model.qkv_bias, std=std)
        shape = (hidden, sections[0])
        std = self.residual_std
        yield from linear_weights(
            "proj", shape, columns, widths=widths[::-1], bias=model.attention_bias, std=std
        )
        for name, norm in self.norms.items():
            yield from norm.named(name).values()

    @property
    def norms(self) -> dict[str, NormSpec]:
        """Norms of the queries and keys, by name; with one weight for all heads, a rank's give a
        part of its gradient."""
        model = self.model
        q, k, _ = self.sections
        has_weight = not model.qk_l2_norm
        head_norm = NormSpec(
            model, model.head_dim, Partial.ALWAYS, has_weight=has_weight, width=FIXED
        )
        norms = {"q_norm": head_norm, "k_norm": head_norm}
        if model.qk_layernorm and model.qk_layernorm_scope == "all-heads":
            sizes = {"q_norm": q, "k_norm": k}
            return {
                name: NormSpec(model, size, Partial.NEVER, is_sharded=True, width=Width.HEADS)
                for name, size in sizes.items()
            }
        return norms if model.qk_layernorm or model.qk_l2_norm else {}

    @property
    def statistics(self) -> int:
        means = 2 if self.model.normalization == "LayerNorm" else 1
        return sum(means for norm in self.norms.values() if norm.is_sharded)

    def matmul_macs(self, keys: int) -> int:
        keys = min(keys, self.rule.window or keys)
        return super().matmul_macs(keys) + 2 * keys * self.sections[0]  # q k^T and softmax x v

    def describe(self) -> str:
        heads = self.model.num_attention_heads
        groups = self.model.kv_heads
        shown = f"{counted(heads, 'head')} of {self.model.head_dim}"
        shown += "" if groups == heads else f" in {groups} groups"
        for norm in list(self.norms.values())[:1]:
            shown += f", {norm.describe()} of q and k" + " of all heads" * norm.is_sharded
        shown += ", gated" if self.model.gate_size else ""
        return shown + (f", softmax {self.model.softmax_type}" if self.rule.sinks else "")

    def saved(self, run: Pass) -> int:
        """Attention per document is estimated for samples of one document."""
        model = self.model
        size = run.tokens * run.element
        q, kv = self.exchanged(run.tp_size, run.ulysses_size)
        # The projected queries, keys and values; the output, which the next projection reads.
        saved = run.residual + run.mask + size * (2 * q + 2 * kv)
        for norm, heads in zip(self.norms.values(), (q, kv), strict=False):
            saved += norm.computed(run.tokens * heads // model.head_dim, run)
            is_copied = norm.is_wide and run.element < FP32
            saved += run.tokens * heads * FP32 * is_copied
        # A fused kernel saves no scores. A CPU has none with dropout.
        is_fused = model.attention_dropout == 0 or not run.on_cpu
        is_changed = bool(self.norms) or self.rule.rope is not None
        if run.ulysses_size > 1 or (run.is_per_document and run.saves_core and is_fused):
            saved += size * q  # outputs before the exchange of heads, or of each document
            saved += size * (q + 2 * kv) if self.norms else 0  # inputs of the norms
        elif is_changed and (is_fused or not run.saves_core):
            saved += size * (q + kv)  # otherwise counted with the scores
        if model.gate_size:  # their logits and sigmoids, and the outputs before them
            saved += size * (q + 2 * model.gate_size // run.tp_size)
        return saved + (self._core(run, is_fused) if run.saves_core else 0)

    def exchanged(self, tp_size: int, ulysses_size: int) -> tuple[int, int]:
        """Elements of a token's queries, and of its keys, that ranks of a sequence exchange; ranks
        that share a key-value head each receive it."""
        q, kv, _ = (rows // tp_size for rows in self.sections)
        return q, kv if ulysses_size == 1 else max(kv, ulysses_size * self.model.head_dim)

    def exchanged_in_context(self, tp_size: int, ulysses_size: int) -> int:
        """Elements of a token of this rank that context-parallel ranks exchange: its keys and
        values, after Ulysses has exchanged slices for heads."""
        return self.keys_and_values(tp_size, ulysses_size)

    def keys_and_values(self, tp_size: int, ulysses_size: int) -> int:
        """Elements of a token's keys and values that context-parallel ranks need."""
        return 2 * self.exchanged(tp_size, ulysses_size)[1]

    def _core(self, run: Pass, is_fused: bool) -> int:
        """Saved by the core in addition to its inputs and output."""
        model = self.model
        heads = run.tokens * self.model.num_attention_heads // run.tp_size
        if not is_fused:  # three tensors of scores, and the inputs in fp32
            copies = 3 * heads * model.head_dim * run.element
            return 3 * heads * model.seq_length * FP32 + (copies if run.element < FP32 else 0)
        if self.rule.needs_scores and run.on_cpu:
            return 0  # scores are computed again
        repeated = 0
        if model.position_embedding_type == "alibi" and not run.on_cpu:
            has_groups = model.kv_heads != model.num_attention_heads
            repeated = 2 * heads * model.head_dim * run.element * has_groups  # keys and values
        return heads * FP32 + repeated


@dataclass(frozen=True)
class FeedForwardSpec(Part):
    """A feed-forward layer, plain or gated."""

    regions = 1
    hidden: int | None = None
    """Size of its input and output. None: the hidden size."""
    width: int | None = None
    """Size between its matrices. None: the model's."""

    @property
    def sizes(self) -> tuple[int, int]:
        """Size of its input and output, and of what is between its matrices."""
        return self.hidden or self.model.hidden_size, self.width or self.model.mlp_hidden_size

    def weights(self) -> Iterator[Weight]:
        model = self.model
        bias = self.model.add_bias_linear
        # Gate and up are sections of one matrix, so that each rank has its slice of both.
        parts = GATE_UP if model.is_gated else ()
        hidden, width = self.sizes
        rows = ShardSpec(0, (width,) * max(1, len(parts)), parts)
        shape = (sum(rows.sections), hidden)
        std = model.init_method_std
        widths = (Width.FEED_FORWARD, Width.HIDDEN if self.hidden is None else Width.LATENT)
        yield from linear_weights("fc_in", shape, rows, widths=widths, bias=bias, std=std)
        shape = (hidden, width)
        std = self.residual_std
        columns = ShardSpec(1, (width,))
        widths = widths[::-1]
        yield from linear_weights("fc_out", shape, columns, widths=widths, bias=bias, std=std)

    def describe(self) -> str:
        activation, _, limit, offset = self.model.activation_arguments
        shown = activation + (f", at most {limit:g}" if limit is not None else "")
        shown += f", offset {offset:g}" if offset else ""
        return f"feed-forward {self.sizes[1]} ({shown})"

    def saved(self, run: Pass) -> int:
        return run.residual + run.mask + (0 if run.has_tiles else self.inner(run))

    def inner(self, run: Pass) -> int:
        """Saved between the two matrices."""
        activation, _, limit, offset = self.model.activation_arguments
        tensors = 2 if not self.model.is_gated else 3 if activation == "liglu" else 4
        if activation == "quick-geglu":  # the sigmoid
            tensors += 1
        limited = 1 if activation == "reglu" else 2  # the output of relu is saved, not its input
        tensors += limited if limit is not None else int(offset != 0.0)
        return run.tokens * run.element * self.sizes[1] // run.tp_size * tensors


@dataclass(frozen=True)
class EmbeddingSpec(Part):
    """The input embedding: words, and learned positions."""

    rows: int
    """Rows of the padded vocabulary."""

    def weights(self) -> Iterator[Weight]:
        model = self.model
        yield _vocabulary("word.weight", self.rows, model, Role.WORDS)
        if model.embed_layernorm:
            yield from NormSpec(model).named("norm").values()
        if model.position_embedding_type == "learned_absolute":
            yield Weight(
                "position.weight",
                (model.num_positions, model.hidden_size),
                std=model.init_method_std,
                role=Role.POSITIONS,
                partial_over=Partial.SEQUENCE,
                widths=(FIXED, Width.HIDDEN),
            )

    def describe(self) -> str:
        return f"positions {self.model.position_embedding_type}"

    def saved(self, run: Pass) -> int:
        return run.mask


@dataclass(frozen=True)
class OutputSpec(EmbeddingSpec):
    """The output layer, whose weight may be the embedding's."""

    def weights(self) -> Iterator[Weight]:
        if self.model.untie_embeddings_and_output_weights:
            yield _vocabulary("weight", self.rows, self.model, Role.OUTPUT)
        if self.model.output_layer_bias:
            shard = ShardSpec(0, (self.rows,))
            role = Role.OUTPUT_BIAS
            padding = self.rows - self.model.vocab_size
            yield Weight("bias", (self.rows,), shard, role=role, padding=padding, widths=(FIXED,))

    def matmul_macs(self, keys: int) -> int:
        return self.rows * self.model.hidden_size

    def saved(self, run: Pass) -> int:
        """Estimated with the loss."""
        return 0


@dataclass(frozen=True)
class PredictionSpec(Part):
    """Modules around the transformer layer of multi-token prediction. Its loss applies the output
    layer once more."""

    rows: int
    """Rows of the padded vocabulary."""

    def weights(self) -> Iterator[Weight]:
        norm = NormSpec(self.model)
        hidden = self.model.hidden_size
        for name in ("embedding_norm", "hidden_norm", "output_norm"):
            yield from norm.named(name).values()
        yield Weight(
            "projection.weight",
            (hidden, 2 * hidden),
            std=self.model.init_method_std,
            partial_over=Partial.SEQUENCE,
            widths=(Width.HIDDEN, Width.HIDDEN),
        )

    def matmul_macs(self, keys: int) -> int:
        return super().matmul_macs(keys) + self.rows * self.model.hidden_size

    def describe(self) -> str:
        return f"{counted(self.model.mtp_num_layers, 'further token')} predicted"

    def saved(self, run: Pass) -> int:
        """Both norms, their concatenated outputs, a copy of the embedding and the last norm."""
        return 3 * NormSpec(self.model).saved(run) + 2 * run.residual + run.mask


def _vocabulary(name: str, rows: int, model: ModelConfig, role: Role) -> Weight:
    shape = (rows, model.hidden_size)
    std = model.init_method_std
    return Weight(
        name,
        shape,
        ShardSpec(0, (rows,)),
        std,
        role=role,
        padding=rows - model.vocab_size,
        widths=(FIXED, Width.HIDDEN),
    )
