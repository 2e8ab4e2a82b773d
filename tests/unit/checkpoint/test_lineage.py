"""Roll-backs: after --ckpt-step a plain --load continues the new branch, whatever else is there.

Claim (checkpoints): after `--ckpt-step`, a plain `--load` continues the new branch, whatever
crashed in between
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.native_settings import select_native
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import POINTER_PENDING
from tests.unit.checkpoint.fakes import (
    Crash,
    FakeEngine,
    Managers,
    fail_at,
    load,
    names_in,
    save,
    state_at,
)

Resume = Callable[..., None]


@pytest.fixture
def resume(manager: Managers) -> Resume:
    """resume(name, *iterations, **options): a run that loads, and saves these iterations."""

    def run(name: str, *iterations: int, **options: object) -> None:
        checkpoints = manager(**options)
        found = checkpoints.restoring.select()
        engine = FakeEngine()
        if found is not None:
            checkpoints.restoring.load(engine, found)
        checkpoints.saving.start_branch(found)
        for iteration in iterations:
            engine.content = f"{name} {iteration}"
            checkpoints.saving.save(engine, state_at(iteration))

    return run


@pytest.fixture
def diverged(folder: Path, resume: Resume) -> Path:
    """A folder in which a run has saved three checkpoints."""
    folder.mkdir()
    resume("diverged", 2, 4, 6)
    return folder


def loaded(checkpoints: CheckpointManager) -> str:
    return load(checkpoints)[1].content


@pytest.mark.parametrize("iterations", [(4,), (3, 5), (3,), (5, 7)])
def test_a_plain_load_continues_the_branch_of_a_ckpt_step(
    iterations: tuple[int, ...], diverged: Path, resume: Resume, manager: Managers
) -> None:
    resume("branch", *iterations, ckpt_step=2)
    assert loaded(manager()) == f"branch {iterations[-1]}"
    assert select_native(diverged, print).iteration == iterations[-1]
    resume("branch", 8)
    assert loaded(manager()) == "branch 8"


def test_a_ckpt_step_run_that_saved_nothing_is_repeated(
    diverged: Path, resume: Resume, manager: Managers
) -> None:
    resume("branch", ckpt_step=2)
    assert loaded(manager()) == "diverged 2"
    assert loaded(manager(ckpt_step=6)) == "diverged 6"


def test_the_newest_checkpoint_of_a_run_is_on_its_branch(diverged: Path, manager: Managers) -> None:
    """The folder has later ones, of the branch that the run has left."""
    checkpoints = manager(ckpt_step=2)
    assert checkpoints.newest is None
    load(checkpoints)
    assert checkpoints.newest == diverged / "global_step2"
    save(checkpoints, 3)
    assert checkpoints.newest == diverged / "global_step3"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize(
    ("renames", "expected"), [(2, "diverged 2"), (3, "branch 3"), (4, "branch 3")]
)
def test_a_crash_before_the_pointers_are_updated_loses_no_checkpoint(
    renames: int,
    expected: str,
    diverged: Path,
    resume: Resume,
    manager: Managers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the branch; with the checkpoint complete and before, and although iteration 6 is later."""
    resume("branch", ckpt_step=2)
    with monkeypatch.context() as patch:
        # Two pointers at the start; then run.json, manifest, the folder, two pointers.
        fail_at(2 + renames, Crash(), patch, diverged, "rename")
        with pytest.raises(Crash):
            resume("branch", 3)
    assert loaded(manager()) == expected
    resume("branch", 5)
    assert loaded(manager()) == "branch 5"
    assert not list(diverged.glob(f"*/{POINTER_PENDING}"))


def test_instead_of_a_damaged_checkpoint_one_of_its_branch_is_loaded(
    diverged: Path, resume: Resume, manager: Managers
) -> None:
    """Iteration 4 of the other branch is between those of this one."""
    resume("branch", 3, 5, ckpt_step=2)
    for damaged, expected in ((5, "branch 3"), (3, "diverged 2"), (2, "diverged 6")):
        (diverged / f"global_step{damaged}" / "model_states.pt").unlink()
        assert loaded(manager()) == expected
    (diverged / "global_step5" / "run.json").unlink()
    assert loaded(manager()) == "diverged 4"  # nothing is known of the branch but its iteration


def test_a_pointer_that_a_user_has_changed_decides(
    diverged: Path, manager: Managers, logged: list[str]
) -> None:
    (diverged / "latest").write_text("global_step4\n")
    logged.clear()
    assert loaded(manager()) == "diverged 4"
    assert "[checkpoint-pointer-ignored]" in logged[0]
    assert "latest_checkpointed_iteration.txt names '6'" in logged[0]
    (diverged / "latest").unlink()
    assert loaded(manager()) == "diverged 6"
    (diverged / "latest_checkpointed_iteration.txt").write_text("2")
    assert loaded(manager()) == "diverged 2"


def test_without_pointers_the_newest_is_loaded(diverged: Path, manager: Managers) -> None:
    for name in local_files.POINTERS:
        (diverged / name).unlink()
    assert loaded(manager()) == "diverged 6"


def test_keep_last_counts_and_removes_checkpoints_of_the_branch(
    diverged: Path, resume: Resume
) -> None:
    resume("branch", 3, 5, 7, ckpt_step=2, keep_last=2)
    kept = {f"global_step{iteration}" for iteration in (4, 5, 6, 7)}
    assert names_in(diverged) == {*kept, *local_files.POINTERS}


def test_newer_checkpoints_get_a_warning(diverged: Path, resume: Resume, logged: list[str]) -> None:
    shutil.rmtree(diverged / "global_step4")
    logged.clear()
    resume("a run that continues")
    assert not any("WARNING" in line for line in logged)
    resume("branch", ckpt_step=2)
    assert "global_step6" in logged[-1]
    assert logged[-1].endswith("[save-folder-has-newer]")
    (diverged / "global_step6" / "manifest.json").unlink()
    logged.clear()
    resume("branch")
    assert not any("[save-folder-has-newer]" in line for line in logged)
