"""TensorBoard: tags, flags, and event files after a resume."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data
from torch.utils.tensorboard import SummaryWriter

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.loggers.tensorboard_logger import SETTINGS_FILE, TensorBoard
from megatron_ds.training.records import SPLITS, EvalRecord, IntervalRecord, StepRecord, TaskRecord
from tests.unit.training.logger_records import documented, evaluation, interval, step, task_results

MEMORY = {"mem-reserved-bytes": 5, "mem-allocated-bytes": 4, "mem-allocated-count": 3}


Record = StepRecord | IntervalRecord | EvalRecord | TaskRecord


def write(folder: Path, *records: Record, start: int = 0, **flags: object) -> None:
    """A run from iteration `start` that writes these records."""
    config = Config().with_values({"tensorboard_dir": str(folder), **flags})
    state = TrainState(iteration=start, consumed_samples=4 * start, consumed_tokens=32 * start)
    board = TensorBoard(config, state, world_size=4, dp_size=2, memory=lambda: MEMORY)
    for record in records:
        if isinstance(record, StepRecord):
            board.log_steps([record])
        elif isinstance(record, IntervalRecord):
            board.log_interval(record)
        elif isinstance(record, TaskRecord):
            board.log_task(record)
        else:
            board.log_eval(record)
    board.close()


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to (x, y) pairs, of all event files of the folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_the_tags_are_the_documented_ones(tmp_path: Path) -> None:
    flags = [
        item.name
        for item in dataclasses.fields(Config().logging)
        if item.name.startswith("log_") and item.name.endswith("_to_tensorboard")
    ]
    write(
        tmp_path,
        step(1, loss_scale=8.0, curriculum_seqlen=8),
        interval(1, params_norm=3.0),
        *(evaluation(1, split, group, 0.5) for split in SPLITS for group in ("", "GROUP")),
        task_results(1),
        **dict.fromkeys(flags, True),
    )
    expected = {
        tag + suffix
        for tag, axes, _ in documented("TensorBoard")
        for suffix in ("", *(f" vs {axis}" for axis in axes.split()))
    }
    assert set(points(tmp_path)) == expected


def test_points_have_their_counts(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), evaluation(2), log_timers_to_tensorboard=True)
    found = points(tmp_path)
    assert found["lm-loss-training/lm loss"] == [(1, 9.0), (2, 8.0)]
    assert found["lm-loss-training/lm loss vs samples"] == [(4, 9.0), (8, 8.0)]
    assert found["lm-loss-training/lm loss vs tokens"] == [(32, 9.0), (64, 8.0)]
    assert found["steps-vs-samples/y=steps,x=samples"] == [(4, 1.0), (8, 2.0)]
    assert found["steps-vs-tokens/y=tokens,x=steps"] == [(1, 32.0), (2, 64.0)]
    assert found["lm-loss-validation/lm loss validation vs samples"] == [(8, 2.0)]
    assert found["iteration-time/samples per second"] == [(1, 8.0), (2, 8.0)]
    assert found["iteration-time/samples per second per replica"] == [(1, 4.0), (2, 4.0)]
    assert found["iteration-time/tokens per second per replica"] == [(1, 32.0), (2, 32.0)]


@pytest.mark.parametrize(
    ("flag", "prefix"),
    [
        ("log_learning_rate_to_tensorboard", "learning-rate/"),
        ("log_loss_scale_to_tensorboard", "loss-scale/"),
        ("log_batch_size_to_tensorboard", "batch-size/"),
        ("log_world_size_to_tensorboard", "world-size/"),
        ("log_memory_to_tensorboard", "mem-"),
        ("log_timers_to_tensorboard", "iteration-time/"),
    ],
)
def test_flags_select_tags(tmp_path: Path, flag: str, prefix: str) -> None:
    """`test_the_tags_are_the_documented_ones` sets all of them."""
    write(tmp_path, step(1, loss_scale=8.0), interval(1), **{flag: False})
    assert not any(tag.startswith(prefix) for tag in points(tmp_path))


def test_perplexity_needs_its_flag(tmp_path: Path) -> None:
    write(tmp_path, evaluation(1))
    assert not any("ppl" in tag for tag in points(tmp_path))


def test_tensorboard_log_interval_selects_iterations(tmp_path: Path) -> None:
    write(tmp_path, *map(step, range(1, 6)), tensorboard_log_interval=2)
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [2, 4]


def test_the_settings_are_a_table_of_the_last_start(tmp_path: Path) -> None:
    write(tmp_path, step(1), log_interval=7)
    write(tmp_path, step(2), start=1, log_interval=8)
    events = EventAccumulator(str(tmp_path)).Reload()
    content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    values = parse_session_start_info_plugin_data(content).hparams
    assert set(values) == {name for group in Config().to_dict().values() for name in group}
    assert (values["log_interval"].number_value, values["save"].string_value) == (8, "None")


def test_the_first_charts_are_the_losses(tmp_path: Path) -> None:
    write(tmp_path, step(1), evaluation(1), evaluation(1, "test"))
    found = points(tmp_path)
    assert sorted(found)[:2] == ["Loss/training", "Loss/validation"]
    assert (found["Loss/training"], found["Loss/validation"]) == ([(1, 9.0)], [(1, 2.0)])


def test_a_resumed_run_removes_points_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, *map(step, range(1, 6)), evaluation(5))
    write(tmp_path, step(4, lm_loss=1.0), start=3)
    found = points(tmp_path)
    expected = [9.0, 8.0, 7.0, 1.0]
    assert [y for _, y in found["lm-loss-training/lm loss"]] == expected
    assert found["lm-loss-training/lm loss vs samples"] == list(
        zip((4, 8, 12, 16), expected, strict=True)
    )
    assert [x for x, _ in found["steps-vs-tokens/y=steps,x=tokens"]] == [32, 64, 96, 128]
    assert not any("validation" in tag for tag in found)


def test_older_files_are_truncated_if_the_newest_has_no_remaining_steps(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2))
    (path,) = set(tmp_path.iterdir()) - {tmp_path / SETTINGS_FILE}
    # An older name: names contain seconds, and tests are faster.
    path.rename(tmp_path / "events.out.tfevents.1000000001")
    write(tmp_path, step(3), start=2)
    write(tmp_path, start=1)
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [1]


def test_a_clock_that_is_set_back_changes_no_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of a later start has the later name."""
    write(tmp_path, *map(step, range(1, 4)))
    read_clock = time.time
    for start in (3, 4):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: read_clock() - 3600.0)
            write(tmp_path, *map(step, range(start + 1, 7)), start=start)
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [*range(1, 7)]


def test_a_truncated_event_file_is_read_up_to_its_end(tmp_path: Path) -> None:
    write(tmp_path, *map(step, range(1, 4)))
    (path,) = set(tmp_path.iterdir()) - {tmp_path / SETTINGS_FILE}
    path.write_bytes(path.read_bytes()[:-5])
    write(tmp_path, start=2)
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [1, 2]


def test_a_repeated_evaluation_is_written_once(tmp_path: Path) -> None:
    write(tmp_path, step(1), step(2), evaluation(2), evaluation(2), task_results(2))
    for _ in range(2):
        write(tmp_path, evaluation(2), evaluation(2, "test"), task_results(2), start=2)
    found = points(tmp_path)
    assert found["eval-tasks/TASK/METRIC"] == [(2, 0.5)]
    assert found["lm-loss-validation/lm loss validation"] == [(2, 2.0)]
    assert found["lm-loss-validation/lm loss test vs tokens"] == [(64, 2.0)]


def test_a_new_run_archives_older_event_files(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0):
        write(tmp_path, step(1, lm_loss=loss))
    tag = "lm-loss-training/lm loss"
    assert points(tmp_path)[tag] == [(1, 3.0)]
    assert points(tmp_path / "previous-1")[tag] == [(1, 1.0)]
    assert points(tmp_path / "previous-2")[tag] == [(1, 2.0)]


@pytest.mark.parametrize("start", [0, 2])
def test_files_of_other_programs_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], start: int
) -> None:
    """Also while the other program goes on writing to its file."""
    write(tmp_path, *map(step, range(1, 4)))
    with SummaryWriter(str(tmp_path)) as other:
        for number in range(0, 2000, 100):
            other.add_scalar("other/loss", 1.0, number)
        other.flush()
        damaged = tmp_path / "events.out.tfevents.9999999999.damaged"
        damaged.write_bytes(b"no event")
        write(tmp_path, step(start + 1), start=start)
        other.add_scalar("other/loss", 1.0, 2000)
    assert [x for x, _ in points(tmp_path)["other/loss"]] == [*range(0, 2001, 100)]
    assert damaged.read_bytes() == b"no event"
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [*range(1, start + 2)]
    assert (str(tmp_path / "previous-1") in capsys.readouterr().out) == (start == 0)
    moved = [path.name for path in tmp_path.glob("previous-1/*")]
    assert len(moved) == (2 if start == 0 else 0)


def test_further_metrics_have_their_names_as_tags(tmp_path: Path) -> None:
    write(tmp_path, *(step(n, extras={"dropped tokens": n / 2}) for n in (1, 2, 3)))
    write(tmp_path, start=2)
    found = points(tmp_path)
    assert found["dropped tokens"] == [(1, 0.5), (2, 1.0)]
    assert found["dropped tokens vs tokens"] == [(32, 0.5), (64, 1.0)]


def test_warm_up_has_no_throughput(tmp_path: Path) -> None:
    write(tmp_path, step(1, warm_up=True), step(2), log_timers_to_tensorboard=True)
    found = points(tmp_path)
    speeds = [tag for tag in found if tag.startswith("iteration-time/")]
    assert len(speeds) == 8
    assert {x for tag in speeds for x, _ in found[tag]} == {2, 8, 64}
    assert [x for x, _ in found["grad-norm/grad-norm"]] == [1, 2]
