"""The lock by which one run owns a --save URL: an object that its owner rewrites regularly.

The first line names the owner as in the lock file of a folder, the second one counts its
heartbeats. In a store that creates objects conditionally, such as S3, one run gets the lock; in
other stores two runs that start within a second may both get it, and the one whose lock is
overwritten stops saving.
"""

from __future__ import annotations

import itertools
import time
from contextlib import suppress

from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.fileio.object_store import ObjectStore

SETTLE_S = 1.0
"""Time after which the content of a new lock is compared: a run that removed the lock of the same
dead owner may have replaced it."""


class StoreLockFile:
    """A `LockFile` in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._beats = itertools.count(1)

    @property
    def folder(self) -> str:
        return self._store.url

    def read(self) -> bytes | None:
        content = self._content()
        return None if content is None else content.partition(b"\n")[0]

    def create(self, content: bytes) -> bool:
        if not self._store.create(LOCK, content):
            # A client repeats a request whose answer was lost: the object may be its own.
            return self.read() == content
        time.sleep(SETTLE_S)
        return self.read() == content

    def touch(self, content: bytes) -> None:
        if self.read() == content:
            self._store.write(LOCK, content + b"\n%d" % next(self._beats))

    def touched(self) -> bytes | None:
        return self._content()

    def remove(self, content: bytes) -> None:
        if self.read() == content:
            self._store.remove(LOCK)

    def _content(self) -> bytes | None:
        with suppress(FileNotFoundError):
            return self._store.read(LOCK)
        return None
