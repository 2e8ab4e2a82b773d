"""Preprocessing: one reader, worker processes that parse and encode, one writer, in order.

The output is the same for any number of workers and any interruption. Memory is flat: a few chunks
per worker are in flight, whatever the size of the input. Lines without a document are rejected:
counted and listed in a file of their own. All output grows in the run's work folder
(`fileio/resumable.py`) and appears under its names when it is complete. Parsing is defined in
`parsing.py`, encoding in `encoder.py`. Knows no command line, torch or process groups.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import (
    PROBLEMS_SHOWN,
    Problem,
    UserError,
    counted,
    ignore,
    option,
    raise_if_any,
    user_error,
)
from megatron_ds.data.token_files.indexed_dataset import TOKENIZER_SUFFIX, token_dtype
from megatron_ds.data.token_files.indexed_writer import (
    WORK_SUFFIXES,
    WRITER_SUFFIXES,
    TokenFileWriter,
    WriteCounts,
)
from megatron_ds.data.token_files.tokenizer_metadata import metadata_json
from megatron_ds.fileio.resumable import (
    COMPLETED_SUFFIX,
    Log,
    ResumableOutput,
    enter_or_refuse,
)
from megatron_ds.preprocess.documents.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.documents.formats import content_size
from megatron_ds.preprocess.documents.parsing import BROKEN_JSON, RejectedDocument
from megatron_ds.preprocess.encoder import Chunk, EncodedChunk, Encoder
from megatron_ds.preprocess.options import PreprocessOptions
from megatron_ds.preprocess.shards import lines_before, slices
from megatron_ds.preprocess.stage_timer import StageTimer
from megatron_ds.preprocess.worker_pool import Workers
from megatron_ds.tokenizer import Tokenizer

REJECTED = "rejected"
"""Name of the list of rejected documents in the work folder."""
CHUNK_BYTES = 1 << 20
"""A chunk ends here even if it has fewer documents than the chunk size."""
DOCUMENTS_CHECKED_AHEAD = 100_000
"""Number of documents that are checked after a rejected one with `strict`, to report several at
once."""


@dataclass(frozen=True)
class Progress:
    """Counts so far.

    Attributes:
        documents: Documents that were written.
        tokens: Tokens that were written.
        text_bytes: Bytes of the documents' texts.
        input_bytes: Bytes of the input files, as stored.
        lost_characters: Characters of the texts that the tokenizer dropped.
        dropped: Rejected documents by reason.
        unusable: Files whose documents were all rejected.
        seconds: Time by stage; parsing and encoding are summed over the workers.
        before: The part of an interrupted run.
    """

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    lost_characters: int = 0
    input_bytes: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    unusable: Sequence[str] = field(default_factory=list)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    before: Progress | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The counts of the output, for `from_json`."""
        names = ("documents", "tokens", "text_bytes", "lost_characters", "dropped", "unusable")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_json(cls, counts: Mapping[str, Any]) -> Progress:
        progress = cls(**counts)
        return dataclasses.replace(progress, before=progress)


def _warn(line: object) -> None:
    warnings.warn(str(line), stacklevel=2)


def preprocess(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    report: Callable[[Progress], None] = ignore,
    log: Log = _warn,
) -> Progress:
    """Write the token files of the inputs.

    Texts without tokens are rejected, as in bigscience/Megatron-DeepSpeed. Blank lines are ignored.
    After an error there is no output, but a work folder if the run can be resumed.

    Args:
        options: Inputs and output.
        tokenizer: Encodes the texts.
        report: Called with the counts after every chunk.
        log: Takes messages on where the run starts, and warnings.

    Returns:
        The final counts.

    Raises:
        UserError: For wrong options, unreadable inputs, inputs without any document, rejected
            documents with `strict`, an interrupted run that cannot be continued, and output of
            another run without `overwrite`.
        OSError: If a file cannot be read or written.
    """
    raise_if_any(options.problems())
    sentences = None if options.splitter is None else options.splitter.description
    metadata = metadata_json(tokenizer.fingerprint, sentences)
    existing = [] if options.overwrite else options.existing_output()
    refusal = [Problem("output-exists", existing=", ".join(existing))] if existing else []
    resume = options.resume or bool(existing and not any(options.inputs.resume_problems()))
    if not resume:
        raise_if_any(refusal)
    with ExitStack() as stack:
        encoder = _encoder(options, tokenizer)
        # Before any file is opened: forked workers inherit what is open, also the lock.
        workers = stack.enter_context(Workers(encoder, options.workers))
        work = ResumableOutput(
            options.output_prefix,
            options.resume_settings(metadata),
            work_names(options),
            resume,
            restart=True,
            completed=options.output_prefix + COMPLETED_SUFFIX,
            warn=log,
        )
        before = _open_work(stack, work, options, refusal)
        if before is not None and work.finished:
            if not work.published:
                publish(options, work)
            log(f"{options.output_prefix} is complete; there is nothing left to do")
            return dataclasses.replace(before, input_bytes=options.inputs.total_bytes() or 0)
        if before is not None:
            log(f"resuming after {counted(before.documents, 'document')}")
        run = _Run(options, encoder, work, before or Progress())
        progress = run.encode(workers, metadata, report)
        publish(options, work)
    return progress


def _encoder(options: PreprocessOptions, tokenizer: Tokenizer) -> Encoder:
    return Encoder(
        tokenizer,
        options.text_fields,
        options.append_eod,
        options.prepend_bos,
        options.splitter,
        options.conversations,
    )


def work_names(options: PreprocessOptions) -> dict[str, str]:
    """Names of the files in the work folder, for `ResumableOutput`."""
    names = [options.stem(key) + suffix for key in options.json_keys for suffix in WORK_SUFFIXES]
    return dict.fromkeys([REJECTED, *names], "")


def token_file_writers(
    options: PreprocessOptions,
    tokenizer: Tokenizer,
    work: ResumableOutput,
    written: Mapping[str, Sequence[int]],
) -> dict[str, TokenFileWriter]:
    """The writers of the pairs in the work folder, by key.

    Args:
        written: Counts of the content that the files have already, by key.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    return {
        key: TokenFileWriter(
            options.prefix(key),
            dtype,
            [work.files[options.stem(key) + suffix].raw for suffix in WRITER_SUFFIXES],
            WriteCounts(*written.get(key, ())),
            has_loss_spans=options.chat,
        )
        for key in options.json_keys
    }


def _open_work(
    stack: ExitStack,
    work: ResumableOutput,
    options: PreprocessOptions,
    refusal: list[Problem],
) -> Progress | None:
    """Open the work folder, and return the counts of the run that is continued, if there is one.

    Args:
        refusal: Why a new run cannot start.
    """
    enter_or_refuse(stack, work, refusal, must_resume=options.resume)
    if work.progress is None:
        return None
    before = Progress.from_json(work.progress["counts"])
    if before.dropped and options.fail_on_bad_document:
        rejects = describe_rejects(before)
        raise user_error("strict-resume-after-rejects", describe_rejects=rejects)
    return before


def publish(options: PreprocessOptions, work: ResumableOutput) -> None:
    """Give the files of a finished run their final names."""
    finals: dict[str, str] = {}
    stale: dict[str, list[str]] = {}
    if work.files[REJECTED].committed:
        finals[REJECTED] = options.quarantine
    else:
        Path(options.quarantine).unlink(missing_ok=True)  # of an earlier run
    for key in options.json_keys:
        stem = options.stem(key)
        prefix = options.prefix(key)
        # A description of older tokens must never exist next to the new ones.
        stale[stem + ".bin"] = [prefix + ".idx", prefix + TOKENIZER_SUFFIX]
        # The index last: without it, readers do not take the pair for complete.
        for suffix in (".bin", TOKENIZER_SUFFIX, ".idx"):
            finals[stem + suffix] = prefix + suffix
    work.publish(finals, stale)


@dataclass
class _Run:
    """A run from its start, or from where an interrupted run stopped, to finished files."""

    options: PreprocessOptions
    encoder: Encoder
    work: ResumableOutput
    progress: Progress

    def __post_init__(self) -> None:
        options = self.options
        work = self.work
        saved: Mapping[str, Any] = work.progress or {"position": START, "written": {}}
        position = ReadPosition(*saved["position"])
        self._reader = DocumentReader(
            options.inputs,
            () if options.chat else options.json_keys,
            position,
            all_columns=options.chat,
            shard=options.shard,
            lines=saved.get("lines", {}),
        )
        self._position = position
        self._writers = token_file_writers(options, self.encoder.tokenizer, work, saved["written"])
        self._is_resumable = not any(options.inputs.resume_problems())
        self._is_writing = False
        self._timer = StageTimer()
        self._first_reject: RejectedDocument | None = None
        self._usable: set[str] = {*saved.get("usable", ())}
        shard = options.shard
        parts = slices(options.inputs.files(), options.inputs.format, shard) if shard else ()
        self._divided = {one.file.name for one in parts if one.begin or one.end is not None}

    def encode(
        self,
        workers: Workers[Chunk, EncodedChunk],
        metadata: bytes,
        report: Callable[[Progress], None],
    ) -> Progress:
        """Encode and write all documents. Returns the counts."""
        options = self.options
        timer = self._timer
        reader = self._reader
        ends: deque[ReadPosition] = deque()
        chunks = timer.timed_iter("reading", _chunks(reader, options, ends))
        with self._commit_on_error():
            for encoded in timer.timed_iter("waiting", workers.map(chunks)):
                if encoded.rejected and options.fail_on_bad_document:
                    pending = workers.finish_pending()
                    ahead = pending, chunks, options, self.encoder
                    raise UserError(*_strict_problems(encoded.rejected, *ahead))
                self._first_reject = self._first_reject or next(iter(encoded.rejected), None)
                for stage, seconds in encoded.seconds.items():
                    timer.seconds[stage] += seconds
                with timer.stage("writing"):
                    self._write(encoded, ends.popleft(), reader.bytes_read)
                report(self.progress)
            if not self.progress.documents and options.shard is None:
                self.work.discard()
                raise no_documents(options, self.progress, self._first_reject)
            with timer.stage("writing"):
                self._is_writing = True
                finish_files(options, self.work, self._writers, metadata)
                self._position = reader.end  # the same record for any size of chunks
                self._commit(finished=True)
        return dataclasses.replace(
            self.progress, input_bytes=reader.bytes_read, seconds=dict(timer.seconds)
        )

    @contextmanager
    def _commit_on_error(self) -> Iterator[None]:
        """Commits the output written so far after an error or an interrupt, if there was an earlier
        commit."""
        try:
            yield
        except OSError:
            # After a failed fsync a second one may succeed although the data is lost.
            raise
        except BaseException:
            if self.work.has_commit and not self._is_writing:
                with suppress(OSError):
                    self._commit()
            raise

    def _write(self, encoded: EncodedChunk, position: ReadPosition, input_bytes: int) -> None:
        self._is_writing = True
        for document in encoded.rejected:
            self.work.files[REJECTED].write(document.to_json_line())
        usable = self._usable | encoded.usable
        names = (*self.progress.unusable, *(document.file for document in encoded.rejected))
        unusable = [name for name in dict.fromkeys(names) if name not in usable]
        self._usable = usable & self._divided | (encoded.usable or self._usable)
        for writer, column in zip(self._writers.values(), encoded.columns, strict=True):
            writer.add_documents(*column)
        before = self.progress
        self.progress = Progress(
            documents=before.documents + encoded.documents,
            tokens=before.tokens + sum(len(column.tokens) for column in encoded.columns),
            text_bytes=before.text_bytes + encoded.text_bytes,
            lost_characters=before.lost_characters + encoded.lost_characters,
            input_bytes=input_bytes,
            dropped=Counter(before.dropped) + Counter(one.reason for one in encoded.rejected),
            unusable=unusable,
            seconds=dict(self._timer.seconds),
            before=before.before,
        )
        self._position = position
        self._is_writing = False
        if self._is_resumable and self.work.is_commit_due:
            self._commit()

    def _commit(self, finished: bool = False) -> None:
        progress = {
            "position": self._position,
            "written": {key: writer.written for key, writer in self._writers.items()},
            "counts": self.progress.to_json(),
            **({} if self.options.shard is None else {"lines": self._reader.lines}),
        }
        if self.options.shard is not None or not finished:
            progress["usable"] = sorted(self._usable)
        self.work.commit(progress, finished)


def finish_files(
    options: PreprocessOptions,
    work: ResumableOutput,
    writers: Mapping[str, TokenFileWriter],
    metadata: bytes,
) -> None:
    """Complete the files of all keys, after the last document."""
    for key, writer in writers.items():
        writer.finish()
        work.files[options.stem(key) + TOKENIZER_SUFFIX].write(metadata)


def no_documents(
    options: PreprocessOptions, progress: Progress, first: RejectedDocument | None
) -> UserError:
    """The error of inputs without any document.

    Args:
        first: The first rejected line.
    """
    rejected = describe_rejects(progress)
    why = f"; rejected: {rejected}, first {first}" if rejected else ""
    if {*progress.dropped} == {BROKEN_JSON}:
        why += f"; plain text needs {option('format')} text"
    return user_error("no-documents", name=options.inputs.name, first=why)


def describe_rejects(progress: Progress) -> str:
    """Rejected documents by reason: `3 broken JSON, 1 empty text`."""
    return ", ".join(f"{count} {reason}" for reason, count in sorted(progress.dropped.items()))


def _chunks(
    reader: DocumentReader, options: PreprocessOptions, ends: deque[ReadPosition]
) -> Iterator[Chunk]:
    """The documents in chunks; `ends` takes the position after each."""
    chunk = Chunk([], [], [])
    size = 0
    for file, line, value in reader:
        chunk.files.append(file)
        chunk.lines.append(line)
        chunk.values.append(value)
        size += len(value) if isinstance(value, bytes) else content_size(value)
        if len(chunk.lines) >= options.chunk_size or size >= CHUNK_BYTES:
            ends.append(reader.position(line))
            yield chunk
            chunk = Chunk([], [], [])
            size = 0
    if chunk.lines:
        ends.append(reader.end)
        yield chunk


def _strict_problems(
    first: list[RejectedDocument],
    in_flight: Iterable[EncodedChunk],
    rest: Iterator[Chunk],
    options: PreprocessOptions,
    encoder: Encoder,
) -> Iterator[Problem]:
    """The first rejected documents, and those among the documents that follow."""
    divided, before = lines_before(options.inputs, options.shard)
    rejected = list(first)
    for encoded in in_flight:
        rejected += encoded.rejected
    checked = 0
    end = ""
    for chunk in rest:
        if len(rejected) > PROBLEMS_SHOWN or checked >= DOCUMENTS_CHECKED_AHEAD:
            line = chunk.lines[0] + before * (chunk.files[0] == divided)
            end = f"; not checked from {chunk.files[0]}:{line} on"
            break
        parsed = map(encoder.parse, chunk.items())
        rejected += (one for one in parsed if isinstance(one, RejectedDocument))
        checked += len(chunk.lines)
    for document in rejected[:PROBLEMS_SHOWN]:
        if document.file == divided:
            document = document._replace(line=document.line + before)
        yield Problem("rejected-document", document=document)
    hidden = len(rejected) - PROBLEMS_SHOWN
    if hidden > 0 or end:
        yield Problem("more-rejected-documents", hidden=max(hidden, 0), end=end)
