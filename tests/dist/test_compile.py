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
from tests.dist.rank_jobs import Job, JobResults, case_training, run_jobs

ONE_PROCESS = Case(1, 1, 1, 4, "learned", "adamw")
ZERO3 = Case(2, 3, 1, 1, "learned", "adamw")
TWO_STAGES = Case(2, 1, 2, 4, "learned", "adamw")
"""Of tensor-parallel size 1: the pipeline has the two processes, with two stages each."""
STAGES = {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipev"}
STAGED_MODEL = {"num_layers": 4, "hidden_dropout": 0.1, "attention_dropout": 0.2}
WITH_DROPOUT = Case(2, 1, 2, 1, "gqa", "adamw")


def job(case: Case, compiled: bool, probe: Any = None, **changes: Any) -> Job:
    runtime = {"seed": parity_cases.SEED, "compile": compiled}
    return case_training(case, probe, runtime=runtime, **changes)


def with_dropout(granularity: str | None, compiled: bool, probe: Any) -> Job:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
    recompute = {"recompute_granularity": granularity}
    return job(WITH_DROPOUT, compiled, probe, model=dropout, recompute=recompute)


def use_torch_random_numbers(engine: Any) -> None:
    """Compiled dropout draws the numbers of eager dropout."""
    inductor.fallback_random = True


def use_inductor_random_numbers(engine: Any) -> None:
    """Compiled dropout draws its own numbers, as by default."""
    inductor.fallback_random = False


@pytest.fixture(scope="module")
def one_process() -> JobResults:
    jobs = {
        str(compiled): job(ONE_PROCESS, compiled, use_torch_random_numbers, model=STAGED_MODEL)
        for compiled in (False, True)
    }
    return run_jobs(1, jobs)


@pytest.fixture(scope="module")
def two_ranks() -> JobResults:
    jobs = {}
    for name, granularity in {"stored": None, "full": "full"}.items():
        jobs[f"own-{name}"] = with_dropout(granularity, True, use_inductor_random_numbers)
    one = {"tensor_model_parallel_size": 1}
    jobs["stages"] = job(
        TWO_STAGES, True, use_torch_random_numbers, parallel=STAGES | one, model=STAGED_MODEL
    )
    for compiled in (True, False):  # eager ZeRO-3 leaves DeepSpeed's linear layer in torch
        jobs[f"zero3-{compiled}"] = job(ZERO3, compiled)
        jobs[f"selective-{compiled}"] = with_dropout(
            "selective", compiled, use_torch_random_numbers
        )
    return run_jobs(2, jobs)


def assert_same(two_ranks: JobResults, compiled: str, eager: str) -> None:
    for one, other in zip(two_ranks.of(compiled), two_ranks.of(eager), strict=True):
        assert one.notes["compiled"] > 0
        assert other.notes["compiled"] == 0
        assert differences(one, other) == []


def test_there_is_no_graph_break(one_process: JobResults, two_ranks: JobResults) -> None:
    """Under ZeRO-3 DeepSpeed's hooks, which gather the parameters, break the graphs."""
    runs = [*one_process.of("True")]
    for name in ("selective-True", "own-stored", "own-full", "stages"):
        runs += two_ranks.of(name)
    assert [run.notes["graph breaks"] for run in runs] == [0] * len(runs)


def test_one_process_matches_eager(one_process: JobResults) -> None:
    assert_same(one_process, "True", "False")


def test_stages_match_one_eager_process(one_process: JobResults, two_ranks: JobResults) -> None:
    (eager,) = one_process.of("False")
    for run in two_ranks.of("stages"):
        assert run.notes["compiled"] > 0
        assert differences(run, eager) == []


def test_zero3_matches_eager(two_ranks: JobResults) -> None:
    assert_same(two_ranks, "zero3-True", "zero3-False")


def test_tensor_parallel_recomputed_dropout_matches_eager(two_ranks: JobResults) -> None:
    assert_same(two_ranks, "selective-True", "selective-False")


def test_full_recomputation_repeats_compiled_dropout_masks(two_ranks: JobResults) -> None:
    for one, other in zip(two_ranks.of("own-full"), two_ranks.of("own-stored"), strict=True):
        assert one.notes["compiled"] > 0
        assert differences(one, other) == []
