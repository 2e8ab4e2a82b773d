"""Encoding of chunks of documents to tokens: the work of one worker process.

Knows the protocols of tokenizers and sentence splitters; no files and no processes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.token_files.indexed_dataset import token_dtype
from megatron_ds.preprocess.documents.conversations import ConversationReader
from megatron_ds.preprocess.documents.formats import RawDocument, UnreadableDocument
from megatron_ds.preprocess.documents.parsing import (
    EMPTY_TEXT,
    LOST_TEXT,
    REFUSED_TEXT,
    RejectedDocument,
    TextFields,
    reject,
    texts_of,
    utf8_size,
)
from megatron_ds.preprocess.documents.sentence_splitter import Splitter
from megatron_ds.preprocess.stage_timer import StageTimer
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.tokenizer.chat_template import Spans, encode_answers
from megatron_ds.tokenizer.export.lost_text import LostCharacters


class Chunk(NamedTuple):
    """Raw documents by column, which are pickled much faster than a list of tuples."""

    files: list[str]
    lines: list[int]
    values: list[bytes | dict[str, Any] | UnreadableDocument]

    def items(self) -> list[RawDocument]:
        return list(map(RawDocument, *self))


class _Document(NamedTuple):
    """The texts of one item, one per key."""

    item: RawDocument
    texts: list[str]
    answers: Spans = ()
    """Characters of the only text that have a loss, if not all have one."""


class EncodedColumn(NamedTuple):
    """The tokens of one key.

    Attributes:
        tokens: All sequences, concatenated.
        lengths: [sequences] length of each in tokens.
        sequences: [documents] number of sequences in each document.
        loss_spans: [spans, 2] first and end of each range of tokens with loss; None for all.
    """

    tokens: npt.NDArray[np.generic]
    lengths: npt.NDArray[np.int64]
    sequences: npt.NDArray[np.int64]
    loss_spans: npt.NDArray[np.int64] | None = None


class EncodedChunk(NamedTuple):
    """An encoded chunk.

    Attributes:
        columns: Tokens, one column per key.
        documents: Number of documents with tokens of at least one key.
        text_bytes: Bytes of their texts.
        rejected: Rejected documents, in input order.
        usable: Files with one of these documents.
        seconds: Time by stage.
        lost_characters: Characters that the tokenizer dropped.
    """

    columns: list[EncodedColumn]
    documents: int
    text_bytes: int
    rejected: list[RejectedDocument]
    usable: set[str]
    seconds: Mapping[str, float]
    lost_characters: int = 0


@dataclass(frozen=True)
class Encoder:
    """Encodes chunks. Pickled to the workers where processes are not forked.

    Attributes:
        tokenizer: Encodes texts.
        fields: The texts to encode.
        append_eod: Whether each document ends with the end-of-document token.
        prepend_bos: Whether each document begins with the begin token.
        splitter: Splits texts into sentences, one sequence each. None: one sequence per document.
        conversations: Reads documents as conversations. Only the assistant's answers have a loss.
    """

    tokenizer: Tokenizer
    fields: TextFields
    append_eod: bool
    prepend_bos: bool = False
    splitter: Splitter | None = None
    conversations: ConversationReader | None = None

    def __post_init__(self) -> None:
        """Raises UserError: If the tokenizer has no begin token to prepend."""
        if self.prepend_bos and self.tokenizer.bos is None:
            raise user_error("begin-token-missing", kind=self.tokenizer.fingerprint.kind)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        items = chunk.items()
        timer = StageTimer()
        with timer.stage("parsing"):
            parsed = list(map(self.parse, items))
            documents = [one for one in parsed if isinstance(one, _Document)]
            rejected = [one for one in parsed if isinstance(one, RejectedDocument)]
        with timer.stage("encoding"):
            try:
                columns = self._encode(documents, timer)
            except ValueError:  # does not name the text, so each document is tried alone
                refused = {at: one for at, one in enumerate(map(self._refuse, documents)) if one}
                rejected += refused.values()
                documents = [one for at, one in enumerate(documents) if at not in refused]
                columns = self._encode(documents, timer)
            finished = [self._finish(column) for column in columns]
        sizes = [_by_document(column.lengths, column.sequences) for column in columns]
        rejected += [
            reject(
                documents[at].item,
                LOST_TEXT if documents[at].texts[index].strip() else EMPTY_TEXT,
                f"{key!r} has no tokens",
            )
            for index, (key, size) in enumerate(zip(self.fields.keys, sizes, strict=True))
            for at in np.flatnonzero(size == 0)
        ]
        is_usable = np.any(sizes, axis=0)
        usable = {documents[at].item.file for at in np.flatnonzero(is_usable)} if rejected else None
        order = {item[:2]: at for at, item in enumerate(items)} if rejected else {}
        return EncodedChunk(
            finished,
            int(np.count_nonzero(is_usable)),
            sum(utf8_size(text) for document in documents for text in document.texts),
            sorted(rejected, key=lambda one: order[one.file, one.line]),
            {*chunk.files} if usable is None else usable,
            dict(timer.seconds),
            self._lost_characters(documents),
        )

    def parse(self, item: RawDocument) -> _Document | RejectedDocument:
        """The texts of a raw document, or why it is rejected."""
        if self.conversations is None:
            texts = texts_of(item, self.fields)
            return _Document(item, texts) if isinstance(texts, list) else texts
        conversation = self.conversations(item)
        if isinstance(conversation, RejectedDocument):
            return conversation
        return _Document(item, [conversation.text], conversation.answers)

    def _lost_characters(self, documents: list[_Document]) -> int:
        lost = self._lost
        if lost is None:
            return 0
        return sum(lost.count(text) for document in documents for text in document.texts)

    @functools.cached_property
    def _lost(self) -> LostCharacters | None:
        return self.tokenizer.lost_characters()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lost"}

    def _encode(self, documents: list[_Document], timer: StageTimer) -> list[EncodedColumn]:
        """Columns including empty sequences and documents, without end-of-document tokens.

        Raises:
            ValueError: If the tokenizer refuses a text.
        """
        if self.conversations is not None:
            texts = [document.texts[0] for document in documents]
            answers = [document.answers for document in documents]
            flat, spans = encode_answers(self.tokenizer, texts, answers)
            return [EncodedColumn(*flat, np.ones(len(texts), np.int64), spans)]
        return [
            self._column([document.texts[at] for document in documents], timer)
            for at in range(len(self.fields.keys))
        ]

    def _column(self, texts: list[str], timer: StageTimer) -> EncodedColumn:
        if self.splitter is None:
            return EncodedColumn(*self.tokenizer.encode_flat(texts), np.ones(len(texts), np.int64))
        with timer.stage("splitting"):
            sentences = [self.splitter(text) for text in texts]
        counts = np.fromiter(map(len, sentences), np.int64, len(sentences))
        flat = list(itertools.chain(*sentences))
        return EncodedColumn(*self.tokenizer.encode_flat(flat), counts)

    def _refuse(self, document: _Document) -> RejectedDocument | None:
        try:
            self._encode([document], StageTimer())
        except ValueError as error:
            return reject(document.item, REFUSED_TEXT, str(error))
        return None

    def _finish(self, encoded: EncodedColumn) -> EncodedColumn:
        """Drop empty sequences and documents; add begin- and end-of-document tokens."""
        is_nonempty = encoded.lengths > 0
        lengths = encoded.lengths[is_nonempty]
        sequences = _by_document(is_nonempty, encoded.sequences)
        sequences = sequences[sequences > 0]
        tokens = encoded.tokens.astype(token_dtype(self.tokenizer.vocab_size))
        bos = self.tokenizer.bos if self.prepend_bos else None
        if bos is not None:
            first = np.cumsum(sequences) - sequences
            starts = (np.cumsum(lengths) - lengths)[first]
            is_added = tokens[starts] != bos
            tokens = np.insert(tokens, starts[is_added], bos)
            lengths[first] += is_added
        if self.append_eod:
            last = np.cumsum(sequences) - 1
            tokens = np.insert(tokens, np.cumsum(lengths)[last], self.tokenizer.eod)
            lengths[last] += 1
        # Spans count tokens, none of which is added where there are spans.
        return EncodedColumn(tokens, lengths, sequences, encoded.loss_spans)


def _by_document(
    values: npt.NDArray[np.generic], sequences: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Sum of values [sequences] over the sequences of each document: [documents]."""
    before = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=before[1:])
    ends = np.cumsum(sequences)
    sums: npt.NDArray[np.int64] = before[ends] - before[ends - sequences]
    return sums
