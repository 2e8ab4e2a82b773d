"""The folder of a cleaning that is under way, from which a killed one goes on.

Files grow in it; a record says up to where they count. What was written after the last record is
cut off when the work goes on, so that the end is the same, byte for byte, as without an
interruption. Files get their own names when all is done. Knows nothing of documents.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from megatron_ds.fileio.file_lock import lock_now

WORK = ".work"
"""Ends the name of the folder beside the output."""
RECORD, SETTINGS = "record.json", "settings.json"
DIFFERENCES_SHOWN = 20
COMPRESSIONS = (".gz", ".bz2", ".xz")
"""What can be written: formats in which two files, one after the other, are one."""
LENGTH = struct.Struct("<I")


class AppendFile:
    """A file that grows, in pieces that are compressed each by itself.

    suffix: of the final name, which says how. committed: bytes that count.
    """

    def __init__(self, path: Path, suffix: str, committed: int) -> None:
        self._path = path
        self._suffix = suffix
        self._raw: BinaryIO | None = None
        self._stream: BinaryIO | None = None
        self.committed = committed

    def write(self, data: bytes) -> None:
        if self._raw is None:
            self._raw = open(self._path, "ab")  # noqa: SIM115
        if self._stream is None:
            self._stream = _compressed(self._raw, self._suffix)
        self._stream.write(data)

    def flush(self) -> None:
        """Ends the piece; what was written is on the disk when this returns."""
        if self._raw is None or self._stream is None:  # nothing new
            return
        if self._stream is not self._raw:
            self._stream.close()
        self._stream = None
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self.committed = self._raw.tell()

    def close(self) -> None:
        """What was not flushed does not count: that there is no room for it is no matter."""
        for file in (self._stream, self._raw):
            if file is not None:
                with suppress(OSError):
                    file.close()
        self._raw = self._stream = None


class ResumableOutput:
    """The folder `<output>.work`, held by one process. A context manager.

    names: the growing files with the suffixes of their final names. Raises ValueError for a folder
    of an interrupted run unless `resume`, for one whose run had other settings, naming each with
    both values, and for one that another process holds.
    """

    def __init__(
        self, output: str, settings: dict[str, Any], names: dict[str, str], resume: bool
    ) -> None:
        self.folder = Path(output + WORK)
        self._output = output
        self._settings = settings
        self._names = names
        self._resume = resume
        self._stack = ExitStack()
        self._begun = False
        self.files: dict[str, AppendFile] = {}
        self.progress: dict[str, Any] | None = None
        self.finished = False

    def __enter__(self) -> ResumableOutput:
        with ExitStack() as stack:
            self._open(stack)
            self._stack = stack.pop_all()
        return self

    def _open(self, stack: ExitStack) -> None:
        if (self.folder / RECORD).exists() and not self._resume:
            raise ValueError(
                f"--output {self._output}: {self.folder} has the work of an interrupted run: "
                "--resume goes on with it, or remove it to begin anew"
            )
        self.folder.mkdir(exist_ok=True)
        lock = stack.enter_context((self.folder / "lock").open("ab"))
        if lock_now(lock) is False:
            raise ValueError(f"--output {self._output}: another process is writing it")
        record = _read(self.folder / RECORD)
        sizes = dict.fromkeys(self._names, 0)
        if record is not None:
            problems = list(_differences(_read(self.folder / SETTINGS) or {}, self._settings))
            if problems:
                raise ValueError(
                    f"--resume: {self.folder} has the work of a run with other settings; give its "
                    "own, or remove the folder to begin anew:\n"
                    + "\n".join(problems[:DIFFERENCES_SHOWN])
                )
            sizes = record["sizes"]
            self.progress = record["progress"]
            self._begun = True
            self.finished = record["finished"]
        for name, suffix in self._names.items():
            path = self.folder / name
            if not self.finished:
                _cut(path, sizes[name])
            self.files[name] = AppendFile(path, suffix, sizes[name])
            stack.callback(self.files[name].close)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
        if kind is not None and self.folder.is_dir() and not (self.folder / RECORD).exists():
            self._remove()

    def discard(self) -> None:
        """Gives the work up."""
        for file in self.files.values():
            file.close()
        self._remove()

    def _remove(self) -> None:
        # The record goes last: as long as it is there, the work can go on, or be published again.
        for path in sorted(self.folder.iterdir(), key=lambda path: path.name == RECORD):
            path.unlink()
        self.folder.rmdir()

    def commit(self, progress: dict[str, Any], finished: bool = False) -> None:
        """From here on the work goes on after a kill. progress: what `progress` is then."""
        for file in self.files.values():
            file.flush()
        if not self._begun:
            _write(self.folder / SETTINGS, self._settings)
            self._begun = True
        sizes = {name: file.committed for name, file in self.files.items()}
        _write(self.folder / RECORD, {"sizes": sizes, "progress": progress, "finished": finished})
        self.finished = finished

    def publish(self, finals: dict[str, str]) -> None:
        """Gives the files their final names and removes the folder. May be called again."""
        assert self.finished
        for file in self.files.values():
            file.close()
        for name, final in finals.items():
            path = self.folder / name
            if path.exists():
                os.replace(path, final)
                _sync_folder(Path(final).parent)
        self._remove()


def read_records(path: Path, size: int) -> Iterator[bytes]:
    """The keys that `packed` wrote, of the first `size` bytes of a file."""
    with open(path, "rb") as file:
        while file.tell() < size:
            (length,) = LENGTH.unpack(file.read(LENGTH.size))
            yield file.read(length)


def pack_record(key: bytes) -> bytes:
    return LENGTH.pack(len(key)) + key


def _compressed(raw: BinaryIO, suffix: str) -> BinaryIO:
    stream: Any = raw
    if suffix == ".gz":
        # Neither name nor time: the same text gives the same bytes.
        stream = gzip.GzipFile("", "wb", 6, raw, mtime=0)
    elif suffix == ".bz2":
        stream = bz2.BZ2File(raw, "wb")
    elif suffix == ".xz":
        stream = lzma.LZMAFile(raw, "wb")  # noqa: SIM115
    return stream  # type: ignore[no-any-return]


def _cut(path: Path, size: int) -> None:
    """Cuts off what does not count. Raises ValueError if there is less than counts."""
    there = path.stat().st_size if path.exists() else 0
    if there < size:
        raise ValueError(
            f"--resume: {path} has {there} bytes, and its record says {size}: it was changed; "
            "remove the folder to begin anew"
        )
    with open(path, "ab") as file:
        file.truncate(size)


def _write(path: Path, value: dict[str, Any]) -> None:
    """Replaces a file as a whole; it is on the disk when this returns."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="ascii") as out:
        json.dump(value, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)
    _sync_folder(path.parent)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="ascii")
    except FileNotFoundError:
        return None
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ValueError(
            f"--resume: {path} is damaged ({error}); remove its folder to begin anew"
        ) from error


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for name in sorted(old.keys() | new.keys()):
        before, now = (_shown(settings.get(name)) for settings in (old, new))
        if before != now:
            yield f"{name}: the interrupted run had {before}, this one has {now}"


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
