"""Atomic replacement of files."""

from __future__ import annotations

import errno
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import xxhash

from megatron_ds.fileio import atomic
from megatron_ds.fileio.atomic import FileRecord, atomic_write, name_in_errors, write_atomically


class Crash(Exception):
    """Ends a write."""


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("error", [Crash(), OSError(errno.ENOSPC, "No space left on device")])
def test_failed_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, error: Exception
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr(os, function, Mock(side_effect=error))
    with pytest.raises(type(error)) as raised:
        write_atomically(path, b"new")

    assert getattr(raised.value, "filename", str(path)) == str(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_error_inside_the_block_keeps_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    with suppress(KeyboardInterrupt), atomic_write(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt

    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_rename_follows_fsync_and_precedes_fsync_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    replace = os.replace

    def record_fsync(descriptor: int) -> None:
        calls.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))

    def record_replace(*paths: Any) -> None:
        calls.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    write_atomically(tmp_path / "file", b"content")

    assert calls == [".file.partial", "replace", tmp_path.name]


def test_path_is_added_only_to_errors_without_one() -> None:
    with pytest.raises(OSError, match=r"other") as raised, name_in_errors("this"):
        raise OSError(errno.EIO, "Input/output error", "other")
    assert raised.value.filename == "other"

    with pytest.raises(OSError, match=r"No space") as raised, name_in_errors("this"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert raised.value.filename == "this"


@pytest.mark.parametrize("reads_ahead", [True, False])
@pytest.mark.parametrize("block", [2**22, 2**18, 2**16, 1000])
def test_a_record_matches_its_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, reads_ahead: bool
) -> None:
    """Also a record of older versions, with SHA-256, of files smaller and larger than a block."""
    monkeypatch.setattr(atomic, "READ_BYTES", block)
    if not reads_ahead:
        monkeypatch.delattr(os, "preadv")
    content = bytes(range(256)) * 3072
    path = tmp_path / "file"
    path.write_bytes(content)
    new = FileRecord.of(content)
    old = FileRecord(len(content), hashlib.sha256(content).hexdigest())
    assert new.checksum == xxhash.xxh3_128(content).hexdigest()
    assert (new.algorithm, old.algorithm) == ("xxh3_128", "sha256")
    assert new.matches(path)
    assert old.matches(path)
    for other in (content[:-1], content[:-1] + b"x", b"x" + content[1:]):
        path.write_bytes(other)
        assert not new.matches(path)
        assert not old.matches(path)
