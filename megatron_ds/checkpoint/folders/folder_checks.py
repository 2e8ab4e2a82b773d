"""Claims the folder of a run before it trains: one run owns it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.folders import run_lock
from megatron_ds.checkpoint.folders.run_lock import LOCK, FolderLockFile, Ownership, RunLock
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.config.problems import user_error


@contextmanager
def claimed_folders(
    folders: RunFolders, ranks: CollectiveIO, log: Callable[[str], None]
) -> Iterator[RunLock | None]:
    """Owns --save inside, unless it is a URL. Collective.

    Args:
        folders: The folders.
        ranks: All ranks.
        log: Prints a line on one rank.

    Yields:
        The lock of --save, on the first rank.

    Raises:
        UserError: If --save cannot be created or written, or another run owns it.
    """
    lock: RunLock | None = None

    def own(save: Path) -> None:
        nonlocal lock
        try:
            save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise user_error("save-folder-not-created", folder=save, error=error) from None
        try:
            lock = run_lock.acquire(save, log)
        except OSError as error:
            raise user_error("save-folder-not-writable", folder=save, error=error) from None

    try:
        if folders.save is not None and folders.save.url is None:
            ranks.run_on_rank0(functools.partial(own, folders.save.folder))
        yield lock
    finally:
        if lock is not None:
            lock.release()


def folder_ownership(
    lock: RunLock | None, folders: RunFolders, ranks: CollectiveIO
) -> Ownership | None:
    """Returns the check of the lock of --save that each rank makes before it writes a record.
    Collective; None without a local --save.

    Args:
        lock: The lock of --save, on the first rank.
        folders: The folders.
        ranks: All ranks.
    """
    if folders.save is None or folders.save.url is not None:
        return None
    lease = ranks.run_on_rank0(lambda: None if lock is None else lock.lease)
    assert lease is not None
    return Ownership(FolderLockFile(folders.save.folder / LOCK), lease)
