"""Keys of DeepSpeed files that have the meaning of a field of the configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.config.options.optimizer_specs import ADAM
from megatron_ds.config.problems import default_flag, option
from megatron_ds.engine.ds_config import values as kinds


def _first_beta(betas: Any) -> float:
    return kinds.as_betas(betas)[0]


def _second_beta(betas: Any) -> float:
    return kinds.as_betas(betas)[1]


def _is_fp32(dtype: Any) -> bool:
    return kinds.as_dtype(dtype) == "fp32"


def _is_nvme(device: Any) -> bool:
    return kinds.as_device(device) == "nvme"


def _is_offloaded(device: Any) -> bool:
    return kinds.as_device(device) != "none"


def _power_of_2(power: Any) -> float:
    return math.pow(2.0, kinds.as_float(power))


def _loss_scale(scale: Any) -> float | None:
    return kinds.as_float(scale) or None


MAPPINGS: tuple[tuple[str, str, kinds.Kind], ...] = (
    ("train_batch_size", "global_batch_size", kinds.as_int),
    ("train_micro_batch_size_per_gpu", "micro_batch_size", kinds.as_int),
    ("gradient_clipping", "clip_grad", kinds.as_float),
    ("zero_optimization.offload_optimizer.device", "cpu_optimizer", _is_offloaded),
    ("zero_optimization.offload_optimizer.device", "nvme_optimizer", _is_nvme),
    ("zero_optimization.offload_optimizer.ratio", "optimizer_offload_fraction", kinds.as_float),
    ("zero_optimization.offload_optimizer.nvme_path", "nvme_path", kinds.as_str),
    ("zero_optimization.offload_param.device", "remote_device", kinds.as_device),
    ("zero_optimization.offload_param.nvme_path", "nvme_path", kinds.as_str),
    ("zero_optimization.zero_hpz_partition_size", "zero_hpz_partition_size", kinds.as_int),
    ("fp16.enabled", "fp16", kinds.as_bool),
    ("fp16.loss_scale", "loss_scale", _loss_scale),
    ("fp16.initial_scale_power", "initial_loss_scale", _power_of_2),
    ("fp16.min_loss_scale", "min_loss_scale", kinds.as_float),
    ("fp16.loss_scale_window", "loss_scale_window", kinds.as_int),
    ("fp16.hysteresis", "hysteresis", kinds.as_int),
    ("bf16.enabled", "bf16", kinds.as_bool),
    ("bf16.bf16_master_weights_and_grads", "bf16_master_weights", kinds.as_bool),
    ("bf16.bf16_optimizer_states", "bf16_master_weights", kinds.as_bool),
    ("zero_optimization.stage", "zero_stage", kinds.as_int),
    ("data_types.grad_accum_dtype", "accumulate_allreduce_grads_in_fp32", _is_fp32),
    ("optimizer.type", "optimizer", kinds.as_optimizer),
    ("optimizer.params.lr", "lr", kinds.as_float),
    ("optimizer.params.betas", "adam_beta1", _first_beta),
    ("optimizer.params.betas", "adam_beta2", _second_beta),
    ("optimizer.params.eps", "adam_eps", kinds.as_float),
    ("optimizer.params.weight_decay", "weight_decay", kinds.as_float),
    ("optimizer.params.momentum", "sgd_momentum", kinds.as_float),
    ("activation_checkpointing.partition_activations", "partition_activations", kinds.as_bool),
    ("activation_checkpointing.cpu_checkpointing", "checkpoint_in_cpu", kinds.as_bool),
    (
        "activation_checkpointing.contiguous_memory_optimization",
        "contiguous_checkpointing",
        kinds.as_bool,
    ),
    (
        "activation_checkpointing.synchronize_checkpoint_boundary",
        "synchronize_each_layer",
        kinds.as_bool,
    ),
    ("activation_checkpointing.profile", "profile_backward", kinds.as_bool),
)
"""Key, field with the same meaning, and the function that converts the key's value. The stage is
behind the precision, which decides what stage 0 is."""


def mappings(config: Config) -> Iterator[tuple[str, str, kinds.Kind]]:
    """The MAPPINGS for a configuration's optimizer, whose keys may have fields of their own."""
    spec = config.optimizer.spec
    instead = dict(zip(ADAM.betas, spec.betas, strict=False))
    if (momentum := spec.option_of("momentum")) is not None:
        instead["sgd_momentum"] = momentum
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
