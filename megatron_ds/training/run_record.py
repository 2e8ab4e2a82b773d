"""What a run returns to the program that started it. Imports no torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.training.records import EvalRecord, Logger, StepRecord


@dataclass(frozen=True)
class RunRecord:
    """What a process of a run has done. Every rank has the same values."""

    status: ExitCode = ExitCode.FINISHED
    """0 if the run is complete or was stopped by a flag or a callback, 130 if it was interrupted;
    docs/running/stopping_and_failures.md lists them."""
    iterations: Sequence[int] = ()
    """Numbers of the steps of this process, from 1, or from the one after the checkpoint."""
    losses: Sequence[float] = ()
    """Their losses in nats per token: means over the global batch."""
    last: StepRecord | None = None
    """All metrics of the last step; None if this process has made none."""
    evaluations: tuple[EvalRecord, ...] = ()
    """Evaluations in their order, of the validation and the test data."""
    checkpoint: str | None = None
    """Newest checkpoint of --save, a folder or URL; None if there is none."""

    @property
    def loss(self) -> float | None:
        """Loss of the last step; None if this process has made none."""
        return self.losses[-1] if self.losses else None

    def __repr__(self) -> str:
        steps = "no steps"
        if self.losses:
            steps = (
                f"iterations {self.iterations[0]} to {self.iterations[-1]}, "
                f"loss {self.losses[0]:.4f} to {self.losses[-1]:.4f}"
            )
        return f"<run: {self.status.name.lower()}, {steps}, checkpoint {self.checkpoint}>"


class RunRecorder(Logger):
    """Keeps what `RunRecord` has, in 16 bytes for each step."""

    def __init__(self) -> None:
        self._iterations = array("q")
        self._losses = array("d")
        self._last: StepRecord | None = None
        self._evaluations: list[EvalRecord] = []

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._iterations.extend(record.iteration for record in records)
        self._losses.extend(record.lm_loss for record in records)
        self._last = records[-1] if records else self._last

    def log_eval(self, record: EvalRecord) -> None:
        self._evaluations.append(record)

    def record(self, status: ExitCode, checkpoint: Path | None) -> RunRecord:
        """The record of the run so far."""
        evaluations = tuple(self._evaluations)
        steps = self._iterations, self._losses, self._last
        newest = None if checkpoint is None else str(checkpoint)
        return RunRecord(status, *steps, evaluations, newest)
