"""Cleaning: one reader, worker processes that apply the stages, one writer, in order.

The output keeps the order of the input and is the same for any number of workers and any
interruption. Memory is flat except for the keys of kept documents. Knows no command line.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.report import draw, write_numbers
from megatron_ds.cleaning.stages import (
    DocumentTrace,
    Dropped,
    NeedsUniqueKey,
    SeenKeys,
    Stage,
    TextChanged,
    run_stages,
)
from megatron_ds.cleaning.stats import Counts
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.fileio.resumable import ResumableOutput, pack_record, read_records
from megatron_ds.preprocess.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.formats import RawDocument, content_size
from megatron_ds.preprocess.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.preprocess.worker_pool import Workers

CHUNK_BYTES = 1 << 19
CHUNK_DOCUMENTS = 64
"""Limits of a chunk, which a worker gets at once."""
OUTPUT, DROPPED, QUARANTINED = "output", "dropped", "quarantine"
PICTURE, NUMBERS = "report.png", "report.json"
"""Names in the work folder."""
BOM = b"\xef\xbb\xbf"


class Progress(NamedTuple):
    """Counts so far, and bytes read of the input files as stored."""

    counts: Counts
    input_bytes: int


class TracedDocument(NamedTuple):
    """Outcome of a document at the stages.

    Attributes:
        file: Name of the file.
        line: Line or row, from 1.
        length: Characters of the text as read.
        has_url: Whether it has an address.
        trace: Outcomes by stage.
    """

    file: str
    line: int
    length: int
    has_url: bool
    trace: DocumentTrace


@dataclass(frozen=True)
class Cleaner:
    """Applies the stages, in a worker. `key` is None if no stage reads the text."""

    stages: Sequence[Stage]
    key: str | None
    url_key: str
    max_document_bytes: int
    keep_dropped: bool

    def __call__(self, items: list[RawDocument]) -> list[TracedDocument | RejectedDocument]:
        return [self._answer(item) for item in items]

    def _answer(self, item: RawDocument) -> TracedDocument | RejectedDocument:
        keys = () if self.key is None else (self.key,)
        texts = texts_of(item, TextFields(keys, self.max_document_bytes))
        if isinstance(texts, RejectedDocument):
            return texts
        text = texts[0] if texts else ""
        url = self._url(item)
        line = partial(_line, item, self.key, text)
        journey = run_stages(text, url, self.stages, line, self.keep_dropped)
        return TracedDocument(item.file, item.line, len(text), url is not None, journey)

    def _url(self, item: RawDocument) -> str | None:
        if not any(stage.name == "url" for stage in self.stages):
            return None
        found = texts_of(item, TextFields((self.url_key,), self.max_document_bytes))
        return None if isinstance(found, RejectedDocument) or not found[0] else found[0]


def _line(item: RawDocument, key: str | None, before: str, text: str) -> bytes:
    """The document as a JSON line, byte for byte as read if the text is unchanged."""
    value: Any = item.value
    if isinstance(value, bytes):
        if text == before and b"\0" not in value:  # else it may be UTF-16
            return value.removeprefix(BOM).strip() + b"\n"
        value = json.loads(value)
    if key is not None:
        path = (key,) if key in value else key.split(".")
        value = _replaced(value, path, text)
    try:
        return (json.dumps(value, ensure_ascii=False, default=str) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field
        return (json.dumps(value, default=str) + "\n").encode()


def _replaced(value: dict[str, Any], path: Sequence[str], text: str) -> dict[str, Any]:
    inner = text if len(path) == 1 else _replaced(value[path[0]], path[1:], text)
    return {**value, path[0]: inner}


class ChunkEnd(NamedTuple):
    """Position after a chunk, and whether a part ends there."""

    place: ReadPosition
    ends_part: bool
    input_bytes: int


@dataclass
class ChunkedInput:
    """Documents in chunks, with the end of each. Parts end at the same documents in every run."""

    reader: DocumentReader
    part_bytes: int
    marks: deque[ChunkEnd] = field(default_factory=deque)

    def chunks(self) -> Iterator[list[RawDocument]]:
        chunk: list[RawDocument] = []
        size = part = 0
        for item in self.reader:
            chunk.append(item)
            length = content_size(item.value)
            size += length
            part += length
            ends_part = part >= self.part_bytes
            if ends_part or size >= CHUNK_BYTES or len(chunk) >= CHUNK_DOCUMENTS:
                yield self._marked(chunk, self.reader.position(item.line), ends_part)
                chunk, size, part = [], 0, 0 if ends_part else part
        if chunk:
            yield self._marked(chunk, self.reader.end, False)

    def _marked(
        self, chunk: list[RawDocument], place: ReadPosition, ends_part: bool
    ) -> list[RawDocument]:
        self.marks.append(ChunkEnd(place, ends_part, self.reader.bytes_read))
        return chunk


@dataclass
class ResultWriter:
    """Decides requested keys in order, writes kept and dropped documents, and counts."""

    order: Sequence[str]
    seen_keys: dict[str, SeenKeys]
    counts: Counts
    write: Callable[[str, bytes], None]
    keep_dropped: bool

    def take(self, answer: TracedDocument | RejectedDocument) -> None:
        if isinstance(answer, RejectedDocument):
            self.counts.bad[answer.reason] += 1
            self.write(QUARANTINED, answer.to_json_line())
            return
        self.counts.before.add(answer.length)
        self.counts.without_url += "url" in self.order and not answer.has_url
        self._settle(answer, answer.trace, 0)

    def _settle(self, answer: TracedDocument, trace: DocumentTrace, first: int) -> None:
        for number, step in enumerate(trace.steps, first):
            name = self.order[number]
            counts = self.counts.stages[name]
            counts.entered += 1
            reason = None
            if isinstance(step, NeedsUniqueKey):
                reason = self.seen_keys[name].add_or_reject(step.key)
                if reason is None:
                    self.write(keys_of(name), pack_record(step.key))
            elif isinstance(step, Dropped):
                reason = step.reason
            elif isinstance(step, TextChanged):
                counts.changed += 1
            elif isinstance(step, list):
                counts.changed += 1
                counts.added += len(step) - 1
                for piece in step:
                    self._settle(answer, piece, number + 1)
                return
            if reason is not None:
                counts.dropped[reason] += 1
                counts.dropped_characters += trace.length
                if self.keep_dropped:
                    self.write(DROPPED, _dropped_line(answer, name, reason, trace.line))
                return
        self.counts.after.add(trace.length)
        self.write(OUTPUT, trace.line)


def keys_of(stage: str) -> str:
    """File of a stage's kept keys in the work folder."""
    return f"{stage}.keys"


def _dropped_line(answer: TracedDocument, stage: str, reason: str, line: bytes) -> bytes:
    where = {"file": answer.file, "line": answer.line, "stage": stage, "reason": reason}
    return json.dumps(where)[:-1].encode() + b', "document": ' + line.rstrip(b"\n") + b"}\n"


def clean(
    options: CleaningOptions, report: Callable[[Progress], None] = lambda progress: None
) -> Counts:
    """Write the cleaned documents of the inputs. Rejected lines are listed in `options.quarantine`.

    Args:
        options: What to read, apply and write.
        report: Called with the counts after every chunk.

    Returns:
        The final counts.

    Raises:
        UserError: Before anything is written, with all problems of the options; later for
            unreadable inputs, or if no document is left.
        OSError: If a file cannot be written.
    """
    stages = options.build()
    settings = options.resume_settings(stages)
    seen_keys = options.build_seen_keys()
    dropped = {} if options.dropped_output is None else {DROPPED: _suffix(options.dropped_output)}
    names = {OUTPUT: _suffix(options.output), QUARANTINED: "", **dropped}
    names |= {keys_of(name): "" for name in seen_keys}
    cleaner = Cleaner(
        stages,
        options.json_key if stages else None,
        options.url_key,
        options.inputs.max_document_bytes,
        keep_dropped=options.dropped_output is not None,
    )
    with ExitStack() as stack:
        # Before any file is opened: forked workers inherit what is open, also the lock.
        workers = stack.enter_context(Workers(cleaner, options.workers))
        work = stack.enter_context(ResumableOutput(options.output, settings, names, options.resume))
        if work.progress is None:
            counts = Counts.of(options.order)
        else:
            counts = Counts.from_json(work.progress["counts"])
        if not work.finished:
            writer = ResultWriter(
                options.order,
                seen_keys,
                counts,
                lambda name, data: work.files[name].write(data),
                cleaner.keep_dropped,
            )
            _work(options, writer, workers, work, report)
        _publish(options, work)
    return counts


def _work(
    options: CleaningOptions,
    writer: ResultWriter,
    workers: Workers[list[RawDocument], list[TracedDocument | RejectedDocument]],
    work: ResumableOutput,
    report: Callable[[Progress], None],
) -> None:
    for name, seen in writer.seen_keys.items():
        file = keys_of(name)
        for key in read_records(work.folder / file, work.files[file].committed):
            seen.reload(key)
    done = work.progress
    place = START if done is None else ReadPosition(*done["place"])
    keys = (options.json_key,) if options.order else ()
    feed = ChunkedInput(
        DocumentReader(options.inputs, keys, place, all_columns=True), options.part_bytes
    )
    counts = writer.counts

    def progress() -> dict[str, Any]:
        return {"place": place, "counts": counts.to_json()}

    for answers in workers.map(feed.chunks()):
        for answer in answers:
            writer.take(answer)
        mark = feed.marks.popleft()
        place = mark.place
        report(Progress(counts, mark.input_bytes))
        if mark.ends_part:
            work.commit(progress())
    if not counts.after.documents:
        work.discard()
        raise UserError(_nothing_left(options, counts))
    if options.report_numbers is not None:
        write_numbers(work.folder / NUMBERS, counts)
    if options.report_figure is not None:
        draw(work.folder / PICTURE, counts)
    work.commit(progress(), finished=True)


def _nothing_left(options: CleaningOptions, counts: Counts) -> Problem:
    reasons = [f"{count} {reason}" for reason, count in sorted(counts.bad.items())]
    for name, stage in counts.stages.items():
        reasons += (f"{count} {reason} ({name})" for reason, count in sorted(stage.dropped.items()))
    dropped = f"; dropped: {', '.join(reasons)}" if reasons else ""
    return Problem("no-documents-left", name=options.inputs.name, dropped=dropped)


def _publish(options: CleaningOptions, work: ResumableOutput) -> None:
    finals = {OUTPUT: options.output}
    if options.dropped_output is not None:
        finals[DROPPED] = options.dropped_output
    if work.files[QUARANTINED].committed:
        finals[QUARANTINED] = options.quarantine
    elif os.path.exists(options.quarantine):  # of an earlier run
        os.remove(options.quarantine)
    if options.report_numbers is not None:
        finals[NUMBERS] = options.report_numbers
    if options.report_figure is not None:
        finals[PICTURE] = options.report_figure
    work.publish(finals)


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()
