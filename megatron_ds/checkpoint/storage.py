"""The steps of a save and a load on the disk: flush, digest, rename, remove, measure.

Every function runs on one rank and knows no others. The order of the steps is native.py's.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTERS,
    REPLACED,
    STATES,
    find_damage,
    list_checkpoints,
    read_manifest,
)
from megatron_ds.engine.ds_checkpoint_io import read_tensors
from megatron_ds.fileio.atomic import fsync_path, sha256_of, write_atomically

INCOMPLETE = ".incomplete-"
"""Prefix of a folder that is being written."""
REMOVED = ".removed-"
"""Prefix of a checkpoint that is being deleted."""


def files_below(path: Path) -> list[str]:
    """Names of all files below a folder, relative to it, sorted."""
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


def write_json(path: Path, value: Any) -> None:
    """Writes JSON so that it is whole or not there."""
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces a text file atomically and durably."""
    write_atomically(path, text.encode())


def fsync_and_hash(path: Path, names: list[str]) -> dict[str, Any]:
    """The manifest's entries of some of a checkpoint's files, which are on the disk then."""
    entries = {}
    for name in names:
        fsync_path(path / name)
        entries[name] = {"bytes": (path / name).stat().st_size, "sha256": sha256_of(path / name)}
    return entries


def find_damaged_files(path: Path, names: list[str]) -> dict[str, str]:
    """Which of a checkpoint's files are not what the manifest says, or hold other than tensors and
    plain values: name -> words.
    """
    files = read_manifest(path)
    found = {}
    for name in names:
        if name in files and sha256_of(path / name) != files[name]["sha256"]:
            found[name] = f"{name} is damaged (its SHA-256 differs from the manifest's)"
        elif name.endswith(STATES):
            try:
                read_tensors(path / name, mmap=True)
            except ValueError as error:
                found[name] = str(error)
    return found


def restore_replaced(folder: Path) -> None:
    """Gives a checkpoint its name again that made way for one whose save did not get there."""
    for path in folder.glob(f"{REPLACED}global_step*"):
        target = folder / path.name.removeprefix(REPLACED)
        if not target.exists() and (path / MANIFEST).is_file():
            # Where the folder cannot be written, the checkpoint stays unseen, as it was.
            with suppress(OSError):
                os.rename(path, target)


def remove_temporary(folder: Path) -> None:
    """Removes what interrupted saves and removals left under temporary names."""
    restore_replaced(folder)
    for prefix in (INCOMPLETE, REPLACED, REMOVED):
        for path in folder.glob(f"{prefix}global_step*"):
            shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, target: Path) -> None:
    """Renames; an older checkpoint of the same iteration makes way and is removed afterwards."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(temporary, target)
    try:
        fsync_path(target.parent)
    except OSError:
        os.rename(target, temporary)  # a save that is told to have failed leaves no checkpoint
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def remove_older(folder: Path, newest: Path, keep: int) -> None:
    """Deletes complete checkpoints of iterations before `newest`, but for the `keep` - 1 last ones.

    A folder that is damaged is left for its owner to look at. A crash leaves no half checkpoint.
    """
    paths = list_checkpoints(folder)
    older = [path for path in paths[paths.index(newest) + 1 :] if find_damage(path) is None]
    for path in older[keep - 1 :]:
        removed = path.with_name(f"{REMOVED}{path.name}")
        os.rename(path, removed)
        shutil.rmtree(removed)


def write_latest(target: Path, iteration: int) -> None:
    """Writes the pointers, for other programs; a load of ours goes by the folders."""
    for name, text in zip(POINTERS, (target.name, str(iteration)), strict=True):
        write_text(target.parent / name, text)


def size_of_newest(folder: Path) -> int | None:
    """Bytes of the newest checkpoint that is complete by its names and sizes; None without one."""
    for path in list_checkpoints(folder):
        if find_damage(path) is None:
            return sum(int(entry["bytes"]) for entry in read_manifest(path).values())
    return None


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
