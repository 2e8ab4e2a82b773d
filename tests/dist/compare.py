"""Compares two runs: every number, and every tensor relative to its largest element."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from megatron_ds.engine.norms import NORMS, ZEROS, layer_of
from megatron_ds.model.output_layer import Z_LOSS
from tests.dist.reference import Run, Tensors

RELATIVE = 1e-5
MOVED_STARTS = 4
"""Starts of one process that are moved by rounding."""
MOVED_STARTS_IN_FP8 = 16
"""The same with numbers in fp8: few of them are so near to the middle of two that it matters."""
MOVED_FACTOR = 4
"""Accepted multiple of the errors of these starts."""
DECIDED_STEPS = 3
"""Least number of steps that are compared, of those with Lion."""
HALF_GRADIENT_ERROR = 0.15
"""Error of an element in the first step, relative to the largest of its tensor."""
LATER_GRADIENT_ERROR = 0.35
"""Error of an element in later steps, relative to the largest of its tensor."""
HALF_NORM_ERROR = 2**-8
"""Of the norm of a layer's gradient, which may have been clipped in bf16."""
PASSES = {"forward-compute", "backward-compute", "optimizer"}
"""What each step has times of, on every rank."""


MovedRuns = Callable[[int], Run]
"""Trains one process as the reference, from the moved start with this seed."""


@dataclass(frozen=True)
class Tolerance:
    """Accepted relative differences.

    A run amplifies rounding errors if the gradients of starts that differ by the rounding of fp32
    are further apart, in some step, than half of `relative`. From that step on it may differ by
    `MOVED_FACTOR` times the error of these starts; any other run and step by `relative`.
    """

    relative: float
    moved: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By kind: the largest error of the moved starts up to each step. Empty: nothing amplifies."""
    first: int = 0
    """The first step, from 0, whose gradients show the amplification."""

    @classmethod
    def of(cls, moved: Sequence[Run], reference: Run, relative: float) -> Tolerance:
        errors: dict[str, list[float]] = {}
        for kind in ("losses", "norms", "gradients", "weights"):
            expected = getattr(reference, kind)
            steps = zip(*(map(_error, getattr(run, kind), expected) for run in moved), strict=True)
            errors[kind] = list(itertools.accumulate(map(max, steps), max))
        shown = [step for step, error in enumerate(errors["gradients"]) if error > relative / 2]
        return cls(relative, errors, shown[0]) if shown else cls(relative)

    def at(self, kind: str, step: int) -> float:
        """The accepted difference of what is of a kind in a step, from 0; weights are before it."""
        is_amplified = step > self.first if kind == "weights" else step >= self.first
        moved = self.moved[kind][step] if self.moved and is_amplified else 0.0
        return max(self.relative, MOVED_FACTOR * moved)


def _error(value: Any, expected: Any) -> float:
    """The relative difference of numbers, or the worst of tensors."""
    if isinstance(expected, dict):
        return worst_difference(value, expected)[0]
    return 0.0 if value == expected else float(abs(value - expected) / max(abs(expected), 1e-30))


def differences(
    run: Run,
    reference: Run,
    relative: float = RELATIVE,
    moved: MovedRuns | None = None,
    starts: int = MOVED_STARTS,
) -> list[str]:
    """Lists every difference between `run` and `reference` larger than `relative`.

    If there are some, and the run amplifies rounding errors, the bound is that of `Tolerance`. If
    there are some after a step in which rounding has decided the sign of an update, only the steps
    before it are compared. Tensors of the first and the last step must have been recorded.

    Args:
        run: The run.
        reference: The run of one process.
        relative: Accepted difference of a run that does not amplify rounding errors.
        moved: Trains the moved starts, if there are differences. None: nothing may amplify.
        starts: Number of them.
    """
    found = []
    for kind in ("losses", "norms", "gradients", "weights"):
        ours = getattr(run, kind)
        reference_values = getattr(reference, kind)
        if len(ours) != len(reference_values):
            found.append(f"{len(ours)} {kind} instead of {len(reference_values)}")
        elif kind in ("gradients", "weights") and not (ours[0] and ours[-1]):
            found.append(f"the first or the last {kind} are missing")
    steps = len(reference.losses)
    tolerance = Tolerance(relative)
    later = _differences(run, reference, tolerance, steps)
    has_signs = any(mask.any() for mask in reference.undecided.values())
    if later and moved is not None and not has_signs:
        others = [moved(seed) for seed in range(starts)]
        tolerance = Tolerance.of(others, reference, relative)
        later = _differences(run, reference, tolerance, steps)
    if later and DECIDED_STEPS <= (decided := decided_steps(run, reference, relative)) < steps:
        later = _differences(run, reference, tolerance, decided)
    return found + later + differing_statistics(run, relative)


def differing_statistics(run: Run, relative: float, *, of_weights: bool = True) -> list[str]:
    """Lists statistics of the steps that differ from those of the recorded full tensors.

    Args:
        run: The run.
        relative: Accepted difference of norms; zeros must be exact.
        of_weights: Whether the recorded weights are those that the optimizer updates.
    """
    if not run.statistics:  # without an engine
        return []
    weights = run.weights[:-1], run.weights[1:]
    found = []
    steps = zip(run.statistics, run.gradients, *weights, strict=True)
    for number, (statistics, gradients, before, after) in enumerate(steps):
        if not run.times[number].keys() >= PASSES <= run.regions.keys():
            found.append(f"times[{number}] are of {run.times[number]}")
        if not (gradients and before and after):
            continue
        expected = {ZEROS: float(sum((grad == 0).sum() for grad in gradients.values()))}
        for layer in dict.fromkeys(map(layer_of, gradients)):
            names = [name for name in gradients if layer_of(name) == layer]
            norms = [norm_of({name: gradients[name] for name in names})]
            if of_weights:
                norms.append(norm_of({name: after[name] for name in names}))
                norms.append(norm_of({name: after[name] - before[name] for name in names}))
                norms[2] /= norms[1]
            keys = [f"{metric}/{layer}" for metric in NORMS]
            expected |= dict(zip(keys, norms, strict=False))
        if of_weights and statistics.keys() != expected.keys():
            found.append(f"statistics[{number}]: {sorted(statistics.keys() ^ expected.keys())}")
            continue
        tensors = {"gradients": gradients}
        tensors |= {"weights": before, "updated": after} if of_weights else {}
        found += differing_records(run.records[number], tensors, relative)
        for name, value in expected.items():
            # A norm of rounding errors, such as that of a gradient that is zero.
            error = 0.0 if name == ZEROS else relative * abs(value) + 1e-9
            if not abs(statistics[name] - value) <= error:
                found.append(f"statistics[{number}] {name} {statistics[name]} instead of {value}")
    return found


def differing_records(
    record: Mapping[str, Any], tensors: Mapping[str, Tensors], relative: float
) -> list[str]:
    """Lists norms and sums of a step's record that are not those of the full tensors."""
    found = []
    for key, expected in tensors.items():
        if record[key].keys() != expected.keys():
            found.append(f"record of {key}: {sorted(record[key].keys() ^ expected.keys())}")
            continue
        for name, tensor in expected.items():
            norm = norm_of({name: tensor.double()})
            values = norm, float(tensor.double().sum())
            errors = [abs(x - y) for x, y in zip(record[key][name], values, strict=True)]
            # The sum of elements that are rounded to half precision, or added in another order.
            if not max(errors[0], errors[1] / 8) <= relative * norm + 1e-9:
                found.append(f"record of {key} {name}: {record[key][name]} instead of {values}")
    return found


def _differences(run: Run, reference: Run, tolerance: Tolerance, steps: int) -> list[str]:
    """The differences in the first steps."""
    found = []
    for kind in ("losses", "norms"):
        pairs = zip(getattr(run, kind)[:steps], getattr(reference, kind), strict=False)
        for step, (value, expected) in enumerate(pairs):
            if value is None or not _error(value, expected) <= tolerance.at(kind, step):
                found.append(f"{kind}[{step}] {value} instead of {expected}")
    for step, (reported, expected) in enumerate(zip(run.routing, reference.routing, strict=False)):
        values = reported.get(Z_LOSS, 0.0), expected.get(Z_LOSS, 0.0)
        allowed = tolerance.at("losses", step) * abs(values[1])
        if step < steps and not abs(values[0] - values[1]) <= allowed:
            found.append(f"z-losses[{step}] {values[0]} instead of {values[1]}")
    for kind in ("gradients", "weights"):
        last = steps + 1 if kind == "weights" else steps
        pairs = zip(getattr(run, kind)[:last], getattr(reference, kind), strict=False)
        for step, (tensors, expected) in enumerate(pairs):
            if not tensors:
                continue
            if tensors.keys() != expected.keys():
                found.append(f"{kind}[{step}]: {sorted(tensors.keys() ^ expected.keys())}")
                continue
            if kind == "weights":
                tensors = {
                    name: torch.where(reference.undecided[name], expected[name], tensor)
                    if name in reference.undecided
                    else tensor
                    for name, tensor in tensors.items()
                }
            error, name = worst_difference(tensors, expected)
            if not error <= tolerance.at(kind, step):
                found.append(f"{kind}[{step}] of {name}: off by {error:.2e} of the largest")
    return found


def decided_steps(run: Run, reference: Run, relative: float = RELATIVE) -> int:
    """Steps before one in which rounding has decided the sign of an update that later steps show.

    Softmax ignores the bias of the keys, whose gradient is nothing but rounding.
    """
    for step, (tensors, expected) in enumerate(zip(run.weights, reference.weights, strict=False)):
        for name, mask in reference.undecided.items():
            if name.endswith("attention.qkv.bias") or name not in tensors:
                continue
            off = (tensors[name] - expected[name])[mask].abs()
            if (off > relative * expected[name].abs().max()).any():
                return step
    return len(reference.losses)


def differing_names(one: Tensors, other: Tensors) -> list[str]:
    """Names of the tensors that are not equal bit for bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def differing_bits(run: Run, other: Run) -> list[str]:
    """What two runs do not have equal bit for bit, of all that they record of each step."""
    found = [kind for kind in ("losses", "norms") if getattr(run, kind) != getattr(other, kind)]
    for kind in ("gradients", "weights"):
        steps = zip(getattr(run, kind), getattr(other, kind), strict=True)
        found += [f"{kind} of {name}" for pair in steps for name in differing_names(*pair)]
    return found


def norm_of(tensors: Tensors) -> float:
    return float(torch.stack([tensor.norm() for tensor in tensors.values()]).norm())


def worst_difference(tensors: Tensors, reference: Tensors) -> tuple[float, str]:
    """The largest difference relative to the largest element of its tensor, and the tensor's name.

    Where the reference is all zeros, so must be the tensor.
    """
    errors = []
    for name, expected in reference.items():
        off = (tensors[name] - expected).abs().max()
        scale = expected.abs().max()
        if torch.isnan(off):
            return float("inf"), name
        errors.append((0.0 if off == 0 else (off / scale).item(), name))
    return max(errors)


def differences_in_half_precision(run: Run, reference: Run) -> list[str]:
    """Lists differences from fp32 that the rounding of bf16 does not explain.

    The limits are at least three times what 300 random layouts had.
    """
    found = []
    if run.losses != pytest.approx(reference.losses, rel=0, abs=1.2e-2):
        found.append(f"losses {run.losses} instead of {reference.losses}")
    if run.norms != pytest.approx(reference.norms, rel=0.04):
        found.append(f"norms {run.norms} instead of {reference.norms}")
    found += differing_statistics(run, HALF_NORM_ERROR, of_weights=False)
    if not (run.gradients[0] and run.gradients[-1]):
        found.append("the first or the last gradients are missing")
    for step, expected in enumerate(reference.gradients):
        if not run.gradients[step]:
            continue
        error, name = worst_difference(run.gradients[step], expected)
        if not error <= (HALF_GRADIENT_ERROR if step == 0 else LATER_GRADIENT_ERROR):
            found.append(f"gradients[{step}] of {name}: off by {error:.2e} of the largest")
    return found
