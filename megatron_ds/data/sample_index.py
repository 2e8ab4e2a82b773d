"""Which tokens make sample i: Megatron's document, sample and shuffle index, splits and blends.

Pure arithmetic, numpy in and numpy out. The three indexes equal, number for number, those of
Megatron-LM and microsoft/Megatron-DeepSpeed. This file knows no files, no tokenizers and no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]

SEPARATE_LAST_EPOCH_BELOW = 0.80
"""A last epoch that gives less than this share of an epoch's samples is shuffled apart."""
BLEND_MARGIN = 1.005
"""Every source of a blend is asked for this much more than its share, as in Megatron."""
CHUNK_DOCUMENTS = 1 << 16
"""Documents per vectorised step: enough to amortise numpy, few enough to stay in the cache."""


@dataclass(frozen=True)
class SampleIndexes:
    """The arrays that turn a sample number into tokens.

    documents [D]: sequence numbers, every epoch's documents one after the other, shuffled.
    samples [S + 1, 2]: position in `documents` and token offset at which sample i begins; it ends
    one token after the beginning of the next, so that neighbours share a token.
    shuffle [S]: sample number for each position of the data order.
    """

    documents: IntArray
    samples: IntArray
    shuffle: IntArray

    def __len__(self) -> int:
        return len(self.shuffle)

    def load(self) -> SampleIndexes:
        return self


def epochs_needed(num_samples: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Fewest passes over the documents that give `num_samples` samples of seq_length + 1 tokens."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def total_samples(num_samples: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Samples in the whole epochs that give at least `num_samples`."""
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    return (epochs * tokens_per_epoch - 1) // seq_length


def index_bytes(num_samples: int, documents: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Size of the three indexes, as long as narrow types hold them."""
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    total = total_samples(num_samples, tokens_per_epoch, seq_length)
    return 4 * epochs * documents + 8 * (total + 1) + 4 * total


def build_indexes(
    lengths: IntArray,
    documents: IntArray,
    num_samples: int,
    seq_length: int,
    seed: int,
) -> SampleIndexes:
    """The three indexes of one dataset.

    lengths [n]: tokens of every sequence of the file. documents [m]: the sequences that belong to
    this dataset. num_samples: samples that will be asked for; the dataset holds all that its whole
    epochs give. Raises ValueError if the documents hold no token.
    """
    tokens_per_epoch = int(np.sum(lengths[documents], dtype=np.int64))
    if tokens_per_epoch == 0:
        raise ValueError(f"the {len(documents)} documents hold no tokens")
    epochs = epochs_needed(num_samples, tokens_per_epoch, seq_length)
    total = total_samples(num_samples, tokens_per_epoch, seq_length)
    before_last = ((epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    # Otherwise the few samples drawn from a last, barely begun epoch would come from a random part
    # of it while the epoch's documents were spread over the whole run.
    separate = epochs > 1 and num_samples - before_last < int(SEPARATE_LAST_EPOCH_BELOW * per_epoch)
    rng = np.random.RandomState(seed)
    documents = documents.astype(index_dtype(len(lengths)))
    order = document_order(documents, epochs, rng, separate)
    samples = build_sample_index(lengths, order, seq_length, total)
    shuffle = build_shuffle_index(before_last if separate else total, total, rng)
    return SampleIndexes(order, samples, shuffle)


def index_dtype(count: int) -> type[np.signedinteger[Any]]:
    """Megatron's type for the numbers of `count` things."""
    return np.int32 if count < np.iinfo(np.int32).max else np.int64


def shuffle_dtype(total: int) -> type[np.integer[Any]]:
    """Megatron's type for the numbers of `total` samples."""
    return np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64


def document_order(
    documents: IntArray, epochs: int, rng: np.random.RandomState, separate_last: bool
) -> IntArray:
    """The documents of all epochs, shuffled together; the last epoch apart if `separate_last`."""
    if separate_last:
        first = document_order(documents, epochs - 1, rng, separate_last=False)
        last = document_order(documents, 1, rng, separate_last=False)
        return np.concatenate([first, last])
    order = np.tile(documents, epochs)
    rng.shuffle(order)
    return order


def build_sample_index(lengths: IntArray, order: IntArray, seq_length: int, total: int) -> IntArray:
    """[total + 1, 2]: where in `order` each sample begins, as (position in order, token offset).

    Sample i begins at token i * seq_length of the concatenated documents. The search goes through
    the documents in chunks, so that memory stays flat beside the result.
    """
    starts = np.empty((total + 1, 2), dtype=index_dtype(len(order)))
    starts[0] = 0
    first_token, first_sample = 0, 1
    for at in range(0, len(order), CHUNK_DOCUMENTS):
        ends = np.cumsum(lengths[order[at : at + CHUNK_DOCUMENTS]], dtype=np.int64)
        ends += first_token
        # Samples that begin before the end of each document.
        begun = (ends + (seq_length - 1)) // seq_length
        np.clip(begun, first_sample, total + 1, out=begun)
        stop = int(begun[-1])
        begin_in_each = np.diff(begun, prepend=first_sample)
        rows = starts[first_sample:stop]
        rows[:, 0] = np.repeat(np.arange(at, at + len(ends)), begin_in_each)
        tokens = np.arange(first_sample * seq_length, stop * seq_length, seq_length)
        tokens -= np.repeat(np.concatenate([[first_token], ends[:-1]]), begin_in_each)
        rows[:, 1] = tokens
        first_token, first_sample = int(ends[-1]), stop
    assert first_sample == total + 1, "the documents end before the samples do"
    return starts


def build_shuffle_index(first: int, total: int, rng: np.random.RandomState) -> IntArray:
    """0 ... total - 1, the first `first` numbers shuffled among themselves, the others too."""
    order: IntArray = np.arange(total, dtype=shuffle_dtype(total))
    rng.shuffle(order[:first])
    if first < total:
        rng.shuffle(order[first:])
    return order


def parse_split(text: str) -> tuple[float, float, float]:
    """Shares of training, validation and test of `969,30,1` (or `969/30/1`); they sum to 1.

    Missing parts are 0. Raises ValueError for what is not up to three non-negative numbers.
    """
    separator = "/" if "/" in text else ","
    try:
        parts = [float(part) for part in text.split(separator)]
    except ValueError:
        parts = []
    valid = 0 < len(parts) <= 3 and all(part >= 0 and math.isfinite(part) for part in parts)
    if not valid or not 0 < sum(parts) < math.inf:
        raise ValueError(
            f"--split {text}: must be up to three non-negative shares for training, validation and "
            "test, such as 969,30,1"
        )
    train, valid_share, test = (part / sum(parts) for part in [*parts, 0.0, 0.0][:3])
    return train, valid_share, test


def split_bounds(shares: Sequence[float], size: int) -> list[tuple[int, int]]:
    """First and one-past-last of `size` documents for each share, as Megatron rounds them."""
    bounds = [0]
    for share in shares:
        bounds.append(bounds[-1] + round(share * float(size)))
    surplus = bounds[-1] - size
    bounds = [0, *(max(0, bound - surplus) for bound in bounds[1:])]
    return list(itertools.pairwise(bounds))


def samples_per_source(weights: Sequence[float], num_samples: int) -> list[int]:
    """Samples that each source is asked for. weights: normalised."""
    return [math.ceil(num_samples * weight * BLEND_MARGIN) for weight in weights]
