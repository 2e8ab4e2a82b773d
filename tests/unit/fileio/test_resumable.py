"""Resumable output: kills at any point, what a commit keeps, and which work is refused."""

from __future__ import annotations

import errno
import gzip
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.fileio import resumable
from megatron_ds.fileio.resumable import RECORD, ResumableOutput, pack_record, read_records
from tests.faults import is_killed_at
from tests.problems import codes, fields, raises_problem

NAMES = {"a": "", "b": ".gz", "scratch": ""}


def open_output(folder: Path, resume: bool = True, **settings: Any) -> ResumableOutput:
    return ResumableOutput(str(folder / "out"), settings, NAMES, resume)


def write_items(folder: Path, resume: bool = True) -> None:
    """A job of 9 items with a commit after every third, which replaces the output of another."""
    done = str(folder / "out.done")
    with ResumableOutput(str(folder / "out"), {}, NAMES, resume, completed=done) as output:
        if output.published:
            return
        start = 0 if output.progress is None else output.progress["items"]
        for item in range(start, 0 if output.finished else 9):
            for file in output.files.values():
                file.write(f"{item}\n".encode())
            if item % 3 == 2:
                output.commit({"items": item + 1}, finished=item == 8)
        output.publish({n: str(folder / f"out.{n}") for n in "ab"}, {"a": [str(folder / "out.b")]})


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumable")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of the job that is never killed."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    write_items(folder)
    files = read_files(folder)
    assert set(files) == {"out.a", "out.b", "out.done"}
    assert files["out.a"] == b"".join(b"%d\n" % item for item in range(9))
    assert gzip.decompress(files["out.b"]) == files["out.a"]
    return files


def check_killed_job(folder: Path, kills: list[int], expected: dict[str, bytes]) -> bool:
    """A job is killed before the n-th fsync, rename or removal, the next before the m-th, ...

    Returns:
        Whether all were killed; otherwise one came to its end.
    """
    shutil.rmtree(folder)
    folder.mkdir()
    for name in "ab":
        (folder / f"out.{name}").write_bytes(b"older")
    for step in kills:
        if not is_killed_at(f"os.fsync|os.replace|os.unlink:{step}", lambda: write_items(folder)):
            return False
        found = read_files(folder)
        for name in ("out.a", "out.b"):
            assert found.get(name) in (None, b"older", expected[name])
        # The stale file goes before its new companion appears.
        assert not (found.get("out.a") == expected["out.a"] and found.get("out.b") == b"older")
    write_items(folder)
    assert read_files(folder) == expected
    return True


def test_job_killed_at_any_step_and_resumed_writes_the_same_bytes(
    tmp_path: Path, uninterrupted: dict[str, bytes]
) -> None:
    steps = range(1, 40)
    last = next(step for step in steps if not check_killed_job(tmp_path, [step], uninterrupted))
    assert 20 < last < 39


@settings(max_examples=5, deadline=None)
@given(kills=st.lists(st.integers(1, 25), min_size=2, max_size=3))
def test_job_killed_repeatedly_writes_the_same_bytes(
    folder: Path, uninterrupted: dict[str, bytes], kills: list[int]
) -> None:
    check_killed_job(folder, kills, uninterrupted)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ""])
def test_compressed_bytes_have_no_time_and_no_name(tmp_path: Path, suffix: str) -> None:
    written: list[bytes] = []
    for name in ("x", "y"):
        with ResumableOutput(str(tmp_path / name), {}, {name: suffix}, False) as output:
            output.files[name].write(b"text\n" * 100)
            output.commit({}, finished=True)
            output.publish({name: str(tmp_path / "final")})
        written.append((tmp_path / "final").read_bytes())
    assert written[0] == written[1]
    assert suffix == "" or len(written[0]) < 200


def test_interrupted_work_is_kept_unless_resumed_or_restarted(tmp_path: Path) -> None:
    with open_output(tmp_path, size=1, names=["a", "b"], gone=None) as first:
        first.commit({})
    with raises_problem("interrupted-run-exists", "resume", contains=str(first.folder)):
        open_output(tmp_path, resume=False, size=1, names=["a", "b"]).__enter__()
    with pytest.raises(UserError) as raised:
        open_output(tmp_path, size=2, names=["a"], **{"input x": 1}).__enter__()
    assert codes(raised.value.problems) == ["resumed-run-differs"] * 3
    assert fields(raised.value.problems) == [(), ("names",), ("size",)]
    with open_output(tmp_path, size=1, names=["a", "b"]) as again:
        assert again.progress == {}


def test_work_of_another_format_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(resumable, "FORMAT_VERSION", 1)
        with open_output(tmp_path) as first:
            first.commit({})
    with raises_problem("resumed-run-differs", contains="format version"):
        open_output(tmp_path).__enter__()


def test_killed_restart_is_not_taken_for_the_work_before(tmp_path: Path) -> None:
    with open_output(tmp_path, size=1) as first:
        first.files["a"].write(b"one")
        first.commit({})
    warnings: list[Problem] = []

    output = str(tmp_path / "out")
    warn = warnings.append

    def restart() -> None:
        with ResumableOutput(output, {"size": 2}, NAMES, False, restart=True, warn=warn) as second:
            assert second.progress is None
            second.files["a"].write(b"other content, longer")
            second.files["a"].flush()
            second.commit({})

    assert is_killed_at("os.fsync:2", restart)  # in the first commit
    with open_output(tmp_path, size=1) as third:
        assert third.progress is None
        third.commit({})
    restart()
    assert codes(warnings) == ["interrupted-run-replaced"]


def test_second_writer_of_an_output_is_refused(tmp_path: Path) -> None:
    with open_output(tmp_path) as first:
        first.commit({}, finished=True)
        with raises_problem("output-in-use", contains=str(tmp_path / "out")):
            open_output(tmp_path).__enter__()
        assert (first.folder / RECORD).exists()
        first.publish({})


def test_run_without_a_commit_leaves_nothing(tmp_path: Path) -> None:
    with suppress(KeyboardInterrupt), open_output(tmp_path, resume=False) as first:
        first.files["a"].write(b"x")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_commit_in_progress_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_released = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda descriptor: is_released.wait())
    with open_output(tmp_path) as output:
        assert not output.has_commit
        output.files["a"].write(b"x")
        output.commit({})
        assert output.has_commit
        assert not (output.folder / RECORD).exists()
        is_released.set()


def test_failed_commit_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"{tmp_path}/out.work/a") as raised:  # noqa: PT012, SIM117
        with open_output(tmp_path) as first:
            first.files["a"].write(b"one")
            first.commit({"done": 1})
            first.files["a"].write(b"two")
            first._wait()
            monkeypatch.setattr(os, "fsync", fail)
            first.commit({"done": 2})
            first.commit({"done": 3})
    assert str(first.folder) in raised.value.__notes__[0]
    monkeypatch.undo()
    with open_output(tmp_path) as second:
        assert second.progress == {"done": 1}


@pytest.mark.parametrize("name", ["a", RECORD, resumable.SETTINGS])
def test_damaged_work_is_refused(tmp_path: Path, name: str) -> None:
    """Truncated files, and records with another byte."""
    with open_output(tmp_path, setting="value") as first:
        first.files["a"].write(b"one\n")
        first.commit({"documents": 11})
    path = first.folder / name
    content = path.read_bytes()
    damaged = [content[:size] for size in range(len(content.rstrip(b"\n")))]
    for at in range(len(content) if name != "a" else 0):
        damaged.append(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    for found in damaged:
        path.write_bytes(found)
        with raises_problem("interrupted-work-damaged", "resume", contains=str(path)):
            open_output(tmp_path, setting="value").__enter__()


def test_completed_output_is_recognized_until_it_changes(tmp_path: Path) -> None:
    write_items(tmp_path)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    write_items(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    done = str(tmp_path / "out.done")
    with raises_problem("resumed-run-differs", "size"):
        ResumableOutput(str(tmp_path / "out"), {"size": 1}, NAMES, True, completed=done).__enter__()
    expected = read_files(tmp_path)
    for damage in (b"x", None):
        if damage is None:
            (tmp_path / "out.b").unlink()
        else:
            (tmp_path / "out.b").write_bytes(damage)
        with pytest.warns(UserWarning, match=str(tmp_path / "out.b")):
            write_items(tmp_path)
        assert read_files(tmp_path) == expected


def test_records_of_any_length_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    keys = [b"one", b"", b"three" * 100]
    path.write_bytes(b"".join(map(pack_record, keys)) + b"not committed")
    assert list(read_records(path, path.stat().st_size - 13)) == keys
