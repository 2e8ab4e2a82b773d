"""Whether this host can swap to the folder of --nvme-path, and how fast.

Needs libaio for DeepSpeed's asynchronous file operations, and measures the disk without the
operating system's cache. Imports torch on a GPU only.
"""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_ds.config.problems import Problem
from megatron_ds.launch import cpp_ops, device

BLOCK = 2**20
BLOCKS = 32
SIZE = BLOCKS * BLOCK
"""Bytes of the file that is written and read."""
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems without a disk."""
PROBE = """
#include <libaio.h>
int main() { io_context_t context = 0; return io_setup(1, &context) != 0; }
"""


class DiskRate(NamedTuple):
    """Bytes per second of one sequential writer or reader."""

    write: float
    read: float


@dataclass(frozen=True)
class Disk:
    """The disk of a folder."""

    folder: Path
    rate: DiskRate
    free: int
    """Bytes."""
    is_in_memory: bool


def check(folder: Path) -> tuple[Disk | None, list[Problem]]:
    """Try the compiler, libaio and the folder, which is created.

    Returns:
        The disk, None if the folder cannot be used, and every problem.
    """
    problems = [problem] if (problem := find_problem()) is not None else []
    try:
        rate = measure(folder)
        disk = Disk(folder, rate, shutil.disk_usage(folder).free, is_in_memory(folder))
        return disk, problems
    except OSError as error:
        if error.errno == errno.ENOSPC:
            free = shutil.disk_usage(folder).free / 1e9
            needed = SIZE / 1e9
            full = Problem("nvme-path-too-small", folder=folder, free=free, needed=needed)
        else:
            full = Problem("nvme-path-unusable", folder=folder, error=error)
    return None, [*problems, full]


def find_problem() -> Problem | None:
    """Returns the reason that a program with libaio cannot be built and run; None if it can.

    DeepSpeed tests the same before it loads its operations, even if they are built.
    """
    if (problem := cpp_ops.find_problem(cpp_ops.ASYNC_IO)) is not None:
        return problem
    if device.lacks_toolkit():
        return Problem("nvme-without-toolkit")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        program = Path(folder, "probe")
        source.write_text(PROBE, encoding="utf-8")
        compiler = shlex.split(cpp_ops.compiler_command())
        command = [*compiler, str(source), "-o", str(program), *cpp_ops.compiler_flags(), "-laio"]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        if built.returncode:
            lines = [line for line in built.stderr.splitlines() if "error" in line or "ld:" in line]
            return Problem("nvme-without-libaio", error=(lines or ["it cannot be linked"])[0])
        status = subprocess.run([program], check=False).returncode
    return Problem("nvme-refused-by-kernel") if status else None


def measure(folder: Path) -> DiskRate:
    """Write and read a temporary file of 32 MiB as swapping does, around the cache (O_DIRECT).

    Raises:
        OSError: If the folder cannot be written, or has no such access (some network and memory
            file systems).
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".rate-{os.getpid()}"

    def open_direct(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_DIRECT, 0o600)

    try:
        # The block is aligned, as O_DIRECT requires.
        with open(path, "w+b", 0, opener=open_direct) as file, mmap.mmap(-1, BLOCK) as block:
            start = time.perf_counter()
            for _ in range(BLOCKS):
                file.write(block)
            os.fsync(file)
            written = time.perf_counter()
            file.seek(0)
            for _ in range(BLOCKS):
                file.readinto(block)
            end = time.perf_counter()
    finally:
        path.unlink(missing_ok=True)
    return DiskRate(SIZE / (written - start), SIZE / (end - written))


def is_in_memory(folder: Path) -> bool:
    """Whether an existing folder is on a file system that keeps its files in memory."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return False  # not Linux
    # Of several mounts on one point, the last one is visible.
    kinds = {Path(point): filesystem for _, point, filesystem, *_ in mounts}
    path = folder.resolve()
    return next((kinds[root] for root in (path, *path.parents) if root in kinds), "") in IN_MEMORY
