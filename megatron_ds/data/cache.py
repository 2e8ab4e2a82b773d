"""Arrays that are computed once and kept in a folder under a name that hashes all that decides
them.

Complete or absent: arrays are written under temporary names, flushed and renamed, the description
last. Several processes may ask at once; one computes, the others wait and read. Knows nothing of
what the arrays mean.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.data.indexed import sync_folder

Arrays = dict[str, npt.NDArray[np.integer]]


class ArrayCache:
    """Named sets of arrays in one of several folders.

    folders: looked up in order; what is missing is made in the first that can be written.
    """

    def __init__(self, folders: list[Path]) -> None:
        self._folders = folders

    def get(self, kind: str, decides: Mapping[str, Any], make: Callable[[], Arrays]) -> Arrays:
        """The arrays that `make` gives for the values in `decides`, memory-mapped.

        kind: a readable beginning of the file names. Raises ValueError if the arrays are in none of
        the folders and none can be written.
        """
        text = json.dumps(decides, sort_keys=True)
        name = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        for folder in self._folders:
            found = _load(folder, name)
            if found is not None:
                return found
        folder = self._writable_folder()
        # The kernel frees this lock when its holder dies, however it dies.
        with _locked(folder / f"{name}.lock"):
            found = _load(folder, name)
            if found is not None:
                return found
            _store(folder, name, make(), decides)
        found = _load(folder, name)
        if found is None:
            raise ValueError(f"{folder / name}: what was just written cannot be read back")
        return found

    def _writable_folder(self) -> Path:
        for folder in self._folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError:
                continue
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        raise ValueError(
            f"the index cache cannot be written to {', '.join(map(str, self._folders))}: give a "
            "writable folder as --data-cache-path"
        )


def _load(folder: Path, name: str) -> Arrays | None:
    """The arrays of a complete entry; None if there is none or it does not fit its description."""
    try:
        described = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["arrays"]
        arrays = {
            key: np.load(folder / f"{name}.{key}.npy", mmap_mode="r", allow_pickle=False)
            for key in described
        }
    except (OSError, EOFError, ValueError, KeyError):
        return None
    if any(_describe(array) != described[key] for key, array in arrays.items()):
        return None
    # A plain array over the same pages: np.memmap makes every slice slow.
    return {key: np.asarray(array) for key, array in arrays.items()}


def _store(folder: Path, name: str, arrays: Arrays, decides: Mapping[str, Any]) -> None:
    description = {
        "arrays": {key: _describe(array) for key, array in arrays.items()},
        "made from": decides,
    }
    final = folder / f"{name}.json"
    final.unlink(missing_ok=True)
    for key, array in arrays.items():
        with _replacing(folder / f"{name}.{key}.npy") as partial, open(partial, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
    with _replacing(final) as partial, open(partial, "w", encoding="utf-8") as text:
        json.dump(description, text, indent=1)
        text.write("\n")
        text.flush()
        os.fsync(text.fileno())
    sync_folder(folder)


def _describe(array: npt.NDArray[np.integer]) -> dict[str, Any]:
    return {"dtype": array.dtype.str, "shape": list(array.shape)}


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; what was written there gets the name at the end."""
    partial = path.with_name(path.name + ".partial")
    yield partial
    os.replace(partial, path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
