"""Linear layers in fp8 on a CPU: what is rounded to what, and the products of it.

Claim (precision): linear layers in fp8 are, bit for bit, products of numbers rounded by the stated
rule, forward and backward, with one scale for a tensor or for each row and column
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor

from megatron_ds.config import Config, ModelConfig, PrecisionConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.declaration.fp8 import fp8_problems
from megatron_ds.model.fp8_compilation import compile_rounding
from megatron_ds.model.fp8_layers import compute_in_fp8, rounded_weights, trace_products
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.fp8 import rounding
from megatron_ds.parallel.fp8.casts import EAGER, EAGER_PARTS, Casts
from megatron_ds.parallel.fp8.compiled import compiled
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe, RoundedWeights
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2, multiply, multiply_by_kernel, round_matrix
from megatron_ds.parallel.linear import ColumnParallelLinear
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams
from megatron_ds.parallel.weights import linear_weights
from tests.problems import codes
from tests.proofs.cases import with_proofs

FORMATS = {"e4m3": (E4M3, 4, 7, 448.0), "e5m2": (E5M2, 5, 15, 57344.0)}
"""Type, bits of the exponent, its bias, largest number."""
ALONE = Mesh.single().tp
RECIPES = ["tensorwise", "rowwise", "blockwise"]
COMPILED = [("aot_eager", "tensorwise"), *(("inductor", recipe) for recipe in RECIPES)]
"""Backends of torch.compile, of which inductor calls a C++ compiler for seconds, and recipes."""
SHARED = [("aot_eager", True), ("aot_eager", False), ("inductor", False), ("inductor", True)]
BLOCK = 8
SHAPE = ModelConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=2,
    seq_length=8,
    max_position_embeddings=8,
    vocab_size=40,
    hidden_dropout=0.0,
    gelu_approximation="none",  # graphs compute the other one with other last digits
    attention_dropout=0.0,
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    # Of very different sizes, so that some are below the smallest number of the format.
    return (torch.randn(shape, generator=generator) ** 5).to(dtype)


@functools.cache
def numbers_of(name: str) -> list[float]:
    """The numbers of a format that are not negative, in order, by its bits."""
    _, bits, bias, largest = FORMATS[name]
    fraction_bits = 7 - bits
    numbers = []
    for code in range(128):
        exponent, fraction = divmod(code, 2**fraction_bits)
        power = max(exponent, 1) - bias - fraction_bits
        numbers.append(math.ldexp(fraction + (2**fraction_bits if exponent else 0), power))
    return [number for number in numbers if number <= largest]


def nearest(value: float, name: str) -> float:
    """The nearest number of a format; of two, the one whose last bit is 0."""
    numbers = numbers_of(name)
    at = bisect.bisect_left(numbers, abs(value))
    if at == len(numbers):  # above the largest one by rounding
        return math.copysign(numbers[-1], value)
    below = max(at - 1, 0)
    to_upper = numbers[at] - abs(value)
    to_lower = abs(value) - numbers[below]
    index = min([(to_upper, at % 2, at), (to_lower, below % 2, below)])[2]
    return math.copysign(numbers[index], value)


def round_naively(x: Tensor, dim: int, name: str, by_row: bool) -> tuple[Tensor, Tensor]:
    """Codes as fp32 numbers, with the summed dimension last, and scales [rows, 1]."""
    rows = x.float() if dim == 1 else x.float().t()
    codes = torch.empty_like(rows)
    scales = []
    for index, row in enumerate(rows):
        amax = (row if by_row else rows).abs().max()
        scale = amax / FORMATS[name][3] if amax > 0 else torch.ones(())
        scales.append(scale)
        codes[index] = torch.tensor([nearest(float(value / scale), name) for value in row])
    return codes, torch.stack(scales).view(-1, 1)


def round_blocks_naively(
    x: Tensor, dim: int, name: str, block: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Codes as fp32 numbers, with the summed dimension last, and scales of the same shape."""
    rows = x.float() if dim == 1 else x.float().t()
    codes = torch.empty_like(rows)
    scales = torch.empty_like(rows)
    height, width = block
    for top, left in itertools.product(
        range(0, rows.shape[0], height), range(0, rows.shape[1], width)
    ):
        part = slice(top, top + height), slice(left, left + width)
        amax = float(rows[part].abs().max())
        scale = 1.0
        if amax > 0:
            scale = 2.0 ** math.ceil(math.log2(amax / FORMATS[name][3]))
        scales[part] = scale
        codes[part] = torch.tensor(
            [[nearest(value / scale, name) for value in row] for row in rows[part].tolist()]
        )
    return codes, scales


def values_product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    return (a[0] * a[1]) @ (b[0] * b[1]).t()


def product_of(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
    return a[0] @ b[0].t() * a[1] * b[1].t()


def recipe_of(name: str, gradients: str = "hybrid") -> Fp8Recipe:
    block = BLOCK if name == "blockwise" else None
    gradient_format = E5M2 if gradients == "hybrid" else E4M3
    return Fp8Recipe(gradient_format, name == "rowwise", ALONE, block=block)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_numbers_are_rounded_to_the_nearest_of_the_format(
    name: str, by_row: bool, dim: int
) -> None:
    x = draw(24, 20)
    x[3] = 0.0
    x[0, :4] = torch.tensor([448.0, 13.0, 15.0, -0.0]) * 2.0**8  # ties with this largest number
    rounded = round_matrix(x, dim, FORMATS[name][0], by_row=by_row, groups=())
    codes, scales = round_naively(x, dim, name, by_row)
    assert torch.equal(rounded.codes.float(), codes)
    assert torch.equal(rounded.scale.expand_as(scales), scales)
    assert rounded.codes.is_contiguous()
    assert torch.equal(rounded.values(), codes * scales)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [(1, 8), (8, 8), (5, 64)])
def test_blocks_are_rounded_with_scales_that_are_powers_of_two(
    name: str, block: tuple[int, int]
) -> None:
    """Claim (precision): blocks of numbers in fp8 have scales that are powers of two, by which no
    number of a block is larger than the format's"""
    x = draw(24, 20)
    x[:8, :8] = 0.0
    x[9, :] = FORMATS[name][3] / 8  # a quotient that is a power of two
    rounded = rounding.round_blocks(x, FORMATS[name][0], block)
    codes, scales = round_blocks_naively(x, 1, name, block)
    assert torch.equal(rounded.codes.float(), codes)
    assert torch.equal(rounded.values(), codes * scales)
    assert rounded.scale.shape == tuple(-(-s // b) for s, b in zip((24, 20), block, strict=True))
    assert torch.equal(rounded.transposed().values(), rounded.values().t())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, 1.0),
        (1.0000001, 2.0),
        (1.5, 2.0),
        (0.75, 1.0),
        (2.0**-126, 2.0**-126),
        (1.1 * 2.0**-126, 2.0**-125),
        (2.0**100 * 1.01, 2.0**101),
        (math.inf, math.inf),
    ],
)
def test_scales_are_rounded_up_to_a_power_of_two(value: float, expected: float) -> None:
    assert rounding.power_of_two_above(torch.tensor([value])).item() == expected
    assert rounding.power_of_two_above(torch.tensor([math.nan])).isnan().all()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_numbers_of_blocks_that_are_not_finite_stay_visible(value: float) -> None:
    x = draw(4, 16)
    x[2, 3] = value
    a = rounding.round_blocks(x, E4M3, (1, BLOCK))
    y = multiply(a, rounding.round_blocks(draw(5, 16), E4M3, (BLOCK, BLOCK)), None, torch.float32)
    assert y[2].isnan().all()
    assert y[:2].isfinite().all()


@pytest.mark.parametrize("amax", [0.0, 1e-43, 1e-38])
def test_ranges_of_zeros_and_the_smallest_numbers_have_scale_one(amax: float) -> None:
    rounded = round_matrix(torch.full((3, 4), amax), 1, E4M3, by_row=True, groups=())
    assert torch.equal(rounded.scale, torch.ones(3, 1))
    assert not rounded.codes.float().any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("by_row", [False, True])
def test_numbers_that_are_not_finite_stay_visible(value: float, by_row: bool) -> None:
    x = draw(4, 16)
    x[2, 3] = value
    a = round_matrix(x, 1, E4M3, by_row=by_row, groups=())
    b = round_matrix(draw(5, 16), 1, E4M3, by_row=by_row, groups=())
    y = multiply(a, b, None, torch.float32)
    assert y[2].isnan().all()
    assert y[0].isfinite().all() or not by_row


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gradients", ["e4m3", "hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_is_products_of_rounded_numbers(
    recipe: str, gradients: str, dtype: torch.dtype
) -> None:
    by_row = recipe == "rowwise"
    name = "e5m2" if gradients == "hybrid" else "e4m3"
    x = draw(3, 4, 24, dtype=dtype).requires_grad_()
    weight = draw(20, 24, dtype=dtype).requires_grad_()
    bias = draw(20, dtype=dtype).requires_grad_()
    grad = draw(3, 4, 20, seed=1, dtype=dtype)
    y = Fp8Linear(recipe_of(recipe, gradients), ALONE, 0)(x, weight, bias)
    y.backward(grad)

    rows = x.detach().flatten(0, 1)
    g = grad.flatten(0, 1)
    multiplied = product_of
    round_e4m3 = functools.partial(round_naively, name="e4m3", by_row=by_row)
    round_gradient = functools.partial(round_naively, name=name, by_row=by_row)
    round_weight = round_e4m3
    if recipe == "blockwise":
        multiplied = values_product
        round_e4m3 = functools.partial(round_blocks_naively, name="e4m3", block=(1, BLOCK))
        round_gradient = functools.partial(round_blocks_naively, name=name, block=(1, BLOCK))
        round_weight = functools.partial(round_blocks_naively, name="e4m3", block=(BLOCK, BLOCK))
    wanted = multiplied(round_e4m3(rows, 1), round_weight(weight.detach(), 1))
    wanted = wanted + bias.detach().float()
    grad_x = multiplied(round_gradient(g, 1), round_weight(weight.detach(), 0))
    grad_weight = multiplied(round_gradient(g, 0), round_e4m3(rows, 0))
    assert torch.equal(y.flatten(0, 1), wanted.to(dtype))
    assert x.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    assert torch.equal(x.grad.flatten(0, 1), grad_x.to(dtype))
    assert torch.equal(weight.grad, grad_weight.to(dtype))
    assert torch.equal(bias.grad, g.sum(0))
    exact = rows.double() @ weight.detach().double().t() + bias.detach().double()
    assert 1e-3 < (y.flatten(0, 1) - exact).norm() / exact.norm() < 0.1  # 3 bits, not 7


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_kernel_multiplies_the_same_numbers(by_row: bool, dtype: torch.dtype) -> None:
    """The kernel of devices, as torch has it for CPUs, where it is not used."""
    a = round_matrix(draw(32, 48), 1, dtype, by_row=by_row, groups=())
    b = round_matrix(draw(16, 48), 1, E4M3, by_row=by_row, groups=())
    bias = draw(16, dtype=torch.bfloat16)
    wanted = multiply(a, b, bias, torch.bfloat16).float()
    found = multiply_by_kernel(a, b, bias, torch.bfloat16).float()
    assert (found - wanted).abs().max() <= 2**-7 * wanted.abs().max()
    assert not rounding.has_kernel(torch.device("cpu"), (by_row, None, None))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("is_traced", [False, True])
def test_the_kernel_takes_the_operands_of_all_products(
    recipe: str, is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refuses some strides of scales. Whether there is a kernel is decided in no graph."""
    results = []
    for has_kernel in (False, True):
        answer = MagicMock(return_value=has_kernel)
        monkeypatch.setattr(rounding, "has_kernel", answer)
        leaves = [draw(*shape, dtype=torch.bfloat16) for shape in ((32, 64), (48, 64), (48,))]
        x, weight, bias = (leaf.requires_grad_() for leaf in leaves)
        layer: Any = Fp8Linear(recipe_of(recipe), ALONE, 0)
        if is_traced:
            layer.prepare(weight)
            rounding.keep_trials_out_of_graphs()
            torch.compiler.reset()
            layer = torch.compile(layer, backend="aot_eager", fullgraph=True)
        y = layer(x, weight, bias)
        y.backward(draw(32, 48, seed=1, dtype=torch.bfloat16))
        scaling = recipe == "rowwise", None, None
        assert answer.mock_calls == [call(torch.device("cpu"), scaling)] * 3
        results.append([y.detach(), x.grad, weight.grad, bias.grad])
    for one, other in zip(*results, strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).abs().max() <= 2**-7 * one.abs().max()


@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(48, 128, 128), (80, 256, 640)])
def test_the_kernel_takes_scales_of_blocks(
    is_square: bool, rows: int, outputs: int, columns: int
) -> None:
    """torch checks shapes and strides on a device without numbers, too."""
    a = rounding.round_blocks(draw(rows, columns), E4M3, (1, 128))
    b = rounding.round_blocks(draw(outputs, columns), E4M3, (128 if is_square else 1, 128))
    assert rounding._fits(a, b)
    for of_b in (b, b.transposed().transposed()):
        moved = (
            rounding.Rounded(x.codes.to("meta"), x.scale.to("meta"), x.block) for x in (a, of_b)
        )
        y = multiply_by_kernel(*moved, None, torch.bfloat16)
        assert y.shape == (rows, outputs)


@pytest.mark.parametrize(
    ("outputs", "columns", "side", "expected"),
    [
        (128, 256, 128, True),
        (144, 256, 128, False),
        (144, 256, 1, True),
        (136, 256, 1, False),
        (128, 272, 1, False),
        (144, 272, None, True),
        (144, 264, None, False),
    ],
)
def test_products_of_other_sizes_need_no_kernel(
    outputs: int, columns: int, side: int | None, expected: bool
) -> None:
    if side is None:
        a, b = (
            round_matrix(draw(size, columns), 1, E4M3, by_row=True, groups=())
            for size in (16, outputs)
        )
    else:
        a = rounding.round_blocks(draw(16, columns), E4M3, (1, 128))
        b = rounding.round_blocks(draw(outputs, columns), E4M3, (side, 128))
    assert rounding._fits(a, b) == expected


def test_gradients_scaled_by_powers_of_two_are_rounded_alike() -> None:
    """Losses are divided by the micro-batches of a step."""
    x = draw(12, 16)
    for by_row in (False, True):
        one, other = (
            round_matrix(value, 1, E5M2, by_row=by_row, groups=()) for value in (x, x / 8)
        )
        assert torch.equal(one.codes.float(), other.codes.float())
        assert torch.equal(one.scale, other.scale * 8)


@pytest.mark.parametrize("recipe", RECIPES)
def test_weights_are_rounded_once_in_a_step(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded: list[Any] = []

    def count(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
        rounded.append(x)
        return rounding.round_along(x, *args)

    rule = recipe_of(recipe)
    monkeypatch.setattr(rule, "weight_casts", Casts(round_along=count))
    layer = Fp8Linear(rule, ALONE, 0)
    weight = torch.nn.Parameter(draw(16, 16))
    x = draw(4, 16).requires_grad_()
    outputs = []
    for _ in range(2):
        with rule.weights.kept():
            for _ in range(3):
                outputs.append(layer(x, weight, None))
                outputs[-1].sum().backward()
        weight.data *= 3.0  # by no operation that a version counts
    assert len(rounded) == 2
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[3])


def test_layer_computes_in_fp8_in_training_only() -> None:
    weights = linear_weights("", (16, 16), None, bias=False, std=1.0)
    init: Any = SimpleNamespace(normal=lambda name, std: lambda shape, dim, ranges: draw(*shape))
    layer = ColumnParallelLinear(*weights, group=ALONE, init=init)
    x = draw(4, 16)
    exact = layer(x)
    layer.training_product = Fp8Linear(recipe_of("tensorwise"), ALONE, 0)
    assert not torch.equal(layer(x), exact)
    assert torch.equal(layer.eval()(x), exact)


def model_of(**options: Any) -> GPTModel:
    model = GPTModel(SHAPE, mesh=Mesh.single(), rng=RngStreams(0), seed=3)
    compute_in_fp8(model, PrecisionConfig(**{"fp8_min_features": 1, **options}))
    return model


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"first_last_layers_bf16": True}, [1, 2]),
        ({"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 0}, [0, 1, 2]),
        ({"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3}, []),
        ({"num_layers_at_end_in_bf16": 3}, [0, 1, 2, 3]),
    ],
)
def test_linear_layers_of_the_selected_layers_are_in_fp8(
    options: dict[str, Any], numbers: list[int]
) -> None:
    model = model_of(fp8_format="hybrid", fp8_recipe="rowwise", **options)
    names = [
        name
        for name, module in model.named_modules()
        if getattr(module, "training_product", None) is not None
    ]
    parts = ["attention.proj", "attention.qkv", "mlp.fc_in", "mlp.fc_out"]
    assert sorted(names) == [f"layers.{number}.{part}" for number in numbers for part in parts]
    assert list(model.state_dict()) == list(model_of().state_dict())
    assert (rounded_weights(model) is None) == (not numbers)


@pytest.mark.parametrize(
    ("sizes", "fewest", "expected"),
    [
        ((2048, 2048), 1024, True),
        ((2048, 2032), 1024, False),
        ((1024, 4096), 1024, False),
        ((1376, 4128), 1024, True),
        ((4096, 14336), 1024, True),
        ((4096, 14344), 1024, False),  # no multiple of 16
        ((14344, 4096), 1024, False),
        ((16, 32), 1, True),
        ((8, 32), 1, False),
    ],
)
def test_small_layers_are_left_out(sizes: tuple[int, int], fewest: int, expected: bool) -> None:
    """Claim (precision): linear layers that are too small to gain by fp8, or whose sizes are no
    multiples of 16, compute in the run's precision, by a rule of the full matrix's sizes"""
    precision = PrecisionConfig(fp8_format="e4m3", fp8_recipe="rowwise", fp8_min_features=fewest)
    assert precision.rounds(*sizes) == expected


def test_one_layer_of_a_block_may_be_left_out() -> None:
    """The feed-forward layers, with 32 and 128 features, count as 25.6; qkv, 96 x 32, as 24."""
    model = model_of(fp8_format="hybrid", fp8_recipe="rowwise", fp8_min_features=25)
    names = {
        name.partition(".")[2].partition(".")[2]
        for name, module in model.named_modules()
        if getattr(module, "training_product", None) is not None
    }
    assert names == {"mlp.fc_in", "mlp.fc_out"}


@pytest.mark.parametrize(
    ("fewest", "expected"),
    [(25, []), (26, ["fp8-of-small-layers"]), (1024, ["fp8-of-small-layers"])],
)
def test_a_model_without_large_layers_is_refused(fewest: int, expected: list[str]) -> None:
    precision = PrecisionConfig(
        bf16=True, fp8_format="e4m3", fp8_recipe="rowwise", fp8_min_features=fewest
    )
    assert codes(fp8_problems(Config(model=SHAPE, precision=precision))) == expected
    assert codes(fp8_problems(Config(model=SHAPE))) == []


def compile_for(rule: Fp8Recipe, **options: bool) -> Problem | None:
    defaults = {"lengths_vary": False, "keeps_weights": True, "has_experts": False}
    return compile_rounding(rule, torch.device("cpu"), Mesh.single(), **{**defaults, **options})


@pytest.mark.parametrize(("backend", "recipe"), with_proofs(COMPILED, COMPILED[1:]))
@pytest.mark.parametrize("is_kept", [False, True])
def test_compiled_casts_round_the_same_numbers(
    backend: str, recipe: str, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): casts to fp8 that a device compiles round as eager ones, with weights that
    are kept for a step and with those that ZeRO 3 gathers"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    # Of the trial's size, for which the casts are compiled already.
    x = draw(512, 512, dtype=torch.bfloat16)
    weight = draw(512, 512, seed=1, dtype=torch.bfloat16)
    results = []
    for is_compiled in (False, True):
        rule = recipe_of(recipe)
        if is_compiled:
            assert compile_for(rule, keeps_weights=is_kept) is None
            assert rule.casts != EAGER
            assert rule.weight_casts != EAGER
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with rule.weights.kept() if is_kept else nullcontext():
            y = Fp8Linear(rule, ALONE, 0)(*leaves, None)
            y.square().sum().backward()
        results.append([y, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("backend", "by_row"), with_proofs(SHARED, SHARED[1:]))
def test_compiled_casts_of_scales_that_ranks_share_compute_the_same(
    backend: str, by_row: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (precision): so do casts whose largest values ranks reduce between two compiled parts,
    of weights, activations and experts"""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    on_device = compiled(EAGER, {}, dynamic=False)
    for x in (draw(48, 40, dtype=torch.bfloat16), draw(3, 24, 40, dtype=torch.bfloat16)):
        for dims in ((-1, -2), (-1,), (-2,)):
            largest = on_device.largest_values(x, dims, by_row)
            for one, other in zip(largest, rounding.largest_values(x, dims, by_row), strict=True):
                assert torch.equal(one, other)
            of_ranks = tuple(amax * 1.7 for amax in largest)
            codes = [
                function(x, of_ranks, dims, E4M3) for function in (on_device.cast, rounding.cast)
            ]
            for one, other in zip(*codes, strict=True):
                assert torch.equal(one.float(), other.float())
    x = draw(300, 40, dtype=torch.bfloat16)
    experts = compiled(EAGER_PARTS, {}, dynamic=False)
    results: list[list[Tensor]] = []
    for functions in (experts, EAGER_PARTS):
        parts = functions.parts_of(torch.tensor([100, 0, 170]), len(x))
        _, _, of_rows, first = parts
        largest = functions.largest_of_parts(x, of_rows, first, 3, by_row)
        of_parts, *by_token = (amax * 1.7 for amax in largest)
        options = x, of_parts, of_rows, E5M2, True, *by_token
        results.append([*parts, *largest, *functions.cast_parts(*options)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.float(), other.float())


def test_casts_are_compiled_for_any_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has some, and torch compiles a function eight times by default."""
    compiled_graphs: list[Any] = []

    def backend(graph: Any, examples: Any) -> Any:
        compiled_graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    torch.compiler.reset()
    on_device = compiled(EAGER, {}, dynamic=False)
    for _, columns in itertools.product(range(2), range(8, 20)):
        on_device.round_along(draw(4, columns), (-1,), E4M3, True, None)
    assert len(compiled_graphs) == 12


@pytest.mark.parametrize("name", [*vars(EAGER), *vars(EAGER_PARTS)])
@pytest.mark.parametrize("code", ["compilation-inaccurate", "compilation-failed"])
def test_casts_that_a_compiler_rounds_otherwise_stay_eager(
    name: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager = (vars(EAGER) | vars(EAGER_PARTS))[name]

    def inaccurate(*arguments: Any) -> Any:
        result = eager(*arguments)
        return *result[:-1], result[-1] * 1.1

    def compile_one(function: Any, **_: Any) -> Any:
        result = inaccurate if code == "compilation-inaccurate" else None
        return result if function is eager else function

    monkeypatch.setattr(torch, "compile", compile_one)
    rule = recipe_of("rowwise")
    mesh: Any = SimpleNamespace(tp=Group((0, 1), 0, None), sequence=ALONE, experts=ALONE)
    options = {"lengths_vary": False, "keeps_weights": True, "has_experts": True}
    problem = compile_rounding(rule, torch.device("cpu"), mesh, **options)
    assert problem is not None
    assert problem.code == code
    assert (rule.casts, rule.weight_casts, rule.part_casts) == (EAGER, EAGER, EAGER_PARTS)


@pytest.mark.parametrize("recipe", with_proofs(RECIPES, RECIPES[1:]))
def test_layers_with_their_casts_in_one_graph_compute_the_same(recipe: str) -> None:
    """Claim (precision): layers compiled with `--compile` compute in fp8 as eager ones do, with the
    casts of activations and gradients in their graphs"""
    block = {"fp8_block_size": BLOCK} if recipe == "blockwise" else {}
    model = model_of(fp8_format="hybrid", fp8_recipe=recipe, **block)
    tokens = torch.arange(18).view(2, 9)
    weights = rounded_weights(model)
    assert weights is not None
    results = []
    for is_compiled in (False, True):
        if is_compiled:
            for layer in model.layers.values():
                layer._layer = torch.compile(layer._all, backend="aot_eager", fullgraph=True)
            trace_products(model)
        for factor in (2.0, 0.5):  # the weights of the second step are others
            model.zero_grad()
            with weights.kept():
                loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
                loss.backward()
            assert not weights.prepared
            gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
            results.append([loss.detach(), *gradients])
            for parameter in model.parameters():
                parameter.data *= factor
    for step in range(2):
        for one, other in zip(results[step], results[step + 2], strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_kernels_of_casts_are_combined_on_a_device(
    device: str, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {} if recipe is None else {"fp8_format": "hybrid", "fp8_recipe": recipe}
    (block, *_) = model_of(**options).to(device).blocks()
    requested: list[dict[str, Any]] = []

    def compile_one(function: Any, *, options: dict[str, Any], **_: Any) -> Any:
        requested.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile_one)
    block.compile_parts(is_core_traceable=True, dynamic=False)
    assert requested
    is_combined = recipe is not None and device != "cpu"
    assert all(one.get("combo_kernels", False) == is_combined for one in requested)


def test_a_layer_without_prepared_weights_is_in_no_graph() -> None:
    model = model_of(fp8_format="hybrid", fp8_recipe="tensorwise")
    tokens = torch.arange(18).view(2, 9)
    losses = [model(tokens[:, :-1], tokens[:, 1:]).mean()]
    for layer in model.layers.values():
        layer._layer = torch.compile(layer._all, backend="eager")
    losses.append(model(tokens[:, :-1], tokens[:, 1:]).mean())
    assert torch.equal(*losses)


def test_rounded_weights_are_kept_by_layer_during_a_step() -> None:
    weights = RoundedWeights()
    calls = itertools.count()
    layers = object(), object()

    def taken() -> list[int]:
        return [weights.take(layer, lambda: next(calls)) for layer in layers]

    with weights.kept():
        assert taken() == taken() == [0, 1]
    assert not weights.is_keeping
    with weights.kept():
        assert taken() == [2, 3]
