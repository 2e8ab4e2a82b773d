"""How a run ends, evaluates and reports, and its errors for bad input."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ds.data.indexed_writer import pair_writer
from megatron_ds.data.validation import BLOCK_TOKENS, MAX_BLOCKS_PER_FILE
from tests.e2e.runs import (
    Launcher,
    Settings,
    evaluations,
    losses,
    records,
    steps,
)

ENDLESS = 100_000
"""Iterations of a run that something else must end."""


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("global_step*"))


# Exit conditions.


def test_exit_interval_saves_and_exits(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    settings = {**base, "train_iters": 10, "exit_interval": 4, "save": tmp_path}
    output = launcher.start(settings).succeed()
    assert output.endswith("\nexiting program at iteration 4\n")
    assert saved(tmp_path) == ["global_step4"]
    assert len(losses(tmp_path)) == 4
    assert "the end of training" not in output


def test_a_run_with_exit_interval_equals_an_uninterrupted_one(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Exits and resumes until the end, with exits inside log intervals."""
    settings = {**base, "train_iters": 6, "eval_iters": 1, "eval_interval": 5, "log_interval": 4}
    full, parts = tmp_path / "full", tmp_path / "parts"
    launcher.start({**settings, "save": full}).succeed()
    for _ in range(2):
        launcher.start({**settings, "exit_interval": 3, "save": parts, "load": parts}).succeed()
    launcher.start({**settings, "save": parts, "load": parts}).succeed()
    assert steps(parts) == steps(full)
    assert evaluations(parts) == evaluations(full)


def test_the_kill_switch_stops_the_run(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    run, switch = tmp_path / "run", tmp_path / "switch"
    settings = {**base, "train_iters": ENDLESS, "kill_switch_path": switch, "save": run}
    started = launcher.start(settings, ranks=2)
    started.wait_until(lambda: (run / "metrics.jsonl").exists() and len(losses_so_far(run)) >= 2)
    switch.touch()
    output = started.succeed()
    last = len(losses(run))
    assert f"Detected kill switch at {switch}. Exiting, iteration={last}" in output
    assert saved(run) == [f"global_step{last}"]


def losses_so_far(run: Path) -> list[str]:
    """Complete lines of a file that is being written."""
    return [line for line in (run / "metrics.jsonl").read_text().splitlines(True) if "\n" in line]


def test_exit_duration_stops_the_run(launcher: Launcher, base: Settings, tmp_path: Path) -> None:
    settings = {**base, "train_iters": ENDLESS, "exit_duration_in_mins": 0.001, "save": tmp_path}
    output = launcher.start(settings, ranks=2).succeed()
    assert "exiting program after 0.001 minutes" in output
    assert saved(tmp_path) == [f"global_step{len(losses(tmp_path))}"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_stops_all_with_a_save(
    rank: int, launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": ENDLESS, "save": tmp_path}
    run = launcher.start(settings, ranks=2)
    run.wait_until(lambda: (tmp_path / "metrics.jsonl").exists() and losses_so_far(tmp_path) != [])
    os.kill(run.pids[rank], signal.SIGTERM)
    result = run.wait()
    assert set(result.codes) == {143}
    assert "exiting program after receiving SIGTERM." in result.output
    last = len(losses(tmp_path))
    assert saved(tmp_path) == [f"global_step{last}"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)


# Evaluations and logs.


def test_skip_train_only_evaluates_the_checkpoint(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": 2, "eval_iters": 2, "save": tmp_path, "load": tmp_path}
    launcher.start(settings).succeed()
    before = (steps(tmp_path), evaluations(tmp_path), saved(tmp_path))
    output = launcher.start({**settings, "train_iters": 9, "skip_train": True}).succeed()
    (loss,) = (record["validation_loss"] for record in before[1] if "validation_loss" in record)
    assert f"val data | lm loss value: {loss:.6E} |" in output
    assert (steps(tmp_path), evaluations(tmp_path), saved(tmp_path)) == before


def test_evaluations_run_at_their_interval_and_at_the_end(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "train_iters": 5, "eval_interval": 2, "eval_iters": 2, "save": tmp_path}
    output = launcher.start(settings, ranks=2).succeed()
    found = evaluations(tmp_path)
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


def test_evaluation_does_not_change_the_training(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    settings = {**base, "train_iters": 4}
    launcher.start({**settings, "eval_interval": 1, "eval_iters": 1, "save": with_it}).succeed()
    launcher.start({**settings, "save": without}).succeed()
    assert steps(with_it) == steps(without)


def test_logs_have_each_record_and_point_once_after_a_crash(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The run is killed in iteration 4, two steps after the checkpoint that it resumes from."""
    run, board = tmp_path / "run", tmp_path / "board"
    settings = {
        **base,
        "train_iters": 5,
        "save_interval": 2,
        "eval_interval": 3,
        "eval_iters": 1,
        "tensorboard_dir": board,
        "save": run,
        "load": run,
    }
    killed = launcher.start(
        {**settings, "global_batch_size": 8},
        ranks=2,
        fault="micro-batch:28:kill-all",
    )
    assert set(killed.wait().codes) == {-9}
    assert [record["iteration"] for record in steps(run)] == [1, 2, 3]
    launcher.start({**settings, "global_batch_size": 8}, ranks=2).succeed()

    assert [(record["iteration"], "lm_loss" in record) for record in records(run)] == [
        *((1, True), (2, True), (3, True), (3, False), (4, True)),
        *((5, True), (5, False), (5, False)),
    ]
    events = EventAccumulator(str(board)).Reload()
    points = events.Scalars("lm-loss-training/lm loss")
    assert [point.step for point in points] == [1, 2, 3, 4, 5]
    assert [point.value for point in points] == pytest.approx(losses(run), rel=1e-6)
    assert [p.step for p in events.Scalars("lm-loss-training/lm loss vs samples")] == [
        *(8, 16, 24, 32, 40),
    ]
    for tag in (
        "learning-rate/learning-rate",
        "grad-norm/grad-norm",
        "steps-vs-samples/y=steps,x=samples",
        "lm-loss-validation/lm loss validation",
        "lm-loss-validation/lm loss test",
    ):
        assert tag in events.Tags()["scalars"]
    points = events.Scalars("lm-loss-validation/lm loss validation")
    assert [point.step for point in points] == [3, 5]


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


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.write_bytes(b"no index at all"), "not-a-token-index"),
        (lambda path: path.write_bytes(path.read_bytes()[:-9]), "token-index-size-mismatch"),
        (
            lambda path: path.with_suffix(".bin").write_bytes(b"12345678"),
            "token-file-size-mismatch",
        ),
    ],
    ids=["index", "truncated", "pair"],
)
def test_damaged_data_is_rejected(
    damage: object,
    code: str,
    launcher: Launcher,
    base: Settings,
    corpus: Path,
    tmp_path: Path,
) -> None:
    prefix = tmp_path / "tokens"
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", f"{prefix}{suffix}")
    assert callable(damage)
    damage(tmp_path / "tokens.idx")
    output = reject(launcher, {**base, "data_path": prefix}, code=2, ranks=2)
    assert output.count(f"[{code}]") == 1, output
    assert str(prefix) in output


def test_data_of_another_tokenizer_is_rejected(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Ids beyond the vocabulary are only where the check before the start does not sample."""
    tokens = np.full(3 * MAX_BLOCKS_PER_FILE * BLOCK_TOKENS, 500)
    starts = np.linspace(0, len(tokens) - BLOCK_TOKENS, MAX_BLOCKS_PER_FILE, dtype=np.int64)
    for start in starts:
        tokens[start : start + BLOCK_TOKENS] = 1
    with pair_writer(tmp_path / "tokens", np.uint16) as writer:
        writer.add_documents(tokens, np.full(len(tokens) // 64, 64))
    settings = {**base, "data_path": tmp_path / "tokens", "split": "100,0,0"}
    output = reject(launcher, settings, code=1, ranks=2)
    assert "[sample-token-outside-vocabulary]" in output
    assert "500" in output


def test_too_little_data_for_a_split_is_rejected(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    with pair_writer(tmp_path / "tokens", np.uint16) as writer:
        writer.add_document(np.arange(100))
    settings = {**base, "data_path": tmp_path / "tokens", "eval_iters": 1}
    output = reject(launcher, settings, code=2)
    assert "--split" in output
    assert str(tmp_path / "tokens") in output


def test_paths_of_the_wrong_kind_are_rejected(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    settings = {
        **base,
        "save": file / "run",
        "load": file,
        "tensorboard_dir": file,
        "metrics_jsonl": tmp_path,
    }
    output = reject(launcher, settings, code=2, ranks=2)
    for value in (
        f"--save {file / 'run'}: {file}",
        f"--tensorboard-dir {file}: {file}",
        "[load-is-a-file]",
        "[not-a-file]",
    ):
        assert output.count(value) == 1, f"{value!r} in\n{output}"
    output = reject(launcher, {**base, "load": tmp_path / "global_step4"}, code=2)
    assert "[load-is-one-checkpoint]" in output
    assert str(tmp_path) in output


def test_a_foreign_metrics_file_is_rejected(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    launcher.start({**base, "train_iters": 1, "save": run}).succeed()
    (run / "metrics.jsonl").write_text("a poem\nof two lines\n")
    output = reject(launcher, {**base, "save": run, "load": run}, code=1, ranks=1)
    assert "[metrics-jsonl-foreign]" in output
    assert "metrics.jsonl, line 1" in output
