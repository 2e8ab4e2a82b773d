"""The steps of a save to an object store, by way of a staging folder on each node.

    prepare      each node   temporary folder; rank 0: the lock
    write        all         their files into it, each flushed to the disk
    invalidate   rank 0      removes the checkpoint to be replaced and what interrupted uploads left
    upload       all         their files
    complete     rank 0      run.json, tokenizer, the run's files; the manifest; pointers; retention
    keep         each node   the rename; the files stay for a resume on this node, older ones do not

A checkpoint is complete as soon as its manifest is in the store; a crash at any moment leaves the
other checkpoints intact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.collective_io import RankWork, joined
from megatron_ds.checkpoint.folders.run_lock import LOCK
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    POINTERS,
    STATES,
    find_record_damage,
    iteration_of,
    list_checkpoints,
    read_manifest,
)
from megatron_ds.checkpoint.save_steps import FolderLostError, SaveSteps, Steps
from megatron_ds.checkpoint.store.fetch import StoreFolder
from megatron_ds.checkpoint.store.mirror import CHECKPOINT_FOLDER, METRICS
from megatron_ds.config.problems import Problem
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.object_store import PARALLEL, ObjectStore


class _Completed(NamedTuple):
    """Files that the first rank has completed."""

    texts: Mapping[str, bytes]
    """Small files of the checkpoint by name, the manifest last."""
    kept: frozenset[str]
    """Names of the checkpoints in the store."""
    warnings: Sequence[Problem]


@dataclass(kw_only=True)
class StoreSaveSteps(SaveSteps):
    """One save to a store.

    Attributes:
        destination: The store, and the nodes by their staging folders.
        world_size: Number of ranks. The last one writes the metrics.
    """

    destination: StoreFolder
    world_size: int

    @property
    def shown_folder(self) -> str:
        return self.store.url

    @property
    def store(self) -> ObjectStore:
        return self.destination.store

    def _work(self) -> Steps:
        yield RankWork(self._require_folder, on_all=False)
        self.warnings += yield RankWork(self._prepare_node, on_all=True, merge=joined)
        written: list[Mapping[str, FileRecord]] = []  # on the first rank
        records: dict[str, FileRecord] = {}

        def write() -> Mapping[str, FileRecord]:
            records.update(self.snapshot.write(self.temporary))
            return records

        yield RankWork(write, on_all=True, merge=written.extend)
        yield RankWork(self._invalidate, on_all=False)
        yield RankWork(lambda: self._upload(records), on_all=True, merge=len)
        completed = yield RankWork(lambda: self._complete_store(written), on_all=False)
        self.warnings += completed.warnings
        yield RankWork(lambda: self._keep(completed), on_all=True, merge=len)

    def _clean_up(self) -> Steps:
        yield RankWork(self._require_folder, on_all=False)
        yield RankWork(self._clean_up_node, on_all=True, merge=len)

    def _prepare_node(self) -> list[Problem]:
        """Creates the temporary folder of a node; warns if its disk may become full."""
        nodes = self.destination.nodes
        if not nodes.is_first:
            return []
        local_files.remove_temporary(self.folder)
        self.temporary.mkdir(parents=True)
        return self._check_free_space(self.estimate * len(nodes.own_ranks) / self.world_size)

    def _invalidate(self) -> None:
        """Removes files of checkpoints that have no manifest, and the checkpoint to be replaced."""
        self._require_folder()
        names = [name for name in self.store.sizes() if CHECKPOINT_FOLDER.fullmatch(name)]
        complete = {name.partition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")}
        if self.target.name in complete:
            self.store.remove(f"{self.target.name}/{MANIFEST}")
            complete.remove(self.target.name)
        self._remove(name for name in names if name.partition("/")[0] not in complete)

    def _upload(self, written: Mapping[str, FileRecord]) -> None:
        """Uploads what this rank has written."""
        nodes = self.destination.nodes
        if nodes.rank == self.world_size - 1:
            upload_metrics(self.store, self.folder)  # a resume reads them

        def upload(name: str) -> None:
            self.store.upload(self.temporary / name, f"{self.target.name}/{name}")

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(upload, written))

    def _complete_store(self, written: Sequence[Mapping[str, FileRecord]]) -> _Completed:
        """Completes the checkpoint in the store, and removes old ones."""
        texts = self.description(written)
        for path in self.folder.iterdir():
            if is_run_file(path):
                self.store.upload(path, path.name)
        self._require_folder()
        for name, text in {POINTER_PENDING: b"\n", **texts}.items():
            self.store.write(f"{self.target.name}/{name}", text)
        warnings = []
        removed: list[str] = []
        try:
            self._require_folder()
            write_pointers(self.store, self.target.name)
            for path in self._outdated():
                self.store.remove(f"{path.name}/{MANIFEST}")  # first: it is incomplete then
                self._remove(self.store.sizes(path.name))
                removed.append(path.name)
        except FolderLostError:
            raise
        except OSError as error:
            target = f"{self.shown_folder}/{self.target.name}"
            warnings.append(Problem("save-pointers-failed", target=target, error=error))
        kept = {path.name for path in list_checkpoints(self.folder)} - {*removed}
        return _Completed(texts, frozenset({*kept, self.target.name}), warnings)

    def _outdated(self) -> list[Path]:
        """The staged descriptions of complete checkpoints that are not to be kept."""
        if self.retention is None:
            return []
        assert self.run is not None
        return self.retention.outdated(self.target, self.run.branch, find_record_damage)

    def _remove(self, names: Iterable[str]) -> None:
        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(self.store.remove, names))

    def _keep(self, completed: _Completed) -> None:
        """Gives the staged files their names. Of other checkpoints, only descriptions remain."""
        if not self.destination.nodes.is_first:
            return
        local_files.write_files(self.temporary, completed.texts)
        local_files.publish(self.temporary, self.target)
        local_files.write_pointers(self.target)
        for path in list_checkpoints(self.folder):
            if path.name not in completed.kept:
                local_files.discard(path)
            elif path != self.target:
                remove_tensors(path)

    def _clean_up_node(self) -> None:
        if self.destination.nodes.is_first:
            local_files.remove_temporary(self.folder)


def is_run_file(path: Path) -> bool:
    """Whether a file of a staging folder belongs to the run, such as ds_config.json."""
    if not path.is_file() or path.name.startswith((".", METRICS)):
        return False
    return path.name not in (*POINTERS, LOCK)


def upload_metrics(store: ObjectStore, folder: Path) -> None:
    """Uploads the metrics of the run, and those that an earlier branch has left.

    Each file is read completely before its upload, because records may be appended during it.
    """
    for path in folder.glob(f"{METRICS}*"):
        store.write(path.name, path.read_bytes())


def remove_tensors(path: Path) -> None:
    """Deletes a staged checkpoint's data files; run.json and manifest stay."""
    with suppress(OSError, ValueError):
        for name in read_manifest(path):
            if name.endswith(STATES):
                (path / name).unlink(missing_ok=True)


def write_pointers(store: ObjectStore, name: str) -> None:
    """Makes the pointers in a store name a checkpoint, which a later load then selects."""
    for pointer, text in zip(POINTERS, (name, str(iteration_of(Path(name)))), strict=True):
        store.write(pointer, text.encode())
    file = f"{name}/{POINTER_PENDING}"
    marks = [path for path in store.sizes() if path.endswith(f"/{POINTER_PENDING}")]
    for mark in sorted(marks, key=lambda mark: mark == file):  # alone, an older one would be loaded
        store.remove(mark)
