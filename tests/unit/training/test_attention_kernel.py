"""The name of the attention kernel in the start-up report."""

from __future__ import annotations

import torch

from megatron_ds.model.packed_attention import PackingOptions
from megatron_ds.training.attention_kernel import describe_kernel
from tests.unit.model.dense import dense_flex
from tests.unit.model.test_packed_attention import CONFIG, CPU, EOD


def test_kernel_is_described() -> None:
    def describe(packing: PackingOptions | None) -> str:
        return describe_kernel(CONFIG, 2, 1, torch.float32, CPU, packing)

    assert describe(None) == describe(PackingOptions(EOD, True, False))
    assert "scaled_dot_product_attention: " in describe(None)
    assert "per document" in describe(PackingOptions(EOD, False, True))
    assert "flex_attention" in describe(PackingOptions(EOD, False, True, dense_flex))
