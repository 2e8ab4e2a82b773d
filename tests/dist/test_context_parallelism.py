"""Context-parallel ranks, with any number of heads, train like one process.

`test_layouts.py` has every pair with other options. Here are the kinds of attention, positions,
documents and experts, four ranks, and loss masks of which the ranks have unequal shares.
"""

from __future__ import annotations

import copy

import pytest

from tests.dist.compare import differing_bits
from tests.dist.parity_cases import (
    SAMPLES,
    SEED,
    Case,
    config_of,
    plans_of,
    train_alone,
)
from tests.dist.rank_jobs import (
    JobResults,
    Jobs,
    case_training,
    run_by_world,
    selected,
    training,
)
from tests.dist.reference import EOD, Samples, train_reference
from tests.proofs.cases import with_proofs
from tests.tables import tables

TABLES = tables(__file__, tuple)

LAYOUTS = {name: Case(**row) for name, row in TABLES["layouts"].items()}
PROOFS = [name for name in list(LAYOUTS)[1:] if name not in TABLES["in_make_test"]]
MASKED = Case(4, 1, 1, 4, "learned", "adamw", {"data": {"eod_mask_loss": True}}, cp=4)
SEEDED = {"model": {"attention_dropout": 0.2, "hidden_dropout": 0.2}, "runtime": {"seed": SEED}}
DROPPING = Case(2, 1, 1, 1, "learned", "sgd", SEEDED, cp=2)
FULL = {"recompute": {"recompute_granularity": "full"}}
OTHER_JOBS = {
    "test_a_rank_may_have_no_counted_token": ("masked",),
    "test_recomputation_drops_what_was_dropped": ("dropout", "dropout full"),
}
"""The jobs of tests that are not of one layout."""


def masked_samples() -> Samples:
    """Samples without a loss in the chunks of the first two of four ranks."""
    masked = copy.copy(SAMPLES)
    masked._tokens = SAMPLES._tokens.copy()
    chunk = SAMPLES.seq_length // 8
    masked._tokens[:, : 2 * chunk + 1] = EOD
    masked._tokens[:, -2 * chunk - 1 :] = EOD
    return masked


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    """The jobs of the selected tests, on one set of two ranks and one of four."""
    cases = {**LAYOUTS, "masked": MASKED, "dropout": DROPPING, "dropout full": DROPPING}
    jobs = Jobs((name, case_training(case)) for name, case in LAYOUTS.items())
    jobs |= {
        "masked": training(config_of(MASKED), plans_of(MASKED), masked_samples()),
        "dropout": case_training(DROPPING),
        "dropout full": case_training(DROPPING, **FULL),
    }
    needed: dict[int, Jobs] = {}
    for test, params in selected(request):
        for name in OTHER_JOBS.get(test) or (params["name"],):
            needed.setdefault(cases[name].world, Jobs()).setdefault(name, jobs[name])
    return run_by_world(needed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("two ranks", marks=pytest.mark.smoke),
        *with_proofs(list(LAYOUTS)[1:], PROOFS),
    ],
)
def test_context_parallel_ranks_train_like_one_process(name: str, outcomes: JobResults) -> None:
    """Claim (parallel): context-parallel ranks train like one process, with any number of heads,
    with windows, sinks, ALiBi, learned positions, latent attention, multi-token prediction,
    documents, experts and Ulysses, and with each `--cp-comm-type`"""
    assert outcomes.differences(name, train_alone(LAYOUTS[name])) == []


def test_a_rank_may_have_no_counted_token(outcomes: JobResults) -> None:
    """All masked tokens are in the chunks of two ranks, which have the full mean and gradient."""
    config = config_of(MASKED)
    size = config.schedule.micro_batch_size
    reference = train_reference(config, masked_samples(), plans_of(MASKED), size)
    assert reference.losses[0] > 1.0
    assert outcomes.differences("masked", reference) == []


def test_recomputation_drops_what_was_dropped(outcomes: JobResults) -> None:
    pairs = zip(outcomes.of("dropout"), outcomes.of("dropout full"), strict=True)
    for stored, recomputed in pairs:
        assert differing_bits(recomputed, stored) == []
