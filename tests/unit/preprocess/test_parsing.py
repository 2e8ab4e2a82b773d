"""Parsing: orjson and json give the same texts or rejections for any bytes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.preprocess.documents import parsing as module
from megatron_ds.preprocess.documents.formats import INVALID_TEXT, RawDocument
from megatron_ds.preprocess.documents.parsing import (
    BROKEN_JSON,
    MISSING_KEY,
    WRONG_TYPE,
    RejectedDocument,
    TextFields,
    texts_of,
)

FIELDS = TextFields(("text", "meta.b"), 1000)


def both(line: bytes, fields: TextFields = FIELDS) -> list[str] | RejectedDocument:
    """Texts of a line; orjson and json must agree."""
    quick = texts_of(RawDocument("f", 1, line), fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "orjson", None)
        assert texts_of(RawDocument("f", 1, line), fields) == quick
    return quick


TEXT = b'{"text": "%s", "meta": {"b": "y"}}'
WELL = b'{"text": "x", "meta": {"b": "y"}, "n": %s}'
NUMBERS = [*b"NaN Infinity -Infinity 1e999 -0 1E5 1.5".split(), b"9" * 30, b"9" * 400]
LONG_NUMBERS = [b"9" * 5000, b"-" + b"9" * 5000, b"0." + b"9" * 5000, b"1e" + b"9" * 5000]
LINES = [
    *(WELL % number for number in [*NUMBERS, *LONG_NUMBERS]),
    *(WELL % number for number in (b"01", b"1.", b".5", b"+1", b"-", b"0x1", b"1_0", b"1e")),
    *(WELL % text for text in (b'"\\ud83d"', b'"\\ud83d\\ude00"', b'"\xed\xa0\x80"', b'"\xff"')),
    *(WELL % (b"[" * n + b"]" * n) for n in (1, 100, 500, 1000, 1020, 1024, 1100, 100_000)),
    *(TEXT % text for text in (b"\\ud83d", b"\xed\xa0\x80", b"\xff", b"\xc0\x80", b"a\0b", b"\t")),
    *(TEXT % text for text in (b"\\u0000", b"\\x", b"\\/", b"\x7f")),
    b'{"text": "x", "meta": {"b": "y"}, "text": "z"}',
    b'{"text": "x", "meta": {"b": "y"}, "meta": 1}',
    b'{"text": "x", "meta": {"b": "y", "b": "z"}, "meta.b": "w"}',
    b'\xef\xbb\xbf{"text": "x", "meta": {"b": "y"}}',
    '{"text": "x", "meta": {"b": "y"}}'.encode("utf-16"),
    '{"text": "x", "meta": {"b": "y"}}'.encode("utf-16-le"),
    '{"text": "x", "meta": {"b": "y"}}'.encode("utf-32-be"),
    *((WELL % b"1") + end for end in (b" \r\n", b"\x0b", b"\0", b",", b"{}", b" \t", b"\xc2\xa0")),
    b"null",
    b"1",
    b"[]",
    b'"text"',
    b"{}",
    b"",
    b" ",
    b"{",
    b"}",
    b"\xff\xfe",
    b"'text'",
    b'{"text": 12345678901234567890123, "meta": {"b": "y"}}',
    *(TEXT % text for text in (b"x" * 1001, b"\xc3\xa9" * 501, b"\xc3\xa9" * 500)),
]


@pytest.mark.parametrize(
    "line", LINES, ids=[f"{n}: {repr(line[-40:])[2:-1]}" for n, line in enumerate(LINES)]
)
def test_both_parsers_agree(line: bytes) -> None:
    both(line)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=6,
)


@given(
    value=st.dictionaries(st.sampled_from(["text", "meta", "meta.b", "c"]), VALUES, max_size=4),
    ascii_only=st.booleans(),
    changes=st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=3)), max_size=2),
)
@settings(max_examples=250, deadline=None, derandomize=True, database=None)
def test_both_parsers_agree_on_damaged_lines(
    value: dict[str, object], ascii_only: bool, changes: list[tuple[int, bytes]]
) -> None:
    line = json.dumps(value, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    for place, new in changes:
        line = line[:place] + new + line[place + 1 :]
    both(line)
    both(line, TextFields(("text",), 3))


def test_a_key_with_a_dot_precedes_a_field_of_an_object() -> None:
    line = b'{"text": "x", "meta": {"b": "y"}, "meta.b": "w"}'
    assert both(line) == ["x", "w"]
    assert both(b'{"text": "x", "meta": {"b": "y"}}') == ["x", "y"]
    assert both(b'{"a": {"b": {"c": "z"}}}', TextFields(("a.b.c",), 9)) == ["z"]


def test_the_fast_parser_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def loads(line: bytes) -> object:
        seen.append(line)
        return orjson.loads(line)

    monkeypatch.setattr(module, "orjson", SimpleNamespace(loads=loads))
    assert texts_of(RawDocument("f", 1, WELL % b"1"), FIELDS) == ["x", "y"]
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (TEXT % b"\\ud800", INVALID_TEXT),
        (b'{"text": "x"', BROKEN_JSON),
        (b'{"text": 12345678901234567890123, "meta": {"b": "y"}}', WRONG_TYPE),
        (b'{"text": "x", "meta": {"b": null}}', WRONG_TYPE),
        (b'{"text": "x", "meta": "y"}', MISSING_KEY),
        (WELL % (b"[" * 100_000 + b"]" * 100_000), BROKEN_JSON),
    ],
)
def test_reason_of_a_rejection(line: bytes, reason: str) -> None:
    rejected = both(line)
    assert isinstance(rejected, RejectedDocument)
    assert rejected.reason == reason


def test_lone_surrogate_in_another_field_is_accepted() -> None:
    assert both(WELL % b'"\\ud800"') == ["x", "y"]
