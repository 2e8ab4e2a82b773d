"""Cleaning: one reader, worker processes that apply the stages, one writer, in order.

The output keeps the order of the input and is the same for any number of workers and any
interruption. Memory is flat except for the keys of kept documents. Knows no command line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.stages import (
    Document,
    Dropped,
    NeedsUniqueKey,
    Replaced,
    SplitInto,
    Stage,
)
from megatron_ds.cleaning.stats import Counts, StageCounts
from megatron_ds.config.problems import ignore, user_error
from megatron_ds.fileio.resumable import ResumableOutput, pack_record, read_records
from megatron_ds.preprocess.documents.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.documents.formats import RawDocument, content_size
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.preprocess.worker_pool import Workers

CHUNK_BYTES = 1 << 19
CHUNK_DOCUMENTS = 64
"""Limits of a chunk, which a worker gets at once."""
OUTPUT = "output"
DROPPED = "dropped"
QUARANTINED = "quarantine"
NUMBERS = "report.json"
"""Names in the work folder."""
BOM = b"\xef\xbb\xbf"


class ChunkEnd(NamedTuple):
    """End of a chunk of documents.

    Attributes:
        position: Position of the reader.
        ends_part: Whether a part of the input ends there, after which the run commits.
        input_bytes: Bytes read of the input files as stored.
    """

    position: ReadPosition
    ends_part: bool
    input_bytes: int


def chunks(reader: DocumentReader, part_bytes: int) -> Iterator[tuple[list[RawDocument], ChunkEnd]]:
    """The documents in chunks. Parts end at the same documents in every run."""
    chunk: list[RawDocument] = []
    size = 0
    part = 0
    for item in reader:
        chunk.append(item)
        length = content_size(item.value)
        size += length
        part += length
        ends_part = part >= part_bytes
        if ends_part or size >= CHUNK_BYTES or len(chunk) >= CHUNK_DOCUMENTS:
            yield chunk, ChunkEnd(reader.position(item.line), ends_part, reader.bytes_read)
            chunk = []
            size = 0
            part = 0 if ends_part else part
    if chunk:
        yield chunk, ChunkEnd(reader.end, False, reader.bytes_read)


class DocumentTrace(NamedTuple):
    """Outcomes of a text, stage by stage, of types that msgpack stores.

    Attributes:
        steps: One per stage, from the first stage that the text passed. True: the stage changed the
            text. A string: it dropped the text, for this reason. Bytes: the key that must be
            unique. A list: the traces of the text's fragments from the next stage.
        length: Characters of the text at the end.
        line: The document at the end as a JSON line, or b"" if it is not needed.
    """

    steps: list[bool | str | bytes | list[DocumentTrace] | None]
    length: int
    line: bytes


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


Chunk = tuple[list[RawDocument], ChunkEnd]
Answers = tuple[list[TracedDocument | RejectedDocument], ChunkEnd]


@dataclass(frozen=True)
class Cleaner:
    """Applies the stages, in a worker.

    Attributes:
        stages: Stages to pass, in order.
        key: Key of the text; None if no stage reads it.
        url_key: Key of the address; None if no stage reads it.
        max_document_bytes: Longer texts are rejected.
        keep_dropped: Whether the lines of dropped documents are needed.
    """

    stages: Sequence[Stage]
    key: str | None
    url_key: str | None
    max_document_bytes: int
    keep_dropped: bool

    def __call__(self, chunk: Chunk) -> Answers:
        items, end = chunk
        return [self._clean(item) for item in items], end

    def _clean(self, item: RawDocument) -> TracedDocument | RejectedDocument:
        text = self._field(item, self.key)
        if isinstance(text, RejectedDocument):
            return text
        value = None if self.url_key is None else self._field(item, self.url_key)
        url = value if isinstance(value, str) and value else None
        line_of = partial(_line, item, self.key, text)
        trace = self._trace(Document(text, url), self.stages, line_of)
        return TracedDocument(item.file, item.line, len(text), url is not None, trace)

    def _field(self, item: RawDocument, key: str | None) -> str | RejectedDocument:
        """The text of a key; without a key only the document is checked."""
        keys = () if key is None else (key,)
        texts = texts_of(item, TextFields(keys, self.max_document_bytes))
        return texts if isinstance(texts, RejectedDocument) else "".join(texts)

    def _trace(
        self, document: Document, stages: Sequence[Stage], line_of: Callable[[str], bytes]
    ) -> DocumentTrace:
        """Pass a document through stages; `line_of` gives it as a JSON line, with a text."""
        steps: list[bool | str | bytes | list[DocumentTrace] | None] = []
        outcome = None
        for position, stage in enumerate(stages, 1):
            outcome = stage(document)
            match outcome:
                case Replaced(text):
                    document = document._replace(text=text)
                    steps.append(True)
                case SplitInto(texts):
                    fragments = (document._replace(text=text) for text in texts)
                    steps.append(
                        [self._trace(one, stages[position:], line_of) for one in fragments]
                    )
                    break
                case Dropped(reason):
                    steps.append(reason)
                    break
                case NeedsUniqueKey(key):
                    steps.append(key)
                case None:
                    steps.append(None)
        # A document whose key is still undecided may be kept, so its line is needed.
        is_needed = self.keep_dropped or not isinstance(outcome, Dropped | SplitInto)
        line = line_of(document.text) if is_needed else b""
        return DocumentTrace(steps, len(document.text), line)


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
        line = json.dumps(value, ensure_ascii=False, default=str, allow_nan=False)
    except ValueError:
        value = _without_nan(value)
        line = json.dumps(value, ensure_ascii=False, default=str)
    try:
        return f"{line}\n".encode()
    except UnicodeEncodeError:  # half of a surrogate pair in another field
        return (json.dumps(value, default=str) + "\n").encode()


def _without_nan(value: Any) -> Any:
    """The value with null for NaN and infinite numbers, which JSON cannot represent."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_without_nan, value))
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replaced(value: dict[str, Any], path: Sequence[str], text: str) -> dict[str, Any]:
    inner = text if len(path) == 1 else _replaced(value[path[0]], path[1:], text)
    return {**value, path[0]: inner}


class Run:
    """Decides requested keys in order, writes kept and dropped documents, and counts.

    Attributes:
        position: Where the run continues.
        counts: Counts so far.
    """

    def __init__(self, options: CleaningOptions, work: ResumableOutput) -> None:
        self._options = options
        self._order = options.order
        self._work = work
        self.position = START
        self.counts = Counts({name: StageCounts() for name in self._order})
        if work.progress is not None:
            self.position = ReadPosition(*work.progress["place"])
            self.counts = Counts.from_json(work.progress["counts"])

    def write(self, answers: Iterable[Answers], report: Callable[[Counts, int], None]) -> None:
        """Write the documents, which follow the position, and finish the files."""
        options = self._options
        work = self._work
        counts = self.counts
        self._seen_keys = options.build_seen_keys()
        for name, seen in self._seen_keys.items():
            file = keys_of(name)
            for key in read_records(work.folder / file, work.files[file].committed):
                seen.reload(key)
        for chunk, end in answers:
            for answer in chunk:
                self._add(answer)
            self.position = end.position
            report(counts, end.input_bytes)
            if end.ends_part:
                self._commit()
        if not counts.after.documents:
            work.discard()
            raise user_error("no-documents-left", name=options.inputs.name, dropped=_lost(counts))
        if options.report is not None:
            numbers = json.dumps(counts.to_json(), indent=2) + "\n"
            (work.folder / NUMBERS).write_text(numbers, encoding="utf-8")
        self._commit(finished=True)

    def _commit(self, finished: bool = False) -> None:
        progress = {"place": self.position, "counts": self.counts.to_json()}
        self._work.commit(progress, finished)

    def _add(self, answer: TracedDocument | RejectedDocument) -> None:
        if isinstance(answer, RejectedDocument):
            self.counts.bad[answer.reason] += 1
            self._work.files[QUARANTINED].write(answer.to_json_line())
            return
        self.counts.before.add(answer.length)
        self.counts.without_url += "url" in self._order and not answer.has_url
        self._add_trace(answer, answer.trace, 0)

    def _add_trace(self, answer: TracedDocument, trace: DocumentTrace, first: int) -> None:
        for index, step in enumerate(trace.steps, first):
            name = self._order[index]
            counts = self.counts.stages[name]
            counts.entered += 1
            reason = None
            if isinstance(step, bytes):
                reason = self._seen_keys[name].add_or_reject(step)
                if reason is None:
                    self._work.files[keys_of(name)].write(pack_record(step))
            elif isinstance(step, str):
                reason = step
            elif isinstance(step, list):
                counts.changed += 1
                counts.added += len(step) - 1
                for fragment in step:
                    self._add_trace(answer, DocumentTrace(*fragment), index + 1)
                return
            elif step:
                counts.changed += 1
            if reason is not None:
                counts.dropped[reason] += 1
                counts.dropped_characters += trace.length
                if DROPPED in self._work.files:
                    where = {"file": answer.file, "line": answer.line}
                    entry = json.dumps({**where, "stage": name, "reason": reason})[:-1].encode()
                    line = trace.line.rstrip(b"\n")
                    self._work.files[DROPPED].write(entry + b', "document": ' + line + b"}\n")
                return
        self.counts.after.add(trace.length)
        self._work.files[OUTPUT].write(trace.line)


def keys_of(stage: str) -> str:
    """File of a stage's kept keys in the work folder."""
    return f"{stage}.keys"


def _lost(counts: Counts) -> str:
    """Returns the reason that no document is left."""
    reasons = [f"{count} {reason}" for reason, count in sorted(counts.bad.items())]
    for name, stage in counts.stages.items():
        reasons += (f"{count} {reason} ({name})" for reason, count in sorted(stage.dropped.items()))
    return f"; dropped: {', '.join(reasons)}" if reasons else ""


def clean(options: CleaningOptions, report: Callable[[Counts, int], None] = ignore) -> Counts:
    """Write the cleaned documents of the inputs. Rejected lines are listed in `options.quarantine`.

    Args:
        options: Inputs, stages and output.
        report: Called after every chunk with the counts, and the bytes read of the input files as
            stored.

    Returns:
        The final counts.

    Raises:
        UserError: Before anything is written, with all problems of the options; later for
            unreadable inputs, or if no document is left.
        OSError: If a file cannot be written.
    """
    cleaner = build_cleaner(options)
    settings = options.resume_settings(list(cleaner.stages))
    with (
        # Before any file is opened: forked workers inherit what is open, also the lock.
        Workers(cleaner, options.workers) as workers,
        ResumableOutput(options.output, settings, work_names(options), options.resume) as work,
    ):
        run = Run(options, work)
        if not work.finished:
            keys = (options.json_key,) if options.order else ()
            reader = DocumentReader(options.inputs, keys, run.position, all_columns=True)
            run.write(workers.map(chunks(reader, options.part_bytes)), report)
        publish(options, work)
    return run.counts


def build_cleaner(options: CleaningOptions) -> Cleaner:
    """The stages of a run, for its workers. Raises the UserErrors of `CleaningOptions.build`."""
    stages = options.build()
    return Cleaner(
        stages,
        options.json_key if stages else None,
        options.url_key if "url" in options.order else None,
        options.inputs.max_document_bytes,
        keep_dropped=options.dropped_output is not None,
    )


def work_names(options: CleaningOptions) -> dict[str, str]:
    """Names of the growing files in the work folder, for `ResumableOutput`."""
    dropped = options.dropped_output
    growing = {OUTPUT: options.output, QUARANTINED: ""} | ({DROPPED: dropped} if dropped else {})
    suffixes = {name: Path(path).suffix.lower() for name, path in growing.items()}
    return suffixes | {keys_of(name): "" for name in options.build_seen_keys()}


def publish(options: CleaningOptions, work: ResumableOutput) -> None:
    """Give the files of a finished run their final names."""
    finals = {
        OUTPUT: options.output,
        DROPPED: options.dropped_output,
        QUARANTINED: options.quarantine,
        NUMBERS: options.report,
    }
    if not work.files[QUARANTINED].committed:
        del finals[QUARANTINED]
        Path(options.quarantine).unlink(missing_ok=True)  # of an earlier run
    work.publish({name: path for name, path in finals.items() if path is not None})
