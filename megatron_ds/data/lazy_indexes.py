"""Indexes of the datasets of a file, which are loaded or built when they are needed.

Owns what determines an index, and its place in the cache. Knows no ranks and no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.data.blend.blend_spec import BlendSource
from megatron_ds.data.exclusion import numbers_of, samples_without
from megatron_ds.data.gpt_dataset import GPTDataset, RemainingDataset
from megatron_ds.data.index_cache import ArrayCache, Arrays
from megatron_ds.data.sample_index import (
    IntArray,
    Ranges,
    RemainingIndexes,
    SampleIndexes,
    build_indexes,
    index_bytes,
    shuffle_dtype,
    total_samples,
)
from megatron_ds.data.token_files.token_file import TokenFile

INDEX_FORMAT = 1
"""Version of the indexes: to be increased if the same inputs give other indexes."""


@dataclass(frozen=True)
class OpenedFile:
    """A token file and its selected documents.

    Attributes:
        data: The file.
        source: Its entry in the blend.
        document_range: First selected document and end.
        tokens: Tokens of these documents, at least one.
        lengths_hash: SHA-256 of the lengths of all sequences of the file.
        cache: Where its indexes are stored.
        excluded: Documents of the range that are left out, as ranges.
    """

    data: TokenFile
    source: BlendSource
    document_range: tuple[int, int]
    tokens: int
    lengths_hash: str
    cache: ArrayCache
    excluded: Ranges = ()

    def without(self, excluded: Ranges) -> OpenedFile:
        """The file whose documents in some ranges are left out.

        Raises:
            UserError: If no tokens remain.
        """
        if not excluded:
            return self
        file = dataclasses.replace(self, excluded=excluded)
        tokens = int(self.data.lengths[file.documents()].sum(dtype=np.int64))
        if not tokens:
            raise user_error("exclusion-leaves-nothing", prefix=self.source.prefix)
        return dataclasses.replace(file, tokens=tokens)

    def documents(self) -> IntArray:
        """The selected documents."""
        return np.setdiff1d(np.arange(*self.document_range), numbers_of(self.excluded))


@dataclass(frozen=True)
class LazySampleIndexes:
    """Indexes of at least `samples` samples of a file, rounded up to complete epochs.

    They are built or loaded on first use: building the indexes of thousands of files at start-up
    would take too long, and the number of samples is known without them.

    Attributes:
        file: The file.
        split: Name of the split, for messages and file names.
        samples: Requested samples.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of the shuffles.
        tokenizer: Fingerprint of the tokenizer.
        is_cyclic: Every epoch has the same samples, in an order of its own.
    """

    file: OpenedFile
    split: str
    samples: int
    seq_length: int
    seed: int
    tokenizer: str
    is_cyclic: bool = False

    def __post_init__(self) -> None:
        if self.__len__() > sys.maxsize:
            raise self.too_large("an array has at most 2^63 - 1 elements")

    def __len__(self) -> int:
        size = self.samples, self.file.tokens, self.seq_length
        return total_samples(*size, is_cyclic=self.is_cyclic)

    @property
    def cache(self) -> ArrayCache:
        return self.file.cache

    def dataset(self, vocab_size: int) -> GPTDataset:
        """The samples, whose token ids are checked to be below `vocab_size`."""
        return GPTDataset(self.file.data, self, self.seq_length, vocab_size)

    def load(self) -> SampleIndexes:
        """Loads the indexes from the cache, or builds and stores them.

        Raises:
            UserError: If they cannot be built or stored.
        """
        return SampleIndexes(**self.cache.get_or_build(*self.entry(), self._build))

    def missing_bytes(self) -> int:
        """Bytes that the cache needs for them; 0 if they are stored."""
        if self.cache.contains(*self.entry()):
            return 0
        first, end = self.file.document_range
        return index_bytes(self.samples, end - first, self.file.tokens, self.seq_length)

    def entry(self) -> tuple[str, dict[str, Any]]:
        """Readable name and key in the cache: everything that determines the indexes."""
        order: dict[str, Any] = {"order": "cyclic"} if self.is_cyclic else {}
        order |= {"excluded": self.file.excluded} if self.file.excluded else {}
        return f"{Path(self.file.data.prefix).name}-{self.split}", {
            **order,
            "format": INDEX_FORMAT,
            "sequences": len(self.file.data),
            "lengths_sha256": self.file.lengths_hash,
            "split": self.file.source.documents.text,
            "documents": list(self.file.document_range),
            "samples": self.samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "tokenizer": self.tokenizer,
        }

    def _build(self) -> Arrays:
        documents = self.file.documents()
        lengths = self.file.data.lengths
        try:
            size = self.samples, self.seq_length, self.seed
            return vars(build_indexes(lengths, documents, *size, is_cyclic=self.is_cyclic))
        except (MemoryError, OverflowError, ValueError) as error:
            raise self.too_large(str(error)) from error

    def too_large(self, reason: str) -> UserError:
        """The error for an index that cannot be built, for the reason."""
        return user_error("index-too-large", index=self, reason=reason)


@dataclass(frozen=True)
class LazyRemainingIndexes:
    """Indexes of the remaining samples of a dataset, at another sequence length.

    Attributes:
        before: Indexes of the dataset.
        read: Positions that were read.
        seq_length: Tokens per new sample, without the last label.
        seed: Seed of the shuffle.
        excluded: Documents to leave out, as ranges, instead of a change of the length; None for
            a change.
    """

    before: LazyIndexes
    read: int
    seq_length: int
    seed: int
    excluded: Ranges | None = None

    @functools.cached_property
    def _size(self) -> int:
        if self.excluded is not None:
            return len(self.load().shuffle)
        return (len(self.before) - self.read) * self.before.seq_length // self.seq_length

    def __len__(self) -> int:
        return self._size

    @property
    def cache(self) -> ArrayCache:
        return self.before.cache

    def dataset(self, vocab_size: int) -> RemainingDataset:
        """The samples, whose token ids are checked to be below `vocab_size`."""
        return RemainingDataset(self.before.dataset(vocab_size), self, self.seq_length)

    def load(self) -> RemainingIndexes:
        """Loads the indexes from the cache, or builds and stores them.

        Raises:
            UserError: If they cannot be built or stored.
        """
        return RemainingIndexes(**self.cache.get_or_build(*self.entry(), self._build))

    def missing_bytes(self) -> int:
        """Bytes that the cache needs for them; 0 if they are stored."""
        needed = 8 * (len(self.before) - self.read + len(self))
        return 0 if self.cache.contains(*self.entry()) else needed

    def entry(self) -> tuple[str, dict[str, Any]]:
        """Readable name and key in the cache."""
        name, key = self.before.entry()
        excluded = {} if self.excluded is None else {"excluded": self.excluded}
        return f"{name}-unread", {
            **excluded,
            "format": INDEX_FORMAT,
            "of": key,
            "read": self.read,
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

    def _build(self) -> Arrays:
        unread = self.before.load().shuffle[self.read :]
        if self.excluded is not None:
            return samples_without(self.before.dataset(0), unread, self.excluded)
        shuffle = np.arange(len(self), dtype=shuffle_dtype(len(self)))
        np.random.RandomState(self.seed).shuffle(shuffle)
        return {"unread": np.sort(unread), "shuffle": shuffle}


LazyIndexes = LazySampleIndexes | LazyRemainingIndexes
