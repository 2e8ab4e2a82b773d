"""The training loop: step, exit conditions, evaluation, checkpoint.

Owns the order of these, and the run's state. `build` puts the parts together; what they do is up to
them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from megatron_ds import schedules
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.engine.device_batches import DeviceBatch, DeviceBatches
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.evaluation.in_training import Stopped, TaskEvaluation
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.launch.watch.hang_watch import HangWatch
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import StepPlan, StepResult, TrainState
from megatron_ds.training.exit_conditions import ExitConditions, StopDecision
from megatron_ds.training.extensions import Callback, RunControl
from megatron_ds.training.metrics import Metrics
from megatron_ds.training.profile.profiling import Profiling
from megatron_ds.training.rerun import Rerun
from megatron_ds.training.saving import Saver
from megatron_ds.training.skipped_steps import SkippedSteps, nonfinite_weight
from megatron_ds.training.start.startup_report import FirstStepsReport, log_timestamp, report_phase


class EvalResult(NamedTuple):
    """Result of an evaluation."""

    loss: float
    """Mean loss in nats per token."""
    extras: dict[str, float]
    """Further metrics by name."""


MICRO_BATCHES_PER_CALL = 4
"""Micro-batches that are evaluated between two checks for a request to stop."""


@dataclass
class Trainer:
    """A run that is ready to train. Only `state` changes, and with its stage the data."""

    config: Config
    mesh: Mesh
    engine: ZeroEngine
    data: Datasets
    metrics: Metrics
    checkpoints: CheckpointManager
    exits: ExitConditions
    state: TrainState
    total_iterations: int
    report: FirstStepsReport
    later_data: Sequence[Datasets] = ()
    """Datasets of the phases after the current one."""
    profiling: Profiling | None = None
    callbacks: Sequence[Callback] = ()
    control: RunControl | None = None
    """What the callbacks of the run's program ask for; None if it has none."""
    tasks: TaskEvaluation | None = None
    """--eval-tasks and --eval-only."""
    token_bytes: Tensor | None = None
    """Bytes of the text of each token id, for bits per byte; None if unknown."""
    watch: HangWatch = field(default_factory=HangWatch)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.saver = Saver(self.config.checkpoint, self.checkpoints.saving, self.engine)
        self.skips = SkippedSteps(self.config.precision, self.engine)
        self.phases = RunPhases(self.config, self.mesh.dp.size)
        self.rerun = Rerun(
            self.config,
            self.mesh,
            self.engine,
            self.skips,
            lambda consumed, shift: self._batches(self.data.train, consumed, 0, shift),
            self._finish_saves,
            self.watch.patient,
        )
        self.first_iteration = self.state.iteration + 1
        self._validation: tuple[int, dict[str, EvalResult]] = -1, {}
        self._tasks_iteration = -1

    def run(self) -> ExitCode:
        """Trains until the last iteration or an exit condition, and evaluates at the end.

        Raises:
            UserError: If the training data ends early.
            RunAborted: If too many steps are skipped, or the last checkpoint cannot be saved.
        """
        with self.watch.running():
            return self._run()

    def _run(self) -> ExitCode:
        stop = self.exits.external_stop(self.state.iteration)
        if self.state.iteration >= self.total_iterations and self.config.evaluation.trains:
            _warn_of_complete_run(self.state.iteration, self.total_iterations)
        for callback in self.callbacks:
            callback.on_start(self.config, self.state, self.engine.module)
        log_timestamp(self.config, "before the start of training step")
        stop = stop if self.data.train is None else self._train(stop)  # None with --eval-only
        self.metrics.flush()
        self.report.print_memory(self.state.iteration)
        if stop is None:
            log_timestamp(self.config, "after training is done")
            stop = self._evaluate("validation", "the end of training for val data")
            stop = stop or self._evaluate("test", "the end of training for test data")
            stop = stop or self._evaluate_tasks()
        if stop is not None:
            output.print_on_rank(stop.message)
        with self.watch.patient():
            for callback in self.callbacks:
                callback.on_end(self.state)
            self.metrics.close()
        losses = [result.loss for result in self._validation[1].values()]
        return stop.code if stop else self.skips.code_at_the_end(self.first_iteration, losses)

    def _train(self, stop: StopDecision | None) -> StopDecision | None:
        """Trains until the last iteration, or until there is a reason to stop, which it returns."""
        batches = self._train_batches()
        while self.state.iteration < self.total_iterations and stop is None:
            entered = self.phases.entered(self.state)
            if entered.stage != self.state.stage:
                batches.close()
                self._enter(entered)
                batches = self._train_batches()
            if schedules.skipped_range(self.config, self.state.iteration + 1) is None:
                is_first = self.state.iteration + 1 == self.first_iteration
                with self.watch.patient() if is_first else nullcontext():
                    self._step(batches)
            else:
                self._skip(batches)
            stop = self.exits.after_step(self.state.iteration)
            self.saver.advance()
            options = self.config.evaluation
            if _is_due(self.state.iteration, options.eval_interval, stop):
                stop = self._evaluate("validation", f"iteration {self.state.iteration}") or stop
            interval = options.eval_tasks_interval or options.eval_interval
            if _is_due(self.state.iteration, interval, stop):
                stop = self._evaluate_tasks() or stop
            if self.control is not None:
                self.state, asked = self.exits.of_callbacks(self.control, self.state)
                stop = stop or asked
            if self.saver.is_local_due(self.state.iteration) and not self._is_last(stop):
                self.metrics.write_pending()
                _require_finite_weights(self.engine, self.state, self._finish_saves)
                with self.watch.patient():
                    self.saver.save_local(self.state, self._blend_history)
            if self.saver.is_due(self.state.iteration) or self._is_last(stop):
                with self.watch.patient():
                    self._save(final=self._is_last(stop))
                stop = stop or self.exits.external_stop(self.state.iteration)
        if self.profiling is not None:
            self.profiling.finish()
        with self.watch.patient():
            self.saver.finish(final=True)
        batches.close()
        return stop

    def _enter(self, state: TrainState) -> None:
        """Continues with the next stage: its data, schedules, sequences and positions."""
        self.metrics.flush()
        self.state = state
        self.data, *self.later_data = self.later_data
        self.engine.enter_phase(self.phases.at(state).model)
        report_phase(self.report.events, self.phases, state)

    def _train_batches(self) -> DeviceBatches:
        """The batches of the steps of the stage."""
        workers = self.config.data.num_workers
        return self._batches(self.data.train, self.state.consumed_samples, workers)

    def _step(self, batches: DeviceBatches) -> None:
        before = self.state
        plan = self.phases.plan(before)
        graphs = _graph_count()
        if self.profiling is not None:
            self.profiling.before_step(plan.iteration)
        start = self.clock()
        result = self.rerun.step(batches, plan, before.consumed_samples)
        seconds = self.clock() - start
        if self.profiling is not None:
            self.profiling.after_step(plan.iteration)
        # The first step fills caches; later steps of other shapes may compile a graph.
        is_first = plan.iteration == self.first_iteration
        warm_up = is_first or self.rerun.was_repeated or _graph_count() > graphs
        self.state = before.advance(plan, result)
        for callback in self.callbacks:
            callback.after_step(self.state, result)
        figures = None if self.control is None else self.control.take_figures()
        self.metrics.record(self.state, plan, result, seconds, warm_up, figures)
        self.report.after_step(plan.iteration)
        _report_spike(self.config, plan, result)
        if self.skips.limit_reached(result):
            self.metrics.flush()
            if not self.skips.has_record:
                self.rerun.record_gradients(plan, before.consumed_samples)
            raise self.skips.make_error(plan, result, self.state, self._finish_saves())

    def _skip(self, batches: DeviceBatches) -> None:
        """Skips an iteration of --skip-train-iteration-range: reads its samples."""
        plan = self.phases.plan(self.state)
        skipped = schedules.skipped_range(self.config, plan.iteration)
        assert skipped is not None
        for _ in range(plan.num_micro_batches):
            next(batches, None)  # a step after the end of the data reports it
        if plan.iteration in (skipped[0], self.first_iteration):
            _warn_of_skips(plan.iteration, min(skipped[1], self.total_iterations))
        self.first_iteration += int(self.first_iteration == plan.iteration)
        self.state = self.state.advance(plan, StepResult(loss=0.0, grad_norm=None, skipped=True))

    def _is_last(self, stop: StopDecision | None) -> bool:
        return stop is not None or self.state.iteration == self.total_iterations

    def _batches(
        self, dataset: TokenDataset | None, consumed: int = 0, num_workers: int = 0, shift: int = 0
    ) -> DeviceBatches:
        assert dataset is not None
        batches = MicroBatchIterator(
            dataset,
            consumed=consumed,
            micro_batch_size=self.phases.at(self.state).schedule.micro_batch_size,
            dp_rank=(self.mesh.dp.rank + shift) % self.mesh.dp.size,
            dp_size=self.mesh.dp.size,
            num_workers=num_workers,
            reads=self.mesh.same_batch.rank == 0,
        )
        return self.engine.device_batches(batches)

    def _evaluate(self, split: str, label: str) -> StopDecision | None:
        """Evaluates every dataset of a split.

        The validation after the last iteration and that at the end of the run are of the same
        weights and samples: it is computed once and logged twice.

        Returns:
            The decision to stop, if an external request interrupted the evaluation.
        """
        datasets = self.data.valid if split == "validation" else self.data.test
        iteration, known = self._validation
        results: dict[str, EvalResult] = {}
        if split == "validation" and iteration == self.state.iteration:
            results.update(known)
        for name, dataset in datasets.items():
            result = results[name] if name in results else self._mean_loss(dataset)
            if isinstance(result, StopDecision):
                return result
            results[name] = result
            self.metrics.log_eval(self.state, split, label, result.loss, name, result.extras)
        if split == "validation":
            self._validation = self.state.iteration, results
        for callback in self.callbacks:
            losses = {name: result.loss for name, result in results.items()}
            callback.after_evaluation(self.state, split, losses)
        return None

    def _evaluate_tasks(self) -> StopDecision | None:
        """Evaluates --eval-tasks and --eval-only, once after an iteration.

        Returns:
            The decision to stop, if an external request interrupted the evaluation.
        """
        if self.tasks is None or self._tasks_iteration == self.state.iteration:
            return None
        stop: StopDecision | None = None

        def is_stopped() -> bool:
            nonlocal stop
            stop = self.exits.external_stop(self.state.iteration)
            self.saver.advance()
            return stop is not None

        try:
            results = self.tasks.run(is_stopped)
        except Stopped:
            return stop
        self._tasks_iteration = self.state.iteration
        for name, metrics, is_perplexity in results:
            if is_perplexity:
                label = f"iteration {self.state.iteration}"
                loss = metrics["loss"]
                extras = {key: value for key, value in metrics.items() if key == "bits_per_byte"}
                self.metrics.log_eval(self.state, "validation", label, loss, name, extras)
            else:
                self.metrics.log_task(self.state, name, metrics)
        return None

    def _mean_loss(self, dataset: TokenDataset) -> EvalResult | StopDecision:
        """Computes the loss over the first --eval-iters batches of a dataset. Collective.

        Every evaluation of a run reads the same samples, so losses are comparable and a resumed run
        repeats them.

        Returns:
            The loss, or the decision to stop that interrupted the evaluation.
        """
        config = self.phases.at(self.state)
        dp_size = self.mesh.dp.size
        samples = config.evaluation.eval_iters * config.final_global_batch_size(dp_size)
        count = samples // (config.schedule.micro_batch_size * dp_size)
        parts = []
        num_bytes = list[Tensor]()
        with closing(self._batches(dataset)) as batches:
            inputs = _with_bytes(batches, self.token_bytes, num_bytes)
            for done in range(0, count, MICRO_BATCHES_PER_CALL):
                stop = self.exits.external_stop(self.state.iteration)
                if stop is not None:
                    return stop
                self.saver.advance()
                size = min(MICRO_BATCHES_PER_CALL, count - done)
                parts.append(self.engine.eval_loss(inputs, size))
        sums = [*(sum(map(float, values)) for values in zip(*parts, strict=True))]
        sums.append(sum(map(float, num_bytes)))
        return _mean_of(self.metrics.mean_over_dp([value / count for value in sums]))

    def _save(self, *, final: bool) -> None:
        """Saves a checkpoint if there is a --save folder.

        Args:
            final: The run ends with this checkpoint.
        """
        if self.config.checkpoint.save is None:
            return
        # A resumed run does not repeat these steps, so their records must be written first.
        self.metrics.write_pending()
        for callback in self.callbacks:
            callback.before_save(self.state)
        _require_finite_weights(self.engine, self.state, self._finish_saves)
        after_skip = self.skips.last_was_skipped
        self.saver.save(self.state, self._blend_history, final=final, after_skip=after_skip)

    def _finish_saves(self) -> str:
        """Completes a save in the background; says from where to resume after an error."""
        self.saver.finish(final=False)
        newest = self.checkpoints.newest
        return f"Resume from {newest}" if newest else "No checkpoint to resume from"

    def _blend_history(self) -> BlendHistory:
        assert self.data.progress is not None
        return self.data.progress.history_after(self.state.consumed_samples)


def _warn_of_complete_run(iteration: int, last: int) -> None:
    output.warn_on_rank(Problem("run-complete", iteration=iteration, last=last))


def _require_finite_weights(
    engine: ZeroEngine, state: TrainState, finish_saves: Callable[[], str]
) -> None:
    """Ends the run before it saves weights that it cannot continue with."""
    if not engine.has_finite_weights():
        values = {"weight": nonfinite_weight(engine), "resume": finish_saves()}
        problem = Problem("training-diverged", iteration=state.iteration, **values)
        raise RunAborted(problem.render(), ExitCode.SKIPPED_STEPS)


def _mean_of(sums: Sequence[float]) -> EvalResult:
    """Mean loss from the sums of losses, weights, nats and bytes."""
    total, weight, nats, text = sums
    extras = {"bits_per_byte": nats / text / math.log(2)} if text else {}
    return EvalResult(total / weight if weight else 0.0, extras)


def _with_bytes(
    batches: Iterator[DeviceBatch], token_bytes: Tensor | None, num_bytes: list[Tensor]
) -> Iterator[DeviceBatch]:
    """The batches, the bytes of whose counted labels are appended to `num_bytes`."""
    for batch in batches:
        if token_bytes is not None:
            num_bytes.append(batch.num_bytes(token_bytes))
        yield batch


def _is_due(iteration: int, interval: int | None, stop: StopDecision | None) -> bool:
    """Whether an evaluation with an interval is due."""
    if interval is None or (stop is not None and stop.urgent):
        return False
    return iteration % interval == 0


def _warn_of_skips(first: int, last: int) -> None:
    iterations = f"iteration {last}" if first == last else f"iterations {first} to {last}"
    output.warn_on_rank(Problem("iterations-skipped", iterations=iterations))


def _graph_count() -> int:
    """Graphs that torch.compile has compiled."""
    # Importing it takes a second, and where it was not imported nothing is compiled.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])


def _report_spike(config: Config, plan: StepPlan, result: StepResult) -> None:
    if not result.is_spike:
        return
    assert plan.limits is not None
    assert result.compared is not None
    options = config.optimizer
    output.warn_on_rank(Problem("loss-spike-skipped", settings=options, plan=plan, result=result))
