"""Experts in fp8 on a CPU: their products are those of numbers rounded by row.

Claim (precision): the grouped products of experts in fp8 are, bit for bit, those of each expert's
rows and matrix as a linear layer in fp8 rounds them by row, forward and backward
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ds.config import MoEConfig, PrecisionConfig
from megatron_ds.model.fp8_layers import compute_in_fp8
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.fp8.grouped import Fp8Experts, has_grouped_kernel
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.unit.parallel.test_fp8 import ALONE, SHAPE, draw

SIZES = (5, 0, 9, 2)
"""Rows of each expert."""


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [1, 2])
def test_experts_are_linear_layers_of_their_rows(
    gradients: torch.dtype, dtype: torch.dtype, sharded: int
) -> None:
    recipe = Fp8Recipe(gradients, True, ALONE)
    x = draw(sum(SIZES), 24, dtype=dtype)
    weight = draw(len(SIZES), 20, 24, dtype=dtype)
    bias = draw(len(SIZES), 20, dtype=dtype)
    grad = draw(sum(SIZES), 20, seed=1, dtype=dtype)
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = Fp8Experts(recipe, ALONE, sharded)(*leaves, ends_of(SIZES))
    y.backward(grad)
    computed = [leaf.grad for leaf in leaves]
    start = 0
    for expert, size in enumerate(SIZES):
        rows = slice(start, start + size)
        start += size
        if not size:
            assert not leaves[1].grad[expert].any()  # type: ignore[index]
            continue
        alone = [
            value.clone().requires_grad_() for value in (x[rows], weight[expert], bias[expert])
        ]
        # Row-parallel layers add the bias to what is rounded.
        expected = Fp8Linear(recipe, ALONE, 0)(alone[0], alone[1], None) + alone[2]
        assert torch.equal(y[rows], expected)
        expected.backward(grad[rows])
        for value, leaf, part in zip(computed, alone, (rows, expert, expert), strict=True):
            assert value is not None
            assert leaf.grad is not None
            assert torch.equal(value[part], leaf.grad), (expert, leaf.shape)
    assert not has_grouped_kernel(torch.device("cpu"))


@pytest.mark.parametrize(
    ("fewest", "names"),
    [
        (1, ["mlp.experts.fc_in", "mlp.experts.fc_out", "mlp.shared.fc_in", "mlp.shared.fc_out"]),
        (20, ["mlp.experts.fc_in", "mlp.experts.fc_out"]),
    ],
)
def test_experts_and_the_shared_one_are_in_fp8(fewest: int, names: list[str]) -> None:
    """Experts have 64 inner features, the shared one 16; the router stays in bf16."""
    moe = MoEConfig((4,), moe_ffn_hidden_size=64, moe_shared_expert_intermediate_size=16)
    model = GPTModel(SHAPE, mesh=Mesh.single(), rng=RngStreams(0), seed=3, moe=moe)
    options = {"fp8_format": "hybrid", "fp8_recipe": "rowwise", "fp8_min_features": fewest}
    compute_in_fp8(model, PrecisionConfig(**options))  # type: ignore[arg-type]
    found = [
        name.removeprefix("layers.0.")
        for name, module in model.named_modules()
        if name.startswith("layers.0.mlp") and getattr(module, "training_product", None) is not None
    ]
    assert sorted(found) == names
