"""Options of the residual stream: where norms are, and what is added to it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ds.config.fields import exclusive_problem, option_field
from megatron_ds.config.problems import Problem

NORM_POSITIONS = ("before", "after", "both", "reordered")
_multiplier = functools.partial(option_field, 1.0, above=0)


@dataclass(frozen=True)
class ResidualConfig:
    """Residual stream."""

    norm_position: str = option_field("before", choices=NORM_POSITIONS)
    parallel_residual: str | None = option_field(None, choices=("separate", "shared"))
    apply_residual_connection_post_layernorm: bool = option_field(False)
    fp32_residual_connection: bool = option_field(False)
    embedding_multiplier: float = _multiplier()
    residual_multiplier: float = _multiplier()
    logits_multiplier: float = _multiplier()

    def residual_problems(self) -> Iterator[Problem]:
        """Check that at most one option changes the form of a layer, and what fp32 needs."""
        reason = "each is another form of the layer"
        forms = {
            "norm_position": self.norm_position != "before",
            "parallel_residual": self.parallel_residual is not None,
            "apply_residual_connection_post_layernorm": (
                self.apply_residual_connection_post_layernorm
            ),
        }
        chosen = [name for name, is_chosen in forms.items() if is_chosen]
        if len(chosen) > 1:
            yield exclusive_problem(*chosen, reason=reason)
        is_norm = self.norm_position == "after" or self.apply_residual_connection_post_layernorm
        if self.fp32_residual_connection and is_norm:
            reason = "what is added to is a norm, in the data type"
            yield exclusive_problem(*chosen[:1], "fp32_residual_connection", reason=reason)
