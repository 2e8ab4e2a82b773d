"""Flat token files: nanoGPT's without a header, and those of llm.c and modded-nanogpt with one.

nanoGPT: uint16 ids alone. llm.c and modded-nanogpt: 256 int32 of which the first three are the
magic, the version and the number of ids, then the ids. The magic and version decide their type.
Neither has documents; nanoGPT puts the end token after a document, llm.c in front of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from megatron_ds.config.problems import user_error
from megatron_ds.data.foreign_tokens.foreign_file import ForeignTokens, ReadOptions
from megatron_ds.data.foreign_tokens.readers.numbers import (
    NumberFile,
    file_size,
    looks_wide,
    open_each,
)

UINT16: np.dtype[np.generic] = np.dtype("<u2")
HEADER_BYTES = 1024
HEADERS: dict[tuple[int, int], np.dtype[np.generic]] = {
    (20240520, 1): UINT16,
    (20240801, 7): np.dtype("<u4"),
}
"""Type of the ids by magic and version."""


def open_bare(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens files without a header; see `Reader`."""
    dtype = options.token_type or UINT16

    def open_one(path: str) -> NumberFile:
        size = file_size(path)
        if size % dtype.itemsize:
            raise user_error("foreign-size-odd", path=path, size=size, dtype=dtype)
        if options.token_type is None and looks_wide(path):
            raise user_error("foreign-ids-look-wide", path=path)
        return NumberFile(path, size, dtype, 0, size // dtype.itemsize)

    files = open_each(paths, open_one)
    return ForeignTokens(files, "", notes=(f"ids are {dtype}",))


def open_with_header(paths: Sequence[str], options: ReadOptions) -> ForeignTokens:
    """Opens files of llm.c and modded-nanogpt; see `Reader`."""

    def open_one(path: str) -> NumberFile:
        size = file_size(path)
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            raise user_error("foreign-header-truncated", path=path, size=size, whole=HEADER_BYTES)
        magic, version, count = struct.unpack_from("<3i", head)
        dtype = HEADERS.get((magic, version))
        if dtype is None:
            raise user_error("llm-c-version-unknown", path=path, magic=magic, version=version)
        expected = HEADER_BYTES + count * dtype.itemsize
        if size != expected:
            raise user_error(
                "foreign-size-differs",
                path=path,
                size=size,
                expected=expected,
                source=f"its header, with {count} ids as {dtype},",
            )
        return NumberFile(path, size, dtype, HEADER_BYTES, count)

    files = open_each(paths, open_one)
    return ForeignTokens(files, "", joins_files=True, marks_begin=True)
