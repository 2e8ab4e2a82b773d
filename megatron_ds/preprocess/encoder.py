"""Chunks of items to tokens: the work of one worker.

Knows the protocols of tokenizers and sentence splitters; no files and no processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed_dataset import token_dtype
from megatron_ds.preprocess.document_readers import RawDocument, UnreadableDocument
from megatron_ds.preprocess.parsing import (
    EMPTY_TEXT,
    REFUSED_TEXT,
    Document,
    RejectedDocument,
    TextFields,
    parse,
    reject,
    utf8_size,
)
from megatron_ds.preprocess.sentence_splitter import Splitter
from megatron_ds.preprocess.stage_timer import StageTimer
from megatron_ds.tokenizer import Tokenizer, encode_flat


class Chunk(NamedTuple):
    """Items by column, which travel to a worker much faster than one by one."""

    files: list[str]
    lines: list[int]
    values: list[bytes | dict[str, Any] | UnreadableDocument]

    def items(self) -> list[RawDocument]:
        return list(map(RawDocument, *self))


class EncodedColumn(NamedTuple):
    """The tokens of one key: all sequences back to back, their lengths, and how many of them make
    each document.
    """

    tokens: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]


class EncodedChunk(NamedTuple):
    """A chunk's tokens, a column for each key. bad: what gave no document, in the items' order.

    seconds: by stage.
    """

    columns: list[EncodedColumn]
    documents: int
    text_bytes: int
    bad: list[RejectedDocument]
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Encoder:
    """Items to tokens: the work of one worker. splitter: makes a sequence of each sentence; None
    for one sequence per document.
    """

    tokenizer: Tokenizer
    wanted: TextFields
    append_eod: bool
    splitter: Splitter | None = None

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        items = chunk.items()
        spent = StageTimer()
        with spent.stage("parsing"):
            documents, bad = parse(items, self.wanted)
        with spent.stage("encoding"):
            try:
                columns = self._encode(documents, spent)
            except ValueError:  # says neither which text nor whether it is the only one
                found = {at: one for at, one in enumerate(map(self._refused, documents)) if one}
                bad += found.values()
                documents = [one for at, one in enumerate(documents) if at not in found]
                columns = self._encode(documents, spent)
            finished = [self._finished(column) for column in columns]
        bad += [
            reject(documents[at].item, EMPTY_TEXT, f"{key!r} has no tokens")
            for key, column in zip(self.wanted.keys, columns, strict=True)
            for at in np.flatnonzero(_by_document(column.lengths, column.sequences) == 0)
        ]
        order = {item[:2]: at for at, item in enumerate(items)} if bad else {}
        return EncodedChunk(
            finished,
            len(documents),
            sum(utf8_size(text) for document in documents for text in document.texts),
            sorted(bad, key=lambda one: order[one.file, one.line]),
            spent.seconds,
        )

    def _encode(self, documents: list[Document], spent: StageTimer) -> list[EncodedColumn]:
        """With the sequences and documents that have no tokens, and without the ends of documents.

        Raises ValueError where the tokenizer refuses a text.
        """
        return [
            self._column([document.texts[at] for document in documents], spent)
            for at in range(len(self.wanted.keys))
        ]

    def _column(self, texts: list[str], spent: StageTimer) -> EncodedColumn:
        if self.splitter is None:
            return EncodedColumn(*encode_flat(self.tokenizer, texts), np.ones(len(texts), np.int64))
        with spent.stage("splitting"):
            sentences = [self.splitter(text) for text in texts]
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        return EncodedColumn(
            *encode_flat(self.tokenizer, list(itertools.chain(*sentences))), counts
        )

    def _refused(self, document: Document) -> RejectedDocument | None:
        try:
            self._encode([document], StageTimer())
        except ValueError as error:
            return reject(document.item, REFUSED_TEXT, str(error))
        return None

    def _finished(self, encoded: EncodedColumn) -> EncodedColumn:
        """Without what has no tokens, and with the ends of documents, in their last sequences."""
        some = encoded.lengths > 0
        lengths = encoded.lengths[some]
        sequences = _by_document(some, encoded.sequences)
        sequences = sequences[sequences > 0]
        dtype = token_dtype(self.tokenizer.vocab_size)
        if not self.append_eod:
            return EncodedColumn(encoded.tokens.astype(dtype), lengths, sequences)
        last = np.cumsum(sequences) - 1
        lengths[last] += 1
        tokens = np.empty(len(encoded.tokens) + len(last), dtype)
        ends = np.cumsum(lengths)[last] - 1
        inner = np.ones(len(tokens), np.bool_)
        inner[ends] = False
        tokens[inner] = encoded.tokens
        tokens[ends] = self.tokenizer.eod
        return EncodedColumn(tokens, lengths, sequences)


def _by_document(
    values: npt.NDArray[np.generic], sequences: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The sum of each document's sequences. values: [sequences]; sequences: [documents]."""
    before = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=before[1:])
    ends = np.cumsum(sequences)
    sums: npt.NDArray[np.int64] = before[ends] - before[ends - sequences]
    return sums
