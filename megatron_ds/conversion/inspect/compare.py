"""Compares two checkpoints tensor by tensor, whatever their formats and layouts are.

One tensor of each is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ds.config.problems import ignore
from megatron_ds.conversion.inspect.open import WEIGHT, CheckpointSummary
from megatron_ds.engine.states.state_reader import TensorReader

BLOCK = 2**20
"""Elements that are compared at once."""

OnTensor = Callable[[int], None]
"""Called with the bytes of each pair of tensors that has been compared."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints have with different shapes, types or values."""

    kind: str
    name: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    num_different: int
    """Elements with different values; all of them if the shapes differ."""
    max_abs: float | None
    """Largest absolute difference; None if the shapes differ."""
    max_rel: float | None
    """Largest difference relative to the largest absolute value in both tensors."""

    @property
    def numel(self) -> int:
        return torch.Size(self.shapes[0]).numel()


@dataclass(frozen=True)
class Comparison:
    """Equal and different tensors and settings of two checkpoints."""

    num_equal: dict[str, int]
    """Equal tensors of each kind."""
    differences: tuple[TensorDifference, ...]
    only_in_first: tuple[str, ...]
    """Tensors that the second one lacks, as `kind name`."""
    only_in_second: tuple[str, ...]
    scalars: dict[str, tuple[object, object]]
    """Steps and loss scale that differ."""
    uncompared: tuple[str, ...]
    """Kinds of states that are not compared, because one of the checkpoints has only weights."""

    @property
    def is_equal(self) -> bool:
        missing = (*self.only_in_first, *self.only_in_second)
        return not (self.differences or missing or self.scalars)


def compare(
    first: CheckpointSummary, second: CheckpointSummary, on_tensor: OnTensor = ignore
) -> Comparison:
    """Compares weights, and the states of the optimizer if both checkpoints have some.

    Values are compared as numbers: of tensors of two types those are equal that are the same
    number, and nan equals nan.
    """
    kinds = [*dict.fromkeys((*first.tensors, *second.tensors))]
    with_states = len(first.tensors) > 1 and len(second.tensors) > 1
    compared = kinds if with_states else [WEIGHT]
    equal: dict[str, int] = {}
    differences: list[TensorDifference] = []
    missing: tuple[list[str], list[str]] = ([], [])
    for key in compared:
        ours = first.tensors.get(key, {})
        theirs = second.tensors.get(key, {})
        missing[0].extend(f"{key} {name}" for name in ours if name not in theirs)
        missing[1].extend(f"{key} {name}" for name in theirs if name not in ours)
        common = [name for name in ours if name in theirs]
        results = [_difference(key, name, ours[name], theirs[name], on_tensor) for name in common]
        differences.extend(result for result in results if result is not None)
        equal[key] = results.count(None)
    names = {*first.scalars, *second.scalars} if with_states else set()
    pairs = {name: (first.scalars.get(name), second.scalars.get(name)) for name in sorted(names)}
    return Comparison(
        num_equal=equal,
        differences=tuple(differences),
        only_in_first=tuple(missing[0]),
        only_in_second=tuple(missing[1]),
        scalars={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        uncompared=tuple(name for name in kinds if name not in compared),
    )


def _difference(
    key: str, name: str, first: TensorReader, second: TensorReader, on_tensor: OnTensor
) -> TensorDifference | None:
    """Difference of two tensors; None if they are equal, their type included."""
    num_different = first.numel
    max_abs = None
    max_rel = None
    if first.shape == second.shape:
        num_different, max_abs, max_rel = _largest_differences(first.read(), second.read())
    on_tensor(first.nbytes + second.nbytes)
    if first.shape == second.shape and first.dtype == second.dtype and not num_different:
        return None
    dtypes = (str(first.dtype).removeprefix("torch."), str(second.dtype).removeprefix("torch."))
    return TensorDifference(
        key, name, (first.shape, second.shape), dtypes, num_different, max_abs, max_rel
    )


def _largest_differences(first: Tensor, second: Tensor) -> tuple[int, float, float]:
    """Number of different elements, largest absolute and largest relative difference."""
    count = 0
    largest = 0.0
    scale = 0.0
    if first.dtype == second.dtype and torch.equal(first, second):
        return count, largest, 0.0
    blocks = [tensor.detach().flatten().split(BLOCK) for tensor in (first, second)]
    for one, other in zip(*blocks, strict=True):
        left = one.double()
        right = other.double()
        scale = max(scale, _largest(left), _largest(right))
        different = (left != right) & ~(left.isnan() & right.isnan())
        if differing := int(different.sum()):
            count += differing
            # A difference from nan, or of infinities, is not a number.
            gaps = (left - right)[different].abs().nan_to_num(torch.inf, torch.inf)
            largest = max(largest, float(gaps.max()))
    return count, largest, largest / scale if scale else 0.0


def _largest(values: Tensor) -> float:
    """Largest finite absolute value."""
    return float(values.nan_to_num(0.0, 0.0, 0.0).abs().max())
