"""Validation of token ids on every kind of device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ds.parallel.embedding import validate_token_ids
from tests.problems import raises_problem


class OnXpu(torch.Tensor):
    """A tensor in host memory that says it is on another device."""

    @property
    def device(self) -> torch.device:
        return torch.device("xpu")


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values).as_subclass(OnXpu)


def test_ids_are_asserted_on_the_device_without_reading_them() -> None:
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    validate_token_ids(meta, 10)  # reading a meta tensor would be an error
    with pytest.raises(RuntimeError, match="outside the vocabulary of 10"):
        validate_token_ids(ids(3, 10), 10)


def test_devices_without_assertions_read_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> None:
        raise NotImplementedError("Could not run 'aten::_assert_async.msg'")

    monkeypatch.setattr(torch, "_assert_async", missing)
    validate_token_ids(ids(0, 9), 10)
    with raises_problem("token-id-outside-vocabulary"):
        validate_token_ids(ids(3, 10), 10)
