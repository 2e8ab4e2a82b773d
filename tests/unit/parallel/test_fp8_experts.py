"""Experts in fp8 on a CPU: their products are those of linear layers in fp8.

Claim (precision): the grouped products of experts in fp8 are, bit for bit, those of each expert's
rows of a micro-batch and its matrix as a linear layer in fp8 rounds them, forward and backward,
with one scale and with scales of rows
"""

from __future__ import annotations

import functools
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from megatron_ds.config import MoEConfig, PrecisionConfig
from megatron_ds.model.fp8_compilation import compile_rounding
from megatron_ds.model.fp8_layers import compute_in_fp8
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.fp8.casts import EAGER_PARTS, cast_parts, largest_of_parts, parts_of
from megatron_ds.parallel.fp8.grouped import (
    Fp8Experts,
    Parts,
    _multiply_columns_by_kernel,
    _multiply_groups_by_kernel,
    has_grouped_kernel,
)
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2, Rounded
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams
from tests.proofs.cases import with_proofs
from tests.unit.parallel.test_fp8 import ALONE, SHAPE, draw

COUNTS = [[[5], [0], [9], [2]], [[5, 3], [0, 0], [9, 1], [0, 2]]]
"""Rows of each expert from each micro-batch, of one and of two."""
BACKENDS = [
    (None, False),
    (None, True),
    ("aot_eager", True),
    ("aot_eager", False),
    ("inductor", False),
    ("inductor", True),
]
"""Of torch.compile, or none, and whether rows have scales."""


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
    y = Fp8Experts(recipe, ALONE, sharded)(*leaves, Parts.of(recipe, rows_of, size))
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
    recipe = Fp8Recipe(E5M2, by_row, ALONE)
    layer = Fp8Experts(recipe, ALONE, 1)
    counts = torch.tensor([4, 2])
    weight = draw(2, 20, 24)
    results = []
    for further in (0, 3):
        x = torch.cat([draw(6, 24), torch.full((further, 24), 1e4)]).requires_grad_()
        grad = torch.cat([draw(6, 20, seed=1), torch.zeros(further, 20)])
        leaf = weight.clone().requires_grad_()
        y = layer(x, leaf, None, Parts.of(recipe, counts, len(x)))
        y.backward(grad)
        assert x.grad is not None
        assert not x.grad[6:].any()
        results.append((y[:6], x.grad[:6], leaf.grad))
    # Products with another number of rows may be summed in another order.
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("backend", "by_row"), with_proofs(BACKENDS, BACKENDS[3:]))
def test_experts_compute_with_compiled_casts_and_kept_weights_as_with_others(
    backend: str | None, by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): so do casts of experts' weights and rows that a device compiles"""
    results = []
    for is_compiled, is_kept in ((False, False), (backend is not None, True)):
        recipe = Fp8Recipe(E5M2, by_row, ALONE)
        if is_compiled:
            monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
            options = {"lengths_vary": False, "keeps_weights": is_kept, "has_experts": True}
            problem = compile_rounding(recipe, torch.device("cpu"), Mesh.single(), **options)
            assert problem is None
            assert recipe.part_casts != EAGER_PARTS
        layer = Fp8Experts(recipe, ALONE, 1)
        x = draw(512, 24, dtype=torch.bfloat16).requires_grad_()
        weight = draw(3, 20, 24, dtype=torch.bfloat16).requires_grad_()
        with recipe.weights.kept() if is_kept else nullcontext():
            parts = Parts.of(recipe, torch.tensor([[200, 0], [7, 71], [34, 130]]), len(x))
            y = layer(x, weight, None, parts)
            y.square().sum().backward()
        results.append([y, x.grad, weight.grad])
    for one, other in zip(results[0], results[1], strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("counts", [*COUNTS, [[100], [0], [64], [130]], [[0, 1], [300, 129]]])
@pytest.mark.parametrize("further", [0, 70])
def test_parts_are_the_rows_of_an_expert_from_a_micro_batch(
    counts: list[list[int]], further: int
) -> None:
    sizes = [size for row in counts for size in row]
    rows = sum(sizes) + further
    ends, of_experts, of_rows, first = parts_of(torch.tensor(counts), rows)
    assert ends.tolist() == [*itertools.accumulate(sizes[:-1]), rows]
    assert of_experts.tolist() == [*itertools.accumulate(map(sum, counts[:-1])), rows]
    numbers = [part for part, size in enumerate([*sizes, further]) for _ in range(size)]
    assert of_rows.tolist() == numbers
    x = draw(rows, 24)
    largest, by_token = largest_of_parts(x, of_rows, first, len(sizes), True)
    wanted = [
        part.abs().amax(0) if len(part) else torch.zeros(24) for part in x.split([*sizes, further])
    ]
    assert torch.equal(largest, torch.stack(wanted[:-1]))
    (of_all,) = largest_of_parts(x, of_rows, first, len(sizes), False)
    assert torch.equal(of_all, largest.amax(1, keepdim=True))
    assert torch.equal(by_token, x.abs().amax(1, keepdim=True))


def test_a_rank_without_rows_has_no_largest_values() -> None:
    """Other ranks may have rows of the same micro-batches."""
    for by_row, width in ((False, 1), (True, 24)):
        _, _, of_rows, first = parts_of(torch.tensor([[0], [0]]), 0)
        x = torch.zeros(0, 24)
        largest, *by_token = largest_of_parts(x, of_rows, first, 2, by_row)
        assert torch.equal(largest, torch.zeros(2, width))
        codes, scale, columns, scales = cast_parts(x, largest, of_rows, E4M3, True, *by_token)
        assert [codes.shape, scale.shape, columns.shape] == [(0, 24), (0, 1), (24, 0)]
        assert torch.equal(scales, torch.ones(2, 24))


@pytest.mark.parametrize("by_row", [False, True])
def test_the_kernel_takes_the_operands_of_grouped_products_in_e4m3_only(by_row: bool) -> None:
    """torch checks types, shapes and strides on a device without numbers, too."""
    for gradients in (E4M3, E5M2):
        recipe = Fp8Recipe(gradients, by_row, ALONE)
        layer = Fp8Experts(recipe, ALONE, 1)
        parts = Parts.of(recipe, torch.tensor([[16], [48]]), 64)
        x = layer.round_rows(draw(64, 32), E4M3, parts, is_sharded=False)
        grad = layer.round_rows(draw(64, 48), gradients, parts, is_sharded=False)
        weight = draw(2, 48, 32)
        ends = parts.ends.to("meta")
        for multiply, a, b, shape in (
            (_multiply_groups_by_kernel, x[0], layer.round_weight(weight, 2), (64, 48)),
            (_multiply_groups_by_kernel, grad[0], layer.round_weight(weight, 1), (64, 32)),
            (_multiply_columns_by_kernel, grad[1], x[1], (2, 48, 32)),
        ):
            moved = (Rounded(m.codes.to("meta"), m.scale.to("meta")) for m in (a, b))
            refused = a.codes.dtype is E5M2
            with pytest.raises(RuntimeError, match="E4M3") if refused else nullcontext():
                assert multiply(*moved, ends).shape == shape


def test_cpus_have_no_kernel_for_groups() -> None:
    assert not has_grouped_kernel(torch.device("cpu"), E4M3)


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
