"""Declarations of attention, feed-forward layers, norms and the ends of the model.

A part declares its weights, from which its module is built, and what it computes, stores and sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.parallel.weights import (
    GATE_UP,
    QUERY_KEY_VALUE,
    Partial,
    Role,
    ShardSpec,
    Weight,
    linear_weights,
)


@dataclass(frozen=True)
class Part:
    """A part of the model."""

    model: ModelConfig

    def weights(self) -> Iterator[Weight]:
        """Its weights, with names below the part, in the order of the module's parameters."""
        yield from ()

    def products(self, keys: int) -> int:
        """Multiplications of one token in a forward pass that attends to so many keys."""
        del keys
        return sum(
            math.prod(weight.shape) for weight in self.weights() if weight.role is Role.MATRIX
        )

    def named(self, prefix: str) -> dict[str, Weight]:
        """Its weights with canonical names, by their names below the part."""
        return {
            weight.name: dataclasses.replace(weight, name=f"{prefix}.{weight.name}")
            for weight in self.weights()
        }

    def layer(self, prefix: str, name: str) -> list[Weight]:
        """Weight and bias of one of its linear layers, with canonical names."""
        weights = self.named(prefix).items()
        return [weight for key, weight in weights if key.rpartition(".")[0] == name]

    @property
    def residual_std(self) -> float:
        """Standard deviation of matrices that write to the residual stream."""
        std: float = self.model.init_method_std / (2.0 * self.model.num_layers) ** 0.5
        return std


@dataclass(frozen=True)
class NormSpec(Part):
    """A norm."""

    size: int | None = None
    """Size of the normalized dimension. None: the hidden size."""
    partial_over: Partial = Partial.SEQUENCE

    def weights(self) -> Iterator[Weight]:
        shape, role = (self.size or self.model.hidden_size,), Role.VECTOR
        yield Weight("weight", shape, mean=1.0, role=role, partial_over=self.partial_over)
        if self.model.normalization == "LayerNorm":
            yield Weight("bias", shape, role=role, partial_over=self.partial_over)


@dataclass(frozen=True)
class AttentionSpec(Part):
    """Self-attention: the fused projection of queries, keys and values, and the output's."""

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of the projections of queries, keys and values."""
        kv = self.model.kv_heads * self.model.head_dim
        return self.model.num_attention_heads * self.model.head_dim, kv, kv

    def weights(self) -> Iterator[Weight]:
        model, sections, hidden = self.model, self.sections, self.model.hidden_size
        rows, columns = ShardSpec(0, sections, QUERY_KEY_VALUE), ShardSpec(1, sections[:1])
        shape, std = (sum(sections), hidden), model.init_method_std
        yield from linear_weights("qkv", shape, rows, bias=model.qkv_bias, std=std)
        shape, std = (hidden, sections[0]), self.residual_std
        yield from linear_weights("proj", shape, columns, bias=model.add_bias_linear, std=std)

    def products(self, keys: int) -> int:
        return super().products(keys) + 2 * keys * self.sections[0]  # q k^T and softmax x v


@dataclass(frozen=True)
class FeedForwardSpec(Part):
    """A feed-forward layer, plain or gated."""

    def weights(self) -> Iterator[Weight]:
        model, bias = self.model, self.model.add_bias_linear
        # Gate and up are sections of one matrix, so that each rank has its slice of both.
        parts = GATE_UP if model.is_gated else ()
        hidden, width = model.hidden_size, model.mlp_hidden_size
        rows = ShardSpec(0, (width,) * max(1, len(parts)), parts)
        shape, std = (sum(rows.sections), hidden), model.init_method_std
        yield from linear_weights("fc_in", shape, rows, bias=bias, std=std)
        shape, std, columns = (hidden, width), self.residual_std, ShardSpec(1, (width,))
        yield from linear_weights("fc_out", shape, columns, bias=bias, std=std)


@dataclass(frozen=True)
class ExpertsSpec(FeedForwardSpec):
    """A mixture of experts: a router, and feed-forward layers whose weights are stacked."""

    moe: MoEConfig

    def weights(self) -> Iterator[Weight]:
        number = self.moe.experts
        yield Weight(
            "router.weight", (number, self.model.hidden_size), std=self.model.init_method_std
        )
        for weight in super().weights():
            shard = weight.shard
            yield dataclasses.replace(
                weight,
                name=f"experts.{weight.name}",
                shape=(number, *weight.shape),
                shard=shard and dataclasses.replace(shard, dim=shard.dim + 1),
                is_stacked=True,
            )

    def products(self, keys: int) -> int:
        """Those of the selected experts and of the router; dropped tokens are counted."""
        router = self.moe.experts * self.model.hidden_size
        of_all = super().products(keys) - router
        return router + of_all // self.moe.experts * self.moe.moe_router_topk


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
            )


@dataclass(frozen=True)
class OutputSpec(EmbeddingSpec):
    """The output layer, whose weight may be the embedding's."""

    def weights(self) -> Iterator[Weight]:
        if self.model.untie_embeddings_and_output_weights:
            yield _vocabulary("weight", self.rows, self.model, Role.OUTPUT)

    def products(self, keys: int) -> int:
        return self.rows * self.model.hidden_size


def _vocabulary(name: str, rows: int, model: ModelConfig, role: Role) -> Weight:
    shape, std = (rows, model.hidden_size), model.init_method_std
    return Weight(
        name, shape, ShardSpec(0, (rows,)), std, role=role, padding=rows - model.vocab_size
    )
