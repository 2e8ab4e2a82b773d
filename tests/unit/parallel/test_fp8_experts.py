"""Experts in fp8 on a CPU: their products are those of linear layers in fp8.

Claim (precision): the grouped products of experts in fp8 are, bit for bit, those of each expert's
rows of a micro-batch and its matrix as a linear layer in fp8 rounds them, forward and backward,
with one scale and with scales of rows
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron_ds.config import MoEConfig, PrecisionConfig
from megatron_ds.model.fp8_layers import compile_rounding, compute_in_fp8
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.fp8.grouped import Fp8Experts, has_grouped_kernel
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2, round_stack_both
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.proofs.cases import with_proofs
from tests.unit.parallel.test_fp8 import ALONE, SHAPE, draw

COUNTS = [[[5], [0], [9], [2]], [[5, 3], [0, 0], [9, 1], [0, 2]]]
"""Rows of each expert from each micro-batch, of one and of two."""


@pytest.mark.parametrize("gradients", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [1, 2])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts_are_linear_layers_of_their_rows_of_a_micro_batch(
    gradients: torch.dtype, dtype: torch.dtype, sharded: int, by_row: bool, counts: list[list[int]]
) -> None:
    # Products with another number of rows may be summed in another order; the sum of several
    # micro-batches is rounded, not what is summed.
    error = 0.0 if len(counts[0]) == 1 else 1e-6 if dtype is torch.float32 else 2**-7

    def is_equal(one: Tensor, other: Tensor) -> bool:
        return bool((one - other).abs().max() <= error * other.abs().max())

    recipe = Fp8Recipe(gradients, by_row, ALONE)
    rows_of = torch.tensor(counts)
    size = int(rows_of.sum())
    x = draw(size, 24, dtype=dtype)
    weight = draw(len(counts), 20, 24, dtype=dtype)
    bias = draw(len(counts), 20, dtype=dtype)
    grad = draw(size, 20, seed=1, dtype=dtype)
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    y = Fp8Experts(recipe, ALONE, sharded)(*leaves, rows_of)
    y.backward(grad)
    grad_x, grad_weight, grad_bias = (leaf.grad for leaf in leaves)
    assert grad_x is not None
    assert grad_weight is not None
    assert grad_bias is not None
    sums = torch.zeros(len(counts), 20, 24)
    start = 0
    for expert, size in ((expert, size) for expert, sizes in enumerate(counts) for size in sizes):
        rows = slice(start, start + size)
        start += size
        if not size:
            continue
        alone = [value.clone().requires_grad_() for value in (x[rows], weight[expert])]
        # Row-parallel layers add the bias to what is rounded.
        expected = Fp8Linear(recipe, ALONE, 0)(*alone, None)
        assert is_equal(y[rows], expected + bias[expert])
        expected.backward(grad[rows])
        assert alone[0].grad is not None
        assert alone[1].grad is not None
        assert is_equal(grad_x[rows], alone[0].grad)
        sums[expert] += alone[1].grad.float()
    assert is_equal(grad_weight, sums.to(dtype))
    assert torch.equal(grad_bias[0], grad[: sum(counts[0])].sum(0))


@pytest.mark.parametrize("by_row", [False, True])
def test_rows_without_an_expert_are_in_no_range(by_row: bool) -> None:
    """They follow those of the last expert, and have gradients of zero."""
    layer = Fp8Experts(Fp8Recipe(E5M2, by_row, ALONE), ALONE, 1)
    counts = torch.tensor([4, 2])
    weight = draw(2, 20, 24)
    results = []
    for further in (0, 3):
        x = torch.cat([draw(6, 24), torch.full((further, 24), 1e4)]).requires_grad_()
        grad = torch.cat([draw(6, 20, seed=1), torch.zeros(further, 20)])
        leaf = weight.clone().requires_grad_()
        y = layer(x, leaf, None, counts)
        y.backward(grad)
        assert x.grad is not None
        assert not x.grad[6:].any()
        results.append((y[:6], x.grad[:6], leaf.grad))
    # Products with another number of rows may be summed in another order.
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("is_compiled", with_proofs([False, True], [True]))
def test_experts_compute_with_weights_that_are_kept_as_with_others(
    by_row: bool, is_compiled: bool
) -> None:
    """Whose casts a device compiles."""
    recipe = Fp8Recipe(E5M2, by_row, ALONE)
    if is_compiled:
        cpu = torch.device("cpu")
        assert compile_rounding(recipe, cpu, lengths_vary=False, has_experts=True) is None
        assert recipe.round_stack is not round_stack_both
    layer = Fp8Experts(recipe, ALONE, 1)
    results = []
    for is_kept in (False, True):
        x = draw(16, 24, dtype=torch.bfloat16).requires_grad_()
        weight = draw(2, 20, 24, dtype=torch.bfloat16).requires_grad_()
        with recipe.weights.kept() if is_kept else nullcontext():
            y = layer(x, weight, None, torch.tensor([7, 9]))
            y.square().sum().backward()
        results.append([y, x.grad, weight.grad])
    for one, other in zip(results[0], results[1], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_cpus_have_no_kernel_for_groups() -> None:
    assert not has_grouped_kernel(torch.device("cpu"))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("fewest", "names"),
    [
        (1, ["mlp.experts.fc_in", "mlp.experts.fc_out", "mlp.shared.fc_in", "mlp.shared.fc_out"]),
        (20, ["mlp.experts.fc_in", "mlp.experts.fc_out"]),
    ],
)
def test_experts_and_the_shared_one_are_in_fp8(fewest: int, names: list[str], recipe: str) -> None:
    """Experts have 64 inner features, the shared one 16; the router stays in bf16."""
    moe = MoEConfig((4,), moe_ffn_hidden_size=64, moe_shared_expert_intermediate_size=16)
    model = GPTModel(SHAPE, mesh=Mesh.single(), rng=RngStreams(0), seed=3, moe=moe)
    options = {"fp8_format": "hybrid", "fp8_recipe": recipe, "fp8_min_features": fewest}
    compute_in_fp8(model, PrecisionConfig(**options))  # type: ignore[arg-type]
    found = [
        name.removeprefix("layers.0.")
        for name, module in model.named_modules()
        if name.startswith("layers.0.mlp") and getattr(module, "training_product", None) is not None
    ]
    assert sorted(found) == names
