"""Whether hosts share the folders of --save and --load: a question of the first rank.

Claim (checkpoints): `--save` and `--load` folders that the hosts do not share are rejected, and
left as they were; one that shows files late is not
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.folders.shared_folders import SharedFolders
from megatron_ds.checkpoint.location import RunFolders
from megatron_ds.config import CheckpointConfig
from megatron_ds.fileio import visibility
from megatron_ds.fileio.probe_files import ABANDONED_S
from tests.problems import codes, fields


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "VISIBLE_WITHIN_S", 0.05)


def folders(**options: Any) -> SharedFolders:
    """Folders of a host, by option field."""
    given = {name: str(value) for name, value in options.items()}
    return SharedFolders(RunFolders.local(CheckpointConfig(**given)))


def ask(first: SharedFolders, other: SharedFolders) -> list[Any]:
    question = first.ask()
    answers = {"a": first.answer(question), "b": other.answer(question)}
    return first.find_problems(question, answers)


def test_a_shared_folder_need_not_exist_and_is_left_as_it_was(tmp_path: Path) -> None:
    save = tmp_path / "new" / "save"
    assert ask(folders(save=save, load=save), folders(save=save, load=save)) == []
    assert list(tmp_path.iterdir()) == []


def test_folders_that_hosts_do_not_share_are_named_with_them(tmp_path: Path) -> None:
    one = tmp_path / "one"
    other = tmp_path / "other"
    other.mkdir()
    (one / "old").mkdir(parents=True)
    found = ask(folders(save=one / "new", load=one / "old"), folders(save=other, load=other))
    assert codes(found) == ["folder-not-shared"] * 2
    assert fields(found) == [("save",), ("load",)]
    assert f"{one / 'new'} on " in found[0]
    assert f"b ({other})" in found[0]
    assert "a (" not in found[0]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["old", "one", "other"]


def test_a_folder_that_shows_a_file_late_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visibility, "VISIBLE_WITHIN_S", 5.0)
    first = folders(save=tmp_path)
    other = folders(save=tmp_path)
    question = first.ask()
    looks = itertools.count()
    read = Path.read_bytes

    def read_late(path: Path) -> bytes:
        if next(looks) < 3:
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_late)
    assert first.find_problems(question, {"b": other.answer(question)}) == []
    assert next(looks) == 4


def test_a_folder_that_cannot_be_created_is_no_question(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert folders(save=tmp_path / "file" / "save").ask() == {}


@pytest.mark.parametrize("ahead", [0.0, 3 * ABANDONED_S])
def test_files_of_killed_runs_are_removed_and_those_of_others_are_not(
    ahead: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the clock of the host is days ahead of the folder's."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + ahead)
    for name in (".shared-old", ".shared-new"):
        (tmp_path / name).touch()
    os.utime(tmp_path / ".shared-old", (0, 0))
    assert ask(folders(save=tmp_path), folders(save=tmp_path)) == []
    assert [path.name for path in tmp_path.iterdir()] == [".shared-new"]
