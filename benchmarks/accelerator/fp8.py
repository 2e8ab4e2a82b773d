"""Linear layers in fp8: each by its size, and steps of training, next to bf16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accelerator import train
from benchmarks.accelerator.models import SIZES
from benchmarks.accelerator.processes import Row
from benchmarks.accelerator.sweep import timed

RECIPES = ("tensorwise", "rowwise", "blockwise")
FACTORS = ((1, 3), (1, 1), (1, 4), (4, 1))
"""Input and output features of the layers of a model, in hidden sizes."""
BF16 = "bf16"


def layers(device: torch.device, *, tokens: int, hidden: Sequence[int]) -> Iterator[Row]:
    """Measure forward and backward of linear layers, with the casts of weights.

    Args:
        device: Device to measure.
        tokens: Rows of the input.
        hidden: Hidden sizes, whose layers are measured.

    Yields:
        Name of the recipe, features, seconds, and the ratio to those in bf16, below 1 if faster.
    """
    shapes = dict.fromkeys(
        (size * inputs, size * outputs) for size in hidden for inputs, outputs in FACTORS
    )
    for inputs, outputs in shapes:
        x = torch.randn(tokens, inputs, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16)
        weight.requires_grad_()
        gradient = torch.randn(tokens, outputs, device=device, dtype=torch.bfloat16)
        plain = 0.0
        for name, product in _products(device).items():
            row: Row = {"name": name, "inputs": inputs, "outputs": outputs}
            row |= timed(functools.partial(_both_passes, product, x, weight, gradient), device)
            if name == BF16:
                plain = row.get("seconds", 0.0)
            elif plain and "seconds" in row:
                row["ratio"] = row["seconds"] / plain
            yield row


def _both_passes(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor, gradient: Tensor
) -> None:
    torch.autograd.grad(product(x, weight), (x, weight), gradient)


def _products(device: torch.device) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """By recipe x W^T for x and W; only those for which the device has kernels, or a CPU."""
    from megatron_ds.config.devices import is_host
    from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe
    from megatron_ds.parallel.fp8.rounding import E5M2, has_kernel, scalings_of
    from megatron_ds.parallel.mesh import Mesh

    alone = Mesh.single().tp
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {BF16: F.linear}
    for name in RECIPES:
        block = 128 if name == "blockwise" else None
        by_row = name == "rowwise"
        scalings = scalings_of(by_row=by_row, block=block)
        if is_host(device.type) or all(has_kernel(device, scaling) for scaling in scalings):
            layer = Fp8Linear(Fp8Recipe(E5M2, by_row, alone, block=block), alone, 0)

            def multiply(x: Tensor, weight: Tensor, layer: Fp8Linear = layer) -> Tensor:
                y: Tensor = layer(x, weight, None)
                return y

            products[name] = multiply
    return products


def steps(sizes: Sequence[str], how: train.Measurement, *, fewest: int) -> Iterator[Row]:
    """Measure training steps in bf16 and with each recipe, and in bf16 again.

    Args:
        sizes: Keys of SIZES.
        how: Steps, rates and flags.
        fewest: Value of --fp8-min-features.

    Yields:
        The rows of `train.measure`, with the ratio of tokens per second to the first run in bf16.
        That of the second one tells how much the device's speed changes.
    """
    for size in sizes:
        plain = 0.0
        for name in (BF16, *RECIPES, f"{BF16} again"):
            flags = ["--fp8-format", "hybrid", "--fp8-recipe", name]
            flags += ["--fp8-min-features", str(fewest)]
            extra = flags if name in RECIPES else []
            run = dataclasses.replace(how, extra=(*how.extra, *extra))
            for row in train.measure(size, SIZES[size], ("default",), run):
                rate = row.get("tokens_per_second", 0.0)
                plain = plain or rate
                yield {**row, "name": name, "ratio": rate / plain if plain else 0.0}


def lines(row: Row) -> Iterator[str]:
    """Format the figures of a layer or of a step."""
    if "size" in row:
        yield from train.lines(row)
        yield f"    {row['ratio']:.3f} of the tokens per second in bf16"
        return
    title = f"{row['inputs']:6} to {row['outputs']:6} features, {row['name']:10}"
    if "failure" in row:
        yield f"{title} {row['failure']}"
        return
    ratio = f", {row['ratio']:.2f} of bf16" if "ratio" in row else ""
    yield f"{title} {row['seconds'] * 1e3:9.3f} ms{ratio}"
