"""Locks that a killed build of a C++ extension left behind.

torch builds an extension under a lock file that the builder creates and holds open; everyone else
waits, for ever and silently, until the file is gone (torch.utils.file_baton). A builder that is
killed leaves the file, and every later run hangs. This file tells such a lock from one in use. It
knows neither torch nor where extensions are kept.
"""

from __future__ import annotations

import os
from pathlib import Path

PROCESSES = Path("/proc")


def stale_locks(folder: Path) -> list[Path]:
    """Locks below a folder of extensions that no process of this machine holds open, sorted.

    folder: what TORCH_EXTENSIONS_DIR names; it need not exist. Looks at `<extension>/lock` and, for
    torch's default folder with its level per Python version, `<version>/<extension>/lock`. Empty
    where the system has no /proc: then nobody can tell. Processes of another machine that shares
    the folder are not seen.
    """
    if not PROCESSES.is_dir():
        return []
    found = {
        lock: _identity(lock) for depth in ("*/lock", "*/*/lock") for lock in folder.glob(depth)
    }
    if not found:
        return []
    held = _open_files()
    # A lock that was released, or released and taken anew, while we looked is in use.
    return sorted(
        lock
        for lock, identity in found.items()
        if identity is not None and identity[:2] not in held and _identity(lock) == identity
    )


def _identity(path: Path) -> tuple[int, int, int] | None:
    """Device, inode and time of a file; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _open_files() -> set[tuple[int, int]]:
    """Device and inode of every file that a process we may look into holds open."""
    held = set()
    for descriptor in _descriptors():
        try:
            status = os.stat(descriptor)
        except OSError:
            continue  # closed, or its process ended, since it was listed
        held.add((status.st_dev, status.st_ino))
    return held


def _descriptors() -> list[Path]:
    found: list[Path] = []
    for process in PROCESSES.iterdir():
        if process.name.isdigit():
            try:
                found.extend((process / "fd").iterdir())
            except OSError:
                continue  # it ended, or belongs to another user, who keeps other extensions
    return found
