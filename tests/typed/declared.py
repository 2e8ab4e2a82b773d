"""The declarations of megatron_ds/parallel/tensor_types.toml, checked at each call.

An operator's inputs and results are checked where it is called, and their gradients where they
enter and leave its backward pass. The type of a gradient follows from that of the tensor; a
backward pass that is written by hand states it, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from spmd_types import I, P, R, V
from torch import Tensor

import megatron_ds
from megatron_ds.parallel.mesh import Group
from tests.typed.checker import Checker, _short
from tests.typed.lattice import NO_DIM, OWN, Type

FILE = Path(megatron_ds.__file__).parent / "parallel" / "tensor_types.toml"
KINDS = {"invariant": I, "replicated": R, "varying": V, "partial": P, "own": OWN.kind}
AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "ulysses": ("ulysses", "cp"),
    "ep": ("ep",),
    "data": ("edp", "ep"),
}


@dataclass(frozen=True)
class Declared:
    """How a tensor lies on an axis."""

    kind: Any
    dim: int | None = None

    @classmethod
    def parse(cls, text: str) -> Declared:
        name, _, dim = text.strip().partition(" ")
        return cls(KINDS[name], NO_DIM if dim == "?" else int(dim) if dim else None)

    @property
    def type(self) -> Type:
        """An invariant tensor has the same values as a replicated one."""
        if self.kind == OWN.kind:
            return OWN
        return Type(R if self.kind is I else self.kind, self.dim)

    @property
    def gradient(self) -> Declared:
        if self.kind == OWN.kind:
            return self
        return Declared(self.kind.backward_type(), self.dim)


@dataclass(frozen=True)
class Signature:
    """The types of an operator's inputs by name, and of its results."""

    inputs: Mapping[str, Declared]
    results: tuple[Declared, ...]

    @classmethod
    def parse(cls, text: str) -> Signature:
        inputs, _, results = text.partition("->")
        pairs = [part.partition(":") for part in inputs.split(",") if part.strip()]
        return cls(
            {name.strip(): Declared.parse(type_) for name, _, type_ in pairs},
            tuple(Declared.parse(part) for part in results.split(",") if part.strip()),
        )

    def stated_backward(self) -> str:
        """The types of the backward pass, as it must state them."""
        names = {kind: name for name, kind in KINDS.items()}

        def text(declared: Declared) -> str:
            dim = "" if declared.dim is None else f" {declared.dim}"
            return names[declared.gradient.kind] + dim

        results = ", ".join(map(text, self.results))
        return f"{results} -> " + ", ".join(f"{n}: {text(d)}" for n, d in self.inputs.items())


@dataclass(frozen=True)
class Operator:
    """A function, method or autograd function, and its types by axis."""

    name: str
    types: Mapping[str, Signature]
    """By axis, or "group" for that of the group it is called with; those with sequence parallelism
    have ", sequence" behind it, those with whole experts ", whole"."""
    backward: Mapping[str, str]
    is_local: bool
    is_in_place: bool
    is_mean: bool
    is_opaque: bool

    def signatures(self, group: Group | None, checker: Checker) -> list[tuple[str, Signature]]:
        """The axes that a call concerns, with the types."""
        found = []
        is_split = checker.axes.mesh.tp.sequence_parallel
        if group is not None and self.has_group:
            is_split = group.sequence_parallel
        conditions = {"whole": checker.axes.mesh.has_whole_experts, "sequence": is_split}
        for key, signature in self.types.items():
            axis, _, condition = key.partition(", ")
            held = [name for name, holds in conditions.items() if holds]
            if condition != next((c for c in held if f"{axis}, {c}" in self.types), ""):
                continue
            names = AXES.get(axis, ())
            if axis == "group":
                assert group is not None
                names = tuple(checker.axes.spanned(group.ranks))
            found += [(name, signature) for name in names if name in checker.axes.names]
        return found

    @property
    def has_group(self) -> bool:
        return any(key.startswith("group") for key in self.types)


@functools.cache
def operators() -> dict[str, Operator]:
    loaded = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {name: _operator(name, entry) for name, entry in loaded.items()}


def _operator(name: str, entry: dict[str, Any]) -> Operator:
    flags = [bool(entry.pop(key, False)) for key in ("local", "in_place", "mean", "opaque")]
    backward = {
        key.removesuffix(", backward"): entry.pop(key) for key in list(entry) if "backward" in key
    }
    return Operator(
        name,
        {key: Signature.parse(text) for key, text in entry.items()},
        backward,
        *flags,
    )


def resolve(name: str) -> tuple[Any, str, Any]:
    """The module or class that has an operator, its attribute, and the operator."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(["megatron_ds", *parts[:end]]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1], getattr(owner, parts[-1])
    raise AttributeError(name)


class _Boundary(torch.autograd.Function):
    """Identity; checks the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, check: Callable[[Tensor], None]) -> Tensor:
        ctx.check = check
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.check(gradient)
        return gradient, None


def checked(
    checker: Checker, tensor: Tensor, types: list[tuple[str, Declared]], what: str, line: str
) -> Tensor:
    """The tensor, which lies as declared, and whose gradient will."""

    def check_gradient(gradient: Tensor) -> None:
        for axis, declared in types:
            checker.conform(gradient, axis, declared.gradient.type, f"the gradient of {what}", line)

    result = _Boundary.apply(tensor, check_gradient) if tensor.requires_grad else tensor.clone()
    for axis, declared in types:
        checker.conform(result, axis, declared.type, what)
    return result  # type: ignore[no-any-return]


def wrapped(operator: Operator, function: Callable[..., Any], checker: Checker, signature: Any,
            line: str) -> Callable[..., Any]:  # fmt: skip
    """The operator with checks."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        values = bound.arguments
        owner = values.get("self")
        group = values.get("group", getattr(owner, "group", None))
        found = operator.signatures(group if isinstance(group, Group) else None, checker)
        short = operator.name.rpartition(".")[2] if owner is None else type(owner).__name__
        for name in {name for _, each in found for name in each.inputs}:
            value = values.get(name)
            if isinstance(value, Tensor):
                types = [(axis, each.inputs[name]) for axis, each in found if name in each.inputs]
                what = f"{name} of {short}"
                if operator.is_in_place:
                    for axis, declared in types:
                        checker.conform(value, axis, declared.type, what)
                else:
                    values[name] = checked(checker, value, types, what, line)
        checker.local += operator.is_local
        checker.means += operator.is_mean
        checker.opaque += operator.is_opaque
        try:
            result = function(*bound.args, **bound.kwargs)
        finally:
            checker.local -= operator.is_local
            checker.means -= operator.is_mean
            checker.opaque -= operator.is_opaque
        results = list(result) if isinstance(result, tuple) else [result]
        for at, value in enumerate(results):
            types = [(axis, each.results[at]) for axis, each in found if at < len(each.results)]
            if isinstance(value, Tensor) and types:
                results[at] = checked(checker, value, types, f"the result of {short}", line)
        if not isinstance(result, tuple):
            return results[0]
        return type(result)(*results) if hasattr(result, "_fields") else tuple(results)

    return run


def opaque(function: Callable[..., Any], checker: Checker) -> Callable[..., Any]:
    """The function, in which no types are inferred on the axis of context parallelism."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        checker.opaque += 1
        try:
            return function(*args)
        finally:
            checker.opaque -= 1

    return run


@functools.cache
def line_of(function: Any) -> str:
    """File and line of a function's definition."""
    try:
        return (
            f"{_short(inspect.getsourcefile(function) or '')}:{inspect.getsourcelines(function)[1]}"
        )
    except (TypeError, OSError):
        return ""


@contextmanager
def enforced(checker: Checker) -> Iterator[None]:
    """Within it, each call of a declared operator is checked."""
    resolved = [(operator, *resolve(operator.name)) for operator in operators().values()]
    modules = [module for name, module in sys.modules.items() if re.match(r"megatron_ds\b", name)]
    with ExitStack() as stack:
        for operator, owner, attribute, target in resolved:
            if isinstance(target, type) and issubclass(target, torch.autograd.Function):
                signature = inspect.signature(target.forward)
                parameters = list(signature.parameters.values())[1:]
                line = line_of(target.backward)
                run = wrapped(
                    operator, target.apply, checker, signature.replace(parameters=parameters), line
                )
                stack.enter_context(mock.patch.object(target, "apply", staticmethod(run)))
                if operator.is_opaque:
                    hidden = staticmethod(opaque(target.backward, checker))
                    stack.enter_context(mock.patch.object(target, "backward", hidden))
                continue
            run = wrapped(operator, target, checker, inspect.signature(target), "")
            if isinstance(owner, type):
                stack.enter_context(mock.patch.object(owner, attribute, run))
                continue
            for module in modules:
                if vars(module).get(attribute) is target:
                    stack.enter_context(mock.patch.object(module, attribute, run))
        yield
