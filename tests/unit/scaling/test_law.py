"""Fits of scaling laws to losses of synthetic laws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from megatron_ds.scaling.law import Array, Law, fit
from tests.proofs.cases import with_proofs

SIZES = np.array([1e7, 2e7, 4e7, 8e7, 1.6e8])
RATIOS = (5.0, 20.0, 80.0)
LARGE = 7e9


class Coefficients(NamedTuple):
    """Of L = E + A / N^alpha + B / D^beta."""

    e: float
    a: float
    alpha: float
    b: float
    beta: float

    def losses(self, parameters: Array, tokens: Array) -> Array:
        return self.e + self.a / parameters**self.alpha + self.b / tokens**self.beta


LAWS = (
    Coefficients(1.69, 406.4, 0.34, 410.7, 0.28),  # Hoffmann et al. 2022
    Coefficients(1.8172, 482.01, 0.3478, 2085.43, 0.3658),  # Besiroglu et al. 2024
    Coefficients(0.5, 20.0, 0.2, 60.0, 0.25),
)


def ladder(law: Coefficients) -> tuple[Array, Array]:
    """Parameters and tokens of each run, `[R, 2]`, and the losses."""
    parameters = np.repeat(SIZES, len(RATIOS))
    tokens = parameters * np.tile(RATIOS, len(SIZES))
    return np.stack([parameters, tokens], axis=1), law.losses(parameters, tokens)


def assert_recovered(result: Law, law: Coefficients, tolerance: float = 0.02) -> None:
    assert result.irreducible == pytest.approx(law.e, rel=tolerance)
    assert result.exponents == pytest.approx((law.alpha, law.beta), rel=tolerance)
    tokens = 20 * LARGE
    expected = law.losses(np.array([LARGE]), np.array([tokens]))[0]
    assert result.loss(LARGE, tokens) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("law", LAWS)
def test_a_law_of_parameters_and_tokens_is_recovered(law: Coefficients) -> None:
    """Claim (command-line): a ladder recovers the coefficients of synthetic scaling laws, and the
    loss of a model 40 times as large, within 2 %"""
    variables, losses = ladder(law)
    result = fit(("parameters", "tokens"), variables, losses, resamples=1)
    assert_recovered(result.law, law)
    assert np.exp(result.law.scales) == pytest.approx((law.a, law.b), rel=0.02)


@pytest.mark.parametrize("law", LAWS)
def test_a_run_that_failed_does_not_move_the_law(law: Coefficients) -> None:
    """The Huber loss bounds its influence; that of least squares is not bounded."""
    variables, losses = ladder(law)
    losses[7] *= 1.1
    result = fit(("parameters", "tokens"), variables, losses, resamples=1)
    assert_recovered(result.law, law)


def test_a_law_of_operations_is_recovered_from_four_runs() -> None:
    operations = np.array([1e15, 4e15, 1.6e16, 6.4e16])
    losses = 1.5 + 300 / operations**0.13
    law = fit(("operations",), operations[:, None], losses, resamples=1).law
    assert law.irreducible == pytest.approx(1.5, rel=0.02)
    assert law.exponents == pytest.approx((0.13,), rel=0.02)
    assert law.loss(1e18) == pytest.approx(1.5 + 300 / 1e18**0.13, rel=0.02)


@pytest.mark.parametrize(
    ("trials", "bounds"), with_proofs([(10, (0.5, 1.0)), (30, (0.65, 0.95))], [(30, (0.65, 0.95))])
)
def test_intervals_contain_as_many_further_runs_as_they_say(
    trials: int, bounds: tuple[float, float]
) -> None:
    """Claim (command-line): intervals of predicted losses hold for about as many runs as their
    level says, with noise like that of seeds"""
    noise = 0.01
    operations = np.geomspace(1e15, 1e17, 6)
    held = 0
    draws = np.random.default_rng(3)
    for trial in range(trials):
        losses = (1.5 + 300 / operations**0.13) * np.exp(draws.normal(0, noise, 6))
        result = fit(("operations",), operations[:, None], losses, resamples=30, seed=trial)
        low, high = result.interval(4e17, level=0.8)
        further = (1.5 + 300 / 4e17**0.13) * np.exp(draws.normal(0, noise))
        held += low <= further <= high
    assert bounds[0] <= held / trials <= bounds[1]


def test_noise_is_that_of_the_residuals_or_the_least() -> None:
    operations = np.geomspace(1e15, 1e17, 40)
    exact = 1.5 + 300 / operations**0.13
    losses = exact * np.exp(np.random.default_rng(0).normal(0, 0.02, 40))
    noisy = fit(("operations",), operations[:, None], losses, resamples=1)
    assert noisy.noise == pytest.approx(0.02, rel=0.3)
    quiet = fit(("operations",), operations[:, None], exact, resamples=1, least_noise=0.004)
    assert quiet.noise == 0.004
