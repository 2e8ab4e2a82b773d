"""Writes the files of a run, as the loggers of a run do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.training.records import metrics_of
from tests.unit.training.logger_records import step

CONFIG = {
    "optimizer": {"lr": 1e-3, "min_lr": 0.0},
    "schedule": {"train_iters": 8},
    "checkpoint": {"load": None},
    "logging": {"log_interval": 2},
}


def lines(records: Iterable[Mapping[str, Any]]) -> str:
    return "".join(f"{json.dumps(record)}\n" for record in records)


def steps(iterations: range, **changes: Any) -> list[dict[str, Any]]:
    """Objects of metrics.jsonl: 4 samples of 8 tokens in half a second, the first as warm-up."""
    return [metrics_of(step(each, warm_up=each == iterations[0], **changes)) for each in iterations]


def start(iteration: int, ranks: int = 1, seconds: float = 0.0, **options: Any) -> dict[str, Any]:
    """A start event, with options of the optimizer."""
    config = {**CONFIG, "optimizer": {**CONFIG["optimizer"], **options}}
    values = {"total_iterations": 8, "ranks": ranks, "config": config}
    return {"event": "start", "iteration": iteration, "time": seconds, **values}


def event(kind: str, iteration: int, **values: Any) -> dict[str, Any]:
    return {"event": kind, "iteration": iteration, "time": 100.0 + iteration, **values}


def write_run(
    folder: Path, records: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text(lines(records))
    (folder / "events.jsonl").write_text(lines(events))
    return folder
