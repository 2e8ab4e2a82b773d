"""The table of muP: multipliers of the model, and deviation and rates of each weight."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatron_ds.config import Config, OptimizerConfig
from megatron_ds.config.fields import in_effect
from megatron_ds.model.declaration.architecture import is_state, run_spec
from megatron_ds.model.declaration.rates import multiplier_rule

HEADER = ("weight", "deviation", "learning rate", "epsilon", "decay")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def transfer_lines(config: Config) -> list[str]:
    """Lines of the table; none without --use-mup.

    Weights of all layers with the same values are one line, layers.*. The values are those of the
    start: learning rates and decays are the schedules' maxima.
    """
    if not config.model.use_mup or "layer" in config.custom_parts:
        return []
    rows = [HEADER, *_rows(config)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return [_multipliers(config), *lines]


def _multipliers(config: Config) -> str:
    model = config.model
    scale = model.score_scale or model.head_dim**-0.5
    parts = [f"muP: width x {model.width_mult:g}"]
    if model.has_depth_transfer:
        parts.append(f"depth x {model.depth_mult:g}")
    parts.append(f"embedding times {model.embedding_factor:g}")
    parts.append(f"attention scores times {scale:.6g}")
    parts.append(f"attention and MLP times {model.residual_factor:.6g}")
    parts.append(f"logits times {model.logits_factor:.6g}")
    return ", ".join(parts)


def _rows(config: Config) -> Iterator[tuple[str, ...]]:
    """A row for each weight, of layers with the same values one."""
    options = in_effect(config.optimizer)
    rule = multiplier_rule(options, config.model)
    has_epsilon = "adam_eps" in options.spec.options
    rows: dict[tuple[str, ...], None] = {}
    for name, weight in run_spec(config).weights().items():
        if is_state(weight):
            continue
        factors = rule(weight)
        rate = (options.decoupled_lr if factors.is_decoupled else options.lr) or 0.0
        # Muon's steps of matrices have no epsilon.
        is_adams = has_epsilon and not (factors.is_matrix and _is_orthogonal(options))
        row = (
            NUMBER.sub("*", name),
            f"{weight.std:.4g}",
            f"{rate * factors.lr:.4g}",
            f"{options.adam_eps * factors.eps:.4g}" if is_adams else "-",
            f"{options.weight_decay * factors.weight_decay:.4g}",
        )
        rows[row] = None
    yield from rows


def _is_orthogonal(options: OptimizerConfig) -> bool:
    return options.spec.matrices is not None and options.spec.matrices.is_orthogonal
