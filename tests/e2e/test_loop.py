"""How a run ends, evaluates and reports, and its errors for bad input."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ds.data.validation import BLOCK_TOKENS, MAX_BLOCKS_PER_FILE
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
from tests.token_files import write_pair


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("global_step*"))


# Exit conditions.


def test_a_run_with_exit_interval_equals_an_uninterrupted_one(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Exits and resumes until the end, with exits inside log intervals."""
    settings = {**base, "train_iters": 6, "eval_iters": 1, "eval_interval": 5, "log_interval": 4}
    full, parts = tmp_path / "full", tmp_path / "parts"
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
    run, switch = tmp_path / "run", tmp_path / "switch"
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


def test_exit_duration_stops_the_run(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    """It counts from the start of the program: start-up alone takes longer than this limit."""
    settings = {**base, "train_iters": ENDLESS, "exit_duration_in_mins": 0.003, "save": tmp_path}
    output = launcher.start(settings, ranks=2).succeed()
    assert "exiting program after 0.003 minutes" in output
    assert len(losses(tmp_path)) == 1
    assert saved(tmp_path) == ["global_step1"]


# Evaluations and logs.


def test_evaluations_run_at_their_interval_and_at_the_end(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """They change nothing in the training, and --skip-train repeats the last ones only."""
    run, without = tmp_path / "run", tmp_path / "without"
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
    for evaluation, where in zip(
        found,
        (
            "iteration 2",
            "iteration 4",
            "the end of training for val data",
            "the end of training for test data",
        ),
        strict=True,
    ):
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


def test_the_console_shows_the_values_of_the_records(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": 4, "log_interval": 2, "save": tmp_path}
    lines = [
        line
        for line in launcher.start(settings).succeed().splitlines()
        if line.startswith(" iteration ")
    ]
    assert len(lines) == 2
    seen = steps(tmp_path)
    assert list(records(tmp_path)[0])[:4] == [
        *("iteration", "consumed_samples", "consumed_tokens", "lm_loss"),
    ]
    mean = (seen[2]["lm_loss"] + seen[3]["lm_loss"]) / 2
    assert "iteration        4/       4 | consumed samples:            8 |" in lines[1]
    assert f"| lm loss: {mean:.6E} |" in lines[1]
    assert f"| grad norm: {seen[3]['grad_norm']:.3f} |" in lines[1]


# Bad input: a message and a status, no traceback.


def reject(launcher: Launcher, settings: Settings, *, code: int, ranks: int = 1) -> str:
    """The output of a run that must end with a status and without a traceback."""
    result = launcher.start({"train_iters": 2, **settings}, ranks=ranks).wait()
    assert set(result.codes) == {code}, result.output
    assert "Traceback" not in result.output, result.output
    return result.output


def test_all_problems_with_the_settings_are_reported_together(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {
        **base,
        "data_path": tmp_path / "nothing",
        "global_batch_size": 6,
        "hidden_size": 33,
        "tensor_model_parallel_size": 3,
        "hidden_layers": 2,
    }
    output = reject(launcher, settings, code=2, ranks=2)
    for value in (
        "[unknown-flag]",
        "[hidden-size-not-divisible-by-heads]",
        "[world-size-not-divisible]",
        f"--data-path {tmp_path / 'nothing'}: {tmp_path / 'nothing'}.bin",
    ):
        assert output.count(value) == 1, f"{value!r} in\n{output}"
    output = reject(launcher, {**base, "global_batch_size": 6}, code=2, ranks=2)
    assert "[batch-size-not-divisible]" in output
    assert "(nearest: 4 or 8)" in output


def test_data_of_another_tokenizer_is_rejected(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Ids beyond the vocabulary are only where the check before the start does not sample."""
    tokens = np.full(3 * MAX_BLOCKS_PER_FILE * BLOCK_TOKENS, 500)
    starts = np.linspace(0, len(tokens) - BLOCK_TOKENS, MAX_BLOCKS_PER_FILE, dtype=np.int64)
    for start in starts:
        tokens[start : start + BLOCK_TOKENS] = 1
    write_pair(tmp_path / "tokens", tokens.reshape(-1, 64))
    settings = {**base, "data_path": tmp_path / "tokens", "split": "100,0,0"}
    output = reject(launcher, settings, code=1, ranks=2)
    assert "[sample-token-outside-vocabulary]" in output
    assert "500" in output
