"""Defers the import of torch's compiler, which takes a second, until something is compiled.

torch's optimizers and activation checkpointing and DeepSpeed's ZeRO stage 3 import `torch._dynamo`
in eager runs, too: to exclude functions from compilation, and to break graphs.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import torch

COMPILER = "torch._dynamo"
CACHED = "__dynamo_disable"
"""The attribute in which torch keeps what `disable` returned for a function."""


def defer_compiler() -> None:
    """Makes `import torch._dynamo` cheap, unless it was imported before.

    For runs without --compile. What is compiled nevertheless (attention inside documents, functions
    between layers on an accelerator) imports the compiler then.
    """
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = torch._dynamo = _DeferredCompiler()  # type: ignore[attr-defined]


class _DeferredCompiler(ModuleType):
    """Does what eager code asks of a compiler: nothing. Imports it for anything else."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__spec__ = importlib.util.find_spec(COMPILER)
        self._functions: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Does nothing: there is no graph."""

    def disable(self, fn: Any = None, recursive: bool = True, **_: Any) -> Any:
        """Returns the function, which nothing compiles."""
        if fn is None:
            return self.disable
        self._functions.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        is_deferred = sys.modules.get(COMPILER) is self
        if is_deferred and name.startswith("__") and name != "__path__":  # asked of every module
            raise AttributeError(name)
        if is_deferred:
            del sys.modules[COMPILER], torch._dynamo
            for function in self._functions:  # torch asks the module again
                vars(function).pop(CACHED, None)
        return getattr(importlib.import_module(COMPILER), name)
