"""What a run's data sets take of each file, and what a change of mixture means, in words.

Knows figures; no files.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.data.blend_history import BlendHistory, BlendPhase

USAGE_FILE = "data_usage.json"
"""Name of the file with all shares."""
SHOWN = 12
"""Sources that are told one by one; of more, the largest so many."""
NAMED = 6
"""Sources that a sentence names."""


@dataclass(frozen=True)
class FileUsage:
    """What one token file gives to a part, or to a group of it, in the whole run.

    weight: normalised. epochs: passes over its documents of the part.
    """

    part: str
    prefix: str
    weight: float
    samples: int
    epochs: float
    group: str = ""

    @property
    def label(self) -> str:
        return f"{self.part} {self.group}" if self.group else self.part

    def __str__(self) -> str:
        if not self.weight:
            return f"{self.label}: {self.prefix}, weight 0: gives nothing"
        return (
            f"{self.label}: {self.prefix}, weight {self.weight:.6g}: {self.samples} samples, "
            f"{self.epochs:.3g} epochs"
        )


def summary(shares: Sequence[FileUsage], full_list: str | None) -> Iterator[str]:
    """The shares in lines, the smaller ones of a part with many files in one.

    full_list: where all of them stand; None if nowhere.
    """
    cut = False
    for place, each in itertools.groupby(shares, lambda share: share.label):
        members = list(each)
        if len(members) <= SHOWN:
            yield from map(str, members)
            continue
        cut = True
        ordered = sorted(members, key=lambda share: -share.samples)
        yield from map(str, ordered[:SHOWN])
        rest = [share for share in ordered[SHOWN:] if share.weight]
        silent = len(ordered) - SHOWN - len(rest)
        if rest:
            epochs = [share.epochs for share in rest]
            yield (
                f"{place}: {len(rest)} more files, weights {sum(s.weight for s in rest):.6g} in "
                f"all: {sum(s.samples for s in rest)} samples, {min(epochs):.3g} to "
                f"{max(epochs):.3g} epochs"
            )
        if silent:
            yield f"{place}: files of weight 0, which give nothing: {silent}"
    if cut:
        yield f"all files: {full_list}" if full_list else "all files are listed below --save"


def as_json(shares: Sequence[FileUsage]) -> list[dict[str, Any]]:
    """All shares, for JSON."""
    return [dataclasses.asdict(share) for share in shares]


def describe_blend(history: BlendHistory) -> str:
    """The training's mixture in a line."""
    now = history.current
    line = f"training data, {len(now.sources)} in all: {_mixture(history, now)}"
    later = [phase.first for phase in history.phases if phase.first]
    if later:
        line += f"; changed after {_join_limited([f'{first:,}' for first in later])} samples"
    return line


def describe_change(before: BlendHistory, after: BlendHistory) -> list[str]:
    """What a resumed run reads in another way than the run before it; empty if nothing."""
    lines = []
    was, now = before.current, after.current
    if before.order != after.order:
        lines.append(
            "WARNING: sources are mixed in another order than by the program of the checkpoint: a "
            "new order begins, in which each source goes on where it was"
        )
    if now is not was:
        lines += [
            f"WARNING: the mixture of the training data changes after {now.first} samples:",
            f"    before: {_mixture(before, was)}",
            f"    now:    {_mixture(after, now)}",
            *(f"    {line}" for line in _source_changes(before, after)),
        ]
    known = {n: source.requests for n, source in enumerate(before.sources) if source.requests}
    longer = [n for n in now.sources if n in known and known[n] != after.sources[n].requests]
    if longer:
        names = _join_limited([after.sources[number].identity.name for number in longer])
        lines.append(
            f" > more samples are needed than the indexes of the run before hold: {names} "
            f"{'gives' if len(longer) == 1 else 'give'} those that are left, then further epochs "
            "in an order of their own"
        )
    return lines


def _source_changes(before: BlendHistory, after: BlendHistory) -> Iterator[str]:
    old, new = set(before.current.sources), set(after.current.sources)
    sources = after.sources
    known = {number for number, source in enumerate(before.sources) if source.taken}
    names = {source.identity.name for source in before.sources}
    kept = sorted(new & known)
    if kept:
        yield "goes on: " + _join_limited(
            [f"{sources[n].identity.name} at its sample {sources[n].taken}" for n in kept]
        )
    gone = sorted(old - new)
    if gone:
        yield "no longer read: " + _join_limited(
            [f"{sources[n].identity.name}, after {sources[n].taken} samples" for n in gone]
        )
    fresh = sorted(new - known)
    if fresh:
        yield "starts at its first sample: " + _join_limited(
            [sources[n].identity.name for n in fresh]
        )
    other = sorted({sources[n].identity.name for n in new if n >= len(before.sources)} & names)
    if other:
        yield (
            f"of the same name, but with other documents than before: {_join_limited(other)}: text "
            "that was trained on may come again"
        )


def _mixture(history: BlendHistory, phase: BlendPhase) -> str:
    pairs = zip(phase.sources, phase.weights, strict=True)
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return _join_limited(
        [f"{history.sources[number].identity.name} {weight:.6g}" for number, weight in ordered]
    )


def _join_limited(words: Sequence[str]) -> str:
    more = len(words) - NAMED
    return ", ".join(words) if more <= 0 else f"{', '.join(words[:NAMED])} and {more} more"
