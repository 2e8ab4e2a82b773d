"""All that a preprocessing writes, kept in step: the pairs, what was left out, the run's record.

Everything appears under its name when all is complete. Until then a record says at intervals how
far the files are on the disk, so that an interrupted run can go on from there. Knows neither where
documents come from nor how they become tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from megatron_ds.data.indexed_writer import IndexedWriter, open_locked, publish_pair
from megatron_ds.fileio.atomic import (
    fsync_file,
    name_in_errors,
    truncate_to,
)
from megatron_ds.preprocess import run_record
from megatron_ds.preprocess.document_readers import (
    QUARANTINE,
    RUN_RECORD_SUFFIX,
    FileStamp,
    ReadPosition,
)
from megatron_ds.preprocess.encoder import EncodedColumn
from megatron_ds.preprocess.parsing import RejectedDocument
from megatron_ds.preprocess.quarantine import Quarantine, name_quarantine
from megatron_ds.preprocess.run_record import FINISHED, RUNNING, SEALED, RunRecord, RunSnapshot

RECORD_SECONDS = 10.0
"""Between two records. A run that fails earlier leaves nothing."""


@dataclass(frozen=True)
class OutputPaths:
    """Where everything is written. pairs: prefixes of the pairs, one per key."""

    prefix: str
    pairs: tuple[str, ...]

    @property
    def quarantine(self) -> str:
        return self.prefix + QUARANTINE

    @property
    def record(self) -> str:
        return self.prefix + RUN_RECORD_SUFFIX

    @property
    def sources(self) -> str:
        """A line per file that was read, while the run is under way."""
        return self.prefix + ".sources.partial"


@dataclass(frozen=True)
class WritePlan:
    """How the files are written, and from where on.

    settings: for the record. start: the snapshot to go on from. record: that which holds it; None
    for a new run. durable: whether a record is kept on the way; without, a run that is interrupted
    leaves nothing.
    """

    dtype: np.dtype[np.generic]
    made_by: bytes
    settings: Mapping[str, Any]
    start: RunSnapshot
    record: RunRecord | None = None
    durable: bool = True


class OutputWriter:
    """A context manager: when it is left, all files have their names; after an error, what was
    recorded is kept for a run that goes on, and the error has a note that says so.

    Raises ValueError if another process is writing the same prefix.
    """

    def __init__(self, names: OutputPaths, plan: WritePlan) -> None:
        self._names = names
        self._plan = plan
        self._record = plan.record
        self._complete = False
        self._broken = False
        self._last = plan.start
        self._earlier: tuple[RunSnapshot, ...] = ()
        if plan.record is not None and plan.record.last == plan.start:
            self._earlier = plan.record.snapshots[:-1]
        self._due = time.monotonic() + RECORD_SECONDS
        self._pending: Future[None] | None = None

    def __enter__(self) -> OutputWriter:
        start = self._plan.start
        with ExitStack() as undo:
            # The first, whose lock stands for the whole prefix.
            self._sources = _Sources(self._names)
            going_on = self._record is not None
            undo.callback(self._sources.leave if going_on else self._sources.abort)
            self._check_record()
            self._sources.begin(start)
            self.writers: list[IndexedWriter] = []
            for prefix, written in zip(self._names.pairs, start.pairs, strict=True):
                writer = IndexedWriter(prefix, self._plan.dtype, self._plan.made_by, written)
                undo.callback(writer.close_keeping if going_on else writer.abort)
                self.writers.append(writer)
            if not going_on:
                Path(self._names.quarantine + ".partial").unlink(missing_ok=True)
            self._quarantine = Quarantine(self._names.quarantine, start.quarantine)
            self._background = ThreadPoolExecutor(1)
            undo.pop_all()
        return self

    def add(self, columns: Sequence[EncodedColumn], bad: Sequence[RejectedDocument]) -> None:
        """Write tokens, a column per key, and what was left out."""
        for one in bad:
            self._quarantine.add(one)
        for writer, column in zip(self.writers, columns, strict=True):
            writer.add_documents(*column)

    def checkpoint_progress(
        self,
        place: ReadPosition,
        begun: Sequence[FileStamp],
        documents: int,
        tokens: int,
        text_bytes: int,
        dropped: Mapping[str, int],
    ) -> None:
        """All up to this place is written; begun: the files that were begun since the last call.
        The rest are the counts so far. Records it if that is due."""
        self._sources.add(begun)
        before = self._last
        self._last = RunSnapshot(
            place=place,
            pairs=tuple(writer.written for writer in self.writers),
            quarantine=self._quarantine.size,
            sources=self._sources.size,
            digest=self._sources.digest,
            documents=documents,
            tokens=tokens,
            text_bytes=text_bytes,
            dropped=dict(dropped),
        )
        if place.file > before.place.file:
            self._earlier = (before,) if before.place.files else ()
        if self._plan.durable and time.monotonic() >= self._due:
            self._begin_record()

    def complete(self) -> None:
        """Bring all to the disk, which may fail or take long, before the first gets its name."""
        self._wait_for_record()
        for writer in self.writers:
            writer.flush_all()
        self._quarantine.complete()
        fsync_file(self._sources.file)
        self._complete = True

    def discard_record(self) -> None:
        """What was recorded leads nowhere: nothing is kept."""
        self._wait_for_record()
        if self._record is not None:
            run_record.remove(self._names.record)
        self._record = None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._keep_or_remove(error)
            self._background.shutdown()

    def _finish(self) -> None:
        if not self._complete:
            self.complete()
        record = RunRecord(SEALED, self._plan.settings, (self._last,))
        run_record.write(self._names.record, record)
        self._record = record
        publish_all(self._names, record)
        self._leave()

    def _keep_or_remove(self, error: BaseException) -> None:
        if self._pending is not None:
            wait([self._pending])
            self._broken = self._broken or self._pending.exception() is not None
        if self._record is None:
            for writer in self.writers:
                writer.abort()
            self._quarantine.abort()
            self._sources.abort()
            return
        if self._record.state == RUNNING and not self._broken:
            with suppress(OSError):  # the last record holds
                self._flush()
                self._make_durable(self._files, self._snapshots())
        self._leave()
        error.add_note(resume_hint(self._record))

    def _check_record(self) -> None:
        """That nobody else went on meanwhile, and that the record tells of what is now written."""
        path, record = self._names.record, self._record
        if record is None:
            _forget_unfinished(path)
        elif run_record.read(path) != record:
            raise ValueError(f"{self._names.prefix}: another process is writing this prefix")
        elif record.last != self._plan.start:
            self._record = dataclasses.replace(record, snapshots=(self._plan.start,))
            run_record.write(path, self._record)

    @property
    def _files(self) -> list[BinaryIO]:
        pairs = [file for writer in self.writers for file in writer.files]
        return [*pairs, *self._quarantine.files, self._sources.file]

    def _leave(self) -> None:
        for writer in self.writers:
            writer.close_keeping()
        self._quarantine.leave()
        self._sources.leave()

    def _snapshots(self) -> tuple[RunSnapshot, ...]:
        return (*self._earlier, self._last)

    def _begin_record(self) -> None:
        """Begin to record where the run stands; the next waits until that is done."""
        if self._pending is not None and not self._pending.done():
            return
        self._wait_for_record()
        self._flush()
        self._pending = self._background.submit(self._make_durable, self._files, self._snapshots())
        self._due = time.monotonic() + RECORD_SECONDS

    def _wait_for_record(self) -> None:
        """Wait for the record that is being written. Raises what went wrong."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.result()
            except BaseException:
                self._broken = True
                raise

    def _flush(self) -> None:
        for file in self._files:
            with name_in_errors(file.name):
                file.flush()

    def _make_durable(self, files: list[BinaryIO], snapshots: tuple[RunSnapshot, ...]) -> None:
        for file in files:
            with name_in_errors(file.name):
                os.fsync(file.fileno())
        record = RunRecord(RUNNING, self._plan.settings, snapshots)
        run_record.write(self._names.record, record)
        self._record = record


class _Sources:
    """The list of the files that were read, as they were; a line for each."""

    def __init__(self, names: OutputPaths) -> None:
        self.file = open_locked(names.sources, names.prefix)
        self.size = 0
        self._hash = hashlib.sha256()
        self.digest = self._hash.hexdigest()

    def begin(self, start: RunSnapshot) -> None:
        """Go on where the list had come to."""
        truncate_to(self.file, start.sources)
        self.size = start.sources
        with open(self.file.name, "rb") as file:
            self._hash = hashlib.sha256(file.read())
        self.digest = self._hash.hexdigest()

    def add(self, stamps: Sequence[FileStamp]) -> None:
        for stamp in stamps:
            line = line_of(stamp)
            with name_in_errors(self.file.name):
                self.file.write(line)
            self._hash.update(line)
            self.size += len(line)
        if stamps:
            self.digest = self._hash.hexdigest()

    def abort(self) -> None:
        Path(self.file.name).unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        with suppress(OSError):
            self.file.close()


def line_of(stamp: FileStamp) -> bytes:
    """A line of the list of files."""
    return (json.dumps(stamp) + "\n").encode()


def publish_all(names: OutputPaths, record: RunRecord) -> None:
    """Give all files of a sealed run their names; begun before, it is continued."""
    name_quarantine(names.quarantine, record.last.quarantine)
    for prefix in names.pairs:
        publish_pair(prefix, has_tokenizer_metadata=True)
    Path(names.sources).unlink(missing_ok=True)
    run_record.write(names.record, dataclasses.replace(record, state=FINISHED))


def resume_hint(record: RunRecord) -> str:
    """What is left of an interrupted run, in words."""
    if record.state != RUNNING:
        return "all documents are done; the same command with --resume gives the files their names"
    return (
        f"the work on {record.last.documents} documents is kept; the same command with --resume "
        "goes on after them"
    )


def _forget_unfinished(path: str) -> None:
    """What another run wrote is gone, and must not be taken for what this one writes."""
    with suppress(ValueError):
        record = run_record.read(path)
        if record is None or record.state == FINISHED:
            return
    run_record.remove(path)
