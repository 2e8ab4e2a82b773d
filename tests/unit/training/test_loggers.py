"""Which sinks a run's flags open."""

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
from megatron_ds.training.loggers import jsonl_path, open_sinks
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
def test_the_jsonl_file_is_named_or_lies_beside_the_checkpoints(
    save: Path | None, named: str | None, expected: Path | None
) -> None:
    assert jsonl_path(config_with(save, metrics_jsonl=named)) == expected


def kinds(config: Config) -> list[str]:
    sinks = open_sinks(config, TrainState(), world_size=1, dp_size=1, write=print)
    for sink in sinks:
        sink.close()
    return [type(sink).__name__ for sink in sinks]


# TensorBoard's own thread prints the error as well.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_tensorboard_folder_that_is_deleted_ends_no_run(
    tmp_path: Path, step: Callable[..., StepRecord]
) -> None:
    said: list[str] = []
    config = config_with(tensorboard_dir=str(tmp_path / "board"))
    _, board = open_sinks(config, TrainState(), world_size=1, dp_size=1, write=said.append)
    board.log_steps([step(1)])
    assert said == []
    shutil.rmtree(tmp_path / "board")
    for number in range(2, 5):
        board.log_steps([step(number)])
    board.close()
    assert len(said) == 1
    assert f"WARNING: --tensorboard-dir {tmp_path / 'board'} takes no more records" in said[0]


def test_flags_open_sinks(tmp_path: Path) -> None:
    assert kinds(config_with()) == ["Console"]
    assert kinds(config_with(tmp_path)) == ["Console", "JsonLines"]
    board = config_with(tmp_path, tensorboard_dir=str(tmp_path / "board"))
    assert kinds(board) == ["Console", "JsonLines", "BestEffortLogger"]


def test_tensorboard_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys; import megatron_ds.training.loggers as s;"
        "from megatron_ds.config import Config;"
        "from megatron_ds.train_state import TrainState;"
        "s.open_sinks(Config(), TrainState(), world_size=1, dp_size=1, write=print);"
        "sys.exit('tensorboard' in sys.modules)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
