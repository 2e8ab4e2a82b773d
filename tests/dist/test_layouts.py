"""Layouts of docs/reference/support_matrix.md train like one process, and the others are rejected.

Every pair of values that the matrix accepts is in one of the runs, whose configurations are those
of its flags. Further whole layouts are drawn at random: those that the matrix accepts equal one
process, too, and the command line accepts exactly these. The number and the seed of the draws are

    MEGATRON_DS_RANDOM_LAYOUTS=200 MEGATRON_DS_LAYOUT_SEED=7 python -m pytest \
        tests/dist/test_layouts.py
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from megatron_ds.config import support_matrix
from tests.dist import layouts
from tests.dist.compare import (
    DECIDED_STEPS,
    decided_steps,
    differences,
    differences_in_half_precision,
)
from tests.dist.layouts import RunLayout, name_of
from tests.dist.offload_harness import WITHOUT_LIBAIO, swapping
from tests.dist.rank_jobs import JobResults, run_jobs, training
from tests.dist.recorded import Replay
from tests.problems import codes

COUNT = int(os.environ.get("MEGATRON_DS_RANDOM_LAYOUTS", "30"))
"""Layouts that are drawn and run."""
SEED = int(os.environ.get("MEGATRON_DS_LAYOUT_SEED", "7"))
"""Of the draws; the same in every run of the tests, unless another one is named."""
EXACT_GAP, HALF_GAP = 1e-5, 0.07
"""By how much rounding may lower the score of a chosen expert; scores differ by about 0.5."""
COVERING = {name_of(run): run for run in layouts.covering()}
ON_DISK = [name for name, run in COVERING.items() if run["offload"] in support_matrix.ON_DISK]


@functools.cache
def random_runs() -> dict[str, RunLayout]:
    return {name_of(run): run for run in layouts.random_runs(SEED, COUNT, accepted=True)}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """The selected runs, by one set of ranks of each size."""
    items = [item for item in request.session.items if item.path == request.path]
    names = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    runs = {name: COVERING[name] for name in names if name not in ON_DISK or not WITHOUT_LIBAIO}
    if any(item.name == test_random_layouts_equal_one_process.__name__ for item in items):
        runs |= random_runs()
    results: dict[str, list[Any]] = {}
    for world in layouts.VALUES["world"]:
        jobs = {}
        for name, run in runs.items():
            if run["world"] == world:
                config, problems = layouts.configure(run)
                assert problems == [], name
                plans = layouts.plans_of(run, config)[: steps_of(name)]
                # Signs that rounding decides are searched in the weights after every step of Lion.
                tensors_of = None if run["optimizer"] == "lion" else {1, len(plans)}
                jobs[name] = swapping(
                    training(
                        config,
                        plans,
                        layouts.samples_of(run),
                        records_masks=run["dropout"] == "all",
                        tensors_of=tensors_of,
                    )
                )
        results |= run_jobs(int(world), jobs).results
    return JobResults(results)


def steps_of(name: str) -> int:
    """Ten steps of a covering run, four if it accumulates on four ranks; two of a random run."""
    if name not in COVERING:
        return 2
    run = COVERING[name]
    return 4 if (run["world"], run["accumulation"]) == ("4", "4") else layouts.STEPS


def check(name: str, run: RunLayout, outcomes: JobResults) -> list[str]:
    """What differs from one process on any rank."""
    results = outcomes.of(name)
    is_exact = run["precision"] == "fp32"
    compare = differences if is_exact else differences_in_half_precision
    replay = None
    if layouts.has_decisions(run):
        replay = Replay([each.recorded for each in results])
    reference = layouts.reference_of(run, steps_of(name), replay)
    found = [
        f"{name}, rank {rank}: {difference}"
        for rank, result in enumerate(results)
        for difference in compare(result, reference)
    ]
    gap = EXACT_GAP if is_exact else HALF_GAP
    decisions = [] if replay is None else replay.problems(gap)
    if decisions and is_exact:  # after an update whose sign rounding has decided?
        decided = min(decided_steps(result, reference) for result in results)
        if DECIDED_STEPS <= decided < len(reference.losses):
            replay = Replay([each.recorded for each in results])
            layouts.reference_of(run, decided, replay)
            decisions = replay.problems(gap)
    return found + [f"{name}: {problem}" for problem in decisions]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.libaio) if name in ON_DISK else name
        for name in COVERING
    ],
    ids=lambda name: name,
)
def test_layout_equals_one_process(
    name: str, outcomes: JobResults, record_property: Callable[[str, str], None]
) -> None:
    # For the record of the pairs that ran with a version of DeepSpeed.
    layout = {axis: COVERING[name][axis] for axis in support_matrix.AXES}
    record_property("layout", json.dumps(layout))
    assert check(name, COVERING[name], outcomes) == []


def test_random_layouts_equal_one_process(outcomes: JobResults) -> None:
    print(f"MEGATRON_DS_LAYOUT_SEED={SEED}")
    found = [check(name, run, outcomes) for name, run in random_runs().items()]
    assert list(itertools.chain(*found)) == [], f"MEGATRON_DS_LAYOUT_SEED={SEED}"


def test_command_line_accepts_what_the_matrix_accepts() -> None:
    known = {rule.code for rule in support_matrix.RULES}
    for run in layouts.random_runs(SEED, 10 * COUNT, accepted=False):
        config, problems = layouts.configure(run)
        accepted = not support_matrix.broken_rules(support_matrix.layout_of(config))
        assert accepted == known.isdisjoint(codes(problems)), name_of(run)
        if layouts.is_accepted(run):
            assert problems == [], f"MEGATRON_DS_LAYOUT_SEED={SEED}"


def test_every_accepted_pair_is_in_a_run() -> None:
    """Checks the covering array independently of its construction."""
    found = set().union(*map(layouts.pairs_of, COVERING.values()))
    for one, other in itertools.combinations(support_matrix.AXES, 2):
        for pair in support_matrix.pairs(one, other):
            assert (frozenset(pair.items()) in found) == (support_matrix.obstacle(pair) is None), (
                pair
            )
