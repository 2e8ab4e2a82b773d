"""Blocks of large files in a folder of a node, bounded in total, shared by the node's processes.

The copy of a file is sparse: it has the size of the file, and the blocks that were downloaded.
A mark per block records which. Readers map the copy; while they read, they share a lock, and before
a block is removed its mark is, under the same lock, exclusive. A block is marked only after its
bytes are written, and locks end with their process, so that a killed process leaves nothing wrong.
As a machine may have lost what it had not written to its disk, blocks that no running process has
used are compared with their checksums first.

Knows no network, and nothing of the content.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ds.fileio.file_holes import punch_hole
from megatron_ds.fileio.file_lock import SharedLock, lock_now
from megatron_ds.fileio.memory_map import map_file

BLOCK_BYTES = 1 << 20
ABSENT, UNVERIFIED, IDLE, USED = range(4)
"""Marks: not here; here since an earlier use; here, and used, before or after the last blocks were
chosen for removal. Only blocks marked `USED` are read without a further check."""
FREED_FRACTION = 64
"""A 64th of the limit is removed at once, since choosing takes some milliseconds."""
CONTENT = "content"
MARKS = "marks"
CHECKSUMS = "checksums"
USERS = "users"
SPACE = "space.lock"
READERS = "readers.lock"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
"""Linux's identifier of a running machine, the same in its containers."""
TOTAL = struct.Struct("<q")


class BlockFile:
    """The copy of a file.

    Args:
        folder: The folder that has it.
        size: Bytes of the file.
        block_bytes: Bytes of a block.

    Attributes:
        marks: [blocks + 1], changed by other processes, too. The last one is `USED` while no block
            is missing; readers then need not check other marks.
    """

    def __init__(self, folder: Path, size: int, block_bytes: int) -> None:
        self.folder = folder
        self.size = size
        self.block_bytes = block_bytes
        self.count = -(-size // block_bytes)
        with open(folder / MARKS, "r+b") as marks, open(folder / CHECKSUMS, "r+b") as checksums:
            self.marks = map_file(marks, writable=True)
            self._checksums = map_file(checksums, writable=True).view("<u4")

    @staticmethod
    def create(folder: Path, size: int, block_bytes: int) -> None:
        """Makes the files of a copy without blocks."""
        for name, length in _sizes(size, block_bytes).items():
            with open(folder / name, "wb") as file:
                file.truncate(length)

    @staticmethod
    def is_sound(folder: Path, size: int, block_bytes: int) -> bool:
        """Whether the files exist with their sizes."""
        sizes = {folder / name: length for name, length in _sizes(size, block_bytes).items()}
        return all(path.is_file() and path.stat().st_size == n for path, n in sizes.items())

    def span(self, block: int) -> tuple[int, int]:
        """First byte of a block, and its end."""
        start = block * self.block_bytes
        return start, min(start + self.block_bytes, self.size)

    def map_content(self) -> npt.NDArray[np.uint8]:
        """All bytes; absent blocks are zeros."""
        with open(self.folder / CONTENT, "rb") as file:
            return map_file(file)

    def write(self, block: int, content: bytes) -> None:
        with open(self.folder / CONTENT, "r+b", buffering=0) as file:
            file.seek(block * self.block_bytes)
            if file.write(content) != len(content):
                raise OSError(f"{file.name}: the disk is full")
        self._checksums[block] = zlib.crc32(content)
        self.mark_used(block)

    def mark_used(self, block: int) -> None:
        """Lets readers have a block."""
        self.marks[block] = USED
        if self.marks[-1] != USED and self.marks[:-1].min() >= IDLE:
            self.marks[-1] = USED

    def matches(self, block: int) -> bool:
        """Whether a block has its checksum."""
        start, end = self.span(block)
        with open(self.folder / CONTENT, "rb", buffering=0) as file:
            content = os.pread(file.fileno(), end - start, start)
        return len(content) == end - start and zlib.crc32(content) == self._checksums[block]

    def free(self, blocks: npt.NDArray[np.int64]) -> None:
        """Gives the space of blocks back, which have no marks any more, in ascending order."""
        with open(self.folder / CONTENT, "r+b", buffering=0) as file:
            for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1):
                if len(run):
                    start = int(run[0]) * self.block_bytes
                    size = len(run) * self.block_bytes
                    punch_hole(file.fileno(), start, size)

    def distrust(self) -> None:
        """Prepares a copy that no process uses: what a killed one or a crash left is uncertain."""
        self.marks[self.marks != ABSENT] = UNVERIFIED
        self.marks[-1] = ABSENT
        self.free(np.flatnonzero(self.marks[:-1] == ABSENT))


class BlockCache:
    """The folder. Methods may be called from several threads and processes.

    Args:
        folder: The folder, which exists.
        limit: Bytes that its files may have together.
        block_bytes: Bytes of a block, a multiple of the pages of file systems.

    Raises:
        OSError: If the folder cannot be written.
    """

    def __init__(self, folder: Path, limit: int, block_bytes: int = BLOCK_BYTES) -> None:
        self.folder = folder
        self.limit = limit
        self.block_bytes = block_bytes
        # Never closed: that would release locks which the process has by another descriptor.
        self._space, self._readers = (
            os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o666) for name in (SPACE, READERS)
        )
        self._threads = threading.Lock()

    def begin_reading(self) -> None:
        """Keeps all blocks in the cache until `end_reading`. Only one thread of a process may call
        it."""
        fcntl.lockf(self._readers, fcntl.LOCK_SH)

    def end_reading(self) -> None:
        fcntl.lockf(self._readers, fcntl.LOCK_UN)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        """While it lasts, no other process or thread adds or removes anything."""
        with self._threads:
            fcntl.flock(self._space, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._space, fcntl.LOCK_UN)

    def use(self, name: str) -> tuple[SharedLock, bool]:
        """Makes a folder for a copy, and keeps it while the lock is held.

        Returns:
            The lock, and whether no other process has it.

        Raises:
            OSError: If a process of another machine has it.
        """
        with self.allocating():
            path = self.folder / name / USERS
            machine = Path(BOOT_ID).read_text()
            path.parent.mkdir(exist_ok=True)
            path.touch()
            is_first = not _has_users(path.parent)
            if is_first:
                path.write_text(machine)
            elif path.read_text() != machine:  # whose maps and marks would not show here
                reason = "another machine uses it, but each needs a folder on a disk of its own"
                raise OSError(errno.EREMOTE, reason)
            return SharedLock(path), is_first

    def recount(self) -> int:
        """Counts the bytes of all files again, after files other than blocks were added."""
        with self.allocating():
            total = self._count()
            self._set_total(total)
        return total

    def make_room(self, size: int) -> None:
        """Removes blocks so that other files of `size` bytes can be written.

        Raises:
            OSError: If there are not enough blocks.
        """
        with self.allocating():
            if self._count() + size > self.limit:
                self._set_total(self._remove_blocks(size))

    def has(self, file: BlockFile, block: int) -> bool:
        """Whether a block is here; compares it with its checksum if it is old."""
        if file.marks[block] == UNVERIFIED and file.matches(block):
            with self.allocating():
                if file.marks[block] == UNVERIFIED:  # not removed meanwhile
                    file.mark_used(block)
        return bool(file.marks[block] >= IDLE)

    def store(self, file: BlockFile, block: int, content: bytes) -> None:
        """Adds a block, after others were removed if the limit requires it.

        Raises:
            OSError: If the disk is full.
        """
        with self.allocating():
            if not file.marks[block]:
                total = self._total() + self.block_bytes
                if total > self.limit:
                    total = self._remove_blocks(self.block_bytes) + self.block_bytes
                self._set_total(total)
            file.write(block, content)

    def _total(self) -> int:
        content = os.pread(self._space, TOTAL.size, 0)
        return int(TOTAL.unpack(content)[0]) if content else self._count()

    def _set_total(self, total: int) -> None:
        os.pwrite(self._space, TOTAL.pack(total), 0)

    def _remove_blocks(self, room: int) -> int:
        """Removes blocks until `room` bytes and a reserve are free; returns the bytes that remain.

        Blocks that were not used since the last call are removed first, in random order: samples
        are in random order, too, so that the time of a use predicts little of the next one.

        Raises:
            OSError: If there are not enough blocks.
        """
        files = self._files()
        goal = self.limit - self.limit // FREED_FRACTION - room
        surplus = max(0, -(-(sum(map(_size, files)) - goal) // self.block_bytes))
        none = [np.empty(0, np.int64)]
        owners = np.concatenate(none + [np.full(entry.count, n) for n, entry in enumerate(files)])
        blocks = np.concatenate(none + [np.arange(entry.count) for entry in files])
        marks = np.concatenate(
            none + [np.maximum(entry.marks[:-1], entry.marks[-1]) for entry in files]
        )
        keys = (marks == USED) + np.random.default_rng().random(len(marks))
        order = np.argsort(np.where(marks == ABSENT, np.inf, keys))[:surplus]
        if len(order) < surplus or np.any(marks[order] == ABSENT):
            raise OSError(f"{self.folder} needs more than {self.limit} bytes for index files alone")
        is_aged = np.any(marks[order] == USED)
        chosen = [np.sort(blocks[order][owners[order] == n]) for n in range(len(files))]
        fcntl.lockf(self._readers, fcntl.LOCK_EX)
        try:
            for file, removed in zip(files, chosen, strict=True):
                if len(removed):
                    file.marks[removed] = ABSENT
                    file.marks[-1] = ABSENT
                if is_aged:
                    file.marks[:-1][file.marks[:-1] == USED] = IDLE
        finally:
            fcntl.lockf(self._readers, fcntl.LOCK_UN)
        for file, removed in zip(files, chosen, strict=True):
            file.free(removed)
            if not file.marks.any() and not _has_users(file.folder):
                shutil.rmtree(file.folder)
        return self._count()

    def _count(self) -> int:
        return sum(map(_size, self._files()))

    def _files(self) -> list[BlockFile]:
        """All copies, but those that a killed process has not completed."""
        entries = [
            (path.parent, path.stat().st_size, self.block_bytes)
            for path in sorted(self.folder.glob(f"*/{CONTENT}"))
        ]
        return [BlockFile(*entry) for entry in entries if BlockFile.is_sound(*entry)]


def _sizes(size: int, block_bytes: int) -> dict[str, int]:
    """Bytes of the files of a copy, without its index."""
    count = -(-size // block_bytes)
    return {CHECKSUMS: 4 * count, CONTENT: size, MARKS: count + 1}


def _size(file: BlockFile) -> int:
    """Bytes of a copy, each of its blocks counted in full, and of the other files next to it."""
    total = int(np.count_nonzero(file.marks[:-1])) * file.block_bytes
    for path in file.folder.iterdir():
        with suppress(FileNotFoundError):  # renamed meanwhile
            total += path.stat().st_size if path.name != CONTENT else 0
    return total


def _has_users(folder: Path) -> bool:
    with open(folder / USERS, "rb") as file:
        return lock_now(file) is False
