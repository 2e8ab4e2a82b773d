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

    @property
    def residual_std(self) -> float:
        """Standard deviation of matrices that write to the residual stream."""
        std: float = self.model.init_method_std / (2.0 * self.model.num_layers) ** 0.5
        return std


@dataclass(frozen=True)
class NormSpec(Part):
    """A norm over the hidden dimension."""

    def weights(self) -> Iterator[Weight]:
        kinds = {"weight": 1.0} if self.model.normalization == "RMSNorm" else WEIGHT_AND_BIAS
        for name, mean in kinds.items():
            yield Weight(
                name,
                (self.model.hidden_size,),
                mean=mean,
                role=Role.VECTOR,
                partial_over=Partial.SEQUENCE,
            )


WEIGHT_AND_BIAS = {"weight": 1.0, "bias": 0.0}
"""Initial values of the vectors of LayerNorm."""


@dataclass(frozen=True)
class AttentionSpec(Part):
    """Self-attention: the fused projection of queries, keys and values, and the output's."""

    @property
    def sections(self) -> tuple[int, int, int]:
        """Rows of the projections of queries, keys and values."""
        kv = self.model.kv_heads * self.model.head_dim
        return self.model.num_attention_heads * self.model.head_dim, kv, kv

    def weights(self) -> Iterator[Weight]:
        model, sections = self.model, self.sections
        yield from column(
            *("qkv", model.hidden_size, sections, QUERY_KEY_VALUE),
            bias=model.qkv_bias,
            std=model.init_method_std,
        )
        yield from row(
            *("proj", sections[0], model.hidden_size),
            bias=model.add_bias_linear,
            std=self.residual_std,
        )

    def products(self, keys: int) -> int:
        return super().products(keys) + 2 * keys * self.sections[0]  # q k^T and softmax x v


@dataclass(frozen=True)
class FeedForwardSpec(Part):
    """A feed-forward layer, plain or gated."""

    def weights(self) -> Iterator[Weight]:
        model, bias = self.model, self.model.add_bias_linear
        # Gate and up are sections of one matrix, so that each rank has its slice of both.
        parts = GATE_UP if model.is_gated else ()
        width, sections = model.mlp_hidden_size, (model.mlp_hidden_size,) * max(1, len(parts))
        hidden, std = model.hidden_size, model.init_method_std
        yield from column("fc_in", hidden, sections, parts, bias=bias, std=std)
        yield from row("fc_out", width, hidden, bias=bias, std=self.residual_std)


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


def column(
    name: str,
    inputs: int,
    sections: tuple[int, ...],
    parts: tuple[str, ...] = (),
    *,
    bias: bool,
    std: float,
) -> Iterator[Weight]:
    """The weights of a `ColumnParallelLinear`.

    Args:
        name: Name of the layer.
        inputs: Size of the input.
        sections: Sizes of the fused parts of the output; each is sharded evenly.
        parts: Names of these parts; empty if there is only one.
        bias: Whether there is a bias; it starts at zero.
        std: Standard deviation of the initial matrix.
    """
    shard = ShardSpec(0, sections, parts)
    yield Weight(f"{name}.weight", (sum(sections), inputs), shard, std)
    if bias:
        yield Weight(f"{name}.bias", (sum(sections),), shard, role=Role.VECTOR)


def row(name: str, inputs: int, outputs: int, *, bias: bool, std: float) -> Iterator[Weight]:
    """The weights of a `RowParallelLinear`; arguments as for `column`."""
    yield Weight(f"{name}.weight", (outputs, inputs), ShardSpec(1, (inputs,)), std)
    if bias:
        yield Weight(f"{name}.bias", (outputs,), role=Role.VECTOR)


def _vocabulary(name: str, rows: int, model: ModelConfig, role: Role) -> Weight:
    shape, std = (rows, model.hidden_size), model.init_method_std
    return Weight(
        name, shape, ShardSpec(0, (rows,)), std, role=role, padding=rows - model.vocab_size
    )
