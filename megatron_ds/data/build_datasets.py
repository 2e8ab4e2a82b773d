"""Builds the train, valid and test datasets of the data flags.

For each dataset: open its token files, select their documents, continue the blend of the resumed
run, find or build the cached indexes, and blend. Knows flags, files and the index cache, but no
ranks and no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_ds.config.problems import Problem, UserError, raise_if_any, user_error
from megatron_ds.data.blend.blend_history import (
    BlendHistory,
    SourceId,
    SourceProgress,
    extend_requests,
    record_consumed,
    resume_history,
    with_copy_numbers,
    with_requests,
)
from megatron_ds.data.blend.blend_schedule import FAIR, blend_order, order_version
from megatron_ds.data.blend.blend_spec import SPLITS, BlendSource, DatasetGroup
from megatron_ds.data.blend.blended_dataset import (
    BlendedDataset,
    BlendOrder,
    ConcatDataset,
    SingleSourceOrder,
)
from megatron_ds.data.blend.megatron_blend import core_samples_per_source, normalized
from megatron_ds.data.blend.usage_report import FileUsage, describe_change
from megatron_ds.data.exclusion import excluded_sequences
from megatron_ds.data.gpt_dataset import NumberedDataset, TokenDataset
from megatron_ds.data.index_cache import CACHE_FOLDER, ArrayCache
from megatron_ds.data.lazy_indexes import (
    LazyIndexes,
    LazyRemainingIndexes,
    LazySampleIndexes,
    OpenedFile,
)
from megatron_ds.data.remote.token_cache import is_url
from megatron_ds.data.sample_index import Ranges, samples_of_epochs, samples_per_source
from megatron_ds.data.token_files.indexed_dataset import IndexedDataset
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
        valid: By the name of the group, or "" for data without groups.
        test: As `valid`.
        usage: Samples and epochs of every file.
        progress: Blend history of the training data.
        changes: Lines on differences from the run that is resumed.
        has_masks: Whether `~id` in place of a token's id means that it has no loss as a label.
    """

    train: TokenDataset | None
    valid: Mapping[str, TokenDataset] = field(default_factory=dict)
    test: Mapping[str, TokenDataset] = field(default_factory=dict)
    usage: tuple[FileUsage, ...] = ()
    progress: BlendProgress | None = None
    changes: tuple[str, ...] = ()
    has_masks: bool = False


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
    most = [builder.samples_of_epochs(file, epochs) for file in opened]
    if opened[0].source.given_weight is None:
        return max(1, sum(most))
    shares = zip(most, builder.weights(opened), strict=True)
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
    opened: dict[str, tuple[IndexedDataset, str]] = field(default_factory=dict)
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
        config = self.files.config
        rule = config.blend_order if len(group.sources) > 1 else FAIR
        files = [self.file(group, source, samples) for source in group.sources]
        epochs = config.train_data_exact_num_epochs if group.split == "train" else None
        weights = self.weights(files, epochs)
        identities = with_copy_numbers(
            SourceId(Path(file.source.prefix).name, file.lengths_hash, file.document_range)
            for file in files
        )
        version = order_version(rule)
        excluded = self._excluded(group, dict(zip(identities, files, strict=True)))
        state = version, consumed, self.seq_length, excluded
        history = resume_history(before, identities, weights, *state)
        phase = history.current
        sources = [history.sources[index] for index in phase.sources]
        remaining = [
            self._remaining(group.split, file, source)
            for file, source in zip(files, sources, strict=True)
        ]
        length = max(1, samples - phase.first_sample)
        order: BlendOrder = SingleSourceOrder(length)
        if len(files) > 1:
            cache = self._cache(group.sources[0].prefix)
            order = blend_order(phase.weights, length, cache, rule)
        needed = self._needed(files, phase.weights, order, length)
        if epochs:
            ends = np.add(phase.source_starts, order.counts_at(length)).tolist()
            needed = self._without_margin(files, needed, ends, epochs)
        rests = [rest for rest, _ in remaining]
        kept = [file.without(source.excluded) for file, source in zip(files, sources, strict=True)]
        requests = self._requests(history, needed, kept, rests)
        history = with_requests(history, requests)
        datasets: list[TokenDataset] = []
        for file, request, (rest, first) in zip(kept, requests, remaining, strict=True):
            # The samples that are left from earlier lengths, then the consecutive indexes.
            indexes: list[LazyIndexes] = [] if rest is None else [rest]
            indexes += self._indexed(group.split, file, request, self.seq_length, first)
            parts = [
                entry.dataset(self.vocab_size, marks_ends=config.marks_ends) for entry in indexes
            ]
            self.pending.extend(zip(parts, indexes, strict=True))
            datasets.append(parts[0] if len(parts) == 1 else ConcatDataset(parts))
        self._open_indexes()
        self._note_usage(group, files, history, order)
        dataset = datasets[0]
        if len(files) > 1 or phase.first_sample or any(phase.source_starts):
            dataset = BlendedDataset(datasets, order, phase.first_sample, phase.source_starts)
        return dataset, BlendProgress(history, order)

    def _excluded(
        self, group: DatasetGroup, files: Mapping[SourceId, OpenedFile]
    ) -> Mapping[SourceId, Ranges] | None:
        """The sequences that the flags leave out of each source; None without the flag."""
        if group.split != "train" or not self.files.config.exclude_documents:
            return None
        of_files, _ = excluded_sequences([self.files])
        return {one: of_files.get(file.source.prefix, ()) for one, file in files.items()}

    def _requests(
        self,
        history: BlendHistory,
        needed: Sequence[int],
        files: Sequence[OpenedFile],
        rests: Sequence[LazyRemainingIndexes | None],
    ) -> list[tuple[int, ...]]:
        """The indexes of each file, after those of earlier lengths."""
        phase, is_cyclic = history.current, self.files.config.is_cyclic
        return [
            extend_requests(
                history.sources[index].requests,
                start + count - len(rest or ()),
                file.tokens,
                self.seq_length,
                is_cyclic=is_cyclic,
            )
            for index, start, count, file, rest in zip(
                phase.sources, phase.source_starts, needed, files, rests, strict=True
            )
        ]

    def _note_usage(
        self,
        group: DatasetGroup,
        files: Sequence[OpenedFile],
        history: BlendHistory,
        order: BlendOrder,
    ) -> None:
        """Adds what the run reads of each file, with earlier blends, to the report."""
        phase = history.current
        ends = np.add(phase.source_starts, order.counts_at(len(order))).tolist()
        for file, index, weight, end in zip(files, phase.sources, phase.weights, ends, strict=True):
            earlier = history.sources[index].earlier
            tokens = end * self.seq_length + sum(
                period.consumed * period.seq_length for period in earlier
            )
            samples = end + sum(period.consumed for period in earlier)
            read = weight, samples, tokens / file.tokens
            more = group.name, "", history.sources[index].num_excluded
            self.usage.append(FileUsage(group.split, file.source.prefix, *read, *more))
        self.usage.extend(
            FileUsage(group.split, prefix, 0.0, 0, 0.0, group.name)
            for prefix in group.zero_weight_files
        )

    def weights(self, files: Sequence[OpenedFile], epochs: int | None = None) -> list[float]:
        """The weights of a blend, by default in proportion to the files' sizes.

        With a number of epochs, by default to the samples in these.
        """
        file_weights = [file.source.given_weight for file in files]
        if epochs and None in file_weights:  # every file ends with the run
            return normalized([self.samples_of_epochs(file, epochs) for file in files])
        if self.files.config.blend_order == FAIR:
            total = sum(file.tokens for file in files)
            return [
                file.tokens / total if file.source.weight is None else file.source.weight
                for file in files
            ]
        if None in file_weights:
            return normalized([self._samples_of_epoch(file) for file in files])
        return normalized(normalized([weight for weight in file_weights if weight is not None]))

    def _needed(
        self, files: Sequence[OpenedFile], weights: Sequence[float], order: BlendOrder, length: int
    ) -> list[int]:
        """Samples to request of each file, which determine the order of its documents."""
        rule = self.files.config.blend_order
        file_weights = [file.source.given_weight for file in files]
        if len(files) == 1 and file_weights[0] is None:
            return [length]
        if rule != "megatron":
            needed = samples_per_source(weights, length)
        elif None not in file_weights:
            shares = normalized([weight for weight in file_weights if weight is not None])
            needed = core_samples_per_source(shares, length)
        else:  # one epoch of each file
            needed = [self._samples_of_epoch(file) for file in files]
        if rule == FAIR:
            return needed
        # The greedy order may take more than these of rare files, which Megatron then lacks.
        return [max(pair) for pair in zip(needed, order.counts_at(length).tolist(), strict=True)]

    def _without_margin(
        self, files: Sequence[OpenedFile], needed: list[int], ends: list[int], epochs: int
    ) -> list[int]:
        """The requests without a further epoch, whose documents would be mixed with these."""
        limits = (self.samples_of_epochs(file, epochs) for file in files)
        rows = zip(ends, needed, limits, strict=True)
        return [max(end, min(wanted, limit)) for end, wanted, limit in rows]

    def _samples_of_epoch(self, file: OpenedFile) -> int:
        return self.samples_of_epochs(file, 1)

    def samples_of_epochs(self, file: OpenedFile, epochs: int) -> int:
        """Samples of a file in so many epochs."""
        is_cyclic = self.files.config.is_cyclic
        return samples_of_epochs(epochs, file.tokens, self.seq_length, is_cyclic=is_cyclic)

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
        return OpenedFile(data, source, (first, end), tokens, digest)

    def _indexed(
        self, split: str, file: OpenedFile, requests: Sequence[int], seq_length: int, first: int
    ) -> Iterator[LazySampleIndexes]:
        """The indexes of each request, numbered from `first`."""
        cache = self._cache(file.source.prefix)
        for index, samples in enumerate(requests, first):
            # Each index has another seed: it must not repeat the order of the previous one.
            seed = (self.seed + index) % (1 << 32)
            yield LazySampleIndexes(
                *(file, split, samples, seq_length, seed, self.tokenizer_fingerprint, cache),
                is_cyclic=self.files.config.is_cyclic,
            )

    def _remaining(
        self, split: str, file: OpenedFile, source: SourceProgress
    ) -> tuple[LazyRemainingIndexes | None, int]:
        """The unread samples of the index that was in use when the sequence length changed, or the
        documents that are left out.

        Indexes that were not begun are left out: the same epochs follow at the new length.

        Returns:
            Their indexes, None if the index ended there; and the number of indexes so far.
        """
        rest: LazyRemainingIndexes | None = None
        first = 0
        states = [(period.seq_length, period.excluded) for period in source.earlier]
        states.append((self.seq_length, source.excluded))
        for period, (length, excluded) in zip(source.earlier, states[1:], strict=True):
            parts: list[LazyIndexes] = [] if rest is None else [rest]
            before = file.without(period.excluded)
            parts += self._indexed(split, before, period.requests, period.seq_length, first)
            first += len(period.requests) + 1
            rest, position = None, period.consumed
            seed = (self.seed + first - 1) % (1 << 32)
            for part in parts:
                if 0 < position < len(part):
                    rest = LazyRemainingIndexes(part, position, length, seed)
                    if excluded != period.excluded:
                        kept = part, position, period.seq_length, 0, excluded
                        rest = without = LazyRemainingIndexes(*kept)
                        if length != period.seq_length:
                            rest = LazyRemainingIndexes(without, 0, length, seed)
                position -= min(position, len(part))
            rest = rest or None  # text that is shorter than a sample
        return rest, first

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
