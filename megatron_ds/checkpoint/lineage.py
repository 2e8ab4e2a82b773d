"""Branches of a run: which checkpoints of a folder continue each other.

A run that starts from a checkpoint before the newest, as with --ckpt-step, starts a branch. In the
folder, its checkpoints are between the checkpoints of the branch that it left.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PARENT = "parent.json"
"""File in the folder of a fork: the run and the iteration from which it starts."""


def parent_of(folder: Path) -> tuple[str, int] | None:
    """Parent run and iteration of a fork; None if the folder is not a fork's."""
    try:
        parent = json.loads((folder / PARENT).read_bytes())
        return parent["run"], parent["iteration"]
    except (OSError, ValueError, TypeError, LookupError):
        return None


def starts_fork(folder: Path, iteration: int) -> bool:
    """Whether a run that continues in a folder from an iteration is a fork of another run."""
    parent = parent_of(folder)
    return parent is not None and parent[1] == iteration


@dataclass(frozen=True)
class Lineage:
    """The branches through which a run has come to its present state."""

    segments: tuple[tuple[str, int], ...]
    """Random name of each branch and the iteration at which the run entered it, in order."""

    @classmethod
    def new(cls) -> Lineage:
        """The branch of a run that starts from scratch."""
        return cls(((secrets.token_hex(4), 0),))

    @classmethod
    def from_json(cls, values: Iterable[Iterable[object]]) -> Lineage:
        """Raises ValueError or TypeError for anything but pairs of a name and an iteration."""
        segments = tuple((name, start) for name, start in values)
        if not segments:
            raise ValueError("branch: it is empty")
        for name, start in segments:
            if not isinstance(name, str) or type(start) is not int:
                raise ValueError(f"branch: {name!r} and {start!r} are not a name and an iteration")
        return cls(segments)  # type: ignore[arg-type]

    def fork(self, iteration: int) -> Lineage:
        """A new branch that starts from this one's checkpoint of an iteration."""
        return Lineage((*self.up_to(iteration).segments, (secrets.token_hex(4), iteration)))

    def up_to(self, iteration: int) -> Lineage:
        """The branch of this run's ancestor checkpoint at an iteration."""
        first, *others = self.segments
        return Lineage((first, *(entry for entry in others if entry[1] < iteration)))
