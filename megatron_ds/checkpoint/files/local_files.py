"""File operations of saving and loading: fsync, checksum, rename, remove, free space.

Each function runs on one rank and knows of no others. `manager.py` owns their order.
"""

from __future__ import annotations

import errno
import functools
import json
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    POINTER_PENDING,
    POINTERS,
    REPLACED,
    STATES,
    DamageCheck,
    check_names,
    iteration_of,
    list_checkpoints,
    read_manifest,
    read_run,
)
from megatron_ds.config.problems import Problem, counted
from megatron_ds.engine.deepspeed.tensor_files import LARGEST, find_extreme, read_tensors
from megatron_ds.fileio.atomic import FileRecord, fsync_path, rename, write_atomically
from megatron_ds.fileio.file_lock import lock_now
from megatron_ds.fileio.visibility import retry

INCOMPLETE = ".incomplete-"
"""Prefix of a checkpoint that is being written."""
REMOVED = ".removed-"
"""Prefix of a checkpoint that is being deleted. What follows is different each time: on NFS, a
folder with a deleted file that is still open can be neither deleted nor replaced by a rename."""
STILL_OPEN = (errno.ENOTEMPTY, errno.EBUSY, errno.ESTALE, errno.ENOENT)
"""Errors of a deletion on NFS: files that are open remain, as `.nfs*`, until they are closed."""


def write_json(path: Path, value: Any) -> FileRecord:
    """Writes a JSON file atomically and durably."""
    return write_atomically(path, json_content(value))


def json_content(value: Any) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(value, indent=1) + "\n").encode()


def write_files(folder: Path, contents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Writes small files, by path relative to a folder, atomically and durably."""
    records = {}
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        records[name] = write_atomically(folder / name, content)
        for above in [*Path(name).parents][1:]:
            fsync_path(folder / above)  # has the entry of a new folder
    return records


def wait_for_files(path: Path, files: Mapping[str, FileRecord]) -> None:
    """Waits until this process sees files of a checkpoint, which other ranks have written.

    They are looked up by name: on network file systems a listing may lag behind.

    Raises:
        OSError: If one stays invisible or has another size, as on a disk of another host.
    """
    for name, record in files.items():
        seen = retry(functools.partial(_size_of, path / name), wanted=record.size)
        if seen != record.size:
            state = "is not visible" if seen is None else f"has {counted(seen, 'byte')}"
            raise OSError(
                f"{path / name} {state} on {socket.gethostname()}; {record.size} bytes were written"
            )


def _size_of(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def find_damaged_files(path: Path, files: Mapping[str, FileRecord]) -> dict[str, str]:
    """Checks files of a checkpoint against their checksums, and their contents.

    Returns:
        The reason by name, for each file that differs from its checksum, or that contains anything
        but tensors of finite numbers and plain values.
    """
    reasons = {}
    for name, record in files.items():
        if not record.matches(path / name):
            reasons[name] = checksum_mismatch(name)
        elif name.endswith(STATES):
            try:
                extreme = find_extreme(read_tensors(path / name, mmap=True))
                if extreme is not None:
                    reasons[name] = f"{extreme} in {name} is not finite, or above {LARGEST:g}"
            except (ValueError, RecursionError) as error:
                reasons[name] = str(error)
    return reasons


def checksum_mismatch(name: str) -> str:
    """The reason that a file is damaged which differs from its checksum."""
    return f"{name} does not match its checksum in the manifest"


def files_damaged(*damages: Mapping[str, str]) -> Problem | None:
    """The results of `find_damaged_files` as one problem; None if there are none."""
    reasons = {name: reason for part in damages for name, reason in part.items()}
    if not reasons:
        return None
    return Problem("checkpoint-files-damaged", damages="; ".join(reasons.values()))


def restore_replaced(folder: Path) -> None:
    """Restores a checkpoint whose replacement was not completed."""
    for path in folder.glob(f"{REPLACED}global_step*"):
        target = folder / path.name.removeprefix(REPLACED)
        if not target.exists() and (path / MANIFEST).is_file():
            # In a read-only folder the checkpoint stays hidden, as before.
            with suppress(OSError):
                rename(path, target)


def remove_temporary(folder: Path) -> None:
    """Removes what interrupted saves and removals left under temporary names.

    A checkpoint whose replacement was not completed is restored first.
    """
    restore_replaced(folder)
    for path in folder.glob(f"{INCOMPLETE}global_step*"):
        discard(path)
    for prefix in (REPLACED, REMOVED):
        for path in folder.glob(f"{prefix}*global_step*"):  # also those that were incomplete
            shutil.rmtree(path, ignore_errors=True)


def discard(path: Path) -> None:
    """Deletes a folder, if there is one, under another name first.

    A crash then leaves no part of it under its name, and the name is free at once, even if a file
    in it cannot be deleted now. What remains is removed by a later save.

    Raises:
        OSError: If it cannot be renamed.
    """
    with suppress(FileNotFoundError):
        shutil.rmtree(_set_aside(path), ignore_errors=True)


def _set_aside(path: Path) -> Path:
    """Renames a folder that is to be deleted; returns its new path.

    Of a link to a folder elsewhere, only the link is removed.
    """
    removed = path.with_name(f"{REMOVED}{path.name.lstrip('.')}-{secrets.token_hex(4)}")
    if path.is_symlink():
        path.unlink()
    else:
        rename(path, removed)
    return removed


def _delete(removed: Path) -> None:
    """Deletes a folder that was set aside, except files that are still open on NFS.

    A later save removes these.

    Raises:
        OSError: If the disk or the permissions do not allow it.
    """
    try:
        shutil.rmtree(removed)
    except OSError as error:
        shutil.rmtree(removed, ignore_errors=True)  # the files after the one that failed
        if error.errno not in STILL_OPEN:
            raise


def publish(temporary: Path, target: Path) -> None:
    """Renames a written checkpoint to its final name; replaces one of the same iteration."""
    replaced = target.with_name(f"{REPLACED}{target.name}")
    discard(replaced)
    if target.exists():
        rename(target, replaced)
    try:
        rename(temporary, target)
    except OSError:
        restore_replaced(target.parent)
        raise
    try:
        fsync_path(target.parent)
    except OSError:
        rename(target, temporary)  # a save that is reported as failed must leave no checkpoint
        raise
    discard(replaced)


@dataclass(frozen=True)
class Retention:
    """Retention rule for the checkpoints of a branch."""

    last: int
    """Number of the newest checkpoints that are kept."""
    every: int | None = None
    """Checkpoints at multiples of this iteration are kept as well."""

    def outdated(self, newest: Path, branch: Lineage, check: DamageCheck) -> list[Path]:
        """The checkpoints of a branch before `newest` that are not to be kept.

        Damaged checkpoints and other branches' are left for their owner.
        """
        older = [
            path
            for path in list_checkpoints(newest.parent)
            if iteration_of(path) < iteration_of(newest)
            and check(path) is None
            and read_run(path).run.branch == branch.up_to(iteration_of(path))
        ]
        every = self.every
        return [path for path in older[self.last - 1 :] if not every or iteration_of(path) % every]


def remove_older(newest: Path, branch: Lineage, retention: Retention) -> None:
    """Deletes outdated checkpoints; those that are being read are left for a later save.

    Each one is renamed before it is deleted, so that a crash leaves no partial checkpoint under its
    name.
    """
    for path in retention.outdated(newest, branch, check_names):
        with open(path / MANIFEST, "r+b") as manifest:  # on NFS, only such a file can be locked
            if lock_now(manifest) is False:
                continue  # it is being read
            removed = _set_aside(path)
            fsync_path(removed.parent)
        _delete(removed)


def write_pointers(target: Path, confirm: Callable[[], object] | None = None) -> None:
    """Makes the pointer files name a checkpoint, which a later load then selects.

    Args:
        target: The checkpoint.
        confirm: Called right before each file is replaced, which its error prevents.
    """
    for name, text in zip(POINTERS, (target.name, str(iteration_of(target))), strict=True):
        write_atomically(target.parent / name, text.encode(), confirm)
    # The target is the last: after a crash in between, no other one must be selected.
    for path in sorted(list_checkpoints(target.parent), key=lambda path: path == target):
        (path / POINTER_PENDING).unlink(missing_ok=True)


def size_of_newest(folder: Path, *, has_optimizer: bool) -> int | None:
    """Bytes of the newest checkpoint whose names and sizes are right; None without one.

    Args:
        folder: A --save folder.
        has_optimizer: Whether the checkpoint has the states of the optimizer.
    """
    for path in list_checkpoints(folder):
        if check_names(path) is None and read_run(path).run.has_optimizer == has_optimizer:
            return sum(record.size for record in read_manifest(path).values())
    return None
