"""How a run ends and evaluates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.runs import (
    ENDLESS,
    Launcher,
    Settings,
    evaluations,
    has_trained,
    losses,
    records,
    steps,
)


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("global_step*"))


# Exit conditions.


def test_a_run_with_exit_interval_equals_an_uninterrupted_one(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Exits and resumes until the end, with exits inside log intervals."""
    settings = {**base, "train_iters": 6, "eval_iters": 1, "eval_interval": 5, "log_interval": 4}
    full = tmp_path / "full"
    parts = tmp_path / "parts"
    launcher.start({**settings, "save": full}).succeed()
    settings |= {"save": parts, "load": parts}
    output = launcher.start({**settings, "exit_interval": 3}).succeed()
    assert output.endswith("\nexiting program at iteration 3\n")
    assert "the end of training" not in output
    assert saved(parts) == ["global_step3"]
    assert len(losses(parts)) == 3
    launcher.start({**settings, "exit_interval": 3}).succeed()
    launcher.start(settings).succeed()
    assert steps(parts) == steps(full)
    assert evaluations(parts) == evaluations(full)


def test_the_kill_switch_stops_the_run(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    run = tmp_path / "run"
    switch = tmp_path / "switch"
    settings = {**base, "train_iters": ENDLESS, "kill_switch_path": switch, "save": run}
    started = launcher.start(settings, ranks=2)
    started.wait_until(has_trained(run))
    switch.touch()
    output = started.succeed()
    last = len(losses(run))
    assert f"Detected kill switch at {switch}. Exiting, iteration={last}" in output
    assert saved(run) == [f"global_step{last}"]

    # An existing one prevents training.
    output = launcher.start({**settings, "save": tmp_path / "other"}).succeed()
    assert output.endswith(f"\nDetected kill switch at {switch}. Exiting, iteration=0\n")
    assert " iteration " not in output


# Evaluations.


def test_evaluations_run_at_their_interval_and_at_the_end(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """They change nothing in the training, and --skip-train repeats the last ones only."""
    run = tmp_path / "run"
    without = tmp_path / "without"
    settings = {**base, "train_iters": 5, "eval_interval": 2, "eval_iters": 2, "save": run}
    launcher.start({**settings, "eval_iters": 0, "save": without}).succeed()
    output = launcher.start(settings).succeed()
    assert steps(run) == steps(without)
    found = evaluations(run)
    assert [(e["iteration"], *(set(e) - {"iteration", "ppl"})) for e in found] == [
        (2, "validation_loss"),
        (4, "validation_loss"),
        (5, "validation_loss"),
        (5, "test_loss"),
    ]
    ends = [f"the end of training for {split} data" for split in ("val", "test")]
    for evaluation, where in zip(found, ("iteration 2", "iteration 4", *ends), strict=True):
        loss = evaluation.get("validation_loss", evaluation.get("test_loss"))
        assert evaluation["ppl"] == pytest.approx(np.exp(loss))
        text = f" validation loss at {where} | lm loss value: {loss:.6E} | lm loss PPL: "
        lines = output.splitlines()
        place = next(i for i, line in enumerate(lines) if line.startswith(text))
        assert set(lines[place - 1]) == set(lines[place + 1]) == {"-"}

    before = (records(run), saved(run))
    again = {**settings, "load": run, "train_iters": 9, "skip_train": True}
    output = launcher.start(again).succeed()
    loss = found[-2]["validation_loss"]
    assert f"val data | lm loss value: {loss:.6E} |" in output
    assert (records(run), saved(run)) == before
