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
        SyntaxError: If it is no expression.
        TypeError: If its value is no list.
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
    """Whether each layer is one of a pattern: N for every N-th, counted from 1, and 0 for none, or
    a list as of `layer_pattern` with 1 for these layers.

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
    """The shortest pattern of some layers, as of `chosen_layers`."""
    every = layers.index(True) + 1 if True in layers else 0
    is_regular = chosen_layers(str(every), len(layers)) == tuple(layers)
    return str(every if is_regular else [int(is_chosen) for is_chosen in layers])
