"""Spares runs that compile nothing the import of torch's compiler.

Some functions of torch import `torch._dynamo` when they are first called, to exclude themselves
from compilation: with sympy and more than a thousand other modules, about half of the CPU time
until the first step of a small model. Here they run as they are until something else imports it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.utils.checkpoint
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch._compile import _disable_dynamo

DISABLED = "__dynamo_disable"
"""Attribute in which `torch._disable_dynamo` keeps the function that its wrapper calls."""


def import_dynamo_when_compiling() -> None:
    """Lets optimizers of torch and DeepSpeed's activation checkpoints run without `torch._dynamo`.

    Once it is imported, they do what they do without this call.
    """
    for owner in (torch.optim.Optimizer, torch.utils.checkpoint, checkpointing):
        _call_excluded_functions_directly(owner)
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        step = optimizer.step
        if not hasattr(step, "is_direct"):
            optimizer.step = _direct_step(step)  # type: ignore[method-assign]


def _call_excluded_functions_directly(owner: Any) -> None:
    """Replaces what the wrappers of `torch._disable_dynamo` in a module or class call."""
    wrapper_code = _disable_dynamo(_direct).__code__  # all wrappers have it
    for wrapper in list(vars(owner).values()):
        if isinstance(wrapper, FunctionType) and wrapper.__code__ is wrapper_code:
            function = wrapper.__wrapped__  # type: ignore[attr-defined]
            if not hasattr(function, DISABLED):
                setattr(function, DISABLED, _direct(function))


def _direct(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function as it is until `torch._dynamo` is imported."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        delattr(function, DISABLED)
        return _disable_dynamo(function)(*args, **kwargs)

    return call


def _direct_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step, which torch wraps with a graph break of the compiler."""
    function = inspect.unwrap(step)

    @functools.wraps(function)
    def call(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(self, *args, **kwargs)
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return function(self, *args, **kwargs)

    call.is_direct = True  # type: ignore[attr-defined]
    return call
