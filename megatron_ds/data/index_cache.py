"""A cache of arrays on disk, under names that hash everything that determines their content.

An entry is complete or absent: arrays are written under temporary names, fsynced and renamed, their
description with checksums last. An entry that does not match its description is rebuilt. If several
processes request an entry, one builds it while its peers wait. Knows nothing about the arrays.
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

from megatron_ds.config.problems import user_error
from megatron_ds.fileio.atomic import atomic_write, fsync_path
from megatron_ds.fileio.file_lock import WaitPolicy, locked
from megatron_ds.fileio.memory_map import map_file

Arrays = dict[str, npt.NDArray[np.integer]]

CACHE_FOLDER = "index-cache"
"""Name of the cache's folder, next to the token files."""
MAX_KIND_LENGTH = 100
"""Longest readable prefix of a file name: file systems allow 255 bytes."""
ATTEMPTS = 3
"""Attempts to build an entry while another process deletes the folder."""


class ArrayCache:
    """Named sets of arrays in one of several folders.

    Args:
        folders: Searched in order. A missing entry is built in the first that is writable.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def get_or_build(
        self, prefix: str, key: Mapping[str, Any], build: Callable[[], Arrays]
    ) -> Arrays:
        """The arrays of a key, memory-mapped; builds them if they are missing.

        Args:
            prefix: Readable prefix of the file names.
            key: Everything that determines the arrays.
            build: Computes the arrays.

        Raises:
            UserError: If no folder has the arrays and none is writable, or if another process that
                builds them does not finish.
        """
        name = _entry_name(prefix, key)
        for folder in self._folders:
            arrays = _load(folder, name)
            if arrays is not None:
                return arrays
        build_once = functools.cache(build)
        reasons = []
        for folder in self._folders:
            try:
                return self._build_in(folder, name, key, build_once)
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
        raise user_error("index-cache-not-writable", reasons="; ".join(reasons))

    def contains(self, prefix: str, key: Mapping[str, Any]) -> bool:
        """Whether an entry exists; its checksums are verified when it is read."""
        name = _entry_name(prefix, key)
        return any((folder / f"{name}.json").exists() for folder in self._folders)

    def require_space(self, size: int) -> None:
        """Raises:
        UserError: If no folder is writable and has `size` bytes free.
        """
        reasons = []
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):
                    free = shutil.disk_usage(folder).free
            except OSError as error:
                reasons.append(f"{folder}: {error.strerror or error}")
                continue
            if free >= size:
                return
            reasons.append(f"{folder}: {free / 1e9:.1f} GB free of {size / 1e9:.1f} GB needed")
        raise user_error("index-cache-not-writable", reasons="; ".join(reasons))

    def _build_in(
        self, folder: Path, name: str, key: Mapping[str, Any], build: Callable[[], Arrays]
    ) -> Arrays:
        """The entry of this folder, built if missing.

        Raises:
            OSError: If the folder cannot be written.
        """
        for attempts_left in reversed(range(ATTEMPTS)):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with locked(folder / f"{name}.lock", WaitPolicy()) as is_locked:
                    arrays = _load(folder, name)
                    if arrays is not None:
                        return arrays
                    if is_locked:
                        for leftover in folder.glob(f"{name}.*.partial"):
                            leftover.unlink(missing_ok=True)
                    _store(folder, name, build(), key)
                arrays = _load(folder, name)
                if arrays is not None:
                    return arrays
            except FileNotFoundError:
                if not attempts_left:
                    raise
        raise OSError("files vanish or cannot be read back")


def _entry_name(prefix: str, key: Mapping[str, Any]) -> str:
    """Common prefix of the file names of an entry."""
    text = json.dumps(key, sort_keys=True)
    return f"{prefix[:MAX_KIND_LENGTH]}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"


def _load(folder: Path, name: str) -> Arrays | None:
    """The arrays of an entry; None if it is missing, incomplete or damaged."""
    try:
        described = json.loads((folder / f"{name}.json").read_bytes())["arrays"]
        arrays = {key: _mapped(folder / f"{name}.{key}.npy") for key in described}
        if not arrays or any(_describe(arrays[key]) != described[key] for key in arrays):
            return None
    except Exception:  # any error of a library on a damaged file: the entry is rebuilt
        return None
    return arrays


def _mapped(path: Path) -> npt.NDArray[np.integer]:
    """Memory-maps an array written by `_store`; any exception means a damaged file."""
    with open(path, "rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        content = map_file(file)[file.tell() :]
    return content.view(dtype).reshape(shape)


def _store(folder: Path, name: str, arrays: Arrays, key: Mapping[str, Any]) -> None:
    described = {}
    for array_name, values in arrays.items():
        array = np.ascontiguousarray(values)
        described[array_name] = _describe(array)
        with _replacing(folder / f"{name}.{array_name}.npy") as file:
            header = np.lib.format.header_data_from_array_1_0(array)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)
    with _replacing(folder / f"{name}.json") as file:
        text = json.dumps({"arrays": described, "key": key}, indent=1)
        file.write(f"{text}\n".encode())
    fsync_path(folder)


def _describe(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape), "crc32": zlib.crc32(array.data)}


def _replacing(path: Path) -> AbstractContextManager[BinaryIO]:
    """Writes a file atomically; concurrent builders use different temporary files."""
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    return atomic_write(path, temporary=partial, fsync_folder=False)
