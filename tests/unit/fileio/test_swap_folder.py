"""Temporary folders on a shared disk, and the measurement of its rate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.fileio.swap_folder import SwapFolder
from megatron_ds.planning import swap_disk

DIES = """
import os, sys
from pathlib import Path
from megatron_ds.fileio.swap_folder import SwapFolder
folder = SwapFolder(Path(sys.argv[1]))
(folder.path / "states").mkdir()
(folder.path / "states" / "left").touch()
os._exit(0)
"""


def test_each_holder_has_a_folder_of_its_own_which_is_removed(tmp_path: Path) -> None:
    first = SwapFolder(tmp_path)
    second = SwapFolder(tmp_path)
    assert first.path != second.path
    (first.path / "states").mkdir()
    first.remove()
    assert list(tmp_path.iterdir()) == [second.path]
    assert SwapFolder(tmp_path).path == first.path


def test_files_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], check=True)
    assert (tmp_path / "swap0" / "states" / "left").exists()
    folder = SwapFolder(tmp_path)
    assert folder.path == tmp_path / "swap0"
    assert [path.name for path in folder.path.iterdir()] == ["lock"]


def test_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        swap_disk.measure(tmp_path / "file" / "folder")
