"""Timings, norms, a CSV table and a profile change nothing in the training, and are resumed."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Launcher, Record, Settings, records, steps

LAST = 4
EXIT = 2
MEASURED = ("time/", "layer_", "num_zeros_in_grad")
"""Beginnings of the metrics that the flags add."""


def without_measured(save: Path) -> list[Record]:
    return [
        {name: value for name, value in step.items() if not name.startswith(MEASURED)}
        for step in steps(save)
    ]


def regions(trace: Path) -> Counter[str]:
    """Names of the regions in a trace, numbers of iterations left out."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    names = (event["name"] for event in events if event.get("cat") == "user_annotation")
    return Counter(re.sub(r"iteration \d+", "iteration", name) for name in names)


@pytest.fixture(scope="module")
def settings(base: Settings) -> Settings:
    parallel = {"tensor_model_parallel_size": 2, "zero_stage": 1}
    return {**base, **parallel, "train_iters": LAST, "global_batch_size": 4, "eval_interval": LAST}


def test_what_is_measured_changes_nothing(
    launcher: Launcher, settings: Settings, tmp_path: Path
) -> None:
    """Claim (logging): a profile, times, norms and step records change no bit of the losses, and
    a resumed run continues them

    Claim (logging): so does `--metrics-csv`, whose columns are the metrics

    Claim (logging): `--log-straggler` names the ranks and hosts that wait least for the others
    """
    plain = tmp_path / "plain"
    save = tmp_path / "run"
    table = tmp_path / "metrics.csv"
    launcher.start({**settings, "save": plain}, ranks=2).succeed()
    measured = {
        **settings,
        "save": save,
        "load": save,
        "metrics_csv": table,
        "eval_iters": 1,
        "profile": True,
        "profile_step_start": 1,
        "profile_step_end": 3,
        "profile_ranks": (1,),
        "log_num_zeros_in_grad": True,
        "log_layer_norms_interval": 2,
        "record_every": 2,
        "timing_log_level": 2,
    }
    first = launcher.start({**measured, "exit_interval": EXIT}, ranks=2).succeed()
    measured |= {"timing_log_option": "all", "log_straggler": True}
    second = launcher.start(measured, ranks=2).succeed()
    assert without_measured(save) == without_measured(plain)

    # The exit ends the profile before its last step, and the resumed run takes the rest.
    files = {path.name.partition(".")[0] for path in (save / "profile").iterdir()}
    assert files == {"rank1-iteration2", "rank1-iteration3"}
    for iteration in (2, 3):
        path = save / "profile" / f"rank1-iteration{iteration}"
        found = regions(path.with_suffix(".trace.json"))
        assert found["iteration"] == 1
        assert found["forward-compute"] == found["backward-compute"] == 2
        assert found["optimizer"] == 2  # without a step after the first micro-batch
        for name in ("embedding", "layer 0", "layer 1", "final norm", "head"):
            assert found[name] == found[f"{name} backward"] == 2, name
        assert found["MLP"] == found["MLP backward"] == found["attention backward"] == 4
        assert found["all_reduce[tp]"] > 8
        assert found["batch-generator"] == 2
        assert "all_reduce[tp]" in path.with_suffix(".summary.txt").read_text()
    assert "Self CPU %" in first
    assert "Self CPU %" in second

    assert "(min, max) time across ranks (ms):\n    step ...." in first
    for name in ("forward-compute", "backward-compute", "optimizer", "all_reduce[tp]"):
        assert re.search(
            rf"  {re.escape(name)}:\n     rank  0 \.+: \d+\.\d\d\n     rank  1 ", second
        )
    spread = r" \| min: \S+ \| median: \S+ \| max: \S+ \| slowest: rank [01] on \S+ "
    assert (
        len(re.findall(rf"\n step without communication \(ms\) \| ranks: 2{spread}", second)) == 2
    )
    for step in (record for record in records(save) if "lm_loss" in record):
        # Each the maximum of the ranks, which a rank that waits makes another one's: no sums.
        parts = ("forward-compute", "backward-compute", "optimizer", "communication")
        assert all(0 < step[f"time/{part}"] < step["time/step"] for part in parts)
        assert 0 < step["time/all_reduce[tp]"] <= step["time/communication"]
        assert (step["iteration"] % 2 == 0) == ("layer_grad_norm/0" in step)
        assert step["num_zeros_in_grad"] > 0
    assert " | num zeros: " in second

    with table.open(newline="") as file:
        rows_of_table = list(csv.DictReader(file))
    logged = [row for row in rows_of_table if row["lm_loss"]]
    assert [int(row["iteration"]) for row in logged] == [1, 2, 3, 4]
    assert [float(row["lm_loss"]) for row in logged] == [step["lm_loss"] for step in steps(save)]
    assert [row["iteration"] for row in rows_of_table if row["validation_loss"]] == [str(LAST)]
