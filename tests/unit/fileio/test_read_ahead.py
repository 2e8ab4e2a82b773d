"""Files that are read while something else takes the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.fileio import atomic, read_ahead
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.read_ahead import reading


def wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_files_are_compared_with_their_checksums(tmp_path: Path) -> None:
    for name in ("first", "other", "last"):
        (tmp_path / name).write_text(name)
    records = {tmp_path / name: FileRecord.of(name.encode()) for name in ("first", "last")}
    records[tmp_path / "other"] = FileRecord.of(b"outer")
    names = ("first", "other", "without", "last")
    (tmp_path / "without").write_text("a file without a checksum")
    with reading([tmp_path / name for name in names], records) as pending:
        matching = {path.name: matches.result() for path, matches in pending.items()}
    assert matching == {"first": True, "other": False, "last": True}


def test_missing_files_are_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("file")
    record = FileRecord.of(b"file")
    with reading([tmp_path / "missing", tmp_path / "file"], {tmp_path / "file": record}) as pending:
        assert pending == {}


def test_a_comparison_ends_with_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare(path: Path, digest: object, is_stopped: Callable[[], bool]) -> tuple[int, str]:
        wait_until(is_stopped)
        return 0, ""

    monkeypatch.setattr(atomic, "_read_checksum", compare)
    file = tmp_path / "file"
    file.write_text("text")
    with reading([file], {file: FileRecord.of(b"text")}) as pending:
        assert not pending[file].done()
    assert pending[file].done()


def test_no_file_is_begun_after_the_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Path] = []

    def read(path: Path, is_stopped: Callable[[], bool]) -> None:
        begun.append(path)
        wait_until(is_stopped)

    monkeypatch.setattr(read_ahead, "_read", read)
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        file.write_text("text")
    with reading(files, {}):
        wait_until(lambda: bool(begun))
    assert begun == files[:1]


def test_files_beyond_a_share_of_the_memory_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Path] = []
    monkeypatch.setattr(read_ahead, "_read", lambda path, is_stopped: begun.append(path))
    monkeypatch.setattr("os.sysconf", lambda name: 10)  # 100 bytes, a quarter of which is read
    files = [tmp_path / "first", tmp_path / "second"]
    for file in files:
        file.write_bytes(bytes(15))
    with reading(files, {}):
        wait_until(lambda: bool(begun))
        time.sleep(0.1)
    assert begun == files[:1]
