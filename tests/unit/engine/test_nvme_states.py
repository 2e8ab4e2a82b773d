"""Gradients in swap files are read to aligned addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper

from megatron_ds.engine.deepspeed.nvme_states import align_gradients

ALIGNMENT = 256
"""Elements of a block of direct I/O in fp32."""


class Swapper(OptimizerSwapper):
    """DeepSpeed's split of gradients, without files and buffers."""

    def __init__(self) -> None:
        self.numel_alignment = ALIGNMENT
        self.min_aio_bytes = 4 * ALIGNMENT
        self.swap_element_size = 4


@pytest.mark.parametrize("offset", [0, 64, 256, 1000])
@pytest.mark.parametrize("length", [64, 256, 300, 1536])
def test_files_start_and_end_at_aligned_positions(offset: int, length: int) -> None:
    swapper: Any = Swapper()
    align_gradients(SimpleNamespace(optimizer_swapper=swapper))
    gradients = [torch.arange(7.0), torch.arange(float(length))]

    parts, starts = swapper._adjust_for_misaligned_lengths(
        tensors=gradients, offsets=[4096, offset]
    )

    found = torch.zeros(8192)
    for part, start in zip(parts, starts, strict=True):
        found[start : start + len(part)] += part
        if swapper.is_swappable_tensor(tensor=part):
            assert start % ALIGNMENT == len(part) % ALIGNMENT == 0
    expected = torch.zeros(8192)
    expected[4096:4103], expected[offset : offset + length] = gradients
    assert torch.equal(found, expected)
    assert sum(map(len, parts)) == 7 + length


def test_optimizer_without_files_is_left_alone() -> None:
    align_gradients(SimpleNamespace())
