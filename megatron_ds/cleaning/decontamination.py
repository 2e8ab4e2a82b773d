"""The stage `decontaminate`: takes texts of evaluation tasks out of documents.

Runs of words are compared, as for GPT-3 (Brown et al., 2020, appendix C): 13 of them, in lower case
and without punctuation. A task text that is shorter counts as a whole if it is not too short.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from megatron_ds.cleaning.deduplication import WORD
from megatron_ds.cleaning.stages import Document, Dropped, SplitInto
from megatron_ds.preprocess.document_readers import DocumentReader
from megatron_ds.preprocess.formats import RawDocument, UnreadableDocument
from megatron_ds.preprocess.inputs import InputSpec
from megatron_ds.preprocess.parsing import (
    BROKEN_JSON,
    RejectedDocument,
    TextFields,
    reject,
    texts_of,
)

SENTENCE_ENDS = ".!?。！？\n"
SENTENCE_END = re.compile(f"[{re.escape(SENTENCE_ENDS)}]")
HANDLINGS = ("cut", "drop")
PROBLEMS_SHOWN = 20
MAX_DOCUMENT_BYTES = 1 << 27


@dataclass(frozen=True)
class TaskOptions:
    """files: of JSON lines, tables or plain text (a task per block between blank lines). keys: of
    the texts in them; all texts if there are none. ngram: words that a document must not share.
    min_ngram: words of the shortest task text that counts. handling: one of HANDLINGS. margin:
    characters that go with a match on each side, to the end of a sentence. min_piece: shorter rests
    are dropped. max_pieces: a document that falls into more is dropped.
    """

    files: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    ngram: int = 13
    min_ngram: int = 8
    handling: str = "cut"
    margin: int = 200
    min_piece: int = 200
    max_pieces: int = 10


class Decontaminate:
    """Cuts matches out of documents, or drops these.

    Raises ValueError for files that cannot be read, and for every line in them that gives no text.
    """

    name = "decontaminate"

    def __init__(self, options: TaskOptions) -> None:
        self._options = options
        self._grams: set[str] = set()
        self._heads: set[tuple[str, str]] = set()
        sizes: set[int] = set()
        problems: list[str] = []
        for text in _texts(options, problems):
            words = [match.group().casefold() for match in WORD.finditer(text)]
            size = min(options.ngram, len(words))
            if size < options.min_ngram:
                continue
            sizes.add(size)
            for at in range(len(words) - size + 1):
                self._grams.add(" ".join(words[at : at + size]))
                self._heads.add((words[at], words[at + 1]))
        if problems:
            hidden = len(problems) - PROBLEMS_SHOWN
            problems[PROBLEMS_SHOWN:] = [f"(and {hidden} more)"] if hidden > 0 else []
            raise ValueError("\n".join(problems))
        if not self._grams:
            raise ValueError(
                f"--task-files {' '.join(options.files)}: no text in them has the "
                f"{options.min_ngram} words of --min-ngram-size"
            )
        self._sizes = sorted(sizes, reverse=True)

    @property
    def fingerprint(self) -> str:
        """Of what is looked for, whatever the files' names."""
        digest = sha256("\n".join(sorted(self._grams)).encode()).hexdigest()[:12]
        return f"{len(self)} runs of words ({digest})"

    def __len__(self) -> int:
        """The number of runs of words that are looked for."""
        return len(self._grams)

    def __call__(self, document: Document) -> Dropped | SplitInto | None:
        matches = self._matches(document.text)
        first = next(matches, None)
        if first is None:
            return None
        if self._options.handling == "drop":
            return Dropped("task text")
        pieces = self._pieces(document.text)
        if not pieces:
            return Dropped("task text")
        if len(pieces) > self._options.max_pieces:
            return Dropped("task text in too many places")
        return SplitInto(pieces)

    def _matches(self, text: str, begin: int = 0) -> Iterator[tuple[int, int]]:
        """Where task texts stand: first and past the last character; they may overlap."""
        found = list(WORD.finditer(text, begin))
        words = [match.group().casefold() for match in found]
        for at, head in enumerate(itertools.pairwise(words)):
            if head not in self._heads:
                continue
            for size in self._sizes:
                if " ".join(words[at : at + size]) in self._grams:
                    yield found[at].start(), found[min(at + size, len(found)) - 1].end()
                    break

    def _pieces(self, text: str) -> list[str]:
        """What is left of a text: each match goes with its margins and the sentences they cut."""
        options = self._options
        pieces: list[str] = []
        begin = 0
        for start, end in self._matches(text):
            if start >= begin:
                stop = max(0, start - options.margin)
                last = max(text.rfind(mark, begin, stop) for mark in SENTENCE_ENDS)
                pieces.append(text[begin : last + 1] if last >= 0 else "")
            # A match in what is gone already still has its own margin.
            after = SENTENCE_END.search(text, end + options.margin)
            begin = max(begin, len(text) if after is None else after.end())
        pieces.append(text[begin:])
        stripped = (piece.strip() for piece in pieces)
        return [piece for piece in stripped if piece and len(piece) >= options.min_piece]


def _texts(options: TaskOptions, problems: list[str]) -> Iterator[str]:
    """The texts of the task files; what gives none goes to the problems."""
    inputs = InputSpec(
        paths=options.files,
        text_documents="paragraph",
        max_document_bytes=MAX_DOCUMENT_BYTES,
    )
    whole = not options.keys
    for item in DocumentReader(inputs, options.keys, all_columns=whole):
        found = _all_texts(item) if whole else texts_of(item, TextFields(options.keys, 1 << 31))
        if isinstance(found, RejectedDocument):
            problems.append(f"--task-files {found}")
        else:
            yield from found


def _all_texts(item: RawDocument) -> list[str] | RejectedDocument:
    """Every text in an item, at any depth."""
    value: object = item.value
    if isinstance(value, UnreadableDocument):
        return reject(item, value.reason, value.message)
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            return reject(item, BROKEN_JSON, f"not JSON: {error}")
    return list(_strings(value))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for inner in value.values() for text in _strings(inner))
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        yield from (text for inner in value for text in _strings(inner))
