"""Copies of state dicts in host memory: the same files, and nothing shared with the originals."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_ds.engine.states.host_staging import HostStaging


def bytes_of(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.fixture
def states() -> dict[str, Any]:
    """What state dicts have: views of one storage, objects that occur twice, other values."""
    flat = torch.arange(24.0)
    parameter = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    swapped = torch.ones(2)
    swapped.ds_id = "0_0"
    swapped.others = [flat, swapped.detach()]
    groups = [{"lr": 0.1, "params": [0, 1]}]
    return {
        "module": OrderedDict(a=flat[:6].view(2, 3), b=flat[6:8], transposed=flat.view(4, 6).T),
        "flat": flat,
        "parameters": (parameter, parameter.detach(), nn.Parameter(flat[2:4], False)),
        "state": {0: {"step": torch.tensor(3), "exp_avg": torch.zeros(5)[1:]}, 1: {}},
        "groups": groups,
        "swapped": swapped,
        "again": [groups, flat],
        "empty": torch.empty(0, 4),
        "plain": [None, True, 7, 2.5, "text", b"bytes", torch.float16, {1, 2}],
    }


def test_files_of_a_copy_equal_those_of_the_original_byte_by_byte(states: dict[str, Any]) -> None:
    before = bytes_of(states)
    copied = HostStaging().copy(states)
    assert bytes_of(copied) == before
    states["flat"].fill_(-1)
    states["parameters"][0].data.fill_(-1)
    states["state"][0]["step"] += 1
    states["groups"][0]["lr"] = 0.2
    states["groups"][0]["params"].append(2)
    states["module"]["c"] = torch.zeros(1)
    assert bytes_of(copied) == before
    assert bytes_of(states) != before


def test_a_copy_reuses_the_memory_of_the_one_before(states: dict[str, Any]) -> None:
    copies = HostStaging()
    first: Tensor = copies.copy(states)["flat"]
    states["flat"] += 1
    size = copies.nbytes
    second = copies.copy(states)
    assert second["flat"].data_ptr() == first.data_ptr()
    assert bytes_of(second) == bytes_of(states)
    assert copies.nbytes == size == 4 * (24 + 5 + 2) + 3 * 2 + 8

    states["state"][1] = {"exp_avg": torch.ones(1000)}
    third = copies.copy(states)
    assert bytes_of(third) == bytes_of(states)
    assert copies.nbytes == size + 4000
    del states["state"][1]
    copies.copy(states)
    assert copies.nbytes == size


def test_objects_of_deepspeed_are_copied() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    scaler = DynamicLossScaler(256.0, 2.0, 1000, 1.0, 1, False)
    copied = HostStaging().copy({"loss_scaler": scaler})
    scaler.cur_scale = 1.0
    assert copied["loss_scaler"].cur_scale == 256.0
