"""Compiles the casts to fp8 of a model, after a trial."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.model.block import COMBINED
from megatron_ds.model.kernels.elementwise import compilation_problem
from megatron_ds.parallel.fp8.casts import EAGER, EAGER_PARTS, Casts, PartCasts
from megatron_ds.parallel.fp8.compiled import compiled
from megatron_ds.parallel.fp8.linear import BOTH, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import E4M3, Block, Dims, is_shared
from megatron_ds.parallel.mesh import Mesh


def compile_rounding(
    recipe: Fp8Recipe,
    device: torch.device,
    mesh: Mesh,
    *,
    lengths_vary: bool,
    keeps_weights: bool,
    has_experts: bool,
) -> Problem | None:
    """Compile the casts to fp8 if they then round as eager ones.

    Args:
        recipe: The recipe of a model, which is changed.
        device: Device of the activations.
        mesh: Process groups of the model.
        lengths_vary: Compile for all numbers of tokens, not for each one.
        keeps_weights: Whether rounded weights are kept for a step, along both dimensions.
        has_experts: Whether the model has experts.

    Returns:
        Why the casts stay eager.
    """
    options: dict[str, Any] = {} if is_host(device.type) else COMBINED
    dynamic = None if lengths_vary else False
    casts = compiled(EAGER, options, dynamic=dynamic)
    weight_casts = compiled(EAGER, options, dynamic=False)
    # Each micro-batch of further ranks has another number of rows.
    of_rows = True if mesh.experts.size > 1 else dynamic
    part_casts = compiled(EAGER_PARTS, options, dynamic=of_rows)

    def pairs() -> Results:
        shares = is_shared((mesh.tp, mesh.sequence)) and recipe.block is None
        trial = _Trial(recipe, device, shares)
        yield from trial.of_activations(casts)
        yield from trial.of_weights(weight_casts, keeps_weights, has_experts)
        if has_experts:
            yield from trial.of_parts(part_casts)

    problem = compilation_problem(pairs)
    if problem is None:
        recipe.casts = casts
        recipe.weight_casts = weight_casts
        recipe.part_casts = part_casts
    return problem


Results = Iterator[tuple[Tensor, Tensor]]
"""What compiled functions compute, and what it should be."""


class _Trial:
    """Compares compiled casts with eager ones.

    Args:
        recipe: How the layers are rounded.
        device: Device of the activations.
        is_shared: Whether ranks share scales.
    """

    def __init__(self, recipe: Fp8Recipe, device: torch.device, is_shared: bool) -> None:
        self._recipe = recipe
        self._is_shared = is_shared
        generator = torch.Generator(device).manual_seed(0)
        self._x = torch.randn(512, 512, generator=generator, device=device).pow(3).bfloat16()

    def of_activations(self, casts: Casts) -> Results:
        recipe = self._recipe
        block = None if recipe.block is None else (1, recipe.block)
        for dtype in dict.fromkeys((E4M3, recipe.gradients)):
            yield from self._matrix(casts, self._x, BOTH, dtype, block)

    def of_weights(self, casts: Casts, is_kept: bool, has_experts: bool) -> Results:
        recipe = self._recipe
        block = None if recipe.block is None else (recipe.block, recipe.block)
        stack = [self._x.view(4, 128, 512)] if has_experts else []
        for weight in (self._x, *stack):
            for dims in (BOTH,) if is_kept else ((-1,), (-2,)):
                yield from self._matrix(casts, weight, dims, E4M3, block)

    def of_parts(self, casts: PartCasts) -> Results:
        by_row = self._recipe.by_row
        counts = torch.tensor([0, 200, 312], device=self._x.device)
        expected = EAGER_PARTS.parts_of(counts, len(self._x))
        yield from _numbers(casts.parts_of(counts, len(self._x)), expected)
        of_rows, first = expected[2:]
        rows = self._x, of_rows, first, len(counts)
        for dtype in dict.fromkeys((E4M3, self._recipe.gradients)):
            options = dtype, by_row, True
            rounded = casts.round_parts(*rows, *options)
            yield from _numbers(rounded, EAGER_PARTS.round_parts(*rows, *options))
            if not self._is_shared:
                continue
            largest = EAGER_PARTS.largest_of_parts(*rows, by_row)
            yield from _numbers(casts.largest_of_parts(*rows, by_row), largest)
            shared = self._x, largest[0], of_rows, dtype, True, *largest[1:]
            yield from _numbers(casts.cast_parts(*shared), EAGER_PARTS.cast_parts(*shared))

    def _matrix(
        self, casts: Casts, x: Tensor, dims: Dims, dtype: torch.dtype, block: Block | None
    ) -> Results:
        by_row = self._recipe.by_row
        rounded = casts.round_along(x, dims, dtype, by_row, block)
        yield from _numbers(rounded, EAGER.round_along(x, dims, dtype, by_row, block))
        if self._is_shared:
            largest = EAGER.largest_values(x, dims, by_row)
            yield from _numbers(casts.largest_values(x, dims, by_row), largest)
            rounded = casts.cast(x, largest, dims, dtype)
            yield from _numbers(rounded, EAGER.cast(x, largest, dims, dtype))


def _numbers(compiled: Iterable[Tensor], eager: Iterable[Tensor]) -> Results:
    for one, other in zip(compiled, eager, strict=True):
        yield one.float(), other.float()
