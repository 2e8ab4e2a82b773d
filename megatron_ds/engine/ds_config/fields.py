"""Keys of DeepSpeed files that have the meaning of a field of the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.config.data_files import read_table
from megatron_ds.config.problems import default_flag, option
from megatron_ds.engine.ds_config import values as kinds

CONVERSIONS: dict[str, kinds.Kind] = kinds.KINDS | {
    "first beta": lambda betas: kinds.as_betas(betas)[0],
    "is fp32": lambda dtype: kinds.as_dtype(dtype) == "fp32",
    "is nvme": lambda device: kinds.as_device(device) == "nvme",
    "is offloaded": lambda device: kinds.as_device(device) != "none",
    "optimizer": kinds.as_optimizer,
    "power of 2": lambda power: math.pow(2.0, kinds.as_float(power)),
    "scale": lambda scale: kinds.as_float(scale) or None,
    "second beta": lambda betas: kinds.as_betas(betas)[1],
}
MAPPINGS: tuple[tuple[str, str, kinds.Kind], ...] = tuple(
    (key, name, CONVERSIONS[rule]) for key, name, rule in read_table(__file__)["mappings"]
)
"""Key, field with the same meaning, and the function that converts the key's value."""

OF_OPTIMIZER = {
    "lion": {"adam_beta1": "lion_beta1", "adam_beta2": "lion_beta2"},
    "muon": {"sgd_momentum": "muon_momentum"},
}
"""Fields that keys of `optimizer.params` set instead, by optimizer."""


def mappings(config: Config) -> Iterator[tuple[str, str, kinds.Kind]]:
    """The MAPPINGS for a configuration's optimizer."""
    instead = OF_OPTIMIZER.get(config.optimizer.optimizer, {})
    for key, name, convert in MAPPINGS:
        yield key, instead.get(name, name), convert


def field_value(config: Config, name: str) -> Any:
    """The value of a field, whatever its group."""
    return getattr(getattr(config, GROUP_OF_FIELD[name]), name)


def as_flag(name: str, value: Any, flag_of: Callable[[str], str] = option) -> str:
    """The flag that gives a field a value: `--clip-grad 0.5`, `--bf16`."""
    if isinstance(value, bool):
        # The flag of a switch that is on by default turns it off.
        return default_flag(name) if value else flag_of(name)
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([flag_of(name), *map(str, values)])
