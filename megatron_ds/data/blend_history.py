"""Which sources a run's training data came from so far, and how far each of them was read.

A run reads its sources in phases: a new one begins where a resumed run has another mixture than the
run before. A source is an endless row of samples, of which every phase takes the next ones; so
nothing is repeated or left out within a source, whatever becomes of the weights and of the other
sources. This file owns that bookkeeping and its JSON form; it knows no files and no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.data.sample_index import epochs_needed

FORMAT = 1
"""Of the JSON form."""
WEIGHT_RTOL = 1e-9
"""Weights that differ by less than this share are the same: they were written in another way."""


@dataclass(frozen=True)
class SourceId:
    """What makes two sources of two runs the same one.

    name: of the token file, without its folder. lengths: SHA-256 of all its documents' lengths.
    documents: first and one-past-last that are read. copy: how many sources before it in the
    mixture have the same of all these.
    """

    name: str
    lengths: str
    documents: tuple[int, int]
    copy: int = 0


@dataclass(frozen=True)
class SourceProgress:
    """How far a source was read.

    requests: its samples come from one index after the other; these are the numbers of samples that
    the indexes were made for. An index orders its documents by that number, so it must be kept.
    taken: samples that it has given.
    """

    identity: SourceId
    requests: tuple[int, ...] = ()
    taken: int = 0


@dataclass(frozen=True)
class BlendPhase:
    """A mixture and where it began.

    first: samples of the run before it. sources: numbers in `History.sources`. weights: of each,
    normalised. starts: samples that each had given before.
    """

    first: int
    sources: tuple[int, ...]
    weights: tuple[float, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True)
class BlendHistory:
    """The sources of a run, those that it reads no more among them, and its phases, in order.

    order: format of the order in which sources are mixed.
    """

    order: int
    sources: tuple[SourceProgress, ...]
    phases: tuple[BlendPhase, ...]

    @property
    def current(self) -> BlendPhase:
        return self.phases[-1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, values: Any) -> BlendHistory:
        """Raises ValueError for what `to_dict` would not give."""
        try:
            if values["format"] != FORMAT:
                raise ValueError(f"its format is {values['format']}, expected {FORMAT}")
            sources = tuple(_source(one) for one in values["sources"])
            phases = tuple(_phase(one, len(sources)) for one in values["phases"])
            order = _count(values["order"])
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"it lacks what belongs there ({error!r})") from error
        if not phases:
            raise ValueError("it has no phase")
        return cls(order, sources, phases)


def with_copy_numbers(identities: Sequence[SourceId]) -> list[SourceId]:
    """The same, with each one's number among its equals as `copy`."""
    seen: dict[SourceId, int] = {}
    result = []
    for one in identities:
        seen[one] = seen.get(one, 0) + 1
        result.append(dataclasses.replace(one, copy=seen[one] - 1))
    return result


def new_history(
    identities: Sequence[SourceId], weights: Sequence[float], order: int
) -> BlendHistory:
    """The history of a run that begins with this mixture."""
    count = len(identities)
    phase = BlendPhase(0, tuple(range(count)), tuple(weights), (0,) * count)
    return BlendHistory(order, tuple(SourceProgress(one) for one in identities), (phase,))


def resume_history(
    before: BlendHistory,
    identities: Sequence[SourceId],
    weights: Sequence[float],
    order: int,
    consumed: int,
) -> BlendHistory:
    """The history of a run that goes on after `consumed` samples, as of which `before` is.

    The same as before if the mixture is the same; otherwise with one more phase, in which known
    sources go on where they were and new ones begin.
    """
    now = before.current
    known = [before.sources[number].identity for number in now.sources]
    same = known == list(identities) and all(
        math.isclose(was, weight, rel_tol=WEIGHT_RTOL)
        for was, weight in zip(now.weights, weights, strict=True)
    )
    if same and before.order == order:
        return before
    numbers = {source.identity: number for number, source in enumerate(before.sources)}
    new = [one for one in identities if one not in numbers]
    sources = (*before.sources, *(SourceProgress(one) for one in new))
    numbers |= {one: len(before.sources) + place for place, one in enumerate(new)}
    members = tuple(numbers[one] for one in identities)
    starts = tuple(sources[number].taken for number in members)
    phase = BlendPhase(consumed, members, tuple(weights), starts)
    passed = (each for each in before.phases if each.first < consumed)
    return BlendHistory(order, sources, (*passed, phase))


def record_consumed(history: BlendHistory, taken: Sequence[int]) -> BlendHistory:
    """The history after the present phase's sources have given so many samples in it."""
    sources = list(history.sources)
    now = history.current
    for number, start, count in zip(now.sources, now.starts, taken, strict=True):
        sources[number] = dataclasses.replace(sources[number], taken=start + int(count))
    return dataclasses.replace(history, sources=tuple(sources))


def with_requests(history: BlendHistory, requests: Sequence[tuple[int, ...]]) -> BlendHistory:
    """The history with the present phase's sources read through these indexes."""
    sources = list(history.sources)
    for number, each in zip(history.current.sources, requests, strict=True):
        sources[number] = dataclasses.replace(sources[number], requests=each)
    return dataclasses.replace(history, sources=tuple(sources))


def extend_requests(
    requests: tuple[int, ...], needed: int, tokens_per_epoch: int, seq_length: int
) -> tuple[int, ...]:
    """The indexes of a source that is to give `needed` samples in all: those that it has and, if
    they hold too few, one more for the rest.

    An index holds all samples of its whole epochs, and they are all given before the next one
    begins: each document is read as often as any other.
    """
    held = sum(samples_held(each, tokens_per_epoch, seq_length) for each in requests)
    return requests if held >= needed else (*requests, needed - held)


def samples_held(request: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Samples of an index that was made for `request` samples."""
    epochs = epochs_needed(request, tokens_per_epoch, seq_length)
    return (epochs * tokens_per_epoch - 1) // seq_length


def _source(values: Any) -> SourceProgress:
    identity = values["identity"]
    first, end = (_count(each) for each in identity["documents"])
    return SourceProgress(
        SourceId(
            str(identity["name"]), str(identity["lengths"]), (first, end), _count(identity["copy"])
        ),
        tuple(_count(each) for each in values["requests"]),
        _count(values["taken"]),
    )


def _phase(values: Any, sources: int) -> BlendPhase:
    numbers = tuple(_count(each) for each in values["sources"])
    weights = tuple(float(each) for each in values["weights"])
    starts = tuple(_count(each) for each in values["starts"])
    if not len(numbers) == len(weights) == len(starts) > 0:
        raise ValueError("a phase's sources, weights and starts are not equally many")
    if not all(number < sources for number in numbers):
        raise ValueError("a phase names a source that is not there")
    if not all(0 < weight <= 1 for weight in weights):
        raise ValueError("a phase has a weight that is not between 0 and 1")
    return BlendPhase(_count(values["first"]), numbers, weights, starts)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
