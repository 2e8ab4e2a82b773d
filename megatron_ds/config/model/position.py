"""Options of position embeddings."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.checks import nearest_multiples
from megatron_ds.config.fields import ABOVE_ONE, ANY_VALUE, exclusive_problem, option_field, when
from megatron_ds.config.model.layer_pattern import chosen_layers
from megatron_ds.config.model.sizes import SizesConfig, size_field
from megatron_ds.config.problems import Problem

ROTARY = ("rope", "yarn")
"""Types of rotary positions."""
ROPE = when(position_embedding_type="rope")
_of_rotary = functools.partial(option_field, only_with=when(position_embedding_type=ROTARY))
_of_yarn = functools.partial(option_field, only_with=when(position_embedding_type="yarn"))


@dataclass(frozen=True)
class PositionConfig(SizesConfig):
    """Position embeddings."""

    position_embedding_type: str = option_field(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "alibi", "none"),
        synonyms={"absolute": "learned_absolute", "rotary": "rope"},
    )
    max_position_embeddings: int | None = size_field()
    rotary_percent: float = _of_rotary(1.0, above=0, maximum=1)
    rotary_base: float = _of_rotary(10000.0, aliases=("rotary-position-embeddings-theta",), above=1)
    rotary_base_per_layer: tuple[float, ...] = _of_rotary((), nargs="*", above=1)
    rotary_interleaved: bool = _of_rotary(False)
    no_rope_freq: str = _of_rotary("0", metavar="PATTERN")
    rotary_seq_len_interpolation_factor: float = option_field(1.0, minimum=1, only_with=ROPE)
    use_rope_scaling: bool = option_field(False, only_with=ROPE)
    rope_scaling_factor: float = option_field(
        8.0, minimum=1, only_with=(ROPE, when(use_rope_scaling=True))
    )
    rope_ntk_factor: float | None = option_field(
        None, minimum=1, only_with=(ROPE, when(max_position_embeddings=ANY_VALUE))
    )
    rotary_scaling_factor: float = _of_yarn(1.0, minimum=1)
    yarn_original_max_position_embeddings: int | None = _of_yarn(None, minimum=1)
    yarn_beta_fast: float = _of_yarn(32.0, above=0)
    yarn_beta_slow: float = _of_yarn(1.0, above=0)
    yarn_correction_range_round_to_int: bool = _of_yarn(True)
    mscale: float = _of_yarn(1.0, minimum=0)
    mscale_all_dim: float = _of_yarn(0.0, minimum=0)
    rope_scaling_layers: str = option_field(
        "1",
        metavar="PATTERN",
        only_with=(
            when(position_embedding_type=ROTARY),
            when(
                position_embedding_type="yarn",
                rotary_seq_len_interpolation_factor=ABOVE_ONE,
                use_rope_scaling=True,
                rope_ntk_factor=ANY_VALUE,
            ),
        ),
    )

    @property
    def num_positions(self) -> int:
        return self.max_position_embeddings or self.seq_length

    @property
    def is_rotary(self) -> bool:
        return self.position_embedding_type in ROTARY

    @property
    def rotated_size(self) -> int:
        """Dimensions of a head that rope rotates."""
        return int(self.rotated_dim * self.rotary_percent)

    @property
    def rotary_bases(self) -> tuple[float, ...]:
        """The base of each layer, raised by NTK scaling.

        It is that of dynamic NTK for the sequence length of the run, whatever the length of a
        sequence, so that keys in a cache keep their rotation.
        """
        bases = self.rotary_base_per_layer or (self.rotary_base,) * self.num_layers
        size = self.rotated_size
        if self.position_embedding_type != "rope" or not self.rope_ntk_factor or size <= 2:
            return bases
        ratio = 1 + self.rope_ntk_factor * max(0.0, self.seq_length / self.num_positions - 1)
        raised = ratio ** (size / (size - 2))
        return tuple(
            base * raised if is_scaled else base
            for base, is_scaled in zip(bases, self.rope_layers["rope_scaling_layers"], strict=True)
        )

    @property
    def rope_scalings(self) -> list[str]:
        """The options that scale rope."""
        if self.position_embedding_type != "rope":
            return ["position_embedding_type"] if self.position_embedding_type == "yarn" else []
        scalings = {
            "rotary_seq_len_interpolation_factor": self.rotary_seq_len_interpolation_factor > 1,
            "use_rope_scaling": self.use_rope_scaling,
            "rope_ntk_factor": self.rope_ntk_factor is not None,
        }
        return [name for name, is_used in scalings.items() if is_used]

    @property
    def rope_patterns(self) -> dict[str, str]:
        """Patterns of layers of a model with rope."""
        scaled = self.rope_scaling_layers if self.rope_scalings else "1"
        patterns = {"no_rope_freq": self.no_rope_freq, "rope_scaling_layers": scaled}
        return patterns if self.is_rotary else {}

    @property
    def rope_layers(self) -> dict[str, tuple[bool, ...]]:
        """By pattern, whether each layer is one of it."""
        patterns = self.rope_patterns.items()
        return {name: chosen_layers(text, self.num_layers) for name, text in patterns}

    def rope_problems(self) -> Iterator[Problem]:
        """Check the options of rope."""
        if not self.is_rotary:
            return
        rotated = self.rotated_size
        if rotated % 2 or rotated <= 0:
            yield Problem(
                "odd-rotary-dimension",
                settings=self,
                head_dim=self.rotated_dim,
                rotated=rotated,
                nearest_multiples=nearest_multiples(rotated, 2),
            )
        bases, layers = len(self.rotary_base_per_layer), self.num_layers
        if bases not in (0, layers):
            yield Problem("rotary-bases-of-other-layers", settings=self, bases=bases)
        for name, pattern in self.rope_patterns.items():
            try:
                chosen_layers(pattern, layers)
            except ValueError:
                yield Problem("layer-pattern-malformed", name, pattern=pattern, layers=layers)
        if self.position_embedding_type == "yarn":
            if self.yarn_original_max_position_embeddings is None:
                yield Problem("yarn-length-missing")
            if self.yarn_beta_fast <= self.yarn_beta_slow:
                yield Problem("yarn-betas-reversed", settings=self)
            return
        if len(self.rope_scalings) > 1:
            yield exclusive_problem(*self.rope_scalings, reason="each scales the same positions")

    def position_problems(self) -> Iterator[Problem]:
        """Check that a table of positions is not shorter than a sequence."""
        if (
            self.position_embedding_type == "learned_absolute"
            and 0 < (self.max_position_embeddings or 0) < self.seq_length
        ):
            yield Problem("sequence-exceeds-position-embeddings", settings=self)
