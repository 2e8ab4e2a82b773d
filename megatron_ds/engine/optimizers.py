"""Makes the optimizers that DeepSpeed cannot make from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_ds.config.problems import user_error
from megatron_ds.engine.adam_kernels import apex_adam
from megatron_ds.engine.lion import Lion


def client_optimizer(block: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Makes the optimizer of parameter groups; None if DeepSpeed makes it.

    Args:
        block: `optimizer` of the generated DeepSpeed configuration.

    Raises:
        UserError: If it was requested and is not installed.
    """
    if block["type"] == "megatron_ds.Lion":
        return partial(Lion, **block["params"])
    if block["type"] != "ApexFusedAdam":
        return None
    kind: Callable[..., Any] | None = apex_adam()
    if kind is None:
        raise user_error("apex-not-installed")
    params = {name: value for name, value in block["params"].items() if name != "torch_adam"}
    return partial(kind, **params, adam_w_mode=True)
