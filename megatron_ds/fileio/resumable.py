"""Resumable output: a job that is killed at any point and resumed ends with the same bytes.

Files grow in a work folder. A commit makes them durable and atomically replaces a record of their
sizes and of the job's progress; a resumed job truncates them to these sizes. When the job is
finished, renames publish them under their final names. Knows nothing of the content.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from megatron_ds.config.problems import (
    PROBLEMS_SHOWN,
    Problem,
    UserError,
    counted,
    option,
    raise_if_any,
    user_error,
    warn_of,
)
from megatron_ds.fileio.atomic import fsync_path, name_in_errors, write_atomically
from megatron_ds.fileio.file_lock import is_at, lock_now
from megatron_ds.fileio.interruptible_threads import InterruptibleThreads, Pending

Log = Callable[[Problem | str], None]
"""Prints a line, or a warning."""
FORMAT_VERSION = 2
"""Increased when the meaning of a recorded setting changes; other versions are refused."""
WORK_SUFFIX = ".work"
"""Suffix of the work folder, next to the output."""
COMPLETED_SUFFIX = ".progress.json"
"""Suffix of the record of a completed run, after the output's prefix."""
RECORD = "record.json"
SETTINGS = "settings.json"
LOCK = "lock"
COMMIT_SECONDS = 10.0
"""Interval of time-based commits. A run that fails earlier leaves nothing."""


def _gzip(raw: BinaryIO) -> gzip.GzipFile:
    # Neither name nor time, so that the same content gives the same bytes.
    return gzip.GzipFile("", "wb", 6, raw, mtime=0)


COMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": _gzip,
    ".bz2": partial(bz2.BZ2File, mode="wb"),
    ".xz": partial(lzma.LZMAFile, mode="wb"),
}
"""Compressions of output files: formats in which concatenated members are one file."""
LENGTH = struct.Struct("<I")


@dataclass
class GrowingFile:
    """A file of the work folder. With a compression, each commit ends a compressed member.

    Args:
        path: Path in the work folder.
        suffix: Suffix of the final name, which selects the compression.
        committed: Bytes to keep; the file has exactly these.
    """

    path: Path
    suffix: str
    committed: int
    _raw: BinaryIO | None = field(default=None, init=False)
    _stream: BinaryIO | None = field(default=None, init=False)

    @property
    def raw(self) -> BinaryIO:
        """The uncompressed file, positioned at its end when it is opened."""
        if self._raw is None:
            self._raw = open(self.path, "r+b")  # noqa: SIM115
            self._raw.seek(0, os.SEEK_END)
        return self._raw

    def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError with the name of the file."""
        with name_in_errors(self.path):
            if self._stream is None:
                compressor = COMPRESSORS.get(self.suffix)
                self._stream = self.raw if compressor is None else compressor(self.raw)
            self._stream.write(data)

    def flush(self) -> BinaryIO | None:
        """Hand all bytes to the system.

        Returns:
            The file, to be fsynced, if it has grown since the last call.
        """
        if self._raw is None:
            return None
        with name_in_errors(self.path):
            if self._stream is not None and self._stream is not self._raw:
                self._stream.close()
            self._stream = None
            self._raw.flush()
        size = os.fstat(self._raw.fileno()).st_size
        grown = size != self.committed
        self.committed = size
        return self._raw if grown else None

    def close(self) -> None:
        """Close the file. Bytes that were not flushed do not count, so errors are ignored."""
        for file in (self._stream, self._raw):
            if file is not None:
                with suppress(OSError):
                    file.close()
        self._raw = None
        self._stream = None


@dataclass
class ResumableOutput:
    """The work folder `<output>.work`, locked by one process. A context manager.

    An error inside the block keeps what was committed, and has a note about it; without a commit it
    removes the folder.

    Args:
        output: Path or prefix of the output.
        settings: All that determines the output. Keys that are identifiers are option fields.
        names: Names of the growing files, with the suffixes of their final names.
        resume: Whether to continue the work of an interrupted run.
        restart: Whether a run without `resume` replaces such work instead of raising.
        completed: Path of a record that stays after publication, by which a resumed run recognizes
            that nothing is left to do. None for no such record.
        warn: Takes warnings.

    Attributes:
        folder: The work folder.
        files: The growing files, by name.
        progress: Progress of the last commit; None for a new run.
        finished: Whether all files are complete and only `publish` may be left to do.
        published: Whether the output of an earlier run is complete.

    Raises:
        UserError: On entry: if there is work of an interrupted run and neither `resume` nor
            `restart`; if that run had other settings; if the work is damaged; if another process
            writes the same output.
    """

    output: str
    settings: Mapping[str, Any]
    names: Mapping[str, str]
    resume: bool
    _: KW_ONLY
    restart: bool = False
    completed: str | None = None
    warn: Callable[[Problem], None] = warn_of
    files: dict[str, GrowingFile] = field(default_factory=dict, init=False)
    progress: dict[str, Any] | None = field(default=None, init=False)
    finished: bool = field(default=False, init=False)
    published: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.folder = Path(self.output + WORK_SUFFIX)
        self._settings = _normalized(self.settings)
        self._completed = None if self.completed is None else Path(self.completed)
        self._stack = ExitStack()
        self._pending: Pending[None] | None = None
        self._has_settings = False
        self._last_commit = time.monotonic()

    def __enter__(self) -> ResumableOutput:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        record_path = self.folder / RECORD
        if not self.resume and not self.restart and record_path.exists():
            raise user_error("interrupted-run-exists", folder=self.folder)
        if self.resume and not record_path.exists() and self._is_published():
            if self.folder.exists():  # its removal was interrupted
                self._lock(stack)
                self._remove()
            return
        self._lock(stack)
        if not self.resume and record_path.exists():
            self.warn(Problem("interrupted-run-replaced", folder=self.folder))
            # Before any file changes: the record must not describe files of the new run.
            record_path.unlink()
            fsync_path(self.folder)
        record = _read(record_path)
        if record is not None:
            self._check_settings(_read(self.folder / SETTINGS) or {}, str(self.folder))
            self._has_settings = True
            self.progress = record["progress"]
            self.finished = record["finished"]
        for name, suffix in self.names.items():
            size = 0 if record is None else record["sizes"].get(name, 0)
            if not self.finished:
                _truncate(self.folder / name, size)
            self.files[name] = GrowingFile(self.folder / name, suffix, size)
            stack.callback(self.files[name].close)
        self._background = stack.enter_context(InterruptibleThreads(1))

    def _lock(self, stack: ExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LOCK
        lock = stack.enter_context(path.open("ab"))
        locked = lock_now(lock)
        # Between opening and locking, another process may have published and removed the folder.
        if locked is False or not is_at(lock, path):
            raise user_error("output-in-use", output=self.output)
        if locked is None:
            self.warn(Problem("no-file-locks", path=path))

    def _is_published(self) -> bool:
        """Whether the complete output of a run with these settings exists."""
        if self._completed is None or (record := _read(self._completed)) is None:
            return False
        self._check_settings(record["settings"], str(self._completed))
        for name, size in record["files"].items():
            path = self._completed.parent / name
            if not path.exists() or path.stat().st_size != size:
                self.warn(Problem("completed-output-changed", path=path, size=size))
                return False
        self.progress = record["progress"]
        self.finished = True
        self.published = True
        return True

    def _check_settings(self, before: Mapping[str, Any], location: str) -> None:
        names = sorted({*before, *self._settings})
        changed = [name for name in names if before.get(name) != self._settings.get(name)]
        raise_if_any(
            Problem(
                "resumed-run-differs",
                *([name] if name.isidentifier() else []),
                flag=option(name) if name.isidentifier() else name,
                current=_show(self._settings.get(name)),
                recorded=_show(before.get(name)),
                place=location,
            )
            for name in changed[:PROBLEMS_SHOWN]
        )

    def __exit__(self, error_type: object, error: BaseException | None, trace: object) -> None:
        try:
            with nullcontext() if error is None else suppress(Exception):
                self._wait()
            # Before the lock is released: another process may start with the same folder.
            if error is not None and self.folder.is_dir():
                if (self.folder / RECORD).exists():
                    error.add_note(f"the work is kept in {self.folder}: --resume continues it")
                else:
                    self._remove()
        finally:
            self._stack.close()

    def discard(self) -> None:
        """Remove all work."""
        self._wait()
        (self.folder / RECORD).unlink(missing_ok=True)
        self._remove()

    def _remove(self) -> None:
        for file in self.files.values():
            file.close()
        # The record after the files: as long as it exists, an interrupted publication can be
        # repeated. The settings after the record, which is not valid without them.
        # The lock last, so that no other process takes over a folder that still has a record.
        last = (RECORD, SETTINGS, LOCK)
        order = [path.name for path in self.folder.iterdir() if path.name not in last]
        for name in (*order, *last):
            (self.folder / name).unlink(missing_ok=True)
        self.folder.rmdir()

    @property
    def has_commit(self) -> bool:
        """Whether a resumed run continues this work, once a commit in progress is complete."""
        return self._pending is not None or (self.folder / RECORD).exists()

    @property
    def is_commit_due(self) -> bool:
        """Whether `COMMIT_SECONDS` have passed since the last commit, which is complete."""
        is_idle = self._pending is None or self._pending.is_done
        return is_idle and time.monotonic() - self._last_commit >= COMMIT_SECONDS

    def commit(self, progress: Mapping[str, Any], finished: bool = False) -> None:
        """Make all that was written so far survive a kill, in the background.

        Args:
            progress: Value of `progress` when the job is resumed from this commit.
            finished: Whether nothing more will be written. The commit is complete on return then.

        Raises:
            OSError: If this or the previous commit fails. The last successful commit stays valid.
        """
        self._wait()
        grown = [raw for file in self.files.values() if (raw := file.flush()) is not None]
        sizes = {name: file.committed for name, file in self.files.items()}
        record = _encode({"sizes": sizes, "progress": progress, "finished": finished})
        self._pending = self._background.submit(lambda: self._make_durable(grown, record))
        self._last_commit = time.monotonic()
        if finished:
            self._wait()
            self.progress = json.loads(json.dumps(progress))
            self.finished = True

    def _make_durable(self, files: Sequence[BinaryIO], record: bytes) -> None:
        for file in files:
            with name_in_errors(file.name):
                os.fsync(file.fileno())
        if not self._has_settings:
            write_atomically(self.folder / SETTINGS, _encode(self._settings))
            self._has_settings = True
        write_atomically(self.folder / RECORD, record)

    def _wait(self) -> None:
        """Wait for the commit that is in progress. Raises its error."""
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.is_done:  # an interrupt does not end the commit
                    self._pending = None

    def publish(
        self, finals: Mapping[str, str], stale: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """Give files of the work folder their final names, and remove the folder.

        May be repeated after an interruption.

        Args:
            finals: Final path by name in the work folder, in the order of renaming.
            stale: Older files that must not exist next to a new one, by its name; they are removed
                before it is renamed.
        """
        assert self.finished
        for file in self.files.values():
            file.close()
        if self._completed is not None:
            self._completed.unlink(missing_ok=True)
        for name, final in finals.items():
            if (self.folder / name).exists():  # otherwise it was renamed before an interruption
                for path in (stale or {}).get(name, ()):
                    Path(path).unlink(missing_ok=True)
                os.makedirs(os.path.dirname(final) or ".", exist_ok=True)
                os.replace(self.folder / name, final)
        for folder in {os.path.dirname(final) or "." for final in finals.values()}:
            fsync_path(folder)
        if self._completed is not None:
            start = self._completed.parent  # the same from any working directory
            files = {os.path.relpath(p, start): os.path.getsize(p) for p in finals.values()}
            record = {"settings": self._settings, "progress": self.progress, "files": files}
            write_atomically(self._completed, _encode(record))
        self._remove()
        self.published = True


def enter_or_refuse(
    stack: ExitStack, work: ResumableOutput, refusal: Sequence[Problem], *, must_resume: bool
) -> None:
    """Opens the work of a run that continues an interrupted one if there is one.

    Args:
        stack: Closes the work.
        work: The work, which resumes if there may be an interrupted run.
        refusal: Why a new run cannot start, such as existing output.
        must_resume: Whether the user expects an interrupted run.

    Raises:
        UserError: If the run can neither continue nor start.
    """
    try:
        stack.enter_context(work)
    except UserError as error:
        if must_resume or error.problems[0].code != "resumed-run-differs":
            raise
        raise UserError(*error.problems, *refusal) from None
    if work.progress is None:
        if must_resume:
            work.warn(Problem("nothing-to-resume", folder=work.folder))
        raise_if_any(refusal)


def complete_progress(completed: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The progress of the complete output of a run with these settings.

    Args:
        completed: Path of the record of the completed run.

    Returns:
        None if there is no such output, or if it has changed.
    """
    record = _read(completed)
    if record is None or record["settings"] != _normalized(settings):
        return None
    paths = {completed.parent / name: size for name, size in record["files"].items()}
    try:
        is_unchanged = all(path.stat().st_size == size for path, size in paths.items())
    except FileNotFoundError:
        is_unchanged = False
    return cast("dict[str, Any]", record["progress"]) if is_unchanged else None


def read_records(path: Path, size: int) -> Iterator[bytes]:
    """The records that `pack_record` wrote, in the first `size` bytes of a file."""
    with open(path, "rb") as file:
        while file.tell() < size:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            yield file.read(length)


def pack_record(record: bytes) -> bytes:
    """A record with its length, for files of variable-length records."""
    return LENGTH.pack(len(record)) + record


def _truncate(path: Path, size: int) -> None:
    actual = path.stat().st_size if path.exists() else 0
    if actual < size:
        raise _damaged(path, f"it has {counted(actual, 'byte')}, and {size} were committed")
    with open(path, "ab") as file:
        file.truncate(size)


def _damaged(path: Path, reason: str) -> UserError:
    parent = path.parent if path.parent.name.endswith(WORK_SUFFIX) else path
    return user_error("interrupted-work-damaged", path=path, reason=reason, parent=parent)


def _normalized(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are read from a file."""
    normalized: dict[str, Any] = json.loads(
        json.dumps({"format version": FORMAT_VERSION, **settings})
    )
    return normalized


def _encode(content: object) -> bytes:
    text = json.dumps(content)
    return f'{{"sha256": "{_digest(text)}", "content": {text}}}\n'.encode()


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a file written from `_encode`; None if it does not exist."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        parsed = json.loads(data)
        content = parsed["content"]
        digest = parsed["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if digest != _digest(json.dumps(content)):
        raise _damaged(path, "its checksum does not match")
    return cast("dict[str, Any]", content)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _show(value: object) -> str:
    if value is None or value == []:
        return "not set"
    return " ".join(map(str, value)) if isinstance(value, list) else " ".join(str(value).split())
