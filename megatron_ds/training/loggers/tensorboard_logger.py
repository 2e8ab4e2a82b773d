"""Writes TensorBoard scalars under the tags of Megatron-LM and its forks.

Each tag is plotted over iterations and, with the suffixes ` vs samples` and ` vs tokens`, over
these counts. A resumed run removes the points after its checkpoint from the event files of this
logger, which the first event of each names; files of other programs stay as they are. The
purge_step of SummaryWriter would compare an iteration with the samples and tokens of the other
axes and hide their entire past. Imported only if TensorBoard is used.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata  # type: ignore[import-untyped]
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
from torch.utils.tensorboard.summary import hparams

from megatron_ds.config import Config, LoggingConfig
from megatron_ds.config.problems import counted
from megatron_ds.fileio.atomic import atomic_write
from megatron_ds.train_state import TrainState
from megatron_ds.training.records import (
    EvalRecord,
    IntervalRecord,
    Logger,
    Record,
    StepRecord,
    TaskRecord,
    metric_title,
    metrics_of_task,
)

SAMPLES = " vs samples"
TOKENS = " vs tokens"
EVENT_FILES = "events.out.tfevents.*"
SETTINGS_FILE = "events.out.tfevents.0000000000.settings"
WRITER = "megatron_ds"
"""Name of this program in the first event of a file."""
EVALUATIONS = "lm-loss-validation/"
TASKS = "eval-tasks/"
FIRST = "Loss/"
"""Copies of losses under tags that TensorBoard, which sorts by name, shows first."""
LOSSES = f"{FIRST}training", f"{FIRST}validation"


class TensorBoard(Logger):
    """Writes event files below --tensorboard-dir, every --tensorboard-log-interval iterations.

    Args:
        config: Configuration of the run.
        state: State from which the run starts.
        world_size: Number of processes.
        dp_size: Data-parallel size.
        memory: Returns the device's memory figures in bytes, by tag.
        write: Prints a line.
    """

    def __init__(
        self,
        config: Config,
        state: TrainState,
        *,
        world_size: int,
        dp_size: int,
        memory: Callable[[], dict[str, int]],
        write: Callable[[str], object] = print,
    ) -> None:
        folder = config.logging.tensorboard_dir
        assert folder is not None
        self._logging: LoggingConfig = config.logging
        self._world_size = world_size
        self._dp_size = dp_size
        self._memory = memory
        self._evaluated: set[tuple[str, int]] = set()
        if state.iteration > 0:
            self._evaluated = truncate_events(Path(folder), state)
        else:
            archive_old_events(Path(folder), write)
        write_settings(Path(folder), config)
        path = _next_event_file(Path(folder))
        self._file = EventFile(path, config.logging.tensorboard_queue_size)

    def log_steps(self, records: Sequence[StepRecord]) -> None:
        for record in records:
            if record.iteration % self._logging.tensorboard_log_interval == 0:
                self._step(record)
        self._file.flush()

    def log_interval(self, record: IntervalRecord) -> None:
        if record.params_norm is not None:
            self._add("params-norm/params-norm", record.params_norm, record.last, SAMPLES, TOKENS)
        if self._logging.log_memory_to_tensorboard:
            for tag, value in self._memory().items():
                self._add(tag, value, record.last)
        self._file.flush()

    def log_eval(self, record: EvalRecord) -> None:
        group = f"{record.group}/" if record.group else ""
        tag = f"{EVALUATIONS}{group}lm loss {record.split}"
        # A run evaluates the same weights again at its end, and when it is started once more.
        if (tag, record.iteration) in self._evaluated:
            return
        self._evaluated.add((tag, record.iteration))
        self._add(tag, record.loss, record, SAMPLES, TOKENS)
        if record.split == "validation":
            self._add(f"{FIRST}{group}validation", record.loss, record)
        if self._logging.log_validation_ppl_to_tensorboard:
            self._add(f"{tag} ppl", record.ppl, record, SAMPLES, TOKENS)
        for name, value in record.extras.items():
            self._add(f"{tag} {metric_title(name)}", value, record, SAMPLES, TOKENS)
        self._file.flush()

    def log_task(self, record: TaskRecord) -> None:
        for name, value in metrics_of_task(record).items():
            tag = f"{TASKS}{name}"
            if (tag, record.iteration) not in self._evaluated:
                self._evaluated.add((tag, record.iteration))
                self._add(tag, value, record, SAMPLES, TOKENS)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _step(self, record: StepRecord) -> None:
        logging = self._logging
        self._progress_axes(record)
        if logging.log_batch_size_to_tensorboard:
            self._add("batch-size/batch-size", record.global_batch_size, record, SAMPLES)
        values = {
            "lm-loss-training/lm loss": record.lm_loss,
            "grad-norm/grad-norm": record.grad_norm,
            "seqlen/curriculum_seqlen": record.curriculum_seqlen,
            **record.extras,
        }
        if logging.log_learning_rate_to_tensorboard:
            values["learning-rate/learning-rate"] = record.learning_rate
        if logging.log_loss_scale_to_tensorboard:
            values["loss-scale/loss-scale"] = record.loss_scale
        if logging.log_world_size_to_tensorboard:
            values["world-size/world-size"] = self._world_size
        for tag, value in values.items():
            if value is not None:
                self._add(tag, value, record, SAMPLES, TOKENS)
        if record.lm_loss is not None:
            self._add(f"{FIRST}training", record.lm_loss, record)
        if logging.log_timers_to_tensorboard and not record.warm_up:
            self._speed(record)

    def _progress_axes(self, record: StepRecord) -> None:
        """Iterations over samples and tokens, and the reverse."""
        steps = record.iteration
        counts = (record.consumed_samples, record.consumed_tokens)
        for name, count in zip(("samples", "tokens"), counts, strict=True):
            self._file.add_scalar(f"steps-vs-{name}/y=steps,x={name}", steps, count)
            self._file.add_scalar(f"steps-vs-{name}/y={name},x=steps", count, steps)

    def _speed(self, record: StepRecord) -> None:
        samples = record.global_batch_size / record.seconds
        self._add("iteration-time/iteration-time", record.seconds, record, SAMPLES, TOKENS)
        for tag, value in (
            ("samples per second", samples),
            ("samples per second per replica", samples / self._dp_size),
            ("tokens per second", record.tokens_per_second),
            ("tokens per second per replica", record.tokens_per_second / self._dp_size),
            ("TFLOPs per gpu (estimated)", record.tflops),
        ):
            self._add(f"iteration-time/{tag}", value, record)

    def _add(self, tag: str, value: float, record: Record, *axes: str) -> None:
        """Adds a point over iterations and over each further axis."""
        counts = {SAMPLES: record.consumed_samples, TOKENS: record.consumed_tokens}
        self._file.add_scalar(tag, value, record.iteration)
        for axis in axes:
            self._file.add_scalar(f"{tag}{axis}", value, counts[axis])


class EventFile:
    """A new event file. Errors of the disk are raised here; the thread of TensorBoard's own writer
    prints them with a traceback.

    Args:
        path: Its path.
        queue_size: Maximum number of events that are not written yet.
    """

    def __init__(self, path: Path, queue_size: int = 1000) -> None:
        self._path = path
        self._queue_size = queue_size
        self._queued = 0
        self._unwritten = io.BytesIO()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0)
        writer = SourceMetadata(writer=WRITER)
        self.add(file_version="brain.Event:2", source_metadata=writer)
        self.flush()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.add(summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)]), step=step)

    def add(self, **fields: Any) -> None:
        """Adds an event with these fields."""
        event = Event(wall_time=time.time(), **fields)
        RecordWriter(self._unwritten).write(event.SerializeToString())
        self._queued += 1
        if self._queued >= self._queue_size:
            self.flush()

    def flush(self) -> None:
        """
        Raises:
            OSError: If the disk is full, or the file was deleted.
        """
        data = self._unwritten.getvalue()
        self._unwritten = io.BytesIO()
        self._queued = 0
        while data:
            data = data[self._file.write(data) :]
        self._path.stat()

    def close(self) -> None:
        self.flush()
        self._file.close()


def write_settings(folder: Path, config: Config) -> None:
    """Writes the settings for the tab HPARAMS, instead of the continued run's."""
    values: Mapping[str, Any] = {
        name: value if type(value) in (int, float) else str(value)
        for group in config.to_dict().values()
        for name, value in group.items()
    }
    experiment, start, _ = hparams(values, dict.fromkeys(LOSSES))
    with contextlib.closing(EventFile(folder / SETTINGS_FILE)) as file:
        for summary in (experiment, start):
            file.add(summary=summary)


def own_event_files(folder: Path) -> list[Path]:
    """The event files of this program in a folder, the newest first."""

    def is_own(path: Path) -> bool:
        first = next(iter(RawEventFileLoader(str(path)).Load()), b"")
        return bool(Event.FromString(first).source_metadata.writer == WRITER)

    return sorted(filter(is_own, folder.glob(EVENT_FILES)), reverse=True)


def _next_event_file(folder: Path) -> Path:
    """A file whose name sorts after all in its folder, also if the clock was set back."""
    names = (path.name for path in own_event_files(folder))
    earlier = (int(digits[1]) for name in names if (digits := re.search(r"tfevents\.(\d+)", name)))
    seconds = max(time.time(), max(earlier, default=0) + 1)
    return folder / f"events.out.tfevents.{seconds:017.6f}.{socket.gethostname()}.{os.getpid()}"


def archive_old_events(folder: Path, write: Callable[[str], object] = print) -> None:
    """Moves the event files of earlier runs to the first free subfolder `previous-N`.

    TensorBoard then shows them as a separate run instead of repeated steps.
    """
    numbered = (folder / f"previous-{index}" for index in itertools.count(1))
    target = next(path for path in numbered if not path.exists())
    if paths := own_event_files(folder):
        target.mkdir()
        write(f"moved {counted(len(paths), 'event file')} of earlier runs to {target}")
    for path in paths:
        path.rename(target / path.name)


def truncate_events(folder: Path, state: TrainState) -> set[tuple[str, int]]:
    """Removes the points after `state` from the event files of a folder.

    Files are read from the newest to the first one that keeps steps: those before it were truncated
    when it was created.

    Returns:
        Tag and iteration of the evaluations that remain in the files read.
    """
    evaluated: set[tuple[str, int]] = set()
    for path in own_event_files(folder):
        raw = list(RawEventFileLoader(str(path)).Load())
        events = [(Event.FromString(item), item) for item in raw]
        kept = [(event, item) for event, item in events if _is_before(event, state)]
        if len(kept) < len(raw):
            _rewrite(path, [item for _, item in kept])
        scalars = [
            (value.tag, event.step)
            for event, _ in kept
            for value in event.summary.value
            if value.metadata.plugin_data.plugin_name in ("", "scalars")
            and not value.tag.startswith(FIRST)
        ]
        evaluation_tags = {
            scalar for scalar in scalars if scalar[0].startswith((EVALUATIONS, TASKS))
        }
        evaluated |= evaluation_tags
        if evaluation_tags != set(scalars):  # there are scalars of steps, too
            break
    return evaluated


def _is_before(event: Event, state: TrainState) -> bool:
    """Whether an event is at or before `state`, on the axis of its tag."""
    for value in event.summary.value:
        if value.tag.endswith((SAMPLES, "x=samples")):
            return bool(event.step <= state.consumed_samples)
        if value.tag.endswith((TOKENS, "x=tokens")):
            return bool(event.step <= state.consumed_tokens)
    return bool(event.step <= state.iteration)


def _rewrite(path: Path, raw: Sequence[bytes]) -> None:
    """Replaces an event file atomically."""
    # TensorBoard reads every file with "tfevents" in its name, also one left by a crash.
    with atomic_write(path, temporary=path.with_name("rewritten.tmp")) as file:
        writer = RecordWriter(file)
        for item in raw:
            writer.write(item)
