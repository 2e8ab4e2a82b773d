"""Interface of the readers of other trainers' tokens, independent of the format.

A reader opens files or a folder as a `ForeignTokens`, which checks sizes and headers of all files
before any token is read. Knows no output, end tokens or vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem
from megatron_ds.data.token_files.token_file import IntArray, Tokens

BLOCK_BYTES = 1 << 22
"""Bytes of ids that are read at once: few enough for the caches of a core."""
NO_ENDS: npt.NDArray[np.int64] = np.zeros(0, np.int64)


class Block(NamedTuple):
    """Consecutive tokens of a file.

    Attributes:
        tokens: [n] ids, valid until the next block is taken.
        ends: [d], number of tokens of the block before the end of each document, ascending.
        position: Where the next block begins, for `ForeignFile.blocks`.
        num_bytes: Bytes of the file that the block takes.
    """

    tokens: Tokens
    ends: IntArray
    position: int
    num_bytes: int


class ForeignFile(Protocol):
    """A file, or a shard or chunk of a data set.

    Attributes:
        path: Its path, for messages.
        size: Its bytes as stored.
        dtype: Type of its ids.
    """

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    def blocks(self, position: int) -> Iterator[Block]:
        """The tokens from a position on, which is 0 or that of a block.

        Raises:
            UserError: If the file is damaged.
            OSError: If it cannot be read.
        """

    def byte_of(self, token: int) -> int | None:
        """The byte at which a token begins; None if only reading the file would tell."""


@dataclass(frozen=True)
class ForeignTokens:
    """The tokens of files of one format.

    Attributes:
        files: The files in reading order.
        boundaries: How the files give documents, such as "document ends of .ds.index"; "" if they
            do not give them.
        notes: Other facts that decide how ids are read, such as an assumed type.
        joins_files: Whether a document may go on in the next file.
        drops_tail: Whether the writers of the format drop the tail of the last document, so that
            it need not end with an end token.
        marks_begin: Whether an end token is in front of its document in files of this format.
        warnings: Doubts about the files.
    """

    files: Sequence[ForeignFile]
    boundaries: str
    notes: tuple[str, ...] = ()
    joins_files: bool = False
    drops_tail: bool = False
    marks_begin: bool = False
    warnings: tuple[Problem, ...] = ()

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Type of the ids, which all files share."""
        return self.files[0].dtype

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class ReadOptions:
    """What the user says about the files.

    Attributes:
        token_type: Type of ids without a type of their own.
        column: Column or key of the ids.
        vocab_size: Number of ids.
        has_boundaries: Whether documents are found without the boundaries of the files.
    """

    token_type: np.dtype[np.generic] | None = None
    column: str | None = None
    vocab_size: int | None = None
    has_boundaries: bool = False


class Reader(Protocol):
    """Opens the files of a format."""

    def __call__(self, paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
        """Opens files, or the one folder of a format that is a folder.

        Raises:
            UserError: With all problems of sizes, headers and missing files.
        """
