"""--compile: compiled layers give the losses and weights of eager layers.

With dropout, compiled layers are comparable with eager ones only if inductor falls back to torch's
random numbers. Inductor's own numbers are compared between stored and recomputed activations.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor import config as inductor

from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case
from tests.dist.rank_jobs import (
    Job,
    JobResults,
    Jobs,
    case_training,
    has_proofs,
    run_by_world,
    use_torch_random_numbers,
)
from tests.dist.reference import Run

ONE_PROCESS = Case(1, 1, 1, 4, "learned", "adamw")
ZERO3 = Case(2, 3, 1, 1, "learned", "adamw")
FOLDED = {"parallel": {"pipeline_schedule": "dualpipev"}}
TWO_STAGES = Case(2, 1, 1, 4, "learned", "adamw", FOLDED, pp=2)
STAGED_MODEL = {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.2}
WITH_DROPOUT = Case(2, 1, 2, 1, "latent", "adamw")


def job(case: Case, compiled: bool, probe: Any = None, **changes: Any) -> Job:
    runtime = {"seed": parity_cases.SEED, "compile": compiled}
    return case_training(case, probe, runtime=runtime, **changes)


def with_dropout(granularity: str | None, compiled: bool, probe: Any) -> Job:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    recompute = {"recompute_granularity": granularity}
    return job(WITH_DROPOUT, compiled, probe, model=dropout, recompute=recompute)


def use_inductor_random_numbers(engine: Any) -> None:
    """Compiled dropout draws its own numbers, as by default."""
    inductor.fallback_random = False


def of_one_process() -> Jobs:
    """The jobs of one rank, which only proofs need."""
    return Jobs(
        (f"one-{on}", job(ONE_PROCESS, on, use_torch_random_numbers, model=STAGED_MODEL))
        for on in (False, True)
    )


def proofs() -> Jobs:
    """The jobs of two ranks that `make test` leaves out."""
    jobs = Jobs(
        (f"own-{granularity}", with_dropout(granularity, True, use_inductor_random_numbers))
        for granularity in (None, "full")
    )
    jobs["stages"] = job(TWO_STAGES, True, use_torch_random_numbers, model=STAGED_MODEL)
    # Last: eager ZeRO-3 leaves DeepSpeed's linear layer in torch.
    jobs |= ((f"zero3-{compiled}", job(ZERO3, compiled)) for compiled in (True, False))
    return jobs


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    two = Jobs(
        (f"selective-{compiled}", with_dropout("selective", compiled, use_torch_random_numbers))
        for compiled in (True, False)
    )
    if not has_proofs(request):
        return run_by_world({2: two})
    two |= proofs()
    return run_by_world({1: of_one_process(), 2: two})


def assert_same(compiled: list[Run], others: list[Run]) -> None:
    for run, other in zip(compiled, others, strict=True):
        assert run.notes["compiled"] > 0
        assert differences(run, other) == []


def assert_eager(runs: list[Run]) -> list[Run]:
    assert [run.notes["compiled"] for run in runs] == [0] * len(runs)
    return runs


PROOFS = ("one-True", "own-None", "own-full", "stages")


@pytest.mark.parametrize(
    "name", ["selective-True", *(pytest.param(n, marks=pytest.mark.proof) for n in PROOFS)]
)
def test_there_is_no_graph_break(name: str, outcomes: JobResults) -> None:
    """Under ZeRO-3 DeepSpeed's hooks, which gather the parameters, break the graphs.

    Claim (precision): compiled layers are complete graphs, with attention dropout too, except where
    DeepSpeed's hooks gather parameters (ZeRO 3)
    """
    for run in outcomes.of(name):
        assert run.notes["compiled"] > 0
        assert run.notes["graph breaks"] == 0


@pytest.mark.proof
def test_one_process_matches_eager(outcomes: JobResults) -> None:
    """Claim (precision): `--compile` equals eager execution, within 1e-5 in fp32"""
    assert_same(outcomes.of("one-True"), assert_eager(outcomes.of("one-False")))


@pytest.mark.proof
def test_stages_match_one_eager_process(outcomes: JobResults) -> None:
    assert_same(outcomes.of("stages"), outcomes.of("one-False") * 2)


@pytest.mark.proof
def test_zero3_matches_eager(outcomes: JobResults) -> None:
    """Claim (precision): and under ZeRO 3"""
    assert_same(outcomes.of("zero3-True"), assert_eager(outcomes.of("zero3-False")))


def test_tensor_parallel_recomputed_dropout_matches_eager(outcomes: JobResults) -> None:
    """Claim (precision): and so it does with tensor parallelism, dropout and activation
    checkpointing (dropout from torch's generator)

    Claim (precision): `--compile` equals eager execution, within 1e-5 in fp32
    """
    assert_same(outcomes.of("selective-True"), assert_eager(outcomes.of("selective-False")))


@pytest.mark.proof
def test_full_recomputation_repeats_compiled_dropout_masks(outcomes: JobResults) -> None:
    assert_same(outcomes.of("own-full"), outcomes.of("own-None"))
