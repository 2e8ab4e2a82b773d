"""Stale locks of C++ extensions, left behind by a killed build.

torch builds an extension under a lock file that the builder creates and holds open. Other processes
wait indefinitely and silently until the file is gone (torch.utils.file_baton). A builder that is
killed leaves the file, and every later run hangs. This file tells a stale lock from one in use. It
imports no torch and does not know where extensions are stored.
"""

from __future__ import annotations

import os
from pathlib import Path

PROCESSES = Path("/proc")


def find_stale_locks(folder: Path) -> list[Path]:
    """Returns the locks below a folder of extensions that no process of this host holds open.

    Checks `<extension>/lock` and, for torch's default folder, `<version>/<extension>/lock`.
    Processes of other hosts that share the folder are not seen.

    Args:
        folder: The folder that TORCH_EXTENSIONS_DIR names; it need not exist.

    Returns:
        Sorted paths. Empty without /proc.
    """
    if not PROCESSES.is_dir():
        return []
    found = {
        lock: _file_id(lock) for depth in ("*/lock", "*/*/lock") for lock in folder.glob(depth)
    }
    if not found:
        return []
    held = _open_files()
    # A lock that was released, or taken again, during the check is in use.
    return sorted(
        lock
        for lock, file_id in found.items()
        if file_id is not None and file_id[:2] not in held and _file_id(lock) == file_id
    )


def _file_id(path: Path) -> tuple[int, int, int] | None:
    """Device, inode and modification time; None if the file is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _open_files() -> set[tuple[int, int]]:
    """Device and inode of every file that is held open by a process we may inspect."""
    held = set()
    for descriptor in _descriptors():
        try:
            status = os.stat(descriptor)
        except OSError:
            continue  # it was closed, or its process ended, since it was listed
        held.add((status.st_dev, status.st_ino))
    return held


def _descriptors() -> list[Path]:
    found: list[Path] = []
    for process in PROCESSES.iterdir():
        if process.name.isdigit():
            try:
                found.extend((process / "fd").iterdir())
            except OSError:
                continue  # it ended, or belongs to another user, who has other extensions
    return found
