"""Records for the loggers, and the tables of docs/running/logging.md that they must match."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megatron_ds.training.records import EvalRecord, IntervalRecord, StepRecord, TaskRecord

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "running" / "logging.md"


def step(iteration: int, **changes: object) -> StepRecord:
    """A step of 4 samples of 8 tokens."""
    record = StepRecord(
        iteration=iteration,
        consumed_samples=4 * iteration,
        consumed_tokens=32 * iteration,
        lm_loss=10.0 - iteration,
        grad_norm=1.5,
        learning_rate=0.001,
        weight_decay=0.01,
        global_batch_size=4,
        loss_scale=None,
        skipped=False,
        nan=False,
        seconds=0.5,
        tokens_per_second=64.0,
        tflops=0.25,
        warm_up=False,
    )
    return dataclasses.replace(record, **changes)


def interval(iteration: int, **changes: object) -> IntervalRecord:
    """An interval that ends with this iteration."""
    record = IntervalRecord(
        last=step(iteration),
        total_iterations=100,
        lm_loss=5.25,
        params_norm=None,
        skipped=0,
        nan=0,
        seconds_per_iteration=0.5,
        samples_per_second=8.0,
        tokens_per_second_per_device=32.0,
        tflops=0.25,
    )
    return dataclasses.replace(record, **changes)


def evaluation(
    iteration: int, split: str = "validation", group: str = "", bits: float | None = None
) -> EvalRecord:
    """An evaluation with a loss of 2.0."""
    label = f"iteration {iteration}"
    extras = {} if bits is None else {"bits_per_byte": bits}
    return EvalRecord(iteration, 4 * iteration, 32 * iteration, split, label, 2.0, group, extras)


def task_results(iteration: int, task: str = "TASK") -> TaskRecord:
    """An accuracy of 0.5."""
    return TaskRecord(iteration, 4 * iteration, 32 * iteration, task, {"METRIC": 0.5})


def documented(heading: str) -> list[list[str]]:
    """Rows of the table in that section of docs/running/logging.md, cells without backquotes."""
    _, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(f"## {heading}\n")
    lines = re.findall(r"^\|(.*)\|$", re.split("\n##+ ", rest)[0], flags=re.MULTILINE)
    return [[cell.strip().strip("`") for cell in line.split("|")] for line in lines[2:]]
