"""Arrays: OLMo's `.npy` without a header, and NumPy's own with one.

OLMo-core and dolma write the ids alone, in the smallest unsigned type that holds the vocabulary,
and next to them a `.csv.gz` without a header line: begin and end of each document in tokens, which
dolma continues with the id of the document, its file and its line.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import tokenize
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import user_error
from megatron_ds.data.foreign_tokens.foreign_file import ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.numbers import (
    NumberFile,
    file_size,
    looks_wide,
    open_each,
)

OLMO_TYPES = tuple(np.dtype(name) for name in ("<u1", "<u2", "<u4", "<u8"))
METADATA_SUFFIX = ".csv.gz"


def open_olmo(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens `.npy` files without a header; see `Reader`."""
    files = open_each(paths, lambda path: _open_olmo(path, options))
    has_ends = all(file.ends is not None for file in files)
    return ForeignTokens(
        files,
        f"document ends of {METADATA_SUFFIX}" if has_ends else "",
        notes=(f"ids are {files[0].dtype}",),
    )


def _open_olmo(path: str, options: ReadOptions) -> NumberFile:
    size = file_size(path)
    ends = _ends(f"{path.removesuffix('.npy')}{METADATA_SUFFIX}", options.has_boundaries)
    count = None if ends is None or not len(ends) else int(ends[-1])
    dtype = options.token_type or _olmo_type(path, size, count, options.vocab_size)
    item = dtype.itemsize
    if size % item:
        raise user_error("foreign-size-odd", path=path, size=size, dtype=dtype)
    if count is not None and size != count * item:
        name = f"{path.removesuffix('.npy')}{METADATA_SUFFIX}"
        raise user_error(
            "foreign-size-differs",
            path=path,
            size=size,
            expected=count * item,
            source=f"{name}, whose last document ends after {count} ids, as {dtype}",
        )
    if options.token_type is None and item == 2 and looks_wide(path):
        raise user_error("foreign-ids-look-wide", path=path)
    return NumberFile(path, size, dtype, 0, size // item, ends)


def _olmo_type(
    path: str, size: int, count: int | None, vocab_size: int | None
) -> np.dtype[np.generic]:
    """The type of the ids: by their number, or by the vocabulary."""
    if count is None:
        if vocab_size is None:
            raise user_error("foreign-width-unknown", path=path)
        return next(dtype for dtype in OLMO_TYPES if vocab_size - 1 <= np.iinfo(dtype).max)
    for dtype in OLMO_TYPES:
        if count * dtype.itemsize == size:
            return dtype
    raise user_error(
        "foreign-size-differs",
        path=path,
        size=size,
        expected=2 * count,
        source=f"its {METADATA_SUFFIX}, whose last document ends after {count} ids, as uint16 "
        "(no other width fits, either)",
    )


def _ends(path: str, has_boundaries: bool) -> npt.NDArray[np.int64] | None:
    """The ends of the documents; None if the file is missing, and they are found in another way."""
    if not os.path.exists(path):
        if has_boundaries:
            return None
        raise user_error("foreign-index-missing", path=path, index=METADATA_SUFFIX)
    ends = array("q")
    end = 0
    try:
        with gzip.open(path, "rb") as raw, io.TextIOWrapper(raw, "utf-8", "replace") as text:
            for row in csv.reader(text):
                begin = int(row[0])
                if begin != end or int(row[1]) < begin:
                    reason = f"document {len(ends)} begins at {begin}, and the one before it ends "
                    raise user_error("foreign-index-damaged", path=path, reason=f"{reason}at {end}")
                end = int(row[1])
                ends.append(end)
    except (OSError, EOFError, ValueError, IndexError, OverflowError, csv.Error) as error:
        if hasattr(error, "problems"):
            raise
        reason = f"line {len(ends) + 1}: {error}"
        raise user_error("foreign-index-damaged", path=path, reason=reason) from error
    return np.frombuffer(ends, np.int64)


def open_numpy(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens `.npy` files with NumPy's header, of one dimension, or of two with a row per document;
    see `Reader`."""
    files = open_each(paths, _open_numpy)
    has_ends = all(file.ends is not None for file in files)
    return ForeignTokens(files, "rows of the arrays" if has_ends else "", drops_tail=has_ends)


def _open_numpy(path: str) -> NumberFile:
    size = file_size(path)
    try:
        # Pickled objects are refused, and nothing but the header is read.
        content = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError, OverflowError, tokenize.TokenError) as error:
        raise user_error("foreign-file-damaged", path=path, reason=error) from error
    if (
        not isinstance(content, np.memmap)
        or content.dtype.kind not in "iu"
        or content.ndim not in (1, 2)
    ):
        shown = (
            f"{content.dtype} {list(content.shape)}"
            if isinstance(content, np.memmap)
            else "archive"
        )
        raise user_error("foreign-array-of-other-shape", path=path, shown=shown)
    if not content.flags.c_contiguous or content.dtype.byteorder == ">":
        raise user_error("foreign-array-of-other-shape", path=path, shown="another byte order")
    ends = np.arange(1, len(content) + 1) * content.shape[1] if content.ndim == 2 else None
    expected = content.offset + content.nbytes
    if size != expected:
        raise user_error(
            "foreign-size-differs", path=path, size=size, expected=expected, source="its header"
        )
    return NumberFile(path, size, content.dtype, content.offset, content.size, ends)
