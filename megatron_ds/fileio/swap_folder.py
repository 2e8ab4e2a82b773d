"""A folder of this process's own for temporary files, on a disk that several runs may share."""

from __future__ import annotations

import itertools
import shutil
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO

from megatron_ds.fileio.file_lock import is_at, lock_now


class SwapFolder:
    """The first of PARENT/swap0, PARENT/swap1, ... that no live process uses.

    A lock, which the kernel releases when its holder dies, distinguishes them; files that a dead
    process left are removed. The folder is removed when this object or the process ends.

    Args:
        parent: Folder on the disk; it is created.

    Raises:
        OSError: If the folder cannot be written.
    """

    def __init__(self, parent: Path) -> None:
        for index in itertools.count():
            self.path = parent / f"swap{index}"
            parent.mkdir(parents=True, exist_ok=True)
            # Its last user may remove it at the same time.
            with suppress(FileNotFoundError, FileExistsError):
                self.path.mkdir(exist_ok=True)
                lock = (self.path / "lock").open("wb")
                if lock_now(lock) is not False and is_at(lock, self.path / "lock"):
                    break
                lock.close()
        for path in self.path.iterdir():
            if path.name != "lock":
                shutil.rmtree(path)
        self.remove = weakref.finalize(self, _remove, self.path, lock)


def _remove(path: Path, lock: IO[bytes]) -> None:
    with suppress(OSError):
        shutil.rmtree(path)
    lock.close()
