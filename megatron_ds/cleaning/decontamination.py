"""The stage `decontaminate`: removes texts of evaluation tasks from documents.

Word n-grams are compared, as for GPT-3 (Brown et al., 2020, appendix C): 13 words, in lower case
and without punctuation. A shorter task text is one n-gram, if it has enough words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

from megatron_ds.cleaning.deduplication import WORD
from megatron_ds.cleaning.stages import Document, Dropped, SplitInto
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import PROBLEMS_SHOWN, Problem, raise_if_any, user_error
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import STDIN, InputSpec
from megatron_ds.preprocess.documents.parsing import (
    RejectedDocument,
    TextFields,
    fields_of,
    texts_of,
)

SENTENCE_ENDS = ".!?。！？\n"
SENTENCE_END = re.compile(f"[{re.escape(SENTENCE_ENDS)}]")
MAX_DOCUMENT_BYTES = 1 << 27


@dataclass(frozen=True)
class TaskOptions:
    """Texts of evaluation tasks, removed by the stage decontaminate."""

    eval_task_files: tuple[str, ...] = option_field((), nargs="*", metavar="FILE")
    """Texts of evaluation tasks: JSON lines, tables, or plain text with one task per paragraph."""
    eval_task_keys: tuple[str, ...] = option_field((), nargs="*", metavar="KEY")
    """Keys or columns of the texts in the task files (default: all strings)."""
    ngram_size: int = option_field(13, minimum=2)
    """Length of n-grams in words; documents that share one with a task are contaminated."""
    min_ngram_size: int = option_field(8, minimum=2)
    """Minimum words of a task text; a text shorter than --ngram-size is one n-gram."""
    contamination_action: str = option_field("cut", choices=("cut", "drop"))
    """cut: remove matches, which may split a document into fragments; drop: drop the document."""
    contamination_margin_chars: int = option_field(200, minimum=0)
    """Characters to remove on each side of a match, extended to the end of the sentence."""
    min_fragment_chars: int = option_field(200, minimum=0)
    """Minimum characters of a fragment; shorter ones are dropped."""
    max_fragments: int = option_field(10, minimum=1)
    """Maximum fragments of a document; documents with more are dropped."""

    def problems(self) -> Iterator[Problem]:
        if self.min_ngram_size > self.ngram_size:
            yield Problem("min-ngram-size-too-large", settings=self)
        if self.eval_task_files:
            for problem in InputSpec(paths=self.eval_task_files).problems():
                yield problem.about(paths="eval_task_files")
        if STDIN in self.eval_task_files:
            yield Problem("tasks-from-standard-input")


class Decontaminate:
    """Removes matches from documents, or drops the documents.

    Raises:
        UserError: For task files that cannot be read, and for every line without a text.
    """

    def __init__(self, options: TaskOptions) -> None:
        self._options = options
        self._grams: set[str] = set()
        self._heads: set[tuple[str, str]] = set()
        rejected: list[RejectedDocument] = []
        for text in _texts(options, rejected):
            words = [match.group().casefold() for match in WORD.finditer(text)]
            size = min(options.ngram_size, len(words))
            if size < options.min_ngram_size:
                continue
            for at in range(len(words) - size + 1):
                self._grams.add(" ".join(words[at : at + size]))
                self._heads.add((words[at], words[at + 1]))
        problems = [Problem("rejected-task", document=one) for one in rejected[:PROBLEMS_SHOWN]]
        if len(rejected) > PROBLEMS_SHOWN:
            problems.append(Problem("more-rejected-tasks", hidden=len(rejected) - PROBLEMS_SHOWN))
        raise_if_any(problems)
        if not self._grams:
            minimum = options.min_ngram_size
            raise user_error("no-task-texts", settings=options, minimum=minimum)
        self._sizes = sorted({gram.count(" ") + 1 for gram in self._grams}, reverse=True)
        digest = sha256("\n".join(sorted(self._grams)).encode()).hexdigest()[:12]
        content = f"{len(self._grams)} runs of words ({digest})"  # whatever the files' names
        self.settings = {**vars(options), "eval_task_files": content}

    def __call__(self, document: Document) -> Dropped | SplitInto | None:
        matches = list(self._matches(document.text))
        if not matches:
            return None
        pieces = self._pieces(document.text, matches)
        if self._options.contamination_action == "drop" or not pieces:
            return Dropped("task text")
        if len(pieces) > self._options.max_fragments:
            return Dropped("task text in too many places")
        return SplitInto(pieces)

    def _matches(self, text: str) -> Iterator[tuple[int, int]]:
        """Spans of task texts, which may overlap."""
        matches = list(WORD.finditer(text))
        words = [match.group().casefold() for match in matches]
        for at, head in enumerate(itertools.pairwise(words)):
            if head not in self._heads:
                continue
            for size in self._sizes:
                if " ".join(words[at : at + size]) in self._grams:
                    yield matches[at].start(), matches[min(at + size, len(matches)) - 1].end()
                    break

    def _pieces(self, text: str, matches: Sequence[tuple[int, int]]) -> list[str]:
        """Fragments of a text without the matches, their margins and the sentences these touch."""
        options = self._options
        pieces: list[str] = []
        begin = 0
        for start, end in matches:
            if start >= begin:
                stop = max(0, start - options.contamination_margin_chars)
                last = max(text.rfind(mark, begin, stop) for mark in SENTENCE_ENDS)
                pieces.append(text[begin : last + 1] if last >= 0 else "")
            # A match within a removed span still extends it by its own margin.
            after = SENTENCE_END.search(text, end + options.contamination_margin_chars)
            begin = max(begin, len(text) if after is None else after.end())
        pieces.append(text[begin:])
        minimum = max(1, options.min_fragment_chars)
        return [piece for piece in map(str.strip, pieces) if len(piece) >= minimum]


def _texts(options: TaskOptions, rejected: list[RejectedDocument]) -> Iterator[str]:
    """Texts of the task files. Collects rejected lines."""
    inputs = InputSpec(
        paths=options.eval_task_files,
        text_document_unit="paragraph",
        max_document_bytes=MAX_DOCUMENT_BYTES,
    )
    all_texts = not options.eval_task_keys
    wanted = TextFields(options.eval_task_keys, 1 << 31)
    for item in DocumentReader(inputs, options.eval_task_keys, all_columns=all_texts):
        texts = fields_of(item) if all_texts else texts_of(item, wanted)
        if isinstance(texts, RejectedDocument):
            rejected.append(texts)
        else:
            yield from _strings(texts)


def _strings(value: object) -> Iterator[str]:
    """Every text in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for inner in value.values() for text in _strings(inner))
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        yield from (text for inner in value for text in _strings(inner))
