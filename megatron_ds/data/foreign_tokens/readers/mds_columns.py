"""Columns of ids in MDS samples, by the encodings `bytes` and `ndarray`.

bytes              the bare ids, whose type the program knows (int64 in LLM Foundry)
ndarray:T:SHAPE    the bare ids
ndarray:T          a byte with the number of dimensions (upper six bits) and log2 of the bytes of
                   a size (lower two bits), the sizes of the dimensions, the ids
ndarray            a byte for the type in front of that
ndarray::SHAPE     a byte for the type, the ids
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.foreign_tokens.foreign_file import ReadOptions
from megatron_ds.data.foreign_tokens.readers.id_columns import choose_name
from megatron_ds.data.token_files.token_file import IntArray, Tokens

TYPE_CODES = {
    8: "<u1",
    9: "<i1",
    16: "<u2",
    17: "<i2",
    32: "<u4",
    33: "<i4",
    64: "<u8",
    65: "<i8",
}
"""Integer types by the byte that stands for them."""
BYTES_TYPE = np.dtype("<i8")
Bytes = npt.NDArray[np.uint8]
Damaged = Callable[[int, str], Exception]
"""Makes the error of a sample of a block."""


@dataclass(frozen=True)
class IdColumn:
    """The column of ids of a sample.

    Attributes:
        name: Its name.
        encoding: Its encoding.
        dtype: Type of the ids.
        sizes: Bytes of each column of a sample, None where they vary.
        index: Its place among the columns.
    """

    name: str
    encoding: str
    dtype: np.dtype[np.generic]
    sizes: tuple[int | None, ...]
    index: int

    @property
    def has_type(self) -> bool:
        """Whether a sample begins with the type of its ids."""
        return self.encoding.split(":")[:2] in (["ndarray"], ["ndarray", ""])

    @property
    def has_shape(self) -> bool:
        """Whether a sample has the shape of its ids."""
        return self.encoding.startswith("ndarray") and self.encoding.count(":") < 2


class Values(NamedTuple):
    """The ids of samples.

    Attributes:
        tokens: [sum of the lengths] ids.
        ends: [samples] number of ids before the end of each sample.
    """

    tokens: Tokens
    ends: IntArray


class _Spans(NamedTuple):
    """[samples] first byte of each sample's ids, and the byte after the last."""

    starts: IntArray
    ends: IntArray


def chosen_column(
    columns: Sequence[tuple[str, str, int | None]],
    options: ReadOptions,
    peek: Callable[[IdColumn], np.dtype[np.generic]],
    index: str,
) -> IdColumn:
    """The column of ids.

    Args:
        columns: Name, encoding and size of each column.
        options: Its name, if the user gives it.
        peek: Reads the type from the first sample, where the encoding does not tell it.
        index: Path of the index, for messages.

    Raises:
        UserError: If there is none, or more than one, or it has no integers.
    """
    names = [name for name, encoding, _ in columns if encoding.partition(":")[0] == "ndarray"]
    names = names or [name for name, encoding, _ in columns if encoding == "bytes"]
    if options.column is not None:
        names = [name for name, encoding, _ in columns if encoding.startswith(("nd", "bytes"))]
    name = choose_name(names, [name for name, *_ in columns], options.column, index)
    at = next(at for at, column in enumerate(columns) if column[0] == name)
    encoding = columns[at][1]
    sizes = tuple(size for _, _, size in columns)
    for size in sizes:
        if size is not None and not (isinstance(size, int) and 0 <= size < 1 << 32):
            raise ValueError(f"a column of {size!r} bytes")
    column = IdColumn(name, encoding, BYTES_TYPE, sizes, at)
    if encoding == "bytes":
        dtype = options.token_type or BYTES_TYPE
    else:
        dtype = peek(column) if column.has_type else np.dtype(encoding.split(":")[1])
    if dtype.kind not in "iu":
        raise user_error("foreign-column-not-ids", path=index, column=name, type=dtype)
    return IdColumn(name, encoding, dtype.newbyteorder("<"), sizes, at)


def values_of(content: Bytes, bounds: IntArray, column: IdColumn, damaged: Damaged) -> Values:
    """The ids of consecutive samples.

    Args:
        content: The shard.
        bounds: [samples + 1] bytes at which they begin, and the last one ends.
        column: The column of ids.
        damaged: Makes the error of a sample that does not fit.
    """
    spans = _without_header(
        content, _column_spans(content, bounds, column, damaged), column, damaged
    )
    item = column.dtype.itemsize
    sizes = spans.ends - spans.starts
    _check(sizes % item != 0, damaged, f"its ids are no {column.dtype}")
    tokens = _gather(content, spans, sizes).view(column.dtype)
    return Values(tokens, np.cumsum(sizes // item))


def stated_type(
    content: Bytes, bounds: IntArray, column: IdColumn, damaged: Damaged
) -> np.dtype[np.generic]:
    """The type that a sample states; see `values_of`.

    Raises:
        UserError: If it is no integer type.
    """
    spans = _column_spans(content, bounds, column, damaged)
    code = int(content[spans.starts[0]]) if spans.starts[0] < spans.ends[0] else -1
    if code not in TYPE_CODES:
        raise damaged(0, f"its ids have the type code {code}, no integers")
    return np.dtype(TYPE_CODES[code])


def _column_spans(content: Bytes, bounds: IntArray, column: IdColumn, damaged: Damaged) -> _Spans:
    """The bytes of the column in each sample."""
    begins = bounds[:-1]
    varying = sum(size is None for size in column.sizes)
    _check(np.diff(bounds) < 4 * varying, damaged, "it is too short")
    stored = _numbers_at(content, begins, 4, varying)
    spans = _Spans(begins, begins)
    end = begins + 4 * varying
    seen = 0
    for at, size in enumerate(column.sizes):
        begin = end
        end = begin + (stored[:, seen] if size is None else size)
        seen += size is None
        if at == column.index:
            spans = _Spans(begin, end)
    _check(end != bounds[1:], damaged, "the sizes of its columns do not add up to its own")
    return spans


def _without_header(content: Bytes, spans: _Spans, column: IdColumn, damaged: Damaged) -> _Spans:
    """The bytes of the ids, behind their type and shape, which are checked."""
    starts = spans.starts
    if column.has_type:
        _check(spans.ends <= starts, damaged, "it has no type")
        codes = content[starts]
        expected = next(code for code, name in TYPE_CODES.items() if np.dtype(name) == column.dtype)
        is_other = codes != expected
        if is_other.any():
            other = TYPE_CODES.get(int(codes[is_other.argmax()]), "no integers")
            _check(is_other, damaged, f"its ids are {other}, those of the first are {column.dtype}")
        starts = starts + 1
    if column.has_shape:
        _check(spans.ends <= starts, damaged, "it has no shape")
        heads = content[starts]
        starts = starts + 1
        lengths = np.ones(len(starts), np.int64)
        for head in np.unique(heads):
            rows = np.flatnonzero(heads == head)
            dimensions = int(head) >> 2
            width = 1 << (int(head) & 3)
            is_short = spans.ends[rows] - starts[rows] < dimensions * width
            if is_short.any():
                raise damaged(int(rows[is_short.argmax()]), "it is too short for its shape")
            shape = _numbers_at(content, starts[rows], width, dimensions)
            lengths[rows] = shape.prod(axis=1)
            starts[rows] += dimensions * width
        is_other = spans.ends - starts != lengths * column.dtype.itemsize
        _check(is_other, damaged, f"its shape is not that of its ids as {column.dtype}")
    return _Spans(starts, spans.ends)


def _numbers_at(content: Bytes, starts: IntArray, width: int, count: int) -> IntArray:
    """[starts, count] unsigned numbers of `width` bytes that follow each other from each start."""
    at = starts[:, None] + np.arange(width * count)
    numbers: IntArray = content[at].view(f"<u{width}").astype(np.int64)
    return numbers


def _gather(content: Bytes, spans: _Spans, sizes: IntArray) -> Bytes:
    """The bytes of all spans, concatenated."""
    steps = np.diff(spans.starts)
    first = int(spans.starts[0])
    if (sizes == sizes[0]).all() and (len(steps) == 0 or (steps == steps[0]).all()):
        # Rows of one length: a copy of a rectangle of the memory.
        step = int(steps[0]) if len(steps) else 0
        rows = np.lib.stride_tricks.as_strided(
            content[first:], (len(sizes), int(sizes[0])), (step, 1), writeable=False
        )
        return np.ascontiguousarray(rows).reshape(-1)
    view = content.data
    pairs = zip(spans.starts.tolist(), spans.ends.tolist(), strict=True)
    return np.frombuffer(b"".join([view[start:end] for start, end in pairs]), np.uint8)


def _check(is_wrong: npt.NDArray[np.bool_], damaged: Damaged, reason: str) -> None:
    """Raises the error of the first sample of which something is wrong."""
    if is_wrong.any():
        raise damaged(int(is_wrong.argmax()), reason)
