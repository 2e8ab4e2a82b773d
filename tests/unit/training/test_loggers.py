"""Loggers that the flags of a run open, and console lines, which scripts grep.

Claim (logging): log lines have the format of the Megatron-DeepSpeed forks, and a short form on a
terminal

Claim (logging): a TensorBoard folder belongs to one run at a time, and its full disk is one warning
"""

from __future__ import annotations

import functools
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.config import Config, ProfilingConfig
from megatron_ds.fileio.file_lock import WaitPolicy
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers import selection as loggers
from megatron_ds.training.loggers.console import (
    Console,
    ShortConsole,
    evaluation_block,
    interval_line,
    is_short,
    short_interval_line,
    time_details,
)
from megatron_ds.training.loggers.selection import (
    jsonl_path,
    open_loggers,
    owned_tensorboard_folder,
)
from megatron_ds.training.records import IntervalRecord, Logger
from tests.problems import raises_problem
from tests.tables import tables
from tests.unit.training.logger_records import documented, evaluation, interval, step, task_results

TABLES = tables(__file__)


def config_with(**logging: object) -> Config:
    return Config().with_values(logging)


@pytest.mark.parametrize(
    ("save", "named", "expected"),
    [
        (None, None, None),
        (Path("s"), None, Path("s/metrics.jsonl")),
        (Path("s"), "elsewhere.jsonl", Path("elsewhere.jsonl")),
        (None, "elsewhere.jsonl", Path("elsewhere.jsonl")),
    ],
)
def test_the_jsonl_file_is_given_or_in_the_save_folder(
    save: Path | None, named: str | None, expected: Path | None
) -> None:
    assert jsonl_path(config_with(metrics_jsonl=named), save) == expected


def opened(config: Config, save: Path | None = None, write: Any = print) -> list[Logger]:
    return open_loggers(config, TrainState(), save=save, world_size=1, dp_size=1, write=write)


def kinds(config: Config, save: Path | None = None) -> list[str]:
    found = opened(config, save)
    for logger in found:
        logger.close()
    return [type(logger).__name__ for logger in found]


@pytest.mark.parametrize("bytes_left", [0, 2000])
def test_a_full_disk_of_tensorboard_is_one_warning(
    bytes_left: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logged: list[str] = []
    config = config_with(tensorboard_dir=str(tmp_path))

    board = opened(config, write=logged.append)[0] if bytes_left else Logger()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_left, limits[1]))
        board = board if bytes_left else opened(config, write=logged.append)[0]
        for number in range(1, 50):
            board.log_steps([step(number)])
        board.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(logged) == 1
    assert "[logger-disabled]" in logged[0]
    assert capfd.readouterr().err == ""


def test_a_tensorboard_folder_belongs_to_one_run(
    tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loggers, "TENSORBOARD_WAIT", WaitPolicy(timeout=0.0))
    config = config_with(tensorboard_dir=str(tmp_path / "board")).logging
    ranks = CollectiveIO()
    for _ in range(2):
        with owned_tensorboard_folder(config, ranks):
            with (
                raises_problem("tensorboard-dir-in-use", "tensorboard_dir"),
                owned_tensorboard_folder(config, ranks),
            ):
                pass
            with owned_tensorboard_folder(config_with().logging, ranks):
                pass


def test_a_deleted_tensorboard_folder_does_not_stop_the_run(tmp_path: Path) -> None:
    logged: list[str] = []
    config = config_with(tensorboard_dir=str(tmp_path / "board"))
    (board,) = opened(config, write=logged.append)
    board.log_steps([step(1)])
    assert logged == []
    shutil.rmtree(tmp_path / "board")
    for number in range(2, 5):
        board.log_steps([step(number)])
    board.close()
    assert len(logged) == 1
    assert "[logger-disabled]" in logged[0]
    assert str(tmp_path / "board") in logged[0]


def test_flags_select_loggers(tmp_path: Path) -> None:
    assert kinds(config_with()) == []
    assert kinds(config_with(), tmp_path) == ["JsonLines"]
    board = config_with(tensorboard_dir=str(tmp_path / "board"))
    assert kinds(board, tmp_path) == ["JsonLines", "BestEffortLogger"]


@pytest.fixture
def full() -> IntervalRecord:
    """An interval with every field."""
    zeros = {"num_zeros_in_grad": 1234567.0}
    last = step(12, loss_scale=65536.0, curriculum_seqlen=64, extras=zeros)
    rates = {"tokens_per_second": 64.0, "seconds_left": 100_000.4}
    return interval(12, last=last, params_norm=77.5, skipped=1, nan=2, **rates)


def test_interval_line_has_the_format_of_megatron(full: IntervalRecord) -> None:
    assert interval_line(full) == (
        " iteration       12/     100 | consumed samples:           48 |"
        " consumed tokens:          384 | elapsed time per iteration (s): 0.50 |"
        " learning rate: 1.000E-03 | global batch size:     4 | lm loss: 5.250000E+00 |"
        " loss scale: 65536.0 | grad norm: 1.500 | num zeros: 1234567.0 | params norm: 77.500 |"
        " curriculum seqlen:    64 |"
        " number of skipped iterations:   1 | number of nan iterations:   2 |"
        " samples per second: 8.000 | tokens per gpu per second (tgs): 32.000 | TFLOPs: 0.25 |"
        " time left: 1 day, 3:46:40 |"
    )


def test_unknown_fields_are_left_out() -> None:
    unknown = dict.fromkeys(
        ("lm_loss", "samples_per_second", "tokens_per_second_per_device", "tflops")
    )
    line = interval_line(interval(1, last=step(1, grad_norm=None), **unknown))
    known = ("lm loss", "loss scale", "grad norm", "params norm", "per second", "(tgs)", "TFLOPs")
    for field in (*known, "seqlen"):
        assert field not in line


def test_the_short_form_shows_what_a_person_follows(full: IntervalRecord) -> None:
    assert short_interval_line(interval(5, seconds_left=47.0, tokens_per_second=64_000.0)) == (
        " iteration    5/100 | loss  5.2500 | rate 1.00e-03 | grad norm 1.500 | 64,000 tokens/s"
        " | 0:00:47 left"
    )
    assert "| params norm 77.500 | 1 skipped | 2 nan | 64 tokens/s |" in short_interval_line(full)
    unknown = interval(1, last=step(1, grad_norm=None), lm_loss=None, skipped=1)
    assert short_interval_line(unknown) == (
        " iteration    1/100 | loss       - | rate 1.00e-03 | 1 skipped"
    )


def test_the_short_form_has_each_evaluation_once_below_the_losses() -> None:
    lines: list[str] = []
    console = ShortConsole(lines.append, total_iterations=100)
    console.log_interval(interval(7))
    for group in ("", "", "GROUP"):
        console.log_eval(evaluation(7, group=group))
    console.log_eval(evaluation(7, "test", bits=0.75))
    console.log_task(task_results(7))
    assert lines[1:] == TABLES["the_short_form_has_each_evaluation_once_below_the_losses"]
    assert len({line.index("| ") for line in lines}) == 1


@pytest.mark.parametrize(
    ("form", "terminal", "short"), TABLES["the_short_form_is_the_default_on_a_terminal"]
)
def test_the_short_form_is_the_default_on_a_terminal(
    form: str, terminal: bool, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert is_short(config_with(log_format=form)) is short


def test_zeros_and_a_nonfinite_loss_are_shown() -> None:
    line = interval_line(interval(1, last=step(1, grad_norm=0.0), lm_loss=0.0, params_norm=0.0))
    for field in ("lm loss: 0.0", "grad norm: 0.0", "params norm: 0.0"):
        assert field in line
    assert "| lm loss: NAN |" in interval_line(interval(1, lm_loss=float("nan")))


def test_further_metrics_are_shown_under_their_names() -> None:
    line = interval_line(
        interval(
            1,
            params_norm=1.0,
            extras={"aux loss": 0.25, "load/0": 1.0, "z-loss": 2.0, "num_zeros_in_grad": 5.0},
        )
    )
    assert " params norm: 1.000 | aux loss: 2.500000E-01 | z-loss: 2.000000E+00 | number" in line


def test_the_document_lists_the_fields_in_order(full: IntervalRecord) -> None:
    fields = interval_line(full).strip(" |").split(" | ")
    names = [field.split(":")[0] if ":" in field else field.split()[0] for field in fields]
    assert names == [row[0] for row in documented("The training line")]


@pytest.mark.parametrize(("option", "lines"), TABLES["times"])
def test_times_have_the_format_of_megatron(option: str, lines: list[str]) -> None:
    printed: list[str] = []
    record = interval(1, times={"optimizer": [3.0, 5.25]})
    options = ProfilingConfig(timing_log_level=1, timing_log_option=option)
    details = functools.partial(time_details, options, ["a", "a"])
    Console(printed.append, details).log_interval(record)
    ShortConsole(printed.append, 10, details).log_interval(record)
    assert printed[1::2] == ["\n".join(lines)] * 2
    assert len(printed) == 4


def test_evaluation_block_has_the_format_of_megatron() -> None:
    """The name of a dataset replaces the split, which is always called validation."""
    results = " loss at iteration 7 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    for split in ("validation", "test"):
        for group, shown in (("", " validation"), ("VALID 1", "VALID 1")):
            first, text, last = evaluation_block(evaluation(7, split, group)).split("\n")
            assert text == f"{shown}{results}"
            assert first == last == "-" * (len(text) + 1)


def test_the_console_writes_intervals_and_evaluations() -> None:
    lines: list[str] = []
    console = Console(lines.append)
    console.log_steps([interval(1).last])
    console.log_interval(interval(1))
    console.log_eval(evaluation(1))
    console.log_task(task_results(1))
    assert lines == [
        interval_line(interval(1)),
        evaluation_block(evaluation(1)),
        " TASK at iteration 1 | METRIC: 5.000000E-01 |",
    ]
