"""Checkpoints on the disks of the nodes, each with a copy on a neighbor.

    DIR/global_stepN/   on every node: the files of its ranks and of the node before it
        run.json, tokenizer/, manifest.json    as in a checkpoint of --save; of all ranks

A node that has lost its disk receives its files from the node behind it. A checkpoint counts if
every file of the manifest is intact on some node. Knows no engine: `manager.py` decides when a
checkpoint is written and which one a run resumes from.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.local.exchange import Transfer, exchange
from megatron_ds.checkpoint.local.nodes import Nodes
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    STATES,
    Checkpoint,
    RunRecord,
    find_record_damage,
    iteration_of,
    list_checkpoints,
    read_manifest,
    read_run,
)
from megatron_ds.checkpoint.store.fetch import IsNeeded
from megatron_ds.checkpoint.store.mirror import is_intact
from megatron_ds.config import CheckpointConfig
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.launch import environment

KEPT = 2
"""Checkpoints that a node keeps, so that a failed save leaves a complete one on all nodes."""
Files = Mapping[str, FileRecord]


@dataclass(frozen=True)
class _Described:
    """Description of a checkpoint, equal on all nodes."""

    run: RunRecord
    files: Files
    texts: Mapping[str, bytes]
    """Contents of its small files by name, the manifest last."""


@dataclass(frozen=True)
class _Found:
    """A checkpoint of a node, as one of its ranks sees it."""

    digest: str
    """SHA-256 of its manifest, which is equal on all nodes of a save."""
    intact: frozenset[str]
    """The rank's share of the files, without those that do not match the manifest."""
    is_described: bool
    """Whether all files but the states match it."""


class LocalCheckpoints:
    """The local checkpoints of a run. Methods are collective.

    Args:
        folder: Folder of this node.
        ranks: All ranks.
        nodes: The ranks by this folder.
        warn: Prints a warning on one rank.
    """

    def __init__(
        self, folder: Path, ranks: CollectiveIO, nodes: Nodes, warn: Callable[[Problem], None]
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._nodes = nodes
        self._warn = warn
        self._hosts = ranks.run_on_all(socket.gethostname)

    def save(
        self,
        iteration: int,
        write: Callable[[Path], Mapping[str, FileRecord]],
        describe: Callable[[Sequence[Files]], Mapping[str, bytes]],
    ) -> None:
        """Writes a checkpoint on every node, copies it to the neighbors, and removes old ones.

        Args:
            iteration: Its iteration.
            write: Writes the files of this rank into a folder; returns their records.
            describe: Returns the other files by name, the manifest last; called on the first rank
                with what each rank wrote.

        Raises:
            OSError: On every rank, if a disk fails. The local checkpoints before it are intact.
        """
        target = self._folder / f"global_step{iteration}"
        temporary = self._folder / f"{local_files.INCOMPLETE}{target.name}"
        try:
            self._on_first_ranks(lambda: _create(temporary))
            written = self._ranks.run_on_all(lambda: write(temporary))
            exchange(self._copies(written), temporary, self._ranks)
            texts = self._ranks.run_on_rank0(lambda: describe(written))
            self._on_first_ranks(lambda: local_files.write_files(temporary, texts))
            # Renamed on all nodes once it is complete on all.
            self._on_first_ranks(lambda: local_files.publish(temporary, target))
        except OSError:
            with suppress(OSError):
                self._on_first_ranks(lambda: shutil.rmtree(temporary, ignore_errors=True))
            raise
        self._on_first_ranks(lambda: self._remove_others(iteration))

    def restore(
        self,
        after: int,
        is_own: Callable[[RunRecord], bool],
        readers: Callable[[RunRecord], IsNeeded],
    ) -> Checkpoint | None:
        """Finds the newest complete checkpoint, and completes it on nodes that lack files.

        Args:
            after: Iteration that it must exceed.
            is_own: Whether a checkpoint belongs to the run.
            readers: Returns whether a rank loads a file of a checkpoint.

        Returns:
            The checkpoint, whose folder has on each node the files that its ranks load; None if no
            local checkpoint is of use.
        """
        for name in self._all_after(after):
            parts = self._ranks.run_on_all(functools.partial(self._check, name))
            if any(part is not None for part in parts):
                restored = self._restore(name, parts, is_own, readers)
                if restored is not None:
                    return restored
        return None

    def warn_of_unused(self, after: int) -> None:
        """Warns of checkpoints after an iteration that the run will not use."""
        if names := self._all_after(after):
            self._warn(
                Problem("local-checkpoints-unused", names=", ".join(names), folder=self._folder)
            )

    def discard_after(self, iteration: int) -> None:
        """Removes checkpoints of later iterations, which the run from this one replaces."""

        def remove() -> None:
            for path in list_checkpoints(self._folder):
                if iteration_of(path) > iteration:
                    local_files.discard(path)

        with suppress(OSError):
            self._on_first_ranks(remove)

    @classmethod
    def open(
        cls, options: CheckpointConfig, ranks: CollectiveIO, warn: Callable[[Problem], None]
    ) -> LocalCheckpoints | None:
        """The checkpoints of --local-checkpoint-dir; None without it. Collective.

        Raises:
            UserError: If a rank cannot write to its folder.
        """
        if options.local_checkpoint_dir is None or options.save is None:
            return None
        folder = Path(environment.expand_variables(options.local_checkpoint_dir))
        try:
            nodes = Nodes.sharing(folder, ranks)
        except OSError as error:
            raise user_error(
                "local-checkpoint-folder-not-writable", folder=folder, error=error
            ) from None
        if nodes.count == 1:
            warn(Problem("local-copies-on-one-node", folder=folder))
        return cls(folder, ranks, nodes, warn)

    def _all_after(self, iteration: int) -> list[str]:
        """Names of the checkpoints on any node after an iteration, newest first."""
        listed = self._ranks.run_on_all(lambda: list_checkpoints(self._folder))
        paths = {Path(path.name) for paths in listed for path in paths}
        later = [path for path in paths if iteration_of(path) > iteration]
        return [path.name for path in sorted(later, key=iteration_of, reverse=True)]

    def _on_first_ranks(self, work: Callable[[], object]) -> None:
        self._ranks.run_on_all(lambda: work() if self._nodes.is_first else None)

    def _remove_others(self, iteration: int) -> None:
        """Removes all but the newest ones up to an iteration; errors are left to the next save."""
        earlier = [
            path for path in list_checkpoints(self._folder) if iteration_of(path) <= iteration
        ]
        for path in list_checkpoints(self._folder):
            if path not in earlier[:KEPT]:
                with suppress(OSError):
                    local_files.discard(path)

    def _copies(self, written: Sequence[Files]) -> list[Transfer]:
        """Transfers from each rank to a rank of the next node; even nodes send first."""
        members = self._nodes.members
        if len(members) == 1:
            return []
        order = sorted(range(len(members)), key=lambda node: (node % 2, node))
        return [
            Transfer(rank, next_ranks[index % len(next_ranks)], name, record)
            for node in order
            for next_ranks in [members[(node + 1) % len(members)]]
            for index, rank in enumerate(members[node])
            for name, record in sorted(written[rank].items())
        ]

    def _check(self, name: str) -> _Found | None:
        """Verifies this rank's share of the files that this node has of a checkpoint."""
        path = self._folder / name
        with suppress(OSError, UserError):
            if find_record_damage(path) is not None:
                return None
            files = read_manifest(path)
            share = self._nodes.share_of(name for name in files if (path / name).is_file())
            damaged = local_files.find_damaged_files(path, {name: files[name] for name in share})
            small = (name for name in files if not name.endswith(STATES))
            is_described = all(is_intact(path / name, files[name]) for name in small)
            return _Found(_digest(path), frozenset(share) - damaged.keys(), is_described)
        return None

    def _restore(
        self,
        name: str,
        parts: Sequence[_Found | None],
        is_own: Callable[[RunRecord], bool],
        readers: Callable[[RunRecord], IsNeeded],
    ) -> Checkpoint | None:
        """Completes one checkpoint; None if it is of another run or has lost files.

        Args:
            name: Its folder.
            parts: Files that each rank has verified; None for ranks without any, but not for all.
            is_own: Whether it belongs to the run.
            readers: Returns whether a rank loads a file of a checkpoint.
        """
        path = self._folder / name
        digests = [part.digest for part in parts if part is not None]
        digest = max(sorted(set(digests)), key=digests.count)
        agreeing = {
            rank: part
            for rank, part in enumerate(parts)
            if part is not None and part.digest == digest
        }
        intact = {rank: part.intact for rank, part in agreeing.items()}
        source = next((rank for rank, part in agreeing.items() if part.is_described), None)
        if source is None:
            lack = "no node has all of its small files"
            self._warn(Problem("local-checkpoint-not-restored", name=name, error=lack))
            return None
        described = self._ranks.run_on_all(
            lambda: _describe(path) if self._ranks.rank == source else None
        )[source]
        assert described is not None
        if not is_own(described.run):
            return None
        if lost := sorted(described.files.keys() - set().union(*intact.values())):
            self._warn(
                Problem("local-checkpoint-incomplete", name=name, lost=lost[0], count=len(lost))
            )
            return None
        files = described.files
        is_needed = readers(described.run)
        transfers = list[Transfer]()
        # Files that nodes lack and their ranks load.
        for ranks in self._nodes.members:
            copies = [intact[rank] for rank in ranks if rank in intact]
            present = set[str]().union(*copies) if copies else {*described.texts}
            needed = [file for file in files if any(is_needed(file, rank) for rank in ranks)]
            missing = sorted(file for file in needed if file not in present)
            for index, file in enumerate(missing):
                sender = next(rank for rank, names in intact.items() if file in names)
                transfers.append(Transfer(sender, ranks[index % len(ranks)], file, files[file]))
        try:
            self._on_first_ranks(lambda: _adopt(path, digest, described))
            exchange(transfers, path, self._ranks)
        except OSError as error:
            self._warn(Problem("local-checkpoint-not-restored", name=name, error=error))
            return None
        self._report(name, transfers)
        return Checkpoint(path, described.run)

    def _report(self, name: str, transfers: Sequence[Transfer]) -> None:
        for node, ranks in enumerate(self._nodes.members):
            received = [transfer for transfer in transfers if transfer.target in ranks]
            if received:
                sources = {self._nodes.node_of(transfer.source) for transfer in received}
                self._warn(
                    Problem(
                        "local-checkpoint-restored",
                        name=name,
                        node=self._name_of(node),
                        sources=" and ".join(self._name_of(source) for source in sorted(sources)),
                        count=len(received),
                        size=sum(transfer.record.size for transfer in received) / 1e9,
                    )
                )

    def _name_of(self, node: int) -> str:
        first = self._nodes.members[node][0]
        return f"node {node} ({self._hosts[first]})"


def _digest(path: Path) -> str:
    return hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()


def _create(temporary: Path) -> None:
    local_files.remove_temporary(temporary.parent)
    temporary.mkdir(parents=True)


def _describe(path: Path) -> _Described:
    files = read_manifest(path)
    names = [name for name in sorted(files) if not name.endswith(STATES)]
    texts = {name: (path / name).read_bytes() for name in (*names, MANIFEST)}
    return _Described(read_run(path).run, files, texts)


def _adopt(path: Path, digest: str, described: _Described) -> None:
    """Makes a node's folder one of the checkpoint with this manifest."""
    with suppress(OSError):
        if _digest(path) == digest:
            return
    local_files.discard(path)
    local_files.write_files(path, described.texts)
