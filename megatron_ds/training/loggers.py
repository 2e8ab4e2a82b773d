"""Opens the loggers that the flags of a run select: console, JSONL file, TensorBoard.

Called on the reporting rank only. Knows flags, no formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, option
from megatron_ds.train_state import TrainState
from megatron_ds.training.console_logger import Console
from megatron_ds.training.jsonl_logger import JsonLines
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger, StepRecord


class BestEffortLogger(Logger):
    """Disables a logger, with a warning, when the disk fails; the run continues without it.

    Args:
        logger: Logger to wrap.
        name: Its name for users.
        warn: Prints a line.
    """

    def __init__(self, logger: Logger, name: str, warn: Callable[[str], object]) -> None:
        self._logger, self._name, self._warn = logger, name, warn

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._attempt(lambda: self._logger.log_steps(records))

    def log_interval(self, record: IntervalRecord) -> None:
        self._attempt(lambda: self._logger.log_interval(record))

    def log_eval(self, record: EvalRecord) -> None:
        self._attempt(lambda: self._logger.log_eval(record))

    def close(self) -> None:
        self._attempt(self._logger.close)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._logger = Logger()  # discards records
            warning = Problem("logger-disabled", name=self._name, error=error)
            self._warn(f"WARNING: {warning.render()}")


def open_loggers(
    config: Config,
    state: TrainState,
    *,
    world_size: int,
    dp_size: int,
    write: Callable[[str], object],
    memory: Callable[[], dict[str, int]] = dict,
) -> list[Logger]:
    """Opens the loggers of a run.

    Args:
        config: Configuration of the run.
        state: State from which the run starts; records after it are removed.
        world_size: Number of processes.
        dp_size: Data-parallel size.
        write: Prints a line and flushes it.
        memory: Returns the device's memory figures in bytes, by TensorBoard tag.

    Raises:
        UserError: If the JSONL file contains anything but records.
    """
    loggers: list[Logger] = [Console(write)]
    path = jsonl_path(config)
    if path is not None:
        loggers.append(JsonLines(path, state.iteration, warn=write))
    if config.logging.tensorboard_dir is not None:
        # Importing TensorBoard takes a second, and most runs do not use it.
        from megatron_ds.training.tensorboard_logger import TensorBoard

        board = TensorBoard(config, state, world_size=world_size, dp_size=dp_size, memory=memory)
        name = f"{option('tensorboard_dir')} {config.logging.tensorboard_dir}"
        loggers.append(BestEffortLogger(board, name, warn=write))
    return loggers


def jsonl_path(config: Config) -> Path | None:
    """--metrics-jsonl, or metrics.jsonl in --save; None without both."""
    if config.logging.metrics_jsonl is not None:
        return Path(config.logging.metrics_jsonl)
    return None if config.checkpoint.save is None else Path(config.checkpoint.save, "metrics.jsonl")
