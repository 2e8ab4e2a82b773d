"""The best learning rate of a small model is that of a large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import transfer
from tests.fork_server import REPOSITORY

RECORD = REPOSITORY / "benchmarks" / "results" / "transfer.json"
SCATTER = 0.03
"""Most difference of losses from recorded ones, which other processors and libraries may have."""


@pytest.fixture(scope="module")
def recorded() -> dict[transfer.Case, transfer.Result]:
    """The runs of all seeds."""
    return transfer.recorded_runs(RECORD)


def test_the_best_rate_is_the_vertex_of_the_losses_around_the_smallest() -> None:
    rates = (-10, -9.5, -9, -8.5, -8, -7.5, -7, -6)
    losses = {rate: 2 + 0.1 * (rate + 8.3) ** 2 for rate in rates}
    assert transfer.best_rate(losses) == pytest.approx(-8.3)
    # Losses further away than a factor of two do not count.
    assert transfer.best_rate({**losses, -10: 9.0, -6: 9.0}) == pytest.approx(-8.3)
    assert transfer.best_rate({**losses, -9: 2.2}) != pytest.approx(-8.3, abs=0.02)
    whole = {rate: losses[rate] for rate in rates if rate == round(rate)}
    assert transfer.best_rate(whole) == pytest.approx(-8.3)
    assert transfer.best_rate({rate: float(rate) for rate in rates}) == -10
    assert transfer.best_rate({**losses, -7.5: float("inf")}) == -8.5


@pytest.mark.proof
def test_the_best_rate_transfers_with_mup_alone(
    recorded: dict[transfer.Case, transfer.Result],
) -> None:
    """Claim (precision): with muP the best learning rates at width 64 and at 512, and at depth 2
    and at 16, agree within a factor of 1.4; without it neither do, and the deeper model has a
    larger loss at the rate of the base"""
    options = transfer.parse(["--finer", "--output", str(RECORD)])
    runs = transfer.comparable(options, recorded)
    assert len(runs) == 255
    for study in transfer.studies(options):
        factors = transfer.factors(options, runs, study)
        assert factors.pop(transfer.MUP) <= transfer.TOLERANCE, study
        assert min(factors.values()) > transfer.TOLERANCE, study
    _, losses = transfer.losses_at_base_rate(options, runs, "depth")
    assert losses[transfer.PLAIN] > losses[transfer.MUP] + 0.05


@pytest.mark.proof
def test_models_at_both_ends_have_the_recorded_losses(
    recorded: dict[transfer.Case, transfer.Result], tmp_path: Path
) -> None:
    """Claim (precision): the recorded losses of the smallest, the widest and the deepest models,
    from which the transfer of learning rates follows, are those that training gives"""
    output = tmp_path / "transfer.json"
    ends = ["--widths", "64", "512", "--depths", "2", "16", "--seeds", "1"]
    rates = ["--rates", "-9", "-8", "-7"]
    options = transfer.parse([*ends, *rates, "--output", str(output), "--workers", "2"])
    transfer.run(options)
    runs = transfer.recorded_runs(output)
    assert len(runs) == 15
    for case, result in runs.items():
        assert result.loss == pytest.approx(recorded[case].loss, abs=SCATTER), case
