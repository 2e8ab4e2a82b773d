"""Cleaning by several processes or machines: shards of the input, merged byte for byte.

A shard applies the stages and records the outcome of each document, with the keys by which stages
find duplicates. Duplicates occur across shards, so one process decides: it takes the documents in
input order, as the writing process of `pipeline.py` does, and writes the output of one run over the
entire input. Work of a repeated command continues, in the shards and in the merge.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.cleaning.pipeline import (
    Answers,
    Chunk,
    ChunkEnd,
    Cleaner,
    DocumentTrace,
    Run,
    TracedDocument,
    build_cleaner,
    chunks,
    publish,
    work_names,
)
from megatron_ds.cleaning.stats import Counts
from megatron_ds.config.problems import ignore, raise_if_any
from megatron_ds.fileio.resumable import COMPLETED_SUFFIX, LENGTH, Log, ResumableOutput, pack_record
from megatron_ds.preprocess.documents.document_readers import START, DocumentReader, ReadPosition
from megatron_ds.preprocess.documents.formats import content_size
from megatron_ds.preprocess.documents.parsing import RejectedDocument
from megatron_ds.preprocess.shard_files import RunShards, ShardFiles, remove_shards, shard_prefix
from megatron_ds.preprocess.shards import Shard, shard_problems
from megatron_ds.preprocess.worker_pool import Workers

TRACES = "traces"
"""Name of the file of a shard, with a record for the documents of each chunk."""
SURROGATES = "surrogatepass"
"""Names of files and rejected lines may contain lone surrogates."""
Report = Callable[[Counts, int], None]


@dataclass(frozen=True)
class _Tracer:
    """Applies the stages to a chunk and packs the outcomes, in a worker."""

    cleaner: Cleaner

    def __call__(self, chunk: Chunk) -> tuple[bytes, int, ChunkEnd]:
        answers, end = self.cleaner(chunk)
        rows = [
            (content_size(item.value), isinstance(answer, TracedDocument), answer)
            for item, answer in zip(chunk[0], answers, strict=True)
        ]
        record = msgpack.packb(rows, unicode_errors=SURROGATES)
        return pack_record(record), len(rows), end


def clean_shard(
    options: CleaningOptions,
    shard: Shard,
    report: Callable[[int, int], None] = ignore,
    log: Log = ignore,
    *,
    merges: bool = True,
) -> Counts | None:
    """Apply the stages to one shard; the process that completes the last shard merges them.

    Args:
        options: Inputs, stages and output of all shards.
        shard: The shard to process.
        report: Called after every chunk with the documents and bytes that were read.
        log: Takes messages.
        merges: Whether this process may merge the shards.

    Returns:
        The counts of the entire output; None if it is not complete yet.

    Raises:
        UserError: As `clean` does, and for inputs that cannot be divided.
    """
    sharded = ShardedCleaning(options, shard.count)
    sharded.trace(shard, report)
    if not merges:
        return None
    return sharded.files.merge_after(shard, lambda run: sharded.complete(run, log), log)


class ShardedCleaning:
    """All shards of a cleaning.

    Args:
        options: Inputs, stages and output of all shards.
        count: Number of shards.

    Raises:
        UserError: For wrong options, and inputs that cannot be divided.
    """

    def __init__(self, options: CleaningOptions, count: int) -> None:
        self._options = options
        raise_if_any(shard_problems(options.inputs))
        self._cleaner = build_cleaner(options)
        settings = options.resume_settings(list(self._cleaner.stages))
        self.files = ShardFiles(options.output, settings, count)

    def trace(self, shard: Shard, report: Callable[[int, int], None]) -> None:
        """Apply the stages to a shard, or to the rest of one that was interrupted."""
        options = self._options
        prefix = shard_prefix(self._options.output, shard)
        settings = {**self.files.settings, "shard": str(shard)}
        with (
            # Before any file is opened: forked workers inherit what is open, also the lock.
            Workers(_Tracer(self._cleaner), options.workers) as workers,
            ResumableOutput(
                prefix, settings, {TRACES: ""}, resume=True, completed=prefix + COMPLETED_SUFFIX
            ) as work,
        ):
            if work.published:
                return
            if not work.finished:
                start = {"place": START, "lines": {}, "documents": 0}
                saved: dict[str, Any] = work.progress or start
                position = ReadPosition(*saved["place"])
                documents = saved["documents"]
                keys = (options.json_key,) if options.order else ()
                reader = DocumentReader(options.inputs, keys, position, True, shard, saved["lines"])
                for record, size, end in workers.map(chunks(reader, options.part_bytes)):
                    work.files[TRACES].write(record)
                    documents += size
                    report(documents, end.input_bytes)
                    if end.ends_part:
                        reached = end.position
                        lines = reader.lines
                        work.commit({"place": reached, "lines": lines, "documents": documents})
                progress = {"place": reader.end, "lines": reader.lines, "documents": documents}
                work.commit(progress, finished=True)
            work.publish({TRACES: _traces_of(prefix)})

    def complete(
        self,
        run_shards: RunShards,
        log: Log,
        report: Report = ignore,
    ) -> Counts:
        """Complete the missing shards, and merge all of them.

        While the shards run, no other process can merge them.

        Args:
            run_shards: Completes shards.
            log: Takes messages.
            report: Called with the counts while the shards are merged.

        Returns:
            The counts of the entire output.

        Raises:
            UserError: If another process merges; if a shard is still missing; if no document is
                left.
        """
        options = self._options
        with self.files.open_merge(work_names(options), log) as work:
            run = Run(options, work)
            if not work.finished:
                self.files.run_missing(run_shards)
                run.write(self._answers(run.position), report)
            publish(options, work)
        remove_shards(options.output)
        return run.counts

    def _answers(self, after: ReadPosition) -> Iterator[Answers]:
        """The outcomes in input order, one document at a time.

        Args:
            after: Where to continue: the number of the shard, the documents that were taken of a
                record, and the offset of the record.
        """
        part = 0
        before = Counter[str]()
        for file, shard in enumerate(self.files.shards):
            start = after if file == after.file else START
            for offset, record in _records(self._options.output, shard, start.offset):
                if file < after.file:
                    break
                for index, (answer, size) in enumerate(_unpack(record), 1):
                    if offset == start.offset and index <= start.line:
                        continue
                    part += size
                    ends_part = part >= self._options.part_bytes
                    part = 0 if ends_part else part
                    answer = answer._replace(line=answer.line + before[answer.file])
                    position = ReadPosition(file, index, offset)
                    yield [answer], ChunkEnd(position, ends_part, 0)
            before.update(self.files.progress(shard)["lines"])


def _records(output: str, shard: Shard, offset: int) -> Iterator[tuple[int, bytes]]:
    """The records of a shard from an offset on, with their offsets."""
    with open(_traces_of(shard_prefix(output, shard)), "rb") as file:
        file.seek(offset)
        while head := file.read(LENGTH.size):
            (length,) = LENGTH.unpack(head)
            yield offset, file.read(length)
            offset = file.tell()


def _unpack(record: bytes) -> Iterator[tuple[TracedDocument | RejectedDocument, int]]:
    """The documents of a record, with their sizes as read."""
    for size, is_traced, fields in msgpack.unpackb(record, unicode_errors=SURROGATES):
        if is_traced:
            document = TracedDocument(*fields)
            yield document._replace(trace=DocumentTrace(*document.trace)), size
        else:
            yield RejectedDocument(*fields), size


def _traces_of(prefix: str) -> str:
    return f"{prefix}.{TRACES}"
