"""Compares two results of the same steps of Adam, tensor by tensor.

Both continue the same checkpoint: `run` was written by the trainer that is checked, `expected` was
computed by one process. From Adam's moments before and after one step follows its gradient, after
clipping:

    g = (exp_avg' - beta1 exp_avg) / (1 - beta1)

One tensor of each kind is in memory at a time. Knows no files and no trainers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.engine.states.state_reader import TensorReaders
from megatron_ds.training.replay.record_comparison import UNDECIDED

EPS = 2.0**-23
"""Relative distance of fp32 numbers: states are saved in fp32."""
ROUNDINGS = 4
"""Roundings of a state that may add up in what is recovered from it."""
UNITS = (2, 4, 8, 16)
"""Numbers of equal slices, such as those of ranks, that are tried in another order."""


@dataclass(frozen=True)
class AdamStates:
    """Weights and Adam's moments of a checkpoint, by canonical name."""

    weights: TensorReaders
    """The weights that the optimizer steps: master weights, if there are some."""
    exp_avg: TensorReaders
    exp_avg_sq: TensorReaders


@dataclass(frozen=True)
class Results:
    """Two results of the same steps.

    Attributes:
        before: The checkpoint that both continue.
        run: The result that is checked.
        expected: The result of one process.
        steps: Number of steps between; gradients are a weighted sum over more than one.
        betas: Adam's beta1 and beta2.
        lr: Learning rate of the last step.
    """

    before: AdamStates
    run: AdamStates
    expected: AdamStates
    steps: int
    betas: tuple[float, float]
    lr: float


class Fit(NamedTuple):
    """Least squares of a tensor as a multiple of another: value = factor * base + rest."""

    factor: float
    difference: float
    """Norm of value - base."""
    rest: float
    """Norm of what the multiple does not explain."""
    value: float
    """Norm of the value."""
    base: float
    """Norm of the base."""

    @classmethod
    def of(cls, value: Tensor, base: Tensor) -> Fit:
        """The fit of two tensors in float64."""
        square = float(base.square().sum())
        factor = float((value * base).sum()) / square if square else 0.0
        return cls(
            factor,
            float((value - base).norm()),
            float((value - factor * base).norm()),
            float(value.norm()),
            math.sqrt(square),
        )


@dataclass(frozen=True)
class TensorComparison:
    """Comparison of the two results of one tensor."""

    name: str
    gradient: Fit
    gradient_rounding: float
    """Norm of the rounding in a recovered gradient."""
    square: Fit
    """Recovered squares of the gradient, from exp_avg_sq."""
    square_rounding: float
    is_kept: bool
    """Whether exp_avg is that before the steps, to the bit, although it is not zero."""
    is_square_kept: bool
    """The same of exp_avg_sq."""
    is_dropped: bool
    """Whether exp_avg is what steps from empty moments would give."""
    update: Fit
    update_rounding: float
    order: str
    """Slices of the weight in another order; empty if that does not explain the difference."""
    gradient_order: str
    decay: tuple[float, float, float]
    """Least squares of the run's update by the expected one and the weights: both factors, and the
    norm of the rest."""
    weight_norm: float
    """Norm of the weight before the steps."""

    @property
    def decides_update(self) -> bool:
        """Whether the update is more than rounding."""
        return not self.name.endswith(UNDECIDED)


def comparisons(results: Results) -> Iterator[TensorComparison]:
    """Compares all tensors that the optimizer steps, in the model's order."""
    for name in results.expected.weights:
        if name in results.expected.exp_avg:
            yield _compare(name, results)


def _compare(name: str, results: Results) -> TensorComparison:
    beta1, beta2 = (beta**results.steps for beta in results.betas)
    before, run, expected = (
        {
            "weight": states.weights[name].read().detach().double(),
            "exp_avg": states.exp_avg[name].read().detach().double(),
            "exp_avg_sq": states.exp_avg_sq[name].read().detach().double(),
        }
        for states in (results.before, results.run, results.expected)
    )

    def recovered(result: Mapping[str, Tensor], key: str, beta: float) -> Tensor:
        return (result[key] - beta * before[key]) / (1 - beta)

    gradients = [recovered(one, "exp_avg", beta1) for one in (run, expected)]
    squares = [recovered(one, "exp_avg_sq", beta2) for one in (run, expected)]
    updates = [one["weight"] - before["weight"] for one in (run, expected)]
    weight = Fit.of(run["weight"], expected["weight"])
    gradient = Fit.of(*gradients)
    old = before["exp_avg"]
    empty = run["exp_avg"] - (1 - beta1) * gradients[1]
    update_rounding = ROUNDINGS * EPS * float(before["weight"].norm())
    is_far = weight.difference > 2 * (float(updates[1].norm()) + update_rounding)
    return TensorComparison(
        name=name,
        gradient=gradient,
        gradient_rounding=ROUNDINGS * EPS * float(old.norm()) / (1 - beta1),
        square=Fit.of(*squares),
        square_rounding=ROUNDINGS * EPS * float(before["exp_avg_sq"].norm()) / (1 - beta2),
        is_kept=_is_kept(run["exp_avg"], old),
        is_square_kept=_is_kept(run["exp_avg_sq"], before["exp_avg_sq"]),
        is_dropped=bool(old.any()) and float(empty.norm()) <= 1e-4 * float(run["exp_avg"].norm()),
        update=Fit.of(*updates),
        update_rounding=update_rounding,
        order=_order(run["weight"], expected["weight"]) if is_far else "",
        gradient_order=_order(*gradients) if gradient.rest > 0.1 * gradient.base else "",
        decay=_by_two(updates[0], updates[1], before["weight"]),
        weight_norm=float(before["weight"].norm()),
    )


def _is_kept(value: Tensor, before: Tensor) -> bool:
    return bool(before.any()) and torch.equal(value, before)


def _by_two(value: Tensor, first: Tensor, second: Tensor) -> tuple[float, float, float]:
    """Least squares of a tensor by two others: their factors, and the norm of the rest.

    A factor of a tensor of zeros is 0.
    """
    norms = [float(first.norm()) or 1.0, float(second.norm()) or 1.0]
    columns = torch.stack([first.flatten() / norms[0], second.flatten() / norms[1]], 1)
    factors = torch.linalg.pinv(columns.T @ columns) @ (columns.T @ value.flatten())
    rest = float((value.flatten() - columns @ factors).norm())
    return float(factors[0]) / norms[0], float(factors[1]) / norms[1], rest


def _order(value: Tensor, base: Tensor) -> str:
    """Two equal slices of a tensor, changing places of which makes it the other one."""
    for dim in range(value.dim()):
        for count in UNITS:
            if value.shape[dim] % count or value.shape[dim] < 2 * count:
                continue
            theirs = value.unflatten(dim, (count, -1)).movedim(dim, 0)
            ours = base.unflatten(dim, (count, -1)).movedim(dim, 0)
            moved = [i for i in range(count) if _differ(theirs[i], ours[i])]
            sources = [[j for j in moved if not _differ(theirs[i], ours[j])] for i in moved]
            if moved and all(len(one) == 1 for one in sources):
                pairs = ", ".join(
                    f"{to} has that of {source[0]}"
                    for to, source in zip(moved, sources, strict=True)
                )
                return f"of {count} slices along dimension {dim}, {pairs}"
    return ""


def _differ(value: Tensor, base: Tensor) -> bool:
    return float((value - base).norm()) > 0.05 * float(base.norm())
