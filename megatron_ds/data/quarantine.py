"""The file of what was left out of a preprocessing: a JSON object per line."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TextIO

from megatron_ds.data.documents import Bad


def line_of(bad: Bad) -> str:
    """The entry of what was left out, with its line's end."""
    entry = {"file": bad.file, "line": bad.line, "reason": bad.reason}
    return json.dumps({**entry, "message": bad.words, "content": bad.content}) + "\n"


class Quarantine:
    """The file of what was left out: made when there is something, named when all is done.

    A context manager; leaving it by an exception removes the file, and finishing without an entry
    removes that of an earlier run, which this one has replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = path + ".partial"
        self._file: TextIO | None = None
        self._open = ExitStack()

    def add(self, bad: Bad) -> None:
        if self._file is None:
            opened = open(self._partial, "w", encoding="ascii")  # noqa: SIM115
            self._file = self._open.enter_context(opened)
        self._file.write(line_of(bad))

    def __enter__(self) -> Quarantine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._open.close()
        except OSError:  # what it still had to write found no room
            Path(self._partial).unlink(missing_ok=True)
            raise
        if kind is not None:
            if self._file is not None:  # else it is another process's, which writes this prefix
                Path(self._partial).unlink(missing_ok=True)
        elif self._file is not None:
            os.replace(self._partial, self._path)
        else:
            Path(self._path).unlink(missing_ok=True)
