"""Parsing of raw documents: the texts of the requested keys, or the reason of a rejection.

Knows JSON and the keys; reading is defined in `document_readers.py`. Knows no tokenizer.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_ds.config.problems import option
from megatron_ds.data.token_files.text_columns import is_ids
from megatron_ds.preprocess.documents.formats import (
    INVALID_TEXT,
    TOO_LONG,
    RawDocument,
    UnreadableDocument,
)

try:
    import orjson
except ImportError:  # json gives the same result, more slowly
    orjson = None  # type: ignore[assignment]

KEYS_SHOWN = 8
CONVERSATION_KEYS = frozenset(("messages", "conversations"))
"""Keys by which programs write conversations."""
MAX_NESTING = 400
"""Nesting depth that json reads on any platform."""

BROKEN_JSON = "broken JSON"
MISSING_KEY = "missing key"
WRONG_TYPE = "wrong type"
EMPTY_TEXT = "empty text"
LOST_TEXT = "text without tokens"
REFUSED_TEXT = "refused by the tokenizer"


@dataclass(frozen=True)
class TextFields:
    """The texts of a document that are used.

    Attributes:
        keys: `a.b` is the field b of a, unless there is a field named `a.b`.
        max_document_bytes: Longer texts are rejected.
        id_keys: Keys whose value may also be an integer, read as its digits.
    """

    keys: Sequence[str]
    max_document_bytes: int
    id_keys: Sequence[str] = ()


class RejectedDocument(NamedTuple):
    """A line or row without a usable document.

    Attributes:
        file: Name of the file.
        line: Line or row, from 1.
        reason: Category, by which rejected documents are counted.
        message: Description of the error.
        content: The line or the fields, as text.
    """

    file: str
    line: int
    reason: str
    message: str
    content: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"

    def to_json_line(self) -> bytes:
        """Entry of the list of rejected documents, with the line's end."""
        return (json.dumps(self._asdict()) + "\n").encode("ascii")


def texts_of(item: RawDocument, fields: TextFields) -> list[str] | RejectedDocument:
    """The texts of a raw document, one per key."""
    if isinstance(item.value, bytes):
        quick = _fast_parse(item.value)
        if quick is not None:
            texts = _texts_in(item, quick, fields)
            if not isinstance(texts, RejectedDocument):
                return texts
    # Messages come from json, so that they do not depend on whether orjson is installed.
    value = fields_of(item)
    return value if isinstance(value, RejectedDocument) else _texts_in(item, value, fields)


def _fast_parse(line: bytes) -> object | None:
    """A line parsed by orjson; None if it is not installed or rejects the line.

    orjson accepts less than json (no NaN, lone surrogates or byte order marks), except for deep
    nesting, which is excluded here.
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


def fields_of(item: RawDocument) -> object:
    """The content of a raw document, parsed by json; a `RejectedDocument` if it has none."""
    if isinstance(item.value, UnreadableDocument):
        return reject(item, item.value.reason, item.value.message)
    if not isinstance(item.value, bytes):
        return item.value
    try:
        value: object = json.loads(item.value)
    except ValueError as error:
        reason = INVALID_TEXT if isinstance(error, UnicodeDecodeError) else BROKEN_JSON
        return reject(item, reason, f"not JSON: {error}")
    except RecursionError:
        return reject(item, BROKEN_JSON, "nested too deeply")
    return value


def _texts_in(item: RawDocument, value: object, fields: TextFields) -> list[str] | RejectedDocument:
    if not isinstance(value, dict):
        return reject(item, WRONG_TYPE, f"must be a JSON object, not {type(value).__name__}")
    texts: list[str] = []
    for key in fields.keys:
        try:
            text = _field(value, key)
        except KeyError:
            shown = [repr(name[:40]) for name in itertools.islice(value, KEYS_SHOWN)]
            more = ", ..." if len(value) > KEYS_SHOWN else ""
            has = f"(it has {', '.join(shown) or 'none'}{more})"
            if CONVERSATION_KEYS & value.keys():
                has += f"; conversations are read with {option('chat')}"
            return reject(item, MISSING_KEY, f"has no key {key!r} {has}")
        if type(text) is int and key in fields.id_keys:
            text = str(text)
        if not isinstance(text, str):
            if not isinstance(text, bytes):
                wrong = "token ids" if is_ids(text) else type(text).__name__
                return reject(item, WRONG_TYPE, f"{key!r} must be text, not {wrong}")
            # Of a table whose writer does not mark columns as text.
            text = text.decode("utf-8", "surrogateescape")
        try:
            size = utf8_size(text)
            limit = fields.max_document_bytes
        except UnicodeEncodeError:
            message = f"{key!r} contains a lone surrogate, which is not valid text"
            if not isinstance(item.value, bytes):  # readers decode invalid bytes to surrogates
                message = f"{key!r} is not UTF-8"
            return reject(item, INVALID_TEXT, message)
        if size > limit:
            message = f"{key!r} has {size} bytes, more than the maximum document size {limit}"
            return reject(item, TOO_LONG, message)
        texts.append(text)
    return texts


def _field(value: dict[str, Any], key: str) -> Any:
    """The value of a key, or for `a.b` the field b of a. Raises KeyError if the key is missing."""
    if key in value or "." not in key:
        return value[key]
    inner: Any = value
    for part in key.split("."):
        if not isinstance(inner, dict):
            raise KeyError(key)
        inner = inner[part]
    return inner


def reject(item: RawDocument, reason: str, message: str) -> RejectedDocument:
    """A rejected document, with its content."""
    if isinstance(item.value, bytes):
        content = item.value.rstrip(b"\r\n").decode("utf-8", "surrogateescape")
    elif isinstance(item.value, UnreadableDocument):
        content = item.value.content
    else:
        content = json.dumps(item.value, default=str)
    return RejectedDocument(item.file, item.line, reason, message, content)


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8. Raises UnicodeEncodeError for a lone surrogate."""
    return len(text) if text.isascii() else len(text.encode())
