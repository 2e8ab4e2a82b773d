"""End-to-end runs with named validation groups, and with a blend that changes on resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.e2e.conftest import write_corpus
from tests.e2e.runs import (
    Launcher,
    Settings,
    checkpoint_differences,
    evaluations,
    losses,
    records,
    steps,
)

CHANGE = 4
"""Iteration at which the blend changes."""
END = 8
"""The last iteration."""
BATCH = 8
"""Samples per iteration."""


@pytest.fixture(scope="module")
def second_corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of token files whose documents count down."""
    return write_corpus(tmp_path_factory.mktemp("second") / "other", 100, seed=1, step=-1)


def record_of(folder: Path, step: int) -> dict[str, Any]:
    """What a checkpoint records about its data."""
    values = json.loads((folder / f"global_step{step}" / "run.json").read_text())
    return values["data"]  # type: ignore[no-any-return]


def test_blend_changes_on_resume_and_survives_a_kill(
    launcher: Launcher, base: Settings, corpus: Path, second_corpus: Path, tmp_path: Path
) -> None:
    """One file, then a blend of its training split with another file: on two ranks, uninterrupted
    and killed, and on one rank, which reads the same samples and drops the same activations.

    Claim (samples): a run whose blend changed on resume is the same on any number of ranks, and
    after a kill
    """
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    settings = {**base, "global_batch_size": BATCH, "train_iters": END, "save_interval": 2}
    blended = {
        **settings,
        "data_path": None,
        "split": None,
        # The same documents as with --split 80,10,10: the file continues where it stopped.
        "train_weighted_split_paths": f"T: 1 0:0.8 {corpus}, 3 0:1 {second_corpus}",
        "valid_weighted_split_paths": f"V: 1 0.8:0.9 {corpus}",
        "test_weighted_split_paths": f"V: 1 0.9:1 {corpus}",
        "eval_iters": 2,
    }
    first = {**settings, "exit_interval": CHANGE}
    runs = [launcher.start({**first, "save": each}, ranks=n) for each, n in ((one, 1), (two, 2))]
    for run in runs:
        run.succeed()
    shutil.copytree(two, killed)

    run = launcher.start(
        {**blended, "save": killed, "load": killed},
        ranks=2,
        fault=f"micro-batch:{6 * BATCH + BATCH // 2}:kill-all",
    )
    assert set(run.wait().codes) == {-9}
    output = launcher.start({**blended, "save": two, "load": two}, ranks=2).succeed()
    launcher.start({**blended, "save": one, "load": one}, ranks=1).succeed()
    resumed = launcher.start({**blended, "save": killed, "load": killed}, ranks=2).succeed()

    assert [record["iteration"] for record in steps(killed)] == list(range(1, END + 1))
    assert steps(killed) == steps(two)
    assert losses(one) == pytest.approx(losses(two), rel=1e-5)
    ours, theirs = (
        {name: record[name] for record in evaluations(run) for name in record if "_loss" in name}
        for run in (one, two)
    )
    assert ours.keys() == {"validation_loss", "test_loss"}
    assert ours == pytest.approx(theirs, rel=1e-5)
    for step in (6, END):
        assert not checkpoint_differences(two / f"global_step{step}", killed / f"global_step{step}")
        assert record_of(two, step) == record_of(killed, step) == record_of(one, step)

    consumed = CHANGE * BATCH
    rest = (END - CHANGE) * BATCH
    record = record_of(two, END)
    assert [source["identity"]["name"] for source in record["sources"]] == ["tokens", "other"]
    read = [source["consumed"] for source in record["sources"]]
    assert read == [consumed + rest // 4, 3 * rest // 4]
    assert [phase["first_sample"] for phase in record["phases"]] == [0, consumed]
    assert [phase["source_starts"] for phase in record["phases"]] == [[0], [consumed, 0]]
    for part in (
        f"changes after {consumed} samples",
        "tokens 1",
        "other 0.75, tokens 0.25",
        f"tokens at its sample {consumed}",
        "new: other",
        "tokens, weight 0.25: 40 samples",
    ):
        assert part in output, part
    assert f"changes after {consumed} samples" not in resumed


def test_groups_are_evaluated_and_logged_by_name(
    launcher: Launcher, base: Settings, corpus: Path, second_corpus: Path, tmp_path: Path
) -> None:
    """Claim (samples): named groups of validation and test data are logged under their names"""
    groups = tmp_path / "groups"
    groups.write_text(f'"X 1: 1 0.9:1 {corpus}" "X2: 1 0.5:1 {second_corpus}, 0 0:1 nowhere"\n')
    run = tmp_path / "run"
    board = tmp_path / "board"
    settings = {
        **base,
        "data_path": None,
        "split": None,
        "train_weighted_split_paths": f"T: 1 0:0.8 {corpus}",
        "valid_weighted_split_paths": (
            f"UP: 1 0.8:0.9 {corpus}",
            f"DOWN: 3 0:0.5 {second_corpus}, 1 0.8:0.9 {corpus}",
        ),
        "test_weighted_split_paths_path": groups,
        "train_iters": 2,
        "eval_interval": 2,
        "eval_iters": 2,
        "save": run,
        "tensorboard_dir": board,
        "log_validation_ppl_to_tensorboard": True,
    }
    output = launcher.start(settings).succeed()

    ends = ("the end of training for val data", "the end of training for test data")
    expected = [
        *((name, "validation", where) for where in ("iteration 2", ends[0]) for name in VALID),
        *((name, "test", ends[1]) for name in TEST),
    ]
    lines = [line for line in output.splitlines() if "lm loss value" in line]
    assert len(lines) == len(expected)
    for line, (name, _, where) in zip(lines, expected, strict=True):
        assert line.startswith(f"{name} loss at {where} | lm loss value: ")
    logged = {
        (record["group"], f"{split}_loss"): record
        for split in ("validation", "test")
        for record in evaluations(run)
        if f"{split}_loss" in record
    }
    assert sorted(logged) == sorted(
        [(name, "validation_loss") for name in VALID] + [(name, "test_loss") for name in TEST]
    )
    assert logged["UP", "validation_loss"] != logged["DOWN", "validation_loss"]
    events = EventAccumulator(str(board)).Reload()
    tags = {tag for tag in events.Tags()["scalars"] if tag.startswith("lm-loss-validation/")}
    assert tags == {
        f"lm-loss-validation/{name}/lm loss {split}{ppl}{axis}"
        for split, names in (("validation", VALID), ("test", TEST))
        for name in names
        for ppl in ("", " ppl")
        for axis in ("", " vs samples", " vs tokens")
    }
    (point,) = events.Scalars("lm-loss-validation/DOWN/lm loss validation")
    assert point.value == pytest.approx(logged["DOWN", "validation_loss"]["validation_loss"])
    shares = json.loads((run / "data_usage.json").read_text())
    assert [(share["split"], share["group"], share["weight"]) for share in shares] == [
        ("train", "T", 1.0),
        ("valid", "UP", 1.0),
        ("valid", "DOWN", 0.75),
        ("valid", "DOWN", 0.25),
        ("test", "X 1", 1.0),
        ("test", "X2", 1.0),
        ("test", "X2", 0.0),
    ]
    assert "test X2: nowhere, weight 0" in output
    assert len(records(run)) == 2 + 4


VALID = ("UP", "DOWN")
TEST = ("X 1", "X2")
