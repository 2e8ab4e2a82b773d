"""Writes the tokens of other trainers' files as a pair .bin and .idx.

One pass in blocks, so memory is flat. Output grows in a work folder (`fileio/resumable.py`) and
appears under its names when all files were read without a problem; the same command continues an
interrupted run. After a problem of the data the remaining files are checked, too, and nothing is
left. Knows no format and no command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron_ds.config.problems import (
    PROBLEMS_SHOWN,
    Problem,
    UserError,
    collect,
    ignore,
    raise_if_any,
    user_error,
    warn_of,
)
from megatron_ds.data.foreign_tokens.documents import DocumentRule, OpenDocument
from megatron_ds.data.foreign_tokens.foreign_file import Block, ForeignFile, ForeignTokens
from megatron_ds.data.token_files.indexed_dataset import TOKENIZER_SUFFIX, token_dtype
from megatron_ds.data.token_files.indexed_writer import (
    WORK_SUFFIXES,
    WRITER_SUFFIXES,
    TokenFileWriter,
    WriteCounts,
)
from megatron_ds.data.token_files.token_file import Tokens
from megatron_ds.fileio.resumable import (
    COMPLETED_SUFFIX,
    RECORD,
    WORK_SUFFIX,
    ResumableOutput,
    enter_or_refuse,
)

MAX_ID = 2**31 - 1
"""Highest id of a pair of token files."""
SUFFIXES = (".bin", ".idx")


@dataclass(frozen=True)
class ImportProgress:
    """Counts so far.

    Attributes:
        written: Tokens, sequences and documents.
        num_bytes: Bytes of the files read.
        empty: Documents without tokens, which are left out.
        id_bytes: Bytes of the ids that this process has read, as their files store them.
        is_complete: Whether the output was complete before.
    """

    written: WriteCounts
    num_bytes: int = 0
    empty: int = 0
    id_bytes: int = 0
    is_complete: bool = False


@dataclass(frozen=True)
class ImportTarget:
    """The output.

    Attributes:
        prefix: Path of the pair without .bin and .idx.
        rule: How documents are found.
        vocab_size: Number of ids; None if unknown.
        keeps_truncated: Whether a last document without its end token is kept.
        resume: Whether an interrupted run must be continued.
        overwrite: Whether existing output is replaced.
    """

    prefix: str
    rule: DocumentRule
    vocab_size: int | None = None
    keeps_truncated: bool = False
    resume: bool = False
    overwrite: bool = False

    def existing(self) -> list[str]:
        """The files that a new run would replace."""
        work = os.path.join(self.prefix + WORK_SUFFIX, RECORD)
        files = (*(self.prefix + suffix for suffix in SUFFIXES), work)
        return [path for path in files if os.path.exists(path)]


def import_tokens(
    source: ForeignTokens,
    target: ImportTarget,
    report: Callable[[ImportProgress], None] = ignore,
    warn: Callable[[Problem], None] = warn_of,
) -> ImportProgress:
    """Writes a pair.

    Args:
        source: The files.
        target: The output.
        report: Called with the counts after every block.
        warn: Takes warnings.

    Returns:
        The final counts.

    Raises:
        UserError: With all problems of the data; for output of another run.
        OSError: If a file cannot be read or written.
    """
    raise_if_any(_target_problems(source, target))
    existing = [] if target.overwrite else target.existing()
    refusal = [Problem("output-exists", existing=", ".join(existing))] if existing else []
    with ExitStack() as stack:
        work = ResumableOutput(
            target.prefix,
            _settings(source, target),
            dict.fromkeys(WORK_SUFFIXES, ""),
            target.resume or bool(existing),
            restart=True,
            completed=target.prefix + COMPLETED_SUFFIX,
            warn=warn,
        )
        enter_or_refuse(stack, work, refusal, must_resume=target.resume)
        run = _Run(source, target, work, warn)
        is_complete = work.finished
        if not is_complete:
            run.read(report)
        if not work.published:
            _publish(target.prefix, work)
    return run.progress(is_complete)


def _target_problems(source: ForeignTokens, target: ImportTarget) -> Iterator[Problem]:
    outputs = {os.path.realpath(target.prefix + suffix) for suffix in SUFFIXES}
    for file in source.files:
        if os.path.realpath(file.path) in outputs:
            yield Problem("output-is-an-input", given=file.path)
    rule = target.rule
    token = rule.end_token
    if token is not None:
        highest = int(np.iinfo(source.dtype).max)  # type: ignore[type-var]
        if target.vocab_size is not None:
            highest = min(highest, target.vocab_size - 1)
        if token > highest:
            yield Problem("foreign-end-token-too-high", token=token, highest=highest)
    elif not (rule.whole_files or source.boundaries):
        yield Problem("foreign-without-boundaries", path=source.files[0].path)


def _settings(source: ForeignTokens, target: ImportTarget) -> dict[str, Any]:
    """All that determines the output."""
    stamps = {}
    for file in source.files:
        status = os.stat(file.path)
        stamps[f"input {os.path.abspath(file.path)}"] = (
            f"{status.st_size} bytes, changed at {status.st_mtime_ns}"
        )
    return {
        "order of inputs": [os.path.abspath(file.path) for file in source.files],
        **stamps,
        "type of the ids": str(source.dtype),
        "notes": list(source.notes),
        "vocab_size": target.vocab_size,
        "end_token": target.rule.end_token,
        "end token before its document": target.rule.is_before,
        "document_per_file": target.rule.whole_files,
        "keep_truncated_document": target.keeps_truncated,
    }


def _publish(prefix: str, work: ResumableOutput) -> None:
    # An older index or tokenizer must never describe the new tokens.
    stale = {".bin": [prefix + ".idx", prefix + TOKENIZER_SUFFIX]}
    work.publish({suffix: prefix + suffix for suffix in SUFFIXES}, stale)


@dataclass
class _Place:
    """How far the files are read.

    Attributes:
        file: Number of the file.
        position: Position in it, for `ForeignFile.blocks`.
        tokens: Its tokens in front of the position.
        num_bytes: Bytes of all files that were read.
        marks: Ends of documents that were found.
        documents: Documents, without empty ones.
    """

    file: int = 0
    position: int = 0
    tokens: int = 0
    num_bytes: int = 0
    marks: int = 0
    documents: int = 0


@dataclass
class _Run:
    """A run from its start, or from where an interrupted run stopped."""

    source: ForeignTokens
    target: ImportTarget
    work: ResumableOutput
    warn: Callable[[Problem], None]
    place: _Place = field(init=False)
    document: OpenDocument = field(init=False)
    writer: TokenFileWriter | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        saved: dict[str, Any] = self.work.progress or {}
        self.place = _Place(**saved.get("place", {}))
        self.document = OpenDocument(**saved.get("document", {}))
        self._written = WriteCounts(*saved.get("written", ()))
        self._problems = list[Problem]()
        self._id_bytes = 0
        size = self.target.vocab_size
        self._highest = MAX_ID if size is None else size - 1
        limits = np.iinfo(self.source.dtype)  # type: ignore[type-var]
        self._is_signed = limits.min < 0
        self._has_limits = limits.min < 0 or limits.max > self._highest
        if size is not None:
            self._dtype = token_dtype(size)
        else:
            self._dtype = np.dtype("<u2" if limits.max < 1 << 16 else "<i4")

    def progress(self, is_complete: bool = False) -> ImportProgress:
        # By end tokens, nothing is in front of the first one; that is no document.
        empty = 0 if self.target.rule.is_by_token else self.document.empty
        return ImportProgress(
            self._written, self.place.num_bytes, empty, self._id_bytes, is_complete
        )

    def read(self, report: Callable[[ImportProgress], None]) -> None:
        """Reads and writes all tokens.

        Raises:
            UserError: With all problems; the work is removed.
        """
        files = [self.work.files[suffix].raw for suffix in WRITER_SUFFIXES]
        self.writer = TokenFileWriter(self.target.prefix, self._dtype, files, self._written)
        files_left = range(self.place.file, len(self.source.files))
        for index in files_left:
            file = self.source.files[index]
            with collect(self._problems):
                for block in file.blocks(self.place.position):
                    self._take(file, block)
                    report(self.progress())
                self._end_file(file, index + 1 == len(self.source.files))
            if self._problems:
                self.document.length = 0
            self.place.file = index + 1
            self.place.position = 0
            self.place.tokens = 0
            if len(self._problems) >= PROBLEMS_SHOWN:
                break
        if not self._problems:
            self._problems += self._end_problems()
        if self._problems:
            self.work.discard()
            raise UserError(*self._problems)
        self.writer.finish()
        self.work.commit(self._record(), finished=True)

    def _take(self, file: ForeignFile, block: Block) -> None:
        ends = self.target.rule.ends_in(block)
        if self._has_limits:
            self._check(file, block, ends)
        self.place.marks += len(ends)
        before = self.document.length
        documents = self.document.add(len(block.tokens), ends)
        self.place.documents += len(documents.sequences)
        if self.place.tokens == 0 and self.target.rule.is_before:
            self._check_begin(file, block, before)
        if not self._problems:
            assert self.writer is not None
            self.writer.add_stream(self._cast(block.tokens), *documents)
            self._written = self.writer.written
        self.place.position = block.position
        self.place.tokens += len(block.tokens)
        self.place.num_bytes += block.num_bytes
        self._id_bytes += block.tokens.nbytes
        if not self._problems and self.work.is_commit_due:
            self.work.commit(self._record())

    def _cast(self, tokens: Tokens) -> Tokens:
        """Ids in the type of the output, whose range they are checked to fit."""
        if tokens.dtype.itemsize == self._dtype.itemsize:
            return tokens.view(self._dtype)
        return tokens.astype(self._dtype)

    def _check(self, file: ForeignFile, block: Block, ends: Any) -> None:
        """Adds the problem of ids outside the vocabulary.

        Raises:
            UserError: With the problem, and the number of such ids in the block.
        """
        tokens = block.tokens
        if not len(tokens):
            return
        low = int(tokens.min()) if self._is_signed else 0  # type: ignore[type-var]
        high = int(tokens.max())  # type: ignore[type-var]
        if low >= 0 and high <= self._highest:
            return
        outside = np.flatnonzero((tokens < 0) | (tokens > self._highest))  # type: ignore[operator]
        at = int(outside[0])
        token = self.place.tokens + at
        document = self.place.documents + int(np.searchsorted(ends, at, side="right"))
        byte = file.byte_of(token)
        raise user_error(
            "foreign-ids-outside",
            path=file.path,
            token=int(tokens[at]),
            at=token,
            byte="" if byte is None else f", byte {byte}",
            document=document,
            last=self._highest,
            low=low,
            high=high,
        )

    def _check_begin(self, file: ForeignFile, block: Block, before: int) -> None:
        """Warns of a first file that begins inside a document."""
        token = self.target.rule.end_token
        if before == 0 and len(block.tokens) and int(block.tokens[0]) != token:
            self.warn(Problem("foreign-begins-inside", path=file.path, token=token))

    def _end_file(self, file: ForeignFile, is_last: bool) -> None:
        """Ends the open document, unless it may go on in the next file.

        Raises:
            UserError: If it has no end token and must have one.
        """
        rule = self.target.rule
        if not self.document.length or (
            rule.is_by_token and self.source.joins_files and not is_last
        ):
            return
        if rule.is_by_token and not rule.is_before:
            values = {
                "path": file.path,
                "token": rule.end_token,
                "length": self.document.length,
                "begin": self.place.tokens - self.document.length,
                "byte": file.byte_of(max(0, self.place.tokens - self.document.length)),
            }
            if not (self.source.drops_tail or self.target.keeps_truncated):
                raise user_error("foreign-document-truncated", **values)
            self.warn(Problem("foreign-tail-kept", **values))
        documents = self.document.add(0, np.zeros(1, np.int64))
        self.place.documents += len(documents.sequences)
        if not self._problems:
            assert self.writer is not None
            self.writer.add_stream(np.zeros(0, self._dtype), *documents)
            self._written = self.writer.written

    def _end_problems(self) -> Iterator[Problem]:
        rule = self.target.rule
        if not self._written.documents:
            yield Problem("foreign-without-documents", path=self.source.files[0].path)
        elif rule.is_by_token and not self.place.marks:
            path = self.source.files[0].path
            yield Problem("foreign-end-token-missing", path=path, token=rule.end_token)

    def _record(self) -> dict[str, Any]:
        return {
            "place": vars(self.place),
            "document": vars(self.document),
            "written": list(self._written),
        }
