"""Files that a process writes into a folder to learn which other ones see the folder.

A process removes its own file. That of a killed one stays until another process looks a day later.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ABANDONED_S = 86400.0
"""Age of a file whose process was killed. Another run may be looking at a younger one."""


def write_probe(path: Path, prefix: str, content: bytes = b"") -> None:
    """Writes a file, and removes the files of killed processes.

    Ages are measured by the clock of the file system, since the clock of this host may differ and
    may jump.

    Args:
        path: The file.
        prefix: Prefix of the names of all such files in its folder.
        content: Content for the other processes.

    Raises:
        OSError: If the folder cannot be written.
    """
    path.write_bytes(content)
    now = path.stat().st_mtime
    for old in path.parent.glob(f"{prefix}*"):
        with suppress(OSError):  # another process has removed it, or it belongs to another user
            if now - old.stat().st_mtime > ABANDONED_S:
                old.unlink()
