"""Frozen dataclasses behave as those of the standard library."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import pickle
from collections.abc import Callable
from dataclasses import field
from typing import Any

import pytest

from megatron_ds import dataclass as ours


def make_classes(dataclass: Any) -> dict[str, type]:
    @dataclass(frozen=True)
    class Point:
        """A point."""

        values: int
        y: float = math.nan
        names: tuple[str, ...] = field(default=(), repr=False, compare=False)
        table: dict[str, int] = field(default_factory=dict, hash=False)

        @functools.cached_property
        def double(self) -> int:
            return 2 * self.values

    @dataclass(frozen=True)
    class Single:
        """One field."""

        x: float

    @dataclass(frozen=True)
    class Empty:
        """No field."""

    @dataclass(frozen=True)
    class Named(Point):
        """Extends Point."""

        _: dataclasses.KW_ONLY
        name: str
        size: int = 3

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError("size")

    @dataclass(frozen=True, eq=False)
    class Identity:
        """Equal to itself alone."""

        x: int = 1

    @dataclass(frozen=True)
    class Custom:
        """With methods that the decorator keeps."""

        x: int

        def __repr__(self) -> str:
            return "custom"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Custom) and abs(self.x) == abs(other.x)

        def __hash__(self) -> int:
            return abs(self.x)

    class Plain(Point):
        """A class of its shared attributes."""

    classes = (Point, Single, Empty, Named, Identity, Custom, Plain)
    for cls in classes:
        cls.__qualname__ = cls.__name__
    return {cls.__name__: cls for cls in classes}


STANDARD = make_classes(dataclasses.dataclass)
OURS = make_classes(ours.dataclass)
ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "Point": [((1,), {}), ((1, 2.0), {}), ((), {"values": 1, "table": {"a": 1}, "names": ("x",)})],
    "Single": [((1,), {}), ((math.nan,), {}), ((2.5,), {})],
    "Empty": [((), {})],
    "Named": [((1,), {"name": "a"}), ((1, 2.0), {"name": "a", "size": 5})],
    "Identity": [((), {}), ((2,), {})],
    "Custom": [((1,), {}), ((-1,), {}), ((2,), {})],
    "Plain": [((1,), {}), ((1, 2.0), {})],
}


def instances(classes: dict[str, type], name: str) -> list[Any]:
    cls = classes[name]
    return [cls(*values, **named) for values, named in ARGUMENTS[name] for _ in range(2)]


def outcome(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """What a function returns, or the kind of its error."""
    try:
        return function(*values, **named)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_classes_are_those_of_the_standard_library(name: str) -> None:
    standard = instances(STANDARD, name)
    shared = instances(OURS, name)
    assert list(map(repr, standard)) == list(map(repr, shared))
    assert [[a == b for b in standard] for a in standard] == [
        [a == b for b in shared] for a in shared
    ]
    assert [a == b for a, b in zip(standard, shared, strict=True)] == [False] * len(shared)
    if name != "Identity":
        assert [outcome(hash, a) for a in standard] == [outcome(hash, a) for a in shared]
    assert list(map(vars, standard)) == list(map(vars, shared))
    assert [dataclasses.asdict(a) for a in standard] == [dataclasses.asdict(a) for a in shared]
    signatures = [inspect.signature(classes[name]) for classes in (STANDARD, OURS)]
    assert [list(signature.parameters) for signature in signatures] == [
        list(signatures[0].parameters)
    ] * 2
    assert STANDARD[name].__match_args__ == OURS[name].__match_args__  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_instances_are_frozen(name: str) -> None:
    for classes in (STANDARD, OURS):
        instance = instances(classes, name)[0]
        fields = [item.name for item in dataclasses.fields(instance)]
        for field_name in [*fields, *(["other"] if name != "Plain" else [])]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(instance, field_name, 1)
            with pytest.raises(dataclasses.FrozenInstanceError):
                delattr(instance, field_name)
        if name == "Plain":
            instance.other = 1
            assert instance.other == 1
            del instance.other


@pytest.mark.parametrize(
    ("name", "values", "named"),
    [
        ("Point", (), {}),
        ("Point", (1, 2, (), {}, 5), {}),
        ("Point", (1,), {"unknown": 1}),
        ("Named", (1, 2.0, (), {}, "a"), {}),
        ("Named", (1,), {}),
        ("Named", (1,), {"name": "a", "size": -1}),
    ],
)
def test_wrong_arguments_are_errors(
    name: str, values: tuple[Any, ...], named: dict[str, Any]
) -> None:
    errors = [outcome(classes[name], *values, **named) for classes in (STANDARD, OURS)]
    assert errors[0] is errors[1]
    assert issubclass(errors[0], Exception)


def test_copies_and_default_factories() -> None:
    point = OURS["Point"](3, 1.5)
    assert point.double == 6
    assert vars(point)["double"] == 6
    changed = dataclasses.replace(point, y=2.5)
    assert (changed.values, changed.y, changed.double) == (3, 2.5, 6)
    assert copy.deepcopy(point) == point
    assert OURS["Point"](3).table is not OURS["Point"](3).table


@ours.dataclass(frozen=True)
class Pickled:
    """A class that pickle can find."""

    x: int
    inner: Pickled | None = None


def test_pickled() -> None:
    value = Pickled(1, Pickled(2))
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(pickle.loads(pickle.dumps(value))) == hash(value)


def test_a_repr_that_contains_itself_ends() -> None:
    table: dict[str, Any] = {}
    point = OURS["Point"](1, 2.0, (), table)
    table["self"] = point
    assert repr(point) == "Point(values=1, y=2.0, table={'self': ...})"
