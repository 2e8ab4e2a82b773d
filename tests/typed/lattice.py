"""How a tensor lies on one axis of the mesh, and which types may meet in an operation.

Replicated, varying and partial, and which of them combine, are those of spmd_types. A varying
tensor also has the dimension along which the ranks have distinct parts, where that is known: a
product over such a dimension is a partial sum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from spmd_types import P, R, SpmdTypeError, V
from spmd_types._checker import OpLinearity, _infer_local_type_for_axis_raw
from spmd_types._scalar_sentinel import _Scalar

NONLINEAR = OpLinearity.NONLINEAR
LINEAR = OpLinearity.LINEAR
MULTILINEAR = OpLinearity.MULTILINEAR


class Dim(int):
    """A dimension into which several were merged, of which one is sharded."""

    inner: int
    """Elements of those behind the sharded one."""


def moved(dim: int, to: int, inner: int | None = None) -> int:
    """The dimension at another position."""
    inner = getattr(dim, "inner", None) if inner is None else inner
    if inner is None:
        return to
    result = Dim(to)
    result.inner = inner
    return result


class Type(NamedTuple):
    """The type of a tensor on an axis."""

    kind: Any
    """R, V or P; None of zeros and of memory that nothing has been written to."""
    dim: int | None = None
    """Dimension along which the parts of a varying tensor are distinct. None: it is not known."""

    def __str__(self) -> str:
        name = NAMES[self.kind]
        return name if self.dim is None else f"{name} along dimension {self.dim}"


NAMES = {None: "zero", R: "replicated", V: "varying", P: "partial"}
REPLICATED = Type(R)
PARTIAL = Type(P)
ZERO = Type(None)
NO_DIM = -100
"""Declared of a varying tensor whose parts lie along no dimension."""
OWN = Type("own")
"""Declared of a sum over this rank's samples, which the rank uses by itself."""


def varying(dim: int | None = None) -> Type:
    return Type(V, dim)


class MismatchError(Exception):
    """Types that must not meet."""


REASONS = {
    NONLINEAR: "a nonlinear function of a partial sum: reduce it first",
    LINEAR: "a partial sum is added to what is none, which counts once per rank: reduce it first",
    MULTILINEAR: "a partial sum is multiplied by what differs between the ranks",
}


def combine(types: Iterable[Type], linearity: OpLinearity, *, has_scalar: bool = False) -> Any:
    """The kind of an operation's result.

    Args:
        types: Types of its inputs.
        linearity: In which of them it is linear.
        has_scalar: Whether it adds a number.

    Raises:
        MismatchError: The types must not meet.
    """
    return _combine(tuple(each.kind for each in types), linearity, has_scalar)


@functools.cache
def _combine(kinds: tuple[Any, ...], linearity: OpLinearity, has_scalar: bool) -> Any:
    present = [kind for kind in kinds if kind is not None]
    if not present:
        return R if has_scalar or linearity is NONLINEAR or not kinds else None
    if linearity is MULTILINEAR and len(present) < len(kinds):
        return None  # a product with zeros
    try:
        operands = [*present, *([_Scalar] if has_scalar else [])]
        return _infer_local_type_for_axis_raw("axis", operands, linearity=linearity)
    except SpmdTypeError:
        raise MismatchError(f"{REASONS[linearity]} ({_listed(kinds)})") from None


def _listed(kinds: Iterable[Any]) -> str:
    return ", ".join(NAMES[kind] for kind in kinds)


def merged(before: Type, written: Type) -> Type:
    """The type of memory of which a part is written."""
    if before.kind is None or written.kind is None or before == written:
        return written if before.kind is None else before
    if before.kind == written.kind:
        return Type(before.kind)
    if P in (before.kind, written.kind):
        raise MismatchError(
            f"a tensor is partial in one part and not in another ({before}, {written})"
        )
    return before if before.kind is V else varying()
