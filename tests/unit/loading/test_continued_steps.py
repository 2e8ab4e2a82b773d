"""Settings of another trainer's steps: taken over, contradicted, or without counterpart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds import schedules
from megatron_ds.config import (
    CheckpointConfig,
    Config,
    OptimizerConfig,
    ScheduleConfig,
)
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.trainers.runs.olmo_schedules import schedule_of
from megatron_ds.loading.continued_steps import step_conflicts, step_notes
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import LoadPlan, continue_schedule, make_plan
from megatron_ds.train_state import TrainState
from tests.problems import codes
from tests.unit.conversion.test_trainer_runs import FLAGS, WRITERS, trained
from tests.unit.conversion.trainer_runs import write_olmo_core, write_torchtitan

Planned = tuple[Config, LoadPlan, list[Problem], list[Problem]]
CONSTANT: dict[str, Any] = {"lr_decay_style": "constant", "global_batch_size": 4}
OLMO: dict[str, Any] = {"lr_decay_style": "constant"}


def planned(trainer: str, folder: Path, flags: dict[str, Any]) -> Planned:
    """The run that a command line with these flags continues; warnings of what it takes over."""
    flags = {**(FLAGS if trainer == "torchtitan" else {}), "train_iters": 20, **flags}
    config = Config(
        optimizer=OptimizerConfig(),
        schedule=ScheduleConfig(micro_batch_size=2),
        checkpoint=CheckpointConfig(load=f"{trainer}:{folder}"),
        given=frozenset({*flags, "load", "micro_batch_size"}),
    ).with_values(flags)
    warnings: list[Problem] = []
    config, plan, problems = make_plan(config, 1, warnings.append)
    config, plan, more = continue_schedule(config, plan, 1, warnings.append)
    assert plan.imported is not None
    return config.with_vocab(60), plan, [*problems, *more], warnings


def conflicts(trainer: str, folder: Path, flags: dict[str, Any]) -> list[str]:
    config, plan, problems, _ = planned(trainer, folder, flags)
    assert problems == []
    assert plan.imported is not None
    return codes([*step_conflicts(plan.imported, config, 1)])


def notes(trainer: str, folder: Path, flags: dict[str, Any]) -> list[Problem]:
    config, plan, _, _ = planned(trainer, folder, flags)
    assert plan.imported is not None
    assert [*step_conflicts(plan.imported, config, 1)] == []
    return [*step_notes(plan.imported, config, 1)]


@pytest.mark.parametrize("trainer", WRITERS)
def test_a_run_takes_over_what_is_not_given(trainer: str, tmp_path: Path) -> None:
    """Claim (checkpoints): a run that torchtitan or OLMo-core began goes on at its iteration with
    its optimizer's settings, the weight decay of single weights included, unless flags are given"""
    WRITERS[trainer](trained(), tmp_path, steps=4)
    flags = CONSTANT if trainer == "torchtitan" else OLMO
    config, plan, problems, warnings = planned(trainer, tmp_path, flags)
    assert problems == []
    assert codes(warnings) == ["steps-taken-over"]
    if trainer == "torchtitan":
        assert "--param-group 'pattern=*,wd=0.1'" in str(warnings[0])  # as a shell takes it
    options = config.optimizer
    assert (options.lr, options.adam_beta2, options.weight_decay) == (1e-2, 0.95, 0.1)
    group = "pattern=*,wd=0.1"
    assert options.param_group is not None
    assert (group in options.param_group) == (trainer == "torchtitan")
    assert plan.imported is not None
    assert [*step_conflicts(plan.imported, config, 1)] == []
    if trainer == "olmo_core":
        assert (options.clip_grad, config.schedule.global_batch_size) == (0.5, 4)
    start = InitialLoad.of(plan.imported, config)
    state = start.state
    assert (state.iteration, state.consumed_samples, start.optimizer_steps) == (3, 12, 4)
    assert (state.applied_iterations, state.skipped_iterations) == (3, 0)
    assert (state.applied_samples, state.consumed_tokens) == (12, 12 * 32)
    assert set(start.state_names("final_norm.weight")) == {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("trainer", WRITERS)
def test_the_flags_for_other_starts_have_their_meaning(trainer: str, tmp_path: Path) -> None:
    WRITERS[trainer](trained(), tmp_path)
    flags = (CONSTANT if trainer == "torchtitan" else {**OLMO, **CONSTANT}) | {"lr": 0.3}
    expected = {
        "finetune": (TrainState(), False),
        "no_load_optim": (TrainState(3, 12, 384, 12, 384, 3, 0), False),
        "reset_iteration": (TrainState(applied_samples=12, applied_tokens=384), True),
    }
    for name, (state, has_optimizer) in expected.items():
        changed = {**flags, name: True} if has_optimizer is False else {**CONSTANT, name: True}
        config, plan, problems, _ = planned(trainer, tmp_path, changed)
        assert problems == []
        assert plan.imported is not None
        assert [*step_conflicts(plan.imported, config, 1)] == [], name
        start = InitialLoad.of(plan.imported, config)
        assert (start.state, bool(start.optimizer)) == (state, has_optimizer), name


SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "betas": ({"adam_beta2": 0.99}, ["step-setting-differs"]),
    "epsilon": ({"adam_eps": 1e-7}, ["step-setting-differs"]),
    "learning rate": ({"lr": 2e-2}, ["step-setting-differs"]),
    "weight decay": ({"weight_decay": 0.2}, ["step-setting-differs"]),
    "weights": ({"param_group": ("pattern=*,wd=1x",)}, ["step-weights-differ"]),
    "embeddings": ({"embedding_weight_decay": 0.05}, ["step-weights-differ"]),
    "schedule": ({"lr_decay_style": "linear"}, ["step-rate-differs"]),
    "batch": ({"global_batch_size": 2, "seq_length": 31}, ["step-batch-differs"]),
    "on purpose": ({"adam_beta2": 0.99, "override_opt_param_scheduler": True}, []),
    "the same": ({"adam_beta2": 0.95, "lr": 0.01, "weight_decay": 0.1}, []),
}


@pytest.fixture(scope="module")
def of_torchtitan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of torchtitan."""
    folder = tmp_path_factory.mktemp("torchtitan")
    write_torchtitan(trained(), folder)
    return folder


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_change_the_steps_are_refused_by_name(name: str, of_torchtitan: Path) -> None:
    flags, expected = SETTINGS[name]
    assert conflicts("torchtitan", of_torchtitan, CONSTANT | flags) == expected


@pytest.mark.parametrize(("trainer", "applied"), [("torchtitan", 12), ("olmo_core", 8)])
def test_the_rate_is_that_of_the_step_that_the_files_have(
    trainer: str, applied: int, tmp_path: Path
) -> None:
    """The next step of torchtitan, and the last one of OLMo-core."""
    WRITERS[trainer](trained(), tmp_path, lr=1e-2 * (1 - applied / 80))
    flags = (CONSTANT if trainer == "torchtitan" else OLMO) | {"lr_decay_style": "linear"}
    assert conflicts(trainer, tmp_path, flags) == []


def test_clipping_of_the_recorded_settings_is_not_changed_silently(tmp_path: Path) -> None:
    write_olmo_core(trained(), tmp_path)
    assert conflicts("olmo_core", tmp_path, OLMO | {"clip_grad": 1.0}) == ["step-setting-differs"]


def test_decays_of_single_weights_become_the_smallest_number_of_groups(tmp_path: Path) -> None:
    write_olmo_core(trained(), tmp_path)
    config, *_ = planned("olmo_core", tmp_path, OLMO)
    assert config.optimizer.param_group == (
        "pattern=embedding.word.weight,wd=0",
        "pattern=layers.*.attention_norm.weight,wd=0.1",
        "pattern=layers.*.mlp_norm.weight,wd=0.1",
        "pattern=final_norm.weight,wd=0.1",
    )


def test_what_cannot_be_taken_over_is_named_with_its_first_step(tmp_path: Path) -> None:
    """Claim (checkpoints): of another trainer's run, the place in the data and a schedule without
    counterpart are named, with the first step that differs"""
    scheduler = {"_CLASS_": "olmo_core.optim.scheduler.WSD", "warmup": 0, "decay": 8}
    write_olmo_core(trained(), tmp_path, module={"scheduler": scheduler})
    data, schedule = notes("olmo_core", tmp_path, OLMO)
    assert codes([data, schedule]) == ["step-data-other", "step-schedule-other"]
    assert "step 4" in str(data)
    assert "step 13" in str(schedule)  # 20 - 8 is the last one with the full rate
    (batch,) = [
        note
        for note in notes("olmo_core", tmp_path, OLMO | {"global_batch_size": 2})
        if codes([note]) == ["step-batch-other"]
    ]
    assert "step 4" in str(batch)


@pytest.mark.parametrize("trainer", WRITERS)
def test_a_step_is_taken_by_its_number(trainer: str, tmp_path: Path) -> None:
    for step in (3, 6):
        WRITERS[trainer](trained(), tmp_path, step=step, tokens=384 * step // 3)
    flags = CONSTANT if trainer == "torchtitan" else OLMO
    for wanted, step in ((None, 6), (3, 3)):
        _, plan, problems, _ = planned(trainer, tmp_path, flags | {"ckpt_step": wanted})
        assert problems == []
        assert plan.imported is not None
        assert plan.imported.iteration == step
    _, _, problems, _ = planned(trainer, tmp_path, flags | {"ckpt_step": 4})
    assert codes(problems) == ["ckpt-step-missing"]


def test_without_states_the_weights_start_a_run_with_a_warning(tmp_path: Path) -> None:
    write_torchtitan(trained(), tmp_path, change=lambda state: state.pop("optimizer"))
    config, plan, problems, _ = planned("torchtitan", tmp_path, CONSTANT | {"lr": 0.1})
    assert problems == []
    assert plan.imported is not None
    start = InitialLoad.of(plan.imported, config)
    assert start.state == TrainState()
    assert "foreign-weights-alone" in codes(start.notes)


SCHEDULERS: dict[str, dict[str, Any]] = {
    "ConstantScheduler": {},
    "ConstantWithWarmup": {"warmup": 4},
    "WSD": {"warmup": 4, "decay": 6, "warmup_min_lr": 1e-4, "decay_min_lr": 1e-5},
    "LinearWithWarmup": {"warmup": 4, "alpha_f": 0.2},
    "CosWithWarmup": {"warmup": 0},
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_flags_of_a_schedule_have_its_rates(name: str) -> None:
    settings = {"_CLASS_": f"olmo_core.optim.scheduler.{name}", **SCHEDULERS[name]}
    schedule = schedule_of(settings, 1e-2, 20, 3, 96)
    assert schedule.rate is not None
    values: dict[str, Any] = {}
    for words in schedule.flags.removeprefix("--").split(" --"):
        flag, *texts = words.split()
        field = flag.replace("-", "_")
        numbers = (
            [float(text) if "." in text or "e" in text else int(text) for text in texts]
            if field.endswith(("iters", "lr"))
            else texts
        )
        values[field] = tuple(texts) if field == "lr_decay_points" else numbers[0]
    config = Config(
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(micro_batch_size=2, global_batch_size=4, train_iters=20),
    ).with_values(values)
    for step in range(1, 21):
        state = TrainState(iteration=step - 1, applied_samples=4 * (step - 1))
        rate = schedules.learning_rate(config, state, 1)
        assert rate == pytest.approx(schedule.rate(step), rel=1e-6), step
