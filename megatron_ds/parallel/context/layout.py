"""Who has which tokens in context parallelism, and which keys queries see. Imports no torch.

A sequence is cut into 2N chunks, and rank c of N has the chunks c and 2N - 1 - c. With a causal
mask the first sees few keys and the second many, so that all ranks compute as many scores.

Shapes: N ranks, w tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_ds.dataclass import dataclass

CHUNKS = 2
"""Chunks of each rank."""


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Numbers of a rank's chunks among all chunks of a sequence, in the order of its tokens."""
    return rank, CHUNKS * ranks - 1 - rank


class Block(NamedTuple):
    """Queries and keys of one call of a kernel."""

    queries: slice
    """Which of this rank's tokens."""
    keys: slice
    """Which of the keys that were received from one rank."""
    is_causal: bool
    """Whether later keys are hidden; there are then as many as queries, at the same positions. All
    keys of another block precede all queries."""
    first_query: int
    """Position of the first query in the sequence."""
    first_key: int
    """Position of the first key."""


@dataclass(frozen=True)
class VisibleKeys:
    """The first key that a query sees: of its window, and of its document."""

    window: int | None = None
    """Keys that a query attends to. None: all."""
    document_starts: Sequence[int] | None = None
    """Where the document of each token starts, in the text in which it starts first. None:
    attention does not end with a document."""

    def first(self, position: int) -> int:
        """A lower bound for all queries from this position on."""
        windowed = 0 if self.window is None else max(0, position - self.window + 1)
        starts = self.document_starts
        return windowed if starts is None else max(windowed, starts[position])


@dataclass(frozen=True)
class ContextLayout:
    """Which blocks of scores a rank computes.

    Attributes:
        rank: The rank.
        ranks: Number of ranks, N.
        width: Tokens of a chunk, w.
        visible: The keys that queries see.
    """

    rank: int
    ranks: int
    width: int
    visible: VisibleKeys

    def needs(self, receiver: int, owner: int) -> list[int]:
        """The chunks of a rank that queries of another one see, 0 or 1."""
        queries = chunks_of(receiver, self.ranks)
        return [
            index
            for index, chunk in enumerate(chunks_of(owner, self.ranks))
            if any(self._is_seen(query, chunk) for query in queries)
        ]

    def blocks(self, owner: int, chunks: Sequence[int], *, joined: bool) -> Iterator[Block]:
        """The blocks of the keys that were received from a rank.

        Args:
            owner: The rank that has them.
            chunks: Which of its chunks they are.
            joined: Whether chunks are joined, which is possible if each query sees all keys before
                it.
        """
        width = self.width
        queries = chunks_of(self.rank, self.ranks)
        all_keys = chunks_of(owner, self.ranks)
        keys = [all_keys[chunk] for chunk in chunks]
        if joined:
            yield self._joined(owner, queries, keys)
            return
        for row, query in enumerate(queries):
            for column, key in enumerate(keys):
                if self._is_seen(query, key):
                    yield Block(
                        slice(row * width, (row + 1) * width),
                        slice(column * width, (column + 1) * width),
                        query == key,
                        query * width,
                        key * width,
                    )

    def _joined(self, owner: int, queries: Sequence[int], keys: Sequence[int]) -> Block:
        """The keys of a rank as one block: of this rank, of one before it, or of one after it.

        A rank's own tokens are in the order of their positions, so that they form one causal block.
        """
        width = self.width
        first = 1 if owner > self.rank else 0  # the first chunk precedes those of later ranks
        return Block(
            slice(first * width, CHUNKS * width),
            slice(0, len(keys) * width),
            owner == self.rank,
            queries[first] * width,
            keys[0] * width,
        )

    def _is_seen(self, query: int, key: int) -> bool:
        """Whether any query of a chunk sees any key of another one."""
        width = self.width
        return query >= key and self.visible.first(query * width) < (key + 1) * width
