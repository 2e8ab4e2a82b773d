"""Documents to token files: one reader, workers that parse and encode, one writer, in order.

The output is the same for any number of workers. Memory is flat: a few chunks per worker are under
way, whatever the size of the input. What gives no document is left out, counted, and written to a
file of its own. Knows the tokenizer protocol and the token files; how inputs are read stands in
`sources.py`. Knows no command line, torch or process groups.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TextIO

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed import IndexedWriter, token_dtype
from megatron_ds.data.sources import (
    INVALID_TEXT,
    QUARANTINE,
    TOO_LONG,
    Inputs,
    Item,
    Reader,
    Unreadable,
)
from megatron_ds.data.workers import Workers
from megatron_ds.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 20
"""A chunk ends here even if it has fewer documents than asked for."""
PROBLEMS_SHOWN = 20
KEYS_SHOWN = 8
DOCUMENTS_CHECKED_AHEAD = 100_000
"""With `strict`, after a bad line, so many more are checked to report their problems together."""

BROKEN_JSON = "broken JSON"
MISSING_KEY = "missing key"
WRONG_TYPE = "wrong type"
EMPTY_TEXT = "empty text"
REFUSED_TEXT = "refused by the tokenizer"


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, what to write and how.

    keys: names of the texts; each gets a pair `<output_prefix>_<key>_document.bin/.idx`. `a.b` is
    the field b of a, where there is no field of that very name. strict: stop at what gives no
    document instead of leaving it out. chunk_size: documents that a worker gets at once. workers:
    processes that encode.
    """

    inputs: Inputs
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    strict: bool = False
    workers: int = 1
    chunk_size: int = 64

    def prefix(self, key: str) -> str:
        """The pair of a key, without .bin and .idx."""
        return f"{self.output_prefix}_{key}_document"

    @property
    def quarantine(self) -> str:
        """The file that lists what was left out, a JSON object per line."""
        return self.output_prefix + QUARANTINE

    def problems(self) -> Iterator[str]:
        """What is wrong before any work is done, in the user's words."""
        yield from self.inputs.problems()
        folder = os.path.dirname(self.output_prefix) or "."
        if not os.path.isdir(folder):
            yield f"--output-prefix {self.output_prefix}: there is no folder {folder}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            yield f"--output-prefix {self.output_prefix}: the folder {folder} cannot be written"
        if not self.keys:
            yield "--json-keys: at least one key is needed"
        for key in self.keys:
            if "/" in key or "\0" in key:
                yield f"--json-keys {key!r}: cannot be part of the output files' names"
        if len(set(self.keys)) != len(self.keys):
            yield f"--json-keys {' '.join(self.keys)}: a key is given twice"
        for name, value in (("--workers", self.workers), ("--chunk-size", self.chunk_size)):
            if value < 1:
                yield f"{name} {value}: must be at least 1"


@dataclass(frozen=True)
class Progress:
    """Counts so far.

    documents: those that were read, whether or not they have tokens. text_bytes: of their texts.
    input_bytes: of the files, as they are stored. dropped: what was left out, by reason.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)


class Bad(NamedTuple):
    """What gives no document, and why. content: the line or the fields, as text."""

    file: str
    line: int
    reason: str
    words: str
    content: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words}"


class _Chunk(NamedTuple):
    """Items by column, which travel to a worker much faster than one by one."""

    files: list[str]
    lines: list[int]
    values: list[bytes | dict[str, Any] | Unreadable]

    def items(self) -> list[Item]:
        return list(map(Item, *self))


class _Encoded(NamedTuple):
    """A chunk's tokens: for each key all documents back to back, and their lengths."""

    tokens: list[npt.NDArray[np.generic]]
    lengths: list[npt.NDArray[np.int64]]
    documents: int
    text_bytes: int
    bad: list[Bad]


class _Document(NamedTuple):
    """The texts of one item, one per key."""

    item: Item
    texts: list[str]


@dataclass(frozen=True)
class _Encoder:
    """Items to tokens: the work of one worker."""

    tokenizer: Tokenizer
    options: PreprocessOptions

    def __call__(self, chunk: _Chunk) -> _Encoded:
        items = chunk.items()
        documents, bad = _parse(items, self.options)
        try:
            columns = self._encode(documents)
        except ValueError:  # says neither which text nor whether it is the only one
            refused = {at: found for at, found in enumerate(map(self._refused, documents)) if found}
            bad += refused.values()
            documents = [one for at, one in enumerate(documents) if at not in refused]
            columns = self._encode(documents)
        bad += [
            _bad(document.item, EMPTY_TEXT, f"{key!r} has no tokens")
            for key, column in zip(self.options.keys, columns, strict=True)
            for document, ids in zip(documents, column, strict=True)
            if not ids
        ]
        order = {item[:2]: at for at, item in enumerate(items)} if bad else {}
        pairs = [self._flatten(column) for column in columns]
        return _Encoded(
            [pair[0] for pair in pairs],
            [pair[1] for pair in pairs],
            len(documents),
            sum(_size(text) for document in documents for text in document.texts),
            sorted(bad, key=lambda one: order[one.file, one.line]),
        )

    def _encode(self, documents: list[_Document]) -> list[list[list[int]]]:
        return [
            self.tokenizer.encode_batch([document.texts[at] for document in documents])
            for at in range(len(self.options.keys))
        ]

    def _refused(self, document: _Document) -> Bad | None:
        try:
            for text in document.texts:
                self.tokenizer.encode(text)
        except ValueError as error:
            return _bad(document.item, REFUSED_TEXT, str(error))
        return None

    def _flatten(
        self, encoded: list[list[int]]
    ) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int64]]:
        kept = [ids for ids in encoded if ids]
        if self.options.append_eod:
            for ids in kept:
                ids.append(self.tokenizer.eod)
        lengths = np.array([len(ids) for ids in kept], dtype=np.int64)
        dtype = token_dtype(self.tokenizer.vocab_size)
        return np.array(list(itertools.chain.from_iterable(kept)), dtype=dtype), lengths


class _Quarantine:
    """The file of what was left out: made when there is something, named when all is done.

    A context manager; leaving it by an exception removes the file, and finishing without an entry
    removes that of an earlier run, which this one has replaced.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._partial = path + ".partial"
        self._file: TextIO | None = None
        self._open = ExitStack()

    def add(self, bad: Bad) -> None:
        if self._file is None:
            opened = open(self._partial, "w", encoding="ascii")  # noqa: SIM115
            self._file = self._open.enter_context(opened)
        entry = {"file": bad.file, "line": bad.line, "reason": bad.reason}
        self._file.write(json.dumps({**entry, "message": bad.words, "content": bad.content}) + "\n")

    def __enter__(self) -> _Quarantine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._open.close()
        except OSError:  # what it still had to write found no room
            Path(self._partial).unlink(missing_ok=True)
            raise
        if kind is not None:
            if self._file is not None:  # else it is another process's, which writes this prefix
                Path(self._partial).unlink(missing_ok=True)
        elif self._file is not None:
            os.replace(self._partial, self._path)
        else:
            Path(self._path).unlink(missing_ok=True)


def preprocess(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Write the token files of the inputs; returns the final counts.

    report: called with the counts after every chunk. A text without tokens is left out, as in
    bigscience/Megatron-DeepSpeed; blank lines are passed over; what else gives no document is left
    out and written to `options.quarantine`. Raises ValueError, naming file and line, if `strict`
    asks for it or nothing is left, and for inputs that cannot be read; then no output is left.
    """
    problems = list(options.problems())
    if problems:
        raise ValueError("\n".join(problems))
    progress = Progress()
    first: Bad | None = None
    with ExitStack() as stack:
        workers = stack.enter_context(
            Workers(_Encoder(tokenizer, options), options.workers)  # first: they inherit no files
        )
        reader = Reader(options.inputs, options.keys)
        dtype = token_dtype(tokenizer.vocab_size)
        made_by = tokenizer.identity.to_json()
        quarantine = stack.enter_context(_Quarantine(options.quarantine))
        writers = [
            stack.enter_context(IndexedWriter(options.prefix(key), dtype, made_by))
            for key in options.keys
        ]
        chunks = _chunks(reader, options)
        for encoded in workers.map(chunks):
            if encoded.bad and options.strict:
                raise ValueError(_all_problems(encoded.bad, workers.drain(), chunks, options))
            for bad in encoded.bad:
                first = first or bad
                quarantine.add(bad)
            for writer, tokens, lengths in zip(writers, *encoded[:2], strict=True):
                writer.add_documents(tokens, lengths)
            progress = _advance(progress, encoded, reader.position)
            report(progress)
        if not progress.documents:
            left_out = f"; left out were {dropped(progress)}, the first {first}" if first else ""
            raise ValueError(f"{options.inputs.name}: has no documents{left_out}")
        for writer in writers:  # before the first gets its name: all or none
            writer.complete()
    return progress


def dropped(progress: Progress) -> str:
    """What was left out, in words: `3 broken JSON, 1 empty text`."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(progress.dropped.items()))


def _advance(progress: Progress, encoded: _Encoded, input_bytes: int) -> Progress:
    return Progress(
        documents=progress.documents + encoded.documents,
        tokens=progress.tokens + sum(len(tokens) for tokens in encoded.tokens),
        text_bytes=progress.text_bytes + encoded.text_bytes,
        input_bytes=input_bytes,
        dropped=Counter(progress.dropped) + Counter(bad.reason for bad in encoded.bad),
    )


def _chunks(reader: Iterable[Item], options: PreprocessOptions) -> Iterator[_Chunk]:
    chunk, size = _Chunk([], [], []), 0
    for file, line, value in reader:
        chunk.files.append(file)
        chunk.lines.append(line)
        chunk.values.append(value)
        size += len(value) if isinstance(value, bytes) else _content_size(value)
        if len(chunk.lines) >= options.chunk_size or size >= CHUNK_BYTES:
            yield chunk
            chunk, size = _Chunk([], [], []), 0
    if chunk.lines:
        yield chunk


def _content_size(value: dict[str, Any] | Unreadable) -> int:
    if isinstance(value, Unreadable):
        return len(value.content)
    return sum(len(text) for text in value.values() if isinstance(text, str))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _parse(items: list[Item], options: PreprocessOptions) -> tuple[list[_Document], list[Bad]]:
    documents: list[_Document] = []
    problems: list[Bad] = []
    for item in items:
        found = texts_of(item, options)
        if isinstance(found, Bad):
            problems.append(found)
        else:
            documents.append(_Document(item, found))
    return documents, problems


def texts_of(item: Item, options: PreprocessOptions) -> list[str] | Bad:
    value: object = item.value
    if isinstance(value, Unreadable):
        return _bad(item, value.reason, value.words)
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except UnicodeDecodeError as error:
            return _bad(item, INVALID_TEXT, f"not JSON: {error}")
        except ValueError as error:
            return _bad(item, BROKEN_JSON, f"not JSON: {error}")
        except RecursionError:
            return _bad(item, BROKEN_JSON, "not read: it is nested too deeply")
    if not isinstance(value, dict):
        return _bad(item, WRONG_TYPE, f"must be a JSON object, not {type(value).__name__}")
    texts: list[str] = []
    for key in options.keys:
        try:
            text = _field(value, key)
        except KeyError:
            shown = [repr(name[:40]) for name in itertools.islice(value, KEYS_SHOWN)]
            more = ", ..." if len(value) > KEYS_SHOWN else ""
            has = f"(it has {', '.join(shown) or 'none'}{more})"
            return _bad(item, MISSING_KEY, f"has no key {key!r} {has}")
        if not isinstance(text, str):
            return _bad(item, WRONG_TYPE, f"{key!r} must be text, not {type(text).__name__}")
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            words = f"{key!r} holds half of a surrogate pair, which is no text"
            if not isinstance(item.value, bytes):  # that is how the reader marks such bytes
                words = f"{key!r} is no UTF-8"
            return _bad(item, INVALID_TEXT, words)
        if len(text) > options.inputs.max_document_bytes // 4:
            size, limit = _size(text), options.inputs.max_document_bytes
            if size > limit:
                words = f"{key!r} has {size} bytes, more than {limit} (--max-document-bytes)"
                return _bad(item, TOO_LONG, words)
        texts.append(text)
    return texts


def _field(value: dict[str, Any], key: str) -> Any:
    """The value of a key, or of `a.b` the field b of a. Raises KeyError if there is none."""
    if key in value or "." not in key:
        return value[key]
    inner: Any = value
    for part in key.split("."):
        if not isinstance(inner, dict):
            raise KeyError(key)
        inner = inner[part]
    return inner


def _bad(item: Item, reason: str, words: str) -> Bad:
    if isinstance(item.value, bytes):
        content = item.value.rstrip(b"\r\n").decode("utf-8", "surrogateescape")
    elif isinstance(item.value, Unreadable):
        content = item.value.content
    else:
        content = json.dumps(item.value, default=str)
    return Bad(item.file, item.line, reason, words, content)


def _all_problems(
    first: list[Bad],
    under_way: Iterable[_Encoded],
    rest: Iterator[_Chunk],
    options: PreprocessOptions,
) -> str:
    """The first problems and those of the documents that follow, as far as they are looked at."""
    problems = [str(bad) for bad in first]
    for answer in under_way:
        problems += map(str, answer.bad)
    checked = 0
    for chunk in rest:
        if len(problems) > PROBLEMS_SHOWN or checked >= DOCUMENTS_CHECKED_AHEAD:
            problems.append(f"(from {chunk.files[0]}:{chunk.lines[0]} on nothing was looked at)")
            break
        problems += map(str, _parse(chunk.items(), options)[1])
        checked += len(chunk.lines)
    hidden = len(problems) - PROBLEMS_SHOWN - 1
    if hidden > 0:
        problems[PROBLEMS_SHOWN:-1] = [f"(and {hidden} more)"]
    return "\n".join(problems)
