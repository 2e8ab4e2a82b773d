"""Documents to token files: one reader, workers that parse and encode, one writer, in order.

The output is the same for any number of workers. Memory is flat: a few chunks per worker are under
way, whatever the size of the input. What gives no document is left out, counted, and written to a
file of its own. Knows the order of the work; what a document is stands in `documents.py`, how it
becomes tokens in `encoder.py`. Knows no command line, torch or process groups.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

from megatron_ds.data.indexed_dataset import token_dtype
from megatron_ds.data.tokenizer_metadata import metadata_json
from megatron_ds.preprocess.document_readers import (
    DocumentReader,
    FileStamp,
    InputSpec,
    ReadPosition,
    UnreadableDocument,
)
from megatron_ds.preprocess.encoder import Chunk, EncodedChunk, Encoder
from megatron_ds.preprocess.output_files import OutputPaths, OutputWriter, WritePlan, publish_all
from megatron_ds.preprocess.parsing import RejectedDocument, TextFields, parse
from megatron_ds.preprocess.resume import ResumePoint, find_resume_point
from megatron_ds.preprocess.run_record import RUNNING, SEALED
from megatron_ds.preprocess.sentence_splitter import Splitter
from megatron_ds.preprocess.stage_timer import StageTimer
from megatron_ds.preprocess.worker_pool import Workers
from megatron_ds.tokenizer import Tokenizer

CHUNK_BYTES = 1 << 20
"""A chunk ends here even if it has fewer documents than asked for."""
IRRELEVANT_OPTIONS = {
    "inputs",
    "output_prefix",
    "splitter",
    "strict",
    "workers",
    "chunk_size",
    "resume",
}
"""Options that the output does not depend on, or that are looked at elsewhere."""
PROBLEMS_SHOWN = 20
DOCUMENTS_CHECKED_AHEAD = 100_000
"""With `strict`, after a bad line, so many more are checked to report their problems together."""


@dataclass(frozen=True)
class PreprocessOptions:
    """What to read, what to write and how.

    keys: names of the texts; each gets a pair `<output_prefix>_<key>_document.bin/.idx`, and with a
    splitter, which makes a sequence of each sentence, `_sentence`. `a.b` is the field b of a, where
    there is no field of that very name. strict: stop at what gives no document instead of leaving
    it out. chunk_size: documents that a worker gets at once. workers: processes that encode.
    resume: go on where an interrupted run of this prefix stopped.
    """

    inputs: InputSpec
    output_prefix: str
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    strict: bool = False
    workers: int = 1
    chunk_size: int = 512
    splitter: Splitter | None = None
    resume: bool = False

    def prefix(self, key: str) -> str:
        """The pair of a key, without .bin and .idx."""
        level = "document" if self.splitter is None else "sentence"
        return f"{self.output_prefix}_{key}_{level}"

    @property
    def names(self) -> OutputPaths:
        """Where everything is written."""
        return OutputPaths(self.output_prefix, tuple(map(self.prefix, self.keys)))

    @property
    def quarantine(self) -> str:
        """The file that lists what was left out, a JSON object per line."""
        return self.names.quarantine

    @property
    def wanted(self) -> TextFields:
        return TextFields(self.keys, self.inputs.max_document_bytes)

    def settings(self, made_by: bytes) -> dict[str, Any]:
        """All that the output depends on, but for the files that are read. made_by: what the file
        beside the pairs says."""
        ours = {name: value for name, value in vars(self).items() if name not in IRRELEVANT_OPTIONS}
        inputs = {name: value for name, value in vars(self.inputs).items() if name != "paths"}
        found = {**ours, **inputs, "made_by": made_by.decode()}
        return cast("dict[str, Any]", json.loads(json.dumps(found)))

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
        if self.resume:
            for path in self.inputs.unseekable_paths():
                yield (
                    f"--resume: --input {path} can be read only once: what an interrupted run read "
                    "of it is gone; begin anew without --resume"
                )


@dataclass(frozen=True)
class Progress:
    """Counts so far.

    documents: those that were read, whether or not they have tokens. text_bytes: of their texts.
    input_bytes: of the files, as they are stored. dropped: what was left out, by reason. seconds:
    what the time went to; those of parsing and encoding are the workers', added up. before: what of
    it an interrupted run had done.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    input_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    before: Progress | None = field(default=None, compare=False)


def preprocess(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = lambda progress: None,
    say: Callable[[str], None] = warnings.warn,
) -> Progress:
    """Write the token files of the inputs; returns the final counts.

    report: called with the counts after every chunk. say: gets, in words, where the run begins, if
    that is not clear. A text without tokens is left out, as in bigscience/Megatron-DeepSpeed; blank
    lines are passed over; what else gives no document is left out and written to
    `options.quarantine`. Raises ValueError, naming file and line, if `strict` asks for it or
    nothing is left, for inputs that cannot be read, and for an interrupted run that cannot go on.
    After an error there is no output, but for what a run with `resume` goes on from; then a note of
    the error says so.
    """
    problems = list(options.problems())
    if problems:
        raise ValueError("\n".join(problems))
    dtype = token_dtype(tokenizer.vocab_size)
    sentences = options.splitter.description if options.splitter else None
    made_by = metadata_json(tokenizer.fingerprint, sentences)
    settings = options.settings(made_by)
    start = find_resume_point(
        options.names, settings, dtype.itemsize, options.inputs, options.resume, say
    )
    progress = _progress_at(start)
    if options.strict and progress.dropped:
        raise ValueError(
            f"--resume --strict: the interrupted run has left out {dropped(progress)}; go on "
            "without --strict, or begin anew without --resume"
        )
    if start.record is not None:
        if start.record.state != RUNNING:
            if start.record.state == SEALED:
                publish_all(options.names, start.record)
            say(f"{options.output_prefix} is complete: nothing is left to do")
            return dataclasses.replace(progress, input_bytes=options.inputs.total_bytes() or 0)
        say(f"going on after {progress.documents} documents")
    plan = WritePlan(
        dtype,
        made_by,
        settings,
        start.snapshot,
        start.record,
        not options.inputs.unseekable_paths(),
    )
    first: RejectedDocument | None = None
    with ExitStack() as stack:
        encoder = Encoder(tokenizer, options.wanted, options.append_eod, options.splitter)
        workers = stack.enter_context(Workers(encoder, options.workers))  # they inherit no files
        outputs = stack.enter_context(OutputWriter(options.names, plan))
        reader = DocumentReader(options.inputs, options.keys, start.snapshot.place)
        spent = StageTimer()
        steps: deque[tuple[ReadPosition, list[FileStamp]]] = deque()
        chunks = spent.timed_iter("reading", _chunks(reader, options, steps))
        for encoded in spent.timed_iter("waiting", workers.map(chunks)):
            if encoded.bad and options.strict:
                raise ValueError(
                    _all_problems(encoded.bad, workers.finish_pending(), chunks, options)
                )
            first = first or next(iter(encoded.bad), None)
            for stage, seconds in encoded.seconds.items():
                spent.add(stage, seconds)
            with spent.stage("writing"):
                outputs.add(encoded.columns, encoded.bad)
                progress = _advance(progress, encoded, reader.position, spent)
                _reached(outputs, *steps.popleft(), progress)
            report(progress)
        if not progress.documents:
            outputs.discard_record()
            left_out = f"; left out were {dropped(progress)}, the first {first}" if first else ""
            raise ValueError(f"{options.inputs.name}: has no documents{left_out}")
        with spent.stage("writing"):
            _reached(outputs, reader.end, reader.take_new_stamps(), progress)
            outputs.complete()
    return dataclasses.replace(progress, input_bytes=reader.position, seconds=spent.seconds)


def _progress_at(start: ResumePoint) -> Progress:
    at = start.snapshot
    progress = Progress(at.documents, at.tokens, at.text_bytes, dropped=at.dropped)
    return progress if start.record is None else dataclasses.replace(progress, before=progress)


def _reached(
    outputs: OutputWriter, place: ReadPosition, begun: list[FileStamp], progress: Progress
) -> None:
    outputs.checkpoint_progress(
        place, begun, progress.documents, progress.tokens, progress.text_bytes, progress.dropped
    )


def dropped(progress: Progress) -> str:
    """What was left out, in words: `3 broken JSON, 1 empty text`."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(progress.dropped.items()))


def _advance(
    progress: Progress, encoded: EncodedChunk, input_bytes: int, spent: StageTimer
) -> Progress:
    return Progress(
        documents=progress.documents + encoded.documents,
        tokens=progress.tokens + sum(len(column.tokens) for column in encoded.columns),
        text_bytes=progress.text_bytes + encoded.text_bytes,
        input_bytes=input_bytes,
        dropped=Counter(progress.dropped) + Counter(bad.reason for bad in encoded.bad),
        seconds=spent.seconds,
        before=progress.before,
    )


def _chunks(
    reader: DocumentReader,
    options: PreprocessOptions,
    steps: deque[tuple[ReadPosition, list[FileStamp]]],
) -> Iterator[Chunk]:
    """The documents in chunks. steps: gets for each where its end is, and the files begun in it."""
    chunk, size = Chunk([], [], []), 0
    for file, line, value in reader:
        chunk.files.append(file)
        chunk.lines.append(line)
        chunk.values.append(value)
        size += len(value) if isinstance(value, bytes) else _content_size(value)
        if len(chunk.lines) >= options.chunk_size or size >= CHUNK_BYTES:
            steps.append((reader.place(line), reader.take_new_stamps()))
            yield chunk
            chunk, size = Chunk([], [], []), 0
    if chunk.lines:
        steps.append((reader.end, reader.take_new_stamps()))
        yield chunk


def _content_size(value: dict[str, Any] | UnreadableDocument) -> int:
    if isinstance(value, UnreadableDocument):
        return len(value.content)
    return sum(len(text) for text in value.values() if isinstance(text, str))


def _all_problems(
    first: list[RejectedDocument],
    under_way: Iterable[EncodedChunk],
    rest: Iterator[Chunk],
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
        problems += map(str, parse(chunk.items(), options.wanted)[1])
        checked += len(chunk.lines)
    hidden = len(problems) - PROBLEMS_SHOWN - 1
    if hidden > 0:
        problems[PROBLEMS_SHOWN:-1] = [f"(and {hidden} more)"]
    return "\n".join(problems)
