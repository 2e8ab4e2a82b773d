"""Lets programs that ask for CUDA run on the CPU."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Gives their code tensors of the CPU with CUDA's names of types."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        is_name = func is Tensor.type and len(args) == 1
        return found.replace("torch.", "torch.cuda.") if is_name else found


def patch_devices(patch: pytest.MonkeyPatch) -> None:
    """Replaces what asks for a device outside of operations on tensors."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    patch.setattr(torch.cuda, "synchronize", lambda *args: None)
    patch.setattr(torch.cuda, "empty_cache", lambda: None)
    patch.setattr(CudaRNGStatesTracker, "fork", lambda *args: contextlib.nullcontext())
