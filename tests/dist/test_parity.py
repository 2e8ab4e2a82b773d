"""Layouts train like one process, with what the covering array of `test_layouts.py` lacks.

Models and groups of parameters that are no axis, the step of plain SGD, 8-bit Adam, and how ZeRO-3
constructs the model.

The reference is `reference.train_reference`: torch over the full global batch. Three steps in fp32;
loss, global norm, every parameter's gradient (taken from DeepSpeed before each step and, under SGD,
from what the step did to the weights) and every weight after each step agree within 1e-5.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ds.config.options.optimizer_specs import NAMES
from tests.dist.compare import differences, differing_bits, norm_of
from tests.dist.parity_cases import OPTIMIZERS, Case, config_of, reference_of
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_by_world, selected
from tests.dist.reference import Run
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

REPEATED = "repeated"
"""The second run of the first case, after all others."""

ROWS = tuple(Case(**row) for row in TABLES["cases"])
NAMED = {OPTIMIZERS[case.optimizer].optimizer for case in ROWS}
OF_MATRICES = tuple(
    Case(world, stage, tp, accumulation, model, name)
    for name in NAMES
    if OPTIMIZERS[name].spec.matrices is not None and name not in NAMED
    for world, stage, tp, accumulation, model in TABLES["of_matrices"]
)
"""Cases of the optimizers of matrices that no row has."""
CASES = (*ROWS, *OF_MATRICES)
SMOKE = CASES[:4]
"""One case of each ZeRO stage."""
PROOFS = (
    ROWS[4],
    *ROWS[7:9],
    ROWS[10],
    ROWS[13],
    *ROWS[17:20],
    ROWS[21],
    *(row for row in ROWS if row.model == "mup" and row.optimizer in ("adamw", "grouped")),
    *(case for case in OF_MATRICES if case.world == 2),
)
ZERO3 = [case for case in CASES if case.stage == 3]
EIGHT_BIT = [Case(2, stage, 1 + stage % 2, 4, "learned", "8-bit") for stage in range(4)]
SCALED = {"mup": 1 / 2, "deep mup": 1 / 4}
"""Factor of the smallest learning rate, that of matrices, in models with muP."""
HPZ = Case(4, 3, 2, 1, "swiglu", "sgd")
"""Pairs of data-parallel ranks hold second copies of the parameters."""


def assert_second_copies(engine: Any) -> None:
    """Neighbours along the data-parallel axis share a copy, which the backward pass gathers."""
    start = dist.get_rank() % HPZ.tp
    for parameter in engine.module.parameters():
        group = parameter.ds_zero_param_process_group
        assert dist.get_process_group_ranks(group) == [start, start + HPZ.tp]


def run_measures(case: Case) -> bool:
    """Whether the run reports its largest attention logits."""
    return config_of(case).measures_logits


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """The selected cases, trained by one set of two ranks and one of four."""
    tests = list(selected(request))
    jobs = {2: Jobs(), 4: Jobs()}
    chosen = (params["case"] for _, params in tests if "case" in params)
    for case in dict.fromkeys((CASES[0], *chosen)):
        jobs[case.world][case.name] = case_training(case)
    jobs[2][REPEATED] = jobs[2][CASES[0].name]
    if test_second_copies_of_parameters_change_nothing.__name__ in dict(tests):
        deepspeed = {**vars(config_of(HPZ).deepspeed), "zero_hpz_partition_size": 2}
        jobs[4]["hpz"] = case_training(HPZ, assert_second_copies, deepspeed=deepspeed)
    is_chosen = not jobs[2].keys().isdisjoint(case.name for case in EIGHT_BIT)
    return run_by_world(jobs, {2: ("bitsandbytes.optim",)} if is_chosen else {})


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, marks=pytest.mark.smoke) for case in SMOKE),
        *with_proofs(CASES[len(SMOKE) :], PROOFS),
    ],
    ids=lambda case: case.name,
)
def test_layout_equals_one_process(case: Case, outcomes: JobResults) -> None:
    """Claim (logging): zeros of the gradient and norms of gradients, parameters and updates by
    layer equal the full tensors', in every layout and at every ZeRO stage

    Claim (precision): learning rates and weight decays of embeddings and output layer equal one
    process

    Claim (precision): Muon equals one process, with full matrices and the gradient clipped before
    the step, at every ZeRO stage, with and without tensor parallelism, within 1e-5 in fp32

    Claim (precision): NorMuon with the coefficients of Polar Express, cautious weight decay, and
    rates by patterns of names equal plain torch on full matrices in one process

    Claim (precision): QK-clip, with its largest logits, equals one process that stores all scores,
    also with grouped queries, windows and latent attention

    Claim (precision): muP (`--use-mup`) over widths and depths, with rates, epsilons and decays of
    each weight, equals one process, with Adam, SGD, Lion, Muon and SOAP

    Claim (parallel): ZeRO 0 to 3 x tensor parallelism x accumulation x model variants equal one
    process
    """
    reference = reference_of(case.model, case.optimizer)
    undecided = sum(int(mask.sum()) for mask in reference.undecided.values())
    assert undecided < 0.01 * sum(weight.numel() for weight in reference.weights[0].values())
    clip = OPTIMIZERS[case.optimizer].clip_grad
    if clip:
        assert all(norm is not None and norm > 2 * clip for norm in reference.norms)
    moved = functools.partial(reference_of, case.model, case.optimizer)
    assert outcomes.differences(case.name, reference, moved) == []
    for rank, run in enumerate(outcomes.of(case.name)):
        scale = 1.0 if case.optimizer in ("sgd", "muon") else SCALED.get(case.model, 1.0)
        assert run.rates == [scale * rate for rate in reference.rates]
        logits = [step.get("max_attention_logit") for step in run.routing]
        if reference.largest_logits:
            assert logits == pytest.approx(reference.largest_logits, rel=1e-5)
        assert (None in logits) == (not run_measures(case))
        assert run.notes["params norm"] == pytest.approx(norm_of(reference.weights[-1]), rel=1e-5)
        if case.optimizer == "sgd" and case.model != "mup":  # where rates differ
            assert _error_of_first_step(run, reference) <= 1.0, f"rank {rank}"


@pytest.mark.parametrize("case", with_proofs(EIGHT_BIT, EIGHT_BIT[:3]), ids=lambda case: case.name)
def test_8_bit_adam_follows_adamw(case: Case, outcomes: JobResults) -> None:
    """Claim (precision): 8-bit Adam follows AdamW at every ZeRO stage"""
    reference = reference_of(case.model, "adamw")
    for run in outcomes.of(case.name):
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
    rate = reference.rates[0]
    ratios = []
    for name, gradient in reference.gradients[0].items():
        before = run.weights[0][name]
        after = run.weights[1][name]
        rounding = 2.0**-24 * (before.abs().max() + after.abs().max()).item() / rate
        allowed = 1e-5 * gradient.abs().max().item() + rounding
        ratios.append(((before - after) / rate - gradient).abs().max().item() / allowed)
    return max(ratios)


def test_second_copies_of_parameters_change_nothing(outcomes: JobResults) -> None:
    assert outcomes.differences("hpz", reference_of(HPZ.model, HPZ.optimizer)) == []


@pytest.mark.parametrize(
    "case", with_proofs(ZERO3, set(PROOFS).intersection(ZERO3)), ids=lambda case: case.name
)
def test_zero3_never_materializes_the_full_model(case: Case, outcomes: JobResults) -> None:
    """Claim (parallel): under ZeRO 3 no process ever holds the full model"""
    for run in outcomes.of(case.name):
        seen = run.notes["construction"]
        # The largest single table is less than half of this model.
        assert seen.largest_module < seen.total / 2
        assert 0 < seen.peak <= seen.largest_module
        assert seen.unpartitioned == 0
        dp_size = case.world // case.tp
        assert seen.total <= dp_size * seen.local < 1.05 * seen.total


def test_cases_do_not_influence_each_other(outcomes: JobResults) -> None:
    """The first case, repeated after all others on the same ranks, is equal bit for bit."""
    for run, again in zip(outcomes.of(CASES[0].name), outcomes.of(REPEATED), strict=True):
        assert differing_bits(run, again) == []


def test_only_a_run_that_amplifies_rounding_may_differ_by_more() -> None:
    """Four times the error of one process from a moved start, and from the step on that has it."""

    def run(*offsets: float) -> Run:
        tensors = [{"w": torch.tensor([1.0, offset])} for offset in offsets]
        return Run([1.0] * len(offsets), [1.0] * len(offsets), tensors, [{"w": torch.ones(2)}] * 3)

    def found(one: Run, moved: Run) -> list[str]:
        return differences(one, run(0.0, 0.0), moved=lambda _: moved)

    assert found(run(0.0, 2e-5), run(0.0, 2e-6)) != []
    assert found(run(0.0, 2e-5), run(0.0, 6e-6)) == []
    assert found(run(0.0, 3e-5), run(0.0, 6e-6)) != []
    assert found(run(2e-5, 0.0), run(0.0, 6e-6)) != []
    assert found(run(2e-5, 2e-5), run(6e-6, 0.0)) == []


def test_comparison_detects_a_wrong_gradient() -> None:
    """One element off by 2e-5 of the largest element is a difference."""
    reference = Run([1.0], [1.0], [{"w": torch.tensor([1.0, 0.1])}], [{"w": torch.ones(2)}] * 2)
    wrong = Run([1.0], [1.0], [{"w": torch.tensor([1.0, 0.10002])}], [{"w": torch.ones(2)}] * 2)
    assert differences(reference, reference) == []
    assert len(differences(wrong, reference)) == 1
    assert len(differences(Run(), reference)) == 4
