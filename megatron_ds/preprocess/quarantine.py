"""The file of what was left out of a preprocessing: a JSON object per line."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from megatron_ds.fileio.atomic import (
    fsync_file,
    name_in_errors,
    truncate_to,
)
from megatron_ds.preprocess.parsing import RejectedDocument


def line_of(bad: RejectedDocument) -> str:
    """The entry of what was left out, with its line's end."""
    entry = {"file": bad.file, "line": bad.line, "reason": bad.reason}
    return json.dumps({**entry, "message": bad.words, "content": bad.content}) + "\n"


class Quarantine:
    """The file of what was left out: made when there is something, named when all is done.

    size: bytes so far. kept: how many of an interrupted run's are continued.
    """

    def __init__(self, path: str, kept: int = 0) -> None:
        self._path = path + ".partial"
        self.size = kept
        self._file: BinaryIO | None = None
        if kept:
            self._file = open(self._path, "r+b")  # noqa: SIM115
            truncate_to(self._file, kept)

    @property
    def files(self) -> list[BinaryIO]:
        """The open file, if there is one."""
        return [] if self._file is None else [self._file]

    def add(self, bad: RejectedDocument) -> None:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115
        line = line_of(bad).encode("ascii")
        with name_in_errors(self._path):
            self._file.write(line)
        self.size += len(line)

    def complete(self) -> None:
        """Bring it to the disk."""
        for file in self.files:
            fsync_file(file)

    def abort(self) -> None:
        """Remove it."""
        if self._file is not None:  # else it is another process's, which writes this prefix
            Path(self._path).unlink(missing_ok=True)
        self.leave()

    def leave(self) -> None:
        """End and keep what was written."""
        for file in self.files:
            with suppress(OSError):  # what the disk has no room for is not wanted any more
                file.close()


def name_quarantine(path: str, size: int) -> None:
    """Give the file its name; begun before, it is continued. Without entries that of an earlier
    run, which this one has replaced, goes."""
    if size:
        with suppress(FileNotFoundError):  # it has its name
            os.replace(path + ".partial", path)
    else:
        Path(path).unlink(missing_ok=True)
