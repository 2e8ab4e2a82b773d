"""Options of position embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import nearest_multiples
from megatron_ds.config.fields import option_field, when
from megatron_ds.config.model.sizes import SizesConfig, size_field
from megatron_ds.config.problems import Problem

ROPE = when(position_embedding_type="rope")


@dataclass(frozen=True)
class PositionConfig(SizesConfig):
    """Position embeddings."""

    position_embedding_type: str = option_field(
        "learned_absolute",
        "type of position embedding",
        choices=("learned_absolute", "rope", "alibi", "none"),
        synonyms={"absolute": "learned_absolute", "rotary": "rope"},
    )
    max_position_embeddings: int | None = size_field(
        "number of learned position embeddings (default: --seq-length)"
    )
    rotary_percent: float = option_field(
        1.0, "fraction of each head that RoPE rotates", above=0, maximum=1, only_with=ROPE
    )
    rotary_base: float = option_field(
        10000.0,
        "base period of RoPE",
        aliases=("rotary-position-embeddings-theta",),
        above=0,
        only_with=ROPE,
    )

    @property
    def num_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    def rope_problems(self) -> Iterator[Problem]:
        """Check that rope rotates pairs."""
        rotated = int(self.head_dim * self.rotary_percent)
        if self.position_embedding_type == "rope" and (rotated % 2 or rotated <= 0):
            yield Problem(
                "odd-rotary-dimension",
                settings=self,
                head_dim=self.head_dim,
                rotated=rotated,
                nearest_multiples=nearest_multiples(rotated, 2),
            )

    def position_problems(self) -> Iterator[Problem]:
        """Check that a table of positions is not shorter than a sequence."""
        if (
            self.position_embedding_type == "learned_absolute"
            and 0 < (self.max_position_embeddings or 0) < self.seq_length
        ):
            yield Problem("sequence-exceeds-position-embeddings", settings=self)
