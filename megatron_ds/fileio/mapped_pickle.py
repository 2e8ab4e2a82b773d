"""Values with arrays over mapped files, as bytes and files for another process of the host.

An array over a mapped file becomes a reference to the file, which the other process maps. Knows
nothing of how they are sent.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.fileio.memory_map import MappedFile, mapped_file


def dumps(value: object) -> tuple[bytes, list[MappedFile]]:
    """The bytes of a value, and the files that they refer to.

    A class whose `__reduce__` opens files has a method `reduce_mapped`, which is used here instead.

    Raises:
        Exception: If a part of the value cannot be pickled.
    """
    content = io.BytesIO()
    pickler = _Pickler(content)
    pickler.dump(value)
    return content.getvalue(), list(pickler.files.values())


def loads(content: bytes, files: Sequence[MappedFile]) -> Any:
    """The value of `dumps`, from this process's mappings of the files."""
    return _Unpickler(io.BytesIO(content), files).load()


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content)
        self.files: dict[int, MappedFile] = {}
        """By address."""

    def persistent_id(self, value: object) -> int | None:
        if not isinstance(value, MappedFile):
            return None
        self.files.setdefault(value.address, value)
        return list(self.files).index(value.address)

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and value.flags.c_contiguous:
            if (file := mapped_file(value)) is not None:
                offset = value.__array_interface__["data"][0] - file.address
                return _part, (file, offset, value.dtype.str, value.shape)
        elif not isinstance(value, type) and hasattr(value, "reduce_mapped"):
            return value.reduce_mapped()
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    """Reads what a process of the same user and run has sent."""

    def __init__(self, content: io.BytesIO, files: Sequence[MappedFile]) -> None:
        super().__init__(content)
        self._files = files

    def persistent_load(self, number: int) -> MappedFile:
        return self._files[number]


def _part(file: MappedFile, offset: int, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.asarray(file)[offset : offset + size].view(dtype).reshape(shape)
