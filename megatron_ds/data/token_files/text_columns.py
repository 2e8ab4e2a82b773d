"""Finds the columns of a table, or keys of a JSON object, that hold text or token ids.

pyarrow is imported by the callers, who have a schema of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, BinaryIO, NamedTuple

TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
"""Arrow's types of text; some writers do not mark text as such."""


class Columns(NamedTuple):
    """Names of columns, `a.b` for the field b of a.

    Attributes:
        text: Columns of text.
        ids: Columns of lists of integers, such as `input_ids`.
    """

    text: tuple[str, ...]
    ids: tuple[str, ...]


def columns_of_schema(schema: Any) -> Columns:
    """The columns of a pyarrow schema."""
    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    return Columns(
        tuple(name for name, type in leaves if _value_type(type) in TEXT_TYPES),
        tuple(name for name, type in leaves if _is_ids(type)),
    )


def columns_of_object(value: Mapping[str, Any]) -> Columns:
    """The keys of a JSON object, by the types of their values."""
    text = []
    ids = []
    for key, item in value.items():
        inner = {f"{key}.{name}": part for name, part in item.items()} if _is_map(item) else {}
        for name, part in (inner or {key: item}).items():
            if isinstance(part, str):
                text.append(name)
            elif is_ids(part):
                ids.append(name)
    return Columns(tuple(text), tuple(ids))


def is_ids(value: object) -> bool:
    """Whether a value is a list of integers, or of lists of integers, and not empty."""
    if not isinstance(value, list) or not value:
        return False
    return all(type(item) is int for item in value) or all(map(is_ids, value))


def columns_in_head(head: bytes) -> Columns | None:
    """The columns that the first bytes of a file show: of a JSON line, or of an Arrow file if
    pyarrow is installed; None if they do not show them."""
    line = head.lstrip(b"\xef\xbb\xbf \t\r\n").partition(b"\n")[0]
    if line.startswith(b"{"):
        with suppress(ValueError, RecursionError):
            return columns_of_object(json.loads(line))
        return None
    with suppress(Exception):  # libraries report damage by exceptions of their own types
        import pyarrow

        start = 8 if head.startswith(b"ARROW1\0\0") else 0
        return columns_of_schema(pyarrow.ipc.read_schema(pyarrow.py_buffer(head[start:])))
    return None


def columns_of_parquet(content: BinaryIO) -> Columns | None:
    """The columns of a parquet file; None without pyarrow, or if it is damaged."""
    with suppress(Exception):
        from pyarrow import parquet

        return columns_of_schema(parquet.read_schema(content))
    return None


def _leaves(name: str, type: Any) -> Iterator[tuple[str, Any]]:
    """Name and type of a column, or of the fields of a struct column."""
    if str(type).startswith("struct<"):
        for field in type:
            yield from _leaves(f"{name}.{field.name}", field.type)
    else:
        yield name, type


def _value_type(type: Any) -> str:
    """The name of a type; of a dictionary the type of its values."""
    is_dictionary = str(type).startswith("dictionary<")
    return str(type.value_type if is_dictionary else type)


def _is_ids(type: Any) -> bool:
    """Whether a type is of lists of integers, or of lists of such lists."""
    if str(type).startswith("dictionary<") or not hasattr(type, "value_type"):
        return False
    value = type.value_type
    return str(value).startswith(("int", "uint")) or _is_ids(value)


def _is_map(value: object) -> bool:
    return isinstance(value, dict)
