"""Divisors and multiples that messages suggest instead of an invalid size."""

from __future__ import annotations

import math
from collections.abc import Iterable


def nearest_multiples(value: int, unit: int) -> str:
    """The positive multiples of `unit` below and above `value`, for messages."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below > 0 else f"{unit}"


def divisors(value: int) -> list[int]:
    """The divisors of a positive number in ascending order."""
    small = [number for number in range(1, math.isqrt(value) + 1) if value % number == 0]
    return sorted({*small, *(value // number for number in small)})


def join_numbers(values: Iterable[int]) -> str:
    return ", ".join(map(str, values))


def count_processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
