"""Saving and loading on one process, with an engine that writes two files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint import storage
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import checksum_manifest, read_manifest
from megatron_ds.config import (
    Config,
    DataConfig,
    DeepSpeedConfig,
    PrecisionConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from megatron_ds.config.problems import UserError
from megatron_ds.data.blend_history import SourceId, resume_history
from megatron_ds.engine.ds_checkpoint_io import write_tensors
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from tests.problems import raises_problem
from tests.unit.checkpoint.fakes import FakeEngine, load, save, state_at


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_save_writes_one_folder_and_two_pointers(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 7)
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step7",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder / "latest").read_text() == "global_step7"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert storage.files_below(folder / "global_step7") == [
        "below/optim_states.pt",
        "manifest.json",
        "model_states.pt",
        "run.json",
    ]
    assert logged == [
        f"saving checkpoint at iteration       7 to {folder}",
        f"  successfully saved checkpoint at iteration       7 to {folder}",
    ]


def test_the_manifest_lists_every_other_file(checkpoints: CheckpointManager, folder: Path) -> None:
    save(checkpoints, 1)
    files = read_manifest(folder / "global_step1")
    assert sorted(files) == ["below/optim_states.pt", "model_states.pt", "run.json"]
    content = (folder / "global_step1" / "model_states.pt").read_bytes()
    assert files["model_states.pt"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_run_json_contains_state_layout_and_sharding(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 3)
    run = json_of(folder / "global_step3" / "run.json")
    assert TrainState.from_dict(run["state"]) == state_at(3)
    assert run["layout"] == {
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "zero_stage": 1,
        "precision": "fp32",
        "optimizer": "adam",
    }
    assert run["shards"] == {"weight": {"dim": 0, "sections": [6]}}
    assert run["config"]["model"]["num_layers"] == 2


def test_load_selects_the_highest_iteration(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 9, 8, 10)
    logged.clear()
    state, engine = load(checkpoints)
    assert state == state_at(10)
    assert engine.loaded == (folder, "global_step10")
    assert engine.content == "of iteration 10"
    assert logged == [
        f" loading checkpoint from {folder} at iteration 10",
        f"  successfully loaded checkpoint from {folder} at iteration 10",
    ]


def flip_a_byte(path: Path) -> None:
    content = bytearray((path / "model_states.pt").read_bytes())
    content[3] ^= 1
    (path / "model_states.pt").write_bytes(content)


def truncate(path: Path) -> None:
    with (path / "below" / "optim_states.pt").open("r+b") as file:
        file.truncate(4)


def edit(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes run.json and updates its entry in the manifest."""

    def apply(path: Path) -> None:
        values = json_of(path / "run.json")
        change(values)
        (path / "run.json").write_text(json.dumps(values))
        names = [name for name in storage.files_below(path) if name != "manifest.json"]
        (path / "manifest.json").write_text(checksum_manifest(storage.fsync_and_hash(path, names)))

    return apply


def edit_manifest(path: Path) -> None:
    """Updates the entry of a changed file, but not the manifest's own checksum."""
    content = b"another model"
    (path / "model_states.pt").write_bytes(content)
    values = json_of(path / "manifest.json")
    values["files"]["model_states.pt"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a flipped byte": (flip_a_byte, "checkpoint-files-damaged", "model_states.pt"),
    "a truncated file": (truncate, "checkpoint-file-size", "below/optim_states.pt has 4 bytes"),
    "a missing file": (
        lambda path: (path / "model_states.pt").unlink(),
        "checkpoint-file-missing",
        "model_states.pt",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "checkpoint-save-unfinished",
        "manifest.json",
    ),
    "no run.json": (
        lambda path: (path / "run.json").unlink(),
        "checkpoint-save-unfinished",
        "run.json",
    ),
    "a manifest that is not JSON": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff{"),
        "checkpoint-metadata-damaged",
        "manifest.json",
    ),
    "a manifest that is a list": (
        lambda path: (path / "manifest.json").write_text("[1]"),
        "checkpoint-metadata-damaged",
        "manifest.json",
    ),
    "a manifest without files": (
        lambda path: (path / "manifest.json").write_text('{"sha256": ""}'),
        "checkpoint-metadata-damaged",
        "KeyError('files')",
    ),
    "an edited manifest": (edit_manifest, "checkpoint-metadata-damaged", "manifest.json"),
    "a file that the manifest does not list": (
        lambda path: write_tensors({}, path / "mp_rank_01_model_states.pt"),
        "checkpoint-file-unlisted",
        "mp_rank_01_model_states.pt",
    ),
    "an older format": (
        edit(lambda values: values.update(format_version=2)),
        "checkpoint-of-other-format",
        "format 2: an older version",
    ),
    "an unknown format": (
        edit(lambda values: values.update(format_version=7)),
        "checkpoint-of-other-format",
        "format 7: another version",
    ),
    "no format": (
        edit(lambda values: values.pop("format_version")),
        "checkpoint-metadata-damaged",
        "format_version",
    ),
    "no layout": (
        edit(lambda values: values.pop("layout")),
        "checkpoint-metadata-damaged",
        "layout",
    ),
    "a layout of another type": (
        edit(lambda values: values["layout"].update(zero_stage="1")),
        "checkpoint-metadata-damaged",
        "zero_stage",
    ),
    "the state of another iteration": (
        edit(lambda values: values["state"].update(iteration=5)),
        "checkpoint-folder-name",
        "global_step5",
    ),
    "a state with an unknown key": (
        edit(lambda values: values["state"].update(epoch=1)),
        "checkpoint-metadata-damaged",
        "epoch",
    ),
    "a state that is not a number": (
        edit(lambda values: values["state"].update(consumed_samples=None)),
        "checkpoint-metadata-damaged",
        "NoneType",
    ),
    "a damaged blend history": (
        edit(lambda values: values.update(data={"format": 1, "sources": 3})),
        "checkpoint-metadata-damaged",
        "run.json",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_load_falls_back_to_the_checkpoint_before_a_damaged_one(
    damage: str, checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 4, 8)
    apply, code, value = DAMAGES[damage]
    apply(folder / "global_step8")
    logged.clear()

    state, engine = load(checkpoints)

    assert state == state_at(4)
    assert engine.content == "of iteration 4"
    found = checkpoints._find_damage(folder / "global_step8")
    assert found is not None
    assert found.code == code
    assert value in found
    assert "[checkpoint-skipped]" in logged[0]
    assert f"{folder / 'global_step8'}: {found}" in logged[0]
    assert logged[1] == f" loading checkpoint from {folder} at iteration 4"


def test_a_folder_without_a_checkpoint_starts_a_new_run(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    for name in ("global_step5-copy", ".incomplete-global_step3", "index-cache"):
        (folder / name).mkdir(parents=True)
    (folder / "global_step6").write_text("a file of this name")
    state, engine = load(checkpoints)
    assert (state, engine.loaded) == (None, None)
    assert logged == [
        f"WARNING: could not find a complete checkpoint in {folder}",
        "    will not load any checkpoints and will start from random",
    ]


def test_a_missing_folder_has_no_checkpoint(checkpoints: CheckpointManager) -> None:
    assert load(checkpoints)[0] is None


def conflicts(config: Config, logged: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Codes and fields of the problems that selecting a checkpoint raises."""
    with pytest.raises(UserError) as raised:
        CheckpointManager(config, Mesh.build(1), logged.append).select()
    return [(problem.code, problem.fields) for problem in raised.value.problems]


def test_resume_rejects_another_model_or_layout_with_every_difference(
    checkpoints: CheckpointManager, config: Config, logged: list[str]
) -> None:
    save(checkpoints, 2)
    other = dataclasses.replace(
        config,
        model=dataclasses.replace(
            config.model, num_layers=3, hidden_dropout=0.0, activation="gelu"
        ),
        precision=PrecisionConfig(bf16=True),
        deepspeed=DeepSpeedConfig(zero_stage=2),
    )
    assert conflicts(other, logged) == [
        ("resume-model-changed", ("num_layers",)),
        ("resume-layout-changed", ("zero_stage",)),
        ("resume-layout-changed", ("precision",)),
    ]


def test_resume_rejects_another_order_of_the_samples(
    checkpoints: CheckpointManager, config: Config, logged: list[str]
) -> None:
    save(checkpoints, 2)
    rampup = dataclasses.replace(
        config,
        schedule=ScheduleConfig(
            micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 6), train_samples=9
        ),
        runtime=RuntimeConfig(seed=7),
    )
    schedule = dataclasses.replace(
        config.schedule, global_batch_size=None, step_batch_size_schedule=("0:2 1K:4",)
    )
    code = "resume-data-order-changed"
    assert conflicts(rampup, logged) == [
        (code, ("seed",)),
        (code, ("global_batch_size",)),
        (code, ("rampup_batch_size",)),
    ]
    steps = dataclasses.replace(config, schedule=schedule)
    assert conflicts(steps, logged) == [(code, ("step_batch_size_schedule",))]


def test_dropout_may_change_on_a_resume(
    checkpoints: CheckpointManager, config: Config, logged: list[str]
) -> None:
    save(checkpoints, 2)
    model = dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.3)
    other = dataclasses.replace(config, model=model)
    assert load(CheckpointManager(other, Mesh.build(1), logged.append))[0] == state_at(2)


def test_the_blend_history_is_restored(checkpoints: CheckpointManager) -> None:
    history = resume_history(None, [SourceId("a", "hash", (0, 9))], [1.0], order=3)
    checkpoints.save(FakeEngine(), state_at(2), lambda: history)  # type: ignore[arg-type]
    found = checkpoints.select()
    assert found is not None
    assert found.run.data == history


@pytest.mark.parametrize(
    ("before", "now", "rejected"),
    [
        ({"data_path": ("a",), "split": "9,1"}, {"data_path": ("a",), "split": "8,2"}, True),
        ({"data_path": ("a",)}, {"data_args_path": "f", "split": "8,2"}, True),
        ({"data_path": ("a",), "split": "9,1"}, {"data_path": ("b",), "split": "9,1"}, False),
        ({"data_path": ("a",), "split": "9,1"}, {"train_data_path": ("a",)}, False),
        ({"train_data_path": ("a",)}, {"data_path": ("a",), "split": "9,1"}, False),
    ],
)
def test_split_is_compared_if_both_runs_use_it(
    checkpoints: CheckpointManager,
    config: Config,
    logged: list[str],
    before: dict[str, Any],
    now: dict[str, Any],
    rejected: bool,
) -> None:
    first, other = (
        CheckpointManager(
            dataclasses.replace(config, data=DataConfig(**data)), Mesh.build(1), logged.append
        )
        for data in (before, now)
    )
    save(first, 2)
    if rejected:
        with raises_problem("resume-data-order-changed", "split", contains="8,2"):
            load(other)
    else:
        assert load(other)[0] == state_at(2)


class Crash(Exception):
    """The end of the process."""


@pytest.mark.parametrize("again", [False, True], ids=["a new iteration", "the same iteration"])
def test_crash_at_any_rename_leaves_a_complete_checkpoint(
    again: bool, checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts the save before its first rename, its second, and so on."""
    renames = {"replace": os.replace, "rename": os.rename}
    survived = 0
    for allowed in range(20):
        shutil.rmtree(folder, ignore_errors=True)
        save(checkpoints, 4, *([8] if again else []))
        left = [allowed]

        def counted(kind: str, source: Any, target: Any, left: list[int] = left) -> None:
            if left[0] == 0:
                raise Crash
            left[0] -= 1
            renames[kind](source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda a, b: counted("replace", a, b))
            patch.setattr(os, "rename", lambda a, b: counted("rename", a, b))
            try:
                save(checkpoints, 8)
            except Crash:
                survived += 1
            else:
                break
        state, engine = load(checkpoints)
        assert state in (state_at(4), state_at(8))
        assert state is not None
        assert engine.content == f"of iteration {state.iteration}"
    else:
        pytest.fail("the save never completed")
    # run.json, manifest, the older folder, the folder, two pointers
    assert survived == (6 if again else 5)


def test_the_next_save_removes_leftovers_of_a_crash(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    for name in (".incomplete-global_step5", ".replaced-global_step3"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_bytes(b"of a file")
    save(checkpoints, 4)
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step4",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]


def test_a_checkpoint_of_the_same_iteration_is_replaced(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    engine = save(checkpoints, 4)
    engine.content = "of another run"
    checkpoints.save(engine, state_at(4))  # type: ignore[arg-type]
    assert load(checkpoints)[1].content == "of another run"
    assert [path.name for path in folder.glob(".*")] == []


def test_a_replaced_checkpoint_is_restored_if_its_replacement_was_not_completed(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(checkpoints, 4)
    rename = os.rename

    def crashing(source: Any, target: Any) -> None:
        if Path(source).name.startswith(".incomplete-"):
            raise Crash
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", crashing)
        with pytest.raises(Crash):
            save(checkpoints, 4)
    assert not (folder / "global_step4").exists()
    state, engine = load(checkpoints)
    assert state == state_at(4)
    assert engine.content == "of iteration 4"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_files_are_flushed_before_the_rename(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of fsync and rename makes a power failure harmless."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def recorded_fsync(descriptor: int) -> None:
        events.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recorded(move: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(source: Any, target: Any) -> None:
            events.append(("name", Path(target).name))
            move(source, target)

        return call

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded(rename))
    monkeypatch.setattr(os, "replace", recorded(replace))
    save(checkpoints, 1)
    before = events[: events.index(("name", "global_step1"))]
    for name in ("model_states.pt", "optim_states.pt", "run.json", ".incomplete-global_step1"):
        assert ("flush", name) in before, name
    named = [name for kind, name in events if kind == "name"]
    assert named[-3:] == ["global_step1", "latest", "latest_checkpointed_iteration.txt"]
    after = events[len(before) + 1 : events.index(("name", "latest"))]
    assert ("flush", folder.name) in after


def test_write_text_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    storage.write_text(path, "old")

    def crash(descriptor: int) -> None:
        raise Crash

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(Crash):
        storage.write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(("start", "warned"), [(0, True), (4, True), (8, False), (9, False)])
def test_a_save_folder_with_newer_checkpoints_gets_a_warning(
    start: int, warned: bool, checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 4, 8, 12)
    (folder / "global_step12" / "manifest.json").unlink()
    logged.clear()
    checkpoints.warn_of_newer(state_at(start))
    assert ["[save-folder-has-newer]" in line for line in logged] == [True] * warned
