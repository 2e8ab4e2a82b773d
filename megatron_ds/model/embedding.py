"""The input embedding: words, optional norm, learned positions, optional factor, dropout.

Shapes: B micro-batch, S sequence, H hidden.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import user_error
from megatron_ds.model.declaration.parts import EmbeddingSpec, NormSpec
from megatron_ds.model.norm import build_norm
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.embedding import VocabParallelEmbedding
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sequence import dropout
from megatron_ds.parallel.sharding import declared_parameter
from megatron_ds.parallel.weights import Weight


def build_word_embedding(
    config: ModelConfig, group: Group, init: Initializer
) -> VocabParallelEmbedding:
    """The word embedding, whose weight a tied output layer shares."""
    weights = EmbeddingSpec(config, config.padded_vocab(group.size)).named("embedding")
    return VocabParallelEmbedding(weights["word.weight"], group=group, init=init)


class LearnedPositionEmbedding(nn.Module):
    """A table of learned positions."""

    def __init__(self, weight: Weight, group: Group, init: Initializer) -> None:
        super().__init__()
        self.weight = declared_parameter(weight, group, init)

    def forward(self, queries: int, offset: int, positions_BS: Tensor | None = None) -> Tensor:
        """Look up positions.

        Args:
            queries: Tokens of this pass.
            offset: Position of the first one.
            positions_BS: Positions of the tokens, [B or 1, S], where they are not offset,
                offset + 1, ...; `offset` is then only checked.

        Returns:
            [S, 1, H], or [S, B or 1, H] with `positions_BS`.

        Raises:
            UserError: If the sequence is longer than the table.
        """
        end = offset + queries
        if end > self.weight.shape[0]:
            raise user_error(
                "sequence-longer-than-learned-positions", end=end, shape=self.weight.shape[0]
            )
        if positions_BS is not None:
            return F.embedding(positions_BS.t(), self.weight)
        return self.weight[offset:end].unsqueeze(1)


class Embedding(nn.Module):
    """Token ids [B, S] to [S, B, H]: word, norm (--embed-layernorm), position, factor, dropout.

    With sequence parallelism to this rank's [S / TP, B, H].

    Args:
        config: Architecture.
        group: Tensor-parallel group over which the vocabulary is sharded.
        init: Draws the initial weights.
    """

    def __init__(self, config: ModelConfig, *, group: Group, init: Initializer) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.multiplier = config.embedding_factor
        self.is_wide = config.fp32_residual_connection
        self.word = build_word_embedding(config, group, init)
        self.group = group
        weights = EmbeddingSpec(config, config.padded_vocab(group.size)).named("embedding")
        norm = NormSpec(config)
        self.norm = build_norm(norm, "embedding.norm", group) if config.embed_layernorm else None
        self.position: LearnedPositionEmbedding | None = None
        if (positions := weights.get("position.weight")) is not None:
            self.position = LearnedPositionEmbedding(positions, group, init)

    def forward(self, tokens_BS: Tensor, offset: int, positions_BS: Tensor | None = None) -> Tensor:
        """Embed tokens; arguments as for `LearnedPositionEmbedding`."""
        x_SBH: Tensor = self.word(tokens_BS.t())
        if self.norm is not None:
            x_SBH = self.norm(x_SBH)
        if self.position is not None:
            x_SBH = x_SBH + self._positions(x_SBH.shape[0], offset, positions_BS)
        if self.multiplier != 1.0:
            x_SBH = x_SBH * self.multiplier
        if self.is_wide:
            x_SBH = x_SBH.float()
        if self.training and self.dropout > 0.0:
            x_SBH = dropout(x_SBH, self.dropout, self.group)
        return x_SBH

    def _positions(self, queries: int, offset: int, positions_BS: Tensor | None) -> Tensor:
        """The positions of this rank's tokens."""
        assert self.position is not None
        if self.group.sequence_parallel:
            first = self.group.rank * queries
            offset += first
            if positions_BS is not None:
                positions_BS = positions_BS[:, first : first + queries]
        positions: Tensor = self.position(queries, offset, positions_BS)
        return positions
