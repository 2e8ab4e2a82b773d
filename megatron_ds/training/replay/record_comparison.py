"""Compares the record of a step with another one, in the order in which a step computes.

Owns which values are compared, what a difference is relative to, and which values a run may lack.
Reads no files. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron_ds.training.replay.recorded_run import Record

MISSING = "no value"
UNDECIDED = "attention.qkv.bias"
"""End of the names of weights that rounding decides: softmax ignores the bias of the keys, so that
its gradient is nothing but rounding, and Adam's update of it as large as any."""
LEAST = 1e-3
"""Smallest norm to which the difference of a gradient is relative, as a part of the norm of all."""
NOT_DECAYED = ("bias", "norm.weight")
"""Ends of the names of weights that have no weight decay unless --param-group says so."""
DECAY = "all weights: decay"
SCATTER = 6
"""Standard errors of the decay that rounding explains: one false alarm in 10^5 steps, of 20 weights
(Student's distribution)."""
AFTER_LAYER = " end"
"""End of the name of a layer's random state after its forward pass."""


class Difference(NamedTuple):
    """A value of a record, and the one that is expected."""

    cause: str
    """A key of `verification.CAUSES`."""
    where: str
    """Sample, or layer and tensor."""
    run: Any
    expected: Any
    size: float
    """Relative to a norm; infinite where hashes are not equal, or a value is missing."""


class Value(NamedTuple):
    """A value of a record."""

    cause: str
    where: str
    value: Any
    scale: float | None = None
    """The norm to which a difference is relative; None: the value itself."""


def compare(run: Record, replay: Record, *, is_compiled: bool = False) -> Iterator[Difference]:
    """Compares a record with its replay.

    Args:
        run: Record of the run.
        replay: Record of the same step, replayed.
        is_compiled: The run has compiled layers, whose outputs and random states are not recorded.
    """
    run_values = {(item.cause, item.where): item for item in values_of(run)}
    replay_values = {(item.cause, item.where): item for item in values_of(replay)}
    for key in dict.fromkeys([*replay_values, *run_values]):
        recorded = run_values.get(key)
        expected = replay_values.get(key)
        if recorded is None and is_compiled and _is_of_a_layer(*key):
            continue
        yield difference(key, recorded, expected)
    yield from _decay(run, replay)


def continued(before: Record, after: Record) -> Iterator[Difference]:
    """Compares the weights after a step with those before the next one.

    Args:
        before: Record of a step.
        after: Record of the next step, or of its replay.
    """
    if before["skipped"] or after["skipped"]:  # its record has no weights
        return
    values_before = {item.where: item for item in _norms(before, "updated", "weights")}
    values_after = {item.where: item for item in _norms(after, "weights", "weights")}
    for name in dict.fromkeys([*values_before, *values_after]):
        yield difference(("weights", name), values_after.get(name), values_before.get(name))


def difference(key: tuple[str, str], run: Value | None, expected: Value | None) -> Difference:
    """The difference of two values of a name, of which one may be missing."""
    if run is None or expected is None:
        recorded = MISSING if run is None else run.value
        return Difference(*key, recorded, MISSING if expected is None else expected.value, math.inf)
    size = 0.0 if run.value == expected.value else math.inf
    if size and _is_number(run.value) and _is_number(expected.value):
        scale = expected.scale or abs(expected.value) or abs(run.value)
        size = abs(run.value - expected.value) / scale
    return Difference(*key, run.value, expected.value, size)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_of_a_layer(cause: str, where: str) -> bool:
    is_output = cause == "forward" and where.endswith(": output")
    return is_output or (cause == "random numbers" and where.endswith(AFTER_LAYER))


def values_of(record: Record) -> Iterator[Value]:
    """The values of a record, in the order in which a step computes."""
    for name, value in record["samples"].items():
        yield Value("data", f"sample {name}", value)
    yield from _norms(record, "weights", "weights", without=UNDECIDED)
    for name, value in record["random"].items():
        yield Value("random numbers", name, value)
    for name, value in record["layers"].items():
        yield Value("forward", f"{name}: output", value)
    yield Value("forward", "head: loss", record["loss"])
    yield from _gradients(record)
    yield Value("optimizer", "skipped", record["skipped"])
    yield from _updates(record)
    yield from _norms(record, "updated", "optimizer", without=UNDECIDED)


def _norms(record: Record, key: str, cause: str, without: str | None = None) -> Iterator[Value]:
    """Norms and sums of weights, except for names that end with `without`."""
    for name, (norm, total) in record.get(key, {}).items():
        if without is None or not name.endswith(without):
            yield Value(cause, f"{name}: norm", norm, norm)
            yield Value(cause, f"{name}: sum", total, norm)


def _gradients(record: Record) -> Iterator[Value]:
    """Norms and sums of gradients in the order of a backward pass, and the global norm."""
    least = LEAST * (record["grad_norm"] or 0.0)
    for name, (norm, total) in reversed(record.get("gradients", {}).items()):
        scale = max(norm or 0.0, least)
        yield Value("gradient", f"{name}: norm", norm, scale)
        yield Value("gradient", f"{name}: sum", total, scale)
    yield Value("gradient", "all parameters: norm", record["grad_norm"])


def _updates(record: Record) -> Iterator[Value]:
    """Norm of each parameter's update, and its direction relative to the weights.

    The direction is `|after|^2 - |before|^2`, relative to the norms of update and weight: twice the
    cosine between both, plus the ratio of their norms. Weight decay changes it by as much as it
    contributes to the update, whatever the learning rate; the norm of the update hardly shows it.
    """
    updates: Mapping[str, float | None] = record.get("update", {})
    for name, update in updates.items():
        if name.endswith(UNDECIDED):
            continue
        yield Value("update", f"{name}: norm", update)
        growth = _growth(record, name)
        if growth is not None:
            yield Value("update", f"{name}: direction", growth, 1.0)


def _growth(record: Record, name: str) -> float | None:
    """`|after|^2 - |before|^2` of a weight, relative to the norms of update and weight."""
    update: float | None = record.get("update", {}).get(name)
    before, _ = record.get("weights", {}).get(name, (None, None))
    after, _ = record.get("updated", {}).get(name, (None, None))
    if not before or after is None or not update:
        return None
    return float((after - before) * (after + before) / (before * update))


def _decay(run: Record, replay: Record) -> Iterator[Difference]:
    """Difference of the directions of all updates that another weight decay would explain.

    Another decay moves the direction of each weight by a multiple of `|weight| / |update|`, and all
    of them to the same side. Rounding moves each by itself: its part of the update is as good as
    orthogonal to the weight. The slope of the differences over these ratios, by least squares,
    therefore shows a decay that is within the rounding of a single weight. From its amount
    `SCATTER` standard errors are subtracted, which are computed from what the slope leaves
    (White 1980: they need not be equal). In the mean over the weights, it is a direction as those
    above.
    """
    names = [name for name in replay.get("update", {}) if not name.endswith(NOT_DECAYED)]
    pairs = {name: (_growth(run, name), _growth(replay, name)) for name in names}
    known = {
        name: (run_growth, replay_growth)
        for name, (run_growth, replay_growth) in pairs.items()
        if run_growth is not None and replay_growth is not None
    }
    if len(known) < 2:
        return
    ratios = {name: replay["weights"][name][0] / replay["update"][name] for name in known}
    squares = math.fsum(ratio**2 for ratio in ratios.values())
    slopes = [
        math.fsum(ratios[name] * values[side] for name, values in known.items()) / squares
        for side in (0, 1)
    ]
    slope = slopes[0] - slopes[1]
    left = {name: values[0] - values[1] - slope * ratios[name] for name, values in known.items()}
    freedom = len(known) / (len(known) - 1)
    error = math.sqrt(freedom * math.fsum((ratios[x] * left[x]) ** 2 for x in known)) / squares
    mean = math.fsum(ratios.values()) / len(ratios)
    size = max(0.0, abs(slope) - SCATTER * error) * mean
    yield Difference("update", DECAY, slopes[0] * mean, slopes[1] * mean, size)
