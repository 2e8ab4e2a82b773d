"""Values of layers, from Megatron's patterns."""

from __future__ import annotations

import ast
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
