"""--compile: compiled layers give the losses and weights of eager layers.

With dropout, compiled layers are comparable with eager ones only if inductor falls back to torch's
random numbers. Inductor's own numbers are compared between stored and recomputed activations.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from torch._inductor import config as inductor

from megatron_ds.config import Config, RecomputeConfig, RuntimeConfig
from tests.dist import parity_cases
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, config_of, plans_of
from tests.dist.rank_jobs import Job, JobResults, run_jobs
from tests.dist.reference import Samples

SAMPLES = Samples(parity_cases.STEPS * parity_cases.SAMPLES_PER_STEP, parity_cases.SHAPE)
ONE_PROCESS = Case(1, 1, 1, 1, "learned", "adamw")
ZERO3 = Case(2, 3, 1, 1, "learned", "adamw")
WITH_DROPOUT = Case(2, 1, 2, 1, "gqa", "adamw")
RECOMPUTED = {
    granularity: RecomputeConfig(recompute_granularity=granularity)
    for granularity in ("selective", "full")
}


def config(case: Case, folder: Path, *, compiled: bool) -> Config:
    return dataclasses.replace(
        config_of(case, folder), runtime=RuntimeConfig(seed=parity_cases.SEED, compile=compiled)
    )


def with_dropout(folder: Path, recompute: RecomputeConfig, *, compiled: bool) -> Config:
    plain = config(WITH_DROPOUT, folder, compiled=compiled)
    model = dataclasses.replace(plain.model, attention_dropout=0.1, hidden_dropout=0.1)
    return dataclasses.replace(plain, model=model, recompute=recompute)


def use_torch_random_numbers(engine: Any) -> None:
    """Compiled dropout draws the numbers of eager dropout."""
    inductor.fallback_random = True


def use_inductor_random_numbers(engine: Any) -> None:
    """Compiled dropout draws its own numbers, as by default."""
    inductor.fallback_random = False


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("one-process")
    jobs = [
        Job(
            f"{compiled}",
            config(ONE_PROCESS, folder, compiled=compiled),
            plans_of(ONE_PROCESS),
            SAMPLES,
        )
        for compiled in (False, True)
    ]
    return run_jobs(1, jobs, folder)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> JobResults:
    folder = tmp_path_factory.mktemp("compile")
    jobs, plans = [], plans_of(WITH_DROPOUT)
    for compiled in (False, True):
        setting = config(ZERO3, folder, compiled=compiled)
        jobs.append(Job(f"zero3-{compiled}", setting, plans_of(ZERO3), SAMPLES))
    for way, recompute in RECOMPUTED.items():
        for compiled in (False, True):
            setting = with_dropout(folder, recompute, compiled=compiled)
            jobs.append(Job(f"{way}-{compiled}", setting, plans, SAMPLES, use_torch_random_numbers))
    for name, recompute in {"stored": RecomputeConfig(), "full": RECOMPUTED["full"]}.items():
        setting = with_dropout(folder, recompute, compiled=True)
        jobs.append(Job(f"own-{name}", setting, plans, SAMPLES, use_inductor_random_numbers))
    return run_jobs(2, jobs, folder)


def assert_same(two_ranks: JobResults, compiled: str, eager: str) -> None:
    for one, other in zip(two_ranks.of(compiled), two_ranks.of(eager), strict=True):
        assert one.notes["compiled"] > 0
        assert other.notes["compiled"] == 0
        assert differences(one, other) == []


def test_one_process_matches_eager(one_process: JobResults) -> None:
    assert_same(one_process, "True", "False")


def test_zero3_matches_eager(two_ranks: JobResults) -> None:
    assert_same(two_ranks, "zero3-True", "zero3-False")


@pytest.mark.parametrize("way", RECOMPUTED)
def test_tensor_parallel_recomputed_dropout_matches_eager(way: str, two_ranks: JobResults) -> None:
    assert_same(two_ranks, f"{way}-True", f"{way}-False")


def test_recomputation_repeats_compiled_dropout_masks(two_ranks: JobResults) -> None:
    for one, other in zip(two_ranks.of("own-full"), two_ranks.of("own-stored"), strict=True):
        assert one.notes["compiled"] > 0
        assert differences(one, other) == []
