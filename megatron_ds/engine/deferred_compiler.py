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
        stand_in = DeferredCompiler(COMPILER)
        sys.modules[COMPILER] = stand_in
        torch._dynamo = stand_in  # type: ignore[attr-defined]


class DeferredCompiler(ModuleType):
    """Does what eager code asks of a compiler, which is nothing, and imports it for anything else.

    Args:
        name: Name of the module that it stands in for.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.find_spec(name)
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
        is_special = name.startswith("__") and name != "__path__"  # asked of every module
        if is_special and sys.modules.get(self.__name__) is self:
            raise AttributeError(name)
        return getattr(self._load(), name)

    def _load(self) -> ModuleType:
        """Imports the module in place of this one."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
            parent, _, child = self.__name__.rpartition(".")
            if parent and vars(sys.modules[parent]).get(child) is self:
                delattr(sys.modules[parent], child)
            for function in self._functions:  # torch asks the module again
                vars(function).pop(CACHED, None)
        return importlib.import_module(self.__name__)
