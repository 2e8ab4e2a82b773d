"""Builds the train, valid and test datasets of the data flags.

For each dataset: open its token files, select their documents, plan what the run reads of each
(`source_plan.py`), find or build the cached indexes, and blend. Knows flags, files and the index
cache, but no ranks and no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ds.config.problems import Problem, UserError, raise_if_any, user_error
from megatron_ds.data.blend.blend_history import BlendHistory, record_consumed
from megatron_ds.data.blend.blend_spec import SPLITS, BlendSource, DatasetGroup
from megatron_ds.data.blend.blended_dataset import BlendedDataset, BlendOrder, ConcatDataset
from megatron_ds.data.blend.usage_report import FileUsage, describe_change
from megatron_ds.data.exclusion import excluded_sequences
from megatron_ds.data.gpt_dataset import NumberedDataset
from megatron_ds.data.index_cache import CACHE_FOLDER, ArrayCache
from megatron_ds.data.lazy_indexes import LazyIndexes, OpenedFile
from megatron_ds.data.remote.token_cache import is_url
from megatron_ds.data.sample_index import Ranges
from megatron_ds.data.source_plan import BlendPlanner, SourcePlan
from megatron_ds.data.token_dataset import TokenDataset
from megatron_ds.data.token_files.token_file import TokenFile
from megatron_ds.data.validation import DataFiles, empty_selection, out_of_vocabulary

OPENED_AT_START = 1 << 26
"""Samples of a blend up to which all indexes are built at start, in seconds and about 1 GB."""


@dataclass(frozen=True)
class BlendProgress:
    """Gives the blend history of a run as a function of the consumed samples."""

    history: BlendHistory
    order: BlendOrder

    def history_after(self, consumed: int) -> BlendHistory:
        """The history after `consumed` samples, for a checkpoint."""
        position = min(max(0, consumed - self.history.current.first_sample), len(self.order))
        return record_consumed(self.history, self.order.counts_at(position).tolist())


@dataclass(frozen=True)
class Datasets:
    """The datasets of a run.

    A split is None or empty if no samples are needed, or it has no data.

    Attributes:
        train: The training data.
        valid: Validation datasets by name of the group, or "" for data without groups.
        test: Test datasets, like `valid`.
        usage: Samples and epochs of every file.
        progress: Blend history of the training data.
        changes: Lines on differences from the run that is resumed.
    """

    train: TokenDataset | None
    valid: Mapping[str, TokenDataset] = field(default_factory=dict)
    test: Mapping[str, TokenDataset] = field(default_factory=dict)
    usage: tuple[FileUsage, ...] = ()
    progress: BlendProgress | None = None
    changes: tuple[str, ...] = ()


def build_datasets(
    files: DataFiles,
    *,
    seq_length: int,
    seed: int,
    num_samples: tuple[int, int, int],
    tokenizer_fingerprint: str,
    vocab_size: int,
    fallback_cache: str | None = None,
    history: BlendHistory | None = None,
    consumed: int = 0,
    stage: str = "",
) -> Datasets:
    """Builds the datasets of train, valid and test, with their indexes cached on disk.

    All processes may call this at the same time. Valid or test without data is empty.

    Args:
        files: The files of the data flags.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of the shuffles.
        num_samples: Samples that the run needs of train, valid and test (of each group).
        tokenizer_fingerprint: Identifies the tokenizer in the index cache.
        vocab_size: Exclusive upper bound of the token ids.
        fallback_cache: Folder for the indexes if the folder of the data is not writable.
        history: Blend history of the run that is resumed.
        consumed: Its consumed samples. If the blend has changed, the new one begins there.
        stage: Name of the run's stage, for the usage of the files.

    Raises:
        UserError: If a flag is invalid, a file is damaged, or a split has no tokens.
    """
    raise_if_any(files.problems)
    builder = _DatasetBuilder(
        files, seq_length, seed, tokenizer_fingerprint, vocab_size, fallback_cache
    )
    train: TokenDataset | None = None
    progress: BlendProgress | None = None
    others: dict[str, dict[str, TokenDataset]] = {"valid": {}, "test": {}}
    needed = dict(zip(SPLITS, num_samples, strict=True))
    for entry in files.groups:
        if not needed[entry.split]:
            continue
        group = files.with_text(entry)
        if group.split == "train":
            train, progress = builder.blend(group, needed["train"], history, consumed)
        elif group.sources:
            others[group.split][group.name] = builder.blend(group, needed[group.split])[0]
    if needed["train"] and train is None:
        raise user_error("no-training-data")
    files.cache.release()
    changes = describe_change(history, progress.history) if history and progress else []
    usage = tuple(dataclasses.replace(file, stage=stage) for file in builder.usage)
    return Datasets(train, others["valid"], others["test"], usage, progress, tuple(changes))


def exact_train_samples(files: DataFiles, seq_length: int, epochs: int) -> int:
    """The most training samples that need no more than `epochs` epochs of any file.

    Raises:
        UserError: If a flag is invalid, a file is damaged, or there is no training data.
    """
    raise_if_any(files.problems)
    group = next((group for group in files.groups if group.split == "train"), None)
    if group is None or not group.sources:
        raise user_error("no-training-data")
    builder = _DatasetBuilder(files, seq_length, 0, "", 0, None)
    files.checked_vocab_size = 0  # without a tokenizer, token ids are checked later
    opened = [builder.file(group, source, 1) for source in group.sources]
    planner = builder.planner(group.split)
    most = [planner.samples_of_epochs(file, epochs) for file in opened]
    if opened[0].source.given_weight is None:
        return max(1, sum(most))
    shares = zip(most, planner.weights(opened), strict=True)
    # Weights are rounded.
    return max(1, int(min(count / weight for count, weight in shares) * (1 - 1e-12)))


@dataclass(frozen=True)
class _DatasetBuilder:
    files: DataFiles
    seq_length: int
    seed: int
    tokenizer_fingerprint: str
    vocab_size: int
    fallback_cache: str | None
    usage: list[FileUsage] = field(default_factory=list)
    """Usage of the datasets built so far."""
    opened: dict[str, tuple[TokenFile, str]] = field(default_factory=dict)
    """Files by prefix, with the SHA-256 of their sequence lengths."""
    pending: list[tuple[NumberedDataset, LazyIndexes]] = field(default_factory=list)
    """Datasets whose indexes are not loaded yet."""
    caches: dict[str, ArrayCache] = field(default_factory=dict)
    """Caches by their first folder."""

    def blend(
        self,
        group: DatasetGroup,
        samples: int,
        before: BlendHistory | None = None,
        consumed: int = 0,
    ) -> tuple[TokenDataset, BlendProgress]:
        """Builds a blend of `samples` samples after `consumed` that a previous run read."""
        files = [self.file(group, source, samples) for source in group.sources]
        excluded = self._excluded(group)
        planner = self.planner(group.split)
        plan = planner.plan(files, samples, before, consumed, excluded)
        datasets = [self._dataset(source) for source in plan.sources]
        self._open_indexes()
        self.usage.extend(
            source.usage(group.split, group.name, self.seq_length) for source in plan.sources
        )
        self.usage.extend(
            FileUsage(group.split, prefix, 0.0, 0, 0.0, group.name)
            for prefix in group.zero_weight_files
        )
        dataset = datasets[0]
        phase = plan.history.current
        if len(files) > 1 or phase.first_sample or any(phase.source_starts):
            dataset = BlendedDataset(datasets, plan.order, phase.first_sample, phase.source_starts)
        return dataset, BlendProgress(plan.history, plan.order)

    def planner(self, split: str) -> BlendPlanner:
        """Plans the blends of a split."""
        return BlendPlanner(
            split, self.files.config, self.seq_length, self.seed, self.tokenizer_fingerprint
        )

    def _excluded(self, group: DatasetGroup) -> Mapping[str, Ranges] | None:
        """The sequences that the flags leave out of each file; None without the flag."""
        if group.split != "train" or not self.files.config.exclude_documents:
            return None
        excluded, _ = excluded_sequences([self.files])
        return excluded

    def _dataset(self, source: SourcePlan) -> TokenDataset:
        """The samples of a source, whose indexes are pending."""
        parts = [indexes.dataset(self.vocab_size) for indexes in source.indexes]
        self.pending.extend(zip(parts, source.indexes, strict=True))
        return parts[0] if len(parts) == 1 else ConcatDataset(parts)

    def file(self, group: DatasetGroup, source: BlendSource, samples: int) -> OpenedFile:
        """Opens and checks a file of a group that needs `samples` samples."""
        if source.prefix not in self.opened:
            data = self.files.open(source.prefix)
            if self.files.checked_vocab_size != self.vocab_size:
                _raise_first(out_of_vocabulary(data, self.vocab_size, self.files.probed_blocks))
            if self.files.config.mmap_warmup:
                data.warm_up()
            digest = hashlib.sha256(data.lengths.view(np.uint8).data).hexdigest()
            self.opened[source.prefix] = data, digest
        data, digest = self.opened[source.prefix]
        _raise_first(empty_selection(group.split, data, samples, source.documents))
        first, end = source.documents.range_of(len(data))
        tokens = int(data.lengths[first:end].sum(dtype=np.int64))
        cache = self._cache(source.prefix)
        return OpenedFile(data, source, (first, end), tokens, digest, cache)

    def _open_indexes(self) -> None:
        """Loads the indexes of the pending datasets.

        For very large blends it only checks the disk space: then the index of a file is loaded or
        built when its first sample is read.
        """
        size = sum(len(indexes) for _, indexes in self.pending)
        if self.files.opens_all or size <= OPENED_AT_START or len(self.pending) == 1:
            for dataset, _ in self.pending:
                dataset.open()
        else:
            needed: Counter[ArrayCache] = Counter()
            for _, indexes in self.pending:
                needed[indexes.cache] += indexes.missing_bytes()
            for cache, size in needed.items():
                if size:
                    cache.require_space(size)
        self.pending.clear()

    def _cache(self, prefix: str) -> ArrayCache:
        parent = self.files.cache.folder if is_url(prefix) else Path(prefix).parent
        folder = str(self.files.config.data_cache_path or parent / CACHE_FOLDER)
        if folder not in self.caches:
            folders = [Path(folder)]
            if self.fallback_cache and not self.files.config.data_cache_path:
                folders.append(Path(self.fallback_cache))
            self.caches[folder] = ArrayCache(folders)
        return self.caches[folder]


def _raise_first(problems: Iterator[Problem]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise UserError(problem)
