"""Stale locks of C++ extensions, left behind by a killed build.

torch builds an extension under a lock file that the builder creates and holds open. Other processes
wait indefinitely and silently until the file is gone (torch.utils.file_baton). A builder that is
killed leaves the file, and every later run hangs. This file tells a stale lock from one in use. It
imports no torch and does not know where extensions are stored.
"""

from __future__ import annotations

import glob
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
    locks = [*folder.glob("*/lock"), *folder.glob("*/*/lock")]
    file_ids = {lock: _file_id(lock) for lock in locks}
    # Without the processes of other users, who have other extensions.
    descriptors = glob.iglob(f"{PROCESSES}/[0-9]*/fd/*") if locks else ()
    held = {_file_id(descriptor)[:2] for descriptor in descriptors}
    # A lock that was released, or taken again, during the check is in use.
    return sorted(
        lock
        for lock, file_id in file_ids.items()
        if file_id and file_id[:2] not in held and _file_id(lock) == file_id
    )


def _file_id(path: str | Path) -> tuple[int, ...]:
    """Device, inode and modification time; empty if the file is gone."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns
