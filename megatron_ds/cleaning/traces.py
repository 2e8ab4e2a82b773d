"""Outcomes of documents at the stages as bytes, for files of a work folder.

A record holds the documents of a chunk. Owns their encoding; `pipeline.py` defines the outcomes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgpack

from megatron_ds.cleaning.pipeline import DocumentTrace, TextChanged, TracedDocument
from megatron_ds.cleaning.stages import Dropped, NeedsUniqueKey
from megatron_ds.preprocess.documents.parsing import RejectedDocument

SURROGATES = "surrogatepass"
"""Names of files and rejected lines may contain lone surrogates."""

Answer = TracedDocument | RejectedDocument


def pack(answers: Sequence[Answer], sizes: Sequence[int]) -> bytes:
    """A record.

    Args:
        answers: The documents.
        sizes: Size of each as read.
    """
    rows: list[tuple[Any, ...]] = []
    for answer, size in zip(answers, sizes, strict=True):
        if isinstance(answer, TracedDocument):
            rows.append((size, True, (*answer[:4], _packed(answer.trace))))
        else:
            rows.append((size, False, tuple(answer)))
    record: bytes = msgpack.packb(rows, unicode_errors=SURROGATES)
    return record


def unpack(record: bytes) -> Iterator[tuple[Answer, int]]:
    """The documents of a record, with their sizes."""
    for size, is_traced, fields in msgpack.unpackb(record, unicode_errors=SURROGATES):
        if is_traced:
            name, line, length, has_url, trace = fields
            yield TracedDocument(name, line, length, has_url, _unpacked(trace)), size
        else:
            yield RejectedDocument(*fields), size


def _packed(trace: DocumentTrace) -> tuple[Any, ...]:
    steps: list[Any] = []
    for step in trace.steps:
        if isinstance(step, TextChanged):
            steps.append(True)
        elif isinstance(step, Dropped):
            steps.append(step.reason)
        elif isinstance(step, NeedsUniqueKey):
            steps.append(step.key)
        else:
            steps.append(None if step is None else list(map(_packed, step)))
    return steps, trace.length, trace.line


def _unpacked(fields: list[Any]) -> DocumentTrace:
    steps, length, line = fields
    trace = DocumentTrace([], length, line)
    for step in steps:
        if step is True:
            trace.steps.append(TextChanged())
        elif isinstance(step, str):
            trace.steps.append(Dropped(step))
        elif isinstance(step, bytes):
            trace.steps.append(NeedsUniqueKey(step))
        else:
            trace.steps.append(None if step is None else list(map(_unpacked, step)))
    return trace
