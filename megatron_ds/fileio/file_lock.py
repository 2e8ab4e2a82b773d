"""Inter-process file lock, released by the kernel when the holder dies.

Knows nothing of what the lock protects.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_ds.config.problems import user_error

WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of file systems without locks, such as some network mounts."""
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WaitPolicy:
    """Behavior of a process that waits for a lock.

    Attributes:
        report: Takes messages about the wait. Only one of the processes that wait for files of a
            folder reports.
        report_after: Seconds until the first message.
        report_every: Seconds between messages.
        timeout: Seconds until waiting is given up.
    """

    report: Callable[[str], None] = warnings.warn
    report_after: float = 5.0
    report_every: float = 60.0
    timeout: float = 7200.0


def lock_now(file: IO[Any]) -> bool | None:
    """Lock an open file without waiting.

    Returns:
        Whether the lock was acquired; None if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in WITHOUT_LOCKS:
            return None
        raise
    return True


class SharedLock:
    """A shared lock of a file: while this process lives and has not released it, `lock_now` fails.

    Needs no permission to write. It never waits and raises no error: without the file, on a file
    system without locks, or while another process holds an exclusive lock, nothing is held.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._finalizer: weakref.finalize[..., SharedLock] | None = None
        with suppress(OSError), ExitStack() as undo:
            if not path.is_file():
                return  # to open a named pipe would wait for its writer
            file = undo.enter_context(path.open("rb"))
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._finalizer = weakref.finalize(self, _unlock, file)
            self._finalizer.atexit = False  # the end of the process releases it
            undo.pop_all()

    def release(self) -> None:
        if self._finalizer is not None:
            self._finalizer()


def _unlock(file: IO[bytes]) -> None:
    with suppress(OSError):
        # Closing is not enough: a forked process may have the file open, too.
        fcntl.flock(file, fcntl.LOCK_UN)
    file.close()


@contextmanager
def byte_locked(descriptor: int, offset: int) -> Iterator[None]:
    """Hold the lock of one byte, against those who have opened the file themselves. Linux only.

    Unlike `fcntl.lockf`, the kernel looks for no deadlocks: it would see one where threads
    of two processes wait for different bytes.
    """
    layout = struct.Struct("@hhqqi4x")  # flock of fcntl(2)
    held, free = (
        layout.pack(action, os.SEEK_SET, offset, 1, 0) for action in (fcntl.F_WRLCK, fcntl.F_UNLCK)
    )
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, held)
    try:
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, free)


@contextmanager
def locked(path: Path, policy: WaitPolicy) -> Iterator[bool]:
    """Hold the lock of a file, which is created if necessary.

    Yields:
        Whether the lock is held; False if the file system has no locks.

    Raises:
        UserError: If another process holds it for longer than the timeout of the policy.
        OSError: If the file cannot be created.
    """
    with ExitStack() as reporter_lock:
        file, held = _acquire(path, policy, reporter_lock)
    with file:
        with suppress(OSError):  # the content only serves the messages of waiting processes
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
        yield held


def _acquire(path: Path, policy: WaitPolicy, reporter_lock: ExitStack) -> tuple[IO[bytes], bool]:
    start = time.monotonic()
    due = policy.report_after
    reports: bool | None = None
    while True:
        with ExitStack() as undo:
            file = undo.enter_context(open(path, "a+b"))
            while (held := lock_now(file)) is False:
                waited = time.monotonic() - start
                if waited > policy.timeout:
                    raise user_error("lock-wait-timeout", waited=waited, holder=_holder(file, path))
                if waited > due:
                    due = waited + policy.report_every
                    if reports is None:
                        reports = _is_first_waiter(path, reporter_lock)
                    if reports:
                        policy.report(f"waiting for {waited:.0f} s: {_holder(file, path)}")
                time.sleep(POLL_SECONDS)
            # Deleting the folder deletes the lock file; others then lock a new file of that name.
            if is_at(file, path):
                undo.pop_all()
                return file, held is True


def _holder(file: IO[bytes], path: Path) -> str:
    file.seek(0)
    holder = file.read(200).decode(errors="replace") or "another process"
    return f"{holder} holds {path}; kill it if it hangs"


def _is_first_waiter(path: Path, reporter_lock: ExitStack) -> bool:
    """Whether this is the process that reports; takes the lock that marks it."""
    try:
        file = reporter_lock.enter_context(path.with_name("waiting.lock").open("ab"))
        return lock_now(file) is not False
    except OSError:
        return True


def is_at(file: IO[bytes], path: str | Path) -> bool:
    """Whether an open file still has this path, and was not removed, renamed or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
