"""Logs of a run that is killed and resumed contain every step once."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ds.reports import report, watch
from tests.e2e.runs import Launcher, Settings, losses, records, steps

LAST = 8
"""The last iteration."""
SAVED = 3
"""Iteration of the checkpoint."""
KILL_POSITION = 20
"""Sample of the kill. Batches have 4, so it is in iteration 6, three after the checkpoint."""
TAG = "lm-loss-training/lm loss"


def events_of(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()


def points(folder: Path) -> dict[str, list[int]]:
    """The x values of each tag, in order."""
    events = events_of(folder)
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def events_in(save: Path) -> list[dict[str, Any]]:
    lines = (save / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check_events(save: Path, output: str) -> None:
    """The killed run has no end; the resumed one has every event of its log."""
    found = events_in(save)
    assert [(each["event"], each["iteration"]) for each in found if each["event"] != "warning"] == [
        ("start", 0),
        ("about", 0),
        ("start-up", 1),
        ("memory", 1),
        ("checkpoint", SAVED),
        ("start", SAVED),
        ("about", SAVED),
        ("start-up", SAVED + 1),
        ("memory", SAVED + 1),
        ("checkpoint", 2 * SAVED),
        ("checkpoint", LAST),
        ("memory", LAST),
        ("end", LAST),
    ]
    start = next(each for each in found if each["event"] == "start")
    assert (start["ranks"], start["total_iterations"]) == (2, LAST)
    assert start["config"]["schedule"]["train_iters"] == LAST
    assert found[-1]["status"] == 0
    saves = [each for each in found if each["event"] == "checkpoint"]
    assert all(0 < each["waited"] <= each["seconds"] for each in saves)
    _, loading = (each["seconds"] for each in found if each["event"] == "start-up")
    assert loading["checkpoint"] > 0
    resumed = found[[each["iteration"] for each in found].index(SAVED, 3) :]
    warnings = [each["text"] for each in resumed if each["event"] == "warning"]
    assert set(warnings) <= set(re.findall(r"WARNING: (.*)", output))


def check_reports(save: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tools that read the files of a run."""
    assert report.main([str(save), "--output", str(folder / "report.html")]) == 0
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "resumed on 2 ranks</td>" in page
    assert f"{losses(save)[0]:.4g}" in page
    assert watch.main([str(save)]) == 0
    assert f"iteration {LAST} of {LAST} (100%)" in capsys.readouterr().out


def test_a_killed_and_resumed_run_logs_every_step_once(
    launcher: Launcher, base: Settings, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim (logging): `events.jsonl` has the starts, checkpoints, warnings and end of a run that
    was killed and resumed, and the page and the live view show them

    Claim (logging): after a kill and resume, no step appears twice in the logs or in TensorBoard
    """
    save = tmp_path / "run"
    board = tmp_path / "board"
    settings = {**base, "train_iters": LAST, "save_interval": SAVED, "save": save, "load": save}
    settings |= {"tensorboard_dir": board, "log_timers_to_tensorboard": True}
    settings |= {"eval_interval": 2, "eval_iters": 1}
    killed = launcher.start(settings, ranks=2, fault=f"micro-batch:{KILL_POSITION}:kill-all")
    assert set(killed.wait().codes) == {-9}
    assert [step["iteration"] for step in steps(save)] == [1, 2, 3, 4, 5]
    assert points(board)[TAG] == [1, 2, 3, 4, 5]
    for path in (save / "metrics.jsonl", *board.glob("events*")):
        with path.open("ab") as file:
            file.write(b'{"iteration": 6, "consumed_sam')  # an interrupted write

    resumed = launcher.start(settings, ranks=2)
    output = resumed.succeed()

    # One rank prints the log, so its lines keep their order.
    evaluation, save_line = (
        resumed.stdout.index(f"{event} at iteration {LAST - 2:{width}d} ")
        for event, width in (("validation loss", 0), ("saving checkpoint", 7))
    )
    assert evaluation < save_line
    all_steps = list(range(1, LAST + 1))
    assert [step["iteration"] for step in steps(save)] == all_steps
    assert [step["consumed_samples"] for step in steps(save)] == [4 * n for n in all_steps]
    assert [step["consumed_tokens"] for step in steps(save)] == [128 * n for n in all_steps]
    lines = [json.dumps(record, sort_keys=True) for record in records(save)]
    assert Counter(lines).most_common(1)[0][1] == 1
    evaluated = [record["iteration"] for record in records(save) if "validation_loss" in record]
    assert evaluated == [2, 4, 6, 8]
    values = [event.value for event in events_of(board).Scalars(TAG)]
    assert values == pytest.approx(losses(save), rel=1e-6)
    found = points(board)
    for tag in ("learning-rate/learning-rate", "grad-norm/grad-norm"):
        assert found[tag] == all_steps
    assert found["steps-vs-samples/y=steps,x=samples"] == [4 * n for n in all_steps]
    assert found["lm-loss-validation/lm loss validation"] == evaluated
    assert found["lm-loss-validation/lm loss test"] == [LAST]
    assert found[TAG] == all_steps
    assert found[f"{TAG} vs samples"] == [4 * n for n in all_steps]
    assert found[f"{TAG} vs tokens"] == [128 * n for n in all_steps]
    # The first step of each process is a warm-up, and iteration 4 is the resumed one's.
    assert found["iteration-time/iteration-time"] == [2, 3, 5, 6, 7, 8]
    for tag, steps_of_tag in found.items():
        assert len(set(steps_of_tag)) == len(steps_of_tag), tag
    assert f"consumed tokens: {128 * LAST:12d} |" in output
    check_events(save, output)
    check_reports(save, tmp_path, capsys)

    # Rolled back, the run leaves checkpoints 6 and 8 behind, and a plain load continues the branch.
    launcher.start({**settings, "train_iters": 5, "ckpt_step": 3}, ranks=2).succeed()
    output = launcher.start({**settings, "train_iters": 7}, ranks=2).succeed()
    assert f"loading checkpoint from {save} at iteration 5\n" in output
    assert [step["iteration"] for step in steps(save)] == all_steps[:7]
    assert points(board)[TAG] == all_steps[:7]


def test_a_run_killed_before_its_first_save_starts_over_and_keeps_old_logs(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    save = tmp_path / "run"
    board = tmp_path / "board"
    settings = {**base, "train_iters": 3, "global_batch_size": 2}
    settings |= {"save": save, "load": save, "tensorboard_dir": board}
    killed = launcher.start(settings, fault="micro-batch:4:kill-all")
    assert killed.wait().codes == (-9,)
    output = launcher.start(settings).succeed()

    assert [step["iteration"] for step in steps(save)] == [1, 2, 3]
    old = (save / "metrics.jsonl.1").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in old] == [1, 2]
    assert (save / "events.jsonl.1").is_file()
    assert [each["event"] for each in events_in(save)].count("start") == 1
    assert points(board)[TAG] == [1, 2, 3]
    assert points(board / "previous-1")[TAG] == [1, 2]
    assert "\x1b" not in output
    lines = output.splitlines()
    (start,) = (line for line in lines if line.startswith("start-up (s) | interpreter: "))
    assert "| model and engine: " in start
    assert "| first iteration: " in start
    memory = [line for line in lines if line.startswith("[Rank 0] (after ")]
    assert len(memory) == 2  # after the first interval, and at the end
    assert all(" | estimated peak: " in line and " | states: " in line for line in memory)
    banner = lines[lines.index("-" * 100) :]
    assert banner[1].startswith("run ")
    assert banner.index("-" * 100, 1) < 40
