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
        """The tokens of a sample, and which of them have a loss as a label.

        One of the following, of lists, arrays or tensors [seq_length + 1]:

        - integers: the token ids; `~id`, which is negative, instead of the id of a token without
          loss
        - a pair of token ids and a loss mask: 1 or True for a token with loss, else 0 or False
        - a mapping of `input_ids`, and `loss_mask` or `labels`: the label is the token's id, or
          -100 for a token without loss
        """


BuildDataset = Callable[[DatasetRequest], MapStyle | None]
"""Returns None for a split without data."""
