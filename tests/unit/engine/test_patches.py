"""Replaced methods of DeepSpeed, on stand-ins for its classes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.swap_tensor import partitioned_param_swapper
from torch import Tensor

from megatron_ds.engine.deepspeed.patches import (
    limit_parameter_prefetch,
    reduce_norm_once,
    spare_work_of_stage_0,
)

BUFFERS = 5


class Swapper:
    """Records the parameters that are read, as numbers."""

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def available_swap_in_buffers(self) -> int:
        return BUFFERS

    def swap_in(
        self, params: list[Any], async_op: bool = True, swap_in_buffers: Any = None
    ) -> None:
        self.read.append(params)


@pytest.mark.parametrize(
    ("params", "is_prefetch", "read"),
    [
        pytest.param([1, 2, 1], True, [[1, 2]], id="each-once"),
        pytest.param([1, 2, 3, 4], True, [[1, 2, 3]], id="leaves-buffers-for-a-weight-and-a-bias"),
        pytest.param([1, 2, 3, 4], False, [[1, 2, 3, 4]], id="needed-now"),
        pytest.param([], True, [], id="nothing"),
    ],
)
def test_prefetch_leaves_buffers_for_the_next_module(
    params: list[int], is_prefetch: bool, read: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_param_swapper, "AsyncPartitionedParameterSwapper", Swapper)
    monkeypatch.setattr(Swapper, "swap_in", Swapper.swap_in)  # restored afterwards
    limit_parameter_prefetch()
    swapper = Swapper()
    swapper.swap_in(params, async_op=is_prefetch)
    assert swapper.read == read


class Offloading:
    """A ZeRO optimizer whose norm is on the host, of two parameter groups."""

    def __init__(self) -> None:
        self.messages = 0

    def _model_parallel_all_reduce(self, *_: Any, **__: Any) -> None:
        self.messages += 1

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        for _ in range(2):
            self._model_parallel_all_reduce()
        return torch.tensor(3.0)


def test_norm_of_offloaded_states_is_summed_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process groups of an accelerator send nothing that is on the host."""
    sent: list[str] = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, group: sent.append(value.device.type))
    monkeypatch.setattr(Tensor, "to", _move)
    optimizer = Offloading()
    reduce_norm_once(optimizer, None, torch.device("meta"))
    norm = optimizer.scaled_global_norm()

    assert sent == ["meta"]
    assert norm.device.type == "cpu"
    assert optimizer.messages == 0


def _move(value: Tensor, device: torch.device) -> Tensor:
    """Like `Tensor.to`, which cannot copy from the meta device."""
    return torch.empty_like(value, device=device)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_single_replica_of_stage_0_reduces_nothing(replicas: int) -> None:
    engine = SimpleNamespace()
    engine.enable_backward_allreduce = True
    engine.pipeline_enable_backward_allreduce = True
    spare_work_of_stage_0(engine, lambda: None, [], replicas)
    flags = (engine.enable_backward_allreduce, engine.pipeline_enable_backward_allreduce)
    assert flags == (replicas > 1, replicas > 1)
