"""The stores of a run: opened, locked, and brought up to date before anything is selected."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.files.collective_io import CollectiveIO, joined
from megatron_ds.checkpoint.folders import run_lock
from megatron_ds.checkpoint.folders.run_lock import Ownership, RunLock
from megatron_ds.checkpoint.local.nodes import Nodes
from megatron_ds.checkpoint.location import Location, RunFolders
from megatron_ds.checkpoint.store import mirror as staging
from megatron_ds.checkpoint.store.fetch import StoreFolder
from megatron_ds.checkpoint.store.lock import StoreLockFile
from megatron_ds.checkpoint.store.save import upload_metrics
from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error
from megatron_ds.fileio.object_store import ObjectStore


@dataclass(frozen=True)
class RunStores:
    """The stores that --save and --load name; None for a folder."""

    save: StoreFolder | None = None
    load: StoreFolder | None = None
    lock: RunLock | None = None
    """The lock of --save, on the first rank."""
    ownership: Ownership | None = None
    """Check that the lock of --save is still held, on each rank."""


@contextmanager
def claimed_stores(
    folders: RunFolders, ranks: CollectiveIO, log: Callable[[str], None]
) -> Iterator[RunStores]:
    """Opens the stores of a run, and owns --save inside. Collective.

    Raises:
        UserError: If another run owns --save or a staging folder of it, or a store fails.
        OSError: If a staging folder cannot be written.
    """

    def open_folder(location: Location) -> StoreFolder:
        assert location.url is not None
        nodes = Nodes.sharing(location.folder, ranks)
        return StoreFolder(ObjectStore(location.url), ranks, nodes, log)

    save = None
    load = None
    lock = None
    ownership = None
    with ExitStack() as held:

        def own(acquire: Callable[[], RunLock]) -> RunLock:
            lock = acquire()
            held.callback(lock.release)
            return lock

        if folders.save is not None and folders.save.url is not None:
            save = open_folder(folders.save)
            staged = folders.save.folder
            store = save.store

            def own_store() -> None:
                nonlocal lock
                try:
                    lock = own(lambda: run_lock.acquire_lock(StoreLockFile(store), log))
                except OSError as error:
                    raise user_error(
                        "store-unusable", "save", url=store.url, error=error
                    ) from error

            ranks.run_on_rank0(own_store)
            lease = ranks.run_on_rank0(lambda: None if lock is None else lock.lease)
            assert lease is not None
            ownership = Ownership(StoreLockFile(store), lease)
            acquire_staging = functools.partial(own, lambda: run_lock.acquire(staged, log))
            claim = functools.partial(_own_staging, save, staged, acquire_staging)
            raise_if_any(ranks.run_merged(claim, joined))
        if folders.load is not None and folders.load.url is not None:
            load = save if folders.load == folders.save else open_folder(folders.load)
        if save is not None and ranks.rank == ranks.world_size - 1:
            staging.restore_metrics(save.store, staged)  # of the run that is continued
        try:
            yield RunStores(save, load, lock, ownership)
        finally:
            if ownership is not None and ranks.rank == ranks.world_size - 1:
                _upload_metrics_of_owner(ownership, store, staged)


def _own_staging(save: StoreFolder, staged: Path, acquire: Callable[[], RunLock]) -> list[Problem]:
    """Owns and fills the staging folder of --save, on the first rank of each node."""
    problems = list[Problem]()
    if save.nodes.is_first:
        with collect(problems):
            acquire()
            # What was there before this run owned the store may have changed.
            staging.mirror(save.store, staged, everything=False)
    return problems


def _upload_metrics_of_owner(ownership: Ownership, store: ObjectStore, staged: Path) -> None:
    """Uploads the metrics unless another run has taken the folder."""
    with suppress(OSError):
        if not ownership.is_taken():
            upload_metrics(store, staged)
