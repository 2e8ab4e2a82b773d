"""TensorBoard: tags, flags, and event files after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from megatron_ds.config import Config
from megatron_ds.train_state import TrainState
from megatron_ds.training.records import EvalRecord, IntervalRecord, StepRecord
from megatron_ds.training.tensorboard_logger import TensorBoard

Step = Callable[..., StepRecord]
Evaluation = Callable[..., EvalRecord]
MEMORY = {"mem-reserved-bytes": 5, "mem-allocated-bytes": 4, "mem-allocated-count": 3}


def config_for(folder: Path, **flags: object) -> Config:
    config = Config()
    logging = dataclasses.replace(config.logging, tensorboard_dir=str(folder), **flags)  # type: ignore[arg-type]
    return dataclasses.replace(config, logging=logging)


def board(config: Config, iteration: int = 0) -> TensorBoard:
    state = TrainState(
        iteration=iteration, consumed_samples=4 * iteration, consumed_tokens=32 * iteration
    )
    return TensorBoard(config, state, world_size=4, dp_size=2, memory=lambda: MEMORY)


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Tag to (x, y) pairs, of all event files of the folder."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_the_tags_are_the_documented_ones(
    tmp_path: Path,
    step: Step,
    interval: Callable[..., IntervalRecord],
    evaluation: Evaluation,
    documented: Callable[[str], list[list[str]]],
) -> None:
    flags = [
        item.name
        for item in dataclasses.fields(Config().logging)
        if item.name.startswith("log_") and item.name.endswith("_to_tensorboard")
    ]
    logger = board(config_for(tmp_path, **dict.fromkeys(flags, True)))
    logger.log_steps([step(1, loss_scale=8.0, curriculum_seqlen=8)])
    logger.log_interval(interval(1, params_norm=3.0))
    logger.log_eval(evaluation(1, "validation"))
    logger.log_eval(evaluation(1, "test"))
    logger.log_eval(evaluation(1, "validation", "GROUP"))
    logger.log_eval(evaluation(1, "test", "GROUP"))
    logger.close()
    expected = {
        tag + suffix
        for tag, axes, _ in documented("TensorBoard")
        for suffix in ("", *(f" vs {axis}" for axis in axes.split()))
    }
    assert set(points(tmp_path)) == expected


def test_points_have_their_counts(tmp_path: Path, step: Step, evaluation: Evaluation) -> None:
    logger = board(config_for(tmp_path, log_timers_to_tensorboard=True))
    logger.log_steps([step(1), step(2)])
    logger.log_eval(evaluation(2))
    logger.close()
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
    ("flag", "value", "prefix", "expected"),
    [
        ("log_learning_rate_to_tensorboard", False, "learning-rate/", False),
        ("log_learning_rate_to_tensorboard", True, "learning-rate/", True),
        ("log_loss_scale_to_tensorboard", False, "loss-scale/", False),
        ("log_loss_scale_to_tensorboard", True, "loss-scale/", True),
        ("log_batch_size_to_tensorboard", False, "batch-size/", False),
        ("log_world_size_to_tensorboard", False, "world-size/", False),
        ("log_memory_to_tensorboard", False, "mem-", False),
        ("log_timers_to_tensorboard", False, "iteration-time/", False),
    ],
)
def test_flags_select_tags(
    tmp_path: Path,
    step: Step,
    interval: Callable[..., IntervalRecord],
    flag: str,
    value: bool,
    prefix: str,
    expected: bool,
) -> None:
    logger = board(config_for(tmp_path, **{flag: value}))
    logger.log_steps([step(1, loss_scale=8.0)])
    logger.log_interval(interval(1))
    logger.close()
    assert any(tag.startswith(prefix) for tag in points(tmp_path)) == expected


def test_perplexity_needs_its_flag(tmp_path: Path, evaluation: Evaluation) -> None:
    logger = board(config_for(tmp_path))
    logger.log_eval(evaluation(1))
    logger.close()
    assert not any("ppl" in tag for tag in points(tmp_path))


def test_tensorboard_log_interval_selects_iterations(tmp_path: Path, step: Step) -> None:
    logger = board(config_for(tmp_path, tensorboard_log_interval=2))
    logger.log_steps([step(iteration) for iteration in range(1, 6)])
    logger.close()
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [2, 4]


def test_every_setting_is_written_as_text(tmp_path: Path) -> None:
    board(config_for(tmp_path, log_interval=7)).close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = set(events.Tags()["tensors"])
    settings = {name for group in Config().to_dict().values() for name in group}
    assert tags == {f"{name}/text_summary" for name in settings}
    (event,) = events.Tensors("log_interval/text_summary")
    assert event.tensor_proto.string_val == [b"7"]


def test_a_resumed_run_removes_points_after_its_checkpoint(
    tmp_path: Path, step: Step, evaluation: Evaluation
) -> None:
    config = config_for(tmp_path)
    crashed = board(config)
    crashed.log_steps([step(iteration) for iteration in range(1, 6)])
    crashed.log_eval(evaluation(5))
    crashed.close()
    resumed = board(config, iteration=3)
    resumed.log_steps([step(4, lm_loss=1.0)])
    resumed.close()
    found = points(tmp_path)
    expected = [9.0, 8.0, 7.0, 1.0]
    assert [y for _, y in found["lm-loss-training/lm loss"]] == expected
    assert found["lm-loss-training/lm loss vs samples"] == list(
        zip((4, 8, 12, 16), expected, strict=True)
    )
    assert [x for x, _ in found["steps-vs-tokens/y=steps,x=tokens"]] == [32, 64, 96, 128]
    assert not any("validation" in tag for tag in found)


def test_older_files_are_truncated_if_the_newest_has_no_remaining_steps(
    tmp_path: Path, step: Step
) -> None:
    config = config_for(tmp_path)
    first = board(config)
    first.log_steps([step(1), step(2)])
    first.close()
    rename(tmp_path, "events.out.tfevents.1000000001")
    second = board(config, iteration=2)
    second.log_steps([step(3)])
    second.close()
    board(config, iteration=1).close()
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [1]


def test_a_truncated_event_file_is_read_up_to_its_end(tmp_path: Path, step: Step) -> None:
    config = config_for(tmp_path)
    crashed = board(config)
    crashed.log_steps([step(iteration) for iteration in range(1, 4)])
    crashed.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:-5])
    board(config, iteration=2).close()
    assert [x for x, _ in points(tmp_path)["grad-norm/grad-norm"]] == [1, 2]


def test_a_repeated_evaluation_is_written_once(
    tmp_path: Path, step: Step, evaluation: Evaluation
) -> None:
    config = config_for(tmp_path)
    for iteration in (0, 2, 2):
        run = board(config, iteration)
        if iteration == 0:
            run.log_steps([step(1), step(2)])
        run.log_eval(evaluation(2))
        run.log_eval(evaluation(2))
        if iteration == 2:
            run.log_eval(evaluation(2, "test"))
        run.close()
    found = points(tmp_path)
    assert found["lm-loss-validation/lm loss validation"] == [(2, 2.0)]
    assert found["lm-loss-validation/lm loss test vs tokens"] == [(64, 2.0)]


def test_a_new_run_archives_older_event_files(tmp_path: Path, step: Step) -> None:
    config = config_for(tmp_path)
    for loss in (1.0, 2.0, 3.0):
        run = board(config)
        run.log_steps([step(1, lm_loss=loss)])
        run.close()
    tag = "lm-loss-training/lm loss"
    assert points(tmp_path)[tag] == [(1, 3.0)]
    assert points(tmp_path / "previous-1")[tag] == [(1, 1.0)]
    assert points(tmp_path / "previous-2")[tag] == [(1, 2.0)]


def test_further_metrics_have_their_names_as_tags(tmp_path: Path, step: Step) -> None:
    config = config_for(tmp_path)
    crashed = board(config)
    crashed.log_steps([step(n, extras={"dropped tokens": n / 2}) for n in (1, 2, 3)])
    crashed.close()
    board(config, iteration=2).close()
    found = points(tmp_path)
    assert found["dropped tokens"] == [(1, 0.5), (2, 1.0)]
    assert found["dropped tokens vs tokens"] == [(32, 0.5), (64, 1.0)]


def test_warm_up_has_no_throughput(tmp_path: Path, step: Step) -> None:
    logger = board(config_for(tmp_path, log_timers_to_tensorboard=True))
    logger.log_steps([step(1, warm_up=True), step(2)])
    logger.close()
    found = points(tmp_path)
    speeds = [tag for tag in found if tag.startswith("iteration-time/")]
    assert len(speeds) == 8
    assert {x for tag in speeds for x, _ in found[tag]} == {2, 8, 64}
    assert [x for x, _ in found["grad-norm/grad-norm"]] == [1, 2]


def rename(folder: Path, name: str) -> None:
    """Gives the only file an older name: names contain seconds, and tests are faster."""
    (path,) = folder.iterdir()
    path.rename(folder / name)
