"""Statistics of a cleaning run: documents by stage and reason, lengths before and after.

They do not depend on the number of workers, and can be saved and loaded as JSON.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

EDGES = tuple(sorted({round(2 ** (half / 2)) for half in range(63)}))
"""Bin edges of lengths in characters. The last bin is open; the first one holds empty texts."""


def ranked(reasons: Counter[str]) -> list[tuple[str, int]]:
    """Reasons with their counts, most frequent first."""
    return sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))


@dataclass
class StageCounts:
    """Documents that entered a stage, that it changed, added by splitting, or dropped."""

    entered: int = 0
    changed: int = 0
    added: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_characters: int = 0

    @property
    def left(self) -> int:
        """Documents that continued."""
        return self.entered + self.added - self.dropped.total()


@dataclass
class Lengths:
    """Histogram of document lengths in characters, and their sum."""

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
    """Statistics of a run.

    Attributes:
        stages: Statistics of each stage, by its name, in order.
        bad: Rejected lines and rows by reason.
        before: Lengths of the documents read.
        after: Lengths of the documents kept.
        without_url: Documents that the stage `url` could not check.
    """

    stages: dict[str, StageCounts]
    bad: Counter[str] = field(default_factory=Counter)
    before: Lengths = field(default_factory=Lengths)
    after: Lengths = field(default_factory=Lengths)
    without_url: int = 0

    def to_json(self) -> dict[str, Any]:
        """The statistics as written to the report, for `from_json`."""
        return {
            "documents_before": self.before.documents,
            "documents_after": self.after.documents,
            "characters_before": self.before.characters,
            "characters_after": self.after.characters,
            "no_documents": dict(sorted(self.bad.items())),
            "without_url": self.without_url,
            "stages": {
                name: {
                    **vars(stage),
                    "dropped": dict(sorted(stage.dropped.items())),
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
        stages = {
            name: StageCounts(**{key: stage[key] for key in vars(StageCounts())})
            for name, stage in value["stages"].items()
        }
        for stage in stages.values():
            stage.dropped = Counter(stage.dropped)
        return cls(
            stages,
            bad=Counter(value["no_documents"]),
            before=Lengths(lengths["documents_before"], value["characters_before"]),
            after=Lengths(lengths["documents_after"], value["characters_after"]),
            without_url=value["without_url"],
        )
