"""Checkpoints are complete or not there: on one process, with an engine that writes two files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from megatron_ds.checkpoint import native
from megatron_ds.checkpoint.native import Checkpoints
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    DeepSpeedConfig,
    ModelConfig,
    PrecisionConfig,
    RuntimeConfig,
    ScheduleConfig,
)
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.sharding import Shard, declare
from megatron_ds.state import TrainState


class FakeEngine:
    """Writes what it is told; remembers what it was asked to load."""

    def __init__(self) -> None:
        self.content = b""
        self.loaded: tuple[Path, str] | None = None
        self.module = nn.Linear(4, 6)
        declare(self.module.weight, Shard(0, (6,)))
        self.ds_config: dict[str, Any] = {}

    def save(self, folder: Path, tag: str) -> None:
        (folder / tag / "model_states.pt").write_bytes(b"model " + self.content)
        (folder / tag / "below").mkdir()
        (folder / tag / "below" / "optim_states.pt").write_bytes(b"optimizer " + self.content)

    def load(self, folder: Path, tag: str) -> None:
        self.loaded = folder, tag
        self.content = (folder / tag / "model_states.pt").read_bytes().removeprefix(b"model ")


@pytest.fixture(scope="module", autouse=True)
def _one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def config(tmp_path: Path) -> Config:
    folder = str(tmp_path / "run")
    return Config(
        model=ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4),
        schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=4),
        checkpoint=CheckpointConfig(save=folder, load=folder),
    )


@pytest.fixture
def folder(config: Config) -> Path:
    assert config.checkpoint.save is not None
    return Path(config.checkpoint.save)


@pytest.fixture
def checkpoints(config: Config, said: list[str]) -> Checkpoints:
    return Checkpoints(config, Mesh.build(1), said.append)


def state_at(iteration: int) -> TrainState:
    return TrainState(
        iteration, 3 * iteration, 12 * iteration, 3 * iteration, iteration, skipped_iterations=0
    )


def save(checkpoints: Checkpoints, *iterations: int) -> FakeEngine:
    engine = FakeEngine()
    for iteration in iterations:
        engine.content = b"of iteration %d" % iteration
        checkpoints.save(engine, state_at(iteration))  # type: ignore[arg-type]
    return engine


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def load(checkpoints: Checkpoints) -> tuple[TrainState | None, FakeEngine]:
    engine = FakeEngine()
    return checkpoints.load(engine), engine  # type: ignore[arg-type]


def test_a_save_leaves_one_folder_and_two_pointers(
    checkpoints: Checkpoints, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 7)
    assert sorted(path.name for path in folder.iterdir()) == [
        "global_step7",
        "latest",
        "latest_checkpointed_iteration.txt",
    ]
    assert (folder / "latest").read_text() == "global_step7"
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "7"
    assert native.files_below(folder / "global_step7") == [
        "below/optim_states.pt",
        "manifest.json",
        "model_states.pt",
        "run.json",
    ]
    assert said == [
        f"saving checkpoint at iteration       7 to {folder}",
        f"  successfully saved checkpoint at iteration       7 to {folder}",
    ]


def test_the_manifest_describes_every_other_file(checkpoints: Checkpoints, folder: Path) -> None:
    save(checkpoints, 1)
    manifest = native.read_json(folder / "global_step1" / "manifest.json")
    assert sorted(manifest["files"]) == ["below/optim_states.pt", "model_states.pt", "run.json"]
    assert manifest["files"]["model_states.pt"] == {
        "bytes": 20,
        "sha256": sha256_of(b"model of iteration 1"),
    }


def test_run_facts_hold_state_layout_and_how_parameters_are_cut(
    checkpoints: Checkpoints, folder: Path
) -> None:
    save(checkpoints, 3)
    run = native.read_json(folder / "global_step3" / "run.json")
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
    checkpoints: Checkpoints, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 9, 10, 8)
    said.clear()
    state, engine = load(checkpoints)
    assert state == state_at(10)
    assert engine.loaded == (folder, "global_step10")
    assert engine.content == b"of iteration 10"
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


def edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Changes a JSON file and, unless it is the manifest, its entry there."""

    def apply(path: Path) -> None:
        values = native.read_json(path / name)
        change(values)
        (path / name).write_text(json.dumps(values))
        if name != "manifest.json":
            manifest = native.read_json(path / "manifest.json")
            content = (path / name).read_bytes()
            entry = {"bytes": len(content), "sha256": sha256_of(content)}
            manifest["files"][name] = entry
            (path / "manifest.json").write_text(json.dumps(manifest))

    return apply


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped byte": (
        flip_a_byte,
        "model_states.pt is damaged (its SHA-256 differs from the manifest's)",
    ),
    "a truncated file": (
        truncate,
        "below/optim_states.pt has 4 bytes, the manifest says 24",
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
        "its manifest.json or run.json cannot be read",
    ),
    "a manifest without files": (
        edit("manifest.json", lambda values: values.pop("files")),
        "its manifest.json or run.json cannot be read",
    ),
    "an unknown format": (
        edit("run.json", lambda values: values.update(format_version=2)),
        "format version 2, expected 1",
    ),
    "the state of another iteration": (
        edit("run.json", lambda values: values["state"].update(iteration=5)),
        "the state is of iteration 5",
    ),
    "a state with an unknown key": (
        edit("run.json", lambda values: values["state"].update(epoch=1)),
        "state has the keys",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(
    damage: str, checkpoints: Checkpoints, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8)
    apply, words = DAMAGES[damage]
    apply(folder / "global_step8")
    said.clear()
    state, engine = load(checkpoints)
    assert state == state_at(4)
    assert engine.content == b"of iteration 4"
    assert said[0].startswith(f"WARNING: skipping the checkpoint {folder / 'global_step8'}: ")
    assert words in said[0]
    assert said[1] == f" loading checkpoint from {folder} at iteration 4"


def test_without_a_complete_checkpoint_nothing_is_loaded(
    checkpoints: Checkpoints, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4)
    shutil.copytree(folder / "global_step4", folder / "global_step5-copy")
    (folder / "global_step6").write_text("a file of this name")
    (folder / "global_step4" / "run.json").unlink()
    said.clear()
    state, engine = load(checkpoints)
    assert (state, engine.loaded) == (None, None)
    assert said[1:] == [
        f"WARNING: could not find a complete checkpoint in {folder}",
        "    will not load any checkpoints and will start from random",
    ]


def test_a_folder_that_is_not_there_has_no_checkpoint(checkpoints: Checkpoints) -> None:
    assert load(checkpoints)[0] is None


def test_another_model_or_layout_is_refused_with_every_difference(
    checkpoints: Checkpoints, config: Config, folder: Path, said: list[str]
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
        load(Checkpoints(other, Mesh.build(1), said.append))
    assert str(error.value).splitlines() == [
        f"the checkpoint {folder / 'global_step2'} does not fit this run:",
        "  - num_layers is 2 in the checkpoint and 3 in this run",
        "  - zero_stage is 1 in the checkpoint and 2 in this run (a resume needs the same layout)",
        "  - precision is fp32 in the checkpoint and bf16 in this run (a resume needs the same "
        "layout)",
    ]


def test_what_decides_the_order_of_the_samples_may_not_change(
    checkpoints: Checkpoints, config: Config, said: list[str]
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
        load(Checkpoints(other, Mesh.build(1), said.append))
    words = " (it decides which samples come next)"
    assert str(error.value).splitlines()[1:] == [
        f"  - seed is 1234 in the checkpoint and 7 in this run{words}",
        f"  - global_batch_size is 4 in the checkpoint and 8 in this run{words}",
        f"  - rampup_batch_size is None in the checkpoint and [2, 2, 6] in this run{words}",
    ]


def test_dropout_may_change_on_a_resume(
    checkpoints: Checkpoints, config: Config, said: list[str]
) -> None:
    save(checkpoints, 2)
    model = dataclasses.replace(config.model, hidden_dropout=0.0, attention_dropout=0.3)
    other = dataclasses.replace(config, model=model)
    assert load(Checkpoints(other, Mesh.build(1), said.append))[0] == state_at(2)


class Crash(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("again", [False, True], ids=["a new iteration", "the same iteration"])
def test_a_crash_at_any_rename_leaves_a_complete_checkpoint(
    again: bool, checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
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
        assert engine.content == b"of iteration %d" % state.iteration
    else:
        pytest.fail("the save never came to its end")
    # run.json, manifest, the older folder, the folder, two pointers
    assert survived == (6 if again else 5)


def test_the_next_save_removes_what_a_crash_left(checkpoints: Checkpoints, folder: Path) -> None:
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
    checkpoints: Checkpoints, folder: Path
) -> None:
    engine = save(checkpoints, 4)
    engine.content = b"of another run"
    checkpoints.save(engine, state_at(4))  # type: ignore[arg-type]
    assert load(checkpoints)[1].content == b"of another run"
    assert [path.name for path in folder.glob(".*")] == []


def test_a_checkpoint_that_made_way_comes_back_if_its_successor_did_not_arrive(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
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
    assert engine.content == b"of iteration 4"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_everything_is_on_the_disk_before_it_gets_its_name(
    checkpoints: Checkpoints, folder: Path, monkeypatch: pytest.MonkeyPatch
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
    native.write_text(path, "old")

    def crash(descriptor: int) -> None:
        raise Crash

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(Crash):
        native.write_text(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(("start", "warned"), [(0, True), (4, True), (8, False), (9, False)])
def test_a_folder_with_checkpoints_beyond_the_start_is_warned_of(
    start: int, warned: bool, checkpoints: Checkpoints, folder: Path, said: list[str]
) -> None:
    save(checkpoints, 4, 8, 12)
    (folder / "global_step12" / "manifest.json").unlink()
    said.clear()
    checkpoints.warn_of_newer(state_at(start))
    words = f"WARNING: {folder} holds a checkpoint of iteration 8, and this run starts from"
    assert [line.startswith(f"{words} iteration {start}:") for line in said] == [True] * warned
