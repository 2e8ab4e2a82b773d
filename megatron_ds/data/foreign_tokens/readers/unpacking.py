"""Decompression of an entire shard or chunk, up to the size that its index states."""

from __future__ import annotations

import bz2
import io
import zlib
from collections.abc import Callable
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import user_error

Bytes = npt.NDArray[np.uint8]
READ_BYTES = 1 << 24
"""Bytes that are unpacked at once: what an index states may be more than there is memory."""
STREAMS = {"zstd": "zstd", "br": "brotli"}
"""Names of compressions in pyarrow, which reads them as streams."""


def unpack(stored: Bytes, codec: str, whole: int, path: str) -> Bytes:
    """The content of a compressed file.

    Args:
        stored: Its bytes.
        codec: Name of the compression in MDS and litdata; "" for none.
        whole: Bytes of the content, which bounds the memory.
        path: For messages.

    Raises:
        UserError: If the file is damaged, its content has another size, or the codec is unknown.
    """
    if not codec:
        return stored
    try:
        content = _content(stored, codec, whole, path)
    except MemoryError as error:
        reason = f"{codec}: its index states {whole} bytes, for which there is no memory"
        raise user_error("foreign-file-damaged", path=path, reason=reason) from error
    except (OSError, EOFError, ValueError, zlib.error) as error:
        if hasattr(error, "problems"):
            raise
        raise user_error("foreign-file-damaged", path=path, reason=f"{codec}: {error}") from error
    if len(content) != whole:
        at_least = "at least " if len(content) > whole else ""
        reason = f"its content has {at_least}{len(content)} bytes where its index states {whole}"
        raise user_error("foreign-file-damaged", path=path, reason=reason)
    return np.frombuffer(content, np.uint8)


def _content(stored: Bytes, codec: str, whole: int, path: str) -> bytes:
    """At most one byte more than `whole`."""
    if codec == "gz":
        unzip = zlib.decompressobj(wbits=31)
        content = unzip.decompress(stored.data, whole + 1)
        if not unzip.eof and len(content) <= whole:
            raise EOFError("the file ends early")
        return content
    if codec == "bz2":
        return bz2.BZ2Decompressor().decompress(stored.data, whole + 1)
    pyarrow = import_library("pyarrow", path)
    if codec == "snappy":
        return cast(bytes, pyarrow.Codec("snappy").decompress(stored, whole, asbytes=True))
    if codec not in STREAMS:
        raise user_error("foreign-codec-unknown", path=path, codec=codec)
    source = pyarrow.BufferReader(pyarrow.py_buffer(stored.data))
    stream: BinaryIO = pyarrow.CompressedInputStream(source, STREAMS[codec])
    return _read_all(stream.read, whole + 1)


def _read_all(read: Callable[[int], bytes], most: int) -> bytes:
    sink = io.BytesIO()
    while sink.tell() < most and (part := read(min(most - sink.tell(), READ_BYTES))):
        sink.write(part)
    return sink.getvalue()
