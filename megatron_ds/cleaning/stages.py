"""Stage protocol and the outcome of a document at a stage.

A worker passes each document through all stages. Where the outcome depends on other documents, a
stage requests a unique key, which the one writing process grants or rejects later, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


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
    """Each text continues as a separate document."""

    texts: list[str]


class NeedsUniqueKey(NamedTuple):
    """The document continues unless an earlier document has the same or a similar key."""

    key: bytes


Outcome = Dropped | Replaced | SplitInto | NeedsUniqueKey | None
"""None: the document continues unchanged."""


class Stage(Protocol):
    """A pure function of a document, called in a worker."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """All that determines the outcomes, by option field; a resumed run must share it."""

    def __call__(self, document: Document) -> Outcome: ...


class SeenKeys(Protocol):
    """Keys of the documents that a stage has kept so far."""

    def add_or_reject(self, key: bytes) -> str | None:
        """Why the document is dropped; None keeps it and stores its key."""

    def reload(self, key: bytes) -> None:
        """Keep a key that an interrupted run has kept."""
