"""What a malformed input must lead to: an error in words that names it, or the right reading."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

Result = TypeVar("Result")

FUZZ = settings(derandomize=True, deadline=None, database=None, max_examples=200)
"""The same examples on every machine, and none judged by its time."""

REFUSED = object()


def read_or_refuse(read: Callable[[], Result], *named: str) -> Result | object:
    """What `read` gives, or REFUSED if it raises an error that names one of `named`.

    An error of any other kind, or without the name, comes through.
    """
    try:
        return read()
    except (ValueError, OSError) as error:
        text = str(error)
        # A bare UnicodeError or JSONDecodeError is a ValueError too, but says nothing of a file.
        if not any(name in text for name in named):
            raise AssertionError(f"{type(error).__name__}: {text}") from error
        return REFUSED


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.sampled_from([0, 1, -1, 1 << 31, 1 << 63, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "none", "cpu", "nan", "1", "\x00", "\ud800", "../x", "é"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
"""Any JSON value, and the numbers that JSON of other writers holds: NaN, Infinity, huge ones."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value has values: () is the whole, ("a", 0) the first of the list `a`."""
    found = [path]
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in pairs:
        found += paths_in(inner, (*path, key))
    return found


MISSING = object()


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with another one at a place; MISSING takes the place away."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    if new is MISSING:
        del at[path[-1]]
    else:
        at[path[-1]] = new
    return changed
