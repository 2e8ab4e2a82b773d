"""Samples: the ids of their tokens, and marks for properties of tokens that the ids do not express.

The component that knows a property sets its mark: a token file, a dataset of the program, fill in
the middle, the rule of --document-boundaries. `engine.device_batches` alone reads them. Knows no
files, ranks or torch.

Shapes: B samples, T tokens of a sample, seq_length + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.int32]
MarkArray = npt.NDArray[np.uint8]


class Mark(IntFlag):
    """Bits of a token's marks.

    Operators of numpy take a mark's `value`: numpy makes int64 of the member of an enum.
    """

    NO_LOSS = 1
    """The token has no loss as a label."""
    LAST = 2
    """The token is the last one of its document."""


NO_MARKS = Mark(0)


class Samples(NamedTuple):
    """Samples of equal length."""

    ids: IdArray
    """[B, T]."""
    marks: MarkArray | None
    """[B, T], each a sum of `Mark`; None if no token has one."""

    @classmethod
    def empty(cls, shape: tuple[int, ...], marks: Mark) -> Samples:
        """Memory for samples.

        Args:
            shape: [B, T], or [N, B, T] for N micro-batches.
            marks: The marks that tokens may have.
        """
        return cls(np.empty(shape, np.int32), np.empty(shape, np.uint8) if marks else None)

    def at(self, index: int) -> Samples:
        """The samples at an index of the first dimension."""
        return Samples(self.ids[index], None if self.marks is None else self.marks[index])

    def copy(self) -> Samples:
        """The samples in new memory."""
        return Samples(self.ids.copy(), None if self.marks is None else self.marks.copy())


class Transform(Protocol):
    """Changes samples that were read and checked, or marks their tokens."""

    @property
    def marks(self) -> Mark:
        """The marks that it writes, or needs of the samples."""

    def __call__(self, positions: Sequence[int], samples: Samples) -> None:
        """Changes the samples of some positions in place."""


@dataclass(frozen=True)
class DocumentEnds:
    """The rule of --document-boundaries and --eod-mask-loss. Implements `Transform`."""

    eod: int | None
    """Id of the token that ends a document. None: the last token of its sequence ends it, which the
    token file has marked."""
    masks_loss: bool = False
    """The token after the end of a document has no loss."""

    @property
    def marks(self) -> Mark:
        return Mark.LAST | Mark.NO_LOSS if self.masks_loss else Mark.LAST

    def __call__(self, positions: Sequence[int], samples: Samples) -> None:
        ids, marks = samples
        assert marks is not None
        if self.eod is not None:
            marks &= Mark.NO_LOSS.value
            marks |= (ids == self.eod) * np.uint8(Mark.LAST)
        if self.masks_loss:
            is_last = marks & Mark.LAST.value != 0
            marks[:, 1:] |= is_last[:, :-1] * np.uint8(Mark.NO_LOSS)
