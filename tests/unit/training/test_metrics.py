"""When records are reduced and logged, and their averages."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training.metrics import Metrics, ThroughputModel
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger, StepRecord

WORKLOAD = ThroughputModel(lambda tokens: 3 * 10**12 * tokens // 8, seq_length=8, world_size=2)


class RecordingLogger(Logger):
    """Keeps records in order."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.closed = False
        self.log_steps = self.seen.extend
        self.log_interval = self.seen.append
        self.log_eval = self.log_interval

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type) -> list[object]:
        return [record for record in self.seen if isinstance(record, kind)]


class Run:
    """A training loop without a model; steps take 4 samples and half a second."""

    def __init__(
        self, log_interval: int, workload: ThroughputModel = WORKLOAD, **settings: object
    ) -> None:
        self.logger = RecordingLogger()
        self.reductions: list[list[float]] = []
        self.metrics = Metrics(
            workload,
            log_interval=log_interval,
            total_iterations=50,
            mean_over_dp=self.mean,
            loggers=[self.logger],
            **settings,
        )
        self.state = TrainState()

    def mean(self, losses: list[float]) -> list[float]:
        """The mean with another rank whose values are higher by 2."""
        self.reductions.append(losses)
        return [loss + 1.0 for loss in losses]

    def step(
        self,
        loss: float,
        *,
        batch: int = 4,
        seconds: float = 0.5,
        warm_up: bool = False,
        seq_length: int = 8,
        **result: object,
    ) -> None:
        plan = StepPlan(self.state.iteration + 1, batch, 1, 0.5, 0.25, seq_length)
        done = StepResult(loss, **{"grad_norm": 1.0, **result})
        self.state = self.state.advance(plan, done)
        self.metrics.record(self.state, plan, done, seconds, warm_up=warm_up)

    def intervals(self) -> list[IntervalRecord]:
        return self.logger.of(IntervalRecord)

    def steps(self) -> list[StepRecord]:
        return self.logger.of(StepRecord)


def test_one_collective_per_log_interval() -> None:
    run = Run(log_interval=3)
    for loss in (1.0, 2.0, 3.0, 4.0, 5.0):
        run.step(loss)
    assert run.reductions == [[1.0, 2.0, 3.0]]
    run.step(6.0)
    assert run.reductions == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert [record.last.iteration for record in run.intervals()] == [3, 6]
    assert [record.lm_loss for record in run.steps()] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def test_losses_are_read_when_the_interval_ends() -> None:
    read = []

    class Unfinished:
        """Like a device tensor: reading it synchronizes."""

        def __init__(self, value: float) -> None:
            self.value = value

        def __float__(self) -> float:
            read.append(self.value)
            return self.value

    run = Run(log_interval=2)
    run.step(Unfinished(1.0), grad_norm=Unfinished(7.0))
    assert read == []
    run.step(Unfinished(2.0))
    assert sorted(read) == [1.0, 2.0, 7.0]
    assert run.steps()[0].grad_norm == 7.0


def test_ranks_without_loggers_take_part_in_collectives() -> None:
    reductions = []
    norms = []
    metrics = Metrics(
        WORKLOAD,
        log_interval=1,
        total_iterations=1,
        mean_over_dp=lambda losses: reductions.append(losses) or losses,
        params_norm=lambda: norms.append(1) or 1.0,
    )
    plan = StepPlan(1, 4, 1, 0.5, 0.0, 8)
    result = StepResult(3.0, None)
    metrics.record(TrainState().advance(plan, result), plan, result, 1.0, False)
    assert (reductions, norms) == ([[3.0]], [1])


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    times = {
        "step": [10.0, 10.0, 10.1],
        "forward-compute": [4.0, 4.0, 4.1],
        "communication": [4.0, 1.0, 4.1],
    }
    run = Run(log_interval=1, step_times=lambda: times)
    run.metrics.mean_over_dp = lambda values: values
    run.step(1.0)
    (step,) = run.steps()
    assert step.extras["time/slowest_rank"] == 1.0
    assert step.extras["time/slowest_rank_excess"] == pytest.approx(0.5)


def test_times_belong_to_the_last_step_of_an_interval() -> None:
    taken = []
    times = {"step": [4.0, 6.0], "communication": [1.0, 1.0], "forward-send": [2.0]}
    run = Run(log_interval=2, step_times=lambda: taken.append(1) or times)
    run.metrics.mean_over_dp = lambda values: values
    for _ in range(4):
        run.step(1.0, extras={"aux": 1.0})
    run.step(1.0)
    run.metrics.flush()
    assert len(taken) == 2
    named = {"time/step": 6.0, "time/communication": 1.0, "time/forward-send": 2.0}
    named |= {"time/slowest_rank": 1.0, "time/slowest_rank_excess": 0.25}
    assert [step.extras for step in run.steps()] == [*({"aux": 1.0}, {"aux": 1.0, **named}) * 2, {}]
    assert [record.times for record in run.intervals()] == [times, times, {}]


def test_the_interval_averages_steps_that_were_not_skipped() -> None:
    run = Run(log_interval=4)
    run.step(1.0)
    run.step(float("nan"), skipped=True, grad_norm=float("inf"))
    run.step(8.0, skipped=True)
    run.step(4.0)
    (record,) = run.intervals()
    assert record.lm_loss == pytest.approx(3.5)
    assert (record.skipped, record.nan) == (2, 1)
    assert [step.skipped for step in run.steps()] == [False, True, True, False]
    assert [step.nan for step in run.steps()] == [False, True, False, False]
    for _ in range(4):
        run.step(1.0, skipped=True)
    assert [(each.lm_loss, each.skipped) for each in run.intervals()][1:] == [(None, 4)]


def test_the_time_left_is_that_of_the_state_at_the_current_rate() -> None:
    asked: list[tuple[TrainState, float]] = []
    run = Run(log_interval=2, seconds_left=lambda *at: asked.append(at) or 7.0)
    run.step(1.0, warm_up=True)
    run.step(1.0, warm_up=True)
    run.step(1.0, seconds=1.0)
    run.step(1.0, seconds=3.0)
    assert [(each.seconds_left, each.tokens_per_second) for each in run.intervals()] == [
        (None, None),
        (7.0, 16.0),
    ]
    ((state, rate),) = asked
    assert (state, rate) == (TrainState(4, 16, 128, 16, 128, 4), 16.0)


def test_throughput_is_computed_from_step_durations() -> None:
    run = Run(log_interval=2)
    run.step(1.0, batch=4, seconds=1.0)
    run.step(1.0, batch=8, seconds=3.0)
    first, second = run.steps()
    assert (first.seconds, first.tokens_per_second, first.tflops) == (1.0, 32.0, 6.0)
    assert second.tokens_per_second == pytest.approx(64 / 3)
    (record,) = run.intervals()
    assert record.seconds_per_iteration == 2.0
    assert record.samples_per_second == 3.0
    assert record.tokens_per_second_per_device == 12.0
    assert record.tflops == pytest.approx(4.5)


def test_truncated_samples_count_with_their_length() -> None:
    workload = dataclasses.replace(WORKLOAD, curriculum=True)
    run = Run(log_interval=2, workload=workload)
    run.step(1.0, batch=4, seconds=1.0, seq_length=4)
    run.step(1.0, batch=8, seconds=3.0)
    assert (run.state.consumed_tokens, run.state.applied_tokens) == (80, 80)
    first, second = run.steps()
    assert (first.curriculum_seqlen, second.curriculum_seqlen) == (4, 8)
    assert (first.tokens_per_second, first.tflops) == (16.0, 3.0)
    (record,) = run.intervals()
    assert record.samples_per_second == 3.0
    assert record.tokens_per_second_per_device == 10.0
    assert record.tflops == pytest.approx((3.0 + 12.0) / 4)


def test_warm_up_is_excluded_from_throughput() -> None:
    run = Run(log_interval=3)
    run.step(1.0, batch=8, seconds=60.0, warm_up=True)
    run.step(4.0, seconds=1.0)
    run.step(7.0, seconds=3.0)
    (record,) = run.intervals()
    assert (record.seconds_per_iteration, record.samples_per_second) == (2.0, 2.0)
    assert (record.tokens_per_second_per_device, record.tflops) == (8.0, 3.0)
    assert record.lm_loss == pytest.approx(5.0)
    assert [step.seconds for step in run.steps()] == [60.0, 1.0, 3.0]
    assert [step.warm_up for step in run.steps()] == [True, False, False]


def test_a_step_record_has_the_state_after_and_the_plan_of_the_step() -> None:
    run = Run(log_interval=1)
    run.step(1.0, loss_scale=64.0)
    (record,) = run.steps()
    assert (record.iteration, record.consumed_samples, record.consumed_tokens) == (1, 4, 32)
    assert (record.learning_rate, record.weight_decay, record.global_batch_size) == (0.5, 0.25, 4)
    assert (record.loss_scale, record.grad_norm) == (64.0, 1.0)
    assert record.curriculum_seqlen is None


def test_write_pending_logs_steps_without_ending_the_interval() -> None:
    run = Run(log_interval=3)
    run.step(1.0)
    run.metrics.write_pending()
    run.metrics.write_pending()
    assert [record.iteration for record in run.steps()] == [1]
    assert run.intervals() == []
    run.step(2.0)
    run.step(3.0)
    (record,) = run.intervals()
    assert record.lm_loss == pytest.approx(3.0)
    assert run.reductions == [[1.0], [2.0, 3.0]]


def test_further_metrics_are_averaged_over_ranks_and_steps() -> None:
    run = Run(log_interval=3)
    run.step(1.0, extras={"aux loss": 2.0})
    run.step(5.0, extras={"aux loss": 100.0}, skipped=True)
    run.step(3.0, extras={"aux loss": 4.0, "z-loss": 0.5})
    assert run.reductions == [[1.0, 5.0, 3.0, 2.0, 100.0, 4.0, 0.5]]
    assert [record.lm_loss for record in run.steps()] == [2.0, 6.0, 4.0]
    assert [dict(record.extras) for record in run.steps()] == [
        {"aux loss": 3.0},
        {"aux loss": 101.0},
        {"aux loss": 5.0, "z-loss": 1.5},
    ]
    assert run.intervals()[0].extras == {"aux loss": 4.0, "z-loss": 1.5}


def test_flush_logs_an_incomplete_interval_once() -> None:
    run = Run(log_interval=10)
    run.step(1.0)
    run.step(3.0)
    run.metrics.flush()
    run.metrics.flush()
    (record,) = run.intervals()
    assert (record.last.iteration, record.lm_loss) == (2, 3.0)


def test_an_evaluation_is_logged_after_the_steps_before_it() -> None:
    run = Run(log_interval=10)
    run.step(1.0)
    run.metrics.log_eval(run.state, "test", "the end", 2.5)
    step, evaluation = run.logger.seen
    assert isinstance(step, StepRecord)
    assert evaluation == EvalRecord(1, 4, 32, "test", "the end", 2.5)


@pytest.mark.parametrize(("loss", "ppl"), [(2.0, math.exp(2)), (30.0, math.exp(20))])
def test_perplexity_is_limited_and_nan_for_a_loss_of_nan(loss: float, ppl: float) -> None:
    assert EvalRecord(1, 4, 32, "test", "the end", loss).ppl == pytest.approx(ppl)
    assert math.isnan(EvalRecord(1, 4, 32, "test", "the end", math.nan).ppl)


def test_the_parameter_norm_is_computed_once_per_interval() -> None:
    norms = iter([1.5, 2.5])
    run = Run(log_interval=2, params_norm=lambda: next(norms))
    for _ in range(4):
        run.step(1.0)
    assert [record.params_norm for record in run.intervals()] == [1.5, 2.5]


def test_steps_without_a_counted_token_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Their loss is 0 on all ranks, which no other loss is."""
    run = Run(log_interval=4)
    for loss in (2.0, -1.0, -1.0, 0.0, *[-1.0] * 4):  # of this rank; the mean is higher by 1
        run.step(loss)
    warning = capsys.readouterr().out
    assert "iteration 2, 3: " in warning
    assert warning.count("[no-counted-token]") == 1
    assert "--eod-mask-loss" in warning


def test_close_closes_the_loggers_without_a_collective() -> None:
    run = Run(log_interval=10)
    run.step(1.0)
    run.metrics.close()
    assert run.logger.closed
    assert run.reductions == []


def test_perplexity_stays_finite() -> None:
    assert EvalRecord(1, 1, 1, "validation", "", 0.0).ppl == 1.0
    assert EvalRecord(1, 1, 1, "validation", "", 1e6).ppl == pytest.approx(4.851651954e8)
