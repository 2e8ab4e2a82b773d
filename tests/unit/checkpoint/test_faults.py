"""Damage that is found and named, disks that fail in the middle of a save, and what is kept."""

from __future__ import annotations

import builtins
import dataclasses
import errno
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint import storage
from megatron_ds.checkpoint.manager import CheckpointManager, SaveError
from megatron_ds.checkpoint.metadata import checksum_manifest
from megatron_ds.config import Config
from megatron_ds.engine.ds_checkpoint_io import write_tensors
from megatron_ds.inference.load_checkpoint import find_checkpoint
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.parallel.mesh import Mesh
from tests.unit.checkpoint.fakes import FakeEngine, load, save, state_at
from tests.unit.checkpoint.test_full_weights import Trap


def with_knobs(config: Config, said: list[str], **knobs: Any) -> CheckpointManager:
    checkpoint = dataclasses.replace(config.checkpoint, **knobs)
    changed = dataclasses.replace(config, checkpoint=checkpoint)
    return CheckpointManager(changed, Mesh.build(1), said.append)


def flipped(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << draw.randrange(8)]) + content[place + 1 :]


def cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


FILES = ("model_states.pt", "below/optim_states.pt", "run.json", "manifest.json")


@pytest.mark.parametrize("change", [flipped, cut])
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_and_any_cut_is_found_and_its_file_named(
    name: str,
    change: Callable[[bytes, random.Random], bytes],
    checkpoints: CheckpointManager,
    folder: Path,
    said: list[str],
) -> None:
    save(checkpoints, 4, 8)
    path = folder / "global_step8" / name
    whole = path.read_bytes()
    draw = random.Random(name)
    for _ in range(25):
        path.write_bytes(change(whole, draw))
        said.clear()
        state, engine = load(checkpoints)
        assert (state, engine.content) == (state_at(4), "of iteration 4")
        assert said[0].startswith(f"WARNING: skipping the checkpoint {folder / 'global_step8'}: ")
        assert Path(name).name in said[0]
    path.write_bytes(whole)
    assert load(checkpoints)[0] == state_at(8)


@pytest.mark.parametrize("change", [flipped, cut])
@pytest.mark.parametrize("name", [FILES[0], *FILES[2:]])
def test_generation_takes_no_damaged_weights(
    name: str,
    change: Callable[[bytes, random.Random], bytes],
    checkpoints: CheckpointManager,
    folder: Path,
    said: list[str],
) -> None:
    save(checkpoints, 4, 8)
    newest = folder / "global_step8"
    whole = (newest / name).read_bytes()
    draw = random.Random(name)
    said.clear()
    for count in range(1, 11):
        (newest / name).write_bytes(change(whole, draw))
        assert find_checkpoint(folder, said.append).iteration == 4
        assert len(said) == count
        assert said[-1].startswith(f"WARNING: skipping the checkpoint {newest}: ")
        assert name in said[-1]
    (newest / name).write_bytes(change(whole, draw))
    shutil.rmtree(folder / "global_step4")
    with pytest.raises(ValueError, match=f"no complete checkpoint .*{name}"):
        find_checkpoint(folder, said.append)
    (newest / name).write_bytes(whole)
    assert find_checkpoint(folder, said.append).iteration == 8


@pytest.mark.parametrize("name", storage.POINTERS)
def test_a_damaged_pointer_is_named_and_misleads_nobody(
    name: str, checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    whole = (folder / name).read_bytes()
    draw = random.Random(name)
    for change in (flipped, cut) * 10:
        (folder / name).write_bytes(change(whole, draw))
        said.clear()
        assert load(checkpoints)[0] == state_at(8)
        assert said[0].startswith(f"WARNING: {folder / name} says ")
        assert "the newest checkpoint there is global_step8" in said[0]


def test_every_damaged_file_of_a_checkpoint_is_named(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    draw = random.Random(0)
    for name in FILES[:2]:
        path = folder / "global_step8" / name
        path.write_bytes(flipped(path.read_bytes(), draw))
    said.clear()
    load(checkpoints)
    assert all(f"{name} is damaged" in said[0] for name in FILES[:2])


def test_a_damaged_checkpoint_is_refused_where_the_flag_says_so(
    checkpoints: CheckpointManager, config: Config, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    (folder / "global_step8" / "model_states.pt").unlink()
    strict = with_knobs(config, said, on_damaged_checkpoint="error")
    with pytest.raises(ValueError, match=r"global_step8 is damaged.*model_states.pt is missing"):
        load(strict)
    shutil.rmtree(folder / "global_step8")
    (folder / "latest").write_text("global_step4")
    assert load(strict)[0] == state_at(4)


def test_where_all_are_damaged_nothing_starts_anew(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    (folder / "global_step4" / "manifest.json").unlink()
    (folder / "global_step8" / "run.json").write_text("{")
    with pytest.raises(ValueError) as error:
        load(checkpoints)
    lines = str(error.value).splitlines()
    assert lines[0] == f"--load {folder}: every checkpoint in it is damaged:"
    assert lines[1].startswith(f"  - {folder / 'global_step8'}: its manifest.json or run.json")
    assert lines[2].startswith(f"  - {folder / 'global_step4'}: it has no manifest.json")


@pytest.mark.parametrize("name", storage.POINTERS)
def test_a_pointer_to_a_checkpoint_that_is_gone_starts_nothing_anew(
    name: str, checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 4)
    shutil.rmtree(folder / "global_step4")
    for other in set(storage.POINTERS) - {name}:
        (folder / other).unlink()
    with pytest.raises(ValueError, match=f"{name} says '.*4'.*there is no global_stepN folder"):
        load(checkpoints)


def test_a_missing_checkpoint_ends_the_run_where_the_flag_says_so(
    config: Config, folder: Path, said: list[str]
) -> None:
    strict = with_knobs(config, said, exit_on_missing_checkpoint=True)
    for _ in ("no folder", "an empty folder"):
        with pytest.raises(ValueError, match="--exit-on-missing-checkpoint"):
            load(strict)
        folder.mkdir(exist_ok=True)


def test_one_checkpoint_can_be_asked_for(
    checkpoints: CheckpointManager, config: Config, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    state, engine = load(with_knobs(config, said, ckpt_step=4))
    assert (state, engine.content) == (state_at(4), "of iteration 4")
    with pytest.raises(ValueError, match=r"--ckpt-step 6: .*are: global_step8, global_step4$"):
        load(with_knobs(config, said, ckpt_step=6))
    (folder / "global_step8" / "run.json").unlink()
    with pytest.raises(ValueError, match=r"--ckpt-step 8: .*global_step8 is damaged: .*run.json"):
        load(with_knobs(config, said, ckpt_step=8))


@pytest.mark.parametrize("name", FILES[:2])
def test_a_file_that_would_run_code_runs_nothing_and_is_named(
    name: str, checkpoints: CheckpointManager, folder: Path, said: list[str], tmp_path: Path
) -> None:
    """Its manifest is right: this was made on purpose."""
    save(checkpoints, 4, 8)
    path = folder / "global_step8"
    write_tensors({"content": Trap(tmp_path / "sprung")}, path / name)
    names = [file for file in storage.files_below(path) if file != "manifest.json"]
    (path / "manifest.json").write_text(checksum_manifest(storage.fsync_and_hash(path, names)))
    said.clear()
    assert load(checkpoints)[0] == state_at(4)
    assert f"{path / name} cannot be read as tensors and plain values" in said[0]
    assert not (tmp_path / "sprung").exists()


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def failing_at(call: int, patch: pytest.MonkeyPatch, inside: Path, code: int) -> None:
    """Lets the call-th opening for writing, fsync or rename below a folder fail, and no other."""
    left = [call]

    def count(path: Any) -> None:
        if inside in Path(path).parents or Path(path) == inside:
            if left[0] == 0:
                left[0] -= 1
                raise OSError(code, os.strerror(code), str(path))
            left[0] -= 1

    open_file, fsync, rename, replace = builtins.open, os.fsync, os.rename, os.replace

    def opening(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode[0] in "wx":
            count(path)
        return open_file(path, mode, *args, **kwargs)

    def syncing(descriptor: int) -> None:
        count(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def moving(move: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(source: Any, target: Any) -> None:
            count(target)
            move(source, target)

        return call

    patch.setattr(builtins, "open", opening)
    patch.setattr(os, "fsync", syncing)
    patch.setattr(os, "rename", moving(rename))
    patch.setattr(os, "replace", moving(replace))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("again", [False, True], ids=["a new iteration", "the same iteration"])
def test_an_error_of_the_disk_at_any_step_costs_no_checkpoint(
    code: int,
    again: bool,
    checkpoints: CheckpointManager,
    folder: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step of the save fails, then the second, and so on, until none is left."""
    failed = warned = 0
    for call in range(60):
        shutil.rmtree(folder, ignore_errors=True)
        save(checkpoints, 4, *([8] if again else []))
        said.clear()
        error: SaveError | None = None
        with monkeypatch.context() as patch:
            failing_at(call, patch, folder, code)
            try:
                save(checkpoints, 8)
            except SaveError as raised:
                error = raised
        if error is not None:
            failed += 1
            assert error.code is ExitCode.SAVE_FAILED
            assert os.strerror(code) in str(error)
            assert f"of iteration 8 to {folder}" in str(error)
        elif any("WARNING" in line for line in said):
            warned += 1
            assert os.strerror(code) in said[1]
        else:
            break
        assert not [name for name in names_in(folder) if name.startswith(".")]
        state, engine = load(checkpoints)
        assert state == state_at(4 if error is not None and not again else 8)
        assert state is not None
        assert engine.content == f"of iteration {state.iteration}"
        save(checkpoints, 12)
        assert load(checkpoints)[0] == state_at(12)
    else:
        pytest.fail("the save never came to its end")
    # Two tensor files (open, flush, flush again), two JSON files and the folder's name before the
    # checkpoint is there; two pointers after it.
    assert failed >= 15
    assert warned >= 6


def test_an_error_of_the_engine_is_told_and_leaves_nothing(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    class Full(FakeEngine):
        def save(self, folder: Path, tag: str) -> None:
            super().save(folder, tag)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / tag / "x.pt"))

    save(checkpoints, 4)
    with pytest.raises(SaveError) as error:
        checkpoints.save(Full(), state_at(8))  # type: ignore[arg-type]
    place = folder / ".incomplete-global_step8" / "x.pt"
    assert f"[Errno 28] No space left on device: '{place}'" in str(error.value)
    assert names_in(folder) == {"global_step4", *storage.POINTERS}


def test_too_little_space_is_told_before_the_save(
    checkpoints: CheckpointManager,
    folder: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Against the model's size at first (30 numbers of 16 bytes), then against the last one's."""
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 16 * 30)
    save(checkpoints, 2)
    assert not any("WARNING" in line for line in said)
    save(checkpoints, 4)
    assert next(line for line in said if "WARNING" in line).startswith(
        f"WARNING: {folder} has 0.00 GB free, and a checkpoint takes about"
    )
    shutil.rmtree(folder)
    said.clear()
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 16 * 30 - 1)
    save(checkpoints, 2)
    assert "the save may fail" in said[1]


def test_as_many_checkpoints_are_kept_as_asked_for(
    config: Config, folder: Path, said: list[str]
) -> None:
    keeping = with_knobs(config, said, keep_last=2)
    save(keeping, 2, 4, 6)
    assert names_in(folder) == {"global_step4", "global_step6", *storage.POINTERS}
    # Of a later iteration, which a run from an older checkpoint has not reached; and damaged.
    save(with_knobs(config, said), 12)
    (folder / "global_step4" / "run.json").unlink()
    save(keeping, 8, 10)
    kept = {"global_step4", "global_step8", "global_step10", "global_step12"}
    assert names_in(folder) == {*kept, *storage.POINTERS}


def test_a_save_that_fails_removes_no_older_checkpoint(
    config: Config, folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = with_knobs(config, said, keep_last=1)
    save(keeping, 2)
    failing_at(3, monkeypatch, folder, errno.ENOSPC)
    with pytest.raises(SaveError):
        save(keeping, 4)
    assert names_in(folder) == {"global_step2", *storage.POINTERS}


def test_a_crash_while_an_old_checkpoint_is_removed_leaves_no_half_one(
    config: Config, folder: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    keeping = with_knobs(config, said, keep_last=1)
    save(keeping, 2)
    removing = shutil.rmtree

    def crashing(path: Path, **kwargs: Any) -> None:
        if path.exists():
            (path / "manifest.json").unlink()
            raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", crashing)
        with pytest.raises(Crash):
            save(keeping, 4)
    assert removing is shutil.rmtree
    assert [path.name for path in storage.list_checkpoints(folder)] == ["global_step4"]
    assert load(keeping)[0] == state_at(4)
    save(keeping, 6)
    assert names_in(folder) == {"global_step6", *storage.POINTERS}
