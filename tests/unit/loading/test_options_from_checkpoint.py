"""Options that come from a checkpoint of this program: its folder, the model, the schedule."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.checkpoint.location import Location
from megatron_ds.checkpoint.metadata import REPLACED
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TokenizerConfig,
)
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.loading.plan import make_plan
from megatron_ds.train_state import TrainState
from megatron_ds.training.run import complete_settings
from tests.problems import codes, fields
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables
from tests.unit.checkpoint.fakes import Managers, run_of, save
from tests.unit.conversion.models import SMALL, random_source

TABLES = tables(__file__)


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "weights")
    return tmp_path / "weights"


def test_pretrained_weights_are_loaded_until_there_is_a_checkpoint(
    tmp_path: Path, pretrained: Path, checkpoints: Any, folder: Path
) -> None:
    for load in (None, tmp_path / "missing", tmp_path):
        run = run_of(load, pretrained_checkpoint=f"native:{pretrained}")
        config, plan, problems = make_plan(run)
        assert problems == []
        assert plan.folders.load == Location(pretrained)
        assert config.checkpoint.finetune
        assert config.checkpoint.exit_on_missing_checkpoint
        assert config.model.num_layers == SMALL["num_layers"]
    save(checkpoints, 3)
    config, _, _ = make_plan(run_of(folder, pretrained_checkpoint=str(pretrained)))
    assert config.checkpoint == CheckpointConfig(
        load=str(folder), pretrained_checkpoint=str(pretrained)
    )


def interrupt_replacement(folder: Path) -> None:
    (folder / "global_step3").rename(folder / f"{REPLACED}global_step3")
    (folder / "latest").unlink()
    (folder / "latest_checkpointed_iteration.txt").unlink()


@pytest.mark.parametrize(
    "change",
    [
        interrupt_replacement,
        lambda folder: shutil.rmtree(folder / "global_step3"),  # the pointers remain
        lambda folder: (folder / "global_step3" / "run.json").write_text("{"),
    ],
    ids=["interrupted replacement", "no checkpoint", "damaged settings"],
)
def test_a_lost_or_damaged_checkpoint_is_not_replaced_by_pretrained_weights(
    change: Callable[[Path], object], pretrained: Path, checkpoints: Any, folder: Path
) -> None:
    save(checkpoints, 3)
    change(folder)
    config, _, _ = make_plan(run_of(folder, pretrained_checkpoint=str(pretrained)))
    assert config.checkpoint.load == str(folder)
    assert not config.checkpoint.finetune


def test_the_model_of_the_checkpoint_replaces_given_options_on_request(
    checkpoints: Any, folder: Path
) -> None:
    save(checkpoints, 3)
    given = {"num_layers": 7, "hidden_size": 8, "seq_length": 9, "hidden_dropout": 0.4}
    warnings: list[Problem] = []
    config, _, problems = make_plan(
        run_of(folder, use_checkpoint_args=True, **given), warn=warnings.append
    )
    assert problems == []
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 8, 2)
    assert (model.seq_length, model.hidden_dropout) == (9, 0.4)
    assert fields(warnings) == [("num_layers", "use_checkpoint_args")]
    assert "num_layers" not in config.given
    kept, _, _ = make_plan(run_of(folder, **given), warn=warnings.append)
    assert kept.model == ModelConfig(**given)


@pytest.mark.parametrize("override", [False, True])
def test_a_given_rope_is_kept_only_by_its_flag(
    override: bool, manager: Managers, config: Config, folder: Path
) -> None:
    rope = {"position_embedding_type": "rope", "rotary_base_per_layer": (50.0, 60.0)}
    save(manager(model=dataclasses.replace(config.model, **rope)), 3)
    given = {"rotary_base_per_layer": (70.0, 80.0), "use_rope_scaling": True}
    flags = {"use_checkpoint_args": True, "override_rope": override}
    model = make_plan(run_of(folder, **flags, **given))[0].model
    assert (model.rotary_base_per_layer, model.use_rope_scaling) == (
        ((70.0, 80.0), True) if override else ((50.0, 60.0), False)
    )


def test_the_tokenizer_of_the_checkpoint_is_used_unless_one_is_given(
    manager: Managers, config: Config, folder: Path
) -> None:
    tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", trust_remote_code=True)
    save(manager(tokenizer=tokenizer, model=dataclasses.replace(config.model, vocab_size=71)), 3)
    for requested in (True, False):
        found, _, _ = make_plan(run_of(folder, use_checkpoint_args=requested))
        assert found.tokenizer == TokenizerConfig(tokenizer_type="NullTokenizer")
        assert found.model.vocab_size == 70  # an end-of-document id is added to it
    given = run_of(folder)
    given = dataclasses.replace(given, given=given.given | {"tokenizer_type"})
    assert make_plan(given)[0].tokenizer == TokenizerConfig()


OPTIMIZER = OptimizerConfig(
    lr=0.5, weight_decay=0.1, weight_decay_incr_style="linear", start_weight_decay=0.01,
    end_weight_decay=0.1, decoupled_lr=0.25,
)  # fmt: skip
WSD = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "cosine"}
SAVED: dict[str, dict[str, Any]] = TABLES["saved"]
RUNS: dict[str, dict[str, Any]] = {
    "iterations": {"train_iters": 80, "lr_warmup_iters": 11},
    "larger batch": {"train_iters": 80, "global_batch_size": 8, "lr_decay_style": "linear"},
    "samples": {"train_samples": 800, "lr_wsd_decay_style": "linear"},
    "tokens": {"train_tokens": 4000, "lr_decay_tokens": 3000},
}


def schedule_of(**values: Any) -> ScheduleConfig:
    return ScheduleConfig(**{"micro_batch_size": 1, "global_batch_size": 4, **values})


@pytest.mark.parametrize(("saved", "run"), with_proofs(*rotated(SAVED, RUNS)))
def test_the_schedule_is_that_of_the_checkpoint(
    saved: str, run: str, manager: Managers, config: Config, folder: Path
) -> None:
    """At every position, whatever units and batch size the run has.

    Claim (checkpoints): the schedule of the checkpoint applies at every position, whatever units
    and batch size the run has
    """
    first = dataclasses.replace(config, optimizer=OPTIMIZER, schedule=schedule_of(**SAVED[saved]))
    save(manager(optimizer=first.optimizer, schedule=first.schedule), 3)
    given = {"lr", *RUNS[run]}
    options = CheckpointConfig(load=str(folder), use_checkpoint_opt_param_scheduler=True)
    own = dataclasses.replace(
        config,
        optimizer=OptimizerConfig(lr=9.0),
        schedule=schedule_of(**RUNS[run]),
        checkpoint=options,
        given=frozenset(given),
    )
    warnings: list[Problem] = []
    found, _, problems = complete_settings(own, 1, warnings.append)
    assert problems == []
    assert [*found.schedule.problems(found.parallel, 1), *found.optimizer.problems()] == []
    # A logarithmic warmup counts steps, so that it depends on the batch size until it ends.
    start = 18 if (saved, run) == ("logarithmic", "larger batch") else 0
    for samples in range(start, 200, 3):
        state = TrainState(applied_samples=samples, applied_tokens=4 * samples)
        for rate in (schedules.learning_rate, schedules.decoupled_learning_rate):
            assert rate(found, state, 1) == pytest.approx(rate(first, state, 1), rel=1e-12)
    for name in ("weight_decay", "start_weight_decay", "end_weight_decay"):
        assert getattr(found.optimizer, name) == getattr(OPTIMIZER, name)
    assert ("lr", "use_checkpoint_opt_param_scheduler") in fields(warnings)
    # The run's own length and batch size are kept.
    lengths = ("train_iters", "train_samples", "train_tokens", "global_batch_size")
    assert all(getattr(found.schedule, n) == getattr(own.schedule, n) for n in lengths)


def test_a_schedule_that_is_no_number_of_iterations_is_rejected(
    manager: Managers, config: Config, folder: Path
) -> None:
    save(manager(schedule=schedule_of(**SAVED["iterations"])), 3)
    options = CheckpointConfig(load=str(folder), use_checkpoint_opt_param_scheduler=True)
    schedule = schedule_of(train_iters=80, global_batch_size=6)
    own = dataclasses.replace(config, schedule=schedule, checkpoint=options)
    _, _, problems = complete_settings(own, 1, lambda problem: None)
    assert codes(problems) == ["checkpoint-schedule-not-in-iterations"] * 2
    warnings: list[Problem] = []
    _, _, problems = complete_settings(own.with_values({"finetune": True}), 1, warnings.append)
    assert (codes(warnings), problems) == (["no-effect"], [])


def test_the_schedule_of_another_program_is_not_read(pretrained: Path, tmp_path: Path) -> None:
    for load, expected in (
        (pretrained, "checkpoint-without-schedule"),
        (tmp_path, "weights-format-unknown"),
    ):
        run = run_of(load, use_checkpoint_opt_param_scheduler=True)
        _, _, problems = complete_settings(run, 1, lambda problem: None)
        assert codes(problems) == [expected]


def test_changes_of_the_schedule_on_request_need_no_warning(
    manager: Managers, logged: list[str]
) -> None:
    save(manager(schedule=schedule_of(**SAVED["iterations"])), 3)
    changed = {
        "schedule": schedule_of(**RUNS["iterations"]),
        "optimizer": OptimizerConfig(lr=9.0, clip_grad=7.0),
    }
    for options, expected in ({}, 7), ({"override_opt_param_scheduler": True}, 1):
        logged.clear()
        assert manager(**changed, **options).restoring.select() is not None
        assert sum("resume-setting-changed" in line for line in logged) == expected, logged


@pytest.mark.parametrize(("finetune", "expected"), [(False, []), (True, ["rampup_batch_size"])])
def test_batch_sizes_of_a_ramp_up_that_a_checkpoint_has_passed_need_not_fit(
    finetune: bool, expected: list[str], manager: Managers, config: Config, folder: Path
) -> None:
    schedule = schedule_of(
        micro_batch_size=1, global_batch_size=8, rampup_batch_size=(2, 2, 6), train_samples=100
    )
    save(manager(schedule=schedule), 3)
    options = CheckpointConfig(load=str(folder), finetune=finetune)
    own = dataclasses.replace(config, schedule=schedule, checkpoint=options)
    found, plan, problems = complete_settings(own, 4, lambda _: None)
    assert problems == []
    assert plan.saved is not None
    consumed = plan.saved.run.state.consumed_samples
    assert found.start_samples == (0 if finetune else consumed)
    assert consumed >= 4, "the second stage, of 4 samples, or a later one"
    sizes = found.schedule.problems(found.parallel, 4, found.start_samples)
    assert [problem.fields[0] for problem in sizes if "ramp" in problem.fields[0]] == expected
