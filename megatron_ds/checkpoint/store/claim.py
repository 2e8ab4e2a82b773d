"""The stores of a run: opened, locked, and brought up to date before anything is selected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint import run_lock
from megatron_ds.checkpoint.collective_io import RankAgreement
from megatron_ds.checkpoint.local.nodes import Nodes
from megatron_ds.checkpoint.run_lock import RunLock
from megatron_ds.checkpoint.store import mirror as staging
from megatron_ds.checkpoint.store.fetch import StoreFolder
from megatron_ds.checkpoint.store.lock import StoreLockFile
from megatron_ds.checkpoint.store.object_store import ObjectStore
from megatron_ds.checkpoint.store.save import upload_metrics
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.checkpoint import split_location
from megatron_ds.config.problems import Problem, collect, raise_if_any, user_error


@dataclass(frozen=True)
class RunStores:
    """The stores that --save and --load name; None for a folder."""

    save: StoreFolder | None = None
    load: StoreFolder | None = None
    lock: RunLock | None = None
    """The lock of --save, on the first rank."""


@contextmanager
def claimed_stores(
    config: CheckpointConfig, ranks: RankAgreement, log: Callable[[str], None]
) -> Iterator[RunStores]:
    """Opens the stores of a run, and owns --save inside. Collective.

    Raises:
        UserError: If another run owns --save or a staging folder of it, or a store fails.
        OSError: If a staging folder cannot be written.
    """

    def open_folder(url: str, staged: str) -> StoreFolder:
        nodes = Nodes.sharing(Path(split_location(staged)[1]), ranks)
        return StoreFolder(ObjectStore(url), ranks, nodes, log)

    save = load = lock = None
    with ExitStack() as held:

        def own(acquire: Callable[[], RunLock]) -> RunLock:
            lock = acquire()
            held.callback(lock.release)
            return lock

        if config.save_url is not None:
            assert config.save is not None
            save, staged = open_folder(config.save_url, config.save), Path(config.save)
            store, nodes = save.store, save.nodes

            def own_store() -> None:
                nonlocal lock
                try:
                    lock = own(lambda: run_lock.acquire_lock(StoreLockFile(store), log))
                except OSError as error:
                    raise user_error(
                        "store-unusable", "save", url=store.url, error=error
                    ) from error

            ranks.on_rank0(own_store)

            def own_staging() -> list[Problem]:
                problems = list[Problem]()
                if nodes.is_first:
                    with collect(problems):
                        own(lambda: run_lock.acquire(staged, log))
                        # What was there before this run owned the store may have changed.
                        staging.mirror(store, staged, everything=False)
                return problems

            raise_if_any(problem for found in ranks.on_all(own_staging) for problem in found)
        if config.load_url is not None:
            assert config.load is not None
            is_same = config.load_url == config.save_url
            load = save if is_same else open_folder(config.load_url, config.load)
        if save is not None and ranks.rank == ranks.world_size - 1:
            staging.restore_metrics(save.store, staged)  # of the run that is continued
        try:
            yield RunStores(save, load, lock)
        finally:
            if save is not None and ranks.rank == ranks.world_size - 1:
                with suppress(OSError):
                    upload_metrics(save.store, staged)
