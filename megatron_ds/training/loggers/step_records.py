"""Writes the records of --record-every, from which `training.replay.verification` checks a run.

One JSON object per recorded step, next to `metrics.jsonl`; docs/running/verifying.md documents the
keys. A resumed run removes the records after its checkpoint. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ds.config import Config
from megatron_ds.launch import output
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.extensions import Callback
from megatron_ds.training.loggers.jsonl_logger import JsonLines, always
from megatron_ds.training.loggers.selection import jsonl_path

FILE_NAME = "step_records.jsonl"


class StepRecordLog(Callback):
    """Writes what steps have recorded.

    Args:
        config: Configuration of the run.
        save: Local folder of --save.
        may_write: See `JsonLines`.
    """

    def __init__(
        self, config: Config, save: Path | None, may_write: Callable[[], bool] = always
    ) -> None:
        self._path = record_path(config, save)
        self._may_write = may_write
        self._lines: JsonLines | None = None

    def on_start(self, config: Config, state: TrainState, model: Any) -> None:
        if self._path is not None:
            self._lines = JsonLines(
                self._path, state.iteration, output.print_on_rank, self._may_write
            )

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if self._lines is not None and result.record is not None:
            self._lines.write({"iteration": state.iteration, **result.record})

    def on_end(self, state: TrainState) -> None:
        if self._lines is not None:
            self._lines.close()


def record_path(config: Config, save: Path | None) -> Path | None:
    """The file in the folder of metrics.jsonl; None without one."""
    path = jsonl_path(config, save)
    return None if path is None else path.with_name(FILE_NAME)
