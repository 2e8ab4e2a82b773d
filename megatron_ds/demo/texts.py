"""The documents of the corpus that the demo trains on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from megatron_ds.config.problems import user_error
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of

PROMPT_WORDS = 8
PROMPT_CHARACTERS = 48


def split_of(corpus: Path) -> str:
    """--split: a twentieth of the documents each for validation and test, at least one.

    Raises:
        UserError: If there are fewer than three documents.
    """
    documents = sum(1 for _ in texts_in(corpus))
    if documents < 3:
        raise user_error("demo-corpus-too-small", corpus=corpus, documents=documents)
    held_out = max(1, documents // 20)
    return f"{documents - 2 * held_out},{held_out},{held_out}"


def prompt_prefixes(corpus: Path) -> list[str]:
    """The first words of the last three documents, which are held out of 40 or more documents."""
    last = deque(texts_in(corpus), maxlen=3)
    return [" ".join(text.split()[:PROMPT_WORDS])[:PROMPT_CHARACTERS] for text in last]


def texts_in(corpus: Path) -> Iterator[str]:
    """The documents that preprocessing takes of a file, which may be compressed."""
    inputs = InputSpec((str(corpus),))
    wanted = TextFields(("text",), inputs.max_document_bytes)
    for item in DocumentReader(inputs, wanted.keys):
        texts = texts_of(item, wanted)
        if not isinstance(texts, RejectedDocument) and texts[0].strip():
            yield texts[0]
