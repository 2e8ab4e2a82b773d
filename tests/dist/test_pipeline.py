"""Pipeline stages train like one process: four stages, every partition method, tied embeddings,
parameter groups, documents, batch sizes and lengths that change. `test_layouts.py` has every pair
with other options.

The reference is that of `test_parity.py`, within 1e-5: loss, norm, every gradient, every weight,
and the evaluation loss after every step but the last. The engine then releases its parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from tests.dist.compare import norm_of
from tests.dist.parity_cases import (
    SAMPLES_PER_STEP,
    SHAPE,
    Case,
    config_of,
    plans_of,
    samples_of,
    train_alone,
)
from tests.dist.rank_jobs import JobResults, Jobs, case_training, run_jobs, selected, training
from tests.dist.reference import Samples, evaluate_reference, train_reference
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)


CASES = {name: Case(**row) for name, row in TABLES["cases"].items()}


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> JobResults:
    """The selected cases, trained by one set of four ranks."""
    names = {params["name"] for _, params in selected(request) if "name" in params}
    jobs = Jobs()
    for name, case in CASES.items():
        if name in names:
            probe = partial(check_layers, case.changes.get("parallel", {}))
            jobs[name] = case_training(case, probe, every_step=True)
    return run_jobs(4, jobs)


def check_layers(parallel: Mapping[str, Any], engine: Any) -> None:
    for layer in engine.module.layers.values():
        assert layer.group.sequence_parallel == parallel.get("sequence_parallel", False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tensor-and-stages", marks=pytest.mark.smoke),
        *with_proofs(list(CASES)[1:], ["listed-layers", "lengths-and-batches", "folded"]),
    ],
)
def test_stages_equal_one_process(name: str, results: JobResults) -> None:
    """Claim (logging): zeros of the gradient and norms of gradients, parameters and updates by
    layer equal the full tensors', in every layout and at every ZeRO stage

    Claim (parallel): pipeline stages equal one process: ZeRO 0 and 1 x tensor and data parallelism,
    tied embeddings, accumulation, clipping, dropout, documents, changing lengths and batches; with
    one stage per rank (1F1B) and two (DualPipeV)

    Claim (parallel): and so it does with pipeline stages

    Claim (parallel): multi-token prediction on the last pipeline stage equals one process, with
    tied and learned embeddings, loss per token, tensor and sequence parallelism, and documents
    """
    case = CASES[name]
    config = config_of(case)
    reference = train_alone(case)
    size = None if "optimizer" in case.changes else case.micro_batch_size
    count = SAMPLES_PER_STEP // min(case.accumulation, 2)
    evaluations = [
        evaluate_reference(config, samples_of(case), weights, size, count=count)
        for weights in reference.weights[1:-1]
    ]
    assert results.differences(name, reference) == []
    for run in results.of(name):
        assert run.rates == reference.rates
        assert run.evaluations == pytest.approx(evaluations, rel=1e-5)
        assert run.notes["params norm"] == pytest.approx(norm_of(reference.weights[-1]), rel=1e-5)


def test_copies_of_a_tied_embedding_stay_equal_on_three_replicas() -> None:
    """The sum over three ranks depends on their order, which two stages may have differently.

    `train` compares the copies of weights and gradients bit by bit.

    Claim (parallel): with pipeline stages on three replicas, both copies of a tied embedding and of
    its gradient are equal bit for bit after four steps
    """
    steps = 4
    replicas = 3
    jobs = Jobs()
    references = {}
    for stage, precision in ((0, "fp32"), (1, "fp32"), (1, "bf16")):
        case = Case(
            2 * replicas,
            stage,
            1,
            1,
            "tied",
            "adamw",
            {
                "schedule": {"micro_batch_size": 1, "global_batch_size": replicas},
                "precision": {"bf16": precision == "bf16"},
            },
            pp=2,
        )
        config = config_of(case, schedule={"train_iters": steps})
        plan = dataclasses.replace(plans_of(case)[0], global_batch_size=replicas)
        plans = [dataclasses.replace(plan, iteration=number + 1) for number in range(steps)]
        samples = Samples(replicas * steps, SHAPE)
        name = f"zero{stage}-{precision}"
        jobs[name] = training(config, plans, samples, tensors_of={steps})
        references[name] = train_reference(config, samples, plans)
    results = run_jobs(2 * replicas, jobs)
    for name, reference in references.items():
        tolerance = 1e-5 if name.endswith("fp32") else 1e-2
        for run in results.of(name):
            assert run.losses == pytest.approx(reference.losses, rel=tolerance)
            assert run.norms == pytest.approx(reference.norms, rel=10 * tolerance)
