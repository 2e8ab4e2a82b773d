"""A ladder of small runs through its command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import ladder as benchmark
from tests.e2e.runs import Launcher, Settings, losses, to_flags
from tests.fork_server import REPOSITORY

TOOL = REPOSITORY / "tools" / "ladder.py"
LARGE: Settings = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "micro_batch_size": 8,
    "global_batch_size": 16,
    "train_iters": 40,
    "eval_iters": 1,
    "use_mup": True,
    "mup_base_hidden_size": 32,
}


def test_a_ladder_trains_what_its_settings_train_alone(
    base: Settings, launcher: Launcher, tmp_path: Path
) -> None:
    """Claim (command-line): runs of a ladder, which follow one another in one process, have the
    losses that their settings give in a process of their own"""
    folder = tmp_path / "ladder"
    words = ["--runs", "3", "--budget", "60%", *to_flags({**base, **LARGE})]
    launcher.start(["plan", str(folder), *words], script=TOOL).succeed()
    output = launcher.start(["run", str(folder)], script=TOOL).succeed()
    assert str(folder / "report.html") in output
    runs = json.loads((folder / "ladder.json").read_text())["runs"]
    assert len(runs) == 3
    for run in runs:
        assert len(losses(folder / run["name"])) == run["steps"]
    last = runs[-1]["name"]
    alone = tmp_path / "alone"
    flags = ["--config", str(folder / f"{last}.yaml"), "--save", str(alone), "--load", str(alone)]
    launcher.start(flags).succeed()
    assert losses(alone) == losses(folder / last)
    assert "report.html" in launcher.start(["run", str(folder)], script=TOOL).succeed()


@pytest.mark.proof
def test_a_real_ladder_predicts_the_next_size(tmp_path: Path) -> None:
    """Claim (command-line): a ladder of four sizes to 4.7M parameters on the demo's text predicts
    the loss of the next size within its interval, and takes at most 1.1 times its training steps"""
    assert benchmark.main(["--folder", str(tmp_path), "--largest", "5M"]) == 0
    seconds = json.loads((tmp_path / "result.json").read_text())["ladder_seconds"]
    steps = benchmark.seconds_of_steps(tmp_path / "ladder")
    assert seconds <= 1.1 * steps
