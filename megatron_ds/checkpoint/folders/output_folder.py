"""A folder that appears complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_ds.checkpoint.files.local_files import INCOMPLETE
from megatron_ds.config.problems import ignore, user_error
from megatron_ds.fileio.atomic import fsync_path

OnTensor = Callable[[str, int], None]
"""Called with name and bytes of each tensor that has been written."""


@contextmanager
def output_folder(folder: Path, confirm: Callable[[], object] = ignore) -> Iterator[Path]:
    """Creates a folder under a temporary name next to its own, and renames it once it is written.

    Files inside are flushed to the disk first. What an error or an interruption leaves is removed.
    A mount point cannot be replaced: there, the temporary folder is inside, and its contents are
    moved up at the end.

    Args:
        folder: Must not exist, or be empty. A link is followed.
        confirm: Called when only the rename is left to do. With its error the folder never appears.

    Yields:
        The folder to write to.

    Raises:
        UserError: If the folder has files already.
        OSError: If the disk fails.
    """
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise user_error("output-folder-not-empty", folder=folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    is_mount = folder.is_mount()
    temporary = (folder if is_mount else folder.parent) / f"{INCOMPLETE}{folder.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            fsync_path(path)
        fsync_path(temporary)
        confirm()
        if is_mount:
            for path in temporary.iterdir():
                os.rename(path, folder / path.name)
            temporary.rmdir()
            fsync_path(folder)
        else:
            os.rename(temporary, folder)
            fsync_path(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
