"""Checkpoints are complete or not there: on one process, with an engine that writes two files."""

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
from megatron_ds.checkpoint.metadata import checksum_manifest, read_json, read_manifest
from megatron_ds.config import (
    Config,
    DataConfig,
    DeepSpeedConfig,
    PrecisionConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from megatron_ds.data.blend_history import SourceId, new_history
from megatron_ds.engine.ds_checkpoint_io import write_tensors
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from tests.unit.checkpoint.fakes import FakeEngine, load, save, state_at


def test_a_save_leaves_one_folder_and_two_pointers(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
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
    assert said == [
        f"saving checkpoint at iteration       7 to {folder}",
        f"  successfully saved checkpoint at iteration       7 to {folder}",
    ]


def test_the_manifest_describes_every_other_file(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 1)
    files = read_manifest(folder / "global_step1")
    assert sorted(files) == ["below/optim_states.pt", "model_states.pt", "run.json"]
    content = (folder / "global_step1" / "model_states.pt").read_bytes()
    assert files["model_states.pt"] == {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def test_run_facts_hold_state_layout_and_how_parameters_are_cut(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 3)
    run = read_json(folder / "global_step3" / "run.json")
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


def test_the_newest_by_number_is_loaded(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 9, 8, 10)
    said.clear()
    state, engine = load(checkpoints)
    assert state == state_at(10)
    assert engine.loaded == (folder, "global_step10")
    assert engine.content == "of iteration 10"
    assert said == [
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
    """Changes run.json and its entry in the manifest, as a program would that knows both."""

    def apply(path: Path) -> None:
        values = read_json(path / "run.json")
        change(values)
        (path / "run.json").write_text(json.dumps(values))
        names = [name for name in storage.files_below(path) if name != "manifest.json"]
        (path / "manifest.json").write_text(checksum_manifest(storage.fsync_and_hash(path, names)))

    return apply


def edit_manifest(path: Path) -> None:
    """A size and a digest that fit a file, in a manifest that is not sealed anew."""
    content = b"another model"
    (path / "model_states.pt").write_bytes(content)
    values = read_json(path / "manifest.json")
    values["files"]["model_states.pt"] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    (path / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (
        flip_a_byte,
        "model_states.pt is damaged (its SHA-256 differs from the manifest's)",
    ),
    "a truncated file": (
        truncate,
        "below/optim_states.pt has 4 bytes, the manifest says ",
    ),
    "a missing file": (
        lambda path: (path / "model_states.pt").unlink(),
        "model_states.pt is missing",
    ),
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "it has no manifest.json, so its save did not finish",
    ),
    "no run.json": (
        lambda path: (path / "run.json").unlink(),
        "it has no run.json, so its save did not finish",
    ),
    "a manifest that is no JSON": (
        lambda path: (path / "manifest.json").write_bytes(b"\xff{"),
        "manifest.json is damaged (",
    ),
    "a manifest of another kind": (
        lambda path: (path / "manifest.json").write_text("[1]"),
        "manifest.json is damaged (",
    ),
    "a manifest without files": (
        lambda path: (path / "manifest.json").write_text('{"sha256": ""}'),
        "manifest.json is damaged (KeyError('files'))",
    ),
    "an edited manifest": (
        edit_manifest,
        "manifest.json is damaged (its SHA-256 differs from the one in it)",
    ),
    "a file that the manifest does not name": (
        lambda path: write_tensors({}, path / "mp_rank_01_model_states.pt"),
        "mp_rank_01_model_states.pt is not one of its files",
    ),
    "an unknown format": (
        edit(lambda values: values.update(format_version=7)),
        "format version 7, expected 2",
    ),
    "no layout": (
        edit(lambda values: values.pop("layout")),
        "layout is missing or not a JSON object",
    ),
    "the state of another iteration": (
        edit(lambda values: values["state"].update(iteration=5)),
        "the state is of iteration 5",
    ),
    "a state with an unknown key": (
        edit(lambda values: values["state"].update(epoch=1)),
        "state has the keys",
    ),
    "a state that is no number": (
        edit(lambda values: values["state"].update(consumed_samples=None)),
        "the state is not made of numbers",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    damage: str, checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    apply, words = DAMAGES[damage]
    apply(folder / "global_step8")
    said.clear()
    state, engine = load(checkpoints)
    assert state == state_at(4)
    assert engine.content == "of iteration 4"
    assert said[0].startswith(f"WARNING: skipping the checkpoint {folder / 'global_step8'}: ")
    assert words in said[0]
    assert said[1] == f" loading checkpoint from {folder} at iteration 4"


def test_a_folder_without_a_checkpoint_starts_a_new_run(
    checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    for name in ("global_step5-copy", ".incomplete-global_step3", "index-cache"):
        (folder / name).mkdir(parents=True)
    (folder / "global_step6").write_text("a file of this name")
    state, engine = load(checkpoints)
    assert (state, engine.loaded) == (None, None)
    assert said == [
        f"WARNING: could not find a complete checkpoint in {folder}",
        "    will not load any checkpoints and will start from random",
    ]


def test_a_folder_that_is_not_there_has_no_checkpoint(checkpoints: CheckpointManager) -> None:
    assert load(checkpoints)[0] is None


def test_another_model_or_layout_is_refused_with_every_difference(
    checkpoints: CheckpointManager, config: Config, folder: Path, said: list[str]
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
    with pytest.raises(ValueError) as error:
        load(CheckpointManager(other, Mesh.build(1), said.append))
    assert str(error.value).splitlines() == [
        f"the checkpoint {folder / 'global_step2'} does not fit this run:",
        "  - --num-layers is 2 in the checkpoint and 3 in this run",
        "  - --zero-stage is 1 in the checkpoint and 2 in this run (a resume needs the same "
        "layout)",
        "  - precision is fp32 in the checkpoint and bf16 in this run (a resume needs the same "
        "layout)",
    ]


def test_what_decides_the_order_of_the_samples_may_not_change(
    checkpoints: CheckpointManager, config: Config, said: list[str]
) -> None:
    save(checkpoints, 2)
    other = dataclasses.replace(
        config,
        schedule=ScheduleConfig(
            micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 6), train_samples=9
        ),
        runtime=RuntimeConfig(seed=7),
    )
    with pytest.raises(ValueError) as error:
        load(CheckpointManager(other, Mesh.build(1), said.append))
    words = " (it decides which samples come next)"
    assert str(error.value).splitlines()[1:] == [
        f"  - --seed is 1234 in the checkpoint and 7 in this run{words}",
        f"  - --global-batch-size is 4 in the checkpoint and 8 in this run{words}",
        f"  - --rampup-batch-size is None in the checkpoint and [2, 2, 6] in this run{words}",
    ]


def test_batch_sizes_by_tokens_may_not_change(
    checkpoints: CheckpointManager, config: Config, said: list[str]
) -> None:
    save(checkpoints, 2)
    schedule = dataclasses.replace(
        config.schedule, global_batch_size=None, step_batch_size_schedule=("0:2 1K:4",)
    )
    other = dataclasses.replace(config, schedule=schedule)
    with pytest.raises(ValueError) as error:
        load(CheckpointManager(other, Mesh.build(1), said.append))
    assert str(error.value).splitlines()[1:] == [
        "  - --step-batch-size-schedule is None in the checkpoint and ['0:2', '1000:4'] in this "
        "run (it decides which samples come next)"
    ]


def test_dropout_may_change_on_a_resume(
    checkpoints: CheckpointManager, config: Config, said: list[str]
) -> None:
    save(checkpoints, 2)
    model = dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.3)
    other = dataclasses.replace(config, model=model)
    assert load(CheckpointManager(other, Mesh.build(1), said.append))[0] == state_at(2)


def test_the_record_of_the_data_comes_back(checkpoints: CheckpointManager, folder: Path) -> None:
    history = new_history([SourceId("a", "hash", (0, 9))], [1.0], order=3)
    checkpoints.save(FakeEngine(), state_at(2), history.to_dict)  # type: ignore[arg-type]
    found = checkpoints.select()
    assert found is not None
    assert found.history == history
    kept = read_json(folder / "global_step2" / "run.json")["data"]
    assert kept == json.loads(json.dumps(history.to_dict()))


def test_a_checkpoint_without_a_record_of_the_data_is_read(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 2)
    edit(lambda run: run.pop("data"))(folder / "global_step2")
    found = checkpoints.select()
    assert found is not None
    assert found.history is None
    assert load(checkpoints)[0] == state_at(2)


def test_a_damaged_record_of_the_data_damages_the_checkpoint(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    save(checkpoints, 2)
    edit(lambda run: run.update(data={"format": 1, "sources": 3}))(folder / "global_step2")
    with pytest.raises(ValueError, match=r"run.json cannot be read \(data: it lacks what belongs"):
        load(checkpoints)


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({"data_path": ("a",), "split": "9,1"}, {"data_path": ("a",), "split": "8,2"}, True),
        ({"data_path": ("a",)}, {"data_args_path": "f", "split": "8,2"}, True),
        ({"data_path": ("a",), "split": "9,1"}, {"data_path": ("b",), "split": "9,1"}, False),
        ({"data_path": ("a",), "split": "9,1"}, {"train_data_path": ("a",)}, False),
        ({"train_data_path": ("a",)}, {"data_path": ("a",), "split": "9,1"}, False),
    ],
)
def test_split_is_compared_where_it_cuts(
    checkpoints: CheckpointManager,
    config: Config,
    said: list[str],
    before: dict[str, Any],
    now: dict[str, Any],
    refused: bool,
) -> None:
    first, other = (
        CheckpointManager(
            dataclasses.replace(config, data=DataConfig(**data)), Mesh.build(1), said.append
        )
        for data in (before, now)
    )
    save(first, 2)
    if refused:
        with pytest.raises(
            ValueError, match=r"--split is .* in the checkpoint and 8,2 in this run"
        ):
            load(other)
    else:
        assert load(other)[0] == state_at(2)


class Crash(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("again", [False, True], ids=["a new iteration", "the same iteration"])
def test_a_crash_at_any_rename_leaves_a_complete_checkpoint(
    again: bool, checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends the save before its first rename, its second, and so on, until none is left."""
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
        pytest.fail("the save never came to its end")
    # run.json, manifest, the older folder, the folder, two pointers
    assert survived == (6 if again else 5)


def test_the_next_save_removes_what_a_crash_left(
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


def test_a_checkpoint_that_made_way_comes_back_if_its_successor_did_not_arrive(
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
def test_everything_is_on_the_disk_before_it_gets_its_name(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of fsync and rename is what makes a power cut harmless."""
    events: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def noted_fsync(descriptor: int) -> None:
        events.append(("flush", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def noted(move: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def call(source: Any, target: Any) -> None:
            events.append(("name", Path(target).name))
            move(source, target)

        return call

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted(rename))
    monkeypatch.setattr(os, "replace", noted(replace))
    save(checkpoints, 1)
    before = events[: events.index(("name", "global_step1"))]
    for name in ("model_states.pt", "optim_states.pt", "run.json", ".incomplete-global_step1"):
        assert ("flush", name) in before, name
    named = [name for kind, name in events if kind == "name"]
    assert named[-3:] == ["global_step1", "latest", "latest_checkpointed_iteration.txt"]
    after = events[len(before) + 1 : events.index(("name", "latest"))]
    assert ("flush", folder.name) in after


def test_a_file_is_whole_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    storage.write_text(path, "old")

    def crash(descriptor: int) -> None:
        raise Crash

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(Crash):
        storage.write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(("start", "warned"), [(0, True), (4, True), (8, False), (9, False)])
def test_a_folder_with_checkpoints_beyond_the_start_is_warned_of(
    start: int, warned: bool, checkpoints: CheckpointManager, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8, 12)
    (folder / "global_step12" / "manifest.json").unlink()
    said.clear()
    checkpoints.warn_of_newer(state_at(start))
    words = f"WARNING: {folder} holds a checkpoint of iteration 8, and this run starts from"
    assert [line.startswith(f"{words} iteration {start}:") for line in said] == [True] * warned
