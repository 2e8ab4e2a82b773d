"""Records are produced by the loop, reduced here at the log interval, and formatted by the sinks.

Nothing waits for a device between two log intervals: a step's loss may be a tensor that is still
being computed, and it is read when its interval ends. This file owns the averages and the clock's
arithmetic; it knows no process group (the mean over data-parallel ranks is a function given in), no
format and no file.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training.records import SPLITS, EvalRecord, IntervalRecord, Logger, StepRecord


@dataclass(frozen=True)
class ThroughputModel:
    """What turns samples into tokens and operations."""

    flops_per_sample: Callable[[int], int]
    """Of the whole model, forward and backward, for a sample of so many tokens; recomputation not
    counted.
    """
    seq_length: int
    """Of a sample that is not cut."""
    world_size: int
    curriculum: bool = False
    """Samples may be cut (--curriculum-seqlen)."""

    def tokens(self, step: StepRecord) -> int:
        return step.global_batch_size * (step.curriculum_seqlen or self.seq_length)

    def tflops(self, step: StepRecord) -> float:
        """10^12 operations for each device."""
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


class Metrics:
    """A run's figures. All ranks build one and call it alike; the reporting rank's alone has sinks.

    log_interval: iterations between two reductions.
    mean_over_dp: element-wise mean of a list over the data-parallel ranks; a collective.
    params_norm: norm of all parameters; a collective, called once per log interval if given.
    """

    def __init__(
        self,
        workload: ThroughputModel,
        *,
        log_interval: int,
        total_iterations: int,
        mean_over_dp: Callable[[list[float]], list[float]],
        params_norm: Callable[[], float] | None = None,
        sinks: Sequence[Logger] = (),
    ) -> None:
        self._workload = workload
        self._log_interval = log_interval
        self._total_iterations = total_iterations
        self._mean_over_dp = mean_over_dp
        self._params_norm = params_norm
        self._sinks = tuple(sinks)
        self._pending: list[_Step] = []
        self._interval: list[StepRecord] = []

    def record(
        self,
        state: TrainState,
        plan: StepPlan,
        result: StepResult,
        seconds: float,
        *,
        warm_up: bool = False,
    ) -> None:
        """Notes a step; reports at the end of a log interval.

        state: after the step. result.loss and result.grad_norm: numbers or 0-d tensors without
        history; the loss is this rank's own mean. seconds: of the step alone. warm_up: its
        seconds are kept out of the interval's speeds.
        """
        self._pending.append(_Step(state, plan, result, seconds, warm_up))
        if state.iteration % self._log_interval == 0:
            self.flush()

    def log_eval(
        self, state: TrainState, split: str, where: str, loss: float, group: str = ""
    ) -> None:
        """Notes an evaluation, after the steps before it.

        split: "validation" or "test". where: what stands in the printed line. loss: the mean over
        all ranks. group: name of the group of data, if it has one.
        """
        assert split in SPLITS, split
        self.write_pending()
        record = EvalRecord(
            iteration=state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            split=split,
            label=where,
            loss=loss,
            group=group,
        )
        for sink in self._sinks:
            sink.log_eval(record)

    def write_pending(self) -> None:
        """Hands the steps so far to the sinks without ending the log interval; a collective.

        To be called before a checkpoint is written: a run that resumes from it does not repeat the
        steps before it, so their records must not be lost with the process.
        """
        if not self._pending:
            return
        losses = self._mean_over_dp([float(step.result.loss) for step in self._pending])
        records = [self._step_record(*pair) for pair in zip(self._pending, losses, strict=True)]
        self._pending.clear()
        self._interval.extend(records)
        for sink in self._sinks:
            sink.log_steps(records)

    def flush(self) -> None:
        """Reports all that was recorded, be the log interval full or not; a collective."""
        self.write_pending()
        if not self._interval:
            return
        record = self._interval_record()
        self._interval.clear()
        for sink in self._sinks:
            sink.log_interval(record)

    def close(self) -> None:
        """Closes the sinks. No collective, so that a failing rank may call it; `flush` first."""
        for sink in self._sinks:
            sink.close()

    def _step_record(self, step: _Step, lm_loss: float) -> StepRecord:
        state, plan, result = step.state, step.plan, step.result
        workload = self._workload
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
        )
        return dataclasses.replace(
            record,
            tokens_per_second=workload.tokens(record) / step.seconds,
            tflops=workload.tflops(record) / step.seconds,
        )

    def _interval_record(self) -> IntervalRecord:
        steps = self._interval
        advanced = [step.lm_loss for step in steps if not step.skipped]
        timed = [step for step in steps if not step.warm_up]
        workload, seconds = self._workload, _seconds(timed)
        return IntervalRecord(
            last=steps[-1],
            total_iterations=self._total_iterations,
            lm_loss=sum(advanced) / len(advanced) if advanced else None,
            params_norm=None if self._params_norm is None else self._params_norm(),
            skipped=sum(step.skipped for step in steps),
            nan=sum(step.nan for step in steps),
            seconds_per_iteration=_seconds(timed or steps) / len(timed or steps),
            samples_per_second=(
                sum(step.global_batch_size for step in timed) / seconds if timed else None
            ),
            tokens_per_second_per_device=(
                sum(map(workload.tokens, timed)) / seconds / workload.world_size if timed else None
            ),
            tflops=math.fsum(map(workload.tflops, timed)) / seconds if timed else None,
        )


def _seconds(steps: Sequence[StepRecord]) -> float:
    return math.fsum(step.seconds for step in steps)
