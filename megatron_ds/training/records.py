"""Records of a step, of a log interval and of an evaluation, and the interface of loggers.

Records contain plain numbers that are already averaged over the data-parallel ranks. This file
knows neither how they are measured nor how they are written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPLITS = ("validation", "test")


@dataclass(frozen=True)
class Record:
    """Base of the records of a run, with the iteration after which they are made."""

    iteration: int
    consumed_samples: int
    consumed_tokens: int


@dataclass(frozen=True)
class StepRecord(Record):
    """One optimizer step. The JSONL file has its fields as keys, in this order."""

    lm_loss: float
    """Mean over the global batch, in nats per token."""
    grad_norm: float | None
    """Gradient norm before clipping; not finite for a skipped step other than a spike, None if
    unknown."""
    learning_rate: float
    """Learning rate used in this step."""
    weight_decay: float
    global_batch_size: int
    loss_scale: float | None
    """None without fp16."""
    skipped: bool
    """The weights did not change, because the gradient was not finite or the step was a spike."""
    nan: bool
    """The loss was not finite."""
    seconds: float
    """Duration without evaluation and saving."""
    tokens_per_second: float
    """Sum over all devices."""
    tflops: float
    """10^12 model operations per second and device; recomputation is not counted."""
    warm_up: bool
    """The duration is not representative: first step of a process, or a compilation."""
    curriculum_seqlen: int | None = None
    """Tokens per sample in this step; None without --curriculum-seqlen."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by name, as `StepResult.extras`."""


STEP_FIELDS = frozenset(item.name for item in dataclasses.fields(StepRecord))


def metrics_of(record: StepRecord) -> dict[str, Any]:
    """All metrics of a step by name."""
    values = dataclasses.asdict(record)
    extras: dict[str, Any] = values.pop("extras")
    return values | extras


@dataclass(frozen=True)
class IntervalRecord:
    """The steps since the previous log interval."""

    last: StepRecord
    """Last step, the source of counters and settings."""
    total_iterations: int
    lm_loss: float | None
    """Mean over the steps that were not skipped; None if all were skipped."""
    params_norm: float | None
    """Norm of the parameters after the last step; None without --log-params-norm."""
    skipped: int
    nan: int
    seconds_per_iteration: float
    """Over the steps after warm-up; over all steps if there are none after it."""
    samples_per_second: float | None
    """Over the steps after warm-up, like the next two; None if there are none."""
    tokens_per_second_per_device: float | None
    tflops: float | None
    tokens_per_second: float | None = None
    """Sum over all devices."""
    seconds_left: float | None = None
    """Estimated seconds until the run ends; None if the speed is unknown."""
    times: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Milliseconds of parts of the last step on the ranks that have them, by name."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Means of further metrics over the steps that were not skipped."""


@dataclass(frozen=True)
class EvalRecord(Record):
    """One evaluation."""

    split: str
    """ "validation" or "test"."""
    label: str
    """Point of the run: "iteration 100", "the end of training for test data"."""
    loss: float
    group: str = ""
    """Name of the dataset, if the user gave one."""
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further metrics by name, which every logger writes, such as `bits_per_byte`."""

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of the text of the counted tokens; None if their bytes are unknown."""
        return self.extras.get("bits_per_byte")

    @property
    def ppl(self) -> float:
        """Perplexity; its exponent is limited to 20, as in Megatron, to stay printable. nan for a
        loss of nan."""
        return math.nan if math.isnan(self.loss) else math.exp(min(20.0, self.loss))


@dataclass(frozen=True)
class TaskRecord(Record):
    """Results of one task of --eval-tasks, or of one group of tasks."""

    task: str
    metrics: Mapping[str, float]
    """Values by name of the metric, such as "acc", or "exact_match,strict-match" with a filter."""


def metrics_of_evaluation(record: EvalRecord) -> dict[str, float]:
    """All metrics of an evaluation by name, which ends with `/` and the name of the dataset."""
    suffix = f"/{record.group}" if record.group else ""
    values = {"loss": record.loss, "ppl": record.ppl, **record.extras}
    return {f"{record.split}_{name}{suffix}": value for name, value in values.items()}


def metric_title(name: str) -> str:
    """Title of a metric in the log."""
    return name.replace("_", " ")


def metrics_of_task(record: TaskRecord) -> dict[str, float]:
    """All metrics of a task by name, which begins with the task's name and `/`."""
    return {f"{record.task}/{name}": value for name, value in record.metrics.items()}


class Logger:
    """Receives records on the reporting rank; this base class discards them."""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        """Writes the steps since the last call; a crash of this process must not lose them."""

    def log_interval(self, record: IntervalRecord) -> None:
        """Writes a log interval, after its steps."""

    def log_eval(self, record: EvalRecord) -> None:
        """Writes an evaluation, after the steps before it."""

    def log_task(self, record: TaskRecord) -> None:
        """Writes a task's results, after the steps before them."""

    def close(self) -> None:
        """Finishes writing; no call follows."""


class RowLogger(Logger):
    """Base of loggers that write the metrics of steps, evaluations and tasks by name."""

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            self.write_row(metrics_of(record))

    def log_eval(self, record: EvalRecord) -> None:
        self.write_row({"iteration": record.iteration, **metrics_of_evaluation(record)})

    def log_task(self, record: TaskRecord) -> None:
        self.write_row({"iteration": record.iteration, **metrics_of_task(record)})

    def write_row(self, values: Mapping[str, Any]) -> None:
        """Writes one iteration's metrics; those of a training step include `lm_loss`."""
