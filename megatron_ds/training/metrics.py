"""Reduces the records of steps once per log interval and passes them to the loggers.

A step's loss may be an unsynchronized device tensor; it is read when the log interval ends. Owns
the averages and throughput. Knows no process group (the mean over data-parallel ranks is passed in
as a function), no format and no file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ds.config.problems import Problem
from megatron_ds.launch import output
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training.profile.stragglers import slowest_rank
from megatron_ds.training.records import (
    SPLITS,
    STEP_FIELDS,
    EvalRecord,
    IntervalRecord,
    Logger,
    StepRecord,
    TaskRecord,
)

MeanOverDp = Callable[[list[float]], list[float]]
"""Element-wise mean of a list over the data-parallel ranks; collective."""


@dataclass(frozen=True)
class ThroughputModel:
    """Converts samples to tokens and floating-point operations."""

    flops_per_sample: Callable[[int], int]
    """Model operations, forward and backward, of a sample of this many tokens; recomputation is not
    counted."""
    seq_length: int
    """Tokens of a full sample."""
    world_size: int
    curriculum: bool = False
    """Samples may be truncated (--curriculum-seqlen)."""

    def tokens(self, step: StepRecord) -> int:
        return step.global_batch_size * (step.curriculum_seqlen or self.seq_length)

    def tflops(self, step: StepRecord) -> float:
        """10^12 operations per device."""
        length = step.curriculum_seqlen or self.seq_length
        operations = step.global_batch_size * self.flops_per_sample(length)
        return operations / self.world_size / 1e12


@dataclass(frozen=True)
class _Step:
    state: TrainState
    plan: StepPlan
    result: StepResult
    seconds: float
    warm_up: bool
    figures: Mapping[str, float]


@dataclass
class Metrics:
    """Metrics of a run. Every rank builds one and makes the same calls."""

    workload: ThroughputModel
    log_interval: int
    """Iterations between two reductions."""
    total_iterations: int
    """Iterations of the run, for the printed line."""
    mean_over_dp: MeanOverDp
    params_norm: Callable[[], float] | None = None
    """Norm of all parameters; collective. Called once per log interval if given."""
    step_times: Callable[[], Mapping[str, Sequence[float]]] | None = None
    """Milliseconds of parts of the step that ends a log interval, of the ranks that have them;
    collective. The largest of each part becomes a metric of the step."""
    seconds_left: Callable[[TrainState, float], float] | None = None
    """Seconds until the run ends, given the state and tokens per second."""
    loggers: Sequence[Logger] = ()
    """Destinations of records; empty except on the reporting ranks."""
    _state: TrainState = field(default_factory=TrainState, init=False)
    """State after the last step."""
    _pending: list[_Step] = field(default_factory=list, init=False)
    _interval: list[StepRecord] = field(default_factory=list, init=False)
    _times: Mapping[str, Sequence[float]] = field(default_factory=dict, init=False)
    _has_warned: bool = field(default=False, init=False)
    """Whether steps without a counted token have been warned of."""

    def record(
        self,
        state: TrainState,
        plan: StepPlan,
        result: StepResult,
        seconds: float,
        warm_up: bool,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """Records a step, and logs the interval if it ends there.

        Args:
            state: State after the step.
            plan: Plan of the step.
            result: Result of the step on this rank. Its loss and extras may be 0-d tensors.
            seconds: Duration of the step without evaluation and saving.
            warm_up: Whether to exclude the step from the throughput of its interval, because its
                duration is not representative: the first step of a process, or one that compiles.
            figures: Further metrics of this rank by name, which are not averaged.
        """
        self._state = state
        self._pending.append(_Step(state, plan, result, seconds, warm_up, figures or {}))
        if state.iteration % self.log_interval == 0:
            if self.step_times is not None:
                self._add_times(self.step_times())
            self.flush()

    def _add_times(self, times: Mapping[str, Sequence[float]]) -> None:
        """Adds the times of the last step."""
        self._times = times
        last = self._pending[-1]
        extras = {f"time/{name}": max(values) for name, values in times.items()}
        extras |= slowest_rank(times)
        result = dataclasses.replace(last.result, extras={**last.result.extras, **extras})
        self._pending[-1] = dataclasses.replace(last, result=result)

    def log_eval(
        self,
        state: TrainState,
        split: str,
        label: str,
        loss: float,
        group: str = "",
        extras: Mapping[str, float] | None = None,
    ) -> None:
        """Logs an evaluation, after the steps before it. Collective.

        Args:
            state: State that was evaluated.
            split: "validation" or "test".
            label: Point of the run, for the printed line.
            loss: Mean over all ranks, in nats per token.
            group: Name of the dataset, if it has one.
            extras: Further metrics by name.
        """
        assert split in SPLITS, split
        self.write_pending()
        samples = state.consumed_samples
        tokens = state.consumed_tokens
        counts = state.iteration, samples, tokens
        record = EvalRecord(*counts, split, label, loss, group, extras or {})
        for logger in self.loggers:
            logger.log_eval(record)

    def log_task(self, state: TrainState, task: str, metrics: Mapping[str, float]) -> None:
        """Logs the results of a task, after the steps before them. Collective.

        Args:
            state: State that was evaluated.
            task: Name of the task.
            metrics: Its results by name, the same on all ranks.
        """
        self.write_pending()
        counts = state.iteration, state.consumed_samples, state.consumed_tokens
        for logger in self.loggers:
            logger.log_task(TaskRecord(*counts, task, metrics))

    def write_pending(self) -> None:
        """Passes the steps so far to the loggers without ending the log interval. Collective."""
        if not self._pending:
            return
        losses = [float(step.result.loss) for step in self._pending]
        extras = [float(value) for step in self._pending for value in step.result.extras.values()]
        means = iter(self.mean_over_dp([*losses, *extras]))
        mean_losses = [next(means) for _ in losses]
        records = [
            self._step_record(step, loss, {name: next(means) for name in step.result.extras})
            for step, loss in zip(self._pending, mean_losses, strict=True)
        ]
        self._pending.clear()
        self._interval.extend(records)
        empty = [str(record.iteration) for record in records if record.lm_loss == 0.0]
        if empty and not self._has_warned:
            self._has_warned = True
            output.warn_on_rank(Problem("no-counted-token", iterations=", ".join(empty)))
        for logger in self.loggers:
            logger.log_steps(records)

    def flush(self) -> None:
        """Logs everything recorded so far as an interval, complete or not. Collective."""
        self.write_pending()
        if not self._interval:
            return
        record = self._interval_record()
        self._interval.clear()
        self._times = {}
        for logger in self.loggers:
            logger.log_interval(record)

    def close(self) -> None:
        """Closes the loggers; call `flush` first. Not collective, so a failing rank may call it."""
        for logger in self.loggers:
            logger.close()

    def _step_record(self, step: _Step, lm_loss: float, extras: Mapping[str, float]) -> StepRecord:
        state = step.state
        plan = step.plan
        result = step.result
        workload = self.workload
        assert not extras.keys() & STEP_FIELDS, f"names of fields in {sorted(extras)}"
        record = StepRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            lm_loss=lm_loss,
            grad_norm=None if result.grad_norm is None else float(result.grad_norm),
            learning_rate=plan.lr,
            weight_decay=plan.weight_decay,
            global_batch_size=plan.global_batch_size,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            nan=not math.isfinite(lm_loss),
            seconds=step.seconds,
            tokens_per_second=0.0,
            tflops=0.0,
            warm_up=step.warm_up,
            curriculum_seqlen=plan.seq_length if workload.curriculum else None,
            extras={**extras, **step.figures},
        )
        return dataclasses.replace(
            record,
            tokens_per_second=workload.tokens(record) / step.seconds,
            tflops=workload.tflops(record) / step.seconds,
        )

    def _interval_record(self) -> IntervalRecord:
        steps = self._interval
        applied = [step for step in steps if not step.skipped]
        timed = [step for step in steps if not step.warm_up]
        workload = self.workload
        seconds = _seconds(timed)
        last = steps[-1]
        rate = sum(map(workload.tokens, timed)) / seconds if timed else None
        left = None
        if rate is not None and self.seconds_left is not None:
            left = self.seconds_left(self._state, rate)
        return IntervalRecord(
            last=last,
            total_iterations=self.total_iterations,
            lm_loss=_mean(step.lm_loss for step in applied),
            params_norm=None if self.params_norm is None else self.params_norm(),
            skipped=sum(step.skipped for step in steps),
            nan=sum(step.nan for step in steps),
            seconds_per_iteration=_seconds(timed or steps) / len(timed or steps),
            samples_per_second=(
                sum(step.global_batch_size for step in timed) / seconds if timed else None
            ),
            tokens_per_second_per_device=None if rate is None else rate / workload.world_size,
            tflops=math.fsum(map(workload.tflops, timed)) / seconds if timed else None,
            tokens_per_second=rate,
            seconds_left=left,
            times=self._times,
            extras=_mean_extras(applied),
        )


def _seconds(steps: Sequence[StepRecord]) -> float:
    return math.fsum(step.seconds for step in steps)


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None


def _mean_extras(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Means by name, each over the steps that have the metric."""
    names = dict.fromkeys(name for step in steps for name in step.extras)
    means = {
        name: _mean(step.extras[name] for step in steps if name in step.extras) for name in names
    }
    return {name: mean for name, mean in means.items() if mean is not None}
