"""Plans what a run reads of each source of a blend: its weight, its samples and their indexes.

A plan is made of the opened files, the flags and the history of the run that is resumed. It loads
and builds no index, and knows no ranks and no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.config import DataConfig
from megatron_ds.data.blend.blend_history import (
    BlendHistory,
    BlendMember,
    SourceId,
    SourceProgress,
    extend_requests,
    resume_history,
    with_copy_numbers,
    with_requests,
)
from megatron_ds.data.blend.blend_rules import RULES, BlendRule, SourceSize
from megatron_ds.data.blend.blend_schedule import FAIR
from megatron_ds.data.blend.blended_dataset import BlendOrder, SingleSourceOrder
from megatron_ds.data.blend.usage_report import FileUsage
from megatron_ds.data.lazy_indexes import (
    LazyIndexes,
    LazyRemainingIndexes,
    LazySampleIndexes,
    OpenedFile,
)
from megatron_ds.data.sample_index import Ranges, samples_of_epochs


@dataclass(frozen=True)
class SourcePlan:
    """Plan of the samples that a run reads from one source of a blend.

    Attributes:
        file: The file, with all documents of the split.
        progress: Samples that the run has read from it before, and the excluded documents.
        weight: Its weight; the weights of a blend sum to 1.
        end: Samples of the current sequence length that it has given at the end of the blend.
        requests: Samples that each of its indexes is built for, see `SourceProgress`.
        indexes: All its samples of the current sequence length: the ones that are left from earlier
            lengths or before documents were left out, then one index per request.
    """

    file: OpenedFile
    progress: SourceProgress
    weight: float
    end: int
    requests: tuple[int, ...]
    indexes: tuple[LazyIndexes, ...]

    def usage(self, split: str, group: str, seq_length: int) -> FileUsage:
        """Summary of what the run reads from the file, earlier blends included.

        Args:
            split: Name of the split.
            group: Name of the group of files; empty for data without groups.
            seq_length: Tokens per sample.
        """
        earlier = self.progress.earlier
        tokens = self.end * seq_length
        tokens += sum(period.consumed * period.seq_length for period in earlier)
        return FileUsage(
            split=split,
            prefix=self.file.source.prefix,
            weight=self.weight,
            samples=self.end + sum(period.consumed for period in earlier),
            epochs=tokens / self.file.tokens,
            group=group,
            excluded=self.progress.num_excluded,
        )


@dataclass(frozen=True)
class BlendPlan:
    """Plan of the samples that a run reads from a blend.

    Attributes:
        sources: Sources in the order of the flags.
        order: Order of their samples, from the first sample of the current phase on.
        history: The history of the run, with the requests of the sources.
    """

    sources: tuple[SourcePlan, ...]
    order: BlendOrder
    history: BlendHistory


@dataclass(frozen=True)
class BlendPlanner:
    """Plans the blends of a split.

    Attributes:
        split: Name of the split.
        config: The data flags.
        seq_length: Tokens per sample, without the last label.
        seed: Seed of the shuffles.
        tokenizer: Fingerprint of the tokenizer.
    """

    split: str
    config: DataConfig
    seq_length: int
    seed: int
    tokenizer: str

    def plan(
        self,
        files: Sequence[OpenedFile],
        samples: int,
        before: BlendHistory | None = None,
        consumed: int = 0,
        excluded: Mapping[str, Ranges] | None = None,
    ) -> BlendPlan:
        """Plans a blend of a run.

        Args:
            files: Its files.
            samples: Samples of the run.
            before: History of the run that is resumed.
            consumed: Samples that it has read.
            excluded: Sequences that are left out, by the prefix of the file; None as in `before`.

        Raises:
            UserError: If a file has no text without its excluded documents, or an index would be
                too large.
        """
        history = self._history(files, before, consumed, excluded)
        phase = history.current
        length = max(1, samples - phase.first_sample)
        if length > sys.maxsize:
            (index,) = self._indexes(files[0], [length], self.seq_length, 0)
            raise index.too_large(f"a blend has at most {sys.maxsize} samples")
        order = self._order(files, phase.weights, length)
        counts = order.counts_at(len(order)).tolist()
        requested = self._requested(files, phase.weights, order)
        rows = zip(files, history.members, counts, requested, strict=True)
        sources = tuple(
            self._source_plan(file, member, count, request) for file, member, count, request in rows
        )
        history = with_requests(history, [source.requests for source in sources])
        return BlendPlan(sources, order, history)

    def weights(self, files: Sequence[OpenedFile]) -> list[float]:
        """The weights of a blend, by default in proportion to the files' sizes.

        With a number of epochs, by default to the samples in these.
        """
        if self._epochs and files[0].source.given_weight is None:  # every file ends with the run
            samples = [self.samples_of_epochs(file, self._epochs) for file in files]
            total = sum(samples)
            return [count / total for count in samples]
        return self._rule.weights(self._sizes(files))

    def samples_of_epochs(self, file: OpenedFile, epochs: int) -> int:
        """Samples of a file in a number of epochs."""
        is_cyclic = self.config.is_cyclic
        return samples_of_epochs(epochs, file.tokens, self.seq_length, is_cyclic=is_cyclic)

    @property
    def _epochs(self) -> int | None:
        """The number of epochs that end with the run; None without the flag."""
        return self.config.train_data_exact_num_epochs if self.split == "train" else None

    @property
    def _rule(self) -> BlendRule:
        return RULES[self.config.blend_order]

    def _sizes(self, files: Sequence[OpenedFile]) -> list[SourceSize]:
        return [
            SourceSize(
                file.source.given_weight,
                file.source.weight,
                file.tokens,
                self.samples_of_epochs(file, 1),
            )
            for file in files
        ]

    def _history(
        self,
        files: Sequence[OpenedFile],
        before: BlendHistory | None,
        consumed: int,
        excluded: Mapping[str, Ranges] | None,
    ) -> BlendHistory:
        """The history of the run with this blend; see `plan`."""
        identities = with_copy_numbers(
            SourceId(Path(file.source.prefix).name, file.lengths_hash, file.document_range)
            for file in files
        )
        left_out = None
        if excluded is not None:
            ranges = (excluded.get(file.source.prefix, ()) for file in files)
            left_out = dict(zip(identities, ranges, strict=True))
        rule = self._rule if len(files) > 1 else RULES[FAIR]
        return resume_history(
            before,
            identities,
            self.weights(files),
            rule.version,
            consumed,
            self.seq_length,
            left_out,
        )

    def _order(
        self, files: Sequence[OpenedFile], weights: Sequence[float], length: int
    ) -> BlendOrder:
        """The order of the next samples of the files."""
        if len(files) == 1:
            return SingleSourceOrder(length)
        return self._rule.order(weights, length, files[0].cache)

    def _requested(
        self, files: Sequence[OpenedFile], weights: Sequence[float], order: BlendOrder
    ) -> list[int]:
        """Samples to request of each file, which determine the order of its documents."""
        if len(files) == 1 and files[0].source.given_weight is None:
            return [len(order)]
        return self._rule.requested(self._sizes(files), weights, order)

    def _source_plan(
        self, file: OpenedFile, member: BlendMember, count: int, requested: int
    ) -> SourcePlan:
        """The plan of a file.

        Args:
            file: The file.
            member: Its state before the blend.
            count: Samples that the blend reads of it.
            requested: Samples to request of it.
        """
        progress = member.progress
        end = member.start + count
        if self._epochs:  # documents of a further epoch would be mixed with these
            requested = max(end, min(requested, self.samples_of_epochs(file, self._epochs)))
        rest, first = self._remaining(file, progress)
        kept = file.without(progress.excluded)
        requests = extend_requests(
            progress.requests,
            member.start + requested - len(rest or ()),
            kept.tokens,
            self.seq_length,
            is_cyclic=self.config.is_cyclic,
        )
        indexes: list[LazyIndexes] = [] if rest is None else [rest]
        indexes += self._indexes(kept, requests, self.seq_length, first)
        return SourcePlan(file, progress, member.weight, end, requests, tuple(indexes))

    def _indexes(
        self, file: OpenedFile, requests: Sequence[int], seq_length: int, first: int
    ) -> Iterator[LazySampleIndexes]:
        """The indexes of each request, numbered from `first`."""
        for index, samples in enumerate(requests, first):
            yield LazySampleIndexes(
                file,
                self.split,
                samples,
                seq_length,
                self._seed_of(index),
                self.tokenizer,
                is_cyclic=self.config.is_cyclic,
            )

    def _seed_of(self, index: int) -> int:
        """Seed of an index, by its number: it must not repeat the order of the previous one."""
        return (self.seed + index) % (1 << 32)

    def _remaining(
        self, file: OpenedFile, progress: SourceProgress
    ) -> tuple[LazyRemainingIndexes | None, int]:
        """The unread samples of the index that was in use when the sequence length changed, or the
        documents that are left out.

        Indexes that were not begun are left out: the same epochs follow at the new length.

        Returns:
            Their indexes, None if the index ended there; and the number of indexes so far.
        """
        rest: LazyRemainingIndexes | None = None
        first = 0
        states = [(period.seq_length, period.excluded) for period in progress.earlier]
        states.append((self.seq_length, progress.excluded))
        for period, (length, excluded) in zip(progress.earlier, states[1:], strict=True):
            parts: list[LazyIndexes] = [] if rest is None else [rest]
            before = file.without(period.excluded)
            parts += self._indexes(before, period.requests, period.seq_length, first)
            first += len(period.requests) + 1
            rest = None
            position = period.consumed
            seed = self._seed_of(first - 1)
            for part in parts:
                if 0 < position < len(part):
                    rest = LazyRemainingIndexes(part, position, length, seed)
                    if excluded != period.excluded:
                        without = LazyRemainingIndexes(
                            part, position, period.seq_length, 0, excluded
                        )
                        rest = without
                        if length != period.seq_length:
                            rest = LazyRemainingIndexes(without, 0, length, seed)
                position -= min(position, len(part))
            rest = rest or None  # text that is shorter than a sample
        return rest, first
