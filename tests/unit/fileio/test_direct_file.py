"""Large files that are written around the system's cache have the bytes that were written."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.fileio import direct_file
from megatron_ds.fileio.direct_file import DirectFile

BLOCK = 8192
SIZES = [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK - 7]
DATA = random.Random(1).randbytes(5 * BLOCK)
PWRITE = os.pwrite
Pwrite = Callable[[int, memoryview, int], int]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, "BLOCK_BYTES", BLOCK)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def write(path: Path, data: bytes, sizes: tuple[int, ...] = (100, 3000, 1, 2 * BLOCK)) -> None:
    """Writes in parts of these sizes, repeated."""
    with DirectFile(path) as file:
        start = 0
        for size in itertools.cycle(sizes):
            if start >= len(data):
                break
            file.write(memoryview(data)[start : start + size])
            start += size
        file.finish()


@pytest.mark.parametrize("begun", [0, 1, 100, BLOCK, BLOCK + 5])
@pytest.mark.parametrize(
    "size", [0, 1, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK - 7]
)
def test_a_file_has_what_was_written(tmp_path: Path, begun: int, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(DATA[:begun])
    with DirectFile(path) as file:
        assert file.size == begun
    write(path, DATA[begun : begun + size])
    assert path.read_bytes() == DATA[: begun + size]


def test_complete_blocks_go_around_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int, bool]] = []

    def record(descriptor: int, data: memoryview, start: int) -> int:
        written.append((start, len(data), is_direct(descriptor)))
        return PWRITE(descriptor, data, start)

    try:
        os.close(os.open(tmp_path / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
    except OSError:
        pytest.skip("the folder for temporary files has no direct access")
    monkeypatch.setattr(os, "pwrite", record)
    write(tmp_path / "file", DATA[: 2 * BLOCK + 10])
    assert written == [(0, BLOCK, True), (BLOCK, BLOCK, True), (2 * BLOCK, 10, False)]


def refuse_odd_sizes(descriptor: int, data: memoryview, start: int) -> int:
    if is_direct(descriptor):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return PWRITE(descriptor, data, start)


def write_short(descriptor: int, data: memoryview, start: int) -> int:
    if is_direct(descriptor) and start % 512:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    size = 1000
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, 0)
    written = PWRITE(descriptor, data[:size], start)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


@pytest.mark.parametrize("pwrite", [refuse_odd_sizes, write_short])
def test_writes_that_are_refused_or_cut_off_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pwrite: Pwrite
) -> None:
    monkeypatch.setattr(os, "pwrite", pwrite)
    write(tmp_path / "file", DATA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_a_file_system_without_direct_access_uses_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int, flags: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    write(tmp_path / "file", DATA)
    assert (tmp_path / "file").read_bytes() == DATA


def test_an_error_of_the_disk_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int, data: memoryview, start: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    for size in (10, BLOCK, 5 * BLOCK):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            write(tmp_path / "file", DATA[:size])
