"""Saves and loads in folders that behave like those of NFS clients.

RFC 1813, section 4.5 and 4.8, and the Linux client: a file that is deleted while it is open remains
under a name of its own, handles of replaced files become stale, a request whose answer was lost is
repeated, and what another host has written is visible only after a while.

Claim (checkpoints): on NFS, files that are still open, renames whose answer was lost, stale handles
and late entries cost no checkpoint
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import REPLACED
from megatron_ds.checkpoint.restoring import Restoring
from megatron_ds.checkpoint.save_steps import SaveError, SaveSteps
from megatron_ds.fileio import visibility
from megatron_ds.fileio.atomic import rename, write_atomically
from tests.unit.checkpoint.fakes import Managers, load, names_in, save, state_at

SILLY_RENAMED = ".nfs0000000000000001"


def raised(code: int, path: object) -> OSError:
    return OSError(code, os.strerror(code), str(path))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def open_elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every model_states.pt is open in another process: it cannot be deleted, only renamed."""
    unlink = os.unlink

    def silly_unlink(path: Any, *, dir_fd: int | None = None) -> None:
        name = Path(path).name
        if name == SILLY_RENAMED:
            raise raised(errno.EBUSY, path)
        if name == "model_states.pt":
            new = Path(path).with_name(SILLY_RENAMED)
            return os.rename(path, new, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        return unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", silly_unlink)
        yield


@pytest.mark.usefixtures("open_elsewhere")
def test_checkpoints_with_open_files_are_removed_and_replaced(
    manager: Managers, folder: Path, logged: list[str]
) -> None:
    """What remains of them is hidden, and hinders no later save, not even of the same iteration."""
    keeping = manager(keep_last=1)
    for iteration in (2, 4, 4, 4, 6):
        leftover = folder / f"{REPLACED}global_step{iteration}"  # of a crash
        leftover.mkdir(parents=True)
        (leftover / SILLY_RENAMED).touch()
        save(keeping, iteration)
        shown = {name for name in names_in(folder) if not name.startswith(".")}
        assert shown == {f"global_step{iteration}", *local_files.POINTERS}
        assert load(keeping)[0] == state_at(iteration)
    assert not any("WARNING" in line for line in logged)


def test_what_was_open_is_deleted_later(manager: Managers, folder: Path) -> None:
    keeping = manager(keep_last=1)
    for kind in ("", "incomplete-", "replaced-"):
        leftover = folder / f"{local_files.REMOVED}{kind}global_step2-0123abcd"
        leftover.mkdir(parents=True)
        (leftover / SILLY_RENAMED).touch()
    save(keeping, 4)
    assert names_in(folder) == {"global_step4", *local_files.POINTERS}


def test_an_error_of_the_disk_during_a_removal_is_a_warning(
    manager: Managers, folder: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = manager(keep_last=1)
    save(keeping, 2)

    def fail(path: Any, **_: Any) -> None:
        raise raised(errno.EIO, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", fail)
        save(keeping, 4)
    assert any("[save-pointers-failed]" in line for line in logged)


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every rename is done, and its repetition finds no source."""

    def twice(move: Callable[..., None], source: Any, target: Any, **keywords: Any) -> None:
        move(source, target, **keywords)
        raise raised(errno.ENOENT, source)

    with monkeypatch.context() as patch:
        for name in ("rename", "replace"):
            patch.setattr(os, name, functools.partial(twice, getattr(os, name)))
        yield


@pytest.mark.usefixtures("lost_answers")
def test_a_repeated_rename_is_no_error(manager: Managers, folder: Path) -> None:
    keeping = manager(keep_last=1)
    save(keeping, 2, 4, 4)
    assert names_in(folder) == {"global_step4", *local_files.POINTERS}
    assert (folder / "latest").read_text() == "global_step4"
    assert load(keeping)[0] == state_at(4)


def test_a_rename_of_nothing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is a file of the new name, or another process has renamed the source."""
    write_atomically(tmp_path / "old", b"old")
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "missing", tmp_path / "old")
    write_atomically(tmp_path / "new", b"new")

    def taken(source: Path, target: Path) -> None:
        source.unlink()
        raise raised(errno.ENOENT, source)

    monkeypatch.setattr(os, "replace", taken)
    with pytest.raises(FileNotFoundError):
        rename(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old"


def first_reads_fail(
    monkeypatch: pytest.MonkeyPatch, folder: Path, code: int, count: int
) -> Counter[str]:
    """Makes the first reads of each file below a folder fail; counts all of them."""
    reads: Counter[str] = Counter()
    original = io.open

    def stale(path: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        is_below = isinstance(path, str | Path) and Path(path).is_relative_to(folder)
        if is_below and mode.startswith("r") and "+" not in mode:
            reads[Path(path).name] += 1
            if reads[Path(path).name] <= count:
                raise raised(code, path)
        return original(path, mode, *arguments, **keywords)

    monkeypatch.setattr(io, "open", stale)
    monkeypatch.setattr(builtins, "open", stale)
    return reads


def test_a_stale_handle_is_opened_again(
    checkpoints: CheckpointManager, folder: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint is not taken for damaged, nor a pointer for missing."""
    save(checkpoints, 2, 4)
    logged.clear()
    with monkeypatch.context() as patch:
        reads = first_reads_fail(patch, folder, errno.ESTALE, 2)
        found = checkpoints.restoring.select()
    assert found.iteration == 4
    assert {*local_files.POINTERS, "run.json", "manifest.json", "model_states.pt"} <= reads.keys()
    assert not any("WARNING" in line for line in logged)


def test_a_handle_that_remains_stale_selects_an_older_checkpoint(
    checkpoints: CheckpointManager, folder: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 2, 4)
    first_reads_fail(monkeypatch, folder / "global_step4", errno.ESTALE, 1000)
    found = checkpoints.restoring.select()
    assert found.iteration == 2
    assert any("[checkpoint-skipped]" in line for line in logged)


class LateEntries:
    """Hides a path from lookups until it has been looked up a number of times."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, count: int) -> None:
        self.name = name
        self.left = count
        self._stat = os.stat
        self._open = io.open
        patch.setattr(os, "stat", self.stat)
        patch.setattr(io, "open", self.open)
        patch.setattr(builtins, "open", self.open)

    def _look_up(self, path: Any) -> None:
        if isinstance(path, str | Path) and self.name in str(path) and self.left > 0:
            self.left -= 1
            raise raised(errno.ENOENT, path)

    def stat(self, path: Any, **keywords: Any) -> os.stat_result:
        self._look_up(path)
        return self._stat(path, **keywords)

    def open(self, path: Any, *arguments: Any, **keywords: Any) -> Any:
        self._look_up(path)
        return self._open(path, *arguments, **keywords)


def hide_during(
    patch: pytest.MonkeyPatch, owner: Any, function: str, name: str, count: int
) -> list[LateEntries]:
    """Hides a path while a function runs."""
    late: list[LateEntries] = []
    original = getattr(owner, function)

    def run(*arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            late.append(LateEntries(inner, name, count))
            return original(*arguments)

    patch.setattr(owner, function, run)
    return late


def test_a_rank_waits_for_the_folder_of_a_save(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = hide_during(monkeypatch, SaveSteps, "_write", local_files.INCOMPLETE, 5)
    save(checkpoints, 4)
    assert late[0].left == 0
    assert load(checkpoints)[0] == state_at(4)


def test_a_rank_waits_for_the_files_that_the_first_one_has_seen(
    checkpoints: CheckpointManager, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 2, 4)
    late = hide_during(monkeypatch, Restoring, "_find_damaged_files", "optim_states.pt", 5)
    logged.clear()
    assert load(checkpoints)[0] == state_at(4)
    assert late[0].left == 0
    assert not any("WARNING" in line for line in logged)


def test_a_file_that_stays_invisible_fails_the_save(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 2)
    monkeypatch.setattr(visibility, "VISIBLE_WITHIN_S", 0.01)
    hide_during(monkeypatch, local_files, "wait_for_files", "optim_states.pt", 1_000_000)
    with pytest.raises(SaveError, match="is not visible"):
        save(checkpoints, 4)
    assert names_in(folder) == {"global_step2", *local_files.POINTERS}
