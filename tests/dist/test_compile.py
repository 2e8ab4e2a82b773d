"""--compile: layers compiled by torch give the losses and weights of layers that are not.

With dropout the compiled layers must draw torch's numbers to be comparable; inductor's own are
held against themselves, stored and recomputed.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import config as inductor

from megatron_ds.config import Config, RecomputeConfig, RuntimeConfig
from tests.dist import parity_cases
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.compare import differences
from tests.dist.rank_jobs import Job, Outcomes, run_jobs
from tests.dist.reference import Samples

SAMPLES = Samples(parity_cases.STEPS * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)
ALONE = Case(1, 1, 1, 1, "learned", "adamw")
ZERO3 = Case(2, 3, 1, 1, "learned", "adamw")
DROPPED = Case(2, 1, 2, 1, "gqa", "adamw")
RECOMPUTED = {
    granularity: RecomputeConfig(recompute_granularity=granularity)
    for granularity in ("selective", "full")
}


def config(case: Case, folder: Path, *, compiled: bool) -> Config:
    return dataclasses.replace(
        config_of(case, folder), runtime=RuntimeConfig(seed=parity_cases.SEED, compile=compiled)
    )


def with_dropout(folder: Path, recompute: RecomputeConfig, *, compiled: bool) -> Config:
    plain = config(DROPPED, folder, compiled=compiled)
    model = dataclasses.replace(plain.model, attention_dropout=0.1, hidden_dropout=0.1)
    return dataclasses.replace(plain, model=model, recompute=recompute)


def torchs_numbers(engine: Any) -> None:
    """Compiled dropout draws what torch draws."""
    inductor.fallback_random = True


def inductors_numbers(engine: Any) -> None:
    """Compiled dropout draws its own numbers, as in a user's run."""
    inductor.fallback_random = False


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("alone")
    jobs = [
        Job(f"{compiled}", config(ALONE, folder, compiled=compiled), plans_of(ALONE), SAMPLES)
        for compiled in (False, True)
    ]
    return run_jobs(1, jobs, folder)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    folder = tmp_path_factory.mktemp("compile")
    jobs, plans = [], plans_of(DROPPED)
    for compiled in (False, True):
        setting = config(ZERO3, folder, compiled=compiled)
        jobs.append(Job(f"zero3-{compiled}", setting, plans_of(ZERO3), SAMPLES))
    for way, recompute in RECOMPUTED.items():
        for compiled in (False, True):
            setting = with_dropout(folder, recompute, compiled=compiled)
            jobs.append(Job(f"{way}-{compiled}", setting, plans, SAMPLES, torchs_numbers))
    for name, recompute in {"stored": RecomputeConfig(), "full": RECOMPUTED["full"]}.items():
        setting = with_dropout(folder, recompute, compiled=True)
        jobs.append(Job(f"own-{name}", setting, plans, SAMPLES, inductors_numbers))
    return run_jobs(2, jobs, folder)


def assert_same(outcomes: Outcomes, compiled: str, eager: str) -> None:
    for one, other in zip(outcomes.of(compiled), outcomes.of(eager), strict=True):
        assert one.notes["compiled"] > 0
        assert other.notes["compiled"] == 0
        assert differences(one, other) == []


def test_one_process_follows_eager(alone: Outcomes) -> None:
    assert_same(alone, "True", "False")


def test_zero3_follows_eager(outcomes: Outcomes) -> None:
    assert_same(outcomes, "zero3-True", "zero3-False")


@pytest.mark.parametrize("way", RECOMPUTED)
def test_tensor_parallel_with_dropout_recomputed_follows_eager(
    way: str, outcomes: Outcomes
) -> None:
    assert_same(outcomes, f"{way}-True", f"{way}-False")


def test_recomputation_draws_the_compiled_masks_again(outcomes: Outcomes) -> None:
    for one, other in zip(outcomes.of("own-full"), outcomes.of("own-stored"), strict=True):
        assert one.notes["compiled"] > 0
        assert differences(one, other) == []
