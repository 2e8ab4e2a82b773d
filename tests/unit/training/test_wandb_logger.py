"""Weights & Biases, without its service: what a run writes, and that a resume continues it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers.selection import BestEffortLogger, open_loggers
from tests.problems import codes
from tests.unit.training.logger_records import evaluation, step, task_results

wandb = pytest.importorskip("wandb", reason="needs the extra wandb")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def log(save: Path, iterations: range, *, name: str | None = None) -> None:
    """A run from the iteration before these ones."""
    config = Config().with_values(
        {"wandb_project": "gpt", "wandb_exp_name": name, "metrics_jsonl": str(save / "m.jsonl")}
    )
    state = TrainState(iteration=iterations.start - 1)
    warnings: list[str] = []
    _, logger = open_loggers(
        config, state, save=save, world_size=1, dp_size=1, write=warnings.append
    )
    assert isinstance(logger, BestEffortLogger)
    logger.log_steps([step(number, extras={"aux": 0.5 * number}) for number in iterations])
    logger.log_eval(evaluation(iterations[-1]))
    logger.log_eval(evaluation(iterations[-1], group="wiki"))
    logger.log_task(task_results(iterations[-1]))
    logger.close()
    assert warnings == []


def histories(save: Path, *, starts: int) -> dict[str, list[dict[str, object]]]:
    """The logged values of each of `starts` starts, by the file of its run.

    wandb writes the files in a process of its own, which may end later than `finish`: waits
    until each holds the record of the run's end.
    """
    deadline = time.monotonic() + 60
    while True:
        files = sorted((save / "wandb").rglob("*.wandb"))
        result = {str(path): history(path.read_bytes()) for path in files}
        if len(result) == starts and all(ended for _, ended in result.values()):
            return {path: rows for path, (rows, _) in result.items()}
        assert time.monotonic() < deadline, result
        time.sleep(0.05)


def history(content: bytes) -> tuple[list[dict[str, object]], bool]:
    """The logged values of a file so far, and whether it holds the record of the run's end."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    ended = False
    for data in log_records(content):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        ended = ended or record.HasField("exit")
        items = record.history.item
        names = [each.key or ".".join(each.nested_key) for each in items]
        values = [json.loads(each.value_json) for each in items]
        rows += [dict(zip(names, values, strict=True))] if names else []
    return rows, ended


def log_records(content: bytes) -> Iterator[bytes]:
    """The complete records of LevelDB's log format: parts with checksum, length and type."""
    position = 7
    record = b""  # after the file's own header
    while position + 7 <= len(content):
        length, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        if not kind or position + 7 + length > len(content):
            return  # being written
        record += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # complete, or the last part
            yield record
            record = b""
        if position % 32768 > 32768 - 7:
            position += -position % 32768


def test_a_resumed_run_continues_the_run(tmp_path: Path) -> None:
    """Claim (logging): a resumed run continues its run in Weights & Biases, with the values of
    metrics.jsonl"""
    log(tmp_path, range(1, 4), name="first")
    ((file, rows),) = histories(tmp_path, starts=1).items()
    assert Path(file).parents[1] == tmp_path / "wandb"
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert rows[1]["lm_loss"] == 8.0
    assert (rows[1]["aux"], rows[1]["consumed_tokens"]) == (1.0, 64)
    assert "loss_scale" not in rows[1]  # not known
    assert (rows[2]["validation_loss"], rows[2]["validation_loss/wiki"]) == (2.0, 2.0)
    assert rows[2]["TASK/METRIC"] == 0.5
    identity = Path(file).stem

    log(tmp_path, range(3, 5))  # from a checkpoint before the last step
    continued = [Path(each).stem for each in histories(tmp_path, starts=2)]
    assert set(continued) == {identity}
    log(tmp_path, range(1, 2))  # a new run
    assert len({Path(each).stem for each in histories(tmp_path, starts=3)}) == 2


def test_a_service_that_fails_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (logging): Weights & Biases that cannot be reached costs a warning"""

    def fail(**settings: object) -> None:
        raise wandb.errors.CommError("no such host")

    monkeypatch.setattr(wandb, "init", fail)
    warnings: list[str] = []
    config = Config().with_values({"wandb_project": "gpt"})
    (logger,) = open_loggers(
        config, TrainState(), save=tmp_path / "no", world_size=1, dp_size=1, write=warnings.append
    )[1:]
    logger.log_steps([step(1)])
    logger.close()
    assert len(warnings) == 1
    assert "[logger-disabled]" in warnings[0]
    assert "no such host" in warnings[0]


def test_the_package_is_needed_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = Config().with_values({"wandb_project": "gpt"})
    assert "wandb-missing" in codes(config.logging.problems())


def test_the_project_is_that_of_the_entity(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron_ds.training.loggers.wandb_logger import Wandb

    settings: dict[str, object] = {}
    monkeypatch.setattr(wandb, "init", lambda **values: settings.update(values))
    config = Config().with_values({"wandb_project": "gpt", "wandb_entity": "team"})
    Wandb(config, TrainState(), tmp_path)
    assert (settings["project"], settings["entity"]) == ("gpt", "team")
