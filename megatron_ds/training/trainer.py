"""The training loop: step, exit conditions, evaluation, checkpoint.

Owns the order of these, and the run's state. `setup` puts the parts together; what they do is up to
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ds import schedules
from megatron_ds.checkpoint.manager import CheckpointManager, SaveError
from megatron_ds.checkpoint.selection import latest_before
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, option
from megatron_ds.data.blend_history import BlendHistory
from megatron_ds.data.build_datasets import Datasets
from megatron_ds.data.micro_batches import MicroBatchIterator
from megatron_ds.engine.protocol import Engine
from megatron_ds.launch import output
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from megatron_ds.training.evaluate import MeanOverDp, evaluate
from megatron_ds.training.exit_conditions import ExitConditions, StopDecision
from megatron_ds.training.metrics import Metrics, StepTimer
from megatron_ds.training.skipped_steps import SkippedSteps
from megatron_ds.training.startup_report import FirstStepsReport, log_timestamp


@dataclass
class Trainer:
    """A run that is ready to train. Only `state` changes."""

    config: Config
    mesh: Mesh
    engine: Engine
    data: Datasets
    metrics: Metrics
    checkpoints: CheckpointManager
    exits: ExitConditions
    state: TrainState
    total_iterations: int
    eod: int | None
    """Id of the end-of-document token if it is masked in the loss."""
    mean_over_dp: MeanOverDp
    report: FirstStepsReport
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self.skips = SkippedSteps(self.config.precision, self.engine)
        self.timer = StepTimer(
            self.state.iteration + 1, compiled=self.config.runtime.compile, clock=self.clock
        )

    def run(self) -> ExitCode:
        """Trains until the last iteration or an exit condition, and evaluates at the end.

        Raises:
            UserError: If the training data ends early.
            RunAborted: If too many steps are skipped, or the last checkpoint cannot be saved.
        """
        stop = self.exits.external_stop(self.state.iteration)
        batches = self._batches()
        log_timestamp("before the start of training step")
        while self.state.iteration < self.total_iterations and stop is None:
            self._step(batches)
            stop = self.exits.after_step(self.state.iteration)
            if self._is_evaluation_due(stop):
                stop = self._evaluate("validation", f"iteration {self.state.iteration}") or stop
            if self._is_last(stop) or self._is_due(self.config.checkpoint.save_interval):
                self._save(final=self._is_last(stop))
                stop = stop or self.exits.external_stop(self.state.iteration)
        batches.close()
        self.metrics.flush()
        self.report.print_memory(self.state.iteration)
        if stop is None:
            log_timestamp("after training is done")
            stop = self._evaluate("validation", "the end of training for val data")
            stop = stop or self._evaluate("test", "the end of training for test data")
        if stop is not None:
            output.print_on_rank(stop.message)
        self.metrics.close()
        return ExitCode.FINISHED if stop is None else stop.code

    def _step(self, batches: MicroBatchIterator) -> None:
        plan = schedules.plan(self.config, self.state, self.mesh.dp.size)
        with self.timer.measure(plan.iteration), self.skips.record_gradients():
            result = self.engine.train_step(batches, plan)
        self.state = self.state.advance(plan, result)
        self.metrics.record(
            self.state, plan, result, self.timer.seconds, warm_up=self.timer.is_warm_up
        )
        self.report.after_step(plan.iteration)
        if self.skips.limit_reached(result):
            self.metrics.flush()
            folders = [self.config.checkpoint.save, self.config.checkpoint.load]
            checkpoint = latest_before(folders, plan.iteration)
            raise self.skips.make_error(plan, result, self.state, checkpoint)

    def _is_due(self, interval: int | None) -> bool:
        return interval is not None and self.state.iteration % interval == 0

    def _is_last(self, stop: StopDecision | None) -> bool:
        return stop is not None or self.state.iteration == self.total_iterations

    def _is_evaluation_due(self, stop: StopDecision | None) -> bool:
        urgent = stop is not None and stop.urgent
        return not urgent and self._is_due(self.config.logging.eval_interval)

    def _batches(self) -> MicroBatchIterator:
        assert self.data.train is not None
        return MicroBatchIterator(
            self.data.train,
            consumed=self.state.consumed_samples,
            micro_batch_size=self.config.schedule.micro_batch_size,
            dp_rank=self.mesh.dp.rank,
            dp_size=self.mesh.dp.size,
            num_workers=self.config.data.num_workers,
            eod=self.eod,
        )

    def _evaluate(self, split: str, label: str) -> StopDecision | None:
        """Evaluates every dataset of a split.

        Returns:
            The decision to stop, if an external request interrupted the evaluation.
        """
        datasets = self.data.valid if split == "validation" else self.data.test
        batch_size = self.config.final_global_batch_size(self.mesh.dp.size)
        stop: StopDecision | None = None

        def is_stopped() -> bool:
            nonlocal stop
            stop = self.exits.external_stop(self.state.iteration)
            return stop is not None

        for name, dataset in datasets.items():
            loss = evaluate(
                self.engine,
                dataset,
                self.mesh,
                samples=self.config.logging.eval_iters * batch_size,
                micro_batch_size=self.config.schedule.micro_batch_size,
                eod=self.eod,
                mean_over_dp=self.mean_over_dp,
                is_stopped=is_stopped,
            )
            if loss is None:
                break
            self.metrics.log_eval(self.state, split, label, loss, name)
        return stop

    def _save(self, *, final: bool) -> None:
        """Saves a checkpoint if there is a --save folder.

        Args:
            final: The run ends with this checkpoint, so a failed save is an error in any case.
        """
        if self.config.checkpoint.save is None:
            return
        # A resumed run does not repeat these steps, so their records must be written first.
        self.metrics.write_pending()
        try:
            self.checkpoints.save(self.engine, self.state, self._blend_history)
        except SaveError as error:
            if final or self.config.checkpoint.on_save_error == "exit":
                raise
            flag = option("on_save_error")
            warning = Problem("save-skipped", problem=error.problem, flag=flag)
            output.print_on_rank(f"WARNING: {warning.render()}")

    def _blend_history(self) -> BlendHistory:
        assert self.data.progress is not None
        return self.data.progress.history_after(self.state.consumed_samples)
