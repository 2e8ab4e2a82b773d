"""Lock file by which one run at a time owns a --save folder.

The file names its owner: host, process and start time, and its folder, so that the lock in a copy
of the folder has no effect. An owner on the same host is dead if its process is. Any other owner is
dead if it has not touched the file for `FOREIGN_SILENCE_S`; clocks of different hosts are not
compared. Where torchrun starts a run again after the loss of a node, the lock belongs to the same
run, whose earlier ranks have most likely ended: a shorter silence is enough. Needs no locks of the
file system, only exclusive creation and atomic renames, which network file systems have.
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
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from megatron_ds.config.problems import ignore, user_error
from megatron_ds.fileio.visibility import retry_stale
from megatron_ds.launch import environment
from megatron_ds.launch.watch.liveness import HostLocation, ProcessHandle

LOCK = "run.lock"
HEARTBEAT_S = 10.0
"""Interval at which an owner touches its file."""
FOREIGN_SILENCE_S = 60.0
"""Time without a touch after which an owner on another host is dead."""
ELASTIC_HEARTBEAT_S = 1.5
ELASTIC_SILENCE_S = 5.0
"""Silence of a dead owner within a run that torchrun starts again."""
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
    """Time at which it took the lock, for messages."""
    nonce: str
    """Distinguishes two locks of one process."""
    folder: str = ""
    """Resolved path of the folder."""
    inode: int = 0
    """The folder's own; 0 in a store. A renamed folder keeps it, a copy has neither."""
    run: str = ""
    """See `environment.elastic_run`."""

    @classmethod
    def here(cls) -> Owner:
        location = HostLocation.here()
        return cls(
            host=socket.gethostname(),
            location=location.host,
            pid=location.process.pid,
            started=location.process.started,
            since=f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            nonce=secrets.token_hex(8),
            run=environment.elastic_run(),
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


class LockFile(Protocol):
    """Storage of a lock."""

    @property
    def folder(self) -> str:
        """The folder that the lock protects, for messages."""

    def read(self) -> bytes | None:
        """Content that its owner has written; None if there is no owner."""

    def create(self, content: bytes) -> bool:
        """Creates the file unless it exists; returns whether it did."""

    def touch(self, content: bytes) -> None:
        """Gives a heartbeat of the owner who has written this content."""

    def touched(self) -> object:
        """Changes with each heartbeat."""

    def remove(self, content: bytes) -> None:
        """Removes the file of a dead owner, and no other that has replaced it meanwhile."""


def seconds_since_boot() -> float:
    """Seconds that no setting of the clock changes, with the sleep of the machine where it is
    known."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


@dataclass(frozen=True)
class Lease:
    """Content and timing of a held lock; any rank of its owner can check that it is still held."""

    content: bytes
    """Content of the lock file."""
    heartbeat_s: float
    silence_s: float
    """Time without a touch after which another run may take the lock."""


class Ownership:
    """Whether a lock still names its owner, for any rank that writes to what it protects.

    Another run takes the lock only after a silence of the owner. So `may_write` reads the file only
    if it was not read for two heartbeats, as after a suspension, and not at each line of a log.

    Args:
        file: The lock's file.
        lease: Lease of the lock.
        clock: Returns seconds.
    """

    def __init__(
        self, file: LockFile, lease: Lease, clock: Callable[[], float] = seconds_since_boot
    ) -> None:
        self._file = file
        self._lease = lease
        self._clock = clock
        self._confirmed = clock()
        self._is_lost = False

    def may_write(self) -> bool:
        """Whether a record may be appended now. A file that cannot be read changes nothing."""
        if self._is_lost:
            return False
        if self._clock() - self._confirmed <= 2 * self._lease.heartbeat_s:
            return True
        try:
            return self.is_held()
        except OSError:
            return True

    def is_held(self) -> bool:
        """Reads the file. Once another run has taken the lock, it stays lost.

        A missing file was deleted by a user, unless this process was silent for so long that
        another run may have taken the lock and ended.

        Raises:
            OSError: If the file cannot be read.
        """
        now = self._clock()
        content = self._file.read()
        self._is_lost |= content not in (None, self._lease.content)
        if self._is_lost:
            return False
        if content is None:
            return now - self._confirmed < self._lease.silence_s
        self._confirmed = now
        return True

    def is_taken(self) -> bool:
        """Reads the file: whether it names another run. Also after this run has released it.

        Raises:
            OSError: If the file cannot be read.
        """
        return self._file.read() not in (None, self._lease.content)


class RunLock:
    """A lock that this process holds until it is released or the process ends.

    Args:
        file: The lock's file, which this process has created.
        lease: Content and timing of the lock.
        clock: Returns seconds.

    Attributes:
        lease: The argument `lease`.
        on_lost: Called, perhaps several times, once another run has taken the lock.
    """

    def __init__(
        self, file: LockFile, lease: Lease, clock: Callable[[], float] = seconds_since_boot
    ) -> None:
        self.lease = lease
        self.on_lost: Callable[[], object] = ignore
        self._file = file
        self._content = lease.content
        self._ownership = Ownership(file, lease, clock)
        self._reading = threading.Lock()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._touch_regularly, name="run lock", daemon=True)
        self._thread.start()

    def is_held(self) -> bool:
        """Whether the file still names this process; what was deleted is created again.

        False once the lock is released.

        Raises:
            OSError: If the file can be neither read nor written.
        """
        if self._released.is_set():
            return False
        # What one thread is about to write would look like the file of another run to the other.
        with self._reading:
            if not self._ownership.is_held():
                return False
            return self._file.read() == self._content or self._file.create(self._content)

    def release(self) -> None:
        self._released.set()
        self._thread.join(HEARTBEAT_S)  # a heartbeat after the removal would create it again
        with suppress(OSError):
            if self._file.read() == self._content:
                self._file.remove(self._content)

    def _touch_regularly(self) -> None:
        while not self._released.wait(self.lease.heartbeat_s):
            with suppress(OSError):
                self._file.touch(self._content)
                if not self.is_held() and not self._released.is_set():
                    self.on_lost()


def acquire(folder: Path, log: Callable[[str], None]) -> RunLock:
    """Takes the lock of a folder; see `acquire_lock`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = FolderLockFile(folder / LOCK)
    inode = folder.stat().st_ino
    return acquire_lock(file, log, os.path.realpath(folder), inode)


def acquire_lock(
    file: LockFile, log: Callable[[str], None], folder: str = "", inode: int = 0
) -> RunLock:
    """Takes a lock, without waiting if it is free, if its owner was a process of this host that has
    ended, or if the folder is a copy of the owner's.

    Args:
        file: Where it is kept.
        log: Prints a line before a wait.
        folder: See `Owner`.
        inode: See `Owner`.

    Raises:
        UserError: If its owner is alive.
        OSError: If the file cannot be written.
    """
    candidate = replace(Owner.here(), folder=folder, inode=inode)
    content = json.dumps(asdict(candidate)).encode()
    while not file.create(content):
        current = file.read()
        if current is None:
            continue  # released meanwhile
        is_alive = _is_alive(file, current, candidate, log)
        if file.read() != current:
            continue  # released, or taken by another run, meanwhile
        if is_alive:
            owner = Owner.parse(current)
            path = f"{file.folder}/{LOCK}"
            raise user_error("save-folder-in-use", folder=file.folder, owner=owner, path=path)
        file.remove(current)
    lease = Lease(content, HEARTBEAT_S, FOREIGN_SILENCE_S)
    if candidate.run:
        lease = Lease(content, ELASTIC_HEARTBEAT_S, ELASTIC_SILENCE_S)
    return RunLock(file, lease)


def _is_alive(file: LockFile, content: bytes, candidate: Owner, log: Callable[[str], None]) -> bool:
    """Whether the owner in a lock file lives, and keeps the file while it may be about to end."""
    owner = Owner.parse(content)
    owned = f"{owner or 'an unknown process'}, which owns {file.folder}"
    if owner is not None and owner.location == candidate.location:
        if owner.inode not in (0, candidate.inode) and owner.folder != candidate.folder:
            return False  # it owns the folder that this one is a copy of
        process = ProcessHandle(owner.pid, owner.started)
        if process.is_alive():
            log(f"waiting up to {ENDING_S:.0f} s for the end of {owned}")
        return not _becomes_true(lambda: not process.is_alive() or file.read() != content, ENDING_S)
    first = file.touched()
    silence_s = FOREIGN_SILENCE_S
    if owner is not None and owner.run and owner.run == candidate.run:
        silence_s = ELASTIC_SILENCE_S
    log(f"waiting up to {silence_s:.0f} s for a heartbeat from {owned}")
    if not _becomes_true(lambda: file.touched() != first, silence_s):
        return False
    return not _becomes_true(lambda: file.read() != content, ENDING_S)


def _becomes_true(condition: Callable[[], bool], timeout: float) -> bool:
    end = time.monotonic() + timeout
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(POLL_S)
    return holds


class FolderLockFile:
    """A lock file of a file system; its time of modification is the heartbeat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def folder(self) -> str:
        return str(self._path.parent)

    def read(self) -> bytes | None:
        try:
            return retry_stale(self._path.read_bytes)
        except FileNotFoundError:
            return None

    def create(self, content: bytes) -> bool:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = self._path.open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(content)
        except OSError:
            self._path.unlink(missing_ok=True)  # a later run would wait for its unknown owner
            raise
        return True

    def touch(self, content: bytes) -> None:
        if self.read() == content:
            os.utime(self._path)

    def touched(self) -> int | None:
        """Returns the time of the file's last touch; None without the file.

        Opened because network file systems ask their server then, instead of answering from a
        cache.
        """
        try:
            with self._path.open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def remove(self, content: bytes) -> None:
        aside = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            os.rename(self._path, aside)
        except FileNotFoundError:
            return
        if aside.read_bytes() != content:
            with suppress(OSError):
                os.link(aside, self._path)
        aside.unlink()
