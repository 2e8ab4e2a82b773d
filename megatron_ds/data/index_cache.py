"""Arrays that are computed once and kept in a folder under a name that hashes all that decides
them.

Complete or absent: arrays are written under temporary names, flushed and renamed, the description
with their checksums last; what does not fit its description is made again. Several processes may
ask at once; one computes, the others wait and read. Knows nothing of what the arrays mean.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron_ds.fileio.atomic import atomic_write, fsync_path
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.fileio.memory_map import map_file

Arrays = dict[str, npt.NDArray[np.integer]]

KIND_LENGTH = 100
"""Longer beginnings of file names are cut: a file's name has at most 255 bytes."""
ATTEMPTS = 3
"""How often a folder is made and filled while something deletes it."""


class ArrayCache:
    """Named sets of arrays in one of several folders.

    folders: looked up in order; what is missing is made in the first that can be written. patience:
    how to wait for a process that makes the same.
    """

    def __init__(self, folders: list[Path], patience: WaitPolicy | None = None) -> None:
        self._folders = folders
        self._patience = patience or WaitPolicy()

    def get_or_build(
        self, kind: str, decides: Mapping[str, Any], make: Callable[[], Arrays]
    ) -> Arrays:
        """The arrays that `make` gives for the values in `decides`, memory-mapped.

        kind: a readable beginning of the file names. Raises ValueError if the arrays are in none of
        the folders and none can be written, or if the process that makes them does not finish.
        """
        name = _name(kind, decides)
        for folder in self._folders:
            found = _load(folder, name)
            if found is not None:
                return found
        once = functools.cache(make)
        problems = []
        for folder in self._folders:
            try:
                return self._build_in(folder, name, decides, once)
            except OSError as error:
                problems.append(f"{folder}: {error.strerror or error}")
        raise ValueError(_unwritable(problems))

    def contains(self, kind: str, decides: Mapping[str, Any]) -> bool:
        """Whether these arrays seem to be there; that they are whole is seen when they are read."""
        name = _name(kind, decides)
        return any((folder / f"{name}.json").exists() for folder in self._folders)

    def require_space(self, size: int) -> None:
        """Raises ValueError unless `size` bytes can be kept in one of the folders."""
        problems = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    free = shutil.disk_usage(folder).free
            except OSError as error:
                problems.append(f"{folder}: {error.strerror or error}")
                continue
            if free >= size:
                return
            problems.append(f"{folder}: {free / 1e9:.1f} GB free of {size / 1e9:.1f} GB needed")
        raise ValueError(_unwritable(problems))

    def _build_in(
        self, folder: Path, name: str, decides: Mapping[str, Any], make: Callable[[], Arrays]
    ) -> Arrays:
        """The entry in this folder, made if it is not there. Raises OSError where the disk does."""
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with locked(folder / f"{name}.lock", self._patience) as alone:
                    found = _load(folder, name)
                    if found is not None:
                        return found
                    if alone:
                        for leftover in folder.glob(f"{name}.*.partial"):
                            leftover.unlink(missing_ok=True)
                    _store(folder, name, make(), decides)
                found = _load(folder, name)
                if found is not None:
                    return found
            except FileNotFoundError:
                if not attempts_left:
                    raise
        raise OSError("what is written there vanishes or cannot be read back")


def _name(kind: str, decides: Mapping[str, Any]) -> str:
    """Of an entry: beginning of its files' names."""
    text = json.dumps(decides, sort_keys=True)
    return f"{kind[:KIND_LENGTH]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _unwritable(problems: list[str]) -> str:
    return (
        f"the index cache cannot be written ({'; '.join(problems)}): give a folder that can be "
        "written and has space as --data-cache-path"
    )


def _load(folder: Path, name: str) -> Arrays | None:
    """The arrays of a complete entry; None if there is none or it does not fit its description."""
    try:
        described = json.loads((folder / f"{name}.json").read_bytes())["arrays"]
        arrays = {key: _mapped(folder / f"{name}.{key}.npy") for key in described}
        if not arrays or any(_describe(arrays[key]) != described[key] for key in arrays):
            return None
    except Exception:  # whatever the libraries say of a damaged file, the entry is made again
        return None
    return arrays


def _mapped(path: Path) -> npt.NDArray[np.integer]:
    """The array of a file that `_store` wrote. Raises what the libraries raise of another."""
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        content = map_file(file)[file.tell() :]
    return content.view(dtype).reshape(shape)


def _store(folder: Path, name: str, arrays: Arrays, decides: Mapping[str, Any]) -> None:
    described = {}
    for key, values in arrays.items():
        array = np.ascontiguousarray(values)
        described[key] = _describe(array)
        with _replacing(folder / f"{name}.{key}.npy") as file:
            header = np.lib.format.header_data_from_array_1_0(array)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)
    with _replacing(folder / f"{name}.json") as file:
        text = json.dumps({"arrays": described, "made from": decides}, indent=1)
        file.write(f"{text}\n".encode())
    fsync_path(folder)


def _describe(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": zlib.crc32(array.data)}


def _replacing(path: Path) -> AbstractContextManager[BinaryIO]:
    """Replaces a file atomically; processes that build the same index do not share a temporary."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    return atomic_write(path, temporary=partial, fsync_folder=False)
