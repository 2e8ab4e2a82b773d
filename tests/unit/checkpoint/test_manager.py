"""Saving and loading on one process, with an engine that writes two files."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xxhash

from megatron_ds.checkpoint.files import local_files
from megatron_ds.checkpoint.files.native_reader import SavedStates
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import manifest_text, read_manifest
from megatron_ds.config import Config, DataConfig, OptimizerConfig, PrecisionConfig, RuntimeConfig
from megatron_ds.config.problems import UserError
from megatron_ds.data.blend.blend_history import SourceId, resume_history
from megatron_ds.train_state import TrainState
from tests.problems import raises_problem
from tests.unit.checkpoint.fakes import (
    FakeEngine,
    Managers,
    flip_a_bit,
    load,
    names_in,
    records_of,
    save,
    state_at,
    watch_disk,
)


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_save_writes_one_folder_and_two_pointers(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 7)
    path = folder / "global_step7"
    assert names_in(folder) == {path.name, *local_files.POINTERS}
    assert [(folder / name).read_text() for name in local_files.POINTERS] == ["global_step7", "7"]
    others = ["below/optim_states.pt", "model_states.pt", "run.json"]
    written = (str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())
    assert sorted(written) == sorted(["manifest.json", *others])
    assert logged == [
        f"saving checkpoint at iteration       7 to {folder}",
        f"  successfully saved checkpoint at iteration       7 to {folder}",
    ]

    files = read_manifest(path)
    content = (path / "model_states.pt").read_bytes()
    assert sorted(files) == others
    assert files["model_states.pt"] == (len(content), xxhash.xxh3_128(content).hexdigest())

    run = json_of(path / "run.json")
    assert TrainState.from_dict(run["state"]) == state_at(7)
    assert run["layout"] == {
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "ds_sequence_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "zero_stage": 1,
        "precision": "fp32",
        "optimizer": "adam",
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "sub_group_size": 0,
        "pipeline_model_parallel_size": 1,
        "layers_per_stage": "",
        "expert_tensor_parallel_size": "",
    }
    assert run["partitions"] == [{"size": 30, "parameters": [["weight", [6, 5], 0]]}]
    assert run["shards"] == {"weight": {"dim": 0, "sections": [3, 3], "parts": ["gate", "up"]}}
    assert run["config"]["model"]["num_layers"] == 2


def test_load_selects_the_last_save(
    checkpoints: CheckpointManager, folder: Path, logged: list[str]
) -> None:
    save(checkpoints, 9, 11, 10)
    logged.clear()
    state, engine = load(checkpoints)
    assert state == state_at(10)
    assert engine.loaded == (folder, "global_step10")
    assert engine.content == "of iteration 10"
    assert logged == [
        f" loading checkpoint from {folder} at iteration 10",
        f"  successfully loaded checkpoint from {folder} at iteration 10",
    ]


def test_a_checkpoint_with_the_parts_of_a_matrix_in_another_order_is_rejected(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    """Claim (checkpoints): the parts of fused matrices are declared in checkpoints and folders of
    weights, and another order is rejected"""
    save(checkpoints, 7)
    edit("shards", "weight", parts=["up", "gate"])(folder / "global_step7")
    with raises_problem("fused-parts-changed", contains="weight consists of up, gate"):
        load(checkpoints)
    edit("shards", "weight", parts=...)(folder / "global_step7")  # as of older versions
    assert load(checkpoints)[0] == state_at(7)


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes(content)


def edit(*keys: str, **values: Any) -> Callable[[Path], None]:
    """Changes run.json, or an object in it, and updates its entry in the manifest.

    A value of `...` removes the key.
    """

    def apply(path: Path) -> None:
        run = json_of(path / "run.json")
        target = functools.reduce(operator.getitem, keys, run)
        target.update(values)
        for key in [key for key, value in values.items() if value is ...]:
            del target[key]
        (path / "run.json").write_text(json.dumps(run))
        (path / "manifest.json").unlink()
        (path / "manifest.json").write_text(manifest_text(records_of(path)))

    return apply


def edit_manifest(path: Path) -> None:
    """Updates the entry of a changed file, but not the manifest's own checksum."""
    content = b"another model"
    (path / "model_states.pt").write_bytes(content)
    values = json_of(path / "manifest.json")
    digest = xxhash.xxh3_128(content).hexdigest()
    values["files"]["model_states.pt"] = {"bytes": len(content), "xxh3_128": digest}
    (path / "manifest.json").write_text(json.dumps(values, indent=1) + "\n")


DAMAGED = "checkpoint-metadata-damaged"
UNFINISHED = "checkpoint-save-unfinished"
OTHER_FORMAT = "checkpoint-of-other-format"
DAMAGES: list[tuple[str, str, Callable[[Path], object]]] = [
    (
        "checkpoint-files-damaged",
        "model_states.pt",
        lambda path: flip_a_bit(path / "model_states.pt"),
    ),
    (
        "checkpoint-file-size",
        "optim_states.pt has 4 bytes",
        write("below/optim_states.pt", b"PK12"),
    ),
    (
        "checkpoint-file-missing",
        "model_states.pt",
        lambda path: (path / "model_states.pt").unlink(),
    ),
    ("checkpoint-file-unlisted", "x_states.pt", write("x_states.pt", b"")),
    ("checkpoint-folder-name", "global_step5", edit("state", iteration=5)),
    (UNFINISHED, "manifest.json", lambda path: (path / "manifest.json").unlink()),
    (UNFINISHED, "run.json", lambda path: (path / "run.json").unlink()),
    (OTHER_FORMAT, "format 2: an older version", edit(format_version=2)),
    (OTHER_FORMAT, "format 7: another version", edit(format_version=7)),
    (DAMAGED, "manifest.json", write("manifest.json", b"\xff{")),
    (DAMAGED, "manifest.json", write("manifest.json", b"[1]")),
    (DAMAGED, "KeyError('files')", write("manifest.json", b'{"sha256": ""}')),
    (DAMAGED, "manifest.json", edit_manifest),
    (DAMAGED, "format_version", edit(format_version=...)),
    (DAMAGED, "layout", edit(layout=...)),
    (DAMAGED, "zero_stage", edit("layout", zero_stage="1")),
    (DAMAGED, "epoch", edit("state", epoch=1)),
    (DAMAGED, "NoneType", edit("state", consumed_samples=None)),
    (DAMAGED, "sections", edit("shards", "weight", parts=["gate"])),
    (DAMAGED, "run.json", edit(data={"format": 1, "sources": 3})),
]


@pytest.mark.parametrize(
    ("code", "value", "damage"),
    DAMAGES,
    ids=[f"{n}: {code}, {value}" for n, (code, value, _) in enumerate(DAMAGES)],
)
def test_load_falls_back_to_the_checkpoint_before_a_damaged_one(
    code: str,
    value: str,
    damage: Callable[[Path], object],
    checkpoints: CheckpointManager,
    folder: Path,
    logged: list[str],
) -> None:
    save(checkpoints, 4, 8)
    damage(folder / "global_step8")
    logged.clear()

    state, engine = load(checkpoints)

    assert state == state_at(4)
    assert engine.content == "of iteration 4"
    found = checkpoints.restoring._find_damage(folder / "global_step8")
    assert found.code == code
    assert value in str(found)
    assert "[checkpoint-skipped]" in logged[0]
    assert f"{folder / 'global_step8'}: {found}" in logged[0]
    assert logged[1] == f" loading checkpoint from {folder} at iteration 4"


def test_a_folder_without_a_checkpoint_starts_a_new_run(
    checkpoints: CheckpointManager,
    folder: Path,
    logged: list[str],
    manager: Callable[..., CheckpointManager],
) -> None:
    """A warning only if the folder is not that of the run itself."""
    assert load(checkpoints)[0] is None
    logged.clear()
    for name in ("global_step5-copy", ".incomplete-global_step3", "index-cache"):
        (folder / name).mkdir(parents=True)
    (folder / "global_step6").write_text("a file of this name")
    state, engine = load(checkpoints)
    assert (state, engine.loaded) == (None, None)
    assert load(manager(save=str(folder / "other")))[0] is None
    own, other = logged
    assert f"no checkpoint in {folder} yet" in own
    assert "WARNING" not in own
    assert other.endswith("[no-checkpoint-to-load]")


def test_resume_rejects_another_model_or_optimizer_with_every_difference(
    checkpoints: CheckpointManager, config: Config, manager: Managers
) -> None:
    save(checkpoints, 2)
    changes = {"num_layers": 3, "hidden_dropout": 0.0, "activation": "gelu"}
    other = manager(
        model=dataclasses.replace(config.model, **changes),
        precision=PrecisionConfig(bf16=True),
        optimizer=OptimizerConfig(optimizer="lion"),
    )
    with pytest.raises(UserError) as raised:
        other.restoring.select()
    assert [(problem.code, problem.fields) for problem in raised.value.problems] == [
        ("resume-model-changed", ("num_layers",)),
        ("resume-optimizer-changed", ("optimizer",)),
    ]


def test_states_of_another_order_are_resharded(
    checkpoints: CheckpointManager, logged: list[str]
) -> None:
    save(checkpoints, 2)
    found = checkpoints.restoring.select()
    engine = FakeEngine()
    engine.offset = 2
    checkpoints.restoring.load(engine, found)
    assert engine.loaded is None
    assert engine.resharded
    assert "  resharding its weights and optimizer states: order of the optimizer's flat" in (
        "\n".join(logged)
    )


def test_steps_are_those_of_a_state_or_of_its_group(
    checkpoints: CheckpointManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers of apex count the steps of a group, those of torch those of a parameter."""
    save(checkpoints, 2)
    found = checkpoints.restoring.select()
    group = {"params": [0], "step": 7}
    for state, groups, steps in (
        ({}, group, 7),
        ({"step": 5}, group, 5),
        ({}, {"params": []}, None),
    ):
        optimizer = {"state": {0: state}, "param_groups": [groups]}
        file = {"optimizer_state_dict": {"base_optimizer_state": optimizer}}
        monkeypatch.setattr(SavedStates, "_open", lambda *_, file=file: file)
        assert SavedStates(found).steps("weight") == steps


def test_a_new_run_starts_from_weights_alone(
    checkpoints: CheckpointManager, manager: Managers, tmp_path: Path
) -> None:
    """Claim (checkpoints): `--finetune` and `--no-load-optim` take the weights alone, on any
    layout"""
    save(checkpoints, 2)
    sgd = OptimizerConfig(optimizer="sgd")
    seed = RuntimeConfig(seed=1)
    tuned = manager(finetune=True, save=str(tmp_path / "new"), optimizer=sgd, runtime=seed)
    found = tuned.restoring.select()
    assert found.run.data is None
    engine = FakeEngine()
    assert tuned.restoring.load(engine, found) == TrainState()
    assert engine.loaded is None
    assert engine.resharded.state_names("weight") == ()
    assert engine.resharded.steps("weight") is engine.resharded.loss_scaler is None


def test_a_new_run_starts_from_weights_and_optimizer_states(
    checkpoints: CheckpointManager, manager: Managers, tmp_path: Path
) -> None:
    """With other data, but with the optimizer of the checkpoint."""
    save(checkpoints, 2)
    options = {"reset_iteration": True, "save": str(tmp_path / "new")}
    state, engine = load(manager(**options, runtime=RuntimeConfig(seed=1)))
    assert engine.loaded is not None
    assert state == TrainState(
        applied_samples=state_at(2).applied_samples, applied_tokens=state_at(2).applied_tokens
    )
    found = manager(**options).restoring.select()
    assert found.run.data is None
    with raises_problem("resume-optimizer-changed"):
        manager(**options, optimizer=OptimizerConfig(optimizer="sgd")).restoring.select()


def test_a_checkpoint_without_optimizer_states_continues_without_them_only(
    manager: Managers, tmp_path: Path
) -> None:
    """Claim (checkpoints): checkpoints without states of the optimizer have the weights of any
    layout, and continue without these states only"""
    save(manager(no_save_optim=True), 2)
    for options in ({}, {"reset_iteration": True, "save": str(tmp_path / "new")}):
        with raises_problem("checkpoint-without-optimizer", "no_load_optim", "finetune"):
            manager(**options).restoring.select()
    state, engine = load(manager(no_load_optim=True))
    assert state == state_at(2)
    assert engine.resharded is not None
    assert load(manager(finetune=True, save=str(tmp_path / "new")))[0] == TrainState()


def test_too_little_space_gives_a_warning_before_the_save(
    manager: Managers, folder: Path, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the model's size, then with that of the last checkpoint of the same states."""
    disk = SimpleNamespace(free=16 * 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)

    def is_warned(**options: bool) -> bool:
        logged.clear()
        save(manager(**options), 2)
        return "[disk-may-become-full]" in logged[1]

    assert not is_warned()  # 30 parameters of 16 bytes
    assert is_warned()
    shutil.rmtree(folder)
    disk.free -= 1
    assert is_warned()
    shutil.rmtree(folder)
    assert not is_warned(no_save_optim=True)  # of 8 bytes
    assert is_warned()  # not compared with a checkpoint without them
    disk.free = 100_000
    assert not is_warned()


def test_a_run_continues_without_the_states_of_its_optimizer(
    checkpoints: CheckpointManager, manager: Managers
) -> None:
    """Claim (checkpoints): `--finetune` and `--no-load-optim` take the weights alone, on any
    layout"""
    save(checkpoints, 2)
    others = {"optimizer": OptimizerConfig(optimizer="lion"), "no_load_optim": True}
    state, engine = load(manager(**others))
    assert state == state_at(2)
    assert engine.loaded is None
    assert engine.resharded.state_names("weight") == ()
    with raises_problem("resume-data-order-changed"):
        manager(**others, runtime=RuntimeConfig(seed=1)).restoring.select()


def test_a_changed_layout_is_logged_by_its_flags(
    checkpoints: CheckpointManager, manager: Managers, logged: list[str]
) -> None:
    save(checkpoints, 2)
    other = manager(precision=PrecisionConfig(bf16=True))
    found = other.restoring.select()
    logged.clear()
    other.restoring.load(FakeEngine(), found)
    (line,) = (one for one in logged if "resharding" in one)
    assert line.startswith("  resharding its weights and optimizer states: ")
    assert line.isprintable()


def test_8_bit_moments_are_not_resharded(manager: Managers) -> None:
    checkpoints = manager(optimizer=OptimizerConfig(use_bnb_optimizer=True))
    save(checkpoints, 2)
    found = checkpoints.restoring.select()
    engine = FakeEngine()
    engine.offset = 2
    with raises_problem("resume-partitions-changed", contains="at 2"):
        checkpoints.restoring.load(engine, found)
    assert engine.loaded is None
    assert not engine.resharded


def test_changed_settings_are_logged(
    checkpoints: CheckpointManager, manager: Managers, logged: list[str]
) -> None:
    save(checkpoints, 2)
    logged.clear()
    manager(clip_grad=0.5).restoring.select()
    (warning,) = logged
    assert warning.startswith("WARNING: --clip-grad is 1.0 in ")
    assert "[resume-setting-changed]" in warning


def test_the_blend_history_is_restored(checkpoints: CheckpointManager) -> None:
    history = resume_history(None, [SourceId("a", "hash", (0, 9))], [1.0], 3, seq_length=4)
    checkpoints.saving.save(FakeEngine(), state_at(2), lambda: history)
    found = checkpoints.restoring.select()
    assert found.run.data == history
    # Histories of older versions have no length: it is that of the run.
    edit("data", format=2, seq_length=...)(checkpoints.newest)
    found = checkpoints.restoring.select()
    assert found.run.data == history


@pytest.mark.parametrize(
    ("before", "now", "rejected"),
    [
        ({"data_path": ["a"], "split": "9,1"}, {"data_path": ["a"], "split": "8,2"}, "8,2"),
        ({"data_path": ["a"]}, {"data_args_path": "f", "split": "8,2"}, "8,2"),
        (
            {"data_path": ["a"]},
            {"data_path": ["a"], "split_rounding": "megatron-core"},
            "megatron-core",
        ),
        ({"data_path": ["a"], "split": "9,1"}, {"data_path": ["b"], "split": "9,1"}, None),
        ({"data_path": ["a"], "split": "9,1"}, {"train_data_path": ["a"]}, None),
        ({"train_data_path": ["a"]}, {"data_path": ["a"], "split": "9,1"}, None),
    ],
)
def test_split_and_its_rounding_are_compared_if_both_runs_use_it(
    manager: Managers, before: dict[str, Any], now: dict[str, Any], rejected: str | None
) -> None:
    save(manager(data=DataConfig(**before)), 2)
    other = manager(data=DataConfig(**now))
    if rejected is None:
        assert load(other)[0] == state_at(2)
        return
    with raises_problem("resume-data-order-changed", "split", contains=rejected):
        load(other)


def test_the_next_save_removes_leftovers_of_a_crash(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    for name in (".incomplete-global_step5", ".replaced-global_step3"):
        (folder / name).mkdir(parents=True)
        (folder / name / "half").write_bytes(b"of a file")
    save(checkpoints, 4)
    assert names_in(folder) == {"global_step4", *local_files.POINTERS}


def test_a_checkpoint_of_the_same_iteration_is_replaced(
    checkpoints: CheckpointManager, folder: Path
) -> None:
    engine = save(checkpoints, 4)
    engine.content = "of another run"
    checkpoints.saving.save(engine, state_at(4))
    assert load(checkpoints)[1].content == "of another run"
    assert [path.name for path in folder.glob(".*")] == []


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_is_reported_after_its_last_operation_of_the_disk(
    in_background: bool,
    checkpoints: CheckpointManager,
    folder: Path,
    logged: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the log and in events.jsonl; a power failure after the words loses nothing."""
    events: list[tuple[str, str]] = []
    watch_disk(monkeypatch, folder, lambda kind, path: events.append((kind, path.name)))
    monkeypatch.setattr(checkpoints.saving, "_log", lambda line: events.append(("log", line)))
    monkeypatch.setattr(
        checkpoints.saving,
        "_on_saved",
        lambda iteration, **_: events.append(("event", str(iteration))),
    )
    save(checkpoints, 1, in_background=in_background)
    (words,) = [place for place, (_, line) in enumerate(events) if "successfully saved" in line]
    assert events[words - 1] == ("event", "1")
    disk = [place for place, (kind, _) in enumerate(events) if kind not in ("log", "event")]
    assert len(disk) > 10
    assert disk[-1] < words - 1


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_files_are_flushed_before_the_rename(
    checkpoints: CheckpointManager, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of fsync and rename makes a power failure harmless."""
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(checkpoints.saving, "_key", "key")
    watch_disk(monkeypatch, folder, lambda kind, path: events.append((kind, path.name)))
    save(checkpoints, 1)
    before = events[: events.index(("rename", "global_step1"))]
    for name in [
        "model_states.pt",
        "optim_states.pt",
        ".run.json.partial",
        ".incomplete-global_step1-key",
    ]:
        assert ("fsync", name) in before, name
    named = [name for kind, name in events if kind == "rename"]
    assert named[-3:] == ["global_step1", "latest", "latest_checkpointed_iteration.txt"]
    after = events[len(before) + 1 : events.index(("rename", "latest"))]
    assert ("fsync", folder.name) in after
