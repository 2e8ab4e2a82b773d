"""Facts about a model and loss curves of its run, for the page of the server."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.config.problems import UserError
from megatron_ds.inference.cli import log_rank0
from megatron_ds.inference.serving import api_schema
from megatron_ds.reports.history import METRICS, Points, read_run

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint

CURVE_POINTS = 300
"""Number of points of a loss curve on the page."""


def describe(
    source: SourceCheckpoint, max_length: int, defaults: api_schema.Defaults
) -> dict[str, Any]:
    """Returns the model's facts for the browser page, and its initial settings."""
    from megatron_ds.model.declaration.architecture import model_spec

    folder = source.path.resolve()
    model = source.settings.model
    moe = source.settings.moe
    prefix, _, step = folder.name.partition("global_step")
    is_step = not prefix and step.isdecimal()
    return {
        "saved": int(folder.stat().st_mtime),
        "name": folder.parent.name if is_step else folder.name,
        "checkpoint": f"step {step}" if is_step else source.format,
        "parameters": model_spec(model, moe).elements(),
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.kv_heads,
        "num_experts": max(moe.num_experts),
        "max_length": max_length,
        "defaults": dataclasses.asdict(defaults),
        "loss": loss_of_run(folder.parent, int(step)) if is_step else None,
    }


def loss_of_run(folder: Path, until: int) -> dict[str, Points] | None:
    """The curves of a --save folder as far as an iteration, if it has readable ones; validation
    uses the first dataset."""
    if not (folder / METRICS).is_file():
        return None
    try:
        run = read_run(folder, until)
    except (UserError, OSError) as error:
        log_rank0(f"WARNING: the page shows no loss curve: {error}")
        return None
    first_group = next(iter(run.groups("validation")), None)
    train = thinned(run.points())
    validation = thinned(run.losses("validation", first_group))
    return {"train": train, "validation": validation} if train else None


def thinned(points: Points) -> Points:
    """Averages groups of consecutive losses to at most `CURVE_POINTS` points, each at the last
    iteration of its group.

    Losses that are not finite, which JSON cannot express, are left out.
    """
    points = [(iteration, loss) for iteration, loss in points if math.isfinite(loss)]
    size = math.ceil(len(points) / CURVE_POINTS) or 1
    groups = [points[max(0, end - size) : end] for end in range(len(points), 0, -size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in reversed(groups)]
