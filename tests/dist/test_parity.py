"""Every layout trains like one process: {ZeRO 0, 1, 2, 3} x {TP 1, 2} x {accumulation 1, 4} x
{learned, rope, alibi, GQA, swiglu, tied, untied}, on 2 and 4 ranks, under SGD without clipping and
AdamW with clipping. The rule in `parity_cases.py` selects the combinations.

The reference is `reference.train_reference`: torch over the full global batch. Three steps in fp32;
loss, global norm, every parameter's gradient (taken from DeepSpeed before each step and, under SGD,
from what the step did to the weights) and every weight after each step agree within 1e-5.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, config_of, reference_of
from tests.dist.rank_jobs import Job, JobResults, case_training, run_jobs
from tests.dist.reference import Run

REPEATED = "repeated"
"""The second run of a world's first case, after all others."""

HPZ_WORLD = 4
HPZ = {
    "hpz-tp1": Case(HPZ_WORLD, 3, 1, 4, "learned", "adamw"),
    "hpz-tp2": Case(HPZ_WORLD, 3, 2, 1, "swiglu", "sgd"),
}
"""Layouts in which pairs of data-parallel ranks hold second copies of the parameters."""

Worlds = dict[int, JobResults]


def hpz_training(case: Case) -> Job:
    deepspeed = {**vars(config_of(case).deepspeed), "zero_hpz_partition_size": 2}
    return case_training(case, partial(assert_second_copies, case.tp), deepspeed=deepspeed)


def assert_second_copies(tp: int, engine: Any) -> None:
    """Neighbours along the data-parallel axis share a copy, which the backward pass gathers."""
    start = {1: dist.get_rank() // 2 * 2, 2: dist.get_rank() % 2}[tp]
    for parameter in engine.module.parameters():
        group = parameter.ds_zero_param_process_group
        assert dist.get_process_group_ranks(group) == [start, start + tp]


@pytest.fixture(scope="module")
def worlds(request: pytest.FixtureRequest) -> Worlds:
    """The selected cases, trained by one set of two ranks and one of four."""
    items = [item for item in request.session.items if item.path == request.path]
    parameters = [item.callspec.params for item in items if hasattr(item, "callspec")]
    selected = list(dict.fromkeys(p["case"] for p in parameters if "case" in p))
    results = {}
    for world in parity_cases.AXES["world"]:
        cases = [case for case in selected if case.world == world]
        if cases:
            jobs = {case.name: case_training(case) for case in cases}
            if world == HPZ_WORLD:
                jobs |= {name: hpz_training(case) for name, case in HPZ.items()}
            results[world] = run_jobs(world, {**jobs, REPEATED: jobs[cases[0].name]})
    return results


SMOKE = {case.stage: case for case in parity_cases.covering() if case.world == 2}.values()
"""One case of each ZeRO stage."""


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.smoke] if case in SMOKE else [])
        for case in (*parity_cases.chosen(), *parity_cases.other_optimizers())
    ],
    ids=lambda case: case.name,
)
def test_layout_equals_one_process(case: Case, worlds: Worlds) -> None:
    reference = reference_of(case.model, case.optimizer)
    undecided = sum(int(mask.sum()) for mask in reference.undecided.values())
    assert undecided < 0.01 * sum(weight.numel() for weight in reference.weights[0].values())
    clip = parity_cases.OPTIMIZERS[case.optimizer].clip_grad
    if clip:
        assert all(norm is not None and norm > 2 * clip for norm in reference.norms)
    for rank, run in enumerate(worlds[case.world].of(case.name)):
        assert differences(run, reference) == [], f"rank {rank}"
        assert run.rates == reference.rates
        norm = math.sqrt(sum(weight.square().sum() for weight in reference.weights[-1].values()))
        assert run.notes["params norm"] == pytest.approx(norm, rel=1e-5)
        if case.optimizer == "sgd":
            assert _error_of_first_step(run, reference) <= 1.0, f"rank {rank}"


@pytest.mark.parametrize("case", parity_cases.EIGHT_BIT, ids=lambda case: case.name)
def test_8_bit_adam_follows_adamw(case: Case, worlds: Worlds) -> None:
    reference = reference_of(case.model, "adamw")
    for run in worlds[case.world].of(case.name):
        assert run.losses[:2] == pytest.approx(reference.losses[:2], rel=1e-4)
        assert run.losses == pytest.approx(reference.losses, rel=2e-3)
        assert run.weights[-1].keys() == reference.weights[-1].keys()
        for name, weight in run.weights[-1].items():
            change = (reference.weights[-1][name] - reference.weights[0][name]).norm()
            assert (weight - reference.weights[-1][name]).norm() < 0.1 * change, name


def _error_of_first_step(run: Run, reference: Run) -> float:
    """The error of the gradient that a step of plain SGD applied, (before - after) / rate.

    Relative to the tolerance: 1e-5 of the largest element, plus the rounding of both weights to
    fp32.
    """
    rate, ratios = reference.rates[0], []
    for name, gradient in reference.gradients[0].items():
        before, after = run.weights[0][name], run.weights[1][name]
        rounding = 2.0**-24 * (before.abs().max() + after.abs().max()).item() / rate
        allowed = 1e-5 * gradient.abs().max().item() + rounding
        ratios.append(((before - after) / rate - gradient).abs().max().item() / allowed)
    return max(ratios)


@pytest.mark.parametrize("name", HPZ)
def test_second_copies_of_parameters_change_nothing(name: str, worlds: Worlds) -> None:
    case = HPZ[name]
    for rank, run in enumerate(worlds[HPZ_WORLD].of(name)):
        assert differences(run, reference_of(case.model, case.optimizer)) == [], f"rank {rank}"


ZERO3 = [case for case in parity_cases.chosen() if case.stage == 3]


@pytest.mark.parametrize("case", ZERO3, ids=lambda case: case.name)
def test_zero3_never_materializes_the_full_model(case: Case, worlds: Worlds) -> None:
    for run in worlds[case.world].of(case.name):
        seen = run.notes["construction"]
        # The largest single table is less than half of this model.
        assert seen.largest_module < seen.total / 2
        assert 0 < seen.peak <= seen.largest_module
        assert seen.unpartitioned == 0
        dp_size = case.world // case.tp
        assert seen.total <= dp_size * seen.local < 1.05 * seen.total


def test_cases_do_not_influence_each_other(worlds: Worlds) -> None:
    """A world's first case, repeated after all others on the same ranks, is equal bit for bit."""
    for world in worlds.values():
        first = next(iter(world.results))
        for run, again in zip(world.of(first), world.of(REPEATED), strict=True):
            assert run.losses == again.losses
            assert run.norms == again.norms
            for before, after in zip(run.weights, again.weights, strict=True):
                assert before.keys() == after.keys()
                assert all(torch.equal(before[name], after[name]) for name in before)


def test_covering_array_contains_every_combination() -> None:
    """Checks the rule of `parity_cases.py` independently of the construction of the array."""
    chosen = parity_cases.covering()
    assert len(chosen) == len(set(chosen)) < len(parity_cases.product()) == 448
    layout = [axis for axis in parity_cases.AXES if axis != "model"]
    for axes in [*itertools.combinations(layout, 3), *(("model", axis) for axis in layout)]:
        found = {tuple(getattr(case, axis) for axis in axes) for case in chosen}
        assert len(found) == math.prod(len(parity_cases.AXES[axis]) for axis in axes), axes


def test_comparison_detects_a_wrong_gradient() -> None:
    """One element off by 2e-5 of the largest element is a difference."""
    reference = Run([1.0], [1.0], [{"w": torch.tensor([1.0, 0.1])}], [{"w": torch.ones(2)}] * 2)
    wrong = Run([1.0], [1.0], [{"w": torch.tensor([1.0, 0.10002])}], [{"w": torch.ones(2)}] * 2)
    assert differences(reference, reference) == []
    assert len(differences(wrong, reference)) == 1
    assert len(differences(Run(), reference)) == 4
