"""Groups ranks into nodes by the local folder that they see.

Determined by files that the ranks write and list, not by names of hosts: a host may have several
containers with a folder each, and a network file system is one folder for many hosts.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.fileio.probe_files import write_probe

TOKEN = ".node-"
"""Prefix of the file by which a rank is found."""


@dataclass(frozen=True)
class Nodes:
    """The ranks in groups that see the same files.

    Attributes:
        first_ranks: The first rank that sees the same files, by rank.
        rank: This rank.
    """

    first_ranks: tuple[int, ...]
    rank: int

    @classmethod
    def sharing(cls, folder: Path, ranks: CollectiveIO) -> Nodes:
        """The nodes by a folder, which is created. Collective.

        Raises:
            OSError: If a rank cannot write to it.
        """
        name = ranks.run_on_rank0(lambda: f"{TOKEN}{secrets.token_hex(8)}-")

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            write_probe(folder / f"{name}{ranks.rank}", TOKEN)

        def look() -> int:
            return min(int(path.name.removeprefix(name)) for path in folder.glob(f"{name}*"))

        ranks.run_on_all(write)
        try:
            return cls(tuple(ranks.run_on_all(look)), ranks.rank)
        finally:
            with suppress(OSError):
                (folder / f"{name}{ranks.rank}").unlink(missing_ok=True)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node, in the order of their first ranks."""
        return tuple(
            tuple(rank for rank, node in enumerate(self.first_ranks) if node == first)
            for first in sorted(set(self.first_ranks))
        )

    @property
    def count(self) -> int:
        return len(self.members)

    def node_of(self, rank: int) -> int:
        """The number of a rank's node."""
        return sorted(set(self.first_ranks)).index(self.first_ranks[rank])

    @property
    def own_ranks(self) -> tuple[int, ...]:
        """The ranks of this rank's node."""
        return self.members[self.node_of(self.rank)]

    @property
    def is_first(self) -> bool:
        """Whether this rank does what one rank of each node does."""
        return self.first_ranks[self.rank] == self.rank

    def share_of(self, names: Iterable[str]) -> list[str]:
        """This rank's part of work that the ranks of a node distribute."""
        ranks = self.own_ranks
        return sorted(names)[ranks.index(self.rank) :: len(ranks)]
