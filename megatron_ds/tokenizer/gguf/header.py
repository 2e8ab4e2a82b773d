"""The header of a file of llama.cpp: its keys, and name, shape, type and place of each tensor.

The format is GGUF, as ggml's documentation describes it, in versions 2 and 3 and either byte order.
An array of numbers is read at once: the reader of the library `gguf` makes an object of each number
and each token, which takes seconds for a vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
"""First bytes of a file of llama.cpp."""
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
"""Bytes of which the place of the first tensor is a multiple, in a file that does not say so."""
ALIGNMENT_KEY = "general.alignment"
STRING = 8
ARRAY = 9
FLOAT32 = 6
FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    FLOAT32: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of `struct` by the type of a number."""


@dataclass(frozen=True)
class TensorInfo:
    """What the header says of a tensor."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in torch; the file has the reverse."""
    type_index: int
    """A `GGMLQuantizationType` of the library `gguf`."""
    offset: int
    """Bytes from the beginning of the file."""


@dataclass(frozen=True)
class GgufHeader:
    """What a file has before its tensors."""

    keys: Mapping[str, Any]
    """Values by complete key: a bool, integer, float or text, or a list of such."""
    single_precision: frozenset[str]
    """Keys whose values are floats of 32 bits."""
    tensors: tuple[TensorInfo, ...]


def read_header(path: str | Path) -> GgufHeader:
    """Reads the header of a file.

    Raises:
        ValueError: If it is damaged, of another version, or has arrays of arrays, which llama.cpp
            does not read either.
        OSError: If the file cannot be read.
    """
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        return _Cursor(content).header()


class _Cursor:
    """Reads values one after another."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._position = 0
        self._order = "<"

    def header(self) -> GgufHeader:
        if self._bytes(len(MAGIC)) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._read_version()
        tensor_count = self._number("Q")
        key_count = self._number("Q")
        keys: dict[str, Any] = {}
        single_precision = set()
        for _ in range(key_count):
            name = self._text()
            if name in keys:
                raise ValueError(f"it has the key {name} twice")
            keys[name], value_type = self._value()
            if value_type == FLOAT32:
                single_precision.add(name)
        tensors = self._tensors(tensor_count, keys.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT))
        return GgufHeader(keys, frozenset(single_precision), tensors)

    def _read_version(self) -> None:
        version = self._number("I")
        if version & 0xFFFF == 0:  # the other byte order
            version = int.from_bytes(version.to_bytes(4, "little"), "big")
            self._order = ">"
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}, not 2 or 3")

    def _tensors(self, count: int, alignment: Any) -> tuple[TensorInfo, ...]:
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"{ALIGNMENT_KEY} is {alignment}, no power of two")
        rows: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._text()
            if name in rows:
                raise ValueError(f"it has the tensor {name} twice")
            lengths = self._numbers("Q", self._number("I"))
            rows[name] = (lengths[::-1], self._number("I"), self._number("Q"))
        start = self._position + -self._position % alignment
        return tuple(
            TensorInfo(name, shape, type_index, start + offset)
            for name, (shape, type_index, offset) in rows.items()
        )

    def _value(self) -> tuple[Any, int]:
        """A value and its type, or that of its elements."""
        value_type = self._number("I")
        if value_type != ARRAY:
            return self._scalar(value_type), value_type
        element_type = self._number("I")
        count = self._number("Q")
        if element_type == STRING:
            return [self._text() for _ in range(count)], element_type
        return list(self._numbers(_format_of(element_type), count)), element_type

    def _scalar(self, value_type: int) -> Any:
        return self._text() if value_type == STRING else self._number(_format_of(value_type))

    def _text(self) -> str:
        return self._bytes(self._number("Q")).decode("utf-8")

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = count * struct.calcsize(f"={code}")
        return struct.unpack(f"{self._order}{count}{code}", self._bytes(size))

    def _bytes(self, size: int) -> bytes:
        end = self._position + size
        if end > len(self._content):
            raise ValueError(f"it ends within its header, at byte {len(self._content)}")
        data = self._content[self._position : end]
        self._position = end
        return data


def _format_of(value_type: int) -> str:
    if value_type not in FORMATS:
        raise ValueError(f"the type {value_type} of a value is unknown")
    return FORMATS[value_type]
