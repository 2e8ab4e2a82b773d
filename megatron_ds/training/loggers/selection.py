"""The loggers of a run that write files, as its flags select them: JSONL and CSV files,
TensorBoard, Weights & Biases.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.config import Config, LoggingConfig
from megatron_ds.config.problems import Problem, UserError, option, user_error
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.train_state import TrainState
from megatron_ds.training.extensions import OpenLogger, qualified_name
from megatron_ds.training.loggers.csv_logger import CsvTable
from megatron_ds.training.loggers.jsonl_logger import JsonLines, always
from megatron_ds.training.records import EvalRecord, IntervalRecord, Logger, StepRecord, TaskRecord

TENSORBOARD_WAIT = WaitPolicy(timeout=10.0)
"""Time to wait for another run that is ending and still owns the folder."""


@contextmanager
def owned_tensorboard_folder(config: LoggingConfig, ranks: CollectiveIO) -> Iterator[None]:
    """Owns --tensorboard-dir inside: a run moves or shortens files of earlier ones. Collective.

    Raises:
        UserError: If another run owns it.
        OSError: If it cannot be written.
    """
    with ExitStack() as lock:

        def own(folder: Path) -> None:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.enter_context(locked(folder / "tensorboard.lock", TENSORBOARD_WAIT))
            except UserError as error:
                raise user_error("tensorboard-dir-in-use", folder=folder, error=error) from None

        if config.tensorboard_dir is not None:
            folder = Path(config.tensorboard_dir)
            ranks.run_on_rank0(lambda: own(folder))
        yield


class BestEffortLogger(Logger):
    """Disables a logger, with a warning, when the disk fails; the run continues without it.

    Args:
        open_logger: Opens the logger to wrap.
        name: Its name for users.
        warn: Prints a line.
        may_write: Whether the run still owns its files; it writes no record otherwise.
    """

    def __init__(
        self,
        open_logger: Callable[[], Logger],
        name: str,
        warn: Callable[[str], object],
        may_write: Callable[[], bool] = always,
    ) -> None:
        self._logger = Logger()
        self._name = name
        self._warn = warn
        self._may_write = may_write

        def use() -> None:
            self._logger = open_logger()

        self._attempt(use)

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        self._record(lambda: self._logger.log_steps(records))

    def log_interval(self, record: IntervalRecord) -> None:
        self._record(lambda: self._logger.log_interval(record))

    def log_eval(self, record: EvalRecord) -> None:
        self._record(lambda: self._logger.log_eval(record))

    def log_task(self, record: TaskRecord) -> None:
        self._record(lambda: self._logger.log_task(record))

    def close(self) -> None:
        self._attempt(self._logger.close)

    def _record(self, work: Callable[[], None]) -> None:
        if self._may_write():
            self._attempt(work)

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
    save: Path | None,
    world_size: int,
    dp_size: int,
    write: Callable[[str], object],
    memory: Callable[[], dict[str, int]] = dict,
    more: Sequence[OpenLogger] = (),
    may_write: Callable[[], bool] = always,
) -> list[Logger]:
    """Opens the loggers of a run that write files.

    Args:
        config: Configuration of the run.
        state: State from which the run starts; records after it are removed.
        save: The local folder of --save.
        world_size: Number of processes.
        dp_size: Data-parallel size.
        write: Prints a line and flushes it.
        memory: Returns the device's memory figures in bytes, by TensorBoard tag.
        more: Loggers of the program.
        may_write: Whether --save still belongs to this run.

    Raises:
        UserError: If the JSONL file contains anything but records.
    """
    options = config.logging
    path = jsonl_path(config, save)
    openers: dict[str, Callable[[], Logger]] = {}
    if (file := options.metrics_csv) is not None:
        openers["metrics_csv"] = functools.partial(
            CsvTable, Path(file), state.iteration, warn=write
        )
    if options.tensorboard_dir is not None:
        # Importing TensorBoard takes a second, and most runs do not use it.
        from megatron_ds.training.loggers.tensorboard_logger import TensorBoard

        board = functools.partial(TensorBoard, config, state, memory=memory, write=write)
        board = functools.partial(board, world_size=world_size, dp_size=dp_size)
        openers["tensorboard_dir"] = board
    openers |= _service_openers(config, state, save)
    named = [(f"{option(name)} {getattr(options, name)}", openers[name]) for name in openers]
    for extension in more:
        named.append((qualified_name(extension), functools.partial(extension, config, state)))
    loggers: list[Logger] = []
    if path is not None:
        loggers.append(JsonLines(path, state.iteration, write, may_write))
    for name, opener in named:
        loggers.append(BestEffortLogger(opener, name, write, may_write))
    return loggers


def _service_openers(
    config: Config, state: TrainState, save: Path | None
) -> dict[str, Callable[[], Logger]]:
    """Functions that open the loggers of services, by the option that selects one."""
    options = config.logging
    openers: dict[str, Callable[[], Logger]] = {}
    if options.wandb_project is not None:
        from megatron_ds.training.loggers.wandb_logger import Wandb

        default = Path("wandb") if save is None else save / "wandb"
        folder = Path(options.wandb_save_dir or default)
        openers["wandb_project"] = functools.partial(Wandb, config, state, folder)
    return openers


def jsonl_path(config: Config, save: Path | None) -> Path | None:
    """--metrics-jsonl, or metrics.jsonl in the folder of --save; None without both."""
    if config.logging.metrics_jsonl is not None:
        return Path(config.logging.metrics_jsonl)
    return None if save is None else save / "metrics.jsonl"
