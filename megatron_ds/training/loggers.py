"""Opens what the run's flags ask for: the console, the JSONL file, TensorBoard.

Only the reporting rank calls this. It knows the flags; the formats are its neighbours'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.console_logger import Console
from megatron_ds.training.jsonl_logger import JsonLines
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger, StepRecord


class BestEffortLogger(Logger):
    """A sink that a run goes on without, after a word, when it has an error of the disk.

    name: what the user calls it. warn: prints a line.
    """

    def __init__(self, sink: Logger, name: str, warn: Callable[[str], object]) -> None:
        self._sink, self._name, self._warn = sink, name, warn

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._attempt(lambda: self._sink.log_steps(records))

    def log_interval(self, record: IntervalRecord) -> None:
        self._attempt(lambda: self._sink.log_interval(record))

    def log_eval(self, record: EvalRecord) -> None:
        self._attempt(lambda: self._sink.log_eval(record))

    def close(self) -> None:
        self._attempt(self._sink.close)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._sink = Logger()  # takes records and drops them
            self._warn(
                f"WARNING: {self._name} takes no more records ({error}); the run goes on without it"
            )


def open_sinks(
    config: Config,
    state: TrainState,
    *,
    world_size: int,
    dp_size: int,
    write: Callable[[str], object],
    memory: Callable[[], dict[str, int]] = dict,
) -> list[Logger]:
    """The sinks of a run that starts from `state`.

    write: prints a line and flushes it. memory: the device's figures by TensorBoard tag, in bytes.
    Raises ValueError if the JSONL file holds something else.
    """
    sinks: list[Logger] = [Console(write)]
    path = jsonl_path(config)
    if path is not None:
        sinks.append(JsonLines(path, state.iteration, warn=write))
    if config.logging.tensorboard_dir is not None:
        # Here, and not at the top: TensorBoard costs a second, and most runs want none.
        from megatron_ds.training.tensorboard_logger import TensorBoard

        board = TensorBoard(config, state, world_size=world_size, dp_size=dp_size, memory=memory)
        name = f"--tensorboard-dir {config.logging.tensorboard_dir}"
        sinks.append(BestEffortLogger(board, name, warn=write))
    return sinks


def jsonl_path(config: Config) -> Path | None:
    """--metrics-jsonl, or metrics.jsonl in --save, or none."""
    if config.logging.metrics_jsonl is not None:
        return Path(config.logging.metrics_jsonl)
    return None if config.checkpoint.save is None else Path(config.checkpoint.save, "metrics.jsonl")
