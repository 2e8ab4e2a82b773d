"""Whether this host can swap to the folder of --nvme-path, and how fast.

Imports torch on a GPU only.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from megatron_ds.config.problems import Problem
from megatron_ds.planning import disk_rate, libaio
from megatron_ds.planning.disk_rate import DiskRate


def check(folder: Path) -> tuple[DiskRate | None, list[Problem]]:
    """Try the compiler, libaio and the folder, which is created.

    Returns:
        The rate of the disk, None if the folder cannot be used, and every problem.
    """
    problems = [problem] if (problem := libaio.find_problem()) is not None else []
    try:
        return disk_rate.measure(folder), problems
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free, needed = shutil.disk_usage(folder).free / 1e9, disk_rate.SIZE / 1e9
            full = Problem("nvme-path-too-small", folder=folder, free=free, needed=needed)
        else:
            full = Problem("nvme-path-unusable", folder=folder, error=error)
    return None, [*problems, full]
