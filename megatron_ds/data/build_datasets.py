"""From the data flags to the three datasets: which files, which part of each, which cached indexes.

Knows flags, files and the index cache; no ranks, and no torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ds.config import DataConfig
from megatron_ds.data.blend_history import (
    BlendHistory,
    SourceId,
    extend_requests,
    new_history,
    record_consumed,
    resume_history,
    with_copy_numbers,
    with_requests,
)
from megatron_ds.data.blend_schedule import BLEND_FORMAT, blend_order
from megatron_ds.data.blend_spec import NAMES, BlendSource, DatasetGroup, read_groups
from megatron_ds.data.blended_dataset import BlendedDataset, BlendOrder
from megatron_ds.data.chained_datasets import ConcatDataset, ResumedBlendDataset, SingleSourceOrder
from megatron_ds.data.gpt_dataset import GPTDataset, TokenDataset
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.data.lazy_index import LazySampleIndexes
from megatron_ds.data.sample_index import samples_per_source
from megatron_ds.data.usage_report import FileUsage, describe_change
from megatron_ds.data.validation import blocks_to_sample, empty_selection, out_of_vocabulary

FORMAT = 1
"""Raised when the same inputs begin to give other indexes."""
OPENED_AT_START = 1 << 26
"""Samples of a mixture: the indexes of so many are made in some seconds and a GB of room."""


@dataclass(frozen=True)
class BlendProgress:
    """How far a run's training data is read, as a function of the samples consumed."""

    history: BlendHistory
    order: BlendOrder

    def history_after(self, consumed: int) -> BlendHistory:
        """The history after `consumed` samples, for a checkpoint."""
        done = min(max(0, consumed - self.history.current.first), len(self.order))
        return record_consumed(self.history, self.order.counts_at(done).tolist())


@dataclass(frozen=True)
class Datasets:
    """What a run reads. None or nothing: no samples were asked for, or the user gave this part no
    data.

    valid, test: by the name of their group; "" is that of data without one. shares: of every file.
    changes: what is not as it was in the run that this one continues, in words.
    """

    train: TokenDataset | None
    valid: Mapping[str, TokenDataset] = field(default_factory=dict)
    test: Mapping[str, TokenDataset] = field(default_factory=dict)
    shares: tuple[FileUsage, ...] = ()
    progress: BlendProgress | None = None
    changes: tuple[str, ...] = ()


def build_datasets(
    config: DataConfig,
    *,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    tokenizer_fingerprint: str,
    vocab_size: int,
    fallback_cache: str | None = None,
    history: BlendHistory | None = None,
    consumed: int = 0,
) -> Datasets:
    """The datasets of training, validation and test, their indexes cached on disk.

    num_samples: samples that the run will take of each (of each group, in validation and test); a
    dataset holds at least so many. Every process may call this at the same time. fallback_cache:
    folder for the indexes if --data-cache-path is not given and the folder of the data cannot be
    written. history: of the run that this one continues, after `consumed` samples; the training
    data then begins there if its mixture has changed.

    Validation or test that the user gave no data (a share of 0 in --split, or --train-data-path
    without --valid-data-path) is empty. Raises ValueError if data was meant for a part but none
    falls to it, if training has none, and for files that are not what they should be.
    """
    groups, problems = read_groups(config)
    if problems:
        raise ValueError("; ".join(problems))
    builder = _DatasetBuilder(
        config=config,
        seq_length=seq_length,
        seed=seed,
        tokenizer_fingerprint=tokenizer_fingerprint,
        vocab_size=vocab_size,
        fallback_cache=fallback_cache,
        blocks=blocks_to_sample(sum(len(group.sources) for group in groups)),
    )
    train: TokenDataset | None = None
    progress: BlendProgress | None = None
    others: dict[str, dict[str, TokenDataset]] = {"valid": {}, "test": {}}
    wanted = dict(zip(NAMES, num_samples, strict=True))
    for group in groups:
        if not wanted[group.part]:
            continue
        if group.part == "train":
            train, progress = builder.mixture(group, wanted["train"], history, consumed)
        else:
            others[group.part][group.name] = builder.mixture(group, wanted[group.part])[0]
    if wanted["train"] and train is None:
        raise ValueError("--train-data-path (or --data-path) is required")
    changes = describe_change(history, progress.history) if history and progress else []
    return Datasets(
        train, others["valid"], others["test"], tuple(builder.shares), progress, tuple(changes)
    )


@dataclass(frozen=True)
class _OpenedFile:
    """A token file, and the documents that a part reads of it.

    bounds: first and one-past-last document. tokens: of these documents. lengths_hash: SHA-256 of
    the lengths of all of the file's documents.
    """

    data: IndexedDataset
    source: BlendSource
    bounds: tuple[int, int]
    tokens: int
    lengths_hash: str

    @property
    def identity(self) -> SourceId:
        return SourceId(Path(self.source.prefix).name, self.lengths_hash, self.bounds)


@dataclass(frozen=True)
class _DatasetBuilder:
    config: DataConfig
    seq_length: int
    seed: int
    tokenizer_fingerprint: str
    vocab_size: int
    fallback_cache: str | None
    blocks: int
    """Of each file that are looked at for tokens of another tokenizer."""
    shares: list[FileUsage] = field(default_factory=list)
    """Of what was built so far."""
    opened: dict[str, tuple[IndexedDataset, str]] = field(default_factory=dict)
    """Files by their prefix, with the SHA-256 of their documents' lengths."""
    described: list[tuple[GPTDataset, LazySampleIndexes]] = field(default_factory=list)
    """Datasets whose indexes were not asked for yet."""
    caches: dict[str, ArrayCache] = field(default_factory=dict)
    """By their first folder."""

    def mixture(
        self,
        group: DatasetGroup,
        samples: int,
        before: BlendHistory | None = None,
        consumed: int = 0,
    ) -> tuple[TokenDataset, BlendProgress]:
        """`samples` samples of a group, of which `consumed` came before, in the run of `before`."""
        files = [self._file(group, source, samples) for source in group.sources]
        identities = with_copy_numbers([file.identity for file in files])
        weights = _weights(files)
        if before is None:
            history = new_history(identities, weights, BLEND_FORMAT)
        else:
            history = resume_history(before, identities, weights, BLEND_FORMAT, consumed)
        phase = history.current
        length = max(1, samples - phase.first)
        if len(files) == 1 and group.sources[0].weight is None:
            parts = [length]
        else:
            parts = samples_per_source(phase.weights, length)
        requests = [
            extend_requests(
                history.sources[number].requests, start + part, file.tokens, self.seq_length
            )
            for number, start, part, file in zip(
                phase.sources, phase.starts, parts, files, strict=True
            )
        ]
        history = with_requests(history, requests)
        datasets = [
            self._dataset_of_file(group.part, file, each)
            for file, each in zip(files, requests, strict=True)
        ]
        self._open_indexes()
        order: BlendOrder = SingleSourceOrder(length)
        if len(files) > 1:
            order = blend_order(phase.weights, length, self._cache(group.sources[0].prefix))
        taken = order.counts_at(len(order)).tolist()
        for file, weight, start, count in zip(
            files, phase.weights, phase.starts, taken, strict=True
        ):
            self._record_usage(group, file, weight, start + count)
        self.shares.extend(
            FileUsage(group.part, prefix, 0.0, 0, 0.0, group.name)
            for prefix in group.zero_weight_files
        )
        progress = BlendProgress(history, order)
        if phase.first or any(phase.starts):
            return ResumedBlendDataset(datasets, order, phase.first, phase.starts), progress
        return datasets[0] if len(files) == 1 else BlendedDataset(datasets, order), progress

    def _file(self, group: DatasetGroup, source: BlendSource, samples: int) -> _OpenedFile:
        """A file of a group that is to give `samples` samples, which must hold some tokens."""
        if source.prefix not in self.opened:
            data = IndexedDataset(source.prefix)
            _raise_first(out_of_vocabulary(data, self.vocab_size, self.blocks))
            if self.config.mmap_warmup:
                data.warm_up()
            digest = hashlib.sha256(data.lengths.view(np.uint8).data).hexdigest()
            self.opened[source.prefix] = data, digest
        data, digest = self.opened[source.prefix]
        _raise_first(empty_selection(group.part, data, samples, source.cut))
        first, end = source.cut.bounds(len(data))
        tokens = int(data.lengths[first:end].sum(dtype=np.int64))
        return _OpenedFile(data, source, (first, end), tokens, digest)

    def _record_usage(
        self, group: DatasetGroup, file: _OpenedFile, weight: float, samples: int
    ) -> None:
        epochs = samples * self.seq_length / file.tokens
        prefix = file.source.prefix
        self.shares.append(FileUsage(group.part, prefix, weight, samples, epochs, group.name))

    def _dataset_of_file(
        self, part: str, file: _OpenedFile, requests: Sequence[int]
    ) -> TokenDataset:
        """The samples of a file, from one index after the other."""
        datasets = [self._indexed(part, file, *each) for each in enumerate(requests)]
        return datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)

    def _indexed(self, part: str, file: _OpenedFile, number: int, samples: int) -> GPTDataset:
        """The samples of a file's index of this number, which is made for so many samples."""
        # Another seed for each, else an index would repeat the order of the one before it.
        seed = (self.seed + number) % (1 << 32)
        decides = {
            "format": FORMAT,
            "sequences": len(file.data),
            "lengths sha256": file.lengths_hash,
            "split": file.source.cut.text,
            "documents": list(file.bounds),
            "samples": samples,
            "seq_length": self.seq_length,
            "seed": seed,
            "tokenizer": self.tokenizer_fingerprint,
        }
        indexes = LazySampleIndexes(
            file=file.data,
            split=part,
            document_range=file.bounds,
            tokens=file.tokens,
            samples=samples,
            seq_length=self.seq_length,
            seed=seed,
            cache_key=decides,
            cache=self._cache(file.source.prefix),
        )
        dataset = GPTDataset(file.data, indexes, self.seq_length, self.vocab_size)
        self.described.append((dataset, indexes))
        return dataset

    def _open_indexes(self) -> None:
        """Gets the indexes of what was described; of much, only sees that there is room for them.

        A file's index is then made, or loaded, when its first sample is read.
        """
        size = sum(len(indexes) for _, indexes in self.described)
        if size <= OPENED_AT_START or len(self.described) == 1:
            for dataset, _ in self.described:
                dataset.open()
        else:
            needed: Counter[ArrayCache] = Counter()
            for _, indexes in self.described:
                needed[indexes.cache] += indexes.missing_bytes()
            for cache, room in needed.items():
                if room:
                    cache.require_space(room)
        self.described.clear()

    def _cache(self, prefix: str) -> ArrayCache:
        folder = str(self.config.data_cache_path or Path(prefix).parent / "index-cache")
        if folder not in self.caches:
            folders = [Path(folder)]
            if self.fallback_cache and not self.config.data_cache_path:
                folders.append(Path(self.fallback_cache))
            self.caches[folder] = ArrayCache(folders)
        return self.caches[folder]


def _weights(files: Sequence[_OpenedFile]) -> list[float]:
    """Normalised; by size where the user gave none."""
    total = sum(file.tokens for file in files)
    return [
        file.tokens / total if file.source.weight is None else file.source.weight for file in files
    ]


def _raise_first(problems: Iterator[str]) -> None:
    """Raises ValueError for the first problem, if there is one."""
    problem = next(problems, None)
    if problem is not None:
        raise ValueError(problem)
