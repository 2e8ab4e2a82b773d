"""What a cleaning has counted: documents by stage and reason, lengths before and after.

Counts of one input in one order are the same whoever takes part in the work; they can be written
down and read back.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

EDGES = tuple(sorted({round(2 ** (half / 2)) for half in range(63)}))
"""Bins of lengths in characters: from each edge up to the next, the last without an end; shorter
than the first are empty texts."""


@dataclass
class StageCounts:
    """Documents that came to a stage, whose text it changed, that it made by cutting, and that it
    dropped, by reason."""

    entered: int = 0
    changed: int = 0
    added: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_characters: int = 0

    @property
    def left(self) -> int:
        """Documents that went on."""
        return self.entered + self.added - self.dropped.total()


@dataclass
class Lengths:
    """A histogram of lengths in characters, and their sum."""

    bins: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    characters: int = 0

    def add(self, length: int) -> None:
        self.bins[bisect.bisect_right(EDGES, length)] += 1
        self.characters += length

    @property
    def documents(self) -> int:
        return sum(self.bins)


@dataclass
class Counts:
    """Of one cleaning. bad: lines and rows that gave no document, by reason."""

    stages: dict[str, StageCounts]
    bad: Counter[str] = field(default_factory=Counter)
    before: Lengths = field(default_factory=Lengths)
    after: Lengths = field(default_factory=Lengths)
    without_url: int = 0

    @classmethod
    def of(cls, stages: Sequence[str]) -> Counts:
        return cls({name: StageCounts() for name in stages})

    def to_json(self) -> dict[str, Any]:
        """For people and programs, and for `from_json`."""
        return {
            "documents_before": self.before.documents,
            "documents_after": self.after.documents,
            "characters_before": self.before.characters,
            "characters_after": self.after.characters,
            "no_documents": dict(sorted(self.bad.items())),
            "without_url": self.without_url,
            "stages": {
                name: {
                    "entered": stage.entered,
                    "changed": stage.changed,
                    "added": stage.added,
                    "dropped": dict(sorted(stage.dropped.items())),
                    "dropped_characters": stage.dropped_characters,
                    "left": stage.left,
                }
                for name, stage in self.stages.items()
            },
            "lengths": {
                "from_characters": [0, *EDGES],
                "documents_before": self.before.bins,
                "documents_after": self.after.bins,
            },
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Counts:
        lengths = value["lengths"]
        return cls(
            stages={
                name: StageCounts(
                    stage["entered"],
                    stage["changed"],
                    stage["added"],
                    Counter(stage["dropped"]),
                    stage["dropped_characters"],
                )
                for name, stage in value["stages"].items()
            },
            bad=Counter(value["no_documents"]),
            before=Lengths(lengths["documents_before"], value["characters_before"]),
            after=Lengths(lengths["documents_after"], value["characters_after"]),
            without_url=value["without_url"],
        )
