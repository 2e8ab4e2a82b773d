"""The history of a run's blend: which sources were read, and how many samples of each.

A run reads its sources in phases; a resumed run with another blend begins a new one. Each source is
an endless stream of samples, and every phase continues where the previous one stopped. So no sample
of a source is repeated or left out when weights or other sources change. If the sequence length
changes, a source continues with the text that it has not read, in samples of the new length. This
file owns that bookkeeping and its JSON form; it knows no files and no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NewType

from megatron_ds.data.sample_index import Ranges, total_samples

HISTORY_FORMAT = 3
"""Version of the JSON form."""
READABLE_FORMATS = (2, HISTORY_FORMAT)
"""Versions that are read; the first of them has no sequence lengths."""
ABSENT = {"seq_length": 0, "earlier": (), "excluded": ()}
"""Values that older versions lack."""
Offset = NewType("Offset", int)
"""An integer that may be negative."""
WEIGHT_RTOL = 1e-9
"""Relative tolerance of weights, which may be given with different precision."""
_types_of = functools.cache(typing.get_type_hints)


@dataclass(frozen=True)
class SourceId:
    """Identity of a source across runs.

    Attributes:
        name: Name of the token file, without its folder.
        lengths: SHA-256 of the lengths of all its sequences.
        documents: Range of documents that are read.
        copy: Number of earlier sources in the blend that are equal in all of these.
    """

    name: str
    lengths: str
    documents: tuple[int, int]
    copy: int = 0


@dataclass(frozen=True)
class LengthPeriod:
    """Progress of a source at an earlier sequence length, or with other documents left out.

    Attributes:
        seq_length: Tokens per sample.
        requests: Requested samples, see `SourceProgress`.
        consumed: Samples read at this length.
        excluded: Sequences of the file that were left out, as ranges.
    """

    seq_length: int
    requests: tuple[int, ...]
    consumed: int
    excluded: Ranges = ()


@dataclass(frozen=True)
class SourceProgress:
    """Progress of a source.

    Attributes:
        identity: The source.
        requests: Number of samples that each of its consecutive indexes was built for. The number
            determines the order of an index, so it must be kept.
        consumed: Samples read at the current sequence length.
        earlier: The same at earlier lengths, in order.
        excluded: Sequences of the file that are left out, as ranges.
    """

    identity: SourceId
    requests: tuple[int, ...] = ()
    consumed: int = 0
    earlier: tuple[LengthPeriod, ...] = ()
    excluded: Ranges = ()

    @property
    def num_excluded(self) -> int:
        """Number of sequences that are left out."""
        return sum(end - first for first, end in self.excluded)

    @property
    def all_consumed(self) -> int:
        """Samples read at any length."""
        return self.consumed + sum(period.consumed for period in self.earlier)


@dataclass(frozen=True)
class BlendPhase:
    """A blend, and where it begins in the run.

    Attributes:
        first_sample: Samples of the run before it.
        sources: Indexes into `BlendHistory.sources`.
        weights: Weights of the sources, which sum to 1.
        source_starts: Samples of the current sequence length that each source gave before;
            negative by those that it gave in this blend before documents were left out.
    """

    first_sample: int
    sources: tuple[int, ...]
    weights: tuple[float, ...]
    source_starts: tuple[Offset, ...]


class BlendMember(NamedTuple):
    """A source of a blend: what was read of it, and its entries in the `BlendPhase`."""

    progress: SourceProgress
    weight: float
    start: Offset


@dataclass(frozen=True)
class BlendHistory:
    """All sources that a run has read, and its phases.

    Attributes:
        order: Version of the blend schedule.
        sources: Current and former sources.
        phases: Phases in order; the last one is current.
        seq_length: Tokens per sample of the current phase.
    """

    order: int
    sources: tuple[SourceProgress, ...]
    phases: tuple[BlendPhase, ...]
    seq_length: int = 0

    @property
    def current(self) -> BlendPhase:
        return self.phases[-1]

    @property
    def members(self) -> list[BlendMember]:
        """The sources of the current phase."""
        phase = self.current
        rows = zip(phase.sources, phase.weights, phase.source_starts, strict=True)
        return [BlendMember(self.sources[index], weight, start) for index, weight, start in rows]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {"format": HISTORY_FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> BlendHistory:
        """Parses the JSON form.

        Raises:
            ValueError: If it is not what `to_dict` returns.
        """
        try:
            if values["format"] not in READABLE_FORMATS:
                raise ValueError(f"unknown format {values['format']}, expected {HISTORY_FORMAT}")
            history: BlendHistory = _parsed(cls, values)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"missing or invalid entry: {error!r}") from error
        _check(history)
        return history


def with_copy_numbers(identities: Iterable[SourceId]) -> list[SourceId]:
    """Numbers equal identities by their `copy`."""
    seen: dict[SourceId, int] = {}
    result = []
    for one in identities:
        seen[one] = seen.get(one, 0) + 1
        result.append(dataclasses.replace(one, copy=seen[one] - 1))
    return result


def resume_history(
    before: BlendHistory | None,
    identities: Sequence[SourceId],
    weights: Sequence[float],
    order: int,
    consumed: int = 0,
    seq_length: int = 0,
    excluded: Mapping[SourceId, Ranges] | None = None,
) -> BlendHistory:
    """The history of a new or resumed run.

    Unchanged if blend and sequence length are the same. Otherwise it gets another phase, in which
    known sources continue where they stopped.

    Args:
        before: The history at the checkpoint; None for a new run.
        identities: Sources of the current blend.
        weights: Their weights, which sum to 1.
        order: Version of the blend schedule.
        consumed: Samples of the run at the checkpoint.
        seq_length: Tokens per sample.
        excluded: Sequences to leave out of each source from now on; None: as before.
    """
    if before is not None and excluded is not None:
        before = _without(before, excluded)
    if before is None:
        before = BlendHistory(order, (), ())
        consumed = 0
    elif before.seq_length != seq_length:
        length = before.seq_length
        before = dataclasses.replace(
            before, sources=tuple(_restarted(source, length) for source in before.sources)
        )
    elif before.order == order:
        now = before.current
        known = [before.sources[index].identity for index in now.sources]
        if known == list(identities) and all(
            math.isclose(was, weight, rel_tol=WEIGHT_RTOL)
            for was, weight in zip(now.weights, weights, strict=True)
        ):
            return before
    numbers = {source.identity: index for index, source in enumerate(before.sources)}
    new = [one for one in identities if one not in numbers]
    left_out = excluded or {}
    added = (SourceProgress(one, excluded=left_out.get(one, ())) for one in new)
    sources = (*before.sources, *added)
    numbers |= {one: len(before.sources) + index for index, one in enumerate(new)}
    members = tuple(numbers[one] for one in identities)
    starts = tuple(Offset(sources[index].consumed) for index in members)
    phase = BlendPhase(consumed, members, tuple(weights), starts)
    passed = (phase for phase in before.phases if phase.first_sample < consumed)
    return BlendHistory(order, sources, (*passed, phase), seq_length)


def _restarted(source: SourceProgress, seq_length: int) -> SourceProgress:
    """A source before its first sample of another length, after reading it at `seq_length`."""
    earlier = source.earlier
    if source.consumed:
        read = source.requests, source.consumed, source.excluded
        earlier = (*earlier, LengthPeriod(seq_length, *read))
    return SourceProgress(source.identity, earlier=earlier, excluded=source.excluded)


def _without(history: BlendHistory, excluded: Mapping[SourceId, Ranges]) -> BlendHistory:
    """The history, whose sources go on without sequences, at the same places of the blend."""
    phase = history.current
    sources = list(history.sources)
    starts = dict(zip(phase.sources, phase.source_starts, strict=True))
    for index, source in enumerate(sources):
        wanted = excluded.get(source.identity, source.excluded)
        if wanted != source.excluded:
            restarted = _restarted(source, history.seq_length)
            sources[index] = dataclasses.replace(restarted, excluded=wanted)
            starts[index] = Offset(starts.get(index, 0) - source.consumed)
    moved = dataclasses.replace(phase, source_starts=tuple(starts[one] for one in phase.sources))
    phases = *history.phases[:-1], moved
    return dataclasses.replace(history, sources=tuple(sources), phases=phases)


def record_consumed(history: BlendHistory, counts: Sequence[int]) -> BlendHistory:
    """The history after reading `counts` samples of each source in the current phase."""
    starts = history.current.source_starts
    ends = [start + int(count) for start, count in zip(starts, counts, strict=True)]
    return _with_current(history, "consumed", ends)


def with_requests(history: BlendHistory, requests: Sequence[tuple[int, ...]]) -> BlendHistory:
    """The history with these indexes (see `SourceProgress.requests`) of the current sources."""
    return _with_current(history, "requests", requests)


def _with_current(history: BlendHistory, field: str, values: Sequence[Any]) -> BlendHistory:
    """The history with other values of a field of the current sources."""
    sources = list(history.sources)
    for index, value in zip(history.current.sources, values, strict=True):
        sources[index] = dataclasses.replace(sources[index], **{field: value})
    return dataclasses.replace(history, sources=tuple(sources))


def extend_requests(
    requests: tuple[int, ...],
    needed: int,
    tokens_per_epoch: int,
    seq_length: int,
    *,
    is_cyclic: bool = False,
) -> tuple[int, ...]:
    """Index sizes of a source, extended by one if `needed` exceeds them.

    An index has all samples of its complete epochs, and they are all read before the next index
    begins, so that all documents are read equally often.
    """
    size = tokens_per_epoch, seq_length
    available = sum(total_samples(request, *size, is_cyclic=is_cyclic) for request in requests)
    return requests if available >= needed else (*requests, needed - available)


def _parsed(cls: Any, value: Any) -> Any:
    """The value of this type of a value of its JSON form."""
    if isinstance(cls, type) and dataclasses.is_dataclass(cls):
        values = {**ABSENT, **value}
        return cls(**{name: _parsed(hint, values[name]) for name, hint in _types_of(cls).items()})
    if typing.get_origin(cls) is tuple:
        return tuple(_parsed(typing.get_args(cls)[0], one) for one in value)
    if cls in (int, Offset) and (type(value) is not int or (cls is int and value < 0)):
        raise ValueError(f"{value!r} is not a count")
    return cls(value)


def _check(history: BlendHistory) -> None:
    """Raises ValueError for values that do not fit each other."""
    if not history.phases:
        raise ValueError("no phase")
    for source in history.sources:
        if len(source.identity.documents) != 2:
            raise ValueError("a source has no range of documents")
        if not all(period.seq_length for period in source.earlier):
            raise ValueError("a period has no sequence length")
    for phase in history.phases:
        if not len(phase.sources) == len(phase.weights) == len(phase.source_starts) > 0:
            raise ValueError("a phase has different numbers of sources, weights and starts")
        if max(phase.sources) >= len(history.sources):
            raise ValueError("a phase has an unknown source")
        if not all(0 < weight <= 1 for weight in phase.weights):
            raise ValueError("a phase has a weight outside (0, 1]")
