"""Malformed input must be read correctly or rejected with an error that names it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import settings
from hypothesis import strategies as st

Result = TypeVar("Result")

FUZZ_SETTINGS = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "25")),
)
"""The same examples on every machine, without time limits; `make proofs` tries more of them."""

REJECTED = object()


def read_or_error(read: Callable[[], Result], *names: str) -> Result | object:
    """The result of `read`, or `REJECTED` if its error names one of `names`.

    Raises:
        AssertionError: If the error names none of them.
    """
    try:
        return read()
    except (ValueError, OSError) as error:
        text = str(error)
        # UnicodeError and JSONDecodeError are ValueErrors, too, but do not name the file.
        if not any(name in text for name in names):
            raise AssertionError(f"{type(error).__name__}: {text}") from error
        return REJECTED


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
"""Any JSON value, with the numbers that some writers emit: NaN, Infinity, huge ones."""


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all values in a JSON value: () is the value itself, ("a", 0) the first of `a`."""
    found = [path]
    pairs = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in pairs:
        found += paths_in(inner, (*path, key))
    return found


MISSING = object()


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of a JSON value with `new` at a path; MISSING deletes the path."""
    if not path:
        return new
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    if new is MISSING:
        del parent[path[-1]]
    else:
        parent[path[-1]] = new
    return changed
