"""--sequence-parallel: norms, dropout and residuals on S / TP train as one process.

`test_layouts.py` has every pair with other options. Here are four tensor-parallel ranks, which
share a sequence, the masks of dropout, and documents.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, reference_of, train_alone
from tests.dist.rank_jobs import (
    Job,
    JobResults,
    Jobs,
    case_training,
    run_by_world,
    selected,
)
from tests.proofs.cases import with_proofs

CASES = [Case(2, 2, 2, 1, "ahead", "adamw"), Case(4, 1, 4, 1, "rope", "sgd")]
LEARNED = Case(2, 1, 2, 2, "learned", "adamw")
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.2}
HIDDEN_DROPOUT_CASES: dict[str, dict[str, dict[str, Any]]] = {
    "stored": {},
    "selective": {"recompute": {"recompute_granularity": "selective"}},
    "compiled": {"runtime": {"compile": True}},
}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True}
PACKED = dataclasses.replace(LEARNED, changes={"data": DOCUMENTS}, ends=0.2)


def check_shapes(engine: Any) -> None:
    """Every layer's output is S / TP of the sequence."""

    def check(layer: Any, inputs: Any, output: Any) -> None:
        assert layer.group.sequence_parallel
        assert output.shape[0] == parity_cases.SHAPE["seq_length"] // layer.group.size
        assert inputs[0].shape == output.shape

    for layer in engine.module.layers.values():
        layer.register_forward_hook(check)


def job(case: Case, *, shard: bool = True, probe: Any = check_shapes, **changes: Any) -> Job:
    parallel = {"sequence_parallel": shard}
    return case_training(case, probe if shard else None, parallel=parallel, **changes)


def jobs(names: Iterable[str]) -> Jobs:
    """The trainings on two ranks other than `CASES`, with those of hidden dropout."""
    found = Jobs(
        {
            "dropout": job(LEARNED, model=DROPOUT),
            "replicated": job(LEARNED, model=DROPOUT, shard=False),
            "documents": job(PACKED),
        }
    )
    for name in names:
        changes = HIDDEN_DROPOUT_CASES[name]
        found[name] = job(LEARNED, model={"hidden_dropout": 0.2}, **changes)
    return found


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """What the selected tests need."""
    tests = list(selected(request))
    cases = [params["case"] for _, params in tests if "case" in params]
    needed = {2: Jobs(), 4: Jobs()}
    for case in cases:
        needed[case.world][case.name] = job(case)
    if len(cases) < len(tests):
        needed[2] |= jobs(dict.fromkeys(params["name"] for _, params in tests if "name" in params))
    return run_by_world(needed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_equals_one_process(case: Case, outcomes: JobResults) -> None:
    """Claim (parallel): sequence parallelism (`--sequence-parallel`) trains exactly like a single
    process, with its dropout masks"""
    assert outcomes.differences(case.name, reference_of(case.model, case.optimizer)) == []


@pytest.mark.parametrize("name", with_proofs(HIDDEN_DROPOUT_CASES, ["compiled"]))
def test_dropout_masks_are_those_of_one_process(name: str, outcomes: JobResults) -> None:
    """Claim (parallel): sequence parallelism (`--sequence-parallel`) trains exactly like a single
    process, with its dropout masks"""
    reference = train_alone(
        dataclasses.replace(LEARNED, changes={"model": {"hidden_dropout": 0.2}})
    )
    assert outcomes.differences(name, reference) == []
    for run in outcomes.of(name):
        assert (run.notes["compiled"] > 0) == (name == "compiled")
        assert run.notes["graph breaks"] == 0


def test_attention_dropout_is_that_without_sequence_parallelism(outcomes: JobResults) -> None:
    pairs = zip(outcomes.of("dropout"), outcomes.of("replicated"), strict=True)
    for run, replicated in pairs:
        assert differences(run, replicated) == []


def test_packed_documents_equal_one_process(outcomes: JobResults) -> None:
    assert outcomes.differences("documents", train_alone(PACKED)) == []
