"""The folder of the doctor's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(disk_folder: Path) -> Path:
    """A folder on a disk: the doctor reads no script below /dev, where files in memory are."""
    return disk_folder
