"""Layouts of docs/reference/support_matrix.md train like one process, and the others are rejected.

Every pair of values that the matrix accepts is in one of the runs, whose configurations are those
of its flags. `make test` has every value, and every pair of values of the axes `layouts.BASIC`. The
proofs have all, take more steps, and draw further whole layouts at random: those that the matrix
accepts equal one process, too.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from megatron_ds.config import support_matrix
from tests.dist import layouts
from tests.dist.compare import (
    DECIDED_STEPS,
    MOVED_STARTS,
    MOVED_STARTS_IN_FP8,
    decided_steps,
    differences,
    differences_in_half_precision,
)
from tests.dist.layouts import RunLayout, name_of
from tests.dist.offload_harness import WITHOUT_LIBAIO, swapping
from tests.dist.rank_jobs import Job, JobResults, Jobs, run_by_world, selected, training
from tests.dist.recorded import Replay
from tests.dist.reference import Run
from tests.problems import codes
from tests.proofs.cases import with_proofs
from tests.tables import UniqueNames

STEPS = 2
"""Steps of a run in `make test`, and of one that is drawn; proofs have `layouts.STEPS`."""
COUNT = 30
"""Layouts that are drawn and run."""
SEED = 7
"""Seed of the draw."""
EXACT_GAP = 1e-5
"""By how much rounding to fp32 may lower the score of a chosen expert."""
HALF_GAP = 0.1
"""By how much rounding to half precision may lower it; scores differ by about 0.5."""
COVERING = UniqueNames((name_of(run), run) for run in layouts.covering())
BASIC = set(map(name_of, layouts.basic()))
"""The runs of `make test`."""
ON_DISK = [name for name, run in COVERING.items() if run["offload"] in layouts.ON_DISK]


@dataclass(frozen=True)
class Stepped:
    """A run of some steps."""

    name: str
    run: RunLayout
    steps: int

    @property
    def key(self) -> str:
        return f"{self.name}, {self.steps} steps"

    def job(self) -> Job:
        config, problems = layouts.configure(self.run)
        assert problems == [], self.name
        plans = layouts.plans_of(self.run, config)[: self.steps]
        # Signs that rounding decides are searched in the weights after every step of Lion.
        tensors_of = None if self.run["optimizer"] == "lion" else {1, self.steps}
        masks = self.run["dropout"] == "all"
        samples = layouts.samples_of(self.run)
        return swapping(
            training(config, plans, samples, records_masks=masks, tensors_of=tensors_of)
        )


def with_steps(name: str, run: RunLayout, steps: int) -> Stepped:
    """A run of these steps, or of one, after which rounding errors of one process are larger."""
    return Stepped(name, run, 1 if layouts.amplifies_rounding(run) else steps)


@functools.cache
def random_runs() -> list[Stepped]:
    drawn = layouts.random_runs(SEED, COUNT, accepted=True)
    return [with_steps(name_of(run), run, STEPS) for run in drawn]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """The selected runs, by one set of ranks of each size."""
    chosen: list[Stepped] = []
    for test, params in selected(request):
        if test == test_random_layouts_equal_one_process.__name__:
            chosen += random_runs()
        elif "run" in params and not (params["run"].name in ON_DISK and WITHOUT_LIBAIO):
            chosen.append(params["run"])
    jobs = {int(size): Jobs() for size in layouts.VALUES["world"]}
    for stepped in chosen:
        # A layout may be drawn twice; its name has the value of each axis.
        jobs[int(stepped.run["world"])].setdefault(stepped.key, stepped.job())
    return run_by_world(jobs)


def check(stepped: Stepped, outcomes: JobResults) -> list[str]:
    """What differs from one process on any rank."""
    name = stepped.name
    run = stepped.run
    results = outcomes.of(stepped.key)
    is_exact = run["precision"] == "fp32"

    def replayed() -> Replay | None:
        has_decisions = layouts.has_decisions(run)
        return Replay([each.recorded for each in results]) if has_decisions else None

    def moved(seed: int) -> Run:
        return layouts.reference_of(run, stepped.steps, replayed(), seed)

    starts = MOVED_STARTS if run["fp8"] == "off" else MOVED_STARTS_IN_FP8
    exactly = partial(differences, moved=moved, starts=starts)
    compare = exactly if is_exact else differences_in_half_precision
    replay = replayed()
    reference = layouts.reference_of(run, stepped.steps, replay)
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


def cases(steps: int) -> list[Any]:
    """The covering array as parameters, of which some are on a disk."""
    return [
        pytest.param(
            with_steps(name, run, steps),
            id=name,
            marks=[
                *([pytest.mark.libaio] if name in ON_DISK else []),
                *([] if name in BASIC else [pytest.mark.proof]),
            ],
        )
        for name, run in COVERING.items()
    ]


@pytest.mark.parametrize("run", cases(STEPS))
def test_layout_equals_one_process(
    run: Stepped, outcomes: JobResults, record_property: Callable[[str, str], None]
) -> None:
    """Claim (logging): zeros of the gradient and norms of gradients, parameters and updates by
    layer equal the full tensors', in every layout and at every ZeRO stage

    Claim (precision): Muon equals one process, with full matrices and the gradient clipped before
    the step, at every ZeRO stage, with and without tensor parallelism, within 1e-5 in fp32

    Claim (precision): Lion equals one process at every ZeRO stage, with and without tensor
    parallelism, within 1e-5 in fp32

    Claim (parallel): ranks that share every sequence (DeepSpeed-Ulysses) train like one process,
    also with fewer key-value heads than ranks, with unequal loss masks, and together with
    `--sequence-parallel`

    Claim (parallel): pipeline stages equal one process: ZeRO 0 and 1 x tensor and data parallelism,
    tied embeddings, accumulation, clipping, dropout, documents, changing lengths and batches; with
    one stage per rank (1F1B) and two (DualPipeV)

    Claim (parallel): every pair of values that the [support matrix](../reference/support_matrix.md)
    accepts equals one process; `make test` has every value, and every pair of ZeRO stages and
    parallel sizes

    Claim (parallel): ZeRO 0 to 3 x tensor parallelism x accumulation x model variants equal one
    process

    Claim (parallel): experts on every rank, or distributed over 2 or 4, train exactly like a single
    process, with ZeRO, tensor parallelism, Ulysses, pipeline stages and Muon; with tensor
    parallelism also as a plain loop over experts, five steps

    Claim (parallel): sequence parallelism (`--sequence-parallel`) trains exactly like a single
    process, with its dropout masks
    """
    # For the record of the pairs that ran with a version of DeepSpeed.
    layout = {axis: run.run[axis] for axis in support_matrix.AXES}
    record_property("layout", json.dumps(layout))
    assert check(run, outcomes) == []


@pytest.mark.proof
@pytest.mark.parametrize("run", cases(layouts.STEPS))
def test_ten_steps_equal_one_process(run: Stepped, outcomes: JobResults) -> None:
    assert check(run, outcomes) == []


@pytest.mark.proof
def test_random_layouts_equal_one_process(outcomes: JobResults) -> None:
    """Claim (parallel): so do complete layouts that are drawn at random"""
    found = [check(run, outcomes) for run in random_runs()]
    assert list(itertools.chain(*found)) == []


@pytest.mark.parametrize("count", with_proofs([100, 300], [300]))
def test_command_line_accepts_what_the_matrix_accepts(count: int) -> None:
    """Claim (parallel): the command line accepts exactly the layouts that the matrix accepts"""
    known = {rule.code for rule in support_matrix.RULES}
    for run in layouts.random_runs(SEED, count, accepted=False):
        config, problems = layouts.configure(run)
        accepted = not support_matrix.broken_rules(support_matrix.layout_of(config))
        assert accepted == known.isdisjoint(codes(problems)), name_of(run)
        if layouts.is_accepted(run):
            assert problems == [], name_of(run)
