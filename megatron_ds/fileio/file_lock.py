"""One process at a time, by a lock on a file, which the kernel frees when its holder dies.

Knows nothing of what is guarded.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""What file systems answer that have no locks: some network mounts."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WaitPolicy:
    """How a process waits, in seconds: it says so after some, then again and again; then gives up.

    say: gets the line; of several processes that wait for files of one folder, one speaks.
    """

    say: Callable[[str], None] = warnings.warn
    words_after: float = 10.0
    words_every: float = 60.0
    limit: float = 7200.0


def lock_now(file: IO[Any]) -> bool | None:
    """Locks an open file unless another process has; None where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return None
        raise
    return True


@contextmanager
def locked(path: Path, patience: WaitPolicy) -> Iterator[bool]:
    """Holds the lock of a file, which is made; False where there are no locks, and none is held.

    Raises ValueError if another process keeps it for longer than the patience lasts, and OSError if
    the file cannot be made.
    """
    with _WaitReporter(path, patience) as waiting:
        file, held = _acquire(path, waiting)
    with file:
        with suppress(OSError):  # only for those who wait
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        yield held


class _WaitReporter:
    """The words and the end of one wait."""

    def __init__(self, path: Path, patience: WaitPolicy) -> None:
        self._path = path
        self._patience = patience
        self._start = time.monotonic()
        self._due = patience.words_after
        self._voice = ExitStack()
        self._speaks: bool | None = None

    def __enter__(self) -> _WaitReporter:
        return self

    def __exit__(self, *error: object) -> None:
        self._voice.close()

    def pause(self, file: IO[bytes]) -> None:
        waited = time.monotonic() - self._start
        if waited > self._patience.limit:
            raise ValueError(f"gave up after {waited:.0f} s: {self._words(file)}")
        if waited > self._due:
            self._due = waited + self._patience.words_every
            if self._speaks is None:
                self._speaks = self._first_to_speak()
            if self._speaks:
                self._patience.say(f"waiting for {waited:.0f} s: {self._words(file)}")
        time.sleep(POLL_SECONDS)

    def _words(self, file: IO[bytes]) -> str:
        file.seek(0)
        holder = file.read(200).decode(errors="replace") or "another process"
        return f"{holder} holds {self._path}; if it hangs, end it"

    def _first_to_speak(self) -> bool:
        try:
            path = self._path.with_name("waiting.lock")
            return lock_now(self._voice.enter_context(open(path, "ab"))) is not False
        except OSError:
            return True


def _acquire(path: Path, waiting: _WaitReporter) -> tuple[IO[bytes], bool]:
    while True:
        with ExitStack() as undo:
            file = undo.enter_context(open(path, "a+b"))
            while (held := lock_now(file)) is False:
                waiting.pause(file)
            # Who deletes the folder deletes the lock: others then lock a newer file of its name.
            if is_at(file, path):
                undo.pop_all()
                return file, held is True


def is_at(file: IO[bytes], path: str | Path) -> bool:
    """Whether an open file still has that name: it may have been removed, renamed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
