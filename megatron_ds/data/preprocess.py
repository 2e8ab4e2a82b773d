"""JSON lines to token files: one reader, workers that parse and encode, one writer, in order.

The output is the same for any number of workers. Memory is flat: a few chunks per worker are under
way, whatever the size of the file. Knows the tokenizer protocol and the token files; not the
command line, torch or process groups.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed import IndexedWriter, token_dtype
from megatron_ds.data.workers import Workers
from megatron_ds.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 20
"""A chunk ends here even if it has fewer documents than asked for."""
LINE_BYTES = 1 << 30
"""A longer line is taken for a file of another kind: it would have to fit in memory many times."""
PROBLEMS_SHOWN = 20
KEYS_SHOWN = 8
LINES_CHECKED_AHEAD = 100_000
"""After a bad line, so many more are checked to report their problems together."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, what to write and how.

    keys: JSON keys; each gets a pair `<output_prefix>_<key>_document.bin/.idx`.
    chunk_size: documents that a worker gets at once. workers: processes that encode.
    """

    input: str
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    workers: int = 1
    chunk_size: int = 64

    def prefix(self, key: str) -> str:
        """The pair of a key, without .bin and .idx."""
        return f"{self.output_prefix}_{key}_document"

    def problems(self) -> Iterator[str]:
        """What is wrong before any work is done, in the user's words."""
        if os.path.isdir(self.input):
            yield f"--input {self.input}: is a folder, not a file"
        elif not os.path.isfile(self.input):
            yield f"--input {self.input}: there is no such file"
        elif not os.access(self.input, os.R_OK):
            yield f"--input {self.input}: cannot be read"
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
    """Counts so far. empty: texts without a token, which are not written."""

    documents: int = 0
    empty: int = 0
    tokens: int = 0
    input_bytes: int = 0


class _Chunk(NamedTuple):
    """Raw lines; first: the number of the first, from 1."""

    first: int
    lines: list[bytes]


class _Encoded(NamedTuple):
    """A chunk's tokens: for each key all documents back to back, and their lengths."""

    tokens: list[npt.NDArray[np.generic]]
    lengths: list[npt.NDArray[np.int64]]
    documents: int


class _Document(NamedTuple):
    """One line's texts, one per key; number: the line's, from 1."""

    number: int
    texts: list[str]


@dataclass(frozen=True)
class _Encoder:
    """Lines to tokens: the work of one worker."""

    tokenizer: Tokenizer
    options: PreprocessOptions

    def __call__(self, chunk: _Chunk) -> _Encoded | list[str]:
        """The chunk's tokens, or what is wrong with its lines."""
        documents, problems = _parse(chunk, self.options)
        if problems:
            return problems
        columns = [[doc.texts[i] for doc in documents] for i in range(len(self.options.keys))]
        try:
            encoded = [self.tokenizer.encode_batch(texts) for texts in columns]
        except ValueError:
            return list(self._encoding_problems(documents))
        pairs = [self._flatten(ids) for ids in encoded]
        return _Encoded([pair[0] for pair in pairs], [pair[1] for pair in pairs], len(documents))

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

    def _encoding_problems(self, documents: list[_Document]) -> Iterator[str]:
        for number, texts in documents:
            for text in texts:
                try:
                    self.tokenizer.encode(text)
                except ValueError as error:
                    yield f"{self.options.input}:{number}: {error}"


def preprocess(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Write the token files of a jsonl file; returns the final counts.

    report: called with the counts after every chunk. A text without tokens is left out, as in
    bigscience/Megatron-DeepSpeed; blank lines are passed over. Raises ValueError, naming file and
    line, for lines that are not JSON objects with the keys; then no output pair is left.
    """
    problems = list(options.problems())
    if problems:
        raise ValueError("\n".join(problems))
    progress = Progress()
    with ExitStack() as stack:
        workers = stack.enter_context(
            Workers(_Encoder(tokenizer, options), options.workers)  # first: they inherit no files
        )
        file = stack.enter_context(open(options.input, "rb"))
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [
            stack.enter_context(IndexedWriter(options.prefix(key), dtype)) for key in options.keys
        ]
        chunks = _read_chunks(file, options)
        for encoded in workers.map(chunks):
            if not isinstance(encoded, _Encoded):
                raise ValueError(_all_problems(encoded, workers.drain(), chunks, options))
            for writer, tokens, lengths in zip(writers, *encoded[:2], strict=True):
                writer.add_documents(tokens, lengths)
            progress = _advance(progress, encoded, file.tell())
            report(progress)
        if not progress.documents:
            raise ValueError(f"--input {options.input}: has no documents")
    return progress


def _advance(progress: Progress, encoded: _Encoded, input_bytes: int) -> Progress:
    written = sum(len(lengths) for lengths in encoded.lengths)
    return Progress(
        documents=progress.documents + encoded.documents,
        empty=progress.empty + encoded.documents * len(encoded.lengths) - written,
        tokens=progress.tokens + sum(len(tokens) for tokens in encoded.tokens),
        input_bytes=input_bytes,
    )


def _read_chunks(file: BinaryIO, options: PreprocessOptions) -> Iterator[_Chunk]:
    lines: list[bytes] = []
    first, size = 1, 0
    for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), 1):
        if len(line) > LINE_BYTES:
            raise ValueError(
                f"{options.input}:{number}: the line is longer than {LINE_BYTES >> 20} MiB: is "
                "this a file of JSON lines?"
            )
        lines.append(line)
        size += len(line)
        if len(lines) >= options.chunk_size or size >= CHUNK_BYTES:
            yield _Chunk(first, lines)
            lines, size, first = [], 0, number + 1
    if lines:
        yield _Chunk(first, lines)


def _parse(chunk: _Chunk, options: PreprocessOptions) -> tuple[list[_Document], list[str]]:
    documents, problems = [], []
    for number, line in enumerate(chunk.lines, chunk.first):
        if line.isspace():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            problems.append(f"{options.input}:{number}: not JSON: {error}")
            continue
        except RecursionError:
            problems.append(f"{options.input}:{number}: not read: it is nested too deeply")
            continue
        found = list(_line_problems(value, options.keys))
        problems += [f"{options.input}:{number}: {problem}" for problem in found]
        if not found:
            documents.append(_Document(number, [value[key] for key in options.keys]))
    return documents, problems


def _line_problems(value: object, keys: tuple[str, ...]) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"must be a JSON object, not {type(value).__name__}"
        return
    for key in keys:
        if key not in value:
            shown = [repr(name[:40]) for name in itertools.islice(value, KEYS_SHOWN)]
            more = ", ..." if len(value) > KEYS_SHOWN else ""
            yield f"has no key {key!r} (it has {', '.join(shown) or 'none'}{more})"
        elif not isinstance(value[key], str):
            yield f"{key!r} must be text, not {type(value[key]).__name__}"
        elif not value[key].isascii() and any("\ud800" <= c <= "\udfff" for c in value[key]):
            yield f"{key!r} holds half of a surrogate pair, which is no text"


def _all_problems(
    first: list[str],
    under_way: Iterable[_Encoded | list[str]],
    rest: Iterator[_Chunk],
    options: PreprocessOptions,
) -> str:
    """The first problems and those of the lines that follow, as far as they are looked at."""
    problems = list(first)
    for answer in under_way:
        problems += answer if isinstance(answer, list) else []
    checked = 0
    for chunk in rest:
        if len(problems) > PROBLEMS_SHOWN or checked >= LINES_CHECKED_AHEAD:
            problems.append(f"(lines from {chunk.first} on were not looked at)")
            break
        problems += _parse(chunk, options)[1]
        checked += len(chunk.lines)
    hidden = len(problems) - PROBLEMS_SHOWN - 1
    if hidden > 0:
        problems[PROBLEMS_SHOWN:-1] = [f"(and {hidden} more)"]
    return "\n".join(problems)
