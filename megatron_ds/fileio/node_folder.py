"""Folders on the disk of a node, for copies of what is elsewhere."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def default_node_folder() -> Path:
    """The folder of this user below the one for temporary files."""
    return Path(tempfile.gettempdir()) / f"megatron_ds-{os.getuid()}"


def create_node_folder(path: Path) -> None:
    """Creates a folder, if missing.

    Raises:
        OSError: If it cannot be created, or the default one belongs to another user.
    """
    if path != default_node_folder():
        path.mkdir(parents=True, exist_ok=True)
        return
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
