"""Records which parameters' gradients are finite, for a message about a skipped step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def watch_gradients(
    parameters: Iterable[tuple[str, nn.Parameter]],
) -> Iterator[dict[str, torch.Tensor]]:
    """Record whether gradients are finite, as autograd computes them.

    Args:
        parameters: Parameters by name.

    Yields:
        A mapping that backward passes inside the context fill, in their order: name ->
        unsynchronized boolean tensor.
    """
    finite: dict[str, torch.Tensor] = {}

    def recorder(name: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            is_finite = gradient.isfinite().all()
            finite[name] = finite.get(name, is_finite) & is_finite

        return record

    hooks = [parameter.register_hook(recorder(name)) for name, parameter in parameters]
    try:
        yield finite
    finally:
        for hook in hooks:
            hook.remove()
