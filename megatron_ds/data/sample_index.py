"""Megatron's document, sample and shuffle index, splits and blends: which tokens make sample i.

Pure arithmetic on numpy arrays. The three indexes are equal, element by element, to the
indexes of Megatron-LM and microsoft/Megatron-DeepSpeed. Knows no files, tokenizers or torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error

IntArray = npt.NDArray[np.integer]
Ranges = tuple[tuple[int, int], ...]
"""Sequences of a token file: first and end of each range, in order, without overlaps."""

SEPARATE_LAST_EPOCH_FRACTION = 0.80
"""A last epoch that contributes less than this fraction of its samples is shuffled separately."""
BLEND_MARGIN = 1.005
"""Factor on the samples requested from each source of a blend, as in Megatron."""
CHUNK_DOCUMENTS = 1 << 16
"""Documents per vectorized step: enough to amortize numpy's overhead, and fit the CPU cache."""


@dataclass(frozen=True)
class SampleIndexes:
    """The arrays that map a position in the data order to tokens.

    Attributes:
        documents: [D], document numbers of all epochs, shuffled.
        samples: [S + 1, 2], position in `documents` and token offset at which sample i begins. A
            sample ends one token after the beginning of the next one: neighbours share a token.
            Cyclic epochs repeat the samples of the first.
        shuffle: [S], sample number of each position in the data order.
    """

    documents: IntArray
    samples: IntArray
    shuffle: IntArray

    def __len__(self) -> int:
        return len(self.shuffle)

    def load(self) -> SampleIndexes:
        """Implements `IndexProvider`."""
        return self


@dataclass(frozen=True)
class RemainingIndexes:
    """The arrays of a `RemainingDataset`.

    Attributes:
        unread: Numbers of the samples that were not read, in the order of the text. Of the last, as
            many as `ends` has, only a part is read.
        shuffle: [S], sample number of each position in the data order.
        ends: Position of the end of each part in the text of these parts.
        shifts: Offset to add to a position in this text to get the position in the sample.
    """

    unread: IntArray
    shuffle: IntArray
    ends: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    shifts: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))


def epochs_needed(num_samples: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Fewest epochs that give `num_samples` samples of seq_length + 1 tokens."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def samples_of_epochs(
    epochs: int, tokens_per_epoch: int, seq_length: int, *, is_cyclic: bool = False
) -> int:
    """Number of samples in `epochs` epochs. Cyclic: an epoch has the same samples as the first."""
    if is_cyclic and tokens_per_epoch > seq_length:
        return epochs * ((tokens_per_epoch - 1) // seq_length)
    return (epochs * tokens_per_epoch - 1) // seq_length


def total_samples(
    num_samples: int, tokens_per_epoch: int, seq_length: int, *, is_cyclic: bool = False
) -> int:
    """Number of samples in the complete epochs that give at least `num_samples`."""
    if is_cyclic and tokens_per_epoch > seq_length:
        per_epoch = (tokens_per_epoch - 1) // seq_length
        return per_epoch * max(1, -(-num_samples // per_epoch))
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    return samples_of_epochs(epochs, tokens_per_epoch, seq_length)


def index_bytes(num_samples: int, documents: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Bytes of the three indexes, assuming 32-bit element types."""
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    total = total_samples(num_samples, tokens_per_epoch, seq_length)
    return 4 * epochs * documents + 8 * (total + 1) + 4 * total


def build_indexes(
    lengths: IntArray,
    documents: IntArray,
    num_samples: int,
    seq_length: int,
    seed: int,
    *,
    is_cyclic: bool = False,
) -> SampleIndexes:
    """Builds the three indexes of a dataset.

    Args:
        lengths: [n], tokens of every sequence of the file.
        documents: [m], the sequences that belong to this dataset.
        num_samples: Samples that will be requested. The dataset has all samples of its epochs.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of both shuffles.
        is_cyclic: Every epoch has the same samples, in an order of its own.

    Raises:
        ValueError: If the documents have no tokens.
    """
    tokens_per_epoch = int(np.sum(lengths[documents], dtype=np.int64))
    if tokens_per_epoch == 0:
        raise ValueError(f"the {len(documents)} documents have no tokens")
    if is_cyclic and tokens_per_epoch > seq_length:
        per_epoch = (tokens_per_epoch - 1) // seq_length
        first = build_indexes(lengths, documents, per_epoch, seq_length, seed)
        return _repeated(first, -(-num_samples // per_epoch), seed)
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    total = total_samples(num_samples, tokens_per_epoch, seq_length)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    # Shuffled together with earlier epochs, most documents of a barely used last epoch would be
    # spread over the entire run.
    limit = int(SEPARATE_LAST_EPOCH_FRACTION * per_epoch)
    separate = epochs > 1 and num_samples - before_last < limit
    rng = np.random.RandomState(seed)
    documents = documents.astype(index_dtype(len(lengths)))
    order = np.tile(documents, epochs)
    shuffle: IntArray = np.arange(total, dtype=shuffle_dtype(total))
    shuffle_parts(order, (epochs - separate) * len(documents), rng)
    shuffle_parts(shuffle, before_last if separate else total, rng)
    return SampleIndexes(order, build_sample_index(lengths, order, seq_length, total), shuffle)


def _repeated(first: SampleIndexes, epochs: int, seed: int) -> SampleIndexes:
    """The indexes of epochs with the samples of the first one, each in an order of its own."""
    size = len(first)
    rng = np.random.RandomState(seed)
    starts = np.concatenate([*[first.samples[:-1]] * max(1, epochs), first.samples[-1:]])
    shuffle = np.arange(len(starts) - 1, dtype=shuffle_dtype(len(starts) - 1))
    for start in range(0, len(shuffle), size):
        rng.shuffle(shuffle[start : start + size])
    return SampleIndexes(first.documents, starts, shuffle)


def index_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Megatron's integer type for indexes below `count`."""
    return np.int32 if count < np.iinfo(np.int32).max else np.int64


def shuffle_dtype(total: int) -> type[np.integer[Any]]:
    """Megatron's integer type for the shuffle index of `total` samples."""
    return np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64


def shuffle_parts(array: IntArray, first: int, rng: np.random.RandomState) -> None:
    """Shuffles the first `first` elements in place, and the rest separately."""
    rng.shuffle(array[:first])
    rng.shuffle(array[first:])


def build_sample_index(lengths: IntArray, order: IntArray, seq_length: int, total: int) -> IntArray:
    """The begin of each sample: [total + 1, 2], (position in `order`, token offset).

    Sample i begins at token i * seq_length of the concatenated documents. The documents are
    processed in chunks, which bounds the memory in addition to the result.
    """
    starts = np.empty((total + 1, 2), dtype=index_dtype(len(order)))
    starts[0] = 0
    first_token = 0
    first_sample = 1
    for at in range(0, len(order), CHUNK_DOCUMENTS):
        ends = np.cumsum(lengths[order[at : at + CHUNK_DOCUMENTS]], dtype=np.int64)
        ends += first_token
        # Number of samples that begin before the end of each document.
        begun = (ends + (seq_length - 1)) // seq_length
        np.clip(begun, first_sample, total + 1, out=begun)
        stop = int(begun[-1])
        begin_in_each = np.diff(begun, prepend=first_sample)
        rows = starts[first_sample:stop]
        rows[:, 0] = np.repeat(np.arange(at, at + len(ends)), begin_in_each)
        tokens = np.arange(first_sample * seq_length, stop * seq_length, seq_length)
        tokens -= np.repeat(np.concatenate([[first_token], ends[:-1]]), begin_in_each)
        rows[:, 1] = tokens
        first_token = int(ends[-1])
        first_sample = stop
    assert first_sample == total + 1, "the documents have fewer tokens than the samples"
    return starts


def parse_split(text: str) -> tuple[float, float, float]:
    """Parses the fractions of train, valid and test, such as `969,30,1` or `969/30/1`.

    Returns:
        Three fractions that sum to 1; missing ones are 0.

    Raises:
        UserError: If the text is not up to three non-negative numbers, or all are 0.
    """
    separator = "/" if "/" in text else ","
    try:
        parts = [float(part) for part in text.split(separator)]
    except ValueError:
        parts = []
    numbers = 0 < len(parts) <= 3 and all(part >= 0 and math.isfinite(part) for part in parts)
    if not numbers or not 0 < sum(parts) < math.inf:
        raise user_error("invalid-split", text=text)
    train, valid, test = (part / sum(parts) for part in [*parts, 0.0, 0.0][:3])
    return train, valid, test


def split_bounds(
    fractions: Sequence[float], size: int, rounding: str = "megatron-deepspeed"
) -> list[tuple[int, int]]:
    """Document range (first, end) of each fraction of `size` documents.

    Rounded as in the Megatron-DeepSpeed forks and older Megatron-LM, each fraction by itself, less
    the surplus of their sum; or as in Megatron Core, which rounds sums of fractions.
    """
    if rounding == "megatron-core":
        sums = itertools.accumulate(fractions)
        return list(itertools.pairwise([0, *(round(share * float(size)) for share in sums)]))
    ends = list(itertools.accumulate(round(fraction * float(size)) for fraction in fractions))
    surplus = ends[-1] - size
    return list(itertools.pairwise([0, *(max(0, end - surplus) for end in ends)]))


def samples_per_source(weights: Sequence[float], num_samples: int) -> list[int]:
    """Number of samples to request from each source of a blend.

    Args:
        weights: Weights of the sources, which sum to 1.
        num_samples: Samples of the blend.
    """
    return [math.ceil(num_samples * weight * BLEND_MARGIN) for weight in weights]
