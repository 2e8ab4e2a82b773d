"""The store of a run's --load: downloads a checkpoint to the nodes that need it. Collective.

Each node has a staging folder. Its ranks share the download of the files that they load; every node
downloads all files of a checkpoint that is resharded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from megatron_ds.checkpoint import metadata
from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.local.nodes import Nodes
from megatron_ds.checkpoint.metadata import MANIFEST, find_record_damage, read_manifest
from megatron_ds.checkpoint.store import mirror as staging
from megatron_ds.config.problems import Problem, counted
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.object_store import ObjectStore

IsNeeded = Callable[[str, int], bool]
"""Whether a rank loads a file of a checkpoint."""


class StoreFolder:
    """Downloads the checkpoints of a store. Methods are collective.

    Args:
        store: The store.
        ranks: All ranks.
        nodes: The ranks by staging folder.
        log: Prints a line on one rank.
    """

    def __init__(
        self, store: ObjectStore, ranks: CollectiveIO, nodes: Nodes, log: Callable[[str], None]
    ) -> None:
        self.store = store
        self.nodes = nodes
        self._ranks = ranks
        self._log = log

    def find_damage(self, path: Path, readers: Callable[[], IsNeeded]) -> Problem | None:
        """Downloads what the ranks of each node load of a checkpoint, and verifies it.

        Args:
            path: Its staging folder.
            readers: Returns whether a rank loads a file; called once run.json is here.

        Returns:
            The first problem found, the same on every rank.
        """
        damage = self._ranks.run_on_rank0(lambda: find_record_damage(path))
        if damage is not None:
            return damage
        try:
            damage = self._ranks.run_on_rank0(lambda: staging.find_missing(self.store, path))
            if damage is not None:
                return damage
            manifest = self._ranks.run_on_rank0(lambda: (path / MANIFEST).read_bytes())
            self._ranks.run_merged(lambda: self._mirror(path, manifest), len)
            files = read_manifest(path)
            is_needed = readers()
            return self._fetch(path, files, [name for name in files if self._has(name, is_needed)])
        except (OSError, ValueError) as error:
            return metadata.unreadable_checkpoint(error)

    def fetch_all(self, path: Path) -> None:
        """Downloads the files of a checkpoint that no rank of a node loads by itself.

        Raises:
            OSError: If the store or a disk fails, or a file is damaged.
        """
        files = read_manifest(path)
        damage = self._fetch(path, files, files)
        if damage is not None:
            raise OSError(str(damage))

    def _has(self, name: str, is_needed: IsNeeded) -> bool:
        return any(is_needed(name, rank) for rank in self.nodes.own_ranks)

    def _mirror(self, path: Path, manifest: bytes) -> None:
        """Downloads what describes a checkpoint, if this node has another description of it."""
        if self.nodes.is_first and _content(path / MANIFEST) != manifest:
            staging.mirror_checkpoint(self.store, path)
            if _content(path / MANIFEST) != manifest:
                raise OSError(f"{self.store}/{path.name} was replaced meanwhile")

    def _fetch(
        self, path: Path, files: Mapping[str, FileRecord], names: Iterable[str]
    ) -> Problem | None:
        mine = self.nodes.share_of(names)
        start = time.monotonic()
        fetched = self._ranks.run_merged(
            lambda: staging.fetch(self.store, path, mine), lambda sizes: sum(sizes)
        )
        seconds = time.monotonic() - start
        if fetched:
            self._log(
                f"  downloaded {fetched / 1e9:.3f} GB of {path.name} from {self.store} to "
                f"{counted(self.nodes.count, 'node')} in {seconds:.1f} s"
            )
        records = {name: files[name] for name in mine}
        return self._ranks.run_merged(
            lambda: local_files.find_damaged_files(path, records),
            lambda parts: local_files.files_damaged(*parts),
        )


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None
