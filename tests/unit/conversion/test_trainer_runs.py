"""Runs of torchtitan and OLMo-core, whose optimizers and progress are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ds.config import ModelConfig
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.runs.olmo_schedules import schedule_of
from tests.problems import codes, raises_problem
from tests.unit.conversion.models import random_source, random_training
from tests.unit.conversion.test_write_trainers import LLAMA
from tests.unit.conversion.trainer_runs import State, write_olmo_core, write_torchtitan

MODEL = ModelConfig(**LLAMA)
WRITERS: dict[str, Callable[..., Path]] = {
    "torchtitan": write_torchtitan,
    "olmo_core": write_olmo_core,
}
FLAGS = {"num_attention_heads": 4, "rotary_base": 500000.0, "seq_length": 32}
STATES = {
    "torchtitan": ("optimizer", "state.layers.1.attention.wo.weight."),
    "olmo_core": ("optim", "blocks.1.attention.w_out.weight"),
}


def trained(model: ModelConfig = MODEL) -> SourceCheckpoint:
    """Random weights and moments, without masters."""
    states = random_training(model)["optimizer"]
    moments = {key: states[key] for key in ("exp_avg", "exp_avg_sq")}
    return dataclasses.replace(random_source(model), optimizer=moments)


def opened(trainer: str, path: Path, **options: Any) -> SourceCheckpoint:
    read = ReadOptions(**{"optimizer": True, **options}, model=FLAGS, given=frozenset(FLAGS))
    return open_source(path, trainer, read)


def state_of(state: State, trainer: str) -> tuple[State, Callable[[str], str]]:
    """The states of a weight, and the key of one."""
    entry, name = STATES[trainer]
    if trainer == "torchtitan":
        return state[entry], lambda key: f"{name}{key}"
    return state[entry]["state"][name], lambda key: key


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("trainer", WRITERS)
def test_moments_steps_and_samples_are_those_of_the_run(
    trainer: str, is_tied: bool, tmp_path: Path
) -> None:
    """Claim (checkpoints): of a run of torchtitan or OLMo-core, moments, steps, samples and the
    settings of single weights are read, rows of the fused parameter of queries, keys and values
    included"""
    model = dataclasses.replace(MODEL, untie_embeddings_and_output_weights=not is_tied)
    source = trained(model)
    path = WRITERS[trainer](source, tmp_path, step=3, steps=4)
    back = opened(trainer, tmp_path)
    assert back.path == path
    for key, tensors in source.optimizer.items():
        for name, tensor in tensors.items():
            read = back.optimizer[key][name]
            assert torch.equal(read.read(), tensor.read()), (key, name)
            rows = range(3, tensor.shape[0] - 2)
            assert torch.equal(read.read(rows), tensor.read(rows)), (key, name)
    run = back.run
    assert run is not None
    assert run.settings is not None
    assert (run.iteration, run.steps) == (3, 4)
    assert run.consumed_samples == (None if trainer == "torchtitan" else 12)
    assert run.settings.options["adam_beta2"] == 0.95
    assert run.settings.weight_decay["final_norm.weight"] == 0.1
    decay = run.settings.weight_decay["embedding.word.weight"]
    assert decay == (0.1 if trainer == "torchtitan" else 0.0)


BAD: dict[str, tuple[Callable[[State, Callable[[str], str]], Any], str]] = {
    "missing": (lambda s, key: s.pop(key("exp_avg_sq")), "foreign-states-missing"),
    "shape": (
        lambda s, key: s.update({key("exp_avg"): torch.zeros(32, 31)}),
        "weights-shape-mismatch",
    ),
    "amsgrad": (
        lambda s, key: s.update({key("max_exp_avg_sq"): torch.zeros(32, 32)}),
        "foreign-optimizer-other",
    ),
    "steps": (lambda s, key: s.update({key("step"): torch.tensor(2.0)}), "foreign-steps-differ"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("trainer", WRITERS)
def test_incomplete_states_are_refused_by_name(trainer: str, bad: str, tmp_path: Path) -> None:
    change, code = BAD[bad]
    WRITERS[trainer](trained(), tmp_path, change=lambda state: change(*state_of(state, trainer)))
    name = STATES[trainer][1].removeprefix("state.").removesuffix(".")
    with raises_problem(code, contains="max_exp_avg_sq" if bad == "amsgrad" else name):
        opened(trainer, tmp_path)
    assert opened(trainer, tmp_path, optimizer=False, run=True).iteration == 3
    assert opened(trainer, tmp_path, optimizer=False).run is None


def test_the_states_of_a_tied_table_may_have_the_name_of_the_output_layer(tmp_path: Path) -> None:
    def change(state: State) -> None:
        entry = state["optimizer"]
        for name in [name for name in entry if ".tok_embeddings." in name]:
            entry[name.replace(".tok_embeddings.", ".lm_head.")] = entry.pop(name)

    source = trained(dataclasses.replace(MODEL, untie_embeddings_and_output_weights=False))
    write_torchtitan(source, tmp_path, change=change)
    moment = opened("torchtitan", tmp_path).optimizer["exp_avg"]["embedding.word.weight"]
    assert torch.equal(moment.read(), source.optimizer["exp_avg"]["embedding.word.weight"].read())


def only(key: str) -> Callable[[State], None]:
    """Leaves one kind of states, under another name."""

    def change(state: State) -> None:
        entry = state["optimizer"]
        for name in [name for name in entry if name.startswith("state.")]:
            value = entry.pop(name)
            if name.endswith("exp_avg"):
                entry[name.replace("exp_avg", key)] = value

    return change


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    write_torchtitan(trained(), tmp_path, change=only("momentum_buffer"))
    with raises_problem("foreign-optimizer-other", contains="momentum_buffer"):
        opened("torchtitan", tmp_path)


def test_values_that_are_not_finite_are_found_when_they_are_read(tmp_path: Path) -> None:
    def change(state: State) -> None:
        state["optimizer"]["state.norm.weight.exp_avg"][3] = float("nan")

    write_torchtitan(trained(), tmp_path, change=change)
    source = opened("torchtitan", tmp_path)
    with raises_problem("foreign-weights-not-finite", contains="exp_avg of norm.weight"):
        source.optimizer["exp_avg"]["final_norm.weight"].read()


MODULES: dict[str, tuple[dict[str, Any], str]] = {
    "lion": ({"optim": {"_CLASS_": "olmo_core.optim.lion.LionConfig"}}, "foreign-optimizer-other"),
    "steps that are not counted": (
        {"optim": {"_CLASS_": "x.SkipStepAdamWConfig", "step_increment_bugfix": False}},
        "foreign-adam-lacking",
    ),
    "malformed": ({"max_grad_norm": [1]}, "foreign-file-unreadable"),
}


@pytest.mark.parametrize("module", MODULES)
def test_other_optimizers_of_olmo_core_are_refused_by_their_settings(
    module: str, tmp_path: Path
) -> None:
    settings, code = MODULES[module]
    write_olmo_core(trained(), tmp_path, module=settings)
    with raises_problem(code):
        opened("olmo_core", tmp_path)


def test_settings_that_adam_lacks_are_refused(tmp_path: Path) -> None:
    write_torchtitan(trained(), tmp_path, group={"maximize": True})
    with raises_problem("foreign-adam-lacking", contains="maximize"):
        opened("torchtitan", tmp_path)


def test_parts_of_a_weight_that_decay_otherwise_are_refused(tmp_path: Path) -> None:
    def change(state: State) -> None:
        groups = state["optim"]["param_groups"]
        name = "blocks.0.attention.w_k.weight"
        groups[0]["params"].remove(name)
        groups[1]["params"].append(name)

    write_olmo_core(trained(), tmp_path, change=change)
    with raises_problem("foreign-fused-rates-differ", contains="blocks.0.attention.w_k.weight"):
        opened("olmo_core", tmp_path)


def test_classes_of_the_trainers_state_do_not_run(tmp_path: Path) -> None:
    write_olmo_core(trained(), tmp_path, trainer={"callbacks": {"x": Path}})
    with raises_problem("foreign-class-rejected"):
        opened("olmo_core", tmp_path)


def test_more_steps_than_the_trainer_are_refused(tmp_path: Path) -> None:
    """One more is that of a save before the first step."""
    write_olmo_core(trained(), tmp_path, step=3, steps=5)
    with raises_problem("foreign-steps-differ"):
        opened("olmo_core", tmp_path)


def test_without_the_trainers_state_the_weights_are_left(tmp_path: Path) -> None:
    path = write_olmo_core(trained(), tmp_path)
    (path / "train" / "rank0.pt").unlink()
    source = opened("olmo_core", tmp_path)
    assert not source.optimizer
    assert "rank0.pt" in source.unread


def test_skipped_steps_are_noted(tmp_path: Path) -> None:
    optimizer = {"_CLASS_": "olmo_core.optim.adamw.SkipStepAdamWConfig", "sigma_factor": 4}
    write_olmo_core(trained(), tmp_path, steps=2, module={"optim": optimizer})
    source = opened("olmo_core", tmp_path)
    assert codes(source.notes) == ["olmo-core-skips"]
    assert source.run is not None
    assert source.run.steps == 2


def test_a_coupled_decay_is_noted(tmp_path: Path) -> None:
    write_torchtitan(trained(), tmp_path, group={"decoupled_weight_decay": False})
    assert "foreign-decay-coupled" in codes(opened("torchtitan", tmp_path).notes)


def test_an_unknown_schedule_has_no_rates() -> None:
    schedule = schedule_of({"_CLASS_": "olmo_core.optim.scheduler.WSDS"}, 1e-2, 20, 3, 96)
    assert (schedule.name, schedule.rate, schedule.flags) == ("WSDS", None, "")
