"""Power laws of the loss, fitted robustly to the losses of small runs.

The law of Hoffmann et al. 2022 (arXiv 2203.15556, section 3.3), L = E + A / N^alpha + B / D^beta,
and L = E + A / C^alpha are the same sum with two terms and one. Its objective is theirs, the Huber
loss of the logarithm of the loss; the smallest is the best of a grid of starts, from each of which
Levenberg-Marquardt descends with the weights of the Huber loss. Imports no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

HUBER_DELTA = 1e-3
"""Residual of the log loss from which the objective is linear, as in Hoffmann et al."""
STEPS = 400
"""Iterations of Levenberg-Marquardt."""
EXPONENTS = (0.1, 0.2, 0.35, 0.6, 1.0)
FLOORS = (0.02, 0.3, 0.6, 0.9)
"""Starts: exponents, and irreducible losses as fractions of the smallest loss."""
SEEDS_NOISE = 0.003
"""Least deviation of the log loss among runs that differ only in their seed, if the runs do not
show it."""


@dataclass(frozen=True)
class Law:
    """L = exp(floor) + sum over terms of exp(scale) / x^exponent.

    Attributes:
        terms: Names of the terms' variables, such as ("parameters", "tokens").
        floor: Logarithm of the irreducible loss.
        scales: Logarithms of the terms' coefficients.
        exponents: Their exponents.
    """

    terms: tuple[str, ...]
    floor: float
    scales: tuple[float, ...]
    exponents: tuple[float, ...]

    @property
    def irreducible(self) -> float:
        """E, in nats per token."""
        return float(np.exp(self.floor))

    def loss(self, *variables: float) -> float:
        """The loss at values of the variables, in nats per token."""
        log_x = np.log(np.array([variables]))
        return float(np.exp(_log_losses(self.vector[None], log_x)[0, 0]))

    @property
    def vector(self) -> Array:
        """Floor, scales and logarithms of the exponents, `[1 + 2 T]`."""
        return np.array([self.floor, *self.scales, *np.log(self.exponents)])


@dataclass(frozen=True)
class Fit:
    """A law with its uncertainty.

    Attributes:
        law: The best law.
        noise: Deviation of the log loss of a run from the law.
        resampled: Vectors of the laws of the resampled losses, `[M, 1 + 2 T]`.
    """

    law: Law
    noise: float
    resampled: Array

    def interval(self, *variables: float, level: float = 0.9, seed: int = 0) -> tuple[float, float]:
        """Bounds within which the loss of one further run is expected.

        Args:
            variables: Values of the law's variables.
            level: Probability of the interval.
            seed: Of the noise of that run.
        """
        logs = _log_losses(self.resampled, np.log(np.array([variables])))[:, 0]
        logs = logs + np.random.default_rng(seed).normal(0.0, self.noise, len(logs))
        low, high = np.quantile(logs, [(1 - level) / 2, (1 + level) / 2])
        return float(np.exp(low)), float(np.exp(high))

    def curves(self, points: Array, level: float = 0.9) -> tuple[Array, Array, Array]:
        """The law and the bounds of its resampled laws, without the noise of a run, each `[R]`.

        Args:
            points: Values of the variables, `[R, T]`.
            level: Probability between the bounds.
        """
        middle = np.exp(_log_losses(self.law.vector[None], np.log(points))[0])
        logs = _log_losses(self.resampled, np.log(points))
        low, high = np.quantile(logs, [(1 - level) / 2, (1 + level) / 2], axis=0)
        return middle, np.exp(low), np.exp(high)


def fit(
    terms: Sequence[str],
    variables: Array,
    losses: Array,
    *,
    resamples: int = 200,
    seed: int = 0,
    least_noise: float = SEEDS_NOISE,
) -> Fit:
    """Fits a law to the losses of runs.

    The interval is of a parametric bootstrap: losses are drawn around the law with the deviation of
    the residuals, of which as many are free as there are more runs than coefficients, and the law
    is fitted again.

    Args:
        terms: Names of the variables.
        variables: Their values in each run, `[R, T]`.
        losses: Losses in nats per token, `[R]`.
        resamples: Laws for the interval.
        seed: Of the resampling.
        least_noise: Least deviation of the log loss that is assumed.
    """
    log_x = np.log(np.asarray(variables, dtype=float))
    center = log_x.mean(axis=0)
    x = log_x - center
    y = np.log(np.asarray(losses, dtype=float))
    starts = _starts(x, y)
    vectors, objectives = _descend(starts, x, np.broadcast_to(y, (len(starts), len(y))))
    best = vectors[objectives.argmin()]
    residuals = y - _log_losses(best[None], x)[0]
    free = max(1, len(y) - len(best))
    noise = max(float(np.sqrt((residuals**2).sum() / free)), least_noise)
    draws = np.random.default_rng(seed).normal(0.0, noise, (resamples, len(y)))
    targets = _log_losses(best[None], x) + draws
    near = np.concatenate([best[None], starts[:: max(1, len(starts) // 12)]])
    count = len(near)
    drawn, errors = _descend(
        np.tile(near, (resamples, 1)), x, np.repeat(targets, count, axis=0), steps=STEPS // 4
    )
    chosen = errors.reshape(resamples, count).argmin(axis=1)
    resampled = drawn.reshape(resamples, count, -1)[np.arange(resamples), chosen]
    size = log_x.shape[1]
    exponents = np.exp(best[1 + size :])
    scales = best[1 : 1 + size] + exponents * center
    law = Law(tuple(terms), float(best[0]), tuple(scales.tolist()), tuple(exponents.tolist()))
    resampled[:, 1 : 1 + size] += np.exp(resampled[:, 1 + size :]) * center
    return Fit(law, noise, resampled)


def _starts(x: Array, y: Array) -> Array:
    """Vectors from which the fit starts, `[S, 1 + 2 T]`: the terms share what is above the floor.

    Args:
        x: Logarithms of the variables around their means, `[R, T]`.
        y: Logarithms of the losses, `[R]`.
    """
    size = x.shape[1]
    middle = np.exp(y.mean())
    rows = []
    for share in FLOORS:
        floor = share * np.exp(y.min())
        scale = np.log((middle - floor) / size)
        for exponents in itertools.product(EXPONENTS, repeat=size):
            rows.append([np.log(floor), *[scale] * size, *np.log(exponents)])
    return np.array(rows)


def _parts(vectors: Array, x: Array) -> Array:
    """Logarithms of the summands of the loss: floor and terms, `[S, R, 1 + T]`."""
    size = x.shape[1]
    scales = vectors[:, None, 1 : 1 + size]
    exponents = np.exp(vectors[:, None, 1 + size :])
    floor = np.broadcast_to(vectors[:, None, :1], (len(vectors), len(x), 1))
    return np.concatenate([floor, scales - exponents * x[None]], axis=2)


def _log_losses(vectors: Array, x: Array) -> Array:
    """Logarithms of the losses, `[S, R]`."""
    parts = _parts(vectors, x)
    largest = parts.max(axis=2)
    sums: Array = largest + np.log(np.exp(parts - largest[..., None]).sum(axis=2))
    return sums


def _objective(residuals: Array) -> Array:
    """Sums of the Huber loss, `[S]`."""
    sizes = np.abs(residuals)
    linear = HUBER_DELTA * (sizes - HUBER_DELTA / 2)
    sums: Array = np.where(sizes <= HUBER_DELTA, sizes**2 / 2, linear).sum(axis=1)
    return sums


def _descend(vectors: Array, x: Array, y: Array, steps: int = STEPS) -> tuple[Array, Array]:
    """Minimizes the objective from each start; returns vectors `[S, P]` and objectives `[S]`.

    Args:
        vectors: Starts, `[S, P]`.
        x: Logarithms of the variables, `[R, T]`.
        y: Logarithms of the losses to fit from each start, `[S, R]`.
        steps: Iterations.
    """
    vectors = vectors.copy()
    size = x.shape[1]
    residuals = _log_losses(vectors, x) - y
    objectives = _objective(residuals)
    damping = np.full(len(vectors), 1e-2)
    for _ in range(steps):
        shares = np.exp(_parts(vectors, x) - (residuals + y)[..., None])
        exponents = np.exp(vectors[:, None, 1 + size :])
        slopes = -shares[..., 1:] * exponents * x[None]
        jacobian = np.concatenate([shares, slopes], axis=2)
        weights = np.minimum(1.0, HUBER_DELTA / np.maximum(np.abs(residuals), 1e-300))
        weighted = jacobian * weights[..., None]
        gradient = (weighted * residuals[..., None]).sum(axis=1)
        hessian = np.einsum("srp,srq->spq", weighted, jacobian)
        diagonal = np.einsum("spp->sp", hessian)
        diagonal += damping[:, None] * diagonal + 1e-15
        moves = np.clip(np.linalg.solve(hessian, gradient[..., None])[..., 0], -1.0, 1.0)
        trials = vectors - moves
        trial_residuals = _log_losses(trials, x) - y
        trial_objectives = _objective(trial_residuals)
        is_better = trial_objectives < objectives
        vectors = np.where(is_better[:, None], trials, vectors)
        residuals = np.where(is_better[:, None], trial_residuals, residuals)
        objectives = np.where(is_better, trial_objectives, objectives)
        damping = np.clip(np.where(is_better, damping / 3, damping * 4), 1e-12, 1e12)
    return vectors, objectives
