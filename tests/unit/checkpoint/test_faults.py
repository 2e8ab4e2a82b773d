"""Damaged checkpoints, disks that fail during a save, and --keep-last."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.native_settings import select_native
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import manifest_text
from megatron_ds.checkpoint.save_steps import SaveError
from megatron_ds.checkpoint.universal.folders import POINTER
from megatron_ds.config.problems import UserError
from megatron_ds.conversion.megatron import detect
from megatron_ds.engine.deepspeed.checkpoint_io import write_tensors
from megatron_ds.engine.deepspeed.tensor_files import read_tensors
from megatron_ds.launch.exit_codes import ExitCode
from tests.problems import printed_codes, raises_problem
from tests.unit.checkpoint.fakes import (
    Crash,
    FakeEngine,
    Managers,
    fail_at,
    flip_a_bit,
    flipped,
    load,
    names_in,
    records_of,
    save,
    state_at,
    truncated,
)
from tests.unit.checkpoint.test_full_weights import Trap

DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FILES = ("model_states.pt", "below/optim_states.pt", "run.json", "manifest.json")


@pytest.mark.parametrize("change", [flipped, truncated])
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_or_truncation_is_found_and_its_file_named(
    name: str,
    change: Callable[[bytes, random.Random], bytes],
    checkpoints: CheckpointManager,
    folder: Path,
    logged: list[str],
) -> None:
    """By training and, in the files that it reads, by generation.

    Claim (checkpoints): a flipped bit or truncation anywhere in a checkpoint is detected, and its
    file is named
    """
    save(checkpoints, 4, 8)
    path = folder / "global_step8" / name
    original = path.read_bytes()
    draw = random.Random(name)
    for _ in range(5):
        path.write_bytes(change(original, draw))
        logged.clear()
        state, engine = load(checkpoints)
        assert (state, engine.content) == (state_at(4), "of iteration 4")
        warnings = logged[:1]
        if "optim" not in name:
            assert select_native(folder, warnings.append).iteration == 4
            assert len(warnings) == 2
        for warning in warnings:
            assert "[checkpoint-skipped]" in warning
            assert str(folder / "global_step8") in warning
            assert Path(name).name in warning
    path.write_bytes(original)
    assert load(checkpoints)[0] == state_at(8)
    assert select_native(folder, logged.append).iteration == 8


def test_generation_is_given_no_advice_for_a_training(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 4, 8)
    (folder / "latest").write_text("global_step5")
    logged.clear()
    assert select_native(folder, logged.append).iteration == 8
    assert re.findall(r"--[a-z-]+", "".join(logged)) == ["--load"]
    for damage in (lambda path: (path / "run.json").write_text("{"), shutil.rmtree):
        for path in folder.glob("global_step*"):
            damage(path)
        with pytest.raises(UserError) as of_tool:
            select_native(folder, logged.append)
        with pytest.raises(UserError) as of_training:
            load(checkpoints)
        (ours,) = of_tool.value.problems
        (trainings,) = of_training.value.problems
        assert ours.mentioned == {"load"}
        assert ours.code == trainings.code
        assert ours != trainings


@pytest.mark.parametrize("name", local_files.POINTERS)
def test_a_damaged_pointer_is_ignored_with_a_warning(
    name: str, checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 4, 8)
    original = (folder / name).read_bytes()
    draw = random.Random(name)
    for change in (flipped, truncated) * 4:
        (folder / name).write_bytes(change(original, draw))
        logged.clear()
        assert load(checkpoints)[0] == state_at(8)
        assert "[checkpoint-pointer-ignored]" in logged[0]
        assert str(folder / name) in logged[0]
        assert "global_step8" in logged[0]


def test_generation_names_the_folder_that_a_renamed_checkpoint_needs(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 4)
    (folder / "global_step4").rename(folder / "renamed")
    with raises_problem("all-checkpoints-damaged", "load", contains="not named global_step4"):
        select_native(folder / "renamed", print)


def test_every_damaged_file_of_a_checkpoint_is_named(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 4, 8)
    for name in FILES[:2]:
        flip_a_bit(folder / "global_step8" / name)
    logged.clear()
    load(checkpoints)
    assert all(name in logged[0] for name in FILES[:2])


def test_on_damaged_checkpoint_error_loads_no_older_one(
    checkpoints: CheckpointManager, manager: Managers, folder: Path
) -> None:
    save(checkpoints, 4, 8)
    (folder / "global_step8" / "model_states.pt").unlink()
    strict = manager(on_damaged_checkpoint="error")
    with raises_problem(
        "checkpoint-damaged", "load", "on_damaged_checkpoint", contains="model_states.pt"
    ):
        load(strict)
    shutil.rmtree(folder / "global_step8")
    (folder / "latest").write_text("global_step4")
    assert load(strict)[0] == state_at(4)


def test_load_starts_no_new_run_if_all_checkpoints_are_damaged(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 4, 8)
    (folder / "global_step4" / "manifest.json").unlink()
    (folder / "global_step8" / "run.json").write_text("{")
    with raises_problem("all-checkpoints-damaged", "load", contains=str(folder)) as raised:
        load(checkpoints)
    text = str(raised.problem)
    newest = text.index("global_step8: ")
    oldest = text.index("global_step4: ")
    assert newest < text.index("run.json") < oldest
    assert "manifest.json" in text[oldest:]


@pytest.mark.parametrize("name", local_files.POINTERS)
def test_load_starts_no_new_run_if_a_pointer_names_a_missing_checkpoint(
    name: str, checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 4)
    shutil.rmtree(folder / "global_step4")
    for other in set(local_files.POINTERS) - {name}:
        (folder / other).unlink()
    with raises_problem("checkpoint-pointer-dangling", "load", contains=str(folder / name)):
        load(checkpoints)


def test_exit_on_missing_checkpoint_starts_no_new_run(manager: Managers, folder: Path) -> None:
    strict = manager(exit_on_missing_checkpoint=True)
    for _ in ("no folder", "an empty folder"):
        with raises_problem("checkpoint-missing", "load", contains=str(folder)):
            load(strict)
        folder.mkdir(exist_ok=True)


def test_a_path_that_cannot_be_listed_starts_no_new_run(manager: Managers, folder: Path) -> None:
    folder.write_text("a file")
    for path in (folder, folder / "below"):
        with raises_problem("load-folder-unreadable", "load", contains=str(path)):
            load(manager(load=str(path)))


def test_ckpt_step_selects_one_checkpoint(
    checkpoints: CheckpointManager, manager: Managers, folder: Path
) -> None:
    save(checkpoints, 4, 8)
    state, engine = load(manager(ckpt_step=4))
    assert (state, engine.content) == (state_at(4), "of iteration 4")
    with raises_problem("ckpt-step-missing", "ckpt_step", contains="global_step8, global_step4"):
        load(manager(ckpt_step=6))
    (folder / "global_step8" / "run.json").unlink()
    with raises_problem("checkpoint-damaged", "load", "ckpt_step", contains="run.json"):
        load(manager(ckpt_step=8))
    assert load(manager(load_tag="global_step4"))[0] == state_at(4)
    with raises_problem("ckpt-step-missing", "load_tag", contains="--load-tag"):
        load(manager(load_tag="global_step6"))


@pytest.mark.parametrize("name", FILES[:2])
def test_a_pickle_that_would_run_code_is_rejected(
    name: str, checkpoints: CheckpointManager, folder: Path, logged: list[str], tmp_path: Path
) -> None:
    """The manifest matches the file, as an attacker would write it.

    Claim (checkpoints): reading a checkpoint executes no code, whatever its files contain
    """
    save(checkpoints, 4, 8)
    path = folder / "global_step8"
    write_tensors({"content": Trap(tmp_path / "sprung")}, path / name)
    (path / "manifest.json").unlink()
    (path / "manifest.json").write_text(manifest_text(records_of(path)))
    logged.clear()
    assert load(checkpoints)[0] == state_at(4)
    assert f"{path / name}" in logged[0]
    assert not (tmp_path / "sprung").exists()


SAVES = pytest.mark.parametrize(
    ("again", "in_background"),
    [
        pytest.param(False, False, id="a new iteration in the foreground"),
        pytest.param(True, True, id="the same iteration in the background"),
        pytest.param(False, True, marks=pytest.mark.proof, id="a new iteration in the background"),
        pytest.param(
            True, False, marks=pytest.mark.proof, id="the same iteration in the foreground"
        ),
    ],
)
"""Of an iteration that has a checkpoint, or has none."""


@SAVES
def test_crash_at_any_rename_leaves_a_complete_checkpoint(
    again: bool,
    in_background: bool,
    checkpoints: CheckpointManager,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupts the save before its first rename, its second, and so on.

    Claim (checkpoints): a crash while saving leaves the previous checkpoint intact
    """
    # run.json, manifest, the older folder, the folder, the removal of the older one, two pointers
    renames = 7 if again else 5
    for number in range(renames + 1):
        shutil.rmtree(folder, ignore_errors=True)
        save(checkpoints, 4, *([8] if again else []))
        crashes = pytest.raises(Crash) if number < renames else contextlib.nullcontext()
        with monkeypatch.context() as patch, crashes:
            fail_at(number, Crash(), patch, folder, "rename")
            save(checkpoints, 8, in_background=in_background)
        state, engine = load(checkpoints)
        assert state in (state_at(4), state_at(8))
        assert engine.content == f"of iteration {state.iteration}"


@SAVES
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_a_disk_error_at_any_step_loses_no_checkpoint(
    again: bool,
    in_background: bool,
    checkpoints: CheckpointManager,
    folder: Path,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lets the first file operation of the save fail, then the second, and so on."""
    failed = 0
    warned = 0
    for call in range(60):
        shutil.rmtree(folder, ignore_errors=True)
        save(checkpoints, 4, *([8] if again else []))
        logged.clear()
        error: SaveError | None = None
        with monkeypatch.context() as patch:
            fail_at(call, DISK_FULL, patch, folder)
            try:
                save(checkpoints, 8, in_background=in_background)
            except SaveError as raised:
                error = raised
        if error is not None:
            failed += 1
            assert error.code is ExitCode.SAVE_FAILED
            assert DISK_FULL.strerror in str(error)
            assert error.problem.code == "save-failed"
            assert str(folder) in str(error.problem)
        elif warnings := [line for line in logged if "WARNING" in line]:
            warned += 1
            assert "[save-pointers-failed]" in warnings[0]
            assert DISK_FULL.strerror in warnings[0]
        else:
            break
        assert not [name for name in names_in(folder) if name.startswith(".")]
        state, engine = load(checkpoints)
        assert state == state_at(4 if error is not None and not again else 8)
        assert engine.content == f"of iteration {state.iteration}"
        save(checkpoints, 12, in_background=in_background)
        assert load(checkpoints)[0] == state_at(12)
    else:
        pytest.fail("the save never completed")
    # Before the checkpoint has its name: two tensor files (open, flush), two JSON files and the
    # folder; two pointers after it.
    assert failed >= 14
    assert warned >= 6


def test_keep_last_keeps_that_many_checkpoints(manager: Managers, folder: Path) -> None:
    keeping = manager(keep_last=2)
    save(keeping, 2, 4, 6)
    assert names_in(folder) == {"global_step4", "global_step6", *local_files.POINTERS}
    # Later iterations, which this run has not reached, and damaged checkpoints are kept.
    save(manager(), 12)
    (folder / "global_step4" / "run.json").unlink()
    save(keeping, 8, 10)
    kept = {"global_step4", "global_step8", "global_step10", "global_step12"}
    assert names_in(folder) == {*kept, *local_files.POINTERS}


def test_a_save_after_a_skipped_step_removes_no_checkpoint(
    manager: Managers, folder: Path, logged: list[str]
) -> None:
    """Claim (non-finite): weights that are not finite are neither loaded nor saved, and no
    checkpoint is removed after a skipped step"""
    keeping = manager(keep_last=1)
    save(keeping, 2)
    for iteration in (4, 6):
        keeping.saving.save(FakeEngine(), state_at(iteration), after_skip=True)
    assert names_in(folder) == {
        "global_step2",
        "global_step4",
        "global_step6",
        *local_files.POINTERS,
    }
    assert sum("successfully saved" in line for line in logged) == 1
    assert sum("[saved-after-skipped-step]" in line for line in logged) == 2
    save(keeping, 8)
    assert names_in(folder) == {"global_step8", *local_files.POINTERS}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value", [math.nan, -math.inf, 1e30, 1e24])
def test_values_with_which_no_run_can_train_are_damage(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """They have the right checksums.

    Claim (non-finite): weights that are not finite are neither loaded nor saved, and no checkpoint
    is removed after a skipped step
    """
    tensor = torch.ones(4, 5, dtype=dtype)
    tensor[2, 3] = value
    states = {"module": torch.ones(3), "state": [{"step": 3, "empty": torch.ones(0)}, (tensor,)]}
    name = "mp_rank_00_model_states.pt"
    found = local_files.find_damaged_files(tmp_path, {name: write_tensors(states, tmp_path / name)})
    assert [*found] == [name][: value != 1e24]
    assert value == 1e24 or f"state.1.0 in {name}" in found[name]


def test_keep_every_keeps_milestones(manager: Managers, folder: Path) -> None:
    """Claim (checkpoints): milestones, and checkpoints that another process is reading, are not
    removed"""
    keeping = manager(keep_last=2, keep_every=6)
    save(keeping, *range(2, 17, 2))
    kept = {"global_step6", "global_step12", "global_step14", "global_step16"}
    assert names_in(folder) == {*kept, *local_files.POINTERS}


def test_a_checkpoint_that_is_being_read_is_removed_later(manager: Managers, folder: Path) -> None:
    """By a run that loads it, by a tool, or by a process that is killed.

    Claim (checkpoints): milestones, and checkpoints that another process is reading, are not
    removed
    """
    keeping = manager(keep_last=1)
    reading = manager(ckpt_step=2)
    save(keeping, 2)
    found = reading.restoring.select()
    save(keeping, 4)
    of_tool = select_native(folder, print)
    assert of_tool.iteration == 4
    script = (
        "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_SH); "
        "print('locked'); input()"
    )
    save(keeping, 6)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script, folder / "global_step6" / "manifest.json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        save(keeping, 8)
        being_read = {"global_step2", "global_step4", "global_step6"}
        assert names_in(folder) == {*being_read, "global_step8", *local_files.POINTERS}
        other.kill()
    reading.restoring.load(FakeEngine(), found)
    save(keeping, 10)
    assert names_in(folder) == {"global_step4", "global_step10", *local_files.POINTERS}
    del of_tool
    save(keeping, 12)
    assert names_in(folder) == {"global_step12", *local_files.POINTERS}


def test_of_a_linked_checkpoint_the_link_is_removed(
    manager: Managers, folder: Path, tmp_path: Path, logged: list[str]
) -> None:
    """Claim (checkpoints): a damaged line of `metrics.jsonl`, pointers that are no files and linked
    checkpoints stop no resume"""
    keeping = manager(keep_last=1)
    save(keeping, 2)
    (folder / "global_step2").rename(tmp_path / "elsewhere")
    (folder / "global_step2").symlink_to(tmp_path / "elsewhere")
    save(keeping, 4)
    assert names_in(folder) == {"global_step4", *local_files.POINTERS}
    assert (tmp_path / "elsewhere" / "model_states.pt").is_file()
    assert "save-pointers-failed" not in printed_codes("\n".join(logged))


@pytest.mark.timeout(60)
def test_pointers_that_are_no_files_are_ignored(manager: Managers, folder: Path) -> None:
    """Claim (checkpoints): a damaged line of `metrics.jsonl`, pointers that are no files and linked
    checkpoints stop no resume"""
    save(manager(), 2)
    for name in (*local_files.POINTERS, POINTER):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    assert detect.detect_megatron(folder) is None
    assert load(manager())[0] == state_at(2)
    save(manager(), 4)
    assert (folder / "latest").read_text() == "global_step4"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.json", "manifest.json"])
def test_a_description_that_is_no_file_is_damage(
    name: str, manager: Managers, folder: Path
) -> None:
    save(manager(), 2, 4)
    (folder / "global_step4" / name).unlink()
    os.mkfifo(folder / "global_step4" / name)
    assert load(manager())[0] == state_at(2)


@pytest.mark.parametrize("pointer", ["a" * 256, "9" * 5000])
def test_a_pointer_of_any_length_is_replaced(pointer: str, manager: Managers, folder: Path) -> None:
    save(manager(), 2)
    for name in local_files.POINTERS:
        (folder / name).write_text(pointer)
    assert detect.detect_megatron(folder) is None
    assert load(manager())[0] == state_at(2)


def test_a_folder_without_locks_is_read_and_cleaned_up(
    manager: Managers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", fail)
    keeping = manager(keep_last=1)
    save(keeping, 2)
    found = select_native(folder, print)
    assert load(keeping)[0] == state_at(2)
    save(keeping, 4)
    assert found.iteration == 2
    assert names_in(folder) == {"global_step4", *local_files.POINTERS}


def test_a_save_that_fails_removes_no_older_checkpoint(
    manager: Managers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = manager(keep_last=1)
    save(keeping, 2)
    fail_at(3, DISK_FULL, monkeypatch, folder)
    with pytest.raises(SaveError):
        save(keeping, 4)
    assert names_in(folder) == {"global_step2", *local_files.POINTERS}


def test_a_crash_during_the_removal_leaves_no_partial_checkpoint(
    manager: Managers, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = manager(keep_last=1)
    save(keeping, 2)

    def crashing(path: Path, **kwargs: Any) -> None:
        if path.exists():
            (path / "manifest.json").unlink()
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crashing)
        with pytest.raises(Crash):
            save(keeping, 4)
    assert [path.name for path in local_files.list_checkpoints(folder)] == ["global_step4"]
    assert load(keeping)[0] == state_at(4)
    save(keeping, 6)
    assert names_in(folder) == {"global_step6", *local_files.POINTERS}


def test_members_of_an_enum_are_read_back_whatever_the_version_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle them as a call of getattr.

    Claim (command-line): checkpoints of every version of Python are read
    """
    by_name = lambda self, protocol: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", by_name)
    value = {"zero_stage": ZeroStageEnum.gradients}
    write_tensors(value, tmp_path / "file")
    torch.save(value, tmp_path / "of DeepSpeed")

    content = (tmp_path / "of DeepSpeed").read_bytes()
    assert b"getattr" in content
    assert b"getattr" not in (tmp_path / "file").read_bytes()
    assert read_tensors(tmp_path / "file") == read_tensors(tmp_path / "of DeepSpeed") == value
    monkeypatch.setattr(LossScaler, "__reduce_ex__", lambda *_: (getattr, (LossScaler, "backward")))
    torch.save(LossScaler(1.0), tmp_path / "method")
    with raises_problem("tensor-file-unreadable"):
        read_tensors(tmp_path / "method")
