"""Settings that a resume changes act as if the run had changed them without stopping, on two ranks.

A run takes two steps and saves. It then continues in its process with other settings, which the
test writes into DeepSpeed's own objects, while a new engine with these settings loads the
checkpoint. Both take further steps, and losses, norms, loss scales, weights, master weights and
moments must be equal bit for bit.

Every layout meets all the settings that it has, at once. So that no setting hides behind the
others, the proofs also leave out each once, on one of the layouts by turns: the result must then
differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

from megatron_ds.checkpoint.metadata import ParallelLayout
from megatron_ds.config import Config
from megatron_ds.engine.ds_config.generate import PARTITION_KEYS, is_read_at
from megatron_ds.engine.ds_config.keys import BLOCKS
from megatron_ds.engine.readback import master_weights
from megatron_ds.engine.settings import EngineSettings
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.parallel.collectives import all_gather
from megatron_ds.parallel.mesh import Mesh
from tests.dist.compare import differing_names
from tests.dist.engine_harness import Meshes, batches_of, build
from tests.dist.nonfinite_harness import RATES, WORLD, Training, corrupt_gradient
from tests.dist.parity_cases import Case, config_of
from tests.dist.rank_jobs import JobResults, Jobs, has_proofs, run_jobs
from tests.dist.reference import Tensors
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

STEPS = 2
"""Steps before the checkpoint."""
TOTAL_STEPS = 6
TAG = "saved"
Apply = Callable[[Training, Any], None]
"""Changes a setting of a run in its process."""


def continue_batches(training: Training) -> None:
    """Reads the batches after the run's position, in micro-batches of its size."""
    consumed = training.state.consumed_samples
    training.batches = batches_of(training.config, training.mesh, training.samples, consumed)


def by_the_plan(training: Training, value: Any) -> None:
    """The plan of each step has the setting."""


def set_first_beta(training: Training, value: float) -> None:
    for group in training.engine._engine.basic_optimizer.param_groups:
        group["betas"] = value, group["betas"][1]


def set_second_beta(training: Training, value: float) -> None:
    for group in training.engine._engine.basic_optimizer.param_groups:
        group["betas"] = group["betas"][0], value


def set_in_groups(key: str, training: Training, value: float) -> None:
    for group in training.engine._engine.basic_optimizer.param_groups:
        group[key] = value


def set_in_muon(name: str, training: Training, value: Any) -> None:
    setattr(training.engine._engine.basic_optimizer, name, value)


def set_clipping(training: Training, value: float) -> None:
    engine = training.engine._engine
    if training.config.deepspeed.zero_stage == 0:
        engine._config.gradient_clipping = value
    else:
        engine.optimizer.clip_grad = value


def set_dropout(of_attention: bool, training: Training, value: float) -> None:
    model = training.engine._engine.module
    model._has_dropout = True
    for name, module in model.named_modules():
        if hasattr(module, "dropout") and name.endswith(".attention") == of_attention:
            module.dropout = value


def set_rope(training: Training, value: float) -> None:
    model = training.engine._engine.module
    config = dataclasses.replace(model.config, rotary_base=value)
    for block, rule in zip(model.blocks(), attention_rules(config), strict=True):
        block.rule = rule


def set_micro_batch_size(training: Training, value: int) -> None:
    training.engine._engine.set_train_micro_batch_size(value)
    continue_batches(training)


def set_in_scaler(name: str, training: Training, value: float) -> None:
    scaler = training.engine._engine.optimizer.loss_scaler
    setattr(scaler, name, value)
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


def set_scale(training: Training, value: float | None) -> None:
    optimizer = training.engine._engine.optimizer
    precision = training.config.precision
    optimizer.dynamic_loss_scale = value is None
    optimizer.loss_scaler = (
        LossScaler(scale=value)
        if value
        else DynamicLossScaler(
            init_scale=precision.initial_loss_scale,
            scale_window=precision.loss_scale_window,
            min_scale=precision.min_loss_scale,
            delayed_shift=precision.hysteresis,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
            dtype=torch.half,
        )
    )


SETTINGS: dict[str, tuple[Any, Apply]] = {
    "lr": (0.05, by_the_plan),
    "weight_decay": (0.5, by_the_plan),
    "clip_grad": (0.02, set_clipping),
    "adam_beta1": (0.5, set_first_beta),
    "adam_beta2": (0.8, set_second_beta),
    "adam_eps": (1e-2, partial(set_in_groups, "eps")),
    "sgd_momentum": (0.5, partial(set_in_groups, "momentum")),
    "muon_momentum": (0.5, partial(set_in_groups, "momentum")),
    "muon_nesterov": (False, partial(set_in_muon, "_nesterov")),
    "muon_extra_scale_factor": (0.5, partial(set_in_muon, "_scale_factor")),
    "lion_beta1": (0.5, set_first_beta),
    "lion_beta2": (0.8, set_second_beta),
    "hidden_dropout": (0.2, partial(set_dropout, False)),
    "attention_dropout": (0.2, partial(set_dropout, True)),
    "rotary_base": (50.0, set_rope),
    "micro_batch_size": (2, set_micro_batch_size),
    "loss_scale_window": (2, partial(set_in_scaler, "scale_window")),
    "hysteresis": (1, partial(set_in_scaler, "delayed_shift")),
    "min_loss_scale": (2.0**8, partial(set_in_scaler, "min_scale")),
    "loss_scale": (None, set_scale),
}
"""Field -> value after the resume, and how a run changes it in its process."""
OF_ADAM = TABLES["of_adam"]


@dataclass(frozen=True)
class Layout:
    stage: int
    settings: tuple[str, ...] = OF_ADAM
    optimizer: str = "adamw"
    model: str = "learned"
    tp: int = 1
    ulysses: int = 1
    moments: str = "fp32"
    precision: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)

    def config(self) -> Config:
        """Two micro-batches per step, and a learning rate that every step changes."""
        case = Case(WORLD, self.stage, self.tp, 2, self.model, self.optimizer, sp=self.ulysses)
        changes = {"precision": self.precision, "deepspeed": self.deepspeed, "schedule": RATES}
        config = config_of(case, **changes)
        types = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), self.moments)
        return config.with_values({"sgd_momentum": 0.9, "param_group": None, **types})


LAYOUTS = {name: Layout(**row) for name, row in TABLES["layouts"].items()}
IN_MAKE_TEST = TABLES["in_make_test"]
CASES = [n if n in IN_MAKE_TEST else pytest.param(n, marks=pytest.mark.proof) for n in LAYOUTS]
OPTIMIZERS_CHANGED = TABLES["optimizers_changed"]
"""Layouts that are also resumed with the optimizer states in the other memory."""


def left_out() -> dict[str, str]:
    """Layout -> the setting that it leaves out: each setting once, if layouts suffice."""
    taken: dict[str, str] = {}
    for setting in SETTINGS:
        layout = next(n for n, x in LAYOUTS.items() if setting in x.settings and n not in taken)
        taken[layout] = setting
    return taken


@dataclass
class Outcome:
    """What a run did after the checkpoint."""

    results: list[tuple[float, float, bool, float | None]]
    """Loss, gradient norm, whether it was skipped, and loss scale of each step."""
    tensors: Tensors

    def differences(self, other: Outcome) -> list[str]:
        steps = itertools.zip_longest(self.results, other.results)
        different = [f"step {n}: {a} {b}" for n, (a, b) in enumerate(steps) if repr(a) != repr(b)]
        return different + differing_names(self.tensors, other.tensors)


def further_steps(training: Training) -> Outcome:
    """Steps after the checkpoint. A dynamic loss scale first meets two overflows."""
    results = []
    for overflows in (
        (True, True, False, False) if training.config.precision.fp16 else (False, False)
    ):
        with corrupt_gradient(training.engine, math.inf) if overflows else nullcontext():
            result = training.step()
        assert result.skipped == overflows
        assert result.grad_norm is not None
        loss = float(result.loss)
        norm = float(result.grad_norm)
        results.append((loss, norm, bool(result.skipped), result.loss_scale))
    tensors = training.state_tensors()
    training.close()
    return Outcome(results, tensors)


def misplaced(training: Training) -> list[str]:
    """Parameters whose weights are not at their recorded places in the optimizer's flat tensors."""
    engine = training.engine._engine
    stage = training.config.deepspeed.zero_stage
    if stage == 0:
        return []
    parameters = dict(engine.module.named_parameters())
    wrong = []
    for partition, master in zip(training.engine.partitions(), master_weights(engine), strict=True):
        assert master.numel() == partition.size
        flat = master if stage == 3 else torch.cat(list(all_gather(master, training.mesh.replicas)))
        for name, _, offset in partition.parameters:
            weights = parameters[name].data if stage < 3 else parameters[name].ds_tensor
            place = flat[offset : offset + weights.numel()].to(weights.dtype)
            if not torch.equal(place, weights.flatten()):
                wrong.append(name)
    assert sum(len(each.parameters) for each in training.engine.partitions()) == len(parameters)
    return wrong


def resume(config: Config, mesh: Mesh, folder: Path, first: Training) -> tuple[Training, Outcome]:
    """A new engine that continues from the checkpoint."""
    training = Training(config, mesh, TOTAL_STEPS)
    training.engine.load(folder, TAG)
    training.state = first.state
    continue_batches(training)
    return training, further_steps(training)


def changed(config: Config, names: list[str]) -> Config:
    return config.with_values({name: SETTINGS[name][0] for name in names})


def resume_layout(name: str, folder: Path, without: str | None, meshes: Meshes) -> dict[str, Any]:
    """Compares a resume with an uninterrupted run, on one layout."""
    layout = LAYOUTS[name]
    folder = folder / name
    config = layout.config()
    mesh = meshes.of(config.parallel)
    first = Training(config, mesh, TOTAL_STEPS)
    for _ in range(STEPS):
        assert not first.step().skipped
    first.engine.snapshot(copy=False).write(Path(folder) / TAG)
    first.config = changed(config, list(layout.settings))
    resumed, outcome = resume(first.config, mesh, folder, first)
    seen: dict[str, Any] = {"settings": resumed.engine.settings, "misplaced": misplaced(first)}
    if without is not None:
        others = [each for each in layout.settings if each != without]
        _, incomplete = resume(changed(config, others), mesh, folder, first)
        seen["effect"] = outcome.differences(incomplete)
    if name in OPTIMIZERS_CHANGED:
        moved = first.config.with_values(OPTIMIZERS_CHANGED[name])
        _, seen["moved"] = resume(moved, mesh, folder, first)
    for setting in layout.settings:
        value, apply = SETTINGS[setting]
        apply(first, value)
    continued = further_steps(first)
    seen["differences"] = outcome.differences(continued)
    seen["continued"] = continued
    return seen


STAGES = (1, 2, 3)
UNORDERED: dict[str, Any] = TABLES["unordered"]
"""Keys of zero_optimization that leave the flat tensors as they are, at other values than usual."""
ORDERED = {"round_robin_gradients": True, "parameter_alignment": True, "sub_group_size": 1000}
"""Keys that change them."""
UNTRIED = {
    "stage",
    "offload_param",
    "offload_optimizer",  # part of the layouts above
    "zero_quantized_weights",
    "zero_quantized_gradients",  # not implemented on a CPU
    "stage3_module_granularity_threshold",  # cannot train this model
}


def partitions_with(stage: int, keys: dict[str, Any], mesh: Mesh) -> tuple[Any, Any]:
    """The flat tensors of an engine with these keys, and what of them a checkpoint's layout has."""
    # Sizes that are no multiples of 16 bytes, which parameter_alignment changes.
    config = config_of(Case(WORLD, stage, 1, 2, "learned", "adamw"), model={"ffn_hidden_size": 49})
    read = {key: value for key, value in keys.items() if is_read_at(key, stage)}
    config.deepspeed_file.values["zero_optimization"] |= read
    engine = build(config, mesh)
    found = engine.partitions()
    engine._engine.destroy()
    return found, ParallelLayout.of(config, WORLD)


def order_of_each_key(stage: int, meshes: dict[int, Mesh]) -> dict[str, Any]:
    usual, layout = partitions_with(stage, {}, meshes[1])
    others = partitions_with(stage, UNORDERED, meshes[1])
    seen: dict[str, Any] = {"unchanged": others == (usual, layout), "changed": {}}
    for key, value in ORDERED.items():
        flat, other = partitions_with(stage, {key: value}, meshes[1])
        seen["changed"][key] = (flat != usual, other != layout)
    return seen


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> JobResults:
    folder = tmp_path_factory.mktemp("checkpoints")
    proofs = has_proofs(request)
    without = left_out() if proofs else {}
    jobs = Jobs(
        (name, partial(resume_layout, name, folder, without.get(name)))
        for name in (LAYOUTS if proofs else IN_MAKE_TEST)
    )
    for stage in STAGES if proofs else (1, 3):
        jobs[f"order {stage}"] = partial(order_of_each_key, stage)
    return run_jobs(WORLD, jobs)


@pytest.mark.parametrize("name", CASES)
def test_changed_settings_act_as_in_a_run_that_never_stopped(
    name: str, outcomes: JobResults
) -> None:
    """Claim (checkpoints): settings changed on a resume (learning rate, weight decay, clipping,
    betas, epsilon, momentum, dropout, micro-batch, loss scaling) act as in a run that never
    stopped, bit for bit

    Claim (precision): Lion and Muon resume bit for bit, with offloaded states, too

    Claim (parallel): a resumed run of such ranks continues bit for bit
    """
    for seen in outcomes.of(name):
        assert seen["differences"] == []


@pytest.mark.proof
@pytest.mark.parametrize("name", left_out())
def test_each_changed_setting_has_an_effect(name: str, outcomes: JobResults) -> None:
    assert set(left_out().values()) == set(SETTINGS)
    assert any(seen["effect"] for seen in outcomes.of(name)), left_out()[name]


@pytest.mark.parametrize("name", OPTIMIZERS_CHANGED)
def test_optimizer_states_may_move_between_device_and_host(name: str, outcomes: JobResults) -> None:
    """Another implementation of AdamW computes the steps, so results are close, not equal.

    Claim (checkpoints): optimizer states may move between device and host on a resume
    """
    for seen in outcomes.of(name):
        moved = seen["moved"]
        continued = seen["continued"]
        for one, other in zip(moved.results, continued.results, strict=True):
            assert one[:2] == pytest.approx(other[:2], rel=1e-5)
        for key, value in continued.tensors.items():
            # Close master weights, which have a number, may be rounded to neighbours in bf16.
            is_rounded = "bf16" in name and " " not in key
            torch.testing.assert_close(
                moved.tensors[key].double(),
                value.double(),
                rtol=2**-7 if is_rounded else 1e-4,
                atol=1e-6,
                msg=key,
            )


def test_settings_are_read_back_after_the_load(outcomes: JobResults) -> None:
    for name in ("zero1 bf16", "zero1 sgd", "zero2 fp16"):
        for seen in outcomes.of(name):
            settings: EngineSettings = seen["settings"]
            is_adam = LAYOUTS[name].optimizer == "adamw"
            assert settings.betas == ((0.5, 0.8) if is_adam else None)
            assert {*(settings.epsilon or ())} == ({1e-2} if is_adam else set())
            assert settings.momentum == (None if is_adam else 0.5)
            assert settings.clip_grad == 0.02
    for seen in outcomes.of("zero2 fp16"):
        scale = seen["settings"].loss_scale
        assert (scale.scale, scale.window, scale.hysteresis, scale.minimum) == (512, 2, 1, 256)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_at_their_recorded_places(name: str, outcomes: JobResults) -> None:
    """Claim (checkpoints): a checkpoint records where each parameter is in the optimizer's flat
    tensors"""
    for seen in outcomes.of(name):
        assert seen["misplaced"] == []


@pytest.mark.parametrize("stage", with_proofs(STAGES, [2]))
def test_keys_that_order_the_flat_tensors_are_the_recorded_ones(
    stage: int, outcomes: JobResults
) -> None:
    """Claim (checkpoints): of all keys of `zero_optimization`, those that change this order are
    part of the layout"""
    assert tuple(ORDERED) == PARTITION_KEYS
    assert UNTRIED | ORDERED.keys() | UNORDERED.keys() == BLOCKS["zero_optimization"].keys()
    for seen in outcomes.of(f"order {stage}"):
        assert seen["unchanged"]
        changed = {key for key, change in seen["changed"].items() if change == (True, True)}
        assert changed == (
            {"sub_group_size"} if stage == 3 else ORDERED.keys() - {"sub_group_size"}
        )
        assert all(change in ((True, True), (False, False)) for change in seen["changed"].values())
