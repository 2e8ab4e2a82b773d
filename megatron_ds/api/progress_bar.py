"""A bar of a training's iterations, in a notebook or at a terminal."""

from __future__ import annotations

from typing import Any

from megatron_ds.config import Config
from megatron_ds.run_phases import RunPhases
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.extensions import Callback
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger


class ProgressBar(Callback, Logger):
    """Counts the iterations, and shows the loss of the last log interval and evaluation."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._shown: dict[str, str] = {}

    def open(self, config: Config, state: TrainState) -> Logger:
        """Opens the bar at the iteration from which a run starts."""
        from tqdm.auto import tqdm  # the widget in a notebook, text elsewhere

        total = RunPhases(config, 1).total_iterations(state)
        self._bar = tqdm(total=total, initial=state.iteration, desc="training", unit="iteration")
        return self

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if self._bar is not None:
            self._bar.update()

    def log_interval(self, record: IntervalRecord) -> None:
        if record.lm_loss is not None:
            self._show(loss=record.lm_loss)

    def log_eval(self, record: EvalRecord) -> None:
        self._show(**{f"{record.split} {record.group}".strip(): record.loss})

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _show(self, **losses: float) -> None:
        self._shown |= {name: f"{loss:.4f}" for name, loss in losses.items()}
        if self._bar is not None:
            self._bar.set_postfix(self._shown)
