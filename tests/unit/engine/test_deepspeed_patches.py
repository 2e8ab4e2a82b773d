"""Replaced methods of DeepSpeed, on stand-ins for its classes."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed.runtime.swap_tensor import partitioned_param_swapper

from megatron_ds.engine.deepspeed_patches import limit_parameter_prefetch

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
