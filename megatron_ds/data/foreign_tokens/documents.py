"""Where documents end in a stream of tokens: as the files say, or at an end token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.data.foreign_tokens.foreign_file import NO_ENDS, Block
from megatron_ds.data.token_files.token_file import IntArray

MAX_SEQUENCE = 1 << 30
"""Longest sequence that is written; a longer document has several."""
AFTER = "after"
BEFORE = "before"


@dataclass(frozen=True)
class DocumentRule:
    """How documents are found.

    Attributes:
        end_token: Token between documents; None for the ends that the files give.
        is_before: Whether the end token is in front of its document.
        whole_files: Whether each file is a document.
    """

    end_token: int | None = None
    is_before: bool = False
    whole_files: bool = False

    def ends_in(self, block: Block) -> IntArray:
        """[d] ends of documents in the tokens of a block."""
        if self.whole_files:
            return NO_ENDS
        if self.end_token is None:
            return block.ends
        marks: npt.NDArray[np.int64] = np.flatnonzero(block.tokens == self.end_token)
        return marks if self.is_before else marks + 1

    @property
    def is_by_token(self) -> bool:
        return self.end_token is not None


class Documents(NamedTuple):
    """Documents that end in a block.

    Attributes:
        lengths: [n], tokens of their sequences, of which the first may have begun earlier.
        sequences: [d], sequences of each document.
    """

    lengths: IntArray
    sequences: IntArray


@dataclass
class OpenDocument:
    """The document that has begun and not ended.

    Attributes:
        length: Its tokens so far.
        empty: Documents without tokens so far, which are left out.
    """

    length: int = 0
    empty: int = 0

    def add(self, tokens: int, ends: IntArray) -> Documents:
        """Counts the tokens of a block.

        Args:
            tokens: Number of tokens.
            ends: [d], ends of documents in them, ascending.
        """
        if not len(ends):
            self.length += tokens
            return Documents(NO_ENDS, NO_ENDS)
        lengths = np.diff(ends, prepend=0)
        lengths[0] += self.length
        self.length = tokens - int(ends[-1])
        is_empty = lengths == 0
        if is_empty.any():
            self.empty += int(is_empty.sum())
            lengths = lengths[~is_empty]
        if len(lengths) and int(lengths.max()) > MAX_SEQUENCE:
            return _divided(lengths)
        return Documents(lengths, np.ones_like(lengths))


def _divided(lengths: IntArray) -> Documents:
    """Documents of which some are longer than a sequence may be."""
    counts = -(-lengths // MAX_SEQUENCE)
    sizes = list[int]()
    for length in lengths.tolist():
        sizes += [MAX_SEQUENCE] * ((length - 1) // MAX_SEQUENCE)
        sizes.append((length - 1) % MAX_SEQUENCE + 1)
    return Documents(np.array(sizes, np.int64), counts)
