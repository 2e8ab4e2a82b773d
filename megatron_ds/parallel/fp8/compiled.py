"""Compiles the functions of `casts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_ds.parallel.fp8.casts import Casts, PartCasts

Functions = TypeVar("Functions", Casts, PartCasts)


class CompiledForShapes:
    """A function that is compiled for each of the shapes with which it is called.

    A model's layers have more of them than torch compiles a function for by default, after which it
    would be eager.

    Args:
        function: A function of tensors, tuples of them, and other values that can be hashed.
        options: Options of torch's compiler.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self._compiled = torch.compile(function, dynamic=False, options=options or None)
        self._calls: set[tuple[Any, ...]] = set()

    def __call__(self, *arguments: Any) -> Any:
        call = torch.is_grad_enabled(), *map(_specialized, arguments)
        if call in self._calls:
            return self._compiled(*arguments)
        self._calls.add(call)
        # Until a call has been compiled.
        with torch._dynamo.config.patch(recompile_limit=len(self._calls) + 8):
            return self._compiled(*arguments)


def _specialized(argument: Any) -> Any:
    """What a compiled function depends on of an argument."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.requires_grad
    return tuple(map(_specialized, argument)) if isinstance(argument, tuple) else argument


def compiled(eager: Functions, options: dict[str, Any], *, dynamic: bool | None) -> Functions:
    """The functions compiled by torch.compile, each on its first call.

    Args:
        eager: The functions.
        options: Options of torch's compiler.
        dynamic: Whether shapes vary. False: compile for each shape. None: compile the second shape
            for all.
    """

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        if dynamic is False:
            return CompiledForShapes(function, options)
        return torch.compile(function, dynamic=dynamic, options=options or None)

    return type(eager)(**{field.name: of(getattr(eager, field.name)) for field in fields(eager)})
