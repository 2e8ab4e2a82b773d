"""The plan of a replay, its settings, and the comparison of records."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.training.verification import compare, plan, replay_config, verify
from tests.problems import raises_problem

RECORD: dict[str, Any] = {
    "iteration": 3,
    "loss": 4.0,
    "grad_norm": 2.0,
    "skipped": False,
    "samples": {"8": "aa", "9": "bb"},
    "random": {"embedding": "cc", "embedding end": "dd"},
    "layers": {"embedding": 3.0, "layers.0": 4.0},
    "weights": {"layers.0.w": [1.0, 0.5], "head.w": [2.0, 0.0]},
    "gradients": {"layers.0.w": [1.0, 0.5], "head.w": [1.7, 0.0]},
    "updated": {"layers.0.w": [1.1, 0.5], "head.w": [2.1, 0.0]},
}


def differing(*keys: str, by: float = 0.1, last: int | None = None) -> list[tuple[str, str, float]]:
    """The differences from a record in which the values below some keys are others."""
    run = copy.deepcopy(RECORD)
    for key in keys:
        *path, name = key.split("/")
        values = run
        for part in path:
            values = values[part]
        value = values[name]
        values[name] = [x + by for x in value] if isinstance(value, list) else value + by
    return [(x.cause, x.where, round(x.size, 6)) for x in compare(run, RECORD) if x.size]


def test_differences_come_in_the_order_of_a_step() -> None:
    keys = ("updated/head.w", "gradients/layers.0.w", "gradients/head.w", "layers/layers.0")
    assert [item[:2] for item in differing(*keys, "loss", "weights/layers.0.w")] == [
        ("weights", "layers.0.w: norm"),
        ("weights", "layers.0.w: sum"),
        ("forward", "layers.0: output"),
        ("forward", "head: loss"),
        ("gradient", "head.w: norm"),
        ("gradient", "head.w: sum"),
        ("gradient", "layers.0.w: norm"),
        ("gradient", "layers.0.w: sum"),
        ("optimizer", "head.w: norm"),
        ("optimizer", "head.w: sum"),
    ]


def test_differences_are_relative_to_norms() -> None:
    assert differing("weights/head.w") == [
        ("weights", "head.w: norm", 0.05),
        ("weights", "head.w: sum", 0.05),
    ]


def test_missing_values_of_a_run() -> None:
    """Compiled layers have no norms; anything else that is missing differs."""
    run = copy.deepcopy(RECORD)
    run["layers"], run["random"] = {}, {}
    assert [item for item in compare(run, RECORD) if item.size] == []
    del run["samples"]["9"], run["updated"]["head.w"]
    run["loss"] = None
    causes = [item.cause for item in compare(run, RECORD) if item.size > 1]
    assert causes == ["data", "optimizer", "optimizer"]


def folder_of(path: Path, starts: list[tuple[int, Config]], *, saved: tuple[int, ...]) -> Path:
    """A --save folder with records of the steps 2, 4 and 6."""
    events = [
        {"event": "start", "iteration": first, "ranks": 4, "config": config.to_dict()}
        for first, config in starts
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(x) + "\n" for x in events))
    lines = [json.dumps({**RECORD, "iteration": step}) + "\n" for step in (2, 4, 6)]
    (path / "step_records.jsonl").write_text("".join(lines) + '{"iteration": 8, "lo')
    for iteration in saved:
        (path / f"global_step{iteration}").mkdir()
    return path


def run_of(**values: Any) -> Config:
    without = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "record_every": 2}
    return Config().with_values({"micro_batch_size": 2, "vocab_size": 101, **without, **values})


def test_steps_are_replayed_from_the_checkpoint_before_them(tmp_path: Path) -> None:
    starts = [(0, run_of()), (3, run_of(load=str(tmp_path), tensor_model_parallel_size=2))]
    folder = folder_of(tmp_path, starts, saved=(1, 3, 4, 6))
    _, segments = plan(folder, None)
    assert [(one.checkpoint, one.steps) for one in segments] == [(1, [2]), (3, [4]), (4, [6])]
    assert [(x.checkpoint, x.steps) for x in plan(folder, ["3-5", "2"])[1]] == [(1, [2]), (3, [4])]
    config = replay_config(folder, segments[1], tmp_path / "replay", {"num_workers": 3})
    assert set(config.axis_sizes.values()) == {1}
    assert (config.checkpoint.load, config.checkpoint.ckpt_step) == (str(folder), 3)
    assert config.schedule.global_batch_size == 4  # of 2 data-parallel ranks
    assert config.model.make_vocab_size_divisible_by == 128
    assert (config.stopping.exit_interval, config.data.num_workers) == (4, 3)
    assert config.checkpoint.save is None


@pytest.mark.parametrize(
    ("values", "steps", "code"),
    [
        ({}, ["3"], "step-not-recorded"),
        ({}, ["4-2"], "steps-malformed"),
        ({"tensor_model_parallel_size": 2, "attention_dropout": 0.1}, ["2"], "masks"),
        ({"ds_sequence_parallel_size": 2, "hidden_dropout": 0.1}, ["2"], "masks"),
    ],
)
def test_steps_that_cannot_be_replayed(
    tmp_path: Path, values: dict[str, Any], steps: list[str], code: str
) -> None:
    folder = folder_of(tmp_path, [(0, run_of(**values))], saved=())
    with raises_problem("replay-draws-other-masks" if code == "masks" else code):
        plan(folder, steps)


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    with raises_problem("step-records-missing"):
        plan(tmp_path, None)
    folder = folder_of(tmp_path, [(5, run_of(load=str(tmp_path)))], saved=(2,))
    with raises_problem("replay-without-checkpoint"):
        plan(folder, ["6"])
    for text, code in (("[]\n", "damaged"), ("{\n", "damaged"), ('{"iteration": 1', "missing")):
        (folder / "step_records.jsonl").write_text(text)
        with raises_problem(f"step-records-{code}"):  # no step is no verdict
            plan(folder, None)


def test_a_replay_that_fails(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, [(0, run_of())], saved=())
    with raises_problem("replay-failed"):
        verify(folder, ["2"], lambda words: 3, print)
