"""Kinds of values in a DeepSpeed file.

A kind checks a value of the file and converts it to the type of the configuration.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_ds.config.devices import OFFLOAD_TARGETS
from megatron_ds.config.options.optimizer_specs import SPECS

Kind = Callable[[Any], Any]
"""Checks and converts a value. Raises ValueError with the reason if the value is invalid."""

DTYPE_ALIASES = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


def _of_type(expected: type, reason: str) -> Kind:
    def convert(value: Any) -> Any:
        if not isinstance(value, expected):
            raise ValueError(reason)
        return value

    return convert


as_bool = _of_type(bool, "must be true or false")
as_str = _of_type(str, "must be a string")
as_object = _of_type(dict, "must be an object")


def as_float(value: Any) -> float:
    # Python's integers are unbounded; one beyond the range of floats is not a usable number.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:
        raise ValueError("must be a number")
    return float(value)


def as_int(value: Any) -> int:
    """An integer, which may be written as 2e8."""
    if as_float(value) != int(value):
        raise ValueError("must be an integer")
    return int(value)


def as_size(value: Any) -> int:
    if as_int(value) < 0:
        raise ValueError("must not be negative")
    return int(value)


def as_dtype(value: Any) -> str:
    """ "fp32", "fp16" or "bf16"."""
    name = DTYPE_ALIASES.get(str(value), str(value))
    if name not in ("fp32", "fp16", "bf16"):
        raise ValueError("must be fp32, fp16 or bf16")
    return name


def as_device(value: Any) -> str:
    if value not in OFFLOAD_TARGETS:
        raise ValueError('must be "none", "cpu" or "nvme"')
    return str(value)


def as_optimizer(value: Any) -> str:
    """The value of --optimizer."""
    optimizers = [spec for spec in SPECS if not spec.switch]
    for spec in optimizers:
        types = {name.lower() for name in spec.file_types}
        if str(value).lower() in types.union(spec.file_aliases):
            return spec.name
    *names, last = (name for spec in optimizers for name in spec.file_types)
    reason = f"must be {', '.join(names)} or {last}"
    raise ValueError(f"{reason}; tools/ds_config.py migrate replaces 1-bit optimizers and Lamb")


def as_betas(value: Any) -> tuple[float, float]:
    try:
        first, second = map(as_float, value)
    except (TypeError, ValueError):
        raise ValueError("must be two numbers") from None
    return first, second


def as_is(value: Any) -> Any:
    """Any value, unchanged."""
    return value


KINDS: dict[str, Kind] = {
    "bool": as_bool,
    "float": as_float,
    "int": as_int,
    "size": as_size,
    "str": as_str,
    "dtype": as_dtype,
    "device": as_device,
    "betas": as_betas,
    "object": as_object,
    "any": as_is,
}
