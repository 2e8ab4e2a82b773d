"""What becomes of a document on its way through the stages.

A worker takes each document through all stages. What depends on other documents is claimed there
and judged afterwards, in order, by the one process that knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

MISSING_EXTRA = "pip install 'megatron_ds[cleaning]'"


class Document(NamedTuple):
    """What a stage sees. url: None where the document names none."""

    text: str
    url: str | None


class Dropped(NamedTuple):
    """The document ends here. reason: in few words; documents are counted by it."""

    reason: str


class Replaced(NamedTuple):
    """The document goes on with another text."""

    text: str


class SplitInto(NamedTuple):
    """Each of the texts goes on as a document of its own."""

    texts: list[str]


class NeedsUniqueKey(NamedTuple):
    """The document goes on if a judge finds no document before it that claimed the same."""

    key: bytes


Outcome = Dropped | Replaced | SplitInto | NeedsUniqueKey | None
"""None: the document goes on as it is."""


class Stage(Protocol):
    """One stage, in a worker: a pure function of the document."""

    @property
    def name(self) -> str:
        """The stage's name on the command line."""

    def __call__(self, document: Document) -> Outcome: ...


class SeenKeys(Protocol):
    """The memory of a stage whose outcome depends on earlier documents."""

    def add_or_reject(self, key: bytes) -> str | None:
        """Why the document is dropped; else None, and its key is kept."""

    def reload(self, key: bytes) -> None:
        """Keeps a key that was kept by an earlier process."""


@dataclass(slots=True)
class TextChanged:
    """In a journey: at this stage the text was mended."""


StageResult = TextChanged | Dropped | NeedsUniqueKey | list["DocumentTrace"] | None
"""What became of a text at one stage; a list: its pieces, which go on from the next stage."""


@dataclass(slots=True)
class DocumentTrace:
    """What became of a text, stage by stage, up to its end.

    steps: one for each stage from the first that it met. length: of the text in characters, as it
    was at the end. line: the document as it was at the end, a JSON line with its end, or b"" where
    nobody asks for it.
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
    """Takes a text through the stages.

    line_of: the whole document as a JSON line, with this text. keep_dropped: make the lines of
    dropped documents, too.
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
    # Of a document that goes on, and of one that a judge may drop, the line is needed.
    line = line_of(text) if keep_dropped or not ended else b""
    return DocumentTrace(steps, len(text), line)
