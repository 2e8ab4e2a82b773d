"""Finds the first tensor in which two results of the same steps differ, and the likely kind.

Gradients, second moments and updates are compared each for itself, in the order in which a step
computes them, and what remains unequal is compared with what known mistakes would leave: a common
factor, a multiple of the weights, slices in another order. Knows no files and no trainers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ds.engine.states.state_reader import TensorReaders
from megatron_ds.training.replay.record_comparison import LEAST
from megatron_ds.training.replay.tensor_comparison import Results, TensorComparison, comparisons


class Limits(NamedTuple):
    """Largest accepted differences, relative to norms."""

    gradient: float
    update: float


class Finding(NamedTuple):
    """The first difference of two results."""

    name: str
    """The first tensor, in the model's order, that has it."""
    kind: str
    """A key of `KINDS`."""
    text: str
    """What was found."""
    others: int
    """Number of further tensors that have the same difference."""


KINDS = {
    "rank": "slices of a tensor are in the place of others, as after a swap of ranks",
    "moments": "the optimizer's states are not those that these gradients give",
    "clipping": "the gradient was clipped otherwise",
    "gradient": "the gradient of some tensors, or its scale, is another one",
    "data": "other samples entered the gradient, or with other weights",
    "schedule": "the same gradients were applied with another learning rate",
    "weight decay": "weights decayed otherwise",
    "update": "the same gradients and states gave another update",
}
"""Kinds of differences, with what they mean."""


@dataclass(frozen=True)
class Step:
    """What is known about the steps besides the tensors.

    Attributes:
        norm: Norm of the expected gradient before clipping, None if there were several steps.
        clip: Largest norm that is not clipped; 0: none.
        applied: Number of applied steps of the optimizer before.
        rates: Learning rates of the schedule near this step, by iteration.
        iteration: The last iteration.
        parts: Reads the gradient of each micro-batch, by name; a long computation. Empty if there
            is one, or if there were several steps.
    """

    norm: float | None
    clip: float
    applied: int
    rates: Mapping[int, float]
    iteration: int
    parts: Callable[[], Sequence[TensorReaders]]


class Diagnosis:
    """Decides in which tensor, and how, two results differ.

    Args:
        results: The results.
        step: What is known besides.
        limits: Accepted differences.
    """

    def __init__(self, results: Results, step: Step, limits: Limits) -> None:
        self._results = results
        self._step = step
        self._limits = limits
        self.tensors = list(comparisons(results))

    def find(self) -> Finding | None:
        """The first difference; None if both are equal."""
        return (
            self._of_orders()
            or self._of_kept_moments()
            or self._of_gradients()
            or self._of_squares()
            or self._of_updates()
        )

    @property
    def largest(self) -> dict[str, tuple[float, str]]:
        """The largest relative difference of each kind of tensor, and its name."""
        largest: dict[str, tuple[float, str]] = {}
        for item in self.tensors:
            sizes = {"gradient": self._gradient_size(item)}
            if item.square.base:
                sizes["second moment"] = item.square.difference / item.square.base
            if item.update.base and item.decides_update:
                sizes["update"] = item.update.difference / item.update.base
            for key, size in sizes.items():
                largest[key] = max(largest.get(key, (0.0, item.name)), (size, item.name))
        return largest

    @cached_property
    def _least(self) -> float:
        """Norm below which the difference of a gradient is none."""
        norms = [item.gradient.base for item in self.tensors]
        return LEAST * math.hypot(*norms)

    def _gradient_size(self, item: TensorComparison) -> float:
        return item.gradient.difference / (max(item.gradient.base, self._least) or 1.0)

    def _of_orders(self) -> Finding | None:
        moved = [item for item in self.tensors if item.order]
        return self._finding(moved, "rank", lambda item: item.order)

    def _of_kept_moments(self) -> Finding | None:
        unequal = [item for item in self.tensors if not self._has_equal_gradient(item)]
        kept = [item for item in unequal if item.is_kept]
        dropped = [item for item in unequal if item.is_dropped]
        text = "exp_avg is that of the first checkpoint: this step did not enter it"
        empty = "exp_avg is that of a step from empty moments: those before were lost"
        return self._finding(kept, "moments", lambda _: text) or self._finding(
            dropped, "moments", lambda _: empty
        )

    def _has_equal_gradient(self, item: TensorComparison) -> bool:
        scale = max(item.gradient.base, item.gradient.value, self._least)
        allowed = self._limits.gradient * scale + item.gradient_rounding
        return item.gradient.difference <= allowed

    def _of_gradients(self) -> Finding | None:
        unequal = [item for item in self.tensors if not self._has_equal_gradient(item)]
        if not unequal:
            return None
        swapped = [item for item in unequal if item.gradient_order]
        if swapped and len(swapped) == len(unequal):
            return self._finding(swapped, "rank", lambda item: f"gradient: {item.gradient_order}")
        unequal = [item for item in unequal if item.gradient.base]
        factor = median(item.gradient.factor for item in unequal)
        outliers = [item for item in unequal if not self._is_times(item, factor)]
        if 2 * len(unequal) > len(self.tensors) and not outliers:
            return self._of_factor(unequal, factor)
        contradicting = [item for item in unequal if self._has_equal_square(item)]
        if contradicting:
            text = "exp_avg contradicts exp_avg_sq, which the expected gradient entered"
            return self._finding(contradicting, "moments", lambda _: text)
        if 2 * len(unequal) <= len(self.tensors):
            return self._finding(unequal, "gradient", self._gradient_text)
        if 4 * len(outliers) <= len(unequal):  # they change the norm by which all are clipped
            return self._finding(
                outliers, "gradient", lambda item: self._gradient_text(item, factor)
            )
        return self._of_micro_batches(unequal)

    def _gradient_text(self, item: TensorComparison, usual: float = 1.0) -> str:
        """Describes a gradient next to the expected one times the usual factor."""
        fit = item.gradient
        if fit.rest <= 4 * self._limits.gradient * fit.value:
            return f"its gradient is {_factor(fit.factor / usual)} times the expected one"
        cosine = fit.factor * fit.base / fit.value if fit.value else 0.0
        return (
            f"its gradient has a norm of {fit.value / usual:.4g}, expected is {fit.base:.4g}; the "
            f"cosine between them is {cosine:.4g}"
        )

    def _is_times(self, item: TensorComparison, factor: float) -> bool:
        """Whether a gradient is the expected one times a factor."""
        fit = item.gradient
        allowed = 4 * self._limits.gradient * max(fit.value, self._least) + item.gradient_rounding
        return abs(fit.factor - factor) * fit.base + fit.rest <= allowed

    def _of_factor(self, items: Sequence[TensorComparison], factor: float) -> Finding | None:
        norm = self._step.norm
        clip = self._step.clip
        times = f"every gradient is {_factor(factor)} times the expected one"
        if norm is not None and clip and norm > clip:
            coefficient = clip / norm
            if abs(factor * coefficient - 1) < 10 * self._limits.gradient:
                text = f"{times}: it was not clipped to a norm of {clip:g} from {norm:.4g}"
            else:
                text = f"{times}: its norm after clipping is {factor * clip:.4g}, not {clip:g}"
            return self._finding(items, "clipping", lambda _: text)
        return self._finding(items, "gradient", lambda _: f"{times}; none was clipped")

    def _of_micro_batches(self, items: Sequence[TensorComparison]) -> Finding | None:
        parts = self._step.parts()
        unknown = "its gradient, like most, is not that of these samples and weights"
        if len(parts) < 2:
            return self._finding(items, "data", lambda _: unknown)
        names = [item.name for item in self.tensors]
        weights = [
            fit_micro_batches(self._gradients(is_run), parts, names) for is_run in (True, False)
        ]
        (run, rest), (expected, _) = weights
        if rest > 4 * self._limits.gradient:
            text = f"{unknown}, nor a mean of their {len(parts)} micro-batches"
            return self._finding(items, "data", lambda _: text)
        return self._finding(items, "data", lambda _: _weights_text(run, expected))

    def _gradients(self, is_run: bool) -> Callable[[str], Tensor]:
        beta = self._results.betas[0] ** self._results.steps
        after = (self._results.run if is_run else self._results.expected).exp_avg
        before = self._results.before.exp_avg

        def read(name: str) -> Tensor:
            return (
                after[name].read().detach().double() - beta * before[name].read().detach().double()
            ) / (1 - beta)

        return read

    def _has_equal_square(self, item: TensorComparison) -> bool:
        fit = item.square
        allowed = 4 * self._limits.gradient * max(fit.base, self._least**2) + item.square_rounding
        return fit.difference <= allowed

    def _of_squares(self) -> Finding | None:
        unequal = [item for item in self.tensors if not self._has_equal_square(item)]

        def text(item: TensorComparison) -> str:
            if item.is_square_kept:
                return "exp_avg_sq is that of the first checkpoint: this step did not enter it"
            factor = item.square.factor
            return (
                "exp_avg is as expected, but other squares of the gradient entered exp_avg_sq: "
                f"about {_factor(factor)} times these"
            )

        return self._finding(unequal, "moments", text)

    def _of_updates(self) -> Finding | None:
        unequal = [item for item in self.tensors if not self._has_equal_update(item)]
        if not unequal:
            return None
        factor = median(item.decay[0] for item in unequal)
        if not all(self._is_explained(item) for item in unequal):
            rest = [item for item in unequal if not self._is_explained(item)]
            text = "its update is neither that of another rate nor of another weight decay"
            return self._finding(rest, "update", lambda _: text)
        by_rate = math.hypot(*((item.decay[0] - 1) * item.update.base for item in unequal))
        by_decay = math.hypot(*(item.decay[1] * item.weight_norm for item in unequal))
        if by_decay > by_rate:
            return self._finding(unequal, "weight decay", self._decay_text)
        if self._has_other_count(factor):
            text = (
                f"the updates are {_factor(factor)} times the expected ones, as if the optimizer "
                "had counted other steps in its correction of the bias"
            )
            return self._finding(unequal, "moments", lambda _: text)
        return self._finding(unequal, "schedule", lambda _: self._rate_text(factor))

    def _has_equal_update(self, item: TensorComparison) -> bool:
        allowed = self._limits.update * max(item.update.base, item.update.value)
        is_equal = item.update.difference <= allowed + item.update_rounding
        return is_equal or not item.decides_update

    def _is_explained(self, item: TensorComparison) -> bool:
        rest = item.decay[2]
        return rest <= 4 * self._limits.update * item.update.value + item.update_rounding

    def _decay_text(self, item: TensorComparison) -> str:
        decay = -item.decay[1] / self._results.lr / self._results.steps
        sign = "more" if decay > 0 else "less"
        return f"it decays by {abs(decay):.3g} {sign} than the settings say"

    def _rate_text(self, factor: float) -> str:
        rate = factor * self._results.lr
        text = f"the learning rate is {rate:.5g}, the schedule has {self._results.lr:.5g}"
        for iteration, scheduled in self._step.rates.items():
            ratio = scheduled / self._results.lr
            if self._results.steps == 1 and _explains(ratio, factor):
                return f"{text}: that of iteration {iteration}"
        return text

    def _has_other_count(self, factor: float) -> bool:
        """Whether the correction of the bias for another number of steps gives this factor, and no
        learning rate of the schedule does."""
        beta1, beta2 = self._results.betas
        now = self._step.applied + 1
        if self._results.steps != 1:
            return False

        def correction(count: int) -> float:
            return math.sqrt(1 - beta2**count) / (1 - beta1**count)

        counts = [count for count in (1, now - 2, now - 1, now + 1) if count > 0]
        scheduled = [rate / self._results.lr for rate in self._step.rates.values()]
        if any(_explains(ratio, factor) for ratio in scheduled):
            return False
        return any(_explains(correction(count) / correction(now), factor) for count in counts)

    @staticmethod
    def _finding(
        items: Sequence[TensorComparison], cause: str, text: Callable[[TensorComparison], str]
    ) -> Finding | None:
        if not items:
            return None
        return Finding(items[0].name, cause, text(items[0]), len(items) - 1)


def fit_micro_batches(
    gradient: Callable[[str], Tensor], parts: Sequence[TensorReaders], names: Sequence[str]
) -> tuple[list[float], float]:
    """Least squares of a gradient by those of micro-batches.

    Args:
        gradient: Reads the gradient of a tensor.
        parts: Gradients of the micro-batches.
        names: The tensors.

    Returns:
        The weight of each micro-batch, and the norm of what they leave, relative to the gradient's.
    """
    count = len(parts)
    gram = torch.zeros(count, count, dtype=torch.float64)
    right = torch.zeros(count, dtype=torch.float64)
    square = 0.0
    for name in names:
        rows = torch.stack([part[name].read().detach().double().flatten() for part in parts])
        value = gradient(name).flatten()
        gram += rows @ rows.T
        right += rows @ value
        square += float(value.square().sum())
    weights = torch.linalg.lstsq(gram, right).solution
    rest = square - 2 * float(weights @ right) + float(weights @ gram @ weights)
    return weights.tolist(), math.sqrt(max(0.0, rest) / square) if square else 0.0


def _weights_text(run: Sequence[float], expected: Sequence[float]) -> str:
    """Which micro-batches entered a gradient with another weight."""
    ratios = [one / other if other else math.inf for one, other in zip(run, expected, strict=True)]
    usual = sorted(ratios)[len(ratios) // 2]
    relative = [ratio / usual for ratio in ratios] if usual else ratios
    lost = [index for index, ratio in enumerate(relative, 1) if abs(ratio) < 0.02]
    count = len(run)
    if lost:
        words = ", ".join(map(str, lost))
        return f"of {count} micro-batches, {words} did not enter its gradient"
    shown = ", ".join(f"{value / sum(run):.3g}" for value in run)
    wanted = ", ".join(f"{value / sum(expected):.3g}" for value in expected)
    return f"the micro-batches have weights of {shown} in the mean, expected are {wanted}"


def _explains(ratio: float, factor: float) -> bool:
    """Whether a ratio other than 1 is a factor, within a tenth of their distance from 1."""
    return ratio != 1 and abs(factor - ratio) <= 0.1 * abs(ratio - 1)


def _factor(value: float) -> str:
    return f"{value:.4g}"
