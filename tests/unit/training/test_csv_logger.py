"""--metrics-csv: a table that any program reads, with every step once after crashes and resumes."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers.csv_logger import CsvTable
from megatron_ds.training.loggers.selection import open_loggers
from megatron_ds.training.records import metrics_of
from tests.problems import printed_codes
from tests.unit.training.logger_records import evaluation, step, task_results


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "below" / "metrics.csv"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, strict=True))


def column(path: Path, name: str) -> list[str]:
    return [row[name] for row in read(path)]


def test_rows_have_the_metrics_of_a_step(path: Path) -> None:
    record = step(1, lm_loss=float("nan"), extras={"load, of experts": 0.1 + 0.2})
    CsvTable(path, 0).log_steps([record])
    (row,) = read(path)
    assert list(row) == list(metrics_of(record))
    assert float(row["load, of experts"]) == 0.1 + 0.2
    assert (row["lm_loss"], row["loss_scale"], row["skipped"]) == ("nan", "", "False")


def test_metrics_that_appear_later_get_columns(path: Path) -> None:
    table = CsvTable(path, 0)
    table.log_steps([step(1), step(2)])
    table.log_eval(evaluation(2))
    table.log_eval(evaluation(2, group="wiki"))
    table.log_steps([step(3, extras={"aux": 0.5}), step(4)])
    assert column(path, "iteration") == ["1", "2", "2", "2", "3", "4"]
    assert column(path, "aux") == ["", "", "", "", "0.5", ""]
    assert column(path, "validation_loss") == ["", "", "2.0", "", "", ""]
    assert column(path, "validation_loss/wiki") == ["", "", "", "2.0", "", ""]
    assert column(path, "lm_loss") == ["9.0", "8.0", "", "", "7.0", "6.0"]


def test_a_resumed_run_has_every_step_and_evaluation_once(path: Path) -> None:
    """Claim (logging): so does `--metrics-csv`, whose columns are the metrics"""
    before = CsvTable(path, 0)
    before.log_steps([step(1), step(2)])
    before.log_eval(evaluation(2))
    before.log_task(task_results(2))
    before.log_steps([step(3)])
    before.log_eval(evaluation(3))
    before.close()
    with path.open("a", encoding="utf-8") as file:
        file.write("4,16,128,6")
    resumed = CsvTable(path, 2)
    resumed.log_eval(evaluation(2))
    resumed.log_task(task_results(2))
    resumed.log_steps([step(3, extras={"aux": 1.0})])
    resumed.log_eval(evaluation(3))
    assert column(path, "iteration") == ["1", "2", "2", "2", "3", "3"]
    assert column(path, "TASK/METRIC") == ["", "", "", "0.5", "", ""]
    assert column(path, "aux") == ["", "", "", "", "1.0", ""]
    assert [item.name for item in path.parent.iterdir()] == ["metrics.csv"]


def test_new_runs_keep_older_files_under_numbers(path: Path) -> None:
    for last in (3, 1):
        CsvTable(path, 0).log_steps([step(iteration) for iteration in range(1, last + 1)])
    assert column(path, "iteration") == ["1"]
    assert column(path.with_name("metrics.csv.1"), "iteration") == ["1", "2", "3"]


@pytest.mark.parametrize("content", ["my notes\n", "iteration,lm_loss\n1,2.0\n2\n3,1.0\n"])
def test_a_damaged_file_is_set_aside_and_its_records_are_kept(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    logged: list[str] = []
    CsvTable(path, 5, warn=logged.append).log_steps([step(6)])
    kept = [line[0] for line in content.splitlines()[1:] if "," in line]
    assert column(path, "iteration") == [*kept, "6"]
    assert path.with_name("metrics.csv.1").read_text(encoding="utf-8") == content
    assert printed_codes("\n".join(logged)) == ["metrics-file-damaged"]


def test_short_writes_are_continued(path: Path) -> None:
    class Disk(io.FileIO):
        def write(self, content: Any) -> int:
            return super().write(bytes(content[:3]))

    path.parent.mkdir(exist_ok=True)
    table = CsvTable(path, 0)
    table._file.close()
    table._file = Disk(path, "ab")
    table.log_steps([step(1), step(2)])
    assert column(path, "iteration") == ["1", "2"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_warning() -> None:
    logged: list[str] = []
    config = Config().with_values({"metrics_csv": "/dev/full"})
    (table,) = open_loggers(
        config, TrainState(), save=None, world_size=1, dp_size=1, write=logged.append
    )
    table.log_steps([step(1)])
    table.log_steps([step(2)])
    table.close()
    assert len(logged) == 1
    assert "[logger-disabled]" in logged[0]
    assert "--metrics-csv /dev/full" in logged[0]
