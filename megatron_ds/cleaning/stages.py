"""Stage protocol and the outcome of a document at each stage.

A worker passes each document through all stages. Where the outcome depends on other documents, a
stage requests a unique key, which the one writing process grants or rejects later, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_ds.config.problems import Problem

MISSING_EXTRA = "pip install 'megatron_ds[cleaning]'"


def missing_package(stage: str, package: str) -> Problem:
    """A stage whose package is not installed."""
    return Problem("missing-cleaning-package", stage=stage, package=package, missing=MISSING_EXTRA)


class Document(NamedTuple):
    """Input of a stage.

    Attributes:
        text: The text.
        url: Address of the document; None if it has none.
    """

    text: str
    url: str | None


class Dropped(NamedTuple):
    """The document is dropped, and counted by the reason."""

    reason: str


class Replaced(NamedTuple):
    """The document continues with another text."""

    text: str


class SplitInto(NamedTuple):
    """Each text continues as a document of its own."""

    texts: list[str]


class NeedsUniqueKey(NamedTuple):
    """The document continues unless an earlier document has the same or a similar key."""

    key: bytes


Outcome = Dropped | Replaced | SplitInto | NeedsUniqueKey | None
"""None: the document continues unchanged."""


class Stage(Protocol):
    """A pure function of a document, called in a worker."""

    @property
    def name(self) -> str:
        """The stage's name on the command line."""

    def __call__(self, document: Document) -> Outcome: ...


class SeenKeys(Protocol):
    """Keys of the documents that a stage has kept so far."""

    def add_or_reject(self, key: bytes) -> str | None:
        """Reason for which the document is dropped, or None; then its key is kept."""

    def reload(self, key: bytes) -> None:
        """Keep a key that an interrupted run has kept."""


@dataclass(slots=True)
class TextChanged:
    """In a trace: this stage changed the text."""


StageResult = TextChanged | Dropped | NeedsUniqueKey | list["DocumentTrace"] | None
"""Outcome of a text at one stage; a list holds the traces of its fragments from the next stage."""


@dataclass(slots=True)
class DocumentTrace:
    """Outcomes of a text, stage by stage.

    Attributes:
        steps: One per stage, from the first stage that the text passed.
        length: Characters of the text at the end.
        line: The document at the end as a JSON line, or b"" if it is not needed.
    """

    steps: list[StageResult]
    length: int
    line: bytes


def run_stages(
    text: str,
    url: str | None,
    stages: Sequence[Stage],
    line_of: Callable[[str], bytes],
    keep_dropped: bool,
) -> DocumentTrace:
    """Pass a text through the stages.

    Args:
        text: Text of the document.
        url: Address of the document.
        stages: Stages to pass.
        line_of: Gives the document as a JSON line, with a text.
        keep_dropped: Whether the lines of dropped documents are needed.
    """
    steps: list[StageResult] = []
    ended = False
    for number, stage in enumerate(stages, 1):
        outcome = stage(Document(text, url))
        if isinstance(outcome, Replaced):
            text = outcome.text
            steps.append(TextChanged())
        elif isinstance(outcome, SplitInto):
            rest = stages[number:]
            pieces = [
                run_stages(piece, url, rest, line_of, keep_dropped) for piece in outcome.texts
            ]
            steps.append(pieces)
            ended = True
        else:
            steps.append(outcome)
            ended = isinstance(outcome, Dropped)
        if ended:
            break
    # A document whose key is still undecided may be kept, so its line is needed.
    line = line_of(text) if keep_dropped or not ended else b""
    return DocumentTrace(steps, len(text), line)
