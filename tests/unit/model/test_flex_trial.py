"""Selection of flex attention at start-up."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator

from megatron_ds.model import flex_trial
from megatron_ds.model.packed_attention import BLOCK
from tests.problems import codes
from tests.unit.model.dense import dense_flex
from tests.unit.model.test_packed_attention import CONFIG, CPU, POSITIONS


def select(flex: Any, **options: Any) -> Any:
    """The selected function, or the code of the reason why not."""
    config = dataclasses.replace(CONFIG, **options)
    with mock.patch.object(flex_trial, "_compiled_flex", return_value=flex):
        selected, reason = flex_trial.select_flex_attention(config, 2, 2, torch.float32, CPU)
    assert (selected is None) == bool(reason)
    return selected or codes([reason])[0]


@pytest.mark.parametrize("position", POSITIONS)
def test_flex_attention_is_selected_where_it_agrees(position: str) -> None:
    assert select(dense_flex, position_embedding_type=position) is dense_flex


def test_flex_attention_is_rejected_where_it_fails_or_is_wrong() -> None:
    def broken(*args: torch.Tensor, **_: Any) -> torch.Tensor:
        raise RuntimeError("No triton here. Please install it.\nAt length.")

    def ignores_documents(*qkv: torch.Tensor, **_: Any) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, is_causal=True)

    def returns_nan(q: torch.Tensor, *args: torch.Tensor, **_: Any) -> torch.Tensor:
        return q * torch.nan

    assert select(broken) == "flex-attention-failed"
    assert select(ignores_documents) == select(returns_nan) == "flex-attention-inaccurate"
    assert select(dense_flex, attention_dropout=0.1) == "flex-attention-without-dropout"


def test_flex_attention_is_rejected_on_a_cpu() -> None:
    flex, reason = flex_trial.select_flex_attention(CONFIG, 2, 1, torch.float32, CPU)
    assert flex is None
    assert codes([reason]) == ["flex-attention-failed"]


@pytest.mark.gpu(reason="flex attention trains only there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", POSITIONS)
def test_flex_attention_is_selected_on_an_accelerator(position: str, dtype: torch.dtype) -> None:
    device = torch.device(get_accelerator().current_device_name())
    shape = {"hidden_size": 256, "num_query_groups": 2, "seq_length": 5 * BLOCK + 3}
    config = dataclasses.replace(CONFIG, **shape, position_embedding_type=position)
    flex, reason = flex_trial.select_flex_attention(config, 3, 1, dtype, device)
    assert flex is not None, reason
