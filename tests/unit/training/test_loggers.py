"""Loggers that the flags of a run open."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers import jsonl_path, open_loggers
from megatron_ds.training.records import StepRecord


def config_with(save: Path | None = None, **logging: object) -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, save=save and str(save)),
        logging=dataclasses.replace(config.logging, **logging),  # type: ignore[arg-type]
    )


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
    assert jsonl_path(config_with(save, metrics_jsonl=named)) == expected


def kinds(config: Config) -> list[str]:
    loggers = open_loggers(config, TrainState(), world_size=1, dp_size=1, write=print)
    for logger in loggers:
        logger.close()
    return [type(logger).__name__ for logger in loggers]


# TensorBoard's own thread prints the error as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_deleted_tensorboard_folder_does_not_stop_the_run(
    tmp_path: Path, step: Callable[..., StepRecord]
) -> None:
    logged: list[str] = []
    config = config_with(tensorboard_dir=str(tmp_path / "board"))
    _, board = open_loggers(config, TrainState(), world_size=1, dp_size=1, write=logged.append)
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
    assert kinds(config_with()) == ["Console"]
    assert kinds(config_with(tmp_path)) == ["Console", "JsonLines"]
    board = config_with(tmp_path, tensorboard_dir=str(tmp_path / "board"))
    assert kinds(board) == ["Console", "JsonLines", "BestEffortLogger"]


def test_tensorboard_is_imported_only_if_used() -> None:
    code = (
        "import sys; import megatron_ds.training.loggers as s;"
        "from megatron_ds.config import Config;"
        "from megatron_ds.train_state import TrainState;"
        "s.open_loggers(Config(), TrainState(), world_size=1, dp_size=1, write=print);"
        "sys.exit('tensorboard' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
