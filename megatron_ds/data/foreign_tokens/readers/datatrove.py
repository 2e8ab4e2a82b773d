"""datatrove's `.ds` files: bare ids, with the ends of the documents in `.ds.index`.

`.ds.index` has one uint64 per document, its end in tokens, without a leading 0. `.ds.metadata`
has the name of the tokenizer and the bytes of an id, `NAME|2`, then the number of ids.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.data.foreign_tokens.foreign_file import ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.numbers import (
    NumberFile,
    file_size,
    looks_wide,
    open_each,
)

TYPES: dict[int, np.dtype[np.generic]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
UNSHUFFLED = re.compile(r"(.*)_unshuffled\.ds")
SHUFFLED = re.compile(r"(.*)_\d+_(doc|chunk)_shuffled\.ds")


def open_files(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens `.ds` files; see `Reader`."""
    raise_if_any(_repeated(paths))
    files = open_each(paths, lambda path: _open(path, options))
    has_ends = all(file.ends is not None for file in files)
    return ForeignTokens(
        files,
        "document ends of .ds.index" if has_ends else "",
        warnings=tuple(_pieces(paths)) if has_ends else (),
    )


def _open(path: str, options: ReadOptions) -> NumberFile:
    size = file_size(path)
    ends = _ends(f"{path}.index", options.has_boundaries)
    width, count = _metadata(f"{path}.metadata")
    if options.token_type is not None:
        width = options.token_type.itemsize
    if not width and ends is not None and len(ends):
        width = size // int(ends[-1]) if ends[-1] and not size % int(ends[-1]) else 0
    dtype = options.token_type or TYPES.get(width)
    if dtype is None:
        raise user_error("foreign-width-unknown", path=path)
    item = dtype.itemsize
    if count is not None and size != count * item:
        source = f"{path}.metadata, with {count} ids of {item} bytes,"
        raise user_error(
            "foreign-size-differs", path=path, size=size, expected=count * item, source=source
        )
    if size % item:
        raise user_error("foreign-size-odd", path=path, size=size, dtype=dtype)
    if ends is not None:
        last = int(ends[-1]) if len(ends) else 0
        if last * item != size:
            raise user_error(
                "foreign-size-differs",
                path=path,
                size=size,
                expected=last * item,
                source=f"{path}.index, whose last document ends after {last} ids of {item} bytes,",
            )
    if count is None and options.token_type is None and looks_wide(path):
        raise user_error("foreign-ids-look-wide", path=path)
    return NumberFile(path, size, dtype, 0, size // item, ends)


def _ends(path: str, has_boundaries: bool) -> npt.NDArray[np.uint64] | None:
    """The ends of the documents; None if they are found in another way and the file is missing."""
    if not os.path.exists(path):
        if has_boundaries:
            return None
        raise user_error("foreign-index-missing", path=path, index=".ds.index")
    size = os.stat(path).st_size
    if size % 8:
        raise user_error("foreign-index-damaged", path=path, reason=f"{size} bytes are no uint64")
    ends: npt.NDArray[np.uint64] = np.fromfile(path, "<u8")
    raise_if_any(order_problems(path, ends))
    return ends


def order_problems(path: str, ends: npt.NDArray[np.uint64]) -> Iterator[Problem]:
    """The problem of document ends that are not ascending."""
    wrong = np.flatnonzero(ends[1:] < ends[:-1])
    if len(wrong):
        at = int(wrong[0]) + 1
        reason = f"document {at} ends after {ends[at]} ids, before document {at - 1} does"
        yield Problem("foreign-index-damaged", path=path, reason=reason)


def _metadata(path: str) -> tuple[int, int | None]:
    """Bytes of an id, 0 if unknown, and number of ids."""
    if not os.path.exists(path):
        return 0, None
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    width = lines[0].rpartition("|")[2] if lines else ""
    numbers = (width, *(line.strip() for line in lines[1:2]))
    if len(numbers) < 2 or not all(text.isdecimal() and len(text) < 20 for text in numbers):
        raise user_error("foreign-index-damaged", path=path, reason="it is no metadata of a .ds")
    return int(width), int(numbers[1])


def _repeated(paths: Sequence[str]) -> Iterator[Problem]:
    """The problem of files whose tokens are also in others, in another order."""
    shuffled = {m[1]: path for path in paths if (m := SHUFFLED.fullmatch(path))}
    for path in paths:
        match = UNSHUFFLED.fullmatch(path)
        if match and match[1] in shuffled:
            yield Problem("foreign-tokens-twice", path=path, other=shuffled[match[1]])


def _pieces(paths: Sequence[str]) -> Iterator[Problem]:
    """The warning about files of shuffled chunks, in which documents are divided."""
    for path in paths:
        match = SHUFFLED.fullmatch(path)
        if match and match[2] == "chunk":
            yield Problem("foreign-documents-divided", path=path)
            return
