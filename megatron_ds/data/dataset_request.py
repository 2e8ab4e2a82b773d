"""The request to a program that brings its own dataset. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megatron_ds.tokenizer import Tokenizer


@dataclass(frozen=True)
class DatasetRequest:
    """Request of a run to a dataset of your own."""

    split: str
    """ "train", "validation" or "test"."""
    samples: int
    """Samples that the run reads; a smaller dataset is read in several epochs."""
    seq_length: int
    """Tokens of a sample without the last label: an item has one more."""
    seed: int
    tokenizer: Tokenizer


class MapStyle(Protocol):
    """A dataset as torch's map-style ones: items by index, of any number of epochs."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any:
        """Integers [seq_length + 1], as a list, an array or a tensor: the ids of a sample's tokens.

        A token has no loss as a label if `~id`, which is negative, is in place of its id.
        """


BuildDataset = Callable[[DatasetRequest], MapStyle | None]
"""Returns None for a split without data."""
