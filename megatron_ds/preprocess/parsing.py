"""Items of the input to the texts they hold, or to what is wrong with them, in words.

Knows JSON and the keys; how inputs are read stands in `sources.py`. Knows no tokenizer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ds.preprocess.document_readers import (
    INVALID_TEXT,
    TOO_LONG,
    RawDocument,
    UnreadableDocument,
)

try:
    import orjson
except ImportError:  # slower, and the same result
    orjson = None  # type: ignore[assignment]

KEYS_SHOWN = 8
MAX_NESTING = 400
"""Levels that json reads for certain."""

BROKEN_JSON = "broken JSON"
MISSING_KEY = "missing key"
WRONG_TYPE = "wrong type"
EMPTY_TEXT = "empty text"
REFUSED_TEXT = "refused by the tokenizer"


@dataclass(frozen=True)
class TextFields:
    """Which texts are taken. keys: `a.b` is the field b of a, where there is no field of that very
    name. max_document_bytes: of one text; longer ones are refused.
    """

    keys: Sequence[str]
    max_document_bytes: int


class RejectedDocument(NamedTuple):
    """What gives no document, and why. content: the line or the fields, as text."""

    file: str
    line: int
    reason: str
    words: str
    content: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.words}"


class Document(NamedTuple):
    """The texts of one item, one per key."""

    item: RawDocument
    texts: list[str]


def parse(
    items: Iterable[RawDocument], wanted: TextFields
) -> tuple[list[Document], list[RejectedDocument]]:
    """What gives documents, and what does not."""
    documents: list[Document] = []
    problems: list[RejectedDocument] = []
    for item in items:
        found = texts_of(item, wanted)
        if isinstance(found, RejectedDocument):
            problems.append(found)
        else:
            documents.append(Document(item, found))
    return documents, problems


def texts_of(item: RawDocument, wanted: TextFields) -> list[str] | RejectedDocument:
    """The texts of an item, one per key."""
    if isinstance(item.value, bytes):
        quick = _fast_parse(item.value)
        if quick is not None:
            found = _texts_in(item, quick, wanted)
            if not isinstance(found, RejectedDocument):
                return found
    # Whatever is not right is told by what json makes of it, whichever parser is installed.
    return _strict_parse(item, wanted)


def _fast_parse(line: bytes) -> object | None:
    """What orjson makes of a line; None if it is not there or does not take the line.

    It takes nothing that json refuses but deep nesting, and less: no NaN, no half of a surrogate
    pair, no byte order mark.
    """
    if orjson is None or (
        len(line) > MAX_NESTING and line.count(b"[") + line.count(b"{") > MAX_NESTING
    ):
        return None
    try:
        value: object = orjson.loads(line)
    except ValueError:
        return None
    return value


def _strict_parse(item: RawDocument, wanted: TextFields) -> list[str] | RejectedDocument:
    value: object = item.value
    if isinstance(value, UnreadableDocument):
        return reject(item, value.reason, value.words)
    if isinstance(value, bytes):
        try:
            value = json.loads(value)
        except UnicodeDecodeError as error:
            return reject(item, INVALID_TEXT, f"not JSON: {error}")
        except ValueError as error:
            return reject(item, BROKEN_JSON, f"not JSON: {error}")
        except RecursionError:
            return reject(item, BROKEN_JSON, "not read: it is nested too deeply")
    return _texts_in(item, value, wanted)


def _texts_in(item: RawDocument, value: object, wanted: TextFields) -> list[str] | RejectedDocument:
    if not isinstance(value, dict):
        return reject(item, WRONG_TYPE, f"must be a JSON object, not {type(value).__name__}")
    texts: list[str] = []
    for key in wanted.keys:
        try:
            text = _field(value, key)
        except KeyError:
            shown = [repr(name[:40]) for name in itertools.islice(value, KEYS_SHOWN)]
            more = ", ..." if len(value) > KEYS_SHOWN else ""
            has = f"(it has {', '.join(shown) or 'none'}{more})"
            return reject(item, MISSING_KEY, f"has no key {key!r} {has}")
        if not isinstance(text, str):
            return reject(item, WRONG_TYPE, f"{key!r} must be text, not {type(text).__name__}")
        try:
            size, limit = utf8_size(text), wanted.max_document_bytes
        except UnicodeEncodeError:
            words = f"{key!r} holds half of a surrogate pair, which is no text"
            if not isinstance(item.value, bytes):  # that is how the reader marks such bytes
                words = f"{key!r} is no UTF-8"
            return reject(item, INVALID_TEXT, words)
        if size > limit:
            words = f"{key!r} has {size} bytes, more than {limit} (--max-document-bytes)"
            return reject(item, TOO_LONG, words)
        texts.append(text)
    return texts


def _field(value: dict[str, Any], key: str) -> Any:
    """The value of a key, or of `a.b` the field b of a. Raises KeyError if there is none."""
    if key in value or "." not in key:
        return value[key]
    inner: Any = value
    for part in key.split("."):
        if not isinstance(inner, dict):
            raise KeyError(key)
        inner = inner[part]
    return inner


def reject(item: RawDocument, reason: str, words: str) -> RejectedDocument:
    """What is wrong with an item, with its content."""
    if isinstance(item.value, bytes):
        content = item.value.rstrip(b"\r\n").decode("utf-8", "surrogateescape")
    elif isinstance(item.value, UnreadableDocument):
        content = item.value.content
    else:
        content = json.dumps(item.value, default=str)
    return RejectedDocument(item.file, item.line, reason, words, content)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8. Raises UnicodeEncodeError for half of a surrogate pair."""
    return len(text) if text.isascii() else len(text.encode())
