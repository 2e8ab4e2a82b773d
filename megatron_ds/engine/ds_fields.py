"""Keys of DeepSpeed files that have the meaning of a field of the configuration."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import GROUPS, Config
from megatron_ds.config.problems import default_flag, option
from megatron_ds.engine.ds_values import (
    as_bool,
    as_device,
    as_dtype,
    as_float,
    as_int,
    as_optimizer,
)


@dataclass(frozen=True)
class KeyFieldMapping:
    """A key and the field with the same meaning."""

    key: str
    field: str
    read: Callable[[Any], Any] = as_bool
    """Converts the key's value to the field's."""


MAPPINGS = (
    KeyFieldMapping("train_batch_size", "global_batch_size", as_int),
    KeyFieldMapping("train_micro_batch_size_per_gpu", "micro_batch_size", as_int),
    KeyFieldMapping("gradient_clipping", "clip_grad", as_float),
    KeyFieldMapping("zero_optimization.stage", "zero_stage", as_int),
    KeyFieldMapping(
        "zero_optimization.offload_optimizer.device",
        "cpu_optimizer",
        lambda value: as_device(value) != "none",
    ),
    KeyFieldMapping("zero_optimization.offload_param.device", "remote_device", as_device),
    KeyFieldMapping("fp16.enabled", "fp16"),
    KeyFieldMapping("fp16.loss_scale", "loss_scale", lambda value: as_float(value) or None),
    KeyFieldMapping(
        "fp16.initial_scale_power",
        "initial_loss_scale",
        lambda value: math.pow(2.0, as_float(value)),
    ),
    KeyFieldMapping("fp16.min_loss_scale", "min_loss_scale", as_float),
    KeyFieldMapping("fp16.loss_scale_window", "loss_scale_window", as_int),
    KeyFieldMapping("fp16.hysteresis", "hysteresis", as_int),
    KeyFieldMapping("bf16.enabled", "bf16"),
    KeyFieldMapping(
        "data_types.grad_accum_dtype",
        "accumulate_allreduce_grads_in_fp32",
        lambda value: as_dtype(value) == "fp32",
    ),
    KeyFieldMapping("optimizer.type", "optimizer", as_optimizer),
    KeyFieldMapping("optimizer.params.lr", "lr", as_float),
    KeyFieldMapping("optimizer.params.eps", "adam_eps", as_float),
    KeyFieldMapping("optimizer.params.weight_decay", "weight_decay", as_float),
    KeyFieldMapping("optimizer.params.momentum", "sgd_momentum", as_float),
    KeyFieldMapping("activation_checkpointing.partition_activations", "partition_activations"),
    KeyFieldMapping("activation_checkpointing.cpu_checkpointing", "checkpoint_in_cpu"),
    KeyFieldMapping(
        "activation_checkpointing.contiguous_memory_optimization", "contiguous_checkpointing"
    ),
    KeyFieldMapping(
        "activation_checkpointing.synchronize_checkpoint_boundary", "synchronize_each_layer"
    ),
    KeyFieldMapping("activation_checkpointing.profile", "profile_backward"),
)


def field_value(config: Config, name: str) -> Any:
    """The value of a field, whatever its group."""
    return getattr(getattr(config, _group_of(name)), name)


def replace_fields(config: Config, values: dict[str, Any]) -> Config:
    """A copy of the configuration with other values of some fields."""
    for name, value in values.items():
        group = _group_of(name)
        changed = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group: changed})
    return config


def as_flag(name: str, value: Any, flag_of: Callable[[str], str] = option) -> str:
    """The flag that gives a field a value: `--clip-grad 0.5`, `--bf16`."""
    if isinstance(value, bool):
        # The flag of a switch that is on by default turns it off.
        return default_flag(name) if value else flag_of(name)
    values = value if isinstance(value, tuple) else (value,)
    return " ".join([flag_of(name), *map(str, values)])


def _group_of(name: str) -> str:
    return next(
        group
        for group, kind in GROUPS.items()
        if any(item.name == name for item in dataclasses.fields(kind))
    )
