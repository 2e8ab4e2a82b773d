"""The programs of examples/extend/: runs with parts of their own, through the public names."""

from __future__ import annotations

import csv
from pathlib import Path

from tests.e2e.runs import REPOSITORY, Launcher, Settings, evaluations, losses

EXAMPLES = REPOSITORY / "examples" / "extend"
OWN = """
from megatron_ds.extend import Extensions, Logger, pretrain
pretrain(Extensions(loggers=[Logger]))
"""


def test_examples_are_short() -> None:
    assert all(len(path.read_text().splitlines()) <= 40 for path in EXAMPLES.glob("*.py"))


def test_a_logger_writes_each_step_once_after_a_resume(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "global_batch_size": 4, "save": tmp_path, "train_iters": 4}
    script = EXAMPLES / "logger.py"
    launcher.start({**settings, "save_interval": 2, "exit_interval": 3}, script=script).succeed()
    launcher.start({**settings, "load": tmp_path}, script=script, ranks=2).succeed()
    with (tmp_path / "steps.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["iteration"]) for row in rows] == [1, 2, 3, 4]
    assert [float(row["lm_loss"]) for row in rows] == losses(tmp_path)


def test_a_callback_is_called_on_every_rank(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {**base, "global_batch_size": 4, "save": tmp_path, "train_iters": 3}
    settings |= {"eval_interval": 1, "eval_iters": 1}
    launcher.start(settings, script=EXAMPLES / "callback.py", ranks=2).succeed()
    known = [(one["validation_loss"], one["iteration"]) for one in evaluations(tmp_path)[:3]]
    loss, iteration = min(known)
    assert (tmp_path / "best.txt").read_text() == f"{iteration} {loss}\n"


def test_a_part_that_does_not_fit_is_a_problem_before_the_start(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    script = tmp_path / "own.py"
    script.write_text(OWN)
    result = launcher.start({**base, "save": tmp_path / "run", "lr": -1}, script=script).wait()
    assert result.codes == (2,)
    assert "[extension-with-other-arguments]" in result.output
    assert "--lr -1.0" in result.output
    assert not (tmp_path / "run").exists()
