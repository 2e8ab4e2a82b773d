"""`dataclass` of the standard library, whose frozen classes are made in half the time.

Python 3.11 and 3.12 compile six methods for each class, which is a quarter of the start of a
program with a hundred classes. Here frozen classes share all methods but `__init__`. A class that
extends one of them needs this `dataclass`, too. Knows no other module.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """See `dataclasses.dataclass`, whose arguments and classes it has."""
        if cls is None:
            return functools.partial(_with_methods, options)
        return _with_methods(options, cls)


class _Factory:
    """Default of a field with a default factory, with the name that the standard library's has."""

    def __repr__(self) -> str:
        return "<factory>"


FACTORY = _Factory()


def _with_methods(options: dict[str, Any], cls: type) -> type:
    """The class with what `dataclasses.dataclass` adds to it."""
    if not options.get("frozen"):
        return dataclasses.dataclass(**options)(cls)
    compares = options.get("eq", True)
    shared: dict[str, Any] = {"__setattr__": _set, "__delattr__": _delete, "__repr__": _repr}
    if compares:
        shared |= {"__eq__": _is_equal, "__hash__": _hash}
    defined = {name for name in shared if vars(cls).get(name) is not None}
    options = {name: value for name, value in options.items() if name not in ("frozen", "eq")}
    cls = dataclasses.dataclass(**options | {"init": False, "repr": False, "eq": False})(cls)
    for name in shared.keys() - defined:
        setattr(cls, name, shared[name])
    if options.get("init", True):
        cls.__init__ = _initializer(cls)  # type: ignore[misc]
    return cls


def _initializer(cls: type) -> Any:
    """Compiles `__init__`, whose arguments are the fields."""
    fields = sorted(dataclasses.fields(cls), key=operator.attrgetter("kw_only"))
    assert all(item.init for item in fields), f"{cls} has a field that is no argument"
    makers = {
        item.name: item.default_factory
        for item in fields
        if item.default_factory is not dataclasses.MISSING
    }
    names = [item.name for item in fields if not item.kw_only]
    only = [item.name for item in fields if item.kw_only]
    arguments = ", ".join(["self", *names, *["*"] * bool(only), *only])
    lines = [f"def __init__({arguments}):", " __values = self.__dict__"]
    for name in (item.name for item in fields):
        made = f"__makers[{name!r}]() if {name} is __factory else " if name in makers else ""
        lines.append(f" __values[{name!r}] = {made}{name}")
    if hasattr(cls, "__post_init__"):
        lines.append(" self.__post_init__()")
    scope: dict[str, Any] = {"__makers": makers, "__factory": FACTORY}
    exec("\n".join(lines), scope)
    initialize = scope["__init__"]
    defaults = {item.name: item.default for item in fields} | dict.fromkeys(makers, FACTORY)
    defaults = {k: v for k, v in defaults.items() if v is not dataclasses.MISSING}
    initialize.__defaults__ = tuple(defaults[name] for name in names if name in defaults)
    initialize.__kwdefaults__ = {name: defaults[name] for name in only if name in defaults}
    initialize.__annotations__ = {item.name: item.type for item in fields} | {"return": None}
    initialize.__qualname__ = f"{cls.__qualname__}.__init__"
    initialize.__module__ = cls.__module__
    return initialize


def _set(self: Any, name: str, value: object) -> None:
    _check_frozen(self, name, "assign to")
    object.__setattr__(self, name, value)


def _delete(self: Any, name: str) -> None:
    _check_frozen(self, name, "delete")
    object.__delattr__(self, name)


def _check_frozen(instance: Any, name: str, action: str) -> None:
    """Raises the error of a frozen instance; a class that extends it may have other attributes."""
    is_declared = "__dataclass_params__" in vars(type(instance))
    if is_declared or name in instance.__dataclass_fields__:
        raise dataclasses.FrozenInstanceError(f"cannot {action} field {name!r}")


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (item.name for item in dataclasses.fields(self) if item.repr)
    values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
    return f"{type(self).__qualname__}({values})"


def _is_equal(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    cls: Any = type(self)
    values = _compared(cls)
    return bool(values(self) == values(other))


def _hash(self: Any) -> int:
    cls: Any = type(self)
    return hash(_hashed(cls)(self))


@functools.cache
def _compared(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the values that make an instance equal to another."""
    return _values(item.name for item in dataclasses.fields(cls) if item.compare)


@functools.cache
def _hashed(cls: Any) -> Callable[[Any], tuple[Any, ...]]:
    """Gives the values in the hash of an instance."""
    fields = dataclasses.fields(cls)
    return _values(
        item.name for item in fields if (item.compare if item.hash is None else item.hash)
    )


def _values(fields: Any) -> Callable[[Any], tuple[Any, ...]]:
    names = tuple(fields)
    if len(names) > 1:
        return operator.attrgetter(*names)  # the fastest, but a bare value of one name
    return lambda instance: tuple(getattr(instance, name) for name in names)
