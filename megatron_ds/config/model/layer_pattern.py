"""Values of layers, from Megatron's patterns."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

MAX_LAYERS = 10_000
"""Largest number in a pattern over layers."""


def layer_pattern(text: str) -> list[int]:
    """A value of each layer, from an expression of lists, sums and repetitions: ([1]*3+[0])*4.

    Raises:
        SyntaxError: If it is not an expression.
        TypeError: If its value is not a list.
        ValueError: If it has other operations or values.
    """

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(int() as integer) if integer <= MAX_LAYERS:
                return integer
            case ast.List(elements):
                return [value(element) for element in elements]
            case ast.BinOp(left, ast.Add(), right):
                return value(left) + value(right)
            case ast.BinOp(left, ast.Mult(), right):
                return value(left) * value(right)
        raise ValueError

    return [*value(ast.parse(text.strip(), mode="eval").body)]


def chosen_layers(pattern: str, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer matches a pattern: N for every N-th layer, counted from 1, 0 for no layer,
    or a list in the syntax of `layer_pattern` with 1 for matching layers.

    Raises:
        ValueError: If it is neither, or has another number of layers.
    """
    if pattern.strip().isdecimal():
        every = int(pattern) or num_layers + 1
        return tuple(layer % every == 0 for layer in range(1, num_layers + 1))
    try:
        values = layer_pattern(pattern)
    except (SyntaxError, TypeError) as error:
        raise ValueError from error
    if len(values) != num_layers:
        raise ValueError
    return tuple(map(bool, values))


def pattern_of(layers: Sequence[bool]) -> str:
    """The shortest pattern for which `chosen_layers` returns `layers`."""
    every = layers.index(True) + 1 if True in layers else 0
    is_regular = chosen_layers(str(every), len(layers)) == tuple(layers)
    return str(every if is_regular else [int(is_chosen) for is_chosen in layers])
