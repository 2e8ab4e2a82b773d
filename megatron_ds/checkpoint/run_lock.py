"""Lock file by which one run at a time owns a --save folder.

The file names its owner: host, process and start time. An owner on the same host is dead if its
process is. Any other owner is dead if it has not touched the file for `FOREIGN_SILENCE_S`; clocks
of different hosts are not compared. Needs no locks of the file system, only exclusive creation and
atomic renames, which network file systems have.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from megatron_ds.config.problems import user_error
from megatron_ds.launch.liveness import HostLocation, ProcessHandle

LOCK = "run.lock"
HEARTBEAT_S = 10.0
"""Interval at which an owner touches its file."""
FOREIGN_SILENCE_S = 60.0
"""Time without a touch after which an owner on another host is dead."""
ENDING_S = 10.0
"""Time that a live owner has to end: ranks may outlive their launcher for seconds."""
POLL_S = 0.2


@dataclass(frozen=True)
class Owner:
    """The contents of a lock file."""

    host: str
    """Name of the host, for messages."""
    location: str
    """The host's identity, see `HostLocation`."""
    pid: int
    started: str | None
    """Start time of the process, see `ProcessHandle`."""
    since: str
    """When it took the lock, for messages."""
    nonce: str
    """Distinguishes two locks of one process."""

    @classmethod
    def here(cls) -> Owner:
        place = HostLocation.here()
        return cls(
            host=socket.gethostname(),
            location=place.host,
            pid=place.process.pid,
            started=place.process.started,
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            nonce=secrets.token_hex(8),
        )

    @classmethod
    def parse(cls, content: bytes) -> Owner | None:
        """The owner in a file; None if its writer was killed before it wrote it."""
        try:
            return cls(**json.loads(content))
        except (ValueError, TypeError):
            return None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


class RunLock:
    """A lock that this process holds until it is released or the process ends."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path, self._content = path, content
        self._released = threading.Event()
        threading.Thread(target=self._touch_regularly, name="run lock", daemon=True).start()

    def is_held(self) -> bool:
        """Whether the file still names this process; what was deleted is created again.

        Raises:
            OSError: If the file can be neither read nor written.
        """
        if _read(self._path) == self._content:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return _create(self._path, self._content)

    def release(self) -> None:
        self._released.set()
        with suppress(OSError):
            if _read(self._path) == self._content:
                self._path.unlink()

    def _touch_regularly(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            with suppress(OSError):
                if _read(self._path) == self._content:
                    os.utime(self._path)


def acquire(folder: Path, log: Callable[[str], None]) -> RunLock:
    """Takes the lock of a folder, at once if there is no owner or a dead one of this host.

    Args:
        folder: An existing folder.
        log: Prints a line before a wait.

    Raises:
        UserError: If its owner is alive.
        OSError: If the file cannot be written.
    """
    path = folder / LOCK
    content = json.dumps(asdict(Owner.here())).encode()
    while not _create(path, content):
        found = _read(path)
        if found is None:
            continue  # released meanwhile
        is_alive = _is_alive(path, found, log)
        if _read(path) != found:
            continue  # released, or taken by another run, meanwhile
        if is_alive:
            owner = Owner.parse(found)
            raise user_error("save-folder-in-use", folder=folder, owner=owner, path=path)
        _remove(path, found)
    return RunLock(path, content)


def _is_alive(path: Path, content: bytes, log: Callable[[str], None]) -> bool:
    """Whether the owner in a lock file lives, and keeps the file while it may be about to end."""
    owner = Owner.parse(content)
    owned = f"{owner or 'an unknown process'}, which owns {path.parent}"
    if owner is not None and owner.location == HostLocation.here().host:
        process = ProcessHandle(owner.pid, owner.started)
        if process.is_alive():
            log(f"waiting up to {ENDING_S:.0f} s for the end of {owned}")
        return not _becomes_true(lambda: not process.is_alive() or _read(path) != content, ENDING_S)
    first = _touched(path)
    log(f"waiting up to {FOREIGN_SILENCE_S:.0f} s for a sign of life of {owned}")
    if not _becomes_true(lambda: _touched(path) != first, FOREIGN_SILENCE_S):
        return False
    return not _becomes_true(lambda: _read(path) != content, ENDING_S)


def _becomes_true(condition: Callable[[], bool], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return holds


def _touched(path: Path) -> int | None:
    """When a file was last touched; None without the file.

    Opened because network file systems ask their server then, instead of answering from a cache.
    """
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _create(path: Path, content: bytes) -> bool:
    """Creates a lock file unless there is one; returns whether it did."""
    try:
        file = path.open("xb")
    except FileExistsError:
        return False
    try:
        with file:
            file.write(content)
    except OSError:
        path.unlink(missing_ok=True)  # a later run would wait for its unknown owner
        raise
    return True


def _remove(path: Path, dead: bytes) -> None:
    """Removes a dead owner's file, and no other that has replaced it meanwhile."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return
    if aside.read_bytes() != dead:
        with suppress(OSError):
            os.link(aside, path)
    aside.unlink()
